"""How a plan runs: pipeline and memory, told before it does."""

from __future__ import annotations

import pytest

import topoplan
from collectives.backends.tcp.chunk_order import footprint
from tests.support.hand_plans import SHAPES, forest_plan, three_phase_plan
from topoplan.errors import UsageError
from topoplan.machine.cluster import cluster
from topoplan.machine.cluster_network import Server
from topoplan.plans.plan import COLLECTIVES, Plan


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_scratch_is_at_most_fan_in_times_depth(collective: str, shape: str) -> None:
    """Two chunks for each joining stream and one for every level it waits; partial sums are no more than that again."""
    plan = forest_plan(8, collective, shape)
    found = footprint(plan)
    assert max(found.scratch) <= 2 * found.fan_in * (plan.depth + 2)
    if collective in ("broadcast", "allgather"):
        assert max(found.scratch) == 0


def test_memory_does_not_grow_with_the_number_of_chunks_a_chain_holds() -> None:
    """In a chain a rank joins one child: nothing has to wait for a sibling."""
    found = footprint(forest_plan(8, "allreduce", "chain"))
    assert set(found.scratch) == set(found.held) == {0}


@pytest.mark.parametrize(
    ("plan", "steps"),
    [
        (forest_plan(8, "allreduce", "chain"), 14),
        (forest_plan(8, "allreduce", "star"), 2),
        (three_phase_plan([[0, 1, 2], [3, 4, 5, 6, 7]]), 8),
    ],
)
def test_a_chunk_takes_a_step_for_every_hop_of_its_longest_way(plan: Plan, steps: int) -> None:
    assert footprint(plan).steps == steps


@pytest.mark.thorough
def test_plans_of_a_million_edges_are_refused() -> None:
    plan = topoplan.plan(cluster([Server(topoplan.load("dgx-a100"), count=128)], nic_gbps=200), "allgather")
    with pytest.raises(UsageError, match=f"at most 200000 tree edges .*, got {1024 * 1023};"):
        footprint(plan)


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_an_all_to_all_keeps_chunks_only_of_blocks_that_it_relays(shape: str) -> None:
    """Two for each such block and one for every level; along stars, where nothing is relayed, none."""
    plan = forest_plan(8, "alltoall", shape)
    relayed = [0] * 8
    for shard in plan.shards:
        for edge in shard.stages[0].top_down()[:-1]:
            relayed[edge.child] += 1
    for chunks, blocks in zip(footprint(plan).scratch, relayed, strict=True):
        assert chunks <= 2 * blocks * (plan.depth + 2)
    assert (max(relayed) == 0) == (shape == "star")

"""One-shot allreduce: everybody sends everything to everybody, alone or between servers."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

import topoplan
from topoplan.errors import InfeasibleError, PlanError, UsageError
from topoplan.machine.topology import Topology
from topoplan.model.dataflow import LAUNCH, START_UP
from topoplan.model.event_simulation import run_events
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Shard
from topoplan.schedules.low_latency import one_shot, one_shot_along, one_shot_servers

ALPHA = START_UP["nvlink"]


def servers(count: int, gpus: list[int] | None = None, access: str = "direct") -> Topology:
    one = topoplan.Server(topoplan.load("dgx-a100"), gpus, count=count)
    return topoplan.cluster([one], nic_gbps=200, nics=8, nic_access=access)


@pytest.mark.parametrize(
    ("name", "rate", "depth"), [("dgx-2", 10, 1), ("v100x4", 25, 1), ("dgx-1v", 12.5, 2)]
)
def test_every_rank_takes_in_what_all_others_have(name: str, rate: float, depth: int) -> None:
    """A rank receives N - 1 buffers; start-ups are those of the longest way, and no more."""
    plan = one_shot(topoplan.load(name))
    report = topoplan.verify(plan)
    assert (report.rate, plan.depth) == (rate, depth)
    for road in (topoplan.simulate, run_events):
        assert road(plan, nbytes=0).seconds == pytest.approx(LAUNCH + depth * ALPHA)


def test_along_an_optimal_allgather() -> None:
    """N blocks of an allgather at 1200/7 GB/s are one buffer at an eighth of that."""
    plan = one_shot_along(topoplan.plan(topoplan.load("dgx-1v"), "allgather"))
    assert topoplan.verify(plan).exact_rate == Fraction(1200, 7) / 8


@pytest.mark.parametrize("access", ["direct", "pcie"])
def test_between_servers_each_owner_sends_its_sum_to_the_others(access: str) -> None:
    """Three NICs' worth of eighths leave every NIC: 25 GB/s carry the buffer at 200/3, the GPU's slot at 24 at 64."""
    plan = one_shot_servers(servers(4, access=access))
    assert topoplan.verify(plan).exact_rate == (Fraction(200, 3) if access == "direct" else 64)
    assert topoplan.simulate(plan, nbytes=0).seconds == pytest.approx(
        LAUNCH + 2 * ALPHA + START_UP["network"]
    )


def test_the_file_says_that_older_readers_do_not_know_it() -> None:
    """Such a plan is of format 2, reads back equal, and trees stay of format 1."""
    plan = one_shot(topoplan.load("v100x4"))
    text = plan.to_json()
    assert '"format": "topoplan.plan/2"' in text
    assert Plan.from_json(text) == plan
    assert '"format": "topoplan.plan/1"' in topoplan.plan(topoplan.load("v100x4")).to_json()


def test_a_rank_that_adds_up_less_is_refused() -> None:
    """All must add up what the same ranks have sent, each once: else bits or sums differ."""
    plan = one_shot(topoplan.load("v100x4"))
    (shard,) = plan.shards
    fewer = replace(plan, shards=(replace(shard, stages=shard.stages[:3]),))
    with pytest.raises(PlanError, match="contribution of rank 3 0 times"):
        topoplan.verify(fewer)
    twice = replace(plan, shards=(replace(shard, stages=(*shard.stages, shard.stages[0])),))
    with pytest.raises(PlanError, match="contribution of rank 0 2 times"):
        topoplan.verify(twice)
    broadcast = replace(plan, collective="broadcast", root=0)
    with pytest.raises(PlanError, match="contribution of rank 1 1 times instead of 0"):
        topoplan.verify(broadcast)
    halves = tuple(
        Shard(Fraction(1, 2), stages) for stages in (shard.stages, plan_of_trees().shards[0].stages)
    )
    with pytest.raises(PlanError, match="all shards of a plan with exchanges take the same rounds"):
        topoplan.verify(replace(plan, shards=halves))


def plan_of_trees() -> Plan:
    return topoplan.lowest_tree(topoplan.load("v100x4"))


def test_what_it_is_not_for_is_one_clear_line() -> None:
    with pytest.raises(UsageError, match="one-shot is an allreduce, not broadcast; choose another schedule"):
        one_shot(topoplan.load("dgx-2"), "broadcast")
    with pytest.raises(UsageError, match="all 8 are on s0"):
        one_shot_servers(topoplan.load("dgx-a100"))
    with pytest.raises(InfeasibleError, match=r"each of 2 servers has one GPU, .* use the schedule one-shot"):
        one_shot_servers(servers(2, [0]))

"""Model time on the windows engine: answers by hand, NCCL's where many blocks share the work, and how it grows."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import topoplan
from topoplan.machine.variants import slow_links
from topoplan.model.dataflow import dataflow
from topoplan.model.window_engine import (
    BLACKWELL,
    CHUNKS,
    HOPPER,
    SMALL_BYTES,
    EngineCosts,
    WindowsClock,
    kernel_steps,
)
from topoplan.plans.plan import Plan
from topoplan.plans.shards import ImageShards
from topoplan.units import TOLERANCE

MIB = 1 << 20
COSTS = EngineCosts("round", "by hand", launch=3e-6, hop=1e-6, allreduce_rate=50.0, other_rate=40.0, peak=1e6)
"""Round figures, and a port that nothing fills."""


def along(plan: Plan, costs: EngineCosts, nbytes: int, blocks: int, limit: int = CHUNKS[-1]) -> float:
    return float(WindowsClock(plan, costs).times(nbytes, np.array([blocks]), np.array([limit]))[0][0])


@cache
def planned(name: str, collective: str, schedule: str = "trees") -> Plan:
    makers = {"one-hop": topoplan.one_hop, "ring": topoplan.ring, "trees": topoplan.plan}
    return makers[schedule](topoplan.load(name), collective)


def pair() -> Plan:
    """A broadcast from one GPU to another over 450 GB/s."""
    return topoplan.plan(topoplan.load("dgx-h100"), "broadcast", gpus=[0, 1])


def test_one_block_sends_chunk_after_chunk() -> None:
    """1 MiB in eight chunks of 128 KiB: each a hop and its bytes at 40 GB/s; then the last is copied out."""
    chunk = 131072 / 40e9
    assert along(pair(), COSTS, MIB, 1) == pytest.approx(3e-6 + 8 * (1e-6 + chunk) + chunk, rel=1e-9)


def test_blocks_share_the_chunks_of_a_tree() -> None:
    """Four blocks for one step of each rank: 32 chunks of 32 KiB, eight to a block."""
    chunk = 32768 / 40e9
    assert along(pair(), COSTS, MIB, 4) == pytest.approx(3e-6 + 8 * (1e-6 + chunk) + chunk, rel=1e-9)


def test_chunks_are_no_shorter_than_the_least() -> None:
    """16 KiB on four blocks: two of them have a chunk of 8 KiB, and the others none."""
    chunk = 8192 / 40e9
    assert along(pair(), COSTS, 16384, 4) == pytest.approx(3e-6 + 1e-6 + 2 * chunk, rel=1e-9)


def test_a_port_that_is_full_holds_everything_up() -> None:
    """100 MB through a port of 10 GB/s, with a launch and a hop before it; links of 450 GB/s have time."""
    slow = replace(COSTS, peak=10.0)
    assert along(pair(), slow, 100_000_000, 24) == pytest.approx(4e-6 + 0.01, rel=1e-3)


def test_links_hold_up_what_they_must() -> None:
    """The ranks of a DGX-2 have 150 GB/s: 16 ranks broadcast no faster than that, whatever the port could do."""
    plan = planned("dgx-2", "broadcast")
    assert along(plan, replace(COSTS, other_rate=1e4), 1 << 30, 24) == pytest.approx(
        (1 << 30) / 150e9, rel=0.01
    )


def test_nothing_takes_a_launch_and_the_hops_in_a_row() -> None:
    """One hop up and one down; a ring of eight, fourteen; each without bytes."""
    for schedule, hops in (("one-hop", 2), ("ring", 14)):
        clock = WindowsClock(planned("dgx-h100", "allreduce", schedule), HOPPER)
        assert clock.along_trees(0).seconds == pytest.approx(HOPPER.launch + hops * HOPPER.hop)


@pytest.mark.parametrize(
    ("name", "costs", "microseconds"), [("dgx-h100", HOPPER, 94), ("dgx-b200", BLACKWELL, 65)]
)
def test_many_blocks_reach_the_time_of_nccls_own_kernel(
    name: str, costs: EngineCosts, microseconds: float
) -> None:
    """AllReduce of 16 MiB in one hop up and one down, as NCCL's: the port decides, and NCCL has a barrier more."""
    seconds = along(planned(name, "allreduce", "one-hop"), costs, 16 * MIB, 600)
    assert seconds * 1e6 == pytest.approx(microseconds - 1e6 * costs.hop, rel=0.03)


def test_the_longest_step_of_one_hop_is_shared_by_many_blocks() -> None:
    """A root moves 14 eighths of 16 MiB, half of all that its rank does: 12 parts on 24 blocks, one part on one."""
    plan = planned("dgx-h100", "allreduce", "one-hop")
    alone = 14 / 8 * 16 * MIB / (HOPPER.allreduce_rate * 1e9)
    assert along(plan, HOPPER, 16 * MIB, 24) < alone / 4
    assert along(plan, HOPPER, 16 * MIB, 1) > 2 * alone


def test_packets_cost_a_launch_a_hop_and_nine_bytes_for_one() -> None:
    """16 KiB to each of seven, which eight blocks of 65 GiB/s send at nearly 320 GiB/s; one byte more goes by trees."""
    clock = WindowsClock(planned("dgx-h100", "allreduce"), HOPPER)
    bytes_moved = 7 * 9 * 16384
    assert clock.seconds(SMALL_BYTES) == pytest.approx(4.5e-6 + bytes_moved / 343.6e9, rel=0.02)
    assert clock.setting(SMALL_BYTES).packets
    assert not clock.setting(SMALL_BYTES + 1).packets


def test_packets_are_bounded_by_the_links() -> None:
    """Two GPUs on one link of 20 GB/s: two bytes on the wire for each."""
    plan = topoplan.plan(topoplan.load("dgx-1p"), "allreduce", gpus=[0, 1])
    assert WindowsClock(plan, HOPPER).seconds(16384) == pytest.approx(4.5e-6 + 2 * 16384 / 20e9)


@pytest.mark.parametrize("wire", ["nvswitch0->gpu3", "gpu3->nvswitch0"])
def test_packets_take_what_the_slowest_link_needs_in_either_direction(wire: str) -> None:
    """At 0.01 GB/s seven GPUs send one, or one sends seven, 2 bytes for each byte of 1 KiB."""
    plan = topoplan.plan(slow_links("dgx-h100", {wire: 0.01}))
    time = WindowsClock(plan, HOPPER).seconds(1 << 10)
    assert time == pytest.approx(4.5e-6 + 2 * 7 * 1024 / 0.01e9, rel=1e-6)
    assert time > 1024 / (plan.bound * 1e9)


def test_only_an_allreduce_goes_in_packets_and_only_along_low_trees() -> None:
    """A ring of eight is too high for it, as in the engine; other collectives have no such kernel."""
    assert WindowsClock(planned("dgx-h100", "allreduce", "ring"), HOPPER).packets_to == 0
    for collective in ("broadcast", "reduce", "allgather", "reduce_scatter"):
        assert WindowsClock(planned("v100x4", collective), HOPPER).packets_to == 0


def test_the_fewest_blocks_that_are_fast_enough_are_taken() -> None:
    """Within 2.5 % of the best, and none below what the figures ask for."""
    plan = planned("dgx-h100", "allreduce", "ring")
    setting = WindowsClock(plan, HOPPER).setting(256 * MIB)
    times = [
        min(along(plan, HOPPER, 256 * MIB, blocks, limit) for limit in CHUNKS) for blocks in range(1, 25)
    ]
    assert setting.seconds == pytest.approx(min(times))
    assert setting.blocks == 1 + next(i for i, time in enumerate(times) if time <= 1.025 * min(times)) < 24
    assert WindowsClock(plan, replace(HOPPER, fewest_blocks=24)).setting(256 * MIB).blocks == 24


@given(
    st.sampled_from(["one-hop", "ring", "trees"]), st.lists(st.integers(0, 1 << 30), min_size=2, max_size=8)
)
def test_time_grows_with_size(schedule: str, sizes: list[int]) -> None:
    """Along trees, with the best setting of each size."""
    clock = WindowsClock(planned("v100x4", "allreduce", schedule), HOPPER)
    times = [clock.along_trees(nbytes).seconds for nbytes in sorted(sizes)]
    assert all(one <= other * (1 + TOLERANCE) for one, other in pairwise(times))


def test_a_compact_plan_takes_as_long_as_all_its_trees() -> None:
    """Templates stand for their images."""
    plan = topoplan.plan(topoplan.nvswitch_cluster(1, gpus=72), "allreduce")
    assert isinstance(plan.shards, ImageShards)
    whole = replace(plan, shards=tuple(plan.shards))
    assert kernel_steps(dataflow(plan)).most == kernel_steps(dataflow(whole)).most
    for nbytes in (1 << 10, 1 << 20, 1 << 28):
        assert along(plan, HOPPER, nbytes, 24) == pytest.approx(along(whole, HOPPER, nbytes, 24), rel=1e-6)


def test_one_gpu_has_nothing_to_move() -> None:
    plan = topoplan.plan(topoplan.load("v100x4"), "allreduce", gpus=[2])
    assert WindowsClock(plan, HOPPER).seconds(MIB) == HOPPER.launch

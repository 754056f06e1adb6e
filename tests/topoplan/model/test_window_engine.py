"""Model time on the windows engine: answers by hand, NCCL's where many blocks share the work; the measured costs."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import topoplan
from topoplan import Device, Plan, Topology, UsageError, slow_links
from topoplan.model import window_engine
from topoplan.model.dataflow import dataflow
from topoplan.model.window_engine import (
    BLACKWELL,
    HOPPER,
    SLOT_BYTES,
    WIDE_BLOCKS,
    EngineCosts,
    WindowsClock,
    costs_of,
    joint_blocks,
    kernel_steps,
    load_costs,
)
from topoplan.plans.shards import ImageShards
from topoplan.units import TOLERANCE

MIB = 1 << 20
COSTS = EngineCosts("round", "by hand", launch=3e-6, hop=1e-6, allreduce_rate=50.0, other_rate=40.0, peak=1e6)
"""Round figures, and a port that nothing fills."""


def along(plan: Plan, costs: EngineCosts, nbytes: int, blocks: int, limit: int = SLOT_BYTES) -> float:
    return float(WindowsClock(plan, costs).times(nbytes, np.array([blocks]), np.array([limit]))[0][0])


@cache
def planned(name: str, collective: str, schedule: str = "trees", gpus: tuple[int, ...] | None = None) -> Plan:
    makers = {"one-hop": topoplan.one_hop_plan, "ring": topoplan.ring_plan, "trees": topoplan.plan}
    return makers[schedule](topoplan.load(name), collective, gpus=gpus)


PAIR = ("dgx-h100", "broadcast", "trees", (0, 1))
"""A broadcast from one GPU to another over 450 GB/s."""
ONE_HOP = ("allreduce", "one-hop")


@pytest.mark.parametrize(
    ("plan", "costs", "nbytes", "blocks", "seconds", "tolerance"),
    [
        # 1 MiB in eight chunks of 128 KiB: each a hop and its bytes at 40 GB/s; then the last is copied out
        (PAIR, COSTS, MIB, 1, 3e-6 + 8 * (1e-6 + 131072 / 40e9) + 131072 / 40e9, 1e-9),
        # four blocks for one step of each rank: two chunks of 128 KiB to a block, for one or four take longer
        (PAIR, COSTS, MIB, 4, 3e-6 + 2 * (1e-6 + 131072 / 40e9) + 131072 / 40e9, 1e-9),
        # chunks have 8 KiB at least: two of four blocks have one, the others none
        (PAIR, COSTS, 16384, 4, 3e-6 + 1e-6 + 2 * 8192 / 40e9, 1e-9),
        # a port of 10 GB/s, with a launch and a hop before it; links of 450 GB/s have time
        (PAIR, replace(COSTS, peak=10.0), 100_000_000, 24, 4e-6 + 0.01, 1e-3),
        # ranks of a DGX-2 have 150 GB/s, whatever the port could do
        (("dgx-2", "broadcast"), replace(COSTS, other_rate=1e4), 1 << 30, 24, (1 << 30) / 150e9, 0.01),
        # NCCL's own kernel, which has a barrier more
        (("dgx-h100", *ONE_HOP), HOPPER, 16 * MIB, 600, 94e-6 - HOPPER.hop, 0.03),
        (("dgx-b200", *ONE_HOP), BLACKWELL, 16 * MIB, 600, 65e-6 - BLACKWELL.hop, 0.03),
    ],
    ids=["one block", "four blocks", "least chunks", "full port", "links", "NCCL, Hopper", "NCCL, Blackwell"],
)
def test_known_times(
    plan: tuple[Any, ...], costs: EngineCosts, nbytes: int, blocks: int, seconds: float, tolerance: float
) -> None:
    assert along(planned(*plan), costs, nbytes, blocks) == pytest.approx(seconds, rel=tolerance)


def test_no_bytes_take_a_launch_and_the_hops_in_a_row() -> None:
    for schedule, hops in (("one-hop", 2), ("ring", 14)):
        clock = WindowsClock(planned("dgx-h100", "allreduce", schedule), HOPPER)
        assert clock.along_trees(0).seconds == pytest.approx(HOPPER.launch + hops * HOPPER.hop)
    alone = topoplan.plan("v100x4", "allreduce", gpus=[2])
    assert WindowsClock(alone, HOPPER).seconds(MIB) == HOPPER.launch


def test_the_longest_step_of_one_hop_is_shared_by_many_blocks() -> None:
    """A root moves 14 eighths of 16 MiB, half of all that its rank does: 12 parts on 24 blocks, one part on one."""
    plan = planned("dgx-h100", "allreduce", "one-hop")
    alone = 14 / 8 * 16 * MIB / (HOPPER.allreduce_rate * 1e9)
    assert along(plan, HOPPER, 16 * MIB, 24) < alone / 4
    assert along(plan, HOPPER, 16 * MIB, 1) > 2 * alone


def test_packets_cost_a_launch_a_hop_and_nine_bytes_for_one() -> None:
    """8 KiB to each of seven, which 16 blocks of 65 GiB/s send at 320 GiB/s; one byte more goes by trees.

    A link of 20 GB/s between two GPUs carries two bytes for each. A ring is too high for packets, as in the engine;
    other collectives have no such kernel.
    """
    clock = WindowsClock(planned("dgx-h100", "allreduce"), HOPPER)
    assert clock.packets_to == 8192
    assert clock.seconds(8192) == pytest.approx(4.5e-6 + 7 * 9 * 8192 / 343.6e9, rel=0.02)
    assert clock.setting(8192).packets
    assert not clock.setting(8193).packets
    plan = topoplan.plan("dgx-1p", "allreduce", gpus=[0, 1])
    assert WindowsClock(plan, HOPPER).in_packets(16384) == pytest.approx(4.5e-6 + 2 * 16384 / 20e9)
    assert WindowsClock(planned("dgx-h100", "allreduce", "ring"), HOPPER).packets_to == 0
    for collective in ("broadcast", "reduce", "allgather", "reduce_scatter"):
        assert WindowsClock(planned("v100x4", collective), HOPPER).packets_to == 0


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["dgx-h100", "dgx-b200", "dgx-1v", "v100x4"])
def test_packets_end_where_trees_are_faster(name: str) -> None:
    """At a power of two, by the machine's figures; given ones change the times, and not what the engine does."""
    plan = planned(name, "allreduce")
    clock = WindowsClock(plan, costs_of(plan.topology)[0])
    assert clock.in_packets(clock.packets_to) <= clock.along_trees(clock.packets_to).seconds
    assert clock.in_packets(2 * clock.packets_to) > clock.along_trees(2 * clock.packets_to).seconds
    assert WindowsClock(plan, COSTS).packets_to == clock.packets_to


def test_what_ranks_must_agree_on_needs_no_exponentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their last bits differ from processor to processor."""
    monkeypatch.setattr(window_engine, "joint_blocks", None)
    for name in ("exp", "log1p", "logaddexp"):
        monkeypatch.setattr(np, name, None)
    clock = WindowsClock(planned("dgx-h100", "allreduce"), HOPPER)
    assert clock.packets_to == 8192
    assert clock.pieces(MIB, np.array([[24], [12], [SLOT_BYTES]])).tolist() == [1]


@pytest.mark.parametrize(
    ("name", "gpus", "nbytes", "microseconds"),
    [
        ("dgx-h100", 8, 4 * MIB, 27.5),
        ("dgx-b300", 6, 4 * MIB, 33.6),
        ("gb300-nvl72", 16, 8 * MIB, 67.2),
    ],
)
def test_medium_sizes_go_in_one_piece(name: str, gpus: int, nbytes: int, microseconds: float) -> None:
    """Where eight pieces take 48.5, 111.5 and 214.5 us, for each chunk costs a hop."""
    plan = planned(name, "allreduce", gpus=tuple(range(gpus)))
    clock = WindowsClock(plan, costs_of(plan.topology)[0])
    assert clock.setting(nbytes).seconds * 1e6 == pytest.approx(microseconds, abs=0.1)


def test_a_ring_goes_in_as_many_pieces_as_fill_its_pipeline() -> None:
    """14 hops in a row on a DGX H100; long buffers have many chunks anyway."""
    clock = WindowsClock(planned("dgx-h100", "allreduce", "ring"), HOPPER)
    setting, sizes = np.array([[24], [2], [SLOT_BYTES]]), [1 << power for power in (16, 18, 20, 22, 24)]
    assert [clock.pieces(nbytes, setting).item() for nbytes in sizes] == [1, 2, 4, 8, 1]


@pytest.mark.parametrize("wire", ["nvswitch0->gpu3", "gpu3->nvswitch0"])
def test_packets_take_what_the_slowest_link_needs_in_either_direction(wire: str) -> None:
    """At 0.01 GB/s seven GPUs send one, or one sends seven, 2 bytes for each byte of 1 KiB."""
    plan = topoplan.plan(slow_links("dgx-h100", {wire: 0.01}))
    time = WindowsClock(plan, HOPPER).in_packets(1 << 10)
    assert time == pytest.approx(4.5e-6 + 2 * 7 * 1024 / 0.01e9, rel=1e-6)
    assert time > 1024 / (plan.bound * 1e9)


def test_the_fewest_blocks_that_are_fast_enough_are_taken() -> None:
    """Within 2.5 % of the best, and none below what the figures ask for."""
    plan = planned("dgx-h100", "allreduce", "ring")
    setting = WindowsClock(plan, HOPPER).setting(256 * MIB)
    times = [along(plan, HOPPER, 256 * MIB, blocks) for blocks in range(1, WIDE_BLOCKS + 1)]
    assert setting.seconds == pytest.approx(min(times))
    assert setting.blocks == 1 + next(i for i, time in enumerate(times) if time <= 1.025 * min(times)) < 24
    assert WindowsClock(plan, replace(HOPPER, fewest_blocks=24)).setting(256 * MIB).blocks == 24


@pytest.mark.thorough
@given(
    st.sampled_from(["one-hop", "ring", "trees"]), st.lists(st.integers(0, 1 << 30), min_size=2, max_size=8)
)
def test_time_grows_with_size(schedule: str, sizes: list[int]) -> None:
    clock = WindowsClock(planned("v100x4", "allreduce", schedule), HOPPER)
    times = [clock.along_trees(nbytes).seconds for nbytes in sorted(sizes)]
    assert all(one <= other * (1 + TOLERANCE) for one, other in pairwise(times))


@pytest.mark.thorough
def test_a_compact_plan_takes_as_long_as_all_its_trees() -> None:
    plan = topoplan.plan(topoplan.nvswitch_cluster(1, gpus=72), "allreduce")
    assert isinstance(plan.shards, ImageShards)
    whole = replace(plan, shards=tuple(plan.shards))
    assert kernel_steps(dataflow(plan)).most == kernel_steps(dataflow(whole)).most
    for nbytes in (1 << 10, 1 << 20, 1 << 28):
        assert along(plan, HOPPER, nbytes, 24) == pytest.approx(along(whole, HOPPER, nbytes, 24), rel=1e-6)


@pytest.mark.parametrize(
    ("costs", "blocks", "microseconds", "bases"),
    [(HOPPER, 7, 94, (4.5e-6, 7.8e-6)), (BLACKWELL, 12, 65, (11e-6, 19.5e-6))],
)
def test_nccl_answers_what_it_is_known_to(
    costs: EngineCosts, blocks: int, microseconds: float, bases: tuple[float, float]
) -> None:
    """AllReduce of 16 MiB among 8 without multicast: its formula, with the fewest blocks within 2.5 % of 64.

    A launch and one hop for packets; a launch and three for kernels between barriers.
    """
    bus_bytes = 2 * 16 * MIB * 7 / 8
    counts = np.arange(1, 65)
    rate = joint_blocks(counts, np.array(costs.peak / costs.allreduce_rate)) * costs.allreduce_rate * 1e9
    seconds = costs.launch + 3 * costs.hop + bus_bytes / rate - 1e-6
    few = int(np.argmax(seconds <= 1.025 * seconds[-1]))
    assert counts[few] == blocks
    assert seconds[few] * 1e6 == pytest.approx(microseconds, abs=0.6)
    assert (costs.launch + costs.hop, costs.launch + 3 * costs.hop) == pytest.approx(bases)


@pytest.mark.parametrize(
    ("gpus", "name", "blocks"),
    [
        ([("NVIDIA H200", "")], "Hopper", 1),
        ([("", "90")], "Hopper", 1),
        ([("B200", "")], "Blackwell", 1),
        ([("", "103")], "Blackwell", 1),
        ([("B200", ""), ("H100", "")], "Hopper", 1),
        ([("H100", ""), ("A100", "")], "Hopper", 24),
        ([("", "")], "Hopper", 24),
    ],
)
def test_the_oldest_gpu_decides(gpus: list[tuple[str, str]], name: str, blocks: int) -> None:
    """A stated capability comes before the model; what is older than all figures takes Hopper's and all blocks."""
    devices = (
        Device(f"gpu{number}", "gpu", model=model, facts=(("sm", sm),) if sm else ())
        for number, (model, sm) in enumerate(gpus)
    )
    costs, words = costs_of(Topology("some", tuple(devices), ()))
    assert (costs.name, costs.fewest_blocks) == (name, blocks)
    assert ("assumed" in words) == (blocks == 24)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    made = replace(HOPPER, name="mine", source="a sweep", hop=2e-6, fewest_blocks=4)
    path.write_text(made.to_json())
    assert load_costs(path) == made
    value = json.loads(HOPPER.to_json())
    del value["packet_factor"], value["fewest_blocks"]
    path.write_text(json.dumps(value))
    assert load_costs(path) == HOPPER


COSTS_JSON = json.loads(HOPPER.to_json())
CUT = {key: value for key, value in COSTS_JSON.items() if key != "hop"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(
            (json.dumps({**COSTS_JSON, key: value}).encode(), message)
            for key, value, message in [
                ("format", "topoplan.engine-costs/2", "'topoplan.engine-costs/2' is not 'topoplan.engine-costs/1'"),
                ("hop", None, "hop"),
                ("hop", "fast", "hop"),
                ("hop", 0, "hop 0 must be a number above zero"),
                ("launch", -1e-6, "launch -1e-06 must be a number above zero"),
                ("peak", float("inf"), "peak inf must be a number above zero"),
                ("peak", 10**400, "peak of more than 19 digits must be a number above zero"),
                ("other_rate", float("nan"), "other_rate nan must be a number above zero"),
                ("fewest_blocks", 25, "fewest_blocks 25 must be a whole number from 1 to 24"),
                ("fewest_blocks", 1.5, "fewest_blocks"),
                ("hops", 1e-6, "key 'hops' is unknown; did you mean 'hop'?"),
            ]
        ),
        (None, "cannot be read: No such file"),
        (b"\xff\xfe", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "format None is not"),
        (json.dumps(CUT).encode(), "has no 'hop'"),
    ],
    ids=lambda value: str(value)[:40],

)  # fmt: skip
def test_refuses_a_file_of_costs(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load_costs(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)

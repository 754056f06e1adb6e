"""Plans as execution plans of MSCCL++: they run, keep the rate and the engine's limits, and say what they take."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

import topoplan
from tests.support.hand_plans import plan_of, stage, star
from topoplan import Plan, Topology, UsageError
from topoplan.engines.exported import Choices
from topoplan.engines.mscclpp_read import ExecutionPlanFile, read_plan_file
from topoplan.engines.mscclpp_read_back import check_execution_plan
from topoplan.engines.registry import export_machine, export_plan
from topoplan.engines.verdict import EngineVerdict, machine_loads
from topoplan.machine.topology import Device, Link, facts
from topoplan.machine.variants import with_all_capabilities
from topoplan.plans.shards import Shard

COLLECTIVES = ("allreduce", "broadcast", "allgather", "reduce_scatter")
EVERY = (*COLLECTIVES, "alltoall")


def exported(plan: Plan, **choices: int) -> tuple[ExecutionPlanFile, EngineVerdict]:
    file = read_plan_file(export_plan(plan, "mscclpp", Choices(**choices)).text)
    return file, check_execution_plan(file, runs=8)


def stated_rate(plan: Plan, choices: Choices | None = None) -> float:
    """GB/s that the file's first note states."""
    return float(export_plan(plan, "mscclpp", choices or Choices()).notes[0].split()[1])


def blocks(file: ExecutionPlanFile) -> int:
    return max(len(gpu.blocks) for gpu in file.gpus)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", EVERY)
@pytest.mark.parametrize(
    "machine", ["dgx-1v", "dgx-2", "pcie-x8", pytest.param("mi250", marks=pytest.mark.thorough)]
)
def test_every_plan_of_the_library_runs_at_its_rate(machine: str, collective: str) -> None:
    """The postcondition holds in eight interleavings, and what is sent loads the links as the file's note says."""
    plan = topoplan.plan(machine, collective)
    _, verdict = exported(plan)
    assert verdict.collective == collective
    loads = machine_loads(verdict.traffic, len(plan.ranks), plan.topology)
    kept = stated_rate(plan)
    assert float(loads.rate) == pytest.approx(kept, rel=1e-5)
    assert kept >= 0.99 * plan.rate - 1e-4


@pytest.mark.sampled
@pytest.mark.parametrize("collective", EVERY)
def test_two_servers_put_over_ports(collective: str) -> None:
    """Two servers of four GPUs, a NIC each: sums land in scratch, totals where they belong, at the plan's rate."""
    plan = topoplan.plan(topoplan.nvswitch_cluster(2, gpus=4), collective)
    file, verdict = exported(plan)
    loads = machine_loads(verdict.traffic, 8, plan.topology)
    assert float(loads.rate) == pytest.approx(plan.rate)
    assert any(gpu.peers["port"] for gpu in file.gpus)
    relays = collective == "alltoall" and plan.height > 1
    lands = collective in ("allreduce", "reduce_scatter") or relays
    assert any(gpu.chunks["s"] for gpu in file.gpus) == lands
    for rank, gpu in enumerate(file.gpus):
        assert {peer // 4 == rank // 4 for peer in gpu.peers["memory"]} <= {True}
        assert {peer // 4 == rank // 4 for peer in gpu.peers["port"]} <= {False}


@pytest.mark.sampled
@pytest.mark.parametrize("machine", ["dgx-1v", "dgx-2"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_packets_need_no_signals(machine: str, collective: str) -> None:
    """Half of every packet is its flag, so half of the rate is left; the file has neither signal nor wait."""
    plan = topoplan.plan(machine, collective)
    made = export_plan(plan, "mscclpp", Choices(protocol="ll"))
    assert check_execution_plan(read_plan_file(made.text), runs=8).collective == collective
    assert "signal" not in made.text
    assert "wait" not in made.text
    assert float(made.notes[0].split()[1]) == pytest.approx(plan.rate / 2, rel=1e-4)


@pytest.mark.thorough
def test_plans_by_size_are_a_file_for_each_range() -> None:
    plans = topoplan.plan_by_size("dgx-1v", sizes=[1 << 10, 1 << 20, 1 << 30])
    made = export_plan(plans, "mscclpp")
    assert [end for end, _ in made.files] == [f".{number}.json" for number in range(len(plans.ranges))]
    sizes = [json.loads(content) for _, content in made.files]
    assert [one["min_message_size"] for one in sizes] == [one.start for one in plans.ranges]
    for one, after in pairwise(sizes):
        assert one["max_message_size"] + 1 == after["min_message_size"]
    for _, content in made.files:
        check_execution_plan(read_plan_file(content.decode()), runs=4)
    assert export_plan(plans, "mscclpp", Choices(size=48 << 20)).text.startswith('{"name"')


def able(name: str) -> Topology:
    return with_all_capabilities(topoplan.load(name))


@pytest.mark.parametrize(
    ("collective", "name"), [("allreduce", "glres"), ("broadcast", "gstore"), ("allgather", "gstore")]
)
def test_switches_add_and_copy_for_the_roots_of_stars(collective: str, name: str) -> None:
    """One operation of each root, between two meetings, at the rate of the plan."""
    plan = topoplan.plan(able("dgx-h100"), collective)
    text = export_plan(plan, "mscclpp").text
    assert name in text
    assert "rre" not in text
    assert stated_rate(plan) == pytest.approx(plan.rate, rel=1e-5)
    assert check_execution_plan(read_plan_file(text), runs=8).traffic == {}


def test_a_plan_that_needs_switches_otherwise_keeps_less() -> None:
    """The engine has no sum of a switch that is not stored to all: the GPUs add, and a note says what rate is left."""
    plan = topoplan.plan(able("dgx-a100"), "reduce_scatter")
    kept = stated_rate(plan)
    loads = machine_loads(exported(plan)[1].traffic, 8, topoplan.load("dgx-a100"))
    assert kept == pytest.approx(float(loads.rate), rel=1e-4)
    assert kept < plan.rate


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("make", "most"),
    [
        (partial(topoplan.plan, "v100x4"), 3),
        (lambda: topoplan.plan(topoplan.nvswitch_cluster(2, gpus=4)), 3),
        *((partial(topoplan.plan, "dgx-1v", collective), 5) for collective in COLLECTIVES),
        (partial(topoplan.ring_plan, "dgx-1v"), 20),
    ],
)
def test_loops_share_blocks_where_few_are_allowed(make: Callable[[], Plan], most: int) -> None:
    file, verdict = exported(make(), max_blocks=most)
    assert blocks(file) <= most
    assert verdict.traffic == exported(make())[1].traffic


def test_shares_are_rounded_to_the_chunks_asked_for_and_the_loss_is_told() -> None:
    """24ths of a DGX-1V in 16 chunks; what the file sends allows the rate that the note says."""
    plan = topoplan.plan("dgx-1v")
    file, verdict = exported(plan, chunks=16)
    assert file.gpus[0].chunks["i"] == 16
    assert "of the plan's" in export_plan(plan, "mscclpp", Choices(chunks=16)).notes[0]
    loads = machine_loads(verdict.traffic, 8, plan.topology)
    assert stated_rate(plan, Choices(chunks=16)) == pytest.approx(float(loads.rate), rel=1e-5)
    assert loads.rate < plan.rate


def test_a_size_that_the_exact_chunks_do_not_divide_gets_others_within_one_percent() -> None:
    """24 chunks do not divide 256 MiB; 128 do, and cost less than 1 %. The unit grows with the size."""
    plan = topoplan.plan("dgx-1v")
    file, _ = exported(plan, size=256 << 20)
    assert (256 << 20) % (16 * file.gpus[0].chunks["i"]) == 0
    assert stated_rate(plan, Choices(size=256 << 20)) >= 0.99 * plan.rate
    four = topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7])
    files = [exported(four, size=size)[0] for size in (1 << 20, 1 << 26, 1 << 31)]
    small, medium, large = (
        max(one.unit for gpu in file.gpus for block in gpu.blocks for one in block.operations)
        for file in files
    )
    assert small < medium < large


def star_of_18() -> Plan:
    """A broadcast to 17 children of one rank."""
    tree = Shard(Fraction(1), (stage("broadcast", 0, star(range(18), 0)),))
    return plan_of(18, "broadcast", [tree], root=0)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("plan", "choices", "message"),
    [
        (partial(topoplan.plan, "dgx-1v", "reduce"), {}, "MSCCL\\+\\+ has no reduce"),
        (partial(topoplan.plan, "dgx-1v", gpus=[3]), {}, "has one GPU"),
        (partial(topoplan.sparse_plan, "dgx-1v", density=0.01), {}, "stages|entries"),
        (partial(topoplan.plan, "dgx-1v"), {"size": 1040}, "multiple of 384 bytes"),
        (partial(topoplan.plan, "dgx-1v"), {"max_blocks": 2}, "--max-blocks"),
        (star_of_18, {}, "needs 17 channels, and a block of MSCCL\\+\\+ has 16"),
        (
            lambda: topoplan.plan(topoplan.nvswitch_cluster(2, gpus=4)),
            {"protocol": "ll"},
            "packets are written inside a server",
        ),
    ],
)
def test_refuses_what_the_engine_lacks(
    plan: Callable[[], Plan], choices: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        export_plan(plan(), "mscclpp", Choices(**choices))


def test_a_machine_is_no_plan_and_nccl_heeds_no_chunks() -> None:
    with pytest.raises(UsageError, match="mscclpp takes a plan"):
        export_machine("dgx-1v", "mscclpp")
    with pytest.raises(UsageError, match="--max-blocks does not go with nccl-topo"):
        export_plan(topoplan.plan("dgx-1v"), "nccl-topo", Choices(max_blocks=3))


def test_the_file_has_the_keys_of_the_engine() -> None:
    """Blink's allocation without a ring takes two chunks and three blocks: two loops up or down and the leaves'."""
    plan = topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7])
    file, _ = exported(plan)
    assert (file.gpus[0].chunks["i"], blocks(file)) == (2, 3)
    text = export_plan(plan, "mscclpp").text
    assert text == export_plan(plan, "mscclpp").text
    value = json.loads(text)
    assert value["collective"] == "allreduce"
    assert list(value)[:6] == ["name", "collective", "protocol", "inplace", "reuse_resources", "gpus"]
    assert text.count('{"id"') == sum(len(gpu["threadblocks"]) + 1 for gpu in value["gpus"])


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ["allreduce", "broadcast", "allgather"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_ranks_read_what_they_pull(collective: str, every: int) -> None:
    """Whether all edges are pulled or some, what a file moves over each pair stays the same, in any order of blocks."""
    machine = topoplan.load("dgx-1v")
    pairs = sorted(
        {(link.src, link.dst) for link in machine.links if {link.src, link.dst} <= {*machine.gpus}}
    )
    known = {
        name: ",".join(source for source, destination in pairs[::every] if destination == name)
        for name in machine.gpus
    }
    devices = tuple(
        replace(one, facts=(*one.facts, *facts(pulls=known[one.name]))) if known.get(one.name) else one
        for one in machine.devices
    )
    plan, pushed = (
        topoplan.plan(replace(machine, devices=devices), collective),
        topoplan.plan(machine, collective),
    )
    text = export_plan(plan, "mscclpp", Choices()).text
    assert exported(plan)[1].traffic == exported(pushed)[1].traffic
    assert '"get"' in text
    assert ('"put"' in text or '"rres"' in text) == (every > 1)
    assert '"get"' not in export_plan(pushed, "mscclpp", Choices()).text


@pytest.mark.parametrize("collective", ["allreduce", "broadcast"])
def test_a_file_keeps_the_rate_of_edges_that_are_pulled(collective: str) -> None:
    """Writes of these GPUs take twenty times as long as reads."""
    gpus = tuple(Device(f"gpu{gpu}", "gpu", "s") for gpu in range(3))
    links = tuple(
        Link(f"gpu{a}", f"gpu{b}", "pcie", 52, push=2.6, pull=52)
        for a in range(3)
        for b in range(3)
        if a != b
    )
    plan = topoplan.plan(Topology("slow writes", gpus, links), collective)
    assert stated_rate(plan) == pytest.approx(plan.rate)
    assert not any(
        "GB/s; the windows engine" in note for note in export_plan(plan, "mscclpp", Choices()).notes
    )

"""NVLink and PCIe in one packing: known optima, islands, staged copies, and the size from which that is faster."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

import topoplan
from tests.support.checkout import Run
from topoplan.errors import InfeasibleError, PlanError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.routing import staged
from topoplan.machine.topology import Device, Link, Topology
from topoplan.model.dataflow import switched_hops
from topoplan.plans.plan import Plan

DGX = topoplan.load("dgx-1v")

KNOWN = [
    ((6, 7), "62", "62", "124", "56", "62", "112"),
    ((4, 5, 6, 7), "83", "112", "448/3", "79", "112", "424/3"),
    ((1, 3, 4, 5), "37", "37", "148/3", "34", "37", "148/3"),
    ((0, 1, 4, 5, 7), "255/4", "87", "435/4", "243/4", "87", "405/4"),
    ((0, 1, 4, 5, 6, 7), "141/2", "87", "522/5", "135/2", "87", "486/5"),
    ((1, 2, 3, 4, 5, 6, 7), "82", "108", "392/3", "79", "108", "392/3"),
    ((0, 1, 2, 3, 4, 5, 6, 7), "648/7", "158", "1296/7", "624/7", "156", "1248/7"),
]
"""Allocations of a DGX-1V with the best allreduce, broadcast and allgather over all wires, then with PCIe staged."""


def two_pairs(*, host: bool = True) -> Topology:
    """Four GPUs on one CPU at 24 GB/s, joined in pairs by NVLink at 56.25 GB/s."""
    devices = (*(Device(f"gpu{number}", "gpu") for number in range(4)), Device("cpu0", "cpu"))
    wires = [(f"gpu{number}", "cpu0", "pcie", 24.0) for number in range(4)] if host else []
    wires += [("gpu0", "gpu1", "nvlink", 56.25), ("gpu2", "gpu3", "nvlink", 56.25)]
    links = [Link(*ends, channel, rate) for a, b, channel, rate in wires for ends in ((a, b), (b, a))]
    return Topology("two pairs", devices, tuple(links))


@pytest.mark.parametrize("channels", ["all", "all-staged"])
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if len(row[0]) == 4 else pytest.mark.thorough) for row in KNOWN],
    ids=lambda row: "".join(map(str, row[0])),
)
def test_known_optima_are_reached_and_proved(
    row: tuple[tuple[int, ...], *tuple[str, ...]], channels: str
) -> None:
    rates = row[1:4] if channels == "all" else row[4:]
    for collective, rate in zip(("allreduce", "broadcast", "allgather"), rates, strict=True):
        made = topoplan.plan(DGX, collective, gpus=row[0], channels=channels)
        report = topoplan.verify(Plan.from_json(made.to_json()))
        assert report.exact_rate == report.exact_bound == Fraction(rate)


@pytest.mark.parametrize("channels", ["all", "all-staged"])
def test_an_all_to_all_takes_all_wires_too(channels: str) -> None:
    assert topoplan.plan(DGX, "alltoall", channels=channels).rate == 79.0


@pytest.mark.parametrize(
    ("collective", "alone", "union"), [("allreduce", 16, 48), ("broadcast", 24, 48), ("allgather", 32, 96)]
)
def test_islands_take_the_wires_between_them(collective: str, alone: int, union: int) -> None:
    """By default, and without a switch of peer access: PCIe joins only GPUs that NVLink does not."""
    machine = two_pairs()
    made = topoplan.plan(machine, collective)
    assert (made.channels, made.rate, made.gap) == (("all",), union, 0)
    assert switched_hops(made) == 0
    assert topoplan.plan(machine, collective, channels="pcie").rate == alone


def test_staged_copies_pass_a_cpu() -> None:
    """No route between two GPUs turns around at a PCIe switch; a staged machine is staged already."""
    made = topoplan.plan(DGX, gpus=[6, 7], channels="all-staged")
    routes = [edge.route for shard in made.shards for stage in shard.stages for edge in stage.edges]
    pcie = [route for route in routes if len(route) > 2]
    assert pcie
    assert all(any(made.topology.device(name).kind == "cpu" for name in route) for route in pcie)
    assert staged(made.topology) == made.topology
    assert switched_hops(made) == 0
    with pytest.raises(PlanError, match="turns copies around"):
        topoplan.verify(replace(made, topology=DGX.subset([6, 7])))


@pytest.mark.thorough
def test_small_buffers_stay_on_nvlink() -> None:
    """PCIe beside NVLink starts 3.7 ms late, staged copies do not: they pay from 38 MB on, peer access from 4 GB."""
    for channels, small, large in (("all", 2 << 30, 8 << 30), ("all-staged", 16 << 20, 64 << 20)):
        assert topoplan.plan(DGX, channels=channels, nbytes=small).channels == ("nvlink",)
        made = topoplan.plan(DGX, channels=channels, nbytes=large)
        assert made.channels == (channels,)
        times = [topoplan.simulate(one, nbytes=large).seconds for one in (made, topoplan.plan(DGX))]
        assert times[0] < times[1]


def test_the_command_says_over_what_a_plan_is_optimal(run: Run) -> None:
    said = run("plan", "dgx-1v", "--gpus", "4,5,6,7")[1]
    assert "(optimal over nvlink, proved)" in said
    assert "wider  83 GB/s, 124.5 of bus bandwidth, at most, with pcie too" in said
    said = run("plan", "dgx-1v", "--gpus", "4,5,6,7", "--channels", "all")[1]
    assert "(optimal over nvlink and pcie together, proved)" in said
    assert "nvlink alone reaches 75 GB/s; by the model all wires are faster from about" in said


def test_what_cannot_be_is_one_line(run: Run) -> None:
    with pytest.raises(UsageError, match="two pairs states no PCIe links, which channels all would take"):
        topoplan.plan(two_pairs(host=False), channels="all")
    with pytest.raises(InfeasibleError, match="states no PCIe links of a host that joins the others"):
        topoplan.plan(two_pairs(host=False))
    with pytest.raises(UsageError, match="a buffer of -1 bytes"):
        topoplan.plan(DGX, channels="all", nbytes=-1)
    with pytest.raises(UsageError, match="plans by size need channels that suit all sizes"):
        topoplan.plan_by_size(DGX, channels="all")
    bare = Topology(
        "no host",
        (*DGX.devices[:2], Device("p", "pcie")),
        (Link("gpu0", "p", "pcie", 12.0), Link("p", "gpu1", "pcie", 12.0)),
    )
    with pytest.raises(UsageError, match="no link leads from p to a CPU"):
        Fabric(staged(bare), ("all-staged",))

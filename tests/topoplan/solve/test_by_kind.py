"""Machines with measured links: planned on the slowest link of each kind, proved on the links as they are."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import topoplan
from topoplan import UsageError
from topoplan.cli.main import main
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.plans.plan import Plan
from topoplan.solve.cuts_and_partitions import best_bound, quick_bound
from topoplan.solve.planner import floored_by_kind


def measured(servers: int, spread: float) -> Topology:
    """A100 servers whose links all differ, by up to ``spread`` of what they were."""
    machine = topoplan.nvswitch_cluster(servers)
    stream = random.Random(servers)
    links = tuple(replace(x, bandwidth=x.bandwidth * stream.uniform(1 - spread, 1)) for x in machine.links)
    return replace(machine, links=links)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ["allreduce", "allgather", "reduce_scatter", "broadcast", "reduce"])
def test_hundreds_of_measured_gpus_are_planned_within_the_tolerance(collective: str) -> None:
    """Servers within 0.4 %: the gap is at most that, from the plan's file, and the plan says where it comes from."""
    made = topoplan.plan(measured(128 if collective == "allgather" else 16, 0.004), collective)
    read = Plan.from_json(made.to_json())
    checked = topoplan.verify(read)
    assert checked.exact_rate is not None
    assert checked.exact_bound is not None
    assert 0 < 1 - checked.exact_rate / checked.exact_bound <= 0.004
    assert "packed on the slowest bandwidth of each kind of link" in made.notes[-1]


def test_links_of_the_floored_machine_have_one_bandwidth_a_kind() -> None:
    """NVLinks and NICs keep their own floors, and wires of two widths are two kinds."""
    fabric = Fabric(measured(8, 0.05), ("nvlink", "network"))
    floored = floored_by_kind(fabric)
    assert floored is not None
    kinds = {(x.channel, x.src.split(".")[-1][:3], x.dst.split(".")[-1][:3]) for x in fabric.links}
    assert len({link.bandwidth for link in floored.links}) == len(kinds)
    assert all(low.bandwidth <= link.bandwidth for low, link in zip(floored.links, fabric.links, strict=True))


def test_machines_with_symmetries_or_few_gpus_are_left_as_they_are() -> None:
    """One slow wire makes a handful of classes, which the exact search takes as they are."""
    assert floored_by_kind(Fabric(topoplan.nvswitch_cluster(16), ("nvlink", "network"))) is None
    assert floored_by_kind(Fabric(measured(4, 0.05), ("nvlink", "network"))) is None


@pytest.mark.thorough
def test_a_time_limit_never_ends_below_the_start_of_the_search() -> None:
    """128 GPUs within 4 %: without a limit the start is the answer, with a limit of nothing the plan is no worse."""
    machine = measured(16, 0.04)
    start = topoplan.plan(machine, "allgather")
    assert 0.005 < start.gap < 0.05
    assert "--time-limit S searches on" in start.notes[-1]
    searched = topoplan.plan(machine, "allgather", time_limit=0)
    assert searched.rate >= start.rate
    assert topoplan.verify(searched).rate == searched.rate


@pytest.mark.thorough
def test_the_tolerance_says_when_the_start_is_the_answer() -> None:
    """40 GPUs within 0.4 %: 1 % takes the start, 0 searches for the optimum."""
    machine = measured(5, 0.004)
    assert topoplan.plan(machine, "allgather", tolerance=0.01).gap > 0
    assert topoplan.plan(machine, "allgather", tolerance=0).gap == 0


@pytest.mark.parametrize("collective", ["allreduce", "allgather", "reduce_scatter", "broadcast", "reduce"])
def test_blocks_prove_what_flows_do_on_clusters(collective: str) -> None:
    """Nine servers, measured: the tightest block is the tightest cut, and for an allreduce all servers prove less."""
    root = 5 if collective in ("broadcast", "reduce") else None
    fabric = Fabric(measured(9, 0.03), ("nvlink", "network"))
    quick, flows = (bound(fabric, collective, root) for bound in (quick_bound, best_bound))
    proved, known = (each.bound(fabric, collective, root) for each in (quick, flows))
    assert proved < known if collective == "allreduce" else proved == known


def test_a_wrong_tolerance_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """No part of the bound, or another method."""
    with pytest.raises(UsageError, match="tolerance 1 must be a part of the bound"):
        topoplan.plan(topoplan.load("dgx-1v"), tolerance=1)
    assert main(["plan", "dgx-1v", "--tolerance", "0.1", "--method", "mwu"]) == 2
    assert "--tolerance belongs to --method exact" in capsys.readouterr().err

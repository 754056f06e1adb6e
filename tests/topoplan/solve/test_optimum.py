"""Above nine ranks and on known fabrics: the plan reaches the optimum of an independent program over flows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import topoplan
from tests.support.flow_program import flow_optimum
from tests.support.irregular_fabrics import KINDS, irregular, mi250
from tests.support.small_fabrics import COLLECTIVES, ROOTED, both_ways, machine, rate_by_flows
from topoplan.machine.cluster import nvswitch_cluster
from topoplan.machine.topology import Device, Link, Topology
from topoplan.plans.plan import Plan

CLOSE = 1e-6
"""What linprog's answers are good for."""


def weak_port() -> Topology:
    """Eight GPUs on a switch with ports of 150 GB/s, but one of 125."""
    widths = [125.0 if i == 3 else 150.0 for i in range(8)]
    return machine(8, both_ways({(f"gpu{i}", "sw0"): c for i, c in enumerate(widths)}), switches=1)


def broken_dgx() -> Topology:
    return topoplan.without_links(topoplan.load("dgx-1v"), ["gpu0-gpu3"])


KNOWN = [
    (lambda: nvswitch_cluster(2), 346.666667, 173.333333),
    (lambda: nvswitch_cluster(4), 266.666667, 133.333333),
    (mi250, 342.857143, 171.428571),
    (weak_port, 142.857143, 83.928571),
    (broken_dgx, 114.285714, 78.571429),
]
NAMES = ["two A100", "four A100", "MI250", "weak port", "broken DGX-1V"]


def proved(topology: Topology, collective: str, root: int | None = None) -> Plan:
    """The plan, after the independent check found its rate equal to its bound as rational numbers."""
    made = topoplan.plan(topology, collective, root=root)
    assert topoplan.verify(made).optimal
    return made


@pytest.mark.parametrize(("made", "allgather", "allreduce"), KNOWN, ids=NAMES)
def test_known_fabrics_reach_their_known_rates(
    made: Callable[[], Topology], allgather: float, allreduce: float
) -> None:
    """Answers of another program: allgather, reduce-scatter and allreduce in GB/s."""
    topology = made()
    assert proved(topology, "allgather").rate == pytest.approx(allgather, rel=1e-8)
    assert proved(topology, "reduce_scatter").rate == pytest.approx(allgather, rel=1e-8)
    assert proved(topology, "allreduce").rate == pytest.approx(allreduce, rel=1e-8)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("which", [0, 2, 3, 4], ids=lambda i: NAMES[i])
def test_known_fabrics_reach_the_optimum_over_flows(which: int, collective: str) -> None:
    """Broadcasts and reduces from the last GPU too."""
    topology = KNOWN[which][0]()
    root = len(topology.gpus) - 1 if collective in ROOTED else None
    made = proved(topology, collective, root)
    assert made.rate == pytest.approx(
        flow_optimum(topology, collective, root=root, channels=made.channels), rel=CLOSE
    )


SEEDS = dict.fromkeys(KINDS, (0, 1)) | {"cubes": (0,), "servers": (0, 1, 2)}
"""Machines of each kind that are planned in a moment."""


@pytest.mark.sampled
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_irregular_machines_reach_the_optimum_over_flows(kind: str, collective: str) -> None:
    """10 to 14 GPUs: rate, bound and linear program agree, whatever the switches, ports and dead wires."""
    for seed in SEEDS[kind]:
        topology = irregular(kind, seed)
        root = seed % len(topology.gpus) if collective in ROOTED else None
        made = proved(topology, collective, root)
        best = flow_optimum(topology, collective, root=root, channels=made.channels)
        assert made.rate == pytest.approx(best, rel=CLOSE), (kind, seed)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("kind", ["ports", "two_levels", "switched"])
def test_two_programs_over_flows_agree(kind: str, collective: str) -> None:
    """One balances switches, the other lists every route through them."""
    topology = irregular(kind, 5).subset(range(5))
    root = 2 if collective in ROOTED else None
    assert flow_optimum(topology, collective, root=root) == pytest.approx(
        rate_by_flows(topology, collective, root=root), rel=CLOSE
    )


def test_a_switch_that_may_copy_in_the_program_answers_too_much() -> None:
    """DGX-2: 80 GB/s with balanced switches, and 150 where the program lets them copy and add (design, section 4)."""
    box = topoplan.load("dgx-2")
    able = replace(
        box,
        devices=tuple(
            replace(d, multicast=d.kind == "nvswitch", reduce=d.kind == "nvswitch") for d in box.devices
        ),
    )
    assert flow_optimum(box, "allreduce", channels=["nvlink"]) == pytest.approx(80, rel=CLOSE)
    assert flow_optimum(able, "allreduce", channels=["nvlink"]) == pytest.approx(150, rel=CLOSE)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_ten_gpus_of_one_switch_with_measured_ports(collective: str) -> None:
    """Ports of 47.3186 GB/s and the like, unequal both ways: no cut proves this allreduce, its dual lengths do."""
    out = [47.3186, 46.9981, 47.2204, 31.7715, 47.3012, 46.8111, 47.1917, 47.0023, 46.7654, 47.2222]
    wires = {(f"gpu{i}", "sw0"): c for i, c in enumerate(out)}
    wires |= {("sw0", f"gpu{i}"): c - 0.4142 for i, c in enumerate(reversed(out))}
    topology = machine(10, wires, switches=1)
    root = 4 if collective in ROOTED else None
    made = proved(topology, collective, root)
    assert made.rate == pytest.approx(flow_optimum(topology, collective, root=root), rel=CLOSE)


def test_a_link_back_of_another_channel_is_not_used() -> None:
    """Ten GPUs in a ring of NVLink, and PCIe beside it: the plan and the program speak of NVLink alone."""
    wires = both_ways({(f"gpu{i}", f"gpu{(i + 1) % 10}"): 25.0 for i in range(10)})
    ring = machine(10, wires)
    host = [
        Link(a, b, "pcie", 12.0) for i in range(10) for a, b in ((f"gpu{i}", "cpu0"), ("cpu0", f"gpu{i}"))
    ]
    both = replace(ring, devices=(*ring.devices, Device("cpu0", "cpu")), links=(*ring.links, *host))
    made = proved(both, "allreduce")
    assert made.channels == ("nvlink",)
    assert made.rate == pytest.approx(flow_optimum(ring, "allreduce"), rel=CLOSE)
    over_pcie = topoplan.plan(both, "allreduce", channels="pcie")
    assert over_pcie.rate == pytest.approx(flow_optimum(both, "allreduce", channels=["pcie"]), rel=CLOSE)

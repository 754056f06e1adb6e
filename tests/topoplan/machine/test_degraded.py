"""Broken machines: known rates, what goes and what stays, and contradictions."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.machine_links import speeds
from tests.support.refusals import refused
from topoplan.errors import UsageError
from topoplan.machine.cluster import cluster
from topoplan.machine.cluster_network import Server
from topoplan.machine.topology import Device, Link, Topology

V100S = topoplan.load("dgx-1v")
PAIR = cluster([Server(V100S, count=2)], nic_gbps=100)


def ends(topology: Topology) -> set[tuple[str, str]]:
    return {(link.src, link.dst) for link in topology.links}


def test_a_dgx_1v_with_link_0_3_dead_is_the_known_machine(fabrics_dir: Path) -> None:
    """AllReduce 550/7 GB/s, by an independent linear program; the NVLinks are those of the answer file."""
    known = topoplan.load(fabrics_dir / "dgx1v-0-3-dead.json")
    made = topoplan.without_links(V100S, ["gpu0-gpu3"])
    assert speeds(made, "nvlink") == speeds(known, "nvlink")
    plan = topoplan.plan(made, "allreduce")
    assert (topoplan.verify(plan).exact_rate, plan.gap) == (Fraction(550, 7), 0)


@pytest.mark.parametrize(
    ("wire", "gone"),
    [
        ("gpu0-gpu3", {("gpu0", "gpu3"), ("gpu3", "gpu0")}),
        ("gpu0->gpu3", {("gpu0", "gpu3")}),
        ("pcie0-cpu0", {("pcie0", "cpu0"), ("cpu0", "pcie0")}),
    ],
)
def test_a_link_goes_in_both_directions_or_in_one(wire: str, gone: set[tuple[str, str]]) -> None:
    """``a-b`` and ``a->b``; on all channels between the two, and nothing else."""
    assert ends(V100S) - ends(topoplan.without_links(V100S, [wire])) == gone


def test_one_direction_dead_limits_what_runs_that_way() -> None:
    """GPUs 0, 1, 3 are a triangle of 25, 25 and 50 GB/s; without 0->3 a broadcast from 0 leaves over 0->1 only."""
    broken = topoplan.without_links(V100S, ["gpu0->gpu3"])
    rates = [topoplan.plan(one, "broadcast", gpus=[0, 1, 3]).rate for one in (V100S, broken)]
    assert rates == [50, 25]
    assert topoplan.plan(broken, "broadcast", gpus=[0, 1, 3], root=3).rate == 50


def test_a_slow_link_is_as_fast_as_it_is_said_to_be() -> None:
    """Both wires of the pair together, in each direction; other links keep their speed."""
    slower = topoplan.slow_links(V100S, {"gpu1-gpu2": 12.5})
    pairs = zip(V100S.links, slower.links, strict=True)
    changed = [(new.src, new.dst, new.bandwidth) for old, new in pairs if old != new]
    assert changed == [("gpu1", "gpu2", 12.5), ("gpu2", "gpu1", 12.5)]
    assert topoplan.slow_links(V100S, {"gpu0-gpu1": 5, "gpu1-gpu0": 5}).links


def test_a_gpu_that_is_out_leaves_the_names_of_the_others() -> None:
    left = topoplan.without_gpus(V100S, [5, 2, 5])
    assert left.gpus == ("gpu0", "gpu1", "gpu3", "gpu4", "gpu6", "gpu7")
    assert left.links == V100S.subset([0, 1, 3, 4, 6, 7]).links


def test_a_dead_nic_leaves_the_others_their_rate() -> None:
    """Four NICs of 12 GB/s; ``s0.nic1`` names both sides of a NIC that two GPUs use."""
    broken = topoplan.without_devices(PAIR, ["s0.nic1"])
    assert len(PAIR.devices) - len(broken.devices) == 2
    assert [topoplan.plan(one, "broadcast").bound for one in (PAIR, broken)] == [48, 36]
    cut = topoplan.without_links(PAIR, ["s0.nic1-switch0"])
    assert topoplan.plan(cut, "broadcast").bound == 36


def test_a_device_may_have_a_dash_in_its_name() -> None:
    odd = Topology("odd", (Device("a-0", "gpu"), Device("b-1", "gpu")), (Link("a-0", "b-1", "nvlink", 1.0),))
    assert topoplan.without_links(odd, ["a-0-b-1"]).links == ()
    railed = cluster([Server(V100S)], nic_gbps=100, network="rail-optimised")
    assert ("s0.nic0.tx", "rail0") not in ends(topoplan.without_links(railed, ["s0.nic0-rail0"]))


def test_changes_leave_notes_in_order() -> None:
    """Nothing taken out is the same machine."""
    broken = topoplan.without_links(V100S, ["gpu0-gpu3", "gpu1-gpu2"])
    broken = topoplan.slow_links(broken, {"gpu0-gpu1": 5})
    broken = topoplan.without_gpus(topoplan.without_devices(broken, ["nic0"]), [7])
    assert broken.notes[-4:] == (
        "taken out: link gpu0-gpu3, gpu1-gpu2",
        "slowed: gpu0-gpu1 to 5 GB/s",
        "taken out: nic0",
        "taken out: gpu7",
    )
    assert topoplan.without_links(V100S, []) == V100S == topoplan.slow_links(V100S, {})
    assert topoplan.without_gpus(V100S, []) == V100S == topoplan.without_devices(V100S, [])


@settings(max_examples=10)
@given(st.data())
def test_less_machine_is_never_more_rate(data: st.DataObject) -> None:
    """Taking out or slowing any NVLink of a DGX-1V does not raise the bound of a broadcast."""
    wires = sorted({f"{a}-{b}" for a, b in ends(V100S) if a < b and a[:3] == b[:3] == "gpu"})
    wire = data.draw(st.sampled_from(wires))
    speed = data.draw(st.integers(1, 250).map(lambda tenths: tenths / 10))
    machines = (topoplan.without_links(V100S, [wire]), topoplan.slow_links(V100S, {wire: speed}), V100S)
    gpus = sorted(data.draw(st.sets(st.integers(0, 7), min_size=2, max_size=4)))
    dead, slow, whole = (topoplan.plan(one, "broadcast", gpus=gpus) for one in machines)
    assert slow.bound <= whole.bound
    assert dead.channels != slow.channels or dead.bound <= slow.bound


CHANGES: dict[str, Callable[..., Topology]] = {
    "slow": topoplan.slow_links,
    "links": topoplan.without_links,
    "devices": topoplan.without_devices,
    "gpus": topoplan.without_gpus,
    "remove": Topology.remove_gpus,
}


@pytest.mark.parametrize(
    ("change", "argument", "says"),
    [
        *(
            (change, argument(wire), says)
            for wire, says in {
                "gpu0-gpu5": "link gpu0-gpu5 does not exist: gpu0 has links with gpu1, gpu2, gpu3, gpu4, pcie0",
                "gpu0-gpu33": "dgx-1v has no device 'gpu33'; did you mean gpu3?",
                "gpu-gpu3": "dgx-1v has no device 'gpu'; did you mean gpu",
                "x-y": "dgx-1v has no device 'x'; topoplan show lists its 18 devices",
                "gpu0": "'gpu0' names no link; write its two ends",
                "": "'' names no link",
                "gpu0->": "has no device ''",
                "gpu0-gpu0": "link gpu0-gpu0 does not exist",
            }.items()
            for change, argument in (("links", lambda wire: [wire]), ("slow", lambda wire: {wire: 1}))
        ),
        ("slow", {"gpu0-gpu1": 30}, "gpu0-gpu1 has 25 GB/s, and 30 is not slower"),
        ("slow", {"gpu0-gpu1": 0}, "0 is not a bandwidth"),
        ("slow", {"gpu0-gpu1": float("nan")}, "nan is not a bandwidth"),
        ("slow", {"gpu0-gpu1": True}, "True is not a bandwidth"),
        ("slow", {"gpu0-gpu1": 5, "gpu1-gpu0": 6}, "two speeds: gpu0-gpu1=5 and gpu1-gpu0=6"),
        ("slow", {"gpu0-gpu1": 5, "gpu1->gpu0": 6}, "gpu1->gpu0 is given two speeds"),
        ("devices", ["gpu1"], "gpu1 is GPU 1; take it out by its number"),
        ("devices", ["nik0"], "did you mean nic0?"),
        ("gpus", [8], "GPU 8 is out of range"),
        ("gpus", range(8), "all 8 GPUs of dgx-1v"),
        *(
            (change, 3, "must be a sequence of GPU numbers, got 3; write [3]")
            for change in ("gpus", "remove")
        ),
    ],
)
def test_refuses_what_is_not_there_with_what_is_near(change: str, argument: object, says: str) -> None:
    with refused(UsageError, says):
        CHANGES[change](V100S, argument)

"""Switches that copy or add: what crosses each link by hand, the rates that follow, and what may prove them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.flow_program import flow_optimum
from tests.support.small_fabrics import COLLECTIVES, ROOTED, both_ways, machine, switched_machines
from topoplan.errors import PlanError
from topoplan.machine.cluster import nvswitch_cluster
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.plans.certificates.certificate import Cut, Lengths
from topoplan.plans.certificates.exchange import Steiner
from topoplan.plans.loads import link_loads
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Edge, Shard, Stage


def able(
    topology: Topology, *, copies: Sequence[str] = (), adds: Sequence[str] = (), kinds: Sequence[str] = ()
) -> Topology:
    """The machine with some switches, or all of some kinds, that copy or add."""
    devices = tuple(
        replace(d, multicast=d.name in copies or d.kind in kinds, reduce=d.name in adds or d.kind in kinds)
        for d in topology.devices
    )
    return replace(topology, devices=devices)


def leaves() -> Topology:
    """gpu0 and gpu1 on sw0, gpu2 and gpu3 on sw1, both on sw2."""
    wires = {(f"gpu{i}", f"sw{i // 2}"): 100.0 for i in range(4)}
    wires |= {("sw0", "sw2"): 100.0, ("sw1", "sw2"): 100.0}
    return machine(4, both_ways(wires), switches=3)


ROUTES = {
    (0, 1): ("gpu0", "sw0", "gpu1"),
    (0, 2): ("gpu0", "sw0", "sw2", "sw1", "gpu2"),
    (0, 3): ("gpu0", "sw0", "sw2", "sw1", "gpu3"),
    (2, 3): ("gpu2", "sw1", "gpu3"),
}
STAR = [(0, 1), (0, 2), (0, 3)]


def crossed(topology: Topology, op: str, tree: Sequence[tuple[int, int]]) -> dict[str, int]:
    """How often a tree from gpu0 crosses each link, those in use."""
    edges = tuple(Edge(p, c, ROUTES[p, c], "nvlink") for p, c in tree)
    fabric = Fabric(topology, ("nvlink",))
    loads = link_loads([Shard(Fraction(1), (Stage(op, 0, edges),))], fabric)
    names = [f"{link.src}>{link.dst}" for link in fabric.links]
    return {name: int(load) for name, load in zip(names, loads, strict=True) if load}


DOWN = {"gpu0>sw0": 3, "sw0>gpu1": 1, "sw0>sw2": 2, "sw2>sw1": 2, "sw1>gpu2": 1, "sw1>gpu3": 1}


@pytest.mark.parametrize(
    ("copies", "fewer"),
    [
        ([], {}),
        (["sw0"], {"gpu0>sw0": 1}),
        (["sw1"], {"gpu0>sw0": 2, "sw0>sw2": 1, "sw2>sw1": 1}),
        (["sw2"], {"gpu0>sw0": 2, "sw0>sw2": 1}),
        (["sw0", "sw1"], {"gpu0>sw0": 1, "sw0>sw2": 1, "sw2>sw1": 1}),
        (["sw0", "sw1", "sw2"], {"gpu0>sw0": 1, "sw0>sw2": 1, "sw2>sw1": 1}),
    ],
    ids=str,
)
def test_a_star_of_copies_by_hand(copies: list[str], fewer: dict[str, int]) -> None:
    """Two levels: a link before a switch that copies carries one copy for all that it feeds."""
    assert crossed(able(leaves(), copies=copies), "broadcast", STAR) == DOWN | fewer
    back = {"{1}>{0}".format(*link.split(">")): n for link, n in (DOWN | fewer).items()}
    assert crossed(able(leaves(), adds=copies), "reduce", STAR) == back


def test_copying_serves_no_reduce_and_adding_no_broadcast() -> None:
    """Children of different parents share nothing: gpu2 sends its own copy to gpu3."""
    every = ["sw0", "sw1", "sw2"]
    assert crossed(able(leaves(), adds=every), "broadcast", STAR) == DOWN
    assert crossed(able(leaves(), copies=every), "reduce", STAR)["sw0>gpu0"] == 3
    links = ("gpu0>sw0", "sw0>gpu1", "sw0>sw2", "sw2>sw1", "sw1>gpu2", "gpu2>sw1", "sw1>gpu3")
    found = crossed(able(leaves(), copies=every), "broadcast", [(0, 1), (0, 2), (2, 3)])
    assert found == dict.fromkeys(links, 1)


def box(size: int = 8, width: float = 450.0) -> Topology:
    """GPUs on one switch."""
    return machine(size, both_ways({(f"gpu{i}", "sw0"): width for i in range(size)}), switches=1)


def proved(topology: Topology, collective: str) -> Plan:
    made = topoplan.plan(topology, collective)
    assert topoplan.verify(made).optimal
    return made


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_gpus_on_a_switch_that_copies_and_adds(collective: str, size: int) -> None:
    """450 GB/s a port: an allreduce at the speed of a port, not the 257 of plain trees, over stars; a cut proves it."""
    made = proved(able(box(size), kinds=["nvswitch"]), collective)
    rate = 450 * size / (size - 1) if collective in ("allgather", "reduce_scatter") else 450
    assert made.rate == pytest.approx(rate, rel=1e-8)
    assert made.height == 1
    assert isinstance(made.certificate, Cut)
    if collective == "allreduce":
        timeline = topoplan.simulate(made, nbytes=1 << 30)
        assert (1 << 30) / timeline.seconds / 1e9 == pytest.approx(450, rel=0.02)


def test_plain_switches_are_slower() -> None:
    """The same box without the gifts, and with one of them: 450 x 8 / 14."""
    for gifts in ({}, {"copies": ["sw0"]}, {"adds": ["sw0"]}):
        made = topoplan.plan(able(box(), **gifts), "allreduce")
        assert made.rate == pytest.approx(450 * 8 / 14, rel=1e-12)
    assert proved(box(), "allreduce").gap == 0


@pytest.mark.sampled
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(
    "made",
    [
        lambda: able(leaves(), kinds=["nvswitch"]),
        lambda: able(leaves(), copies=["sw0", "sw1", "sw2"], adds=["sw0", "sw1", "sw2"]),
        lambda: able(nvswitch_cluster(2, gpus=6), kinds=["nvswitch"]),
        lambda: able(nvswitch_cluster(2, gpus=6), kinds=["nvswitch", "switch"]),
    ],
    ids=["two levels", "named", "NVSwitch", "NVSwitch and rails"],
)
def test_rates_meet_what_flows_with_free_switches_allow(
    made: Callable[[], Topology], collective: str
) -> None:
    """The program without balance at such switches bounds every forest, and here forests reach it."""
    topology = made()
    best = flow_optimum(topology, collective, root=0 if collective in ROOTED else None)
    assert proved(topology, collective).rate == pytest.approx(best, rel=1e-6)


@st.composite
def gifted_machines(draw: st.DrawFn) -> Topology:
    """Small switched machines some of whose switches copy or add."""
    topology = draw(switched_machines())
    names = st.sampled_from([device.name for device in topology.devices if device.kind == "nvswitch"])
    return able(topology, **{gift: draw(st.lists(names, unique=True)) for gift in ("copies", "adds")})


@pytest.mark.thorough
@given(gifted_machines(), st.sampled_from(COLLECTIVES), st.data())
@settings(max_examples=100)
def test_gifts_never_cost_and_never_beat_flows_or_lengths(
    topology: Topology, collective: str, data: st.DataObject
) -> None:
    """plain optimum <= rate <= optimum of flows with free switches; accepted lengths, many zero, are above the rate."""
    root = 0 if collective in ROOTED else None
    rate, plain = (
        topoplan.verify(topoplan.plan(one, collective)).exact_rate for one in (topology, able(topology))
    )
    assert rate is not None
    assert plain is not None
    assert plain <= rate <= flow_optimum(topology, collective, root=root) * (1 + 1e-6)
    length = st.sampled_from([0, 0, 0, 1, 2]).map(Fraction)
    lengths = Lengths(tuple((link.src, link.dst, data.draw(length)) for link in topology.links))
    with contextlib.suppress(PlanError):
        assert lengths.bound(Fabric(topology, ("nvlink",)), collective, root) >= rate


def test_lengths_hold_around_a_switch_that_a_rank_is_next_to() -> None:
    """A rank at distance zero both ways from a switch could copy in its place; one way is not enough."""
    fabric = Fabric(able(leaves(), kinds=["nvswitch"]), ("nvlink",))
    up = [("sw0", "sw2", Fraction(1)), ("sw2", "sw1", Fraction(1))]
    with pytest.raises(PlanError, match="part sw2, which can copy or add, from every rank"):
        Lengths((*up, ("sw2", "sw0", Fraction(1)))).bound(fabric, "allreduce", None)
    # sw1 and sw2 stay at distance zero from gpu2; what crosses from sw0 to sw2 limits.
    assert Lengths((up[0],)).bound(fabric, "allreduce", None) == 100
    assert Cut(("gpu0", "gpu1", "sw0")).bound(fabric, "allreduce", None) == 100
    fabric = Fabric(able(box(3, 1.0), kinds=["nvswitch"]), ("nvlink",))
    for ends in ([(f"gpu{i}", "sw0") for i in range(3)], [("sw0", f"gpu{i}") for i in range(3)]):
        with pytest.raises(PlanError, match="part sw0, which can copy or add, from every rank"):
            Lengths(tuple((*one, Fraction(1)) for one in ends)).bound(fabric, "allreduce", None)


def test_the_sum_of_an_allreduce_may_lie_at_a_switch() -> None:
    """sw0 adds what both GPUs send, and sw1 copies the sum: no GPU holds it before, and it crosses each link once."""
    ends = [("gpu0", "sw0"), ("gpu1", "sw0"), ("sw0", "sw1"), ("sw1", "gpu0"), ("sw1", "gpu1")]
    one_way = able(machine(2, dict.fromkeys(ends, 10.0), switches=2), kinds=["nvswitch"])
    assert topoplan.verify(topoplan.plan(one_way, "allreduce")).bound == 10
    crossed_once = Steiner((("sw0", "sw1", Fraction(1)),))
    assert crossed_once.bound(Fabric(one_way, ("nvlink",)), "allreduce", None) == 10


@pytest.mark.parametrize(("collective", "gift"), [("allgather", "adds"), ("reduce_scatter", "copies")])
def test_lengths_hold_around_a_gift_that_a_collective_cannot_use(collective: str, gift: str) -> None:
    """Ports that differ both ways, where no cut proves the optimum: the lengths of plain switches do."""
    widths = [(2, 3), (2, 5), (4, 6)]
    if collective == "reduce_scatter":
        widths = [(back, out) for out, back in widths]
    wires = {(f"gpu{i}", "sw0"): float(out) for i, (out, _) in enumerate(widths)}
    wires |= {("sw0", f"gpu{i}"): float(back) for i, (_, back) in enumerate(widths)}
    plain = machine(3, wires, switches=1)
    made = proved(able(plain, **{gift: ["sw0"]}), collective)
    assert isinstance(made.certificate, Lengths)
    assert made.rate == proved(plain, collective).rate


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_multiplicative_weights_pack_for_plain_switches_and_say_so(collective: str) -> None:
    """Their trees are rated on the real switches; the bound is that of the real ones too, and a gap is said."""
    topology = able(box(4, 300.0), kinds=["nvswitch"])
    made = topoplan.plan(topology, collective, method="mwu")
    topoplan.verify(made)
    assert made.bound == (400 if collective in ("allgather", "reduce_scatter") else 300)
    assert made.shards == topoplan.plan(box(4, 300.0), collective, method="mwu").shards
    assert any("--method exact uses that they copy or add" in note for note in made.notes) == (made.gap > 0)
    assert (made.gap == 0) == (collective != "allreduce")

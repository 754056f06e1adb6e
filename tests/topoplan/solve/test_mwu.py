"""Multiplicative weights keep their promise of epsilon, and few whole trees stay within the threshold of it."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.small_fabrics import (
    COLLECTIVES,
    ROOTED,
    WRITTEN,
    both_ways,
    direct_machines,
    machine,
    switched_machines,
)
from topoplan.errors import UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Device, Link, Topology
from topoplan.plans.loads import forest_rate
from topoplan.solve.packing.fewest_trees import minimise_trees
from topoplan.solve.packing.multiplicative_weights import MwuPacking, pack_mwu
from topoplan.solve.packing.packing_program import Packing

MACHINES = switched_machines() | direct_machines(most=6) | direct_machines(most=5, bandwidths=WRITTEN)


def packing_of(topology: Topology, collective: str, root: int = 0) -> Packing:
    return Packing(Fabric(topology, ("nvlink",)), collective, root if collective in ROOTED else None)


def rate_and_bound(packing: Packing, packed: MwuPacking) -> tuple[Fraction, Fraction]:
    rate = forest_rate(packing.shards(packed.weights), packing.fabric)
    assert rate is not None
    return rate, packed.certificate.bound(packing.fabric, packing.collective, packing.root)


@pytest.mark.thorough
@given(MACHINES, st.sampled_from(COLLECTIVES), st.sampled_from([0.02, 0.05, 0.2, 0.5]))
@settings(max_examples=60, deadline=None)
def test_the_packing_is_proved_within_epsilon(topology: Topology, collective: str, epsilon: float) -> None:
    """Rate, recomputed exactly, is at least (1 - epsilon) of the bound, and the bound no less than the optimum."""
    packing = packing_of(topology, collective)
    rate, bound = rate_and_bound(packing, pack_mwu(packing, epsilon=epsilon))
    best = topoplan.verify(topoplan.plan(topology, collective)).exact_rate
    assert best is not None
    assert rate <= best <= bound
    assert rate >= bound * (1 - Fraction(str(epsilon))) * (1 - Fraction(1, 10**6))


@pytest.mark.thorough
@given(MACHINES, st.sampled_from(COLLECTIVES))
@settings(max_examples=40, deadline=None)
def test_the_plan_verifies_and_stays_within_the_threshold_of_the_packing(
    topology: Topology, collective: str
) -> None:
    """Minimised trees give up at most 5 % of the packing; the two together at most a tenth of the optimum."""
    made = topoplan.plan(topology, collective, method="mwu")
    report = topoplan.verify(made)
    packing = packing_of(topology, collective)
    rate, _ = rate_and_bound(packing, pack_mwu(packing))
    assert report.exact_rate is not None
    assert report.exact_bound is not None
    assert report.exact_rate >= rate * Fraction(95, 100)
    assert report.exact_rate >= report.exact_bound * Fraction(9, 10)


def test_dgx_1v_broadcast_comes_down_to_six_unit_trees() -> None:
    """Blink 3.2.1: from 181 trees there (dozens here) to six of one link each, at the full rate."""
    made = topoplan.plan(topoplan.load("dgx-1v"), "broadcast", method="mwu")
    assert (made.rate, made.num_trees) == (150, 6)
    assert {shard.share for shard in made.shards} == {Fraction(1, 6)}
    assert topoplan.verify(made).optimal


def test_whole_numbers_find_what_zeros_and_ones_miss() -> None:
    """A triangle with two doubled wires: rate 3 takes one tree twice, which no 0/1 program can say (Blink 3.2.1)."""
    wires = both_ways({("gpu0", "gpu1"): 1.0, ("gpu0", "gpu2"): 2.0, ("gpu1", "gpu2"): 2.0})
    doubled = packing_of(machine(3, wires), "broadcast")
    fewer = minimise_trees(doubled, pack_mwu(doubled).weights, rate=Fraction(3), threshold=0.05)
    assert fewer is not None
    assert sorted(fewer.values()) == [1, 2]


def test_a_rate_out_of_reach_is_not_claimed() -> None:
    """From one tree of a machine that needs two, nothing comes within 5 % of the rate: the answer is None."""
    packing = packing_of(topoplan.load("dgx-1v"), "broadcast")
    packed = pack_mwu(packing)
    one = {min(packed.weights, key=lambda tree: tree.order): Fraction(1)}
    assert minimise_trees(packing, one, rate=Fraction(6)) is None


@pytest.mark.sampled
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_rival_oracle_gives_a_packing_of_the_same_worth(collective: str) -> None:
    """networkx's arborescences in place of our own, on six GPUs: both within epsilon of the same bound."""
    packing = packing_of(topoplan.load("dgx-1v").subset([0, 1, 2, 3, 4, 7]), collective)
    rates = []
    for oracle in (None, networkx_arborescence):
        rate, bound = rate_and_bound(packing, pack_mwu(packing, epsilon=0.1, tree_oracle=oracle))
        assert rate >= bound * Fraction(9, 10) * (1 - Fraction(1, 10**6))
        rates.append(float(rate))
    assert rates[1] == pytest.approx(rates[0], rel=0.12)


def networkx_arborescence(by_head: list[list[float]], root: int) -> list[int]:
    graph = nx.DiGraph()
    largest = max(c for row in by_head for c in row if c < float("inf"))
    for v, row in enumerate(by_head):
        for u, c in enumerate(row):
            if v not in (u, root) and c < float("inf"):
                graph.add_edge(u, v, weight=c / largest)
    tree = nx.minimum_spanning_arborescence(graph, preserve_attrs=False)
    parent = [-1] * len(by_head)
    for u, v in tree.edges:
        parent[v] = u
    return parent


def test_smaller_epsilon_takes_more_rounds_and_proves_more() -> None:
    """DGX-1V allreduce at 0.2 and at 0.01."""
    packing = packing_of(topoplan.load("dgx-1v"), "allreduce")
    rough, fine = pack_mwu(packing, epsilon=0.2), pack_mwu(packing, epsilon=0.01)
    assert rough.rounds < fine.rounds
    assert rate_and_bound(packing, rough)[0] < rate_and_bound(packing, fine)[0]
    assert rate_and_bound(packing, fine)[0] >= Fraction(600, 7) * Fraction(99, 100)


def test_links_of_very_different_width_are_packed() -> None:
    """Wires many orders of magnitude apart: the lengths span more, and the certificate they make still binds."""
    widths = [(0, 1, 1e-5), (0, 2, 1e5), (1, 2, 47.3186), (2, 3, 1e-6), (0, 3, 2e4)]
    wires = {(f"gpu{a}", f"gpu{b}"): width for a, b, width in widths}
    wires |= {(f"gpu{b}", f"gpu{a}"): width * (1 + a) for a, b, width in widths}
    for collective in COLLECTIVES:
        made = topoplan.plan(machine(4, wires), collective, method="mwu")
        assert made.gap <= 0.05
        topoplan.verify(made)


def test_a_thin_dead_end_beside_many_wide_links_ends() -> None:
    """Ten links between two ranks, each too short for a whole number beside the longest: found on a finer scale."""
    chain = ["gpu0", *(f"nvswitch{i}" for i in range(9)), "gpu1"]
    widths = dict.fromkeys(pairwise(chain), 4300.0) | {("nvswitch3", "nvswitch9"): 1e-6}
    devices = [Device(name, "gpu" if "gpu" in name else "nvswitch") for name in sorted({*chain, "nvswitch9"})]
    links = [
        Link(src, dst, "nvlink", width) for (a, b), width in widths.items() for src, dst in ((a, b), (b, a))
    ]
    made = topoplan.plan(Topology("chain", tuple(devices), tuple(links)), "broadcast", method="mwu")
    assert (made.rate, made.bound) == (4300.0, 4300.0)


@pytest.mark.parametrize("wrong", [-0.1, 1e-9, 0.6, 1, float("nan"), float("inf")])
def test_epsilon_and_threshold_out_of_range_are_refused(wrong: float) -> None:
    with pytest.raises(UsageError, match=r"epsilon .* must be from 0\.002 to 0\.5"):
        topoplan.plan("dgx-1v", method="mwu", epsilon=wrong)
    if not 0 <= wrong < 1:
        with pytest.raises(UsageError, match=r"threshold .* must be 0 or more and below 1"):
            topoplan.plan("dgx-1v", method="mwu", threshold=wrong)

"""Devices that add and copy but are no ranks: the optimum in the star, proofs by Steiner lengths, runs, refusals."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from collectives import Communicator, lower
from collectives.backends.loopback.paced_loopback import PacedLoopback
from collectives.tables.table_check import check_table
from tests.support.checkout import Run
from tests.support.refusals import refused
from tests.support.regular_fabrics import helped_star as star
from tests.support.small_fabrics import COLLECTIVES, ROOTED, machine, switched_machines
from tests.support.tree_program import rate_by_inner_trees
from topoplan.engines.registry import export_plan
from topoplan.errors import PlanError, TopologyError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Device, Link, Topology
from topoplan.plans.certificates.exchange import Steiner
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Edge, Shard, Stage

CLOSE = 1e-6


def best(workers: int, helpers: int) -> Fraction:
    """(n^2 + k n - 2 k) B / (2 n (n - 1)), at most B, for ports of 10 GB/s."""
    n, k = workers, helpers
    return min(Fraction(10), Fraction(10 * (n * n + k * n - 2 * k), 2 * n * (n - 1)))


def proved(topology: Topology, collective: str = "allreduce") -> Plan:
    made = topoplan.plan(topology, collective)
    assert topoplan.verify(made).optimal
    return made


THOROUGH = [(5, 4), (6, 4), (6, 6), *((16, helpers) for helpers in (1, 5, 15, 16))]


@pytest.mark.parametrize(
    ("workers", "helpers"),
    [
        *((2, 0), (2, 1), (3, 0), (3, 1), (3, 3), (4, 2), (6, 5), (9, 4)),
        *(pytest.param(*one, marks=pytest.mark.thorough) for one in THOROUGH),
    ],
)
def test_the_star_is_exact(workers: int, helpers: int) -> None:
    """What the formula says, at height 1, with the proof recomputed from the file; equal helpers make few sets."""
    made = proved(star(workers, helpers))
    report = topoplan.verify(Plan.from_json(made.to_json()))
    assert report.exact_rate == report.exact_bound == best(workers, helpers)
    assert made.height == 1


@pytest.mark.parametrize(("workers", "helpers"), [(3, 1), (8, 4)])
def test_the_lengths_of_the_formula_prove_it(workers: int, helpers: int) -> None:
    """1 on the ports of workers and (n - 2) / n on those of helpers; shorter or longer ones prove less."""
    fabric = Fabric(star(workers, helpers), ("network",))

    def bound(length: Fraction) -> Fraction:
        ends = [(link.src, link.dst) for link in fabric.links]
        lengths = ((*one, length if "helper" in "".join(one) else Fraction(1)) for one in ends)
        return Steiner(tuple(lengths)).bound(fabric, "allreduce", None)

    tight = Fraction(workers - 2, workers)
    assert bound(tight) == best(workers, helpers)
    assert bound(tight + Fraction(1, 10)) > best(workers, helpers)
    assert bound(tight - Fraction(1, 10)) > best(workers, helpers)


def test_shards_root_at_helpers_and_the_file_says_so() -> None:
    """Of three workers and one helper a third of the buffer is added up at the helper: format 2."""
    made = proved(star(3, 1))
    assert made.helpers == ("helper0",)
    assert made.vertices == ("gpu0", "gpu1", "gpu2", "helper0")
    assert {shard.stages[0].root for shard in made.shards} == {0, 1, 2, 3}
    assert '"topoplan.plan/2"' in made.to_json()
    assert '"topoplan.plan/1"' in topoplan.plan(star(3, 0)).to_json()
    assert {tree.graph["root"] for tree in made.to_networkx()} == set(made.vertices)
    seconds = topoplan.simulate(made, nbytes=1 << 30).seconds
    assert (1 << 30) / seconds / 1e9 == pytest.approx(25 / 3, rel=0.02)


@st.composite
def helped_machines(draw: st.DrawFn) -> Topology:
    """3 workers, 1 or 2 helpers, one switch with ports of any width, and some direct links."""
    names = ["gpu0", "gpu1", "gpu2", *(f"helper{i}" for i in range(draw(st.integers(1, 2))))]
    width = st.integers(1, 6).map(float)
    wires = {pair: draw(width) for name in names for pair in ((name, "sw0"), ("sw0", name))}
    for pair in permutations(names, 2):
        if draw(st.integers(0, 3)) == 0:
            wires[pair] = draw(width)
    made = machine(3, {}, switches=1)
    helpers = tuple(Device(name, "helper") for name in names[3:])
    links = tuple(Link(*pair, "nvlink", c) for pair, c in wires.items())
    return replace(made, devices=(*made.devices, *helpers), links=links)


def meets_the_program(topology: Topology, collective: str) -> None:
    """Rate and bound are what a program over all listed trees finds."""
    root = 0 if collective in ROOTED else None
    wanted = rate_by_inner_trees(topology, collective, root=root)
    made = topoplan.plan(topology, collective, root=root)
    topoplan.verify(made)
    assert made.rate == pytest.approx(wanted, rel=CLOSE)
    assert made.bound == pytest.approx(wanted, rel=CLOSE)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("helpers", [1, 2])
def test_small_stars_meet_a_program_over_all_trees(helpers: int, collective: str) -> None:
    meets_the_program(star(3, helpers), collective)


@pytest.mark.thorough
@given(helped_machines(), st.sampled_from(COLLECTIVES))
@settings(max_examples=100, deadline=None)
def test_random_machines_with_helpers_meet_a_program_over_all_trees(
    topology: Topology, collective: str
) -> None:
    meets_the_program(topology, collective)


@pytest.mark.thorough
@given(switched_machines(), st.lists(st.tuples(st.booleans(), st.booleans())), st.sampled_from(COLLECTIVES))
@settings(max_examples=200, deadline=None)
def test_random_switches_that_copy_or_add_meet_a_program_over_all_trees(
    topology: Topology, gifts: list[tuple[bool, bool]], collective: str
) -> None:
    """A switch is an inner vertex of trees that lead down where it copies, of those that lead up where it adds."""
    gift = dict(zip((d.name for d in topology.devices if d.kind == "nvswitch"), gifts, strict=False))
    able = {name: {"multicast": copies, "reduce": adds} for name, (copies, adds) in gift.items()}
    devices = tuple(replace(d, **able.get(d.name, {})) for d in topology.devices)
    meets_the_program(replace(topology, devices=devices), collective)


@pytest.mark.parametrize("op", ["sum", "prod", "min", "avg"])
def test_sums_over_helpers_are_right(op: str) -> None:
    """A helper begins with nothing, so the first that arrives is stored, whatever the reduction; any count."""
    made = proved(star(4, 2))
    join = {"sum": np.sum, "prod": np.prod, "min": np.min, "avg": np.mean}[op]
    with Communicator(made) as comm:
        for count in (0, 1, 17, 1000):
            data = [np.random.default_rng(rank).integers(1, 9, count).astype(np.float64) for rank in range(4)]
            wanted = join(np.array(data), axis=0)
            for result in comm.all_reduce([one.copy() for one in data], op=op):
                assert np.array_equal(result, wanted)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_transfer_tables_over_helpers_are_right(collective: str) -> None:
    """In any order that they allow; helpers stand behind the ranks."""
    relayed = star(3, 1)
    # The workers' way to each other is thin, so that copies pass the helper too.
    wide = [(a, b) for g in range(3) for a, b in ((f"gpu{g}", "helper0"), ("helper0", f"gpu{g}"))]
    relayed = replace(relayed, links=(*relayed.links, *(Link(*pair, "network", 10.0) for pair in wide)))
    made = proved(relayed, collective)
    table = lower(made, 300, chunk_elements=32)
    check_table(table, made)
    assert table.helpers == (1 if made.helpers else 0)


def test_paced_links_run_helpers_too() -> None:
    with Communicator(proved(star(3, 2)), PacedLoopback(3, scale=1.0)) as comm:
        results = comm.all_reduce([np.arange(999.0) + rank for rank in range(3)])
    assert all(np.array_equal(result, 3 * np.arange(999.0) + 3) for result in results)


@pytest.mark.parametrize("backend", ["nccl", "torch"])
def test_where_every_process_is_a_rank_helpers_are_refused(backend: str) -> None:
    with refused(UsageError, f"helper0 is a helper rank in this plan, and the {backend} back end has none"):
        Communicator(proved(star(3, 1)), backend)


def test_engines_know_ranks_alone() -> None:
    made = proved(star(3, 1))
    for name in ("mscclpp", "msccl-xml", "chakra"):
        with refused(UsageError, f"trees of this plan pass helper0, which is not a rank, and {name}"):
            export_plan(made, name)
    assert '"helper0"' in export_plan(made, "dot").text


def test_a_helper_without_links_is_refused(run: Run) -> None:
    whole = star(3, 1)
    for end, way in (("dst", "in"), ("src", "out")):
        links = tuple(link for link in whole.links if getattr(link, end) != "helper0")
        with pytest.raises(TopologyError, match=f"helper helper0 has no link {way}; add one"):
            topoplan.plan(replace(whole, links=links))


def test_a_helper_sends_nothing_before_it_holds_something() -> None:
    made = proved(star(3, 1))
    route = ("gpu0", "sw0", "helper0")
    for stage in (
        Stage("reduce", 0, (Edge(0, 3, route, "network"),)),
        Stage("broadcast", 3, (Edge(3, 0, route[::-1], "network"),)),
    ):
        wrong = replace(made, shards=(Shard(Fraction(1), (stage, *made.shards[0].stages)),))
        with pytest.raises(PlanError, match="is a helper and sends before it holds anything"):
            topoplan.verify(wrong)


def test_other_methods_join_ranks_alone_and_say_so() -> None:
    """Multiplicative weights: the optimum without helpers, below a bound that counts them."""
    made = topoplan.plan(star(4, 2), method="mwu")
    topoplan.verify(made)
    assert made.rate <= float(Fraction(20, 3))
    assert any("--method exact lets them pass helpers" in note for note in made.notes)


def test_the_command_line_names_helpers(run: Run, tmp_path: Path) -> None:
    star_file, plan_file = str(tmp_path / "star.json"), str(tmp_path / "plan.json")
    Path(star_file).write_text(star(3, 1).to_json())
    out = run("plan", star_file, "-o", plan_file)[1]
    assert "over the network: provably optimal\n" in out
    assert "helper0>gpu0-2" in out
    status, out, _ = run("verify", plan_file)
    assert status == 0
    assert "8.33333333 GB/s, busbw 11.1111111 GB/s (exactly 25/3)" in out


@pytest.mark.parametrize(
    ("gpus", "alone", "relayed"),
    [
        ((0, 1, 4, 6), 25, Fraction(350, 3)),
        ((1, 4, 5, 7), 50, Fraction(325, 3)),
        pytest.param((4, 0, 1, 2, 3), 50, 93.75, marks=pytest.mark.thorough),
    ],
)
def test_idle_gpus_relay(gpus: tuple[int, ...], alone: float, relayed: Fraction) -> None:
    """Allocations of a DGX-1V: the others store and send on, as vertices of trees that run."""
    assert topoplan.plan("dgx-1v", gpus=gpus).rate == alone
    relaying = topoplan.with_relays("dgx-1v", gpus)
    assert relaying.gpus == tuple(f"gpu{gpu}" for gpu in gpus)
    made = proved(relaying)
    assert made.rate == pytest.approx(float(relayed))
    assert made.helpers
    assert not any(
        set(edge.route[1:-1]) & set(made.vertices)
        for shard in made.shards
        for stage in shard.stages
        for edge in stage.edges
    )
    arrays = [np.arange(1000.0) * rank for rank in range(len(gpus))]
    with Communicator(made, backend="loopback") as comm:
        summed = comm.all_reduce(arrays)
    assert all(np.array_equal(one, np.sum(arrays, axis=0)) for one in summed)


@given(switched_machines(), st.sampled_from(COLLECTIVES))
@settings(max_examples=15, deadline=None)
def test_relays_are_never_slower(drawn: Topology, collective: str) -> None:
    """All GPUs of a random machine but one are ranks; they reach with it at least what they reach alone."""
    ranks = range(len(drawn.gpus) - 1)
    try:
        alone = topoplan.plan(drawn, collective, gpus=list(ranks)).rate
    except topoplan.InfeasibleError:
        alone = 0.0
    relaying = topoplan.with_relays(drawn, ranks)
    if alone or not Fabric(relaying, ("nvlink",)).unreachable(collective, 0):
        made = topoplan.plan(relaying, collective)
        assert topoplan.verify(made).rate >= alone * (1 - CLOSE)


def test_a_route_through_a_helper_is_refused() -> None:
    links = [
        *(Link(*ends, "nvlink", 10.0) for ends in (("gpu0", "relay"), ("relay", "gpu0"))),
        *(Link(*ends, "nvlink", 10.0) for ends in (("gpu1", "relay"), ("relay", "gpu1"))),
    ]
    devices = (Device("gpu0", "gpu"), Device("gpu1", "gpu"), Device("relay", "helper"))
    made = proved(Topology("line", devices, tuple(links)), "broadcast")
    assert [edge.route for edge in made.shards[0].stages[0].edges] == [("gpu0", "relay"), ("relay", "gpu1")]
    through = Stage("broadcast", 0, (Edge(0, 1, ("gpu0", "relay", "gpu1"), "nvlink"),))
    with pytest.raises(PlanError, match="edge 0>1 passes helper relay; make it a vertex of the tree"):
        topoplan.verify(replace(made, shards=(Shard(Fraction(1), (through,)),)))


def test_relays_that_cannot_be(run: Run) -> None:
    for options, words in (
        (("--gpus", "0-3", "--relays", "3"), "a relay must not be a rank, got GPU 3 as both"),
        (("--gpus", "0-7", "--relays", "idle"), "has no idle GPU beside these 8"),
        (("--relays", "idle"), "--relays belongs to --gpus"),
        (
            ("--gpus", "0-3", "--relays", "idle", "--collective", "broadcast", "--root", "4"),
            "root 4 is none of the GPUs",
        ),
    ):
        status, _, error = run("plan", "dgx-1v", *options)
        assert (status, words in error) == (2, True), error

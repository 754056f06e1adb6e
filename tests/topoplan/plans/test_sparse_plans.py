"""Sparse plans: rates and bounds that are known, what verify refuses, rounds, and model times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from collectives import Communicator
from tests.support.checkout import ROOT
from topoplan.errors import InfeasibleError, PlanError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import FabricServers
from topoplan.machine.topology import Device, Link, Topology
from topoplan.model.event_simulation import run_events
from topoplan.plans.certificates.certificate import Certificate, explain_certificate
from topoplan.plans.certificates.exchange import BetweenServersBound, EntryBound, InsideServerBound
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Edge, ImageShards, Shard, Stage
from topoplan.plans.structure import ROUND, phases, rounds
from topoplan.schedules.sparse_plan import sparse_servers, sparse_trees
from topoplan.units import entry_share

DGX = topoplan.load("dgx-1v")
MB = 1 << 20


def servers_of(*gpus: int, gbps: float = 100, nics: int = 1) -> Topology:
    """DGX-1V servers with the first so many GPUs of each."""
    machines = [topoplan.Server(DGX, list(range(number))) for number in gpus]
    return topoplan.cluster(machines, nic_gbps=gbps, nics=nics)


def with_stage(plan: Plan, shard: int, position: int, stage: Stage) -> Plan:
    """The plan with another stage in one place."""
    shards = list(plan.shards)
    stages = list(shards[shard].stages)
    stages[position] = stage
    shards[shard] = replace(shards[shard], stages=tuple(stages))
    return replace(plan, shards=tuple(shards))


PAIR = sparse_servers(servers_of(8, 8, gbps=96), entries=entry_share(0.01))
TREES = sparse_trees(topoplan.plan(topoplan.load("dgx-2")), entries=entry_share(0.01))


# Known answers


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("servers", "density", "rate"),
    [
        # one NIC of 25 Gb/s takes in the entries of all other servers, two numbers of 4 bytes each
        (16, 0.01, 3.125 / (15 * 0.02)),
        (4, 0.01, 3.125 / (3 * 0.02)),
        (4, 0.5, 3.125 / 3),
        # then the allreduce inside a DGX-1V holds it back: 24/7 links of 25 GB/s
        (16, 0.001, 600 / 7),
        (2, 0.01, 600 / 7),
    ],
)
def test_three_phases_are_as_fast_as_nics_take_entries_or_servers_sum(
    servers: int, density: float, rate: float
) -> None:
    plan = topoplan.sparse_plan(servers_of(*[8] * servers, gbps=25), density=density)
    assert plan.rate == pytest.approx(rate, rel=1e-12)
    assert plan.bound == pytest.approx(rate, rel=1e-12)
    assert topoplan.verify(plan).optimal


@pytest.mark.thorough
def test_three_phases_over_servers_need_no_dense_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single server is planned for its certificate; the whole machine, 32 GPUs, is not."""
    sizes = []

    def planned(topology: Topology, *arguments: Any, **options: Any) -> Plan:
        sizes.append(len(topology.gpus))
        return topoplan.plan(topology, *arguments, **options)

    monkeypatch.setattr("topoplan.schedules.sparse_plan.plan", planned)
    made = topoplan.sparse_plan(servers_of(8, 8, 8, 8, nics=4), density=0.01)
    assert set(sizes) == {8}
    assert made.schedule == "sparse three-phase"


def test_entries_on_trees_move_as_much_less_as_they_are() -> None:
    assert (TREES.rate, TREES.bound, TREES.schedule) == (4000.0, 4000.0, "sparse one-hop")
    packed = sparse_trees(topoplan.plan(topoplan.load("dgx-2")), entries=entry_share(0.01, entry_bits=40))
    assert packed.rate == 80 / 0.0125


def test_one_server_and_servers_of_one_gpu_get_trees_and_others_three_phases() -> None:
    made = [topoplan.sparse_plan(one, density=0.01) for one in (DGX, servers_of(1, 1, 1), servers_of(1, 3))]
    assert [one.schedule.startswith("sparse three-phase") for one in made] == [False, False, True]
    alone = topoplan.sparse_plan(DGX, density=0.5, gpus=[3])
    assert not alone.sparse
    assert topoplan.verify(alone).trees == 0


@pytest.mark.parametrize("gpus", [(3, 5), (1, 2, 3), (8, 1), (4, 4, 4), (2, 8, 1, 5)], ids=str)
def test_uneven_servers_exchange_between_one_rank_of_each(gpus: tuple[int, ...]) -> None:
    plan = sparse_servers(servers_of(*gpus), entries=entry_share(0.01))
    topoplan.verify(plan)
    servers = FabricServers(Fabric(plan.topology, plan.channels))
    for shard in plan.shards:
        owners = [stage.root for stage in shard.stages if stage.op == "gather"]
        assert servers.of_rank[owners].tolist() == list(range(len(gpus)))
        assert [stage.root for stage in shard.stages] == owners * 3
    assert plan.rate <= plan.bound


def test_shares_of_the_owners_load_the_nics_of_a_server_almost_evenly() -> None:
    plan = sparse_servers(servers_of(8, 8, 8, gbps=10, nics=4), entries=entry_share(0.05))
    busy = topoplan.simulate(plan, nbytes=64 * MB).link_bytes
    sent = [nbytes for (src, dst), nbytes in busy.items() if src.startswith("s0.nic") and dst == "switch0"]
    assert len(sent) == 4
    assert sum(sent) == pytest.approx(2 * 0.1 * 64 * MB)
    assert max(sent) < 1.1 * sum(sent) / 4
    assert plan.notes[0].startswith("stays 7.17% below the bound of")


@pytest.mark.sampled
@pytest.mark.parametrize("servers", [2, 4, 16])
@pytest.mark.parametrize("bits", [64, 40.5])
def test_bytes_through_the_nics_are_those_of_the_formula(servers: int, bits: float) -> None:
    plan = topoplan.sparse_plan(servers_of(*[8] * servers), density=0.01, entry_bits=bits)
    busy = topoplan.simulate(plan, nbytes=10**8).link_bytes
    out = sum(nbytes for (src, dst), nbytes in busy.items() if src.startswith("s0.") and dst == "switch0")
    assert out == pytest.approx((servers - 1) * 0.01 * bits / 32 * 10**8)


# What verify refuses


def gather_at(plan: Plan) -> int:
    return next(i for i, stage in enumerate(plan.shards[0].stages) if stage.op == "gather")


def spoiled(name: str) -> Plan:
    """A sparse plan with one fault."""
    at = gather_at(PAIR)
    stages = PAIR.shards[0].stages
    gather, reduce = stages[at], stages[0]
    if name == "a gather reaches nobody":
        return with_stage(PAIR, 0, at, replace(gather, edges=()))
    if name == "a gather without entries":
        return with_stage(PAIR, 0, at, replace(gather, entries=None))
    if name == "no bytes":
        return with_stage(PAIR, 0, at, replace(gather, entries=Fraction(0)))
    if name == "more bytes than there are":
        return with_stage(PAIR, 0, at, replace(gather, entries=Fraction(10**999)))
    if name == "an owner that is handed the sum":
        shards = tuple(
            replace(shard, stages=(Stage("broadcast", shard.stages[0].root, ()), *shard.stages))
            for shard in PAIR.shards
        )
        return replace(PAIR, shards=shards)
    if name == "an exchange in pieces":
        three = sparse_servers(servers_of(2, 2, 2), entries=Fraction(1, 50))
        return replace(
            three,
            shards=tuple(
                replace(
                    shard,
                    stages=tuple(
                        piece
                        for stage in shard.stages
                        for piece in (
                            [replace(stage, edges=(edge,)) for edge in stage.edges]
                            if stage.op == "gather"
                            else [stage]
                        )
                    ),
                )
                for shard in three.shards
            ),
        )
    if name == "entries that count twice":
        one, other = TREES.shards[0].stages[0], TREES.shards[1].stages[0]
        between_children = next(edge for edge in other.edges if edge.child != one.root)
        again = Stage("reduce", other.root, (between_children,), one.entries)
        stages = (one, again, *TREES.shards[0].stages[1:])
        return replace(TREES, shards=(replace(TREES.shards[0], stages=stages), *TREES.shards[1:]))
    if name == "rounds differ":
        shards = list(PAIR.shards)
        shards[1] = replace(
            shards[1], stages=tuple(stage for stage in shards[1].stages if stage.op != "gather")
        )
        return replace(PAIR, shards=tuple(shards))
    if name == "entries in a server":
        return with_stage(PAIR, 0, 0, replace(reduce, entries=Fraction(1, 50)))
    if name == "a broadcast":
        return replace(TREES, collective="broadcast", root=0)
    if name == "elements on a tree of entries":
        return with_stage(TREES, 0, 0, replace(TREES.shards[0].stages[0], entries=None))
    if name == "fewer bytes than the bound supposes":
        return with_stage(TREES, 0, 0, replace(TREES.shards[0].stages[0], entries=Fraction(1, 100)))
    if name == "a proof for elements":
        return replace(TREES, certificate=topoplan.plan(topoplan.load("dgx-2")).certificate)
    assert name == "a proof for entries"
    dense = topoplan.plan(topoplan.load("dgx-2"))
    return replace(dense, certificate=TREES.certificate, bound=TREES.bound)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a gather reaches nobody", "ends with the contribution of rank 0 0 times instead of 1"),
        ("a gather without entries", "a gather moves entries, and the stage says none"),
        ("no bytes", "0 bytes of entries for a byte of the shard must be from 1e-09 to 1000000"),
        ("more bytes than there are", "must be from 1e-09 to 1000000"),
        ("an owner that is handed the sum", "broadcasts in place of a reduce"),
        ("an exchange in pieces", "6 ranks gather for 3 servers"),
        (
            "entries that count twice",
            "a rank has sent its own already|all shards of a sparse plan",
        ),
        ("rounds differ", "times instead of 1"),
        ("entries in a server", "all shards of a sparse plan take the same rounds"),
        ("a broadcast", "instead of 0"),
        ("elements on a tree of entries", "all shards of a sparse plan take the same rounds"),
        (
            "fewer bytes than the bound supposes",
            "the bound holds for trees on which 1/50 bytes of entries move",
        ),
        ("a proof for elements", "the certificate bounds plans that move elements"),
        ("a proof for entries", "the certificate bounds plans that move entries, and this one moves none"),
    ],
)
def test_a_spoiled_sparse_plan_is_refused(name: str, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        topoplan.verify(spoiled(name))


def test_the_proof_of_three_phases_holds_only_where_elements_stay_inside_and_entries_cross_once() -> None:
    """On a fabric where every shortcut is possible: two servers of two GPUs, all joined by network links."""
    between = sparse_servers(servers_of(2, 2, gbps=1), entries=entry_share(0.5))
    assert isinstance(between.certificate, BetweenServersBound)
    at = gather_at(between)
    shard = between.shards[0]
    gather = shard.stages[at]
    fewer = replace(gather, entries=Fraction(1, 2))
    with pytest.raises(
        PlanError, match="gathers 1/2 bytes of entries for a byte of the shard, and the bound supposes 1"
    ):
        topoplan.verify(with_stage(between, 0, at, fewer))
    inside = PAIR
    assert isinstance(inside.certificate, InsideServerBound)
    owner = inside.shards[0].stages[0].root
    edge = inside.shards[0].stages[gather_at(inside)].edges[0]
    other = next(e.child for e in inside.shards[0].stages[0].edges)
    to_two = Stage("gather", owner, (edge, replace(edge, child=other)), Fraction(1, 50))
    with pytest.raises(PlanError):
        topoplan.verify(with_stage(inside, 0, gather_at(inside), to_two))
    twice = replace(
        inside,
        shards=tuple(
            Shard(s.share, (*s.stages, Stage("broadcast", s.stages[0].root, ()), *s.stages[-2:]))
            for s in inside.shards
        ),
    )
    with pytest.raises(PlanError, match="claims a rate"):  # right, but slower than it says
        topoplan.verify(twice)


@pytest.mark.parametrize(
    ("certificate", "told"),
    [
        (BetweenServersBound(Fraction(1, 50), ("s0.gpu0",)), "holds 1 of the 8 ranks of s0"),
        (BetweenServersBound(Fraction(1, 50), ()), "at least one server and leave out at least one"),
        (BetweenServersBound(Fraction(1, 50), ("nobody",)), "names device 'nobody'"),
        (InsideServerBound("s7", PAIR.certificate.certificate), "names server 's7'"),  # type: ignore[union-attr]
        (EntryBound(Fraction(1, 50), PAIR.certificate.certificate), "the bound holds for trees"),  # type: ignore[union-attr]
    ],
)
def test_a_proof_that_proves_nothing_is_refused(certificate: Certificate, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        topoplan.verify(replace(PAIR, certificate=certificate))


def test_a_symmetry_that_takes_a_server_to_several_smuggles_no_elements_between_them() -> None:
    """Four GPUs on two servers, all joined alike: the image of a tree inside a server is one between them."""
    names = ("g0", "g1", "g2", "g3")
    devices = tuple(Device(name, "gpu", server=server) for name, server in zip(names, "aabb", strict=True))
    links = tuple(Link(one, other, "nvlink", 10.0) for one in names for other in names if one != other)

    def tree(op: str, root: int, child: int) -> Stage:
        entries = Fraction(1, 50) if op == "gather" else None
        return Stage(op, root, (Edge(root, child, (names[root], names[child]), "nvlink"),), entries)

    inside = [("reduce", 0, 1), ("reduce", 2, 3), ("gather", 0, 2), ("gather", 2, 0)]
    stages = tuple(tree(*one) for one in (*inside, ("broadcast", 0, 1), ("broadcast", 2, 3)))
    shards = ImageShards(names, 4, ((0, 2, 1, 3),), (Shard(Fraction(1, 2), stages),))
    smuggler = Plan(
        collective="allreduce",
        ranks=names,
        root=None,
        topology=Topology("square", devices, links),
        channels=("nvlink",),
        schedule="hand",
        method="hand",
        shards=shards,
        rate=1000 / 51,
        bound=1000.0,
        certificate=BetweenServersBound(Fraction(1, 50), ("g0", "g1")),
    )
    with pytest.raises(PlanError, match=r"owner|leaves its server|gather for"):
        topoplan.verify(smuggler)


# Files, words, rounds, times


@pytest.mark.parametrize(
    "plan", [PAIR, TREES, sparse_servers(servers_of(2, 3, gbps=5), entries=Fraction(1))], ids=str
)
def test_files_keep_sparse_plans(plan: Plan) -> None:
    text = plan.to_json()
    again = Plan.from_json(text)
    assert again == plan
    assert again.to_json() == text
    assert topoplan.verify(again).rate == plan.rate
    assert explain_certificate(again) == explain_certificate(plan)


def test_the_same_sparse_plan_comes_out_of_every_process() -> None:
    code = (
        "import topoplan as t; d = t.load('dgx-1v');"
        "c = t.cluster([t.Server(d, [0, 1, 2]), t.Server(d, [1, 3, 5, 7]), t.Server(d, [2])], nic_gbps=40, nics=1);"
        "print(t.sparse_plan(c, density=0.01).digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1")
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    "change",
    [{"entries": "0"}, {"entries": "x"}, {"certificate": {"kind": "inside server"}}, {"side": 3}],
    ids=str,
)
def test_certificates_of_sparse_plans_are_read_with_care(change: dict[str, object]) -> None:
    value = json.loads(sparse_servers(servers_of(2, 2, gbps=1), entries=Fraction(1)).to_json())
    value["certificate"].update(change)
    if "certificate" in change:
        value["certificate"]["kind"] = "entries"
    with pytest.raises(PlanError, match="certificate"):
        Plan.from_json(json.dumps(value))


def test_bounds_are_told_in_words() -> None:
    assert explain_certificate(PAIR).startswith("inside s0 the links between all 8 GPUs carry 1200 GB/s")
    assert explain_certificate(TREES).startswith(
        "a byte of the buffer is 0.02 bytes of entries, and of these "
    )
    cut = explain_certificate(topoplan.sparse_plan(servers_of(8, 8, 8, gbps=25), density=0.1))
    assert cut == (
        "only 3.125 GB/s enter {s0}, and the entries of 2 servers must, 0.2 bytes each for a byte of the buffer"
    )


def test_three_phases_take_three_rounds_and_entries_of_one_way_travel_together() -> None:
    found = rounds(PAIR)
    assert [one.kind for one in found] == ["elements", "gather", "elements"]
    assert all(one.plan.collective == ROUND for one in found)
    exchange = found[1]
    ways = [(shard.stages[0].root, shard.stages[0].edges) for shard in exchange.plan.shards]
    assert len(set(ways)) == len(ways)
    together = zip(exchange.shards, exchange.senders, strict=True)
    carried = sorted((number, sender) for numbers, sender in together for number in numbers)
    gathers = [
        (number, stage.root)
        for number, shard in enumerate(PAIR.shards)
        for stage in shard.stages
        if stage.op == "gather"
    ]
    assert carried == sorted(gathers)
    moved = sum((shard.share for shard in exchange.plan.shards), Fraction(0))
    assert moved == 2 * Fraction(1, 50)


def test_trees_of_entries_take_a_round_for_each_level_and_one_down() -> None:
    tall = sparse_trees(topoplan.ring(DGX, gpus=[0, 1, 2, 3]), entries=Fraction(1, 50))
    found = rounds(tall)
    assert [one.kind for one in found] == ["merge"] * tall.height + ["spread"]
    for one in found[:-1]:
        for shard in one.plan.shards:
            assert len(shard.stages[0].edges) == 1


@pytest.mark.parametrize("plan", [PAIR, TREES], ids=["servers", "trees"])
@pytest.mark.parametrize("nbytes", [MB, 256 * MB])
def test_a_sparse_plan_takes_the_time_of_its_rounds_by_both_models(plan: Plan, nbytes: int) -> None:
    alone = [topoplan.simulate(one.plan, nbytes=nbytes) for one in rounds(plan)]
    whole = topoplan.simulate(plan, nbytes=nbytes)
    assert whole.seconds == pytest.approx(sum(one.seconds for one in alone))
    assert whole.seconds >= nbytes / plan.rate / 1e9
    events = run_events(plan, nbytes=nbytes)
    assert events.seconds == pytest.approx(whole.seconds, rel=0.25)
    assert max(each.end for each in events.transfers) == pytest.approx(events.seconds)


def test_depth_counts_servers_side_by_side() -> None:
    """Up in a server, across, down in a server; not once for every server."""
    assert PAIR.depth == 2 * PAIR.height + 1
    assert TREES.depth == 2


def test_phases_weigh_entries() -> None:
    found = phases(sparse_servers(servers_of(8, 8, 8, 8, gbps=25), entries=entry_share(0.01)))
    assert found is not None
    assert found.between.rate == pytest.approx(3.125 / 0.06)
    assert found.inside.rate == pytest.approx(600 / 7)
    assert found.bottleneck == "between servers"


# Bad input


@pytest.mark.parametrize("density", [0, -1, 1.5, float("nan")])
def test_a_density_out_of_range_is_refused(density: float) -> None:
    with pytest.raises(UsageError, match="is not above 0 and at most 1"):
        topoplan.sparse_plan(DGX, density=density)


@pytest.mark.thorough
def test_what_has_no_sparse_form_is_refused() -> None:
    with pytest.raises(UsageError, match="this is a broadcast"):
        sparse_trees(topoplan.plan(DGX, "broadcast"), entries=Fraction(1))
    with pytest.raises(UsageError, match="this is a sparse allreduce"):
        sparse_trees(TREES, entries=Fraction(1))
    with pytest.raises(UsageError, match="divides the buffer between channels"):
        sparse_trees(topoplan.plan(DGX, channels="nvlink+pcie"), entries=Fraction(1))
    with pytest.raises(UsageError, match="three phases need GPUs on two servers or more"):
        sparse_servers(DGX, entries=Fraction(1))
    with pytest.raises(UsageError, match="must be above zero"):
        sparse_servers(servers_of(2, 2), entries=Fraction(0))
    apart = [topoplan.Server(DGX, [0, 5]), topoplan.Server(DGX, [0, 1])]
    with pytest.raises(InfeasibleError):
        sparse_servers(topoplan.cluster(apart, nic_gbps=10, nics=1), entries=Fraction(1), channels="nvlink")
    with pytest.raises(UsageError, match="plan must be dense"):
        Communicator(TREES)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=4).filter(lambda gpus: max(gpus) > 1),
    st.sampled_from([1, 10, 100, 400]),
    st.sampled_from([0.001, 0.01, 0.3, 1.0]),
)
def test_every_cluster_has_sparse_three_phases_that_verify(
    gpus: list[int], gbps: float, density: float
) -> None:
    plan = sparse_servers(servers_of(*gpus, gbps=gbps), entries=entry_share(density))
    report = topoplan.verify(plan)
    assert report.exact_rate is not None
    assert report.exact_bound is not None
    assert Fraction(1, 3) * report.exact_bound < report.exact_rate <= report.exact_bound


def test_edges_of_a_plan_keep_their_routes() -> None:
    """Ways between owners are those of the dense plan: over the owners' own NICs."""
    plan = sparse_servers(servers_of(8, 8, nics=4), entries=entry_share(0.01))
    for shard in plan.shards:
        for stage in shard.stages:
            for edge in stage.edges:
                assert isinstance(edge, Edge)
                assert ("switch0" in edge.route) == (stage.op == "gather")

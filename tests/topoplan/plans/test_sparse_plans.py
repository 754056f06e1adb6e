"""Sparse plans: rates and bounds that are known, what verify refuses, rounds, and model times."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from collectives import Communicator
from topoplan import Device, InfeasibleError, Link, Plan, PlanError, Topology, UsageError
from topoplan.model.event_simulation import run_events
from topoplan.plans.certificates.certificate import Certificate, explain_certificate
from topoplan.plans.certificates.exchange import BetweenServersBound, EntryBound, InsideServerBound
from topoplan.plans.shards import Edge, ImageShards, Shard, Stage
from topoplan.plans.structure import ROUND, rounds
from topoplan.schedules.sparse_plan import sparse_servers, sparse_trees
from topoplan.units import entry_share

DGX = topoplan.load("dgx-1v")
MB = 1 << 20


def servers_of(*gpus: int, gbps: float = 100, nics: int = 1) -> Topology:
    """DGX-1V servers with the first so many GPUs of each."""
    machines = [topoplan.Server(DGX, list(range(number))) for number in gpus]
    return topoplan.cluster(machines, nic_gbps=gbps, nics=nics)


def with_stage(plan: Plan, shard: int, position: int, stage: Stage) -> Plan:
    shards = list(plan.shards)
    stages = list(shards[shard].stages)
    stages[position] = stage
    shards[shard] = replace(shards[shard], stages=tuple(stages))
    return replace(plan, shards=tuple(shards))


PAIR = sparse_servers(servers_of(8, 8, gbps=96), entries=entry_share(0.01))
TREES = sparse_trees(topoplan.plan("dgx-2"), entries=entry_share(0.01))


@pytest.mark.parametrize(
    ("servers", "density", "rate"),
    [
        # one NIC of 25 Gb/s takes in the entries of all other servers, two numbers of 4 bytes each
        pytest.param(16, 0.01, 3.125 / (15 * 0.02), marks=pytest.mark.thorough),
        (4, 0.01, 3.125 / (3 * 0.02)),
        pytest.param(4, 0.5, 3.125 / 3, marks=pytest.mark.thorough),
        # then the allreduce inside a DGX-1V holds it back: 24/7 links of 25 GB/s
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


def test_entries_on_trees_move_as_much_less_as_they_are() -> None:
    assert (TREES.rate, TREES.bound, TREES.schedule) == (4000.0, 4000.0, "sparse one-hop")
    packed = sparse_trees(topoplan.plan("dgx-2"), entries=entry_share(0.01, entry_bits=40))
    assert packed.rate == 80 / 0.0125


def test_one_server_and_servers_of_one_gpu_get_trees_and_others_three_phases() -> None:
    made = [topoplan.sparse_plan(one, density=0.01) for one in (DGX, servers_of(1, 1, 1), servers_of(1, 3))]
    assert [one.schedule.startswith("sparse three-phase") for one in made] == [False, False, True]
    alone = topoplan.sparse_plan(DGX, density=0.5, gpus=[3])
    assert not alone.sparse
    assert topoplan.verify(alone).trees == 0


@pytest.mark.thorough
def test_shares_of_the_owners_load_the_nics_of_a_server_almost_evenly() -> None:
    plan = sparse_servers(servers_of(8, 8, 8, gbps=10, nics=4), entries=entry_share(0.05))
    busy = topoplan.simulate(plan, nbytes=64 * MB).link_bytes
    sent = [nbytes for (src, dst), nbytes in busy.items() if src.startswith("s0.nic") and dst == "switch0"]
    assert len(sent) == 4
    assert sum(sent) == pytest.approx(2 * 0.1 * 64 * MB)
    assert max(sent) < 1.1 * sum(sent) / 4
    assert plan.notes[0].startswith("stays 7.17% below the bound of")


def other_stages(plan: Plan, change: Callable[[tuple[Stage, ...]], Iterable[Stage]]) -> Plan:
    return replace(plan, shards=tuple(Shard(s.share, tuple(change(s.stages))) for s in plan.shards))


def in_pieces(stage: Stage) -> list[Stage]:
    return [replace(stage, edges=(edge,)) for edge in stage.edges] if stage.op == "gather" else [stage]


def counted_twice() -> Plan:
    one, other = TREES.shards[0].stages[0], TREES.shards[1].stages[0]
    between_children = next(edge for edge in other.edges if edge.child != one.root)
    again = Stage("reduce", other.root, (between_children,), one.entries)
    shard = replace(TREES.shards[0], stages=(one, again, *TREES.shards[0].stages[1:]))
    return replace(TREES, shards=(shard, *TREES.shards[1:]))


def gathering(**fields: Any) -> Callable[[], Plan]:
    """The plan over servers, with other fields of its first gather."""
    return lambda: with_stage(PAIR, 0, AT, replace(GATHER, **fields))


def on_tree(**fields: Any) -> Callable[[], Plan]:
    """The plan of trees, with other fields of the first one."""
    return lambda: with_stage(TREES, 0, 0, replace(TREE, **fields))


BETWEEN = sparse_servers(servers_of(2, 2, gbps=1), entries=entry_share(0.5))
DENSE = topoplan.plan("dgx-2")
AT = next(i for i, stage in enumerate(PAIR.shards[0].stages) if stage.op == "gather")
GATHER = PAIR.shards[0].stages[AT]
TREE = TREES.shards[0].stages[0]
FIRST, OTHER = GATHER.edges[0], next(edge.child for edge in PAIR.shards[0].stages[0].edges)
SAME_ROUNDS = "all shards of a sparse plan take the same rounds"

SPOILED: dict[str, tuple[Callable[[], Plan], str]] = {
    "a gather reaches nobody": (gathering(edges=()), "ends with the contribution of rank 0 0 times instead"),
    "a gather without entries": (gathering(entries=None), "a gather moves entries, and the stage says none"),
    "no bytes": (gathering(entries=Fraction(0)), "0 bytes of entries .* must be from 1e-09 to 1000000"),
    "more bytes than there are": (gathering(entries=Fraction(10**999)), "must be from 1e-09 to 1000000"),
    "entries for two ranks of a server": (
        gathering(edges=(FIRST, replace(FIRST, child=OTHER))),
        "rank|server",
    ),
    "fewer bytes than the bound supposes": (
        lambda: with_stage(BETWEEN, 0, AT, replace(BETWEEN.shards[0].stages[AT], entries=Fraction(1, 2))),
        "gathers 1/2 bytes of entries for a byte of the shard, and the bound supposes 1",
    ),
    "an owner that is handed the sum": (
        lambda: other_stages(PAIR, lambda s: (Stage("broadcast", s[0].root, ()), *s)),
        "broadcasts in place of a reduce",
    ),
    "a right plan that is slower than it says": (
        lambda: other_stages(PAIR, lambda s: (*s, Stage("broadcast", s[0].root, ()), *s[-2:])),
        "claims a rate",
    ),
    "an exchange in pieces": (
        lambda: other_stages(
            sparse_servers(servers_of(2, 2, 2), entries=Fraction(1, 50)),
            lambda stages: [piece for stage in stages for piece in in_pieces(stage)],
        ),
        "6 ranks gather for 3 servers",
    ),
    "entries that count twice": (counted_twice, f"a rank has sent its own already|{SAME_ROUNDS}"),
    "rounds differ": (
        lambda: replace(
            PAIR,
            shards=tuple(
                replace(shard, stages=tuple(s for s in shard.stages if number != 1 or s.op != "gather"))
                for number, shard in enumerate(PAIR.shards)
            ),
        ),
        "times instead of 1",
    ),
    "entries in a server": (
        lambda: with_stage(PAIR, 0, 0, replace(PAIR.shards[0].stages[0], entries=Fraction(1, 50))),
        SAME_ROUNDS,
    ),
    "a broadcast": (lambda: replace(TREES, collective="broadcast", root=0), "instead of 0"),
    "elements on a tree of entries": (on_tree(entries=None), SAME_ROUNDS),
    "fewer bytes on a tree": (
        on_tree(entries=Fraction(1, 100)),
        "the bound holds for trees on which 1/50 bytes of entries move",
    ),
    "a proof for elements": (
        lambda: replace(TREES, certificate=DENSE.certificate),
        "the certificate bounds plans that move elements",
    ),
    "a proof for entries": (
        lambda: replace(DENSE, certificate=TREES.certificate, bound=TREES.bound),
        "the certificate bounds plans that move entries, and this one moves none",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_sparse_plan_is_refused(name: str) -> None:
    made, told = SPOILED[name]
    with pytest.raises(PlanError, match=told):
        topoplan.verify(made())


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
    assert explain_certificate(topoplan.sparse_plan(servers_of(8, 8, 8, gbps=25), density=0.1)) == (
        "only 3.125 GB/s enter {s0}, and the entries of 2 servers must, 0.2 bytes each for a byte of the buffer"
    )


def test_three_phases_take_three_rounds_and_entries_of_one_way_travel_together() -> None:
    assert (PAIR.depth, TREES.depth) == (2 * PAIR.height + 1, 2)  # not once for every server
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
    tall = sparse_trees(topoplan.ring_plan(DGX, gpus=[0, 1, 2, 3]), entries=Fraction(1, 50))
    found = rounds(tall)
    assert [one.kind for one in found] == ["merge"] * tall.height + ["spread"]
    for one in found[:-1]:
        for shard in one.plan.shards:
            assert len(shard.stages[0].edges) == 1


@pytest.mark.parametrize(("plan", "nbytes"), [(PAIR, MB), (TREES, 256 * MB)], ids=["servers", "trees"])
def test_a_sparse_plan_takes_the_time_of_its_rounds_by_both_models(plan: Plan, nbytes: int) -> None:
    alone = [topoplan.simulate(one.plan, nbytes=nbytes) for one in rounds(plan)]
    whole = topoplan.simulate(plan, nbytes=nbytes)
    assert whole.seconds == pytest.approx(sum(one.seconds for one in alone))
    assert whole.seconds >= nbytes / plan.rate / 1e9
    events = run_events(plan, nbytes=nbytes)
    assert events.seconds == pytest.approx(whole.seconds, rel=0.25)
    assert max(each.end for each in events.transfers) == pytest.approx(events.seconds)


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


@settings(max_examples=8, deadline=None)
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

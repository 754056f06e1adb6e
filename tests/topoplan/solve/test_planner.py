"""`topoplan.plan` as it is asked: refusals that name value and remedy, cuts that prove them, limits of time."""

from __future__ import annotations

import copy
import json
import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.checkout import Run
from tests.support.refusals import refused
from tests.support.small_fabrics import COLLECTIVES, ROOTED, both_ways, direct_machines, machine
from topoplan.cli.plan import plan_lines
from topoplan.errors import InfeasibleError, Note, UsageError, kind_of
from topoplan.machine.fabric import Fabric, usable_fabric
from topoplan.machine.topology import Link, Topology
from topoplan.plans.certificates.certificate import Trivial
from topoplan.plans.loads import forest_rate
from topoplan.solve.packing.exact import pack_exact
from topoplan.solve.planner import disjoint_forest
from topoplan.solve.search_control import Deadline
from topoplan.units import TOLERANCE

DGX = topoplan.load("dgx-1v")


@pytest.mark.parametrize(("collective", "method"), [("allreduce", "exact"), ("broadcast", "mwu")])
def test_one_gpu_gets_a_plan_that_moves_nothing(collective: str, method: str) -> None:
    """A valid plan of infinite rate, also where the GPU has no link at all."""
    lonely = machine(1, {})
    for topology, gpus in ((DGX, [6]), (lonely, None)):
        root = 6 if gpus and collective in ROOTED else None
        made = topoplan.plan(topology, collective, gpus=gpus, root=root, method=method)
        assert (made.rate, made.bound, made.gap) == (float("inf"), float("inf"), 0)
        assert (made.num_trees, made.height, made.certificate) == (0, 0, Trivial())
        assert topoplan.verify(made).rate == float("inf")


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"collective": "alreduce"}, "collective 'alreduce' is unknown; did you mean allreduce?"),
        ({"collective": "scan"}, "collective 'scan' is unknown; use one of allreduce, broadcast, reduce,"),
        ({"collective": ""}, "collective '' is unknown"),
        ({"method": "magic"}, "method 'magic' is unknown; use one of exact, mwu"),
        ({"order": "width"}, "order 'width' is unknown; use one of height, trees"),
        ({"channels": "copper"}, "channels 'copper' is unknown; use one of auto, nvlink, pcie"),
        ({"gpus": [0, 8]}, "GPU 8 is out of range: dgx-1v has GPUs 0 to 7"),
        ({"gpus": [3, 1, 3]}, "GPU 3 is named twice"),
        ({"gpus": []}, "the GPU list is empty"),
        ({"collective": "broadcast", "root": 8}, "root 8 is not in the allocation 0, 1, 2, 3, 4, 5, 6, 7"),
        ({"collective": "reduce", "gpus": [2, 5], "root": 0}, "root 0 is not in the allocation 2, 5"),
        ({"collective": "allreduce", "root": 0}, "allreduce has no root"),
        ({"collective": "allgather", "root": 3}, "allgather has no root"),
    ],
)
def test_what_does_not_fit_is_refused_with_value_and_remedy(wanted: dict[str, object], message: str) -> None:
    with refused(UsageError, message):
        topoplan.plan(DGX, **wanted)  # type: ignore[arg-type]
    with refused(UsageError, "has no GPU"):
        topoplan.plan(machine(0, {}), "allreduce")


def test_spellings_of_a_collective_are_one() -> None:
    for name in ("all-reduce", "ALLREDUCE", "all_reduce", "AllReduce"):
        assert topoplan.plan(DGX, name, gpus=[0, 1]).collective == "allreduce"


def test_the_order_of_the_gpu_list_is_that_of_the_ranks() -> None:
    """The root is a GPU number, not a rank; the rate does not depend on the order."""
    made = topoplan.plan(DGX, "broadcast", gpus=[7, 4, 5], root=5)
    assert made.ranks == ("gpu7", "gpu4", "gpu5")
    assert made.root == 2
    assert made.rate == topoplan.plan(DGX, "broadcast", gpus=[4, 5, 7], root=5).rate
    assert made.shards[0].stages[0].root == 2


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_an_unreachable_gpu_is_named_with_its_cut(collective: str) -> None:
    """Two islands: the message names both, and no link leaves the cut, which for a reduce is what its root misses."""
    islands = machine(4, both_ways({("gpu0", "gpu2"): 1.0, ("gpu1", "gpu3"): 1.0}))
    cut, rest = sorted([("gpu0", "gpu2"), ("gpu1", "gpu3")], reverse=collective == "reduce")
    leads = f"leads from {{{', '.join(cut)}}} to {{{', '.join(rest)}}}"
    with refused(InfeasibleError, leads) as caught:
        topoplan.plan(islands, collective)
    assert caught.value.cut == cut  # type: ignore[attr-defined]


def test_a_wire_of_one_direction_serves_a_broadcast_and_nothing_that_needs_an_answer() -> None:
    """gpu1 hears and cannot answer: a broadcast from gpu0 works, for a reduce the cut is what gpu1 reaches, itself."""
    wire = machine(2, {("gpu0", "gpu1"): 5.0})
    made = topoplan.plan(wire, "broadcast")
    assert topoplan.verify(made).optimal
    assert made.rate == 5
    for collective in ("reduce", "allreduce", "allgather"):
        with pytest.raises(InfeasibleError) as caught:
            topoplan.plan(wire, collective)
        assert caught.value.cut == ("gpu1",)


@pytest.mark.parametrize("schedule", ["one-hop", "mesh", "lowest-tree", "trees"])
def test_schedules_of_a_root_need_only_its_direction(schedule: str) -> None:
    """gpu0 sends to three GPUs that cannot answer, the slowest at 5 GB/s; reversed, they send to gpu0."""
    wires = {("gpu0", "gpu1"): 10.0, ("gpu0", "gpu2"): 10.0, ("gpu0", "gpu3"): 5.0, ("gpu1", "gpu2"): 4.0}
    back = {(b, a): width for (a, b), width in wires.items()}
    asked = {} if schedule == "trees" else {"schedule": schedule}
    for collective, links in (("broadcast", wires), ("reduce", back)):
        made = topoplan.plan(machine(4, links), collective, root=0, **asked)  # type: ignore[arg-type]
        assert topoplan.verify(made).rate == 5
        with refused(InfeasibleError, "path leads from"):
            topoplan.plan(machine(4, links), collective, root=3, **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [5, 12])
def test_a_chain_of_one_way_links_is_broadcast_at_its_cut(size: int) -> None:
    """No rank reaches the root, and none needs to; the reduce of the reversed chain is the same."""
    wires = {(f"gpu{i}", f"gpu{i + 1}"): 10.0 for i in range(size - 1)}
    wires |= {("gpu0", f"gpu{i}"): 5.0 for i in range(2, size)}
    back = {(dst, src): width for (src, dst), width in wires.items()}
    for links, collective in ((wires, "broadcast"), (back, "reduce")):
        made = topoplan.plan(machine(size, links), collective, root=0)
        assert topoplan.verify(made).optimal
        assert made.rate == 10


def mixed() -> Topology:
    """gpu0 and gpu1 have NVLink, gpu1 and gpu2 PCIe."""
    part = machine(3, both_ways({("gpu0", "gpu1"): 25.0}))
    pcie = (Link("gpu1", "gpu2", "pcie", 12.0), Link("gpu2", "gpu1", "pcie", 12.0))
    return replace(part, links=(*part.links, *pcie))


def test_insisting_on_a_channel_that_does_not_connect_is_refused() -> None:
    """NVLink alone misses 5 of the DGX-1V's 0 and 5; ``auto`` goes over PCIe."""
    with refused(InfeasibleError, "no NVLink path leads from {gpu0} to {gpu5}", "try --channels auto"):
        topoplan.plan(DGX, "allreduce", gpus=[0, 5], channels="nvlink")
    assert topoplan.plan(DGX, "allreduce", gpus=[0, 5]).channels == ("pcie",)
    assert topoplan.plan(DGX, "allreduce", gpus=[0, 4]).channels == ("nvlink",)
    assert topoplan.plan(DGX, "allreduce", gpus=[0, 4], channels="pcie").channels == ("pcie",)


def test_a_machine_joined_only_by_both_channels_takes_both() -> None:
    """An NVLink island and a GPU on PCIe: one forest over both; PCIe alone says which cut stops it."""
    made = topoplan.plan(mixed(), "allreduce")
    assert made.channels == ("all",)
    assert topoplan.verify(made).optimal
    with pytest.raises(InfeasibleError) as caught:
        topoplan.plan(mixed(), "allreduce", channels="pcie")
    assert caught.value.cut == ("gpu0",)


@given(st.integers(2, 5), st.data())
@settings(max_examples=40, deadline=None)
def test_every_cut_of_an_error_is_a_proof(size: int, data: st.DataObject) -> None:
    """Random links over NVLink and PCIe: a plan, or a cut that holds a GPU, misses one, and that no link leaves."""
    wires = data.draw(st.sets(st.sampled_from([(a, b) for a in range(size) for b in range(size) if a != b])))
    links = tuple(
        Link(f"gpu{a}", f"gpu{b}", data.draw(st.sampled_from(["nvlink", "pcie"])), 1.0)
        for a, b in sorted(wires)
    )
    topology = replace(machine(size, {}), links=links)
    try:
        fabric = usable_fabric(topology)
    except InfeasibleError as error:
        side = set(error.cut)
        assert 0 < len(side) < size
        channels = ("nvlink",) if "no NVLink path" in str(error) else ("nvlink", "pcie")
        crossing = [link for link in links if link.src in side and link.dst not in side]
        assert not any(link.channel in channels for link in crossing)
        return
    assert topoplan.verify(topoplan.plan(topology, "allreduce")).optimal
    assert fabric.unreachable() == ()


def test_more_gpus_than_memory_has_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables grow with the square of the ranks: estimated before they are made, and said."""
    pair = topoplan.nvswitch_cluster(2)
    monkeypatch.setattr("topoplan.solve.route_table.physical_memory", lambda: 30_000)
    says = "packing trees of 16 GPUs takes about 15KB of memory; this machine can give 14.65KB; choose fewer GPUs"
    with refused(UsageError, begins=says):
        topoplan.plan(pair, "allgather")


@pytest.mark.parametrize(
    ("name", "collective", "most"),
    [
        *(("dgx-2", *row) for row in (("broadcast", 12), ("allreduce", 16), ("allgather", 16))),
        *(
            pytest.param("mi250", *row, marks=pytest.mark.thorough)
            for row in (("broadcast", 6), ("allreduce", 8))
        ),
    ],
)
def test_few_trees_are_few_at_the_same_rate(name: str, collective: str, most: int) -> None:
    """On one switch no more than one hop has; on sixteen uneven GPUs the broadcast of 300 GB/s fits in six."""
    made = topoplan.plan(name, collective, order="trees")
    assert topoplan.verify(made).optimal
    assert made.num_trees <= most


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ROOTED)
@pytest.mark.parametrize(
    ("name", "height", "trees"),
    [
        ("torus:3,3,3@25", 4, 6),
        ("torus:4,4,4@25", 7, 6),
        ("torus:3,3", 3, 4),
        ("torus:9", 4, 1),
        ("torus:9", 8, 2),
    ],
)
def test_disjoint_trees_are_low_and_fill_the_wires(
    name: str, height: int, trees: int, collective: str
) -> None:
    """As many as the wires of a rank, in fewer hops than the forests of the packing program: 7 for 64 ranks."""
    best = topoplan.plan(name, collective)
    made = disjoint_forest(best, height)
    assert made is not None
    assert (made.num_trees, made.height) == (trees, height)
    (wire,) = {link.bandwidth for link in Fabric(best.topology, best.channels).links}
    assert made.rate == pytest.approx(trees * wire)
    assert topoplan.verify(made).rate == made.rate
    assert disjoint_forest(best, height, above=trees) is None


@pytest.mark.sampled
@settings(max_examples=40, deadline=None)
@given(direct_machines(), st.integers(1, 4), st.sampled_from(ROOTED))
def test_disjoint_trees_on_any_direct_links(topology: Topology, height: int, collective: str) -> None:
    """Trees of at most the height asked for, of equal shares, on links of any width; they verify below the bound."""
    best = topoplan.plan(topology, collective)
    made = disjoint_forest(best, height)
    if made is None:
        return
    report = topoplan.verify(made)
    assert report.rate <= best.bound
    assert made.height <= height
    widths = [int(link.bandwidth) for link in topology.links]
    assert made.rate >= made.num_trees * math.gcd(*widths) * (1 - TOLERANCE)


def test_disjoint_trees_need_a_root_and_direct_links() -> None:
    assert disjoint_forest(topoplan.plan("dgx-1v"), 4) is None
    assert disjoint_forest(topoplan.plan("dgx-2", "broadcast"), 4) is None


def measured(topology: Topology) -> Topology:
    """The machine with bandwidths that are all different, as measured ones are."""
    shares = [1 - (place * 37 % 101) / 1000 for place in range(len(topology.links))]
    links = zip(topology.links, shares, strict=True)
    return replace(topology, links=tuple(replace(x, bandwidth=round(x.bandwidth * s, 4)) for x, s in links))


@pytest.mark.sampled
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("name", ["dgx-1v", "two servers"])
def test_no_time_at_all_gives_a_valid_plan_with_its_true_gap(name: str, collective: str) -> None:
    """The first round is always made: rate and bound verify, and a note says what was left undone."""
    topology = topoplan.load("dgx-1v") if name == "dgx-1v" else topoplan.nvswitch_cluster(2)
    topology = measured(topology)
    hurried = topoplan.plan(topology, collective, time_limit=0)
    best = topoplan.plan(topology, collective)
    verdict = topoplan.verify(hurried)
    assert verdict.optimal == (hurried.rate == hurried.bound)
    assert hurried.rate <= best.rate <= best.bound <= hurried.bound
    assert hurried.notes[0].startswith("stopped after 0 s: ")
    if hurried.rate < hurried.bound:
        assert f"{hurried.gap:.2%} below the bound" in hurried.notes[0]


def test_a_limit_that_is_not_met_changes_nothing() -> None:
    servers = topoplan.nvswitch_cluster(2)
    for topology, method in (("dgx-1v", "exact"), ("dgx-1v", "mwu"), (servers, "three-phase")):
        plans = (topoplan.plan(topology, method=method, time_limit=limit) for limit in (None, 1e6))
        assert len({plan.digest for plan in plans}) == 1


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "method", "collective"),
    [("dgx-2", "mwu", each) for each in (*COLLECTIVES, "alltoall")]
    + [("ring", "mwu", each) for each in COLLECTIVES]
    + [("servers", "three-phase", each) for each in COLLECTIVES],
)
def test_other_methods_stop_as_well(name: str, method: str, collective: str) -> None:
    """Rate, optimum and bound are in order, and one note, the first, states the gap of the plan."""
    bare = (
        topoplan.nvswitch_cluster(3)
        if name == "servers"
        else topoplan.load(name.replace("ring", "torus:6@25"))
    )
    hurried = topoplan.plan(measured(bare), collective, method=method, time_limit=0)
    best = topoplan.plan(measured(bare), collective)
    assert topoplan.verify(hurried).rate == hurried.rate <= best.rate <= best.bound <= hurried.bound
    stopped = [note for note in hurried.notes if kind_of(note) == "stopped"]
    assert stopped == [*hurried.notes[:1]] or hurried.rate == best.rate
    if hurried.gap > 0:
        assert f"{hurried.gap:.2%} below the bound" in stopped[0]
    assert not any("are kept" in note or "three phases stay" in note for note in hurried.notes)


FEW: dict[str, Any] = {"collective": "allgather", "order": "trees"}


@pytest.mark.parametrize(
    ("name", "options"), [("dgx-2", FEW), ("dgx-1v", FEW), ("dgx-1v", {"channels": "nvlink+pcie"})]
)
def test_every_search_may_be_stopped(name: str, options: dict[str, Any]) -> None:
    """For trees on a fabric of orbits and on one of exact tables, and those of two channels."""
    hurried = topoplan.plan(measured(topoplan.load(name)), time_limit=0, **options)
    topoplan.verify(hurried)
    assert any("stopped after 0 s" in note for note in hurried.notes)


@pytest.mark.parametrize(
    ("collective", "options", "other"),
    [
        ("reduce", {"method": "mwu", "channels": "all-staged"}, "nvlink"),
        ("allreduce", {"method": "mwu", "channels": "nvlink+pcie", "nbytes": 1000}, "pcie"),
    ],
)
def test_plans_over_fewer_wires_state_the_searches_of_others_that_were_stopped(
    collective: str, options: dict[str, Any], other: str
) -> None:
    made = topoplan.plan("dgx-h100", collective, time_limit=0, **options)
    said = [note.split(": ")[0] for note in made.notes if kind_of(note) == "stopped"]
    others = [note for note in said if note.startswith("over ")]
    assert others == [f"over {other}"]


@pytest.mark.parametrize("collective", ["allreduce", "broadcast", "allgather"])
def test_a_stopped_search_of_a_height_leaves_the_rate_open(collective: str) -> None:
    made = topoplan.plan("dgx-1v", collective, height=2, time_limit=0)
    assert any("a higher rate at this height was not looked for to the end" in one for one in made.notes)


def test_the_gap_of_a_stopped_forest_is_that_of_its_certificate() -> None:
    """The note's figure is 1 - rate / bound of the shards and the certificate that come with it."""
    fabric = Fabric(measured(topoplan.load("dgx-2")), ("nvlink",))
    forest = pack_exact(fabric, "broadcast", root=0, time_limit=0)
    assert len(forest.shards) == 1
    rate = forest_rate(forest.shards, fabric)
    bound = forest.certificate.bound(fabric, "broadcast", 0)
    assert rate is not None
    assert rate < bound
    gap = 1 - float(rate) / float(bound)
    said = f"stopped after 0 s: the rate is {gap:.2%} below the bound, and more time may raise it"
    assert forest.notes == (said,)


@pytest.mark.parametrize("limit", [-1, float("nan"), float("inf"), "5"])
def test_limits_that_are_no_seconds_are_refused(limit: float) -> None:
    with pytest.raises(UsageError, match=r"time_limit is .*give the seconds"):
        topoplan.plan(topoplan.load("dgx-1v"), time_limit=limit)


def test_a_deadline_remembers_that_it_cut_something_short() -> None:
    late = Deadline(0)
    assert not late.cut
    assert late.over()
    assert late.cut
    assert not Deadline(None).over()
    assert Deadline(1000).left is not None


def test_command_line(run: Run) -> None:
    """--time-limit 0 prints the note with every method; a value that is not a number is refused in one line."""
    for method in ("exact", "mwu", "three-phase --servers 2 --nic-bandwidth 10GB/s"):
        told = run("plan", "dgx-1v", "--time-limit", "0", "--notes", "--method", *method.split())[1]
        assert "note: stopped after 0 s: " in told
    must = "must be a number of seconds of 0 or more, such as 10, got"
    for words, message in (
        (["--time-limit", "soon"], f"{must} 'soon'"),
        (["--time-limit=-1"], f"{must} '-1'"),
        (["--time-limit", "1", "--sizes", "1KB:1MB"], "--time-limit does not go with --sizes"),
    ):
        status, _, error = run("plan", "dgx-1v", *words)
        assert (status, error.count("\n"), message in error) == (2, 1, True)


def test_what_was_searched_is_told_by_the_kind_of_a_note_and_not_by_its_words() -> None:
    made = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", time_limit=0)
    assert [kind_of(note) for note in made.notes] == ["stopped"]
    words = replace(made, notes=("stopped after lunch", "height is not depth"))
    assert f"lowest height first: none below {made.height}" in "\n".join(plan_lines(words, "height"))
    stopped = replace(made, notes=(Note("no time", "stopped"),))
    assert "order        stopped in time" in "\n".join(plan_lines(stopped, "height"))


def test_a_note_is_its_text_and_keeps_its_kind_when_it_is_copied() -> None:
    note = Note("warning: gpu0", "warning")
    assert json.loads(json.dumps([note])) == ["warning: gpu0"]
    for other in (pickle.loads(pickle.dumps(note)), copy.deepcopy(note)):
        assert (other, kind_of(other)) == (note, "warning")


@pytest.mark.parametrize(
    "option", [{"demand": np.ones((8, 8), int)}, {"epsilon": 0.1}, {"tolerance": 0.1}, {"threshold": 0.1}]
)
def test_other_schedules_refuse_the_options_of_trees(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(option))} is for packed trees, got schedule 'ring'"):
        topoplan.plan("dgx-1v", schedule="ring", **option)

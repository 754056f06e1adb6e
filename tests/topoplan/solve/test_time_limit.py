"""Time limits: the best plan so far, valid and with its true gap, and one line where a limit makes no sense."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace

import pytest

import topoplan
from topoplan.cli.main import main
from topoplan.cli.plan import plan_lines
from topoplan.errors import UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.notes import Note, kind_of
from topoplan.machine.topology import Topology
from topoplan.plans.loads import forest_rate
from topoplan.plans.plan import COLLECTIVES
from topoplan.solve.packing.exact import pack_exact
from topoplan.solve.search_control import Deadline


def measured(topology: Topology) -> Topology:
    """The machine with bandwidths that are all different, as measured ones are."""
    links = tuple(
        replace(link, bandwidth=round(link.bandwidth * (1 - (place * 37 % 101) / 1000), 4))
        for place, link in enumerate(topology.links)
    )
    return replace(topology, links=links)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("machine", ["dgx-1v", "two servers"])
def test_no_time_at_all_gives_a_valid_plan_with_its_true_gap(machine: str, collective: str) -> None:
    """The first round is always made: rate and bound verify, and a note says what was left undone."""
    topology = topoplan.load("dgx-1v") if machine == "dgx-1v" else topoplan.nvswitch_cluster(2)
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
    """The same plan as without one, and no note."""
    topology = topoplan.load("dgx-1v")
    assert topoplan.plan(topology, time_limit=1e6).digest == topoplan.plan(topology).digest


def test_trees_first_may_be_stopped_too() -> None:
    """On one fabric of orbits and on one of exact tables."""
    for machine in ("dgx-2", "dgx-1v"):
        hurried = topoplan.plan(measured(topoplan.load(machine)), "allgather", order="trees", time_limit=0)
        topoplan.verify(hurried)
        assert hurried.notes[0].startswith("stopped after 0 s: ")


def test_both_channels_share_the_time() -> None:
    """A plan over NVLink and PCIe stops both of its searches."""
    made = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", channels="nvlink+pcie", time_limit=0)
    topoplan.verify(made)
    assert any("stopped after 0 s" in note for note in made.notes)


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
    assert forest.notes == (
        f"stopped after 0 s: the rate is {gap:.2%} below the bound, and more time may raise it",
    )


@pytest.mark.parametrize("limit", [-1, float("nan"), float("inf"), "5"])
def test_limits_that_are_no_seconds_are_refused(limit: float) -> None:
    """In one line with the value."""
    with pytest.raises(UsageError, match=r"time_limit is .*give the seconds"):
        topoplan.plan(topoplan.load("dgx-1v"), time_limit=limit)


def test_weights_are_not_searched_against_the_clock() -> None:
    """Multiplicative weights know no limit."""
    with pytest.raises(UsageError, match="leave it out with 'mwu'"):
        topoplan.plan(topoplan.load("dgx-1v"), method="mwu", time_limit=1)


def test_a_deadline_remembers_that_it_cut_something_short() -> None:
    """Only where a search asked."""
    late = Deadline(0)
    assert not late.cut
    assert late.over()
    assert late.cut
    assert not Deadline(None).over()
    assert Deadline(1000).left is not None


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """--time-limit 0 prints the note; what is no number of seconds, or goes with another method, is one line."""
    assert main(["plan", "dgx-1v", "--time-limit", "0"]) == 0
    assert "note: stopped after 0 s: " in capsys.readouterr().out
    for words, message in (
        (["--time-limit", "soon"], "must be a number of seconds of 0 or more, such as 10, got 'soon'"),
        (["--time-limit=-1"], "must be a number of seconds of 0 or more, such as 10, got '-1'"),
        (["--time-limit", "1", "--method", "mwu"], "--time-limit belongs to --method exact"),
        (["--time-limit", "1", "--sizes", "1KB:1MB"], "--time-limit does not go with --sizes"),
    ):
        assert main(["plan", "dgx-1v", *words]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_what_was_searched_is_told_by_the_kind_of_a_note_and_not_by_its_words() -> None:
    made = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", time_limit=0)
    assert [kind_of(note) for note in made.notes] == ["stopped"]
    words = replace(made, notes=("stopped after lunch", "height is not depth"))
    assert f"lowest height first: none below {made.height}" in "\n".join(plan_lines(words, "height"))
    stopped = replace(made, notes=(Note("no time", "stopped"),))
    assert "order  stopped in time" in "\n".join(plan_lines(stopped, "height"))


def test_a_note_is_its_text_and_keeps_its_kind_when_it_is_copied() -> None:
    note = Note("warning: gpu0", "warning")
    assert json.loads(json.dumps([note])) == ["warning: gpu0"]
    for other in (pickle.loads(pickle.dumps(note)), copy.deepcopy(note)):
        assert (other, kind_of(other)) == (note, "warning")

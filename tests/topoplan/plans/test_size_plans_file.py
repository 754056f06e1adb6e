"""Files of plans by size: nothing lost, one machine for all ranges, and a clear refusal of what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.hand_plans import SHAPES, forest_plan
from tests.support.small_fabrics import COLLECTIVES
from topoplan.errors import PlanError, UsageError
from topoplan.plans.plan import Plan, SizeRange
from topoplan.plans.size_plans import SizePlans
from topoplan.plans.verify import verify_all


def by_hand(collective: str = "allreduce", starts: tuple[int, ...] = (0, 100, 5000)) -> SizePlans:
    """Ranges that begin at these bytes, with stars, chains and heaps in turn."""
    stops = (*starts[1:], None)
    plans = [forest_plan(4, collective, shape) for shape in sorted(SHAPES)]
    return SizePlans(
        tuple(
            SizeRange(start, stop, plans[number % len(plans)])
            for number, (start, stop) in enumerate(zip(starts, stops, strict=True))
        )
    )


@pytest.fixture(scope="module")
def planned() -> SizePlans:
    """Three ranges of four V100."""
    return topoplan.plan_by_size(topoplan.load("v100x4"))


def test_plans_by_size_survive_their_file(planned: SizePlans) -> None:
    """Read back they are equal, written again they are the same bytes, and every range verifies as before."""
    text = planned.to_json()
    back = SizePlans.from_json(text)
    assert back == planned
    assert back.to_json() == text
    assert back.digest == planned.digest
    assert verify_all(back) == verify_all(planned)


@given(st.sampled_from(COLLECTIVES), st.sets(st.integers(1, 1 << 40), max_size=5))
@settings(max_examples=40, deadline=None)
def test_any_ranges_survive_their_file(collective: str, starts: set[int]) -> None:
    """Whatever the number of ranges and wherever they begin."""
    made = by_hand(collective, (0, *sorted(starts)))
    assert SizePlans.from_json(made.to_json()) == made


def test_the_machine_stands_in_the_file_once(planned: SizePlans) -> None:
    """The promised keys; each plan is a plan file without its machine, and with it one that stands alone."""
    text = planned.to_json()
    value = json.loads(text)
    assert list(value) == ["format", "collective", "ranges", "topology", "times"]
    assert (value["format"], value["collective"]) == ("topoplan.plans/2", "allreduce")
    assert text.count("topoplan.topology/1") == 1
    assert [(one["from"], one["to"]) for one in value["ranges"]] == [
        (one.start, one.stop) for one in planned.ranges
    ]
    for one, expected in zip(value["ranges"], planned.plans, strict=True):
        assert "topology" not in one["plan"]
        alone = Plan.from_json(json.dumps(one["plan"] | {"topology": value["topology"]}))
        assert alone == expected


def test_load_plan_reads_both_kinds_and_refuses_others(planned: SizePlans, tmp_path: Path) -> None:
    """Told apart by the format that the file states, not by its name."""
    path = tmp_path / "a.json"
    for book in (planned, planned.plans[0]):
        path.write_text(book.to_json(), encoding="utf-8")
        assert topoplan.load_plan(path) == topoplan.load_plan(str(path)) == book
    with pytest.raises(UsageError, match=r"none\.json cannot be read: No such file"):
        topoplan.load_plan(tmp_path / "none.json")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is binary, not text"):
        topoplan.load_plan(path)
    path.write_text('{"format": "topoplan.plans/3"}')
    with pytest.raises(PlanError, match=r"format 'topoplan\.plans/3' is not 'topoplan\.plan/1'"):
        topoplan.load_plan(path)


def test_every_size_has_one_plan() -> None:
    """The range begins with its first byte and ends before its last; a single plan answers for all sizes."""
    made = by_hand()
    assert [made.at(size) for size in (0, 99, 100, 4999, 5000, 1 << 60)] == [
        made.plans[i] for i in (0, 0, 1, 1, 2, 2)
    ]
    assert made.at(99) is made.plans[0]
    assert made.plans[1].at(99) is made.plans[1]
    for book in (made, made.plans[1]):
        with pytest.raises(UsageError, match="a buffer of -1 bytes does not exist"):
            book.at(-1)


@pytest.mark.parametrize("collective", ["allreduce", "broadcast"])
def test_a_single_plan_is_a_book_of_one_range(collective: str) -> None:
    """It answers as plans by size of one range do, and as a file it stays a plan."""
    plan = forest_plan(4, collective, "star")
    book = SizePlans(plan.ranges)
    assert plan.ranges == book.ranges == (SizeRange(0, None, plan),)
    assert plan.plans == book.plans == (plan,)
    assert plan.crossovers == book.crossovers == ()
    assert plan.at(1 << 40) is book.at(1 << 40) is plan
    assert verify_all(plan) == verify_all(book) == (topoplan.verify(plan),)
    assert (plan.collective, plan.ranks, plan.root) == (book.collective, book.ranks, book.root)
    assert plan.digest != book.digest


def test_the_digest_tells_apart_what_differs() -> None:
    """Other crossovers or other plans; not the time it took to make them."""
    made = by_hand()
    moved = by_hand(starts=(0, 101, 5000))
    swapped = SizePlans(tuple(replace(one, plan=made.plans[0]) for one in made.ranges))
    timed = SizePlans(tuple(replace(one, plan=one.plan.timed(3.0)) for one in made.ranges))
    assert len({made.digest, moved.digest, swapped.digest}) == 3
    assert timed.digest == made.digest


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([], "at least one range"),
        ([(1, None)], "range 0 starts at 1 bytes; it must start at 0"),
        ([(0, 10), (11, None)], "range 1 starts at 11 bytes; it must start at 10"),
        ([(0, 10), (9, None)], "range 1 starts at 9 bytes; it must start at 10"),
        ([(0, None), (5, None)], "range 1 starts at 5 bytes; it must start nowhere"),
        ([(0, 10)], "no range covers sizes from 10 bytes on"),
        ([(0, 10), (10, 10)], "range 1 from 10 to 10 bytes holds no size"),
    ],
)
def test_ranges_with_gaps_are_refused(spans: list[tuple[int, int | None]], message: str) -> None:
    """Gaps, overlaps, empty ranges, a first byte or an end that is missing."""
    plan = forest_plan(3, "allreduce", "star")
    with pytest.raises(PlanError, match=message):
        SizePlans(tuple(SizeRange(start, stop, plan) for start, stop in spans))


@pytest.mark.parametrize(
    ("collective", "size", "root", "name"),
    [("reduce", 3, None, "collective"), ("broadcast", 4, None, "ranks"), ("broadcast", 3, 0, "root")],
)
def test_plans_of_different_calls_are_refused(
    collective: str, size: int, root: int | None, name: str
) -> None:
    other = forest_plan(size, collective, "star", **({} if root is None else {"root": root}))
    ranges = (SizeRange(0, 8, forest_plan(3, "broadcast", "star")), SizeRange(8, None, other))
    with pytest.raises(PlanError, match=f"the plan of range 1 has another {name} than that of range 0"):
        SizePlans(ranges)


def test_a_wrong_plan_in_any_range_is_found() -> None:
    """The message names the range, then shard and stage as for a single plan."""
    made = by_hand()
    stage = made.plans[1].shards[2].stages[0]
    shards = list(made.plans[1].shards)
    shards[2] = replace(shards[2], stages=(replace(stage, edges=stage.edges[:-1]), *shards[2].stages[1:]))
    wrong = replace(made.plans[1], shards=tuple(shards))
    ranges = (made.ranges[0], replace(made.ranges[1], plan=wrong), made.ranges[2])
    with pytest.raises(PlanError, match=r"sizes from 100B to 4\.883KB: shard 2, stage 0, rank 0") as caught:
        verify_all(SizePlans(ranges))
    assert (caught.value.shard, caught.value.stage, caught.value.rank) == (2, 0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("ranges"), "ranges must be a list, not NoneType"),
        (lambda v: v.update(ranges=[]), "at least one range"),
        (lambda v: v["ranges"].__setitem__(1, 7), "range 1 must be an object, not int"),
        (lambda v: v["ranges"][1].pop("plan"), "range 1: plan must be an object, not NoneType"),
        (lambda v: v["ranges"][1].update({"from": "0"}), "range 1: from must be a whole number of bytes"),
        (lambda v: v["ranges"][1].update({"from": -3}), "range 1: from must be a whole number of bytes"),
        (lambda v: v["ranges"][1].update({"to": 2.5}), "range 1: to must be a whole number of bytes"),
        (lambda v: v["ranges"][1].update({"to": True}), "range 1: to must be a whole number of bytes"),
        (lambda v: v["ranges"][0].update({"to": 50}), "range 1 starts at 100 bytes; it must start at 50"),
        (lambda v: v["ranges"][2]["plan"].pop("format"), "range 2: format None is not 'topoplan.plan/1'"),
        (lambda v: v["ranges"][2]["plan"]["shards"][0].update(share="x"), "range 2: shard 0: share must be"),
        (lambda v: v.update(collective="reduce"), "collective 'reduce' is not that of the plans, allreduce"),
        (lambda v: v.pop("topology"), "embedded topology is wrong"),
        (lambda v: v.update(format="topoplan.plan/1"), "format 'topoplan.plan/1' is not 'topoplan.plans/1'"),
    ],
)
def test_a_wrong_key_is_named_with_its_range(
    change: Callable[[dict[str, Any]], object], message: str
) -> None:
    """On one line."""
    value = json.loads(by_hand().to_json())
    change(value)
    with pytest.raises(PlanError) as caught:
        SizePlans.from_json(json.dumps(value))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)

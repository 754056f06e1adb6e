"""What is judged slow of what ranks tell each other, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

import topoplan
from collectives import Communicator
from collectives.recovery.link_monitor import (
    LinkMeasurement,
    RankMeasurements,
    SlowLink,
    SlowLinkDetector,
    SlowRank,
)
from collectives.recovery.survivors import Membership, PlanChange
from topoplan.errors import UsageError

DGX = topoplan.load("dgx-1v")
FOUR = [(a, b) for a in range(4) for b in range(4) if a != b]
"""Every ordered pair of GPUs 0 to 3 has an NVLink."""


def told(
    rates: Mapping[tuple[int, int], float], *, believed: Mapping[str, float] | None = None
) -> list[RankMeasurements]:
    """Of four ranks whose connections have these rates, 1 where nothing else is said, of 25 or 50 GB/s."""
    machine = topoplan.slow_links(DGX, believed or {})
    bandwidth = {(link.src, link.dst): link.bandwidth for link in machine.links}
    carried = [
        LinkMeasurement(
            *(ends := (f"gpu{pair[0]}", f"gpu{pair[1]}")),
            "nvlink",
            rates.get(pair, 1.0) * 0.001 * bandwidth[ends],
            bandwidth[ends],
            ((*ends, "nvlink"),),
        )
        for pair in FOUR
    ]
    return [
        RankMeasurements((), tuple(one for one in carried if one.source == f"gpu{rank}")) for rank in range(4)
    ]


def judge() -> SlowLinkDetector:
    return SlowLinkDetector(DGX, [f"gpu{rank}" for rank in range(4)])


def test_a_link_is_slow_once_it_was_seen_twice_in_a_row() -> None:
    one = judge()
    assert one.judge(told({(0, 3): 0.1}), 1) == []
    assert not one.slow
    assert one.judge(told({(0, 3): 0.1}), 5) == [
        "gpu0->gpu3: 0.005 GB/s, planned 50: 10% of what other links reach, since collective 1"
    ]
    assert one.believed == {"gpu0->gpu3": 5.0}
    (link,) = one.slow
    assert isinstance(link, SlowLink)
    assert (link.wire, link.planned, round(link.share, 9), link.since) == ("gpu0->gpu3", 50.0, 0.1, 1)


def test_one_that_is_slow_now_and_then_is_not() -> None:
    one = judge()
    for first in range(1, 40, 8):
        assert one.judge(told({(0, 3): 0.1}), first) == []
        assert one.judge(told({}), first + 4) == []
    assert one.slow == ()


@pytest.mark.parametrize(
    "rates",
    [dict.fromkeys(FOUR, 0.01), {(0, 3): 0.55}, dict.fromkeys(FOUR[:7], 0.1)],
    ids=["all alike", "above half", "most of them, so that the others are the exception"],
)
def test_links_are_compared_with_each_other(rates: Mapping[tuple[int, int], float]) -> None:
    one = judge()
    for first in (1, 5, 9):
        assert one.judge(told(rates), first) == []


def test_connections_faster_than_planned_make_no_other_slow() -> None:
    """A link whose neighbours rest lets through more than its share; half of them do."""
    one = judge()
    for first in (1, 5, 9):
        assert one.judge(told(dict.fromkeys(FOUR[::2], 5.0)), first) == []


def test_what_is_believed_is_not_news_again_and_what_becomes_slower_still_is() -> None:
    one = judge()
    for first in (1, 5):
        one.judge(told({(0, 3): 0.1}), first)
    for first in (9, 13, 17):
        assert one.judge(told({}, believed=one.believed), first) == []
    assert one.judge(told({(0, 3): 0.2}, believed=one.believed), 21) == []
    assert len(one.judge(told({(0, 3): 0.2}, believed=one.believed), 25)) == 1
    assert one.believed == {"gpu0->gpu3": 1.0}
    assert [link.since for link in one.slow if isinstance(link, SlowLink)] == [1]


def judged(
    one: SlowLinkDetector, rates: Mapping[tuple[int, int], float], times: int, leaves: int = 0
) -> list[str]:
    """What is new after so many judgements of these rates, of links but for the last few of rank 0."""
    news = []
    for _ in range(times):
        heard = told(rates, believed=one.believed)
        if leaves:
            heard[0] = RankMeasurements((), heard[0].carried[:-leaves])
        news += one.judge(heard, 1)
    return news


def test_a_link_that_is_fast_again_needs_longer_each_time() -> None:
    one = judge()
    for least in (2, 16, 128):
        assert len(judged(one, {(0, 3): 0.1}, 2)) == 1
        assert one.believed == {"gpu0->gpu3": 5.0}
        assert judged(one, {(0, 3): 10.0}, least - 1) == []
        assert judged(one, {(0, 3): 0.9}, 1) == []
        assert judged(one, {(0, 3): 10.0}, least) == ["gpu0->gpu3 is not slow any more"]
        assert (one.believed, one.slow) == ({}, ())


def test_a_link_that_the_plan_goes_round_is_tried_again() -> None:
    one = judge()
    for least in (16, 128):
        assert len(judged(one, {(0, 3): 0.1}, 2)) == 1
        assert judged(one, {}, least - 1, leaves=1) == []
        assert judged(one, {}, 1) == []
        assert judged(one, {}, least, leaves=1) == [
            "gpu0->gpu3 has carried nothing for long, and is tried again"
        ]
        assert (one.believed, one.slow) == ({}, ())


def test_the_link_that_several_connections_share_is_blamed() -> None:
    """On a DGX-2 all that GPU 1 sends is slow: its link to the switch, not those of the others from there."""
    machine = topoplan.load("dgx-2")
    one = SlowLinkDetector(machine, machine.gpus[:4])
    listed = [
        LinkMeasurement(
            f"gpu{a}",
            f"gpu{b}",
            "nvlink",
            0.001 if a == 1 else 0.01,
            50.0,
            ((f"gpu{a}", "nvswitch0", "nvlink"), ("nvswitch0", f"gpu{b}", "nvlink")),
        )
        for a, b in FOUR
    ]
    for first in (1, 5):
        one.judge([RankMeasurements((), tuple(listed))], first)
    assert one.believed == {"gpu1->nvswitch0": 15.0}


def test_what_is_measured_of_a_link_holds_whatever_was_said_of_the_wire() -> None:
    company = Membership(topoplan.plan(DGX, gpus=[0, 1, 2]), PlanChange.of(slow_links={"gpu1-gpu2": 20.0}))
    after = company.with_slow({"gpu1->gpu2": 10.0})
    assert dict(after.change.slow_links) == {"gpu1->gpu2": 10.0, "gpu2->gpu1": 20.0}
    assert after.plan().topology.links != company.plan().topology.links


def test_two_links_say_nothing_of_each_other() -> None:
    one = judge()
    few = [RankMeasurements((), told({(0, 3): 0.1})[0].carried[1:])]
    for first in (1, 5, 9):
        assert one.judge(few, first) == []


def of_seconds(*seconds: Sequence[float]) -> list[RankMeasurements]:
    return [RankMeasurements(tuple(one)) for one in seconds]


def test_the_rank_that_the_others_wait_for_is_late() -> None:
    """It needs less time for every collective; that it is so once more is not new, and it may come in time again."""
    one = judge()
    late = of_seconds([0.03, 0.031], [0.03, 0.03], [0.01, 0.008], [0.03, 0.03])
    one.judge(late, 1)
    assert not one.slow
    one.judge(late, 5)
    (rank,) = one.slow
    assert isinstance(rank, SlowRank)
    assert (rank.rank, rank.gpu, rank.since) == (2, "gpu2", 1)
    assert rank.late == pytest.approx(0.021)
    assert str(rank) == "rank 2 (gpu2): 21 ms later than the others, since collective 1"
    one.judge(of_seconds([0.01], [0.01], [0.01], [0.01]), 9)
    assert one.slow == ()


@pytest.mark.parametrize(
    "seconds",
    [([0.01] * 3, [0.01] * 3, [0.004, 0.004, 0.01], [0.01] * 3), ([5e-4], [5e-4], [1e-4], [5e-4])],
    ids=["not always", "by less than a millisecond"],
)
def test_a_rank_is_not_late(seconds: Sequence[Sequence[float]]) -> None:
    one = judge()
    for first in (1, 5, 9):
        one.judge(of_seconds(*seconds), first)
    assert one.slow == ()


@pytest.mark.parametrize(
    ("on_slow", "said"),
    [
        ("replant", "on_slow is 'replant'; use ignore, report or replan"),
        ("replan", "the loopback back end has all ranks in one process"),
        ("report", "the loopback back end has all ranks in one process"),
    ],
)
def test_what_cannot_be_watched_is_one_line(on_slow: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        Communicator(topoplan.plan(DGX, gpus=[0, 1, 2]), on_slow=on_slow)
    assert "\n" not in str(refused.value)


def test_nobody_looks_unless_asked() -> None:
    with Communicator(topoplan.plan(DGX, gpus=[0, 1, 2])) as comm:
        comm.all_reduce([np.ones(1 << 19)] * 3)
        assert comm.slow_links == ()


def test_a_cable_that_is_slow_in_one_direction_is_slow_in_both() -> None:
    """The plan moves away from it, and is that of the machine with the slow cable."""
    members = Membership(topoplan.plan("mac-tb5-x4"))
    after = members.with_slow({"s0.tb0->s1.tb0": 1.0})
    assert dict(after.change.slow_links) == {"s0.tb0->s1.tb0": 1.0, "s1.tb0->s0.tb0": 1.0}
    assert after.plan().rate == topoplan.plan(topoplan.load("mac-tb5-x4").degrade_links({"s0-s1": 1.0})).rate
    assert members.with_slow({"s0.gpu0->s0.tb0": 1.0}).change.slow_links == (("s0.gpu0->s0.tb0", 1.0),)


def test_a_machine_that_failed_takes_its_lost_links_along() -> None:
    """It is tried again when it comes back; links between the others stay lost."""
    whole = Membership(topoplan.plan("mac-tb5-x4"))
    after = whole.at([0, 1, 3]).without(["s0-s1", "s1-s2", "s2-s3"])
    assert after.change.without_links == ("s0-s1",)
    assert (
        after.plan().rate
        == topoplan.plan(topoplan.without_links("mac-tb5-x4", ["s0-s1"]), gpus=[0, 1, 3]).rate
    )
    again = after.at([0, 1, 2, 3]).without([])
    assert again.plan().rate == topoplan.plan(topoplan.without_links("mac-tb5-x4", ["s0-s1"])).rate
    inside = Membership(topoplan.plan("dgx-1v")).at([0, 1, 2]).without(["gpu0-gpu1", "gpu0-gpu3"])
    assert inside.change.without_links == ("gpu0-gpu1",)

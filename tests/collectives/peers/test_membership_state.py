"""The state machine of the membership: all its runs of two and three ranks, its edges, and messages of no rank."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from collectives.peers.membership_state import (
    EDGES,
    KINDS,
    Decision,
    FailureReport,
    JoinCall,
    MembershipState,
    Phase,
    RankCard,
    RecoveryProgress,
    ShutdownNotice,
    Welcome,
    message_fields,
    read_message,
)
from tests.model_check import SETTINGS, Explorer, Setting, picture, table
from tests.support.checkout import ROOT
from topoplan.errors import BackendError

CARDS = [RankCard("127.0.0.1", 1000 + rank, "token", "home", "processes", 1 + rank) for rank in range(3)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(one, marks=[getattr(pytest.mark, one.mark)] if one.mark else [], id=one.name)
        for one in SETTINGS
    ],
)
def test_no_run_violates_an_invariant(setting: Setting) -> None:
    """Two memberships of an epoch, results of different ranks, a rank that waits for ever, a run without an end."""
    found = Explorer(setting).run()
    assert not found.violation, "\n".join([found.violation, *found.trace])
    assert found.states > 10_000


def test_the_page_draws_the_edges_that_the_code_has() -> None:
    page = (ROOT / "docs/fault-tolerance.md").read_text(encoding="utf-8")
    assert f"```mermaid\n{picture()}\n```\n\n{table()}\n" in page, "python -m tests.model_check --picture"


def test_a_stopped_rank_that_goes_on_when_all_others_have_ended_learns_that_it_is_out() -> None:
    """It would take them for failed, and repeat alone what they have done."""
    ranks = [MembershipState(rank, CARDS) for rank in range(3)]
    for rank in (0, 1):
        ranks[rank].begin(0.0, timeout=1.0, doubted=[2])
        ranks[rank].receive("a", 1 - rank, FailureReport(1, frozenset([2]), frozenset([2])))
        assert ranks[rank].advance(0.0) == (0, 1)
        last = {one.peer: one.message for one in ranks[rank].close()}
        assert last == {2: Decision(1, (0, 1))}
        ranks[2].receive("b", rank, last[2])
    ranks[2].begin(9.0, timeout=1.0)
    with pytest.raises(BackendError, match="excluded since epoch 1"):
        ranks[2].advance(9.0, ended=[0, 1], stopped=[0, 1])


def test_the_notice_of_a_rank_that_recovered_before_this_one_counts() -> None:
    state = MembershipState(0, CARDS)
    state.receive("b", 1, ShutdownNotice(1, 5))
    assert state.report(RecoveryProgress(4, True), 0) == "[[4, true], 0, [[1, 5]]]"
    assert state.report(RecoveryProgress(4, True), 2) == "[[4, true], 2, []]"


def test_all_edges_are_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    walked, move = set(), MembershipState._move

    def recorded(state: MembershipState, event: str) -> None:
        source = state.phase
        move(state, event)
        walked.add((source, event, state.phase))

    monkeypatch.setattr(MembershipState, "_move", recorded)

    def closed(state: MembershipState) -> None:
        assert state.phase is not Phase.CLOSED
        state.close()

    def agreeing(**given: Any) -> MembershipState:
        state = MembershipState(0, CARDS)
        state.begin(0.0, timeout=1.0, **given)
        state.advance(0.0)
        return state

    def gathering(*others: int) -> MembershipState:
        state = agreeing()
        gone = frozenset({1, 2}.difference(others))
        for other in gone:
            state.lost(other, ended=True)
        for other in others:
            state.receive(other, other, FailureReport(1, gone))
        assert state.advance(0.0) == (0, *others)
        return state

    # running, a peer that ends, all agree, texts, accept, repeat, unchanged
    for other in (RecoveryProgress(1), RecoveryProgress(0)):
        state = gathering()
        own = RecoveryProgress(0, True)
        state.say(state.report(own, 0), 0.0, timeout=1.0)
        texts = state.gathered(0.0)
        assert texts is not None
        state.recovered(own, [*texts, json.dumps([[other.handed_over, False], 0, []])])
        assert state.phase is Phase.RUNNING
        closed(state)
    state = gathering(1, 2)
    state.unchanged()
    # another failure, a back end that cannot be made, left out
    for fail in (
        lambda one: one.lost(1, ended=True),
        lambda one: one.receive(1, 1, FailureReport(2, frozenset())),
        lambda one: one.receive_answer(1, Decision(2, (1, 2))),
    ):
        state = gathering(1, 2)
        state.say("", 0.0, timeout=1.0)
        fail(state)
        with pytest.raises(BackendError):
            state.gathered(0.0)
        state.begin(1.0, timeout=1.0)
        closed(state)
    state = gathering(1, 2)
    state.say("", 0.0, timeout=1.0)
    with pytest.raises(BackendError, match="rank 1 does not answer"):
        state.gathered(1.0)
    closed(state)
    state = gathering(1)
    state.begin(1.0, timeout=1.0)
    # hears of failures, the decision, and that it is out
    state = agreeing()
    state.receive(1, 1, FailureReport(1, frozenset([2])))
    assert state.advance(0.0) == (0, 1)
    state = agreeing()
    state.receive_answer(1, Decision(1, (0, 1)))
    assert state.advance(0.0) == (0, 1)
    closed(state)
    state = agreeing()
    state.receive(1, 1, FailureReport(1, frozenset([0])))
    with pytest.raises(BackendError, match="excluded"):
        state.advance(0.0)
    state.begin(1.0, timeout=1.0)
    closed(state)
    # deadlines, and too few
    state = agreeing()
    with pytest.raises(BackendError, match="too few to continue"):
        state.advance(3.0)
    again = agreeing()
    with pytest.raises(BackendError):
        again.advance(3.0)
    again.begin(4.0, timeout=1.0)
    closed(state)
    # a rank joins
    request = JoinCall(0, CARDS[2])
    hosts = [MembershipState(rank, CARDS[:2]) for rank in (0, 1)]
    hosts[0].receive("j", 1 << 40, request)
    hosts[0].begin(0.0, timeout=1.0, invited=hosts[0].invited(hosts[0].join_requests, seats=3))
    (welcome,) = [one.message for one in hosts[0].take_outputs() if getattr(one, "source", "") == "j"]
    assert isinstance(welcome, Welcome)
    joining = MembershipState(1 << 40)
    joining.take_welcome(welcome)
    joining.begin(0.0, timeout=1.0)
    hosts[1].begin(0.0, timeout=1.0)
    hosts[1].advance(0.0)
    hosts[1].receive("j", 1 << 40, FailureReport(1, frozenset(), frozenset(), welcome.new))
    assert hosts[1].advance(0.0) is None
    assert hosts[1].candidates == (0, 1, 1 << 40)
    closed(MembershipState(5))
    assert {(edge.source, edge.event, edge.target) for edge in EDGES} == walked


EXAMPLES = [
    FailureReport(2, frozenset([1]), frozenset([1]), ((1 << 40, CARDS[0]),)),
    Decision(2, (0, 1)),
    ShutdownNotice(0, 9),
    JoinCall(0, CARDS[1]),
    Welcome(1, 30.0, (0,), ((0, CARDS[0]),), ((1 << 40, CARDS[1]),)),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda one: type(one).__name__)
def test_messages_are_read_as_they_are_written(message: Any) -> None:
    assert read_message(json.loads(json.dumps(message_fields(message, sender=4)))) == (4, message)


HOSTILE = (
    math.inf,
    math.nan,
    -1,
    1.5,
    True,
    None,
    10**400,
    "1",
    [],
    {},
    [[]],
    [True],
    [-1],
    [[1, 2]],
    [[0, ["no address", 1, "t", "h", "p", 1, 0]]],
    [[0, ["127.0.0.1", 1 << 20, "t", "h", "p", 1, 0]]],
)


def test_a_message_with_any_field_of_another_type_or_range_is_refused() -> None:
    """Values that no rank sends, in each field of each kind; the empty list is a list of ranks."""
    for message in EXAMPLES:
        right = message_fields(message, sender=4)
        for name in right:
            for value in HOSTILE:
                lists = name in ("gone", "silent", "new", "left", "members", "cards")
                if (value == [] and lists) or (value == 1.5 and name == "timeout"):
                    continue
                with pytest.raises(ValueError, match=" "):
                    read_message({**right, name: value})
            with pytest.raises(ValueError, match=r"must (have|be)"):
                read_message({key: value for key, value in right.items() if key != name})
        with pytest.raises(ValueError, match="must have"):
            read_message({**right, "more": 1})
    with pytest.raises(ValueError, match="type must be one of"):
        read_message({"type": "x", "epoch": math.inf})
    assert set(KINDS.values()) >= {type(one) for one in EXAMPLES}


@pytest.mark.parametrize("message", [FailureReport(4, frozenset()), Decision(1, (0, 1)), EXAMPLES[-1]])
def test_a_message_out_of_place_changes_nothing(message: Any) -> None:
    state = MembershipState(0, CARDS)
    before = {name: repr(value) for name, value in vars(state).items()}
    with pytest.raises(ValueError, match="answers a message"):
        state.receive("b", 1, message)
    with pytest.raises(ValueError, match="decision"):
        state.receive_answer(1, Decision(3, (0, 1)) if isinstance(message, Decision) else message)
    assert {name: repr(value) for name, value in vars(state).items()} == before

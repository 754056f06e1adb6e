"""Ranks that agree on who is left: whoever dies, at whatever moment, all that live hear the same."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from collectives.peers.membership_protocol import MembershipProtocol, can_reach_each_other
from collectives.peers.membership_state import (
    FailureReport,
    MembershipState,
    RankCard,
    RecoveryProgress,
    Reply,
)
from collectives.peers.tcp_control_plane import TcpControlPlane
from tests.support.forking import stopped_process
from tests.support.job_meeting import as_threads
from topoplan.errors import BackendError

SECONDS = 5.0


@contextmanager
def job(size: int) -> Iterator[list[MembershipProtocol]]:
    """Ranks in one process, none of which counts as ended while it lives."""
    ranks = [MembershipProtocol("127.0.0.1") for _ in range(size)]
    for rank, one in enumerate(ranks):
        one.know(rank, [other.card for other in ranks])
    try:
        yield ranks
    finally:
        for one in ranks:
            one.close()


def at_once(ranks: dict[int, Callable[[], Any]]) -> dict[int, Any]:
    """What each returns or raises, all of them at the same time."""
    calls = list(ranks.values())
    return dict(zip(ranks, as_threads(len(calls), lambda number: calls[number]()), strict=True))


def agreed(
    ranks: list[MembershipProtocol], asked: dict[int, list[int]], *, timeout: float = SECONDS, **given: Any
) -> dict[int, Any]:
    return at_once(
        {
            rank: lambda rank=rank, without=without: ranks[rank].agree(without, timeout=timeout, **given)
            for rank, without in asked.items()
        }
    )


@pytest.mark.parametrize("victims", [[0], [3], [0, 1], [1, 3, 4]], ids=str)
def test_all_that_live_agree_without_being_told_who_has_died(victims: list[int]) -> None:
    with job(5) as ranks:
        for victim in victims:
            ranks[victim].close()
        left = tuple(rank for rank in range(5) if rank not in victims)
        begun = time.monotonic()
        assert agreed(ranks, {rank: [] for rank in left}) == dict.fromkeys(left, left)
        assert time.monotonic() - begun < SECONDS
        assert {ranks[rank].epoch for rank in left} == {1}


def test_who_is_taken_for_dead_by_one_is_so_for_all() -> None:
    with job(5) as ranks:
        found = agreed(ranks, {0: [1], 2: [3], 4: []})
        assert found == dict.fromkeys((0, 2, 4), (0, 2, 4))


def test_a_rank_that_lives_and_was_left_out_is_told_so_now_and_later() -> None:
    with job(3) as ranks:
        assert agreed(ranks, {0: [1], 2: []}) == {0: (0, 2), 2: (0, 2)}
        for _ in range(2):
            with pytest.raises(
                BackendError, match=r"excluded since epoch 1: the survivors .original ranks 0.* of 3"
            ):
                ranks[1].agree(timeout=SECONDS)


def test_a_rank_that_slept_through_two_epochs_is_refused_by_its_epoch() -> None:
    with job(4) as ranks:
        agreed(ranks, {0: [3], 1: [], 2: []})
        assert agreed(ranks, {0: [1], 2: []}) == {0: (0, 2), 2: (0, 2)}
        with pytest.raises(BackendError, match=r"excluded since epoch [12].*its state is of epoch 0"):
            ranks[3].agree(timeout=SECONDS)


def test_a_silent_rank_is_waited_for_and_then_left_out() -> None:
    with job(3) as ranks:
        begun = time.monotonic()
        assert agreed(ranks, {0: [], 1: []}, timeout=0.3) == {0: (0, 1), 1: (0, 1)}
        assert time.monotonic() - begun >= 0.3


def test_a_rank_that_others_have_reported_is_not_waited_for_as_long() -> None:
    with job(3) as ranks:
        begun = time.monotonic()
        assert agreed(ranks, {0: [], 1: []}, timeout=60, doubted=[2]) == {0: (0, 1), 1: (0, 1)}
        assert time.monotonic() - begun < 60


def test_a_rank_that_was_silent_while_the_others_found_each_other_is_not_waited_for_again() -> None:
    """It has had its time where texts were gathered; the next agreement would wait for hours."""
    with job(3) as ranks:
        agreed(ranks, {0: [], 1: [], 2: []})
        gathered = {rank: lambda rank=rank: ranks[rank].gather("x", timeout=0.1) for rank in (0, 1)}
        assert all(isinstance(error, BackendError) for error in at_once(gathered).values())
        assert agreed(ranks, {0: [], 1: []}, timeout=9999) == {0: (0, 1), 1: (0, 1)}


def test_nobody_waits_for_a_host_that_is_stopped_longer_than_for_any_rank() -> None:
    """Its rendezvous takes them in, and says nothing."""
    with job(2) as ranks, stopped_process() as pid:
        agreed(ranks, {0: [], 1: []})
        one = ranks[1]
        one.state.cards[0] = replace(one.state.cards[0], pid=pid)
        one.check(time.monotonic() + 9999)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            until = time.monotonic() + 0.1
            with pytest.raises(BackendError, match="rank 0 does not answer"):
                TcpControlPlane(address, 1, 2, timeout=9999, look=lambda: one.check(until))


def test_who_leaves_in_order_has_told_how_far_it_has_come() -> None:
    """Also a rank that is alone behind it, and attends to nobody before it asks; who dies has told nothing."""
    with job(3) as ranks:
        ranks[0].state.handed_over, ranks[2].state.handed_over = 7, 0
        ranks[0].close()
        ranks[2].close()
        assert agreed(ranks, {1: []}) == {1: (1,)}
        assert ranks[1].report(RecoveryProgress(6, True), 0) == "[[6, true], 0, [[0, 7]]]"
        assert ranks[1].report(RecoveryProgress(6, True), 1) == "[[6, true], 1, []]"


def test_fewer_than_half_do_not_go_on_while_the_others_are_only_silent() -> None:
    with job(5) as ranks:
        found = agreed(ranks, {0: [], 1: []}, timeout=0.2)
        assert all(
            "2, 3, 4 are silent and not known to have ended" in str(error) for error in found.values()
        ), found
    with job(4) as ranks:
        found = agreed(ranks, {2: [], 3: []}, timeout=0.2)
        assert all(isinstance(error, BackendError) for error in found.values())


def test_a_decision_that_some_have_heard_binds_the_others_when_its_voice_dies() -> None:
    """Rank 0 and 2 have decided with rank 3, which dies before rank 1 has heard it."""
    with job(4) as ranks:
        deaf = ranks[1]
        found = at_once(
            {
                **{rank: lambda rank=rank: ranks[rank].agree(timeout=SECONDS) for rank in (0, 2)},
                3: lambda: (ranks[3].agree(timeout=SECONDS), ranks[3].close())[0],
                1: lambda: _late(deaf, 3),
            }
        )
        assert found == dict.fromkeys(range(4), (0, 1, 2, 3))


def _late(one: MembershipProtocol, peer: int) -> Any:
    """Agree, having lost what a peer says after the others heard that this rank is there."""
    receive = one.state.receive

    def without(source: Any, sender: int, message: Any) -> None:
        if sender != peer:
            receive(source, sender, message)

    one.state.receive = without  # type: ignore[method-assign]
    return one.agree(timeout=SECONDS)


def test_texts_of_those_that_are_left_come_in_their_new_order() -> None:
    with job(4) as ranks:
        agreed(ranks, {0: [1], 2: [], 3: []})
        found = at_once(
            {
                rank: lambda rank=rank: [
                    ranks[rank].gather(f"{number}:{rank}", timeout=SECONDS) for number in (1, 2)
                ]
                for rank in (0, 2, 3)
            }
        )
        assert found == {rank: [["1:0", "1:2", "1:3"], ["2:0", "2:2", "2:3"]] for rank in (0, 2, 3)}


def test_a_death_while_texts_are_gathered_ends_that_and_the_next_agreement_goes_on() -> None:
    with job(4) as ranks:
        agreed(ranks, {rank: [] for rank in range(4)})
        ranks[2].close()
        found = at_once({rank: lambda rank=rank: ranks[rank].gather("x", timeout=SECONDS) for rank in (0, 1)})
        assert {error.peer for error in found.values()} == {2}
        # rank 3 still gathers when the others begin anew
        found = at_once(
            {
                **{rank: lambda rank=rank: ranks[rank].agree(timeout=SECONDS) for rank in (0, 1)},
                3: lambda: _gather_then_agree(ranks[3]),
            }
        )
        assert found == dict.fromkeys((0, 1, 3), (0, 1, 3))
        assert (ranks[3].members, ranks[3].epoch) == ((0, 1, 3), 2)


def _gather_then_agree(one: MembershipProtocol) -> Any:
    with pytest.raises(BackendError):
        one.gather("x", timeout=SECONDS)
    return one.agree(timeout=SECONDS)


def test_strangers_change_nothing() -> None:
    with job(2) as ranks:
        host, port, *_ = json.loads(ranks[0].card)
        with (
            socket.create_connection((host, port)) as stranger,
            socket.create_connection((host, port)) as other,
        ):
            said = {"type": "gone", "from": 1, "epoch": 1, "gone": [0], "silent": [], "token": "x"}
            stranger.sendall(b"\0\0\0\x52" + json.dumps(said).encode())
            other.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert agreed(ranks, {0: [], 1: []}) == {0: (0, 1), 1: (0, 1)}


def knocking(
    ranks: list[MembershipProtocol], **given: Any
) -> tuple[threading.Thread, list[MembershipProtocol]]:
    """A process that knocks at all ranks, once they have heard it."""
    come: list[MembershipProtocol] = []
    invitation = ranks[0].invitation
    for one in ranks:
        assert one.join_requests == "[]"
    thread = threading.Thread(
        target=lambda: come.append(MembershipProtocol.request_to_join(invitation, wait=SECONDS, **given)),
        daemon=True,
    )
    thread.start()
    deadline = time.monotonic() + SECONDS
    while (
        not all(json.loads(one.join_requests) for one in ranks if not one._closed)
        and time.monotonic() < deadline
    ):
        time.sleep(0.005)
    return thread, come


def test_who_knocks_gets_the_seat_that_is_empty_and_all_agree_on_it() -> None:
    with job(3) as ranks:
        agreed(ranks, {0: [1], 2: []})
        left = [ranks[0], ranks[2]]
        thread, come = knocking(left)
        (knock,) = left[0].invited([one.join_requests for one in left], seats=3)
        assert knock.card.original_rank == 1
        found = at_once(
            {
                place: lambda one=one: one.agree(timeout=SECONDS, invited=[knock])
                for place, one in enumerate(left)
            }
            | {2: lambda: (thread.join(), come[0].agree(timeout=SECONDS))[1]}
        )
        assert found == dict.fromkeys(range(3), (0, 1, 2))
        assert {one.epoch for one in (*left, *come)} == {2}
        said = at_once(
            {
                place: lambda one=one, place=place: one.gather(str(place), timeout=SECONDS)
                for place, one in enumerate((left[0], come[0], left[1]))
            }
        )
        assert list(said.values()) == [["0", "1", "2"]] * 3
        with pytest.raises(BackendError, match="excluded since epoch"):
            ranks[1].agree(timeout=SECONDS)
        come[0].close()


def test_who_was_let_in_by_ranks_that_others_have_lost_is_let_in_by_these_too() -> None:
    """Rank 0 has heard who knocks, and dies when it has told the newcomer; rank 1 only that rank 0 is gone."""
    with job(3) as ranks:
        agreed(ranks, {0: [], 1: [2]})
        thread, come = knocking(ranks[:1])
        (knock,) = ranks[0].invited([ranks[0].join_requests], seats=3)
        with ranks[0]._changed:
            ranks[0].state.begin(time.monotonic(), timeout=SECONDS, invited=[knock])
            welcome = [one for one in ranks[0].state.take_outputs() if isinstance(one, Reply)]
            ranks[0].state._outputs = [*welcome]
            ranks[0]._carry_out()
        thread.join()

        def dies_when_the_newcomer_has_spoken() -> None:
            while (2, knock.number) not in ranks[1].state._reports:
                time.sleep(0.005)
            ranks[0].close()

        found = at_once(
            {
                0: dies_when_the_newcomer_has_spoken,
                1: lambda: ranks[1].agree(timeout=SECONDS),
                2: lambda: come[0].agree(timeout=SECONDS),
            }
        )
        assert (found[1], found[2]) == ((1, 2), (1, 2)), found
        come[0].close()


def test_who_was_let_in_does_not_go_on_when_all_that_did_are_gone() -> None:
    with job(2) as ranks:
        agreed(ranks, {0: [1]})
        thread, come = knocking(ranks[:1])
        (knock,) = ranks[0].invited([ranks[0].join_requests], seats=2)
        ranks[0].state.begin(time.monotonic(), timeout=SECONDS, invited=[knock])
        ranks[0]._carry_out()
        thread.join()
        ranks[0].close()
        with pytest.raises(BackendError, match="admitted this process have failed"):
            come[0].agree(timeout=SECONDS)
        come[0].close()


def test_seats_go_to_those_that_want_them_and_nobody_gets_one_that_is_taken() -> None:
    with job(4) as ranks:
        agreed(ranks, {0: [1, 3], 2: []})
        text = json.dumps(
            [
                [9, ["::1", 1, "t", "n", "p", 7, -1]],
                [5, ["::1", 2, "t", "n", "p", 8, 3]],
                [7, ["::1", 3, "t", "n", "p", 9, 0]],
            ]
        )
        invited = ranks[0].invited([text, text], seats=4)
        assert [(one.number, one.card.original_rank) for one in invited] == [(5, 3), (9, 1)]


def test_loopback_addresses_of_two_networks_do_not_make_a_job_that_goes_on() -> None:
    """Each would find nobody at the others' addresses, and go on alone."""
    with job(2) as ranks:
        one, other = (json.loads(rank.card) for rank in ranks)
        assert can_reach_each_other([json.dumps(one), json.dumps(other)])
        assert not can_reach_each_other([json.dumps(one), None])
        other[3] = "another network"
        assert not can_reach_each_other([json.dumps(one), json.dumps(other)])
        one[0] = other[0] = "10.0.0.7"
        assert can_reach_each_other([json.dumps(one), json.dumps(other)])


def test_a_rank_that_the_network_does_not_reach_is_not_taken_for_dead() -> None:
    """Of four ranks two see only each other: these do not go on, whatever the system says of the others' addresses."""
    with job(4) as ranks:
        for rank in (2, 3):
            for number in (0, 1):
                # nobody has a route to this address
                ranks[rank].state.cards[number] = replace(
                    ranks[rank].state.cards[number], host="255.255.255.255"
                )
        found = agreed(ranks, {2: [], 3: []}, timeout=0.2)
        assert all("0, 1 are silent" in str(error) for error in found.values()), found


@pytest.mark.parametrize(
    ("doubted", "stopped", "deadline"),
    [([1], [], 1.0), ([1], [1], 0.0), ([], [], 30.0), ([], [1], 10.0)],
)
def test_a_rank_that_is_seen_to_be_stopped_is_not_waited_for_again(
    doubted: list[int], stopped: list[int], deadline: float
) -> None:
    """Where it was reported, it has had its time; one that nobody has reported may have been stopped just now."""
    state = MembershipState(0, [RankCard("127.0.0.1", 1, "", "home", "processes", 1)] * 3)
    state.begin(100.0, timeout=10.0, doubted=doubted)
    state.receive("from 2", 2, FailureReport(1, frozenset()))
    for time_before in (100.0, math.nextafter(100.0 + deadline, 0)):
        if deadline:
            assert state.advance(time_before, stopped=stopped) is None
            assert state.deadline == 100.0 + deadline
    state.receive("from 2", 2, FailureReport(1, frozenset([1])))
    state.advance(100.0 + deadline, stopped=stopped)
    assert state.members == (0, 2)


def test_a_process_of_another_machine_is_not_seen_to_be_stopped() -> None:
    with job(2) as ranks, stopped_process() as pid:
        one, card = ranks[0], ranks[0].state.cards[1]
        one.state.candidates = (0, 1)
        one.state.cards[1] = replace(card, pid=pid)
        assert one._process_states() == {1: "T"}
        one.state.cards[1] = replace(card, pid=pid, processes="of another machine")
        assert one._process_states() == {}
        one.state.cards[1] = card


def test_nobody_waits_for_a_host_that_has_died_since_it_told_where_it_is() -> None:
    """Ranks that go on look for deaths while they look for the rendezvous, and while they wait for its welcome."""
    with job(3) as ranks:
        agreed(ranks, {0: [], 1: [], 2: []})
        ranks[1].check(math.inf)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            threading.Timer(0.2, ranks[0].close).start()
            begun = time.monotonic()
            with pytest.raises(
                BackendError, match="rank 0 has died while the survivors agree on the membership"
            ):
                TcpControlPlane(f"127.0.0.1:{port}", 1, 3, timeout=30, look=lambda: ranks[1].check(math.inf))
        with pytest.raises(BackendError, match="rank 0 has died"):
            TcpControlPlane(f"127.0.0.1:{port}", 2, 3, timeout=30, look=lambda: ranks[2].check(math.inf))
        assert time.monotonic() - begun < 30


def test_a_rank_that_does_not_know_the_membership_yet_hears_the_others_when_it_does() -> None:
    """The others may begin an agreement while it still reads their cards, or its welcome."""
    ranks = [MembershipProtocol("127.0.0.1") for _ in range(2)]
    cards = [one.card for one in ranks]
    ranks[0].know(0, cards)
    agreeing = threading.Thread(target=lambda: found.update(agreed(ranks[:1], {0: []})))
    found: dict[int, Any] = {}
    agreeing.start()
    until = time.monotonic() + SECONDS
    while not ranks[1]._early and time.monotonic() < until:
        time.sleep(0.005)
    ranks[1].know(1, cards)
    assert ranks[1].agree(timeout=SECONDS) == (0, 1)
    agreeing.join(SECONDS)
    assert found == {0: (0, 1)}
    for one in ranks:
        one.close()

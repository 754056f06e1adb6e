"""How the ranks of a tcp job find each other, and what they say when they do not."""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectives import Communicator
from collectives.backends.tcp.backend import TcpBackend
from collectives.peers.address import (
    INTERACTIVE,
    LOW_DELAY,
    Address,
    ahead_of_data,
    connect,
    parse_address,
    processes_seen,
)
from collectives.peers.blame import Waiting, blame
from collectives.peers.over_rendezvous import TcpWorld
from collectives.peers.peer_watchdog import process_state
from collectives.peers.rendezvous import Rendezvous, _Visitor
from collectives.peers.rendezvous_client import Control, Watcher
from collectives.peers.rendezvous_state import Hub, Message, Post, Unpacker, pack
from tests.support.hand_plans import forest_plan
from tests.support.ports import free_port
from topoplan.errors import BackendError, UsageError


def meet(*places: tuple[int, int], meeting: str, timeout: float = 5.0, **options: Any) -> list[Any]:
    """What becomes of processes that come as these ranks of so many: closed back ends, or errors."""
    found: list[Any] = [None] * len(places)

    def come(number: int, rank: int, size: int) -> None:
        try:
            backend = TcpBackend(rank, size, rendezvous=meeting, timeout=timeout, **options)
            backend.close()
            found[number] = backend.ranks
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=come, args=(number, *place)) for number, place in enumerate(places)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_rank_0_hosts_the_rendezvous_by_itself_and_leaves_no_path_behind(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    assert meet((2, 3), (0, 3), (1, 3), meeting=f"unix:{path}") == [(2,), (0,), (1,)]
    assert not path.exists()
    assert meet((1, 2), (0, 2), meeting=f"127.0.0.1:{free_port()}") == [(1,), (0,)]


def test_a_path_that_a_dead_process_left_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert meet((0, 1), meeting=f"unix:{path}") == [(0,)]


WRONG_PLACES = [
    ([(0, 2), (1, 3)], "came for 3 ranks and the job has 2"),
    ([(0, 3), (1, 3), (1, 3)], "two processes came as rank 1"),
]


@pytest.mark.parametrize(("places", "message"), WRONG_PLACES)
def test_wrong_places_are_told_to_everybody(places: list[tuple[int, int]], message: str) -> None:
    with Rendezvous("127.0.0.1:0", places[0][1]) as meeting:
        errors = meet(*places, meeting=meeting.address)
    assert all(isinstance(error, BackendError) and message in str(error) for error in errors)


def test_ranks_that_do_not_come_are_named() -> None:
    with Rendezvous("127.0.0.1:0", 4) as meeting:
        errors = meet((0, 4), (2, 4), meeting=meeting.address, timeout=0.3)
    for error in errors:
        assert isinstance(error, BackendError)
        assert "only 2 of 4 ranks came, not ranks 1, 3" in str(error)
        assert error.peer == 1


def test_windows_must_be_the_same_on_all_ranks() -> None:
    hub = Hub(2)
    hello = {"type": "hello", "format": "topoplan.tcp/1", "size": 2, "pid": 1, "timeout": 9, "general": None}
    assert hub.join({**hello, "rank": 1, "ports": {}, "flight_bytes": 7}, 0.0) == ("", [])
    reason, posts = hub.join({**hello, "rank": 0, "ports": {}, "flight_bytes": 8}, 0.0)
    assert "rank 0 has flight_bytes 8 and rank 1 7" in reason
    assert [rank for rank, _ in posts] == [1]


def asked_who_stalls(stopped: set[int]) -> tuple[Hub, list[Post]]:
    """Of three ranks, of which rank 0 waits for rank 1; rank 2 has answered."""
    hub = Hub(3, stopped=lambda hello: hello["rank"] in stopped)
    hello = {"type": "hello", "format": "topoplan.tcp/1", "size": 3, "pid": 1, "timeout": 9, "general": None}
    for rank in range(3):
        hub.join({**hello, "rank": rank, "ports": {}, "flight_bytes": 7}, 0.0)
    waits = {"peer": 1, "step": 3, "idle": 2.0}
    assert len(hub.receive(0, {"type": "stall", "timeout": 1.0, **waits}, 10.0)) == 2
    return hub, hub.receive(2, {"type": "pong", **waits}, 10.01)


def test_a_rank_that_is_seen_to_be_stopped_is_not_waited_for_when_all_say_what_they_wait_for() -> None:
    """One that may be slow has a second."""
    for stopped, seconds in (({1}, 0.06), (set(), 1.01)):
        hub, posts = asked_who_stalls(stopped)
        assert posts == []
        assert hub.deadline is not None
        assert hub.tick(10.0 + seconds / 2) == []
        told = dict(hub.tick(10.0 + seconds))
        assert {message["peer"] for message in told.values()} == {1}
        assert set(told) == {0, 1, 2}
    hub, _ = asked_who_stalls({2})
    assert hub.tick(10.5) == []


def test_word_to_wait_on_that_comes_late_is_no_answer_to_the_next_question() -> None:
    """It was for a question that was answered meanwhile."""
    with Rendezvous("127.0.0.1:0", 1) as meeting:
        world = TcpWorld(meeting.address, 0, 1)
        say = world.control.say

        def said_late(message: Message) -> None:
            with world.changed:
                world.control._note({"type": "patience"})
                world.changed.notify_all()
            time.sleep(0.05)
            say(message)

        world.control.say = said_late  # type: ignore[method-assign]
        assert world.gather(b"alone", timeout=5) == [b"alone"]
        assert world.largest(3.0, timeout=5) == 3.0
        world.control.say = say  # type: ignore[method-assign]
        world.close()


def test_nobody_is_told_that_all_agree_when_one_has_left_that_did() -> None:
    """As where the process that serves was stopped, with its own word unsaid, and the others have given it up."""
    hello = {"type": "hello", "format": "topoplan.tcp/1", "size": 2, "pid": 1, "timeout": 9, "general": None}
    agree = {"type": "agree", "signature": "", "met": 0}
    rendezvous = Rendezvous("127.0.0.1:0", 2)
    pairs = [socket.socketpair() for _ in range(2)]
    visitors = [_Visitor(own, 0.0) for own, _ in pairs]
    for rank, visitor in enumerate(visitors):
        rendezvous._visitors.add(visitor)
        rendezvous._selector.register(visitor.connection, selectors.EVENT_READ, visitor)
        assert rendezvous._hear(visitor, {**hello, "rank": rank, "ports": {}, "flight_bytes": 7})
    assert rendezvous._hear(visitors[1], agree)
    pairs[1][1].sendall(pack({"type": "bye"}))
    pairs[1][1].close()
    assert rendezvous._hear(visitors[0], agree)
    told = Unpacker().feed(pairs[0][1].recv(1 << 16))
    assert [message["type"] for message in told] == ["welcome", "failed"]
    rendezvous.close()
    for pair in pairs:
        for one in pair:
            one.close()


def test_a_rendezvous_that_ends_does_not_wait_for_a_stopped_rank() -> None:
    """Only for ranks that may still hear its last word."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        other.send_signal(signal.SIGSTOP)
        while process_state(other.pid) != "T":
            time.sleep(0.01)
        hello = {"processes": processes_seen(), "pid": other.pid}
        rendezvous = Rendezvous("127.0.0.1:0", 2)
        one, end = socket.socketpair()
        with one, end:
            rendezvous._visitors.add(_Visitor(one, 0.0, rank=1))
            rendezvous._hub.hellos[1] = hello
            assert not rendezvous._hearing()
            rendezvous._hub.hellos[1] = {**hello, "pid": os.getpid()}
            assert rendezvous._hearing()
            rendezvous._hub.hellos[1] = {**hello, "processes": "of another machine"}
            assert rendezvous._hearing()
            rendezvous._visitors.clear()
            rendezvous.close()
        other.kill()


def test_nobody_at_the_rendezvous_is_an_error_after_the_timeout() -> None:
    with pytest.raises(BackendError, match=r"nobody listens at the rendezvous .*; start rank 0"):
        TcpBackend(1, 2, rendezvous=f"127.0.0.1:{free_port()}", timeout=0.2)
    with pytest.raises(BackendError, match="cannot reach the rendezvous"):
        TcpBackend(1, 2, rendezvous="no.such.host.invalid:80", timeout=0.2)


STRANGERS: list[tuple[bytes, str]] = [
    (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no rendezvous of topoplan"),
    (b"\0\0\0\2[]", "is no rendezvous of topoplan"),
    (b"", "closed the connection; it is no rendezvous"),
]


@pytest.mark.parametrize(("answer", "message"), STRANGERS)
def test_something_else_at_the_rendezvous_is_an_error(answer: bytes, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            connection.recv(1 << 16)
            connection.sendall(answer)
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(BackendError, match=message):
            TcpBackend(0, 2, rendezvous=f"127.0.0.1:{listener.getsockname()[1]}", timeout=2)
        thread.join()


def test_strangers_and_garbage_at_the_ports_do_not_disturb_a_job() -> None:
    """At the rendezvous before the ranks come, and at the ranks' own ports."""
    plan = forest_plan(2, "allreduce", "star")
    garbage = [
        b"GET / HTTP/1.0\r\n\r\n" * 20,
        bytes(300),
        pack({"type": "agree"}),
        b'{"token": "", "link": [0, 1]}',
    ]
    garbage += [pack({"type": "hello", "format": "topoplan.tcp/1", "rank": "one"})]
    results: list[Any] = [None, None]
    with Rendezvous("127.0.0.1:0", 2) as meeting:
        where = parse_address(meeting.address)
        visitors = [socket.create_connection((where.host, where.port)) for _ in garbage]
        for visitor, data in zip(visitors, garbage, strict=True):
            visitor.sendall(data)

        def work(rank: int) -> None:
            backend = TcpBackend(rank, 2, rendezvous=meeting.address, timeout=5)
            strangers = []
            for data in garbage:
                for address, port in backend._network.ports.items():
                    strangers.append(socket.create_connection((address, port)))
                    strangers[-1].sendall(data)
            with Communicator(plan, backend) as comm:
                results[rank] = comm.all_reduce(np.arange(3))
            for stranger in strangers:
                stranger.close()

        threads = [threading.Thread(target=work, args=[rank]) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        for visitor in visitors:
            visitor.close()
    assert [result.tolist() for result in results] == [[0, 2, 4]] * 2


def test_a_job_that_is_complete_refuses_a_late_process_and_goes_on() -> None:
    plan = forest_plan(2, "broadcast", "star", root=0)
    came, tried = threading.Barrier(3), threading.Barrier(3)
    results: list[Any] = [None, None]
    with Rendezvous("127.0.0.1:0", 2) as meeting:

        def work(rank: int) -> None:
            with Communicator(plan, TcpBackend(rank, 2, rendezvous=meeting.address, timeout=5)) as comm:
                came.wait(10)
                tried.wait(10)
                results[rank] = comm.broadcast(np.array([rank + 4]))[0]

        threads = [threading.Thread(target=work, args=[rank]) for rank in range(2)]
        for thread in threads:
            thread.start()
        came.wait(10)
        with pytest.raises(BackendError, match="all 2 ranks are there already"):
            TcpBackend(1, 2, rendezvous=meeting.address, timeout=5)
        tried.wait(10)
        for thread in threads:
            thread.join(10)
    assert results == [4, 4]


ENVIRONMENTS: list[tuple[dict[str, str], str]] = [
    ({}, r"RANK, WORLD_SIZE, TOPOPLAN_RENDEZVOUS \(or MASTER_ADDR and MASTER_PORT\) are not set"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here"}, "MASTER_PORT is not set"),
    ({"RANK": "x", "WORLD_SIZE": "2", "TOPOPLAN_RENDEZVOUS": "a:1"}, "RANK is 'x'; set it to a whole number"),
    ({"RANK": "2", "WORLD_SIZE": "2", "TOPOPLAN_RENDEZVOUS": "a:1"}, "rank 2 of 2 does not exist"),
    ({"RANK": "1", "WORLD_SIZE": "2", "TOPOPLAN_RENDEZVOUS": "a"}, "'a' is no place to meet"),
    (
        {"RANK": "1", "WORLD_SIZE": "2", "TOPOPLAN_RENDEZVOUS": "a:1", "TOPOPLAN_WIRES": "/none"},
        "cannot read the wires file /none",
    ),
]


@pytest.mark.parametrize(("environment", "message"), ENVIRONMENTS)
def test_a_place_that_is_missing_or_wrong_in_the_environment_is_named(
    environment: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        TcpBackend.from_environment(environment=environment)


@pytest.mark.parametrize(("agent", "offset"), [("False", 0), ("True", 1)])
def test_the_master_port_is_the_rendezvous_unless_torchruns_own_store_listens_there(
    agent: str, offset: int
) -> None:
    port = free_port()
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - offset)}
    backend = TcpBackend.from_environment(environment={**place, "TORCHELASTIC_USE_AGENT_STORE": agent})
    assert backend._world.control.rendezvous == f"127.0.0.1:{port}"
    backend.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pace": 0.0}, "a pace of 0.0 moves nothing"),
        ({"timeout": 0.0}, "a timeout of 0.0 s"),
        ({"flight_bytes": 0}, "0 bytes under way move nothing"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TcpBackend(0, 1, rendezvous="127.0.0.1:0", **options)


def chain(*waits: tuple[int | None, float]) -> dict[int, Waiting]:
    return {rank: Waiting(peer, 10 + rank, idle) for rank, (peer, idle) in enumerate(waits)}


BLAMES: list[tuple[dict[int, Waiting], tuple[int, int, int] | None]] = [
    (chain((1, 9.0), (2, 8.0), (3, 8.0)), (2, 3, 12)),  # 3 is silent
    (chain((1, 9.0), (2, 8.0), (None, 0.0)), (1, 2, 11)),  # 2 is in no collective
    (chain((1, 9.0), (2, 0.5), (0, 9.0)), None),  # 1 still moves
    (chain((1, 9.0), (2, 8.0), (1, 9.0)), (0, 1, 10)),  # all answer, and nothing moves
]


@pytest.mark.parametrize(("answers", "expected"), BLAMES)
def test_the_end_of_the_chain_of_waiting_ranks_is_at_fault(
    answers: dict[int, Waiting], expected: tuple[int, int, int] | None
) -> None:
    found = blame(0, answers, 8.0)
    assert (None if found is None else (found.rank, found.peer, found.step)) == expected


def test_a_rendezvous_where_nobody_can_listen_is_refused(tmp_path: Path) -> None:
    with (
        Rendezvous(f"unix:{tmp_path}/meeting", 2),
        pytest.raises(UsageError, match=r"cannot listen at the rendezvous unix:.*Address already in use"),
    ):
        Rendezvous(f"unix:{tmp_path}/meeting", 2)
    with pytest.raises(UsageError, match=re.escape("cannot listen at the rendezvous 192.0.2.1:0")):
        Rendezvous("192.0.2.1:0", 2)


def test_calls_of_a_closed_back_end_are_errors() -> None:
    with Rendezvous("127.0.0.1:0", 1) as meeting:
        backend = TcpBackend(0, 1, rendezvous=meeting.address)
        backend.close()
        backend.close()
        call: Callable[[float], float] = backend.largest
        with pytest.raises(BackendError, match="make a new one"):
            call(1.0)


def test_a_failure_that_comes_together_with_the_welcome_is_heard() -> None:
    """A rank that is quicker than this one may have failed before this one has read that all are there."""
    welcome = {"type": "welcome", "token": "", "host": None, "peers": {}}
    failure = {"type": "failed", "message": "rank 1 gave up", "rank": None, "peer": 1, "step": None}
    with socket.create_server(("127.0.0.1", 0)) as server:
        control = Control(f"127.0.0.1:{server.getsockname()[1]}", 0, 2, timeout=5.0)
        rendezvous, _ = server.accept()
        with rendezvous:
            rendezvous.sendall(pack(welcome) + pack(failure))
            assert control.join({})["type"] == "welcome"
            watcher = Watcher("one")
            control.listen(threading.Condition(), lambda: Waiting(None, None, 0.0), watcher)
            assert control.verdict == failure
            watcher.close()
            control.close()


def test_a_rendezvous_that_is_stopped_gets_no_time_of_its_own_to_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a rank has met is told there, and then it waits no longer than it has waited for another one anyway."""
    monkeypatch.setattr("collectives.peers.over_rendezvous.GRACE_SECONDS", 9999)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other,
    ):
        other.send_signal(signal.SIGSTOP)
        while process_state(other.pid) != "T":
            time.sleep(0.01)
        seen = {"processes": processes_seen(), "pid": other.pid}
        welcome = pack({"type": "welcome", "token": "", "host": 0, "peers": {}, **seen})
        address = f"127.0.0.1:{server.getsockname()[1]}"
        answers = threading.Thread(
            target=lambda: taken.append(server.accept()[0]) or taken[0].sendall(welcome)
        )
        taken: list[socket.socket] = []
        answers.start()
        world = TcpWorld(address, 1, 3)
        world.report("rank 2 closed its connection", peer=2, step=4)
        with pytest.raises(
            BackendError, match=r"rank 2 closed its connection, and the rendezvous of rank 0"
        ) as told:
            world.wait(lambda: False, timeout=0.2)
        assert told.value.peer == 0
        world.close()
        answers.join()
        taken[0].close()
        other.kill()


def test_a_rank_whose_rendezvous_has_ended_sleeps(tmp_path: Path) -> None:
    """Its connection is at its end, which a thread that went on listening would hear without a pause."""
    rendezvous = Rendezvous(f"unix:{tmp_path / 'here'}", 1).start()
    world = TcpWorld(rendezvous.address, 0, 1, timeout=5)
    rendezvous.close()
    begun = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - begun < 0.1
    world.close()


def test_a_forked_child_that_ends_leaves_the_rendezvous_of_its_parent_alone(tmp_path: Path) -> None:
    """It neither takes the address away nor wakes the parent's threads, which would then never sleep again."""
    address = tmp_path / "here"
    world = TcpWorld(f"unix:{address}", 0, 1, timeout=5)
    child = os.fork()
    if child == 0:
        world.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert address.exists()
    begun = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - begun < 0.1
    assert world.gather(b"alone", timeout=5) == [b"alone"]
    world.close()
    assert not address.exists()


def test_words_of_the_ranks_overtake_data_where_the_network_lets_them() -> None:
    """Both ends of a connection to the rendezvous ask for low delay, and for Linux's interactive priority."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = connect(Address("127.0.0.1", listener.getsockname()[1]), time.monotonic() + 5)
        taken, _ = listener.accept()
        ahead_of_data(taken)
        for one in (made, taken):
            assert one.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == LOW_DELAY
            if sys.platform == "linux":
                assert one.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == INTERACTIVE
            one.close()

"""How the ranks of a tcp job find each other, and what they say when they do not."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectives import Communicator
from collectives.backends.shared.shared_backend import SharedBackend
from collectives.backends.tcp.connections import TcpConnections
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.peers import address, rendezvous_client, rendezvous_state, tcp_control_plane
from collectives.peers.address import (
    INTERACTIVE,
    LOW_DELAY,
    Address,
    connect,
    listen,
    parse_address,
    prioritize,
    process_namespace,
)
from collectives.peers.connections import MEETING, Connection, Endpoint, Listener, Message
from collectives.peers.control_plane import (
    Link,
    LinkCount,
    Signature,
    Waiting,
    attribute_failure,
    cut_links,
    disagreement,
)
from collectives.peers.environment import JobIdentity, job_identity, read_rank_environment
from collectives.peers.rendezvous import (
    AddressLock,
    Rendezvous,
    _can_receive,
    _Opening,
    process_mark,
)
from collectives.peers.rendezvous_state import ANNOUNCED, FORMAT, Post, RendezvousState
from collectives.peers.tcp_control_plane import TcpControlPlane
from tests.support.checkout import ROOT
from tests.support.forking import stopped_process
from tests.support.hand_plans import forest_plan
from tests.support.job_meeting import as_threads
from tests.support.ports import free_port
from topoplan.errors import BackendError, UsageError


def meet(*places: tuple[int, int], meeting: str, timeout: float = 5.0, **options: Any) -> list[Any]:
    """What becomes of processes that come as these ranks of so many: closed back ends, or errors."""

    def come(number: int) -> Any:
        backend = TcpBackend(*places[number], rendezvous=meeting, timeout=timeout, **options)
        backend.close()
        return backend.ranks

    return as_threads(len(places), come)


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


def test_a_wrong_world_size_is_told_to_everybody() -> None:
    with Rendezvous("127.0.0.1:0", 2) as meeting:
        errors = meet((0, 2), (1, 3), meeting=meeting.address)
    message = "came for 3 ranks and the job has 2"
    assert all(isinstance(error, BackendError) and message in str(error) for error in errors)


def test_the_error_of_a_set_up_is_told_to_the_ranks_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SharedBackend.__init__

    def refuse(self: SharedBackend, *given: Any, rank: int, **others: Any) -> None:
        if rank == 1:
            raise UsageError("GPU 0 cannot be used")
        made(self, *given, rank=rank, **others)

    monkeypatch.setattr(SharedBackend, "__init__", refuse)
    with Rendezvous("127.0.0.1:0", 2) as meeting:
        errors = as_threads(2, lambda rank: SharedBackend.met_at(meeting.address, rank, 2, timeout=5.0))
    assert isinstance(errors[1], UsageError)
    assert re.search("rank 1: GPU 0 cannot be used$", str(errors[0])), errors


def hello_of(
    rank: int, size: int, *, process: str = "", job: JobIdentity | None = None, **other: Any
) -> Message:
    """What a process says that comes as a rank; processes are told apart by their marks."""
    told = {"type": "hello", "format": FORMAT, "rank": rank, "size": size, "pid": os.getpid(), "timeout": 9}
    links = {"general": None, "ports": {}, "flight_bytes": 7, "process": process or process_mark()}
    return {**told, **links, "job": asdict(job or JobIdentity()), **other}


class Process:
    """A process that speaks with a rendezvous by itself."""

    def __init__(self, address: str, key: bytes = b"", job: str = "") -> None:
        where = parse_address(address)
        self.heard: list[Message] = []
        self.problem: Exception | None = None
        self.changed = threading.Condition()
        made = socket.create_connection((where.host, where.port), 5)
        functions: Any = {"receive": self._hear, "ended": self._end, "failed": self._end}
        self.connection = Connection.dial(made, MEETING, key, job=job, **functions)

    def _hear(self, messages: Sequence[Message]) -> None:
        with self.changed:
            self.heard += messages
            self.changed.notify_all()

    def _end(self, error: Exception | None) -> None:
        with self.changed:
            self.problem = error or EOFError()
            self.changed.notify_all()

    def wait(self, count: int) -> list[Message]:
        """So many messages, or those before the end of the connection."""
        with self.changed:
            self.changed.wait_for(lambda: self.problem or len(self.heard) >= count, 20)
        return self.heard


def come(address: str, hello: Message) -> Message:
    """The first answer to a hello, when this process says no more."""
    process = Process(address)
    process.connection.send(hello)
    answer = process.wait(1)[0]
    process.connection.close()
    return answer


def test_ranks_that_do_not_come_are_named() -> None:
    with Rendezvous("127.0.0.1:0", 4) as meeting:
        errors = meet((0, 4), (2, 4), meeting=meeting.address, timeout=0.3)
    for error in errors:
        assert isinstance(error, BackendError)
        assert "only 2 of 4 ranks came, not ranks 1, 3" in str(error)
        assert error.peer == 1


@pytest.mark.thorough
def test_a_rendezvous_opens_as_many_files_as_it_has_ranks_or_refuses_them() -> None:
    script = """
import resource
from collectives.peers.rendezvous import Rendezvous
from tests.collectives.peers.test_tcp_meeting import come, hello_of

resource.setrlimit(resource.RLIMIT_NOFILE, (100, 500))
with Rendezvous("127.0.0.1:0") as meeting:
    print(come(meeting.address, hello_of(0, 500))["message"])
    print(come(meeting.address, hello_of(0, 400))["type"], resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert told.stdout.splitlines() == [
        "the process of the rendezvous may open 500 files, and each of 500 ranks keeps a connection to it; raise the "
        "limit where rank 0 starts (ulimit -n)",
        "heard (500, 500)",
    ]


@pytest.mark.parametrize("kind", ["gather", "agree", "largest"])
def test_a_message_of_a_rank_costs_as_much_in_a_large_job(kind: str) -> None:
    """Lines of Python that run, as a rank waits; the last message of a round answers all ranks."""

    def lines(size: int) -> tuple[int, int]:
        hub = RendezvousState(size)
        for rank in range(size):
            hub.join(hello_of(rank, size), 0.0)
        said = [
            {"type": kind, "data": "same", "signature": "same", "value": 1.0, "met": 0} for _ in range(size)
        ]
        counted = 0

        def count(frame: Any, event: str, given: Any) -> Any:
            nonlocal counted
            counted += event == "line"
            return count

        costs, before = [], sys.gettrace()
        gc.disable()  # finalizers of other tests' objects have lines too
        try:
            for rank, message in enumerate(said):
                counted = 0
                sys.settrace(count)
                try:
                    posts = hub.receive(rank, message, 0.0)
                finally:
                    sys.settrace(before)
                costs.append(counted)
        finally:
            gc.enable()
        assert len(posts) == size
        return max(costs[:-1]), costs[-1] // size

    (few, answer), (many, answers) = lines(8), lines(256)
    assert many == few
    assert answers <= answer


def test_a_rank_is_compared_with_as_few_others_in_a_job_of_many_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared, differs = list[int](), JobIdentity.differs
    monkeypatch.setattr(
        JobIdentity, "differs", lambda mine, other: (compared.append(1), differs(mine, other))[1]
    )
    with Rendezvous("127.0.0.1:0") as meeting:
        for rank in range(60):
            job = JobIdentity(host=f"host {rank // 2}", launchers=((rank // 2, 1),))
            assert meeting._wrong_job(hello_of(rank, 60, job=job)) == ""
        assert len(compared) < 2 * 60
        another = JobIdentity(host="host 20", launchers=((9, 9),))
        assert "rank 40), and process" in meeting._wrong_job(hello_of(1, 60, job=another))


def test_a_rank_with_another_window_is_compared_with_the_lowest_that_has_come() -> None:
    hub = RendezvousState(300)
    for rank in range(299, 1, -1):
        assert hub.join(hello_of(rank, 300), 0.0) == ("", [])
    reason, _ = hub.join(hello_of(0, 300, flight_bytes=8), 0.0)
    assert "rank 0 has flight_bytes 8 and rank 2 7" in reason


def test_an_answer_has_equal_texts_once() -> None:
    hub = RendezvousState(5)
    for rank in range(5):
        hub.join(hello_of(rank, 5), 0.0)
    posts: list[Post] = []
    for rank, text in enumerate(["a", "b", "b", "b", "a"]):
        posts = hub.receive(rank, {"type": "gather", "data": text}, 0.0)
    assert [rank for rank, _ in posts] == list(range(5))
    assert posts[0][1] == {"type": "agreed", "runs": [[1, "a"], [3, "b"], [1, "a"]]}


class Passing:
    """A job above the fan-out, of two ranks on a host: its welcomes, and the ranks that ask the rendezvous."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.posts: list[Post] = []
        self.asked: list[int] = []
        self._own = threading.local()
        welcome, receive = RendezvousState._welcome, RendezvousState.receive

        def posted(hub: RendezvousState) -> list[Post]:
            self.posts = welcome(hub)
            return self.posts

        def received(hub: RendezvousState, rank: int, message: Message, now: float) -> list[Post]:
            self.asked += [rank] if message["type"] == "peers" else []
            return receive(hub, rank, message, now)

        monkeypatch.setattr(rendezvous_state, "FANOUT", 2)
        monkeypatch.setattr(RendezvousState, "_welcome", posted)
        monkeypatch.setattr(RendezvousState, "receive", received)
        monkeypatch.setattr(rendezvous_client, "process_namespace", lambda: f"host {self._own.rank // 2}")

    def peers(self) -> list[Any]:
        """What every rank knows of all, or its error; ranks that know it leave at once."""
        with Rendezvous("127.0.0.1:0", 11) as self.meeting:
            return as_threads(11, self._come)

    def _come(self, rank: int) -> list[Message]:
        self._own.rank = rank
        backend = TcpBackend(rank, 11, rendezvous=self.meeting.address, timeout=20)
        backend.close()
        return backend._world.peers()


def test_hosts_pass_the_announcements_of_all_ranks_on_in_a_large_job(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Passing(monkeypatch)
    found = job.peers()
    assert sorted(rank for rank, welcome in job.posts if "peers" in welcome) == [0, 2]
    assert job.asked == []
    assert len(found[0]) == 11
    assert all(peers == found[0] for peers in found)


def of_nobody(network: TcpConnections, connection: Connection) -> None:
    connection.close()


def of_another_job(network: TcpConnections, connection: Connection) -> None:
    connection.send({"type": "peers", "peers": {name: [[11, None]] for name in ANNOUNCED}})


def of_a_stopped_rank(network: TcpConnections, connection: Connection) -> None:
    connection.admit()


@pytest.mark.parametrize("pass_on", [of_nobody, of_another_job, of_a_stopped_rank])
def test_a_rank_asks_the_rendezvous_when_another_one_does_not_pass_the_announcements_on(
    monkeypatch: pytest.MonkeyPatch, pass_on: Any
) -> None:
    monkeypatch.setattr(tcp_control_plane, "SOURCE_SECONDS", 0.3)
    monkeypatch.setattr(TcpConnections, "_take_request", pass_on)
    job = Passing(monkeypatch)
    found = job.peers()
    assert set(job.asked) == {1, 3, 4, 5, 6, 7, 8, 9, 10}
    assert all(isinstance(peers, list) and peers == found[0] for peers in found), found


def test_a_rank_that_waits_for_announcements_hears_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_control_plane, "SOURCE_SECONDS", 9999)
    job = Passing(monkeypatch)

    def fail(network: TcpConnections, connection: Connection) -> None:
        connection.admit()
        job.meeting.broke(RuntimeError("a bug"))

    monkeypatch.setattr(TcpConnections, "_take_request", fail)
    found = job.peers()
    assert all("RuntimeError: a bug" in str(error) for error in found), found


def test_windows_must_be_the_same_on_all_ranks() -> None:
    hub = RendezvousState(2)
    assert hub.join(hello_of(1, 2), 0.0) == ("", [])
    reason, posts = hub.join(hello_of(0, 2, flight_bytes=8), 0.0)
    assert "rank 0 has flight_bytes 8 and rank 1 7" in reason
    assert [rank for rank, _ in posts] == [1]


def asked_who_stalls(stopped: set[int]) -> tuple[RendezvousState, list[Post]]:
    """Of three ranks, of which rank 0 waits for rank 1; rank 2 has answered."""
    hub = RendezvousState(3, stopped=lambda hello: hello["rank"] in stopped)
    for rank in range(3):
        hub.join(hello_of(rank, 3), 0.0)
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
        world = TcpControlPlane(meeting.address, 0, 1)
        say = world.control.say

        def said_late(message: Message) -> None:
            with world.changed:
                world.control._note({"type": "keep waiting"})
                world.changed.notify_all()
            time.sleep(0.05)
            say(message)

        world.control.say = said_late  # type: ignore[method-assign]
        assert world.gather(b"alone", timeout=5) == [b"alone"]
        assert world.largest(3.0, timeout=5) == 3.0
        world.control.say = say  # type: ignore[method-assign]
        world.close()


def test_nobody_is_told_that_all_agree_when_one_has_left_that_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the process that serves was stopped, with its own word unsaid, and the others have given it up."""
    agree = {"type": "agree", "signature": "", "met": 0}
    with Rendezvous("127.0.0.1:0", 2) as meeting:
        ranks = [Process(meeting.address) for _ in range(2)]
        for rank, one in enumerate(ranks):
            one.connection.send(hello_of(rank, 2))
        assert [message["type"] for message in ranks[0].wait(2)] == ["heard", "welcome"]
        hear = Rendezvous._hear

        def left_meanwhile(self: Rendezvous, visitor: Any, message: Message) -> bool:
            if visitor.rank == 0:  # both messages of rank 1 have come, and the end behind them
                ranks[1].connection.send({"type": "bye"})
                ranks[1].connection.close()
            return hear(self, visitor, message)

        ranks[1].connection.send(agree)
        monkeypatch.setattr(Rendezvous, "_hear", left_meanwhile)
        ranks[0].connection.send(agree)
        assert [message["type"] for message in ranks[0].wait(3)] == ["heard", "welcome", "failed"]
        ranks[0].connection.close()


def test_a_rendezvous_that_ends_does_not_wait_for_a_stopped_rank() -> None:
    """Only for ranks that may still hear its last word."""
    with stopped_process() as pid:
        hello = {"processes": process_namespace(), "pid": pid}
        visitor: Any = None
        opening = _Opening(0, RendezvousState(2), {1: visitor})
        opening.hub.hellos[1] = hello
        assert not _can_receive(opening)
        opening.hub.hellos[1] = {**hello, "pid": os.getpid()}
        assert _can_receive(opening)
        opening.hub.hellos[1] = {**hello, "processes": "of another machine"}
        assert _can_receive(opening)


def test_nobody_at_the_rendezvous_is_an_error_after_the_timeout() -> None:
    with pytest.raises(BackendError, match=r"nobody listens at the rendezvous .*; start rank 0"):
        TcpBackend(1, 2, rendezvous=f"127.0.0.1:{free_port()}", timeout=0.2)
    with pytest.raises(BackendError, match="cannot reach the rendezvous"):
        TcpBackend(1, 2, rendezvous="no.such.host.invalid:80", timeout=0.2)


STRANGERS: list[tuple[bytes, str]] = [
    (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is not a rendezvous of topoplan"),
    (b"\0\0\0\2[]", "is not a rendezvous of topoplan"),
    (b"", "closed the connection; it is not a rendezvous"),
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


def test_a_listener_that_closes_before_it_accepts_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection stood in its backlog, and was reset before this rank had looked at its ends."""
    where = Address("127.0.0.1", free_port())
    first = listen(where)
    second: list[socket.socket] = []
    try_connect = address._try_connect

    def meanwhile(asked: Address, seconds: float) -> socket.socket:
        made = try_connect(asked, seconds)
        if not second:
            first.close()
            time.sleep(0.05)
            second.append(listen(where))
        return made

    monkeypatch.setattr(address, "_try_connect", meanwhile)
    with connect(where, time.monotonic() + 20) as made:
        assert made.getpeername() == ("127.0.0.1", where.port)
    second[0].close()


def test_strangers_and_garbage_at_the_ports_do_not_disturb_a_job() -> None:
    """At the rendezvous before the ranks come, and at the ranks' own ports."""
    plan = forest_plan(2, "allreduce", "star")
    garbage = [
        b"GET / HTTP/1.0\r\n\r\n" * 20,
        bytes(300),
        b"topoplan" + bytes(112),
        b'\0\0\0\x1f{"token": "", "link": [0, 1]}',
        b'\0\0\0\x43{"type": "hello", "format": "topoplan.tcp/1", "rank": "one"}',
    ]
    with Rendezvous("127.0.0.1:0", 2) as meeting:
        where = parse_address(meeting.address)
        visitors = [socket.create_connection((where.host, where.port)) for _ in garbage]
        for visitor, data in zip(visitors, garbage, strict=True):
            visitor.sendall(data)

        def work(rank: int) -> Any:
            backend = TcpBackend(rank, 2, rendezvous=meeting.address, timeout=5)
            strangers = []
            for data in garbage:
                for address, port in backend._network.ports.items():
                    strangers.append(socket.create_connection((address, port)))
                    strangers[-1].sendall(data)
            with Communicator(plan, backend) as comm:
                total = comm.all_reduce(np.arange(3)).tolist()
            for stranger in strangers:
                stranger.close()
            return total

        assert as_threads(2, work) == [[0, 2, 4]] * 2
        for visitor in visitors:
            visitor.close()


def in_a_running_job(tell: Callable[[str], None], job: JobIdentity | None = None) -> list[Any]:
    """What two ranks broadcast, or raise, after others have come to their rendezvous meanwhile."""
    plan = forest_plan(2, "broadcast", "star", root=0)
    came, tried = threading.Barrier(3), threading.Barrier(3)
    results: list[Any] = [None, None]
    with Rendezvous("127.0.0.1:0", 2, job=job) as meeting:

        def work(rank: int) -> None:
            with Communicator(plan, TcpBackend(rank, 2, rendezvous=meeting.address, timeout=5)) as comm:
                came.wait(10)
                tried.wait(10)
                try:
                    results[rank] = comm.broadcast(np.array([rank + 4]))[0]
                except BackendError as error:
                    results[rank] = error

        threads = [threading.Thread(target=work, args=[rank]) for rank in range(2)]
        for thread in threads:
            thread.start()
        came.wait(10)
        tell(meeting.address)
        tried.wait(10)
        for thread in threads:
            thread.join(10)
    return results


OTHERS = [
    (
        {"job": asdict(JobIdentity(name="b"))},
        r"serves .* belongs to job 'b' \(TOPOPLAN_JOB\); .*set TOPOPLAN_JOB",
    ),
    ({"format": "topoplan.tcp/1"}, "speaks 'topoplan.tcp/1'; install the same version"),
    ({"size": 3, "rank": 2}, "came for 3 ranks and the job has 2"),
]


@pytest.mark.parametrize(("about", "message"), OTHERS)
def test_a_running_job_refuses_processes_of_others_and_goes_on(about: dict[str, Any], message: str) -> None:
    def tell(address: str) -> None:
        hello = {**hello_of(1, 2, process="another", job=job_identity(2)), **about}
        answer = come(address, hello)
        assert answer["type"] == "refused"
        assert re.search(message, answer["message"])

    assert in_a_running_job(tell) == [4, 4]


def test_a_second_process_for_a_rank_of_one_job_ends_both() -> None:
    """Nothing tells whether it is of another job."""

    def tell(address: str) -> None:
        answer = come(address, hello_of(1, 2, process="another", job=job_identity(2)))
        assert answer["type"] == "refused"
        assert "two processes came" in answer["message"]

    for error in in_a_running_job(tell):
        assert isinstance(error, BackendError)
        assert re.search(r"two processes came to 127.0.0.1:\d+ as rank 1 .*or TOPOPLAN_JOB", str(error))


LAUNCHED = JobIdentity(host="h", launchers=((12, 700), (11, 650)), session=11)
IDENTITIES = [
    (replace(LAUNCHED, launchers=((13, 701), (11, 650))), False),  # the launcher's other rank
    (replace(LAUNCHED, launchers=((22, 800), (21, 750))), True),
    (replace(LAUNCHED, launchers=((11, 999), (21, 750))), True),  # its number, used again
    (replace(LAUNCHED, launchers=((20, 710), (12, 700))), False),  # a child of the rank
    (replace(LAUNCHED, launchers=((22, 800), (21, 750)), host="g"), False),  # of another host: not known
    (
        replace(LAUNCHED, launchers=((13, 701),), orphan=True),
        False,
    ),  # in its session, and the launcher has ended
    (replace(LAUNCHED, launchers=((13, 701),), orphan=True, session=13), True),
    (replace(LAUNCHED, launchers=((22, 800), (21, 750)), agent="1"), False),  # of another agent of torchrun
    (replace(LAUNCHED, name="nightly"), True),
    (replace(LAUNCHED, batch=(("PBS job", "7"),)), False),  # this rank has lost its environment
]


@pytest.mark.parametrize(("other", "differs"), IDENTITIES)
def test_jobs_are_told_apart_by_what_launched_their_ranks(other: JobIdentity, differs: bool) -> None:
    assert (LAUNCHED.differs(other), other.differs(LAUNCHED)) == (differs, differs)
    assert JobIdentity.of_message(json.loads(json.dumps(asdict(other)))) == other


SET = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "TORCHELASTIC_RUN_ID": "none"}
VARIABLES: list[tuple[dict[str, str], dict[str, str], bool]] = [
    ({"TOPOPLAN_JOB": "a"}, {"TOPOPLAN_JOB": "a", "TORCHELASTIC_RUN_ID": "x"}, False),
    ({"TOPOPLAN_JOB": "a"}, {}, True),
    (SET, {**SET, "SLURM_STEP_ID": "1"}, True),
    (SET, {**SET, "SLURM_JOB_ID": "8"}, True),
    ({**SET, "SLURM_STEP_NUM_TASKS": "1"}, {**SET, "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "1"}, False),
    ({"TORCHELASTIC_RUN_ID": "x"}, {"TORCHELASTIC_RUN_ID": "y"}, True),
    ({"TORCHELASTIC_RUN_ID": "x"}, {"TORCHELASTIC_RUN_ID": "none"}, False),
    (
        {"PMIX_NAMESPACE": "n.1", "OMPI_COMM_WORLD_SIZE": "2"},
        {"PMIX_NAMESPACE": "n.2", "OMPI_COMM_WORLD_SIZE": "2"},
        True,
    ),
    ({"PBS_JOBID": "1.here"}, {"PBS_JOBID": "2.here"}, True),
    ({"LSB_JOBID": "1"}, {"LSB_JOBID": "1"}, False),
]


@pytest.mark.parametrize(("mine", "theirs", "differs"), VARIABLES)
def test_jobs_differ_by_variables(mine: dict[str, str], theirs: dict[str, str], differs: bool) -> None:
    assert job_identity(2, mine).differs(job_identity(2, theirs)) == differs


@pytest.mark.thorough
def test_subshells_of_one_shell_have_not_launched_their_ranks() -> None:
    # in one write each, also where PYTHONUNBUFFERED is set: both have the same pipe
    code = (
        "from collectives.peers.environment import job_identity as me; "
        "print(str(me(2).launchers[-1][0]) + chr(10), end=str())"
    )
    script = f"for r in 0 1; do (RANK=$r {sys.executable} -c '{code}'; true) & done; wait"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert len(done.stdout.split()) == 2, done.stderr
    assert len(set(done.stdout.split())) == 1


@pytest.mark.thorough
def test_a_wrapper_that_was_started_as_the_rank_has_not_launched_it() -> None:
    """Ranks of one script, each behind a wrapper of its own, have the script in common."""
    body = (
        "import json; from dataclasses import asdict; from collectives.peers.environment import job_identity; "
        "print(json.dumps(asdict(job_identity(2))))"
    )
    wrapped = [
        sys.executable,
        "-c",
        f"import subprocess; subprocess.run([{sys.executable!r}, '-c', {body!r}])",
    ]
    said = [
        subprocess.run(wrapped, env={**os.environ, "RANK": rank}, capture_output=True, check=True).stdout
        for rank in "01"
    ]
    first, second = (JobIdentity.of_message(json.loads(text)) for text in said)
    assert not first.differs(second)
    assert first.launchers[-1][0] == os.getpid()


@pytest.mark.sampled
@pytest.mark.parametrize("shared", [False, True], ids=["tcp", "shared"])
@pytest.mark.parametrize("beside", [False, True], ids=["after", "beside"])
@pytest.mark.parametrize("hosted", [False, True], ids=["rank 0 listens", "launcher listens"])
def test_communicators_open_in_a_row_and_together(shared: bool, beside: bool, hosted: bool) -> None:
    """Ranks run ahead of each other, since nothing keeps them together between two."""

    def work(rank: int) -> list[float | None]:
        kept: list[Any] = []
        found = []
        make: Any = SharedBackend.met_at if shared else TcpBackend
        for turn in range(6):
            backend = make(rank=rank, size=3, rendezvous=address, timeout=20)
            found.append(backend.largest(float(rank + turn)) if turn % 2 else None)
            kept.append(backend)
            while kept and not beside:
                kept.pop().close()
        for backend in kept if rank else kept[::-1]:
            backend.close()
        return found

    with contextlib.ExitStack() as stack:
        port = free_port()
        address = stack.enter_context(Rendezvous("127.0.0.1:0", 3)).address if hosted else f"127.0.0.1:{port}"
        assert as_threads(3, work) == [[None, 3.0, None, 5.0, None, 7.0]] * 3
    socket.create_server(("127.0.0.1", port)).close()


def test_a_rank_that_fails_to_meet_the_others_may_try_again() -> None:
    """Its first attempt is over on both sides, and is not taken for a second process of its rank."""
    address = f"127.0.0.1:{free_port()}"
    assert isinstance(meet((1, 2), meeting=address, timeout=0.1)[0], BackendError)
    assert "only 1 of 2" in str(meet((0, 2), meeting=address, timeout=0.2)[0])
    assert meet((0, 2), (1, 2), meeting=address) == [(0,), (1,)]


COMES_AS_RANK_0 = """
import sys
from collectives.peers.tcp_control_plane import TcpControlPlane
from topoplan.errors import BackendError
try:
    TcpControlPlane(sys.argv[1], 0, 2, timeout=5)
except BackendError as error:
    print(error)
"""


def come_as_rank_0(address: str, **more: str) -> str:
    """Return what rank 0 of another process is told."""
    command = [sys.executable, "-c", COMES_AS_RANK_0, address]
    done = subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
def test_ranks_that_have_met_keep_their_address_from_another_rank_0_and_free_the_port() -> None:
    """Ranks that share memory have closed the rendezvous: the rank 0 of another job found its port free."""
    address = f"127.0.0.1:{free_port()}"
    reasons: list[str] = []
    mine = job_identity(2)
    releases = [AddressLock.take(address, mine, reasons.append) for _ in range(2)]
    socket.create_server(("127.0.0.1", parse_address(address).port)).close()
    Rendezvous.shared(address, mine).release(None)  # another communicator of this process
    assert not reasons
    assert "belongs to job 'other'" in come_as_rank_0(address, TOPOPLAN_JOB="other")
    assert not reasons, "the job goes on"
    if Path("/proc").is_dir():
        releases[0]()
        assert "two processes came to" in (told := come_as_rank_0(address))
        assert len(reasons) == 1, "the job ends too"
        assert reasons[0] in told
    for release in releases:
        release()
    assert "only 1 of 2 ranks came" in come_as_rank_0(address)


def test_fields_that_one_call_leaves_out_do_not_explain_a_difference() -> None:
    usual = Signature(3, "12ab", 2, "allreduce", None, "sum", "float32", 64, 64, shape="8x8")
    for other, told in (
        (replace(usual, op="band", dtype="", shape="", count=0), "op 'band' instead of 'sum'; give"),
        (replace(usual, collective="broadcast", root=0, op=None, dtype=""), "collective 'broadcast' instead"),
        (replace(usual, shape="64"), "shape '64' instead of '8x8'; give"),
    ):
        error = disagreement([usual, other], rank=0)
        assert error is not None
        assert told in str(error)
        assert "''" not in str(error)


def test_rank_0_that_cannot_listen_says_who_does() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOPOPLAN_JOB", "a")
        here = Rendezvous.shared(address, job_identity(2))
    body = (
        "from collectives.peers.tcp_control_plane import TcpControlPlane; "
        f"TcpControlPlane({address!r}, 0, 2, timeout=9)"
    )
    command = [sys.executable, "-c", body]
    ran = subprocess.run(command, env={**os.environ, "TOPOPLAN_JOB": "b"}, capture_output=True, text=True)
    here.release(None)
    told = ran.stderr.splitlines()[-1]
    assert re.search(
        rf"rank 0 cannot listen at {address} .*serves job 'a' .*process {os.getpid()}, rank 0", told
    )
    assert "belongs to job 'b'" in told


ENVIRONMENTS: list[tuple[dict[str, str], str]] = [
    ({}, r"RANK, WORLD_SIZE, TOPOPLAN_RENDEZVOUS \(or MASTER_ADDR and MASTER_PORT\) are not set"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here"}, "MASTER_PORT is not set"),
    ({"RANK": "x", "WORLD_SIZE": "2", "TOPOPLAN_RENDEZVOUS": "a:1"}, "RANK is 'x'; set it to a whole number"),
    ({"RANK": "2", "WORLD_SIZE": "2", "TOPOPLAN_RENDEZVOUS": "a:1"}, "rank 2 of 2 does not exist"),
    (
        {"RANK": "1", "WORLD_SIZE": "2", "TOPOPLAN_RENDEZVOUS": "a"},
        "address must be host:port or unix:.path, got 'a'",
    ),
    (
        {"RANK": "1", "WORLD_SIZE": "2", "TOPOPLAN_RENDEZVOUS": "a:1", "TOPOPLAN_WIRES": "/none"},
        "cannot read the wires file /none",
    ),
]


@pytest.mark.parametrize(("environment", "message"), ENVIRONMENTS)
def test_refuses_a_wrong_environment(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TcpBackend.from_environment(environment=environment)


def test_the_master_port_is_the_rendezvous() -> None:
    place = {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert (
        read_rank_environment({"RANK": "0", **place}, "tcp").rendezvous == f"127.0.0.1:{place['MASTER_PORT']}"
    )


@pytest.mark.parametrize("taken", [False, True], ids=["next port free", "next port taken"])
def test_ranks_meet_at_a_port_beside_torchruns_store(taken: bool) -> None:
    dist = pytest.importorskip("torch.distributed", reason="PyTorch is not installed")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    place["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    with socket.socket() as other, ThreadPoolExecutor(1) as thread:
        if taken:
            with contextlib.suppress(OSError):  # another process has it
                other.bind(("127.0.0.1", store.port + 1))
        second = thread.submit(read_rank_environment, {"RANK": "1", **place}, "tcp")
        first = read_rank_environment({"RANK": "0", **place}, "tcp").rendezvous
        assert second.result().rendezvous == first
        port = int(first.removeprefix("127.0.0.1:"))
        assert port != store.port
        assert not (taken and port == store.port + 1)
        # later communicators of the process
        assert read_rank_environment({"RANK": "0", **place}, "tcp").rendezvous == first


def test_a_rank_without_rank_0_in_torchruns_store_says_so_after_its_timeout() -> None:
    dist = pytest.importorskip("torch.distributed", reason="PyTorch is not installed")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "1", "WORLD_SIZE": "2"}
    place["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    with pytest.raises(
        BackendError, match=r"rank 1: rank 0 has put no port .* within 0.2 s; start rank 0"
    ) as found:
        read_rank_environment(place, "tcp", timeout=0.2)
    assert (found.value.rank, found.value.peer) == (1, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pace": 0.0}, "pace must be above 0 and finite, got 0.0"),
        ({"timeout": 0.0}, "timeout must be above 0 s, got 0.0"),
        ({"flight_bytes": 0}, "flight_bytes must be at least 1, got 0"),
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
def test_attributes_a_failure(answers: dict[int, Waiting], expected: tuple[int, int, int] | None) -> None:
    found = attribute_failure(0, answers, 8.0)
    assert (None if found is None else (found.rank, found.peer, found.step)) == expected


def link(source: int, destination: int) -> Link:
    return source, destination, "network"


def counted(
    answers: dict[int, Waiting], *moved: tuple[int, int, int, int, int | None, int]
) -> dict[int, Waiting]:
    """Answers with the counts of links: source, destination, bytes sent and received, and credits received and sent."""
    counts: dict[int, list[LinkCount]] = {rank: [] for rank in answers}
    for source, destination, sent, received, taken, given in moved:
        counts[source].append(LinkCount(link(source, destination), sent, taken))
        counts[destination].append(LinkCount(link(source, destination), received, given))
    return {rank: replace(wait, counts=tuple(counts[rank])) for rank, wait in answers.items()}


CIRCLE = chain(
    (3, 9.0), (0, 8.0), (1, 9.0), (2, 8.0)
)  # each of four ranks in a ring waits for the one before it
SOUND = [(0, 1, 50, 50, 8, 8), (1, 2, 50, 50, 8, 8), (3, 0, 50, 50, 8, 8)]

CIRCLES: list[tuple[dict[int, Waiting], tuple[int, int, int | None, list[Link]] | None]] = [
    (counted(CIRCLE, *SOUND, (2, 3, 80, 60, 8, 8)), (3, 2, 13, [link(2, 3)])),
    # 2 has sent nothing since, for it lacks data of 1 itself: the other direction has lost some
    (counted(CIRCLE, *SOUND, (2, 3, 60, 60, 8, 8), (3, 2, 70, 40, 8, 8)), (2, 3, None, [link(3, 2)])),
    # both directions of one cable
    (
        counted(CIRCLE, *SOUND, (2, 3, 80, 60, 8, 8), (3, 2, 70, 40, 8, 8)),
        (3, 2, 13, [link(2, 3), link(3, 2)]),
    ),
    # all data came, and the credits for more were lost: 2 waits for 3, to which it may not send
    (
        counted(CIRCLE | {2: Waiting(3, 12, 9.0)}, *SOUND, (2, 3, 80, 80, 8, 16)),
        (2, 3, 12, [link(2, 3)]),
    ),
    # credits that the source does not read any more are no loss
    (counted(CIRCLE, *SOUND, (2, 3, 80, 80, None, 16)), (0, 3, 10, [])),
    # nothing is missing: nobody knows better than the reporter
    (counted(CIRCLE, *SOUND, (2, 3, 80, 80, 8, 8)), (0, 3, 10, [])),
    # one has sent all and has left the collective, or waits in the next one
    (
        counted(CIRCLE | {2: Waiting(None, None, 0.0)}, *SOUND, (2, 3, 80, 60, None, 8)),
        (3, 2, 13, [link(2, 3)]),
    ),
    # bytes that are still under way, to a rank that has just received some
    (counted(CIRCLE | {3: Waiting(2, 13, 0.1)}, *SOUND, (2, 3, 80, 60, 8, 8)), None),
    # the rank at the end of a lossy link is stopped
    (
        {rank: wait for rank, wait in counted(CIRCLE, *SOUND, (2, 3, 80, 60, 8, 8)).items() if rank != 3},
        (0, 3, 10, []),
    ),
]


@pytest.mark.parametrize(("answers", "expected"), CIRCLES)
def test_a_circle_of_waiting_ranks_is_attributed_to_the_link_that_lacks_bytes(
    answers: dict[int, Waiting], expected: tuple[int, int, int | None, list[Link]] | None
) -> None:
    found = attribute_failure(0, answers, 8.0)
    assert expected == (found and (found.rank, found.peer, found.step, list(found.links)))


@pytest.mark.parametrize("reporter", range(4))
def test_every_reporter_of_a_circle_names_the_same_link(reporter: int) -> None:
    for lost in [(0, 1), (1, 2), (2, 3), (3, 0)]:
        moved = [(*ends, 50, 40 if ends == lost else 50, 8, 8) for ends in [(0, 1), (1, 2), (2, 3), (3, 0)]]
        found = attribute_failure(reporter, counted(CIRCLE, *moved), 8.0)
        assert found is not None
        assert (found.links, {found.rank, found.peer}) == ((link(*lost),), set(lost))


def test_links_of_a_rank_that_does_not_answer_are_not_compared() -> None:
    answers = counted(CIRCLE, *SOUND, (2, 3, 80, 60, 8, 8))
    assert cut_links({rank: answers[rank] for rank in (0, 1, 2)}, 8.0) == []


def lost_link(stopped: set[int]) -> tuple[RendezvousState, list[Post]]:
    """Of three ranks, of which rank 0 has lost its link to rank 1."""
    hub = RendezvousState(3, stopped=lambda hello: hello["rank"] in stopped)
    for rank in range(3):
        hub.join(hello_of(rank, 3), 0.0)
    lost = {"type": "lost", "links": [list(link(0, 1))], "peer": 1, "step": 3, "idle": 0.1}
    return hub, hub.receive(0, lost, 10.0)


PONG: Message = {"type": "pong", "peer": 0, "step": 3, "idle": 0.1}


def test_a_link_has_failed_if_the_rank_at_its_other_end_answers_here() -> None:
    """At once, whatever the others do."""
    hub, asked = lost_link(set())
    assert [(rank, message["type"]) for rank, message in asked] == [(1, "ping"), (2, "ping")]
    told = dict(hub.receive(1, PONG, 10.01))
    assert set(told) == {0, 1, 2}
    assert {(one["rank"], one["peer"], str(one["links"])) for one in told.values()} == {
        (0, 1, str([list(link(0, 1))]))
    }


def test_a_link_to_a_rank_that_is_paused_has_not_failed() -> None:
    """Its machine may be paused as a whole: nothing of it answers, here neither. The report may come again."""
    hub, _ = lost_link(set())
    assert hub.receive(2, PONG, 10.01) == []
    assert hub.receive(0, {**PONG, "type": "lost", "links": [list(link(0, 1))]}, 10.1) == []
    assert hub.tick(11.1) == []
    assert hub.verdict is None
    assert hub.receive(1, PONG, 11.2) == []  # too late for the question of that report
    assert len(hub.receive(0, {**PONG, "type": "lost", "links": [list(link(0, 1))]}, 11.3)) == 2
    assert dict(hub.receive(1, PONG, 11.31))[2]["links"] == [list(link(0, 1))]


def test_a_late_answer_does_not_condemn_a_link() -> None:
    """The machine may have stood still while its link was probed; the report comes again, and is asked about again."""
    hub, _ = lost_link(set())
    assert hub.receive(1, PONG, 10.2) == []
    assert hub.verdict is None
    assert len(hub.receive(0, {**PONG, "type": "lost", "links": [list(link(0, 1))]}, 10.3)) == 2
    assert dict(hub.receive(1, PONG, 10.31))[2]["links"] == [list(link(0, 1))]


def test_reports_before_all_ranks_have_come_are_not_heard() -> None:
    """The ranks that are missing have said nothing yet, so the rendezvous goes on to wait for them."""
    hub = RendezvousState(3, stopped=lambda hello: False)
    hub.join(hello_of(0, 3), 0.0)
    for report in ({"links": [list(link(0, 1))]}, {"timeout": 1.0}):
        kind = "lost" if "links" in report else "stall"
        assert hub.receive(0, {**PONG, "type": kind, **report}, 0.1) == []
    assert hub.receive(0, PONG, 0.2) == []
    told = dict(hub.tick(1e9))
    assert "only 1 of 3 ranks came, not" in told[0]["message"]


def test_a_stall_beside_a_lost_link_is_answered_as_without_it() -> None:
    hub, _ = lost_link(set())
    assert hub.receive(2, {**PONG, "type": "stall", "timeout": 1.0, "idle": 2.0}, 10.02) == []
    assert hub.receive(2, {**PONG, "idle": 2.0}, 10.03) == []
    (keep_waiting,) = hub.tick(11.1)
    assert keep_waiting == (2, {"type": "keep waiting"})


@pytest.mark.parametrize(
    "fields",
    [
        {"links": [[0, 1]]},
        {"links": [[0, "1", "network"]]},
        {"links": {}},
        {"links": [[0, 1, "network"]], "counts": [[0, 1, "network", None, 3]]},
        {"links": [[0, 1, "network"]], "counts": 3},
    ],
)
def test_links_that_no_rank_sends_are_malformed(fields: Message) -> None:
    hub, _ = lost_link(set())
    with pytest.raises((ValueError, TypeError)):
        RendezvousState.receive(hub, 1, {**PONG, **fields}, 10.0)


def test_a_rendezvous_where_nobody_can_listen_is_refused(tmp_path: Path) -> None:
    with (
        Rendezvous(f"unix:{tmp_path}/meeting", 2),
        pytest.raises(UsageError, match=r"cannot listen at the rendezvous unix:.*Address already in use"),
    ):
        Rendezvous(f"unix:{tmp_path}/meeting", 2)
    with pytest.raises(UsageError, match=re.escape("cannot listen at the rendezvous 192.0.2.1:0")):
        Rendezvous("192.0.2.1:0", 2)


def regular_file(path: Path) -> None:
    path.write_text("weights")


def link_to_a_file(path: Path) -> None:
    path.with_name("weights").write_text("weights")
    path.symlink_to(path.with_name("weights"))


@pytest.mark.parametrize("make", [regular_file, link_to_a_file, Path.mkdir, os.mkfifo])
def test_a_path_that_is_not_a_socket_stays(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "here"
    make(path)
    before = os.lstat(path)
    with pytest.raises(UsageError, match=r"cannot listen at the rendezvous unix:.*it is not a socket"):
        Rendezvous(f"unix:{path}", 1)
    assert os.path.samestat(before, os.lstat(path))
    assert not path.is_file() or path.read_text() == "weights"


def test_a_rendezvous_that_ends_leaves_a_path_that_is_no_longer_its_own(tmp_path: Path) -> None:
    path = tmp_path / "here"
    with Rendezvous(f"unix:{path}", 1):
        path.unlink()
        regular_file(path)
    assert path.read_text() == "weights"


def test_calls_of_a_closed_back_end_are_errors() -> None:
    with Rendezvous("127.0.0.1:0", 1) as meeting:
        backend = TcpBackend(0, 1, rendezvous=meeting.address)
        backend.close()
        backend.close()
        call: Callable[[float], float] = backend.largest
        with pytest.raises(BackendError, match="make a new one"):
            call(1.0)


class FakeRendezvous:
    """A listener that answers every hello with the same messages."""

    def __init__(self, *answers: Message) -> None:
        self._listener = Listener(Address("127.0.0.1", 0))
        self._answers, self.connections = answers, list[Connection]()
        self._listener.add(Endpoint(MEETING, b"", self._accept, lambda error: None))
        self.address = str(self._listener.address)

    def _accept(self, connection: Connection) -> None:
        def answer(messages: Sequence[Message]) -> None:
            for one in self._answers if messages[0]["type"] == "hello" else ():
                connection.send(one)

        connection.admit()
        self.connections.append(connection)
        connection.start(answer, lambda error: None, lambda error: None)

    def __enter__(self) -> FakeRendezvous:
        self._listener.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.close()
        for connection in self.connections:
            connection.close()


def test_a_failure_that_comes_together_with_the_welcome_is_heard() -> None:
    """A rank that is quicker than this one may have failed before this one has read that all are there."""
    welcome = {"type": "welcome", "token": "", "host": None, "peers": {}}
    failure = {"type": "failed", "message": "rank 1 gave up", "rank": None, "peer": 1, "step": None}
    with FakeRendezvous(welcome, failure) as server:
        world = TcpControlPlane(server.address, 1, 2, timeout=20)
        with pytest.raises(BackendError, match="rank 1 gave up"):
            world.wait(lambda: False, timeout=20)
        world.close()


def test_a_stopped_rendezvous_gets_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank has met is told there, and then it waits no longer than it has waited for another one anyway."""
    monkeypatch.setattr("collectives.peers.tcp_control_plane.GRACE_SECONDS", 9999)
    with stopped_process() as pid:
        seen = {"processes": process_namespace(), "pid": pid}
        with FakeRendezvous({"type": "welcome", "token": "", "host": 0, "peers": {}, **seen}) as server:
            world = TcpControlPlane(server.address, 1, 3)
            world.report("rank 2 closed its connection", peer=2, step=4)
            with pytest.raises(
                BackendError, match=r"rank 2 closed its connection, and the rendezvous of rank 0"
            ) as told:
                world.wait(lambda: False, timeout=0.2)
            assert told.value.peer == 0
            world.close()


def test_a_rank_whose_rendezvous_has_ended_sleeps(tmp_path: Path) -> None:
    """Its connection is at its end, which a thread that went on listening would hear without a pause."""
    rendezvous = Rendezvous(f"unix:{tmp_path / 'here'}", 1).start()
    world = TcpControlPlane(rendezvous.address, 0, 1, timeout=5)
    rendezvous.close()
    begun = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - begun < 0.1
    world.close()


def test_a_forked_child_that_ends_leaves_the_rendezvous_of_its_parent_alone(tmp_path: Path) -> None:
    """It neither takes the address away nor wakes the parent's threads, which would then never sleep again."""
    address = tmp_path / "here"
    world = TcpControlPlane(f"unix:{address}", 0, 1, timeout=5)
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
        prioritize(taken)
        for one in (made, taken):
            assert one.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == LOW_DELAY
            if sys.platform == "linux":
                assert one.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == INTERACTIVE
            one.close()

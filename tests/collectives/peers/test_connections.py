"""Connections of a job: what both ends prove, what strangers cost, and what an error of the loop becomes."""

from __future__ import annotations

import errno
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from collectives.backends.tcp.connections import connect
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.peers import connections
from collectives.peers.address import Address, listening_process, parse_address
from collectives.peers.connections import (
    _FRAME,
    _HELLO,
    _REPLY,
    LONGEST,
    MAGIC,
    STRANGERS,
    VERSION,
    Connection,
    ConnectionLoop,
    Endpoint,
    HandshakeError,
    Listener,
    Message,
    decode_message,
    encode_message,
)
from collectives.peers.environment import encrypts, job_key
from collectives.peers.rendezvous import Rendezvous
from collectives.peers.tcp_control_plane import TcpControlPlane
from tests.faults.attacks import attacked
from tests.faults.many_jobs import TOLD_APART, one_round
from tests.support.job_meeting import as_threads
from tests.support.ports import free_port
from topoplan.errors import BackendError, UsageError

SECONDS = 20.0


class End:
    """One end of a connection, and what it hears."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.ends: list[Exception | None] = []
        self.errors: list[BaseException] = []
        self.connection: Connection | None = None
        self._changed = threading.Condition()

    def functions(self) -> dict[str, Any]:
        return {
            "receive": lambda messages: self._note(self.heard, *messages),
            "ended": lambda error: self._note(self.ends, error),
            "failed": lambda error: self._note(self.errors, error),
        }

    def _note(self, where: list[Any], *what: Any) -> None:
        with self._changed:
            where.extend(what)
            self._changed.notify_all()

    def take(self, connection: Connection) -> None:
        self.connection = connection
        connection.start(**self.functions())
        self._note([])

    def wait(self, done: Any) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: done(self), SECONDS), (self.heard, self.ends, self.errors)


@contextmanager
def serving(key: bytes, accepted: Any = None) -> Iterator[tuple[Listener, Endpoint, End]]:
    """A listener with one endpoint, whose last connection is the end's."""
    end = End()
    endpoint = Endpoint.of_rank(key, accepted or end.take, end.errors.append)
    listener = Listener.serve("127.0.0.1", endpoint)
    try:
        yield listener, endpoint, end
    finally:
        if end.connection is not None:
            end.connection.close()
        listener.leave(endpoint)


def dialled(listener: Listener, endpoint: Endpoint, key: bytes, *, job: str = "") -> tuple[Connection, End]:
    made, end = socket.create_connection(("127.0.0.1", listener.address.port)), End()
    return Connection.dial(made, *Endpoint.named(endpoint.card, key), job=job, **end.functions()), end


def test_messages_pass_both_ways_in_order_once_both_ends_have_the_key() -> None:
    there = End()

    def admit(connection: Connection) -> None:
        there.take(connection)
        connection.admit()

    with serving(b"secret", admit) as (listener, endpoint, _):
        connection, here = dialled(listener, endpoint, b"secret")
        for number in range(100):  # the first ones before the handshake has ended
            connection.send({"type": "x", "number": number, "text": "y" * number * 100})
        there.wait(lambda end: len(end.heard) == 100)
        assert [message["number"] for message in there.heard] == list(range(100))
        assert there.connection is not None
        there.connection.send({"type": "back"})
        here.wait(lambda end: end.heard)
        connection.close()
        there.wait(lambda end: end.ends == [None])
        assert here.ends == [], "this end has closed it"


def test_another_key_is_refused_on_both_sides_and_both_jobs_are_named() -> None:
    with serving(b"secret") as (listener, endpoint, there):
        endpoint.job = "job 'a'"
        connection, here = dialled(listener, endpoint, b"another", job="job 'b'\x1b[2J")
        here.wait(lambda end: end.ends)
        assert isinstance(here.ends[0], HandshakeError)
        assert "serves another job (job 'a'): its key differs" in str(here.ends[0])
        connection.close()
        until = time.monotonic() + SECONDS
        while not endpoint.refused and time.monotonic() < until:
            time.sleep(0.01)
        assert endpoint.refused == ["job 'b'[2J"], "without what changes a terminal"
        assert there.connection is None


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda frame: frame[:-1] + bytes([frame[-1] ^ 1]),
        lambda frame: bytes([frame[0], frame[1], frame[2], frame[3], frame[4] ^ 1]) + frame[5:],
        lambda frame: frame + frame,
        lambda frame: frame[:-2] + frame,
        lambda frame: bytes(20),
        lambda frame: _FRAME.pack(1 << 30, bytes(16)),
    ],
    ids=["text", "code", "replayed", "truncated", "empty", "long"],
)
def test_a_frame_that_the_other_end_did_not_send_ends_the_connection(spoilt: Any) -> None:
    with serving(b"secret") as (listener, endpoint, there):
        connection, _ = dialled(listener, endpoint, b"secret")
        connection.send({"type": "first"})
        there.wait(lambda end: end.heard)
        with connection._sending:
            connection._out += spoilt(connection._frame(encode_message({"type": "second"})))
            connection._flush()
        there.wait(lambda end: end.ends)
        assert isinstance(there.ends[0], ValueError)
        assert [message["type"] for message in there.heard] in (["first"], ["first", "second"])
        connection.close()


def test_bytes_behind_the_first_message_of_a_link_are_left_to_its_owner() -> None:
    found: list[socket.socket] = []
    named = threading.Event()

    def take(connection: Connection, message: Message) -> None:
        assert message["link"] == [0, 1, "x"]
        found.append(connection.detach())
        named.set()

    def accept(connection: Connection) -> None:
        connection.start_link(take, lambda error: None)

    with serving(b"k", accept) as (listener, endpoint, _):
        made = socket.create_connection(("127.0.0.1", listener.address.port))
        link = Connection.to(
            made, endpoint.card, b"k", {"type": "link", "link": [0, 1, "x"]}, timeout=SECONDS
        )
        link.sendall(b"data" * 1000)
        assert named.wait(SECONDS)
        found[0].sendall(b"credit")
        assert found[0].recv(4000, socket.MSG_WAITALL) == b"data" * 1000
        assert link.recv(6, socket.MSG_WAITALL) == b"credit"
        for one in (link, found[0]):
            one.close()
        with pytest.raises(OSError, match="its key differs"):
            Connection.to(
                socket.create_connection(("127.0.0.1", listener.address.port)),
                endpoint.card,
                b"another",
                {"type": "link"},
                timeout=SECONDS,
            )


def test_ranks_that_connect_at_once_do_not_displace_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "TURN_SECONDS", SECONDS)
    monkeypatch.setattr(connections, "STRANGER_SECONDS", SECONDS)
    ends: list[End] = []

    def admit(connection: Connection) -> None:
        ends.append(End())
        ends[-1].take(connection)
        connection.admit()

    with serving(b"k", admit) as (listener, endpoint, _):
        place = ("127.0.0.1", listener.address.port)
        made = [socket.create_connection(place) for _ in range(3 * STRANGERS)]
        loop = ConnectionLoop.hold()
        loop.settle()
        loop.release()
        assert len(listener._strangers) == STRANGERS
        dialling = [
            Connection.dial(one, *Endpoint.named(endpoint.card, b"k"), **End().functions()) for one in made
        ]
        assert all(one.settled.wait(SECONDS) and one.opened for one in dialling)
        for one in dialling:
            one.close()
        for end in ends:
            end.wait(lambda end: end.ends)
        assert len(ends) == 3 * STRANGERS


def test_a_link_is_opened_again_when_so_many_came_that_the_listener_made_room() -> None:
    link, end = {"type": "link"}, End()

    def accept(connection: Connection) -> None:
        connection.start_link(lambda made, message: end._note(end.heard, message), end.errors.append)

    with serving(b"k", accept) as (listener, endpoint, _), socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            first, _ = server.accept()
            first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            first.close()
            end.connection = Connection(server.accept()[0], listener=listener)
            end.connection._register()

        thread = threading.Thread(target=serve)
        thread.start()
        made = connect(server.getsockname(), endpoint.card, b"k", link, timeout=SECONDS)
        thread.join(SECONDS)
        end.wait(lambda end: end.heard == [link])
        place = server.getsockname()
    made.close()
    assert end.connection is not None
    end.connection.close()
    with pytest.raises(ConnectionRefusedError):  # its process has ended
        connect(place, endpoint.card, b"k", link, timeout=SECONDS)


def test_strangers_make_room_for_each_other_and_leave_after_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "TURN_SECONDS", 0.05)
    with serving(b"k") as (listener, endpoint, there):
        connection, _ = dialled(listener, endpoint, b"k")
        connection.send({"type": "x"})
        there.wait(lambda end: end.heard)
        assert there.connection is not None
        there.connection.admit()
        place = ("127.0.0.1", listener.address.port)
        strangers = [socket.create_connection(place) for _ in range(STRANGERS + 3)]
        for one in strangers[:3]:
            one.settimeout(SECONDS)
            with pytest.raises(ConnectionResetError):
                one.recv(1)
        monkeypatch.setattr(connections, "STRANGER_SECONDS", 0.05)
        late = socket.create_connection(place)
        late.settimeout(SECONDS)
        with pytest.raises(ConnectionResetError):
            late.recv(1)
        connection.send({"type": "y"})
        there.wait(lambda end: len(end.heard) == 2)
        assert len(listener._strangers) <= STRANGERS
        for one in (*strangers, late):
            one.close()
        connection.close()


def test_a_listener_without_file_descriptors_pauses_and_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(b"k") as (listener, endpoint, there):
        real, refused = listener._socket, []

        class Full:
            def accept(self) -> Any:
                if len(refused) < 3:
                    refused.append(time.monotonic())
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                return real.accept()

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        monkeypatch.setattr(listener, "_socket", Full())
        connection, _ = dialled(listener, endpoint, b"k")
        connection.send({"type": "x"})
        there.wait(lambda end: end.heard)
        assert len(refused) == 3
        assert refused[2] - refused[0] > connections.PAUSE_SECONDS, "it does not spin"
        connection.close()
        monkeypatch.undo()


def test_an_error_of_a_function_that_the_loop_calls_reaches_its_owner_and_nobody_else() -> None:
    def broken(connection: Connection) -> None:
        raise RuntimeError("a bug")

    with serving(b"k", broken) as (listener, endpoint, there), serving(b"k") as (_, other, beside):
        connection, here = dialled(listener, endpoint, b"k")
        here.wait(lambda end: end.ends)
        assert [str(error) for error in there.errors] == ["a bug"]
        connection.close()
        connection, _ = dialled(listener, other, b"k")
        connection.send({"type": "x"})
        beside.wait(lambda end: end.heard)
        connection.close()


def test_an_error_of_the_loop_itself_reaches_all_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(b"k") as (listener, endpoint, there):
        connection, here = dialled(listener, endpoint, b"k")
        connection.send({"type": "x"})
        there.wait(lambda end: end.heard)

        def broken(self: ConnectionLoop) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(ConnectionLoop, "_turn", broken)
        ConnectionLoop.hold().wake()
        for end in (here, there):
            end.wait(lambda end: end.errors)
            assert str(end.errors[0]) == "a bug"
        monkeypatch.undo()
        connection.close()
        # The owner of the first endpoint has not left yet, and others are served nevertheless.
        with serving(b"l") as (another, other, beside):
            assert another is not listener
            connection, _ = dialled(another, other, b"l")
            connection.send({"type": "x"})
            beside.wait(lambda end: end.heard)
            connection.close()


def test_an_error_of_the_rendezvous_ends_the_job_with_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, *given: Any) -> Any:
        raise RuntimeError("a bug")

    with Rendezvous("127.0.0.1:0", 2) as meeting:

        def work(rank: int) -> None:
            world = TcpControlPlane(meeting.address, rank, 2, timeout=SECONDS)
            try:
                monkeypatch.setattr("collectives.peers.rendezvous_state.RendezvousState.receive", broken)
                world.gather(b"", timeout=SECONDS)
            finally:
                world.close()

        for error in as_threads(2, work):
            assert isinstance(error, BackendError)
            assert "the rendezvous failed: RuntimeError: a bug" in str(error)


def test_one_process_listens_once_at_an_address_and_the_loop_ends_with_its_last_user() -> None:
    with serving(b"k") as (first, _, _), serving(b"l") as (second, _, _):
        assert first is second
        assert ConnectionLoop._running is not None
    assert ConnectionLoop._running is None
    assert not any(thread.name == "topoplan connections" for thread in threading.enumerate())


def test_an_endpoint_that_leaves_ends_connections_that_nobody_has_admitted() -> None:
    """While another endpoint keeps the listener: ranks that recover would wait for an answer of a rank that is gone."""
    with serving(b"k") as (listener, _, _), serving(b"l") as (same, leaving, there):
        assert same is listener
        _, here = dialled(listener, leaving, b"l")
        there.wait(lambda end: end.connection is not None)
        name, _ = Endpoint.named(leaving.card, b"l")
        with socket.create_connection(("127.0.0.1", listener.address.port), SECONDS) as unproved:
            unproved.sendall(_HELLO.pack(MAGIC, VERSION, name, bytes(32), bytes(64)))
            assert len(unproved.recv(_REPLY.size, socket.MSG_WAITALL)) == _REPLY.size
            listener.leave(leaving)
            here.wait(lambda end: end.ends == [None])
            assert unproved.recv(1) == b""


@pytest.mark.sampled
@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"type": "x", "a": ' + b"[" * 5000,
        b'{"type": "x", "a": 1e400}',
        b'{"type": "x", "a": -Infinity}',
        b'{"type": "x", "a": NaN}',
        b'{"type": "x", "a": 9223372036854775808}',
        b'{"type": "x", "a": 1' + b"0" * 5000 + b"}",
        b'{"a": 1}',
        b'{"type": 1}',
        b"[]",
        b"\xff",
        b"",
        zlib.compress(b"[]"),
        zlib.compress(b'{"type": "x"}') + b"y",
        zlib.compress(b'{"type": "x"}')[:-1],
        b"x",
        zlib.compress(b'{"type": "x", "a": "' + bytes(LONGEST) + b'"}'),
    ],
)
def test_a_text_that_no_rank_sends_is_no_message(text: bytes) -> None:
    with pytest.raises(ValueError, match="not a message"):
        decode_message(text)


def test_long_messages_are_compressed_and_no_stranger_makes_a_listener_decompress_them() -> None:
    message = {"type": "x", "texts": ["y" * 100] * 1000}
    assert len(encode_message(message)) < 2000
    assert decode_message(encode_message(message)) == message
    with serving(b"k") as (listener, endpoint, there):
        connection, _ = dialled(listener, endpoint, b"k")
        connection.send(message)
        there.wait(lambda end: end.ends)
        assert "a compressed text of more than 8192 bytes" in str(there.ends[0])
        connection.close()


def test_numbers_that_are_not_finite_are_not_sent() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_message({"type": "x", "a": float("inf")})


def test_keys_come_from_a_variable_or_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("a key of many letters\n")
    path.chmod(0o600)
    assert job_key({"TOPOPLAN_JOB_KEY_FILE": str(path)}) == b"a key of many letters"
    assert job_key({"TOPOPLAN_JOB_KEY": "x" * 16, "TOPOPLAN_JOB_KEY_FILE": str(path)}) == b"x" * 16
    path.chmod(0o640)
    for environment, message in (
        ({"TOPOPLAN_JOB_KEY_FILE": str(path)}, r"must be a file of this user with mode 600, got mode 640"),
        ({"TOPOPLAN_JOB_KEY_FILE": str(tmp_path / "none")}, "must name a file that this process can read"),
        ({"TOPOPLAN_JOB_KEY": "short"}, "must have at least 16 characters, got 5"),
    ):
        with pytest.raises(UsageError, match=message):
            job_key(environment)
    with pytest.raises(UsageError, match="TOPOPLAN_TLS must be 0 or 1, got 'yes'"):
        encrypts({"TOPOPLAN_TLS": "yes"})


def test_a_key_is_missed_on_a_network_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Address, "local", False)
    with pytest.warns(UserWarning, match="has no key: anybody who reaches it can join the job"):
        Rendezvous("127.0.0.1:0", 1).close()
    monkeypatch.setenv("TOPOPLAN_JOB_KEY", "x" * 16)
    Rendezvous("127.0.0.1:0", 1).close()


def test_rank_0_does_not_join_a_process_that_listens_in_its_place() -> None:
    """It is neither this process nor one that launched it, so what it says is not believed."""
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); "
    command = [sys.executable, "-c", f"{code} sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as squatter:
        assert squatter.stdout is not None
        port = int(squatter.stdout.readline())
        with pytest.raises(
            UsageError, match=rf"rank 0 cannot listen at .*process {squatter.pid} \(.*listens"
        ):
            TcpBackend(0, 2, rendezvous=f"127.0.0.1:{port}", timeout=SECONDS)
        squatter.communicate("")


def test_the_process_that_listens_is_found(tmp_path: Path) -> None:
    with Listener_of(Address("127.0.0.1", 0)) as listener:
        assert listening_process(listener.address).pid == os.getpid()
        assert listening_process(listener.address).launched_this
    assert not listening_process(Address("127.0.0.1", free_port())).launched_this
    with Listener_of(parse_address(f"unix:{tmp_path}/here")) as listener:
        assert listening_process(listener.address).pid == os.getpid()


@contextmanager
def Listener_of(address: Address) -> Iterator[Listener]:
    listener = Listener(address)
    listener.start()
    try:
        yield listener
    finally:
        listener.close()


@pytest.mark.thorough
@pytest.mark.parametrize("key", [True, False], ids=["with a key", "without a key"])
def test_attacks_leave_a_job_unharmed(key: bool) -> None:
    assert {row["attack"]: row["result"] for row in attacked(key=key) if row["result"] != "unharmed"} == {}


@pytest.mark.thorough
@pytest.mark.parametrize("apart", ["names", "keys", "names and keys"])
def test_jobs_at_one_address_are_not_mixed(apart: str) -> None:
    order = random.Random(7)
    for jobs in (2, 3):
        said = one_round(jobs, TOLD_APART[apart], order)
        assert "right" in said
        assert [one for one in said if one.startswith(("MIXED", "HANG", "ENDED"))] == []


def test_encrypted_ends_hear_each_other_and_no_other_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    """An end in between has a certificate of its own, which changes the proof of the key."""
    pytest.importorskip("cryptography")
    from collectives.peers import encryption

    monkeypatch.setenv("TOPOPLAN_TLS", "1")
    with serving(b"k") as (listener, endpoint, there):
        connection, _ = dialled(listener, endpoint, b"k")
        connection.send({"type": "x", "text": "y" * 5_000})
        there.wait(lambda end: end.heard)
        connection.close()
        with socket.create_connection(("127.0.0.1", listener.address.port)) as plain:
            plain.sendall(b"topoplan" + bytes(112))
            plain.settimeout(SECONDS)
            assert plain.recv(1) == b""
        monkeypatch.setattr(encryption.Encryption, "fingerprint", property(lambda self: os.urandom(32)))
        connection, here = dialled(listener, endpoint, b"k")
        here.wait(lambda end: end.ends)
        assert isinstance(here.ends[0], HandshakeError)
        connection.close()

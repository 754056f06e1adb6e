"""A stand-in for NCCL on the fake GPUs, with the face of nccl4py.

Messages of a pair match in the order in which they were issued; a group of a communicator ends when all its messages
have moved, and the next one of its stream begins then. So what hangs in NCCL hangs here: a group's end until its peers
have come for the first time (with ``NCCL_COMM_BLOCKING=1``), freeing a communicator while graphs hold its messages, and
everything for which a peer is missing. What NCCL forbids is written down in ``machine.misuses``: a call beside another
thread's on one communicator, and one on a communicator that is not ready.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.support.fake_streams import Unit, provide

REVOKE_SECONDS = 0.2  # until what was under way has ended

UINT8 = 1
VERSION, BINDINGS = (2, 30, 3), (2, 32, 3)
"""Of libnccl, and of the header that nccl4py's bindings were generated from."""


class NCCLError(Exception):
    """As nccl4py's."""


class NcclInvalid(Exception):
    """As nccl4py's, for what it finds itself."""


class Result(IntEnum):
    Success = 0
    UnhandledCudaError = 1
    InvalidArgument = 4
    InvalidUsage = 5
    RemoteError = 6
    InProgress = 7


class CommShrinkFlag(IntEnum):
    DEFAULT = 0
    ABORT = 1


@dataclass(slots=True)
class Message:
    address: int
    nbytes: int
    capture: int | None
    """Which of the communicator's captures it is part of; both sides must be part of the same one."""
    moved: bool = False


@dataclass(slots=True)
class World:
    """All communicators of one unique id."""

    size: int
    here: set[int] = field(default_factory=set)
    met: set[tuple[str, int, int]] = field(default_factory=set)
    """Which side of which pair has called, and so can be connected to."""
    sends: dict[tuple[int, int], deque[Message]] = field(default_factory=dict)
    receives: dict[tuple[int, int], deque[Message]] = field(default_factory=dict)
    windows: dict[int, dict[int, int]] = field(default_factory=dict)
    """Of each window the address on each rank."""
    shrunk: dict[tuple[int, ...], World] = field(default_factory=dict)
    """The communicators that were made of it, by the ranks that stay."""

    def come(self, rank: int) -> bool:
        new = rank not in self.here
        self.here.add(rank)
        return new

    def complete(self) -> bool:
        return len(self.here) == self.size

    def call(self, sides: Iterable[tuple[str, int, int]]) -> None:
        self.met.update(sides)

    def called(self, sides: Iterable[tuple[str, int, int]]) -> bool:
        return self.met.issuperset(sides)

    def match(self) -> None:
        """Move what both sides of a pair have come for."""
        for pair, sent in self.sends.items():
            wanted = self.receives.get(pair, deque())
            while sent and wanted:
                one, other = sent.popleft(), wanted.popleft()
                assert one.nbytes == other.nbytes, f"{pair}: {one.nbytes} bytes meet room for {other.nbytes}"
                assert one.capture == other.capture, f"{pair}: captures {one.capture} and {other.capture}"
                ctypes.memmove(other.address, one.address, one.nbytes)
                one.moved = other.moved = True


class Comm:
    """A communicator of one rank, below the faces."""

    def __init__(
        self, machine: Any, unique_id: bytes, size: int, rank: int, world: World | None = None
    ) -> None:
        assert len(unique_id) == 128
        self.machine, self.rank, self.device = machine, rank, machine.device
        self.aborted = self.destroyed = self.revoked = False
        self.ended = 0
        """How often everything was ended that was under way."""
        self.captures: list[Any] = []
        self.windows: list[int] = []
        self.holding: weakref.WeakSet[Any] = weakref.WeakSet()
        """Captured graphs and running launches of them with messages of this communicator."""
        self.user: int | None = None
        self.connecting: Callable[[], bool] = self.all_here
        machine.kept.append(self)
        with machine.lock:
            if world is None and unique_id not in machine.worlds:
                make = machine.make_world
                machine.worlds[unique_id] = World(size) if make is None else make(unique_id, size)
            self.world: World = machine.worlds[unique_id] if world is None else world
            assert self.world.size == size
            if not self.world.come(rank):
                machine.misuses.append(f"rank {rank}: comes a second time")

    def all_here(self) -> bool:
        return self.world.complete()

    def ready(self) -> bool:
        return self.aborted or self.connecting()

    def wait_until_ready(self) -> None:
        while not self.ready():
            time.sleep(0.0005)

    def begin(self) -> None:
        """A thread begins to use it; NCCL makes the thread's current device current again when a call ends."""
        self.machine.bind()
        if self.user not in (None, threading.get_ident()):
            self.machine.misuses.append(f"rank {self.rank}: a call beside another thread's")
        self.user = threading.get_ident()

    def end(self) -> None:
        self.user = None

    def busy(self) -> bool:
        with self.machine.lock:
            return any(
                isinstance(unit, Group) and unit.comm is self and not unit.done
                for stream in self.machine.streams
                for unit in stream.queue
            )

    def revoke(self) -> Result:
        """End what is under way; ready again a little later."""
        if self.revoked or self.destroyed:
            return Result.InvalidArgument
        self.begin()
        self.revoked, self.ended = True, self.ended + 1
        quiet = time.monotonic() + REVOKE_SECONDS
        self.connecting = lambda: time.monotonic() > quiet
        self.end()
        return Result.Success

    def shrink(self, without: list[int], flag: int) -> Comm | Result:
        """A communicator of all ranks but some; this one is not ready before that is."""
        if not without or self.rank in without:
            return Result.InvalidArgument
        if flag == CommShrinkFlag.ABORT:
            self.ended += 1
        elif self.busy():
            self.machine.misuses.append(f"rank {self.rank}: shrinks beside what is under way")
        if not self.ready():
            return Result.InvalidArgument
        self.begin()
        stay = tuple(rank for rank in range(self.world.size) if rank not in without)
        with self.machine.lock:
            world = self.world.shrunk.setdefault(stay, World(len(stay)))
        child = Comm(self.machine, bytes(128), len(stay), stay.index(self.rank), world)
        # where this one is aborted the other one is there too, and is of no use
        self.connecting = child.connecting = lambda: self.aborted or child.all_here()
        self.end()
        return child

    def leave(self, word: str) -> None:
        """Abort or destroy: waits, without looking at anything else, until no graph holds messages of it."""
        self.begin()
        setattr(self, word, True)
        self.end()
        while len(self.holding):
            time.sleep(0.0005)


class Group(Unit):
    """The messages of one communicator in one group: a kernel."""

    def __init__(self, comm: Comm, calls: list[tuple[str, int, Message]]) -> None:
        super().__init__(self.progress)
        self.comm = comm
        self.calls = calls
        self.posted = False
        self.ended = comm.ended

    def progress(self) -> bool:
        captured = any(message.capture is not None for _, _, message in self.calls)
        deaf = captured and self.comm.machine.deaf_graphs
        if self.comm.aborted or (self.ended != self.comm.ended and not deaf):
            return True
        world, rank = self.comm.world, self.comm.rank
        if not self.posted:
            self.posted = True
            for kind, peer, message in self.calls:
                lanes, pair = (
                    (world.sends, (rank, peer)) if kind == "send" else (world.receives, (peer, rank))
                )
                lanes.setdefault(pair, deque()).append(message)
        world.match()
        return all(message.moved for _, _, message in self.calls)


class Groups:
    def __init__(self, machine: Any, streams: Mapping[int, Any]) -> None:
        self.machine, self.streams = machine, streams
        self.local = threading.local()

    def start(self) -> None:
        self.local.depth = getattr(self.local, "depth", 0) + 1
        if self.local.depth == 1:
            self.local.calls = {}

    def call(
        self, comm: Comm, kind: str, address: int, nbytes: int, datatype: int, peer: int, stream: int
    ) -> None:
        comm.begin()
        assert not comm.destroyed
        assert not comm.revoked, "ncclInvalidUsage"
        assert 0 <= peer < comm.world.size
        assert datatype == UINT8
        assert nbytes > 0
        assert getattr(self.local, "depth", 0), "a message outside a group waits for its peer alone"
        if not comm.ready():
            self.machine.misuses.append(f"rank {comm.rank}: a call on a communicator that is not ready")
        aligned = address % 16 == 0
        self.machine.message_bytes[aligned] += nbytes
        self.local.calls.setdefault((comm, stream), []).append((kind, peer, address, nbytes))

    def end(self, *, blocking: bool) -> None:
        self.local.depth -= 1
        if self.local.depth:
            return
        calls, self.local.calls = self.local.calls, {}
        for (comm, stream), messages in calls.items():
            self._queue(comm, stream, messages)
        for comm, _ in calls:
            if blocking:
                comm.wait_until_ready()
            comm.end()

    def _queue(self, comm: Comm, stream: int, calls: list[tuple[str, int, int, int]]) -> None:
        assert self.machine.device == comm.device
        pairs = [(kind, comm.rank, peer) for kind, peer, _, _ in calls]
        other = {"send": "receive", "receive": "send"}
        wanted = {(other[kind], peer, rank) for kind, rank, peer in pairs}
        comm.world.call(pairs)
        comm.connecting = lambda: comm.world.called(wanted)
        capture = self.streams[stream].capture
        if capture is not None:
            capture.users.add(comm)
            if capture not in comm.captures:
                comm.captures.append(capture)
        number = None if capture is None else comm.captures.index(capture)

        def make() -> Unit:
            return Group(
                comm, [(kind, peer, Message(address, size, number)) for kind, peer, address, size in calls]
            )

        self.streams[stream].push(make)


def blocking() -> bool:
    return os.environ.get("NCCL_COMM_BLOCKING") == "1"


def nccl4py_modules(machine: Any, groups: Groups, numbers: Iterator[int]) -> tuple[ModuleType, ModuleType]:
    """``nccl.core`` and ``nccl.bindings.nccl``: communicators tell when they are ready.

    No call waits, but with ``NCCL_COMM_BLOCKING=1``.
    """
    core, bindings = ModuleType("nccl.core"), ModuleType("nccl.bindings.nccl")
    comms: dict[int, Comm] = {}

    class UniqueId:
        def __init__(self, data: bytes) -> None:
            self._data = data

        def __bytes__(self) -> bytes:
            return self._data

        @staticmethod
        def from_bytes(b: bytes) -> UniqueId:
            return UniqueId(b)

    class Handle:
        """As ``nccl.bindings.nccl.Comm``."""

        def __init__(self, ptr: int = 0) -> None:
            self.comm: Any = comms.get(ptr)

    class Communicator:
        def __init__(self, ptr: int | None = None) -> None:
            self._ptr = ptr or 0
            self._coming: Comm | None = None

        @property
        def ptr(self) -> int:
            """0 until NCCL has made it of another one."""
            if self._coming is not None and self._coming.ready():
                comms[id(self._coming)] = self._coming
                self._ptr, self._coming = id(self._coming), None
            return self._ptr

        @classmethod
        def init(cls, nranks: int, rank: int, unique_id: UniqueId, config: Any = None) -> Communicator:
            assert config.blocking is False
            comm = Comm(machine, bytes(unique_id), nranks, rank)
            if blocking():
                comm.wait_until_ready()
            comms[id(comm)] = comm
            return cls(id(comm))

        def abort(self) -> None:
            self._leave("aborted")

        def destroy(self) -> None:
            self._leave("destroyed")

        def revoke(self, flags: int = 0) -> None:
            assert flags == 0
            check(comms[self.ptr].revoke())

        def shrink(
            self,
            exclude_ranks: Any = None,
            config: Any = None,
            flag: CommShrinkFlag = CommShrinkFlag.DEFAULT,
        ) -> Communicator:
            made = comms[self.ptr].shrink(list(exclude_ranks or ()), flag)
            if isinstance(made, Result):
                check(made)
            child = Communicator()
            child._coming = made  # type: ignore[assignment]
            return child

        def get_async_error(self) -> Result:
            if not self.ptr:
                raise NcclInvalid("Cannot get async error: Communicator not initialized")
            if machine.async_error:
                return Result.RemoteError
            return Result.Success if comms[self.ptr].ready() else Result.InProgress

        def get_last_error(self) -> str:
            return str(machine.async_error)

        def _leave(self, word: str) -> None:
            if self.ptr:
                comms[self.ptr].leave(word)
                self._ptr = 0

    def check(result: Result) -> None:
        if result is not Result.Success:
            raise NCCLError(result.name)

    class Window:
        """As ``nccl.bindings.nccl.Window``: its handle is there when all ranks have registered."""

        def __init__(self, comm: Comm, address: int) -> None:
            self.comm, self.number = comm, len(comm.windows)
            comm.windows.append(address)
            self.known = comm.world.windows.setdefault(self.number, {})
            self.known[comm.rank] = address
            if machine.windows[0]:  # else NCCL says at once that it has none
                comm.connecting = lambda: len(self.known) == comm.world.size

        @property
        def handle(self) -> int:
            return int(machine.windows[0] and len(self.known) == self.comm.world.size)

    def comm_query_properties(comm: Handle) -> SimpleNamespace:
        """Refused by an older NCCL than the bindings, whose struct it does not know."""
        check(Result.InvalidUsage if BINDINGS > VERSION else Result.Success)
        windows, copies = machine.windows
        return SimpleNamespace(device_api_support=windows, multimem_support=copies, n_lsa_teams=machine.teams)

    def team_lsa(comm: Handle) -> SimpleNamespace:
        ranks = comm.comm.world.size // machine.teams
        return SimpleNamespace(n_ranks=ranks, rank=comm.comm.rank % ranks, stride=1)

    def mem_alloc(size: int) -> int:
        # by calls of the driver, which need a context
        check(Result.Success if machine.bound else Result.UnhandledCudaError)
        return int(machine.allocate(size))

    def comm_window_register(comm: Handle, buff: int, size: int, win_flags: int) -> Window:
        assert machine.memory[buff].nbytes >= size
        assert win_flags == 0
        return Window(comm.comm, buff)

    def comm_window_deregister(comm: Handle, win: Window) -> None:
        assert not comm.comm.aborted, "the communicator is gone"
        assert not comm.comm.destroyed, "the communicator is gone"
        comm.comm.windows[win.number] = 0

    def get_peer_device_pointer(window: Window, offset: int, peer: int) -> int:
        assert window.handle
        return int(window.known[peer]) + offset

    def get_lsa_multimem_device_pointer(window: Window, offset: int) -> int:
        return offset if not machine.windows[1] else int(window.known[0]) + (1 << 50) + offset

    @contextmanager
    def group() -> Iterator[None]:
        groups.start()
        try:
            yield
        finally:
            groups.end(blocking=blocking())

    def send(sendbuff: int, count: int, datatype: int, peer: int, comm: Handle, stream: int) -> None:
        groups.call(comm.comm, "send", sendbuff, count, datatype, peer, stream)

    def recv(recvbuff: int, count: int, datatype: int, peer: int, comm: Handle, stream: int) -> None:
        groups.call(comm.comm, "receive", recvbuff, count, datatype, peer, stream)

    def get_version() -> SimpleNamespace:
        release, made_for = (
            SimpleNamespace(major=major, minor=minor, micro=micro)
            for major, minor, micro in (VERSION, BINDINGS)
        )
        found = SimpleNamespace(version=release, path="/fake/libnccl.so.2")
        return SimpleNamespace(libnccl=found, nccl_bindings=made_for)

    provide(core, CommShrinkFlag, Communicator, NcclInvalid, UniqueId, get_version, group)
    provide(
        core,
        NCCLConfig=lambda *, blocking: SimpleNamespace(blocking=blocking),
        UINT8=UINT8,
        WindowFlag=SimpleNamespace(DEFAULT=0),
        get_error_string=lambda result: {Result.RemoteError: "remote process exited"}[result],
        get_unique_id=lambda: UniqueId(next(numbers).to_bytes(128, "big")),
    )
    provide(bindings, NCCLError, Result, recv, send, mem_alloc, comm_query_properties, team_lsa)
    provide(bindings, comm_window_register, comm_window_deregister, get_peer_device_pointer)
    provide(bindings, get_lsa_multimem_device_pointer, Comm=Handle, mem_free=machine.free)
    return core, bindings


def nccl_faces(machine: Any, streams: Mapping[int, Any]) -> dict[str, ModuleType]:
    """The modules of nccl4py, by name, for one machine."""
    faces = nccl4py_modules(machine, Groups(machine, streams), machine.numbers)
    return {face.__name__: face for face in faces}

"""A stand-in for ``cupy.cuda.nccl`` on the fake GPUs: groups of sends and receives that run when both sides do.

Messages of a pair match in the order in which they were issued; a group of a communicator ends when all its messages
have moved, and the next one of its stream begins then. So what hangs in NCCL hangs here.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from types import ModuleType
from typing import Any

from fake_streams import Unit


class NcclError(RuntimeError):
    """As CuPy's."""


@dataclass(slots=True)
class Message:
    """One side of a transfer."""

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
    joined: threading.Event = field(default_factory=threading.Event)
    sends: dict[tuple[int, int], deque[Message]] = field(default_factory=dict)
    receives: dict[tuple[int, int], deque[Message]] = field(default_factory=dict)

    def match(self) -> None:
        for pair, sent in self.sends.items():
            wanted = self.receives.get(pair, deque())
            while sent and wanted:
                one, other = sent.popleft(), wanted.popleft()
                assert one.nbytes == other.nbytes, f"{pair}: {one.nbytes} bytes meet room for {other.nbytes}"
                assert one.capture == other.capture, f"{pair}: captures {one.capture} and {other.capture}"
                ctypes.memmove(other.address, one.address, one.nbytes)
                one.moved = other.moved = True


class Group(Unit):
    """The messages of one communicator in one group: a kernel."""

    def __init__(self, communicator: Any, calls: list[tuple[str, int, Message]]) -> None:
        super().__init__(self.progress)
        self.communicator = communicator
        self.calls = calls
        self.posted = False

    def progress(self) -> bool:
        if self.communicator.aborted:
            return True
        world, rank = self.communicator.world, self.communicator.rank
        if not self.posted:
            self.posted = True
            for kind, peer, message in self.calls:
                lanes, pair = (
                    (world.sends, (rank, peer)) if kind == "send" else (world.receives, (peer, rank))
                )
                lanes.setdefault(pair, deque()).append(message)
        world.match()
        return all(message.moved for _, _, message in self.calls)


def nccl_module(machine: Any, streams: Mapping[int, Any]) -> ModuleType:
    """The module, for one machine."""
    nccl = ModuleType("cupy.cuda.nccl")
    numbers = count()
    local = threading.local()

    class NcclCommunicator:
        def __init__(self, size: int, unique_id: bytes, rank: int) -> None:
            assert len(unique_id) == 128
            with machine.lock:
                self.world = machine.worlds.setdefault(unique_id, World(size))
                assert self.world.size == size
                assert rank not in self.world.here
                self.world.here.add(rank)
                if len(self.world.here) == size:
                    self.world.joined.set()
            self.rank, self.device, self.aborted, self.destroyed = rank, machine.device, False, False
            self.captures: list[Any] = []
            machine.kept.append(self)
            if not self.world.joined.wait(20):
                raise NcclError("NCCL_ERROR_SYSTEM_ERROR")

        def send(self, address: int, number: int, datatype: int, peer: int, stream: int) -> None:
            self._call("send", address, number, datatype, peer, stream)

        def recv(self, address: int, number: int, datatype: int, peer: int, stream: int) -> None:
            self._call("recv", address, number, datatype, peer, stream)

        def _call(self, kind: str, address: int, number: int, datatype: int, peer: int, stream: int) -> None:
            assert not self.aborted
            assert not self.destroyed
            assert peer != self.rank
            assert 0 <= peer < self.world.size
            assert datatype == nccl.NCCL_UINT8
            assert number > 0
            assert getattr(local, "depth", 0), "a message outside a group waits for its peer alone"
            message = (kind, peer, address, number)
            local.calls.setdefault((self, stream), []).append(message)

        def abort(self) -> None:
            self.aborted = True

        def destroy(self) -> None:
            self.destroyed = True

        def check_async_error(self) -> None:
            if machine.async_error:
                raise NcclError(machine.async_error)

    def group_start() -> None:
        local.depth = getattr(local, "depth", 0) + 1
        if local.depth == 1:
            local.calls = {}

    def group_end() -> None:
        local.depth -= 1
        if local.depth:
            return
        for (communicator, stream), calls in local.calls.items():
            assert machine.device == communicator.device

            capture = streams[stream].capture
            if capture is not None and capture not in communicator.captures:
                communicator.captures.append(capture)
            number = None if capture is None else communicator.captures.index(capture)

            def make(
                communicator: Any = communicator, calls: Any = tuple(calls), number: int | None = number
            ) -> Unit:
                messages = [
                    (kind, peer, Message(address, nbytes, number)) for kind, peer, address, nbytes in calls
                ]
                return Group(communicator, messages)

            streams[stream].push(make)

    vars(nccl).update(
        available=True,
        NcclCommunicator=NcclCommunicator,
        NcclError=NcclError,
        NCCL_UINT8=1,
        get_unique_id=lambda: next(numbers).to_bytes(128, "big"),
        get_version=lambda: 23003,
        groupStart=group_start,
        groupEnd=group_end,
    )
    return nccl

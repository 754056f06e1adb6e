"""Wait for other ranks with a deadline: a peer that dies or stalls ends the wait with an error.

A waiting rank yields its processor repeatedly, which is fastest with more ranks than processors, and sleeps for short
times after some milliseconds. It polls whether the peer's process exists (``/proc``) and whether a rank has reported a
failure. After the timeout it follows the chain of waiting ranks to the one that waits for no other: that rank stalls.
A thread that the system notifies when a process of the host ends wakes ranks that sleep inside machine code
(`ControlPage.alarm`).
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, Protocol

from collectives.peers.address import process_namespace
from collectives.peers.control_page import (
    CLOSED,
    FAILED,
    PEER,
    ROW,
    WORDS,
    ControlPage,
    HostPlacement,
    RankFailure,
)
from topoplan.errors import BackendError
from topoplan.private_files import process_fields

YIELDS = 16  # yields of the processor between two reads of the clock
YIELDING_SECONDS = 0.005  # seconds of waiting after which a rank sleeps between two polls
LOOK = 0.02  # seconds between two checks of the peer's process
REMOTE_FAILURE_SECONDS = 0.2  # time for others to report why MPI cannot reach a peer


class RemoteFailures(Protocol):
    """Exchange of failure reports with other hosts; `broken` are the errors of a message to an unreachable peer."""

    broken: tuple[type[Exception], ...]

    def received(self) -> RankFailure | None:
        """Return a failure that another host has noticed; also makes messages progress."""

    def spread(self, failure: RankFailure) -> None:
        """Report a failure to all ranks on other hosts, without waiting."""


class PeerWatchdog:
    """Waits on behalf of one rank, at most `timeout` seconds each time; `others` are other hosts."""

    def __init__(
        self,
        control: ControlPage,
        placement: HostPlacement,
        *,
        timeout: float,
        others: RemoteFailures | None = None,
    ) -> None:
        self._broken = () if others is None else others.broken
        self._control = control
        self._words = control.words
        self._placement = placement
        self._others = others
        self._timeout = timeout
        self._place = {rank: place for place, rank in enumerate(placement.members)}
        self._over: Callable[[], object] = lambda: None
        self._births = {rank: _start_time(pid) for rank, pid in enumerate(placement.pids) if pid}

    def see_deaths(self) -> bool:
        """Start a thread that raises the alarm when a process of this host ends; whether the system supports it for
        each.

        The thread sleeps until then, or until `close`.
        """
        pids = {self._placement.pids[rank] for rank in self._place} - {os.getpid()}
        processes: list[int] = []
        try:
            for pid in sorted(pids):
                processes.append(os.pidfd_open(pid))
            reading, writing = os.pipe() if processes else (-1, -1)
        except (AttributeError, OSError):  # unsupported, forbidden, or a process has ended already
            for descriptor in processes:
                os.close(descriptor)
            return False
        if processes:
            arguments = (self._control, processes, reading)
            threading.Thread(
                target=_watch_processes, args=arguments, name="topoplan-deaths", daemon=True
            ).start()
            self._over = weakref.finalize(self, _end_watch, writing, os.getpid())
        return True

    def close(self) -> None:
        """End that thread."""
        self._over()

    @property
    def rank(self) -> int:
        return self._placement.rank

    def word(self, rank: int, name: int, least: int, row: int) -> None:
        """Wait until a word of a rank on this host is at least `least`.

        Raises
        ------
        BackendError
            The rank died, stalled, or closed its communicator, or another one noticed a failure.
        """
        index = self._place[rank] * WORDS + name
        words = self._words
        if words[index] < least:
            self.until(lambda: words[index] >= least, rank, row)
        self._control.fence()

    def until(self, done: Callable[[], bool], peer: int, row: int) -> None:
        """Wait for a condition that depends on a peer; raises as `word`."""
        try:
            self._until(done, peer, row)
        except self._broken as error:
            self.unreachable(peer, row, error)

    def _until(self, done: Callable[[], bool], peer: int, row: int) -> None:
        if _met_while_yielding(done):
            return
        begun = looked = now = time.monotonic()
        self.waits_for(peer, row)
        while not done():
            if now - begun < YIELDING_SECONDS:
                if _met_while_yielding(done):
                    break
            else:
                time.sleep(min(1e-3, (now - begun) / 100))
            now = time.monotonic()
            self.check()
            if now - looked >= LOOK:
                looked = now
                self.look(done, peer, row, begun)
        self.waits_for(None, 0)

    def waits_for(self, peer: int | None, row: int) -> None:
        """Announce the rank and the row that this rank waits for; None if it does not wait."""
        self._control.announce(ROW, row)
        self._control.announce(PEER, 0 if peer is None else peer + 1)

    def look(self, done: Callable[[], bool], peer: int, row: int, begun: float) -> None:
        """Check whether the condition `done` can still come true; raises as `word`.

        It depends on `peer` and is needed for `row`. `begun` is the start of the wait by the monotonic clock.
        """
        self.waits_for(peer, row)
        self.check()
        self._check_peer(peer, row, done)
        if time.monotonic() - begun > self._timeout and not done():
            self._give_up(peer, row)

    def unreachable(self, peer: int, row: int, error: Exception) -> NoReturn:
        """Fail because MPI reports an error about a peer, or because of the failure that made the peer leave."""
        deadline = time.monotonic() + REMOTE_FAILURE_SECONDS
        while time.monotonic() < deadline:
            self.check()
            time.sleep(1e-3)
        self.fail(peer, row, f"MPI cannot reach the peer: {error}; start all ranks again", lost=True)

    def unreadable(self, peer: int, row: int) -> NoReturn:
        """Fail because the memory of a peer cannot be read; in most cases the peer is about to end."""
        begun = time.monotonic()
        while time.monotonic() < begun + REMOTE_FAILURE_SECONDS:
            self.look(lambda: False, peer, row, begun)
            time.sleep(LOOK)
        text = "the peer's input cannot be read; keep it unchanged until the collective has ended"
        self.fail(peer, row, text, lost=False)

    def check(self) -> None:
        """Raise `BackendError` if a rank has noticed a failure."""
        notice = self._others.received() if self._others is not None else None
        if notice is not None:
            self._control.write_failure(notice)
        if any(self._control.word(place, FAILED) for place in range(self._control.ranks)):
            failure = self._control.failure()
            assert failure is not None, "its word says that it is there"
            raise failure.error(self._placement.rank)

    def fail(self, peer: int, row: int, text: str, *, lost: bool) -> NoReturn:
        """Report a failure to all ranks and raise `BackendError`."""
        failure = self.tell(peer, row, text, lost=lost)
        raise (self._control.failure() or failure).error(self._placement.rank)

    def tell(self, peer: int, row: int, text: str, *, lost: bool) -> RankFailure:
        """Report a failure to all ranks."""
        failure = RankFailure(self._placement.rank, peer, row, text, lost, time.monotonic_ns())
        self._control.write_failure(failure)
        if self._others is not None:
            self._others.spread(failure)
        return failure

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Report an error of this rank inside the block to all ranks, which would wait for it."""
        try:
            yield
        except BaseException as error:
            self.stops(error)
            raise

    def stops(self, error: BaseException) -> None:
        """Report an error of this rank to all ranks, unless they know it."""
        if not isinstance(error, BackendError):
            text = f"the peer stopped by itself: {type(error).__name__}: {error}"
            self.tell(self.rank, 0, text, lost=False)

    def _give_up(self, peer: int, row: int) -> NoReturn:
        culprit = self._stalled_rank(peer)
        stopped = culprit in self._births and process_state(self._placement.pids[culprit]) in "Tt"
        state = "is stopped (SIGSTOP or a debugger)" if stopped else "makes no progress"
        self.fail(
            culprit,
            row,
            f"the peer {state}: no answer in {self._timeout:g} s; "
            "check what it does and whether it had fewer batches, or give the communicator a longer timeout",
            lost=True,
        )

    def _stalled_rank(self, peer: int) -> int:
        """Return the rank at the end of the chain of waiting ranks; a stopped process takes precedence."""
        for rank in self._births:
            if process_state(self._placement.pids[rank]) in "TtZX":
                return rank
        seen = {self._placement.rank}
        while peer in self._place and peer not in seen:
            seen.add(peer)
            next_peer = self._control.word(self._place[peer], PEER) - 1
            if next_peer < 0 or next_peer in seen:
                break
            peer = next_peer
        return peer

    def _check_peer(self, peer: int, row: int, done: Callable[[], bool]) -> None:
        """Fail if a peer has ended without meeting the condition, as far as this rank can see."""
        pid = self._placement.pids[peer]
        if pid and (_start_time(pid) != self._births[peer] or process_state(pid) in "ZX") and not done():
            text = (
                f"the peer died: its process {pid} has ended. Restart all ranks from a checkpoint, or continue without "
                "it: fault_tolerance=Shrink() in training, on_failure='shrink' of a Communicator (CPU only). If it was "
                "done before this rank, give all ranks as many batches, or train inside join"
            )
            self.fail(peer, row, text, lost=True)
        if peer in self._place and self._control.word(self._place[peer], CLOSED) and not done():
            text = (
                "the peer has closed its communicator; make the same calls on all ranks, in training with as many "
                "batches on each, or inside join"
            )
            self.fail(peer, row, text, lost=False)


def _end_watch(writing: int, process: int) -> None:
    """End the thread of `_watch_processes`, in the process that started it."""
    if os.getpid() == process:
        os.write(writing, b".")
        os.close(writing)


def _watch_processes(control: ControlPage, processes: list[int], reading: int) -> None:
    """Raise the alarm whenever a process ends, until ``reading`` is readable; closes all descriptors."""
    waiting = select.poll()
    for descriptor in (reading, *processes):
        waiting.register(descriptor, select.POLLIN)
    over = False
    while not over:
        for descriptor, _ in waiting.poll():
            over |= descriptor == reading
            waiting.unregister(descriptor)
            control.alarm()
    for descriptor in (reading, *processes):
        os.close(descriptor)


def _met_while_yielding(done: Callable[[], bool]) -> bool:
    """Return whether a condition came true within a few yields of the processor."""
    for _ in range(YIELDS):
        if done():
            return True
        os.sched_yield()
    return False


def process_state(pid: int) -> str:
    """Return a process's state: R, S or D run or sleep, T is stopped, Z has ended, X is unknown here."""
    return (process_fields(pid) or ["X"])[0]


def is_stopped(processes: str, pid: int) -> bool:
    """Return whether a process is stopped or has ended; ``processes`` is its `process_namespace`."""
    return process_state(pid) in "TtZX" and processes == process_namespace()


def _start_time(pid: int) -> str:
    """Return the start time of a process in ticks since boot: process numbers are used again."""
    fields = process_fields(pid)
    return fields[19] if fields else ""

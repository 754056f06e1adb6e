"""Hold the NCCL communicator of a rank: made together with all other ranks, aborted or abandoned alone.

NCCL forbids aborting a communicator beside a running call on it. All calls pass here, one at a time, and an abort
waits for the running one; if the library's calls can wait for other ranks (`NcclLibrary.waits`) the abort proceeds
after `BLOCKED_CALL_SECONDS`, since nothing else would end such a call. If they cannot, every group costs NCCL a
thread of its own, and a query until it is queued; replayed graphs do not.

Kernels and calls that wait for a peer wait without end; only an abort releases them. A thread (`CollectiveGuard`)
watches every collective and aborts when a rank reports a failure, when NCCL reports an error, or when no step has
ended within the timeout. If ranks may recover (`NcclConnection.keeps`), the communicator is revoked instead, if NCCL
can: its waits end too, and it stays. The survivors then shrink it, once: NCCL takes a second
attempt for the first one. Without that they rendezvous by a new id, as at the start.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from collectives.backends.nccl.nccl_library import (
    NcclCommunicator,
    NcclFailed,
    NcclLibrary,
    describe_library,
    find_library,
)
from collectives.peers.control_plane import ControlPlane, Waiting, waits_for_no_peer
from collectives.tables.cupy_arrays import may_query, use_device
from topoplan.errors import BackendError
from topoplan.units import format_size

BLOCKED_CALL_SECONDS = 1.0
"""Seconds that aborting waits for a running call."""

ABORT_SECONDS, DESTROY_SECONDS = 2.0, 5.0
"""Time for NCCL to abort or destroy the communicator before a rank continues."""

NCCL_POLL_SECONDS = 0.01

WATCH_SECONDS = 0.02
"""Seconds between two looks at a running collective."""

THREAD_END_SECONDS = 5.0
"""Time for the thread to end."""

SHARED_MEMORY, ENOUGH_SHARED = "/dev/shm", 512 << 20
"""The folder of NCCL's segments for ranks of a host, and bytes there that suffice for eight ranks."""

Place = Callable[[], tuple[int | None, int | None]]
"""Return the peer and the row of the table that a rank waits for."""

SPINS = 200
"""Looks of `NcclConnection.settle` before it sleeps in between."""


def prepare_library(ranks_per_gpu: int) -> NcclLibrary:
    """Load NCCL after setting the variables that it reads at its first use; values that are set already stay."""
    if ranks_per_gpu > 1:
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        os.environ.setdefault("NCCL_MAX_CTAS", str(max(1, 8 // ranks_per_gpu)))
    return find_library(ranks_per_gpu=ranks_per_gpu)


def short_of_shared_memory() -> str:
    """Return a remark on ``/dev/shm`` for a failure of NCCL's start; empty if enough of it is free.

    Containers have 64 MB there by default, and NCCL's error does not name it.
    """
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return ""
    free, size = found.f_frsize * found.f_bavail, found.f_frsize * found.f_blocks
    if free >= ENOUGH_SHARED:
        return ""
    return (
        f"; {SHARED_MEMORY} has {format_size(free)} free of {format_size(size)}, which can be too little for NCCL "
        "(docker run --shm-size=1g)"
    )


@dataclass(slots=True, eq=False)
class ParentCommunicator:
    """An idle communicator that its survivors may shrink.

    `name` is the same on all of its ranks, and unique among communicators. `used`: it has been shrunk or aborted.
    """

    link: NcclCommunicator
    name: str
    rank: int
    size: int
    used: bool = False
    _aborting: threading.Lock = field(default_factory=threading.Lock)
    _aborted: bool = False

    def abort(self) -> None:
        """Abort it, from any thread; a second call waits for the first."""
        with self._aborting, suppress(NcclFailed):
            first, self._aborted, self.used = not self._aborted, True, True
            if first:
                self.link.abort()


class NcclConnection:
    """The communicator of a rank, and the lock of its calls.

    `timeout` is in seconds, for the other ranks. The communicator may be made from `parent`, which is aborted when this
    one is ready, or aborted. `keeps`: it is to stay, if NCCL can, when it would be aborted; it is `parent` then.
    `shrunk`: it was made from another one.
    """

    def __init__(
        self,
        library: NcclLibrary,
        cupy: ModuleType,
        world: ControlPlane,
        *,
        device: int,
        timeout: float,
        parent: ParentCommunicator | None = None,
    ) -> None:
        self.keeps = self.shrunk = False
        self.parent = parent
        self._name = ""
        self._library = library
        self._cupy: Any = cupy
        self._world = world
        self._device = device
        self._timeout = timeout
        self._link: NcclCommunicator | None = None
        self._calls = threading.Lock()
        self._ended = False
        self._gone = threading.Event()

    @property
    def link(self) -> NcclCommunicator:
        """Return the communicator that `connect` has made."""
        assert self._link is not None, "connected first"
        return self._link

    @contextmanager
    def group(self) -> Iterator[None]:
        """Group the messages inside; raise `NcclFailed` if the communicator is being aborted, or NCCL refuses."""
        with self.call(), self._library.group():
            yield

    @contextmanager
    def call(self) -> Iterator[None]:
        """Lock the communicator for the calls inside; raises as `group`."""
        with self._calls:
            self._check()
            yield

    def settle(self, check: Callable[[], None]) -> None:
        """Wait until what was begun is queued on its stream; `check` is called meanwhile, and may raise."""
        spins = 0
        while not self._library.waits:
            with self._calls:
                self._check()
                if self.link.ready():
                    return
            try:
                check()
            except BaseException:
                self._wait_briefly()
                raise
            spins += 1
            time.sleep(0 if spins < SPINS else 1e-4)

    def _wait_briefly(self) -> None:
        """Give NCCL's own thread time to queue what was begun: a capture must not end before."""
        end = time.monotonic() + BLOCKED_CALL_SECONDS
        with suppress(NcclFailed):
            while time.monotonic() < end:
                with self._calls:
                    if self._ended or self.link.ready():
                        return
                time.sleep(1e-3)

    def error(self) -> str | None:
        """Return NCCL's own error in the background; it is not asked while a call runs."""
        if not self._calls.acquire(blocking=False):
            return None
        try:
            if not self._ended:
                self.link.ready()
        except Exception as error:  # of any kind: the guard's thread must live on
            return str(error) or type(error).__name__
        finally:
            self._calls.release()
        return None

    def abort(self, *, idle: bool = False) -> None:
        """Begin to abort, from any thread, without waiting; `idle` says that nothing is under way."""
        self._leave(lambda link: None if self._keep_as_parent(link, idle) else self._drop(link))

    def abort_parent(self) -> None:
        """Abort the parent; wait `ABORT_SECONDS` at most."""
        parent, self.parent = self.parent, None
        if parent is not None:
            parent.used = True
            self._apart(parent.abort).join(ABORT_SECONDS)

    def destroy(self) -> None:
        """Begin to destroy the communicator; that waits for what other ranks still do, and they may be dead."""
        self._leave(lambda link: link.destroy())

    def wait_ended(self, seconds: float) -> bool:
        """Wait up to `seconds` for what `abort` or `destroy` has begun; return whether it has ended."""
        return not self._ended or self._gone.wait(seconds)

    def _leave(self, how: Callable[[NcclCommunicator], object]) -> None:
        if self._ended:
            return  # it is being left already
        self._ended = True

        def leave() -> None:
            if self._calls.acquire(timeout=BLOCKED_CALL_SECONDS):
                self._calls.release()  # later calls see that it has ended
            try:
                if self._link is not None:
                    how(self._link)
            finally:
                self._gone.set()

        self._apart(leave)

    def _apart(self, leave: Callable[[], object]) -> threading.Thread:
        """Run `leave` in a thread of its own."""

        def run() -> None:
            # the reason is reported already; a communicator that cannot be freed has no further effect
            with suppress(Exception):
                use_device(self._cupy, self._device)
            with suppress(Exception):
                leave()

        thread = threading.Thread(target=run, name="nccl shutdown", daemon=True)
        thread.start()
        return thread

    def _drop(self, link: NcclCommunicator) -> None:
        """Abort a communicator, and before it the one it is being made from, with which NCCL would continue."""
        if self.parent is not None:
            self.parent.abort()
        link.abort()

    def _keep_as_parent(self, link: NcclCommunicator, idle: bool) -> bool:
        """Keep an idle communicator as `parent` if that is wanted and possible; return whether it stays."""
        if not self.keeps or not (self._library.shrinks if idle else self._library.revokes):
            return False
        if not idle:
            end = time.monotonic() + BLOCKED_CALL_SECONDS
            try:
                link.revoke()
                while not link.ready():
                    if time.monotonic() > end:
                        return False
                    time.sleep(NCCL_POLL_SECONDS)
            except NcclFailed:
                return False
        self.parent = ParentCommunicator(link, self._name, self._world.rank, self._world.size)
        return True

    def join(self, begin: Callable[[], NcclCommunicator]) -> NcclCommunicator:
        """Make the communicator with all ranks that begin the same; wait for them until it is aborted.

        The rank's GPU becomes current in the calling thread. Raises `NcclFailed` if NCCL refuses.
        """
        use_device(self._cupy, self._device)
        link = begin()
        with self._calls:
            late = self._ended
            # so that it can be aborted while it still looks for the others
            self._link = link
        if late:
            self._drop(link)
        while not self._ready(link):
            time.sleep(NCCL_POLL_SECONDS)
        return link

    def _check(self) -> None:
        if self._ended:
            raise NcclFailed("the communicator was aborted")

    def connect(self) -> None:
        """Make the communicator in a thread, since NCCL may wait for all ranks without end; all ranks call this."""
        begin = self._beginning()
        failure: list[BaseException] = []

        def join() -> None:
            try:
                self.join(begin)
            except Exception as error:  # of any kind: nothing else reports it from this thread
                failure.append(error)

        thread = threading.Thread(target=join, name="nccl connect", daemon=True)
        thread.start()
        deadline = time.monotonic() + self._timeout
        while thread.is_alive():
            thread.join(NCCL_POLL_SECONDS)
            trouble = self._world.trouble()
            if trouble is None and time.monotonic() > deadline:
                trouble = self._reported(
                    f"found no other ranks for {self._timeout:g} s; NCCL_DEBUG=INFO tells more"
                    f"{short_of_shared_memory()}"
                )
            if trouble is not None:
                raise trouble
        if failure:
            words = f"{type(failure[0]).__name__}: " if not isinstance(failure[0], NcclFailed) else ""
            raise self._reported(
                f"refuses: {words}{failure[0]}; NCCL_DEBUG=WARN tells why{short_of_shared_memory()}"
            )
        self.abort_parent()

    def _beginning(self) -> Callable[[], NcclCommunicator]:
        """Return how the communicator begins, the same on all ranks: by a shrink of the parent, or by a new id."""
        world, parent = self._world, self.parent
        stays = parent is not None and not parent.used
        mine = {
            # NCCL keeps a thread for each id until all ranks have come
            "id": "" if world.rank or stays else self._library.unique_id().hex(),
            "parent": [parent.name, parent.rank] if parent is not None and stays else None,
        }
        texts = world.gather(json.dumps(mine).encode(), timeout=self._timeout)
        self._name = hashlib.sha256(b"".join(texts)).hexdigest()[:16]
        offers = [json.loads(one) for one in texts]
        if parent is not None and self._library.shrinks and all(one["parent"] for one in offers):
            names, places = zip(*(one["parent"] for one in offers), strict=True)
            without = sorted({*range(parent.size)} - {*places})
            if len({*names}) == 1 and without and list(places) == sorted(places):
                parent.used = self.shrunk = True
                return lambda: parent.link.shrink(without)
        unique_id = bytes.fromhex(offers[0]["id"])
        if not unique_id:
            made = b"" if world.rank else self._library.unique_id()
            unique_id = world.gather(made, timeout=self._timeout)[0]
        return lambda: self._library.connect(world.size, world.rank, unique_id)

    def _ready(self, link: NcclCommunicator) -> bool:
        """Return whether the communicator is ready or aborted."""
        with self._calls:
            return self._ended or link.ready()

    def _reported(self, what: str) -> BackendError:
        """Return a failure of NCCL after reporting it to all ranks."""
        error = BackendError(f"NCCL {what} ({describe_library(self._library)})", rank=self._world.rank)
        self._world.tell(error)
        return self._world.trouble() or error


@dataclass(slots=True, eq=False)
class _Watch:
    """Collectives under way: what tells their progress, since when that is the same, and what it was then.

    `over` returns whether they have ended; the guard calls it at each look.
    """

    progress: Callable[[], int]
    since: float
    last: int | None = None
    over: Callable[[], bool] = lambda: False


class CollectiveGuard:
    """Watch collectives, and abort the communicator if no step ends within `timeout` seconds.

    `error` is the reason of the abort, or None. `on_stop` is called before it. The thread looks every `WATCH_SECONDS`,
    so that short collectives do not wake it.
    """

    def __init__(self, world: ControlPlane, connection: NcclConnection, *, timeout: float) -> None:
        self.error: BackendError | None = None
        self.on_stop: Callable[[], None] = lambda: None
        self._world = world
        self._connection = connection
        self._timeout = timeout
        self._watch: _Watch | None = None
        self._idle = False
        """Whether the thread waits for a collective to begin."""
        self._changed = threading.Condition()
        self._closed = False
        self._aborted = False
        self._thread = threading.Thread(target=self._work, name="nccl guard", daemon=True)
        self._thread.start()

    @contextmanager
    def watch(self, progress: Callable[[], int], place: Place) -> Iterator[None]:
        """Watch what runs inside; `progress` returns a number that changes whenever a step has ended."""
        with self._changed:
            self._begin(_Watch(progress, time.monotonic()), place)
        try:
            yield
        finally:
            self._end()

    def attend(self, progress: Callable[[], int], place: Place, over: Callable[[], bool]) -> None:
        """Watch what is queued as `watch`, until `over` returns true; nothing if something is watched already."""
        with self._changed:
            if self._watch is None:
                self._begin(_Watch(progress, time.monotonic(), over=over), place)

    def _begin(self, watch: _Watch, place: Place) -> None:
        self._watch = watch
        self._world.waiting = lambda: Waiting(*place(), time.monotonic() - watch.since)
        if self._idle:
            self._changed.notify_all()

    def _end(self) -> None:
        self._watch = None
        self._world.waiting = waits_for_no_peer

    def check(self) -> None:
        """Raise `error`, if there is one."""
        if self.error is not None:
            raise self.error

    def stop(self, error: BackendError) -> None:
        """Begin to abort the communicator, from any thread; the first error stays."""
        with self._changed:
            self.error = self.error or error
            first, self._aborted = not self._aborted, True
        if first:
            self.on_stop()
            self._connection.abort()

    def close(self) -> None:
        """End the thread; a second call does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(THREAD_END_SECONDS)

    def _work(self) -> None:
        with may_query():
            self._look_on()

    def _look_on(self) -> None:
        while True:
            with self._changed:
                if self._watch is None:
                    self._idle = True  # before the look: a collective that begins now sees it, or is seen
                    self._changed.wait_for(lambda: self._closed or self._watch is not None)
                    self._idle = False
                self._changed.wait_for(lambda: self._closed, WATCH_SECONDS)
                if self._closed:
                    return
            watch = self._watch
            if watch is not None and self.error is None:
                self._look(watch)

    def _look(self, watch: _Watch) -> None:
        """Look at a collective, and end it if it has failed."""
        if watch.over():  # without the lock, since it may compare texts
            with self._changed:
                if self._watch is watch and watch.over():  # nothing was queued meanwhile
                    self._end()
            return
        progress = watch.progress()
        error = self._world.trouble() or self._own_error()
        if error is None and progress != watch.last:
            watch.since, watch.last = time.monotonic(), progress
        elif error is None and time.monotonic() - watch.since > self._timeout:
            self._world.stalled(self._timeout)
            error = self._world.trouble()
            # another rank still moves: look again a quarter of the timeout later
            watch.since = max(watch.since, time.monotonic() - 0.75 * self._timeout)
        if error is not None:
            self.stop(error)

    def _own_error(self) -> BackendError | None:
        """Return and report NCCL's own error."""
        met = self._connection.error()
        if met is None:
            return None
        wait = self._world.waiting()
        error = BackendError(
            f"NCCL reports {met}; NCCL_DEBUG=WARN tells more",
            rank=self._world.rank,
            peer=wait.peer,
            step=wait.step,
        )
        self._world.tell(error)
        return self._world.trouble() or error

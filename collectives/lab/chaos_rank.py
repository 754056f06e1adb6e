"""Run a rank under faults: collectives, each checked and reported, until all ranks agree to end.

A rank reports to its controller over a Unix socket, in lines of JSON: its identity, the end of each collective, and at
last its leaked resources. The controller asks it to end there; a closed socket ends it at once.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.backends.backend import Backend
from collectives.backends.mpi.mpi_backend import MpiBackend
from collectives.backends.open_backend import JOINED
from collectives.backends.shared.compiled_program import compile_ahead
from collectives.backends.shared.shared_backend import SharedBackend
from collectives.backends.tcp.compiled_exchange import compile_ahead as compile_loops_ahead
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.communicator.communicator import Communicator
from collectives.communicator.handle import Handle
from collectives.lab.chaos_draws import (
    BORDER,
    REPLICATED,
    RandomCollective,
    draw_round,
    make_input,
    wrong_elements,
)
from topoplan.errors import BackendError, TopoplanError, UsageError
from topoplan.plans.size_plans import parse_plan_file

START_SECONDS = 120.0
"""In which all ranks meet."""

METHODS = {
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "reduce": "reduce",
}

MPI_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
"""Where launchers of MPI tell a process its rank."""

UNWRITTEN = 119
"""What stands in an array before a result does: no result is made of it alone."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What a rank is told.

    Parameters
    ----------
    plan : str
        As a file.
    backend : str
        shared, tcp or mpi.
    seed : int
    timeout : float
        Of the ranks, in seconds.
    largest : int
        Bytes of what a rank gives at most.
    chunk : int or None
        As `Communicator` takes it.
    invitation : str
        With which this rank comes where the others work already; else empty.
    folder : str
        Where the ranks meet, and where this one writes its stacks when it is asked to (SIGUSR1).
    """

    plan: str
    backend: str
    seed: int
    timeout: float
    largest: int
    chunk: int | None
    folder: str
    invitation: str = ""


class ControllerGone(Exception):
    """The other end of the socket is gone."""


class ControllerChannel:
    """What a rank says and hears.

    Parameters
    ----------
    address : str
        Of the socket.
    """

    def __init__(self, address: str, rank: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(address)
            self.say({"rank": rank, "pid": os.getpid()})
            heard = self._socket.makefile().readline()
        except OSError as error:
            raise ControllerGone from error
        if not heard:
            raise ControllerGone
        self.about = RankSettings(**json.loads(heard))

    def say(self, what: dict[str, object]) -> None:
        """Say something."""
        try:
            self._socket.sendall(json.dumps(what).encode() + b"\n")
        except OSError as error:
            raise ControllerGone from error

    def asked_to_end(self) -> bool:
        """Whether this rank was asked to end."""
        try:
            data = self._socket.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ControllerGone from error
        if not data:
            raise ControllerGone
        return True


def warm_up() -> None:
    """Compile, or load, what ranks need that are forked off here."""
    compile_loops_ahead()
    compile_ahead()


def run_rank(address: str, rank: int) -> int:
    """Live until all ranks end, or this one is told that it is out; the exit status.

    Parameters
    ----------
    address : str
        Of the Unix socket of who started it.
    rank : int
        Its place in the first plan.
    """
    try:
        teller = ControllerChannel(address, rank)
        with open(f"{teller.about.folder}/stacks-{rank}-{os.getpid()}", "w") as stacks:
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
            try:
                return _run_until_end(teller, rank)
            finally:
                faulthandler.unregister(signal.SIGUSR1)
    except ControllerGone:
        return 1


def _run_until_end(teller: ControllerChannel, rank: int) -> int:
    before = set(os.listdir("/proc/self/fd"))
    try:
        comm = _open_communicator(teller.about, rank)
    except UsageError as error:
        teller.say({"unable": str(error)})
        return 1
    except TopoplanError as error:
        teller.say({"error": str(error)})
        return 1
    status = 0
    try:
        _RankLoop(teller, comm, rank).go()
    except BackendError as error:
        teller.say({"error": str(error)})
        status = 1
    comm.close()
    del comm
    # MPI keeps what it has opened until the process ends, as what is kept for its end
    teller.say({"left": _leaked_resources(None if teller.about.backend == "mpi" else before)})
    return status


def _open_communicator(about: RankSettings, rank: int) -> Communicator:
    if about.invitation:
        return Communicator.join(about.invitation, seat=rank, wait=START_SECONDS)
    plan = parse_plan_file(about.plan)
    backend = backend_at(
        about.backend, rank, len(plan.ranks), meeting=f"unix:{about.folder}/meeting", timeout=about.timeout
    )
    try:
        return Communicator(
            plan, backend, chunk_bytes=about.chunk, timeout=about.timeout, on_failure="shrink"
        )
    except BaseException:
        backend.close()
        raise


def backend_at(name: str, rank: int, size: int, *, meeting: str, timeout: float) -> Backend[Any]:
    """The back end of a rank of this host, whose ranks meet at an address; those of mpi where mpiexec says."""
    if name == "mpi":
        return MpiBackend(timeout=timeout)
    if name == "tcp":
        return TcpBackend(rank, size, rendezvous=meeting, timeout=timeout, meeting_timeout=START_SECONDS)
    return SharedBackend.met_at(meeting, rank, size, timeout=timeout, meeting_timeout=START_SECONDS)


class _RankLoop:
    """A rank among others."""

    def __init__(self, teller: ControllerChannel, comm: Communicator, rank: int) -> None:
        self._teller, self._comm, self._rank = teller, comm, rank
        self._about = teller.about
        self._names = {name: place for place, name in enumerate(parse_plan_file(teller.about.plan).ranks)}
        self._own = comm.plan.collective
        self._round = 1
        self._invitation = ""
        self._lets_in = comm.backend in JOINED

    def go(self) -> None:
        """Rounds until all ranks agree to end."""
        if self._about.invitation:
            self._meet_others()
        self._invite()
        while True:
            if self._round % BORDER == 0:
                if self._all_end():
                    return
                if self._lets_in:
                    self._comm.grow()  # a rank that dies as it comes is there for some, so all of them meet
                    self._meet_others()
                self._invite()
            elif not self._work():
                continue  # it was refused, and is drawn anew
            self._round += 1

    @property
    def _there(self) -> list[int]:
        """The ranks that are there, by their places in the first plan."""
        return [self._names[name] for name in self._comm.plan.ranks]

    def _meet_others(self) -> None:
        """Begin the round that is next, as one that has come, or as one of the others."""
        self._round = int(self._comm.all_reduce(np.array([self._round]), op="max")[0])
        if self._about.invitation and not self._invitation:
            self._round += 1

    def _invite(self) -> None:
        """Tell how another process can come, where that is new."""
        if self._lets_in and self._invitation != self._comm.invitation:
            self._invitation = self._comm.invitation
            self._teller.say({"invitation": self._invitation})

    def _all_end(self) -> bool:
        """Whether some rank was asked to end; all hear the same."""
        asked = np.array([self._teller.asked_to_end()], dtype=np.int32)
        began = time.monotonic()
        handle = self._comm.all_reduce(asked, op="max", async_op=True)
        found = handle.wait()
        self._tell(
            RandomCollective("allreduce", 1, "int32", "max"), 0, handle, began, {"digest": int(found[0])}
        )
        return bool(found[0])

    def _work(self) -> bool:
        """The collectives of a round; whether they have ended well."""
        about, there = self._about, self._there
        pieces = draw_round(
            about.seed,
            self._round,
            there,
            ranks=len(self._names),
            own=self._own,
            largest=about.largest,
        )
        arrays = [self._given(piece) for piece in pieces]
        outs = [self._out(piece, array, len(there)) for piece, array in zip(pieces, arrays, strict=True)]
        begun: list[tuple[Handle[Any], float]] = []
        for piece, array, out in zip(pieces, arrays, outs, strict=True):
            began = time.monotonic()
            begun.append((self._begun(piece, array, out), began))
        for number, (piece, (handle, began)) in enumerate(zip(pieces, begun, strict=True)):
            array, out = arrays[number], outs[number]
            try:
                found = handle.wait()
            except BackendError:
                # of several at once none can be refused; where nobody is lost it is no refusal
                if len(pieces) > 1 or self._there == there:
                    raise
                wrong = self._changed(piece, array)
                if out is not None and out is not array:
                    wrong += int(np.count_nonzero(out != UNWRITTEN))
                self._tell(piece, number, handle, began, {"refused": True, "wrong": wrong})
                return False
            ended, part = time.monotonic(), list(handle.among)
            wrong = self._wrong(piece, found, part)
            if array is not out:
                wrong += self._changed(piece, array)
            digest = 0 if found is None or piece.kind not in REPLICATED else zlib.crc32(found.view(np.uint8))
            self._tell(
                piece,
                number,
                handle,
                began,
                {"wrong": wrong, "part": part, "digest": digest, "ended": ended},
            )
        return True

    def _given(self, piece: RandomCollective) -> NDArray[Any]:
        """What this rank puts in; of every third round where the others see it, if memory can be shared."""
        values = make_input(piece, self._about.seed, self._round, self._rank)
        if self._round % 3:
            return values
        seen: NDArray[Any] = self._comm.empty(values.shape, piece.dtype)
        seen[:] = values
        return seen

    def _out(self, piece: RandomCollective, array: NDArray[Any], size: int) -> NDArray[Any] | None:
        if piece.place == "in place":
            return array
        if piece.place == "new" or (piece.kind == "reduce" and piece.root != self._rank):
            return None
        count = piece.count * size if piece.kind == "allgather" else piece.count
        return np.full(count, UNWRITTEN, dtype=piece.dtype)

    def _begun(self, piece: RandomCollective, array: NDArray[Any], out: NDArray[Any] | None) -> Handle[Any]:
        options: dict[str, Any] = {"out": out} if out is not None else {}
        if piece.kind in ("allreduce", "reduce_scatter", "reduce"):
            options["op"] = piece.op
        if piece.root >= 0:
            options["root"] = self._there.index(piece.root)
        handle: Handle[Any] = getattr(self._comm, METHODS[piece.kind])(array, async_op=True, **options)
        return handle

    def _wrong(self, piece: RandomCollective, found: NDArray[Any] | None, part: list[int]) -> int:
        if self._rank not in part:
            return piece.count or 1
        return wrong_elements(piece, found, self._about.seed, self._round, part, self._rank)

    def _changed(self, piece: RandomCollective, array: NDArray[Any]) -> int:
        """Elements of an input that are not what they were."""
        return int(np.count_nonzero(array != make_input(piece, self._about.seed, self._round, self._rank)))

    def _tell(
        self, piece: RandomCollective, number: int, handle: Handle[Any], began: float, more: dict[str, object]
    ) -> None:
        comm = self._comm
        self._teller.say(
            {
                "round": self._round,
                "piece": number,
                "kind": piece.kind,
                "nbytes": piece.nbytes,
                "began": began,
                "ended": time.monotonic(),
                "there": self._there,
                "repeated": handle.repeated,
                "refused": False,
                "wrong": 0,
                "part": [],
                "digest": 0,
                "rate": comm.plan.at(piece.nbytes).rate if piece.probe else 0.0,
                **more,
            }
        )


def _leaked_resources(before: set[str] | None) -> list[str]:
    """What a rank that has closed its communicator still holds: threads, and descriptors beyond these, if given."""
    over = time.monotonic() + 2
    while threading.active_count() > 1 and time.monotonic() < over:
        time.sleep(0.005)
    gc.collect()
    left = [f"thread {one.name}" for one in threading.enumerate() if one is not threading.main_thread()]
    for name in sorted(set(os.listdir("/proc/self/fd")) - before) if before is not None else ():
        try:
            left.append(f"descriptor of {os.readlink(f'/proc/self/fd/{name}')}")
        except OSError:  # that of the listing
            continue
    return left


if __name__ == "__main__":  # a rank of MPI
    sys.exit(
        run_rank(
            sys.argv[1], int(next(os.environ[name] for name in MPI_RANK_VARIABLES if name in os.environ))
        )
    )

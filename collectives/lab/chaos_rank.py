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
from collectives.backends.open_backend import BACKENDS
from collectives.backends.shared.compiled_program import compile_ahead
from collectives.backends.shared.shared_backend import SharedBackend
from collectives.backends.tcp.compiled_exchange import compile_ahead as compile_loops_ahead
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.communicator.communicator import Communicator
from collectives.communicator.handle import Handle
from collectives.lab.benchmark import METHODS
from collectives.lab.chaos_draws import (
    BORDER,
    REPLICATED,
    SUMMING,
    RandomCollective,
    draw_round,
    make_input,
    wrong_elements,
)
from topoplan.cli.output import MPI_RANK_VARIABLES
from topoplan.errors import BackendError, TopoplanError, UsageError
from topoplan.plans.size_plans import parse_plan_file

START_SECONDS = 120.0
"""Timeout of the rendezvous."""

UNWRITTEN = 119
"""Contents of an output array before a result is written; no result consists of it."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Settings that the controller sends to a rank.

    ``plan`` is the text of a plan file, ``backend`` shared, tcp or mpi, ``timeout`` in seconds, ``largest`` the most
    bytes of an input. A joining rank gets an ``invitation``, others an empty one. ``folder`` holds the rendezvous, and
    the stacks that a rank writes on SIGUSR1.
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
    """The controller has closed the socket."""


class ControllerChannel:
    """The connection of a rank to its controller, at the address of a Unix socket."""

    def __init__(self, address: str, rank: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(address)
            self.send({"rank": rank, "pid": os.getpid()})
            heard = self._socket.makefile().readline()
        except OSError as error:
            raise ControllerGone from error
        if not heard:
            raise ControllerGone
        self.settings = RankSettings(**json.loads(heard))

    def send(self, message: dict[str, object]) -> None:
        """Send one message."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ControllerGone from error

    def asked_to_end(self) -> bool:
        """Return whether the controller asked this rank to end."""
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
    """Compile or load the loops of ranks that are forked from this process."""
    compile_loops_ahead()
    compile_ahead()


def run_rank(address: str, rank: int) -> int:
    """Run an original rank until all ranks end, or it is excluded; return the exit status.

    ``address`` is that of the controller's Unix socket.
    """
    try:
        channel = ControllerChannel(address, rank)
        with open(f"{channel.settings.folder}/stacks-{rank}-{os.getpid()}", "w") as stacks:
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
            try:
                return _run_until_end(channel, rank)
            finally:
                faulthandler.unregister(signal.SIGUSR1)
    except ControllerGone:
        return 1


def _run_until_end(channel: ControllerChannel, rank: int) -> int:
    before = set(os.listdir("/proc/self/fd"))
    try:
        comm = _open_communicator(channel.settings, rank)
    except UsageError as error:
        channel.send({"unable": str(error)})
        return 1
    except TopoplanError as error:
        channel.send({"error": str(error)})
        return 1
    status = 0
    try:
        _RankLoop(channel, comm, rank).run()
    except BackendError as error:
        channel.send({"error": str(error)})
        status = 1
    comm.close()
    del comm
    # MPI keeps its descriptors until the process ends.
    channel.send({"left": _leaked_resources(None if channel.settings.backend == "mpi" else before)})
    return status


def _open_communicator(settings: RankSettings, rank: int) -> Communicator:
    if settings.invitation:
        return Communicator.join(settings.invitation, original_rank=rank, wait=START_SECONDS)
    plan = parse_plan_file(settings.plan)
    backend = backend_at(
        settings.backend,
        rank,
        len(plan.ranks),
        meeting=f"unix:{settings.folder}/meeting",
        timeout=settings.timeout,
    )
    try:
        return Communicator(
            plan, backend, chunk_bytes=settings.chunk, timeout=settings.timeout, on_failure="shrink"
        )
    except BaseException:
        backend.close()
        raise


def backend_at(name: str, rank: int, size: int, *, meeting: str, timeout: float) -> Backend[Any]:
    """Return the back end of a rank on this host: with mpi that of mpiexec, else with a rendezvous at an address."""
    if name == "mpi":
        return MpiBackend(timeout=timeout)
    if name == "tcp":
        return TcpBackend(rank, size, rendezvous=meeting, timeout=timeout, meeting_timeout=START_SECONDS)
    return SharedBackend.met_at(meeting, rank, size, timeout=timeout, meeting_timeout=START_SECONDS)


class _RankLoop:
    """The rounds of a rank."""

    def __init__(self, channel: ControllerChannel, comm: Communicator, rank: int) -> None:
        self._channel, self._comm, self._rank = channel, comm, rank
        self._settings = channel.settings
        self._original = {
            name: place for place, name in enumerate(parse_plan_file(channel.settings.plan).ranks)
        }
        self._own = comm.plan.collective
        self._round = 1
        self._invitation = ""
        self._can_grow = BACKENDS[comm.backend].join is not None

    def run(self) -> None:
        """Run rounds until all ranks agree to end."""
        if self._settings.invitation:
            self._agree_on_round()
        self._invite()
        while True:
            if self._round % BORDER == 0:
                if self._all_end():
                    return
                if self._can_grow:
                    self._comm.grow()  # a joining rank may die when only some ranks have it, so all agree anew
                    self._agree_on_round()
                self._invite()
            elif not self._run_round():
                continue  # refused: the round is drawn again
            self._round += 1

    @property
    def _present(self) -> list[int]:
        return [self._original[name] for name in self._comm.plan.ranks]

    def _agree_on_round(self) -> None:
        self._round = int(self._comm.all_reduce(np.array([self._round]), op="max")[0])
        if self._settings.invitation and not self._invitation:
            self._round += 1

    def _invite(self) -> None:
        if self._can_grow and self._invitation != self._comm.join_token:
            self._invitation = self._comm.join_token
            self._channel.send({"invitation": self._invitation})

    def _all_end(self) -> bool:
        """Return whether the controller asked any rank to end; all ranks return the same."""
        asked = np.array([self._channel.asked_to_end()], dtype=np.int32)
        start_time = time.monotonic()
        handle = self._comm.all_reduce(asked, op="max", async_op=True)
        found = handle.wait()
        self._report(
            RandomCollective("allreduce", 1, "int32", "max"), 0, handle, start_time, {"digest": int(found[0])}
        )
        return bool(found[0])

    def _run_round(self) -> bool:
        """Run the collectives of a round; return whether they succeeded."""
        settings, present = self._settings, self._present
        pieces = draw_round(
            settings.seed,
            self._round,
            present,
            ranks=len(self._original),
            own=self._own,
            largest=settings.largest,
        )
        arrays = [self._input(piece) for piece in pieces]
        outs = [self._output(piece, array, len(present)) for piece, array in zip(pieces, arrays, strict=True)]
        started: list[tuple[Handle[Any], float]] = []
        for piece, array, out in zip(pieces, arrays, outs, strict=True):
            start_time = time.monotonic()
            started.append((self._start(piece, array, out), start_time))
        for number, (piece, (handle, start_time)) in enumerate(zip(pieces, started, strict=True)):
            array, out = arrays[number], outs[number]
            try:
                found = handle.wait()
            except BackendError:
                # Several at once cannot be refused, and a refusal follows the loss of a rank.
                if len(pieces) > 1 or self._present == present:
                    raise
                wrong = self._changed(piece, array)
                if out is not None and out is not array:
                    wrong += int(np.count_nonzero(out != UNWRITTEN))
                self._report(piece, number, handle, start_time, {"refused": True, "wrong": wrong})
                return False
            ended, part = time.monotonic(), list(handle.among)
            wrong = self._wrong(piece, found, part)
            if array is not out:
                wrong += self._changed(piece, array)
            digest = 0 if found is None or piece.kind not in REPLICATED else zlib.crc32(found.view(np.uint8))
            self._report(
                piece,
                number,
                handle,
                start_time,
                {"wrong": wrong, "part": part, "digest": digest, "ended": ended},
            )
        return True

    def _input(self, piece: RandomCollective) -> NDArray[Any]:
        """Return the input of this rank; every third round in memory that the others see, if memory can be shared."""
        values = make_input(piece, self._settings.seed, self._round, self._rank)
        if self._round % 3:
            return values
        seen: NDArray[Any] = self._comm.empty(values.shape, piece.dtype)
        seen[:] = values
        return seen

    def _output(self, piece: RandomCollective, array: NDArray[Any], size: int) -> NDArray[Any] | None:
        if piece.place == "in place":
            return array
        if piece.place == "new" or (piece.kind == "reduce" and piece.root != self._rank):
            return None
        count = piece.count * size if piece.kind == "allgather" else piece.count
        return np.full(count, UNWRITTEN, dtype=piece.dtype)

    def _start(self, piece: RandomCollective, array: NDArray[Any], out: NDArray[Any] | None) -> Handle[Any]:
        options: dict[str, Any] = {"out": out} if out is not None else {}
        if piece.kind in SUMMING:
            options["op"] = piece.op
        if piece.root >= 0:
            options["root"] = self._present.index(piece.root)
        handle: Handle[Any] = getattr(self._comm, METHODS[piece.kind])(array, async_op=True, **options)
        return handle

    def _wrong(self, piece: RandomCollective, found: NDArray[Any] | None, part: list[int]) -> int:
        if self._rank not in part:
            return piece.count or 1
        return wrong_elements(piece, found, self._settings.seed, self._round, part, self._rank)

    def _changed(self, piece: RandomCollective, array: NDArray[Any]) -> int:
        return int(np.count_nonzero(array != make_input(piece, self._settings.seed, self._round, self._rank)))

    def _report(
        self,
        piece: RandomCollective,
        number: int,
        handle: Handle[Any],
        start_time: float,
        more: dict[str, object],
    ) -> None:
        comm = self._comm
        self._channel.send(
            {
                "round": self._round,
                "piece": number,
                "kind": piece.kind,
                "nbytes": piece.nbytes,
                "began": start_time,
                "ended": time.monotonic(),
                "there": self._present,
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
    """Return the threads and descriptors, beyond those given, that a rank with a closed communicator still holds."""
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
    # it outlives mpiexec, which may end with the other ranks, but not the controller
    sys.exit(
        run_rank(
            sys.argv[1], int(next(os.environ[name] for name in MPI_RANK_VARIABLES if name in os.environ))
        )
    )

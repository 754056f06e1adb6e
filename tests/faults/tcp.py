"""Kills (SIGKILL) or stops (SIGSTOP) a rank of the tcp back end; `bench --chaos` does so at random, again and again.

Every survivor must report exactly one `BackendError` that names a rank, a peer and a step, close all its
connections, end all its threads, and exit. Rank 0 hosts the rendezvous in every second round, so its death takes that
along; in the others this process hosts it.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from collectives import Communicator
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.peers.rendezvous import Rendezvous
from tests.support.forking import forked_ranks
from topoplan.errors import BackendError
from topoplan.plans.plan import Plan

RANKS = 4
ELEMENTS, FEW = 1 << 20, 4
"""Of the arrays: what goes over the links of the plan, and what ranks tell each other when they meet."""

STEP_SECONDS = 1.0  # timeout of the ranks
START_SECONDS = 60.0  # time for processes to start and meet
LIMIT_SECONDS = 20.0  # what has not reported by then hangs


@dataclass(frozen=True, slots=True)
class Round:
    victim: int
    number: signal.Signals
    delay: float
    rank_hosts: bool
    elements: int = ELEMENTS


def work(rank: int, plan: Plan, meeting: str, elements: int, reports: Connection) -> None:
    """The life of a rank: collectives until one fails, then one report."""
    array = np.full(elements, rank, dtype=np.float32)
    backend = TcpBackend(rank, RANKS, rendezvous=meeting, timeout=STEP_SECONDS, meeting_timeout=START_SECONDS)
    comm = Communicator(plan, backend, chunk_bytes=64 << 10, timeout=STEP_SECONDS)
    out = np.empty_like(array)
    comm.all_reduce(array, out=out)
    reports.send_bytes(b'{"ready": true}')
    try:
        while True:
            out.fill(-1)
            comm.all_reduce(array, out=out)
            if not np.all(out == sum(range(RANKS))):
                raise ValueError("a wrong result")
    except BackendError as error:
        seen: dict[str, Any] = {"rank": error.rank, "peer": error.peer, "step": error.step}
        seen |= {"message": str(error), "time": time.monotonic(), "untouched": bool(np.all(out == -1))}
    except Exception as error:
        seen = {"message": f"{type(error).__name__}: {error}"}
    comm.close()
    seen |= {"threads": threading.active_count() - 1, "sockets": open_sockets()}
    reports.send_bytes(json.dumps(seen).encode())


def open_sockets() -> int:
    """Sockets of this process on the network."""
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    inodes = {
        os.readlink(link)[8:-1] for link in links if os.path.lexists(link) and "socket:" in os.readlink(link)
    }
    listed = "".join(Path(f"/proc/self/net/{kind}").read_text() for kind in ("tcp", "tcp6"))
    return sum(f" {inode} " in listed for inode in inodes)


def one_round(plan: Plan, what: Round) -> dict[int, list[dict[str, Any]]]:
    """Start the ranks, hurt one, and collect what each of the others reports."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"unix:{folder}/meeting"
        host = None if what.rank_hosts else Rendezvous(meeting, RANKS)
        try:
            with forked_ranks(work, RANKS, plan, meeting, what.elements) as (processes, readers):
                if host is not None:
                    host.start()
                return hurt(what, processes, readers)
        finally:
            if host is not None:
                host.close()


def hurt(
    what: Round, processes: Sequence[BaseProcess], readers: Sequence[Connection]
) -> dict[int, list[dict[str, Any]]]:
    """Wait until all ranks work, hurt one, and listen to the others until they have ended."""
    for reader in readers:
        if not reader.poll(START_SECONDS):
            raise TimeoutError("the ranks do not start")
        reader.recv_bytes()
    time.sleep(what.delay)
    pid = processes[what.victim].pid
    assert pid is not None
    os.kill(pid, what.number)
    hurt_at = time.monotonic()
    reports: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(RANKS) if rank != what.victim}
    rank_of = {readers[rank]: rank for rank in reports}
    while rank_of and time.monotonic() < hurt_at + LIMIT_SECONDS:
        for reader in wait(list(rank_of), 0.1):
            assert isinstance(reader, Connection)
            try:
                report = json.loads(reader.recv_bytes())
            except EOFError:
                del rank_of[reader]
                continue
            report["after"] = report.get("time", hurt_at) - hurt_at
            reports[rank_of[reader]].append(report)
    for rank in rank_of.values():
        reports[rank].append({"message": "hangs"})
    return reports


def faults_of(reports: dict[int, list[dict[str, Any]]]) -> list[str]:
    found = []
    for rank, listed in reports.items():
        if len(listed) != 1:
            found.append(f"rank {rank} reported {len(listed)} times: {listed}")
        found += [
            f"rank {rank} reported {report}"
            for report in listed
            if None in (report.get("rank"), report.get("peer"), report.get("step"))
            or report["threads"]
            or report["sockets"]
            or not report["untouched"]
        ]
    return found

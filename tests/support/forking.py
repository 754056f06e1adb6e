"""Ranks for tests as processes that are forked from one that has imported what they need, and loaded compiled loops.

A process of its own takes a second for that, three with torch. `multiprocessing` starts one such server for all tests
of a run, and what it is told to import later counts for nothing: so all tell it the same, here.
"""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess

from collectives.peers.peer_watchdog import process_state


def forking() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.jobs.forked_ranks"])
    return context


@contextmanager
def forked_ranks(
    work: Callable[..., None], size: int, *given: object
) -> Iterator[tuple[list[BaseProcess], list[Connection]]]:
    """Run ``work(rank, *given, reports)`` in a child for each rank; all children are gone behind it."""
    context = forking()
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes: list[BaseProcess] = [
        context.Process(target=work, args=(rank, *given, writer), daemon=True)
        for rank, (_, writer) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, writer in pipes:
        writer.close()
    try:
        yield processes, [reader for reader, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
        for reader, _ in pipes:
            reader.close()


@contextmanager
def stopped_process() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        other.send_signal(signal.SIGSTOP)
        while process_state(other.pid) != "T":
            time.sleep(0.01)
        yield other.pid
        other.kill()

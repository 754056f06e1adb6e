"""A few threads that share a list of tasks, and end together.

The caller works too. Whoever is free takes the next task, without a lock; where a task fails, no other is begun, and
its error is raised when the last one has ended.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Task = TypeVar("Task")

MOST_THREADS = 8
"""Threads by default, where there are as many cores: fewer fill the memory of most hosts."""


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workers:
    """Threads that are started when they are first needed and kept until `close`.

    Parameters
    ----------
    threads : int
        All of them, the caller's included.

    Examples
    --------
    >>> workers, done = Workers(2), []
    >>> workers.share([3, 4, 5], lambda worker, task: done.append(task))
    >>> sorted(done)
    [3, 4, 5]
    >>> workers.close()
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def share(self, tasks: Iterable[Task], work: Callable[[int, Task], None], *, threads: int = 0) -> None:
        """Call ``work(worker, task)`` for every task.

        Parameters
        ----------
        tasks : iterable
            Begun in this order.
        work : callable
            Is told which worker calls it, 0 to ``threads - 1``; calls of one worker do not overlap.
        threads : int
            At most so many take part; 0 for all.
        """
        waiting = deque(tasks)
        helpers = min(threads or self.threads, self.threads, len(waiting)) - 1

        def serve(worker: int) -> None:
            try:
                while True:
                    try:
                        task = waiting.popleft()
                    except IndexError:
                        return
                    work(worker, task)
            except BaseException:
                waiting.clear()
                raise

        if helpers < 1:
            serve(0)
            return
        pool = self._started()
        futures = [pool.submit(serve, worker) for worker in range(1, helpers + 1)]
        try:
            serve(0)
        finally:
            # Also where the caller is interrupted: nobody may still write when this returns.
            errors = [future.exception() for future in futures if not future.cancel()]
        for error in errors:
            if error is not None:
                raise error

    def _started(self) -> ThreadPoolExecutor:
        """The threads; after a fork the child has none of its parent's and starts its own."""
        if self._pool is None or self._process != os.getpid():
            self._process = os.getpid()
            self._pool = ThreadPoolExecutor(self.threads - 1, thread_name_prefix="loopback")
        return self._pool

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown(wait=True)
        self._pool = None

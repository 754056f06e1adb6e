"""Take setup steps on all ranks together: no rank continues before all have reported the outcome of theirs.

A step may wait inside NCCL for other ranks, and a failed one never arrives. It therefore runs in a thread, and the
ranks gather texts repeatedly meanwhile (`ControlPlane.texts`): "under way", its value, or its failure. All see the
same texts, so they stop waiting in the same round. Unlike a failure that is reported to the control plane
(`ControlPlane.tell`) this does not end the job: the ranks may choose another way.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from collectives.backends.nccl.nccl_library import NcclFailed
from collectives.peers.control_plane import ControlPlane
from topoplan.errors import TopoplanError

FIRST_SECONDS, LONGEST_SECONDS = 0.02, 0.2
"""Time for a step to end before the ranks meet; twice as much each time, up to the longest."""


class AgreedStepFailed(Exception):
    """A step has failed on some rank; raised on all of them alike.

    Attributes
    ----------
    rank : int
        The lowest on which it has.
    reason : str
        What that one has met, in one line.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.rank = rank
        self.reason = reason


class AgreedSteps:
    """Takes steps with all ranks of a world.

    Parameters
    ----------
    world : World
    timeout : float
        Seconds for a step.
    enter : callable
        Called first in the thread of each step, as to make a GPU current there.
    leaving : bool
        The ranks leave the job.

    Attributes
    ----------
    timeout : float
    """

    def __init__(
        self,
        world: ControlPlane,
        *,
        timeout: float,
        enter: Callable[[], object] = lambda: None,
        leaving: bool = False,
    ) -> None:
        self._say = world.shutdown_notice if leaving else world.texts
        self.timeout = timeout
        self._enter = enter
        self._thread: threading.Thread | None = None

    def take(self, work: Callable[[], Any]) -> list[Any]:
        """Do something on all ranks.

        Parameters
        ----------
        work : callable
            Gives what JSON can hold. Where another rank fails it may still run when this returns.

        Returns
        -------
        list
            What it has given on each rank, in order of rank.

        Raises
        ------
        AgreedStepFailed
            It has raised something, or not ended in time, on some rank.
        BackendError
            The job has failed.
        """
        ended: dict[str, Any] = {}

        def run() -> None:
            try:
                self._enter()
                ended["given"] = work()
            except Exception as error:  # of any kind: the thread has nobody else to tell
                ended["failed"] = describe_failure(error)

        self._thread = thread = threading.Thread(target=run, name="joint step", daemon=True)
        thread.start()
        deadline, pause = time.monotonic() + self.timeout, FIRST_SECONDS
        while True:
            thread.join(pause)
            pause = min(2 * pause, LONGEST_SECONDS)
            told = {} if thread.is_alive() else ended
            if not told and time.monotonic() > deadline:
                told = {
                    "failed": f"waited {self.timeout:g} s for NCCL or the driver; NCCL_DEBUG=INFO tells more"
                }
            said = [json.loads(text) for text in self._say(json.dumps(told), timeout=self.timeout)]
            for rank, one in enumerate(said):
                if "failed" in one:
                    raise AgreedStepFailed(rank, one["failed"])
            if all(said):
                return [one["given"] for one in said]

    def idle(self, seconds: float) -> bool:
        """Wait for what the last step still runs on this rank after a failure; return whether it has ended."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()


def describe_failure(error: BaseException) -> str:
    """What a rank has met, in one line."""
    if isinstance(error, TopoplanError):
        return str(error)
    if isinstance(error, NcclFailed):
        return f"NCCL reports {error}; NCCL_DEBUG=WARN tells more"
    return f"the GPU failed: {error!r}"

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
"""Time for a step to end before the ranks gather; doubled each time, up to the longest."""


class AgreedStepFailed(Exception):
    """A step has failed on some rank; raised on all ranks with the lowest such `rank` and its `reason`, one line."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.rank = rank
        self.reason = reason


class AgreedSteps:
    """Take steps with all ranks of a job, each within `timeout` seconds.

    `enter` is called first in the thread of each step, as to make a GPU current there. `leaving`: the ranks leave the
    job.
    """

    def __init__(
        self,
        world: ControlPlane,
        *,
        timeout: float,
        enter: Callable[[], object] = lambda: None,
        leaving: bool = False,
    ) -> None:
        self._gather = world.shutdown_notice if leaving else world.texts
        self.timeout = timeout
        self._enter = enter
        self._thread: threading.Thread | None = None

    def take(self, work: Callable[[], Any]) -> list[Any]:
        """Do `work` on all ranks, and return its results in order of rank.

        The results must be representable in JSON. If another rank fails, `work` may still run when this returns. Raises
        `AgreedStepFailed` if it raised, or did not end in time, on some rank; `BackendError` if the job has failed.
        """
        ended: dict[str, Any] = {}

        def run() -> None:
            try:
                self._enter()
                ended["given"] = work()
            except Exception as error:  # of any kind: nothing else reports it from this thread
                ended["failed"] = describe_failure(error)

        self._thread = thread = threading.Thread(target=run, name="agreed step", daemon=True)
        thread.start()
        deadline, pause = time.monotonic() + self.timeout, FIRST_SECONDS
        while True:
            thread.join(pause)
            pause = min(2 * pause, LONGEST_SECONDS)
            outcome = {} if thread.is_alive() else ended
            if not outcome and time.monotonic() > deadline:
                outcome = {
                    "failed": f"waited {self.timeout:g} s for NCCL or the driver; NCCL_DEBUG=INFO tells more"
                }
            outcomes = [json.loads(text) for text in self._gather(json.dumps(outcome), timeout=self.timeout)]
            for rank, one in enumerate(outcomes):
                if "failed" in one:
                    raise AgreedStepFailed(rank, one["failed"])
            if all(outcomes):
                return [one["given"] for one in outcomes]

    def idle(self, seconds: float) -> bool:
        """Wait for what the last step still runs on this rank after a failure; return whether it has ended."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()


def describe_failure(error: BaseException) -> str:
    """Return a rank's failure in one line."""
    if isinstance(error, TopoplanError):
        return str(error)
    if isinstance(error, NcclFailed):
        return f"NCCL reports {error}; NCCL_DEBUG=WARN tells more"
    return f"the GPU failed: {error!r}"

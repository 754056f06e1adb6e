"""The NCCL communicators of a rank: made together with all other ranks, aborted or given up alone."""

from __future__ import annotations

import os
import threading
import time
from types import ModuleType
from typing import Any

from collectives.backends.nccl.world import World, share_unique_id
from topoplan.errors import BackendError, UsageError

FAREWELL_SECONDS = 5.0
"""Time for NCCL to give up its communicators."""

LOOK_SECONDS = 0.01


def prepare(cupy: ModuleType, *, trees: bool, ranks_per_gpu: int) -> None:
    """Set variables that NCCL reads when it is first used; what is set already stays.

    Raises
    ------
    UsageError
        CuPy finds no NCCL.
    """
    if not cupy.cuda.nccl.available:
        raise UsageError(
            "the nccl back end needs NCCL, which CuPy does not find: pip install nvidia-nccl-cu12 (or -cu13, as CuPy)"
        )
    if trees:
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    if ranks_per_gpu > 1:
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        os.environ.setdefault("NCCL_MAX_CTAS", str(max(1, 8 // ranks_per_gpu)))


class Connections:
    """Communicators among the same ranks, as many as lanes.

    Parameters
    ----------
    cupy : module
    world : World
    device : int
        Number of this rank's GPU.
    timeout : float
        Seconds to wait for the other ranks.
    """

    def __init__(self, cupy: ModuleType, world: World, *, device: int, timeout: float) -> None:
        self._cupy: Any = cupy
        self._nccl: Any = cupy.cuda.nccl
        self._world = world
        self._device = device
        self._timeout = timeout
        self._made: list[Any] = []

    def have(self, count: int) -> list[Any]:
        """This many communicators or more; all ranks make the same ones at the same time.

        Raises
        ------
        BackendError
            A rank does not come, or NCCL refuses.
        """
        while len(self._made) < count:
            self._made.append(self._connect())
        return self._made

    def error(self) -> str | None:
        """What NCCL itself has met in the background."""
        try:
            for communicator in list(self._made):
                communicator.check_async_error()
        except self._nccl.NcclError as error:
            return str(error)
        return None

    def abort(self) -> None:
        """Let go of everything that waits for other ranks; from any thread."""
        for communicator in list(self._made):
            communicator.abort()

    def give_up(self) -> None:
        """Destroy all communicators; that waits for what other ranks still do, and they may be dead."""

        def destroy() -> None:
            with self._cupy.cuda.Device(self._device):
                for communicator in self._made:
                    communicator.destroy()

        thread = threading.Thread(target=destroy, name="nccl farewell", daemon=True)
        thread.start()
        thread.join(FAREWELL_SECONDS)

    def _connect(self) -> Any:
        """One more; in a thread, since NCCL waits for all ranks without end and cannot be called back."""
        unique_id = share_unique_id(self._world, self._nccl, timeout=self._timeout)
        size, rank = self._world.size, self._world.rank
        made: list[Any] = []

        def join() -> None:
            with self._cupy.cuda.Device(self._device):
                try:
                    made.append(self._nccl.NcclCommunicator(size, unique_id, rank))
                except self._nccl.NcclError as error:
                    made.append(error)

        thread = threading.Thread(target=join, name="nccl connect", daemon=True)
        thread.start()
        deadline = time.monotonic() + self._timeout
        while True:
            thread.join(LOOK_SECONDS)
            trouble = self._world.trouble()
            if made or trouble is not None:
                break
            if time.monotonic() > deadline:
                trouble = self._told(
                    f"found no other ranks for {self._timeout:g} s; NCCL_DEBUG=INFO tells more"
                )
                break
        if made and isinstance(made[0], Exception):
            trouble = self._told(f"refuses: {made[0]}; NCCL_DEBUG=WARN tells why")
        if not made or isinstance(made[0], Exception):
            assert trouble is not None, "there is a reason"
            raise trouble
        return made[0]

    def _told(self, what: str) -> BackendError:
        """A failure of NCCL that all ranks are told of."""
        error = BackendError(f"NCCL {what}", rank=self._world.rank)
        self._world.tell(error)
        return error

"""Memory of every rank's GPU that the GPUs of all ranks address: NCCL's windows, or else CUDA's own means.

Between processes these are handles (CUDA IPC), within one the addresses themselves. What is had is agreed: every step
is taken by all ranks together (`JointSteps`), and where one fails all of them go another way, or do without, and say
the same of it. Addresses are those of kernels; of its own memory too a rank knows no other one.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from collectives.arrays.free_room import FreeRoom
from collectives.backends.nccl.connections import Connections
from collectives.backends.nccl.joint_steps import JointSteps, StepFailed
from collectives.backends.nccl.library import Library, Link, NcclFailed, Window, described
from topoplan.errors import TopoplanError, UsageError
from topoplan.units import format_size

UNIT = 512
"""Bytes of which arrays of a region take whole ones."""

ALREADY_ENABLED = 704
"""CUDA's cudaErrorPeerAccessAlreadyEnabled."""

SPARE = 256 << 20
"""Bytes of a GPU that a region leaves to others."""


@dataclass(slots=True, eq=False)
class Region:
    """Arenas of equal length, one of each rank.

    Parameters
    ----------
    rank, size : int
    nbytes : int
        Of each arena, zero at first.
    addresses : tuple of int
        Where kernels of this rank find each rank's arena.
    multicast : int
        Where they find all of them at once, for multimem instructions; 0 where they do not.
    sharing : int
        Ranks on one GPU at most, which must have their blocks there at once.
    kind : str
        "windows", "windows and multicast", "ipc" or "peer access".
    why : str
        Why it is no better kind, the same on all ranks; empty where there is none.
    """

    rank: int
    size: int
    nbytes: int
    addresses: tuple[int, ...]
    multicast: int
    sharing: int
    kind: str
    why: str
    _cupy: Any
    _device: int
    _close: Callable[[bool], None]
    _free: FreeRoom = field(init=False)

    def __post_init__(self) -> None:
        self._free = FreeRoom(self.nbytes, unit=UNIT)

    @property
    def domains(self) -> tuple[int, ...]:
        """Of each rank: ranks of one reach each other's memory."""
        return (0,) * self.size

    def array(self, nbytes: int) -> Any:
        """A new array of bytes in this rank's arena, contents undefined; None where there is no more room."""
        start = self._free.take(nbytes)
        if start is None:
            return None
        cuda = self._cupy.cuda
        owner = _Part()
        weakref.finalize(owner, self._free.give_back, start, nbytes).atexit = False
        memory = cuda.UnownedMemory(self.addresses[self.rank] + start, nbytes, owner, self._device)
        return self._cupy.ndarray((nbytes,), dtype="uint8", memptr=cuda.MemoryPointer(memory, 0))

    def offset(self, address: int) -> int:
        """Where an address lies in this rank's arena; -1 if it does not."""
        offset = address - self.addresses[self.rank]
        return offset if 0 <= offset < self.nbytes else -1

    def close(self, *, together: bool) -> None:
        """Give the memory back.

        Parameters
        ----------
        together : bool
            All ranks close it at this time. Else some may still use it: then this rank's memory is kept until the
            process ends.
        """
        close, self._close = self._close, _nothing
        close(together)


class _Part:
    """What an array in a region holds on to."""


def _nothing(together: bool) -> None:
    pass


def open_region(
    cupy: ModuleType,
    library: Library,
    connections: Connections,
    steps: JointSteps,
    *,
    rank: int,
    size: int,
    device: int,
    nbytes: int,
) -> Region | str:
    """A region of all ranks, or why there is none, in one line; the same on all of them, and all must call this.

    Parameters
    ----------
    cupy : module
        The rank's GPU is current.
    library : Library
    connections : Connections
    steps : JointSteps
    rank, size, device, nbytes : int

    Raises
    ------
    BackendError
        A rank is gone.
    """
    link = connections.have(1)[0]
    runtime = cupy.cuda.runtime
    windows = library.windows

    def facts() -> dict[str, Any]:
        free, _ = runtime.memGetInfo()
        support = (False, False)
        if windows is not None:
            with connections.call():
                support = windows.support(link)
        return {
            "host": _host(),
            "process": os.getpid(),
            "gpu": runtime.deviceGetPCIBusId(device),
            "device": device,
            "free": int(free),
            "nccl": described(library),
            "old": windows is None,
            "support": support,
        }

    try:
        found = steps.take(facts)
        free, owner = min((one["free"], number) for number, one in enumerate(found))
        if free < nbytes + SPARE:
            return (
                f"rank {owner} has {format_size(free)} free on its GPU, and a region takes "
                f"{format_size(nbytes + SPARE)}"
            )
        places = [(one["host"], one["gpu"]) for one in found]
        sharing = max(places.count(place) for place in places)
        if sharing > 1 and len({one["process"] for one in found}) > 1:
            return "several processes share a GPU, where a kernel would wait for one whose turn does not come"
        common: dict[str, Any] = {
            "cupy": cupy,
            "rank": rank,
            "size": size,
            "device": device,
            "nbytes": nbytes,
            "sharing": sharing,
        }
        old = next((number for number, one in enumerate(found) if one["old"]), None)
        lacking = next((number for number, one in enumerate(found) if not one["support"][0]), None)
        if old is not None:
            why = f"windows need nccl4py with NCCL 2.29.7, and rank {old} has {found[old]['nccl']}"
        elif lacking is not None:
            why = f"NCCL has no windows among these GPUs (rank {lacking}; NCCL_DEBUG=INFO tells more)"
        else:
            assert windows is not None, "rank by rank"
            multicast = all(one["support"][1] for one in found)
            opener = _Windows(connections, windows, link, steps, multicast=multicast)
            try:
                region = opener.open(**common)
                _find_each_other(steps, region, cupy.cuda.runtime)
                return region
            except StepFailed as failed:
                opener.close(together=False)
                why = f"no windows: {failed}"
        mapped = _by_cuda(steps, found, why, **common)
        if isinstance(mapped, Region):
            try:
                _find_each_other(steps, mapped, runtime)
            except StepFailed as failed:
                mapped.close(together=False)
                return f"{why}; and {failed}"
        return mapped
    except StepFailed as failed:
        return str(failed)


def _find_each_other(steps: JointSteps, region: Region, runtime: Any) -> None:
    """See that every address leads to the arena that it should: each rank looks for the marks of all."""
    word = np.zeros(1, dtype=np.int64)

    def leave() -> int:
        word[0] = mark = secrets.randbits(62)
        runtime.memcpy(region.addresses[region.rank], word.ctypes.data, 8, runtime.memcpyHostToDevice)
        return mark

    def look() -> None:
        for peer, address in enumerate(region.addresses):
            runtime.memcpy(word.ctypes.data, address, 8, runtime.memcpyDeviceToHost)
            if word[0] != marks[peer]:
                raise UsageError(f"finds other memory where that of rank {peer} should be")

    def clear() -> None:
        runtime.memset(region.addresses[region.rank], 0, 8)
        runtime.deviceSynchronize()

    marks = steps.take(leave)
    steps.take(look)
    steps.take(clear)


# ---- windows


class _Windows:
    def __init__(
        self, connections: Connections, windows: Any, link: Link, steps: JointSteps, *, multicast: bool
    ) -> None:
        self._connections = connections
        self._windows = windows
        self._link = link
        self._steps = steps
        self._wants_multicast = multicast
        self._memory = 0
        self._window: Window | None = None

    def open(self, *, cupy: Any, rank: int, size: int, device: int, nbytes: int, sharing: int) -> Region:
        def register() -> bool:
            with self._connections.call():
                self._memory = self._windows.allocate(nbytes)
                cupy.cuda.runtime.memset(self._memory, 0, nbytes)
                cupy.cuda.runtime.deviceSynchronize()
                self._window = self._windows.register(self._link, self._memory, nbytes)
            while not self._ready():
                time.sleep(1e-3)
            return self._window.made()

        def addresses() -> list[int]:
            assert self._window is not None, "made by all"
            with self._connections.call():
                return [self._window.address(peer) for peer in range(size)]

        def multicast() -> int:
            assert self._window is not None, "made by all"
            with self._connections.call():
                return self._window.multicast() if self._wants_multicast else 0

        for number, made in enumerate(self._steps.take(register)):
            if not made:
                raise StepFailed(number, "NCCL makes no window")
        seen = self._steps.take(addresses)
        for number, one in enumerate(seen):
            if not all(one):
                raise StepFailed(number, f"does not reach the memory of rank {one.index(0)}")
        groups = self._steps.take(multicast)
        whole = all(groups)
        why = "" if whole else "no multicast address: not in these GPUs, or NCCL_NVLS_ENABLE=0"
        return Region(
            rank,
            size,
            nbytes,
            tuple(seen[rank]),
            groups[rank] if whole else 0,
            sharing,
            "windows and multicast" if whole else "windows",
            why,
            cupy,
            device,
            lambda together: self.close(together=together),
        )

    def _ready(self) -> bool:
        with self._connections.call():
            return self._link.ready()

    def close(self, *, together: bool) -> None:
        window, self._window = self._window, None
        memory, self._memory = self._memory, 0
        with suppress(NcclFailed), self._connections.call(leaving=True):
            if window is not None:
                window.close()
            if memory and together:
                self._windows.free(memory)


# ---- CUDA's own means


def _by_cuda(
    steps: JointSteps,
    found: list[dict[str, Any]],
    why: str,
    *,
    cupy: Any,
    rank: int,
    size: int,
    device: int,
    nbytes: int,
    sharing: int,
) -> Region | str:
    if len({one["host"] for one in found}) > 1:
        return f"{why}; the ranks are on several hosts, which CUDA's handles do not cross"
    runtime = cupy.cuda.runtime
    processes = [one["process"] for one in found]
    state: dict[str, Any] = {"memory": 0, "opened": []}

    def close(together: bool) -> None:
        opened, memory = state["opened"], state["memory"]
        state.update(opened=[], memory=0)
        with suppress(runtime.CUDARuntimeError):
            for address in opened:
                runtime.ipcCloseMemHandle(address)
        if together:
            with suppress(StepFailed, TopoplanError):
                steps.take(_done)  # nobody has it open any more
                with suppress(runtime.CUDARuntimeError):
                    runtime.free(memory)

    def look() -> bool:
        for peer, one in enumerate(found):
            other = one["device"] if processes[peer] == processes[rank] else device
            if other != device and not runtime.deviceCanAccessPeer(device, other):
                raise UsageError(f"GPU {device} has no peer access to GPU {other} of rank {peer}")
        return True

    def allocate() -> dict[str, Any]:
        memory = state["memory"] = int(runtime.malloc(nbytes))
        runtime.memset(memory, 0, nbytes)
        runtime.deviceSynchronize()
        handle = b"" if len(set(processes)) == 1 else bytes(runtime.ipcGetMemHandle(memory))
        return {"address": memory, "handle": handle.hex()}

    def reach() -> list[int]:
        seen = []
        for peer, one in enumerate(given):
            if peer != rank and processes[peer] != processes[rank]:
                seen.append(int(runtime.ipcOpenMemHandle(bytes.fromhex(one["handle"]))))
                state["opened"].append(seen[-1])
                continue
            if found[peer]["device"] != device:
                _enable(runtime, found[peer]["device"])
            seen.append(one["address"])
        return seen

    try:
        steps.take(look)
        given = steps.take(allocate)
        seen = steps.take(reach)
    except StepFailed as failed:
        close(False)
        return f"{why}; and {failed}"
    kind = "peer access" if len(set(processes)) == 1 else "ipc"
    return Region(rank, size, nbytes, tuple(seen[rank]), 0, sharing, kind, why, cupy, device, close)


def _done() -> bool:
    return True


def _enable(runtime: Any, other: int) -> None:
    """Let kernels of the current GPU reach another one's memory."""
    try:
        runtime.deviceEnablePeerAccess(other)
    except runtime.CUDARuntimeError as error:
        if getattr(error, "status", None) != ALREADY_ENABLED:
            raise


def _host() -> str:
    """What the processes of a host have in common, also those in containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()

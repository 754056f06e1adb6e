"""Allocate arenas in the memory of the ranks' GPUs that the other GPUs of a domain address.

They are NCCL's windows, or else CUDA's own means. A *domain* is a host, or all hosts that NCCL reports as joined by
NVLink. NCCL's windows belong to a communicator of the domain's own, so that a failure here does not affect the one
that carries messages. CUDA's means are handles between processes, and within one the addresses themselves. All
ranks take every step together (`AgreedSteps`); after a failure all of them choose another way, or none, and give
the same reason.

Addresses are those of kernels; a rank knows no other address of its own memory either.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from collectives.backends.nccl.agreed_setup import AgreedStepFailed, AgreedSteps, describe_failure
from collectives.backends.nccl.nccl_communicators import (
    ABORT_SECONDS,
    NcclConnection,
    short_of_shared_memory,
)
from collectives.backends.nccl.nccl_library import (
    NcclCommunicator,
    NcclFailed,
    NcclLibrary,
    NcclWindow,
    describe_library,
)
from collectives.peers.control_plane import ControlPlane
from collectives.peers.shared_memory import RangeAllocator
from collectives.tables.cupy_arrays import NOT_READY
from collectives.tables.kernels.kernel_launch import load_kernel
from collectives.tables.kernels.source import TRY_PEERS, forest_source
from topoplan.errors import TopoplanError, UsageError
from topoplan.units import format_size

UNIT = 512
"""Arrays in an arena take whole multiples of so many bytes."""

ALREADY_ENABLED = 704
"""CUDA's cudaErrorPeerAccessAlreadyEnabled."""

SPARE = 256 << 20
"""Bytes of a GPU that an arena leaves to other uses."""

QUEUES, QUEUES_BY_DEFAULT = "CUDA_DEVICE_MAX_CONNECTIONS", 8
"""The variable for how many streams of a process a GPU runs side by side; ranks that share a GPU use `STREAMS` each."""

STREAMS = 4
"""Streams of a rank: one of its arrays, and three of its messages (`gpu_streams`)."""

MPS_ENABLED = 133
"""CUDA's attribute CU_DEVICE_ATTRIBUTE_MPS_ENABLED: kernels of several processes run at once."""

TRIAL_SECONDS = 10.0
"""Time for a peer's stores to be seen before arenas are refused."""

TRIAL_THREADS, TRIAL_BYTES, HEARD = 32, 16, 1
"""Threads of the kernel that tries the peers, bytes of a rank in an arena, and the kernel's code for a peer whose
stores have arrived; as in ``peers.cu``.
"""

PROCESS = secrets.token_hex(8)
"""Id of this process: process numbers are the same in several containers of a host."""

_abandoned: list[object] = []
"""Mappings that other ranks or NCCL may still use until this process ends."""


class HeldArenas(Protocol):
    """Arenas that this rank holds."""

    def close(self, steps: AgreedSteps) -> None:
        """Release everything; all ranks call it at this time, or the memory is kept until the process ends."""


class ArenaMapping(HeldArenas, Protocol):
    """A way to map the arenas of a domain."""

    kind: str

    def open(self) -> tuple[tuple[int, ...], int, str]:
        """Return the addresses of all ranks' arenas, the multicast address or 0, and why it is not better.

        All ranks call it. Raises `AgreedStepFailed` if the mapping is not available.
        """


@dataclass(slots=True, eq=False)
class DeviceArenas:
    """Arenas of equal length, one of each rank.

    - `nbytes` of each arena, zeroed at first.
    - `addresses`: each rank's arena as kernels of this rank address it; 0 in another domain.
    - `domains`: the domain of each rank, counted from 0 in order of their lowest ranks.
    - `multicast`: address of all arenas of this domain at once, for multimem instructions; 0 if there is none.
    - `sharing`: the most ranks on one GPU, which must have their blocks there at once.
    - `kind`: "windows", "windows and multicast", "ipc" or "peer access".
    - `why`: why the kind is not better, the same on all ranks; empty if it is the best.

    A relay (`relay_engine`) has an arena and a number behind those of the ranks.
    """

    rank: int
    size: int
    nbytes: int
    addresses: tuple[int, ...]
    domains: tuple[int, ...]
    multicast: int
    sharing: int
    kind: str
    why: str
    _cupy: Any
    _device: int
    _mapped: HeldArenas | None
    _free: RangeAllocator = field(init=False)
    _lent: set[int] = field(init=False, default_factory=set)  # changed by finalizers, at any time

    def __post_init__(self) -> None:
        self._free = RangeAllocator(self.nbytes, unit=UNIT)

    def array(self, nbytes: int) -> Any:
        """Return a new array of bytes in this rank's arena, contents undefined; None if no range is free."""
        start = self._free.take(nbytes)
        if start is None:
            return None
        cuda = self._cupy.cuda
        owner = _ArenaPart()
        self._lent.add(start)
        weakref.finalize(owner, self._back, start, nbytes).atexit = False
        memory = cuda.UnownedMemory(self.addresses[self.rank] + start, nbytes, owner, self._device)
        return self._cupy.ndarray((nbytes,), dtype="uint8", memptr=cuda.MemoryPointer(memory, 0))

    def offset(self, address: int) -> int:
        """Return the offset of an address in this rank's arena; -1 if it lies elsewhere."""
        offset = address - self.addresses[self.rank]
        return offset if 0 <= offset < self.nbytes else -1

    def close(self, steps: AgreedSteps | None, *, lent: int, used: bool = False) -> None:
        """Release the memory, with all ranks at this time (`steps`).

        Without `steps`, if a rank has more than `lent` arrays out, or if one may still use the memory (`used`), all
        ranks keep it until the process ends.
        """
        mapped, self._mapped = self._mapped, None
        if mapped is None:
            return
        if steps is not None:
            with suppress(AgreedStepFailed, TopoplanError):
                if not any(steps.take(lambda: used or len(self._lent) > lent)):
                    mapped.close(steps)
                    return
        _abandoned.append(mapped)

    def _back(self, start: int, nbytes: int) -> None:
        self._lent.discard(start)
        self._free.give_back(start, nbytes)


class _ArenaPart:
    """Owner of an array in an arena: its finalizer returns the range."""


@dataclass(frozen=True, slots=True)
class ArenaPlace:
    """The host, the process, and the GPU of an arena, by its bus id and by its number in CUDA."""

    host: str
    process: str
    gpu: str
    device: int


def place_on_host(runtime: Any, device: int) -> dict[str, Any]:
    """Return the fields of an `ArenaPlace` of this process on a GPU."""
    gpu = runtime.deviceGetPCIBusId(device)
    return {"host": _host(), "process": _process(), "gpu": gpu, "device": device}


@dataclass(frozen=True, slots=True)
class _RankReport(ArenaPlace):
    """Properties of a rank's host, process and GPU that all ranks see."""

    free: int
    queues: int
    shares: bool
    nccl: str
    windows: bool
    team: int


def count_ranks_per_gpu(cupy: ModuleType, world: ControlPlane, device: int, *, timeout: float) -> int:
    """Return the largest number of ranks of a job on one GPU; all ranks call it.

    GPUs are counted by host and PCI bus id: device numbers, and how many GPUs a process sees, differ between ranks that
    a launcher gives one GPU each.
    """
    own = json.dumps([_host(), cupy.cuda.runtime.deviceGetPCIBusId(device)])
    return max(Counter(world.texts(own, timeout=timeout)).values())


def open_device_arenas(
    cupy: ModuleType,
    library: NcclLibrary,
    connection: NcclConnection,
    steps: AgreedSteps,
    *,
    rank: int,
    size: int,
    device: int,
    nbytes: int,
) -> DeviceArenas | str:
    """Return arenas of all ranks on the current GPU, or in one line why not; all ranks call it, with one result."""
    runtime = cupy.cuda.runtime

    def look() -> dict[str, Any]:
        team = 0
        if library.windows:
            with suppress(NcclFailed), connection.call():
                team = connection.link.team()
        return {
            **place_on_host(runtime, device),
            "free": int(runtime.memGetInfo()[0]),
            "queues": _queues(os.environ.get(QUEUES, "")),
            "shares": _serves_processes(runtime, device),
            "nccl": describe_library(library),
            "windows": library.windows,
            "team": team,
        }

    try:
        ranks = [_RankReport(**one) for one in steps.take(look)]
        gpus = Counter((one.host, one.gpu) for one in ranks)
        refusal = _refusal(ranks, gpus, nbytes)
        if refusal:
            return refusal
        order = list(dict.fromkeys(one.host for one in ranks))
        by_host = tuple(order.index(one.host) for one in ranks)
        why = _no_windows(ranks)
        ways: list[tuple[ArenaMapping, tuple[int, ...], threading.Event]] = []
        if not why:
            domains = (0,) * size if all(one.team == size for one in ranks) else by_host
            given_up = threading.Event()
            by_nccl = _WindowArenas(cupy, library, steps, rank, domains, nbytes, given_up)
            ways.append((by_nccl, domains, given_up))
        ways.append((CudaArenas(runtime, steps, rank, by_host, ranks, nbytes), by_host, threading.Event()))
        for way, reached, given_up in ways:
            try:
                addresses, multicast, no_multicast = way.open()
                PeerTrial(cupy, rank, addresses, given_up).take(steps)
            except AgreedStepFailed as failed:
                given_up.set()
                leave_arenas(way, steps)
                version = f" ({ranks[failed.rank].nccl})" if isinstance(way, _WindowArenas) else ""
                why = f"{why}; and {failed}" if why else f"no windows: {failed}{version}"
                continue
            sharing, words = max(gpus.values()), "; ".join(text for text in (why, no_multicast) if text)
            return DeviceArenas(
                rank, size, nbytes, addresses, reached, multicast, sharing, way.kind, words, cupy, device, way
            )
        return why
    except AgreedStepFailed as failed:
        return str(failed)


def _refusal(ranks: Sequence[_RankReport], gpus: Counter[tuple[str, str]], nbytes: int) -> str:
    """Return in one line why no kind of arena is possible; empty if one may be."""
    if TRIAL_BYTES * len(ranks) > nbytes:
        return f"region_bytes must be larger for {len(ranks)} ranks, got {format_size(nbytes)}"
    for number, one in enumerate(ranks):
        wanted = gpus[one.host, one.gpu] * nbytes + SPARE
        if one.free < wanted:
            return (
                f"rank {number} has {format_size(one.free)} free on its GPU, and a region takes "
                f"{format_size(wanted)}"
            )
    for number, one in enumerate(ranks):
        sharing = gpus[one.host, one.gpu]
        beside = [other.process for other in ranks if (other.host, other.gpu) == (one.host, one.gpu)]
        if len(set(beside)) > 1 and not one.shares:
            return (
                f"{sharing} ranks in {len(set(beside))} processes share a GPU, which runs kernels of one process at "
                "a time; start NVIDIA's multi-process service (nvidia-cuda-mps-control -d)"
            )
        inside = beside.count(one.process)
        if inside > 1 and STREAMS * inside > one.queues:
            return (
                f"{QUEUES} must be {STREAMS * inside} or more for the {inside} ranks of rank {number}'s process on "
                f"its GPU, got {one.queues}"
            )
    return ""


def _serves_processes(runtime: Any, device: int) -> bool:
    """Return whether kernels of several processes run on a GPU at once."""
    with suppress(runtime.CUDARuntimeError):  # drivers before 12.1 do not know the attribute
        return bool(runtime.deviceGetAttribute(MPS_ENABLED, device))
    return False


def _no_windows(ranks: Sequence[_RankReport]) -> str:
    """Return why NCCL has no windows on some rank; empty if all may have them."""
    old = next((number for number, one in enumerate(ranks) if not one.windows), None)
    if old is None:
        return ""
    return f"windows need NCCL 2.29.7 or newer, and rank {old} has {ranks[old].nccl}"


def leave_arenas(way: HeldArenas, steps: AgreedSteps) -> None:
    """Release what a failed attempt has made, unless a call of it is still under way on some rank."""
    ended, closed = steps.idle(ABORT_SECONDS), False
    try:
        closed = all(steps.take(lambda: ended))
        if closed:
            way.close(steps)
    except AgreedStepFailed:
        pass
    finally:
        if not closed:
            _abandoned.append(way)


class PeerTrial:
    """Try by a kernel that stores and flags arrive between all GPUs that reach each other, as the engine needs.

    `given_up` is set when another rank has failed. `names` of the peers; by default their numbers as ranks.
    """

    def __init__(
        self,
        cupy: Any,
        rank: int,
        addresses: Sequence[int],
        given_up: threading.Event,
        *,
        names: Sequence[str] = (),
    ) -> None:
        self._own = names[rank] if names else "its GPU"
        self._names = names or [f"the GPU of rank {peer}" for peer in range(len(addresses))]
        self._cupy = cupy
        self._rank, self._ranks = rank, len(addresses)
        self._addresses = addresses
        self._given_up = given_up
        self._kernel: Any = None
        self._stream: Any = None
        self._memory: Any = None

    def take(self, steps: AgreedSteps) -> None:
        """Run the trial on all ranks.

        Raises `AgreedStepFailed` if a rank's kernel does not see a peer's flag, or not the data that it follows.
        """
        flags = steps.take(self.prepare)
        seconds = min(TRIAL_SECONDS, steps.timeout / 2)
        steps.take(lambda: self.run(flags, seconds))
        steps.take(self.clear)

    def prepare(self) -> int:
        """Load the kernel and run it once on no ranks: loading must not happen while another rank's kernel waits."""
        cuda = self._cupy.cuda
        self._memory = cuda.alloc_pinned_memory(8 * (1 + 3 * self._ranks))
        self._page[:] = 0
        self._kernel = load_kernel(self._cupy, forest_source([TRY_PEERS]), TRY_PEERS)
        self._stream = cuda.Stream(non_blocking=True)
        self._launch(0, 0.0)
        self._stream.synchronize()
        return secrets.randbits(62) + 1

    @property
    def _page(self) -> NDArray[np.uint64]:
        return np.frombuffer(self._memory, dtype=np.uint64, count=1 + 3 * self._ranks)

    def _launch(self, ranks: int, seconds: float) -> None:
        numbers = (self._memory.ptr, self._rank, ranks, int(seconds * 1e9))
        with self._stream:
            self._kernel((1,), (TRIAL_THREADS,), tuple(np.int64(number) for number in numbers))

    def run(self, flags: Sequence[int], seconds: float) -> None:
        """Run the kernel with the flag of each rank, at the same time on all ranks."""
        page, end = self._page, time.monotonic() + seconds
        _, heard, arenas, sent = np.split(page, [1, 1 + self._ranks, 1 + 2 * self._ranks])
        arenas[:], sent[:] = self._addresses, flags
        self._launch(self._ranks, 2 * seconds)
        runtime = self._cupy.cuda.runtime
        while (status := runtime.streamQuery(self._stream.ptr)) == NOT_READY:
            if time.monotonic() > end or self._given_up.is_set():
                page[0] = 1
            # a kernel that does not end may still use the memory, which is released when this thread has ended
            time.sleep(1e-2 if page[0] else 1e-4)
        runtime.check_status(status)
        for peer, (address, found) in enumerate(zip(self._addresses, heard.tolist(), strict=True)):
            if address and found != HEARD:
                what = "no flag" if not found else "a flag without the data before it"
                raise UsageError(
                    f"{self._own} sees {what} from {self._names[peer]}, whose stores it should see"
                )

    def clear(self) -> None:
        """Zero what the kernels of all ranks have stored here."""
        runtime = self._cupy.cuda.runtime
        runtime.memset(self._addresses[self._rank], 0, TRIAL_BYTES * self._ranks)
        runtime.deviceSynchronize()


class _WindowArenas:
    """NCCL's windows on a communicator of the domain's own."""

    kind = "windows"

    def __init__(
        self,
        cupy: Any,
        library: NcclLibrary,
        steps: AgreedSteps,
        rank: int,
        domains: tuple[int, ...],
        nbytes: int,
        given_up: threading.Event,
    ) -> None:
        self._cupy = cupy
        self._library = library
        self._steps = steps
        self._rank = rank
        self._members = [peer for peer, domain in enumerate(domains) if domain == domains[rank]]
        self._size = len(domains)
        self._nbytes = nbytes
        self._link: NcclCommunicator | None = None
        self._memory = 0
        self._window: NcclWindow | None = None
        self._given_up = given_up

    def open(self) -> tuple[tuple[int, ...], int, str]:
        ids = self._steps.take(self._unique_id)
        self._steps.take(lambda: self._connect(bytes.fromhex(ids[self._members[0]])))
        for number, made in enumerate(self._steps.take(self._register)):
            if not made:
                raise AgreedStepFailed(
                    number, "NCCL has no windows among these GPUs; NCCL_DEBUG=INFO tells more"
                )
        seen = self._steps.take(self._addresses)
        for number, one in enumerate(seen):
            if not all(one):
                raise AgreedStepFailed(number, "NCCL does not reach the memory of all GPUs beside it")
        groups = self._steps.take(self._multicast)
        addresses = [0] * self._size
        for peer, address in zip(self._members, seen[self._rank], strict=True):
            addresses[peer] = address
        for number, (_, refused) in enumerate(groups):
            if refused:
                return tuple(addresses), 0, f"no multicast address: rank {number}: {refused}"
        if not all(address for address, _ in groups):
            return tuple(addresses), 0, "no multicast address: not in these GPUs, or NCCL_NVLS_ENABLE=0"
        self.kind = "windows and multicast"
        return tuple(addresses), groups[self._rank][0], ""

    def close(self, steps: AgreedSteps) -> None:
        # a step, since destroying a communicator waits for the other ranks
        with suppress(AgreedStepFailed, TopoplanError):
            steps.take(self._unmap)
            steps.take(self._give_back)

    def _unmap(self) -> None:
        window, self._window = self._window, None
        with suppress(NcclFailed):
            if window is not None and window.made():
                window.close()

    def _give_back(self) -> None:
        link, memory = self._link, self._memory
        self._link, self._memory = None, 0
        if link is not None and self._given_up.is_set():
            with suppress(NcclFailed):
                link.abort()  # to destroy it would wait for a rank that has not joined
            link = None
        with suppress(NcclFailed):
            if memory:
                self._library.free(memory)
        with suppress(NcclFailed):
            if link is not None:
                link.destroy()

    def _unique_id(self) -> str:
        return self._library.unique_id().hex() if self._rank == self._members[0] else ""

    def _connect(self, unique_id: bytes) -> None:
        place = self._members.index(self._rank)
        try:
            self._link = self._library.connect(len(self._members), place, unique_id)
            self._settle()
        except NcclFailed as error:
            raise NcclFailed(f"{error}{short_of_shared_memory()}") from error

    def _register(self) -> bool:
        assert self._link is not None, "the step before"
        runtime = self._cupy.cuda.runtime
        self._memory = self._library.allocate(self._nbytes)
        runtime.memset(self._memory, 0, self._nbytes)
        runtime.deviceSynchronize()
        self._window = self._link.register(self._memory, self._nbytes)
        self._settle()
        return self._window.made()

    def _settle(self) -> None:
        """Wait until NCCL has finished what was begun, at most as long as a step may take."""
        assert self._link is not None, "the step before"
        end = time.monotonic() + self._steps.timeout
        while not self._link.ready():
            if time.monotonic() > end or self._given_up.is_set():
                raise NcclFailed("nothing, and does not end")
            time.sleep(1e-3)

    def _addresses(self) -> list[int]:
        assert self._window is not None, "made by all"
        return [self._window.address(place) for place in range(len(self._members))]

    def _multicast(self) -> tuple[int, str]:
        """Return the multicast address or 0, and NCCL's reason for refusing one, which the windows do without."""
        assert self._window is not None, "made by all"
        try:
            return self._window.multicast(), ""
        except NcclFailed as error:
            return 0, describe_failure(error)


class CudaArenas:
    """Addresses within a process, and IPC handles between the processes of a host."""

    def __init__(
        self,
        runtime: Any,
        steps: AgreedSteps,
        rank: int,
        domains: tuple[int, ...],
        ranks: Sequence[ArenaPlace],
        nbytes: int,
    ) -> None:
        self._runtime = runtime
        self._steps = steps
        self._rank = rank
        self._ranks = ranks
        self._near = [domain == domains[rank] for domain in domains]
        self._nbytes = nbytes
        self._memory = 0
        self._opened: list[int] = []
        alone = len({(one.host, one.process) for one in ranks}) == len({one.host for one in ranks})
        self.kind = "peer access" if alone else "ipc"

    def open(self) -> tuple[tuple[int, ...], int, str]:
        self._steps.take(self._look)
        given = self._steps.take(self.allocate)
        return tuple(self._steps.take(lambda: self._reach(given))[self._rank]), 0, ""

    def close(self, steps: AgreedSteps) -> None:
        self.unmap()
        with suppress(AgreedStepFailed, TopoplanError):
            steps.take(lambda: None)  # no rank has it mapped any more
            self.free()

    def unmap(self) -> None:
        """Close the handles of other ranks' memory."""
        opened, self._opened = self._opened, []
        for address in opened:
            with suppress(self._runtime.CUDARuntimeError):
                self._runtime.ipcCloseMemHandle(address)

    def free(self) -> None:
        """Free the memory, which no rank has mapped any more."""
        memory, self._memory = self._memory, 0
        with suppress(self._runtime.CUDARuntimeError):
            self._runtime.free(memory)

    def _here(self, peer: int) -> bool:
        """Return whether a rank is in this process."""
        return self._ranks[peer].process == self._ranks[self._rank].process

    def _look(self) -> None:
        device = self._ranks[self._rank].device
        for peer, one in enumerate(self._ranks):
            # device numbers of other processes do not apply here
            if not self._near[peer] or not self._here(peer) or one.device == device:
                continue
            if not self._runtime.deviceCanAccessPeer(device, one.device):
                raise UsageError(f"GPU {device} has no peer access to GPU {one.device} of rank {peer}")

    def allocate(self) -> tuple[int, str]:
        """Allocate the memory on the current GPU; return its address and its handle, if another process needs one."""
        runtime = self._runtime
        self._memory = int(runtime.malloc(self._nbytes))
        runtime.memset(self._memory, 0, self._nbytes)
        runtime.deviceSynchronize()
        others = any(near and not self._here(peer) for peer, near in enumerate(self._near))
        return self._memory, bytes(runtime.ipcGetMemHandle(self._memory)).hex() if others else ""

    def _reach(self, given: Sequence[tuple[int, str]]) -> list[int]:
        return [self._reach_one(peer, given) if near else 0 for peer, near in enumerate(self._near)]

    def reach_most(self, given: Sequence[tuple[int, str]]) -> list[int]:
        """Return the addresses of all arenas for kernels of the current GPU; 0 for arenas that it does not access.

        An address of 0 stands for a vertex without an arena.
        """
        seen = [0] * len(given)
        for peer in (peer for peer, (address, _) in enumerate(given) if address):
            with suppress(self._runtime.CUDARuntimeError):
                seen[peer] = self._reach_one(peer, given)
        return seen

    def _reach_one(self, peer: int, given: Sequence[tuple[int, str]]) -> int:
        address, handle = given[peer]
        if not self._here(peer):
            self._opened.append(int(self._runtime.ipcOpenMemHandle(bytes.fromhex(handle))))
            return self._opened[-1]
        if self._ranks[peer].device != self._ranks[self._rank].device:
            self._enable(self._ranks[peer].device)
        return address

    def _enable(self, other: int) -> None:
        """Let kernels of the current GPU access another one's memory."""
        try:
            self._runtime.deviceEnablePeerAccess(other)
        except self._runtime.CUDARuntimeError as error:
            if getattr(error, "status", None) != ALREADY_ENABLED:
                raise


def _queues(text: str) -> int:
    """Return the streams that CUDA reads from the variable: its default unless the text is a number above 0."""
    return int(text) if text.isdigit() and int(text) else QUEUES_BY_DEFAULT


def _process() -> str:
    return PROCESS


def _host() -> str:
    """Return an id of this host that containers on it share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()

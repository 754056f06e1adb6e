"""Create unnamed memory that the ranks of one host share, and allocate arrays in it.

The lowest rank makes it (`memfd_create`) and the others open it through ``/proc``, so it disappears with the last
process that holds it, however that ends. Its first pages are the control pages (`control_page`); the slots lie behind
them. Linux backs only the pages that are touched, and slots grow without a message, since all ranks know how many a
collective needs.

A rank maps only memory that a rank of its job made: of another process of this user, with the job's random name and
its seals, and of the size that all ranks know. It refuses everything else before a byte is read, written or added.

`RangeAllocator` is first fit; neighbouring free ranges join again. Arrays return their range when they are collected,
at any moment and in any thread, also inside `RangeAllocator.take`. Returning therefore takes no lock: it only notes
the range, and the next allocation sorts it in.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from collectives.peers.control_page import ARENA, PROBE, PROBED, AddressedMemory, ControlPage, HostPlacement
from topoplan.errors import UsageError


class RangeAllocator:
    """A first-fit allocator of offsets in `length` bytes, at multiples of `unit`.

    Examples
    --------
    >>> room = RangeAllocator(4096, unit=512)
    >>> room.take(1000), room.take(1), room.take(4000)
    (0, 1024, None)
    >>> room.give_back(0, 1000)
    >>> room.take(1025), room.take(1024)
    (1536, 0)
    """

    def __init__(self, length: int, *, unit: int) -> None:
        self._unit = unit
        self._free = [(0, length)]
        self._returned: list[tuple[int, int]] = []
        self._taking = threading.Lock()

    def take(self, nbytes: int) -> int | None:
        """Allocate a range and return its start; None if no free range is as long.

        Complexity O(n log n) in the number of free ranges.
        """
        length = self._rounded(nbytes)
        with self._taking:
            while self._returned:
                self._free.append(self._returned.pop())
            free: list[tuple[int, int]] = []
            for start, stop in sorted(self._free):
                if free and free[-1][1] == start:
                    start = free.pop()[0]
                free.append((start, stop))
            self._free = free
            for number, (start, stop) in enumerate(free):
                if stop - start >= length:
                    free[number] = (start + length, stop)
                    return start
        return None

    def give_back(self, start: int, nbytes: int) -> None:
        """Free a range; for finalizers, thread-safe."""
        self._returned.append((start, start + self._rounded(nbytes)))

    def _rounded(self, nbytes: int) -> int:
        return max(-(-nbytes // self._unit), 1) * self._unit


ORDERED = ("x86_64", "AMD64", "i686")
"""Machines that need no fence (names of `platform.machine`): stores and loads are seen in order."""

Gather = Callable[[str], list[str]]  # an allgather of short texts among the ranks; all of them call it

GROWING = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_SEAL", 0)
FINAL = GROWING | getattr(fcntl, "F_SEAL_GROW", 0)
"""Seals of memory that may grow, so no access of a rank lies behind its end, and of memory of one size."""


class Segment:
    """A mapping of the shared memory: `control` bytes of control pages, then slots.

    `descriptor` is closed by `close`; -1 for private memory.
    """

    def __init__(self, descriptor: int, control: int) -> None:
        self._descriptor = descriptor
        self._control = whole_pages(control)
        self._grow(self._control)
        self.control = memoryview(mmap.mmap(descriptor, self._control))
        self._slots = AddressedMemory.of(np.zeros(0, np.uint8))

    def _grow(self, length: int) -> None:
        if self._descriptor >= 0:
            # allocates the last page, and never shrinks memory that another rank has grown meanwhile
            os.posix_fallocate(self._descriptor, length - 1, 1)

    def slots(self, length: int) -> AddressedMemory:
        """Return at least this many bytes of slots, contents undefined; callers have met all other ranks."""
        if len(self._slots.data) < length:
            length = whole_pages(length)
            self._grow(self._control + length)
            offset = self._control if self._descriptor >= 0 else 0
            memory = mmap.mmap(self._descriptor, length, offset=offset)
            self._slots = AddressedMemory.of(np.frombuffer(memory, np.uint8))
        return self._slots

    def close(self) -> None:
        """Release the slots. The control pages stay readable in this process."""
        self._slots = AddressedMemory.of(np.zeros(0, np.uint8))
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Arena:
    """Memory of one rank for arrays that the other ranks of its host see.

    It reserves as many addresses as the machine has memory, and occupies the pages that are touched; pages of
    collected arrays return to the system. Raises `OSError` if the system refuses so many addresses.
    """

    def __init__(self, name: str) -> None:
        length = self.length()
        self.descriptor = create_memory(name, length, FINAL)
        try:
            self._memory = _mapped(self.descriptor, length)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._room = _addressed(self._memory)
        self._free = RangeAllocator(length, unit=mmap.PAGESIZE)
        self._process = os.getpid()

    @staticmethod
    def length() -> int:
        """Return the bytes of an arena of this machine."""
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def array(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Return new memory, contents undefined; None if the arena is full, or in a forked process."""
        if os.getpid() != self._process:
            return None
        start = self._free.take(nbytes)
        if start is None:
            return None
        held = _HeldMemory(self._room.address + start, nbytes)
        about = (self._memory, self._free, self._process, start, nbytes)
        weakref.finalize(held, _release, *about).atexit = False
        return np.asarray(held)

    def offset(self, address: int) -> int:
        """Return the offset of an address, -1 outside the arena."""
        offset = address - self._room.address
        return offset if 0 <= offset < len(self._room.data) else -1

    @property
    def room(self) -> AddressedMemory:
        """The whole memory."""
        return self._room

    def close(self) -> None:
        """Close the descriptor, so that no rank can open it any more; arrays stay valid."""
        os.close(self.descriptor)


class Arenas:
    """The arenas of all ranks of a host, seen from one of them."""

    def __init__(self, control: ControlPage, placement: HostPlacement) -> None:
        self._control = control
        self._placement = placement
        self._own: Arena | None = None
        self._making = threading.Lock()
        self._gives = self._opens = True
        self._rooms: dict[int, AddressedMemory] = {}

    def array(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Return new memory that the other ranks see; None without any."""
        with self._making:
            if self._own is None and self._gives:
                self._gives = False
                with suppress(OSError):
                    self._own = Arena(self._placement.memory)
                    self._gives = True
                    self._rooms[self._placement.place] = self._own.room
                    self._control.announce(ARENA, self._own.descriptor + 1)
            return self._own.array(nbytes) if self._own is not None and self._gives else None

    def offset(self, address: int) -> int:
        """Return the offset of an address in this rank's arena, -1 outside."""
        return -1 if self._own is None else self._own.offset(address)

    def all(self) -> list[AddressedMemory]:
        """Return the arenas of all ranks, by place; empty while a rank has none, or if one cannot be opened."""
        places = range(self._control.ranks)
        if len(self._rooms) < len(places) and self._opens:
            try:
                for place in places:
                    if place not in self._rooms and self._control.word(place, ARENA):
                        self._rooms[place] = self._opened(place)
            except OSError:  # collectives copy through slots instead
                self._opens = False
        return [self._rooms[place] for place in places] if len(self._rooms) == len(places) else []

    def _opened(self, place: int) -> AddressedMemory:
        pid = self._placement.pids[self._placement.members[place]]
        length, number = Arena.length(), self._control.word(place, ARENA) - 1
        descriptor = open_memory(pid, number, self._placement.memory, length, FINAL)
        try:
            return _addressed(_mapped(descriptor, length))
        finally:
            os.close(descriptor)

    def retire(self) -> None:
        """Allocate no more memory: a rank that was given up may still write to the arena."""
        self._gives = False

    def close(self) -> None:
        """Release the other ranks' arenas, and close this rank's own."""
        self._rooms = {}
        self._gives = self._opens = False
        if self._own is not None:
            self._own.close()
            self._own = None


class ProcessMemoryAccess:
    """Whether the ranks of a host may read each other's memory (``process_vm_readv``), seen from one of them.

    Linux allows it between processes of one user, unless ``kernel.yama.ptrace_scope`` or a container's filter forbids
    it.
    """

    def __init__(self, control: ControlPage, placement: HostPlacement) -> None:
        self._control = control
        self._pids = [placement.pids[rank] for rank in placement.members]
        self._probe = np.array([secrets.randbits(62)], dtype=np.int64)
        self._may: bool | None = None
        control.announce(PROBED, int(self._probe[0]))
        control.announce(PROBE, self._probe.ctypes.data)

    def may(self, address: int, nbytes: int) -> bool:
        """Return whether this rank can read all others' memory, and these bytes of its own are readable.

        Access is probed once all ranks have announced their probes.
        """
        if self._may is None:
            places = range(self._control.ranks)
            if not all(self._control.word(place, PROBE) for place in places):
                return False
            self._may = all(self._pids) and all(map(self._reads, places))
        ends = (address, address + nbytes - 1)
        return self._may and all(_read_memory(os.getpid(), end, 1) is not None for end in ends)

    def _reads(self, place: int) -> bool:
        found = _read_memory(self._pids[place], self._control.word(place, PROBE), 8)
        return found is not None and int.from_bytes(found, sys.byteorder) == self._control.word(place, PROBED)


def _read_memory(pid: int, address: int, nbytes: int) -> bytes | None:
    """Return bytes of a process's memory; None if they cannot be read."""
    room = ctypes.create_string_buffer(nbytes)
    vectors = (ctypes.c_size_t * 4)(ctypes.addressof(room), nbytes, address, nbytes)
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    try:
        read = ctypes.CDLL(None).process_vm_readv
    except AttributeError:
        return None
    read.restype = ctypes.c_ssize_t
    return room.raw if read(pid, vectors, one, ctypes.byref(vectors, 16), one, none) == nbytes else None


class _HeldMemory:
    """Memory in numpy's array interface, for as long as an array refers to it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _release(memory: mmap.mmap, free: RangeAllocator, process: int, start: int, nbytes: int) -> None:
    """Give memory that no array refers to any more back to the machine, and to the arena.

    A process that was forked sees the same memory, and must leave it to the one that made the array.
    """
    if os.getpid() == process:
        length = max(whole_pages(nbytes), mmap.PAGESIZE)
        with suppress(OSError):  # then it is used again all the same
            memory.madvise(mmap.MADV_REMOVE, start, length)
        free.give_back(start, nbytes)


def _mapped(descriptor: int, length: int) -> mmap.mmap:
    memory = mmap.mmap(descriptor, length)
    with suppress(OSError):  # fewer, larger pages, where the machine has them for shared memory
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _addressed(memory: mmap.mmap) -> AddressedMemory:
    return AddressedMemory.of(np.frombuffer(memory, np.uint8))


def can_share() -> bool:
    """Return whether this system supports a `Segment`."""
    return hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()


class RefusedMemory(OSError):
    """A peer names something else than memory of the job."""


def memory_name() -> str:
    """Return a new random name of a job's memory, by which its ranks recognize it."""
    return f"topoplan-{secrets.token_hex(8)}"


def whole_pages(nbytes: int) -> int:
    """Return the bytes of the pages that hold so many bytes."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def create_memory(name: str, nbytes: int, seals: int) -> int:
    """Return the file descriptor of new memory of zeros that no path leads to, of mode 600."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_memory(
    pid: int, descriptor: int, name: str, nbytes: int, seals: int, *, mode: int = os.O_RDWR
) -> int:
    """Open memory that another process made by `create_memory` with these arguments, as a file descriptor.

    Nothing else is opened: a path first, whose target is looked at. Raises `OSError` if it is not visible, and
    `RefusedMemory` if it is anything else than this memory.
    """
    path = os.open(f"/proc/{pid:d}/fd/{descriptor:d}", os.O_PATH | os.O_CLOEXEC)
    try:
        found = os.fstat(path)
        target = os.readlink(f"/proc/self/fd/{path}")
        problem = "" if target == f"/memfd:{name} (deleted)" else f"is {target}"
        if not problem and not (stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()):
            problem = f"belongs to user {found.st_uid}"
        if not problem:
            opened = os.open(f"/proc/self/fd/{path}", mode | os.O_CLOEXEC)
            try:
                sealed, size = fcntl.fcntl(opened, fcntl.F_GET_SEALS), os.fstat(opened).st_size
                if sealed & FINAL == seals and size == nbytes:
                    return opened
                problem = f"has {size} bytes and seals {sealed:#x}, not {nbytes} and {seals:#x}"
            except OSError:  # a file on a disk has no seals
                problem = "has no seals"
            os.close(opened)
    finally:
        os.close(path)
    raise RefusedMemory(errno.EPERM, f"descriptor {descriptor} of process {pid} {problem}")


def meet(gather: Gather, *, rank: int, size: int) -> tuple[HostPlacement, Segment]:
    """Share memory with all ranks; calls `gather` twice.

    Raises
    ------
    UsageError
        The ranks do not see each other's memory: they are on different hosts, in different containers, or of different
        users; or rank 0 names something else. Raised on all ranks.
    """
    control = ControlPage.size(size)
    name = memory_name()
    held: list[int] = []
    try:
        if rank == 0 and can_share():
            held.append(create_memory(name, whole_pages(control), GROWING))
        placement = _met(gather, held, name, rank=rank, size=size)
        return placement, Segment(held[0], control)
    except BaseException:  # not all ranks share it
        for descriptor in held:
            os.close(descriptor)
        raise


def _met(gather: Gather, held: list[int], name: str, *, rank: int, size: int) -> HostPlacement:
    """Share memory as `meet`; ``held`` gets the descriptor of the memory once this rank has one."""
    texts = gather(f"{os.getpid()} {held[0] if held else -1} {name}")
    try:
        ranks = [(int(pid), int(number), name) for pid, number, name in map(str.split, texts)]
        pid, number, name = ranks[0]
        if max(max(one[:2]) for one in ranks) >= 2**31:
            raise ValueError("a number is too large")
    except (ValueError, IndexError) as error:
        raise UsageError(
            f"rank {rank} must get process, descriptor and name of the ranks' memory from rank 0, got other data "
            f"({error}); another program may listen at the rendezvous"
        ) from error
    fault = "" if number >= 0 else "this system has no memory without a name (memfd_create)"
    if rank and not fault:
        try:
            held.append(open_memory(pid, number, name, whole_pages(ControlPage.size(size)), GROWING))
        except RefusedMemory as error:
            fault = f"it refuses the memory that rank 0 names: {error.strerror}"
        except OSError as error:
            fault = f"it cannot see the memory of rank 0 ({error.strerror})"
    for other, text in {**dict(enumerate(gather(fault))), rank: fault}.items():
        if text:
            raise UsageError(f"ranks cannot share memory: rank {other} says {text}; use another back end")
    return HostPlacement(rank, (0,) * size, tuple(pid for pid, _, _ in ranks), name)


def lock_fence() -> Callable[[], None]:
    """Return a full memory barrier: acquiring and releasing a lock of the threads' library is one."""
    lock = threading.Lock()

    def fence() -> None:
        with lock:
            pass

    return fence

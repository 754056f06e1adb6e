"""Control pages, arenas and the watchdog of ranks that share memory."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from collectives.peers.control_page import ControlPage, HostPlacement, RankFailure
from collectives.peers.control_plane import Signature
from collectives.peers.peer_watchdog import PeerWatchdog
from collectives.peers.shared_memory import FINAL, GROWING, Arenas, create_memory, meet, whole_pages
from collectives.peers.shared_memory_control_plane import SharedMemoryControlPlane
from topoplan.errors import BackendError, UsageError

FORKED = """
import gc, os
from collectives.peers.shared_memory import Arena
arena = Arena("topoplan-of-a-test")
array = arena.array(1 << 20)
array[:] = 7
child = os.fork()
if child == 0:
    del array
    gc.collect()
    os._exit(arena.array(8) is not None)
assert os.waitpid(child, 0)[1] == 0
assert array.min() == 7
"""


def arenas() -> Arenas:
    """Of two ranks, as the first of them sees them."""
    return Arenas(
        ControlPage(memoryview(bytearray(ControlPage.size(2))), 0), HostPlacement(0, (0, 0), (0, 0))
    )


def test_a_forked_process_leaves_the_arrays_of_its_parent_alone() -> None:
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=60)


def test_threads_that_ask_at_once_get_memory_of_their_own() -> None:
    memory = arenas()
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(memory.array, [100] * 400))
    places = [one.ctypes.data for one in made if one is not None]
    assert len(set(places)) == len(made) == 400


def test_who_was_given_up_is_told_of_no_more_memory_and_without_all_arenas_there_are_none() -> None:
    memory = arenas()
    array = memory.array(8)
    assert array is not None
    assert memory.offset(array.ctypes.data) == 0
    assert memory.all() == []  # the other rank has none
    memory.retire()
    assert memory.array(8) is None
    array[:] = 1
    memory.close()
    assert memory.offset(array.ctypes.data) == -1
    assert array.sum() == 8


@contextmanager
def holder() -> Iterator[int]:
    """Yield the number of another process that holds the descriptors of this one."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    try:
        yield pid
    finally:
        os.close(write)
        os.waitpid(pid, 0)


def open_files() -> list[str]:
    """The open descriptors of this process; garbage of earlier tests is collected first."""
    gc.collect()
    return sorted(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_meet_keep_no_memory_open(rank: int) -> None:
    """Another rank dies between the two words that they tell each other."""
    other = create_memory("topoplan-a", whole_pages(ControlPage.size(2)), GROWING)
    with holder() as pid:
        before = open_files()
        said: list[str] = []

        def gather(text: str) -> list[str]:
            said.append(text)
            if len(said) == 2:
                raise BackendError("a rank has died")
            return [text if rank == 0 else f"{pid} {other} topoplan-a", text]

        with pytest.raises(BackendError, match="has died"):
            meet(gather, rank=rank, size=2)
        assert said[1] == ""
        assert open_files() == before
    os.close(other)


NAME = "topoplan-0123456789abcdef"


def plain_memory() -> int:
    """Memory of the right name and size without seals."""
    descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, whole_pages(ControlPage.size(2)))
    return descriptor


def file_of(folder: str | Path) -> Callable[[], int]:
    """Opens a file of 400,000 bytes without a name, to read and write."""

    def opened() -> int:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"private" * 60000)
            file.truncate(400_000)
            return os.dup(file.fileno())

    return opened


NAMED: dict[str, tuple[Callable[[], int], str]] = {
    "a file": (file_of(tempfile.gettempdir()), "is /"),
    "a file in memory": (file_of("/dev/shm"), "is /dev/shm/"),
    "a fifo": (lambda: os.open(f"/proc/self/fd/{os.pipe()[0]}", os.O_RDWR), "is pipe:"),
    "a terminal": (lambda: os.open("/dev/null", os.O_RDWR), "is /dev/null"),
    "memory without seals": (plain_memory, "seals 0x0, not"),
    "memory that may grow and shrink": (
        lambda: create_memory(NAME, whole_pages(ControlPage.size(2)), fcntl.F_SEAL_SEAL),
        "seals 0x1, not",
    ),
    "memory of another size": (lambda: create_memory(NAME, 4096, GROWING), "has 4096 bytes"),
    "memory of another job": (
        lambda: create_memory("topoplan-b", whole_pages(ControlPage.size(2)), GROWING),
        "is /memfd:topoplan-b",
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("own", [True, False], ids=["of the victim", "of another process"])
@pytest.mark.parametrize("thing", NAMED)
def test_a_rank_maps_nothing_but_the_memory_of_its_job(thing: str, own: bool) -> None:
    """An impostor as rank 0 names a process and a descriptor, and says that all is well."""
    opened, problem = NAMED[thing]
    descriptor = opened()
    before = os.fstat(descriptor)
    content = os.pread(descriptor, before.st_size, 0) if before.st_size else b""
    with ExitStack() as stack:
        pid = os.getpid() if own else stack.enter_context(holder())
        answers = [[f"{pid} {descriptor} {NAME}", f"{os.getpid()} -1 topoplan-b"], ["", ""]]
        kept = open_files()
        with pytest.raises(UsageError) as refused:
            meet(lambda text: answers.pop(0), rank=1, size=2)
        assert open_files() == kept
    told = str(refused.value)
    assert "rank 1 says it refuses the memory that rank 0 names" in told
    assert problem in told
    assert "\n" not in told
    after = os.fstat(descriptor)
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert (os.pread(descriptor, after.st_size, 0) if after.st_size else b"") == content
    os.close(descriptor)


@pytest.mark.parametrize(
    "answer", ["", "1 2", "../.. 3 x", "1 2 3 4", "[1, 2, 3]", "[" * 100_000, "Infinity 1 x", f"{10**99} 1 x"]
)
def test_a_rank_reads_no_place_of_memory_out_of_anything_else(answer: str) -> None:
    with pytest.raises(UsageError, match=r"rank 1 must get process, descriptor and name .* from rank 0, got"):
        meet(lambda text: [answer, text], rank=1, size=2)


def test_memory_neither_shrinks_nor_changes_its_seals() -> None:
    growing, final = create_memory(NAME, 8192, GROWING), create_memory(NAME, 8192, FINAL)
    for descriptor in (growing, final):
        assert os.fstat(descriptor).st_mode & 0o777 == 0o600
        for change in (
            lambda one: os.ftruncate(one, 4096),
            lambda one: fcntl.fcntl(one, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        ):
            with pytest.raises(PermissionError):
                change(descriptor)
    os.posix_fallocate(growing, 8192, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(final, 16384)
    os.close(growing)
    os.close(final)


needs_pidfd = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux tells of the end of processes")


def watch_over(pids: tuple[int, ...]) -> tuple[PeerWatchdog, threading.Event]:
    """The page of rank 0, and the words that its alarm sets."""
    control = ControlPage(memoryview(bytearray(ControlPage.size(len(pids)))), 0)
    alarmed = threading.Event()
    control.alarm = alarmed.set
    return PeerWatchdog(control, HostPlacement(0, (0,) * len(pids), pids), timeout=1.0), alarmed


@needs_pidfd
def test_the_alarm_is_raised_as_soon_as_a_process_ends_and_nothing_stays_open() -> None:
    before = open_files()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        watch, alarmed = watch_over((os.getpid(), other.pid))
        assert watch.see_deaths()
        assert not alarmed.wait(0.05)
        other.kill()
        assert alarmed.wait(10)
        watch.close()
        watch.close()
    for thread in threading.enumerate():
        if thread.name == "topoplan-deaths":
            thread.join(10)
    assert open_files() == before


@needs_pidfd
def test_without_word_from_the_system_nobody_relies_on_it() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    before = open_files()
    watch, _ = watch_over((os.getpid(), os.getppid(), gone.pid))
    assert not watch.see_deaths()
    assert open_files() == before


def test_a_rank_that_was_stopped_hears_that_the_others_have_given_it_up() -> None:
    """It finds the notes of all others, which they have shown before they waited for its own in vain."""
    memory, about = (
        memoryview(bytearray(ControlPage.size(2))),
        Signature(1, "", 2, "allreduce", None, "sum", "", 3, 16),
    )
    awake, stopped = (
        SharedMemoryControlPlane(ControlPage(memory, rank), HostPlacement(rank, (0, 0), (0, 0)), timeout=0.1)
        for rank in range(2)
    )
    with pytest.raises(BackendError, match="peer 1, step 0: the peer makes no progress"):
        awake.agree(about, timeout=0.1)
    with pytest.raises(BackendError, match="rank 0 noticed: the peer makes no progress"):
        stopped.agree(about, timeout=0.1)


def test_all_ranks_tell_the_earliest_of_several_failures() -> None:
    memory = memoryview(bytearray(ControlPage.size(3)))
    pages = [ControlPage(memory, rank) for rank in range(3)]
    for rank, time in ((0, 30), (1, 10), (2, 20)):
        pages[rank].write_failure(RankFailure(rank, 2 - rank, 0, f"noticed at {time}", True, time))
    assert {page.failure() for page in pages} == {RankFailure(1, 1, 0, "noticed at 10", True, 10)}

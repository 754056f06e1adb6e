"""Control pages, arenas and the watchdog of ranks that share memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from collectives.peers.control_page import ControlPage, HostPlacement, RankFailure
from collectives.peers.control_plane import Signature
from collectives.peers.peer_watchdog import PeerWatchdog
from collectives.peers.shared_memory import Arenas, create_memory, meet
from collectives.peers.shared_memory_control_plane import SharedMemoryControlPlane
from topoplan.errors import BackendError

FORKED = """
import gc, os
from collectives.peers.shared_memory import Arena
arena = Arena()
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


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_meet_keep_no_memory_open(rank: int) -> None:
    """Another rank dies between the two words that they tell each other."""
    other = create_memory()
    known = os.fstat(other)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    file = [known.st_dev, known.st_ino, boot]
    before = sorted(os.listdir("/proc/self/fd"))
    said: list[str] = []

    def gather(text: str) -> list[str]:
        said.append(text)
        if len(said) == 2:
            raise BackendError("a rank has died")
        first = {"pid": os.getpid(), "descriptor": other, "file": file}
        return [text if rank == 0 else json.dumps(first), text]

    with pytest.raises(BackendError, match="has died"):
        meet(gather, rank=rank, size=2)
    assert said[1] == ""
    assert sorted(os.listdir("/proc/self/fd")) == before
    os.close(other)


needs_pidfd = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux tells of the end of processes")


def watch_over(pids: tuple[int, ...]) -> tuple[PeerWatchdog, threading.Event]:
    """The page of rank 0, and the words that its alarm sets."""
    control = ControlPage(memoryview(bytearray(ControlPage.size(len(pids)))), 0)
    alarmed = threading.Event()
    control.alarm = alarmed.set
    return PeerWatchdog(control, HostPlacement(0, (0,) * len(pids), pids), timeout=1.0), alarmed


@needs_pidfd
def test_the_alarm_is_raised_as_soon_as_a_process_ends_and_nothing_stays_open() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
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
    assert sorted(os.listdir("/proc/self/fd")) == before


@needs_pidfd
def test_without_word_from_the_system_nobody_relies_on_it() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    before = len(list(Path("/proc/self/fd").iterdir()))
    watch, _ = watch_over((os.getpid(), os.getppid(), gone.pid))
    assert not watch.see_deaths()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


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

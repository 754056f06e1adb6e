"""Memory for arrays that the other ranks of a host see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from collectives.peers.control_page import ControlPage, HostPlacement
from collectives.peers.shared_memory import Arenas, create_memory, meet
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

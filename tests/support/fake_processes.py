"""The stand-ins for CuPy and NCCL in a process of its own: NCCL's messages go by files in a folder of all ranks.

A ``sitecustomize`` on the path of Python calls `install` (see `customized`), so that ``import cupy`` gives the fake in
every process that is started with it. What a process has done to the GPUs of its host is printed when it ends.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import secrets
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from tests.support import fake_gpu
from tests.support.fake_nccl import Message, World
from tests.support.fake_streams import Machine

FOLDER, GPUS, ONE_EACH = "FAKE_NCCL_FOLDER", "FAKE_GPUS", "FAKE_ONE_GPU_EACH"
"""The variables that say where messages lie, how many GPUs the host has, and whether a process sees its own alone."""


def customized(folder: Path, *, gpus: int, one_each: bool) -> dict[str, str]:
    """Return the variables with which a process of Python has the stand-ins."""
    (folder / "sitecustomize.py").write_text("from tests.support.fake_processes import install\ninstall()\n")
    (folder / "messages").mkdir(exist_ok=True)
    return {
        "PYTHONPATH": str(folder),
        FOLDER: str(folder / "messages"),
        GPUS: str(gpus),
        ONE_EACH: str(int(one_each)),
    }


def install() -> None:
    """Make ``import cupy`` and nccl4py give the fakes in this process."""
    machine = Machine(int(os.environ[GPUS]))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if os.environ[ONE_EACH] == "1":
        machine.gpus, machine.first = 1, local
    else:
        machine.exclusive = {*range(machine.gpus)} - {local % machine.gpus}
    machine.ipc = False  # no process reaches the memory of another one
    machine.numbers = iter(lambda: secrets.randbits(64), None)
    folder = Path(os.environ[FOLDER])
    machine.make_world = lambda unique_id, size: FileWorld(size, folder / unique_id[-8:].hex())
    fake_gpu.install(pytest.MonkeyPatch(), machine)

    def tell() -> None:
        contexts = sorted(machine.first + device for device in machine.contexts)
        print(f"rank {os.environ.get('RANK')}: contexts {contexts}, misuses {machine.misuses}", flush=True)

    if any("nccl_rank" in word for word in sys.orig_argv):
        atexit.register(tell)


class FileWorld(World):
    """All communicators of one unique id, each in a process."""

    def __init__(self, size: int, folder: Path) -> None:
        super().__init__(size)
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.numbers: Counter[tuple[int, int]] = Counter()
        """Messages of a pair that this rank has sent or received."""
        self.on_their_way: list[tuple[Path, Message]] = []

    def come(self, rank: int) -> bool:
        place = self.folder / f"here-{rank}"
        new = not place.exists()
        place.touch()
        return new

    def complete(self) -> bool:
        return all((self.folder / f"here-{rank}").exists() for rank in range(self.size))

    def call(self, sides: Iterable[tuple[str, int, int]]) -> None:
        for kind, rank, peer in sides:
            (self.folder / f"{kind}-{rank}-{peer}").touch()

    def called(self, sides: Iterable[tuple[str, int, int]]) -> bool:
        return all((self.folder / f"{kind}-{rank}-{peer}").exists() for kind, rank, peer in sides)

    def match(self) -> None:
        """Write what is sent, take what has come; a message has moved when the receiver has taken its file away."""
        for pair, sent in self.sends.items():
            while sent:
                one = sent.popleft()
                place = self._place(pair)
                self.numbers[pair] += 1
                place.with_suffix(".part").write_bytes(self._head(one) + _memory(one).tobytes())
                place.with_suffix(".part").rename(place)
                self.on_their_way.append((place, one))
        for place, one in self.on_their_way:
            one.moved = not place.exists()
        self.on_their_way = [(place, one) for place, one in self.on_their_way if not one.moved]
        for pair, wanted in self.receives.items():
            while wanted and (place := self._place(pair)).exists():
                one = wanted.popleft()
                data = place.read_bytes()
                assert data[:16] == self._head(one), f"{pair}: another length, or another capture"
                _memory(one)[:] = np.frombuffer(data, dtype=np.uint8, offset=16)
                self.numbers[pair] += 1
                place.unlink()
                one.moved = True

    def _head(self, one: Message) -> bytes:
        capture = -1 if one.capture is None else one.capture
        return one.nbytes.to_bytes(8, "little") + capture.to_bytes(8, "little", signed=True)

    def _place(self, pair: tuple[int, int]) -> Path:
        source, target = pair
        return self.folder / f"{source}-{target}-{self.numbers[pair]}"


def _memory(one: Message) -> np.ndarray:
    return np.frombuffer((ctypes.c_char * one.nbytes).from_address(one.address), dtype=np.uint8)

"""An allgather of texts among processes through a folder, for tests."""

from __future__ import annotations

import os
import time
from pathlib import Path


class FileGather:
    """Call it with a text; get those of all ranks."""

    def __init__(self, folder: str | Path, rank: int, size: int) -> None:
        self._folder = Path(folder)
        self._rank = rank
        self._size = size
        self._calls = 0

    def __call__(self, text: str) -> list[str]:
        self._calls += 1
        part = self._folder / f"{self._calls}.{self._rank}.part"
        part.write_text(text)
        part.replace(self._folder / f"{self._calls}.{self._rank}")
        names = [self._folder / f"{self._calls}.{peer}" for peer in range(self._size)]
        deadline = time.monotonic() + 30
        while not all(os.path.exists(name) for name in names):
            if time.monotonic() > deadline:
                raise TimeoutError("not all ranks came")
            time.sleep(0.005)
        return [name.read_text() for name in names]

"""Load samples through two caches, decoded in memory and raw in files, and read ahead of the trainer.

Nothing is evicted. If every epoch draws a fresh permutation, a cache of a part c of the samples without eviction hits
in a part c of all reads; one that evicts the least recently used hits in c + (1 - c) ln(1 - c): 0.15 in place of 0.5 at
half the samples. With p threads and reads of s seconds a step takes max(compute, batch s / p) once one batch is ready
ahead.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar

from topoplan.errors import UsageError

Sample = TypeVar("Sample")


class CachedLoader(Generic[Sample]):
    """Load samples by their numbers.

    ``fetch`` reads the raw bytes of a sample from the slow store, ``decode`` makes the sample of them. ``memory`` and
    ``files`` are the samples that memory and ``folder`` hold; ``threads`` read ahead. `reads` counts samples from
    ``memory``, ``files`` and ``store``.

    >>> loader = CachedLoader(lambda number: bytes([number]), lambda raw: raw[0] * 10, memory=2)
    >>> with loader:
    ...     batches = list(loader.batches([[0, 1, 2], [2, 1, 0]]))
    >>> batches, dict(sorted(loader.reads.items()))
    ([[0, 10, 20], [20, 10, 0]], {'memory': 2, 'store': 4})
    """

    def __init__(
        self,
        fetch: Callable[[int], bytes],
        decode: Callable[[bytes], Sample],
        *,
        memory: int,
        folder: str | Path | None = None,
        files: int = 0,
        threads: int = 1,
    ) -> None:
        if min(memory, files) < 0 or threads < 1:
            raise UsageError(
                f"{memory} samples in memory, {files} in files and {threads} threads: give 0, 0 and 1 or more"
            )
        if files and folder is None:
            raise UsageError(f"{files} samples in files need a folder; give one")
        self.reads: Counter[str] = Counter()
        self._fetch, self._decode = fetch, decode
        self._memory, self._files = memory, files
        self._folder = None if folder is None else Path(folder)
        self._decoded: dict[int, Sample] = {}
        self._claimed: set[int] = set()
        self._kept: dict[int, Path] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="loader")

    def get(self, number: int) -> Sample:
        """Return a sample from the nearest place that has it, and cache it on the way if there is room."""
        with self._lock:
            if number in self._decoded:
                self.reads["memory"] += 1
                return self._decoded[number]
            path = self._kept.get(number)
            self.reads["store" if path is None else "files"] += 1
        raw = self._fetch(number) if path is None else path.read_bytes()
        if path is None and self._folder is not None:
            self._keep(number, raw)
        sample = self._decode(raw)
        with self._lock:
            if len(self._decoded) < self._memory:
                self._decoded.setdefault(number, sample)
        return sample

    def _keep(self, number: int, raw: bytes) -> None:
        """Write a raw sample to the folder if there is room; it counts when the file is complete."""
        assert self._folder is not None
        with self._lock:
            if number in self._claimed or len(self._claimed) >= self._files:
                return
            self._claimed.add(number)
        path = self._folder / f"{number}.sample"
        path.write_bytes(raw)
        with self._lock:
            self._kept[number] = path

    def batches(self, order: Iterable[Sequence[int]], *, ahead: int = 2) -> Iterator[list[Sample]]:
        """Yield batches in the given order, with ``ahead`` batches read ahead; errors of a sample are raised with its
        batch.
        """
        under_way: deque[list[Future[Sample]]] = deque()
        try:
            for numbers in order:
                under_way.append([self._threads.submit(self.get, number) for number in numbers])
                if len(under_way) > ahead:
                    yield [one.result() for one in under_way.popleft()]
            while under_way:
                yield [one.result() for one in under_way.popleft()]
        finally:
            for batch in under_way:
                for one in batch:
                    one.cancel()

    def close(self) -> None:
        """Wait for running reads; files stay."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> CachedLoader[Sample]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        total = sum(self.reads.values()) or 1
        parts = (f"{self.reads[place] / total:.0%} from {place}" for place in ("memory", "files", "store"))
        return f"{sum(self.reads.values())} samples read: " + ", ".join(parts)

"""The bytes that collectives have moved between ranks, counted from the rows that the back end was given to run.

A row is a chunk that crosses a tree edge once. Back ends that elide copies between ranks that share memory move less.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import numpy as np

from collectives.lowering.transfer_table import TransferTable


class Traffic:
    """A count of bytes by sender and receiver.

    Parameters
    ----------
    ranks : tuple of int
        Those of this process: what others send among themselves is not counted.

    Examples
    --------
    >>> import topoplan
    >>> from collectives import lower
    >>> traffic = Traffic((0, 1))
    >>> traffic.add(lower(topoplan.plan(topoplan.load("dgx-1v"), gpus=[4, 7]), 100, chunk_elements=32), itemsize=4)
    >>> traffic.sent
    {(0, 1): 400, (1, 0): 400}
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = frozenset(ranks)
        self._bytes: Counter[tuple[int, int]] = Counter()

    def add(self, table: TransferTable, *, itemsize: int) -> None:
        """Count what a collective moves."""
        for (source, destination, _), elements in zip(table.queues, _elements(table), strict=True):
            if source in self._ranks:
                self._bytes[source, destination] += elements * itemsize

    @property
    def sent(self) -> dict[tuple[int, int], int]:
        """Bytes by (source, destination), in order."""
        return dict(sorted(self._bytes.items()))


@lru_cache(maxsize=64)
def _elements(table: TransferTable) -> tuple[int, ...]:
    """Elements that pass every queue."""
    moved = np.zeros(len(table.queues), dtype=np.int64)
    np.add.at(moved, table.queue, table.stop - table.start)
    return tuple(moved.tolist())

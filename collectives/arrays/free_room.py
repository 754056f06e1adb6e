"""Which parts of a memory are free: the first that fits is taken, and neighbours that come back join again.

Arrays give their part back when they are collected, at any moment and in any thread, also inside `FreeRoom.take`. So
giving back takes no lock: it only notes the part, and the next one who asks for room sorts it in.
"""

from __future__ import annotations

import threading


class FreeRoom:
    """The free parts of a memory, as offsets.

    Parameters
    ----------
    length : int
        Bytes of the memory.
    unit : int
        Every part starts at a multiple of so many bytes.

    Examples
    --------
    >>> room = FreeRoom(4096, unit=512)
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
        """Where so many bytes are free, which they are no longer; None where no part is as long.

        Complexity O(n log n) in the number of free parts.
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
        """Let a part be taken again; for finalizers, from any thread."""
        self._returned.append((start, start + self._rounded(nbytes)))

    def _rounded(self, nbytes: int) -> int:
        return max(-(-nbytes // self._unit), 1) * self._unit

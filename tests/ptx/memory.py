"""Memory of kernels of PTX text: arrays at addresses that know their bounds, and bytes that ranks share."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptx.text import ADDRESS

Array = NDArray[Any]

RANGE = np.dtype(
    [
        ("base", np.uint64),
        ("size", np.uint64),
        ("host", np.uint64),
        ("written", np.uint64),
        ("writable", np.int64),
        ("followed", np.int64),
        ("cells", np.uint64),
        ("place", np.uint64),
        ("proxy", np.int64),
        ("replicas", np.uint64),
        ("replica_count", np.int64),
        ("bytes_read", np.uint64),
        ("bytes_stored", np.uint64),
    ]
)
"""As in ``launch.h``: an array at its address, and its bytes among those that ranks share."""

NONE: Array = np.zeros(0, dtype=RANGE)


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """An array of a `Memory`: its address there, and which of its bytes somebody has written, or None for all.

    Of a multicast address the `replicas` are the arrays behind it, one of each rank, the first of them `array`.
    """

    name: str
    array: Array
    address: int
    writable: bool
    written: NDArray[np.uint8] | None
    replicas: tuple[Array, ...] = ()


@dataclass(slots=True)
class Memory:
    """Arrays that kernels may reach, each at an address of its own, far from the next."""

    arrays: list[Placed] = field(default_factory=list)
    end: int = 1 << 32

    def put(
        self, name: str, array: Array, *, writable: bool = True, written: bool = True, shift: int = 0
    ) -> int:
        """Make an array known; its address lies `shift` bytes behind a multiple of 512.

        What a kernel stores is in the array at once. Where nothing is `written`, only the kernel's own stores are read.
        """
        assert array.flags.c_contiguous
        address = self.end + shift
        bytes_ = None if written else np.zeros(max(array.nbytes, 1), dtype=np.uint8)
        self.arrays.append(Placed(name, array, address, writable, bytes_))
        self.end = -(-(address + array.nbytes) // 512) * 512 + (1 << 20)
        return address

    def put_multicast(self, name: str, arrays: Sequence[Array]) -> int:
        """Make one address of the same bytes of all ranks, for multimem instructions only."""
        assert len({one.nbytes for one in arrays}) == 1
        address = self.put(name, arrays[0])
        self.arrays[-1] = replace(self.arrays[-1], replicas=tuple(arrays))
        return address

    def table(self) -> Array:
        """Rows of `RANGE`, each array by itself."""
        rows = np.zeros(len(self.arrays), dtype=RANGE)
        for number, (row, one) in enumerate(zip(rows, self.arrays, strict=True)):
            row["base"], row["size"], row["host"] = one.address, one.array.nbytes, one.array.ctypes.data
            row["written"] = 0 if one.written is None else one.written.ctypes.data
            row["writable"] = row["followed"] = one.writable
            row["cells"], row["proxy"], row["place"] = number, ADDRESS, one.address % 16
        return rows


def memories(count: int) -> list[Memory]:
    """A memory for each rank, where no address of one is an address of another."""
    return [Memory(end=(rank + 1) << 40) for rank in range(count)]


def _bytes_of(array: Array) -> tuple[int, int]:
    """Where an array begins and ends on the host."""
    begin = int(array.__array_interface__["data"][0])
    return begin, begin + array.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """The bytes of all ranks' arrays: areas that overlap no other, and in each which bytes somebody has written."""

    starts: list[int]
    written: list[NDArray[np.uint8]]
    writable: list[bool]
    proxies: bool  # whether some bytes have several addresses on one rank
    tables: list[Array] = field(default_factory=list)  # that rows point to

    @staticmethod
    def of(memories: Sequence[Memory]) -> Shared:
        placed = [one for memory in memories for one in memory.arrays]
        every = sorted(_bytes_of(array) for one in placed for array in (one.array, *one.replicas))
        ends: list[list[int]] = []
        for begin, end in every:
            word = begin // 8 * 8
            if ends and word < ends[-1][1]:
                ends[-1][1] = max(ends[-1][1], end)
            else:
                ends.append([word, end])
        shared = Shared(
            [begin for begin, _ in ends],
            [np.ones(end - begin + 1, dtype=np.uint8) for begin, end in ends],
            [False] * len(ends),
            any(one.replicas for one in placed) or any(_aliases(memory) for memory in memories),
        )
        for one in placed:
            for array in (one.array, *one.replicas):
                shared.writable[shared.area(array)] |= one.writable
            if one.written is not None:
                shared.part(one.array)[:] = 0
        for one in placed:
            if one.written is not None:
                shared.part(one.array)[:] |= one.written[: one.array.nbytes]
        return shared

    @property
    def areas(self) -> int:
        return len(self.starts)

    def area(self, array: Array) -> int:
        return bisect_right(self.starts, _bytes_of(array)[0]) - 1

    def part(self, array: Array) -> NDArray[np.uint8]:
        """Which bytes of an array are written."""
        area = self.area(array)
        first = _bytes_of(array)[0] - self.starts[area]
        return self.written[area][first : first + array.nbytes]

    def row(
        self,
        array: Array,
        *,
        base: int = 0,
        writable: bool = True,
        proxy: int = ADDRESS,
        replicas: Array = NONE,
    ) -> tuple[int, ...]:
        """An array as a row of `RANGE`."""
        area, (begin, end) = self.area(array), _bytes_of(array)
        written = self.part(array).ctypes.data
        shared = (self.writable[area], area, begin - self.starts[area], proxy)
        several = (replicas.ctypes.data, len(replicas)) if len(replicas) else (0, 0)
        return base, end - begin, begin, written, writable, *shared, *several, 0, 0

    def table(self, memory: Memory) -> Array:
        """A memory's arrays as rows of `RANGE`."""
        rows = []
        proxies = _aliases(memory)
        for one in memory.arrays:
            host = _bytes_of(one.array)[0]
            if (one.address - host) % 8:
                raise ValueError(
                    f"{one.name} lies at {host % 8} of 8 bytes and its address at {one.address % 8}: give it a shift"
                )
            replicas = NONE
            if one.replicas:
                replicas = np.array([self.row(array) for array in one.replicas], dtype=RANGE)
                self.tables.append(replicas)
            proxy = ADDRESS + proxies.get(one.address, 0)
            rows.append(
                self.row(one.array, base=one.address, writable=one.writable, proxy=proxy, replicas=replicas)
            )
        return np.array(rows, dtype=RANGE)

    def tell(self, memories: Sequence[Memory]) -> None:
        """Tell the memories what has been written."""
        for memory in memories:
            for one in memory.arrays:
                if one.written is not None:
                    one.written[: one.array.nbytes] = self.part(one.array)


def _aliases(memory: Memory) -> dict[int, int]:
    """Addresses of arrays that share bytes with others before them, each with a number that those have not."""
    found: dict[int, int] = {}
    own = sorted((*_bytes_of(one.array), one.address) for one in memory.arrays if not one.replicas)
    near: list[tuple[int, int]] = []  # ends and numbers of those that begin before
    for begin, end, address in own:
        near = [one for one in near if begin < one[0]]
        number = next(number for number in range(len(near) + 1) if all(number != one[1] for one in near))
        near.append((end, number))
        if number:
            found[address] = number
    assert ADDRESS + max(found.values(), default=0) < 16, "too many addresses of the same bytes"
    return found

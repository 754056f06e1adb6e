"""Sum sparse contributions at owners that a hash of the index gives: push to the owners, sum there, pull the sums back.

As ZEN (OSDI 2025): the hash depends on the index alone, so all ranks know every owner without a message, and entries
that lie together, as rows of an embedding or one large layer, spread over all owners. Ranges would give them to one.

1. A rank selects its largest entries and sends each to its owner, by an all-to-all of equal blocks. The fullest block
   sets their length, which a short gather of counts tells before.
2. An owner adds what comes in the order of the ranks: the sums have the bits of gathered pairs.
3. An owner sends the sums that are not zero to all ranks, by an allgather of equal messages. They hold values, and
   either a bitmap over the owner's own elements or their indices, whichever is shorter. All bitmaps together have a bit
   for each element of the gradient. With a wire format they hold packed indices, which take at most about as many bits.

The hash is of blocks of `BLOCK` elements, and indices count within an owner's own elements. Blocks below 128 have the
owners of Fibonacci hashing, (number 2654435761 mod 2^32) ranks / 2^32; larger numbers are mixed first, since elements
whose distance is a Fibonacci number, as of one column of a matrix, would have one owner for long. All is on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
from numpy.typing import NDArray

from collectives.sparse.entry_arrays import (
    Entries,
    EntryArrays,
    Line,
    message_bytes,
    place_bytes,
)
from collectives.sparse.exchanges import Select, sum_line
from collectives.sparse.residuals import Residuals
from collectives.sparse.selection.topk import index_type
from collectives.tables.numpy_arrays import ArrayLibrary

if TYPE_CHECKING:
    from collectives.sparse.codec import WireFormat

Bytes = NDArray[np.uint8]

BLOCK = 8
"""Elements that follow one another and have one owner."""

MULTIPLIER = np.uint32(2654435761)
"""2^32 over the golden ratio (Knuth, volume 3, section 6.4)."""

MIXER = np.uint32(0x85EBCA6B)
"""Odd multiplier of the numbers' upper bits."""

UNMIXED = 7  # bits of the numbers that are not mixed

Exchange = Callable[[list[Bytes]], list[Bytes]]
"""Takes a line of bytes of each rank of this process, and returns what a collective gives them."""


def hashed_owners(numbers: NDArray[Any], ranks: int) -> NDArray[np.int64]:
    """Return the owners of blocks by their numbers, (n,) integers from 0 on.

    >>> np.bincount(hashed_owners(np.arange(100), 4)).tolist()
    [27, 24, 25, 24]
    """
    wide = np.asarray(numbers).astype(np.uint64)
    low = (wide ^ (wide >> np.uint64(32))).astype(np.uint32)
    hashed = (low ^ ((low >> np.uint32(UNMIXED)) * MIXER)) * MULTIPLIER
    owners: NDArray[np.int64] = (hashed.astype(np.uint64) * np.uint64(ranks) >> np.uint64(32)).astype(
        np.int64
    )
    return owners


class OwnerMap:
    """The owner of each element of a gradient, and the place of each element among those of its owner.

    `sizes` are the elements of each owner.

    >>> owners = OwnerMap(100, 4)
    >>> owners.sizes, owners.owners_of(np.array([0, 7, 8, 99])).tolist()
    ((32, 20, 24, 24), [0, 0, 2, 1])
    >>> owners.elements(2, owners.places(np.array([8, 9]))).tolist()
    [8, 9]
    """

    def __init__(self, size: int, ranks: int) -> None:
        blocks = -(-size // BLOCK)
        kind = index_type(size)
        self._owner = hashed_owners(np.arange(blocks), ranks).astype(np.uint8 if ranks <= 256 else np.uint32)
        counts = np.bincount(self._owner, minlength=ranks)
        order = np.argsort(self._owner, kind="stable").astype(kind)
        starts = np.cumsum(counts) - counts
        self._own = [order[start : start + count] for start, count in zip(starts, counts, strict=True)]
        self._place = np.empty(blocks, kind)
        self._place[order] = np.arange(blocks) - np.repeat(starts, counts)
        missing = blocks * BLOCK - size
        last = int(self._owner[-1]) if blocks else -1
        self.sizes = tuple(
            int(count) * BLOCK - missing * (rank == last) for rank, count in enumerate(counts.tolist())
        )

    def owners_of(self, indices: NDArray[Any]) -> NDArray[Any]:
        """Return the owner of each element."""
        found: NDArray[Any] = self._owner[indices // BLOCK]
        return found

    def places(self, indices: NDArray[Any]) -> NDArray[Any]:
        """Return the place of each element among those of its owner; ascending for ascending indices of one owner."""
        found: NDArray[Any] = self._place[indices // BLOCK] * BLOCK + indices % BLOCK
        return found

    def elements(self, owner: int, places: NDArray[Any]) -> NDArray[Any]:
        """Return the elements that lie at some places of an owner, as `places` gives them."""
        found: NDArray[Any] = self._own[owner][places // BLOCK] * BLOCK + places % BLOCK
        return found

    def split(self, entries: Entries) -> list[Entries]:
        """Return the entries of each owner, with places in place of indices."""
        indices, values = entries
        owners, places = self.owners_of(indices), self.places(indices)
        order = np.argsort(owners, kind="stable")
        borders = np.cumsum(np.bincount(owners, minlength=len(self.sizes)))[:-1]
        return list(zip(np.split(places[order], borders), np.split(values[order], borders), strict=True))


@lru_cache(maxsize=32)
def owner_map(size: int, ranks: int) -> OwnerMap:
    """Return the owners of a gradient; about a byte for each element is kept."""
    return OwnerMap(size, ranks)


@dataclass(frozen=True, slots=True)
class OwnedMessages:
    """The forms of messages to and from the owners: `size` elements of a gradient, in `dtype`, and a wire format."""

    size: int
    dtype: str
    wire: WireFormat | None

    def pushed_bytes(self, entries: int, elements: int) -> int:
        """Return the bytes of entries of an owner of so many elements."""
        return message_bytes(entries, size=elements, dtype=self.dtype, wire=self.wire) if entries else 0

    def pulled_bytes(self, entries: int, elements: int) -> tuple[int, bool]:
        """Return the bytes of an owner's sums, and whether they have a bitmap.

        >>> messages = OwnedMessages(1000, "float32", None)
        >>> messages.pulled_bytes(10, 250), messages.pulled_bytes(3, 250), messages.pulled_bytes(0, 250)
        ((72, True), (24, False), (0, False))
        """
        plain = self.pushed_bytes(entries, elements)
        mapped = bitmap_bytes(elements) + entries * np.dtype(self.dtype).itemsize
        return (plain, False) if self.wire is not None else min((plain, False), (mapped, True))

    def expected(self, entries: int, ranks: int) -> tuple[int, int]:
        """Return the bytes of a block and of an owner's message that a model uses for so many entries of each rank.

        A block is taken with three standard deviations more than the mean, and no two ranks send the same index.
        """
        elements, mean = -(-self.size // ranks), entries / ranks
        block = min(elements, entries, int(mean + 3 * mean**0.5) + 1)
        summed = min(elements, block * ranks, int(entries + 3 * entries**0.5) + 1)
        return (
            equal_length(self.pushed_bytes(block, elements)),
            equal_length(self.pulled_bytes(summed, elements)[0]),
        )


def bitmap_bytes(elements: int) -> int:
    """Return the bytes of a bitmap, a multiple of 8."""
    return -(-elements // 64) * 8


def equal_length(longest: int) -> int:
    """Return the length of equal messages, of which the longest has so many bytes.

    At most a sixteenth more, so that calls with about as many entries have one length, and find their lowered plan.

    >>> equal_length(0), equal_length(40), equal_length(1030)
    (16, 48, 1088)
    """
    step = max(16, 1 << max(longest.bit_length() - 5, 0))
    return max(16, place_bytes(-(-longest // step) * step))


@dataclass(frozen=True, slots=True, eq=False)
class HashedExchange(Generic[Line]):
    """One sparse allreduce over hashed owners; `gather` and `swap` are an allgather and an all-to-all of bytes."""

    gather: Exchange
    swap: Exchange
    ranks: int
    library: ArrayLibrary[Line]
    arrays: EntryArrays[Line]
    messages: OwnedMessages
    select: Select
    targets: Mapping[int, Line]

    def run(self, residuals: Mapping[int, Residuals], gradients: Mapping[int, Line]) -> list[Line]:
        """Entries are added in the order of ranks; a rounding error of a sum is kept by its owner."""
        arrays = self.arrays
        owners = owner_map(self.messages.size, self.ranks)
        chosen: dict[int, Entries] = {}
        lost: list[tuple[int, Entries]] = []
        try:
            for rank, line in gradients.items():
                residuals[rank].changed()
                chosen[rank] = self.select(residuals[rank], arrays.values(line))
            steps = {rank: residuals[rank].whole.step for rank in gradients}
            sums = self._push(owners, chosen, steps, lost)
            totals = self._pull(owners, sums, gradients, steps, lost)
        except BaseException:
            for rank, taken in chosen.items():
                arrays.add(residuals[rank].whole.residual, taken)
            raise
        for rank, kept in lost:
            arrays.add(residuals[rank].whole.residual, kept)
        return totals

    def _push(
        self,
        owners: OwnerMap,
        chosen: Mapping[int, Entries],
        steps: Mapping[int, int],
        lost: list[tuple[int, Entries]],
    ) -> dict[int, NDArray[Any]]:
        """Send the entries of this process's ranks to their owners; return the sums of its own, in their places."""
        split = {rank: owners.split(entries) for rank, entries in chosen.items()}
        counts = self._counts({rank: [len(one[0]) for one in parts] for rank, parts in split.items()})
        lengths = [
            [self.messages.pushed_bytes(count, size) for count, size in zip(row, owners.sizes, strict=True)]
            for row in counts
        ]
        block = equal_length(max(map(max, lengths)))
        sent = []
        for rank, parts in split.items():
            line = np.zeros(self.ranks * block, np.uint8)
            for owner, part in enumerate(parts):
                if len(part[0]):
                    message, rounded = self._encoded(
                        part, owners.sizes[owner], owner << 32 | rank, steps[rank]
                    )
                    line[owner * block : owner * block + len(message)] = message
                    if rounded is not None:
                        lost.append((rank, (owners.elements(owner, rounded[0]), rounded[1])))
            sent.append(line)
        sums = {}
        for rank, arrived in zip(split, self.swap(sent), strict=True):
            total = np.zeros(owners.sizes[rank], self.messages.dtype)
            for source, row in enumerate(lengths):
                if row[rank]:
                    start = source * block
                    self.arrays.add(total, self._decoded(arrived[start : start + row[rank]], len(total)))
            sums[rank] = total
        return sums

    def _pull(
        self,
        owners: OwnerMap,
        sums: Mapping[int, NDArray[Any]],
        gradients: Mapping[int, Line],
        steps: Mapping[int, int],
        lost: list[tuple[int, Entries]],
    ) -> list[Line]:
        """Send the sums of this process's ranks to all, and return the sums of all owners."""
        found = {rank: self.arrays.nonzero(total) for rank, total in sums.items()}
        counts = [row[0] for row in self._counts({rank: [len(one[0])] for rank, one in found.items()})]
        forms = [
            self.messages.pulled_bytes(count, size) for count, size in zip(counts, owners.sizes, strict=True)
        ]
        length = equal_length(max(nbytes for nbytes, _ in forms))
        sent = []
        for rank, (places, values) in found.items():
            line, size = np.zeros(length, np.uint8), owners.sizes[rank]
            if len(places):
                if forms[rank][1]:
                    bits = np.zeros(bitmap_bytes(size) * 8, np.bool_)
                    bits[places] = True
                    message, rounded = np.concatenate((np.packbits(bits), values.view(np.uint8))), None
                else:
                    message, rounded = self._encoded(
                        (places, values), size, self.ranks << 32 | rank, steps[rank]
                    )
                line[: len(message)] = message
                if rounded is not None:
                    lost.append((rank, (owners.elements(rank, places), rounded[1])))
            sent.append(line)
        results = []
        for (rank, like), gathered in zip(gradients.items(), self.gather(sent), strict=True):
            result = sum_line(self.library, self.targets, rank, like)
            total = self.arrays.zeroed(result)
            for owner, (nbytes, mapped) in enumerate(forms):
                if counts[owner]:
                    message = gathered[owner * length : owner * length + nbytes]
                    places, values = self._sums_in(message, owners.sizes[owner], mapped=mapped)
                    total[owners.elements(owner, places)] = values
            self.arrays.store(result, total)
            results.append(result)
        return results

    def _sums_in(self, message: Bytes, size: int, *, mapped: bool) -> Entries:
        """Decode the sums of an owner of `size` elements: places and values."""
        if not mapped:
            return self._decoded(message, size)
        start = bitmap_bytes(size)
        places = np.flatnonzero(np.unpackbits(message[:start], count=size))
        return places, message[start:].view(self.messages.dtype)

    def _counts(self, own: Mapping[int, list[int]]) -> list[list[int]]:
        """Return numbers of all ranks, from those of this process's ranks, as many for each."""
        (width,) = {len(row) for row in own.values()}
        lines = []
        for row in own.values():
            line = np.zeros(place_bytes(8 * width), np.uint8)
            line[: 8 * width] = np.array(row, np.int64).view(np.uint8)
            lines.append(line)
        gathered = np.ascontiguousarray(self.gather(lines)[0]).view(np.int64)
        found: list[list[int]] = gathered.reshape(self.ranks, -1)[:, :width].tolist()
        return found

    def _encoded(
        self, entries: Entries, universe: int, stream: int, step: int
    ) -> tuple[Bytes, Entries | None]:
        """Return the message of entries of so many elements, and what it rounds off."""
        places = entries[0].astype(index_type(universe), copy=False)
        made = self.arrays.encode(
            (places, entries[1]), size=universe, wire=self.messages.wire, rank=stream, step=step
        )
        return made.message, made.lost

    def _decoded(self, message: Bytes, universe: int) -> Entries:
        found: Entries = self.arrays.decode(
            message, size=universe, dtype=self.messages.dtype, wire=self.messages.wire
        )
        return found

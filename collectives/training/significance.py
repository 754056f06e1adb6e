"""Only what matters travels: entries of a gradient above a threshold, and of these the ones that come often enough.

The filter of the parameter server (Li et al., OSDI 2014) for gradients: a rank gives the entries of its gradient, what
is left of earlier steps added, that are larger than the threshold, and keeps the others. So everything is sent sooner
or later, and a threshold of zero sends all that is not zero. With an admission of f an entry is sent from the f-th step
on in which it was above the threshold: a count-min sketch (Cormode and Muthukrishnan, 2005) counts them in little
memory. It never counts too few; it counts more than e n / width too many of n with a probability of at most e^-depth,
and admits an entry too early then.

Ranks agree on the largest number of entries that any of them has, exchange so many by an allgather of the plan, and
each adds them in the order of the ranks: all have the same bits. Where that would be more than the whole gradient, the
gradient goes by the dense plan, zeros where nothing is sent.

What is given up: an average lacks what the ranks have kept; without feedback they forget it. Unlike a density, a
threshold does not say how much is sent. Entries are chosen on the CPU. What is not finite is always sent, so that all
ranks see it, and what is kept is then as before the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.communicator.communicator import Communicator
from collectives.communicator.handle import Handle
from collectives.training.kept_memory import KeptMemory, Part
from collectives.training.low_rank import put_in_all, ranks_in, reduced
from topoplan.errors import UsageError

Line = NDArray[Any]

_MIXERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)
"""Odd numbers of 64 bits from which those of every row of a sketch are made."""


@dataclass(frozen=True, slots=True)
class Significance:
    """Which entries of a gradient travel: the same on all ranks.

    Parameters
    ----------
    threshold : float
        Magnitude above which an entry is sent; 0 for all that are not zero. Of gradients with a loss scale, before they
        are multiplied by it.
    feedback : bool
        Whether what is not sent is kept for the next step.
    admission : int
        Steps above the threshold after which an entry is sent first.
    width, depth : int
        Counters in a row of the sketch, a power of two, and rows.

    Raises
    ------
    UsageError
        One is out of range.
    """

    threshold: float
    feedback: bool = True
    admission: int = 1
    width: int = 1 << 16
    depth: int = 4

    def __post_init__(self) -> None:
        value = self.threshold
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not (value >= 0 and math.isfinite(value)):
            raise UsageError(f"a threshold of {value!r} is none; give a magnitude of zero or more")
        for name, least, most in (("admission", 1, 1 << 31), ("width", 2, 1 << 30), ("depth", 1, 32)):
            count = getattr(self, name)
            if not isinstance(count, int) or isinstance(count, bool) or not least <= count <= most:
                raise UsageError(f"{name} {count!r} must be a whole number from {least} to {most}")
        if self.width & (self.width - 1):
            raise UsageError(f"width {self.width} must be a power of two, such as 65536")

    @staticmethod
    def of(given: Significance | float | None) -> Significance | None:
        """The settings, also from the threshold alone."""
        return given if given is None or isinstance(given, Significance) else Significance(given)


class CountMin:
    """How often numbers have come, never too few: the least of several counters.

    Parameters
    ----------
    width : int
        Counters in a row, a power of two.
    depth : int
        Rows, each with a hash of its own.
    counts : (depth, width) array, optional
        What was counted before; it is written.

    Examples
    --------
    >>> sketch = CountMin(width=1024, depth=4)
    >>> for step in range(3):
    ...     sketch.add(np.array([7, 1 << 31]))
    >>> sketch.estimate(np.array([7, 8, 1 << 31])).tolist()
    [3, 0, 3]
    """

    def __init__(self, *, width: int, depth: int, counts: NDArray[np.int64] | None = None) -> None:
        self._shift = np.uint64(65 - width.bit_length())
        odd, even = ((np.arange(1, depth + 1, dtype=np.uint64) * np.uint64(one)) for one in _MIXERS)
        self._factors, self._terms = (odd | np.uint64(1))[:, None], even[:, None]
        self.counts = np.zeros((depth, width), dtype=np.int64) if counts is None else counts

    def add(self, numbers: NDArray[Any]) -> None:
        """Count each of some numbers once."""
        for row, places in zip(self.counts, self._places(numbers), strict=True):
            np.add.at(row, places, 1)

    def estimate(self, numbers: NDArray[Any]) -> NDArray[np.int64]:
        """How often each has been counted, at least."""
        rows = [row[places] for row, places in zip(self.counts, self._places(numbers), strict=True)]
        least: NDArray[np.int64] = np.minimum.reduce(rows)
        return least

    def _places(self, numbers: NDArray[Any]) -> NDArray[np.int64]:
        """Multiply-shift hashing (Dietzfelbinger, 1996): the upper bits of a x + b."""
        hashed = self._factors * numbers.astype(np.uint64)[None, :] + self._terms
        places: NDArray[np.int64] = (hashed >> self._shift).astype(np.int64)
        return places


class SignificanceExchange:
    """Averages gradients by their significant entries over a communicator.

    Parameters
    ----------
    communicator : Communicator
    settings : Significance

    Attributes
    ----------
    memory : KeptMemory
        The residuals, and the counts of each bucket.
    """

    def __init__(self, communicator: Communicator, settings: Significance) -> None:
        self.communicator = communicator
        self.settings = settings
        self.memory = KeptMemory()

    def start(
        self,
        key: str,
        gradients: Any,
        *,
        parts: Sequence[Part],
        scale: float,
        op: str,
        out: Any,
        async_op: bool,
    ) -> tuple[Handle[Any], float]:
        """Begin to average a gradient, and the bytes that each rank gives over those of the gradient.

        How many entries travel is waited for. ``scale`` is the loss scale; other parameters as `Averager.start`.

        Raises
        ------
        UsageError
            The gradient is of no floating type, or what was restored does not fit it.
        BackendError
            Another rank failed.
        """
        comm, library = self.communicator, self.communicator.arrays
        given = [gradients] if comm.one_rank else list(gradients)
        if "float" not in library.dtype(given[0]):
            raise UsageError(f"gradients of {library.dtype(given[0])} have no threshold; give floats")
        wide = np.float64 if library.dtype(given[0]) == "float64" else np.float32
        lines = [library.values(one).reshape(-1).astype(wide) for one in given]
        chosen = self._choose(key, parts, lines, scale)
        counts = [library.wrapped(np.array([len(one)], dtype=np.int64)) for one, _ in chosen]
        ranks, told = reduced(comm, counts, "max"), async_op or comm.on_failure == "shrink"
        most, size, item = int(library.values(counts[0])[0]), lines[0].size, lines[0].itemsize
        entry = np.dtype([("index", np.uint32), ("value", wide)])
        if size > 1 << 32 or most * entry.itemsize * ranks >= 2 * size * item:
            sent = [library.wrapped(_spread(one, size, wide)) for one in chosen]
            adding = sent[0] if comm.one_rank else sent
            adds = Handle.around(comm.all_reduce(adding, op="sum", out=adding, async_op=told))

            def whole(_: Any) -> Any:
                total: Line = np.asarray(library.values(sent[0]))
                over = 1 if op == "sum" else ranks_in(adds, comm)
                return put_in_all(comm, total / wide(over), given, out, self.memory)

            return adds.then(whole), 1.0
        messages = []
        for indices, values in chosen:
            message = np.zeros(most + 1, dtype=entry)
            message["index"][0] = len(indices)
            message["index"][1 : len(indices) + 1], message["value"][1 : len(indices) + 1] = indices, values
            messages.append(library.wrapped(message.view(np.uint8)))

        def added(gathered: Any) -> Any:
            values = np.array(library.values(gathered if comm.one_rank else gathered[0]))
            total: Line = np.zeros(size, dtype=wide)
            all_of = values.view(entry).reshape(-1, most + 1)
            for message in all_of:
                part = message[1 : int(message["index"][0]) + 1]
                total[part["index"]] += part["value"]
            return put_in_all(comm, total / wide(1 if op == "sum" else len(all_of)), given, out, self.memory)

        handle = Handle.around(comm.all_gather(messages[0] if comm.one_rank else messages, async_op=told))
        return handle.then(added), (most + 1) * entry.itemsize / max(size * item, 1)

    def _choose(
        self, key: str, parts: Sequence[Part], lines: list[Line], scale: float
    ) -> list[tuple[NDArray[np.int64], Line]]:
        """Indices and values of what each rank of this process sends; the others stay with it."""
        how = self.settings
        sketches = self._sketches(key) if how.admission > 1 else []
        self.memory.add_to(parts, lines, scale=scale)
        found = []
        for place, line in enumerate(lines):
            indices = np.flatnonzero(~(np.abs(line) <= how.threshold * scale))
            if sketches:
                sketches[place].add(indices)
                often = sketches[place].estimate(indices) >= how.admission
                indices = indices[often | ~np.isfinite(line[indices])]
            found.append((indices, line[indices]))
            line[indices] = 0
        if how.feedback:
            self.memory.keep(parts, lines, scale=scale)
        return found

    def _sketches(self, key: str) -> list[CountMin]:
        """What counts a bucket's entries, for every rank of this process."""
        how, kept = self.settings, self.memory.array(key)
        if kept is None or kept[0].shape != (how.depth, how.width):
            made = [CountMin(width=how.width, depth=how.depth) for _ in self.communicator.ranks]
        else:
            made = [CountMin(width=how.width, depth=how.depth, counts=one.copy()) for one in kept]
        self.memory.keep_arrays(key, [one.counts for one in made])
        return made


def _spread(chosen: tuple[NDArray[np.int64], Line], size: int, dtype: Any) -> Line:
    """Entries where they belong, zeros elsewhere."""
    line = np.zeros(size, dtype=dtype)
    line[chosen[0]] = chosen[1]
    return line

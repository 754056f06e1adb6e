"""Average gradients through filters: sums of integer codes, sums of 16 bits, or only the entries above a threshold.

Quantize: ranks agree on the largest magnitude of every block by one short maximum, write values as multiples of
one scale (`collectives.sparse.quantization`), the plan adds the codes, and every rank multiplies by the scale. Each of
N ranks takes codes of at most 127 / N or 32767 / N: no sum overflows, and all plans give the same bits. The average
moves by less than a scale, about N / 127 or N / 32767 of the block's maximum; its expected value stays, no residual is
kept. NaN or a magnitude beyond 2^127 on a rank makes its block NaN on all. Without one code left ranks are refused.

Threshold: the parameter server's filter (Li et al., OSDI 2014). Entries (residual added) above a threshold travel,
the others are kept. With an admission of f an entry goes from the f-th step above the threshold on, counted by a
count-min sketch (Cormode and Muthukrishnan, 2005): never too few; more than e n / width too many of n with probability
at most e^-depth. An allgather exchanges entries, added in rank order: same bits; the dense plan if that is less. Values
that are not finite are always sent; residuals are then as before the step. All filters compute on the CPU.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from collectives.communicator.communicator import Communicator
from collectives.communicator.handle import Handle
from collectives.sparse.quantization import (
    CODE_DTYPES,
    LARGEST,
    FixedPoint,
    code_levels,
    from_fixed_point,
    largest_magnitudes,
    to_fixed_point,
)
from collectives.training.checkpoint_state import BucketPart, FilterState
from collectives.training.modes import check_count, check_hashable
from topoplan.errors import UsageError, deprecated

Line = NDArray[Any]
Settings = TypeVar("Settings")

Filtered = tuple[Handle[Any], float, str]
"""Handle of the average, share of the gradient's bytes that a rank sends, and how they travel."""


@dataclass(frozen=True, slots=True, eq=False)
class FilterCall:
    """The arguments of `Averager.start`, with the step of training and its loss scale."""

    key: str
    gradients: Any
    parts: Sequence[BucketPart]
    step: int
    scale: float
    op: str
    out: Any
    async_op: bool
    idle: frozenset[str] = frozenset()
    """Names of parts without a gradient here: their residuals wait, as nobody may use the average."""

    def halves(self, parts: Sequence[BucketPart]) -> tuple[list[BucketPart], list[BucketPart]]:
        """Return the parts whose residuals are sent, and those whose residuals wait."""
        return (
            [one for one in parts if one.name not in self.idle],
            [one for one in parts if one.name in self.idle],
        )


class GradientFilter(ABC):
    """Averages dense gradients in another form; `memory` is the state from step to step, None without one."""

    name: str
    memory: FilterState | None = None
    arrays_shared = False
    """Whether all ranks have the same arrays in `memory`."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    @abstractmethod
    def start(self, call: FilterCall) -> Filtered | None:
        """Start as `Averager.start`; None for a gradient that travels as it is in this step."""

    def _listed(self, gradients: Any) -> list[Any]:
        """Return a gradient for each rank of this process; UsageError if they are not floats."""
        given = [gradients] if self.communicator.one_rank else list(gradients)
        if "float" not in (kind := self.communicator.arrays.dtype(given[0])):
            raise UsageError(f"{self.name} needs gradients of floats, got {kind}")
        return given


class FilterWithState(GradientFilter, Generic[Settings]):
    """A filter that has state from step to step, made from its `settings`."""

    memory: FilterState

    def __init__(self, communicator: Communicator, settings: Settings) -> None:
        super().__init__(communicator)
        self.settings = settings
        self.memory = FilterState()


def rank_count(handle: Handle[Any], communicator: Communicator) -> int:
    """Return the number of ranks of a finished collective: the same on all, even if a rank fails meanwhile."""
    return len(handle.among) or communicator.size


def reduce_line(communicator: Communicator, lines: Sequence[Any], op: str) -> int:
    """Reduce a line of every rank, in place, wait for it, and return its number of ranks (`rank_count`)."""
    given = lines[0] if communicator.one_rank else lines
    asynchronous = communicator.on_failure == "shrink"
    handle = communicator._in_order.around(
        communicator.all_reduce(given, op=op, out=given, async_op=asynchronous)
    )
    handle.wait()
    return rank_count(handle, communicator)


def distribute_average(
    communicator: Communicator,
    average: Line,
    given: Sequence[Any],
    out: Any,
    memory: FilterState | None = None,
) -> Any:
    """Return an average in arrays of all ranks of this process: those of ``out``, or new ones like `given`.

    A filter's memory notes whether it is finite there.
    """
    library, one_rank = communicator.arrays, communicator.one_rank
    if memory is not None:
        memory.look_at(average, library.dtype(given[0]))
    if out is None:
        outs = [library.empty(library.shape(one), one) for one in given]
    else:
        outs = [out] if one_rank else list(out)
    for result in outs:
        values = average.reshape(library.shape(result))
        with np.errstate(over="ignore"):  # overflow is infinite, as in sums of such values
            library.put(result, values.astype(library.values(result).dtype, copy=False))
    return outs[0] if one_rank else outs


@dataclass(frozen=True, slots=True)
class Quantize:
    """Integer quantization: settings of the codes of gradients, the same on all ranks.

    Parameters
    ----------
    bits : int
        Width of a code and of every sum of codes: 8 or 16.
    seed : int
        Seed of the random rounding, 0 to 2^32 - 1.
    block : int
        Values per scale, at least 1.
    """

    bits: int = 8
    seed: int = 0
    block: int = 256

    def __post_init__(self) -> None:
        check_hashable(self)
        if self.bits not in CODE_DTYPES:
            raise UsageError(f"bits of Quantize must be 8 or 16, got {self.bits!r}")
        check_count("seed of Quantize", self.seed, least=0, most=(1 << 32) - 1)
        check_count("block of Quantize", self.block, least=1)

    def exchange(self, communicator: Communicator) -> QuantizedExchange:
        """Return the filter over a communicator."""
        return QuantizedExchange(communicator, self)

    def nbytes(self, elements: int) -> int:
        """Return the bytes of the codes of so many values, and of the maxima exchanged before.

        >>> Quantize(8).nbytes(1024)
        1040
        """
        return elements * self.bits // 8 + 4 * -(-elements // self.block)


class QuantizedExchange(GradientFilter):
    """Averages gradients by sums of codes, whose bits must hold a sum over all ranks; waits for the blocks' maxima."""

    name = "Quantize"

    def __init__(self, communicator: Communicator, settings: Quantize) -> None:
        code_levels(settings.bits, communicator.size)
        super().__init__(communicator)
        self.settings = settings

    def start(self, call: FilterCall) -> Filtered:
        comm, library, how = self.communicator, self.communicator.arrays, self.settings
        given = self._listed(call.gradients)
        lines = [_floats(library.values(one)) for one in given]
        ranges = [library.wrapped(largest_magnitudes(one, how.block)) for one in lines]
        ranks = reduce_line(comm, ranges, "max")
        largest = np.array(library.values(ranges[0]))
        # a block without codes on some rank is NaN on all of them
        broken = ~(largest <= LARGEST)
        undefined = np.repeat(broken, how.block)[: lines[0].size] if broken.any() else None
        if undefined is not None:
            largest[broken] = 0
            lines = [np.where(undefined, line.dtype.type(0), line) for line in lines]
        seed = how.seed << 32 | zlib.crc32(call.key.encode())
        made = [
            to_fixed_point(
                line,
                bits=how.bits,
                seed=seed,
                step=call.step,
                stream=rank,
                block=how.block,
                ranks=ranks,
                largest=largest,
            )
            for rank, line in zip(comm.ranks, lines, strict=True)
        ]
        codes = [library.wrapped(one.codes) for one in made]
        scales = made[0].scales

        adding = codes[0] if comm.one_rank else codes
        asynchronous = call.async_op or comm.on_failure == "shrink"
        handle = comm._in_order.around(comm.all_reduce(adding, op="sum", out=adding, async_op=asynchronous))

        def decoded(_: Any) -> Any:
            total = from_fixed_point(FixedPoint(np.asarray(library.values(codes[0])), scales, how.block))
            # a sum of gradients that were divided before is their average already
            average = total if call.op == "sum" else total / np.float32(rank_count(handle, comm))
            if undefined is not None:
                average[undefined] = np.nan
            return distribute_average(comm, average, given, call.out)

        part = how.nbytes(lines[0].size) / max(lines[0].size * library.itemsize(given[0]), 1)
        return handle.then(decoded), part, f"{how.bits} bits"


def _floats(values: NDArray[Any]) -> NDArray[Any]:
    """Return a line of values in a type that has codes; bfloat16 as float32."""
    line = values.reshape(math.prod(values.shape))
    return line if line.dtype in (np.float16, np.float32, np.float64) else line.astype(np.float32)


@dataclass(frozen=True, slots=True, init=False)
class Cast:
    """Settings of gradients that are rounded to 16 bits, as by torch's fp16_compress_hook, the same on all ranks.

    Parameters
    ----------
    dtype : str or torch.dtype
        "float16" ("fp16", torch.float16) or "bfloat16" ("bf16", torch.bfloat16): gradients are divided by the number of
        ranks, rounded to it, and added up in it. The attribute is the full name.

    Examples
    --------
    >>> Cast("bf16")
    Cast(dtype='bfloat16')
    """

    dtype: str

    def __init__(self, dtype: object) -> None:
        name = f"{dtype}".removeprefix("torch.")
        found = {"fp16": "float16", "bf16": "bfloat16"}.get(name, name)
        if found not in ("float16", "bfloat16"):
            raise UsageError(f"dtype of Cast must be float16 or bfloat16, got {dtype!r}")
        object.__setattr__(self, "dtype", found)

    def exchange(self, communicator: Communicator) -> CastExchange:
        """Return the filter over a communicator."""
        return CastExchange(communicator, self)


class CastExchange(GradientFilter):
    """Averages gradients in 16 bits; those of 16 bits, or rounded before, travel as they are."""

    name = "Cast"

    def __init__(self, communicator: Communicator, settings: Cast) -> None:
        super().__init__(communicator)
        self.settings = settings

    def start(self, call: FilterCall) -> Filtered | None:
        comm, library, dtype = self.communicator, self.communicator.arrays, self.settings.dtype
        given = self._listed(call.gradients)
        if (wide := library.itemsize(given[0])) <= 2:
            return None
        ranks = comm.size if call.op == "avg" else 1
        with np.errstate(over="ignore"):  # overflow is infinite, as in sums of such values
            narrow = [library.of(library.values(one) / ranks, dtype) for one in given]
        adding = narrow[0] if comm.one_rank else narrow
        asynchronous = call.async_op or comm.on_failure == "shrink"
        handle = comm._in_order.around(comm.all_reduce(adding, op="sum", out=adding, async_op=asynchronous))

        def widened(_: Any) -> Any:
            total = library.values(narrow[0])
            if call.op == "avg" and (left := rank_count(handle, comm)) != ranks:
                total = total.astype(np.float32) * np.float32(ranks / left)
            return distribute_average(comm, total, given, call.out)

        return handle.then(widened), 2 / wide, dtype


_MIXERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)
"""Odd 64-bit multipliers from which those of every row of a sketch are made."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """Threshold sparsification: settings of the filter of significant entries, the same on all ranks.

    Parameters
    ----------
    threshold : float
        Magnitude above which an entry is sent, before gradients are multiplied by a loss scale; 0 for all that are not
        zero.
    feedback : bool
        Whether entries that are not sent are kept for the next step.
    admission : int
        Steps above the threshold after which an entry is sent first.
    width, depth : int
        Counters in a row of the sketch, a power of two, and rows.
    """

    threshold: float
    feedback: bool = True
    admission: int = 1
    width: int = 1 << 16
    depth: int = 4

    def __post_init__(self) -> None:
        check_hashable(self)
        value = self.threshold
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not (value >= 0 and math.isfinite(value)):
            raise UsageError(f"threshold must be a magnitude of 0 or more, got {value!r}")
        check_count("admission", self.admission, least=1, most=1 << 31)
        check_count("width", self.width, least=2, most=1 << 30)
        check_count("depth", self.depth, least=1, most=32)
        if self.width & (self.width - 1):
            raise UsageError(f"width must be a power of two, such as 65536, got {self.width}")

    def exchange(self, communicator: Communicator) -> ThresholdExchange:
        """Return the filter over a communicator."""
        return ThresholdExchange(communicator, self)


class CountMin:
    """Count-min sketch: counts of numbers, never too low.

    Each of `depth` rows has a hash of its own and `width` counters, a power of two; `counts` are those from before.

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
        """Return an upper bound of the count of each."""
        rows = [row[places] for row, places in zip(self.counts, self._places(numbers), strict=True)]
        least: NDArray[np.int64] = np.minimum.reduce(rows)
        return least

    def _places(self, numbers: NDArray[Any]) -> NDArray[np.int64]:
        """Multiply-shift hashing (Dietzfelbinger, 1996): the upper bits of a x + b."""
        hashed = self._factors * numbers.astype(np.uint64)[None, :] + self._terms
        places: NDArray[np.int64] = (hashed >> self._shift).astype(np.int64)
        return places


class ThresholdExchange(FilterWithState[Threshold]):
    """Averages gradients by their significant entries; `memory` has the residuals, and the counts of each bucket.

    A start waits for the largest number of entries of a rank.
    """

    name = "Threshold"

    def start(self, call: FilterCall) -> Filtered:
        comm, library = self.communicator, self.communicator.arrays
        given, words = self._listed(call.gradients), f"above {self.settings.threshold:g}"
        wide = np.float64 if library.dtype(given[0]) == "float64" else np.float32
        lines = [library.values(one).reshape(-1).astype(wide) for one in given]
        chosen = self._choose(call, lines)
        counts = [library.wrapped(np.array([len(one)], dtype=np.int64)) for one, _ in chosen]
        ranks, asynchronous = reduce_line(comm, counts, "max"), call.async_op or comm.on_failure == "shrink"
        most, size, item = int(library.values(counts[0])[0]), lines[0].size, lines[0].itemsize
        entry = np.dtype([("index", np.uint32), ("value", wide)])
        if size > 1 << 32 or most * entry.itemsize * ranks >= 2 * size * item:
            sent = [library.wrapped(_spread(one, size, wide)) for one in chosen]
            adding = sent[0] if comm.one_rank else sent
            adds = comm._in_order.around(comm.all_reduce(adding, op="sum", out=adding, async_op=asynchronous))

            def whole(_: Any) -> Any:
                total: Line = np.asarray(library.values(sent[0]))
                over = 1 if call.op == "sum" else rank_count(adds, comm)
                return distribute_average(comm, total / wide(over), given, call.out, self.memory)

            return adds.then(whole), 1.0, words
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
            return distribute_average(
                comm, total / wide(1 if call.op == "sum" else len(all_of)), given, call.out, self.memory
            )

        handle = comm._in_order.around(
            comm.all_gather(messages[0] if comm.one_rank else messages, async_op=asynchronous)
        )
        return handle.then(added), min((most + 1) * entry.itemsize / max(size * item, 1), 1.0), words

    def _choose(self, call: FilterCall, lines: list[Line]) -> list[tuple[NDArray[np.int64], Line]]:
        """Return indices and values that each rank of this process sends; keep the others."""
        how = self.settings
        sketches = self._sketches(call.key) if how.admission > 1 else []
        sent, _ = call.halves(call.parts)
        self.memory.add_to(sent, lines, scale=call.scale)
        found = []
        for place, line in enumerate(lines):
            indices = np.flatnonzero(~(np.abs(line) <= how.threshold * call.scale))
            if sketches:
                sketches[place].add(indices)
                often = sketches[place].estimate(indices) >= how.admission
                indices = indices[often | ~np.isfinite(line[indices])]
            found.append((indices, line[indices]))
            line[indices] = 0
        if how.feedback:
            self.memory.keep(sent, lines, scale=call.scale)
        return found

    def _sketches(self, key: str) -> list[CountMin]:
        """Return the counters of a bucket's entries, for every rank of this process."""
        how, kept = self.settings, self.memory.array(key)
        if kept is None or kept[0].shape != (how.depth, how.width):
            made = [CountMin(width=how.width, depth=how.depth) for _ in self.communicator.ranks]
        else:
            made = [CountMin(width=how.width, depth=how.depth, counts=one.copy()) for one in kept]
        self.memory.keep_arrays(key, [one.counts for one in made])
        return made


def _spread(chosen: tuple[NDArray[np.int64], Line], size: int, dtype: Any) -> Line:
    line = np.zeros(size, dtype=dtype)
    line[chosen[0]] = chosen[1]
    return line


_EARLIER = {"IntegerCodes": Quantize, "Significance": Threshold}


def __getattr__(name: str) -> type[Any]:
    if name not in _EARLIER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = _EARLIER[name]
    deprecated(name, f"write {found.__name__}")
    return found

"""Fit latency and bandwidth of a pair of GPUs to the times of its copies: t(n) = alpha + n / beta (Hockney 1994).

A `Meter` times copies on its machine; `collectives.lab.peer_copies.PeerCopies` does so with CUDA. A meter of
processes against each other belongs to a back end and is absent. Each size counts with the median of its repeats.
The line through the medians has the least sum of |alpha + n/beta - t| / t, with alpha >= 0. Such a line is among
those through two points, or through one with alpha = 0 or 1/beta = 0 (Bloomfield and Steiger, Least Absolute
Deviations, 1983: a vertex of the linear program), so all are tried. If every median is within e of the truth, so is the
line within
2e / (1 - e) on average.

An outlier is off the median by more than `FACTOR` times the median absolute deviation, scaled to a normal distribution
(Hampel 1974; factor: Iglewicz and Hoaglin, How to detect and handle outliers, 1993), and by more than `FLOOR` of the
median: values that repeat to the last digit have a deviation of zero, and any noise would stand out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Protocol

from topoplan.errors import UsageError
from topoplan.machine.topology import Topology
from topoplan.units import format_size

CopyTimes = tuple[tuple[int, tuple[float, ...]], ...]
"""Bytes of copies, ascending, and the seconds of every repeat."""


@dataclass(frozen=True, slots=True)
class PairSamples:
    """Times of copies from one GPU to another.

    times: bytes, ascending, and the seconds of every repeat, of copies that the source pushes; empty if one did not
    end.
    through_host: peer access is refused: the driver takes every copy through host memory.
    pulls: the same of copies that the destination pulls; None if they were not measured.
    """

    src: str
    dst: str
    times: CopyTimes
    through_host: bool = False
    pulls: CopyTimes | None = None

    def __post_init__(self) -> None:
        for times in (self.times, self.pulls):
            if times:
                self._check(times)

    def _check(self, times: CopyTimes) -> None:
        sizes = [nbytes for nbytes, _ in times]
        if len(sizes) < 2 or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise UsageError(
                f"copies {self.name}: sizes {sizes} must be two or more, ascending, from 1 byte: one size cannot tell "
                "latency from bandwidth"
            )
        for nbytes, seconds in times:
            if not seconds or not all(0 < one < math.inf for one in seconds):
                raise UsageError(
                    f"copies {self.name}: times {list(seconds)} of {nbytes} bytes must be above zero; "
                    "choose larger sizes"
                )

    @property
    def name(self) -> str:
        return f"{self.src}>{self.dst}"


@dataclass(frozen=True, slots=True)
class MemoryCopy:
    """Copies inside the memory of one GPU.

    bandwidth: GB/s of memory traffic: every byte is read once and written once, and both count.
    """

    gpu: str
    nbytes: int
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """Results of a meter.

    method: a few words, such as ``CuPy 13.4 peer copies``.
    sizes: bytes of the copies, ascending.
    repeats: copies of each size, without the warm-up.
    rates: pairs of which the bandwidth alone is known, at sizes that are not (see `rated_pairs`).
    together: source, destination and GB/s of copies both ways at once, added.
    peer_access: seconds to switch peer access off and on between all pairs of so many GPUs, ascending.
    memory: for a single GPU, which has no pair.
    """

    method: str
    sizes: tuple[int, ...]
    repeats: int
    pairs: tuple[PairSamples, ...]
    peer_access: tuple[tuple[int, float], ...] = ()
    memory: MemoryCopy | None = None
    notes: tuple[str, ...] = ()
    rates: tuple[PairFit, ...] = ()
    together: tuple[tuple[str, str, float], ...] = ()


class Meter(Protocol):
    """Times copies between the GPUs of its machine."""

    def ready(self) -> None:
        """Raise ProbeError with the remedy if nothing can be measured here."""

    def measure(
        self,
        topology: Topology,
        *,
        gpus: Sequence[int] | None,
        sizes: Sequence[int],
        repeats: int,
        progress: Callable[[str], None] | None,
    ) -> Measurement:
        """Time copies between every two of some GPUs, in both directions.

        topology: the machine as far as it is known; names the GPUs.
        gpus: GPU numbers in the topology; None for all visible ones.
        sizes: bytes of the copies, two or more, ascending.

        Raises UsageError for GPUs or sizes that do not fit the machine, and ProbeError with the pair if hardware or
        driver did not answer.
        """


LATENCY_ONLY = 0.1
"""Least time of moving the bytes of the largest copy, as a share of alpha, that determines a bandwidth."""


@dataclass(frozen=True, slots=True)
class HockneyLine:
    """t(n) = alpha + n / bandwidth, in seconds and GB/s.

    distance: mean relative deviation of the line from the medians.
    """

    alpha: float
    bandwidth: float
    distance: float

    def seconds(self, nbytes: int) -> float:
        return self.alpha + nbytes / (self.bandwidth * 1e9)


@dataclass(frozen=True, slots=True)
class Outlier:
    """A repeat that is off the median of its size; repeats count from 1."""

    nbytes: int
    repeat: int
    seconds: float
    median: float

    def __str__(self) -> str:
        return f"{format_size(self.nbytes)} repeat {self.repeat} ({self.seconds / self.median:.3g}x)"


@dataclass(frozen=True, slots=True)
class PairFit:
    """Latency and bandwidth from one GPU to another, of the faster access.

    through_host: as in `PairSamples`.
    outliers: they do not affect the fit.
    access: GB/s of push and pull, None for copies that do not end; None if pulls were not measured.
    rate_only: the latency was not measured, and the line has none.
    refused: peer access is refused.
    """

    src: str
    dst: str
    line: HockneyLine
    through_host: bool = False
    outliers: tuple[Outlier, ...] = ()
    access: tuple[float | None, float | None] | None = None
    rate_only: bool = False
    refused: bool = False

    @property
    def name(self) -> str:
        return f"{self.src}>{self.dst}"


def fit_line(points: Sequence[tuple[int, float]]) -> HockneyLine:
    """Return the line of least relative distance through (bytes, seconds), with alpha >= 0.

    All lines through two of n points are tried: O(n^3). 10 us and 25 GB/s, but the third time is three times too long:

    >>> times = [(n << 20, 1e-5 + (n << 20) / 25e9) for n in (1, 2, 4, 8, 16)]
    >>> times[2] = (times[2][0], 3 * times[2][1])
    >>> line = fit_line(times)
    >>> round(line.alpha * 1e6, 6), round(line.bandwidth, 6), round(line.distance, 3)
    (10.0, 25.0, 0.133)
    """
    lines = [line for nbytes, seconds in points for line in ((0.0, seconds / nbytes), (seconds, 0.0))]
    for (few, early), (many, late) in combinations(sorted(points), 2):
        slope = (late - early) / (many - few)
        # times in proportion to the sizes leave an alpha of rounding errors, of either sign
        if slope > 0 and early - few * slope >= 0:
            lines.append((early - few * slope, slope))
    distances = [math.fsum(abs(a + n * b - t) / t for n, t in points) for a, b in lines]
    distance, place = min((distance, place) for place, distance in enumerate(distances))
    alpha, slope = lines[place]
    largest = max(nbytes for nbytes, _ in points)
    if largest * slope < LATENCY_ONLY * alpha:
        raise UsageError(
            f"copies of up to {format_size(largest)} take {alpha * 1e6:.3g} us whatever their size, which leaves "
            "their bandwidth open; choose larger sizes"
        )
    return HockneyLine(alpha, 1e-9 / slope, distance / len(points))


def fit_pair(samples: PairSamples) -> PairFit:
    """Return latency and bandwidth of a pair, and its outliers (`outlying`); UsageError if no copy ended.

    >>> times = tuple((n << 20, (1e-5 + n / 24e3,) * 4 + (1e-3,)) for n in (1, 4, 16))
    >>> [str(outlier) for outlier in fit_pair(PairSamples("gpu0", "gpu1", times)).outliers]
    ['1MB repeat 5 (19.4x)', '4MB repeat 5 (5.66x)', '16MB repeat 5 (1.48x)']
    """
    lines: list[HockneyLine | None] = []
    for times in (samples.times, samples.pulls or ()):
        try:
            lines.append(
                fit_line([(nbytes, median(seconds)) for nbytes, seconds in times]) if times else None
            )
        except UsageError as error:
            raise UsageError(f"{samples.name}: {error}") from None
    push, pull = (line.bandwidth if line else None for line in lines)
    pulled = (pull or 0) > (push or 0)
    line = lines[pulled]
    if line is None:
        raise UsageError(f"{samples.name}: no copy ended, so no bandwidth can be fitted; leave the pair out")
    outliers = tuple(
        Outlier(nbytes, place + 1, seconds[place], median(seconds))
        for nbytes, seconds in (samples.pulls or () if pulled else samples.times)
        for place in outlying(seconds)
    )
    access = None if samples.pulls is None else (push, pull)
    hosted = samples.through_host
    return PairFit(samples.src, samples.dst, line, hosted, outliers, access, refused=hosted)


FACTOR = 3.5
FLOOR = 0.1
FEWEST = 3
"""Fewest values that have outliers."""

_NORMAL = 1.4826


def outlying(values: Sequence[float]) -> tuple[int, ...]:
    """Return the positions of outliers.

    >>> outlying([10.1, 10.0, 31.0, 9.9, 10.2])
    (2,)
    >>> outlying([10.0, 10.0, 10.0, 10.5]), outlying([1.0, 2.0])
    ((), ())
    """
    if len(values) < FEWEST:
        return ()
    middle = median(values)
    deviation = median(abs(value - middle) for value in values)
    limit = max(FACTOR * _NORMAL * deviation, FLOOR * abs(middle))
    return tuple(i for i, value in enumerate(values) if abs(value - middle) > limit)

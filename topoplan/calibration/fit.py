"""Latency and bandwidth of a pair of GPUs, from the times of its copies: t(n) = alpha + n / beta (Hockney 1994).

Two steps, each robust. Of every size the median of its repeats is kept, which stays between undisturbed times as long
as more than half of them are undisturbed. The line through the medians is the one whose relative distances
|alpha + n/beta - t| / t add up to the least, with alpha >= 0: least absolute deviations hardly follow a median that is
off, and relative ones let 64 KB and 256 MB say equally much.

Such a line exists among those through two of the points, and those through one point with alpha = 0 or 1/beta = 0
(Bloomfield and Steiger, Least Absolute Deviations, 1983: a vertex of the linear program), so all of them are tried.
Where every median is within e of the truth, relatively, so is the line within 2e / (1 - e) on average over the sizes.

Values that stand out from the rest are told apart.
A value is an outlier when it is off the median by more than `FACTOR` times the median absolute deviation, scaled to
the standard deviation of a normal distribution (Hampel 1974; the factor is that of Iglewicz and Hoaglin, How to detect
and handle outliers, 1993), and by more than `FLOOR` of the median: values that repeat to the last digit have a
deviation of zero, and then any noise would stand out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from topoplan.calibration.samples import PairSamples
from topoplan.errors import UsageError
from topoplan.units import format_size

LATENCY_ONLY = 0.1
"""Where the largest copy moves its bytes in less than this share of alpha, no bandwidth can be told."""


@dataclass(frozen=True, slots=True)
class Line:
    """t(n) = alpha + n / bandwidth.

    Parameters
    ----------
    alpha : float
        Seconds, zero or more.
    bandwidth : float
        GB/s.
    distance : float
        Mean over the sizes of what the line is off the median there, relative to the median.
    """

    alpha: float
    bandwidth: float
    distance: float

    def seconds(self, nbytes: int) -> float:
        """Time of a copy of so many bytes."""
        return self.alpha + nbytes / (self.bandwidth * 1e9)


@dataclass(frozen=True, slots=True)
class Outlier:
    """A repeat that is off the median of its size.

    Parameters
    ----------
    nbytes : int
        Size of the copy.
    repeat : int
        Which of the repeats, counted from 1.
    seconds, median : float
        What it took, and what the repeats of this size usually take.
    """

    nbytes: int
    repeat: int
    seconds: float
    median: float

    def __str__(self) -> str:
        return f"{format_size(self.nbytes)} repeat {self.repeat} ({self.seconds / self.median:.3g}x)"


@dataclass(frozen=True, slots=True)
class PairFit:
    """What the copies from one GPU to another say.

    Parameters
    ----------
    src, dst : str
        Device names.
    line : Line
    through_host : bool
        As in `PairSamples`.
    outliers : tuple of Outlier
        They have moved a median, not the fit.
    """

    src: str
    dst: str
    line: Line
    through_host: bool = False
    outliers: tuple[Outlier, ...] = ()

    @property
    def name(self) -> str:
        """Such as ``gpu0>gpu3``."""
        return f"{self.src}>{self.dst}"


def fit_line(points: Sequence[tuple[int, float]]) -> Line:
    """The line of least relative distance through (bytes, seconds), with alpha >= 0.

    Parameters
    ----------
    points : sequence of (int, float)
        Two or more different sizes; times above zero.

    Raises
    ------
    UsageError
        The times hardly grow with the sizes, so that no bandwidth can be told.

    Notes
    -----
    All lines through two of n points are tried: O(n^3).

    Examples
    --------
    10 us and 25 GB/s, but the third time is three times too long:

    >>> times = [(n << 20, 1e-5 + (n << 20) / 25e9) for n in (1, 2, 4, 8, 16)]
    >>> times[2] = (times[2][0], 3 * times[2][1])
    >>> line = fit_line(times)
    >>> round(line.alpha * 1e6, 6), round(line.bandwidth, 6), round(line.distance, 3)
    (10.0, 25.0, 0.133)
    """
    lines = [line for nbytes, seconds in points for line in ((0.0, seconds / nbytes), (seconds, 0.0))]
    for (few, early), (many, late) in combinations(sorted(points), 2):
        slope = (late - early) / (many - few)
        # Times that are proportional to the sizes leave an alpha of rounding errors, of either sign.
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
    return Line(alpha, 1e-9 / slope, distance / len(points))


def fit_pair(samples: PairSamples) -> PairFit:
    """Latency and bandwidth of a pair, and the repeats that stand out (see `outlying`).

    Raises
    ------
    UsageError
        As `fit_line`; the message begins with the pair.

    Examples
    --------
    >>> times = tuple((n << 20, (1e-5 + n / 24e3,) * 4 + (1e-3,)) for n in (1, 4, 16))
    >>> [str(outlier) for outlier in fit_pair(PairSamples("gpu0", "gpu1", times)).outliers]
    ['1MB repeat 5 (19.4x)', '4MB repeat 5 (5.66x)', '16MB repeat 5 (1.48x)']
    """
    points = [(nbytes, median(seconds)) for nbytes, seconds in samples.times]
    try:
        line = fit_line(points)
    except UsageError as error:
        raise UsageError(f"{samples.name}: {error}") from None
    outliers = tuple(
        Outlier(nbytes, place + 1, seconds[place], usual)
        for (nbytes, seconds), (_, usual) in zip(samples.times, points, strict=True)
        for place in outlying(seconds)
    )
    return PairFit(samples.src, samples.dst, line, samples.through_host, outliers)


FACTOR = 3.5
FLOOR = 0.1
FEWEST = 3
"""Of fewer values none stands out."""

_NORMAL = 1.4826


def outlying(values: Sequence[float]) -> tuple[int, ...]:
    """Positions of the values that stand out.

    Examples
    --------
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

"""Which of several measured values stand out from the rest.

A value is an outlier when it is off the median by more than `FACTOR` times the median absolute deviation, scaled to
the standard deviation of a normal distribution (Hampel 1974; the factor is that of Iglewicz and Hoaglin, How to detect
and handle outliers, 1993), and by more than `FLOOR` of the median: values that repeat to the last digit have a
deviation of zero, and then any noise would stand out.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

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

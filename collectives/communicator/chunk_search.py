"""The search for the chunk size with the highest throughput: multiply, then step back.

Blink (Wang et al., MLSys 2020), section 4, starts at 1 MB, multiplies while throughput rises and then steps back
additively. Here the factor is 4. As chunks that stay in a CPU's L2 cache may be the fastest whatever is above them,
the search then divides the first size too, unless that is hopeless. The step back goes half of the way from the
best size to the better one of its neighbours.

Every size is tried twice and its better rate counts, so one slow call does not mislead; a size must be `GAIN`
times as fast as the best one before it to replace it. At most 7 sizes are tried, in 14 calls; 10 calls are usual.
"""

from __future__ import annotations

from collections.abc import Generator

START = 1 << 20
"""First size, in bytes."""

FLOOR = 64 << 10
"""Smallest size that is tried, in bytes: below it the cost of each transfer outweighs everything."""

CEILING = 64 << 20
"""Largest size that is tried, in bytes."""

FACTOR = 4

GAIN = 1.03
"""Smaller gains are noise."""

HOPELESS = 1.5
"""A size that is so much slower than the best ends the search among smaller ones."""


def chunk_search(limit: int) -> Generator[int, float, int]:
    """A coroutine that yields the size to use next, is sent the rate that this gave, and returns the best size.

    Parameters
    ----------
    limit : int
        Largest size that makes sense, in bytes: that of the buffer.

    Examples
    --------
    A machine on which chunks of 256 KiB are the fastest:

    >>> from math import log
    >>> search = chunk_search(16 << 20)
    >>> tried = [next(search)]
    >>> try:
    ...     while True:
    ...         tried.append(search.send(1 / (1 + abs(log(tried[-1] / (256 << 10))))))
    ... except StopIteration as end:
    ...     best = end.value
    >>> [size >> 10 for size in tried[::2]], best >> 10
    ([1024, 4096, 256, 64, 160], 256)
    """
    best = start = min(START, limit)
    rates = {best: (yield from _better_of_two(best))}
    while (bigger := min(best * FACTOR, limit, CEILING)) > best:
        rates[bigger] = yield from _better_of_two(bigger)
        if rates[bigger] < rates[best] * GAIN:
            break
        best = bigger
    smaller = start
    while smaller > FLOOR and rates[smaller] * HOPELESS > rates[best]:
        smaller = max(smaller // FACTOR, FLOOR)
        rates[smaller] = yield from _better_of_two(smaller)
        if rates[smaller] >= rates[best] * GAIN:
            best = smaller
    order = sorted(rates)
    place = order.index(best)
    neighbours = order[max(place - 1, 0) : place] + order[place + 1 : place + 2]
    if neighbours:
        between = (best + max(neighbours, key=lambda size: rates[size])) // 2
        if (yield from _better_of_two(between)) >= rates[best] * GAIN:
            best = between
    return best


def _better_of_two(size: int) -> Generator[int, float, float]:
    first = yield size
    second = yield size
    return max(first, second)

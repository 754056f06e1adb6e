"""The chunk size of every call: fixed, or found by a search and remembered.

Blink (Wang et al., MLSys 2020), section 4, starts at 1 MB, multiplies while throughput rises and then steps back
additively. Here the factor is 4. As chunks that stay in a CPU's L2 cache may be the fastest whatever is above them,
the search then divides the first size too, unless that is hopeless. The step back goes half of the way from the
best size to the better one of its neighbours. Every size is tried twice and its better rate counts, so one slow call
does not mislead; a size must be `GAIN` times as fast as the best one before it to replace it. At most 7 sizes are
tried, in 14 calls; 10 calls are usual.

A size is remembered for a plan, a back end and a class of buffer sizes: all those between two powers of two. Only
calls of one and the same size are compared with each other; whichever size of a class ends its search first
decides for the class. The chunk size changes the speed of a collective, never its result.

All ranks must choose alike, so they must be told the same seconds: the longest that any of them took.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, TypeGuard

from topoplan.errors import UsageError

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

FORMAT = "topoplan.chunks/1"

OPEN_SEARCHES = 64
"""Searches that are kept at a time; beyond them, the one that began first is given up."""

Key = tuple[str, str, int]
"""Plan digest, back end, and the power of two that the bytes do not exceed."""


class ChunkSizes:
    """Chunk sizes of one back end.

    Parameters
    ----------
    backend : str
        Its name.
    fixed : int, optional
        Bytes; then nothing is searched for.

    Raises
    ------
    UsageError
        ``fixed`` is not positive.

    Examples
    --------
    >>> sizes = ChunkSizes("loopback")
    >>> while not sizes.settled("12ab", 8 << 20):
    ...     size = sizes.choose("12ab", 8 << 20)
    ...     sizes.measured("12ab", 8 << 20, seconds=1e-3 + size * 1e-9)
    >>> sizes.choose("12ab", 8 << 20), sizes.choose("12ab", 7 << 20)
    (65536, 65536)
    """

    def __init__(self, backend: str, *, fixed: int | None = None) -> None:
        if fixed is not None and fixed < 1:
            raise UsageError(f"chunks of {fixed} bytes do not exist; give at least 1, for example 262144")
        self.backend = backend
        self.fixed = fixed
        self._found: dict[Key, int] = {}
        self._open: dict[tuple[str, int], _Search] = {}

    def choose(self, plan: str, nbytes: int) -> int:
        """Bytes of a chunk in the next call of this size; the same until `measured` is called.

        Parameters
        ----------
        plan : str
            Its digest.
        nbytes : int
            Of the buffer.
        """
        if self.fixed is not None:
            return self.fixed
        found = self._found.get(self._key(plan, nbytes))
        if found is None and (plan, nbytes) in self._open:
            found = self._open[plan, nbytes].size
        return max(min(START if found is None else found, nbytes), 1)

    def settled(self, plan: str, nbytes: int) -> bool:
        """Whether calls of this size need not be measured."""
        return self.fixed is not None or nbytes <= FLOOR or self._key(plan, nbytes) in self._found

    def measured(self, plan: str, nbytes: int, seconds: float) -> None:
        """Take in how long a call with the chosen size took, on the slowest rank; nothing to do if `settled`."""
        if self.settled(plan, nbytes):
            return
        if (plan, nbytes) not in self._open:
            if len(self._open) == OPEN_SEARCHES:
                del self._open[next(iter(self._open))]
            self._open[plan, nbytes] = _Search(nbytes)
        settled = self._open[plan, nbytes].take(nbytes / max(seconds, 1e-9))
        if settled is not None:
            key = self._key(plan, nbytes)
            self._found[key] = settled
            self._open = {
                (other, size): search
                for (other, size), search in self._open.items()
                if self._key(other, size) != key
            }

    def save(self, path: str | Path) -> None:
        """Add the sizes that were found to a file, or make one; what it holds of other plans is kept.

        Raises
        ------
        UsageError
            The file is something else, and is left as it is; or it cannot be written.
        """
        path = Path(path)
        kept = _read(path) if path.exists() else {}
        entries = [
            {"plan": plan, "backend": backend, "bytes": nbytes, "chunk": chunk}
            for (plan, backend, nbytes), chunk in sorted({**kept, **self._found}.items())
        ]
        text = json.dumps({"format": FORMAT, "sizes": entries}, indent=1) + "\n"
        draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
        try:
            draft.write_text(text)
            os.replace(draft, path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise UsageError(f"cannot write {path}: {error.strerror}; choose another place") from error

    def load(self, path: str | Path) -> None:
        """Take over the sizes in a file, those of other back ends too, which only `save` uses.

        Raises
        ------
        UsageError
            There is no such file, or it is something else; nothing has been taken over.
        """
        self._found.update(_read(Path(path)))
        self._open = {
            (plan, nbytes): search
            for (plan, nbytes), search in self._open.items()
            if not self.settled(plan, nbytes)
        }

    def _key(self, plan: str, nbytes: int) -> Key:
        return plan, self.backend, 1 << max(nbytes - 1, 0).bit_length()


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


class _Search:
    """A search that is under way for one buffer size."""

    def __init__(self, nbytes: int) -> None:
        self._steps: Generator[int, float, int] = chunk_search(nbytes)
        self.size = next(self._steps)

    def take(self, rate: float) -> int | None:
        """Go on with a rate in bytes per second; the best size once it is known."""
        try:
            self.size = self._steps.send(rate)
        except StopIteration as end:
            best: int = end.value
            return best
        return None


def _read(path: Path) -> dict[Key, int]:
    """The sizes in a file."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read chunk sizes from {path}: {error.strerror}; check the path") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is no file of chunk sizes: {error}; choose another, or remove it"
        ) from error
    told = content.get("format") if isinstance(content, dict) else None
    if told != FORMAT:
        raise UsageError(
            f"{path} is no file of chunk sizes: format {told!r} instead of {FORMAT!r}; choose another"
        )
    entries = content.get("sizes")
    if not isinstance(entries, list):
        raise UsageError(f"{path} holds no list of sizes; choose another file, or remove it")
    return dict(_entry(path, number, entry) for number, entry in enumerate(entries))


def _entry(path: Path, number: int, entry: Any) -> tuple[Key, int]:
    fields = entry if isinstance(entry, dict) else {}
    plan, backend, nbytes, chunk = (fields.get(name) for name in ("plan", "backend", "bytes", "chunk"))
    if isinstance(plan, str) and isinstance(backend, str) and _positive(chunk) and _power_of_two(nbytes):
        return (plan, backend, nbytes), chunk
    raise UsageError(
        f"{path}, size {number}: {str(entry)[:80]} needs plan and backend as text, bytes as a power of two, "
        "and chunk as a positive number; correct it, or remove the file"
    )


def _positive(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0


def _power_of_two(value: object) -> TypeGuard[int]:
    return _positive(value) and value.bit_count() == 1

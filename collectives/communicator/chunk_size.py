"""The chunk size of every call: fixed, or found by `chunk_search` and remembered.

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

from collectives.communicator.chunk_search import FLOOR, START, chunk_search
from topoplan.errors import UsageError

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

"""Slurm's lists of names: ``node[01-08,12],gpu-a``, read in their order and written as short.

A bracket holds numbers and ranges, with leading zeros where the names have them; a name may have several brackets, the
last one fastest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from math import prod

from topoplan.errors import TopologyError

MOST_NAMES = 65_536
"""Most names of one list: more is a slip of the keyboard."""

LONGEST_NAME = 255
"""Characters of the longest name, as of a host in DNS."""

_NAME = re.compile(r"(?:[A-Za-z0-9._:/+-]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_PARTS = re.compile(r"\[[^\[\]]*\]|[^\[\]]+")
_ENDS_IN_DIGITS = re.compile(r"(.*?)([0-9]+)", re.DOTALL)


def expand(text: str) -> tuple[str, ...]:
    """The names of a list, in its order.

    Raises
    ------
    TopologyError
        The text is no list, or names are too many; says which part.

    Examples
    --------
    >>> expand("node[08-10,12],login")
    ('node08', 'node09', 'node10', 'node12', 'login')
    >>> expand("r[1-2]n[0-1]")
    ('r1n0', 'r1n1', 'r2n0', 'r2n1')
    """
    names: list[str] = []
    for word in _words(text):
        if not _NAME.fullmatch(word):
            raise TopologyError(
                f"{word[:60]!r} is no list of names; write it as node[01-08,12] or node1,node2"
            )
        parts = _PARTS.findall(word)
        if sum(len(part) for part in parts if not part.startswith("[")) + 18 * word.count("[") > LONGEST_NAME:
            raise TopologyError(
                f"a name that begins with {word[:40]!r} has more than {LONGEST_NAME} characters; look at its commas"
            )
        choices = [
            _numbers(part, word, MOST_NAMES - len(names)) if part[0] == "[" else [part] for part in parts
        ]
        if len(names) + prod(len(choice) for choice in choices) > MOST_NAMES:
            raise _too_many(word)
        names += ["".join(parts) for parts in product(*choices)]
    return tuple(names)


def _words(text: str) -> list[str]:
    """Parts between commas outside of brackets."""
    whole = text.strip()
    words: list[str] = []
    start = depth = 0
    for found in re.finditer(r"[\[\],]", whole):
        depth += (found[0] == "[") - (found[0] == "]")
        if found[0] == "," and depth == 0:
            words.append(whole[start : found.start()].strip())
            start = found.end()
    if depth:
        raise TopologyError(f"{whole[:60]!r} has a bracket that is not closed; end it with ]")
    return [*words, whole[start:].strip()]


def _numbers(part: str, word: str, most: int) -> list[str]:
    """The numbers in a bracket, of which there may be ``most``."""
    found: list[str] = []
    for piece in part[1:-1].split(","):
        match = _RANGE.fullmatch(piece.strip())
        if match is None:
            raise TopologyError(f"{word[:60]!r}: {piece[:30]!r} is no number or range such as 01-08")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise TopologyError(f"{word[:60]!r}: the range {piece[:40]} runs backwards")
        if len(found) + int(last) - int(first) >= most:
            raise _too_many(word)
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _too_many(word: str) -> TopologyError:
    return TopologyError(f"{word[:60]!r} makes more than {MOST_NAMES} names; look at its ranges")


def folded(names: Sequence[str]) -> str:
    """A list of the names in their order: runs of consecutive numbers become ranges.

    Examples
    --------
    >>> folded(["node08", "node09", "node10", "node03", "login"])
    'node[08-10,03],login'
    """
    groups: list[tuple[str, list[tuple[str, str]]]] = []
    for name in names:
        match = _ENDS_IN_DIGITS.fullmatch(name)
        stem, digits = (match[1], match[2]) if match else (name, "")
        if groups and groups[-1][0] == stem and digits and groups[-1][1]:
            first, last = groups[-1][1][-1]
            if int(digits) == int(last) + 1 and digits == str(int(last) + 1).zfill(len(first)):
                groups[-1][1][-1] = (first, digits)
            else:
                groups[-1][1].append((digits, digits))
        else:
            groups.append((stem, [(digits, digits)] if digits else []))
    return ",".join(_written(stem, runs) for stem, runs in groups)


def _written(stem: str, runs: Sequence[tuple[str, str]]) -> str:
    if not runs:
        return stem
    parts = [first if first == last else f"{first}-{last}" for first, last in runs]
    return f"{stem}{parts[0]}" if len(runs) == 1 and "-" not in parts[0] else f"{stem}[{','.join(parts)}]"


def by_number(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts names as Slurm lists them: runs of digits by their value.

    Examples
    --------
    >>> sorted(["n10", "n9", "m2"], key=by_number)
    ['m2', 'n9', 'n10']
    """
    return tuple(
        (1, int(part), part) if part.isdigit() else (0, 0, part)
        for part in re.findall(r"[0-9]+|[^0-9]+", name)
    )

"""A server laid into a machine: a place for each of its GPUs, so that no pair has more NVLink than the pair of places.

Depth-first, GPU by GPU along the wires; a branch ends where a pair has more than it should, or where more pairs are
short than are allowed. Matrices hold GB/s of each pair, at the rates of the machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from topoplan.health.faults import SLOW

ALIKE = 1.12
"""Rates of a wire within this factor are those of one kind of link: 22 to 25 GB/s are seen of NVLinks of 25."""

_MOST_STEPS = 20_000

Pairs = frozenset[frozenset[int]]


def short_pairs(
    have: Sequence[Sequence[float]], want: Sequence[Sequence[float]], places: Sequence[int]
) -> list[tuple[int, int]] | None:
    """Pairs that have less than they should in these places; None where some pair has more."""
    short = []
    for i, place in enumerate(places):
        for j in range(i):
            wanted = want[place][places[j]]
            if have[i][j] > ALIKE * wanted:
                return None
            if have[i][j] < SLOW * wanted:
                short.append((i, j))
    return short


def embed(
    have: Sequence[Sequence[float]],
    want: Sequence[Sequence[float]],
    *,
    pairs: int,
    first: Sequence[int],
    host: tuple[Pairs, Pairs],
) -> tuple[int, ...] | None:
    """Places of the GPUs in a machine with at most so many pairs short, those of ``first`` where they fit.

    Where pairs may be short, those of GPUs that have lost all NVLinks are not counted. GPUs that share a PCIe
    switch in the server are not laid where the machine has different CPUs; ``host`` has the pairs of both.
    """
    if not pairs and not _may_be_part(have, want):
        return None
    order = _outward(have)
    together, apart = host
    bare = {i for i, row in enumerate(have) if not any(row)} if pairs else set()
    places: dict[int, int] = {}
    steps = 0

    def fits(i: int, place: int, left: int) -> int:
        for j, there in places.items():
            if have[i][j] > ALIKE * want[place][there]:
                return -1
            if {i, j} in together and {place, there} in apart:
                return -1
            if have[i][j] < SLOW * want[place][there] and not bare & {i, j}:
                left -= 1
                if left < 0:
                    return -1
        return left

    def search(depth: int, left: int) -> bool:
        nonlocal steps
        if depth == len(order):
            return True
        i = order[depth]
        for place in (first[i], *(p for p in range(len(want)) if p != first[i])):
            steps += 1
            if steps > _MOST_STEPS:
                return False
            if place in places.values():
                continue
            rest = fits(i, place, left)
            if rest >= 0:
                places[i] = place
                if search(depth + 1, rest):
                    return True
                del places[i]
        return False

    return tuple(places[i] for i in range(len(have))) if search(0, pairs) else None


def _may_be_part(have: Sequence[Sequence[float]], want: Sequence[Sequence[float]]) -> bool:
    """Whether a machine has as many pairs of each strength at least, and as many without NVLink."""
    own, other = (
        sorted((matrix[i][j] for i in range(len(matrix)) for j in range(i)), reverse=True)
        for matrix in (have, want)
    )
    enough = all(mine <= ALIKE * most for mine, most in zip(own, other, strict=False))
    few = all(mine >= SLOW * least for mine, least in zip(reversed(own), reversed(other), strict=False))
    return enough and few


def _outward(have: Sequence[Sequence[float]]) -> list[int]:
    """GPUs so that each has a neighbour among those before it where there is one."""
    order: list[int] = []
    waiting = sorted(range(len(have)), key=lambda i: (-sum(have[i]), i))
    while waiting:
        near = [i for i in waiting if any(have[i][j] for j in order)]
        chosen = (near or waiting)[0]
        order.append(chosen)
        waiting.remove(chosen)
    return order

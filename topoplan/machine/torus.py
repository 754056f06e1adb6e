"""Number the servers of a torus, and cable them to their neighbours.

Server numbers run through the last dimension first, as in an array of the torus's shape. The NICs of a server are dealt
out by number: those ahead in dimension 0, those back in it, those ahead in dimension 1, and so on. NIC i of those ahead
is cabled to NIC i of those back of the next server. In a dimension of two servers both lead to the same one.

NICs do not forward (`topoplan.machine.routing`), so a route passes one cable, and a GPU stores and forwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import UsageError
from topoplan.machine.nic_wiring import NicPort
from topoplan.machine.topology import Link
from topoplan.units import exact, nearest_float

MOST_DIMENSIONS = 6
"""Most dimensions of a torus of servers: more is taken for a typing error."""

Offset = tuple[int, ...]
"""Servers ahead in each dimension, from 0 to the side less 1."""


class Direction(NamedTuple):
    """A dimension, and 1 for ahead or -1 for back."""

    dimension: int
    step: int

    def __str__(self) -> str:
        return f"{'ahead' if self.step > 0 else 'back'} in dimension {self.dimension}"


@dataclass(frozen=True, slots=True)
class Torus:
    """A torus of servers by its sides, each 2 or more."""

    sides: tuple[int, ...]

    @property
    def servers(self) -> int:
        """Number of servers."""
        return prod(self.sides)

    @property
    def directions(self) -> list[Direction]:
        """All directions, ahead before back in each dimension."""
        return [Direction(one, step) for one in range(len(self.sides)) for step in (1, -1)]

    def offset(self, direction: Direction, steps: int = 1) -> Offset:
        """Return the offset of the server so many steps away in a direction."""
        dimension, step = direction
        return tuple(
            step * steps % side if number == dimension else 0 for number, side in enumerate(self.sides)
        )

    def coordinates(self, server: int) -> Offset:
        """Return the coordinates of a server."""
        found = []
        for side in reversed(self.sides):
            server, one = divmod(server, side)
            found.append(one)
        return tuple(found[::-1])

    def server(self, coordinates: Sequence[int]) -> int:
        """Return the number of the server at some coordinates, each modulo its side."""
        number = 0
        for one, side in zip(coordinates, self.sides, strict=True):
            number = number * side + one % side
        return number

    def moved(self, server: int, offset: Sequence[int]) -> int:
        """Return the server at an offset from another one."""
        here = self.coordinates(server)
        return self.server([one + ahead for one, ahead in zip(here, offset, strict=True)])

    def between(self, server: int, other: int) -> Offset:
        """Return the offset of the second server from the first."""
        ends = zip(self.coordinates(server), self.coordinates(other), self.sides, strict=True)
        return tuple((there - here) % side for here, there, side in ends)

    def neighbours(self) -> list[int]:
        """Return server 0 and its neighbours, ascending."""
        return sorted({0, *(self.server(self.offset(one)) for one in self.directions)})


Servers = TypeVar("Servers", int, NDArray[np.int64])
"""The number of a server, or the numbers of some."""


def ahead(sides: Sequence[int], one: Servers, other: Servers) -> Servers:
    """Return the number of the server at the offset of a second server from a first one; a ring has one side."""
    found, step = one * 0, 1
    for side in reversed(sides):
        found = found + (other // step - one // step) % side * step
        step *= side
    return found


def sides_of_neighbours(neighbours: Sequence[frozenset[int]]) -> tuple[int, ...] | None:
    """Return the sides of the torus in which servers have these neighbours; None if they are not of a torus."""
    many = len(neighbours)
    for sides in factorings(many):
        torus = Torus(sides)
        offsets = [torus.offset(one) for one in torus.directions]
        if all(
            found == {torus.moved(server, offset) for offset in offsets}
            for server, found in enumerate(neighbours)
        ):
            return sides
    return None


def factorings(size: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write a number as a product of numbers above one, in every order."""
    yield (size,)
    for first in range(2, size // 2 + 1):
        if size % first == 0:
            yield from ((first, *rest) for rest in factorings(size // first))


def cable_places(
    sides: Sequence[int], nics: int, dimension_nics: Sequence[int] | None
) -> list[tuple[Direction, int]]:
    """Return for each NIC of a server its direction, and its number among those of the direction.

    UsageError if the NICs cannot be dealt out to the directions.
    """
    directions = Torus(tuple(sides)).directions
    if dimension_nics is None:
        each, left = divmod(nics, len(directions))
        if left or not each:
            raise UsageError(
                f"a torus of {len(sides)} dimensions needs a multiple of {len(directions)} NICs in each server, got "
                f"{nics}; choose them with nics (--nics), or give dimension_nics (--dimension-nics)"
            )
        dimension_nics = [each] * len(sides)
    elif 2 * sum(dimension_nics) != nics:
        raise UsageError(
            f"dimension_nics {','.join(map(str, dimension_nics))} needs {2 * sum(dimension_nics)} NICs in each server, "
            f"got {nics}; choose them with nics (--nics)"
        )
    return [(one, number) for one in directions for number in range(dimension_nics[one.dimension])]


def join_torus(
    sides: Sequence[int],
    dimension_nics: Sequence[int] | None,
    servers: Sequence[tuple[str, Sequence[NicPort]]],
    *,
    nics: int,
    latency: float | None,
    numbers: Sequence[int],
) -> list[Link]:
    """Return the cables between some servers of a torus, both directions of each; arguments as of `join_servers`.

    Ports are NICs or, for hosts with ports of their own, GPUs; several cables between the same two devices are one
    link. ``latency`` is that of a wire of a NIC, of which a cable counts as two.
    """
    torus, places = Torus(tuple(sides)), cable_places(sides, nics, dimension_nics)
    number_of = {place: number for number, place in enumerate(places)}
    present = {
        number: {port.number: port for port in ports}
        for number, (_, ports) in zip(numbers, servers, strict=True)
    }
    links: dict[tuple[str, str], Link] = {}

    def add(src: str, dst: str, rate: float) -> None:
        if not rate:
            return
        known = links.get((src, dst))
        if known is None:
            links[src, dst] = Link(
                src, dst, "network", rate, latency=None if latency is None else 2 * latency
            )
        else:
            total = nearest_float(exact(known.bandwidth) + exact(rate))
            links[src, dst] = replace(known, bandwidth=total, count=known.count + 1)

    for server, ports in present.items():
        for (direction, cable), nic in number_of.items():
            if direction.step < 0:
                continue
            other = torus.moved(server, torus.offset(direction))
            near = ports.get(nic)
            far = present.get(other, {}).get(number_of[Direction(direction.dimension, -1), cable])
            if near is not None and far is not None:
                add(near.sender, far.receiver, min(near.out, far.back))
                add(far.sender, near.receiver, min(far.out, near.back))
    return list(links.values())

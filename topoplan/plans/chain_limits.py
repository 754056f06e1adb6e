"""Limit the rate of schedules with few start-ups in sequence: the proof of a bound on time at every size.

A schedule pays the start-ups of its longest chain of hops, and moves the buffer at its rate. Chains of many hops
allow the best rate; short ones do not. A *limit* says: a schedule whose chains take less than so many seconds of
start-ups has a rate of at most so much. Three kinds:

- `GroupLimit`: chains are too short for two hops between groups of ranks (servers, or single ranks). Then the data of
  one group for another crosses directly, and no third group adds or copies it on the way. Between groups of p and q
  ranks one byte crosses at least

      pq times with chains of one hop only,   min(p, q) times with one hop more inside,   else once

  for an allreduce. (With one hop more inside either all q ranks take in the sum of the other side, or all p send
  theirs.) A broadcast leaves the root's group q times or once, and of an allgather each of p blocks leaves its group
  q times or once. Sums over pairs of groups across a set S of devices bound the rate by the capacity out of S.
- `HeightLimit`: a chain has at most h hops. Under lengths of the links a byte needs at least the cheapest tree of
  that height (`topoplan.plans.minimum_trees`), so rate <= sum of c(e) y(e) over that: by tables among few ranks, by
  a lower bound on it among more. There a byte of an allreduce needs hops by which every rank reaches all others.
- `ExitLimit`: a rank sends a byte over several of its wires, since none reaches all others within the chain. Under
  lengths y of the links, a byte needs at least the cheapest set of wires out of the root that together reach all ranks
  (into the root of a reduce). A rank of an allreduce sends its part like a root, and receives the others' like one.
  Let only pairs of ranks at least ``far`` apart count, for wires out of and into every rank. A hop a -> b of start-up
  s that counts twice, out of a for a rank v and into b for a rank u, ends no earlier than d(u, b), and leaves
  d(a, v) - s for the rest: a chain of 2 far - s or more. So no hop counts twice if the chain is below that.

A `StartLimit` holds for chains of any length: a rank of an allgather receives the blocks of all others in separate
copies, and a wire starts one at a time. N - 1 copies over links of w(i) wires and start-ups s(i) take at least the
(N - 1)-th of all multiples k s(i) / w(i). A reduce-scatter sends as many.

The caller gives the seconds of start-ups (`topoplan.model`): for every link the least start-up of a hop over it.
Switches and helpers that copy or add have no such limits.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import PlanError
from topoplan.machine.fabric import Fabric
from topoplan.plans.certificates.certificate import capacity_of, leaving, node_set
from topoplan.plans.file_values import read_list, read_number, read_object, read_text, read_texts, read_whole
from topoplan.plans.minimum_trees import LARGEST_EXACT, UNREACHABLE, HopLimitedTrees, least_hops
from topoplan.units import TOLERANCE

GROUPINGS = ("ranks", "servers", "sides")
"""Groups of `GroupLimit`: single ranks, servers, or the ranks on either side of the set."""


class ChainLimit(ABC):
    """A proof that schedules with short chains are slow.

    ``kind`` is its name in files. It holds for schedules whose chains of start-ups are shorter than ``chain`` seconds.
    """

    __slots__ = ()
    kind: ClassVar[str]
    chain: float

    @abstractmethod
    def bound(
        self, fabric: Fabric, collective: str, root: int | None, start_ups: Sequence[float]
    ) -> Fraction:
        """Recompute the highest rate of such schedules in GB/s, exactly.

        ``start_ups`` are the least seconds of a hop over each link. PlanError if the limit proves nothing: chains of
        this length may do what it excludes, or it does not fit the machine.
        """

    @abstractmethod
    def to_object(self) -> dict[str, object]:
        """Return the JSON object of a plan file, with its kind."""


@dataclass(frozen=True, slots=True)
class GroupLimit(ChainLimit):
    """Schedules without two consecutive hops between groups, and their traffic out of a set of devices.

    ``between`` is one of `GROUPINGS`; every group is inside ``side`` as a whole or not at all.
    """

    kind: ClassVar[str] = "groups"
    chain: float
    between: str
    side: tuple[str, ...]

    def bound(
        self, fabric: Fabric, collective: str, root: int | None, start_ups: Sequence[float]
    ) -> Fraction:
        side = node_set(self.side, fabric)
        groups = rank_groups(fabric, self.between, side)
        for group in groups:
            if 0 < sum(rank in side for rank in group) < len(group):
                raise PlanError("a chain limit parts the ranks of a group")
        inside, across = hop_start_ups(fabric, groups, start_ups)
        crossings = crossings_of(self.chain, inside, across, two=len(groups) == 2)
        if crossings is None:
            raise PlanError(f"chains of {self.chain:.4g} s may hop between groups more than once")
        needed = Fraction(0)
        for sender in groups:
            for receiver in groups:
                if sender[0] in side and receiver[0] not in side:
                    needed += _least_crossings(collective, root, sender, receiver, crossings, fabric.size)
        if not needed:
            raise PlanError("nothing must leave the devices of a chain limit")
        return capacity_of(leaving(side, fabric), fabric) / needed

    def to_object(self) -> dict[str, object]:
        return {"chain": self.chain, "kind": self.kind, "between": self.between, "side": list(self.side)}


@dataclass(frozen=True, slots=True)
class HeightLimit(ChainLimit):
    """Schedules whose chains have at most ``height`` hops, and nonzero link lengths under which such trees are long."""

    kind: ClassVar[str] = "heights"
    chain: float
    height: int
    lengths: tuple[tuple[str, str, int], ...]

    def bound(
        self, fabric: Fabric, collective: str, root: int | None, start_ups: Sequence[float]
    ) -> Fraction:
        if fabric.size > MOST_BOUNDED or not 0 < self.height < fabric.size:
            raise PlanError(
                f"a limit of heights needs up to {MOST_BOUNDED} ranks and a height below their number, got "
                f"{fabric.size} ranks and height {self.height}"
            )
        inside, across = hop_start_ups(fabric, [(rank,) for rank in range(fabric.size)], start_ups)
        if self.chain > (self.height + 1) * min(inside, across) * (1 + TOLERANCE):
            raise PlanError(f"chains of {self.chain:.4g} s may have more than {self.height} hops")
        lengths = _link_lengths(self.lengths, fabric)
        least = self._least(rank_distances(fabric, lengths), collective, root)
        if not least:
            raise PlanError("trees of this height have no length under those of a chain limit")
        return capacity_of([Fraction(length) for length in lengths], fabric) / least

    def _least(self, cost: NDArray[np.int64], collective: str, root: int | None) -> Fraction:
        """Return the least length that a byte of the buffer uses, or a bound below it."""
        if len(cost) > LARGEST_EXACT:
            return self._bounded(cost, collective, root)
        down = HopLimitedTrees(cost, self.height).costs.tolist()
        up = HopLimitedTrees(cost.T.copy(), self.height).costs.tolist()
        if collective in ("broadcast", "reduce"):
            assert root is not None, "a broadcast or reduce has a root"
            return Fraction((down if collective == "broadcast" else up)[root])
        if collective in ("allgather", "reduce_scatter"):
            return Fraction(sum(down if collective == "allgather" else up), len(down))
        return Fraction(max(*down, *up))

    def _bounded(self, cost: NDArray[np.int64], collective: str, root: int | None) -> Fraction:
        ranks = range(len(cost))
        if collective == "allreduce":
            found = [least_hops(cost, self.height, ranks)]
        else:
            away = cost if collective in ("broadcast", "allgather") else cost.T
            found = [least_hops(away, self.height, (rank,)) for rank in (ranks if root is None else (root,))]
        if max(found) >= UNREACHABLE:
            raise PlanError(f"trees of height {self.height} do not reach all ranks")
        return Fraction(sum(found), len(found))

    def to_object(self) -> dict[str, object]:
        lengths = [list(one) for one in self.lengths]
        return {"chain": self.chain, "kind": self.kind, "height": self.height, "lengths": lengths}


@dataclass(frozen=True, slots=True)
class ExitLimit(ChainLimit):
    """Nonzero link lengths under which the wires that a rank needs within the chain are long.

    ``far`` is in seconds of start-ups: pairs of ranks below it do not count. 0 counts all pairs, and of an allreduce
    only the wires out of every rank.
    """

    kind: ClassVar[str] = "exits"
    chain: float
    far: float
    lengths: tuple[tuple[str, str, int], ...]

    def bound(
        self, fabric: Fabric, collective: str, root: int | None, start_ups: Sequence[float]
    ) -> Fraction:
        if collective in ("allgather", "reduce_scatter"):
            raise PlanError(f"a chain limit of exits needs one buffer for all ranks, got {collective}")
        if self.far and self.chain > 2 * self.far * (1 + TOLERANCE) - max(start_ups):
            raise PlanError(f"chains of {self.chain:.4g} s may count a hop of far ranks twice")
        lengths = _link_lengths(self.lengths, fabric)
        needed = 0
        for outward in (True, False):
            if (collective == "broadcast" and not outward) or (collective == "reduce" and outward):
                continue
            if collective == "allreduce" and not outward and not self.far:
                continue
            for rank in range(fabric.size) if root is None else (root,):
                exits = Exits.of(fabric, rank, start_ups, outward=outward)
                needed += exits.least(self.chain, self.far, exits.cheapest(lengths))
        if not needed:
            raise PlanError("wires out of ranks have no length under those of a chain limit")
        return capacity_of([Fraction(length) for length in lengths], fabric) / needed

    def to_object(self) -> dict[str, object]:
        lengths = [list(one) for one in self.lengths]
        return {"chain": self.chain, "kind": self.kind, "far": self.far, "lengths": lengths}


@dataclass(frozen=True, slots=True)
class StartLimit:
    """The start-ups of the blocks that a rank receives from all others, or sends to them, over its wires."""

    kind: ClassVar[str] = "starts"
    rank: str

    def seconds(self, fabric: Fabric, collective: str, start_ups: Sequence[float]) -> float:
        """Return the least seconds of start-ups of any schedule; PlanError if the limit proves nothing."""
        if collective not in ("allgather", "reduce_scatter"):
            raise PlanError(f"a limit of starts needs a block of every rank, got {collective}")
        if self.rank not in fabric.ranks:
            raise PlanError(f"a limit of starts names {self.rank!r}, which is not a rank"[:200])
        graph = fabric.route_graph
        rows = graph.entering() if collective == "allgather" else graph.leaving()
        wires = rows[fabric.ranks.index(self.rank)]
        if any(node >= fabric.size for _, node in wires):
            raise PlanError("a limit of starts needs wires to ranks, and no switch")
        every = [start_ups[link] / fabric.links[link].count for link, _ in wires]
        return sorted(copy * seconds for seconds in every for copy in range(1, fabric.size))[fabric.size - 2]

    def to_object(self) -> dict[str, object]:
        return {"kind": self.kind, "rank": self.rank}


Limit = ChainLimit | StartLimit
"""A limit of a plan file."""

MOST_BOUNDED = 64
"""Most ranks of a limit of heights."""

MOST_EXITS = 8
"""Most ranks next to one whose sets are enumerated."""


@dataclass(frozen=True, slots=True)
class Exits:
    """The wires out of a rank to the ranks next to it, or into it from them.

    links: the links of each neighbour.
    reach: (neighbours, N) seconds of start-ups from the rank to every other, or back, whose first hop is to the
    neighbour and that do not return; infinite if no such path exists.
    """

    links: tuple[tuple[int, ...], ...]
    reach: NDArray[np.float64]

    @staticmethod
    def of(fabric: Fabric, rank: int, start_ups: Sequence[float], *, outward: bool) -> Exits:
        """Return the wires of a rank; PlanError if one leads to a switch, or there are too many."""
        graph = fabric.route_graph
        rows = graph.leaving() if outward else graph.entering()
        near: dict[int, list[int]] = {}
        for link, node in rows[rank]:
            near.setdefault(node, []).append(link)
        if len(near) > MOST_EXITS or max(near, default=0) >= fabric.size:
            raise PlanError(
                f"a chain limit of exits needs wires to at most {MOST_EXITS} ranks, and no switch"
            )
        arcs = [[(node, start_ups[link]) for link, node in row] for row in rows]
        reach = np.empty((len(near), fabric.size))
        for place, (node, links) in enumerate(sorted(near.items())):
            onward = distances(arcs, node, without=rank)[: fabric.size]
            reach[place] = np.array(onward) + min(start_ups[link] for link in links)
        reach[:, rank] = 0.0
        return Exits(tuple(tuple(links) for _, links in sorted(near.items())), reach)

    def cheapest(self, lengths: Sequence[int]) -> list[int]:
        """Return the least length of a hop to each neighbour."""
        return [min(lengths[link] for link in links) for links in self.links]

    def least(self, chain: float, far: float, lengths: Sequence[int]) -> int:
        """Return the least length of neighbours through which chains below ``chain`` reach all ranks that are far."""
        others = self.reach.min(axis=0) >= far * (1 - TOLERANCE)
        within = self.reach < chain * (1 - TOLERANCE)
        bits = 1 << np.arange(len(self.links))
        masks = {int(mask) for mask in bits @ within[:, others]}
        if 0 in masks:
            raise PlanError(f"chains of {chain:.4g} s do not reach all ranks")
        sets = np.arange(1 << len(self.links))
        reaching = np.all([sets & mask != 0 for mask in masks], axis=0) if masks else sets >= 0
        total = (sets[:, None] >> np.arange(len(self.links)) & 1) @ np.array(lengths, dtype=np.int64)
        return int(total[reaching].min())


def _link_lengths(given: Iterable[tuple[str, str, int]], fabric: Fabric) -> list[int]:
    """Return the length of every link; PlanError if one is below 0 or too large to add."""
    known = {(src, dst): length for src, dst, length in given}
    lengths = [known.get((link.src, link.dst), 0) for link in fabric.links]
    if min(lengths, default=0) < 0 or 2 * sum(lengths) * fabric.size >= UNREACHABLE:
        raise PlanError("lengths of a chain limit must be whole numbers from 0 on, and small enough to add")
    return lengths


def limit_from_object(item: object) -> Limit:
    """Read a limit of a plan file; PlanError if its kind is unknown, or a key is missing or of a wrong type."""
    value = read_object(item, "limit")
    kind = value.get("kind")
    if kind == StartLimit.kind:
        return StartLimit(read_text(value.get("rank"), "limit: rank"))
    chain = read_number(value.get("chain"), "limit: chain")
    if kind == GroupLimit.kind:
        between = read_text(value.get("between"), "limit: between")
        if between not in GROUPINGS:
            raise PlanError(f"limit: between must be one of {', '.join(GROUPINGS)}, not {between!r}"[:200])
        return GroupLimit(chain, between, read_texts(value.get("side"), "limit: side"))
    if kind not in (HeightLimit.kind, ExitLimit.kind):
        raise PlanError(f"limit: kind {repr(kind)[:60]} is unknown; use groups, heights, exits or starts")
    lengths = []
    for row in read_list(value.get("lengths"), "limit: lengths"):
        ends = read_list(row, "limit: length")
        if len(ends) != 3:
            raise PlanError(f"limit: a length must be [src, dst, length], not {ends!r}"[:200])
        src, dst = read_texts(ends[:2], "limit: length")
        lengths.append((src, dst, read_whole(ends[2], "limit: length")))
    if kind == ExitLimit.kind:
        return ExitLimit(chain, read_number(value.get("far"), "limit: far"), tuple(lengths))
    return HeightLimit(chain, read_whole(value.get("height"), "limit: height"), tuple(lengths))


def rank_groups(fabric: Fabric, between: str, side: set[int]) -> list[tuple[int, ...]]:
    """Return the ranks of every group."""
    if between == "ranks":
        return [(rank,) for rank in range(fabric.size)]
    home = {device.name: device.server for device in fabric.topology.devices}
    groups: dict[object, list[int]] = {}
    for rank, name in enumerate(fabric.ranks):
        groups.setdefault(home[name] if between == "servers" else rank in side, []).append(rank)
    return [tuple(group) for group in groups.values()]


def crossings_of(chain: float, inside: float, across: float, *, two: bool) -> str | None:
    """Return what chains below ``chain`` seconds can do around their only hop between groups; None if they have more.

    ``inside`` and ``across`` are the least start-ups of a hop in a group and between two. With ``two`` groups a chain
    from one to the other has an odd number of such hops, one or three.

    >>> [crossings_of(chain, 9, 36, two=False) for chain in (45, 54, 72, 73)]
    ['direct', 'half', 'once', None]
    """
    chain *= 1 - TOLERANCE
    if chain > (3 if two else 2) * across:
        return None
    if chain <= across + inside:
        return "direct"
    return "half" if chain <= across + 2 * inside else "once"


def _least_crossings(
    collective: str,
    root: int | None,
    sender: Sequence[int],
    receiver: Sequence[int],
    crossings: str,
    size: int,
) -> Fraction:
    """Return how often a byte of the buffer crosses from one group to another, at least."""
    p, q = len(sender), len(receiver)
    if collective == "allreduce":
        return Fraction({"direct": p * q, "half": min(p, q), "once": 1}[crossings])
    direct = crossings == "direct"
    if collective == "broadcast":
        return Fraction((q if direct else 1) if root in sender else 0)
    if collective == "reduce":
        return Fraction((p if direct else 1) if root in receiver else 0)
    other = p if collective == "allgather" else q
    return Fraction(p * q if direct else other, size)


def hop_start_ups(
    fabric: Fabric, groups: Sequence[Sequence[int]], start_ups: Sequence[float]
) -> tuple[float, float]:
    """Return the least start-ups of a hop inside any group, and between any two; infinite if no such hop exists."""
    arcs = arcs_of(fabric, start_ups)
    inside = across = float("inf")
    for group in groups:
        others = set(range(fabric.size)) - set(group)
        across = min(across, nearest(arcs, group, others))
        for rank in group if len(group) > 1 else ():
            inside = min(inside, nearest(arcs, (rank,), set(group) - {rank}))
    return inside, across


ArcLists = list[list[tuple[int, float]]]


def arcs_of(fabric: Fabric, costs: Sequence[float]) -> ArcLists:
    """Return the links (head, cost) out of every state of the graph of routes, ranks first."""
    return [[(dst, costs[link]) for link, dst in row] for row in fabric.route_graph.leaving()]


def nearest(arcs: ArcLists, starts: Iterable[int], ends: set[int]) -> float:
    """Return the least cost from any of some nodes to any of others; infinite if no path exists."""
    heap = [(0.0, node) for node in starts]
    seen: set[int] = set()
    while heap:
        reach, node = heapq.heappop(heap)
        if node in ends:
            return reach
        if node not in seen:
            seen.add(node)
            for head, cost in arcs[node]:
                if head not in seen:
                    heapq.heappush(heap, (reach + cost, head))
    return float("inf")


def distances(arcs: ArcLists, start: int, *, through: int = -1, without: int = -1) -> list[float]:
    """Return the least cost from a node to every other; infinite if no path exists.

    Nodes below ``through``, except the start, are not passed, and ``without`` is not entered.
    """
    best = [float("inf")] * len(arcs)
    best[start] = 0.0
    heap = [(0.0, start)]
    while heap:
        reach, node = heapq.heappop(heap)
        if reach > best[node] or (node < through and node != start):
            continue
        for head, cost in arcs[node]:
            if reach + cost < best[head] and head != without:
                best[head] = reach + cost
                heapq.heappush(heap, (reach + cost, head))
    return best


def rank_distances(fabric: Fabric, lengths: Sequence[int]) -> NDArray[np.int64]:
    """Return the (N, N) lengths of shortest paths between two ranks through no third; `UNREACHABLE` if none exists."""
    arcs = arcs_of(fabric, lengths)
    table = np.full((fabric.size, fabric.size), UNREACHABLE, dtype=np.int64)
    for start in range(fabric.size):
        reached = distances(arcs, start, through=fabric.size)[: fabric.size]
        for end, length in enumerate(reached):
            if length < float("inf"):
                table[start, end] = int(length)
    return table

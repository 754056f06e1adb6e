"""Divide a machine among jobs of given sizes.

Jobs get disjoint sets of GPUs. The *part* of a job is its rate over the rate of the best set of its size on the empty
machine. The best division has the largest least part, and among those the largest sum.

Jobs that share links (PCIe, NICs) get their rates of running at once: if their own plans do not fit on the links
together, all their trees are packed together (`topoplan.solve.mesh_planner.rate_together`), each job in proportion to
the rate of its best set, so that their parts are equal and maximal; or in proportion to its rate alone, if that keeps
the least part and gives more to the others (not necessarily the most). Divisions are evaluated in the order of their
rates alone, which bound the joint ones, until none of the rest can be better.

Divisions that only exchange interchangeable GPUs are one (`topoplan.operate.compare.allocations`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations
from math import factorial, prod

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import UsageError
from topoplan.machine.fabric import ALL, CHANNEL_CHOICES, Fabric
from topoplan.machine.fabric_structure import machine_labelled_graph
from topoplan.machine.permutation_groups import components
from topoplan.machine.topology import TopologyLike, as_topology
from topoplan.operate.compare.allocations import (
    Groups,
    count_vectors,
    interchangeable_groups,
    last_allocation,
)
from topoplan.operate.compare.recommendation import Progress, RankedSets
from topoplan.plans.build import Allocation
from topoplan.plans.loads import link_loads
from topoplan.plans.plan import COLLECTIVES, Plan, check_collective
from topoplan.solve.mesh_planner import rate_together
from topoplan.solve.planner import plan

MOST_WAYS = 20_000
"""Most evaluated divisions, up to exchanges of interchangeable GPUs: seconds. Those with the best sets come first."""

MOST_TOGETHER = 60
"""Most sets of jobs whose trees are packed together; a tenth of a second each on 8 GPUs over PCIe."""

Counts = NDArray[np.int64]
"""Numbers of GPUs of each group of interchangeable ones, for one set, or a row for each of many."""


@dataclass(frozen=True, slots=True)
class JobGpus:
    """The GPUs of one job; rates in GB/s of algorithm bandwidth, infinite for one GPU.

    gpus: ascending.
    rate: beside the other jobs.
    alone: of these GPUs on the empty machine.
    best: of the best set of as many GPUs.
    shares_links: whether another job uses some of its links.
    """

    gpus: tuple[int, ...]
    rate: float
    alone: float
    best: float
    shares_links: bool

    @property
    def part(self) -> float:
        """Rate over that of the best set; 1 for one GPU."""
        return 1.0 if len(self.gpus) == 1 else self.rate / self.best


@dataclass(frozen=True, slots=True)
class Division:
    """The best division of a machine among jobs.

    jobs: in the order of the given sizes.
    ways: approximate number of divisions up to exchanges.
    proved: whether no other division has a larger least part.
    complete: whether none has a larger sum of parts either; else only the most promising were evaluated.
    """

    jobs: tuple[JobGpus, ...]
    ways: int
    proved: bool
    complete: bool

    @property
    def least(self) -> float:
        return min(job.part for job in self.jobs)


def divide(
    topology: TopologyLike,
    sizes: Sequence[int],
    collective: str = "allreduce",
    *,
    free: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> Division:
    """Return the best division of a machine among jobs.

    sizes: GPUs of each job, one or more.
    collective: allreduce, broadcast or reduce (from the first GPU of each job), allgather or reduce_scatter.

    Two halves of a DGX-1V are as good as each alone; pairs then take the doubled NVLinks:

    >>> import topoplan
    >>> found = divide(topoplan.load("dgx-1v"), [4, 2, 2])
    >>> [job.gpus for job in found.jobs], found.least
    ([(0, 1, 2, 3), (4, 7), (5, 6)], 1.0)

    Over PCIe two jobs of four stay behind their CPUs:

    >>> [job.gpus for job in divide(topoplan.load("pcie-x8"), [4, 4]).jobs]
    [(0, 1, 2, 3), (4, 5, 6, 7)]
    """
    topology = as_topology(topology)
    collective = check_collective(collective)
    if collective not in COLLECTIVES:
        raise UsageError(f"collective must be one of {', '.join(COLLECTIVES)} for jobs, got {collective}")
    ranked = RankedSets(topology, collective, tuple(sorted(topology.select(free))), progress)
    if not sizes or min(sizes) < 1 or sum(sizes) > len(ranked.free):
        text = " and ".join(str(size) for size in sizes) or "no"
        raise UsageError(
            f"jobs of {text} GPUs do not fit on {len(ranked.free)}; ask for one or more, {len(ranked.free)} together"
        )
    return _Divider(ranked, tuple(sizes)).best()


@dataclass(frozen=True, slots=True)
class _Way:
    """One division: GPUs in the order of the jobs, largest first, and their parts alone."""

    gpus: tuple[tuple[int, ...], ...]
    parts: tuple[float, ...]

    @property
    def worth(self) -> tuple[float, float]:
        """Sort key, larger is better: the least part, then the sum."""
        return min(self.parts), sum(self.parts)


@dataclass(frozen=True, slots=True)
class _JointRates:
    """The jobs of a division at once, and its sort key."""

    worth: tuple[float, float]
    jobs: tuple[JobGpus, ...]
    complete: bool = True


class _Divider:
    def __init__(self, ranked: RankedSets, sizes: tuple[int, ...]) -> None:
        self._ranked = ranked
        self._sizes = sizes
        self._order = sorted(range(len(sizes)), key=lambda job: -sizes[job])
        self._descending = tuple(sizes[job] for job in self._order)
        moving = sorted({size for size in sizes if size > 1})
        self._best = {
            size: max(ranked.rate(one.gpus) for one in ranked.planned_classes(size)) for size in moving
        }
        for size, rate in self._best.items():
            if not rate:
                raise UsageError(f"no path joins any {size} GPUs; ask for smaller jobs")
        self._groups = self._interchangeable(moving)
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._together: dict[tuple[tuple[int, ...], ...], float] = {}
        self._room: Counts = np.array([len(group) for group in self._groups])
        self._choices: dict[int, Counts] = {}
        self._parts: dict[int, NDArray[np.float64]] = {}
        for size in {*sizes}:
            parts = {vector: self._part_of(vector) for vector in count_vectors(self._groups, [size])}
            order = sorted(parts, key=lambda vector: (-parts[vector], [-count for count in vector]))
            self._choices[size] = np.array(order)
            self._parts[size] = np.array([parts[vector] for vector in order])

    def _interchangeable(self, moving: Sequence[int]) -> Groups:
        """Return groups of free GPUs, by index, whose exchange preserves every link in use."""
        ranked = self._ranked
        used = {one.channel for size in moving for one in ranked.classes(size).values()}
        tried: tuple[str, ...] = ()
        for choice in CHANNEL_CHOICES["auto"]:
            if not used:
                break
            tried = tuple(dict.fromkeys((*tried, *choice)))
            used.discard("+".join(choice))
        part = ranked.topology.subset(ranked.free)
        return interchangeable_groups(machine_labelled_graph(part, tried or ("nvlink",)))

    def best(self) -> Division:
        """Return the best division: first among the largest least parts alone, then among those of the joint rates."""
        number = _number_of_ways(tuple(self._room.tolist()), self._sizes)
        least = self._largest_least()
        best = self._best_of(least)
        complete = best.complete
        if best.worth[0] < least:
            # shared links cost more than other sets do: divisions with smaller parts alone may be better
            best = self._best_of(best.worth[0])
            complete = complete and best.complete
        placed = dict(zip(self._order, best.jobs, strict=True))
        return Division(
            tuple(placed[job] for job in range(len(self._sizes))),
            number,
            proved=complete or best.worth[0] == least,
            complete=complete,
        )

    def _largest_least(self) -> float:
        """Return the largest least part of jobs alone, which is one of the parts of sets."""
        levels: list[float] = sorted(
            {part for size in self._best for part in self._parts[size].tolist()} or {1.0}
        )
        return levels[bisect_left(levels, True, lo=1, key=lambda least: not self._fits_above(least)) - 1]

    def _fits_above(self, least: float) -> bool:
        """Return whether a division exists in which every job has this part alone."""
        hopeless: set[tuple[int, ...]] = set()

        def place(number: int, left: Counts) -> bool:
            if number == len(self._descending):
                return True
            # the number of remaining GPUs implies the number of placed jobs
            key = tuple(left.tolist())
            if key in hopeless:
                return False
            found = any(
                place(number + 1, left - vector) for vector in self._fitting(number, left, least, 0)[1]
            )
            if not found:
                hopeless.add(key)
            return found

        return place(0, self._room)

    def _fitting(self, number: int, left: Counts, least: float, first: int) -> tuple[list[int], Counts]:
        """Return the sets for a job among the remaining GPUs, best first: indices from ``first`` on, and vectors."""
        size = self._descending[number]
        stop = int(np.searchsorted(-self._parts[size], -least, side="right"))
        places = np.flatnonzero((self._choices[size][first:stop] <= left).all(axis=1)) + first
        return places.tolist(), self._choices[size][places]

    def _best_of(self, least: float) -> _JointRates:
        """Return the best of the divisions in which every job has this part alone; of too many the first ones."""
        ways: list[_Way] = []
        complete = True
        perfect = (1.0, float(len(self._sizes)))
        for way in self._ways(least):
            ways.append(way)
            if way.worth == perfect and (found := self._evaluated(way)).worth == perfect:
                return found
            if len(ways) == MOST_WAYS:
                complete = False
                break
        best: _JointRates | None = None
        for way in sorted(ways, key=lambda way: (-way.worth[0], -way.worth[1], way.gpus)):
            if best is not None and way.worth <= best.worth:
                break
            if best is not None and len(self._together) >= MOST_TOGETHER:
                complete = False
                break
            found = self._evaluated(way)
            if best is None or found.worth > best.worth:
                best = found
        assert best is not None, "a way with this least part was found"
        return replace(best, complete=complete)

    def _evaluated(self, way: _Way) -> _JointRates:
        jobs = self._beside(way)
        parts = [job.part for job in jobs]
        return _JointRates((min(parts), sum(parts)), jobs)

    def _ways(self, least: float) -> Iterator[_Way]:
        """Yield the divisions in which every job has this part alone, largest jobs with the best sets first."""
        sizes = self._descending

        def extend(left: Counts, taken: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
            number = len(taken)
            if number == len(sizes):
                yield taken
                return
            # equal jobs are ordered by their sets
            first = taken[-1] if taken and sizes[number - 1] == sizes[number] else 0
            for place, vector in zip(*self._fitting(number, left, least, first), strict=True):
                yield from extend(left - vector, (*taken, place))

        for places in extend(self._room, ()):
            vectors = [self._choices[size][place].tolist() for size, place in zip(sizes, places, strict=True)]
            parts = [float(self._parts[size][place]) for size, place in zip(sizes, places, strict=True)]
            yield _Way(self._gpus(vectors), tuple(parts))

    def _gpus(self, vectors: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Return the GPUs of each job: the lowest numbers of every group, in the order of jobs."""
        chosen: list[list[int]] = [[] for _ in vectors]
        for place, group in enumerate(self._groups):
            start = 0
            for vector, gpus in zip(vectors, chosen, strict=True):
                gpus += [self._ranked.free[gpu] for gpu in group[start : start + vector[place]]]
                start += vector[place]
        return tuple(tuple(sorted(gpus)) for gpus in chosen)

    def _part_of(self, vector: tuple[int, ...]) -> float:
        size = sum(vector)
        if size == 1:
            return 1.0
        gpus = tuple(self._ranked.free[gpu] for gpu in last_allocation(self._groups, vector))
        return self._ranked.rate(gpus) / self._best[size]

    def _beside(self, way: _Way) -> tuple[JobGpus, ...]:
        """Return the jobs of a division with their joint rates."""
        moving = [place for place, gpus in enumerate(way.gpus) if len(gpus) > 1 and way.parts[place]]
        rates = {place: self._best[len(way.gpus[place])] * way.parts[place] for place in moving}
        meeting: set[int] = set()
        for places in self._meeting([way.gpus[place] for place in moving]):
            members = [moving[place] for place in places]
            if len(members) > 1:
                meeting |= set(members)
                rates |= self._shared({place: way.gpus[place] for place in members}, way)
        made = []
        for place, gpus in enumerate(way.gpus):
            best = self._best.get(len(gpus), float("inf"))
            alone = best * way.parts[place]
            made.append(JobGpus(gpus, rates.get(place, alone), alone, best, place in meeting))
        return tuple(made)

    def _meeting(self, sets: Sequence[tuple[int, ...]]) -> list[list[int]]:
        links = [self._links(gpus) for gpus in sets]
        shared = [(a, b) for a, b in combinations(range(len(sets)), 2) if links[a] & links[b]]
        label = components(len(sets), *np.array(shared, dtype=np.int64).reshape(-1, 2).T)
        return [np.flatnonzero(label == part).tolist() for part in np.unique(label)]

    def _links(self, gpus: tuple[int, ...]) -> set[tuple[str, str]]:
        fabric = self._fabric(gpus)
        every = fabric.links if not fabric.lists_every_route else ()
        crossed = {number for arc in fabric.arcs for number in arc.links}
        return {(link.src, link.dst) for link in every or (fabric.links[number] for number in crossed)}

    def _fabric(self, gpus: tuple[int, ...]) -> Fabric:
        made = self._plan(gpus)
        return Fabric(made.topology, made.channels)

    def _plan(self, gpus: tuple[int, ...]) -> Plan:
        if gpus not in self._plans:
            self._plans[gpus] = plan(self._ranked.topology, self._ranked.collective, gpus=gpus)
        return self._plans[gpus]

    def _shared(self, sets: dict[int, tuple[int, ...]], way: _Way) -> dict[int, float]:
        """Return rates of jobs that share links: alone if their plans fit on the links, else packed together."""
        if self._fit([*sets.values()]):
            return {}
        best = {place: self._best[len(gpus)] for place, gpus in sets.items()}
        alone = {place: best[place] * way.parts[place] for place in sets}
        found = []
        for weights in (best, alone):
            common = self._rate_together([*sets.values()], [*weights.values()])
            rates = {place: min(alone[place], common * weight) for place, weight in weights.items()}
            parts = [rates[place] / best[place] for place in sets]
            found.append(((min(parts), sum(parts)), rates))
            if len({*(way.parts[place] for place in sets)}) == 1:
                break
        return max(found, key=lambda pair: pair[0])[1]

    def _fit(self, sets: Sequence[tuple[int, ...]]) -> bool:
        """Return whether the jobs' plans alone fit on the links together."""
        used: dict[tuple[str, str], Fraction] = {}
        capacity: dict[tuple[str, str], Fraction] = {}
        for gpus in sets:
            made, fabric = self._plan(gpus), self._fabric(gpus)
            rate = Fraction(made.rate).limit_denominator(10**9)
            for link, limit, load in zip(
                fabric.links, fabric.capacity, link_loads(made.shards, fabric), strict=True
            ):
                if load:
                    ends = (link.src, link.dst)
                    used[ends] = used.get(ends, Fraction(0)) + rate * load
                    capacity[ends] = limit
        return all(used[ends] <= capacity[ends] * (1 + Fraction(1, 10**6)) for ends in used)

    def _rate_together(self, sets: Sequence[tuple[int, ...]], weights: Sequence[float]) -> float:
        """Return the common rate of jobs that are packed together, for weight 1."""
        key = tuple(sorted((*gpus, -int(weight * 1e6)) for gpus, weight in zip(sets, weights, strict=True)))
        if key not in self._together:
            if self._ranked.progress:
                self._ranked.progress(f"packing together: {' and '.join(str(list(gpus)) for gpus in sets)}")
            fabrics = [self._fabric(gpus) for gpus in sets]
            channels = {fabric.channels for fabric in fabrics}
            choice = fabrics[0].channels
            if len(channels) > 1:
                choice = (ALL, "network") if any("network" in one for one in channels) else (ALL,)
            every = sorted(gpu for gpus in sets for gpu in gpus)
            whole = Fabric(Allocation.of(self._ranked.topology, gpus=every).topology, choice)
            root = 0 if self._ranked.collective in ("broadcast", "reduce") else None
            self._together[key] = float(
                rate_together(
                    whole,
                    [(fabric, self._ranked.collective, root) for fabric in fabrics],
                    [Fraction(weight).limit_denominator(10**6) for weight in weights],
                )
            )
        return self._together[key]


def _number_of_ways(room: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Return the approximate number of divisions: those in order, over the orders of equal jobs.

    >>> _number_of_ways((1,) * 8, (2, 2, 2, 2)), _number_of_ways((2, 2, 2, 2), (4, 4)), _number_of_ways((16,), (8, 8))
    (105, 10, 1)
    """
    # jobs that need as many more GPUs are equivalent, so their needs are kept in order
    left = {tuple(sorted(sizes)): 1}
    for group in room:
        following: dict[tuple[int, ...], int] = {}
        for needed, number in left.items():
            for rest in _after(group, needed):
                key = tuple(sorted(rest))
                following[key] = following.get(key, 0) + number
        left = following
    ordered = left.get((0,) * len(sizes), 0)
    return -(-ordered // prod(factorial(sizes.count(size)) for size in set(sizes)))


def _after(group: int, needed: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the remaining needs of jobs after up to ``group`` GPUs are assigned."""
    if not needed:
        yield ()
        return
    for taken in range(min(group, needed[0]) + 1):
        for rest in _after(group - taken, needed[1:]):
            yield (needed[0] - taken, *rest)

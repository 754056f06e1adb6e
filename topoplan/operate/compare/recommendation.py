"""Rank all sets of a number of GPUs of a machine, and rate the GPUs that the best of them leave.

Sets are planned once for each class of isomorphic fabrics (`topoplan.operate.compare.allocations`), and every member is
listed with the rates of its class. Only a ring over PCIe beside trees over NVLink is a member's own: members of an
NVLink class may differ on PCIe.

The root of a broadcast or reduce is the first GPU of a set. If links differ by direction, the rate depends on it. An
isomorphism may move it, so every set is planned alone then.

Ties go to the set that leaves most for the next job: the rate of the best set of as many remaining GPUs, then the rate
of all remaining GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb, log10

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.fabric_structure import machine_labelled_graph
from topoplan.machine.topology import Topology, TopologyLike, as_topology
from topoplan.operate.compare.allocations import AllocationClass, allocation_classes, interchangeable_groups
from topoplan.operate.compare.comparison import compare_class
from topoplan.operate.compare.table import Comparison
from topoplan.plans.plan import ROOTED, check_collective
from topoplan.schedules.ring import ring_plan
from topoplan.solve.planner import plan

MOST_SETS = 20_000
"""Most listed sets; 8 of 16 GPUs are 12,870."""

MOST_CLASSES = 400
"""Most planned classes: minutes on 16 GPUs with several kinds of wires; machines of 8 GPUs have up to 70."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class GpuSet:
    """One set of GPUs and its rates in GB/s of algorithm bandwidth.

    gpus: ascending.
    number: of its class, from 1 in the order of the list; sets of one number have isomorphic fabrics.
    rate, bound: of packed trees, and its upper bound; both 0 if no path joins the GPUs.
    ring, ring_kind: the ring that `topoplan.ring_plan` selects; 0 and "none" for none.
    nccl, nccl_kind: NCCL's best, as in `Comparison`: that of the class.
    nccl_best: rate and kind of the same, with NVLS where switches could add.
    jaccl: rate and kind of JACCL's best on Apple's GPUs; None on others.
    channel: channel of the trees; None if no path joins the GPUs.
    following: rate of the best set of as many of the remaining GPUs; None if fewer remain, and for sets not among the
    fastest.
    left: rate of all remaining GPUs; None for fewer than two, and for sets not among the fastest.
    """

    gpus: tuple[int, ...]
    number: int
    rate: float
    bound: float
    ring: float
    ring_kind: str
    nccl: float
    nccl_kind: str
    channel: str | None
    following: float | None = None
    left: float | None = None
    nccl_best: tuple[float, str] = (0.0, "none")
    jaccl: tuple[float, str] | None = None


class RankedSets:
    """The sets of GPUs among some free ones of a machine, and their rates.

    free: ascending GPU numbers.
    """

    def __init__(
        self, topology: Topology, collective: str, free: tuple[int, ...], progress: Progress | None = None
    ) -> None:
        self.topology, self.collective, self.free = topology, collective, free
        self._part = topology.subset(free)
        self.progress = progress
        self._classes: dict[int, dict[tuple[int, ...], AllocationClass]] = {}
        self._rates: dict[tuple[int, ...], float] = {}

    def classes(self, count: int) -> dict[tuple[int, ...], AllocationClass]:
        """Return every set of ``count`` GPUs, ascending, with its class."""
        if count not in self._classes:
            number = comb(len(self.free), count)
            if number > MOST_SETS:
                few = number < 10**15
                sets = f"{number:,}" if few else f"more than 10^{int((number.bit_length() - 1) * log10(2))}"
                raise UsageError(
                    f"sets of {count} GPUs must be at most {MOST_SETS:,}, got {sets} among {len(self.free)} GPUs; name "
                    "fewer GPUs to choose from (--free)"
                )
            found = allocation_classes(self._part, sizes=[count], most_listed=MOST_SETS)
            named = {
                tuple(self.free[gpu] for gpu in gpus): replace(
                    one, gpus=tuple(self.free[gpu] for gpu in one.gpus), allocations=()
                )
                for one in found
                for gpus in one.allocations
            }
            if self.collective in ROOTED and not _same_both_ways(self._part):
                named = {gpus: replace(one, gpus=gpus, members=1) for gpus, one in named.items()}
            self._classes[count] = dict(sorted(named.items()))
        return self._classes[count]

    def planned_classes(self, count: int) -> list[AllocationClass]:
        """Return the classes of sets of ``count`` GPUs, by their representatives."""
        found = {one.gpus: one for one in self.classes(count).values()}
        if len(found) > MOST_CLASSES:
            raise UsageError(
                f"classes of {count} GPUs must be at most {MOST_CLASSES}, got {len(found):,} of "
                f"{len(self.classes(count)):,} sets; name fewer GPUs to choose from (--free)"
            )
        return [found[gpus] for gpus in sorted(found)]

    def compared(self, count: int) -> dict[tuple[int, ...], Comparison]:
        """Return the comparison of each class of ``count`` GPUs, by its representative."""
        classes = self.planned_classes(count)
        made = {}
        for number, one in enumerate(classes):
            self._say(f"class {number + 1} of {len(classes)}", one.gpus)
            made[one.gpus] = compare_class(self.topology, self.collective, one)
            self._rates[one.gpus] = made[one.gpus].trees
        return made

    def rate(self, gpus: tuple[int, ...]) -> float:
        """Return the rate of packed trees on two or more GPUs in GB/s; 0 if no path joins them."""
        one = self.classes(len(gpus))[gpus]
        if one.gpus not in self._rates:
            self._say("planning", one.gpus)
            try:
                self._rates[one.gpus] = plan(self.topology, self.collective, gpus=one.gpus).rate
            except InfeasibleError:
                self._rates[one.gpus] = 0.0
        return self._rates[one.gpus]

    def _say(self, what: str, gpus: Sequence[int]) -> None:
        if self.progress:
            self.progress(f"{what}: GPUs {', '.join(str(gpu) for gpu in gpus)}")


def recommend(
    topology: TopologyLike,
    count: int,
    collective: str = "allreduce",
    *,
    free: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> tuple[GpuSet, ...]:
    """Return all sets of ``count`` GPUs, best first.

    collective: the root of a broadcast or reduce is the first GPU of each set.

    Sets are sorted by rate; the fastest by the rates of the remaining GPUs, the others by their ring; then by class and
    GPUs. Blink's GPUs 1, 4, 5, 7 of a DGX-1V are among the slower ones; the two halves of the cube are the best.

    >>> import topoplan
    >>> sets = recommend(topoplan.load("dgx-1v"), 4)
    >>> len(sets), sets[0].gpus, sets[0].rate, sets[0].following
    (70, (0, 1, 2, 3), 75.0, 75.0)
    >>> next((one.rate, round(one.ring, 3)) for one in sets if one.gpus == (1, 4, 5, 7))
    (50.0, 5.333)
    """
    topology = as_topology(topology)
    ranked = RankedSets(
        topology, check_collective(collective), tuple(sorted(topology.select(free))), progress
    )
    if not 2 <= count <= len(ranked.free):
        remedy = (
            f"ask for 2 to {len(ranked.free)}" if len(ranked.free) > 1 else "name two or more to choose from"
        )
        raise UsageError(
            f"count must be 2 or more and at most {len(ranked.free)}, the GPUs to choose from, got {count}; {remedy}"
        )
    rows = ranked.compared(count)
    rings = _own_rings(ranked, rows)
    fastest = max(row.trees for row in rows.values())
    made = []
    of_set = ranked.classes(count)
    for gpus, class_of_set in of_set.items():
        row = rows[class_of_set.gpus]
        made.append(
            GpuSet(
                gpus=gpus,
                number=0,
                rate=row.trees,
                bound=row.bound,
                ring=rings.get(gpus, row.ring),
                ring_kind=row.ring_kind,
                nccl=row.nccl,
                nccl_kind=row.nccl_kind,
                nccl_best=row.nccl_best,
                jaccl=None if row.jaccl is None else row.library_best,
                channel=row.channel,
                **(_left_by(ranked, gpus) if row.trees == fastest else {}),
            )
        )
    by_rate = sorted(rows.values(), key=lambda row: (-row.trees, -row.ring, row.gpus))
    places = {row.gpus: place for place, row in enumerate(by_rate)}
    made.sort(key=lambda one: (*_order(one), places[of_set[one.gpus].gpus], one.gpus))
    numbers: dict[tuple[int, ...], int] = {}
    for one in made:
        numbers.setdefault(of_set[one.gpus].gpus, len(numbers) + 1)
    return tuple(replace(one, number=numbers[of_set[one.gpus].gpus]) for one in made)


def _same_both_ways(topology: Topology) -> bool:
    """Return whether every link has an equal one back: then all roots of a broadcast or reduce are equally fast."""
    links = Counter((link.src, link.dst, link.channel, link.bandwidth) for link in topology.links)
    return all(
        links[dst, src, channel, bandwidth] == number
        for (src, dst, channel, bandwidth), number in links.items()
    )


def _order(one: GpuSet) -> tuple[float, float, float, float]:
    """Sort key: rate, then rates of remaining GPUs, then ring; largest first."""
    return (-one.rate, -(one.following or 0.0), -(one.left or 0.0), -one.ring)


def _left_by(ranked: RankedSets, gpus: tuple[int, ...]) -> dict[str, float]:
    rest = tuple(gpu for gpu in ranked.free if gpu not in gpus)
    found = {}
    if len(rest) >= len(gpus):
        found["following"] = max(ranked.rate(others) for others in combinations(rest, len(gpus)))
    if len(rest) > 1:
        found["left"] = ranked.rate(rest)
    return found


def _own_rings(ranked: RankedSets, rows: dict[tuple[int, ...], Comparison]) -> dict[tuple[int, ...], float]:
    """Return the rates of rings over PCIe for sets of classes with other channels; interchangeable GPUs have equal
    rates.
    """
    beside = {gpus for gpus, row in rows.items() if row.ring_kind == "pcie ring" and row.channel != "pcie"}
    if not beside:
        return {}
    groups = interchangeable_groups(machine_labelled_graph(ranked.topology, ("pcie",)))
    known: dict[tuple[int, ...], float] = {}
    found = {}
    for gpus, one in ranked.classes(len(next(iter(beside)))).items():
        if one.gpus in beside:
            counts = tuple(len({*gpus}.intersection(group)) for group in groups)
            if counts not in known:
                known[counts] = _pcie_ring(ranked, gpus)
            found[gpus] = known[counts]
    return found


def _pcie_ring(ranked: RankedSets, gpus: tuple[int, ...]) -> float:
    try:
        return ring_plan(ranked.topology, ranked.collective, gpus=gpus, kind="pcie").rate
    except InfeasibleError:
        return 0.0

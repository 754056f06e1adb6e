"""Policies for jobs on shared links: order, weights and start times.

- ``fifo``: strict priority in the order of arrival. ``fair``: equal shares.
- ``grouper``: strict priority in the order of a primal-dual 2-approximation of weighted completion of the active stages
  (Mastrolilli et al., "Minimizing the sum of weighted completion times in a concurrent open shop", 2010, as in
  Sincronia, SIGCOMM 2018), for groups of jobs that are compared by their first stages (Grouper, TNSM 2020). It is
  computed when a job arrives and kept until the next one does, through later stages too.
- ``jpas``: jobs in their first stage before all others, the one nearest to its end first; later stages share fairly.
  JPAS (JNCA 2020) ranks jobs by the accuracy that a second gains; a jobs file has no accuracy, so that each first stage
  counts the same.
- ``crux``: GPU intensity, GPU-seconds of computing over seconds of sending, times a correction for the network time
  that the job gains and the one with most traffic loses if it goes first, in at most `QUEUES` priorities (Crux, SIGCOMM
  2024). Paths are given, not chosen.
- ``mltcp``: shares that grow with the part of an iteration's bytes already sent, 1.75 r + 0.25 (MLTCP, arXiv
  2402.09589); jobs slide apart.
- ``cassini``: fair shares, with start times at which jobs send at different times on a common circle of their iteration
  times (CASSINI, NSDI 2024).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

from topoplan.errors import UsageError
from topoplan.model.fluid_simulation import ActiveJob, Levels, Policy, run_jobs
from topoplan.model.jobs import JobStage, TrainingJob, Workload

QUEUES = 8
"""Priorities of switches and NICs."""

ORDERS = 10
"""Number of topological orders of the conflicts that compression of priorities tries."""

ANGLES = 72
"""Number of positions of a job's start that CASSINI tries on its circle."""

_PAIR, _SHORT = 60, 600
"""Iterations of the longer of two competing jobs, and most iterations of the shorter."""

_TURNS = 60
"""Most iterations of a job on a circle; iteration times are rounded until they fit."""


def first_come(_: Workload, active: Sequence[ActiveJob]) -> Levels:
    """Order by arrival; ties as in the file."""
    return [(one.number,) for one in sorted(active, key=lambda one: (one.job.release, one.number))]


def primal_dual(jobs: Workload, active: Sequence[ActiveJob]) -> Levels:
    loads = [
        {link: one.left * size / jobs.links[link] for link, size in one.stage.bytes.items()} for one in active
    ]
    order = primal_dual_order(loads, [one.job.weight for one in active])
    return [(active[place].number,) for place in order]


def primal_dual_order(loads: Sequence[Mapping[str, float]], weights: Sequence[float]) -> list[int]:
    """Return the order of jobs for least weighted completion, at most twice the optimum, from their loads on every
    link.

    Repeatedly, the job with the least cost per load on the fullest link goes last, and the others pay for it.

    >>> loads = [[4, 0, 2], [1, 5, 0], [0, 2, 3], [3, 1, 1]]
    >>> primal_dual_order([dict(zip("abc", row)) for row in loads], [1, 1, 1, 1])
    [2, 3, 1, 0]
    """
    left = list(range(len(loads)))
    cost = list(weights)
    order: list[int] = []
    links = sorted({link for load in loads for link in load})
    while left:
        busy = {link: math.fsum(loads[job].get(link, 0.0) for job in left) for link in links}
        fullest = max(links, key=lambda link: (busy[link], -links.index(link)), default=None)
        if fullest is None or busy[fullest] == 0:
            return left + order  # no traffic remains: first come, first served
        there = [job for job in left if loads[job].get(fullest, 0.0) > 0]
        last = min(there, key=lambda job: (cost[job] / loads[job][fullest], job))
        paid = cost[last] / loads[last][fullest]
        for job in left:
            cost[job] -= paid * loads[job].get(fullest, 0.0)
        order.insert(0, last)
        left.remove(last)
    return order


def early_first(jobs: Workload, active: Sequence[ActiveJob]) -> Levels:
    """Order first stages before all others, by the seconds that they still need alone."""
    early = [one for one in active if one.early]
    early.sort(key=lambda one: (one.left * one.stage.alone(jobs.links), one.number))
    return [*[(one.number,) for one in early], tuple(one.number for one in active if not one.early)]


def by_intensity(jobs: Workload, active: Sequence[ActiveJob], *, queues: int = QUEUES) -> Levels:
    """Order by corrected GPU intensity, compressed to ``queues`` priorities; jobs without traffic come first."""
    silent = [one for one in active if not one.stage.bytes]
    sending = [one for one in active if one.stage.bytes]
    priority = [
        correction * _intensity(one, jobs)
        for one, correction in zip(sending, corrections(jobs, sending), strict=True)
    ]
    ranked = sorted(range(len(sending)), key=lambda place: (-priority[place], sending[place].number))
    levels: list[tuple[int, ...]] = [(place,) for place in ranked]
    if len(ranked) > queues:
        edges = {
            (a, b): _intensity(sending[a], jobs)
            for number, a in enumerate(ranked)
            for b in ranked[number + 1 :]
            if not sending[a].stage.bytes.keys().isdisjoint(sending[b].stage.bytes)
        }
        levels = compress(ranked, edges, queues)
    named = [tuple(sending[place].number for place in members) for members in levels]
    return [tuple(one.number for one in silent), *named] if silent else named


def _intensity(one: ActiveJob, jobs: Workload) -> float:
    return one.job.gpus * one.stage.compute / one.stage.sending(jobs.links)


def corrections(jobs: Workload, active: Sequence[ActiveJob]) -> list[float]:
    """Return the factors of the jobs' intensities, relative to the job with most traffic.

    Each job competes with that one alone, first with one priority, then with the other: the factor is the network
    seconds that the job gains by going first, over the seconds that the other loses. Crux's first example: 2 s
    of computing and 2 s of sending, against 1 s and 1 s.

    >>> stages = {name: JobStage(1, x, {"wire": x * 1e9}) for name, x in (("a", 2.0), ("b", 1.0))}
    >>> jobs = [TrainingJob(name, (stage,), gpus=10) for name, stage in stages.items()]
    >>> both = [ActiveJob(number, job, job.stages[0], True, 1) for number, job in enumerate(jobs)]
    >>> corrections(Workload({"wire": 1.0}, tuple(jobs)), both)
    [1.0, 1.5]
    """
    if not active:
        return []
    most = max(active, key=lambda one: (one.stage.sending(jobs.links), -one.number))
    found = []
    for one in active:
        apart = one.stage.bytes.keys().isdisjoint(most.stage.bytes)
        shapes = [
            (each.compute, each.overlap, *sorted(each.bytes.items())) for each in (most.stage, one.stage)
        ]
        rates = tuple((link, jobs.links[link]) for link in sorted({*most.stage.bytes, *one.stage.bytes}))
        found.append(1.0 if one is most or apart else _correction(shapes[0], shapes[1], rates))
    return found


@lru_cache(maxsize=1024)
def _correction(most: tuple[Any, ...], one: tuple[Any, ...], rates: tuple[tuple[str, float], ...]) -> float:
    """Return the gain of ``one`` from going first over the loss of ``most``, both iterating without end."""
    links = dict(rates)
    stages = [JobStage(10**9, compute, dict(sent), overlap) for compute, overlap, *sent in (most, one)]
    long, short = (pick(stage.alone(links) for stage in stages) for pick in (max, min))
    horizon = max(2 * long, min(_PAIR * long, _SHORT * short))
    endless = (
        TrainingJob(name, (stage,), sends_first=True) for name, stage in zip("ab", stages, strict=True)
    )
    pair = Workload(links, tuple(endless), horizon)
    behind, ahead = (run_jobs(pair, in_order(order)) for order in ((0, 1), (1, 0)))
    gained, lost = ahead.sent(1) - behind.sent(1), behind.sent(0) - ahead.sent(0)
    close = 1e-9 * horizon
    if lost > close:
        return round(gained / lost, 9)
    return 1.0 if gained <= close else math.inf


def in_order(order: Sequence[int]) -> Policy:
    """Return a policy of strict priority in a given order of job numbers, highest first."""
    return Policy("in order", lambda _, active: [(number,) for number in order])


def compress(
    ranked: Sequence[int], edges: Mapping[tuple[int, int], float], queues: int
) -> list[tuple[int, ...]]:
    """Partition ranked jobs into few queues so that conflicts of little weight fall into one queue.

    Of `ORDERS` random topological orders, the best cut into neighbouring parts is found by dynamic programming (Crux,
    section 4.3). ``edges`` holds weights of conflicts, from the higher job to the lower. The conflict of 0 and 1 weighs
    least: they share a queue.

    >>> compress([0, 1, 2], {(0, 1): 1.0, (1, 2): 3.0}, 2)
    [(0, 1), (2,)]
    """
    source = random.Random(0)
    best: tuple[float, list[tuple[int, ...]]] | None = None
    for attempt in range(ORDERS):
        order = list(ranked) if attempt == 0 else _shuffled(ranked, edges, source)
        weight, parts = _cut(order, edges, queues)
        if best is None or weight < best[0] - 1e-12:
            best = weight, parts
    assert best is not None, "one order is always tried"
    return best[1]


def _shuffled(
    ranked: Sequence[int], edges: Mapping[tuple[int, int], float], source: random.Random
) -> list[int]:
    """Return a random order in which every job stands behind its higher neighbours."""
    above = {job: {a for a, b in edges if b == job} for job in ranked}
    order: list[int] = []
    left = list(ranked)
    while left:
        ready = [job for job in left if above[job] <= set(order)]
        job = source.choice(ready)
        order.append(job)
        left.remove(job)
    return order


def _cut(
    order: Sequence[int], edges: Mapping[tuple[int, int], float], queues: int
) -> tuple[float, list[tuple[int, ...]]]:
    """Return the cut of an order into at most ``queues`` parts with the least weight inside them."""
    size = len(order)
    inside = [[0.0] * (size + 1) for _ in range(size + 1)]
    for start in range(size):
        for stop in range(start + 1, size + 1):
            new = math.fsum(edges.get((order[i], order[stop - 1]), 0.0) for i in range(start, stop - 1))
            inside[start][stop] = inside[start][stop - 1] + new
    least: list[tuple[float, list[int]]] = [(inside[0][stop], [0]) for stop in range(size + 1)]
    for _ in range(min(queues, size) - 1):
        least = [
            min((least[cut][0] + inside[cut][stop], [*least[cut][1], cut]) for cut in range(stop + 1))
            for stop in range(size + 1)
        ]
    weight, starts = least[size]
    borders = [*sorted(set(starts)), size]
    parts = [tuple(order[a:b]) for a, b in pairwise(borders) if b > a]
    return weight, parts


@dataclass(frozen=True, slots=True)
class CircleArc:
    """A job on a link's circle.

    In an iteration of ``period`` units it sends from ``start`` for ``length`` units, with ``demand`` as a share of the
    link.
    """

    period: int
    start: int
    length: int
    demand: float


def interleaving(turns: Sequence[CircleArc], shifts: Sequence[int]) -> float:
    """Return 1 minus the mean demand above a link's capacity over one turn of the common circle; 1 for no excess.

    Two jobs that send for 90 of 200 units, together and half a turn apart:

    >>> two = [CircleArc(200, 110, 90, 1.0)] * 2
    >>> interleaving(two, [0, 0]), interleaving(two, [0, 100])
    (0.55, 1.0)
    """
    circle = math.lcm(*(turn.period for turn in turns))
    changes: dict[int, float] = {}
    for turn, shift in zip(turns, shifts, strict=True):
        for again in range(0, circle, turn.period):
            first = (again + turn.start + shift) % circle
            for start, stop in ((first, min(first + turn.length, circle)), (0, first + turn.length - circle)):
                if stop > start:
                    changes[start] = changes.get(start, 0.0) + turn.demand
                    changes[stop] = changes.get(stop, 0.0) - turn.demand
    excess, asked, before = 0.0, 0.0, 0
    for place in sorted(changes):
        excess += max(0.0, asked - 1) * (place - before)
        asked, before = asked + changes[place], place
    return 1 - excess / circle


def circle_shifts(jobs: Workload) -> list[float]:
    """Return the start shifts at which jobs on a link send one after another as far as their circle allows.

    Links are visited along the jobs that they share: one job's shift is fixed, the others' follow from `ANGLES`
    positions of each, repeated while that helps. Only first stages count.
    """
    stages = [job.stages[0] for job in jobs.jobs]
    todo = _shared_links(jobs, stages)
    shifts: dict[int, float] = {}
    for first in range(len(stages)):
        if first in shifts:
            continue
        shifts[first] = 0.0
        reached = [first]
        while reached:
            known = reached.pop(0)
            for link in [link for link, members in todo.items() if known in members]:
                members = todo.pop(link)
                twice = next((one for one in members if one != known and one in shifts), None)
                if twice is not None:
                    names = f"{jobs.jobs[known].name} and {jobs.jobs[twice].name}"
                    raise UsageError(
                        f"cassini needs jobs and links without a loop, but {names} share {link} and other links"
                    )
                found = _shifts_on(jobs, stages, link, known, shifts[known], members)
                shifts.update(found)
                reached.extend(found)
    return [shifts[number] for number in range(len(stages))]


def _shared_links(jobs: Workload, stages: Sequence[JobStage]) -> dict[str, tuple[int, ...]]:
    """Return the links of two jobs or more, and their jobs; of links with the same jobs only the fullest."""
    fullest: dict[tuple[int, ...], tuple[float, str]] = {}
    for link in sorted({link for stage in stages for link in stage.bytes}):
        members = tuple(number for number, stage in enumerate(stages) if link in stage.bytes)
        load = math.fsum(stages[number].bytes[link] for number in members) / jobs.links[link]
        if len(members) > 1 and (members not in fullest or load > fullest[members][0]):
            fullest[members] = load, link
    return {link: members for members, (_, link) in fullest.items()}


def _shifts_on(
    jobs: Workload, stages: Sequence[JobStage], link: str, known: int, at: float, members: Sequence[int]
) -> dict[int, float]:
    """Return the shifts in seconds of the jobs on a link, given that of one job."""
    unit, periods = _circle([stages[number].alone(jobs.links) for number in members])
    turns = [
        _turn(stages[number], jobs, link, unit, period)
        for number, period in zip(members, periods, strict=True)
    ]
    fixed = members.index(known)
    places = [0] * len(members)
    places[fixed] = round(at / unit) % turns[fixed].period
    best = interleaving(turns, places)
    better = True
    while better and best < 1:
        better = False
        for job, turn in enumerate(turns):
            for step in range(ANGLES) if job != fixed else ():
                tried = [*places[:job], step * turn.period // ANGLES, *places[job + 1 :]]
                score = interleaving(turns, tried)
                if score > best + 1e-12:
                    places, best, better = tried, score, True
    return {number: places[job] * unit for job, number in enumerate(members) if job != fixed}


def _turn(stage: JobStage, jobs: Workload, link: str, unit: float, period: int) -> CircleArc:
    sending = stage.sending(jobs.links)
    start = round((1 - stage.overlap) * stage.compute / unit)
    length = min(period, max(1, math.ceil(sending / unit - 1e-9)))
    return CircleArc(period, start, length, stage.bytes[link] / (sending * jobs.links[link] * 1e9))


def _circle(seconds: Sequence[float]) -> tuple[float, list[int]]:
    """Return a unit in seconds and iteration times in it, rounded until a common multiple has few iterations."""
    for digits in (6, 5, 4, 3, 2, 1):
        rounded = [Fraction(f"{one:.{digits}g}") for one in seconds]
        shared = math.lcm(*(one.denominator for one in rounded))
        whole = [int(one * shared) for one in rounded]
        if math.lcm(*whole) <= _TURNS * min(whole):
            break
    finer = -(-10 * ANGLES * math.gcd(*whole) // min(whole))
    scale = math.gcd(*whole)
    return scale / shared / finer, [one // scale * finer for one in whole]


MLTCP_SLOPE, MLTCP_LEAST = 1.75, 0.25
"""Coefficients of a flow's weight, from MLTCP's paper."""


def growing(progress: float) -> float:
    """Return MLTCP's weight of a flow that has sent the part ``progress`` of its bytes."""
    return MLTCP_SLOPE * progress + MLTCP_LEAST


POLICIES: Mapping[str, Policy] = {
    one.name: one
    for one in (
        Policy("fifo", first_come),
        Policy("fair"),
        Policy("grouper", primal_dual, keeps=True),
        Policy("jpas", early_first),
        Policy("crux", by_intensity),
        Policy("mltcp", weight=growing),
        Policy("cassini", shifts=circle_shifts),
    )
}
"""The policies by their names."""


def policy_named(name: str, *, queues: int | None = None) -> Policy:
    """Return a policy by name; ``queues`` sets the priorities of crux."""
    if name not in POLICIES:
        raise UsageError(f"policy {name!r} is unknown; use {', '.join(POLICIES)}")
    if queues is None:
        return POLICIES[name]
    if name != "crux" or queues < 1:
        raise UsageError(f"queues must be 1 or more, and only for crux, got {queues} for {name}")
    levels: Callable[[Workload, Sequence[ActiveJob]], Levels] = partial(by_intensity, queues=queues)
    return replace(POLICIES[name], levels=levels)

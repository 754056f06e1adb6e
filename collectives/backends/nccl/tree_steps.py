"""Derive the steps of every rank in a plan that one kernel runs (`kernel_program`), and their dependencies.

A *step* of a rank joins the arrivals of some tree edges of a shard, and writes the sum to others: a leaf of a tree
has one that sends the rank's input, an inner rank one that adds its children and sends on, and so on.

Ranks whose GPUs reach each other's memory are a *domain*, as those of a server. Edges between domains, and between
two ranks that are *apart* since no copy between their GPUs ends, are messages, for which kernels cannot wait; steps
therefore have *phases*: a kernel runs those of the first, then messages move, then a kernel runs those of the second,
and so on. Data that skips a phase inside its domain is kept by its sender, and a step of the later phase, a *relay*,
sends it.

If a switch adds or copies, a star that spans its domain is one step of its root: it reads the sum of one place in all
arenas, its own included, which it has sent to itself like the others; or it writes to all at once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from collectives.tables.lowering import PlanKey, pattern_of
from topoplan.model.window_engine import switched_stages
from topoplan.plans.plan import Plan

GIVEN, RESULT, KEPT, NOWHERE = 0, 1, 2, -1
"""Buffers of a rank, as the kernel numbers them: its input, its result, and room for sums that it needs again."""

SPARE_SLOTS = 2
"""Slots of an edge besides one for each level that its data skips."""

DEPTH = 4
"""The most sums that are set aside in a small collective; as in ``forest.cu``."""

TAKE, JOIN_ONE, JOIN_BOTH = range(3)
"""Actions on a rank's contribution in a small collective: set the sum aside and begin a new one with it; add it to the
sum; or add the sum to the one that was set aside last.
"""


@dataclass(slots=True, eq=False)
class ForestStep:
    """A step of a rank; edges by their number in `ForestSteps`.

    - `own`: buffer of the first operand, or `NOWHERE` for the first arrival.
    - `phase`, `level`: the kernel that runs it, and how many steps of that one must precede it.
    - `stage` in which it adds, else `NOWHERE`.
    - `behind`: the step whose sum it continues, or None.
    - `keeps`: another step continues its sum.
    - `last` of its rank and shard, relays aside.
    - `completes`: its sum is that of all ranks, at a helper, which has no result (`topoplan.with_relays`).
    - `gathers`, `spreads`: the switch adds its arrivals, and copies its departures.
    """

    rank: int
    shard: int
    own: int
    phase: int = 0
    level: int = 0
    arrivals: list[int] = field(default_factory=list)
    departures: list[int] = field(default_factory=list)
    stage: int = NOWHERE
    behind: ForestStep | None = None
    keeps: bool = False
    last: bool = True
    completes: bool = False
    gathers: bool = False
    spreads: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ForestSteps:
    """The steps of all ranks in a plan, and its E edges.

    - `source`, `destination`, `shard` of the edges: those of the plan's pattern, and of ranks to themselves if a switch
      adds.
    - `row` of each edge in the pattern.
    - `slots` of each edge inside a domain.
    - `crosses`: the edge leads to another domain, or its ranks are apart.
    - `star` of a switch that the edge belongs to, whose edges have their slots at one place in all arenas; else -1.
    - `senders`, `receivers`: the steps of each edge.
    """

    steps: tuple[ForestStep, ...]
    source: NDArray[np.int64]
    destination: NDArray[np.int64]
    shard: NDArray[np.int64]
    row: NDArray[np.int64]
    slots: NDArray[np.int64]
    crosses: NDArray[np.bool_]
    star: NDArray[np.int64]
    senders: tuple[ForestStep, ...]
    receivers: tuple[ForestStep, ...]


@lru_cache(maxsize=64)
def steps_of(
    key: PlanKey,
    domains: tuple[int, ...] = (),
    *,
    adds: bool = False,
    copies: bool = False,
    apart: frozenset[tuple[int, int]] = frozenset(),
) -> ForestSteps:
    """Return the steps of a plan's ranks and helpers; the results for the last 64 plans are kept.

    `domains` has one number for each rank and helper; empty if all are in one. `adds`, `copies`: whether switches that
    can are to add, and to copy; not between ranks that are `apart`, pairs in both orders.

    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[1, 4, 5, 7])
    >>> steps = steps_of(PlanKey(plan.digest, plan)).steps
    >>> [(step.shard, step.level, len(step.arrivals), len(step.departures)) for step in steps if step.rank == 1]
    [(0, 2, 2, 2), (1, 0, 0, 1), (1, 4, 1, 0)]
    """
    domains = domains or (0,) * len(key.plan.vertices)
    return _ForestStepsBuilder(key, domains, adds and not apart, copies and not apart, apart).build()


class _ForestStepsBuilder:
    def __init__(
        self,
        key: PlanKey,
        domains: tuple[int, ...],
        adds: bool,
        copies: bool,
        apart: frozenset[tuple[int, int]],
    ) -> None:
        self._key = key
        self._domains = domains
        self._apart = apart
        self._stars = _stars(key.plan, domains, {"reduce": adds, "broadcast": copies})
        self._made: list[ForestStep] = []
        self._latest: dict[tuple[int, int], ForestStep] = {}
        self._edges: list[tuple[int, int, int, int, int]] = []
        self._senders: list[ForestStep] = []
        self._receivers: list[ForestStep] = []

    def build(self) -> ForestSteps:
        pattern = pattern_of(self._key)
        columns = (pattern.source, pattern.destination, pattern.shard, pattern.stage, pattern.add)
        begun: set[tuple[int, int]] = set()
        for row, (source, destination, shard, stage, add) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            if add and (shard, stage) in self._stars and (shard, stage) not in begun:
                begun.add((shard, stage))
                self._edge(destination, destination, shard, stage, add, row)
            self._edge(source, destination, shard, stage, add, row)
        for step in self._made:
            step.completes = self._completes(step)
        self._relay()
        star = self._found_stars()
        skipped = self._skipped_levels()
        slots = np.array(skipped, dtype=np.int64) + SPARE_SLOTS
        for number in range(int(star.max(initial=-1)) + 1):
            slots[star == number] = slots[star == number].max()
        edges = np.array(self._edges, dtype=np.int64).reshape(-1, 5)
        sources, destinations = edges[:, 0], edges[:, 1]
        crosses = [self._crosses(*ends) for ends in zip(sources.tolist(), destinations.tolist(), strict=True)]
        return ForestSteps(
            tuple(self._made),
            sources,
            destinations,
            edges[:, 2],
            edges[:, 4],
            slots,
            np.array(crosses, dtype=np.bool_),
            star,
            tuple(self._senders),
            tuple(self._receivers),
        )

    def _crosses(self, source: int, destination: int) -> bool:
        return self._domains[source] != self._domains[destination] or (source, destination) in self._apart

    def _new(self, rank: int, shard: int, own: int) -> ForestStep:
        step = ForestStep(rank, shard, own)
        earlier = self._latest.get((rank, shard))
        if earlier is not None:
            earlier.last = False
            step.phase = earlier.phase
        self._made.append(step)
        self._latest[rank, shard] = step
        return step

    def _edge(self, source: int, destination: int, shard: int, stage: int, add: bool, row: int) -> None:
        """Add an edge; edges come in an order in which data can move over them."""
        edge = len(self._edges)
        self._edges.append((source, destination, shard, stage, row))
        sends = self._latest.get((source, shard)) or self._new(source, shard, GIVEN)
        sends.departures.append(edge)
        before = self._latest.get((destination, shard))
        if before is not None and add and before.stage == stage:
            takes = before
        else:
            gathers = add and (shard, stage) in self._stars
            takes = self._new(destination, shard, GIVEN if add and not gathers else NOWHERE)
            takes.gathers = gathers
            if add or self._begins_sum(destination, shard, stage):
                takes.stage = stage
            if add and before is not None and before.arrivals and not gathers:
                before.keeps, takes.behind, takes.own = True, before, KEPT
        takes.arrivals.append(edge)
        takes.phase = max(takes.phase, sends.phase + self._crosses(source, destination))
        self._senders.append(sends)
        self._receivers.append(takes)

    def _completes(self, step: ForestStep) -> bool:
        """Return whether a helper's step is the root's of the last reduction."""
        plan = self._key.plan
        if step.rank < len(plan.ranks) or not step.last or step.stage == NOWHERE:
            return False
        stages = plan.shards[step.shard].stages
        return stages[step.stage].root == step.rank and all(
            stage.op != "reduce" for stage in stages[step.stage + 1 :]
        )

    def _begins_sum(self, vertex: int, shard: int, stage: int) -> bool:
        """Return whether what a vertex stores is the first operand of a sum: a helper has no input."""
        plan = self._key.plan
        return vertex >= len(plan.ranks) and plan.shards[shard].stages[stage].op == "reduce"

    def _relay(self) -> None:
        """Let senders keep data that is taken in a later phase, in which a relay sends it."""
        relays: dict[tuple[int, int], ForestStep] = {}
        for edge, (sends, takes) in enumerate(zip(self._senders, self._receivers, strict=True)):
            if sends.phase == takes.phase or self._crosses(sends.rank, takes.rank):
                continue
            relay = relays.get((id(sends), takes.phase))
            if relay is None:
                relay = ForestStep(sends.rank, sends.shard, GIVEN, takes.phase, last=False)
                if sends.arrivals:
                    sends.keeps, relay.behind, relay.own = True, sends, KEPT
                relays[id(sends), takes.phase] = relay
                self._made.append(relay)
            sends.departures.remove(edge)
            relay.departures.append(edge)
            self._senders[edge] = relay

    def _found_stars(self) -> NDArray[np.int64]:
        """Return the star of each edge; a star whose root writes to further ranks is not one."""
        edges: dict[tuple[int, int], list[int]] = {}
        for edge, (_, _, shard, stage, _) in enumerate(self._edges):
            if (shard, stage) in self._stars:
                edges.setdefault((shard, stage), []).append(edge)
        star = np.full(len(self._edges), -1, dtype=np.int64)
        number = 0
        for members in edges.values():
            sends = self._senders[members[0]]
            if not self._receivers[members[0]].gathers:
                if sends.departures != members:
                    continue
                sends.spreads = True
            star[members] = number
            number += 1
        return star

    def _skipped_levels(self) -> list[int]:
        """Set the levels of all steps, and return how many each edge skips."""
        for sends, takes in zip(self._senders, self._receivers, strict=True):
            if takes.behind is not None and takes.behind.phase == takes.phase:
                takes.level = max(takes.level, takes.behind.level + 1)
            if sends.phase == takes.phase:
                takes.level = max(takes.level, sends.level + 1)
        return [
            max(takes.level - sends.level, 1)
            for sends, takes in zip(self._senders, self._receivers, strict=True)
        ]


def _stars(plan: Plan, domains: tuple[int, ...], wanted: dict[str, bool]) -> Collection[tuple[int, int]]:
    """Return the shards and stages that a switch adds or copies for: one parent with all others of its domain."""
    if not any(wanted.values()):
        return ()
    return {
        (number, position)
        for number, position in switched_stages(plan, domains)
        if wanted[plan.shards[number].stages[position].op]
    }


@lru_cache(maxsize=64)
def order_of(key: PlanKey) -> tuple[tuple[tuple[int, int], ...], ...] | None:
    """Return for each shard of an allreduce the order of ranks in which contributions are joined, with an action for
    each.

    None for other collectives, and if more than `DEPTH` sums are set aside. Of gpu1, gpu4, gpu5, gpu7 the second adds
    to its own the sum of the third and the first, and then the fourth:

    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[1, 4, 5, 7])
    >>> order_of(PlanKey(plan.digest, plan))[0]
    ((1, 0), (2, 0), (0, 1), (1, 2), (3, 1))
    """
    if key.plan.collective != "allreduce":
        return None
    steps = steps_of(key)
    orders = []
    for shard in range(len(key.plan.shards)):
        order: list[tuple[int, int]] = []
        _join(steps, next(step for step in steps.steps if step.shard == shard and step.last), order)
        aside = np.cumsum([{TAKE: 1, JOIN_ONE: 0, JOIN_BOTH: -1}[action] for _, action in order]) - 1
        if aside.max() > DEPTH:
            return None
        orders.append(tuple(order))
    return tuple(orders)


def _join(steps: ForestSteps, step: ForestStep, order: list[tuple[int, int]]) -> None:
    """Append the order in which the sum of a step comes about."""
    if step.behind is not None:
        _join(steps, step.behind, order)
    elif step.own == GIVEN:
        order.append((step.rank, TAKE))
    for edge in step.arrivals:
        sender = steps.senders[edge]
        if step.own == NOWHERE:
            _join(steps, sender, order)
        elif sender.arrivals:
            _join(steps, sender, order)
            order.append((step.rank, JOIN_BOTH))
        else:
            order.append((sender.rank, JOIN_ONE))

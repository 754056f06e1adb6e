"""A plan with exchanges in rounds: what can stream chunk by chunk, and where ranks have work to do in between.

Elements stream through stages, but the largest entries of a shard are known only when all of it has arrived. So a
sparse plan runs in rounds, one after another, and every round is a plan of its own whose trees stream: the stages on
elements before and after the exchange; the gathers of an exchange; one level of a tree on which entries are reduced;
the way of the entries back down. In a round on entries every shard is one message: those of one rank that take the same
way travel together. Where ranks exchange elements, all that a rank has is such a message too.

All shards of such a plan go through the same kinds of rounds, so that they run side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby

from topoplan.errors import PlanError
from topoplan.plans.plan import Plan
from topoplan.plans.tree import Edge, Shard, Stage

ROUND = "round"
"""The collective that the plan of a round names: every rank's buffer is its result, in place."""

TOGETHER = ("exchange", "gather")
"""Kinds of which all stages that follow one another are one round."""


@dataclass(frozen=True, slots=True)
class Round:
    """What runs without a choice in between.

    Parameters
    ----------
    kind : str
        ``elements``, ``exchange`` (elements of every root to its tree), ``gather`` (entries of every root to its tree),
        ``merge`` (entries one level up) or ``spread`` (entries of the root down).
    plan : Plan
        Its trees; ranks, topology and channels are the sparse plan's. Shares are those of what moves, and need not add
        up to 1.
    shards : tuple of tuple of int
        For every shard of it, what it carries of the sparse plan's shards: for ``elements`` one, each in its turn; else
        those whose entries travel in one message.
    senders : tuple of int
        For every shard of it, the rank whose message it is; empty for ``elements``.
    """

    kind: str
    plan: Plan
    shards: tuple[tuple[int, ...], ...]
    senders: tuple[int, ...]


def rounds(plan: Plan) -> tuple[Round, ...]:
    """The rounds of a plan that exchanges elements or entries, in order.

    Raises
    ------
    PlanError
        Its shards do not go through the same kinds of rounds.

    Examples
    --------
    >>> import topoplan
    >>> made = topoplan.sparse_plan(topoplan.load("dgx-2"), density=0.01)
    >>> [(one.kind, len(one.plan.shards)) for one in rounds(made)]
    [('merge', 240), ('spread', 16)]
    """
    runs = [_runs(shard) for shard in plan.shards]
    first = [kind for kind, _ in runs[0]] if runs else []
    name = "a sparse plan" if plan.sparse else "a plan with exchanges"
    for number, run in enumerate(runs):
        if [kind for kind, _ in run] != first:
            raise PlanError(
                f"runs through {', '.join(kind for kind, _ in run) or 'nothing'}, and shard 0 through "
                f"{', '.join(first)}; all shards of {name} take the same rounds",
                shard=number,
            )
    made: list[Round] = []
    for place, kind in enumerate(first):
        made += _rounds_of(plan, kind, [run[place][1] for run in runs])
    return tuple(made)


def _runs(shard: Shard) -> list[tuple[str, tuple[Stage, ...]]]:
    """The stages of a shard, those together that take the same rounds."""
    return [(kind, tuple(stages)) for kind, stages in groupby(shard.stages, key=lambda stage: stage.kind)]


def _rounds_of(plan: Plan, kind: str, stages: Sequence[tuple[Stage, ...]]) -> Iterator[Round]:
    """The rounds of one run of stages of every shard."""
    if kind == "elements":
        shards = tuple(Shard(shard.share, run) for shard, run in zip(plan.shards, stages, strict=True))
        yield Round(kind, _as_plan(plan, shards), tuple((number,) for number in range(len(shards))), ())
        return
    if kind != "merge":
        for position in range(1 if kind in TOGETHER else max(len(run) for run in stages)):
            part = stages if kind in TOGETHER else [run[position : position + 1] for run in stages]
            yield _messages(plan, kind, [(number, stage) for number, run in enumerate(part) for stage in run])
        return
    for position in range(max(len(run) for run in stages)):
        level_stages = [(number, run[position]) for number, run in enumerate(stages) if position < len(run)]
        for depth in range(max(stage.height for _, stage in level_stages), 0, -1):
            yield _messages(
                plan, kind, [(number, up) for number, stage in level_stages for up in _upwards(stage, depth)]
            )


def _upwards(stage: Stage, depth: int) -> Iterator[Stage]:
    """The edges of a reduce tree from one depth upwards, each as the way of a message."""
    depths = stage.depths()
    for edge in sorted(stage.edges, key=lambda edge: edge.child):
        if depths[edge.child] == depth:
            way = Edge(edge.child, edge.parent, edge.route[::-1], edge.channel)
            yield Stage("broadcast", edge.child, (way,), stage.entries)


def _messages(plan: Plan, kind: str, stages: Sequence[tuple[int, Stage]]) -> Round:
    """A round in which entries of shards that take the same way travel in one message."""
    ways: dict[tuple[int, tuple[Edge, ...]], list[tuple[int, Stage]]] = {}
    for number, stage in stages:
        ways.setdefault((stage.root, stage.top_down()), []).append((number, stage))
    shards = []
    for (root, edges), together in ways.items():
        share = sum((plan.shards[number].share * stage.weight for number, stage in together), Fraction(0))
        shards.append(Shard(share, (Stage("broadcast", root, edges),)))
    contents = tuple(tuple(number for number, _ in together) for together in ways.values())
    return Round(kind, _as_plan(plan, tuple(shards)), contents, tuple(root for root, _ in ways))


def _as_plan(plan: Plan, shards: tuple[Shard, ...]) -> Plan:
    return replace(plan, collective=ROUND, shards=shards)

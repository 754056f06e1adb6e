"""Which trees of a plan are the same but for the names of their ranks.

Two shards have one shape where their shares are equal, they do the same in the same order, and the trees of each stage
are isomorphic as rooted trees whose edges have channels (Aho, Hopcroft and Ullman 1974, example 3.2: a vertex is told
by the sorted shapes below it). The sixteen stars of a DGX-2 are one shape, and so are all images of a tree under the
symmetries of a machine; trees that cross wires of their own may be too, so a shape says nothing of loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from topoplan.plans.plan import Plan
from topoplan.plans.symmetric_shards import ImageShards, owner_of
from topoplan.plans.tree import Shard, Stage


@dataclass(frozen=True, slots=True)
class Alike:
    """Shards of one shape.

    Parameters
    ----------
    number : int
        Place of the first of them, counted from 1 among the shards that have trees.
    shard : Shard
        The first of them.
    count : int
    roots : tuple of int
        Where their buffers are summed up or come from, in the order of the shards, each rank once.
    """

    number: int
    shard: Shard
    count: int
    roots: tuple[int, ...]

    @property
    def trees(self) -> tuple[tuple[Stage, tuple[str, ...]], ...]:
        """The trees of the first shard, each with what runs over it in order: a tree up and then down is one."""
        found: list[tuple[Stage, list[str]]] = []
        for stage in self.shard.stages:
            if not stage.edges:
                continue
            if found and _same_tree(found[-1][0], stage):
                found[-1][1].append(stage.op)
            else:
                found.append((stage, [stage.op]))
        return tuple((stage, tuple(operations)) for stage, operations in found)


def tree_shapes(plan: Plan, *, apart: int = 0) -> tuple[Alike, ...]:
    """The shapes of a plan's trees, in the order in which they first appear.

    Parameters
    ----------
    plan : Plan
    apart : int
        Shapes of up to so many trees are listed tree by tree.

    Examples
    --------
    >>> import topoplan
    >>> [(one.count, one.roots[-1]) for one in tree_shapes(topoplan.plan(topoplan.load("dgx-2"), "allreduce"))]
    [(16, 15)]
    >>> len(tree_shapes(topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7]), apart=2))
    2
    """
    known: dict[tuple[tuple[str, int], ...], int] = {}
    groups: dict[tuple[object, ...], list[Alike]] = {}
    number = 1
    for template, (shard, count) in enumerate(plan.shard_counts):
        if not any(stage.edges for stage in shard.stages):
            continue
        one = Alike(number, shard, count, _roots(plan.shards, template, shard))
        groups.setdefault(_shape(shard, known), []).append(one)
        number += count
    found: list[Alike] = []
    for group in groups.values():
        total = sum(one.count for one in group)
        if total <= apart and total == len(group):
            found += group
        else:
            roots = dict.fromkeys(root for one in group for root in one.roots)
            found.append(Alike(group[0].number, group[0].shard, total, tuple(roots)))
    return tuple(sorted(found, key=lambda one: one.number))


def _roots(shards: Sequence[Shard], template: int, shard: Shard) -> tuple[int, ...]:
    """The roots of a shard and of all its images."""
    if not isinstance(shards, ImageShards):
        return (owner_of(shard),)
    images = shards.elements[:, owner_of(shards.templates[template])].tolist()
    return tuple(sorted(set(images)))


def _shape(
    shard: Shard, known: dict[tuple[tuple[str, int], ...], int]
) -> tuple[Fraction, tuple[object, ...]]:
    stages = [stage for stage in shard.stages if stage.edges]
    parts: list[object] = []
    for place, stage in enumerate(stages):
        again = place > 0 and _same_tree(stages[place - 1], stage)
        parts.append((stage.op, stage.entries, again, _rooted_shape(stage, known)))
    return shard.share, tuple(parts)


def _rooted_shape(stage: Stage, known: dict[tuple[tuple[str, int], ...], int]) -> int:
    """The number of the shape that hangs below the root; ``known`` numbers what hangs below a vertex."""
    below: dict[int, list[tuple[str, int]]] = {}
    for edge in reversed(stage.top_down()):
        shape = tuple(sorted(below.pop(edge.child, ())))
        below.setdefault(edge.parent, []).append((edge.channel, known.setdefault(shape, len(known))))
    shape = tuple(sorted(below.get(stage.root, ())))
    return known.setdefault(shape, len(known))


def _same_tree(first: Stage, second: Stage) -> bool:
    return first.root == second.root and set(first.edges) == set(second.edges)

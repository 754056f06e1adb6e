"""The trees of a plan: edges with their routes, stages of one tree each, shards that run through stages.

Where a shard lies in the buffer follows from the order of the shards (`shard_bounds`), on borders that suit the
hardware: the shares stay exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby

from topoplan.errors import PlanError
from topoplan.plans.json_values import (
    check_known,
    read_fraction,
    read_list,
    read_object,
    read_text,
    read_texts,
    read_whole,
)
from topoplan.units import name_ranges

OPERATIONS = ("reduce", "broadcast", "gather")
"""What a stage does; data runs towards the root in a reduce, and away from it in the others."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One edge of a tree.

    Parameters
    ----------
    parent, child : int
        Ranks.
    route : tuple of str
        Devices from parent to child, both included. In a reduce stage data runs along it backwards.
    channel : str
        nvlink, pcie or network: whose links the route crosses.
    """

    parent: int
    child: int
    route: tuple[str, ...]
    channel: str

    def to_object(self) -> list[object]:
        """The row of a plan file."""
        return [self.parent, self.child, list(self.route), self.channel]

    @staticmethod
    def from_object(item: object, where: str) -> Edge:
        """Read such a row; PlanError names what is of a wrong type."""
        if not isinstance(item, list) or len(item) != 4:
            raise PlanError(f"{where}: an edge must be [parent, child, route, channel], not {item!r}"[:200])
        return Edge(
            read_whole(item[0], f"{where}: parent"),
            read_whole(item[1], f"{where}: child"),
            read_texts(item[2], f"{where}: route"),
            read_text(item[3], f"{where}: channel"),
        )


@dataclass(frozen=True, slots=True)
class Stage:
    """One tree, on which the shard's elements move, or the largest of them as entries of index and value.

    Parameters
    ----------
    op : str
        reduce (data runs from child to parent), broadcast (from parent to child), or gather: what the root has, its
        elements or the entries that it has chosen, runs to all ranks of the tree, which add it to their own. Gathers
        that follow one another in a shard are one exchange: every root sends what it had before anything arrived.
    root : int
    edges : tuple of Edge
    entries : Fraction or None
        Bytes of entries that cross an edge for each byte of the shard; None where the elements themselves do. Where
        entries are reduced, every parent adds up what arrives and sends on as many, the largest.
    """

    op: str
    root: int
    edges: tuple[Edge, ...]
    entries: Fraction | None = None

    @property
    def weight(self) -> Fraction:
        """Bytes that cross an edge for each byte of the shard."""
        return Fraction(1) if self.entries is None else self.entries

    @property
    def kind(self) -> str:
        """What runs together with it, as `topoplan.plans.rounds` names kinds: elements, exchange, gather, …"""
        if self.entries is None:
            return "exchange" if self.op == "gather" else "elements"
        return {"gather": "gather", "reduce": "merge", "broadcast": "spread"}[self.op]

    @property
    def height(self) -> int:
        """Edges on the longest path from the root.

        Raises
        ------
        PlanError
            An edge hangs on a parent that the root does not reach.
        """
        return max(self.depths().values())

    def check_ranks(self, size: int) -> None:
        """Raise PlanError where it names a rank that is none of so many."""
        for rank in (self.root, *(end for edge in self.edges for end in (edge.parent, edge.child))):
            if not 0 <= rank < size:
                raise PlanError(f"is out of range 0 to {size - 1}", rank=rank)

    def depths(self) -> dict[int, int]:
        """Depth of every rank in the tree, the root's 0.

        Raises
        ------
        PlanError
            The edges are no tree from the root.
        """
        depth = {self.root: 0}
        for parent, child in ((edge.parent, edge.child) for edge in self.top_down()):
            depth[child] = depth[parent] + 1
        return depth

    def top_down(self) -> tuple[Edge, ...]:
        """The edges in breadth-first order from the root, siblings in ascending rank.

        Raises
        ------
        PlanError
            A rank has two parents or the root has one, or an edge is not reached from the root.
        """
        children: dict[int, list[Edge]] = {}
        seen = {self.root}
        for edge in self.edges:
            if edge.child in seen:
                fault = "is the root and has a parent" if edge.child == self.root else "has two parents"
                raise PlanError(f"rank {edge.child} {fault} in a {self.op} tree", rank=edge.child)
            seen.add(edge.child)
            children.setdefault(edge.parent, []).append(edge)
        order: list[Edge] = []
        frontier = [self.root]
        for rank in frontier:
            for edge in sorted(children.pop(rank, []), key=lambda e: e.child):
                order.append(edge)
                frontier.append(edge.child)
        if children:
            stray = min(children)
            raise PlanError(
                f"rank {stray} is a parent but the root {self.root} does not reach it", rank=stray
            )
        return tuple(order)

    def to_object(self) -> dict[str, object]:
        """The JSON object of a plan file."""
        return {
            "op": self.op,
            "root": self.root,
            **({} if self.entries is None else {"entries": str(self.entries)}),
            "edges": [edge.to_object() for edge in self.edges],
        }

    @staticmethod
    def from_object(item: object, where: str) -> Stage:
        """Read such an object; PlanError names the key that is missing or of a wrong type."""
        value = read_object(item, where)
        check_known(value, ("op", "root", "entries", "edges"), where)
        edges = read_list(value.get("edges"), f"{where}: edges")
        return Stage(
            edges=tuple(Edge.from_object(edge, where) for edge in edges),
            op=read_text(value.get("op"), f"{where}: op"),
            root=read_whole(value.get("root"), f"{where}: root"),
            entries=read_fraction(value["entries"], f"{where}: entries") if "entries" in value else None,
        )


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of the buffer: its exact share and the trees it runs through, in order."""

    share: Fraction
    stages: tuple[Stage, ...]

    @property
    def depth(self) -> int:
        """Tree edges one after another; where ranks exchange, the trees of one operation run side by side."""
        runs = groupby(self.stages, key=lambda stage: (stage.op, stage.entries))
        heights = [[stage.height for stage in run] for _, run in runs]
        beside = any(stage.entries is not None or stage.op == "gather" for stage in self.stages)
        return sum(max(run) if beside else sum(run) for run in heights)

    def to_object(self) -> dict[str, object]:
        """The JSON object of a plan file."""
        return {"share": str(self.share), "stages": [stage.to_object() for stage in self.stages]}

    @staticmethod
    def from_object(item: object, number: int) -> Shard:
        """Read such an object, the shard of a number; PlanError names the key that is missing or of a wrong type."""
        where = f"shard {number}"
        value = read_object(item, where)
        check_known(value, ("share", "stages"), where)
        share = read_fraction(value.get("share"), f"{where}: share")
        stages = read_list(value.get("stages"), f"{where}: stages")
        read = (Stage.from_object(stage, f"{where}, stage {place}") for place, stage in enumerate(stages))
        return Shard(share, tuple(read))


ALIGNMENT = 16
"""Elements that borders of shards and chunks are multiples of, so at least as many bytes in every dtype: NCCL and
kernels copy 16 bytes at a time where addresses are multiples of 16, and else far fewer."""


def shard_bounds(shares: Iterable[Fraction], count: int, *, blocks: int = 1) -> list[int]:
    """Element offsets of the shards in a buffer: shard i is ``[bounds[i], bounds[i + 1])``.

    Cumulative shares are rounded down to multiples of `ALIGNMENT`, counted from the start of the block, and blocks end
    where they end. So any count is divided without gap or overlap, no shard is `ALIGNMENT` elements away from its
    share, and shards of small buffers may be empty.

    Parameters
    ----------
    shares : iterable of Fraction
        Of all shards, in their order; they add up to 1, and to 1 / ``blocks`` in every block.
    count : int
        Elements, a multiple of ``blocks``.
    blocks : int
        In allgather and reduce_scatter one for each rank, and else 1. In a rank's own array, of one block, shards
        start on multiples of `ALIGNMENT`; in the gathered one they do where blocks are as long as a multiple of it.

    Examples
    --------
    >>> shard_bounds([Fraction(1, 3)] * 3, 100)
    [0, 32, 64, 100]
    >>> shard_bounds([Fraction(1, 4)] * 4, 100, blocks=2)
    [0, 16, 50, 66, 100]
    """
    block = count // blocks
    bounds = [0]
    total = Fraction(0)
    for share in shares:
        total += share
        start = total.numerator * blocks // total.denominator * block
        inside = total.numerator * count // total.denominator - start
        bounds.append(start + inside // ALIGNMENT * ALIGNMENT)
    return bounds


def bracketed(names: Sequence[str], stage: Stage, *, longest: int | None = None) -> str:
    """A tree in brackets, ``>`` or ``<`` the way that data takes; children without any of their own come first;
    cut to a number of characters unless that is None.

    Examples
    --------
    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), gpus=[1, 4, 5, 7])
    >>> bracketed(plan.ranks, plan.shards[0].stages[1]), bracketed(plan.ranks, plan.shards[0].stages[0])
    ('gpu4>(gpu7 gpu5>gpu1)', 'gpu4<(gpu7 gpu5<gpu1)')
    >>> star = topoplan.one_hop(topoplan.load("dgx-2")).shards[0].stages[1]
    >>> bracketed([f"gpu{i}" for i in range(16)], star)
    'gpu0>gpu1-15'
    """
    arrow = "<" if stage.op == "reduce" else ">"
    children: dict[int, list[int]] = {}
    edges = stage.top_down()
    for edge in edges:
        children.setdefault(edge.parent, []).append(edge.child)
    below: dict[int, str] = {}
    for rank in dict.fromkeys(edge.parent for edge in reversed(edges)):
        leaves = name_ranges(names[child] for child in children[rank] if child not in below)
        parts = [*leaves, *(f"{names[child]}{below[child]}" for child in children[rank] if child in below)]
        text = " ".join(parts)
        below[rank] = f"{arrow}({text})" if len(parts) > 1 else f"{arrow}{text}"
    text = f"{names[stage.root]}{below.get(stage.root, '')}"
    if longest is None or len(text) <= longest:
        return text
    end = f" … ({len(edges)} edges)"
    return text[: longest - len(end)].rsplit(" ", 1)[0] + end

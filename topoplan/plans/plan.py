"""The plan: shards with exact shares, each an ordered list of trees over ranks.

Everything that topoplan builds, its own packings and the rings and trees it is compared with, is a `Plan`: the
buffer is divided into shards by exact rational shares, and each shard runs through stages, where one stage is
one reduce tree or one broadcast tree whose edges carry their physical route. Chunks and pipelining are not
part of a plan; lowering adds them.

Where a shard lies in the buffer follows from the order of the shards (`shard_bounds`), on borders that suit the
hardware: the shares stay exact. In allgather and reduce-scatter the buffer is the full gathered one and rank r
owns the r-th of N equal blocks, so the shards stand in the order of their owners.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING

from topoplan.errors import PlanError, UsageError
from topoplan.plans.certificate import Certificate
from topoplan.topology import Topology

if TYPE_CHECKING:
    import networkx

COLLECTIVES = ("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter")
ROOTED = ("broadcast", "reduce")
"""Collectives with one root that the user names."""

TREES = "trees"
"""The schedule of packed trees, as plans and options call it; others stand in `topoplan.schedules.registry`."""

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


@dataclass(frozen=True, slots=True)
class Stage:
    """One tree, on which the shard's elements move, or the largest of them as entries of index and value.

    Parameters
    ----------
    op : str
        reduce (data runs from child to parent), broadcast (from parent to child), or gather: the entries that the root
        has chosen run to all ranks of the tree, which add them to their own. Gathers that follow one another in a shard
        are one exchange: every root chooses before anything arrives.
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
    def height(self) -> int:
        """Edges on the longest path from the root.

        Raises
        ------
        PlanError
            An edge hangs on a parent that the root does not reach.
        """
        return max(self.depths().values())

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


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of the buffer: its exact share and the trees it runs through, in order."""

    share: Fraction
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A collective on a machine as a forest with shares, and the proof of how good it is.

    Parameters
    ----------
    collective : str
        allreduce, broadcast, reduce, allgather or reduce_scatter.
    ranks : tuple of str
        Rank i runs on device ``ranks[i]``.
    root : int or None
        Root rank of a broadcast or reduce.
    topology : Topology
        The machine as this plan may use it: GPUs outside the allocation are taken out.
    channels : tuple of str
        Channels that rate and bound speak of: nvlink, pcie, network.
    schedule : str
        What kind of forest: ``trees``, ``one-hop``, ``nvlink ring``, ``pcie ring``, ``relay ring``, …
    method : str
        What built it: exact, mwu, or the baseline's name.
    shards : sequence of Shard
        Shares add up to 1. A tuple, or for large plans `topoplan.plans.symmetric_shards.ImageShards`, which behaves as
        one.
    rate : float
        GB/s of algorithm bandwidth: bytes of the user's buffer per second, recomputed from the forest.
        Infinite for a single rank, where nothing moves.
    bound : float
        GB/s that no plan on these channels exceeds, recomputed from the certificate.
    certificate : Certificate
        What a third party needs to recompute the bound.
    seconds : float or None
        Time it took to plan; no part of the plan file, which is the same byte for byte every time, nor of equality.
    notes : tuple of str
        What the planner could not reach or prove, one line each.
    order : str
        What came first among equal rates where the method is exact: height, or trees, and only then the file says so.

    Examples
    --------
    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "broadcast")
    >>> plan.rate, plan.bound, plan.gap
    (150.0, 150.0, 0.0)
    """

    collective: str
    ranks: tuple[str, ...]
    root: int | None
    topology: Topology
    channels: tuple[str, ...]
    schedule: str
    method: str
    shards: Sequence[Shard]
    rate: float
    bound: float
    certificate: Certificate
    seconds: float | None = field(default=None, compare=False)
    notes: tuple[str, ...] = ()
    order: str = "height"

    @property
    def gap(self) -> float:
        """How far the rate is below the bound, as a fraction of the bound; 0 means proved optimal."""
        return 0.0 if len(self.ranks) == 1 else max(0.0, 1 - self.rate / self.bound)

    @property
    def trees(self) -> int:
        """Number of packed trees: one per shard, and one that runs up and then down counts once."""
        return sum(count for shard, count in self.shard_counts if any(stage.edges for stage in shard.stages))

    @property
    def height(self) -> int:
        """Edges on the longest root-to-leaf path of any tree."""
        return max((stage.height for shard, _ in self.shard_counts for stage in shard.stages), default=0)

    @property
    def depth(self) -> int:
        """Tree edges that the slowest byte crosses one after another; a relayed edge counts once."""
        return max((_steps(shard) for shard, _ in self.shard_counts), default=0)

    @property
    def sparse(self) -> bool:
        """Whether entries move in any stage, and not only elements."""
        return any(stage.entries is not None for shard, _ in self.shard_counts for stage in shard.stages)

    @property
    def shard_counts(self) -> tuple[tuple[Shard, int], ...]:
        """Shards from which all follow by symmetry, each with the number of shards that it stands for."""
        from topoplan.plans.symmetric_shards import shard_counts

        return shard_counts(self.shards)

    @property
    def digest(self) -> str:
        """SHA-256 of the plan file, by which ranks agree that they run the same plan."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The plan file, format ``topoplan.plan/1``; the same bytes for the same plan, always."""
        from topoplan.plans.plan_json import dump_plan

        return dump_plan(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan file; its claims are not trusted (see `topoplan.verify`).

        Raises
        ------
        PlanError
            The text is no plan file of this format; names the key, and shard and stage where there is one.
        """
        from topoplan.plans.plan_json import parse_plan

        return parse_plan(text)

    def to_networkx(self) -> tuple[networkx.DiGraph, ...]:
        """The trees of the plan as graphs, one for each stage of each shard, in order.

        Returns
        -------
        tuple of networkx.DiGraph
            A node for each rank, named by its device as in `Topology.to_networkx`, with the attribute ``rank``. An edge
            for each tree edge, in the direction in which data runs, with the attributes ``route`` (the devices that it
            passes, in that direction) and ``channel``. Attributes of the graph: ``shard``, ``stage``, ``op``, ``root``
            (a device), ``share`` (a Fraction) and ``entries`` as in `Stage`. A large plan has many: 1024 ranks may have
            as many trees of 1023 edges each.

        Examples
        --------
        >>> import networkx, topoplan
        >>> reduce, broadcast, *others = topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7]).to_networkx()
        >>> sorted(broadcast.edges), broadcast.graph["root"], len(others)
        ([('gpu4', 'gpu5'), ('gpu4', 'gpu7'), ('gpu5', 'gpu1')], 'gpu4', 2)
        >>> networkx.is_arborescence(broadcast), sorted(reduce.edges) == sorted(broadcast.reverse().edges)
        (True, True)
        """
        from networkx import DiGraph

        trees = []
        for number, shard in enumerate(self.shards):
            for position, stage in enumerate(shard.stages):
                tree = DiGraph(
                    shard=number,
                    stage=position,
                    op=stage.op,
                    root=self.ranks[stage.root],
                    share=shard.share,
                    entries=stage.entries,
                )
                for rank, device in enumerate(self.ranks):
                    tree.add_node(device, rank=rank)
                for edge in stage.edges:
                    route = edge.route[::-1] if stage.op == "reduce" else edge.route
                    tree.add_edge(route[0], route[-1], route=route, channel=edge.channel)
                trees.append(tree)
        return tuple(trees)

    def timed(self, seconds: float) -> Plan:
        """The same plan with the time it took to make."""
        return replace(self, seconds=seconds)


def _steps(shard: Shard) -> int:
    """Tree edges one after another: stages of one operation that are trees of a sparse exchange run side by side."""
    runs = groupby(shard.stages, key=lambda stage: (stage.op, stage.entries))
    heights = [[stage.height for stage in run] for _, run in runs]
    sparse = any(stage.entries is not None for stage in shard.stages)
    return sum(max(run) if sparse else sum(run) for run in heights)


def check_collective(collective: str) -> str:
    """Return the name of a known collective, or raise UsageError that suggests the nearest.

    Examples
    --------
    >>> check_collective("reduce-scatter")
    'reduce_scatter'
    """
    import difflib

    name = collective.lower().replace("-", "_")
    name = {"all_reduce": "allreduce", "all_gather": "allgather", "reducescatter": "reduce_scatter"}.get(
        name, name
    )
    if name not in COLLECTIVES:
        near = difflib.get_close_matches(name, COLLECTIVES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(COLLECTIVES)}"
        raise UsageError(f"collective {collective!r} is unknown; {hint}")
    return name


def root_rank(gpus: Sequence[int], collective: str, root: int | None) -> int | None:
    """Rank of the root of a broadcast or reduce; None for the other collectives.

    Raises
    ------
    UsageError
        The root is not in the allocation, or the collective has none.
    """
    if collective not in ROOTED:
        if root is not None:
            raise UsageError(
                f"{collective} has no root; leave out root {root}, or plan a broadcast or reduce"
            )
        return None
    if root is None:
        return 0
    if root not in gpus:
        raise UsageError(
            f"root {root} is not in the allocation {', '.join(str(g) for g in gpus)}; name one of its GPUs"
        )
    return list(gpus).index(root)


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


def reversed_collective(collective: str) -> str:
    """The collective whose plans are this one's with every edge reversed (reduce for broadcast, …)."""
    pairs: Mapping[str, str] = {
        "broadcast": "reduce",
        "reduce": "broadcast",
        "allgather": "reduce_scatter",
        "reduce_scatter": "allgather",
        "allreduce": "allreduce",
    }
    return pairs[collective]

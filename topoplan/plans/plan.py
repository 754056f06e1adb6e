"""The plan: shards with exact shares, each an ordered list of trees over ranks.

All that topoplan builds, its own packings and the rings and trees for comparison, is a `Plan`: exact rational shares
divide the buffer into shards, and each shard runs through stages. A stage is one reduce tree or one broadcast tree
whose edges carry their physical route. Chunks and pipelining are not part of a plan; lowering adds them.

In allgather and reduce-scatter the buffer is the full gathered one and rank r owns the r-th of N equal blocks, so the
shards stand in the order of their owners.

In an all-to-all every rank has its own buffer, with a block for each rank. A shard is a part of one such block, and its
tree is the path of that part: a chain of edges from source to destination. Shards stand in the order of destinations
and then of sources; a block that a rank keeps is a shard without edges. Shares are relative to one rank's buffer (the
mean one, if a demand makes them differ), so that all together they add up to N.

The plan file, format ``topoplan.plan/1`` (``/2`` for an all-to-all, and for plans in which ranks exchange elements), is
deterministic: fixed key order, exact shares, no time and no random part, so the same plan is the same file byte for
byte. ``seconds`` (`Plan.planning_seconds`) is null in files for that reason; ``topoplan plan --json`` prints it.
Reading checks types only; `topoplan.verify` checks the rest.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from html import escape
from itertools import takewhile
from typing import TYPE_CHECKING, Self, cast

from topoplan.errors import PlanError, TopologyError, TopoplanError, UsageError, deprecated
from topoplan.machine.fabric import CHANNEL_LINKS, UNIONS, Fabric, channel_words
from topoplan.machine.topology import Topology, format_value
from topoplan.plans.certificates.certificate import Certificate, certificate_from_object, explain_certificate
from topoplan.plans.file_values import (
    check_format,
    check_known,
    compact,
    finite,
    parse_object,
    read_list,
    read_number,
    read_object,
    read_text,
    read_texts,
    read_whole,
)
from topoplan.plans.loads import team_wide_rate
from topoplan.plans.shards import ImageParts, ImageShards, Shard, Stage, shard_bounds, shard_counts
from topoplan.units import (
    bus_factor,
    check_type,
    counted,
    format_size,
    labelled,
    listed,
    name_ranges,
    nearest_float,
    parse_size,
    rate_words,
)

if TYPE_CHECKING:
    import networkx
    from matplotlib.figure import Figure

PLAN_FORMAT = "topoplan.plan/1"
PLAN_FORMAT_2 = "topoplan.plan/2"
"""Format of plans that a reader of the first one cannot read: all-to-all, gathers without entries, trees that join
helpers or whose bound allows them, trees over NVLink and PCIe together."""

COLLECTIVES = ("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter")
"""Collectives whose trees reach all ranks."""

ROOTED = ("broadcast", "reduce")
"""Collectives with one root that the user names."""

ALL_TO_ALL = "alltoall"
"""The collective in which every rank has a different block for each rank: its trees are paths."""

ALL_COLLECTIVES = (*COLLECTIVES, ALL_TO_ALL)

PLAN_KEYS = (
    *("format", "collective", "ranks", "root", "topology", "channels", "rate", "bound", "certificate"),
    *("schedule", "method", "order", "seconds", "trees", "height", "notes", "symmetry", "parts", "shards"),
    *("gap", "busbw", "digest", "wider_bound", "in_network_bound", "team_wide", "phases", "connections"),
)
"""Keys of a plan file; ``plan --json`` adds the last line, which follows from the other keys."""

LATE = "late ranks"
"""The schedule and method of plans for ranks that come late (`topoplan.plan_late`)."""

TREES = "trees"
"""The schedule of packed trees, as plans and options name it; `topoplan.schedules.registry` has the others."""


@dataclass(frozen=True, slots=True)
class SizeRange:
    """Sizes from ``start`` bytes up to but not including ``stop`` (None: unlimited), and their plan.

    Bytes are those of the user's buffer; for allgather and reduce_scatter of the full gathered one.
    """

    start: int
    stop: int | None
    plan: Plan

    def __str__(self) -> str:
        return f"sizes from {format_size(self.start)}" + (
            "" if self.stop is None else f" to {format_size(self.stop)}"
        )


class Plans(ABC):
    """One collective among the same ranks at every message size: a `Plan`, which covers all sizes, or `SizePlans`.

    Attributes
    ----------
    collective, ranks, root, topology, notes
        As of `Plan`; root and ranks those without a failure.
    ranges : tuple of SizeRange
        Ascending from 0 and contiguous; the last is unlimited.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        # Some are fields below, and a dataclass would take an inherited property for a default.
        @property
        def collective(self) -> str: ...
        @property
        def ranks(self) -> tuple[str, ...]: ...
        @property
        def root(self) -> int | None: ...
        @property
        def topology(self) -> Topology: ...
        @property
        def notes(self) -> tuple[str, ...]: ...
        @property
        def ranges(self) -> tuple[SizeRange, ...]: ...

    @abstractmethod
    def to_json(self) -> str:
        """Return the plan file; the same bytes for the same plans, always."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a plan file; its claims are not trusted (see `topoplan.verify`).

        Raises
        ------
        PlanError
            The text is not such a file; names the key and the range or failure, shard and stage.
        """
        return cls.from_object(parse_object(text))

    @classmethod
    @abstractmethod
    def from_object(cls, value: dict[str, object]) -> Self:
        """Read the JSON object of such a file; errors as `from_json`."""

    @property
    def digest(self) -> str:
        """SHA-256 of the plan file; ranks compare it to agree on the same plans."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each range."""
        return tuple(one.plan for one in self.ranges)

    @property
    def crossovers(self) -> tuple[int, ...]:
        """The sizes in bytes at which the next plan takes over, ascending."""
        return tuple(one.start for one in self.ranges[1:])

    def range_at(self, nbytes: int | str) -> SizeRange:
        """Return the range of a size in bytes; parameter and errors as `at`."""
        size = (
            nbytes if isinstance(nbytes, int) else parse_size(nbytes)
        )  # on each collective: no call for an int
        if size < 0:
            raise UsageError(f"a buffer of {size} bytes does not exist; give a size of zero or more")
        ranges = self.ranges
        return ranges[bisect_right(ranges, size, lo=1, key=lambda one: one.start) - 1]

    def at(self, nbytes: int | str) -> Plan:
        """Return the plan for a buffer of ``nbytes`` bytes, or of a text such as "64MB".

        Raises
        ------
        UsageError
            ``nbytes`` is negative, or not a size.
        """
        return self.range_at(nbytes).plan

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._words}, {counted(len(self.ranges), 'range')} of sizes>"

    @property
    def _words(self) -> str:
        return f"{collective_name(self.collective)}, {counted(len(self.ranks), 'rank')}"


@dataclass(frozen=True, slots=True)
class Tree:
    """One packed tree of a plan (see `Plan.trees`).

    Attributes
    ----------
    root : str
        Device of the root.
    edges : tuple of (str, str)
        Devices of parent and child, away from the root, whichever way the data of the collective runs. They are the
        edges on which the result spreads, or in a reduce or reduce_scatter those on which it is summed. In an exchange,
        where every rank is a root, they are those of all its trees.
    fraction : Fraction
        Part of the buffer that takes this tree; ``float(tree.fraction) * plan.algbw`` is its GB/s.
    stages : tuple of Stage
        All stages in order, with ranks, routes and channels.
    """

    root: str
    edges: tuple[tuple[str, str], ...]
    fraction: Fraction
    stages: tuple[Stage, ...] = field(repr=False)

    @staticmethod
    def of(shard: Shard, names: Sequence[str]) -> Tree:
        """Return the tree of a shard; ``names`` are the devices that its edges number."""
        check_type("shard", shard, Shard, remedy="take one of plan.shards")
        moving = [stage for stage in shard.stages if stage.edges]
        last = [*takewhile(lambda stage: stage.op == moving[-1].op, reversed(moving))][::-1]
        # a reduce of several phases ends at its root, all else begins there
        root = last[-1 if moving[-1].op == "reduce" else 0].root
        edges = dict.fromkeys((edge.parent, edge.child) for stage in last for edge in stage.edges)
        named = tuple((names[parent], names[child]) for parent, child in edges)
        return Tree(names[root], named, shard.share, shard.stages)

    def to_networkx(self) -> networkx.DiGraph:
        """Return the tree as a graph, an edge from each parent to each child; attributes ``root`` and ``fraction``.

        Examples
        --------
        >>> import networkx, topoplan
        >>> graph = topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7]).trees[0].to_networkx()
        >>> networkx.is_arborescence(graph), graph.graph["root"], networkx.dag_longest_path(graph)
        (True, 'gpu4', ['gpu4', 'gpu5', 'gpu1'])
        """
        from networkx import DiGraph

        graph = DiGraph(self.edges, root=self.root, fraction=self.fraction)
        graph.add_node(self.root)
        return graph


@dataclass(frozen=True, slots=True, repr=False)
class Plan(Plans):
    """A collective on a machine as a weighted tree packing, and the certificate of its upper bound.

    Parameters
    ----------
    collective : str
        allreduce, broadcast, reduce, allgather, reduce_scatter or alltoall.
    ranks : tuple of str
        Rank i runs on device ``ranks[i]``.
    root : int or None
        Root rank of a broadcast or reduce.
    topology : Topology
        The machine as this plan may use it: GPUs outside the allocation are taken out.
    channels : tuple of str
        The channels of rate and bound: nvlink, pcie, network.
    schedule : str
        The kind of forest: ``trees``, ``one-hop``, ``nvlink ring``, ``pcie ring``, ``relay ring``, …
    method : str
        The algorithm: exact, mwu, or the baseline's name.
    shards : sequence of Shard
        Shares add up to 1. A tuple, or for large plans an equivalent `topoplan.plans.shards.ImageShards`.
    rate : float
        GB/s of algorithm bandwidth: bytes of the user's buffer per second, recomputed from the forest.
        Infinite for a single rank, which moves nothing.
    bound : float
        GB/s that no plan on these channels exceeds, recomputed from the certificate.
    certificate : Certificate
        The data from which a third party recomputes the bound.
    planning_seconds : float or None
        Not in the plan file, which is the same byte for byte every time, nor part of equality.
    notes : tuple of str
        Targets that the planner missed or did not prove, one line each.
    order : str
        First criterion among equal rates if the method is exact: height, or trees, which alone the file states.

    Examples
    --------
    >>> import topoplan
    >>> plan = topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7])
    >>> plan
    <Plan all_reduce, 4 ranks, 2 trees, 50 GB/s (optimal)>
    >>> plan.algbw, plan.busbw, plan.upper_bound, plan.gap
    (50.0, 75.0, 50.0, 0.0)
    >>> plan.trees[0].root, plan.trees[0].edges, plan.trees[0].fraction
    ('gpu4', (('gpu4', 'gpu5'), ('gpu4', 'gpu7'), ('gpu5', 'gpu1')), Fraction(1, 2))
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
    planning_seconds: float | None = field(default=None, compare=False)
    notes: tuple[str, ...] = ()
    order: str = "height"

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth in GB/s, bytes of the user's buffer per second: `rate`, as nccl-tests calls it."""
        return self.rate

    @property
    def busbw(self) -> float:
        """Bus bandwidth in GB/s, as nccl-tests computes it: `algbw` times 2 (N - 1) / N for an all_reduce."""
        return self.rate * bus_factor(self.collective, len(self.ranks)) if len(self.ranks) > 1 else self.rate

    @property
    def upper_bound(self) -> float:
        """Algorithm bandwidth in GB/s that no schedule on these channels exceeds: `bound`.

        It holds for switches as the machine describes them: on an H100 server in-network reduction (NVLS) may exceed
        it, unless the machine was planned with ``in_network``. `summary` says so.
        """
        return self.bound

    @property
    def seconds(self) -> float | None:
        """Deprecated: `planning_seconds`."""
        deprecated("Plan.seconds", "use Plan.planning_seconds")
        return self.planning_seconds

    @property
    def gap(self) -> float:
        """Distance of the rate from the bound, as a fraction of the bound; 0 means proved optimal."""
        return 0.0 if len(self.ranks) == 1 else max(0.0, 1 - self.rate / self.bound)

    @property
    def num_trees(self) -> int:
        """Number of packed trees, one per shard: a tree that is reduced and then broadcast counts once."""
        return sum(count for shard, count in self.shard_counts if any(stage.edges for stage in shard.stages))

    @property
    def trees(self) -> tuple[Tree, ...]:
        """The packed trees, `num_trees` of them, made on each access: of 1024 ranks up to a million edges."""
        names = self.vertices
        return tuple(
            Tree.of(shard, names) for shard in self.shards if any(stage.edges for stage in shard.stages)
        )

    @property
    def height(self) -> int:
        """Edges on the longest root-to-leaf path of any tree."""
        return max((stage.height for shard, _ in self.shard_counts for stage in shard.stages), default=0)

    @property
    def depth(self) -> int:
        """Tree edges in sequence of the slowest byte; a relayed edge counts once."""
        return max((shard.depth for shard, _ in self.shard_counts), default=0)

    @property
    def sparse(self) -> bool:
        """Whether entries, and not only elements, move in any stage."""
        return any(stage.entries is not None for shard, _ in self.shard_counts for stage in shard.stages)

    @property
    def team_wide(self) -> float:
        """GB/s if NVSwitches also take in and give out the root's own part, as `multimem` does; else the rate.

        Examples
        --------
        >>> import topoplan
        >>> plan = topoplan.plan("dgx-h100", in_network="nvswitch")
        >>> plan.rate, plan.team_wide
        (450.0, 400.0)
        """
        fabric = Fabric(self.topology, self.channels)
        if not fabric.in_network or self.collective == ALL_TO_ALL:
            return self.rate
        rate = team_wide_rate(self.shards, fabric)
        return self.rate if rate is None else nearest_float(rate)

    @property
    def vertices(self) -> tuple[str, ...]:
        """Devices that tree edges and roots number: the ranks, then the machine's helpers."""
        return Fabric(self.topology, self.channels).vertices

    @property
    def helpers(self) -> tuple[str, ...]:
        """Devices that are not ranks and add or copy in the plan's trees."""
        if all(device.kind != "helper" for device in self.topology.devices):
            return ()
        size, names = len(self.ranks), self.vertices
        used = {
            end
            for shard, _ in self.shard_counts
            for stage in shard.stages
            for end in (stage.root, *(edge.child for edge in stage.edges))
            if size <= end < len(names)
        }
        return tuple(names[end] for end in sorted(used))

    @property
    def _needs_format_2(self) -> bool:
        of_trees = self.certificate.kind == "steiner" or bool(self.helpers)
        union = not {*UNIONS}.isdisjoint(self.channels)
        parts = isinstance(self.shards, ImageShards) and self.shards.parts is not None
        return of_trees or union or parts or self.collective == ALL_TO_ALL or self.exchanges

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange elements in any stage: all send theirs, and add up the elements that arrive."""
        return any(stage.kind == "exchange" for shard, _ in self.shard_counts for stage in shard.stages)

    @property
    def shard_counts(self) -> tuple[tuple[Shard, int], ...]:
        """Shards from which all follow by symmetry, each with the number of shards that it represents."""
        return shard_counts(self.shards)

    @property
    def buffers(self) -> int:
        """Number of buffers that the shares divide: those of all ranks in an all-to-all, and else one."""
        return len(self.ranks) if self.collective == ALL_TO_ALL else 1

    @property
    def blocks(self) -> int:
        """Number of equal blocks of the buffer in which shards lie; an all-to-all has those of all ranks together."""
        if self.collective in ("allgather", "reduce_scatter"):
            return len(self.ranks)
        equal = self.collective == ALL_TO_ALL and self.certificate.kind != "demand"
        return len(self.ranks) ** 2 if equal else 1

    def bounds(self, count: int) -> list[int]:
        """Return the shards' bounds in a buffer of ``count`` elements, a multiple of `blocks` (see `shard_bounds`)."""
        return shard_bounds((shard.share / self.buffers for shard in self.shards), count, blocks=self.blocks)

    @property
    def ranges(self) -> tuple[SizeRange, ...]:
        return (SizeRange(0, None, self),)

    def to_json(self) -> str:
        return plan_text(self.to_object()) + "\n"

    def to_object(self) -> dict[str, object]:
        """Return the plan file as a JSON object."""
        symmetry: dict[str, object] = {}
        if isinstance(self.shards, ImageShards):
            symmetry["symmetry"] = self.shards.to_object()
            if self.shards.parts is not None:
                symmetry["parts"] = self.shards.parts.to_object()
        return {
            "format": PLAN_FORMAT_2 if self._needs_format_2 else PLAN_FORMAT,
            "collective": self.collective,
            "ranks": list(self.ranks),
            "root": self.root,
            "topology": self.topology.to_object(),
            "channels": list(self.channels),
            "rate": finite(self.rate),
            "bound": finite(self.bound),
            "certificate": self.certificate.to_object(),
            "schedule": self.schedule,
            "method": self.method,
            **({} if self.order == "height" else {"order": self.order}),
            "seconds": None,
            "trees": self.num_trees,
            "height": self.height,
            "notes": list(self.notes),
            **symmetry,
            "shards": [shard.to_object() for shard, _ in self.shard_counts],
        }

    @classmethod
    def from_object(cls, value: dict[str, object], topology: Topology | None = None) -> Self:
        """Read the object of a plan file, or of a plan in a file that states the machine elsewhere; as `from_json`."""
        value = read_object(value, "a plan file's object")
        second = value.get("collective") == ALL_TO_ALL or value.get("format") == PLAN_FORMAT_2
        check_format(value, PLAN_FORMAT_2 if second else PLAN_FORMAT)
        check_known(value, PLAN_KEYS, "the plan")
        topology = topology or embedded_topology(value)
        root, order = value.get("root"), value.get("order", "height")
        channels = read_channels(value)
        shards: Sequence[Shard] = tuple(
            Shard.from_object(item, number)
            for number, item in enumerate(read_list(value.get("shards"), "shards"))
        )
        if "symmetry" in value:
            parts = ImageParts.from_object(value["parts"]) if "parts" in value else None
            shards = ImageShards.from_object(value["symmetry"], shards, Fabric(topology, channels), parts)
        elif "parts" in value:
            raise PlanError("parts belong to the images of symmetric shards, and the plan has no symmetry")
        if order not in ("height", "trees"):
            raise PlanError(f"order must be height or trees, not {order!r}"[:200])
        return cls(
            collective=read_text(value.get("collective"), "collective"),
            ranks=read_texts(value.get("ranks"), "ranks"),
            root=None if root is None else read_whole(root, "root"),
            topology=topology,
            channels=channels,
            schedule=read_text(value.get("schedule", TREES), "schedule"),
            method=read_text(value.get("method"), "method"),
            shards=shards,
            rate=read_number(value.get("rate"), "rate"),
            bound=read_number(value.get("bound"), "bound"),
            certificate=certificate_from_object(value.get("certificate")),
            planning_seconds=(
                None if value.get("seconds") is None else read_number(value.get("seconds"), "seconds")
            ),
            notes=read_texts(value.get("notes", []), "notes"),
            order=str(order),
        )

    def to_networkx(self) -> tuple[networkx.DiGraph, ...]:
        """Return the trees of the plan as graphs, one for each stage of each shard, in order.

        Returns
        -------
        tuple of networkx.DiGraph
            A node for each rank, named by its device as in `Topology.to_networkx`, with the attribute ``rank``. An edge
            for each tree edge, in the direction of the data, with the attributes ``route`` (its devices, in that
            direction) and ``channel``. Attributes of the graph: ``shard``, ``stage``, ``op``, ``root`` (a device),
            ``share`` (a Fraction) and ``entries`` as in `Stage`. A plan of 1024 ranks may have as many trees of 1023
            edges each.

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
                    root=self.vertices[stage.root],
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
        """Return the same plan with its planning time."""
        return replace(self, planning_seconds=seconds)

    def plot(self) -> Figure:
        """Return a matplotlib figure of the trees, as ``topoplan plan --plot`` draws it."""
        from topoplan.operate.plot.trees import draw_trees

        return draw_trees(self)

    def explain_bound(self) -> str:
        """Return one sentence on the bottleneck: which links limit every schedule, as the certificate proves.

        PlanError if the certificate proves nothing.

        Examples
        --------
        >>> import topoplan
        >>> topoplan.plan("dgx-1v", "broadcast").explain_bound()
        'only 150 GB/s leave {gpu0}; each byte must leave it once'
        """
        return explain_certificate(self)

    def summary(self) -> str:
        """Return a few lines: what is planned and proved, bandwidths in GB/s, trees, relayed edges, and the
        number of notes; ``print(plan)`` prints them.

        Examples
        --------
        >>> import topoplan
        >>> print(topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7]).summary())
        all_reduce on dgx-1v, 4 ranks (gpu1,4,5,7), over NVLink: provably optimal
        algbw        50 GB/s, busbw 75 GB/s
        upper bound  50 GB/s, busbw 75 GB/s
        trees        2 of height 2 (exact)
        """
        where = f"{collective_name(self.collective)} on {self.topology.name}"
        if len(self.ranks) == 1:
            return f"{where}, 1 rank ({self.ranks[0]}): nothing moves"
        named = " ".join(name_ranges(self.ranks))
        ranks = f"{len(self.ranks)} ranks ({named if len(named) <= 60 else f'{named[:60]}…'})"

        def both(rate: float) -> str:
            return rate_words(rate, self.collective, len(self.ranks))

        beyond = self._in_network_bound()
        without = "" if beyond is None else " without in-network reduction"
        proved = f"{self.gap:.2%} below the upper bound" if self.gap else "provably optimal"
        made = self.method if self.schedule == TREES else self.schedule
        relayed = self._relayed_edges()
        facts = labelled(
            ("algbw", both(self.rate)),
            ("upper bound", both(self.bound)),
            (
                "in-network",
                f"at most {both(beyond)} with in-network reduction (NVLS, SHARP)" if beyond else "",
            ),
            ("trees", f"{self.num_trees} of height {self.height} ({made})"),
            ("relayed", f"no link for {listed(relayed, noun='edges')}" if relayed else ""),
            ("notes", f"{len(self.notes)}, in plan.notes" if self.notes else ""),
        )
        return "\n".join(
            [
                f"{where}, {ranks}, over {channel_words(self.channels, self.topology)}: {proved}{without}",
                *facts,
            ]
        )

    def _relayed_edges(self) -> list[str]:
        """Return the edges of trees that no link carries, and the ranks through which their data passes."""
        ranks = set(self.ranks)
        routes = (
            edge.route
            for shard, _ in (() if self.collective == ALL_TO_ALL else self.shard_counts)
            for stage in shard.stages
            for edge in stage.edges
        )
        found = {}
        for route in routes:
            passed = [name for name in route[1:-1] if name in ranks]
            if passed:
                found[min(route, route[::-1])] = f"{route[0]}-{route[-1]} through {', '.join(passed)}"
        return [*found.values()]

    def __str__(self) -> str:
        return self.summary()

    def _in_network_bound(self) -> float | None:
        from topoplan.solve.upper_bound import in_network_bound

        return in_network_bound(self)

    def __repr__(self) -> str:
        proved = f"{self.gap:.2%} below the upper bound" if self.gap else "optimal"
        try:
            without = "" if self._in_network_bound() is None else " without in-network reduction"
        except TopoplanError:
            # a plan that does not fit its machine is shown too
            without = ""
        rate = f", {self.rate:.6g} GB/s ({proved}{without})" if len(self.ranks) > 1 else ""
        return f"<Plan {self._words}, {counted(self.num_trees, 'tree')}{rate}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.summary())}</pre>"


class PlanCollection(Plans):
    """Plans of one collective among the same ranks; notes are those of all ranges, each once."""

    __slots__ = ("_choice",)  # of `topoplan.plan_by_size`: the candidates, which no file states

    @property
    def collective(self) -> str:
        return self.ranges[0].plan.collective

    @property
    def ranks(self) -> tuple[str, ...]:
        return self.ranges[0].plan.ranks

    @property
    def root(self) -> int | None:
        return self.ranges[0].plan.root

    @property
    def topology(self) -> Topology:
        return self.ranges[0].plan.topology

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(note for plan in self.plans for note in plan.notes))


def read_channels(value: Mapping[str, object]) -> tuple[str, ...]:
    """Return the channels that a plan file states; PlanError for an unknown one."""
    channels = read_texts(value.get("channels"), "channels")
    for channel in channels:
        if channel not in CHANNEL_LINKS:
            raise PlanError(f"channel {channel!r} is unknown; use one of {', '.join(CHANNEL_LINKS)}")
    return channels


def check_shape(value: Mapping[str, object], trees: int, height: int) -> None:
    """Raise PlanError if the ``trees`` or ``height`` that a plan file states differ from the recomputed ones."""
    for key, found in (("trees", trees), ("height", height)):
        if key in value and (value[key] != found or isinstance(value[key], bool)):
            raise PlanError(f"claims {key} {format_value(value[key])}; recomputed it is {found}")


def plan_text(value: dict[str, object]) -> str:
    """Return the text of a plan's JSON object, whole or with keys left out; shards stand one to a line."""
    value = dict(value)
    shards = value.pop("shards")
    head = ",\n ".join(f'"{key}": {compact(field)}' for key, field in value.items())
    rows = ",\n  ".join(compact(shard) for shard in cast("list[object]", shards))
    return "{" + head + ',\n "shards": [\n  ' + rows + "\n ]}"


def row_texts(rows: object) -> Iterator[str]:
    """Yield the texts of JSON objects that may hold a plan, each on one line but for its plan."""
    for row in cast("list[dict[str, object]]", rows):
        head = compact({key: value for key, value in row.items() if key != "plan"})
        plan = cast("dict[str, object] | None", row.get("plan"))
        yield head if plan is None else f'{head[:-1]}, "plan": {plan_text(plan)}}}'


def without_topology(plan: Plan) -> dict[str, object]:
    """Return the JSON object of a plan for a file that states the machine elsewhere."""
    return {key: value for key, value in plan.to_object().items() if key != "topology"}


def embedded_topology(value: dict[str, object]) -> Topology:
    """Return the machine in the object of a plan file; PlanError if there is none."""
    from topoplan.machine.topology_json import topology_from_object

    try:
        return topology_from_object(value.get("topology"))
    except TopologyError as error:
        raise PlanError(f"the embedded topology is wrong: {error}") from None


_COLLECTIVE_ALIASES = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reducescatter": "reduce_scatter",
    "all_to_all": ALL_TO_ALL,
}
_SPELLED = {short: name for name, short in _COLLECTIVE_ALIASES.items() if "_" in name}


def check_collective(collective: str) -> str:
    """Return the canonical name of a collective, or raise UsageError that suggests the nearest.

    >>> check_collective("reduce-scatter")
    'reduce_scatter'
    """
    import difflib

    name = collective.lower().replace("-", "_") if isinstance(collective, str) else ""
    name = _COLLECTIVE_ALIASES.get(name, name)
    if name not in ALL_COLLECTIVES:
        near = difflib.get_close_matches(name, ALL_COLLECTIVES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(ALL_COLLECTIVES)}"
        raise UsageError(f"collective {collective!r} is unknown; {hint}")
    return name


def collective_name(collective: str) -> str:
    """Return a collective as PyTorch and the pages spell it; plan files keep the short names.

    >>> collective_name("allreduce"), collective_name("alltoall"), collective_name("broadcast")
    ('all_reduce', 'all_to_all', 'broadcast')
    """
    return _SPELLED.get(collective, collective)


def root_rank(gpus: Sequence[int], collective: str, root: int | None) -> int | None:
    """Return the rank of a broadcast's or reduce's root; None for the other collectives.

    UsageError if the root is not in the allocation, or the collective has no root.
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

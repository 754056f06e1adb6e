"""Pack trees for an allgather or reduce-scatter whose ranks own blocks of different lengths.

    maximise f, subject to   sum of x(T) usage(T, L) <= capacity(L),   sum of x(T) over the trees of rank r = f b(r),

where b(r) is the block of rank r: the packing program of equal blocks with other right-hand sides. Trees of all roots
share the links, so a long block takes links that short ones leave free. By Edmonds' theorem on disjoint branchings
(1973) the optimum on direct links is that of the slowest cut, over which each block passes once (`least_time`).

The plan is one of equal blocks in form: shards of a rank add up to 1 / N of the buffer, in the proportions of its
packing, and rate and certificate are those of equal blocks. What it is for is the time of the given ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from topoplan.machine.fabric import Fabric
from topoplan.plans.build import build_plan
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Shard
from topoplan.solve.packing.column_generation import ColumnGeneration
from topoplan.solve.packing.exact import at_lowest_height
from topoplan.solve.packing.packing_program import Packing, Pricing, has_exact_tables
from topoplan.solve.search_control import RandomStream

WALKS = 4
"""Walks along the optimal face in the search for fewer trees, among few ranks."""


@dataclass(frozen=True)
class BlockPacking(Packing):
    """The packing problem of an allgather or reduce-scatter in which rank r owns ``blocks[r]``, 0 or more."""

    blocks: tuple[int, ...] = ()

    @cached_property
    def roots(self) -> tuple[int, ...]:
        return tuple(rank for rank, block in enumerate(self.blocks) if block)

    @cached_property
    def root_counts(self) -> tuple[int, ...]:
        return tuple(self.blocks[rank] for rank in self.roots)

    @property
    def rate_of_one(self) -> Fraction:
        return Fraction(sum(self.blocks))


def can_plan_blocks(even: Plan) -> bool:
    """Return whether `plan_blocks` takes a plan: its switches only forward, and it has one choice of links."""
    fabric = Fabric(even.topology, even.channels)
    plain = not fabric.split and not fabric.helpers and not fabric.in_network
    return plain and not even.sparse and fabric.size > 1


def plan_blocks(even: Plan, blocks: Sequence[int]) -> Plan:
    """Return the plan that moves blocks of these lengths in the least time, on the links of one of equal blocks.

    Parameters
    ----------
    even : Plan
        Plan of an allgather or reduce-scatter. Ranks without a block keep its trees.
    blocks : sequence of int
        Length of the block of each rank in any unit, 0 or more, not all 0.

    Returns
    -------
    Plan
        Valid for equal blocks too, with the bound of ``even``. Its time for ``blocks`` is the least one. Up to
        8 ranks its trees are the lowest that reach it.

    Notes
    -----
    Exact column generation over the roots with a block: 50 ms for the 8 GPUs of a DGX-1V, 1.6 s for 16 on two servers.

    Examples
    --------
    Rank 0 of a DGX-1V has ten times the bytes of the others, and its six NVLinks bring them out by more trees:

    >>> import topoplan
    >>> even = topoplan.plan("dgx-1v", "allgather")
    >>> made = plan_blocks(even, (10, *(1,) * 7))
    >>> [sum(shard.stages[0].root == 0 for shard in plan.shards) for plan in (even, made)]
    [4, 6]
    """
    fabric = Fabric(even.topology, even.channels)
    packing = BlockPacking(fabric, even.collective, None, (), tuple(blocks))
    least = least_time(fabric, even.collective, blocks)
    generation = ColumnGeneration(Pricing(packing))
    generation.run(sum(blocks) / least * packing.scale)
    if has_exact_tables(fabric):
        generation = at_lowest_height(generation, generation.value, None)
        weights = generation.fewer_trees(RandomStream(0), least=len(packing.roots), walks=WALKS)
    else:
        weights = generation.weights()
    of_rank: list[list[Shard]] = [[] for _ in blocks]
    for shard in packing.shards(weights):
        of_rank[shard.stages[0].root].append(shard)
    for shard in even.shards:
        if not blocks[shard.stages[0].root]:
            of_rank[shard.stages[0].root].append(shard)
    return build_plan(
        fabric,
        even.collective,
        root=None,
        shards=[shard for shards in of_rank for shard in shards],
        certificate=even.certificate,
        schedule="trees",
        method="exact",
        notes=(f"packed for blocks in the proportions {', '.join(map(str, blocks))}",),
    )


def least_time(fabric: Fabric, collective: str, blocks: Sequence[int]) -> Fraction:
    """Return a lower bound of the time of blocks by any plan, in their unit per GB/s.

    It is that of the slowest cut around a rank or a server, in either direction.

    In an allgather, each block of one side of a cut passes it once; in a reduce-scatter, the sum of each block that a
    rank of the other side owns does. Switches and helpers on the way change nothing in that.

    >>> import topoplan
    >>> fabric = Fabric(topoplan.load("dgx-1v"), ("nvlink",))
    >>> [least_time(fabric, one, (10, *(1,) * 7)) for one in ("allgather", "reduce_scatter")]
    [Fraction(8, 75), Fraction(8, 75)]
    """
    server_of = {device.name: device.server for device in fabric.topology.devices}
    of_servers = [server_of[name] for name in fabric.nodes]
    of_ranks = [name if node < fabric.size else "" for node, name in enumerate(fabric.nodes)]
    whole, least = sum(blocks), Fraction(0)
    for label in (of_ranks, of_servers):
        owned: dict[str, int] = {}
        for rank, block in enumerate(blocks):
            owned[label[rank]] = owned.get(label[rank], 0) + block
        if len(owned) < 2:
            continue
        leaving, entering = dict.fromkeys(owned, Fraction(0)), dict.fromkeys(owned, Fraction(0))
        for (source, destination), width in zip(fabric.ends, fabric.capacity, strict=True):
            if label[source] != label[destination]:
                if label[source] in leaving:
                    leaving[label[source]] += width
                if label[destination] in entering:
                    entering[label[destination]] += width
        for side, own in owned.items():
            out, back = (own, whole - own) if collective == "allgather" else (whole - own, own)
            least = max(least, out / leaving[side], back / entering[side])
    return least

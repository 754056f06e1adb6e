"""How a plan runs: its streams, how deep its pipeline is, and the memory that it needs beside the buffers.

Where ranks exchange messages, a rank keeps what has arrived and cannot be joined yet, in windows of a few chunks for
each stream, and partial sums on their way where it gets no result: for each joining stream two chunks and one for
every level that it has to wait, so at most fan-in x (depth + 2), partial sums apart. The tcp back end lets
`FLIGHT_BYTES` of each such stream be under way where that is more, or long links would run dry.
"""

from __future__ import annotations

from dataclasses import dataclass

from collectives.backends.tcp.order import orders
from collectives.lowering.edge_streams import streams
from collectives.lowering.lower import lower
from topoplan.errors import UsageError
from topoplan.plans.plan import Plan
from topoplan.plans.tree import ALIGNMENT

LARGEST = 200_000
"""Tree edges of a plan that is still looked at edge by edge."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What running a plan takes, whatever the buffer's length.

    Parameters
    ----------
    streams : int
        Tree edges.
    queues : int
        Directed pairs of ranks, by channel, between which they run.
    steps : int
        Steps that one chunk takes; the next one follows a step later.
    fan_in : int
        The most streams that one rank joins, over all trees.
    scratch : tuple of int
        Chunks of scratch memory on each rank, at most.
    held : tuple of int
        Streams of which chunks may have to wait on each rank.
    """

    streams: int
    queues: int
    steps: int
    fan_in: int
    scratch: tuple[int, ...]
    held: tuple[int, ...]

    def to_object(self) -> dict[str, object]:
        """A JSON object of everything above."""
        return {
            "streams": self.streams,
            "queues": self.queues,
            "steps": self.steps,
            "fan_in": self.fan_in,
            "scratch_chunks": list(self.scratch),
            "held_streams": list(self.held),
        }


def footprint(plan: Plan) -> Footprint:
    """How a plan runs.

    Raises
    ------
    UsageError
        The plan has more than `LARGEST` edges, or ranks exchange what they have.

    Examples
    --------
    Every GPU of a DGX-2 adds up its sixteenth of the buffer, which the 15 others send it at once:

    >>> import topoplan
    >>> found = footprint(topoplan.plan(topoplan.load("dgx-2"), "allreduce"))
    >>> found.streams, found.queues, found.steps, found.fan_in, set(found.scratch)
    (480, 240, 2, 15, {28})
    """
    edges = sum(count * len(stage.edges) for shard, count in plan.shard_counts for stage in shard.stages)
    if edges > LARGEST:
        raise UsageError(
            f"the plan has {edges} tree edges, and up to {LARGEST} are explained one by one; "
            "explain a smaller allocation"
        )
    if plan.helpers:
        raise UsageError(
            f"{plan.helpers[0]} adds and copies in this plan and is no rank, and explanations are of ranks; leave "
            "the helpers out of the machine"
        )
    if plan.exchanges:
        raise UsageError(
            "this plan's ranks exchange what they have in rounds of their own; explain one of its trees or rings"
        )
    denominator = max((shard.share.denominator for shard in plan.shards), default=1)
    # long enough that no shard is empty, and each is one chunk
    count = ALIGNMENT * max(len(plan.ranks), plan.blocks) * denominator
    table = lower(plan, count, chunk_elements=count)
    parts = streams(table)
    joins = [0] * len(plan.ranks)
    scratch = [0] * len(plan.ranks)
    held = [0] * len(plan.ranks)
    for order in orders(table, plan.collective, plan.root):
        stream = order.stream
        joins[stream.destination] += stream.add
        held[stream.destination] += order.held
        scratch[stream.destination] += (stream.window if order.held else 0) + order.slots
    return Footprint(
        streams=len(parts),
        queues=len({part.queue for part in parts}),
        steps=1 + max((part.level for part in parts), default=-1),
        fan_in=max(joins, default=0),
        scratch=tuple(scratch),
        held=tuple(held),
    )

"""What each rank does where data travel in packets that carry their flags (LL), for small buffers in one server.

Nobody signals or waits: whoever reads a packet in its scratch waits for its flag. Every tree edge has a place of its
own in the receiver's scratch for each direction. Sums run to the root (``ppkt`` from leaves, ``respkt`` inside the
tree), totals back (``rppkt`` hands packets on as they are, ``upkt`` takes them out). Packets are twice as long as their
data, and there is no loop over units; the engine doubles the scratch, so that a call cannot overtake the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from topoplan.errors import UsageError
from topoplan.export.mscclpp.tasks import (
    BARRIER,
    MEMORY,
    MOST_REFERENCES,
    Place,
    Step,
    Task,
    Tree,
    Wires,
    shard_trees,
)
from topoplan.plans.plan import ALL_TO_ALL, Plan
from topoplan.plans.tree import Shard


def packet_tasks(plan: Plan, shards: Sequence[tuple[Shard, int, int]]) -> tuple[list[list[Task]], Wires]:
    """As `topoplan.export.mscclpp.tasks.tasks`, with packets.

    Raises
    ------
    UsageError
        As there; the plan spans servers; a rank has more children than one operation takes.
    """
    if plan.collective == ALL_TO_ALL:
        raise UsageError("packets are written for trees, and blocks of an alltoall take paths; use simple")
    wires = Wires([plan.topology.device(name).server for name in plan.ranks])
    found: list[list[Task]] = [[] for _ in plan.ranks]
    for number, (shard, start, count) in enumerate(shards):
        reduce, broadcast = shard_trees(plan, shard)
        landings: dict[tuple[int, int], int] = {}
        for tree in (reduce, broadcast):
            for child, parent in tree.parent.items() if tree else ():
                if wires.kind(parent, child) != MEMORY:
                    raise UsageError(
                        "packets are written inside a server, and this plan spans several; use simple"
                    )
                wires.add(number, parent, child, 0)
                sender, receiver = (child, parent) if tree is reduce else (parent, child)
                landings[sender, receiver] = wires.scratch[receiver]
                wires.scratch[receiver] += count
        part = _Part("o" if plan.collective == "allgather" else "i", start, count, landings)
        for rank, own in enumerate(found):
            up = tuple(part.up(rank, reduce, broadcast)) if reduce else ()
            down = tuple(part.down(rank, broadcast, turns=reduce is not None)) if broadcast else ()
            own += [
                Task(number, upwards, count, steps=steps)
                for upwards, steps in ((True, up), (False, down))
                if steps
            ]
    return found, wires


class _Part:
    """One shard: its buffer, its chunks, and where what one rank sends another lands."""

    def __init__(self, buffer: str, start: int, count: int, landings: dict[tuple[int, int], int]) -> None:
        self._own = Place(None, MEMORY, buffer, start, count)
        self._landings, self._count = landings, count

    def up(self, rank: int, tree: Tree, back: Tree | None) -> Iterator[Step]:
        """Add what has come to the rank's own and send it on."""
        children = tree.children.get(rank, [])
        receivers = [tree.parent[rank]] if rank in tree.parent else []
        if back and rank == back.root:
            receivers = back.children[rank]
        while len(children) > MOST_REFERENCES:
            # a sum that stays; the last one is sent
            yield self._sum(children[:MOST_REFERENCES], rank, [])
            yield BARRIER
            children = children[MOST_REFERENCES:]
        if children:
            yield self._sum(children, rank, receivers[:MOST_REFERENCES])
            receivers = receivers[MOST_REFERENCES:]
            if receivers:
                yield BARRIER
        yield from self._send(rank, receivers)

    def down(self, rank: int, tree: Tree, *, turns: bool) -> Iterator[Step]:
        """Hand on what has come, and take it out; the root sends what it has, unless its sum was sent."""
        if rank == tree.root:
            if not turns:
                yield from self._send(rank, tree.children[rank])
            return
        come = self._landed(tree.parent[rank], rank)
        children = tree.children.get(rank, [])
        for at in range(0, len(children), MOST_REFERENCES):
            there = [self._there(rank, child) for child in children[at : at + MOST_REFERENCES]]
            yield Step("rppkt", (), (come,), tuple(there))
        yield Step("upkt", (), (come,), (self._own,))

    def _sum(self, children: Sequence[int], rank: int, receivers: Sequence[int]) -> Step:
        reads = (self._own, *(self._landed(child, rank) for child in children))
        writes = (self._own, *(self._there(rank, receiver) for receiver in receivers))
        return Step("respkt" if receivers else "repkt", (), reads, writes)

    def _send(self, rank: int, receivers: Sequence[int]) -> Iterator[Step]:
        for receiver in receivers:
            yield Step("ppkt", (), (self._own,), (self._there(rank, receiver),))

    def _landed(self, sender: int, rank: int) -> Place:
        return Place(None, MEMORY, "s", self._landings[sender, rank], self._count)

    def _there(self, rank: int, receiver: int) -> Place:
        return Place(receiver, MEMORY, "s", self._landings[rank, receiver], self._count)

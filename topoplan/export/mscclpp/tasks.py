"""What each rank does for each shard: steps for thread blocks, and signals before and after them.

A tree edge is one memory channel, and both of its directions serve. Ranks inside a tree work unit by unit, in a loop
that waits for what it needs, moves data and signals who waits for it: parents read their children's sums (``rre``), the
root writes the total to its children as it adds (``rres``), and ranks below hand it on (``put``). Leaves move nothing.
They signal once, before the loop of their parent begins, and are signalled once, when it has ended; so they cost no
loop, and the blocks of all of a rank's leaves become one.

A rank's buffer is touched by others between its own first signal and the last that it waits for: a broadcast writes to
children that have said that they are there, and what was read in a reduce_scatter is acknowledged at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from topoplan.errors import UsageError
from topoplan.plans.plan import Plan
from topoplan.plans.tree import Shard, Stage

MOST_REFERENCES = 8
"""Most remote buffers that one operation reads, and that it writes."""


@dataclass(frozen=True, slots=True)
class Place:
    """Chunks of a buffer: a peer's, or the rank's own for a peer of None."""

    peer: int | None
    index: int
    size: int


@dataclass(frozen=True, slots=True)
class Step:
    """An operation: ``wait`` and ``signal`` name channels of the rank, the others what they read and write."""

    name: str
    channels: tuple[int, ...] = ()
    reads: tuple[Place, ...] = ()
    writes: tuple[Place, ...] = ()


BARRIER = Step("nop")
"""All threads of the block arrive before any goes on."""


@dataclass(frozen=True, slots=True)
class Task:
    """A rank's part in one shard, in one direction.

    Parameters
    ----------
    shard : int
        Blocks take their tasks in this order, on every rank; so no two wait for each other.
    upwards : bool
        Whether data run to the root: blocks do not mix directions, as a unit would wait for its own way back.
    chunks : int
        Chunks that a unit is taken from.
    announce, expect : tuple of int
        Channels to signal, and to wait for, before the loop.
    body : tuple of Step
        The loop over units; empty for leaves.
    release, finish : tuple of int
        Channels to signal, and to wait for, after it.
    """

    shard: int
    upwards: bool
    chunks: int
    announce: tuple[int, ...] = ()
    expect: tuple[int, ...] = ()
    body: tuple[Step, ...] = ()
    release: tuple[int, ...] = ()
    finish: tuple[int, ...] = ()


class Wires:
    """The channels of every rank: their peers in order, one channel for each edge of each shard.

    Both ends get a channel at the same time, so the k-th of a pair of ranks is the k-th on both sides.
    """

    def __init__(self, size: int) -> None:
        self.peers: list[list[int]] = [[] for _ in range(size)]
        self._numbers: dict[tuple[int, int, int], tuple[int, int]] = {}

    def add(self, shard: int, parent: int, child: int) -> None:
        """A channel for an edge, unless it has one."""
        if (shard, parent, child) not in self._numbers:
            self._numbers[shard, parent, child] = (len(self.peers[parent]), len(self.peers[child]))
            self.peers[parent].append(child)
            self.peers[child].append(parent)

    def down(self, shard: int, parent: int, children: Sequence[int]) -> tuple[int, ...]:
        """The parent's channels to its children."""
        return tuple(self._numbers[shard, parent, child][0] for child in children)

    def up(self, shard: int, child: int, parent: int) -> tuple[int, ...]:
        """The child's channel to its parent."""
        return (self._numbers[shard, parent, child][1],)


class _Tree:
    """One stage: who is above and below whom."""

    def __init__(self, stage: Stage) -> None:
        self.root = stage.root
        self.parent: dict[int, int] = {}
        self.children: dict[int, list[int]] = {}
        for edge in stage.top_down():
            self.parent[edge.child] = edge.parent
            self.children.setdefault(edge.parent, []).append(edge.child)

    def below(self, rank: int, *, leaves: bool) -> list[int]:
        """The children that are leaves, or those that are not."""
        return [child for child in self.children.get(rank, []) if (child not in self.children) == leaves]


def tasks(
    plan: Plan, shards: Sequence[tuple[Shard, int, int]], *, piece: int | None = None
) -> tuple[list[list[Task]], Wires]:
    """The tasks of every rank, by shard, and the channels.

    Parameters
    ----------
    plan : Plan
    shards : sequence of (Shard, int, int)
        With first chunk and number of chunks.
    piece : int or None
        Chunks that one operation moves, where loops of shards of different sizes are to be of one length.

    Raises
    ------
    UsageError
        The collective, or the order of the stages, is none that can be written.
    """
    wires = Wires(len(plan.ranks))
    found: list[list[Task]] = [[] for _ in plan.ranks]
    for number, (shard, start, count) in enumerate(shards):
        reduce, broadcast = _trees(plan, shard)
        for tree in (reduce, broadcast):
            for child, parent in tree.parent.items() if tree else ():
                wires.add(number, parent, child)
        step = piece or count
        pieces = tuple((index, step) for index in range(start, start + count, step))
        for rank, own in enumerate(found):
            own += _of_rank(rank, number, pieces, reduce, broadcast, wires)
    return found, wires


def _trees(plan: Plan, shard: Shard) -> tuple[_Tree | None, _Tree | None]:
    """The reduce tree and the broadcast tree of a shard."""
    ops = [stage.op for stage in shard.stages]
    wanted = {
        "allreduce": ["reduce", "broadcast"],
        "broadcast": ["broadcast"],
        "allgather": ["broadcast"],
        "reduce_scatter": ["reduce"],
    }.get(plan.collective)
    if wanted is None:
        raise UsageError(
            f"MSCCL++ has no {plan.collective}; it runs allreduce, broadcast, allgather and reduce_scatter"
        )
    if plan.sparse or ops != wanted or len({stage.root for stage in shard.stages}) > 1:
        raise UsageError(
            f"a shard of this plan has the stages {' '.join(ops)}; a file of MSCCL++ takes {' and '.join(wanted)} with "
            "one root: export a plan of trees or rings"
        )
    trees = dict(zip(ops, map(_Tree, shard.stages), strict=True))
    return trees.get("reduce"), trees.get("broadcast")


def _of_rank(
    rank: int,
    shard: int,
    pieces: tuple[tuple[int, int], ...],
    reduce: _Tree | None,
    broadcast: _Tree | None,
    wires: Wires,
) -> Iterator[Task]:
    """The tasks of a rank in one shard."""
    size = pieces[0][1]
    announce: list[int] = []
    finish: list[int] = []
    if reduce:
        above = wires.up(shard, rank, reduce.parent[rank]) if rank in reduce.parent else ()
        if rank in reduce.children:
            ready = wires.down(shard, rank, reduce.below(rank, leaves=True))
            inner = wires.down(shard, rank, reduce.below(rank, leaves=False))
            turns = broadcast if broadcast and rank == reduce.root else None
            sends = turns.children[rank] if turns else []
            told = wires.down(shard, rank, turns.below(rank, leaves=False)) if turns else above
            body = (
                *_waits(inner),
                *(step for piece in pieces for step in _add(piece, reduce.children[rank], sends)),
                BARRIER,
                *_signals(told),
            )
            if turns:
                release = wires.down(shard, rank, turns.below(rank, leaves=True))
            else:
                release = () if broadcast else wires.down(shard, rank, reduce.children[rank])
            yield Task(shard, True, size, (), ready, body, release, above if not broadcast else ())
        else:
            announce += above
            finish += () if broadcast else above
    if broadcast:
        above = wires.up(shard, rank, broadcast.parent[rank]) if rank in broadcast.parent else ()
        inside = rank in broadcast.children
        if inside and not (reduce and rank == broadcast.root):
            children = broadcast.children[rank]
            body = (
                *_waits(above),
                *(
                    Step("put", (), (Place(None, *piece),), (Place(child, *piece),))
                    for piece in pieces
                    for child in children
                ),
                BARRIER,
                *_signals(wires.down(shard, rank, broadcast.below(rank, leaves=False))),
            )
            hand = () if reduce else above
            here = () if reduce else wires.down(shard, rank, children)
            yield Task(
                shard,
                False,
                size,
                hand,
                here,
                body,
                wires.down(shard, rank, broadcast.below(rank, leaves=True)),
            )
        elif not inside:
            announce += () if reduce else above
            finish += above
    if announce or finish:
        yield Task(shard, False, size, tuple(announce), (), (), (), tuple(finish))


def _add(piece: tuple[int, int], children: Sequence[int], sends: Sequence[int]) -> Iterator[Step]:
    """Add what the children hold to the rank's own, and send the sum."""
    own = Place(None, *piece)
    groups = [children[at : at + MOST_REFERENCES] for at in range(0, len(children), MOST_REFERENCES)]
    for number, group in enumerate(groups):
        written = sends[:MOST_REFERENCES] if number == len(groups) - 1 else ()
        reads = (own, *(Place(child, *piece) for child in group))
        writes = (own, *(Place(child, *piece) for child in written))
        if number:
            yield BARRIER
        yield Step("rres" if written else "rre", (), reads, writes)
    if len(sends) > MOST_REFERENCES:
        yield BARRIER
        for child in sends[MOST_REFERENCES:]:
            yield Step("put", (), (own,), (Place(child, *piece),))


def _waits(channels: tuple[int, ...]) -> tuple[Step, ...]:
    return (Step("wait", channels), BARRIER) if channels else ()


def _signals(channels: tuple[int, ...]) -> tuple[Step, ...]:
    return (Step("signal", channels),) if channels else ()

"""What each rank does for each shard: steps for thread blocks, and signals before and after them.

Inside a server a tree edge is one memory channel, and both of its directions serve. Ranks inside a tree work unit by
unit, in a loop that waits for what it needs, moves data and signals who waits for it: parents read their children's
sums (``rre``), the root writes the total to its children as it adds (``rres``), and ranks below hand it on (``put``).
Leaves move nothing. They signal once, before the loop of their parent begins, and are signalled once, when it has
ended; so they cost no loop, and the blocks of all of a rank's leaves become one.

Between servers an edge is a port channel, over which nothing can be read: children put their sums, unit by unit, into
scratch of their parent, which adds them to its own (``re``); parents put the total where it belongs, and children say
at the end that all has come: only then has the NIC read it. (``flush`` would do, but release 0.9 takes the number of
channels to flush from ``dst_buff``.)

Where a switch adds and copies, a star through it is one operation of its root (``glres``; ``gstore`` where it only
copies), between the same signals.

Blocks of an all-to-all go down paths from inputs to outputs, through scratch of the ranks that relay them.

A rank's buffer is touched by others between its own first signal and the last that it waits for: a broadcast writes to
children that have said that they are there, and what was read in a reduce_scatter is acknowledged at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from topoplan.errors import UsageError
from topoplan.fabric.fabric import Fabric
from topoplan.plans.build import stage_order
from topoplan.plans.certificates.exchange import ends_of
from topoplan.plans.plan import ALL_TO_ALL, Plan
from topoplan.plans.tree import Shard, Stage

MOST_REFERENCES = 8
"""Most remote buffers that one operation reads, and that it writes."""


MEMORY, PORT, SWITCH = "memory", "port", "switch"

Channel = tuple[str, int]
"""Type, and number among the rank's channels of the type."""


@dataclass(frozen=True, slots=True)
class Place:
    """Chunks of a buffer: of a peer that is reached over channels of a type, or the rank's own for a peer of None.

    Over a switch those of all ranks at once, for a peer of None.
    """

    peer: int | None
    kind: str
    buffer: str
    index: int
    size: int


@dataclass(frozen=True, slots=True)
class Step:
    """An operation with the channels that it names, and what it reads and writes."""

    name: str
    channels: tuple[Channel, ...] = ()
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
    announce, expect : tuple of Channel
        Channels to signal, and to wait for, before the loop.
    body : tuple of Step
        The loop over units; empty for leaves.
    release, finish, confirm : tuple of Channel
        Channels to signal, to wait for, and to signal then, after it.
    steps : tuple of Step
        What is done once, in place of a loop.
    """

    shard: int
    upwards: bool
    chunks: int
    announce: tuple[Channel, ...] = ()
    expect: tuple[Channel, ...] = ()
    body: tuple[Step, ...] = ()
    release: tuple[Channel, ...] = ()
    finish: tuple[Channel, ...] = ()
    confirm: tuple[Channel, ...] = ()
    steps: tuple[Step, ...] = ()


class Wires:
    """The channels of every rank, one for each edge of each shard, and its scratch.

    Both ends get a channel at the same time, so the k-th of a type between two ranks is the k-th on both sides.
    """

    def __init__(self, servers: Sequence[str | None]) -> None:
        self.peers: list[dict[str, list[int]]] = [{MEMORY: [], PORT: []} for _ in servers]
        self.scratch = [0] * len(servers)
        self._servers = servers
        self._numbers: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._landings: dict[tuple[int, int, int], int] = {}

    def kind(self, one: int, other: int) -> str:
        """The type of channel between two ranks."""
        return MEMORY if self._servers[one] == self._servers[other] else PORT

    def add(self, shard: int, parent: int, child: int, landing: int) -> None:
        """A channel for an edge, unless it has one, and scratch of the parent for so many chunks of the child."""
        kind = self.kind(parent, child)
        if (shard, parent, child) not in self._numbers:
            ends = len(self.peers[parent][kind]), len(self.peers[child][kind])
            self._numbers[shard, parent, child] = ends
            self.peers[parent][kind].append(child)
            self.peers[child][kind].append(parent)
        if kind == PORT and landing:
            self._landings[shard, parent, child] = self.scratch[parent]
            self.scratch[parent] += landing

    def down(self, shard: int, parent: int, children: Sequence[int]) -> tuple[Channel, ...]:
        """The parent's channels to its children."""
        return tuple((self.kind(parent, child), self._numbers[shard, parent, child][0]) for child in children)

    def up(self, shard: int, child: int, parent: int) -> tuple[Channel, ...]:
        """The child's channel to its parent."""
        return ((self.kind(parent, child), self._numbers[shard, parent, child][1]),)

    def landing(self, shard: int, parent: int, child: int) -> int:
        """The first chunk of the parent's scratch where a child's sums land."""
        return self._landings[shard, parent, child]


class Tree:
    """One stage: who is above and below whom."""

    def __init__(self, stage: Stage) -> None:
        self.root = stage.root
        self.parent: dict[int, int] = {}
        self.children: dict[int, list[int]] = {}
        self.members = {stage.root, *(edge.child for edge in stage.edges)}
        for edge in stage.top_down():
            self.parent[edge.child] = edge.parent
            self.children.setdefault(edge.parent, []).append(edge.child)

    def below(self, rank: int, *, leaves: bool) -> list[int]:
        """The children that are leaves, or those that are not."""
        return [child for child in self.children.get(rank, []) if (child not in self.children) == leaves]


def tasks(
    plan: Plan,
    shards: Sequence[tuple[Shard, int, int]],
    *,
    piece: int | None = None,
    switched: bool = False,
) -> tuple[list[list[Task]], Wires]:
    """The tasks of every rank, by shard, and the channels.

    Parameters
    ----------
    plan : Plan
    shards : sequence of (Shard, int, int)
        With first chunk and number of chunks.
    piece : int or None
        Chunks that one operation moves, where loops of shards of different sizes are to be of one length.
    switched : bool
        Whether switches do what they can (`by_switch`).

    Raises
    ------
    UsageError
        The collective, or the order of the stages, is none that can be written.
    """
    wires = Wires([plan.topology.device(name).server for name in plan.ranks])
    found: list[list[Task]] = [[] for _ in plan.ranks]
    for number, (shard, start, count) in enumerate(shards):
        reduce, broadcast = shard_trees(plan, shard)
        layout = _layout(plan, shard, start, count, sum(each for _, _, each in shards), wires)
        for tree in (reduce, broadcast):
            for child, parent in tree.parent.items() if tree else ():
                wires.add(number, parent, child, count if tree is reduce else 0)
        step = piece or count
        pieces = tuple((index, step) for index in range(start, start + count, step))
        for rank, own in enumerate(found):
            part = _Part(rank, number, layout, pieces, reduce, broadcast, wires)
            own += part.switched() if switched else part.tasks()
    return found, wires


Layout = Callable[[int, int], tuple[str, int]]
"""Where a rank has a chunk of a shard: the buffer, and the number of the chunk there."""


def _layout(plan: Plan, shard: Shard, start: int, count: int, total: int, wires: Wires) -> Layout:
    """Where ranks have the chunks of a shard: in place, or of an all-to-all in input, scratch of relays and output."""
    if plan.collective != ALL_TO_ALL:
        buffer = "o" if plan.collective == "allgather" else "i"
        return lambda _, index: (buffer, index)
    source, destination = ends_of(shard)
    size = len(plan.ranks)
    each, block = total // size, total // size**2
    first = {source: ("i", start - destination * each - (source - destination) * block)}
    for edge in shard.stages[0].edges:
        if edge.child == destination:
            first[edge.child] = "o", start - destination * each
        else:
            first[edge.child] = "s", wires.scratch[edge.child]
            wires.scratch[edge.child] += count
    return lambda rank, index: (first[rank][0], first[rank][1] + index - start)


def by_switch(plan: Plan) -> bool:
    """Whether every shard is a star in one server through switches that do its work: add and copy, or copy."""
    fabric = Fabric(plan.topology, plan.channels)
    able = fabric.copying & fabric.adding if plan.collective == "allreduce" else fabric.copying
    servers = {plan.topology.device(name).server for name in plan.ranks}
    if not able or len(servers) > 1 or plan.collective not in ("allreduce", "broadcast", "allgather"):
        return False
    return all(
        stage.height == 1 and all(len(edge.route) == 3 and edge.route[1] in able for edge in stage.edges)
        for shard, _ in plan.shard_counts
        for stage in shard.stages
    )


def shard_trees(plan: Plan, shard: Shard) -> tuple[Tree | None, Tree | None]:
    """The reduce tree and the broadcast tree of a shard."""
    if plan.collective == "reduce":
        raise UsageError(
            "MSCCL++ has no reduce; it runs allreduce, broadcast, allgather, reduce_scatter and alltoall"
        )
    ops, wanted = tuple(stage.op for stage in shard.stages), stage_order(plan.collective)
    if plan.sparse or ops != wanted or len({stage.root for stage in shard.stages}) > 1:
        raise UsageError(
            f"a shard of this plan has the stages {' '.join(ops)}; a file of MSCCL++ takes {' and '.join(wanted)} with "
            "one root: export a plan of trees or rings"
        )
    trees = dict(zip(ops, map(Tree, shard.stages), strict=True))
    return trees.get("reduce"), trees.get("broadcast")


class _Part:
    """A rank's part in one shard."""

    def __init__(
        self,
        rank: int,
        shard: int,
        layout: Layout,
        pieces: tuple[tuple[int, int], ...],
        reduce: Tree | None,
        broadcast: Tree | None,
        wires: Wires,
    ) -> None:
        self._rank, self._shard, self._layout, self._pieces = rank, shard, layout, pieces
        self._reduce, self._broadcast, self._wires = reduce, broadcast, wires

    def tasks(self) -> Iterator[Task]:
        """What the rank does: upwards, downwards, and what it only has to announce and to wait for."""
        if self._reduce:
            yield from self._up(self._reduce, self._broadcast)
        if self._broadcast:
            yield from self._down(self._broadcast)

    def switched(self) -> Iterator[Task]:
        """The root has the switch do it when all are there, and tells them when it is done."""
        tree = self._broadcast
        assert tree is not None
        size = self._pieces[0][1]
        if self._rank != tree.root:
            above = self._above(tree)
            yield Task(self._shard, True, size, above, (), (), (), above)
            return
        children = self._to(tree.children[self._rank])
        name = "glres" if self._reduce else "gstore"
        body = []
        for index, count in self._pieces:
            there = Place(None, SWITCH, self._layout(self._rank, index)[0], index, count)
            body.append(Step(name, (), (there if self._reduce else self._own(index, count),), (there,)))
        yield Task(self._shard, True, size, (), children, tuple(body), children)

    def _up(self, tree: Tree, back: Tree | None) -> Iterator[Task]:
        """Add what the children have, hand it to the parent; the root hands the total down."""
        rank, size = self._rank, self._pieces[0][1]
        above = self._above(tree)
        children = tree.children.get(rank, [])
        # without a way back, parents say at the end that they have read everything
        done = () if back else self._to(children)
        over = () if back else above
        if not children and above[0][0] == MEMORY:
            yield Task(self._shard, True, size, above, (), (), (), over)
            return
        # a leaf is ready once and for all, but for what comes over a port unit by unit
        at_once = [child for child in tree.below(rank, leaves=True) if self._kind(child) == MEMORY]
        in_turn = [child for child in children if child not in at_once]
        body = [*_waits(self._to(in_turn)), *self._sums(children)]
        if rank == tree.root and back:
            body += self._hand_down(back, added=any(self._kind(child) == MEMORY for child in children))
            done = self._to(back.below(rank, leaves=True))
            over = self._to(self._far(back))
        elif above and above[0][0] == PORT:
            parent = tree.parent[rank]
            landing = self._wires.landing(self._shard, parent, rank) - self._pieces[0][0]
            for index, count in self._pieces:
                target = Place(parent, PORT, "s", landing + index, count)
                # one signal a turn: a channel keeps its order
                name = "pws" if index == self._pieces[-1][0] else "put"
                body.append(Step(name, above, (self._own(index, count),), (target,)))
        else:
            body += _signals(above)
        yield Task(self._shard, True, size, (), self._to(at_once), tuple(body), done, over)

    def _sums(self, children: Sequence[int]) -> Iterator[Step]:
        """Add the children's sums to the rank's own, those in scratch first; a sync after each operation."""
        landed = [child for child in children if self._kind(child) == PORT]
        near = [child for child in children if self._kind(child) == MEMORY]
        total = self._shared_total(near)
        for group in _groups(landed):
            for index, count in self._pieces:
                places = [self._landed(child, index, count) for child in group]
                yield Step("re", (), (self._own(index, count), *places), (self._own(index, count),))
            yield BARRIER
        groups = _groups(near)
        for number, group in enumerate(groups):
            sends = total if number == len(groups) - 1 else []
            for index, count in self._pieces:
                own = self._own(index, count)
                reads = (own, *(self._at(child, index, count) for child in group))
                writes = (own, *(self._at(child, index, count) for child in sends))
                yield Step("rres" if sends else "rre", (), reads, writes)
            yield BARRIER

    def _shared_total(self, near: Sequence[int]) -> list[int]:
        """The children to which the root writes the total as it adds: those in its server, as many as fit."""
        back = self._broadcast
        if not (near and back and self._rank == back.root):
            return []
        return [child for child in back.children[self._rank] if self._kind(child) == MEMORY][:MOST_REFERENCES]

    def _hand_down(self, tree: Tree, *, added: bool) -> Iterator[Step]:
        """Put what the rank has to its children, but for those to which the last sum was written."""
        children = tree.children[self._rank]
        near = [child for child in children if self._kind(child) == MEMORY][MOST_REFERENCES if added else 0 :]
        for index, count in self._pieces:
            for child in near:
                yield Step("put", (), (self._own(index, count),), (self._at(child, index, count),))
        if near:
            yield BARRIER
        inner = tree.below(self._rank, leaves=False)
        for index, count in self._pieces:
            for child in children:
                if self._kind(child) == PORT:
                    tells = child in inner and index == self._pieces[-1][0]
                    own, there = self._own(index, count), self._at(child, index, count)
                    yield Step("pws" if tells else "put", self._to([child]), (own,), (there,))
        yield from _signals(self._to([child for child in inner if self._kind(child) == MEMORY]))

    def _down(self, tree: Tree) -> Iterator[Task]:
        """Wait for the parent, put to the children; leaves wait once, for the last unit."""
        rank, size = self._rank, self._pieces[0][1]
        if rank not in tree.members:
            return
        if not tree.parent:
            yield Task(self._shard, False, size, body=tuple(self._kept()))
            return
        above = self._above(tree)
        # where nothing ran upwards, children say first that their buffer may be written to
        ready = () if self._reduce else above
        children = tree.children.get(rank, [])
        come = above if above and above[0][0] == PORT else ()
        if not children:
            yield Task(self._shard, False, size, ready, (), (), (), above, come)
        elif not (self._reduce and rank == tree.root):
            body = (*_waits(above), *self._hand_down(tree, added=False))
            expected = () if self._reduce else self._to(children)
            done = self._to(tree.below(rank, leaves=True))
            far = self._to(self._far(tree))
            yield Task(self._shard, False, size, ready, expected, body, done, far, come)

    def _kept(self) -> Iterator[Step]:
        """Copy the block of an all-to-all that stays with its rank."""
        for index, count in self._pieces:
            there = self._own(index, count)
            yield Step("copy", (), (there,), (Place(None, MEMORY, "o", there.index, count),))

    def _far(self, tree: Tree) -> list[int]:
        """The children on other servers."""
        return [child for child in tree.children[self._rank] if self._kind(child) == PORT]

    def _kind(self, peer: int) -> str:
        return self._wires.kind(self._rank, peer)

    def _to(self, children: Sequence[int]) -> tuple[Channel, ...]:
        return self._wires.down(self._shard, self._rank, children)

    def _above(self, tree: Tree) -> tuple[Channel, ...]:
        """The channel to the parent; none at the root."""
        parent = tree.parent.get(self._rank)
        return () if parent is None else self._wires.up(self._shard, self._rank, parent)

    def _own(self, index: int, count: int) -> Place:
        return Place(None, MEMORY, *self._layout(self._rank, index), count)

    def _at(self, peer: int, index: int, count: int) -> Place:
        return Place(peer, self._kind(peer), *self._layout(peer, index), count)

    def _landed(self, child: int, index: int, count: int) -> Place:
        landing = self._wires.landing(self._shard, self._rank, child) - self._pieces[0][0]
        return Place(None, MEMORY, "s", landing + index, count)


def _groups(ranks: Sequence[int]) -> list[Sequence[int]]:
    return [ranks[at : at + MOST_REFERENCES] for at in range(0, len(ranks), MOST_REFERENCES)]


def _waits(channels: tuple[Channel, ...]) -> tuple[Step, ...]:
    return (Step("wait", channels), BARRIER) if channels else ()


def _signals(channels: tuple[Channel, ...]) -> tuple[Step, ...]:
    return (Step("signal", channels),) if channels else ()

"""Derive the tasks of each rank for each shard in MSCCL++: steps, signals, and packets (LL) for small buffers.

Inside a server a tree edge is one memory channel for both directions. Inner ranks work unit by unit in a loop: parents
read their children's sums (``rre``), the root writes the total to its children as it adds (``rres``), ranks below
forward it (``put``). A rank that reads its parent's memory faster than the parent writes reads the total (``get``) when
the parent signals a unit, and acknowledges it at the end. Other leaves move nothing: they signal once before and are
signalled once after the loop of their parent, so the blocks of all such leaves of a rank become one. Between servers an
edge is a port channel, which cannot be read: children put sums into scratch of the parent, which adds them (``re``);
parents put the total, and children acknowledge it at the end. (``flush`` would do, but release 0.9 takes the number of
channels to flush from ``dst_buff``.) A star through a switch that adds and copies is one operation of its root
(``glres``, ``gstore``). Blocks of an all-to-all follow paths from inputs to outputs, through scratch of the relays.

Others touch a rank's buffer between its own first signal and the last that it waits for: a broadcast writes to
children that have signalled, and reads of a reduce_scatter are acknowledged at the end.

Packets carry their flags and replace signals in one server: ``ppkt`` from leaves, ``respkt`` inside the tree, ``rppkt``
forwards packets, ``upkt`` unpacks data. Each tree edge has its own place in the receiver's scratch for each
direction. Packets are twice as long as their data and have no loop over units; the engine doubles the scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from topoplan.errors import UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.routing import memory_access
from topoplan.plans.build import stage_order
from topoplan.plans.plan import ALL_TO_ALL, Plan
from topoplan.plans.shards import Shard, Stage, path_ends

MAX_REFERENCES = 8
"""Most remote buffers that one operation reads, and that it writes."""

MEMORY, PORT, SWITCH = "memory", "port", "switch"

ChannelKey = tuple[str, int]
"""Type, and number among the rank's channels of the type."""


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Chunks of a buffer of a peer over channels of a type; None is the rank itself, over a switch all ranks."""

    peer: int | None
    kind: str
    buffer: str
    index: int
    size: int


@dataclass(frozen=True, slots=True)
class MscclppStep:
    """An operation with the channels that it names, and the places that it reads and writes."""

    name: str
    channels: tuple[ChannelKey, ...] = ()
    reads: tuple[ChunkPlace, ...] = ()
    writes: tuple[ChunkPlace, ...] = ()


BARRIER = MscclppStep("nop")
"""All threads of the block arrive before any continues."""


@dataclass(frozen=True, slots=True)
class MscclppTask:
    """A rank's part in one shard, in one direction.

    Blocks take their tasks in the order of ``shard`` on every rank, so no two wait for each other, and do not mix
    directions (``upwards`` is to the root), as a unit would wait for its own return. ``chunks`` are those of which a
    turn moves a unit. ``announce`` and ``expect`` are channels to signal, and to wait for, before the loop ``body``,
    which leaves lack; ``release``, ``finish`` and ``confirm`` to signal, to wait for, and to signal then, after it.
    ``steps`` run once, in place of a loop.
    """

    shard: int
    upwards: bool
    chunks: int
    announce: tuple[ChannelKey, ...] = ()
    expect: tuple[ChannelKey, ...] = ()
    body: tuple[MscclppStep, ...] = ()
    release: tuple[ChannelKey, ...] = ()
    finish: tuple[ChannelKey, ...] = ()
    confirm: tuple[ChannelKey, ...] = ()
    steps: tuple[MscclppStep, ...] = ()


class RankChannels:
    """The channels of every rank, one for each edge of each shard, and its scratch.

    Both ends get a channel at the same time, so the k-th of a type between two ranks is the k-th on both sides.
    """

    def __init__(self, plan: Plan) -> None:
        servers = [plan.topology.device(name).server for name in plan.ranks]
        # the engine swaps the offsets of ``get``, and those of an all-to-all differ
        self._pulled = frozenset() if plan.collective == ALL_TO_ALL else memory_access(plan.topology).pulled
        self._ranks = plan.ranks
        self.peers: list[dict[str, list[int]]] = [{MEMORY: [], PORT: []} for _ in servers]
        self.scratch = [0] * len(servers)
        self._servers = servers
        self._numbers: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._landings: dict[tuple[int, int, int], int] = {}

    def kind(self, one: int, other: int) -> str:
        return MEMORY if self._servers[one] == self._servers[other] else PORT

    def pulls(self, parent: int, child: int) -> bool:
        """Return whether a child reads what a parent in its server has for it."""
        pair = self._ranks[parent], self._ranks[child]
        return self.kind(parent, child) == MEMORY and pair in self._pulled

    def add(self, shard: int, parent: int, child: int, landing: int) -> None:
        """Add a channel for an edge, unless it has one, and ``landing`` chunks of the parent's scratch."""
        kind = self.kind(parent, child)
        if (shard, parent, child) not in self._numbers:
            ends = len(self.peers[parent][kind]), len(self.peers[child][kind])
            self._numbers[shard, parent, child] = ends
            self.peers[parent][kind].append(child)
            self.peers[child][kind].append(parent)
        if kind == PORT and landing:
            self._landings[shard, parent, child] = self.scratch[parent]
            self.scratch[parent] += landing

    def down(self, shard: int, parent: int, children: Sequence[int]) -> tuple[ChannelKey, ...]:
        return tuple((self.kind(parent, child), self._numbers[shard, parent, child][0]) for child in children)

    def up(self, shard: int, child: int, parent: int) -> tuple[ChannelKey, ...]:
        """Return the child's channel to its parent."""
        return ((self.kind(parent, child), self._numbers[shard, parent, child][1]),)

    def landing(self, shard: int, parent: int, child: int) -> int:
        """Return the first chunk of the parent's scratch for a child's sums."""
        return self._landings[shard, parent, child]


class StageTree:
    """The tree of one stage: parent and children of each rank."""

    def __init__(self, stage: Stage) -> None:
        self.root = stage.root
        self.parent: dict[int, int] = {}
        self.children: dict[int, list[int]] = {}
        self.members = {stage.root, *(edge.child for edge in stage.edges)}
        for edge in stage.top_down():
            self.parent[edge.child] = edge.parent
            self.children.setdefault(edge.parent, []).append(edge.child)

    def below(self, rank: int, *, leaves: bool) -> list[int]:
        """Return the children that are leaves, or the others."""
        return [child for child in self.children.get(rank, []) if (child not in self.children) == leaves]


def tasks(
    plan: Plan, shards: Sequence[tuple[Shard, int, int]], *, piece: int | None = None, switched: bool = False
) -> tuple[list[list[MscclppTask]], RankChannels]:
    """Return the tasks of every rank, by shard, and the channels; ``shards`` have first chunk and number of chunks.

    ``piece`` is the number of chunks that one operation moves, if loops of shards of different sizes are to be of one
    length. ``switched``: switches add and copy (`by_switch`). A UsageError refuses a collective or order of stages.
    """
    wires = RankChannels(plan)
    found: list[list[MscclppTask]] = [[] for _ in plan.ranks]
    for number, (shard, start, count) in enumerate(shards):
        reduce, broadcast = shard_trees(plan, shard)
        layout = _layout(plan, shard, start, count, sum(each for _, _, each in shards), wires)
        for tree in (reduce, broadcast):
            for child, parent in tree.parent.items() if tree else ():
                wires.add(number, parent, child, count if tree is reduce else 0)
        step = piece or count
        pieces = tuple((index, step) for index in range(start, start + count, step))
        for rank, own in enumerate(found):
            part = _ShardTasks(rank, number, layout, pieces, reduce, broadcast, wires)
            own += part.switched() if switched else part.tasks()
    return found, wires


Layout = Callable[[int, int], tuple[str, int]]
"""Returns the buffer of a rank that holds a chunk of a shard, and the number of the chunk there."""


def _layout(plan: Plan, shard: Shard, start: int, count: int, total: int, wires: RankChannels) -> Layout:
    """Return the places of a shard: in place, or for an all-to-all in input, scratch of relays and output."""
    if plan.collective != ALL_TO_ALL:
        buffer = "o" if plan.collective == "allgather" else "i"
        return lambda _, index: (buffer, index)
    source, destination = path_ends(shard)
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
    """Return whether every shard is a star in one server through switches that add and copy, or copy."""
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


def shard_trees(plan: Plan, shard: Shard) -> tuple[StageTree | None, StageTree | None]:
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
    trees = dict(zip(ops, map(StageTree, shard.stages), strict=True))
    return trees.get("reduce"), trees.get("broadcast")


class _ShardTasks:
    """A rank's part in one shard."""

    def __init__(
        self,
        rank: int,
        shard: int,
        layout: Layout,
        pieces: tuple[tuple[int, int], ...],
        reduce: StageTree | None,
        broadcast: StageTree | None,
        wires: RankChannels,
    ) -> None:
        self._rank, self._shard, self._layout, self._pieces = rank, shard, layout, pieces
        self._reduce, self._broadcast, self._wires = reduce, broadcast, wires

    def tasks(self) -> Iterator[MscclppTask]:
        """Yield the rank's tasks: upwards, downwards, and those without a loop."""
        if self._reduce:
            yield from self._up(self._reduce, self._broadcast)
        if self._broadcast:
            yield from self._down(self._broadcast)

    def switched(self) -> Iterator[MscclppTask]:
        """Yield the task of a rank; the root has the switch work once all have signalled, and signals the end."""
        tree = self._broadcast
        assert tree is not None
        size = self._pieces[0][1]
        if self._rank != tree.root:
            above = self._above(tree)
            yield MscclppTask(self._shard, True, size, above, (), (), (), above)
            return
        children = self._to(tree.children[self._rank])
        name = "glres" if self._reduce else "gstore"
        body = []
        for index, count in self._pieces:
            there = ChunkPlace(None, SWITCH, self._layout(self._rank, index)[0], index, count)
            body.append(
                MscclppStep(name, (), (there if self._reduce else self._own(index, count),), (there,))
            )
        yield MscclppTask(self._shard, True, size, (), children, tuple(body), children)

    def _up(self, tree: StageTree, back: StageTree | None) -> Iterator[MscclppTask]:
        """Add the children's sums and pass them to the parent; the root passes the total down."""
        rank, size = self._rank, self._pieces[0][1]
        above = self._above(tree)
        children = tree.children.get(rank, [])
        # without a broadcast, parents signal at the end that they have read everything
        done = () if back else self._to(children)
        over = () if back else above
        if not children and above[0][0] == MEMORY:
            yield MscclppTask(self._shard, True, size, above, (), (), (), over)
            return
        # a leaf is ready once and for all, except for data over a port unit by unit
        at_once = [child for child in tree.below(rank, leaves=True) if self._kind(child) == MEMORY]
        in_turn = [child for child in children if child not in at_once]
        body = [*_wait_steps(self._to(in_turn)), *self._sums(children)]
        if rank == tree.root and back:
            body += self._hand_down(back, added=any(self._kind(child) == MEMORY for child in children))
            done = self._to(self._waiting(back))
            over = self._to(self._acknowledging(back))
        elif above and above[0][0] == PORT:
            parent = tree.parent[rank]
            landing = self._wires.landing(self._shard, parent, rank) - self._pieces[0][0]
            for index, count in self._pieces:
                target = ChunkPlace(parent, PORT, "s", landing + index, count)
                # one signal a turn: a channel keeps its order
                name = "pws" if index == self._pieces[-1][0] else "put"
                body.append(MscclppStep(name, above, (self._own(index, count),), (target,)))
        else:
            body += _signal_steps(above)
        yield MscclppTask(self._shard, True, size, (), self._to(at_once), tuple(body), done, over)

    def _sums(self, children: Sequence[int]) -> Iterator[MscclppStep]:
        """Add the children's sums to the rank's own, those in scratch first; a sync after each operation."""
        landed = [child for child in children if self._kind(child) == PORT]
        near = [child for child in children if self._kind(child) == MEMORY]
        total = self._shared_total(near)
        for group in _groups(landed):
            for index, count in self._pieces:
                places = [self._landed(child, index, count) for child in group]
                yield MscclppStep("re", (), (self._own(index, count), *places), (self._own(index, count),))
            yield BARRIER
        groups = _groups(near)
        for number, group in enumerate(groups):
            sends = total if number == len(groups) - 1 else []
            for index, count in self._pieces:
                own = self._own(index, count)
                reads = (own, *(self._at(child, index, count) for child in group))
                writes = (own, *(self._at(child, index, count) for child in sends))
                yield MscclppStep("rres" if sends else "rre", (), reads, writes)
            yield BARRIER

    def _shared_total(self, near: Sequence[int]) -> list[int]:
        """Return the children to which the root writes the total as it adds: those in its server, as many as fit."""
        back = self._broadcast
        if not (near and back and self._rank == back.root):
            return []
        return self._written(back)[:MAX_REFERENCES]

    def _hand_down(self, tree: StageTree, *, added: bool) -> Iterator[MscclppStep]:
        """Put the rank's data to its children, except to children that got the last sum or read it themselves."""
        children = tree.children[self._rank]
        near = self._written(tree)[MAX_REFERENCES if added else 0 :]
        for index, count in self._pieces:
            for child in near:
                yield MscclppStep("put", (), (self._own(index, count),), (self._at(child, index, count),))
        if near:
            yield BARRIER
        inner = tree.below(self._rank, leaves=False)
        for index, count in self._pieces:
            for child in children:
                if self._kind(child) == PORT:
                    signals = child in inner and index == self._pieces[-1][0]
                    own, there = self._own(index, count), self._at(child, index, count)
                    yield MscclppStep("pws" if signals else "put", self._to([child]), (own,), (there,))
        told = [
            child
            for child in children
            if self._pulls(child) or (child in inner and self._kind(child) == MEMORY)
        ]
        yield from _signal_steps(self._to(told))

    def _down(self, tree: StageTree) -> Iterator[MscclppTask]:
        """Wait for the parent, put to the children; leaves wait once, for the last unit."""
        rank, size = self._rank, self._pieces[0][1]
        if rank not in tree.members:
            return
        if not tree.parent:
            yield MscclppTask(self._shard, False, size, body=tuple(self._kept()))
            return
        above = self._above(tree)
        # if nothing ran upwards, children first signal that their buffer may be written to
        ready = () if self._reduce else above
        children = tree.children.get(rank, [])
        come = above if above and above[0][0] == PORT else ()
        taken = tuple(self._taken(tree))
        if not children and taken:
            body = (*_wait_steps(above), *taken)
            yield MscclppTask(self._shard, False, size, ready, (), body, above)
        elif not children:
            yield MscclppTask(self._shard, False, size, ready, (), (), (), above, come)
        elif not (self._reduce and rank == tree.root):
            body = (*_wait_steps(above), *taken, *self._hand_down(tree, added=False))
            expected = () if self._reduce else self._to(children)
            done = (*self._to(self._waiting(tree)), *(above if taken else ()))
            far = self._to(self._acknowledging(tree))
            yield MscclppTask(self._shard, False, size, ready, expected, body, done, far, come)

    def _kept(self) -> Iterator[MscclppStep]:
        """Copy the block of an all-to-all that stays with its rank."""
        for index, count in self._pieces:
            there = self._own(index, count)
            yield MscclppStep("copy", (), (there,), (ChunkPlace(None, MEMORY, "o", there.index, count),))

    def _taken(self, tree: StageTree) -> Iterator[MscclppStep]:
        """Read the data of a parent that does not put it."""
        parent = tree.parent.get(self._rank)
        if parent is None or not self._wires.pulls(parent, self._rank):
            return
        for index, count in self._pieces:
            yield MscclppStep("get", (), (self._at(parent, index, count),), (self._own(index, count),))
        yield BARRIER

    def _pulls(self, child: int) -> bool:
        return self._wires.pulls(self._rank, child)

    def _written(self, tree: StageTree) -> list[int]:
        """Return the children in this server to which the rank writes."""
        near = [child for child in tree.children[self._rank] if self._kind(child) == MEMORY]
        return [child for child in near if not self._pulls(child)]

    def _waiting(self, tree: StageTree) -> list[int]:
        """Return the leaves that wait for the end of the rank's loop."""
        return [child for child in tree.below(self._rank, leaves=True) if not self._pulls(child)]

    def _acknowledging(self, tree: StageTree) -> list[int]:
        """Return the children that signal at the end that they have the data."""
        return [
            child for child in tree.children[self._rank] if self._kind(child) == PORT or self._pulls(child)
        ]

    def _kind(self, peer: int) -> str:
        return self._wires.kind(self._rank, peer)

    def _to(self, children: Sequence[int]) -> tuple[ChannelKey, ...]:
        return self._wires.down(self._shard, self._rank, children)

    def _above(self, tree: StageTree) -> tuple[ChannelKey, ...]:
        """Return the channel to the parent; none at the root."""
        parent = tree.parent.get(self._rank)
        return () if parent is None else self._wires.up(self._shard, self._rank, parent)

    def _own(self, index: int, count: int) -> ChunkPlace:
        return ChunkPlace(None, MEMORY, *self._layout(self._rank, index), count)

    def _at(self, peer: int, index: int, count: int) -> ChunkPlace:
        return ChunkPlace(peer, self._kind(peer), *self._layout(peer, index), count)

    def _landed(self, child: int, index: int, count: int) -> ChunkPlace:
        landing = self._wires.landing(self._shard, self._rank, child) - self._pieces[0][0]
        return ChunkPlace(None, MEMORY, "s", landing + index, count)


def _groups(ranks: Sequence[int]) -> list[Sequence[int]]:
    return [ranks[at : at + MAX_REFERENCES] for at in range(0, len(ranks), MAX_REFERENCES)]


def _wait_steps(channels: tuple[ChannelKey, ...]) -> tuple[MscclppStep, ...]:
    return (MscclppStep("wait", channels), BARRIER) if channels else ()


def _signal_steps(channels: tuple[ChannelKey, ...]) -> tuple[MscclppStep, ...]:
    return (MscclppStep("signal", channels),) if channels else ()


def packet_tasks(
    plan: Plan, shards: Sequence[tuple[Shard, int, int]]
) -> tuple[list[list[MscclppTask]], RankChannels]:
    """Return tasks and channels as `tasks`, with packets; the plan must not span servers."""
    if plan.collective == ALL_TO_ALL:
        raise UsageError("packets are written for trees, and blocks of an alltoall take paths; use simple")
    wires = RankChannels(plan)
    found: list[list[MscclppTask]] = [[] for _ in plan.ranks]
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
        part = _PacketTasks("o" if plan.collective == "allgather" else "i", start, count, landings)
        for rank, own in enumerate(found):
            up = tuple(part.up(rank, reduce, broadcast)) if reduce else ()
            down = tuple(part.down(rank, broadcast, turns=reduce is not None)) if broadcast else ()
            own += [
                MscclppTask(number, upwards, count, steps=steps)
                for upwards, steps in ((True, up), (False, down))
                if steps
            ]
    return found, wires


class _PacketTasks:
    """Tasks of one shard: its buffer, its chunks, and the scratch for each sender and receiver."""

    def __init__(self, buffer: str, start: int, count: int, landings: dict[tuple[int, int], int]) -> None:
        self._own = ChunkPlace(None, MEMORY, buffer, start, count)
        self._landings, self._count = landings, count

    def up(self, rank: int, tree: StageTree, back: StageTree | None) -> Iterator[MscclppStep]:
        """Add the received packets to the rank's own data and send the sum on."""
        children = tree.children.get(rank, [])
        receivers = [tree.parent[rank]] if rank in tree.parent else []
        if back and rank == back.root:
            receivers = back.children[rank]
        while len(children) > MAX_REFERENCES:
            # a sum that stays; the last one is sent
            yield self._sum(children[:MAX_REFERENCES], rank, [])
            yield BARRIER
            children = children[MAX_REFERENCES:]
        if children:
            yield self._sum(children, rank, receivers[:MAX_REFERENCES])
            receivers = receivers[MAX_REFERENCES:]
            if receivers:
                yield BARRIER
        yield from self._send(rank, receivers)

    def down(self, rank: int, tree: StageTree, *, turns: bool) -> Iterator[MscclppStep]:
        if rank == tree.root:
            if not turns:
                yield from self._send(rank, tree.children[rank])
            return
        come = self._landed(tree.parent[rank], rank)
        children = tree.children.get(rank, [])
        for at in range(0, len(children), MAX_REFERENCES):
            there = [self._there(rank, child) for child in children[at : at + MAX_REFERENCES]]
            yield MscclppStep("rppkt", (), (come,), tuple(there))
        yield MscclppStep("upkt", (), (come,), (self._own,))

    def _sum(self, children: Sequence[int], rank: int, receivers: Sequence[int]) -> MscclppStep:
        reads = (self._own, *(self._landed(child, rank) for child in children))
        writes = (self._own, *(self._there(rank, receiver) for receiver in receivers))
        return MscclppStep("respkt" if receivers else "repkt", (), reads, writes)

    def _send(self, rank: int, receivers: Sequence[int]) -> Iterator[MscclppStep]:
        for receiver in receivers:
            yield MscclppStep("ppkt", (), (self._own,), (self._there(rank, receiver),))

    def _landed(self, sender: int, rank: int) -> ChunkPlace:
        return ChunkPlace(None, MEMORY, "s", self._landings[sender, rank], self._count)

    def _there(self, rank: int, receiver: int) -> ChunkPlace:
        return ChunkPlace(receiver, MEMORY, "s", self._landings[rank, receiver], self._count)

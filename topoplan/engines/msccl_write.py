"""Export a plan as an algorithm of MSCCL (XML), which MSCCL's NCCL runs, and RCCL up to the releases that carry MSCCL.

A thread block receives from at most one peer and sends to at most one, over one channel; a connection is one pair of
ranks in one channel. Each direction of each tree gets a channel in which no other tree has a connection of the same
ranks, so that blocks serve one tree each, and none waits behind another. A parent's blocks take its children one after
another, the last one adds and forwards at once (``rrs``, ``rrcs``). Downwards the first child is served as the total
comes (``rcs``), the others after it. Sums are in the output, or in scratch if ranks own parts of the buffer, so that
the caller's input stays, in place or not.

Sources: ``src/graph/topo.cc`` and ``src/collectives/device/msccl_interpreter.h`` of MSCCL, ``src/misc/msccl`` of RCCL.
Deliberately absent: broadcast and reduce, since the file cannot name a root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import quoteattr

from topoplan.engines.exported import DEFAULT_CHOICES, Choices, Chunking, Exported, chunk_shares, kept_rate
from topoplan.errors import UsageError
from topoplan.plans.build import stage_order
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Shard, Stage


@dataclass(frozen=True, slots=True)
class MscclRuntime:
    """Limits of a runtime: steps of a block, blocks of a GPU, channels, chunks of a step plus one.

    ``reduce_scatter`` is its name of that collective.
    """

    name: str
    steps: int
    blocks: int
    channels: int
    count: int
    reduce_scatter: str


RUNTIMES = {
    "msccl": MscclRuntime("MSCCL 0.7", 256, 216, 32, 72, "reduce_scatter"),
    "rccl": MscclRuntime("RCCL 6 (later releases have removed MSCCL)", 64, 64, 32, 72, "reducescatter"),
}
"""Runtimes by the names of ``--runtime``."""

HELD_COLLECTIVES = ("allreduce", "allgather", "reduce_scatter")
"""Collectives without a root, which the file could not name."""


@dataclass(slots=True)
class _MscclBlock:
    """A thread block: its peers, its channel, and one step for each piece of the shard."""

    receive: int
    send: int
    channel: int
    kind: str
    source: tuple[str, int]
    target: tuple[str, int]
    after: _MscclBlock | None = None
    needed: bool = False
    pieces: Sequence[tuple[int, int]] = field(default_factory=tuple)


def msccl_algorithm(plan: Plan, choices: Choices = DEFAULT_CHOICES) -> Exported:
    """Export the algorithm, with notes on its resources and the rate that it keeps.

    A UsageError says that the runtime lacks the collective, or that the plan exceeds its limits.

    >>> import topoplan
    >>> made = msccl_algorithm(topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7]))
    >>> print(made.notes[1])
    2 channels and up to 5 blocks of a GPU, in the limits of MSCCL 0.7: 32 and 216
    """
    runtime = RUNTIMES[choices.runtime or "msccl"]
    if plan.collective not in HELD_COLLECTIVES:
        raise UsageError(
            f"an algorithm of MSCCL cannot name a root, so {plan.collective} is left out; it holds "
            "allreduce, allgather and reduce_scatter"
        )
    if len(plan.ranks) < 2:
        raise UsageError("this plan has one GPU, where nothing moves; an algorithm needs two or more")
    wanted = stage_order(plan.collective)
    for shard in plan.shards:
        if (
            tuple(stage.op for stage in shard.stages) != wanted
            or len({one.root for one in shard.stages}) > 1
            or plan.sparse
        ):
            raise UsageError(
                f"an algorithm of MSCCL takes {' and '.join(wanted)} with one root for each shard"
            )
    cut = chunk_shares(plan, chunks=choices.chunks, size=choices.size)
    channels = _channels([shard for shard, _, _ in cut.shards])
    used = max(max(pair) for pair in channels) + 1
    most = choices.max_blocks or runtime.blocks
    gpus = [_MscclRank(plan, cut, rank, runtime) for rank in range(len(plan.ranks))]
    for gpu in gpus:
        for (shard, start, count), (up, down) in zip(cut.shards, channels, strict=True):
            gpu.add(shard, start, count, up, down)
    blocks = max(len(gpu.blocks) for gpu in gpus)
    steps = max(len(block.pieces) for gpu in gpus for block in gpu.blocks)
    for resource, number, limit in (
        ("channels", used, runtime.channels),
        ("blocks of a GPU", blocks, min(most, runtime.blocks)),
        ("steps of a block", steps, runtime.steps),
    ):
        if number > limit:
            raise UsageError(
                f"this plan needs {number} {resource}, more than the {limit} of {runtime.name}; plan fewer trees "
                "(--order trees), or another --runtime"
            )
    notes = (
        f"{kept_rate(plan, cut.kept)}; {cut.count} chunks, of which the buffer's elements have to be a multiple",
        f"{used} channels and up to {blocks} blocks of a GPU, in the limits of {runtime.name}: {runtime.channels} and "
        f"{runtime.blocks}",
    )
    collective = runtime.reduce_scatter if plan.collective == "reduce_scatter" else plan.collective
    name = f"{plan.schedule} {plan.collective} {plan.topology.name}".replace(" ", "_")[:63]
    head = (
        f'<algo name={quoteattr(name)} proto="Simple" nchannels="{used}" nchunksperloop="{cut.count}" '
        f'ngpus="{len(plan.ranks)}" coll="{collective}" inplace="1" outofplace="1" minBytes="0" '
        f'maxBytes="{1 << 40}">'
    )
    return Exported("\n".join([head, *(line for gpu in gpus for line in gpu.lines()), "</algo>", ""]), notes)


def _channels(shards: Sequence[Shard]) -> list[tuple[int, int]]:
    """Return the channels of each shard, upwards and downwards, in which no other direction uses its connections."""
    taken: list[set[tuple[int, int]]] = []

    def place(connections: set[tuple[int, int]]) -> int:
        number = next((at for at, used in enumerate(taken) if not used & connections), len(taken))
        if number == len(taken):
            taken.append(set())
        taken[number] |= connections
        return number

    found = []
    for shard in shards:
        ways = {"reduce": set[tuple[int, int]](), "broadcast": set[tuple[int, int]]()}
        for stage in shard.stages:
            for edge in stage.edges:
                ends = (edge.child, edge.parent) if stage.op == "reduce" else (edge.parent, edge.child)
                ways[stage.op].add(ends)
        up, down = ways["reduce"], ways["broadcast"]
        if up & down:
            found.append((place(up), place(down)))
        else:
            number = place(up | down)
            found.append((number, number))
    return found


class _MscclRank:
    """The blocks of one rank."""

    def __init__(self, plan: Plan, cut: Chunking, rank: int, runtime: MscclRuntime) -> None:
        self.blocks: list[_MscclBlock] = []
        self._rank, self._runtime, self._collective = rank, runtime, plan.collective
        part = cut.count // len(plan.ranks)
        self._inputs = part if plan.collective == "allgather" else cut.count
        self._outputs = part if plan.collective == "reduce_scatter" else cut.count
        self._part, self._scratch = part, 0

    def add(self, shard: Shard, start: int, count: int, up: int, down: int) -> None:
        """Add the blocks for a shard, whose directions have these channels."""
        most = self._runtime.count - 1
        pieces = [(at, min(most, count - at)) for at in range(0, count, most)]
        first = len(self.blocks)
        stages = {stage.op: stage for stage in shard.stages}
        back = stages.get("broadcast")
        held = ("i", start)
        if "reduce" in stages:
            self._reduce(stages["reduce"], back, start, count, up, down)
        elif back and back.root == self._rank:
            held = ("i", start - self._rank * self._part)
            self.blocks.append(_MscclBlock(-1, -1, down, "cpy", held, ("o", start)))
            self._send(_children(back, self._rank), down, held, ("o", start), None)
        if back and back.root != self._rank:
            self._receive(back, start, down)
        for block in self.blocks[first:]:
            block.pieces = pieces

    def _reduce(self, tree: Stage, back: Stage | None, start: int, count: int, up: int, down: int) -> None:
        rank = self._rank
        children = _children(tree, rank)
        parent = next((edge.parent for edge in tree.edges if edge.child == rank), -1)
        own = ("i", start)
        if not children:
            self.blocks.append(_MscclBlock(-1, parent, up, "s", own, own))
            return
        total = ("o", start)
        if self._collective == "reduce_scatter" and parent < 0:
            total = ("o", start - rank * self._part)
        elif self._collective == "reduce_scatter" and len(children) > 1:
            total = ("s", self._scratch)
            self._scratch += count
        held, before = own, None
        receivers = _children(back, rank) if back and parent < 0 else []
        for child in children[:-1]:
            before = self._after(before, _MscclBlock(child, -1, up, "rrc", held, total))
            held = total
        if parent >= 0:
            self._after(before, _MscclBlock(children[-1], parent, up, "rrs", held, held))
        elif receivers and up == down:
            last = self._after(before, _MscclBlock(children[-1], receivers[0], up, "rrcs", held, total))
            self._send(receivers[1:], down, total, total, last)
        else:
            last = self._after(before, _MscclBlock(children[-1], -1, up, "rrc", held, total))
            self._send(receivers, down, total, total, last)

    def _receive(self, tree: Stage, start: int, channel: int) -> None:
        parent = next(edge.parent for edge in tree.edges if edge.child == self._rank)
        children = _children(tree, self._rank)
        here = ("o", start)
        first = _MscclBlock(
            parent, children[0] if children else -1, channel, "rcs" if children else "r", here, here
        )
        self.blocks.append(first)
        self._send(children[1:], channel, here, here, first)

    def _send(
        self,
        receivers: Sequence[int],
        channel: int,
        source: tuple[str, int],
        target: tuple[str, int],
        after: _MscclBlock | None,
    ) -> None:
        for receiver in receivers:
            self._after(after, _MscclBlock(-1, receiver, channel, "s", source, target))

    def _after(self, before: _MscclBlock | None, block: _MscclBlock) -> _MscclBlock:
        """Add a block whose steps wait for those of another."""
        block.after = before
        if before:
            before.needed = True
        self.blocks.append(block)
        return block

    def lines(self) -> list[str]:
        found = [
            f'  <gpu id="{self._rank}" i_chunks="{self._inputs}" o_chunks="{self._outputs}" '
            f's_chunks="{self._scratch}">'
        ]
        number = {id(block): at for at, block in enumerate(self.blocks)}
        for at, block in enumerate(self.blocks):
            found.append(
                f'    <tb id="{at}" send="{block.send}" recv="{block.receive}" chan="{block.channel}">'
            )
            for step, (offset, count) in enumerate(block.pieces):
                after = number[id(block.after)] if block.after else -1
                found.append(
                    f'      <step s="{step}" type="{block.kind}" srcbuf="{block.source[0]}" '
                    f'srcoff="{block.source[1] + offset}" dstbuf="{block.target[0]}" '
                    f'dstoff="{block.target[1] + offset}" cnt="{count}" depid="{after}" '
                    f'deps="{step if block.after else -1}" hasdep="{int(block.needed)}"/>'
                )
            found.append("    </tb>")
        return [*found, "  </gpu>"]


def _children(tree: Stage, rank: int) -> list[int]:
    return sorted(edge.child for edge in tree.edges if edge.parent == rank)

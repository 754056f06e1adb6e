"""Parse an MSCCL algorithm (XML) from any source, check the limits of the runtimes, and run it in and out of place.

The attributes follow the parsers ``src/graph/topo.cc`` of MSCCL and ``src/misc/msccl/msccl_parser.cc`` of RCCL.

The interpreter of the runtime (``msccl_interpreter.h``) goes through all steps for a slice of every chunk, then for the
next slice. A connection holds few slices. For small buffers all chunks of a step are one slice; for large ones a
step goes chunk by chunk, and for larger ones chunks are divided. The largest buffer of the file decides how far, and
both ends of the range are run. Nothing is shared with `topoplan.engines.msccl_write`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from topoplan.engines.interpreter import (
    Address,
    CellRegion,
    EngineProgram,
    Fifo,
    Loop,
    Move,
    PlainInstruction,
    ProgramBlock,
    Signal,
    Sync,
    Wait,
    in_place_alias,
)
from topoplan.engines.verdict import CHECK_RUNS, EngineVerdict, check_runs, program_traffic
from topoplan.errors import PlanError, TopologyError
from topoplan.plans.plan import collective_name
from topoplan.reading.nccl.topology_elements import XmlElement, parse_xml

COLLECTIVES = ("allreduce", "allgather", "reduce_scatter", "alltoall")
REDUCE_SCATTER_NAMES = {"MSCCL": "reduce_scatter", "RCCL": "reducescatter"}
"""Names of the one collective that the runtimes spell differently."""

RCCL_NEEDS = ("minBytes", "maxBytes", "inplace", "outofplace")
"""Attributes of <algo> without which RCCL's parser refuses a file; MSCCL's has defaults for all but inplace."""

PROTOCOLS = ("Simple", "LL", "LL128")
BUFFERS = ("i", "o", "s")

SENDS, RECEIVES = ("s", "rcs", "rrs", "rrcs"), ("r", "rcs", "rrs", "rrc", "rrcs")
TYPES = ("s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re", "nop")
READS, WRITES = ("s", "rrs", "rrc", "rrcs", "cpy", "re"), ("r", "rcs", "rrc", "rrcs", "cpy", "re")
"""Types of steps that read their source, and that write their target."""

LIMITS = {"MSCCL": (256, 216, 32), "RCCL": (64, 64, 32)}
"""Steps of a block, blocks of a GPU and channels of each runtime."""

MAX_COUNT = 71
MAX_BLOCKS_PER_CHANNEL = 32
"""Most blocks of a GPU that send in one channel, and that receive."""

MAX_RANKS = 1024

DEFAULT_MAX_BYTES = 1 << 27
"""Bytes of the largest buffer if ``maxBytes`` is absent."""


@dataclass(frozen=True, slots=True)
class MscclStep:
    """A step of a block; ``after`` is the block and the step that it waits for, ``signals`` the flag ``hasdep``."""

    kind: str
    source: tuple[str, int]
    target: tuple[str, int]
    count: int
    after: tuple[int, int] | None
    signals: bool


@dataclass(frozen=True, slots=True)
class MscclThreadBlock:
    """A thread block with its peers, -1 for none, and its channel."""

    send: int
    receive: int
    channel: int
    steps: tuple[MscclStep, ...]


@dataclass(frozen=True, slots=True)
class MscclGpu:
    """A GPU: its chunks of each buffer, and its blocks."""

    chunks: dict[str, int]
    blocks: tuple[MscclThreadBlock, ...]


@dataclass(frozen=True, slots=True)
class AlgorithmFile:
    """A whole file.

    ``modes`` hold by in-place or not whether the file supports the call; ``refusals`` the reason why a runtime's parser
    refuses the file, by the name of the runtime.
    """

    collective: str
    protocol: str
    largest: int
    chunks: int
    channels: int
    modes: dict[bool, bool]
    gpus: tuple[MscclGpu, ...]
    refusals: Mapping[str, str]


def read_algorithm_file(text: str) -> AlgorithmFile:
    """Parse the text of an algorithm; a PlanError names the line of an attribute that is missing or wrong."""
    try:
        root = parse_xml(text)
    except TopologyError as error:
        raise PlanError(str(error)) from None
    if root.name != "algo":
        raise PlanError(
            f"the root element is {root.name[:40]!r}, and an algorithm of MSCCL begins with <algo>"
        )
    ranks = _number(root, "ngpus", 1, MAX_RANKS)
    gpus = sorted(root.all("gpu"), key=lambda gpu: _number(gpu, "id", 0, ranks - 1))
    if [_number(gpu, "id", 0, ranks - 1) for gpu in gpus] != list(range(ranks)):
        raise PlanError(f"ngpus is {ranks}, and the elements <gpu> are not those of GPUs 0 to {ranks - 1}")
    in_place = bool(_number(root, "inplace", 0, 1))
    spelt = _one_of(root, "coll", (*COLLECTIVES, REDUCE_SCATTER_NAMES["RCCL"]))
    least = _number(root, "minBytes", 0, 1 << 62, absent=0)
    largest = _number(root, "maxBytes", 0, 1 << 62, absent=DEFAULT_MAX_BYTES)
    if least > largest:
        raise PlanError(f"line {root.line}: minBytes {least} must not be above maxBytes {largest}")
    return AlgorithmFile(
        collective="reduce_scatter" if spelt in REDUCE_SCATTER_NAMES.values() else spelt,
        protocol=_one_of(root, "proto", PROTOCOLS),
        largest=largest,
        chunks=_number(root, "nchunksperloop", 1, 1 << 20),
        channels=_number(root, "nchannels", 1, 1 << 10),
        # MSCCL knows inplace only; RCCL reads outofplace beside it
        modes={True: in_place, False: bool(_number(root, "outofplace", 0, 1, absent=int(not in_place)))},
        gpus=tuple(_gpu(gpu, ranks) for gpu in gpus),
        refusals=_runtime_refusals(root, spelt),
    )


def _runtime_refusals(root: XmlElement, spelt: str) -> dict[str, str]:
    """Return the reasons for which one runtime's parser refuses a file that the other one takes."""
    found = {
        runtime: f"coll is {spelt}, which it spells {name}"
        for runtime, name in REDUCE_SCATTER_NAMES.items()
        if spelt in REDUCE_SCATTER_NAMES.values() and spelt != name
    }
    lacking = [name for name in RCCL_NEEDS if name not in root.attributes]
    if lacking:
        found["RCCL"] = f"<algo> has no {', '.join(lacking)}"
    return found


def _gpu(element: XmlElement, ranks: int) -> MscclGpu:
    blocks = sorted(element.all("tb"), key=lambda block: _number(block, "id", 0, 1 << 10))
    numbers = [_number(block, "id", 0, 1 << 10) for block in blocks]
    if numbers != list(range(len(blocks))):
        raise PlanError(
            f"line {element.line}: thread blocks have to be 0, 1, 2 and so on, and are {numbers[:20]}"
        )
    names = {"i": "i_chunks", "o": "o_chunks", "s": "s_chunks"}
    return MscclGpu(
        chunks={buffer: _number(element, name, 0, 1 << 20) for buffer, name in names.items()},
        blocks=tuple(
            MscclThreadBlock(
                send=_number(block, "send", -1, ranks - 1),
                receive=_number(block, "recv", -1, ranks - 1),
                channel=_number(block, "chan", 0, 1 << 10),
                steps=tuple(_step(step, place) for place, step in enumerate(block.all("step"))),
            )
            for block in blocks
        ),
    )


def _step(element: XmlElement, place: int) -> MscclStep:
    if _number(element, "s", 0, 1 << 20) != place:
        raise PlanError(f"line {element.line}: steps have to be 0, 1, 2 and so on; this is number {place}")
    block = _number(element, "depid", -1, 1 << 10)
    step = _number(element, "deps", -1, 1 << 20)
    return MscclStep(
        kind=_one_of(element, "type", TYPES),
        source=(_one_of(element, "srcbuf", BUFFERS), _number(element, "srcoff", -1, 1 << 20)),
        target=(_one_of(element, "dstbuf", BUFFERS), _number(element, "dstoff", -1, 1 << 20)),
        count=_number(element, "cnt", 0, 1 << 20),
        after=None if block < 0 else (block, step),
        signals=bool(_number(element, "hasdep", 0, 1)),
    )


def _number(element: XmlElement, name: str, least: int, most: int, *, absent: int | None = None) -> int:
    text = element.attributes.get(name, "" if absent is None else str(absent))
    if not re.fullmatch(r"-?[0-9]{1,18}", text) or not least <= int(text) <= most:
        raise PlanError(
            f"line {element.line}: {name} of <{element.name[:20]}> is {text[:40]!r}, and must be {least} to {most}"
        )
    return int(text)


def _one_of(element: XmlElement, name: str, known: tuple[str, ...]) -> str:
    text = element.attributes.get(name, "")
    if text not in known:
        raise PlanError(
            f"line {element.line}: {name} of <{element.name[:20]}> is {text[:40]!r}, and must be one of "
            f"{', '.join(known)}"
        )
    return text


def located_steps(file: AlgorithmFile) -> Iterator[tuple[int, int, MscclThreadBlock, int, MscclStep, str]]:
    """Yield every step with its GPU, its block, its number and its place in words."""
    for rank, gpu in enumerate(file.gpus):
        for number, block in enumerate(gpu.blocks):
            for place, step in enumerate(block.steps):
                where = f"gpu {rank}, block {number}, step {place} ({step.kind})"
                yield rank, number, block, place, step, where


def check_algorithm(file: AlgorithmFile) -> list[str]:
    """Return the runtimes that run the file; a PlanError names GPU, block and step that none could parse or run."""
    ranks = len(file.gpus)
    inputs, outputs = {"allgather": (ranks, 1), "reduce_scatter": (1, ranks)}.get(file.collective, (1, 1))
    for rank, gpu in enumerate(file.gpus):
        for buffer, times in (("i", inputs), ("o", outputs)):
            if gpu.chunks[buffer] and gpu.chunks[buffer] * times != file.chunks:
                raise PlanError(
                    f"gpu {rank}: {gpu.chunks[buffer]} {buffer}_chunks, times {times} for {file.collective}, are not "
                    f"the {file.chunks} of nchunksperloop"
                )
        sent = Counter((block.send, block.channel) for block in gpu.blocks if block.send >= 0)
        got = Counter((block.receive, block.channel) for block in gpu.blocks if block.receive >= 0)
        for action, counts in (("sends to", sent), ("receives from", got)):
            for (peer, channel), count in sorted(counts.items()):
                if count > 1 or peer == rank:
                    raise PlanError(
                        f"gpu {rank}: {count} blocks {action} gpu {peer} in channel {channel}; one can"
                    )
            channels = Counter(channel for _, channel in counts)
            for channel, count in sorted(channels.items()):
                if count > MAX_BLOCKS_PER_CHANNEL:
                    raise PlanError(
                        f"gpu {rank}: {count} blocks in channel {channel}; {MAX_BLOCKS_PER_CHANNEL} are the most"
                    )
        for number, block in enumerate(gpu.blocks):
            if block.channel >= file.channels:
                raise PlanError(
                    f"gpu {rank}, block {number}: channel {block.channel}, and nchannels is {file.channels}"
                )
    for rank, _, block, _, step, where in located_steps(file):
        _check_step(file, rank, block, step, where)
    steps = max((len(block.steps) for gpu in file.gpus for block in gpu.blocks), default=0)
    blocks = max(len(gpu.blocks) for gpu in file.gpus)
    fitting = [
        name
        for name, limits in LIMITS.items()
        if all(number <= limit for number, limit in zip((steps, blocks, file.channels), limits, strict=True))
    ]
    if not fitting:
        raise PlanError(
            f"{steps} steps of a block, {blocks} blocks of a GPU and {file.channels} channels exceed the limits of all "
            "runtimes: 256, 216 and 32 in MSCCL, 64, 64 and 32 in RCCL"
        )
    accepting = [name for name in fitting if name not in file.refusals]
    if not accepting:
        reasons = "; ".join(f"{name}'s parser refuses it: {reason}" for name, reason in file.refusals.items())
        raise PlanError(f"no runtime whose limits hold the file accepts it: {reasons}")
    return accepting


def _check_step(file: AlgorithmFile, rank: int, block: MscclThreadBlock, step: MscclStep, where: str) -> None:
    gpu = file.gpus[rank]
    if step.kind in SENDS and block.send < 0:
        raise PlanError(f"{where}: sends, and its block has no peer to send to")
    if step.kind in RECEIVES and block.receive < 0:
        raise PlanError(f"{where}: receives, and its block has no peer to receive from")
    if step.kind != "nop" and not 0 < step.count <= MAX_COUNT:
        raise PlanError(f"{where}: cnt must be 1 to {MAX_COUNT}, got {step.count}")
    for kinds, (buffer, offset), name in ((READS, step.source, "src"), (WRITES, step.target, "dst")):
        # in place, an absent buffer is the other one
        size = gpu.chunks[buffer] or (file.chunks if buffer != "s" else 0)
        if step.kind in kinds and not 0 <= offset <= size - step.count:
            raise PlanError(
                f"{where}: {name}off {offset} and cnt {step.count} pass the {size} chunks of {buffer!r}"
            )
    if step.after is not None:
        other, number = step.after
        if other >= len(gpu.blocks) or not 0 <= number < len(gpu.blocks[other].steps):
            raise PlanError(f"{where}: waits for step {number} of block {other}, which does not exist")
        if not any(one.signals for one in gpu.blocks[other].steps[number:]):
            raise PlanError(
                f"{where}: waits for step {number} of block {other}, which never signals: hasdep is 0"
            )


SLICES = {"Simple": (2 << 20, 2), "LL": (32 << 10, 8), "LL128": (500 << 10, 8)}
"""Bytes of a slice, and slices that a connection holds, of NCCL's protocols with their usual buffers."""


def lower_algorithm(file: AlgorithmFile) -> tuple[EngineProgram, ...]:
    """Lower an algorithm that `check_algorithm` accepts, for small and large buffers and each call that it supports."""
    piece, _ = SLICES[file.protocol]
    # chunks of a slice and slices of a chunk, of the smallest and of the largest buffer
    together = max(1, min(MAX_COUNT, piece * file.chunks // max(1, file.largest)))
    turns = 2 if file.largest > piece * file.chunks else 1
    sizes = dict.fromkeys(((MAX_COUNT, 1), (together, turns)))
    return tuple(
        _program(file, in_place, chunks, cells)
        for chunks, cells in sizes
        for in_place, supported in file.modes.items()
        if supported
    )


def _program(file: AlgorithmFile, in_place: bool, chunks: int, cells: int) -> EngineProgram:
    """Return the program with slices of ``chunks`` chunks, or chunks of ``cells`` slices, of a cell each."""
    ranks = len(file.gpus)
    part = file.chunks // ranks
    inputs = part if file.collective == "allgather" else file.chunks
    outputs = part if file.collective == "reduce_scatter" else file.chunks
    sizes: dict[Address, int] = {}
    aliases: dict[Address, tuple[str, int]] = {}
    for rank, gpu in enumerate(file.gpus):
        sizes |= {
            (rank, "i"): inputs * cells,
            (rank, "o"): outputs * cells,
            (rank, "s"): gpu.chunks["s"] * cells,
        }
        if in_place:
            aliases |= in_place_alias(file.collective, rank, sizes)
    fifos = _connections(file)
    counters: dict[int, tuple[int, str]] = {}
    signals: dict[tuple[int, int, int], list[int]] = {}
    waits: dict[tuple[int, int, int], int] = {}
    for rank, block, _, place, step, where in located_steps(file):
        if step.after is None:
            continue
        number = len(counters)
        counters[number] = (0, where)
        waits[rank, block, place] = number
        other, least = step.after
        steps = file.gpus[rank].blocks[other].steps
        source = next(at for at in range(least, len(steps)) if steps[at].signals)
        signals.setdefault((rank, other, source), []).append(number)
    bodies: dict[tuple[int, int], list[tuple[PlainInstruction, str]]] = {
        (rank, number): [] for rank, gpu in enumerate(file.gpus) for number in range(len(gpu.blocks))
    }
    for rank, number, thread_block, place, step, where in located_steps(file):
        body = bodies[rank, number]
        if (rank, number, place) in waits:
            body += [(Wait((waits[rank, number, place],)), where), (Sync(), where)]
        own = (rank, thread_block.send, thread_block.channel)
        from_peer = (thread_block.receive, rank, thread_block.channel)
        body += [
            (one, where) for one in _moves(step, rank, chunks, cells, fifos.get(own), fifos.get(from_peer))
        ]
        if (rank, number, place) in signals:
            body.append((Signal(tuple(signals[rank, number, place])), where))
    return EngineProgram(
        collective=file.collective,
        ranks=ranks,
        sizes=sizes,
        aliases=aliases,
        blocks=tuple(
            ProgramBlock(
                rank,
                ((Loop(cells, MAX_COUNT if cells == 1 else 1, tuple(body)), f"gpu {rank}, block {number}"),),
            )
            for (rank, number), body in bodies.items()
        ),
        counters=counters,
        fifos={number: (own[1], SLICES[file.protocol][1]) for own, number in fifos.items()},
    )


def _connections(file: AlgorithmFile) -> dict[tuple[int, int, int], int]:
    """Return a number for each connection that is used: sender, receiver and channel."""
    ends = {
        (block.receive, rank, block.channel)
        for rank, gpu in enumerate(file.gpus)
        for block in gpu.blocks
        if any(step.kind in RECEIVES for step in block.steps)
    }
    found: dict[tuple[int, int, int], int] = {}
    for rank, _, block, _, step, where in located_steps(file):
        if step.kind in SENDS:
            connection = (rank, block.send, block.channel)
            if connection not in ends:
                raise PlanError(
                    f"{where}: gpu {block.send} receives nothing from here in channel {block.channel}"
                )
            found.setdefault(connection, len(found))
        if step.kind in RECEIVES:
            found.setdefault((block.receive, rank, block.channel), len(found))
    return found


def _moves(
    step: MscclStep, rank: int, chunks: int, cells: int, out: int | None, come: int | None
) -> list[PlainInstruction]:
    """Return a step slice by slice, each followed by a barrier of the block's threads."""
    moves: list[PlainInstruction] = []
    for at in range(0, step.count, chunks):
        size = min(chunks, step.count - at) * cells
        source = CellRegion(rank, step.source[0], (step.source[1] + at) * cells, size)
        target = CellRegion(rank, step.target[0], (step.target[1] + at) * cells, size)
        reads: list[CellRegion | Fifo] = [source] if step.kind in READS else []
        writes: list[CellRegion | Fifo] = [target] if step.kind in WRITES else []
        if step.kind in RECEIVES and come is not None:
            reads.append(Fifo(come))
        if step.kind == "re":
            reads.append(target)
        if step.kind in SENDS and out is not None:
            writes.append(Fifo(out))
        if reads:
            moves += [Move(tuple(reads), tuple(writes)), Sync()]
    return moves


def check_msccl(file: AlgorithmFile, *, runs: int = CHECK_RUNS) -> EngineVerdict:
    """Check an algorithm of MSCCL from any source, in ``runs`` interleavings; a PlanError names GPU, block and step."""
    fitting = check_algorithm(file)
    made = lower_algorithm(file)
    if not made:
        raise PlanError("inplace and outofplace are both 0: the algorithm supports no call")
    check_runs(made, runs)
    ways = [name for mode, name in ((True, "in place"), (False, "out of place")) if file.modes[mode]]
    blocks = max(len(gpu.blocks) for gpu in file.gpus)
    return EngineVerdict(
        collective=file.collective,
        ranks=len(file.gpus),
        root=None,
        summary=f"{collective_name(file.collective)} of {len(file.gpus)} GPUs, {' and '.join(ways)}: "
        f"{file.chunks} chunks, {file.channels} channels, {blocks} blocks of a GPU at most",
        runs=runs,
        traffic=program_traffic(made[0]),
        notes=(_runtimes(file, fitting),),
    )


def _runtimes(file: AlgorithmFile, fitting: list[str]) -> str:
    text = f"in the limits of {' and '.join(fitting)}"
    if "RCCL" in fitting:
        text += "; RCCL runs such files up to the releases that carry MSCCL"
    return "; ".join(
        (text, *(f"{name}'s parser refuses the file: {reason}" for name, reason in file.refusals.items()))
    )

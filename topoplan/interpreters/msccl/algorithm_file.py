"""Reads the XML of an algorithm of MSCCL into records, and holds it to the limits of the runtimes.

The attributes are those that ``src/graph/topo.cc`` of MSCCL and ``src/misc/msccl/msccl_parser.cc`` of RCCL read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from topoplan.errors import PlanError, TopologyError
from topoplan.formats.nccl.xml_tree import Element, parse_xml

COLLECTIVES = ("allreduce", "allgather", "reduce_scatter", "alltoall")
SPELT = {"MSCCL": "reduce_scatter", "RCCL": "reducescatter"}
"""How each runtime spells the one collective that they spell differently."""

RCCL_NEEDS = ("minBytes", "maxBytes", "inplace", "outofplace")
"""Attributes of <algo> without which RCCL's reader refuses a file; MSCCL's has defaults for all but inplace."""

PROTOCOLS = ("Simple", "LL", "LL128")
BUFFERS = ("i", "o", "s")

SENDS, RECEIVES = ("s", "rcs", "rrs", "rrcs"), ("r", "rcs", "rrs", "rrc", "rrcs")
TYPES = ("s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re", "nop")
READS, WRITES = ("s", "rrs", "rrc", "rrcs", "cpy", "re"), ("r", "rcs", "rrc", "rrcs", "cpy", "re")
"""Types of steps that read their source, and that write their target."""

LIMITS = {"MSCCL": (256, 216, 32), "RCCL": (64, 64, 32)}
"""Steps of a block, blocks of a GPU and channels of each runtime."""

MOST_COUNT = 71
MOST_OF_CHANNEL = 32
"""Blocks of a GPU that send in one channel, and that receive."""

MOST_RANKS = 1024

USUAL_LARGEST = 1 << 27
"""Bytes of the largest buffer where ``maxBytes`` does not say."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a block; ``after`` is the block and the step that it waits for."""

    kind: str
    source: tuple[str, int]
    target: tuple[str, int]
    count: int
    after: tuple[int, int] | None
    told: bool


@dataclass(frozen=True, slots=True)
class ThreadBlock:
    """A thread block with its peers, -1 for none, and its channel."""

    send: int
    receive: int
    channel: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: its chunks of each buffer, and its blocks."""

    chunks: dict[str, int]
    blocks: tuple[ThreadBlock, ...]


@dataclass(frozen=True, slots=True)
class AlgorithmFile:
    """A whole file.

    ``modes`` says for each way of calling, in place or not, whether it is meant for it, and ``refusals`` why the reader
    of a runtime refuses the file, by the name of the runtime.
    """

    collective: str
    protocol: str
    largest: int
    chunks: int
    channels: int
    modes: dict[bool, bool]
    gpus: tuple[Gpu, ...]
    refusals: Mapping[str, str]


def read_algorithm_file(text: str) -> AlgorithmFile:
    """Read the text of an algorithm.

    Raises
    ------
    PlanError
        It is no XML, or an attribute is missing or of a wrong type; names the line.
    """
    try:
        root = parse_xml(text)
    except TopologyError as error:
        raise PlanError(str(error)) from None
    if root.name != "algo":
        raise PlanError(
            f"the root element is {root.name[:40]!r}, and an algorithm of MSCCL begins with <algo>"
        )
    ranks = _number(root, "ngpus", 1, MOST_RANKS)
    gpus = sorted(root.all("gpu"), key=lambda gpu: _number(gpu, "id", 0, ranks - 1))
    if [_number(gpu, "id", 0, ranks - 1) for gpu in gpus] != list(range(ranks)):
        raise PlanError(f"ngpus is {ranks}, and the elements <gpu> are not those of GPUs 0 to {ranks - 1}")
    in_place = bool(_number(root, "inplace", 0, 1))
    spelt = _one_of(root, "coll", (*COLLECTIVES, SPELT["RCCL"]))
    least = _number(root, "minBytes", 0, 1 << 62) if "minBytes" in root.attributes else 0
    largest = _number(root, "maxBytes", 0, 1 << 62) if "maxBytes" in root.attributes else USUAL_LARGEST
    if least > largest:
        raise PlanError(f"line {root.line}: minBytes {least} must not be above maxBytes {largest}")
    return AlgorithmFile(
        collective="reduce_scatter" if spelt in SPELT.values() else spelt,
        protocol=_one_of(root, "proto", PROTOCOLS),
        largest=largest,
        chunks=_number(root, "nchunksperloop", 1, 1 << 20),
        channels=_number(root, "nchannels", 1, 1 << 10),
        # MSCCL knows inplace only; RCCL reads outofplace beside it
        modes={
            True: in_place,
            False: bool(_number(root, "outofplace", 0, 1))
            if "outofplace" in root.attributes
            else not in_place,
        },
        gpus=tuple(_gpu(gpu, ranks) for gpu in gpus),
        refusals=_refusals(root, spelt),
    )


def _refusals(root: Element, spelt: str) -> dict[str, str]:
    """Why the reader of a runtime refuses what the other one takes."""
    found = {
        runtime: f"coll is {spelt}, which it spells {name}"
        for runtime, name in SPELT.items()
        if spelt in SPELT.values() and spelt != name
    }
    lacking = [name for name in RCCL_NEEDS if name not in root.attributes]
    if lacking:
        found["RCCL"] = f"<algo> has no {', '.join(lacking)}"
    return found


def _gpu(element: Element, ranks: int) -> Gpu:
    blocks = sorted(element.all("tb"), key=lambda block: _number(block, "id", 0, 1 << 10))
    numbers = [_number(block, "id", 0, 1 << 10) for block in blocks]
    if numbers != list(range(len(blocks))):
        raise PlanError(
            f"line {element.line}: thread blocks have to be 0, 1, 2 and so on, and are {numbers[:20]}"
        )
    names = {"i": "i_chunks", "o": "o_chunks", "s": "s_chunks"}
    return Gpu(
        chunks={buffer: _number(element, name, 0, 1 << 20) for buffer, name in names.items()},
        blocks=tuple(
            ThreadBlock(
                send=_number(block, "send", -1, ranks - 1),
                receive=_number(block, "recv", -1, ranks - 1),
                channel=_number(block, "chan", 0, 1 << 10),
                steps=tuple(_step(step, place) for place, step in enumerate(block.all("step"))),
            )
            for block in blocks
        ),
    )


def _step(element: Element, place: int) -> Step:
    if _number(element, "s", 0, 1 << 20) != place:
        raise PlanError(f"line {element.line}: steps have to be 0, 1, 2 and so on; this is number {place}")
    block = _number(element, "depid", -1, 1 << 10)
    step = _number(element, "deps", -1, 1 << 20)
    return Step(
        kind=_one_of(element, "type", TYPES),
        source=(_one_of(element, "srcbuf", BUFFERS), _number(element, "srcoff", -1, 1 << 20)),
        target=(_one_of(element, "dstbuf", BUFFERS), _number(element, "dstoff", -1, 1 << 20)),
        count=_number(element, "cnt", 0, 1 << 20),
        after=None if block < 0 else (block, step),
        told=bool(_number(element, "hasdep", 0, 1)),
    )


def _number(element: Element, name: str, least: int, most: int) -> int:
    text = element.attributes.get(name, "")
    if not re.fullmatch(r"-?[0-9]{1,18}", text) or not least <= int(text) <= most:
        raise PlanError(
            f"line {element.line}: {name} of <{element.name[:20]}> is {text[:40]!r}, and must be {least} to {most}"
        )
    return int(text)


def _one_of(element: Element, name: str, known: tuple[str, ...]) -> str:
    text = element.attributes.get(name, "")
    if text not in known:
        raise PlanError(
            f"line {element.line}: {name} of <{element.name[:20]}> is {text[:40]!r}, and must be one of "
            f"{', '.join(known)}"
        )
    return text


def placed(file: AlgorithmFile) -> Iterator[tuple[int, int, ThreadBlock, int, Step, str]]:
    """Every step with its GPU, its block, its number and its place in words."""
    for rank, gpu in enumerate(file.gpus):
        for number, block in enumerate(gpu.blocks):
            for place, step in enumerate(block.steps):
                where = f"gpu {rank}, block {number}, step {place} ({step.kind})"
                yield rank, number, block, place, step, where


def check_algorithm(file: AlgorithmFile) -> list[str]:
    """Refuse what no runtime could read, set up or address; the runtimes that run the file.

    Raises
    ------
    PlanError
        Names GPU, block and step.
    """
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
        for what, counts in (("sends to", sent), ("receives from", got)):
            for (peer, channel), count in sorted(counts.items()):
                if count > 1 or peer == rank:
                    raise PlanError(
                        f"gpu {rank}: {count} blocks {what} gpu {peer} in channel {channel}; one can"
                    )
            channels = Counter(channel for _, channel in counts)
            for channel, count in sorted(channels.items()):
                if count > MOST_OF_CHANNEL:
                    raise PlanError(
                        f"gpu {rank}: {count} blocks in channel {channel}; {MOST_OF_CHANNEL} are the most"
                    )
        for number, block in enumerate(gpu.blocks):
            if block.channel >= file.channels:
                raise PlanError(
                    f"gpu {rank}, block {number}: channel {block.channel}, and nchannels is {file.channels}"
                )
    for rank, _, block, _, step, where in placed(file):
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
            f"{steps} steps of a block, {blocks} blocks of a GPU and {file.channels} channels are more than any "
            "runtime has room for: 256, 216 and 32 in MSCCL, 64, 64 and 32 in RCCL"
        )
    read = [name for name in fitting if name not in file.refusals]
    if not read:
        told = "; ".join(f"{name}'s reader refuses it: {why}" for name, why in file.refusals.items())
        raise PlanError(f"no runtime that has room for it reads the file: {told}")
    return read


def _check_step(file: AlgorithmFile, rank: int, block: ThreadBlock, step: Step, where: str) -> None:
    gpu = file.gpus[rank]
    if step.kind in SENDS and block.send < 0:
        raise PlanError(f"{where}: sends, and its block has no peer to send to")
    if step.kind in RECEIVES and block.receive < 0:
        raise PlanError(f"{where}: receives, and its block has no peer to receive from")
    if step.kind != "nop" and not 0 < step.count <= MOST_COUNT:
        raise PlanError(f"{where}: cnt {step.count} is none of 1 to {MOST_COUNT}")
    for kinds, (buffer, offset), name in ((READS, step.source, "src"), (WRITES, step.target, "dst")):
        # where a buffer is not there, in place, it is the other one
        size = gpu.chunks[buffer] or (file.chunks if buffer != "s" else 0)
        if step.kind in kinds and not 0 <= offset <= size - step.count:
            raise PlanError(
                f"{where}: {name}off {offset} and cnt {step.count} pass the {size} chunks of {buffer!r}"
            )
    if step.after is not None:
        other, number = step.after
        if other >= len(gpu.blocks) or not 0 <= number < len(gpu.blocks[other].steps):
            raise PlanError(f"{where}: waits for step {number} of block {other}, which is not there")
        if not any(one.told for one in gpu.blocks[other].steps[number:]):
            raise PlanError(
                f"{where}: waits for step {number} of block {other}, which tells nobody: hasdep is 0"
            )

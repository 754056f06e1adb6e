"""Parse an execution plan of MSCCL++ (JSON) into records, and check its ranges, limits and channels.

The keys follow the parser of release 0.9 (``src/core/executor/execution_plan.cc``); further keys are accepted, as the
engine accepts them. The engine checks only the number of operations; beyond the other limits it writes past the end of
fixed arrays (``src/core/include/execution_common.hpp``, release 0.9). Channels must match on both sides. Nothing is
shared with `topoplan.engines.mscclpp_write`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from topoplan.errors import PlanError
from topoplan.plans.file_values import parse_object, read_list, read_object, read_text, read_whole

BUFFERS = ("i", "o", "s")
CHANNELS = ("memory", "port", "switch")
COLLECTIVES = ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast", "sendrecv")

MAX_RANKS = 1024
"""Largest number of GPUs of a plan that is parsed."""


@dataclass(frozen=True, slots=True)
class ChunkReference:
    """Chunks of a local buffer, of a remote one, or of a switch channel's: the one of the three that is not None."""

    buffer: str | None
    remote: int | None
    switch: int | None
    index: int
    size: int


@dataclass(frozen=True, slots=True)
class MscclppOperation:
    """An operation of a block; a ``pipeline`` has a ``body``; ``sums`` is False for another reduce_op."""

    name: str
    channel_type: str | None
    channels: tuple[int, ...]
    reads: tuple[ChunkReference, ...]
    writes: tuple[ChunkReference, ...]
    group: tuple[int, int]
    barrier: tuple[int, int]
    semaphores: tuple[int, ...]
    sums: bool
    unit: int
    chunks: int
    body: tuple[MscclppOperation, ...]


@dataclass(frozen=True, slots=True)
class MscclppThreadBlock:
    """A thread block: its channels of each type, and its remote buffers by the type over which they are reached."""

    number: int
    operations: tuple[MscclppOperation, ...]
    channels: dict[str, tuple[int, ...]]
    buffers: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class MscclppGpu:
    """A GPU: its chunks of each buffer, peers of each type of channel, switch groups, remote buffers, semaphores."""

    chunks: dict[str, int]
    blocks: tuple[MscclppThreadBlock, ...]
    peers: dict[str, tuple[int, ...]]
    groups: tuple[tuple[str, tuple[int, ...]], ...]
    remote: tuple[tuple[int, str, tuple[str, ...]], ...]
    semaphores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExecutionPlanFile:
    """A whole file."""

    name: str
    collective: str
    protocol: str
    in_place: bool
    alignment: int
    least: int
    most: int
    gpus: tuple[MscclppGpu, ...]


def read_plan_file(text: str) -> ExecutionPlanFile:
    """Parse the text of an execution plan; a PlanError names GPU, block and operation of a wrong key."""
    top = _FileObject(parse_object(text), "")
    gpus = top.objects("gpus")
    if not 0 < len(gpus) <= MAX_RANKS:
        raise PlanError(f"gpus: the number of GPUs must be 1 to {MAX_RANKS}, got {len(gpus)}")
    in_place = top.get("inplace")
    if not isinstance(in_place, bool):
        raise PlanError(f"inplace must be true or false, not {in_place!r}"[:200])
    return ExecutionPlanFile(
        name=read_text(top.get("name"), "name"),
        collective=top.choice("collective", COLLECTIVES),
        protocol=top.choice("protocol", ("Simple", "LL")),
        in_place=in_place,
        alignment=top.count("buffer_alignment", 16, least=1),
        least=top.count("min_message_size", 0),
        most=top.count("max_message_size", (1 << 64) - 1),
        gpus=tuple(_gpu(gpu.at(f"gpu {number}"), number) for number, gpu in enumerate(gpus)),
    )


@dataclass(frozen=True, slots=True)
class _FileObject:
    """An object of a file, and its place in words."""

    value: dict[str, object]
    where: str

    def at(self, where: str) -> _FileObject:
        return _FileObject(self.value, where)

    def get(self, key: str, absent: object = None) -> object:
        return self.value.get(key, absent)

    def place(self, key: str) -> str:
        return f"{self.where}: {key}" if self.where else key

    def items(self, key: str, absent: object = None) -> list[object]:
        return read_list(self.get(key, absent), self.place(key))

    def inside(self, key: str, absent: object = None) -> _FileObject:
        return _FileObject(read_object(self.get(key, absent), self.place(key)), self.place(key))

    def objects(self, key: str, absent: object = None) -> list[_FileObject]:
        place = self.place(key)
        return [_FileObject(read_object(item, place), place) for item in self.items(key, absent)]

    def count(self, key: str, absent: object = None, *, least: int = 0) -> int:
        """Return a whole number of ``least`` or more."""
        return _count(self.get(key, absent), self.place(key), least=least)

    def counts(self, key: str, absent: object = None) -> tuple[int, ...]:
        return tuple(_count(item, self.place(key)) for item in self.items(key, absent))

    def choice(self, key: str, known: tuple[str, ...]) -> str:
        return _one_of(self.get(key), known, self.place(key))


def _gpu(gpu: _FileObject, number: int) -> MscclppGpu:
    if gpu.count("id") != number:
        raise PlanError(f"{gpu.where}: its id is {gpu.get('id')}, and the engine takes it by its place")
    peers: dict[str, tuple[int, ...]] = {"memory": (), "port": ()}
    groups: list[tuple[str, tuple[int, ...]]] = []
    for channel in gpu.objects("channels"):
        kind = channel.choice("channel_type", CHANNELS)
        if kind == "switch":
            buffer = channel.choice("buffer_type", BUFFERS)
            groups += [(buffer, group.counts("ranks")) for group in channel.objects("rank_groups")]
        else:
            peers[kind] += channel.counts("connected_to")
    remote = []
    for opened in gpu.objects("remote_buffers"):
        key = "access_channel_types"
        kinds = tuple(_one_of(kind, CHANNELS[:2], opened.place(key)) for kind in opened.items(key))
        remote.append((opened.count("rank"), opened.choice("type", BUFFERS), kinds))
    names = {"i": "input_chunks", "o": "output_chunks", "s": "scratch_chunks"}
    blocks = gpu.objects("threadblocks")
    return MscclppGpu(
        chunks={buffer: gpu.count(key) for buffer, key in names.items()},
        blocks=tuple(
            _block(block.at(f"{gpu.where}, block {place}"), place) for place, block in enumerate(blocks)
        ),
        peers=peers,
        groups=tuple(groups),
        remote=tuple(remote),
        semaphores=tuple(entry.count("init_value") for entry in gpu.objects("semaphores", [])),
    )


def _block(block: _FileObject, place: int) -> MscclppThreadBlock:
    channels: dict[str, tuple[int, ...]] = dict.fromkeys(CHANNELS, ())
    buffers: dict[str, tuple[int, ...]] = dict.fromkeys(CHANNELS[:2], ())
    for channel in block.objects("channels"):
        channels[channel.choice("channel_type", CHANNELS)] += channel.counts("channel_ids")
    for refs in block.objects("remote_buffer_refs", []):
        buffers[refs.choice("access_channel_type", CHANNELS[:2])] += refs.counts("remote_buffer_ids")
    number = block.count("id")
    if number != place:
        raise PlanError(f"{block.where}: its id is {number}, and the engine numbers blocks by their place")
    operations = _operations(block, "operation")
    return MscclppThreadBlock(number=number, operations=operations, channels=channels, buffers=buffers)


def _operations(holder: _FileObject, what: str) -> tuple[MscclppOperation, ...]:
    """Return the operations of a block or of a pipeline."""
    return tuple(
        _operation(one.at(f"{holder.where}, {what} {number}"), inner=what != "operation")
        for number, one in enumerate(holder.objects("ops"))
    )


def _operation(found: _FileObject, *, inner: bool) -> MscclppOperation:
    name = read_text(found.get("name"), found.place("name"))
    found = found.at(f"{found.where} ({name[:20]})")
    group = found.inside("tbg_info", {"tb_id": 0, "tbg_size": 1})
    loop = found.inside("iter_context", {"unit_size": 0, "num_chunks": 0})
    if name == "pipeline" and inner:
        raise PlanError(f"{found.where}: a pipeline cannot stand in a pipeline")
    if name == "pipeline" and "iter_context" not in found.value:
        raise PlanError(f"{found.where}: iter_context is missing")
    untyped = found.get("channel_type") in (None, "none")
    return MscclppOperation(
        name=name,
        channel_type=None if untyped else found.choice("channel_type", CHANNELS),
        channels=found.counts("channel_ids", []),
        reads=tuple(map(_reference, found.objects("src_buff", []))),
        writes=tuple(map(_reference, found.objects("dst_buff", []))),
        group=(group.count("tb_id"), group.count("tbg_size", least=1)),
        barrier=(found.count("barrier_id", 0), found.count("num_threadblocks", 0)),
        semaphores=found.counts("semaphore_ids", []),
        sums=found.get("reduce_op", "sum") == "sum",
        unit=loop.count("unit_size"),
        chunks=loop.count("num_chunks"),
        body=_operations(found, "inner operation") if name == "pipeline" else (),
    )


def _reference(found: _FileObject) -> ChunkReference:
    kinds = [key for key in ("type", "buffer_id", "switch_channel_id") if key in found.value]
    if len(kinds) != 1:
        raise PlanError(
            f"{found.where}: a reference has one of type, buffer_id and switch_channel_id, not {kinds}"
        )
    return ChunkReference(
        buffer=found.choice("type", BUFFERS) if kinds == ["type"] else None,
        remote=found.count("buffer_id") if kinds == ["buffer_id"] else None,
        switch=found.count("switch_channel_id") if kinds == ["switch_channel_id"] else None,
        index=found.count("index"),
        size=found.count("size", least=1),
    )


def _count(item: object, where: str, *, least: int = 0) -> int:
    number = read_whole(item, where)
    if number < least:
        raise PlanError(f"{where} is {number}, and must be {least} or more")
    return number


def _one_of(item: object, known: tuple[str, ...], where: str) -> str:
    text = read_text(item, where)
    if text not in known:
        raise PlanError(f"{where} is {text[:40]!r}, and must be one of {', '.join(known)}")
    return text


MAX_OPERATIONS = 64
MAX_CHANNELS = 16
"""Channels of one type in a block, and remote buffers reached over one type."""

MAX_CHANNELS_PER_OPERATION = 8
MAX_REFERENCES = 10
"""References on either side of an operation, two local ones and eight remote ones."""

MAX_BARRIERS = 16
MAX_SEMAPHORES = 16
MAX_TURNS = 65535

SHAPES: dict[str, tuple[str, str]] = {
    "put": ("L*", "R*"),
    "pws": ("L*", "R*"),
    "pwsf": ("L*", "R*"),
    "get": ("R*", "L*"),
    "copy": ("L", "L"),
    "re": ("LL*", "L"),
    "res": ("LL*", "LR*"),
    "rre": ("LR*", "L"),
    "rres": ("LR*", "LR*"),
    "ppkt": ("L*", "R*"),
    "rppkt": ("L", "R*"),
    "cpkt": ("L", "L"),
    "upkt": ("L", "L"),
    "repkt": ("LL*", "L"),
    "respkt": ("LL*", "LR*"),
    "recpkt": ("LL*", "LL"),
    "recspkt": ("LL*", "LLR*"),
    "glres": ("S", "S"),
    "gstore": ("L", "S"),
    "gstorepkt": ("L", "S"),
}
"""References that operations read and write: L local, R remote, S on a switch channel; a star repeats the last."""

PACKETS = ("ppkt", "rppkt", "cpkt", "upkt", "repkt", "respkt", "recpkt", "recspkt", "gstorepkt")
PAIRED = ("put", "pws", "pwsf", "get", "ppkt")
"""Operations that write each item read to the item at the same place in the list."""

SYNCHRONISING = ("signal", "wait", "rlxsignal", "rlxwait", "flush")
OTHER_OPERATIONS = ("nop", "barrier", "pipeline", "sem_acquire", "sem_release")


def check_limits(plan: ExecutionPlanFile) -> None:
    """Raise a PlanError that names GPU, block and operation that the engine could not hold, set up or address."""
    _check_sizes(plan)
    for rank, gpu in enumerate(plan.gpus):
        where = f"gpu {rank}"
        named = [
            (f"a {kind} channel is connected to", peer) for kind, peers in gpu.peers.items() for peer in peers
        ]
        named += [(f"a remote buffer {buffer!r} is of", peer) for peer, buffer, _ in gpu.remote]
        for what, peer in named:
            if peer >= len(plan.gpus) or peer == rank:
                raise PlanError(f"{where}: {what} gpu {peer}, which is not another GPU")
        if len(gpu.semaphores) > MAX_SEMAPHORES:
            raise PlanError(f"{where}: {len(gpu.semaphores)} semaphores; the engine has {MAX_SEMAPHORES}")
    _check_pairs(plan)
    _check_groups(plan)
    for rank, gpu in enumerate(plan.gpus):
        for number, block in enumerate(gpu.blocks):
            _check_block(plan, gpu, block, f"gpu {rank}, block {number}")


def located_operations(
    block: MscclppThreadBlock, where: str
) -> Iterator[tuple[MscclppOperation, str, MscclppOperation | None]]:
    """Yield every operation of a block, its place in words, and its pipeline, None outside of one."""
    for number, operation in enumerate(block.operations):
        place = f"{where}, operation {number} ({operation.name})"
        yield operation, place, None
        for at, inner in enumerate(operation.body):
            yield inner, f"{place}, inner operation {at} ({inner.name})", operation


def _check_sizes(plan: ExecutionPlanFile) -> None:
    first = plan.gpus[0].chunks
    ranks = len(plan.gpus)
    inputs, outputs = {"allgather": (1, ranks), "reducescatter": (ranks, 1)}.get(plan.collective, (1, 1))
    for rank, gpu in enumerate(plan.gpus):
        if not gpu.chunks["i"] or not gpu.chunks["o"]:
            raise PlanError(f"gpu {rank}: the engine divides by input_chunks and output_chunks, and one is 0")
        if gpu.chunks["i"] * outputs != gpu.chunks["o"] * inputs:
            raise PlanError(
                f"gpu {rank}: {gpu.chunks['i']} input_chunks and {gpu.chunks['o']} output_chunks; an {plan.collective} "
                f"among {ranks} GPUs has {inputs} to {outputs}"
            )
        if gpu.chunks["i"] != first["i"]:
            raise PlanError(f"gpu {rank}: {gpu.chunks['i']} input_chunks, and gpu 0 has {first['i']}")
    if plan.collective == "alltoall" and first["i"] % ranks:
        raise PlanError(f"{first['i']} input_chunks are not a multiple of {ranks} GPUs, as alltoall needs")
    if plan.least > plan.most:
        raise PlanError(
            f"min_message_size {plan.least} is above max_message_size {plan.most}: no buffer fits"
        )
    if plan.alignment % 16:
        raise PlanError(
            f"buffer_alignment {plan.alignment}: kernels move 16 bytes at a time; make it a multiple"
        )


def _check_block(plan: ExecutionPlanFile, gpu: MscclppGpu, block: MscclppThreadBlock, where: str) -> None:
    operations = list(located_operations(block, where))
    _check_room(where, "operations", len(operations), MAX_OPERATIONS)
    for kind in CHANNELS:
        ids = block.channels[kind]
        known = len(gpu.groups) if kind == "switch" else len(gpu.peers[kind])
        _check_room(where, f"{kind} channels", len(ids), MAX_CHANNELS)
        _check_ids(ids, known, f"{where}: channel_ids of {kind} channels")
    for kind, ids in block.buffers.items():
        _check_room(where, f"remote buffers over {kind}", len(ids), MAX_CHANNELS)
        _check_ids(ids, len(gpu.remote), f"{where}: remote_buffer_ids over {kind}")
        for number in ids:
            if kind not in gpu.remote[number][2]:
                raise PlanError(f"{where}: remote buffer {number} is not opened for {kind} channels")
    for operation, place, loop in operations:
        _check_operation(plan, gpu, block, operation, place, loop)


def _check_operation(
    plan: ExecutionPlanFile,
    gpu: MscclppGpu,
    block: MscclppThreadBlock,
    operation: MscclppOperation,
    where: str,
    loop: MscclppOperation | None,
) -> None:
    name, kind = operation.name, operation.channel_type
    if name not in (*SHAPES, *SYNCHRONISING, *OTHER_OPERATIONS):
        raise PlanError(f"{where}: the engine knows no such operation")
    _check_room(where, "channels", len(operation.channels), MAX_CHANNELS_PER_OPERATION)
    if kind is not None:
        _check_ids(operation.channels, len(block.channels[kind]), f"{where}: channel_ids")
    part, parts = operation.group
    if part >= parts:
        raise PlanError(f"{where}: its tb_id is {part}, and its group has {parts} blocks")
    if not operation.sums:
        raise PlanError(f"{where}: its reduce_op is not sum, and the engine always sums")
    if name in SYNCHRONISING:
        if kind not in ("memory", "port") or (name == "flush" and kind != "port"):
            raise PlanError(f"{where}: needs channels of another channel_type than {kind}")
        if not operation.channels:
            raise PlanError(f"{where}: names no channel")
    if name == "barrier":
        number, blocks = operation.barrier
        if number >= MAX_BARRIERS:
            raise PlanError(f"{where}: barrier_id {number}; the engine has {MAX_BARRIERS}")
        if not 0 < blocks <= len(gpu.blocks):
            raise PlanError(f"{where}: waits for {blocks} blocks of {len(gpu.blocks)}")
    if name in ("sem_acquire", "sem_release"):
        if not operation.semaphores or len(operation.semaphores) > MAX_SEMAPHORES:
            raise PlanError(
                f"{where}: the number of semaphores must be 1 to {MAX_SEMAPHORES}, got "
                f"{len(operation.semaphores)}"
            )
        _check_ids(operation.semaphores, len(gpu.semaphores), f"{where}: semaphore_ids")
    if name == "pipeline":
        if not operation.unit or operation.unit % 16 or operation.unit >= 1 << 32:
            raise PlanError(
                f"{where}: unit_size must be a multiple of 16 bytes below 4 GiB, got {operation.unit}"
            )
        if not operation.chunks or not operation.body:
            raise PlanError(f"{where}: num_chunks is 0, or its ops are empty: it would do nothing")
    if name in SHAPES:
        _check_references(plan, gpu, block, operation, where)
        if name in PACKETS and plan.protocol != "LL":
            raise PlanError(f"{where}: moves packets, which need the protocol LL")
        if name in PACKETS and loop:
            raise PlanError(f"{where}: packets are not divided by a pipeline; every turn would move all")


def _check_references(
    plan: ExecutionPlanFile,
    gpu: MscclppGpu,
    block: MscclppThreadBlock,
    operation: MscclppOperation,
    where: str,
) -> None:
    name, kind = operation.name, operation.channel_type
    for side, references, shape in zip(
        ("src_buff", "dst_buff"), (operation.reads, operation.writes), SHAPES[name], strict=True
    ):
        _check_room(where, f"references in {side}", len(references), MAX_REFERENCES)
        kinds = "".join("L" if one.buffer else "R" if one.remote is not None else "S" for one in references)
        fixed = shape.removesuffix("*")
        more = kinds.removeprefix(fixed)
        fits = kinds.startswith(fixed) and (set(more) <= {fixed[-1]} if shape.endswith("*") else not more)
        if not fits:
            raise PlanError(
                f"{where}: {side} is {_describe_operation(kinds)}, and has to be {_describe_operation(shape)}"
            )
        _check_room(where, "remote references", kinds.count("R"), MAX_CHANNELS_PER_OPERATION)
        for reference in references:
            _check_reference(plan, gpu, block, operation, reference, where)
    sizes = {one.size for one in (*operation.reads, *operation.writes)}
    if name in PAIRED:
        if len(operation.reads) != len(operation.writes):
            raise PlanError(
                f"{where}: {len(operation.reads)} references in src_buff and {len(operation.writes)} in dst_buff; the "
                "engine takes them in pairs"
            )
        pairs = list(zip(operation.reads, operation.writes, strict=True))
        if any(one.size != other.size for one, other in pairs):
            raise PlanError(f"{where}: src_buff and dst_buff differ in size")
        if name == "get" and any(one.index != other.index for one, other in pairs):
            raise PlanError(f"{where}: the engine swaps the offsets of get, so they have to be equal")
    elif len(sizes) > 1:
        raise PlanError(f"{where}: its references differ in size: {sorted(sizes)}")
    if name in ("pws", "pwsf") and kind != "port":
        raise PlanError(f"{where}: over a memory channel the engine sends no signal here; use put and signal")
    if name in ("put", "pws", "pwsf", "ppkt", "rppkt") and kind == "port":
        if len(operation.channels) != len(operation.writes):
            raise PlanError(
                f"{where}: {len(operation.channels)} port channels for {len(operation.writes)} writes"
            )
        for channel, reference in zip(operation.channels, operation.writes, strict=True):
            peer = gpu.peers["port"][block.channels["port"][channel]]
            owner = gpu.remote[block.buffers["port"][reference.remote or 0]][0]
            if peer != owner:
                raise PlanError(f"{where}: puts into a buffer of gpu {owner} over a channel to gpu {peer}")
    elif "R" in "".join(SHAPES[name]) and kind != "memory":
        raise PlanError(f"{where}: reaches remote buffers over channel_type {kind}, and has to over memory")


def _check_reference(
    plan: ExecutionPlanFile,
    gpu: MscclppGpu,
    block: MscclppThreadBlock,
    operation: MscclppOperation,
    reference: ChunkReference,
    where: str,
) -> None:
    owner = gpu
    buffer = reference.buffer
    if reference.remote is not None:
        kind = operation.channel_type
        if kind not in block.buffers:
            raise PlanError(f"{where}: a remote reference needs channel_type memory or port, not {kind}")
        _check_ids((reference.remote,), len(block.buffers[kind]), f"{where}: buffer_id")
        rank, buffer, _ = gpu.remote[block.buffers[kind][reference.remote]]
        owner = plan.gpus[rank]
    elif reference.switch is not None:
        _check_ids((reference.switch,), len(block.channels["switch"]), f"{where}: switch_channel_id")
        buffer, ranks = gpu.groups[block.channels["switch"][reference.switch]]
        owner = min(
            (plan.gpus[rank] for rank in ranks if rank < len(plan.gpus)), key=lambda one: one.chunks[buffer]
        )
    assert buffer is not None
    if reference.index + reference.size > owner.chunks[buffer]:
        raise PlanError(
            f"{where}: chunks {reference.index} to {reference.index + reference.size} of a buffer {buffer!r} that has "
            f"{owner.chunks[buffer]}"
        )


def _check_pairs(plan: ExecutionPlanFile) -> None:
    """Check that both sides of a pair of GPUs have as many channels of a type: the set-up waits for missing ones."""
    for kind in ("memory", "port"):
        counts = [Counter(gpu.peers[kind]) for gpu in plan.gpus]
        for rank, own in enumerate(counts):
            for peer, count in sorted(own.items()):
                if counts[peer][rank] != count:
                    raise PlanError(
                        f"gpu {rank}: {count} {kind} channels to gpu {peer}, which has {counts[peer][rank]} back"
                    )


def _check_groups(plan: ExecutionPlanFile) -> None:
    """Check that every GPU of a switch group has the group, as often as the others."""
    counts = [Counter((buffer, tuple(sorted(ranks))) for buffer, ranks in gpu.groups) for gpu in plan.gpus]
    for rank, own in enumerate(counts):
        for (buffer, ranks), count in sorted(own.items()):
            if rank not in ranks or len(set(ranks)) < len(ranks) or ranks[-1] >= len(plan.gpus):
                raise PlanError(f"gpu {rank}: its switch group {list(ranks)} is not a set of GPUs with it")
            for peer in ranks:
                if counts[peer][buffer, ranks] != count:
                    raise PlanError(f"gpu {rank}: gpu {peer} lacks the switch group {list(ranks)} as often")


def _check_room(where: str, what: str, number: int, most: int) -> None:
    if number > most:
        raise PlanError(f"{where}: {number} {what}; the engine has room for {most}")


def _check_ids(ids: Sequence[int], known: int, where: str) -> None:
    for number in ids:
        if number >= known:
            raise PlanError(f"{where} names {number}, which must be below {known}")


def _describe_operation(kinds: str) -> str:
    names = {"L": "local", "R": "remote", "S": "switch"}
    words = [names[kind] for kind in kinds.removesuffix("*")]
    return " ".join(words) + (" …" if kinds.endswith("*") else "") or "empty"

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
    value = parse_object(text)
    gpus = read_list(value.get("gpus"), "gpus")
    if not 0 < len(gpus) <= MAX_RANKS:
        raise PlanError(f"gpus: the number of GPUs must be 1 to {MAX_RANKS}, got {len(gpus)}")
    return ExecutionPlanFile(
        name=read_text(value.get("name"), "name"),
        collective=_one_of(value.get("collective"), COLLECTIVES, "collective"),
        protocol=_one_of(value.get("protocol"), ("Simple", "LL"), "protocol"),
        in_place=_flag(value.get("inplace"), "inplace"),
        alignment=_count(value.get("buffer_alignment", 16), "buffer_alignment", least=1),
        least=_count(value.get("min_message_size", 0), "min_message_size"),
        most=_count(value.get("max_message_size", (1 << 64) - 1), "max_message_size"),
        gpus=tuple(_gpu(gpu, number) for number, gpu in enumerate(gpus)),
    )


def _gpu(item: object, number: int) -> MscclppGpu:
    where = f"gpu {number}"
    value = read_object(item, where)
    if _count(value.get("id"), f"{where}: id") != number:
        raise PlanError(f"{where}: its id is {value.get('id')}, and the engine takes it by its place")
    peers: dict[str, list[int]] = {"memory": [], "port": []}
    groups: list[tuple[str, tuple[int, ...]]] = []
    for entry in read_list(value.get("channels"), f"{where}: channels"):
        channel = read_object(entry, f"{where}: channels")
        kind = _one_of(channel.get("channel_type"), CHANNELS, f"{where}: channel_type")
        if kind == "switch":
            buffer = _one_of(channel.get("buffer_type"), BUFFERS, f"{where}: buffer_type of a switch channel")
            for part in read_list(channel.get("rank_groups"), f"{where}: rank_groups"):
                group = read_object(part, f"{where}: rank_groups")
                groups.append((buffer, _counts(group.get("ranks"), f"{where}: ranks of a switch channel")))
        else:
            peers[kind] += _counts(channel.get("connected_to"), f"{where}: connected_to")
    remote = []
    for entry in read_list(value.get("remote_buffers"), f"{where}: remote_buffers"):
        place = f"{where}: remote_buffers"
        opened = read_object(entry, place)
        kinds = read_list(opened.get("access_channel_types"), f"{place}: access_channel_types")
        remote.append(
            (
                _count(opened.get("rank"), f"{place}: rank"),
                _one_of(opened.get("type"), BUFFERS, f"{place}: type"),
                tuple(_one_of(kind, CHANNELS[:2], f"{place}: access_channel_types") for kind in kinds),
            )
        )
    semaphores = tuple(
        _count(read_object(entry, f"{where}: semaphores").get("init_value"), f"{where}: init_value")
        for entry in read_list(value.get("semaphores", []), f"{where}: semaphores")
    )
    names = {"i": "input_chunks", "o": "output_chunks", "s": "scratch_chunks"}
    chunks = {buffer: _count(value.get(key), f"{where}: {key}") for buffer, key in names.items()}
    blocks = read_list(value.get("threadblocks"), f"{where}: threadblocks")
    return MscclppGpu(
        chunks=chunks,
        blocks=tuple(_block(block, f"{where}, block {place}", place) for place, block in enumerate(blocks)),
        peers={kind: tuple(found) for kind, found in peers.items()},
        groups=tuple(groups),
        remote=tuple(remote),
        semaphores=semaphores,
    )


def _block(item: object, where: str, place: int) -> MscclppThreadBlock:
    value = read_object(item, where)
    channels: dict[str, list[int]] = {kind: [] for kind in CHANNELS}
    buffers: dict[str, list[int]] = {kind: [] for kind in CHANNELS[:2]}
    for entry in read_list(value.get("channels"), f"{where}: channels"):
        channel = read_object(entry, f"{where}: channels")
        kind = _one_of(channel.get("channel_type"), CHANNELS, f"{where}: channel_type")
        channels[kind] += _counts(channel.get("channel_ids"), f"{where}: channel_ids")
    for entry in read_list(value.get("remote_buffer_refs", []), f"{where}: remote_buffer_refs"):
        refs = read_object(entry, f"{where}: remote_buffer_refs")
        kind = _one_of(refs.get("access_channel_type"), CHANNELS[:2], f"{where}: access_channel_type")
        buffers[kind] += _counts(refs.get("remote_buffer_ids"), f"{where}: remote_buffer_ids")
    operations = read_list(value.get("ops"), f"{where}: ops")
    number = _count(value.get("id"), f"{where}: id")
    if number != place:
        raise PlanError(f"{where}: its id is {number}, and the engine numbers blocks by their place")
    return MscclppThreadBlock(
        number=number,
        operations=tuple(
            _operation(operation, f"{where}, operation {at}") for at, operation in enumerate(operations)
        ),
        channels={kind: tuple(found) for kind, found in channels.items()},
        buffers={kind: tuple(found) for kind, found in buffers.items()},
    )


def _operation(item: object, where: str, *, inner: bool = False) -> MscclppOperation:
    value = read_object(item, where)
    name = read_text(value.get("name"), f"{where}: name")
    where = f"{where} ({name[:20]})"
    kind = value.get("channel_type")
    group = read_object(value.get("tbg_info", {"tb_id": 0, "tbg_size": 1}), f"{where}: tbg_info")
    loop = read_object(value.get("iter_context", {"unit_size": 0, "num_chunks": 0}), f"{where}: iter_context")
    body: tuple[MscclppOperation, ...] = ()
    if name == "pipeline":
        if inner:
            raise PlanError(f"{where}: a pipeline cannot stand in a pipeline")
        inside = read_list(value.get("ops"), f"{where}: ops")
        body = tuple(
            _operation(one, f"{where}, inner operation {at}", inner=True) for at, one in enumerate(inside)
        )
        if "iter_context" not in value:
            raise PlanError(f"{where}: iter_context is missing")
    return MscclppOperation(
        name=name,
        channel_type=None if kind in (None, "none") else _one_of(kind, CHANNELS, f"{where}: channel_type"),
        channels=_counts(value.get("channel_ids", []), f"{where}: channel_ids"),
        reads=_references(value.get("src_buff", []), f"{where}: src_buff"),
        writes=_references(value.get("dst_buff", []), f"{where}: dst_buff"),
        group=(
            _count(group.get("tb_id"), f"{where}: tb_id"),
            _count(group.get("tbg_size"), f"{where}: tbg_size", least=1),
        ),
        barrier=(
            _count(value.get("barrier_id", 0), f"{where}: barrier_id"),
            _count(value.get("num_threadblocks", 0), f"{where}: num_threadblocks"),
        ),
        semaphores=_counts(value.get("semaphore_ids", []), f"{where}: semaphore_ids"),
        sums=value.get("reduce_op", "sum") == "sum",
        unit=_count(loop.get("unit_size"), f"{where}: unit_size"),
        chunks=_count(loop.get("num_chunks"), f"{where}: num_chunks"),
        body=body,
    )


def _references(item: object, where: str) -> tuple[ChunkReference, ...]:
    found = []
    for entry in read_list(item, where):
        value = read_object(entry, where)
        kinds = [key for key in ("type", "buffer_id", "switch_channel_id") if key in value]
        if len(kinds) != 1:
            raise PlanError(
                f"{where}: a reference has one of type, buffer_id and switch_channel_id, not {kinds}"
            )
        (kind,) = kinds
        number = None if kind == "type" else _count(value[kind], f"{where}: {kind}")
        found.append(
            ChunkReference(
                buffer=_one_of(value[kind], BUFFERS, f"{where}: type") if kind == "type" else None,
                remote=number if kind == "buffer_id" else None,
                switch=number if kind == "switch_channel_id" else None,
                index=_count(value.get("index"), f"{where}: index"),
                size=_count(value.get("size"), f"{where}: size", least=1),
            )
        )
    return tuple(found)


def _count(item: object, where: str, *, least: int = 0) -> int:
    """Return a whole number of ``least`` or more."""
    number = read_whole(item, where)
    if number < least:
        raise PlanError(f"{where} is {number}, and must be {least} or more")
    return number


def _counts(item: object, where: str) -> tuple[int, ...]:
    return tuple(_count(one, where) for one in read_list(item, where))


def _flag(item: object, where: str) -> bool:
    if not isinstance(item, bool):
        raise PlanError(f"{where} must be true or false, not {item!r}"[:200])
    return item


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

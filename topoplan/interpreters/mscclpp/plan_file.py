"""Reads the JSON of an execution plan into records, key by key, and believes nothing but the types.

The keys are those that release 0.9 of the engine reads (``src/core/executor/execution_plan.cc``); further keys are let
pass, as the engine lets them.
"""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.errors import PlanError
from topoplan.plans.json_values import parse_object, read_list, read_object, read_text, read_whole

BUFFERS = ("i", "o", "s")
CHANNELS = ("memory", "port", "switch")
COLLECTIVES = ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast", "sendrecv")

MOST_RANKS = 1024
"""Most GPUs of a plan that is read."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Chunks of a local buffer, of a remote one, or of a switch channel's, whichever of the three is not None."""

    buffer: str | None
    remote: int | None
    switch: int | None
    index: int
    size: int


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a block; those of a ``pipeline`` stand in ``body``; ``sums`` unless it says another reduce_op."""

    name: str
    channel_type: str | None
    channels: tuple[int, ...]
    reads: tuple[Reference, ...]
    writes: tuple[Reference, ...]
    group: tuple[int, int]
    barrier: tuple[int, int]
    semaphores: tuple[int, ...]
    sums: bool
    unit: int
    chunks: int
    body: tuple[Operation, ...]


@dataclass(frozen=True, slots=True)
class ThreadBlock:
    """A thread block: its channels of each type, and its remote buffers by the type over which they are reached."""

    number: int
    operations: tuple[Operation, ...]
    channels: dict[str, tuple[int, ...]]
    buffers: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: its chunks of each buffer, peers of each type of channel, switch groups, remote buffers, semaphores."""

    chunks: dict[str, int]
    blocks: tuple[ThreadBlock, ...]
    peers: dict[str, tuple[int, ...]]
    groups: tuple[tuple[str, tuple[int, ...]], ...]
    remote: tuple[tuple[int, str, tuple[str, ...]], ...]
    semaphores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A whole file."""

    name: str
    collective: str
    protocol: str
    in_place: bool
    alignment: int
    least: int
    most: int
    gpus: tuple[Gpu, ...]


def read_plan_file(text: str) -> PlanFile:
    """Read the text of an execution plan.

    Raises
    ------
    PlanError
        It is no JSON, or a key is missing or of a wrong type; names GPU, block and operation.
    """
    value = parse_object(text)
    gpus = read_list(value.get("gpus"), "gpus")
    if not 0 < len(gpus) <= MOST_RANKS:
        raise PlanError(f"gpus: {len(gpus)} GPUs are none of 1 to {MOST_RANKS}")
    return PlanFile(
        name=read_text(value.get("name"), "name"),
        collective=_one_of(value.get("collective"), COLLECTIVES, "collective"),
        protocol=_one_of(value.get("protocol"), ("Simple", "LL"), "protocol"),
        in_place=_flag(value.get("inplace"), "inplace"),
        alignment=_count(value.get("buffer_alignment", 16), "buffer_alignment", least=1),
        least=_count(value.get("min_message_size", 0), "min_message_size"),
        most=_count(value.get("max_message_size", (1 << 64) - 1), "max_message_size"),
        gpus=tuple(_gpu(gpu, number) for number, gpu in enumerate(gpus)),
    )


def _gpu(item: object, number: int) -> Gpu:
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
    return Gpu(
        chunks=chunks,
        blocks=tuple(_block(block, f"{where}, block {place}", place) for place, block in enumerate(blocks)),
        peers={kind: tuple(found) for kind, found in peers.items()},
        groups=tuple(groups),
        remote=tuple(remote),
        semaphores=semaphores,
    )


def _block(item: object, where: str, place: int) -> ThreadBlock:
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
    return ThreadBlock(
        number=number,
        operations=tuple(
            _operation(operation, f"{where}, operation {at}") for at, operation in enumerate(operations)
        ),
        channels={kind: tuple(found) for kind, found in channels.items()},
        buffers={kind: tuple(found) for kind, found in buffers.items()},
    )


def _operation(item: object, where: str, *, inner: bool = False) -> Operation:
    value = read_object(item, where)
    name = read_text(value.get("name"), f"{where}: name")
    where = f"{where} ({name[:20]})"
    kind = value.get("channel_type")
    group = read_object(value.get("tbg_info", {"tb_id": 0, "tbg_size": 1}), f"{where}: tbg_info")
    loop = read_object(value.get("iter_context", {"unit_size": 0, "num_chunks": 0}), f"{where}: iter_context")
    body: tuple[Operation, ...] = ()
    if name == "pipeline":
        if inner:
            raise PlanError(f"{where}: a pipeline cannot stand in a pipeline")
        inside = read_list(value.get("ops"), f"{where}: ops")
        body = tuple(
            _operation(one, f"{where}, inner operation {at}", inner=True) for at, one in enumerate(inside)
        )
        if "iter_context" not in value:
            raise PlanError(f"{where}: iter_context is missing")
    return Operation(
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


def _references(item: object, where: str) -> tuple[Reference, ...]:
    found = []
    for entry in read_list(item, where):
        value = read_object(entry, where)
        kinds = [key for key in ("type", "buffer_id", "switch_channel_id") if key in value]
        if len(kinds) != 1:
            raise PlanError(
                f"{where}: a reference has one of type, buffer_id and switch_channel_id, not {kinds}"
            )
        found.append(
            Reference(
                buffer=_one_of(value["type"], BUFFERS, f"{where}: type") if kinds == ["type"] else None,
                remote=_count(value["buffer_id"], f"{where}: buffer_id") if kinds == ["buffer_id"] else None,
                switch=_count(value["switch_channel_id"], f"{where}: switch_channel_id")
                if kinds == ["switch_channel_id"]
                else None,
                index=_count(value.get("index"), f"{where}: index"),
                size=_count(value.get("size"), f"{where}: size", least=1),
            )
        )
    return tuple(found)


def _count(item: object, where: str, *, least: int = 0) -> int:
    """A whole number that is not negative."""
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

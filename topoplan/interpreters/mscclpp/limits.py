"""What an execution plan has to keep to before it can run: ranges, the engine's limits, channels of both sides.

Of the limits the engine checks the number of operations only; beyond the others it writes past the end of fixed arrays
(``src/core/include/execution_common.hpp``, release 0.9).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from topoplan.errors import PlanError
from topoplan.interpreters.mscclpp.plan_file import CHANNELS, Gpu, Operation, PlanFile, Reference, ThreadBlock

MOST_OPERATIONS = 64
MOST_CHANNELS = 16
"""Channels of one type in a block, and remote buffers reached over one type."""

MOST_CHANNELS_OF_OPERATION = 8
MOST_REFERENCES = 10
"""References on either side of an operation, two local ones and eight remote ones."""

MOST_BARRIERS = 16
MOST_SEMAPHORES = 16
MOST_TURNS = 65535

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
"""What operations read and write: L local, R remote, S on a switch channel; a star: one or more of the last."""

PACKETS = ("ppkt", "rppkt", "cpkt", "upkt", "repkt", "respkt", "recpkt", "recspkt", "gstorepkt")
PAIRED = ("put", "pws", "pwsf", "get", "ppkt")
"""Each thing read goes to the thing written at the same place in the list."""

SYNCHRONISING = ("signal", "wait", "rlxsignal", "rlxwait", "flush")
OTHERS = ("nop", "barrier", "pipeline", "sem_acquire", "sem_release")


def check_limits(plan: PlanFile) -> None:
    """Refuse a plan that the engine could not hold, set up or address.

    Raises
    ------
    PlanError
        Names GPU, block and operation.
    """
    _check_sizes(plan)
    for rank, gpu in enumerate(plan.gpus):
        where = f"gpu {rank}"
        for kind, peers in gpu.peers.items():
            for peer in peers:
                if peer >= len(plan.gpus) or peer == rank:
                    raise PlanError(
                        f"{where}: a {kind} channel is connected to gpu {peer}, which is no other GPU"
                    )
        for peer, buffer, _ in gpu.remote:
            if peer >= len(plan.gpus) or peer == rank:
                raise PlanError(
                    f"{where}: a remote buffer {buffer!r} is of gpu {peer}, which is no other GPU"
                )
        if len(gpu.semaphores) > MOST_SEMAPHORES:
            raise PlanError(f"{where}: {len(gpu.semaphores)} semaphores; the engine has {MOST_SEMAPHORES}")
    _check_pairs(plan)
    _check_groups(plan)
    for rank, gpu in enumerate(plan.gpus):
        for number, block in enumerate(gpu.blocks):
            _check_block(plan, gpu, block, f"gpu {rank}, block {number}")


def placed(block: ThreadBlock, where: str) -> Iterator[tuple[Operation, str, Operation | None]]:
    """Every operation of a block, where it stands, and the pipeline that it stands in."""
    for number, operation in enumerate(block.operations):
        place = f"{where}, operation {number} ({operation.name})"
        yield operation, place, None
        for at, inner in enumerate(operation.body):
            yield inner, f"{place}, inner operation {at} ({inner.name})", operation


def _check_sizes(plan: PlanFile) -> None:
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
        raise PlanError(f"{first['i']} input_chunks are no multiple of {ranks} GPUs, as alltoall needs")
    if plan.least > plan.most:
        raise PlanError(
            f"min_message_size {plan.least} is above max_message_size {plan.most}: no buffer fits"
        )
    if plan.alignment % 16:
        raise PlanError(
            f"buffer_alignment {plan.alignment}: kernels move 16 bytes at a time; make it a multiple"
        )


def _check_block(plan: PlanFile, gpu: Gpu, block: ThreadBlock, where: str) -> None:
    operations = list(placed(block, where))
    if len(operations) > MOST_OPERATIONS:
        raise PlanError(f"{where}: {len(operations)} operations; the engine has room for {MOST_OPERATIONS}")
    for kind in CHANNELS:
        ids = block.channels[kind]
        known = len(gpu.groups) if kind == "switch" else len(gpu.peers[kind])
        if len(ids) > MOST_CHANNELS:
            raise PlanError(f"{where}: {len(ids)} {kind} channels; the engine has room for {MOST_CHANNELS}")
        _check_ids(ids, known, f"{where}: channel_ids of {kind} channels")
    for kind, ids in block.buffers.items():
        if len(ids) > MOST_CHANNELS:
            raise PlanError(
                f"{where}: {len(ids)} remote buffers over {kind}; the engine has room for {MOST_CHANNELS}"
            )
        _check_ids(ids, len(gpu.remote), f"{where}: remote_buffer_ids over {kind}")
        for number in ids:
            if kind not in gpu.remote[number][2]:
                raise PlanError(f"{where}: remote buffer {number} is not opened for {kind} channels")
    for operation, place, loop in operations:
        _check_operation(plan, gpu, block, operation, place, loop)


def _check_operation(
    plan: PlanFile, gpu: Gpu, block: ThreadBlock, operation: Operation, where: str, loop: Operation | None
) -> None:
    name, kind = operation.name, operation.channel_type
    if name not in (*SHAPES, *SYNCHRONISING, *OTHERS):
        raise PlanError(f"{where}: the engine knows no such operation")
    if len(operation.channels) > MOST_CHANNELS_OF_OPERATION:
        raise PlanError(
            f"{where}: {len(operation.channels)} channels; the engine has room for {MOST_CHANNELS_OF_OPERATION}"
        )
    if kind is not None:
        _check_ids(operation.channels, len(block.channels[kind]), f"{where}: channel_ids")
    part, parts = operation.group
    if part >= parts:
        raise PlanError(f"{where}: its tb_id is {part}, and its group has {parts} blocks")
    if not operation.sums:
        raise PlanError(f"{where}: its reduce_op is not sum, and the engine sums whatever it says")
    if name in SYNCHRONISING:
        if kind not in ("memory", "port") or (name == "flush" and kind != "port"):
            raise PlanError(f"{where}: needs channels of another channel_type than {kind}")
        if not operation.channels:
            raise PlanError(f"{where}: names no channel")
    if name == "barrier":
        number, blocks = operation.barrier
        if number >= MOST_BARRIERS:
            raise PlanError(f"{where}: barrier_id {number}; the engine has {MOST_BARRIERS}")
        if not 0 < blocks <= len(gpu.blocks):
            raise PlanError(f"{where}: waits for {blocks} blocks of {len(gpu.blocks)}")
    if name in ("sem_acquire", "sem_release"):
        if not operation.semaphores or len(operation.semaphores) > MOST_SEMAPHORES:
            raise PlanError(
                f"{where}: {len(operation.semaphores)} semaphores are none of 1 to {MOST_SEMAPHORES}"
            )
        _check_ids(operation.semaphores, len(gpu.semaphores), f"{where}: semaphore_ids")
    if name == "pipeline":
        if not operation.unit or operation.unit % 16 or operation.unit >= 1 << 32:
            raise PlanError(f"{where}: unit_size {operation.unit} is no multiple of 16 bytes below 4 GiB")
        if not operation.chunks or not operation.body:
            raise PlanError(f"{where}: num_chunks is 0, or there is nothing in it: it would do nothing")
    if name in SHAPES:
        _check_references(plan, gpu, block, operation, where)
        if name in PACKETS and plan.protocol != "LL":
            raise PlanError(f"{where}: moves packets, for which the protocol has to be LL")
        if name in PACKETS and loop:
            raise PlanError(f"{where}: packets are not divided by a pipeline; every turn would move all")


def _check_references(plan: PlanFile, gpu: Gpu, block: ThreadBlock, operation: Operation, where: str) -> None:
    name, kind = operation.name, operation.channel_type
    for side, references, shape in zip(
        ("src_buff", "dst_buff"), (operation.reads, operation.writes), SHAPES[name], strict=True
    ):
        if len(references) > MOST_REFERENCES:
            raise PlanError(
                f"{where}: {len(references)} references in {side}; the engine has room for {MOST_REFERENCES}"
            )
        kinds = "".join("L" if one.buffer else "R" if one.remote is not None else "S" for one in references)
        fixed = shape.removesuffix("*")
        more = kinds.removeprefix(fixed)
        fits = kinds.startswith(fixed) and (set(more) <= {fixed[-1]} if shape.endswith("*") else not more)
        if not fits:
            raise PlanError(f"{where}: {side} is {_in_words(kinds)}, and has to be {_in_words(shape)}")
        if kinds.count("R") > MOST_CHANNELS_OF_OPERATION:
            raise PlanError(
                f"{where}: {kinds.count('R')} remote references; the engine has room for {MOST_CHANNELS_OF_OPERATION}"
            )
        for reference in references:
            _check_reference(plan, gpu, block, operation, reference, where)
    sizes = {one.size for one in (*operation.reads, *operation.writes)}
    if name in PAIRED:
        if len(operation.reads) != len(operation.writes):
            raise PlanError(
                f"{where}: {len(operation.reads)} references in src_buff and {len(operation.writes)} in dst_buff; the "
                "engine takes them in pairs"
            )
        pairs = zip(operation.reads, operation.writes, strict=True)
        if any(one.size != other.size for one, other in pairs):
            raise PlanError(f"{where}: src_buff and dst_buff differ in size")
        if name == "get" and any(
            one.index != other.index for one, other in zip(operation.reads, operation.writes, strict=True)
        ):
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
    plan: PlanFile, gpu: Gpu, block: ThreadBlock, operation: Operation, reference: Reference, where: str
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


def _check_pairs(plan: PlanFile) -> None:
    """As many channels of a type on one side of a pair of GPUs as on the other: the set-up waits for the rest."""
    for kind in ("memory", "port"):
        counts = [Counter(gpu.peers[kind]) for gpu in plan.gpus]
        for rank, own in enumerate(counts):
            for peer, count in sorted(own.items()):
                if counts[peer][rank] != count:
                    raise PlanError(
                        f"gpu {rank}: {count} {kind} channels to gpu {peer}, which has {counts[peer][rank]} back"
                    )


def _check_groups(plan: PlanFile) -> None:
    """Every GPU of a switch group has the group, as often as the others."""
    counts = [Counter((buffer, tuple(sorted(ranks))) for buffer, ranks in gpu.groups) for gpu in plan.gpus]
    for rank, own in enumerate(counts):
        for (buffer, ranks), count in sorted(own.items()):
            if rank not in ranks or len(set(ranks)) < len(ranks) or ranks[-1] >= len(plan.gpus):
                raise PlanError(f"gpu {rank}: its switch group {list(ranks)} is no set of GPUs with it")
            for peer in ranks:
                if counts[peer][buffer, ranks] != count:
                    raise PlanError(f"gpu {rank}: gpu {peer} has not the switch group {list(ranks)} as often")


def _check_ids(ids: Sequence[int], known: int, where: str) -> None:
    for number in ids:
        if number >= known:
            raise PlanError(f"{where} names {number}, and there are {known}")


def _in_words(kinds: str) -> str:
    names = {"L": "local", "R": "remote", "S": "switch"}
    words = [names[kind] for kind in kinds.removesuffix("*")]
    return " ".join(words) + (" …" if kinds.endswith("*") else "") or "empty"

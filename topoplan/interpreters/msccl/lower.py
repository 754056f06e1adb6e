"""An algorithm of MSCCL as a program for the machine: steps move chunks between buffers and connections.

The interpreter of the runtime (``msccl_interpreter.h``) goes through all steps for a slice of every chunk, then for
the next slice. A connection has room for few slices. Of small buffers all chunks of a step are one slice; of large ones
a step goes chunk by chunk, and of still larger ones chunks are divided: the largest buffer that the file is for decides
how far, and both ends of the range are run.
"""

from __future__ import annotations

from topoplan.errors import PlanError
from topoplan.interpreters.msccl.algorithm_file import (
    MOST_COUNT,
    READS,
    RECEIVES,
    SENDS,
    WRITES,
    AlgorithmFile,
    Step,
    placed,
)
from topoplan.interpreters.program import (
    Address,
    Block,
    Fifo,
    Loop,
    Move,
    Plain,
    Program,
    Region,
    Signal,
    Sync,
    Wait,
)

SLICES = {"Simple": (2 << 20, 2), "LL": (32 << 10, 8), "LL128": (500 << 10, 8)}
"""Bytes of a slice, and slices that a connection holds, of NCCL's protocols with their usual buffers."""


def programs(file: AlgorithmFile) -> tuple[Program, ...]:
    """An algorithm that `check_algorithm` let pass, for small and large buffers, for each call that it is meant for.

    Raises
    ------
    PlanError
        Nobody is at the other end of a connection.
    """
    piece, _ = SLICES[file.protocol]
    # chunks of a slice and slices of a chunk, of the smallest and of the largest buffer
    together = max(1, min(MOST_COUNT, piece * file.chunks // max(1, file.largest)))
    turns = 2 if file.largest > piece * file.chunks else 1
    sizes = dict.fromkeys(((MOST_COUNT, 1), (together, turns)))
    return tuple(
        _program(file, in_place, chunks, cells)
        for chunks, cells in sizes
        for in_place, meant in file.modes.items()
        if meant
    )


def _program(file: AlgorithmFile, in_place: bool, chunks: int, cells: int) -> Program:
    """The program in which a slice is so many chunks, or a chunk so many slices, of a cell each."""
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
        if in_place and file.collective == "allgather":
            aliases[rank, "i"] = ("o", rank * part * cells)
        elif in_place:
            aliases[rank, "o"] = ("i", rank * part * cells if file.collective == "reduce_scatter" else 0)
    fifos = _connections(file)
    counters: dict[int, tuple[int, str]] = {}
    told: dict[tuple[int, int, int], list[int]] = {}
    waits: dict[tuple[int, int, int], int] = {}
    for rank, block, place, step, where in _waiting(file):
        number = len(counters)
        counters[number] = (0, where)
        waits[rank, block, place] = number
        assert step.after is not None
        other, least = step.after
        steps = file.gpus[rank].blocks[other].steps
        teller = next(at for at in range(least, len(steps)) if steps[at].told)
        told.setdefault((rank, other, teller), []).append(number)
    bodies: dict[tuple[int, int], list[tuple[Plain, str]]] = {
        (rank, number): [] for rank, gpu in enumerate(file.gpus) for number in range(len(gpu.blocks))
    }
    for rank, number, thread_block, place, step, where in placed(file):
        body = bodies[rank, number]
        if (rank, number, place) in waits:
            body += [(Wait((waits[rank, number, place],)), where), (Sync(), where)]
        own = (rank, thread_block.send, thread_block.channel)
        from_peer = (thread_block.receive, rank, thread_block.channel)
        body += [
            (one, where) for one in _moves(step, rank, chunks, cells, fifos.get(own), fifos.get(from_peer))
        ]
        if (rank, number, place) in told:
            body.append((Signal(tuple(told[rank, number, place])), where))
    return Program(
        collective=file.collective,
        ranks=ranks,
        sizes=sizes,
        aliases=aliases,
        blocks=tuple(
            Block(
                rank,
                ((Loop(cells, MOST_COUNT if cells == 1 else 1, tuple(body)), f"gpu {rank}, block {number}"),),
            )
            for (rank, number), body in bodies.items()
        ),
        counters=counters,
        fifos={number: (own[1], SLICES[file.protocol][1]) for own, number in fifos.items()},
    )


def _waiting(file: AlgorithmFile) -> list[tuple[int, int, int, Step, str]]:
    return [
        (rank, number, place, step, where)
        for rank, number, _, place, step, where in placed(file)
        if step.after is not None
    ]


def _connections(file: AlgorithmFile) -> dict[tuple[int, int, int], int]:
    """A number for each connection that is sent over: sender, receiver and channel."""
    ends = {
        (block.receive, rank, block.channel)
        for rank, gpu in enumerate(file.gpus)
        for block in gpu.blocks
        if any(step.kind in RECEIVES for step in block.steps)
    }
    found: dict[tuple[int, int, int], int] = {}
    for rank, _, block, _, step, where in placed(file):
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


def _moves(step: Step, rank: int, chunks: int, cells: int, out: int | None, come: int | None) -> list[Plain]:
    """A step slice by slice, each followed by all threads of the block."""
    moves: list[Plain] = []
    for at in range(0, step.count, chunks):
        size = min(chunks, step.count - at) * cells
        source = Region(rank, step.source[0], (step.source[1] + at) * cells, size)
        target = Region(rank, step.target[0], (step.target[1] + at) * cells, size)
        reads: list[Region | Fifo] = [source] if step.kind in READS else []
        writes: list[Region | Fifo] = [target] if step.kind in WRITES else []
        if step.kind in RECEIVES and come is not None:
            reads.append(Fifo(come))
        if step.kind == "re":
            reads.append(target)
        if step.kind in SENDS and out is not None:
            writes.append(Fifo(out))
        if reads:
            moves += [Move(tuple(reads), tuple(writes)), Sync()]
    return moves

"""Whether a program does what its collective promises, in several runs with orders and numbers of their own."""

from __future__ import annotations

import numpy as np

from topoplan.errors import PlanError
from topoplan.interpreters.machine import Machine, Memory, Numbers
from topoplan.interpreters.program import Program, Region

RUNS = 20
"""Runs unless asked."""


def check_runs(programs: tuple[Program, ...], runs: int = RUNS) -> int | None:
    """Run programs in turn, each run with a seed of its own.

    Parameters
    ----------
    programs : tuple of Program
        The same plan for buffers of different sizes.
    runs : int
        How many runs in all, with seeds from 0.

    Returns
    -------
    int or None
        The root of a broadcast.

    Raises
    ------
    PlanError
        Of the first run that goes wrong: what went wrong where, or which rank ends with what.
    """
    root: int | None = None
    for seed in range(runs):
        program = programs[seed % len(programs)]
        root = _check_outputs(program, Machine(program, seed).run())
    return root


def _check_outputs(program: Program, memory: Memory) -> int | None:
    """Compare every output with what the collective promises; the root of a broadcast."""
    outputs = [memory.view(Region(rank, "o", 0, program.sizes[rank, "o"])) for rank in range(program.ranks)]
    for rank, (_, states) in enumerate(outputs):
        if not states.all():
            raise PlanError(f"gpu {rank} ends without {_cells(states == 0)} of its output: nobody writes it")
    inputs = memory.inputs
    root: int | None = None
    if program.collective == "broadcast":
        held = outputs[0][0]
        matching = [
            rank for rank, own in enumerate(inputs) if own.shape == held.shape and (own == held).all()
        ]
        root = matching[0] if matching else 0
    for rank, (values, _) in enumerate(outputs):
        wanted = _wanted(program, rank, inputs, root)
        if wanted.shape != values.shape:
            raise PlanError(
                f"gpu {rank} has an output of {values.size} cells, and {program.collective} of these inputs gives "
                f"{wanted.size}"
            )
        wrong = np.flatnonzero(values != wanted)
        if wrong.size:
            raise PlanError(
                f"gpu {rank} ends with wrong numbers in {_cells(values != wanted)} of its output"
                f"{_reason(program, rank, int(wrong[0]), values, wanted, inputs)}"
            )
    return root


def _wanted(program: Program, rank: int, inputs: list[Numbers], root: int | None) -> Numbers:
    """What the output of a rank has to be."""
    ranks = program.ranks
    match program.collective:
        case "allreduce":
            return _sum(inputs)
        case "reduce_scatter":
            total = _sum(inputs)
            part = total.size // ranks
            return total[rank * part : (rank + 1) * part]
        case "allgather":
            return np.concatenate(inputs)
        case "alltoall":
            part = inputs[rank].size // ranks
            return np.concatenate([one[rank * part : (rank + 1) * part] for one in inputs])
        case "broadcast":
            return inputs[root or 0]
    # what a rank sends goes to the next
    return inputs[(rank - 1) % ranks]


def _sum(inputs: list[Numbers]) -> Numbers:
    total = inputs[0].copy()
    for one in inputs[1:]:
        total += one
    return total


def _cells(wrong: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> str:
    count, size = int(wrong.sum()), wrong.size
    return (
        "all" if count == size else f"{count / size:.0%}, from {int(np.flatnonzero(wrong)[0]) / size:.1%} on,"
    )


def _reason(
    program: Program, rank: int, cell: int, values: Numbers, wanted: Numbers, inputs: list[Numbers]
) -> str:
    """Of a wrong sum, which rank's number is missing or in it twice, where it is only that."""
    if program.collective not in ("allreduce", "reduce_scatter"):
        return ""
    place = cell + (rank * values.size if program.collective == "reduce_scatter" else 0)
    more = (int(values[cell]) - int(wanted[cell])) % (1 << 64)
    for source, own in enumerate(inputs):
        if more == int(own[place]):
            return f": there the contribution of gpu {source} is in the sum twice"
        if (more + int(own[place])) % (1 << 64) == 0:
            return f": there the contribution of gpu {source} is missing"
    return ""

"""Collectives of the windows engine on the machine: all ranks at once, in a weak memory, and what must come out.

What loopback gives is right: its order of additions is the plan's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

import topoplan
from collectives import Communicator, lower
from tests.ptx.machine import KernelFault, Outcome, run_ranks
from tests.ptx.text import Program
from tests.support.kernel_data import averaged, bits_type, joined, same_bits, special
from tests.support.ranks_on_machine import Ranks
from topoplan.plans.plan import Plan

Array = np.ndarray[Any, Any]

REDUCES = ("allreduce", "reduce", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Case:
    """Some collectives one after another, on an engine of its own.

    Parameters
    ----------
    machine : str
        Of the library; or a plan of `hand`.
    collective : str
    gpus : tuple of int
        Empty for all.
    counts : tuple of int
        Elements that each rank gives, or gets in reduce_scatter, for each call.
    op, dtype : str
    chunk : int
        Elements.
    small : bool
        Everything to everybody.
    in_place : bool
    blocks, threads : int
    """

    machine: str
    collective: str = "allreduce"
    gpus: tuple[int, ...] = ()
    counts: tuple[int, ...] = (100,)
    op: str = "sum"
    dtype: str = "float32"
    chunk: int = 16
    small: bool = False
    in_place: bool = False
    blocks: int = 2
    threads: int = 32


@cache
def plan_of(machine: str, collective: str, gpus: tuple[int, ...]) -> Plan:
    return topoplan.plan(topoplan.load(machine), collective, gpus=list(gpus) or None)


@dataclass(slots=True)
class Prepared:
    """A case that is ready to run: ranks, and for each call what they get and should get."""

    case: Case
    plan: Plan
    ranks: Ranks
    got: list[list[Array]] = field(default_factory=list)
    wanted: list[list[Array]] = field(default_factory=list)

    def wrong(self) -> str | None:
        """What is wrong with the results."""
        for call, (got, wanted) in enumerate(zip(self.got, self.wanted, strict=True)):
            for rank, (one, other) in enumerate(zip(got, wanted, strict=True)):
                if not same_bits(one, other, self.case.dtype):
                    places = np.flatnonzero(one != other)
                    return f"call {call}, rank {rank}: elements {places[:4]} of {one.size} differ"
        return None


def prepared(case: Case, seed: int = 0, timeout: float = 1e-2) -> Prepared:
    """Queue the calls of a case."""
    plan = plan_of(case.machine, case.collective, case.gpus)
    size = len(plan.ranks)
    small = 16384 if case.small else 0
    settings = {"blocks": case.blocks, "slot_bytes": 512, "small_bytes": small}
    made = Prepared(case, plan, Ranks(size, threads=case.threads, timeout=timeout, **settings))
    generator = np.random.default_rng(seed)
    for count in case.counts:
        length = count * size if case.collective == "reduce_scatter" else count
        inputs = [special(case.dtype, length, generator) for _ in range(size)]
        made.wanted.append(expected(plan, case, inputs))
        copies = [array.copy() for array in inputs]
        made.got.append(
            made.ranks.queue(
                plan, copies, op=case.op, dtype=case.dtype, chunk=case.chunk, in_place=case.in_place
            )
        )
    return made


def expected(plan: Plan, case: Case, inputs: Sequence[Array]) -> list[Array]:
    """What loopback gives, or of bfloat16 the rows of the table one by one; an empty array for who gets nothing."""
    if case.dtype == "bfloat16":
        return row_by_row(plan, case.op, inputs)
    with Communicator(plan, "loopback") as comm:
        if case.collective == "allreduce":
            given = comm.all_reduce(list(inputs), op=case.op)
        elif case.collective == "reduce":
            given = comm.reduce(list(inputs), root=plan.root, op=case.op)
        elif case.collective == "reduce_scatter":
            given = comm.reduce_scatter(list(inputs), op=case.op)
        elif case.collective == "broadcast":
            given = comm.broadcast(list(inputs), root=plan.root)
        else:
            given = comm.all_gather(list(inputs))
    nothing = np.zeros(0, dtype=bits_type(case.dtype))
    return [nothing if one is None else np.asarray(one).reshape(-1) for one in given]


def row_by_row(plan: Plan, op: str, inputs: Sequence[Array]) -> list[Array]:
    """An allreduce of bfloat16, which numpy does not have."""
    held = [array.copy() for array in inputs]
    table = lower(plan, inputs[0].size, chunk_elements=inputs[0].size)
    columns = (table.source, table.destination, table.start, table.stop, table.add)
    for source, target, start, stop, add in zip(*(column.tolist() for column in columns), strict=True):
        part = held[source][start:stop]
        held[target][start:stop] = joined("bfloat16", op, held[target][start:stop], [part]) if add else part
    return [averaged("bfloat16", array, len(held)) for array in held] if op == "avg" else held


def outcome(case: Case, seed: int, kernel: Program | None = None) -> str | None:
    """What is wrong with a run, in short; nothing if it is right."""
    made = prepared(case, seed)
    try:
        run(made, seed, kernel)
    except KernelFault as fault:
        return f"{fault.problem}: {fault} [{case}, seed {seed}]"
    late = [engine.waiting() for engine in made.ranks.engines if engine.late]
    if late:
        return f"waits without end: {late} [{case}, seed {seed}]"
    wrong = made.wrong()
    return None if wrong is None else f"result: {wrong} [{case}, seed {seed}]"


def run(made: Prepared, seed: int, kernel: Program | None = None, **options: Any) -> Outcome:
    """Run what was queued; with another kernel in place of the engine's, if given."""
    queues = made.ranks.take()
    if kernel is not None:
        queues = [[replace(one, program=kernel) for one in queue] for queue in queues]
    return run_ranks(queues, seed=seed, **options)

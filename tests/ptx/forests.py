"""Collectives of the windows engine on the machine: all ranks at once, in a weak memory, and what must come out.

What loopback gives is right: its order of additions is the plan's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

import topoplan
from collectives import Communicator, lower
from collectives.kernels.compiler import compile_source
from collectives.kernels.source import forest_source
from tests.ptx.kernels import ptx
from tests.ptx.machine import KernelFault, Outcome, read, run_ranks
from tests.ptx.text import Program
from tests.support.kernel_data import EVERY_CASE, averaged, bits_type, joined, same_bits, special
from tests.support.ranks_on_machine import Ranks
from topoplan.plans.plan import Plan

Array = np.ndarray[Any, Any]

REDUCES = ("allreduce", "reduce", "reduce_scatter")
COLLECTIVES = (*REDUCES, "broadcast", "allgather")

QUAD = (1, 4, 5, 7)
"""GPUs of a DGX-1V without a ring."""


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


def every_case() -> Iterator[Case]:
    """All collectives on machines of all kinds; all types and operations; sizes around the borders of chunks."""
    for machine in (
        "dgx-1v",
        "dgx-1p",
        "dgx-2",
        "dgx-a100",
        "dgx-h100",
        "mi250",
        "mi250x",
        "nvlink-x4",
        "v100x4",
    ):
        for collective in COLLECTIVES:
            yield Case(machine, collective, counts=(100, 0, 37), blocks=4)
        yield Case(machine, counts=(64, 300), small=True)
    for dtype, op in EVERY_CASE:
        for small in (False, True):
            yield Case("dgx-1v", "allreduce", QUAD, (70,), op, dtype, small=small)
    for dtype in ("float16", "float32", "float64", "complex64", "complex128"):
        for small in (False, True):
            yield Case("dgx-1v", "allreduce", QUAD, (70,), "avg", dtype, small=small, in_place=True)
    for count in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 500, 1000):
        for chunk in (16, 48, 1 << 20):
            yield Case("dgx-1v", "allreduce", QUAD, (count, count), chunk=chunk, blocks=6, threads=64)


WANTED = r"number \+ 1 - \(arrives \? 0 : end\.count\)"
"""What a flag must have reached."""

BUGS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "an acquire that is relaxed": ("large", [("ld.acquire.sys", "ld.relaxed.sys")]),
    "a release that is relaxed": ("large", [("st.release.sys", "st.relaxed.sys")]),
    "a release for this GPU only": ("large", [("st.release.sys", "st.release.gpu")]),
    "an acquire from this GPU only": ("large", [("ld.acquire.sys", "ld.acquire.gpu")]),
    "no barrier before flags": (
        "large",
        [(r"(LANES, count\);\n) *__syncthreads\(\);", r"\1")],
    ),
    "no barrier behind flags": ("large", [(r"__syncthreads\(\);(\s*if \(\*failed\) return false)", r"\1")]),
    "one slot too many": ("large", [(r"\? 0 : end\.count\)", "? 0 : end.count + 1)")]),
    "data before its flag": (
        "large",
        [(r"number \+ 1 - \(arrives \? 0 : end\.count\)", "number - (arrives ? 0 : end.count - 1)")],
    ),
    "no wait for a free slot": (
        "large",
        [(r"number \+ 1 - \(arrives \? 0 : end\.count\)", "(arrives ? number + 1 : 0)")],
    ),
    "chunks that are not counted": ("large", [(r"job\.sent\[end\.sent\] \+= chunks\(steps\[s\]\);", "")]),
    "always the same slot": ("large", [(r"number % \(unsigned long long\)end\.count", "0")]),
    "the last chunk left out": ("large", [(r"if \(c >= chunks", "if (c + 1 >= chunks")]),
    "children in another order": ("large", [(r"arriving\[k\]", "arriving[arrivals - 1 - k]")]),
    "slots through the read-only cache": (
        "large",
        [(r"in_global_memory\(arriving\[k\]\)\[i\]", "__ldg(&((const float*)arriving[k])[i])")],
    ),
    "a packet known by one of four flags": ("small", [(r" && one\.y.*== number;", ";")]),
    "a packet's last flag unread": ("small", [(r" && other\.y >> 32 == number;", ";")]),
    "an inbox of one half": ("small", [("number % 2, number % MOST", "0, number % MOST")]),
    "collectives that are not counted": ("small", [(r"job\.number\[blockIdx\.x\] = number \+ 1;", ";")]),
    "packets of weak stores": ("small", [("st.relaxed.sys.global.v2", "st.weak.global.v2")]),
    "packets whose data follows the flags": ("small", [(r"seal \| data\.w", "seal | 0 * data.w")]),
    "operands in another order": ("small", [(r"join\(sum, other, sum\);", "join(sum, sum, other);")]),
}
"""Planted bugs: in which kernel, and what is changed in its source."""


def found(bug: str, seeds: range) -> str | None:
    """What gives a planted bug away first, or nothing."""
    kind, changes = BUGS[bug]
    # operands change places unseen in sums
    op = "min" if bug == "operands in another order" else "sum"
    case = Case("dgx-1v", gpus=QUAD, counts=(150, 60, 90), small=kind == "small", op=op)
    name = f"{'small' if case.small else 'forest'}_{op}_float32"
    ptx([name])  # skips where there is no compiler
    kernel = with_bug(name, changes)
    return next((wrong for seed in seeds if (wrong := outcome(case, seed, kernel))), None)


def with_bug(name: str, changes: list[tuple[str, str]]) -> Program:
    """The kernel with its source changed."""
    text = forest_source([name])
    for old, new in changes:
        text, count = re.subn(old, new, text)
        assert count, f"{old} is not there"
    return read(compile_source(text, 80, to="ptx").code.decode())[name]

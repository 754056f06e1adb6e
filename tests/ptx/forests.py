"""Collectives of the windows engine on the machine: all ranks at once, in a weak memory, and what must come out.

What loopback gives is right: its order of additions is the plan's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np

import topoplan
from collectives import Communicator, lower
from collectives.tables.kernels.kernel_launch import compile_source
from collectives.tables.kernels.source import forest_source
from tests.ptx.kernels import ARCHITECTURE, SWITCHING, ptx
from tests.ptx.machine import KernelFault, Outcome, read, run_ranks
from tests.ptx.text import Program
from tests.support.hand_plans import three_phase_plan
from tests.support.kernel_data import EVERY_CASE, averaged, bits_type, joined, same_bits, special
from tests.support.ranks_on_machine import ARENA, Ranks, message_programs
from topoplan.model.window_slices import SlicedClock
from topoplan.plans.plan import Plan

Array = np.ndarray[Any, Any]

REDUCES = ("allreduce", "reduce", "reduce_scatter")
COLLECTIVES = (*REDUCES, "broadcast", "allgather")

QUAD = (1, 4, 5, 7)  # GPUs of a DGX-1V without a ring


@dataclass(frozen=True, slots=True)
class Case:
    """Some collectives one after another, on an engine of its own."""

    # of the library; behind "2 x" a cluster of two of them; before "switch" its switches add and copy, before
    # "adder" they only add; before "pulled" and "mixed" all GPUs, or those of higher numbers, read what others have;
    # before "unwritten" and "apart" they do, and no write to them, or no copy from GPU 4 to GPU 5, ends.
    # "three phases" is a plan by hand, of six ranks
    machine: str
    collective: str = "allreduce"
    gpus: tuple[int, ...] = ()  # of each server; empty for all
    # elements that each rank gives, or gets in reduce_scatter, for each call
    counts: tuple[int, ...] = (100,)
    op: str = "sum"
    dtype: str = "float32"
    chunk: int = 16  # elements
    small: bool = False  # everything to everybody
    in_place: bool = False
    blocks: int = 2
    threads: int = 32
    direct: bool = False  # results lie in the arenas
    exact: bool = True  # sums have the plan's order
    domains: tuple[int, ...] = ()  # of each rank; empty for its server
    compares: bool = False  # the ranks compare digests of their calls
    again: bool = False  # all calls put their results at the same place, so that those of the last are left
    slices: int = 1  # of the buffer, with messages beside kernels

    @property
    def switched(self) -> bool:
        return self.machine.endswith((" switch", " adder"))


@cache
def plan_of(machine: str, collective: str, gpus: tuple[int, ...]) -> Plan:
    if machine == "three phases":
        return three_phase_plan([[0, 1, 2], [3, 4, 5]])
    servers, name = 2 if machine.startswith("2 x ") else 1, machine.removeprefix("2 x ")
    name, _, able = name.partition(" ")
    text = json.loads(topoplan.load(name).to_json())
    for device in text["devices"]:
        if device["kind"] == "nvswitch" and able in ("switch", "adder"):
            device["multicast"], device["reduce"] = able == "switch", True
    if able in ("pulled", "mixed", "unwritten", "apart"):
        state_access(text, able)
    topology = topoplan.load(json.dumps(text))
    # No NVLink leads from GPU 4 to GPU 5 in plans of "apart": their edges are of PCIe, through a CPU.
    inside = "pcie" if able == "apart" else "auto"
    if servers == 1:
        return topoplan.plan(topology, collective, gpus=list(gpus) or None, channels=inside)
    each = topoplan.Server(topology, list(gpus) or None, count=servers)
    channels = f"{inside}+network" if able == "apart" else inside
    return topoplan.plan(topoplan.cluster([each], nic_gbps=100, nics=2), collective, channels=channels)


def state_access(machine: dict[str, Any], which: str) -> None:
    """State that GPUs pull, in links between them, and as facts where a switch is in between."""
    gpus = {one["name"]: one for one in machine["devices"] if one["kind"] == "gpu"}
    if which == "apart":
        gpus["gpu5"].setdefault("facts", {})["unreached"] = "gpu4"
    pulls = {(src, dst) for src in gpus for dst in gpus if src < dst or (which == "pulled" and src > dst)}
    direct = [one for one in machine["links"] if {one["src"], one["dst"]} <= gpus.keys()]
    for link in direct:
        rates = (None if which == "unwritten" else 1.0, link["bandwidth"])
        link["push"], link["pull"] = (
            rates if (link["src"], link["dst"]) in pulls else (link["bandwidth"], None)
        )
    for src, dst in sorted(pulls if not direct else ()):
        facts = gpus[dst].setdefault("facts", {})
        facts["pulls"] = ",".join([*filter(None, [facts.get("pulls")]), src])


def domains_of(plan: Plan) -> tuple[int, ...]:
    servers = [name.rpartition(".")[0] for name in plan.ranks]
    return tuple(sorted(set(servers)).index(one) for one in servers)


@dataclass(slots=True)
class Prepared:
    """A case that is ready to run: ranks, and for each call what they get and should get."""

    case: Case
    plan: Plan
    ranks: Ranks
    got: list[list[Array]] = field(default_factory=list)
    wanted: list[list[Array]] = field(default_factory=list)

    def wrong(self) -> str | None:
        for call, (got, wanted) in enumerate(zip(self.got, self.wanted, strict=True)):
            for rank, (one, other) in enumerate(zip(got, wanted, strict=True)):
                if not same_bits(one, other, self.case.dtype):
                    places = np.flatnonzero(one != other)
                    return f"call {call}, rank {rank}: elements {places[:4]} of {one.size} differ"
        return None


def prepared(case: Case, seed: int = 0, timeout: float = 1e-2, *, filled: bool = False) -> Prepared:
    """Queue the calls of a case; see `Ranks`."""
    plan = plan_of(case.machine, case.collective, case.gpus)
    size = len(plan.ranks)
    small = 16384 if case.small else 0
    longest = 16 * max(case.counts) * (size if case.collective == "allgather" else 1) + 512
    calls = range(len(case.counts))
    direct = [longest * (1 if case.again else call + 1) if case.direct else None for call in calls]
    made = Prepared(
        case,
        plan,
        Ranks(
            size,
            threads=case.threads,
            timeout=timeout,
            domains=case.domains or domains_of(plan),
            switched=case.switched,
            filled=filled,
            blocks=case.blocks,
            slot_bytes=512,
            small_bytes=small,
            room_bytes=ARENA - longest * len(case.counts) if case.direct else ARENA,
            exact=case.exact,
            overlaps=case.slices > 1,
        ),
    )
    generator = np.random.default_rng(seed)
    for count, place in zip(case.counts, direct, strict=True):
        length = count * size if case.collective == "reduce_scatter" else count
        inputs = [given(case, length, generator) for _ in range(size)]
        made.wanted.append(expected(plan, case, inputs))
        copies = [array.copy() for array in inputs]
        with patch.object(SlicedClock, "slices", lambda *_, **__: case.slices):
            results = made.ranks.queue(
                plan,
                copies,
                op=case.op,
                dtype=case.dtype,
                chunk=case.chunk,
                in_place=case.in_place,
                direct=place,
                digests=[len(made.got) + 1] * size if case.compares else None,
            )
        made.got.append(results)
    programs = [one for engine in made.ranks.engines for one in engine._programs.values()]
    assert not case.small or all(one.small for one in programs), case
    if case.again:
        made.got, made.wanted = made.got[-1:], made.wanted[-1:]
    return made


def given(case: Case, length: int, generator: np.random.Generator) -> Array:
    """What a rank gives; whole numbers where the order of additions must not show."""
    if case.exact or not case.dtype.startswith(("float", "complex", "bfloat")):
        return special(case.dtype, length, generator)
    numbers = generator.integers(-8, 8, length)
    if case.dtype == "bfloat16":
        return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return numbers.astype(case.dtype)


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
    held = [averaged("bfloat16", array, len(inputs)) if op == "avg" else array.copy() for array in inputs]
    table = lower(plan, inputs[0].size, chunk_elements=inputs[0].size)
    columns = (table.source, table.destination, table.start, table.stop, table.add)
    for source, target, start, stop, add in zip(*(column.tolist() for column in columns), strict=True):
        part = held[source][start:stop]
        held[target][start:stop] = joined("bfloat16", op, held[target][start:stop], [part]) if add else part
    return held


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
        queues = [
            [one if one.program.name in message_programs() else replace(one, program=kernel) for one in queue]
            for queue in queues
        ]
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
    for dtype in ("float32", "float64", "complex64", "complex128"):  # of 16 bits ranks divide first
        for small in (False, True):
            yield Case("dgx-1v", "allreduce", QUAD, (70,), "avg", dtype, small=small, in_place=True)
    for collective in COLLECTIVES:
        for machine in ("2 x dgx-1v", "2 x dgx-a100", "2 x mi250", "2 x dgx-h100 switch"):
            for direct in (False, True):
                yield Case(machine, collective, (0, 1, 2, 3), (100, 0, 37), blocks=4, direct=direct)
        for machine in ("dgx-1v", "dgx-2", "dgx-h100 switch"):
            yield Case(machine, collective, counts=(100, 0, 37), blocks=4, direct=True, in_place=True)
        yield Case("dgx-h100 switch", collective, counts=(100, 0, 37), blocks=4)
    for dtype, op in EVERY_CASE:
        for exact in (True, False):
            yield Case("dgx-h100 switch", "allreduce", QUAD, (70,), op, dtype, exact=exact)
    for dtype in ("float32", "float64", "complex64", "complex128"):  # of 16 bits ranks divide first
        yield Case("dgx-h100 switch", "allreduce", QUAD, (70, 33), "avg", dtype, exact=False, direct=True)
        yield Case("2 x dgx-1v", "allreduce", QUAD, (70, 33), "avg", dtype, direct=True)
    for count in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 500, 1000):
        for chunk in (16, 48, 1 << 20):
            yield Case("dgx-1v", "allreduce", QUAD, (count, count), chunk=chunk, blocks=6, threads=64)


WANTED = r"number \+ 1 - \(arrives \? 0 : end\.count\)"  # what a flag must have reached

BUGS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "an acquire that is relaxed": ("large", [("ld.acquire.sys", "ld.relaxed.sys")]),
    "a release that is relaxed": ("large", [("st.release.sys", "st.relaxed.sys")]),
    "a release for this GPU only": ("large", [("st.release.sys", "st.release.gpu")]),
    "an acquire from this GPU only": ("large", [("ld.acquire.sys", "ld.acquire.gpu")]),
    "no barrier before flags": (
        "large",
        [(r"(Switch::both_ways\(\);\n) *__syncthreads\(\);", r"\1")],
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
    "chunks that are not counted": ("large", [(r"job\.sent\[end\.sent\] = earlier\(end\) \+ [^;]*;", "")]),
    "no barrier behind copied tables": (
        "large",
        [(r"block\.run_all\(\);", "{ tables_of(job, words); block.run_all(); }")],
    ),
    "the count of another end": ("large", [(r"job\.sent\[job\.ends\[first \+ e\]\.sent\]", "job.sent[e]")]),
    "the counts of half of the ends alone": (
        "large",
        [(r"e < ends; e \+= blockDim\.x", "e < ends / 2; e += blockDim.x")],
    ),
    "always the same slot": ("large", [(r"number % \(unsigned long long\)end\.count", "0")]),
    "the last chunk left out": ("large", [(r"if \(c >= steps", "if (c + 1 >= steps")]),
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
    "a result written before its rank has come": (
        "direct",
        [(WANTED, "(!arrives && end.count == 0 ? 0 : number + 1 - (arrives ? 0 : end.count))")],
    ),
    "results whose last chunks are not waited for": (
        "direct",
        [
            (
                r"bool there = end\.count < 0",
                "bool there = end.count < 0 || (end.count == 0 && arrives && c > 0)",
            )
        ],
    ),
    "a call that is told without a release": (
        "compared",
        [(r"release\(there \+ 1, number\)", "tell(there + 1, number)")],
    ),
    "calls that are told at one place": (
        "compared",
        [(r"\(long long\)\(number % 2\) \* control\.ranks", "0")],
    ),
    "a pulled slot that is read before its flag": ("pulled", [("ld.acquire.sys", "ld.relaxed.sys")]),
    "a pulled slot that is free before it is read": (
        "pulled",
        [(r"(Switch::both_ways\(\);\n) *__syncthreads\(\);", r"\1")],
    ),
    "a pulled slot that is written before it is free": ("pulled", [(WANTED, "(arrives ? number + 1 : 0)")]),
    "a pulled slot looked for at its reader": (
        "pulled",
        [(r": arenas\[end\.home\];", ": arenas[job.control.rank];")],
    ),
    "no fence between the two ways to memory": ("switch", [(r"fence\.proxy\.alias;", "")]),
    "a fence only where a switch adds": ("spreads", [(r"if \(step\.switched\)", "if (step.gathers)")]),
    "a fence only where a switch copies": ("gathers", [(r"if \(step\.switched\)", "if (step.spreads)")]),
    "no wait for a free slot of a switch": ("switch", [(WANTED, "(arrives ? number + 1 : 0)")]),
    "one that does not add its own": ("switch", [(r"step\.gathers : step", "false : step")]),
}
"""Planted bugs: in which kernel, and what is changed in its source."""


BUGGY = {
    "large": (Case("dgx-1v", gpus=QUAD, counts=(600, 60, 90)), "forest_sum_float32"),
    "small": (Case("dgx-1v", gpus=QUAD, counts=(150, 60, 90), small=True), "small_sum_float32"),
    "direct": (
        Case("dgx-1v", "broadcast", QUAD, (150, 150, 150), direct=True, again=True),
        "forest_copy_4",
    ),
    "compared": (
        Case("dgx-1v", gpus=QUAD, counts=(4, 60, 4, 4), small=True, compares=True),
        "small_sum_float32",
    ),
    "pulled": (Case("dgx-1v pulled", gpus=QUAD, counts=(600, 60, 90)), "forest_sum_float32"),
    "switch": (
        Case("dgx-h100 switch", gpus=QUAD, counts=(600, 60, 90), dtype="int32"),
        "switch_sum_uint32",
    ),
    **{
        kind: (Case("dgx-h100 switch", collective, QUAD, (600, 60, 90), dtype="int32"), kernel)
        for kind, collective, kernel in (
            ("gathers", "reduce", "switch_sum_uint32"),
            ("spreads", "broadcast", "switch_copy_4"),
        )
    },
}
"""On what bugs of each kind are looked for, and the kernel that has them."""


def found(bug: str, seeds: range) -> str | None:
    """What gives a planted bug away first, or nothing."""
    kind, changes = BUGS[bug]
    case, name = BUGGY[kind]
    if bug == "operands in another order":  # which is not seen in sums
        case, name = replace(case, op="min"), name.replace("sum", "min")
    architecture = SWITCHING if case.switched else ARCHITECTURE
    ptx([name], architecture)  # skips where there is no compiler
    kernel = with_bug(name, changes, architecture)
    return next((wrong for seed in seeds if (wrong := outcome(case, seed, kernel))), None)


def with_bug(name: str, changes: list[tuple[str, str]], architecture: int) -> Program:
    text = forest_source([name])
    for old, new in changes:
        text, count = re.subn(old, new, text)
        assert count, f"{old} is not there"
    return read(compile_source(text, architecture, to="ptx").code.decode())[name]

"""Kernels of PTX text run on this processor: one alone, or queues of several ranks, and what can go wrong in them."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.ptx.memory import NONE, RANGE, Array, Memory, Shared, memories
from tests.ptx.text import GAP, INSTRUCTION, READ_ONLY_CACHE, Names, Program, programs

__all__ = [
    "FIRST",
    "LAST",
    "KernelFault",
    "Launch",
    "Memory",
    "Outcome",
    "Traffic",
    "library",
    "memories",
    "names",
    "read",
    "run",
    "run_ranks",
]

FIRST, LAST = -1, -2
"""Seeds of the two orders that are not random: the first thread and block first, or the last."""

MOST_STEPS = 2_000_000_000  # instructions of a launch after which it is given up

PROBLEMS = (
    "nothing",
    "outside of every array",
    "write to an array that is only read",
    "not aligned",
    "read of memory that nobody has written",
    "race",
    "threads of a warp at different barriers",
    "a lane of the mask does not come",
    "lane outside of the mask",
    "threads that do not come to a barrier",
    "no end",
    "two proxies without a fence",
    "multicast address without multimem",
    "multimem outside of multicast memory",
    "trap",
)


PAIRS = (PROBLEMS[5], PROBLEMS[6], PROBLEMS[7], PROBLEMS[9], PROBLEMS[11])  # those between two threads


class _Fields(ctypes.Structure):
    def values(self) -> dict[str, int]:
        return {field[0]: getattr(self, field[0]) for field in self._fields_}


class _Fault(_Fields):
    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in (
                *("problem", "place", "block", "thread", "writes", "bytes", "array"),
                *("other_block", "other_thread", "other_place", "launch", "other_launch"),
            )
        ),
        ("address", ctypes.c_uint64),
        ("steps", ctypes.c_uint64),
    ]


class _Launch(_Fields):
    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("code", "constants", "specials", "parameters", "arrays", "variables")
        ),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("instructions", "registers", "constant_count", "special_count", "array_count"),
                *("variable_count", "shared_bytes", "blocks", "block_size", "first_place"),
            )
        ),
    ]


class _Run(_Fields):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("launches", "queues", "rank_steps", "rank_ended")),
        *((name, ctypes.c_int32) for name in ("ranks", "areas", "checked", "weak", "proxies", "stopped")),
        *((name, ctypes.c_int64) for name in ("seed", "most_steps", "stop_steps", "nanoseconds")),
    ]


class KernelFault(Exception):
    """A kernel did what it must not do: `problem` is one of `PROBLEMS`."""

    def __init__(self, problem: str, message: str) -> None:
        super().__init__(message)
        self.problem = problem


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A kernel, its blocks and the threads of each, its arguments, and all that it may reach."""

    program: Program
    grid: int
    block: int
    arguments: Sequence[int]
    memory: Memory


@dataclass(slots=True)
class Traffic:
    """Bytes that a rank's threads have read and written through one array."""

    read: int = 0
    written: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Instructions of all ranks and of each; traffic by rank and array; of which ranks all launches have ended."""

    steps: int
    rank_steps: tuple[int, ...]
    traffic: tuple[dict[str, Traffic], ...]
    finished: tuple[bool, ...]


_BUILD = Path(__file__).resolve().parents[2] / "build"


@cache
def library() -> ctypes.CDLL:
    """The machine, compiled (5 s) when its sources have changed; skips the test where there is no C++ compiler.

    Tests whose ranks have little time call it before the ranks start.
    """
    compiler = next((found for name in ("g++", "c++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C++ compiler (g++, c++ or clang++) to run PTX on this processor")
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
    here = Path(__file__).parent
    seal = hashlib.sha256(repr((compiler, flags, platform.machine())).encode())
    for part in sorted((*here.glob("*.cc"), *here.glob("*.h"))):
        seal.update(part.read_bytes())
    made = _BUILD / f"ptx-{seal.hexdigest()[:16]}.so"
    _BUILD.mkdir(exist_ok=True)
    with open(_BUILD / "ptx.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process compiles, the others wait for it
        if not made.exists():
            new = made.with_suffix(".new")
            command = [compiler, *flags, "-o", str(new), str(here / "machine.cc")]
            subprocess.run(command, check=True, timeout=600)
            new.replace(made)
    loaded = ctypes.CDLL(str(made))
    loaded.operation_name.restype = ctypes.c_char_p
    return loaded


@cache
def names() -> Names:
    """What the machine can do."""
    made = library()
    return Names(
        lambda name: int(made.operation(name.encode())),
        lambda name: int(made.atomic(name.encode())),
        lambda name: int(made.special_register(name.encode())),
        lambda name: int(made.reduction(name.encode())),
    )


def read(text: str) -> dict[str, Program]:
    """The kernels of some PTX text."""
    return programs(text, names())


def run(
    program: Program,
    grid: int,
    block: int,
    arguments: Sequence[int],
    *,
    memory: Memory | None = None,
    seed: int = FIRST,
    most_steps: int = MOST_STEPS,
) -> int:
    """Run a kernel to its end; returns the instructions that were run.

    Parameters
    ----------
    program : Program
    grid, block : int
        Blocks, and threads of each.
    arguments : sequence of int
        Addresses and whole numbers; of floats their bits.
    memory : Memory, optional
        All that the kernel may reach. Without it addresses are those of this process, and nothing is checked.
    seed : int
        The order of threads: `FIRST`, `LAST`, or a seed from 0 on for a random one.

    Raises
    ------
    KernelFault
        A check failed; only with `memory`, or where threads wait for what never comes.
    """
    table = memory.table() if memory is not None else NONE
    packed = _pack(program, grid, block, arguments, table, 0)
    queue, outcome = np.ones(1, dtype=np.int32), np.zeros((2, 1), dtype=np.uint64)
    given = _Run(
        ctypes.addressof(packed.launch),
        *(one.ctypes.data for one in (queue, *outcome)),
        *(1, len(table), memory is not None, False, False, -1),
        *(seed, most_steps, 0, 1),
    )
    fault = _Fault()
    library().run(ctypes.byref(given), ctypes.byref(fault))
    if fault.problem:
        raise KernelFault(PROBLEMS[fault.problem], _told([(0, program, memory)], fault, ranks=False))
    return int(fault.steps)


def run_ranks(
    queues: Sequence[Sequence[Launch]],
    *,
    seed: int,
    most_steps: int = MOST_STEPS,
    stop: tuple[int, int] | None = None,
    nanoseconds: int = 1,
) -> Outcome:
    """Run queues of kernels, one of each rank, all at once, with a weak memory between them.

    Of one queue a launch begins when the one before it has ended. A buffer that several memories have, at addresses of
    their own, is one: races and unwritten bytes are those of the buffer.

    Parameters
    ----------
    queues : sequence of sequence of Launch
        The launches of each rank; the memories of all ranks are checked.
    seed : int
        From 0 on: the order of threads, and when stores land.
    most_steps : int
        Instructions of all ranks, after which they are given up.
    stop : (int, int), optional
        A rank that runs no more after so many instructions of its own. What it has stored and not yet released lands or
        is lost.
    nanoseconds : int
        What ``%globaltimer`` advances with each instruction, whoever runs it.

    Raises
    ------
    KernelFault
        A check failed.
    """
    memory = [launch.memory for queue in queues for launch in queue]
    distinct = list({id(one): one for one in memory}.values())
    shared = Shared.of(distinct)
    tables = {id(one): shared.table(one) for one in distinct}
    packed, ends = [], [0]
    for queue in queues:
        for launch in queue:
            table = tables[id(launch.memory)].copy()
            packed.append(_pack(launch.program, launch.grid, launch.block, launch.arguments, table, ends[-1]))
            ends.append(ends[-1] + len(launch.program.code))
    launches = (_Launch * len(packed))(*(one.launch for one in packed))
    lengths = np.array([len(queue) for queue in queues], dtype=np.int32)
    outcome = np.zeros((2, len(queues)), dtype=np.uint64)
    cached = any(
        (launch.program.code["proxy"] == READ_ONLY_CACHE).any() for queue in queues for launch in queue
    )
    stopped, steps = stop if stop is not None else (-1, 0)
    given = _Run(
        ctypes.addressof(launches),
        *(one.ctypes.data for one in (lengths, *outcome)),
        *(len(queues), shared.areas, True, True, cached or shared.proxies, stopped),
        *(seed, most_steps, steps, nanoseconds),
    )
    fault = _Fault()
    library().run(ctypes.byref(given), ctypes.byref(fault))
    shared.tell(distinct)
    if fault.problem:
        sources = [
            (rank, launch.program, launch.memory) for rank, queue in enumerate(queues) for launch in queue
        ]
        raise KernelFault(PROBLEMS[fault.problem], _told(sources, fault, ranks=True))
    traffic: list[dict[str, Traffic]] = []
    made = iter(packed)
    for queue in queues:
        traffic.append({})
        for launch in queue:
            for row, one in zip(next(made).arrays, launch.memory.arrays, strict=True):
                total = traffic[-1].setdefault(one.name, Traffic())
                total.read += int(row["bytes_read"])
                total.written += int(row["bytes_stored"])
    return Outcome(
        int(fault.steps),
        tuple(outcome[0].tolist()),
        tuple(traffic),
        tuple(bool(ended) for ended in outcome[1]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """A launch for the library, and the tables that it points to."""

    launch: _Launch
    tables: tuple[Array, ...]
    arrays: Array


def _pack(
    program: Program, grid: int, block: int, arguments: Sequence[int], arrays: Array, first_place: int
) -> _Packed:
    code = np.ascontiguousarray(program.code)
    assert code.dtype == INSTRUCTION
    constants = np.array(list(program.constants), dtype=[("place", np.int64), ("value", np.uint64)])
    specials = np.array(program.specials, dtype=np.int32).reshape(-1, 2)
    variables = np.zeros(len(program.variables), dtype=RANGE)
    for row, part in zip(variables, program.variables, strict=True):
        row["base"], row["size"], row["writable"], row["followed"] = part.base, part.size, 1, 1
    passed = bytearray(max((part.base + part.size for part in program.parameters), default=0) + 8)
    for part, argument in zip(program.parameters, arguments, strict=True):
        passed[part.base : part.base + part.size] = (argument % (1 << 8 * part.size)).to_bytes(
            part.size, "little"
        )
    parameters = np.frombuffer(passed, dtype=np.uint8)
    tables = (code, constants, specials, parameters, arrays, variables)
    shared = max((part.base + part.size for part in program.variables), default=0) + GAP
    sizes = (len(code), program.registers, *map(len, (constants, specials, arrays, variables)), shared)
    launch = _Launch(*(table.ctypes.data for table in tables), *sizes, grid, block, first_place)
    return _Packed(launch, tables, arrays)


def _told(sources: Sequence[tuple[int, Program, Memory | None]], fault: _Fault, *, ranks: bool) -> str:
    problem = PROBLEMS[fault.problem]
    rank, program, memory = sources[fault.launch]
    line = program.lines[fault.place]
    parts = [
        (f"rank {rank}, " if ranks else "")
        + f"{program.name}, line {line}: {program.texts[fault.place]}: "
        + f"block {fault.block} thread {fault.thread}: {problem}"
    ]
    if fault.bytes:
        kind = "write" if fault.writes else "read"
        parts.append(f"{kind} of {fault.bytes} bytes at {_where(program, fault, memory)}")
    if problem in PAIRS:
        rank, program, _ = sources[fault.other_launch]
        other = (f"rank {rank} " if ranks else "") + f"block {fault.other_block} thread {fault.other_thread}"
        if fault.other_place >= 0:
            line = program.lines[fault.other_place]
            parts.append(f"with {other} at line {line}: {program.texts[fault.other_place]}")
        else:
            parts.append(f"{other} has ended" if fault.other_place == -1 else "it is not there")
    return ", ".join(parts)


def _where(program: Program, fault: _Fault, memory: Memory | None) -> str:
    if fault.array >= 0 and memory is not None:
        one = memory.arrays[fault.array]
        return f"byte {fault.address - one.address} of {one.name} ({one.array.nbytes} bytes)"
    if fault.array <= -2:
        part = program.variables[-2 - fault.array]
        return f"byte {fault.address - part.base} of shared {part.name} ({part.size} bytes)"
    return f"address {fault.address:#x}"

"""Kernels of PTX text run on this processor: memory that knows its bounds, launches, and what can go wrong in them."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.ptx.text import GAP, INSTRUCTION, Names, Program, programs

Array = NDArray[Any]

FIRST, LAST = -1, -2
"""Seeds of the two orders that are not random: the first thread and block first, or the last."""

MOST_STEPS = 2_000_000_000
"""Instructions of a launch after which it is given up."""

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
)


PAIRS = (PROBLEMS[5], PROBLEMS[6], PROBLEMS[7], PROBLEMS[9])
"""Those between two threads."""


class _Fields(ctypes.Structure):
    def values(self) -> dict[str, int]:
        return {name: getattr(self, name) for name, _ in self._fields_}


class _Fault(_Fields):
    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in (
                *("problem", "place", "block", "thread", "writes", "bytes", "array"),
                *("other_block", "other_thread", "other_place"),
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
                *("variable_count", "shared_bytes", "blocks", "block_size", "checked"),
            )
        ),
        ("seed", ctypes.c_int64),
        ("most_steps", ctypes.c_int64),
    ]


RANGE = np.dtype(
    [
        ("base", np.uint64),
        ("size", np.uint64),
        ("host", np.uint64),
        ("written", np.uint64),
        ("writable", np.int64),
    ]
)


class KernelFault(Exception):
    """A kernel did what it must not do: `problem` is one of `PROBLEMS`."""

    def __init__(self, problem: str, message: str) -> None:
        super().__init__(message)
        self.problem = problem


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """An array of a `Memory`: its address there, and which of its bytes somebody has written, or None for all."""

    name: str
    array: Array
    address: int
    writable: bool
    written: NDArray[np.uint8] | None


@dataclass(slots=True)
class Memory:
    """Arrays that kernels may reach, each at an address of its own, far from the next."""

    arrays: list[Placed] = field(default_factory=list)
    end: int = 1 << 32

    def put(
        self, name: str, array: Array, *, writable: bool = True, written: bool = True, shift: int = 0
    ) -> int:
        """Make an array known; its address lies `shift` bytes behind a multiple of 512.

        What a kernel stores is in the array at once. Where nothing is `written`, only the kernel's own stores are read.
        """
        assert array.flags.c_contiguous
        address = self.end + shift
        bytes_ = None if written else np.zeros(max(array.nbytes, 1), dtype=np.uint8)
        self.arrays.append(Placed(name, array, address, writable, bytes_))
        self.end = -(-(address + array.nbytes) // 512) * 512 + (1 << 20)
        return address

    def table(self) -> Array:
        """Rows of `RANGE`."""
        rows = []
        for one in self.arrays:
            written = 0 if one.written is None else one.written.ctypes.data
            rows.append((one.address, one.array.nbytes, one.array.ctypes.data, written, one.writable))
        return np.array(rows, dtype=RANGE)


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
    if not made.exists():
        _BUILD.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_BUILD) as folder:
            new = Path(folder) / made.name
            subprocess.run(
                [compiler, *flags, "-o", str(new), str(here / "machine.cc")], check=True, timeout=120
            )
            new.replace(made)  # whole for whoever else looks at it
    found = ctypes.CDLL(str(made))
    found.operation_name.restype = ctypes.c_char_p
    return found


@cache
def names() -> Names:
    """What the machine can do."""
    made = library()
    return Names(
        lambda name: int(made.operation(name.encode())),
        lambda name: int(made.atomic(name.encode())),
        lambda name: int(made.special_register(name.encode())),
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
    code = np.ascontiguousarray(program.code)
    constants = np.array(list(program.constants), dtype=[("place", np.int64), ("value", np.uint64)])
    specials = np.array(program.specials, dtype=np.int32).reshape(-1, 2)
    variables = np.array([(part.base, part.size, 0, 0, 1) for part in program.variables], dtype=RANGE)
    arrays = memory.table() if memory is not None else np.zeros(0, dtype=RANGE)
    passed = bytearray(max((part.base + part.size for part in program.parameters), default=0) + 8)
    for part, argument in zip(program.parameters, arguments, strict=True):
        passed[part.base : part.base + part.size] = (argument % (1 << 8 * part.size)).to_bytes(
            part.size, "little"
        )
    parameters = np.frombuffer(passed, dtype=np.uint8)
    tables = (code, constants, specials, parameters, arrays, variables)
    shared = max((part.base + part.size for part in program.variables), default=0) + GAP
    counts = (
        len(code),
        program.registers,
        len(constants),
        len(specials),
        len(arrays),
        len(variables),
        shared,
    )
    launch = _Launch(
        *(table.ctypes.data for table in tables), *counts, grid, block, memory is not None, seed, most_steps
    )
    fault = _Fault()
    assert code.dtype == INSTRUCTION
    library().run(ctypes.byref(launch), ctypes.byref(fault))
    if fault.problem:
        raise KernelFault(PROBLEMS[fault.problem], _told(program, fault, memory))
    return int(fault.steps)


def _told(program: Program, fault: _Fault, memory: Memory | None) -> str:
    problem = PROBLEMS[fault.problem]
    line = program.lines[fault.place]
    parts = [
        f"{program.name}, line {line}: {program.texts[fault.place]}: "
        f"block {fault.block} thread {fault.thread}: {problem}"
    ]
    if fault.bytes:
        kind = "write" if fault.writes else "read"
        parts.append(f"{kind} of {fault.bytes} bytes at {_where(program, fault, memory)}")
    if problem in PAIRS:
        other = f"block {fault.other_block} thread {fault.other_thread}"
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

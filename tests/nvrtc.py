"""NVIDIA's run-time compilers, wherever the wheels have put them, called without a GPU or a driver."""

from __future__ import annotations

import ctypes
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PATTERNS = ("nvidia/cuda_nvrtc/lib/libnvrtc.so.1*", "nvidia/cu1*/lib/libnvrtc.so.1*")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program: its PTX, and by the name of each kernel its registers and bytes of spilled ones."""

    log: str
    ptx: str
    registers: dict[str, int]
    spilled: dict[str, int]


@cache
def compilers() -> dict[int, ctypes.CDLL]:
    """One compiler for each major release of CUDA that is installed."""
    found = {}
    for folder in sorted({Path(entry) for entry in sys.path if entry}):
        for pattern in PATTERNS:
            for path in sorted(folder.glob(pattern)):
                library = ctypes.CDLL(str(path))
                major, minor = ctypes.c_int(), ctypes.c_int()
                library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
                found.setdefault(major.value, library)
    return found


def compiled(library: ctypes.CDLL, source: str, architecture: int) -> Compiled:
    """Compile for one compute capability, 90 for 9.0."""
    program = ctypes.c_void_p()
    assert library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"join.cu", 0, None, None) == 0
    options = [f"--gpu-architecture=sm_{architecture}".encode(), b"--ptxas-options=-v", b"-std=c++17"]
    status = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    log = _text(library, program, "ProgramLog")
    assert status == 0, log
    ptx = _text(library, program, "PTX")
    library.nvrtcDestroyProgram(ctypes.byref(program))
    parts = re.split(r"entry function '(\w+)'", log)[1:]
    told = dict(zip(parts[::2], parts[1::2], strict=True))
    return Compiled(
        log,
        ptx,
        {name: int(re.findall(r"Used (\d+) registers", text)[0]) for name, text in told.items()},
        {name: sum(map(int, re.findall(r"(\d+) bytes spill", text))) for name, text in told.items()},
    )


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, buffer)
    return buffer.value.decode()

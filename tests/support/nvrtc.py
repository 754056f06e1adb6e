"""NVIDIA's run-time compilers of all releases that the wheels have put here, behind the names of CuPy's."""

from __future__ import annotations

import ctypes
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from collectives.tables.kernels.kernel_launch import compile_source

PATTERNS = ("nvidia/cuda_nvrtc/lib/libnvrtc.so.1*", "nvidia/cu1*/lib/libnvrtc.so.1*")


@dataclass(frozen=True, slots=True)
class Built:
    """A program: its PTX, and by the name of each kernel its registers and bytes of spilled ones."""

    log: str
    ptx: str
    registers: dict[str, int]
    spilled: dict[str, int]


class Nvrtc:
    """`collectives.tables.kernels.kernel_launch.Nvrtc` of one library."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def createProgram(self, source: str, name: str, headers: tuple[str, ...], names: tuple[str, ...]) -> int:
        program = ctypes.c_void_p()
        arguments = (ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        assert self._library.nvrtcCreateProgram(*arguments) == 0
        assert program.value is not None
        return program.value

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = self._library.nvrtcCompileProgram(ctypes.c_void_p(program), len(options), words)
        if status:
            raise RuntimeError(f"NVRTC error {status}")

    def getProgramLog(self, program: int) -> str:
        return self._read(program, "ProgramLog").rstrip(b"\0").decode()

    def getPTX(self, program: int) -> bytes:
        return self._read(program, "PTX")

    def getCUBIN(self, program: int) -> bytes:
        return self._read(program, "CUBIN")

    def destroyProgram(self, program: int) -> None:
        self._library.nvrtcDestroyProgram(ctypes.byref(ctypes.c_void_p(program)))

    def getSupportedArchs(self) -> tuple[int, ...]:
        count = ctypes.c_int()
        self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._library.nvrtcGetSupportedArchs(found)
        return tuple(found)

    def getVersion(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def _read(self, program: int, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._library, f"nvrtcGet{what}Size")(ctypes.c_void_p(program), ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self._library, f"nvrtcGet{what}")(ctypes.c_void_p(program), buffer)
        return buffer.raw


@cache
def compilers() -> dict[int, Nvrtc]:
    """One compiler for each major release of CUDA that is installed."""
    found: dict[int, Nvrtc] = {}
    for folder in sorted({Path(entry) for entry in sys.path if entry}):
        for pattern in PATTERNS:
            for path in sorted(folder.glob(pattern)):
                library = Nvrtc(path)
                found.setdefault(library.getVersion()[0], library)
    return found


def built(nvrtc: Nvrtc, source: str, architecture: int) -> Built:
    """Compile for one compute capability, 90 for 9.0, as the product does."""
    made = compile_source(source, architecture, to="ptx", nvrtc=nvrtc)
    parts = re.split(r"entry function '(\w+)'", made.log)[1:]
    told = dict(zip(parts[::2], parts[1::2], strict=True))
    return Built(
        made.log,
        made.code.decode(),
        {name: int(re.findall(r"Used (\d+) registers", text)[0]) for name, text in told.items()},
        {name: sum(map(int, re.findall(r"(\d+) bytes spill", text))) for name, text in told.items()},
    )

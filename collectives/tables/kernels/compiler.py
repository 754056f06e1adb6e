"""Compile the kernels with NVRTC and load them into the current GPU.

CuPy's own compilation appends ``-ftz=true`` behind all options, which makes float32 denormals zero; results would not
have numpy's bits. CuPy therefore only loads here. The compiler needs neither a GPU nor a driver.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, cast

from topoplan.errors import UsageError

OPTIONS = ("-std=c++17", "--ptxas-options=-v")
"""Options of every compilation besides its target; with ``-v`` the log states the registers of a kernel."""

CACHE = "TOPOPLAN_KERNEL_CACHE"
"""Environment variable of the folder of compiled kernels; without it every process compiles them."""


class Nvrtc(Protocol):
    """The used part of NVRTC, with the names of ``cupy_backends.cuda.libs.nvrtc``."""

    def createProgram(self, source: str, name: str, headers: tuple[str, ...], names: tuple[str, ...]) -> int:
        """Return a program of this source."""

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        """Compile it."""

    def getProgramLog(self, program: int) -> str:
        """Return the compiler's messages."""

    def getPTX(self, program: int) -> bytes:
        """Return PTX, which a driver compiles."""

    def getCUBIN(self, program: int) -> bytes:
        """Return machine code."""

    def destroyProgram(self, program: int) -> None:
        """Free it."""

    def getSupportedArchs(self) -> Sequence[int]:
        """Return the compute capabilities that it compiles for, 90 for 9.0."""

    def getVersion(self) -> tuple[int, int]:
        """Return CUDA's release."""


@dataclass(frozen=True, slots=True)
class CompiledKernels:
    """PTX (text) or a cubin, and the compiler's messages."""

    code: bytes
    log: str


def nvrtc_of_cupy() -> Nvrtc:
    """Return CuPy's compiler, which is found and loaded without a GPU; UsageError says what to install."""
    try:
        nvrtc = import_module("cupy_backends.cuda.libs.nvrtc")
    except ImportError:
        raise UsageError(
            'the GPU kernels need CuPy and NVRTC: pip install "topoplan[cuda12]" (or cuda13, as the driver)'
        ) from None
    try:
        nvrtc.getVersion()
    except Exception as error:  # each release of CuPy has another one where the library is not found
        raise UsageError(
            "the GPU kernels need NVRTC, which CuPy does not find: pip install nvidia-cuda-nvrtc-cu12 "
            f"(or nvidia-cuda-nvrtc for CUDA 13): {type(error).__name__}"
        ) from None
    return cast(Nvrtc, nvrtc)


def compile_source(
    source: str, architecture: int, *, to: Literal["ptx", "cubin"], nvrtc: Nvrtc | None = None
) -> CompiledKernels:
    """Compile CUDA source that includes no header, for a compute capability (90 for 9.0) and by default with CuPy's
    NVRTC.

    UsageError: no compiler. RuntimeError: the source does not compile; the log is in the message.
    """
    used = nvrtc_of_cupy() if nvrtc is None else nvrtc
    program = used.createProgram(source, "kernels.cu", (), ())
    try:
        try:
            used.compileProgram(program, (*OPTIONS, f"--gpu-architecture=sm_{architecture}"))
        except Exception as error:
            raise RuntimeError(f"{error}: {used.getProgramLog(program)}") from error
        code = used.getPTX(program) if to == "ptx" else used.getCUBIN(program)
        return CompiledKernels(code.rstrip(b"\0") if to == "ptx" else code, used.getProgramLog(program))
    finally:
        used.destroyProgram(program)


def target_of(capability: int, supported: Sequence[int]) -> tuple[int, Literal["ptx", "cubin"]] | None:
    """Return the architecture and kind of code to compile; None if the compiler supports only newer GPUs.

    A GPU that the compiler does not know gets PTX, which the driver compiles: machine code runs on some others of its
    generation only.

    >>> target_of(90, [75, 80, 90]), target_of(89, [75, 80, 90]), target_of(120, [75, 90]), target_of(70, [75, 90])
    ((90, 'cubin'), (80, 'ptx'), (90, 'ptx'), None)
    """
    older = [known for known in supported if known <= capability]
    return (max(older), "cubin" if capability in older else "ptx") if older else None


@lru_cache(maxsize=256)
def _compiled_for(source: str, capability: int) -> bytes:
    nvrtc = nvrtc_of_cupy()
    target = target_of(capability, nvrtc.getSupportedArchs())
    if target is None:
        major, minor = nvrtc.getVersion()
        oldest = min(nvrtc.getSupportedArchs())
        raise UsageError(
            f"the GPU has compute capability {capability / 10}, and the kernels need {oldest / 10} or newer with "
            f'NVRTC {major}.{minor}; use a newer GPU, or pip install "topoplan[cuda12]" in place of cuda13'
        )
    architecture, kind = target
    folder = os.environ.get(CACHE)
    if not folder:
        return compile_source(source, architecture, to=kind, nvrtc=nvrtc).code
    key = repr((source, OPTIONS, architecture, kind, tuple(nvrtc.getVersion())))
    path = Path(folder) / f"{hashlib.sha256(key.encode()).hexdigest()}.{kind}"
    code = _read_code(path)
    if code is None:
        code = compile_source(source, architecture, to=kind, nvrtc=nvrtc).code
        with suppress(OSError):  # the cache saves time only
            _write_code(path, code)
    return code


def _read_code(path: Path) -> bytes | None:
    """Return the code of a cache file; None if it is missing or damaged."""
    try:
        digest, code = path.read_bytes().split(b"\n", 1)
    except (OSError, ValueError):
        return None
    return code if digest == hashlib.sha256(code).hexdigest().encode() else None


def _write_code(path: Path, code: bytes) -> None:
    """Write a cache file, complete or not at all; several processes may write it at once."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(hashlib.sha256(code).hexdigest().encode() + b"\n" + code)
    os.replace(temporary, path)


def load_kernel(cupy: ModuleType, source: str, name: str) -> Any:
    """Return a kernel on the current GPU, compiled unless this process or the cache has it for this kind of GPU.

    ``kernel(grid, block, arguments)`` queues it on the current stream, as ``cupy.cuda.function.Function``. Compilation
    takes 0.1 to 0.2 s for a kernel; UsageError if NVRTC is missing or the GPU is too old for it. The cache is the
    folder that ``TOPOPLAN_KERNEL_CACHE`` names; its files are keyed by source, options, architecture and compiler
    version. Only the user may write to it: its contents are loaded into the GPU.
    """
    code = _compiled_for(source, int(cupy.cuda.Device().compute_capability))
    module = cupy.cuda.function.Module()
    module.load(code)
    return module.get_function(name)

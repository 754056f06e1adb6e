"""Compile loops with numba, keep their types for the checker, and add the instructions that numba does not name.

The machine code is cached between processes, in a folder that only this user writes
(`topoplan.private_files.machine_code_folder`), so only the first rank of the first run compiles.
The cache is renewed when the file of a loop changes, so a loop calls only loops of its own file. Constants of other
files are compiled in: `TAKEN_NUMBERS` in the file of the loops stands for them. Instructions of this file are compiled
in too: a change here needs a change of the files that use it. Loops release the interpreter lock.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import numba
from llvmlite import ir
from llvmlite.binding import get_host_cpu_name
from numba.core import event
from numba.extending import intrinsic

from topoplan.private_files import Loop, machine_code

_compilation = event.TimingListener()  # type: ignore[no-untyped-call]
event.register("numba:compile", _compilation)  # type: ignore[no-untyped-call]

COMPILE_SECONDS = 30.0
"""Longest wait for another process that compiles the same loops: it may have been stopped."""

Word = Any
"""A number of 64 bits in compiled loops, where int and NumPy's scalars are one."""

Records = Any
"""An array of records, whose fields are attributes in compiled loops."""


def words(*names: str | tuple[str, int]) -> list[Any]:
    """Return the fields of a record of words of 64 bits; a name may come with their number.

    >>> words("row", ("clock", 2))
    [('row', 'i8'), ('clock', 'i8', (2,))]
    """
    return [(name, "i8") if isinstance(name, str) else (name[0], "i8", (name[1],)) for name in names]


def compiled(loop: Loop) -> Loop:
    """Return the loop as machine code, compiled at its first call with arguments of these types.

    >>> import numpy as np
    >>> from collectives.sparse.index_packing import first_out_of_order
    >>> first_out_of_order(np.array([2, 5, 5, 9]), 10)
    2
    """
    return machine_code(loop)


def compile_seconds() -> float:
    """Return the seconds in which this process has compiled; loops of the cache do not count."""
    return float(_compilation.duration) if _compilation.done else 0.0


@contextmanager
def compiled_by_one(loop: Any) -> Iterator[None]:
    """Make the first call of a file's loops in this block: with a cold cache, one process compiles and the others load.

    ``loop`` is any loop of the file, made by `compiled`.
    """
    source = Path(loop.py_func.__code__.co_filename)
    try:
        # fails if the cache cannot be written
        mark = (Path(loop.stats.cache_path or source) / f"{source.stem}.compiled").open("a+")
    except OSError:
        yield
        return
    with mark:
        found = source.stat()
        state = f"{found.st_mtime_ns} {found.st_size} {numba.__version__} {get_host_cpu_name()}"
        mark.seek(0)
        if mark.read() == state:
            yield
            return
        _lock(mark.fileno())
        yield
        mark.truncate(0)
        mark.write(state)


def _lock(descriptor: int) -> None:
    """Lock a file until it is closed or the process ends; give up after `COMPILE_SECONDS`."""
    end = time.monotonic() + COMPILE_SECONDS
    while time.monotonic() < end:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.02)


def _instruction(signature: Any, build: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for compiled loops whose code ``build`` makes, which takes numba's builder and the values."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        made = build(builder, *values)
        return context.get_dummy_value() if signature.return_type == _NOTHING else made

    found = signature, generate
    typed: dict[int, Callable[..., Any]] = {  # numba takes the number of arguments from these functions
        0: lambda context: found,
        1: lambda context, a: found,
        2: lambda context, a, b: found,
        5: lambda context, a, b, c, d, e: found,
    }
    return cast(Callable[..., Any], intrinsic(typed[len(signature.args)]))


_WORD, _FALSE = ir.IntType(64), ir.Constant(ir.IntType(1), 0)
_INT64, _NOTHING = numba.types.int64, numba.types.void


def _at(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _WORD.as_pointer())


def _call(builder: Any, function: Any, *arguments: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_WORD] * len(arguments))
    builder.call(builder.inttoptr(function, kind.as_pointer()), arguments)


def _stream(builder: Any, *addresses: Any) -> None:
    line = ir.VectorType(_WORD, 8).as_pointer()
    target, source = (builder.inttoptr(address, line) for address in addresses)
    stored = builder.store(builder.load(source, align=1), target, align=64)
    stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


trailing_zeros = _instruction(_INT64(numba.types.uint64), lambda builder, bits: builder.cttz(bits, _FALSE))
"""Zero bits below the lowest set one of a uint64; 64 for zero. For compiled loops only, as all that follow."""

leading_zeros = _instruction(_INT64(_INT64), lambda builder, bits: builder.ctlz(bits, _FALSE))
"""Zero bits above the highest set one of an int64 that is not negative; 64 for zero."""

pointer_to = _instruction(
    numba.types.voidptr(_INT64),
    lambda builder, address: builder.inttoptr(address, ir.IntType(8).as_pointer()),
)
"""Return an address as a pointer, of which `carray` makes an array."""

carray: Any = cast(Any, numba).carray
"""Return the array of a type that lies at a pointer: the pointer, the elements and the dtype."""

load_word = _instruction(
    _INT64(_INT64), lambda builder, address: builder.load_atomic(_at(builder, address), "acquire", 8)
)
"""Return the word of 64 bits at an address; later loads are at least as new (acquire)."""

store_word = _instruction(
    _NOTHING(_INT64, _INT64),
    lambda builder, address, value: builder.store_atomic(value, _at(builder, address), "release", 8),
)
"""Set the word at an address; a reader that sees it also sees earlier stores (release)."""

add_to_word = _instruction(
    _INT64(_INT64, _INT64),
    lambda builder, address, value: builder.atomic_rmw("add", _at(builder, address), value, "seq_cst"),
)
"""Add to the word at an address in one step, and return what it was."""

full_fence = _instruction(_NOTHING(), lambda builder: builder.fence("seq_cst"))
"""Make all earlier stores visible before any later load (store, fence, then look for sleepers)."""

stream_line = _instruction(_NOTHING(_INT64, _INT64), _stream)
"""Copy 64 bytes to a multiple of 64 with non-temporal stores: others see them only after the next `full_fence`."""

call_numpy = _instruction(_NOTHING(*[_INT64] * 5), _call)
"""Call a loop of a numpy ufunc: its address, those of arguments, lengths and steps, and the loop's data."""


def from_system(name: str, *, arguments: int) -> Callable[..., Word]:
    """Return a function of the C library for compiled loops, from and to numbers and addresses."""
    words = [numba.types.int64] * arguments
    found = numba.types.ExternalFunction(name, numba.types.int64(*words))
    return cast(Callable[..., Word], found)

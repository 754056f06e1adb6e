"""Compile loops with numba, keep their types for the checker, and add the instructions that numba does not name.

The machine code is cached between processes if the cache can be written, so only the first rank of the first run
compiles. The cache is renewed when the file of a loop changes, so a loop calls only loops of its own file.
Constants of other files are compiled in: `TAKEN_NUMBERS` in the file of the loops stands for them. Instructions of
this file are compiled in too: a change here needs a change of the files that use it. Loops release the interpreter
lock.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite.binding import get_host_cpu_name
from numba.extending import intrinsic

Loop = TypeVar("Loop", bound=Callable[..., Any])

COMPILE_SECONDS = 30.0
"""Longest wait for another process that compiles the same loops: it may have been stopped."""

Word = Any
"""A number of 64 bits inside compiled loops, where int and the scalars of NumPy are one."""


def compiled(loop: Loop) -> Loop:
    """The same loop as machine code, compiled when it is first called with arguments of these types.

    Parameters
    ----------
    loop : callable
        Takes arrays and numbers; anything that numba knows.

    Examples
    --------
    >>> import numpy as np
    >>> from collectives.sparse.index_packing import first_out_of_order
    >>> first_out_of_order(np.array([2, 5, 5, 9]), 10)
    2
    """
    try:
        kept = numba.njit(cache=True, nogil=True)(loop)
    except RuntimeError:  # neither the package nor the user's cache can be written
        kept = numba.njit(nogil=True)(loop)
    return cast(Loop, kept)


@contextmanager
def compiled_by_one(loop: Any) -> Iterator[None]:
    """Call the loops of a file in here first: where nothing is kept of it yet, one process after another does.

    The first compiles, and the others load what it has kept. Ranks that start together would else all compile the same.

    Parameters
    ----------
    loop : callable
        One of the file's, made by `compiled`.
    """
    source = Path(loop.py_func.__code__.co_filename)
    try:
        # fails where nothing can be kept
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
    """Until the file is closed, or the process gone; not at all where that takes too long."""
    end = time.monotonic() + COMPILE_SECONDS
    while time.monotonic() < end:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.02)


def _trailing_zeros(context: Any, bits: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        zero_is_defined = context.get_constant(numba.types.boolean, False)
        return builder.cttz(arguments[0], zero_is_defined)

    return numba.types.int64(numba.types.uint64), generate


def _leading_zeros(context: Any, bits: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        zero_is_defined = context.get_constant(numba.types.boolean, False)
        return builder.ctlz(arguments[0], zero_is_defined)

    return numba.types.int64(numba.types.int64), generate


trailing_zeros: Callable[[Word], Word] = cast(Callable[[Word], Word], intrinsic(_trailing_zeros))
"""Zero bits below the lowest one of a uint64; 64 where there is none. For compiled loops only."""

leading_zeros: Callable[[Word], Word] = cast(Callable[[Word], Word], intrinsic(_leading_zeros))
"""Zero bits above the highest one of an int64 that is not negative; 64 where there is none. For compiled loops only."""


def _pointer(builder: Any, address: Any) -> Any:
    from llvmlite import ir

    return builder.inttoptr(address, ir.IntType(64).as_pointer())


def _load(context: Any, address: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_pointer(builder, arguments[0]), "acquire", 8)

    return numba.types.int64(numba.types.int64), generate


def _store(context: Any, address: Any, value: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _pointer(builder, arguments[0]), "release", 8)
        return context.get_dummy_value()

    return numba.types.void(numba.types.int64, numba.types.int64), generate


def _add(context: Any, address: Any, value: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, arguments[0]), arguments[1], "seq_cst")

    return numba.types.int64(numba.types.int64, numba.types.int64), generate


def _fence(context: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return numba.types.void(), generate


def _call(context: Any, function: Any, arguments: Any, lengths: Any, steps: Any, data: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        from llvmlite import ir

        word = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [word] * 4)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return numba.types.void(*[numba.types.int64] * 5), generate


def _stream(context: Any, target: Any, source: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        from llvmlite import ir

        word = ir.IntType(64)
        line = ir.VectorType(word, 8).as_pointer()
        target, source = (builder.inttoptr(address, line) for address in arguments)
        stored = builder.store(builder.load(source, align=1), target, align=64)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return numba.types.void(*[numba.types.int64] * 2), generate


load_word: Callable[[Word], Word] = cast(Callable[[Word], Word], intrinsic(_load))
"""The word of 64 bits at an address; what is read after it is at least as new (acquire)."""

store_word: Callable[[Word, Word], None] = cast(Callable[[Word, Word], None], intrinsic(_store))
"""Set the word at an address; what was written before is seen by whoever sees it (release)."""

add_to_word: Callable[[Word, Word], Word] = cast(Callable[[Word, Word], Word], intrinsic(_add))
"""Add to the word at an address in one step, and return what it was."""

full_fence: Callable[[], None] = cast(Callable[[], None], intrinsic(_fence))
"""What is written before is seen by all before anything is read after it: post, fence, then look who sleeps."""

stream_line: Callable[[Word, Word], None] = cast(Callable[[Word, Word], None], intrinsic(_stream))
"""Copy 64 bytes to a multiple of 64, past the caches: others see them only after the next `full_fence`."""

call_numpy: Callable[[Word, Word, Word, Word, Word], None] = cast(
    Callable[[Word, Word, Word, Word, Word], None], intrinsic(_call)
)
"""Call a loop of a numpy ufunc: its address, those of arguments, lengths and steps, and what numpy keeps with it."""


def from_system(name: str, *, arguments: int) -> Callable[..., Word]:
    """A function of the C library, for compiled loops only; what it takes are numbers and addresses."""
    words = [numba.types.int64] * arguments
    found = numba.types.ExternalFunction(name, numba.types.int64(*words))
    return cast(Callable[..., Word], found)

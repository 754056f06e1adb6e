"""Compiling the loops of selection with numba, and the one machine instruction that it does not offer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """The function as machine code, made when it is first called and kept on disk where there is a place for it."""
    try:
        kept = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # neither the package nor the user's cache can be written
        kept = numba.njit(nogil=True)(function)
    return cast(Function, kept)


def _trailing_zeros(context: Any, word: Any) -> Any:
    """How many zero bits a 64-bit word ends with; the word must not be zero."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return numba.types.uint64(numba.types.uint64), generate


trailing_zeros = cast(Callable[[Any], Any], intrinsic(_trailing_zeros))

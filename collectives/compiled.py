"""Compilation of loops by numba, with the types kept for the checker, and the bit counts that numba has no name for.

The machine code is kept between processes where there is a place for it, so that only the first rank of the first run
waits for it. What is kept is renewed when the file of a loop changes, so loops call only loops of their own file.
They let go of the interpreter lock: the threads of a back end run on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.extending import intrinsic

Loop = TypeVar("Loop", bound=Callable[..., Any])

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
    >>> from collectives.wire.golomb_code import first_out_of_order
    >>> first_out_of_order(np.array([2, 5, 5, 9]), 10)
    2
    """
    try:
        kept = numba.njit(cache=True, nogil=True)(loop)
    except RuntimeError:  # neither the package nor the user's cache can be written
        kept = numba.njit(nogil=True)(loop)
    return cast(Loop, kept)


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

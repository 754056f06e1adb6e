"""Exact selection and error feedback on a GPU with CuPy: the same results as on the processor.

The key of an element is its bits without the sign, as an unsigned integer: magnitudes order as keys, and every NaN is
above infinity. The k largest keys are chosen, of equal ones at the border those of lowest index. See `gpu_passes` for
what is read how often.
"""

from __future__ import annotations

import operator
from types import ModuleType
from typing import Any

import numpy as np

from collectives.arrays.cupy_arrays import load_cupy
from collectives.arrays.current_device import on_device
from collectives.kernels.selection_source import KEY_BITS
from collectives.selection.gpu_addend import Addend
from collectives.selection.gpu_passes import Passes
from topoplan.errors import UsageError


def topk_gpu(x: Any, k: int, *, nan: str = "refuse") -> tuple[Any, Any]:
    """The k elements of largest magnitude, exactly, in two reads of the data; in one where a sample gives a good bound.

    Everything runs on the current stream of the array's GPU, which has come to its end when the call returns.

    Parameters
    ----------
    x : CuPy array
        d elements of float16, float32, float64, or bfloat16 as its bits in uint16; indices count in C order. What is
        not contiguous is copied.
    k : int
        0 to d.
    nan : str
        ``"refuse"`` an x with NaN, or let NaN be the ``"largest"``, ordered by its bits.

    Returns
    -------
    indices : (k,) CuPy array of int32, or of int64 from 2**31 elements on
        Ascending.
    values : (k,) CuPy array of x's dtype
        ``x[indices]``.

    Raises
    ------
    UsageError
        x is no CuPy array of these dtypes, k is not in 0 to d, there is a NaN, or there is no GPU.
    """
    cupy = load_cupy("gpu selection")
    dtype = _dtype(cupy, x, "x")
    count = _checked(k, x.size)
    refuses = _refuses(nan)
    with on_device(cupy, x.device.id):
        line = cupy.ascontiguousarray(x).reshape(-1)
        passes = Passes(cupy, line, dtype, count, refuses=refuses, clears=False)
        passes.select()
        return passes.indices, passes.values


def feed_gpu(
    residual: Any, gradient: Any, k: int, *, threshold: Any = None, nan: str = "refuse"
) -> tuple[Any, Any, Any]:
    """Error feedback: add the gradient to the residual, take out the k entries of largest magnitude.

    Moves 16 bytes per float32 element, and 12 where a sample or the previous step's threshold gives a bound that at
    least k entries, and not far more, are above; the result is the same. Conserves: what is returned and what stays in
    the residual add up to residual + gradient.

    Parameters
    ----------
    residual : CuPy array
        Contiguous; d elements as in `topk_gpu`. Becomes residual + gradient, with zeros where entries were taken.
    gradient : CuPy array
        Of the same shape and dtype, on the same GPU. What is not contiguous is copied.
    k : int
        0 to d.
    threshold : CuPy array, optional
        As an earlier step returned it. It affects only how fast the result is there.
    nan : str
        As in `topk_gpu`; where a NaN is refused, the residual holds the sum already and nothing is taken out.

    Returns
    -------
    indices, values : (k,) CuPy arrays
        As `topk_gpu` of the sum.
    threshold : (1,) CuPy array of uint64, or None where k is 0
        The key of the smallest entry that was taken, for the next step.

    Raises
    ------
    UsageError
        As `topk_gpu`; the two arrays do not fit together, or the residual is not contiguous.
    """
    cupy = load_cupy("gpu selection")
    dtype = _dtype(cupy, residual, "residual")
    if _dtype(cupy, gradient, "gradient") != dtype or gradient.shape != residual.shape:
        raise UsageError(
            f"the gradient is {gradient.dtype} of shape {gradient.shape} and the residual {residual.dtype} of shape "
            f"{residual.shape}; pass arrays of one dtype and shape"
        )
    if gradient.device.id != residual.device.id:
        raise UsageError(
            f"the gradient is on GPU {gradient.device.id} and the residual on GPU {residual.device.id}; "
            "put both on one"
        )
    if not residual.flags.c_contiguous:
        raise UsageError(
            f"the residual has strides {residual.strides}, so it cannot be changed in place; "
            "pass a contiguous array"
        )
    count = _checked(k, residual.size)
    refuses = _refuses(nan)
    with on_device(cupy, residual.device.id):
        bound = _bound(cupy, threshold, residual.device.id)
        line, more = residual.reshape(-1), cupy.ascontiguousarray(gradient).reshape(-1)
        passes = Passes(cupy, line, dtype, count, refuses=refuses, clears=True)
        passes.select(Addend(more), bound)
        return passes.indices, passes.values, passes.threshold if count else None


def _dtype(cupy: ModuleType, array: Any, what: str) -> str:
    """What the elements of an array are."""
    if not isinstance(array, cupy.ndarray):
        raise UsageError(
            f"{what} is a {type(array).__name__} instead of a CuPy array; put it on the GPU with cupy.asarray"
        )
    name = "bfloat16" if array.dtype.name == "uint16" else str(array.dtype.name)
    if name not in KEY_BITS:
        raise UsageError(
            f"{what} has dtype {array.dtype}, which has no magnitudes to select by; "
            "use float16, float32, float64, or bfloat16 as its bits in uint16"
        )
    return name


def _checked(k: int, most: int) -> int:
    try:
        count = operator.index(k)
    except TypeError:
        raise UsageError(f"k is {k!r}; pass a whole number from 0 to {most}") from None
    if not 0 <= count <= most:
        raise UsageError(f"k is {count} and there are {most} elements; pass a whole number from 0 to {most}")
    return count


def _refuses(nan: str) -> bool:
    if nan not in ("refuse", "largest"):
        raise UsageError(f"nan is {nan!r}; pass 'refuse' or 'largest'")
    return nan == "refuse"


def _bound(cupy: Any, threshold: Any, device: int) -> Any:
    if threshold is None:
        return None
    fits = isinstance(threshold, cupy.ndarray) and threshold.dtype == np.uint64 and threshold.size == 1
    if not fits or threshold.device.id != device:
        raise UsageError(
            f"threshold is a {type(threshold).__name__} that no step on GPU {device} returned; pass what feed_gpu "
            "returned for this residual, or None"
        )
    return threshold

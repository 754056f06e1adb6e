"""Single entries of arrays on a GPU: adding to them, and making them zero.

A thread does one entry, so there are no atomics, and calls on one stream follow each other: sums have the bits that
numpy's have in the same order of calls.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.arrays.cupy_arrays import load_cupy
from collectives.arrays.current_device import on_device
from collectives.kernels.feedback_source import GIVEN, entries_form
from collectives.kernels.selection_launching import selection_kernels
from collectives.kernels.source import INDICES
from collectives.kernels.work import THREADS, TILE_BYTES
from topoplan.errors import UsageError


def add_entries_gpu(total: Any, indices: Any, values: Any) -> None:
    """``total[indices] += values``, on the current stream, which has come to its end when the call returns.

    Parameters
    ----------
    total : CuPy array
        d elements of float32 or float64, contiguous; indices count in C order.
    indices : (n,) CuPy array of int32 or int64
        Each at most once: of equal ones only some are added.
    values : (n,) CuPy array of total's dtype

    Raises
    ------
    UsageError
        The arrays do not fit together; nothing has changed. Or an index is not in 0 to d - 1: then the others have
        been added, and nothing else is touched.
    """
    cupy: Any = load_cupy("gpu selection")
    _check(cupy, total, indices, values)
    with on_device(cupy, total.device.id):
        index, number = cupy.ascontiguousarray(indices), cupy.ascontiguousarray(values)
        if not index.size:
            return
        outside = cupy.zeros(1, dtype=np.uint64)
        _launch(
            cupy, "add", total, index, (np.int64(total.size), index, number, np.int64(index.size), outside)
        )
        lost = int(outside.get()[0])
    if lost:
        raise UsageError(
            f"{lost} of {indices.size} indices are not in 0 to {total.size - 1}, where the array's elements are; "
            "pass the indices of a selection from an array of this size"
        )


def zero_entries_gpu(line: Any, indices: Any) -> None:
    """``line[indices] = 0``, on the current stream.

    Parameters
    ----------
    line : (d,) CuPy array of float32 or float64
        Contiguous, on the GPU that is current.
    indices : (n,) CuPy array of int32 or int64
        Contiguous, and in 0 to d - 1 as those of a selection are: this is not looked at.
    """
    if indices.size:
        cupy = load_cupy("gpu selection")
        _launch(cupy, "zero", line, indices, (indices, np.int64(indices.size)))


def _launch(cupy: Any, what: str, array: Any, indices: Any, arguments: tuple[Any, ...]) -> None:
    kernels = selection_kernels(cupy, int(array.device.id))
    kernels.launch(
        entries_form(what, indices.dtype.name),
        array.dtype.name,
        kernels.blocks(indices.size, TILE_BYTES // THREADS),  # a thread for each entry
        (array, *arguments),
    )


def _check(cupy: Any, total: Any, indices: Any, values: Any) -> None:
    for what, array in (("the total", total), ("indices", indices), ("values", values)):
        if not isinstance(array, cupy.ndarray):
            raise UsageError(
                f"{what} come as a {type(array).__name__} instead of a CuPy array; put them on the GPU with "
                "cupy.asarray"
            )
    if total.dtype.name not in GIVEN or values.dtype != total.dtype or indices.dtype.name not in INDICES:
        raise UsageError(
            f"values of {values.dtype} at indices of {indices.dtype} cannot be added to {total.dtype}; pass "
            f"{' or '.join(GIVEN)}, the same for both, at indices of {' or '.join(INDICES)}"
        )
    if indices.ndim != 1 or values.shape != indices.shape:
        raise UsageError(
            f"indices of shape {indices.shape} and values of shape {values.shape} are no entries; "
            "pass a line of each, of one length"
        )
    if not total.flags.c_contiguous:
        raise UsageError(
            f"the total has strides {total.strides}, so it cannot be changed in place; pass a contiguous array"
        )
    places = {total.device.id, indices.device.id, values.device.id}
    if len(places) > 1:
        raise UsageError(f"total, indices and values are on GPUs {sorted(places)}; put all on one")

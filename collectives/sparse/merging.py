"""Entries of several ranks added up, and the largest of them chosen again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.selection.topk import topk
from collectives.sparse.entry_arrays import Entries

Array = NDArray[Any]


def merged(parts: Sequence[Entries]) -> Entries:
    """Entries of several ranks in ascending order, the values of one index added up in the order of the ranks.

    Examples
    --------
    >>> indices, values = merged([(np.array([1, 4]), np.float32([1, 2])), (np.array([4, 5]), np.float32([3, 4]))])
    >>> indices.tolist(), values.tolist()
    ([1, 4, 5], [1.0, 5.0, 4.0])
    """
    indices = np.concatenate([part[0] for part in parts])
    indices.sort()  # np.unique would hash them, which takes much longer
    first = np.ones(len(indices), dtype=np.bool_)
    np.not_equal(indices[1:], indices[:-1], out=first[1:])
    indices = indices[first]
    values = np.zeros(len(indices), parts[0][1].dtype)
    for own, added in parts:
        values[np.searchsorted(indices, own)] += added
    return indices, values


def largest_entries(indices: Array, values: Array, k: int) -> tuple[Entries, Entries]:
    """Of entries in ascending order the k of largest magnitude, ties by lowest index, and the others.

    Examples
    --------
    >>> kept, left = largest_entries(np.array([1, 4, 6]), np.float32([2, -3, 2]), 2)
    >>> kept[0].tolist(), left[0].tolist()
    ([1, 4], [6])
    """
    if k >= len(indices):
        return (indices, values), (indices[:0], values[:0])
    # a NaN, as infinities of both signs make, goes to everybody
    chosen, _ = topk(values, k, nan="largest")
    rest = np.ones(len(indices), dtype=np.bool_)
    rest[chosen] = False
    return (indices[chosen], values[chosen]), (indices[rest], values[rest])

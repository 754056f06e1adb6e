"""Weights and gradients of a plain loop's layers: checked before anything is computed, and as lines to compute with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import UsageError

Array = NDArray[Any]

Layout = list[tuple[tuple[int, ...], np.dtype[Any]]]
"""Shape and dtype of each layer."""

DTYPES = (np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64))
"""Of weights."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer in one step, as lines of its working dtype.

    Parameters
    ----------
    weights, gradient : (size,) arrays
    kept : dict of (size,) arrays
        What the optimiser keeps for it between steps.
    decay : float
    """

    weights: Array
    gradient: Array
    kept: dict[str, Array]
    decay: float


def layers_of(weights: Sequence[Array], gradients: Sequence[Array]) -> Layout:
    """Shape and dtype of each layer.

    Raises
    ------
    UsageError
        Weights cannot be updated in place, or a gradient does not fit its weights; names the layer.

    Examples
    --------
    >>> layers_of([np.zeros((2, 3))], [np.zeros((3, 2))])
    Traceback (most recent call last):
    ...
    topoplan.errors.UsageError: layer 0 has weights of shape (2, 3) and a gradient of (3, 2); give the same shape
    """
    if len(weights) != len(gradients):
        raise UsageError(
            f"{len(weights)} layers have {len(gradients)} gradients; give one for each, zeros if need be"
        )
    return [_layer(*both) for both in zip(range(len(weights)), weights, gradients, strict=True)]


def _layer(layer: int, weights: Array, gradient: Array) -> tuple[tuple[int, ...], np.dtype[Any]]:
    # a gradient that was computed from an array without dimensions is a scalar
    for what, array, kinds in (
        ("weights", weights, np.ndarray),
        ("a gradient", gradient, np.ndarray | np.floating),
    ):
        if not isinstance(array, kinds):
            raise UsageError(f"layer {layer} has {what} of type {type(array).__name__}; give a numpy array")
    if weights.dtype not in DTYPES:
        raise UsageError(f"layer {layer} has weights of {weights.dtype}; use float16, float32 or float64")
    if not (weights.flags.c_contiguous and weights.flags.writeable):
        raise UsageError(
            f"layer {layer} has weights that are not contiguous or cannot be written to; give a plain array"
        )
    if weights.shape != gradient.shape:
        raise UsageError(
            f"layer {layer} has weights of shape {weights.shape} and a gradient of {gradient.shape}; "
            "give the same shape"
        )
    if gradient.dtype.kind != "f" or not np.can_cast(gradient.dtype, working(weights.dtype)):
        raise UsageError(
            f"layer {layer} has weights of {weights.dtype} and a gradient of {gradient.dtype}, which is wider; "
            f"convert it to {working(weights.dtype)}"
        )
    return weights.shape, weights.dtype


def difference(one: Sequence[tuple[object, object]], other: Sequence[tuple[object, object]]) -> str:
    """Where two lists of layers differ first, as a clause.

    Examples
    --------
    >>> difference([((3,), "float32"), ((2,), "float32")], [((3,), "float32"), ((2,), "float64")])
    'layer 1 is (2,) of float32 and was (2,) of float64'
    """
    if len(one) != len(other):
        return f"there are {len(one)} and were {len(other)}"
    first = next(layer for layer in range(len(one)) if one[layer] != other[layer])
    here, before = (f"{shape} of {dtype}" for shape, dtype in (one[first], other[first]))
    return f"layer {first} is {here} and was {before}"


def check_kept(
    kept: Sequence[Sequence[dict[str, Array]]], lines: list[tuple[int, np.dtype[Any]]], *, ranks: int
) -> None:
    """Raise `UsageError` where what was kept is not of these layers, on so many ranks in this process."""
    if len(kept) != ranks:
        raise UsageError(f"the state is of {len(kept)} ranks in a process, not of {ranks}; take another one")
    for each in kept:
        for name in each[0] if each else ():
            found = [(one[name].size, one[name].dtype) for one in each]
            if found != lines:
                raise UsageError(
                    f"the state was saved with other layers: in its {name}, {difference(lines, found)}; "
                    "take one that was saved with these"
                )
        if len(each) != len(lines):
            raise UsageError(f"the state is of {len(each)} layers, not of {len(lines)}; take another one")


def working(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What weights of a dtype are computed in."""
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype

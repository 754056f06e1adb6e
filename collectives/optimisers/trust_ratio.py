"""How long a step each layer takes: the rates of LARS and LAMB, from norms.

LARS: Y. You, I. Gitman, B. Ginsburg, "Large Batch Training of Convolutional Networks", 2017, equation 6.
LAMB: Y. You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020, algorithm 2
with the identity as its phi.

Where a norm is 0 the rate is 1: a layer that starts at zero would never leave it otherwise.

The norm of a layer is the root of the sum of its squares, added up in float64. Every 256th element goes to the same of
256 sums, and those are added up in order: the bits are the same with any number of threads and on every processor.
Squares of float16 and float32 are exact in float64; with u = 2**-53, the sum of n of them is off by at most
(n / 256 + 512) u of itself, and u more for squares of float64: 1e-9 for 2**31 elements. Squares of float64 numbers
beyond 1e154 overflow.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.compiled import compiled
from topoplan.errors import UsageError

LANES = 256
"""Sums that are added to in turn: enough of them for the widest vector registers, few enough for the nearest cache."""


def lars_rate(
    weight_norm: float, gradient_norm: float, *, coefficient: float = 0.001, weight_decay: float = 0.0
) -> float:
    """The rate of a layer by LARS: ``coefficient |w| / (|g| + weight_decay |w|)``.

    Parameters
    ----------
    weight_norm, gradient_norm : float
        Of the layer's weights w and of its gradient g.
    coefficient : float
        How far a layer trusts its gradient: eta in the paper.
    weight_decay : float
        beta in the paper.

    Returns
    -------
    float
        To be multiplied with the learning rate of all layers.

    Examples
    --------
    >>> lars_rate(10.0, 4.0, coefficient=0.5, weight_decay=0.1)
    1.0
    >>> lars_rate(0.0, 4.0)
    1.0
    """
    if weight_norm == 0 or gradient_norm == 0:
        return 1.0
    return coefficient * weight_norm / (gradient_norm + weight_decay * weight_norm)


def lamb_rate(weight_norm: float, update_norm: float) -> float:
    """The rate of a layer by LAMB: ``|w| / |u|``.

    Parameters
    ----------
    weight_norm, update_norm : float
        Of the layer's weights w and of its update u: Adam's direction and the weight decay.

    Returns
    -------
    float
        To be multiplied with the learning rate of all layers.

    Examples
    --------
    >>> lamb_rate(3.0, 4.0), lamb_rate(3.0, 0.0)
    (0.75, 1.0)
    """
    if weight_norm == 0 or update_norm == 0:
        return 1.0
    return weight_norm / update_norm


def norm(array: NDArray[Any]) -> float:
    """The Euclidean length of an array.

    Parameters
    ----------
    array : float16, float32 or float64 array of any shape
        Contiguous, or it is copied.

    Returns
    -------
    float
        0 of an empty one, NaN where it holds NaN.

    Raises
    ------
    UsageError
        It has another dtype.

    Examples
    --------
    >>> norm(np.array([[3, 0], [0, 4]], np.float16))
    5.0
    """
    if array.dtype.kind != "f" or array.dtype.itemsize > 8 or not array.dtype.isnative:
        raise UsageError(
            f"a layer of dtype {array.dtype} has no norm here; use float16, float32 or float64 arrays"
        )
    line = array.reshape(-1)
    return math.sqrt(_sum_of_squares(line.astype(np.float32) if line.dtype == np.float16 else line))


@compiled
def _sum_of_squares(line: NDArray[Any]) -> Any:
    """Of a float32 or float64 line."""
    sums = np.zeros(LANES)
    whole = line.size - line.size % LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            value = np.float64(line[start + lane])
            sums[lane] += value * value
    total = 0.0
    for i in range(whole, line.size):
        value = np.float64(line[i])
        total += value * value
    for lane in range(LANES):
        total += sums[lane]
    return total

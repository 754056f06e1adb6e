"""LAMB for plain loops: Adam's direction, with a rate for each layer.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon) + weight decay x w;  w = w - learning rate x rate x u

Y. You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020, algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from collectives.communicator.communicator import Communicator
from collectives.compiled import compiled
from collectives.optimisers.layer_arrays import Array, Layer
from collectives.optimisers.layer_norms import norm
from collectives.optimisers.layer_optimiser import LayerOptimiser
from collectives.optimisers.parallel_trust_ratios import Averaging
from collectives.optimisers.trust_ratio import lamb_rate
from topoplan.errors import UsageError


class Lamb(LayerOptimiser):
    """Moves each layer by a rate of `lamb_rate`.

    Owners compute the whole update of their layers before the rates are gathered, and keep it until then: memory for
    a share of the weights. The update of a layer that others own is computed as it moves.

    Parameters
    ----------
    learning_rate : float
    betas : (float, float)
        b1 and b2.
    epsilon : float
    weight_decay : float or sequence of float
        Of all layers, or of each.
    excluded : collection of int
        Layers whose rate is 1, such as biases and the weights of normalisations.
    communicator : Communicator, GradientSynchronizer or None
        Whose ranks share the norms; None for a rank that computes all of them.

    Raises
    ------
    UsageError
        An argument is out of range.

    Examples
    --------
    The first direction of Adam is (1, 1), of length sqrt(2), and the rate is 5 / sqrt(2).

    >>> import numpy as np
    >>> weights, gradient = np.array([3.0, 4.0]), np.array([0.3, 0.4])
    >>> Lamb(0.1, epsilon=1e-12).step([weights], [gradient])
    >>> weights.round(6).tolist()
    [2.646447, 3.646447]
    """

    names = ("first", "second")

    keeps_update = True

    def __init__(
        self,
        learning_rate: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-6,
        weight_decay: float | Sequence[float] = 0.0,
        excluded: Collection[int] = (),
        communicator: Communicator | Averaging | None = None,
    ) -> None:
        super().__init__(
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            excluded=excluded,
            communicator=communicator,
        )
        for beta in betas:
            if not 0 <= beta < 1:
                raise UsageError(f"a beta of {beta} is not in [0, 1); give for example 0.9 and 0.999")
        if not epsilon > 0:
            raise UsageError(f"an epsilon of {epsilon} divides by zero; give for example 1e-6")
        self.betas = betas
        self.epsilon = epsilon

    def _settings(self) -> str:
        return f"betas {self.betas!r}, epsilon {self.epsilon!r}"

    def _measure(self, layer: Layer) -> float:
        assert layer.room is not None, "there is room for what is measured"
        kept = layer.kept
        _direct(
            layer.weights, layer.gradient, kept["first"], kept["second"], layer.room, *self._factors(layer)
        )
        return lamb_rate(norm(layer.weights), norm(layer.room))

    def _move(self, layer: Layer, speed: float) -> None:
        number = layer.weights.dtype.type
        if layer.room is not None:
            _follow(layer.weights, layer.room, number(speed))
        else:
            first, second = layer.kept["first"], layer.kept["second"]
            _go(layer.weights, layer.gradient, first, second, number(speed), *self._factors(layer))

    def _factors(self, layer: Layer) -> tuple[Any, ...]:
        """b1, 1 - b1, b2, 1 - b2, what undoes the bias of m and of sqrt(v), epsilon and the weight decay."""
        number = layer.weights.dtype.type
        first, second = self.betas
        unbiased = 1 / (1 - first**self.steps), 1 / math.sqrt(1 - second**self.steps)
        numbers = (first, 1 - first, second, 1 - second, *unbiased, self.epsilon, layer.decay)
        return tuple(map(number, numbers))


@compiled
def _direction(
    i: int,
    weights: Array,
    gradient: Array,
    first: Array,
    second: Array,
    b1: Any,
    a1: Any,
    b2: Any,
    a2: Any,
    c1: Any,
    c2: Any,
    epsilon: Any,
    decay: Any,
) -> Any:
    """An element of the update, after its moments have taken in the gradient."""
    g = gradient[i]
    m = b1 * first[i] + a1 * g
    v = b2 * second[i] + a2 * g * g
    first[i] = m
    second[i] = v
    # the operator / would look for zeros one by one
    return np.divide(m * c1, np.sqrt(v) * c2 + epsilon) + decay * weights[i]


@compiled
def _direct(
    weights: Array,
    gradient: Array,
    first: Array,
    second: Array,
    update: Array,
    b1: Any,
    a1: Any,
    b2: Any,
    a2: Any,
    c1: Any,
    c2: Any,
    epsilon: Any,
    decay: Any,
) -> None:
    """The update of a layer, which does not move yet."""
    for i in range(weights.size):
        update[i] = _direction(i, weights, gradient, first, second, b1, a1, b2, a2, c1, c2, epsilon, decay)


@compiled
def _follow(weights: Array, update: Array, speed: Any) -> None:
    """Move a layer along its update."""
    for i in range(weights.size):
        weights[i] -= speed * update[i]


@compiled
def _go(
    weights: Array,
    gradient: Array,
    first: Array,
    second: Array,
    speed: Any,
    b1: Any,
    a1: Any,
    b2: Any,
    a2: Any,
    c1: Any,
    c2: Any,
    epsilon: Any,
    decay: Any,
) -> None:
    """Both at once."""
    for i in range(weights.size):
        weights[i] -= speed * _direction(
            i, weights, gradient, first, second, b1, a1, b2, a2, c1, c2, epsilon, decay
        )

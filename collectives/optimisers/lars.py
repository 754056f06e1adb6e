"""LARS for plain loops: momentum, with a rate for each layer.

    v = momentum v + learning rate x rate x (g + weight decay x w);  w = w - v

Y. You, I. Gitman, B. Ginsburg, "Large Batch Training of Convolutional Networks", 2017, algorithm 1: the learning rate
is inside the velocity v, where torch's SGD has it outside.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from collectives.communicator.communicator import Communicator
from collectives.compiled import compiled
from collectives.optimisers.layer_arrays import Array, Layer
from collectives.optimisers.layer_norms import norm
from collectives.optimisers.layer_optimiser import LayerOptimiser
from collectives.optimisers.parallel_trust_ratios import Averaging
from collectives.optimisers.trust_ratio import lars_rate
from topoplan.errors import UsageError


class Lars(LayerOptimiser):
    """Moves each layer by a rate of `lars_rate`.

    Parameters
    ----------
    learning_rate : float
    momentum : float
    weight_decay : float or sequence of float
        Of all layers, or of each.
    coefficient : float
        How far a layer trusts its gradient.
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
    The rate is 0.01 x 5 / 0.5 = 0.1.

    >>> import numpy as np
    >>> weights, gradient = np.array([3.0, 4.0]), np.array([0.3, 0.4])
    >>> Lars(2.0, momentum=0.9, coefficient=0.01).step([weights], [gradient])
    >>> weights.round(12).tolist()
    [2.94, 3.92]
    """

    names = ("velocity",)

    def __init__(
        self,
        learning_rate: float,
        *,
        momentum: float = 0.9,
        weight_decay: float | Sequence[float] = 0.0,
        coefficient: float = 0.001,
        excluded: Collection[int] = (),
        communicator: Communicator | Averaging | None = None,
    ) -> None:
        super().__init__(
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            excluded=excluded,
            communicator=communicator,
        )
        if not 0 <= momentum < 1:
            raise UsageError(f"a momentum of {momentum} is not in [0, 1); give for example 0.9")
        if not coefficient > 0:
            raise UsageError(f"a coefficient of {coefficient} moves nothing; give for example 0.001")
        self.momentum = momentum
        self.coefficient = coefficient

    def _settings(self) -> str:
        return f"momentum {self.momentum!r}, coefficient {self.coefficient!r}"

    def _measure(self, layer: Layer) -> float:
        return lars_rate(
            norm(layer.weights),
            norm(layer.gradient),
            coefficient=self.coefficient,
            weight_decay=layer.decay,
        )

    def _move(self, layer: Layer, speed: float) -> None:
        number = layer.weights.dtype.type
        velocity = layer.kept["velocity"]
        factors = (number(self.momentum), number(speed), number(layer.decay))
        _move(layer.weights, layer.gradient, velocity, *factors)


@compiled
def _move(weights: Array, gradient: Array, velocity: Array, momentum: Any, speed: Any, decay: Any) -> None:
    """One step of a layer."""
    for i in range(weights.size):
        moved = momentum * velocity[i] + speed * (gradient[i] + decay * weights[i])
        velocity[i] = moved
        weights[i] -= moved

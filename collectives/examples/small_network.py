"""Compute the loss and gradients of a two-layer network in numpy, and train it on digits by all ranks of a process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.training.gradient_synchronizer import GradientSynchronizer

Array = NDArray[Any]


def parameters(inputs: int, hidden: int, classes: int, *, seed: int) -> list[Array]:
    """Return weights and biases of both layers, float32, drawn at random; the biases are zero.

    >>> [one.shape for one in parameters(64, 32, 10, seed=0)]
    [(64, 32), (32,), (32, 10), (10,)]
    """
    generator = np.random.default_rng(seed)
    layers = [(inputs, hidden), (hidden, classes)]
    found: list[Array] = []
    for wide, narrow in layers:
        found += [generator.normal(scale=(2 / wide) ** 0.5, size=(wide, narrow)), np.zeros(narrow)]
    return [one.astype(np.float32) for one in found]


def loss_and_gradients(weights: list[Array], shown: Array, labels: Array) -> tuple[float, list[Array]]:
    """Return the mean cross entropy of a batch, ``shown`` (n, inputs) and ``labels`` (n,), and its gradient by
    parameter.

    An untrained network guesses among ten classes:

    >>> weights = [0 * one for one in parameters(4, 3, 10, seed=0)]
    >>> loss, gradients = loss_and_gradients(weights, np.ones((2, 4), np.float32), np.array([0, 1]))
    >>> round(loss, 4), [round(float(one), 2) for one in gradients[3][:3]]
    (2.3026, [-0.4, -0.4, 0.1])
    """
    first, first_bias, second, second_bias = weights
    hidden = np.maximum(shown @ first + first_bias, 0)
    scores = hidden @ second + second_bias
    probabilities = np.exp(scores - scores.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = float(-np.log(probabilities[rows, labels] + 1e-12).mean())
    probabilities[rows, labels] -= 1
    probabilities /= np.float32(len(labels))
    back = (probabilities @ second.T) * (hidden > 0)
    return loss, [shown.T @ back, back.sum(axis=0), hidden.T @ probabilities, probabilities.sum(axis=0)]


HIDDEN, CLASSES = 128, 10
SHAPES = ((64, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,))
ENTRIES = sum(int(np.prod(shape)) for shape in SHAPES)
"""Entries of a gradient of the network of `train`."""


@dataclass(frozen=True, slots=True)
class Training:
    """A finished training.

    losses: of each step, the mean over ranks of the loss of their batches.
    loss: that of all digits at the end.
    weights: of each rank at the end, as one array.
    """

    losses: tuple[float, ...]
    loss: float
    weights: tuple[Array, ...]

    @property
    def same_weights(self) -> bool:
        """Whether the weights of all ranks are equal bit by bit."""
        return all(one.tobytes() == self.weights[0].tobytes() for one in self.weights)


def digits() -> tuple[Array, Array]:
    """Return the 1797 handwritten digits of scikit-learn: pixels (n, 64) from 0 to 1 as float32, and labels (n,)."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return (pixels / 16).astype(np.float32), labels


def train(
    exchange: Callable[[list[Array]], Sequence[Array]],
    *,
    ranks: int = 4,
    steps: int = 1200,
    after_step: Callable[[list[list[Array]]], None] | None = None,
    finish: Callable[[list[list[Array]]], object] | None = None,
) -> Training:
    """Train the network on `digits` with 128 hidden units and 16 digits of each rank in a step; SGD from rate 0.3 to 0.

    exchange: takes the gradient of each rank as one array of `ENTRIES` values, and returns for each rank what it is to
    subtract, times the rate.
    after_step, finish: take the weights of all ranks, and may change them in place (`GradientSynchronizer`).
    """
    pixels, labels = digits()
    replicas = [[_flat(parameters(64, HIDDEN, CLASSES, seed=1))] for _ in range(ranks)]
    losses = []
    for step, batch in enumerate(np.random.default_rng(0).integers(0, len(labels), (steps, ranks, 16))):
        found = [
            loss_and_gradients(_layers(weights), pixels[own], labels[own])
            for (weights,), own in zip(replicas, batch, strict=True)
        ]
        moves = exchange([_flat(gradients) for _, gradients in found])
        for (weights,), move in zip(replicas, moves, strict=True):
            weights -= np.float32(0.3 * (1 - step / steps)) * move
        if after_step is not None:
            after_step(replicas)
        losses.append(float(np.mean([loss for loss, _ in found])))
    if finish is not None:
        finish(replicas)
    last = tuple(weights for (weights,) in replicas)
    return Training(tuple(losses), loss_and_gradients(_layers(last[0]), pixels, labels)[0], last)


def train_with(synchronizer: GradientSynchronizer, **options: Any) -> Training:
    """Train as `train` does, with gradients, and in asynchronous modes weights, averaged by a synchronizer.

    Its parameters are a list for each rank of one array of `ENTRIES` values.
    """
    return train(
        lambda gradients: [move for (move,) in synchronizer.step([[one] for one in gradients])],
        after_step=synchronizer.after_step,
        finish=synchronizer.finish,
        **options,
    )


def _flat(arrays: Sequence[Array]) -> Array:
    return np.concatenate([one.ravel() for one in arrays])


def _layers(weights: Array) -> list[Array]:
    ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES])[:-1]
    return [part.reshape(shape) for part, shape in zip(np.split(weights, ends), SHAPES, strict=True)]

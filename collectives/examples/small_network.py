"""Compute the loss and gradients of a two-layer network in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

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

"""Compute the loss and gradients of a two-layer network in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def parameters(inputs: int, hidden: int, classes: int, *, seed: int) -> list[Array]:
    """Weights and biases of both layers, float32, drawn at random; the biases are zero.

    Examples
    --------
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
    """Mean cross entropy of a batch, and its gradient for each parameter.

    Parameters
    ----------
    weights : list of arrays
        As `parameters` makes them.
    shown : (n, inputs) float32
    labels : (n,) integers

    Examples
    --------
    Before it has learnt anything, ten classes are ten guesses:

    >>> weights = [0 * one for one in parameters(4, 3, 10, seed=0)]
    >>> loss, gradients = loss_and_gradients(weights, np.ones((2, 4), np.float32), np.array([0, 1]))
    >>> round(loss, 4), [round(float(one), 2) for one in gradients[3][:3]]
    (2.3026, [-0.4, -0.4, 0.1])
    """
    first, first_bias, second, second_bias = weights
    hidden = np.maximum(shown @ first + first_bias, 0)
    scores = hidden @ second + second_bias
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = float(-np.log(chances[rows, labels] + 1e-12).mean())
    chances[rows, labels] -= 1
    chances /= np.float32(len(labels))
    back = (chances @ second.T) * (hidden > 0)
    return loss, [shown.T @ back, back.sum(axis=0), hidden.T @ chances, chances.sum(axis=0)]

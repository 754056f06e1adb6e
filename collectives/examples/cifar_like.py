"""Images like CIFAR-10's, made here, and a small convolutional network for them.

3 x 32 x 32, ten classes. A class is a handful of coloured blobs; an image shows its class's blobs shifted, scaled and
dimmed at random, under noise. One label of six is wrong, as if drawn by chance, so that a loss has a floor that it
cannot fall below.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

TRAINED, TESTED = 8192, 4096

CLASSES, SIDE = 10, 32
BLOBS = 4
WRONG = 1 / 6
"""Share of the labels that are drawn by chance."""


def images(count: int, *, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Images and their classes.

    Parameters
    ----------
    count : int
    seed : int
        Of the images; the classes are always the same.

    Returns
    -------
    images : (count, 3, 32, 32) float32
        Zero mean, values mostly within 3.
    labels : (count,) int64

    Examples
    --------
    >>> shown, labels = images(5, seed=1)
    >>> shown.shape, labels.tolist()
    ((5, 3, 32, 32), [4, 5, 5, 9, 0])
    """
    classes = np.random.default_rng(10)
    places = classes.uniform(8, SIDE - 8, (CLASSES, BLOBS, 2))
    widths = classes.uniform(2, 5, (CLASSES, BLOBS))
    colours = classes.normal(size=(CLASSES, BLOBS, 3))
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, CLASSES, count)
    shifts = generator.uniform(-6, 6, (count, 1, 2))
    sizes = generator.uniform(0.7, 1.4, (count, 1))
    dimmed = generator.uniform(0.5, 1.5, (count, BLOBS))
    axis = np.arange(SIDE)
    centres = places[labels] + shifts
    spread = 2 * (widths[labels] * sizes) ** 2
    across = np.exp(-((axis - centres[..., :1]) ** 2) / spread[..., None])
    down = np.exp(-((axis - centres[..., 1:]) ** 2) / spread[..., None])
    strength = colours[labels] * dimmed[..., None]
    shown = np.einsum("nbc,nby,nbx->ncyx", strength, down, across)
    shown += generator.normal(scale=0.3, size=shown.shape)
    drawn = generator.random(count) < WRONG
    told = np.where(drawn, generator.integers(0, CLASSES, count), labels)
    return (shown - shown.mean()).astype(np.float32), told


def network() -> nn.Module:
    """Two convolutions and two layers: 137 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 64, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@torch.no_grad()
def tested(model: nn.Module, shown: torch.Tensor, labels: torch.Tensor) -> float:
    """The mean cross entropy of a model on images."""
    loss = float(nn.functional.cross_entropy(model(shown), labels))
    return loss if math.isfinite(loss) else math.inf

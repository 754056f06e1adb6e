"""Test that the training of the notebooks is the same for every way to average gradients."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

import topoplan
from collectives import GradientSynchronizer, LocalSGD
from collectives.examples.small_network import ENTRIES, Array, train, train_with

# importing it takes a second in each process of the tests
if find_spec("sklearn") is None:
    pytest.skip(
        'the digits are those of scikit-learn: pip install "topoplan[notebooks]"', allow_module_level=True
    )


def by_numpy(gradients: list[Array]) -> list[Array]:
    return [np.mean(gradients, axis=0)] * len(gradients)


def test_a_synchronizer_trains_as_numpy_does() -> None:
    plan, weights = topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7]), [[np.zeros(ENTRIES, np.float32)]] * 4
    with GradientSynchronizer(weights, plan, backend="loopback") as synchronizer:
        trained = train_with(synchronizer, steps=30)
    wanted = train(by_numpy, steps=30)
    np.testing.assert_allclose(trained.losses, wanted.losses, rtol=1e-4)
    assert trained.same_weights
    assert wanted.same_weights
    assert trained.loss < 0.7 * trained.losses[0]


def test_ranks_that_average_weights_differ_until_they_finish() -> None:
    """Three steps of local SGD end before the average of the eighth; `finish` makes the weights the same."""
    plan, weights = topoplan.plan("dgx-1v", gpus=[1, 4]), [[np.zeros(ENTRIES, np.float32)]] * 2
    with GradientSynchronizer(weights, plan, backend="loopback", sync=LocalSGD(8)) as synchronizer:
        assert train_with(synchronizer, ranks=2, steps=3).same_weights
    assert not train(lambda gradients: gradients, ranks=2, steps=3).same_weights

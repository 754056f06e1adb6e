"""PowerSGD, codes and significant entries in a training loop: loss on new samples and bytes, against whole gradients.

Four ranks train a network of two layers on the handwritten digits of scikit-learn; the same samples in every run.
"""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np

import topoplan
from collectives import GradientSynchronizer
from collectives.examples.small_network import loss_and_gradients, parameters
from collectives.training.gradient_filters import Quantize, Threshold
from collectives.training.low_rank import LowRank
from tests.bench.tables import Table

RANKS, STEPS, BATCH, RATE = 4, 300, 16, 0.2
HIDDEN, KINDS, SHOWN = 128, 10, 1400


def main() -> None:
    if find_spec("sklearn") is None:
        print("not measured: scikit-learn, which has the digits, is not installed")
        return
    print(f"# {RANKS} ranks, {STEPS} steps of {BATCH} samples each, 64 x {HIDDEN} x {KINDS}, rate {RATE}")
    table = Table("gradients|<26", "loss|9.4f", "bytes of whole|16.1%")
    runs: list[tuple[str, LowRank | Quantize | Threshold | None]] = [("whole", None)]
    for rank in (1, 2, 4):
        runs += [
            (f"rank {rank}", LowRank(rank, matrices="bucket")),
            (f"rank {rank}, no feedback", LowRank(rank, feedback=False, matrices="bucket")),
            (f"rank {rank}, by layers", LowRank(rank, matrices="layers")),
        ]
    runs += [(f"{bits} bits", Quantize(bits)) for bits in (16, 8)]
    for threshold in (0.01, 0.03, 0.1):
        runs += [
            (f"above {threshold}", Threshold(threshold)),
            (f"above {threshold}, no feedback", Threshold(threshold, feedback=False)),
        ]
    runs.append(("above 0.03, third time", Threshold(0.03, admission=3)))
    for name, how in runs:
        table.row(name, *trained(how))


def trained(how: LowRank | Quantize | Threshold | None) -> tuple[float, float]:
    """Loss on samples that were not shown, and the share of all bytes that travelled."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels, kinds = (digits.data / 16).astype(np.float32), digits.target
    draw = np.random.default_rng(1)
    weights = parameters(64, HIDDEN, KINDS, seed=2)
    given = [[one.copy() for one in weights] for _ in range(RANKS)]
    with GradientSynchronizer(
        given,
        topoplan.plan("v100x4"),
        backend="loopback",
        compression=how,
    ) as synchronizer:
        for _ in range(STEPS):
            drawn = [draw.integers(0, SHOWN, BATCH) for _ in range(RANKS)]
            gradients = [loss_and_gradients(weights, pixels[one], kinds[one])[1] for one in drawn]
            for one, average in zip(weights, synchronizer.step(gradients)[0], strict=True):
                one -= RATE * average
        records = synchronizer.recorder.exchanges()
    sent = sum(one.nbytes * one.density for one in records)
    loss, _ = loss_and_gradients(weights, pixels[SHOWN:], kinds[SHOWN:])
    return loss, sent / sum(one.nbytes for one in records)

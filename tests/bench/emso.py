"""EMSO against mini-batch descent: rounds of communication to a loss close to the optimum, at growing batches.

Logistic regression of 40,000 samples with 40 features on four ranks. In a round every rank draws its part of the batch.
Descent moves once by the average gradient; EMSO makes five local steps on the same samples with a pull back to where
the round began (`LocalSGD(5, proximal=...)`), and averages; without the pull that is local descent. Each has the best
of a grid of rates, EMSO of pulls too.
The batch is drawn anew in each round; a run has arrived when the loss of all samples is within 0.002 of the least.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit

import topoplan
from collectives import BSP, GradientSynchronizer, LocalSGD
from collectives.training.modes import Mode

RANKS, SAMPLES, FEATURES, LOCAL = 4, 40_000, 40, 5
CLOSE, MOST = 2e-3, 1500
BATCHES = (64, 256, 1024, 4096)
RATES = (0.06, 0.12, 0.25, 0.5, 1.0, 2.0, 4.0)
PULLS = (0.03, 0.1, 0.3, 1.0)

Floats = NDArray[np.float64]


def main() -> None:
    """Print rounds for each batch."""
    draw = np.random.default_rng(5)
    inputs = draw.standard_normal((SAMPLES, FEATURES))
    truth = draw.standard_normal(FEATURES) / np.sqrt(FEATURES) * 3
    kinds = np.where(draw.random(SAMPLES) < 1 / (1 + np.exp(-inputs @ truth)), 1.0, -1.0)
    least = float(minimize(loss, np.zeros(FEATURES), args=(inputs, kinds), jac=slope, method="L-BFGS-B").fun)
    print(
        f"# {SAMPLES} samples, {FEATURES} features, {RANKS} ranks, rounds to within {CLOSE} of the least loss"
    )
    print("batch   descent  rate    local  rate     EMSO  rate  pull")
    for batch in BATCHES:
        plain = min((rounds(inputs, kinds, least, batch, rate, BSP()), rate) for rate in RATES)
        local = min((rounds(inputs, kinds, least, batch, rate, LocalSGD(LOCAL)), rate) for rate in RATES)
        pulled = min(
            (rounds(inputs, kinds, least, batch, rate, LocalSGD(LOCAL, proximal=pull)), rate, pull)
            for rate in RATES
            for pull in PULLS
        )
        print(
            f"{batch:5}  {told(plain[0]):>8}  {plain[1]:4}  {told(local[0]):>7}  {local[1]:4}  {told(pulled[0]):>7}  "
            f"{pulled[1]:4}  {pulled[2]:4}",
            flush=True,
        )


def told(found: int) -> str:
    """Rounds, or that there were not enough."""
    return f"> {MOST}" if found > MOST else str(found)


def rounds(inputs: Floats, kinds: Floats, least: float, batch: int, rate: float, mode: Mode) -> int:
    """Rounds until the loss is close to the least; `MOST` + 1 where it is not by then."""
    draw = np.random.default_rng(9)
    steps = 1 if isinstance(mode, BSP) else LOCAL
    weights = [np.zeros(FEATURES) for _ in range(RANKS)]
    plan = topoplan.plan("v100x4")
    with GradientSynchronizer(
        [[one] for one in weights], plan, backend="loopback", mode=mode
    ) as synchronizer:
        for done in range(1, MOST + 1):
            parts = [draw.integers(0, SAMPLES, batch // RANKS) for _ in range(RANKS)]
            for _ in range(steps):
                given: list[Any] = [
                    [slope(one, inputs[part], kinds[part])] for one, part in zip(weights, parts, strict=True)
                ]
                for one, (average,) in zip(weights, synchronizer.step(given), strict=True):
                    one -= rate * average
                synchronizer.after_step([[one] for one in weights])
            if loss(weights[0], inputs, kinds) - least <= CLOSE:
                return done
    return MOST + 1


def loss(weights: Floats, inputs: Floats, kinds: Floats) -> float:
    """Mean logistic loss."""
    return float(np.mean(np.logaddexp(0, -kinds * (inputs @ weights))))


def slope(weights: Floats, inputs: Floats, kinds: Floats) -> Floats:
    """Its gradient."""
    found: Floats = -(kinds * expit(-kinds * (inputs @ weights))) @ inputs / len(kinds)
    return found

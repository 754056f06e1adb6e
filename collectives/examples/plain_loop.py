"""Average gradients in a loop without torch: four ranks in this process.

    $ python -m collectives.examples.plain_loop
    weights [0, 1, 2, 3, 4] after 100 steps

Every argument is a list with one entry for each rank. With ``backend="mpi"`` or ``"tcp"`` each rank is a process: the
same lines have no such lists, and the plan may be left out.
"""

from __future__ import annotations

import numpy as np

import collectives
import topoplan

RANKS = 4


def main() -> None:
    """Fit a line through random points, of which each rank has its own."""
    draw = np.random.default_rng(0)
    inputs = draw.standard_normal((RANKS, 32, 5))
    targets = inputs @ np.arange(5.0)
    weights = [[np.zeros(5)] for rank in range(RANKS)]
    plan = topoplan.plan("v100x4")
    with collectives.GradientSynchronizer(weights, plan, backend="loopback") as synchronizer:
        for _ in range(100):
            gradients = [
                [2 * inputs[rank].T @ (inputs[rank] @ weights[rank][0] - targets[rank]) / 32]
                for rank in range(RANKS)
            ]
            averages = synchronizer.step(gradients)
            for rank in range(RANKS):
                weights[rank][0] -= 0.1 * averages[rank][0]
        steps = synchronizer.recorder.step
    print(f"weights {weights[3][0].round().astype(int).tolist()} after {steps} steps")


if __name__ == "__main__":
    main()

"""Delayed block proximal gradient: sparse logistic regression whose blocks of weights move on delayed gradients.

    python -m collectives.examples.block_proximal

minimises mean log(1 + exp(-y x w)) + penalty |w|_1 over ranks that each hold a part of the samples (Li et al.,
"Communication Efficient Distributed Machine Learning with the Parameter Server", NIPS 2014; DARLIN). Blocks of weights
move one after another: ranks push their gradients of a block, which the plan adds up, and all move it by the same
proximal step,

    w_b <- shrink(w_b - G_b / L, penalty / L).

With a delay of t the gradients are those of the weights t moves ago, as if a worker did not wait for the last t
answers. L is the curvature of a block, plus for every missed move the change that it can cause: the curvature again for
the block's own, that between two blocks for others'. So steps are smaller, and the optimum stays the same.

The KKT filter leaves out weights that are zero and whose gradient says that they will stay so, |G| < penalty - margin;
the margin shrinks with the largest violation of the pass before, and before the end all weights are checked once more.
So the optimum is the same. The filtered weights follow from sums that all ranks have, so no keys are sent.

Absent from DARLIN: per-weight step bounds, real waiting (delays are always as long as allowed), and compression of
values. All ranks are in this process, and their traffic is counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

import topoplan
from collectives import Communicator
from topoplan.errors import TopoplanError, UsageError

Floats = NDArray[np.float64]

MARGIN = 0.5
"""Margin of the KKT filter, as a part of the largest violation of a pass."""

MAX_PASSES = 20_000


@dataclass(frozen=True, slots=True)
class RegressionProblem:
    """Samples by rank: ``inputs`` (n, d) and ``kinds`` (n,), 1 or -1; penalty and blocks of weights."""

    inputs: list[Floats]
    kinds: list[Floats]
    penalty: float
    blocks: tuple[slice, ...]

    @property
    def samples(self) -> int:
        """Samples of all ranks."""
        return sum(map(len, self.kinds))

    def curvature(self, delay: int) -> float:
        """Return an upper bound of the curvature of the loss along a block, missed moves included.

        A quarter bounds the second derivative of the logistic loss.
        """
        whole = np.vstack(self.inputs)
        parts = [whole[:, block] for block in self.blocks]
        within = max(float(np.linalg.norm(part, 2)) ** 2 for part in parts)
        across = max(float(np.linalg.norm(a.T @ b, 2)) for a, b in combinations(parts, 2))
        own = delay // len(parts)
        return ((1 + own) * within + (delay - own) * across) / 4 / self.samples

    def objective(self, weights: Floats) -> float:
        """Return the minimised function."""
        parts = zip(self.inputs, self.kinds, strict=True)
        lost = sum(float(np.logaddexp(0, -kinds * (inputs @ weights)).sum()) for inputs, kinds in parts)
        return lost / self.samples + self.penalty * float(np.abs(weights).sum())

    def gradients(self, weights: Floats, chosen: NDArray[np.int64]) -> list[Floats]:
        """Return each rank's part of the gradient of the loss."""
        from scipy.special import expit

        return [
            -(kinds * expit(-kinds * (inputs @ weights))) @ inputs[:, chosen] / self.samples
            for inputs, kinds in zip(self.inputs, self.kinds, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class DescentRun:
    """Result of a run: weights, moves of blocks, bytes that all ranks sent, and the objective after each move."""

    weights: Floats
    moves: int
    nbytes: int
    objectives: list[float]


def make_problem(
    *, ranks: int = 4, samples: int = 2000, features: int = 120, seed: int = 1
) -> RegressionProblem:
    """Return a problem in which a tenth of the weights matter."""
    draw = np.random.default_rng(seed)
    inputs = draw.standard_normal((samples, features)) * (draw.random((samples, features)) < 0.2)
    truth = np.where(draw.random(features) < 0.1, draw.normal(0, 2, features), 0.0)
    kinds = np.where(draw.random(samples) < 1 / (1 + np.exp(-inputs @ truth)), 1.0, -1.0)
    borders = np.linspace(0, features, 7).astype(int).tolist()
    blocks = tuple(slice(*ends) for ends in pairwise(borders))
    return RegressionProblem(np.array_split(inputs, ranks), np.array_split(kinds, ranks), 0.004, blocks)


def descend(
    problem: RegressionProblem, *, delay: int, filtered: bool, close: float = 1e-10, seed: int = 2
) -> DescentRun:
    """Move blocks until no weight violates the conditions of the optimum by more than ``close``."""
    if delay < 0:
        raise UsageError(f"delay must be 0 moves or more, got {delay}")
    draw = np.random.default_rng(seed)
    features = problem.inputs[0].shape[1]
    step = 1 / problem.curvature(delay)
    history = [np.zeros(features)]
    active = np.ones(features, dtype=bool)
    margin, objectives = np.inf, [problem.objective(history[0])]
    plan = topoplan.plan("dgx-2", gpus=range(len(problem.kinds)))
    with Communicator(plan) as comm:
        for passes in range(MAX_PASSES):
            whole, worst = bool(active.all()), 0.0
            order = range(len(problem.blocks)) if passes == 0 else draw.permutation(len(problem.blocks))
            for number in order:
                block = problem.blocks[number]
                chosen = np.flatnonzero(active[block]) + block.start
                if not len(chosen):
                    continue
                seen = history[max(0, len(history) - 1 - delay)]
                slope = comm.all_reduce(problem.gradients(seen, chosen))[0]
                weights = history[-1].copy()
                old = weights[chosen]
                worst = max(worst, float(violations(old, slope, problem.penalty).max()))
                if filtered:
                    active[chosen] = (old != 0) | (np.abs(slope) >= problem.penalty - margin)
                moved = old - step * slope
                weights[chosen] = np.sign(moved) * np.maximum(np.abs(moved) - step * problem.penalty, 0)
                history = [*history[-delay:], weights] if delay else [weights]
                objectives.append(problem.objective(weights))
            margin = MARGIN * worst
            if worst <= close:
                if whole:
                    break
                active[:] = True
        nbytes = sum(comm.bytes_sent().values())
    return DescentRun(history[-1], len(objectives) - 1, nbytes, objectives)


def violations(weights: Floats, slope: Floats, penalty: float) -> Floats:
    """Return each weight's violation of the conditions of the optimum: |G| <= penalty at zero, else G = -penalty
    sign(w).
    """
    at_zero = np.maximum(np.abs(slope) - penalty, 0)
    found: Floats = np.where(weights == 0, at_zero, np.abs(slope + penalty * np.sign(weights)))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table of delays."""
    parser = argparse.ArgumentParser(prog="python -m collectives.examples.block_proximal")
    parser.add_argument("--delays", default="0,1,4,16", metavar="LIST", help="delays of gradients, in moves")
    options = parser.parse_args(arguments)
    try:
        delays = [int(one) for one in options.delays.split(",")]
        problem = make_problem()
        print("delay  filter   moves  objective       weights  MB sent")
        for delay in delays:
            for filtered in (False, True):
                run = descend(problem, delay=delay, filtered=filtered)
                print(
                    f"{delay:5}  {'KKT' if filtered else 'none':6}  {run.moves:6}  {run.objectives[-1]:.12f}  "
                    f"{np.count_nonzero(run.weights):7}  {run.nbytes / 1e6:7.2f}",
                    flush=True,
                )
    except (TopoplanError, ValueError) as error:
        print(f"block_proximal: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

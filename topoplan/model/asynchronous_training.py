"""Model asynchronous training: steps per second under a clock rule, and the pull probabilities and weights of gossip.

Before step c a rank waits until all have finished c - s steps: finite s is stale synchronous (Ho et al., NIPS 2013), s
= 0 bulk synchronous, none asynchronous; with averaging every H steps, ranks wait (and send) only then.

    end(i, c) = max(end(i, c - 1), max over j of end(j, c - s - 1)) + compute(i, c) + send

Gossip (NetMax, Zhou et al., arXiv 2009.05766): rank i chooses m with probability p[i][m] and pulls from it, x_i <- x_i
- a[i][m] (x_i - x_m), a[i][m] = strength * (d[i][m] + d[m][i]) / (2 p[i][m]), d[i][m] = 1 if p[i][m] > 0, strength the
paper's alpha * rho. The rule ``speed`` takes p[i][m] in proportion to 1 / t[i][m], the time of a pull alone on its
links. Absent: the paper's linear program over measured times, and its monitor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.topology import TopologyLike
from topoplan.model.copy_routes import CopyRoutes
from topoplan.model.dataflow import device_kinds, route_latency
from topoplan.plans.build import Allocation
from topoplan.units import check_type, is_real, parse_size

ClockTimes = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ClockRun:
    """Times of every step of every rank.

    ends: (N, K) float64, seconds at which each step ended.
    waited: (N, K) float64, seconds in each step in which a rank waited for others.
    """

    ends: ClockTimes
    waited: ClockTimes

    @property
    def seconds(self) -> float:
        """Seconds until the last rank has ended its last step."""
        return float(np.max(self.ends[:, -1]))

    @property
    def steps_per_second(self) -> float:
        """Steps per second of the slowest rank; infinite if nothing takes time."""
        return self.ends.shape[1] / self.seconds if self.seconds else math.inf

    @property
    def idle(self) -> ClockTimes:
        """(N,): share of the time until its last step in which each rank waited."""
        last = self.ends[:, -1]
        idle: ClockTimes = np.divide(self.waited.sum(axis=1), last, out=np.zeros_like(last), where=last > 0)
        return idle

    def finished(self, seconds: float) -> NDArray[np.int64]:
        """Return (N,): the steps that each rank has finished by then."""
        finished: NDArray[np.int64] = (self.ends <= seconds * (1 + 1e-12)).sum(axis=1)
        return finished

    @property
    def gaps(self) -> dict[int, int]:
        """Number of steps that ended with each lead over the slowest rank, ascending by lead."""
        slowest = np.minimum.reduce([np.searchsorted(row, self.ends, side="right") for row in self.ends])
        ahead = np.arange(1, self.ends.shape[1] + 1)[None, :] - slowest
        return dict(sorted(Counter(ahead.ravel().tolist()).items()))


def run_clocks(
    compute: Sequence[Sequence[float]] | ClockTimes,
    send: float = 0.0,
    *,
    staleness: int | None = 0,
    every: int = 1,
) -> ClockRun:
    """Return the times of ranks under a clock rule.

    compute: (N, K) floats, seconds that each rank computes in each step.
    send: seconds that an exchange takes, such as a plan's model time for the gradients.
    staleness: largest lead in steps over the slowest rank; 0 for bulk synchronous, None for no bound.
    every: steps between two exchanges, at which all ranks wait (local SGD); above 1 it overrides the staleness.

    Three ranks; the last one takes three times as long in the second of four steps:

    >>> late = [[1, 1, 1, 1], [1, 1, 1, 1], [1, 3, 1, 1]]
    >>> [run_clocks(late, staleness=s).ends.max(axis=1).tolist() for s in (0, 2, None)]
    [[6.0, 6.0, 6.0], [4.0, 4.0, 6.0], [4.0, 4.0, 6.0]]
    """
    times = np.asarray(compute, dtype=np.float64)
    if times.ndim != 2 or not times.size:
        raise UsageError("compute must give each rank the seconds of one step or more, as many for each")
    if not (np.isfinite(times).all() and (times >= 0).all() and 0 <= send < np.inf):
        raise UsageError("seconds of computing and sending must be numbers of zero or more")
    if staleness is not None and staleness < 0:
        raise UsageError(f"staleness must be 0 or more, got {staleness}; give None for no bound")
    if every < 1:
        raise UsageError(f"every must be 1 or more, got {every}")
    ranks, steps = times.shape
    ends, waited = np.zeros((ranks, steps)), np.zeros((ranks, steps))
    before = np.zeros(ranks)
    for step in range(steps):
        # last step that every rank must have ended before this one
        last = -1 if staleness is None or every > 1 else step - staleness - 1
        begin = before if last < 0 else np.maximum(before, ends[:, last].max())
        meets = (step + 1) % every == 0 and (staleness == 0 or every > 1)
        done = begin + times[:, step]
        met = np.full(ranks, done.max()) if meets else done
        waited[:, step] = begin - before + met - done
        before = met + (send if every == 1 or meets else 0.0)
        ends[:, step] = before
    return ClockRun(ends, waited)


Floats = NDArray[np.float64]

PULLED = 64 << 20
"""Default bytes of a pull: enough to make start-ups negligible."""


def neighbour_probabilities(
    topology: TopologyLike,
    rule: str = "speed",
    *,
    gpus: Sequence[int] | None = None,
    nbytes: int | str = PULLED,
    compute: float = 0.0,
) -> Floats:
    """Return the probabilities with which each rank chooses its neighbours for pulls of parameters.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes
        Links have the stated or the calibrated bandwidth.
    rule : str
        ``speed``: in proportion to 1 / `pull_seconds`.
    gpus, nbytes, compute
        As for `pull_seconds`.

    Returns
    -------
    (N, N) float64
        ``p[i][m]``, of rank i choosing rank m: rows sum to 1, zeros on the diagonal.

    Raises
    ------
    UsageError
        Another rule, fewer than two GPUs, or a number that is out of range.
    InfeasibleError
        A rank that no other rank reaches.

    See Also
    --------
    topoplan.plan

    Examples
    --------
    GPU 0 of a DGX-1V has NVLinks of 25 GB/s to GPUs 1 and 2, of 50 GB/s to GPU 3, and PCIe of 8 GB/s to GPU 5.

    >>> neighbour_probabilities("dgx-1v", gpus=[0, 1, 2, 3, 5])[0].round(3).tolist()
    [0.0, 0.232, 0.232, 0.462, 0.074]
    """
    check_type("rule", rule, str, remedy="use 'speed'")
    if rule != "speed":
        raise UsageError(
            f"rule {rule!r} is unknown; use 'speed'"
            + " (the linear program of NetMax is not implemented)" * (rule == "netmax")
        )
    seconds = pull_seconds(topology, gpus=gpus, nbytes=nbytes, compute=compute)
    np.fill_diagonal(seconds, math.inf)
    rates = 1 / seconds
    for rank, total in enumerate(rates.sum(axis=1)):
        if not total:
            raise InfeasibleError(f"rank {rank} can pull from no other rank: no link leads to it")
    probabilities: Floats = rates / rates.sum(axis=1, keepdims=True)
    return probabilities


def pull_seconds(
    topology: TopologyLike,
    *,
    gpus: Sequence[int] | None = None,
    nbytes: int | str = PULLED,
    compute: float = 0.0,
) -> Floats:
    """Return the seconds of a step in which a rank computes and meanwhile pulls another rank's parameters.

    gpus: GPU numbers; rank i is the i-th, None takes all.
    nbytes: bytes of the parameters, or a text such as "64MB".
    compute: seconds of computing in a step.

    The result is (N, N) float64: t[i][m] = max(compute, alpha + nbytes / rate from m to i), alone on the links;
    infinite without a path, ``compute`` on the diagonal.

    >>> (pull_seconds("dgx-2", gpus=[0, 1], nbytes=1 << 30) * 1e3).round(2).tolist()
    [[0.0, 7.17], [7.17, 0.0]]
    """
    size = parse_size(nbytes) if isinstance(nbytes, str) else nbytes
    if not is_real(size) or not size > 0:
        raise UsageError(f"nbytes must be 1 or more, got {nbytes!r}; give the bytes of the parameters")
    if not is_real(compute) or not 0 <= compute < math.inf:
        raise UsageError(f"compute must be 0 seconds or more, got {compute!r}")
    machine = Allocation.of(topology, gpus=gpus).topology
    ranks = machine.gpus
    if len(ranks) < 2:
        raise UsageError(f"gossip needs two GPUs or more, got {len(ranks)}; choose two or more")
    routes, kinds = CopyRoutes(machine), device_kinds(machine)
    seconds = np.full((len(ranks), len(ranks)), math.inf)
    for mine, to in enumerate(ranks):
        seconds[mine, mine] = compute
        for theirs, source in enumerate(ranks):
            way = None if mine == theirs else routes.between_servers(source, to)
            if way is not None:
                alpha = route_latency([stage[0] for stage in way.stages], kinds)
                seconds[mine, theirs] = max(compute, alpha + size / (way.bandwidth * 1e9))
    return seconds


def checked_probabilities(probabilities: object) -> Floats:
    """Return a copy of the probabilities as a checked array."""
    try:
        table = np.array(probabilities, dtype=np.float64)
    except (TypeError, ValueError):
        table = np.zeros(0)
    if table.ndim != 2 or table.shape[0] != table.shape[1] or len(table) < 2:
        raise UsageError(
            "probabilities must be a square of numbers, two ranks or more; see topoplan.neighbour_probabilities"
        )
    for rank, row in enumerate(table):
        if not (row >= 0).all() or abs(row.sum() - 1) > 1e-9:
            raise UsageError(
                f"probabilities of rank {rank} must be 0 or more and sum to 1, got {row.tolist()}"
            )
    reached = np.arange(len(table)) == 0
    for _ in table:
        reached |= ((table + table.T)[reached] > 0).any(axis=0)
    if not reached.all():
        separate = ", ".join(map(str, np.flatnonzero(~reached)))
        raise UsageError(f"ranks {separate} never mix with rank 0; give them a neighbour among the others")
    return table


def strongest(probabilities: Floats) -> float:
    """Return the largest strength that moves no rank past the middle: p[i][m] >= strength (d[i][m] + d[m][i])."""
    both = (probabilities > 0).astype(np.float64) + (probabilities.T > 0)
    chosen = _between(probabilities)
    return float((probabilities[chosen] / both[chosen]).min())


def mixing_weights(probabilities: Floats, strength: float) -> Floats:
    """Return (N, N) float64: the step of each pull, a[i][m]; 0 if rank i never chooses m.

    probabilities: (N, N) float64
    strength: alpha * rho.
    """
    chosen = _between(probabilities)
    both = (probabilities > 0).astype(np.float64) + (probabilities.T > 0)
    weights: Floats = np.zeros_like(probabilities)
    scale = strength if is_real(strength) else math.nan  # nan is refused below
    weights[chosen] = scale * both[chosen] / (2 * probabilities[chosen])
    if not (scale > 0 and weights.max() <= 1 + 1e-9):
        raise UsageError(
            f"strength must be above 0 and must not move a rank past its neighbour, got {strength}; give at most "
            f"{2 * strongest(probabilities):.4g}"
        )
    return weights


def _between(probabilities: Floats) -> NDArray[np.bool_]:
    """Return a mask of the pairs with a positive probability, without the diagonal."""
    return (probabilities > 0) & ~np.eye(len(probabilities), dtype=bool)

"""Gossip: which neighbour a rank pulls parameters from, by the time that a pull takes, and how fast all agree.

In decentralised training (NetMax, Zhou et al., arXiv 2009.05766) rank i takes a step of its own, chooses rank m with
probability p[i][m] and moves towards what it pulls from there:

    x_i <- x_i - a[i][m] (x_i - x_m),   a[i][m] = strength * (d[i][m] + d[m][i]) / (2 p[i][m]),

where d[i][m] is 1 if p[i][m] is above 0, and the strength is the paper's alpha * rho. A neighbour that is chosen seldom
pulls harder, so that p a is the same both ways, and the mean over all ranks stays where it is, in expectation, as long
as ranks take turns equally often. With d = e_i - e_m, and pi_i the share of all pulls that are rank i's, distances from
the mean shrink by

    Y = sum over i of pi_i (p_ii I + sum over m of p_im (I - a (e_i d' + d e_i') + a^2 d d')),

whose largest eigenvalue is 1 (all equal), and whose second one is the factor of one pull, in expectation of squares.

The rule here, ``speed``, is p[i][m] in proportion to 1 / t[i][m], the time of a pull alone on its links, stated or
calibrated. The paper chooses p by a linear program over measured times; that is absent, and so is its monitor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from topoplan.calibration.routes import Routes
from topoplan.errors import InfeasibleError, UsageError
from topoplan.plans.allocation import Allocation
from topoplan.simulation.latency import device_kinds, route_latency
from topoplan.topology import TopologyLike

Floats = NDArray[np.float64]

PULLED = 64 << 20
"""Bytes of a pull where nobody says how many: enough for start-ups not to count."""


def neighbour_probabilities(
    topology: TopologyLike,
    rule: str = "speed",
    *,
    gpus: Sequence[int] | None = None,
    nbytes: int = PULLED,
    compute: float = 0.0,
) -> Floats:
    """How often each rank had better choose each other one to pull parameters from.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes
        Its links are as fast as stated, or as calibrated.
    rule : str
        ``speed``: in proportion to 1 / `pull_seconds`.
    gpus, nbytes, compute
        As `pull_seconds` takes them.

    Returns
    -------
    (N, N) float64
        p[i][m], of rank i choosing rank m: rows sum to 1, zeros on the diagonal.

    Raises
    ------
    UsageError
        Another rule, fewer than two GPUs, or a number that is out of range.
    InfeasibleError
        A rank that no way leads to from any other.

    Examples
    --------
    GPU 0 of a DGX-1V has NVLinks of 25 GB/s to GPUs 1 and 2, of 50 GB/s to GPU 3, and PCIe of 8 GB/s to GPU 5.

    >>> neighbour_probabilities("dgx-1v", gpus=[0, 1, 2, 3, 5])[0].round(3).tolist()
    [0.0, 0.232, 0.232, 0.462, 0.074]
    """
    if rule != "speed":
        raise UsageError(
            f"rule {rule!r} is unknown; use 'speed'"
            + " (the linear program of NetMax is not here: its constraints could not be read in full)"
            * (rule == "netmax")
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
    nbytes: int = PULLED,
    compute: float = 0.0,
) -> Floats:
    """Seconds of a step in which a rank computes and meanwhile pulls the parameters of another one.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes
    gpus : sequence of int or None
        GPU numbers; rank i is the i-th, None takes all.
    nbytes : int
        Bytes of the parameters.
    compute : float
        Seconds of computing in a step.

    Returns
    -------
    (N, N) float64
        t[i][m] = max(compute, alpha + nbytes / rate from m to i), alone on the links; infinite where no link leads
        there, ``compute`` on the diagonal.

    Raises
    ------
    UsageError
        Fewer than two GPUs, bytes that are none, or a negative time.

    Examples
    --------
    >>> (pull_seconds("dgx-2", gpus=[0, 1], nbytes=1 << 30) * 1e3).round(2).tolist()
    [[0.0, 7.17], [7.17, 0.0]]
    """
    if not nbytes > 0:
        raise UsageError(f"{nbytes} bytes of parameters are none; give 1 or more")
    if not 0 <= compute < math.inf:
        raise UsageError(f"{compute} seconds of computing make no sense; give 0 or more")
    machine = Allocation.of(topology, gpus=gpus).topology
    ranks = machine.gpus
    if len(ranks) < 2:
        raise UsageError(f"{len(ranks)} GPU has nobody to pull from; choose two or more")
    routes, kinds = Routes(machine), device_kinds(machine)
    seconds = np.full((len(ranks), len(ranks)), math.inf)
    for mine, to in enumerate(ranks):
        seconds[mine, mine] = compute
        for theirs, source in enumerate(ranks):
            way = None if mine == theirs else routes.between_servers(source, to)
            if way is not None:
                alpha = route_latency([stage[0] for stage in way.stages], kinds)
                seconds[mine, theirs] = max(compute, alpha + nbytes / (way.bandwidth * 1e9))
    return seconds


def checked_probabilities(probabilities: object) -> Floats:
    """Probabilities of neighbours as an array of their own.

    Raises
    ------
    UsageError
        They are no square, no probabilities, or part the ranks into groups that never mix.
    """
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
            raise UsageError(f"probabilities of rank {rank} are no shares of 1: {row.tolist()}")
    reached = np.arange(len(table)) == 0
    for _ in table:
        reached |= ((table + table.T)[reached] > 0).any(axis=0)
    if not reached.all():
        apart = ", ".join(map(str, np.flatnonzero(~reached)))
        raise UsageError(f"ranks {apart} never mix with rank 0; give them a neighbour among the others")
    return table


def strongest(probabilities: Floats) -> float:
    """The largest strength with which no pull moves a rank past the middle: p[i][m] >= strength (d[i][m] + d[m][i])."""
    both = (probabilities > 0).astype(np.float64) + (probabilities.T > 0)
    chosen = _between(probabilities)
    return float((probabilities[chosen] / both[chosen]).min())


def mixing_weights(probabilities: Floats, strength: float) -> Floats:
    """How far each pull moves a rank towards its neighbour.

    Parameters
    ----------
    probabilities : (N, N) float64
    strength : float
        alpha * rho.

    Returns
    -------
    (N, N) float64
        a[i][m], and 0 where rank i never chooses m.

    Raises
    ------
    UsageError
        The strength is not above 0, or moves a rank past its neighbour.
    """
    chosen = _between(probabilities)
    both = (probabilities > 0).astype(np.float64) + (probabilities.T > 0)
    weights: Floats = np.zeros_like(probabilities)
    weights[chosen] = strength * both[chosen] / (2 * probabilities[chosen])
    if not (strength > 0 and weights.max() <= 1 + 1e-9):
        raise UsageError(
            f"a strength of {strength} is not above 0, or moves a rank past its neighbour; give at most "
            f"{2 * strongest(probabilities):.4g}"
        )
    return weights


def mixing_matrix(probabilities: Floats, strength: float, turns: Sequence[float] | None = None) -> Floats:
    """Y of the module: (N, N) float64, symmetric, rows sum to 1.

    Parameters
    ----------
    probabilities : (N, N) float64
    strength : float
    turns : sequence of float, optional
        Share of all pulls that are each rank's, in proportion to 1 / seconds of its step; equal by default.

    Raises
    ------
    UsageError
        As `mixing_weights`.

    Examples
    --------
    Four ranks that choose each other equally often:

    >>> uniform = (np.ones((4, 4)) - np.eye(4)) / 3
    >>> np.linalg.eigvalsh(mixing_matrix(uniform, 0.1)).round(6).tolist()
    [0.86, 0.86, 0.86, 1.0]
    """
    weights = mixing_weights(probabilities, strength)
    size = len(probabilities)
    shares = np.full(size, 1 / size) if turns is None else np.asarray(turns, np.float64) / np.sum(turns)
    total: Floats = np.eye(size)
    for mine, theirs in zip(*np.nonzero(weights), strict=True):
        own = np.eye(size)[mine]
        apart = own - np.eye(size)[theirs]
        weight = weights[mine, theirs]
        moved = weight**2 * np.outer(apart, apart) - weight * (np.outer(own, apart) + np.outer(apart, own))
        total += shares[mine] * probabilities[mine, theirs] * moved
    return total


def _between(probabilities: Floats) -> NDArray[np.bool_]:
    """Where a rank chooses another one."""
    return (probabilities > 0) & ~np.eye(len(probabilities), dtype=bool)

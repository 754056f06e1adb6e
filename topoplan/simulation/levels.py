"""A dataflow's hops as index arrays, level by level, so that times of all hops are a few numpy calls.

A level holds hops that wait only for hops of earlier levels. The longest chain of times up to a hop is then,
one level after another, a maximum over what it waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topoplan.simulation.dataflow import Dataflow

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Level:
    """Hops that can be timed together.

    Parameters
    ----------
    hops : (T,) int64
    waits : (M,) int64
        What the first of them waits for, then what the second waits for, and so on.
    starts : (T,) int64
        Where in ``waits`` each begins.
    """

    hops: Indices
    waits: Indices
    starts: Indices


def forward_levels(flow: Dataflow) -> tuple[Level, ...]:
    """Levels in the direction of the data: each hop with the hops it waits for."""
    return _levels([hop.waits for hop in flow.hops], range(len(flow.hops)))


def backward_levels(flow: Dataflow) -> tuple[Level, ...]:
    """Levels against the direction of the data: each hop with the hops that wait for it."""
    return _levels(flow.followers, range(len(flow.hops) - 1, -1, -1))


def longest_chains(seconds: Floats, levels: tuple[Level, ...]) -> Floats:
    """Length of the longest chain of hops that ends before each hop.

    Parameters
    ----------
    seconds : (F, C) float64
        Time of every hop.

    Returns
    -------
    (F, C) float64
        Seconds; zero for a hop that waits for none.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.simulation.dataflow import dataflow
    >>> flow = dataflow(topoplan.plan(topoplan.load("dgx-2"), "allreduce"))
    >>> int(longest_chains(np.ones((len(flow.hops), 1)), forward_levels(flow)).max())
    1
    """
    reach = np.zeros_like(seconds)
    for level in levels:
        reach[level.hops] = np.maximum.reduceat(
            reach[level.waits] + seconds[level.waits], level.starts, axis=0
        )
    return reach


def _levels(waits: Sequence[Sequence[int]], order: range) -> tuple[Level, ...]:
    depth = [0] * len(waits)
    members: list[list[int]] = []
    for hop in order:
        if waits[hop]:
            depth[hop] = 1 + max(depth[before] for before in waits[hop])
            if len(members) < depth[hop]:
                members.append([])
            members[depth[hop] - 1].append(hop)
    return tuple(
        Level(
            hops=np.array(group, dtype=np.int64),
            waits=np.array([before for hop in group for before in waits[hop]], dtype=np.int64),
            starts=np.cumsum([0, *(len(waits[hop]) for hop in group[:-1])], dtype=np.int64),
        )
        for group in members
    )

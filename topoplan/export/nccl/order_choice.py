"""Rings and chains for NCCL: so many orders of the GPUs that together load the links as evenly as can be found.

Candidates for chains are all Hamiltonian paths over direct NVLinks (a path is a cycle through one more vertex that is
joined to all), a varied sample where there are too many, and the known rings, each cut at every place; for rings the
known ones. Up to `LARGEST_LISTED` GPUs all orders are candidates for both, since NCCL may pass through a GPU.

Orders are then taken one by one, each time the one that adds least to the most loaded link. That is a greedy choice: it
proves nothing, and its rate is computed from the links afterwards. An order may be taken several times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

import numpy as np

from topoplan.export.nccl.channel_rates import Hops, Order, chain_hops, channel_load, ring_hops
from topoplan.export.nccl.paths import NcclPaths
from topoplan.schedules.rings.hamiltonian_cycles import all_cycles, varied_cycles
from topoplan.topology import Topology
from topoplan.units import exact

LARGEST_LISTED = 7
"""Most GPUs of which all orders are listed: 720 rings, 2520 chains."""

_DIGITS = 9
"""Loads are compared after rounding, so that the last bits of a sum decide nothing."""


def ring_choice(paths: NcclPaths, gpus: Order, known: Sequence[Order], most: int) -> tuple[Order, ...]:
    """So many rings, of which the first k are a choice of k rings for every k.

    Examples
    --------
    Hops of Blink's GPUs 1, 4, 5, 7 that have no NVLink pass through GPU 5; two rings share the load:

    >>> import topoplan
    >>> part = topoplan.load("dgx-1v").subset([1, 4, 5, 7])
    >>> for order in ring_choice(NcclPaths(part), part.gpus, [], 2):
    ...     print(*order)
    gpu1 gpu4 gpu7 gpu5
    gpu1 gpu5 gpu7 gpu4
    """
    listed = permutations(gpus[1:]) if len(gpus) <= LARGEST_LISTED else ()
    candidates = (*known, *((gpus[0], *rest) for rest in listed))
    return _even_choice(paths, candidates, ring_hops, most)


def chain_choice(machine: Topology, paths: NcclPaths, rings: Sequence[Order], most: int) -> tuple[Order, ...]:
    """So many chains, of which the first k are a choice of k chains for every k.

    Examples
    --------
    The same GPUs have two chains over NVLink at 25 GB/s each:

    >>> import topoplan
    >>> part = topoplan.load("dgx-1v").subset([1, 4, 5, 7])
    >>> for order in chain_choice(part, NcclPaths(part), [], 2):
    ...     print(*order)
    gpu1 gpu5 gpu4 gpu7
    gpu1 gpu5 gpu7 gpu4
    """
    gpus = machine.gpus
    listed = permutations(gpus) if len(gpus) <= LARGEST_LISTED else ()
    both_ends = (order for order in listed if gpus.index(order[0]) < gpus.index(order[-1]))
    return _even_choice(paths, (*_direct_paths(machine), *_cuts(rings), *both_ends), chain_hops, most)


def _even_choice(
    paths: NcclPaths, candidates: Sequence[Order], hops: Callable[[Order], Hops], most: int
) -> tuple[Order, ...]:
    distinct = list(dict.fromkeys(candidates))
    loads = [channel_load(paths, hops(order)) for order in distinct]
    links = {link: place for place, link in enumerate(dict.fromkeys(link for load in loads for link in load))}
    seconds = {link: float(1 / exact(link.bandwidth)) for link in links}
    table = np.zeros((len(distinct), len(links)))
    for row, load in zip(table, loads, strict=True):
        for link, times in load.items():
            row[links[link]] = float(times) * seconds[link]
    total = np.zeros(len(links))
    chosen = []
    for _ in range(most):
        after = np.round(total + table, _DIGITS)
        # The most loaded link first, then the square of all loads, then the order of the candidates.
        best = int(np.lexsort((np.round((after**2).sum(axis=1), _DIGITS), after.max(axis=1)))[0])
        chosen.append(distinct[best])
        total += table[best]
    return tuple(chosen)


def _direct_paths(machine: Topology) -> list[Order]:
    """Hamiltonian paths over direct NVLinks of both directions, each from its end that comes first."""
    gpus = machine.gpus
    joined = {(link.src, link.dst) for link in machine.links if link.channel == "nvlink"}
    lanes = [[1] * (len(gpus) + 1) for _ in range(len(gpus) + 1)]
    for i, first in enumerate(gpus):
        for j, second in enumerate(gpus):
            lanes[i + 1][j + 1] = int((first, second) in joined and (second, first) in joined)
    lanes[0][0] = 0
    cycles, complete = all_cycles(lanes)
    if not complete:
        cycles = varied_cycles(lanes)
    paths = [min(cycle[1:], cycle[:0:-1]) for cycle in cycles]
    return [tuple(gpus[vertex - 1] for vertex in path) for path in dict.fromkeys(paths)]


def _cuts(rings: Sequence[Order]) -> list[Order]:
    """Every ring, cut open at every place."""
    return [ring[place:] + ring[:place] for ring in rings for place in range(len(ring))]

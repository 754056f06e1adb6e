"""The best rate of an all-to-all as one linear program over flows, which shares no code with topoplan's.

maximise f   where   flow of source s out of v - into v = f (sum of demand[s]  if v = s, else -demand[s][v]),
                     and the flows of all sources on a link are together at most its capacity.

Without relays, a flow of source s leaves no other rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import lil_matrix

from topoplan.machine.fabric import Fabric


def concurrent_flow(fabric: Fabric, demand: Sequence[Sequence[float]], *, relays: bool = True) -> float:
    """The largest f such that ``f * demand[s][d]`` GB/s run from every rank s to every rank d at once.

    It is 0 if a rank has no path to another that it sends to.
    """
    nodes, links, size = len(fabric.nodes), len(fabric.links), fabric.size
    last = size * links
    balance = lil_matrix((size * nodes, last + 1))
    for source in range(size):
        for number, (tail, head) in enumerate(fabric.ends):
            balance[source * nodes + tail, source * links + number] += 1
            balance[source * nodes + head, source * links + number] -= 1
        for destination in range(size):
            if destination != source:
                balance[source * nodes + destination, last] += demand[source][destination]
                balance[source * nodes + source, last] -= demand[source][destination]
    together = lil_matrix((links, last + 1))
    for number in range(links):
        together[number, number:last:links] = 1
    closed: list[tuple[float, float | None]] = [
        (0, None if relays or tail >= size or tail == source else 0)
        for source in range(size)
        for tail, _ in fabric.ends
    ]
    objective = np.zeros(last + 1)
    objective[last] = -1
    found = linprog(
        objective,
        A_ub=together.tocsr(),
        b_ub=[float(c) for c in fabric.capacity],
        A_eq=balance.tocsr(),
        b_eq=np.zeros(size * nodes),
        bounds=[*closed, (0, None)],
        method="highs",
    )
    assert found.success, found.message
    return float(found.x[last])

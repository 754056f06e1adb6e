"""Routes of a cluster by kind, part by part: distances and routes of the search over the whole sample."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.support.kind_clusters import random_cluster
from topoplan import TopoplanError
from topoplan.plans.minimum_trees import UNREACHABLE
from topoplan.solve.packing.composition import ServerRoutes
from topoplan.solve.packing.kind_composition import KindPacking
from topoplan.solve.packing.kind_routes import KindRoutes
from topoplan.solve.route_table import RouteTable


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(16))
def test_distances_and_routes_are_those_of_the_whole_sample(seed: int) -> None:
    cluster = random_cluster(seed, most=80)
    if cluster is None:
        return
    try:
        packing = KindPacking(cluster, "allgather", root=None, channels="auto", progress=None)
    except TopoplanError:
        return
    rng = random.Random(seed)
    # Many routes of equal length, and links of length 0.
    lengths = [rng.choice([0, 1, 1, 3, rng.randrange(1000)]) for _ in packing.counts]
    routes = KindRoutes(packing.parts, np.array(lengths)[packing.rows])
    whole = ServerRoutes(packing.orbits, packing.servers, tuple(lengths[row] for row in packing.rows))
    cost = routes.cost()
    inside, across = whole.cost(), RouteTable(packing.orbits, whole.lengths)
    # Ranks that the links of their server do not connect reach each other over the network.
    reach = (packing.servers.same & (inside < UNREACHABLE)) | np.eye(len(cost), dtype=bool)
    for middle in range(len(reach)):
        reach |= reach[:, middle, None] & reach[middle]
    cut = packing.servers.same & ~reach
    np.testing.assert_array_equal(cost, np.where(cut, across.cost, inside))
    for among, known in ((~cut, whole), (cut, across)):
        pairs = np.argwhere((cost < UNREACHABLE) & among).tolist()
        for tail, head in rng.sample(pairs, min(200, len(pairs))):
            assert routes.routes([tail], [head]) == [known.route(tail, head)]

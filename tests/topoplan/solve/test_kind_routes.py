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
    np.testing.assert_array_equal(cost, whole.cost())
    pairs = np.argwhere(cost < UNREACHABLE).tolist()
    tails, heads = zip(*rng.sample(pairs, min(200, len(pairs))), strict=True)
    assert routes.routes(tails, heads) == whole.routes(tails, heads)

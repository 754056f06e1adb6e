"""Axes of a mesh on servers, switches and beyond: all divisions, against all placements of few ranks."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations
from math import prod

import pytest

import topoplan
from topoplan.errors import UsageError
from topoplan.machine.cluster import cluster
from topoplan.machine.cluster_network import Server
from topoplan.machine.topology import Topology
from topoplan.operate.link_loads import HopLoads
from topoplan.operate.mesh_placement import best_mesh, reordered
from topoplan.plans.mesh_plans import groups_along


def together(
    loads: HopLoads, axes: dict[str, int], weights: dict[str, int], ranks: tuple[int, ...]
) -> Fraction:
    """The common rate of rings in all groups at once, link by link."""
    filled: dict[int, Fraction] = {}
    for axis, weight in weights.items():
        size = axes[axis]
        sent = weight * Fraction(2 * (size - 1), size)
        for group in groups_along(list(axes.items()), axis):
            ring = [ranks[rank] for rank in group]
            for tail, head in zip(ring, (*ring[1:], ring[0]), strict=True):
                for link, part in (loads.hop(tail, head) or {}).items():
                    filled[link] = filled.get(link, Fraction(0)) + part * sent
    return min(loads.capacity[link] / load for link, load in filled.items() if load)


@pytest.mark.sampled
@pytest.mark.parametrize("weights", [{"dp": 1, "tp": 1}, {"dp": 1, "tp": 10}, {"dp": 10, "tp": 1}, {"tp": 1}])
def test_no_placement_of_six_ranks_has_faster_rings(weights: dict[str, int]) -> None:
    machine = topoplan.nvswitch_cluster(2, gpus=3, nvlink=300, nic=25)
    axes = {"dp": 2, "tp": 3}
    found = best_mesh(machine, axes, axes=weights)
    loads = HopLoads(machine)
    rates = [together(loads, axes, weights, ranks) for ranks in permutations(range(6))]
    assert max(one.together for one in found.placements) == max(rates)
    assert found.best.together == together(loads, axes, weights, found.best.ranks)
    assert found.given.together == together(loads, axes, weights, tuple(range(6)))


def servers(count: int) -> Topology:
    boxes = [Server("dgx-h100", count=count)]
    tree = {"network": "fat-tree", "leaf_size": 2, "oversubscription": 4}
    return cluster(boxes, nic_gbps=400, nic_access="direct", **tree)  # type: ignore[arg-type]


def test_all_divisions_of_the_axes_over_the_levels_are_there() -> None:
    """8 GPUs, 2 servers, 2 switches for dp 4 x tp 8: tp takes 2, 4 or 8 of a server, and what is left is divided."""
    found = best_mesh(servers(4), {"dp": 4, "tp": 8}, axes={"dp": 1, "tp": 100})
    assert found.levels == (("in a server", 8), ("on a switch", 2), ("across", 2))
    data = ((4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2))
    tensor = ((2, 2, 2), (4, 1, 2), (4, 2, 1), (8, 1, 1))
    assert {one.factors for one in found.placements} == {*zip(data, tensor, strict=True)}
    for one in found.placements:
        assert sorted(one.ranks) == list(range(32))
        assert [prod(parts) for parts in one.factors] == [4, 8]


def test_the_axis_that_needs_most_lies_inside_servers_whichever_comes_first() -> None:
    for mesh in ({"dp": 4, "tp": 8}, {"tp": 8, "dp": 4}):
        found = best_mesh(servers(4), mesh, axes={"dp": 1, "tp": 20})
        lies = dict(zip(mesh, found.best.factors, strict=True))
        assert lies == {"tp": (8, 1, 1), "dp": (1, 2, 2)}
        for group in groups_along(list(mesh.items()), "tp"):
            assert len({found.best.ranks[rank] // 8 for rank in group}) == 1


def test_rates_alone_are_those_of_rings_over_what_the_groups_share() -> None:
    """dp across: 8 groups of 4 share 4 x 400 GB/s of NICs, and the uplinks of the leaves by 4."""
    found = best_mesh(servers(4), {"dp": 4, "tp": 8})
    assert found.given.factors == ((1, 2, 2), (8, 1, 1))
    across, inside = found.given.alone
    # Each leaf's 2 x 8 NICs of 50 GB/s have 200 GB/s up, and 8 groups send 1.5 bytes for each byte over it.
    assert float(across) == pytest.approx(200 / (8 * 1.5))
    assert float(inside) == pytest.approx(450 * 8 / 14)


def test_the_trees_of_few_ranks_decide_and_are_proved() -> None:
    found = best_mesh(topoplan.nvswitch_cluster(2, gpus=4), {"dp": 2, "tp": 4})
    assert found.best.proved
    turned = reordered(topoplan.nvswitch_cluster(2, gpus=4), found.best.ranks)
    assert found.best.packed == topoplan.plan_mesh(turned, {"dp": 2, "tp": 4}).rate
    assert found.best.packed >= (found.given.packed or 0)


def test_what_does_not_fit_is_refused() -> None:
    box = topoplan.load("dgx-a100")
    with pytest.raises(UsageError, match="the mesh must have as many ranks as GPUs, 8, got dp 3 x tp 3"):
        best_mesh(box, {"dp": 3, "tp": 3})
    with pytest.raises(UsageError, match="axis 'pp' is not in the mesh"):
        best_mesh(box, {"dp": 2, "tp": 4}, axes={"pp": 1})
    with pytest.raises(UsageError, match="collective 'x' is unknown"):
        best_mesh(box, {"dp": 2, "tp": 4}, "x")


def test_of_placements_whose_trees_are_equally_fast_the_one_with_faster_rings_is_best() -> None:
    """Trees of all GPUs of a DGX-1V do the same in any order, its rings do not."""
    found = best_mesh(topoplan.load("dgx-1v"), {"dp": 8})
    assert found.given.packed == found.best.packed
    assert (float(found.given.together), float(found.best.together)) == (100 / 7, 200 / 7)

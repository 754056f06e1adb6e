"""Orders of ranks: what they cost, against closed forms and other bodies; the best one, against all orders."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import pairwise, permutations
from math import prod
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.small_fabrics import direct_machines, switched_machines
from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.cluster import cluster
from topoplan.machine.cluster_network import Server
from topoplan.machine.named_nodes import NodeNetwork, cluster_of_nodes, domain
from topoplan.machine.topology import Device, Topology
from topoplan.operate.link_loads import HopLoads
from topoplan.operate.mesh_placement import best_mesh, reordered
from topoplan.operate.rank_order import ENUMERATED, MEETS_BOUND, best_order, near_servers, ring_bound
from topoplan.plans.mesh_plans import groups_along
from topoplan.schedules.binary_trees import nccl_tree

HOST = Topology("host", (Device("gpu0", "gpu"),), ())


def tree_network(pick: Random, hosts: int) -> NodeNetwork:
    """Hosts below random leaves, these below random pods, and these below a top."""
    pods = [f"pod{number}" for number in range(pick.randint(1, 3))]
    leaves = [(f"leaf{number}", pick.choice(pods)) for number in range(pick.randint(1, 4))]
    nodes = tuple((f"h{number}", pick.choice(leaves)[0]) for number in range(hosts))
    return NodeNetwork("tree", (("top", ""), *((pod, "top") for pod in pods), *leaves), nodes)


def tree_of_hosts(network: NodeNetwork, *, oversubscription: float) -> Topology:
    """Hosts of one GPU and one NIC of 12.5 GB/s."""
    machines = {node: HOST for node, _ in network.nodes}
    return cluster_of_nodes(network, machines, nic_gbps=100, oversubscription=oversubscription)


def hosts_below(network: NodeNetwork, switch: str) -> set[str]:
    above = dict(network.switches)
    found = set()
    for node, home in network.nodes:
        while home and home != switch:
            home = above[home]
        found |= {node} if home else set()
    return found


@given(seed=st.integers(0, 10_000), hosts=st.integers(3, 7), oversubscription=st.sampled_from([1, 2, 3, 8]))
@settings(max_examples=8)
def test_a_ring_on_a_tree_is_as_fast_as_the_uplink_that_is_crossed_most(
    seed: int, hosts: int, oversubscription: int
) -> None:
    pick = Random(seed)
    network = tree_network(pick, hosts)
    machine = tree_of_hosts(network, oversubscription=oversubscription)
    loads = HopLoads(machine)
    order = pick.sample(range(hosts), hosts)
    homes = [loads.names[rank] for rank in order]
    limits = [12.5]
    for link in machine.links:
        inside = hosts_below(network, link.src)
        if (link.src, link.dst) in network.switches:
            hops = zip(homes, (*homes[1:], homes[0]), strict=True)
            out = sum(a in inside and b not in inside for a, b in hops)
            limits += [link.bandwidth / out] if out else []
    assert float(loads.rates(order).ring) == pytest.approx(min(limits))


@pytest.mark.parametrize("servers", [2, 5, pytest.param(8, marks=pytest.mark.thorough)])
def test_rates_are_those_of_nccls_ring_and_tree_as_plans(servers: int) -> None:
    boxes = [Server("dgx-h100", count=servers)]
    machine = cluster(boxes, nic_gbps=400, network="fat-tree", leaf_size=2, oversubscription=4)
    rates = HopLoads(machine).rates(range(8 * servers))
    assert float(rates.tree or 0) == pytest.approx(nccl_tree(machine).rate)
    ranks = 8 * servers
    assert float(rates.ring) == pytest.approx(topoplan.ring_plan(machine).rate * 2 * (ranks - 1) / ranks)


def by_all_orders(machine: Topology) -> Fraction:
    loads = HopLoads(machine)
    return max(loads.rates((0, *rest)).ring for rest in permutations(range(1, loads.size)))


@st.composite
def hosts_in_a_tree(draw: st.DrawFn) -> Topology:
    pick = Random(draw(st.integers(0, 10_000)))
    network = tree_network(pick, pick.randint(3, 6))
    return tree_of_hosts(network, oversubscription=pick.choice([1, 2, 4]))


@given(machine=direct_machines(most=6) | switched_machines() | hosts_in_a_tree())
@settings(max_examples=31)
def test_the_best_order_is_the_best_of_all(machine: Topology) -> None:
    """Wired GPUs, GPUs behind switches, and hosts in a tree."""
    try:
        loads = HopLoads(machine)
    except InfeasibleError:
        return
    if not 2 <= loads.size <= 6:
        return
    best = by_all_orders(machine)
    if not best:
        with pytest.raises(InfeasibleError, match="no order was found"):
            best_order(machine)
        return
    found = best_order(machine)
    assert found.after.ring == best <= found.bound
    assert found.proof == ENUMERATED
    assert found.after == loads.rates(found.ranks)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=4)
def test_scattered_ranks_of_two_servers_are_gathered_as_well_as_by_any_order(seed: int) -> None:
    pick = Random(seed)
    machine = cluster(
        [Server("dgx-1v", pick.sample(range(8), 3)), Server("v100x4", pick.sample(range(4), 2))],
        nic_gbps=pick.choice([50, 100, 800]),
        nics=pick.choice([1, 2, 4]),
        nic_access=pick.choice(["pcie", "direct"]),
    )
    scattered = pick.sample(range(5), 5)
    found = best_order(machine, given=scattered)
    assert found.after.ring == by_all_orders(machine) <= found.bound
    assert found.before == HopLoads(machine).rates(scattered)
    assert found.after.merit >= found.before.merit


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_eight_hosts_in_a_tree_in_all_orders_of_ring_and_tree(seed: int) -> None:
    pick = Random(seed)
    machine = tree_of_hosts(tree_network(pick, 7), oversubscription=4)
    loads = HopLoads(machine)
    found = best_order(machine)
    assert found.after.merit == max(loads.rates(order).merit for order in permutations(range(7)))


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(6))
def test_more_hosts_than_can_be_listed_meet_the_bound_on_a_tree(seed: int) -> None:
    """Every uplink is crossed once each way, also with switches below switches and hosts on any of them."""
    pick = Random(seed)
    switches = [("top", "")] + [(f"sw{n}", "top" if n < 2 else f"sw{pick.randrange(n)}") for n in range(9)]
    nodes = tuple((f"h{number}", pick.choice(switches)[0]) for number in range(18))
    for network in (tree_network(pick, 20), NodeNetwork("deep", tuple(switches), nodes)):
        machine = tree_of_hosts(network, oversubscription=4)
        found = best_order(machine, given=pick.sample(range(len(machine.gpus)), len(machine.gpus)))
        assert found.after.ring == found.bound
        assert found.proof == MEETS_BOUND
        assert found.after.merit >= found.before.merit


def three_domains() -> Topology:
    """Three NVLink domains of eight GPUs, a NIC each."""
    tray = domain(topoplan.load("gb200-nvl72"), 8)
    return cluster([Server(tray, count=3)], nic_gbps=400, nic_access="direct")


def two_leaves() -> Topology:
    """Hosts in turns on two leaves: 8 NICs of 50 GB/s each, uplinks of 4 x 400 / 4 GB/s."""
    nodes = tuple((f"n{number}", f"leaf{number % 2}") for number in range(8))
    network = NodeNetwork("two leaves", (("leaf0", "top"), ("leaf1", "top"), ("top", "")), nodes)
    machines = {node: topoplan.load("dgx-h100") for node, _ in nodes}
    return cluster_of_nodes(network, machines, nic_gbps=400, nic_access="direct", oversubscription=4)


TURNS = tuple(8 * domain + gpu for gpu in range(8) for domain in range(3))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("machine", "given_order", "rings"),
    [
        # the double links make a ring
        (partial(topoplan.load, "dgx-1v"), None, (25, 50)),
        (partial(topoplan.load, "mi250"), None, (12, 50)),
        # hosts without a switch in between are visited along their cables
        (partial(topoplan.load, "torus:4,4"), None, (0, 12.5)),
        # ranks of an NVLink domain stay together
        (three_domains, TURNS, (50, 400)),
        # uplinks are crossed 4 times each way, then once
        (two_leaves, None, (100, 400)),
    ],
)
def test_rings_before_and_after(
    machine: Callable[[], Topology], given_order: tuple[int, ...] | None, rings: tuple[float, float]
) -> None:
    found = best_order(machine(), given=given_order)
    assert (float(found.before.ring), float(found.after.ring)) == rings
    assert found.after.ring == found.bound


def test_servers_and_leaves_are_visited_one_after_another() -> None:
    machine = two_leaves()
    found = best_order(machine)
    assert (float(found.before.between_switches), float(found.after.between_switches)) == (16, 4)
    assert found.proof == MEETS_BOUND
    firsts = [machine.gpus[rank].split(".")[0] for rank in found.ranks[::8]]
    assert firsts == ["n0", "n2", "n4", "n6", "n1", "n3", "n5", "n7"]
    homes = [rank // 8 for rank in best_order(three_domains(), given=TURNS).ranks]
    assert sum(a != b for a, b in pairwise(homes)) == 2
    given_order = (3, 1, 0, 2, 7, 6, 5, 4)
    found = best_order(topoplan.load("dgx-a100"), given=given_order)
    assert found.ranks == found.given == given_order
    assert found.after == found.before


def test_levels_of_a_fat_tree_are_hosts_leaves_pods_and_all() -> None:
    levels = near_servers(HopLoads(topoplan.load("fat-tree:4")))
    assert [len(level) for level in levels] == [16, 8, 4, 1]
    assert levels[1][0] == (0, 1)
    for name in ("dgx-1p", "dgx-2", "pcie-x8", "mi300x"):
        loads = HopLoads(topoplan.load(name))
        assert loads.rates(range(loads.size)).ring <= ring_bound(loads)


def test_what_is_no_order_is_refused() -> None:
    with pytest.raises(UsageError, match="the given order must have each of 4 ranks once"):
        best_order(topoplan.load("v100x4"), given=[0, 1, 2, 2])
    with pytest.raises(UsageError, match="an order needs two ranks or more, got 1"):
        best_order(topoplan.load("v100x4").subset([1]))


# The axes of a mesh


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

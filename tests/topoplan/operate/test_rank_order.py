"""Orders of ranks: what they cost, against closed forms and other bodies; the best one, against all orders."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise, permutations
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
from topoplan.operate.link_loads import HopLoads, tree_edges
from topoplan.operate.rank_order import (
    ENUMERATED,
    MEETS_BOUND,
    RankOrder,
    best_order,
    near_servers,
    ring_bound,
)
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
            out = sum(
                a in inside and b not in inside for a, b in zip(homes, (*homes[1:], homes[0]), strict=True)
            )
            limits += [link.bandwidth / out] if out else []
    assert float(loads.rates(order).ring) == pytest.approx(min(limits))


@pytest.mark.parametrize("servers", [2, 5, pytest.param(8, marks=pytest.mark.thorough)])
def test_rates_are_those_of_nccls_ring_and_tree_as_plans(servers: int) -> None:
    boxes = [Server("dgx-h100", count=servers)]
    machine = cluster(boxes, nic_gbps=400, network="fat-tree", leaf_size=2, oversubscription=4)
    rates = HopLoads(machine).rates(range(8 * servers))
    assert float(rates.tree or 0) == pytest.approx(nccl_tree(machine).rate)
    ranks = 8 * servers
    assert float(rates.ring) == pytest.approx(topoplan.ring(machine).rate * 2 * (ranks - 1) / ranks)


def test_the_trees_of_servers_have_every_server_below_another_but_their_roots() -> None:
    for count in range(2, 12):
        edges = tree_edges(count)
        assert len(edges) == 2 * (count - 1)
        assert all(0 <= end < count for edge in edges for end in edge)


def by_all_orders(machine: Topology) -> Fraction:
    """The fastest ring of any order, one after another."""
    loads = HopLoads(machine)
    return max(loads.rates((0, *rest)).ring for rest in permutations(range(1, loads.size)))


@given(machine=direct_machines(most=6) | switched_machines())
@settings(max_examples=25)
def test_the_best_order_is_the_best_of_all(machine: Topology) -> None:
    """Of wired GPUs and behind switches."""
    agrees_with_all_orders(machine)


def agrees_with_all_orders(machine: Topology) -> None:
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
@settings(max_examples=6)
def test_the_best_order_of_hosts_in_a_tree_is_the_best_of_all(seed: int) -> None:
    pick = Random(seed)
    network = tree_network(pick, pick.randint(3, 6))
    agrees_with_all_orders(tree_of_hosts(network, oversubscription=pick.choice([1, 2, 4])))


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


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_eight_hosts_in_a_tree_in_all_orders_of_ring_and_tree(seed: int) -> None:
    """No order beats the one found, neither by ring nor, among the fastest rings, by tree and short ways."""
    pick = Random(seed)
    machine = tree_of_hosts(tree_network(pick, 7), oversubscription=4)
    loads = HopLoads(machine)
    found = best_order(machine)
    assert found.after.merit == max(loads.rates(order).merit for order in permutations(range(7)))


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(6))
def test_more_hosts_than_can_be_listed_meet_the_bound_on_a_tree(seed: int) -> None:
    """Side by side on leaves and in pods every uplink is crossed once each way, which no ring can do without.

    So too with switches below switches at random, and hosts on any of them.
    """
    pick = Random(seed)
    switches = [("top", "")] + [(f"sw{n}", "top" if n < 2 else f"sw{pick.randrange(n)}") for n in range(9)]
    nodes = tuple((f"h{number}", pick.choice(switches)[0]) for number in range(18))
    for network in (tree_network(pick, 20), NodeNetwork("deep", tuple(switches), nodes)):
        machine = tree_of_hosts(network, oversubscription=4)
        found = best_order(machine, given=pick.sample(range(len(machine.gpus)), len(machine.gpus)))
        assert found.after.ring == found.bound
        assert found.proof == MEETS_BOUND
        assert found.after.merit >= found.before.merit


def rings(found: RankOrder) -> tuple[float, float]:
    """Bus bandwidth as given and as found."""
    return float(found.before.ring), float(found.after.ring)


def test_nothing_is_changed_where_nothing_is_gained() -> None:
    given_order = (3, 1, 0, 2, 7, 6, 5, 4)
    found = best_order(topoplan.load("dgx-a100"), given=given_order)
    assert found.ranks == found.given == given_order
    assert found.after == found.before


def test_double_links_of_a_dgx_1v_make_a_ring_and_mi250_has_one_over_its_links() -> None:
    found = best_order(topoplan.load("dgx-1v"))
    assert rings(found) == (25, 50)
    assert found.bound == 50
    found = best_order(topoplan.load("mi250"))
    assert rings(found) == (12, 50)
    assert found.proof == MEETS_BOUND


def test_alternating_leaves_cost_what_their_oversubscription_says() -> None:
    """Hosts in turns on two leaves: 8 hops cross in place of 2, over uplinks a quarter as wide as what is below.

    8 NICs of 50 GB/s a node: uplinks of 4 x 400 / 4 GB/s, crossed 4 times each way, then once.
    """
    nodes = tuple((f"n{number}", f"leaf{number % 2}") for number in range(8))
    network = NodeNetwork("two leaves", (("leaf0", "top"), ("leaf1", "top"), ("top", "")), nodes)
    machines = {node: topoplan.load("dgx-h100") for node, _ in nodes}
    machine = cluster_of_nodes(network, machines, nic_gbps=400, nic_access="direct", oversubscription=4)
    found = best_order(machine)
    assert rings(found) == (100, 400)
    assert (float(found.before.between_switches), float(found.after.between_switches)) == (16, 4)
    assert found.proof == MEETS_BOUND
    firsts = [machine.gpus[rank].split(".")[0] for rank in found.ranks[::8]]
    assert firsts == ["n0", "n2", "n4", "n6", "n1", "n3", "n5", "n7"]


def test_ranks_of_an_nvlink_domain_stay_together() -> None:
    tray = domain(topoplan.load("gb200-nvl72"), 8)
    machine = cluster([Server(tray, count=3)], nic_gbps=400, nic_access="direct")
    turns = [8 * domain + gpu for gpu in range(8) for domain in range(3)]
    found = best_order(machine, given=turns)
    homes = [rank // 8 for rank in found.ranks]
    assert sum(a != b for a, b in pairwise(homes)) == 2
    assert rings(found) == (50, 400)
    assert found.proof == MEETS_BOUND


def test_hosts_without_a_switch_in_between_are_visited_along_their_cables() -> None:
    found = best_order(topoplan.load("torus:4,4"))
    assert found.before.ring == 0
    assert found.after.ring == found.bound == Fraction(25, 2)


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

"""Clusters by kind: the same cluster as its list, with equivalent servers and classes of links counted."""

from __future__ import annotations

import json

import pytest

import topoplan
from tests.support.kind_clusters import random_cluster
from topoplan import Server, UsageError, cluster_by_kind
from topoplan.machine.cluster_by_kind import MOST_SERVERS
from topoplan.reading.load import load_cluster_by_kind


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(40))
def test_places_ranks_and_links_are_those_of_the_list(seed: int) -> None:
    cluster = random_cluster(seed, most=200)
    if cluster is None:
        return
    listed = cluster.listed()
    assert len(listed.gpus) == cluster.size
    assert [cluster.server(cluster.place(server)) for server in range(cluster.servers)] == [
        *range(cluster.servers)
    ]
    assert sum(cell.servers for cell in cluster.cells) == cluster.servers
    for rank, name in enumerate(listed.gpus):
        server, gpu = cluster.server_of(rank)
        assert name.startswith(f"s{server}.")
        assert cluster.first_rank(server) + gpu == rank
    sample = cluster.sample(3)
    known = {(link.src, link.dst, link.channel): link for link in listed.links}
    assert all(known[link.src, link.dst, link.channel] == link for link in sample.topology.links)
    assert sum(sample.link_classes(sample.topology.links)[1]) == len(listed.links)


def test_the_list_is_that_of_cluster() -> None:
    servers = [
        Server("dgx-1v", count=3),
        Server("v100x4", [0, 1], nics=1, count=4),
        Server("dgx-1v", count=2),
    ]
    for network in (
        {"network": "switch", "transport": "rdma"},
        {"network": "rail-optimised", "oversubscription": 2, "flow_gbps": 5},
        {"network": "fat-tree", "leaf_size": 4, "oversubscription": 3, "transport": "tcp", "memory_gbps": 20},
        {
            "network": "fat-tree",
            "leaf_size": 2,
            "oversubscription": 2,
            "pod_size": 2,
            "pod_oversubscription": 3,
        },
    ):
        by_kind = cluster_by_kind(servers, nic_gbps=100, **network)
        assert by_kind.listed() == topoplan.cluster(servers, nic_gbps=100, **network)
        assert by_kind.apart(4).listed() == by_kind.listed()


def test_leaves_of_equal_counts_are_one_class() -> None:
    servers = [Server("v100x4", count=20), Server("dgx-1v", count=21)]
    found = cluster_by_kind(servers, nic_gbps=100, network="fat-tree", leaf_size=8)
    assert [(cell.kind, cell.leaf_class, cell.leaves, cell.count) for cell in found.cells] == [
        (0, 0, 2, 8),
        (0, 1, 1, 4),
        (1, 1, 1, 4),
        (1, 2, 2, 8),
        (1, 3, 1, 1),
    ]


def test_leaves_of_pods_of_different_classes_are_different_classes() -> None:
    network = {"network": "fat-tree", "leaf_size": 2, "pod_size": 3}
    found = cluster_by_kind([Server("v100x4", count=29)], nic_gbps=100, **network)
    assert [
        (cell.pod_class, cell.pods, cell.leaf_class, cell.leaves, cell.count) for cell in found.cells
    ] == [
        (0, 4, 0, 12, 2),
        (1, 1, 1, 2, 2),
        (1, 1, 2, 1, 1),
    ]
    sample = found.sample(3)
    assert {sample.pod_of(server) for server in range(len(sample.places))} == {(0, 0), (0, 1), (0, 2), (1, 0)}


def test_bad_input_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match="1 to 1,000,000 servers, got 1,000,000,000"):
        cluster_by_kind([Server("dgx-h100", count=10**9)], nic_gbps=400)
    with pytest.raises(UsageError, match="have no names"):
        cluster_by_kind([Server("dgx-h100", name="node1")], nic_gbps=400)
    rails = cluster_by_kind([Server("v100x4", count=2)], nic_gbps=400, network="rail-optimised", rails=9)
    with pytest.raises(UsageError, match="9 rails, but no server has more than"):
        rails.sample(2)
    many = cluster_by_kind([Server("dgx-h100", count=MOST_SERVERS)], nic_gbps=400)
    with pytest.raises(UsageError, match=r"take about .* of memory"):
        many.listed()


def test_links_of_a_dragonfly_are_classes_of_ordered_pairs_of_groups() -> None:
    """Five groups of 2 servers and one of 1: 20 links of equal groups, 5 to the last group and 5 from it."""
    found = cluster_by_kind(
        [Server("v100x4", count=11)], nic_gbps=100, network="dragonfly", group_size=2, global_gbps=40
    )
    sample = found.sample(3)
    classes, counts = sample.link_classes(sample.topology.links)
    between = {
        (sample.groups[link.src][0], sample.groups[link.dst][0]): counts[number]
        for link, number in zip(sample.topology.links, classes, strict=True)
        if link.src in sample.groups and link.dst in sample.groups
    }
    assert between == {(0, 0): 20, (0, 1): 5, (1, 0): 5}
    whole = found.listed()
    of_groups = [one for one in whole.links if one.src.startswith("group") and one.dst.startswith("group")]
    assert len(of_groups) == 30
    assert len(whole.links) == sum(counts)


def test_a_file_of_a_dragonfly_is_read_by_kind() -> None:
    network = {"kind": "dragonfly", "nic_gbps": 100, "group_size": 2, "global_gbps": 40}
    text = json.dumps(
        {
            "format": "topoplan.cluster/1",
            "servers": [{"machine": "v100x4", "count": 3}],
            "network": network,
        }
    )
    found = load_cluster_by_kind(text)
    assert found is not None
    made = topoplan.cluster(
        [Server("v100x4", count=3)], nic_gbps=100, network="dragonfly", group_size=2, global_gbps=40
    )
    assert found.listed().links == made.links
    assert topoplan.load(text).links == made.links

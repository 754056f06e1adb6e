"""Machines and plans as networkx graphs: there and back, what networkx computes on them, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings

import topoplan
from tests.support.small_fabrics import COLLECTIVES, direct_machines, switched_machines
from topoplan.errors import TopologyError
from topoplan.machine.topology import Topology
from topoplan.reading.load import library

DGX = topoplan.load("dgx-1v")


def pair(**link: object) -> nx.MultiDiGraph:
    """Two GPUs with a link each way."""
    graph = nx.MultiDiGraph(name="pair")
    graph.add_nodes_from(["a", "b"], kind="gpu")
    for src, dst in (("a", "b"), ("b", "a")):
        graph.add_edge(src, dst, **{"channel": "nvlink", "bandwidth": 25.0} | link)
    return graph


@pytest.mark.sampled
@pytest.mark.parametrize("name", library())
def test_machines_of_the_library_survive_the_graph(name: str) -> None:
    machine = topoplan.load(name)
    assert topoplan.load(machine.to_networkx()) == machine


@given(direct_machines() | switched_machines())
@settings(max_examples=30)
def test_any_machine_survives_the_graph_and_has_its_plan(machine: Topology) -> None:
    assert topoplan.load(machine.to_networkx()) == machine


def test_the_graph_says_what_the_machine_says() -> None:
    """A node is what the graph calls it, whatever its attribute says."""
    graph = DGX.to_networkx()
    assert type(graph) is nx.MultiDiGraph
    assert list(graph) == [device.name for device in DGX.devices]
    assert graph.number_of_edges() == len(DGX.links)
    keys = {"kind", "server", "model", "busid", "numa", "multicast", "reduce", "facts"}
    assert set(graph.nodes["gpu0"]) == keys
    link = next(link for link in DGX.links if (link.src, link.dst) == ("gpu0", "gpu3"))
    assert graph.edges["gpu0", "gpu3", "nvlink"] == {
        **{name: getattr(link, name) for name in ("channel", "bandwidth", "count", "latency")},
        "position": DGX.links.index(link),
    }
    assert graph.name == "dgx-1v"
    assert graph.graph["peer_access"] == dict(DGX.peer_access)
    graph.nodes["gpu0"]["name"] = "first"
    assert topoplan.load(graph) == DGX


def test_a_graph_changed_with_networkx_is_the_machine_that_is_left() -> None:
    """A link taken out of the graph is the link taken out of the machine, and an edge added comes last."""
    graph = DGX.to_networkx()
    for ends in (("gpu0", "gpu3"), ("gpu3", "gpu0")):
        graph.remove_edge(*ends, key="nvlink")
    left = topoplan.load(graph)
    assert left.links == topoplan.without_links(DGX, ["gpu0-gpu3"]).links
    assert topoplan.plan(left).rate == pytest.approx(78.571428)
    graph.add_edge("gpu0", "gpu5", channel="nvlink", bandwidth=np.float32(12.5), count=np.int64(1))
    assert topoplan.load(graph).links[-1] == topoplan.Link("gpu0", "gpu5", "nvlink", 12.5)


def test_the_bound_of_a_broadcast_is_the_cut_that_networkx_finds() -> None:
    """Edmonds: the least cut between the root and any other GPU, here 150 GB/s of a DGX-1V."""
    wires = nx.DiGraph()
    for src, dst, link in DGX.to_networkx().edges(data=True):
        if link["channel"] == "nvlink":
            wires.add_edge(src, dst, capacity=link["bandwidth"])
    cuts = [nx.minimum_cut_value(wires, "gpu0", gpu) for gpu in DGX.gpus[1:]]
    assert min(cuts) == topoplan.bound(DGX, "broadcast").rate == 150.0


def twice() -> nx.MultiDiGraph:
    graph = pair()
    graph.add_edge("a", "b", channel="nvlink", bandwidth=25.0)
    return graph


@pytest.mark.parametrize(
    ("graph", "says"),
    [
        (twice(), "a->b (nvlink) is listed twice; list it once with the summed"),
        (nx.MultiDiGraph(pair()).to_undirected(), "must be a networkx.MultiDiGraph, not MultiGraph"),
        (nx.DiGraph(pair()), "must be a networkx.MultiDiGraph, not DiGraph"),
        (nx.relabel_nodes(pair(), {"a": 0}), "node '0' must be a text, as the name of a device"),
        (nx.relabel_nodes(pair(), {"a": ""}), "device name '' is not a text of printable characters"),
        (pair(bandwith=3), "link 0 (a->b): key 'bandwith' is unknown; did you mean 'bandwidth'?"),
        (pair(bandwidth="25"), "link 0 (a->b): bandwidth must be a number, not '25'"),
        (pair(bandwidth=0), "link a->b: bandwidth 0 must be a number of GB/s"),
        (pair(position="first"), "edge a->b: position 'first' must be a number"),
        (pair(channel="wifi"), "link a->b: channel 'wifi' is unknown"),
        (nx.MultiDiGraph(pair(), colour="red"), "the topology: key 'colour' is unknown"),
        (nx.MultiDiGraph(pair(), name=3), "the topology: name must be a text, not 3"),
        (nx.MultiDiGraph([("a", "b")]), "device 0 (a) has no 'kind'; add it"),
    ],
)
def test_a_graph_that_is_no_machine_is_refused_in_one_line(graph: nx.Graph, says: str) -> None:
    with pytest.raises(TopologyError) as caught:
        topoplan.load(graph)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_tree_of_a_plan_is_a_tree_of_the_machine(collective: str) -> None:
    """One digraph for each stage of each shard, along the data: over links that the machine has, spanning the ranks."""
    plan = topoplan.plan(DGX, collective, gpus=[1, 4, 5, 7])
    machine = DGX.to_networkx()
    trees = plan.to_networkx()
    assert len(trees) == sum(len(shard.stages) for shard in plan.shards)
    for tree in trees:
        shard, stage = plan.shards[tree.graph["shard"]], tree.graph["stage"]
        assert (tree.graph["op"], tree.graph["share"]) == (shard.stages[stage].op, shard.share)
        assert nx.is_arborescence(tree.reverse() if tree.graph["op"] == "reduce" else tree)
        assert [tree.nodes[name]["rank"] for name in tree] == list(range(4))
        assert tuple(tree) == plan.ranks
        for src, dst, edge in tree.edges(data=True):
            assert (edge["route"][0], edge["route"][-1]) == (src, dst)
            assert all(machine.has_edge(*hop, key=edge["channel"]) for hop in pairwise(edge["route"]))


def test_the_loads_of_a_plan_are_the_sums_over_its_trees() -> None:
    """Shares times crossings of every link, as `topoplan.verify` recomputes them."""
    plan = topoplan.ring(DGX, gpus=[1, 4, 5, 7], kind="relay")
    loads: dict[tuple[str, str], float] = {}
    for tree in plan.to_networkx():
        for *_, edge in tree.edges(data=True):
            for hop in pairwise(edge["route"]):
                loads[hop] = loads.get(hop, 0.0) + float(tree.graph["share"])
    assert loads == pytest.approx(topoplan.verify(plan).loads)
    alone = topoplan.plan(DGX, "broadcast", gpus=[3]).to_networkx()
    assert [(list(tree), tree.number_of_edges()) for tree in alone] == [(["gpu3"], 0)]

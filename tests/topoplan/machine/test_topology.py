"""Topologies, their JSON and their networkx graphs: there and back, allocations, and what is refused."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.refusals import refused
from tests.support.small_fabrics import COLLECTIVES, direct_machines, switched_machines
from tests.support.small_machines import library_cases
from topoplan.errors import TopologyError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.library import dgx_1v, dgx_2
from topoplan.machine.topology import DEVICE_KINDS, LINK_CHANNELS, Device, Link, Topology
from topoplan.machine.topology_json import parse_topology_json

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    printable = TEXTS.filter(lambda text: bool(text) and text.isprintable())
    names = draw(st.lists(printable, min_size=1, max_size=6, unique=True))
    kinds, numbers, flags = st.sampled_from(DEVICE_KINDS), st.none() | st.integers(-1, 8), st.booleans()
    drawn = (kinds, TEXTS, TEXTS, TEXTS, numbers, flags, flags)
    devices = tuple(Device(name, *(draw(value) for value in drawn)) for name in names)
    ends = [(a, b, channel) for a in names for b in names if a != b for channel in LINK_CHANNELS]
    chosen = draw(st.lists(st.sampled_from(ends), max_size=8, unique=True)) if ends else []
    drawn = (st.floats(1e-6, 1e6), st.integers(1, 18), st.none() | st.floats(0, 1))
    links = tuple(Link(*end, *(draw(value) for value in drawn)) for end in chosen)
    rates, gpus = (
        st.none() | st.floats(1e-6, 1e6),
        {device.name for device in devices if device.kind == "gpu"},
    )
    links = tuple(
        replace(one, push=draw(rates), pull=draw(rates)) if {one.src, one.dst} <= gpus else one
        for one in links
    )
    return Topology(draw(TEXTS), devices, links, tuple(draw(st.lists(TEXTS, max_size=2))), draw(TEXTS))


@given(topologies())
@settings(max_examples=50)
def test_json_keeps_every_topology(topology: Topology) -> None:
    """Written and read back, a topology is equal to itself, and written again it is the same text."""
    text = topology.to_json()
    assert parse_topology_json(text) == topology
    assert parse_topology_json(text).to_json() == text


WRONG = [None, True, "", "gpu0", "gpu99", "nvlink", -1, 0, 1.5, float("nan"), float("inf"), [], {}]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, child in items for place in [(value, key), *places(child)]]


@given(st.data())
@settings(max_examples=60)
def test_a_mutated_file_is_read_or_refused_by_a_topology_error(data: st.DataObject) -> None:
    """Values replaced, removed or repeated anywhere in a file raise nothing else."""
    value = json.loads(machine_json(source="made", notes=["one"]))
    for _ in range(data.draw(st.integers(1, 3))):
        everywhere = places(value)
        container, key = everywhere[data.draw(st.integers(0, len(everywhere) - 1))]
        action = data.draw(st.sampled_from(["replace", "remove", "repeat"]))
        if action == "replace":
            container[key] = data.draw(st.sampled_from(WRONG))
        elif action == "remove":
            del container[key]
        elif isinstance(container, list):
            container.append(container[key])
        value = json.loads(json.dumps(value))
        if not places(value):
            break
    with contextlib.suppress(TopologyError):
        assert isinstance(parse_topology_json(json.dumps(value)), Topology)


def machine_json(**changes: object) -> str:
    value: dict[str, object] = {
        "format": "topoplan.topology/1",
        "devices": [{"name": "a", "kind": "gpu"}, {"name": "b", "kind": "gpu"}],
        "links": [{"src": "a", "dst": "b", "channel": "nvlink", "bandwidth": 25}],
    }
    return json.dumps(value | changes)


def link_json(**changes: object) -> str:
    return machine_json(links=[{"src": "a", "dst": "b", "channel": "nvlink", "bandwidth": 25} | changes])


def device_json(**changes: object) -> str:
    return machine_json(devices=[{"name": "a", "kind": "gpu"} | changes])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (machine_json(format="topoplan.topology/2"), "topoplan.topology/2"),
        (machine_json(format=None), "None"),
        ("[]", "list"),
        ("{", "not JSON"),
        (machine_json(devices={}), "devices"),
        (machine_json(devices=[{"name": "a", "kind": "gpu"}] * 2), "'a' is used twice"),
        (device_json(kind="tpu"), "'tpu'"),
        (machine_json(devices=[{"name": "a"}]), "'kind'"),
        (device_json(facts={"sm": "9" * 5000}), "fact 'sm' is"),
        (machine_json(devices=[{"nam": "a", "kind": "gpu"}]), "'nam'"),
        (link_json(bandwidth=-1), "-1"),
        (link_json(bandwidth=0), "0"),
        (link_json(bandwidth=float("nan")), "nan"),
        (link_json(bandwidth=float("inf")), "inf"),
        (link_json(bandwidth=1).replace(": 1,", ": 1e400,").replace(": 1}", ": 1e400}"), "inf"),
        ('{"format": "x", "format": "topoplan.topology/1"}', "key 'format' stands twice in an object"),
        ('{"format": ' + "9" * 5000 + "}", "an integer has too many digits"),
        ("[" * 100_000, "not JSON"),
        ('{"a":' * 100_000, "nested too deep"),
        (link_json(bandwidth="25"), "'25'"),
        (link_json(bandwidth=True), "True"),
        (link_json(count=0), "0"),
        (link_json(count=1.5), "1.5"),
        (link_json(latency=-1e-6), "-1e-06"),
        (link_json(channel="infiniband"), "'infiniband'"),
        (link_json(dst="c"), "'c'"),
        (link_json(dst="a"), "a->a"),
        (machine_json(links=[{"src": "a", "dst": "b", "channel": "nvlink", "bandwidth": 1}] * 2), "twice"),
        (device_json(sever="s0"), "device 0 (a): key 'sever' is unknown; did you mean 'server'?"),
        (link_json(counts=2), "link 0 (a->b): key 'counts' is unknown; did you mean 'count'?"),
        (machine_json(sources="me"), "the topology: key 'sources' is unknown; did you mean 'source'?"),
        (
            link_json(speed=3),
            "key 'speed' is unknown; it may have src, dst, channel, bandwidth, count, latency",
        ),
        *(
            (link_json(**{"push": 2, "pull": 2, key: value}), says.format(key, text))
            for key in ("push", "pull")
            for value, text, says in (
                (
                    -1,
                    "-1",
                    "link a->b: {} must be a number of GB/s from 1e-06 to 1e+09, got {}; write null if",
                ),
                (0, "0", "link a->b: {} must be a number of GB/s from 1e-06 to 1e+09, got {}; write null if"),
                (float("nan"), "nan", "link a->b: {} must be a number of GB/s from 1e-06 to 1e+09, got {}"),
                ("fast", "'fast'", "link 0 (a->b): {} must be a number or null, not {}"),
                (
                    26,
                    "26",
                    "link 0 (a->b): bandwidth must be at least 26, the better of push and pull, got 25;",
                ),
            )
        ),
        (
            link_json(pull=2),
            "link 0 (a->b): push and pull must both be stated, got pull alone; add the other",
        ),
        (
            link_json(push=None),
            "link 0 (a->b): push and pull must both be stated, got push alone; add the other",
        ),
        (
            link_json(push=None, pull=None),
            "link 0 (a->b): push and pull must not both be null, since no copy",
        ),
        (
            link_json(push=2, pull=25).replace('"b", "kind": "gpu"', '"b", "kind": "cpu"'),
            "link a->b: push and pull are of links between two GPUs, got cpu b; leave them out",
        ),
        ('{"devices": []}', 'no \'format\'; begin it with "format": "topoplan.topology/1"'),
        ('{"fromat": "topoplan.topology/1"}', "no 'format'; did you mean it by 'fromat'?"),
    ],
)
def test_bad_files_are_refused_with_the_value(text: str, says: str) -> None:
    with refused(TopologyError, says):
        parse_topology_json(text)


def with_access(push: float | None, pull: float | None) -> Topology:
    """A ring of three GPUs whose links from lower to higher numbers have push and pull, stated at 60 GB/s."""
    devices = tuple(Device(f"gpu{number}", "gpu") for number in range(3))
    ends = [(a.name, b.name) for a in devices for b in devices if a != b]
    links = [
        Link(*pair, "pcie", 60, push=push, pull=pull) if pair < pair[::-1] else Link(*pair, "pcie", 52)
        for pair in ends
    ]
    return Topology("box", devices, tuple(links))


@pytest.mark.parametrize(("push", "pull"), [(2.6, 52), (52, 2.6), (None, 52), (52, None)])
def test_a_link_is_planned_at_the_better_of_push_and_pull(push: float | None, pull: float | None) -> None:
    """As without them at that rate; the plan's file keeps them, and its verifier has the same bound."""
    machine = with_access(push, pull)
    plain = replace(machine, links=tuple(replace(one, push=None, pull=None) for one in machine.links))
    assert {one.bandwidth for one in plain.links} == {52}
    assert [one.pulls for one in machine.links if one.access] == [pull == 52] * 3
    made = topoplan.plan(machine)
    again = topoplan.Plan.from_json(made.to_json())
    assert (again.topology.links, again.certificate) == (machine.links, made.certificate)
    assert topoplan.verify(again).exact_bound == topoplan.verify(topoplan.plan(plain)).exact_bound
    assert (
        topoplan.simulate(again, nbytes=1 << 26).seconds
        == topoplan.simulate(topoplan.plan(plain), nbytes=1 << 26).seconds
    )
    slow = topoplan.slow_links(machine, {"gpu0-gpu1": 20})
    assert topoplan.load(slow.to_json()) == slow == topoplan.load(slow.to_networkx())
    assert slow.links[0].access == with_access(push and min(push, 20), pull and min(pull, 20)).links[0].access


def test_facts_may_have_any_key() -> None:
    device = {"name": "a", "kind": "gpu", "facts": {"sever": "s0"}}
    assert parse_topology_json(machine_json(devices=[device], links=[])).devices[0].fact("sever") == "s0"


def test_a_subset_keeps_names_switches_and_the_links_between_its_gpus() -> None:
    """GPUs 1, 4, 5, 7 of a DGX-1V have four NVLink pairs among them, and the whole PCIe side."""
    part = dgx_1v().subset([7, 4, 1, 5])
    assert part.gpus == ("gpu7", "gpu4", "gpu1", "gpu5")
    pairs = {(link.src, link.dst) for link in part.links if link.channel == "nvlink" and link.src < link.dst}
    assert pairs == {("gpu1", "gpu5"), ("gpu4", "gpu5"), ("gpu4", "gpu7"), ("gpu5", "gpu7")}
    assert sum(device.kind == "pcie" for device in part.devices) == 4
    machine = dgx_2()
    assert machine.subset(None) == machine == machine.subset(range(16))


@pytest.mark.parametrize(("gpus", "says"), [([8], "8"), ([-1], "-1"), ([1, 1], "twice"), ([], "empty")])
def test_an_allocation_that_does_not_fit_is_a_usage_error(gpus: list[int], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        dgx_1v().select(gpus)


def test_a_plan_takes_the_wider_of_a_c2c_and_a_pcie_link() -> None:
    devices = (Device("gpu0", "gpu"), Device("gpu1", "gpu"), Device("cpu0", "cpu"))
    ways = [(a, b) for gpu in ("gpu0", "gpu1") for a, b in ((gpu, "cpu0"), ("cpu0", gpu))]
    narrow, wide = ([Link(*ends, *kind) for ends in ways] for kind in (("pcie", 32.0), ("c2c", 450.0)))
    for links in (narrow + wide, wide + narrow):
        assert set(Fabric(Topology("pair", devices, tuple(links)), ("pcie",)).links) == set(wide)


DGX = topoplan.load("dgx-1v")


def pair(**link: object) -> nx.MultiDiGraph:
    """Two GPUs with a link each way."""
    graph = nx.MultiDiGraph(name="pair")
    graph.add_nodes_from(["a", "b"], kind="gpu")
    for src, dst in (("a", "b"), ("b", "a")):
        graph.add_edge(src, dst, **{"channel": "nvlink", "bandwidth": 25.0} | link)
    return graph


@pytest.mark.sampled
@pytest.mark.parametrize("name", library_cases())
def test_machines_of_the_library_survive_the_graph(name: str) -> None:
    machine = topoplan.load(name)
    assert topoplan.load(machine.to_networkx()) == machine == Topology.from_networkx(machine.to_networkx())


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
    with refused(TopologyError, says):
        topoplan.load(graph)


@pytest.mark.parametrize("graph", [nx.Graph(), nx.DiGraph(), nx.MultiGraph(), nx.MultiDiGraph()])
def test_a_graph_of_any_kind_becomes_a_machine(graph: nx.Graph) -> None:
    """An undirected edge is two links; other attributes are ignored; a node that is a number is named by its kind."""
    graph.add_nodes_from(range(3), pos=(0, 0))
    graph.add_edges_from([(0, 1), (1, 2), (2, 0)], weight=np.float32(25), colour="red")
    made = Topology.from_networkx(graph, kind="gpu", channel="nvlink", bandwidth="weight", name="mine")
    assert made.gpus == ("gpu0", "gpu1", "gpu2")
    assert (made.name, len(made.links)) == ("mine", 3 if graph.is_directed() else 6)
    assert {link.bandwidth for link in made.links} == {25.0}


def test_whole_numbers_of_a_graph_are_ranks_in_their_order() -> None:
    """Node 2 is rank 2 in whatever order nodes were added; other nodes keep the order of the graph."""
    graph = nx.Graph()
    graph.add_nodes_from([1, 0, 2, 4, 3, 5])
    nx.add_path(graph, [1, 5, 3, 0, 2, 4], bandwidth=50)
    machine = Topology.from_networkx(graph, kind="gpu", channel="nvlink")
    assert machine.gpus == tuple(f"gpu{number}" for number in range(6))
    made = topoplan.plan_from_trees(machine, "broadcast", [nx.bfs_tree(graph, 0)])
    assert (made.algbw, made.notes) == (50.0, ())
    named = nx.relabel_nodes(graph, {node: (node, "x") for node in graph})
    machine = Topology.from_networkx(named, kind="gpu", channel="nvlink")
    assert machine.gpus[:2] == ("gpu(1, 'x')", "gpu(0, 'x')")
    made = topoplan.plan_from_trees(machine, "broadcast", [nx.bfs_tree(named, (0, "x"))])
    assert (made.algbw, made.notes) == (50.0, ())


def test_one_message_names_all_missing_attributes() -> None:
    graph = nx.Graph([("a", "b"), ("b", "c")])
    graph.nodes["a"]["kind"] = "gpu"
    says = "the graph has no kind for b, c; no channel for a-b, b-c; no bandwidth for a-b, b-c."
    with refused(TopologyError, begins=says):
        Topology.from_networkx(graph, bandwidth="weight")
    with pytest.raises(UsageError, match="graph must be a networkx graph, got dict"):
        Topology.from_networkx({})  # type: ignore[arg-type]
    with pytest.raises(TopologyError, match="two nodes have one name"):
        Topology.from_networkx(nx.Graph([(0, "gpu0")]), kind="gpu", channel="nvlink", bandwidth=1)


def test_removed_gpus_leave_the_numbers_of_the_others() -> None:
    """As --without-gpu; `without_gpus` renumbers."""
    left = dgx_1v().remove_gpus([0, 2])
    assert topoplan.load(left.to_json()) == left
    plan = topoplan.plan(left, gpus=[7, 4, 1])
    assert plan.ranks == ("gpu7", "gpu4", "gpu1")
    assert topoplan.plan(left).ranks == topoplan.without_gpus(dgx_1v(), [0, 2]).gpus
    assert left.remove_gpus([]) is left
    with pytest.raises(UsageError, match="GPU 2 of dgx-1v was taken out; choose among the remaining GPUs"):
        topoplan.plan(left, gpus=[2, 4])
    with pytest.raises(UsageError, match="all 6 GPUs of dgx-1v are taken out"):
        left.remove_gpus([1, 3, 4, 5, 6, 7])
    assert DGX.remove_links(["gpu0-gpu3"]) == topoplan.without_links(DGX, ["gpu0-gpu3"])
    assert DGX.degrade_links({"gpu0-gpu3": 9}) == topoplan.slow_links(DGX, {"gpu0-gpu3": 9})


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
    plan = topoplan.ring_plan(DGX, gpus=[1, 4, 5, 7], kind="relay")
    loads: dict[tuple[str, str], float] = {}
    for tree in plan.to_networkx():
        for *_, edge in tree.edges(data=True):
            for hop in pairwise(edge["route"]):
                loads[hop] = loads.get(hop, 0.0) + float(tree.graph["share"])
    assert loads == pytest.approx(topoplan.verify(plan).loads)
    alone = topoplan.plan(DGX, "broadcast", gpus=[3]).to_networkx()
    assert [(list(tree), tree.number_of_edges()) for tree in alone] == [(["gpu3"], 0)]

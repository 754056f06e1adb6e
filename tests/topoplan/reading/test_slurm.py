"""Slurm's lists of names, topology.conf and topology.yaml: what is read, what becomes of it, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.refusals import refused
from topoplan.errors import TopologyError, TopoplanError, UsageError
from topoplan.machine.named_nodes import NodeNetwork, cluster_of_nodes
from topoplan.machine.topology import Device, Topology
from topoplan.reading.load import form_of, load_network
from topoplan.reading.slurm import (
    AGGREGATED,
    LINK_SPEED,
    expand_hostlist,
    fold_hostlist,
    parse_slurm,
    read_yaml,
)

HOST = Topology("host", (Device("gpu0", "gpu"),), ())
RACK = topoplan.load("gb200-nvl72")


def of_conf(text: str, machine: Topology, *, name: str = "cluster", **options: Any) -> Topology:
    """The nodes of a topology.conf as a cluster of equal machines with NICs of 100 Gb/s."""
    network = parse_slurm(text, name=name)
    return cluster_of_nodes(network, {node: machine for node, _ in network.nodes}, nic_gbps=100, **options)


CONF = """\
# switch.2.1=core-a  (as topograph says what a short name stands for)
SwitchName=leaf1 Nodes=node[01,03,05] LinkSpeed=200
switchname=leaf2 nodes=node[02,04],node[06-07]   # keys in any case
SwitchName=spine \\
    Switches=leaf[1-2]
"""

YAML = """\
---
- topology: small
  cluster_default: false
  tree:
    switches:
        - switch: leaf1
          nodes: n[1-2]
- topology: racks
  clusterDefault: true     # as topograph writes it
  block:
    blockSizes:
        - 2
    blocks:
    - block: rack2
      nodes: n[3-4]
    - block: rack1
      nodes: "n[1-2]"
- topology: all
  flat: true
"""


def test_a_topology_conf_is_a_tree_and_its_nodes_in_slurms_order() -> None:
    found = parse_slurm(CONF, name="here")
    assert found.switches == (("leaf1", "spine"), ("leaf2", "spine"), ("spine", ""))
    assert [node for node, _ in found.nodes] == [f"node0{number}" for number in range(1, 8)]
    assert dict(found.nodes)["node07"] == "leaf2"
    assert (found.name, found.blocks, found.notes) == ("here", False, (LINK_SPEED,))


def test_of_a_topology_yaml_the_default_is_taken_or_the_one_of_a_name() -> None:
    found = parse_slurm(YAML)
    assert found.blocks
    assert found.nodes == (("n1", "rack1"), ("n2", "rack1"), ("n3", "rack2"), ("n4", "rack2"))
    assert found.notes == ("of 3 topologies in the file racks is taken",)


SCONTROL = """\
SwitchName=top Level=2 LinkSpeed=1 Nodes=n[01-06] Switches=cell[1-2]
SwitchName=cell1 Level=1 LinkSpeed=1 Nodes=n[01-04] Switches=leaf[1-2]
SwitchName=cell2 Level=1 LinkSpeed=1 Nodes=n[05-06] Switches=leaf3
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[01,03]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[02,04]
SwitchName=leaf3 Level=0 LinkSpeed=1 Nodes=n05
SwitchName=spare Level=0 LinkSpeed=1 Nodes=(null)
"""


def test_what_scontrol_prints_is_read_with_each_node_on_its_lowest_switch() -> None:
    """In any order of lines; a node that only an upper switch names stays there."""
    homes = {"n01": "leaf1", "n02": "leaf2", "n03": "leaf1", "n04": "leaf2", "n05": "leaf3", "n06": "cell2"}
    for text in (SCONTROL, "\n".join(reversed(SCONTROL.splitlines()))):
        found = parse_slurm(text)
        assert dict(found.nodes) == homes
        assert dict(found.switches) == {
            **{"leaf1": "cell1", "leaf2": "cell1", "leaf3": "cell2"},
            **{"cell1": "top", "cell2": "top", "top": ""},
        }
        assert set(found.notes) == {LINK_SPEED, "spare has no nodes and is left out"}


def test_what_scontrol_prints_of_blocks_is_read_without_aggregated_ones() -> None:
    found = parse_slurm(
        "BlockName=b1 BlockIndex=0 Nodes=n[01-02] BlockSize=2\n"
        "BlockName=b2 BlockIndex=1 Nodes=n[03-04] BlockSize=2\n"
        "AggregatedBlock=b[1-2] BlockIndex=2 Nodes=n[01-04] BlockSize=4\n"
    )
    assert found.nodes == (("n01", "b1"), ("n02", "b1"), ("n03", "b2"), ("n04", "b2"))
    assert found.notes == (AGGREGATED,)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n[2-3]\nSwitchName=c Switches=a,b", "node n2 is named twice"),
        ("SwitchName=a Level=x Nodes=n1", "line 1: Level must be a whole number, got 'x'"),
        ("SwitchName=a Nodes=n[" + "0-65535," * 9999 + "1]", "makes more than 65536 names"),
        ("\n".join(f"SwitchName=s{i} Nodes=n[0-65535]" for i in range(9)), "the file makes more than 524288 names"),
        ("SwitchName=a Nodes=n" + "1" * 5000, "has more than 255 characters"),
        ("- topology: x\n  a" + " " * 200_000 + "b", "the YAML cannot be parsed"),
        ("SwitchName=a Nodes=n1 " + "\\\n" * 200_000, "ends with a backslash, but no line follows"),
        (
            "\n".join(f"SwitchName=s{i} Switches=s{i + 1}" for i in range(99)) + "\nSwitchName=s99 Nodes=n",
            "more than 64 switches are above switch s",
        ),
        ("SwitchName=a Switches=b", "line 1: switch b below a is defined nowhere"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a", "switches a, b are above one another in a circle"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1", "node n1 is named twice, below a and b"),
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2", "switch a is named twice"),
        ("SwitchName=a Switches=c\nSwitchName=b Switches=c\nSwitchName=c Nodes=n1", "switch c is named twice, below"),
        ("SwitchName=a Nodes=n[1-", "line 1: 'n[1-' has a bracket that is not closed"),
        ("SwitchName=a Nodes=n[2-1]", "the range 2-1 runs backwards"),
        ("SwitchName=a Nodes=n[1-99999999]", "makes more than 65536 names"),
        ("SwitchName=a", "line 1: nothing is below a; give Nodes or Switches"),
        ("SwitchName=a Nodes=n1 Speed=3", "line 1: Speed does not belong to SwitchName"),
        ("SwitchName=a Nodes=n1 Nodes=n2", "line 1: Nodes occurs twice"),
        ("SwitchName=a Nodes=n1\nName=x", "line 2 begins with Name"),
        ("SwitchName=a Nodes = n1", "line 1: 'Nodes' is not Key=value"),
        ("SwitchName=a[1-2] Nodes=n1", "names 2 at once"),
        ("SwitchName=a Nodes=ALL", "line 1: Nodes=ALL stands for the nodes of slurm.conf, which are not known here"),
        ("- topology: x\n  block:\n    blocks:\n      - block: b\n        nodes: all\n", "b: Nodes=all stands for the"),
        ("SwitchName=a Nodes=n1 \\", "line 1 ends with a backslash, but no line follows"),
        ("SwitchName=a Nodes=n1\nBlockName=b Nodes=n2", "switches and blocks stand in one topology.conf"),
        ("BlockName=a Nodes=n1\nBlockSizes=2,x", "line 2: block size must be a whole number above 0, got 'x'"),
        (YAML[: YAML.index("_default")], "the YAML cannot be parsed"),
        (YAML[: YAML.index("    switches")], "topology small: tree has no keys below it; the file may have been cut"),
        (YAML[: YAML.index("        - switch")], "topology small lists no switches; the file may have been cut"),
        (YAML[: YAML.index("          nodes")], "topology small: leaf1: nothing is below leaf1"),
        ("- topology: x\n  flat: true\n", "topology x is flat and names no nodes"),
        ("- topology: x\n  flat: true\n  block: y\n", "topology x has block and flat; it is one of"),
        ("- topology: x\n\ttree:\n", "the YAML cannot be parsed"),
        ("- topology: x\n  tree:\n    switches: {a: b}\n", "topology x lists no switches"),
        ("- topology: &a x\n  tree: *a\n", "line 1: an alias repeats what an anchor names"),
        ("- topology: x\n  topology: y\n", "line 2: key topology occurs twice"),
        ("- topology: !!int 3\n", "line 1: tag:yaml.org,2002:int is a tag"),
        ("- topology: x\n  ? [a]\n  : b\n", "line 2: a key must be a text"),
        ("- topology: x\n  tree: " + "[" * 60 + "]" * 60, "nested more than 50 deep"),
        ("- topology: x\n    tree:\n", "the YAML cannot be parsed"),
        ("- topology: x\n  tree:\n    switches:\n   - switch: a\n", "the YAML cannot be parsed"),
        ("- topology: x\n  block:\n    blocks:\n      - block: b\n        nodes: [a]\n", "nodes or children as a text"),
    ],
)  # fmt: skip
def test_what_makes_no_network_is_told_with_its_place(text: str, told: str) -> None:
    with refused(TopologyError, told):
        parse_slurm(text)


STEMS, NUMBERS = st.sampled_from(["n", "gpu-", "r1c", ""]), st.sampled_from(["", "7", "08", "9", "10", "100"])
NAMES = st.lists(st.builds("{}{}".format, STEMS, NUMBERS), min_size=1, max_size=8).filter(all)


@given(names=NAMES)
@settings(max_examples=100)
def test_what_is_folded_is_expanded_to_the_same_names_in_the_same_order(names: list[str]) -> None:
    assert list(expand_hostlist(fold_hostlist(names))) == names


def test_lists_of_names_with_several_brackets_and_words() -> None:
    assert expand_hostlist("r[1-2]c[08-09],login") == ("r1c08", "r1c09", "r2c08", "r2c09", "login")
    assert fold_hostlist(["n1", "n2", "n3", "n10", "n9"]) == "n[1-3,10,9]"
    for text in ("", "a,,b", "a b", "n[]", "n[1,]", "n]1["):
        with pytest.raises(TopologyError):
            expand_hostlist(text)


def test_yaml_of_lists_keys_quotes_and_comments() -> None:
    text = "a: [1, 'x y']\nb:\n- c: 1\n  d:\n    e: f#g  # comment\n-\n  - h\nempty:\n"
    assert read_yaml(text) == {"a": ["1", "x y"], "b": [{"c": "1", "d": {"e": "f#g"}}, ["h"]], "empty": None}


def test_uplinks_carry_what_hangs_below_by_the_oversubscription_nodes_of_others_included() -> None:
    """Of seven nodes four are taken; the uplinks of the leaves stay those of three and of four nodes."""
    taken = ["node01", "node02", "node03", "node04"]
    machine = of_conf(CONF, HOST, nodes=taken, oversubscription=2)
    width = {(link.src, link.dst): link.bandwidth for link in machine.links}
    assert width["leaf1", "spine"] == 3 * 12.5 / 2
    assert width["spine", "leaf2"] == 4 * 12.5 / 2
    assert machine.gpus == tuple(f"{node}.gpu0" for node in taken)


def test_switches_that_the_nodes_do_not_need_are_left_out() -> None:
    machine = of_conf(CONF, HOST, nodes=["node03", "node01"])
    assert [device.name for device in machine.devices if device.kind == "switch"] == ["leaf1"]


def test_nodes_of_a_block_are_hosts_of_one_nvlink_domain() -> None:
    """A tree does not say which nodes share one."""
    machine = of_conf("BlockName=b2 Nodes=n[3-5]\nBlockName=b1 Nodes=n[1-2]\nBlockSizes=2", RACK)
    assert machine.servers == ("b1", "b2")
    hosts = [device.fact("host") for device in machine.devices if device.kind == "gpu"]
    assert hosts == [f"n{number}" for number in range(1, 6) for _ in range(4)]
    for text, told in (
        ("BlockName=b Nodes=n[1-19]", "block b has 19 nodes, and an NVLink domain of gb200-nvl72 18"),
        (CONF, "add --domain 4 for single hosts, or give blocks"),
    ):
        with refused(UsageError, told):
            of_conf(text, RACK)


def test_blocks_of_hosts_are_leaves_below_a_switch_that_has_a_name_of_its_own() -> None:
    machine = of_conf("BlockName=top Nodes=n[1-2]\nBlockName=b Nodes=n3", HOST)
    switches = [device.name for device in machine.devices if device.kind == "switch"]
    assert switches == ["top-", "top", "b"]


def test_nodes_that_nothing_joins_or_that_are_not_there_are_refused() -> None:
    islands = "SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n3"
    for nodes, told in (
        (None, "n1 and n3 cannot reach each other: nothing is above both a and b"),
        (["n9"], "node n9 is not in two islands, which has 3 nodes, n1 to n3"),
        (["n1", "n1"], "node n1 is named twice"),
    ):
        with refused(UsageError, told):
            of_conf(islands, HOST, name="two islands", nodes=nodes)


def test_a_file_is_recognised_and_as_a_machine_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "topology.conf"
    path.write_text(CONF)
    assert (form_of(CONF), form_of(YAML)) == ("topology.conf", "topology.yaml")
    found = load_network(path)
    assert isinstance(found, NodeNetwork)
    assert found.name == "topology"
    assert load_network("       GPU0  GPU1\nGPU0   X    NV2\nGPU1  NV2    X") is None
    with pytest.raises(UsageError, match="states how Slurm's nodes are joined, and not what a node is"):
        topoplan.load(path)


def cluster_file(folder: Path, servers: list[dict[str, object]], **network: object) -> Path:
    (folder / "topology.conf").write_text(CONF)
    path = folder / "cluster.json"
    value = {"format": "topoplan.cluster/1", "servers": servers}
    path.write_text(json.dumps({**value, "network": {"tree": "topology.conf", "nic_gbps": 100, **network}}))
    return path


def test_a_cluster_file_says_what_the_nodes_of_a_tree_are(tmp_path: Path) -> None:
    servers: list[dict[str, object]] = [{"machine": "v100x4", "nodes": "node[02,04]"}, {"machine": "dgx-1v"}]
    machine = topoplan.load(cluster_file(tmp_path, servers, oversubscription=2))
    assert machine.servers == tuple(f"node0{number}" for number in range(1, 8))
    assert len(machine.gpus) == 2 * 4 + 5 * 8


@pytest.mark.parametrize(
    ("servers", "network", "told"),
    [
        ([{"machine": "dgx-1v", "count": 2}], {}, r"servers\[0\]: count does not go with a tree"),
        ([{"machine": "dgx-1v"}], {"leaf_size": 2}, "network: leaf_size does not go with a tree"),
        ([{"machine": "dgx-1v", "nodes": "node09"}], {}, "node node09 is not in the tree"),
        ([{"machine": "dgx-1v", "nodes": "node01"}], {}, "node node02 of the tree belongs to no server"),
        ([{"machine": "dgx-1v"}, {"machine": "dgx-2"}], {}, "two servers name no nodes"),
    ],
)
def test_cluster_files_of_trees_that_do_not_fit(
    tmp_path: Path, servers: list[dict[str, object]], network: dict[str, object], told: str
) -> None:
    with pytest.raises(TopoplanError, match=told):
        topoplan.load(cluster_file(tmp_path, servers, **network))


def test_nodes_without_a_tree_are_refused() -> None:
    value = {"format": "topoplan.cluster/1", "servers": [{"machine": "dgx-1v", "nodes": "a"}]}
    with refused(TopologyError, "servers[0]: nodes belong to a network with a tree"):
        topoplan.load(json.dumps({**value, "network": {"nic_gbps": 1}}))

"""Cluster files: what they build, where their machines come from, and what is refused with the key's name."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.machine_links import speeds
from tests.support.refusals import refused
from topoplan.errors import TopologyError, UsageError
from topoplan.machine.cluster import cluster
from topoplan.machine.cluster_network import Server
from topoplan.machine.topology import Topology

V100S = topoplan.load("dgx-1v")

PAIR = "     GPU0 GPU1 CPU Affinity\nGPU0  X   NV2  0-15\nGPU1 NV2   X   0-15\n"


def cluster_json(**changes: object) -> dict[str, Any]:
    return {
        "format": "topoplan.cluster/1",
        "servers": [{"machine": "dgx-1v", "gpus": [0, 1, 2]}, {"machine": "dgx-1v", "gpus": "3-7"}],
        "network": {"nic_gbps": 100},
        **changes,
    }


def server_json(**changes: object) -> dict[str, object]:
    return cluster_json(servers=[{"machine": "dgx-1v", **changes}])


def network_json(**changes: object) -> dict[str, object]:
    return cluster_json(network={"nic_gbps": 100, **changes})


def test_a_file_builds_what_the_function_does() -> None:
    """Allocations as list and as text, a server of its own count, NICs and speed, and every key of the network."""
    own: dict[str, Any] = {"nics": 1, "nic_gbps": 40, "count": 2}
    network: dict[str, Any] = {"nic_gbps": 100, "nics": 2, "rails": 2, "oversubscription": 2.5}
    network["nic_access"] = "direct"
    first, second = cluster_json()["servers"]
    value = {"servers": [first, second | own], "network": {"kind": "rail-optimised", **network}}
    made = topoplan.load(json.dumps(cluster_json(name="two kinds", **value)))
    servers = [Server(V100S, [0, 1, 2]), Server(V100S, range(3, 8), **own)]
    assert made == cluster(servers, network="rail-optimised", name="two kinds", **network)
    assert topoplan.load(made.to_json()) == made
    tree = topoplan.load(json.dumps(network_json(kind="fat-tree", leaf_size=1)))
    assert [device.name for device in tree.devices if device.kind == "switch"] == ["leaf0", "leaf1", "spine0"]


def test_machines_are_found_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is relative to the cluster file, from wherever it is read; the text of nvidia-smi needs its speed."""
    (tmp_path / "boxes").mkdir()
    (tmp_path / "boxes" / "pair.txt").write_text(PAIR)
    (tmp_path / "boxes" / "eight.json").write_text(V100S.to_json())
    pair = {"machine": "boxes/pair.txt", "nvlink_gbps": 50, "pcie_gbps": 24}
    file = tmp_path / "both.json"
    file.write_text(json.dumps(cluster_json(servers=[pair, {"machine": "boxes/eight.json"}])))
    monkeypatch.chdir("/")
    made = topoplan.load(file)
    assert made.name == "pair + dgx-1v"
    assert made.gpus == ("s0.gpu0", "s0.gpu1", *(f"s1.gpu{i}" for i in range(8)))
    assert speeds(made, "nvlink")["s0.gpu0", "s0.gpu1"] == 100.0


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (cluster_json(format="topoplan.cluster/2"), "format 'topoplan.cluster/2' is not"),
        (cluster_json(servers=[]), "servers is an empty list"),
        (cluster_json(servers={}), "the cluster: servers must be a list, not {}"),
        (cluster_json(servers=[3]), "servers[0] must be an object, not 3"),
        (cluster_json(network=[]), "the cluster: network must be an object, not []"),
        (cluster_json(name=7), "the cluster: name must be a text, not 7"),
        (cluster_json(nic_gbps=100), "the cluster: key 'nic_gbps' is unknown"),
        (cluster_json(server=[]), "key 'server' is unknown; did you mean 'servers'?"),
        (cluster_json(servers=[{"gpus": [0]}]), "servers[0] has no 'machine'"),
        (server_json(gpu=[0]), "servers[0]: key 'gpu' is unknown; did you mean 'gpus'?"),
        (server_json(gpus=0), "gpus must be a list of whole numbers, or a text such as '0-3', not 0"),
        (server_json(gpus=[0, "1"]), "servers[0]: gpus must be a list of whole numbers"),
        (server_json(gpus="0-"), "servers[0]: '0-' is not a list of GPU numbers"),
        (server_json(gpus=[9]), "servers[0]: GPU 9 is out of range: dgx-1v has GPUs 0 to 7"),
        (server_json(gpus=[]), "servers[0]: the GPU list is empty"),
        (server_json(count=True), "servers[0]: count must be a whole number, not True"),
        (server_json(count=0), "servers[0]: count 0 must be a whole number from 1"),
        (server_json(count=10**400), "servers[0]: count of more than 19 digits"),
        (server_json(count=10**9), "1,000,000,000 servers are 22,000,000,000 devices"),
        (server_json(nics=0), "servers[0]: nics 0"),
        (server_json(nic_gbps="fast"), "servers[0]: nic_gbps must be a number, not 'fast'"),
        (server_json(nic_gbps=0), "servers[0]: nic_gbps 0 must be a number of Gb/s above zero"),
        (server_json(nvlink_gbps=25), "servers[0]: dgx-1v: topology JSON states its own bandwidths"),
        (server_json(machine="dgx1v"), "in the library, and no such file; did you mean dgx-1v?"),
        (network_json(kind="ring"), "network 'ring' is unknown; use one of switch, rail-optimised, fat-tree"),
        (network_json(speed=3), "network: key 'speed' is unknown"),
        (server_json(counts=2), "servers[0]: key 'counts' is unknown; did you mean 'count'?"),
        (network_json(rail=2), "network: key 'rail' is unknown; did you mean 'rails'?"),
        (network_json(rails=2), "rails belongs to the network rail-optimised"),
        (network_json(kind="fat-tree", leaf_size=1.5), "network: leaf_size must be a whole number, not 1.5"),
        (network_json(nic_gbps=0), "nic_gbps 0 must be a number of Gb/s above zero"),
        (cluster_json(network={"kind": "switch"}), "neither network nor servers[0] has 'nic_gbps'"),
    ],
)
def test_bad_files_are_refused_in_one_line_that_names_the_key(value: dict[str, object], says: str) -> None:
    with refused((TopologyError, UsageError), says):
        topoplan.load(json.dumps(value))


def test_refuses_a_cluster_as_a_server_and_bandwidths_of_text(tmp_path: Path) -> None:
    file = tmp_path / "self.json"
    file.write_text(json.dumps(server_json(machine="self.json")))
    with pytest.raises(TopologyError, match=r"servers\[0\]: self\.json: it is a cluster"):
        topoplan.load(file)
    with pytest.raises(UsageError, match="states its own bandwidths"):
        topoplan.load(json.dumps(cluster_json()), nvlink_gbps=25)
    devices = [{"name": "gpu0", "kind": "gpu"}, {"name": "spine0", "kind": "switch"}]
    with pytest.raises(TopologyError, match="spine0 is a switch without ports"):
        topoplan.load(json.dumps({"format": "topoplan.topology/1", "devices": devices, "links": []}))


@settings(max_examples=60)
@given(st.data())
def test_a_mutated_file_is_read_or_refused(data: st.DataObject) -> None:
    value = json.loads(json.dumps(network_json(kind="rail-optimised", rails=2, oversubscription=2, nics=3)))
    odd = st.sampled_from(
        [None, True, -1, 0, 1, 1.5, 10**30, float("nan"), "", "0-1", "dgx-2", [], [0], {}, [{}]]
    )
    where = data.draw(st.sampled_from([value, value["network"], value["servers"][0], value["servers"][1]]))
    where[data.draw(st.sampled_from([*where, "other"]))] = data.draw(odd)
    with contextlib.suppress(TopologyError, UsageError):
        assert isinstance(topoplan.load(json.dumps(value)), Topology)

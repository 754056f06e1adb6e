"""Transports, caps of a connection, and NVLink domains: what a network does to a cluster's links."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import topoplan
from tests.support.checkout import Run
from tests.support.machine_links import speeds
from tests.support.refusals import refused
from topoplan.errors import UsageError
from topoplan.machine.cluster import cluster
from topoplan.machine.cluster_network import Server
from topoplan.machine.fabric import Fabric
from topoplan.machine.named_nodes import domain
from topoplan.machine.topology import Topology
from topoplan.machine.transport import TRANSPORTS
from topoplan.model.dataflow import device_kinds, route_latency
from topoplan.operate.calibration.calibrated_topology import calibrated
from topoplan.operate.calibration.fit import Measurement, PairSamples
from topoplan.plans.structure import connections_needed, flow_caps

BOTH = ("tcp", "rdma")


def hosts(transport: str | None, count: int = 8, *, payload: float = 5.0, **options: Any) -> Topology:
    """Servers of one GPU and one NIC that carries so many GB/s of payload."""
    share = TRANSPORTS[transport].share if transport else 1.0
    network = {"nic_gbps": 8 * payload / share, "nics": 1, "nic_access": "direct", "transport": transport}
    return cluster([Server("dgx-1v", [0], count=count)], **network, **options)  # type: ignore[arg-type]


def wire(machine: Topology) -> float:
    """GB/s of the first server's NIC into the network."""
    (found,) = (
        rate for (src, dst), rate in speeds(machine).items() if src.startswith("s0.nic") and "switch" in dst
    )
    return found


def test_a_ring_of_eight_saves_392_us_by_rdma_whatever_the_size() -> None:
    """2 * 7 hops, 28 us each; a tenth of 1.4 MB over one hop, since 28 us * 5 GB/s / 0.1 = 1.4 MB."""
    rings = [topoplan.ring_plan(hosts(name), "allreduce") for name in BOTH]
    for nbytes in (8, 1 << 20, 1 << 28):
        slow, fast = (topoplan.simulate(one, nbytes=nbytes, chunk_bytes=nbytes).seconds for one in rings)
        assert slow - fast == pytest.approx(392e-6, rel=1e-9)
    plans = [topoplan.plan(hosts(name, 2), "broadcast") for name in BOTH]
    one, other = (topoplan.simulate(plan, nbytes=1_400_000, chunk_bytes=1_400_000) for plan in plans)
    assert (one.seconds - other.seconds) / other.bandwidth_seconds == pytest.approx(0.1)


def test_tcp_loads_memory_with_four_times_what_a_nic_sends() -> None:
    """12.5 GB/s in and out, copied twice: 50 GB/s; no copies by RDMA."""
    loads = {name: one.memory_load(12.5, 12.5) for name, one in TRANSPORTS.items()}
    assert loads == {"tcp": 50.0, "dpdk": 25.0, "rdma": 0.0}
    assert "2 copies of each byte, up to 50 GB/s of a server's memory" in hosts("tcp", payload=12.5).notes[-1]
    assert "no copies in a server's memory" in hosts("rdma", payload=12.5).notes[-1]


def test_memory_that_copies_fill_slows_the_nics_of_a_server() -> None:
    """20 GB/s: two copies each way leave 5 GB/s to one NIC, one copy 10, none all."""
    found = [wire(hosts(name, payload=12.5, memory_gbps=20)) for name in TRANSPORTS]
    assert found == pytest.approx([5.0, 10.0, 12.5])
    network = {"nic_gbps": 100, "nics": 4, "nic_access": "direct", "transport": "tcp", "memory_gbps": 40}
    four = cluster([Server("dgx-a100", count=2)], **network)  # type: ignore[arg-type]
    assert [speeds(four)[f"s0.nic{nic}.tx", "switch0"] for nic in range(4)] == pytest.approx([2.5] * 4)
    assert "up to 40 GB/s" in four.notes[-1]


def test_polling_cores_are_printed(run: Run) -> None:
    """One for each NIC with DPDK, none with others; RDMA wants a network that drops nothing."""
    lines = {}
    for name in TRANSPORTS:
        asked = (
            "--servers",
            "2",
            "--nics",
            "4",
            "--nic-bandwidth",
            "100Gb/s",
            "--transport",
            name,
            "--notes",
        )
        (lines[name],) = (
            one for one in run("plan", "dgx-a100", *asked)[1].splitlines() if "transport" in one
        )
    assert "start-up of 10 us and 94.1% of the wire, assumed unless calibrated" in lines["dpdk"]
    assert lines["dpdk"].endswith("4 cores polling in each server")
    assert lines["tcp"].endswith("no cores polling in each server")
    assert lines["rdma"].endswith("no cores polling in each server, a network that drops nothing")


@pytest.mark.parametrize("machine", ["dgx-1v", "pcie-x8"])
def test_measured_copies_replace_what_is_assumed(machine: str) -> None:
    """12 us and 4 GB/s between two servers, where tcp assumes 30 us: NVLink machines and PCIe trees."""
    stated = cluster([Server(machine, count=2)], nic_gbps=40, nics=1, transport="tcp")
    times = tuple((n << 20, (12e-6 + (n << 20) / 4e9,) * 3) for n in (1, 16, 256))
    pairs = tuple(PairSamples(*ends, times) for ends in (("s0.gpu0", "s1.gpu0"), ("s1.gpu0", "s0.gpu0")))
    made = calibrated(stated, Measurement("by hand", (1 << 20, 1 << 24, 1 << 28), 3, pairs), date="").topology
    for found, alpha, rate in ((stated, 30e-6, 5 * 1448 / 1538), (made, 12e-6, 4.0)):
        channel = "nvlink" if machine == "dgx-1v" else "pcie"
        part = found.subset([0, 8])
        (there, _) = Fabric(part, (channel, "network")).arcs
        links = [Fabric(part, (channel, "network")).links[link] for link in there.links]
        assert route_latency(links, device_kinds(part)) == pytest.approx(alpha)
        assert min(link.bandwidth for link in links) == pytest.approx(rate)


def test_a_file_may_say_it_and_without_it_nothing_changes() -> None:
    network: dict[str, Any] = {"nic_gbps": 100, "transport": "dpdk", "memory_gbps": 30}
    value = {"servers": [{"machine": "dgx-1v", "count": 2}], "network": network}
    text = json.dumps({"format": "topoplan.cluster/1", **value})
    assert topoplan.load(text) == cluster([Server("dgx-1v", count=2)], **network)
    assert all(one.latency is None for one in hosts(None).links)
    assert wire(hosts(None)) == 5.0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"transport": "udp"}, "transport 'udp' is unknown; use one of tcp, dpdk, rdma"),
        ({"memory_gbps": 20}, "give a transport too, such as tcp"),
        ({"transport": "tcp", "memory_gbps": 0}, "memory_gbps 0 must be GB/s from 0.001 to 1000000"),
        ({"transport": "tcp", "memory_gbps": True}, "memory_gbps True must be"),
        *(({"flow_gbps": flow}, "flow_gbps") for flow in (0, float("nan"), "5", True)),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(options: dict[str, Any], told: str) -> None:
    with refused(UsageError, told):
        cluster([Server("dgx-1v", count=2)], nic_gbps=100, **options)
    if "flow_gbps" in options:
        with refused(UsageError, told):
            Server("dgx-1v", **options)


def capped(flow: float | None, *, gpus: int = 1, nics: int = 1, count: int = 2) -> Topology:
    servers = [topoplan.Server("dgx-1v", list(range(gpus)), count=count)]
    return topoplan.cluster(servers, nic_gbps=40, nics=nics, flow_gbps=flow, nic_access="direct")


@pytest.mark.parametrize(
    ("flow", "needed", "single"), [(5, 8, 0.625), (20, 2, 2.5), (30, 2, 3.75), (40, 1, 5.0), (100, 1, 5.0)]
)
def test_two_servers_need_the_nic_over_the_cap(flow: float, needed: int, single: float) -> None:
    """An allreduce of two does 5 GB/s over NICs of 40 Gb/s, all of it between the two."""
    plan = topoplan.plan(capped(flow))
    found = connections_needed(plan)
    assert plan.rate == 5.0
    assert found is not None
    assert (found.needed, found.single, found.carried) == (needed, single, 5.0)


def test_the_rate_with_one_connection_is_what_the_fullest_pair_allows() -> None:
    """Recomputed from the plan's edges, on four servers of two GPUs and two NICs."""
    plan = topoplan.plan(capped(5, gpus=2, nics=2, count=4), "allgather")
    found = connections_needed(plan)
    assert found is not None
    sent: dict[object, float] = {}
    for shard in plan.shards:
        for stage in shard.stages:
            for edge in stage.edges:
                nics = tuple(name for name in edge.route if "nic" in name)
                if nics:
                    key = edge.parent, edge.child, nics
                    sent[key] = sent.get(key, 0.0) + float(shard.share)
    assert found.single == pytest.approx(min(plan.rate, 0.625 / max(sent.values())))
    assert found.needed * 0.625 >= max(sent.values()) * plan.rate * (1 - 1e-9)
    assert (found.needed - 1) * 0.625 < max(sent.values()) * plan.rate


def test_rates_and_bounds_do_not_depend_on_the_cap() -> None:
    slow, free = topoplan.plan(capped(5)), topoplan.plan(capped(None))
    assert (slow.rate, slow.bound, slow.shards) == (free.rate, free.bound, free.shards)
    assert connections_needed(free) is None
    assert connections_needed(topoplan.plan(capped(5, gpus=2), gpus=[0, 1])) is None
    assert topoplan.load(capped(5).to_json()) == capped(5)


def test_a_server_may_have_a_cap_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    servers = [{"machine": "dgx-1v", "gpus": [0]}, {"machine": "dgx-1v", "gpus": [0], "flow_gbps": 10}]
    network = {"nic_gbps": 40, "nics": 1, "flow_gbps": 5}
    path.write_text(json.dumps({"format": "topoplan.cluster/1", "servers": servers, "network": network}))
    caps = {name: float(cap) for name, cap in flow_caps(topoplan.load(path)).items()}
    both = ("tx", "rx")
    assert caps == {f"s{i}.nic0.{way}": cap for i, cap in enumerate((0.625, 1.25)) for way in both}


def test_the_plan_says_so_on_the_command_line(run: Run) -> None:
    words = ["plan", "dgx-1v", "--gpus", "0,8", "--servers", "2", "--nic-bandwidth", "40Gb/s", "--nics", "1"]
    slow = [*words, "--flow-bandwidth", "5Gb/s"]
    told = "connections  8 connections from s0.gpu0 to s1.gpu0 carry 5 GB/s at 0.625 GB/s each; with one"
    assert told in run(*slow)[1]
    assert json.loads(run(*slow, "--json")[1])["connections"]["needed"] == 8
    assert "connections" not in json.loads(run(*words, "--json")[1])
    fast = run(*words, "--flow-bandwidth", "100Gb/s")[1]
    assert "connections  one connection from a rank to another does" in fast
    status, _, error = run("plan", "dgx-1v", "--flow-bandwidth", "5Gb/s")
    assert (status, "--flow-bandwidth belongs to --servers" in error) == (2, True)
    for wrong in ([*words, "--transport", "udp"], ["plan", "dgx-1v", "--transport", "tcp"]):
        assert run(*wrong)[0] == 2


@pytest.mark.parametrize("size", [4, 12, 72])
def test_a_domain_has_its_gpus_trays_and_one_switch(size: int) -> None:
    rack = topoplan.load("gb200-nvl72")
    part = domain(rack, size)
    kinds = [device.kind for device in part.devices]
    assert [kinds.count(kind) for kind in ("gpu", "cpu", "nic", "nvswitch")] == [size, size // 2, size, 1]
    assert sum(link.bandwidth for link in part.links if link.dst == "nvswitch0") == 900 * size


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("gb200-nvl72", 7, "72 GPUs of gb200-nvl72 make no domains of 7; use one of 1, 2, 3, 4, 6, 8"),
        ("gb200-nvl72", 2, "domains of 2 GPUs of gb200-nvl72 would share CPUs"),
        ("dgx-h100", 4, "domains of 4 GPUs of dgx-h100 would share CPUs"),
        ("dgx-1v", 4, "dgx-1v has no NVSwitch"),
    ],
)
def test_refuses_what_makes_no_domains(name: str, size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        domain(topoplan.load(name), size)


@pytest.mark.parametrize(
    ("size", "ring", "tree", "optimum"),
    [(4, 107.3, 127.9, 150.0), pytest.param(8, 205.4, 253.4, 300.0, marks=pytest.mark.thorough)],
)
def test_three_domains_of_a_rack_by_option_are_those_that_were_measured(
    size: int, ring: float, tree: float, optimum: float, run: Run
) -> None:
    """NCCL issue 1801 on the library machine: rings within 5 %, trees within 15 %, the optimum above all."""
    asked = ("--domain", str(size), "--gpus", f"0-{3 * size - 1}", "--nic-access", "direct", "--json")
    status, out, err = run("compare", "gb200-nvl72", *asked)
    assert (status, err) == (0, "")
    row = json.loads(out)["rows"][0]
    assert row["ring"] == pytest.approx(ring, rel=0.05)
    assert (row["nccl_kind"], row["nccl"]) == ("nccl tree", pytest.approx(tree, rel=0.15))
    assert (row["trees"], row["bound"]) == (optimum, optimum)
    assert row["trees"] > max(ring, tree, row["nccl"])


@pytest.mark.thorough
def test_domains_of_several_racks_and_the_whole_rack(run: Run) -> None:
    asked = ("--domain", "36", "--servers", "2", "--bound-only", "--json")
    found = json.loads(run("plan", "gb200-nvl72", *asked)[1])
    assert (len(found["ranks"]), found["ranks"][-1]) == (144, "s3.gpu35")
    whole = ("plan", "gb200-nvl72", "--gpus", "0-3", "-o", "-")
    assert run(*whole, "--domain", "72") == run(*whole)
    status, out, err = run("plan", "dgx-2", "--domain", "8")
    assert (status, out, err.count("\n")) == (2, "", 1)

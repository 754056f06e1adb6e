"""Transports: start-ups, shares of the wire, copies in memory and cores that poll."""

from __future__ import annotations

import json

import pytest

import topoplan
from topoplan.cli.main import main
from topoplan.errors import UsageError
from topoplan.machine.cluster import TRANSPORTS, cluster
from topoplan.machine.cluster_network import Server
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.model.dataflow import device_kinds, route_latency
from topoplan.operate.calibration.calibrated_topology import calibrated
from topoplan.operate.calibration.fit import Measurement, PairSamples

BOTH = ("tcp", "rdma")


def hosts(transport: str | None, count: int = 8, *, payload: float = 5.0, **options: float) -> Topology:
    """Servers of one GPU and one NIC that carries so many GB/s of payload."""
    share = TRANSPORTS[transport].share if transport else 1.0
    servers = [Server("dgx-1v", [0], count=count)]
    return cluster(
        servers,
        nic_gbps=8 * payload / share,
        nics=1,
        nic_access="direct",
        transport=transport,
        **options,  # type: ignore[arg-type]
    )


def wire(machine: Topology, server: int = 0) -> float:
    """GB/s of a server's NIC into the network."""
    (found,) = (
        one.bandwidth for one in machine.links if one.src.startswith(f"s{server}.nic") and "switch" in one.dst
    )
    return found


def test_a_ring_of_eight_saves_392_us_by_rdma_whatever_the_size() -> None:
    """2 * 7 hops, 28 us each."""
    rings = {name: topoplan.ring(hosts(name), "allreduce") for name in BOTH}
    slow, fast = (topoplan.simulate(rings[name], nbytes=0).latency_seconds for name in BOTH)
    assert slow - fast == pytest.approx(2 * 7 * 28e-6, abs=1e-12)
    for nbytes in (8, 1 << 20, 1 << 28):
        slow, fast = (
            topoplan.simulate(rings[name], nbytes=nbytes, chunk_bytes=nbytes).seconds for name in BOTH
        )
        assert slow - fast == pytest.approx(392e-6, rel=1e-9)


def test_two_transports_differ_by_a_tenth_at_ten_times_what_the_start_ups_could_send() -> None:
    """28 us * 5 GB/s / 0.1 = 1.4 MB, over one hop."""
    plans = [topoplan.plan(hosts(name, 2), "broadcast") for name in BOTH]
    slow, fast = (topoplan.simulate(one, nbytes=1_400_000, chunk_bytes=1_400_000) for one in plans)
    assert (slow.seconds - fast.seconds) / fast.bandwidth_seconds == pytest.approx(0.1)


def test_tcp_loads_memory_with_four_times_what_a_nic_sends() -> None:
    """12.5 GB/s in and out, copied twice: 50 GB/s; no copies by RDMA."""
    assert TRANSPORTS["tcp"].memory_load(12.5, 12.5) == 50.0
    assert {name: one.memory_load(12.5, 12.5) for name, one in TRANSPORTS.items()} == {
        "tcp": 50.0,
        "dpdk": 25.0,
        "rdma": 0.0,
    }
    assert "2 copies of each byte, up to 50 GB/s of a server's memory" in hosts("tcp", payload=12.5).notes[-1]
    assert "no copies in a server's memory" in hosts("rdma", payload=12.5).notes[-1]


def test_memory_that_copies_fill_slows_the_nics_of_a_server() -> None:
    """20 GB/s: two copies each way leave 5 GB/s to one NIC, one copy 10, none all."""
    found = [wire(hosts(name, payload=12.5, memory_gbps=20)) for name in TRANSPORTS]
    assert found == pytest.approx([5.0, 10.0, 12.5])
    four = cluster(
        [Server("dgx-a100", count=2)],
        nic_gbps=100,
        nics=4,
        nic_access="direct",
        transport="tcp",
        memory_gbps=40,
    )
    out = [one.bandwidth for one in four.links if one.src.startswith("s0.nic") and one.dst == "switch0"]
    assert out == pytest.approx([2.5] * 4)
    assert "up to 40 GB/s" in four.notes[-1]


def test_polling_cores_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """One for each NIC with DPDK, none with others; RDMA wants a network that drops nothing."""
    lines = {}
    for name in TRANSPORTS:
        command = ["plan", "dgx-a100", "--servers", "2", "--nics", "4", "--nic-gbps", "100"]
        assert main([*command, "--transport", name]) == 0
        (lines[name],) = (one for one in capsys.readouterr().out.splitlines() if "transport" in one)
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
    text = {
        "format": "topoplan.cluster/1",
        "servers": [{"machine": "dgx-1v", "count": 2}],
        "network": {"nic_gbps": 100, "transport": "dpdk", "memory_gbps": 30},
    }
    given = cluster([Server("dgx-1v", count=2)], nic_gbps=100, transport="dpdk", memory_gbps=30)
    assert topoplan.load(json.dumps(text)) == given
    assert all(one.latency is None for one in hosts(None).links)
    assert wire(hosts(None)) == 5.0


def test_what_makes_no_sense_is_refused_in_one_line() -> None:
    for options, told in (
        ({"transport": "udp"}, r"transport 'udp' is unknown; use one of tcp, dpdk, rdma$"),
        ({"memory_gbps": 20}, "give a transport too, such as tcp$"),
        ({"transport": "tcp", "memory_gbps": 0}, "memory_gbps 0 must be GB/s from 0.001 to 1000000$"),
        ({"transport": "tcp", "memory_gbps": True}, "memory_gbps True must be"),
    ):
        with pytest.raises(UsageError, match=told):
            cluster([Server("dgx-1v", count=2)], nic_gbps=100, **options)  # type: ignore[arg-type]
    assert main(["plan", "dgx-1v", "--servers", "2", "--nic-gbps", "100", "--transport", "udp"]) == 2
    assert main(["plan", "dgx-1v", "--transport", "tcp"]) == 2

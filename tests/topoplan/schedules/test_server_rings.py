"""NCCL's rings and trees across servers: published rates, NICs shared by GPUs, and NICs of unlike rates."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest

import topoplan
from topoplan import Plan, Server, Topology
from topoplan.machine.fabric import Fabric, usable_fabric
from topoplan.schedules.binary_trees import nccl_tree
from topoplan.schedules.nccl_server_channels import NicChannels, ServerChannels, nic_channels
from topoplan.schedules.routes import DirectRoutes
from topoplan.schedules.server_rings import server_rings


def servers_of(name: str, count: int, gbps: float, nics: int, access: str = "pcie") -> Topology:
    return topoplan.cluster([Server(name, count=count)], nic_gbps=gbps, nics=nics, nic_access=access)


def bus_bandwidth(plan: Plan) -> Fraction:
    rate = topoplan.verify(plan).exact_rate
    assert rate is not None
    return rate * Fraction(2 * (len(plan.ranks) - 1), len(plan.ranks))


@pytest.mark.parametrize("nics", range(1, 9))
@pytest.mark.parametrize(("access", "nic"), [("pcie", 24), ("direct", 25)])
def test_a_ring_fills_one_to_eight_nics_of_two_servers(nics: int, access: str, nic: int) -> None:
    """DGX A100 with NICs of 200 Gb/s: 24 GB/s of bus bandwidth behind PCIe, 25 without, for each NIC."""
    ring = topoplan.ring_plan(servers_of("dgx-a100", 2, 200, nics, access))
    assert bus_bandwidth(ring) == nic * nics


@pytest.mark.parametrize(
    ("name", "servers", "gbps", "nics", "measured"),
    [
        ("dgx-a100", 2, 200, 2, 48),
        ("dgx-a100", 3, 200, 4, 96),
        ("dgx-h100", 4, 400, 1, 48),
    ],
    ids=["NCCL issue 949, NCCL_ALGO=RING", "nccl-tests issue 119", "4 x H100, one NIC"],
)
def test_a_ring_reaches_published_bandwidth(
    name: str, servers: int, gbps: float, nics: int, measured: int
) -> None:
    """The last one is NCCL's own expectation: two channels of 24 GB/s, the last GPU sends through the first."""
    ring = topoplan.ring_plan(servers_of(name, servers, gbps, nics))
    assert bus_bandwidth(ring) == measured


@pytest.mark.parametrize("servers", [2, 3, 4])
@pytest.mark.parametrize(
    ("name", "gbps", "nic"), [("dgx-a100", 200, 24), ("dgx-h100", 400, 48), ("dgx-1v", 100, 12)]
)
def test_rings_and_trees_fill_any_number_of_nics(name: str, gbps: int, nic: int, servers: int) -> None:
    """Trees send 1, 3/2 and 2 bytes from a server for each byte of the buffer."""
    sent = Fraction(servers, 2)
    for nics in (1, 3):
        machine = servers_of(name, servers, gbps, nics)
        assert bus_bandwidth(topoplan.ring_plan(machine)) == nic * nics
        assert topoplan.verify(nccl_tree(machine)).exact_rate == nic * nics / sent


def test_a_gpu_without_the_nic_sends_through_the_ring_s_first_gpu() -> None:
    """DGX H100 with one NIC at GPU 0: both directions of the NIC are at GPU 0, the last GPU relays over NVLink."""
    fabric = usable_fabric(servers_of("dgx-h100", 3, 400, 1))
    (ring,) = server_rings(fabric, DirectRoutes(fabric))
    assert ring.weight == 48
    relayed = [hop for hop in ring.hops if any(fabric.links[number].channel == "network" for number in hop)]
    assert len(relayed) == 3
    for hop in relayed:
        names = [fabric.links[number].dst.partition(".")[2] for number in hop]
        assert names == ["nvswitch0", "gpu0", "nic0", "", "nic0", "gpu0"]

"""Optima that papers state for large clusters, beside plans and the proofs that come with them.

ForestColl (Zhao et al., arXiv 2402.06787): allgather on A100 and MI250 servers, algorithm bandwidth, stated in whole
GB/s. SyCCL (Cao et al., SIGCOMM 2025): allgather on A800 and H800 servers, bus bandwidth, stated to a tenth.
"""

from __future__ import annotations

import pytest

import topoplan
from topoplan.machine.cluster import cluster, nvswitch_cluster
from topoplan.machine.cluster_network import Server
from topoplan.machine.topology import Device, Link, Topology
from topoplan.plans.plan import Plan


def proved_allgather(machine: Topology, method: str = "exact") -> Plan:
    """The plan, whose rate and bound the independent check finds equal as rational numbers."""
    made = topoplan.plan(machine, "allgather", method=method)
    assert topoplan.verify(made).optimal
    return made


def a800_box() -> Topology:
    """Eight GPUs on an NVSwitch with 180 GB/s each; four NICs are spread over them."""
    gpus = [f"gpu{i}" for i in range(8)]
    wires = [ends for gpu in gpus for ends in ((gpu, "nvswitch0"), ("nvswitch0", gpu))]
    return Topology(
        "8 x A800",
        (*(Device(gpu, "gpu", "s0") for gpu in gpus), Device("nvswitch0", "nvswitch", "s0")),
        tuple(Link(src, dst, "nvlink", 180.0) for src, dst in wires),
    )


@pytest.mark.parametrize(
    ("gpus", "rate"),
    [(16, 346), (32, 267), (64, 229), (128, 213), (256, 206), (512, 203), (1024, 202)],
)
def test_forestcoll_on_a100(gpus: int, rate: int) -> None:
    """Servers of 8 with NVLink 300 GB/s and a NIC of 200 Gb/s for each GPU: within 1 GB/s of what is stated."""
    assert proved_allgather(nvswitch_cluster(gpus // 8)).rate == pytest.approx(rate, abs=1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("gpus", "rate", "method"),
    [(32, 354, "exact"), (64, 341, "three-phase"), (128, 292, "three-phase"), (256, 273, "three-phase")],
)
def test_forestcoll_on_mi250(gpus: int, rate: int, method: str) -> None:
    """Servers of 16 dies with 16 NICs of 128 Gb/s, each a die's own: within 1 GB/s of what is stated.

    From four servers on the NICs alone limit, and trees composed of those inside servers reach what they let in.
    """
    machine = cluster([Server("mi250", count=gpus // 16)], nic_gbps=128, nics=16, nic_access="direct")
    assert proved_allgather(machine, method).rate == pytest.approx(rate, abs=1)


@pytest.mark.parametrize(
    ("machine", "busbw"),
    [
        (cluster([Server(a800_box(), count=2)], nic_gbps=200, nics=4), 187.5),
        (cluster([Server(a800_box(), count=4)], nic_gbps=200, nics=4), 129.2),
        (nvswitch_cluster(8, nvlink=180, nic=50, rails=None), 230),
        (nvswitch_cluster(64, nvlink=180, nic=50, rails=None), 230),
    ],
    ids=["16 A800", "32 A800", "64 H800", "512 H800"],
)
def test_syccl_on_a800_and_h800(machine: Topology, busbw: float) -> None:
    """4 NICs of 200 Gb/s for eight GPUs, and one of 400 Gb/s for each on rails: within 0.05 GB/s of what is stated."""
    size = len(machine.gpus)
    assert proved_allgather(machine).rate * (size - 1) / size == pytest.approx(busbw, abs=0.05)

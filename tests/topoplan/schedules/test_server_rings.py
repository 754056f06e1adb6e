"""NCCL's rings and trees across servers: published rates, answers of NCCL's own search, and NICs of unlike rates."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest

import topoplan
from topoplan import Device, Link, Plan, Server, Topology
from topoplan.machine.fabric import usable_fabric
from topoplan.machine.topology import facts
from topoplan.schedules.binary_trees import nccl_tree
from topoplan.schedules.nccl_server_channels import ServerChannels, nic_channels
from topoplan.schedules.routes import DirectRoutes
from topoplan.schedules.server_rings import server_rings


def servers_of(name: str, count: int, gbps: float, nics: int, access: str = "pcie") -> Topology:
    return topoplan.cluster([Server(name, count=count)], nic_gbps=gbps, nics=nics, nic_access=access)


def bus_bandwidth(plan: Plan) -> Fraction:
    rate = topoplan.verify(plan).exact_rate
    assert rate is not None
    return rate * Fraction(2 * (len(plan.ranks) - 1), len(plan.ranks))


@pytest.mark.sampled
@pytest.mark.parametrize("nics", range(1, 9))
@pytest.mark.parametrize(("access", "nic"), [("pcie", 24), ("direct", 25)])
def test_a_ring_fills_one_to_eight_nics_of_two_servers(nics: int, access: str, nic: int) -> None:
    """DGX A100 with NICs of 200 Gb/s: 24 GB/s of bus bandwidth behind PCIe, 25 without, for each NIC.

    Measured: 24 with one NIC (NCCL issue 1048), 192 with eight (NCCL issue 812).
    """
    fabric = usable_fabric(servers_of("dgx-a100", 2, 200, nics, access))
    rings = server_rings(fabric, DirectRoutes(fabric))
    assert sum(ring.weight for ring in rings) == nic * nics


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


@pytest.mark.sampled
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


def host(capability: int, gpus: int, switches: int, nics: list[tuple[int, int]]) -> Topology:
    """GPUs on an NVSwitch and, ``gpus`` each, on PCIe switches of one CPU; NICs as (PCIe switch, Gb/s)."""
    pcie, wires = {80: (24.0, 12 * 20.0), 90: (48.0, 18 * 20.6)}[capability]
    ends = [(f"gpu{i}", f"pcie{i // gpus}") for i in range(gpus * switches)]
    ends += [(f"nic{i}", f"pcie{switch}") for i, (switch, _) in enumerate(nics)]
    ends += [(f"pcie{i}", "cpu0") for i in range(switches)]
    links = [(a, b, "pcie", pcie) for a, b in ends]
    links += [(f"gpu{i}", "nvswitch0", "nvlink", wires) for i in range(gpus * switches)]
    names = [*dict.fromkeys(end for link in links for end in link[:2])]
    kinds = {name: name.rstrip("0123456789") for name in names}
    return Topology(
        "host",
        tuple(
            Device(name, kinds[name], facts=facts(sm=str(capability)) if kinds[name] == "gpu" else ())
            for name in names
        ),
        tuple(Link(u, v, kind, width) for a, b, kind, width in links for u, v in ((a, b), (b, a))),
    )


def pair_of(machine: Topology, nics: list[tuple[int, int]]) -> Topology:
    """Two servers on a switch, each NIC's cable at the rate of that NIC."""
    made = topoplan.cluster([Server(machine, count=2)], nic_gbps=max(rate for _, rate in nics))
    cable = {f"nic{i}": rate / 8 for i, (_, rate) in enumerate(nics)}
    links = []
    for link in made.links:
        nic = next((end.split(".")[1] for end in (link.src, link.dst) if ".nic" in end), "")
        if nic and "switch0" in (link.src, link.dst):
            link = replace(link, bandwidth=min(link.bandwidth, cable[nic]))
        links.append(link)
    return replace(made, links=tuple(links))


HOSTS = [
    (80, 1, 4, [(0, 100), (1, 100), (2, 100)], (1, 1, 1), 36),
    (
        80,
        1,
        8,
        [(0, 200), (1, 200), (2, 200), (3, 200), (4, 200), (5, 200), (6, 200), (7, 200)],
        (1,) * 8,
        192,
    ),
    (80, 2, 2, [(0, 200), (0, 200), (1, 200)], (1, 1, 1), 72),
    (80, 2, 4, [(0, 200), (0, 200), (1, 200), (1, 200), (2, 200), (3, 200)], (1,) * 6, 144),
    (80, 4, 2, [(0, 100), (0, 100), (0, 100), (1, 100), (1, 100)], (1,) * 5, 60),
    (80, 4, 2, [(0, 200)] * 4 + [(1, 200)] * 3, (1,) * 7, 168),
    (90, 1, 2, [(0, 400)], (2,), 48),
    (90, 1, 4, [(0, 400), (2, 400)], (2, 2), 96),
    (90, 1, 8, [(i, 400) for i in range(8)], (1,) * 8, 384),
    (90, 2, 2, [(0, 400), (0, 400), (1, 400)], (2, 2, 2), 144),
    (90, 4, 2, [(0, 400)] * 4 + [(1, 400)] * 3, (1,) * 7, 336),
    (80, 2, 2, [(0, 50), (1, 100), (1, 200)], (1, 2, 4), 42),
    (80, 4, 2, [(0, 50), (0, 200), (0, 200), (1, 200)], (0, 1, 1, 1), 72),
    (80, 2, 2, [(0, 50), (0, 100), (1, 50), (1, 50)], (1, 2, 1, 1), 30),
    (80, 1, 4, [(0, 200), (1, 50), (2, 50), (3, 100)], (4, 1, 1, 2), 48),
    (90, 1, 4, [(0, 100), (3, 200)], (1, 2), 36),
    (90, 2, 2, [(0, 100), (0, 400), (1, 400)], (0, 2, 2), 96),
    (90, 2, 4, [(0, 200), (1, 100), (2, 400), (2, 400)], (2, 1, 4, 4), 132),
    (90, 4, 1, [(0, 200), (0, 200), (0, 400), (0, 400)], (1, 1, 2, 2), 144),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("capability", "gpus", "switches", "nics", "channels", "bandwidth"), HOSTS)
def test_channels_and_rings_are_those_of_nccl_s_own_search(
    capability: int,
    gpus: int,
    switches: int,
    nics: list[tuple[int, int]],
    channels: tuple[int, ...],
    bandwidth: int,
) -> None:
    """Channels of each NIC and GB/s of all rings that ``ncclTopoCompute`` finds for random hosts.

    NCCL 2.30.7, commit 5067397c2676, ``src/graph`` compiled alone, fed with topology files. It counts speeds in steps:
    24 GB/s for a NIC of 25, so the rings may be up to 5 % faster.
    """
    fabric = usable_fabric(pair_of(host(capability, gpus, switches, nics), nics))
    laid = ServerChannels(fabric)
    assert laid.graph_channels == sum(channels)
    ports = [laid.port(1, channel) for channel in range(laid.graph_channels)]
    assert [ports.count(port) for port in laid.ports[1]] == list(channels)
    total = sum(ring.weight for ring in server_rings(fabric, DirectRoutes(fabric)))
    assert bandwidth <= total <= bandwidth * Fraction(21, 20)


def test_nics_of_unlike_rates_carry_channels_of_one_speed() -> None:
    """10 and 25 GB/s: one channel of 24, since 10 is less than half of that. A NIC below every speed has one."""
    assert nic_channels([Fraction(10), Fraction(25)], 80).nics == (1,)
    assert Counter(nic_channels([Fraction(12), Fraction(25)], 80).nics) == {0: 1, 1: 2}
    assert nic_channels([Fraction(1, 10)] * 2, 90).nics == (0, 1)


def test_servers_that_differ_run_the_fewest_channels() -> None:
    """Four NICs of 100 Gb/s face one of 400 Gb/s, whose graph has two channels: two NICs are idle."""
    machine = topoplan.cluster(
        [Server("dgx-a100", nics=4, nic_gbps=100), Server("dgx-h100", nics=1, nic_gbps=400)],
        nic_access="direct",
    )
    laid = ServerChannels(usable_fabric(machine))
    assert (laid.graph_channels, laid.count) == (2, 2)
    assert bus_bandwidth(topoplan.ring_plan(machine)) == 25


def test_a_nic_on_a_cpu_is_left_out_if_nvlink_leads_to_a_nearer_one() -> None:
    """NCCL sends through the GPU below the NIC's PCIe switch; two Hopper servers, the search of the commit above."""
    nics = [(1, 200)]
    made = host(90, 1, 2, nics)
    far = (Device("nic1", "nic"),)
    more = tuple(Link(u, v, "pcie", 48.0) for u, v in (("nic1", "cpu0"), ("cpu0", "nic1")))
    both = replace(made, devices=made.devices + far, links=made.links + more)
    assert len(ServerChannels(usable_fabric(pair_of(both, [(1, 200), (-1, 200)]))).ports[0]) == 1


def test_the_second_child_of_a_tree_is_below_a_gpu_that_reaches_the_channel_s_nic() -> None:
    """DGX H100, one GPU below each NIC: the first GPU has both children; direct NICs: the second has one."""
    for access, expected in (("pcie", 1), ("direct", 2)):
        made = nccl_tree(servers_of("dgx-h100", 4, 400, 2, access))
        homes = {
            edge.parent
            for shard in made.shards[:1]
            for edge in shard.stages[0].edges
            if made.ranks[edge.parent].partition(".")[0] != made.ranks[edge.child].partition(".")[0]
        }
        by_server = Counter(made.ranks[rank].partition(".")[0] for rank in homes)
        assert max(by_server.values()) == expected


@pytest.mark.parametrize("nics", [1, 2])
def test_hops_inside_a_server_pass_a_gpu_if_no_walk_exists_without_that(nics: int) -> None:
    """GPUs 0, 1, 2, 4 of a DGX-1V: 4 has a link to 0 alone, so no walk from 0 to 1 passes 2 and 4 over direct links."""
    part = Server("dgx-1v", [0, 1, 2, 4], count=2)
    fabric = usable_fabric(topoplan.cluster([part], nic_gbps=100, nics=nics))
    rings = server_rings(fabric, DirectRoutes(fabric))
    assert [ring.weight for ring in rings] == [12] * nics
    hops = [hop for ring in rings for hop in ring.hops]
    inner = [hop for hop in hops if all(fabric.links[number].channel == "nvlink" for number in hop)]
    assert max(map(len, inner)) == 2
    assert bus_bandwidth(topoplan.ring_plan(fabric.topology)) == 12 * nics

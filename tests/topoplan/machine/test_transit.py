"""Routes through other servers: none passes a NIC or CPU that does not forward, and bounds count no such route."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

import topoplan
from tests.support.refusals import refused
from topoplan.errors import InfeasibleError, PlanError, TopologyError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.routing import Transit
from topoplan.machine.topology import Device, Link, Topology
from topoplan.operate.calibration.pair_tests import possible_tests
from topoplan.operate.compare.recommendation import recommend
from topoplan.plans.plan import Plan
from topoplan.schedules.registry import SCHEDULES

CHANNELS = ("pcie", "network")


def cabled(cables: Sequence[tuple[int, int]], *, forwards: bool = False, rate: float = 25.0) -> Topology:
    """Servers of a GPU, a CPU and a NIC for each cable, all links of one rate."""
    servers = 1 + max(end for cable in cables for end in cable)
    devices = [Device(f"gpu{one}", "gpu", f"s{one}") for one in range(servers)]
    devices += [Device(f"s{one}.cpu", "cpu", f"s{one}", forwards=forwards) for one in range(servers)]
    wires = [(f"gpu{one}", f"s{one}.cpu", "pcie") for one in range(servers)]
    for number, (first, second) in enumerate(cables):
        ends = [(one, f"s{one}.nic{number}") for one in (first, second)]
        devices += [Device(nic, "nic", f"s{one}", forwards=forwards) for one, nic in ends]
        wires += [(f"s{one}.cpu", nic, "pcie") for one, nic in ends]
        wires.append((ends[0][1], ends[1][1], "network"))
    links = [Link(a, b, channel, rate) for one, two, channel in wires for a, b in ((one, two), (two, one))]
    return Topology("cabled", tuple(devices), tuple(links))


CHAIN, RING = cabled([(0, 1), (1, 2), (2, 3)]), cabled([(0, 1), (1, 2), (2, 3), (3, 0)])

ON_CHAIN = {
    "allreduce": "25/2",
    "allgather": "20",
    "reduce_scatter": "20",
    "broadcast": "25",
    "alltoall": "100/7",
}
ON_RING = {"allreduce": "50/3", "allgather": "100/3", "broadcast": "25"}
"""GB/s on four servers, by hand: the GPUs in the middle of the chain send every byte twice."""


@pytest.mark.parametrize(
    ("machine", "collective", "rate"),
    [(one, *row) for one, known in ((CHAIN, ON_CHAIN), (RING, ON_RING)) for row in known.items()],
)
def test_the_optimum_is_that_of_gpus_that_relay(machine: Topology, collective: str, rate: str) -> None:
    """Rate and bound are equal, and no route passes a third server's NIC or CPU."""
    plan = topoplan.plan(machine, collective)
    report = topoplan.verify(plan)
    assert report.exact_rate == report.exact_bound == Fraction(rate)
    assert not list(foreign_edges(plan))


def foreign_edges(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Routes that pass a NIC or CPU of a server of neither end, or between GPUs that relay, without the code tested."""
    home = {device.name: device.server for device in plan.topology.devices}
    kind = {device.name: device.kind for device in plan.topology.devices}
    for shard in plan.shards:
        for stage in shard.stages:
            for edge in stage.edges:
                stops = [place for place, name in enumerate(edge.route) if kind[name] == "gpu"]
                for start, stop in pairwise(stops):
                    hop = edge.route[start : stop + 1]
                    ends = {home[hop[0]], home[hop[-1]]}
                    if any(kind[name] in ("nic", "cpu") and home[name] not in ends for name in hop):
                        yield edge.route


@pytest.mark.parametrize("machine", [CHAIN, RING], ids=["chain", "ring"])
def test_no_schedule_or_method_passes_a_third_server(machine: Topology) -> None:
    made = [topoplan.plan(machine, method="mwu")]
    for schedule in SCHEDULES.values():
        try:
            made.append(schedule.make(machine, "allreduce"))
        except (InfeasibleError, UsageError):
            continue
    made.append(topoplan.plan_from_trees(machine, "allreduce", [[(0, 1), (0, 2), (2, 3)]]))
    foreign = ("gpu0", "s0.cpu", "s0.nic0", "s1.nic0", "s1.cpu", "s1.nic1", "s2.nic1", "s2.cpu", "gpu2")
    with pytest.raises(
        UsageError, match=r"tree 0: .* passes s1.nic[01] of server s1, which does not forward"
    ):
        topoplan.plan_from_trees(machine, "allreduce", [[(0, 1), (0, 2, foreign), (2, 3)]])
    assert len(made) > 5
    for plan in made:
        topoplan.verify(plan)
        assert not list(foreign_edges(plan))


def test_a_plan_with_such_a_route_is_refused_unless_the_devices_forward() -> None:
    """The error names shard, stage, edge and device; the key stands in the file's own machine."""
    free = topoplan.plan(cabled([(0, 1), (1, 2), (2, 3)], forwards=True))
    assert topoplan.verify(free).exact_rate == Fraction(50, 3)
    text = free.to_json()
    assert topoplan.verify(Plan.from_json(text)).optimal
    passes = r"edge \d->\d passes s\d\.(nic\d|cpu) of server s\d, which does not"
    with pytest.raises(PlanError, match=passes) as caught:
        topoplan.verify(Plan.from_json(text.replace(', "forwards": true', "")))
    assert None not in (caught.value.shard, caught.value.stage, caught.value.rank)


def test_gpus_whose_only_paths_pass_a_third_server_are_not_joined() -> None:
    """The message says what would join them, and sets of GPUs are listed as apart."""
    with pytest.raises(InfeasibleError, match="passes NICs or CPUs of a third server") as caught:
        topoplan.plan(CHAIN, gpus=[0, 2])
    assert {"gpu0", "s1.nic0"} <= set(caught.value.cut)
    assert "gpu2" not in caught.value.cut
    rates = {one.gpus: one.rate for one in recommend(CHAIN, 2)}
    assert {gpus for gpus, rate in rates.items() if rate} == {(0, 1), (1, 2), (2, 3)}
    tests = {test.name for test in possible_tests(CHAIN).tests}
    assert tests == {"gpu0-gpu1", "gpu1-gpu2", "gpu2-gpu3"}


def random_machine(seed: int) -> Topology:
    """Two or three servers of one or two GPUs, with CPUs, NICs and PCIe switches, on up to two network switches."""
    random = np.random.default_rng(seed)
    devices = [Device("sw0", "switch"), Device("sw1", "switch")]
    wires: list[tuple[str, str, str]] = [("sw0", "sw1", "network")] if random.integers(2) else []
    for number in range(int(random.integers(2, 4))):
        home = f"s{number}"
        gpus = [f"{home}.gpu{one}" for one in range(int(random.integers(1, 3)))]
        devices += [Device(name, "gpu", home) for name in gpus]
        inner = [f"{home}.cpu0", f"{home}.cpu1", f"{home}.pcie"]
        devices += [Device(cpu, "cpu", home, forwards=not random.integers(4)) for cpu in inner[:2]]
        devices.append(Device(inner[2], "pcie", home))
        wires += [(inner[0], inner[1], "sys"), (inner[1], inner[2], "pcie")]
        wires += [(gpu, inner[int(random.integers(3))], "pcie") for gpu in gpus]
        for port in range(int(random.integers(1, 4))):
            nic = f"{home}.nic{port}"
            devices.append(Device(nic, "nic", home, forwards=not random.integers(4)))
            wires.append((inner[int(random.integers(3))], nic, "pcie"))
            wires.append((nic, f"sw{random.integers(2)}", "network"))
    links = [Link(a, b, kind, 10.0) for one, two, kind in wires for a, b in ((one, two), (two, one))]
    order = sorted(devices, key=lambda device: device.kind != "gpu")
    return Topology(f"random {seed}", tuple(order), tuple(links))


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(12))
def test_the_graph_of_routes_has_the_simple_paths_that_are_allowed_and_no_others(seed: int) -> None:
    """By enumeration: paths between ranks over devices, those with a device that must not be passed left out."""
    fabric = Fabric(random_machine(seed), CHANNELS)
    graph, transit = fabric.route_graph, Transit.of(fabric.topology)

    def paths(leaving: list[list[tuple[int, int]]], nodes: Sequence[int]) -> set[tuple[int, ...]]:
        found: set[tuple[int, ...]] = set()
        stack: list[tuple[int, tuple[int, ...]]] = [(rank, (rank,)) for rank in range(fabric.size)]
        while stack:
            state, path = stack.pop()
            for _, after in leaving[state]:
                node = nodes[after]
                if node < fabric.size and node != path[0]:
                    found.add((*path, node))
                elif node >= fabric.size and node not in path:
                    stack.append((after, (*path, node)))
        return found

    plain: list[list[tuple[int, int]]] = [[] for _ in fabric.nodes]
    for link, (src, dst) in enumerate(fabric.ends):
        plain[src].append((link, dst))
    every = paths(plain, range(len(fabric.nodes)))
    allowed = {path for path in every if transit.foreign([fabric.nodes[node] for node in path]) is None}
    assert paths(graph.leaving(), graph.nodes) == allowed
    if fabric.has_transit:
        assert allowed <= every
    else:
        assert graph.nodes == tuple(range(len(fabric.nodes)))
        assert allowed == every


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(8))
def test_bounds_count_the_same_routes_as_plans(seed: int) -> None:
    machine = random_machine(seed)
    devices = tuple(replace(one, forwards=one.kind in ("nic", "cpu")) for one in machine.devices)
    open_ = replace(machine, devices=devices)
    for collective in ("allreduce", "allgather"):
        try:
            report = topoplan.verify(topoplan.plan(machine, collective))
        except InfeasibleError:
            continue
        assert report.optimal
        assert report.rate <= topoplan.verify(topoplan.plan(open_, collective)).rate * (1 + 1e-12)


def test_forwards_is_a_key_of_nics_and_cpus() -> None:
    machine = cabled([(0, 1), (1, 2)], forwards=True)
    assert topoplan.load(machine.to_json()) == machine
    assert topoplan.load(machine.to_networkx()) == machine
    assert "forwards" not in CHAIN.to_json()
    with refused(TopologyError, "device gpu0: forwards is a key of NICs and CPUs, got kind 'gpu'"):
        Device("gpu0", "gpu", forwards=True)
    with refused(TopologyError, "forwards must be true or false"):
        topoplan.load(machine.to_json().replace('"forwards": true', '"forwards": "yes"', 1))


@pytest.mark.parametrize("name", ["dgx-h100", "dgx-1v"])
def test_the_hosts_of_a_cluster_need_no_other_graph(name: str) -> None:
    machine = topoplan.cluster([topoplan.Server(name, count=2)], nic_gbps=100)
    assert not Fabric(machine, ("nvlink", "network")).has_transit

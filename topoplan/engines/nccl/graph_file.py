"""Export a plan, or the best rings and chains of a machine, as a graph file for NCCL (``NCCL_GRAPH_FILE``).

Inside a server NCCL runs rings, and as its tree a chain: the GPUs of a channel in their order, reduced up and broadcast
down. It cannot run packed trees. Each channel gets an equal part of the buffer, so a share becomes a number of equal
channels. Both graphs, ring (id 0) and tree (id 1), have equally many channels: NCCL uses the smaller number of the two
and drops the rest. ``speedintra`` is such that NCCL's own arithmetic gives the rate computed here, at its own rates of
NVLink: channels x speed x N / (2 (N - 1)) for rings, channels x speed / 2 for trees. `topoplan.schedules.nccl_search`
finds the best rings and chains.
``dev`` is a GPU's NVML index, in hexadecimal (see `topoplan.engines.nccl.identities`). Sources: ``src/graph/search.cc``
(``ncclTopoGetGraphFromXml``), ``connect.cc`` and ``src/init.cc`` of NCCL, whose release 2.30 took such files whole.
Deliberately absent: NVLS and CollNet, which NCCL finds itself and may prefer (``NCCL_ALGO=Ring`` or ``Tree`` insists),
and several servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from topoplan.engines.exported import Exported, one_server
from topoplan.engines.nccl.identities import gpu_numbers
from topoplan.engines.nccl.xml_tree import nccl_xml
from topoplan.errors import UsageError
from topoplan.machine.fabric import channel_words
from topoplan.machine.hardware import is_amd
from topoplan.machine.topology import Topology
from topoplan.plans.plan import Plan
from topoplan.reading.nccl.topology_elements import XmlElement
from topoplan.schedules.nccl_channels import (
    MOST_CHANNELS,
    Graphs,
    NcclPaths,
    Order,
    chain_rate,
    collective_rate,
    ring_bandwidth,
    worst_kind,
)
from topoplan.schedules.nccl_search import (
    PlanOrders,
    best_graphs,
    estimate_notes,
    expected,
    plan_graphs,
    plan_orders,
)
from topoplan.solve.planner import plan as make_plan

NO_PACKED_TREES = (
    "NCCL runs rings, and as its tree a chain along each channel; it cannot run packed trees inside a server"
)

_RING_PATTERN, _TREE_PATTERN = "4", "1"
"""Ring, and NCCL's own balanced tree, which is a chain inside a server."""

_ALGORITHM_NOTE = (
    "NCCL chooses between these graphs and others by size; NCCL_ALGO=Ring or NCCL_ALGO=Tree insists on one"
)


def machine_graph_xml(topology: Topology, *, server: str | None = None) -> Exported:
    """Export the best rings and the best chains for all GPUs of an allocation, or of one ``server`` of several.

    The notes compare them with the packed trees, which NCCL cannot run.

    >>> import topoplan
    >>> found = machine_graph_xml(topoplan.load("dgx-1v").subset([1, 4, 5, 7]))
    >>> print(found.notes[1])
    AllReduce: rings 33.3333 GB/s, chains 50 GB/s; trees packed over NVLink, which NCCL cannot run, 50 GB/s
    """
    machine = _check_plan(one_server(topology, server, "a graph file of NCCL"))
    paths = NcclPaths(machine)
    graphs = best_graphs(machine, paths)
    trees = make_plan(machine)
    size = len(machine.gpus)
    rate = collective_rate(graphs.bandwidth, "allreduce", size)
    notes = (
        NO_PACKED_TREES,
        f"AllReduce: rings {float(rate):.6g} GB/s, chains {float(graphs.chain_rate):.6g} GB/s; trees packed over "
        f"{channel_words(trees.channels)}, which NCCL cannot run, {trees.rate:.6g} GB/s",
    )
    return _write_graphs(machine, paths, graphs, notes)


def plan_graph_xml(plan: Plan) -> Exported:
    """Export a plan of rings as NCCL's ring graph, or a plan of chains as its tree graph, each beside the best other.

    A UsageError refuses plans with other trees, of several servers, or of one GPU.
    """
    machine = _check_plan(one_server(plan.topology, None, "a graph file of NCCL"))
    orders = plan_orders(plan)
    if orders is None:
        raise UsageError(
            f"this plan has trees that branch, and {NO_PACKED_TREES}; for the best rings and chains export the "
            "machine itself: topoplan export TOPO --to nccl-graph --gpus …"
        )
    paths = NcclPaths(machine)
    graphs = plan_graphs(machine, paths, orders)
    return _write_graphs(machine, paths, graphs, (NO_PACKED_TREES, *_plan_notes(plan, paths, orders, graphs)))


def _check_plan(machine: Topology) -> Topology:
    if len(machine.gpus) < 2:
        raise UsageError(
            f"{machine.name} has {len(machine.gpus)} GPU here; a graph of NCCL needs two or more"
        )
    return machine


def _plan_notes(plan: Plan, paths: NcclPaths, orders: PlanOrders, graphs: Graphs) -> list[str]:
    if orders.closed:
        form, used = "rings", graphs.rings
        rate = collective_rate(graphs.bandwidth, plan.collective, len(plan.ranks))
        whole = collective_rate(ring_bandwidth(paths, orders.shares), plan.collective, len(plan.ranks))
    else:
        form, used = "chains", graphs.chains
        rate, whole = graphs.chain_rate, chain_rate(paths, orders.shares)
    notes = [
        f"{form} of the plan: {len(orders.shares)} in {graphs.count} channels, {float(rate):.6g} GB/s of "
        f"{plan.collective}; the plan states {plan.rate:.6g}"
    ]
    left = len(orders.shares) - len(used)
    if any(Fraction(used.get(order, 0), graphs.count) != share for order, share in orders.shares.items()):
        change = f"{abs(float(rate / whole - 1)):.2%} {'slower' if rate < whole else 'faster'}"
        gone = (
            f"; {left} of the {len(orders.shares)} {form}, with the smallest shares, left out" if left else ""
        )
        notes.append(
            f"the shares are not equal channels, of which NCCL takes {MOST_CHANNELS}; {graphs.count} come nearest: "
            f"{change} than exact shares{gone}"
        )
    return notes


def _write_graphs(machine: Topology, paths: NcclPaths, graphs: Graphs, found: tuple[str, ...]) -> Exported:
    numbers = gpu_numbers(machine.gpus)
    size = len(machine.gpus)
    rate = collective_rate(graphs.bandwidth, "allreduce", size)
    own = expected(machine, graphs)
    amd = is_amd(device for device in machine.devices if device.kind == "gpu")
    notes = (*found, *estimate_notes(own, amd=amd), _ALGORITHM_NOTE)
    rings = _graph_element("0", _RING_PATTERN, graphs.rings, numbers, own.bandwidth / graphs.count, paths)
    chains = _graph_element(
        "1", _TREE_PATTERN, graphs.chains, numbers, 2 * own.chain_rate / graphs.count, paths
    )
    comments = (
        f"topoplan: NCCL graphs of {machine.name}, {size} GPUs, for NCCL_GRAPH_FILE; dev is the NVML index",
        f"graph 0: {graphs.count} rings, {float(rate):.6g} GB/s of AllReduce; graph 1: {graphs.count} chains, "
        f"{float(graphs.chain_rate):.6g} GB/s",
        *notes,
    )
    return Exported(nccl_xml(XmlElement("graphs", {"version": "1"}, (rings, chains)), comments), notes)


def _graph_element(
    identity: str,
    pattern: str,
    orders: Mapping[Order, int],
    numbers: Mapping[str, int],
    speed: Fraction,
    paths: NcclPaths,
) -> XmlElement:
    """Return one graph with its channels; ``speed`` is GB/s of one channel as NCCL counts it."""
    channels = [
        XmlElement(
            "channel", children=tuple(XmlElement("gpu", {"dev": _hex_number(numbers[gpu])}) for gpu in order)
        )
        for order, times in orders.items()
        for _ in range(times)
    ]
    attributes = {
        "id": identity,
        "pattern": pattern,
        "crossnic": "0",
        "nchannels": str(len(channels)),
        "speedintra": f"{float(speed):g}",
        "speedinter": f"{float(speed):g}",
        "latencyinter": "0",
        "typeintra": worst_kind(paths, orders, closed=pattern == _RING_PATTERN),
        "typeinter": "PIX",
        "samechannels": "1" if len(orders) == 1 else "0",
    }
    return XmlElement("graph", attributes, tuple(channels))


def _hex_number(number: int) -> str:
    """Write a number for NCCL: releases differ in whether a number without 0x is decimal."""
    return str(number) if number < 10 else f"{number:#x}"

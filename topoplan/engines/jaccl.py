"""Write cabled servers as JACCL's device file (``MLX_IBV_DEVICES``), which `topoplan.reading.rdma_ports` reads."""

from __future__ import annotations

import json
from collections.abc import Sequence

from topoplan.engines.exported import Exported
from topoplan.errors import UsageError
from topoplan.machine.cables import cabled_nics
from topoplan.machine.topology import Device, Topology
from topoplan.reading.rdma_ports import NAMES_CHANGE, jaccl_shapes


def jaccl_devices(topology: Topology, order: Sequence[int] | None = None) -> Exported:
    """Return the device file of servers with a GPU each, in the order of the ranks; ``order`` lists their GPUs.

    UsageError if a server has several GPUs, no cable joins two, or JACCL does not run on these cables in this order.

    >>> import topoplan
    >>> print(jaccl_devices(topoplan.load("mac-tb5-ring-x4")).text.splitlines()[1])
     ["tb1", null, "tb0", null],
    """
    gpus = topology.gpus if order is None else tuple(topology.gpus[gpu] for gpu in order)
    servers = [topology.device(gpu).server for gpu in gpus]
    place = {server: rank for rank, server in enumerate(servers)}
    if len(place) < len(gpus) or len(gpus) < 2:
        raise UsageError(
            f"JACCL has a rank on each of several servers, got {len(gpus)} GPUs on {len(place)} servers"
        )
    cells: list[list[list[str]]] = [[[] for _ in servers] for _ in servers]
    for near, far in cabled_nics(topology):
        if near.server in place and far.server in place:
            cells[place[near.server]][place[far.server]].append(_name(near))
    if not any(map(any, cells)):
        raise UsageError(f"no cable joins two servers of {topology.name}; give one whose network is cables")
    if not jaccl_shapes(cells):
        raise UsageError(
            "JACCL runs a full mesh of up to 8 ranks, or a ring in rank order, and these cables are neither in this "
            "order; topoplan order --format jaccl looks for a ring, and topoplan plan uses any cables"
        )
    rows = [json.dumps([_cell(cell) for cell in row]) for row in cells]
    return Exported("[" + ",\n ".join(rows) + "]\n", (NAMES_CHANGE,))


def _name(nic: Device) -> str:
    return nic.fact("adapter") or nic.name.removeprefix(f"{nic.server}.")


def _cell(names: Sequence[str]) -> str | list[str] | None:
    return list(names) if len(names) > 1 else names[0] if names else None

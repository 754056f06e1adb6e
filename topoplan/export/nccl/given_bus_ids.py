"""Bus ids of GPUs as ``nvidia-smi --query-gpu=index,pci.bus_id --format=csv`` lists them, for a machine without any.

NCCL finds the GPUs of a topology file by bus id; the matrix of ``nvidia-smi topo -m`` and the library do not know them.
The list may have its head or not (``csv,noheader``); with it, columns may stand in any order and others beside them.
The index is the number by which NVML counts, as ``dev`` in the file (see `topoplan.export.nccl.numbering`).
"""

from __future__ import annotations

import re
from dataclasses import replace

from topoplan.errors import TopologyError, UsageError
from topoplan.export.nccl.numbering import gpu_numbers
from topoplan.hosts.host import bus_id, plain_bus_id
from topoplan.topology import Topology

QUERY = "nvidia-smi --query-gpu=index,pci.bus_id --format=csv"

_HEADS = {"index": "index", "pci.bus_id": "bus id", "gpu_bus_id": "bus id"}


def parse_bus_ids(text: str) -> dict[int, str]:
    """Bus id of each GPU by its index, as the kernel writes it.

    Raises
    ------
    UsageError
        A line is cut or has no index or bus id, one of them is there twice, or there is none at all.

    Examples
    --------
    >>> parse_bus_ids("index, pci.bus_id\\n0, 00000000:07:00.0\\n1, 00000000:0A:00.0\\n")
    {0: '0000:07:00.0', 1: '0000:0a:00.0'}
    """
    rows = [
        (number, [cell.strip() for cell in line.split(",")])
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip()
    ]
    places = {"index": 0, "bus id": 1}
    if rows and not any(cell[:1].isdigit() for cell in rows[0][1]):
        places = {
            _HEADS[cell.lower()]: place for place, cell in enumerate(rows[0][1]) if cell.lower() in _HEADS
        }
        if len(places) < 2:
            raise UsageError(
                f"bus ids: the head {', '.join(rows[0][1])[:60]!r} lacks index or pci.bus_id; give {QUERY}"
            )
        rows = rows[1:]
    if not rows:
        raise UsageError(f"bus ids: no GPU is listed; give {QUERY}")
    found: dict[int, str] = {}
    for number, cells in rows:
        if len(cells) <= max(places.values()):
            raise UsageError(
                f"bus ids, line {number}: {', '.join(cells)[:60]!r} has no index and bus id; give {QUERY}"
            )
        index, busid = cells[places["index"]], cells[places["bus id"]]
        if not re.fullmatch("[0-9]{1,4}", index):
            raise UsageError(f"bus ids, line {number}: {index[:60]!r} is no index of a GPU")
        try:
            known = bus_id(busid)
        except TopologyError:
            raise UsageError(
                f"bus ids, line {number}: {busid[:60]!r} is no bus id such as 00000000:07:00.0"
            ) from None
        if int(index) in found:
            raise UsageError(f"bus ids, line {number}: index {index} is there twice")
        if known in found.values():
            raise UsageError(f"bus ids, line {number}: bus id {known} is there twice")
        found[int(index)] = known
    return found


def with_bus_ids(topology: Topology, bus_ids: dict[int, str]) -> Topology:
    """A machine of one server with these bus ids of its GPUs; those of GPUs that it does not have are passed over.

    Raises
    ------
    UsageError
        A GPU of the machine is not among them, or states another bus id already.

    Examples
    --------
    >>> import topoplan
    >>> pair = topoplan.load("dgx-1v").subset([1, 4])
    >>> [device.busid for device in with_bus_ids(pair, {1: "0000:07:00.0", 4: "0000:86:00.0"}).devices[:2]]
    ['0000:07:00.0', '0000:86:00.0']
    """
    numbers = gpu_numbers(topology.gpus)
    missing = [name for name, number in numbers.items() if number not in bus_ids]
    if missing:
        raise UsageError(
            f"bus ids: index {numbers[missing[0]]} is missing, which is {missing[0]}"
            + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
        )
    devices = []
    for device in topology.devices:
        given = bus_ids[numbers[device.name]] if device.name in numbers else ""
        if given and device.busid and plain_bus_id(device.busid) != given:
            raise UsageError(
                f"bus ids: {device.name} states {device.busid} already, and index {numbers[device.name]} is {given}; "
                "is the list of another machine?"
            )
        devices.append(replace(device, busid=given) if given and not device.busid else device)
    return replace(topology, devices=tuple(devices))

"""Convert the device file or hostfile of MLX's JACCL to a Topology: servers of one GPU each, joined by cables.

The device file (``MLX_IBV_DEVICES``, ``JACCL_IBV_DEVICES``) is an array of n arrays of n cells: cell [i][j] names the
device of rank i towards rank j, as a text, as an array of texts for several cables, or as null without one. The
hostfile lists hosts, each with its row of these cells as ``rdma``. Neither states a rate. A cable has an end in [i][j]
and one in [j][i], under another name; device k of both is one cable. A device is one port, so it stands once in a row.

JACCL itself runs a full mesh, and a ring of ranks in their order; a note says which of them the cables allow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from topoplan.errors import TopologyError, warning
from topoplan.machine.hardware import checked_rate
from topoplan.machine.host_topology import both_ways
from topoplan.machine.topology import Device, Topology, format_value
from topoplan.machine.topology_json import decode_json
from topoplan.units import counted, listed

THUNDERBOLT_5 = 10.0
"""GB/s of a cable in each direction: 80 Gb/s."""

MOST_RANKS = 256
MOST_MESH, MOST_CABLES = 8, 4
"""Largest full mesh that JACCL runs, and most cables between neighbours of its ring."""

_WHOLE = "give the whole file"
_SWITCHED = "cables end in ports of their own; describe NICs at a switch as a topoplan.cluster/1 file"


def parse_jaccl(text: str, *, cable_gbps: float | None = None) -> Topology:
    """Return the machine of a device file or hostfile; ``cable_gbps`` is the GB/s of a cable in each direction.

    TopologyError for a file without cables, rows of unlike lengths, and cables with one end.

    >>> machine = parse_jaccl('[[null, "rdma_en3"], ["rdma_en2", null]]')
    >>> machine.gpus, [(link.src, link.dst, link.bandwidth) for link in machine.links]
    (('gpu0', 'gpu1'), [('gpu0', 'gpu1', 10.0), ('gpu1', 'gpu0', 10.0)])
    """
    rate = checked_rate("cable_gbps", cable_gbps) or THUNDERBOLT_5
    rows, hosts = _rows(decode_json(text, "the file of JACCL"))
    cells = [[_cell(cell, i, j) for j, cell in enumerate(row)] for i, row in enumerate(rows)]
    _check_ports(cells)
    pairs = _cables(cells)
    notes = [_runs(cells)]
    if cable_gbps is None:
        notes.append(
            f"a cable assumed {rate:g} GB/s in each direction (Thunderbolt 5); set --cable-bandwidth"
        )
    if hosts:
        notes.append(f"servers are the hosts in their order: {listed(hosts, noun='hosts')}")
    if doubled := [f"{i}-{j}" for (i, j), count in pairs.items() if count > 1]:
        notes.append(
            f"ranks {listed(doubled, noun='pairs')} share several cables: device k of both cells must be the ends of "
            "one cable, else JACCL hangs"
        )
    return Topology(
        name="jaccl",
        devices=tuple(Device(f"gpu{rank}", "gpu", f"s{rank}") for rank in range(len(cells))),
        links=tuple(
            link
            for (i, j), count in pairs.items()
            for link in both_ways(f"gpu{i}", f"gpu{j}", "network", rate * count, count=count)
        ),
        notes=tuple(notes),
        source="a file of JACCL; it states cables and no rates",
    )


def _rows(value: object) -> tuple[list[list[object]], list[str]]:
    """Return the rows of cells, as long as there are ranks, and the names of hosts if a hostfile has them."""
    hosts: list[str] = []
    if isinstance(value, dict):
        value = value.get("hosts")
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        for place, one in enumerate(value):
            if not isinstance(one.get("rdma"), list):
                raise TopologyError(
                    f"host {place} of the hostfile needs an rdma row of devices, got "
                    f"{format_value(one.get('rdma'))}; without them JACCL has no cables to use"
                )
        hosts = [
            format_value(one.get("ssh", f"rank {place}")).strip("'\"") for place, one in enumerate(value)
        ]
        value = [one["rdma"] for one in value]
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        raise TopologyError(f"a file of JACCL must be an array of a row for each rank; {_WHOLE}")
    if not 2 <= len(value) <= MOST_RANKS:
        raise TopologyError(
            f"a file of JACCL must have a row for each of 2 to {MOST_RANKS} ranks, got {len(value)}; {_WHOLE}"
        )
    for rank, row in enumerate(value):
        if len(row) != len(value):
            raise TopologyError(
                f"row {rank} must have a cell for each of {len(value)} ranks, got {counted(len(row), 'cell')}; {_WHOLE}"
            )
    return value, hosts


def _cell(cell: object, rank: int, peer: int) -> tuple[str, ...]:
    devices = [] if cell is None else cell if isinstance(cell, list) else [cell]
    if not all(isinstance(device, str) and device.strip() for device in devices):
        raise TopologyError(
            f"cell [{rank}][{peer}] must be null, the name of a device or an array of names, got {format_value(cell)}"
        )
    if devices and rank == peer:
        raise TopologyError(
            f"cell [{rank}][{rank}] must be null, got {format_value(cell)}: no rank is its own peer"
        )
    return tuple(str(device) for device in devices)


def _check_ports(cells: Sequence[Sequence[tuple[str, ...]]]) -> None:
    for rank, row in enumerate(cells):
        for device, times in Counter(device for cell in row for device in cell).items():
            if times > 1:
                peers = [str(peer) for peer, cell in enumerate(row) if device in cell]
                raise TopologyError(
                    f"rank {rank} must name each device once, got {device[:40]!r} {times} times, towards rank "
                    f"{' and '.join(peers[:3])}: {_SWITCHED}"
                )


def _cables(cells: Sequence[Sequence[tuple[str, ...]]]) -> dict[tuple[int, int], int]:
    """Return the number of cables of each pair of ranks that has one."""
    found = {}
    for i, row in enumerate(cells):
        for j in range(i + 1, len(cells)):
            if len(row[j]) != len(cells[j][i]):
                raise TopologyError(
                    f"cells [{i}][{j}] and [{j}][{i}] must name the two ends of the same cables, got "
                    f"{counted(len(row[j]), 'device')} and {len(cells[j][i])}; name a device at both ends, or at none"
                )
            if row[j]:
                found[i, j] = len(row[j])
    if not found:
        raise TopologyError(
            "every cell is null: the file has no cable; name the devices towards each neighbour"
        )
    return found


def _runs(cells: Sequence[Sequence[tuple[str, ...]]]) -> str:
    """Return a note on whether JACCL runs on these cables: a full mesh, or a ring of ranks in their order."""
    ranks = len(cells)
    around = {len(cells[i][(i + step) % ranks]) for i in range(ranks) for step in (1, -1)}
    mesh = all(cells[i][j] for i in range(ranks) for j in range(ranks) if i != j)
    kinds = ["a full mesh"] if mesh and ranks <= MOST_MESH else []
    kinds += ["a ring in rank order"] if len(around) == 1 and 1 <= min(around) <= MOST_CABLES else []
    if kinds:
        return f"JACCL runs these cables as {' or as '.join(kinds)}"
    return warning(
        "JACCL refuses these cables: they are neither a full mesh nor a ring in rank order with as many cables on "
        "every side; a plan uses them all the same"
    )

"""Read the files that name RDMA devices: JACCL's cables as a Topology, and ``ibdev2netdev`` for the NICs that are up.

JACCL, of MLX, joins servers of one GPU each by cables. Its device file (``MLX_IBV_DEVICES``, ``JACCL_IBV_DEVICES``) is
an array of n arrays of n cells: cell [i][j] names the device of rank i towards rank j, as a text, as an array of texts
for several cables, or as null without one. The hostfile lists hosts, each with its row of these cells as ``rdma``.
Neither states a rate. A cable has an end in [i][j] and one in [j][i], under another name; device k of both is one
cable. A device is one port, so it stands once in a row.

JACCL itself runs a full mesh, and a ring of ranks in their order; a note says which of them the cables allow.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from topoplan.errors import TopologyError, UsageError, warning
from topoplan.machine.cables import MOST_MESH, Cable
from topoplan.machine.cluster import cluster
from topoplan.machine.cluster_network import Server
from topoplan.machine.hardware import checked_rate
from topoplan.machine.topology import Device, Topology, facts, format_value, without_named
from topoplan.machine.topology_json import decode_json
from topoplan.units import counted, listed

THUNDERBOLT_5 = 10.0
"""GB/s of a cable in each direction: 80 Gb/s."""

MOST_RANKS = 256
MOST_CABLES = 4
"""Most cables between neighbours of JACCL's ring."""

NAMES_CHANGE = "names of devices may change when a Mac starts: compare them with ibv_devices before the job"

_WHOLE = "give the whole file"
_SWITCHED = "cables end in ports of their own; describe NICs at a switch as a topoplan.cluster/1 file"


def parse_jaccl(text: str, *, cable_gbps: float | None = None) -> Topology:
    """Return the machine of a device file or hostfile; ``cable_gbps`` is the GB/s of a cable in each direction.

    TopologyError for a file without cables, rows of unlike lengths, and cables with one end.

    >>> import topoplan
    >>> machine = parse_jaccl('[[null, "rdma_en3"], ["rdma_en2", null]]')
    >>> machine.gpus, topoplan.plan(machine).rate
    (('s0.gpu0', 's1.gpu0'), 10.0)
    """
    rate = checked_rate("cable_gbps", cable_gbps) or THUNDERBOLT_5
    rows, hosts = _rows(decode_json(text, "the file of JACCL"))
    cells = [[_cell(cell, i, j) for j, cell in enumerate(row)] for i, row in enumerate(rows)]
    _check_ports(cells)
    pairs = _cables(cells)
    notes = [_runs(cells), NAMES_CHANGE]
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
    cables = [
        Cable(f"s{i}:{here}", f"s{j}:{there}", 8 * rate)
        for i, j in pairs
        for here, there in zip(cells[i][j], cells[j][i], strict=True)
    ]
    try:
        made = cluster(
            [Server(Topology("rank", (Device("gpu0", "gpu", model="Apple"),), ()), count=len(cells))],
            network="cables",
            cables=cables,
            name="jaccl",
        )
    except UsageError as error:
        raise TopologyError(f"the file of JACCL: {error}") from None
    known = {f"s{rank}.gpu0": facts(host=host) for rank, host in enumerate(hosts)}
    return replace(
        made,
        devices=tuple(replace(one, facts=known.get(one.name, one.facts)) for one in made.devices),
        notes=(*notes, *made.notes),
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


def jaccl_shapes(cells: Sequence[Sequence[Sequence[str]]]) -> list[str]:
    """Return what JACCL runs on the cables of a device file, in words: a full mesh, or a ring of ranks in their order.

    >>> jaccl_shapes([[[], ["a"], []], [["a"], [], ["b"]], [[], ["a"], []]])
    []
    """
    ranks = len(cells)
    around = {len(cells[i][(i + step) % ranks]) for i in range(ranks) for step in (1, -1)}
    mesh = all(cells[i][j] for i in range(ranks) for j in range(ranks) if i != j)
    kinds = ["a full mesh"] if mesh and ranks <= MOST_MESH else []
    return kinds + (["a ring in rank order"] if len(around) == 1 and 1 <= min(around) <= MOST_CABLES else [])


def _runs(cells: Sequence[Sequence[tuple[str, ...]]]) -> str:
    kinds = jaccl_shapes(cells)
    if kinds:
        return f"JACCL runs these cables as {' or as '.join(kinds)}"
    return warning(
        "JACCL refuses these cables: they are neither a full mesh nor a ring in rank order with as many cables on "
        "every side; a plan uses them all the same, and topoplan order --format jaccl looks for a ring"
    )


_PORT = re.compile(r"([\w.-]{1,60}) port (\d{1,3}) ==> (\S{1,60}) \((Up|Down)\)")


def read_ibdev2netdev(text: str) -> dict[str, dict[int, tuple[str, bool]]]:
    """Return for each NIC its ports: the network interface, and whether it is up. TopologyError for other lines.

    >>> read_ibdev2netdev("rocep1s0f0 port 1 ==> enp1s0f0np0 (Up)")
    {'rocep1s0f0': {1: ('enp1s0f0np0', True)}}
    """
    found: dict[str, dict[int, tuple[str, bool]]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if "==>" not in line:
            continue
        match = _PORT.fullmatch(line.strip())
        if match is None:
            raise TopologyError(
                f"line {number} must be DEVICE port N ==> NETDEV (Up|Down), got {line.strip()[:60]!r}; give the output "
                "of ibdev2netdev"
            )
        ports = found.setdefault(match[1], {})
        if int(match[2]) in ports:
            raise TopologyError(f"port {match[2]} of {match[1]} stands twice; give the output of one host")
        ports[int(match[2])] = (match[3], match[4] == "Up")
    return found


def apply_ibdev2netdev(machine: Topology, text: str) -> Topology:
    """Return a machine without the NICs whose ports are all down; NICs are matched by the adapter's name.

    UsageError if the machine names none of the devices.
    """
    ports = read_ibdev2netdev(text)
    adapters = {device.fact("adapter"): device.name for device in machine.devices if device.kind == "nic"}
    known = [name for name in ports if name in adapters]
    if not known:
        raise UsageError(
            f"{machine.name} names no NIC {next(iter(ports))}: its NICs are "
            f"{listed(filter(None, adapters)) or 'without names'}; give nvidia-smi topo -m of that host, with its "
            "NIC legend"
        )
    down = [name for name in known if not any(up for _, up in ports[name].values())]
    missing = [name for name in ports if name not in adapters]
    notes = [f"NICs by ibdev2netdev: {counted(len(known) - len(down), 'NIC')} up"]
    if down:
        notes.append(warning(f"NICs without a port that is up are left out: {listed(down, noun='NICs')}"))
    if missing:
        notes.append(f"NICs of ibdev2netdev that the machine does not name: {listed(missing, noun='NICs')}")
    left = without_named(machine, [adapters[name] for name in down]) if down else machine
    return replace(left, notes=(*left.notes, *notes))

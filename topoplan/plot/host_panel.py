"""The panel of the PCIe side: CPUs, switches, and below them GPUs and NICs in columns.

A NIC of a cluster has no place on PCIe; it hangs in the column of the GPUs that it serves, wired to them on its right.
One that serves GPUs of several columns stands below all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from topoplan.plot.crossways import Route, crossways, tree_routes
from topoplan.plot.hanging import Forest, Hanging, hanging_layout
from topoplan.plot.layers import connected, grow_forest
from topoplan.plot.panels import Panel, Point, box_width, full_width, tiled
from topoplan.plot.wires import Wire
from topoplan.topology import Device, Topology

_RANK = {"cpu": 0, "pcie": 1, "nic": 2, "gpu": 3, "nvswitch": 4, "switch": 5, "helper": 3}
_BESIDE = 12
_SIDE = 0.1
_RAIL = 0.16


def host_panel(topology: Topology, drawn: Sequence[Wire]) -> Panel | None:
    """The panel, or None for a machine of which only NVLinks are known.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.plot.wires import wires
    >>> machine = topoplan.load("dgx-1v")
    >>> panel = host_panel(machine, wires(machine))
    >>> len(panel.places), len(panel.routes)
    (18, 17)
    """
    inside = [wire for wire in drawn if wire.channel in ("pcie", "c2c", "sys")]
    serving = serving_wires(topology, drawn)
    names = _names(topology, drawn, inside, serving)
    if not names:
        return None
    tiles = [
        _host(topology, [name for name in names if name in group], inside, serving)
        for group in connected(names, [wire.ends for wire in (*inside, *serving)])
    ]
    return tiled("PCIe and NICs" if serving else "PCIe", tiles)


def _host(topology: Topology, names: Sequence[str], inside: Sequence[Wire], serving: Sequence[Wire]) -> Panel:
    """The part of the panel that holds these devices, which no wire joins to others."""
    inside = [wire for wire in inside if wire.ends[0] in names]
    serving = [wire for wire in serving if wire.ends[0] in names]
    near: dict[str, list[str]] = {name: [] for name in names}
    for wire in inside:
        if wire.channel != "sys":
            for end, other in (wire.ends, wire.ends[::-1]):
                if other not in near[end]:
                    near[end].append(other)
    for ends in near.values():
        ends.sort(key=names.index)
    kinds = {name: topology.device(name).kind for name in names}
    roots, children = grow_forest(names, near, rank={name: _RANK[kind] for name, kind in kinds.items()})
    served = {end: [w for w in serving if end in w.ends] for end in names if kinds[end] == "nic"}
    units, shared = _hang_nics(served, roots, children)
    beside = {name: _beside(topology.device(name)) for name in names}
    beside |= dict.fromkeys((end for wire in serving for end in wire.ends), "")
    _mark_bundles(beside, inside, children)
    layout = hanging_layout(
        Forest(
            [root for root in roots if not served.get(root)],
            children,
            kinds,
            {name: box_width(name) for name in names},
            {name: full_width(name, text) for name, text in beside.items()},
            units,
        )
    )
    routes, elsewhere = tree_routes(layout, inside, children)
    routes += crossways(elsewhere, layout.places)
    routes += [
        (wire, _beside_route(layout, wire, kinds)) for wire in serving if not set(wire.ends) & set(shared)
    ]
    routes += _shared_routes(layout, {nic: served[nic] for nic in shared}, beside)
    return Panel("", layout.places, routes, beside=beside)


def serving_wires(topology: Topology, drawn: Sequence[Wire]) -> list[Wire]:
    """Wires of the network between a GPU and a NIC that has no place on PCIe."""
    plugged = {end for wire in drawn if wire.channel != "network" for end in wire.ends}
    return [
        wire
        for wire in drawn
        if wire.channel == "network"
        and {topology.device(end).kind for end in wire.ends} == {"gpu", "nic"}
        and not any(topology.device(end).kind == "nic" and end in plugged for end in wire.ends)
    ]


def _names(
    topology: Topology, drawn: Sequence[Wire], inside: Sequence[Wire], serving: Sequence[Wire]
) -> list[str]:
    """What has a place on PCIe or serves or is served; GPUs without any wire stand here too."""
    shown = {end for wire in (*inside, *serving) for end in wire.ends}
    linked = {end for wire in drawn for end in wire.ends}
    return [d.name for d in topology.devices if d.name in shown or (d.kind == "gpu" and d.name not in linked)]


def _hang_nics(
    served: Mapping[str, Sequence[Wire]], roots: Sequence[str], children: dict[str, list[str]]
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Put NICs that are on no PCIe below the parent of their GPUs; what hangs together, and NICs that cannot."""
    parents = {child: above for above, below in children.items() for child in below}
    units: dict[str, tuple[str, ...]] = {}
    shared = []
    for nic, wires in served.items():
        gpus = [end for wire in wires for end in wire.ends if end != nic]
        above = {parents.get(gpu, "") for gpu in gpus}
        if not gpus:
            continue
        if above == {""} and len(gpus) == 1 and gpus[0] in roots:
            children.setdefault(gpus[0], []).append(nic)
        elif len(above) == 1 and above != {""} and not any(children.get(gpu) for gpu in gpus):
            (parent,) = above
            children[parent].append(nic)
            together = {member for gpu in gpus for member in units.get(gpu, (gpu,))} | {nic}
            units |= dict.fromkeys(together, tuple(name for name in children[parent] if name in together))
        else:
            shared.append(nic)
    return units, shared


def _beside(device: Device) -> str:
    """Adapter or bus id, if it is short; of a CPU nothing, for wires lead to its right."""
    text = device.fact("adapter") or device.busid.removeprefix("0000:")
    return text if len(text) <= _BESIDE and device.kind != "cpu" else ""


def _mark_bundles(
    beside: dict[str, str], inside: Sequence[Wire], children: Mapping[str, Sequence[str]]
) -> None:
    for wire in inside:
        for above, below in (wire.ends, wire.ends[::-1]):
            if wire.count > 1 and below in children.get(above, ()):
                beside[below] = f"×{wire.count} {beside[below]}".strip()


def _beside_route(layout: Hanging, wire: Wire, kinds: Mapping[str, str]) -> Sequence[Point]:
    """Right of the column from GPU to NIC; straight down to a NIC below a GPU that stands alone."""
    gpu, nic = sorted(wire.ends, key=lambda end: kinds[end] == "nic")
    if gpu not in layout.sides:
        return layout.route(gpu, nic)
    side = layout.sides[gpu] + _SIDE
    (x, y), (u, v) = layout.places[gpu], layout.places[nic]
    return [(x, y), (side, y), (side, v), (u, v)]


def _shared_routes(
    layout: Hanging, served: Mapping[str, Sequence[Wire]], beside: Mapping[str, str]
) -> list[Route]:
    """Place NICs of several columns in a row below all, each with a rail of its own to its GPUs."""
    if not served:
        return []
    bottom = min(y for _, y in layout.places.values()) - _RAIL
    routes: list[Route] = []
    edge = 0.0
    for number, (nic, wires) in enumerate(served.items()):
        gpus = {wire: next(end for end in wire.ends if end != nic) for wire in wires}
        middle = sum(layout.places[gpu][0] for gpu in gpus.values()) / len(gpus)
        place = (max(edge + box_width(nic) / 2, middle), bottom - _RAIL * (len(served) + 1))
        edge = place[0] - box_width(nic) / 2 + full_width(nic, beside[nic]) + 2 * _SIDE
        rail = bottom - _RAIL * number
        for wire, gpu in gpus.items():
            x, y = layout.places[gpu]
            side = layout.sides.get(gpu, x + box_width(gpu) / 2) + _SIDE
            routes.append((wire, [(x, y), (side, y), (side, rail), (place[0], rail), place]))
        layout.places[nic] = place
    return routes

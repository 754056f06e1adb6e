"""The panel of NVLinks: each connected graph by itself, bundles labelled with their number of links."""

from __future__ import annotations

from collections.abc import Sequence

from topoplan.plot.edge_labels import label_places
from topoplan.plot.meshes import mesh_positions
from topoplan.plot.panels import Panel, tiled
from topoplan.plot.wires import Wire
from topoplan.topology import Device, Topology


def nvlink_panel(topology: Topology, drawn: Sequence[Wire]) -> Panel | None:
    """The panel, or None for a machine without NVLink.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.plot.wires import wires
    >>> machine = topoplan.load("dgx-2")
    >>> panel = nvlink_panel(machine, wires(machine))
    >>> len(panel.places), {text for _, text in panel.counts}
    (17, {'×6'})
    """
    shown = [wire for wire in drawn if wire.channel == "nvlink"]
    if not shown:
        return None
    return tiled("NVLink", [_graph(group, shown) for group in _components(topology, shown)])


def _graph(group: Sequence[Device], shown: Sequence[Wire]) -> Panel:
    gpus = [device.name for device in group if device.kind == "gpu"]
    middle = [device.name for device in group if device.kind != "gpu"]
    own = [wire for wire in shown if wire.ends[0] in {*gpus, *middle}]
    places = mesh_positions(gpus, middle, {wire.ends: wire.count for wire in own})
    routes = [(wire, (places[wire.ends[0]], places[wire.ends[1]])) for wire in own]
    spots = label_places(
        [ends for wire, ends in routes if wire.count > 1],
        [ends for wire, ends in routes if wire.count == 1],
        list(places.values()),
    )
    counts = zip(spots, (f"×{wire.count}" for wire in own if wire.count > 1), strict=True)
    return Panel("", places, routes, tuple(counts))


def _components(topology: Topology, shown: Sequence[Wire]) -> list[list[Device]]:
    parts: dict[str, set[str]] = {}
    for a, b in (wire.ends for wire in shown):
        merged = parts.get(a, {a}) | parts.get(b, {b})
        for name in merged:
            parts[name] = merged
    groups: dict[frozenset[str], list[Device]] = {}
    for device in topology.devices:
        if device.name in parts:
            groups.setdefault(frozenset(parts[device.name]), []).append(device)
    return list(groups.values())

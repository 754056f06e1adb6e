"""The panel of the network: switches, and below each the NICs that are wired to it, those of a server in one column."""

from __future__ import annotations

from collections.abc import Sequence

from topoplan.plot.crossways import crossways, tree_routes
from topoplan.plot.hanging import Forest, hanging_layout
from topoplan.plot.host_panel import serving_wires
from topoplan.plot.layers import connected, grow_forest
from topoplan.plot.panels import Panel, box_width, full_width, tiled
from topoplan.plot.wires import Wire
from topoplan.topology import Topology

_RANK = {"switch": 1, "nic": 2, "gpu": 3}


def network_panel(topology: Topology, drawn: Sequence[Wire]) -> Panel | None:
    """The panel, or None for a machine without a network.

    Examples
    --------
    >>> from topoplan.clusters import nvswitch_cluster
    >>> from topoplan.plot.wires import wires
    >>> pair = nvswitch_cluster(2)
    >>> len(network_panel(pair, wires(pair)).routes)
    16
    """
    serving = {wire.ends for wire in serving_wires(topology, drawn)}
    shown = [wire for wire in drawn if wire.channel == "network" and wire.ends not in serving]
    if not shown:
        return None
    names = [d.name for d in topology.devices if any(d.name in wire.ends for wire in shown)]
    groups = connected(names, [wire.ends for wire in shown])
    return tiled(
        "network", [_part(topology, [name for name in names if name in group], shown) for group in groups]
    )


def _part(topology: Topology, names: Sequence[str], shown: Sequence[Wire]) -> Panel:
    """The part of the panel that holds these devices, which no wire joins to others."""
    shown = [wire for wire in shown if wire.ends[0] in names]
    near: dict[str, list[str]] = {name: [] for name in names}
    for a, b in (wire.ends for wire in shown):
        near[a].append(b)
        near[b].append(a)
    kinds = {name: topology.device(name).kind for name in names}
    rank = {name: _RANK.get(kinds[name], len(_RANK)) for name in names}
    for name, ends in near.items():
        ends.sort(key=names.index)
        if kinds[name] == "switch" and all(kinds[end] == "switch" for end in ends):
            rank[name] = 0
    roots, children = grow_forest(names, near, rank=rank)
    beside = {
        below: f"×{wire.count}"
        for wire in shown
        for above, below in (wire.ends, wire.ends[::-1])
        if wire.count > 1 and below in children.get(above, ())
    }
    layout = hanging_layout(
        Forest(
            roots,
            children,
            kinds,
            {name: box_width(name) for name in names},
            {name: full_width(name, beside.get(name, "")) for name in names},
            {
                name: unit
                for below in children.values()
                for unit in _by_server(topology, below)
                for name in unit
            },
        )
    )
    routes, other = tree_routes(layout, shown, children)
    return Panel("", layout.places, routes + crossways(other, layout.places), beside=beside)


def _by_server(topology: Topology, below: Sequence[str]) -> list[tuple[str, ...]]:
    """Devices of one server that hang below one switch."""
    groups: dict[str, list[str]] = {}
    for name in below:
        groups.setdefault(topology.device(name).server or name, []).append(name)
    return [tuple(group) for group in groups.values()]

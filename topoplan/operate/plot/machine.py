"""Draw a machine: the NVLink graph with its link counts, below it the PCIe tree, and the network.

One unit of the axes is one inch, so that boxes and labels keep their size and the figure grows with the machine.

The host panel has CPUs, switches, and below them GPUs and NICs in columns. A NIC of a cluster without a place on PCIe
stands in the column of its GPUs, wired to them on its right; one with GPUs of several columns stands below all. The
network panel has switches, and below each its NICs, those of a server in one column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import TYPE_CHECKING

from topoplan.errors import UsageError, kind_of, warnings_first
from topoplan.machine.topology import Device, Topology, TopologyLike, as_topology
from topoplan.machine.variants import representative_servers
from topoplan.operate.diagnosis import machine_warnings
from topoplan.operate.plot.canvas import (
    HEAD,
    SMALL,
    STROKES,
    VERMILLION,
    draw_line_legend,
    fitted,
    new_figure,
    points,
)
from topoplan.operate.plot.nvlink_panel import nvlink_panel
from topoplan.operate.plot.panels import (
    DrawnLink,
    Kind,
    Panel,
    Point,
    box_width,
    draw_panel,
    full_width,
    kind_text,
    tiled,
    whole_nics,
    wire_widths,
    wires,
)
from topoplan.operate.plot.tree_layout import (
    ColumnLayout,
    Forest,
    Route,
    column_layout,
    connected,
    cross_routes,
    grow_forest,
    tree_routes,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HOST_RANK = {"cpu": 0, "pcie": 1, "nic": 2, "gpu": 3, "nvswitch": 4, "switch": 5, "helper": 3}
_BESIDE = 12
_SIDE = 0.1
_RAIL = 0.16


def host_panel(topology: Topology, drawn: Sequence[DrawnLink]) -> Panel | None:
    """Return the panel, or None for a machine with NVLinks only."""
    inside = [wire for wire in drawn if wire.channel in ("pcie", "c2c", "sys")]
    serving = serving_wires(topology, drawn)
    # devices on PCIe or with serving wires, and GPUs without any wire
    shown = {end for wire in (*inside, *serving) for end in wire.ends}
    linked = {end for wire in drawn for end in wire.ends}
    names = [
        d.name for d in topology.devices if d.name in shown or (d.kind == "gpu" and d.name not in linked)
    ]
    if not names:
        return None
    tiles = [
        _host(topology, [name for name in names if name in group], inside, serving)
        for group in connected(names, [wire.ends for wire in (*inside, *serving)])
    ]
    return tiled("PCIe and NICs" if serving else "PCIe", tiles)


def _host(
    topology: Topology, names: Sequence[str], inside: Sequence[DrawnLink], serving: Sequence[DrawnLink]
) -> Panel:
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
    roots, children = grow_forest(names, near, rank={name: _HOST_RANK[kind] for name, kind in kinds.items()})
    served = {end: [w for w in serving if end in w.ends] for end in names if kinds[end] == "nic"}
    units, shared = _attach_nics(served, roots, children)
    beside = {name: _beside(topology.device(name)) for name in names}
    beside |= dict.fromkeys((end for wire in serving for end in wire.ends), "")
    _mark_bundles(beside, inside, children)
    own = [root for root in roots if not served.get(root)]
    layout = column_layout(Forest(own, children, kinds, beside, units))
    routes, elsewhere = tree_routes(layout, inside, children)
    routes += cross_routes(elsewhere, layout.places)
    routes += [
        (wire, _beside_route(layout, wire, kinds)) for wire in serving if not set(wire.ends) & set(shared)
    ]
    routes += _shared_routes(layout, {nic: served[nic] for nic in shared}, beside)
    return Panel("", layout.places, routes, beside=beside)


def serving_wires(topology: Topology, drawn: Sequence[DrawnLink]) -> list[DrawnLink]:
    """Return wires of the network between a GPU and a NIC without a place on PCIe."""
    plugged = {end for wire in drawn if wire.channel != "network" for end in wire.ends}
    return [
        wire
        for wire in drawn
        if wire.channel == "network"
        and {topology.device(end).kind for end in wire.ends} == {"gpu", "nic"}
        and not any(topology.device(end).kind == "nic" and end in plugged for end in wire.ends)
    ]


def _attach_nics(
    served: Mapping[str, Sequence[DrawnLink]], roots: Sequence[str], children: dict[str, list[str]]
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Attach NICs without PCIe below the parent of their GPUs; return units of one column, and the other NICs."""
    parents = {child: above for above, below in children.items() for child in below}
    units: dict[str, tuple[str, ...]] = {}
    shared = []
    for nic, links in served.items():
        gpus = [end for wire in links for end in wire.ends if end != nic]
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
    """Return a short adapter or bus id; "" for a CPU, whose wires lead to the right."""
    text = device.fact("adapter") or device.busid.removeprefix("0000:")
    return text if len(text) <= _BESIDE and device.kind != "cpu" else ""


def _mark_bundles(
    beside: dict[str, str], inside: Sequence[DrawnLink], children: Mapping[str, Sequence[str]]
) -> None:
    for wire in inside:
        for above, below in (wire.ends, wire.ends[::-1]):
            if wire.count > 1 and below in children.get(above, ()):
                beside[below] = f"×{wire.count} {beside[below]}".strip()


def _beside_route(layout: ColumnLayout, wire: DrawnLink, kinds: Mapping[str, str]) -> Sequence[Point]:
    """Return the route right of the column from GPU to NIC; straight down to a NIC below a single GPU."""
    gpu, nic = sorted(wire.ends, key=lambda end: kinds[end] == "nic")
    if gpu not in layout.sides:
        return layout.route(gpu, nic)
    side = layout.sides[gpu] + _SIDE
    (x, y), (u, v) = layout.places[gpu], layout.places[nic]
    return [(x, y), (side, y), (side, v), (u, v)]


def _shared_routes(
    layout: ColumnLayout, served: Mapping[str, Sequence[DrawnLink]], beside: Mapping[str, str]
) -> list[Route]:
    """Place NICs of several columns in a row below all, each with its own rail to its GPUs."""
    if not served:
        return []
    bottom = min(y for _, y in layout.places.values()) - _RAIL
    routes: list[Route] = []
    edge = 0.0
    for number, (nic, links) in enumerate(served.items()):
        gpus = {wire: next(end for end in wire.ends if end != nic) for wire in links}
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


MAX_DEVICES = 160
"""Most devices of one figure."""

MOST_LINES = 6
"""Most lines of warnings and notes of a figure."""

_MARGIN = 0.3
_NARROWEST = 6.5
_TITLE = 0.34
_TITLE_ROW = 0.2
_HEADING = 0.28
_GAP = 0.3
_LEGEND_ROW = 0.21
_LEGEND_COLUMN = 2.6
_NOTE_ROW = 0.18
_NOTE_LETTER = 0.077


def draw_topology(topology: TopologyLike) -> Figure:
    """Draw devices and links of a machine; of a cluster too large for a figure, one server of each equivalence class.

    Upper panel: the NVLink graph, bundles labelled with their number of links. Below: CPUs, PCIe switches, GPUs and
    NICs as a tree, then the network. The legend gives the bandwidth of every kind of wire in GB/s and direction. Only
    the first few warnings and notes are shown.

    >>> import topoplan
    >>> figure = draw_topology(topoplan.load("dgx-1v"))
    >>> [axes.get_title(loc="left") for axes in figure.axes]
    ['NVLink', 'PCIe']
    """
    laid_out = lay_out(as_topology(topology))
    topology, notes, panels, kinds = laid_out.shown, laid_out.notes, laid_out.panels, laid_out.kinds
    headline, strokes = laid_out.headline, laid_out.widths
    extents = [panel.extent() for panel in panels]
    width = max([_NARROWEST, *(right - left + 2 * _MARGIN for left, _, right, _ in extents)])
    columns = max(1, int((width - _MARGIN) / _LEGEND_COLUMN))
    legend = _LEGEND_ROW * (-(-len(kinds) // columns) + 1) + _MARGIN if kinds else 0.0
    titles = fitted(headline, 12, width - 2 * _MARGIN)
    title = _TITLE + _TITLE_ROW * (len(titles) - 1)
    lines = _note_lines(notes, int((width - 2 * _MARGIN) / _NOTE_LETTER))
    head = _MARGIN / 2 + title + _NOTE_ROW * len(lines)
    tall = sum(up - low + _HEADING + _GAP for _, low, _, up in extents)
    height = head + tall + legend + _MARGIN / 2
    figure = new_figure(width, height)
    left = _MARGIN / width
    figure.suptitle(
        "\n".join(titles), x=left, y=1 - _MARGIN / 2 / height, ha="left", va="top", fontsize=points(12)
    )
    for number, (line, warning) in enumerate(lines):
        figure.text(
            left,
            1 - (_MARGIN / 2 + title + _NOTE_ROW * number) / height,
            line,
            ha="left",
            va="top",
            fontsize=points(SMALL),
            color=VERMILLION if warning else "#404040",
        )
    top = height - head
    for panel, (west, low, east, up) in zip(panels, extents, strict=True):
        top -= _HEADING + _GAP / 2
        axes = figure.add_axes((0, (top - (up - low)) / height, 1, (up - low) / height), label=panel.title)
        axes.set_title(panel.title, loc="left", x=left, fontsize=points(HEAD))
        draw_panel(axes, topology, panel, strokes)
        spare = (width - (east - west)) / 2
        axes.set_xlim(west - spare, east + spare)
        axes.set_ylim(low, up)
        top -= up - low + _GAP / 2
    draw_line_legend(
        figure,
        [(kind_text(k), STROKES[k[0]].colour, STROKES[k[0]].style, strokes[k]) for k in kinds],
        _MARGIN,
        ncols=columns,
        title="bandwidth in each direction; a line without a number is one link",
        title_fontsize=points(SMALL),
        alignment="left",
    )
    return figure


@dataclass(frozen=True, slots=True)
class MachineLayout:
    """A machine laid out in panels, for any renderer.

    shown: the drawn machine: NICs of two devices as one, and of a large cluster one server of each equivalence class.
    notes: warnings and notes, with omissions.
    panels: NVLink, host and network, if present.
    kinds: the kinds of wires (`topoplan.operate.plot.panels.DrawnLink.kind`) for the legend.
    widths: width of the wires of each kind in points.
    """

    headline: str
    shown: Topology
    notes: tuple[str, ...]
    panels: tuple[Panel, ...]
    kinds: tuple[Kind, ...]
    widths: Mapping[Kind, float]


def lay_out(topology: Topology) -> MachineLayout:
    """Return the panels of a machine; UsageError for too many devices."""
    headline = _headline(topology)
    notes = [*machine_warnings(topology), *topology.notes]
    if len(topology.devices) > MAX_DEVICES:
        topology = _excerpt(topology)
        notes = [*notes, topology.notes[-1]]
    topology = whole_nics(topology)
    drawn = wires(topology)
    kinds = sorted({wire.kind for wire in drawn}, key=lambda kind: (list(STROKES).index(kind[0]), kind[1:]))
    panels = [panel for make in (nvlink_panel, host_panel, network_panel) if (panel := make(topology, drawn))]
    return MachineLayout(headline, topology, tuple(notes), tuple(panels), tuple(kinds), wire_widths(drawn))


def _note_lines(notes: Sequence[str], letters: int) -> list[tuple[str, bool]]:
    """Return lines of the first few notes, warnings first, each note cut to two lines, with a flag for warnings."""
    every = warnings_first(notes)
    wrapped = [
        (
            wrap(note, letters, max_lines=2, placeholder="…", break_on_hyphens=False),
            kind_of(note) == "warning",
        )
        for note in every
    ]
    lines: list[tuple[str, bool]] = []
    for number, (text, warning) in enumerate(wrapped):
        if len(lines) + len(text) > MOST_LINES - (number < len(wrapped) - 1):
            left = len(wrapped) - number
            return [
                *lines,
                (f"{left} more {'notes' if left > 1 else 'note'}: topoplan show prints all", False),
            ]
        lines += [(line, warning) for line in text]
    return lines


def _excerpt(topology: Topology) -> Topology:
    part = representative_servers(topology)
    if len(part.devices) > MAX_DEVICES:
        raise UsageError(
            f"a figure shows at most {MAX_DEVICES} devices, got {len(topology.devices)} of {topology.name}; draw one "
            "server or a smaller allocation"
        )
    note = f"drawn: {len(part.servers)} of {len(topology.servers)} servers; the others are isomorphic"
    return replace(part, notes=(*part.notes, note))


def _headline(topology: Topology) -> str:
    models = list(dict.fromkeys(d.model for d in topology.devices if d.kind == "gpu" and d.model))
    model = f" ({models[0]})" if len(models) == 1 else ""
    count = len(topology.select(None)) if topology.gpus else 0
    return f"{topology.name}: {count} GPU{'' if count == 1 else 's'}{model}"


_NETWORK_RANK = {"switch": 1, "nic": 2, "gpu": 3}


def network_panel(topology: Topology, drawn: Sequence[DrawnLink]) -> Panel | None:
    """Return the panel, or None for a machine without a network."""
    serving = {wire.ends for wire in serving_wires(topology, drawn)}
    shown = [wire for wire in drawn if wire.channel == "network" and wire.ends not in serving]
    if not shown:
        return None
    names = [d.name for d in topology.devices if any(d.name in wire.ends for wire in shown)]
    groups = connected(names, [wire.ends for wire in shown])
    return tiled(
        "network", [_part(topology, [name for name in names if name in group], shown) for group in groups]
    )


def _part(topology: Topology, names: Sequence[str], shown: Sequence[DrawnLink]) -> Panel:
    shown = [wire for wire in shown if wire.ends[0] in names]
    near: dict[str, list[str]] = {name: [] for name in names}
    for a, b in (wire.ends for wire in shown):
        near[a].append(b)
        near[b].append(a)
    kinds = {name: topology.device(name).kind for name in names}
    rank = {name: _NETWORK_RANK.get(kinds[name], len(_NETWORK_RANK)) for name in names}
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
    units = [unit for below in children.values() for unit in _by_server(topology, below)]
    columns = {name: unit for unit in units for name in unit}
    layout = column_layout(Forest(roots, children, kinds, beside, columns))
    routes, other = tree_routes(layout, shown, children)
    return Panel("", layout.places, routes + cross_routes(other, layout.places), beside=beside)


def _by_server(topology: Topology, below: Sequence[str]) -> list[tuple[str, ...]]:
    groups: dict[str, list[str]] = {}
    for name in below:
        groups.setdefault(topology.device(name).server or name, []).append(name)
    return [tuple(group) for group in groups.values()]

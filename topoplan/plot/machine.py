"""A machine as a figure: the NVLink graph with its link counts, and below it the PCIe tree and the network.

One unit of the axes is one inch, so that boxes and labels keep their size and the figure grows with the
machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from textwrap import wrap
from typing import TYPE_CHECKING

from topoplan.clusters.alike import excerpt
from topoplan.errors import UsageError
from topoplan.plot.canvas import new_figure
from topoplan.plot.edge_labels import label_places
from topoplan.plot.layers import forest_positions, grow_forest
from topoplan.plot.meshes import Places, mesh_positions
from topoplan.plot.palette import FILLS, STROKES
from topoplan.plot.wires import Wire, kind_text, wire_widths, wires
from topoplan.topology import Device, Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_DEVICES = 160
"""Most devices that one figure shows."""

_MARGIN = 0.45
_GAP = 1.2
_LAYER = 1.0
_TITLE = 0.3
_LEGEND_ROW = 0.28
_LEGEND_COLUMN = 2.6
_NOTE_ROW = 0.15
_NOTE_LETTER = 0.06
_LETTER = 0.072
_PER_ROW = 4
_FOREST_RANK = {"switch": 0, "cpu": 1, "pcie": 2, "nvswitch": 3, "nic": 4, "gpu": 5}


def draw_topology(topology: Topology) -> Figure:
    """Devices and links of a machine; of a cluster too large for a figure, one server of those that are alike.

    Upper panel: the NVLink graph, bundles labelled with their number of links. Lower panel: PCIe switches,
    CPUs, NICs and the network as a tree. The legend gives the bandwidth of every kind of wire in GB/s and
    direction.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    UsageError
        The machine has more devices than a figure can show.

    Examples
    --------
    >>> import topoplan
    >>> figure = draw_topology(topoplan.load("dgx-1v"))
    >>> [axes.get_title(loc="left") for axes in figure.axes]
    ['NVLink', 'PCIe']
    """
    headline = _headline(topology)
    if len(topology.devices) > MAX_DEVICES:
        topology = _excerpt(topology)
    drawn = wires(topology)
    kinds = sorted({wire.kind for wire in drawn}, key=lambda kind: (list(STROKES).index(kind[0]), kind[1:]))
    panels = [panel for panel in (_nvlink_panel(topology, drawn), _tree_panel(topology, drawn)) if panel]
    widths = [max(x for x, _ in places.values()) + 2 * _MARGIN for _, places, _ in panels]
    heights = [max(y for _, y in places.values()) + 2 * _MARGIN for _, places, _ in panels]
    width = max([*widths, 6.0])
    columns = max(1, int(width / _LEGEND_COLUMN))
    legend = _LEGEND_ROW * (-(-len(kinds) // columns) + 1)
    notes = [line for note in topology.notes for line in wrap(note, int(width / _NOTE_LETTER))]
    head = _TITLE + _NOTE_ROW * len(notes)
    height = head + sum(heights) + _TITLE * len(panels) + legend + _MARGIN / 2
    figure = new_figure(width, height)
    left = _MARGIN / 2 / width
    figure.suptitle(headline, x=left, y=1 - 0.1 / height, ha="left", va="top", fontsize=12)
    figure.text(
        left, 1 - (0.1 + _TITLE) / height, "\n".join(notes), ha="left", va="top", fontsize=7, linespacing=1.2
    )
    top = height - head - 0.1
    strokes = wire_widths(drawn)
    for (title, places, shown), own_width, own_height in zip(panels, widths, heights, strict=True):
        top -= own_height + _TITLE
        axes = figure.add_axes((0, top / height, 1, own_height / height))
        axes.set_title(title, loc="left", fontsize=10, x=left)
        _draw_panel(axes, topology, places, shown, strokes)
        axes.set_xlim(-_MARGIN - (width - own_width) / 2, width - _MARGIN - (width - own_width) / 2)
        axes.set_ylim(-_MARGIN, own_height - _MARGIN)
    _draw_legend(figure, kinds, strokes, columns)
    return figure


def _excerpt(topology: Topology) -> Topology:
    part = excerpt(topology)
    if len(part.devices) > MAX_DEVICES:
        raise UsageError(
            f"{topology.name} has {len(topology.devices)} devices, more than the {MAX_DEVICES} that a "
            "figure can show; draw one server or a smaller allocation"
        )
    note = f"drawn: {len(part.servers)} of {len(topology.servers)} servers; the others are wired alike"
    return replace(part, notes=(*part.notes, note))


def _headline(topology: Topology) -> str:
    models = list(dict.fromkeys(d.model for d in topology.devices if d.kind == "gpu" and d.model))
    model = f" ({models[0]})" if len(models) == 1 else ""
    count = len(topology.gpus)
    return f"{topology.name}: {count} GPU{'' if count == 1 else 's'}{model}"


Panel = tuple[str, Places, tuple[Wire, ...]]


def _nvlink_panel(topology: Topology, drawn: Sequence[Wire]) -> Panel | None:
    shown = tuple(wire for wire in drawn if wire.channel == "nvlink")
    if not shown:
        return None
    places: Places = {}
    left = low = row = 0.0
    for number, group in enumerate(_components(topology, shown)):
        if number and number % _PER_ROW == 0:
            left, low, row = 0.0, low + row + _GAP, 0.0
        gpus = [d.name for d in group if d.kind == "gpu"]
        middle = [d.name for d in group if d.kind != "gpu"]
        own = mesh_positions(gpus, middle, [wire.ends for wire in shown if wire.ends[0] in {*gpus, *middle}])
        places |= {name: (left + x, low + y) for name, (x, y) in own.items()}
        left += max(x for x, _ in own.values()) + _GAP
        row = max(row, *(y for _, y in own.values()))
    return "NVLink", places, shown


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


def _tree_panel(topology: Topology, drawn: Sequence[Wire]) -> Panel | None:
    shown = tuple(wire for wire in drawn if wire.channel != "nvlink")
    names = [d.name for d in topology.devices if any(d.name in wire.ends for wire in shown)]
    linked = {end for wire in drawn for end in wire.ends}
    names += [name for name in topology.gpus if name not in linked]
    if not names:
        return None
    near: dict[str, list[str]] = {name: [] for name in names}
    for a, b in (wire.ends for wire in shown):
        near[a].append(b)
        near[b].append(a)
    for found in near.values():
        found.sort(key=names.index)
    rank = {d.name: _FOREST_RANK[d.kind] for d in topology.devices}
    roots, children = grow_forest(names, near, rank=rank)
    slots = forest_positions(roots, children)
    step = _LETTER * max(len(name) for name in names) + 0.22
    deepest = max(depth for _, depth in slots.values())
    places = {name: (slot * step, (deepest - depth) * _LAYER) for name, (slot, depth) in slots.items()}
    channels = {wire.channel for wire in shown}
    return "PCIe and network" if "network" in channels else "PCIe", places, shown


def _draw_panel(
    axes: Axes,
    topology: Topology,
    places: Places,
    shown: Sequence[Wire],
    strokes: Mapping[tuple[str, float, float, int], float],
) -> None:
    axes.set_axis_off()
    axes.set_aspect("equal")
    for wire in shown:
        (x, y), (u, v) = (places[end] for end in wire.ends)
        stroke = STROKES[wire.channel]
        axes.plot(
            [x, u],
            [y, v],
            color=stroke.colour,
            linestyle=stroke.style,
            linewidth=strokes[wire.kind],
            zorder=1,
        )
    bundles = [wire for wire in shown if wire.count > 1]
    segments = {wire: (places[wire.ends[0]], places[wire.ends[1]]) for wire in shown}
    spots = label_places(
        [segments[wire] for wire in bundles],
        [segments[wire] for wire in shown if wire.count == 1],
        [places[name] for name in places],
    )
    for wire, (x, y) in zip(bundles, spots, strict=True):
        axes.text(
            x,
            y,
            f"×{wire.count}",
            ha="center",
            va="center",
            fontsize=8,
            zorder=2,
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"},
        )
    for name, (x, y) in places.items():
        device = topology.device(name)
        fill, ink = FILLS[device.kind]
        axes.text(
            x,
            y,
            name,
            ha="center",
            va="center",
            fontsize=8,
            color=ink,
            zorder=3,
            bbox={"boxstyle": "round,pad=0.35", "facecolor": fill, "edgecolor": "black", "linewidth": 0.6},
        )


def _draw_legend(
    figure: Figure,
    kinds: Sequence[tuple[str, float, float, int]],
    strokes: Mapping[tuple[str, float, float, int], float],
    columns: int,
) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [],
            [],
            color=STROKES[k[0]].colour,
            linestyle=STROKES[k[0]].style,
            linewidth=strokes[k],
            label=kind_text(k),
        )
        for k in kinds
    ]
    figure.legend(
        handles=handles,
        loc="lower left",
        ncols=columns,
        fontsize=8,
        frameon=False,
        title="bandwidth in each direction; a wire without a number is one link",
        title_fontsize=8,
        alignment="left",
        handlelength=3,
    )

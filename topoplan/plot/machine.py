"""A machine as a figure: the NVLink graph with its link counts, below it the PCIe tree, and the network.

One unit of the axes is one inch, so that boxes and labels keep their size and the figure grows with the
machine.

The panel of the network has switches, and below each the NICs that are wired to it, those of a server in one column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import TYPE_CHECKING

from topoplan.clusters.alike import excerpt
from topoplan.errors import UsageError
from topoplan.health.diagnosis import machine_warnings
from topoplan.hosts.notes import kind_of, warnings_first
from topoplan.plot.canvas import STROKES, VERMILLION, fitted, new_figure, points
from topoplan.plot.crossways import crossways, tree_routes
from topoplan.plot.hanging import Forest, hanging_layout
from topoplan.plot.host_panel import host_panel, serving_wires
from topoplan.plot.layers import connected, grow_forest
from topoplan.plot.nvlink_panel import nvlink_panel
from topoplan.plot.panels import Panel, box_width, draw_panel, full_width, tiled
from topoplan.plot.wires import Wire, kind_text, whole_nics, wire_widths, wires
from topoplan.topology import Topology, TopologyLike, as_topology

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MAX_DEVICES = 160
"""Most devices that one figure shows."""

MOST_LINES = 6
"""Most lines of warnings and notes that a figure shows."""

_MARGIN = 0.3
_NARROWEST = 6.5
_TITLE = 0.34
_TITLE_ROW = 0.2
_HEADING = 0.28
_GAP = 0.3
_LEGEND_ROW = 0.2
_LEGEND_COLUMN = 2.4
_NOTE_ROW = 0.16
_NOTE_LETTER = 0.064


def draw_topology(topology: TopologyLike) -> Figure:
    """Devices and links of a machine; of a cluster too large for a figure, one server of those that are alike.

    Upper panel: the NVLink graph, bundles labelled with their number of links. Below: CPUs, PCIe switches, GPUs and
    NICs as a tree, then the network. The legend gives the bandwidth of every kind of wire in GB/s and direction. Of
    warnings and notes the first few are shown.

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
            fontsize=points(7.5),
            color=VERMILLION if warning else "#404040",
        )
    top = height - head
    for panel, (west, low, east, up) in zip(panels, extents, strict=True):
        top -= _HEADING + _GAP / 2
        axes = figure.add_axes((0, (top - (up - low)) / height, 1, (up - low) / height), label=panel.title)
        axes.set_title(panel.title, loc="left", x=left, fontsize=points(10))
        draw_panel(axes, topology, panel, strokes)
        spare = (width - (east - west)) / 2
        axes.set_xlim(west - spare, east + spare)
        axes.set_ylim(low, up)
        top -= up - low + _GAP / 2
    _draw_legend(figure, kinds, strokes, columns)
    return figure


Kind = tuple[str, float, float, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """A machine laid out in panels, whoever draws them.

    Parameters
    ----------
    headline : str
        Its name and GPUs.
    shown : Topology
        What is drawn: NICs of two devices as one, and of a large cluster one server of those that are alike.
    notes : tuple of str
        Warnings and notes, with what is left out.
    panels : tuple of Panel
        Of NVLink, of the host and of the network, as far as there are such links.
    kinds : tuple
        The kinds of wires (`topoplan.plot.wires.Wire.kind`) for the legend.
    widths : mapping
        Width of the wires of each kind in points.
    """

    headline: str
    shown: Topology
    notes: tuple[str, ...]
    panels: tuple[Panel, ...]
    kinds: tuple[Kind, ...]
    widths: Mapping[Kind, float]


def lay_out(topology: Topology) -> Layout:
    """The panels of a machine; UsageError where it has more devices than a figure can show.

    Examples
    --------
    >>> import topoplan
    >>> [panel.title for panel in lay_out(topoplan.load("dgx-1v")).panels]
    ['NVLink', 'PCIe']
    """
    headline = _headline(topology)
    notes = [*machine_warnings(topology), *topology.notes]
    if len(topology.devices) > MAX_DEVICES:
        topology = _excerpt(topology)
        notes = [*notes, topology.notes[-1]]
    topology = whole_nics(topology)
    drawn = wires(topology)
    kinds = sorted({wire.kind for wire in drawn}, key=lambda kind: (list(STROKES).index(kind[0]), kind[1:]))
    panels = [panel for make in (nvlink_panel, host_panel, network_panel) if (panel := make(topology, drawn))]
    return Layout(headline, topology, tuple(notes), tuple(panels), tuple(kinds), wire_widths(drawn))


def _note_lines(notes: Sequence[str], letters: int) -> list[tuple[str, bool]]:
    """Lines of the first few notes, warnings before others, each note cut to two; and whether it is a warning."""
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
            linewidth=points(strokes[k]),
            label=kind_text(k),
        )
        for k in kinds
    ]
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(_MARGIN / figure.get_figwidth(), _MARGIN / 2 / figure.get_figheight()),
        borderaxespad=0,
        borderpad=0,
        ncols=columns,
        fontsize=points(8),
        frameon=False,
        title="bandwidth in each direction; a wire without a number is one link",
        title_fontsize=points(8),
        alignment="left",
        handlelength=3,
    )


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

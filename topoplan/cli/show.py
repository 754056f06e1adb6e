"""``topoplan show``: what a machine is made of.

The matrix is laid out like ``nvidia-smi topo -m``, with both legends.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from topoplan.cli.arguments import OneLineParser, add_json, add_machine, add_plot
from topoplan.cli.cluster_options import add_cluster
from topoplan.cli.damage_options import add_damage
from topoplan.cli.device_tree import told_by_tree, tree_text
from topoplan.cli.output import check_plot, draw_plot, print_json, print_notes, printable, table
from topoplan.cli.sources import read_machine
from topoplan.clusters import alike, excerpt
from topoplan.degraded import nic_name
from topoplan.formats.matrix import affinity_columns, relation_matrix
from topoplan.health.diagnosis import machine_warnings
from topoplan.hosts.notes import listed
from topoplan.topology import Topology
from topoplan.units import exact


def add_options(parser: OneLineParser) -> None:
    """Add the options of ``show``."""
    add_machine(parser)
    add_cluster(parser)
    add_damage(parser)
    add_plot(parser, "the machine")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Show the devices, links and connection matrix of a machine; with --json as topology JSON."""
    check_plot(options)
    show_machine(read_machine(options).topology, options)
    return 0


def show_machine(topology: Topology, options: argparse.Namespace) -> None:
    """Print a machine as text or as topology JSON, and draw it if a file is named."""
    draw_machine(topology, options)
    if options.json:
        print_json(topology.to_object())
        return
    print(f"{topology.name}: {link_summary(topology)}")
    _print_parts(topology)
    if options.plot:
        print(f"written: {options.plot}")


def draw_machine(topology: Topology, options: argparse.Namespace) -> None:
    """Draw a machine into a file if one is named."""
    if options.plot:
        from topoplan.plot.machine import draw_topology

        draw_plot(options, lambda: draw_topology(topology))


def link_summary(topology: Topology) -> str:
    """How many links of what bandwidth, one direction counted.

    Examples
    --------
    >>> import topoplan
    >>> link_summary(topoplan.load("dgx-1v"))
    '24 nvlink of 25 GB/s'
    """
    kinds: Counter[tuple[str, Fraction]] = Counter()
    seen = set()
    for link in topology.links:
        src, dst = nic_name(link.src), nic_name(link.dst)
        if link.channel in ("nvlink", "c2c", "network") and (dst, src, link.channel) not in seen:
            seen.add((src, dst, link.channel))
            kinds[link.channel, exact(link.bandwidth) / link.count] += link.count
    parts = [
        f"{number} {channel} of {float(rate):g} GB/s" for (channel, rate), number in sorted(kinds.items())
    ]
    return ", ".join(parts) or ("PCIe only" if topology.links else "no links")


def _print_parts(topology: Topology) -> None:
    kinds = Counter(kind for _, kind in dict.fromkeys((nic_name(d.name), d.kind) for d in topology.devices))
    warnings = machine_warnings(topology)
    print("devices: " + (", ".join(f"{number} {kind}" for kind, number in kinds.items()) or "none"))
    if len(topology.servers) > 1:
        groups = alike(topology)
        print("servers: " + ", ".join(_group_text(group) for group in groups))
        if len(groups) < len(topology.servers):
            topology = excerpt(topology)
    plugged = {end for link in topology.links if link.channel != "network" for end in (link.src, link.dst)}
    on_pcie = any(device.kind == "nic" and device.name in plugged for device in topology.devices)
    alone = not any(link.channel == "network" for link in topology.links)
    # NICs that are wired straight to GPUs would fill the matrix with NET and say nothing; the links below do.
    parts = [
        matrix_text(topology, ("gpu", "nic") if on_pcie or alone else ("gpu",)),
        tree_text(topology),
        _link_text(topology),
    ]
    for part in parts:
        if part:
            print(f"\n{part}")
    if topology.source:
        print(f"\nsource: {printable(topology.source)}")
    print_notes(*warnings, *topology.notes)


def _group_text(group: Sequence[str]) -> str:
    """Such as ``s0 (stands for 16 alike, s0 to s15)``."""
    if len(group) == 1:
        return group[0]
    return f"{group[0]} (shown for {len(group)} that are alike, up to {group[-1]})"


def _link_text(topology: Topology) -> str:
    """A table of the links that the tree does not tell.

    One row stands for both directions of a wire where they are equal, one for each where they differ.
    """
    told = told_by_tree(topology)
    links = {
        ends: link for link in topology.links if (ends := (link.src, link.dst, link.channel)) not in told
    }
    rows: list[tuple[str, ...]] = []
    shown = set()
    for key, link in links.items():
        back = links.get((link.dst, link.src, link.channel))
        same = back is not None and (back.bandwidth, back.count) == (link.bandwidth, link.count)
        if same and (link.dst, link.src, link.channel) in shown:
            continue
        shown.add(key)
        arrow = "<->" if same else "->"
        rows.append((link.src, arrow, link.dst, link.channel, str(link.count), f"{link.bandwidth:g}"))
    return table(("from", "", "to", "channel", "count", "GB/s"), rows) if rows else ""


WIDEST = 120
"""Characters of a line of the matrix; one of more devices is printed in several blocks of columns."""

_ROOMY = 120

_CODES = (
    "NV#: NVLinks between the two, or into the switch they share.  PIX: one PCIe switch.  PXB: several.",
    "PHB: through a CPU.  NODE: likewise, by two host bridges.  SYS: between NUMA nodes.  NET: over a network.  "
    "-: no path.",
)


def matrix_text(topology: Topology, kinds: Sequence[str]) -> str:
    """The matrix of the devices of some kinds, affinity of GPUs where it is known, and what codes and NICs mean.

    Empty where there is no such device.

    Examples
    --------
    >>> import topoplan
    >>> print(matrix_text(topoplan.load("v100x4"), ["gpu"]).split("Legend")[0].rstrip())
          gpu0  gpu1  gpu2  gpu3
    gpu0  X     NV1   NV1   NV2
    gpu1  NV1   X     NV2   NV1
    gpu2  NV1   NV2   X     NV2
    gpu3  NV2   NV1   NV2   X
    """
    names, cells = relation_matrix(topology, kinds)
    if not names:
        return ""
    columns = [(name, *(row[i] for row in cells)) for i, name in enumerate(names)]
    columns += [(title, *shown) for title, shown in affinity_columns(topology, names).items()]
    blocks = [_block(names, part) for part in _parts(names, columns)]
    legend = ["Legend:", *(f"  {line}" for line in _CODES)]
    nics = _nic_lines(topology, names)
    if nics:
        legend += ["NIC legend:", *(f"  {line}" for line in nics)]
    return "\n\n".join([*blocks, "\n".join(legend)])


def _parts(names: Sequence[str], columns: Sequence[Sequence[str]]) -> list[list[Sequence[str]]]:
    """Columns in blocks that a line can hold."""
    parts: list[list[Sequence[str]]] = [[]]
    for column in columns:
        if parts[-1] and _width(names, [*parts[-1], column], gap=1) > WIDEST:
            parts.append([])
        parts[-1].append(column)
    return parts


def _width(names: Sequence[str], columns: Sequence[Sequence[str]], *, gap: int) -> int:
    return max(map(len, names)) + sum(gap + max(map(len, column)) for column in columns)


def _block(names: Sequence[str], columns: Sequence[Sequence[str]]) -> str:
    gap = 2 if _width(names, columns, gap=2) <= _ROOMY else 1
    header, *rows = zip(("", *names), *columns, strict=True)
    return table(header, rows, gap=gap)


def _nic_lines(topology: Topology, names: Sequence[str]) -> list[str]:
    """What each NIC is, those of one model together."""
    meaning: dict[str, list[str]] = {}
    for device in map(topology.device, names):
        text = device.fact("adapter") or device.model
        if device.kind == "nic" and text:
            meaning.setdefault(text, []).append(device.name)
    return [f"{listed(found)}: {printable(text)}" for text, found in meaning.items()]

"""``topoplan show``: what a machine is made of."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from topoplan.cli.arguments import OneLineParser, add_json, add_machine, add_plot
from topoplan.cli.cluster_options import add_cluster
from topoplan.cli.damage_options import add_damage
from topoplan.cli.device_tree import told_by_tree, tree_text
from topoplan.cli.machine_matrix import matrix_text
from topoplan.cli.output import print_json, print_notes, printable, table
from topoplan.cli.output_files import check_plot
from topoplan.cli.sources import read_machine
from topoplan.clusters import alike, excerpt
from topoplan.degraded import nic_name
from topoplan.formats.machine_warnings import machine_warnings
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
    check_plot(options.plot)
    show_machine(read_machine(options).topology, plot=options.plot, as_json=options.json)
    return 0


def show_machine(topology: Topology, *, plot: str | None, as_json: bool) -> None:
    """Print a machine as text or as topology JSON, and draw it if a file is named."""
    if plot:
        draw_machine(topology, plot)
    if as_json:
        print_json(topology.to_object())
        return
    print(f"{topology.name}: {link_summary(topology)}")
    _print_parts(topology)
    if plot:
        print(f"written: {plot}")


def draw_machine(topology: Topology, path: str) -> None:
    """Draw a machine into a file."""
    from topoplan.plot.canvas import save_figure
    from topoplan.plot.machine import draw_topology

    save_figure(draw_topology(topology), path)


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

"""``topoplan list`` and ``topoplan show``: what machines there are, and what one is made of."""

from __future__ import annotations

import argparse
from collections import Counter

from topoplan.cli.arguments import OneLineParser, add_json, add_machine, machine
from topoplan.cli.output import print_json, table
from topoplan.formats.load import library, load
from topoplan.formats.matrix import relation_matrix
from topoplan.formats.topology_json import topology_to_object
from topoplan.topology import Topology


def add_to(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Add the commands ``list`` and ``show``."""
    listing = commands.add_parser("list", help="the machines of the library", description=run_list.__doc__)
    add_json(listing)
    listing.set_defaults(run=run_list)
    showing = commands.add_parser(
        "show", help="devices, links and matrix of a machine", description=run_show.__doc__
    )
    add_machine(showing)
    add_json(showing)
    showing.add_argument("--plot", metavar="F.png", help="draw the machine")
    showing.set_defaults(run=run_show)


def run_list(options: argparse.Namespace) -> int:
    """Name the machines of the library, their GPUs and their links."""
    machines = [load(name) for name in library()]
    if options.json:
        print_json(
            [
                {"name": m.name, "gpus": len(m.gpus), "links": _link_summary(m), "source": m.source}
                for m in machines
            ]
        )
        return 0
    print(table(("name", "GPUs", "links"), [(m.name, str(len(m.gpus)), _link_summary(m)) for m in machines]))
    return 0


def run_show(options: argparse.Namespace) -> int:
    """Show the devices, links and connection matrix of a machine."""
    topology = machine(options)
    if options.json:
        print_json(topology_to_object(topology))
    else:
        print(f"{topology.name}: {_link_summary(topology)}")
        _print_parts(topology)
    if options.plot:
        from topoplan.plot.canvas import save_figure
        from topoplan.plot.machine import draw_topology

        save_figure(draw_topology(topology), options.plot)
    return 0


def _print_parts(topology: Topology) -> None:
    kinds = Counter(device.kind for device in topology.devices)
    print("devices: " + ", ".join(f"{number} {kind}" for kind, number in kinds.items()))
    names, cells = relation_matrix(topology)
    print()
    print(table(("", *names), [(name, *row) for name, row in zip(names, cells, strict=True)]))
    print()
    print(
        "NV#: NVLinks between the two, or into the switch they share.  PIX: one PCIe switch.  PXB: several."
    )
    print("PHB: through a CPU.  SYS: between CPUs.  -: no path.")
    print()
    print(table(("from", "", "to", "channel", "count", "GB/s"), _link_rows(topology)))
    if topology.source:
        print(f"\nsource: {topology.source}")
    for note in topology.notes:
        print(f"note: {note}")


def _link_rows(topology: Topology) -> list[tuple[str, ...]]:
    """One row for both directions of a wire where they are equal, one for each where they differ."""
    links = {(link.src, link.dst, link.channel): link for link in topology.links}
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
    return rows


def _link_summary(topology: Topology) -> str:
    """How many links of what bandwidth, one direction counted."""
    kinds: Counter[tuple[str, float]] = Counter()
    seen = set()
    for link in topology.links:
        if link.channel in ("nvlink", "network") and (link.dst, link.src, link.channel) not in seen:
            seen.add((link.src, link.dst, link.channel))
            kinds[link.channel, link.bandwidth / link.count] += link.count
    parts = [f"{number} {channel} of {rate:g} GB/s" for (channel, rate), number in sorted(kinds.items())]
    return ", ".join(parts) or "PCIe only"

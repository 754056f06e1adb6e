"""Print machines for ``topoplan show``, ``list`` and ``probe``: device tree, links, and connection matrix.

The matrix has the layout of ``nvidia-smi topo -m``, with both legends. Links that the tree (`topoplan.cli.device_tree`)
does not state in full are in the table of links.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from itertools import combinations
from typing import TYPE_CHECKING

from topoplan.cli.arguments import OneLineParser, add_csv, add_json, add_machine, add_plot, declare
from topoplan.cli.device_tree import (
    device_tree_text,
    links_by_device,
    links_in_tree,
    model_and_facts,
    nvlink_words,
    tree_lines,
    uplink_speed,
)
from topoplan.cli.machine_options import add_all_options
from topoplan.cli.output import (
    DEFAULT_LINES,
    MAX_COLUMNS,
    Answer,
    Column,
    few,
    folded,
    folded_line,
    printable,
    records_of,
    table,
    table_of,
)
from topoplan.cli.sources import large_cluster, read_machine
from topoplan.machine.cluster_by_kind import ClusterByKind
from topoplan.machine.half_duplex import merged
from topoplan.machine.nic_wiring import WiredServer
from topoplan.machine.topology import Topology
from topoplan.machine.variants import cables, equivalent_servers, nic_name, representative_servers
from topoplan.operate.diagnosis import machine_warnings
from topoplan.reading.load import library, load
from topoplan.reading.pcie_tree import affinity_columns, relation_matrix
from topoplan.reading.probe import probe
from topoplan.units import counted, exact, labelled, listed, name_ranges

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def add_options(parser: OneLineParser) -> None:
    add_machine(parser)
    add_all_options(parser)
    add_plot(parser, "the machine")
    add_json(parser)
    declare(parser, ALL_OPTION)
    parser.examples = (
        "topoplan show dgx-1v",
        "topoplan show topo.txt --json",
        "topoplan show dgx-a100 --servers 2 --nic-bandwidth 200Gb/s --plot cluster.png",
    )


ALL_OPTION = "--all  print the whole matrix, the device tree and every link"


def run(options: argparse.Namespace) -> Answer:
    """Show the devices, links and connection matrix of a machine; with --json as topology JSON."""
    cluster = None if options.all or options.json or options.plot else large_cluster(options, ())
    if cluster is not None and all(cluster.gpus_of_kind[kind] for kind, count in cluster.runs if count):
        return _shown_by_kind(cluster)
    return _shown(read_machine(options).topology, every=options.all)


def _shown(topology: Topology, *, every: bool) -> Answer:
    """Return a machine as text, topology JSON and figure."""
    notes = (*machine_warnings(topology), *topology.notes)

    def figure() -> Figure:
        from topoplan.operate.plot.machine import draw_topology

        return draw_topology(topology)

    return Answer(
        text=lambda: [
            *map(printable, _title(topology)),
            *(_parts(topology) if every else _summary(topology, DEFAULT_LINES - 3 - min(5, len(notes)))),
        ],
        value=topology.to_object,
        file=topology.to_json,
        figure=figure,
        notes=notes,
    )


def _shown_by_kind(cluster: ClusterByKind) -> Answer:
    """Return a large cluster as text, by one server of each kind."""
    kinds: dict[WiredServer, list[str]] = {}
    server = 0
    for kind, count in cluster.runs:
        kinds.setdefault(cluster.kinds[kind], []).extend(f"s{server + i}" for i in range(count))
        server += count
    # In a torus the first server of each kind shows all but the cables.
    first = [int(names[0].removeprefix("s")) for names in kinds.values()]
    in_torus = cluster.network.kind == "torus"
    sampled = cluster.joined(first, [1] * len(first)) if in_torus else cluster.sample(1).topology
    few = representative_servers(merged(sampled))
    notes = cluster.notes

    def number(of: str) -> int:
        return sum(
            len(names) * len({nic_name(device.name) for device in kind.devices if device.kind == of})
            for kind, names in kinds.items()
        )

    def text() -> Iterator[str]:
        models = {few.device(gpu).model for gpu in few.gpus}
        model = f"{models.pop()} " if len(models) == 1 and "" not in models else ""
        parts = [counted(cluster.size, f"{model}GPU"), counted(cluster.servers, "server")]
        parts += [
            counted(number(of), noun) for of, noun in (("nic", "NIC"), ("nvswitch", "NVSwitch")) if number(of)
        ]
        yield printable(f"{cluster.name}: {', '.join(parts)}")
        yield _server_line([*kinds.values()])
        stated = {
            name: ",".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"
            for name, value in asdict(cluster.network).items()
            if value and name != "kind"
        }
        yield from labelled(
            (
                "network",
                ", ".join([cluster.network.kind, *(f"{n.replace('_', ' ')} {v}" for n, v in stated.items())]),
            )
        )
        yield from _devices(few, DEFAULT_LINES - 5 - min(5, len(notes)))

    return Answer(text=text, notes=notes)


def _title(topology: Topology) -> list[str]:
    """Return what a machine has: GPUs, servers, NICs and links; two lines if one is too short."""
    kinds = Counter(kind for _, kind in dict.fromkeys((nic_name(d.name), d.kind) for d in topology.devices))
    models = {topology.device(gpu).model for gpu in topology.gpus}
    model = f" {models.pop()}" if len(models) == 1 and "" not in models else ""
    parts = [counted(len(topology.gpus), f"{model.strip()} GPU".strip())]
    if len(topology.servers) > 1:
        parts.append(f"{len(topology.servers)} servers")
    parts += [
        counted(kinds[kind], noun) for kind, noun in (("nic", "NIC"), ("nvswitch", "NVSwitch")) if kinds[kind]
    ]
    text = ", ".join(parts)
    links = _link_words(link_summary(topology))
    line = f"{topology.name}: {text}; {links}"
    return [line] if len(line) <= MAX_COLUMNS else [f"{topology.name}: {text}", *labelled(("links", links))]


def _link_words(summary: str) -> str:
    """Return a summary of links as words.

    >>> _link_words("72 c2c of 225 GB/s, 1296 nvlink of 50 GB/s")
    '72 C2C links of 225 GB/s, 1296 NVLinks of 50 GB/s'
    """
    for channel, words in (("nvlink", "NVLinks"), ("c2c", "C2C links"), ("network", "network links")):
        summary = summary.replace(f" {channel} of ", f" {words} of ")
    return summary


def _summary(topology: Topology, room: int) -> Iterator[str]:
    """Yield a machine in so many lines: servers, who reaches whom, and equal devices in one row."""
    if len(topology.servers) > 1:
        groups = equivalent_servers(topology)
        yield _server_line(groups)
        room -= 1
        if len(groups) < len(topology.servers):
            topology = representative_servers(topology)
    yield from _devices(topology, room)


def _server_line(groups: Sequence[Sequence[str]]) -> str:
    """Return the line of the servers that are shown, each with the number for which it stands."""
    texts, left = folded([_group_text(group) for group in groups], 3)
    return "".join(labelled(("servers", ", ".join(texts) + (f" and {left} more kinds" if left else ""))))


def _devices(topology: Topology, room: int) -> Iterator[str]:
    """Yield who reaches whom, equal devices in one row, links with limits, and the source."""
    rows = _device_rows(topology)
    matrix = _reach_lines(topology, room - 6)
    shown, left = folded(rows, max(4, room - len(matrix) - 5))
    yield ""
    yield from matrix
    if shown:
        yield ""
        columns = list(zip(("devices", "PCIe GB/s", "NVLink", "what"), *shown, strict=True))
        header, *body = zip(*(column for column in columns if any(column[1:])), strict=True)
        yield table(header, body)
        yield from folded_line(left, "row")
    differs: dict[str, list[str]] = {}
    for link in topology.links:
        both = link.shared is not None
        if link.limits and (
            not both or f"{link.dst}-{link.src}" not in differs.get(f"{link.limits} (GB/s)", ())
        ):
            name = f"{link.src}-{link.dst}" if both else f"{link.src}>{link.dst}"
            differs.setdefault(f"{link.limits} (GB/s)", []).append(name)
    yield from labelled(
        *(
            ("limits" if topology.half_duplex else "access", f"{rates}: {few(names)}")
            for rates, names in differs.items()
        )
    )
    if topology.source:
        source = printable(topology.source)
        yield from labelled(("source", source if len(source) <= 105 else f"{source[:104]}…"))
    yield ALL_OPTION.replace("print ", "prints ").replace("  ", " ")


def _reach_lines(topology: Topology, room: int) -> list[str]:
    """Return how GPUs reach each other: one line if all pairs are equal, else the matrix, else a count of the codes."""
    names, cells = relation_matrix(topology, ["gpu"])
    if len(names) < 2:
        return ["a single GPU" if names else "no GPU"]
    codes = Counter(cells[i][j] for i, j in combinations(range(len(names)), 2))
    if len(codes) == 1:
        (code,) = codes
        return [f"any two of the {len(names)} GPUs: {_code_words(code)}"]
    if len(names) < room and _block_width(names, list(zip(*cells, strict=True)), gap=1) <= MAX_COLUMNS:
        header, *rows = zip(
            ("", *names), *((n, *row) for n, row in zip(names, cells, strict=True)), strict=True
        )
        lines = table(header, rows, gap=1).splitlines()
        return lines if len(lines) <= room else lines[:room]
    head = f"{counted(sum(codes.values()), 'pair')} of {len(names)} GPUs"
    pairs: dict[str, list[str]] = {}
    for i, j in combinations(range(len(names)), 2):
        pairs.setdefault(cells[i][j], []).append(f"{names[i]}-{names[j]}")
    rows = sorted(pairs.items(), key=lambda one: (not one[0].startswith("NV"), -len(one[1])))[:8]
    return [
        head,
        *table(("", "", ""), [(f"{len(p)}", _code_words(c), few(p)) for c, p in rows]).splitlines()[1:],
    ]


_MEANING = {
    "PIX": "PIX (through one PCIe switch)",
    "PXB": "PXB (through several PCIe switches)",
    "PHB": "PHB (through a CPU)",
    "NODE": "NODE (through a CPU, by two host bridges)",
    "SYS": "SYS (between NUMA nodes)",
    "NET": "NET (over a network)",
}


def _code_words(code: str) -> str:
    """Return a code of the matrix with its meaning.

    >>> _code_words("NV18"), _code_words("PIX"), _code_words("-")
    ('NV18 (18 NVLinks)', 'PIX (through one PCIe switch)', 'no path')
    """
    if code.startswith("NV"):
        return f"{code} ({counted(int(code[2:] or 0), 'NVLink')})"
    return _MEANING.get(code, "no path")


_KIND_WORDS = {"pcie": "PCIe switch", "switch": "network switch", "helper": "helper rank"}


def _device_rows(topology: Topology) -> list[tuple[str, str, str, str]]:
    """Return a row for each sort of device: names, speed of the PCIe link above, NVLinks, and what it is."""
    links = links_by_device(topology)
    homes = {device.numa for device in topology.devices if device.kind == "cpu"} | {None}
    above = {name: up for _, (name, bridge), up in tree_lines(topology) if not bridge}
    order = {"gpu": 0, "nvswitch": 1, "nic": 2, "pcie": 3, "cpu": 4}
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for device in topology.devices:
        speed = uplink_speed(links, device.name, above.get(device.name, ""))
        what = model_and_facts(device, homes) or _KIND_WORDS.get(device.kind, "")
        key = (device.kind, speed, nvlink_words(topology, links[device.name]), what)
        found.setdefault(key, []).append(device.name)
    ordered = sorted(found.items(), key=lambda one: order.get(one[0][0], 5))
    return [(_few_ranges(names), *key[1:]) for key, names in ordered]


def _few_ranges(names: Sequence[str]) -> str:
    ranges = name_ranges(names)
    return ", ".join(ranges) if len(ranges) <= 3 else f"{', '.join(ranges[:2])} … ({len(names)})"


def link_summary(topology: Topology) -> str:
    """Return how many links have which bandwidth, one direction counted; of servers with cables, the cables alone.

    >>> import topoplan
    >>> link_summary(topoplan.load("dgx-1v"))
    '24 nvlink of 25 GB/s'
    """
    kinds: Counter[tuple[str, Fraction]] = Counter()
    seen = set()
    cabled = frozenset().union(*cables(topology).values())
    for link in topology.links:
        if cabled and link.channel == "network" and (link.src, link.dst) not in cabled:
            continue
        src, dst = nic_name(link.src), nic_name(link.dst)
        if link.channel in ("nvlink", "c2c", "network") and (dst, src, link.channel) not in seen:
            seen.add((src, dst, link.channel))
            kinds[link.channel, exact(link.bandwidth) / link.count] += link.count
    parts = [
        f"{number} {channel} of {float(rate):g} GB/s" for (channel, rate), number in sorted(kinds.items())
    ]
    return ", ".join(parts) or ("PCIe only" if topology.links else "no links")


def _parts(topology: Topology) -> Iterator[str]:
    """Yield all of a machine."""
    kinds = Counter(kind for _, kind in dict.fromkeys((nic_name(d.name), d.kind) for d in topology.devices))
    yield "devices: " + (", ".join(f"{number} {kind}" for kind, number in kinds.items()) or "none")
    if len(topology.servers) > 1:
        groups = equivalent_servers(topology)
        yield "servers: " + ", ".join(_group_text(group) for group in groups)
        if len(groups) < len(topology.servers):
            topology = representative_servers(topology)
    plugged = {end for link in topology.links if link.channel != "network" for end in (link.src, link.dst)}
    on_pcie = any(device.kind == "nic" and device.name in plugged for device in topology.devices)
    alone = not any(link.channel == "network" for link in topology.links)
    # The matrix would show only NET for NICs wired to GPUs; the links below state them.
    parts = [
        matrix_text(topology, ("gpu", "nic") if on_pcie or alone else ("gpu",)),
        device_tree_text(topology),
        _link_text(topology),
    ]
    for part in parts:
        if part:
            yield f"\n{part}"
    if topology.source:
        yield f"\nsource: {printable(topology.source)}"


def _group_text(group: Sequence[str]) -> str:
    """Return a class of equivalent servers, such as ``s0 (shown for 16 equivalent servers, up to s15)``."""
    if len(group) == 1:
        return group[0]
    return f"{group[0]} (shown for {len(group)} equivalent servers, up to {group[-1]})"


def _link_text(topology: Topology) -> str:
    """Return a table of the links that the tree does not state.

    One row stands for both directions of a wire if they are equal, one for each if they differ.
    """
    in_tree = links_in_tree(topology)
    links = {
        ends: link for link in topology.links if (ends := (link.src, link.dst, link.channel)) not in in_tree
    }
    rows: list[tuple[str, ...]] = []
    shown = set()
    for key, link in links.items():
        back = links.get((link.dst, link.src, link.channel))
        same = back is not None and back == replace(link, src=link.dst, dst=link.src, latency=back.latency)
        if same and (link.dst, link.src, link.channel) in shown:
            continue
        shown.add(key)
        arrow = "<->" if same else "->"
        figures = (str(link.count), f"{link.bandwidth:g}", link.limits)
        rows.append((link.src, arrow, link.dst, link.channel, *figures))
    heads = (
        "from",
        "",
        "to",
        "channel",
        "count",
        "GB/s",
        "limits in GB/s" if topology.half_duplex else "GB/s of each access",
    )
    left = None if any(row[-1] for row in rows) else -1
    return table(heads[:left], [row[:left] for row in rows]) if rows else ""


_CODES = (
    "NV#: NVLinks between the two, or into the switch they share.  PIX: one PCIe switch.  PXB: several.",
    "PHB: through a CPU.  NODE: likewise, by two host bridges.  SYS: between NUMA nodes.  NET: over a network.  "
    "-: no path.",
)


def matrix_text(topology: Topology, kinds: Sequence[str]) -> str:
    """Return the matrix of the devices of some kinds, affinity of GPUs if known, and the legend of codes and NICs.

    Empty without such devices.

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
    blocks = [_block_text(names, part) for part in _column_blocks(names, columns)]
    legend = ["Legend:", *(f"  {line}" for line in _CODES)]
    nics = _nic_lines(topology, names)
    if nics:
        legend += ["NIC legend:", *(f"  {line}" for line in nics)]
    return "\n\n".join([*blocks, "\n".join(legend)])


def _column_blocks(names: Sequence[str], columns: Sequence[Sequence[str]]) -> list[list[Sequence[str]]]:
    parts: list[list[Sequence[str]]] = [[]]
    for column in columns:
        if parts[-1] and _block_width(names, [*parts[-1], column], gap=1) > MAX_COLUMNS:
            parts.append([])
        parts[-1].append(column)
    return parts


def _block_width(names: Sequence[str], columns: Sequence[Sequence[str]], *, gap: int) -> int:
    return max(map(len, names)) + sum(gap + max(map(len, column)) for column in columns)


def _block_text(names: Sequence[str], columns: Sequence[Sequence[str]]) -> str:
    gap = 2 if _block_width(names, columns, gap=2) <= MAX_COLUMNS else 1
    header, *rows = zip(("", *names), *columns, strict=True)
    return table(header, rows, gap=gap)


def _nic_lines(topology: Topology, names: Sequence[str]) -> list[str]:
    meaning: dict[str, list[str]] = {}
    for device in map(topology.device, names):
        text = device.fact("adapter") or device.model
        if device.kind == "nic" and text:
            meaning.setdefault(text, []).append(device.name)
    return [f"{listed(found)}: {printable(text)}" for text, found in meaning.items()]


def add_list_options(parser: OneLineParser) -> None:
    add_json(parser)
    add_csv(parser, "the table")
    parser.examples = ("topoplan list", "topoplan list --csv", "topoplan list --json")


def run_list(options: argparse.Namespace) -> Answer:
    """Name the machines of the library, their GPUs and their links."""
    machines = [load(name) for name in library()]
    shown: tuple[Column[Topology], ...] = (
        Column("name", "name"),
        Column("GPUs", "GPUs", lambda machine: len(machine.gpus)),
        Column("links", "links", link_summary),
    )
    words = (*shown[:2], Column[Topology]("links", value=lambda machine: _link_words(link_summary(machine))))
    every: tuple[Column[Topology], ...] = (
        shown[0],
        Column(None, "gpus", lambda machine: len(machine.gpus)),
        shown[2],
        Column(None, "source"),
        Column(None, "notes", lambda machine: list(machine.notes)),
    )
    return Answer(
        text=lambda: [
            f"{counted(len(machines), 'machine')} of the library; topoplan show NAME prints one",
            table_of(words, machines),
        ],
        value=lambda: {"machines": records_of(every, machines)},
        rows=lambda: records_of(shown, machines),
    )


def add_probe_options(parser: OneLineParser) -> None:
    declare(
        parser,
        """
        -o F.json         write the machine as topology JSON
        --refresh         read the machine again, even if the result of the last 24 hours is kept (one with warnings is
                          kept for 10 minutes)
        --sysfs-root DIR  folder to read in place of /sys, with proc beside it (default: TOPOPLAN_SYSFS_ROOT, else
                          /sys)
        """,
    )
    add_plot(parser, "the machine")
    add_json(parser)
    declare(parser, ALL_OPTION)
    parser.examples = (
        "topoplan probe",
        "topoplan probe --refresh -o machine.json",
        "topoplan probe --plot machine.png",
    )


def run_probe(options: argparse.Namespace) -> Answer:
    """Read this machine through its NVIDIA driver and Linux, show it, and write it as topology JSON."""
    return _shown(probe(sysfs_root=options.sysfs_root, refresh=options.refresh), every=options.all)

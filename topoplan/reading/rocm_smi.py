"""Convert the output of ``rocm-smi --showtopo`` and ``amd-smi topology`` to a Topology.

Both print tables of every GPU against every other: access, weight, hops, link type, and bandwidth of direct links,
plus the NUMA node of each GPU in rocm-smi. With ``--json`` amd-smi prints the same cells, rocm-smi each pair once and
no bandwidths. Infinity Fabric (XGMI) needs care:

- a link type of XGMI, or one hop, says that the path is XGMI alone, not that the two are neighbours;
- the weight is 15 for each XGMI link on the path, so 15 means neighbours; some drivers print 0 everywhere;
- the bandwidth, ``least-most`` in MB/s, is that of a direct link, and 0 or none without one; some drivers print
  N/A or ``0-0`` everywhere.

Bandwidths state how many links join two GPUs, weights only whether any do. The graph of neighbours is then looked up
among known machines: if exactly one has it, and the numbers of its links follow, they are taken (a mesh of all GPUs
belongs to several products and decides nothing). The machine has to be named if neither bandwidths nor weights are
stated. PCIe weights are 40 within a socket and more across; 2 hops pass one CPU, 3 pass two.

Sources: rocm_smi_lib issue 108, rocm-systems issues 5763 and 7372, hwloc issue 775.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, permutations

from topoplan.errors import TopologyError, warning
from topoplan.machine.hardware import PCIE_X16, SOCKET, checked_rate
from topoplan.machine.host_topology import both_ways, cpus_of, host_links, plain_bus_id
from topoplan.machine.routing import has_peer_access, with_refused_pairs, without_peer_access
from topoplan.machine.topology import Device, Link, Topology, facts, format_value
from topoplan.machine.topology_json import decode_json
from topoplan.reading.pcie_tree import CODES, PcieTree, infer_pcie_tree
from topoplan.reading.registry import ASSUMED, ROCM_TITLES
from topoplan.units import listed, several

_SERVER = "s0"

_TITLE = re.compile("|".join(f"(?P<{key}>{pattern})" for key, pattern in ROCM_TITLES.items()))
_OTHER_TITLE = re.compile(r"[A-Z][A-Z -]* TABLE:|Legend:|=+ .* =+|=+")
_GPU = re.compile(r"GPU\d+|[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")
_NODE = re.compile(r"GPU\[(\d{1,6})\]\s*:\s*\(Topology\) Numa Node:\s*(-?\d{1,9})\b")

_CELLS = {
    "access": re.compile(r"ENABLED|DISABLED|N/A|True|False", re.IGNORECASE),
    "weight": re.compile(r"\d{1,9}|N/A"),
    "hops": re.compile(r"\d{1,9}|N/A"),
    "type": re.compile(r"0|SELF|XGMI|PCIE|N/A|UNKNOWN", re.IGNORECASE),
    "bandwidth": re.compile(r"\d{1,12}-\d{1,12}|\d{1,12}|N/A"),
}

XGMI_WEIGHT, PCIE_NEAR = 15, 40
"""Weight of one XGMI link, and of PCIe within a socket."""

WIRE = 50.0
"""GB/s of an Infinity Fabric link of MI200 GPUs; bandwidths are divided by it if all of them are multiples of it."""

MOST_RENUMBERINGS = 10_000
"""Largest number of renumberings of GPUs that are compared; a graph with more is not looked up."""


@dataclass(frozen=True, slots=True)
class RocmTables:
    """The tables of one listing.

    ``gpus`` are the columns of the table of link types: ``GPU0`` or bus ids. ``cells`` hold by table (``weight``,
    ``type``, …) the cell of each pair, row first; a table that is not printed is missing.
    """

    gpus: tuple[str, ...]
    cells: dict[str, dict[tuple[str, str], str]]
    numa: dict[str, int]

    def number(self, table: str, first: str, second: str) -> int | None:
        """Return the number in a cell; None if the cell has none."""
        text = self.cells.get(table, {}).get((first, second), "N/A")
        return int(text) if text.isdigit() else None

    def megabytes(self, first: str, second: str) -> int:
        """Return the MB/s of the direct link between two GPUs, the most that is printed; 0 if none is."""
        text = self.cells.get("bandwidth", {}).get((first, second), "N/A")
        return 0 if text == "N/A" else int(text.split("-")[-1])


def read_tables(text: str) -> RocmTables:
    """Parse and check the tables, printed or as JSON; a TopologyError names table, row and column."""
    if text.lstrip("\ufeff \t\r\n").startswith(("{", "[")):
        return _json_tables(decode_json(text.lstrip("\ufeff \t\r\n"), "the listing"))
    table = ""
    columns: tuple[str, ...] = ()
    cells: dict[str, dict[tuple[str, str], str]] = {}
    heads: dict[str, tuple[str, ...]] = {}
    rows: dict[str, set[str]] = {}
    numa: dict[str, int] = {}
    for line in text.splitlines():
        title = _TITLE.search(line)
        if title or _OTHER_TITLE.fullmatch(line.strip()):
            table, columns = (title.lastgroup or "") if title else "", ()
            if table and table in heads:
                raise TopologyError(f"the table of {_named(table)} occurs twice; give one listing")
            continue
        node = _NODE.match(line.strip())
        if node:
            if len(node[1] + node[2]) > 12:
                raise TopologyError(
                    f"Numa Nodes: {line.strip()[:60]!r} does not belong there; give the listing again"
                )
            numa[f"GPU{node[1]}"] = int(node[2])
        words = line.split()
        if table not in _CELLS or not words:
            continue
        if not columns:
            if all(_GPU.fullmatch(word) for word in words):
                columns = heads[table] = tuple(words)
                name, times = Counter(columns).most_common(1)[0]
                if times > 1:
                    raise TopologyError(f"{_named(table)}: column {name[:40]} occurs twice; give one listing")
                cells[table], rows[table] = {}, set()
            continue
        name, *values = words
        if name not in heads[table]:
            raise TopologyError(f"{_named(table)}: row {name[:40]!r} has no column; give the whole listing")
        _read_row(table, name, values, columns, cells[table])
        rows[table].add(name)
    if "type" not in heads:
        raise TopologyError(
            "the table of link types is missing; give the whole output of rocm-smi --showtopo or amd-smi topology"
        )
    gpus = heads["type"]
    for key, head in heads.items():
        missing = [gpu for gpu in head if gpu not in rows[key]]
        if missing or head != gpus:
            problem = (
                f"no row of {listed(missing)}"
                if missing
                else f"its columns are not those of {_named('type')}"
            )
            raise TopologyError(f"{_named(key)}: {problem}; give the whole listing")
        _check_symmetric(key, cells[key])
    unknown = sorted(set(numa) - set(gpus))
    if unknown:
        raise TopologyError(f"Numa Nodes name {unknown[0]}, which no table has; give one listing")
    return RocmTables(gpus, cells, numa)


_RSMI_PAIR = re.compile(r"\(Topology\) (.{1,40}?) between DRM devices (\d{1,6}) and (\d{1,6})", re.IGNORECASE)
_RSMI_TABLES = {"weight": "weight", "hops": "hops", "link type": "type"}
_AMD_KEYS = {
    "link_status": "access",
    "weight": "weight",
    "num_hops": "hops",
    "link_type": "type",
    "bandwidth": "bandwidth",
}


def _json_tables(value: object) -> RocmTables:
    """Return the tables of ``amd-smi topology --json``, a list, or of ``rocm-smi --showtopo --json``, an object."""
    numa: dict[str, int] = {}
    found: dict[str, dict[tuple[str, str], str]] = {}
    gpus = _rsmi_pairs(value, found, numa) if isinstance(value, dict) else _amd_pairs(value, found)
    if "type" not in found:
        raise TopologyError(
            "the link types are missing; give the whole output of rocm-smi --showtopo --json or amd-smi topology --json"
        )
    for table, cells in found.items():
        for pair in permutations(gpus, 2):
            if pair not in cells:
                raise TopologyError(
                    f"{_named(table)}: row {pair[0]} has no {pair[1]}; give the whole listing"
                )
        for (row, column), cell in cells.items():
            _check_cell(table, row, column, cell)
        _check_symmetric(table, cells)
    return RocmTables(tuple(gpus), found, numa)


def _rsmi_pairs(
    value: dict[str, object], found: dict[str, dict[tuple[str, str], str]], numa: dict[str, int]
) -> list[str]:
    """Collect the pairs of rocm-smi, which prints each once, and the NUMA nodes of its cards; return the GPUs."""
    system = value.get("system")
    if not isinstance(system, dict):
        raise TopologyError(
            "the JSON has no object 'system' with pairs; give all of rocm-smi --showtopo --json"
        )
    numbers: set[int] = set()
    for key, cell in system.items():
        match = _RSMI_PAIR.fullmatch(key)
        if match and (table := _RSMI_TABLES.get(match[1].lower())):
            first, second = int(match[2]), int(match[3])
            numbers |= {first, second}
            for ends in ((first, second), (second, first)):
                found.setdefault(table, {})[f"GPU{ends[0]}", f"GPU{ends[1]}"] = str(cell).upper()
    for key, card in value.items():
        node = card.get("(Topology) Numa Node") if isinstance(card, dict) else None
        if node is not None and re.fullmatch(r"card\d{1,6}", key) and re.fullmatch(r"-?\d{1,9}", str(node)):
            numbers.add(int(key[4:]))
            numa[f"GPU{int(key[4:])}"] = int(str(node))
    return [f"GPU{number}" for number in sorted(numbers)]


def _amd_pairs(value: object, found: dict[str, dict[tuple[str, str], str]]) -> list[str]:
    """Collect the pairs of amd-smi, GPUs by their bus ids; return these."""
    gpus = []
    for place, gpu in enumerate(value if isinstance(value, list) else [None]):
        links = gpu.get("links") if isinstance(gpu, dict) else None
        if not isinstance(links, list):
            raise TopologyError(
                f"GPU {place} must be an object with links, got {format_value(gpu)}; give the output of amd-smi "
                "topology --json of ROCm 6.4 or newer"
            )
        name = _bdf(gpu, f"GPU {place}")
        if name in gpus:
            raise TopologyError(f"{name} is listed twice; give one listing")
        gpus.append(name)
        for link in links:
            peer = _bdf(link, f"a link of {name}")
            for key, table in _AMD_KEYS.items():
                if peer != name and key in link:
                    found.setdefault(table, {})[name, peer] = str(link[key]).upper()
    unknown = {end for cells in found.values() for pair in cells for end in pair} - set(gpus)
    if unknown:
        raise TopologyError(f"a link leads to {min(unknown)}, which the listing lacks; give the whole one")
    return gpus


def _bdf(value: object, what: str) -> str:
    name = value.get("bdf") if isinstance(value, dict) else None
    if not isinstance(name, str) or not _GPU.fullmatch(name):
        raise TopologyError(f"{what} must have a bdf such as 0000:05:00.0, got {format_value(name)}")
    return name


def _named(table: str) -> str:
    return {"type": "link types", "bandwidth": "bandwidths", "weight": "weights"}.get(table, table)


def _read_row(
    table: str, name: str, values: Sequence[str], columns: Sequence[str], cells: dict[tuple[str, str], str]
) -> None:
    if len(values) != len(columns):
        raise TopologyError(
            f"{_named(table)}: row {name} has {len(values)} cells for {len(columns)} columns; give the whole listing"
        )
    if (name, columns[0]) in cells or (name, columns[-1]) in cells:
        raise TopologyError(f"{_named(table)}: row {name} occurs twice; give one listing")
    for column, value in zip(columns, values, strict=True):
        if column == name:
            continue
        _check_cell(table, name, column, value)
        cells[name, column] = value.upper()


def _check_cell(table: str, row: str, column: str, value: str) -> None:
    if not _CELLS[table].fullmatch(value):
        raise TopologyError(
            f"{_named(table)}: row {row}, column {column}: {value[:40]!r} does not belong there; give the listing "
            "as it was printed"
        )


def _check_symmetric(table: str, cells: Mapping[tuple[str, str], str]) -> None:
    for (row, column), value in cells.items():
        if cells[column, row] != value:
            raise TopologyError(
                f"{_named(table)}: row {row}, column {column}: {value!r}, but row {column}, column {row}: "
                f"{cells[column, row]!r}; the table must be symmetric"
            )


def parse_rocm_smi(
    text: str,
    *,
    nvlink_gbps: float | None = None,
    pcie_gbps: float | None = None,
    socket_gbps: float | None = None,
    xgmi_optional: bool = False,
    known: Callable[[], Iterable[Topology]] = tuple,
) -> Topology:
    """Parse the output of ``rocm-smi --showtopo`` or ``amd-smi topology``.

    GPU *n* of the tables becomes ``gpu<n>``; links of Infinity Fabric are of the channel ``nvlink``. The rates are in
    GB/s per direction of one Infinity Fabric link, of one PCIe link and between CPUs, if not printed.
    ``xgmi_optional`` leaves out links of Infinity Fabric if the listing does not state which GPUs they
    join, since they come from another description. ``known`` gives machines to look up listings of weights alone.
    """
    nvlink_given = checked_rate("nvlink_gbps", nvlink_gbps)
    pcie = checked_rate("pcie_gbps", pcie_gbps) or PCIE_X16[4]
    socket = checked_rate("socket_gbps", socket_gbps) or SOCKET["Zen 1 to 2"]
    tables = read_tables(text)
    names = {gpu: f"gpu{i}" for i, gpu in enumerate(tables.gpus)}
    wires, notes = _xgmi(tables, names, nvlink_given, xgmi_optional=xgmi_optional, known=known)
    tree = infer_pcie_tree(
        list(names.values()),
        _distances(tables, names),
        affinity={names[gpu]: str(node) for gpu, node in tables.numa.items() if node >= 0},
    )
    notes += tree.notes
    if pcie_gbps is None:
        notes.append(ASSUMED["pcie"].format(pcie))
    if socket_gbps is None and len(cpus_of(tree.parents)) > 1:
        notes.append(ASSUMED["socket"].format(socket))
    barred = _pairs_without_access(tables)
    devices = _devices(tables, names, tree, barred)
    if barred and any(has_peer_access(device) for device in devices if device.kind == "gpu"):
        pairs = listed((f"{names[a]}-{names[b]}" for a, b in barred), noun="pairs")
        notes.append(warning(f"access is disabled between {pairs}; copies there go through a CPU's memory"))
    machine = Topology(
        name="rocm-smi",
        devices=devices,
        links=(*wires, *host_links(tree.parents, pcie=pcie, socket=socket)),
        notes=tuple(notes),
        source="rocm-smi or amd-smi; what it does not state is in the notes",
    )
    alone = {device.name for device in devices if not has_peer_access(device)}
    some = ((names[a], names[b]) for a, b in barred)
    machine = with_refused_pairs(machine, (pair for pair in some if alone.isdisjoint(pair)))
    return without_peer_access(machine)


def _xgmi(
    tables: RocmTables,
    names: Mapping[str, str],
    given: float | None,
    *,
    xgmi_optional: bool,
    known: Callable[[], Iterable[Topology]],
) -> tuple[list[Link], list[str]]:
    """Return the links of Infinity Fabric, and notes on the assumptions."""
    pairs = [pair for pair in combinations(tables.gpus, 2) if tables.cells["type"][pair] == "XGMI"]
    if not pairs:
        return [], []
    widths = {pair: tables.megabytes(*pair) / 1000 for pair in pairs}
    if any(widths.values()):
        present = {pair: width for pair, width in widths.items() if width}
        wire = given or (
            WIRE if all(_multiple(width, WIRE) for width in present.values()) else min(present.values())
        )
        counts = {pair: max(1, round(width / wire)) for pair, width in present.items()}
        links = [
            link
            for (first, second), count in counts.items()
            for link in both_ways(names[first], names[second], "nvlink", present[first, second], count=count)
        ]
        return links, ["Infinity Fabric from the bandwidths printed; nvlink names its channel"]
    weights = {pair: tables.number("weight", *pair) for pair in pairs}
    if not all(weight and weight % XGMI_WEIGHT == 0 for weight in weights.values()):
        if xgmi_optional:
            return [], []
        raise TopologyError(
            "the listing does not state which GPUs Infinity Fabric joins: the bandwidths are missing or 0, and the "
            f"weights are not multiples of {XGMI_WEIGHT}; add --merge with the machine, such as --merge mi250x, mi250 "
            "or mi300x"
        )
    joined = [pair for pair, weight in weights.items() if weight == XGMI_WEIGHT]
    found = _known_links([(names[a], names[b]) for a, b in joined], len(tables.gpus), known)
    if found is not None:
        machine, ties = found
        taken = [
            (a, b, several(count, given) if given else bandwidth, count)
            for (a, b), (bandwidth, count) in ties.items()
        ]
        own = "" if given else "; set --nvlink-bandwidth"
        return (
            [link for a, b, rate, count in taken for link in both_ways(a, b, "nvlink", rate, count=count)],
            [
                f"Infinity Fabric from the weights: neighbours are those of {machine}, whose links are taken{own}"
            ],
        )
    wire = given or WIRE
    notes = [
        "Infinity Fabric from the weights: they state neighbours, not how many links join them; one assumed",
        f"an Infinity Fabric link assumed {wire:g} GB/s per direction; set --nvlink-bandwidth, or --merge "
        "mi250x or mi300x",
    ]
    return [link for a, b in joined for link in both_ways(names[a], names[b], "nvlink", wire)], notes


def _known_links(
    joined: Sequence[tuple[str, str]], gpus: int, known: Callable[[], Iterable[Topology]]
) -> tuple[str, dict[tuple[str, str], tuple[float, int]]] | None:
    """Return the only known machine with these neighbours, and GB/s and number of each pair's links; else None.

    GPUs may be numbered otherwise, as long as every renumbering gives the same links.
    """
    if not joined or len(joined) == gpus * (gpus - 1) // 2:
        return None
    found: list[tuple[str, dict[tuple[str, str], tuple[float, int]]]] = []
    for machine in known():
        ties = {
            frozenset((link.src, link.dst)): (link.bandwidth, link.count)
            for link in machine.links
            if link.channel == "nvlink"
        }
        if len(machine.gpus) != gpus or len(ties) != len(joined):
            continue
        if all(frozenset(pair) in ties for pair in joined):
            found.append((machine.name, {pair: ties[frozenset(pair)] for pair in joined}))
            continue
        import networkx as nx

        ways = nx.isomorphism.GraphMatcher(nx.Graph(list(joined)), nx.Graph([tuple(pair) for pair in ties]))
        made = [
            {(a, b): ties[frozenset((way[a], way[b]))] for a, b in joined}
            for way in islice(ways.isomorphisms_iter(), MOST_RENUMBERINGS)
        ]
        if made and all(one == made[0] for one in made) and len(made) < MOST_RENUMBERINGS:
            found.append((f"{machine.name}, numbered otherwise", made[0]))
    return found[0] if len(found) == 1 else None


def _multiple(width: float, wire: float) -> bool:
    return round(width / wire) >= 1 and abs(width / wire - round(width / wire)) < 0.02


def _distances(tables: RocmTables, names: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """Return the PCIe distances of GPUs that hops, weights or NUMA nodes state."""
    found = {}
    for first, second in combinations(tables.gpus, 2):
        code = ""
        if tables.cells["type"][first, second] == "PCIE":
            hops = tables.number("hops", first, second) or 0
            weight = tables.number("weight", first, second) or 0
            if hops:
                code = "SYS" if hops > 2 else "PHB"
            elif weight:
                code = "SYS" if weight > PCIE_NEAR else "PHB"
        elif {first, second} <= set(tables.numa):
            code = "PHB" if tables.numa[first] == tables.numa[second] else "SYS"
        if code:
            found[names[first], names[second]] = CODES.index(code)
    return found


def _pairs_without_access(tables: RocmTables) -> list[tuple[str, str]]:
    refused = ("DISABLED", "FALSE")
    access = tables.cells.get("access", {})
    return [pair for pair in combinations(tables.gpus, 2) if access.get(pair) in refused]


def _devices(
    tables: RocmTables, names: Mapping[str, str], tree: PcieTree, barred: Sequence[tuple[str, str]]
) -> tuple[Device, ...]:
    gpus = []
    for gpu in tables.gpus:
        others = [other for other in tables.gpus if other != gpu]
        alone = bool(others) and all((gpu, o) in barred or (o, gpu) in barred for o in others)
        node = tables.numa.get(gpu, -1)
        gpus.append(
            Device(
                names[gpu],
                "gpu",
                _SERVER,
                busid="" if gpu.startswith("GPU") else plain_bus_id(gpu),
                numa=node if node >= 0 else None,
                facts=facts(peer_access="none" if alone else None),
            )
        )
    nodes = {tree.root(names[gpu]): node for gpu, node in tables.numa.items() if node >= 0}
    inner = [Device(name, "pcie", _SERVER) for name in tree.parents if name.startswith("pcie")]
    cpus = [Device(name, "cpu", _SERVER, numa=nodes.get(name)) for name in cpus_of(tree.parents)]
    return (*gpus, *inner, *cpus)

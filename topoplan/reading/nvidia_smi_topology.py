"""Convert ``nvidia-smi topo -m`` text to a Topology: NVLinks, PCIe tree, and assumptions.

The text states link counts and distances, no bandwidth. `nvidia_smi_matrix` parses the table, `read_nvlinks`
distinguishes direct links from a switch and infers the GPU generation, `pcie_tree` recovers switches and CPUs;
bandwidths are added here.

A cell NV# counts the links that join a pair, but behind an NVSwitch all pairs of a GPU share the same links. So the
rule: if the NV# of some row add up to more links than any GPU has (18), the machine is switched, and a GPU has as
many links as the largest NV# of its row. Otherwise every cell is a bundle of its own. The matrix does not name GPUs.
If the report around it does, bandwidths are of that generation, and no GPU has more links than it; else the first
generation that fits is taken:

1. direct, every NV# is 1, three or more in some row: P100 (a V100 of a DGX-1 has two such neighbours only);
2. direct, pairs of NV4 and nothing else: the bridge of RTX 30 and A6000 cards;
3. behind a switch, GPUs with more links than an A100 whose memory is a NUMA node (``GPU NUMA ID``): GB200 or GB300,
   since a host of Grace CPUs with Hopper GPUs has no NVSwitch in its listing;
4. the first of V100, A100, H100 whose 6, 12, 18 links suffice for the largest row (switched: the largest
   NV#).

Reports that name GPUs: ``collect_env`` of torch and vLLM and ``nvidia-smi -L`` (``GPU 0: NVIDIA H100 80GB HBM3``),
``check_env`` of sglang (``GPU 0,1,2,3: NVIDIA GB200``), the table of plain ``nvidia-smi``, the product names of
``nvidia-smi -q``, the table of ``nvidia-smi --query-gpu=index,name --format=csv``, and ``GPU type:`` of accelerate. If
none of them does, a model that stands anywhere in the text but in a comment, such as ``2 x H100 NVL``, holds for all
GPUs, as long as no model of another generation stands there too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from topoplan.errors import Note, UsageError, warning
from topoplan.machine.hardware import (
    A100,
    B200,
    GA102,
    H100,
    MOST_LINKS,
    P100,
    UNKNOWN,
    V100,
    GpuGeneration,
    checked_rate,
    compute_capability,
)
from topoplan.machine.host_topology import both_ways, cpus_of, host_links
from topoplan.machine.routing import with_refused_pairs, without_peer_access
from topoplan.machine.topology import Device, Link, Topology, facts, without_bare_switches
from topoplan.reading.nvidia_smi_matrix import ConnectionMatrix, read_access, read_matrix
from topoplan.reading.pcie_tree import CODES, PcieTree, infer_pcie_tree
from topoplan.reading.registry import ASSUMED
from topoplan.units import counted, listed, several

_LONGEST_LINE = 300
"""Characters of the longest line that may hold a name."""

_LISTED = re.compile(
    r"(?:[^:]{0,60}:)?\s*GPU (\d{1,3}(?:,\s?\d{1,3})*)\s*:\s*([A-Za-z][^:]*?)\s*(?:\(UUID:.*)?", re.IGNORECASE
)
_INSTANCE = re.compile(r"\s+MIG \S+\s+Device\s+\d+\s*:\s*\(UUID:\s*(MIG-[^)\s]+)\)")
_ROW = re.compile(
    r"\|\s*(\d{1,3})\s+([A-Za-z]\S*(?: \S+)*)\s+(?:(?:On|Off|N/A|WDDM|TCC|MCDM)\s*)?"
    r"\|\s*(?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d.*"
)
_PRODUCT_NAME = re.compile(r"\s*Product Name\s*:\s*(\S.*)")
_CSV_HEAD = re.compile(r"[a-z][a-z0-9_.]*(?: \[[^\],]*\])?(?:, ?[a-z][a-z0-9_.]*(?: \[[^\],]*\])?)*")
_CSV_NAME = re.compile(r"(?:NVIDIA|Tesla|Quadro|GeForce|TITAN|GRID)\b.*")
_ONE_TYPE = re.compile(r"\s*(?:-\s*)?GPU type:\s*(\S.*)")
_MODEL = re.compile(
    r"(?<![\w.-])(?:NVIDIA |Tesla |GeForce |HGX |DGX )*"
    r"(?:(?:RTX (?:PRO )?\d{4}|H100|H200|H800|H20|A100|A800|V100|P100|B200|B300|GB10|GB200|GB300|GH200|L40S?|L20)\b)"
    r"(?:[ -](?:NVL|PCIe|PCIE|SXM\d?|HGX|Ti|Ada|\d{2,3}GB|HBM\d\w?)\b)*"
)


def read_gpu_names(text: str) -> tuple[dict[int, str], str]:
    """Return the names of GPUs by number, and a name that holds for all of them.

    Both are empty if the text states none; a GPU that is named twice keeps its first name.
    """
    names: dict[int, str] = {}
    every = ""
    products = 0
    fields: list[str] = []
    for line in text.splitlines():
        if len(line) > _LONGEST_LINE or line.lstrip().startswith("#"):
            continue
        numbers: tuple[str, ...] = ()
        name = ""
        if "GPU" in line and (found := _LISTED.fullmatch(line)):
            numbers, name = tuple(found[1].split(",")), found[2]
        elif "|" in line and (found := _ROW.fullmatch(line.strip())):
            numbers, name = (found[1],), found[2]
        elif found := _PRODUCT_NAME.fullmatch(line):
            numbers, name = (str(products),), found[1]
            products += 1
        elif found := _ONE_TYPE.fullmatch(line):
            every = every or found[1].strip()
        elif "name" in (head := line.strip().split(", ")) and _CSV_HEAD.fullmatch(line.strip()):
            fields, products = head, 0
        elif fields:
            row = dict(zip(fields, line.strip().split(", "), strict=False))
            number = row.get("index", str(products))
            if len(row) == len(fields) and number.isdecimal() and _CSV_NAME.fullmatch(row["name"]):
                numbers, name = (number,), row["name"]
                products += 1
            else:
                fields = []
        for number in numbers:
            names.setdefault(int(number), name.strip())
    return names, every or ("" if names else _only_model(text))


def read_mig(text: str) -> dict[str, str]:
    """Return the MIG instances that ``nvidia-smi -L`` lists, joined by commas, by column such as ``GPU0``."""
    found: dict[str, list[str]] = {}
    gpu = ""
    for line in text.splitlines():
        if len(line) > _LONGEST_LINE:
            continue
        if listed_gpu := _LISTED.fullmatch(line):
            gpu = f"GPU{listed_gpu[1]}"
        elif gpu and (instance := _INSTANCE.fullmatch(line.rstrip())):
            found.setdefault(gpu, []).append(instance[1])
    return {gpu: ",".join(instances) for gpu, instances in found.items()}


def _only_model(text: str) -> str:
    """Return the model that stands in free text; nothing if there is none, or models of several generations."""
    found = [
        model[0]
        for line in text.splitlines()
        if len(line) <= _LONGEST_LINE and not line.lstrip().startswith("#")
        for model in _MODEL.finditer(line)
    ]
    kinds = {compute_capability(model) for model in found}
    return max(found, key=len) if len(kinds) == 1 and None not in kinds else ""


@dataclass(frozen=True, slots=True)
class NamedGpus:
    """Models of the GPUs of a matrix, as a report states them.

    ``models`` is by column; it is empty if the report names none, or does not say which column a name belongs to.
    ``generation`` is None if it is not known; of several it is the one with the slowest PCIe link.
    """

    models: Mapping[str, str]
    generation: GpuGeneration | None = None
    notes: tuple[str, ...] = ()

    def words(self) -> str:
        return listed(dict.fromkeys(self.models.values()), noun="names")


def name_gpus(text: str, gpus: Sequence[str], links: Mapping[str, int]) -> NamedGpus:
    """Match the names in a report to the columns of its matrix, such as ``GPU0``.

    ``links`` holds the least number of NVLinks of each GPU by the matrix: a model with fewer is another machine's.
    """
    names, every = read_gpu_names(text)
    kinds = set(names.values()) or ({every} if every else set())
    if not kinds:
        return NamedGpus({})
    from topoplan.reading.nvlink_status import generation

    if len(kinds) == 1:
        models = dict.fromkeys(gpus, next(iter(kinds)))
    elif all(int(gpu[3:]) in names for gpu in gpus):
        models = {gpu: names[int(gpu[3:])] for gpu in gpus}
    else:
        missing = listed(gpu for gpu in gpus if int(gpu[3:]) not in names)
        note = f"the text names {len(names)} GPUs, and not {missing}; names are not used"
        return NamedGpus({}, None, (note,))
    made = {gpu: generation(model) for gpu, model in models.items()}
    few = [gpu for gpu, one in made.items() if one is not None and 0 < one.links < links.get(gpu, 0)]
    if few:
        model, most = models[few[0]], links[few[0]]
        note = warning(
            f"the text names {model}, which has fewer NVLinks than the {most} of {few[0].lower()} in the matrix; the "
            "name is not used"
        )
        return NamedGpus({}, None, (note,))
    known = [one for one in made.values() if one is not None]
    linked = [made[gpu] for gpu in made if links.get(gpu)] or list(made.values())
    if len(known) < len(linked) or None in linked:
        return NamedGpus(models)
    slowest = min(known, key=lambda one: (one.pcie, one.nvlink))
    wires = min(filter(None, linked), key=lambda one: one.nvlink)
    return NamedGpus(models, replace(wires, pcie=slowest.pcie, socket=slowest.socket))


_SERVER = "s0"


def parse_nvidia_smi(
    text: str,
    *,
    nvlink_gbps: float | None = None,
    pcie_gbps: float | None = None,
    socket_gbps: float | None = None,
) -> Topology:
    """Parse the matrix that ``nvidia-smi topo -m`` prints; lines that begin with # are skipped.

    GPU *n* becomes ``gpu<n>``, the *k*-th NIC column ``nic<k>``. An NVSwitch machine gets one ``nvswitch0`` for all
    switch chips, since hardware stripes every transfer over them. Adapters of NICs, host bridges (if PHB and NODE
    distinguish them), CPU and NUMA affinity become facts. Bandwidths are in GB/s per direction of one NVLink, of one
    PCIe link and between CPUs; they replace the assumed ones, which the ``notes`` list. A TopologyError names row,
    column and value.
    """
    nvlink_given = checked_rate("nvlink_gbps", nvlink_gbps)
    pcie_given = checked_rate("pcie_gbps", pcie_gbps)
    socket_given = checked_rate("socket_gbps", socket_gbps)
    matrix = read_matrix(text)
    matrix = replace(matrix, gpus=tuple(sorted(matrix.gpus, key=lambda gpu: int(gpu[3:]))))
    rows = {gpu: max((matrix.nvlinks(gpu, other) for other in matrix.gpus), default=0) for gpu in matrix.gpus}
    named = name_gpus(text, matrix.gpus, rows)
    nvlinks = read_nvlinks(matrix, named.generation)
    names = {name: name.lower() for name in matrix.gpus} | {
        name: f"nic{i}" for i, name in enumerate(matrix.nics)
    }
    tree = infer_pcie_tree(
        list(names.values()),
        {
            (names[first], names[second]): CODES.index(code)
            for first, second in combinations(names, 2)
            if (code := matrix.codes.get((first, second))) in CODES
        },
        affinity={names[gpu]: cpus for gpu, cpus in matrix.affinity.items()},
    )
    generation = nvlinks.generation
    nvlink = nvlink_given or generation.nvlink
    pcie = pcie_given or generation.pcie
    socket = socket_given or generation.socket
    notes: list[str] = [*matrix.notes, *named.notes, *nvlinks.notes, *tree.notes]

    if [int(gpu[3:]) for gpu in matrix.gpus] != list(range(len(matrix.gpus))):
        numbers = ", ".join(f"{number} is {gpu}" for number, gpu in enumerate(matrix.gpus))
        notes.insert(0, f"the matrix leaves GPUs out; --gpus and answers number these from 0: {numbers}")

    def assume(channel: str, text: str) -> None:
        notes.append(Note(text, "assumed", (channel,)))

    if matrix.cut:
        notes.insert(
            0,
            Note(
                f"{listed(matrix.cut).lower()}: no row; filled by symmetry, no NVLink where none is stated",
                "filled in",
                tuple(name.lower() for name in matrix.cut),
            ),
        )
    if nvlink_given is None and named.generation is not None and nvlinks.any:
        notes.append(
            f"the text names {named.words()}: NVLink {nvlink:g} GB/s per link and direction; set --nvlink-bandwidth"
        )
    elif nvlink_given is None and generation is not UNKNOWN and nvlinks.any:
        other = "; a B200 has 50" if generation is H100 else ""
        unknown = f"{named.words()} is not known" if named.models else "GPU not printed"
        assume(
            "nvlink",
            f"{unknown}, assumed {generation.name}: NVLink {nvlink:g} GB/s per link and direction"
            f"{other}; set --nvlink-bandwidth",
        )
    if pcie_given is None:
        assume("pcie", ASSUMED["pcie"].format(pcie))
    if socket_given is None and len(cpus_of(tree.parents)) > 1:
        assume("socket", ASSUMED["socket"].format(socket))
    mig = {gpu: instances for gpu, instances in read_mig(text).items() if gpu in names}
    machine = Topology(
        name="nvidia-smi",
        devices=_devices(matrix, nvlinks, tree, names, named, mig),
        links=(
            *_nvlink_links(nvlinks, names, nvlink),
            *host_links(tree.parents, pcie=pcie, socket=socket),
        ),
        notes=tuple(notes),
        source="nvidia-smi topo -m; it states no bandwidths, the notes say which were assumed",
    )
    if mig:
        machine = without_peer_access(machine)
    return _with_access(machine, matrix.access, names)


def apply_access_table(machine: Topology, text: str) -> Topology:
    """Return a machine with the peer access that ``nvidia-smi topo -p2p`` prints; GPUs are matched by number.

    TopologyError for a malformed table, UsageError for one of another machine.
    """
    gpus, access = read_access(text)
    if len(machine.servers) > 1 or len(gpus) != len(machine.gpus):
        raise UsageError(
            f"topo -p2p is of {counted(len(gpus), 'GPU')}, and {machine.name} has "
            f"{counted(len(machine.gpus), 'GPU')} on {counted(max(1, len(machine.servers)), 'server')}; give both of "
            "one machine"
        )
    return _with_access(machine, access, dict(zip(gpus, machine.gpus, strict=True)))


def _with_access(
    machine: Topology, access: Mapping[tuple[str, str], str], names: Mapping[str, str]
) -> Topology:
    refused = {
        (names[first], names[second]): code
        for first, second in combinations(names, 2)
        if {code := access.get((first, second), "U"), access.get((second, first), "U")} <= set(_REFUSED)
    }
    return with_refused_access(machine, refused) if refused else machine


_REFUSED = {
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "NS": "not supported",
    "DR": "disabled by regkey",
}
"""Reasons of ``nvidia-smi topo -p2p`` for a pair without peer access."""


def with_refused_access(machine: Topology, refused: Mapping[tuple[str, str], str]) -> Topology:
    """Apply the pairs of GPUs without peer access that ``nvidia-smi topo -p2p`` prints, each once with its code.

    NVLinks between two such GPUs are left out, and a GPU without access to any other has no link to an NVSwitch. PCIe
    is staged if no GPU has access; if only some pairs have none, their GPUs and a note name them.
    """
    gone: set[tuple[str, str]] = set()
    notes: list[str] = []
    wires = {(link.src, link.dst): link for link in machine.links if link.channel == "nvlink"}
    switches = {device.name for device in machine.devices if device.kind == "nvswitch"}
    switched = {src for src, dst in wires if dst in switches}
    over_pcie: dict[str, list[str]] = {}
    peers: dict[str, set[str]] = {}
    for (first, second), code in refused.items():
        peers.setdefault(first, set()).add(second)
        peers.setdefault(second, set()).add(first)
        if (first, second) in wires:
            gone |= {(first, second), (second, first)}
            count = counted(wires[first, second].count, "NVLink")
            notes.append(
                warning(
                    f"{first}-{second}: access over NVLink is refused ({_REFUSED[code]}), {count} "
                    f"{'is' if count.startswith('1 ') else 'are'} left out"
                )
            )
        elif not {first, second} <= switched:
            over_pcie.setdefault(_REFUSED[code], []).append(f"{first}-{second}")
    barred = {gpu for gpu, others in peers.items() if len(others) == len(machine.gpus) - 1}
    for gpu in [name for name in machine.gpus if name in switched & peers.keys()]:
        denied = peers[gpu] & switched
        if len(denied) == len(switched) - 1:
            gone |= {ends for ends in wires if gpu in ends}
            notes.append(
                warning(
                    f"{gpu}: access over NVLink is refused to every GPU at the switch; its NVLinks are left out (is "
                    "the fabric manager running?)"
                )
            )
        elif denied:
            names = listed(name for name in machine.gpus if name in denied)
            notes.append(
                warning(
                    f"{gpu}: access over NVLink is refused to {names}; copies there go through a CPU's memory"
                )
            )
    if len(barred) < len(machine.gpus):
        notes += [
            f"access over PCIe is refused ({reason}) between {listed(pairs, noun='pairs')}; copies there go through "
            "the host's memory"
            for reason, pairs in over_pcie.items()
        ]
    elif not wires and set(refused.values()) == {"NS"}:
        notes.append(warning("NS in a listing of topo -p2p n concerns NVLink alone; give topo -p2p r"))
    links = tuple(
        link for link in machine.links if link.channel != "nvlink" or (link.src, link.dst) not in gone
    )
    devices = tuple(
        replace(device, facts=facts(**{**dict(device.facts), "peer_access": "none"}))
        if device.name in barred
        else device
        for device in machine.devices
    )
    left = replace(machine, devices=devices, links=links, notes=(*notes, *machine.notes))
    left = with_refused_pairs(left, (pair for pair in refused if barred.isdisjoint(pair)))
    return without_peer_access(without_bare_switches(left))


def _devices(
    matrix: ConnectionMatrix,
    nvlinks: MatrixNvlinks,
    tree: PcieTree,
    names: dict[str, str],
    named: NamedGpus,
    mig: Mapping[str, str],
) -> tuple[Device, ...]:
    affinity = {names[gpu]: cpus for gpu, cpus in matrix.affinity.items()}
    nodes = {names[gpu]: numa for gpu, numa in matrix.numa.items() if re.fullmatch(r"\d{1,4}", numa)}
    several = {names[gpu]: numa for gpu, numa in matrix.numa.items() if names[gpu] not in nodes}
    affinity_of, node_of = _of_cpus(tree, affinity), _of_cpus(tree, nodes)
    gpus = []
    for gpu in matrix.gpus:
        name, model = names[gpu], named.models.get(gpu, "")
        known = {"host_bridge": tree.bridges.get(name), "numa_nodes": several.get(name)}
        known["memory_node"] = matrix.memory_nodes.get(gpu)
        known["mig"] = mig.get(gpu)
        if tree.root(name) not in affinity_of:
            known["cpus"] = affinity.get(name)
        numa = _number(nodes.get(name))
        gpus.append(Device(name, "gpu", _SERVER, model=model, numa=numa, facts=facts(**known)))
    switch = [Device("nvswitch0", "nvswitch", _SERVER)] if nvlinks.switched else []
    inner = [Device(name, "pcie", _SERVER) for name in tree.parents if name.startswith("pcie")]
    cpus = [
        Device(name, "cpu", _SERVER, numa=_number(node_of.get(name)), facts=facts(cpus=affinity_of.get(name)))
        for name in cpus_of(tree.parents)
    ]
    return (*gpus, *switch, *inner, *cpus, *(_nic(nic, matrix, tree, names) for nic in matrix.nics))


def _nic(nic: str, matrix: ConnectionMatrix, tree: PcieTree, names: dict[str, str]) -> Device:
    """Return a NIC; newer drivers name adapters in a legend of NIC0, NIC1, ..., older ones in the column heads."""
    adapter = matrix.hardware.get(nic, "" if re.fullmatch(r"NIC\d+", nic) else nic)
    known = facts(adapter=adapter, host_bridge=tree.bridges.get(names[nic]))
    return Device(names[nic], "nic", _SERVER, facts=known)


def _of_cpus(tree: PcieTree, stated: Mapping[str, str]) -> dict[str, str]:
    """Return the affinity of each CPU whose GPUs agree on one, unless GPUs of another CPU state it too.

    A job that is bound to a few cores prints the same for every GPU, which says nothing about any CPU.
    """
    found: dict[str, set[str]] = {}
    for gpu, text in stated.items():
        found.setdefault(tree.root(gpu), set()).add(text)
    homes = Counter(text for texts in found.values() for text in texts)
    return {cpu: text for cpu, texts in found.items() for text in texts if len(texts) == homes[text] == 1}


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def _nvlink_links(nvlinks: MatrixNvlinks, names: dict[str, str], per_link: float) -> tuple[Link, ...]:
    wires = [(names[first], names[second], count) for (first, second), count in nvlinks.direct.items()]
    wires += [(names[gpu], "nvswitch0", count) for gpu, count in nvlinks.to_switch.items()]
    return tuple(
        link
        for first, second, count in wires
        for link in both_ways(first, second, "nvlink", several(count, per_link), count=count)
    )


@dataclass(frozen=True, slots=True)
class MatrixNvlinks:
    """NVLinks of a machine.

    ``direct`` counts the links of each pair, each pair once, and is empty if an NVSwitch joins the GPUs;
    ``to_switch`` counts the links of each GPU to the switch. ``notes`` list assumptions other than bandwidths.
    """

    switched: bool
    direct: dict[tuple[str, str], int]
    to_switch: dict[str, int]
    generation: GpuGeneration
    notes: tuple[str, ...]

    @property
    def any(self) -> bool:
        return bool(self.direct or self.to_switch)


def read_nvlinks(matrix: ConnectionMatrix, named: GpuGeneration | None = None) -> MatrixNvlinks:
    """Apply the rule above to a matrix; ``named`` is the generation of its GPUs if it is known."""
    rows = {gpu: [matrix.nvlinks(gpu, other) for other in matrix.gpus if other != gpu] for gpu in matrix.gpus}
    counts = sorted({count for row in rows.values() for count in row if count})
    largest_row = max((sum(row) for row in rows.values()), default=0)
    notes = []
    most = named.links if named and named.links else MOST_LINKS
    if largest_row > most:
        to_switch = {gpu: max(row) for gpu, row in rows.items() if any(row)}
        bare = [gpu for gpu in matrix.gpus if gpu not in to_switch]
        notes.append(
            f"NV# of a row add up to {largest_row} links, more than the {most} that a GPU has at most: "
            f"an NVSwitch, with {counts[-1]} links per GPU"
        )
        if bare:
            notes.append(f"{listed(bare).lower()}: no NVLink to the switch")
        grace = all(gpu in matrix.memory_nodes for gpu in to_switch) and counts[-1] > A100.links
        return MatrixNvlinks(
            True, {}, to_switch, named or (B200 if grace else _smallest(counts[-1])), tuple(notes)
        )
    direct = {
        (first, second): count
        for i, first in enumerate(matrix.gpus)
        for second in matrix.gpus[i + 1 :]
        if (count := matrix.nvlinks(first, second))
    }
    most_peers = max(sum(map(bool, row)) for row in rows.values())
    if named is not None:
        return MatrixNvlinks(False, direct, {}, named, ())
    if not counts:
        generation = UNKNOWN
    elif counts == [1] and most_peers >= 3:
        generation = P100
    elif counts == [4] and most_peers == 1:
        generation = GA102
        notes.append("pairs of NV4 read as the bridge of RTX 30 and A6000 cards; an A30 has 25 GB/s per link")
    else:
        generation = _smallest(largest_row)
    if counts == [V100.links] and most_peers in (2, 3):
        notes.append(
            f"NV6 to {most_peers} peers read as direct links; "
            "V100 GPUs of an NVSwitch machine look the same, with 6 links per GPU in all"
        )
    return MatrixNvlinks(False, direct, {}, generation, tuple(notes))


def _smallest(links: int) -> GpuGeneration:
    return next((generation for generation in (V100, A100, H100) if generation.links >= links), H100)

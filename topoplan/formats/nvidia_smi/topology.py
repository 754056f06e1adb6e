"""``nvidia-smi topo -m`` text to a Topology: NVLinks, the PCIe tree behind the codes, and what is assumed.

The text states link counts and distances, no bandwidth. `matrix_text` reads the table, `nvlink_codes` tells
direct links from a switch and guesses the GPU generation, `pcie_tree` recovers switches and CPUs;
bandwidths are added here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from itertools import combinations

from topoplan.formats.nvidia_smi.matrix_text import Matrix, read_matrix
from topoplan.formats.nvidia_smi.nvlink_codes import Nvlinks, read_nvlinks
from topoplan.formats.nvidia_smi.pcie_tree import CODES, HostTree, infer_host_tree
from topoplan.hosts.link_rates import H100, UNKNOWN, checked_rate
from topoplan.hosts.notes import listed
from topoplan.hosts.wires import both_ways, cpus_of, host_links
from topoplan.topology import Device, Link, Topology, facts
from topoplan.units import several

_SERVER = "s0"


def parse_nvidia_smi(
    text: str,
    *,
    nvlink_gbps: float | None = None,
    pcie_gbps: float | None = None,
    socket_gbps: float | None = None,
) -> Topology:
    """Read the matrix that ``nvidia-smi topo -m`` prints.

    GPU *n* becomes ``gpu<n>``, the *k*-th NIC column ``nic<k>``. An NVSwitch machine gets one ``nvswitch0`` for all
    switch chips, since hardware stripes every transfer over them. What the matrix tells beside its links stays as
    facts: adapters of NICs, host bridges where PHB and NODE tell them apart, CPU and NUMA affinity.

    Parameters
    ----------
    text : str
        The output; lines that begin with # are skipped.
    nvlink_gbps, pcie_gbps, socket_gbps : float, optional
        GB/s per direction of one NVLink, of one PCIe link and between CPUs, in place of what is assumed.

    Returns
    -------
    Topology
        Its ``notes`` say what the text does not state and was assumed.

    Raises
    ------
    TopologyError
        The text is no such matrix, or is ragged or asymmetric; the message names row, column and value.
    UsageError
        A bandwidth is not a finite number above zero.

    Examples
    --------
    >>> machine = parse_nvidia_smi("       GPU0  GPU1\\nGPU0   X    NV2\\nGPU1  NV2    X", nvlink_gbps=22)
    >>> [(link.src, link.dst, link.bandwidth) for link in machine.links if link.channel == "nvlink"]
    [('gpu0', 'gpu1', 44.0), ('gpu1', 'gpu0', 44.0)]
    """
    nvlink_given = checked_rate("--nvlink-gbps", nvlink_gbps)
    pcie_given = checked_rate("--pcie-gbps", pcie_gbps)
    socket_given = checked_rate("--socket-gbps", socket_gbps)
    matrix = read_matrix(text)
    nvlinks = read_nvlinks(matrix)
    names = {name: name.lower() for name in matrix.gpus} | {
        name: f"nic{i}" for i, name in enumerate(matrix.nics)
    }
    tree = infer_host_tree(
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
    notes = [*nvlinks.notes, *tree.notes]
    if matrix.cut:
        notes.insert(
            0,
            f"{listed(matrix.cut).lower()}: no row; filled by symmetry, no NVLink where none is stated",
        )
    if nvlink_given is None and generation is not UNKNOWN:
        other = "; a B200 has 50" if generation is H100 else ""
        notes.append(
            f"GPU not printed, assumed {generation.name}: NVLink {nvlink:g} GB/s per link and direction"
            f"{other}; set --nvlink-gbps"
        )
    if pcie_given is None:
        notes.append(f"PCIe assumed {pcie:g} GB/s per link and direction; set --pcie-gbps")
    if socket_given is None and len(cpus_of(tree.parents)) > 1:
        notes.append(f"between CPUs assumed {socket:g} GB/s per direction; set --socket-gbps")
    return Topology(
        name="nvidia-smi",
        devices=_devices(matrix, nvlinks, tree, names),
        links=(
            *_nvlink_links(nvlinks, names, nvlink),
            *host_links(tree.parents, pcie=pcie, socket=socket),
        ),
        notes=tuple(notes),
        source="nvidia-smi topo -m; it states no bandwidths, the notes say which were assumed",
    )


def _devices(matrix: Matrix, nvlinks: Nvlinks, tree: HostTree, names: dict[str, str]) -> tuple[Device, ...]:
    affinity = {names[gpu]: cpus for gpu, cpus in matrix.affinity.items()}
    nodes = {names[gpu]: numa for gpu, numa in matrix.numa.items() if re.fullmatch(r"\d{1,4}", numa)}
    several = {names[gpu]: numa for gpu, numa in matrix.numa.items() if names[gpu] not in nodes}
    affinity_of, node_of = _of_cpus(tree, affinity), _of_cpus(tree, nodes)
    gpus = []
    for name in (names[gpu] for gpu in matrix.gpus):
        known = {"host_bridge": tree.bridges.get(name), "numa_nodes": several.get(name)}
        if tree.root(name) not in affinity_of:
            known["cpus"] = affinity.get(name)
        gpus.append(Device(name, "gpu", _SERVER, numa=_number(nodes.get(name)), facts=facts(**known)))
    switch = [Device("nvswitch0", "nvswitch", _SERVER)] if nvlinks.switched else []
    inner = [Device(name, "pcie", _SERVER) for name in tree.parents if name.startswith("pcie")]
    cpus = [
        Device(name, "cpu", _SERVER, numa=_number(node_of.get(name)), facts=facts(cpus=affinity_of.get(name)))
        for name in cpus_of(tree.parents)
    ]
    return (*gpus, *switch, *inner, *cpus, *(_nic(nic, matrix, tree, names) for nic in matrix.nics))


def _nic(nic: str, matrix: Matrix, tree: HostTree, names: dict[str, str]) -> Device:
    """Newer drivers head the columns NIC0, NIC1, ... and name the adapters in a legend, older ones put them there."""
    adapter = matrix.hardware.get(nic, "" if re.fullmatch(r"NIC\d+", nic) else nic)
    known = facts(adapter=adapter, host_bridge=tree.bridges.get(names[nic]))
    return Device(names[nic], "nic", _SERVER, facts=known)


def _of_cpus(tree: HostTree, stated: Mapping[str, str]) -> dict[str, str]:
    """Affinity of the CPUs whose GPUs agree on one that those of no other CPU have.

    A job that is bound to a few cores prints the same for every GPU, which says nothing of any CPU.
    """
    found: dict[str, set[str]] = {}
    for gpu, text in stated.items():
        found.setdefault(tree.root(gpu), set()).add(text)
    homes = Counter(text for texts in found.values() for text in texts)
    return {cpu: text for cpu, texts in found.items() for text in texts if len(texts) == homes[text] == 1}


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def _nvlink_links(nvlinks: Nvlinks, names: dict[str, str], per_link: float) -> tuple[Link, ...]:
    wires = [(names[first], names[second], count) for (first, second), count in nvlinks.direct.items()]
    wires += [(names[gpu], "nvswitch0", count) for gpu, count in nvlinks.to_switch.items()]
    return tuple(
        link
        for first, second, count in wires
        for link in both_ways(first, second, "nvlink", several(count, per_link), count=count)
    )

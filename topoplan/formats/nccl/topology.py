"""NCCL's topology XML (``NCCL_TOPO_DUMP_FILE``), version 1, and RCCL's, version 2 with ``xgmi``, to a Topology.

The reader does what NCCL does (``src/graph/xml.cc`` and ``topo.cc``): what stops NCCL is an error that names line,
element and attribute; what NCCL passes over is a note. Rates are NCCL's effective ones (`topoplan.hosts.nccl_rates`)
unless the file states better, as our own exporter makes it. Deliberately absent: links through which two PCIe
switches are one (``pcilink``), and partitions of a GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from topoplan.errors import TopologyError
from topoplan.formats.nccl.attributes import Findings, GivenRates, needed, stated, whole_number
from topoplan.formats.nccl.cpu import host_cpus
from topoplan.formats.nccl.endpoints import host_gpus, host_nics
from topoplan.formats.nccl.pci import PciNode, pci_nodes
from topoplan.formats.nccl.xml_tree import Element, parse_xml
from topoplan.hosts.build import host_topology
from topoplan.hosts.host import Host
from topoplan.hosts.link_rates import checked_rate
from topoplan.topology import Topology

UNNAMED = "nccl-xml"
"""Name of a machine whose file states none."""

_KNOWN = {
    "system": ("cpu",),
    "cpu": ("pci", "nic"),
    "pci": ("pci", "gpu", "nic", "pcilink"),
    "nic": ("net",),
    "gpu": ("nvlink", "xgmi", "c2c"),
}
"""Elements that may stand in an element; NCCL passes over others."""

_OTHER_FILES = {
    "graphs": "an NCCL graph file (NCCL_GRAPH_FILE): rings and trees that NCCL found, not the machine",
    "algo": "an MSCCL algorithm: a schedule, not the machine",
}


def parse_nccl_xml(
    text: str,
    *,
    nvlink_gbps: float | None = None,
    pcie_gbps: float | None = None,
    socket_gbps: float | None = None,
    gpu_ids: Collection[str] = (),
) -> Topology:
    """Read a topology file of NCCL or RCCL.

    Parameters
    ----------
    text : str
        The XML.
    nvlink_gbps, pcie_gbps, socket_gbps : float, optional
        GB/s per direction of one NVLink or XGMI link, of every PCIe link, and between CPUs, in place of the file's and
        of NCCL's.
    gpu_ids : collection of str
        Bus ids that are known from elsewhere to be those of GPUs: a ``pci`` element without class is a GPU there.

    Returns
    -------
    Topology
        Its ``notes`` say what was assumed. GPUs without ``gpu`` element have no NVLinks: see `topoplan.formats.merge`.

    Raises
    ------
    TopologyError
        The text is no such XML, NCCL would fail on it, or it holds no GPU; the message names line, element, attribute.
    UsageError
        A bandwidth is not a finite number above zero.

    Examples
    --------
    >>> gpu = '<pci busid="0000:0{}:00.0" class="0x030200" link_speed="8 GT/s" link_width="16"><gpu dev="{}" ' \\
    ...       'sm="70" rank="{}" gdr="1"><nvlink target="0000:0{}:00.0" count="2" tclass="0x030200"/></gpu></pci>'
    >>> cpu = '<cpu numaid="0" arch="x86_64" vendor="AuthenticAMD" familyid="23" modelid="49">'
    >>> text = f'<system version="1">{cpu}{gpu.format(6, 0, 0, 7)}{gpu.format(7, 1, 1, 6)}</cpu></system>'
    >>> [(link.src, link.dst, link.bandwidth, link.count) for link in parse_nccl_xml(text).links[:3]]
    [('gpu0', 'gpu1', 40.0, 2), ('gpu1', 'gpu0', 40.0, 2), ('gpu0', 'cpu0', 12.0, 1)]
    """
    rates = GivenRates(
        checked_rate("--nvlink-gbps", nvlink_gbps),
        checked_rate("--pcie-gbps", pcie_gbps),
        checked_rate("--socket-gbps", socket_gbps),
    )
    system = parse_xml(text)
    version = _version(system)
    findings = Findings()
    cpus = host_cpus(system, rates, findings)
    nodes = pci_nodes(system, rates, findings, gpu_ids=gpu_ids)
    if not any(node.device.kind == "gpu" for node in nodes):
        raise TopologyError(_no_gpu(nodes, gpu_ids))
    _note_unknown(system, findings)
    host = Host(
        stated(system, "name") or UNNAMED,
        cpus,
        tuple(node.device for node in nodes),
        host_gpus(nodes, rates, findings),
        host_nics(system, nodes, findings),
        source=f"topology XML of {'RCCL' if version == 2 else 'NCCL'}; bandwidths are NCCL's effective ones, below the "
        "nominal ones, where the file states none",
        notes=findings.notes(),
    )
    assumed = {node.device.busid for node in nodes if not stated(node.element, "busid")}
    machine = _without_bus_ids(host_topology(host), assumed)
    return replace(machine, peer_access=_peer_access(system))


def _peer_access(system: Element) -> tuple[tuple[int, float], ...]:
    """Seconds of switching peer access by number of GPUs, such as ``3:0.0035 8:0.0037``, which NCCL passes over."""
    text = stated(system, "peer_access")
    try:
        pairs = [part.split(":") for part in text.split()]
        return tuple((int(gpus), float(seconds)) for gpus, seconds in pairs)
    except ValueError:
        raise TopologyError(
            f"line {system.line}: system peer_access {text[:40]!r} is no list of GPUs and seconds such as 8:0.0037"
        ) from None


def _version(system: Element) -> int:
    """Version of the format; TopologyError where it is none that is read."""
    if system.name in _OTHER_FILES:
        raise TopologyError(
            f"line {system.line}: {system.name}: this is {_OTHER_FILES[system.name]}; give the file that "
            "NCCL_TOPO_DUMP_FILE writes"
        )
    if system.name != "system":
        raise TopologyError(
            f"line {system.line}: the outermost element is {system.name[:40]}, but system in a topology file of NCCL; "
            "give the file that NCCL_TOPO_DUMP_FILE writes"
        )
    text = needed(system, "version")
    version = whole_number(system, "version")
    if version not in (1, 2):
        raise TopologyError(
            f"line {system.line}: system version {text[:40]!r} is unknown; 1 (NCCL) and 2 (RCCL) are read"
        )
    return version


def _no_gpu(nodes: Sequence[PciNode], gpu_ids: Collection[str]) -> str:
    unclassed = sum("class" not in node.element.attributes for node in nodes)
    if not nodes:
        return "the file has no GPU: there is no pci element below a cpu; give the file that NCCL_TOPO_DUMP_FILE writes"
    if not unclassed:
        return f"the file has no GPU: none of its {len(nodes)} pci elements has class 0x03… or a gpu element"
    if gpu_ids:
        return (
            f"the file has no GPU: {unclassed} of its {len(nodes)} pci elements state no class, and none of them is at "
            "the bus id of a GPU of --merge"
        )
    return (
        f"which of the {len(nodes)} pci elements are GPUs is not known, since {unclassed} of them state no class; "
        "--merge with topology JSON that has bus ids (topoplan probe writes it) tells"
    )


def _note_unknown(element: Element, findings: Findings) -> None:
    for child in element.children:
        if child.name == "pcilink":
            findings.add("pcilink joins two PCIe switches in NCCL; left out", f"line {child.line}")
        elif child.name in _KNOWN.get(element.name, ()):
            _note_unknown(child, findings)
        else:
            findings.add(
                f"{child.name[:40]} inside {element.name[:40]} is unknown; passed over, as NCCL does",
                f"line {child.line}",
            )


def _without_bus_ids(topology: Topology, busids: Collection[str]) -> Topology:
    """Without those bus ids that only stand in for unknown ones."""
    return replace(
        topology,
        devices=tuple(
            replace(device, busid="") if device.busid in busids else device for device in topology.devices
        ),
    )

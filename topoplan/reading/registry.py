"""List the texts that topoplan reads, how each is recognised by its content, and what reads it.

Order counts: the first pattern that matches decides (`topoplan.reading.load.format_of`). ``nvidia-smi`` stands last and
takes all other texts. A text that states no machine has a remedy, which says what to give in its place.
"""

from __future__ import annotations

from dataclasses import dataclass

ROCM_TITLES = {
    "access": r"ACCESS TABLE:|Link accessibility between two GPUs",
    "weight": r"WEIGHT TABLE:|Weight between two GPUs",
    "hops": r"HOPS TABLE:|Hops between two GPUs",
    "type": r"LINK TYPE TABLE:|Link Type between two GPUs",
    "bandwidth": r"NUMA BW TABLE:|Bandwidth between two GPUs",
    "numa": r"Numa Nodes",
}
"""Titles of the tables that are parsed, amd-smi's and rocm-smi's."""

UNNAMED = "nccl-xml"
"""Name of a machine of NCCL's XML that states none."""

SLURM = ("topology.conf", "topology.yaml")

RATES = ("nvlink_gbps", "pcie_gbps", "socket_gbps", "cable_gbps")
"""Bandwidths that a text may leave open, in GB/s per direction."""

ASSUMED = {
    "pcie": "PCIe assumed {:g} GB/s per link and direction; set --pcie-bandwidth",
    "socket": "between CPUs assumed {:g} GB/s per direction; set --socket-bandwidth",
}
"""Notes on rates that a text leaves open, by channel."""

_HOST_RATES = RATES[:3]


@dataclass(frozen=True, slots=True)
class Format:
    """A text that some program prints or somebody writes.

    ``key`` names it in the code, ``printed_by`` in messages. ``parser`` is the module below ``topoplan.reading`` and
    the function that returns its Topology, empty for a text that states no machine; it takes the ``rates`` and
    ``extras``. ``remedy`` says what to do with a text that states no machine.
    """

    key: str
    printed_by: str
    pattern: str
    parser: str = ""
    rates: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    remedy: str = ""


_BEGINS = r'(?s)\A%s.{0,6000}?"(?:%s)"\s*:'
"""JSON text with its first bracket, and keys of which one stands near its beginning."""

_LOG = "topoplan explain takes it as LOG"
_RATES_OF_PAIRS = (
    "it states rates of pairs, and not the links that they cross: topoplan calibrate TOPO --results FILE -o F.json "
    "writes them into the machine of nvidia-smi topo -m, and topoplan pairs TOPO --results FILE names slow links"
)
_NODES = (
    "it states how Slurm's nodes are joined, and not what a node is: topoplan order takes it with --server dgx-h100, "
    "and other commands in a topoplan.cluster/1 file with a tree in its network"
)
_CODES = "NV[0-9]+|SYS|NODE|PHB|PXB|PIX"

FORMATS = (
    Format("json", "topoplan", r'(?s)\A\{.{0,2000}?"format"\s*:\s*"topoplan\.'),
    Format(
        "nvbandwidth.json",
        "nvbandwidth -j",
        _BEGINS % (r"\{", "testcases|bandwidth_matrix"),
        remedy=_RATES_OF_PAIRS,
    ),
    Format("ras", "ncclras -f json", _BEGINS % (r"\{", "communicators|communicators_count"), remedy=_LOG),
    Format(
        "inspector",
        "NCCL's Inspector",
        _BEGINS % (r"\{", "coll_perf|p2p_perf|inspector_output_format_version"),
        remedy=_LOG,
    ),
    Format("perf.json", "nccl-tests -J", _BEGINS % (r"\{", "experiment_name|out_of_place"), remedy=_LOG),
    Format("rccl.json", "rccl-tests -Z json", _BEGINS % (r"[\[{]", "algBw|busBw"), remedy=_LOG),
    Format(
        "rocm-smi",
        "rocm-smi --showtopo --json",
        r'(?s)\A\{.{0,6000}?"\(Topology\) ',
        "rocm_smi:parse_rocm_smi",
        _HOST_RATES,
        ("xgmi_optional", "known"),
    ),
    Format(
        "rocm-smi",
        "amd-smi topology --json",
        _BEGINS % (r"\[", "link_type|num_hops|link_status"),
        "rocm_smi:parse_rocm_smi",
        _HOST_RATES,
        ("xgmi_optional", "known"),
    ),
    Format(
        "jaccl",
        "JACCL's hostfile",
        _BEGINS % (r"[\[{]", "rdma|ssh|hosts"),
        "rdma_ports:parse_jaccl",
        ("cable_gbps",),
    ),
    Format("jaccl", "JACCL's device file", r"\A\[\s*\[", "rdma_ports:parse_jaccl", ("cable_gbps",)),
    Format("json", "topology JSON", r"\A(?:\{|\[\s*[\[{])"),
    Format(
        "lstopo",
        "lstopo",
        r"(?s)\A<.{0,2000}?(?:<!DOCTYPE topology|<topology[\s>])|\A<topology[\s>]",
        "pci_listings:parse_lstopo",
        ("socket_gbps",),
    ),
    Format(
        "nccl",
        "NCCL's topology XML",
        r"\A<",
        "nccl.topology_xml:parse_nccl_xml",
        _HOST_RATES,
        ("gpu_ids",),
    ),
    Format(
        "topology.conf",
        "Slurm's topology.conf",
        r"(?im)^[ \t]*(SwitchName|BlockName|BlockSizes|AggregatedBlock)[ \t]*=",
        remedy=_NODES,
    ),
    Format(
        "topology.yaml",
        "Slurm's topology.yaml",
        r"(?m)^(?:---[ \t]*\n)?[ \t]*-[ \t]+topology[ \t]*:",
        remedy=_NODES,
    ),
    Format(
        "rocm-smi",
        "rocm-smi --showtopo",
        "|".join(ROCM_TITLES.values()),
        "rocm_smi:parse_rocm_smi",
        _HOST_RATES,
        ("xgmi_optional", "known"),
    ),
    Format(
        "nvidia-smi",
        "nvidia-smi topo -m",
        r"(?m)^"
        rf"[ \t#>|]{{0,40}}GPU[0-9]+(?:[ \t]{{1,20}}(?:X|{_CODES})){{0,40}}[ \t]{{1,20}}(?:{_CODES})\b",
        "nvidia_smi_topology:parse_nvidia_smi",
        _HOST_RATES,
    ),
    Format(
        "p2pBandwidthLatencyTest",
        "p2pBandwidthLatencyTest",
        r"P2P=(?:Enabled|Disabled) Bandwidth|P2P Connectivity Matrix",
        remedy=_RATES_OF_PAIRS,
    ),
    Format(
        "nvbandwidth",
        "nvbandwidth",
        r"(?m)^" r"(?:nvbandwidth Version|Running \w{1,80}\.[ \t]*\r?$)",
        remedy=_RATES_OF_PAIRS,
    ),
    Format(
        "topo -p2p",
        "nvidia-smi topo -p2p",
        r"(?m)^" r"[ \t#>|]{0,40}GPU[0-9]+[ \t]+(?:X[ \t]+)?(?:OK|CNS|GNS|TNS|NS|DR|U)\b",
        "nvidia_smi_topology:parse_nvidia_smi",
        _HOST_RATES,
    ),
    Format(
        "ibdev2netdev",
        "ibdev2netdev",
        r"(?m)^" r"[\w.-]{1,60} port [0-9]+ ==> ",
        remedy="it states the ports of NICs alone, and not where they are: add it with --merge to nvidia-smi topo -m, "
        "lspci -vv or lstopo, and NICs without a port that is up are left out",
    ),
    Format(
        "lspci -tv",
        "lspci -tv",
        r"(?m)^" r"[ \t]{0,8}-(?:\+-)?\[[0-9a-f]{2,8}(?::[0-9a-f]{2})?\]-",
        "pci_listings:parse_lspci_tree",
        ("pcie_gbps", "socket_gbps"),
    ),
    Format(
        "lspci -vv",
        "lspci -vv",
        r"(?m)^" r"(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] [A-Z0-9][^:\n]{2,80}: ",
        "pci_listings:parse_lspci",
        ("socket_gbps",),
    ),
    Format(
        "rccl.csv",
        "rccl-tests -Z csv",
        r"(?m)^" r"(?i:\w{1,40}(?:,\w{1,40}){1,20},algbw,busbw,)",
        remedy=_LOG,
    ),
    Format(
        "perf", "nccl-tests", r"(?m)^" r"# (?:nThread \d|nccl-tests version|Collective test)", remedy=_LOG
    ),
    Format("debug", "NCCL_DEBUG=INFO", "NCCL INFO ", remedy=_LOG),
    Format(
        "nvidia-smi",
        "nvidia-smi topo -m",
        "",
        "nvidia_smi_topology:parse_nvidia_smi",
        _HOST_RATES,
    ),
)

FORMATS_IN_WORDS = (
    "topology JSON, NCCL topology XML or what nvidia-smi topo -m, rocm-smi --showtopo, amd-smi topology, lstopo or "
    "lspci -vv print"
)

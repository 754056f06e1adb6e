"""List the texts that topoplan reads, how each is recognised by its content, and what reads it.

Order counts: the first pattern that matches decides. ``nvidia-smi`` stands last and takes all other texts. A text that
states no machine has a remedy, which says what to give in its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import cast

from topoplan.machine.topology import Topology

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
    pattern: re.Pattern[str]
    parser: str = ""
    rates: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    remedy: str = ""

    def parse(self, text: str, **given: object) -> Topology:
        """Return the machine of a text; ``given`` are its rates and extras."""
        module, _, name = self.parser.partition(":")
        reader = cast("Callable[..., Topology]", getattr(import_module(f"topoplan.reading.{module}"), name))
        return reader(text, **given)


def _begins(opening: str, *keys: str) -> re.Pattern[str]:
    """Return a pattern of JSON text that has one of some keys near its beginning."""
    return re.compile(rf'(?s)\A{opening}.{{0,6000}}?"(?:{"|".join(keys)})"\s*:')


def _line(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?m)^{pattern}")


_LOG = "topoplan explain takes it as LOG"
_RATES_OF_PAIRS = (
    "it states rates of pairs, and not the links that they cross: topoplan calibrate TOPO --results FILE -o F.json "
    "writes them into the machine of nvidia-smi topo -m, and topoplan pairs TOPO --results FILE names slow links"
)
_CODES = "NV[0-9]+|SYS|NODE|PHB|PXB|PIX"

FORMATS = (
    Format("json", "topoplan", re.compile(r'(?s)\A\{.{0,2000}?"format"\s*:\s*"topoplan\.')),
    Format(
        "nvbandwidth.json",
        "nvbandwidth -j",
        _begins(r"\{", "testcases", "bandwidth_matrix"),
        remedy=_RATES_OF_PAIRS,
    ),
    Format("ras", "ncclras -f json", _begins(r"\{", "communicators", "communicators_count"), remedy=_LOG),
    Format(
        "inspector",
        "NCCL's Inspector",
        _begins(r"\{", "coll_perf", "p2p_perf", "inspector_output_format_version"),
        remedy=_LOG,
    ),
    Format("perf.json", "nccl-tests -J", _begins(r"\{", "experiment_name", "out_of_place"), remedy=_LOG),
    Format("rccl.json", "rccl-tests -Z json", _begins(r"[\[{]", "algBw", "busBw"), remedy=_LOG),
    Format(
        "rocm-smi",
        "rocm-smi --showtopo --json",
        re.compile(r'(?s)\A\{.{0,6000}?"\(Topology\) '),
        "rocm_smi:parse_rocm_smi",
        _HOST_RATES,
        ("xgmi_optional", "known"),
    ),
    Format(
        "rocm-smi",
        "amd-smi topology --json",
        _begins(r"\[", "link_type", "num_hops", "link_status"),
        "rocm_smi:parse_rocm_smi",
        _HOST_RATES,
        ("xgmi_optional", "known"),
    ),
    Format(
        "jaccl",
        "JACCL's hostfile",
        _begins(r"[\[{]", "rdma", "ssh", "hosts"),
        "jaccl:parse_jaccl",
        ("cable_gbps",),
    ),
    Format("jaccl", "JACCL's device file", re.compile(r"\A\[\s*\["), "jaccl:parse_jaccl", ("cable_gbps",)),
    Format("json", "topology JSON", re.compile(r"\A(?:\{|\[\s*[\[{])")),
    Format(
        "lstopo",
        "lstopo",
        re.compile(r"(?s)\A<.{0,2000}?(?:<!DOCTYPE topology|<topology[\s>])|\A<topology[\s>]"),
        "pci_listings:parse_lstopo",
        ("socket_gbps",),
    ),
    Format(
        "nccl",
        "NCCL's topology XML",
        re.compile(r"\A<"),
        "nccl.topology_xml:parse_nccl_xml",
        _HOST_RATES,
        ("gpu_ids",),
    ),
    *(
        Format(
            key,
            f"Slurm's {key}",
            pattern,
            remedy="it states how Slurm's nodes are joined, and not what a node is: topoplan order takes it with "
            "--server dgx-h100, and other commands in a topoplan.cluster/1 file with a tree in its network",
        )
        for key, pattern in (
            ("topology.conf", _line(r"(?i:[ \t]*(SwitchName|BlockName|BlockSizes|AggregatedBlock)[ \t]*=)")),
            ("topology.yaml", _line(r"(?:---[ \t]*\n)?[ \t]*-[ \t]+topology[ \t]*:")),
        )
    ),
    Format(
        "rocm-smi",
        "rocm-smi --showtopo",
        re.compile("|".join(ROCM_TITLES.values())),
        "rocm_smi:parse_rocm_smi",
        _HOST_RATES,
        ("xgmi_optional", "known"),
    ),
    Format(
        "nvidia-smi",
        "nvidia-smi topo -m",
        _line(
            rf"[ \t#>|]{{0,40}}GPU[0-9]+(?:[ \t]{{1,20}}(?:X|{_CODES})){{0,40}}[ \t]{{1,20}}(?:{_CODES})\b"
        ),
        "nvidia_smi_topology:parse_nvidia_smi",
        _HOST_RATES,
    ),
    Format(
        "p2pBandwidthLatencyTest",
        "p2pBandwidthLatencyTest",
        re.compile(r"P2P=(?:Enabled|Disabled) Bandwidth|P2P Connectivity Matrix"),
        remedy=_RATES_OF_PAIRS,
    ),
    Format(
        "nvbandwidth",
        "nvbandwidth",
        _line(r"(?:nvbandwidth Version|Running \w{1,80}\.[ \t]*\r?$)"),
        remedy=_RATES_OF_PAIRS,
    ),
    Format(
        "topo -p2p",
        "nvidia-smi topo -p2p",
        _line(r"[ \t#>|]{0,40}GPU[0-9]+[ \t]+(?:X[ \t]+)?(?:OK|CNS|GNS|TNS|NS|DR|U)\b"),
        "nvidia_smi_topology:parse_nvidia_smi",
        _HOST_RATES,
    ),
    Format(
        "ibdev2netdev",
        "ibdev2netdev",
        _line(r"[\w.-]{1,60} port [0-9]+ ==> "),
        remedy="it states the ports of NICs alone, and not where they are: add it with --merge to nvidia-smi topo -m, "
        "lspci -vv or lstopo, and NICs without a port that is up are left out",
    ),
    Format(
        "lspci -tv",
        "lspci -tv",
        _line(r"[ \t]{0,8}-(?:\+-)?\[[0-9a-f]{2,8}(?::[0-9a-f]{2})?\]-"),
        "pci_listings:parse_lspci_tree",
        ("pcie_gbps", "socket_gbps"),
    ),
    Format(
        "lspci -vv",
        "lspci -vv",
        _line(r"(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] [A-Z0-9][^:\n]{2,80}: "),
        "pci_listings:parse_lspci",
        ("socket_gbps",),
    ),
    Format(
        "rccl.csv",
        "rccl-tests -Z csv",
        _line(r"(?i:\w{1,40}(?:,\w{1,40}){1,20},algbw,busbw,)"),
        remedy=_LOG,
    ),
    Format("perf", "nccl-tests", _line(r"# (?:nThread \d|nccl-tests version|Collective test)"), remedy=_LOG),
    Format("debug", "NCCL_DEBUG=INFO", re.compile("NCCL INFO "), remedy=_LOG),
    Format(
        "nvidia-smi",
        "nvidia-smi topo -m",
        re.compile(""),
        "nvidia_smi_topology:parse_nvidia_smi",
        _HOST_RATES,
    ),
)

FORMATS_IN_WORDS = (
    "topology JSON, NCCL topology XML or what nvidia-smi topo -m, rocm-smi --showtopo, amd-smi topology, lstopo or "
    "lspci -vv print"
)


def format_of(text: str) -> Format | None:
    """Return the format of a text; None if it is empty.

    >>> found = format_of("rocep1s0f0 port 1 ==> enp1s0f0np0 (Up)")
    >>> found.printed_by if found else ""
    'ibdev2netdev'
    """
    text = text.lstrip("\ufeff \t\r\n")
    return next(one for one in FORMATS if one.pattern.search(text)) if text else None


def form_of(text: str) -> str:
    """Return the key of a text's format; nothing for an empty text."""
    found = format_of(text)
    return found.key if found else ""

"""Machines in: topology JSON, NCCL's topology XML and ``nvidia-smi topo -m`` text to a Topology, by pure parsers."""

from __future__ import annotations

from topoplan.formats.merge import merge_nvlink
from topoplan.formats.nccl.topology import parse_nccl_xml
from topoplan.formats.nvidia_smi.topology import parse_nvidia_smi
from topoplan.formats.topology_json import dump_topology_json, parse_topology_json

__all__ = [
    "dump_topology_json",
    "merge_nvlink",
    "parse_nccl_xml",
    "parse_nvidia_smi",
    "parse_topology_json",
]

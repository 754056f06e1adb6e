"""One server as the operating system, the driver or NCCL describe it, and how it becomes a Topology."""

from __future__ import annotations

from topoplan.hosts.build import host_topology
from topoplan.hosts.host import Host, HostCpu, HostGpu, HostNic, NvlinkBundle, PciDevice

__all__ = ["Host", "HostCpu", "HostGpu", "HostNic", "NvlinkBundle", "PciDevice", "host_topology"]

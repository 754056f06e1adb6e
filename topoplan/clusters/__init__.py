"""Servers joined by a network, as one topology."""

from topoplan.clusters.alike import alike, excerpt
from topoplan.clusters.build import cluster
from topoplan.clusters.domains import domain
from topoplan.clusters.network import NETWORKS
from topoplan.clusters.nic_wiring import NIC_ACCESS
from topoplan.clusters.server import Server
from topoplan.clusters.shapes import nvswitch_cluster
from topoplan.clusters.transport import TRANSPORTS

__all__ = [
    "NETWORKS",
    "NIC_ACCESS",
    "TRANSPORTS",
    "Server",
    "alike",
    "cluster",
    "domain",
    "excerpt",
    "nvswitch_cluster",
]

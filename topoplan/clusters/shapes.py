"""Clusters of NVSwitch servers reduced to what their collectives depend on."""

from __future__ import annotations

from topoplan.clusters.build import cluster
from topoplan.clusters.server import Server, check_count
from topoplan.errors import UsageError
from topoplan.topology import FASTEST, SLOWEST, Device, Link, Topology

MOST_GPUS = 1024
"""Most GPUs of one server."""


def nvswitch_cluster(
    servers: int,
    *,
    gpus: int = 8,
    nvlink: float = 300.0,
    nic: float = 25.0,
    rails: int | None = 2,
    oversubscription: float | None = None,
    name: str = "",
) -> Topology:
    """Servers of GPUs on one NVSwitch, each GPU with a NIC of its own, NIC i on rail i mod ``rails``.

    The defaults are the shape of a DGX A100; a DGX H100 has 450 and 50 GB/s. PCIe is left out.

    Parameters
    ----------
    servers, gpus : int
        Servers, and GPUs of each.
    nvlink, nic : float
        GB/s of a GPU to the NVSwitch and of a NIC, in each direction.
    rails : int or None
        Network switches; None makes one for each NIC of a server.
    oversubscription : float or None
        Joins the rails by a spine.
    name : str
        Of the cluster; made from the numbers if empty.

    Raises
    ------
    UsageError
        A number makes no sense, or the cluster does not fit into memory.

    Examples
    --------
    >>> import topoplan
    >>> topoplan.plan(nvswitch_cluster(2), "allgather", gpus=[0, 8]).rate
    50.0
    """
    check_count("servers", servers)
    check_count("gpus", gpus, most=MOST_GPUS)
    for field, value in (("nvlink", nvlink), ("nic", nic)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not SLOWEST <= value <= FASTEST / 8:
            raise UsageError(f"{field} {str(value)[:40]} must be a number of GB/s above zero, for example 25")
    ports = [f"gpu{i}" for i in range(gpus)]
    box = Topology(
        f"{gpus} GPUs on an NVSwitch",
        (*(Device(port, "gpu") for port in ports), Device("nvswitch0", "nvswitch")),
        tuple(
            Link(src, dst, "nvlink", float(nvlink))
            for port in ports
            for src, dst in ((port, "nvswitch0"), ("nvswitch0", port))
        ),
    )
    return cluster(
        [Server(box, count=servers)],
        nic_gbps=8 * nic,
        nics=gpus,
        network="rail-optimised",
        rails=rails,
        oversubscription=oversubscription,
        name=name or f"{servers} x {gpus} GPUs, NVSwitch {nvlink:g} GB/s, NIC {nic:g} GB/s",
    )

"""When each channel of a plan may start: at once, but for PCIe beside NVLink, which has to be switched on.

A driver reaches a peer GPU over one kind of wire at a time. To use PCIe while NVLink is busy, every process first
switches peer access off between its GPUs, and that takes T_dpa (Blink, MLSys 2020, appendix A.3). A plan over PCIe
alone needs no switch: it is made once, before the plan runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from topoplan.hosts.link_rates import PEER_ACCESS
from topoplan.topology import Topology
from topoplan.units import exact


def channel_starts(topology: Topology, channels: Sequence[str]) -> dict[str, Fraction]:
    """Seconds after the launch at which each channel of a plan may start.

    Parameters
    ----------
    topology : Topology
        The allocation: its GPUs are those that switch.
    channels : sequence of str
        Channels of the plan.

    Returns
    -------
    dict of str to Fraction
        Zero, but for pcie beside nvlink (see `peer_access_seconds`).

    Examples
    --------
    >>> import topoplan
    >>> channel_starts(topoplan.load("dgx-1v"), ("nvlink", "pcie"))
    {'nvlink': Fraction(0, 1), 'pcie': Fraction(37, 10000)}
    >>> channel_starts(topoplan.load("dgx-1v"), ("pcie",))
    {'pcie': Fraction(0, 1)}
    """
    starts = dict.fromkeys(channels, Fraction(0))
    if "nvlink" in starts and "pcie" in starts:
        starts["pcie"] = peer_access_seconds(topology)
    return starts


def peer_access_seconds(topology: Topology) -> Fraction:
    """T_dpa: seconds to switch peer access between all GPUs of an allocation, exact.

    The servers of an allocation switch at the same time, so the largest one counts. Between two numbers of GPUs
    that `Topology.peer_access` states the time is interpolated; below the first it is the first; above the last it
    grows with the number of peers, n - 1, each of which costs a process one call. A machine that states none is
    taken as a DGX-1V (`topoplan.hosts.link_rates.PEER_ACCESS`).

    Examples
    --------
    >>> import topoplan
    >>> machine = topoplan.load("dgx-1v")
    >>> [float(peer_access_seconds(machine.subset(range(n)))) for n in (2, 5, 8)]
    [0.0035, 0.0035, 0.0037]
    >>> round(float(peer_access_seconds(topoplan.load("dgx-2"))), 6)
    0.007929
    """
    gpus = [device.server for device in topology.devices if device.kind == "gpu"]
    count = max((gpus.count(server) for server in set(gpus)), default=0)
    stated = [(number, exact(seconds)) for number, seconds in topology.peer_access or PEER_ACCESS]
    below = [pair for pair in stated if pair[0] <= count]
    above = [pair for pair in stated if pair[0] > count]
    if not below:
        return above[0][1]
    number, seconds = below[-1]
    if not above:
        return seconds * Fraction(count - 1, number - 1)
    further, longer = above[0]
    return seconds + (longer - seconds) * Fraction(count - number, further - number)

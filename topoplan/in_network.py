"""Which switches copy and add: what the file says of each, or what a caller decides for all of a kind.

A switch may be able to do more than it is used for: NVSwitch copies and adds from its third generation on (NVLink
SHARP), and the library says so under ``capable``. Plans use what ``multicast`` and ``reduce`` say, which
`with_in_network` sets.
"""

from __future__ import annotations

from dataclasses import replace

from topoplan.errors import UsageError
from topoplan.topology import IN_NETWORK, Device, Topology, TopologyLike, as_topology

CHOICES = {"none": (), "nvswitch": ("nvswitch",), "switch": ("switch",), "all": ("nvswitch", "switch")}
"""Kinds of devices that copy and add, by what a caller may ask for."""


def with_in_network(topology: TopologyLike, which: str) -> Topology:
    """The machine with all switches of some kinds copying and adding, and no other device.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes
    which : str
        none, nvswitch, switch (those of the network) or all. A switch that does not say that it could leaves a note.

    Raises
    ------
    UsageError
        Another word, or there is no such switch.

    Examples
    --------
    >>> import topoplan
    >>> topoplan.plan(with_in_network("dgx-h100", "nvswitch")).rate, topoplan.plan("dgx-h100").rate
    (450.0, 257.14285714285717)
    """
    topology = as_topology(topology)
    if which not in CHOICES:
        raise UsageError(f"in-network {which!r} is unknown; use one of {', '.join(CHOICES)}")
    kinds = CHOICES[which]
    used = [device for device in topology.devices if device.kind in kinds]
    if kinds and not used:
        raise UsageError(
            f"{topology.name} has no {' or '.join(kinds)} that could copy and add; leave --in-network out"
        )
    assumed = [device.name for device in used if not _says_so(device)]
    more = f" and {len(assumed) - 2} more" if len(assumed) > 2 else ""
    note = f"assumed to copy and add, though the machine does not say so: {', '.join(assumed[:2])}{more}"
    devices = (
        replace(device, multicast=device.kind in kinds, reduce=device.kind in kinds)
        for device in topology.devices
    )
    return replace(
        topology, devices=tuple(devices), notes=(*topology.notes, note) if assumed else topology.notes
    )


def fully_used(topology: Topology) -> Topology:
    """The machine with every switch doing all that it says it could; the same one where that is done already."""
    devices = tuple(
        replace(
            device,
            multicast=device.multicast or "multicast" in device.capable,
            reduce=device.reduce or "reduce" in device.capable,
        )
        for device in topology.devices
    )
    return topology if devices == topology.devices else replace(topology, devices=devices)


def _says_so(device: Device) -> bool:
    does = {"multicast": device.multicast, "reduce": device.reduce}
    return all(does[name] or name in device.capable for name in IN_NETWORK)

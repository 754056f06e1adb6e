"""The PCIe tree of a server, cut down to what limits a transfer: GPUs, NICs, and the switches they share.

Three steps: what holds no GPU and no NIC is left out; two levels of one Broadcom switch chip, which shows itself as a
cascade but carries full bandwidth between all ports, become one switch (as NCCL does, ``ncclTopoFlattenBcmSwitches``);
a bridge above a single device is contracted into one link as fast as the slower of the two. NCCL passes over the
downstream ports of switches before it looks for levels, and so they are contracted first here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from topoplan.errors import TopologyError
from topoplan.hosts.host import PciDevice

_GEN4_CHIP = "1000:c010:1000:a"
_GEN5_UPPER, _GEN5_LOWER = "1000:c030:1000:0", "1000:c030:1000:1"
"""Vendor, device, subsystem vendor and the first digit of the subsystem."""


def check_tree(tree: Iterable[PciDevice]) -> None:
    """Refuse a tree with a bus id twice, or with a device before its bridge.

    Raises
    ------
    TopologyError
        The message names the bus id.
    """
    kinds: dict[str, str] = {}
    for device in tree:
        if device.busid in kinds:
            raise TopologyError(f"pci {device.busid} is there twice; a bus id names one device of a server")
        if device.parent and kinds.get(device.parent) != "bridge":
            raise TopologyError(
                f"pci {device.busid} hangs below {device.parent}, which is no bridge before it"
            )
        kinds[device.busid] = device.kind


def switch_tree(tree: Iterable[PciDevice]) -> tuple[PciDevice, ...]:
    """GPUs, NICs and the switches above them, in the order of the tree; what is left as a bridge is a switch.

    Examples
    --------
    A switch is an upstream port with downstream ports, here below a root port of half the width:

    >>> root = PciDevice("0000:00:02.0", "bridge", "", 0, 6.0)
    >>> up = PciDevice("0000:05:00.0", "bridge", "0000:00:02.0", 0, 12.0)
    >>> ports = [PciDevice(f"0000:06:0{i}.0", "bridge", "0000:05:00.0", 0, 12.0) for i in range(2)]
    >>> gpus = [PciDevice(f"0000:0{7 + i}:00.0", "gpu", f"0000:06:0{i}.0", 0, 12.0) for i in range(2)]
    >>> for device in switch_tree([root, up, *ports, *gpus]):
    ...     print(device.busid, device.parent or "-", device.bandwidth)
    0000:05:00.0 - 6.0
    0000:07:00.0 0000:05:00.0 12.0
    0000:08:00.0 0000:05:00.0 12.0
    """
    kept = _with_ends(list(tree))
    flat = _flattened(_contracted(kept, _ports(kept)))
    return tuple(_contracted(flat, _above_one(flat)))


def _with_ends(tree: list[PciDevice]) -> list[PciDevice]:
    """Without what holds neither GPU nor NIC."""
    kept = {device.busid for device in tree if device.kind in ("gpu", "nic")}
    for device in reversed(tree):
        if device.busid in kept and device.parent:
            kept.add(device.parent)
    return [device for device in tree if device.busid in kept]


def _above_one(tree: list[PciDevice]) -> set[str]:
    """Bus ids of the bridges above a single device."""
    children = Counter(device.parent for device in tree)
    return {device.busid for device in tree if device.kind == "bridge" and children[device.busid] == 1}


def _ports(tree: list[PciDevice]) -> set[str]:
    """Bus ids of downstream ports: of the chip of the bridge above, with a single device below."""
    chips = {device.busid: device.chip for device in tree}
    single = _above_one(tree)
    return {
        device.busid
        for device in tree
        if device.busid in single and device.chip and device.chip == chips.get(device.parent)
    }


def _flattened(tree: list[PciDevice]) -> list[PciDevice]:
    """With the lower level of a Broadcom chip taken out: its devices hang on the upper level."""
    chips = {device.busid: _chip_generation(device.chip, lower=False) for device in tree}
    upper: dict[str, str] = {}
    result = []
    for device in tree:
        generation = _chip_generation(device.chip, lower=True)
        # A level that is taken out takes in no further one: NCCL marks a fused switch and leaves it alone.
        if (
            device.kind == "bridge"
            and generation
            and device.parent not in upper
            and chips.get(device.parent) == generation
        ):
            upper[device.busid] = device.parent
            continue
        result.append(replace(device, parent=upper.get(device.parent, device.parent)))
    return result


def _chip_generation(chip: str, *, lower: bool) -> int:
    """Generation of a Broadcom switch chip that shows two levels; 0 for any other device."""
    if chip.startswith(_GEN4_CHIP):
        return 4
    return 5 if chip.startswith(_GEN5_LOWER if lower else _GEN5_UPPER) else 0


def _contracted(tree: list[PciDevice], single: set[str]) -> list[PciDevice]:
    """Without bridges that stand above a single device."""
    above: dict[str, tuple[str, float]] = {}
    result = []
    for device in tree:
        parent, slowest = above.get(device.parent, (device.parent, device.bandwidth))
        bandwidth = min(slowest, device.bandwidth)
        if device.busid in single:
            above[device.busid] = (parent, bandwidth)
        else:
            result.append(replace(device, parent=parent, bandwidth=bandwidth))
    return result

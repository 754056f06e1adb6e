"""The NICs of this machine: RDMA devices with the speed of their active ports, or network interfaces where none is.

As in NCCL, plain network interfaces count only where no RDMA device does: on a machine with InfiniBand they are for
management. Virtual interfaces, and those slower than 10 Gb/s, never count; neither do virtual functions (SR-IOV) beside
the NIC whose port they share.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from topoplan.probing.sysfs import Sysfs
from topoplan.units import summed

SLOWEST = 10.0
"""Gb/s of the slowest network interface that counts."""

MODELS = {
    "15b3:1013": "ConnectX-4",
    "15b3:1015": "ConnectX-4 Lx",
    "15b3:1017": "ConnectX-5",
    "15b3:1019": "ConnectX-5 Ex",
    "15b3:101b": "ConnectX-6",
    "15b3:101d": "ConnectX-6 Dx",
    "15b3:101f": "ConnectX-6 Lx",
    "15b3:1021": "ConnectX-7",
    "15b3:1023": "ConnectX-8",
    "15b3:a2d6": "BlueField-2",
    "15b3:a2dc": "BlueField-3",
    "1d0f:efa0": "EFA",
    "1d0f:efa1": "EFA",
    "1d0f:efa2": "EFA",
    "1d0f:efa3": "EFA",
}
"""NIC models by PCI vendor and device."""


@dataclass(frozen=True, slots=True)
class FoundNic:
    """A NIC.

    Parameters
    ----------
    adapter : str
        Such as ``mlx5_0``.
    busid : str
        Empty where the kernel gives none.
    gigabits : float or None
        Gb/s of its active ports together; None where the kernel does not say.
    active : bool
        Some port is.
    """

    adapter: str
    busid: str
    gigabits: float | None
    active: bool


def find_nics(sysfs: Sysfs, *, slowest: float = SLOWEST) -> tuple[tuple[FoundNic, ...], tuple[str, ...]]:
    """NICs in natural order of their adapters' names, and notes; ``slowest`` is the least Gb/s of an interface."""
    adapters = _natural(sysfs.names(sysfs.root / "class/infiniband"))
    names = _natural(sysfs.names(sysfs.root / "class/net"))
    found = _physical(sysfs, [_rdma(sysfs, name) for name in adapters])
    interfaces = _physical(sysfs, [_interface(sysfs, name, slowest) for name in names])
    taken = {nic.busid for nic in found}
    plain = [nic for nic in interfaces if nic.busid not in taken]
    remote = [nic for nic in found if nic.active]
    dark = ", ".join(nic.adapter for nic in found if not nic.active)
    notes = [f"NICs without an active port, left out as in NCCL: {dark}"] if dark else []
    if remote and plain:
        others = ", ".join(nic.adapter for nic in plain)
        notes.append(f"NICs are those with RDMA; {others} left out")
    return tuple(remote or plain), tuple(notes)


def _physical(sysfs: Sysfs, nics: Sequence[FoundNic | None]) -> list[FoundNic]:
    """The NICs but virtual functions of others among them; a container may hold such a function alone."""
    found = [nic for nic in nics if nic is not None]
    listed = {nic.busid for nic in found}
    devices = sysfs.root / "bus/pci/devices"
    return [nic for nic in found if sysfs.pci_device(devices / nic.busid / "physfn") not in listed]


def _rdma(sysfs: Sysfs, name: str) -> FoundNic | None:
    folder = sysfs.root / "class/infiniband" / name
    busid = sysfs.pci_device(folder / "device")
    if not busid:
        return None
    rates: list[tuple[float | None, bool]] = []
    for port in sysfs.names(folder / "ports"):
        match = re.match(r"(\d+(?:\.\d+)?) Gb/sec", sysfs.text(folder / "ports" / port / "rate") or "")
        state = sysfs.text(folder / "ports" / port / "state")
        rates.append((float(match[1]) if match else None, state is None or state.startswith("4")))
    known = [rate for rate, up in rates if up and rate is not None]
    return FoundNic(name, busid, summed(known) if known else None, any(up for _, up in rates))


def _interface(sysfs: Sysfs, name: str, slowest: float) -> FoundNic | None:
    """A physical network interface that is up and fast enough."""
    folder = sysfs.root / "class/net" / name
    busid = sysfs.pci_device(folder / "device")
    if not busid or sysfs.text(folder / "operstate") in ("down", "notpresent"):
        return None
    megabits = sysfs.number(folder / "speed")
    if megabits is None or megabits <= 0 or megabits < 1000 * slowest:
        return None
    return FoundNic(name, busid, megabits / 1000, active=True)


def _natural(names: list[str]) -> list[str]:
    """``mlx5_2`` before ``mlx5_10``."""
    return sorted(
        names,
        key=lambda name: [
            (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)
        ],
    )

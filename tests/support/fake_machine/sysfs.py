"""A machine as the part of Linux's sysfs and procfs that tells its hardware: files, folders and relative links.

``folder/sys`` stands for ``/sys`` and ``folder/proc`` for ``/proc``. A file that cannot be read is a link to
``/proc/self/mem``, which opens and then fails on reading, for root too, as a kernel attribute does.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.fake_machine.description import SPEEDS, FakeMachine, Nic, Pci, Root

_UNREADABLE = "/proc/self/mem"


def write_sysfs(machine: FakeMachine, folder: Path) -> Path:
    """Write both trees below a folder.

    Returns
    -------
    Path
        What stands for ``/sys``.
    """
    sys = folder / "sys"
    for root in machine.roots:
        devices = sys / "devices" / f"pci{root.bus}"
        devices.mkdir(parents=True)
        for pci in root.children:
            _write_pci(machine, sys, devices, root, pci)
    for nic in machine.nics:
        _write_nic(machine, sys, nic)
    _write_nodes(machine, sys / "devices/system/node")
    _write_cpus(machine, sys / "devices/system/cpu", folder / "proc")
    if machine.driver:
        _put(sys / "module/nvidia/version", machine.driver)
    for path in machine.unreadable:
        (sys / path).unlink()
        (sys / path).symlink_to(_UNREADABLE)
    for path in machine.absent:
        (sys / path).unlink()
    return sys


def _put(path: Path, text: str) -> None:
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True)
    path.write_text(text + "\n")


def _link(path: Path, target: Path) -> None:
    """A link that stays right wherever the whole tree is."""
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True)
    path.symlink_to(os.path.relpath(target, path.parent))


def _write_pci(machine: FakeMachine, sys: Path, above: Path, root: Root, pci: Pci) -> None:
    here = above / pci.busid
    here.mkdir()
    names = ("vendor", "device", "subsystem_vendor", "subsystem_device")
    for name, number in zip(names, pci.ids.split(":"), strict=True):
        _put(here / name, f"0x{number}")
    _put(here / "class", pci.pci_class)
    _put(here / "numa_node", str(root.numa))
    _put(here / "local_cpulist", machine.cpus.near(root.numa))
    for prefix, generation in (
        ("max", pci.generation),
        ("current", pci.current_generation or pci.generation),
    ):
        known = generation > 0
        _put(here / f"{prefix}_link_speed", f"{SPEEDS[generation]} GT/s PCIe" if known else "Unknown")
        _put(here / f"{prefix}_link_width", str(pci.width) if known else "0")
    _link(here / "subsystem", sys / "bus/pci")
    _link(sys / "bus/pci/devices" / pci.busid, here)
    for child in pci.children:
        _write_pci(machine, sys, here, root, child)


def _write_nic(machine: FakeMachine, sys: Path, nic: Nic) -> None:
    device = (sys / "bus/pci/devices" / nic.busid).resolve() if nic.busid else None
    if nic.adapter and device:
        here = device / "infiniband" / nic.adapter
        port = here / "ports/1"
        _put(port / "state", "4: ACTIVE" if nic.up else "1: DOWN")
        _put(port / "phys_state", "5: LinkUp" if nic.up else "3: Disabled")
        _put(port / "rate", nic.rate)
        _put(port / "link_layer", nic.layer)
        _put(here / "node_guid", ":".join(machine.uuid(nic.adapter).split("-")[1:4]) + ":0000")
        (here / "device").symlink_to(f"../../../{nic.busid}")
        _link(sys / "class/infiniband" / nic.adapter, here)
    if nic.interface:
        here = (device or sys / "devices/virtual") / "net" / nic.interface
        infiniband = nic.adapter and nic.layer == "InfiniBand"
        loopback = nic.interface == "lo"
        _put(here / "type", "32" if infiniband else "772" if loopback else "1")
        _put(here / "operstate", "unknown" if loopback else "up" if nic.up else "down")
        if nic.megabits is None:
            (here / "speed").symlink_to(_UNREADABLE)
        else:
            _put(here / "speed", str(nic.megabits))
        if device:
            (here / "device").symlink_to(f"../../../{nic.busid}")
        _link(here / "subsystem", sys / "class/net")
        _link(sys / "class/net" / nic.interface, here)


def _write_nodes(machine: FakeMachine, nodes: Path) -> None:
    cpus = machine.cpus
    last = len(cpus.nodes) - 1
    _put(nodes / "online", f"0-{last}" if last else "0")
    for number, cpulist in enumerate(cpus.nodes):
        _put(nodes / f"node{number}" / "cpulist", cpulist)
        _put(nodes / f"node{number}" / "distance", " ".join(map(str, cpus.distances[number])))


def _write_cpus(machine: FakeMachine, folder: Path, proc: Path) -> None:
    cpus = machine.cpus
    _put(folder / "online", cpus.near(-1))
    vendors = {"GenuineIntel": "0000", "AuthenticAMD": "0002"}
    if cpus.vendor in vendors:
        kind = f"type:x86,ven{vendors[cpus.vendor]}fam{cpus.family:04X}mod{cpus.model:04X}"
        head = (
            f"vendor_id\t: {cpus.vendor}\ncpu family\t: {cpus.family}\nmodel\t\t: {cpus.model}\n"
            f"model name\t: {cpus.name}\n"
        )
    else:
        kind = "type:aarch64"
        head = (
            f"CPU implementer\t: 0x{cpus.family:02x}\nCPU architecture: 8\nCPU part\t: 0x{cpus.model:03x}\n"
        )
    _put(folder / "modalias", f"cpu:{kind}:feature:,0000,0001,0002,0003")
    _put(proc / "cpuinfo", "\n".join(f"processor\t: {number}\n{head}" for number in range(cpus.count())))
    _put(proc / "sys/kernel/random/boot_id", machine.uuid("boot"))

"""Read the PCIe tree, processors and NICs of this machine from Linux; infer the tree from the driver otherwise.

``root`` stands for ``/sys`` and ``proc`` beside it for ``/proc``, so that a container that sees the host's tree
elsewhere, or a test, can point at it. A file that cannot be read is None.

The bandwidth of a PCIe link is that of its lanes at the highest rate that both ends support: an idle GPU lowers its
rate and raises it again under load. Lanes do not come back by themselves, so the present width counts. Bridges above a
GPU or NIC alternate: a root port, the upstream port of a switch, a downstream port of it, and so on. Each has one link:
an upstream port, like a GPU, to the port above it; a root or downstream port to the device below it. So both ends
report a link, and nothing reports the inside of a switch. Bridges to PCI and PCI-X, which break the rule, are above
no GPU. The driver's code of each pair is used if the kernel's tree is not visible.

As in NCCL, plain network interfaces count only without RDMA devices: on a machine with InfiniBand they are for
management. Virtual interfaces and those slower than 10 Gb/s never count, nor do virtual functions (SR-IOV) beside the
NIC whose port they share.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from topoplan.machine.hardware import LANE, UNKNOWN_LANE, UNKNOWN_WIDTH
from topoplan.machine.host_topology import PciDevice
from topoplan.reading.pcie_tree import CODES, infer_pcie_tree
from topoplan.reading.probe_driver import Driver, DriverGpu
from topoplan.units import summed

_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_MODALIAS = re.compile(r"cpu:type:x86,ven([0-9A-F]{4})fam([0-9A-F]{4})mod([0-9A-F]{4})")
_VENDORS = {0: "GenuineIntel", 2: "AuthenticAMD", 5: "CentaurHauls", 9: "HygonGenuine", 10: "  Shanghai  "}
_ARCHITECTURES = {
    "x86_64": "x86_64",
    "amd64": "x86_64",
    "aarch64": "arm64",
    "arm64": "arm64",
    "ppc64le": "ppc64",
}


@dataclass(frozen=True, slots=True)
class SysfsDevice:
    """One PCI device; None and empty if the kernel does not state a value.

    ``parent`` is the bus id of the bridge above, empty directly below a ``host_bridge`` such as ``pci0000:00``.
    ``kind`` is the PCI class, such as ``0x030200``; ``chip`` is vendor, device, subsystem vendor and device, such as
    ``10de:1db1:10de:1212``. Speeds are in GT/s of a lane of the link to the parent, widths in its lanes.
    """

    busid: str
    parent: str
    host_bridge: str
    kind: str
    chip: str
    numa: int | None
    speed: float | None
    most_speed: float | None
    width: int | None
    most_width: int | None


@dataclass(slots=True)
class Sysfs:
    """A reader of the tree below ``root``, which stands for ``/sys``; ``unreadable`` lists files that failed."""

    root: Path
    unreadable: list[str] = field(default_factory=list)

    def text(self, path: Path) -> str | None:
        """Return the stripped content of a file; None if it is absent or cannot be read."""
        try:
            return path.read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:
            return None
        except OSError:
            # A directory in a file's place, no permission, or a driver that gives an error in place of a value.
            self.unreadable.append(str(path.relative_to(self.root.parent)))
            return None

    def names(self, path: Path) -> list[str]:
        """Return the sorted names in a folder; empty if it is absent or cannot be read."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []
        except OSError:
            self.unreadable.append(str(path.relative_to(self.root.parent)))
            return []

    def number(self, path: Path) -> int | None:
        """Return a whole number, decimal or ``0x…``; None if the file has none."""
        text = self.text(path) or ""
        return int(text, 0) if re.fullmatch(r"-?\d{1,9}|0x[0-9a-fA-F]{1,8}", text) else None

    def pci_devices(self) -> list[str]:
        return [name for name in self.names(self.root / "bus/pci/devices") if _BUS_ID.fullmatch(name)]

    def pci_device(self, path: Path) -> str:
        """Return the bus id of the PCI device that a link leads to; empty for a virtual device."""
        try:
            name = path.resolve(strict=True).name
        except (OSError, RuntimeError):
            return ""
        return name if _BUS_ID.fullmatch(name) else ""

    def chain(self, busid: str) -> list[SysfsDevice]:
        """Return a PCI device below its bridges, uppermost first; empty if the kernel does not know its place."""
        path = self.root / "bus/pci/devices" / busid
        try:
            folder = path.resolve(strict=True)
        except (OSError, RuntimeError):
            return []
        parts = folder.parts
        roots = [i for i, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)]
        if not roots or folder.name != busid:
            return []
        start = roots[-1] + 1
        devices: list[SysfsDevice] = []
        for end in range(start, len(parts)):
            if _BUS_ID.fullmatch(parts[end]):
                above = devices[-1].busid if devices else ""
                devices.append(self._device(Path(*parts[: end + 1]), above, parts[start - 1]))
        return devices

    def _device(self, folder: Path, parent: str, host_bridge: str) -> SysfsDevice:
        identity = [
            self.number(folder / name)
            for name in ("vendor", "device", "subsystem_vendor", "subsystem_device")
        ]
        numa = self.number(folder / "numa_node")
        return SysfsDevice(
            busid=folder.name,
            parent=parent,
            host_bridge=host_bridge,
            kind=self.text(folder / "class") or "",
            chip=":".join(f"{part or 0:04x}" for part in identity) if identity[0] is not None else "",
            numa=None if numa is None or numa < 0 else numa,
            speed=self._speed(folder / "current_link_speed"),
            most_speed=self._speed(folder / "max_link_speed"),
            width=self._width(folder / "current_link_width"),
            most_width=self._width(folder / "max_link_width"),
        )

    def _speed(self, path: Path) -> float | None:
        match = re.match(r"(\d+(?:\.\d+)?) GT/s", self.text(path) or "")
        return float(match[1]) if match else None

    def _width(self, path: Path) -> int | None:
        # Kernels write 0 or 255 for an absent link.
        width = self.number(path)
        return width if width and 0 < width <= 32 else None

    def numa_nodes(self) -> dict[int, str]:
        """Return NUMA nodes with their logical CPUs, such as ``0-19,40-59``; empty if the kernel lists none."""
        folder = self.root / "devices/system/node"
        numbers = sorted(int(name[4:]) for name in self.names(folder) if re.fullmatch(r"node\d{1,6}", name))
        return {number: self.text(folder / f"node{number}" / "cpulist") or "" for number in numbers}

    def processor(self) -> tuple[str, str, int, int]:
        """Return architecture, vendor, family and model of the CPUs; empty and 0 if unknown."""
        match = _MODALIAS.match(self.text(self.root / "devices/system/cpu/modalias") or "")
        if match:
            vendor, family, model = (int(part, 16) for part in match.groups())
            return "x86_64", _VENDORS.get(vendor, ""), family, model
        return _ARCHITECTURES.get(platform.machine().lower(), ""), "", 0, 0

    def processor_name(self) -> str:
        """Return a name such as ``Xeon E5-2698 v4``; empty if ``/proc/cpuinfo`` does not state it."""
        text = self.text(self.root.parent / "proc/cpuinfo") or ""
        match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        if not match:
            return ""
        name = re.sub(
            r"\((?:R|TM|r|tm)\)|\bCPU\b|\bProcessor\b|\b\d+-Core\b|@.*$|\bIntel\b|\bAMD\b", " ", match[1]
        )
        return " ".join(name.split())


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
    """A NIC, such as ``mlx5_0``.

    ``busid`` is empty if the kernel gives none. ``gigabits`` is Gb/s of its active ports together, None if unknown.
    ``active``: a port is up.
    """

    adapter: str
    busid: str
    gigabits: float | None
    active: bool


def find_nics(sysfs: Sysfs, *, slowest: float = SLOWEST) -> tuple[tuple[FoundNic, ...], tuple[str, ...]]:
    """Return NICs in natural order of their adapters' names, and notes; ``slowest`` is in Gb/s of an interface."""
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
    """Drop virtual functions of NICs that are in the list; a container may hold such a function alone."""
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
    """Return a physical network interface that is up and fast enough, else None."""
    folder = sysfs.root / "class/net" / name
    busid = sysfs.pci_device(folder / "device")
    if not busid or sysfs.text(folder / "operstate") in ("down", "notpresent"):
        return None
    megabits = sysfs.number(folder / "speed")
    if megabits is None or megabits <= 0 or megabits < 1000 * slowest:
        return None
    return FoundNic(name, busid, megabits / 1000, active=True)


def _natural(names: list[str]) -> list[str]:
    """Sort ``mlx5_2`` before ``mlx5_10``."""
    return sorted(
        names,
        key=lambda name: [
            (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)
        ],
    )


_GENERATIONS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}


@dataclass(frozen=True, slots=True)
class PcieSide:
    """PCI devices with GPUs and NICs among them, a bridge before the devices below it, and notes."""

    tree: tuple[PciDevice, ...]
    notes: tuple[str, ...]


def kernel_tree(
    chains: Mapping[str, list[SysfsDevice]], kinds: Mapping[str, str], driver: Driver, cpus: list[int]
) -> PcieSide:
    """Return the tree as the kernel shows it.

    ``chains`` hold for the bus id of each GPU and NIC its devices from the host bridge down, empty if the kernel has
    none; ``kinds`` are gpu or nic. The driver adds the GPUs' own links; ``cpus`` are NUMA nodes.
    """
    gpus = {gpu.busid: gpu for gpu in driver.gpus}
    found: dict[str, PciDevice] = {}
    notes: list[str] = []
    assumed: list[str] = []
    nodes = _numa_nodes(chains, gpus)
    for busid in sorted(chains, key=lambda one: [device.busid for device in chains[one]] or [one]):
        chain, gpu = chains[busid], gpus.get(busid)
        places = (chain[0].busid, chain[0].host_bridge) if chain else (busid,)
        numa = next((nodes[place] for place in places if place in nodes), None)
        cpu = numa if numa in cpus else cpus[0]
        if not chain:
            name = f"gpu{gpu.index}" if gpu is not None else busid
            notes.append(
                f"warning: {name} ({busid}) is not in the kernel's PCIe tree; assumed on a link of its own to its CPU"
            )
            width = (gpu.width if gpu is not None else None) or UNKNOWN_WIDTH
            found[busid] = PciDevice(busid, kinds[busid], "", cpu, width * _lane(None, None, gpu))
        for place, device in enumerate(chain):
            if device.busid not in found:
                kind = kinds[busid] if device is chain[-1] else "bridge" if place % 2 else "port"
                found[device.busid] = PciDevice(
                    busid=device.busid,
                    kind=kind,
                    parent=device.parent,
                    cpu=cpu,
                    bandwidth=_bandwidth(chain, place, gpus, notes, assumed),
                    chip=device.chip,
                    host_bridge=device.host_bridge,
                )
    if assumed:
        more = f" and {len(assumed) - 3} more" if len(assumed) > 3 else ""
        notes.append(f"PCIe rate not known, generation 3 assumed: {', '.join(assumed[:3])}{more}")
    return PcieSide(tuple(found.values()), tuple(notes))


def _numa_nodes(chains: Mapping[str, list[SysfsDevice]], gpus: Mapping[str, DriverGpu]) -> dict[str, int]:
    """Return NUMA nodes by the uppermost device of a chain, and by its host bridge for chains that state none."""
    nodes: dict[str, int] = {}
    for busid, chain in sorted(chains.items()):
        gpu = gpus.get(busid)
        stated = [*(device.numa for device in reversed(chain)), gpu.numa if gpu is not None else None]
        numa = next((node for node in stated if node is not None), None)
        if numa is not None:
            for place in (chain[0].busid, chain[0].host_bridge) if chain else (busid,):
                nodes.setdefault(place, numa)
    return nodes


def _bandwidth(
    chain: list[SysfsDevice],
    place: int,
    gpus: Mapping[str, DriverGpu],
    notes: list[str],
    assumed: list[str],
) -> float:
    """Return the GB/s of a device's link: of a port downwards, without notes, of any other to the port above."""
    if place % 2 == 0 and place + 1 < len(chain):
        return _bandwidth(chain, place + 1, gpus, [], [])
    device = chain[place]
    gpu = gpus.get(device.busid)
    port = chain[place - 1] if place % 2 else None
    most = [end.most_width for end in (device, port) if end is not None and end.most_width]
    widest = min(most) if most else None
    width = device.width or (gpu.width if gpu is not None else None) or widest or UNKNOWN_WIDTH
    if widest and width < widest:
        name = f"gpu{gpu.index}" if gpu is not None else f"PCIe device {device.busid}"
        notes.append(f"warning: {name}: its PCIe link runs at x{width}, both ends have x{widest}")
    rate = _lane(device, port, gpu)
    if not (
        device.most_speed
        or (port is not None and port.most_speed)
        or (gpu is not None and gpu.most_generation)
    ):
        assumed.append(device.busid)
    if (
        gpu is not None
        and not gpu.idle
        and gpu.generation in _GENERATIONS
        and LANE[_GENERATIONS[gpu.generation]] < rate
    ):
        rate = LANE[_GENERATIONS[gpu.generation]]
        notes.append(
            f"warning: gpu{gpu.index}: its PCIe link runs at generation {gpu.generation} under load, both ends "
            "support more"
        )
    return width * rate


def _lane(device: SysfsDevice | None, above: SysfsDevice | None, gpu: DriverGpu | None) -> float:
    """Return the GB/s of a lane at the highest rate that both ends support."""
    rates = [end.most_speed for end in (device, above) if end is not None and end.most_speed]
    if not rates and gpu is not None and gpu.most_generation in _GENERATIONS:
        rates = [_GENERATIONS[gpu.most_generation]]
    return LANE.get(min(rates), UNKNOWN_LANE) if rates else UNKNOWN_LANE


def driver_tree(driver: Driver) -> PcieSide:
    """Return the tree that the driver's common ancestors imply, for a container without the kernel's tree."""
    names = {gpu.index: gpu.busid for gpu in driver.gpus}
    distance = {(names[a], names[b]): CODES.index(code) for (a, b), code in driver.ancestors.items()}
    affinity = {gpu.busid: str(gpu.numa) for gpu in driver.gpus if gpu.numa is not None}
    tree = infer_pcie_tree(list(names.values()), distance, affinity=affinity)
    by_busid = {gpu.busid: gpu for gpu in driver.gpus}
    devices = []
    for child, parent in tree.parents.items():
        gpu = by_busid.get(child)
        width = gpu.most_width if gpu is not None else None
        bandwidth = _lane(None, None, gpu) * (width or UNKNOWN_WIDTH)
        above = parent if parent in tree.parents else ""
        kind = "gpu" if gpu is not None else "bridge"
        devices.append(PciDevice(child, kind, above, int(tree.root(child).removeprefix("cpu")), bandwidth))
    note = "the kernel's PCIe tree is not visible here: placed by the driver's common ancestor of each pair"
    return PcieSide(tuple(devices), (note, *tree.notes))

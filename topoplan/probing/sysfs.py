"""The PCIe tree and the processors as Linux lists them under ``/sys``; a file that cannot be read is None.

``root`` stands for ``/sys``, so that a container that sees the host's tree elsewhere, and a test, can point at it;
``proc`` beside it stands for ``/proc``.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass, field
from pathlib import Path

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
    """One PCI device; None and empty where the kernel does not say.

    Parameters
    ----------
    busid : str
    parent : str
        Bus id of the bridge above; empty directly below a host bridge.
    host_bridge : str
        Such as ``pci0000:00``.
    kind : str
        PCI class, six hexadecimal digits such as ``0x030200``.
    chip : str
        Vendor, device, subsystem vendor and device, such as ``10de:1db1:10de:1212``.
    numa : int or None
    speed, most_speed : float or None
        GT/s of a lane of the link to what is above, now and at most.
    width, most_width : int or None
        Lanes of it.
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
    """A reader of the tree below ``root``.

    Parameters
    ----------
    root : Path
        Stands for ``/sys``.
    unreadable : list of str
        Files that are there and could not be read, in the order of the attempts.
    """

    root: Path
    unreadable: list[str] = field(default_factory=list)

    def text(self, path: Path) -> str | None:
        """Content of a file without white space around it; None if it is absent or cannot be read."""
        try:
            return path.read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:
            return None
        except OSError:
            # A directory in a file's place, no permission, or a driver that gives an error in place of a value.
            self.unreadable.append(str(path.relative_to(self.root.parent)))
            return None

    def names(self, path: Path) -> list[str]:
        """Sorted names in a folder; empty if it is absent or cannot be read."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []
        except OSError:
            self.unreadable.append(str(path.relative_to(self.root.parent)))
            return []

    def number(self, path: Path) -> int | None:
        """A whole number, decimal or ``0x…``; None where there is none."""
        text = self.text(path) or ""
        return int(text, 0) if re.fullmatch(r"-?\d{1,9}|0x[0-9a-fA-F]{1,8}", text) else None

    def pci_devices(self) -> list[str]:
        """Bus ids of all PCI devices."""
        return [name for name in self.names(self.root / "bus/pci/devices") if _BUS_ID.fullmatch(name)]

    def pci_device(self, path: Path) -> str:
        """Bus id of the PCI device that a link leads to; empty where it leads to none, as that of a virtual device."""
        try:
            name = path.resolve(strict=True).name
        except (OSError, RuntimeError):
            return ""
        return name if _BUS_ID.fullmatch(name) else ""

    def chain(self, busid: str) -> list[SysfsDevice]:
        """A PCI device with the bridges above it, uppermost first; empty if the kernel does not know where it is."""
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
        # Kernels write 0 or 255 for a link that is not there.
        width = self.number(path)
        return width if width and 0 < width <= 32 else None

    def numa_nodes(self) -> dict[int, str]:
        """NUMA nodes with the list of their logical CPUs, such as ``0-19,40-59``; empty if the kernel lists none."""
        folder = self.root / "devices/system/node"
        numbers = sorted(int(name[4:]) for name in self.names(folder) if re.fullmatch(r"node\d{1,6}", name))
        return {number: self.text(folder / f"node{number}" / "cpulist") or "" for number in numbers}

    def processor(self) -> tuple[str, str, int, int]:
        """Architecture, vendor, family and model of the CPUs; empty and 0 where unknown."""
        match = _MODALIAS.match(self.text(self.root / "devices/system/cpu/modalias") or "")
        if match:
            vendor, family, model = (int(part, 16) for part in match.groups())
            return "x86_64", _VENDORS.get(vendor, ""), family, model
        return _ARCHITECTURES.get(platform.machine().lower(), ""), "", 0, 0

    def processor_name(self) -> str:
        """Such as ``Xeon E5-2698 v4``; empty where ``/proc/cpuinfo`` does not say."""
        text = self.text(self.root.parent / "proc/cpuinfo") or ""
        match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        if not match:
            return ""
        name = re.sub(
            r"\((?:R|TM|r|tm)\)|\bCPU\b|\bProcessor\b|\b\d+-Core\b|@.*$|\bIntel\b|\bAMD\b", " ", match[1]
        )
        return " ".join(name.split())

"""Small machines as NCCL and RCCL describe them, written here in the shape of real files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

BROADWELL = {"arch": "x86_64", "vendor": "GenuineIntel", "familyid": "6", "modelid": "79"}
ROME = {"arch": "x86_64", "vendor": "AuthenticAMD", "familyid": "143", "modelid": "49"}

GPU, NIC, BRIDGE, NVSWITCH = "0x030200", "0x020700", "0x060400", "0x068000"

HIDDEN = "fffffff:ffff:ff"  # what NCCL writes for a far end that a virtual machine cannot see


def element(tag: str, /, *children: str, **attributes: object) -> str:
    """An element in one line for each of its children; an attribute of None is left out."""
    words = [tag, *(f'{key}="{value}"' for key, value in attributes.items() if value is not None)]
    start = f"<{' '.join(words)}"
    if not children:
        return f"{start}/>"
    return "\n".join([f"{start}>", *children, f"</{tag}>"])


def bus(number: int) -> str:
    return f"0000:{number + 6:02x}:00.0"


def pci(busid: str, *children: str, device: str = GPU, **attributes: object) -> str:
    """A device on PCIe of generation 3 with 16 lanes."""
    link = {"link_speed": "8 GT/s", "link_width": 16}
    return element("pci", *children, **{"busid": busid, "class": device} | link | attributes)


def nvlink(target: str, count: int, tclass: str = GPU, tag: str = "nvlink", **attributes: object) -> str:
    return element(tag, **{"target": target, "count": count, "tclass": tclass} | attributes)


def gpu_pci(number: int, *links: str, place: Mapping[str, object] | None = None, **attributes: object) -> str:
    """GPU ``number`` with its links; ``place`` are more attributes of its ``pci`` element."""
    own = {"dev": number, "sm": 70, "rank": number, "gdr": 1} | attributes
    return pci(bus(number), element("gpu", *links, **own), **(place or {}))


def nic_pci(busid: str, adapter: str, dev: int | None, speed: object = 100_000, **attributes: object) -> str:
    net = element("net", name=adapter, dev=dev, speed=speed, port=1)
    return pci(busid, element("nic", net), device=NIC, **attributes)


def system(*cpus: str, version: object = 1, **attributes: object) -> str:
    return element("system", *cpus, **{"version": version} | attributes)


def cpu(numa: object, *children: str, **attributes: object) -> str:
    """A NUMA node of a Broadwell machine."""
    return element("cpu", *children, **{"numaid": numa} | BROADWELL | attributes)


def machine(
    gpus: int,
    wires: Mapping[tuple[int, int], int],
    *,
    switched: int = 0,
    nics: int = 0,
    cpus: int = 2,
    **attributes: object,
) -> str:
    """GPUs in pairs under PCIe switches, spread over CPUs, with direct NVLinks and links to a hidden switch."""
    switches = []
    for first in range(0, gpus, 2):
        below = []
        for number in range(first, min(first + 2, gpus)):
            pairs = {(b if a == number else a): count for (a, b), count in wires.items() if number in (a, b)}
            links = [nvlink(bus(other), count) for other, count in sorted(pairs.items())]
            links += [nvlink(HIDDEN, switched, NVSWITCH)] if switched else []
            below.append(gpu_pci(number, *links, **attributes))
        if first // 2 < nics:
            below.append(nic_pci(f"0000:{0x40 + first:02x}:00.0", f"mlx5_{first // 2}", first // 2))
        switches.append(pci(f"0000:{0x80 + first:02x}:00.0", *below, device=BRIDGE))
    share = -(-len(switches) // cpus)
    return system(*(cpu(i, *switches[i * share : (i + 1) * share]) for i in range(cpus)))


def only(*children: str, **attributes: object) -> str:
    return system(cpu(0, *children), **attributes)


def pair(*links: str, other: Sequence[str] = (), **attributes: object) -> str:
    """Two GPUs on one CPU, the first with these links; ``other`` are those of the second."""
    return only(gpu_pci(0, *links, **attributes), gpu_pci(1, *other, **attributes))

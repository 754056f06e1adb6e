"""What a topology file of NCCL does not say, what was assumed for it, and where NCCL will count with other figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction

from topoplan.export.nccl.cpu_identity import CpuIdentity
from topoplan.export.nccl.host_tree import HostTree
from topoplan.hosts.gpu_identity import GpuIdentity
from topoplan.hosts.nccl_rates import counted_bandwidth, nearest_pcie, nvlink_bandwidth, xgmi_bandwidth
from topoplan.hosts.notes import listed
from topoplan.hosts.nvlink_ends import SWITCH
from topoplan.topology import Device, Topology
from topoplan.units import exact

_KEPT_FACTS = {
    "gpu": {"gcn", "pci", "sm"},
    "cpu": {"arch", "cpus", "family", "model", "vendor"},
    "nic": {"adapter", "gigabits", "pci"},
    "pcie": {"pci"},
}
_SERVER = "s0"


def topology_notes(
    machine: Topology,
    tree: HostTree,
    *,
    gpus: Mapping[str, GpuIdentity],
    cpus: Mapping[str, CpuIdentity],
    nodes: Mapping[str, int],
    invented: Iterable[str],
) -> tuple[str, ...]:
    """One line for each thing that the reader of the file should know.

    Parameters
    ----------
    machine : Topology
    tree : HostTree
    gpus, cpus : mapping of str to identity
        By name of the device.
    nodes : mapping of str to int
        NUMA node of each CPU in the file.
    invented : iterable of str
        Names of devices whose bus id is.
    """
    made_up = set(invented)
    return (
        *tree.notes,
        *_bus_id_notes([device for device in machine.devices if device.name in made_up]),
        *_guess_notes(gpus),
        *_driver_notes(machine, gpus),
        *_rate_notes(machine, tree, gpus, cpus),
        *_unsaid_notes(machine, tree, nodes),
    )


def _bus_id_notes(devices: list[Device]) -> list[str]:
    if not any(device.kind == "gpu" for device in devices):
        return []
    return [
        f"bus ids are invented for {listed(device.name for device in devices)}: NCCL finds GPUs by bus id, so put in "
        "those of nvidia-smi before a run"
    ]


def _guess_notes(gpus: Mapping[str, GpuIdentity]) -> list[str]:
    guessed = [name for name, identity in gpus.items() if identity.guessed]
    if not guessed:
        return []
    gcn = gpus[guessed[0]].gcn
    if gcn:
        return [f"gcn {gcn} is assumed for {listed(guessed)}, whose model does not tell"]
    return [f"sm is left to the driver, whom NCCL asks, for {listed(guessed)}, whose model does not tell"]


def _driver_notes(machine: Topology, gpus: Mapping[str, GpuIdentity]) -> list[str]:
    """NCCL takes the NVLinks of a GPU from the file or from the driver, and cannot be told that there are none."""
    joined = {link.src for link in machine.links if link.channel == "nvlink"}
    bare = [name for name in gpus if name not in joined]
    return [f"NCCL asks the driver for NVLinks of {listed(bare)}, as none are stated here"] if bare else []


def _rate_notes(
    machine: Topology, tree: HostTree, gpus: Mapping[str, GpuIdentity], cpus: Mapping[str, CpuIdentity]
) -> list[str]:
    counted: dict[str, list[str]] = {}

    def compare(what: str, stated: Fraction, own: Fraction, place: str) -> None:
        if stated != own:
            line = f"NCCL counts {float(own):g} GB/s for {what}, where the machine states {float(stated):g}"
            counted.setdefault(line, []).append(place)

    for link in machine.links:
        if link.channel == "nvlink" and link.src in gpus:
            identity = gpus[link.src]
            if identity.guessed and not identity.gcn:
                continue
            own = xgmi_bandwidth(identity.gcn) if identity.gcn else nvlink_bandwidth(identity.capability)
            what = "an XGMI link" if identity.gcn else "an NVLink"
            compare(what, exact(link.bandwidth) / link.count, exact(own), link.src)
    for name, bandwidth in tree.bandwidth.items():
        compare("the PCIe link", exact(bandwidth), counted_bandwidth(*nearest_pcie(bandwidth)), name)
    for name, rate in tree.socket.items():
        compare("the way to another CPU", exact(rate), exact(cpus[name].rate), name)
    return [f"{line}: {listed(dict.fromkeys(places))}" for line, places in counted.items()]


def _unsaid_notes(machine: Topology, tree: HostTree, nodes: Mapping[str, int]) -> list[str]:
    unsaid: dict[str, list[str]] = {}
    for device in machine.devices:
        for key, _ in device.facts:
            if key not in _KEPT_FACTS.get(device.kind, ()):
                unsaid.setdefault(f"fact {key}", []).append(device.name)
        if device.kind == "nvswitch" and (device.name, device.model, device.busid) != (
            SWITCH,
            "NVSwitch",
            "",
        ):
            unsaid.setdefault(f"name, model and bus id of an NVSwitch, which is read as {SWITCH}", []).append(
                device.name
            )
        placed = device.kind in ("gpu", "nic") and device.name in tree.above and device.numa is not None
        if placed and nodes[tree.cpu_of(device.name)] != device.numa:
            unsaid.setdefault("a NUMA node that is not that of the CPU above", []).append(device.name)
        if device.kind == "pcie" and device.numa is not None:
            unsaid.setdefault("the NUMA node of a switch", []).append(device.name)
    for link in machine.links:
        if link.latency is not None:
            unsaid.setdefault("latency", []).append(f"{link.src}->{link.dst}")
        if link.channel == "c2c" and link.count > 1:
            unsaid.setdefault("the number of c2c links, which are read as one", []).append(link.src)
    notes = [f"not in the file: {what}: {listed(dict.fromkeys(places))}" for what, places in unsaid.items()]
    if machine.servers and machine.servers != (_SERVER,):
        notes.append(f"not in the file: the name of server {machine.servers[0]}, which is read as {_SERVER}")
    return notes

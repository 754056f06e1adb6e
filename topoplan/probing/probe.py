"""``topoplan.probe()``: the machine that this process runs on, from what its driver and kernel say."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from topoplan.errors import ProbeError, TopologyError, UsageError
from topoplan.hosts.build import host_topology
from topoplan.hosts.host import Host, HostCpu, HostGpu, HostNic
from topoplan.hosts.link_rates import SOCKET
from topoplan.hosts.nccl_rates import socket_bandwidth
from topoplan.hosts.notes import listed
from topoplan.hosts.staging import without_peer_access
from topoplan.probing.access import barred_gpus, refused_access
from topoplan.probing.cache import cache_file, read_cache, write_cache
from topoplan.probing.driver import Driver, read_driver
from topoplan.probing.nics import MODELS, FoundNic, find_nics
from topoplan.probing.nvlinks import nvlink_bundles
from topoplan.probing.pcie import driver_tree, kernel_tree
from topoplan.probing.sysfs import Sysfs, SysfsDevice
from topoplan.probing.visible import visible
from topoplan.topology import Topology, facts

SYSFS_ROOT = "TOPOPLAN_SYSFS_ROOT"
"""Environment variable that names the folder to read in place of ``/sys``."""


def probe(*, sysfs_root: str | os.PathLike[str] | None = None, refresh: bool = False) -> Topology:
    """Read this machine: GPUs and NVLinks from the NVIDIA driver, PCIe, CPUs and NICs from Linux.

    The GPUs are those that CUDA shows this process (``CUDA_VISIBLE_DEVICES``), in its order; ``gpu<n>`` bears the
    driver's number. The result is kept in the user's cache folder for a day, or for ten minutes if it has a warning, as
    long as the machine is not started again and neither driver nor devices change.

    Parameters
    ----------
    sysfs_root : path, optional
        Folder to read in place of ``/sys``, with ``proc`` beside it (default: ``TOPOPLAN_SYSFS_ROOT``, else ``/sys``).
    refresh : bool
        Read the machine even if a kept probe is there.

    Returns
    -------
    Topology
        Its ``notes`` say what is amiss (``warning: …``) and what was assumed.

    Raises
    ------
    UsageError
        The folder is not there.
    ProbeError
        No driver, no GPU, or no nvidia-ml-py; the message says what to install or to give instead.
    """
    return visible(probe_host(sysfs_root=sysfs_root, refresh=refresh), os.environ)


def probe_host(*, sysfs_root: str | os.PathLike[str] | None = None, refresh: bool = False) -> Topology:
    """As `probe`, but with all GPUs that the driver shows, whatever ``CUDA_VISIBLE_DEVICES`` says.

    For jobs in which each process of a host sees a GPU of its own: one of them reads the machine for all.
    """
    sysfs = host_sysfs(sysfs_root)
    kept = cache_file(sysfs)
    topology = None if refresh else read_cache(kept)
    if topology is None:
        sysfs.unreadable.clear()
        driver = read_driver()
        try:
            made = host_topology(describe(driver, sysfs, platform.node() or "this machine"))
            topology = without_peer_access(made)
        except TopologyError as error:
            raise ProbeError(
                f"what driver and kernel say does not fit together: {error}; give a file instead, and report this"
            ) from None
        write_cache(kept, topology)
    return topology


def host_sysfs(sysfs_root: str | os.PathLike[str] | None = None) -> Sysfs:
    """A reader of the folder that stands for ``/sys``.

    Raises
    ------
    UsageError
        The folder is not there.
    """
    named = os.environ.get(SYSFS_ROOT) or None if sysfs_root is None else sysfs_root
    if named is not None and not os.path.isdir(named):
        raise UsageError(
            f"{os.fspath(named)!r} is no folder to read in place of /sys; name one, or leave --sysfs-root and "
            f"{SYSFS_ROOT} out"
        )
    return Sysfs(Path(named or "/sys").absolute())


_BROADWELL = ("GenuineIntel", 6, 79)
_NVSWITCH, _DISPLAY, _NVIDIA = "0x0680", "0x03", "10de:"


def describe(driver: Driver, sysfs: Sysfs, name: str) -> Host:
    """The server as a `Host`, with a note for everything that is amiss or assumed."""
    chains = {gpu.busid: sysfs.chain(gpu.busid) for gpu in driver.gpus}
    switches, others = _nvidia_devices(sysfs, set(chains))
    bundles, nvlink_notes = nvlink_bundles(driver, switches, others)
    visible = any(chains.values())
    nics, nic_notes = (
        find_nics(sysfs) if visible else ((), ("no NIC is looked for without the kernel's PCIe tree",))
    )
    places = chains | {nic.busid: sysfs.chain(nic.busid) for nic in nics} if visible else {}
    cpus = _numa_nodes(sysfs, places)
    if visible:
        kinds = dict.fromkeys(chains, "gpu") | {nic.busid: "nic" for nic in nics}
        side = kernel_tree(places, kinds, driver, list(cpus))
    else:
        side = driver_tree(driver)
    used = sorted({device.cpu for device in side.tree})
    barred = barred_gpus(driver)
    access = refused_access(driver, bundles, {device.busid: device.cpu for device in side.tree})
    fabric = [f"warning: gpu{gpu.index}: NVLink fabric: {gpu.fabric}" for gpu in driver.gpus if gpu.fabric]
    return Host(
        name=name,
        cpus=_cpus(driver, sysfs, {number: cpus.get(number, "") for number in used}),
        tree=side.tree,
        gpus=tuple(
            HostGpu(
                busid=gpu.busid,
                number=gpu.index,
                model=gpu.name,
                nvlinks=bundles[gpu.busid],
                c2c=gpu.c2c,
                facts=facts(
                    sm=gpu.sm,
                    uuid=gpu.uuid,
                    mig=",".join(gpu.mig or ()),
                    peer_access="none" if gpu.index in barred else None,
                ),
            )
            for gpu in driver.gpus
        ),
        nics=_nics(nics, places),
        source=(
            f"probed: NVIDIA driver {driver.version or 'of unknown version'} and {sysfs.root}; NVLink nominal by "
            "generation, PCIe by lanes and rate as NCCL counts them, CPUs as NCCL has them"
        ),
        notes=(
            *driver.notes,
            *nvlink_notes,
            *fabric,
            *access,
            *side.notes,
            *_homeless(driver, places, cpus),
            *nic_notes,
            *_unreadable(sysfs),
        ),
    )


def _numa_nodes(sysfs: Sysfs, places: Mapping[str, list[SysfsDevice]]) -> dict[int, str]:
    """NUMA nodes with their logical CPUs; where the kernel lists none, those that devices name, and else node 0."""
    named = {device.numa for chain in places.values() for device in chain if device.numa is not None}
    return sysfs.numa_nodes() or dict.fromkeys(sorted(named) or (0,), "")


def _homeless(
    driver: Driver, places: Mapping[str, list[SysfsDevice]], cpus: Mapping[int, str]
) -> tuple[str, ...]:
    """A note on devices in the kernel's tree whose NUMA node is not told, on a machine with several."""
    gpus = {gpu.busid: gpu for gpu in driver.gpus}
    unknown = []
    for busid, chain in places.items():
        gpu = gpus.get(busid)
        nodes = {device.numa for device in chain} | {gpu.numa if gpu is not None else None}
        if chain and not nodes & cpus.keys():
            unknown.append(busid if gpu is None else f"gpu{gpu.index}")
    if len(cpus) < 2 or not unknown:
        return ()
    return (f"the NUMA node of {listed(unknown)} is not told; node {min(cpus)} taken, as NCCL takes node 0",)


def _unreadable(sysfs: Sysfs) -> tuple[str, ...]:
    if not sysfs.unreadable:
        return ()
    files = [path.split("/")[-2:] for path in dict.fromkeys(sysfs.unreadable)]
    names = listed(("/".join(parts) for parts in files), noun="files")
    return (
        f"warning: files of {sysfs.root} or of proc beside it cannot be read: {names}; what they hide is assumed",
    )


def _nvidia_devices(sysfs: Sysfs, shown: set[str]) -> tuple[list[str], list[str]]:
    """Bus ids of the NVSwitch chips, and of GPUs that the driver does not show, as in a container."""
    switches, others = [], []
    for busid in sysfs.pci_devices():
        folder = sysfs.root / "bus/pci/devices" / busid
        if busid in shown or sysfs.text(folder / "vendor") != "0x10de":
            continue
        kind = sysfs.text(folder / "class") or ""
        if kind.startswith(_NVSWITCH):
            switches.append(busid)
        elif kind.startswith(_DISPLAY):
            others.append(busid)
    return switches, others


def _cpus(driver: Driver, sysfs: Sysfs, cpus: dict[int, str]) -> tuple[HostCpu, ...]:
    arch, vendor, family, model = sysfs.processor()
    bandwidth = socket_bandwidth(arch, vendor, family, model)
    newest = max((gpu.sm or 0 for gpu in driver.gpus), default=0)
    if (vendor, family, model) == _BROADWELL and newest >= 70:
        # Measured on a DGX-1 with V100 (Blink, MLSys 2020, figures 14 and 16); with P100 NCCL's 6 GB/s agree (15).
        bandwidth = SOCKET["Broadwell, older NCCL"]
    known = facts(arch=arch, vendor=vendor, family=family or None, model=model or None)
    name = sysfs.processor_name()
    return tuple(
        HostCpu(number, bandwidth, name, facts(**dict(known) | {"cpus": logical}), f"cpu{number}")
        for number, logical in cpus.items()
    )


def _nics(nics: tuple[FoundNic, ...], chains: dict[str, list[SysfsDevice]]) -> tuple[HostNic, ...]:
    found = []
    for nic in nics:
        chip = chains[nic.busid][-1].chip if chains.get(nic.busid) else ""
        model = MODELS.get(":".join(chip.split(":")[:2]), "")
        speed = f"{nic.gigabits:g}" if nic.gigabits else ""
        text = " ".join(part for part in (model, f"{speed} Gb/s" if speed else "") if part)
        found.append(HostNic(nic.busid, text, facts(adapter=nic.adapter, gigabits=speed)))
    return tuple(found)

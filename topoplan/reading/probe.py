"""Probe the machine that this process runs on (``topoplan.probe()``), from its driver and kernel.

The last probe is cached in the user's cache folder, since a training job probes at every start. A cached probe counts
only for the same machine in the same state: same boot, driver, PCI devices, NICs with a link, MIG instances, and GPUs
that this process may open (a scheduler gives each job its own, although the device files of all of them exist). All
of that is read from ``/sys``, ``/proc`` and ``/dev`` in milliseconds; queries of the driver take up to seconds. A link
can die while a machine runs, so a cached probe expires after a day, and one with a warning after minutes: a driver
that did not answer, or a fabric that was not ready, may have recovered by then.

``CUDA_VISIBLE_DEVICES`` restricts the machine to the GPUs that it names, in its order, up to the first unknown one.
CUDA numbers devices from the fastest down unless ``CUDA_DEVICE_ORDER`` is ``PCI_BUS_ID``; equal GPUs come in the
order of their bus ids, which is the driver's. UUIDs, also shortened ones and those of MIG instances, identify one GPU
anywhere. The first entry decides whether numbers, GPUs or MIG instances are named; an entry of another kind ends the
list, and a repeated entry empties it. A number ends at its last digit (``torch.cuda`` reads the variable likewise).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from topoplan.errors import ProbeError, TopologyError, UsageError, kind_of
from topoplan.machine.hardware import SOCKET, socket_bandwidth
from topoplan.machine.host_topology import Host, HostCpu, HostGpu, HostNic, host_topology
from topoplan.machine.routing import without_peer_access
from topoplan.machine.topology import Device, Topology, facts, without_named
from topoplan.machine.topology_json import parse_topology_json
from topoplan.private_files import cache_directory, open_private, write_private
from topoplan.reading.probe_devices import (
    MODELS,
    FoundNic,
    Sysfs,
    SysfsDevice,
    driver_tree,
    find_nics,
    kernel_tree,
)
from topoplan.reading.probe_driver import Driver, read_driver
from topoplan.reading.probe_nvlinks import (
    gpus_without_peer_access,
    nvlink_bundles,
    refused_access,
    refused_peers,
)
from topoplan.units import check_type, listed

MOST_AGE = 24 * 3600.0
"""Seconds after which a cached probe expires."""

MOST_AGE_AMISS = 600.0
"""Seconds after which a cached probe with a warning expires."""

_VERSION = "1"
"""Changed when a probe of the same machine would have another result."""


def cache_file(sysfs: Sysfs) -> Path | None:
    """Return the file that caches the probe of this machine and state; None without a boot id or a home folder."""
    boot = sysfs.text(sysfs.root.parent / "proc/sys/kernel/random/boot_id")
    if not boot:
        return None
    parts = [_VERSION, str(sysfs.root), platform.node(), boot]
    parts.append(sysfs.text(sysfs.root / "module/nvidia/version") or "")
    parts += sysfs.pci_devices()
    parts += map(repr, find_nics(sysfs))
    parts += mig_instances(sysfs)
    parts += device_files("/dev")
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
    folder = cache_directory()
    return folder / f"probe-{digest}.json" if folder else None


def device_files(folder: str) -> list[str]:
    """Return the NVIDIA device files that this process may open: a batch system shows each job only its GPUs."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    return [
        name
        for name in names
        if re.fullmatch(r"nvidia(\d+|ctl|-caps.*|-uvm)", name)
        and os.access(os.path.join(folder, name), os.R_OK | os.W_OK)
    ]


def mig_instances(sysfs: Sysfs) -> list[str]:
    """Return the MIG instances of all GPUs, such as ``gpu0 gi1 ci0``, as the driver lists them in ``/proc``."""
    gpus = sysfs.root.parent / "proc/driver/nvidia/capabilities"
    return [
        f"{gpu} {instance} {part}"
        for gpu in sysfs.names(gpus)
        if gpu.startswith("gpu")
        for instance in sysfs.names(gpus / gpu / "mig")
        for part in ("", *sysfs.names(gpus / gpu / "mig" / instance))
    ]


def read_cache(path: Path | None) -> Topology | None:
    """Return a cached probe that has not expired, can be parsed, and belongs to this user, else None."""
    if path is None:
        return None
    try:
        with open_private(path) as file:
            written = os.fstat(file.fileno()).st_mtime
            topology = parse_topology_json(file.read().decode())
    except (OSError, UnicodeError, TopologyError):
        return None
    amiss = any(kind_of(note) == "warning" for note in topology.notes)
    # A clock that was set back makes an age below zero.
    young = 0 <= time.time() - written <= (MOST_AGE_AMISS if amiss else MOST_AGE)
    return topology if young else None


def write_cache(path: Path | None, topology: Topology) -> None:
    """Cache a probe atomically and delete expired ones; do nothing if the folder is not writable."""
    if path is None:
        return
    with contextlib.suppress(OSError):
        write_private(path, topology.to_json().encode())
        for other in path.parent.glob("probe-*"):
            if time.time() - other.stat().st_mtime > MOST_AGE:
                other.unlink()


def visible_devices(topology: Topology, environment: Mapping[str, str]) -> Topology:
    """Return the machine with the GPUs that CUDA would show a process of this environment; a ProbeError if none."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return topology
    gpus = [topology.device(name) for name in topology.gpus]
    words = _words(named.strip())
    twice = len(set(words)) < len(words)
    chosen: list[Device] = []
    for word in () if twice else words:
        gpu = _matching_gpu(word, gpus)
        if gpu is None or gpu in chosen:
            break
        chosen.append(gpu)
    if not chosen:
        why = ", since it names one twice" if twice else ""
        raise ProbeError(
            f"CUDA_VISIBLE_DEVICES={named[:60]!r} leaves none of the {len(gpus)} GPUs{why}; unset it to see all"
        )
    notes = [f"CUDA_VISIBLE_DEVICES={_printable(named)} shows {len(chosen)} of {len(gpus)} GPUs"]
    if (
        words[0].isdigit()
        and len({gpu.model for gpu in gpus}) > 1
        and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    ):
        notes.append(
            "warning: GPUs differ, and CUDA counts the fastest first; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    left = without_named(topology, (gpu.name for gpu in gpus if gpu not in chosen), *notes)
    return replace(left, devices=(*chosen, *(device for device in left.devices if device.kind != "gpu")))


def _words(named: str) -> list[str]:
    """Return the leading entries of the variable that are numbers, or identities of one kind."""
    kind = re.match(r"GPU-|MIG-", named)
    pattern = rf"\s*({kind[0]}\S*)" if kind else r"\s*\+?([0-9]{1,9})"
    found = [re.match(pattern, word) for word in named.split(",")]
    leading = takewhile(lambda match: match is not None, found)
    return [match[1] if kind else str(int(match[1])) for match in leading if match]


def _printable(named: str) -> str:
    text = "".join(letter if letter.isprintable() else "?" for letter in named[:60])
    return text + "…" * (len(named) > 60)


def _matching_gpu(word: str, gpus: list[Device]) -> Device | None:
    if word.isdigit():
        return gpus[int(word)] if int(word) < len(gpus) else None
    # Older drivers name an instance MIG-GPU-<uuid of the GPU>/<GPU instance>/<compute instance>.
    whole = word.removeprefix("MIG-").split("/")[0] if word.startswith("MIG-GPU-") else word
    found = [
        gpu
        for gpu in gpus
        if gpu.fact("uuid").startswith(whole)
        or any(one.startswith(word) for one in gpu.fact("mig").split(","))
    ]
    return found[0] if len(found) == 1 else None


SYSFS_ROOT = "TOPOPLAN_SYSFS_ROOT"
"""Environment variable that names the folder to read in place of ``/sys``."""


def probe(*, sysfs_root: str | os.PathLike[str] | None = None, refresh: bool = False) -> Topology:
    """Probe this machine: GPUs and NVLinks from the NVIDIA driver, PCIe, CPUs and NICs from Linux.

    The GPUs are the ones that CUDA shows this process (``CUDA_VISIBLE_DEVICES``), in its order; ``gpu<n>`` bears the
    driver's number. The result is cached in the user's cache folder for a day, or for ten minutes if it has a warning,
    until the machine is booted again or its driver or devices change.

    Parameters
    ----------
    sysfs_root : path, optional
        Folder to read in place of ``/sys``, with ``proc`` beside it (default: ``TOPOPLAN_SYSFS_ROOT``, else ``/sys``).
    refresh : bool
        Probe the machine even if a cached probe exists.

    Returns
    -------
    Topology
        Its ``notes`` list faults (``warning: …``) and assumptions.

    Raises
    ------
    UsageError
        The folder does not exist.
    ProbeError
        No driver, no GPU, or no nvidia-ml-py; the message says what to install or to give instead.

    See Also
    --------
    topoplan.load, topoplan.check
    """
    return visible_devices(probe_host(sysfs_root=sysfs_root, refresh=refresh), os.environ)


def probe_host(*, sysfs_root: str | os.PathLike[str] | None = None, refresh: bool = False) -> Topology:
    """Probe this machine with all GPUs that the driver shows, regardless of ``CUDA_VISIBLE_DEVICES``.

    For jobs in which each process of a host sees a GPU of its own: one of them reads the machine for all.
    """
    sysfs = host_sysfs(sysfs_root)
    cached = cache_file(sysfs)
    topology = None if refresh else read_cache(cached)
    if topology is None:
        sysfs.unreadable.clear()
        driver = read_driver()
        try:
            host = describe_host(driver, sysfs, platform.node() or "this machine")
            topology = without_peer_access(host_topology(host))
        except TopologyError as error:
            raise ProbeError(
                f"driver and kernel contradict each other: {error}; give a file instead, and report this"
            ) from None
        write_cache(cached, topology)
    return topology


def host_sysfs(sysfs_root: str | os.PathLike[str] | None = None) -> Sysfs:
    """Return a reader of the folder that stands for ``/sys``; a UsageError if it does not exist."""
    check_type("sysfs_root", sysfs_root, str, os.PathLike, type(None), remedy="name a folder")
    named = os.environ.get(SYSFS_ROOT) or None if sysfs_root is None else sysfs_root
    if named is not None and not os.path.isdir(named):
        raise UsageError(
            f"{os.fspath(named)!r} is not a folder to read in place of /sys; name one, or leave --sysfs-root and "
            f"{SYSFS_ROOT} out"
        )
    return Sysfs(Path(named or "/sys").absolute())


_BROADWELL = ("GenuineIntel", 6, 79)
_NVSWITCH, _DISPLAY, _NVIDIA = "0x0680", "0x03", "10de:"


def describe_host(driver: Driver, sysfs: Sysfs, name: str) -> Host:
    """Return the server as a `Host`, with a note for every fault and assumption."""
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
    barred = gpus_without_peer_access(driver)
    refused = refused_peers(driver, bundles)
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
                    refused=",".join(f"gpu{peer}" for peer in refused.get(gpu.index, ())),
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
            *_unknown_numa_notes(driver, places, cpus),
            *nic_notes,
            *_unreadable_file_notes(sysfs),
        ),
    )


def _numa_nodes(sysfs: Sysfs, places: Mapping[str, list[SysfsDevice]]) -> dict[int, str]:
    """Return NUMA nodes with their logical CPUs; if the kernel lists none, the ones that devices name, else node 0."""
    named = {device.numa for chain in places.values() for device in chain if device.numa is not None}
    return sysfs.numa_nodes() or dict.fromkeys(sorted(named) or (0,), "")


def _unknown_numa_notes(
    driver: Driver, places: Mapping[str, list[SysfsDevice]], cpus: Mapping[int, str]
) -> tuple[str, ...]:
    """Return a note on devices of the kernel's tree with an unknown NUMA node, on a machine with several nodes."""
    gpus = {gpu.busid: gpu for gpu in driver.gpus}
    unknown = []
    for busid, chain in places.items():
        gpu = gpus.get(busid)
        nodes = {device.numa for device in chain} | {gpu.numa if gpu is not None else None}
        if chain and not nodes & cpus.keys():
            unknown.append(busid if gpu is None else f"gpu{gpu.index}")
    if len(cpus) < 2 or not unknown:
        return ()
    return (f"the NUMA node of {listed(unknown)} is unknown; node {min(cpus)} taken, as NCCL takes node 0",)


def _unreadable_file_notes(sysfs: Sysfs) -> tuple[str, ...]:
    if not sysfs.unreadable:
        return ()
    files = [path.split("/")[-2:] for path in dict.fromkeys(sysfs.unreadable)]
    names = listed(("/".join(parts) for parts in files), noun="files")
    return (
        f"warning: files of {sysfs.root} or of proc beside it cannot be read: {names}; their content is assumed",
    )


def _nvidia_devices(sysfs: Sysfs, shown: set[str]) -> tuple[list[str], list[str]]:
    """Return the bus ids of the NVSwitch chips, and of GPUs that the driver does not show, as in a container."""
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

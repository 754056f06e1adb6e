"""The last probe of this machine, kept in the user's cache folder, since a training job asks at every start.

A kept probe counts only for the same machine in the same state: same boot, driver, PCI devices, NICs with a link, MIG
instances, and GPUs that this process may open (a scheduler gives each job its own, and the device files of all of them
are there). All of that is read from ``/sys``, ``/proc`` and ``/dev`` in milliseconds; asking the driver takes up to
seconds. A link can die while a machine runs, so a kept probe is used for a day, and one with a warning for minutes:
a driver that did not answer, or a fabric that was not ready, may be by then.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import tempfile
import time
from pathlib import Path

from topoplan.errors import TopologyError
from topoplan.formats.topology_json import parse_topology_json
from topoplan.hosts.notes import kind_of
from topoplan.probing.nics import find_nics
from topoplan.probing.sysfs import Sysfs
from topoplan.topology import Topology

MOST_AGE = 24 * 3600.0
"""Seconds for which a kept probe is used."""

MOST_AGE_AMISS = 600.0
"""The same for one with a warning."""

_VERSION = "1"
"""Changed when a probe would find something else on the same machine."""


def cache_file(sysfs: Sysfs) -> Path | None:
    """Where the probe of this machine, as it is now, is kept; None where it is not told from others, or no home is."""
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
    folders = (Path(os.environ.get("XDG_CACHE_HOME", "")), Path(os.path.expanduser("~/.cache")))
    # A relative folder does not count, by XDG's rules; without a home there is no other.
    folder = next((folder for folder in folders if folder.is_absolute()), None)
    return folder / "topoplan" / f"probe-{digest}.json" if folder else None


def device_files(folder: str) -> list[str]:
    """The NVIDIA device files that this process may open: a batch system shows each job only its GPUs."""
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
    """MIG instances of all GPUs, such as ``gpu0 gi1 ci0``, as the driver lists them in ``/proc``."""
    gpus = sysfs.root.parent / "proc/driver/nvidia/capabilities"
    return [
        f"{gpu} {instance} {part}"
        for gpu in sysfs.names(gpus)
        if gpu.startswith("gpu")
        for instance in sysfs.names(gpus / gpu / "mig")
        for part in ("", *sysfs.names(gpus / gpu / "mig" / instance))
    ]


def read_cache(path: Path | None) -> Topology | None:
    """A kept probe that is not too old, can be read, and was kept by this user, else None."""
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            state = os.fstat(file.fileno())
            topology = parse_topology_json(file.read())
    except (OSError, UnicodeError, TopologyError):
        return None
    amiss = any(kind_of(note) == "warning" for note in topology.notes)
    # A clock that was set back makes an age below zero.
    young = 0 <= time.time() - state.st_mtime <= (MOST_AGE_AMISS if amiss else MOST_AGE)
    return topology if young and state.st_uid == os.getuid() else None


def write_cache(path: Path | None, topology: Topology) -> None:
    """Keep a probe, whole or not at all, and drop outdated ones; where nothing can be written, nothing is kept."""
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(topology.to_json())
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
        for other in path.parent.glob("probe-*"):
            if time.time() - other.stat().st_mtime > MOST_AGE:
                other.unlink()

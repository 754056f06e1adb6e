"""``topoplan.probe()``: the machine that this process runs on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from topoplan.errors import ProbeError, TopologyError, UsageError
from topoplan.hosts.build import host_topology
from topoplan.probing.cache import cache_file, read_cache, write_cache
from topoplan.probing.describe import describe
from topoplan.probing.driver import read_driver
from topoplan.probing.sysfs import Sysfs
from topoplan.probing.visible import visible
from topoplan.topology import Topology

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
            topology = host_topology(describe(driver, sysfs, platform.node() or "this machine"))
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

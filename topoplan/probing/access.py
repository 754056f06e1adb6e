"""Pairs of GPUs whose access to each other over PCIe the driver refuses, though the wires are there.

A copy between them goes through the host's memory, which takes twice the wires and is slower than what is planned.
Below one CPU that is a warning; across CPUs it is usual, and a note.
"""

from __future__ import annotations

from collections.abc import Mapping

from topoplan.hosts.host import NvlinkBundle
from topoplan.hosts.notes import listed
from topoplan.probing.driver import Driver


def refused_access(
    driver: Driver, bundles: Mapping[str, tuple[NvlinkBundle, ...]], cpu_of: Mapping[str, int]
) -> tuple[str, ...]:
    """One line for each reason, pairs below one CPU apart from pairs across CPUs; GPUs in MIG mode have none.

    Parameters
    ----------
    driver : Driver
    bundles : mapping of str to tuple of NvlinkBundle
        By bus id; pairs that NVLink joins, directly or at a switch, are not meant.
    cpu_of : mapping of str to int
        NUMA node of each GPU by its bus id.
    """
    busid = {gpu.index: gpu.busid for gpu in driver.gpus}
    switched = {one for one, found in bundles.items() if any(bundle.end == "nvswitch" for bundle in found)}
    grouped: dict[tuple[bool, str], list[str]] = {}
    divided = {gpu.index for gpu in driver.gpus if gpu.mig is not None}
    for (first, second), reason in driver.refused.items():
        if {first, second} & divided:
            continue
        ends = busid[first], busid[second]
        joined = set(ends) <= switched or any(bundle.target == ends[1] for bundle in bundles[ends[0]])
        if not joined:
            near = cpu_of.get(ends[0]) == cpu_of.get(ends[1])
            grouped.setdefault((near, reason), []).append(f"gpu{first}-gpu{second}")
    return tuple(
        f"{'warning: ' if near else ''}access over PCIe is refused ({reason}) between {listed(pairs, noun='pairs')}; "
        "copies there go through the host's memory"
        for (near, reason), pairs in sorted(grouped.items(), reverse=True)
    )

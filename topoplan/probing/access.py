"""Pairs of GPUs whose access to each other the driver refuses, though the wires are there.

NVLinks that may not be used are taken out. Where PCIe may not, a copy goes through the host's memory, which takes twice
the wires and is slower than what is planned: a warning below one CPU, a note across CPUs, where it is usual.
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


def barred_gpus(driver: Driver) -> frozenset[int]:
    """Indices of GPUs whose access to every other GPU is refused, NVLink or not: as in MIG mode, or behind ACS."""
    every = {gpu.index for gpu in driver.gpus}
    return frozenset(
        index
        for index in every
        if len(every) > 1
        and all((min(index, other), max(index, other)) in driver.refused for other in every - {index})
    )


def without_refused_nvlinks(
    driver: Driver, bundles: Mapping[str, list[NvlinkBundle]]
) -> tuple[dict[str, list[NvlinkBundle]], list[str]]:
    """Without the NVLinks over which the driver refuses access, and a warning for each."""
    bundles = dict(bundles)
    busid = {gpu.index: gpu.busid for gpu in driver.gpus}
    switched = {gpu.index for gpu in driver.gpus if any(b.end == "nvswitch" for b in bundles[gpu.busid])}
    notes = []
    through_switch: dict[int, list[int]] = {}
    for (first, second), reason in driver.refused_nvlink.items():
        ends = busid[first], busid[second]
        wires = [b for b in bundles[ends[0]] if b.end == "gpu" and b.target == ends[1]]
        if wires:
            notes.append(
                f"warning: gpu{first}-gpu{second}: access over NVLink is refused ({reason}) though {wires[0].count} "
                f"link{'s' * (wires[0].count > 1)} join{'s' * (wires[0].count == 1)} them; left out"
            )
            for here, there in (ends, ends[::-1]):
                bundles[here] = [b for b in bundles[here] if b.end != "gpu" or b.target != there]
        elif first in switched and second in switched:
            through_switch.setdefault(first, []).append(second)
            through_switch.setdefault(second, []).append(first)
    for index, peers in sorted(through_switch.items()):
        names = listed(f"gpu{peer}" for peer in sorted(peers))
        if len(peers) == len(switched) - 1:
            bundles[busid[index]] = [b for b in bundles[busid[index]] if b.end != "nvswitch"]
            notes.append(
                f"warning: gpu{index}: access over NVLink is refused to every GPU at the switch; its links are "
                "left out (is the fabric manager running?)"
            )
        else:
            notes.append(
                f"warning: gpu{index}: access over NVLink is refused to {names}; the plan may use it all the same"
            )
    return bundles, notes

"""NVLinks between two GPUs as both of them see them: a link counts if it is up at both ends.

An end of which the driver failed to tell something takes the other's word; where both did, the fuller telling counts,
since a failed answer hides links and never adds any.
"""

from __future__ import annotations

from collections.abc import Mapping

from topoplan.hosts.host import NvlinkBundle
from topoplan.probing.driver import DriverGpu
from topoplan.probing.driver_links import DriverLink


def leads_somewhere(link: DriverLink) -> bool:
    """Whether the driver says enough of where a link leads: a GPU without its bus id could be any."""
    return bool(link.remote) or link.end in ("cpu", "nvswitch") or (link.remote == "" and link.end is None)


def agreed_bundles(
    gpus: Mapping[str, DriverGpu], bundles: Mapping[str, list[NvlinkBundle]]
) -> tuple[dict[str, list[NvlinkBundle]], list[str]]:
    """Bundles of each GPU, those between GPUs as both ends confirm them, and warnings.

    Parameters
    ----------
    gpus : mapping of str to DriverGpu
        By bus id.
    bundles : mapping of str to list of NvlinkBundle
        What each GPU by itself says is up.
    """
    notes: list[str] = []
    told = {busid for busid, gpu in gpus.items() if _all_told(gpu)}
    direct = {
        (busid, bundle.target): bundle
        for busid, found in bundles.items()
        for bundle in found
        if bundle.end == "gpu" and bundle.target in gpus and bundle.target != busid
    }
    result = {
        busid: [b for b in found if (busid, b.target) not in direct] for busid, found in bundles.items()
    }
    for first, second in dict.fromkeys((min(ends), max(ends)) for ends in sorted(direct)):
        if gpus[first].mig is not None or gpus[second].mig is not None:
            continue
        sides = {first: direct.get((first, second)), second: direct.get((second, first))}
        counts = [side.count if side else 0 for side in sides.values()]
        words = [sides[busid] for busid in sides if busid in told]
        if (words and None in words) or len({side.count for side in words if side}) > 1:
            notes.append(
                f"warning: gpu{gpus[first].index}-gpu{gpus[second].index}: the two ends show {counts[0]} and "
                f"{counts[1]} NVLinks up; the smaller number counts"
            )
        if None in words:
            continue
        # An end that did not tell all shows too few, never too many.
        known = [side for side in words or sides.values() if side]
        agreed = (min if words else max)(known, key=lambda side: (side.count, side.bandwidth))
        result[first].append(NvlinkBundle("gpu", second, agreed.count, agreed.bandwidth))
        result[second].append(NvlinkBundle("gpu", first, agreed.count, agreed.bandwidth))
    return result, notes


def _all_told(gpu: DriverGpu) -> bool:
    """Whether the driver says of every link of a GPU whether it is up and where it leads."""
    return gpu.links_told and all(link.active is False or leads_somewhere(link) for link in gpu.links)

"""Bundle the NVLinks of a probed machine by far end, and note faults and refused peer access.

A link counts if it is up at both ends and may be used. Its bandwidth is the nominal one of its generation, as in the
library. If the driver states at least a tenth less, or the generation is newer than the known ones, it is the driver's
figure. Whole links are stated as 19.2 (P100), 25.8 (V100), 25.0 (A100) and 26.6 GB/s (H100), which are line rates.

Two GPUs see a link between them each from its end. If the driver failed to report something of one end, the other end
counts; if both failed, the fuller report counts, since a failed call hides links and never adds any.

NVLinks that may not be used are taken out. PCIe copies without peer access go through the host's memory, which takes
twice the wires and is slower than planned: a warning below one CPU, a note across CPUs, which is the usual case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from topoplan.machine.hardware import GA102, P100, generation_of
from topoplan.machine.host_topology import NvlinkBundle, number_spans
from topoplan.reading.probe_driver import Driver, DriverGpu, DriverLink
from topoplan.units import counted, listed, summed


def refused_access(
    driver: Driver, bundles: Mapping[str, tuple[NvlinkBundle, ...]], cpu_of: Mapping[str, int]
) -> tuple[str, ...]:
    """Return a note for each reason of refused access over PCIe, pairs below one CPU apart from pairs across CPUs.

    Pairs that NVLink joins, directly or at a switch, and GPUs in MIG mode are left out. ``cpu_of`` holds the NUMA node
    of each GPU by its bus id.
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


def gpus_without_peer_access(driver: Driver) -> frozenset[int]:
    """Return the indices of GPUs whose access to every other GPU is refused: as in MIG mode, or behind ACS."""
    every = {gpu.index for gpu in driver.gpus}
    return frozenset(
        index
        for index in every
        if len(every) > 1
        and all((min(index, other), max(index, other)) in driver.refused for other in every - {index})
    )


def refused_peers(
    driver: Driver, bundles: Mapping[str, Collection[NvlinkBundle]]
) -> dict[int, tuple[int, ...]]:
    """Return the GPUs to which each GPU's access is refused, over all links or at an NVSwitch, by index.

    GPUs without access to any other are left out. Pairs that the driver refuses NVLink and that no switch joins have
    no NVLinks any more, and may have access over PCIe.
    """
    alone = gpus_without_peer_access(driver)
    switched = {gpu.index for gpu in driver.gpus if any(b.end == "nvswitch" for b in bundles[gpu.busid])}
    found: dict[int, set[int]] = {}
    for first, second in (
        *driver.refused,
        *(pair for pair in driver.refused_nvlink if set(pair) <= switched),
    ):
        if not {first, second} & alone:
            found.setdefault(first, set()).add(second)
            found.setdefault(second, set()).add(first)
    return {index: tuple(sorted(peers)) for index, peers in found.items()}


def without_refused_nvlinks(
    driver: Driver, bundles: Mapping[str, list[NvlinkBundle]]
) -> tuple[dict[str, list[NvlinkBundle]], list[str]]:
    """Drop the NVLinks over which the driver refuses access, with a warning for each."""
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
                f"warning: gpu{index}: access over NVLink is refused to {names}; copies there go through a CPU's memory"
            )
    return bundles, notes


NOMINAL = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 25.0, 6: 25.0, 7: 50.0}
"""GB/s per direction of a link, by NVML's enumeration of versions: NVLink 1.0, 2.x, 3.x, 4.0, 5.0."""

FULL_SPEED = 0.9
"""Least share of the nominal speed at which a link counts as whole."""

_HIDDEN = ""


@dataclass(frozen=True, slots=True)
class ProbedNvlink:
    """A link that is up, as one end sees it, in GB/s per direction.

    ``end`` is one of `topoplan.machine.host_topology.NVLINK_ENDS`, ``target`` the bus id of the far end, empty if it is
    hidden.
    """

    end: str
    target: str
    bandwidth: float


def nvlink_bundles(
    driver: Driver, switches: Collection[str], others: Collection[str]
) -> tuple[dict[str, tuple[NvlinkBundle, ...]], tuple[str, ...]]:
    """Return the bundles of each GPU by its bus id, and warnings.

    ``switches`` are bus ids of the NVSwitch chips that the kernel lists, ``others`` those of GPUs that the kernel lists
    and the driver does not show.
    """
    gpus = {gpu.busid: gpu for gpu in driver.gpus}
    notes: list[str] = []
    wires: dict[str, list[ProbedNvlink]] = {}
    for gpu in driver.gpus:
        wires[gpu.busid], gpu_notes = _probed_nvlinks(gpu, gpus, switches, others)
        notes += gpu_notes
    notes += _no_link_up_notes(driver) + _unknown_end_notes(driver) + _slow_link_notes(driver, wires)
    bundles = {busid: _bundled(found) for busid, found in wires.items()}
    agreed, disagreements = agreed_bundles(gpus, bundles)
    allowed, refusals = without_refused_nvlinks(driver, agreed)
    return {busid: tuple(found) for busid, found in allowed.items()}, (*notes, *disagreements, *refusals)


def _probed_nvlinks(
    gpu: DriverGpu, gpus: Collection[str], switches: Collection[str], others: Collection[str]
) -> tuple[list[ProbedNvlink], list[str]]:
    name = f"gpu{gpu.index}"
    if gpu.mig is not None:
        note = f"warning: {name} is in MIG mode ({len(gpu.mig)} instances): no access between GPUs, NVLinks left out"
        return [], [note] if gpu.links else [f"warning: {name} is in MIG mode ({len(gpu.mig)} instances)"]
    wires = []
    down, barred = [], []
    for link in gpu.links:
        if link.active is False:
            down.append(link.number)
        elif link.peer_to_peer is False:
            barred.append(link.number)
        elif has_known_end(link):
            end = _far_end(link, gpus, switches, others)
            wires.append(ProbedNvlink(end, link.remote or _HIDDEN, _bandwidth(gpu, link)))
    notes = []
    if down and len(down) < len(gpu.links):
        several = len(down) > 1
        numbers = number_spans(down, ", ")
        links = f"NVLink{'s' * several} {numbers} of {len(gpu.links)} {'are' if several else 'is'} down"
        notes.append(f"warning: {name}: {links}")
    if barred:
        notes.append(
            f"warning: {name}: NVLink {number_spans(barred, ', ')} may not carry traffic between GPUs; left out"
        )
    return wires, notes


def _far_end(
    link: DriverLink, gpus: Collection[str], switches: Collection[str], others: Collection[str]
) -> str:
    """Return the kind of a link's far end: by its bus id if visible, else as the driver states, else an NVSwitch."""
    if link.remote in gpus or link.remote in others or (link.remote and link.end == "gpu"):
        return "gpu"
    if link.remote in switches:
        return "nvswitch"
    # A virtual machine that sees neither switch nor far GPU is given no bus id: NCCL, too, takes it for a switch.
    return link.end if link.end in ("cpu", "nvswitch") else "nvswitch"


def _bandwidth(gpu: DriverGpu, link: DriverLink) -> float:
    if link.speed and link.version and link.version > max(NOMINAL):
        return link.speed
    made = generation_of(gpu.sm or 80) or P100
    # GA102 shares its version with A100, whose links are faster.
    nominal = made.nvlink if made is GA102 else NOMINAL.get(link.version or 0, made.nvlink)
    return link.speed if link.speed and link.speed < FULL_SPEED * nominal else nominal


def _no_link_up_notes(driver: Driver) -> list[str]:
    """Return a note on GPUs without a link up: a fault beside others that have some, else a machine without NVLink."""
    able = [gpu for gpu in driver.gpus if gpu.links and gpu.mig is None]
    dark = [gpu for gpu in able if all(link.active is False for link in gpu.links)]
    if not dark:
        return []
    names = listed(f"gpu{gpu.index}" for gpu in dark)
    fault = "" if len(dark) == len(able) else "warning: "
    return [f"{fault}{names}: no NVLink is up"]


def _unknown_end_notes(driver: Driver) -> list[str]:
    """Return notes on links whose far end the driver does not state; GPUs with the same ones in one line."""
    unknown: dict[str, list[str]] = {}
    for gpu in driver.gpus:
        numbers = [link.number for link in gpu.links if link.active is not False and not has_known_end(link)]
        if numbers and gpu.mig is None:
            unknown.setdefault(number_spans(numbers, ", "), []).append(f"gpu{gpu.index}")
    return [
        f"warning: {listed(names)}: far end of NVLink {text} is unknown" for text, names in unknown.items()
    ]


def _slow_link_notes(driver: Driver, wires: dict[str, list[ProbedNvlink]]) -> list[str]:
    """Return warnings on links slower than the fastest of all GPUs of the same model."""
    fastest: dict[str, float] = {}
    for gpu in driver.gpus:
        for wire in wires[gpu.busid]:
            fastest[gpu.name] = max(fastest.get(gpu.name, 0.0), wire.bandwidth)
    notes = []
    for gpu in driver.gpus:
        slow = Counter(wire.bandwidth for wire in wires[gpu.busid] if wire.bandwidth < fastest[gpu.name])
        notes += [
            f"warning: gpu{gpu.index}: {counted(number, 'NVLink')} at {rate:g} GB/s, others at "
            f"{fastest[gpu.name]:g}"
            for rate, number in sorted(slow.items())
        ]
    return notes


def _bundled(wires: list[ProbedNvlink]) -> list[NvlinkBundle]:
    """Return one bundle for each far end; all switches are one."""
    found: dict[tuple[str, str], list[float]] = {}
    for wire in wires:
        found.setdefault((wire.end, "" if wire.end == "nvswitch" else wire.target), []).append(wire.bandwidth)
    return [NvlinkBundle(end, target, len(rates), summed(rates)) for (end, target), rates in found.items()]


def has_known_end(link: DriverLink) -> bool:
    """Return whether the driver states the far end of a link; a GPU without its bus id could be any."""
    return bool(link.remote) or link.end in ("cpu", "nvswitch") or (link.remote == "" and link.end is None)


def agreed_bundles(
    gpus: Mapping[str, DriverGpu], bundles: Mapping[str, list[NvlinkBundle]]
) -> tuple[dict[str, list[NvlinkBundle]], list[str]]:
    """Return the bundles of each GPU by bus id, those between GPUs as both ends confirm them, and warnings."""
    notes: list[str] = []
    complete = {busid for busid, gpu in gpus.items() if _fully_reported(gpu)}
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
        reported = [sides[busid] for busid in sides if busid in complete]
        if (reported and None in reported) or len({side.count for side in reported if side}) > 1:
            notes.append(
                f"warning: gpu{gpus[first].index}-gpu{gpus[second].index}: the two ends show {counts[0]} and "
                f"{counts[1]} NVLinks up; the smaller number counts"
            )
        if None in reported:
            continue
        # An incomplete end shows too few links, never too many.
        known = [side for side in reported or sides.values() if side]
        agreed = (min if reported else max)(known, key=lambda side: (side.count, side.bandwidth))
        result[first].append(NvlinkBundle("gpu", second, agreed.count, agreed.bandwidth))
        result[second].append(NvlinkBundle("gpu", first, agreed.count, agreed.bandwidth))
    return result, notes


def _fully_reported(gpu: DriverGpu) -> bool:
    """Return whether the driver states of every link of a GPU whether it is up, and its far end."""
    return gpu.links_complete and all(link.active is False or has_known_end(link) for link in gpu.links)

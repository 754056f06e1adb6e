"""Where the NVLinks that are up lead, from the bus ids that ``nvidia-smi nvlink -R`` lists.

Where the topology knows bus ids, they tell. Where it knows none (a library machine, a matrix), the listed bus ids are
those of its GPUs, and nvidia-smi numbers GPUs in the order of their bus ids: so the ids stand for GPUs in ascending
order. If all GPUs are listed there is one such reading, and otherwise perhaps several. A GPU all of whose
NVLinks lead to one device, such as a switch, needs no far ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from topoplan.errors import TopologyError
from topoplan.formats.nvidia_smi.nvlink_matching import ANOTHER, ListedGpu
from topoplan.formats.nvidia_smi.wire_places import TooManyPlaces
from topoplan.hosts.host import bus_id, bus_id_order
from topoplan.topology import Topology

MOST_TRIALS = 100_000
"""Bus ids that are put on a GPU before the search for readings gives up."""

MOST_IDS = 256
"""Bus ids that may stand for GPUs of a topology that knows none."""

Ends = dict[str, dict[str, tuple[Fraction, ...]]]
"""For each GPU whose far ends are known, the shares of its links that are up by device at the far end, ascending."""


def readings(topology: Topology, listed: Sequence[ListedGpu]) -> Iterator[Ends]:
    """Every way to read the far ends; GPUs that list none are left out.

    Raises
    ------
    TopologyError
        A far end is no neighbour of the GPU, or no reading fits.
    TooManyPlaces
        There are too many readings to try.
    """
    sure: Ends = {}
    told: list[ListedGpu] = []
    by_id = _busids(topology)
    for gpu in listed:
        if len(gpu.wires) == 1:
            sure[gpu.name] = _by_end(gpu, {remote: next(iter(gpu.wires)) for remote, _ in gpu.up})
        elif not gpu.up:
            sure[gpu.name] = _by_end(gpu, {})
        elif not all(remote for remote, _ in gpu.up):
            continue
        elif by_id:
            sure[gpu.name] = _by_end(
                gpu, {remote: _end(topology, gpu, remote, by_id) for remote, _ in gpu.up}
            )
        elif set(gpu.wires) <= set(topology.gpus):
            told.append(gpu)
    if not told:
        yield sure
        return
    ids = sorted({remote for gpu in told for remote, _ in gpu.up}, key=bus_id_order)
    if len(ids) > MOST_IDS:
        raise TooManyPlaces
    found = False
    dark = {gpu.name for gpu in listed if not gpu.up}
    gpus = [gpu for gpu in topology.gpus if gpu not in dark]
    for meaning in _in_order(ids, gpus, told, [MOST_TRIALS]):
        found = True
        yield sure | {gpu.name: _by_end(gpu, meaning) for gpu in told}
    if not found:
        raise TopologyError(
            f"the far ends that nvidia-smi nvlink -R lists, {ids[0]} to {ids[-1]}, fit no GPUs of {topology.name} in "
            f"ascending order; {ANOTHER}"
        )


def _busids(topology: Topology) -> dict[str, str]:
    """Names of devices with NVLinks by bus id."""
    plugged = {link.src for link in topology.links if link.channel == "nvlink"}
    named = {}
    for device in topology.devices:
        if device.busid and device.name in plugged:
            with contextlib.suppress(TopologyError):
                named[bus_id(device.busid)] = device.name
    return named


def _end(topology: Topology, gpu: ListedGpu, remote: str, by_id: Mapping[str, str]) -> str:
    end = by_id.get(remote)
    if end in gpu.wires:
        return end
    if end is not None:
        raise TopologyError(
            f"{gpu.name} lists an NVLink to {remote}, which is {end}, and {topology.name} has none between the two; "
            f"{ANOTHER}"
        )
    unnamed = [other for other in gpu.wires if other not in by_id.values()]
    if len(unnamed) != 1:
        raise TopologyError(
            f"{gpu.name} lists an NVLink to {remote}, a bus id that {topology.name} does not have; {ANOTHER}"
        )
    return unnamed[0]


def _by_end(gpu: ListedGpu, meaning: Mapping[str, str]) -> dict[str, tuple[Fraction, ...]]:
    return {
        end: tuple(sorted(share for remote, share in gpu.up if meaning[remote] == end)) for end in gpu.wires
    }


def _in_order(
    ids: Sequence[str], gpus: Sequence[str], told: Sequence[ListedGpu], trials: list[int]
) -> Iterator[dict[str, str]]:
    """Assignments of ids to GPUs that ascend, with no more links up between two GPUs than there are."""
    if not ids:
        yield {}
        return
    here = [(gpu, sum(remote == ids[0] for remote, _ in gpu.up)) for gpu in told]
    for place in range(len(gpus) - len(ids) + 1):
        trials[0] -= 1
        if trials[0] < 0:
            raise TooManyPlaces
        if all(gpu.wires.get(gpus[place], 0) >= count for gpu, count in here):
            for rest in _in_order(ids[1:], gpus[place + 1 :], told, trials):
                yield {ids[0]: gpus[place], **rest}

"""Which NVLinks of a topology are dead or slow, from what each listed GPU says of its own.

``-R`` says where each link that is up leads, and so which are not. Its bus ids are those of the topology where that
knows any. Where it knows none (a library machine, a matrix), they stand for GPUs in ascending order, as nvidia-smi
numbers GPUs, if only one such reading fits: so it is when all GPUs are listed.

``-s`` gives numbers of links alone: it tells where all links of a GPU are alike (a switch), or where what is listed of
other GPUs leaves one answer, since a wire counts at both of its ends. Where it leaves several, ``-R`` is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from fractions import Fraction

from topoplan.errors import TopologyError
from topoplan.formats.nvidia_smi.nvlink_matching import ANOTHER, ListedGpu
from topoplan.hosts.host import bus_id, bus_id_order
from topoplan.topology import Topology

Pair = tuple[str, str]
"""Two ends of a bundle of NVLinks: GPUs first, by their numbers."""

Ends = dict[str, dict[str, tuple[Fraction, ...]]]
"""For each GPU whose far ends are known, the shares of its links that are up by device at the far end, ascending."""

Sum = tuple[Sequence[int], int]
"""Entries, and what they add up to."""


def find_damage(topology: Topology, gpus: Sequence[ListedGpu]) -> dict[Pair, tuple[Fraction, ...]]:
    """The wires that are dead or slow.

    Returns
    -------
    dict of (str, str) to tuple of Fraction
        For each bundle with a wire amiss, the share of its speed that each such wire keeps, ascending; 0 if dead.

    Raises
    ------
    TopologyError
        The listings contradict the machine or each other, or leave open which wires are meant.

    Examples
    --------
    Two GPUs of a DGX-1V, each with a wire down: one of the two wires between them.

    >>> import topoplan
    >>> from topoplan.formats.nvidia_smi.nvlink_matching import match_gpus
    >>> from topoplan.formats.nvidia_smi.nvlink_status import parse_nvlink_status
    >>> lines = [f"Link {i}: {'25.781 GB/s' if i else '<inactive>'}" for i in range(6)]
    >>> whole = [f"Link {i}: 25.781 GB/s" for i in range(6)]
    >>> text = "\\n".join(line for n in range(8) for line in [f"GPU {n}: V100", *(lines if n in (0, 3) else whole)])
    >>> machine = topoplan.load("dgx-1v")
    >>> find_damage(machine, match_gpus(machine, parse_nvlink_status(text)))
    {('gpu0', 'gpu3'): (Fraction(0, 1),)}
    """
    order = {name: i for i, name in enumerate(topology.gpus)}
    bundles = {_pair(order, gpu.name, end): count for gpu in gpus for end, count in gpu.wires.items()}
    shares = sorted({Fraction(0), *(share for gpu in gpus for share in gpu.slow)})
    ends = _far_ends(topology, gpus)
    known = _known(topology, bundles, order, ends)
    counts = _counts(bundles, order, [gpu for gpu in gpus if gpu.name not in ends], shares, known)
    if counts is None:
        raise TopologyError(
            f"{_amiss(gpus)}, which fits no set of wires of {topology.name}, as a wire has two ends; {ANOTHER}"
        )
    if any(low < high for ranges in counts.values() for low, high in ranges):
        raise TopologyError(
            f"{_amiss(gpus)}, and which is open: {_open(bundles, shares, counts)}; {_remedy(topology)}"
        )
    return {
        pair: tuple(share for share, (count, _) in zip(shares, ranges, strict=True) for _ in range(count))
        for pair, ranges in counts.items()
        if any(count for count, _ in ranges)
    }


def _far_ends(topology: Topology, listed: Sequence[ListedGpu]) -> Ends:
    """The far ends as far as they are certain; GPUs of which they are not are left out.

    A GPU all of whose NVLinks lead to one device, such as a switch, needs none listed, nor does one that has none up.
    """
    ends: Ends = {}
    told: list[ListedGpu] = []
    by_id = _busids(topology)
    for gpu in listed:
        if len(gpu.wires) == 1:
            ends[gpu.name] = _by_end(gpu, {remote: next(iter(gpu.wires)) for remote, _ in gpu.up})
        elif not gpu.up:
            ends[gpu.name] = _by_end(gpu, {})
        elif not all(remote for remote, _ in gpu.up):
            continue
        elif by_id:
            ends[gpu.name] = _by_end(
                gpu, {remote: _end(topology, gpu, remote, by_id) for remote, _ in gpu.up}
            )
        elif set(gpu.wires) <= set(topology.gpus):
            told.append(gpu)
    dark = {gpu.name for gpu in listed if not gpu.up}
    meaning = _in_order(topology, [gpu for gpu in topology.gpus if gpu not in dark], told)
    return ends | ({gpu.name: _by_end(gpu, meaning) for gpu in told} if meaning else {})


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


def _in_order(topology: Topology, gpus: Sequence[str], told: Sequence[ListedGpu]) -> dict[str, str]:
    """The GPU of each bus id, both ascending, with no more links up between two GPUs than there are.

    Each id on the first GPU that it may stand for, and each on the last: if these agree there is no other reading, and
    if not, none is certain and the answer is empty.
    """
    ids = sorted({remote for gpu in told for remote, _ in gpu.up}, key=bus_id_order)
    up = {remote: [(gpu, sum(one == remote for one, _ in gpu.up)) for gpu in told] for remote in ids}

    def placed(ids: Sequence[str], gpus: Sequence[str]) -> dict[str, str]:
        places = iter(gpus)
        first = {
            remote: next(
                (place for place in places if all(gpu.wires.get(place, 0) >= n for gpu, n in up[remote])), ""
            )
            for remote in ids
        }
        if "" in first.values():
            raise TopologyError(
                f"the far ends that nvidia-smi nvlink -R lists, {min(ids)} to {max(ids)}, fit no GPUs of "
                f"{topology.name} in ascending order; {ANOTHER}"
            )
        return first

    lowest = placed(ids, gpus)
    return lowest if lowest == placed(ids[::-1], gpus[::-1]) else {}


def _pair(order: Mapping[str, int], first: str, second: str) -> Pair:
    ends = sorted((first, second), key=lambda name: (order.get(name, len(order)), name))
    return ends[0], ends[1]


def _known(
    topology: Topology, bundles: Mapping[Pair, int], order: Mapping[str, int], ends: Ends
) -> dict[Pair, tuple[Fraction, ...]]:
    """Shares of the wires that are up in each bundle of which the far ends tell."""
    known: dict[Pair, tuple[Fraction, ...]] = {}
    for gpu, by_end in ends.items():
        for end, up in by_end.items():
            pair = _pair(order, gpu, end)
            if len(up) > bundles[pair]:
                raise TopologyError(
                    f"{gpu} lists {len(up)} NVLinks to {end} that are up, and {topology.name} has {bundles[pair]}; "
                    f"{ANOTHER}"
                )
            before = known.setdefault(pair, up)
            if len(before) != len(up):
                raise TopologyError(
                    f"{gpu} lists {len(up)} NVLinks to {end} that are up, and {end} lists {len(before)} back; take "
                    "all listings at one time"
                )
            # A wire is as slow as the slower of its two ends says.
            known[pair] = tuple(map(min, before, up))
    return known


def _counts(
    bundles: Mapping[Pair, int],
    order: Mapping[str, int],
    gpus: Sequence[ListedGpu],
    shares: Sequence[Fraction],
    known: Mapping[Pair, Sequence[Fraction]],
) -> dict[Pair, list[tuple[int, int]]] | None:
    """The least and the most wires of each bundle at each share; None if nothing fits.

    Each GPU gives a sum for each share, over its bundles. On four GPUs with one wire between every two, let ``-s`` of
    all say that GPUs 0 and 1 have one dead wire each:

        0-1  0-2  0-3  1-2  1-3  2-3
        0..1 0..1 0..1 0..1 0..1 0..1    nothing is known
        0..1 0    0    0    0    0       GPUs 2 and 3 have none: 0-2 + 1-2 + 2-3 = 0, 0-3 + 1-3 + 2-3 = 0
        1    0    0    0    0    0       GPU 0 has one: 0-1 + 0-2 + 0-3 = 1
    """
    levels = len(shares)
    first = {pair: i * levels for i, pair in enumerate(bundles)}
    ranges = [(0, wires) for wires in bundles.values() for _ in shares]
    for pair, up in known.items():
        for level, count in enumerate((bundles[pair] - len(up), *(up.count(share) for share in shares[1:]))):
            ranges[first[pair] + level] = (count, count)
    sums = [
        ([first[_pair(order, gpu.name, end)] + level for end in gpu.wires], total)
        for gpu in gpus
        for level, total in enumerate((gpu.dead, *(gpu.slow.count(share) for share in shares[1:])))
    ]
    rooms = [(range(first[pair], first[pair] + levels), wires) for pair, wires in bundles.items()]
    if not narrow(ranges, sums, rooms):
        return None
    return {pair: ranges[start : start + levels] for pair, start in first.items()}


def narrow(ranges: list[tuple[int, int]], sums: Sequence[Sum], rooms: Sequence[Sum]) -> bool:
    """Cut off the ends of ranges that a sum does not allow, until nothing changes; False where nothing is left.

    Parameters
    ----------
    ranges : list of (int, int)
        Least and most of each entry; changed in place.
    sums, rooms : sequence of (sequence of int, int)
        Entries that add up to a number, and entries that add up to no more than a number.

    Examples
    --------
    Three GPUs joined by bundles 0-1, 0-2 and 1-2 of two wires. GPUs 0 and 1 list one dead wire each, GPU 2 none:

    >>> ranges = [(0, 2)] * 3
    >>> narrow(ranges, [((0, 1), 1), ((0, 2), 1), ((1, 2), 0)], []), ranges
    (True, [(1, 1), (0, 0), (0, 0)])
    """
    bounds = [(entries, total, total) for entries, total in sums] + [
        (entries, 0, most) for entries, most in rooms
    ]
    before: list[tuple[int, int]] = []
    while before != ranges:
        before = list(ranges)
        for entries, least, most in bounds:
            low, high = sum(ranges[e][0] for e in entries), sum(ranges[e][1] for e in entries)
            for e in entries:
                mine = ranges[e]
                # What the others have at the most and at the least leaves to this one so much and no more.
                ranges[e] = (max(mine[0], least - (high - mine[1])), min(mine[1], most - (low - mine[0])))
                if ranges[e][0] > ranges[e][1]:
                    return False
                low, high = low + ranges[e][0] - mine[0], high + ranges[e][1] - mine[1]
            if low > most or high < least:
                return False
    return True


def _amiss(gpus: Sequence[ListedGpu]) -> str:
    """Such as ``gpu3 has 2 of 6 NVLinks down``."""
    parts = []
    for gpu in gpus:
        down = [f"{gpu.dead} of {sum(gpu.wires.values())} NVLinks down"] if gpu.dead else []
        slow = [f"{len(gpu.slow)} of {len(gpu.up)} slow"] if gpu.slow else []
        if down or slow:
            parts.append(f"{gpu.name} has {' and '.join(down + slow)}")
    return ", ".join([*parts[:4], *(["…"] if len(parts) > 4 else [])]) or "no listed GPU has a link down"


def _open(
    bundles: Mapping[Pair, int], shares: Sequence[Fraction], counts: Mapping[Pair, Sequence[tuple[int, int]]]
) -> str:
    """The wires that may or may not be meant."""
    parts = [
        f"{low} to {high} {'slow ' if share else ''}of {bundles[pair]} {'-'.join(pair)}"
        for pair, ranges in counts.items()
        for share, (low, high) in zip(shares, ranges, strict=True)
        if low < high
    ]
    return ", ".join([*parts[:8], *(["…"] if len(parts) > 8 else [])])


def _remedy(topology: Topology) -> str:
    known = any(topology.device(gpu).busid for gpu in topology.gpus)
    return f"add nvidia-smi nvlink -R{'' if known else ' of all GPUs'}, which says where each link leads"

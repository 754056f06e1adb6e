"""Apply listings of ``nvidia-smi nvlink -s`` and ``-R`` to a topology: NVLinks that are dead or slow.

A GPU's links beyond those listed as up are dead. A bundle of parallel wires keeps its wires that are up, and its
bandwidth is the sum of their shares: a slow wire counts by its speed over the normal one (see `nvlink_status`). A
link that the topology, such as a probed one, already states as slow is not slowed twice.

``-R`` states the far end of each link that is up. Its bus ids are those of the topology if that has any. If not (a
library machine, a matrix), they stand for GPUs in ascending order, as nvidia-smi numbers GPUs, if only one such
assignment fits: so it is when all GPUs are listed. ``-s`` gives numbers of links alone: they decide if all links of a
GPU are equivalent (a switch), or if the other listed GPUs leave one answer, since a wire counts at both of its ends.
Otherwise an error asks for ``-R``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from topoplan.errors import TopologyError, UsageError
from topoplan.machine.host_topology import bus_id, bus_id_order
from topoplan.machine.topology import Link, Topology, TopologyLike, as_topology, without_bare_switches
from topoplan.reading.load import read_text
from topoplan.reading.nvlink_status import (
    MATCHING_REMEDY,
    SLOW_BELOW,
    GpuNvlinks,
    ListedGpu,
    match_gpus,
    parse_nvlink_status,
)
from topoplan.units import check_type, exact, listed, nearest_float

Pair = tuple[str, str]
"""Two ends of a bundle of NVLinks: GPUs first, by their numbers."""

Ends = dict[str, dict[str, tuple[Fraction, ...]]]
"""For each GPU whose far ends are known, the ascending shares of its links that are up, by device at the far end."""

Sum = tuple[Sequence[int], int]
"""Indices of entries, and the sum of the entries."""


def find_damage(topology: Topology, gpus: Sequence[ListedGpu]) -> dict[Pair, tuple[Fraction, ...]]:
    """Return, for each bundle with dead or slow wires, the ascending share of its speed that each such wire keeps.

    A dead wire keeps 0. A TopologyError says that the listings contradict the machine or each other, or leave open
    which wires are meant.
    """
    order = {name: i for i, name in enumerate(topology.gpus)}
    bundles = {_pair(order, gpu.name, end): count for gpu in gpus for end, count in gpu.wires.items()}
    shares = sorted({Fraction(0), *(share for gpu in gpus for share in gpu.slow)})
    ends = _far_ends(topology, gpus)
    known = _shares_by_far_end(topology, bundles, order, ends)
    counts = _counts(bundles, order, [gpu for gpu in gpus if gpu.name not in ends], shares, known)
    if counts is None:
        raise TopologyError(
            f"{_damage_summary(gpus)}, which fits no set of wires of {topology.name}, as a wire has two ends; "
            f"{MATCHING_REMEDY}"
        )
    if any(low < high for ranges in counts.values() for low, high in ranges):
        raise TopologyError(
            f"{_damage_summary(gpus)}, and which is open: {_undetermined_wires(bundles, shares, counts)}; "
            f"{_remedy(topology)}"
        )
    return {
        pair: tuple(share for share, (count, _) in zip(shares, ranges, strict=True) for _ in range(count))
        for pair, ranges in counts.items()
        if any(count for count, _ in ranges)
    }


def _far_ends(topology: Topology, listed: Sequence[ListedGpu]) -> Ends:
    """Return the far ends of the GPUs of which they are certain.

    A GPU with all NVLinks to one device, such as a switch, needs none listed, nor does one without links up.
    """
    ends: Ends = {}
    by_order: list[ListedGpu] = []
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
            by_order.append(gpu)
    dark = {gpu.name for gpu in listed if not gpu.up}
    meaning = _in_order(topology, [gpu for gpu in topology.gpus if gpu not in dark], by_order)
    return ends | ({gpu.name: _by_end(gpu, meaning) for gpu in by_order} if meaning else {})


def _busids(topology: Topology) -> dict[str, str]:
    """Return the names of devices with NVLinks by bus id."""
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
            f"{MATCHING_REMEDY}"
        )
    unnamed = [other for other in gpu.wires if other not in by_id.values()]
    if len(unnamed) != 1:
        raise TopologyError(
            f"{gpu.name} lists an NVLink to {remote}, a bus id that {topology.name} does not have; {MATCHING_REMEDY}"
        )
    return unnamed[0]


def _by_end(gpu: ListedGpu, meaning: Mapping[str, str]) -> dict[str, tuple[Fraction, ...]]:
    return {
        end: tuple(sorted(share for remote, share in gpu.up if meaning[remote] == end)) for end in gpu.wires
    }


def _in_order(topology: Topology, gpus: Sequence[str], listed: Sequence[ListedGpu]) -> dict[str, str]:
    """Assign bus ids to GPUs, both ascending, with no more links up between two GPUs than there are.

    Each id is placed on the first GPU that it may stand for, and on the last. If these agree, the assignment is
    unique; if not, none is certain and the result is empty.
    """
    ids = sorted({remote for gpu in listed for remote, _ in gpu.up}, key=bus_id_order)
    up = {remote: [(gpu, sum(one == remote for one, _ in gpu.up)) for gpu in listed] for remote in ids}

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
                f"{topology.name} in ascending order; {MATCHING_REMEDY}"
            )
        return first

    lowest = placed(ids, gpus)
    return lowest if lowest == placed(ids[::-1], gpus[::-1]) else {}


def _pair(order: Mapping[str, int], first: str, second: str) -> Pair:
    ends = sorted((first, second), key=lambda name: (order.get(name, len(order)), name))
    return ends[0], ends[1]


def _shares_by_far_end(
    topology: Topology, bundles: Mapping[Pair, int], order: Mapping[str, int], ends: Ends
) -> dict[Pair, tuple[Fraction, ...]]:
    """Return the shares of the wires that are up in each bundle whose far ends are known."""
    known: dict[Pair, tuple[Fraction, ...]] = {}
    for gpu, by_end in ends.items():
        for end, up in by_end.items():
            pair = _pair(order, gpu, end)
            if len(up) > bundles[pair]:
                raise TopologyError(
                    f"{gpu} lists {len(up)} NVLinks to {end} that are up, and {topology.name} has {bundles[pair]}; "
                    f"{MATCHING_REMEDY}"
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
    """Return the least and the most wires of each bundle at each share; None if nothing fits.

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
    limits = [(range(first[pair], first[pair] + levels), wires) for pair, wires in bundles.items()]
    if not narrow_ranges(ranges, sums, limits):
        return None
    return {pair: ranges[start : start + levels] for pair, start in first.items()}


def narrow_ranges(ranges: list[tuple[int, int]], sums: Sequence[Sum], limits: Sequence[Sum]) -> bool:
    """Narrow ranges, in place, by equations and upper limits until nothing changes; return False if none fits.

    ``ranges`` hold the least and the most of each entry, ``sums`` entries with their sum, and ``limits`` entries with
    the upper limit of their sum.

    Three GPUs joined by bundles 0-1, 0-2 and 1-2 of two wires. GPUs 0 and 1 list one dead wire each, GPU 2 none:

    >>> ranges = [(0, 2)] * 3
    >>> narrow_ranges(ranges, [((0, 1), 1), ((0, 2), 1), ((1, 2), 0)], []), ranges
    (True, [(1, 1), (0, 0), (0, 0)])
    """
    bounds = [(entries, total, total) for entries, total in sums]
    bounds += [(entries, 0, most) for entries, most in limits]
    before: list[tuple[int, int]] = []
    while before != ranges:
        before = list(ranges)
        for entries, least, most in bounds:
            low, high = sum(ranges[e][0] for e in entries), sum(ranges[e][1] for e in entries)
            for e in entries:
                mine = ranges[e]
                # The extremes of the other entries bound this one.
                ranges[e] = (max(mine[0], least - (high - mine[1])), min(mine[1], most - (low - mine[0])))
                if ranges[e][0] > ranges[e][1]:
                    return False
                low, high = low + ranges[e][0] - mine[0], high + ranges[e][1] - mine[1]
            if low > most or high < least:
                return False
    return True


def _damage_summary(gpus: Sequence[ListedGpu]) -> str:
    """Return a text such as ``gpu3 has 2 of 6 NVLinks down``."""
    parts = []
    for gpu in gpus:
        down = [f"{gpu.dead} of {sum(gpu.wires.values())} NVLinks down"] if gpu.dead else []
        slow = [f"{len(gpu.slow)} of {len(gpu.up)} slow"] if gpu.slow else []
        if down or slow:
            parts.append(f"{gpu.name} has {' and '.join(down + slow)}")
    return ", ".join([*parts[:4], *(["…"] if len(parts) > 4 else [])]) or "no listed GPU has a link down"


def _undetermined_wires(
    bundles: Mapping[Pair, int], shares: Sequence[Fraction], counts: Mapping[Pair, Sequence[tuple[int, int]]]
) -> str:
    """Return a text that lists the wires that may or may not be meant."""
    parts = [
        f"{low} to {high} {'slow ' if share else ''}of {bundles[pair]} {'-'.join(pair)}"
        for pair, ranges in counts.items()
        for share, (low, high) in zip(shares, ranges, strict=True)
        if low < high
    ]
    return ", ".join([*parts[:8], *(["…"] if len(parts) > 8 else [])])


def _remedy(topology: Topology) -> str:
    known = any(topology.device(gpu).busid for gpu in topology.gpus)
    return f"add nvidia-smi nvlink -R{'' if known else ' of all GPUs'}, which states where each link leads"


def apply_nvlink_status(topology: TopologyLike, *listings: str | os.PathLike[str]) -> Topology:
    """Return a machine without the NVLinks that ``nvidia-smi nvlink`` lists as down, and with slow ones slowed.

    Parameters
    ----------
    topology : Topology, or an argument of `topoplan.load`
        One server. GPU n of a listing is its GPU n.
    *listings : str or path
        Files, ``-`` for stdin, or texts (which hold a line break) of ``nvidia-smi nvlink -s`` and
        ``nvidia-smi nvlink -R``. The first alone may leave open which of several wires is dead.

    Returns
    -------
    Topology
        Its notes list the wires that were taken out or slowed.

    Raises
    ------
    UsageError
        A file cannot be read.
    TopologyError
        A listing cannot be parsed, is of another machine, or leaves open which of several wires are dead or slow.

    See Also
    --------
    topoplan.load, topoplan.check

    Examples
    --------
    >>> import topoplan
    >>> lines = ["GPU 5: A100", *(f"Link {i}: {'<inactive>' if i > 8 else '25 GB/s'}" for i in range(12))]
    >>> machine = apply_nvlink_status(topoplan.load("dgx-a100"), "\\n".join(lines))
    >>> [(link.src, link.dst, link.bandwidth, link.count) for link in machine.links if link.src == "gpu5"][0]
    ('gpu5', 'nvswitch0', 225.0, 9)
    >>> machine.notes[-1]
    'taken out: 3 of 12 NVLinks gpu5-nvswitch0'
    """
    topology = as_topology(topology)
    if not listings:
        return topology
    texts = [_read(listing) for listing in listings]
    where = ", ".join(name for name, _ in texts if name)
    try:
        return with_nvlinks(topology, parse_nvlink_status("\n".join(text for _, text in texts)))
    except TopologyError as error:
        raise TopologyError(f"{where}: {error}" if where else str(error)) from None


def with_nvlinks(topology: Topology, gpus: Sequence[GpuNvlinks]) -> Topology:
    """Apply parsed listings, as `apply_nvlink_status`; GPUs without a listing stay as they are."""
    found = match_gpus(topology, gpus)
    damage = find_damage(topology, found)
    if not damage:
        return replace(topology, notes=(*topology.notes, _no_damage_note(gpus, found)))
    both = damage | {(second, first): shares for (first, second), shares in damage.items()}
    normal = _normal_rates(topology)
    changed = {
        (link.src, link.dst): _changed(link, both[link.src, link.dst], normal[_ends(topology, link)])
        for link in topology.links
        if link.channel == "nvlink" and (link.src, link.dst) in both
    }
    links = (
        changed[link.src, link.dst] if link.channel == "nvlink" and (link.src, link.dst) in both else link
        for link in topology.links
    )
    wires = {(gpu.name, end): count for gpu in found for end, count in gpu.wires.items()}
    left = tuple(link for link in links if link is not None)
    notes = (*topology.notes, *_notes(damage, changed, wires))
    return without_bare_switches(replace(topology, links=left, notes=notes))


def _read(listing: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the name of a listing, empty for a text, and its text."""
    check_type("listing", listing, str, os.PathLike, remedy="give a file or its text, one after another")
    path = os.fspath(listing)
    if isinstance(listing, str) and "\n" in listing:
        return "", listing
    where = "stdin" if path == "-" else path
    try:
        return where, read_text(path, "give a file with the output of nvidia-smi nvlink")
    except TopologyError:
        raise UsageError(f"{where} is binary, not text; give the output of nvidia-smi nvlink") from None


def _ends(topology: Topology, link: Link) -> tuple[str, ...]:
    """Return a key that NVLinks of equal speed share: the models at their ends."""
    return tuple(sorted(topology.device(end).model for end in (link.src, link.dst)))


def _normal_rates(topology: Topology) -> dict[tuple[str, ...], Fraction]:
    """Return the GB/s of one NVLink between each two models, the fastest that the topology states."""
    rates: dict[tuple[str, ...], Fraction] = {}
    for link in topology.links:
        if link.channel == "nvlink":
            ends = _ends(topology, link)
            rates[ends] = max(rates.get(ends, Fraction(0)), exact(link.bandwidth) / link.count)
    return rates


def _changed(link: Link, shares: Sequence[Fraction], normal: Fraction) -> Link | None:
    """Return a link whose dead or slow wires keep these shares; None if no wire is up."""
    left = link.count - shares.count(Fraction(0))
    if not left:
        return None
    stated, slow = exact(link.bandwidth), [share for share in shares if share]
    kept = link.count - len(shares) + sum(shares)
    lost = normal * (len(slow) - sum(slow))
    if slow and normal * link.count - stated >= SLOW_BELOW * lost:
        return replace(link, bandwidth=nearest_float(min(stated, kept * normal)), count=left)
    return replace(link, bandwidth=nearest_float(stated * kept / link.count), count=left)


def _notes(
    damage: Mapping[Pair, Sequence[Fraction]],
    changed: Mapping[Pair, Link | None],
    wires: Mapping[Pair, int],
) -> Iterable[str]:
    gone = ["-".join(pair) for pair in damage if changed[pair] is None]
    if gone:
        yield f"taken out: link {', '.join(gone)}"
    for pair, shares in damage.items():
        dead = shares.count(Fraction(0))
        if dead and changed[pair] is not None:
            total = wires.get(pair) or wires[pair[1], pair[0]]
            yield f"taken out: {dead} of {total} NVLinks {'-'.join(pair)}"
    for pair, shares in damage.items():
        link, slow = changed[pair], len(shares) - shares.count(Fraction(0))
        if link is not None and slow:
            yield f"slowed: {'-'.join(pair)} to {link.bandwidth:g} GB/s ({slow} of {link.count} NVLinks)"


def _no_damage_note(gpus: Sequence[GpuNvlinks], found: Sequence[ListedGpu]) -> str:
    unwired = [gpu.name for gpu in found if gpu.unwired]
    others = f"; inactive ones of {listed(unwired)} are not among those of the machine" if unwired else ""
    speeds = any(link.speed is not None for gpu in gpus for link in gpu.links)
    amiss = "dead or slow" if speeds else "dead (speeds are not listed)"
    return f"nvidia-smi nvlink: no NVLink of {listed(gpu.name for gpu in found)} is {amiss}{others}"

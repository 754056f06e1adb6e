"""A topology as its machine is now, by the listings of ``nvidia-smi nvlink -s`` and ``-R``: NVLinks dead and slow.

What a GPU has beyond the links that are up is dead. A bundle of parallel wires keeps those that are up, and its
bandwidth is the sum of their shares: a slow wire counts by its speed over the normal one (see `nvlink_matching`). What
the topology, such as a probed one, states as slow already is not slowed twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from topoplan.errors import TopologyError, UsageError
from topoplan.formats.load import read_text
from topoplan.formats.nvidia_smi.nvlink_damage import Pair, find_damage
from topoplan.formats.nvidia_smi.nvlink_matching import SLOW_BELOW, ListedGpu, match_gpus
from topoplan.formats.nvidia_smi.nvlink_status import GpuNvlinks, parse_nvlink_status
from topoplan.hosts.notes import listed
from topoplan.topology import Link, Topology, TopologyLike, as_topology
from topoplan.units import exact, nearest_float


def overlay(topology: TopologyLike, *listings: str | os.PathLike[str]) -> Topology:
    """The machine with the NVLinks that ``nvidia-smi nvlink`` lists as down taken out, and slow ones slowed.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes
        One server. GPU n of a listing is its GPU n.
    *listings : str or path
        Files, ``-`` for stdin, or texts (which hold a line break) of ``nvidia-smi nvlink -s`` and
        ``nvidia-smi nvlink -R``. The first alone may leave open which of several wires is dead.

    Returns
    -------
    Topology
        Its notes say what was taken out and slowed.

    Raises
    ------
    UsageError
        A file cannot be read.
    TopologyError
        A listing makes no sense, is of another machine, or does not say which of several wires are dead or slow.

    Examples
    --------
    >>> import topoplan
    >>> lines = ["GPU 5: A100", *(f"Link {i}: {'<inactive>' if i > 8 else '25 GB/s'}" for i in range(12))]
    >>> machine = overlay(topoplan.load("dgx-a100"), "\\n".join(lines))
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
    """As `overlay`, from listings that are read already; of GPUs that are not among them nothing is known."""
    found = match_gpus(topology, gpus)
    damage = find_damage(topology, found)
    if not damage:
        return replace(topology, notes=(*topology.notes, _nothing(gpus, found)))
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
    return replace(
        topology,
        links=tuple(link for link in links if link is not None),
        notes=(*topology.notes, *_notes(damage, changed, wires)),
    )


def _read(listing: str | os.PathLike[str]) -> tuple[str, str]:
    """Name, empty for a text, and text of a listing."""
    path = os.fspath(listing)
    if isinstance(listing, str) and "\n" in listing:
        return "", listing
    where = "stdin" if path == "-" else path
    try:
        return where, read_text(path, "give a file with the output of nvidia-smi nvlink")
    except TopologyError:
        raise UsageError(f"{where} is binary, not text; give the output of nvidia-smi nvlink") from None


def _ends(topology: Topology, link: Link) -> tuple[str, ...]:
    """What NVLinks of equal speed have in common: the models at their ends."""
    return tuple(sorted(topology.device(end).model for end in (link.src, link.dst)))


def _normal_rates(topology: Topology) -> dict[tuple[str, ...], Fraction]:
    """GB/s of one NVLink as the topology states the fastest between each two models."""
    rates: dict[tuple[str, ...], Fraction] = {}
    for link in topology.links:
        if link.channel == "nvlink":
            ends = _ends(topology, link)
            rates[ends] = max(rates.get(ends, Fraction(0)), exact(link.bandwidth) / link.count)
    return rates


def _changed(link: Link, shares: Sequence[Fraction], normal: Fraction) -> Link | None:
    """A link of whose wires some keep a share of their speed only; None if no wire is left."""
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
            yield f"taken out: {dead} of {_count(wires, pair)} NVLinks {'-'.join(pair)}"
    for pair, shares in damage.items():
        link, slow = changed[pair], len(shares) - shares.count(Fraction(0))
        if link is not None and slow:
            yield f"slowed: {'-'.join(pair)} to {link.bandwidth:g} GB/s ({slow} of {link.count} NVLinks)"


def _count(wires: Mapping[Pair, int], pair: Pair) -> int:
    return wires.get(pair) or wires[pair[1], pair[0]]


def _nothing(gpus: Sequence[GpuNvlinks], found: Sequence[ListedGpu]) -> str:
    """What to say where the machine is as it should be."""
    unwired = [gpu.name for gpu in found if gpu.unwired]
    others = f"; inactive ones of {listed(unwired)} are not among those of the machine" if unwired else ""
    speeds = any(link.speed is not None for gpu in gpus for link in gpu.links)
    amiss = "dead or slow" if speeds else "dead (speeds are not listed)"
    return f"nvidia-smi nvlink: no NVLink of {listed(gpu.name for gpu in found)} is {amiss}{others}"

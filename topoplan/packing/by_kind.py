"""A machine whose links of one kind all have the bandwidth of the slowest: what is left of measured differences.

Links whose bandwidths were measured are all different, so no two servers look alike, and every link is a row of the
program over trees. With every link as slow as the slowest of its kind the machine has its symmetries back, and a forest
for it is a forest for the machine as measured, where it runs at least as fast. What that gives away is told by a bound
on the machine as measured, and is about as much as the slowest links lie below the mean.

Two links are of one kind where channel and kinds of device at both ends agree, and no gap of bandwidths parts them.
"""

from __future__ import annotations

from dataclasses import replace

from topoplan.bounds.maximum_flow import look_alikes
from topoplan.fabric.fabric import Fabric
from topoplan.topology import Link

GAP = 1.25
"""How many times as wide the next wider link must be to be of another kind."""

MOST_UNLIKE = 32
"""Ranks of which no two look alike, up to which every link is a row of the program at once."""


def floored_by_kind(fabric: Fabric) -> Fabric | None:
    """The fabric with every link as slow as the slowest of its kind, and no latencies; None where nothing is gained.

    Parameters
    ----------
    fabric : Fabric

    Returns
    -------
    Fabric or None
        Of the same devices and links. None for up to `MOST_UNLIKE` classes of ranks that look alike, and where the
        kinds leave as many.

    Examples
    --------
    >>> import topoplan
    >>> machine = topoplan.nvswitch_cluster(5)
    >>> wires = {f"s{n // 8}.gpu{n % 8}-s{n // 8}.nvswitch0": 290 + n / 10 for n in range(40)}
    >>> worn = Fabric(topoplan.slow_links(machine, wires), ("nvlink", "network"))
    >>> floored = floored_by_kind(worn)
    >>> sorted({link.bandwidth for link in floored.links})
    [25.0, 290.0]
    """
    if fabric.size <= MOST_UNLIKE or len(look_alikes(fabric)) <= MOST_UNLIKE:
        return None
    slowest = _slowest(fabric)
    links = tuple(
        replace(link, bandwidth=slowest[link], latency=None) if link in slowest else link
        for link in fabric.topology.links
    )
    floored = Fabric(replace(fabric.topology, links=links), fabric.channels)
    return floored if len(look_alikes(floored)) <= MOST_UNLIKE else None


def _slowest(fabric: Fabric) -> dict[Link, float]:
    """Bandwidth of the slowest link of the same kind, for every link of the fabric."""
    kind = {device.name: device.kind for device in fabric.topology.devices}
    of_kind: dict[tuple[str, str, str], list[Link]] = {}
    for link in fabric.links:
        of_kind.setdefault((link.channel, kind[link.src], kind[link.dst]), []).append(link)
    slowest: dict[Link, float] = {}
    for links in of_kind.values():
        floor = last = 0.0
        for link in sorted(links, key=lambda each: each.bandwidth):
            if link.bandwidth > GAP * last:
                floor = link.bandwidth
            last = link.bandwidth
            slowest[link] = floor
    return slowest

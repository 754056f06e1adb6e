"""Why a plan cannot be faster, in words: the certificate read aloud.

Every sentence states a capacity in GB/s and how often a byte of the buffer uses it: their quotient is the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Protocol

from topoplan.fabric.fabric import Fabric
from topoplan.fabric.servers import Servers
from topoplan.plans.certificate import (
    BetweenServers,
    Certificate,
    Channels,
    Cut,
    Entries,
    InsideServer,
    Lengths,
    Partition,
    certified_bound,
    inside_channels,
)
from topoplan.topology import Link, Topology

_LISTED = 8


class Proved(Protocol):
    """A plan, or a bound alone: something that carries a certificate, and what it speaks of."""

    @property
    def topology(self) -> Topology:
        """The machine."""

    @property
    def channels(self) -> tuple[str, ...]:
        """Channels that the bound speaks of."""

    @property
    def collective(self) -> str:
        """The collective."""

    @property
    def root(self) -> int | None:
        """Root rank of a broadcast or reduce."""

    @property
    def certificate(self) -> Certificate:
        """The proof."""


def explain_certificate(plan: Proved) -> str:
    """One sentence that names the bottleneck which the certificate of a plan, or of a bound alone, proves.

    Raises
    ------
    PlanError
        The certificate proves nothing (see `topoplan.plans.certificate.certified_bound`).

    Examples
    --------
    >>> import topoplan
    >>> explain_certificate(topoplan.plan(topoplan.load("dgx-1v"), "broadcast"))
    'only 150 GB/s leave {gpu0}, and every byte must'
    >>> explain_certificate(topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[0, 1, 2]))
    'the links between {gpu0} {gpu1} {gpu2} carry 200 GB/s both ways, and every byte crosses them 4 times'
    """
    return _explain(plan.certificate, Fabric(plan.topology, plan.channels), plan.collective, plan.root)


def _explain(certificate: Certificate, fabric: Fabric, collective: str, root: int | None) -> str:
    if isinstance(certificate, Cut):
        return _explain_cut(certificate, fabric, collective)
    if isinstance(certificate, Partition):
        return _explain_partition(certificate, fabric)
    if isinstance(certificate, Lengths):
        bound = certified_bound(certificate, fabric, collective, root)
        return _explain_lengths(certificate, fabric, bound)
    if isinstance(certificate, Channels):
        sums = []
        for channel, part in certificate.parts:
            alone = Fabric(fabric.topology, (channel,))
            bound = certified_bound(part, alone, collective, root)
            sums.append(f"{_number(bound)} GB/s over {channel} ({_explain(part, alone, collective, root)})")
        return f"{' and '.join(sums)}, since every shard keeps to one of them"
    if isinstance(certificate, Entries):
        told = _explain(certificate.certificate, fabric, collective, root)
        return f"a byte of the buffer is {_number(certificate.entries)} bytes of entries, and of these {told}"
    if isinstance(certificate, InsideServer):
        machine = dict(Servers(fabric).alone())[certificate.server].topology
        alone = Fabric(machine, inside_channels(fabric))
        return f"inside {certificate.server} {_explain(certificate.certificate, alone, 'allreduce', None)}"
    if isinstance(certificate, BetweenServers):
        return _explain_between(certificate, fabric)
    return "one rank moves nothing"


def _explain_cut(cut: Cut, fabric: Fabric, collective: str) -> str:
    side = set(cut.side)
    leaving = _capacity(fabric, lambda link: link.src in side and link.dst not in side)
    entering = _capacity(fabric, lambda link: link.src not in side and link.dst in side)
    inside = tuple(name for name in fabric.nodes if name in side)
    outside = tuple(name for name in fabric.nodes if name not in side)
    outwards = collective in ("broadcast", "allgather")
    if collective == "allreduce":
        outwards = leaving <= entering
    verbs = ("leave", "enter") if outwards else ("enter", "leave")
    verb, names = (verbs[0], inside) if len(inside) <= len(outside) else (verbs[1], outside)
    part = "every byte"
    if collective in ("allgather", "reduce_scatter"):
        part = f"{sum(name in side for name in fabric.ranks)}/{fabric.size} of the buffer"
    return f"only {_number(leaving if outwards else entering)} GB/s {verb} {_braced(names)}, and {part} must"


def _explain_between(certificate: BetweenServers, fabric: Fabric) -> str:
    side = set(certificate.side)
    leaving = _capacity(fabric, lambda link: link.src in side and link.dst not in side)
    home = {device.name: device.server for device in fabric.topology.devices}
    within = tuple(dict.fromkeys(home[name] for name in fabric.ranks if name in side))
    others = tuple(dict.fromkeys(home[name] for name in fabric.ranks if name not in side))
    verb, names = ("leave", within) if len(within) <= len(others) else ("enter", others)
    return (
        f"only {_number(leaving)} GB/s {verb} {_braced(names)}, and the entries of {len(within)} servers must, "
        f"{_number(certificate.entries)} bytes each for a byte of the buffer"
    )


def _explain_partition(partition: Partition, fabric: Fabric) -> str:
    listed_in = {name: number for number, part in enumerate(partition.parts) for name in part}
    # As for the bound, a device that stands in no part is a part of its own.
    part_of = {
        name: listed_in.get(name, len(partition.parts) + number) for number, name in enumerate(fabric.nodes)
    }
    parts: dict[int, list[str]] = {}
    for name, number in part_of.items():
        parts.setdefault(number, []).append(name)
    crossing = _capacity(fabric, lambda link: part_of[link.src] != part_of[link.dst])
    times = 2 * (len({part_of[name] for name in fabric.ranks}) - 1)
    listed = " ".join(_braced(tuple(part)) for part in parts.values())
    return (
        f"the links between {listed} carry {_number(crossing)} GB/s both ways, "
        f"and every byte crosses them {times} times"
    )


def _explain_lengths(certificate: Lengths, fabric: Fabric, bound: Fraction) -> str:
    """With equal lengths a count of crossings; otherwise the lengths are weights, the greatest one being 1."""
    stated = {(src, dst): value for src, dst, value in certificate.lengths}
    longest = max(stated.values())
    length = {ends: value / longest for ends, value in stated.items() if value}
    total = sum((fabric.capacity[fabric.link_index[ends]] * y for ends, y in length.items()), Fraction(0))
    names = _ports(fabric, {ends for ends, value in length.items() if value == 1})
    if all(value == 1 for value in length.values()):
        return (
            f"{names} carry {_number(total)} GB/s together, "
            f"and every byte crosses them at least {_number(total / bound)} times"
        )
    return (
        f"{len(length)} links, weighted by their dual lengths, carry {_number(total)} GB/s, "
        f"and every byte takes at least {_number(total / bound)} of that weight; the heaviest are {names}"
    )


def _ports(fabric: Fabric, links: set[tuple[str, str]]) -> str:
    """The names of links, or what they are together where they are all that leave or enter the GPUs."""
    for end, way in ((0, "out of"), (1, "into")):
        pairs = [(link.src, link.dst) for link in fabric.links]
        if links == {pair for pair in pairs if pair[end] in fabric.ranks}:
            return f"the links {way} all {fabric.size} GPUs"
    return _listed(
        f"{src}>{dst}" for src, dst in ((link.src, link.dst) for link in fabric.links) if (src, dst) in links
    )


def _capacity(fabric: Fabric, counts: Callable[[Link], bool]) -> Fraction:
    pairs = zip(fabric.links, fabric.capacity, strict=True)
    return sum((capacity for link, capacity in pairs if counts(link)), Fraction(0))


def _number(value: Fraction) -> str:
    return f"{float(value):.6g}"


def _listed(names: Iterable[str]) -> str:
    names = tuple(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _braced(names: tuple[str, ...]) -> str:
    shown = names if len(names) <= _LISTED else (*names[:_LISTED], f"and {len(names) - _LISTED} more")
    return "{" + " ".join(shown) + "}"

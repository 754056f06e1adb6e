"""Represent a fault of a machine: its kind, the devices it affects, and the links without it.

`compared` finds faults of links: it compares the links present with the links expected, from any source. A link with
nine tenths of its expected rate counts as whole, since measured rates of equal links differ by as much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from topoplan.machine.topology import Link, Topology
from topoplan.units import counted, name_ranges

Kind = Literal[
    "link missing",
    "link slow",
    "link one-way",
    "no NVLink",
    "fewer NVLinks",
    "PCIe missing",
    "PCIe slow",
    "PCIe one-way",
    "NIC far",
    "NIC missing",
    "NUMA",
    "MIG",
    "no peer access",
    "unreachable",
    "row missing",
    "told",
]
"""``told``: a warning of the driver, or of the author of the file, as quoted."""

SLOW = 0.9
"""A link slower than this part of its expected rate is a fault."""

Ends = tuple[str, str]

Value = TypeVar("Value", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    devices: the affected devices; the two ends of a link.
    state, should_be: the state found and that of a healthy machine, in words.
    links: the links of a healthy machine, in place of those between the same devices, or added.
    servers: other isomorphic servers with the same fault; ``links`` has theirs too.

    >>> Fault("link missing", ("gpu0", "gpu3"), "1 NVLink of 25 GB/s", "2 NVLinks of 25 GB/s").text
    'gpu0-gpu3: 1 NVLink of 25 GB/s, should be 2 NVLinks of 25 GB/s'
    """

    kind: Kind
    devices: tuple[str, ...]
    state: str
    should_be: str
    links: tuple[Link, ...] = ()
    servers: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """One line for a person."""
        if self.kind == "told":
            return self.state
        return f"{self.where}: {self.state}, should be {self.should_be}"

    @property
    def where(self) -> str:
        """The devices, and the other servers with the same fault."""
        is_link = self.kind.startswith(("link ", "PCIe ")) and len(self.devices) == 2
        here = "-".join(self.devices) if is_link else ", ".join(name_ranges(self.devices))
        return f"{here} (as in {', '.join(name_ranges(self.servers))})" if self.servers else here


def mended(topology: Topology, faults: Iterable[Fault]) -> Topology:
    """Return the machine with the links of some faults repaired."""
    wanted = {(link.src, link.dst, link.channel): link for fault in faults for link in fault.links}
    kept = tuple(wanted.pop((link.src, link.dst, link.channel), link) for link in topology.links)
    return replace(topology, links=(*kept, *wanted.values()))


def compared(have: Mapping[Ends, Link], want: Mapping[Ends, Link], gpus: Iterable[str] = ()) -> list[Fault]:
    """Return faults of links of one sort, both directions of a pair in one, in the order of ``want``.

    have, want: links present and expected, by source and destination.
    gpus: GPUs that should have NVLinks; a GPU without any has one fault.

    >>> wires = {("gpu0", "gpu1"): Link("gpu0", "gpu1", "nvlink", 50.0, 2)}
    >>> half = {("gpu0", "gpu1"): Link("gpu0", "gpu1", "nvlink", 25.0, 2)}
    >>> print(compared(half, wires)[0].text)
    gpu0-gpu1: 2 NVLinks of 12.5 GB/s, should be 2 NVLinks of 25 GB/s
    """
    wrong = {ends for ends, link in want.items() if _short_of(have.get(ends), link)}
    bare = [
        gpu
        for gpu in gpus
        if any(gpu in ends for ends in want) and not any(gpu in ends and ends in have for ends in want)
    ]
    faults = []
    for gpu in bare:
        links = tuple(link for ends, link in want.items() if gpu in ends and ends not in have)
        count = sum(link.count for link in links if link.src == gpu)
        rate = max((link.bandwidth / link.count for link in links), default=0.0)
        faults.append(Fault("no NVLink", (gpu,), "no NVLink", nvlinks(count, rate), links))
    for ends in want:
        back = (ends[1], ends[0])
        if not {ends, back} & wrong or set(ends) & set(bare) or (back in want and _seen(want, ends)):
            continue
        faults.append(_pair_fault(ends, have, want, {ends, back} & wrong))
    return faults


def _seen(want: Mapping[Ends, Link], ends: Ends) -> bool:
    """Return whether the other direction comes first."""
    return next(pair for pair in want if set(pair) == set(ends)) != ends


def _short_of(link: Link | None, wanted: Link) -> bool:
    """Return whether a link is slow, or lacks half a wire or more: one of 18 wires is less than a tenth."""
    if link is None or link.bandwidth < SLOW * wanted.bandwidth:
        return True
    wire = wanted.bandwidth / wanted.count
    return link.count < wanted.count and link.bandwidth < wanted.bandwidth - wire / 2


def _pair_fault(ends: Ends, have: Mapping[Ends, Link], want: Mapping[Ends, Link], wrong: set[Ends]) -> Fault:
    """Return the fault between two devices; if directions differ, that of the worse one."""
    back = (ends[1], ends[0])
    links = tuple(want[pair] for pair in (ends, back) if pair in wrong)
    nvlink = links[0].channel == "nvlink"
    worst = min(
        (pair for pair in (ends, back) if pair in wrong),
        key=lambda pair: have[pair].bandwidth if pair in have else 0.0,
    )
    should = _worded(want[worst])
    is_there, both = have.get(worst), {ends, back} <= wrong
    alone = "" if both or back not in want else f" from {worst[0]} to {worst[1]}"
    if is_there is None:
        other = have.get((worst[1], worst[0]))
        if other is not None:
            state = f"{_worded(other)} from {other.src} to {other.dst} only"
            kind: Kind = "link one-way" if nvlink else "PCIe one-way"
            return Fault(kind, ends, state, f"{should} both ways", links)
        return Fault(
            "link missing" if nvlink else "PCIe missing",
            ends,
            "no NVLink" if nvlink else "no PCIe link",
            should,
            links,
        )
    state = f"{_worded(is_there)}{alone}"
    wire, full = is_there.bandwidth / is_there.count, want[worst].bandwidth / want[worst].count
    if nvlink and is_there.count < want[worst].count and wire >= SLOW * full:
        return Fault("link missing", ends, state, should, links)
    return Fault("link slow" if nvlink else "PCIe slow", ends, state, should, links)


def _worded(link: Link) -> str:
    if link.channel == "nvlink":
        return nvlinks(link.count, link.bandwidth / link.count)
    return f"{'PCIe' if link.channel == 'pcie' else link.channel} of {link.bandwidth:g} GB/s"


def nvlinks(count: int, rate: float) -> str:
    """Return wires in words.

    >>> nvlinks(1, 25.0), nvlinks(6, 12.5)
    ('1 NVLink of 25 GB/s', '6 NVLinks of 12.5 GB/s')
    """
    return f"{counted(count, 'NVLink')} of {rate:g} GB/s"


def most_have(values: Iterable[Value]) -> Value | None:
    """Return the value of more than half, or None.

    >>> most_have([6, 6, 4]), most_have([6, 4])
    (6, None)
    """
    tally = Counter(values)
    return next((value for value, times in tally.items() if 2 * times > tally.total()), None)


def lower_median(values: Iterable[float]) -> float:
    """Return the middle value, the lower of two; 0 for no values."""
    known = sorted(values)
    return known[(len(known) - 1) // 2] if known else 0.0

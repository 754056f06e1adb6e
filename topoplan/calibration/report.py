"""What a calibrated topology says of itself: the line under ``source``, and notes.

Every note begins with `MARK`, so that the next calibration knows which to replace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from topoplan.calibration.fit import PairFit
from topoplan.calibration.links import Copy, Speeds, link_key, link_name
from topoplan.calibration.samples import Measurement
from topoplan.topology import Topology
from topoplan.units import format_size

MARK = "calibrated: "

CHANGED = 0.2
"""A link whose bandwidth differs from what was stated by more than this is named."""

_BEFORE = "; links that were not measured: "
_SHOWN = 8


def source_of(topology: Topology, measurement: Measurement, date: str) -> str:
    """Date and method in front of where the other figures come from; an earlier calibration is forgotten.

    Examples
    --------
    >>> from topoplan.topology import Topology
    >>> first = Measurement("by hand", (1, 2), 5, ())
    >>> once = source_of(Topology("pair", (), (), source="a paper"), first, "2026-11-21")
    >>> once
    'calibrated 2026-11-21: by hand, 1B to 2B, median of 5; links that were not measured: a paper'
    >>> source_of(Topology("pair", (), (), source=once), Measurement("by hand", (1, 4), 5, ()), "2026-11-22")
    'calibrated 2026-11-22: by hand, 1B to 4B, median of 5; links that were not measured: a paper'
    """
    before = topology.source
    if before.startswith("calibrated "):
        before = before.partition(_BEFORE)[2]
    sizes = f"{format_size(measurement.sizes[0])} to {format_size(measurement.sizes[-1])}"
    made = f"calibrated {date}: {measurement.method}, {sizes}, median of {measurement.repeats}"
    return f"{made}{_BEFORE}{before}" if before else made


def calibration_notes(
    topology: Topology,
    measurement: Measurement,
    fits: Sequence[PairFit],
    copies: Sequence[Copy],
    speeds: Speeds,
) -> tuple[str, ...]:
    """What was measured, what changed, and what stands out."""
    said = list(measurement.notes)
    if measurement.memory:
        memory = measurement.memory
        said.append(
            f"one GPU: there is no pair to measure; device memory copy {memory.bandwidth:.4g} GB/s, bytes read and "
            f"written both counted ({memory.gpu}, {format_size(memory.nbytes)})"
        )
    if fits:
        said += _link_notes(topology, speeds)
        said += _host_notes(topology, fits)
        said += _copy_notes(measurement, fits, copies, speeds)
    return tuple(MARK + note for note in said)


def _link_notes(topology: Topology, speeds: Speeds) -> list[str]:
    """How many links are measured, which changed, and which are left as stated."""
    changed: list[str] = []
    bounded: list[str] = []
    raised: list[str] = []
    stated: list[str] = []
    for link in topology.links:
        now = speeds.of(link)
        if link_key(link) in speeds.measured and abs(now / link.bandwidth - 1) > CHANGED:
            changed.append(f"{link_name(link)} {link.bandwidth:g} to {now:g}")
        elif link_key(link) in speeds.at_least:
            (raised if now > link.bandwidth else bounded).append(link_name(link))
        elif link_key(link) not in speeds.measured:
            stated.append(link_name(link))
    said = [
        f"{len(speeds.measured)} of {len(topology.links)} links measured: each as fast as the fastest copy that "
        "crosses it"
    ]
    if changed:
        said.append(f"changed by more than {CHANGED:.0%}, GB/s: {few(changed)}")
    if raised:
        said.append(f"faster than stated, as copies show that were held back elsewhere: {few(raised)}")
    if bounded:
        said.append(f"as stated, since narrower links held back all copies that cross them: {few(bounded)}")
    if stated:
        said.append(f"as stated, since no copy crossed them: {few(stated)}")
    return said


def _host_notes(topology: Topology, fits: Sequence[PairFit]) -> list[str]:
    """Copies through the host, and the NVLinks that they should have used."""
    hosted = [fit for fit in fits if fit.through_host]
    if not hosted:
        return []
    rates = [f"{fit.name} {fit.line.bandwidth:.4g}" for fit in hosted]
    said = [f"peer access refused, copied through the host, GB/s: {few(rates)}"]
    joined = {(link.src, link.dst) for link in topology.links if link.channel == "nvlink"}
    wires = dict.fromkeys(
        "-".join(sorted((fit.src, fit.dst))) for fit in hosted if (fit.src, fit.dst) in joined
    )
    if wires:
        said.append(
            f"NVLinks that no copy may use, kept as stated: {few(wires)}; plan without them (--without-link), or allow "
            "peer access"
        )
    return said


def _copy_notes(
    measurement: Measurement, fits: Sequence[PairFit], copies: Sequence[Copy], speeds: Speeds
) -> list[str]:
    """Copies without a route, copies that the links do not explain, and repeats that stand out."""
    said = []
    routed = {copy.fit.name for copy in copies}
    lost = [f"{fit.name} {fit.line.bandwidth:.4g}" for fit in fits if fit.name not in routed]
    if lost:
        said.append(f"the topology shows no way for these copies, which have no effect, GB/s: {few(lost)}")
    slower = [
        f"{copy.fit.name} {copy.rate:.4g} of {speeds.along(copy.route):.4g}"
        for copy in copies
        if not speeds.explains(copy)
    ]
    if slower:
        said.append(f"slower than the links of their routes, which carry faster copies, GB/s: {few(slower)}")
    outliers = [f"{fit.name} {outlier}" for fit in fits for outlier in fit.outliers]
    if outliers:
        number = len(fits) * len(measurement.sizes) * measurement.repeats
        said.append(
            f"{len(outliers)} of {number} copies off the median of their size, without effect: {few(outliers)}"
        )
    return said


def few(texts: Iterable[str]) -> str:
    """The first of many, and how many more there are.

    Examples
    --------
    >>> few(f"gpu{i}" for i in range(12))
    'gpu0, gpu1, gpu2, gpu3, gpu4, gpu5, gpu6, gpu7 and 4 more'
    """
    every = list(texts)
    shown = ", ".join(every[:_SHOWN])
    return shown if len(every) <= _SHOWN else f"{shown} and {len(every) - _SHOWN} more"

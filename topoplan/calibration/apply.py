"""A topology with measured links: what was measured goes in, with date and method; the rest stays as stated.

Bandwidths have four significant digits (`topoplan.calibration.links.DIGITS`), latencies and times of switching three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from topoplan.calibration.fit import PairFit, fit_pair, outlying
from topoplan.calibration.links import Copy, link_key, link_latencies, link_speeds, significant
from topoplan.calibration.report import MARK, calibration_notes, few, source_of
from topoplan.calibration.routes import Route, Routes
from topoplan.calibration.samples import Measurement
from topoplan.topology import Link, Topology

LATENCY_DIGITS = 3


@dataclass(frozen=True, slots=True)
class Pair:
    """What was measured from one GPU to another, beside what the topology states.

    Parameters
    ----------
    fit : PairFit
    route : Route or None
        The links that the copies crossed; None where the topology shows no way.
    odd : str
        How it deviates from pairs that are joined alike, such as ``25 GB/s (usual: 50)``; empty where it does not.
    """

    fit: PairFit
    route: Route | None
    odd: str = ""

    @property
    def stated(self) -> float | None:
        """GB/s that the links of the route were stated to let through."""
        return self.route.bandwidth if self.route else None


@dataclass(frozen=True, slots=True)
class Calibration:
    """A measured machine.

    Parameters
    ----------
    topology : Topology
        With measured bandwidths, latencies and times of switching peer access.
    pairs : tuple of Pair
        In the order of the measurement.
    measurement : Measurement
        What it was made from.
    notes : tuple of str
        What the measurement says beyond the numbers; they are among the topology's.
    """

    topology: Topology
    pairs: tuple[Pair, ...]
    measurement: Measurement
    notes: tuple[str, ...]


def calibrated(topology: Topology, measurement: Measurement, *, date: str) -> Calibration:
    """Put measured copies into a topology.

    Parameters
    ----------
    topology : Topology
        As stated; notes of an earlier calibration are dropped.
    measurement : Measurement
        Of GPUs of this topology.
    date : str
        When it was measured, such as ``2026-11-21``.

    Raises
    ------
    UsageError
        The copies of a pair do not tell its bandwidth.
    TopologyError
        A pair names a device that the topology does not have.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.calibration import Measurement, PairSamples
    >>> times = tuple((n << 20, (1e-5 + (n << 20) / 24e9,) * 3) for n in (1, 16, 256))
    >>> found = Measurement("by hand", (1 << 20, 1 << 24, 1 << 28), 3, (PairSamples("gpu0", "gpu1", times),))
    >>> made = calibrated(topoplan.load("dgx-1v"), found, date="2026-11-21").topology
    >>> next(link for link in made.links if (link.src, link.dst) == ("gpu0", "gpu1"))
    Link(src='gpu0', dst='gpu1', channel='nvlink', bandwidth=24.0, count=1, latency=1e-05)
    """
    for samples in measurement.pairs:
        for name in (samples.src, samples.dst):
            topology.device(name)
    routes = Routes(topology)
    fits = [fit_pair(samples) for samples in measurement.pairs]
    ways = [
        routes.between(fit.src, fit.dst, through_host=True)
        if fit.through_host
        else routes.between_servers(fit.src, fit.dst)
        for fit in fits
    ]
    pairs = tuple(
        Pair(fit, way, odd) for fit, way, odd in zip(fits, ways, _oddities(topology, fits, ways), strict=True)
    )
    copies = [Copy(pair.fit, pair.route) for pair in pairs if pair.route]
    speeds = link_speeds(copies)
    latencies = link_latencies(copies)
    links = tuple(
        replace(
            link,
            bandwidth=speeds.of(link),
            latency=significant(latencies[link_key(link)], LATENCY_DIGITS)
            if link_key(link) in latencies
            else link.latency,
        )
        for link in topology.links
    )
    notes = calibration_notes(topology, measurement, fits, copies, speeds)
    odd = [f"{pair.fit.name} {pair.odd}" for pair in pairs if pair.odd]
    if odd:
        notes += (f"{MARK}off the median of the pairs joined alike: {few(odd)}",)
    made = replace(
        topology,
        links=links,
        notes=(*(note for note in topology.notes if not note.startswith(MARK)), *notes),
        source=source_of(topology, measurement, date),
        peer_access=tuple(
            (gpus, significant(seconds, LATENCY_DIGITS)) for gpus, seconds in measurement.peer_access
        )
        or topology.peer_access,
    )
    return Calibration(made, pairs, measurement, notes)


def _oddities(topology: Topology, fits: Sequence[PairFit], ways: Sequence[Route | None]) -> tuple[str, ...]:
    """For every pair how its latency or bandwidth stands out among those whose routes are alike."""
    kinds = {device.name: device.kind for device in topology.devices}

    def shape(link: Link) -> tuple[object, ...]:
        return kinds[link.src], kinds[link.dst], link.channel, link.count, link.bandwidth

    groups: dict[object, list[int]] = {}
    for place, (fit, way) in enumerate(zip(fits, ways, strict=True)):
        if way:
            stages = tuple(tuple(sorted(map(shape, stage), key=repr)) for stage in way.stages)
            groups.setdefault((fit.through_host, stages), []).append(place)
    said: list[list[str]] = [[] for _ in fits]
    for places in groups.values():
        for unit, values in (
            ("GB/s", [fits[place].line.bandwidth for place in places]),
            ("us", [fits[place].line.alpha * 1e6 for place in places]),
        ):
            for i in outlying(values):
                said[places[i]].append(f"{values[i]:.4g} {unit} (usual: {median(values):.4g})")
    return tuple(" and ".join(texts) for texts in said)

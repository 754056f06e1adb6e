"""Build a topology with measured links: bandwidth and latency from copies, with date, method and notes.

A link is at least as fast as the fastest copy that crosses it; a slower copy would charge it for its neighbour. A fast
copy gives no more than that bound if another link of its route is narrower, as stated. `link_speeds` and
`link_latencies` state the rules that follow. Links without a measurement stay as stated.

Bandwidths have four significant digits (`DIGITS`), latencies and times of switching three. Every note begins with
`MARK`, so that the next calibration replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from topoplan.machine.topology import (
    ACCESS_FACTS,
    HALF_DUPLEX_CHANNELS,
    PULLS,
    REFUSED,
    UNREACHED,
    UNWRITTEN,
    Device,
    Link,
    Topology,
    facts,
)
from topoplan.model.copy_routes import CopyRoute, CopyRoutes, stage_bandwidth
from topoplan.operate.calibration.fit import Measurement, PairFit, fit_pair, outlying
from topoplan.units import TOLERANCE as ROUNDING
from topoplan.units import format_size

TOLERANCE = 0.1
"""Relative tolerance of copies slower than their links; copies vary by a few per cent."""

DIGITS = 4
"""Significant digits of bandwidths, the repeatability of copies."""

LinkKey = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class MeasuredCopy:
    """A measured copy and the links that it crosses."""

    fit: PairFit
    route: CopyRoute

    @property
    def rate(self) -> float:
        """Measured GB/s."""
        return self.fit.line.bandwidth


@dataclass(frozen=True, slots=True)
class LinkSpeeds:
    """Bandwidths that copies imply.

    measured: GB/s of the measured links.
    at_least: GB/s of the links with a lower bound only, as stated or as high as that bound.
    """

    measured: Mapping[LinkKey, float]
    at_least: Mapping[LinkKey, float]

    def of(self, link: Link) -> float:
        """Return the GB/s of a link, as stated if no copy crosses it."""
        key = link_key(link)
        return self.measured.get(key, self.at_least.get(key, link.bandwidth))

    def along(self, route: CopyRoute) -> float:
        """Return the GB/s of a route's narrowest stage."""
        return min(sum(self.of(link) for link in stage) for stage in route.stages)

    def explains(self, copy: MeasuredCopy) -> bool:
        """Return whether the links of a copy are as slow as the copy, within `TOLERANCE`."""
        return self.along(copy.route) <= copy.rate * (1 + TOLERANCE)


def link_key(link: Link) -> LinkKey:
    return link.src, link.dst, link.channel


def link_name(link: Link) -> str:
    return f"{link.src}>{link.dst}"


def link_speeds(copies: Sequence[MeasuredCopy]) -> LinkSpeeds:
    """Return the bandwidths of the links that copies cross.

    1. A link is *measured* by the fastest copy that crosses it, if it is (or shares being) the narrowest link, as
    stated, of the route of a copy that is as fast, within `TOLERANCE`.
    2. Any other link keeps its stated bandwidth, or gets the rate of its fastest copy if that is higher.
    3. A copy that is still slower than all links of its route, by more than `TOLERANCE`, is attributed to a link that
    no faster copy crosses: to the one that explains most such copies, as one fault is likelier than several of the same
    size, and among several to the narrowest as stated. Those are then measured by their fastest copy too. Copies are
    taken in ascending order of their rates.

    A copy is striped over the links of a stage in proportion to their stated bandwidths; its shares count there.

    >>> from topoplan.operate.calibration.fit import HockneyLine
    >>> wide, narrow = Link("gpu0", "pcie0", "pcie", 12), Link("pcie0", "gpu1", "pcie", 8)
    >>> copy = MeasuredCopy(PairFit("gpu0", "gpu1", HockneyLine(1e-5, 7.5, 0)), CopyRoute("pcie", ((wide,), (narrow,))))
    >>> speeds = link_speeds([copy])
    >>> speeds.of(wide), speeds.of(narrow)
    (12, 7.5)
    """
    fastest: dict[LinkKey, float] = {}
    as_narrowest: dict[LinkKey, float] = {}
    stated: dict[LinkKey, float] = {}
    for copy in copies:
        narrowest = copy.route.bandwidth * (1 + ROUNDING)
        for stage in copy.route.stages:
            for link, rate in _shares(stage, copy.rate):
                key = link_key(link)
                stated[key] = link.bandwidth
                fastest[key] = max(rate, fastest.get(key, 0))
                if stage_bandwidth(stage) <= narrowest:
                    as_narrowest[key] = max(rate, as_narrowest.get(key, 0))
    measured = {
        key: rate for key, rate in fastest.items() if as_narrowest.get(key, 0) * (1 + TOLERANCE) >= rate
    }
    at_least = {key: max(rate, stated[key]) for key, rate in fastest.items() if key not in measured}
    speeds = LinkSpeeds(measured, at_least)
    crossing: dict[LinkKey, list[MeasuredCopy]] = {}
    for copy in copies:
        for link in copy.route.links:
            crossing.setdefault(link_key(link), []).append(copy)
    for copy in sorted(copies, key=lambda copy: (copy.rate, copy.fit.name)):
        if not speeds.explains(copy):
            for key in _limiting_links(copy, fastest, crossing, speeds):
                measured[key] = fastest[key]
                at_least.pop(key, None)
    return speeds


def _limiting_links(
    copy: MeasuredCopy,
    fastest: Mapping[LinkKey, float],
    crossing: Mapping[LinkKey, Sequence[MeasuredCopy]],
    speeds: LinkSpeeds,
) -> list[LinkKey]:
    """Return the links that rule 3 of `link_speeds` attributes a copy to; none if a faster copy crosses each."""
    found: dict[tuple[int, float], list[LinkKey]] = {}
    for stage in copy.route.stages:
        keys = [link_key(link) for link in stage]
        shares = dict(zip(keys, (rate for _, rate in _shares(stage, copy.rate)), strict=True))
        if all(fastest[key] <= rate * (1 + TOLERANCE) for key, rate in shares.items()):
            most = copy.rate * (1 + TOLERANCE)
            explained = min(
                sum(one.rate <= most and not speeds.explains(one) for one in crossing[key]) for key in keys
            )
            width = significant(stage_bandwidth(stage), DIGITS)
            found.setdefault((-explained, width), []).extend(keys)
    return found[min(found)] if found else []


def _shares(stage: tuple[Link, ...], rate: float) -> list[tuple[Link, float]]:
    whole = stage_bandwidth(stage)
    return [
        (link, significant(rate * link.bandwidth / whole if len(stage) > 1 else rate, DIGITS))
        for link in stage
    ]


def significant(value: float, digits: int) -> float:
    """Return a number with so many significant digits."""
    return float(f"{value:.{digits}g}")


def link_latencies(copies: Sequence[MeasuredCopy]) -> dict[LinkKey, float]:
    """Return the seconds of the first and last links of the routes of copies.

    A link between two GPUs has the alpha of its copy. On a route of several links the first and the last, between
    servers the wires of the two NICs, bear half of it each, less the stated latency of the other links: a start-up is
    paid by the two ends, and hardly depends on the devices that forward in between (see `topoplan.model.dataflow`).
    Each link gets the median over its routes, so if the copies of two ends agree, their alphas add up again. Copies
    through the host count only for links that no other copy crosses.
    """
    direct = _latencies(copies, lambda copy: not copy.fit.through_host)
    return _latencies(copies, lambda copy: copy.fit.through_host) | direct


def _latencies(
    copies: Iterable[MeasuredCopy], wanted: Callable[[MeasuredCopy], bool]
) -> dict[LinkKey, float]:
    alphas_of: dict[LinkKey, list[float]] = {}
    for copy in copies:
        if copy.fit.rate_only or not wanted(copy):
            continue
        stages = copy.route.stages
        places = sorted({*(copy.route.ends or (0, len(stages) - 1))})
        ends = [stages[place] for place in places]
        others = [stage for place, stage in enumerate(stages) if place not in places]
        between = sum(max(link.latency or 0.0 for link in stage) for stage in others)
        for link in (link for stage in ends for link in stage):
            alpha = max(copy.fit.line.alpha - between, 0.0)
            alphas_of.setdefault(link_key(link), []).append(alpha / len(ends))
    return {key: median(alphas) for key, alphas in alphas_of.items()}


MARK = "calibrated: "

CHANGED = 0.2
"""A note names a link whose bandwidth differs from the stated one by more than this."""

_BEFORE = "; links that were not measured: "
_SHOWN = 8


def source_of(topology: Topology, measurement: Measurement, date: str) -> str:
    """Return the date and method of a calibration in front of the earlier source; an earlier calibration is dropped.

    >>> from topoplan.machine.topology import Topology
    >>> first = Measurement("by hand", (1, 2), 5, ())
    >>> source_of(Topology("pair", (), (), source="a paper"), first, "2026-11-21")
    'calibrated 2026-11-21: by hand, 1B to 2B, median of 5; links that were not measured: a paper'
    """
    before = topology.source
    if before.startswith("calibrated "):
        before = before.partition(_BEFORE)[2]
    made = f"calibrated {date}: {method_words(measurement)}"
    return f"{made}{_BEFORE}{before}" if before else made


def method_words(measurement: Measurement) -> str:
    """Return the method of a measurement, with its sizes and repeats if they are known."""
    if not measurement.sizes:
        return measurement.method
    sizes = f"{format_size(measurement.sizes[0])} to {format_size(measurement.sizes[-1])}"
    return f"{measurement.method}, {sizes}, median of {measurement.repeats}"


def calibration_notes(
    topology: Topology,
    measurement: Measurement,
    fits: Sequence[PairFit],
    copies: Sequence[MeasuredCopy],
    speeds: LinkSpeeds,
) -> tuple[str, ...]:
    """Return notes on measured and changed links, and on outliers."""
    notes = list(measurement.notes)
    if measurement.memory:
        memory = measurement.memory
        notes.append(
            f"one GPU, no pair to measure; device memory copy {memory.bandwidth:.4g} GB/s, bytes read and written "
            f"both counted ({memory.gpu}, {format_size(memory.nbytes)})"
        )
    if fits:
        notes += _link_notes(topology, speeds)
        notes += _host_notes(topology, fits)
        notes += _copy_notes(measurement, fits, copies, speeds)
    return tuple(MARK + note for note in notes)


def _link_notes(topology: Topology, speeds: LinkSpeeds) -> list[str]:
    """Return the number of measured links, and lists of changed and unmeasured ones."""
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
    notes = [
        f"{len(speeds.measured)} of {len(topology.links)} links measured: each as fast as the fastest copy that "
        "crosses it"
    ]
    lists = (
        (f"changed by more than {CHANGED:.0%}, GB/s", changed),
        ("faster than stated, as copies show that were held back elsewhere", raised),
        ("as stated, since narrower links held back all copies that cross them", bounded),
        ("as stated, since no copy crossed them", stated),
    )
    return notes + [f"{what}: {abbreviated(names)}" for what, names in lists if names]


def _host_notes(topology: Topology, fits: Sequence[PairFit]) -> list[str]:
    """Return copies through the host, and the NVLinks that they should have used."""
    hosted = [fit for fit in fits if fit.through_host]
    if not hosted:
        return []
    rates = [f"{fit.name} {fit.line.bandwidth:.4g}" for fit in hosted]
    notes = [f"peer access refused, copied through the host, GB/s: {abbreviated(rates)}"]
    joined = {(link.src, link.dst) for link in topology.links if link.channel == "nvlink"}
    wires = dict.fromkeys(
        "-".join(sorted((fit.src, fit.dst))) for fit in hosted if (fit.src, fit.dst) in joined
    )
    if wires:
        refused = all(fit.refused for fit in hosted)
        remedy = (
            "plans leave them out; allow peer access to use them"
            if refused
            else "plan without them (--without-link), or allow peer access"
        )
        notes.append(f"NVLinks that no copy may use, kept as stated: {abbreviated(wires)}; {remedy}")
    return notes


def _copy_notes(
    measurement: Measurement, fits: Sequence[PairFit], copies: Sequence[MeasuredCopy], speeds: LinkSpeeds
) -> list[str]:
    """Return copies without a route, copies that the links do not explain, and outlying repeats."""
    notes = []
    routed = {copy.fit.name for copy in copies}
    lost = [f"{fit.name} {fit.line.bandwidth:.4g}" for fit in fits if fit.name not in routed]
    if lost:
        notes.append(f"copies without a route in the topology, without effect, GB/s: {abbreviated(lost)}")
    slower = [
        f"{copy.fit.name} {copy.rate:.4g} of {speeds.along(copy.route):.4g}"
        for copy in copies
        if not speeds.explains(copy)
    ]
    if slower:
        notes.append(
            f"slower than the links of their routes, which carry faster copies, GB/s: {abbreviated(slower)}"
        )
    outliers = [f"{fit.name} {outlier}" for fit in fits for outlier in fit.outliers]
    if outliers:
        number = len(fits) * len(measurement.sizes) * measurement.repeats
        notes.append(
            f"{len(outliers)} of {number} copies off the median of their size, without effect: {abbreviated(outliers)}"
        )
    return notes


def abbreviated(texts: Iterable[str]) -> str:
    """Return the first of many, and the number of the others.

    >>> abbreviated(f"gpu{i}" for i in range(12))
    'gpu0, gpu1, gpu2, gpu3, gpu4, gpu5, gpu6, gpu7 and 4 more'
    """
    every = list(texts)
    shown = ", ".join(every[:_SHOWN])
    return shown if len(every) <= _SHOWN else f"{shown} and {len(every) - _SHOWN} more"


LATENCY_DIGITS = 3


@dataclass(frozen=True, slots=True)
class Pair:
    """The measurement from one GPU to another, beside the topology's statement.

    route: the links that the copies crossed; None if the topology has no path.
    odd: deviation from pairs with the same kind of route, such as ``25 GB/s (usual: 50)``; empty for none.
    """

    fit: PairFit
    route: CopyRoute | None
    odd: str = ""

    @property
    def stated(self) -> float | None:
        """Stated GB/s of the route's narrowest stage."""
        return self.route.bandwidth if self.route else None


@dataclass(frozen=True, slots=True)
class Calibration:
    """A measured machine.

    topology: with measured bandwidths, latencies and times of switching peer access.
    pairs: in the order of the measurement.
    notes: those of the measurement; they are among the topology's.
    """

    topology: Topology
    pairs: tuple[Pair, ...]
    measurement: Measurement
    notes: tuple[str, ...]


def calibrated(topology: Topology, measurement: Measurement, *, date: str) -> Calibration:
    """Return a topology with the results of measured copies.

    topology: as stated; notes of an earlier calibration are dropped.
    date: such as ``2026-11-21``.

    >>> import topoplan
    >>> from topoplan.operate.calibration.fit import Measurement, PairSamples
    >>> times = tuple((n << 20, (1e-5 + (n << 20) / 24e9,) * 3) for n in (1, 16, 256))
    >>> found = Measurement("by hand", (1 << 20, 1 << 24, 1 << 28), 3, (PairSamples("gpu0", "gpu1", times),))
    >>> made = calibrated(topoplan.load("dgx-1v"), found, date="2026-11-21").topology
    >>> one = next(link for link in made.links if (link.src, link.dst) == ("gpu0", "gpu1"))
    >>> one.channel, one.bandwidth, one.latency
    ('nvlink', 24.0, 1e-05)
    """
    ends = [(one.src, one.dst) for one in measurement.pairs] + [
        (one.src, one.dst) for one in measurement.rates
    ]
    for pair_of_ends in ends:
        for name in pair_of_ends:
            topology.device(name)
    routes = CopyRoutes(topology)
    fits = [fit_pair(one) for one in measurement.pairs if one.times or one.pulls] + [*measurement.rates]
    dead = [(one.src, one.dst) for one in measurement.pairs if not (one.times or one.pulls)]
    ways = [
        routes.between(fit.src, fit.dst, through_host=True)
        if fit.through_host
        else routes.between_servers(fit.src, fit.dst)
        for fit in fits
    ]
    pairs = tuple(
        Pair(fit, way, odd) for fit, way, odd in zip(fits, ways, _oddities(topology, fits, ways), strict=True)
    )
    copies = [MeasuredCopy(pair.fit, pair.route) for pair in pairs if pair.route]
    speeds = link_speeds(copies)
    latencies = link_latencies(copies)
    direct = _direct_access(copies)
    shared = _shared_caps(topology, measurement, copies, speeds)
    taken_out = {
        link_key(way.links[0]) for ends in dead if (way := routes.between(*ends)) and len(way.links) == 1
    }
    topology = replace(topology, links=tuple(one for one in topology.links if link_key(one) not in taken_out))
    links = tuple(
        replace(
            link,
            bandwidth=speeds.of(link),
            latency=significant(latencies[link_key(link)], LATENCY_DIGITS)
            if link_key(link) in latencies
            else link.latency,
            push=direct.get(link_key(link), (link.push, link.pull))[0],
            pull=direct.get(link_key(link), (link.push, link.pull))[1],
            shared=shared.get(link_key(link), link.shared),
        )
        for link in topology.links
    )
    notes = calibration_notes(topology, measurement, fits, copies, speeds)
    notes += tuple(MARK + note for note in _access_notes(fits, dead))
    both = [f"{src}-{dst} {cap:g}" for (src, dst, _), cap in shared.items() if cap and src in topology.gpus]
    if both:
        notes += (f"{MARK}both directions of a link together, GB/s: {abbreviated(both)}",)
    several = sum(
        pair.fit.rate_only and pair.route is not None and len(pair.route.links) > 1 for pair in pairs
    )
    if several:
        notes += (
            f"{MARK}{several} of {len(pairs)} rates are of routes of several links: each is taken for the "
            "narrowest link as stated, and the other links are at least as fast",
        )
    odd = [f"{pair.fit.name} {pair.odd}" for pair in pairs if pair.odd]
    if odd:
        notes += (f"{MARK}off the median of the pairs with such links: {abbreviated(odd)}",)
    made = replace(
        topology,
        devices=_with_access_facts(topology, fits, dead, direct),
        links=links,
        notes=(*(note for note in topology.notes if not note.startswith(MARK)), *notes),
        source=source_of(topology, measurement, date),
        peer_access=tuple(
            (gpus, significant(seconds, LATENCY_DIGITS)) for gpus, seconds in measurement.peer_access
        )
        or topology.peer_access,
    )
    return Calibration(made, pairs, measurement, notes)


def differing_access(fit: PairFit) -> tuple[float | None, float | None] | None:
    """Return GB/s of push and pull; None if they were not measured, or are equal within `TOLERANCE`."""
    if fit.access is None:
        return None
    push, pull = (rate and significant(rate, DIGITS) for rate in fit.access)
    if push and pull and min(push, pull) >= (1 - TOLERANCE) * max(push, pull):
        return None
    return push, pull


def _direct_access(copies: Sequence[MeasuredCopy]) -> dict[LinkKey, tuple[float | None, float | None]]:
    """Return the push and pull of each link that is the whole route of a copy; both None if they are equal."""
    return {
        link_key(copy.route.links[0]): differing_access(copy.fit) or (None, None)
        for copy in copies
        if len(copy.route.links) == 1 and copy.fit.access is not None
    }


def _shared_caps(
    topology: Topology, measurement: Measurement, copies: Sequence[MeasuredCopy], speeds: LinkSpeeds
) -> dict[LinkKey, float | None]:
    """Return the cap of both directions of links, None for links that have none.

    A GPU's link carries at least what the fastest two copies between it and another GPU do together. It has a cap if
    that is less than its two directions alone, by more than `TOLERANCE`. Links without such a measurement keep theirs,
    raised to what a single copy does.
    """
    by_key = {link_key(link): link for link in topology.links}
    together = {(src, dst): rate for src, dst, rate in measurement.together}
    caps: dict[LinkKey, float] = {}
    for copy in copies:
        rate = together.get((copy.fit.src, copy.fit.dst))
        ends = (copy.route.stages[0], copy.route.stages[-1])
        for key in (link_key(stage[0]) for stage in ends if rate is not None and len(copy.route.stages) > 1):
            src, dst, channel = key
            for one in (key, (dst, src, channel)):
                caps[one] = max(rate or 0.0, caps.get(one, 0.0))
    found: dict[LinkKey, float | None] = {}
    for key, link in by_key.items():
        back = by_key.get((link.dst, link.src, link.channel))
        if back is None or link.channel not in HALF_DUPLEX_CHANNELS or link.access:
            continue
        alone = speeds.of(link), speeds.of(back)
        if key in caps:
            capped = caps[key] < (1 - TOLERANCE) * sum(alone)
            found[key] = significant(max(caps[key], *alone), DIGITS) if capped else None
        elif link.shared is not None:
            found[key] = max(link.shared, *alone)
    return found


def _access_notes(fits: Sequence[PairFit], dead: Sequence[tuple[str, str]]) -> list[str]:
    """Return pairs whose push and pull differ, and pairs on which no copy ended."""
    differ = [
        Link(fit.src, fit.dst, "pcie", fit.line.bandwidth, push=found[0], pull=found[1])
        for fit in fits
        if (found := differing_access(fit))
    ]
    lists = (
        ("push and pull differ, GB/s", [f"{link_name(link)} {link.access}" for link in differ]),
        ("no copy ends, so links between the two are taken out", [f"{src}>{dst}" for src, dst in dead]),
    )
    return [f"{what}: {abbreviated(names)}" for what, names in lists if names]


def _with_access_facts(
    topology: Topology,
    fits: Sequence[PairFit],
    dead: Sequence[tuple[str, str]],
    direct: Collection[LinkKey],
) -> tuple[Device, ...]:
    """Return the devices with the facts of access between GPUs that no link of their own states."""
    stated = {key[:2] for key in direct}
    measured: dict[tuple[str, str], tuple[str, ...]] = dict.fromkeys(dead, (UNREACHED,))
    refused = {(fit.src, fit.dst): fit.refused for fit in fits}
    for fit in fits:
        if fit.access is not None:
            push, pull = ((fit.src, fit.dst) not in stated and differing_access(fit)) or (1, 0)
            pulls = (PULLS,) if (pull or 0) > (push or 0) else ()
            measured[fit.src, fit.dst] = pulls if push else (*pulls, UNWRITTEN)

    def updated(device: Device, key: str) -> str:
        known: Collection[tuple[str, str]] = refused if key == REFUSED else measured
        before = [name for name in device.fact(key).split(",") if (name, device.name) not in known]
        now = [src for (src, dst), found in measured.items() if dst == device.name and key in found]
        if key == REFUSED:
            now = [src for (src, dst), barred in refused.items() if dst == device.name and barred]
        return ",".join(sorted({*before, *now} - {""}))

    return tuple(
        replace(one, facts=facts(**dict(one.facts) | {key: updated(one, key) for key in ACCESS_FACTS}))
        if one.kind == "gpu"
        else one
        for one in topology.devices
    )


def _oddities(
    topology: Topology, fits: Sequence[PairFit], ways: Sequence[CopyRoute | None]
) -> tuple[str, ...]:
    """Return for every pair how its latency or bandwidth deviates from pairs with the same kind of route."""
    kinds = {device.name: device.kind for device in topology.devices}

    def shape(link: Link) -> tuple[object, ...]:
        return kinds[link.src], kinds[link.dst], link.channel, link.count, link.bandwidth

    groups: dict[object, list[int]] = {}
    for place, (fit, way) in enumerate(zip(fits, ways, strict=True)):
        if way:
            stages = tuple(tuple(sorted(map(shape, stage), key=repr)) for stage in way.stages)
            groups.setdefault((fit.through_host, stages), []).append(place)
    notes: list[list[str]] = [[] for _ in fits]
    for places in groups.values():
        for unit, values in (
            ("GB/s", [fits[place].line.bandwidth for place in places]),
            ("us", [fits[place].line.alpha * 1e6 for place in places]),
        ):
            for i in outlying(values):
                notes[places[i]].append(f"{values[i]:.4g} {unit} (usual: {median(values):.4g})")
    return tuple(" and ".join(texts) for texts in notes)

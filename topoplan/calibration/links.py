"""Bandwidth and latency of links, from copies whose routes cross them.

A link is at least as fast as the fastest copy that crosses it; a slower copy would blame it for its neighbour. But a
fast copy says no more than that where another link of its route is narrower, as stated: then that one held it back.
`link_speeds` and `link_latencies` state the rules that follow from this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from topoplan.calibration.fit import PairFit
from topoplan.calibration.routes import Route, stage_bandwidth
from topoplan.topology import Link
from topoplan.units import TOLERANCE as ROUNDING

TOLERANCE = 0.1
"""What a copy may be slower than its links, relatively, before a link is blamed; copies vary by a few per cent."""

DIGITS = 4
"""Significant digits of bandwidths: copies do not repeat better than that."""

Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Copy:
    """A measured copy and the links that it crosses."""

    fit: PairFit
    route: Route

    @property
    def rate(self) -> float:
        """Measured GB/s."""
        return self.fit.line.bandwidth


@dataclass(frozen=True, slots=True)
class Speeds:
    """What copies say of the bandwidth of links.

    Parameters
    ----------
    measured : dict of key to float
        GB/s of the links that are measured.
    at_least : dict of key to float
        GB/s of the links of which only a lower bound is known, as stated or as high as that bound.
    """

    measured: Mapping[Key, float]
    at_least: Mapping[Key, float]

    def of(self, link: Link) -> float:
        """GB/s of a link, as stated where no copy crosses it."""
        key = link_key(link)
        return self.measured.get(key, self.at_least.get(key, link.bandwidth))

    def along(self, route: Route) -> float:
        """GB/s that the links of a route let through."""
        return min(sum(self.of(link) for link in stage) for stage in route.stages)

    def explains(self, copy: Copy) -> bool:
        """True where the links of a copy are as slow as the copy, but for `TOLERANCE`."""
        return self.along(copy.route) <= copy.rate * (1 + TOLERANCE)


def link_key(link: Link) -> Key:
    """What identifies a link in its topology."""
    return link.src, link.dst, link.channel


def link_name(link: Link) -> str:
    """Such as ``gpu0>gpu3``."""
    return f"{link.src}>{link.dst}"


def link_speeds(copies: Sequence[Copy]) -> Speeds:
    """Bandwidths of the links that copies cross.

    1. A link is *measured* by the fastest copy that crosses it, where it is (or shares being) the narrowest link, as
       stated, of the route of a copy that is as fast, within `TOLERANCE`.
    2. Any other link keeps what is stated, or gets the rate of its fastest copy where that is higher.
    3. A copy that is still slower than all links of its route, by more than `TOLERANCE`, is blamed on a link that no
       faster copy crosses: on the one that explains most such copies, as one fault is likelier than several of the same
       size, and of several on the narrowest as stated. Those are then measured by their fastest copy too. Copies are
       taken in ascending order of their rates.

    A copy is striped over the links of a stage in proportion to what is stated; its shares stand for it there.

    Examples
    --------
    >>> from topoplan.calibration.fit import Line
    >>> wide, narrow = Link("gpu0", "pcie0", "pcie", 12), Link("pcie0", "gpu1", "pcie", 8)
    >>> copy = Copy(PairFit("gpu0", "gpu1", Line(1e-5, 7.5, 0)), Route("pcie", ((wide,), (narrow,))))
    >>> speeds = link_speeds([copy])
    >>> speeds.of(wide), speeds.of(narrow)
    (12, 7.5)
    """
    fastest: dict[Key, float] = {}
    as_narrowest: dict[Key, float] = {}
    stated: dict[Key, float] = {}
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
    speeds = Speeds(measured, at_least)
    crossing: dict[Key, list[Copy]] = {}
    for copy in copies:
        for link in copy.route.links:
            crossing.setdefault(link_key(link), []).append(copy)
    for copy in sorted(copies, key=lambda copy: (copy.rate, copy.fit.name)):
        if not speeds.explains(copy):
            for key in _to_blame(copy, fastest, crossing, speeds):
                measured[key] = fastest[key]
                at_least.pop(key, None)
    return speeds


def _to_blame(
    copy: Copy, fastest: Mapping[Key, float], crossing: Mapping[Key, Sequence[Copy]], speeds: Speeds
) -> list[Key]:
    """The links of the stages that rule 3 of `link_speeds` blames for a copy; none where a faster copy crosses each."""
    found: dict[tuple[int, float], list[Key]] = {}
    for stage in copy.route.stages:
        keys = [link_key(link) for link in stage]
        shares = dict(zip(keys, (rate for _, rate in _shares(stage, copy.rate)), strict=True))
        if all(fastest[key] <= rate * (1 + TOLERANCE) for key, rate in shares.items()):
            alike = copy.rate * (1 + TOLERANCE)
            explained = min(
                sum(one.rate <= alike and not speeds.explains(one) for one in crossing[key]) for key in keys
            )
            width = significant(stage_bandwidth(stage), DIGITS)
            found.setdefault((-explained, width), []).extend(keys)
    return found[min(found)] if found else []


def _shares(stage: tuple[Link, ...], rate: float) -> list[tuple[Link, float]]:
    """What each link of a stage carries of a copy, in GB/s."""
    whole = stage_bandwidth(stage)
    return [
        (link, significant(rate * link.bandwidth / whole if len(stage) > 1 else rate, DIGITS))
        for link in stage
    ]


def significant(value: float, digits: int) -> float:
    """A number with so many significant digits.

    Examples
    --------
    >>> significant(24.3187, 4), significant(0.000012345, 3)
    (24.32, 1.23e-05)
    """
    return float(f"{value:.{digits}g}")


def link_latencies(copies: Sequence[Copy]) -> dict[Key, float]:
    """Seconds of the first and last links of the routes of copies; others keep what they state.

    A link between two GPUs has the alpha of its copy. On a route of several links the first and the last, between
    servers the wires of the two NICs, bear half of it each, less what the other links state: a start-up is what the two
    ends pay, and hardly depends on what forwards in between (see `topoplan.simulation.latency`). Each link gets the
    median over its routes, so where the copies of two ends agree, their alphas add up again. Copies through the host
    count only for links that no other copy crosses.

    Examples
    --------
    >>> from topoplan.calibration.fit import Line
    >>> up, down = Link("gpu0", "nvswitch0", "nvlink", 150), Link("nvswitch0", "gpu1", "nvlink", 150)
    >>> copy = Copy(PairFit("gpu0", "gpu1", Line(1e-5, 130, 0)), Route("nvlink", ((up,), (down,))))
    >>> sum(link_latencies([copy]).values())
    1e-05
    """
    direct = _latencies(copies, lambda copy: not copy.fit.through_host)
    return _latencies(copies, lambda copy: copy.fit.through_host) | direct


def _latencies(copies: Iterable[Copy], wanted: Callable[[Copy], bool]) -> dict[Key, float]:
    heard: dict[Key, list[float]] = {}
    for copy in copies:
        if not wanted(copy):
            continue
        stages = copy.route.stages
        places = sorted({*(copy.route.ends or (0, len(stages) - 1))})
        ends = [stages[place] for place in places]
        others = [stage for place, stage in enumerate(stages) if place not in places]
        between = sum(max(link.latency or 0.0 for link in stage) for stage in others)
        for link in (link for stage in ends for link in stage):
            alpha = max(copy.fit.line.alpha - between, 0.0)
            heard.setdefault(link_key(link), []).append(alpha / len(ends))
    return {key: median(alphas) for key, alphas in heard.items()}

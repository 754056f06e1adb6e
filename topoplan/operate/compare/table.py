"""Represent comparisons of allocations, summarise them, and format them as text and JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise

from topoplan.machine.fabric import ALL
from topoplan.model.expected_times import Quickest
from topoplan.plans.file_values import finite
from topoplan.units import bus_factor, counted, number_ranges

NO_RING = "none"
"""Kind of a missing ring."""

DOUBLE_TREE = "double binary tree"
"""Kind of a baseline that NCCL does not have in this form."""

EQUAL = 1e-6
"""Relative difference up to which two rates count as equal."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Trees and rings on one allocation, or one class of them; rates in GB/s of algorithm bandwidth.

    gpus: the allocation; for a class its representative.
    members: allocations of the row; 1 for a single allocation.
    channel: channel of the trees; None if no path joins the GPUs.
    trees, bound: rate of the packed trees, and its upper bound; both 0 if no path joins the GPUs, infinite for a single
    GPU.
    tree_count, height: number of packed trees, and edges on the longest root-to-leaf path.
    ring: rate of the ring that `topoplan.ring_plan` selects; 0 for none.
    ring_kind: "nvlink ring", "pcie ring" or "none" ("trivial" for a single GPU). A PCIe ring beside NVLink trees means
    that NVLink has no ring here.
    relay: rate of NVLink rings with relays; None if the trees do not run over NVLink.
    double_tree: rate of the double binary tree; None for collectives that have none.
    ratio: ``trees / ring``, rounded from the exact quotient; nan without a ring or traffic.
    relay_ratio: ``trees / relay``, or None.
    notes: why a ring fell back, what is not proved, why no plan exists.
    others: rates of other registered schedules with a column, by its head; None without such a schedule.
    nccl, nccl_kind: rate of NCCL's best, 0 for none, and its kind: that of the ring, "nccl tree", "nvls", "nvls tree"
    or "none".
    nccl_ratio: ``trees / nccl``, or None.
    in_network: rate of packed trees if switches used all stated capabilities (`Device.capable`); None if the trees of
    this row do so already, or without such switches.
    allocations: all allocations of the row, ascending; empty for too many.
    nccl_nvls, nccl_nvls_kind: rate and kind of NCCL's NVLS, if switches could add and are not asked to; None and "none"
    otherwise.
    jaccl, jaccl_kind: rate and kind of JACCL's best on Apple's GPUs, 0 and "none" where it has none; None and "none" on
    others. NCCL does not run there, so texts leave its rates out.
    quickest: the implementation that is expected to be quickest, from each size on at which it changes; empty unless
    asked for.
    """

    collective: str
    gpus: tuple[int, ...]
    members: int
    channel: str | None = None
    trees: float = 0.0
    bound: float = 0.0
    tree_count: int = 0
    height: int = 0
    ring: float = 0.0
    ring_kind: str = NO_RING
    relay: float | None = None
    double_tree: float | None = None
    ratio: float = math.nan
    relay_ratio: float | None = None
    notes: tuple[str, ...] = ()
    others: tuple[tuple[str, float | None], ...] = ()
    nccl: float = 0.0
    nccl_kind: str = NO_RING
    nccl_ratio: float | None = None
    in_network: float | None = None
    allocations: tuple[tuple[int, ...], ...] = ()
    nccl_nvls: float | None = None
    nccl_nvls_kind: str = NO_RING
    jaccl: float | None = None
    jaccl_kind: str = NO_RING
    quickest: tuple[Quickest, ...] = ()

    @property
    def nccl_best(self) -> tuple[float, str]:
        """Rate and kind of NCCL's best as NCCL runs by default: NVLS counts where switches could add."""
        nvls = self.nccl_nvls or 0.0
        return (nvls, self.nccl_nvls_kind) if nvls > self.nccl * (1 + EQUAL) else (self.nccl, self.nccl_kind)

    @property
    def nccl_best_ratio(self) -> float | None:
        """``trees`` over the rate of `nccl_best`, or None."""
        rate, _ = self.nccl_best
        return self.nccl_ratio if rate == self.nccl else self.trees / rate

    @property
    def library(self) -> str:
        """JACCL on Apple's GPUs, NCCL on others."""
        return "NCCL" if self.jaccl is None else "JACCL"

    @property
    def library_best(self) -> tuple[float, str]:
        """Rate and kind of the best schedule of `library`; rate 0 for none."""
        return self.nccl_best if self.jaccl is None else (self.jaccl, self.jaccl_kind)

    @property
    def library_ratio(self) -> float | None:
        """``trees`` over the rate of `library_best`, or None."""
        if self.jaccl is None:
            return self.nccl_best_ratio
        return self.trees / self.jaccl if self.jaccl else None

    @property
    def schedules(self) -> tuple[tuple[str, float], ...]:
        """Names and rates of the schedules beside the trees that exist here, as tables and figures show them."""
        if self.jaccl is not None:
            ours = ((self.jaccl_kind, self.jaccl), (DOUBLE_TREE, self.double_tree), *self.others)
            return tuple((name, rate) for name, rate in ours if rate)
        every = (
            (f"NCCL's best today: {self.nccl_best[1]}", self.nccl_best[0]),
            (
                f"NCCL without NVLS: {self.nccl_kind}",
                self.nccl if self.nccl_best[1] != self.nccl_kind else None,
            ),
            (f"NCCL before 2.8: {self.ring_kind}", self.ring),
            ("ring with relayed hops", self.relay),
            (DOUBLE_TREE, self.double_tree),
            *self.others,
        )
        return tuple((name, rate) for name, rate in every if rate)

    @property
    def rival(self) -> tuple[float, str]:
        """Rate and kind of the fastest of NCCL's best and the double binary tree; rate 0 for none."""
        double = self.double_tree or 0.0
        return (double, DOUBLE_TREE) if double > self.nccl_best[0] else self.nccl_best

    @property
    def rival_ratio(self) -> float | None:
        """``trees`` over the rate of `rival`, or None."""
        rate, kind = self.rival
        if kind != DOUBLE_TREE:
            return self.nccl_best_ratio
        return self.trees / rate if math.isfinite(self.trees) else None


@dataclass(frozen=True, slots=True)
class Summary:
    """A summary of comparisons.

    classes, allocations: number of rows and of their allocations.
    without_nvlink_ring, ring_over_pcie: classes whose trees run over NVLink while NVLink has no ring, and those of them
    with a ring over PCIe.
    over_pcie, without_plan: classes that NVLink does not connect, planned over PCIe (with NVLink islands) or not at
    all.
    below_ring: classes with trees slower than the ring.
    lowest, highest: of trees / ring, over the classes that have both; None without one.
    mean, weighted_mean: geometric mean of trees / ring, over classes and over allocations.
    relay_highest, relay_mean: the same of trees / relaying ring, over classes.
    nccl_equal: classes with NCCL's best as fast as the trees, to one part in a million, or faster; NVLS counts.
    nccl_lowest, nccl_highest, nccl_mean, nccl_weighted_mean: of trees / NCCL's best.
    """

    classes: int
    allocations: int
    without_nvlink_ring: int
    over_pcie: int
    without_plan: int
    below_ring: int
    lowest: float | None
    highest: float | None
    mean: float | None
    weighted_mean: float | None
    relay_highest: float | None
    relay_mean: float | None
    nccl_equal: int = 0
    nccl_lowest: float | None = None
    nccl_highest: float | None = None
    nccl_mean: float | None = None
    nccl_weighted_mean: float | None = None
    ring_over_pcie: int = 0

    def __str__(self) -> str:
        over_pcie = ""
        if self.ring_over_pcie:
            every = self.ring_over_pcie == self.without_nvlink_ring
            whose = "their ring" if every else f"the ring of {self.ring_over_pcie} of them"
            over_pcie = f": {whose} runs over PCIe"
        apart = (
            (self.below_ring, "have trees below the ring"),
            (self.without_nvlink_ring, f"have NVLink but no NVLink ring{over_pcie}"),
            (self.over_pcie, "have no NVLink path for all GPUs and use PCIe too"),
            (self.without_plan, "have no path at all"),
        )
        lines = [f"{counted(self.allocations, 'allocation')} in {counted(self.classes, 'class')}"]
        lines += [f"{number} classes {what}" for number, what in apart if number]
        if self.nccl_lowest is not None:
            lines.append(
                f"trees / NCCL's best: {self.nccl_lowest:.3g} to {self.nccl_highest:.3g}, geometric mean "
                f"{self.nccl_mean:.3g} over classes and {self.nccl_weighted_mean:.3g} over allocations, equal in "
                f"{counted(self.nccl_equal, 'class')}"
            )
        if self.lowest is not None:
            lines.append(
                f"trees / ring of NCCL before 2.8: {self.lowest:.3g} to {self.highest:.3g}, geometric mean "
                f"{self.mean:.3g} over classes and {self.weighted_mean:.3g} over allocations"
            )
        if self.relay_mean is not None:
            lines.append(
                f"trees / ring with relayed hops: up to {self.relay_highest:.3g}, geometric mean {self.relay_mean:.3g}"
            )
        return "\n".join(lines)


def beats_library(row: Comparison) -> bool:
    """Return whether the trees are faster than the library's best, by more than one part in a million."""
    return row.library_ratio is not None and row.library_ratio > 1 + EQUAL


def summary(rows: Sequence[Comparison]) -> Summary:
    """Summarise comparisons, of one collective or of several."""
    pairs = [(row.ratio, row.members) for row in rows if math.isfinite(row.ratio)]
    ratios = [ratio for ratio, _ in pairs]
    relayed = [row.relay_ratio for row in rows if row.relay_ratio is not None]
    nccl = [(ratio, row.members) for row in rows if (ratio := row.nccl_best_ratio) is not None]
    return Summary(
        classes=len(rows),
        allocations=sum(row.members for row in rows),
        without_nvlink_ring=sum(
            row.channel == "nvlink" and row.ring_kind in (NO_RING, "pcie ring") for row in rows
        ),
        ring_over_pcie=sum(row.channel == "nvlink" and row.ring_kind == "pcie ring" for row in rows),
        over_pcie=sum(row.channel in ("pcie", ALL) for row in rows),
        without_plan=sum(row.channel is None for row in rows),
        below_ring=sum(ratio < 1 for ratio in ratios),
        lowest=min(ratios, default=None),
        highest=max(ratios, default=None),
        mean=_geometric_mean([(ratio, 1) for ratio in ratios]),
        weighted_mean=_geometric_mean(pairs),
        relay_highest=max(relayed, default=None),
        relay_mean=_geometric_mean([(ratio, 1) for ratio in relayed]),
        nccl_equal=sum(ratio <= 1 + EQUAL for ratio, _ in nccl),
        nccl_lowest=min((ratio for ratio, _ in nccl), default=None),
        nccl_highest=max((ratio for ratio, _ in nccl), default=None),
        nccl_mean=_geometric_mean([(ratio, 1) for ratio, _ in nccl]),
        nccl_weighted_mean=_geometric_mean(nccl),
    )


def _geometric_mean(pairs: Sequence[tuple[float, int]]) -> float | None:
    if not pairs:
        return None
    return math.exp(math.fsum(n * math.log(x) for x, n in pairs) / sum(n for _, n in pairs))


def format_table(rows: Sequence[Comparison], *, widest: int | None = None) -> str:
    """Return one line for each comparison under a line of heads, without a final newline; rates in GB/s.

    ``/ring``, ``/relay`` and ``/NCCL`` are the trees' rate over the preceding column, ``busbw`` is the trees' bus
    bandwidth, ``NCCL`` is NCCL's best, with its algorithm, and ``double tree`` the double binary tree. ``in-network``
    appears if switches could add and do not: the trees' rate with them. A dash means no value.

    widest: characters of a line: columns that do not fit beside the trees go to tables below, rings and then NCCL. None
    for one table.

    >>> import topoplan
    >>> from topoplan.operate.compare.comparison import compare
    >>> machine = topoplan.load("dgx-1v")
    >>> print(format_table([compare(machine, gpus=[1, 4, 5, 7]), compare(machine, gpus=[4, 5, 6, 7])], widest=100))
    GPUs     allocations  channel    trees    busbw    bound  count  height
    1,4,5,7            1  nvlink     50.00    75.00    50.00      2       2
    4-7                1  nvlink     75.00   112.50    75.00      2       2
    <BLANKLINE>
    GPUs        ring  ring type     /ring    relay  /relay     NCCL  NCCL algorithm   /NCCL  double tree
    1,4,5,7     5.33  pcie ring     9.38x    33.33   1.50x    50.00  nccl tree        1.00x        16.67
    4-7        66.67  nvlink ring   1.12x    66.67   1.12x    75.00  nccl tree        1.00x        50.00
    """
    heads = tuple(dict.fromkeys(head for row in rows for head, _ in row.others))
    helped = any(row.in_network is not None for row in rows)
    columns: dict[str, list[str]] = {
        "GPUs": [number_ranges(row.gpus) for row in rows],
        "allocations": [str(row.members) for row in rows],
        "channel": [row.channel or "none" for row in rows],
        "trees": [_rate(row.trees) for row in rows],
        "busbw": [_rate(row.trees * bus_factor(row.collective, len(row.gpus))) for row in rows],
        "bound": [_rate(row.bound) for row in rows],
        "count": [str(row.tree_count) for row in rows],
        "height": [str(row.height) for row in rows],
        "ring": [_rate(row.ring) for row in rows],
        "ring type": [row.ring_kind for row in rows],
        "/ring": [_times(row.ratio) for row in rows],
        "relay": [_rate(row.relay) for row in rows],
        "/relay": [_times(row.relay_ratio) for row in rows],
        "NCCL": [_rate(row.nccl_best[0]) for row in rows],
        "NCCL algorithm": [row.nccl_best[1] for row in rows],
        "/NCCL": [_times(row.nccl_best_ratio) for row in rows],
        "double tree": [_rate(row.double_tree) for row in rows],
        **({"in-network": [_rate(row.in_network) for row in rows]} if helped else {}),
    }
    for head in heads:
        columns[head] = [_rate(dict(row.others).get(head)) for row in rows]
    widths = {head: max(_LEAST.get(head, 7), len(head), *map(len, cells)) for head, cells in columns.items()}
    names = list(widths)
    tables = [names[: names.index("ring")]]
    for first, last in pairwise([*map(names.index, ("ring", "NCCL")), len(names)]):
        wider = [*tables[-1], *names[first:last]]
        if widest is None or sum(widths[head] + 2 for head in wider) - 2 <= widest:
            tables[-1] = wider
        else:
            tables.append(["GPUs", *names[first:last]])
    return "\n\n".join(_lines(columns, {head: widths[head] for head in shown}) for shown in tables)


_WORDS = ("GPUs", "channel", "ring type", "NCCL algorithm")
_LEAST = {
    "GPUs": 4,
    "count": 5,
    "height": 6,
    "ring type": 11,
    "/ring": 6,
    "/relay": 6,
    "NCCL algorithm": 14,
    "/NCCL": 6,
}
"""Least characters of a column, so that tables of several runs match."""


def _lines(columns: dict[str, list[str]], widths: dict[str, int]) -> str:
    padded = [
        [f"{cell:<{wide}}" if head in _WORDS else f"{cell:>{wide}}" for cell in (head, *columns[head])]
        for head, wide in widths.items()
    ]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*padded, strict=True))


HEADS = """\
algbw in GB/s, /…: the trees' over it; ring: NCCL's before 2.8; relay: ring with relayed hops; NCCL: its best today
one allocation stands for all with isomorphic links: allocations counts them; count, height: number of trees, hops"""
"""Legend of the table."""


def _rate(value: float | None) -> str:
    return f"{value:.2f}" if value is not None and 0 < value < math.inf else "-"


def _times(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.2f}x"


def to_object(rows: Sequence[Comparison]) -> dict[str, object]:
    """Return the rows and their summary as one JSON object.

    Keys are the fields of `Comparison` and ``busbw``, that of the trees, and the fields of `Summary`; ``others`` and
    ``quickest`` only if not empty. null stands for None, for the infinite rates of a single GPU, and for a missing
    ring, schedule of NCCL or ratio.
    """
    return {"rows": [_row_object(row) for row in rows], "summary": asdict(summary(rows))}


def _row_object(row: Comparison) -> dict[str, object]:
    made: dict[str, object] = {}
    for one in fields(row):
        value = getattr(row, one.name)
        if isinstance(value, float):
            value = finite(value)
            if (one.name, value) in (("ring", 0.0), ("nccl", 0.0)):
                value = None
        made[one.name] = list(value) if isinstance(value, tuple) else value
        if one.name == "trees":
            made["busbw"] = finite(row.trees * bus_factor(row.collective, len(row.gpus)))
    del made["others"], made["quickest"]
    if row.quickest:
        made["quickest"] = [asdict(one) for one in row.quickest]
    if row.others:
        made["others"] = {head: None if rate is None else finite(rate) for head, rate in row.others}
    return made

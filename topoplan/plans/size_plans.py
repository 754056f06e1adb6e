"""Plans by size: one plan for each range of message sizes, of the same collective among the same ranks.

Small messages need few start-ups, large ones bandwidth, and no plan is best at both. The ranges cover every size from 0
bytes without gap or overlap; `topoplan.model.schedule_selection` chooses them.

In the file, format ``topoplan.plans/1`` (``/2`` if ranks of a plan exchange elements), each plan is the object of a
plan file without its ``topology``, which the file states once, after the ranges. Writing is deterministic and reading
checks types only, as for single plans.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Self

from topoplan.errors import PlanError, UsageError
from topoplan.machine.topology import Topology
from topoplan.plans.chain_limits import Limit, limit_from_object
from topoplan.plans.deferred_plan import DeferredPlan
from topoplan.plans.file_values import (
    check_format,
    check_known,
    compact,
    parse_object,
    read_bytes,
    read_list,
    read_number,
    read_object,
)
from topoplan.plans.plan import (
    Plan,
    PlanCollection,
    Plans,
    SizeRange,
    embedded_topology,
    row_texts,
    without_topology,
)
from topoplan.plans.survival import SurvivalPlans
from topoplan.units import check_type

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from topoplan.cli.results import Result
    from topoplan.plans.plan_by_kind import PlanByKind

SIZE_PLANS_FORMAT = "topoplan.plans/1"
SIZE_PLANS_KEYS = (
    *("format", "collective", "ranges", "topology", "times"),
    *("ranks", "bound", "crossovers", "table", "points", "engine", "costs", "candidates"),
    *("digest", "seconds", "notes"),
)
"""Keys of a file of plans by size; ``plan --sizes --json`` adds those of the last two lines."""

SIZE_PLANS_FORMAT_2 = "topoplan.plans/2"
"""Format of files with a plan in which ranks exchange elements."""


@dataclass(frozen=True, slots=True)
class SizeTimes:
    """Model times at some sizes, as a file states them; `topoplan.model.times_by_size` recomputes them.

    ``limits`` are the bounds of schedules with few start-ups; ``points`` are (bytes, model time of the plan in seconds,
    least time of any schedule in seconds).
    """

    limits: tuple[Limit, ...]
    points: tuple[tuple[int, float, float], ...]

    def to_object(self) -> dict[str, object]:
        """Return the JSON object of a plan file."""
        return {
            "limits": [one.to_object() for one in self.limits],
            "points": [
                {"size": size, "seconds": seconds, "bound_seconds": least}
                for size, seconds, least in self.points
            ],
        }

    @staticmethod
    def from_object(item: object) -> SizeTimes:
        """Read such an object; PlanError if a key is missing or of a wrong type."""
        value = read_object(item, "times")
        points = []
        for row in read_list(value.get("points"), "times: points"):
            point = read_object(row, "times: point")
            seconds, least = (
                read_number(point.get(name), f"times: {name}") for name in ("seconds", "bound_seconds")
            )
            points.append((read_bytes(point.get("size"), "times: size"), seconds, least))
        limits = read_list(value.get("limits"), "times: limits")
        return SizeTimes(tuple(limit_from_object(one) for one in limits), tuple(points))


@dataclass(frozen=True, slots=True, repr=False)
class SizePlans(PlanCollection):
    """The plans of one collective by message size.

    Parameters
    ----------
    ranges : tuple of SizeRange
        Ascending from 0 and contiguous; the last is unlimited.
    times : SizeTimes or None
        Model times beside the least time of any schedule; None if not requested.

    Raises
    ------
    PlanError
        The ranges leave a gap, or their plans differ in collective, ranks, root or machine.

    Examples
    --------
    >>> import topoplan
    >>> machine = topoplan.load("dgx-2")
    >>> few, many = topoplan.one_hop_plan(machine, "broadcast"), topoplan.plan(machine, "broadcast")
    >>> plans = SizePlans((SizeRange(0, 65536, few), SizeRange(65536, None, many)))
    >>> plans.at(65535).height, plans.at(65536).height, plans.crossovers
    (1, 2, (65536,))
    >>> [row["schedule"] for row in plans.rows][:2]
    ['one-hop', 'one-hop']
    """

    ranges: tuple[SizeRange, ...]
    times: SizeTimes | None = None

    def __post_init__(self) -> None:
        if not self.ranges:
            raise PlanError("plans by size need at least one range of sizes")
        expected: int | None = 0
        for number, one in enumerate(self.ranges):
            if one.start != expected:
                begins = "nowhere, since the one before has no end" if expected is None else f"at {expected}"
                raise PlanError(f"range {number} starts at {one.start} bytes; it must start {begins}")
            if one.stop is not None and one.stop <= one.start:
                raise PlanError(f"range {number} from {one.start} to {one.stop} bytes holds no size")
            for name in ("collective", "ranks", "root", "topology"):
                if getattr(one.plan, name) != getattr(self.ranges[0].plan, name):
                    raise PlanError(
                        f"the plan of range {number} has another {name} than that of range 0; "
                        "plans by size are of one collective among the same ranks of one machine"
                    )
            expected = one.stop
        if expected is not None:
            raise PlanError(f"no range covers sizes from {expected} bytes on; the last one must have no end")

    @property
    def rows(self) -> list[dict[str, object]]:
        """A row for each size, as of ``plan --sizes --csv``: schedule, model time and least time of any, in seconds."""
        return self._result().rows

    def to_dataframe(self) -> pandas.DataFrame:
        """Return the rows as a `pandas.DataFrame`; UsageError if pandas is not installed."""
        return self._result().to_dataframe()

    def plot(self) -> Figure:
        """Return a matplotlib figure of busbw over size, as ``topoplan plan --sizes --plot`` draws it."""
        return self._result().plot()

    def summary(self) -> str:
        """Return the table of ``topoplan plan --sizes``, which ``print(plans)`` prints.

        The next best schedule is known to `topoplan.plan_by_size` only, not to a file.
        """
        return str(self._result())

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.summary())}</pre>"

    def _result(self) -> Result:
        from topoplan.cli.plan_sizes import result_of

        return result_of(self)

    @property
    def format(self) -> str:
        """The format of the file: readers of the first do not know the exchange of elements."""
        return SIZE_PLANS_FORMAT_2 if any(plan.exchanges for plan in self.plans) else SIZE_PLANS_FORMAT

    def to_json(self) -> str:
        rows = ",\n ".join(row_texts(self.to_object()["ranges"]))
        times = "" if self.times is None else f',\n "times": {compact(self.times.to_object())}'
        return (
            f'{{"format": {compact(self.format)},\n "collective": {compact(self.collective)},\n'
            f' "ranges": [\n {rows}\n ],\n "topology": {compact(self.topology.to_object())}{times}}}\n'
        )

    def to_object(self) -> dict[str, object]:
        """Return the file as a JSON object."""
        return {
            "format": self.format,
            "collective": self.collective,
            "ranges": [
                {"from": one.start, "to": one.stop, "plan": without_topology(one.plan)} for one in self.ranges
            ],
            "topology": self.topology.to_object(),
            **({} if self.times is None else {"times": self.times.to_object()}),
        }

    @classmethod
    def from_object(cls, value: dict[str, object]) -> Self:
        value = read_object(value, "a plan file's object")
        check_format(
            value, SIZE_PLANS_FORMAT_2 if value.get("format") == SIZE_PLANS_FORMAT_2 else SIZE_PLANS_FORMAT
        )
        check_known(value, SIZE_PLANS_KEYS, "the plans by size")
        topology = embedded_topology(value)
        rows = read_list(value.get("ranges"), "ranges")
        plans = cls(
            tuple(_read_range(row, f"range {number}", topology) for number, row in enumerate(rows)),
            SizeTimes.from_object(value["times"]) if "times" in value else None,
        )
        if value.get("collective") != plans.collective:
            raise PlanError(
                f"collective {value.get('collective')!r} is not that of the plans, {plans.collective}"
            )
        return plans


def _read_range(item: object, where: str, topology: Topology) -> SizeRange:
    value = read_object(item, where)
    check_known(value, ("from", "to", "plan"), where)
    stop, plan = value.get("to"), read_object(value.get("plan"), f"{where}: plan")
    try:
        made = Plan.from_object(plan, topology)
    except PlanError as error:
        raise error.under(where) from None
    start = read_bytes(value.get("from"), f"{where}: from")
    return SizeRange(start, None if stop is None else read_bytes(stop, f"{where}: to"), made)


def load_plan(path: str | os.PathLike[str]) -> Plans:
    """Read a plan file; its claims are not trusted (see `topoplan.verify`).

    Parameters
    ----------
    path : str or path
        A file that ``topoplan plan -o`` wrote.

    Returns
    -------
    Plan, SizePlans or SurvivalPlans
        Plans by size if the file was written with ``--sizes``, plans for failures if with ``--survive``. The plan of a
        cluster by kind is listed with all its trees (see `topoplan.load_plan_by_kind`).

    Raises
    ------
    UsageError
        The file cannot be read, or the trees of a cluster by kind are too many for a list.
    PlanError
        The file is not a plan file.

    See Also
    --------
    topoplan.verify
    """
    return parse_plan_file(read_plan_file(path))


def load_plan_by_kind(path: str | os.PathLike[str]) -> PlanByKind:
    """Read the plan file of a cluster by kind, without listing its trees; its claims are not trusted.

    Raises
    ------
    UsageError
        The file cannot be read.
    PlanError
        The file holds no plan of a cluster by kind.

    See Also
    --------
    topoplan.verify, topoplan.plan_by_kind
    """
    from topoplan.plans.plan_by_kind import PlanByKind

    value = parse_object(read_plan_file(path))
    if "cluster" not in value:
        raise PlanError(f"{os.fspath(path)} holds no plan of a cluster by kind; use topoplan.load_plan")
    return PlanByKind.from_object(value)


def load_survival(path: str | os.PathLike[str]) -> SurvivalPlans:
    """Read a file that ``topoplan plan --survive 1 -o`` wrote; its claims are not trusted.

    Raises
    ------
    UsageError
        The file cannot be read.
    PlanError
        The file holds no plans for failures.

    See Also
    --------
    topoplan.plan_survival
    """
    return SurvivalPlans.from_json(read_plan_file(path))


MOST_OF_A_PATH = 200
"""Characters of a file's name in a message: a plan's text may be given in place of its name."""


def read_plan_file(path: str | os.PathLike[str]) -> str:
    """Return the text of a file of plans; errors of reading as `load_plan`."""
    check_type("path", path, str, os.PathLike, remedy="give a plan file, made by topoplan plan -o")
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{os.fspath(path)[:MOST_OF_A_PATH]} cannot be read: {error.strerror}; give a plan file, made by topoplan "
            "plan -o"
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"{os.fspath(path)} is binary, not text; give a plan file") from None


def parse_plan_file(text: str) -> Plans:
    """Read the text of a plan file of any kind; errors as `Plan.from_json` and `SizePlans.from_json`."""
    found = parse_job_plan(text)
    return found.by_kind.listed() if isinstance(found, DeferredPlan) else found


def parse_job_plan(text: str) -> Plans:
    """Read a text as `parse_plan_file`, but list the plan of a cluster by kind only where a job needs the list."""
    value = parse_object(text)
    by_size = value.get("format") in (SIZE_PLANS_FORMAT, SIZE_PLANS_FORMAT_2)
    if "failures" in value and not by_size:
        return SurvivalPlans.from_object(value)
    if "cluster" in value:
        from topoplan.plans.plan_by_kind import PlanByKind

        return DeferredPlan(PlanByKind.from_object(value))
    return SizePlans.from_object(value) if by_size else Plan.from_object(value)

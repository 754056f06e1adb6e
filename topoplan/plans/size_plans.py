"""Plans by size: one plan for each range of message sizes, of the same collective among the same ranks.

Small messages want few start-ups, large ones bandwidth, and no one plan is best at both. The ranges cover every size
from 0 bytes on without gap or overlap; what chose them is `topoplan.choice`.

In the file, format ``topoplan.plans/1``, each plan is an object of format ``topoplan.plan/1`` without its ``topology``,
which stands once beside the ranges. Writing is deterministic and reading believes nothing but the types, as for single
plans.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from topoplan.errors import PlanError, UsageError
from topoplan.plans.json_values import check_format, compact, parse_object, read_bytes, read_list, read_object
from topoplan.plans.plan import Plan, Plans, SizeRange, embedded_topology, plan_text
from topoplan.topology import Topology

FORMAT = "topoplan.plans/1"


@dataclass(frozen=True, slots=True)
class SizePlans(Plans):
    """The plans of one collective by message size.

    Parameters
    ----------
    ranges : tuple of SizeRange
        Ascending from 0, each beginning where the one before ends, the last without end.

    Raises
    ------
    PlanError
        The ranges leave a gap, or their plans differ in collective, ranks, root or machine.

    Examples
    --------
    >>> import topoplan
    >>> machine = topoplan.load("dgx-2")
    >>> few, many = topoplan.one_hop(machine, "broadcast"), topoplan.plan(machine, "broadcast")
    >>> plans = SizePlans((SizeRange(0, 65536, few), SizeRange(65536, None, many)))
    >>> plans.at(65535).height, plans.at(65536).height, plans.crossovers
    (1, 2, (65536,))
    """

    ranges: tuple[SizeRange, ...]

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
    def collective(self) -> str:
        """What all the plans do."""
        return self.ranges[0].plan.collective

    @property
    def ranks(self) -> tuple[str, ...]:
        """Device of each rank."""
        return self.ranges[0].plan.ranks

    @property
    def root(self) -> int | None:
        """Root rank of a broadcast or reduce."""
        return self.ranges[0].plan.root

    @property
    def topology(self) -> Topology:
        """The machine."""
        return self.ranges[0].plan.topology

    @property
    def notes(self) -> tuple[str, ...]:
        """What the planners of all ranges could not reach or prove, each note once."""
        return tuple(dict.fromkeys(note for plan in self.plans for note in plan.notes))

    def to_json(self) -> str:
        """The file, format ``topoplan.plans/1``; the same bytes for the same plans, always."""
        rows = ",\n ".join(
            f'{{"from": {one.start}, "to": {compact(one.stop)}, "plan": {plan_text(_without_topology(one.plan))}}}'
            for one in self.ranges
        )
        return (
            f'{{"format": {compact(FORMAT)},\n "collective": {compact(self.collective)},\n "ranges": [\n {rows}\n ],\n'
            f' "topology": {compact(self.topology.to_object())}}}\n'
        )

    @staticmethod
    def from_json(text: str) -> SizePlans:
        """Read a file of plans by size; its claims are not trusted (see `verify_all`).

        Raises
        ------
        PlanError
            The text is no such file; names the key, and the range where there is one.
        """
        return SizePlans.from_object(parse_object(text))

    def to_object(self) -> dict[str, object]:
        """The file as a JSON object."""
        return {
            "format": FORMAT,
            "collective": self.collective,
            "ranges": [
                {"from": one.start, "to": one.stop, "plan": _without_topology(one.plan)}
                for one in self.ranges
            ],
            "topology": self.topology.to_object(),
        }

    @staticmethod
    def from_object(value: dict[str, object]) -> SizePlans:
        """Read such an object; errors as `from_json`."""
        check_format(value, FORMAT)
        topology = embedded_topology(value)
        rows = read_list(value.get("ranges"), "ranges")
        plans = SizePlans(
            tuple(_read_range(row, f"range {number}", topology) for number, row in enumerate(rows))
        )
        if value.get("collective") != plans.collective:
            raise PlanError(
                f"collective {value.get('collective')!r} is not that of the plans, {plans.collective}"
            )
        return plans


def _without_topology(plan: Plan) -> dict[str, object]:
    value = plan.to_object()
    del value["topology"]
    return value


def _read_range(item: object, where: str, topology: Topology) -> SizeRange:
    value = read_object(item, where)
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
    Plan or SizePlans
        Plans by size where the file was made with ``--sizes``.

    Raises
    ------
    UsageError
        The file cannot be read.
    PlanError
        It is no plan file.
    """
    return parse_plan_file(read_plan_file(path))


def read_plan_file(path: str | os.PathLike[str]) -> str:
    """The text of a file of plans; errors of reading as `load_plan`."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{os.fspath(path)} cannot be read: {error.strerror}; give a plan file, made by topoplan plan -o"
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"{os.fspath(path)} is binary, not text; give a plan file") from None


def parse_plan_file(text: str) -> Plans:
    """Read the text of a plan file of either kind; errors as `Plan.from_json` and `SizePlans.from_json`."""
    value = parse_object(text)
    return SizePlans.from_object(value) if value.get("format") == FORMAT else Plan.from_object(value)

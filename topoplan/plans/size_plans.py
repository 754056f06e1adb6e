"""Plans by size: one plan for each range of message sizes, of the same collective among the same ranks.

Small messages want few start-ups, large ones bandwidth, and no one plan is best at both. The ranges cover every size
from 0 bytes on without gap or overlap; what chose them is `topoplan.choice`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass

from topoplan.errors import PlanError, UsageError
from topoplan.plans.plan import Plan
from topoplan.plans.verify import Verification, verify
from topoplan.topology import Topology
from topoplan.units import format_size


@dataclass(frozen=True, slots=True)
class SizeRange:
    """Sizes from ``start`` bytes up to but not including ``stop`` (None: without end), and their plan.

    Bytes are those of the user's buffer; for allgather and reduce_scatter of the full gathered one.
    """

    start: int
    stop: int | None
    plan: Plan

    def __str__(self) -> str:
        """The range in words."""
        return f"sizes from {format_size(self.start)}" + (
            "" if self.stop is None else f" to {format_size(self.stop)}"
        )


@dataclass(frozen=True, slots=True)
class SizePlans:
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
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each range."""
        return tuple(one.plan for one in self.ranges)

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

    @property
    def crossovers(self) -> tuple[int, ...]:
        """The sizes in bytes from which another plan takes over, ascending."""
        return tuple(one.start for one in self.ranges[1:])

    @property
    def digest(self) -> str:
        """SHA-256 of the file, by which ranks agree that they run the same plans at every size."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def range_at(self, nbytes: int) -> SizeRange:
        """The range that a size falls into; errors as `at`."""
        if nbytes < 0:
            raise UsageError(f"a buffer of {nbytes} bytes does not exist; give a size of zero or more")
        return self.ranges[bisect_right(self.crossovers, nbytes)]

    def at(self, nbytes: int) -> Plan:
        """The plan for a buffer of so many bytes.

        Raises
        ------
        UsageError
            ``nbytes`` is negative.
        """
        return self.range_at(nbytes).plan

    def to_json(self) -> str:
        """The file, format ``topoplan.plans/1``; the same bytes for the same plans, always."""
        from topoplan.plans.size_plans_json import dump_size_plans

        return dump_size_plans(self)

    @staticmethod
    def from_json(text: str) -> SizePlans:
        """Read a file of plans by size; its claims are not trusted (see `verify_all`).

        Raises
        ------
        PlanError
            The text is no such file; names the key, and the range where there is one.
        """
        from topoplan.plans.size_plans_json import parse_size_plans

        return parse_size_plans(text)


def plan_at(plans: Plan | SizePlans, nbytes: int) -> Plan:
    """The plan for a buffer of so many bytes: that of its range, or the one plan whatever the size."""
    return plans.at(nbytes) if isinstance(plans, SizePlans) else plans


def verify_all(plans: Plan | SizePlans) -> tuple[Verification, ...]:
    """Verify a plan, or the plan of every range.

    Returns
    -------
    tuple of Verification
        One for each range; one for a single plan.

    Raises
    ------
    PlanError
        The first thing that is wrong, with range, shard, stage and rank.
    """
    if isinstance(plans, Plan):
        return (verify(plans),)
    reports = []
    for one in plans.ranges:
        try:
            reports.append(verify(one.plan))
        except PlanError as error:
            raise error.under(f"{one}") from None
    return tuple(reports)

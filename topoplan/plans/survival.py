"""A plan together with one for every single failure of its machine, in one file: what to run when something dies.

Failures that the machine's symmetries take to each other share one plan. The first of them has it, and each other one
has a renaming of devices that turns the first one's machine into its own. A renaming is looked up, never searched for:
`SurvivalPlans.plan_without` plans nothing.

The file is that of the plan for the whole machine, format ``topoplan.plan/2``, with one more key, ``failures``. The
machine of each failure follows from the failure, so no other machine is in the file. Reading believes nothing but the
types; `verify_survival` rebuilds every failure's plan by its renaming and checks it on what is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from topoplan import degraded
from topoplan.errors import InfeasibleError, PlanError, TopologyError, UsageError
from topoplan.fabric.fabric import Fabric, usable_fabric
from topoplan.plans.json_values import compact, parse_object, read_list, read_object, read_text, read_whole
from topoplan.plans.plan import FORMAT_2, Plan, Plans, SizeRange, plan_text
from topoplan.plans.renaming import carried
from topoplan.plans.verify import Verification, verify
from topoplan.topology import Topology

KINDS = ("gpu", "link", "device")
"""What can fail."""

LOSABLE = ("nvswitch", "pcie", "nic", "switch", "helper")
"""Kinds of devices whose loss may leave a machine; without a CPU there is none."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing that a machine loses.

    Parameters
    ----------
    kind : str
        gpu, link or device.
    name : str
        The device, a NIC by its own name where it stands as two sides; of a link its two ends, ``gpu0-gpu3``.
    """

    kind: str
    name: str

    def __str__(self) -> str:
        """In words."""
        return f"link {self.name}" if self.kind == "link" else self.name

    def left_of(self, topology: Topology) -> Topology:
        """The machine without it; UsageError where it is not there, or nothing is left."""
        if self.kind == "link":
            return degraded.without_links(topology, [self.name])
        if self.kind == "device":
            return degraded.without_devices(topology, [self.name])
        if self.name not in topology.gpus:
            raise UsageError(f"{topology.name} has no GPU {self.name!r}")
        return degraded.without_gpus(topology, [topology.gpus.index(self.name)])


def single_failures(fabric: Fabric) -> tuple[Failure, ...]:
    """Every GPU, link and switch, NIC or helper whose loss a plan on a fabric may feel, in the machine's order.

    Examples
    --------
    >>> import topoplan
    >>> found = single_failures(Fabric(topoplan.load("dgx-1v"), ("nvlink",)))
    >>> len(found), str(found[0]), str(found[-1])
    (24, 'gpu0', 'link gpu3-gpu7')
    """
    kinds = {device.name: device.kind for device in fabric.topology.devices}
    gpus = [Failure("gpu", name) for name in fabric.ranks]
    wires: dict[frozenset[str], str] = {}
    for link in fabric.links:
        one, other = degraded.nic_name(link.src), degraded.nic_name(link.dst)
        if one != other:
            wires.setdefault(frozenset((one, other)), f"{one}-{other}")
    links = [Failure("link", wire) for wire in wires.values()]
    rest = [degraded.nic_name(name) for name in fabric.nodes[fabric.size :] if kinds[name] in LOSABLE]
    return (*gpus, *links, *(Failure("device", name) for name in dict.fromkeys(rest)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is left after a failure: a plan of its own, the renamed plan of an earlier failure, or none.

    Parameters
    ----------
    failure : Failure
    plan : Plan or None
        Of its own.
    like : int or None
        Number of the earlier outcome whose plan is this one's too, renamed.
    renaming : tuple of (str, str)
        With ``like``: devices of the whole machine that are renamed, and what to; others keep their names.
    reason : str
        Why there is no plan at all; else empty.
    """

    failure: Failure
    plan: Plan | None = None
    like: int | None = None
    renaming: tuple[tuple[str, str], ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SurvivalPlans(Plans):
    """The plan of a whole machine, and of the machine after each single failure.

    Parameters
    ----------
    whole : Plan
        What runs while nothing is broken, and what commands that take one plan run.
    outcomes : tuple of Outcome
        One for each of `single_failures`, in that order.
    seconds : float or None
        Time it took to plan; not in the file.

    Examples
    --------
    >>> import topoplan
    >>> book = topoplan.plan_survival("v100x4")
    >>> len(book.outcomes), len(book.own)
    (10, 6)
    >>> book.plan_without(gpus=[1]).ranks, book.plan_without(links=["gpu0-gpu2"]).rate
    (('gpu0', 'gpu2', 'gpu3'), 66.66666666666667)
    """

    whole: Plan
    outcomes: tuple[Outcome, ...]
    seconds: float | None = field(default=None, compare=False)

    @property
    def collective(self) -> str:
        """What all the plans do."""
        return self.whole.collective

    @property
    def ranks(self) -> tuple[str, ...]:
        """Device of each rank while nothing is broken."""
        return self.whole.ranks

    @property
    def root(self) -> int | None:
        """Root rank of a broadcast or reduce while nothing is broken."""
        return self.whole.root

    @property
    def topology(self) -> Topology:
        """The whole machine."""
        return self.whole.topology

    @property
    def notes(self) -> tuple[str, ...]:
        """What the planner could not reach or prove for the whole machine."""
        return self.whole.notes

    @property
    def ranges(self) -> tuple[SizeRange, ...]:
        """One range, of all sizes, with the plan of the whole machine."""
        return self.whole.ranges

    @property
    def own(self) -> tuple[Plan, ...]:
        """The plans that the file holds for failures; every other one is a renamed one of these."""
        return tuple(one.plan for one in self.outcomes if one.plan is not None)

    def plan_without(
        self, *, gpus: Sequence[int] = (), links: Iterable[str] = (), devices: Iterable[str] = ()
    ) -> Plan:
        """The plan after one failure, from the book alone: nothing is planned.

        Parameters
        ----------
        gpus : sequence of int
            Ranks of the whole machine's plan.
        links, devices : iterable of str
            As `topoplan.without_links` and `topoplan.without_devices` take them.

        Returns
        -------
        Plan
            The ranks that are left keep their order (`surviving_ranks` has their old numbers). Where the plan of the
            whole machine uses nothing of what is lost, the same trees.

        Raises
        ------
        UsageError
            Nothing of the sort is there, several things are lost at once, or one that the book has no plan for.
        InfeasibleError
            After this failure there is no plan; the message says why.
        """
        whole = self.whole.topology
        lost = [Failure("gpu", whole.gpus[gpu]) for gpu in (whole.select(gpus) if gpus else ())]
        lost += [Failure("link", wire) for wire in links] + [Failure("device", name) for name in devices]
        if not lost:
            return self.whole
        if len(lost) > 1:
            names = ", ".join(map(str, lost))
            raise UsageError(
                f"{names}: the book has plans for single failures; topoplan.replan plans for several"
            )
        number = self._number_of(lost[0])
        if number is not None:
            return self.plan_of(number)
        left = lost[0].left_of(whole)
        if Fabric(left, self.whole.channels).links == Fabric(whole, self.whole.channels).links:
            return carried(self.whole, {device.name: device.name for device in whole.devices}, left)
        raise UsageError(f"the book has no plan without {lost[0]}; topoplan.replan makes one")

    def plan_of(self, number: int) -> Plan:
        """The plan of an outcome, renamed where it is another one's.

        Raises
        ------
        InfeasibleError
            There is none.
        PlanError
            The renaming does not fit.
        """
        outcome = self.outcomes[number]
        if outcome.plan is not None:
            return outcome.plan
        if outcome.like is None:
            raise InfeasibleError(f"without {outcome.failure} there is no plan: {outcome.reason}")
        names = {device.name: device.name for device in self.whole.topology.devices}
        names.update(outcome.renaming)
        plan = self.outcomes[outcome.like].plan
        assert plan is not None, "outcomes are like those with plans of their own"
        return carried(plan, names, outcome.failure.left_of(self.whole.topology))

    def _number_of(self, lost: Failure) -> int | None:
        """The outcome of a failure, by whatever name it goes; None where there is none."""
        whole = self.whole.topology
        meant = partial(degraded.find_links, whole) if lost.kind == "link" else None
        name = lost.name if lost.kind == "link" else degraded.nic_name(lost.name)
        for number, outcome in enumerate(self.outcomes):
            failure = outcome.failure
            if failure.kind == lost.kind and (
                failure.name == name or (meant is not None and meant(failure.name) == meant(name))
            ):
                return number
        return None

    def to_json(self) -> str:
        """The file; the same bytes for the same plans, always."""
        rows = []
        for outcome in self.outcomes:
            row = _row(outcome)
            if outcome.plan is not None:
                text = plan_text(_without_topology(outcome.plan))
                rows.append(f'{compact(row)[:-1]}, "plan": {text}}}')
            else:
                rows.append(compact(row))
        head = plan_text({**self.whole.to_object(), "format": FORMAT_2})
        return f'{head[:-1]},\n "failures": [\n  ' + ",\n  ".join(rows) + "\n ]}\n"

    def to_object(self) -> dict[str, object]:
        """The file as a JSON object."""
        rows = [
            {**_row(one), **({} if one.plan is None else {"plan": _without_topology(one.plan)})}
            for one in self.outcomes
        ]
        return {**self.whole.to_object(), "format": FORMAT_2, "failures": rows}

    @staticmethod
    def from_json(text: str) -> SurvivalPlans:
        """Read such a file; its claims are not trusted (see `verify_survival`).

        Raises
        ------
        PlanError
            The text is no such file; names the key, and the failure where there is one.
        """
        return SurvivalPlans.from_object(parse_object(text))

    @staticmethod
    def from_object(value: dict[str, object]) -> SurvivalPlans:
        """Read such an object; errors as `from_json`."""
        if "failures" not in value:
            raise PlanError("the file has no key failures; topoplan plan --survive 1 -o makes one that has")
        whole = Plan.from_object({key: field for key, field in value.items() if key != "failures"})
        outcomes: list[Outcome] = []
        for number, item in enumerate(read_list(value["failures"], "failures")):
            try:
                outcomes.append(_read_outcome(item, whole.topology, outcomes))
            except (PlanError, UsageError) as error:
                fault = error if isinstance(error, PlanError) else PlanError(str(error))
                raise fault.under(f"failure {number}") from None
        return SurvivalPlans(whole, tuple(outcomes))


def surviving_ranks(before: Plan, after: Plan) -> tuple[int, ...]:
    """Old numbers of the ranks that are left, in the order of their new ones.

    Examples
    --------
    >>> import topoplan
    >>> book = topoplan.plan_survival("v100x4")
    >>> surviving_ranks(book.whole, book.plan_without(gpus=[1]))
    (0, 2, 3)
    """
    number = {name: rank for rank, name in enumerate(before.ranks)}
    return tuple(number[name] for name in after.ranks)


def _without_topology(plan: Plan) -> dict[str, object]:
    return {key: value for key, value in plan.to_object().items() if key != "topology"}


def _row(outcome: Outcome) -> dict[str, object]:
    """The row of an outcome, but for its own plan."""
    row: dict[str, object] = {outcome.failure.kind: outcome.failure.name}
    if outcome.like is not None:
        row["as"] = outcome.like
        if outcome.renaming:
            row["rename"] = dict(outcome.renaming)
    if outcome.reason:
        row["none"] = outcome.reason
    return row


def _read_outcome(item: object, whole: Topology, earlier: Sequence[Outcome]) -> Outcome:
    row = read_object(item, "a failure")
    unknown = [key for key in row if key not in (*KINDS, "plan", "as", "rename", "none")]
    kinds, ends = ([key for key in keys if key in row] for keys in (KINDS, ("plan", "as", "none")))
    if unknown or len(kinds) != 1 or len(ends) != 1 or ("rename" in row and ends != ["as"]):
        raise PlanError(
            f"a failure has one of gpu, link and device, and one of plan, as and none, not {', '.join(row)}"[
                :200
            ]
        )
    failure = Failure(kinds[0], read_text(row[kinds[0]], kinds[0]))
    if "none" in row:
        return Outcome(failure, reason=read_text(row["none"], "none"))
    left = failure.left_of(whole)
    if "plan" in row:
        return Outcome(failure, plan=Plan.from_object(read_object(row["plan"], "plan"), left))
    like = read_whole(row["as"], "as")
    if not 0 <= like < len(earlier) or earlier[like].plan is None:
        raise PlanError(f"as is {like}, which is no earlier failure with a plan of its own"[:200])
    moves = read_object(row.get("rename", {}), "rename")
    renaming = tuple((name, read_text(there, "rename")) for name, there in moves.items())
    known = {device.name for device in whole.devices}
    if {name for name, _ in renaming} - known or sorted(dict(renaming).values()) != sorted(dict(renaming)):
        raise PlanError("rename permutes no devices of the machine among themselves")
    return Outcome(failure, like=like, renaming=renaming)


def verify_survival(book: SurvivalPlans) -> tuple[Verification, ...]:
    """Recompute what the plan of the whole machine and that of every failure claims, without the solver.

    Returns
    -------
    tuple of Verification
        Of the whole machine's plan, then of each failure that leaves one.

    Raises
    ------
    PlanError
        The first thing that is wrong, with its failure: a plan that is wrong on the machine without what is lost, a
        failure that is missing, or one that leaves a plan though the file says none.
    """
    reports = [verify(book.whole)]
    wanted = single_failures(Fabric(book.whole.topology, book.whole.channels))
    told = [outcome.failure for outcome in book.outcomes]
    for number, (failure, asked) in enumerate(zip(told, wanted, strict=False)):
        if failure != asked:
            raise PlanError(f"failure {number} is that of {failure}; it must be {asked}")
    if len(told) != len(wanted):
        raise PlanError(f"the file has {len(told)} failures; the machine has {len(wanted)} over these links")
    for number, outcome in enumerate(book.outcomes):
        try:
            if outcome.plan is None and outcome.like is None:
                _check_none(book.whole, outcome.failure)
                continue
            plan = book.plan_of(number)
            if plan.collective != book.whole.collective:
                raise PlanError(f"it is a {plan.collective}, not a {book.whole.collective}")
            reports.append(verify(plan))
            root, before = plan.root, book.whole.root
            if before is not None and root is not None and plan.ranks[root] != book.whole.ranks[before]:
                raise PlanError(f"its root is {plan.ranks[root]}, not {book.whole.ranks[before]}")
        except PlanError as error:
            raise error.under(f"without {outcome.failure}") from None
    return tuple(reports)


def _check_none(whole: Plan, failure: Failure) -> None:
    """Hold a failure of which the file says so to leave no plan."""
    if why_none(whole, failure) is None:
        raise PlanError("the file says that there is no plan, and links still join the GPUs")


def why_none(whole: Plan, failure: Failure, channels: str = "auto") -> str | None:
    """Why a failure leaves no plan over a choice of channels; None where it leaves one."""
    if failure.kind == "gpu" and len(whole.ranks) == 1:
        return "no GPU is left"
    root = None if whole.root is None else whole.ranks[whole.root]
    if failure.kind == "gpu" and failure.name == root:
        return f"the root of the {whole.collective} is lost"
    left = failure.left_of(whole.topology)
    try:
        usable_fabric(
            left,
            channels=channels,
            collective=whole.collective,
            root=None if root is None else left.gpus.index(root),
        )
    except (InfeasibleError, TopologyError) as error:
        return str(error)
    return None

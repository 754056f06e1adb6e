"""Plans for every single failure of a machine, in one file with the plan of the whole machine.

Failures that the machine's symmetries map to each other share one plan. The first of them holds it; every other one
holds a renaming of devices that maps the first one's machine to its own (`renamed_plan`). `plan_without` looks a
renaming up and plans nothing. Renaming keeps trees, shares, rate and certificate: ranks and shards are renumbered in
the order of the other machine, and with node i called m(i) a symmetry g becomes m g m^-1. It proves nothing by itself.

The file is the plan file of the whole machine, format ``topoplan.plan/2``, with one more key, ``failures``; the machine
of each failure follows from the failure. Reading checks types only; `verify_survival` rebuilds every plan by its
renaming and checks it on the damaged machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

from topoplan.errors import InfeasibleError, PlanError, TopologyError, UsageError
from topoplan.machine import variants
from topoplan.machine.fabric import Fabric, usable_fabric
from topoplan.machine.half_duplex import caps, whole_ends
from topoplan.machine.topology import Topology
from topoplan.plans.certificates.certificate import OneFabric
from topoplan.plans.file_values import read_list, read_object, read_text, read_whole
from topoplan.plans.plan import (
    ALL_TO_ALL,
    PLAN_FORMAT_2,
    Plan,
    PlanCollection,
    SizeRange,
    plan_text,
    row_texts,
    without_topology,
)
from topoplan.plans.shards import ImageShards, Shard, moved_shard, owner_of, path_ends
from topoplan.plans.verify import Verification, verify
from topoplan.units import check_type, check_whole, counted, names_given


def renamed_plan(plan: Plan, names: Mapping[str, str], topology: Topology) -> Plan:
    """Return a plan on a machine that differs from its own in the names of devices alone.

    ``names`` has the new name of every device that the plan names; PlanError if one is missing.

    The two halves of a DGX-1V, GPUs 0 to 3 and 4 to 7, are isomorphic.

    >>> import topoplan
    >>> machine = topoplan.load("dgx-1v")
    >>> plan = topoplan.plan(machine, "broadcast", gpus=[0, 1, 2], root=1)
    >>> there = renamed_plan(plan, {"gpu0": "gpu4", "gpu1": "gpu5", "gpu2": "gpu6"}, machine.subset([4, 5, 6]))
    >>> there.ranks[there.root], topoplan.verify(there).rate == plan.rate
    ('gpu5', True)
    """
    if not isinstance(plan.certificate, OneFabric):
        raise PlanError(f"a plan with a certificate of kind {plan.certificate.kind} cannot be renamed")
    fabric = Fabric(topology, plan.channels)
    before = Fabric(plan.topology, plan.channels)
    for number, (shard, _) in enumerate(plan.shard_counts):
        for position, stage in enumerate(shard.stages):
            try:
                stage.check_ranks(len(before.vertices))
            except PlanError as error:
                raise error.within(number, position) from None
    try:
        there = {name: place for place, name in enumerate(fabric.nodes)}
        image = [there[names[name]] for name in before.nodes]
        move = partial(moved_shard, vertices=image, names=names)
        certificate = plan.certificate.renamed(names)
        shards: Sequence[Shard]
        if isinstance(plan.shards, ImageShards):
            shards = ImageShards(
                fabric.nodes,
                fabric.size,
                tuple(_conjugate(generator, image) for generator in plan.shards.generators),
                tuple(move(shard) for shard in plan.shards.templates),
                plan.shards.parts,
            )
        else:
            shards = _in_plan_order(plan.collective, [move(shard) for shard in plan.shards])
    except KeyError as error:
        raise PlanError(f"the renaming has no device for {error}") from None
    return replace(
        plan,
        ranks=fabric.ranks,
        root=None if plan.root is None else image[plan.root],
        topology=topology,
        shards=shards,
        certificate=certificate,
        planning_seconds=None,
    )


def _conjugate(generator: Sequence[int], image: Sequence[int]) -> tuple[int, ...]:
    """Return a permutation after node i is renamed to ``image[i]``."""
    moved = [0] * len(image)
    for place, target in enumerate(generator):
        moved[image[place]] = image[target]
    return tuple(moved)


def _in_plan_order(collective: str, shards: list[Shard]) -> tuple[Shard, ...]:
    """Return shards in the order of plans: by their owners, or by the ends of their paths."""
    if collective == ALL_TO_ALL:
        return tuple(sorted(shards, key=lambda shard: path_ends(shard)[::-1]))
    if collective in ("allgather", "reduce_scatter"):
        return tuple(sorted(shards, key=owner_of))
    return tuple(shards)


FAILURE_KINDS = ("gpu", "link", "device")
"""Kinds of failures."""

LOSABLE_KINDS = ("nvswitch", "pcie", "nic", "switch", "helper")
"""Kinds of devices whose loss a machine may survive; it never survives that of a CPU."""


@dataclass(frozen=True, slots=True)
class MachineFailure:
    """One loss of a machine.

    ``kind`` is gpu, link or device; ``name`` that of the device, of a NIC without its side, or of a link's two ends,
    ``gpu0-gpu3``.
    """

    kind: str
    name: str

    def __str__(self) -> str:
        return f"link {self.name}" if self.kind == "link" else self.name

    def left_of(self, topology: Topology) -> Topology:
        """Return the machine without it; UsageError if it does not exist, or no GPU remains."""
        if self.kind == "link":
            return variants.without_links(topology, [self.name])
        if self.kind == "device":
            return variants.without_devices(topology, [self.name])
        if self.name not in topology.gpus:
            raise UsageError(f"{topology.name} has no GPU {self.name!r}")
        return variants.without_gpus(topology, [topology.gpus.index(self.name)])


def single_failures(fabric: Fabric) -> tuple[MachineFailure, ...]:
    """Return the GPUs, links and switches, NICs or helpers whose loss may affect a plan, in the machine's order.

    >>> import topoplan
    >>> found = single_failures(Fabric(topoplan.load("dgx-1v"), ("nvlink",)))
    >>> len(found), str(found[0]), str(found[-1])
    (24, 'gpu0', 'link gpu3-gpu7')
    """
    kinds = {device.name: device.kind for device in fabric.topology.devices}
    gpus = [MachineFailure("gpu", name) for name in fabric.ranks]
    cable_of = {ends: name for name, every in variants.cables(fabric.topology).items() for ends in every}
    wires: dict[frozenset[str], str] = {}
    ends_of = whole_ends(fabric.topology)
    for link in fabric.links:
        if (link.src, link.dst) not in ends_of:
            continue
        one, other = map(variants.nic_name, ends_of[link.src, link.dst])
        if one != other:
            wires.setdefault(frozenset((one, other)), cable_of.get((link.src, link.dst), f"{one}-{other}"))
    links = [MachineFailure("link", wire) for wire in dict.fromkeys(wires.values())]
    parts = {end for link in caps(fabric.topology) for end in (link.src, link.dst)}
    rest = [
        variants.nic_name(name)
        for name in fabric.nodes[fabric.size :]
        if kinds[name] in LOSABLE_KINDS and name not in parts
    ]
    return (*gpus, *links, *(MachineFailure("device", name) for name in dict.fromkeys(rest)))


@dataclass(frozen=True, slots=True)
class FailureOutcome:
    """A failure with a plan of its own, the renamed plan of an earlier failure, or none.

    ``like`` is the number of the earlier outcome whose plan this one renames, ``renaming`` the devices of the whole
    machine that are renamed, with their new names; other devices keep theirs. ``reason`` says why no plan exists.
    """

    failure: MachineFailure
    plan: Plan | None = None
    like: int | None = None
    renaming: tuple[tuple[str, str], ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class SurvivalPlans(PlanCollection):
    """The plan of a whole machine, and of the machine after each single failure.

    Parameters
    ----------
    whole : Plan
        The plan without a failure, which commands that take one plan run.
    outcomes : tuple of FailureOutcome
        One for each of `single_failures`, in that order.
    seconds : float or None
        Planning time; not in the file.

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
    outcomes: tuple[FailureOutcome, ...]
    seconds: float | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"<SurvivalPlans {self._words}, {counted(len(self.outcomes), 'failure')}>"

    @property
    def ranges(self) -> tuple[SizeRange, ...]:
        return self.whole.ranges

    @property
    def own(self) -> tuple[Plan, ...]:
        """The plans that the file holds for failures; every other plan is a renamed one of these."""
        return tuple(one.plan for one in self.outcomes if one.plan is not None)

    def plan_without(
        self, *, gpus: Sequence[int] = (), links: Iterable[str] = (), devices: Iterable[str] = ()
    ) -> Plan:
        """Return the plan after one failure, from the book alone: nothing is planned.

        The surviving ranks keep their order (`surviving_ranks` has their old numbers). The trees are unchanged if the
        plan of the whole machine does not use the lost part.

        Parameters
        ----------
        gpus : sequence of int
            Ranks of the whole machine's plan.
        links, devices : iterable of str
            As `topoplan.without_links` and `topoplan.without_devices` take them.

        Raises
        ------
        UsageError
            The part does not exist, several are lost at once, or the book has no plan for the loss.
        InfeasibleError
            No plan exists after this failure; the message says why.
        """
        whole = self.whole.topology
        lost = [MachineFailure("gpu", whole.gpus[gpu]) for gpu in (whole.select(gpus) if gpus else ())]
        lost += [MachineFailure("link", wire) for wire in names_given("links", links, example="gpu0-gpu3")]
        lost += [MachineFailure("device", one) for one in names_given("devices", devices, example="nic0")]
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
            return renamed_plan(self.whole, {device.name: device.name for device in whole.devices}, left)
        raise UsageError(f"the book has no plan without {lost[0]}; topoplan.replan makes one")

    def plan_of(self, number: int) -> Plan:
        """Return the plan of an outcome, renamed if it is that of another one.

        InfeasibleError if it has none; PlanError if the renaming does not fit.
        """
        check_whole("number", number, most=len(self.outcomes) - 1)
        outcome = self.outcomes[number]
        if outcome.plan is not None:
            return outcome.plan
        if outcome.like is None:
            raise InfeasibleError(f"no plan exists without {outcome.failure}: {outcome.reason}")
        names = {device.name: device.name for device in self.whole.topology.devices}
        names.update(outcome.renaming)
        plan = self.outcomes[outcome.like].plan
        assert plan is not None, "outcomes are like those with plans of their own"
        return renamed_plan(plan, names, outcome.failure.left_of(self.whole.topology))

    def _number_of(self, lost: MachineFailure) -> int | None:
        """Return the number of a failure's outcome, by any of its names; None if the book does not have it."""
        whole = self.whole.topology
        meant = partial(variants.find_links, whole) if lost.kind == "link" else None
        name = lost.name if lost.kind == "link" else variants.nic_name(lost.name)
        for number, outcome in enumerate(self.outcomes):
            failure = outcome.failure
            if failure.kind == lost.kind and (
                failure.name == name or (meant is not None and meant(failure.name) == meant(name))
            ):
                return number
        return None

    def to_json(self) -> str:
        rows = ",\n  ".join(row_texts(self.to_object()["failures"]))
        head = plan_text({**self.whole.to_object(), "format": PLAN_FORMAT_2})
        return f'{head[:-1]},\n "failures": [\n  {rows}\n ]}}\n'

    def to_object(self) -> dict[str, object]:
        """Return the file as a JSON object."""
        rows = [
            {**_outcome_row(one), **({} if one.plan is None else {"plan": without_topology(one.plan)})}
            for one in self.outcomes
        ]
        return {**self.whole.to_object(), "format": PLAN_FORMAT_2, "failures": rows}

    @classmethod
    def from_object(cls, value: dict[str, object]) -> Self:
        if "failures" not in read_object(value, "the file"):
            raise PlanError("the file has no key failures; topoplan plan --survive 1 -o writes one")
        whole = Plan.from_object({key: field for key, field in value.items() if key != "failures"})
        outcomes: list[FailureOutcome] = []
        for number, item in enumerate(read_list(value["failures"], "failures")):
            try:
                outcomes.append(_read_outcome(item, whole.topology, outcomes))
            except (PlanError, UsageError) as error:
                fault = error if isinstance(error, PlanError) else PlanError(str(error))
                raise fault.under(f"failure {number}") from None
        return cls(whole, tuple(outcomes))


def surviving_ranks(before: Plan, after: Plan) -> tuple[int, ...]:
    """Return the old numbers of the surviving ranks, in the order of their new ones.

    See Also
    --------
    topoplan.replan

    Examples
    --------
    >>> import topoplan
    >>> book = topoplan.plan_survival("v100x4")
    >>> surviving_ranks(book.whole, book.plan_without(gpus=[1]))
    (0, 2, 3)
    """
    for name, plan in (("before", before), ("after", after)):
        check_type(name, plan, Plan, remedy="give the plan before and after a failure")
    number = {name: rank for rank, name in enumerate(before.ranks)}
    return tuple(number[name] for name in after.ranks)


def _outcome_row(outcome: FailureOutcome) -> dict[str, object]:
    """Return the row of an outcome without its own plan."""
    row: dict[str, object] = {outcome.failure.kind: outcome.failure.name}
    if outcome.like is not None:
        row["as"] = outcome.like
        if outcome.renaming:
            row["rename"] = dict(outcome.renaming)
    if outcome.reason:
        row["none"] = outcome.reason
    return row


def _read_outcome(item: object, whole: Topology, earlier: Sequence[FailureOutcome]) -> FailureOutcome:
    row = read_object(item, "a failure")
    unknown = [key for key in row if key not in (*FAILURE_KINDS, "plan", "as", "rename", "none")]
    kinds, ends = ([key for key in keys if key in row] for keys in (FAILURE_KINDS, ("plan", "as", "none")))
    if unknown or len(kinds) != 1 or len(ends) != 1 or ("rename" in row and ends != ["as"]):
        told = (
            f"a failure has one of gpu, link and device, and one of plan, as and none, not {', '.join(row)}"
        )
        raise PlanError(told[:200])
    failure = MachineFailure(kinds[0], read_text(row[kinds[0]], kinds[0]))
    if "none" in row:
        return FailureOutcome(failure, reason=read_text(row["none"], "none"))
    left = failure.left_of(whole)
    if "plan" in row:
        return FailureOutcome(failure, plan=Plan.from_object(read_object(row["plan"], "plan"), left))
    like = read_whole(row["as"], "as")
    if not 0 <= like < len(earlier) or earlier[like].plan is None:
        raise PlanError(f"as is {like}, which is not an earlier failure with a plan of its own"[:200])
    moves = read_object(row.get("rename", {}), "rename")
    renaming = tuple((name, read_text(there, "rename")) for name, there in moves.items())
    known = {device.name for device in whole.devices}
    if {name for name, _ in renaming} - known or sorted(dict(renaming).values()) != sorted(dict(renaming)):
        raise PlanError("rename must permute devices of the machine among themselves")
    return FailureOutcome(failure, like=like, renaming=renaming)


def verify_survival(book: SurvivalPlans) -> tuple[Verification, ...]:
    """Recompute the claims of the plan of the whole machine and of every failure, without the solver.

    Returns
    -------
    tuple of Verification
        The report of the whole machine's plan, then of each failure that has a plan.

    Raises
    ------
    PlanError
        The first fault, with its failure: a plan that is wrong on the damaged machine, a missing failure, or one that
        leaves a plan although the file denies it.

    See Also
    --------
    topoplan.plan_survival
    """
    check_type("book", book, SurvivalPlans, remedy="read a file by load_survival")
    reports = [verify(book.whole)]
    wanted = single_failures(Fabric(book.whole.topology, book.whole.channels))
    stated = [outcome.failure for outcome in book.outcomes]
    for number, (failure, asked) in enumerate(zip(stated, wanted, strict=False)):
        if failure != asked:
            raise PlanError(f"failure {number} is that of {failure}; it must be {asked}")
    if len(stated) != len(wanted):
        raise PlanError(
            f"the file has {len(stated)} failures; the machine has {len(wanted)} over these links"
        )
    for number, outcome in enumerate(book.outcomes):
        try:
            if outcome.plan is None and outcome.like is None:
                if infeasibility_reason(book.whole, outcome.failure) is None:
                    raise PlanError("the file says that no plan exists, but links still join the GPUs")
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


def infeasibility_reason(whole: Plan, failure: MachineFailure, channels: str = "auto") -> str | None:
    """Return why a failure leaves no plan over a choice of channels; None if it leaves one."""
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

"""The schedules beside packed trees: their names, the functions that make them, and their needs of a machine.

A new schedule is a function such as `topoplan.one_hop_plan`, and a line in the list below: then ``topoplan plan
--schedule`` makes it, ``--sizes`` times it beside the others, and ``compare`` shows it if the line names a column.

Other packages register schedules as entry points of the group `GROUP`, each a function as above or a `Schedule`:
``--schedule`` makes them by name, and verifies the result.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, Unpack

from topoplan.errors import InfeasibleError, PlanError, UsageError
from topoplan.machine.cables import MOST_MESH, cabled_nics
from topoplan.machine.fabric import STAGED, Fabric
from topoplan.machine.fabric_structure import FabricServers
from topoplan.machine.hardware import is_apple
from topoplan.machine.routing import staged
from topoplan.machine.topology import TopologyLike
from topoplan.plans.build import Allocation, Request
from topoplan.plans.certificates.certificate import Certified
from topoplan.plans.plan import ALL_COLLECTIVES, COLLECTIVES, ROOTED, TREES, Plan, check_collective
from topoplan.plans.verify import verify
from topoplan.plugins import Plugin, installed_plugins
from topoplan.schedules.binary_trees import (
    NVLS,
    NVLS_TREE,
    TREE,
    double_binary_tree,
    nccl_tree,
    nvls,
    nvls_tree,
)
from topoplan.schedules.hierarchical import (
    GRID_EXCHANGE,
    RAILS,
    RELAYED_RAILS,
    ROTATED_GRID_EXCHANGE,
    bml,
    grid,
    grid_exchange,
    hips_ring,
    rails,
    relayed_rails,
    three_phase,
    two_level,
)
from topoplan.schedules.low_latency import (
    ONE_SHOT,
    ONE_SHOT_SERVERS,
    SPREAD,
    lowest_tree,
    mesh,
    one_hop_plan,
    one_shot_plan,
    one_shot_servers,
    spread_one_hop,
)
from topoplan.schedules.parameter_server import parameter_server
from topoplan.schedules.ring import ring_plan
from topoplan.schedules.user_trees import USER_TREES, plan_from_rings
from topoplan.solve.packing.composition import THREE_PHASE, plan_three_phase
from topoplan.units import check_type, names_given

GROUP = "topoplan.schedules"
"""Group of entry points; each loads a `Make` function or a `Schedule`."""

MOST_RANKS = 64
"""Ranks up to which regular schedules are timed: a ring has N trees of N - 1 edges there."""

MOST_DIRECT = 72
"""Ranks up to which one hop and one-shot are timed: the GPUs of an NVL72."""

ONE_FABRIC = ("nvlink", "pcie", "nvlink+network", "pcie+network")
"""Channels of plans that do not divide the buffer between two kinds of wire."""


class Make(Protocol):
    """A function that makes a schedule, as `topoplan.one_hop_plan` does."""

    def __call__(self, topology: TopologyLike, collective: str = ..., **request: Unpack[Request]) -> Plan:
        """Return the plan; raise InfeasibleError if the allocation has no such schedule."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule and its needs of a machine.

    Parameters
    ----------
    name : str
        As ``--schedule`` takes it.
    words : str
        Its name in messages, as in "no …: GPU 0 has no wire to GPU 5"; ``name`` if empty.
    method : str
        The method of its plans, by which `topoplan.model.schedule_selection` finds it again; ``words`` if empty.
    over : tuple of str
        Required channels, such as ``nvlink`` or ``nvlink+network``; any if empty.
    servers : int
        Fewest servers of the ranks.
    most_ranks : int or None
        Ranks up to which ``--sizes`` tries it.
    column : str
        Head of its column in `topoplan.operate.compare.comparison.compare`; it has none there if empty.
    timed : bool
        Whether ``--sizes`` tries it; a rival that is only compared is not chosen.
    beside : callable or None
        Makes it from packed trees of the same request, whose certificate it takes over, and a progress callback.
    """

    name: str
    make: Make
    words: str = ""
    method: str = ""
    collectives: tuple[str, ...] = COLLECTIVES
    over: tuple[str, ...] = ()
    servers: int = 1
    most_ranks: int | None = MOST_RANKS
    column: str = ""
    timed: bool = True
    beside: Callable[[Plan, Callable[[str], None] | None], Plan] | None = None

    def __post_init__(self) -> None:
        if not self.words:
            object.__setattr__(self, "words", self.name)
        if not self.method:
            object.__setattr__(self, "method", self.words)

    def fits(self, trees: Certified) -> bool:
        """Return whether the machine of packed trees supports it, for their collective and over their channels."""
        if trees.collective not in self.collectives:
            return False
        if self.over and "+".join(trees.channels) not in self.over:
            return False
        return self.servers == 1 or (
            len(FabricServers(Fabric(trees.topology, trees.channels)).names) >= self.servers
        )


def _three_phase(trees: Plan, progress: Callable[[str], None] | None) -> Plan:
    fabric = Fabric(trees.topology, trees.channels)
    return plan_three_phase(
        fabric, trees.collective, root=trees.root, certificate=trees.certificate, progress=progress
    )


def _ring(
    kind: str, topology: TopologyLike, collective: str = "allreduce", **request: Unpack[Request]
) -> Plan:
    """Return rings of one kind; for "" over the requested channel, or the ring's own choice."""
    channels = request.get("channels", "auto")
    own = kind or (channels if channels in ("nvlink", "pcie") else "auto")
    return ring_plan(topology, collective, gpus=request.get("gpus"), root=request.get("root"), kind=own)


def nccl_ring(topology: TopologyLike, collective: str = "allreduce", **request: Unpack[Request]) -> Plan:
    """Return NCCL's rings since 2.8: over direct links, or through other GPUs if that is faster.

    >>> round(nccl_ring("dgx-1v", gpus=[1, 4, 5, 7]).rate, 3), nccl_ring("dgx-1v", gpus=[1, 4, 5, 7]).schedule
    (33.333, 'relay ring')
    """
    direct = _ring("", topology, collective, **request)
    try:
        relayed = _ring("relay", topology, collective, **request)
    except InfeasibleError:
        return direct
    faster = max(direct, relayed, key=lambda one: one.rate)
    return faster if request.get("channels", "auto") in ("auto", "nvlink") else direct


def jaccl(topology: TopologyLike, collective: str = "allreduce", **request: Unpack[Request]) -> Plan:
    """Return the faster of what JACCL runs: a full mesh of up to 8 ranks, and a ring both ways, in its best order.

    InfeasibleError for GPUs that are not Apple's and collectives of one root; if servers have several GPUs, no cable
    joins two, or the cables are neither a mesh nor a ring.

    >>> jaccl("mac-tb5-x4").rate, round(jaccl("mac-tb5-ring-x4").rate, 3), jaccl("mac-tb5-ring-x4").schedule
    (20.0, 13.333, "JACCL's ring")
    """
    asked = Allocation.of(topology, collective, **request)
    machine = asked.machine
    foreign = next((gpu for gpu in asked.topology.gpus if not is_apple([machine.device(gpu)])), None)
    if foreign is not None:
        raise InfeasibleError(f"JACCL runs on Apple's GPUs, and {foreign} is not one")
    if asked.collective not in _SUMS:
        raise InfeasibleError(f"JACCL runs {', '.join(_SUMS)}, got {collective!r}")
    servers = {machine.device(gpu).server for gpu in asked.topology.gpus}
    if len(servers) < len(asked.topology.gpus) or not any(cabled_nics(machine)):
        raise InfeasibleError("JACCL joins servers of one GPU each by cables")
    found = []
    if len(servers) <= MOST_MESH:
        with suppress(InfeasibleError):
            star = one_hop_plan(machine, collective, **request)
            found.append(replace(star, schedule="JACCL's mesh"))
    with suppress(InfeasibleError):
        chain = ring_plan(machine, gpus=request.get("gpus")).shards[0].stages[-1]
        order = [chain.root, *(edge.child for edge in chain.edges)]
        ring = plan_from_rings(machine, collective, [order, order[::-1]], **request)
        found.append(replace(ring, schedule="JACCL's ring", method="ring"))
    if not found:
        raise InfeasibleError(
            "JACCL runs a full mesh of up to 8 ranks, or a ring, and these cables are neither"
        )
    return max(found, key=lambda one: one.rate)


_ALLREDUCE, _SUMS = ("allreduce",), ("allreduce", "allgather", "reduce_scatter")
_ONE_TREE = ("allreduce", "broadcast", "reduce")
_across = partial(Schedule, over=ONE_FABRIC, servers=2)

_KNOWN = (
    _across(
        THREE_PHASE, three_phase, "three phases", method=THREE_PHASE, most_ranks=None, beside=_three_phase
    ),
    Schedule("one-hop", one_hop_plan, collectives=ALL_COLLECTIVES, most_ranks=MOST_DIRECT),
    Schedule("mesh", mesh, collectives=_SUMS, timed=False),
    Schedule("double-tree", double_binary_tree, "double binary tree", collectives=_ONE_TREE, column="binary"),
    Schedule("lowest-tree", lowest_tree, "lowest tree"),
    Schedule("ring", partial(_ring, ""), column="ring"),
    Schedule("relay-ring", partial(_ring, "relay"), "relay rings", "ring", over=("nvlink",), column="relay"),
    Schedule("nccl-ring", nccl_ring, "NCCL's ring", "ring", timed=False),
    Schedule("jaccl", jaccl, "JACCL's mesh or ring", collectives=_SUMS, timed=False),
    Schedule("nccl-tree", nccl_tree, "NCCL's tree", TREE, _ALLREDUCE, timed=False),
    Schedule("nvls", nvls, "NVLS", NVLS, _SUMS, over=("nvlink",), timed=False),
    Schedule(
        "nvls-tree",
        nvls_tree,
        "NVLS tree",
        NVLS_TREE,
        _ALLREDUCE,
        over=("nvlink+network",),
        servers=2,
        timed=False,
    ),
    Schedule(ONE_SHOT, one_shot_plan, collectives=_ALLREDUCE, most_ranks=MOST_DIRECT),
    _across(
        "one-shot-three-phase",
        one_shot_servers,
        "one-shot between servers",
        ONE_SHOT_SERVERS,
        _ALLREDUCE,
        most_ranks=None,
    ),
    Schedule("grid", grid, collectives=("allgather", "reduce_scatter")),
    Schedule("grid-exchange", grid_exchange, GRID_EXCHANGE, collectives=_ALLREDUCE),
    Schedule(
        "rotated-grid-exchange",
        partial(grid_exchange, rotated=True),
        GRID_EXCHANGE,
        ROTATED_GRID_EXCHANGE,
        _ALLREDUCE,
    ),
    _across(RAILS, rails, collectives=ROOTED),
    _across("relayed-rails", relayed_rails, RELAYED_RAILS, collectives=ROOTED, servers=3),
    _across("bml", bml, timed=False, column="BML"),
    _across("hips-ring", hips_ring, timed=False, column="HiPS"),
    Schedule(
        "parameter-server",
        parameter_server,
        "parameter server",
        collectives=_ALLREDUCE,
        over=ONE_FABRIC,
        timed=False,
    ),
    Schedule(SPREAD, spread_one_hop, collectives=_ALLREDUCE, timed=False),
    _across("two-level", two_level, collectives=_ONE_TREE, timed=False),
)

SCHEDULES = {schedule.name: schedule for schedule in _KNOWN}
"""Every schedule by its name; among equally fast ones ``--sizes`` takes the first."""


_REGISTERED: set[str] = set()

COMPARED = frozenset(
    (
        *("allocations", "binary", "bound", "bound by", "busbw", "channel", "collective"),
        *("count", "double tree", "double_tree", "gpus", "height", "in-network", "in_network"),
        *("jaccl", "jaccl_kind", "members", "nccl", "nccl_kind", "nccl_nvls", "nccl_nvls_kind"),
        *("nccl_ratio", "notes", "others", "quickest", "ratio", "relay", "relay_ratio", "ring"),
        *("ring type", "ring_kind", "tree_count", "trees"),
    )
)
"""Columns of a comparison that are not schedules, in lower case: no schedule is registered under their names."""


def is_registered(name: str) -> bool:
    return name in _REGISTERED


def register_schedule(name: str, make: Make | None, *, collectives: Sequence[str] = COLLECTIVES) -> None:
    """Let a function make a schedule in this process, under a name of its own.

    `topoplan.plan` makes it with ``schedule=name``, and `topoplan.compare` shows its rate in the column ``name``. Every
    plan that it makes is verified. An installed package registers schedules by entry points of the group
    ``topoplan.schedules``.

    Parameters
    ----------
    name : str
        Neither that of one of topoplan's own schedules nor of a column of `topoplan.compare`, such as ``nccl``;
        registering a name again replaces its function.
    make : callable or None
        ``make(topology, collective, *, gpus, root, channels)`` returns a `topoplan.Plan` for the request, from
        `topoplan.plan_from_trees` for example, or raises `topoplan.InfeasibleError`; `topoplan.compare` says in a note
        why it makes none. None takes the name out again.
    collectives : sequence of str
        Those that it can make.

    Raises
    ------
    UsageError
        The name is taken or empty, or ``make`` is not callable.

    See Also
    --------
    topoplan.plan_from_trees, topoplan.plan_from_rings

    Examples
    --------
    >>> import topoplan
    >>> def chain(topology, collective="allreduce", *, gpus=None, root=None, channels="auto"):
    ...     ranks = len(gpus if gpus is not None else topoplan.load(topology).gpus)
    ...     return topoplan.plan_from_trees(topology, collective, [list(range(ranks))], gpus=gpus, root=root)
    >>> topoplan.register_schedule("my-chain", chain, collectives=["all_reduce"])
    >>> topoplan.plan("dgx-2", schedule="my-chain").algbw
    75.0
    >>> topoplan.compare("dgx-2").rows[0]["my-chain"]
    75.0
    >>> topoplan.register_schedule("my-chain", None)
    """
    if name in (TREES, *SCHEDULES) and name not in _REGISTERED:
        raise UsageError(f"schedule {name} is topoplan's own; register yours under another name")
    if make is None:
        _REGISTERED.discard(name)
        SCHEDULES.pop(name, None)
        return
    if not name or not isinstance(name, str) or not callable(make):
        raise UsageError(
            f"a schedule must be a name and a function, got {name!r} and a {type(make).__name__}"
        )
    columns = {one.column for one in SCHEDULES.values() if one.name not in _REGISTERED}
    if name.lower() in COMPARED or name in columns:
        raise UsageError(f"{name} is a column of compare; register the schedule under another name")
    known = tuple(map(check_collective, names_given("collectives", collectives, example="allreduce")))
    checked = _checked(make, f"schedule {name}")

    def named(*args: object, **asked: object) -> Plan:
        made = checked(*args, **asked)  # type: ignore[arg-type]
        return replace(made, schedule=name) if made.schedule == USER_TREES else made

    _REGISTERED.add(name)
    SCHEDULES[name] = Schedule(name, named, collectives=known, column=name, timed=False)


def find_schedule(name: str) -> Schedule:
    """Return the schedule of this name, ours or that of an installed package; raise UsageError without one.

    >>> find_schedule("double-tree").make("dgx-2").rate
    75.0
    """
    others = installed_plugins(GROUP)
    check_type("schedule", name, str, remedy="give the name of a schedule, such as trees or ring")
    if name in others:
        if name in (TREES, *SCHEDULES):
            raise UsageError(
                f"schedule {name} is topoplan's own, and the package {others[name].package} offers another of that "
                "name; uninstall the package, or ask its authors for another name"
            )
        return _of_package(others[name])
    if name not in SCHEDULES:
        known = (TREES, *SCHEDULES, *sorted({*others} - {TREES, *SCHEDULES}))
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"schedule {name[:40]!r} is unknown; {hint}known ones are {', '.join(known)}")
    return SCHEDULES[name]


def _of_package(offer: Plugin) -> Schedule:
    """Return a schedule of an installed package; its plans are verified, and its faults are attributed to it."""
    found = offer.load()
    known = found if isinstance(found, Schedule) else None
    make = known.make if known else found
    where = f"schedule {offer.name}, of the package {offer.package},"
    if not callable(make):
        raise UsageError(
            f"{where} is a {type(found).__name__}, not a function that makes a plan; report this to its authors"
        )

    checked = _checked(make, where, "; report this to its authors")
    return (
        replace(known, name=offer.name, make=checked) if known else Schedule(offer.name, checked, timed=False)
    )


def _checked(make: Make, where: str, remedy: str = "; correct its function") -> Make:
    """Return a function whose plans are verified, and whose faults are attributed to its schedule."""

    def checked(topology: TopologyLike, collective: str = "allreduce", **request: Unpack[Request]) -> Plan:
        asked = Allocation.of(topology, collective, among=ALL_COLLECTIVES, **request)
        # A function of another package may have no defaults.
        every: Request = {"gpus": None, "root": None, "channels": "auto", **request}
        try:
            made = make(topology, collective, **every)
            if not isinstance(made, Plan):
                raise PlanError(f"it is a {type(made).__name__}, not a Plan")
            if (made.collective, made.ranks, made.root) != (
                asked.collective,
                asked.topology.gpus,
                asked.root,
            ):
                raise PlanError("it is of another collective, other GPUs or another root than were asked for")
            machine = staged(asked.topology) if STAGED in made.channels else asked.topology
            if made.topology != machine:
                raise PlanError("it is of another machine than was asked for")
            verify(made)
        except InfeasibleError:
            raise
        except UsageError as error:
            raise UsageError(f"{where.removesuffix(',')}: {error}") from error
        except PlanError as error:
            raise UsageError(f"{where} made a wrong plan: {error}{remedy}") from error
        except Exception as error:
            raise UsageError(f"{where} failed: {type(error).__name__}: {error}{remedy}") from error
        return made

    return checked


def make_schedule(
    name: str, topology: TopologyLike, collective: str = "allreduce", **request: Unpack[Request]
) -> Plan:
    """Return the plan of a schedule by its name, over the requested channels.

    UsageError if the schedule is unknown or runs over other channels; InfeasibleError says why the allocation has no
    such schedule.
    """
    schedule = find_schedule(name)
    try:
        made = schedule.make(topology, collective, **request)
    except InfeasibleError as error:
        raise InfeasibleError(
            f"no {schedule.words}: {cause(error)}; choose another schedule, such as {TREES}", cut=error.cut
        ) from None
    channels = request.get("channels", "auto")
    if channels != "auto" and "+".join(made.channels) != channels:
        raise UsageError(
            f"schedule {name} runs over {'+'.join(made.channels)} here, not over {channels}; "
            "leave out the channels, or choose another schedule"
        )
    return made


def cause(error: Exception) -> str:
    """Return an error's message without its remedy, which is for the caller of the function that raised it."""
    return str(error).partition(";")[0]

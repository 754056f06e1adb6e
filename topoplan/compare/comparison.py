"""Trees beside rings: what packed trees reach on an allocation, and what each kind of ring reaches there.

Rivals, all plans that are verified like the trees: the ring of NCCL before 2.8 (over NVLink where it has one, else over
PCIe, which the row says), the ring over NVLink that may relay through other GPUs, the best of what NCCL has today
(these rings, its tree, NVLS where switches copy and add), and the double binary tree over all ranks; then what else
`topoplan.schedules.registry` gives a column. Where the ring falls back, the trees still run over NVLink: this is the
comparison of Blink, section 2.2 and figure 13, and most of its largest gains are such cases. What trees are worth to
those who run NCCL is their rate over NCCL's best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from topoplan.compare.allocations import MOST_LISTED, AllocationClass, allocation_classes
from topoplan.compare.table import NO_RING, Comparison
from topoplan.errors import InfeasibleError
from topoplan.fabric.fabric import Fabric
from topoplan.hosts.gpu_identity import with_capable
from topoplan.in_network import fully_used
from topoplan.packing.planner import plan
from topoplan.plans.allocation import Allocation
from topoplan.plans.certificates.certificate import Proved
from topoplan.plans.plan import ALL_TO_ALL, EVERY, Plan, check_collective
from topoplan.plans.verify import verify
from topoplan.schedules.one_hop import direct_sends
from topoplan.schedules.registry import SCHEDULES, Schedule
from topoplan.topology import Topology, TopologyLike, as_topology

OWN_COLUMNS = ("ring", "relay-ring", "double-tree")
"""Schedules that have fields of their own in a `Comparison`, in the order in which they stand there."""

NCCL_COLUMNS = ("ring", "relay-ring", "nccl-tree", "nvls", "nvls-tree")
"""What NCCL has; of equally fast ones a `Comparison` names the first."""


DIRECT = "direct sends"
"""What NCCL has for an all-to-all: every block goes at once to its rank (`topoplan.schedules.one_hop.direct_sends`)."""


def compare(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
    nbytes: int | None = None,
) -> Comparison:
    """Compare trees with rings on one allocation.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes
    collective : str
        allreduce, broadcast, reduce, allgather, reduce_scatter or alltoall, which has paths and direct sends.
    gpus : sequence of int or None
        The allocation; all GPUs for None.
    root : int or None
        GPU number of the root of a broadcast or reduce; the allocation's first GPU for None.
    channels, nbytes : str, int or None
        What the trees run over, and for which size, as in `topoplan.plan`; the rings choose for themselves.

    Raises
    ------
    UsageError
        Unknown collective, a GPU or root that is not there.
    InfeasibleError
        No path joins the allocation.

    Examples
    --------
    NVLink has no ring on GPUs 1, 4, 5, 7 of a DGX-1V, so NCCL's ring runs over PCIe, between the sockets at 8 GB/s.

    >>> import topoplan
    >>> row = compare(topoplan.load("dgx-1v"), gpus=[1, 4, 5, 7])
    >>> row.trees, row.ring_kind, round(row.ring, 3), row.ratio, row.relay_ratio
    (50.0, 'pcie ring', 5.333, 9.375, 1.5)
    """
    asked = Allocation.of(topology, collective, gpus=gpus, root=root, among=EVERY)
    topology, collective, chosen = asked.machine, asked.collective, asked.gpus
    trees = plan(topology, collective, gpus=chosen, root=root, channels=channels, nbytes=nbytes)
    rivals, missing = nccl_rivals(topology, collective, chosen, root, trees)
    for schedule in columns():
        if schedule.name not in NCCL_COLUMNS and schedule.fits(trees):
            try:
                rivals[schedule.name] = schedule.make(topology, collective, gpus=chosen, root=root)
            except InfeasibleError as error:
                missing.append(f"{schedule.words}: {error}")
    ordered = dict.fromkeys((*(one.name for one in columns()), *rivals))
    rivals = {name: rivals[name] for name in ordered if name in rivals}
    picked, relay, double = (rivals.get(name) for name in OWN_COLUMNS)
    exact = {name: verify(made).exact_rate for name, made in rivals.items()}
    rate, against, relayed = verify(trees).exact_rate, exact.get("ring"), exact.get("relay-ring")
    ran = [name for name in (*NCCL_COLUMNS, DIRECT) if name in rivals]
    best = max(ran, key=lambda name: rivals[name].rate, default="")
    nccl = rivals.get(best)
    over_nccl = exact.get(best)
    notes = [f"trees: {note}" for note in trees.notes]
    able = fully_used(with_capable(topology))
    idle = _idle_switches(topology, able, trees)
    helped = None
    if idle:
        helped = plan(able, collective, gpus=chosen, root=root, channels=channels, nbytes=nbytes).rate
        more = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
        notes.append(
            f"trees do {helped:.6g} GB/s where {idle[0]}{more} copies and adds (--in-network nvswitch), "
            f"{trees.rate:.6g} without"
        )
    notes += [f"{other.schedule}: {note}" for other in rivals.values() for note in other.notes]
    return Comparison(
        collective=collective,
        gpus=chosen,
        members=1,
        channel="+".join(trees.channels),
        trees=trees.rate,
        bound=trees.bound,
        tree_count=trees.trees,
        height=trees.height,
        ring=picked.rate if picked else 0.0,
        ring_kind=picked.schedule if picked else NO_RING,
        relay=relay.rate if relay else None,
        double_tree=double.rate if double else None,
        ratio=math.nan if rate is None or against is None else float(rate / against),
        relay_ratio=None if rate is None or relayed is None else float(rate / relayed),
        notes=(*notes, *missing),
        others=tuple(
            (schedule.column, rivals[schedule.name].rate if schedule.name in rivals else None)
            for schedule in columns()
            if schedule.name not in OWN_COLUMNS and (schedule.servers == 1 or schedule.fits(trees))
        ),
        nccl=nccl.rate if nccl else 0.0,
        nccl_kind=nccl.schedule if nccl else NO_RING,
        nccl_ratio=None if rate is None or over_nccl is None else float(rate / over_nccl),
        in_network=helped,
        allocations=(chosen,),
    )


def nccl_rivals(
    topology: Topology, collective: str, gpus: Sequence[int], root: int | None, proved: Proved
) -> tuple[dict[str, Plan], list[str]]:
    """What NCCL has for a collective, by name in the order of `NCCL_COLUMNS`, and why it has no ring.

    Parameters
    ----------
    topology, collective, gpus, root
        As for `compare`.
    proved : Plan or Bound
        Of the same request: schedules that do not go with its channels are left out.
    """
    rivals: dict[str, Plan] = {}
    missing = []
    for schedule in (SCHEDULES[name] for name in NCCL_COLUMNS):
        if schedule.fits(proved):
            try:
                rivals[schedule.name] = schedule.make(topology, collective, gpus=gpus, root=root)
            except InfeasibleError as error:
                if schedule.name in OWN_COLUMNS:
                    missing.append(f"{schedule.words}: {error}")
    if collective == ALL_TO_ALL and len(gpus) > 1:
        sent = direct_sends(topology, gpus=gpus)
        if sent is None:
            missing.append("direct sends: some GPUs are joined through others only")
        else:
            rivals[DIRECT] = replace(sent, schedule=DIRECT)
    return rivals, missing


def _idle_switches(topology: Topology, able: Topology, trees: Plan) -> tuple[str, ...]:
    """Switches on the links of a plan that could do more in the network than they do."""
    if len(trees.ranks) == 1:
        return ()
    used = Fabric(trees.topology, trees.channels).nodes[len(trees.ranks) :]
    return tuple(name for name in used if able.device(name) != topology.device(name))


def columns() -> tuple[Schedule, ...]:
    """The schedules that stand beside the trees: those of `OWN_COLUMNS`, then the others that name a column."""
    others = (one for one in SCHEDULES.values() if one.column and one.name not in OWN_COLUMNS)
    return (*(SCHEDULES[name] for name in OWN_COLUMNS), *others)


def compare_all(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    sizes: Collection[int] | None = None,
    most_listed: int = MOST_LISTED,
    progress: Callable[[str], None] | None = None,
) -> tuple[Comparison, ...]:
    """Compare trees with rings on one allocation of each class.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes
    collective : str
    sizes : collection of int or None
        Numbers of GPUs; 2 to N for None.
    most_listed : int
        Allocations of a class up to which they are listed.
    progress : callable or None
        Called with a line of text before each class.

    Returns
    -------
    tuple of Comparison
        Ordered by number of GPUs, then by representative. In rooted collectives the representative's first GPU is
        the root.

    Raises
    ------
    UsageError
        Unknown collective or size, or too many allocations (see `allocation_classes`).

    Notes
    -----
    The rates of trees, bound, NVLink rings and relaying rings depend on the class alone (those of a rooted collective
    also on the root, where links are unequal in their two directions). Number and height of the trees, a double
    binary tree, and a PCIe ring beside NVLink trees also depend on how the GPUs are numbered and sit on PCIe: these
    are the representative's.

    Examples
    --------
    >>> import topoplan
    >>> rows = compare_all(topoplan.load("dgx-1v"), sizes=[3])
    >>> [(row.gpus, row.channel, row.ring_kind, row.members) for row in rows][:3]
    [((1, 5, 6), 'nvlink', 'pcie ring', 4), ((2, 3, 5), 'all', 'pcie ring', 4), ((3, 4, 5), 'all', 'pcie ring', 4)]
    """
    topology = as_topology(topology)
    collective = check_collective(collective)
    classes = allocation_classes(topology, sizes=sizes, most_listed=most_listed)
    rows = []
    for number, one in enumerate(classes):
        if progress:
            progress(f"class {number + 1} of {len(classes)}: GPUs {', '.join(str(gpu) for gpu in one.gpus)}")
        rows.append(compare_class(topology, collective, one))
    return tuple(rows)


def compare_class(topology: Topology, collective: str, one: AllocationClass) -> Comparison:
    """As `compare`, of the representative of a class; rates of 0 where no path joins it."""
    try:
        found = compare(topology, collective, gpus=one.gpus)
        return replace(found, members=one.members, allocations=one.allocations)
    except InfeasibleError as error:
        if one.channel is not None:
            raise
        return Comparison(
            collective=collective,
            gpus=one.gpus,
            members=one.members,
            channel=None,
            trees=0.0,
            bound=0.0,
            tree_count=0,
            height=0,
            ring=0.0,
            ring_kind=NO_RING,
            relay=None,
            double_tree=None,
            ratio=math.nan,
            relay_ratio=None,
            notes=(str(error),),
            allocations=one.allocations,
        )

"""Compare trees with rings and NCCL's other schedules on an allocation, and bound the rates of its links.

Baselines are verified plans: the ring of NCCL before 2.8 (over NVLink, else PCIe, as the row says), the ring over
NVLink with relays, NCCL's best today (these rings, its tree, NVLS), the double binary tree, and other schedules of
`topoplan.schedules.registry` with a column. If the ring falls back, trees still run over NVLink: Blink, section 2.2,
figure 13. For measurements, switches use all capabilities (`topoplan.machine.variants.with_all_capabilities`) unless
the caller decides. A size is bound by latency if its unavoidable start-ups (`topoplan.model.times_by_size`) take longer
than its bytes at the bound. Bus bandwidth may exceed that of the NICs, n servers of g ranks, N = n g:

    collective        the factor counts    must leave a server
    allreduce         2 (N - 1) / N        2 (n - 1) / n
    allgather         (N - 1) / N          (n - 1) / n, and as much enters
    reduce_scatter    (N - 1) / N          (n - 1) / n
    alltoall          (N - 1) / N a rank   (N - g) / N a rank
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from topoplan.errors import InfeasibleError, UsageError, warning
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import FabricServers
from topoplan.machine.half_duplex import split
from topoplan.machine.hardware import is_apple, with_capable
from topoplan.machine.topology import Topology, TopologyLike, as_topology
from topoplan.machine.variants import with_all_capabilities
from topoplan.model.closed_form import plan_seconds
from topoplan.model.expected_times import (
    MOST_GPUS,
    ExpectedTimes,
    ExpectedWinners,
    NcclTime,
    expected_times,
    nccl_model,
)
from topoplan.model.times_by_size import TimeBound, time_bound
from topoplan.operate.compare.allocations import MOST_LISTED, AllocationClass, allocation_classes
from topoplan.operate.compare.table import NO_RING, Comparison
from topoplan.plans.build import Allocation
from topoplan.plans.certificates.certificate import Certified, explain_certificate
from topoplan.plans.plan import ALL_COLLECTIVES, ALL_TO_ALL, Plan, check_collective, root_rank
from topoplan.plans.verify import verify
from topoplan.schedules.binary_trees import nccl_start_warning
from topoplan.schedules.low_latency import direct_sends
from topoplan.schedules.nccl_tuning import NcclExpectation
from topoplan.schedules.registry import MOST_RANKS, SCHEDULES, Schedule, is_registered
from topoplan.schedules.ring import ring_plan
from topoplan.solve.planner import plan
from topoplan.solve.upper_bound import compute_bound, in_network_bound
from topoplan.units import bus_factor, exact, nearest_float

OWN_COLUMNS = ("ring", "relay-ring", "double-tree")
"""Schedules with fields in a `Comparison`, in their order."""

NCCL_COLUMNS = ("ring", "relay-ring", "nccl-tree", "nvls", "nvls-tree")
"""NCCL's schedules; of equally fast ones a `Comparison` names the first."""

NVLS_COLUMNS = ("nvls", "nvls-tree")
"""Those of them that reduce in switches."""

DIRECT = "direct sends"
"""NCCL's all-to-all: each block is sent directly to its rank (`topoplan.schedules.low_latency.direct_sends`)."""


def compare(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
    nbytes: int | str | None = None,
    sizes: Sequence[int] = (),
) -> Comparison:
    """Compare trees with rings on one allocation.

    collective: allreduce, broadcast, reduce, allgather, reduce_scatter or alltoall, which has paths and direct sends.
    channels, nbytes: of the trees, as in `topoplan.plan`.
    sizes: bytes, ascending, among which the quickest implementation is looked for; none is if empty.

    NVLink has no ring on GPUs 1, 4, 5, 7 of a DGX-1V, so NCCL's ring runs over PCIe, between the sockets at 8 GB/s.

    >>> import topoplan
    >>> row = compare(topoplan.load("dgx-1v"), gpus=[1, 4, 5, 7])
    >>> row.trees, row.ring_kind, round(row.ring, 3), row.ratio, row.relay_ratio
    (50.0, 'pcie ring', 5.333, 9.375, 1.5)
    """
    asked = Allocation.of(topology, collective, gpus=gpus, root=root, among=ALL_COLLECTIVES)
    topology, collective, chosen = asked.machine, asked.collective, asked.gpus
    trees = plan(topology, collective, gpus=chosen, root=root, channels=channels, nbytes=nbytes)
    rivals, missing = nccl_rivals(topology, collective, chosen, root, trees)
    for schedule in columns():
        if schedule.name not in NCCL_COLUMNS and schedule.fits(trees):
            try:
                rivals[schedule.name] = schedule.make(topology, collective, gpus=chosen, root=root)
            except InfeasibleError as error:
                missing.append(f"{schedule.words}: {error}")
            except UsageError as error:
                if not is_registered(schedule.name):
                    raise
                head, text = f"schedule {schedule.name}: ", str(error)
                # what the function refuses is its own affair; what it does wrong is not
                ours = text.removeprefix(head)
                missing.append(warning(text) if ours == text else f"{head}not for this machine: {ours}")
    ordered = dict.fromkeys((*(one.name for one in columns()), *rivals))
    rivals = {name: rivals[name] for name in ordered if name in rivals}
    picked, relay, double = (rivals.get(name) for name in OWN_COLUMNS)
    exact = {name: verify(made).exact_rate for name, made in rivals.items()}
    rate, against, relayed = verify(trees).exact_rate, exact.get("ring"), exact.get("relay-ring")
    apple = is_apple(map(trees.topology.device, trees.ranks))
    ran = [] if apple else [name for name in (*NCCL_COLUMNS, DIRECT) if name in rivals]
    best = max(ran, key=lambda name: rivals[name].rate, default="")
    nccl = rivals.get(best)
    timed = sizes and not apple and collective != ALL_TO_ALL and len(chosen) > 1
    over_nccl = exact.get(best)
    notes = [*nccl_start_warning(trees.topology), *(f"trees: {note}" for note in trees.notes)]
    able = with_all_capabilities(with_capable(topology))
    idle = _idle_switches(topology, able, trees)
    helped = None
    switched: dict[str, float] = {}
    if idle:
        for schedule in (SCHEDULES[name] for name in NVLS_COLUMNS):
            if schedule.fits(trees):
                with suppress(InfeasibleError):
                    made = schedule.make(able, collective, gpus=chosen, root=root)
                    switched[made.schedule] = made.rate
        helped = plan(able, collective, gpus=chosen, root=root, channels=channels, nbytes=nbytes).rate
        switches = idle[0] + (f" and {len(idle) - 1} more" if len(idle) > 1 else "")
        with_them = f"trees do {helped:.6g} GB/s if {switches} copies and adds (--in-network nvswitch)"
        notes.append(f"{with_them}, {trees.rate:.6g} without")
    jaccl = None
    if apple and len(chosen) > 1 and SCHEDULES["jaccl"].fits(trees):
        try:
            jaccl = SCHEDULES["jaccl"].make(topology, collective, gpus=chosen, root=root)
        except InfeasibleError as error:
            missing.append(f"JACCL: {error}")
    own_ring: list[tuple[str, float | None]] = []
    if trees.channels == ("pcie",) and picked and picked.channels != trees.channels:
        with suppress(InfeasibleError):
            own_ring = [
                ("PCIe ring", ring_plan(topology, collective, gpus=chosen, root=root, kind="pcie").rate)
            ]
    notes += [f"{other.schedule}: {note}" for other in rivals.values() for note in other.notes]
    return Comparison(
        collective=collective,
        gpus=chosen,
        members=1,
        channel="+".join(trees.channels),
        trees=trees.rate,
        bound=trees.bound,
        tree_count=trees.num_trees,
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
        )
        + tuple(own_ring),
        nccl=nccl.rate if nccl else 0.0,
        nccl_kind=nccl.schedule if nccl else NO_RING,
        nccl_ratio=None if rate is None or over_nccl is None else float(rate / over_nccl),
        in_network=helped,
        allocations=(chosen,),
        nccl_nvls=max(switched.values(), default=None),
        nccl_nvls_kind=max(switched, key=lambda name: switched[name], default=NO_RING),
        jaccl=(jaccl.rate if jaccl else 0.0) if apple else None,
        jaccl_kind=jaccl.schedule if jaccl else NO_RING,
        quickest=(
            ExpectedWinners(trees, {name: rivals[name] for name in ran}).ranges(plan_seconds(trees), sizes)
            if timed
            else ()
        ),
    )


def nccl_rivals(
    topology: Topology, collective: str, gpus: Sequence[int], root: int | None, proved: Certified
) -> tuple[dict[str, Plan], list[str]]:
    """Return NCCL's plans for a collective by name, in the order of `NCCL_COLUMNS`, and why it has no ring.

    proved: a plan or bound of the same request; schedules that do not suit its channels are left out.
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
    """Return switches on the links of a plan with unused in-network capabilities."""
    if len(trees.ranks) == 1:
        return ()
    used = Fabric(trees.topology, trees.channels).nodes[len(trees.ranks) :]
    before, after = split(topology), split(able)
    return tuple(name for name in used if after.device(name) != before.device(name))


def columns() -> tuple[Schedule, ...]:
    """Return the schedules beside the trees: those of `OWN_COLUMNS`, then the others with a column."""
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
    """Compare trees with rings on one allocation of each class, by number of GPUs, then by representative.

    sizes: numbers of GPUs; 2 to N for None.

    The representative's first GPU is the root. The rates of trees, bound, NVLink rings and relaying rings depend on the
    class alone (those of a rooted collective also on the root, if links are unequal in their two directions). Number
    and height of the trees, a double binary tree, and a PCIe ring beside NVLink trees also depend on the numbering of
    the GPUs and their places on PCIe: these are the representative's.
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
    """Return `compare` of the representative of a class; rates of 0 if no path joins it."""
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
            notes=(str(error),),
            allocations=one.allocations,
        )


LATENCY, BANDWIDTH = "latency", "bandwidth"


@dataclass(frozen=True, slots=True)
class Nics:
    """Bandwidth out of a server.

    servers, ranks: servers of the allocation, and ranks on each; of unequal ones on that with the least bandwidth out.
    count: NICs of that server, or cables if it has none.
    server, one: GB/s in one direction out of that server, and of its widest NIC.
    factor, leaving: as in the table above: weight of a byte of the buffer in bus bandwidth, and its part that must
    leave a server.
    """

    servers: int
    ranks: int
    count: int
    server: float
    one: float
    factor: float
    leaving: float

    @property
    def most(self) -> float:
        """GB/s of bus bandwidth at which these NICs are full."""
        return self.server * self.factor / self.leaving


@dataclass(frozen=True, slots=True)
class Attainable:
    """Attainable rates of a collective on an allocation, in GB/s of algorithm bandwidth.

    nccl: rates of NCCL's schedules, best first; ties in the order of `NCCL_COLUMNS`.
    best: upper bound of any schedule.
    links: the binding links, in the words of the certificate.
    factor: bus bandwidth over algorithm bandwidth.
    time: the least time of every schedule, by size.
    nics: None within one server.
    model: expectations of NCCL's own model by algorithm and protocol; empty without one.
    in_network: upper bound if all switches copied and added; None if not higher.
    pcie: bus bandwidth of the slowest PCIe link of a GPU on one server; None on several, or without.
    fitted: times of NCCL by published measurements of such servers; None if there are none, for several servers, or if
        switches do not use all their capabilities, as they did there.
    """

    collective: str
    gpus: tuple[int, ...]
    channels: tuple[str, ...]
    nccl: tuple[tuple[str, float], ...]
    best: float
    links: str
    factor: float
    time: TimeBound
    nics: Nics | None
    model: tuple[NcclExpectation, ...] = ()
    in_network: float | None = None
    pcie: float | None = None
    fitted: ExpectedTimes | None = None

    @property
    def nccl_best(self) -> float | None:
        return self.nccl[0][1] if self.nccl else None

    def expected(self, nbytes: int) -> NcclExpectation | None:
        """Return the choice of NCCL's own model, or None."""
        return min(self.model, key=lambda one: one.seconds(nbytes), default=None)

    def expected_time(self, nbytes: int) -> NcclTime | None:
        """Return the time of a buffer by published measurements of such sizes, else by NCCL's own model, or None."""
        one, fitted = self.expected(nbytes), self.fitted
        if fitted is not None and not fitted.covers(nbytes):
            fitted = None
        if one is None and fitted is None:
            return None
        seconds = fitted.seconds(nbytes) if fitted else one.seconds(nbytes) if one else 0.0
        runs = f"{one.algorithm} {one.protocol}" if one else "RCCL"
        return NcclTime(nbytes, seconds, runs, self.factor, fitted is not None)

    def expected_by(self, time: NcclTime) -> str:
        """Return what an expected time rests on."""
        costs = self.fitted.costs if time.measured and self.fitted else None
        return f"published measurements of {costs.generation}" if costs else "NCCL's model"

    def bound_by(self, nbytes: int) -> str:
        """Return `LATENCY` or `BANDWIDTH`: the larger part of the least time."""
        moving = nbytes / (self.best * 1e9)
        return BANDWIDTH if moving > self.time.seconds(nbytes) - moving else LATENCY


def attainable(
    topology: Topology,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
) -> Attainable:
    """Return the attainable rates of NCCL and of any schedule.

    topology: switches use their stated capabilities (`topoplan.machine.variants.with_all_capabilities`).

    >>> import topoplan
    >>> found = attainable(topoplan.load("dgx-a100"))
    >>> [(name, round(rate, 1)) for name, rate in found.nccl], round(found.best, 1)
    ([('nvlink ring', 171.4), ('nccl tree', 171.4)], 171.4)
    >>> found.bound_by(64 << 10), found.bound_by(1 << 30)
    ('latency', 'bandwidth')
    >>> small = found.expected(64 << 10)
    >>> small.algorithm, small.protocol, round(small.seconds(64 << 10) * 1e6)
    ('ring', 'll', 16)
    """
    chosen = topology.select(gpus)
    # with more ranks the bound without a plan is as good, and does not take minutes
    small = len(chosen) <= MOST_RANKS
    make = plan if small else compute_bound
    proved = make(topology, collective, gpus=chosen, root=root)
    best = proved.bound if isinstance(proved, Plan) else proved.rate
    rivals: dict[str, Plan] = {}
    if len(chosen) > 1:
        rivals, _ = nccl_rivals(topology, proved.collective, chosen, root, proved)
    ring, relay = rivals.get("ring"), rivals.get("relay-ring")
    if ring and relay and relay.rate <= ring.rate:
        del rivals["relay-ring"]
    fabric = Fabric(proved.topology, proved.channels)
    rank, limit = root_rank(chosen, proved.collective, root), None if math.isinf(best) else exact(best)
    nics = _nics(fabric, proved.collective)
    pcie = [
        one.bandwidth for one in proved.topology.links if one.channel == "pcie" and one.src in fabric.ranks
    ]
    return Attainable(
        proved.collective,
        chosen,
        proved.channels,
        tuple(sorted(((one.schedule, one.rate) for one in rivals.values()), key=lambda one: -one[1])),
        best,
        explain_certificate(proved) if len(chosen) > 1 else "a single rank sends nothing",
        bus_factor(proved.collective, len(chosen)),
        time_bound(fabric, proved.collective, rank, (), limit),
        nics,
        nccl_model(proved.topology, proved.collective),
        in_network_bound(proved),
        min(pcie, default=None) if nics is None else None,
        _fitted(proved.topology, proved.collective),
    )


def _fitted(allocation: Topology, collective: str) -> ExpectedTimes | None:
    """Return the times of NCCL on one server by published measurements; None without any.

    Between servers the fit knows neither the number nor the speed of the NICs, and NCCL's model does.
    """
    able = with_all_capabilities(with_capable(allocation)).devices
    uses = [
        [(device.multicast, device.reduce) for device in devices] for devices in (able, allocation.devices)
    ]
    if len(allocation.gpus) > MOST_GPUS or uses[0] != uses[1]:
        return None
    known = (one for one in expected_times(allocation, collective) if one.implementation == "nccl")
    return next((one for one in known if one.costs.servers == 1), None)


def _nics(fabric: Fabric, collective: str) -> Nics | None:
    """Return the NICs of the server with the least bandwidth out; None on one server."""
    servers = FabricServers(fabric)
    count = len(servers.names)
    if count < 2 or collective not in ALL_COLLECTIVES:
        return None
    narrowest: tuple[Fraction, int, list[int]] | None = None
    for number, name in enumerate(servers.names):
        out = [
            link
            for link, (src, dst) in enumerate(servers.ends)
            if src == name and dst != name and servers.crossing[link]
        ]
        whole = sum((fabric.capacity[link] for link in out), Fraction(0))
        if out and (narrowest is None or whole < narrowest[0]):
            narrowest = (whole, number, out)
    if narrowest is None:
        return None
    whole, number, out = narrowest
    ranks = int(np.count_nonzero(servers.of_rank == number))
    size = fabric.size
    adds = any(
        fabric.topology.device(name).kind == "switch" and name in fabric.adding
        for name in fabric.nodes[size:]
    )
    leaving = {
        "allreduce": 1.0 if adds else 2 * (count - 1) / count,
        "allgather": (size - ranks) / size,
        "reduce_scatter": (size - ranks) / size,
        # all ranks share the links out
        "alltoall": ranks * (size - ranks) / size,
    }.get(collective, 1.0)
    return Nics(
        count,
        ranks,
        len({fabric.links[link].src for link in out}),
        nearest_float(whole),
        max(nearest_float(fabric.capacity[link]) for link in out),
        bus_factor(collective, size),
        leaving,
    )

"""Verify a plan by kind of a broadcast or reduce on a torus of hosts, from its file alone.

Bandwidths are those of the ports of a host, and neighbours follow from coordinates: no cable is listed. Each template
must enter every host of the sample but the root's once, from a neighbour, and the way back from every host must end at
the root. A side of the sample must be that of the torus, or one from 3 to it: then a host's tree in the torus enters it
from the neighbour in the same direction (`topoplan.plans.torus_trees`), and each link there carries what the sample's
link into the host's block does.

The bound is that of a line that the root is not on: the ports of its hosts in the other dimensions take in all data of
a broadcast, or send all of a reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from topoplan.errors import PlanError
from topoplan.machine.cluster_by_kind import ClusterByKind
from topoplan.plans.plan import ROOTED
from topoplan.plans.plan_by_kind import NOT_BY_KIND, PlanByKind
from topoplan.plans.shards import Stage
from topoplan.plans.torus_trees import TorusTree
from topoplan.plans.verify import Verification, check_claim
from topoplan.units import exact, nearest_float, shown

Step = tuple[int, int]
"""A dimension, and 1 for ahead or -1 for back; in a dimension of two hosts always 1."""


def verify_torus_trees(plan: PlanByKind) -> tuple[Verification, list[Fraction]]:
    """Return the report on a plan of `topoplan.plans.torus_trees`, and the exact load of each link of the sample.

    Arguments and errors are those of `topoplan.plans.verify_by_kind.verify_by_kind`. A load is that of all links for
    which the sample's stands.
    """
    _check_header(plan)
    ports = _ports(plan.cluster)
    sides = plan.cluster.network.torus.sides
    small = plan.sample.cluster.network.torus.sides
    for dimension, (side, fewer) in enumerate(zip(sides, small, strict=True)):
        if fewer != side and not 3 <= fewer < side:
            raise PlanError(
                f"the sample's side in dimension {dimension} must be {side}, or from 3 to {side - 1}, got {fewer}"
            )
    loads: dict[tuple[int, Step], Fraction] = {}
    total = Fraction(0)
    for number, template in enumerate(plan.templates):
        if not isinstance(template, TorusTree) or len(template.stages) != 1:
            raise PlanError(f"template {number} must be one tree on the sample, without arms")
        if template.share <= 0:
            raise PlanError(f"template {number}: share {shown(template.share)} must be above zero")
        total += template.share
        try:
            for entry in _entries(plan, template.stages[0], small).items():
                loads[entry] = loads.get(entry, Fraction(0)) + template.share
        except PlanError as error:
            raise error.under(f"template {number}") from None
    if total != 1:
        raise PlanError(f"shares add up to {shown(total)}, not 1")
    for host, step in loads:
        if not ports.get(step):
            raise PlanError(f"s{host} must be entered over a port, got none in dimension {step[0]}")
    rates = {entry: ports[entry[1]] / load for entry, load in loads.items()}
    rate, bound = min(rates.values()), _line_bound(plan, ports)
    check_claim("rate", plan.rate, rate)
    check_claim("bound", plan.bound, bound)
    if rate > bound:
        raise PlanError(
            f"the trees' rate {nearest_float(rate):.6g} GB/s exceeds the certified bound "
            f"{nearest_float(bound):.6g}: the certificate does not fit this cluster"
        )
    links: dict[tuple[str, str], Fraction] = {}
    ends_of = {entry: _ends(plan, entry, small) for entry in loads}
    for entry, load in loads.items():
        links[ends_of[entry]] = load
    report = Verification(
        rate=nearest_float(rate),
        bound=nearest_float(bound),
        exact_rate=rate,
        exact_bound=bound,
        optimal=rate == bound,
        trees=len(plan.templates),
        height=plan.height,
        bottleneck=tuple(ends_of[entry] for entry, found in rates.items() if found == rate),
        loads={ends: float(load) for ends, load in links.items()},
    )
    return report, [links.get((link.src, link.dst), Fraction(0)) for link in plan.fabric.links]


def _check_header(plan: PlanByKind) -> None:
    assert plan.collective in ROOTED, "other collectives are verified elsewhere"
    if plan.root is None or not 0 <= plan.root < plan.size:
        raise PlanError(f"{plan.collective} must have a root from 0 to {plan.size - 1}, got {plan.root}")
    if plan.lengths:
        raise PlanError("a broadcast or reduce in a torus must have a line as its certificate, got lengths")
    if plan.unsupported:
        raise PlanError(NOT_BY_KIND)
    if "network" not in plan.channels:
        raise PlanError(f"channels of a torus must have network, got {', '.join(plan.channels)}")


def _ports(cluster: ClusterByKind) -> dict[Step, Fraction]:
    """Return the GB/s of the link into a host by the direction in which it leads; PlanError for hosts without ports.

    Ports are numbered by dimension, those ahead first; port i ahead is cabled to port i back of the next host. A port
    sends to it, or receives from it, at the lower of both rates.
    """
    kinds = {kind for kind, _ in cluster.runs}
    if len(kinds) != 1 or list(cluster.gpus_of_kind)[min(kinds)] != 1:
        raise PlanError(
            "the servers of a torus must be equal hosts of one GPU in a broadcast or reduce by kind"
        )
    kind = cluster.kinds[min(kinds)]
    sides, of = cluster.network.torus.sides, cluster.network.dimension_nics
    each = of or [len(kind.ports) // (2 * len(sides))] * len(sides)
    port = {one.number: one for one in kind.ports}
    found: dict[Step, Fraction] = {}
    first = 0
    for dimension, (side, many) in enumerate(zip(sides, each, strict=True)):
        for number in range(first, first + many):
            near, far = port.get(number), port.get(number + many)
            if near is None or far is None:
                continue
            ahead = exact(min(near.out, far.back))
            back = exact(min(far.out, near.back))
            for step, rate in ((1, ahead), (-1, back)):
                key = (dimension, 1 if side == 2 else step)
                found[key] = found.get(key, Fraction(0)) + rate
        first += 2 * many
    return found


def _entries(plan: PlanByKind, stage: Stage, small: Sequence[int]) -> dict[int, Step]:
    """Return for each host of the sample the direction from its parent; PlanError unless the tree reaches all.

    The step is that in which data flows, so in a reduce from the host to its parent; hosts are numbers.
    """
    if stage.op != plan.collective:
        raise PlanError(f"the stage must be a {plan.collective}, got {stage.op}")
    ranks = plan.fabric.ranks
    if stage.root not in range(len(ranks)) or ranks[stage.root] != "s0.gpu0":
        raise PlanError("the root of the tree must be s0.gpu0, which stands for the root")
    hosts = 1
    for side in small:
        hosts *= side
    parents: dict[int, int] = {}
    steps: dict[int, Step] = {}
    for edge in stage.edges:
        names = tuple(ranks[one] for one in (edge.parent, edge.child))
        if edge.route != names:
            raise PlanError(
                f"the route {'-'.join(edge.route)} must be the cable from {names[0]} to {names[1]}"
            )
        if edge.channel != "network":
            raise PlanError(f"the channel of a cable must be network, got {edge.channel}")
        parent, child = (int(name.split(".")[0][1:]) for name in names)
        if child in parents or child == 0:
            raise PlanError(f"s{child} must be entered once, and the root not")
        parents[child] = parent
        ends = (parent, child) if stage.op == "broadcast" else (child, parent)
        steps[child] = _step(*ends, small)
    if len(parents) != hosts - 1:
        raise PlanError(f"the tree must enter {hosts - 1} hosts of the sample, got {len(parents)}")
    safe = {0}
    for start in parents:
        way: list[int] = []
        at = start
        while at not in safe:
            if len(way) > hosts:
                raise PlanError(f"the way back from s{start} must end at the root, got a cycle")
            way.append(at)
            at = parents[at]
        safe.update(way)
    return steps


def _step(tail: int, head: int, small: Sequence[int]) -> Step:
    """Return the direction from a host of the sample to another; PlanError unless they are neighbours."""
    found: list[Step] = []
    left = (tail, head)
    for dimension in range(len(small) - 1, -1, -1):
        side = small[dimension]
        apart = (left[1] % side - left[0] % side) % side
        left = (left[0] // side, left[1] // side)
        if apart:
            found.append((dimension, apart if apart == 1 else apart - side))
    if len(found) != 1 or abs(found[0][1]) != 1:
        raise PlanError(f"s{tail} and s{head} must be neighbours in the sample")
    return found[0]


def _ends(plan: PlanByKind, entry: tuple[int, Step], small: Sequence[int]) -> tuple[str, str]:
    """Return source and destination of the sample's link of a host in the direction in which data flows."""
    host, (dimension, step) = entry
    stride = 1
    for side in small[dimension + 1 :]:
        stride *= side
    side, sign = small[dimension], -step if plan.collective == "broadcast" else step
    at = host // stride % side
    other = host + ((at + sign) % side - at) * stride
    names = (f"s{other}.gpu0", f"s{host}.gpu0")
    return names if plan.collective == "broadcast" else names[::-1]


def _line_bound(plan: PlanByKind, ports: dict[Step, Fraction]) -> Fraction:
    """Return the bound of the plan's line in GB/s; PlanError if no such line is without the root."""
    sides, line = plan.cluster.network.torus.sides, plan.line
    if line is None or len(set(line)) != len(line) or not set(line) < set(range(len(sides))):
        raise PlanError(f"the certificate's dimensions must be some of {len(sides)}, but not all, got {line}")
    hosts = 1
    for dimension in line:
        hosts *= sides[dimension]
    return hosts * sum((rate for (one, _), rate in ports.items() if one not in line), Fraction(0))

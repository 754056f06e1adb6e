"""Verify a plan by kind of a broadcast or reduce on a torus of servers, from its file alone.

Bandwidths of cables are those of the ports of a server, and neighbours follow from coordinates: no cable is listed. A
template must enter every server of the sample but the root's once, from a neighbour, and every GPU once. The way back
from every GPU must end at the root. A side of the sample must be that of the torus, or one from 3 to it. So a server's
tree in the torus enters it from the neighbour in the same direction (`topoplan.plans.torus_trees`). The links into and
inside servers carry what those of the sample carry.

A link inside a server on the way to a cable carries what the next server is entered with. Along a dimension, the next
servers of one in a long block are of the same block, but for those at its ends. Each of these places is counted.

The bound is that of a line that the root is not on: the ports of its servers in the other dimensions take in all data
of a broadcast, or send all of a reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

from topoplan.errors import PlanError
from topoplan.machine.cluster_by_kind import ClusterByKind
from topoplan.plans.loads import edge_links
from topoplan.plans.plan import ROOTED
from topoplan.plans.plan_by_kind import NOT_BY_KIND, PlanByKind
from topoplan.plans.shards import Stage
from topoplan.plans.torus_trees import TorusTree
from topoplan.plans.verify import Verification, check_claims
from topoplan.units import exact, nearest_float, shown

Step = tuple[int, int]
"""A dimension, and 1 for ahead or -1 for back; in a dimension of two servers always 1."""

Wire = tuple[str, str]
"""Two devices of servers, in the direction in which data flows: of one server, or of neighbours."""


@dataclass
class _Loads:
    """Loads of the links of the sample: bytes for each byte of the buffer.

    ``into`` is by server, step and cable, ``inside`` by server and link. ``ahead`` is for links on the way out: by
    server, link, dimension and the step from the tree's parent. Its pair is for a next server of the sample's own, and
    of one like the server.
    """

    into: dict[tuple[int, Step, Wire], Fraction] = field(default_factory=dict)
    inside: dict[tuple[int, Wire], Fraction] = field(default_factory=dict)
    ahead: dict[tuple[int, Wire, int, int], list[Fraction]] = field(default_factory=dict)

    def leave(self, server: int, wire: Wire, step: Step, like: int, share: Fraction) -> None:
        """Count a link on the way out of a server, to one of another block, or like it (1)."""
        pair = self.ahead.setdefault((server, wire, *step), [Fraction(0), Fraction(0)])
        pair[like] += share

    def of_links(self, blocks: Sequence[Sequence[int]]) -> dict[tuple[int, Wire], Fraction]:
        """Return the most that any server's link carries, given the servers of each one's block by dimension."""
        found = dict(self.inside)
        for server, wire, dimension in sorted({key[:3] for key in self.ahead}):
            pairs = [
                self.ahead.get((server, wire, dimension, step), [Fraction(0), Fraction(0)])
                for step in (1, -1)
            ]
            many = blocks[server][dimension]
            worst = max(
                pairs[0][place < many - 1] + pairs[1][place > 0] for place in {0, many // 2, many - 1}
            )
            found[server, wire] = found.get((server, wire), Fraction(0)) + worst
        return found


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
    loads, total = _Loads(), Fraction(0)
    for number, template in enumerate(plan.templates):
        if not isinstance(template, TorusTree) or len(template.stages) != 1:
            raise PlanError(f"template {number} must be one tree on the sample, without arms")
        if template.share <= 0:
            raise PlanError(f"template {number}: share {shown(template.share)} must be above zero")
        total += template.share
        try:
            _count(plan, template.stages[0], template.share, small, loads)
        except PlanError as error:
            raise error.under(f"template {number}") from None
    if total != 1:
        raise PlanError(f"shares add up to {shown(total)}, not 1")
    links: dict[tuple[str, str], Fraction] = {}
    rates: dict[tuple[str, str], Fraction] = {}
    for (server, step, wire), load in sorted(loads.into.items()):
        if not ports.get((step, wire)):
            raise PlanError(f"s{server} must be entered over a port, got none in dimension {step[0]}")
        ends = _ends(plan.collective, server, step, wire, small)
        links[ends], rates[ends] = load, ports[step, wire] / load
    capacity = dict(zip(((one.src, one.dst) for one in plan.fabric.links), plan.fabric.capacity, strict=True))
    for (server, wire), load in sorted(loads.of_links(_blocks(sides, small)).items()):
        ends = f"s{server}.{wire[0]}", f"s{server}.{wire[1]}"
        if load:
            links[ends], rates[ends] = load, capacity[f"s0.{wire[0]}", f"s0.{wire[1]}"] / load
    rate, bound = min(rates.values()), _line_bound(plan, ports)
    check_claims((plan.rate, plan.bound), rate, bound, "cluster")
    report = Verification(
        rate=nearest_float(rate),
        bound=nearest_float(bound),
        exact_rate=rate,
        exact_bound=bound,
        optimal=rate == bound,
        trees=len(plan.templates),
        height=plan.height,
        bottleneck=tuple(ends for ends, found in rates.items() if found == rate),
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
    if len({kind for kind, _ in plan.cluster.runs}) != 1:
        raise PlanError("the servers of a torus must be equal in a broadcast or reduce by kind")


def _ports(cluster: ClusterByKind) -> dict[tuple[Step, Wire], Fraction]:
    """Return the GB/s of the cables into a server by the direction in which they lead, and their devices.

    Ports are numbered by dimension, those ahead first; port i ahead is cabled to port i back of the next server. A port
    sends to it, or receives from it, at the lower of both rates.
    """
    kind = cluster.kinds[cluster.runs[0][0]]
    sides, of = cluster.network.torus.sides, cluster.network.dimension_nics
    each = of or [len(kind.ports) // (2 * len(sides))] * len(sides)
    port = {one.number: one for one in kind.ports}
    found: dict[tuple[Step, Wire], Fraction] = {}
    first = 0
    for dimension, (side, many) in enumerate(zip(sides, each, strict=True)):
        for number in range(first, first + many):
            near, far = port.get(number), port.get(number + many)
            if near is None or far is None:
                continue
            for step, sends, takes in ((1, near, far), (-1, far, near)):
                key = (dimension, 1 if side == 2 else step), (sends.sender, takes.receiver)
                found[key] = found.get(key, Fraction(0)) + exact(min(sends.out, takes.back))
        first += 2 * many
    return found


def _blocks(sides: Sequence[int], small: Sequence[int]) -> list[list[int]]:
    """Return for each server of the sample the servers along each dimension for which it stands."""
    blocks: list[list[int]] = [[]]
    for side, fewer in zip(sides, small, strict=True):
        many = [side - fewer + 1 if at == 1 else 1 for at in range(fewer)]
        blocks = [[*one, here] for one in blocks for here in many]
    return blocks


def _count(plan: PlanByKind, stage: Stage, share: Fraction, small: Sequence[int], loads: _Loads) -> None:
    """Count what a tree carries over links; PlanError unless it reaches all GPUs, and each server but the root's once.

    A step is that in which data flows, so in a reduce from the server to its parent; servers are numbers.
    """
    if stage.op != plan.collective:
        raise PlanError(f"the stage must be a {plan.collective}, got {stage.op}")
    ranks, servers = plan.fabric.ranks, 1
    for side in small:
        servers *= side
    assert plan.root is not None, "the header is checked first"
    each = len(ranks) // servers
    if stage.root != plan.root % each:
        raise PlanError(f"the root of the tree must be {ranks[plan.root % each]}, which stands for the root")
    parents: dict[int, int] = {}
    entered: set[int] = set()
    for edge in stage.edges:
        if edge.child in parents or edge.child == stage.root:
            raise PlanError(f"{ranks[edge.child]} must be entered once, and the root not")
        parents[edge.child] = edge.parent
        above, below = (_device(ranks[one])[0] for one in (edge.parent, edge.child))
        step: Step | None = None
        if above != below:
            if below in entered or below == 0:
                raise PlanError(f"s{below} must be entered once, and the server of the root not")
            entered.add(below)
            ends = (above, below) if stage.op == "broadcast" else (below, above)
            step = _step(*ends, small)
        edge_links(edge, stage.op, plan.fabric)
        devices = [_device(name) for name in edge.route]
        at = [server for server, _ in devices]
        if at != sorted(at, key=lambda server: server == below) or set(at) != {above, below}:
            raise PlanError(
                f"the route {'-'.join(edge.route)} must pass one cable to another server, or none"
            )
        for first, last in pairwise(devices):
            wire = (first[1], last[1]) if stage.op == "broadcast" else (last[1], first[1])
            if step is None or first[0] == last[0] == below:
                loads.inside[last[0], wire] = loads.inside.get((last[0], wire), Fraction(0)) + share
            elif first[0] != last[0]:
                key = below, step, wire
                loads.into[key] = loads.into.get(key, Fraction(0)) + share
            else:
                away = step if stage.op == "broadcast" or small[step[0]] == 2 else (step[0], -step[1])
                loads.leave(above, wire, away, 0, share)
                loads.leave(below, wire, away, 1, share)
    if len(entered) != servers - 1:
        raise PlanError(f"the tree must enter {servers - 1} servers of the sample, got {len(entered)}")
    if len(parents) != len(ranks) - 1:
        raise PlanError(f"the tree must enter {len(ranks) - 1} GPUs of the sample, got {len(parents)}")
    safe = {stage.root}
    for start in parents:
        way: list[int] = []
        rank = start
        while rank not in safe:
            if len(way) > len(ranks):
                raise PlanError(f"the way back from {ranks[start]} must end at the root, got a cycle")
            way.append(rank)
            rank = parents[rank]
        safe.update(way)


def _device(name: str) -> tuple[int, str]:
    """Return the server of a device of the sample, and its name there."""
    head, _, tail = name.partition(".")
    return int(head[1:]), tail


def _step(tail: int, head: int, small: Sequence[int]) -> Step:
    """Return the direction from a server of the sample to another; PlanError unless they are neighbours."""
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


def _ends(collective: str, server: int, step: Step, wire: Wire, small: Sequence[int]) -> tuple[str, str]:
    """Return source and destination of the sample's cable of a server in the direction in which data flows."""
    dimension, ahead = step
    stride = 1
    for side in small[dimension + 1 :]:
        stride *= side
    side, sign = small[dimension], -ahead if collective == "broadcast" else ahead
    at = server // stride % side
    other = server + ((at + sign) % side - at) * stride
    both = (other, server) if collective == "broadcast" else (server, other)
    return f"s{both[0]}.{wire[0]}", f"s{both[1]}.{wire[1]}"


def _line_bound(plan: PlanByKind, ports: dict[tuple[Step, Wire], Fraction]) -> Fraction:
    """Return the bound of the plan's line in GB/s; PlanError if no such line is without the root."""
    sides, line = plan.cluster.network.torus.sides, plan.line
    if line is None or len(set(line)) != len(line) or not set(line) < set(range(len(sides))):
        raise PlanError(f"the certificate's dimensions must be some of {len(sides)}, but not all, got {line}")
    hosts = 1
    for dimension in line:
        hosts *= sides[dimension]
    return hosts * sum((rate for ((one, _), _), rate in ports.items() if one not in line), Fraction(0))

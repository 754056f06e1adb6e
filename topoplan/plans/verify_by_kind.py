"""Verify a plan of a cluster by kind from its templates alone, by counts of servers.

Every server of the cluster is in exactly one *group* of a template: it has a role (root, centre, entry of a leaf, or
of a leaf and a pod), or it is one of the remaining servers of its cell in the root's leaf, in the centre's leaf, in the
leaf of the entry of its pod, or in the other leaves of its class: of the root's pod, of the centre's, or of all others.
The template must reach one server of the sample for each group that is not empty, all of its ranks once, from a server
that every member of the group has in common: the root, the centre, or the entry of its leaf or pod. Then each image is
a tree over all ranks. Roles must fall on all servers of a cell equally often; then all links of a class carry the same,
which is counted here by groups. Copies that run to one switch which copies or adds are one. In a dragonfly the centre,
and the third groups that routes pass, must also be in every group of their class equally often for each group of the
root, so that all links between two classes carry the same.

The templates of a torus are moved to every server. Its images are trees over all ranks if their arms reach every server
once, and each server of the sample has its data from itself or from server 0.

Those of an all-to-all in a torus have paths along such trees. An edge carries the blocks of all ranks beyond it. Trees
of one root in a torus are verified by `topoplan.plans.verify_torus_trees`.

Elsewhere the templates of an all-to-all are paths, whose images are orbits (`topoplan.plans.kind_exchange`). The edges
must be a path, and the paths of every commodity must add up to a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, perm, prod

from topoplan.errors import PlanError
from topoplan.machine.cluster_by_kind import Cell, ClusterSample
from topoplan.plans.build import stage_order
from topoplan.plans.certificates.kind_lengths import IN_TORUS
from topoplan.plans.kind_exchange import KindPath
from topoplan.plans.kind_templates import KindTemplate, represented, share_units
from topoplan.plans.loads import edge_links
from topoplan.plans.plan import ALL_COLLECTIVES, ALL_TO_ALL, ROOTED
from topoplan.plans.plan_by_kind import NOT_BY_KIND, PlanByKind
from topoplan.plans.shards import Edge, Stage
from topoplan.plans.torus_templates import TorusPaths, TorusTemplate
from topoplan.plans.torus_trees import TorusTree
from topoplan.plans.verify import Verification, check_claims
from topoplan.plans.verify_torus_trees import verify_torus_trees
from topoplan.units import nearest_float, shown

Leaf = tuple[int, int]
"""A leaf or pod of the sample: its class, and its number there."""


def verify_by_kind(plan: PlanByKind) -> Verification:
    """Recompute everything that a plan of a cluster by kind claims.

    ``loads`` of the report are for one link of each class, by the sample's names. PlanError for the first fault.
    """
    return verify_with_loads(plan)[0]


def verify_with_loads(plan: PlanByKind) -> tuple[Verification, list[Fraction]]:
    """Return the report of `verify_by_kind`, and the exact load of each link of the sample."""
    if plan.rooted_in_torus:
        return verify_torus_trees(plan)
    _check_header(plan)
    if plan.collective == ALL_TO_ALL and plan.cluster.network.kind != "torus":
        _check_blocks(plan)
    else:
        _check_shares(plan)
    home = plan.sample.servers_of(plan.fabric.ranks)
    classes, counts = plan.sample.link_classes(plan.fabric.links)
    crossed, crossings = [Fraction(0)] * len(counts), [0] * len(counts)
    unit, shares = share_units(plan.templates)
    links: dict[tuple[str, Edge], tuple[int, ...]] = {}
    beyond: dict[Edge, set[Leaf]] = {}
    trees = 0
    for number, template in enumerate(plan.templates):
        try:
            if isinstance(template, KindPath):
                trees += _path_images(plan, template)
                pairs = Fraction(_pairs(plan, _commodity(plan, home, template)), plan.size)
                servers = _servers_of(plan, template.stages[0].edges)
                for edge in template.stages[0].edges:
                    _third_leaves(plan, edge, servers)
                    for place in edge_links(edge, "broadcast", plan.fabric):
                        crossed[classes[place]] += template.share * pairs
                continue
            blocks: Counter[Edge] | None = None
            assert not isinstance(template, TorusTree), "the header is checked first"
            groups = (
                None
                if isinstance(template, TorusTemplate)
                else _Groups(plan.sample, plan.fabric.ranks, template)
            )
            entered = _entered(plan, template) if isinstance(template, TorusTemplate) else {}
            if groups is not None:
                groups.check_roles()
            images = plan.cluster.servers if groups is None else groups.images()
            trees += images * (plan.size - 1) if isinstance(template, TorusPaths) else images
            passed: set[Leaf] = set()
            for stage in template.stages:
                if groups is None:
                    _check_moved(plan, entered, stage)
                    stands = {rank: entered[one] for rank, one in enumerate(home) if one in entered}
                    if isinstance(template, TorusPaths):
                        blocks = _blocks(plan, template, stage)
                else:
                    reached = _check_stage(plan, groups, stage)
                    stands = {rank: groups.sizes[group] for rank, group in reached.items()}
                for edge in stage.edges:
                    # Templates have most edges in common.
                    if (stage.op, edge) not in links:
                        beyond[edge] = _third_leaves(plan, edge, _servers_of(plan, [edge]))
                        _check_third_leaves(plan, edge, beyond[edge])
                        links[stage.op, edge] = edge_links(edge, stage.op, plan.fabric)
                    passed |= beyond[edge]
                    if groups is None:
                        crossing = stands[edge.child] if blocks is None else blocks[edge]
                        for place in links[stage.op, edge]:
                            crossings[classes[place]] += shares[number] * crossing
                if groups is not None:
                    for place, times in _crossed(plan, groups, stage, stands, links):
                        crossings[classes[place]] += shares[number] * times
            if passed and groups is not None:
                groups.check_turns({leaf_class for leaf_class, _ in passed})
        except PlanError as error:
            raise error.under(f"template {number}") from None
    capacity = dict(zip(classes, plan.fabric.capacity, strict=True))
    crossed = [load + Fraction(times, unit) for load, times in zip(crossed, crossings, strict=True)]
    rates = {row: capacity[row] * counts[row] / times for row, times in enumerate(crossed) if times}
    if not rates:
        raise PlanError("no template crosses a link")
    rate, bound = min(rates.values()), plan.exact_bound()
    check_claims((plan.rate, plan.bound), rate, bound, "cluster")
    first: dict[int, tuple[str, str]] = {}
    for link, row in zip(plan.fabric.links, classes, strict=True):
        first.setdefault(row, (link.src, link.dst))
    each = [load / count for load, count in zip(crossed, counts, strict=True)]
    report = Verification(
        rate=nearest_float(rate),
        bound=nearest_float(bound),
        exact_rate=rate,
        exact_bound=bound,
        optimal=rate == bound,
        trees=trees,
        height=plan.height,
        bottleneck=tuple(first[row] for row, found in rates.items() if found == rate),
        loads={first[row]: float(each[row]) for row in rates},
    )
    return report, [each[row] for row in classes]


def _crossed(
    plan: PlanByKind,
    groups: _Groups,
    stage: Stage,
    stands: Mapping[int, int],
    links: Mapping[tuple[str, Edge], tuple[int, ...]],
) -> Iterator[tuple[int, int]]:
    """Yield links of the sample, and how many copies cross such links in an image.

    A copy on a link goes to the next switch from there that copies (or adds, in a reduce), or to the child. Routes from
    one parent that are the same up to that switch have it in common.
    """
    merging = plan.fabric.adding if stage.op == "reduce" else plan.fabric.copying
    known: set[tuple[int, str, int, tuple[str, ...]]] = set()
    for edge in stage.edges:
        crossed = links[stage.op, edge]
        if merging.isdisjoint(edge.route):
            yield from ((place, stands[edge.child]) for place in crossed)
            continue
        last = len(edge.route) - 1
        ends = [stop for stop, name in enumerate(edge.route) if name in merging or stop == last]
        for step, place in enumerate(crossed[::-1] if stage.op == "reduce" else crossed):
            end = next(stop for stop in ends if stop > step)
            common = (edge.parent, edge.channel, step, edge.route[: end + 1])
            if common not in known:
                known.add(common)
                number = stands[edge.child] if end == last else groups.switches(edge, edge.route[end])
                yield place, number


def _check_header(plan: PlanByKind) -> None:
    if plan.collective not in ALL_COLLECTIVES:
        raise PlanError(f"collective {plan.collective!r} is unknown to plans of clusters by kind")
    if (plan.collective in ROOTED) != (plan.root is not None):
        raise PlanError(
            f"{plan.collective} must have {'a' if plan.root is None else 'no'} root, got {plan.root}"
        )
    if plan.root is not None:
        if not 0 <= plan.root < plan.size:
            raise PlanError(f"root {plan.root} must be from 0 to {plan.size - 1}")
        cluster = plan.cluster
        if cluster.cells[cluster.place(cluster.server_of(plan.root)[0]).cell].servers != 1:
            raise PlanError(f"the server of root {plan.root} must be a kind of its own")
    if plan.cluster.network.kind == "torus":
        if plan.collective not in IN_TORUS:
            raise PlanError(
                f"a plan of a torus by kind must be of {', '.join(IN_TORUS)}, got {plan.collective}"
            )
        if plan.cluster.cells[0].servers != plan.cluster.servers:
            raise PlanError("the servers of a torus must be equal in a plan by kind")
    if plan.unsupported:
        raise PlanError(NOT_BY_KIND)
    if plan.fabric.unreachable(plan.collective, plan.sample_root):
        raise PlanError(f"the ranks are not connected over {', '.join(plan.channels)}")
    order = stage_order(plan.collective)
    for number, template in enumerate(plan.templates):
        if isinstance(template, TorusTree):
            raise PlanError(f"template {number} must be of a root in a torus, or have another form")
        if isinstance(template, TorusTemplate) != (plan.cluster.network.kind == "torus"):
            raise PlanError(f"template {number} must have arms in a torus, and nowhere else")
        if isinstance(template, (KindPath, TorusPaths)) != (plan.collective == ALL_TO_ALL):
            raise PlanError(
                f"template {number} must be a {'path' if plan.collective == ALL_TO_ALL else 'tree'}"
            )
        if tuple(stage.op for stage in template.stages) != order:
            raise PlanError(f"template {number} must have the stages {', '.join(order)}")
        if isinstance(template, KindPath):
            continue
        roots = {stage.root for stage in template.stages}
        if len(roots) > 1 or (plan.root is not None and roots != {plan.sample_root}):
            raise PlanError(f"template {number} must have one root in all stages, that of the collective")


def _check_shares(plan: PlanByKind) -> None:
    owned: dict[tuple[int, int], Fraction] = {}
    home = plan.sample.servers_of(plan.fabric.ranks)
    for number, template in enumerate(plan.templates):
        if template.share <= 0:
            raise PlanError(f"template {number}: share {shown(template.share)} must be above zero")
        root = template.stages[0].root
        first = home.index(home[root])
        owner = (plan.sample.places[home[root]].cell, root - first)
        owned[owner] = owned.get(owner, Fraction(0)) + template.share
    if plan.collective not in ("allgather", "reduce_scatter", ALL_TO_ALL):
        total = sum(owned.values(), Fraction(0))
        if total != 1:
            raise PlanError(f"shares add up to {shown(total)}, not 1")
        return
    cluster = plan.cluster
    for number, cell in enumerate(cluster.cells):
        for gpu in range(cluster.gpus_of_kind[cell.kind]):
            due = Fraction(cell.servers, plan.size)
            part = owned.get((number, gpu), Fraction(0))
            if part != due:
                raise PlanError(
                    f"blocks of GPU {gpu} of cell {number} have a share of {shown(part)}, not {due}"
                )


def _entered(plan: PlanByKind, template: TorusTemplate) -> dict[int, int]:
    """Return for each server of the sample how many servers of an image in a torus are entered as it is.

    A server at coordinates c from the root's is entered in the last dimension of the template's order in which c is not
    0: ahead, if c is at most the steps ahead. PlanError unless the arms reach each server once.
    """
    sample, sides = plan.sample, plan.cluster.network.torus.sides
    place = {number: server for server, number in enumerate(sample.numbers)}
    if sorted(arm.dimension for arm in template.arms) != list(range(len(sides))):
        raise PlanError(f"each of {len(sides)} dimensions must have one arm")
    found = {place[0]: 1}
    for order, arm in enumerate(template.arms):
        side = sides[arm.dimension]
        if min(arm.ahead, arm.back) < 0 or arm.ahead + arm.back + 1 != side:
            raise PlanError(
                f"steps ahead and back in dimension {arm.dimension} must be 0 or more and add up to {side - 1}, got "
                f"{arm.ahead} and {arm.back}"
            )
        anywhere = prod(sides[earlier.dimension] for earlier in template.arms[:order])
        # The number of a server one step ahead, or back, in this dimension alone.
        one = prod(sides[arm.dimension + 1 :])
        for steps, number in ((arm.ahead, one), (arm.back, (side - 1) * one)):
            if steps:
                found[place[number]] = steps * anywhere
    return found


def _check_moved(plan: PlanByKind, entered: dict[int, int], stage: Stage) -> None:
    """Raise PlanError unless the images of a stage in a torus are trees over all ranks.

    Each server has its data from its own GPUs, and from those of the server before it, of which the sample's is the
    root's.
    """
    home, numbers = plan.sample.servers_of(plan.fabric.ranks), plan.sample.numbers
    stage.check_ranks(plan.fabric.size)
    if numbers[home[stage.root]] != 0:
        raise PlanError(f"the root of the {stage.op} tree must be on s0, got s{numbers[home[stage.root]]}")
    ranks = Counter(home[rank] for rank in stage.depths())
    for server in sorted(ranks.keys() | entered.keys()):
        due = home.count(server) if server in entered else 0
        if ranks[server] != due:
            raise PlanError(
                f"the {stage.op} tree must reach {due} ranks of s{numbers[server]}, got {ranks[server]}"
            )
    for edge in stage.edges:
        above, below = home[edge.parent], home[edge.child]
        if above != below and numbers[above] != 0:
            raise PlanError(
                f"s{numbers[below]} must have its data from itself or s0, got s{numbers[above]}",
                rank=edge.child,
            )


def _blocks(plan: PlanByKind, template: TorusPaths, stage: Stage) -> Counter[Edge]:
    """Return how many blocks of one image cross each edge, server by server from the ends of the arms back.

    A server must have the blocks of its own GPUs, of all servers that it reaches along later arms, and of the servers
    beyond it on its arm.
    """
    sides, home = plan.cluster.network.torus.sides, plan.sample.servers_of(plan.fabric.ranks)
    place = {number: server for server, number in enumerate(plan.sample.numbers)}
    upwards: dict[int, list[Edge]] = {}
    for edge in reversed(stage.top_down()):
        upwards.setdefault(home[edge.child], []).append(edge)
    first = {server: home.index(server) for server in upwards}
    found: Counter[Edge] = Counter()

    def collect(server: int, due: Sequence[int], servers: int) -> list[int]:
        """Return what the GPUs of the server before must have for one server that must have so much, and add it up."""
        at, sent = list(due), [0] * len(due)
        for edge in upwards.get(server, ()):
            moved = at[edge.child - first[server]]
            found[edge] += servers * moved
            if home[edge.parent] == server:
                at[edge.parent - first[server]] += moved
            else:
                sent[edge.parent - home.index(home[edge.parent])] += moved
        return sent

    own = [1] * home.count(place[0])
    for order in range(len(template.arms) - 1, -1, -1):
        arm = template.arms[order]
        servers = prod(sides[earlier.dimension] for earlier in template.arms[:order])
        one = prod(sides[arm.dimension + 1 :])
        total = list(own)
        for steps, number in ((arm.ahead, one), (arm.back, (sides[arm.dimension] - 1) * one)):
            beyond = [0] * len(own)
            for _ in range(steps):
                due = [a + b for a, b in zip(own, beyond, strict=True)]
                beyond = collect(place[number], due, servers)
            total = [a + b for a, b in zip(total, beyond, strict=True)]
        own = total
    collect(place[0], own, 1)
    return found


SERVER, LEAF, POD, CLUSTER = "one server", "one leaf", "two leaves of one pod", "two pods"
"""Places that source and destination of a commodity share."""

_Commodity = tuple[int, int, int, int, str]
"""Cell and GPU number of the source, cell and GPU number of the destination, and where both are."""


def _commodity(plan: PlanByKind, home: Sequence[int], path: KindPath) -> _Commodity:
    """Return the commodity of a path; PlanError if the edges are not a path."""
    path.stages[0].check_ranks(plan.fabric.size)
    source, destination = path.ends
    sample = plan.sample
    here, there = sample.places[home[source]], sample.places[home[destination]]
    leaf, other = (sample.leaf_of(home[rank]) for rank in (source, destination))
    beside = sample.pod_of(home[source]) == sample.pod_of(home[destination])
    where = SERVER if here == there else LEAF if leaf == other else POD if beside else CLUSTER
    numbers = (rank - home.index(home[rank]) for rank in (source, destination))
    return here.cell, next(numbers), there.cell, next(numbers), where


def _pairs(plan: PlanByKind, commodity: _Commodity) -> int:
    """Return the number of pairs of ranks of a commodity."""
    here, gpu, there, other, where = commodity
    source, destination = plan.cluster.cells[here], plan.cluster.cells[there]
    near = source.leaf_class == destination.leaf_class
    if where == SERVER:
        return source.servers if here == there and gpu != other else 0
    if where == LEAF:
        return source.servers * (destination.count - (here == there)) if near else 0
    if where == POD:
        leaves = (
            destination.leaves // destination.pods - near if source.pod_class == destination.pod_class else 0
        )
        return source.servers * destination.count * leaves
    pods = destination.pods - (source.pod_class == destination.pod_class)
    return source.servers * destination.count * pods * (destination.leaves // destination.pods)


def _check_blocks(plan: PlanByKind) -> None:
    """Check that the paths of every commodity carry the whole block."""
    carried: dict[_Commodity, Fraction] = {}
    home = plan.sample.servers_of(plan.fabric.ranks)
    for number, template in enumerate(plan.templates):
        if template.share <= 0:
            raise PlanError(f"template {number}: share {shown(template.share)} must be above zero")
        assert isinstance(template, KindPath), "the header is checked first"
        try:
            commodity = _commodity(plan, home, template)
        except PlanError as error:
            raise error.under(f"template {number}") from None
        carried[commodity] = carried.get(commodity, Fraction(0)) + template.share
    cluster = plan.cluster
    gpus = [
        (number, gpu)
        for number, cell in enumerate(cluster.cells)
        for gpu in range(cluster.gpus_of_kind[cell.kind])
    ]
    for here, gpu in gpus:
        for there, other in gpus:
            for where in (SERVER, LEAF, POD, CLUSTER):
                share = carried.get((here, gpu, there, other, where), Fraction(0))
                due = min(1, _pairs(plan, (here, gpu, there, other, where)))
                if share != due:
                    raise PlanError(
                        f"paths from GPU {gpu} of cell {here} to GPU {other} of cell {there} on {where} carry "
                        f"{shown(share)} of a block, not {due}"
                    )


def _path_images(plan: PlanByKind, path: KindPath) -> int:
    """Return the number of images of a path: ways to choose its pods, its leaves in each, and its servers in each.

    Groups of a dragonfly that it passes without a server are leaves too.
    """
    sample, edges = plan.sample, path.stages[0].edges
    servers = _servers_of(plan, edges)
    beyond = {leaf for edge in edges for leaf in _third_leaves(plan, edge, servers)}
    cells, places = sample.cluster.cells, sample.places
    pods_of = {cell.pod_class: cell.pods for cell in cells}
    leaves_in_pod = {cell.leaf_class: cell.leaves // cell.pods for cell in cells}
    ways = 1
    for pod_class, used in Counter(one for one, _ in {sample.pod_of(one) for one in servers}).items():
        ways *= perm(pods_of[pod_class], used)
    leaves = {(sample.pod_of(one), sample.leaf_of(one)) for one in servers}
    leaves |= {((0, 0), leaf) for leaf in beyond}
    for (_, leaf_class), used in Counter((pod, leaf_class) for pod, (leaf_class, _) in leaves).items():
        ways *= perm(leaves_in_pod[leaf_class], used)
    for (cell, _), used in Counter(places[one][:2] for one in servers).items():
        ways *= perm(cells[cell].count, used)
    return ways


def _servers_of(plan: PlanByKind, edges: Sequence[Edge]) -> set[int]:
    """Return the servers of the sample that routes pass."""
    for edge in edges:
        for device in edge.route:
            if device not in plan.sample.class_of:
                raise PlanError(
                    f"the route {'-'.join(edge.route)} passes {device}, which is not on the plan's servers",
                    rank=edge.child,
                )
    devices = (device for edge in edges for device in edge.route)
    return {plan.sample.server_of(device) for device in devices if "." in device}


def _third_leaves(plan: PlanByKind, edge: Edge, servers: Iterable[int]) -> set[Leaf]:
    """Return the groups of a dragonfly on a route in which none of some servers is.

    Other leaves, and pods, must be those of the servers, as images have others with these servers.
    """
    sample = plan.sample
    own: set[str] = set()
    for one in servers:
        own.add(f"{sample.cluster.network.leaf}{sample.cluster.leaf_number(*sample.leaf_of(one))}")
        own.add(f"pod{sample.cluster.pod_number(*sample.pod_of(one))}")
    if sample.cluster.network.kind == "dragonfly":
        return {
            sample.groups[device] for device in edge.route if device in sample.groups and device not in own
        }
    for device in edge.route:
        if device.startswith(("leaf", "pod")) and device not in own:
            raise PlanError(
                f"the route {'-'.join(edge.route)} passes {device}, on which none of its servers is",
                rank=edge.child,
            )
    return set()


def _check_third_leaves(plan: PlanByKind, edge: Edge, beyond: set[Leaf]) -> None:
    """Check that third groups on a route are of different classes, which its ends do not have."""
    ends = {plan.sample.leaf_of(one)[0] for one in _servers_of(plan, [edge])}
    classes = [leaf_class for leaf_class, _ in sorted(beyond)]
    if len(set(classes)) < len(classes) or ends & set(classes):
        raise PlanError(
            f"the route {'-'.join(edge.route)} must pass at most one other group of each class, and none of the "
            "classes of its ends; take the link between the groups",
            rank=edge.child,
        )


@dataclass(frozen=True)
class _Group:
    """A role, or (role empty) the remaining servers of a cell in one leaf, or in all without a role of their own."""

    role: str
    cell: int
    where: str


class _Groups:
    """The groups of a template: how many servers of the cluster each has, and of which each server of the sample is."""

    def __init__(self, sample: ClusterSample, ranks: Sequence[str], template: KindTemplate) -> None:
        self.sample, self.ranks, self.template = sample, ranks, template
        cells, places = sample.cluster.cells, sample.places
        self.leaf: list[Leaf] = [sample.leaf_of(server) for server in range(len(places))]
        self.pod: list[Leaf] = [sample.pod_of(server) for server in range(len(places))]
        self.held = {self.leaf[template.root], self.leaf[template.centre]}
        self.pods = {self.pod[template.root], self.pod[template.centre]}
        # The entry of each pod, by the pod's class and the group of pods.
        self.passing: dict[tuple[int, str], int] = {}
        for entry in template.pod_entries:
            key = self.pod[entry][0], self._pods(entry)
            if entry not in template.entries or self.pod[entry] == self.pod[template.centre]:
                raise PlanError(
                    f"s{sample.numbers[entry]}, an entry of a pod, must be an entry, in another pod than the centre"
                )
            if key in self.passing:
                raise PlanError(f"pod class {key[0]}, {key[1]} has two entries of a pod")
            self.passing[key] = entry
        # Leaves of each class by counts of the cluster, not of the sample.
        in_pods = Counter(pod_class for pod_class, _ in self.pods)
        held_at = {(self.leaf[one], self.pod[one]) for one in (template.root, template.centre)}
        self.free = free = dict[tuple[int, str], int]()
        for cell in cells:
            in_pod, kinds = (
                cell.leaves // cell.pods,
                [f"pod {pod}" for pod in self.pods if pod[0] == cell.pod_class],
            )
            pods = dict.fromkeys(kinds, 1) | {"others": cell.pods - in_pods[cell.pod_class]}
            for where, number in pods.items():
                held = sum(leaf[0] == cell.leaf_class and f"pod {pod}" == where for leaf, pod in held_at)
                one = self.passing.get((cell.pod_class, where))
                if one is not None and self.leaf[one][0] == cell.leaf_class and not self._held(one):
                    free[cell.leaf_class, f"{where}, leaf of its entry"] = number
                    held += 1
                free[cell.leaf_class, where] = number * (in_pod - held)
        self.sizes: dict[_Group, int] = {_Group("root", places[template.root].cell, ""): 1}
        if template.centre != template.root:
            self.sizes[_Group("centre", places[template.centre].cell, "")] = 1
        entries: Counter[str] = Counter()
        for entry in template.entries:
            leaf = self.leaf[entry]
            if entry == template.root or leaf == self.leaf[template.centre]:
                raise PlanError(f"entry s{sample.numbers[entry]} is the root, or in the leaf of the centre")
            where = self._where(entry)
            entries["the root's leaf" if leaf in self.held else f"leaf class {leaf[0]}, {where}"] += 1
            self.sizes[self.of(entry)] = size = 1 if leaf in self.held else free[leaf[0], where]
            if not size:
                raise PlanError(f"entry s{sample.numbers[entry]} stands for no server")
        twice = next((where for where, times in entries.items() if times > 1), None)
        if twice is not None:
            raise PlanError(f"{twice} has two entries")
        for number, cell in enumerate(cells):
            for leaf in self.held:
                if leaf[0] == cell.leaf_class:
                    marked = sum(
                        places[one].cell == number and self.leaf[one] == leaf for one in set(template.marked)
                    )
                    self._add(number, f"leaf {leaf[1]}", cell.count - marked)
            for (leaf_class, where), leaves in free.items():
                if leaf_class == cell.leaf_class:
                    marked = sum(
                        places[one].cell == number and self._where(one) == where for one in template.entries
                    )
                    self._add(number, where, leaves * (cell.count - marked))

    def _held(self, server: int) -> bool:
        return self.leaf[server] in self.held

    def _pods(self, server: int) -> str:
        """Return the pod of a server, if root or centre is there."""
        return f"pod {self.pod[server]}" if self.pod[server] in self.pods else "others"

    def _where(self, server: int) -> str:
        """Return the leaf of a server if root or centre is there, else its pod, and if the entry of that is there."""
        leaf, where = self.leaf[server], self._pods(server)
        if leaf in self.held:
            return f"leaf {leaf[1]}"
        entry = self.passing.get((self.pod[server][0], where))
        return where if entry is None or self.leaf[entry] != leaf else f"{where}, leaf of its entry"

    def _add(self, cell: int, where: str, size: int) -> None:
        if size < 0:
            raise PlanError(f"cell {cell} has fewer servers than the template has roles for")
        if size:
            self.sizes[_Group("", cell, where)] = size

    def of(self, server: int) -> _Group:
        """Return the group of a server of the sample."""
        cell, template = self.sample.places[server].cell, self.template
        if server == template.root:
            return _Group("root", cell, "")
        if server == template.centre:
            return _Group("centre", cell, "")
        return _Group("entry" if server in template.entries else "", cell, self._where(server))

    def switches(self, edge: Edge, name: str) -> int:
        """Return how many switches of the cluster one on the route of an edge is, in all edges of the edge's group."""
        sample, ranks = self.sample, self.ranks
        parent, child = (sample.server_of(ranks[rank]) for rank in (edge.parent, edge.child))
        if "." in name:
            server = sample.server_of(name)
            if server not in (parent, child):
                raise PlanError(
                    f"the route {'-'.join(edge.route)} merges at {name}, on neither of its servers"
                )
            return self.sizes[self.of(server)]
        word, leaf = sample.cluster.network.leaf, self.leaf[child]
        if not word or leaf == self.leaf[parent] or name != f"{word}{sample.cluster.leaf_number(*leaf)}":
            return self.sizes[self.of(parent)]
        return 1 if leaf in self.held else self.free[leaf[0], self._where(child)]

    def images(self) -> int:
        """Return the number of images."""
        root = self.sample.places[self.template.root]
        return self.sample.cluster.cells[root.cell].servers * self.template.shifts

    def check_roles(self) -> None:
        """Raise PlanError unless every server of a cell has each role in equally many images."""
        cells, places, template = self.sample.cluster.cells, self.sample.places, self.template
        if self.sample.cluster.network.kind == "dragonfly":
            self.check_turns(set())
            return
        home, middle = places[template.root], places[template.centre]
        own, class_of = cells[middle.cell], cells[home.cell].leaf_class
        even = True
        if own.leaf_class != class_of and own.pod_class == cells[home.cell].pod_class and own.pods > 1:
            raise PlanError(
                "the centre must be in a leaf of the root's class, or of another pod class, got one of another leaf "
                "class of the same pods"
            )
        if own.leaf_class != class_of:
            even = self.images() % own.servers == 0
        elif middle.cell != home.cell:
            even = self._images_beside(own) % own.count == 0
        for entry in template.entries:
            cell = cells[places[entry].cell]
            beside = own.leaf_class != class_of and own.pods > 1 and cell.pod_class == own.pod_class
            next_leaf = cell.leaf_class == class_of and self.pod[entry] == self.pod[template.root]
            if entry in template.pod_entries and not next_leaf:
                # Where the centre is says which servers are the entries of the other pods.
                even = even and self._images_beside(cell, pod=True) % cell.servers_in_pod == 0
                even = even and (not beside or own.servers_in_pod % cell.servers_in_pod == 0)
                continue
            even = even and self._images_beside(cell) % cell.count == 0
            if own.leaf_class != class_of and (beside or cell.leaf_class == own.leaf_class):
                # Where the centre is says which positions the entries of the other leaves have.
                even = even and own.count % cell.count == 0
            other = self.passing.get((cell.pod_class, self._pods(entry)))
            if other is not None and not self._held(entry) and self.leaf[other][0] == cell.leaf_class:
                # Where the entry of the pod is says the same, but for one in the leaf after the root's.
                passing = cells[places[other].cell]
                after = cell.leaf_class == class_of and self._pods(other) == f"pod {self.pod[template.root]}"
                even = even and (after or passing.count % gcd(passing.servers_in_pod, cell.count) == 0)
        self._check_even(even)

    def _images_beside(self, cell: Cell, *, pod: bool = False) -> int:
        """Return the images that have their root in one leaf, in one pod, or anywhere.

        It is the leaf, if a cell has leaves of the root's class, since entries there depend on the root's leaf. It is
        the pod, if the cell is in pods of the root's class, or the role is that of an entry of a ``pod``.
        """
        home = self.sample.cluster.cells[self.sample.places[self.template.root].cell]
        if cell.pod_class != home.pod_class:
            return self.images()
        leaves = home.leaves // home.pods if pod or cell.leaf_class != home.leaf_class else 1
        return home.count * leaves * self.template.shifts

    def check_turns(self, beyond: set[int]) -> None:
        """Raise PlanError unless the roles, and third groups of some classes, are even in a dragonfly.

        Every group has the centre equally often for each group of the root, and a third group equally often for each of
        both; every server of a cell has each role equally often.
        """
        cells, places, template = self.sample.cluster.cells, self.sample.places, self.template
        root, centre = self.leaf[template.root], self.leaf[template.centre]
        count_of = {cell.leaf_class: cell.leaves for cell in cells}
        choices = 1 if centre == root else count_of[centre[0]] - (centre[0] == root[0])
        rest, left = divmod(template.shifts, choices)
        even = not left and rest % prod(count_of[one] for one in beyond) == 0
        roles = [cells[places[one].cell] for one in (template.centre, *template.entries)]
        self._check_even(
            even and all(self._images_beside(cell) // choices % cell.count == 0 for cell in roles)
        )

    def _check_even(self, even: bool) -> None:
        if not even:
            raise PlanError(
                f"{self.template.shifts} shifts do not give every server of a cell each role equally often"
            )


def _check_stage(plan: PlanByKind, groups: _Groups, stage: Stage) -> dict[int, _Group]:
    """Return the group of every reached rank; PlanError unless the tree reaches every rank of every group once."""
    sample, template = plan.sample, groups.template
    home = sample.servers_of(plan.fabric.ranks)
    if home[stage.root] != template.root:
        raise PlanError(f"the root of the {stage.op} tree is not on the template's root server")
    stage.check_ranks(plan.fabric.size)
    depths = stage.depths()
    servers = sorted({home[rank] for rank in depths})
    ranks = Counter(home[rank] for rank in depths)
    seen: dict[_Group, int] = {}
    named = represented(sample, template)
    for server in servers:
        group = groups.of(server)
        if group in seen or group not in groups.sizes:
            fault = (
                "reaches two servers of one group" if group in seen else "reaches a server that no group has"
            )
            raise PlanError(f"the {stage.op} tree {fault}: s{sample.numbers[server]}")
        seen[group] = server
        if named.get(server) != groups.sizes[group]:
            raise PlanError(
                f"the {stage.op} tree reaches s{sample.numbers[server]} for {groups.sizes[group]} servers, but it "
                f"stands for {named.get(server, 0)}; name the first leaf and server of the sample in its place"
            )
        if ranks[server] != home.count(server):
            raise PlanError(
                f"the {stage.op} tree reaches {ranks[server]} of {home.count(server)} ranks of "
                f"s{sample.numbers[server]}"
            )
    missing = next((group for group in groups.sizes if group not in seen), None)
    if missing is not None:
        where = missing.where or "its place"
        raise PlanError(
            f"the {stage.op} tree reaches no server of cell {missing.cell} ({missing.role or 'remaining'}, {where})"
        )
    if len(named) > len(seen):
        number = min(sample.numbers[server] for server in named.keys() - seen.values())
        raise PlanError(f"the {stage.op} tree does not reach s{number}, which stands for others")
    beyond: dict[tuple[int, str], Leaf] = {}
    for group, server in seen.items():
        leaf = groups.leaf[server]
        if leaf not in groups.held and beyond.setdefault((leaf[0], group.where), leaf) != leaf:
            raise PlanError(f"the {stage.op} tree reaches two leaves of one group")
    for edge in stage.edges:
        above, below = home[edge.parent], home[edge.child]
        shared = above in (below, template.root, template.centre)
        shared |= above in template.entries and groups.leaf[above] == groups.leaf[below]
        if not shared and not (above in template.pod_entries and groups.pod[above] == groups.pod[below]):
            raise PlanError(
                f"s{sample.numbers[below]} has its data from s{sample.numbers[above]}, which is neither root, centre, "
                "nor the entry of its leaf or pod"
            )
    return {rank: groups.of(home[rank]) for rank in depths}

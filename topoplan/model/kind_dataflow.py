"""Build the dataflow of a plan of a cluster by kind from its templates, as fast for 100,000 GPUs as for some hundred.

A hop of a template stands for one hop to each server that its child represents: all of them begin and end at the same
time, and their links carry the same (`topoplan.plans.kind_templates`). So the hops are those of the sample, the loads
are those of the classes of links, and only the copies on a route are counted in the whole cluster:

- Inside a server every route of a pattern (GPUs, links) starts equally many: images x servers / servers of the cell.
- Between two servers it is the number of images in which they have the roles of the hop's ends. The images are counted
  for pairs of `SOURCES` servers of each cell. Routes of other pairs start as many on average, and differ by one copy of
  a hop where numbers of servers do not divide each other; of one cell they do not differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import PlanError, UsageError
from topoplan.machine.cluster_by_kind import Cell, ClusterSample, ServerPlace
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Link
from topoplan.model.closed_form import Pipeline, Timeline, check_late, pipeline, timeline
from topoplan.model.dataflow import Dataflow, Hop, Indices, Starters, dataflow, flow_of
from topoplan.model.torus_dataflow import torus_dataflow, torus_diameter
from topoplan.plans.kind_exchange import KindPath, placings
from topoplan.plans.kind_images import local_numbers
from topoplan.plans.kind_templates import (
    KindTemplate,
    beside_root,
    centre_of,
    centre_turns,
    entry_of,
    follows_root,
    group_turns,
    image_count,
    leaf_groups,
    represented,
    third_groups,
)
from topoplan.plans.plan_by_kind import MOST_LISTED_GPUS, AnyTemplate, PlanByKind
from topoplan.plans.shards import Shard, Stage
from topoplan.plans.torus_trees import TorusTree


@dataclass(frozen=True)
class KindClock:
    """The closed-form times of a plan by kind, equal to those of `PlanByKind.listed`.

    Links of a `Timeline` are those of the sample, one for all of their class; its chunks are those of every template.
    A torus with a root is listed, and its links are those of the list.
    ``late`` has the seconds by which ranks come after the others. All ranks of the same number on equivalent servers
    come as late: a chain of hops waits once for all of them.

    >>> import topoplan
    >>> many = topoplan.cluster_by_kind([topoplan.Server("dgx-h100", count=12_500)], nic_gbps=400)
    >>> clock = KindClock(topoplan.plan_by_kind(many, "all_gather"))
    >>> [round(clock.time(size).seconds * 1e3, 1) for size in (1_000, 10_000_000_000)], clock.nic_start_ups[0]
    ([6.1, 26.1], 12499)
    """

    plan: PlanByKind
    late: Mapping[int, float] | None = None

    @cached_property
    def schedule(self) -> Pipeline:
        """The dataflow as arrays; UsageError for a late rank that does not exist, or a torus too large to be listed.

        Servers of a torus with a root differ, so their trees are listed.
        """
        earliest = None
        if self.plan.rooted_in_torus:
            if self.plan.size > MOST_LISTED_GPUS:
                raise UsageError(
                    f"times of a {self.plan.collective} on a torus need the list of its GPUs, at most "
                    f"{MOST_LISTED_GPUS:,}, got {self.plan.size:,}; choose shorter sides"
                )
            return pipeline(dataflow(self.plan.listed()), late=self.late)
        if self.plan.cluster.network.kind == "torus":
            flow, starting, earliest = torus_dataflow(self.plan)
        else:
            flow, starting = kind_dataflow(self.plan)
        if not self.late:
            return pipeline(flow, starting, earliest=earliest)
        classes, _ = self.plan.sample.link_classes(flow.fabric.links)
        return pipeline(flow, starting, late=self.late_of_sample, link_classes=classes, earliest=earliest)

    @cached_property
    def late_of_sample(self) -> dict[int, float]:
        """The seconds by which ranks of the sample come late, each for those of all equivalent servers."""
        plan = self.plan
        check_late(self.late or {}, plan.size)
        home = plan.sample.servers_of(plan.fabric.ranks)
        alike: dict[tuple[int, int], float] = {}
        for rank, seconds in (self.late or {}).items():
            server, gpu = plan.cluster.server_of(rank)
            kind = (plan.cluster.place(server).cell, gpu)
            alike[kind] = max(alike.get(kind, 0.0), seconds)
        kinds = (
            (plan.sample.places[server].cell, gpu)
            for server, gpu in zip(home, local_numbers(home), strict=True)
        )
        return {rank: alike[kind] for rank, kind in enumerate(kinds) if kind in alike}

    def time(self, nbytes: int, chunk_bytes: int | None = None) -> Timeline:
        """Return the time for a buffer; parameters as `topoplan.model.closed_form.simulate`."""
        return timeline(self.schedule, self.plan.collective, self.plan.size, nbytes, chunk_bytes)

    @cached_property
    def start_ups(self) -> float:
        """Seconds at size zero, launch included: the start-ups of chains, and of the copies of the busiest route."""
        return self.time(0).seconds

    @cached_property
    def diameter(self) -> float | None:
        """Least seconds of start-ups to the farthest server of a torus; None elsewhere, as the sample has it."""
        return torus_diameter(self.plan) if self.plan.cluster.network.kind == "torus" else None

    @cached_property
    def nic_start_ups(self) -> tuple[int, float]:
        """Messages of the busiest link of a NIC, or cable of a server, in one call, and the seconds if they queue.

        The closed form queues the start-ups of one pair of GPUs; those of different pairs begin at once. Every tree is
        one chunk here; more chunks are more messages.
        """
        plan, flow = self.plan, self.schedule.flow
        if plan.rooted_in_torus:
            crossed = Counter(link for hop in flow.hops for link in hop.links)
            queued = max((many * flow.hops[0].alpha, many) for many in crossed.values())
            return queued[1], queued[0]
        home, links = plan.sample.servers_of(plan.fabric.ranks), plan.fabric.links
        classes, counts = plan.sample.link_classes(links)
        messages, seconds = [0] * len(counts), [0.0] * len(counts)
        stands = [_stands(plan, template) for template in plan.templates]
        # In a torus every hop is on one route, whose copies start on each server.
        on_each = self.schedule.starters.copies if plan.cluster.network.kind == "torus" else None
        for number, hop in enumerate(flow.hops):
            upwards = plan.templates[hop.shard].stages[hop.stage].op == "reduce"
            if on_each is None:
                times = flow.counts[hop.shard] * stands[hop.shard][home[hop.src if upwards else hop.dst]]
            else:
                times = int(on_each[number]) * plan.cluster.servers
            for link in hop.links:
                if links[link].channel == "network" and _leaves_server(links[link]):
                    messages[classes[link]] += times
                    seconds[classes[link]] += times * hop.alpha
        each = [(seconds[row] / count, messages[row] // count) for row, count in enumerate(counts)]
        slowest, number = max(each, default=(0.0, 0))
        return number, slowest


def _leaves_server(link: Link) -> bool:
    """Return whether a link joins a device of a server to a switch of the network, or to another server."""
    src, dst = (name.split(".")[0] for name in (link.src, link.dst))
    return ("." in link.src or "." in link.dst) and src != dst


SOURCES = 32
"""Servers of a cell, in at most four leaves, among which copies between two servers are counted."""

_LEAVES = 4

MOST_TREES = 10_000_000
"""Images of a template in which one server is the root, or the centre, up to which they are counted."""


def kind_dataflow(plan: PlanByKind) -> tuple[Dataflow, Starters]:
    """Return the hops of a plan by kind on its sample, and the copies that the routes of the whole cluster start.

    Those of a torus, whose servers forward one after another, are of `topoplan.model.torus_dataflow`.
    """
    sample, fabric = plan.sample, plan.fabric
    stands = [_stands(plan, template) for template in plan.templates]
    home = sample.servers_of(fabric.ranks)
    shards = []
    for template, counts in zip(plan.templates, stands, strict=True):
        stages = tuple(
            Stage(
                stage.op, stage.root, tuple(edge for edge in stage.edges if counts.get(home[edge.child], 0))
            )
            for stage in template.stages
        )
        images = plan.images(template)
        shards.append((Shard(images.share_each, stages), images.count))
    flow = flow_of(fabric, shards, plan.link_loads())
    return flow, _starters(plan, flow, stands, home)


def _stands(plan: PlanByKind, template: AnyTemplate) -> dict[int, int]:
    """Return how many servers each server of the sample stands for in one image: one each in a path."""
    if isinstance(template, KindPath):
        return dict.fromkeys(range(len(plan.sample.places)), 1)
    assert not isinstance(template, TorusTree), "a torus with a root is listed"
    return represented(plan.sample, template)


def _starters(
    plan: PlanByKind, flow: Dataflow, stands: Sequence[dict[int, int]], home: Sequence[int]
) -> Starters:
    sample, fabric = plan.sample, plan.fabric
    keys = sample.class_keys(fabric.links)
    turns = [group_turns(sample, template.stages) for template in plan.templates]
    alike: dict[tuple[object, ...], list[tuple[int, float]]] = {}
    between: dict[tuple[object, ...], list[tuple[int, tuple[Roles, bool]]]] = {}
    for number, hop in enumerate(flow.hops):
        template = plan.templates[hop.shard]
        upwards = template.stages[hop.stage].op == "reduce"
        child, parent = (home[end] for end in ((hop.src, hop.dst) if upwards else (hop.dst, hop.src)))
        source, target = sample.places[home[hop.src]].cell, sample.places[home[hop.dst]].cell
        ends = (source, target, *(fabric.ranks[end].split(".", 1)[1] for end in (hop.src, hop.dst)))
        # A route inside a server may pass the same classes as one to another server, by the NICs.
        pattern = (*ends, child == parent, tuple(keys[link] for link in hop.links))
        if child == parent or isinstance(template, KindPath):
            # Images of a path are an orbit: all routes of a pattern have equally many.
            copies = flow.counts[hop.shard] * stands[hop.shard][child]
            groups = [sample.groups[name] for name in third_groups(sample, _route(fabric, hop))]
            alike.setdefault(pattern, []).append((number, copies / placings(sample, (parent, child), groups)))
        else:
            assert isinstance(template, KindTemplate), "a torus has a dataflow of its own"
            marked = (template.root, template.centre, template.entries, template.shifts)
            passed = sorted(third_groups(sample, _route(fabric, hop)).values())
            thirds = tuple(turns[hop.shard][leaf_class] for leaf_class in passed)
            roles = Roles(*marked, parent, child, template.pod_entries, thirds)
            between.setdefault(pattern, []).append((number, (roles, upwards)))
    routes = list(alike.values())
    counted = _Pairs(sample)
    for hops in between.values():
        for row in counted.rows([roles for _, roles in hops]):
            routes.append([(number, float(n)) for (number, _), n in zip(hops, row, strict=True) if n])
    pairs = sorted((hop, at, copies) for at, each in enumerate(routes) for hop, copies in each)
    narrow = [min(fabric.links[link].count for link in flow.hops[each[0][0]].links) for each in routes]
    return Starters(
        tuple(hop for hop, _, _ in pairs),
        tuple(at for _, at, _ in pairs),
        tuple(narrow),
        tuple(copies for _, _, copies in pairs),
    )


def _route(fabric: Fabric, hop: Hop) -> list[str]:
    """Return the devices that a hop passes, from its source to its destination."""
    return [fabric.ranks[hop.src], *(fabric.links[link].dst for link in hop.links)]


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of the two servers of a hop: servers of the sample, in a template of such marked ones and shifts.

    ``thirds`` are divisors and moduli of the third groups of a dragonfly that the hop passes, as of `group_turns`.
    """

    root: int
    centre: int
    entries: tuple[int, ...]
    shifts: int
    parent: int
    child: int
    pod_entries: tuple[int, ...] = ()
    thirds: tuple[tuple[int, int], ...] = ()


class _Pairs:
    """Numbers of images in which two servers have two roles, for some servers of each cell."""

    def __init__(self, sample: ClusterSample) -> None:
        self.sample = sample
        self._known: dict[Roles, Indices] = {}

    def rows(self, hops: Sequence[tuple[Roles, bool]]) -> list[list[int]]:
        """Return the distinct numbers of copies of hops, by hop, on all routes of one pattern.

        hops: roles, and whether the data runs from child to parent.
        """
        different = {each: number for number, each in enumerate(dict.fromkeys(hops))}
        counts = [
            self._counts(roles).swapaxes(1, 2) if upwards else self._counts(roles)
            for roles, upwards in different
        ]
        rows = np.unique(np.stack([each.ravel() for each in counts]), axis=1).T
        return [[int(row[different[each]]) for each in hops] for row in rows if row.any()]

    def _counts(self, roles: Roles) -> Indices:
        """Return the images of every choice of third groups, parent and child as (choices, parents, children) int64."""
        if roles not in self._known:
            parents, children = (self.sample.places[each].cell for each in (roles.parent, roles.child))
            images = RoleImages(self.sample, roles)
            leaf, position = servers_of(self.sample, children)
            places = list(zip(*(each.tolist() for each in servers_of(self.sample, parents)), strict=True))
            self._known[roles] = np.array(
                [
                    [
                        images.with_child(ServerPlace(parents, *place), leaf, position, thirds)
                        for place in places
                    ]
                    for thirds in product(*(range(min(_LEAVES, modulus)) for _, modulus in roles.thirds))
                ]
            )
        return self._known[roles]


def servers_of(sample: ClusterSample, cell: int) -> tuple[Indices, Indices]:
    """Return leaf and position of the servers of a cell whose routes are counted: all, or `SOURCES`."""
    own = sample.cluster.cells[cell]
    every, (pods, leaves) = own.servers <= SOURCES, (own.pods, own.leaves_in_pod)
    # The last leaf, or pod, is next to the first one.
    few_pods, few = (
        np.unique([*range(size if every else min(size, _LEAVES) - 1), size - 1]) for size in (pods, leaves)
    )
    kept = (few_pods[:, None] * leaves + few).ravel()
    positions = own.count if every else min(own.count, max(1, SOURCES // len(kept)))
    return np.repeat(kept, positions), np.tile(np.arange(positions), len(kept))


class RoleImages:
    """The images of a template in which a server has the role of a hop's parent."""

    def __init__(self, sample: ClusterSample, roles: Roles) -> None:
        self.sample, self.roles = sample, roles
        marked = (roles.root, roles.centre, roles.entries, roles.shifts)
        self.template = KindTemplate(Fraction(0), *marked, (), roles.pod_entries)
        self.groups = leaf_groups(sample, self.template)
        places, cells = sample.places, sample.cluster.cells
        self.home, self.middle, self.own = (
            cells[places[one].cell] for one in (roles.root, roles.centre, roles.child)
        )
        self.turns = centre_turns(sample, roles.root, roles.centre)
        self.shifts = roles.shifts // self.turns
        self.block = self.home.count * self.shifts
        self.stands = represented(sample, self.template)
        beside = [one for one in roles.entries if beside_root(sample, self.template, one)]
        self.near = beside[0] if beside else None
        """The entry of the root's leaf."""
        self.far = [one for one in roles.entries if one not in beside]

    def numbers(self, parent: ServerPlace) -> Indices:
        """Return the numbers of the images in which a server is the root, or the centre if that is the parent."""
        roles, places = self.roles, self.sample.places
        here, there = places[roles.root], places[roles.centre]
        sending = self.sample.cluster.cells[places[roles.parent].cell]
        many = image_count(self.sample, self.template)
        passing = roles.parent in roles.pod_entries and roles.parent != self.near
        most = many // (sending.servers_in_pod if passing else sending.servers)
        if most > MOST_TREES:
            raise UsageError(
                f"a server must send in at most {MOST_TREES:,} trees to be timed, got {most:,}; plan fewer kinds of "
                "servers, or numbers of servers with common divisors"
            )
        if roles.parent == roles.root:
            first = (parent.leaf * self.block + parent.position * self.shifts) * self.turns
            return np.arange(first, first + roles.shifts)
        if roles.parent == self.near:
            entered = parent.leaf * self.block + self._offsets(parent, 1)
            return (entered[:, None] * self.turns + np.arange(self.turns)).ravel()
        if passing:
            return self._passing(parent, sending, many)
        if roles.parent != roles.centre:
            raise PlanError(
                f"s{self.sample.numbers[roles.parent]} sends to another server, and is neither root, centre, nor the "
                "entry of its leaf or pod"
            )
        same = self.sample.leaf_of(roles.centre) == self.sample.leaf_of(roles.root)
        beyond = self.middle.leaf_class != self.home.leaf_class
        if self.sample.groups and not same:
            # The centre is in the parent's group for one digit of each group of the root.
            if beyond:
                turns = np.arange(parent.position, self.home.leaves * self.block, self.middle.count)
                return turns * self.turns + parent.leaf
            digit = np.arange(self.turns)
            groups = (parent.leaf - 1 - digit) % self.home.leaves
            found: Indices = (groups[:, None] * self.block + self._offsets(parent, 0)) * self.turns
            return (found + digit[:, None]).ravel()
        if beyond:
            first = parent.leaf * self.middle.count + parent.position
            return np.arange(first, self.home.leaves * self.block, self.middle.servers)
        size = self.middle.leaves_in_pod
        leaf = parent.leaf
        if self.middle.pod(there.leaf) != self.middle.pod(here.leaf):
            leaf = (leaf - size) % self.middle.leaves
        elif not same:
            leaf = leaf - leaf % size + (leaf % size - 1) % size
        return leaf * self.block + self._offsets(parent, int(same))

    def _offsets(self, parent: ServerPlace, ahead: int) -> Indices:
        """Return the numbers in the block of one leaf in which a position follows that of the root, or is its turn.

        It is so many positions ahead of a root of its own cell.
        """
        count = self.sample.cluster.cells[parent.cell].count
        if parent.cell != self.sample.places[self.roles.root].cell:
            return np.arange(parent.position, self.block, count)
        start = (parent.position - ahead) % count * self.shifts
        return np.arange(start, start + self.shifts)

    def _passing(self, parent: ServerPlace, own: Cell, many: int) -> Indices:
        """Return the numbers of the ``many`` images in which a server of a cell is the entry of its pod."""
        roles, sample = self.roles, self.sample
        pod, size = own.pod(parent.leaf), own.leaves_in_pod
        if follows_root(sample, roles.root, roles.parent):
            start = (pod[1] * size + (parent.leaf - 1) % size) * self.block
            if parent.cell != sample.places[roles.root].cell:
                return np.arange(start + parent.position, start + self.block, own.count)
            start += parent.position * roles.shifts
            return np.arange(start, start + roles.shifts)
        number = np.arange(parent.leaf % size * own.count + parent.position, many, own.servers_in_pod)
        root = divmod(number // roles.shifts, self.home.count)
        centre = centre_of(sample, self.template, *root, number)
        kept = np.ones(len(number), dtype=np.bool_)
        for one, leaf in ((roles.root, root[0]), (roles.centre, centre[0])):
            cell = sample.cluster.cells[sample.places[one].cell]
            if cell.pod_class == pod[0]:
                there = leaf // cell.leaves_in_pod == pod[1]
                kept &= there if sample.pod_of(one) == sample.pod_of(roles.parent) else ~there
        return number[kept]

    def with_child(
        self, parent: ServerPlace, leaf: Indices, position: Indices, thirds: Sequence[int] = ()
    ) -> Indices:
        """Return in how many of them each of some servers is the child, (M,) int64.

        leaf, position: (M,) int64, places of the servers in the child's cell. thirds: the third groups of the hop.
        """
        roles, sample, own = self.roles, self.sample, self.own
        cell = sample.places[roles.child].cell
        if roles.parent in self.far and sample.leaf_of(roles.parent) == sample.leaf_of(roles.child):
            # The other servers of its leaf, in all images in which it is the entry.
            times = image_count(sample, self.template) * self.stands[roles.parent]
            others = (leaf == parent.leaf) & ((position != parent.position) | (cell != parent.cell))
            return np.where(others, times // sample.cluster.cells[parent.cell].servers, 0)
        number = self.numbers(parent)
        for (divisor, modulus), group in zip(roles.thirds, thirds, strict=True):
            number = number[number // self.turns // divisor % modulus == group]
        root = divmod(number // roles.shifts, self.home.count)
        centre = centre_of(sample, self.template, *root, number)
        near, far = (each.leaf_class == own.leaf_class for each in (self.home, self.middle))
        joined = (root[0] == centre[0]) & (self.home.leaf_class == self.middle.leaf_class)

        def images(at: Indices, of: Indices, size: int, kept: NDArray[np.bool_] | bool) -> Indices:
            """Return how many of the kept images have each of some numbers below ``size``."""
            found: Indices = np.bincount(at[np.broadcast_to(kept, at.shape)], minlength=size)[of]
            return found

        def at_place(at: tuple[Indices, Indices], kept: NDArray[np.bool_] | bool) -> Indices:
            place = leaf * own.count + position
            return images(at[0] * own.count + at[1], place, own.servers, kept)

        is_root = at_place(root, sample.places[roles.root].cell == cell)
        in_cell = sample.places[roles.centre].cell == cell
        if roles.child == roles.root:
            return is_root
        if roles.child == roles.centre:
            return at_place(centre, in_cell)
        passing: Indices | int = 0
        if self.near is not None and sample.places[self.near].cell == cell:
            follows = cell == sample.places[roles.root].cell
            turn = root[1] + 1 if follows else number // self.turns
            passing = at_place((root[0], turn % own.count), kept=True)
        if roles.child == self.near:
            return np.broadcast_to(passing, leaf.shape)
        slot = sample.leaf_of(roles.child)
        if slot == sample.leaf_of(roles.root):
            beside = at_place(centre, in_cell & joined) if roles.centre != roles.root else 0
            return images(root[0], leaf, own.leaves, near) - is_root - beside - passing
        if slot == sample.leaf_of(roles.centre):
            return images(centre[0], leaf, own.leaves, far) - at_place(centre, in_cell)
        pods, size = own.pods, own.leaves_in_pod
        root_pod, centre_pod, child_pod = (
            sample.pod_of(one) for one in (roles.root, roles.centre, roles.child)
        )

        def in_group(at: Indices, of: Indices, many: int) -> Indices:
            """Return how many images have each of some numbers, and the child's leaf in its group of leaves."""

            def in_pod(held: Indices, cell: Cell) -> Indices:
                pod = held // cell.leaves_in_pod * many + at
                return images(pod, leaf // size * many + of, pods * many, cell.pod_class == own.pod_class)

            def in_leaf(held: Indices, kept: NDArray[np.bool_] | bool) -> Indices:
                return images(held * many + at, leaf * many + of, own.leaves * many, kept)

            beside = in_leaf(centre[0], far & ~joined)
            if child_pod == root_pod:
                free = in_pod(root[0], self.home) - in_leaf(root[0], near)
                return free - beside if centre_pod == root_pod else free
            if child_pod == centre_pod:
                return in_pod(centre[0], self.middle) - beside
            free = images(at, of, many, kept=True) - in_pod(root[0], self.home)
            return free if centre_pod == root_pod else free - in_pod(centre[0], self.middle)

        found = self._in_group(number, root, leaf, position, in_group)
        if roles.parent in roles.pod_entries:
            # It sends to its own pod.
            sender = sample.cluster.cells[parent.cell]
            found = np.where(leaf // size == parent.leaf // sender.leaves_in_pod, found, 0)
        return found

    def _in_group(
        self,
        number: Indices,
        root: tuple[Indices, Indices],
        leaf: Indices,
        position: Indices,
        images: Callable[[Indices, Indices, int], Indices],
    ) -> Indices:
        """Return in how many of some images each of some servers is the child, if that is in no leaf of root or centre.

        ``images`` counts those with each of some numbers, and the child's leaf in its group of leaves.
        """
        roles, sample, own, none = self.roles, self.sample, self.own, np.zeros_like(number)
        cell, size, count = sample.places[roles.child].cell, own.leaves_in_pod, own.count
        entry = self.groups.entry_beside(own, sample.places[roles.child].leaf)
        beside, at = (none, none) if entry is None else entry_of(sample, self.template, entry, *root, number)
        within = leaf % size
        if self.groups.entered(roles.child) is not None:
            found: Indices = images(beside, within, size)
            same = entry is not None and sample.places[entry].cell == cell
            passing = images(beside * count + at, within * count + position, size * count) if same else 0
            return found - passing if roles.child != entry else found * 0 + passing
        entered: Indices = np.zeros_like(leaf)
        far = [
            one for one in self.far if one not in roles.pod_entries and self.groups.alike(one, roles.child)
        ]
        if any(sample.places[one].cell == cell for one in far):
            turn = number // self.turns % count
            entered = images(turn, position, count)
            if entry is not None:
                entered = entered - images(beside * count + turn, within * count + position, size * count)
        if roles.child in far:
            return entered
        found = images(none, np.zeros_like(leaf), 1) - entered
        return found if entry is None else found - images(beside, within, size)

"""Trees of a cluster by kind: templates on a sample of its servers, the rule of their images, and their loads.

A template is a tree (or a pair) over a `ClusterSample`. Three roles of servers are *marked*: the *root*, which has the
root rank; the *centre*, which sends to other servers (the root itself, or a server that has the data from the root);
and *entries*. An entry of a leaf passes the data on to the servers of its leaf: the root's, if the centre is in another
one, or all that have neither root nor centre. An entry of a pod is one of these that passes it on to the leaves of its
pod too: the root's, if the centre is in another one, or all that have neither root nor centre. Every other server of
the sample stands for all servers of its cell that are placed like it: in the root's leaf, in the centre's, in that of
the entry of the pod, or in any other leaf of a class, in the root's pod, in the centre's, or in any other pod of a
class.

The images of a template have numbers x = i S + s, where server i of the root's cell is the root (leaf by leaf), s is
from 0 to S - 1, and S are the template's *shifts*. With position p of the root, and c servers of its cell in a leaf:

- A centre in the root's cell and leaf follows the root: position p + 1 mod c. In another cell of the leaf it has
  position x mod its count. In another leaf of the class it is in the next leaf of the pod, or in the same leaf of the
  next pod, at the root's position if its cell is the root's and at x mod its count else. In another class it is server
  x mod the cell's servers; the two classes of leaves must then be of different classes of pods, or of one pod.
- An entry of a leaf has position x mod its count in every leaf that it stands for. One of the root's cell, in the
  root's leaf, follows the root: position p + 1 mod c.
- An entry of a pod in the root's leaf is placed as that of the leaf. In another leaf of the class, in the root's pod,
  it is in the next leaf, at the root's position if its cell is the root's and at x mod its count else. In every other
  pod, and leaf class, it is server x mod its cell's servers in a pod.

In a dragonfly, whose groups are leaves without pods, the links between two classes of groups must have both ends
equally often too. So a centre outside the root's group is in every other group equally often for each group of the
root: the lowest digit of x, of radix r (`centre_turns`), says in which, counting from the root's group on in the same
class and from 0 in another class. Then x div r and S / r take the places of x and S above, and a centre of another
class has position (x div r) mod its count. A route may pass third groups, one of a class, of other classes than its
ends have. They are the same in all routes of an image: the digits of x div r in the mixed radix of `group_turns`.

If the counts divide what they must (`needed_shifts`, `entry_allowed`), every server of a cell has each role in equally
many images, so all links of a class carry the same: the sum over the template's edges, each as often as its child
stands for servers, divided by the number of links of the class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm, prod
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import PlanError
from topoplan.machine.cluster_by_kind import Cell, ClusterByKind, ClusterSample
from topoplan.machine.fabric import Fabric
from topoplan.plans.loads import edge_links
from topoplan.plans.shards import Edge, Stage
from topoplan.plans.torus_templates import TorusPaths, TorusTemplate, blocks_on_edges, represented_in_torus

SAMPLE = 3
"""Leaves of a class, and servers of a cell in a leaf, in the sample: root, centre, and one that stands for others."""


def template_sample(cluster: ClusterByKind, *, rooted: bool) -> ClusterSample:
    """Return the servers on which templates stand.

    With a root, whose server is a cell of its own, no cell, leaf class or pod class has root, centre and others at
    once; in three levels, two of each are then enough.
    """
    return cluster.sample(SAMPLE - (rooted and cluster.network.pod_size is not None))


@dataclass(frozen=True, slots=True)
class KindTemplate:
    """Trees of one part of the buffer, and the roles of the servers of the sample.

    ``share`` is the part of all images together. ``root``, ``centre`` and ``entries`` are servers of the sample; the
    centre is the root if the data goes to other servers from there. ``stages`` are trees on the ranks of the sample.
    ``pod_entries`` are those of the entries that pass the data on to their pod.
    """

    share: Fraction
    root: int
    centre: int
    entries: tuple[int, ...]
    shifts: int
    stages: tuple[Stage, ...]
    pod_entries: tuple[int, ...] = ()

    @property
    def marked(self) -> tuple[int, ...]:
        """The servers with a role of their own: root, centre if it is another server, entries."""
        return tuple(dict.fromkeys((self.root, self.centre, *self.entries)))


@dataclass(frozen=True)
class LeafGroups:
    """Groups of leaves that are placed alike to the marked servers of a template, and the size of each."""

    sample: ClusterSample
    root: int
    centre: int
    pod_entries: tuple[int, ...] = ()

    @cached_property
    def held(self) -> set[tuple[int, int]]:
        """The leaves of root and centre."""
        return {self.sample.leaf_of(server) for server in (self.root, self.centre)}

    @cached_property
    def held_pods(self) -> set[tuple[int, int]]:
        """The pods of root and centre."""
        return {self.sample.pod_of(server) for server in (self.root, self.centre)}

    @cached_property
    def _entered(self) -> dict[tuple[int, tuple[int, int] | None], int]:
        """The entries of pods in leaves without root and centre, by the class of the leaf and the pod if held."""
        return {
            (self.sample.leaf_of(entry)[0], self._held_pod(self.sample.pod_of(entry))): entry
            for entry in self.pod_entries
            if self.sample.leaf_of(entry) not in self.held
        }

    def _held_pod(self, pod: tuple[int, int]) -> tuple[int, int] | None:
        return pod if pod in self.held_pods else None

    def alike(self, one: int, other: int) -> bool:
        """Return whether two servers, in no leaf of root or centre, are both in one held pod, or both in none."""
        first, second = (self._held_pod(self.sample.pod_of(server)) for server in (one, other))
        return first == second

    def entry_beside(self, cell: Cell, leaf: int) -> int | None:
        """Return the entry of the pod of a leaf of a cell's class, if its leaf is of that class and not held."""
        return self._entered.get((cell.leaf_class, self._held_pod(cell.pod(leaf))))

    def entered(self, server: int) -> int | None:
        """Return the entry of a pod in whose leaf a server of the sample is, if that leaf is not held."""
        place = self.sample.places[server]
        entry = self.entry_beside(self.sample.cluster.cells[place.cell], place.leaf)
        return entry if entry is not None and self.sample.places[entry].leaf == place.leaf else None

    def size(self, cell: Cell, leaf: int) -> int:
        """Return for how many leaves a leaf of the sample, of the class of a cell, stands."""
        if (cell.leaf_class, leaf) in self.held:
            return 1
        pod = cell.pod(leaf)
        held = sum(pod_class == cell.pod_class for pod_class, _ in self.held_pods)
        pods = cell.pods - held if self._held_pod(pod) is None else 1
        entry = self.entry_beside(cell, leaf)
        if entry is not None and self.sample.places[entry].leaf == leaf:
            return pods
        others = (one for leaf_class, one in self.held if leaf_class == cell.leaf_class)
        return pods * (cell.leaves_in_pod - sum(cell.pod(one) == pod for one in others) - (entry is not None))

    def slots(self, cell: Cell) -> list[int]:
        """Return the sampled leaves of a cell's class that stand for others: marked ones, one of each group."""
        found: dict[tuple[int, ...], int] = {}
        for leaf in self.sample.leaves_of[cell.leaf_class]:
            entry = self.entry_beside(cell, leaf)
            if (cell.leaf_class, leaf) in self.held:
                found[0, leaf] = leaf
            elif entry is not None and self.sample.places[entry].leaf == leaf:
                found[1, leaf] = leaf
            elif self.size(cell, leaf):
                found.setdefault((2, *(self._held_pod(cell.pod(leaf)) or ())), leaf)
        return [found[group] for group in sorted(found)]


def leaf_groups(sample: ClusterSample, template: KindTemplate) -> LeafGroups:
    """Return the groups of leaves of a template."""
    return LeafGroups(sample, template.root, template.centre, template.pod_entries)


def represented(sample: ClusterSample, template: KindTemplate | TorusTemplate) -> dict[int, int]:
    """Return how many servers each server of the sample stands for in the trees of a template.

    Servers of the sample that the trees need not reach are left out.
    """
    if isinstance(template, TorusTemplate):
        return represented_in_torus(sample, template.arms)
    cells, places = sample.cluster.cells, sample.places
    groups = leaf_groups(sample, template)
    found: dict[int, int] = {}
    for server in template.marked:
        found[server] = groups.size(cells[places[server].cell], places[server].leaf)
    for number, cell in enumerate(cells):
        for slot in groups.slots(cell):
            leaves = groups.size(cell, slot)
            within = [
                server for server, place in enumerate(places) if place.cell == number and place.leaf == slot
            ]
            marked = sum(server in template.marked for server in within)
            rest = [server for server in within if server not in template.marked]
            if rest and cell.count > marked:
                found[rest[0]] = leaves * (cell.count - marked)
    return found


def beside_root(sample: ClusterSample, template: KindTemplate, entry: int) -> bool:
    """Return whether an entry is that of the root's leaf."""
    return sample.leaf_of(entry) == sample.leaf_of(template.root)


def follows_root(sample: ClusterSample, root: int, entry: int) -> bool:
    """Return whether an entry of a pod is in the root's pod, in a leaf of the class of the root's."""
    same = sample.leaf_of(entry)[0] == sample.leaf_of(root)[0]
    return same and sample.pod_of(entry) == sample.pod_of(root)


def centre_turns(sample: ClusterSample, root: int, centre: int) -> int:
    """Return in how many groups of a dragonfly a centre outside the root's group may be; 1 for all else."""
    (home, leaf), (own, other) = sample.leaf_of(root), sample.leaf_of(centre)
    if not sample.groups or (home, leaf) == (own, other):
        return 1
    return sample.cluster.cells[sample.places[centre].cell].leaves - (own == home)


def third_groups(sample: ClusterSample, route: Sequence[str]) -> dict[str, int]:
    """Return the switches of the groups on a route in which neither end is, with their leaf classes."""
    if not sample.groups:
        return {}
    ends = {sample.leaf_of(sample.server_of(route[place])) for place in (0, -1)}
    passed = {device: sample.groups[device] for device in route if device in sample.groups}
    return {device: leaf[0] for device, leaf in passed.items() if leaf not in ends}


def group_turns(sample: ClusterSample, stages: Sequence[Stage]) -> dict[int, tuple[int, int]]:
    """Return for each class of third groups the divisor and modulus that give the group from x div r."""
    edges = (edge for stage in stages for edge in stage.edges) if sample.groups else ()
    found, divisor = {}, 1
    for leaf_class in sorted({one for edge in edges for one in third_groups(sample, edge.route).values()}):
        found[leaf_class] = divisor, group_count(sample, leaf_class)
        divisor *= group_count(sample, leaf_class)
    return found


def group_count(sample: ClusterSample, leaf_class: int) -> int:
    """Return the number of leaves of a class in the cluster."""
    return next(cell.leaves for cell in sample.cluster.cells if cell.leaf_class == leaf_class)


def needed_shifts(
    sample: ClusterSample, root: int, centre: int, entries: Sequence[int], pod_entries: Sequence[int] = ()
) -> int:
    """Return the fewest shifts with which all servers of a cell have the same roles equally often.

    Routes that pass no third group need no more.
    """
    cells, places = sample.cluster.cells, sample.places
    home, middle = cells[places[root].cell], cells[places[centre].cell]
    # Numbers of positions that the images of so many servers, as roots, must reach equally often.
    due: list[tuple[int, int]] = []
    for entry in entries:
        own = cells[places[entry].cell]
        if entry in pod_entries and not follows_root(sample, root, entry):
            due.append((own.servers_in_pod, _roots_beside(home, own, whole_pod=True)))
        else:
            due.append((own.count, _roots_beside(home, own)))
    if middle.leaf_class != home.leaf_class and not sample.groups:
        due.append((middle.servers, home.servers))
    elif places[centre].cell != places[root].cell:
        due.append((middle.count, _roots_beside(home, middle)))
    shifts = lcm(*(positions // gcd(positions, roots) for positions, roots in due))
    return shifts * centre_turns(sample, root, centre)


def _roots_beside(home: Cell, own: Cell, *, whole_pod: bool = False) -> int:
    """Return in the images of how many roots a server's role depends on its leaf, pod, or neither.

    Images in which a leaf or pod has the root, or the centre beside it, have other entries there.
    """
    if own.pod_class != home.pod_class:
        return home.servers
    return home.servers_in_pod if whole_pod or own.leaf_class != home.leaf_class else home.count


def shifts_with_groups(sample: ClusterSample, template: KindTemplate) -> int:
    """Return the fewest shifts with which third groups are passed equally often too, as a multiple of a template's."""
    turns = centre_turns(sample, template.root, template.centre)
    many = prod(modulus for _, modulus in group_turns(sample, template.stages).values())
    return turns * lcm(template.shifts // turns, many)


def entry_allowed(
    sample: ClusterSample, root: int, centre: int, entry: int, pod_entries: Sequence[int] = ()
) -> bool:
    """Return whether an entry is equally often at each of its positions.

    Entries of leaves are not if they are always beside a centre, or the entry of a pod, of their class. In a dragonfly
    they always are, since the position of a centre does not depend on its group.
    """
    if sample.groups:
        return True
    cells, places = sample.cluster.cells, sample.places
    home, middle, own = (cells[places[server].cell] for server in (root, centre, entry))
    # A centre that goes round the pods of a class says which of their leaves are beside it.
    turns = middle.leaf_class != home.leaf_class
    if entry in pod_entries:
        return (
            not (turns and own.pod_class == middle.pod_class)
            or middle.servers_in_pod % own.servers_in_pod == 0
        )
    beside = own.pod_class == middle.pod_class if middle.pods > 1 else own.leaf_class == middle.leaf_class
    if turns and beside and middle.count % own.count:
        return False
    groups = LeafGroups(sample, root, centre, tuple(pod_entries))
    other = groups.entry_beside(own, places[entry].leaf)
    if other is None or sample.leaf_of(entry) in groups.held or follows_root(sample, root, other):
        return True
    passing = cells[places[other].cell]
    return passing.count % gcd(passing.servers_in_pod, own.count) == 0


def centre_allowed(sample: ClusterSample, root: int, centre: int) -> bool:
    """Return whether a centre of another class is always in the root's pod, or never."""
    home, middle = (sample.cluster.cells[sample.places[server].cell] for server in (root, centre))
    same = middle.leaf_class == home.leaf_class or middle.pod_class != home.pod_class
    return same or middle.pods == 1


def image_count(sample: ClusterSample, template: KindTemplate) -> int:
    """Return the number of images of a template."""
    return sample.cluster.cells[sample.places[template.root].cell].servers * template.shifts


def switch_images(
    sample: ClusterSample,
    template: KindTemplate | TorusTemplate,
    stands: Mapping[int, int],
    home: Sequence[int],
    edge: Edge,
    switch: str,
) -> int:
    """Return how many switches one on a route stands for in an image, counted once for each sender.

    ``home`` is the server of each rank. A leaf that is not the sender's stands for as many as its group has.
    """
    parent, child = home[edge.parent], home[edge.child]
    if "." in switch:
        return stands[child if sample.server_of(switch) == child else parent]
    network = sample.cluster.network
    if isinstance(template, KindTemplate) and network.leaf and switch.startswith(network.leaf):
        leaf = sample.leaf_of(child)
        if leaf != sample.leaf_of(parent) and switch == sample.cluster.leaf_name(*leaf):
            return leaf_groups(sample, template).size(
                sample.cluster.cells[sample.places[child].cell], leaf[1]
            )
    return stands[parent]


@dataclass(frozen=True)
class ClassCrossings:
    """Counts how often trees cross the links of each class: ``classes`` are those of the fabric's links."""

    sample: ClusterSample
    fabric: Fabric
    classes: Sequence[int]
    _known: dict[tuple[str, Edge], tuple[int, ...]] = field(default_factory=dict, repr=False)

    @cached_property
    def _home(self) -> list[int]:
        return self.sample.servers_of(self.fabric.ranks)

    def of(self, template: KindTemplate | TorusTemplate) -> dict[int, int]:
        """Return how often one byte of a template crosses each class, all links of the class together.

        PlanError if the template reaches a server that stands for none.
        """
        crossings: dict[int, int] = {}
        if isinstance(template, TorusPaths):
            blocks = blocks_on_edges(self.sample, self._home, template)
            for edge, times in zip(template.stages[0].edges, blocks, strict=True):
                for row in self.rows("broadcast", edge):
                    crossings[row] = crossings.get(row, 0) + times
            return crossings
        stands = represented(self.sample, template)
        for stage in template.stages:
            merging = self.fabric.adding if stage.op == "reduce" else self.fabric.copying
            families: dict[int, list[Edge]] = {}
            for edge in stage.edges:
                server = self._home[edge.child]
                if server not in stands:
                    raise PlanError(
                        f"a template reaches s{self.sample.numbers[server]}, which stands for no server"
                    )
                if not merging.isdisjoint(edge.route):
                    families.setdefault(edge.parent, []).append(edge)
                    continue
                times = stands[server]
                for row in self.rows(stage.op, edge):
                    crossings[row] = crossings.get(row, 0) + times
            for edges in families.values():
                self._merged(template, stands, merging, stage.op, edges, 0, crossings)
        return crossings

    def _merged(
        self,
        template: KindTemplate | TorusTemplate,
        stands: Mapping[int, int],
        merging: frozenset[str],
        op: str,
        edges: Sequence[Edge],
        at: int,
        crossings: dict[int, int],
    ) -> int:
        """Count crossings from step ``at`` of edges with a common beginning; return the copies that start there.

        Steps lead from the parent to the children, and copies are those of all servers that the edges stand for.
        """
        following: dict[tuple[str, str], list[Edge]] = {}
        copies = 0
        for edge in edges:
            if at + 1 == len(edge.route):
                copies += stands[self._home[edge.child]]
            else:
                following.setdefault((edge.route[at + 1], edge.channel), []).append(edge)
        for (device, _), branch in following.items():
            first = branch[0]
            needed = self._merged(template, stands, merging, op, branch, at + 1, crossings)
            if device in merging:
                needed = switch_images(self.sample, template, stands, self._home, first, device)
            row = self.rows(op, first)[-at - 1 if op == "reduce" else at]
            crossings[row] = crossings.get(row, 0) + needed
            copies += needed
        return copies

    def rows(self, op: str, edge: Edge) -> tuple[int, ...]:
        """Return the classes of the links that data crosses on an edge; templates have most edges in common."""
        if (op, edge) not in self._known:
            self._known[op, edge] = tuple(self.classes[link] for link in edge_links(edge, op, self.fabric))
        return self._known[op, edge]


class HasShare(Protocol):
    """A template of any kind."""

    @property
    def share(self) -> Fraction: ...


def share_units(templates: Sequence[HasShare]) -> tuple[int, list[int]]:
    """Return a common denominator of the templates' shares, and their numerators over it."""
    unit = lcm(*(template.share.denominator for template in templates))
    return unit, [int(template.share * unit) for template in templates]


Number = TypeVar("Number", int, NDArray[np.int64])


def centre_of(
    sample: ClusterSample, template: KindTemplate, leaf: Number, position: Number, number: Number
) -> tuple[Number, Number]:
    """Return leaf and position of the centre of images, from those of the root and their numbers."""
    places, cells = sample.places, sample.cluster.cells
    here, there = places[template.root], places[template.centre]
    home, own = cells[here.cell], cells[there.cell]
    if template.centre == template.root:
        return leaf, position
    if own.leaf_class != home.leaf_class and not sample.groups:
        return number % own.servers // own.count, number % own.servers % own.count
    turns = centre_turns(sample, template.root, template.centre)
    turn = number // turns % own.count
    if sample.leaf_of(template.centre) == sample.leaf_of(template.root):
        return leaf, (position + 1) % own.count if there.cell == here.cell else turn
    if sample.groups:
        group = number % turns
        if own.leaf_class == home.leaf_class:
            group = (leaf + 1 + group) % own.leaves
        return group, position if there.cell == here.cell else turn
    size = own.leaves_in_pod
    if own.pod(there.leaf) == own.pod(here.leaf):
        leaf = leaf - leaf % size + (leaf % size + 1) % size
    else:
        leaf = (leaf + size) % own.leaves
    return leaf, position if there.cell == here.cell else turn


def entry_of(
    sample: ClusterSample, template: KindTemplate, entry: int, leaf: Number, position: Number, number: Number
) -> tuple[Number, Number]:
    """Return leaf and position of an entry of images, from those of the root and their numbers.

    The leaf is counted in its pod. An entry of a leaf has the position in every leaf that it stands for.
    """
    places, cells = sample.places, sample.cluster.cells
    here, there = places[template.root], places[entry]
    home, own = cells[here.cell], cells[there.cell]
    turns = centre_turns(sample, template.root, template.centre)
    turn = number // turns % own.count
    same = there.cell == here.cell
    if beside_root(sample, template, entry):
        return leaf % home.leaves_in_pod, (position + 1) % own.count if same else turn
    if entry not in template.pod_entries:
        return number * 0, turn
    if follows_root(sample, template.root, entry):
        return (leaf + 1) % own.leaves_in_pod, position if same else turn
    return number % own.servers_in_pod // own.count, number % own.count

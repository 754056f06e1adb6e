"""Trees of a cluster by kind: templates on a sample of its servers, the rule of their images, and their loads.

A template is a tree (or a pair) over a `ClusterSample`. Three roles of servers are *marked*: the *root*, which has the
root rank; the *centre*, which sends to other servers (the root itself, or a server that has the data from the root);
and *entries*, each of which passes the data on to the servers of its leaf: the root's, if the centre is in another one,
or all that have neither root nor centre. Every other server of the sample stands for all servers of its cell that are
placed like it: in the root's leaf, in the centre's, or in any other leaf of a class, in the root's pod, in the
centre's, or in any other pod of a class.

The images of a template have numbers x = i S + s, where server i of the root's cell is the root (leaf by leaf), s is
from 0 to S - 1, and S are the template's *shifts*. With q = x mod (c S), where c is the cell's servers in a leaf:

- A centre in the root's cell and leaf follows the root: position p + 1 mod c. In another cell of the leaf it has
  position q mod its count. In another leaf of the class it is in the next leaf of the pod, or in the same leaf of the
  next pod, at the root's position if its cell is the root's and at q mod its count else. In another class it is server
  x mod the cell's servers; the two classes of leaves must then be of different classes of pods, or of one pod.
- An entry has position q mod its count in every leaf that it stands for. One of the root's cell, in the root's leaf,
  follows the root: position p + 1 mod c.

If the counts divide what they must (`needed_shifts`, `entry_allowed`), every server of a cell has each role in equally
many images, so all links of a class carry the same: the sum over the template's edges, each as often as its child
stands for servers, divided by the number of links of the class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from topoplan.machine.cluster_by_kind import Cell, ClusterByKind, ClusterSample, ServerPlace
from topoplan.machine.fabric import Fabric
from topoplan.plans.loads import edge_links
from topoplan.plans.shards import Edge, Shard, Stage

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
    """

    share: Fraction
    root: int
    centre: int
    entries: tuple[int, ...]
    shifts: int
    stages: tuple[Stage, ...]

    @property
    def marked(self) -> tuple[int, ...]:
        """The servers with a role of their own: root, centre if it is another server, entries."""
        return tuple(dict.fromkeys((self.root, self.centre, *self.entries)))


@dataclass(frozen=True)
class LeafGroups:
    """Groups of leaves that are placed alike to the leaves of root and centre of a template, and the size of each."""

    sample: ClusterSample
    root: int
    centre: int

    @cached_property
    def held(self) -> set[tuple[int, int]]:
        """The leaves of root and centre."""
        return {self.sample.leaf_of(server) for server in (self.root, self.centre)}

    @cached_property
    def held_pods(self) -> set[tuple[int, int]]:
        """The pods of root and centre."""
        return {self.sample.pod_of(server) for server in (self.root, self.centre)}

    def size(self, cell: Cell, leaf: int) -> int:
        """Return for how many leaves a leaf of the sample, of the class of a cell, stands."""
        if (cell.leaf_class, leaf) in self.held:
            return 1
        if cell.pod(leaf) in self.held_pods:
            others = (one for leaf_class, one in self.held if leaf_class == cell.leaf_class)
            return cell.leaves_in_pod - sum(cell.pod(one) == cell.pod(leaf) for one in others)
        held = sum(pod_class == cell.pod_class for pod_class, _ in self.held_pods)
        return (cell.pods - held) * cell.leaves_in_pod

    def alike(self, one: int, other: int) -> bool:
        """Return whether two servers, in no leaf of root or centre, are both in one held pod, or both in none."""
        first, second = self.sample.pod_of(one), self.sample.pod_of(other)
        return first == second or not {first, second} & self.held_pods

    def slots(self, cell: Cell) -> list[int]:
        """Return the sampled leaves of a cell's class that stand for others: those held, one of each group."""
        found: dict[tuple[int, ...], int] = {}
        for leaf in self.sample.leaves_of[cell.leaf_class]:
            pod = cell.pod(leaf)
            if (cell.leaf_class, leaf) in self.held:
                found[0, leaf] = leaf
            else:
                found.setdefault((1, *(pod if pod in self.held_pods else ())), leaf)
        return [found[group] for group in sorted(found)]


def represented(sample: ClusterSample, template: KindTemplate) -> dict[int, int]:
    """Return how many servers each server of the sample stands for in the trees of a template.

    Servers of the sample that the trees need not reach are left out.
    """
    cells, places = sample.cluster.cells, sample.places
    groups = LeafGroups(sample, template.root, template.centre)
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


def needed_shifts(sample: ClusterSample, root: int, centre: int, entries: Sequence[int]) -> int:
    """Return the fewest shifts with which all servers of a cell have the same roles equally often."""
    cells, places = sample.cluster.cells, sample.places
    home, middle = cells[places[root].cell], cells[places[centre].cell]
    counts = [cells[places[entry].cell].count for entry in entries]
    shifts = 1
    if places[centre].cell != places[root].cell and middle.leaf_class == home.leaf_class:
        counts.append(middle.count)
    for count in counts:
        shifts = lcm(shifts, count // gcd(count, home.count))
    if middle.leaf_class != home.leaf_class:
        shifts = lcm(shifts, middle.servers // gcd(middle.servers, home.servers))
    return shifts


def entry_allowed(sample: ClusterSample, root: int, centre: int, entry: int) -> bool:
    """Return whether an entry is equally often at each of its positions: not always beside a centre of its class."""
    cells, places = sample.cluster.cells, sample.places
    home, middle, own = (cells[places[server].cell] for server in (root, centre, entry))
    # A centre that goes round the pods of a class says which of their leaves are beside it.
    follows = own.pod_class == middle.pod_class if middle.pods > 1 else own.leaf_class == middle.leaf_class
    return middle.leaf_class == home.leaf_class or not follows or middle.count % own.count == 0


def centre_allowed(sample: ClusterSample, root: int, centre: int) -> bool:
    """Return whether a centre of another class is always in the root's pod, or never."""
    home, middle = (sample.cluster.cells[sample.places[server].cell] for server in (root, centre))
    same = middle.leaf_class == home.leaf_class or middle.pod_class != home.pod_class
    return same or middle.pods == 1


def image_count(sample: ClusterSample, template: KindTemplate) -> int:
    """Return the number of images of a template."""
    return sample.cluster.cells[sample.places[template.root].cell].servers * template.shifts


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

    def of(self, template: KindTemplate) -> dict[int, int]:
        """Return how often one byte of a template crosses each class, all links of the class together."""
        stands = represented(self.sample, template)
        crossings: dict[int, int] = {}
        for stage in template.stages:
            for edge in stage.edges:
                times = stands.get(self._home[edge.child], 0)
                for row in self.rows(stage.op, edge):
                    crossings[row] = crossings.get(row, 0) + times
        return crossings

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
    if own.leaf_class != home.leaf_class:
        return number % own.servers // own.count, number % own.servers % own.count
    turn = number % (home.count * template.shifts) % own.count
    if there.leaf == here.leaf:
        return leaf, (position + 1) % own.count if there.cell == here.cell else turn
    size = own.leaves_in_pod
    if own.pod(there.leaf) == own.pod(here.leaf):
        leaf = leaf - leaf % size + (leaf % size + 1) % size
    else:
        leaf = (leaf + size) % own.leaves
    return leaf, position if there.cell == here.cell else turn


@dataclass(frozen=True)
class TemplateImages:
    """The images of one template as shards of the whole cluster, made on request."""

    sample: ClusterSample
    fabric: Fabric
    template: KindTemplate

    def servers(self, number: int) -> dict[int, list[tuple[int, int, int]]]:
        """Return for every server of the sample the servers of one image: (server, leaf class, leaf) each."""
        cluster, sample, template = self.sample.cluster, self.sample, self.template
        cells, places = cluster.cells, sample.places
        home = cells[places[template.root].cell]
        index, _ = divmod(number, template.shifts)
        leaf, position = divmod(index, home.count)
        turn = number % (home.count * template.shifts)
        root = ServerPlace(places[template.root].cell, leaf, position)
        centre = ServerPlace(
            places[template.centre].cell, *centre_of(sample, template, leaf, position, number)
        )
        role: dict[int, list[ServerPlace]] = {template.root: [root]}
        if template.centre != template.root:
            role[template.centre] = [centre]
        held = {(cells[place.cell].leaf_class, place.leaf) for place in (root, centre)}
        pods = {
            sample.pod_of(server): cells[place.cell].pod(place.leaf)
            for server, place in ((template.root, root), (template.centre, centre))
        }

        def alike(server: int) -> list[int]:
            """Return the leaves of images of a server of the sample that is in no leaf of root or centre."""
            own, pod = cells[places[server].cell], pods.get(sample.pod_of(server))
            return [
                at
                for at in range(own.leaves)
                if (own.leaf_class, at) not in held
                and (own.pod(at) not in pods.values() if pod is None else own.pod(at) == pod)
            ]

        for entry in template.entries:
            cell = places[entry].cell
            own = cells[cell]
            if beside_root(sample, template, entry):
                at_root = (position + 1) % own.count if cell == root.cell else turn % own.count
                role[entry] = [ServerPlace(cell, leaf, at_root)]
                continue
            role[entry] = [ServerPlace(cell, at, turn % own.count) for at in alike(entry)]
        taken = {place for marked in role.values() for place in marked}
        slots = {sample.leaf_of(template.root): (cells[root.cell].leaf_class, root.leaf)}
        slots[sample.leaf_of(template.centre)] = (cells[centre.cell].leaf_class, centre.leaf)
        for server, count in represented(sample, template).items():
            if server in role:
                continue
            cell = places[server].cell
            own = cells[cell]
            at_slot = slots.get(sample.leaf_of(server))
            leaves = alike(server) if at_slot is None else [at_slot[1]]
            found = (ServerPlace(cell, at, place) for at in leaves for place in range(own.count))
            role[server] = [place for place in found if place not in taken]
            assert len(role[server]) == count, "the rule covers every server once"
        return {
            server: [(cluster.server(place), cells[place.cell].leaf_class, place.leaf) for place in listed]
            for server, listed in role.items()
        }

    @property
    def count(self) -> int:
        """Number of images."""
        return image_count(self.sample, self.template)

    @property
    def edges(self) -> int:
        """Number of edges of one image."""
        return (self.sample.cluster.size - 1) * len(self.template.stages)

    @property
    def share_each(self) -> Fraction:
        """Fraction of the buffer that one image carries."""
        return self.template.share / self.count

    def load(self, edge: Edge) -> Fraction:
        """Return what the images of one edge carry together: bytes for each byte of the buffer."""
        return self.template.share * Fraction(self._stands[self._home[edge.child]])

    @cached_property
    def _stands(self) -> dict[int, int]:
        return represented(self.sample, self.template)

    @cached_property
    def _home(self) -> list[int]:
        return self.sample.servers_of(self.fabric.ranks)

    def shard(self, number: int) -> Shard:
        """Return one image as a shard of the whole cluster, with its part of the share."""
        members = self.servers(number)
        sample, cluster = self.sample, self.sample.cluster
        home = self._home
        local = local_numbers(home)
        leaves_at = {
            server: [(leaf_class, leaf) for _, leaf_class, leaf in listed]
            for server, listed in members.items()
        }
        stages = []
        for stage in self.template.stages:
            edges = []
            for edge in stage.edges:
                parent, child = home[edge.parent], home[edge.child]
                for place, (server, leaf_class, leaf) in enumerate(members[child]):
                    if parent == child:
                        above = members[parent][place]
                    elif len(members[parent]) == 1:
                        above = members[parent][0]
                    else:
                        above = members[parent][leaves_at[parent].index((leaf_class, leaf))]
                    names = {
                        f"s{sample.numbers[child]}": f"s{server}",
                        f"s{sample.numbers[parent]}": f"s{above[0]}",
                    }
                    leaves = sample.switch_names(parent, above[2]) | sample.switch_names(child, leaf)
                    edges.append(
                        Edge(
                            cluster.first_rank(above[0]) + local[edge.parent],
                            cluster.first_rank(server) + local[edge.child],
                            tuple(renamed(device, names, leaves) for device in edge.route),
                            edge.channel,
                        )
                    )
            root = members[home[stage.root]][0][0]
            made = Stage(stage.op, cluster.first_rank(root) + local[stage.root], tuple(edges))
            stages.append(Stage(made.op, made.root, made.top_down()))
        return Shard(self.share_each, tuple(stages))


def local_numbers(home: Sequence[int]) -> list[int]:
    """Return the number of every rank among those of its server, given the servers of the ranks."""
    seen: dict[int, int] = {}
    found = []
    for server in home:
        found.append(seen.get(server, 0))
        seen[server] = found[-1] + 1
    return found


def renamed(device: str, servers: Mapping[str, str], leaves: Mapping[str, str]) -> str:
    """Return a device's name in an image, given those of servers and leaves."""
    head, dot, tail = device.partition(".")
    return f"{servers[head]}.{tail}" if dot and head in servers else leaves.get(device, device)

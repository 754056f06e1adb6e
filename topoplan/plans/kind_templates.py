"""Trees of a cluster by kind: templates on a sample of its servers, the rule of their images, and their loads.

A template is a tree (or a pair) over a `ClusterSample`. Three roles of servers are *marked*: the *root*, which has the
root rank; the *centre*, which sends to other servers (the root itself, or a server that has the data from the root);
and *entries*, each of which passes the data on to the servers of its leaf. Every other server of the sample stands for
all servers of its cell that are placed like it: in the root's leaf, in the centre's, or in any other leaf of a class.

The images of a template have numbers x = i S + s, where server i of the root's cell is the root (leaf by leaf), s is
from 0 to S - 1, and S are the template's *shifts*. With q = x mod (c S), where c is the cell's servers in a leaf:

- A centre in the root's cell and leaf follows the root: position p + 1 mod c. In another cell of the leaf it has
  position q mod its count. In another leaf of the class it is in the next leaf, at the root's position if its cell is
  the root's and at q mod its count else. In another class it is server x mod the cell's servers.
- An entry has position q mod its count in every leaf that it stands for.

If the counts divide what they must (`needed_shifts`, `entry_allowed`), every server of a cell has each role in equally
many images, so all links of a class carry the same: the sum over the template's edges, each as often as its child
stands for servers, divided by the number of links of the class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from topoplan.machine.cluster_by_kind import ClusterSample, ServerPlace
from topoplan.machine.fabric import Fabric
from topoplan.plans.loads import stage_links
from topoplan.plans.shards import Edge, Shard, Stage

SAMPLE = 3
"""Leaves of a class, and servers of a cell in a leaf, in the sample: root, centre, and one that stands for others."""


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

    @property
    def depth(self) -> int:
        """Tree edges in sequence."""
        return sum(stage.height for stage in self.stages)


def represented(sample: ClusterSample, template: KindTemplate) -> dict[int, int]:
    """Return how many servers each server of the sample stands for in the trees of a template.

    Servers of the sample that the trees need not reach are left out.
    """
    cells, places = sample.cluster.cells, sample.places
    held = {sample_leaf(sample, server) for server in (template.root, template.centre)}
    found: dict[int, int] = {}
    for server in template.marked:
        leaf_class, _ = leaf = sample_leaf(sample, server)
        others = sum(one == leaf_class for one, _ in held)
        found[server] = 1 if leaf in held else cells[places[server].cell].leaves - others
    for number, cell in enumerate(cells):
        slots = [slot for one, slot in sorted(held) if one == cell.leaf_class]
        free = next((slot for slot in range(min(SAMPLE, cell.leaves)) if slot not in slots), None)
        for slot in [*slots, *([] if free is None else [free])]:
            leaves = 1 if slot in slots else cell.leaves - len(slots)
            within = [
                server for server, place in enumerate(places) if place.cell == number and place.leaf == slot
            ]
            marked = sum(server in template.marked for server in within)
            rest = [server for server in within if server not in template.marked]
            if rest and cell.count > marked:
                found[rest[0]] = leaves * (cell.count - marked)
    return found


def sample_leaf(sample: ClusterSample, server: int) -> tuple[int, int]:
    place = sample.places[server]
    return sample.cluster.cells[place.cell].leaf_class, place.leaf


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
    if middle.leaf_class in (home.leaf_class,) or own.leaf_class != middle.leaf_class:
        return True
    return middle.count % own.count == 0


def image_count(sample: ClusterSample, template: KindTemplate) -> int:
    """Return the number of images of a template."""
    return sample.cluster.cells[sample.places[template.root].cell].servers * template.shifts


def class_crossings(
    sample: ClusterSample, fabric: Fabric, classes: Sequence[int], rows: int, template: KindTemplate
) -> list[int]:
    """Return how often one byte of a template crosses the links of each class, all links of the class together."""
    stands = represented(sample, template)
    home = servers_of_ranks(sample, fabric.ranks)
    crossings = [0] * rows
    for stage in template.stages:
        for child_server, edges in _by_child(stage, home).items():
            times = stands.get(child_server, 0)
            for link in stage_links(Stage(stage.op, stage.root, edges), fabric):
                crossings[classes[link]] += times
    return crossings


def _by_child(stage: Stage, home: Sequence[int]) -> dict[int, tuple[Edge, ...]]:
    found: dict[int, list[Edge]] = {}
    for edge in stage.edges:
        found.setdefault(home[edge.child], []).append(edge)
    return {server: tuple(edges) for server, edges in found.items()}


def servers_of_ranks(sample: ClusterSample, ranks: Sequence[str]) -> list[int]:
    """Return the server of the sample of each of its ranks."""
    number = {f"s{server}": place for place, server in enumerate(sample.numbers)}
    return [number[name.split(".")[0]] for name in ranks]


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
    return (leaf + 1) % own.leaves, position if there.cell == here.cell else turn


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
        for entry in template.entries:
            cell = places[entry].cell
            own = cells[cell]
            role[entry] = [
                ServerPlace(cell, at, turn % own.count)
                for at in range(own.leaves)
                if (own.leaf_class, at) not in held
            ]
        taken = {place for marked in role.values() for place in marked}
        slots = {sample_leaf(sample, template.root): (cells[root.cell].leaf_class, root.leaf)}
        slots[sample_leaf(sample, template.centre)] = (cells[centre.cell].leaf_class, centre.leaf)
        for server, count in represented(sample, template).items():
            if server in role:
                continue
            cell = places[server].cell
            own = cells[cell]
            at_slot = slots.get(sample_leaf(sample, server))
            leaves = (
                [at for at in range(own.leaves) if (own.leaf_class, at) not in held]
                if at_slot is None
                else [at_slot[1]]
            )
            found = (ServerPlace(cell, at, place) for at in leaves for place in range(own.count))
            role[server] = [place for place in found if place not in taken]
            assert len(role[server]) == count, "the rule covers every server once"
        return {
            server: [(cluster.server(place), cells[place.cell].leaf_class, place.leaf) for place in listed]
            for server, listed in role.items()
        }

    def __len__(self) -> int:
        return image_count(self.sample, self.template)

    def shard(self, number: int) -> Shard:
        """Return one image as a shard of the whole cluster, with its part of the share."""
        members = self.servers(number)
        sample, cluster = self.sample, self.sample.cluster
        home = {f"s{one}": place for place, one in enumerate(sample.numbers)}
        at = [(home[name.split(".")[0]], name) for name in self.fabric.ranks]
        local = _local_numbers(at)
        leaf_of = {
            server: [(leaf_class, leaf) for _, leaf_class, leaf in listed]
            for server, listed in members.items()
        }
        stages = []
        for stage in self.template.stages:
            edges = []
            for edge in stage.edges:
                parent, child = at[edge.parent][0], at[edge.child][0]
                for place, (server, leaf_class, leaf) in enumerate(members[child]):
                    if parent == child:
                        above = members[parent][place]
                    elif len(members[parent]) == 1:
                        above = members[parent][0]
                    else:
                        above = members[parent][leaf_of[parent].index((leaf_class, leaf))]
                    names = {
                        f"s{sample.numbers[child]}": f"s{server}",
                        f"s{sample.numbers[parent]}": f"s{above[0]}",
                    }
                    leaves = self._leaf_names(edge, child, parent, (leaf_class, leaf), above[1:])
                    edges.append(
                        Edge(
                            cluster.first_rank(above[0]) + local[edge.parent],
                            cluster.first_rank(server) + local[edge.child],
                            tuple(_renamed(device, names, leaves) for device in edge.route),
                            edge.channel,
                        )
                    )
            root = members[at[stage.root][0]][0][0]
            made = Stage(stage.op, cluster.first_rank(root) + local[stage.root], tuple(edges))
            stages.append(Stage(made.op, made.root, made.top_down()))
        return Shard(self.template.share / len(self), tuple(stages))

    def _leaf_names(
        self, edge: Edge, child: int, parent: int, below: tuple[int, int], above: tuple[int, int]
    ) -> dict[str, str]:
        sample, cluster = self.sample, self.sample.cluster
        if cluster.network.kind != "fat-tree":
            return {}
        return {
            f"leaf{cluster.leaf_number(*sample_leaf(sample, server))}": f"leaf{cluster.leaf_number(*leaf)}"
            for server, leaf in ((parent, above), (child, below))
        }


def _local_numbers(at: Sequence[tuple[int, str]]) -> list[int]:
    """Return the number of every rank of the sample among those of its server."""
    seen: dict[int, int] = {}
    found = []
    for server, _ in at:
        found.append(seen.get(server, 0))
        seen[server] = found[-1] + 1
    return found


def _renamed(device: str, servers: Mapping[str, str], leaves: Mapping[str, str]) -> str:
    head, dot, tail = device.partition(".")
    return f"{servers[head]}.{tail}" if dot and head in servers else leaves.get(device, device)


def all_images(sample: ClusterSample, fabric: Fabric, templates: Sequence[KindTemplate]) -> Iterator[Shard]:
    """Yield the shards of the whole cluster, by template."""
    for template in templates:
        images = TemplateImages(sample, fabric, template)
        for number in range(len(images)):
            yield images.shard(number)

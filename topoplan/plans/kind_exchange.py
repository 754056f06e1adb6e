"""The even all-to-all of a cluster by kind: templates of paths on a sample of its servers, and the images of these.

Pairs of ranks with equal cells and GPU numbers are one *commodity* if both are on one server, or both on two servers of
one leaf, or both in two leaves of one pod, or both in two pods. A template is a path over a `ClusterSample`, for a part
of the block of every pair of one commodity. It may pass other ranks: of the source's server, of the destination's, or
of a third one.

The images of a template are its orbit under the permutations of the pods of every class, of the leaves of every class
in a pod, and of the servers of every cell in a leaf. So the source is each server of its cell, the destination each
server in the same relation to it, and each other server of the path every one that is placed like it: in the source's
leaf, the destination's, or another one of a class, in the source's pod, the destination's, or another one. Equal
servers stay equal, and different ones different. Every pair of a commodity has equally many images, with equal parts of
its block. The group maps each link of a class to every other, so all links of a class carry the same: the pairs, times
the links of the class on the path, divided by the number of links of the class.

Images are numbered in a mixed radix. Each server of the path has three digits, the source first and the destination
second, the most significant digit first: its pod among those of the class that no earlier server has, if its pod is
new, its leaf among those of the class in the pod that no earlier server has, if its leaf is new, and its position among
those of the cell in that leaf that no earlier server has. A group of a dragonfly that the path passes without a server
has a digit after all servers: its number among those of the class that the path has not passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import prod

from topoplan.machine.cluster_by_kind import ClusterSample, ServerPlace
from topoplan.machine.fabric import Fabric
from topoplan.plans.kind_images import local_numbers, renamed
from topoplan.plans.kind_templates import group_count
from topoplan.plans.loads import edge_links
from topoplan.plans.shards import Edge, Shard, Stage, path_ends


@dataclass(frozen=True, slots=True)
class KindPath:
    """A path of a part of the block of every pair of a commodity.

    ``share`` is that part, above 0 and at most 1. ``stages`` is one broadcast: a chain of edges on ranks of the sample.
    """

    share: Fraction
    stages: tuple[Stage, ...]

    @property
    def ends(self) -> tuple[int, int]:
        """Source and destination, as ranks of the sample; PlanError if the edges are not a path."""
        return path_ends(Shard(self.share, self.stages))


def radices(
    sample: ClusterSample, servers: Iterable[int], groups: Iterable[tuple[int, int]] = ()
) -> list[tuple[int, int, int]]:
    """Return how many pods, leaves there, and positions there each of some servers may take after those before.

    ``groups`` are those of a dragonfly that a path passes and that have none of the servers; they stand last.
    """
    cells, places = sample.cluster.cells, sample.places
    pods: dict[int, set[int]] = {}
    leaves: dict[tuple[int, int], set[int]] = {}
    taken: dict[tuple[int, int], int] = {}
    found = []
    for server in servers:
        place = places[server]
        cell = cells[place.cell]
        pod_class, pod = cell.pod(place.leaf)
        passed = pods.setdefault(pod_class, set())
        free_pods = 1 if pod in passed else cell.pods - len(passed)
        passed.add(pod)
        known = leaves.setdefault((cell.leaf_class, pod), set())
        free = 1 if place.leaf in known else cell.leaves_in_pod - len(known)
        known.add(place.leaf)
        before = taken.get(place[:2], 0)
        taken[place[:2]] = before + 1
        found.append((free_pods, free, cell.count - before))
    for leaf_class, leaf in groups:
        known = leaves.setdefault((leaf_class, 0), set())
        found.append((1, group_count(sample, leaf_class) - len(known), 1))
        known.add(leaf)
    return found


def placings(sample: ClusterSample, servers: Sequence[int], groups: Sequence[tuple[int, int]] = ()) -> int:
    """Return in how many ways servers, and third groups, are placed like some of the sample; each counts once."""
    return prod(prod(digits) for digits in radices(sample, dict.fromkeys(servers), groups))


@dataclass(frozen=True)
class PathImages:
    """The images of one path as shards of the whole cluster, made on request."""

    sample: ClusterSample
    fabric: Fabric
    template: KindPath

    @cached_property
    def _home(self) -> list[int]:
        return self.sample.servers_of(self.fabric.ranks)

    @cached_property
    def _local(self) -> list[int]:
        return local_numbers(self._home)

    @cached_property
    def _servers(self) -> list[int]:
        """The servers of the sample on the path, source and destination first."""
        (stage,) = self.template.stages
        passed = (device for edge in stage.edges for device in edge.route)
        inner = [self.sample.server_of(device) for device in passed if "." in device]
        return list(dict.fromkeys([*self._ends, *inner]))

    @cached_property
    def _ends(self) -> list[int]:
        """The servers of source and destination."""
        return [self.sample.server_of(self.fabric.ranks[rank]) for rank in self.template.ends]

    @cached_property
    def _groups(self) -> list[tuple[int, int]]:
        """The groups of a dragonfly on the path that have none of its servers."""
        (stage,) = self.template.stages
        own, groups = {self.sample.leaf_of(server) for server in self._servers}, self.sample.groups
        passed = (groups[device] for edge in stage.edges for device in edge.route if device in groups)
        return [leaf for leaf in dict.fromkeys(passed) if leaf not in own]

    @property
    def passed(self) -> tuple[list[int], list[tuple[int, int]]]:
        """The servers of the sample on the path, source and destination first, and the third groups of a dragonfly."""
        return self._servers, self._groups

    @cached_property
    def _digits(self) -> list[tuple[int, int, int]]:
        return radices(self.sample, self._servers, self._groups)

    @cached_property
    def count(self) -> int:
        """Number of images."""
        return placings(self.sample, self._servers, self._groups)

    @property
    def edges(self) -> int:
        """Number of edges of one image."""
        return len(self.template.stages[0].edges)

    @cached_property
    def pairs(self) -> int:
        """Number of pairs of ranks of the commodity."""
        return placings(self.sample, self._ends)

    @property
    def share_each(self) -> Fraction:
        """Fraction of a rank's buffer that one image carries."""
        return self.template.share * Fraction(self.pairs, self.count * self.sample.cluster.size)

    def load(self, edge: Edge) -> Fraction:
        """Return what the images of one edge carry together: bytes for each byte of the buffer."""
        return self.template.share * Fraction(self.pairs, self.sample.cluster.size)

    def loads(self, classes: Sequence[int]) -> dict[int, Fraction]:
        """Return the load of all links of each used class together: bytes for each byte of the buffer."""
        found: dict[int, Fraction] = {}
        for stage in self.template.stages:
            for edge in stage.edges:
                load = self.load(edge)
                for link in edge_links(edge, stage.op, self.fabric):
                    found[classes[link]] = found.get(classes[link], Fraction(0)) + load
        return found

    def places(self, number: int) -> tuple[dict[int, ServerPlace], dict[tuple[int, int], int]]:
        """Return the place of every server of the path in one image, and the leaf of each third group."""
        places, cells = self.sample.places, self.sample.cluster.cells
        digits = []
        for pods, leaves, positions in reversed(self._digits):
            number, position = divmod(number, positions)
            number, leaf = divmod(number, leaves)
            number, pod = divmod(number, pods)
            digits.append((pod, leaf, position))
        pod_at: dict[int, dict[int, int]] = {}
        leaf_at: dict[tuple[int, int], dict[int, int]] = {}
        found: dict[int, ServerPlace] = {}
        for server, (pod, leaf, position) in zip(
            self._servers, digits[len(self._groups) :][::-1], strict=True
        ):
            place = places[server]
            cell = cells[place.cell]
            pod_class, own = cell.pod(place.leaf)
            passed = pod_at.setdefault(pod_class, {})
            if own not in passed:
                passed[own] = _free(pod, passed.values())
            known = leaf_at.setdefault((cell.leaf_class, own), {})
            if place.leaf not in known:
                known[place.leaf] = _free(leaf, known.values())
            at = passed[own] * cell.leaves_in_pod + known[place.leaf]
            taken = [one.position for one in found.values() if one[:2] == (place.cell, at)]
            found[server] = ServerPlace(place.cell, at, _free(position, taken))
        groups: dict[tuple[int, int], int] = {}
        for (leaf_class, group), (_, leaf, _) in zip(
            self._groups, digits[: len(self._groups)][::-1], strict=True
        ):
            known = leaf_at.setdefault((leaf_class, 0), {})
            groups[leaf_class, group] = known[group] = _free(leaf, known.values())
        return found, groups

    def shard(self, number: int) -> Shard:
        """Return one image as a shard of the whole cluster, with its part of the share."""
        sample, cluster = self.sample, self.sample.cluster
        found, groups = self.places(number)
        server_at = {server: cluster.server(place) for server, place in found.items()}
        names = {f"s{sample.numbers[server]}": f"s{image}" for server, image in server_at.items()}
        leaves = {cluster.leaf_name(*one): cluster.leaf_name(one[0], leaf) for one, leaf in groups.items()}
        for server, place in found.items():
            leaves |= sample.switch_names(server, place.leaf)

        def rank(of: int) -> int:
            return cluster.first_rank(server_at[self._home[of]]) + self._local[of]

        (stage,) = self.template.stages
        edges = tuple(
            Edge(
                rank(edge.parent),
                rank(edge.child),
                tuple(renamed(device, names, leaves) for device in edge.route),
                edge.channel,
            )
            for edge in stage.edges
        )
        return Shard(self.share_each, (Stage(stage.op, rank(stage.root), edges),))


def _free(number: int, taken: Iterable[int]) -> int:
    """Return the place with this number, from 0, among the free ones."""
    for one in sorted(taken):
        number += one <= number
    return number

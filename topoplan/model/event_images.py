"""Place the images of templates whose root is in the first unit of a cluster, as arrays of servers.

Units are equal parts of a cluster that change places: servers on one switch or on rails, leaves, groups and pods
rotate; servers of a torus translate. Every image is that of a root in the first unit after such a motion, and so is
every link: its orbit is where it begins and ends in a unit, and how many units ahead it ends.

`GpuPhases` is the rotation that takes GPU i of every server to GPU i + 1, and trees or paths of one root to those of
the next. A DGX with a NIC for each GPU has it: the trees of its 8 GPUs are 8 phases of one. Then the trees of GPU 0
alone are built. It is read off the hops: those of two templates are compared link by link, and so the devices that they
pass. It must move every link that is passed, for images that share a link are served one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

import numpy as np

from topoplan.errors import UsageError
from topoplan.machine.cluster_by_kind import ClusterByKind
from topoplan.machine.torus import ahead
from topoplan.model.dataflow import Dataflow, Hop, Indices
from topoplan.plans.kind_exchange import KindPath, PathImages
from topoplan.plans.kind_images import TemplateImages, local_numbers
from topoplan.plans.kind_templates import KindTemplate, centre_turns, group_turns
from topoplan.plans.plan import ALL_TO_ALL
from topoplan.plans.plan_by_kind import AnyTemplate, PlanByKind
from topoplan.plans.torus_templates import TorusImages, TorusPathImages


@dataclass(frozen=True, slots=True)
class Units:
    """Equal parts of a cluster: how many in each dimension, and servers, leaves and pods of each; 0 if these stay."""

    sides: tuple[int, ...]
    servers: int
    leaves: int
    pods: int

    @classmethod
    def of(cls, plan: PlanByKind) -> Units:
        """Return the smallest units: servers on one switch or in a torus, leaves, or pods, or several of these.

        Servers of several kinds have units if their kinds repeat, and every tree is that of its root alone.
        """
        cluster, every = plan.cluster, plan.cluster.servers
        if cluster.network.kind == "torus":
            return cls(cluster.network.torus.sides, 1, 0, 0)
        leaf, leaves = cluster.leaf_size, len(cluster.leaves)
        step = 1 if leaves == 1 else leaf * cluster.pod_size if leaves > cluster.pod_size else leaf
        repeated = every
        if cluster.cells[0].servers == every or all(
            _of_root_alone(plan, template) for template in plan.templates
        ):
            repeated = _period(cluster, step)
        if leaves == 1:
            return cls((every // repeated,), repeated, 0, 0)
        pods = 0 if repeated % (leaf * cluster.pod_size) else repeated // (leaf * cluster.pod_size)
        whole = repeated == every
        return cls(
            (every // repeated,),
            repeated,
            leaves if whole else repeated // leaf,
            leaves if whole else pods,
        )

    @property
    def count(self) -> int:
        """Number of units."""
        return prod(self.sides)


def _of_root_alone(plan: PlanByKind, template: AnyTemplate) -> bool:
    """Return whether the images of a template follow from their roots, or are all of a kind, as paths are."""
    if not isinstance(template, KindTemplate):
        return True
    marked = (
        template.centre != template.root or template.shifts > 1 or template.entries or template.pod_entries
    )
    return not marked and not group_turns(plan.sample, template.stages)


def _period(cluster: ClusterByKind, step: int) -> int:
    """Return the fewest servers, a multiple of ``step``, after which kinds and changed uplinks repeat; all if none."""
    every, leaf = cluster.servers, cluster.leaf_size
    if every % step or cluster.global_links:
        return every
    kinds = np.repeat(*np.array(cluster.runs).T)
    rates = {switch: rate for switch, *rate in cluster.uplinks}
    alike: dict[tuple[object, ...], int] = {}
    above = [
        alike.setdefault(
            (str(rates.get(f"leaf{one}")), str(rates.get(f"pod{one // cluster.pod_size}"))), len(alike)
        )
        for one in range(len(cluster.leaves))
    ]
    marks = kinds * len(alike) + np.repeat(above, leaf)[:every]
    return next(
        one
        for one in range(step, every + 1, step)
        if every % one == 0 and (marks == np.roll(marks, one)).all()
    )


Ends = tuple[tuple[int, Indices], tuple[int, Indices]]
"""Source and destination of the images of a hop: the server of the sample, and its images."""

Thirds = Mapping[int, Indices]
"""The number of the third group of each class that images pass in a dragonfly: one, or one for each image."""


class _Spot(NamedTuple):
    """The place of the images of a device: code, position in the unit, unit (None if it stays), end, third group.

    It is that of the server or leaf of end ``of`` of the hop, or of a third group, numbered from 1 in ``third``.
    """

    code: int
    position: Indices | int
    unit: Indices | None
    of: int = 0
    third: Indices | int = 0
    phase: int | None = None


class LinkImages(NamedTuple):
    """Images of a link: orbits, units, phase, and what tells routes apart: ends and third groups entered, from 1."""

    key: Indices
    unit: Indices
    phase: int
    pattern: tuple[tuple[int, int, int | None], ...]
    third: Indices | int

    def turned(self, phase: int, phases: int) -> tuple[tuple[int, int, int], ...]:
        """Return what tells routes apart if one from a GPU of this phase is turned to phase 0."""
        return tuple(
            (code, of, -1 if own is None else (own - phase) % phases) for code, of, own in self.pattern
        )


_CODES = 4096
"""Most names of devices of the sample, those of equal devices of all servers as one."""


class FirstUnit:
    """The images of a plan whose root is in the first unit, and the orbits of their links."""

    def __init__(self, plan: PlanByKind, phases: GpuPhases) -> None:
        self.plan, self.sample, self.cluster, self.phases = plan, plan.sample, plan.cluster, phases
        self.units = Units.of(plan)
        self.home = self.sample.servers_of(plan.fabric.ranks)
        self.local = local_numbers(self.home)
        self._codes: dict[str, int] = {}
        self._listed: dict[tuple[object, ...], dict[int, Indices]] = {}

    def numbers(self, template: AnyTemplate) -> range:
        """Return the numbers of the images of a template that are placed one by one; one for all paths."""
        images = self.plan.images(template)
        paths = isinstance(images, PathImages | TorusImages)
        return range(1 if paths else images.count // self.units.count)

    def hops_of(self, template: AnyTemplate) -> int:
        """Return the number of hops of these images, or slightly more."""
        images = self.plan.images(template)
        many = 1 if isinstance(images, TorusImages) else images.count // self.units.count
        if isinstance(images, TorusPathImages):
            many = self.cluster.size - 1
        return many * images.edges

    def members(self, template: AnyTemplate, number: int) -> Members:
        """Return the servers of an image, or of all paths of a template."""
        images = self.plan.images(template)
        if isinstance(images, TorusImages):
            return TorusMembers(images)
        if isinstance(images, TemplateImages):
            return TreeMembers(self, images, number)
        assert isinstance(images, PathImages), "no other images exist"
        return PathMembers(self, images)

    def listed(
        self, marks: tuple[object, ...], servers: Callable[[], dict[int, Indices]]
    ) -> dict[int, Indices]:
        """Return the servers of images with these marks, listed once."""
        if marks not in self._listed:
            self._listed[marks] = servers()
        return self._listed[marks]

    def link(self, link: int, ends: Ends, thirds: Thirds) -> LinkImages:
        """Return the images of a link of the sample; UsageError if no motion of the units moves it."""
        units = self.units
        own = self.plan.fabric.links[link]
        spots = [self._spot(name, ends, thirds) for name in (own.src, own.dst)]
        moved = [spot.unit for spot in spots if spot.unit is not None]
        if not moved:
            if units.count > 1:
                raise UsageError(
                    f"trees of all servers share the link {own.src}->{own.dst}, whose events need the list of GPUs; "
                    "leave --events out"
                )
            moved = [ends[0][1] * 0]
        width = max(units.servers, units.leaves, units.pods)
        key = ends[0][1] * 0
        for spot in spots:
            key = (key * _CODES + spot.code) * width + spot.position
        between = ahead(units.sides, moved[0], moved[-1]) if len(moved) > 1 else units.count
        key = key * (units.count + 1) + between
        phases = [spot.phase for spot in spots if spot.phase is not None]
        turned = (phases[-1] - phases[0]) % self.phases.count if len(phases) > 1 else self.phases.count
        pattern = tuple((spot.code, spot.of, spot.phase) for spot in spots)
        return LinkImages(
            key * (self.phases.count + 1) + turned,
            moved[0],
            phases[0] if phases else 0,
            pattern,
            spots[1].third,
        )

    def _code(self, word: str) -> int:
        """Return the number of a device's name without its server."""
        found = self._codes.setdefault(word, len(self._codes))
        assert found < _CODES, "a sample has few servers"
        return found

    def _spot(self, name: str, ends: Ends, thirds: Thirds) -> _Spot:
        sample, cluster, units = self.sample, self.cluster, self.units
        head, dot, tail = name.partition(".")

        def spot(word: str, number: Indices, each: int, of: int, third: Indices | int = 0) -> _Spot:
            if not each:
                return _Spot(self._code(name), 0, None)
            word, phase = self.phases.place(word)
            return _Spot(self._code(word), number % each, number // each, of, third, phase)

        for of, (server, images) in enumerate(ends):
            if dot and head == f"s{sample.numbers[server]}":
                return spot(f".{tail}", images, units.servers, of)
        for of, (server, images) in enumerate(ends):
            names = [*sample.switch_names(server, sample.places[server].leaf)]
            leaf = images // cluster.leaf_size
            if name in names[:1]:
                return spot(" leaf", leaf, units.leaves, of)
            if name in names[1:]:
                return spot(" pod", leaf // cluster.pod_size, units.pods, of)
        if name in sample.groups and sample.groups[name][0] in thirds:
            third = ends[0][1] * 0 + thirds[sample.groups[name][0]]
            return spot(" leaf", third, units.leaves, -1, third + 1)
        name, phase = self.phases.place(name)
        return _Spot(self._code(name), 0, None, phase=phase)


class Members:
    """The servers of images, by server of the sample: of one tree, or one of each path."""

    def __init__(self, servers: dict[int, Indices], thirds: Thirds) -> None:
        self._servers, self.thirds = servers, thirds

    def of(self, server: int) -> Indices:
        """Return the servers for which one of the sample stands."""
        return self._servers[server]

    def root(self, server: int) -> Indices:
        """Return the server of the root, which is one of the sample: one, or one for each path."""
        return self.of(server)

    def pairs(self, child: int, parent: int) -> tuple[Indices, Indices]:
        """Return the servers below and above of all images of an edge, as the shards of the images join them."""
        return self.of(child), self.of(parent)


class TreeMembers(Members):
    """The servers of one image of a tree, as `TemplateImages.servers` lists them."""

    def __init__(self, unit: FirstUnit, images: TemplateImages, number: int) -> None:
        sample, cluster, template = unit.sample, unit.cluster, images.template
        marks = (template.root, template.centre, template.entries, template.pod_entries, template.shifts)

        def servers() -> dict[int, Indices]:
            return {
                server: np.array([one for one, _, _ in found], dtype=np.int64)
                for server, found in images.servers(number).items()
            }

        turned = number // centre_turns(sample, template.root, template.centre)
        thirds = {
            leaf_class: np.array([cluster.leaf_number(leaf_class, turned // divisor % modulus)])
            for leaf_class, (divisor, modulus) in group_turns(sample, template.stages).items()
        }
        super().__init__(unit.listed((*marks, number), servers), thirds)
        self._sample, self._cluster = sample, cluster

    def root(self, server: int) -> Indices:
        return self.of(server)[:1]

    def pairs(self, child: int, parent: int) -> tuple[Indices, Indices]:
        below, above = super().pairs(child, parent)
        if parent == child:
            return below, above
        if len(above) == 1:
            return below, np.repeat(above, len(below))
        each = self._cluster.leaf_size
        if self._sample.leaf_of(parent) != self._sample.leaf_of(child):
            each *= self._cluster.pod_size
        numbers, at = np.unique(above // each, return_index=True)
        return below, above[at[np.searchsorted(numbers, below // each)]]


class TorusMembers(Members):
    """The servers of the image of a tree with its root on server 0 of a torus, each by how it is entered."""

    def __init__(self, images: TorusImages) -> None:
        steps = np.array(list(images.steps(0)), dtype=np.int64)
        self._before = {one: steps[steps[:, 0] == one, 2] for one in np.unique(steps[:, 0]).tolist()}
        super().__init__({one: steps[steps[:, 0] == one, 1] for one in self._before}, {})

    def pairs(self, child: int, parent: int) -> tuple[Indices, Indices]:
        below = self.of(child)
        return below, below if parent == child else self._before[child]


class PathMembers(Members):
    """The servers of all images of a path with their source in the first unit: one of each, in the order of images."""

    def __init__(self, unit: FirstUnit, images: PathImages) -> None:
        cluster = unit.cluster
        chosen, groups = images.passed
        many = images.count // unit.units.count

        def listed() -> dict[int, Indices]:
            servers: dict[int, list[int]] = {one: [] for one in chosen}
            thirds: dict[int, list[int]] = {one: [] for one, _ in groups}
            for number in range(many):
                found, leaves = images.places(number)
                for server, place in found.items():
                    servers[server].append(cluster.server(place))
                for (leaf_class, _), leaf in leaves.items():
                    thirds[leaf_class].append(cluster.leaf_number(leaf_class, leaf))
            # Third groups by negative numbers.
            every = servers | {-1 - one: each for one, each in thirds.items()}
            return {one: np.array(each, dtype=np.int64) for one, each in every.items()}

        servers = unit.listed((*chosen, *groups), listed)
        super().__init__(servers, {one: servers[-1 - one] for one, _ in groups})


class PathRows(NamedTuple):
    """The hops of paths: the row of each among given ones, the rank at its path's end, the path's length, and the hop
    before it, or -1."""

    row: Indices
    end: Indices
    length: Indices
    before: Indices


def path_rows(template: AnyTemplate, src: Indices, dst: Indices) -> PathRows:
    """Return the hops of paths, given those of the hops of a template, in the order of their data.

    src, dst: ranks. Paths of a torus lead from the root of one tree to each of its ranks.
    """
    if isinstance(template, KindPath):
        length = len(template.stages[0].edges)
        many = len(src) // length
        row = np.arange(len(src))
        before = np.where(row < many, -1, row - many)
        return PathRows(row, np.tile(dst[len(dst) - many :], length), np.full_like(row, length), before)
    order = np.argsort(dst)
    found = np.minimum(np.searchsorted(dst[order], src), len(dst) - 1)
    above = np.where(dst[order[found]] == src, order[found], -1)
    path = at = np.arange(len(dst))
    rows: list[Indices] = []
    paths: list[Indices] = []
    while len(at):
        rows.append(at)
        paths.append(path)
        kept = above[at] >= 0
        path, at = path[kept], above[at[kept]]
    row, path = np.concatenate(rows), np.concatenate(paths)
    # The hop before one is in the next step of the way back, at the same place among the remaining paths.
    before = np.full_like(row, -1)
    starts = np.cumsum([0, *map(len, rows)])
    for step, one in enumerate(rows[:-1]):
        going = np.flatnonzero(above[one] >= 0)
        before[starts[step] + going] = starts[step + 1] + np.arange(len(going))
    return PathRows(row, dst[path], np.bincount(path, minlength=len(dst))[path], before)


Marks = tuple[tuple[int, int, int], ...]
"""Stage, source and destination of every hop of a template, ascending."""


@dataclass(frozen=True, slots=True)
class GpuPhases:
    """The phases of a rotation of GPUs: 1 without one.

    kept: the templates with a root of phase 0. moved: the device of phase 0 and the phase of each device that moves;
    those of servers have a dot before their names.
    """

    count: int
    kept: tuple[int, ...]
    moved: dict[str, tuple[str, int]] = field(default_factory=dict)

    @classmethod
    def none(cls, plan: PlanByKind) -> GpuPhases:
        """Return a single phase."""
        return cls(1, tuple(range(len(plan.templates))))

    @classmethod
    def of(cls, plan: PlanByKind, flow: Dataflow, late: Mapping[int, float]) -> GpuPhases:
        """Return the phases of a plan, whose templates have these hops; one if ranks of the sample come late."""
        home = plan.sample.servers_of(plan.fabric.ranks)
        local = local_numbers(home)
        gpus = max(local) + 1
        if late or gpus == 1 or any(home.count(one) != gpus for one in set(home)):
            return cls.none(plan)
        rank = {ends: number for number, ends in enumerate(zip(home, local, strict=True))}
        following = [rank[server, (gpu + 1) % gpus] for server, gpu in rank]
        pairs = _paired_hops(plan, flow, following)
        names = None if pairs is None else _next_names(plan, flow, pairs)
        moved = None if names is None else _phases(names, gpus)
        if moved is None or not all(
            _word(link.src) in moved or _word(link.dst) in moved
            for hop in flow.hops
            for link in (flow.fabric.links[number] for number in hop.links)
        ):
            return cls.none(plan)
        kept = (place for place, one in enumerate(plan.templates) if not local[one.stages[0].root])
        return cls(gpus, tuple(kept), moved)

    def place(self, word: str) -> tuple[str, int | None]:
        """Return the device of phase 0, and the phase of a device; None if it stays."""
        return self.moved.get(word, (word, None))


def _word(name: str) -> str:
    """Return the name of a device without its server, but with the dot."""
    _, dot, tail = name.rpartition(".")
    return dot + tail


def _paired_hops(plan: PlanByKind, flow: Dataflow, following: Sequence[int]) -> list[tuple[Hop, Hop]] | None:
    """Return each hop of each template with that of the next one; None if there is none, or their orders differ."""
    hops: list[dict[tuple[int, int, int], Hop]] = [{} for _ in plan.templates]
    for hop in flow.hops:
        hops[hop.shard][hop.stage, hop.src, hop.dst] = hop
    alike: dict[tuple[object, ...], list[int]] = {}
    keys: list[tuple[object, Marks]] = []
    for place, template in enumerate(plan.templates):
        operations = tuple(stage.op for stage in template.stages)
        keys.append(((replace(template, stages=()), operations), tuple(sorted(hops[place]))))
        alike.setdefault(keys[-1], []).append(place)
    after: dict[int, int] = {}
    for (what, marks), places in alike.items():
        assert isinstance(marks, tuple), "keys end with marks"
        moved = tuple(sorted((stage, following[src], following[dst]) for stage, src, dst in marks))
        others = alike.get((what, moved), [])
        if len(others) != len(places):
            return None
        after |= zip(places, others, strict=True)
    last: dict[object, int] = {}
    for place, template in enumerate(plan.templates):
        # Hops listed later for one root are listed later for the next one too; paths tie with those of both ends.
        ends = template.stages[0].top_down()[-1].child if plan.collective == ALL_TO_ALL else None
        tied = (template.share, template.stages[0].root, ends)
        if after[place] < last.get(tied, 0):
            return None
        last[tied] = after[place]
    return [
        (hop, hops[after[place]][stage, following[src], following[dst]])
        for place, own in enumerate(hops)
        for (stage, src, dst), hop in own.items()
    ]


def _next_names(plan: PlanByKind, flow: Dataflow, pairs: Sequence[tuple[Hop, Hop]]) -> dict[str, str] | None:
    """Return the next device of each that hops pass; None if links differ, or a device has several."""
    rails = plan.cluster.network.kind == "rail-optimised"
    found: dict[str, str] = {}
    for hop, other in pairs:
        if hop.alpha != other.alpha or len(hop.links) != len(other.links):
            return None
        for name, next_name in _ends_of_links(flow, hop, other):
            server, next_server = name.rpartition(".")[0], next_name.rpartition(".")[0]
            stays = bool(server) or rails or name == next_name
            word = _word(next_name)
            if server != next_server or not stays or found.setdefault(_word(name), word) != word:
                return None
        for link, following in zip(hop.links, other.links, strict=True):
            one, two = flow.fabric.links[link], flow.fabric.links[following]
            if (one.bandwidth, one.count) != (two.bandwidth, two.count):
                return None
    return found


def _ends_of_links(flow: Dataflow, hop: Hop, other: Hop) -> Iterator[tuple[str, str]]:
    links = flow.fabric.links
    for link, following in zip(hop.links, other.links, strict=True):
        yield links[link].src, links[following].src
        yield links[link].dst, links[following].dst


def _phases(names: dict[str, str], gpus: int) -> dict[str, tuple[str, int]] | None:
    """Return the device of phase 0 and the phase of each device that moves; None for orbits of another size.

    Orbits begin at GPU 0. The phase of another device is that of the GPU with the same place in its orbit.
    """
    found: dict[str, tuple[str, int]] = {}
    for name in sorted(names):
        orbit = [name]
        while len(orbit) <= gpus and names.get(orbit[-1]) not in (None, name):
            orbit.append(names[orbit[-1]])
        if names.get(orbit[-1]) != name or len(orbit) not in (1, gpus):
            return None
        if len(orbit) == gpus and name not in found:
            found |= {device: (name, phase) for phase, device in enumerate(orbit)}
    return found

"""Simulate the events of a plan by kind on one hop of each orbit, with the result of its list.

If every server of a cluster takes the next one's place, ties included (`topoplan.model.event_simulation`), all images
of a hop start, wait and end at the same moments, and so do their links. One of them is then simulated, and each link of
a representative queues the images that pass it. Two steps find representatives:

- *Rotation*: servers on one switch or on rails, leaves, groups or pods rotate as equal units. Only the trees with their
  root in the first unit are built. The rotation must move every link that is passed, for images that share a link are
  served one after another. The images of a cluster of several cells are all built.
- *Refinement* (`topoplan.model.event_refinement`): the GPUs of a server, and other hops of equal histories, become one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from topoplan.errors import UsageError
from topoplan.machine.cluster_by_kind import ClusterByKind
from topoplan.model.closed_form import Pipeline, chunk_counts
from topoplan.model.dataflow import LAUNCH, Dataflow, Floats, Indices
from topoplan.model.event_engine import EventHops, EventLog, depths, serve
from topoplan.model.event_refinement import HopColumns, refined
from topoplan.model.event_simulation import MAX_TRANSFERS
from topoplan.model.kind_dataflow import KindClock
from topoplan.plans.kind_images import TemplateImages, local_numbers
from topoplan.plans.kind_templates import KindTemplate, centre_turns, group_turns
from topoplan.plans.plan_by_kind import PlanByKind

MOST_HOPS = 4_000_000
"""Hops of trees with their root in one unit up to which they are built: some gigabytes."""


@dataclass(frozen=True, slots=True)
class Units:
    """Equal parts of a cluster that rotate: how many, and servers, leaves and pods in each; 0 if these stay."""

    count: int
    servers: int
    leaves: int
    pods: int

    @classmethod
    def of(cls, cluster: ClusterByKind) -> Units:
        """Return the smallest units: servers on one switch, leaves, or pods; the whole of unlike servers."""
        cell = cluster.cells[0]
        if cell.servers != cluster.servers:
            return cls(1, cluster.servers, len(cluster.leaves), len(cluster.leaves))
        if cell.pods > 1:
            return cls(cell.pods, cell.servers_in_pod, cell.leaves_in_pod, 1)
        if cell.leaves > 1:
            return cls(cell.leaves, cell.count, 1, 0)
        return cls(cell.servers, 1, 0, 0)


@dataclass(frozen=True)
class EventOrbits:
    """The event simulation of a plan by kind, equal to that of its list.

    ``late`` is as of `KindClock`. UsageError for paths of an all-to-all, a torus, trees that need more than `MOST_HOPS`
    hops, and trees that share a link that no rotation moves.

    >>> import topoplan
    >>> many = topoplan.cluster_by_kind([topoplan.Server("dgx-h100", count=32)], nic_gbps=400)
    >>> orbits = EventOrbits(topoplan.plan_by_kind(many, "allreduce"))
    >>> len(orbits.hops.shard), sum(orbits.hops.stands), round(orbits.run(1_000_000).seconds * 1e6, 2)
    (510, 130560, 118.6)
    """

    plan: PlanByKind
    late: Mapping[int, float] | None = None

    @cached_property
    def _schedule(self) -> Pipeline:
        """The dataflow of the templates, and the chunks without late ranks."""
        return KindClock(self.plan).schedule

    @cached_property
    def _built(self) -> tuple[EventHops, list[float]]:
        late = KindClock(self.plan, self.late).late_of_sample
        return refined(_RotatedTrees(self.plan, self._schedule.flow, late).columns())

    @property
    def hops(self) -> EventHops:
        """The representatives."""
        return self._built[0]

    def run(self, nbytes: int, chunk_bytes: int | None = None) -> EventLog:
        """Return the run of a buffer of 1 byte or more; parameters as `topoplan.model.event_simulation.run_events`."""
        if nbytes < 1:
            raise UsageError(f"nbytes must be 1 or more, got {nbytes}; give a larger size")
        schedule = self._schedule
        chunks = chunk_counts(schedule, nbytes, chunk_bytes)
        hops, first = self._built
        count = sum(chunks[one] * len(passed) for one, passed in zip(hops.shard, hops.passes, strict=True))
        if count > MAX_TRANSFERS:
            raise UsageError(
                f"chunk transfers of orbits must be at most {MAX_TRANSFERS}, got {count}; give a smaller buffer or a "
                "larger chunk size, or leave --events out"
            )
        sizes = [share * nbytes / k for share, k in zip(schedule.flow.shares, chunks, strict=True)]
        return serve(hops, sizes, chunks, first, record=False)


class _RotatedTrees:
    """The hops of the trees whose root is in the first unit."""

    def __init__(self, plan: PlanByKind, flow: Dataflow, late: Mapping[int, float]) -> None:
        if not all(isinstance(one, KindTemplate) for one in plan.templates):
            raise UsageError("events of paths and of a torus need the list of its GPUs; leave --events out")
        self.plan, self.flow, self.late = plan, flow, late
        self.sample, self.cluster, self.fabric = plan.sample, plan.cluster, plan.fabric
        self.units = Units.of(self.cluster)
        self.home = self.sample.servers_of(self.fabric.ranks)
        self.local = local_numbers(self.home)
        self.codes: dict[str, int] = {}
        self.patterns: dict[tuple[object, ...], int] = {}
        self.servers: dict[tuple[object, ...], dict[int, Indices]] = {}
        self.firsts = np.array([self.cluster.first_rank(one) for one in range(self.cluster.servers)])
        # Servers in order, but for servers without GPUs.
        counts = np.diff(np.append(self.firsts, self.cluster.size))
        self.ordinal = np.cumsum(counts > 0) - 1
        self.gpus, self.with_gpus = int(counts.max()), int((counts > 0).sum())
        self.hops_of: list[list[int]] = [[] for _ in plan.templates]
        for number, hop in enumerate(self.flow.hops):
            self.hops_of[hop.shard].append(number)

    def _after(self, one: Indices, rank: int, other: Indices, image: int) -> Indices:
        """Return the distance from ranks of some servers to ranks of others: of servers, then of GPUs in a server."""
        apart = (self.ordinal[other] - self.ordinal[one]) % self.with_gpus
        found: Indices = apart * self.gpus + (self.local[image] - self.local[rank]) % self.gpus
        return found

    def code(self, word: str) -> int:
        """Return the number of a device's name without its server."""
        found = self.codes.setdefault(word, len(self.codes))
        assert found < _CODES, "a sample has few servers"
        return found

    def _images(self) -> Iterator[tuple[int, int, TemplateImages]]:
        """Yield template and number of every image with its root in the first unit."""
        for place, template in enumerate(self.plan.templates):
            images = self.plan.images(template)
            assert isinstance(images, TemplateImages), "others are refused above"
            for number in range(images.count // self.units.count):
                yield place, number, images

    def columns(self) -> HopColumns:
        """Return the hops; UsageError if there are too many, or the rotation changes an order or a link's users."""
        units, flow, size = self.units, self.flow, self.cluster.size
        edges = sum(images.edges for _, _, images in self._images())
        if edges > MOST_HOPS:
            raise UsageError(
                f"trees with their root in one of {units.count:,} equal parts of the cluster have {edges:,} hops, more "
                f"than {MOST_HOPS:,}; choose fewer servers, or leave --events out"
            )
        each_unit, last = size // units.count, max(len(one.stages) for one in self.plan.templates)
        place_of, images_each = self._places()
        rows: list[tuple[Indices, ...]] = []
        legs: list[tuple[Indices, Indices]] = []
        joined: list[Indices] = []
        members_of: list[tuple[Indices, Indices]] = []
        total = groups = 0
        for place, number, images in self._images():
            members = _Members(self, images, number)
            begun: dict[int, tuple[int, Indices]] = {}
            joins: dict[tuple[int, ...], tuple[int, Indices]] = {}
            for one in self.hops_of[place]:
                hop = flow.hops[one]
                stage = self.plan.templates[place].stages[hop.stage]
                upwards = stage.op == "reduce"
                child, parent = (hop.src, hop.dst) if upwards else (hop.dst, hop.src)
                below, above = members.pairs(self.home[child], self.home[parent])
                src, dst = (below, above) if upwards else (above, below)
                root = members.of(self.home[stage.root])[:1]
                source, target = (
                    self.firsts[at] + self.local[rank] for at, rank in ((src, hop.src), (dst, hop.dst))
                )
                offset, inside = (target - source) % size, source % each_unit
                tie = self._after(src, hop.src, dst, hop.dst) * last + hop.stage
                tie = tie * self.with_gpus * self.gpus + self._after(above, parent, root, stage.root)
                ends = (self.home[hop.src], src), (self.home[hop.dst], dst)
                passed = [members.link(link, ends) for link in hop.links]
                pattern = self.patterns.setdefault(tuple(code for _, _, code in passed), len(self.patterns))
                key = np.stack([key for key, _, _ in passed], axis=1)
                apart = np.stack(
                    [(source // each_unit - unit) % units.count for _, unit, _ in passed], axis=1
                )
                legs.append((key.ravel(), apart.ravel()))
                whole = np.ones_like(src)
                last_tie = inside * (len(place_of) * images_each) + place_of[place] * images_each + number
                rows.append((whole * one, tie, last_tie, inside * size + offset, whole * pattern))
                group = whole * -1
                if hop.waits:
                    if hop.waits not in joins:
                        starting = np.unique(src)
                        joins[hop.waits] = groups, starting
                        for before in hop.waits:
                            first, arrived = begun[before]
                            kept = np.flatnonzero(np.isin(arrived, starting))
                            members_of.append(
                                (np.searchsorted(starting, arrived[kept]) + groups, first + kept)
                            )
                        groups += len(starting)
                    group = joins[hop.waits][0] + np.searchsorted(joins[hop.waits][1], src)
                joined.append(group)
                begun[one] = total, dst
                total += len(src)
        return self._joined(_stacked(rows), _stacked(legs), np.concatenate(joined), _stacked(members_of, 2))

    def _places(self) -> tuple[list[int], int]:
        """Return the places of templates among shards of one root, in `PlanByKind.listed`, and most images of one."""
        images = [self.plan.images(template) for template in self.plan.templates]
        places = list(range(len(images)))
        if self.plan.listed_rotations is None:
            places = sorted(places, key=lambda place: (-images[place].share_each, place))
        return [places.index(place) for place in range(len(images))], max(one.count for one in images)

    def _joined(
        self,
        rows: Sequence[Indices],
        legs: Sequence[Indices],
        group: Indices,
        members: Sequence[Indices],
    ) -> HopColumns:
        flow, (one, tie, last_tie, pair, pattern), (key, apart) = self.flow, rows, legs
        order = np.empty(len(one), dtype=np.int64)
        order[np.lexsort((last_tie, tie))] = np.arange(len(one))
        keys, link = np.unique(key, return_inverse=True)
        lengths = np.array([len(each.links) for each in flow.hops])[one]
        start = np.concatenate(([0], np.cumsum(lengths)))
        hop = np.repeat(np.arange(len(one)), lengths)
        ties = np.unique(tie, return_inverse=True)[1]
        alike = link * len(ties) + ties[hop]
        sort = np.argsort(alike)
        if ((np.diff(alike[sort]) == 0) & (np.diff(apart[sort]) != 0)).any():
            raise UsageError(
                "chunks of servers in different leaves tie at a link, in an order that depends on the numbers of the "
                "leaves; leave --events out"
            )
        links = flow.fabric.links
        begins = np.concatenate(([0], np.cumsum([len(each.links) for each in flow.hops])))
        along = np.array([link for each in flow.hops for link in each.links])
        sampled = along[begins[one][hop] + np.arange(len(hop)) - start[hop]]
        pace = np.zeros(len(keys))
        pace[link] = np.array([1e-9 / each.bandwidth for each in links])[sampled]
        route = np.unique(pair * len(self.patterns) + pattern, return_inverse=True)[1]
        narrow = np.array([min(links[each].count for each in hop.links) for hop in flow.hops])
        wires = np.zeros(route.max() + 1, dtype=np.int64)
        wires[route] = narrow[one]
        inner = np.flatnonzero(np.diff(hop) == 0)
        steps = np.unique(link[inner] * len(keys) + link[inner + 1])
        depth = depths([divmod(step, len(keys)) for step in steps.tolist()], len(keys))
        if not depth:
            raise UsageError(
                "routes pass links in cycles, whose events need the list of GPUs; leave --events out"
            )
        late, lanes = self.late, [flow.lanes[lane][1] for lane in flow.lane_of_shard]
        # Shards of one size on one channel have as many chunks.
        sizes = list(zip(flow.shares, flow.lane_of_shard, strict=True))

        def each_hop(values: Iterable[float]) -> Floats:
            found: Floats = np.array(list(values), dtype=np.float64)[one]
            return found

        shard = np.array([each.shard for each in flow.hops])[one]
        return HopColumns(
            shard=shard,
            share=np.array([sizes.index(each) for each in sizes])[shard],
            alpha=each_hop(each.alpha for each in flow.hops),
            first=each_hop(
                LAUNCH + max(lanes[each.shard], late.get(each.src, 0.0), late.get(each.dst, 0.0))
                for each in flow.hops
            ),
            order=order,
            route=route,
            wires=wires,
            start=start,
            link=link,
            pace=pace,
            depth=np.array(depth),
            group=group,
            into=members[0],
            member=members[1],
            images=self.units.count,
        )


def _stacked(rows: Sequence[Sequence[Indices]], columns: int = 0) -> list[Indices]:
    """Return the columns of blocks of rows; ``columns`` if there may be no block."""
    none = [np.zeros(0, dtype=np.int64)] * columns
    return [np.concatenate(column) for column in zip(*([none] if columns else []), *rows, strict=True)]


class _Members:
    """The servers of one image, by server of the sample, and the links between them as orbits."""

    def __init__(self, trees: _RotatedTrees, images: TemplateImages, number: int) -> None:
        self.trees = trees
        sample, cluster, template = trees.sample, trees.cluster, images.template
        marks = (
            template.root,
            template.centre,
            template.entries,
            template.pod_entries,
            template.shifts,
            number,
        )
        if marks not in trees.servers:
            trees.servers[marks] = {
                server: np.array(found, dtype=np.int64).reshape(-1, 3)
                for server, found in images.servers(number).items()
            }
        self.listed = trees.servers[marks]
        of_class = {cell.leaf_class: cell for cell in cluster.cells}
        self.leaf_of: dict[int, Indices] = {}
        self.pod_of: dict[int, Indices] = {}
        for server, found in self.listed.items():
            rows = found[:, 1:].tolist()
            known = {
                (one, leaf): (cluster.leaf_number(one, leaf), cluster.pod_number(*of_class[one].pod(leaf)))
                for one, leaf in np.unique(found[:, 1:], axis=0).tolist()
            }
            both = np.array([known[one, leaf] for one, leaf in rows], dtype=np.int64).reshape(-1, 2)
            self.leaf_of[server], self.pod_of[server] = both.T
        self.leaf = np.zeros(cluster.servers, dtype=np.int64)
        for server, found in self.listed.items():
            self.leaf[found[:, 0]] = self.leaf_of[server]
        turned = number // centre_turns(sample, template.root, template.centre)
        self.third = {
            leaf_class: cluster.leaf_number(leaf_class, turned // divisor % modulus)
            for leaf_class, (divisor, modulus) in group_turns(sample, template.stages).items()
        }

    def of(self, server: int) -> Indices:
        """Return the servers for which one of the sample stands."""
        return self.listed[server][:, 0]

    def pairs(self, child: int, parent: int) -> tuple[Indices, Indices]:
        """Return the servers below and above of all images of an edge, as `TemplateImages.shard` joins them."""
        sample = self.trees.sample
        below, above = self.of(child), self.of(parent)
        if parent == child:
            return below, above
        if len(above) == 1:
            return below, np.repeat(above, len(below))
        beside = sample.leaf_of(parent) == sample.leaf_of(child)
        joins = [(self.leaf_of if beside else self.pod_of)[one] for one in (child, parent)]
        numbers, at = np.unique(joins[1], return_index=True)
        return below, above[at[np.searchsorted(numbers, joins[0])]]

    def link(self, link: int, ends: _Ends) -> tuple[Indices, Indices, tuple[object, ...]]:
        """Return the orbits of the images of a link of the sample, their units, and what tells routes apart.

        UsageError if no rotation moves the link.
        """
        trees, units = self.trees, self.trees.units
        own = trees.fabric.links[link]
        spots = [self._spot(name, ends) for name in (own.src, own.dst)]
        moved = [unit for _, _, unit, _ in spots if unit is not None]
        if not moved:
            if units.count > 1:
                raise UsageError(
                    f"trees of all servers share the link {own.src}->{own.dst}, whose events need the list of GPUs; "
                    "leave --events out"
                )
            moved = [ends[0][1] * 0]
        width = max(units.servers, units.leaves, units.pods)
        key = ends[0][1] * 0
        for code, position, _, _ in spots:
            key = (key * _CODES + code) * width + position
        between = (moved[-1] - moved[0]) % units.count if len(moved) > 1 else units.count
        pattern = tuple((code, of) for code, _, _, of in spots)
        return key * (units.count + 1) + between, moved[0], pattern

    def _spot(self, name: str, ends: _Ends) -> _Spot:
        """Return where the images of a device of the sample are."""
        trees, sample, cluster, units = self.trees, self.trees.sample, self.trees.cluster, self.trees.units
        head, dot, tail = name.partition(".")

        def spot(word: str, number: Indices, each: int, of: int) -> _Spot:
            if not each:
                return trees.code(name), 0, None, 0
            return trees.code(word), number % each, number // each, of

        for of, (server, images) in enumerate(ends):
            if dot and head == f"s{sample.numbers[server]}":
                return spot(f".{tail}", images, units.servers, of)
        for of, (server, images) in enumerate(ends):
            names = [*sample.switch_names(server, sample.places[server].leaf)]
            if name in names[:1]:
                return spot(" leaf", self.leaf[images], units.leaves, of)
            if name in names[1:]:
                return spot(" pod", self.leaf[images] // cluster.pod_size, units.pods, of)
        if name in sample.groups and sample.groups[name][0] in self.third:
            third = self.third[sample.groups[name][0]]
            return spot(" leaf", ends[0][1] * 0 + third, units.leaves, -1 - third)
        return trees.code(name), 0, None, 0


_Spot = tuple[int, Indices | int, Indices | None, int]
"""The code of a device, position and unit of its images (None if it stays), and the end whose server or leaf it is."""

_Ends = tuple[tuple[int, Indices], tuple[int, Indices]]
"""Source and destination of the images of a hop: the server of the sample, and its images."""

_CODES = 4096
"""Most names of devices of the sample, those of equal devices of all servers as one."""

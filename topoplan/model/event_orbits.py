"""Simulate the events of a plan by kind on one hop of each orbit, with the result of its list.

If every server of a cluster takes the next one's place, ties included (`topoplan.model.event_simulation`), all images
of a hop start, wait and end at the same moments, and so do their links. One of them is then simulated, and each link of
a representative queues the images that pass it. Two steps find representatives:

- *Rotation* (`topoplan.model.event_images`): servers on one switch or on rails, leaves, groups or pods rotate as equal
  units; servers of a torus translate. Only the trees and paths with their root in the first unit are built. The
  rotation must move every link that is passed, for images that share a link are served one after another. Several kinds
  of servers rotate if they repeat; the images of others are all built.
- *Phases* (`topoplan.model.event_images`): GPUs of each server rotate too, if they take trees to trees.
- *Refinement* (`refined`): the GPUs of a server, and other hops of equal histories, become one of each colour. Hops,
  links and routes have one colour if all that decides their events has one colour at the same place of each queue: what
  a hop waits for, the links that it passes and its place in their ties, and the hops that tie with it. Two hops of one
  queue differ by their places, so they never have one colour. The quotient is a fibration (Boldi and Vigna, Discrete
  Mathematics 243, 2002): equal inputs give equal events, one after another.

Colours are numbered by hashes of 64 bits. Two of four million hops have one hash by chance in
fewer than one of 100,000 plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import UsageError
from topoplan.machine.torus import ahead
from topoplan.model.closed_form import Pipeline, chunk_counts
from topoplan.model.dataflow import LAUNCH, Dataflow, Floats, Indices
from topoplan.model.event_engine import EventHops, EventLog, depths, serve, transfers
from topoplan.model.event_images import FirstUnit, GpuPhases, Members, path_rows
from topoplan.model.kind_dataflow import KindClock
from topoplan.model.torus_dataflow import template_flow
from topoplan.plans.plan import ALL_TO_ALL
from topoplan.plans.plan_by_kind import AnyTemplate, PlanByKind

MOST_HOPS = 4_000_000
"""Hops of trees with their root in one unit up to which they are built: some gigabytes."""

MOST_EXCHANGING = 1_600_000
"""GPUs up to which events of paths are ordered: three distances between ranks are one number of 63 bits."""

MAX_TRANSFERS = 20_000_000
"""Most simulated chunk transfers of orbits: about half a minute."""


@dataclass(frozen=True)
class EventOrbits:
    """The event simulation of a plan by kind, equal to that of its list.

    ``late`` is as of `KindClock`. UsageError for trees or paths that need more than `MOST_HOPS` hops, or share a link
    that no rotation moves.

    >>> import topoplan
    >>> many = topoplan.cluster_by_kind([topoplan.Server("dgx-h100", count=32)], nic_gbps=400)
    >>> orbits = EventOrbits(topoplan.plan_by_kind(many, "allreduce"))
    >>> len(orbits.hops.shard), int(orbits.hops.stands.sum()), round(orbits.run(1_000_000).seconds * 1e6, 2)
    (510, 130560, 118.6)
    """

    plan: PlanByKind
    late: Mapping[int, float] | None = None

    @cached_property
    def _schedule(self) -> Pipeline:
        """The dataflow of the templates, and the chunks without late ranks."""
        return KindClock(self.plan).schedule

    @cached_property
    def _built(self) -> tuple[EventHops, Floats]:
        late = KindClock(self.plan, self.late).late_of_sample
        flow = self._schedule.flow
        if self.plan.cluster.network.kind == "torus":
            # Hops of the templates, not those along their arms.
            flow = template_flow(self.plan)
        images = _RotatedImages(self.plan, flow, late, GpuPhases.of(self.plan, flow, late))
        images.check()
        if images.phases.count > 1:
            # The rotation may change the order of chunks that tie, as those of GPUs behind one NIC.
            with suppress(UsageError):
                return refined(images.columns())
            images = _RotatedImages(self.plan, flow, late, GpuPhases.none(self.plan))
            images.check()
        return refined(images.columns())

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
        count = transfers(hops, chunks)
        if count > MAX_TRANSFERS:
            raise UsageError(
                f"chunk transfers of orbits must be at most {MAX_TRANSFERS}, got {count}; give a smaller buffer or a "
                "larger chunk size, or leave --events out"
            )
        sizes = [share * nbytes / k for share, k in zip(schedule.flow.shares, chunks, strict=True)]
        return serve(hops, sizes, chunks, first, record=False)


class _Block(NamedTuple):
    """Hops of images in columns, and their legs, ``lengths`` of each.

    hop: number in the dataflow of the templates; src, dst: ranks; root: the server of the root, and its GPU there;
    between: offset of the ends, by units and by ranks in one; tie: what decides ties before ranks do; pattern, mark:
    what tells routes apart; key, apart: the orbit of each link, and the units from it to the source.
    """

    hop: Indices
    stage: Indices
    src: Indices
    dst: Indices
    root: Indices
    between: Indices
    tie: Indices
    pattern: Indices
    mark: Indices
    lengths: Indices
    key: Indices
    apart: Indices

    def taken(self, rows: Indices) -> _Block:
        """Return the block of some rows, with their legs."""
        lengths = self.lengths[rows]
        begin = (np.cumsum(self.lengths) - self.lengths)[rows] - np.cumsum(lengths) + lengths
        legs = np.repeat(begin, lengths) + np.arange(lengths.sum())
        return _Block(*(one[rows] for one in self[:-2]), *(one[legs] for one in self[-2:]))


class _RotatedImages:
    """The hops of the trees and paths whose root is in the first unit."""

    def __init__(
        self, plan: PlanByKind, flow: Dataflow, late: Mapping[int, float], phases: GpuPhases
    ) -> None:
        self.plan, self.flow, self.late, self.cluster = plan, flow, late, plan.cluster
        self.unit, self.phases = FirstUnit(plan, phases), phases
        self.units, self.local = self.unit.units, np.array(self.unit.local)
        self.patterns: dict[tuple[object, ...], int] = {}
        self.firsts = np.array([self.cluster.first_rank(one) for one in range(self.cluster.servers)])
        counts = np.diff(np.append(self.firsts, self.cluster.size))
        # Servers in order, but for servers without GPUs.
        self.ordinal, self.gpus = np.cumsum(counts > 0) - 1, int(counts.max())
        with_gpus = int((counts > 0).sum())
        torus = self.cluster.network.kind == "torus"
        self.sides = self.units.sides if torus else (with_gpus,)
        self.distances = with_gpus * self.gpus
        self.each_unit = self.cluster.size // self.units.count
        self.hops_of: list[list[int]] = [[] for _ in plan.templates]
        for number, hop in enumerate(self.flow.hops):
            self.hops_of[hop.shard].append(number)

    def _after(self, one: Indices, local: Indices, other: Indices, other_local: Indices) -> Indices:
        """Return the distances from GPUs of some servers to those of others: of servers, then of GPUs in a server."""
        apart = ahead(self.sides, self.ordinal[one], self.ordinal[other])
        return apart * self.gpus + (other_local - local) % self.gpus

    def _turn(self, rank: Indices) -> Indices:
        """Return unit and phase of ranks: the motion that takes them into the first unit, to GPUs of phase 0."""
        phases = self.phases.count
        found: Indices = rank // self.each_unit * phases + rank % self.each_unit % phases
        return found

    def _inside(self, rank: Indices) -> Indices:
        """Return the place of ranks in their unit, among those of one phase."""
        found: Indices = rank % self.each_unit // self.phases.count
        return found

    def check(self) -> None:
        """Raise UsageError if there are too many hops, or ranks."""
        many = sum(self.unit.hops_of(self.plan.templates[one]) for one in self.phases.kept)
        if many > MOST_HOPS:
            raise UsageError(
                f"trees or paths from one of {self.units.count * self.phases.count:,} equal parts of the cluster have "
                f"{many:,} hops, more than {MOST_HOPS:,}; choose fewer servers, or leave --events out"
            )
        if self.plan.collective == ALL_TO_ALL and self.distances > MOST_EXCHANGING:
            raise UsageError(
                f"events of an all_to_all must be of at most {MOST_EXCHANGING:,} GPUs, got {self.distances:,}; choose "
                "fewer servers, or leave --events out"
            )

    def columns(self) -> HopColumns:
        """Return the hops; UsageError if the rotation changes an order, or does not move a link."""
        unit, height = self.unit, self.plan.height
        order_of, images_each = self._orders()
        blocks: list[_Block] = []
        last_ties: list[Indices] = []
        groups: list[Indices] = []
        waits: list[tuple[Indices, Indices]] = []
        total = into = 0
        for place in self.phases.kept:
            template = self.plan.templates[place]
            for number in unit.numbers(template):
                block = self._block(place, unit.members(template, number))
                if self.plan.collective == ALL_TO_ALL:
                    block, length, group, waiting = self._paths(template, block)
                else:
                    length = 0 * block.hop
                    group, waiting = _waits([stage.op for stage in template.stages], block)
                last = self._inside(block.src) * len(order_of) + order_of[place][0]
                last = (last * height + length) * len(order_of) + order_of[place][1]
                blocks.append(block)
                last_ties.append(last * images_each + number)
                groups.append(np.where(group < 0, -1, group + into))
                waits.append((waiting[0] + into, waiting[1] + total))
                into += int(group.max(initial=-1)) + 1
                total += len(block.hop)
        whole = _Block(*(np.concatenate(column) for column in zip(*blocks, strict=True)))
        return self._joined(
            whole,
            np.concatenate(last_ties),
            np.concatenate(groups),
            [np.concatenate(column) for column in zip(*waits, strict=True)],
        )

    def _orders(self) -> tuple[list[tuple[int, int]], int]:
        """Return what orders shards of one root in `PlanByKind.listed`, and most images of a template.

        It is the share of each template, then the length of a path, then the template's place.
        """
        images = [self.plan.images(template) for template in self.plan.templates]
        if self.plan.listed_rotations is None:
            shares = sorted({-one.share_each for one in images})
            orders = [(shares.index(-one.share_each), place) for place, one in enumerate(images)]
        else:
            orders = [(0, place) for place in range(len(images))]
        return orders, max(len(self.unit.numbers(template)) for template in self.plan.templates)

    def _block(self, place: int, members: Members) -> _Block:
        """Return the hops of one image of a tree, or of all of a path."""
        home, local, phases = self.unit.home, self.local, self.phases.count
        sides = (*self.units.sides, phases)
        last = max(len(one.stages) for one in self.plan.templates)
        found: list[tuple[Indices, ...]] = []
        for one in self.hops_of[place]:
            hop = self.flow.hops[one]
            stage = self.plan.templates[place].stages[hop.stage]
            upwards = stage.op == "reduce"
            child, parent = (hop.src, hop.dst) if upwards else (hop.dst, hop.src)
            below, above = members.pairs(home[child], home[parent])
            src, dst = (below, above) if upwards else (above, below)
            root = members.root(home[stage.root])
            source, target = (self.firsts[at] + local[rank] for at, rank in ((src, hop.src), (dst, hop.dst)))
            began, ended = self._turn(source), self._turn(target)
            between = ahead(sides, began, ended) * (self.each_unit // phases) + self._inside(target)
            tie = self._after(src, local[hop.src], dst, local[hop.dst]) * last + hop.stage
            tie = tie * self.distances + self._after(above, local[parent], root, local[stage.root])
            ends = (home[hop.src], src), (home[hop.dst], dst)
            passed = [self.unit.link(link, ends, members.thirds) for link in hop.links]
            turns = tuple(each.turned(int(local[hop.src]), phases) for each in passed)
            pattern = self.patterns.setdefault(turns, len(self.patterns))
            whole, mark = np.ones_like(src), 0 * src
            for each in passed:
                mark = mark * (len(self.cluster.leaves) + 1) + each.third
            away = [ahead(sides, each.unit * phases + each.phase, began) for each in passed]
            found.append(
                (
                    whole * one,
                    whole * hop.stage,
                    source,
                    target,
                    whole * (self.firsts[root] + local[stage.root]),
                    between,
                    tie,
                    whole * pattern,
                    mark,
                    whole * len(passed),
                    np.stack([whole * each.key for each in passed], axis=1).ravel(),
                    np.stack([whole * each for each in away], axis=1).ravel(),
                )
            )
        return _Block(*(np.concatenate(column) for column in zip(*found, strict=True)))

    def _paths(
        self, template: AnyTemplate, block: _Block
    ) -> tuple[_Block, Indices, Indices, tuple[Indices, Indices]]:
        """Return the hops of all paths, the lengths of the paths, and groups of the hop before each."""
        rows = path_rows(template, block.src, block.dst)
        block = block.taken(rows.row)
        (root, end), server = (block.root, rows.end), self._server
        far = self._after(
            server(root), root - self.firsts[server(root)], server(end), end - self.firsts[server(end)]
        )
        waiting = np.flatnonzero(rows.before >= 0)
        group = np.full(len(rows.row), -1)
        group[waiting] = np.arange(len(waiting))
        joined = np.arange(len(waiting)), rows.before[waiting]
        return block._replace(tie=block.tie * self.distances + far), rows.length - 1, group, joined

    def _server(self, rank: Indices) -> Indices:
        """Return the servers of ranks."""
        found: Indices = np.searchsorted(self.firsts, rank, side="right") - 1
        return found

    def _joined(
        self,
        block: _Block,
        last_tie: Indices,
        group: Indices,
        members: Sequence[Indices],
    ) -> HopColumns:
        flow, one, tie = self.flow, block.hop, block.tie
        order = np.empty(len(one), dtype=np.int64)
        order[np.lexsort((last_tie, tie))] = np.arange(len(one))
        keys, link = np.unique(block.key, return_inverse=True)
        start = np.concatenate(([0], np.cumsum(block.lengths)))
        hop = np.repeat(np.arange(len(one)), block.lengths)
        ties = np.unique(tie, return_inverse=True)[1]
        alike = link * len(ties) + ties[hop]
        sort = np.lexsort((order[hop], alike))
        tied = np.flatnonzero(np.diff(alike[sort]) == 0)
        before, after = sort[tied], sort[tied + 1]
        if (block.apart[before] != block.apart[after]).any():
            raise UsageError(
                "chunks of servers in different leaves tie at a link, in an order that depends on the numbers of the "
                "leaves; leave --events out"
            )
        if (last_tie[hop[before]] == last_tie[hop[after]]).any():
            raise UsageError(
                "chunks of several paths between two GPUs tie at a link, in an order that depends on the numbers of "
                "the servers between them; leave --events out"
            )
        links = flow.fabric.links
        begins = np.concatenate(([0], np.cumsum([len(each.links) for each in flow.hops])))
        along = np.array([link for each in flow.hops for link in each.links])
        sampled = along[begins[one][hop] + np.arange(len(hop)) - start[hop]]
        pace = np.zeros(len(keys))
        pace[link] = np.array([1e-9 / each.bandwidth for each in links])[sampled]
        inside = self._inside(block.src) * self.cluster.size + block.between
        route = np.unique(inside * len(self.patterns) + block.pattern, return_inverse=True)[1]
        marks, mark = np.unique(block.mark, return_inverse=True)
        route = np.unique(route * len(marks) + mark, return_inverse=True)[1]
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
            images=self.units.count * self.phases.count,
        )


def _waits(operations: Sequence[str], block: _Block) -> tuple[Indices, tuple[Indices, Indices]]:
    """Return the group for which each hop of a tree waits, or -1, and the pairs of a group and a hop of it.

    A hop waits for all that its rank has received before. A gather waits for what the same gather has brought to the
    rank; else for all that came before the gathers in sequence, which are one exchange.
    """
    group, many = np.full(len(block.hop), -1), 0
    into: list[Indices] = []
    member: list[Indices] = []
    for stage, op in enumerate(operations):
        at = np.flatnonzero(block.stage == stage)
        if not len(at):
            continue
        first = stage
        while op == "gather" and first and operations[first - 1] == "gather":
            first -= 1
        starting, where = np.unique(block.src[at], return_inverse=True)
        place = np.minimum(np.searchsorted(starting, block.dst), len(starting) - 1)
        arrived = starting[place] == block.dst
        own, before = arrived & (block.stage == stage), arrived & (block.stage < first)
        if op == "gather":
            before &= np.bincount(place[own], minlength=len(starting))[place] == 0
        kept = np.flatnonzero(own | before)
        waiting = np.bincount(place[kept], minlength=len(starting)) > 0
        group[at] = np.where(waiting[where], where + many, -1)
        into.append(place[kept] + many)
        member.append(kept)
        many += len(starting)
    return group, (np.concatenate(into), np.concatenate(member))


@dataclass(slots=True)
class HopColumns:
    """Hops in columns, and their legs by hop: the link of each, and the groups for which they wait."""

    shard: Indices
    share: Indices
    alpha: Floats
    first: Floats
    order: Indices
    route: Indices
    wires: Indices
    start: Indices
    link: Indices
    pace: Floats
    depth: Indices
    group: Indices
    into: Indices
    member: Indices
    images: int


_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _hash(*columns: Indices | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each row (splitmix64; Steele, Lea and Flood, OOPSLA 2014)."""
    found: NDArray[np.uint64] = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        found = (found ^ column.astype(np.uint64)) + _MIX[0]
        found = (found ^ (found >> np.uint64(30))) * _MIX[1]
        found = (found ^ (found >> np.uint64(27))) * _MIX[2]
        found ^= found >> np.uint64(31)
    return found


def _ranked(values: NDArray[np.uint64]) -> Indices:
    """Return the number of each value among the different ones."""
    return np.unique(values, return_inverse=True)[1]


def _positions(group: Indices, order: Indices) -> Indices:
    """Return the place of each row in its group, by ascending order."""
    sort = np.argsort(group * (int(order.max()) + 1) + order)
    first = np.concatenate(([True], np.diff(group[sort]) != 0))
    starts = np.flatnonzero(first)
    found = np.empty(len(group), dtype=np.int64)
    found[sort] = np.arange(len(group)) - np.repeat(starts, np.diff(np.append(starts, len(group))))
    return found


def _sums(number: int, at: Indices, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the sum of the values at each place, modulo 2^64."""
    found = np.zeros(number, dtype=np.uint64)
    np.add.at(found, at, values)
    return found


def refined(hops: HopColumns) -> tuple[EventHops, Floats]:
    """Return one hop of each colour, and the second before which it does not start."""
    number = len(hops.shard)
    lengths = np.diff(hops.start)
    hop = np.repeat(np.arange(number), lengths)
    leg = np.arange(len(hop)) - hops.start[hop]
    at_link, at_route = _positions(hops.link, hops.order[hop]), _positions(hops.route, hops.order)
    groups = int(hops.group.max(initial=-1)) + 1
    seen: NDArray[np.uint64] = _hash(
        hops.share, hops.alpha.view(np.int64), hops.first.view(np.int64), lengths
    )
    of_link, of_route = _hash(hops.pace.view(np.int64), hops.depth), _hash(hops.wires)
    place, place_at_route = _hash(at_link, leg), _hash(at_route)
    colours = 0
    while True:
        # A hop without a group has the colour of the last one, which is empty.
        arrived = _sums(groups + 1, hops.into, _hash(seen[hops.member]))
        queued = _sums(number, hop, _hash(place, of_link[hops.link]))
        seen = _hash(seen, queued, arrived[hops.group], place_at_route, of_route[hops.route])
        of_link = _hash(of_link, _sums(len(of_link), hops.link, _hash(place, seen[hop])))
        of_route = _hash(of_route, _sums(len(of_route), hops.route, _hash(place_at_route, seen)))
        found = sum(len(np.unique(one)) for one in (seen, of_link, of_route))
        if found == colours:
            break
        colours = found
    colour, link_colour, route_colour, group_colour = (
        _ranked(one) for one in (seen, of_link, of_route, arrived)
    )
    _, chosen, stands = np.unique(colour, return_index=True, return_counts=True)
    _, links = np.unique(link_colour, return_index=True)
    _, routes = np.unique(route_colour, return_index=True)
    lengths = lengths[chosen]
    kept = np.repeat(hops.start[chosen] - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
    pairs = np.unique(np.stack([group_colour[hops.into], colour[hops.member]], axis=1), axis=0)
    built = EventHops(
        shard=hops.shard[chosen],
        alpha=hops.alpha[chosen],
        group=np.where(hops.group < 0, -1, group_colour[hops.group])[chosen],
        into=pairs[:, 0].copy(),
        member=pairs[:, 1].copy(),
        start=np.concatenate(([0], np.cumsum(lengths))),
        passes=link_colour[hops.link][kept],
        places=at_link[kept],
        route=route_colour[hops.route][chosen],
        route_places=at_route[chosen],
        wires=hops.wires[routes],
        pace=hops.pace[links],
        depth=hops.depth[links],
        stands=stands * hops.images,
    )
    return built, hops.first[chosen]

"""Find the rotation that takes GPU i of every server to GPU i + 1, and trees or paths of one root to those of the next.

A DGX with a NIC for each GPU has it: the trees of its 8 GPUs are 8 phases of one. Then the trees of GPU 0 alone are
built. It is read off the hops: those of two templates are compared link by link, and so the devices that they pass.
It must move every link that is passed, for images that share a link are served one after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from topoplan.model.dataflow import Dataflow, Hop
from topoplan.plans.kind_images import local_numbers
from topoplan.plans.plan import ALL_TO_ALL
from topoplan.plans.plan_by_kind import PlanByKind

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

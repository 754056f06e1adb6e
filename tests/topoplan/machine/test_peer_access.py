"""Peer access by pair: copies without it pass a CPU, in routes, bounds, symmetries and files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, permutations
from random import Random

import numpy as np
import pytest

import topoplan
from tests.support.host_trees import hosts, optimum
from tests.support.refusals import refused
from topoplan.engines.exported import Choices
from topoplan.engines.mscclpp_write import execution_plan
from topoplan.errors import InfeasibleError, PlanError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import keeps_wires
from topoplan.machine.host_topology import both_ways
from topoplan.machine.routing import Transit, refused_pairs
from topoplan.machine.topology import Device, Link, Topology, facts
from topoplan.plans.plan import Plan

Pairs = Iterable[tuple[int, int]]


def without(machine: Topology, pairs: Pairs, key: str = "refused") -> Topology:
    """The machine whose GPUs name the first of each pair in the fact of the second."""
    named: dict[str, list[str]] = {}
    for src, dst in pairs:
        named.setdefault(f"gpu{dst}", []).append(f"gpu{src}")
    return replace(
        machine,
        devices=tuple(
            replace(one, facts=facts(**dict(one.facts) | {key: ",".join(named[one.name])}))
            if one.name in named
            else one
            for one in machine.devices
        ),
    )


def below_switches(
    gpus: int, switches: int, *, up: float = 10, uplink: float = 10
) -> tuple[Topology, dict[str, str]]:
    """GPUs on PCIe switches below one CPU."""
    above = {f"gpu{i}": f"pcie{i * switches // gpus}" for i in range(gpus)}
    above |= {f"pcie{i}": "cpu0" for i in range(switches)}
    return hosts(
        above,
        {
            ends: (rate, rate, None)
            for ends in above.items()
            for rate in (up if "gpu" in ends[0] else uplink,)
        },
    ), above


ISLANDS = without(below_switches(4, 1)[0], [(0, 2), (0, 3), (1, 2), (1, 3)])


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(12))
def test_plans_reach_the_optimum_of_an_independent_program(seed: int) -> None:
    """Pairs of a random set have no access, one way or both, and links share caps: rate, bound and proof agree."""
    draw = Random(seed)
    machine, above = below_switches(4, draw.randint(1, 2), up=draw.randint(8, 20), uplink=draw.randint(8, 30))
    cap = draw.choice([None, 31])
    machine = replace(machine, links=tuple(replace(one, shared=cap) for one in machine.links))
    key = draw.choice(["refused", "unreached"])
    pairs = draw.sample(list(combinations(range(4), 2)), draw.randint(1, 5))
    machine = without(machine, pairs, key)
    via = {(f"gpu{a}", f"gpu{b}"): "cpu0" for a, b in pairs}
    if key == "refused":
        via |= {(b, a): cpu for (a, b), cpu in via.items()}
    assert refused_pairs(machine) == set(via)
    for collective in ("allreduce", "broadcast", "allgather"):
        made = topoplan.plan(machine, collective)
        assert made.rate == pytest.approx(optimum(machine, above, collective, via)), collective
        report = topoplan.verify(made)
        assert report.optimal
        assert topoplan.compute_bound(machine, collective).rate >= made.rate * (1 - 1e-12)
        assert topoplan.verify(Plan.from_json(made.to_json())) == report


def test_copies_between_islands_pass_the_cpu() -> None:
    """Two pairs below one switch: with access 20/3 GB/s; without, two edges of each tree pass the CPU's link."""
    whole = topoplan.plan(below_switches(4, 1)[0])
    made = topoplan.plan(ISLANDS)
    assert (whole.rate, made.rate) == (pytest.approx(20 / 3), pytest.approx(5))
    routes = {edge.route for shard in made.shards for stage in shard.stages for edge in stage.edges}
    for route in routes:
        assert ("cpu0" in route) == (int(route[0][-1]) // 2 != int(route[-1][-1]) // 2)


def test_a_plan_that_needs_access_which_is_refused_is_refused_itself() -> None:
    """The message names the two GPUs; hand-written trees are refused alike."""
    machine = below_switches(4, 1)[0]
    text = topoplan.plan(machine).to_json()
    value = Plan.from_json(text)
    for kind, key in (("refused", "refused"), ("unreached", "unreached")):
        barred = replace(value, topology=without(machine, permutations(range(4), 2), key))
        with pytest.raises(
            PlanError, match=r"needs peer access from gpu\d to gpu\d, which is refused; lead it thr"
        ):
            topoplan.verify(barred)
        assert kind == key
    with refused(UsageError, "tree 0: the route gpu0-pcie0-gpu2 needs peer access from gpu0 to gpu2"):
        topoplan.plan_from_trees(
            ISLANDS, "broadcast", [[(0, 1), (0, 2, ("gpu0", "pcie0", "gpu2")), (2, 3)]], root=0
        )


def test_links_between_gpus_without_access_are_not_used() -> None:
    """A direct link and an NVSwitch are left out for that pair alone; the others use them."""
    wires = [
        link
        for pair in ((0, 1), (1, 2), (0, 2))
        for link in both_ways(f"gpu{pair[0]}", f"gpu{pair[1]}", "nvlink", 25)
    ]
    gpus = tuple(Device(f"gpu{i}", "gpu", "s0") for i in range(3))
    ring = without(Topology("ring", gpus, tuple(wires)), [(0, 2)])
    assert topoplan.plan(ring).rate == pytest.approx(25)  # a chain; 37.5 with the third wire
    star = [link for i in range(3) for link in both_ways(f"gpu{i}", "sw", "nvlink", 25)]
    switch = Topology("star", (*gpus, Device("sw", "nvswitch", "s0")), tuple(star))
    assert topoplan.plan(switch).rate == pytest.approx(18.75)
    chain = topoplan.plan(without(switch, [(0, 2)]))
    assert (chain.rate, topoplan.verify(chain).optimal) == (pytest.approx(12.5), True)
    with pytest.raises(InfeasibleError, match=r"\{gpu0\} to \{gpu1-2\}|gpu0"):
        topoplan.plan(without(switch, [(0, 1), (0, 2)]))


def test_symmetries_keep_the_pairs_with_access() -> None:
    """Islands of twos below one switch: swapping GPUs of two islands keeps the wires, and not the access."""
    fabric = Fabric(ISLANDS, ("pcie",))
    place = {name: number for number, name in enumerate(fabric.nodes)}

    def swapped(one: str, other: str) -> list[int]:
        moved = list(range(len(place)))
        moved[place[one]], moved[place[other]] = place[other], place[one]
        return moved

    assert keeps_wires(fabric, swapped("gpu0", "gpu1"))
    assert not keeps_wires(fabric, swapped("gpu1", "gpu2"))
    assert keeps_wires(Fabric(below_switches(4, 1)[0], ("pcie",)), swapped("gpu1", "gpu2"))
    many = without(
        below_switches(16, 2, uplink=20)[0],
        [pair for pair in combinations(range(16), 2) if pair[0] // 2 != pair[1] // 2],
    )
    for collective in ("allreduce", "allgather"):
        assert topoplan.verify(topoplan.plan(many, collective)).optimal


def random_box(seed: int) -> Topology:
    """Five GPUs on switches and CPUs at random, some with direct links, with random pairs without access."""
    random = np.random.default_rng(seed)
    inner = ("cpu0", "cpu1", "pcie0", "pcie1", "pcie2")
    wires = [
        ("cpu0", "cpu1", "sys"),
        ("pcie0", "cpu0", "pcie"),
        ("pcie1", "cpu1", "pcie"),
        ("pcie2", "pcie0", "pcie"),
    ]
    wires += [(f"gpu{i}", inner[int(random.integers(5))], "pcie") for i in range(5)]
    wires += [(f"gpu{i}", f"gpu{i + 1}", "pcie") for i in range(4) if not random.integers(3)]
    devices = [Device(f"gpu{i}", "gpu", "s0") for i in range(5)]
    devices += [Device(name, name[:-1], "s0") for name in inner]
    links = [link for one, other, channel in wires for link in both_ways(one, other, channel, 10)]
    pairs = [pair for pair in permutations(range(5), 2) if random.integers(2)]
    return without(Topology("box", tuple(devices), tuple(links)), pairs, "unreached")


@pytest.mark.parametrize("seed", range(6))
def test_the_graph_of_routes_has_the_paths_with_access_or_a_cpu_and_no_others(seed: int) -> None:
    """By enumeration: a path passes a device once, or once before and once behind a CPU if it may need one."""
    machine = random_box(seed)
    fabric, barred = Fabric(machine, ("pcie",)), refused_pairs(machine)
    near: dict[str, set[str]] = {device.name: set() for device in machine.devices}
    for link in machine.links:
        near[link.src].add(link.dst)
    wanted: set[tuple[str, ...]] = set()
    stack: list[tuple[str, ...]] = [(gpu,) for gpu in machine.gpus]
    while stack:
        path = stack.pop()
        behind = next((place for place, name in enumerate(path) if name.startswith("cpu")), None)
        passed = path if behind is None or fabric.ranks.index(path[0]) not in fabric.barred else path[behind:]
        for name in near[path[-1]] - {path[0]}:
            if name in machine.gpus:
                if (path[0], name) not in barred or behind is not None:
                    wanted.add((*path, name))
            elif name not in passed:
                stack.append((*path, name))
    assert fabric.lists_every_route
    assert {arc.route for arc in fabric.arcs} == wanted
    assert all(fabric.transit.unable(route) == "" for route in wanted)


def test_gpus_without_any_access_and_clusters() -> None:
    """MIG and the fact peer_access bar all pairs of a GPU; a cluster keeps the names of a server's own GPUs."""
    machine, _ = below_switches(4, 1)
    lonely = replace(
        machine,
        devices=tuple(
            replace(one, facts=facts(peer_access="none")) if one.name == "gpu3" else one
            for one in machine.devices
        ),
    )
    assert refused_pairs(lonely) == {
        pair for i in range(3) for pair in ((f"gpu{i}", "gpu3"), ("gpu3", f"gpu{i}"))
    }
    assert topoplan.plan(lonely).rate < topoplan.plan(machine).rate
    pair = topoplan.cluster([topoplan.Server(ISLANDS, count=2)], nic_gbps=100, nics=1)
    assert len(refused_pairs(pair)) == 16
    made = topoplan.plan(pair, channels="pcie+network")
    assert topoplan.verify(made).optimal
    assert ("s0.gpu0", "s1.gpu3") not in refused_pairs(pair)


def accessed(push: float | None, pull: float | None, *, gpus: int = 3) -> Topology:
    """A ring of GPUs on direct links of which the first direction of each has these rates."""
    ends = [(i, (i + 1) % gpus) for i in range(gpus)]
    links = [Link(f"gpu{a}", f"gpu{b}", "pcie", 52, push=push, pull=pull) for a, b in ends]
    links += [Link(f"gpu{b}", f"gpu{a}", "pcie", 52) for a, b in ends]
    return Topology("ring", tuple(Device(f"gpu{i}", "gpu", "s0") for i in range(gpus)), tuple(links))


def test_a_plan_names_the_edges_that_are_not_pushed() -> None:
    """By links, by facts, and without access; a machine that states nothing has no such note."""
    made = topoplan.plan(accessed(2.6, 52), "allgather")
    (pulled,) = [note for note in made.notes if "pulled" in note]
    assert pulled == (
        "gpu0>gpu1, gpu1>gpu2, gpu2>gpu0: pulled by their destination, which reads faster than the source writes"
    )
    assert not any("pulled" in note for note in topoplan.plan(accessed(52, 2.6), "allgather").notes)
    machine = without(below_switches(4, 1)[0], [(0, 1)], "pulls")
    assert "gpu0>gpu1: pulled by" in " ".join(topoplan.plan(machine, "allgather").notes)
    hosted = topoplan.plan(without(below_switches(3, 1)[0], [(0, 1)]), "allgather", channels="pcie")
    assert [note for note in hosted.notes if note.endswith("without peer access")]
    assert Plan.from_json(made.to_json()).notes == made.notes
    assert topoplan.plan(accessed(52, 52)).notes == ()


@pytest.mark.parametrize(
    ("machine", "collective", "words"),
    [
        (
            accessed(None, 52),
            "allreduce",
            r"signals by writing to peers, and writes of gpu\d to gpu\d never end",
        ),
        (
            accessed(52, None),
            "allreduce",
            r"has gpu\d read the memory of gpu\d here, and such reads never end",
        ),
        (ISLANDS, "allreduce", r"maps the memory of peers, and gpu\d has no peer access to gpu\d; allow it"),
        (topoplan.load("rtx5090-x8-nopeer"), "allgather", r"gpu\d has no peer access to gpu\d"),
        (
            without(below_switches(3, 1)[0], [(0, 1)], "unreached"),
            "allgather",
            "gpu[01] has no peer access to gpu[01]",
        ),
    ],
)
def test_mscclpp_refuses_a_pair_that_cannot_do_what_the_file_has_it_do(
    machine: Topology, collective: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        execution_plan(topoplan.plan(machine, collective))


def test_mscclpp_states_the_rate_of_the_access_that_it_takes() -> None:
    """A file gets where the plan pulls. Packets are put: 2 of 3 blocks, or as planned, cross a link at 2.6 GB/s."""
    plan = topoplan.plan(accessed(2.6, 52), "allgather")
    loads = topoplan.verify(plan).loads
    assert execution_plan(plan).notes[0].startswith("keeps 156 GB/s, all of the rate")
    made = execution_plan(plan, Choices(protocol="ll"))
    limit = min(2.6 / load for (src, dst), load in loads.items() if (int(src[3]) + 1) % 3 == int(dst[3]))
    assert made.notes[0].startswith(f"at most {limit:.6g} GB/s, ")
    assert any("gpu0>gpu1 pushed at 2.6 of 52 GB/s" in note for note in made.notes)
    quick = execution_plan(topoplan.plan(accessed(52, 2.6), "allgather"))
    assert quick.notes[0].startswith("keeps 156 GB/s, all of the rate")
    reads = execution_plan(topoplan.plan(accessed(52, 2.6), "reduce_scatter"))
    assert any("pulled at 2.6 of 52 GB/s" in note for note in reads.notes)


def test_a_route_through_a_gpu_needs_the_access_of_each_of_its_copies() -> None:
    """The GPU on the way stores and forwards, so each part of the route is a copy of its own."""
    machine = Topology(
        "three",
        (
            *(Device(f"gpu{n}", "gpu", facts=facts(refused="gpu1") if n == 0 else ()) for n in range(3)),
            Device("nvswitch0", "nvswitch"),
        ),
        tuple(
            Link(*ends, "nvlink", 25.0)
            for n in range(3)
            for ends in ((f"gpu{n}", "nvswitch0"), ("nvswitch0", f"gpu{n}"))
        ),
    )
    transit = Transit.of(machine)
    way = ("gpu2", "nvswitch0", "gpu0", "nvswitch0", "gpu1")
    assert "needs peer access from gpu0 to gpu1" in transit.unable(way)
    assert transit.unable(("gpu0", "nvswitch0", "gpu2", "nvswitch0", "gpu1")) == ""

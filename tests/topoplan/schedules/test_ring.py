"""Rings inside servers and across them: known answers for every DGX-1 allocation, and independent roads to rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, permutations, product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.known_answers import Allocation, allocations
from topoplan import Device, InfeasibleError, Link, Plan, Topology, UsageError, ring_plan, verify
from topoplan.machine.fabric import Fabric, usable_fabric
from topoplan.plans.plan import COLLECTIVES
from topoplan.plans.shards import ImageShards
from topoplan.schedules import hamiltonian_cycles
from topoplan.schedules.hamiltonian_cycles import (
    all_cycles,
    disjoint_rings,
    ring_limit,
    step_limit,
    torus_rings,
    torus_sides,
)
from topoplan.schedules.ring import single_ring, switched_rings
from topoplan.schedules.ring_forest import relay_rings, ring_forest
from topoplan.schedules.routes import DirectRoutes
from topoplan.schedules.server_rings import server_rings

PAIRS = ["01", "02", "03", "12", "13", "23", "45", "46", "47", "56", "57", "67", "04", "15", "26", "37"]
DOUBLED = ["03", "04", "12", "15", "23", "47", "56", "67"]
"""Links of DGX-1 (design, known answers); on DGX-1V the doubled ones have two wires."""


def wired(size: int, wires: Iterable[tuple[int, int, float, int]], name: str = "machine") -> Topology:
    """GPUs joined by NVLinks (a, b, GB/s of one wire, wires), both ways."""
    links = [
        Link(f"gpu{u}", f"gpu{v}", "nvlink", speed * count, count)
        for a, b, speed, count in wires
        for u, v in ((a, b), (b, a))
    ]
    return Topology(name, tuple(Device(f"gpu{i}", "gpu") for i in range(size)), tuple(links))


def dgx1(machine: str) -> Topology:
    """The NVLinks of a DGX-1 in units of one wire."""
    doubled = DOUBLED if machine == "dgx-1v" else []
    return wired(8, [(int(p[0]), int(p[1]), 1.0, 2 if p in doubled else 1) for p in PAIRS], machine)


def box(switch_of: list[int], *, link: float = 12.0, sockets: float = 40.0) -> Topology:
    """GPUs on PCIe switches, each switch on a CPU of its own."""
    switches = sorted(set(switch_of))
    wires = [(f"gpu{gpu}", f"pcie{switch}", "pcie", link) for gpu, switch in enumerate(switch_of)]
    wires += [(f"pcie{switch}", f"cpu{switch}", "pcie", link) for switch in switches]
    wires += [(f"cpu{a}", f"cpu{b}", "sys", sockets) for a, b in combinations(switches, 2)]
    devices = [Device(f"gpu{gpu}", "gpu") for gpu in range(len(switch_of))]
    devices += [Device(f"{kind}{switch}", kind) for kind in ("pcie", "cpu") for switch in switches]
    links = [Link(u, v, channel, bw) for a, b, channel, bw in wires for u, v in ((a, b), (b, a))]
    return Topology("box", tuple(devices), tuple(links))


def exact_rate(plan: Plan) -> Fraction:
    rate = verify(plan).exact_rate
    assert rate is not None
    return rate


def nvlink_ring(row: Allocation, collective: str) -> Plan | None:
    try:
        return ring_plan(dgx1(row.machine), collective, gpus=row.gpus, kind="nvlink")
    except InfeasibleError:
        return None


def test_every_known_allocation_has_the_known_number_of_rings_and_their_rates() -> None:
    """63 classes of DGX-1V and DGX-1P, from an independent enumeration; pairs of GPUs are counted there as 0."""
    assert len(allocations()) == 63
    for row in allocations():
        size = len(row.gpus)
        plan = nvlink_ring(row, "allreduce")
        if row.rings == 0 and size > 2:
            assert plan is None, row.gpus
            continue
        rings = row.links if size == 2 else row.rings
        known = Fraction(rings) if size == 2 else row.ring_allreduce
        assert plan is not None, row.gpus
        assert len(plan.shards) == rings * size, row.gpus
        assert "exhaustive" in plan.notes[0]
        assert exact_rate(plan) == known == Fraction(rings * size, 2 * (size - 1)), row.gpus
        broadcast = nvlink_ring(row, "broadcast")
        assert broadcast is not None
        assert exact_rate(broadcast) == rings, row.gpus


@pytest.mark.thorough
def test_all_247_allocations_of_a_dgx1v_have_a_ring_plan_that_verifies() -> None:
    """104 of the 197 that NVLink connects, and the 50 that it does not, fall back to PCIe."""
    machine = topoplan.load("dgx-1v")
    schedules = []
    for size in range(2, 9):
        for gpus in combinations(range(8), size):
            plan = ring_plan(machine, gpus=gpus)
            verify(plan)
            schedules.append((plan.schedule, plan.channels))
    assert schedules.count(("nvlink ring", ("nvlink",))) == 93
    assert schedules.count(("pcie ring", ("pcie",))) == 154


@pytest.mark.sampled
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("kind", ["nvlink", "pcie", "relay"])
def test_every_collective_over_every_kind_of_ring_verifies(collective: str, kind: str) -> None:
    plan = ring_plan("dgx-1v", collective, gpus=[0, 1, 3, 4, 5], kind=kind)
    assert plan.schedule == f"{kind} ring"
    assert plan.method == "ring"
    report = verify(plan)
    assert report.exact_bound is not None
    assert 0 < plan.rate <= plan.bound


def most_rings(lanes: list[list[int]]) -> int:
    """Largest number of disjoint Hamiltonian cycles, by trying all sets."""
    size = len(lanes)
    cycles = [list(zip((0, *rest), (*rest, 0), strict=True)) for rest in permutations(range(1, size))]

    def best(first: int) -> int:
        most = 0
        for number in range(first, len(cycles)):
            if all(lanes[u][v] > 0 for u, v in cycles[number]):
                for u, v in cycles[number]:
                    lanes[u][v] -= 1
                most = max(most, 1 + best(number))
                for u, v in cycles[number]:
                    lanes[u][v] += 1
        return most

    return best(0)


@settings(deadline=None, max_examples=30)
@given(
    st.integers(3, 5).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 2), min_size=n, max_size=n), min_size=n, max_size=n)
    )
)
def test_the_search_finds_as_many_rings_as_trying_all_sets(table: list[list[int]]) -> None:
    lanes = [[0 if u == v else count for v, count in enumerate(row)] for u, row in enumerate(table)]
    search = disjoint_rings(lanes)
    assert search.exhaustive
    assert len(search.rings) == most_rings(lanes) <= ring_limit(lanes)


@pytest.mark.parametrize(("limit", "value"), [("STEP_LIMIT", 40), ("CYCLE_LIMIT", 3), ("NODE_LIMIT", 2)])
def test_a_search_that_meets_its_limit_says_so_and_its_rings_are_still_disjoint(
    limit: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hamiltonian_cycles, limit, value)
    lanes = [[int(u != v) for v in range(6)] for u in range(6)]
    search = disjoint_rings(lanes)
    assert not search.exhaustive
    hops = [hop for order in search.rings for hop in zip(order, order[1:] + order[:1], strict=True)]
    assert len(hops) == len(set(hops)) == 6 * len(search.rings)


def grid_lanes(sides: tuple[int, ...], *, around: bool = True) -> list[list[int]]:
    """Return the lanes of a torus, or of a grid without the links that close its rings."""
    lanes = [[0] * prod(sides) for _ in range(prod(sides))]
    for point in product(*map(range, sides)):
        for place, side in enumerate(sides):
            if around or point[place] + 1 < side:
                other = (*point[:place], (point[place] + 1) % side, *point[place + 1 :])
                u, v = (int(np.ravel_multi_index(one, sides)) for one in (point, other))
                lanes[u][v] += 1
                lanes[v][u] += 1
    return lanes


@pytest.mark.parametrize(
    "sides",
    [(3, 3), (3, 4), (4, 4), (5, 4), (6, 6), (3, 50), (20, 21), (3, 3, 3), (4, 3, 5), (4, 4, 4, 3), (9,)],
)
def test_the_links_of_a_torus_are_a_union_of_hamiltonian_cycles(sides: tuple[int, ...]) -> None:
    """Kotzig 1973, Aubert and Schneider 1982."""
    lanes = grid_lanes(sides)
    assert torus_sides(lanes) == sides
    rings = torus_rings(sides)
    assert rings is not None
    assert all(sorted(ring) == list(range(len(lanes))) for ring in rings)
    hops = Counter(hop for ring in rings for hop in zip(ring, ring[1:] + ring[:1], strict=True))
    used = [[hops[u, v] + hops[v, u] for v in range(len(lanes))] for u in range(len(lanes))]
    assert used == lanes
    search = disjoint_rings(lanes)
    assert search.exhaustive
    assert len(search.rings) == len(set(search.rings)) == ring_limit(lanes) == 2 * len(sides)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sides", [*product(range(3, 10), repeat=2), *product(range(3, 6), repeat=3), (40, 40)]
)
def test_every_torus_of_sides_of_three_or_more_has_its_rings(sides: tuple[int, ...]) -> None:
    rings = torus_rings(sides)
    assert rings is not None
    hops = {hop for ring in rings for hop in zip(ring, ring[1:] + ring[:1], strict=True)}
    hops |= {(v, u) for u, v in hops}
    assert len(hops) == 2 * len(sides) * prod(sides)


def test_other_graphs_are_searched() -> None:
    lanes = grid_lanes((3, 4))
    lanes[0][1] += 1
    assert torus_sides(lanes) is None
    assert torus_sides(grid_lanes((4, 4), around=False)) is None
    assert torus_sides([[int(u != v) for v in range(5)] for u in range(5)]) is None
    # Two lanes each way between neighbours in the dimension of two.
    assert torus_sides(grid_lanes((2, 3))) == (2, 3)
    assert disjoint_rings(grid_lanes((2, 3))).rings


def test_a_search_among_many_vertices_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path of 1,100 vertices needs no recursion, and the limit falls with their number."""
    ring = grid_lanes((1100,))
    ring[0][700] = 1
    assert torus_sides(ring) is None
    assert all_cycles(ring, cycle_limit=1)[0] == [tuple(range(1100))]
    assert (step_limit(8), step_limit(64), step_limit(65), step_limit(1500)) == (
        200_000,
        200_000,
        100_000,
        8_333,
    )
    monkeypatch.setattr(hamiltonian_cycles, "STEP_LIMIT", 2_000)
    grid = grid_lanes((18, 18), around=False)
    assert not disjoint_rings(grid).exhaustive


@pytest.mark.thorough
def test_a_mesh_too_large_to_enumerate_gets_rings_and_a_note_that_more_may_exist() -> None:
    plan = ring_plan(wired(12, [(a, b, 1.0, 1) for a, b in combinations(range(12), 2)]))
    verify(plan)
    assert len(plan.shards) >= 12 * 6
    assert "more may exist" in plan.notes[0]


def test_a_thin_link_in_a_cycle_of_four_holds_the_rings_down_and_relaying_helps() -> None:
    """Thin wire t = 1/4: two rings of t give 4t/3; relaying over the path as well gives 2 (1 + t) / 3."""
    machine = wired(4, [(0, 1, 1.0, 1), (1, 2, 1.0, 1), (2, 3, 1.0, 1), (3, 0, 0.25, 1)])
    assert exact_rate(ring_plan(machine)) == Fraction(1, 3)
    relay = ring_plan(machine, kind="relay")
    assert exact_rate(relay) == Fraction(5, 6)
    assert "proved" in relay.notes[0]
    assert verify(relay).exact_bound == Fraction(13, 12)


def test_a_wire_of_twice_the_speed_has_room_for_two_rings() -> None:
    """A triangle whose third side is one wire of double speed is worth as much as one with two single wires."""
    fast = wired(3, [(0, 1, 2.0, 1), (1, 2, 1.0, 2), (0, 2, 1.0, 2)])
    single = wired(3, [(0, 1, 1.0, 2), (1, 2, 1.0, 2), (0, 2, 1.0, 2)])
    assert exact_rate(ring_plan(fast)) == exact_rate(ring_plan(single)) == 3


def best_relaying_mix(topology: Topology) -> float:
    """Total weight of the best mix of tours, from another program: flows between pairs that follow the orders."""
    from scipy.optimize import linprog

    fabric = Fabric(topology, ("nvlink",))
    size = fabric.size
    orders = [(0, *rest) for rest in permutations(range(1, size))]
    pairs = list(permutations(range(size), 2))
    links = fabric.ends
    columns = len(orders) + len(pairs) * len(links)
    balance = np.zeros((len(pairs) * size, columns))
    for p, (tail, head) in enumerate(pairs):
        for e, (src, dst) in enumerate(links):
            balance[p * size + src, len(orders) + p * len(links) + e] += 1
            balance[p * size + dst, len(orders) + p * len(links) + e] -= 1
        for o, order in enumerate(orders):
            if (tail, head) in zip(order, order[1:] + order[:1], strict=True):
                balance[p * size + tail, o] -= 1
                balance[p * size + head, o] += 1
    load = np.hstack([np.zeros((len(links), len(orders))), *[np.eye(len(links))] * len(pairs)])
    gain = np.zeros(columns)
    gain[: len(orders)] = -1
    capacity = [float(c) for c in fabric.capacity]
    return -float(linprog(gain, A_ub=load, b_ub=capacity, A_eq=balance, b_eq=np.zeros(len(balance))).fun)


@pytest.mark.parametrize(
    "gpus", [[3, 5, 7], [1, 4, 5, 7], pytest.param([1, 3, 4, 6, 7], marks=pytest.mark.thorough)]
)
def test_the_relaying_mix_is_the_optimum_of_an_independent_linear_program(gpus: list[int]) -> None:
    machine = dgx1("dgx-1v").subset(gpus)
    rings, proved = relay_rings(Fabric(machine, ("nvlink",)))
    assert proved
    assert float(sum(r.weight for r in rings)) == pytest.approx(best_relaying_mix(machine), rel=1e-9)


def test_beyond_nine_gpus_a_relaying_mix_is_proved_only_by_a_full_cut() -> None:
    """Two cliques of 5 with one wire between fill that cut; a 3 x 5 grid has no Hamiltonian cycle to fill its cuts."""
    cliques = [(a + k, b + k, 1.0, 1) for k in (0, 5) for a, b in combinations(range(5), 2)]
    bridged = ring_plan(wired(10, [*cliques, (4, 5, 1.0, 1)]), kind="relay")
    assert exact_rate(bridged) == Fraction(10, 18)
    assert "proved" in bridged.notes[0]
    grid = [(5 * r + c, 5 * r + c + 1, 1.0, 1) for r in range(3) for c in range(4)]
    grid += [(5 * r + c, 5 * r + c + 5, 1.0, 1) for r in range(2) for c in range(5)]
    plan = ring_plan(wired(15, grid), kind="relay")
    assert Fraction(15, 28) < exact_rate(plan) < Fraction(2 * 15, 28)
    assert "found by local search: a better mix may exist" in plan.notes[0]


@pytest.mark.parametrize("switch_of", [[0, 0, 1, 1], [1, 0, 0, 1, 0, 1], [0, 1] * 8])
def test_a_pcie_ring_on_two_switches_crosses_each_link_once_whatever_the_numbering(
    switch_of: list[int],
) -> None:
    size = len(switch_of)
    plan = ring_plan(box(switch_of), kind="pcie")
    assert plan.channels == ("pcie",)
    assert exact_rate(plan) == Fraction(12 * size, 2 * (size - 1))
    assert ring_plan(box(switch_of)).schedule == "pcie ring"


def test_a_pcie_ring_takes_the_best_of_all_orders() -> None:
    """On four switches with slow links between sockets no order beats the one found."""
    machine = box([2, 0, 1, 3, 1, 2], sockets=5.0)
    assert exact_rate(ring_plan(machine, kind="pcie")) == Fraction(5 * 6, 10)


@pytest.mark.parametrize("kind", ["nvlink", "relay", "auto"])
def test_behind_an_nvswitch_one_logical_ring_runs_at_the_port_rate(kind: str) -> None:
    """DGX-2: 150 x 16 / 30 = 80 GB/s, which is the optimum."""
    plan = ring_plan("dgx-2", kind=kind)
    assert exact_rate(plan) == verify(plan).exact_bound == 80
    assert plan.num_trees == 16
    if kind != "relay":
        assert "single logical ring over the NVSwitch" in plan.notes[0]


def test_two_gpus_have_one_ring_there_and_back_for_each_wire_and_one_has_none() -> None:
    machine = dgx1("dgx-1v")
    alone = ring_plan(machine, gpus=[5])
    assert (verify(alone).exact_rate, alone.num_trees) == (None, 0)
    assert exact_rate(ring_plan(machine, gpus=[0, 3])) == 2
    assert exact_rate(ring_plan(machine, "broadcast", gpus=[0, 1])) == 1


def test_a_one_way_cycle_has_one_ring() -> None:
    devices = tuple(Device(f"gpu{i}", "gpu") for i in range(5))
    links = tuple(Link(f"gpu{i}", f"gpu{(i + 1) % 5}", "nvlink", 3.0) for i in range(5))
    plan = ring_plan(Topology("one way", devices, links), "reduce", root=2)
    assert plan.root == 2
    assert exact_rate(plan) == 3


def test_the_root_is_named_by_gpu_number_and_stands_in_the_plan_by_rank() -> None:
    machine = dgx1("dgx-1v")
    plan = ring_plan(machine, "broadcast", gpus=[7, 5, 4], root=5)
    assert (plan.ranks, plan.root) == (("gpu7", "gpu5", "gpu4"), 1)
    assert {shard.stages[0].root for shard in plan.shards} == {1}
    assert ring_plan(machine, "reduce", gpus=[7, 5, 4]).root == 0


def test_where_there_is_no_ring_the_error_says_why_and_what_to_try() -> None:
    path = wired(3, [(0, 1, 1.0, 1), (1, 2, 1.0, 1)])
    with pytest.raises(
        InfeasibleError, match=r"no NVLink ring exists .* on gpu0, gpu1, gpu2; try kind relay"
    ):
        ring_plan(path, kind="nvlink")
    with pytest.raises(
        InfeasibleError, match=r"no PCIe path leaves the cut \{gpu0\}; .*kind relay"
    ) as caught:
        ring_plan(path)
    assert caught.value.cut == ("gpu0",)
    with pytest.raises(UsageError, match="ring kind 'nvl' is unknown; use one of auto, nvlink, pcie, relay"):
        ring_plan(path, kind="nvl")
    with pytest.raises(InfeasibleError, match=r"no NVLink path leaves the cut \{gpu0\}; try kind pcie"):
        ring_plan(box([0, 0]), kind="relay")


@st.composite
def direct_machines(draw: st.DrawFn) -> Topology:
    """Connected machines of 2 to 6 GPUs with wires of two speeds."""
    size = draw(st.integers(2, 6))
    tree = {(draw(st.integers(0, i - 1)), i) for i in range(1, size)}
    more = draw(st.sets(st.sampled_from(list(combinations(range(size), 2)))))
    speed, wires = st.sampled_from([1.0, 1.0, 2.5]), st.integers(1, 2)
    return wired(size, [(a, b, draw(speed), draw(wires)) for a, b in sorted(tree | more)])


@pytest.mark.thorough
@settings(deadline=None, max_examples=40)
@given(direct_machines(), st.sampled_from(COLLECTIVES))
def test_on_any_direct_machine_relaying_rings_verify_and_beat_the_nvlink_rings_allreduce(
    machine: Topology, collective: str
) -> None:
    verify(ring_plan(machine, collective, kind="relay"))
    try:
        direct = ring_plan(machine, kind="nvlink")
    except InfeasibleError:
        return
    assert exact_rate(ring_plan(machine, kind="relay")) >= exact_rate(direct)


def dgx_1v_servers(count: int) -> Topology:
    return topoplan.cluster([topoplan.Server("dgx-1v", count=count)], nic_gbps=100)


@pytest.mark.sampled
@pytest.mark.parametrize("servers", [2, 3])
def test_rings_fill_every_nic(servers: int) -> None:
    """Eight rings of 25 GB/s over N ranks: 200 N / (2 (N - 1)) for an allreduce, on rails that are not joined."""
    machine = topoplan.nvswitch_cluster(servers)
    size = 8 * servers
    ring = topoplan.ring_plan(machine)
    report = topoplan.verify(ring)
    assert ring.schedule == "network ring"
    assert report.exact_rate == Fraction(200 * size, 2 * (size - 1))
    assert {src for src, _ in report.bottleneck} == {
        *(f"s{s}.gpu{i}" for s in range(servers) for i in range(8)),
        *(f"s{s}.nic{i}" for s in range(servers) for i in range(8)),
        *("rail0", "rail1"),
    }


@pytest.mark.sampled
@pytest.mark.parametrize(("servers", "nics"), [(2, 1), (3, 2), (4, 3)])
def test_rings_fill_fewer_nics_than_gpus(servers: int, nics: int) -> None:
    """All NICs at their rate, both ways; GPUs without a NIC send through one that has it."""
    machine = topoplan.cluster([topoplan.Server("dgx-a100", count=servers)], nic_gbps=200, nics=nics)
    size = 8 * servers
    assert topoplan.verify(topoplan.ring_plan(machine)).exact_rate == Fraction(
        24 * nics * size, 2 * (size - 1)
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    "drawn",
    [
        {"network": "switch"},
        {"network": "rail-optimised"},
        {"network": "rail-optimised", "rails": 2},
        {"network": "rail-optimised", "oversubscription": 1.0},
        {"network": "fat-tree", "leaf_size": 1},
        {"network": "fat-tree", "leaf_size": 2},
    ],
    ids=["switch", "rails", "two rails", "spine", "leaves", "leaves of two"],
)
@pytest.mark.parametrize(("access", "nic"), [("direct", 50), ("pcie", 48)])
def test_the_rate_does_not_depend_on_how_the_network_is_drawn(
    drawn: dict[str, Any], access: str, nic: int
) -> None:
    """Three DGX H100: 8 NICs over 2 * 23 / 24 bytes, 208.696 GB/s with direct NICs, 200.348 behind PCIe slots."""
    made = topoplan.cluster([topoplan.Server("dgx-h100", count=3)], nic_gbps=400, nic_access=access, **drawn)
    assert topoplan.verify(topoplan.ring_plan(made)).exact_rate == Fraction(8 * nic * 24, 46)


def test_each_ring_enters_every_server_once_and_no_nic_carries_two() -> None:
    """Ranks of a server stand together in every order; the hops between servers part over all NICs."""
    fabric = usable_fabric(topoplan.nvswitch_cluster(3))
    rings = server_rings(fabric, DirectRoutes(fabric))
    assert len(rings) == 8
    crossed = Counter(link for ring in rings for hop in ring.hops for link in hop)
    network = {number for number, link in enumerate(fabric.links) if link.channel == "network"}
    assert {crossed[number] for number in network} == {1}
    for one in rings:
        home = [rank // 8 for rank in one.order]
        changes = sum(here != there for here, there in zip(home, home[1:] + home[:1], strict=True))
        assert changes == 3
        assert sorted(one.order) == list(range(fabric.size))


def test_servers_of_direct_links_are_walked_over_nvlink_alone() -> None:
    """Two DGX-1V with four NICs of 12 GB/s: four rings, 48 * 16 / 30 GB/s, where one ring has 12."""
    machine = dgx_1v_servers(2)
    fabric = usable_fabric(machine)
    assert sum(one.weight for one in switched_rings(fabric, DirectRoutes(fabric))) == 12
    for one in server_rings(fabric, DirectRoutes(fabric)):
        lengths = [len(hop) for hop in one.hops]
        assert sorted(lengths) == [1] * 14 + [4, 4]
    assert topoplan.verify(topoplan.ring_plan(machine)).exact_rate == Fraction(48 * 16, 30)


@pytest.mark.thorough
@pytest.mark.parametrize("collective", ["allreduce", "allgather", "reduce_scatter"])
@pytest.mark.parametrize("machine", [topoplan.nvswitch_cluster(8), dgx_1v_servers(14)], ids=["rails", "cube"])
def test_large_rings_are_few_chains_and_symmetries(machine: Topology, collective: str) -> None:
    """Written out, a compact ring is valid and has the same rate and loads; the chains are those of all rings."""
    ring = topoplan.ring_plan(machine, collective)
    assert isinstance(ring.shards, ImageShards)
    whole = replace(ring, shards=tuple(ring.shards))
    compact, spread = topoplan.verify(ring), topoplan.verify(whole)
    assert (compact.exact_rate, compact.loads) == (spread.exact_rate, spread.loads)
    fabric = usable_fabric(machine)
    rings = server_rings(fabric, DirectRoutes(fabric))
    assert len(whole.shards) == len(rings) * fabric.size
    assert len(set(whole.shards)) == len(whole.shards)
    again = topoplan.Plan.from_json(ring.to_json())
    assert topoplan.verify(again).exact_rate == compact.exact_rate


def test_a_ring_joins_all_gpus_or_is_none() -> None:
    """PCIe joins the four GPUs of a tray only."""
    machine = topoplan.load("gb200-nvl72")
    assert single_ring(Fabric(machine, ("pcie",))) is None
    one_tray = single_ring(Fabric(machine.subset([0, 1, 2, 3]), ("pcie",)))
    assert one_tray is not None
    assert one_tray.order == (0, 1, 2, 3)


@pytest.mark.thorough
def test_large_rings_without_symmetry_are_refused() -> None:
    """128 servers of which one NIC is slower: 16 million edges are not written out."""
    machine = topoplan.nvswitch_cluster(128)
    slow = topoplan.slow_links(machine, {"s0.nic0-rail0": 12.0})
    fabric = usable_fabric(slow)
    rings = server_rings(fabric, DirectRoutes(fabric))
    with pytest.raises(InfeasibleError, match="8 rings of 1024 GPUs have 16760832 edges"):
        ring_forest(rings, fabric, collective="allreduce", root=None)
    assert len(ring_forest(rings, fabric, collective="broadcast", root=0)) == len(rings)

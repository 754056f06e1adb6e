"""Three phases over servers: known rates, the shape of composed trees, even NICs, and the best of their kind."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

import topoplan
from collectives import Communicator
from tests.support.refusals import refused
from tests.support.small_fabrics import COLLECTIVES, ROOTED, parents_of_trees
from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.cluster import cluster, nvswitch_cluster
from topoplan.machine.cluster_network import Server
from topoplan.machine.fabric import Fabric, usable_fabric
from topoplan.machine.fabric_structure import FabricServers
from topoplan.machine.topology import Device, Link, Topology
from topoplan.model.candidates import candidates
from topoplan.plans.loads import link_loads
from topoplan.plans.plan import Plan
from topoplan.plans.shards import ImageShards
from topoplan.solve.packing.composition import compose

V100S = topoplan.load("dgx-1v")
NVLINK_ALONE = replace(V100S, links=tuple(link for link in V100S.links if link.channel == "nvlink"))


def blinks_pair(gbps: float, first: object = (4, 5, 7), second: object = (1, 2, 4, 5, 7)) -> Topology:
    """Two DGX-1V with 3 and 5 GPUs and one NIC each, which any GPU reaches at its full rate (Blink, figure 19b)."""
    servers = [Server(V100S, first), Server(V100S, second)]  # type: ignore[arg-type]
    return cluster(servers, nic_gbps=gbps, nics=1, nic_access="direct")


def home(plan: Plan) -> list[str]:
    return [plan.topology.device(name).server for name in plan.ranks]


def crossings(plan: Plan) -> list[list[tuple[str, int, int]]]:
    """For every shard, its edges between servers as (op, parent, child)."""
    where = home(plan)
    edges = [[(s.op, e.parent, e.child) for s in shard.stages for e in s.edges] for shard in plan.shards]
    return [[edge for edge in own if where[edge[1]] != where[edge[2]]] for own in edges]


@pytest.mark.parametrize(("gbps", "rate"), [(40, 5.0), (100, 12.5), (400, 50.0)])
def test_blinks_projection_of_figure_19b(gbps: float, rate: float) -> None:
    """The NIC limits at 40 and 100 Gb/s (Blink: 5.0 and 12.3); at 400 it and two NVLinks inside (34.7, measured)."""
    plan = topoplan.three_phase(blinks_pair(gbps))
    assert (plan.rate, plan.gap, plan.schedule) == (rate, 0, "three-phase")
    assert topoplan.verify(plan).optimal


@pytest.mark.parametrize(("servers", "nic"), [(2, 5.0), (3, 25.0), (8, 100.0)])
def test_the_rate_on_equal_servers_is_blinks_formula(servers: int, nic: float) -> None:
    """min(NIC n / (2 (n - 1)), local rate), where NIC is all the bandwidth of a server: 4 GPUs on an NVSwitch."""
    fabric = nvswitch_cluster(servers, gpus=4, nic=nic)
    local = topoplan.verify(topoplan.plan(fabric, gpus=range(4))).exact_rate
    assert local is not None
    made = topoplan.verify(topoplan.three_phase(fabric))
    assert made.exact_rate == min(4 * Fraction(nic) * servers / (2 * (servers - 1)), local)


def test_each_server_owns_an_equal_part() -> None:
    """Of n equal servers the roots of each own 1/n of the buffer."""
    plan = topoplan.three_phase(nvswitch_cluster(5))
    owned: Counter[str] = Counter()
    for shard in plan.shards:
        owned[home(plan)[shard.stages[0].root]] += shard.share  # type: ignore[assignment]
    assert set(owned.values()) == {Fraction(1, 5)}


def test_what_composition_gives_up_is_said_and_bounded_by_the_general_optimum() -> None:
    """GPU 3 of 3 to 7 hangs on one NVLink: three phases get 25 GB/s, trees that relay over the network 37.5."""
    pair = blinks_pair(400, (0, 1, 2), range(3, 8))
    plan = topoplan.three_phase(pair)
    best = topoplan.plan(pair)
    assert (plan.rate, plan.bound, best.rate) == (25.0, 37.5, 37.5)
    said = "three phases stay 33.33% below the bound of 37.5 GB/s on any plan over these links"
    assert plan.notes == (said,)


@pytest.mark.thorough
def test_without_the_exact_method_the_plan_says_so() -> None:
    """Two DGX-2 have 32 GPUs: the bound is from flows, and a note tells."""
    plan = topoplan.three_phase(cluster([Server(topoplan.load("dgx-2"), count=2)], nic_gbps=800))
    assert plan.gap > 0
    assert plan.notes[1] == "with more than 16 GPUs the exact method was not run for a lower bound"


@pytest.mark.thorough
def test_broadcast_over_many_servers_is_optimal_and_quick() -> None:
    """16 servers of the DGX A100 shape: 8 NICs of 25 GB/s leave the root's server; the planner composes it too."""
    fabric = nvswitch_cluster(16)
    composed = topoplan.three_phase(fabric, "broadcast")
    assert (composed.rate, composed.bound, len(composed.ranks)) == (200.0, 200.0, 128)
    general = topoplan.plan(fabric, "broadcast", root=9)
    assert (general.rate, general.gap, general.method, general.schedule) == (200.0, 0, "exact", "three-phase")
    assert topoplan.verify(general).optimal


@pytest.mark.parametrize("counts", [(3, 5), (8, 8, 3)])
def test_every_shard_has_one_local_root_in_each_server(counts: tuple[int, ...]) -> None:
    """The edges between servers are a star of local roots, the same one up and down, on servers of any size."""
    plan = topoplan.three_phase(cluster([Server(V100S, range(count)) for count in counts], nic_gbps=100))
    for edges in crossings(plan):
        up = {(parent, child) for op, parent, child in edges if op == "reduce"}
        assert up == {(parent, child) for op, parent, child in edges if op == "broadcast"}
        assert len({parent for parent, _ in up}) == 1
        assert len(edges) == 2 * (len(counts) - 1)
        servers = {home(plan)[rank] for pair in up for rank in pair}
        assert len(servers) == len(counts)


def test_only_gpus_with_a_way_to_the_network_are_local_roots() -> None:
    """Two NICs of a DGX-1V serve GPUs 0 to 3; the others hang below these."""
    plan = topoplan.three_phase(cluster([Server(V100S, count=2)], nic_gbps=100, nics=2))
    ranks = {rank for edges in crossings(plan) for _, *pair in edges for rank in pair}
    assert {plan.ranks[rank].split(".")[1] for rank in ranks} <= {"gpu0", "gpu1", "gpu2", "gpu3"}
    assert (plan.rate, plan.gap) == (24.0, 0)


def test_trees_inside_servers_are_as_low_as_the_rate_allows() -> None:
    """One hop inside an NVSwitch, one between servers, one inside: height 2 where the centre is the root."""
    assert topoplan.three_phase(nvswitch_cluster(4)).height == 2
    assert topoplan.three_phase(cluster([Server(V100S, count=2)], nic_gbps=100)).height == 3


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("first", "second"), [(range(3), range(3, 8)), (range(8), range(4)), (range(5), [0, 1, 2, 3, 4, 6])]
)
@pytest.mark.parametrize("collective", ["allreduce", "broadcast"])
def test_nics_of_a_server_are_evenly_loaded(first: object, second: object, collective: str) -> None:
    """Each server's NICs carry equal parts, though one server has more of them than the other can feed."""
    pair = [Server(V100S, first), Server(V100S, second)]  # type: ignore[arg-type]
    plan = topoplan.three_phase(cluster(pair, nic_gbps=80), collective)
    fabric = Fabric(plan.topology, plan.channels)
    loads: dict[tuple[str, str], set[Fraction]] = {}
    for link, load in zip(fabric.links, link_loads(plan.shards, fabric), strict=True):
        if link.dst == "switch0":
            loads.setdefault((link.src.split(".")[0], "out"), set()).add(load)
        if link.src == "switch0":
            loads.setdefault((link.dst.split(".")[0], "in"), set()).add(load)
    assert plan.gap == 0
    assert len(loads) == 4
    assert all(len(values) == 1 for values in loads.values())


@st.composite
def small_clusters(draw: st.DrawFn) -> Topology:
    """2 or 3 servers of 1 to 3 GPUs on NVLinks of any width; some GPUs have a NIC of any width, each way its own."""
    widths = st.integers(1, 6).map(float)
    devices, links = [Device("switch0", "switch")], []
    for number in range(draw(st.integers(2, 3))):
        count = draw(st.integers(1, 3))
        gpus = [f"s{number}.gpu{i}" for i in range(count)]
        devices += [Device(gpu, "gpu", f"s{number}") for gpu in gpus]
        for i, gpu in enumerate(gpus):
            for other in gpus[:i]:
                if other == gpus[i - 1] or draw(st.booleans()):
                    links += [Link(*ends, "nvlink", draw(widths)) for ends in ((gpu, other), (other, gpu))]
            if i == 0 or draw(st.booleans()):
                nic = f"s{number}.nic{i}"
                devices.append(Device(nic, "nic", f"s{number}"))
                out, back = draw(widths), draw(widths)
                for a, b in ((gpu, nic), (nic, "switch0")):
                    links += [Link(a, b, "network", out), Link(b, a, "network", back)]
    return Topology("small", tuple(devices), tuple(links))


def trees_from(root: int, members: list[int], joined: set[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """All trees (parent, child) over some ranks from a root."""
    trees = parents_of_trees(len(members), members.index(root))
    found = [[(members[up], members[child]) for child, up in tree.items()] for tree in trees]
    return [edges for edges in found if set(edges) <= joined]


def best_by_enumeration(fabric: Fabric) -> float:
    """The allreduce of highest rate over all composed trees, each a column, by another solver."""
    servers = FabricServers(fabric)
    members = [part.tolist() for part in servers.members]
    arcs = {
        (arc.tail, arc.head): arc.links
        for arc in fabric.arcs
        if not (servers.same[arc.tail, arc.head] and servers.crossing[list(arc.links)].any())
    }
    inside = {pair for pair in arcs if servers.same[pair]}
    columns = []
    for roots in product(*members):
        for centre in roots:
            others = [root for root in roots if root != centre]
            if not all((centre, root) in arcs and (root, centre) in arcs for root in others):
                continue
            star = [(centre, root) for root in others]
            backwards = {(b, a) for a, b in inside}
            up = product(*(trees_from(r, part, backwards) for r, part in zip(roots, members, strict=True)))
            down = product(*(trees_from(r, part, inside) for r, part in zip(roots, members, strict=True)))
            ups = [tuple((b, a) for tree in trees for a, b in tree) for trees in up]
            downs = [tuple(edge for tree in trees for edge in tree) for trees in down]
            for rising, falling in product(ups, downs):
                use = np.zeros(len(fabric.links))
                for pair in (*rising, *falling, *star, *((b, a) for a, b in star)):
                    for link in arcs[pair]:
                        use[link] += 1
                columns.append(use)
    table = np.unique(np.array(columns), axis=0)
    capacity = [float(c) for c in fabric.capacity]
    solved = linprog(-np.ones(len(table)), A_ub=table.T, b_ub=capacity, method="highs")
    assert solved.success
    return float(-solved.fun)


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(small_clusters())
def test_no_composition_is_faster(topology: Topology) -> None:
    """The rate is that of a program over all composed trees, written out and solved by HiGHS."""
    fabric = usable_fabric(topology)
    plan = topoplan.three_phase(topology)
    assert plan.rate == pytest.approx(best_by_enumeration(fabric), rel=1e-6)


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(small_clusters(), st.sampled_from(COLLECTIVES), st.data())
def test_plans_are_valid_and_never_above_the_bound(
    topology: Topology, collective: str, data: st.DataObject
) -> None:
    """On any small cluster, for every collective and root; the bound is that of the general optimum."""
    root = data.draw(st.integers(0, len(topology.gpus) - 1)) if collective in ROOTED else None
    plan = topoplan.three_phase(topology, collective, root=root)
    checked = topoplan.verify(plan)
    best = topoplan.verify(topoplan.plan(topology, collective, root=root))
    assert checked.exact_rate is not None
    assert best.exact_rate is not None
    assert checked.exact_rate <= best.exact_rate <= (checked.exact_bound or 0)


MACHINES = {
    "pcie-x8": {"nic_gbps": 100},
    "dgx-1p": {"nic_gbps": 40, "network": "rail-optimised"},
    "dgx-a100": {"nic_gbps": 200, "network": "fat-tree", "leaf_size": 2, "oversubscription": 2},
    "mi250x": {"nic_gbps": 100},
    "v100x4": {"nic_gbps": 400, "nics": 2},
}


@pytest.mark.sampled
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("name", MACHINES)
def test_three_servers_of_library_machines(name: str, collective: str) -> None:
    """Every network and channel: valid, and no bound is exceeded."""
    plan = topoplan.three_phase(cluster([Server(topoplan.load(name), count=3)], **MACHINES[name]), collective)
    checked = topoplan.verify(plan)
    assert checked.exact_rate is not None
    assert checked.exact_rate <= (checked.exact_bound or 0)


@pytest.mark.parametrize("collective", ["allreduce", "broadcast"])
def test_sums_in_the_communicator_are_exact_and_alike(collective: str) -> None:
    """3 + 5 ranks, an element count that no share divides: every rank ends with the sum, or the root's data."""
    plan = topoplan.three_phase(blinks_pair(400, range(3), range(3, 8)), collective)
    given_arrays = [np.arange(1237, dtype=np.int64) * (rank + 1) for rank in range(8)]
    with Communicator(plan, chunk_bytes=512) as comm:
        if collective == "allreduce":
            found = comm.all_reduce(given_arrays)
            wanted = sum(given_arrays[1:], given_arrays[0])
        else:
            found = comm.broadcast(given_arrays)
            wanted = given_arrays[0]
    assert all(np.array_equal(array, wanted) for array in found)


def test_large_plans_stay_compact_and_say_the_same() -> None:
    """Templates and their images load every link as all shards written out do; the file reads back equal."""
    plan = topoplan.three_phase(nvswitch_cluster(18))
    assert isinstance(plan.shards, ImageShards)
    assert len(plan.shards.templates) < len(plan.shards) == 144
    fabric = Fabric(plan.topology, plan.channels)
    assert link_loads(plan.shards, fabric) == link_loads(tuple(plan.shards), fabric)
    assert Plan.from_json(plan.to_json()) == plan


def test_three_phases_compete_by_size_only_over_servers() -> None:
    """They are a candidate under the same bound as the general trees; on one server there is none."""
    plans, notes = candidates(blinks_pair(400, range(3), range(3, 8)))
    assert [(one.rate, one.bound) for one in plans if one.schedule == "three-phase"] == [(25.0, 37.5)]
    plans, _ = candidates(V100S, gpus=[0, 1, 2])
    assert "three-phase" not in {one.schedule for one in plans}
    _, notes = candidates(cluster([Server(NVLINK_ALONE, [1, 4], count=2)], nic_gbps=100))
    assert any(note.startswith("no three phases: three phases need the GPUs of s0 conn") for note in notes)


def test_one_server_is_refused() -> None:
    """Also where an allocation leaves the others out; one GPU alone moves nothing."""
    pair = cluster([Server(V100S, count=2)], nic_gbps=100)
    with pytest.raises(UsageError, match="two servers or more, and all 3 are on s1; plan trees instead"):
        topoplan.three_phase(pair, gpus=[8, 9, 10])
    assert topoplan.three_phase(pair, gpus=[3]).schedule == "trivial"


@pytest.mark.thorough
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_servers_that_are_no_stars_are_composed_first(collective: str) -> None:
    """128 MI250 GPUs: every collective at its bound in three phases, though the method asked for is exact."""
    machine = cluster([Server(topoplan.load("mi250"), count=8)], nic_gbps=128, nics=8, nic_access="direct")
    made = topoplan.plan(machine, collective, root=0 if collective in ROOTED else None)
    assert (made.gap, made.schedule, made.method) == (0, "three-phase", "exact")
    assert topoplan.verify(made).rate == made.rate


def test_a_server_that_is_not_connected_inside_is_refused() -> None:
    """GPUs 1 and 4 of a DGX-1V share no NVLink: the cut is named. PCIe would join them."""
    assert topoplan.three_phase(cluster([Server(V100S, [1, 4], count=2)], nic_gbps=100)).channels == (
        "pcie",
        "network",
    )
    pair = cluster([Server(NVLINK_ALONE, [1, 4], count=2)], nic_gbps=100)
    with refused(InfeasibleError, "no nvlink path leads from {s0.gpu1} to {s0.gpu4}") as caught:
        topoplan.three_phase(pair)
    cut = caught.value.cut  # type: ignore[attr-defined]
    assert ("s0.gpu1" in cut, "s0.gpu4" in cut) == (True, False)
    assert topoplan.plan(pair).rate > 0


def test_servers_that_no_star_joins_are_refused() -> None:
    """A chain of three servers over two rails: the one in the middle relays, which is no single hop."""
    devices = [Device("rail0", "switch"), Device("rail1", "switch")]
    links = []
    for server, gpu, rail in ((0, 0, 0), (1, 0, 0), (1, 1, 1), (2, 0, 1)):
        devices.append(Device(f"s{server}.gpu{gpu}", "gpu", f"s{server}"))
        ends = (f"s{server}.gpu{gpu}", f"rail{rail}")
        links += [Link(*ends, "network", 5.0), Link(*ends[::-1], "network", 5.0)]
    links += [Link(f"s1.gpu{i}", f"s1.gpu{1 - i}", "nvlink", 20.0) for i in range(2)]
    chain = Topology("chain", tuple(devices), tuple(links))
    with pytest.raises(InfeasibleError, match="reaches one of every other server in one hop and back"):
        topoplan.three_phase(chain)
    assert topoplan.plan(chain).rate > 0


def test_symmetries_that_mix_servers_are_left_out() -> None:
    """Two servers of two GPUs in a ring of equal wires: turning it by one is no symmetry of the servers."""
    names = ["a.gpu0", "a.gpu1", "b.gpu0", "b.gpu1"]
    links = [Link(names[i], names[j % 4], "nvlink", 10.0) for i in range(4) for j in (i + 1, i + 3)]
    fabric = Fabric(Topology("ring", tuple(Device(n, "gpu", n[0]) for n in names), tuple(links)), ("nvlink",))
    servers = FabricServers(fabric)
    assert not servers.keeps([1, 2, 3, 0])
    assert servers.keeps([2, 3, 0, 1])
    stages = [stage for shard in compose(fabric, "allreduce").shards for stage in shard.stages]
    assert all(len(stage.edges) == 3 for stage in stages)

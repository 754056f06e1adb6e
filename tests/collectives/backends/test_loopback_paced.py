"""Paced links: the arithmetic of time on a clock of our own, the bits of the unpaced back end, bounded memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import topoplan
from collectives import Communicator, lower
from collectives.backends.backend import RankArrays
from collectives.backends.loopback.paced_loopback import (
    AHEAD,
    BURST,
    ChunkMover,
    LinkPlayer,
    PacedLoopback,
    crossings,
    paced_links_of,
    recut,
)
from collectives.tables.lowering import PlanKey
from collectives.tables.transfer_table import EdgeStream, TransferTable, streams
from tests.support.hand_plans import plan_of, stage
from topoplan.errors import UsageError
from topoplan.machine.cluster import cluster
from topoplan.machine.cluster_network import Server
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Device, Link, Topology
from topoplan.model.dataflow import START_UP
from topoplan.plans.loads import link_loads
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Shard

Array = NDArray[Any]


class OwnClock:
    """Time passes only while somebody waits; ``late(n)`` seconds too long the n-th time."""

    def __init__(self, late: Callable[[int], float] = lambda wait: 0.0) -> None:
        self.time = 100.0
        self.waits = 0
        self.late = late

    def now(self) -> float:
        return self.time

    def wait_until(self, moment: float) -> None:
        self.time = max(self.time, moment) + self.late(self.waits)
        self.waits += 1


def player_of(
    plan: Plan,
    table: TransferTable,
    move: Callable[[EdgeStream, int, int], None],
    *,
    scale: float,
    itemsize: int,
) -> LinkPlayer:
    wires = paced_links_of(PlanKey(plan.digest, plan), table)
    paces = wires.paces(itemsize, scale, [None] * len(wires.parts))
    return LinkPlayer(
        wires.parts,
        wires.routes,
        paces,
        ranks=len(plan.ranks),
        chunk_elements=table.chunk_elements,
        move=move,
    )


def seconds(
    plan: Plan,
    nbytes: int,
    *,
    chunk_bytes: int,
    scale: float = 1.0,
    clock: OwnClock | None = None,
    move: Callable[[EdgeStream, int, int], None] = lambda part, start, stop: None,
) -> float:
    """How long a buffer takes."""
    table = lower(plan, nbytes, chunk_elements=chunk_bytes)
    return player_of(plan, table, move, scale=scale, itemsize=1).play(clock or OwnClock())


def chain_plan(size: int) -> Plan:
    """A broadcast along a chain of 1 GB/s links."""
    tree = {rank: rank - 1 for rank in range(1, size)}
    return plan_of(size, "broadcast", [Shard(Fraction(1), (stage("broadcast", 0, tree),))], root=0)


@pytest.mark.parametrize(("size", "chunks"), [(2, 1), (2, 10), (5, 1), (5, 40)])
def test_a_chain_takes_the_time_of_the_pipeline_formula(size: int, chunks: int) -> None:
    """(H + k - 1) (alpha + s / (k c)) for H hops and k chunks."""
    nbytes = 40_000_000
    took = seconds(chain_plan(size), nbytes, chunk_bytes=nbytes // chunks)
    hop = START_UP["nvlink"] + nbytes / chunks / 1e9
    assert took == pytest.approx((size - 1 + chunks - 1) * hop, rel=1e-9)


def test_the_scale_multiplies_every_bandwidth_and_no_latency() -> None:
    took = seconds(chain_plan(2), 1_000_000, chunk_bytes=1_000_000, scale=0.01)
    assert took == pytest.approx(START_UP["nvlink"] + 0.1, rel=1e-9)


def test_a_stated_latency_delays_every_chunk() -> None:
    plan = chain_plan(2)
    slow = tuple(replace(link, latency=0.5) for link in plan.topology.links)
    plan = replace(plan, topology=replace(plan.topology, links=slow))
    assert seconds(plan, 3_000_000, chunk_bytes=1_000_000) == pytest.approx(3 * 0.501, rel=1e-9)


def thin_link_cycle() -> Topology:
    names = [f"gpu{rank}" for rank in range(4)]
    pairs = [(names[rank], names[(rank + 1) % 4], 25.0 if rank == 3 else 100.0) for rank in range(4)]
    links = [Link(*ends, "nvlink", bandwidth) for a, b, bandwidth in pairs for ends in ((a, b), (b, a))]
    return Topology("cycle", tuple(Device(name, "gpu") for name in names), tuple(links))


def behind_nics() -> Topology:
    return cluster([Server(topoplan.load("dgx-1v"), gpus=[0, 1], count=2)], nic_gbps=10)


def in_network() -> Topology:
    """A DGX H100 whose switches copy and add."""
    machine = topoplan.load("dgx-h100")
    devices = tuple(
        replace(d, multicast=d.kind == "nvswitch", reduce=d.kind == "nvswitch") for d in machine.devices
    )
    return replace(machine, devices=devices)


def dgx(gpus: list[int], channels: str = "auto") -> Callable[[], Plan]:
    return lambda: topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=gpus, channels=channels)


PLANS: dict[str, Callable[[], Plan]] = {
    "cycle": lambda: topoplan.plan(thin_link_cycle(), "allreduce"),
    "cycle ring": lambda: topoplan.ring(thin_link_cycle(), "allreduce"),
    "dgx-1v": dgx([0, 1, 2, 3, 4, 5, 6, 7]),
    "dgx-1v, six": dgx([0, 1, 2, 3, 4, 5]),
    "dgx-1v, pcie ring": lambda: topoplan.ring(topoplan.load("dgx-1v"), "allreduce", gpus=[1, 4, 5, 7]),
    "dgx-1v, split": dgx([0, 1, 2, 3], "nvlink+pcie"),
    "dgx-2": lambda: topoplan.plan(topoplan.load("dgx-2"), "allreduce"),
    "two servers": lambda: topoplan.plan(behind_nics(), "allreduce"),
    "two servers, ring": lambda: topoplan.ring(behind_nics(), "allreduce"),
    "in the network": lambda: topoplan.plan(in_network(), "allreduce"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", PLANS)
def test_at_64_mb_time_is_within_5_percent_of_the_simulation_and_of_the_rate(name: str) -> None:
    """With the chunks that the back end chooses, at a scale at which the rate alone gives two seconds."""
    plan = PLANS[name]()
    count = 16 << 20
    scale = 4 * count / (plan.rate * 1e9 * 2)
    key = PlanKey(plan.digest, plan)
    table = recut(key, lower(plan, count, chunk_elements=1 << 16), itemsize=4, scale=scale)
    took = player_of(plan, table, lambda *_: None, scale=scale, itemsize=4).play(OwnClock())
    assert took == pytest.approx(topoplan.simulate(plan, nbytes=round(4 * count / scale)).seconds, rel=0.05)
    assert 2 / took >= 0.95


def test_trees_of_unequal_weight_keep_their_parts_of_a_shared_link() -> None:
    """Six GPUs of a DGX-1V: by chunk index alone the rate would be missed by a sixth, however many chunks."""
    plan = PLANS["dgx-1v, six"]()
    assert len({shard.share for shard in plan.shards}) > 1
    nbytes = round(plan.rate * 1e9)
    assert seconds(plan, nbytes, chunk_bytes=nbytes // 500) == pytest.approx(1, rel=0.03)


@pytest.mark.parametrize("name", [*PLANS, "dgx-1v, gather"])
def test_crossings_load_every_link_as_the_rate_counts_it(name: str) -> None:
    machine = topoplan.load("dgx-1v")
    plan = PLANS[name]() if name in PLANS else topoplan.plan(machine, "allgather")
    fabric = Fabric(plan.topology, plan.channels)
    parts = streams(lower(plan, 8 * 9 * 5 * 7 * 1000, chunk_elements=1 << 20))
    found = crossings(plan, fabric, parts)
    loads = [Fraction(0)] * len(fabric.links)
    for link, members in zip(found.link, found.members, strict=True):
        loads[link] += plan.shards[parts[members[0]].shard].share
    assert loads == link_loads(plan.shards, fabric)
    for part, path in zip(parts, found.paths, strict=True):
        crossed = [fabric.links[found.link[at]] for at in path]
        assert (crossed[0].src, crossed[-1].dst) == (plan.ranks[part.source], plan.ranks[part.destination])
        assert all(one.dst == after.src for one, after in pairwise(crossed))


def test_waking_late_by_less_than_the_burst_is_made_good() -> None:
    exact = seconds(chain_plan(3), 10**8, chunk_bytes=10**6)
    took = seconds(chain_plan(3), 10**8, chunk_bytes=10**6, clock=OwnClock(lambda wait: 0.9 * BURST))
    assert exact <= took <= exact + 0.9 * BURST + 1e-9


def test_of_one_long_delay_only_the_burst_is_made_good() -> None:
    exact = seconds(chain_plan(3), 10**9, chunk_bytes=10**6)
    stalled = OwnClock(lambda wait: 1.0 if wait == 700 else 0.0)
    assert seconds(chain_plan(3), 10**9, chunk_bytes=10**6, clock=stalled) == pytest.approx(exact + 1 - BURST)


@given(st.lists(st.floats(0, 3 * BURST), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_no_link_carries_more_than_its_bandwidth_and_a_burst_whatever_wakes_late(late: list[float]) -> None:
    """Between any two moments at which chunks leave a link of 1 GB/s; it is never done too early either."""
    clock = OwnClock(lambda wait: late[wait % len(late)])
    left: list[float] = []
    plan, chunk = chain_plan(2), 5_000_000
    took = seconds(
        plan, 100 * chunk, chunk_bytes=chunk, clock=clock, move=lambda *_: left.append(clock.now())
    )
    assert took >= 100 * (chunk / 1e9 + START_UP["nvlink"]) - 1e-9
    for first in range(100):
        for last in range(first + 1, 100):
            assert (last - first) * chunk / 1e9 <= left[last] - left[first] + BURST + 1e-9


@pytest.mark.parametrize("name", ["dgx-1v", "dgx-1v, split", "two servers", "in the network"])
def test_switches_and_channels_do_not_change_results(name: str) -> None:
    plan = PLANS[name]()
    ranks = len(plan.ranks)
    arrays = [np.arange(5003) * (rank + 1) for rank in range(ranks)]
    with Communicator(plan, PacedLoopback(ranks, scale=1e-3, clock=OwnClock())) as comm:
        results = comm.all_reduce(arrays, out=arrays)
    assert all(np.array_equal(one, np.arange(5003) * (ranks * (ranks + 1) // 2)) for one in results)


def test_what_passes_through_a_rank_is_bounded_though_the_next_link_is_slow() -> None:
    """Data arrives at rank 1 a thousand times as fast as it can leave."""
    tree = stage("reduce", 0, {1: 0, 2: 1})
    plan = plan_of(3, "reduce", [Shard(Fraction(1), (tree,))], root=0)
    links = tuple(
        replace(link, bandwidth=1000.0 if link.src == "gpu2" else 1.0) for link in plan.topology.links
    )
    plan = replace(plan, topology=replace(plan.topology, links=links), bound=1001.0)
    arrays = [np.ones(4 << 20, np.float32) for _ in range(3)]
    chunk_bytes = 16 << 10
    backend = PacedLoopback(3, clock=OwnClock())
    with Communicator(plan, backend, chunk_bytes=chunk_bytes) as comm:
        out = comm.reduce(arrays)
        tracemalloc.start()
        comm.reduce(arrays, out=out)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert out[0] is not None
    assert (out[0] == 3).all()
    assert peak < (AHEAD + 4) * chunk_bytes + (256 << 10) < arrays[0].nbytes / 10


@pytest.mark.thorough
def test_the_limit_on_what_is_passed_on_costs_no_time() -> None:
    plan = topoplan.plan(topoplan.load("dgx-1v"), "reduce")
    arrays = [np.ones(1 << 20, np.float32) for _ in range(8)]
    clock = OwnClock()
    with Communicator(plan, PacedLoopback(8, scale=1e-5, clock=clock)) as comm:
        comm.reduce(arrays)
    assert clock.time - 100 == pytest.approx((4 << 20) / (plan.rate * 1e4), rel=0.05)


def test_an_error_while_data_moves_ends_the_call() -> None:
    """A result that cannot be written, which the communicator would have refused."""
    plan = chain_plan(2)
    parts = streams(lower(plan, 160, chunk_elements=48))
    source, target = np.ones(160), np.zeros(160)
    target.setflags(write=False)
    memory = (
        RankArrays(0, (0, 160), source, (0, 160), source),
        RankArrays(1, (0, 160), source, (0, 160), target),
    )
    mover = ChunkMover(parts, memory, np.add, chunk_elements=48)
    with pytest.raises(ValueError, match="read-only"):
        seconds(plan, 160, chunk_bytes=48, move=mover.move)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_links_that_carry_nothing_are_refused(scale: float) -> None:
    with pytest.raises(UsageError, match="scale must be above 0 and finite"):
        PacedLoopback(4, scale=scale)

"""Model time of compact plans: templates and symmetries give the time of all the shards that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

import topoplan
from topoplan.errors import UsageError
from topoplan.machine.fabric import usable_fabric
from topoplan.machine.fabric_structure import orbits
from topoplan.machine.topology import Topology
from topoplan.model import event_simulation
from topoplan.model.closed_form import clock, simulate
from topoplan.model.dataflow import dataflow
from topoplan.model.event_simulation import run_events
from topoplan.plans.plan import Plan
from topoplan.plans.shards import ImageShards, Shard
from topoplan.solve.symmetry.symmetry_search import find_symmetry

SIZES = (1 << 10, 1 << 20, 100_000_007, 1 << 30)

MACHINES = {
    "2 servers": partial(topoplan.nvswitch_cluster, 2),
    "dgx-1v": partial(topoplan.load, "dgx-1v"),
    "dgx-2": partial(topoplan.load, "dgx-2"),
    "mi250": partial(topoplan.load, "mi250"),
    "3 cubes": lambda: topoplan.cluster([topoplan.Server("dgx-1v", count=3)], nic_gbps=100),
}


def compact(machine: Topology, collective: str) -> Plan:
    """A plan of all images of the trees of one rank of each orbit, each with its share."""
    plan = topoplan.plan(machine, collective)
    fabric = usable_fabric(machine)
    generators = tuple(tuple(each.tolist()) for each in find_symmetry(fabric))
    assert generators, "the machine has symmetries"
    orbit = orbits(len(fabric.nodes), list(map(list, generators)))[: fabric.size].tolist()
    first = {rank for rank in range(fabric.size) if orbit[rank] == rank}
    chosen = [shard for shard in plan.shards if shard.stages[-1].root in first]
    counts = ImageShards(fabric.nodes, fabric.size, generators, tuple(chosen)).counts
    total = sum(shard.share * count for shard, count in zip(chosen, counts, strict=True))
    templates = tuple(Shard(shard.share / total, shard.stages) for shard in chosen)
    return replace(plan, shards=ImageShards(fabric.nodes, fabric.size, generators, templates))


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ["allgather", "allreduce", "reduce_scatter"])
@pytest.mark.parametrize("name", MACHINES)
def test_templates_take_the_time_of_all_their_images(name: str, collective: str) -> None:
    """Written out, every plan has the same time, latency and busy links, whatever its symmetries fix."""
    plan = compact(MACHINES[name](), collective)
    whole = replace(plan, shards=tuple(plan.shards))
    assert len(whole.shards) > len(plan.shard_counts)
    for nbytes in SIZES:
        for chunk_bytes in (None, 1 << 16):
            one = simulate(plan, nbytes=nbytes, chunk_bytes=chunk_bytes)
            other = simulate(whole, nbytes=nbytes, chunk_bytes=chunk_bytes)
            assert one.seconds == pytest.approx(other.seconds, rel=1e-12)
            assert one.latency_seconds == pytest.approx(other.latency_seconds, rel=1e-12)
            assert one.link_bytes == pytest.approx(other.link_bytes, rel=1e-12)
            assert set(one.chunks) == set(other.chunks)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "hops"),
    [
        (lambda: topoplan.plan(topoplan.nvswitch_cluster(16), "allreduce"), 128 * 254),
        (lambda: topoplan.ring_plan(topoplan.nvswitch_cluster(5)), None),
    ],
    ids=["trees of 16 servers", "rings that share wires inside 5 servers"],
)
def test_compact_plans_of_servers_take_the_time_of_all_shards(
    make: Callable[[], Plan], hops: int | None
) -> None:
    plan = make()
    assert isinstance(plan.shards, ImageShards)
    whole = replace(plan, shards=tuple(plan.shards))
    assert hops is None or len(dataflow(whole).hops) == hops
    times = [clock(one) for one in (plan, whole)]
    for nbytes in SIZES:
        one, other = (time(nbytes) for time in times)
        assert one.seconds == pytest.approx(other.seconds, rel=1e-12)
        assert one.bottleneck == other.bottleneck


def test_events_run_every_image() -> None:
    plan = compact(topoplan.load("dgx-2"), "allgather")
    whole = replace(plan, shards=tuple(plan.shards))
    assert run_events(plan, nbytes=1 << 20) == run_events(whole, nbytes=1 << 20)


def test_events_of_too_many_images_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message counts the transfers of all images."""
    plan = topoplan.plan(topoplan.nvswitch_cluster(16), "allgather")
    flow = dataflow(plan)
    assert (len(flow.hops), flow.counts) == (127, (128,))
    transfers = 128 * sum(len(hop.links) for hop in flow.hops)
    monkeypatch.setattr(event_simulation, "MAX_TRANSFERS", transfers - 1)
    with pytest.raises(UsageError, match=f"chunk transfers must be at most {transfers - 1}, got {transfers}"):
        run_events(plan, nbytes=1 << 10)

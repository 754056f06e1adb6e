"""A rank's part of a plan by kind: the rows that the lowering of the listed plan gives that rank, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import topoplan
from collectives import Communicator
from collectives.backends.tcp.chunk_order import rank_order
from collectives.tables.lowering import PlanKey, lower, shard_transfers
from collectives.tables.rank_part import aligned_ends, is_lowered_by_part, lower_part, rank_part
from tests.support.kind_clusters import (
    broadcast_of_hosts,
    broadcast_of_servers,
    plan_in_network,
    plan_of_groups,
    plan_of_three_levels,
    plan_of_torus,
    random_plan,
)
from topoplan import PlanByKind, Server, UsageError, cluster_by_kind, plan_by_kind
from topoplan.machine.fabric import edge_channels
from topoplan.plans.certificates.kind_lengths import DUAL_ASCENT
from topoplan.plans.deferred_plan import DeferredPlan
from topoplan.plans.shards import Shard, aligned_end, shard_bounds
from topoplan.reading.load import load_cluster_by_kind


def same_rows(plan: PlanByKind, ranks: range | list[int], count: int, chunk_elements: int) -> int:
    """Compare parts with the listed form; returns the number of compared rows."""
    table = lower(plan.listed(), count, chunk_elements=chunk_elements)
    channel_of = np.array([edge_channels(plan.channels).index(channel) for *_, channel in table.queues])
    rows = 0
    for rank in ranks:
        part = rank_part(plan, rank)
        np.testing.assert_array_equal(part.bounds(count), table.bounds)
        mine = (table.source == rank) | (table.destination == rank)
        for name, column in part.rows(count, chunk_elements=chunk_elements).items():
            listed = channel_of[table.queue] if name == "channel" else getattr(table, name)
            np.testing.assert_array_equal(column, listed[mine], err_msg=f"rank {rank}: {name}")
            assert name == "channel" or column.dtype == listed.dtype
        rows += int(mine.sum())
    return rows


def same_order(plan: PlanByKind, count: int, chunk_elements: int) -> int:
    """Compare the order of every rank's streams by its own rows with that by all rows; return how many there are."""
    table = lower(plan.listed(), count, chunk_elements=chunk_elements)
    deferred, streams = DeferredPlan(plan), 0
    assert is_lowered_by_part(deferred)
    for rank in range(plan.size):
        part = lower_part(PlanKey(plan.digest, deferred), rank, count, chunk_elements)
        assert list(part.kept()) == [one for one in table.kept() if one[0] == rank]
        listed, own = (rank_order(one, rank, plan.collective, plan.root) for one in (table, part))
        arrives = table.destination[listed.rows] == rank
        np.testing.assert_array_equal(own.written, listed.written)
        np.testing.assert_array_equal(own.held, listed.held)
        np.testing.assert_array_equal((own.slots > 0)[arrives], (listed.slots > 0)[arrives])
        assert (own.slots >= listed.slots)[arrives].all()
        assert (own.window >= listed.window)[listed.held].all()
        before, after = (
            {(stream, other, lag > 0) for stream, other, lag in one.befores.tolist()} for one in (listed, own)
        )
        assert before == after
        # Both ends of a stream name it by its shard and stage: no two on a link have one name.
        ends = np.stack((part.source[own.rows], part.destination[own.rows], own.numbers))
        assert len(np.unique(ends, axis=1).T) == len(own.rows)
        streams += len(own.rows)
    return streams


@pytest.mark.sampled
@pytest.mark.parametrize(
    "seed", [*range(30), *(pytest.param(s, marks=pytest.mark.slow) for s in range(30, 150))]
)
def test_a_rank_orders_its_streams_by_its_own_rows_as_by_all(seed: int) -> None:
    plan = random_plan(seed, most=24)
    if plan is not None:
        assert same_order(plan, 40 * plan.size**2, 48 * plan.size) > 0
        assert same_order(plan, 3 * plan.size, 16) >= 0  # most shards are empty


def agree(seed: int, *, most: int) -> None:
    plan = random_plan(seed, most=most)
    if plan is not None:
        assert same_rows(plan, range(plan.size), 80 * plan.size**2, 48 * plan.size)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(40))
def test_parts_of_random_clusters_are_rows_of_the_listed_form(seed: int) -> None:
    agree(seed, most=30)


@pytest.mark.sampled
@pytest.mark.parametrize("make", [plan_of_three_levels, plan_of_groups, plan_of_torus, plan_in_network])
@pytest.mark.parametrize("seed", range(12))
def test_parts_with_entries_of_pods_or_groups_are_rows_of_the_listed_form(
    seed: int, make: Callable[..., PlanByKind | None]
) -> None:
    plan = make(seed, most=40)
    if plan is not None and plan.num_trees * plan.size < 20_000:
        assert same_rows(plan, range(plan.size), 80 * plan.size**2, 48 * plan.size)


@pytest.mark.parametrize(
    "network",
    [
        {"network": "fat-tree", "leaf_size": 4, "oversubscription": 8},
        pytest.param(
            {"network": "fat-tree", "leaf_size": 1, "pod_size": 4, "oversubscription": 8},
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            {"network": "dragonfly", "group_size": 4, "global_gbps": 100}, marks=pytest.mark.thorough
        ),
    ],
)
def test_parts_beside_a_smaller_last_leaf_are_rows_of_the_listed_form(network: dict[str, object]) -> None:
    """The entry among the last three of 15 servers has the turn of the root among the 12 others."""
    cluster = cluster_by_kind([Server("v100x4", count=15)], nic_gbps=100, **network)  # type: ignore[arg-type]
    for collective in ("allreduce", "allgather"):
        plan = plan_by_kind(cluster, collective)
        assert same_rows(plan, range(0, plan.size, 7), plan.size * 64, plan.size * 64) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter"])
def test_parts_of_groups_without_a_link_are_rows_of_the_listed_form(collective: str) -> None:
    cluster = cluster_by_kind(
        [Server("v100x4", count=8)], nic_gbps=100, network="dragonfly", group_size=2, global_gbps=40
    )
    plan = plan_by_kind(cluster.with_faults(without_links=["group0->group3"]), collective)
    assert same_rows(plan, range(0, plan.size, 5), plan.size * 64, plan.size * 64) > 0


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize(
    "seed", [*range(40, 80), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(80, 300))]
)
def test_parts_of_larger_random_clusters_are_rows_of_the_listed_form(seed: int) -> None:
    agree(seed, most=60)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ["allreduce", "allgather", "reduce_scatter", "broadcast", "reduce"])
@pytest.mark.parametrize(
    "network",
    [
        {"network": "switch"},
        {"network": "rail-optimised", "oversubscription": 2},
        {"network": "fat-tree", "leaf_size": 2, "oversubscription": 3.5},
    ],
)
def test_parts_after_faults_are_rows_of_the_listed_form(collective: str, network: dict[str, object]) -> None:
    servers = [Server("v100x4", count=4), Server("pcie-x8", [0, 1], count=2)]
    cluster = cluster_by_kind(servers, nic_gbps=100, **network)  # type: ignore[arg-type]
    cluster = cluster.with_faults(without_gpus=[5])
    root = 3 if collective in ("broadcast", "reduce") else None
    plan = plan_by_kind(cluster, collective, root=root)
    assert same_rows(plan, range(plan.size), plan.size * 1000, 700) > 0


@pytest.mark.parametrize("collective", ["allreduce", "allgather"])
def test_parts_of_a_server_without_nvlink_are_rows_of_the_listed_form(collective: str) -> None:
    cluster = cluster_by_kind([Server("dgx-h100", range(3), count=3)], nic_gbps=400, nic_access="direct")
    cluster = cluster.with_faults(without_links=["s1.gpu0-s1.nvswitch0"])
    plan = plan_by_kind(cluster, collective, channels="nvlink+network")
    assert same_rows(plan, range(plan.size), plan.size * 1000, 700) > 0


TREE = {"network": "fat-tree", "leaf_size": 16, "oversubscription": 2}


def tree_columns(shard: Shard, size: int) -> Iterator[dict[str, NDArray[np.int64]]]:
    """Yield the transfers of one chunk of a shard, stage by stage: of each rank in the order of `shard_transfers`.

    Freshness follows from the tree alone: a rank is written by its children in a reduce, and by its parent in a
    broadcast. The waits of `shard_transfers` are left out, which take most of its time.
    """
    written = np.zeros(size, dtype=np.bool_)
    for number, stage in enumerate(shard.stages):
        parent, child = np.array([(edge.parent, edge.child) for edge in stage.edges]).T
        up = stage.op == "reduce"
        if up:
            inner, lowest = np.zeros(size, dtype=np.bool_), np.full(size, size)
            inner[parent] = True
            np.minimum.at(lowest, parent, child)
            source, destination = child, parent
            source_fresh = ~written[child] & ~inner[child]
            destination_fresh = ~written[parent] & (lowest[parent] == child)
        else:
            source, destination = parent, child
            source_fresh = ~written[parent] & (parent == stage.root)
            destination_fresh = np.zeros(len(child), dtype=np.bool_)
        written[destination] = True
        yield {
            "source": source,
            "destination": destination,
            "add": np.full(len(child), up),
            "source_fresh": source_fresh,
            "destination_fresh": destination_fresh,
            "stage": np.full(len(child), number),
            "channel": np.array([edge.channel for edge in stage.edges]),
        }


def columns_of_rank(columns: dict[str, NDArray[np.int64]], rank: int) -> dict[str, NDArray[np.int64]]:
    """Return the rows of one rank: by shard and stage, what arrives before what is sent, and then by the other end."""
    own = np.flatnonzero((columns["source"] == rank) | (columns["destination"] == rank))
    found = {name: column[own] for name, column in columns.items()}
    other = found["source"] + found["destination"] - rank
    order = np.lexsort((other, found["source"] == rank, found["stage"], found["shard"]))
    return {name: column[order] for name, column in found.items()}


def same_edges(plan: PlanByKind, ranks: list[int], *, every: int = 1) -> int:
    """Compare parts with every n-th shard of the listed form, in the memory of one shard; return the rows.

    With equal bounds of the shards, and equal transfers of a chunk of each, `chunk_rows` makes equal tables of both.
    A shard is listed once for all ranks. The transfers of every 64th are also those of `shard_transfers`.
    """
    listed, count = plan.listed(), plan.size * 64
    bounds = np.array(listed.bounds(count))
    assert (np.diff(bounds) > 0).all()
    wanted = np.zeros(plan.size, dtype=np.bool_)
    wanted[ranks] = True
    found: dict[str, list[NDArray[np.int64]]] = {}
    for number in range(0, len(listed.shards), every):
        shard = listed.shards[number]
        columns = [
            one | {"shard": np.full(len(one["add"]), number)} for one in tree_columns(shard, plan.size)
        ]
        whole = {name: np.concatenate([one[name] for one in columns]) for name in columns[0]}
        if number % (64 * every) == 0:
            lowered = shard_transfers(listed, shard, number, base=0)
            for rank in ranks:
                mine = [one for one in lowered if rank in (one.source, one.destination)]
                for name, column in columns_of_rank(whole, rank).items():
                    assert [getattr(one, name) for one in mine] == column.tolist(), (rank, number, name)
        kept = wanted[whole["source"]] | wanted[whole["destination"]]
        for name, column in whole.items():
            found.setdefault(name, []).append(column[kept])
    all_columns = {name: np.concatenate(columns) for name, columns in found.items()}
    rows_compared = 0
    for rank in ranks:
        part = rank_part(plan, rank)
        np.testing.assert_array_equal(part.bounds(count), bounds)
        rows: dict[str, NDArray[Any]] = dict(part.rows(count, chunk_elements=count))
        rows["channel"] = np.array(plan.channels)[rows["channel"]]
        own = rows["shard"] % every == 0
        for name, column in columns_of_rank(all_columns, rank).items():
            np.testing.assert_array_equal(rows[name][own], column, err_msg=f"rank {rank}: {name}")
        np.testing.assert_array_equal(rows["start"], bounds[rows["shard"]])
        np.testing.assert_array_equal(rows["stop"], bounds[rows["shard"] + 1])
        rows_compared += int(own.sum())
    return rows_compared


@pytest.mark.parametrize(
    ("servers", "collective", "network", "every"),
    [
        pytest.param(16, "allreduce", {"network": "rail-optimised"}, 1, marks=pytest.mark.thorough),
        pytest.param(512, "allgather", {}, 64, marks=pytest.mark.slow),
        pytest.param(512, "allgather", TREE, 64, marks=pytest.mark.slow),
        pytest.param(512, "allgather", TREE, 1, marks=pytest.mark.slow),
    ],
)
def test_parts_of_64_ranks_are_edges_of_the_listed_form_shard_by_shard(
    servers: int, collective: str, network: dict[str, object], every: int
) -> None:
    """Up to 4,096 GPUs, 16.8 million edges, in 0.2 GB; all of them take two minutes."""
    cluster = cluster_by_kind([Server("dgx-h100", count=servers)], nic_gbps=400, **network)  # type: ignore[arg-type]
    plan = plan_by_kind(cluster, collective)
    rows = same_edges(plan, list(range(0, plan.size, plan.size // 64)), every=every)
    assert rows >= 63 * plan.num_trees // every


@pytest.mark.thorough
@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_parts_of_trees_that_enter_the_server_of_the_root_again_are_rows_of_the_listed_form(
    collective: str,
) -> None:
    cluster = cluster_by_kind([Server("v100x4", count=4)], nic_gbps=800, nics=4)
    plan = plan_by_kind(cluster, collective, root=5)
    assert plan.proof == DUAL_ASCENT
    assert same_rows(plan, range(plan.size), 5040, 64)
    same_order(plan, 5040, 64)


@pytest.mark.thorough
def test_parts_of_64_ranks_of_a_larger_cluster_are_rows_of_the_listed_form() -> None:
    cluster = cluster_by_kind(
        [Server("v100x4", count=48)], nic_gbps=100, network="fat-tree", leaf_size=8, oversubscription=2
    )
    plan = plan_by_kind(cluster, "allgather")
    assert same_rows(plan, list(range(0, plan.size, 3)), plan.size * 64, 64) > 0


@pytest.mark.parametrize(
    ("servers", "collective", "network"),
    [
        pytest.param(64, "allgather", TREE, marks=pytest.mark.thorough),
        pytest.param(32, "reduce_scatter", {"network": "rail-optimised"}, marks=pytest.mark.thorough),
        pytest.param(32, "allreduce", {}, marks=pytest.mark.thorough),
        pytest.param(256, "allgather", TREE, marks=pytest.mark.slow),
        pytest.param(256, "allgather", {}, marks=pytest.mark.slow),
    ],
)
def test_parts_of_every_64th_of_the_ranks_are_rows_of_the_listed_form(
    servers: int, collective: str, network: dict[str, object]
) -> None:
    """Up to 2,048 GPUs: the table of N GPUs has N (N - 1) rows or more, and takes 2 GB and a minute there."""
    cluster = cluster_by_kind([Server("dgx-h100", count=servers)], nic_gbps=400, **network)  # type: ignore[arg-type]
    plan = plan_by_kind(cluster, collective)
    count = plan.size * 64
    assert same_rows(plan, range(0, plan.size, plan.size // 64), count, count) >= 64 * (plan.size - 1)


def test_an_all_gather_moves_all_elements_to_each_rank_of_100_000() -> None:
    cluster = cluster_by_kind([Server("dgx-h100", count=12_500)], nic_gbps=400)
    part = rank_part(plan_by_kind(cluster, "allgather"), 54_321)
    count = 100_000 * 64
    rows = part.rows(count, chunk_elements=count)
    arrived = (rows["stop"] - rows["start"])[rows["destination"] == 54_321]  # type: ignore[operator]
    assert arrived.sum() == count - 64


@pytest.mark.parametrize("blocks", [1, 3, 100_000])
@pytest.mark.parametrize("unit", [7, 3 << 20, (1 << 61) - 1, 3**60])
def test_ends_of_shards_are_exact_whatever_the_size_of_unit_and_buffer(blocks: int, unit: int) -> None:
    """Units beyond 62 bits, and buffers beyond 50, are Python integers; products below them have up to 112 bits."""
    rng = np.random.default_rng(unit % 1000 + blocks)
    steps = np.array([0, 1, unit // 3, unit - 1, unit, *(int(one * unit) for one in rng.random(40))])
    steps = steps.astype(np.int64 if unit < 1 << 62 else object)
    for each in (0, 1, 15, 16, 1000, (1 << 32) + 5, (1 << 50) // blocks - 1, 1 << 51):
        count = each * blocks
        if count < 1 << 62:
            expected = [aligned_end(int(one), unit, count, blocks=blocks) for one in steps]
            assert aligned_ends(steps, unit, count, blocks=blocks).tolist() == expected
    assert shard_bounds([Fraction(1, unit)], 5 * unit)[1] == 5 // 16 * 16


def test_a_rank_that_the_plan_does_not_have_is_refused() -> None:
    plan = plan_by_kind(cluster_by_kind([Server("v100x4", count=3)], nic_gbps=100), "allgather")
    for rank in (-1, 12):
        with pytest.raises(UsageError, match=f"rank must be from 0 to 11, got {rank}"):
            rank_part(plan, rank)
    with pytest.raises(UsageError, match="cannot be divided among 12 ranks"):
        rank_part(plan, 0).bounds(13)


@pytest.mark.parametrize(
    ("name", "collective"), [("torus:3,4", "allreduce"), ("torus:6,2", "reduce_scatter")]
)
def test_parts_of_hosts_in_a_torus_are_rows_of_the_listed_form(name: str, collective: str) -> None:
    cluster = load_cluster_by_kind(name)
    assert cluster is not None
    plan = plan_by_kind(cluster, collective)
    assert same_rows(plan, list(range(0, plan.size, 7)), plan.size * 640, 96) > 0


def test_a_rank_of_a_large_torus_receives_every_other_block_once() -> None:
    cluster = load_cluster_by_kind("torus:40,41")
    assert cluster is not None
    part = rank_part(plan_by_kind(cluster, "allgather"), 777)
    count = 1640 * 64
    rows = part.rows(count, chunk_elements=count)
    arrived = (rows["stop"] - rows["start"])[rows["destination"] == 777]  # type: ignore[operator]
    assert arrived.sum() == count - 64


def test_paths_of_a_torus_are_refused() -> None:
    cluster = load_cluster_by_kind("torus:3,4")
    assert cluster is not None
    with pytest.raises(UsageError, match="all_to_all by kind cannot be lowered"):
        rank_part(plan_by_kind(cluster, "alltoall"), 0)


def test_paths_are_refused() -> None:
    plan = topoplan.plan_by_kind(cluster_by_kind([Server("v100x4", count=3)], nic_gbps=100), "alltoall")
    with pytest.raises(UsageError, match="all_to_all"):
        rank_part(plan, 0)


def test_more_rows_than_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_by_kind(cluster_by_kind([Server("v100x4", count=3)], nic_gbps=100), "allgather")
    rows = len(rank_part(plan, 0))
    monkeypatch.setattr("collectives.tables.rank_part.MOST_ROWS", rows)
    assert len(rank_part(plan, 0)) == rows
    monkeypatch.setattr("collectives.tables.rank_part.MOST_ROWS", rows - 1)
    with pytest.raises(UsageError, match=f"the rank has {rows} rows; at most {rows - 1} fit"):
        rank_part(plan, 0)


@pytest.mark.thorough
def test_more_trees_than_fit_are_refused() -> None:
    cluster = cluster_by_kind(
        [Server("dgx-h100", count=12_500)], nic_gbps=400, network="fat-tree", leaf_size=32, oversubscription=2
    )
    with pytest.raises(UsageError, match="at most 8,000,000 trees fit"):
        rank_part(plan_by_kind(cluster, "broadcast"), 0)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("make", [broadcast_of_hosts, broadcast_of_servers])
def test_parts_of_a_root_in_a_torus_are_rows_and_order_of_the_listed_form(make: Any, seed: int) -> None:
    plan = make(seed, most=60)
    if plan is not None:
        assert same_rows(plan, range(plan.size), 2000 * plan.size, 480 * plan.size) > 0
        assert same_order(plan, 2000 * plan.size, 480 * plan.size) > 0


def test_a_rank_of_40000_hosts_receives_each_element_of_a_broadcast_once() -> None:
    cluster = load_cluster_by_kind("torus:200,200")
    assert cluster is not None
    part = rank_part(plan_by_kind(cluster, "broadcast", root=777), 31_234)
    columns = part.rows(100_000, chunk_elements=1600)
    arrives = columns["destination"] == 31_234
    spans = sorted(zip(columns["start"][arrives].tolist(), columns["stop"][arrives].tolist(), strict=True))
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert spans[-1][1] == 100_000


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
@pytest.mark.parametrize("name", ["torus:5,2,3", "dgx-h100"])
def test_a_communicator_runs_a_plan_of_a_root_in_a_torus(name: str, collective: str) -> None:
    """On 30 hosts, or on 15 servers of two GPUs."""
    cluster = (
        cluster_by_kind(
            [Server(name, [0, 1], count=15)],
            nic_gbps=400,
            nics=4,
            nic_access="direct",
            network="torus",
            sides=(3, 5),
        )
        if name == "dgx-h100"
        else load_cluster_by_kind(name)
    )
    assert cluster is not None
    arrays = [np.arange(1000, dtype=np.float64) + rank for rank in range(30)]
    with Communicator(plan_by_kind(cluster, collective, root=17), backend="loopback") as comm:
        found = comm.broadcast(arrays) if collective == "broadcast" else comm.reduce(arrays)
    if collective == "broadcast":
        assert all(np.array_equal(one, arrays[17]) for one in found)
    else:
        assert [rank for rank, one in enumerate(found) if one is not None] == [17]
        assert np.array_equal(found[17], sum(arrays))

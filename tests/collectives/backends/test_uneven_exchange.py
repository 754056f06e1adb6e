"""All-to-alls of uneven blocks: the same results as numpy's on every back end, by plans that are kept."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import topoplan
from collectives import Communicator
from collectives.backends.demand_plans import (
    EVEN_WITHIN,
    PARTS,
    SERVED_WITHIN,
    demand_of,
    proved_time,
    serving_plan,
)
from collectives.backends.loopback.paced_loopback import PacedLoopback
from collectives.backends.plan_and_chunk_store import PlanStore
from collectives.backends.shared.shared_backend import SharedBackend
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.backends.uneven_exchange import KnownCounts, _uneven_kind
from collectives.peers.rendezvous import Rendezvous
from collectives.tables.lowering import PlanKey
from tests.support.demands import drifting, hot_block, hot_rows, magnitudes, one_hot, time_of_counts, zipf
from tests.support.file_gather import FileGather
from tests.support.job_meeting import Meeting, as_threads, of_all
from tests.support.ports import free_port
from tests.support.refusals import refused
from tests.support.small_fabrics import direct_machines, machine
from tests.support.tcp_jobs import in_processes
from topoplan.errors import BackendError, InfeasibleError, UsageError
from topoplan.machine.topology import Topology
from topoplan.plans.certificates.exchange import Demand
from topoplan.plans.plan import Plan
from topoplan.plans.shards import path_ends

Array = NDArray[Any]
Rows = list[list[int]]

RANKS = 4


@cache
def machine_plan() -> Plan:
    """The plan of four GPUs of which two pairs have no link and relay."""
    return topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7])


def draw(seed: int, highest: int, zeros: float = 0.3) -> Rows:
    generator = np.random.default_rng(seed)
    counts = generator.integers(0, highest, (RANKS, RANKS))
    counts[generator.random((RANKS, RANKS)) < zeros] = 0
    return counts.tolist()


SEQUENCE: list[tuple[Rows, tuple[int, ...]]] = [
    ([[0] * 4] * 4, ()),
    ([[5, 0, 0, 0], [0, 3, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]], ()),
    ([[0, 0, 700, 0]] * 4, (3,)),
    ([[1, 2, 3, 4], [0, 0, 0, 0], [9, 9, 9, 9], [0, 1, 0, 0]], ()),
    (draw(1, 40), ()),
    (draw(2, 3000), (2, 1)),
    (draw(3, 90_000), ()),
    (draw(3, 90_000), ()),
    ([[7] * 4] * 4, (5,)),
    (draw(4, 3000), (0,)),
]
"""Counts, and the shape of a row: nothing, only blocks that stay, one hot receiver, a silent rank, random ones."""


def inputs(rows: Rows, rest: Sequence[int] = (), dtype: str = "float32") -> list[Array]:
    """Arrays whose elements all differ."""
    shapes = [(sum(row), *rest) for row in rows]
    return [
        (np.arange(np.prod(shape)).reshape(shape) + 4_000_000 * rank).astype(dtype)
        for rank, shape in enumerate(shapes)
    ]


def exchanged(arrays: Sequence[Array], rows: Rows) -> list[Array]:
    """What every rank must get."""
    blocks = [np.split(array, np.cumsum(row)[:-1]) for array, row in zip(arrays, rows, strict=True)]
    return [np.concatenate([row[rank] for row in blocks]) for rank in range(len(arrays))]


def column(rows: Rows, rank: int) -> list[int]:
    return [row[rank] for row in rows]


def shared() -> Callable[[int, str], Any]:
    meeting = Meeting(RANKS)
    return lambda rank, _: SharedBackend(meeting.gather(rank), rank=rank, size=RANKS)


def tcp() -> Callable[[int, str], Any]:
    return lambda rank, address: TcpBackend(rank, RANKS, rendezvous=address, flight_bytes=1 << 10)


def on_ranks(
    body: Callable[[Communicator, int], Any], backend: str, *, plan: Plan | None = None, **options: Any
) -> list[Any]:
    """Return the body's result on each rank, a thread."""
    opened = {"shared": shared, "tcp": tcp}[backend]()

    def be(rank: int) -> Any:
        with Communicator(plan or machine_plan(), opened(rank, meeting.address), **options) as comm:
            return body(comm, rank)

    with Rendezvous("127.0.0.1:0", RANKS) as meeting:
        return of_all(as_threads(RANKS, be))


@pytest.mark.parametrize(
    ("backend", "options"), [("shared", {}), ("tcp", {}), ("tcp", {"on_failure": "shrink"})]
)
def test_ranks_exchange_what_numpy_does(backend: str, options: dict[str, str]) -> None:
    """Into new arrays, given ones, arrays of shared memory, and in the background."""

    def body(comm: Communicator, rank: int) -> None:
        for rows, rest in SEQUENCE:
            arrays = inputs(rows, rest)
            wanted = exchanged(arrays, rows)[rank]
            found = comm.all_to_all_v(arrays[rank], rows[rank])
            assert found.dtype == wanted.dtype
            assert np.array_equal(found, wanted)
            given, out = comm.empty(arrays[rank].shape), comm.empty(wanted.shape)
            given[...] = arrays[rank]
            handle = comm.all_to_all_v(given, rows[rank], column(rows, rank), out=out, async_op=True)
            assert handle.wait() is out
            assert np.array_equal(out, wanted)

    on_ranks(body, backend, chunk_bytes=1 << 14, **options)


@pytest.mark.parametrize("backend", ["shared", "tcp"])
def test_one_way_links_carry_what_has_a_path(backend: str) -> None:
    """Also a scatter from the first rank and a gather at the last; a block without a path is refused on all ranks."""
    wires = {("gpu0", "gpu1"): 10.0, ("gpu1", "gpu2"): 10.0, ("gpu0", "gpu2"): 5.0, ("gpu2", "gpu3"): 8.0}
    plan = topoplan.plan(machine(RANKS, wires), "broadcast", root=0)
    some: Rows = [[1, 4, 2, 0], [0, 0, 3, 1], [0, 0, 2, 9], [0, 0, 0, 1]]
    none: Rows = [[2 * (r == s) for s in range(RANKS)] for r in range(RANKS)]

    def body(comm: Communicator, rank: int) -> None:
        for rows in (some, none, [[3 * n for n in row] for row in some]):
            arrays = inputs(rows)
            assert np.array_equal(comm.all_to_all_v(arrays[rank], rows[rank]), exchanged(arrays, rows)[rank])
        eight = np.arange(8, dtype=np.float32)
        assert np.array_equal(comm.scatter(eight), eight[2 * rank : 2 * rank + 2])
        gathered = comm.gather(eight[rank : rank + 1], root=3)
        assert gathered is None if rank != 3 else np.array_equal(gathered, eight[:4])
        for root in (1, 3):
            with refused(InfeasibleError, "path leads from"):
                comm.scatter(eight, root=root)
        with refused(InfeasibleError, "path leads from"):
            comm.all_to_all(eight)
        assert np.array_equal(comm.all_to_all_v(arrays[rank], rows[rank]), exchanged(arrays, rows)[rank])

    on_ranks(body, backend, plan=plan)


@pytest.mark.parametrize("backend", ["shared", "tcp"])
def test_an_out_for_new_counts_is_taken_where_this_rank_assumes_the_old_ones(backend: str) -> None:
    """Rank 1 alone sends more to rank 0, which knows it by its ``out`` only; then its counts are assumed again."""

    def body(comm: Communicator, rank: int) -> None:
        ones = [[1] * RANKS for _ in range(RANKS)]
        more = [[3, 1, 1, 1] if rank == 1 else [1] * RANKS for rank in range(RANKS)]
        for rows in (ones, ones, more, more, ones):
            arrays = inputs(rows, ())
            wanted = exchanged(arrays, rows)[rank]
            out = np.zeros_like(wanted)
            assert comm.all_to_all_v(arrays[rank], rows[rank], out=out) is out
            assert np.array_equal(out, wanted)

    on_ranks(body, backend)


def test_repeated_counts_run_cached_and_other_arrays_take_the_long_way() -> None:
    """Shared memory: counts in turn, results given or not, strides, an odd address, and a result in the input."""
    turns = [draw(1, 9), draw(2, 9), draw(1, 9), draw(2, 9), draw(1, 9)]

    def body(comm: Communicator, rank: int) -> tuple[int, int]:
        wrong = 0
        for rows in turns:
            arrays = inputs(rows)
            wanted, mine, sent = exchanged(arrays, rows)[rank], arrays[rank], rows[rank]
            strided = np.zeros((len(mine), 2), np.float32)
            strided[:, 0] = mine
            odd = np.frombuffer(bytearray(4 * len(mine) + 1), np.uint8)[1:].view(np.float32)
            odd[:] = mine
            both = np.zeros(len(mine) + len(wanted), np.float32)
            both[: len(mine)] = mine
            out = np.full_like(wanted, -1)
            wrong += comm.all_to_all_v(mine, sent, out=out) is not out
            for array, target in (
                (mine, None),
                (mine, out),
                (strided[:, 0], None),
                (odd, None),
                (both[: len(mine)], both[: len(wanted)]),
            ):
                result = comm.all_to_all_v(array, sent, out=target)
                wrong += not np.array_equal(result, wanted)
        return wrong, len(comm._members.present[0]._cached_uneven)

    assert on_ranks(body, "shared") == [(0, 2)] * RANKS


def test_the_kind_of_known_counts_outlives_those_of_other_communicators() -> None:
    """Ranks find their plans by it, and one of them may serve more communicators than the others."""
    shape = ("float32", 4, (), ((1, 2), (0, 5)), (0, 1))
    kept = _uneven_kind("all_to_all_v", None, None, *shape)
    for count in range(200):
        _uneven_kind("all_to_all_v", None, None, "float32", 4, (), ((count, 0), (0, 1)), (0, 1))
    assert _uneven_kind("all_to_all_v", None, None, *shape) is kept


@pytest.mark.parametrize("backend", ["loopback", "paced"])
def test_one_process_exchanges_what_numpy_does(backend: str) -> None:
    made = "loopback" if backend == "loopback" else PacedLoopback(RANKS, scale=1e9)
    with Communicator(machine_plan(), made, chunk_bytes=1 << 14) as comm:
        for rows, rest in SEQUENCE:
            arrays = inputs(rows, rest, "int64")
            columns = [column(rows, rank) for rank in range(RANKS)]
            for found, wanted in zip(
                comm.all_to_all_v(arrays, rows, columns), exchanged(arrays, rows), strict=True
            ):
                assert found.dtype == wanted.dtype
                assert np.array_equal(found, wanted)


@settings(max_examples=30)
@given(
    direct_machines(), st.integers(0, 2**32), st.sampled_from([3, 100, 2000]), st.sampled_from([16, 1 << 20])
)
def test_any_machine_and_counts_are_exchanged(small: Topology, seed: int, highest: int, chunk: int) -> None:
    plan = topoplan.plan(small)
    size = len(plan.ranks)
    generator = np.random.default_rng(seed)
    rows = (generator.integers(0, highest, (size, size)) * generator.integers(0, 2, (size, size))).tolist()
    arrays = inputs(rows)
    with Communicator(plan, chunk_bytes=chunk) as comm:
        for found, wanted in zip(comm.all_to_all_v(arrays, rows), exchanged(arrays, rows), strict=True):
            assert np.array_equal(found, wanted)


def test_blocks_move_without_padding() -> None:
    """Each rank sends nearly 800 elements to the next and a few to the one behind it, through one switch."""
    with Communicator(topoplan.plan("dgx-2", gpus=[0, 1, 2, 3])) as comm:
        for few in (12, 9):
            rows = [[(5, 800 - few, few, 0)[(s - r) % 4] for s in range(4)] for r in range(4)]
            before = sum(comm.bytes_sent().values())
            comm.all_to_all_v(inputs(rows), rows)
            assert sum(comm.bytes_sent().values()) - before == 4 * 4 * 800
        assert comm._members.execution.store.demands_planned == 0  # direct sends are optimal for any counts


def test_calls_of_near_counts_share_a_plan() -> None:
    """Equal blocks and nearly equal ones go by the plan of all_to_all, one hot pair by one with relays."""
    hot = [[0, 800, 3, 2], [4, 0, 9, 1], [0, 0, 0, 2], [1, 1, 0, 0]]
    planned = []
    with Communicator(topoplan.plan("v100x4")) as comm:
        for rows in (
            [[9] * 4] * 4,
            [[5, 100, 99, 98], [97, 7, 100, 96], [100, 99, 0, 100], [98, 100, 97, 0]],
            hot,
            [[count and count + 1 for count in row] for row in hot],
            hot,
            [row[::-1] for row in hot[::-1]],
            hot,
        ):
            arrays = inputs(rows)
            for found, wanted in zip(comm.all_to_all_v(arrays, rows), exchanged(arrays, rows), strict=True):
                assert np.array_equal(found, wanted)
            planned.append(comm._members.execution.store.demands_planned)
    assert planned == [0, 0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize(("height", "crossed"), [(1, 1), (None, 1.2)])
def test_a_plan_of_a_demand_runs_its_counts(height: int | None, crossed: float) -> None:
    """Even if another one would be faster: direct paths cross one link each, relayed ones more."""
    hot = [[0, 800, 30, 20], [40, 0, 90, 10], [10, 10, 0, 20], [10, 10, 10, 0]]
    plan = topoplan.plan("v100x4", "alltoall", demand=hot, height=height)
    moved = 4 * sum(map(sum, hot))
    with Communicator(plan) as comm:
        for times in (1, 4):
            rows = [[count * times for count in row] for row in hot]
            arrays = inputs(rows)
            before = sum(comm.bytes_sent().values())
            for found, wanted in zip(comm.all_to_all_v(arrays, rows), exchanged(arrays, rows), strict=True):
                assert np.array_equal(found, wanted)
            sent = sum(comm.bytes_sent().values()) - before
            assert sent == moved * times if height else sent > crossed * moved * times
        assert comm._members.execution.store.demands_planned == 0


def test_demands_of_64_ranks_are_planned_where_ranks_share_switches() -> None:
    """On eight servers a new plan reaches its cut; a torus of 36 goes by equal blocks."""
    server = topoplan.Server(topoplan.load("dgx-h100"), count=8)
    servers = topoplan.cluster([server], nics=8, nic_gbps=400, nic_access="direct")
    for where, planned in ((servers, 1), ("torus:4,3,3@25", 0)):
        even = topoplan.plan(where, "alltoall")
        rows = tuple(map(tuple, one_hot(len(even.ranks), 3)))
        rows = tuple(tuple(count + 1 for count in row) for row in rows)
        store, demand = PlanStore(even), demand_of(rows)
        assert demand is not None
        made = store.plan_of_demand(demand, rows, even)
        assert store.demands_planned == planned
        assert (made is even) == (not planned)
        if planned:
            assert made.gap == 0
            assert isinstance(made.certificate, Demand)
            assert made.certificate.demand == demand
        again = tuple(tuple(count * 1001 // 1000 for count in row) for row in rows)
        assert store.plan_of_demand(demand_of(again) or (), again, even) is made


DEMANDS: dict[str, Callable[[int], Rows]] = {
    **{f"hot {ratio}": partial(hot_block, ratio=ratio) for ratio in (100, 1000, 10**5)},
    **{f"hot rows {ratio}": partial(hot_rows, ratio=ratio) for ratio in (100, 1000)},
    "zipf": zipf,
    "magnitudes": magnitudes,
}

THOROUGH = [
    "nvswitch 8", "nvswitch 16", "nvswitch 32", "nvswitch 64", "torus:4,4@25", "torus:4,4,2@25", "2 x dgx-1v",
    "8 x dgx-h100",
]  # fmt: skip


@cache
def exchange_machine(name: str) -> Topology:
    """A machine of the library, servers of one kind behind a network, or GPUs of one NVSwitch server."""
    count, _, kind = name.partition(" x ")
    if kind:
        servers = [topoplan.Server(topoplan.load(kind), count=int(count))]
        return topoplan.cluster(servers, nics=8, nic_gbps=400, nic_access="pcie")
    if name.startswith("nvswitch"):
        made = topoplan.load("gb200-nvl72")
        return made.subset(range(int(name.split()[1])))
    return topoplan.load(name)


@pytest.mark.parametrize(
    "name",
    ["dgx-1v", "2 x dgx-h100", *(pytest.param(name, marks=pytest.mark.thorough) for name in THOROUGH)],
)
@pytest.mark.parametrize("shape", DEMANDS)
def test_counts_take_a_twentieth_more_than_their_optimum_at_most(name: str, shape: str) -> None:
    """By the plan of equal blocks or that of their rounded demand, beside the bound that its certificate proves."""
    even = topoplan.plan(exchange_machine(name), "alltoall")
    rows = as_lengths(DEMANDS[shape](len(even.ranks)))
    plan = PlanStore(even).plan_of_demand(demand_of(rows) or (), rows, even)
    key = PlanKey(plan.digest, plan)
    assert time_of_counts(key, rows) <= proved_time(key, rows) * EVEN_WITHIN


def test_counts_that_drift_are_planned_seldom() -> None:
    """Tokens of eight experts: each step is right and near its bound, by plans of earlier steps."""
    served = 0
    with Communicator(topoplan.plan("dgx-1v")) as comm:
        store = comm._members.execution.store
        for rows in drifting(8, 20, tokens=4096):
            arrays = inputs(rows)
            for found, wanted in zip(comm.all_to_all_v(arrays, rows), exchanged(arrays, rows), strict=True):
                assert np.array_equal(found, wanted)
            known = list(store._of_demands.values())
            counts = as_lengths(rows)
            keys = [store.key(plans.plans[-1]) for plans in known]
            bound = max(proved_time(key, counts) for key in keys)
            assert min(time_of_counts(key, counts) for key in keys) <= bound * SERVED_WITHIN
            served += demand_of(counts) not in store._of_demands
    assert store.demands_planned <= 4
    assert served >= 16


@pytest.mark.parametrize("unit", [1, 10**6 + 3, 2**40 + 1])
def test_the_time_of_counts_is_exact_for_lengths_beyond_machine_words(unit: int) -> None:
    """The plan is the optimum for these counts, whose rate is known; products of counts and parts have 80 bits."""
    rows = tuple(tuple(count * unit for count in row) for row in zipf(4, 1))
    plan = topoplan.plan("v100x4", "alltoall", demand=zipf(4, 1))
    report = topoplan.verify(plan)
    assert report.exact_rate is not None
    assert (
        time_of_counts(PlanKey(plan.digest, plan), rows)
        == Fraction(sum(map(sum, rows)), 4) / report.exact_rate
    )


def as_lengths(rows: Rows) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(count * (r != s) for s, count in enumerate(row)) for r, row in enumerate(rows))


@settings(max_examples=30)
@given(direct_machines(), st.integers(0, 2**32))
def test_the_plan_of_equal_blocks_serves_counts_within_a_twentieth_of_their_optimum(
    small: Topology, seed: int
) -> None:
    """The optimum is that of a plan made for these counts alone."""
    generator = np.random.default_rng(seed)
    size = len(small.gpus)
    rows = as_lengths(generator.integers(1, 12, (size, size)).tolist())
    even, best = topoplan.plan(small, "alltoall"), topoplan.plan(small, "alltoall", demand=rows)
    served = serving_plan([PlanKey(even.digest, even)], rows)
    assert served in (even, None)
    loads: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    for shard in even.shards:
        source, destination = path_ends(shard)
        paths = [one for one in even.shards if path_ends(one) == (source, destination)]
        part = shard.share / sum(one.share for one in paths) * rows[source][destination]
        for edge in shard.stages[0].edges:
            for link in pairwise(edge.route):
                loads[link] += part
    widths = {(link.src, link.dst): Fraction(link.bandwidth) for link in small.links}
    time = max(load / widths[link] for link, load in loads.items())
    optimum = Fraction(sum(map(sum, rows)), size) / Fraction(best.rate)
    assert time >= optimum * (1 - Fraction(1, 10**9))
    if served is not None:
        assert time <= optimum * EVEN_WITHIN * (1 + Fraction(1, 10**9))


@settings(max_examples=200)
@given(
    st.lists(
        st.lists(st.integers(0, 5000) | st.integers(0, 10**9), min_size=4, max_size=4), min_size=4, max_size=4
    )
)
def test_a_demand_has_room_for_its_counts(rows: Rows) -> None:
    """A block is planned with its share of the longest at least, and a 32nd of its own or a tiny part more at most."""
    demand = demand_of(tuple(map(tuple, rows)))
    blocks = [(rows[r][s], demand[r][s]) for r in range(4) for s in range(4) if r != s] if demand else []
    longest, whole = max(blocks, key=lambda block: block[0], default=(1, 1))
    for count, planned in blocks:
        own, given = Fraction(count, longest), Fraction(planned, whole)
        assert (planned == 0) == (count == 0)
        assert own <= given <= own * Fraction(33, 32) + Fraction(count > 0, PARTS)


def test_ranks_that_know_a_matrix_by_other_numbers_agree() -> None:
    """Rank 0 sends the same in two matrices: its latest is the second, and rank 1 asks for the first."""
    known = KnownCounts()
    for number, counts in ((1, ((1, 2), (3, 4))), (2, ((1, 2), (5, 6)))):
        assert known.agreed([json.dumps([row, None]) for row in counts]) == number
        assert known.of(number) == counts
    assert known.agreed(["[2, null]", "[1, null]"]) == 1
    assert known.agreed(["[1, null]", "[1, 1]"]) == 1
    assert known.agreed(["[1, null]", "[2, 2]"]) == 2
    with pytest.raises(UsageError, match="rank 1 sends 5 elements to rank 0, which expects 3"):
        known.agreed(["[1, 1]", "[[5, 6], null]"])


@pytest.mark.parametrize("backend", ["shared", "tcp"])
def test_ranks_exchange_counts_only_if_one_has_others(backend: str) -> None:
    """Rank 0 sends alike in both matrices, so it takes the second call for the first, and is corrected."""
    matrices = [[[0, 1, 2, 3], *rest] for rest in ([[1, 0, 0, 0]] * 3, [[2, 0, 3, 0]] * 3)]

    def body(comm: Communicator, rank: int) -> list[int]:
        execution, gathers = comm._members.execution, 0
        gather = execution.gather_texts

        def counted(text: str) -> list[str]:
            nonlocal gathers
            gathers += 1
            return gather(text)

        execution.gather_texts = counted  # type: ignore[method-assign]
        found = []
        for rows in (*matrices, matrices[0], matrices[0], matrices[0], matrices[1], matrices[1]):
            arrays = inputs(rows)
            result = comm.all_to_all_v(arrays[rank], rows[rank])
            assert np.array_equal(result, exchanged(arrays, rows)[rank])
            found.append(gathers)
        return found

    assert on_ranks(body, backend, chunk_bytes=1 << 14) == [[1, 2, 3, 3, 3, 4, 4]] * RANKS


@pytest.mark.parametrize("backend", ["shared", "tcp"])
def test_ranks_drop_the_same_counts(backend: str) -> None:
    """Rank 0 always sends alike, and takes most calls for another; the others have 20 kinds of counts, and keep 16."""
    order = np.random.default_rng(5).integers(0, 20, 60).tolist()

    def body(comm: Communicator, rank: int) -> None:
        for number in [*range(20), *order]:
            rows = [[0, 1, 2, 3], *([number, rank, 0, 1] for rank in (1, 2, 3))]
            arrays = inputs(rows)
            assert np.array_equal(comm.all_to_all_v(arrays[rank], rows[rank]), exchanged(arrays, rows)[rank])

    on_ranks(body, backend, plan=topoplan.plan("dgx-2", gpus=[0, 1, 2, 3]), chunk_bytes=1 << 14)


def test_the_plan_of_a_demand_runs_counts_like_it() -> None:
    """Other counts are planned, also equal ones, whose paths it may lack."""
    demand = [[0, 8, 0, 0], [0, 0, 0, 1], [2, 0, 0, 0], [0, 0, 0, 0]]
    kept = [[100 * count + 3 * (r == s) for s, count in enumerate(row)] for r, row in enumerate(demand)]
    with Communicator(topoplan.plan("v100x4", "alltoall", demand=demand)) as comm:
        for rows, planned in (
            (demand, 0),
            ([[0] * 4] * 4, 0),
            ([[3] * 4] * 4, 1),
            (demand, 1),
            (kept, 2),  # the given plan has no path for blocks that stay
            (demand, 2),
        ):
            arrays = inputs(rows)
            for found, wanted in zip(comm.all_to_all_v(arrays, rows), exchanged(arrays, rows), strict=True):
                assert np.array_equal(found, wanted)
            assert comm._members.execution.store.demands_planned == planned


def test_one_rank_keeps_its_block() -> None:
    with Communicator(topoplan.plan("dgx-1v", gpus=[3])) as comm:
        (found,) = comm.all_to_all_v([np.arange(5)], [[5]])
    assert found.tolist() == [0, 1, 2, 3, 4]


EVEN = [[1] * RANKS] * RANKS
REFUSED: list[tuple[Callable[[Communicator, int], Any], str]] = [
    (
        lambda comm, rank: comm.all_to_all_v(np.zeros(4), EVEN[rank], [1, 1, 1 + (rank == 2), 1]),
        "rank 2 sends 1 elements to rank 2, which expects 2; correct the counts of one of them",
    ),
    (
        lambda comm, rank: comm.all_to_all_v(np.zeros(4), EVEN[rank], [1, 1 + (rank == 3), 1, 1]),
        "rank 1 sends 1 elements to rank 3, which expects 2; correct the counts of one of them",
    ),
    (
        lambda comm, rank: comm.all_to_all_v(np.zeros(4), [1, 1, 3, -1] if rank == 1 else EVEN[rank]),
        r"send_counts of rank 1 must be whole numbers from 0 on, got \[1, 1, 3, -1\]; correct it",
    ),
    (
        lambda comm, rank: comm.all_to_all_v(np.zeros(4), [1, 1, 1.0, 1] if rank == 1 else EVEN[rank]),
        "send_counts of rank 1 must be whole numbers",
    ),
    (
        lambda comm, rank: comm.all_to_all_v(np.zeros(4), EVEN[rank], [2, 2] if rank == 1 else EVEN[rank]),
        "recv_counts of rank 1 must be 4 numbers for 4 ranks, got 2; pass one for each rank",
    ),
    (
        lambda comm, rank: comm.all_to_all_v(np.zeros(4 - (rank == 1)), EVEN[rank]),
        "send_counts of rank 1 must add up to the 3 rows of its array, got 4; ",
    ),
    (
        lambda comm, rank: comm.all_to_all_v(np.zeros(4), EVEN[rank], out=np.zeros(4 + (rank == 1))),
        r"rank 1 has an out array of shape \(5,\) and dtype float64; this result needs shape \(4,\)",
    ),
    (
        lambda comm, rank: comm.all_to_all_v(np.zeros((4, 2 + (rank == 1))), EVEN[rank]),
        "rank 1",
    ),
    (
        lambda comm, rank: (
            comm.all_to_all(np.zeros(4)) if rank == 1 else comm.all_to_all_v(np.zeros(4), EVEN[rank])
        ),
        "rank 1",
    ),
]


@pytest.mark.parametrize("backend", ["shared", "tcp"])
def test_wrong_counts_are_refused_on_all_ranks_before_anything_moves(backend: str) -> None:
    def body(comm: Communicator, rank: int) -> list[str]:
        texts = []
        for call, _ in REFUSED:
            before = comm.bytes_sent()
            with pytest.raises(UsageError) as caught:
                call(comm, rank)
            texts.append(str(caught.value))
            assert comm.bytes_sent() == before
            found = comm.all_to_all_v(
                np.arange(7, dtype="float32") + 10 * rank, [0, 4, 2, 1], async_op=True
            ).wait()
            assert len(found) == 4 * [0, 4, 2, 1][rank]
        return texts

    for (_, wanted), texts in zip(REFUSED, zip(*on_ranks(body, backend), strict=True), strict=True):
        for text in texts:
            assert re.search(wanted, text), (wanted, text)
        assert len(set(texts)) == 1 or "correct the counts" not in wanted


def test_one_process_refuses_wrong_counts() -> None:
    with Communicator(machine_plan()) as comm:
        arrays = inputs(EVEN)
        for counts, received, wanted in [
            (EVEN[:3], None, "3 send_counts for 4 ranks"),
            (EVEN, [[1, 1, 1, 1]] * 3 + [[1, 1, 1, 2]], "rank 3 sends 1 elements to rank 3, which expects 2"),
            ([[1, 1, 2, 0]] * 3 + [[4, 4, 4, 4]], None, "must add up to the 4 rows of its array, got 16"),
        ]:
            with pytest.raises(UsageError, match=wanted):
                comm.all_to_all_v(arrays, counts, received)
        with pytest.raises(UsageError, match="share memory"):
            comm.all_to_all_v(arrays, EVEN, out=[arrays[0]] * 4)


def test_a_result_may_replace_the_input() -> None:
    """Blocks of equal sums in place, which overlap everywhere."""
    rows = [[0, 3, 1, 0], [1, 0, 0, 3], [3, 0, 1, 0], [0, 1, 2, 1]]
    arrays = inputs(rows)
    wanted = exchanged(arrays, rows)
    with Communicator(machine_plan()) as comm:
        comm.all_to_all_v(arrays, rows, out=arrays)
    assert all(np.array_equal(*pair) for pair in zip(arrays, wanted, strict=True))


def test_counts_of_ranks_that_failed_are_not_repeated() -> None:
    """Rank 3 leaves; the others may call again with counts for three."""

    def body(comm: Communicator, rank: int) -> Any:
        comm.all_to_all_v(np.zeros(4), EVEN[rank])
        if rank == 3:
            comm.abort("the test wants it")
            return None
        with pytest.raises(
            BackendError, match="changed from 4 to 3, so this all_to_all_v cannot be repeated"
        ):
            comm.all_to_all_v(np.zeros(4), EVEN[rank])
        return comm.all_to_all_v(np.full(6, rank), [1, 2, 3]).tolist()

    found = on_ranks(body, "tcp", on_failure="shrink")
    assert found[:3] == [[0, 1, 2], [0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1, 2, 2, 2]]


def rank_of_processes(rank: int, backend: str, place: str, port: int) -> bool:
    """Run the sequence as one process of a job."""
    made: Any
    here, back = np.array, np.asarray
    if backend == "torch":
        import torch
        import torch.distributed as dist

        from collectives.backends.torch.torch_backend import TorchBackend

        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
        made, here = TorchBackend(dist.group.WORLD, timeout=60), torch.tensor
    elif backend == "tcp":
        made = TcpBackend(rank, RANKS, rendezvous=f"unix:{place}/rendezvous", timeout=60)
    else:
        made = SharedBackend(FileGather(place, rank, RANKS), rank=rank, size=RANKS, timeout=60)
    with Communicator(machine_plan(), made) as comm:
        for rows, rest in SEQUENCE * 2:
            arrays = inputs(rows, rest)
            found = comm.all_to_all_v(here(arrays[rank]), rows[rank], column(rows, rank))
            assert np.array_equal(back(found), exchanged(arrays, rows)[rank])
    if backend == "torch":
        dist.destroy_process_group()
    return True


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["shared", "tcp", "torch"])
def test_processes_exchange_what_numpy_does(backend: str, tmp_path: Path) -> None:
    if backend == "torch":
        pytest.importorskip("torch", reason="PyTorch is not installed")
    assert all(of_all(in_processes(RANKS, rank_of_processes, backend, str(tmp_path), free_port())))

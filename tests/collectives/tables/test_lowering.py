"""Lowering: tables are complete, minimal and right, by the checker and by execution."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import topoplan
from collectives import TransferTable, check_table, lower
from collectives.tables.transfer_table import PER_ROW
from tests.support.checkout import ROOT
from tests.support.hand_plans import (
    SHAPES,
    forest_plan,
    full_mesh,
    plan_of,
    stage,
    star,
)
from tests.support.table_execution import execute
from topoplan.errors import PlanError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.plans.build import trivial_plan
from topoplan.plans.plan import ALL_COLLECTIVES, COLLECTIVES, Plan
from topoplan.plans.shards import Shard, Stage
from topoplan.plans.verify import Moves, contributions


def elements(plan: Plan, count: int) -> int:
    if plan.collective == "alltoall":
        return count * len(plan.ranks) ** 2
    return count * len(plan.ranks) if plan.collective in ("allgather", "reduce_scatter") else count


@pytest.mark.parametrize("collective", ALL_COLLECTIVES)
@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("size", [3, *(pytest.param(one, marks=pytest.mark.thorough) for one in (2, 8))])
def test_every_order_that_a_table_allows_gives_the_collective(collective: str, shape: str, size: int) -> None:
    plan = forest_plan(size, collective, shape)
    topoplan.verify(plan)
    for count in (0, 1, 7, 15, 17, 645):
        for chunk in (1, 48, 1000):
            check_table(lower(plan, elements(plan, count), chunk_elements=chunk), plan)


def test_two_plans_of_one_digest_have_tables_of_their_own() -> None:
    """A digest may be cut or belong to another plan: tables are kept for plans, not for what is said of them."""
    plans = [forest_plan(4, "allreduce", shape) for shape in ("chain", "star")]
    first, second = (lower(plan, 64, chunk_elements=64, digest="0123456789abcdef") for plan in plans)
    assert first is not second
    for table, plan in zip((first, second), plans, strict=True):
        check_table(table, plan)
    again = Plan.from_json(plans[0].to_json())
    assert lower(again, 64, chunk_elements=64, digest="0123456789abcdef") is first


@pytest.mark.parametrize("collective", ALL_COLLECTIVES)
def test_each_single_prerequisite_is_necessary(collective: str) -> None:
    """Without any one of them the checker finds a race: no prerequisite is implied by the others."""
    plan = forest_plan(5, collective, "binary")
    table = lower(plan, elements(plan, 96), chunk_elements=32)
    assert len(table.prerequisites) > 0
    for lost in range(len(table.prerequisites)):
        row = int(np.searchsorted(table.offsets, lost, side="right")) - 1
        offsets = table.offsets.copy()
        offsets[row + 1 :] -= 1
        damaged = replace(table, offsets=offsets, prerequisites=np.delete(table.prerequisites, lost))
        with pytest.raises(PlanError, match="race"):
            check_table(damaged, plan)


Change = Callable[[NDArray[np.generic]], NDArray[np.generic]]


@pytest.mark.parametrize("column", ["add", "source_fresh", "destination_fresh"])
@pytest.mark.parametrize("collective", ["allreduce", "reduce_scatter", "broadcast"])
def test_the_checker_finds_one_wrong_flag_in_any_row(collective: str, column: str) -> None:
    plan = forest_plan(4, collective, "chain")
    table = lower(plan, 192, chunk_elements=32)
    for row in range(len(table)):
        flags = getattr(table, column).copy()
        flags[row] = not flags[row]
        with pytest.raises(PlanError, match=r"input|claims to read|times instead of"):
            check_table(replace(table, **{column: flags}), plan)


@pytest.mark.parametrize("column", ["start", "stop"])
def test_the_checker_finds_one_element_too_few_or_too_many_in_any_row(column: str) -> None:
    plan = forest_plan(4, "allreduce", "chain")
    table = lower(plan, 645, chunk_elements=48)
    for step in (-1, 1):
        for row in range(len(table)):
            ends = getattr(table, column).copy()
            ends[row] += step
            with pytest.raises(PlanError):
                check_table(replace(table, **{column: ends}), plan)


@pytest.mark.parametrize(
    ("column", "change", "fault"),
    [
        ("destination", lambda rank: (rank + 1) % 4, "moves data|queue"),
        ("source", lambda rank: rank + 4, "row 0 moves data from rank 7 to rank 2"),
        ("queue", lambda queue: queue * 0, "joins other ranks"),
        ("chunk", lambda chunk: -chunk, "behind a later chunk"),
        ("prerequisites", lambda row: row + 1000, "does not stand before it"),
    ],
)
def test_the_checker_finds_rows_that_make_no_sense(column: str, change: Change, fault: str) -> None:
    plan = forest_plan(4, "allreduce", "chain")
    table = lower(plan, 640, chunk_elements=48)
    damaged = replace(table, **{column: change(getattr(table, column))})
    with pytest.raises(PlanError, match=fault):
        check_table(damaged, plan)


def test_a_table_of_ragged_columns_is_refused() -> None:
    table = lower(forest_plan(4, "allreduce", "chain"), 640, chunk_elements=48)
    with pytest.raises(PlanError, match="column stage has 1 entries"):
        replace(table, stage=table.stage[:1])
    with pytest.raises(PlanError, match="do not divide"):
        replace(table, prerequisites=table.prerequisites[1:])


def test_rows_stand_by_chunk_index_and_tile_every_shard() -> None:
    """Chunk indices never fall from row to row; on each tree edge the chunks cover the shard in order."""
    plan = forest_plan(8, "allreduce", "binary")
    table = lower(plan, 16007, chunk_elements=112)
    assert np.all(np.diff(table.chunk) >= 0)
    for shard in range(len(plan.shards)):
        for queue in range(len(table.queues)):
            for position in (0, 1):
                rows = np.flatnonzero(
                    (table.shard == shard) & (table.queue == queue) & (table.stage == position)
                )
                if len(rows):
                    edges = [*table.start[rows].tolist(), int(table.stop[rows[-1]])]
                    assert edges[0] == table.bounds[shard]
                    assert edges[-1] == table.bounds[shard + 1]
                    assert edges[1:-1] == table.stop[rows[:-1]].tolist()


def test_additions_at_a_parent_form_a_chain_in_ascending_rank() -> None:
    plan = plan_of(5, "reduce", [Shard(Fraction(1), (stage("reduce", 2, star(range(5), 2)),))], root=2)
    table = lower(plan, 4, chunk_elements=4)
    assert table.source.tolist() == [0, 1, 3, 4]
    assert [table.before(row).tolist() for row in range(4)] == [[], [0], [1], [2]]


def test_a_store_waits_for_the_last_read_of_what_it_overwrites() -> None:
    """Rank 1 passes its value on and only then receives another: write after read."""
    stages = (stage("broadcast", 1, {2: 1}), stage("broadcast", 0, {1: 0}), stage("broadcast", 0, {2: 0}))
    plan = plan_of(3, "broadcast", [Shard(Fraction(1), stages)], root=0)
    topoplan.verify(plan)
    table = lower(plan, 1, chunk_elements=1)
    assert [table.before(row).tolist() for row in range(3)] == [[], [0], [0]]
    check_table(table, plan)


def test_a_plan_that_computes_the_result_twice_in_different_orders_is_refused() -> None:
    """Both halves sum up, swap, and add: every count is right, but rounding could differ between ranks."""
    pairs = ({1: 0}, {3: 2})
    stages = (
        *(stage(op, min(t.values()), t) for op in ("reduce", "broadcast") for t in pairs),
        stage("reduce", 0, {2: 0}),
        stage("reduce", 3, {1: 3}),
        stage("broadcast", 0, {1: 0}),
        stage("broadcast", 3, {2: 3}),
    )
    plan = plan_of(4, "allreduce", [Shard(Fraction(1), stages)])
    topoplan.verify(plan)
    with pytest.raises(PlanError, match="shard 0, rank 2: ends with another value"):
        lower(plan, 10, chunk_elements=4)


def test_bad_sizes_are_refused_with_a_remedy() -> None:
    plan = forest_plan(8, "allgather", "star")
    with pytest.raises(UsageError, match="13 elements cannot be divided among 8 ranks; pad the buffer to 16"):
        lower(plan, 13, chunk_elements=4)
    with pytest.raises(UsageError, match="count must be 0 or more, got -1"):
        lower(plan, -1, chunk_elements=4)
    with pytest.raises(UsageError, match=r"count must be below 2\*\*63 elements, got"):
        lower(plan, 1 << 63, chunk_elements=4)
    with pytest.raises(UsageError, match="chunk_elements must be from 1 to 9223372036854775807, got 0"):
        lower(plan, 8, chunk_elements=0)


def test_equal_plans_share_one_table_and_it_is_read_only() -> None:
    one, other = (forest_plan(6, "allreduce", "binary") for _ in range(2))
    table = lower(one, 100, chunk_elements=9)
    assert lower(other, 100, chunk_elements=9) is table
    assert lower(other, 101, chunk_elements=9) is not table
    with pytest.raises(ValueError, match="read-only"):
        table.start[0] = 1


def test_one_rank_needs_no_transfer() -> None:
    plan = trivial_plan(Fabric(full_mesh(1), ("nvlink",)), "allreduce", root=None, method="hand")
    table = lower(plan, 10, chunk_elements=4)
    assert len(table) == 0
    assert table.kept() == [(0, 0, 10)]
    check_table(table, plan)


def test_kept_is_the_root_of_a_broadcast() -> None:
    plan = forest_plan(4, "broadcast", "chain", root=3)
    table = lower(plan, 100, chunk_elements=16)
    assert sum(stop - start for _, start, stop in table.kept()) == 100
    assert {rank for rank, _, _ in table.kept()} == {3}


@st.composite
def random_trees(draw: st.DrawFn, *, ranks: list[int]) -> tuple[int, dict[int, int]]:
    order = draw(st.permutations(ranks))
    tree = {order[i]: order[draw(st.integers(0, i - 1))] for i in range(1, len(order))}
    return order[0], tree


@st.composite
def random_stages(draw: st.DrawFn, *, ranks: list[int]) -> tuple[Stage, ...]:
    """Stages of an allreduce: groups reduce, their roots go on the same way, other trees lead back down."""
    if len(ranks) == 1:
        return ()
    groups: dict[int, list[int]] = {}
    for rank in ranks:
        groups.setdefault(draw(st.integers(0, len(ranks) // 2)), []).append(rank)
    up, down, roots = [], [], []
    for _, group in sorted(groups.items()):
        root, tree = draw(random_trees(ranks=group))
        roots.append(root)
        up.append(stage("reduce", root, tree))
        order = draw(st.permutations([rank for rank in group if rank != root]))
        other = {rank: [root, *order[:i]][draw(st.integers(0, i))] for i, rank in enumerate(order)}
        down.append(stage("broadcast", root, other))
    if len(roots) == len(ranks):
        root, tree = draw(random_trees(ranks=roots))
        return (stage("reduce", root, tree), stage("broadcast", root, tree))
    return (*up, *draw(random_stages(ranks=roots)), *down)


@st.composite
def random_plans(draw: st.DrawFn) -> Plan:
    """A valid plan of any collective: random trees, and random shares where the collective allows them."""
    size = draw(st.integers(2, 6))
    collective = draw(st.sampled_from(COLLECTIVES))
    ranks = list(range(size))
    weights = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    root = draw(st.sampled_from(ranks)) if collective in ("broadcast", "reduce") else None
    shards = []
    if collective == "allreduce":
        shards = [Shard(share, draw(random_stages(ranks=ranks))) for share in shares]
    else:
        op = "broadcast" if collective in ("broadcast", "allgather") else "reduce"
        for owner in [root] if root is not None else ranks:
            for share in shares:
                others = draw(st.permutations([rank for rank in ranks if rank != owner]))
                order = [owner, *others]
                tree = {order[i]: order[draw(st.integers(0, i - 1))] for i in range(1, size)}
                part = share if root is not None else share / size
                shards.append(Shard(part, (stage(op, owner, tree),)))
    return plan_of(size, collective, shards, root=root)


@given(random_plans(), st.integers(0, 480), st.integers(1, 192))
@settings(max_examples=100, deadline=None)
def test_random_forests_lower_to_right_tables(plan: Plan, count: int, chunk: int) -> None:
    topoplan.verify(plan)
    check_table(lower(plan, elements(plan, count), chunk_elements=chunk), plan)


@given(random_plans(), st.integers(1, 64))
@settings(max_examples=60, deadline=None)
def test_execution_counts_contributions_as_the_plan_checker_does(plan: Plan, chunk: int) -> None:
    """Two roads: a table run on one-hot inputs, and `contributions` on the plan's stages."""
    size = len(plan.ranks)
    count = 100 * size
    table = lower(plan, count, chunk_elements=chunk)
    for contribution in range(size):
        memory = [np.full(count, int(rank == contribution)) for rank in range(size)]
        execute(table, memory, memory)
        for number, shard in enumerate(plan.shards):
            held = contributions(list(map(Moves.of, shard.stages)), np.eye(size, dtype=np.int64), size)
            part = slice(int(table.bounds[number]), int(table.bounds[number + 1]))
            for rank in range(size):
                assert np.all(memory[rank][part] == held[rank, contribution])


def shuffled(table: TransferTable, generator: np.random.Generator) -> TransferTable:
    waiting = np.diff(table.offsets).tolist()
    dependents: dict[int, list[int]] = {}
    for row in range(len(table)):
        for earlier in table.before(row).tolist():
            dependents.setdefault(earlier, []).append(row)
    ready = [row for row, number in enumerate(waiting) if number == 0]
    order = []
    while ready:
        row = ready.pop(int(generator.integers(len(ready))))
        order.append(row)
        for dependent in dependents.get(row, ()):
            waiting[dependent] -= 1
            if waiting[dependent] == 0:
                ready.append(dependent)
    assert len(order) == len(table)
    place = np.argsort(order)
    before = [place[table.before(row)] for row in order]
    return replace(
        table,
        **{name: getattr(table, name)[order] for name in PER_ROW},
        offsets=np.concatenate(([0], np.cumsum([len(rows) for rows in before], dtype=np.int64))),
        prerequisites=np.concatenate([*before, np.empty(0, dtype=np.int64)]),
    )


@given(random_plans(), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_any_allowed_order_gives_the_same_bytes_in_place_or_not(plan: Plan, seed: int) -> None:
    generator = np.random.default_rng(seed)
    size = len(plan.ranks)
    count = 85 * size
    table = lower(plan, count, chunk_elements=48)
    inputs = [generator.standard_normal(count).astype(np.float32) for _ in range(size)]
    wanted = [array.copy() for array in inputs]
    execute(table, wanted, wanted)
    for _ in range(3):
        order = shuffled(table, generator)
        within = [array.copy() for array in inputs]
        execute(order, within, within)
        apart = [array.copy() for array in inputs]
        for rank, start, stop in written_ranges(table, count):
            apart[rank][start:stop] = np.nan
        execute(order, inputs, apart)
        for rank in range(size):
            assert within[rank].tobytes() == wanted[rank].tobytes()
            assert apart[rank].tobytes() == wanted[rank].tobytes()


def written_ranges(table: TransferTable, count: int) -> list[tuple[int, int, int]]:
    kept = set(table.kept())
    return [
        (rank, int(start), int(stop))
        for rank in range(table.ranks)
        for start, stop in zip(table.bounds, table.bounds[1:], strict=False)
        if (rank, int(start), int(stop)) not in kept
    ]


def test_importing_collectives_loads_numpy_and_no_solver_or_plot_library() -> None:
    code = (
        "import sys, collectives; "
        "print([n for n in ('matplotlib', 'networkx', 'numpy', 'scipy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "['numpy']"

"""The Communicator with plans by size: right on both sides of every crossover, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

import topoplan
from collectives import Communicator, lower
from collectives.backends.plan_and_chunk_store import PlanStore
from tests.support.hand_plans import SHAPES, forest_plan
from topoplan.errors import PlanError, UsageError
from topoplan.plans.plan import COLLECTIVES, SizeRange
from topoplan.plans.size_plans import SizePlans

Array = NDArray[np.float32]
METHODS = {"allreduce": "all_reduce", "allgather": "all_gather"}
PARTS = ("allgather", "reduce_scatter")
LARGEST = 9 << 20
"""Bytes of the largest buffer that is run here."""


def by_hand(collective: str) -> SizePlans:
    """Stars, chains and heaps on five ranks, from 0, 403 and 1200 bytes on."""
    plans = [forest_plan(5, collective, shape, root=2) for shape in sorted(SHAPES)]
    return SizePlans(
        (SizeRange(0, 403, plans[0]), SizeRange(403, 1200, plans[1]), SizeRange(1200, None, plans[2]))
    )


def call(comm: Communicator, collective: str, count: int, seed: int = 0) -> tuple[list[Array], list[Array]]:
    """Run a collective whose buffer has so many elements; returns inputs and the results of ranks that have one."""
    generator = np.random.default_rng(seed)
    each = count // comm.size if collective == "allgather" else count
    inputs = [generator.standard_normal(each).astype(np.float32) for _ in range(comm.size)]
    results = getattr(comm, METHODS.get(collective, collective))(inputs)
    return inputs, [result for result in results if result is not None]


def check(collective: str, inputs: Sequence[Array], results: Sequence[Array], root: int) -> None:
    """Sums within float32 of the exact ones, copies exact; where all ranks get the same, the same bits."""
    if collective == "broadcast":
        expected = [inputs[root]] * len(inputs)
    elif collective == "allgather":
        expected = [np.concatenate(inputs)] * len(inputs)
    else:
        total = np.sum(np.stack(inputs), axis=0, dtype=np.float64)
        expected = np.split(total, len(inputs)) if collective == "reduce_scatter" else [total] * len(results)
    for result, wanted in zip(results, expected, strict=True):
        assert result.shape == wanted.shape
        assert np.allclose(result, wanted, rtol=1e-5, atol=1e-5)
    if collective in ("broadcast", "allgather"):
        assert all(np.array_equal(a, b) for a, b in zip(results, expected, strict=True))
    if collective != "reduce_scatter":
        assert all(result.tobytes() == results[0].tobytes() for result in results)


def around(crossover: int, itemsize: int, step: int) -> list[int]:
    """Counts of elements one step below the crossover, the first at or above it, and one step above."""
    first = -(-crossover // (itemsize * step)) * step
    return [first - step, first, first + step]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_results_are_right_around_every_crossover_of_handmade_plans(collective: str) -> None:
    """One element below, at and above; all five collectives, sizes of 0 and 1 too."""
    plans = by_hand(collective)
    step = 5 if collective in PARTS else 1
    counts = {0, step, *(count for size in plans.crossovers for count in around(size, 4, step))}
    with Communicator(plans, chunk_bytes=64) as comm:
        for count in sorted(counts):
            inputs, results = call(comm, collective, count)
            check(collective, inputs, results, root=2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("machine", "collective"),
    [(name, collective) for name in ("dgx-1v", "v100x4", "pcie-x8") for collective in COLLECTIVES]
    + [("dgx-2", "broadcast")],
)
def test_results_are_right_around_every_crossover_of_real_machines(machine: str, collective: str) -> None:
    """As above for the ranges that the model finds, up to 9 MB."""
    plans = topoplan.plan_by_size(topoplan.load(machine), collective)
    crossovers = [size for size in plans.crossovers if size <= LARGEST]
    assert crossovers
    step = len(plans.ranks) if collective in PARTS else 1
    with Communicator(plans) as comm:
        for size in crossovers:
            counts = around(size, 4, step)
            store = PlanStore(plans)
            picked = [store.plan(collective, plans.root, 4 * count) for count in counts]
            assert picked[0] is not picked[1] is picked[2]
            for count in counts:
                inputs, results = call(comm, collective, count)
                check(collective, inputs, results, root=0)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8"])
def test_bytes_pick_the_plan_and_not_elements(dtype: str) -> None:
    """At 403 bytes a sum is that of the second plan, in any dtype: bit for bit what that plan alone gives."""
    plans = by_hand("allreduce")
    itemsize = np.dtype(dtype).itemsize
    generator = np.random.default_rng(1)
    for count in around(403, itemsize, 1):
        inputs = [(generator.standard_normal(count) * 50).astype(dtype) for _ in range(5)]
        expected = plans.plans[count * itemsize >= 403]
        with Communicator(plans) as comm, Communicator(expected) as alone:
            assert [a.tobytes() for a in comm.all_reduce(inputs)] == [
                b.tobytes() for b in alone.all_reduce(inputs)
            ]


def test_parts_count_as_the_full_buffer() -> None:
    """All_gather and reduce_scatter pick by the gathered buffer: 5 x 80 bytes is below 403, 5 x 84 is not."""
    for collective in PARTS:
        store = PlanStore(by_hand(collective))
        tables = [
            lower(store.plan(collective, None, 20 * each), 5 * each, chunk_elements=10**6)
            for each in (20, 21)
        ]
        edges = [set(zip(table.source.tolist(), table.destination.tolist(), strict=True)) for table in tables]
        assert edges[0] != edges[1]
        with Communicator(by_hand(collective)) as comm:
            for count in (100, 105):
                inputs, results = call(comm, collective, count)
                check(collective, inputs, results, root=2)


def test_other_collectives_are_planned_by_size_when_they_are_needed() -> None:
    """From plans of an allreduce, a broadcast from rank 3: the root's star for 1 KB, two levels for 1 MB; kept."""
    store = PlanStore(topoplan.plan_by_size(topoplan.load("dgx-2"), "allreduce", gpus=[0, 2, 4, 6, 8]))
    small, large = (store.plan("broadcast", 3, size) for size in (1 << 10, 1 << 20))
    assert (small.height, large.height, small.root, small.ranks) == (1, 2, 3, large.ranks)
    assert store.plan("broadcast", 3, 1 << 20) is large
    assert store.plan("broadcast", 4, 1 << 10) is not small
    single = PlanStore(topoplan.plan(topoplan.load("dgx-2"), "allreduce", gpus=[0, 2, 4]))
    assert single.plan("broadcast", 0, 4) is single.plan("broadcast", 0, 1 << 30)


def test_a_communicator_of_a_file_does_all_five() -> None:
    """What `load_plan` gives is taken as it is; the root of the plans is the default root."""
    plans = topoplan.plan_by_size(topoplan.load("v100x4"), "reduce", root=2)
    with Communicator(SizePlans.from_json(plans.to_json())) as comm:
        assert (comm.size, comm.plan.root) == (4, 2)
        for collective in COLLECTIVES:
            for count in (12, 400_000):
                inputs, results = call(comm, collective, count)
                check(collective, inputs, results, root=2)


def test_one_rank_needs_no_plan() -> None:
    """Plans by size of one GPU give back what they get."""
    with Communicator(topoplan.plan_by_size(topoplan.load("dgx-1v"), gpus=[5])) as comm:
        assert comm.all_reduce([np.arange(3)])[0].tolist() == [0, 1, 2]
        assert comm.all_gather([np.arange(3)])[0].tolist() == [0, 1, 2]


def test_a_wrong_plan_in_any_range_is_refused_at_once() -> None:
    """Before the first call, though the first range is right."""
    good, wrong = by_hand("allreduce"), forest_plan(5, "allreduce", "star").shards[1:]
    broken = replace(good.ranges[2], plan=replace(good.plans[2], shards=wrong))
    with pytest.raises(PlanError, match=r"sizes from 1\.172KB: the shares add up to"):
        Communicator(SizePlans((*good.ranges[:2], broken)))
    with pytest.raises(UsageError, match=r"make one with topoplan\.plan or topoplan\.plan_by_size"):
        Communicator(good.ranges)  # type: ignore[arg-type]


def test_a_plan_in_the_memory_of_one_that_is_gone_has_its_own_digest() -> None:
    """The number of an object is given out again; plans that come and go must not share tables."""
    store = PlanStore(forest_plan(3, "allreduce", "chain"))
    for shape in sorted(SHAPES) * 20:
        plan = forest_plan(3, "allreduce", shape)
        assert store.key(plan).digest == plan.digest
        del plan

"""The Communicator with plans by size: right on both sides of every crossover, and the same on all ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import topoplan
from collectives import Communicator
from collectives.backends.plan_and_chunk_store import PlanStore
from tests.support.hand_plans import SHAPES, forest_plan
from tests.support.tcp_jobs import call
from topoplan.errors import PlanError, UsageError
from topoplan.plans.plan import COLLECTIVES, SizeRange
from topoplan.plans.size_plans import SizePlans

PARTS = ("allgather", "reduce_scatter")
LARGEST = 9 << 20
"""Bytes of the largest buffer that is run here."""


def by_hand(collective: str) -> SizePlans:
    """Stars, chains and heaps on five ranks, from 0, 403 and 1200 bytes on."""
    plans = [forest_plan(5, collective, shape, root=2) for shape in sorted(SHAPES)]
    return SizePlans(
        (SizeRange(0, 403, plans[0]), SizeRange(403, 1200, plans[1]), SizeRange(1200, None, plans[2]))
    )


def around(crossover: int, itemsize: int, step: int) -> list[int]:
    """Counts of elements one step below the crossover, the first at or above it, and one step above."""
    first = -(-crossover // (itemsize * step)) * step
    return [first - step, first, first + step]


def check(
    comm: Communicator, alone: Communicator, collective: str, count: int, dtype: str = "float32"
) -> None:
    """A collective whose buffer has so many elements has the bits of the plan alone."""
    generator = np.random.default_rng(count)
    each = count // comm.size if collective == "allgather" else count
    inputs = [(generator.standard_normal(each) * 50).astype(dtype) for _ in range(comm.size)]
    for one, other in zip(call(comm, collective, inputs), call(alone, collective, inputs), strict=True):
        assert (one is None) == (other is None)
        assert one is None or one.tobytes() == other.tobytes()


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("dtype", ["float16", "float64", "int8"])
def test_bytes_of_the_whole_buffer_pick_the_plan(collective: str, dtype: str) -> None:
    """One element below, at and above every crossover; sizes of 0 and 1 too."""
    plans = by_hand(collective)
    step, itemsize = 5 if collective in PARTS else 1, np.dtype(dtype).itemsize
    counts = {0, step, *(count for size in plans.crossovers for count in around(size, itemsize, step))}
    with Communicator(plans, chunk_bytes=64) as comm:
        for count in sorted(counts):
            number = sum(count * itemsize >= size for size in plans.crossovers)
            with Communicator(plans.plans[number]) as alone:
                check(comm, alone, collective, count, dtype)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("machine", "collective"),
    [(name, collective) for name in ("dgx-1v", "v100x4", "pcie-x8") for collective in COLLECTIVES]
    + [("dgx-2", "broadcast")],
)
def test_plans_change_at_the_crossovers_of_real_machines(machine: str, collective: str) -> None:
    """The ranges that the model finds, up to 9 MB."""
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
            for count, plan in zip(counts, picked, strict=True):
                with Communicator(plan) as alone:
                    check(comm, alone, collective, count)


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
    with Communicator(SizePlans.from_json(plans.to_json())) as comm, Communicator(plans.plans[0]) as alone:
        assert (comm.size, comm.plan.root) == (4, 2)
        for collective in COLLECTIVES:
            check(comm, alone, collective, 12, "int64")


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

"""The cost model of the windows engine speaks of the kernel that there is: its steps, parts, chunks and limits."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import topoplan
from collectives import lower
from collectives.backends.backend import RankArrays
from collectives.backends.nccl import kernel_program, tree_steps
from collectives.backends.nccl import window_engine as engine
from collectives.tables.lowering import PlanKey
from collectives.tables.transfer_table import result_blocks
from topoplan.model import window_engine
from topoplan.model.candidates import candidates
from topoplan.model.dataflow import dataflow
from topoplan.plans.plan import Plan

COLLECTIVES = ("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter")


def test_limits_are_those_of_the_engine() -> None:
    assert (window_engine.BLOCKS, window_engine.SLOT_BYTES) == (engine.BLOCKS, engine.SLOT_BYTES)
    assert (window_engine.SMALL_BYTES, window_engine.SMALL_BLOCKS) == (
        engine.SMALL_BYTES,
        engine.SMALL_BLOCKS,
    )
    assert (window_engine.PIECES, window_engine.LEAST_CHUNK) == (
        kernel_program.PIECES,
        kernel_program.LEAST_CHUNK,
    )
    assert max(window_engine.CHUNKS) == engine.SLOT_BYTES


@pytest.mark.parametrize(
    ("name", "collective"), [*(("v100x4", one) for one in COLLECTIVES), ("dgx-h100", "allreduce")]
)
def test_steps_are_those_of_the_kernel(name: str, collective: str) -> None:
    """Of every plan that there is a kernel for."""
    for plan in candidates(topoplan.load(name), collective)[0]:
        if not plan.exchanges:
            check_steps(plan)


def check_steps(plan: Plan) -> None:
    """Rank by rank the same edges in and out, and small collectives go in packets where the kernel has an order."""
    key = PlanKey(plan.digest, plan)
    modelled = window_engine.kernel_steps(dataflow(plan))
    arrivals, departures = modelled.arrivals[:, 0].tolist(), modelled.departures[:, 0].tolist()
    kernel = tree_steps.steps_of(key).steps
    assert Counter(zip(modelled.rank.tolist(), arrivals, departures, strict=True)) == Counter(
        (step.rank, len(step.arrivals), len(step.departures)) for step in kernel
    ), plan
    small = window_engine.WindowsClock(plan, window_engine.HOPPER).packets_to > 0
    assert small == (tree_steps.order_of(key) is not None), plan


@pytest.mark.parametrize("blocks", [1, 5, 24])
@pytest.mark.parametrize("nbytes", [1 << 12, 1 << 20, 1 << 28])
def test_parts_and_chunks_are_those_of_the_kernel(blocks: int, nbytes: int) -> None:
    """The chunk of the longest shard to 16 elements, which depends on the number of parts."""
    plan = topoplan.plan(topoplan.load("v100x4"), "allreduce")
    count = nbytes // 4
    table = lower(plan, count, chunk_elements=engine.SLOT_BYTES // 4)
    made = kernel_program.KernelPlan(
        PlanKey(plan.digest, plan), base=0, stride=engine.SLOT_BYTES, blocks=blocks
    )
    array = np.zeros(0)
    block = result_blocks("allreduce", None, 4, count)[0]
    steps = made.tables(table, RankArrays(0, (0, count), array, block, array), 4).phases[0].steps
    clock = window_engine.WindowsClock(plan, window_engine.HOPPER)
    _, chunk = clock.times(nbytes, np.array([blocks]), np.array([engine.SLOT_BYTES]))
    assert set(steps["parts"].tolist()) == {made.parts}
    longest = min(int(steps["chunk"].max()), int(np.diff(table.bounds).max()))
    assert 4 * longest == pytest.approx(chunk[0], abs=2 * 64)

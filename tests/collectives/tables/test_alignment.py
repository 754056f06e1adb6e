"""Borders of shards and chunks, and both ends of messages, lie where 16 bytes can be copied at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import Communicator, TransferTable, lower
from collectives.backends.backend import Call
from collectives.backends.loopback.loopback_backend import Loopback
from collectives.sparse.codec import WireFormat
from tests.bench.alignment import COUNTS, MACHINES, PACK, Crossing, nccl_crossings, torch_crossings
from tests.support.hand_plans import SHAPES, forest_plan
from topoplan.plans.plan import ALL_COLLECTIVES, Plan
from topoplan.plans.shards import ALIGNMENT

GATHERED = ("allgather", "reduce_scatter")

Crossings = Callable[[Plan, TransferTable, int], list[Crossing]]

BACKENDS: dict[str, Crossings] = {
    "nccl": nccl_crossings,
    "torch": torch_crossings,
}


def all_packed(crossings: list[Crossing]) -> bool:
    return len(crossings) > 0 and all(one.packed for one in crossings)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ALL_COLLECTIVES)
@pytest.mark.parametrize("each", [1, 15, 16, 17, 1003])
def test_chunks_are_aligned_within_blocks(collective: str, each: int) -> None:
    plan = topoplan.plan(topoplan.load("dgx-1v"), collective)
    count, block = plan.blocks * each, each
    for chunk in (1, 100, 1 << 20):
        table = lower(plan, count, chunk_elements=chunk)
        assert len(table) > 0
        assert not (table.start % block % ALIGNMENT).any()
        assert ((table.stop % block % ALIGNMENT == 0) | (table.stop % block == 0)).all()
        assert table.chunk_elements % ALIGNMENT == 0


def test_a_buffer_that_fits_into_a_chunk_stays_in_one() -> None:
    plan = topoplan.ring_plan(topoplan.load("dgx-1v"), "broadcast", gpus=[0, 1, 2, 3])
    assert set(lower(plan, 1003, chunk_elements=1003).chunk.tolist()) == {0}


@pytest.mark.sampled
@pytest.mark.parametrize("count", [*COUNTS, 1_000_003, 4_099])
@pytest.mark.parametrize("name", MACHINES)
def test_every_message_of_an_allreduce_is_copied_in_packs(name: str, count: int) -> None:
    """On the machines of the library, over nccl and torch; only messages at the buffer's end have a remainder."""
    plan = topoplan.plan(topoplan.load(name), "allreduce")
    table = lower(plan, count, chunk_elements=1 << 18)
    for crossings in BACKENDS.values():
        found = crossings(plan, table, 4)
        assert all_packed(found)
        assert sum(one.nbytes for one in found) == 4 * count * 2 * (len(plan.ranks) - 1)
        assert all(one.nbytes % PACK == 0 or table.shard[one.row] == table.shard.max() for one in found)


@pytest.mark.sampled
@pytest.mark.parametrize("itemsize", [1, 2, 8])
@pytest.mark.parametrize("collective", GATHERED)
@pytest.mark.parametrize("name", MACHINES)
def test_messages_of_aligned_blocks_are_packed(name: str, collective: str, itemsize: int) -> None:
    plan = topoplan.plan(topoplan.load(name), collective)
    table = lower(plan, len(plan.ranks) * 16 * 1001, chunk_elements=1000)
    for crossings in BACKENDS.values():
        assert all_packed(crossings(plan, table, itemsize))


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ALL_COLLECTIVES)
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_messages_of_small_dtypes_along_any_tree_are_copied_in_packs(collective: str, shape: str) -> None:
    """Partial sums lie in scratch memory, and slots hold shards of any length."""
    plan = forest_plan(5, collective, shape)
    for count in (25 * 16, 25 * 1008, *([] if plan.blocks > 1 else [1, 17, 4999])):
        table = lower(plan, count, chunk_elements=300)
        for crossings in BACKENDS.values():
            assert all_packed(crossings(plan, table, 1))


class Recording(Loopback):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.tables: list[TransferTable] = []

    def run(self, call: Call[Any]) -> None:
        self.tables.append(call.table)
        super().run(call)


@pytest.mark.thorough
@pytest.mark.parametrize("wire", [None, WireFormat()], ids=["pairs of numbers", "packed"])
@pytest.mark.parametrize("exchange", ["pairs", "servers", "tree", "balanced"])
def test_messages_of_entries_are_aligned(exchange: str, wire: WireFormat | None) -> None:
    """Elements and entries alike; 8 bytes an entry, of which most messages have an odd number."""
    servers = [topoplan.Server(topoplan.load("dgx-1v"), list(range(number))) for number in (4, 4)]
    backend = Recording(8)
    with Communicator(topoplan.three_phase(topoplan.cluster(servers, nic_gbps=100)), backend) as comm:
        gradients = [
            np.random.default_rng(rank).standard_normal(5003).astype(np.float32) for rank in range(8)
        ]
        comm.sparse_all_reduce(gradients, density=0.021, exchange=exchange, wire=wire)
    starts = np.concatenate([table.start for table in backend.tables])
    assert len(set(starts.tolist())) > 1
    assert not (starts % PACK).any()

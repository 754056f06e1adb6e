"""Streams: the few tree edges behind the rows of a table, and the pipeline they allow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import topoplan
from collectives import lower
from collectives.backends.stepped_program import moves_of
from collectives.tables.transfer_table import TransferTable, row_of, stream_of, streams
from tests.support.hand_plans import SHAPES, forest_plan, three_phase_plan
from topoplan.plans.plan import ALL_COLLECTIVES


@st.composite
def tables(draw: st.DrawFn) -> TransferTable:
    ranks = draw(st.integers(2, 6))
    collective = draw(st.sampled_from(ALL_COLLECTIVES))
    plan = forest_plan(ranks, collective, draw(st.sampled_from(sorted(SHAPES))))
    return lower(
        plan, plan.blocks * ranks * draw(st.integers(0, 480)), chunk_elements=draw(st.integers(1, 640))
    )


def steps(table: TransferTable) -> NDArray[np.int64]:
    moves = moves_of(table)
    assert sorted(moves.row.tolist()) == list(range(len(table)))
    found: NDArray[np.int64] = moves.step[np.argsort(moves.row)]
    return found


@given(tables())
@settings(max_examples=100, deadline=None)
def test_every_row_is_one_chunk_of_one_stream(table: TransferTable) -> None:
    parts = streams(table)
    numbers = stream_of(table)
    assert len(numbers) == len(table) == sum(part.chunks for part in parts)
    for row in range(len(table)):
        part = parts[numbers[row]]
        chunk = int(table.chunk[row])
        assert row_of(table, part.number, chunk) == row
        assert (part.source, part.destination) == (table.source[row], table.destination[row])
        assert (part.add, part.source_fresh) == (table.add[row], table.source_fresh[row])
        assert part.start + chunk * table.chunk_elements == table.start[row]
        assert sorted(row_of(table, other, chunk) for other in part.waits) == sorted(
            table.before(row).tolist()
        )


@given(tables())
@settings(max_examples=100, deadline=None)
def test_data_moves_in_a_later_step_than_what_it_was_made_from(table: TransferTable) -> None:
    """Only additions at one rank may share a step with what they wait for."""
    step = steps(table)
    for row in range(len(table)):
        for earlier in table.before(row):
            together = (
                table.add[row]
                and table.add[earlier]
                and (table.destination[row] == table.destination[earlier])
            )
            assert step[earlier] < step[row] or (together and step[earlier] == step[row])


def test_a_step_takes_one_chunk_of_every_stream_at_its_level() -> None:
    """The pipeline of c chunks through a chain of 5 ranks and back takes c + 2 x 4 - 1 steps."""
    table = lower(forest_plan(5, "allreduce", "chain"), 5 * 256, chunk_elements=64)
    chunks = max(part.chunks for part in streams(table))
    assert steps(table).max() + 1 == chunks + 2 * 4 - 1


def test_siblings_arrive_together_and_windows_cover_the_longer_way_of_others() -> None:
    """One-hop trees of 16 GPUs: two steps. Three phases: a local root waits for its own server's tree first."""
    star = streams(lower(topoplan.plan(topoplan.load("dgx-2"), "allreduce"), 25600, chunk_elements=160))
    assert {part.level for part in star} == {0, 1}
    assert {part.window for part in star} == {2}
    phases = streams(lower(three_phase_plan([[0, 1, 2], [3, 4, 5, 6, 7]]), 128000, chunk_elements=160))
    for part in phases:
        before = [other for other in phases if other.number in part.waits and other.add and part.add]
        behind = max((o.level for o in before if o.destination == part.destination), default=0)
        assert part.window >= 2 + behind - part.level


@pytest.mark.parametrize("shares", ["8", "1"])
def test_shards_of_other_lengths_keep_pace(shares: str) -> None:
    """A shard with a third of the chunks takes every third step, so that links carry about the same in each."""
    plan = topoplan.plan(topoplan.load("dgx-1v"), "broadcast", gpus=list(range(int(shares) + 1))[:8] or None)
    table = lower(plan, 60_000, chunk_elements=100)
    longest = max(part.chunks for part in streams(table))
    depth = max(part.level for part in streams(table))
    last = np.zeros(len(table.bounds) - 1)
    np.maximum.at(last, table.shard, steps(table))
    assert (last <= longest + depth).all()

"""The steps of each rank in the torch back end: no memory is used twice at a time, nothing waits for ever."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import TransferTable, lower
from collectives.backends.loopback.backend import execute
from collectives.backends.torch.program import RESULT, SCRATCH, SOURCE, Part, Program, program
from tests.support.hand_plans import SHAPES, forest_plan, three_phase_plan
from topoplan.plans.plan import COLLECTIVES, Plan

Line = NDArray[np.float64]
GARBAGE = -1e300


class Rank:
    """One rank's memory and its way through its program; ``mail`` is what is under way, by row."""

    def __init__(self, made: Program, source: Line, result: Line, mail: dict[int, Line]) -> None:
        self.made = made
        self.lines = {SOURCE: source, RESULT: result, SCRATCH: np.zeros(made.slots * made.slot)}
        self.mail = mail
        self.sent: dict[int, Line] = {}

    def at(self, part: Part) -> Line:
        found = self.lines[part.line][part.start : part.stop]
        assert len(found) == part.stop - part.start > 0
        return found

    def run(self) -> Iterator[None]:
        """Yields while it waits. Data lands as late as it may, in memory that is spoilt as early as it may be."""
        for step in self.made.steps:
            for transfer in step.ended:
                assert np.array_equal(self.at(transfer.part), self.sent.pop(transfer.row))
            for transfer in step.receives:
                self.at(transfer.part)[:] = GARBAGE
            for transfer in step.sends:
                self.mail[transfer.row] = self.sent[transfer.row] = self.at(transfer.part).copy()
            for arrival in step.arrivals:
                while arrival.row not in self.mail:
                    yield
                arrived = self.at(arrival.arrived)
                arrived[:] = self.mail.pop(arrival.row)
                if arrival.own is not None:
                    self.at(arrival.target)[:] = self.at(arrival.own) + arrived
                else:
                    assert arrival.target == arrival.arrived
        assert not self.sent


def block_of(plan: Plan, rank: int, count: int) -> tuple[int, int]:
    if plan.collective == "reduce":
        return (0, count if rank == plan.root else 0)
    size = len(plan.ranks)
    if plan.collective == "reduce_scatter":
        return (rank * count // size, (rank + 1) * count // size)
    return (0, count)


def given_of(plan: Plan, rank: int, count: int) -> tuple[int, int]:
    size = len(plan.ranks)
    return (
        (rank * count // size, (rank + 1) * count // size) if plan.collective == "allgather" else (0, count)
    )


def programs(plan: Plan, table: TransferTable, ahead: int) -> list[Program]:
    return [
        program(table, r, given_of(plan, r, table.count), block_of(plan, r, table.count), ahead=ahead)
        for r in range(len(plan.ranks))
    ]


PLANS = [forest_plan(6, collective, shape) for collective in COLLECTIVES for shape in sorted(SHAPES)]
PLANS.append(three_phase_plan([[0, 1, 2], [3, 4, 5, 6, 7]]))


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_programs_give_what_the_table_says_however_late_data_lands(plan: Plan, ahead: int) -> None:
    size = len(plan.ranks)
    count = 965 * size
    table = lower(plan, count, chunk_elements=112)
    generator = np.random.default_rng(0)
    inputs = [generator.standard_normal(count) for _ in range(size)]
    wanted = [line.copy() for line in inputs]
    execute(table, inputs, wanted)
    mail: dict[int, Line] = {}
    ranks = [
        Rank(
            made,
            inputs[r][slice(*given_of(plan, r, count))].copy(),
            inputs[r][slice(*block_of(plan, r, count))].copy(),
            mail,
        )
        for r, made in enumerate(programs(plan, table, ahead))
    ]
    running = [rank.run() for rank in ranks]
    for _ in range(10 * len(table)):
        running = [one for one in running if next(one, "ended") != "ended"]
    assert not running
    assert not mail
    for r, rank in enumerate(ranks):
        block = slice(*block_of(plan, r, count))
        assert np.array_equal(rank.lines[RESULT], wanted[r][block])


@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_without_posting_ahead_both_ends_put_the_same_rows_into_one_step(plan: Plan) -> None:
    table = lower(plan, 965 * len(plan.ranks), chunk_elements=112)
    made = programs(plan, table, 0)
    for a, sender in enumerate(made):
        for b, receiver in enumerate(made):
            sends = [[one.row for one in step.sends if one.peer == b] for step in sender.steps]
            receives = [[one.row for one in step.receives if one.peer == a] for step in receiver.steps]
            assert [rows for rows in sends if rows] == [rows for rows in receives if rows]


@pytest.mark.thorough
@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_scratch_memory_does_not_grow_with_the_number_of_chunks(plan: Plan) -> None:
    size = len(plan.ranks)
    few, many = (lower(plan, n * 960 * size, chunk_elements=112) for n in (2, 8))
    for short, long in zip(programs(plan, few, 1), programs(plan, many, 1), strict=True):
        assert long.slots <= short.slots + size
    if plan.collective in ("broadcast", "allgather"):
        assert all(made.slots == 0 for made in programs(plan, many, 1))

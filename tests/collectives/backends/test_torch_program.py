"""The steps of each rank in the torch back end: no memory is used twice at a time, nothing waits for ever."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import TransferTable, lower
from collectives.backends.stepped_program import ProgramMessage
from collectives.backends.torch.torch_backend import Part, TorchJoin, TorchProgram, program
from tests.support.hand_plans import SHAPES, forest_plan, three_phase_plan
from tests.support.table_execution import execute
from topoplan.plans.plan import COLLECTIVES, Plan

Line = NDArray[np.float64]
GARBAGE = -1e300
ITEMSIZE = 8


class Rank:
    """One rank's memory and its way through its program; ``mail`` is what is under way, by row."""

    def __init__(self, made: TorchProgram, source: Line, result: Line, mail: dict[int, Line]) -> None:
        self.made = made
        self.lines = [source, result, np.zeros(made.scratch // ITEMSIZE)]
        self.mail = mail
        self.sent: dict[int, Line] = {}

    def at(self, part: Part, count: int) -> Line:
        buffer, offset = part
        assert offset % ITEMSIZE == 0
        found = self.lines[buffer][offset // ITEMSIZE :][:count]
        assert len(found) == count > 0
        return found

    def of(self, message: ProgramMessage) -> Line:
        return self.at((message.buffer, message.offset), message.nbytes // ITEMSIZE)

    def join(self, joins: tuple[TorchJoin, ...]) -> None:
        for one in joins:
            own, arrived, target = (self.at(part, one.count) for part in (one.own, one.arrived, one.target))
            target[:] = own + arrived

    def start(self, receives: tuple[ProgramMessage, ...], open_: dict[int, ProgramMessage]) -> None:
        """Receives spoil their memory at once."""
        for message in receives:
            self.of(message)[:] = GARBAGE
            open_[message.row] = message

    def run(self) -> Iterator[None]:
        """Yields while it waits. Data lands as late as it may, in memory that is spoilt as early as it may be."""
        open_: dict[int, ProgramMessage] = {}
        for turn in self.made.turns:
            for message in turn.ended:
                assert np.array_equal(self.of(message), self.sent.pop(message.row))
            self.join(turn.joins)
            self.start(turn.receives, open_)
            for message in turn.sends:
                self.mail[message.row] = self.sent[message.row] = self.of(message).copy()
            self.start(turn.ahead, open_)
            for message in turn.arrivals:
                while message.row not in self.mail:
                    yield
                self.of(open_.pop(message.row))[:] = self.mail.pop(message.row)
        assert not self.sent
        assert not open_


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


def programs(plan: Plan, table: TransferTable, *, ahead: bool, step_bytes: int = 1) -> list[TorchProgram]:
    return [
        program(
            table,
            r,
            given_of(plan, r, table.count),
            block_of(plan, r, table.count),
            ITEMSIZE,
            ahead=ahead,
            step_bytes=step_bytes,
        )
        for r in range(len(plan.ranks))
    ]


PLANS = [forest_plan(6, collective, shape) for collective in COLLECTIVES for shape in sorted(SHAPES)]
PLANS.append(three_phase_plan([[0, 1, 2], [3, 4, 5, 6, 7]]))


@pytest.mark.sampled
@pytest.mark.parametrize(("ahead", "step_bytes"), [(False, 1), (True, 1), (False, 4000), (True, 4000)])
@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_programs_give_what_the_table_says_however_late_data_lands(
    plan: Plan, ahead: bool, step_bytes: int
) -> None:
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
        for r, made in enumerate(programs(plan, table, ahead=ahead, step_bytes=step_bytes))
    ]
    running = [rank.run() for rank in ranks]
    for _ in range(10 * len(table)):
        running = [one for one in running if next(one, "ended") != "ended"]
    assert not running
    assert not mail
    for r, rank in enumerate(ranks):
        block = slice(*block_of(plan, r, count))
        assert np.array_equal(rank.lines[1], wanted[r][block])


@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_without_posting_ahead_both_ends_put_the_same_rows_into_one_step(plan: Plan) -> None:
    table = lower(plan, 965 * len(plan.ranks), chunk_elements=112)
    made = programs(plan, table, ahead=False)
    for a, sender in enumerate(made):
        for b, receiver in enumerate(made):
            sends = [[one.row for one in step.sends if one.peer == b] for step in sender.turns]
            receives = [[one.row for one in step.receives if one.peer == a] for step in receiver.turns]
            assert [rows for rows in sends if rows] == [rows for rows in receives if rows]


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_scratch_memory_does_not_grow_with_the_number_of_chunks(plan: Plan) -> None:
    size = len(plan.ranks)
    few, many = (lower(plan, n * 960 * size, chunk_elements=112) for n in (2, 8))
    slot = 112 * ITEMSIZE + 32
    for short, long in zip(programs(plan, few, ahead=True), programs(plan, many, ahead=True), strict=True):
        # two areas for what a step brings, of which the short one has not seen the largest
        assert long.scratch <= short.scratch + 2 * size * slot
    if plan.collective in ("broadcast", "allgather"):
        assert all(made.scratch == 0 for made in programs(plan, many, ahead=True))

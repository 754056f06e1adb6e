"""Programs of the mpi back end, run here one operation at a time in every order that their waits allow."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from collectives import lower
from collectives.backends.backend import Call, RankArrays
from collectives.backends.loopback.loopback_backend import Loopback
from collectives.backends.shared import host_program
from collectives.backends.shared.host_program import EACH, INTO, ROUNDS, host_program_of
from collectives.backends.shared.shared_program import (
    ASIDE,
    BLOCK,
    DIVIDE,
    FIRST_ARRAY,
    RESULT,
    SCRATCH,
    SHARED,
    SHOWN,
    SOURCE,
    HostMessage,
    SharedProgram,
    program_of,
)
from collectives.peers.control_page import SHOWABLE, HostPlacement
from collectives.peers.control_plane import Signature
from collectives.tables.transfer_table import TransferTable, result_blocks
from tests.support.hand_plans import SHAPES, forest_plan, three_phase_plan
from topoplan.plans.plan import COLLECTIVES, Plan

Array = NDArray[Any]


ITEM = 8
"""Bytes of an element."""


class Rank:
    """One rank's memories and how far it has come."""

    def __init__(
        self, program: SharedProgram, host: list[int], source: Array, result: Array, shared: Array
    ) -> None:
        self.program = program
        self.host = host
        self.done = self.told = 0
        self.result = result
        scratch = np.full(program.scratch_elements, np.nan)
        self.memories = {SOURCE: source, SHARED: shared, SCRATCH: scratch, RESULT: result, BLOCK: scratch}
        self.open = [number for number, message in enumerate(program.arriving) if message.first]
        self.arrived: set[int] = set()
        self.sent: dict[int, Array] = {}
        self.left: set[int] = set()

    @property
    def ended(self) -> bool:
        return self.done == len(self.program.operations)

    def part(self, memory: int, offset: int, start: int, stop: int) -> Array:
        """The bytes of a memory that an operation reads or writes in a block, as elements."""
        first = (offset + (0 if memory == BLOCK else start)) // ITEM
        return self.memories[memory][first : first + (stop - start) // ITEM]


class Machine:
    """All ranks, advanced in an order that a generator of random numbers chooses."""

    def __init__(self, ranks: Sequence[Rank], chooser: random.Random) -> None:
        self.ranks = ranks
        self.chooser = chooser

    def run(self) -> None:
        """Advance until nothing can; every rank must then be done."""
        while moves := [(rank, None) for rank in range(len(self.ranks)) if self.ready(rank)] + [
            (rank, number) for rank in range(len(self.ranks)) for number in self.deliverable(rank)
        ]:
            rank, number = self.chooser.choice(moves)
            if number is None:
                self.step(rank)
            else:
                self.deliver(rank, number)
        for rank in self.ranks:
            assert rank.ended, "the ranks wait for each other"
            assert len(rank.left) == len(rank.program.leaving), "a message was never received"

    def ready(self, number: int) -> bool:
        rank = self.ranks[number]
        if rank.ended:
            return False
        line = rank.program.operations[rank.done]
        waits = rank.program.waits[line["first_wait"] : line["last_wait"]].tolist()
        unsent = set(rank.program.unsent.get(rank.done, ()))
        if line["memory"] < 0 and line["message"] < 0:
            unsent = set(range(len(rank.program.leaving)))
        return (
            all(self.ranks[rank.host[place]].told >= least for place, least, _ in waits)
            and rank.left.issuperset(unsent)
            and (line["memory"] < 0 or line["message"] < 0 or line["message"] in rank.arrived)
        )

    def step(self, number: int) -> None:
        rank = self.ranks[number]
        together = rank.program.operations[
            rank.done : rank.done + rank.program.operations["together"][rank.done]
        ]
        head = together[0]
        block = head["bytes"] if len(together) == 1 else rank.program.block_bytes
        for start in range(0, head["bytes"], block or 1):
            for line in together:
                self.do(rank, line, start, min(start + block, head["bytes"]))
        if head["memory"] >= 0 and head["message"] >= 0:
            following = rank.program.arriving[head["message"]].following
            rank.open += [following] if following >= 0 else []
        rank.done += len(together)
        rank.told = max(rank.told, head["post"])

    def do(self, rank: Rank, line: np.void, start: int, stop: int) -> None:
        bounds = slice(line["first_input"], line["last_input"])
        inputs = [
            rank.part(memory, offset, start, stop) for memory, offset in rank.program.inputs[bounds].tolist()
        ]
        if line["memory"] >= 0 and line["kind"] != DIVIDE:
            target = rank.part(line["memory"], line["offset"], start, stop)
            total = inputs[0]
            for other in inputs[1:]:
                total = total + other
            target[:] = total
        elif line["kind"] == ASIDE and line["message"] >= 0:
            rank.sent[line["message"]] = inputs[0]

    def deliverable(self, number: int) -> list[int]:
        """Messages that MPI may move now: the first of each stream that is sent and awaited."""
        found: dict[tuple[int, int], int] = {}
        for sent in sorted(self.ranks[number].sent):
            message = self.ranks[number].program.leaving[sent]
            found.setdefault((message.peer, message.stream), sent)
        return [sent for sent in found.values() if self.awaited(number, sent) is not None]

    def awaited(self, number: int, sent: int) -> int | None:
        message = self.ranks[number].program.leaving[sent]
        receiver = self.ranks[message.peer]
        for place in receiver.open:
            expected = receiver.program.arriving[place]
            if (expected.peer, expected.stream) == (number, message.stream):
                return place
        return None

    def deliver(self, number: int, sent: int) -> None:
        place = self.awaited(number, sent)
        assert place is not None
        receiver = self.ranks[self.ranks[number].program.leaving[sent].peer]
        expected: HostMessage = receiver.program.arriving[place]
        assert expected.row == self.ranks[number].program.leaving[sent].row
        receiver.memories[SCRATCH][expected.scratch] = self.ranks[number].sent.pop(sent)
        receiver.open.remove(place)
        receiver.arrived.add(place)
        self.ranks[number].left.add(sent)


def outcome(
    plan: Plan, table: TransferTable, hosts: Sequence[int], seed: int, *, road: int | None = None
) -> tuple[list[Array], list[Array]]:
    """The results of the programs, of one host where a road is given, and of loopback."""
    size = len(hosts)
    generator = np.random.default_rng(seed)
    about = Signature(0, "", size, plan.collective, plan.root, None, "float64", table.count, 1)
    blocks = result_blocks(about.collective, about.root, size, about.count)
    part = table.count // size
    givens = [
        (rank * part, (rank + 1) * part) if plan.collective == "allgather" else (0, table.count)
        for rank in range(size)
    ]
    sources = [generator.standard_normal(stop - start) for start, stop in givens]
    results = [[np.full(stop - start, np.nan) for start, stop in blocks] for _ in range(2)]
    ranks = []
    shared: dict[int, Array] = {}
    for rank in range(size):
        asked: dict[str, Any] = {"given": givens[rank], "blocks": blocks, "itemsize": ITEM}
        if road is None:
            program = program_of(table, HostPlacement(rank, tuple(hosts), (0,) * size), **asked)
        else:
            program = host_program_of(table, rank, **asked, block_bytes=24 * ITEM, methods=(road,))
        slots = shared.setdefault(hosts[rank], np.full(program.shared_elements, np.nan))
        assert len(slots) == program.shared_elements, "all ranks of a host agree on the slots"
        members = [other for other in range(size) if hosts[other] == hosts[rank]]
        ranks.append(Rank(program, members, sources[rank], results[0][rank], slots))
    seen = np.full((size, 2 * SHOWABLE // ITEM), np.nan)
    for rank, one in enumerate(ranks):
        one.memories |= {FIRST_ARRAY + other: sources[other] for other in range(size)}
        one.memories |= {FIRST_ARRAY + size + other: results[0][other] for other in range(size)}
        one.memories[SHOWN] = seen.reshape(-1)
        seen[rank, : one.program.shown_bytes // ITEM] = sources[rank][: one.program.shown_bytes // ITEM]
    Machine(ranks, random.Random(seed)).run()
    op = "sum" if plan.collective in ("allreduce", "reduce", "reduce_scatter") else None
    memory = tuple(
        RankArrays(rank, givens[rank], sources[rank], blocks[rank], results[1][rank]) for rank in range(size)
    )
    Loopback(size).run(Call(plan, table, about, op, "float64", 8, memory))
    for rank, start, stop in table.kept():
        for chosen in results:
            low, high = (
                max(start, blocks[rank][0], givens[rank][0]),
                min(stop, blocks[rank][1], givens[rank][1]),
            )
            if low < high:
                from_source = slice(low - givens[rank][0], high - givens[rank][0])
                chosen[rank][low - blocks[rank][0] : high - blocks[rank][0]] = sources[rank][from_source]
    return results[0], results[1]


def hosts_of(form: str, size: int) -> list[int]:
    return {
        "shared": [0] * size,
        "messages": list(range(size)),
        "mixed": [rank // 2 for rank in range(size)],
        "scattered": [rank % 2 for rank in range(size)],
    }[form]


@pytest.mark.sampled
@pytest.mark.parametrize("form", ["shared", "messages", "mixed", "scattered"])
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_any_order_of_operations_gives_the_result_of_loopback(shape: str, collective: str, form: str) -> None:
    plan = forest_plan(5, collective, shape)
    table = lower(plan, 5 * 373, chunk_elements=64)
    for seed in range(3):
        ours, wanted = outcome(plan, table, hosts_of(form, 5), seed)
        assert all(np.array_equal(a, b) for a, b in zip(ours, wanted, strict=True))


@pytest.mark.sampled
@pytest.mark.parametrize("road", range(EACH, INTO + 1))
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_any_order_of_operations_on_one_host_does_on_every_road(
    monkeypatch: pytest.MonkeyPatch, shape: str, collective: str, road: int
) -> None:
    monkeypatch.setattr(host_program, "ROUND_BYTES", 1024)
    plan = forest_plan(5, collective, shape)
    for seed, count in enumerate((5 * 373, 5, 5 * 65)):
        table = lower(plan, count, chunk_elements=64)
        host_program_of.cache_clear()
        ours, wanted = outcome(plan, table, [0] * 5, seed, road=road)
        assert all(np.array_equal(a, b) for a, b in zip(ours, wanted, strict=True))
    host_program_of.cache_clear()


def test_on_one_host_a_chain_takes_as_many_operations_as_a_star() -> None:
    lengths = set()
    for shape in SHAPES:
        table = lower(forest_plan(4, "allreduce", shape), 1 << 20, chunk_elements=1 << 16)
        asked: dict[str, Any] = {"given": (0, 1 << 20), "blocks": ((0, 1 << 20),) * 4, "itemsize": 4}
        program = host_program_of(table, 2, **asked, block_bytes=1 << 14, methods=(ROUNDS,))
        waits = program.operations["last_wait"] - program.operations["first_wait"]
        lengths.add((np.count_nonzero(waits), program.operations["post"].max(), program.shared_elements))
    assert len(lengths) == 1


@settings(max_examples=25, deadline=None)
@given(
    servers=st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda sizes: sum(sizes) > 1),
    count=st.integers(1, 960),
    chunk=st.integers(1, 320),
    seed=st.integers(0, 1000),
)
def test_three_phases_run_on_any_hosts(servers: list[int], count: int, chunk: int, seed: int) -> None:
    size = sum(servers)
    first = np.cumsum([0, *servers])
    plan = three_phase_plan([list(range(a, b)) for a, b in itertools.pairwise(first)])
    hosts = [random.Random(seed + rank).randrange(3) for rank in range(size)]
    ours, wanted = outcome(plan, lower(plan, count, chunk_elements=chunk), hosts, seed)
    assert all(np.array_equal(a, b) for a, b in zip(ours, wanted, strict=True))


def test_shared_memory_grows_only_by_the_buffer() -> None:
    plan = forest_plan(8, "allreduce", "binary")
    slots = set()
    for count in (800_000, 3_200_000):
        table = lower(plan, count, chunk_elements=1000)
        program = program_of(
            table,
            HostPlacement(0, (0,) * 8, (0,) * 8),
            given=(0, count),
            blocks=((0, count),) * 8,
            itemsize=4,
        )
        slots.add(program.shared_elements - count)
    assert len(slots) == 1


def test_a_result_is_one_copy_and_its_copies_on_the_way_are_left_out() -> None:
    plan = forest_plan(8, "broadcast", "binary")
    table = lower(plan, 4096, chunk_elements=64)
    programs = [
        program_of(
            table,
            HostPlacement(rank, (0,) * 8, (0,) * 8),
            given=(0, 4096),
            blocks=((0, 4096),) * 8,
            itemsize=4,
        )
        for rank in range(8)
    ]
    for rank, program in enumerate(programs):
        root = rank == plan.root
        assert program.operations["post"].max() == (len(set(table.start.tolist())) if root else 0)
        taken = program.operations[program.operations["memory"] == RESULT]
        taken = taken[taken["kind"] != DIVIDE]
        places = [(*program.inputs[line["first_input"]], line["offset"], line["bytes"]) for line in taken]
        assert places == ([] if root else [(SHARED, 0, 0, 4 * 4096)])


def test_what_a_rank_adds_up_on_one_host_is_one_operation() -> None:
    plan = forest_plan(5, "reduce", "star")
    table = lower(plan, 5 * 373, chunk_elements=64)
    root = plan.root
    assert root is not None
    program = program_of(
        table,
        HostPlacement(root, (0,) * 5, (0,) * 5),
        given=(0, 5 * 373),
        blocks=result_blocks("reduce", root, 5, 5 * 373),
        itemsize=4,
    )
    joins = program.operations[program.operations["post"] > 0]
    assert len(joins) == len(set(table.start.tolist()))
    assert (joins["last_input"] - joins["first_input"]).tolist() == [5] * len(joins)

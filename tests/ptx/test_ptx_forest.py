"""The kernels of the windows engine as PTX, all ranks at once in a weak memory: right to the bit, or late and told so.

By default one case of each kind of kernel; a sample is thorough, all of it slow.
No GPU is asked for: what only one can show is in ``docs/support.md``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from collectives import lower
from collectives.backends.nccl import kernel_program
from collectives.backends.nccl.kernel_program import END, STEP
from collectives.backends.nccl.window_engine import WindowEngine
from collectives.tables.kernels.kernel_launch import compile_source
from collectives.tables.kernels.source import TRY_PEERS, forest_source
from tests.ptx.forests import (
    BUGS,
    COLLECTIVES,
    QUAD,
    Case,
    every_case,
    found,
    outcome,
    plan_of,
    prepared,
    run,
    with_bug,
)
from tests.ptx.kernels import ARCHITECTURE, FORESTS, SWITCHES, SWITCHING, program, ptx
from tests.ptx.machine import KernelFault, Launch, memories, read, run_ranks
from tests.ptx.text import Program
from tests.support.kernel_data import same_bits
from tests.support.ranks_on_machine import Ranks

SAMPLE = (
    *(Case("dgx-1v", collective, QUAD, (100, 33)) for collective in COLLECTIVES),
    Case("dgx-1v", counts=(1, 0, 200), in_place=True, blocks=3),
    Case("dgx-2", counts=(300,), threads=64),
    Case("dgx-a100", counts=(200,), op="avg", blocks=4),
    Case("dgx-a100", counts=(200,), dtype="float16", blocks=4),
    Case("mi250x", counts=(150,), dtype="bfloat16", op="max"),
    Case("dgx-1v", "reduce_scatter", QUAD, (50,), dtype="complex64", op="prod"),
    Case("dgx-1v", "allgather", QUAD, (37,), dtype="int8"),
    Case("dgx-1v", gpus=QUAD, counts=(100, 1, 300), small=True),
    Case("dgx-2", counts=(90,), dtype="float64", op="avg", small=True),
    Case("dgx-1v", counts=(77,), dtype="uint8", op="min", small=True, in_place=True),
    *(Case("dgx-1v", collective, QUAD, (100, 33), direct=True) for collective in COLLECTIVES),
    Case("dgx-1v", gpus=QUAD, counts=(100, 33), op="avg", direct=True, in_place=True),
    *(Case("2 x dgx-1v", collective, (0, 1, 2), (100, 33)) for collective in COLLECTIVES),
    Case("2 x mi250", gpus=(0, 1, 2), counts=(100, 0, 1), op="avg", direct=True, blocks=5),
    *(Case("dgx-h100 switch", collective, QUAD, (100, 33), dtype="int32") for collective in COLLECTIVES),
    Case("dgx-h100 switch", gpus=QUAD, counts=(100,), dtype="int64", op="max"),
    Case("dgx-h100 switch", gpus=QUAD, counts=(100,)),
    Case("dgx-h100 switch", gpus=QUAD, counts=(100, 33), op="avg", exact=False),
    Case("dgx-h100 switch", gpus=QUAD, counts=(100,), dtype="bfloat16", exact=False),
    Case(
        "2 x dgx-h100 switch", gpus=(0, 1, 2), counts=(100, 33), dtype="complex64", exact=False, direct=True
    ),
    Case("dgx-h100 adder", gpus=QUAD, counts=(33, 100), dtype="int32", direct=True),
    *(Case("dgx-1v", collective, QUAD, (100, 33), domains=(0, 0, 0, 1)) for collective in COLLECTIVES),
    Case("dgx-1v", gpus=QUAD, counts=(100, 33, 100), compares=True),
    Case("dgx-1v", gpus=QUAD, counts=(100, 1, 33), small=True, compares=True),
)


DEFAULT = (0, 12, 15, 27, 38, len(SAMPLE) - 2)
"""The sample of the default run: large, small, direct stores, a switch, messages, and calls that are compared."""

PAIR = Case("2 x dgx-1v", gpus=(0, 1, 2), counts=(300,))
ALONE = (
    Case("dgx-1v", gpus=QUAD, counts=(300,), domains=(0, 0, 0, 1)),
    Case("dgx-1v", "broadcast", QUAD, (300,), domains=(0, 0, 0, 1)),
    Case("dgx-1v", "broadcast", QUAD, (300,), domains=(0, 1, 2, 3)),
)
"""Ranks that pass on what messages bring, without a step of their own in between."""


@pytest.mark.parametrize(
    "number",
    [
        number if number in DEFAULT else pytest.param(number, marks=pytest.mark.thorough)
        for number in range(len(SAMPLE))
    ],
)
def test_all_ranks_end_with_the_bits_of_loopback(number: int) -> None:
    assert outcome(SAMPLE[number], seed=number) is None


SLICED = (
    Case("2 x dgx-1v", gpus=(0, 1, 2), counts=(300, 33, 300), slices=2),
    *(
        Case("2 x dgx-1v", collective, (0, 1, 2), (300, 33), direct=True, in_place=True, slices=3)
        for collective in COLLECTIVES
    ),
    Case("2 x dgx-1v mixed", gpus=(0, 1, 2), counts=(300, 33), op="avg", direct=True, slices=2),
    Case("2 x dgx-h100 switch", gpus=(0, 1, 2), counts=(200, 33), dtype="int32", direct=True, slices=2),
    Case("2 x dgx-1v", gpus=(0, 1, 2), counts=(300,), dtype="bfloat16", chunk=48, slices=2),
    Case("three phases", counts=(300, 33), domains=(0, 0, 0, 1, 1, 1), slices=4),
    Case("dgx-1v", "broadcast", QUAD, (300,), domains=(0, 1, 2, 3), slices=2),
    Case("dgx-1v apart", gpus=QUAD, counts=(200, 33), slices=2),
)
"""Buffers in slices, whose messages move beside kernels; with 33 elements some slices of shards are empty."""


@pytest.mark.sampled
@pytest.mark.parametrize(
    "number",
    [
        number if number in (0, 1, 3, 9) else pytest.param(number, marks=pytest.mark.thorough)
        for number in range(len(SLICED))
    ],
)
def test_slices_give_the_bits_of_loopback(number: int) -> None:
    for seed in range(2):
        assert outcome(SLICED[number], seed) is None


def unordered(queues: Sequence[Sequence[Launch]]) -> tuple[int, int, int]:
    """Return the kernels and the groups of messages in a rank's queues, and the pairs of them that may overlap.

    Launches of a queue follow each other, and an event lets those behind its wait follow those before its record. The
    first launch, which loads the kernel, does not count.
    """
    launches = [(stream, launch) for stream, queue in enumerate(queues) for launch in queue]
    before = np.zeros((len(launches), len(launches)), dtype=np.bool_)
    names = [launch.program.name for _, launch in launches]
    records = {
        launch.arguments[0]: at for at, (_, launch) in enumerate(launches) if names[at] == "record_event"
    }
    for at, (stream, launch) in enumerate(launches):
        if at and launches[at - 1][0] == stream:
            before[at - 1, at] = True
        awaited = launch.arguments[{"wait_event": 0, "messages": 3}.get(names[at], 0)]
        if names[at] in ("wait_event", "messages") and awaited:
            before[records[awaited], at] = True
    for middle in range(len(launches)):
        before |= before[:, middle, None] & before[middle]
    kernels = [at for at, name in enumerate(names) if name.startswith("forest")][1:]
    groups = [at for at, name in enumerate(names) if name == "messages"]
    return len(kernels), len(groups), sum(not (before[a, b] or before[b, a]) for a in kernels for b in groups)


@pytest.mark.parametrize("slices", [1, 2, 3, 4])
def test_messages_may_move_beside_kernels_of_other_slices_alone(slices: int) -> None:
    """Each group beside one kernel of every other slice: of its phase if that is behind it, else of the next one."""
    case = Case("three phases", counts=(900,), domains=(0, 0, 0, 1, 1, 1), slices=slices)
    ranks = prepared(case).ranks
    queues = ranks.take()
    for rank in range(ranks.size):
        found = unordered(queues[rank :: ranks.size])
        assert found == (3 * slices, 2 * slices, 2 * slices * (slices - 1))


@pytest.mark.parametrize("beyond", [0, 1])
def test_tables_lie_in_shared_memory_up_to_its_last_word_and_else_in_global_memory(beyond: int) -> None:
    """Room for those of the largest block, or for a word less, so that blocks differ."""
    case = Case("dgx-1v", gpus=QUAD, counts=(100, 33), blocks=3)
    phases = [
        one.launches[0].phase for engine in prepared(case).ranks.engines for one in engine._programs.values()
    ]
    words = max(
        4
        + len(steps) * STEP.itemsize // 8
        + (steps["arrivals"] + steps["departures"]).sum() * (END.itemsize // 8 + 1)
        for phase in phases
        if phase is not None
        for steps in np.split(phase.steps, phase.blocks[1:-1])
    )
    kernel = with_bug(
        "forest_sum_float32", [(r"TABLE_WORDS = \d+", f"TABLE_WORDS = {words - beyond}")], ARCHITECTURE
    )
    assert outcome(case, 3, kernel) is None


@pytest.mark.parametrize("direct", [False, True])
def test_long_buffers_of_more_blocks_between_short_ones(
    monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """Parts that one call leaves out keep their counts."""
    monkeypatch.setattr(kernel_program, "most_blocks", lambda nbytes: 6 if nbytes > 1000 else 2)
    case = Case("dgx-1v", gpus=QUAD, counts=(300, 90, 600, 90, 300), blocks=6, direct=direct)
    made = prepared(case, 4)
    grids = [one.launches[0].grid for one in made.ranks.engines[0]._programs.values()]
    assert grids == [6, 2, 6]
    run(made, 4)
    assert made.wrong() is None


ACCESS = (
    *(
        Case(f"dgx-1v {way}", collective, QUAD, (100, 33, 200), direct=collective == "allgather")
        for way in ("pulled", "mixed")
        for collective in COLLECTIVES
    ),
    Case("dgx-1v mixed", gpus=QUAD, counts=(100, 33), direct=True),
    Case("2 x dgx-1v mixed", gpus=(0, 1, 2), counts=(100, 33), op="avg", direct=True),
    Case("dgx-2 mixed", counts=(200,), threads=64),
    *(Case("dgx-1v apart", collective, QUAD, (100, 33), direct=True) for collective in COLLECTIVES),
    Case("2 x dgx-1v apart", gpus=(1, 4, 5), counts=(100, 33), op="avg"),
)
"""Edges whose data is pulled: all, and some of them; and a pair of GPUs that exchanges messages."""


@pytest.mark.parametrize(
    "number",
    [
        number if number in (0, 10, 13) else pytest.param(number, marks=pytest.mark.thorough)
        for number in range(len(ACCESS))
    ],
)
def test_pulled_edges_give_the_same_bits(number: int) -> None:
    for seed in range(number, number + 3):
        assert outcome(ACCESS[number], seed) is None


def test_small_collectives_take_the_trees_if_some_writes_never_end() -> None:
    ranks = Ranks(4, blocks=2, slot_bytes=512, small_bytes=16384)
    arrays = [np.full(100, rank + 1, dtype=np.float32) for rank in range(4)]
    for way, small in (("mixed", True), ("unwritten", False)):
        results = ranks.queue(plan_of(f"dgx-1v {way}", "allreduce", QUAD), arrays)
        run_ranks(ranks.take(), seed=1)
        assert all((one == 10).all() for one in results)
        assert {next(reversed(engine._programs.values())).small for engine in ranks.engines} == {small}


@pytest.mark.parametrize("small_bytes", [0, 16384])
def test_a_pair_on_which_no_copy_ends_reads_and_writes_nothing_of_each_other(small_bytes: int) -> None:
    """The engine says so; all other ranks use their arenas, and small collectives their trees."""
    ranks = Ranks(4, blocks=2, slot_bytes=512, small_bytes=small_bytes)
    arrays = [np.full(100, rank + 1, dtype=np.float32) for rank in range(4)]
    results = ranks.queue(plan_of("dgx-1v apart", "allreduce", QUAD), arrays)
    traffic = run_ranks(ranks.take(), seed=1).traffic
    assert all((one == 10).all() for one in results)
    for rank, engine in enumerate(ranks.engines):
        assert engine.about_pairs == "messages for gpu4-gpu5, where no copy ends"
        for peer in set(range(4)) - {rank}:
            there = traffic[rank][f"arena of rank {peer}"]
            used = (there.read, there.written) != (0, 0)
            assert used == ({rank, peer} != {1, 2})


@pytest.mark.parametrize("domains", [(0, 0, 0, 1, 1, 1), (0,) * 6], ids=["messages", "stores"])
def test_ranks_that_add_in_two_stages_keep_the_first_sum(domains: tuple[int, ...]) -> None:
    case = Case("three phases", counts=(100, 33), domains=domains)
    assert outcome(case, seed=1) is None


@pytest.mark.parametrize("small", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_calls_that_differ_are_seen_by_all_ranks_and_write_nothing(small: bool) -> None:
    """Two of one number and a rank that only tells; then the same call of all, after the difference is forgotten."""
    plan = plan_of("dgx-1v", "allreduce", QUAD)
    ranks = Ranks(4, blocks=2, slot_bytes=512, small_bytes=16384 if small else 0)
    arrays = [np.full(100, rank + 1, dtype=np.float32) for rank in range(4)]
    for seed, digests in enumerate(([5, 5, 5, 5], [5, 5, 6, 5], [1, 2, 3, 4], [5, 5, 5, 5])):
        found = ranks.queue(plan, [one.copy() for one in arrays], digests=digests)
        run_ranks(ranks.take(), seed=seed)
        same = len(set(digests)) == 1
        assert [engine.differs for engine in ranks.engines] == [not same] * 4
        assert all((one == (10 if same else 0)).all() for one in found)
        for engine in ranks.engines if not same else ():
            engine.forget_difference()


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("number", range(len(SAMPLE)))
def test_they_do_in_other_orders_too(number: int) -> None:
    for seed in range(100, 103):
        assert outcome(SAMPLE[number], seed) is None


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(list(every_case()))))
def test_every_case_ends_with_the_bits_of_loopback(number: int) -> None:
    case = list(every_case())[number]
    for seed in range(200, 212):
        assert outcome(case, seed) is None


@pytest.mark.thorough
@pytest.mark.parametrize("small", [False, True])
def test_launches_are_replayed_on_new_data(small: bool) -> None:
    """As a graph does: nothing of a launch says how many there were before."""
    made = prepared(Case("dgx-1v", gpus=QUAD, counts=(120,), small=small))
    queues = made.ranks.take()
    for seed in range(3):
        for one in made.got[0]:
            one[:] = 0
        made.ranks.put_back(queues)
        run(made, seed)
        assert made.wrong() is None


@pytest.mark.thorough
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("victim", range(4))
def test_when_a_rank_dies_the_others_end_and_name_it(victim: int, small: bool) -> None:
    case = Case("dgx-1v", gpus=QUAD, counts=(200,), small=small)
    dies_at = [1, 2000, 10_000, 20_000, 40_000]
    for seed, steps in enumerate(dies_at):
        made = prepared(case, seed, timeout=5e-4)
        found = run(made, seed, stop=(victim, steps))
        survivors = [rank for rank in range(4) if rank != victim]
        assert all(found.finished[rank] for rank in survivors)
        engines = made.ranks.engines
        for rank in survivors:
            # who was not late has all of its result
            assert engines[rank].late or same_bits(made.got[0][rank], made.wanted[0][rank])
            at, earlier = rank, {rank}
            while engines[at].late:
                at = engines[at].waiting()[0]
                assert at not in earlier
                earlier.add(at)
            assert at in (rank, victim)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "victim"),
    [*((PAIR, victim) for victim in range(6)), *((case, victim) for case in ALONE for victim in range(4))],
)
def test_when_a_rank_dies_no_server_ends_with_what_another_has_left_behind(case: Case, victim: int) -> None:
    for seed, steps in list(enumerate((1, 2000, 10_000, 20_000, 30_000, 40_000)))[victim % 2 :: 2]:
        made = prepared(case, seed, timeout=5e-4, filled=True)
        found = run(made, seed, stop=(victim, steps))
        engines = made.ranks.engines
        size = len(engines)
        failed = [rank for rank in range(size) if engines[rank].late or engines[rank].peer_gave_up]
        for rank in set(range(size)) - {victim, *failed}:
            assert found.finished[rank]
            assert same_bits(made.got[0][rank], made.wanted[0][rank])
        for rank in failed:
            assert found.finished[rank] or rank == victim
            at, earlier = rank, set()
            # of many phases, kernels that wait for others may end before these have begun, and be waited for in turn
            while case is PAIR and at in failed and at != victim:
                assert at not in earlier
                earlier.add(at)
                at = engines[at].waiting()[0]
            assert case is not PAIR or at == victim


@pytest.mark.thorough
@pytest.mark.parametrize(
    "victim", [0, *(pytest.param(rank, marks=pytest.mark.thorough) for rank in range(1, 6))]
)
def test_a_rank_that_dies_between_slices_is_named_and_nobody_ends_with_half_of_a_result(victim: int) -> None:
    case = replace(PAIR, slices=2)
    whole = run(prepared(case, victim, filled=True), victim).rank_steps[victim]
    for tenths in (3, 6, 8):
        made = prepared(case, victim, timeout=5e-4, filled=True)
        found = run(made, victim, stop=(victim, whole * tenths // 10))
        engines = made.ranks.engines
        failed = {rank for rank, engine in enumerate(engines) if engine.late or engine.peer_gave_up}
        for rank in set(range(6)) - {victim}:
            assert found.finished[rank]
            assert rank in failed or same_bits(made.got[0][rank], made.wanted[0][rank])
        assert not failed or victim in {engines[rank].waiting()[0] for rank in failed}


@pytest.mark.parametrize(
    ("ordered", "problem"),
    [
        (lambda engine, stream: stream is not engine._stream, "race|nobody has written"),
        (lambda engine, stream: stream is engine._stream, "race|nobody has written"),
    ],
    ids=["kernels do not wait for messages", "messages do not wait for kernels"],
)
def test_an_event_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch, ordered: Any, problem: str) -> None:
    wait = WindowEngine._wait
    monkeypatch.setattr(
        WindowEngine,
        "_wait",
        lambda engine, stream, event: wait(engine, stream, event) if ordered(engine, stream) else None,
    )
    assert re.search(problem, outcome(replace(PAIR, slices=2), 0) or "")


def test_slices_that_share_a_word_for_failures_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of one slice would write what kernels of another read."""
    words_of = WindowEngine._words_of
    monkeypatch.setattr(WindowEngine, "_words_of", lambda engine, _: words_of(engine, 0))
    assert "race" in (outcome(replace(PAIR, slices=2), 0) or "")


@pytest.mark.thorough
def test_without_the_word_of_other_servers_such_an_end_is_noticed() -> None:
    careless = with_bug(
        "forest_sum_float32", [(r"if \(control\.others\[peer\]\)", "if (false)")], ARCHITECTURE
    )
    wrong = []
    for seed in range(6):
        made = prepared(PAIR, seed, timeout=5e-4, filled=True)
        run(made, seed, careless, stop=(seed, 2000))
        wrong += [
            rank
            for rank, engine in enumerate(made.ranks.engines)
            if rank != seed
            and not (engine.late or engine.peer_gave_up)
            and not same_bits(made.got[0][rank], made.wanted[0][rank])
        ]
    assert wrong


@pytest.mark.thorough
@pytest.mark.parametrize("small", [False, True])
def test_the_host_ends_kernels_that_wait_and_all_that_are_queued_behind(small: bool) -> None:
    made = prepared(Case("dgx-1v", gpus=QUAD, counts=(200, 100), small=small), timeout=10.0)
    for engine in made.ranks.engines:
        engine.stop()
    found = run(made, 0, stop=(2, 1))
    survivors = (0, 1, 3)
    assert all(found.finished[rank] for rank in survivors)
    for rank in survivors:
        assert not made.ranks.engines[rank].late
        assert not made.got[1][rank].any()


@pytest.mark.parametrize(
    ("machine", "collective", "gpus"),
    [
        ("dgx-1v mixed", "allreduce", QUAD),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ("dgx-1v", "allreduce", QUAD),
                ("dgx-1v", "broadcast", ()),
                ("dgx-1v", "reduce_scatter", QUAD),
                ("dgx-a100", "allgather", ()),
                ("dgx-2", "allreduce", ()),
                ("dgx-2 mixed", "reduce", ()),
                ("2 x dgx-1v mixed", "broadcast", (0, 1, 2)),
            )
        ),
    ],
)
def test_links_carry_the_bytes_of_the_plan_and_memory_is_passed_once(
    machine: str, collective: str, gpus: tuple[int, ...]
) -> None:
    """Of a pulled edge the destination reads them, and the source writes its own memory."""
    case = Case(machine, collective, gpus, (512,), chunk=32)
    made = prepared(case)
    found = run(made, 1)
    assert made.wrong() is None
    size = made.ranks.size
    count = 512 * (size if collective in ("allgather", "reduce_scatter") else 1)
    table = lower(made.plan, count, chunk_elements=32)
    rows = np.zeros((size, size), dtype=np.int64)
    moved = np.zeros((size, size), dtype=np.int64)
    np.add.at(rows, (table.source, table.destination), 1)
    np.add.at(moved, (table.source, table.destination), (table.stop - table.start) * 4)
    names = [(name.rpartition(".")[0], name) for name in made.plan.ranks]
    near = np.array([[one[0] == other[0] for other in names] for one in names])
    pulled = np.array([["mixed" in machine and one < other for other in names] for one in names])
    for rank in range(size):
        traffic = found.traffic[rank]
        for peer in range(size):
            if peer != rank and near[rank, peer]:
                # a flag behind every chunk, and one back for every chunk from there
                flags = 8 * (rows[rank, peer] + rows[peer, rank])
                written = moved[rank, peer] * (not pulled[rank, peer]) + flags
                assert traffic[f"arena of rank {peer}"].written == written
                assert traffic[f"arena of rank {peer}"].read == moved[peer, rank] * pulled[peer, rank]
        read_by_others = bool((moved * pulled * near)[rank].any())
        assert (traffic["arena of rank " + str(rank)].written > 0) == read_by_others
        if made.got[0][rank].size and "result" in traffic:
            assert traffic["result"].written <= made.got[0][rank].nbytes
        assert traffic["input"].read <= 4 * count * (2 if collective == "allreduce" else 1)


@pytest.mark.thorough
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str) -> None:
    assert found(bug, range(12))


@pytest.mark.thorough
def test_kernels_compile() -> None:
    """Every fifth here, of all dtypes and operations; slow tests read the text of all."""
    for names, architecture in ((FORESTS[::5], ARCHITECTURE), (SWITCHES[::5], SWITCHING)):
        text = ptx(names, architecture)
        assert not [name for name in names if f".entry {name}(" not in text]


@pytest.mark.slow
@pytest.mark.parametrize("names", [FORESTS[:54], FORESTS[54:], SWITCHES], ids=["large", "small", "switch"])
def test_no_instruction_flushes_denormals_or_reads_what_others_write_past_the_caches(
    names: tuple[str, ...],
) -> None:
    for name in names:
        architecture = SWITCHING if name in SWITCHES else ARCHITECTURE
        assert not [text for text in program(name, architecture).texts if ".ftz" in text or ".nc" in text]


@pytest.mark.slow
def test_newer_gpus_get_the_same_instructions() -> None:
    for name in ("forest_sum_float32", "small_sum_float32", "forest_avg_float32", "small_max_bfloat16"):
        older, newer = (program(name, target).texts for target in (80, 90))
        assert older == newer


# ---- the kernel that tries the peers


def heard(
    seed: int,
    *,
    ranks: int = 3,
    changes: Sequence[tuple[str, str]] = (),
    absent: Sequence[int] = (),
    stopped: bool = False,
    astray: tuple[int, int] | None = None,
) -> list[list[int]]:
    """What each rank hears of each: 0 nothing, 1 its mark, 2 a flag without the mark.

    Where ``astray``, the first rank's address of the second one's arena leads elsewhere.
    """
    own = memories(ranks)
    arenas = [np.zeros(4 * ranks, dtype=np.uint64) for _ in range(ranks)]
    pages, queues = [], []
    for rank, memory in enumerate(own):
        seen = [memory.put(f"arena {peer}", arena) for peer, arena in enumerate(arenas)]
        if astray is not None and astray[0] == rank:
            seen[astray[1]] = memory.put("elsewhere", np.zeros(4 * ranks, dtype=np.uint64))
        flags = [1000 * (peer + 1) for peer in range(ranks)]
        pages.append(np.array([int(stopped), *[7] * ranks, *seen, *flags], dtype=np.uint64))
        arguments = [memory.put("page", pages[-1]), rank, ranks, 1 << 62 if stopped else 3 * 10**5]
        queues.append([] if rank in absent else [Launch(trial(tuple(changes)), 1, 4, arguments, memory)])
    run_ranks([queue for queue in queues if queue], seed=seed)
    return [page[1 : 1 + ranks].tolist() for rank, page in enumerate(pages) if rank not in absent]


@cache
def trial(changes: tuple[tuple[str, str], ...] = ()) -> Program:
    ptx([TRY_PEERS])  # skips where there is no compiler
    text = forest_source([TRY_PEERS])
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return read(compile_source(text, ARCHITECTURE, to="ptx").code.decode())[TRY_PEERS]


def test_ranks_whose_stores_arrive_hear_of_each_other_in_every_order() -> None:
    for seed in range(20):
        assert heard(seed) == [[1, 1, 1]] * 3
    assert heard(0, ranks=7) == [[1] * 7] * 7  # more ranks than threads


def test_ranks_whose_peer_is_not_there_end_by_the_clock_or_the_host_and_name_it() -> None:
    for seed in range(5):
        assert heard(seed, absent=[1]) == [[1, 0, 1]] * 2
        for one in heard(seed, absent=[1], stopped=True):
            assert one[1] == 0  # of the others what had come when the host gave up


def test_a_rank_whose_stores_go_astray_is_named_by_the_one_that_misses_them() -> None:
    assert heard(0, astray=(2, 0)) == [[1, 1, 0], [1, 1, 1], [1, 1, 1]]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("release(there + 1, flags[rank]);", "tell(there + 1, flags[rank]);"),
        ("acquired(here + 1) == flags[peer]", "*(volatile unsigned long long*)(here + 1) == flags[peer]"),
        ("there[0] = flags[rank] + peer;", ""),
        ("MARK_WORDS * rank;", "MARK_WORDS * peer;"),
    ],
    ids=["relaxed release", "relaxed acquire", "no mark", "one place for all"],
)
def test_what_the_trial_would_miss_is_found_at_some_order(old: str, new: str) -> None:
    for seed in range(40):
        try:
            if heard(seed, changes=((old, new),)) != [[1, 1, 1]] * 3:
                return
        except KernelFault:
            return
    raise AssertionError(f"{old} is not needed")

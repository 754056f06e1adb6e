"""Gathers, scatters and reductions of uneven blocks: the same results as numpy's on every back end."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from collectives import Communicator
from collectives.backends.loopback.paced_loopback import PacedLoopback
from collectives.tables.lowering import PlanKey, lower, lower_uneven
from collectives.tables.transfer_table import RankBlocks
from tests.collectives.backends.test_uneven_exchange import (
    RANKS,
    Array,
    inputs,
    machine_plan,
    on_ranks,
)
from tests.support.small_fabrics import direct_machines
from topoplan.errors import BackendError, UsageError
from topoplan.machine.topology import Topology

COUNTS: list[tuple[list[int], tuple[int, ...]]] = [
    ([0, 0, 0, 0], ()),
    ([3, 3, 3, 3], (2,)),
    ([0, 0, 700, 0], (3,)),
    ([1, 0, 40, 7], ()),
    ([9000, 3, 0, 20_011], ()),
    ([9000, 3, 0, 20_011], ()),
    ([0, 17, 0, 0], (2, 1)),
]
"""Rows of each rank, and the shape of one: nothing, equal blocks, one rank alone, one hot rank, the same again."""


def blocks_of(counts: list[int], rest: tuple[int, ...], dtype: str = "float32") -> list[Array]:
    """The block of each rank; all elements differ."""
    return inputs([[count] for count in counts], rest, dtype)


def wholes_of(counts: list[int], rest: tuple[int, ...], dtype: str = "float32") -> list[Array]:
    """The array that each rank reduces, of whole numbers whose sums are exact."""
    shape = (sum(counts), *rest)
    line = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 1000
    return [(line + 7 * rank).astype(dtype) for rank in range(len(counts))]


def parts(whole: Array, counts: list[int]) -> list[Array]:
    return np.split(whole, np.cumsum(counts)[:-1])


def check_on_one_rank(comm: Communicator, counts: list[int], rest: tuple[int, ...], root: int) -> None:
    """Compare the four collectives with numpy: with and without counts, out and the background."""
    rank = comm.rank
    blocks, wholes = blocks_of(counts, rest), wholes_of(counts, rest)
    gathered, total = np.concatenate(blocks), parts(sum(wholes[1:], wholes[0]), counts)[rank]
    assert np.array_equal(comm.all_gather_v(blocks[rank]), gathered)
    out = comm.empty(gathered.shape)
    out[sum(counts[:rank]) : sum(counts[: rank + 1])] = blocks[rank]
    mine = out[sum(counts[:rank]) : sum(counts[: rank + 1])]
    assert comm.all_gather_v(mine, counts, out=out, async_op=True).wait() is out
    assert np.array_equal(out, gathered)
    assert np.array_equal(comm.reduce_scatter_v(wholes[rank], counts), total)
    small = np.full_like(total, -1)
    assert comm.reduce_scatter_v(wholes[rank], counts, op="max", out=small) is small
    assert np.array_equal(small, parts(wholes[-1], counts)[rank])
    given = gathered if rank == root else np.zeros((rank, *rest), np.float32)
    for _ in range(2):
        found = comm.scatter(given, counts if rank == root else None, root=root, async_op=True).wait()
        assert np.array_equal(found, blocks[rank])
        line = comm.gather(blocks[rank], counts if rank == root else None, root=root)
        assert (line is None) if rank != root else np.array_equal(line, gathered)
    assert np.array_equal(
        comm.scatter(given, counts, root=root, out=np.empty_like(blocks[rank])), blocks[rank]
    )
    room = np.empty_like(gathered) if rank == root else None
    assert comm.gather(blocks[rank], root=root, out=room) is room
    assert room is None or np.array_equal(room, gathered)


@pytest.mark.parametrize(
    ("backend", "options"), [("shared", {}), ("tcp", {}), ("tcp", {"on_failure": "shrink"})]
)
def test_ranks_find_what_numpy_does(backend: str, options: dict[str, Any]) -> None:
    def body(comm: Communicator, _: int) -> None:
        for number, (counts, rest) in enumerate(COUNTS):
            check_on_one_rank(comm, counts, rest, number % RANKS)

    on_ranks(body, backend, chunk_bytes=1 << 14, **options)


@pytest.mark.parametrize(
    ("dtype", "ops"),
    [
        ("float16", ("sum", "avg", "min")),
        ("float32", ("sum", "prod", "avg")),
        ("int8", ("sum", "max")),
        ("int64", ("sum", "prod")),
        ("complex128", ("sum", "prod", "avg")),
    ],
)
def test_equal_counts_have_the_bits_of_equal_blocks(dtype: str, ops: tuple[str, ...]) -> None:
    generator = np.random.default_rng(5)
    arrays = [(generator.random((4 * 37, 3)) * 5 - 2).astype(dtype) for _ in range(RANKS)]
    with Communicator(machine_plan(), chunk_bytes=1 << 10) as comm:
        for op in ops:
            even = comm.reduce_scatter(arrays, op=op)
            for found, wanted in zip(comm.reduce_scatter_v(arrays, [37] * 4, op=op), even, strict=True):
                assert found.dtype == wanted.dtype
                assert found.tobytes() == wanted.tobytes()
        for found, wanted in zip(comm.all_gather_v(arrays), comm.all_gather(arrays), strict=True):
            assert found.tobytes() == wanted.tobytes()


@settings(max_examples=20)
@given(
    direct_machines(),
    st.integers(0, 2**32),
    st.sampled_from([3, 100, 2000]),
    st.sampled_from([16, 1 << 20]),
    st.sampled_from(["loopback", "paced"]),
)
def test_any_machine_and_counts(small: Topology, seed: int, highest: int, chunk: int, kind: str) -> None:
    """Also machines of one rank, and counts of which most are zero."""
    plan = topoplan.plan(small)
    size = len(plan.ranks)
    generator = np.random.default_rng(seed)
    counts = (generator.integers(0, highest, size) * generator.integers(0, 2, size)).tolist()
    root = int(generator.integers(size))
    blocks, wholes = blocks_of(counts, (), "int64"), wholes_of(counts, (), "int64")
    gathered = np.concatenate(blocks)
    backend = "loopback" if kind == "loopback" else PacedLoopback(size, scale=1e9)
    with Communicator(plan, backend, chunk_bytes=chunk) as comm:
        for found in comm.all_gather_v(blocks, counts):
            assert np.array_equal(found, gathered)
        totals = parts(np.sum(wholes, axis=0), counts)
        for found, wanted in zip(comm.reduce_scatter_v(wholes, counts), totals, strict=True):
            assert np.array_equal(found, wanted)
        given = [gathered if rank == root else gathered[:0] for rank in range(size)]
        for found, wanted in zip(comm.scatter(given, counts, root=root), blocks, strict=True):
            assert np.array_equal(found, wanted)
        for rank, line in enumerate(comm.gather(blocks, counts, root=root)):
            assert (line is None) if rank != root else np.array_equal(line, gathered)


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 300), min_size=4, max_size=4),
    st.sampled_from(["allgather", "reduce_scatter"]),
    st.sampled_from([16, 64]),
)
def test_every_rank_moves_each_block_once(counts: list[int], collective: str, chunk: int) -> None:
    """N - 1 times the buffer crosses tree edges, and no element more; equal counts have the table of equal blocks."""
    plan = topoplan.plan("dgx-1v", collective, gpus=[1, 4, 5, 7])
    key = PlanKey(plan.digest, plan)
    table = lower_uneven(key, RankBlocks(tuple(counts), gathered=collective == "allgather"), chunk)
    assert int((table.stop - table.start).sum()) == 3 * sum(counts)
    equal = lower_uneven(key, RankBlocks((counts[0],) * 4, gathered=collective == "allgather"), chunk)
    assert equal.bounds.tolist() == lower(plan, 4 * counts[0], chunk_elements=chunk).bounds.tolist()


def test_one_block_moves_as_a_broadcast_or_reduce() -> None:
    """On four GPUs with a rate of 50 GB/s for both, by their trees; blocks of several ranks by those of all_gather."""
    with Communicator(machine_plan()) as comm:
        kinds = comm._members.execution.store
        blocks = blocks_of([0, 0, 900, 0], ())
        assert not kinds.knows("broadcast", 2)
        comm.all_gather_v(blocks)
        assert kinds.knows("broadcast", 2)
        assert not kinds.knows("allgather", None)
        comm.reduce_scatter_v(wholes_of([0, 900, 0, 0], ()), [0, 900, 0, 0])
        assert kinds.knows("reduce", 1)
        assert not kinds.knows("reduce_scatter", None)
        comm.all_gather_v(blocks_of([1, 0, 900, 0], ()))
        assert kinds.knows("allgather", None)


def test_equal_blocks_are_scattered_and_gathered_by_the_plan_of_their_demand() -> None:
    """Rank 0 of four with NVLinks of 25 and 50 GB/s: each element leaves it once, or arrives there once."""
    with Communicator(topoplan.plan("v100x4")) as comm:
        line = np.arange(4 * 480, dtype="float32")
        found = comm.scatter([line, *[line[:0]] * 3])
        assert [one.tolist() for one in found] == [one.tolist() for one in np.split(line, 4)]
        assert comm.gather(found)[0].tolist() == line.tolist()
        assert comm._members.execution.store.demands_planned == 2
        from_root = sum(sent for (source, _), sent in comm.bytes_sent().items() if source == 0)
        assert from_root == 4 * 3 * 480


HOT = [4_000_000, 0, 300_000, 400_000]
"""Bytes of blocks of which the first is worth a plan of its own on four GPUs."""


@pytest.mark.parametrize("collective", ["all_gather_v", "reduce_scatter_v"])
def test_a_long_block_runs_by_trees_for_it(collective: str) -> None:
    """In less than half the time of the trees of equal blocks; near counts share its plan, short ones have none."""
    with Communicator(topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7]), chunk_bytes=1 << 20) as comm:
        store = comm._members.execution.store
        planned = []
        for counts in (
            HOT,
            [count // 1000 for count in HOT],
            [count - 7 * (count > 0) for count in HOT],
            [1_000_000] * 3 + [1_000_100],
            HOT[::-1],
            HOT,
        ):
            if collective == "all_gather_v":
                blocks = blocks_of(counts, (), "int8")
                before = comm.bytes_sent()
                for found in comm.all_gather_v(blocks, counts):
                    assert np.array_equal(found, np.concatenate(blocks))
            else:
                wholes = wholes_of(counts, (), "int8")
                before = comm.bytes_sent()
                wanted = parts(np.sum(wholes, axis=0, dtype="int8"), counts)
                for found, total in zip(comm.reduce_scatter_v(wholes, counts), wanted, strict=True):
                    assert np.array_equal(found, total)
            moved = {link: sent - before.get(link, 0) for link, sent in comm.bytes_sent().items()}
            assert sum(moved.values()) == 3 * sum(counts)  # nothing is padded
            planned.append(store.demands_planned)
        assert planned == [1, 1, 1, 1, 2, 2]


def test_a_long_block_of_twenty_ranks_runs_by_trees_over_hubs() -> None:
    """Two calls share a plan each; no rank relays more than two edges deep."""
    counts = [3_000_000, *[20_000] * 18, 0]
    with Communicator(topoplan.plan("gb200-nvl72", gpus=range(20)), chunk_bytes=1 << 20) as comm:
        for _ in range(2):
            blocks = blocks_of(counts, (), "int8")
            for found in comm.all_gather_v(blocks, counts):
                assert np.array_equal(found, np.concatenate(blocks))
            wholes = wholes_of(counts, (), "int8")
            wanted = parts(np.sum(wholes, axis=0, dtype="int8"), counts)
            for found, total in zip(comm.reduce_scatter_v(wholes, counts), wanted, strict=True):
                assert np.array_equal(found, total)
        assert comm._members.execution.store.demands_planned == 2


def test_sums_of_counts_do_not_depend_on_earlier_calls() -> None:
    """Plans that other counts have left are not taken, since their trees add in another order."""
    whole = np.random.default_rng(7).random((RANKS, sum(HOT) // 4), dtype=np.float32)
    texts = []
    for earlier in ([], [HOT[::-1], [3_800_000, 0, 500_000, 400_000]]):
        with Communicator(machine_plan(), chunk_bytes=1 << 20) as comm:
            for counts in earlier:
                comm.reduce_scatter_v(list(np.zeros((RANKS, sum(counts) // 4), np.float32)), of_words(counts))
            found = comm.reduce_scatter_v(list(whole), of_words(HOT))
            texts.append([one.tobytes() for one in found])
    assert texts[0] == texts[1]


def of_words(counts: list[int]) -> list[int]:
    return [count // 4 for count in counts]


@pytest.mark.parametrize("backend", ["shared", "tcp"])
def test_ranks_plan_a_long_block_once(backend: str) -> None:
    """One rank plans for all; gathers and reductions have plans of their own."""

    def body(comm: Communicator, rank: int) -> int:
        counts = of_words(HOT)
        for _ in range(2):
            blocks, wholes = blocks_of(counts, ()), wholes_of(counts, ())
            assert np.array_equal(comm.all_gather_v(blocks[rank]), np.concatenate(blocks))
            total = parts(sum(wholes[1:], wholes[0]), counts)[rank]
            assert np.array_equal(comm.reduce_scatter_v(wholes[rank], counts), total)
        return comm._members.execution.store.demands_planned

    assert on_ranks(body, backend) == [2] * RANKS


ONES = [1] * RANKS
REFUSED: list[tuple[Callable[[Communicator, int], Any], str]] = [
    (
        lambda comm, rank: comm.all_gather_v(np.zeros(1 + (rank == 2)), ONES),
        "rank 2 sends 2 elements to rank 0, which expects 1; correct the counts of one of them",
    ),
    (
        lambda comm, rank: comm.all_gather_v(np.zeros(1), [1, 1, 1] if rank == 1 else None),
        "counts of rank 1 must be 4 numbers for 4 ranks, got 3; pass one for each rank",
    ),
    (
        lambda comm, rank: comm.all_gather_v(np.zeros(1), out=np.zeros(4 + (rank == 3))),
        r"rank 3 has an out array of shape \(5,\) and dtype float64; this result needs shape \(4,\)",
    ),
    (
        lambda comm, rank: comm.reduce_scatter_v(np.zeros(4), [2, 1, 1, 0] if rank == 3 else ONES),
        "rank 0 sends 1 elements to rank 3, which expects 0; correct the counts of one of them",
    ),
    (
        lambda comm, rank: comm.reduce_scatter_v(np.zeros(4 + (rank == 1)), ONES),
        "counts of rank 1 must add up to the 5 rows of its array, got 4; ",
    ),
    (
        lambda comm, rank: comm.reduce_scatter_v(np.zeros(4), [2, 3, -1, 0]),
        r"counts of rank \d must be whole numbers from 0 on, got \[2, 3, -1, 0\]",
    ),
    (
        lambda comm, rank: comm.reduce_scatter_v(np.zeros(4), [True] * 4 if rank == 1 else ONES),
        r"counts of rank 1 must be whole numbers from 0 on, got \[True, True, True, True\]",
    ),
    (
        lambda comm, rank: comm.reduce_scatter_v(np.zeros(4), ONES, op="max" if rank == 1 else "sum"),
        "rank 1 runs another collective: op 'max' instead of 'sum'",
    ),
    (
        lambda comm, rank: comm.scatter(np.zeros((5, 2)), root=1),
        r"the 5 rows of rank 1 cannot be divided among 4 ranks; pass counts, or pad the array to 8",
    ),
    (
        lambda comm, rank: comm.scatter(np.zeros(4), [1, 1, 1, 2], root=0),
        "counts of rank 0 must add up to the 4 rows of its array, got 5",
    ),
    (
        lambda comm, rank: comm.scatter(np.zeros(4), root=rank % 2),
        "rank 1 runs another collective: root 1 instead of 0",
    ),
    (
        lambda comm, rank: comm.scatter(np.zeros(4), root=1, out=np.zeros(2) if rank == 2 else None),
        r"rank 2 has an out array of shape \(2,\) and dtype float64; this result needs shape \(1,\)",
    ),
    (lambda comm, rank: comm.scatter(np.zeros(4), root=4), "root must be a rank, 0 to 3, got 4"),
    (
        lambda comm, rank: comm.gather(np.zeros(2), [2, 2, 1, 2], root=3),
        "rank 2 sends 2 elements to rank 3, which expects 1; correct the counts of one of them",
    ),
    (
        lambda comm, rank: (
            comm.gather(np.zeros(2), root=3) if rank else comm.gather(np.zeros((2, 1)), root=3)
        ),
        "rank 0",
    ),
]


@pytest.mark.parametrize("backend", ["shared", "tcp"])
def test_wrong_arguments_are_refused_on_all_ranks_before_anything_moves(backend: str) -> None:
    def body(comm: Communicator, rank: int) -> list[str]:
        texts = []
        for call, _ in REFUSED:
            before = comm.bytes_sent()
            with pytest.raises(UsageError) as caught:
                call(comm, rank)
            texts.append(str(caught.value))
            assert comm.bytes_sent() == before
            assert comm.all_gather_v(np.full(rank, rank)).tolist() == [1, 2, 2, 3, 3, 3]
        return texts

    for (_, wanted), texts in zip(REFUSED, zip(*on_ranks(body, backend), strict=True), strict=True):
        for text in texts:
            assert re.search(wanted, text), (wanted, text)
        assert len(set(texts)) == 1 or "correct the counts" not in wanted


def test_one_process_refuses_wrong_arguments() -> None:
    with Communicator(machine_plan()) as comm:
        ones: list[Array] = [np.zeros(1)] * 4
        cases: list[tuple[Callable[[], Any], str]] = [
            (
                lambda: comm.all_gather_v(ones, [1, 1, 1, 2]),
                "rank 3 sends 1 elements to rank 0, which expects 2",
            ),
            (lambda: comm.all_gather_v(ones[:3]), "3 arrays for 4 ranks"),
            (lambda: comm.reduce_scatter_v(ones, None), "counts of rank 0 must be whole numbers"),
            (lambda: comm.gather(ones, root=7), "root must be a rank, 0 to 3, got 7"),
        ]
        for call, wanted in cases:
            with pytest.raises(UsageError, match=wanted):
                call()


def test_counts_of_ranks_that_failed_are_not_repeated() -> None:
    """Rank 3 leaves; the others call again with counts for three."""

    def body(comm: Communicator, rank: int) -> Any:
        comm.reduce_scatter_v(np.ones(4), ONES)
        if rank == 3:
            comm.abort("the test wants it")
            return None
        with pytest.raises(BackendError, match="so this reduce_scatter_v cannot be repeated: its counts"):
            comm.reduce_scatter_v(np.ones(4), ONES)
        return comm.reduce_scatter_v(np.ones(3), [0, 2, 1]).tolist()

    assert on_ranks(body, "tcp", on_failure="shrink")[:3] == [[], [3, 3], [3]]


def test_changed_counts_keep_the_links_of_tcp_open() -> None:
    """Rank 0 always sends alike and takes every call for another; once counts have settled, all links are reopened."""

    def body(comm: Communicator, rank: int) -> list[bool]:
        network = comm._members.execution.backend._network  # type: ignore[attr-defined]
        kept = []
        for numbers in ((1,), (2, 1, 3, 2), (3, 3, 3, 4)):
            before = dict(network.outgoing)
            for number in numbers:
                counts = [30_000, *[9000 * number] * (RANKS - 1)]
                blocks = blocks_of(counts, ())
                assert np.array_equal(comm.all_gather_v(blocks[rank]), np.concatenate(blocks))
            kept.append(all(network.outgoing[link] is one for link, one in before.items()))
        return kept

    assert on_ranks(body, "tcp", chunk_bytes=1 << 14) == [[True, True, False]] * RANKS


def test_small_uneven_blocks_run_cached_over_tcp() -> None:
    """The barrier carries them, of ranks without rows too; other counts, types and reductions take turns."""

    def body(comm: Communicator, rank: int) -> int:
        for _ in range(2):
            for counts in ([3, 0, 50, 1], [0, 2, 0, 0], [3, 0, 50, 2]):
                check_on_one_rank(comm, counts, (), 1)
                whole = wholes_of(counts, (), "float64")
                mean = parts(sum(whole[1:], whole[0]) / RANKS, counts)[rank]
                assert np.array_equal(comm.reduce_scatter_v(whole[rank], counts, op="avg"), mean)
        return len(comm._members.execution._cached_uneven)

    assert min(on_ranks(body, "tcp", plan=machine_plan())) >= 3 * 4

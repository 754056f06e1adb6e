"""Sums of blocks at offsets: known sums, fewer bytes where blocks do not cover, dense sums where they do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import topoplan
from collectives import Communicator
from collectives.backends.tcp.tcp_backend import TcpBackend
from tests.support.hand_plans import forest_plan
from tests.support.tcp_jobs import backends_in_threads
from topoplan.errors import BackendError, UsageError

Array = NDArray[Any]


def dense(blocks: list[Array], offsets: list[list[int]], length: int) -> Array:
    """Return the sum of the vectors, one element after another."""
    total = np.zeros(length, blocks[0].dtype)
    for mine, starts in zip(blocks, offsets, strict=True):
        for block, start in zip(mine, starts, strict=True):
            total[start : start + len(block)] += block
    return total


def test_the_sums_of_two_ranks_with_different_numbers_of_blocks() -> None:
    blocks = [np.array([[1.0, 1], [2, 2]]), np.array([[5.0, 5]])]
    with Communicator(forest_plan(2, "allreduce", "chain")) as comm:
        found = comm.all_reduce_blocks(blocks, [[0, 4], [4]], 6)
        assert [one.tolist() for one in found] == [[1, 1, 0, 0, 7, 7]] * 2
        nothing = comm.all_reduce_blocks([blocks[0][:0]] * 2, [[], []], 3)
        assert [one.tolist() for one in nothing] == [[0, 0, 0]] * 2


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "uint64"])
@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
def test_sums_are_those_of_the_dense_vectors(dtype: str, share: float) -> None:
    draw, length, width = np.random.default_rng(3), 4000, 8
    blocks, offsets = [], []
    for rank in range(4):
        chosen = draw.permutation(length // width)[: int(share * (length // width)) + rank * (share < 1)]
        offsets.append([int(one) * width for one in chosen])
        blocks.append(draw.integers(0, 50, (len(chosen), width)).astype(dtype))
    with Communicator(topoplan.plan("v100x4")) as comm:
        found = comm.all_reduce_blocks(blocks, offsets, length)
        wanted = dense(blocks, offsets, length)
        assert all(one.dtype == dtype and np.array_equal(one, wanted) for one in found)


def test_few_blocks_take_few_bytes_and_many_those_of_the_dense_sum() -> None:
    length, width = 1 << 20, 256
    plan = topoplan.plan("v100x4")
    with Communicator(plan) as comm:
        comm.all_reduce([np.zeros(length, np.float32)] * 4)
        whole = sum(comm.bytes_sent().values())
    sent = []
    for count in (10, length // width):
        given = [np.ones((count, width), np.float32)] * 4
        with Communicator(plan) as comm:
            comm.all_reduce_blocks(given, [list(range(0, count * width, width))] * 4, length)
            sent.append(sum(comm.bytes_sent().values()))
    assert sent[0] <= 12 * (10 * (4 * width + 8) + 24) + 12 * 32
    assert sent[0] < whole / 100
    assert sent[1] == whole + 12 * 32, "the dense sum, and what ranks tell each other"


def test_ranks_over_tcp_have_loopbacks_bits_and_refuse_another_length() -> None:
    plan = forest_plan(3, "allreduce", "star")
    draw = np.random.default_rng(1)
    blocks = [draw.standard_normal((rank + 1, 5)).astype(np.float32) for rank in range(3)]
    offsets = [[7 * one for one in range(rank + 1)] for rank in range(3)]
    with Communicator(plan) as comm:
        wanted = comm.all_reduce_blocks(blocks, offsets, 1000)[0].tobytes()

    def body(backend: TcpBackend, rank: int) -> bytes:
        with Communicator(plan, backend) as comm:
            found: Array = comm.all_reduce_blocks(blocks[rank], offsets[rank], 1000)
            with pytest.raises(
                UsageError, match=r"the length must be the same .* 1000 on rank 0 and 999 on rank 1"
            ):
                comm.all_reduce_blocks(blocks[rank], offsets[rank], 1000 - (rank == 1))
            with pytest.raises(UsageError if rank == 2 else BackendError, match="offsets of rank 2 must be"):
                comm.all_reduce_blocks(blocks[rank], offsets[rank], 1000 if rank != 2 else 3)
            assert comm.all_reduce_blocks(blocks[rank], offsets[rank], 1000).tobytes() == found.tobytes()
            return found.tobytes()

    assert backends_in_threads(3, body) == [wanted] * 3


@pytest.mark.parametrize(
    ("blocks", "offsets", "length", "message"),
    [
        (np.ones((2, 2)), [0, 1], 6, "blocks of rank 0 must not overlap, got 0 and 1 with 2 elements each"),
        (np.ones((2, 2)), [0, 5], 6, "offsets of rank 0 must be from 0 to 4, got 5"),
        (np.ones((2, 2)), [-1, 4], 6, "offsets of rank 0 must be from 0 to 4, got -1"),
        (np.ones((2, 2)), [0], 6, "offsets of rank 0 must be 2 whole numbers for 2 blocks"),
        (np.ones((2, 2)), [0.0, 2.0], 6, "offsets of rank 0 must be 2 whole numbers"),
        (np.ones(4), [0], 6, "blocks of rank 0 must have shape"),
        (np.ones((1, 2), bool), [0], 6, "blocks must be of float16, .* got bool"),
        (np.ones((2, 2)), [0, [4]], 6, "offsets of rank 0 must be 2 whole numbers for 2 blocks"),
        (np.ones((1, 2)), [0], 2**70, "length must be a whole number from 0 on"),
        (np.ones((1, 2)), [0], 2.5, "length must be a whole number from 0 on, got 2.5"),
    ],
)
def test_refuses_blocks_that_do_not_fit(blocks: Array, offsets: Any, length: Any, message: str) -> None:
    with (
        Communicator(forest_plan(2, "allreduce", "chain")) as comm,
        pytest.raises(UsageError, match=message),
    ):
        comm.all_reduce_blocks([blocks] * 2, [offsets] * 2, length)

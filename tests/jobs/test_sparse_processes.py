"""The sparse allreduce among ranks with a process of their own: loopback's bits, and what a failure leaves."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import Communicator
from collectives.sparse.codec import WireFormat
from tests.support.sparse_steps import (
    EXCHANGES,
    TWO_SERVERS,
    as_it_is,
    of_each_rank,
    read_only,
    steps_of_each,
    taken,
)
from tests.support.tcp_jobs import in_threads
from topoplan.errors import BackendError, UsageError

Array = NDArray[Any]

SIZE = 701


def outcome(results: list[Any]) -> list[Any]:
    """What the ranks return, where none of them failed."""
    for one in results:
        if isinstance(one, BaseException):
            raise one
        assert one is not None, "a rank's thread ended otherwise"
    return results


def whole_numbers(rank: int, step: int) -> Array:
    return np.random.default_rng([rank, step]).integers(-99, 100, SIZE).astype(np.float32)


def kept(comm: Communicator, key: str = "") -> Array:
    residual: Array = comm.sparse_state()[key][0]["residual"]
    return residual


@pytest.mark.thorough
def test_every_exchange_gives_and_keeps_loopbacks_bits_over_tcp() -> None:
    steps = steps_of_each()
    found = outcome(in_threads(TWO_SERVERS, lambda comm, rank: taken(comm, steps, read_only, as_it_is)))
    assert [list(one) for one in found] == of_each_rank(steps)


def broken(rank: int) -> Array:
    """What the ranks put in when rank 2 fails."""
    if rank == 2:
        raise UsageError("this rank has something else to do")
    return whole_numbers(rank, 3)


@pytest.mark.sampled
@pytest.mark.parametrize("exchange", ["pairs", "hashed", "dense", "tree", "balanced"])
def test_nothing_that_was_not_summed_is_lost_where_a_rank_fails(exchange: str) -> None:
    """The failing rank keeps what it kept; the others, which it lets down, keep their gradients too."""
    ready = threading.Barrier(4, timeout=60)

    def body(comm: Communicator, rank: int) -> tuple[Array, Array]:
        given, summed = np.zeros(SIZE), np.zeros(SIZE)
        for step in range(3):
            given += whole_numbers(rank, step)
            summed += comm.sparse_all_reduce(whole_numbers(rank, step), density=0.05, exchange=exchange)
        ready.wait()  # the others may fail in the next call while a rank still ends this one
        with pytest.raises(UsageError if rank == 2 else BackendError):
            comm.sparse_all_reduce(broken(rank), density=0.05, exchange=exchange)
        return given + (whole_numbers(rank, 3) if rank != 2 else 0) - kept(comm), summed

    found = outcome(in_threads(TWO_SERVERS, body, timeout=3.0))
    assert np.array_equal(np.sum([sent for sent, _ in found], axis=0), found[0][1])


OTHER_CALLS: dict[str, dict[str, Any]] = {
    "density": {"density": 0.0500000001},
    "exchange": {"exchange": "pairs"},
    "op": {"op": "avg"},
    "key": {"key": "other"},
    "wire": {"wire": WireFormat()},
}
AGREED = ("density", "exchange", "wire")
"""What ranks find to differ while one of them plans: then nobody has put a gradient into the sum of a server yet."""


@pytest.mark.sampled
@pytest.mark.parametrize("different", OTHER_CALLS)
@pytest.mark.parametrize("exchange", [name for name in EXCHANGES if name != "pairs"])
def test_ranks_that_mean_another_call_are_refused_before_anything_is_exchanged(
    exchange: str, different: str
) -> None:
    ready = threading.Barrier(4, timeout=60)

    def body(comm: Communicator, rank: int) -> tuple[Array, Array]:
        usual = {"density": 0.05, "exchange": exchange, "key": "this"}
        for key in ("this", "other"):
            comm.sparse_all_reduce(whole_numbers(rank, 0), density=0.05, exchange="pairs", key=key)
        ready.wait()  # the others may fail in the next call while a rank still ends this one
        asked = usual | (OTHER_CALLS[different] if rank == 1 else {})
        before, gradient = kept(comm, asked["key"]), whole_numbers(rank, 1)
        with pytest.raises(BackendError, match="rank 1 runs another collective"):
            comm.sparse_all_reduce(gradient, **asked)
        lost = exchange == "servers" and different not in AGREED
        return kept(comm, asked["key"]), before if lost else before + gradient

    for after, wanted in outcome(in_threads(TWO_SERVERS, body)):
        assert np.array_equal(after, wanted)

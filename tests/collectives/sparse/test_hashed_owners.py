"""Owners by a hash of the index: known owners, balanced loads, the bits of gathered pairs, and few bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import topoplan
from collectives import Communicator
from collectives.sparse.codec import WireFormat
from collectives.sparse.hashed_owners import (
    BLOCK,
    OwnedMessages,
    OwnerMap,
    equal_length,
    hashed_owners,
)
from tests.bench.sparse import KINDS_OF_GRADIENTS, fullest_loads, least_bytes, owner_bytes
from tests.support.hand_plans import forest_plan
from topoplan.errors import UsageError

Array = NDArray[Any]


def test_the_owners_of_a_hundred_indices_are_those_of_fibonacci_hashing() -> None:
    numbers = np.arange(100)
    assert np.bincount(hashed_owners(numbers, 4)).tolist() == [27, 24, 25, 24]
    assert hashed_owners(numbers, 4).tolist() == [(one * 2654435761 % 2**32) >> 30 for one in range(100)]
    assert np.bincount(numbers * 4 // 1000, minlength=4).tolist() == [100, 0, 0, 0], "by ranges of 1000"


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_elements_at_equal_distances_have_no_common_owner(ranks: int) -> None:
    """As the columns of matrices, also if the number of columns is a Fibonacci number or a power of two."""
    for distance in (1, 34, 144, 377, 987, 1024, 2584, 4181, 46368, 1 << 20):
        load = np.bincount(hashed_owners(np.arange(1000, dtype=np.int64) * distance, ranks), minlength=ranks)
        assert load.max() <= 1.4 * 1000 / ranks, distance


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1003])
@pytest.mark.parametrize("ranks", [1, 2, 7, 300])
def test_every_element_has_one_place_at_one_owner(size: int, ranks: int) -> None:
    owners, everything = OwnerMap(size, ranks), np.arange(size)
    values = everything.astype(np.float32)
    parts = owners.split((everything, values))
    assert tuple(len(places) for places, _ in parts) == owners.sizes
    found = []
    for rank, (places, held) in enumerate(parts):
        assert places.tolist() == list(range(owners.sizes[rank]))
        assert np.array_equal(owners.elements(rank, places), held)
        found.append(held)
    assert np.array_equal(np.sort(np.concatenate(found)), values)


@pytest.mark.parametrize("kind", KINDS_OF_GRADIENTS)
@pytest.mark.parametrize("ranks", [4, 8])
def test_loads_are_balanced_and_bytes_below_six_times_the_entries(kind: str, ranks: int) -> None:
    """The fullest owner has at most 1.2 times the mean; ranges give clustered gradients to one or two owners."""
    by_range, by_hash = fullest_loads(kind, ranks, 0.01)
    assert by_hash <= 1.2
    assert by_range < 1.1 if kind == "uniform" else by_range >= 1.9
    assert max(owner_bytes(kind, ranks, 0.01, "hashed")) <= 6 * 8 * 4000


@pytest.mark.thorough
def test_exact_sums_of_sixteen_uniform_gradients_take_more_than_six_times_the_entries() -> None:
    """Their values alone do, whatever the exchange; owners that choose again send and receive less than twice."""
    entries, ranks = 4000, 16
    least = least_bytes("uniform", ranks, 0.01)
    # with a density of p the union is 1 - (1 - p)^n of all elements in the mean
    mean = 4 * (400_000 * (1 - 0.99**ranks) - entries)
    assert abs(least / mean - 1) < 0.01
    assert least > 6 * 8 * entries
    assert max(owner_bytes("uniform", ranks, 0.01, "hashed")) >= least
    assert max(owner_bytes("uniform", ranks, 0.01, "balanced")) <= 2 * 8 * entries


@pytest.mark.parametrize("wire", [None, WireFormat()], ids=["plain", "packed"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize(("size", "density"), [(5003, 0.01), (5003, 0.5), (40, 0.03), (3, 1.0)])
def test_sums_have_the_bits_of_gathered_pairs(
    size: int, density: float, dtype: str, wire: WireFormat | None
) -> None:
    """With indices and with bitmaps: numbers whose sums depend on the order, over several steps."""
    with Communicator(forest_plan(5, "allreduce", "star")) as comm:
        for step in range(2):
            draw = np.random.default_rng(step)
            given = [draw.standard_normal(size).astype(dtype) for _ in range(5)]
            hashed, pairs = (
                comm.sparse_all_reduce(given, density=density, exchange=name, key=name, wire=wire)
                for name in ("hashed", "pairs")
            )
            assert all(one.tobytes() == pairs[0].tobytes() for one in hashed)
        state = comm.sparse_state()
        for one, other in zip(state["hashed"], state["pairs"], strict=True):
            assert one["residual"].tobytes() == other["residual"].tobytes()


def test_entries_that_cancel_and_entries_of_one_owner_alone() -> None:
    with Communicator(forest_plan(3, "allreduce", "chain")) as comm:
        given = [np.zeros(1000, np.float32) for _ in range(3)]
        given[0][5], given[2][5] = 2.5, -2.5
        cancelled = comm.sparse_all_reduce(given, density=0.001, exchange="hashed", key="cancel")
        assert not any(one.any() for one in cancelled)
        for rank, one in enumerate(given):
            one[:] = 0
            one[:BLOCK] = rank + 1
        found = comm.sparse_all_reduce(given, density=0.008, exchange="hashed", key="one owner")
        assert [one[:BLOCK].tolist() for one in found] == [[6.0] * BLOCK] * 3
        assert not any(one[BLOCK:].any() for one in found)


def test_the_shorter_of_bitmap_and_indices_is_sent() -> None:
    """At 1000 elements a bitmap has 128 bytes, and an index 4; packed indices take few bytes more than a bitmap."""
    plain, packed = (OwnedMessages(4000, "float32", wire) for wire in (None, WireFormat()))
    forms = [plain.pulled_bytes(count, 1000) for count in range(1001)]
    assert [with_bitmap for _, with_bitmap in forms] == [count > 32 for count in range(1001)]
    assert [nbytes for nbytes, _ in forms] == [min(8 * count, 128 + 4 * count) for count in range(1001)]
    for count in range(1, 1001):
        nbytes, with_bitmap = packed.pulled_bytes(count, 1000)
        assert not with_bitmap
        assert nbytes <= 56 + 128 + 48 + 4 * count, "a header, and the bits of a bitmap and some more"


def test_equal_lengths_are_at_most_a_sixteenth_longer() -> None:
    for longest in [*range(16, 2000), 12_345, 1_000_000, (1 << 20) + 1]:
        length = equal_length(longest)
        assert longest <= length <= longest * 17 / 16 + 16
        assert length % 16 == 0


def test_the_model_takes_hashed_owners_of_many_ranks_with_many_entries() -> None:
    """Pairs bring every rank an index with each value; sums of owners come with a bitmap."""
    servers = topoplan.cluster([topoplan.Server(topoplan.load("dgx-1v"), [0], count=8)], nic_gbps=10, nics=1)
    with Communicator(servers) as comm:
        gradients = [np.zeros(1 << 22, np.float32)] * 8
        many = comm.explain(gradients, density=0.06)
        assert many.seconds["hashed"] < many.seconds["pairs"]
        few = comm.explain([np.zeros(1000, np.float32)] * 8, density=0.01)
        assert few.seconds["pairs"] < few.seconds["hashed"]
        named = comm.explain(gradients, density=0.06, exchange="hashed")
        assert named.plan is None
        assert str(named).startswith("hashed: asked for; by the model hashed owners ")


def test_one_rank_has_no_owners() -> None:
    with Communicator(topoplan.load("dgx-1v").subset([0])) as comm:
        given = [np.ones(9, np.float32)]
        with pytest.raises(
            UsageError, match="no exchange 'hashed' here: one rank exchanges nothing; use dense"
        ):
            comm.sparse_all_reduce(given, density=0.5, exchange="hashed")
        assert comm.sparse_all_reduce(given, density=0.5)[0].sum() == 9

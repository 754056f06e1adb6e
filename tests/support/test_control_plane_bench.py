"""The tree of control connections that the benchmark simulates, and its counts of messages."""

from __future__ import annotations

import pytest

from tests.bench.control_plane import HOP, counted, parent_of, simulated


@pytest.mark.parametrize("size", [1, 2, 64, 65, 4097, 20_000])
def test_every_rank_reaches_rank_0_in_the_tree_and_the_ranks_below_one_are_consecutive(size: int) -> None:
    parents = [parent_of(rank) for rank in range(size)]
    below = [1] * size
    for rank in reversed(range(1, size)):
        parent = parents[rank]
        assert parent is not None
        assert parent < rank
        below[parent] += below[rank]
    assert below[0] == size
    last = [rank + count - 1 for rank, count in enumerate(below)]
    for rank, parent in enumerate(parents):
        assert parent is None or last[rank] <= last[parent]
    time, connections, depth = simulated(size, 1e-5, parents)
    assert depth <= 3
    assert connections <= 3 * 63 + 1
    assert time <= simulated(size, 1e-5, [None, *[0] * (size - 1)])[0] + 2 * depth * (HOP + 1e-5)


def test_a_round_of_a_star_takes_a_message_of_every_rank_after_another() -> None:
    time, connections, depth = simulated(1001, 2e-5, [None, *[0] * 1000])
    assert time == pytest.approx(1000 * 2e-5 + 2 * HOP + 2e-5)
    assert (connections, depth) == (1000, 1)


def test_the_rendezvous_takes_a_message_of_every_rank_and_answers_it() -> None:
    found, _ = counted(200)
    assert {phase: row[:2] for phase, row in found.items()} == {
        "join": (200, 200),
        "agree": (200, 200),
        "digests": (200, 200),
        "leave": (200, 0),
    }
    assert found["digests"][2] < 200 * 200  # equal texts are one run

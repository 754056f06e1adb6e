"""The blocks of calls that a time is taken of."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import topoplan
from collectives import Communicator
from collectives.lab import benchmark
from collectives.lab.benchmark import BLOCK_SECONDS, MAX_CALLS, REPEATS, measure


class Slow(Communicator):
    """Its all_reduce takes `pause` seconds of a clock that only it moves."""

    pause, calls, now = 0.0, 0, 0.0

    def all_reduce(self, *arguments: Any, **settings: Any) -> Any:
        self.calls += 1
        self.now += self.pause
        return super().all_reduce(*arguments, **settings)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    with Slow(topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[4, 5])) as comm:
        monkeypatch.setattr(benchmark, "time", SimpleNamespace(perf_counter=lambda: comm.now))
        yield comm


def test_short_calls_run_back_to_back_and_the_time_is_of_one(slow: Slow) -> None:
    slow.pause = BLOCK_SECONDS / 20
    row = measure(slow, nbytes=64, dtype="float32")
    assert 2 * REPEATS < slow.calls < 2 * REPEATS * MAX_CALLS
    assert row.seconds == pytest.approx(slow.pause)
    assert row.wrong == 0


def test_a_call_that_fills_a_block_is_one(slow: Slow) -> None:
    """One call makes the result, one warms up, one finds how long it takes."""
    slow.pause = 1.5 * BLOCK_SECONDS
    row = measure(slow, nbytes=64, dtype="float32")
    assert slow.calls == 3 + REPEATS
    assert row.seconds == pytest.approx(slow.pause)


@pytest.mark.parametrize(
    ("collective", "factor"), [("allreduce", 3 / 2), ("allgather", 3 / 4), ("broadcast", 1)]
)
def test_bus_bandwidth_is_what_a_ring_would_send_over_each_link(collective: str, factor: float) -> None:
    with Communicator(topoplan.plan(topoplan.load("dgx-1v"), collective, gpus=range(4))) as comm:
        row = measure(comm, nbytes=4096, dtype="float32")
    assert row.algbw == pytest.approx(row.size / row.seconds / 1e9)
    assert row.busbw == pytest.approx(factor * row.algbw)

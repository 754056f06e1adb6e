"""The cached loader: hit ratios without eviction and with it, order, errors, files, refusals."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from pathlib import Path
from random import Random

import pytest

from collectives.examples.cached_loader import CachedLoader
from topoplan.errors import UsageError

SAMPLES, EPOCHS = 1000, 12


def epochs(seed: int) -> list[list[int]]:
    source = Random(seed)
    return [source.sample(range(SAMPLES), SAMPLES) for _ in range(EPOCHS)]


def number_of(raw: bytes) -> int:
    return int(raw.decode())


def loader(memory: int, **options: object) -> CachedLoader[int]:
    return CachedLoader(lambda number: b"%d" % number, number_of, memory=memory, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("part", [0.5, 0.75, 0.9])
def test_what_is_kept_is_hit(part: float) -> None:
    """c without eviction, c + (1 - c) ln(1 - c) with that of the least recently used, simulated here."""
    reads = loader(int(part * SAMPLES))
    with reads:
        for epoch in epochs(1):
            assert [reads.get(number) for number in epoch] == epoch
    after_first = reads.reads["memory"] / (SAMPLES * (EPOCHS - 1))
    assert after_first == pytest.approx(part)
    recent: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for number in (number for epoch in epochs(1) for number in epoch):
        hits += number in recent
        recent[number] = None
        recent.move_to_end(number)
        if len(recent) > part * SAMPLES:
            recent.popitem(last=False)
    assert hits / (SAMPLES * (EPOCHS - 1)) == pytest.approx(part + (1 - part) * math.log(1 - part), abs=0.02)


def test_files_hold_what_memory_does_not(tmp_path: Path) -> None:
    with loader(200, folder=tmp_path, files=500, threads=3) as reads:
        for epoch in epochs(2)[:2]:
            batches = list(reads.batches([epoch[i : i + 50] for i in range(0, SAMPLES, 50)], ahead=3))
            assert [number for batch in batches for number in batch] == epoch
    assert len(list(tmp_path.iterdir())) == 500
    assert sum(reads.reads.values()) == 2 * SAMPLES
    assert reads.reads["memory"] >= 200
    assert 0 < reads.reads["files"] <= 500
    assert str(reads).startswith("2000 samples read: ")


def test_batches_are_read_ahead_of_the_one_in_use() -> None:
    seen, ready = [], threading.Event()

    def fetch(number: int) -> bytes:
        seen.append(number)
        if number == 5:
            ready.set()
        return b"%d" % number

    with CachedLoader(fetch, number_of, memory=0) as reads:
        batches = reads.batches([[0, 1], [2, 3], [4, 5], [6, 7]])
        assert next(batches) == [0, 1]
        assert ready.wait(5)
        assert 6 not in seen
        assert list(batches) == [[2, 3], [4, 5], [6, 7]]


def test_an_error_comes_with_its_batch() -> None:
    def fetch(number: int) -> bytes:
        if number == 2:
            raise OSError("the store is away")
        return b"%d" % number

    with CachedLoader(fetch, number_of, memory=9) as reads:
        batches = reads.batches([[0, 1], [2, 3], [4, 5]])
        assert next(batches) == [0, 1]
        with pytest.raises(OSError, match="the store is away"):
            next(batches)


@pytest.mark.parametrize("options", [{"memory": -1}, {"memory": 0, "threads": 0}, {"memory": 0, "files": 3}])
def test_what_cannot_be_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="give"):
        loader(**options)  # type: ignore[arg-type]

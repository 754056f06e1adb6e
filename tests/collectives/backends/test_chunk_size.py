"""The search for the chunk size: where it ends on curves that are known, in how many calls, and what is remembered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from collectives.backends.plan_and_chunk_store import FIRST_CHUNK, LARGEST_CHUNK, SMALLEST_CHUNK, ChunkSizes
from topoplan.errors import UsageError

KB, MB = 1 << 10, 1 << 20
Seconds = Callable[[int], float]


def pipeline(size: int, *, nbytes: int = 256 * MB, alpha: float, hops: int) -> float:
    """Seconds of a pipeline: each of its steps costs alpha and moves a chunk at 10 GB/s."""
    return (nbytes / size + hops) * (alpha + size / 10e9)


CURVES: dict[str, tuple[Seconds, int, int]] = {
    "rising": (lambda size: 1 + 1e6 / size, 64 * MB, 10),
    "falling": (lambda size: 1 + size / 1e6, 64 * KB, 10),
    "flat": (lambda size: 1.0, 1 * MB, 10),
    "best at the start": (lambda size: 1 + abs(np.log(size / MB)), 1 * MB, 8),
    "best at 4 MB": (lambda size: 1 + abs(np.log(size / (4 * MB))), 4 * MB, 8),
    "best at 256 KB": (lambda size: 1 + abs(np.log(size / (256 * KB))), 256 * KB, 10),
    "best between 1 and 4 MB": (lambda size: 1 + abs(np.log(size / (2.5 * MB))), 5 * MB // 2, 10),
    "slow beyond the cache": (lambda size: 1.0 if size <= 200 * KB else 2.5, 64 * KB, 10),
}


def settle(
    seconds: Seconds, *, nbytes: int = 256 * MB, sizes: ChunkSizes | None = None
) -> tuple[int, list[int]]:
    """The size that is found, and those that were tried."""
    sizes = ChunkSizes("loopback") if sizes is None else sizes
    tried = []
    while not sizes.settled("plan", nbytes):
        tried.append(sizes.choose("plan", nbytes))
        sizes.measured("plan", nbytes, seconds(tried[-1]))
    return sizes.choose("plan", nbytes), tried


@pytest.mark.parametrize("name", CURVES)
def test_the_search_ends_at_the_best_size_it_can_tell_apart(name: str) -> None:
    seconds, best, calls = CURVES[name]
    found, tried = settle(seconds)
    assert (found, len(tried)) == (best, calls)
    assert tried[0] == FIRST_CHUNK
    assert min(tried) >= SMALLEST_CHUNK
    assert max(tried) <= LARGEST_CHUNK


@pytest.mark.parametrize("alpha", [1e-7, 1e-6, 1e-5, 1e-4])
@pytest.mark.parametrize("hops", [1, 3, 16, 100])
def test_pipelines_run_within_a_sixth_of_their_best_after_at_most_14_calls(alpha: float, hops: int) -> None:
    found, tried = settle(lambda size: pipeline(size, alpha=alpha, hops=hops))
    best = min(pipeline(size * KB, alpha=alpha, hops=hops) for size in range(64, 64 * KB, 64))
    assert len(tried) <= 14
    assert pipeline(found, alpha=alpha, hops=hops) <= best * 7 / 6


@pytest.mark.sampled
@pytest.mark.parametrize("slow", range(14))
@pytest.mark.parametrize("name", CURVES)
def test_one_slow_call_changes_nothing(name: str, slow: int) -> None:
    seconds, best, _ = CURVES[name]
    calls = iter(range(100))
    found, _ = settle(lambda size: seconds(size) * (20 if next(calls) == slow else 1))
    assert found == best


@pytest.mark.parametrize("nbytes", [0, 1, 7, 64 * KB, 65 * KB, 100 * KB, 300 * KB, MB, 5 * MB, 1000003])
@pytest.mark.parametrize("name", ["rising", "falling"])
def test_no_chunk_is_larger_than_the_buffer(nbytes: int, name: str) -> None:
    found, tried = settle(CURVES[name][0], nbytes=nbytes)
    assert all(1 <= size <= max(nbytes, 1) for size in [found, *tried])
    assert len(tried) <= 14
    assert bool(tried) == (nbytes > SMALLEST_CHUNK)
    if name == "rising" and nbytes <= SMALLEST_CHUNK:
        assert found == max(nbytes, 1)
    if name == "falling" and nbytes > SMALLEST_CHUNK:
        assert found < 2 * SMALLEST_CHUNK


def test_a_search_that_is_open_chooses_the_same_size_until_it_is_told_a_time() -> None:
    sizes = ChunkSizes("loopback")
    assert {sizes.choose("plan", 8 * MB) for _ in range(5)} == {FIRST_CHUNK}
    sizes.measured("plan", 8 * MB, 1.0)
    sizes.measured("plan", 8 * MB, 1.0)
    assert {sizes.choose("plan", 8 * MB) for _ in range(5)} == {4 * FIRST_CHUNK}


def test_ranks_that_are_told_the_same_seconds_make_the_same_choices() -> None:
    generator = np.random.default_rng(3)
    ranks = [ChunkSizes("torch") for _ in range(4)]
    for _ in range(200):
        plan, nbytes = f"plan {generator.integers(3)}", int(generator.integers(1, 5)) * 3 * MB
        assert len({(one.choose(plan, nbytes), one.settled(plan, nbytes)) for one in ranks}) == 1
        seconds = float(generator.random())
        for one in ranks:
            one.measured(plan, nbytes, seconds)
    assert ranks[0].settled("plan 0", 3 * MB)


def test_a_size_serves_buffers_of_its_power_of_two_of_the_same_plan_only() -> None:
    sizes = ChunkSizes("loopback")
    settle(CURVES["falling"][0], nbytes=8 * MB, sizes=sizes)
    assert sizes.settled("plan", 4 * MB + 1)
    assert not sizes.settled("plan", 4 * MB)
    assert not sizes.settled("plan", 8 * MB + 1)
    assert not sizes.settled("other plan", 8 * MB)
    assert [sizes.choose("plan", n) for n in (4 * MB, 5 * MB, 9 * MB)] == [
        FIRST_CHUNK,
        SMALLEST_CHUNK,
        FIRST_CHUNK,
    ]


def test_buffers_of_different_sizes_in_one_class_are_not_compared_with_each_other() -> None:
    sizes = ChunkSizes("loopback")
    seconds = CURVES["best at 256 KB"][0]
    while not sizes.settled("plan", 16 * MB):
        for nbytes in (9 * MB, 16 * MB):
            if not sizes.settled("plan", nbytes):
                sizes.measured("plan", nbytes, nbytes**0.1 * seconds(sizes.choose("plan", nbytes)))
    assert sizes.choose("plan", 12 * MB) == 256 * KB


def test_buffers_that_never_come_twice_are_forgotten_and_use_the_first_size() -> None:
    sizes = ChunkSizes("loopback")
    for nbytes in range(8 * MB, 8 * MB + 1000):
        sizes.measured("plan", nbytes, 1.0)
    assert len(sizes._open) <= 64
    assert sizes.choose("plan", 8 * MB + 500) == FIRST_CHUNK


def test_a_fixed_size_is_never_measured() -> None:
    sizes = ChunkSizes("mpi", fixed=12345)
    assert sizes.settled("plan", 64 * MB)
    sizes.measured("plan", 64 * MB, 1.0)
    assert [sizes.choose("plan", n) for n in (1, 64 * MB)] == [12345, 12345]
    with pytest.raises(UsageError, match="chunks must have at least 1 byte, got 0"):
        ChunkSizes("mpi", fixed=0)


def test_sizes_are_saved_beside_those_of_other_plans_and_back_ends_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "chunks.json"
    first, second = ChunkSizes("mpi"), ChunkSizes("torch")
    settle(CURVES["falling"][0], sizes=first)
    first.save(path)
    settle(CURVES["rising"][0], sizes=second)
    second.save(path)
    content = json.loads(path.read_text())
    assert content["format"] == "topoplan.chunks/1"
    assert [(one["backend"], one["bytes"], one["chunk"]) for one in content["sizes"]] == [
        ("mpi", 256 * MB, SMALLEST_CHUNK),
        ("torch", 256 * MB, LARGEST_CHUNK),
    ]
    for backend, size in (("mpi", SMALLEST_CHUNK), ("torch", LARGEST_CHUNK)):
        loaded = ChunkSizes(backend)
        loaded.measured("plan", 200 * MB, 1.0)
        loaded.load(path)
        assert loaded.settled("plan", 200 * MB)
        assert loaded.choose("plan", 200 * MB) == size
    assert [file.name for file in tmp_path.iterdir()] == ["chunks.json"]


BAD_FILES = {
    "": "is not a file of chunk sizes: Expecting value",
    "[1, 2]": "is not a file of chunk sizes: format None instead of 'topoplan.chunks/1'",
    '{"format": "topoplan.plan/1"}': "format 'topoplan.plan/1' instead of",
    '{"format": "topoplan.chunks/1"}': "has no list of sizes",
    '{"format": "topoplan.chunks/1", "sizes": [7]}': "size 0: 7 needs plan and backend",
    '{"format": "topoplan.chunks/1", "sizes": [{"plan": "a", "backend": "mpi", "bytes": 3, "chunk": 1}]}': "power of",
    '{"format": "topoplan.chunks/1", "sizes": [{"plan": "a", "backend": "mpi", "bytes": 4, "chunk": 0}]}': "positive",
    "[" * 100000: "is not a file of chunk sizes",
}


@pytest.mark.parametrize("text", BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_file_of_something_else_is_one_error_and_stays_as_it_is(text: str, tmp_path: Path) -> None:
    path = tmp_path / "chunks.json"
    path.write_text(text)
    sizes = ChunkSizes("mpi")
    settle(CURVES["falling"][0], sizes=sizes)
    for use in (sizes.load, sizes.save):
        with pytest.raises(UsageError, match=BAD_FILES[text]) as caught:
            use(path)
        assert "\n" not in str(caught.value)
    assert path.read_text() == text
    assert sizes.choose("plan", 256 * MB) == SMALLEST_CHUNK


def test_a_file_that_is_not_there_or_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    sizes = ChunkSizes("mpi")
    with pytest.raises(UsageError, match=r"cannot read chunk sizes from .*: No such file"):
        sizes.load(tmp_path / "none.json")
    with pytest.raises(UsageError, match=r"cannot write .*: No such file"):
        sizes.save(tmp_path / "none" / "chunks.json")

"""The shared back end: processes of one host without MPI give loopback's bits, and fail with a name."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from collectives.peers.shared_memory import meet
from tests.jobs.shared_ranks import be
from tests.support.forking import forking
from topoplan.errors import UsageError


def job(what: str, size: int, folder: Path) -> list[Any]:
    context = forking()
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        context.Process(target=be, args=(what, rank, size, str(folder), writer))
        for rank, (_, writer) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    for _, writer in pipes:
        writer.close()
    told: list[Any] = [None] * size
    try:
        for rank, (reader, _) in enumerate(pipes):
            if (what, rank) == ("stopped", 1):
                continue
            assert reader.poll(60), f"rank {rank} hangs"
            with contextlib.suppress(EOFError):
                told[rank] = reader.recv()
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return told


def test_survivors_name_a_rank_that_was_killed(tmp_path: Path) -> None:
    zero, one, two = job("killed", 3, tmp_path)
    assert one is None
    for rank, (text, seconds, _) in ((0, zero), (2, two)):
        assert text.startswith(f"rank {rank}, peer 1, step "), text
        assert "the peer died" in text
        assert seconds < 10


@pytest.mark.thorough
def test_survivors_sleep_until_the_timeout_and_name_a_rank_that_stands_still(tmp_path: Path) -> None:
    zero, _, two = job("stopped", 3, tmp_path)
    for rank, (text, seconds, busy) in ((0, zero), (2, two)):
        assert seconds > 1
        assert busy < 0.3
        assert text.startswith(f"rank {rank}, peer 1, step "), text
        assert "is stopped" in text


@pytest.mark.thorough
def test_a_plain_loop_sums_the_same_gradients_in_every_mode(tmp_path: Path) -> None:
    """Twelve steps of three ranks: each gradient is used once by everyone, however late."""
    first, second = [12 * (1 + 2 + 3.0)] * 6, [12 * 3 * place for place in range(5)]
    ranks = job("trained", 3, tmp_path)
    for told in ranks:
        for sums in told[:3]:
            assert sums == [first, [float(value) for value in second]]
        # alone each rank uses its own gradients, and parameters are averaged
        assert told[3] == [[12 * 2 * 3.0] * 6, [float(value) for value in second]]
        # pulled towards ranks with fewer steps, none is past what a rank adds alone, and all end alike
        assert told[4] == ranks[0][4]
        assert all(0 < one <= 12 * 3 * 3 for one in told[4][0])
        assert all(0 <= one <= most for one, most in zip(told[4][1], second, strict=True))


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_tensors_on_the_cpu_are_shared_bfloat16_too(tmp_path: Path) -> None:
    results = job("torch_tensors", 3, tmp_path)
    expected = sum(value % 7 * 3 + 3 for value in range(1003))
    for sums in results:
        assert [name for name, _, _ in sums] == [
            "torch.float32",
            "torch.float16",
            "torch.bfloat16",
            "torch.int64",
            "torch.float64",
        ]
        assert all(total == expected for _, total, _ in sums)
        assert all(gathered == [0, 1, 2, 1, 2, 3, 2, 3, 4] for _, _, gathered in sums)


def test_ranks_that_cannot_see_the_memory_of_the_first_are_refused_on_all() -> None:
    def gather(text: str) -> list[str]:
        if "topoplan-" in text:
            return [f"{2**30} 3 topoplan-a", text]
        return ["", text]

    with pytest.raises(
        UsageError, match=r"ranks cannot share memory: rank 1 says it cannot see the memory of rank 0"
    ):
        meet(gather, rank=1, size=2)

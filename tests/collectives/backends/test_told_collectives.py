"""TOPOPLAN_DEBUG has collectives told on stderr, a line each, by one rank or by all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives import Communicator
from tests.support.hand_plans import forest_plan
from tests.support.tcp_jobs import in_threads


def lines(text: str) -> list[dict[str, str]]:
    told = [line for line in text.splitlines() if line.startswith("topoplan: ")]
    return [dict(word.split("=", 1) for word in line.split()[1:]) for line in told]


def test_a_line_tells_what_ran_how_and_how_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOPOPLAN_DEBUG", "1")
    plan = forest_plan(4, "allreduce", "star")
    with Communicator(plan, chunk_bytes=1024) as comm:
        comm.all_reduce([np.ones(1000, np.float32)] * 4, op="avg")
        comm.broadcast([np.ones(6)] * 4)
    first, second = lines(capsys.readouterr().err)
    assert float(first.pop("seconds")) > 0
    assert float(first.pop("GB/s")) > 0
    assert first == {
        "rank": "0",
        "collective": "allreduce",
        "bytes": "4000",
        "dtype": "float32",
        "op": "avg",
        "plan": f"{plan.digest[:16]}:allreduce:{plan.schedule}",
        "backend": "loopback",
        "chunk": "1024",
    }
    assert (second["collective"], second["op"], second["bytes"]) == ("broadcast", "none", "48")


@pytest.mark.parametrize(("asked", "ranks"), [("1", {"0"}), ("all", {"0", "1", "2"}), ("0", set())])
def test_one_rank_tells_or_every_rank_or_none(
    asked: str, ranks: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOPOPLAN_DEBUG", asked)

    def body(comm: Communicator, rank: int) -> Any:
        return comm.all_reduce(np.full(3, rank)).tolist()

    assert in_threads(forest_plan(3, "allreduce", "chain"), body) == [[3, 3, 3]] * 3
    assert {one["rank"] for one in lines(capsys.readouterr().err)} == ranks

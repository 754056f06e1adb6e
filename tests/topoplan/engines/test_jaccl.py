"""JACCL's device file, written: what was read comes back, in any order of ranks that JACCL runs."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import pytest

import topoplan
from tests.support.checkout import Run
from tests.support.refusals import refused
from topoplan.engines.jaccl import jaccl_devices
from topoplan.errors import UsageError
from topoplan.reading.load import load_text

RING = [
    [None, ["rdma_en2", "rdma_en4"], None, ["rdma_en3", "rdma_en5"]],
    [["rdma_en3", "rdma_en5"], None, ["rdma_en2", "rdma_en4"], None],
    [None, ["rdma_en3", "rdma_en5"], None, ["rdma_en2", "rdma_en4"]],
    [["rdma_en2", "rdma_en4"], None, ["rdma_en3", "rdma_en5"], None],
]
MESH = [[None if i == j else f"rdma_en{j}" for j in range(4)] for i in range(4)]
CHAIN = [[None, "a", None], ["a", None, "b"], [None, "b", None]]


def permuted(cells: list[list[object]], order: tuple[int, ...]) -> list[list[object]]:
    return [[cells[i][j] for j in order] for i in order]


@pytest.mark.parametrize("cells", [RING, MESH])
def test_what_was_read_is_written(cells: list[list[object]]) -> None:
    assert json.loads(jaccl_devices(load_text(json.dumps(cells))).text) == cells


@pytest.mark.parametrize("order", list(permutations(range(4)))[1::5])
def test_a_ring_is_found_in_any_order_and_written(order: tuple[int, ...], tmp_path: Path, run: Run) -> None:
    """JACCL refuses the order given and runs the one found: both sides of a rank have the ends of two cables."""
    given = tmp_path / "devices.json"
    given.write_text(json.dumps(permuted(RING, order)), encoding="utf-8")
    status, out, _ = run("order", str(given), "--format", "jaccl")
    assert status == 0
    found = json.loads(out)
    assert [len(row[(rank + 1) % 4]) for rank, row in enumerate(found)] == [2] * 4
    assert sorted(map(str, found[0])) == sorted(map(str, permuted(RING, order)[0]))


def test_the_library_has_jaccls_shapes() -> None:
    for name in ("mac-tb5-x4", "mac-tb5-ring-x6", "dgx-spark-x4"):
        assert len(json.loads(jaccl_devices(topoplan.load(name)).text)) == int(name[-1])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dgx-a100", "got 8 GPUs on 1 servers"),
        (
            json.dumps(CHAIN),
            "these cables are neither in this order; topoplan order --format jaccl looks for a ring",
        ),
        ("dgx-spark-x4-switch", "no cable joins two servers"),
    ],
)
def test_machines_without_a_device_file(name: str, words: str) -> None:
    machine = load_text(name) if name.startswith("[") else topoplan.load(name)
    with refused(UsageError, words):
        jaccl_devices(machine)

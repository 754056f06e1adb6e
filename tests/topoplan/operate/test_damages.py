"""Random damages, written by a writer of its own, are found, named and costed; what is whole gives no alarm."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import topoplan
from tests.bench.damages import MACHINES, cases
from tests.support.damaged_machines import IN_TEXT, KINDS, as_text, damaged, read_library
from tests.support.listings import MACHINES as LISTINGS
from tests.support.listings import each
from topoplan.errors import TopologyError
from topoplan.operate.diagnosis import diagnose
from topoplan.reading.load import library


@pytest.mark.thorough
def test_damages_are_found_named_and_costed() -> None:
    """Some of those of ``python -m tests.bench damages``."""
    made = cases(24, seed=4)
    assert [case for case in made if not (case.found and case.named and case.costed)] == []
    assert {case.form for case in made} == {"JSON", "text"}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_damage_is_found(kind: str) -> None:
    """One of each on every machine, without its cost; in a matrix too where it can show it."""
    rng = random.Random(kind)
    for name in MACHINES:
        broken, damages = damaged(read_library(name), [kind], rng)
        if not damages:
            continue
        found = diagnose(topoplan.load(json.dumps(broken)))
        assert set(found.faults[0].devices) <= set(damages[0].devices), (name, damages)
        assert len(found.faults) == 1, (name, damages)
        if kind in IN_TEXT and not name.startswith("mi"):
            text = diagnose(topoplan.load(as_text(broken)))
            # Without a wire of gpu2-gpu3 all GPUs of a v100x4 have four: it looks like a machine of its own.
            alike = (name, damages[0].devices) == ("v100x4", ("gpu2", "gpu3"))
            assert text.healthy == alike, (name, damages)


@pytest.mark.sampled
@pytest.mark.parametrize("name", library())
def test_whole_machines_are_healthy(name: str) -> None:
    machine = topoplan.load(name)
    assert diagnose(machine).resembles == name
    texts = [] if name.startswith("mi") else [topoplan.load(as_text(read_library(name)))]
    rng = random.Random(name)
    for whole in (machine, *texts):
        assert diagnose(whole).faults == ()
        for _ in range(6 if len(whole.gpus) <= 16 else 1):
            chosen = sorted(rng.sample(range(len(whole.gpus)), rng.randint(1, len(whole.gpus))))
            assert diagnose(whole.subset(chosen)).faults == (), chosen


AMISS = {"dgx2_v100x16_PARTIAL.txt": ["row missing"], "radeon_x2.amd-smi.txt": ["no peer access"]}
"""What is amiss in real descriptions: rows that were cut, access that is disabled."""


@pytest.mark.parametrize(
    "path", each(sorted(LISTINGS.glob("*-smi/*.txt")) + sorted(LISTINGS.glob("*ccl-xml/*.xml")))
)
def test_real_machines_are_healthy(path: Path) -> None:
    try:
        machine = topoplan.load(path)
    except TopologyError:
        pytest.skip("a listing of links, or of a part, which no machine can be read from")
    assert [fault.kind for fault in diagnose(machine).faults] == AMISS.get(path.name, [])
    if path.name not in AMISS:
        rng = random.Random(path.name)
        for _ in range(10):
            chosen = sorted(rng.sample(range(len(machine.gpus)), rng.randint(1, len(machine.gpus))))
            assert diagnose(machine.subset(chosen)).faults == (), chosen


def test_a_machine_whose_gpus_are_numbered_otherwise_is_known() -> None:
    """A matrix of a DGX-1V with its GPUs in another order, whole and with a pair dead."""
    whole = read_library("dgx-1v")
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    names = {f"gpu{i}": f"gpu{order[i]}" for i in range(8)}
    for link in whole["links"]:
        link["src"], link["dst"] = names.get(link["src"], link["src"]), names.get(link["dst"], link["dst"])
    assert diagnose(topoplan.load(as_text(whole))).resembles == "dgx-1v"
    dead = {names["gpu0"], names["gpu3"]}
    whole["links"] = [link for link in whole["links"] if {link["src"], link["dst"]} != dead]
    found = diagnose(topoplan.load(as_text(whole)))
    assert found.resembles == "dgx-1v"
    assert [set(fault.devices) for fault in found.faults] == [dead]


def of_wires(gpus: int, wires: Callable[[int, int], int]) -> topoplan.Topology:
    """The machine of a matrix with so many NVLinks between two GPUs."""
    rows = [
        ["X" if i == j else f"NV{n}" if (n := wires(i, j)) else "SYS" for j in range(gpus)]
        for i in range(gpus)
    ]
    heads = [f"GPU{i}" for i in range(gpus)]
    lines = [" ".join([head, *row]) for head, row in zip(heads, rows, strict=True)]
    return topoplan.load("\n".join(["  " + " ".join(heads), *lines]))


SHAPES: dict[str, Callable[[int, int], int]] = {
    "rings": lambda i, j: int((i - j) % 8 in (1, 7)),
    "meshes": lambda i, j: 2,
    "cubes": lambda i, j: 2 * ((i ^ j).bit_count() == 1),
    "bridges": lambda i, j: 4 * (i // 2 == j // 2),
    "one bridge": lambda i, j: 4 * ({i, j} == {0, 1}),
    "quads": lambda i, j: int(i // 4 == j // 4),
    "halves": lambda i, j: int((i < 4) != (j < 4)),
    "doubled pairs": lambda i, j: 3 if i // 2 == j // 2 else 1,
}


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES)
def test_machines_that_nobody_knows_give_no_alarm(shape: str) -> None:
    for gpus in range(2, 9):
        machine = of_wires(gpus, SHAPES[shape])
        assert diagnose(machine).faults == (), gpus


def test_a_machine_that_nobody_knows_is_held_against_itself() -> None:
    """Four GPUs with six wires each way are whole; with a pair at half, that pair is named."""
    assert diagnose(of_wires(4, lambda i, j: 6)).healthy
    found = diagnose(of_wires(4, lambda i, j: 3 if {i, j} == {1, 3} else 6))
    assert [(fault.kind, fault.devices) for fault in found.faults] == [("link missing", ("gpu1", "gpu3"))]
    ring = diagnose(of_wires(8, lambda i, j: int((i - j) % 8 in (1, 7) and {i, j} != {4, 5})))
    assert [(fault.kind, fault.devices) for fault in ring.faults] == [
        ("fewer NVLinks", ("gpu4",)),
        ("fewer NVLinks", ("gpu5",)),
    ]

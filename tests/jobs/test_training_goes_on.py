"""Training in processes of which some are killed and others come: the same bits on all, and as without faults."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.training import Training, faults_of, trained
from tests.support.checkout import ROOT

pytestmark = pytest.mark.thorough

EXCHANGES: list[dict[str, Any]] = [
    {},
    {"density": 0.01, "exchange": "pairs"},
    {"density": 0.01, "exchange": "tree", "momentum": 0.5},
    {"density": 0.05, "exchange": "dense"},
    {"low_rank": 2},
    {"codes": 8},
    {"significance": 0.5},
    {"mode": "local:3"},
]

LONGEST_STEP = 0.02
"""Seconds within which victims die after the beginning of a step; some then die in the next one."""


def drawn(seed: int, options: dict[str, Any], *, backend: str, victims: int, back: bool) -> Training:
    draw = np.random.default_rng(seed)
    size = int(draw.integers(max(3, victims + 2), 6))
    deaths = {
        int(rank): (int(draw.integers(1, 7)), float(draw.uniform(0, LONGEST_STEP)))
        for rank in draw.choice(size, victims, replace=False)
    }
    return Training(backend, size, deaths, steps=14, options=options, back=11 if back else None)


@pytest.mark.parametrize("number", range(len(EXCHANGES)), ids=lambda number: str(EXCHANGES[number]))
def test_survivors_of_a_rank_that_is_killed_in_a_step_go_on_with_the_same_bits(number: int) -> None:
    what = drawn(number, EXCHANGES[number], backend=("tcp", "shared")[number % 2], victims=1, back=False)
    assert faults_of(what, trained(what)) == []


@pytest.mark.parametrize("number", range(len(EXCHANGES)), ids=lambda number: str(EXCHANGES[number]))
def test_who_comes_in_place_of_ranks_that_were_killed_has_the_bits_of_the_others(number: int) -> None:
    """With its parameters, moments, step number, and what low ranks go on with."""
    victims = 1 + number % 2
    what = drawn(
        100 + number, EXCHANGES[number], backend=("shared", "tcp")[number % 2], victims=victims, back=True
    )
    assert faults_of(what, trained(what)) == []


@pytest.mark.parametrize("number", [0, 1, 5, 11])
def test_who_dies_while_it_gives_a_newcomer_what_it_needs_is_followed_by_another(number: int) -> None:
    """And is let in again itself."""
    what = Training(
        ("tcp", "shared")[number % 2],
        4,
        {2: (2, 0.0)},
        steps=8,
        options={"low_rank": 2},
        back=5,
        giving=number,
    )
    assert faults_of(what, trained(what)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1060))
def test_whoever_is_killed_whenever(seed: int) -> None:
    options = EXCHANGES[seed % len(EXCHANGES)]
    what = drawn(
        seed, options, backend=("tcp", "shared")[seed // 8 % 2], victims=1 + seed // 4 % 2, back=seed % 3 > 0
    )
    assert faults_of(what, trained(what)) == []


@pytest.mark.slow
def test_the_example_loses_a_rank_and_gets_it_back(tmp_path: Path) -> None:
    """It ends with a loss like that of a run without a fault."""
    pytest.importorskip("torch", reason="torch is not installed")
    losses = {}
    for name, more in {"whole": [], "lost": ["--lose", "1@15", "--return", "28"]}.items():
        command = [sys.executable, "-m", "collectives.examples.train_cifar_like", "--processes", "3"]
        options = ["--steps", "40", "--batch", "16", "--every", "20", "--out", str(tmp_path / name)]
        done = subprocess.run(
            [*command, *options, *more], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        told = json.loads((tmp_path / name).read_text())
        assert told["same"]
        losses[name] = told["final"]
        lines = re.findall(r"^(?:step|\d+ ranks).*(?:ranks|times).*", done.stdout, re.MULTILINE)
        if not more:
            assert lines == []
            continue
        assert lines[0] == "2 ranks, before 3: rate of learning times 0.666667"
        assert re.match(r"step 28: epoch 2: with rank 1 again: 3 ranks", lines[1])
        assert lines[2] == "3 ranks, before 2: rate of learning times 1"
        assert re.match(r"step 15, from bucket \d on: without rank 1, 2 ranks", lines[3])
        assert re.match(r"step 28, from bucket 0 on: with rank 1, 3 ranks", lines[4])
    assert abs(losses["lost"] - losses["whole"]) < 0.15 * losses["whole"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            ["--lose", "4@10"],
            "--lose must be a rank and a step, such as 2@100 of 2 processes or more, got 4@10",
        ),
        (["--return", "20"], "--return needs a lost rank; give --lose"),
        (
            ["--lose", "1@30", "--return", "20"],
            "a rank that is lost in step 30 cannot return in step 20 of 400",
        ),
        (["--built-in"], "--built-in is for processes that torchrun starts; leave it out"),
    ],
)
def test_what_the_example_cannot_lose_is_refused_in_a_line(
    options: list[str], error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from collectives.examples.train_cifar_like import main

    monkeypatch.setattr(sys, "argv", ["train_cifar_like.py", "--processes", "4", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert error in capsys.readouterr().err

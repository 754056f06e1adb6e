"""``plan --sizes`` and what other commands do with its file; one line for what does not fit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import topoplan
from tests.support.checkout import Done, Run
from tests.topoplan.cli.conftest import Told
from topoplan.cli.plan_sizes import describe_schedule
from topoplan.model.candidates import candidates
from topoplan.model.window_engine import HOPPER


@pytest.fixture(scope="module")
def text() -> str:
    """The file of a broadcast on DGX-2: the root's star below 94286 bytes, two levels from there on."""
    return topoplan.plan_by_size(topoplan.load("dgx-2"), "broadcast").to_json()


@pytest.fixture
def file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "sizes.json"
    path.write_text(text)
    return str(path)


def table_of(out: str) -> list[list[str]]:
    """The heads of the ranges and their rows."""
    lines = out[out.index("\nfrom ") + 1 :].split("\n\n")[0].splitlines()
    return [line.split() for line in lines]


def test_the_table_has_a_line_for_each_range(done: Done) -> None:
    """Range, schedule, trees, height, rate, times at both ends and lead over the next best; crossovers in bytes."""
    out = done("plan dgx-2 --collective broadcast --sizes 1KB:1GB")
    _, first, second = table_of(out)
    assert first[:6] == ["0B", "92.08KB", "one-hop", "1", "1", "10"]
    assert first[-1] == "1.43x"
    assert second[:6] == ["92.08KB", "-", "one-hop", "15", "2", "150"]
    assert "crossovers   94286 bytes (92.08KB)" in out
    assert "upper bound  150 GB/s: only 150 GB/s leave {gpu0}; each byte must leave it once" in out
    assert "model times of 6 schedules from 1KB to 1GB" in out


@pytest.mark.thorough
def test_times_at_the_ends_are_those_of_the_model(told: Told) -> None:
    """At a crossover both plans take the same time; the gain is that over the best of all others."""
    value = told("plan v100x4 --sizes 1KB:1GB")
    rows = value["table"]
    assert [row["from"] for row in rows[1:]] == [row["to"] for row in rows[:-1]] == value["crossovers"]
    for before, after in pairwise(rows):
        assert before["ends"][1] == after["ends"][0]
        assert before["seconds"][1] == pytest.approx(after["seconds"][0], rel=1e-4)
    assert (rows[0]["ends"][0], rows[-1]["ends"][1]) == (1024, 1 << 30)
    assert all(row["gain"] >= 1 for row in rows)
    assert [row["schedule"] for row in rows] == ["one-shot", "one-hop", "trees"]
    assert rows[2]["next"]["schedule"] == "nvlink ring"


def test_json_is_the_file_and_more(done: Done, tmp_path: Path) -> None:
    """--json, -o - and -o F give the same plans; all three verify, also from a pipe."""
    path = tmp_path / "f.json"
    command = "plan v100x4 --collective allgather --sizes 1KB:64MB"
    printed, shown = done(f"{command} -o -"), done(f"{command} --json")
    assert done(f"{command} -o {path}").splitlines()[-1] == f"written: {path}"
    assert path.read_text() == printed
    assert json.loads(shown)["digest"] == topoplan.SizePlans.from_json(printed).digest
    assert topoplan.SizePlans.from_json(shown) == topoplan.load_plan(path)
    for stdin in (printed, shown):
        done("verify -", stdin=stdin)


def test_a_single_size_and_a_single_gpu(done: Done, told: Told) -> None:
    one = "crossovers   none, one schedule is the fastest throughout"
    assert one in done("plan v100x4 --sizes 1MB")
    assert "one GPU, nothing moves" in done("plan v100x4 --gpus 2 --sizes 0")
    value = told("plan v100x4 --gpus 2 --sizes 0,1KB")
    assert (value["bound"], value["crossovers"], value["table"][0]["gain"]) == (None, [], None)


@pytest.mark.thorough
def test_the_plot_has_a_curve_for_each_schedule(done: Done, tmp_path: Path) -> None:
    """The schedules that are fastest at some size have their names; others are counted; windows have other times."""
    path = tmp_path / "f.svg"
    done(f"plan v100x4 --sizes 1KB:1MB --plot {path}")
    drawn = path.read_text()
    made, _ = candidates(topoplan.load("v100x4"))
    ranges = topoplan.plan_by_size("v100x4", sizes=[1 << power for power in range(10, 21)]).ranges
    names = {name for name in map(describe_schedule, made) if f">{name}<" in drawn}
    assert names == {describe_schedule(one.plan) for one in ranges}
    assert re.search(r">\d+ other schedules<", drawn)
    done(f"plan v100x4 --sizes 1KB:1MB --engine windows --plot {path}")
    windows = path.read_text()
    assert windows.count(">one-hop, 4 ") == drawn.count(">one-hop, 4 ") == 1
    assert windows != drawn


def test_verify_checks_every_range(done: Done, told: Told, file: str) -> None:
    out = done(f"verify {file}")
    head = "valid: broadcast from gpu0 on dgx-2, 16 GPUs (gpu0-15): 2 ranges that cover every size\n"
    assert out.startswith(head)
    assert "checked      in every range each contribution arrives exactly once wherever it must\n" in out
    first, second = (line.split() for line in out.splitlines()[-3:-1])
    assert first[:5] == ["0B", "92.08KB", "one-hop", "1", "1"]
    assert second[-2:] == ["provably", "optimal"]
    value = told(f"verify {file}")
    assert value["valid"] is True
    ranges = [(one["from"], one["to"], one["optimal"]) for one in value["ranges"]]
    assert ranges == [(0, 94286, False), (94286, None, True)]


def test_a_wrong_range_fails_verification(run: Run, done: Done, refused: Done, text: str) -> None:
    """Exit 1 with the range in the message; the other commands refuse it with exit 2."""
    value = json.loads(text)
    del value["ranges"][1]["plan"]["shards"][3]
    wrong = json.dumps(value)
    line = done("verify -", status=1, stdin=wrong)
    assert line.startswith(
        "topoplan verify: wrong plan: sizes from 92.08KB: the shares add up to 14/15, not 1"
    )
    report = json.loads(run("verify - --json", stdin=wrong)[1])
    assert (report["valid"], report["error"][:21]) == (False, "sizes from 92.08KB: t")
    for command in ("simulate", "bench"):
        assert "stdin: wrong plan: sizes from 92.08KB" in refused(f"{command} -", stdin=wrong)


def test_simulate_uses_the_plan_of_each_size(
    done: Done, told: Told, file: str, text: str, tmp_path: Path
) -> None:
    """The star's times below the crossover, those of two levels above it; one curve; the largest size's trace."""
    star, levels = topoplan.SizePlans.from_json(text).plans
    asked = f"simulate {file} --sizes 4KB,1MB"
    value = told(f"{asked} --trace {tmp_path}/t.json")
    expected = [topoplan.simulate(star, nbytes=4096), topoplan.simulate(levels, nbytes=1 << 20)]
    times = [row["time"] for row in value["plan"]["rows"]]
    assert times == pytest.approx([one.seconds * 1e6 for one in expected])
    assert [one["height"] for one in value["plan"]["ranges"]] == [1, 2]
    assert value["crossover"] == {"nbytes": 4096, "faster_below": "first"}
    assert '"name": "shard 14 stage 0' in (tmp_path / "t.json").read_text()
    table = done(f"{asked} --plot {tmp_path}/f.svg")
    assert "plan         sizes from 92.08KB: one-hop, 150 GB/s, 15 trees of height 2" in table
    assert "plans by size" in (tmp_path / "f.svg").read_text()


def test_bench_runs_the_plan_of_each_size(told: Told, file: str) -> None:
    """Sizes on both sides of the crossover, every element right."""
    sizes = [0, 94280, 94288, 94292, 1 << 20]
    rows = told(f"bench {file} --sizes {','.join(map(str, sizes))}")["rows"]
    assert [(row["size"], row["wrong"]) for row in rows] == [(size, 0) for size in sizes]


WINDOWS = "plan dgx-h100 --sizes 1KB:1GB --engine windows"


def test_windows_say_blocks_and_chunks_of_every_range(done: Done) -> None:
    """A range of one-shot up to 8 KB, two columns more, and whose figures they are; without the option none of it."""
    out = done(f"{WINDOWS} --notes")
    heads, first, second, *_ = table_of(out)
    assert heads[5:8] == ["GB/s", "blocks", "chunk"]
    assert first[:8] == ["0B", "8.001KB", "one-shot", "-", "-", "-", "16", "-"]
    assert second[:4] == ["8.001KB", "-", "one-hop", "8"]
    assert "crossovers   8193 bytes (8.001KB)\n" in out
    note = "note: windows engine: figures of Hopper, from NCCL's model; --engine-costs takes measured ones"
    assert note in out
    plain, named = (
        done(f"plan v100x4 --sizes 1KB:1MB {engine}").partition("planned in")[0]
        for engine in ("", "--engine messages")
    )
    assert plain == named
    assert not any(word in plain for word in ("blocks", "windows"))


def test_windows_in_json_and_in_the_file(done: Done, told: Told, tmp_path: Path) -> None:
    """Way, blocks and chunk of every range stand in the table; the file is plans by size as ever."""
    path = tmp_path / "f.json"
    value = told(f"{WINDOWS} -o {path}")
    assert (value["engine"], value["costs"]["name"]) == ("windows", "Hopper")
    first, *others = value["table"]
    assert (first["way"], first["chunk"], first["blocks"]) == ("one-shot", None, 16)
    assert first["ends"] == [1024, 8192]
    assert all(row["way"] == "trees" and 1 <= row["blocks"] <= 44 for row in others)
    assert all(0 < row["chunk"] <= 128 << 10 for row in others)
    assert all(row["seconds"][0] < row["seconds"][1] and row["gain"] >= 1 for row in value["table"])
    assert set(json.loads(path.read_text())["ranges"][0]) == {"from", "to", "plan"}
    done(f"verify {path}")
    rows = done(f"{WINDOWS} --csv").splitlines()
    assert rows[0] == "size,schedule,seconds,bound_seconds,ratio,nccl,nccl_runs,quickest,quickest_seconds"
    assert [int(row.split(",")[0]) for row in rows[1:]] == [point["size"] for point in value["points"]]
    assert value["points"][-1]["size"] == 1 << 30
    for point in value["points"]:
        least = pytest.approx(point["size"] / (1800e9 / 7), rel=1e-5)
        assert point["seconds"] >= point["bound_seconds"] == least
    plain = told("plan v100x4 --sizes 1MB")
    assert not {"engine", "costs"} & plain.keys()
    assert not {"way", "blocks", "chunk"} & plain["table"][0].keys()


def test_measured_figures_take_the_place_of_published_ones(done: Done, told: Told, tmp_path: Path) -> None:
    """A hop of a millisecond makes everything but one hop dear, and the note says whose it is."""
    path = tmp_path / "costs.json"
    path.write_text(replace(HOPPER, name="mine", source="a test", hop=1e-3).to_json())
    command = f"plan v100x4 --sizes 128KB:1MB --engine windows --engine-costs {path}"
    assert "note: windows engine: figures of mine, from a test\n" in done(f"{command} --notes")
    value = told(command)
    assert value["costs"]["hop"] == 1e-3
    assert value["table"][0]["seconds"][0] > 2e-3

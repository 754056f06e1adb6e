"""The command line as a contract: what each command prints and writes, and what it says when it is given nonsense."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import topoplan
from collectives.lab.benchmark import count_wrong
from tests.support.checkout import ROOT, Done, Run
from tests.support.listings import EACH_MATRIX
from tests.topoplan.cli.conftest import PAIR, Told
from topoplan.cli.main import COMMAND_GROUP as GROUP
from topoplan.cli.main import main
from topoplan.plans.plan import COLLECTIVES
from topoplan.plugins import plugin_loaders
from topoplan.reading.load import library

MACHINE_COMMANDS = ("show", "plan", "compare", "simulate")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command did."""

    status: int
    out: str
    err: str


Ask = Callable[..., Answer]


@pytest.fixture
def ask(run: Run) -> Ask:
    """Run a command in this process; an error is one line on stderr, and success leaves stderr empty."""

    def call(*arguments: str, stdin: str | bytes = b"") -> Answer:
        answer = Answer(*run(*arguments, stdin=stdin))
        assert answer.err.count("\n") == (0 if answer.status == 0 else 1), answer.err
        return answer

    return call


def process(
    line: str, *, set_to: Mapping[str, str] | None = None, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m topoplan`` as a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(set_to or {})}
    command = [sys.executable, "-m", "topoplan", *line.split()]
    return subprocess.run(
        command, env=environment, text=True, timeout=60, **{"capture_output": True, **settings}
    )


def test_list_names_the_machines_of_the_library(ask: Ask, told: Told) -> None:
    lines = ask("list").out.splitlines()
    names = [one["name"] for one in told("list")["machines"]]
    assert [line.split()[0] for line in lines[2:]] == names == list(library())


@EACH_MATRIX
def test_real_matrices_are_shown_and_planned(ask: Ask, path: Path) -> None:
    """With notes of what was assumed."""
    assert "note: " in ask("show", str(path), "--notes").out
    planned = ask("plan", str(path), "-o", "-", "--collective", "broadcast")
    assert planned.status == 0
    assert ask("verify", "-", stdin=planned.out).status == 0


def test_plans_have_the_promised_keys(ask: Ask, told: Told, tmp_path: Path) -> None:
    """Those that others program against, in --json and in the file."""
    path = tmp_path / "plan.json"
    shown = told("plan dgx-1v --gpus 1,4,5,7")
    assert (shown["rate"], shown["bound"], shown["trees"], shown["height"]) == (50.0, 50.0, 2, 2)
    assert isinstance(shown["certificate"], dict)
    assert shown["seconds"] > 0
    assert f"written: {path}\n" in ask(f"plan dgx-1v --gpus 1,4,5,7 -o {path}").out
    made = json.loads(path.read_text())
    assert made["format"] == "topoplan.plan/1"
    assert made["ranks"] == ["gpu1", "gpu4", "gpu5", "gpu7"]
    assert {"collective", "topology", "rate", "bound", "certificate", "method", "seconds"} <= set(made)
    stages = made["shards"][0]["stages"]
    assert [stage["op"] for stage in stages] == ["reduce", "broadcast"]
    parent, child, route, channel = stages[0]["edges"][0]
    assert (route[0], route[-1], channel) == (made["ranks"][parent], made["ranks"][child], "nvlink")


def test_a_plan_on_stdout_goes_into_verify(ask: Ask, told: Told) -> None:
    """As -o - and as --json, whose notes stand there once."""
    made = ask("plan dgx-1p --collective allgather -o -")
    report = told("verify -", stdin=made.out)
    assert (report["valid"], report["optimal"]) == (True, True)
    assert report["rate"] == pytest.approx(640 / 7, rel=1e-9)
    shown = ask("plan - --json", stdin=PAIR).out
    notes = told("verify -", stdin=shown)["notes"]
    assert notes == json.loads(shown)["notes"]
    assert len(notes) == len(set(notes)) > 0


@pytest.mark.sampled
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_command_takes_every_collective(ask: Ask, told: Told, plan_file: Path, collective: str) -> None:
    assert ask(f"plan v100x4 --collective {collective} -o {plan_file}").status == 0
    assert ask(f"verify {plan_file}").status == 0
    simulated = told(f"simulate {plan_file} --sizes 4KB,1MB")
    assert simulated == told(f"simulate v100x4 --collective {collective} --sizes 4KB,1MB")
    rows = told(f"bench {plan_file} --sizes 0,1,28,4KB --dtype int32")["rows"]
    assert [row["wrong"] for row in rows] == [0, 0, 0, 0]
    assert told(f"compare v100x4 --collective {collective}")["collective"] == collective


def test_simulate_tells_queues_at_switches_and_the_run_paced(ask: Ask, told: Told) -> None:
    """Of 15 senders 14 wait at the root's port; a ring makes nobody wait."""
    asked = "simulate dgx-2 --collective reduce --sizes 64MB --headroom 0.95"
    out = ask(asked).out
    assert "queues       at most 225 chunks in flight, 14 of them" in out
    assert "wait at nvswitch0 for gpu0, at 64MB\npaced        at most 225 chunks in flight" in out
    queues = told(asked)["queues"]
    assert queues["free"]["ports"][0]["link"] == ["nvswitch0", "gpu0"]
    assert queues["paced"]["ports"] == []


@pytest.mark.thorough
def test_compare_all_allocations_inside_some_gpus(ask: Ask, told: Told) -> None:
    """Best first for every number of GPUs, all members listed, no GPU but those that were named."""
    asked = "compare dgx-1v --all-allocations --gpus 0,1,5-7 --without-gpu 2"
    rows = told(asked)["rows"]
    order = [(len(row["gpus"]), -row["trees"]) for row in rows]
    assert order == sorted(order)
    assert sorted(tuple(gpus) for row in rows for gpus in row["allocations"]) == sorted(
        gpus for count in range(2, 6) for gpus in combinations((0, 1, 5, 6, 7), count)
    )
    for row in rows:
        assert (row["gpus"] in row["allocations"], len(row["allocations"])) == (True, row["members"])
    out = ask(f"{asked} --all --members").out
    assert "as 6,7: 1,5  5,6  6,7\n" in out
    assert "NCCL: its best today" in out
    table = [*csv.reader(io.StringIO(ask(f"{asked} --csv").out))]
    assert [float(line[table[0].index("trees")]) for line in table[1:]] == [row["trees"] for row in rows]
    assert (table[1][0], table[1][-1]) == ("6,7", "1,5 5,6 6,7")


def test_simulate_knows_a_plan_by_its_content(ask: Ask, plan_file: Path, plan_text: str) -> None:
    """Under any name, pretty-printed with keys in any order, and on stdin; a machine in UTF-16 too."""
    wanted = ask(f"simulate {plan_file} --sizes 1MB").out
    other = plan_file.with_suffix(".txt")
    other.write_text(json.dumps(dict(reversed(json.loads(plan_text).items())), indent=4))
    assert ask(f"simulate {other} --sizes 1MB").out == wanted
    assert ask("simulate - --sizes 1MB", stdin=plan_text).out == wanted
    machine = ask("simulate - --sizes 1KB", stdin=PAIR)
    assert ask("simulate - --sizes 1KB", stdin=PAIR.encode("utf-16")) == machine


def test_simulate_without_any_ring(ask: Ask, told: Told) -> None:
    """Three GPUs in a row have no NVLink ring and no PCIe: the plan is timed alone, and a note says why."""
    ends = [(0, 1), (1, 0), (1, 2), (2, 1)]
    links = [{"src": f"gpu{a}", "dst": f"gpu{b}", "channel": "nvlink", "bandwidth": 25} for a, b in ends]
    row = topology_text(devices=[{"name": f"gpu{i}", "kind": "gpu"} for i in range(3)], links=links)
    assert "note: no ring to compare with: " in ask("simulate - --sizes 1KB --notes", stdin=row).out
    made = told("simulate - --sizes 1KB", stdin=row)
    assert (made["ring"], made["crossover"]) == (None, None)


def test_trace_is_the_largest_size(told: Told, plan_file: Path, tmp_path: Path) -> None:
    """A Chrome trace ends when the table says that the largest size does."""
    path = tmp_path / "trace.json"
    plan = told(f"simulate {plan_file} --sizes 64KB,1KB --trace {path}")["plan"]
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(plan["rows"][0]["time"], rel=0.2)


@pytest.mark.sampled
@pytest.mark.parametrize("command", MACHINE_COMMANDS)
def test_figures(ask: Ask, tmp_path: Path, command: str) -> None:
    """The format is that of the suffix, or as asked for; size and font are too."""
    path = tmp_path / "figure.svg"
    assert f"written: {path}\n" in ask(f"{command} v100x4 --plot {path}").out
    assert path.read_text().startswith("<?xml")
    assert [entry.name for entry in tmp_path.iterdir()] == ["figure.svg"]
    bare = tmp_path / "figure"
    ask(f"{command} v100x4 --plot {bare} --plot-size 5x3.5 --font serif --plot-format svg")
    assert 'width="360pt" height="252pt"' in bare.read_text()


@pytest.mark.sampled
@pytest.mark.parametrize("command", MACHINE_COMMANDS)
def test_a_machine_on_stdin_has_notes_in_text_and_json(ask: Ask, told: Told, command: str) -> None:
    """Of what had to be assumed about nvidia-smi text; none once it is settled."""
    note = "NVLink 25 GB/s per link and direction; set --nvlink-bandwidth"
    out = ask(f"{command} - --notes", stdin=PAIR).out
    assert note in out
    assert "stdin" in out.splitlines()[0]
    assert any(note in line for line in told(f"{command} -", stdin=PAIR)["notes"])
    rates = "--nvlink-bandwidth 20GB/s --pcie-bandwidth 10GB/s"
    assert "set --nvlink-bandwidth" not in ask(f"{command} - {rates} --notes", stdin=PAIR).out


def test_notes_stay_in_the_plan_file(ask: Ask, plan_file: Path) -> None:
    assert ask(f"plan - -o {plan_file}", stdin=PAIR).status == 0
    for command in (f"verify {plan_file}", f"bench {plan_file} --sizes 1KB"):
        for form in ("--notes", "--json"):
            assert "set --nvlink-bandwidth" in ask(f"{command} {form}").out


def test_bench_columns_do_not_move(ask: Ask, plan_file: Path) -> None:
    """Header and rows have one width whatever the figures are."""
    lines = ask(f"bench {plan_file} --sizes 0,64KB,1MB").out.splitlines()[1:6]
    assert {len(line) for line in lines} == {len(lines[0])}
    assert lines[0].split()[1:] == ["size", "count", "type", "redop", "time", "algbw", "busbw", "wrong"]


def test_bench_counts_wrong_elements(plan_text: str) -> None:
    plan = topoplan.Plan.from_json(plan_text)
    totals = [((np.arange(5)[:, None] + np.arange(4)) % 7).sum(axis=1) for _ in range(4)]
    assert count_wrong(plan, 5, dict(enumerate(totals))) == 0
    totals[2][3] += 1
    assert count_wrong(plan, 5, dict(enumerate(totals))) == 1


def test_text_is_the_same_every_time(ask: Ask) -> None:
    first, second = (ask("plan dgx-a100").out.partition("planned in")[0] for _ in range(2))
    assert first == second


def test_a_package_adds_a_command_by_an_entry_point(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listed, run, and known to the guess at what was meant; one that is broken is one line."""
    folder = tmp_path / "other-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(
        "[topoplan.commands]\nwave = other_wave\ngone = other_gone\nplan = other_wave\n"
    )
    (tmp_path / "other_wave.py").write_text(
        "LINE = 'wave a hand, 100 % sure'\ndef add_options(parser): pass\n"
        "def run(options):\n    print('waved')\n    return 0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert ask("wave").out == "waved\n"
    assert "did you mean wave?" in ask("wavee").err
    broken = "gone, which the package other offers, cannot be loaded"
    assert ask("gone").err.startswith(f"topoplan gone: error: {broken}")
    listed = " ".join(ask("--help").out.split())
    assert "plan a collective and prove an upper bound" in listed
    assert "wave a hand, 100 % sure" in listed
    assert f"gone {broken}" in listed
    assert ask("--version").status == 0


def test_a_checkout_that_is_not_installed_has_all_commands(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a network, where nothing but the checkout was brought."""
    monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group: ())
    assert {"bench", "testbed", "calibrate"} == set(plugin_loaders(GROUP))
    assert "--backend" in ask("bench --help").out


def test_one_gpu_is_a_trivial_plan(ask: Ask, told: Told, plan_file: Path) -> None:
    """Nothing moves: rates are null in JSON, and text says so instead of inf; bench copies each size."""
    assert ask(f"plan dgx-1v --gpus 3 -o {plan_file}").status == 0
    planned = told("plan dgx-1v --gpus 3")
    assert (planned["rate"], planned["bound"], planned["gap"], planned["trees"]) == (None, None, 0.0, 0)
    assert json.loads(plan_file.read_text())["rate"] is None
    assert told(f"verify {plan_file}")["rate"] is None
    made = told(f"simulate {plan_file} --sizes 0,1KB")
    assert (made["plan"]["rate"], made["ring"]) == (None, None)
    (row,) = told("compare dgx-1v --gpus 3")["rows"]
    assert (row["trees"], row["ratio"]) == (None, None)
    answers = [
        ask(line).out for line in ("plan dgx-1v --gpus 3", f"verify {plan_file}", f"simulate {plan_file}")
    ]
    assert all("one GPU, nothing moves" in out for out in answers)
    answers.append(ask("compare dgx-1v --gpus 3").out)
    assert not any("inf" in out or "nan" in out for out in answers)
    rows = told(f"bench {plan_file} --sizes 0,4,64KB")["rows"]
    assert [(row["size"], row["busbw"], row["wrong"]) for row in rows] == [(n, 0, 0) for n in (0, 4, 65536)]


def test_machines_of_one_gpu_and_of_none(ask: Ask, told: Told) -> None:
    """No allocation of two: an empty table, and null for every mean."""
    single = topology_text(devices=[{"name": "gpu0", "kind": "gpu"}], links=[])
    assert "0 allocations" in ask("compare - --all-allocations", stdin=single).out
    assert told("compare - --all-allocations", stdin=single)["rows"] == []
    assert "no links" in ask("show -", stdin=single).out
    assert "0 GPUs; no links" in ask("show -", stdin=topology_text(devices=[], links=[])).out


def topology_text(**changes: object) -> str:
    """Topology JSON of two GPUs with something changed."""
    value: dict[str, object] = {
        "format": "topoplan.topology/1",
        "name": "pair",
        "devices": [{"name": "a", "kind": "gpu"}, {"name": "b", "kind": "gpu"}],
        "links": [*link(), *link(src="b", dst="a")],
    }
    return json.dumps({**value, **changes})


def link(**changes: object) -> list[dict[str, object]]:
    return [{"src": "a", "dst": "b", "channel": "nvlink", "bandwidth": 25, **changes}]


BAD_MACHINES: dict[str, tuple[str | bytes, list[str]]] = {
    "empty": ("", ["empty", "give"]),
    "blank": (" \n\t\n", ["empty", "give"]),
    "binary": (b"\x7fELF\x00\xff\xfe\x01", ["binary", "give"]),
    "prose": ("Hello.\n", ["no header line", "give the whole output"]),
    "no JSON": ('{"format": ', ["not JSON"]),
    "deep JSON": ('{"a":' * 10_000, ["not JSON"]),
    "other format": (topology_text(format="topoplan.topology/9"), ["'topoplan.topology/9'", "convert"]),
    "XML": ("<system version='1'/>", ["no GPU", "NCCL_TOPO_DUMP_FILE"]),
    "ragged": (PAIR.replace("GPU1 NV2   X ", "GPU1 NV2 "), ["GPU1"]),
    "asymmetric": (PAIR.replace("GPU1 NV2", "GPU1 NV3"), ["NV2", "NV3"]),
    "unknown code": (PAIR.replace("NV2", "ZZ9"), ["ZZ9"]),
    "negative bandwidth": (topology_text(links=link(bandwidth=-25)), ["-25", "from 1e-06"]),
    "zero bandwidth": (topology_text(links=link(bandwidth=0)), ["bandwidth 0", "leave out a link"]),
    "NaN bandwidth": (topology_text(links=link(bandwidth=float("nan"))), ["nan", "from 1e-06"]),
    "infinite bandwidth": (topology_text(links=link(bandwidth=float("inf"))), ["inf", "from 1e-06"]),
    "absurd bandwidth": (topology_text(links=link(bandwidth=1e300)), ["1e+300", "1e+09"]),
    "tiny bandwidth": (topology_text(links=link(bandwidth=5e-324)), ["5e-324", "leave out a link"]),
    "absurd count": (topology_text(links=link(count=10**400)), ["count|wires"]),
    "long value": (topology_text(links=link(src=["x" * 90] * 90)), ["must be a text"]),
    "unknown device": (topology_text(links=link(dst="c")), ["'c'", "listed under devices"]),
    "device twice": (topology_text(devices=[{"name": "a", "kind": "gpu"}] * 2), ["'a'", "unique"]),
    "misspelt key": (topology_text(links=[{"src": "a", "dts": "b"}]), ["no 'dst'", "'dts'"]),
}

BAD_PLANS: dict[str, tuple[str | bytes, list[str]]] = {
    "empty": ("", ["empty", "topoplan plan"]),
    "binary": (b"\x00\x01\x02", ["binary", "give"]),
    "no JSON": ("plan", ["not JSON"]),
    "a list": ("[]", ["object"]),
    "other version": ('{"format": "topoplan.plan/9"}', ["'topoplan.plan/9'", "topoplan plan"]),
    "a machine": (topology_text(), ["'topoplan.topology/1'", "topoplan plan"]),
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("command", "content", "fragments"),
    [
        *(pytest.param("plan", *case, id=name) for name, case in BAD_MACHINES.items()),
        *(
            pytest.param(command, *case, id=f"{command} {name}")
            for name, case in BAD_PLANS.items()
            for command in ("verify", "bench")
        ),
    ],
)
def test_a_bad_file_is_one_line(
    refused: Done, tmp_path: Path, command: str, content: str | bytes, fragments: list[str]
) -> None:
    """It names file or stdin, the value and the remedy."""
    path = tmp_path / "file"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    line = refused(command, str(path))
    assert str(path) in line
    assert all(any(word in line for word in fragment.split("|")) for fragment in fragments), line
    assert len(line) < 700
    assert "stdin" in refused(command, "-", stdin=content)


@pytest.mark.parametrize("command", MACHINE_COMMANDS)
def test_every_command_refuses_what_is_no_machine(refused: Done, tmp_path: Path, command: str) -> None:
    """A text without a machine, a misspelled name, a folder, and the empty name."""
    assert "no header line" in refused(command, "-", stdin="Hello.\n")
    assert "did you mean dgx-1v?" in refused(command, "dgx1-v")
    assert f"{tmp_path} cannot be read" in refused(command, str(tmp_path))
    assert "no machine ''" in refused(command, "")
    if command != "show":
        line = refused(command, "-", stdin=topology_text(links=[]))
        assert "{a}" in line
        assert "{b}" in line
        assert "has no GPU" in refused(command, "-", stdin=topology_text(devices=[], links=[]))


def test_file_name_of_no_characters(ask: Ask, tmp_path: Path) -> None:
    """A file name that is not UTF-8 still gives a machine, a plan file and JSON that can be written."""
    name = os.fsdecode(os.fsencode(tmp_path) + b"/m\xff.txt")
    Path(name).write_text(PAIR)
    for command in MACHINE_COMMANDS:
        assert "m?" in ask(command, name).out
        assert ask(command, name, "--json").status == 0
    assert ask("plan", name, "-o", str(tmp_path / "plan.json")).status == 0


@pytest.fixture
def wrong(plan_text: str, tmp_path: Path) -> str:
    """A plan whose second shard loses the last edge of its broadcast."""
    value = json.loads(plan_text)
    value["shards"][1]["stages"][1]["edges"].pop()
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(value))
    return str(path)


def test_verify_names_shard_stage_and_rank(ask: Ask, refused: Done, wrong: str) -> None:
    """It exits with 1; simulate and bench refuse the plan as bad input, with its file."""
    answer = ask(f"verify {wrong}")
    assert (answer.status, answer.out) == (1, "")
    assert "wrong plan: shard 1, stage 1, rank " in answer.err
    answer = ask(f"verify {wrong} --json")
    report = json.loads(answer.out)
    assert (answer.status, report["valid"], report["shard"], report["stage"]) == (1, False, 1, 1)
    assert f"rank {report['rank']}: {report['error']}" in answer.err
    for command in ("simulate", "bench"):
        assert f"{wrong}: wrong plan: shard 1, stage 1" in refused(command, wrong)


def test_claims_are_not_believed(done: Done, plan_text: str) -> None:
    value = json.loads(plan_text)
    value["rate"] *= 2
    line = done("verify -", status=1, stdin=json.dumps(value))
    assert "claims a rate of 100 GB/s; recomputed it is 50" in line


@pytest.mark.parametrize("place", ["folder", "folder/missing/plan.json", ""])
@pytest.mark.parametrize("option", ["-o", "--plot", "--trace"])
def test_bad_place(refused: Done, tmp_path: Path, option: str, place: str) -> None:
    """A folder, a place in no folder and the empty name are refused, and nothing is left behind."""
    (tmp_path / "folder").mkdir()
    command = "simulate" if option == "--trace" else "plan"
    line = refused(command, "v100x4", option, str(tmp_path / place) if place else "")
    assert "name a file" in line or "make it" in line
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


def test_unknown_suffix_is_found_before_the_work(refused: Done, tmp_path: Path) -> None:
    """A figure in no known format is refused before the plan file beside it is written."""
    for suffix in (".xyz", ""):
        line = refused(f"plan v100x4 -o {tmp_path}/p.json --plot {tmp_path}/f{suffix}")
        assert repr(suffix) in line
        assert ".png, .svg or .pdf" in line
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_the_older_file(
    refused: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether planning fails after -o was given, or the last step of writing on a full disk."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "plan.json"
    path.write_text("old")
    refused(f"plan dgx-1v --gpus 9 -o {path}")
    refused(f"plan - -o {path}", stdin=topology_text(links=[]))
    monkeypatch.setattr(os, "replace", full)
    assert "No space left on device" in refused(f"plan v100x4 -o {path}")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_replacing_keeps_permissions_and_follows_links(ask: Ask, tmp_path: Path) -> None:
    real, alias = tmp_path / "real.json", tmp_path / "alias.json"
    real.write_text("old")
    real.chmod(0o640)
    alias.symlink_to(real)
    assert ask(f"plan v100x4 -o {alias}").status == 0
    assert alias.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert json.loads(real.read_text())["format"] == "topoplan.plan/1"


def test_a_pipe_is_written_to(ask: Ask, tmp_path: Path) -> None:
    """What is no regular file, a pipe or a device, is written to and not replaced by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert ask(f"plan v100x4 -o {pipe}").status == 0
    with open(reader, "rb") as content:
        assert json.loads(content.read())["format"] == "topoplan.plan/1"
    assert stat.S_ISFIFO(pipe.stat().st_mode)


class Interrupted(io.RawIOBase):
    """A keyboard on which Ctrl-C is pressed as soon as somebody listens."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        raise KeyboardInterrupt


def test_any_working_directory(tmp_path: Path) -> None:
    """``python -m topoplan`` finds its library from anywhere, prints the plan and nothing on stderr."""
    done = process("plan dgx-1v --gpus 1,4,5,7", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "algbw        50 GB/s" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_exit_status_and_no_traceback() -> None:
    done = process("plan dgx-9")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_reader_that_stops_early() -> None:
    """``topoplan show … | head -1`` ends without a word."""
    command = [sys.executable, "-m", "topoplan", "show", "dgx-2", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, **pipes) as running:  # type: ignore[call-overload]
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait(60) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full to play a full disk")
def test_full_disk() -> None:
    """Output that cannot be written is an error of one line."""
    with open("/dev/full", "w") as full:
        done = process("list", capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "No space left on device" in done.stderr


@pytest.mark.thorough
def test_terminal_without_unicode() -> None:
    """Where stdout takes ASCII only, text and JSON are printed all the same."""
    machine = topology_text(devices=[{"name": "ä", "kind": "gpu"}], links=[])
    for line in ("show - --json", "plan -"):
        done = process(line, set_to={"PYTHONIOENCODING": "ascii"}, input=machine)
        assert (done.returncode, done.stderr) == (0, "")


def test_interrupt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C gives one line and the shell's exit status for it."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Interrupted())))
    assert main(["verify", "-"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "topoplan verify: interrupted\n"


@pytest.mark.parametrize(
    "line",
    [
        *(f"{command} -" for command in (*MACHINE_COMMANDS, "verify", "bench")),
        "export - --to nccl-topo",
        "plan dgx-1v --merge -",
        "plan dgx-1v --overlay -",
    ],
)
def test_closed_stdin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(line.split()) == 2
    command = line.split()[0]
    assert capsys.readouterr().err == f"topoplan {command}: error: stdin is closed; give a file\n"


def test_plan_loads_little() -> None:
    """``plan`` loads neither scipy, networkx, matplotlib nor the rooms behind it: start-up is most of its time."""
    code = (
        "import sys; from topoplan.cli.main import main; main(['plan', 'dgx-1v', '--gpus', '1,4,5,7', '--json']); "
        "print(*{'.'.join(name.split('.')[:2]) for name in sys.modules})"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=60)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "topoplan.solve" in loaded
    assert not loaded & {"scipy", "networkx", "matplotlib", "collectives", "topoplan.schedules"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "input"


def bounded(line: str) -> None:
    """Run a command: whatever it is given, it returns an exit status and says at most one line of error."""
    out, err = io.StringIO(), io.StringIO()
    saved = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err
    try:
        status = main(line.split())
    finally:
        sys.stdout, sys.stderr = saved
    assert status in (0, 1, 2)
    assert err.getvalue().count("\n") == (0 if status == 0 else 1), err.getvalue()
    assert "Traceback" not in err.getvalue()


fast = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["gpu1", "gpu4", "nvlink", "1/2", "reduce", "-1/3", "1/0", "cut", "9" * 40, ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def places(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place in a JSON value, outermost first."""
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in parts:
        yield from places(inner, (*path, key))


@pytest.mark.thorough
@given(content=st.binary(max_size=80) | st.text(max_size=80).map(lambda text: text.encode(errors="replace")))
@fast
def test_random_bytes(target: Path, content: bytes) -> None:
    target.write_bytes(content)
    for command in (*MACHINE_COMMANDS, "verify", "bench"):
        bounded(f"{command} {target}")


@pytest.mark.thorough
@given(data=st.data())
@fast
def test_damaged_matrix(target: Path, data: st.DataObject) -> None:
    """A few characters are replaced."""
    text = list(PAIR)
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.sampled_from("GPU019XNV \t\n#,\0é"))
    target.write_text("".join(text), encoding="utf-8")
    for command in ("show", "plan", "compare"):
        bounded(f"{command} {target}")


@pytest.mark.thorough
@pytest.mark.parametrize("commands", [("verify", "simulate"), MACHINE_COMMANDS], ids=["plan", "topology"])
@given(data=st.data())
@fast
def test_damaged_json(target: Path, plan_text: str, commands: tuple[str, ...], data: st.DataObject) -> None:
    """One value of a plan file or of topology JSON is replaced by any other."""
    value = json.loads(plan_text if "verify" in commands else topology_text())
    *path, last = data.draw(st.sampled_from(list(places(value))[1:]))
    inner = value
    for key in path:
        inner = inner[key]
    inner[last] = data.draw(JSON)
    target.write_text(json.dumps(value))
    for command in commands:
        bounded(f"{command} {target}{' --sizes 1KB' if command == 'simulate' else ''}")

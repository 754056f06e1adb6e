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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import topoplan
from collectives.lab.benchmark import count_wrong
from tests.support.checkout import ROOT, Done, Run
from tests.support.listings import EACH_MATRIX
from topoplan.cli.main import COMMAND_GROUP as GROUP
from topoplan.cli.main import COMMANDS, main
from topoplan.plans.plan import COLLECTIVES
from topoplan.plugins import plugin_loaders
from topoplan.reading.load import library

PAIR = "     GPU0 GPU1 CPU Affinity\nGPU0  X   NV2  0-15\nGPU1 NV2   X   0-15\n"
"""The text of nvidia-smi topo -m for two GPUs, which leaves the speed of the links open."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command did."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, object]:
        """The one JSON object on stdout; infinity and NaN are not JSON and fail."""
        value = json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert isinstance(value, dict)
        return value


Ask = Callable[..., Answer]


@pytest.fixture
def ask(run: Run) -> Ask:
    """Run a command in this process; an error is one line on stderr, and success leaves stderr empty."""

    def call(*arguments: str, stdin: bytes = b"") -> Answer:
        answer = Answer(*run(*arguments, stdin=stdin))
        assert answer.err.count("\n") == (0 if answer.status == 0 else 1), answer.err
        return answer

    return call


def process(*arguments: str, cwd: Path | None = None, **settings: object) -> subprocess.CompletedProcess[str]:
    """Run ``python -m topoplan`` as a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "topoplan", *arguments]
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        command, cwd=cwd, env=environment, text=True, timeout=60, **{"capture_output": True, **settings}
    )


class TestContract:
    """The lines of design.md, section 2."""

    def test_list_names_the_ten_machines(self, ask: Ask) -> None:
        """``list`` has one line for each library machine, and --json one object with the same names."""
        lines = ask("list").out.splitlines()
        machines = ask("list", "--json").json["machines"]
        assert isinstance(machines, list)
        assert [line.split()[0] for line in lines[2:]] == [one["name"] for one in machines] == list(library())

    @EACH_MATRIX
    def test_real_matrices_are_shown_and_planned(self, ask: Ask, path: Path) -> None:
        """Every real nvidia-smi matrix is shown, with notes of what was assumed, planned and verified."""
        shown = ask("show", str(path), "--notes")
        planned = ask("plan", str(path), "-o", "-", "--collective", "broadcast")
        assert (shown.status, planned.status) == (0, 0)
        assert "note: " in shown.out
        assert ask("verify", "-", stdin=planned.out.encode()).status == 0

    def test_plan_json_has_the_promised_keys(self, ask: Ask) -> None:
        """``plan --json`` has rate, bound, certificate, seconds, trees and height; 50 GB/s for GPUs 1, 4, 5, 7."""
        made = ask("plan", "dgx-1v", "--gpus", "1,4,5,7", "--json").json
        assert (made["rate"], made["bound"], made["trees"], made["height"]) == (50.0, 50.0, 2, 2)
        assert isinstance(made["certificate"], dict)
        assert isinstance(made["seconds"], float)
        assert made["seconds"] > 0

    def test_plan_file_has_the_promised_keys(self, ask: Ask, tmp_path: Path) -> None:
        """``plan -o`` writes the keys that others program against, and says where."""
        path = tmp_path / "plan.json"
        assert f"written: {path}\n" in ask("plan", "dgx-1v", "--gpus", "1,4,5,7", "-o", str(path)).out
        made = json.loads(path.read_text())
        assert made["format"] == "topoplan.plan/1"
        assert made["ranks"] == ["gpu1", "gpu4", "gpu5", "gpu7"]
        assert {"collective", "topology", "rate", "bound", "certificate", "method", "seconds"} <= set(made)
        stages = made["shards"][0]["stages"]
        assert [stage["op"] for stage in stages] == ["reduce", "broadcast"]
        parent, child, route, channel = stages[0]["edges"][0]
        assert (route[0], route[-1], channel) == (made["ranks"][parent], made["ranks"][child], "nvlink")

    def test_plan_file_on_stdout_goes_into_verify(self, ask: Ask) -> None:
        """``plan -o - | verify -`` re-checks rate and bound."""
        made = ask("plan", "dgx-1p", "--collective", "allgather", "-o", "-")
        report = ask("verify", "-", "--json", stdin=made.out.encode()).json
        assert report["valid"] is True
        assert report["optimal"] is True
        assert report["rate"] == pytest.approx(640 / 7, rel=1e-9)

    def test_plan_json_is_a_plan_file_too(self, ask: Ask) -> None:
        """``plan --json | verify -`` works, and what was assumed is noted once."""
        made = ask("plan", "-", "--json", stdin=PAIR.encode())
        notes = ask("verify", "-", "--json", stdin=made.out.encode()).json["notes"]
        assert isinstance(notes, list)
        assert notes == made.json["notes"]
        assert len(notes) == len(set(notes)) > 0

    @pytest.mark.sampled
    @pytest.mark.parametrize("collective", COLLECTIVES)
    def test_every_command_takes_every_collective(self, ask: Ask, tmp_path: Path, collective: str) -> None:
        """plan, verify, simulate, bench and compare work for each collective, without a wrong element."""
        path = str(tmp_path / "plan.json")
        assert ask("plan", "v100x4", "--collective", collective, "-o", path).status == 0
        assert ask("verify", path).status == 0
        simulated = ask("simulate", path, "--sizes", "4KB,1MB", "--json").json
        assert (
            simulated
            == ask("simulate", "v100x4", "--collective", collective, "--sizes", "4KB,1MB", "--json").json
        )
        rows = ask("bench", path, "--sizes", "0,1,28,4KB", "--dtype", "int32", "--json").json["rows"]
        assert isinstance(rows, list)
        assert [row["wrong"] for row in rows] == [0, 0, 0, 0]
        compared = ask("compare", "v100x4", "--collective", collective, "--json").json
        assert compared["collective"] == collective

    def test_simulate_tells_queues_at_switches_and_the_run_paced(self, ask: Ask) -> None:
        """Of 15 senders 14 wait at the root's port; a ring makes nobody wait."""
        asked = ("simulate", "dgx-2", "--collective", "reduce", "--sizes", "64MB", "--headroom", "0.95")
        out = ask(*asked).out
        assert "queues       at most 225 chunks in flight, 14 of them" in out
        assert "wait at nvswitch0 for gpu0, at 64MB\npaced        at most 225 chunks in flight" in out
        queues = ask(*asked, "--json").json["queues"]
        assert isinstance(queues, dict)
        assert queues["free"]["ports"][0]["link"] == ["nvswitch0", "gpu0"]
        assert queues["paced"]["ports"] == []
        assert (
            "must be a part of a link from 0.01 to 1, such as 0.95, got '1.2'"
            in ask("simulate", "dgx-2", "--headroom", "1.2").err
        )

    def test_compare_all_allocations_inside_some_gpus(self, ask: Ask) -> None:
        """Best first for every number of GPUs, all members listed, no GPU but those that were named."""
        asked = ("compare", "dgx-1v", "--all-allocations", "--gpus", "0,1,5-7", "--without-gpu", "2")
        rows = cast("list[dict[str, Any]]", ask(*asked, "--json").json["rows"])
        order = [(len(row["gpus"]), -row["trees"]) for row in rows]
        assert order == sorted(order)
        assert sorted(tuple(gpus) for row in rows for gpus in row["allocations"]) == sorted(
            gpus for count in range(2, 6) for gpus in combinations((0, 1, 5, 6, 7), count)
        )
        for row in rows:
            assert (row["gpus"] in row["allocations"], len(row["allocations"])) == (True, row["members"])
        out = ask(*asked, "--all", "--members").out
        assert "as 6,7: 1,5  5,6  6,7\n" in out
        assert "NCCL: its best today" in out
        table = [*csv.reader(io.StringIO(ask(*asked, "--csv").out))]
        assert [float(line[table[0].index("trees")]) for line in table[1:]] == [row["trees"] for row in rows]
        assert table[1][0] == "6,7"
        assert table[1][-1] == "1,5 5,6 6,7"

    @pytest.mark.parametrize("command", ["show", "plan", "compare", "simulate"])
    def test_stdin_is_a_machine(self, ask: Ask, command: str) -> None:
        """``cat matrix | topoplan COMMAND -`` works wherever a TOPO is taken, and calls the machine stdin."""
        answer = ask(command, "-", stdin=PAIR.encode())
        assert answer.status == 0
        assert "stdin" in answer.out.splitlines()[0]

    def test_stdin_in_utf_16(self, ask: Ask) -> None:
        """Text redirected by PowerShell, UTF-16 with its mark, is read like any other."""
        text = PAIR.encode("utf-16")
        assert ask("simulate", "-", "--sizes", "1KB", stdin=text) == ask(
            "simulate", "-", "--sizes", "1KB", stdin=PAIR.encode()
        )

    def test_simulate_knows_a_plan_by_its_content(self, ask: Ask, plan_file: Path, plan_text: str) -> None:
        """A plan file is recognised under any name, pretty-printed with keys in any order, and on stdin."""
        wanted = ask("simulate", str(plan_file), "--sizes", "1MB").out
        other = plan_file.with_suffix(".txt")
        other.write_text(json.dumps(dict(reversed(json.loads(plan_text).items())), indent=4))
        assert ask("simulate", str(other), "--sizes", "1MB").out == wanted
        assert ask("simulate", "-", "--sizes", "1MB", stdin=plan_text.encode()).out == wanted

    def test_simulate_without_any_ring(self, ask: Ask) -> None:
        """Three GPUs in a row have no NVLink ring and no PCIe: the plan is timed alone, and a note says why."""
        row = {"format": "topoplan.topology/1", "name": "row", "devices": [], "links": []}
        row["devices"] = [{"name": f"gpu{i}", "kind": "gpu"} for i in range(3)]
        pairs = [(0, 1), (1, 0), (1, 2), (2, 1)]
        row["links"] = [
            {"src": f"gpu{a}", "dst": f"gpu{b}", "channel": "nvlink", "bandwidth": 25} for a, b in pairs
        ]
        answer = ask("simulate", "-", "--sizes", "1KB", "--notes", stdin=json.dumps(row).encode())
        assert answer.status == 0
        assert "note: no ring to compare with: " in answer.out
        made = ask("simulate", "-", "--sizes", "1KB", "--json", stdin=json.dumps(row).encode()).json
        assert (made["ring"], made["crossover"]) == (None, None)

    def test_trace_is_the_largest_size(self, ask: Ask, plan_file: Path, tmp_path: Path) -> None:
        """``simulate --trace`` writes a Chrome trace that ends when the table says that the largest size does."""
        path = tmp_path / "trace.json"
        made = ask("simulate", str(plan_file), "--sizes", "64KB,1KB", "--trace", str(path), "--json").json
        events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
        plan = made["plan"]
        assert isinstance(plan, dict)
        assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(plan["rows"][0]["time"], rel=0.2)

    @pytest.mark.parametrize("command", ["show", "plan", "compare", "simulate"])
    def test_figures(self, ask: Ask, tmp_path: Path, command: str) -> None:
        """--plot writes the figure in the format of its suffix, and the text says where."""
        path = tmp_path / "figure.svg"
        assert f"written: {path}\n" in ask(command, "v100x4", "--plot", str(path)).out
        assert path.read_text().startswith("<?xml")
        assert [entry.name for entry in tmp_path.iterdir()] == ["figure.svg"]

    @pytest.mark.parametrize("command", ["show", "plan", "compare", "simulate"])
    def test_looks_of_figures(self, ask: Ask, tmp_path: Path, command: str) -> None:
        """Size, font and format go with the --plot of every command: the page of the SVG is so many points."""
        path = tmp_path / "figure"
        look = ("--plot-size", "5x3.5", "--font", "serif", "--plot-format", "svg")
        assert f"written: {path}\n" in ask(command, "v100x4", "--plot", str(path), *look).out
        assert 'width="360pt" height="252pt"' in path.read_text()

    @pytest.mark.parametrize("command", ["show", "plan", "compare", "simulate"])
    def test_notes_are_in_text_and_json(self, ask: Ask, command: str) -> None:
        """What had to be assumed about nvidia-smi text stands in both outputs, and is gone once it is settled."""
        note = "NVLink 25 GB/s per link and direction; set --nvlink-bandwidth"
        assert note in ask(command, "-", "--notes", stdin=PAIR.encode()).out
        notes = ask(command, "-", "--json", stdin=PAIR.encode()).json["notes"]
        assert isinstance(notes, list)
        assert any(note in line for line in notes)
        settled = ask(
            command,
            "-",
            "--nvlink-bandwidth",
            "20GB/s",
            "--pcie-bandwidth",
            "10GB/s",
            "--notes",
            stdin=PAIR.encode(),
        ).out
        assert "set --nvlink-bandwidth" not in settled

    def test_notes_stay_in_the_plan_file(self, ask: Ask, tmp_path: Path) -> None:
        """verify and bench repeat what was assumed when the plan was made."""
        path = str(tmp_path / "plan.json")
        assert ask("plan", "-", "-o", path, stdin=PAIR.encode()).status == 0
        for command in ("verify", "bench"):
            sizes = ["--sizes", "1KB"] if command == "bench" else []
            assert "set --nvlink-bandwidth" in ask(command, path, *sizes, "--notes").out
            assert "set --nvlink-bandwidth" in ask(command, path, *sizes, "--json").out

    def test_bench_columns_do_not_move(self, ask: Ask, plan_file: Path) -> None:
        """Header and rows of ``bench`` have one width whatever the figures are."""
        lines = ask("bench", str(plan_file), "--sizes", "0,64KB,1MB").out.splitlines()[1:6]
        assert {len(line) for line in lines} == {len(lines[0])}
        assert lines[0].split()[1:] == ["size", "count", "type", "redop", "time", "algbw", "busbw", "wrong"]

    def test_bench_counts_wrong_elements(self, plan_text: str) -> None:
        """One changed element on one rank is one wrong element."""
        plan = topoplan.Plan.from_json(plan_text)
        totals = [((np.arange(5)[:, None] + np.arange(4)) % 7).sum(axis=1) for _ in range(4)]
        assert count_wrong(plan, 5, dict(enumerate(totals))) == 0
        totals[2][3] += 1
        assert count_wrong(plan, 5, dict(enumerate(totals))) == 1

    def test_text_is_the_same_every_time(self, ask: Ask) -> None:
        """Two runs print the same but for the time it took, so that outputs can be diffed."""
        first, second = (
            [line for line in ask("plan", "dgx-a100").out.splitlines() if not line.startswith("planned in")]
            for _ in range(2)
        )
        assert first == second

    def test_every_command_explains_itself(self, ask: Ask) -> None:
        """--help of every command names its options on stdout and exits 0."""
        names = (*COMMANDS, *plugin_loaders(GROUP))
        assert {"bench", "testbed", "calibrate"} <= set(names)
        assert all(name in ask("--help").out for name in names)
        for name in names:
            # What these print is read by other programs already.
            own = {"export": "--to", "completion": "SHELL", "report": "F.html", "help": "TOPIC"}
            assert own.get(name, "--json") in ask(name, "--help").out

    def test_a_package_adds_a_command_by_an_entry_point(
        self, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        assert ask("gone").err.startswith(
            "topoplan gone: error: gone, which the package other offers, cannot be loaded"
        )
        listed = " ".join(ask("--help").out.split())
        assert "plan a collective and prove an upper bound" in listed
        assert "wave a hand, 100 % sure" in listed
        assert "gone gone, which the package other offers, cannot be loaded" in listed
        assert ask("--version").status == 0

    def test_a_checkout_that_is_not_installed_has_all_commands(
        self, ask: Ask, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As on a machine without a network, where nothing but the checkout was brought."""
        monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group: ())
        assert {"bench", "testbed", "calibrate"} == set(plugin_loaders(GROUP))
        assert "--backend" in ask("bench", "--help").out


class TestOneGpu:
    """One GPU is a valid, trivial plan: nothing moves, and no rate exists."""

    @pytest.fixture
    def one(self, ask: Ask, tmp_path: Path) -> str:
        path = str(tmp_path / "one.json")
        assert ask("plan", "dgx-1v", "--gpus", "3", "-o", path).status == 0
        return path

    def test_rates_are_null(self, ask: Ask, one: str) -> None:
        """Infinite rates are null in every JSON output."""
        planned = ask("plan", "dgx-1v", "--gpus", "3", "--json").json
        assert (planned["rate"], planned["bound"], planned["gap"], planned["trees"]) == (None, None, 0.0, 0)
        assert json.loads(Path(one).read_text())["rate"] is None
        assert ask("verify", one, "--json").json["rate"] is None
        made = ask("simulate", one, "--sizes", "0,1KB", "--json").json
        assert isinstance(made["plan"], dict)
        assert (made["plan"]["rate"], made["ring"]) == (None, None)
        rows = ask("compare", "dgx-1v", "--gpus", "3", "--json").json["rows"]
        assert isinstance(rows, list)
        assert (rows[0]["trees"], rows[0]["ratio"]) == (None, None)

    def test_text_says_that_nothing_moves(self, ask: Ask, one: str) -> None:
        """plan, verify and simulate say so instead of printing inf; compare shows dashes."""
        answers = [ask("plan", "dgx-1v", "--gpus", "3"), ask("verify", one), ask("simulate", one)]
        assert all("one GPU, nothing moves" in answer.out for answer in answers)
        answers.append(ask("compare", "dgx-1v", "--gpus", "3"))
        assert not any("inf" in answer.out or "nan" in answer.out for answer in answers)

    def test_bench_copies(self, ask: Ask, one: str) -> None:
        """bench of one rank copies each size without a wrong element."""
        rows = ask("bench", one, "--sizes", "0,4,64KB", "--json").json["rows"]
        assert isinstance(rows, list)
        assert [(row["size"], row["busbw"], row["wrong"]) for row in rows] == [
            (0, 0, 0),
            (4, 0, 0),
            (65536, 0, 0),
        ]

    def test_no_allocation_to_compare(self, ask: Ask) -> None:
        """A machine of one GPU has no allocation of two: an empty table, and null for every mean."""
        single = json.dumps(
            {
                "format": "topoplan.topology/1",
                "name": "single",
                "devices": [{"name": "gpu0", "kind": "gpu"}],
                "links": [],
            }
        ).encode()
        assert "0 allocations" in ask("compare", "-", "--all-allocations", stdin=single).out
        made = ask("compare", "-", "--all-allocations", "--json", stdin=single).json
        assert made["rows"] == []
        assert "no links" in ask("show", "-", stdin=single).out


def topology_text(**changes: object) -> bytes:
    """Topology JSON of two GPUs with something changed."""
    value: dict[str, object] = {
        "format": "topoplan.topology/1",
        "name": "pair",
        "devices": [{"name": "a", "kind": "gpu"}, {"name": "b", "kind": "gpu"}],
        "links": [
            {"src": "a", "dst": "b", "channel": "nvlink", "bandwidth": 25},
            {"src": "b", "dst": "a", "channel": "nvlink", "bandwidth": 25},
        ],
    }
    return json.dumps({**value, **changes}).encode()


def link(**changes: object) -> list[dict[str, object]]:
    return [{"src": "a", "dst": "b", "channel": "nvlink", "bandwidth": 25, **changes}]


BAD_MACHINES = {
    "empty": (b"", ["empty", "give"]),
    "blank": (b" \n\t\n", ["empty", "give"]),
    "binary": (b"\x7fELF\x00\xff\xfe\x01", ["binary", "give"]),
    "prose": (b"Hello.\n", ["no header line", "give the whole output"]),
    "no JSON": (b'{"format": ', ["not JSON"]),
    "deep JSON": (b'{"a":' * 10_000, ["not JSON"]),
    "other format": (topology_text(format="topoplan.topology/9"), ["'topoplan.topology/9'", "convert"]),
    "XML": (b"<system version='1'/>", ["no GPU", "NCCL_TOPO_DUMP_FILE"]),
    "ragged": (PAIR.replace("GPU1 NV2   X ", "GPU1 NV2 ").encode(), ["GPU1"]),
    "asymmetric": (PAIR.replace("GPU1 NV2", "GPU1 NV3").encode(), ["NV2", "NV3"]),
    "unknown code": (PAIR.replace("NV2", "ZZ9").encode(), ["ZZ9"]),
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

MACHINE_COMMANDS = ("show", "plan", "compare", "simulate")


class TestBadMachine:
    """A machine that cannot be one, wherever a TOPO is taken."""

    @pytest.mark.parametrize("case", BAD_MACHINES)
    def test_file_and_stdin(self, refused: Done, tmp_path: Path, case: str) -> None:
        """One line names file or stdin, the value and the remedy."""
        content, fragments = BAD_MACHINES[case]
        path = tmp_path / "machine"
        path.write_bytes(content)
        line = refused("plan", str(path))
        assert str(path) in line
        assert all(any(word in line for word in fragment.split("|")) for fragment in fragments), line
        assert len(line) < 700
        assert "stdin" in refused("plan", "-", stdin=content)

    @pytest.mark.parametrize("command", MACHINE_COMMANDS)
    def test_every_command(self, refused: Done, tmp_path: Path, command: str) -> None:
        """A text without a machine, a misspelled name, a folder, and the empty name."""
        assert "no header line" in refused(command, "-", stdin=b"Hello.\n")
        assert "did you mean dgx-1v?" in refused(command, "dgx1-v")
        assert f"{tmp_path} cannot be read" in refused(command, str(tmp_path))
        assert "no machine ''" in refused(command, "")
        if command != "show":
            line = refused(command, "-", stdin=topology_text(links=[]))
            assert "{a}" in line
            assert "{b}" in line
            assert "has no GPU" in refused(command, "-", stdin=topology_text(devices=[], links=[]))

    def test_no_gpu_shown(self, ask: Ask) -> None:
        """A machine of nothing is shown as such."""
        assert "0 GPUs; no links" in ask("show", "-", stdin=topology_text(devices=[], links=[])).out

    def test_file_name_of_no_characters(self, ask: Ask, tmp_path: Path) -> None:
        """A file name that is not UTF-8 still gives a machine, a plan file and JSON that can be written."""
        path = os.fsencode(tmp_path) + b"/m\xff.txt"
        with open(path, "wb") as file:
            file.write(PAIR.encode())
        name = os.fsdecode(path)
        for command in MACHINE_COMMANDS:
            assert "m?" in ask(command, name).out
            assert ask(command, name, "--json").status == 0
        assert ask("plan", name, "-o", str(tmp_path / "plan.json")).status == 0


BAD_PLANS = {
    "empty": (b"", ["empty", "topoplan plan"]),
    "binary": (b"\x00\x01\x02", ["binary", "give"]),
    "no JSON": (b"plan", ["not JSON"]),
    "a list": (b"[]", ["object"]),
    "other version": (b'{"format": "topoplan.plan/9"}', ["'topoplan.plan/9'", "topoplan plan"]),
    "a machine": (topology_text(), ["'topoplan.topology/1'", "topoplan plan"]),
}


class TestBadPlan:
    """Files that are no plan (exit 2), and plans that are wrong (exit 1 from verify)."""

    @pytest.mark.parametrize("command", ["verify", "bench"])
    @pytest.mark.parametrize("case", BAD_PLANS)
    def test_no_plan(self, refused: Done, tmp_path: Path, command: str, case: str) -> None:
        """One line names the file and what is wrong with it, on stdin too."""
        content, fragments = BAD_PLANS[case]
        path = tmp_path / "plan.json"
        path.write_bytes(content)
        line = refused(command, str(path))
        assert str(path) in line
        assert all(fragment in line for fragment in fragments), line
        assert "stdin" in refused(command, "-", stdin=content)

    @pytest.fixture
    def wrong(self, plan_text: str, tmp_path: Path) -> str:
        """A plan whose second shard loses the last edge of its broadcast."""
        value = json.loads(plan_text)
        value["shards"][1]["stages"][1]["edges"].pop()
        path = tmp_path / "wrong.json"
        path.write_text(json.dumps(value))
        return str(path)

    def test_verify_names_shard_stage_and_rank(self, ask: Ask, wrong: str) -> None:
        """verify exits 1 and says where: shard 1, stage 1, the rank that misses a contribution."""
        answer = ask("verify", wrong)
        assert (answer.status, answer.out) == (1, "")
        assert "wrong plan: shard 1, stage 1, rank " in answer.err
        answer = ask("verify", wrong, "--json")
        assert answer.status == 1
        report = answer.json
        assert (report["valid"], report["shard"], report["stage"]) == (False, 1, 1)
        assert f"rank {report['rank']}: {report['error']}" in answer.err

    def test_a_wrong_plan_is_not_used(self, refused: Done, wrong: str) -> None:
        """simulate and bench refuse a wrong plan as bad input, with its file."""
        for command in ("simulate", "bench"):
            line = refused(command, wrong)
            assert f"{wrong}: wrong plan: shard 1, stage 1" in line

    def test_claims_are_not_believed(self, ask: Ask, plan_text: str) -> None:
        """A plan that claims twice its rate is wrong."""
        value = json.loads(plan_text)
        value["rate"] *= 2
        answer = ask("verify", "-", stdin=json.dumps(value).encode())
        assert answer.status == 1
        assert "claims a rate of 100 GB/s; recomputed it is 50" in answer.err


class TestOutputFiles:
    """A file is written whole or not at all."""

    BAD_PLACES = ("folder", "folder/missing/plan.json", "")

    @pytest.mark.parametrize("place", BAD_PLACES)
    @pytest.mark.parametrize("option", ["-o", "--plot", "--trace"])
    def test_bad_place(self, refused: Done, tmp_path: Path, option: str, place: str) -> None:
        """A folder, a place in no folder and the empty name are refused, and nothing is left behind."""
        (tmp_path / "folder").mkdir()
        command = "simulate" if option == "--trace" else "plan"
        line = refused(command, "v100x4", option, str(tmp_path / place) if place else "")
        assert "name a file" in line or "make it" in line
        assert [path.name for path in tmp_path.rglob("*")] == ["folder"]

    def test_unknown_suffix_is_found_before_the_work(self, refused: Done, tmp_path: Path) -> None:
        """A figure in no known format is refused before the plan file beside it is written."""
        for suffix in (".xyz", ""):
            line = refused(
                *("plan", "v100x4", "-o", str(tmp_path / "p.json"), "--plot", str(tmp_path / f"f{suffix}"))
            )
            assert repr(suffix) in line
            assert ".png, .svg or .pdf" in line
        assert list(tmp_path.iterdir()) == []

    def test_a_failed_plan_leaves_the_older_file(self, refused: Done, tmp_path: Path) -> None:
        """Where planning fails after -o was given, what was there stays as it was."""
        path = tmp_path / "plan.json"
        path.write_text("old")
        refused("plan", "dgx-1v", "--gpus", "9", "-o", str(path))
        refused("plan", "-", "-o", str(path), stdin=topology_text(links=[]))
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]

    def test_a_full_disk_leaves_the_older_file(
        self, refused: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where the last step of writing fails, the older file and nothing else is there."""

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        path = tmp_path / "plan.json"
        path.write_text("old")
        monkeypatch.setattr(os, "replace", full)
        assert "No space left on device" in refused("plan", "v100x4", "-o", str(path))
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]

    def test_replacing_keeps_permissions_and_follows_links(self, ask: Ask, tmp_path: Path) -> None:
        """A link still points to its file afterwards, and the file has the permissions that it had."""
        real, alias = tmp_path / "real.json", tmp_path / "alias.json"
        real.write_text("old")
        real.chmod(0o640)
        alias.symlink_to(real)
        assert ask("plan", "v100x4", "-o", str(alias)).status == 0
        assert alias.is_symlink()
        assert stat.S_IMODE(real.stat().st_mode) == 0o640
        assert json.loads(real.read_text())["format"] == "topoplan.plan/1"

    def test_a_pipe_is_written_to(self, ask: Ask, tmp_path: Path) -> None:
        """What is no regular file, a pipe or a device, is written to and not replaced by a file."""
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        assert ask("plan", "v100x4", "-o", str(pipe)).status == 0
        with open(reader, "rb") as content:
            assert json.loads(content.read())["format"] == "topoplan.plan/1"
        assert stat.S_ISFIFO(pipe.stat().st_mode)


class Interrupted(io.RawIOBase):
    """A keyboard on which Ctrl-C is pressed as soon as somebody listens."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        raise KeyboardInterrupt


class TestProcess:
    """The whole process: streams, working directory, what is loaded."""

    def test_any_working_directory(self, tmp_path: Path) -> None:
        """``python -m topoplan`` finds its library from anywhere, prints the plan and nothing on stderr."""
        done = process("plan", "dgx-1v", "--gpus", "1,4,5,7", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert "algbw        50 GB/s" in done.stdout
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.thorough
    def test_exit_status_and_no_traceback(self, tmp_path: Path) -> None:
        """Bad input exits 2 with one line."""
        done = process("plan", "dgx-9", cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)

    def test_reader_that_stops_early(self) -> None:
        """``topoplan show … | head -1`` ends without a word."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(
            [sys.executable, "-m", "topoplan", "show", "dgx-2", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        ) as running:
            assert running.stdout is not None
            assert running.stderr is not None
            running.stdout.close()
            assert running.stderr.read() == b""
            assert running.wait(60) == 0

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full to play a full disk")
    def test_full_disk(self) -> None:
        """Output that cannot be written is an error of one line."""
        with open("/dev/full", "w") as full:
            done = process("list", capture_output=False, stdout=full, stderr=subprocess.PIPE)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "No space left on device" in done.stderr

    def test_terminal_without_unicode(self) -> None:
        """Where stdout takes ASCII only, text and JSON are printed all the same."""
        name = topology_text(devices=[{"name": "ä", "kind": "gpu"}], links=[]).decode()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
        for form in ("show", "plan"):
            done = subprocess.run(
                [sys.executable, "-m", "topoplan", form, "-", *(["--json"] if form == "show" else [])],
                input=name,
                capture_output=True,
                text=True,
                env=environment,
                timeout=60,
            )
            assert (done.returncode, done.stderr) == (0, "")

    def test_interrupt(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        """Ctrl-C gives one line and the shell's exit status for it."""
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Interrupted())))
        assert main(["verify", "-"]) == 128 + signal.SIGINT
        assert capsys.readouterr().err == "topoplan verify: interrupted\n"

    @pytest.mark.parametrize(
        "arguments",
        [
            *([command, "-"] for command in ("show", "plan", "compare", "simulate", "verify", "bench")),
            ["export", "-", "--to", "nccl-topo"],
            ["plan", "dgx-1v", "--merge", "-"],
            ["plan", "dgx-1v", "--overlay", "-"],
        ],
        ids=" ".join,
    )
    def test_closed_stdin(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
    ) -> None:
        """``topoplan COMMAND - <&-`` says that stdin is closed."""
        monkeypatch.setattr(sys, "stdin", None)
        assert main(arguments) == 2
        assert capsys.readouterr().err == f"topoplan {arguments[0]}: error: stdin is closed; give a file\n"

    def test_plan_loads_little(self) -> None:
        """``plan`` loads neither scipy, networkx, matplotlib nor the rooms behind it: start-up is most of its time."""
        code = (
            "import sys; from topoplan.cli.main import main; main(['plan', 'dgx-1v', '--gpus', '1,4,5,7', '--json']); "
            "print(sorted({name.split('.')[0] for name in sys.modules} & {'scipy', 'networkx', 'matplotlib', "
            "'collectives'}), sorted({name.split('.')[1] for name in sys.modules if name.startswith('topoplan.')}))"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
        )
        others, rooms = done.stdout.splitlines()[-1].split("] [")
        assert others == "["
        assert not {"simulation", "compare", "plot", "schedules"} & set(
            rooms.rstrip("]").replace("'", "").split(", ")
        )


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return tmp_path_factory.mktemp("fuzz") / "input"


def bounded(arguments: Sequence[str]) -> None:
    """Run a command: whatever it is given, it returns an exit status and says at most one line of error."""
    out, err = io.StringIO(), io.StringIO()
    saved = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err
    try:
        status = main(arguments)
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
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from places(inner, (*path, number))


@pytest.mark.thorough
class TestAnything:
    """Whatever the bytes are, there is no traceback."""

    @given(
        content=st.binary(max_size=80) | st.text(max_size=80).map(lambda text: text.encode(errors="replace"))
    )
    @fast
    def test_random_bytes(self, target: Path, content: bytes) -> None:
        """Random bytes as TOPO and as plan file."""
        target.write_bytes(content)
        for command in ("show", "plan", "compare", "simulate", "verify", "bench"):
            bounded([command, str(target)])

    @given(data=st.data())
    @fast
    def test_damaged_matrix(self, target: Path, data: st.DataObject) -> None:
        """A matrix with a few characters replaced."""
        text = list(PAIR)
        for _ in range(data.draw(st.integers(1, 4))):
            text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.sampled_from("GPU019XNV \t\n#,\0é"))
        target.write_text("".join(text), encoding="utf-8")
        for command in ("show", "plan", "compare"):
            bounded([command, str(target)])

    @given(data=st.data())
    @fast
    def test_damaged_plan(self, target: Path, plan_text: str, data: st.DataObject) -> None:
        """A plan file with one value replaced by any other."""
        value = json.loads(plan_text)
        *path, last = data.draw(st.sampled_from(list(places(value))[1:]))
        inner = value
        for key in path:
            inner = inner[key]
        inner[last] = data.draw(JSON)
        target.write_text(json.dumps(value))
        bounded(["verify", str(target)])
        bounded(["simulate", str(target), "--sizes", "1KB"])

    @given(data=st.data())
    @fast
    def test_damaged_topology(self, target: Path, data: st.DataObject) -> None:
        """Topology JSON with one value replaced by any other."""
        value = json.loads(topology_text())
        *path, last = data.draw(st.sampled_from(list(places(value))[1:]))
        inner = value
        for key in path:
            inner = inner[key]
        inner[last] = data.draw(JSON)
        target.write_text(json.dumps(value))
        for command in ("show", "plan", "compare", "simulate"):
            bounded([command, str(target)])

"""The pages of ``--help`` and ``topoplan help``: their length, their examples, and that no option is missing."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

import topoplan
from tests.support.checkout import Done, Run
from tests.support.nvlink_listings import Listings
from tests.support.perf_logs import PerfLog
from topoplan.cli.help import SYNONYMS, TASKS, TOPICS
from topoplan.cli.main import command_parsers
from topoplan.engines.registry import export_plan
from topoplan.reading.pcie_tree import relation_matrix

PARSERS = command_parsers()

EXAMPLES = [
    *dict.fromkeys(
        line
        for lines in (*(one.examples for one in PARSERS.values()), *(one.examples for one in TOPICS.values()))
        for line in lines
    )
]

NEED_MACHINE = (
    "topoplan probe",
    "topoplan calibrate",
    "topoplan testbed",
    "topoplan check",
    "topoplan bench",
)
"""Examples that need GPUs or processes of their own in part: these are parsed, and run in other tests."""


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the examples name."""
    folder = tmp_path_factory.mktemp("examples")
    machine = topoplan.load("dgx-1v")
    names, cells = relation_matrix(machine)
    rows = [("", *names), *((name, *row) for name, row in zip(names, cells, strict=True))]
    plan = topoplan.plan(machine, gpus=[1, 4, 5, 7])
    log = PerfLog(hosts=(("node1", range(4)),), gpu="Tesla V100-SXM2-32GB", rate=20).text()
    jobs = [{"name": "a", "stages": [{"iterations": 10, "compute": 2.0, "bytes": {"leaf0": 1e9}}]}]
    texts = {
        "topo.txt": "\n".join(map("\t".join, rows)).replace("gpu", "GPU").replace("nic", "mlx5_"),
        "nvlink-status.txt": Listings(machine).status(),
        "plan.json": plan.to_json(),
        "mscclpp.json": export_plan(plan, "mscclpp").text,
        "jobs.json": json.dumps({"format": "topoplan.jobs/1", "links": {"leaf0": 1.0}, "jobs": jobs}),
        "pairs.csv": "a,b,GB/s\ngpu0,gpu3,10\n",
        "bus-ids.csv": "\n".join(f"{gpu}, 00000000:{gpu + 6:02X}:00.0" for gpu in range(8)),
        "topology.conf": "SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n[3-4]\nSwitchName=c Switches=a,b\n",
        "hosts.txt": "n1\nn3\nn2\nn4\n",
        **dict.fromkeys(("nccl-tests.log", "ring.log", "tree.log", "old.log", "new.log"), log),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


def has(page: str, action: argparse.Action) -> bool:
    written = action.option_strings[0] if action.option_strings else str(action.metavar)
    return re.search(rf"^  {re.escape(written)}([ ,]|$)", page, re.MULTILINE) is not None


@pytest.mark.parametrize("command", ["", *PARSERS])
def test_help_fits_a_screen_and_has_examples(done: Done, columns: None, command: str) -> None:
    """40 lines of 80 columns, one line of usage, and three examples (completion has two shells)."""
    lines = done(*command.split(), "--help").splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"usage: topoplan {command}".rstrip())
    assert lines[1] == ""
    count = 2 if command == "completion" else 3
    begun = lines.index("examples:") + 1
    assert all(line.startswith(f"  topoplan {command}") for line in lines[begun : begun + count])


def test_commands_are_listed_once_by_task(done: Done) -> None:
    page = done("--help")
    listed = re.findall(r"^  ([a-z]+)  ", page, re.MULTILINE)
    assert sorted(listed) == sorted(PARSERS)
    assert all(f"\n{task}:\n" in page for task in TASKS)


@pytest.mark.sampled
@pytest.mark.parametrize("command", PARSERS)
def test_every_option_is_in_the_help_or_in_one_topic(done: Done, command: str) -> None:
    """The page of a topic has the options of every command, and ``help COMMAND`` has all of a command."""
    parser = PARSERS[command]
    short, full = done(command, "--help"), done("help", command)
    pages = {name: done("help", name) for name in parser.topics}
    assert set(parser.topics) <= {command, *TOPICS}
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            homes = [name for name, group in parser.topics.items() if action in group._group_actions]
            assert has(short, action) + len(homes) == 1, action
            assert has(full, action), action
            assert all(has(pages[name], action) for name in homes), action


def test_topics_are_listed_and_have_synonyms(done: Done, refused: Done, columns: None) -> None:
    assert all(f"  {topic} " in done("help") for topic in TOPICS)
    assert all(len(line) <= 80 for topic in TOPICS for line in done("help", topic).splitlines())
    assert all(done("help", word) == done("help", topic) for word, topic in SYNONYMS.items())
    assert "did you mean cluster?" in refused("help", "clusters")
    assert "use a command, or machine, cluster" in refused("help", "0")


@pytest.mark.parametrize("line", EXAMPLES)
def test_an_example_is_understood(line: str) -> None:
    program, command, *words = line.split()
    assert program == "topoplan"
    PARSERS[command].parse_args(words)


@pytest.mark.thorough
@pytest.mark.parametrize("line", [line for line in EXAMPLES if not line.startswith(NEED_MACHINE)])
def test_an_example_runs(run: Run, files: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """On the files that it names; exit status 1 says that diff and pairs found something."""
    monkeypatch.chdir(files)
    status, out, err = run(*line.split()[1:])
    assert status <= line.startswith(("topoplan diff", "topoplan pairs")), err
    assert out


def test_deprecated_spellings_work_and_are_hidden(done: Done, refused: Done) -> None:
    """The old option takes a bare number in its unit; the new one shows both units."""
    assert "--nic-gbps" not in done("help", "plan")
    pair = ("show", "v100x4", "--servers", "2", "--json")
    assert done(*pair, "--nic-gbps", "100") == done(*pair, "--nic-bandwidth", "100Gb/s")
    assert "must have a unit, got '100'; write 100Gb/s or 100GB/s" in refused(*pair, "--nic-bandwidth", "100")

"""Output for readers and programs: lines, progress on a terminal, comma-separated values, completions."""

from __future__ import annotations

import csv
import io
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT, Done
from topoplan.cli.main import COMMANDS, main, wrap_line
from topoplan.cli.output import progress_bar, progress_line
from topoplan.errors import UsageError
from topoplan.plans.shards import Edge, Stage, bracket_notation
from topoplan.reading.load import library
from topoplan.units import name_ranges, parse_bandwidth, parse_gpu_list


def on_a_terminal(*arguments: str, stream: str = "stdout", columns: int = 80) -> str:
    """What a process of Python writes to a stream that is a terminal of so many columns."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": str(columns), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, *arguments], env=environment, cwd=ROOT, **{stream: theirs}
    ) as process:  # type: ignore[call-overload]
        os.close(theirs)
        read = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux's end of file of a terminal
                part = b""
            if not part:
                break
            read += part
    os.close(ours)
    assert process.returncode == 0, read
    return read.decode().replace("\r\n", "\n")


def test_no_line_on_a_terminal_is_wider_than_it_and_no_word_is_lost(done: Done) -> None:
    """A wide terminal gets 120 columns; where nobody looks, and as JSON, lines stay whole."""
    command = ("-m", "topoplan", "plan", "mi250", "--bound-only")
    whole = done("plan mi250 --bound-only")
    assert max(map(len, whole.splitlines())) > 120
    printed = on_a_terminal(*command, columns=300)
    assert 100 < max(map(len, printed.splitlines())) <= 120
    first, second = (re.sub(r"proved in \S+ \S+", "", text).split() for text in (printed, whole))
    assert first == second
    assert len(on_a_terminal(*command, "--json", columns=60).splitlines()) > 60


def test_wrapped_lines_go_on_below_the_last_column_that_begins_in_the_left_half() -> None:
    assert wrap_line("a  bb cc dd", 7) == "a  bb\n   cc\n   dd"
    assert wrap_line("word " * 3, 11) == "word word\n    word"
    assert wrap_line("written: " + "x" * 30, 20) == "written: " + "x" * 30


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("line", "head", "rows"),
    [
        ("list", "name,GPUs,links", len(library())),
        ("plan v100x4", "count,channel,share,GB/s,root,height,tree", 2),
        ("simulate v100x4 --sizes 1MB:2MB", "schedule,size,count,type,redop,time,algbw,busbw", 6),
        (
            "plan v100x4 --sizes 1MB:2MB",
            "size,schedule,seconds,bound_seconds,ratio,nccl,nccl_runs,quickest,quickest_seconds",
            2,
        ),
    ],
)
def test_tables_are_comma_separated_values_too(done: Done, line: str, head: str, rows: int) -> None:
    heads, *found = csv.reader(io.StringIO(done(f"{line} --csv")))
    assert ",".join(heads) == head
    assert len(found) == rows
    assert {len(row) for row in found} == {len(heads)}


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("400Gb/s", "GB/s", 50.0),
        ("50GB/s", "Gb/s", 50.0),
        ("100", "Gb/s", 12.5),
        ("25", "GB/s", 25.0),
        ("1.6Tb/s", "GB/s", 200.0),
        ("800 Gbps", "GB/s", 100.0),
        ("200Gbit/s", "GB/s", 25.0),
        ("900MB/s", "GB/s", 0.9),
    ],
)
def test_a_suffix_means_the_same_everywhere(text: str, unit: str, value: float) -> None:
    assert parse_bandwidth(text, unit=unit) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "0", "-3", "nan", "fast", "10 gb/s", "5GB", "1e999", "3 GB/s/s"])
def test_what_is_no_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a bandwidth in GB/s above zero"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    "lines",
    [
        [
            f"--servers 2 --nics 1 --nic-bandwidth {text}"
            for text in ("100Gb/s", "100Gbps", "100Gbit/s", "12.5GB/s", "0.1Tb/s")
        ]
        + ["--servers 2 --nics 1 --nic-gbps 100"],
        ["--slow-link gpu0-gpu1=5", "--slow-link gpu0-gpu1=40Gb/s"],
    ],
    ids=["NICs", "NVLinks"],
)
def test_options_take_bandwidths_in_bits_and_bytes(done: Done, lines: list[str]) -> None:
    assert len({done(f"plan v100x4 --bound-only {line}").splitlines()[1] for line in lines}) == 1


@pytest.mark.parametrize(
    ("names", "ranges"),
    [
        ([], ()),
        (["gpu0"], ("gpu0",)),
        (["gpu0", "gpu1", "gpu2", "nic0", "nic2"], ("gpu0-2", "nic0,2")),
        (["s0.gpu0", "s0.gpu1", "s1.gpu0", "s1.gpu1", "s3.gpu0", "s3.gpu1"], ("s0,1,3.gpu0,1",)),
        (["s0.gpu0", "s1.gpu1"], ("s0.gpu0", "s1.gpu1")),
        (["gpu1", "gpu01", "x", "x"], ("gpu1", "gpu01", "x", "x")),
        (["9" * 5000, "gpu1"], ("9" * 5000, "gpu1")),
        (["gpu0>switch0", "gpu1>switch0", "gpu2>switch0"], ("gpu0-2>switch0",)),
    ],
)
def test_names_that_differ_in_a_number_are_written_together(
    names: list[str], ranges: tuple[str, ...]
) -> None:
    assert name_ranges(names) == ranges


def test_ranges_of_gpus_are_what_options_read() -> None:
    for chosen in ([3], [0, 1], [0, 1, 2, 5], [7, 6, 5, 1]):
        (text,) = name_ranges(f"gpu{number}" for number in chosen)
        assert parse_gpu_list(text.removeprefix("gpu")) == tuple(chosen)


def test_a_tree_in_brackets_is_the_tree() -> None:
    edges = [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5)]
    names = [f"gpu{rank}" for rank in range(6)]
    for operation, arrow in (("broadcast", ">"), ("reduce", "<")):
        stage = Stage(operation, 0, tuple(Edge(a, b, (names[a], names[b]), "nvlink") for a, b in edges))
        assert bracket_notation(names, stage) == f"gpu0{arrow}(gpu1{arrow}gpu3,4 gpu2{arrow}gpu5)"


@pytest.mark.thorough
def test_a_shell_completes_commands_options_and_machines(done: Done, tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    script = tmp_path / "complete.sh"
    script.write_text(done("completion bash"))
    (tmp_path / "mine.json").touch()

    def completed(*words: str) -> list[str]:
        given = " ".join(f"'{word}'" for word in ("topoplan", *words))
        ask = (
            f"source '{script}'; COMP_WORDS=({given}); COMP_CWORD={len(words)}; _shtab_topoplan; "
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        run = [bash, "-c", ask]
        return subprocess.run(run, capture_output=True, text=True, check=True, cwd=tmp_path).stdout.split()

    assert completed("veri") == ["verify"]
    assert completed("plan", "dgx-1") == ["dgx-1p", "dgx-1v"]
    assert completed("plan", "mi") == ["mi250", "mi250x", "mi300x", "mi60-hive-x4", "mine.json"]
    assert completed("bench", "x.json", "--back") == ["--backend"]
    assert set(COMMANDS) <= set(completed(""))
    assert "_topoplan_machines" in done("completion zsh")
    assert main(["completion", "fish"]) == 2


WIPED = "\r\x1b[K"


def during_progress(body: str) -> str:
    """What is written to a terminal as stderr while lines run inside a progress line."""
    head = "import time\nfrom topoplan.cli.output import progress_line\nwith progress_line('planning') as tell:\n"
    return on_a_terminal("-c", head + "".join(f"    {line}\n" for line in body.splitlines()), stream="stderr")


def test_after_a_second_the_line_shows_what_is_done_and_is_wiped() -> None:
    """First the name of the work, then what the callback was told last; short work writes nothing."""
    seen = during_progress("time.sleep(1.3)\ntell('class 3 of 12')\ntime.sleep(0.4)")
    assert seen.index("planning") < seen.index("[######                  ]  1 s  class 3 of 12")
    assert seen.endswith(WIPED)
    assert during_progress("tell('class 3 of 12')") == ""


@pytest.mark.thorough
def test_the_line_is_wiped_before_an_error_leaves() -> None:
    seen = during_progress("time.sleep(1.2)\nraise SystemExit(0)")
    assert "planning" in seen
    assert seen.endswith(WIPED)


def test_without_a_terminal_there_is_no_callback() -> None:
    with progress_line("planning") as tell:
        assert tell is None


def test_a_bar_is_full_when_all_is_counted_and_never_longer_than_its_frame() -> None:
    assert progress_bar("size 4 of 4", 1).startswith("[########################]")
    for text in ("size 0 of 4", "size 5 of 4", "packing"):
        for tenths in range(100):
            assert progress_bar(text, tenths / 10)[25] == "]"

"""`load`: names, files, stdin and text, recognised by content; bad and damaged sources are one clear line."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import topoplan
from tests.bench.mutations import outcome
from tests.support.machine_links import wire_rates
from tests.support.refusals import refused
from tests.support.text_readers import Reader, readers
from topoplan.errors import TopologyError, TopoplanError, UsageError
from topoplan.machine.library import dgx_1v
from topoplan.reading.load import library_path, load, load_text
from topoplan.units import parse_size

PAIR = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV2\t0-7\nGPU1\tNV2\t X \t0-7\n"


def test_a_name_a_file_and_a_text_give_the_same_machine(tmp_path: Path) -> None:
    text = dgx_1v().to_json()
    path = tmp_path / "without-extension"
    path.write_text(text)
    assert load("dgx-1v") == load(path) == load(str(path)) == load(text) == dgx_1v()


def test_a_matrix_is_recognised_by_content_and_named_after_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mynode.json"
    path.write_text(PAIR)
    assert load(path).name == "mynode"
    assert load(path).gpus == load(PAIR).gpus == ("gpu0", "gpu1")


def test_stdin_is_read_for_a_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, gpus in ((PAIR, 2), (dgx_1v().to_json(), 8)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert len(load("-").gpus) == gpus


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_byte_order_marks_are_understood(encoding: str, tmp_path: Path) -> None:
    """PowerShell redirects output as UTF-16 with a mark."""
    path = tmp_path / "topo.txt"
    path.write_bytes(PAIR.replace("\n", "\r\n").encode(encoding))
    assert load(path).gpus == ("gpu0", "gpu1")


def test_given_rates_replace_the_assumed_ones() -> None:
    machine = load(PAIR, nvlink_gbps=22, pcie_gbps=10)
    assert (wire_rates(machine), wire_rates(machine, "pcie")) == ({22.0}, {10.0})
    assert not any("--nvlink-bandwidth" in note or "--pcie-bandwidth" in note for note in machine.notes)


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_a_rate_must_be_a_finite_number_above_zero(rate: float) -> None:
    with pytest.raises(UsageError, match="nvlink_gbps must be"):
        load(PAIR, nvlink_gbps=rate)
    with pytest.raises(UsageError, match="pcie_gbps must be"):
        load(PAIR, pcie_gbps=rate)


@pytest.mark.parametrize(
    ("name", "near"), [("dgx-1", "dgx-1"), ("dgx1v", "dgx-1v"), ("DGX-2", "dgx-2"), ("dgxa100", "dgx-a100")]
)
def test_an_unknown_name_suggests_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {near}"):
        load(name)


@pytest.mark.parametrize("name", ["", "no/such/file.txt", "x" * 5000, "a\0b", "…"])
def test_a_name_like_nothing_lists_the_library(name: str) -> None:
    with pytest.raises(UsageError, match=r"dgx-1p, dgx-1v"):
        load(name)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b" \n\t\n", "empty"),
        (b"\x7fELF\x02\x01\x01\0\0", "binary"),
        (b"\xff\xfe\0", "binary"),
        (b"\x89PNG\r\n\x1a\n", "binary"),
        (b'<system version="1">\n</system>', "no pci element"),
        (b"hello\nworld\n", "GPU0"),
        (b'{"format": "topoplan.plan/1"}', "a plan, not a machine"),
        (b'{"format": "topoplan.topology/9"}', "topoplan.topology/9"),
    ],
)
def test_a_file_that_is_no_machine_is_refused_in_one_line_with_its_name(
    content: bytes, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "topo.txt"
    path.write_bytes(content)
    with refused(TopologyError, says, begins=str(path)):
        load(path)
    with refused(UsageError, "cannot be read"):
        load(tmp_path)


def test_the_library_is_found_inside_an_installed_package(tmp_path: Path) -> None:
    """Laid out as the wheel lays it out, with no checkout around it, the package finds its machines."""
    package = Path(topoplan.__file__).parent
    shutil.copytree(package, tmp_path / "topoplan", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(str(library_path()), tmp_path / "topoplan" / "topologies", dirs_exist_ok=True)
    code = (
        "from topoplan.reading.load import library_path, load; "
        "print(library_path()); print(load('dgx-2').links[0].bandwidth)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    out = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, env=environment, text=True)
    assert out.split() == [str(tmp_path / "topoplan" / "topologies"), "150.0"]


@pytest.mark.sampled
@pytest.mark.parametrize("reader", readers(), ids=lambda reader: reader.name)
@pytest.mark.parametrize("number", [5, pytest.param(200, marks=pytest.mark.thorough)])
def test_damaged_texts_leave_no_traceback(reader: Reader, number: int) -> None:
    """The same texts in every run; whole ones are taken, so that a mutation damages something."""
    for text in reader.texts:
        reader.read(text)
    assert outcome(reader, range(number)).tracebacks == {}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("read", "start", "repeated", "end"),
    [
        (parse_size, "0", " ", "x"),
        (parse_size, "1", "0", "x"),
        (load_text, "GPU 0: V100\nLink 0: Remote Device 25", ":", ""),
        (load_text, "GPU 0: V100\nLink 0: a", ".a:", ""),
        (load_text, "GPU 0: V100", "(UUID:", "\nLink 0: 25 GB/s"),
        (load_text, "GPU type: H100", " ", "x\n\tGPU0\tGPU1\nGPU0\t X \tNV1\nGPU1\tNV1\t X \n"),
    ],
)
def test_a_long_run_of_one_sign_is_read_in_one_pass(
    read: Callable[[str], object], start: str, repeated: str, end: str
) -> None:
    """A pattern that tries again at each sign of a run would take minutes here."""
    with suppress(TopoplanError):
        read(start + repeated * 200_000 + end)

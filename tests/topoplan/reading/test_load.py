"""`load`: names, files, stdin and text, recognised by content; and every bad source is one clear line."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import topoplan
from topoplan.errors import TopologyError, UsageError
from topoplan.machine.library import dgx_1v
from topoplan.reading.load import library_path, load

PAIR = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV2\t0-7\nGPU1\tNV2\t X \t0-7\n"


def rates(machine: topoplan.Topology, channel: str) -> set[float]:
    return {link.bandwidth / link.count for link in machine.links if link.channel == channel}


def test_a_name_a_file_and_a_text_give_the_same_machine(tmp_path: Path) -> None:
    """The same description by three roads."""
    text = dgx_1v().to_json()
    path = tmp_path / "without-extension"
    path.write_text(text)
    assert load("dgx-1v") == load(path) == load(str(path)) == load(text) == dgx_1v()


def test_a_matrix_is_recognised_by_content_and_named_after_its_file(tmp_path: Path) -> None:
    """Neither the extension nor the folder matters."""
    path = tmp_path / "mynode.json"
    path.write_text(PAIR)
    assert load(path).name == "mynode"
    assert load(path).gpus == load(PAIR).gpus == ("gpu0", "gpu1")


def test_stdin_is_read_for_a_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both formats may come through a pipe."""
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
    """With both given, no note is left about them."""
    machine = load(PAIR, nvlink_gbps=22, pcie_gbps=10)
    assert rates(machine, "nvlink") == {22.0}
    assert rates(machine, "pcie") == {10.0}
    assert not any("--nvlink-gbps" in note or "--pcie-gbps" in note for note in machine.notes)


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_a_rate_must_be_a_finite_number_above_zero(rate: float) -> None:
    """The message names the option and the value."""
    with pytest.raises(UsageError, match="--nvlink-gbps"):
        load(PAIR, nvlink_gbps=rate)
    with pytest.raises(UsageError, match="--pcie-gbps"):
        load(PAIR, pcie_gbps=rate)


@pytest.mark.parametrize(
    ("name", "near"), [("dgx-1", "dgx-1"), ("dgx1v", "dgx-1v"), ("DGX-2", "dgx-2"), ("dgxa100", "dgx-a100")]
)
def test_an_unknown_name_suggests_the_nearest(name: str, near: str) -> None:
    """A slip of the keyboard is answered with the name that was meant."""
    with pytest.raises(UsageError, match=f"did you mean {near}"):
        load(name)


@pytest.mark.parametrize("name", ["", "no/such/file.txt", "x" * 5000, "a\0b", "…"])
def test_a_name_like_nothing_lists_the_library(name: str) -> None:
    """However odd it is."""
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
    """Empty, binary, XML, prose and other formats."""
    path = tmp_path / "topo.txt"
    path.write_bytes(content)
    with pytest.raises(TopologyError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert says in message
    assert "\n" not in message


def test_a_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    """It exists, but it cannot be read as a file."""
    with pytest.raises(UsageError, match="cannot be read"):
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
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(tmp_path / "topoplan" / "topologies"), "150.0"]

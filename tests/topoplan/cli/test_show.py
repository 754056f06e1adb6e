"""``topoplan show`` in text: the matrix like nvidia-smi's, the tree of devices, the links, warnings before notes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import topoplan
from tests.support.checkout import Done
from tests.support.listings import MATRICES, each
from tests.support.small_machines import CABLED
from topoplan.cli.device_tree import device_tree_text, links_in_tree
from topoplan.cli.output import MAX_COLUMNS
from topoplan.cli.show import matrix_text
from topoplan.machine.topology import Device, Link, Topology, facts
from topoplan.reading.load import library

EACH_MACHINE = pytest.mark.parametrize(
    "machine", [*(name for name in library() if name not in CABLED), *each(MATRICES)]
)


def printed_rows(text: str) -> dict[str, list[str]]:
    """Cells of each row of the matrix, blocks of columns put together."""
    rows: dict[str, list[str]] = {}
    for block in text.split("Legend:")[0].split("\n\n"):
        for line in block.splitlines():
            words = line.split()
            if re.match(r"(s\d\.)?(gpu|nic)\d", line):
                rows[words[0]] = rows.get(words[0], []) + words[1:]
    return {name: row for name, row in rows.items() if "X" in row}


def tree_edges(text: str) -> dict[str, tuple[str, str]]:
    """Device above and PCIe GB/s of each device of a printed tree, host bridges left out."""
    lines = text.splitlines()
    width = lines[0].index("PCIe GB/s") + len("PCIe GB/s")
    edges: dict[str, tuple[str, str]] = {}
    stack: list[tuple[int, str]] = []
    for line in lines[1:]:
        lead = re.match(r"[|` -]*", line)[0]  # type: ignore[index]
        name = line[len(lead) :].split("  ")[0].strip()
        stack = [(depth, above) for depth, above in stack if depth < len(lead)]
        devices = [above for _, above in stack if not above.startswith("host bridge")]
        stack.append((len(lead), name))
        if devices:
            edges[name] = (devices[-1], line[:width].split()[-1])
    return edges


def test_dgx1_prints_the_genuine_text(done: Done, machines_dir: Path) -> None:
    """Read from the real text of a DGX-1V, what is printed has its cells and CPU affinity, row for row."""
    path = machines_dir / "nvidia-smi" / "dgx1_v100.txt"
    lines = [line.split() for line in path.read_text().splitlines()]
    genuine = [row[1:] for row in lines if row and re.fullmatch(r"GPU\d+|mlx\S+", row[0]) and "X" in row]
    out = done(f"show {path} --all")
    assert list(printed_rows(out).values()) == genuine
    assert "NIC legend:\n  nic0: mlx5_0\n  nic1: mlx5_2\n  nic2: mlx5_1\n  nic3: mlx5_3\n" in out


@EACH_MACHINE
def test_matrix_and_tree_fit_a_screen_and_have_every_device_once(machine: str | Path) -> None:
    """120 characters hold 16 GPUs with 4 NICs in one block, more stand in several; the tree needs less."""
    made = topoplan.load(machine)
    matrix = matrix_text(made, ("gpu", "nic"))
    assert max(map(len, matrix.splitlines())) <= MAX_COLUMNS
    if sum(device.kind in ("gpu", "nic") for device in made.devices) <= 20:
        assert matrix.split("\n\nLegend")[0].count("\n\n") == 0
    tree = device_tree_text(made).splitlines()
    assert max(map(len, tree)) <= 120
    names = [re.sub(r"^[|` -]*", "", line).split()[0] for line in tree[1:]]
    assert sorted(name for name in names if name != "host") == sorted(device.name for device in made.devices)


def test_a_matrix_of_many_gpus_is_printed_in_blocks() -> None:
    names = [f"gpu{i}" for i in range(40)]
    links = [Link(*ends, "nvlink", 1.0) for name in names for ends in ((name, "s"), ("s", name))]
    devices = [Device(name, "gpu") for name in names]
    text = matrix_text(Topology("made", (*devices, Device("s", "nvswitch")), tuple(links)), ["gpu"])
    assert max(map(len, text.splitlines())) <= MAX_COLUMNS
    rows = printed_rows(text)
    assert {name: len(row) for name, row in rows.items()} == dict.fromkeys(names, 40)
    assert all(rows[names[i]][i] == "X" for i in range(40))


@EACH_MACHINE
def test_tree_and_table_show_every_link_once(done: Done, machine: str | Path) -> None:
    """PCIe links are edges of the tree with their bandwidth; all others are rows of the table or told of a GPU."""
    made = topoplan.load(machine)
    text = done("show", str(machine), "--all")
    told = links_in_tree(made)
    edges = tree_edges(device_tree_text(made))
    words = [line.split() for line in text.splitlines()]
    table = {(row[0], row[2], row[3]) for row in words if len(row) >= 6 and row[1] == "<->"}
    for link in made.links:
        key, back = (link.src, link.dst, link.channel), (link.dst, link.src, link.channel)
        assert (key in told) != bool({key, back} & table)
        if link.channel == "pcie" and key in told:
            below, above = (
                (link.src, link.dst) if link.src in edges and edges[link.src][0] == link.dst else key[1::-1]
            )
            assert edges[below] == (above, f"{link.bandwidth:g}")


def test_push_and_pull_are_shown_where_they_differ(done: Done, tmp_path: Path) -> None:
    """In both forms; links that differ in them alone have a row each."""
    ends, path = (("gpu0", "gpu1"), ("gpu1", "gpu0")), tmp_path / "box.json"
    gpus = tuple(Device(f"gpu{number}", "gpu") for number in range(2))
    links = [Link(*one, "pcie", 52, push=push, pull=52) for one, push in zip(ends, (2.6, None), strict=True)]
    path.write_text(Topology("box", gpus, tuple(links)).to_json())
    rows = [
        "access  push 2.6, pull 52 (GB/s): gpu0>gpu1",
        "access  push never ends, pull 52 (GB/s): gpu1>gpu0",
    ]
    assert set(rows) <= {re.sub(" {3,}", "  ", line) for line in done("show", str(path)).splitlines()}
    assert done("show", str(path), "--all").splitlines()[-3:] == [
        "from      to    channel  count  GB/s  GB/s of each access",
        "gpu0  ->  gpu1  pcie         1    52  push 2.6, pull 52",
        "gpu1  ->  gpu0  pcie         1    52  push never ends, pull 52",
    ]


def test_tree_of_a_known_server() -> None:
    """Bus ids, host bridges, NVLinks to GPUs and to a CPU, unequal directions, speeds of NICs, unknown facts."""
    first = facts(host_bridge="pci0000:00", sm=70)
    second = facts(host_bridge="pci0000:00", lanes=8)
    devices = (
        Device("gpu0", "gpu", model="V100", busid="0000:06:00.0", facts=first),
        Device("gpu1", "gpu", model="V100", busid="0000:07:00.0", facts=second),
        Device("pcie0", "pcie", busid="0000:05:00.0"),
        Device("cpu0", "cpu", model="Xeon", numa=0, facts=facts(cpus="0-19")),
        Device("nic0", "nic", facts=facts(adapter="mlx5_0", gigabits=100, host_bridge="pci0000:80")),
        Device("gpu2", "gpu", numa=3),
    )
    on_pcie = (("gpu0", "pcie0"), ("nic0", "cpu0"), ("pcie0", "cpu0"))
    both = [(*ends, "pcie", 12.0, 1) for ends in on_pcie]
    both += [("gpu0", "gpu1", "nvlink", 50.0, 2), ("gpu0", "cpu0", "nvlink", 75.0, 3)]
    links = [Link(*ends, channel, rate, n) for a, b, channel, rate, n in both for ends in ((a, b), (b, a))]
    links += [Link("gpu1", "pcie0", "pcie", 6.0), Link("pcie0", "gpu1", "pcie", 12.0)]
    made = Topology("made", devices, tuple(links))
    assert [re.sub(r"  +", "  ", line) for line in device_tree_text(made).splitlines()] == [
        "device  bus id  PCIe GB/s  NVLink  what",
        "cpu0  3 links to gpu0, 75 GB/s  Xeon, NUMA 0, CPUs 0-19",
        "|-host bridge pci0000:00",
        "| `-pcie0  0000:05:00.0  12",
        "|  |-gpu0  0000:06:00.0  12  2 links to gpu1, 50 GB/s; 3 links to cpu0, 75 GB/s  V100, sm 70",
        "|  `-gpu1  0000:07:00.0  6/12  2 links to gpu0, 50 GB/s  V100, lanes 8",
        "`-host bridge pci0000:80",
        "  `-nic0  12  mlx5_0, 100 Gb/s",
        "gpu2  NUMA 3",
    ]
    # What is slower one way, and what joins a GPU to another or to a CPU, is told by the table.
    assert {frozenset(key[:2]) for key in links_in_tree(made)} == set(map(frozenset, on_pcie))


def test_a_long_chain_of_switches_is_shown() -> None:
    names = ["cpu0", *(f"pcie{i}" for i in range(3000)), "gpu0"]
    kinds = ["cpu", *["pcie"] * 3000, "gpu"]
    wires = [pair for a, b in pairwise(names) for pair in ((a, b), (b, a))]
    devices = tuple(map(Device, names, kinds))
    made = Topology("deep", devices, tuple(Link(*ends, "pcie", 12.0) for ends in wires))
    assert len(device_tree_text(made).splitlines()) == 3003


def test_warnings_come_before_notes_everywhere(done: Done) -> None:
    """A note of the machine that begins with ``warning: `` is printed so by every command."""
    text = "warning: gpu3: PCIe link runs at x8, its maximum is x16"
    machine = replace(topoplan.load("v100x4"), notes=("first of all", text))
    plan = topoplan.plan(machine).to_json()
    for command in ("show", "plan", "compare", "simulate", "verify", "bench --sizes 1KB"):
        stdin = plan if command.startswith(("verify", "bench")) else machine.to_json()
        lines = done(f"{command} - --notes", stdin=stdin).splitlines()
        assert lines.count(text) == 1, command
        assert lines.index(text) < lines.index("note: first of all"), command


def test_what_a_file_says_moves_no_terminal(done: Done) -> None:
    """Texts of topology JSON are anybody's: an escape in a model, fact, note or source is shown as ?."""
    evil = "V100\n\x1b[31m\u202e"
    machine = topoplan.load("dgx-1v")
    devices = tuple(
        replace(one, model=evil, busid=one.busid + evil, facts=facts(adapter=evil, host_bridge=evil))
        for one in machine.devices
    )
    notes = (f"warning: {evil}", evil)
    made = replace(machine, name="m" + evil, devices=devices, source=evil, notes=notes)
    lines = done("show - --all --notes", stdin=made.to_json()).split("\n")
    assert all(line.isprintable() for line in lines)
    assert lines[-3:] == ["warning: V100 ?[31m?", "note: V100 ?[31m?", ""]
    assert lines[-4] == "source: V100 ?[31m?"


def test_show_prints_what_it_finds_amiss(done: Done) -> None:
    """A dead and a slow link, which --json leaves out: it prints the machine; a sound one has no warning."""
    assert "warning" not in done("show dgx-1v")
    out = done("show dgx-1v --without-link gpu0-gpu3 --slow-link gpu1-gpu2=12.5")
    assert [line for line in out.splitlines() if line.startswith("warning: ")] == [
        "warning: gpu0-gpu3: no NVLink, should be 2 NVLinks of 25 GB/s",
        "warning: gpu1-gpu2: 2 NVLinks of 6.25 GB/s, should be 2 NVLinks of 25 GB/s",
    ]
    assert topoplan.load(done("show dgx-h100 --json")) == topoplan.load("dgx-h100")
    out = done("show dgx-1v --without-link gpu0-gpu3 --json")
    assert json.loads(out)["notes"] == ["taken out: link gpu0-gpu3"]


@pytest.mark.parametrize("model", ["ConnectX-6 200 Gb/s", "ConnectX-6"])
def test_the_speed_of_a_nic_is_said_once(model: str) -> None:
    """Some sources put it into the model, the probe too."""
    nic = Device("nic0", "nic", "s0", model, facts=facts(adapter="mlx5_0", gigabits=200))
    assert device_tree_text(Topology("one", (nic,), ())).count("200 Gb/s") == 1

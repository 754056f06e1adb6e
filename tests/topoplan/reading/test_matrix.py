"""The connection matrix: equal to the genuine text of nvidia-smi, and to what is known of hand-made machines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.listings import EACH_MATRIX
from topoplan.machine.topology import Device, Link, Topology, facts
from topoplan.reading.load import library
from topoplan.reading.pcie_tree import affinity_columns, nvlinks_of_pairs, relation_matrix

ESCAPE = re.compile(r"\x1b\[[0-9;]*m|\[\d?m")

OLD = {"SOC": "SYS", "PSB": "PIX"}
"""Codes of older drivers."""


def genuine(path: Path) -> tuple[list[str], dict[str, list[str]]]:
    """Columns after the first, and cells of each row, by a reader that knows nothing of the package's own."""
    lines = [ESCAPE.sub("", line) for line in path.read_text().splitlines() if not line.startswith("#")]
    heads = [re.findall(r"GPU\d+|NIC\d+|mlx\d_(?:bond_)?\d+", line) for line in lines]
    header = next(head for head in heads if "GPU0" in head)
    rows = {words[0]: words[1:] for words in map(str.split, lines) if words and words[0] in header}
    return header, {name: [OLD.get(cell, cell) for cell in row] for name, row in rows.items() if "X" in row}


def contradicted(stem: str, row: str, column: str) -> bool:
    """Cells that cannot come back, because the text says something else elsewhere.

    ``hgx_h100x8``: the firmware prints SYS between every two devices that share no switch, but GPUs 0 to 3 have one CPU
    affinity and one NUMA node, and so have 4 to 7; a note says that SYS is read as NODE among these and their NICs.
    """
    first = {*(f"GPU{i}" for i in range(4)), *(f"NIC{i}" for i in (0, 1, 2, 5))}
    second = {*(f"GPU{i}" for i in range(4, 8)), *(f"NIC{i}" for i in range(6, 10))}
    return stem == "hgx_h100x8" and any({row, column} <= half for half in (first, second))


def machine(kinds: dict[str, str], links: list[tuple[str, str, str, int]]) -> Topology:
    """A machine whose links have the same count both ways, 1 GB/s for each wire."""
    both = [link for a, b, channel, n in links for link in ((a, b, channel, n), (b, a, channel, n))]
    return Topology(
        "made",
        tuple(Device(name, kind) for name, kind in kinds.items()),
        tuple(Link(a, b, channel, float(n), n) for a, b, channel, n in both),
    )


def cells(topology: Topology) -> dict[tuple[str, str], str]:
    """The matrix as a dictionary."""
    names, rows = relation_matrix(topology)
    return {
        (a, b): code for a, row in zip(names, rows, strict=True) for b, code in zip(names, row, strict=True)
    }


@EACH_MATRIX
def test_real_matrices_come_back_cell_for_cell(path: Path) -> None:
    """Every cell of every real text, but for those where the text contradicts itself, which are read as NODE."""
    header, text = genuine(path)
    made = topoplan.load(path)
    shown = cells(made)
    nics = iter([device.name for device in made.devices if device.kind == "nic"])
    ours = {name: name.lower() if name.startswith("GPU") else next(nics) for name in header}
    for name, row in text.items():
        for column, code in zip(header, row, strict=False):
            if contradicted(path.stem, name, column) and code == "SYS":
                assert shown[ours[name], ours[column]] == "NODE"
            else:
                assert shown[ours[name], ours[column]] == code, (name, column)


@EACH_MATRIX
def test_affinity_of_real_matrices_comes_back(path: Path) -> None:
    """CPU affinity of every GPU row, and NUMA affinity where the text states one."""
    header, text = genuine(path)
    made = topoplan.load(path)
    columns = affinity_columns(made, made.gpus)
    for number, row in enumerate(text[f"GPU{i}"] for i in range(len(made.gpus)) if f"GPU{i}" in text):
        cpus, numa, *_ = [*row[len(header) :], "N/A", "N/A"]
        assert columns["CPU Affinity"][number] == cpus
        assert columns.get("NUMA", [""] * len(made.gpus))[number] == numa.replace("N/A", "")


@pytest.mark.sampled
@pytest.mark.parametrize("name", library())
def test_library_matrices_are_symmetric(name: str) -> None:
    """Library machines look the same from both ends, and X stands on the diagonal alone."""
    shown = cells(topoplan.load(name))
    assert all(shown[b, a] == code and (code == "X") == (a == b) for (a, b), code in shown.items())


def test_planes_of_switches_add_up() -> None:
    """Two switches reached with 3 and 2 links make NV5; joined switches count once, by the thinner side."""
    kinds = {"a": "gpu", "b": "gpu", "s": "nvswitch", "t": "nvswitch"}
    planes = machine(kinds, [(g, s, "nvlink", n) for g in "ab" for s, n in (("s", 3), ("t", 2))])
    assert cells(planes)["a", "b"] == "NV5"
    two_levels = machine(kinds, [("a", "s", "nvlink", 6), ("b", "t", "nvlink", 4), ("s", "t", "nvlink", 9)])
    assert cells(two_levels)["a", "b"] == cells(two_levels)["b", "a"] == "NV4"


def test_pcie_codes() -> None:
    """One switch is PIX, a cascade PXB, one CPU PHB, two CPUs SYS; without wires there is no path."""
    kinds = dict.fromkeys("abcdef", "gpu") | {"p": "pcie", "q": "pcie", "k": "cpu", "l": "cpu"}
    wires = [("a", "p"), ("b", "p"), ("p", "q"), ("c", "q"), ("q", "k"), ("d", "k"), ("e", "l")]
    made = machine(kinds, [(a, b, "pcie", 1) for a, b in wires] + [("k", "l", "sys", 1)])
    shown = cells(made)
    wanted = {"ab": "PIX", "ac": "PXB", "ad": "PHB", "ae": "SYS", "af": "-", "de": "SYS", "cd": "PHB"}
    assert {pair: shown[pair[0], pair[1]] for pair in wanted} == wanted


def test_host_bridges_tell_node_from_phb() -> None:
    """Of one CPU: the same host bridge is PHB, another NODE, an unknown one PHB; another NUMA node is SYS."""
    known = {"a": ("p0", 0), "b": ("p0", 0), "c": ("p1", 0), "d": ("", 0), "e": ("p1", 1), "f": ("p0", None)}
    devices = [
        Device(name, "gpu", numa=numa, facts=facts(host_bridge=p)) for name, (p, numa) in known.items()
    ]
    links = [Link(*ends, "pcie", 1.0) for name in known for ends in ((name, "k"), ("k", name))]
    shown = cells(Topology("made", (*devices, Device("k", "cpu")), tuple(links)))
    wanted = {"ab": "PHB", "ac": "NODE", "ad": "PHB", "ae": "SYS", "ce": "SYS", "af": "PHB", "cf": "NODE"}
    assert {pair: shown[pair[0], pair[1]] for pair in wanted} == wanted


@settings(max_examples=40)
@given(st.lists(st.tuples(*[st.integers(0, 1)] * 4), min_size=2, max_size=8))
def test_any_text_without_lone_switches_comes_back(places: list[tuple[int, int, int, int]]) -> None:
    """CPU, host bridge, cascade and switch of each device, two devices at every place: all codes are printed again."""
    names = [f"GPU{i}" for i in range(len(places))] + [f"NIC{i}" for i in range(len(places))]
    place = dict(zip(names, [*places, *places], strict=True))

    def code(first: str, second: str) -> str:
        if first == second:
            return "X"
        same = [a == b for a, b in zip(place[first], place[second], strict=True)]
        return ("SYS", "NODE", "PHB", "PXB", "PIX")[(*same, False).index(False)]

    lines = [" ".join(names)] + [" ".join([row, *(code(row, column) for column in names)]) for row in names]
    shown = cells(topoplan.load("\n".join(lines)))
    assert list(shown.values()) == [code(row, column) for row in names for column in names]


@pytest.mark.parametrize("switched", [True, False])
def test_other_servers_are_behind_the_network(switched: bool) -> None:
    """GPUs and NICs of two servers see each other as NET, through a switch or cable to cable."""
    kinds = {"a": "gpu", "b": "gpu", "m": "nic", "n": "nic"} | ({"s": "switch"} if switched else {})
    cables = [("m", "s"), ("s", "n")] if switched else [("m", "n")]
    wires = [("a", "m", "pcie", 1), ("b", "n", "pcie", 1), *((x, y, "network", 1) for x, y in cables)]
    shown = cells(machine(kinds, wires))
    assert {shown["a", "b"], shown["m", "n"], shown["a", "n"]} == {"NET"}
    assert shown["a", "m"] == "PIX"


@given(
    st.lists(
        st.tuples(st.sampled_from("abcst"), st.sampled_from("abcst"), st.integers(1, 9)),
        unique_by=lambda link: link[:2],
    )
)
def test_one_way_links_count_one_way(links: list[tuple[str, str, int]]) -> None:
    """NV# never exceeds what leaves the one GPU or enters the other, and direct links count in full."""
    wires = {(a, b): n for a, b, n in links if a != b}
    devices = tuple(Device(name, "gpu" if name in "abc" else "nvswitch") for name in "abcst")
    made = Topology("made", devices, tuple(Link(a, b, "nvlink", 1.0, n) for (a, b), n in wires.items()))
    for (a, b), count in nvlinks_of_pairs(made).items():
        assert wires.get((a, b), 0) <= count
        assert count <= sum(n for (src, _), n in wires.items() if src == a)
        assert count <= sum(n for (_, dst), n in wires.items() if dst == b)

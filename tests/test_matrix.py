"""The connection matrix: equal to the genuine text of nvidia-smi, and to what is known of hand-made machines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import MACHINES
from hypothesis import given
from hypothesis import strategies as st

import topoplan
from topoplan.formats.load import library
from topoplan.formats.matrix import nvlink_counts, relation_matrix
from topoplan.topology import Device, Link, Topology

MATRICES = sorted(path for path in (MACHINES / "nvidia-smi").glob("*.txt") if ".nvlink." not in path.name)
ABSENT = pytest.mark.skip(reason="no machine descriptions: set TOPOPLAN_MACHINES to their folder")
EACH_MATRIX = pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem) for path in MATRICES] or [pytest.param(None, marks=ABSENT)]
)

ESCAPE = re.compile(r"\x1b\[[0-9;]*m|\[\d?m")

SAME = {"NODE": "PHB", "SOC": "SYS"}
"""Codes that the model does not tell apart, or that are old names: a root port of its own limits nothing."""

OVERRULED = {"hgx_h100x8": ("SYS", "PHB")}
"""Firmware without NUMA nodes prints SYS everywhere; the reader says in a note what it made of it."""


def genuine_rows(text: str) -> dict[str, list[str]]:
    """Codes of each GPU row, by a reader that knows nothing of the package's own."""
    lines = (ESCAPE.sub("", line).split() for line in text.splitlines() if not line.startswith("#"))
    return {words[0]: words[1:] for words in lines if re.fullmatch(r"GPU\d+", words[0] if words else "")}


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


def test_dgx1_gpu_block_is_the_genuine_text(machines_dir: Path) -> None:
    """All 64 cells between the GPUs of the DGX-1V equal its genuine nvidia-smi text, letter by letter."""
    path = machines_dir / "nvidia-smi" / "dgx1_v100.txt"
    genuine = genuine_rows(path.read_text())
    for made in (topoplan.load(path), topoplan.load("dgx-1v")):
        _, rows = relation_matrix(made)
        assert [list(row[:8]) for row in rows[:8]] == [genuine[f"GPU{i}"][:8] for i in range(8)]


@EACH_MATRIX
def test_gpu_blocks_are_the_genuine_text(path: Path) -> None:
    """Between GPUs every real matrix comes back as it was printed; NODE is shown as PHB."""
    made = topoplan.load(path)
    shown = cells(made)
    for name, codes in genuine_rows(path.read_text()).items():
        for other, code in zip(made.gpus, codes, strict=False):
            assert shown[name.lower(), other] == SAME.get(code, code), (name, other)


@EACH_MATRIX
def test_nic_columns_are_the_genuine_text(path: Path) -> None:
    """GPU to NIC likewise, but for the machine whose firmware knows no NUMA nodes."""
    made = topoplan.load(path)
    nics = [device.name for device in made.devices if device.kind == "nic"]
    shown = cells(made)
    for name, codes in genuine_rows(path.read_text()).items():
        for nic, code in zip(nics, codes[len(made.gpus) :], strict=False):
            pair = (SAME.get(code, code), shown[name.lower(), nic])
            assert pair[0] == pair[1] or pair == OVERRULED.get(path.stem), (name, nic)


@pytest.mark.parametrize("name", library())
def test_library_matrices_are_symmetric(name: str) -> None:
    """Library machines look the same from both ends, and X stands on the diagonal alone."""
    shown = cells(topoplan.load(name))
    assert all(shown[b, a] == code and (code == "X") == (a == b) for (a, b), code in shown.items())


@pytest.mark.parametrize(("name", "links"), [("dgx-1p", 4), ("dgx-1v", 6), ("nvlink-x4", 12), ("pcie-x8", 0)])
def test_rows_add_up_to_the_links_of_a_gpu(name: str, links: int) -> None:
    """NV# of a row adds up to the NVLinks of the GPU, where links are direct."""
    made = topoplan.load(name)
    counts = nvlink_counts(made)
    assert {sum(counts[gpu, other] for other in made.gpus) for gpu in made.gpus} == {links}


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


def test_no_path_leads_through_a_gpu() -> None:
    """A GPU forwards nothing, so what hangs behind one is out of reach."""
    shown = cells(
        machine({"a": "gpu", "b": "gpu", "n": "nic"}, [("a", "b", "pcie", 1), ("b", "n", "pcie", 1)])
    )
    assert (shown["b", "n"], shown["a", "n"]) == ("PIX", "-")


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
    for (a, b), count in nvlink_counts(made).items():
        assert wires.get((a, b), 0) <= count
        assert count <= sum(n for (src, _), n in wires.items() if src == a)
        assert count <= sum(n for (_, dst), n in wires.items() if dst == b)

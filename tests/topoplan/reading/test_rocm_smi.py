"""Tables of rocm-smi and amd-smi: what they tell of Infinity Fabric, what they do not, and what is damaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import topoplan
from tests.support.listings import MACHINES, each
from tests.support.machine_links import bundles
from topoplan.errors import TopologyError, UsageError
from topoplan.operate.diagnosis import diagnose

Cell = Callable[[int, int], object]

TITLES = {
    "weight": "Weight between two GPUs",
    "hops": "Hops between two GPUs",
    "type": "Link Type between two GPUs",
    "bandwidth": "Bandwidth between two GPUs",
}


def table(heads: Sequence[str], cell: Cell, itself: str = "0") -> list[str]:
    rows = [
        " ".join([head, *(itself if i == j else str(cell(i, j)) for j in range(len(heads)))])
        for i, head in enumerate(heads)
    ]
    return ["  ".join(["     ", *heads]), *rows, ""]


def showtopo(gpus: int, *, numa: Sequence[int] = (), **cells: Cell) -> str:
    """What rocm-smi --showtopo prints, with the tables that are given."""
    lines = ["", f"{' ROCm System Management Interface ':=^90}"]
    for key, cell in cells.items():
        lines += [f"{' ' + TITLES[key] + ' ':=^90}", *table([f"GPU{i}" for i in range(gpus)], cell)]
    lines.append(f"{' Numa Nodes ':=^90}")
    for i, node in enumerate(numa):
        lines += [f"GPU[{i}]\t\t: (Topology) Numa {word}: {node}" for word in ("Node", "Affinity")]
    return "\n".join([*lines, f"{' End of ROCm SMI Log ':=^90}"])


def amd_smi(ids: Sequence[str], **cells: Cell) -> str:
    """What amd-smi topology prints."""
    titles = {"access": "ACCESS", "weight": "WEIGHT", "type": "LINK TYPE"}
    itself = {"access": "ENABLED", "weight": "0", "type": "SELF"}
    lines = []
    for key, cell in cells.items():
        lines += [f"{titles[key]} TABLE:", *table(ids, cell, itself[key])]
    lines += ["CACHE COHERANCY TABLE:", *table(ids, lambda i, j: "NC", "SELF")]
    return "\n".join([*lines, "Legend:", " SELF = x"])


def wires(name: str) -> Cell:
    """Links of Infinity Fabric between two GPUs of a library machine."""
    counts = {ends: count for ends, (count, _) in bundles(topoplan.load(name)).items()}
    return lambda i, j: counts.get((f"gpu{i}", f"gpu{j}"), 0)


X250 = wires("mi250x")


def test_bandwidths_tell_the_links_of_an_mi250x() -> None:
    """50, 100 and 200 GB/s are one, two and four links; all pairs are one hop, also those that no link joins."""
    text = showtopo(
        8,
        hops=lambda i, j: 1,
        type=lambda i, j: "XGMI",
        bandwidth=lambda i, j: f"{50000 if X250(i, j) else 0}-{50000 * int(str(X250(i, j)))}",
    )
    assert bundles(topoplan.load(text)) == bundles(topoplan.load("mi250x"))


def weights(gpus: int, joined: Callable[[int, int], object]) -> str:
    """A listing of weights and link types alone."""
    return showtopo(gpus, weight=lambda i, j: 15 if joined(i, j) else 30, type=lambda i, j: "XGMI")


def test_weights_tell_neighbours() -> None:
    """15 is one link, 30 are two on the way; how many join a pair is assumed, and said."""
    ring = weights(8, lambda i, j: (i - j) % 8 in (1, 7))
    machine = topoplan.load(ring)
    assert set(bundles(machine)) == {(f"gpu{i}", f"gpu{(i + k) % 8}") for i in range(8) for k in (1, 7)}
    assert set(bundles(machine).values()) == {(1, 50.0)}
    assert any("one assumed" in note for note in machine.notes)
    assert set(bundles(topoplan.load(ring, nvlink_gbps=64)).values()) == {(1, 64.0)}


def test_neighbours_of_a_known_machine_alone_have_its_links() -> None:
    """The MI250X of Frontier and the MI250 of 16 dies, with 1, 2 and 4 links; a mesh of eight belongs to several."""
    for name, gpus in (("mi250x", 8), ("mi250", 16)):
        ties = bundles(topoplan.load(name))
        text = weights(gpus, lambda i, j, ties=ties: (f"gpu{i}", f"gpu{j}") in ties)  # type: ignore[misc]
        machine = topoplan.load(text)
        assert bundles(machine) == ties
        assert any(f"neighbours are those of {name}, whose links are taken" in note for note in machine.notes)
        assert diagnose(machine).resembles == name
        slower = bundles(topoplan.load(text, nvlink_gbps=40))
        assert slower == {pair: (count, 40.0 * count) for pair, (count, _) in ties.items()}
    mesh = topoplan.load(weights(8, lambda i, j: True))
    assert set(bundles(mesh).values()) == {(1, 50.0)}


def test_neighbours_that_are_numbered_otherwise_are_known_only_if_the_links_follow() -> None:
    """Of 16 renumberings of the MI250X some move the pairs of 4 links: one link each is assumed, and said."""
    turned = weights(8, lambda i, j: X250((i + 3) % 8, (j + 3) % 8))
    assert set(bundles(topoplan.load(turned)).values()) == {(1, 50.0)}


@pytest.mark.parametrize("weight", [0, 7])
def test_where_neither_tells_the_machine_is_asked_for(weight: int) -> None:
    """No full mesh is drawn in silence; with the machine named, its links are taken."""
    cells: dict[str, Cell] = {"weight": lambda i, j: weight, "bandwidth": lambda i, j: "0-0"}
    text = showtopo(8, hops=lambda i, j: 1, type=lambda i, j: "XGMI", **cells)
    with pytest.raises(TopologyError, match="--merge mi250x"):
        topoplan.load(text)
    assert bundles(topoplan.load(text, merge="mi250x")) == bundles(topoplan.load("mi250x"))
    with pytest.raises(UsageError, match="16"):
        topoplan.load(text, merge="mi250")


def test_a_link_that_is_gone_is_found() -> None:
    """Of the MI250X by its bandwidths; of eight GPUs that are joined all to all by one weight of two hops."""

    def width(i: int, j: int) -> str:
        return f"0-{50000 * int(str(X250(i, j))) if {i, j} != {2, 4} else 0}"

    gone = diagnose(topoplan.load(showtopo(8, type=lambda i, j: "XGMI", bandwidth=width)))
    assert (gone.resembles, [fault.devices for fault in gone.faults]) == ("mi250x", [("gpu2", "gpu4")])
    far = showtopo(8, weight=lambda i, j: 30 if {i, j} == {0, 5} else 15, type=lambda i, j: "XGMI")
    assert [fault.devices for fault in diagnose(topoplan.load(far)).faults] == [("gpu0", "gpu5")]


def test_numa_nodes_place_the_gpus() -> None:
    """Two sockets with two GPUs each; PCIe weights and hops say the same where no node is told."""
    machine = topoplan.load(
        showtopo(4, numa=[0, 0, 1, 1], weight=lambda i, j: 15, hops=lambda i, j: 1, type=lambda i, j: "XGMI")
    )
    home = {
        link.src: link.dst for link in machine.links if link.channel == "pcie" and link.src in machine.gpus
    }
    assert home == {"gpu0": "cpu0", "gpu1": "cpu0", "gpu2": "cpu1", "gpu3": "cpu1"}
    assert [device.numa for device in machine.devices if device.kind == "cpu"] == [0, 1]
    far = topoplan.load(showtopo(4, hops=lambda i, j: 2 if i // 2 == j // 2 else 3, type=lambda i, j: "PCIE"))
    assert {link.src: link.dst for link in far.links if link.src in far.gpus} == home


def test_disabled_access_is_no_peer_access() -> None:
    """GPUs that may not read each other's memory say so, and PCIe switches turn nothing around; bus ids are kept."""
    ids = ["0000:03:00.0", "0000:0c:00.0"]
    cells: dict[str, Cell] = {"weight": lambda i, j: 40, "type": lambda i, j: "PCIE"}
    machine = topoplan.load(amd_smi(ids, access=lambda i, j: "DISABLED", **cells))
    assert [device.fact("peer_access") for device in machine.devices if device.kind == "gpu"] == ["none"] * 2
    assert [device.busid for device in machine.devices if device.kind == "gpu"] == ids
    enabled = topoplan.load(amd_smi(ids, access=lambda i, j: "ENABLED", **cells))
    assert not any(device.facts for device in enabled.devices)
    three = [*ids, "0000:0d:00.0"]
    some = topoplan.load(amd_smi(three, access=lambda i, j: "DISABLED" if i + j == 1 else "ENABLED", **cells))
    told = "warning: access is disabled between gpu0-gpu1; copies there go through a CPU's memory"
    assert some.notes[-1] == told
    assert [some.device(gpu).fact("refused") for gpu in some.gpus] == ["gpu1", "gpu0", ""]


WHOLE = showtopo(3, numa=[0, 0, 1], weight=lambda i, j: 15, hops=lambda i, j: 1, type=lambda i, j: "XGMI")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("GPU1 15 0 15\n", "", "weights: no row of GPU1"),
        ("GPU1 15 0 15\n", "GPU1 15 0\n", "row GPU1 has 2 cells for 3 columns"),
        ("GPU1 15 0 15\n", "GPU1 30 0 15\n", "the table must be symmetric"),
        ("GPU1 15 0 15\n", "GPU1 15 0 15\nGPU1 15 0 15\n", "row GPU1 occurs twice"),
        ("GPU1 15 0 15\n", "GPU1 15 0 many\n", "column GPU2: 'many' does not belong there"),
        ("Link Type between two GPUs", "Nothing", "the table of link types is missing"),
        ("Hops between two GPUs", "Weight between two GPUs", "the table of weights occurs twice"),
        ("GPU1 15 0 15\n", f"GPU1 15 0 {'9' * 5000}\n", "column GPU2: '9{40}"),
        ("GPU[1]", "GPU[7]", "Numa Nodes name GPU7, which no table has"),
    ],
)
def test_damaged_tables_are_refused_with_one_line(old: str, new: str, says: str) -> None:
    assert old in WHOLE
    with pytest.raises(TopologyError, match=says) as error:
        topoplan.load(WHOLE.replace(old, new, 1))
    assert "\n" not in str(error.value)


def test_tables_that_name_a_gpu_twice_and_numa_nodes_of_bus_ids_are_refused() -> None:
    """As KeyErrors before: two columns of one name; NUMA nodes of GPU0 where tables name bus ids."""
    tables = amd_smi(["0000:03:00.0", "0000:0c:00.0"], type=lambda i, j: "XGMI", weight=lambda i, j: 15)
    nodes = "Numa Nodes\nGPU[0] : (Topology) Numa Node: 0\n"
    with pytest.raises(TopologyError, match="Numa Nodes name GPU0, which no table has"):
        topoplan.load(tables + nodes)
    with pytest.raises(TopologyError, match=r"column 0000:03:00\.0 occurs twice"):
        topoplan.load(tables.replace("0000:0c:00.0", "0000:03:00.0"))


KNOWN = {
    "mesh_x8.showtopo": (28, 15),
    "two_quads_x8.showtopo": (12, 15),
    "pcie_x4.showtopo": (0, 0),
    "radeon_x2.amd-smi": (0, 0),
}


@pytest.mark.parametrize("path", each(sorted((MACHINES / "rocm-smi").glob("*.txt"))))
def test_real_listings_are_read(path: Path) -> None:
    """A full mesh of eight, two of four, PCIe alone; a plan can be made of each."""
    machine = topoplan.load(path)
    assert len(bundles(machine)) // 2 == KNOWN[path.stem][0]
    assert topoplan.plan(machine).gap == 0

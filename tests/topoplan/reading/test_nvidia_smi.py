"""`nvidia-smi topo -m` text: features of real output, the rules for NVLink and PCIe, round trips, damage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.machine_links import bundles, wire_rates
from tests.support.matrices import uniform_matrix as uniform
from tests.support.refusals import refused
from topoplan.errors import TopologyError
from topoplan.machine.fabric import Fabric
from topoplan.machine.host_topology import cpus_of
from topoplan.machine.library import LIBRARY
from topoplan.machine.topology import Topology
from topoplan.reading.load import load
from topoplan.reading.nvidia_smi_topology import parse_nvidia_smi
from topoplan.reading.pcie_tree import CODES, infer_pcie_tree
from topoplan.units import exact


def matrix_text(
    names: Sequence[str],
    code: Callable[[str, str], str],
    *,
    affinity: Callable[[str], str] = lambda name: "",
    rows: Sequence[str] | None = None,
    separator: str = "\t",
) -> str:
    """What the driver would print for these devices; ``rows`` are the rows that are not cut."""
    extra = ["CPU Affinity", "NUMA Affinity"] if any(affinity(name) for name in names) else []
    lines = [separator.join(["", *names, *extra])]
    for name in names if rows is None else rows:
        cells = [" X " if other == name else code(name, other) for other in names]
        lines.append(separator.join([name, *cells, affinity(name)]))
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self", "  NV#  = bonded set of # NVLinks", ""])


def with_counts(gpus: int, counts: Mapping[tuple[int, int], int]) -> str:
    """GPUs with so many NVLinks between two of them."""

    def code(first: str, second: str) -> str:
        i, j = sorted((int(first[3:]), int(second[3:])))
        return f"NV{counts[i, j]}" if counts[i, j] else "PHB"

    return matrix_text([f"GPU{i}" for i in range(gpus)], code)


def parents_of(machine: Topology) -> dict[str, str]:
    """Parent of each device on the PCIe side."""
    parents: dict[str, str] = {}
    cpus = {device.name for device in machine.devices if device.kind == "cpu"}
    for link in machine.links:
        if link.channel == "pcie" and link.src not in cpus:
            parents.setdefault(link.src, link.dst)
    return parents


# name: GPUs, NVLinks in all, links per GPU if switched, GB/s per NVLink, groups of GPUs on one CPU
REAL = {
    "a100x4_nv4_della": (4, 24, None, 25.0, ["01", "23"]),
    "ac922_v100x4": (4, 6, None, 25.0, ["01", "23"]),
    "aws_p3_8xlarge": (4, 9, None, 25.0, ["0123"]),
    "consumer_5gpu_mixed": (5, 0, None, None, ["0", "1234"]),
    "dgx1_p100_sheffield": (8, 16, None, 20.0, ["0123", "4567"]),
    "dgx1_v100": (8, 24, None, 25.0, ["0123", "4567"]),
    "dgx2_v100x16_PARTIAL": (16, 96, 6, 25.0, ["0123456789abcdef"]),
    "h100x4_nv6_direct": (4, 36, None, 25.0, ["0", "1", "2", "3"]),
    "hgx_a100x8_2socket": (8, 96, 12, 25.0, ["0123", "4567"]),
    "hgx_h100x8": (8, 144, 18, 25.0, ["0123", "4567"]),
    "k80_x4_microway": (4, 0, None, None, ["0123"]),
    "rtx3090_x4_nvpairs": (4, 8, None, 14.0625, ["0123"]),
    "rtx4090_x8_pix": (8, 0, None, None, ["0123", "4567"]),
    "traverse_single_gpu_view": (1, 0, None, None, ["0"]),
    "v100x8_vm_phb": (8, 24, None, 25.0, ["01234567"]),
}


@pytest.mark.parametrize("name", sorted(REAL))
def test_real_matrices_are_read(name: str, machines_dir: Path) -> None:
    """GPUs, NVLinks, switch, rate per link and CPUs are those of the machine; PCIe connects all GPUs."""
    gpus, links, to_switch, rate, cpus = REAL[name]
    machine = parse_nvidia_smi((machines_dir / "nvidia-smi" / f"{name}.txt").read_text())
    assert len(machine.gpus) == gpus
    nvlinks = bundles(machine)
    assert sum(count for count, _ in nvlinks.values()) == 2 * links
    switched = {count for (_, dst), (count, _) in nvlinks.items() if dst == "nvswitch0"}
    assert switched == ({to_switch} if to_switch else set())
    assert wire_rates(machine) == ({rate} if rate else set())
    parents = parents_of(machine)

    def cpu(device: str) -> str:
        return cpu(parents[device]) if device in parents else device

    groups: dict[str, str] = {}
    for i, gpu in enumerate(machine.gpus):
        groups[cpu(gpu)] = groups.get(cpu(gpu), "") + f"{i:x}"
    assert list(groups.values()) == cpus
    assert Fabric(machine, ("pcie",)).unreachable() == ()


def test_every_real_matrix_is_in_the_table_above(machines_dir: Path) -> None:
    files = {path.stem for path in (machines_dir / "nvidia-smi").glob("*.txt")}
    assert {name for name in files if not name.endswith(".nvlink")} == set(REAL)


def code_between(machine: Topology, *, hide: bool) -> Callable[[str, str], str]:
    """Codes that a driver would print for a machine whose host tree is known; NV# hides them if ``hide``."""
    parents = parents_of(machine)
    counts = {(link.src, link.dst): link.count for link in machine.links if link.channel == "nvlink"}
    switched = any(device.kind == "nvswitch" for device in machine.devices)

    def chain(name: str) -> list[str]:
        return [name, *(chain(parents[name]) if name in parents else [])]

    def code(first: str, second: str) -> str:
        a, b = first.lower(), second.lower()
        links = counts.get((a, "nvswitch0" if switched and b.startswith("gpu") else b), 0)
        if hide and links:
            return f"NV{links}"
        up, down = chain(a)[1:], chain(b)[1:]
        meeting = next((device for device in up if device in down), None)
        if meeting is None:
            return "SYS"
        if meeting.startswith("cpu"):
            return "NODE"
        return "PIX" if meeting == up[0] == down[0] else "PXB"

    return code


@pytest.mark.parametrize(
    ("name", "nvlink", "pcie"),
    [("dgx-1v", None, None), ("dgx-a100", None, None), ("dgx-b200", 50.0, None), ("pcie-x8", None, 24.0)],
)
def test_library_machines_survive_being_printed_by_nvidia_smi(
    name: str, nvlink: float | None, pcie: float | None
) -> None:
    """A library machine, printed and read back, is that machine; NICs bring back the hidden PCIe codes."""
    machine = LIBRARY[name]()
    names = [d.name.upper() for d in machine.devices if d.kind == "gpu"]
    names += [d.name.upper() for d in machine.devices if d.kind == "nic"]
    read = parse_nvidia_smi(
        matrix_text(names, code_between(machine, hide=True)), nvlink_gbps=nvlink, pcie_gbps=pcie
    )
    assert bundles(read) == bundles(machine)
    assert parents_of(read) == parents_of(machine)
    assert wire_rates(read, "pcie") == wire_rates(machine, "pcie")


@st.composite
def host_trees(draw: st.DrawFn) -> tuple[list[str], dict[str, tuple[int, int, int]]]:
    """Devices, and CPU, cascade and switch of each; devices alone under a cascade sit on its CPU."""
    gpus, nics = draw(st.integers(1, 6)), draw(st.integers(0, 4))
    names = [f"GPU{i}" for i in range(gpus)] + [f"NIC{i}" for i in range(nics)]
    place = st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 1))
    return names, {name: draw(place) for name in names}


@given(host_trees(), st.sampled_from(["\t", "    "]))
@settings(max_examples=60, deadline=None)
def test_any_fully_printed_tree_is_recovered(
    tree: tuple[list[str], dict[str, tuple[int, int, int]]], separator: str
) -> None:
    """Without NVLink the machine that was read prints the same codes; lone switches are left out."""
    names, place = tree

    def code(first: str, second: str) -> str:
        a, b = place[first], place[second]
        return "PIX" if a == b else "PXB" if a[:2] == b[:2] else "NODE" if a[0] == b[0] else "SYS"

    machine = parse_nvidia_smi(matrix_text(names, code, separator=separator))
    read = code_between(machine, hide=True)
    alone = {name for name in names if sum(place[other] == place[name] for other in names) == 1}
    for a, b in combinations(names, 2):
        left_out = code(a, b) == "PXB" and {a, b} <= alone
        assert read(a, b) == ("PIX" if left_out else code(a, b))
    assert Fabric(machine, ("pcie",)).unreachable() == ()


@given(st.integers(2, 8), st.data())
@settings(max_examples=40, deadline=None)
def test_any_direct_nvlink_graph_is_recovered(gpus: int, data: st.DataObject) -> None:
    """Counts that fit one GPU are direct links, pair by pair, and PCIe still connects everything."""
    most = 18 // (gpus - 1)
    counts = {pair: data.draw(st.integers(0, most)) for pair in combinations(range(gpus), 2)}
    machine = parse_nvidia_smi(with_counts(gpus, counts), nvlink_gbps=10)
    assert bundles(machine) == {
        (f"gpu{a}", f"gpu{b}"): (count, 10.0 * count)
        for (i, j), count in counts.items()
        if count
        for a, b in ((i, j), (j, i))
    }
    assert Fabric(machine, ("pcie",)).unreachable() == ()


@given(gpus=st.integers(2, 5), thousandths=st.integers(1, 99_999), data=st.data())
@settings(max_examples=50, deadline=None)
def test_rates_of_several_links_stay_as_exact_as_they_are_written(
    gpus: int, thousandths: int, data: st.DataObject
) -> None:
    """3 x 25.781 is 77.343: bandwidths are multiplied as decimals, not as binary fractions."""
    counts = {pair: data.draw(st.integers(1, 4)) for pair in combinations(range(gpus), 2)}
    machine = parse_nvidia_smi(with_counts(gpus, counts), nvlink_gbps=thousandths / 1000)
    for count, bandwidth in bundles(machine).values():
        assert exact(bandwidth) == Fraction(count * thousandths, 1000)


def test_escapes_comments_and_prose_around_the_table_are_skipped() -> None:
    """Colour and underline, also where the escape character was lost in copying, prompts and # lines."""
    plain = parse_nvidia_smi(uniform(2, "NV2"))
    table = uniform(2, "NV2").split("\n", 1)
    for start, end in (("\x1b[4m", "\x1b[0m"), ("[4m", "[0m"), ("\x1b[1;32m", "\x1b[m")):
        dressed = f"# a note on GPU0\n$ nvidia-smi topo -m\n{start}{table[0]}{end}\r\n{table[1]}\nbye\n"
        assert parse_nvidia_smi(dressed) == plain


def test_a_header_whose_names_run_together_is_read() -> None:
    text = uniform(3, "NV1").replace("\tGPU0\tGPU1\tGPU2", "    GPU0GPU1GPU2mlx5_0\tmlx5_1\tCPU Affinity")
    rows = [line + "\tSYS\tSYS\t0-7" if line.startswith("GPU") else line for line in text.splitlines()]
    machine = parse_nvidia_smi("\n".join(rows))
    assert machine.gpus == ("gpu0", "gpu1", "gpu2")
    adapters = [device.fact("adapter") for device in machine.devices if device.kind == "nic"]
    assert adapters == ["mlx5_0", "mlx5_1"]


def test_old_codes_mean_what_their_successors_mean() -> None:
    for old, new in (("SOC", "SYS"), ("PSB", "PIX")):
        assert parse_nvidia_smi(uniform(2, old)) == parse_nvidia_smi(uniform(2, new))


def test_the_nic_legend_names_the_adapters() -> None:
    """NIC0 is a column, mlx5_bond_0 the hardware."""
    text = matrix_text(["GPU0", "NIC0"], lambda a, b: "PIX") + "\nNIC Legend:\n\n  NIC0: mlx5_bond_0\n"
    machine = parse_nvidia_smi(text)
    assert machine.device("nic0").fact("adapter") == "mlx5_bond_0"
    assert parents_of(machine) == {"pcie0": "cpu0", "gpu0": "pcie0", "nic0": "pcie0"}


def printed(nics: str, code: str) -> str:
    """Four GPUs and three NICs with affinity, as the driver prints them."""
    names = [*(f"GPU{i}" for i in range(4)), *(f"{nics}{i}" for i in range(9, 12))]

    def cell(first: str, second: str) -> str:
        far = (names.index(first) + names.index(second)) % 2
        return code if {first, second} <= set(names[:4]) else ("SYS", "NODE")[far]

    def local(name: str) -> str:
        return ("0-31\t1", "20-31,64-95\t0")[int(name[3:]) % 2] if name.startswith("GPU") else ""

    return matrix_text(names, cell, affinity=local)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("nics", "code"), [("NIC", "NV12"), ("mlx5_", "NV2"), ("bnxt_re", "NV1"), ("NIC", "PIX")]
)
def test_any_one_lost_blank_is_put_back(nics: str, code: str) -> None:
    """In the header, behind a row's name, between cells, and at and between the affinities; a note names a row's."""
    text = printed(nics, code)
    whole = parse_nvidia_smi(text)
    table = text[: text.index("Legend")].rstrip()
    blanks = [
        place for place, letter in enumerate(table) if letter == "\t" and table[place - 1] not in "\n\t"
    ]
    for place in blanks[1:]:
        found = parse_nvidia_smi(text[:place] + text[place + 1 :])
        assert (found.devices, found.links) == (whole.devices, whole.links), text[place - 9 : place + 9]
        if place > table.index("\n") and not text[place - 1].isspace() and not text[place + 1].isspace():
            assert any("lost blanks put back" in note for note in found.notes), text[place - 9 : place + 9]


def test_a_lost_blank_that_two_splits_explain_is_refused() -> None:
    """NV120-31 is NV1 and 20-31, or NV12 and 0-31, where no other row tells."""
    with refused(TopologyError, "row GPU0: a blank is missing between NV12 and 0-31 or NV1 and 20-31"):
        parse_nvidia_smi("GPU0 GPU1 CPU Affinity\nGPU0 X NV120-31\n")


NAMES = {
    "torch collect_env": "GPU models and configuration: GPU 0: {0}\nGPU 1: {0}\nGPU 2: {0}",
    "vllm": "GPU models and configuration:\nGPU 0: {0}\nGPU 1: {0}\nGPU 2: {0}\n\nNvidia driver version: 550.54",
    "sglang": "CUDA available: True\nGPU 0,1,2: {0}\nGPU 0,1,2 Compute Capability: 9.0",
    "nvidia-smi -L": "GPU 0: {0} (UUID: GPU-f0)\n  MIG 3g.40gb Device  0: (UUID: MIG-1)\nGPU 1: {0} (UUID: GPU-f1)",
    "nvidia-smi": "|   0  {0}          On  |   00000000:19:00.0 Off |        0 |\n| N/A   31C  |  1MiB / 81559MiB |",
    "older nvidia-smi": "|   0  {0}  Off  | 0000:06:00.0 Off |        0 |",
    "nvidia-smi -q": "GPU 00000000:19:00.0\n    Product Name                    : {0}",
    "nvidia-smi --query-gpu": "index, name, serial\n0, {0}, 165\n1, {0}, 166\n2, {0}, 167",
    "nvidia-smi --query-gpu=name": "name\n{0}\n{0}\n{0}",
    "accelerate": "- GPU type: {0}",
}


@pytest.mark.parametrize("report", NAMES)
def test_the_report_around_a_matrix_names_the_gpus(report: str) -> None:
    """NV18 of a switch is 25 or 50 GB/s a link by the GPU's name, whichever tool wrote it and wherever it stands."""
    for model, nvlink in {"NVIDIA GB200": 50.0, "NVIDIA H100 80GB HBM3": 25.0, "NVIDIA B200": 50.0}.items():
        text = NAMES[report].format(model)
        for whole in (f"{text}\n\n{uniform(3, 'NV18')}", f"{uniform(3, 'NV18')}\n{text}"):
            machine = parse_nvidia_smi(whole)
            assert {machine.device(gpu).model for gpu in machine.gpus} == {model}
            assert (wire_rates(machine), wire_rates(machine, "pcie")) == ({nvlink}, {48.0})
            assert not any("not printed" in note for note in machine.notes)


def test_names_of_other_gpus_are_not_used() -> None:
    """A name whose GPUs have fewer NVLinks than the matrix says, and names that leave a column out, with a note."""
    few = parse_nvidia_smi("GPU 0: NVIDIA A100-SXM4-80GB\n" + uniform(3, "NV18"))
    assert few.device("gpu0").model == ""
    assert "fewer NVLinks than the 18" in few.notes[0]
    some = parse_nvidia_smi("GPU 0: NVIDIA A100\nGPU 1: NVIDIA A40\n" + uniform(3, "NV4"))
    assert some.device("gpu0").model == ""
    assert "not GPU2" in some.notes[0]


def test_gpus_whose_memory_is_a_numa_node_are_blackwells_behind_a_switch() -> None:
    """GPU NUMA ID is a number on Grace CPUs, whose Hopper GPUs have no NVSwitch on their host."""
    rows = uniform(4, "NV18").splitlines()
    numbers = (2, 10, 18, 26)
    lines = [f"{rows[0]} CPU Affinity NUMA Affinity GPU NUMA ID"]
    lines += [f"{row} 0-71 0,3-9,11-17 {number}" for row, number in zip(rows[1:5], numbers, strict=True)]
    machine = parse_nvidia_smi("\n".join(lines))
    assert wire_rates(machine) == {50.0}
    assert [machine.device(gpu).fact("memory_node") for gpu in machine.gpus] == ["2", "10", "18", "26"]
    assert any("GPU not printed, assumed B200" in note for note in machine.notes)
    apart = parse_nvidia_smi("\n".join(lines).replace(" 26", " N/A"))
    assert wire_rates(apart) == {25.0}


def test_the_name_tells_switched_from_direct_links() -> None:
    """Three peers of NV6 are 18 links: direct on an H100, and behind a switch on a V100, which has 6."""
    for name, switched in (("NVIDIA H100", False), ("Tesla V100-SXM3-32GB", True)):
        machine = parse_nvidia_smi(f"GPU 0: {name}\n" + uniform(4, "NV6"))
        assert any(device.kind == "nvswitch" for device in machine.devices) == switched


def p2p(gpus: int, code: Callable[[int, int], str]) -> str:
    """What ``nvidia-smi topo -p2p r`` prints."""
    names = [f"GPU{i}" for i in range(gpus)]
    cells = [["X" if i == j else code(i, j) for j in range(gpus)] for i in range(gpus)]
    rows = [" ".join(["", name, *row]) for name, row in zip(names, cells, strict=True)]
    return "\n".join([" \t" + "\t".join(names), *rows, "", "Legend:", "  X    = Self", ""])


def test_peer_access_of_topo_p2p_is_used_beside_the_matrix() -> None:
    """Before or behind it: OK changes nothing; a refused NVLink is left out; PCIe is staged where nobody has access."""
    matrix = matrix_text([f"GPU{i}" for i in range(3)], lambda a, b: "NV4" if "GPU2" not in (a, b) else "PHB")
    plain = parse_nvidia_smi(matrix)
    assert parse_nvidia_smi(matrix + p2p(3, lambda i, j: "OK")) == plain
    for text in (matrix + p2p(3, lambda i, j: "CNS"), p2p(3, lambda i, j: "CNS") + matrix):
        bare = parse_nvidia_smi(text)
        assert not bundles(bare)
        assert all(bare.device(gpu).fact("peer_access") for gpu in bare.gpus)
        assert "gpu0-gpu1: access over NVLink is refused (chipset not supported)" in bare.notes[0]
    behind_a_switch = parse_nvidia_smi(uniform(2, "PIX") + p2p(2, lambda i, j: "GNS"))
    assert any("by way of the CPUs' memory" in note for note in behind_a_switch.notes)
    some = parse_nvidia_smi(matrix + p2p(3, lambda i, j: "TNS" if {i, j} == {0, 2} else "OK"))
    assert some.links == plain.links
    assert "access over PCIe is refused (topology not supported) between gpu0-gpu2" in some.notes[0]
    assert [some.device(gpu).fact("refused") for gpu in some.gpus] == ["gpu2", "", "gpu0"]
    below = parse_nvidia_smi(uniform(3, "PIX") + p2p(3, lambda i, j: "CNS" if {i, j} == {0, 2} else "OK"))
    routes = {
        edge.route
        for shard in topoplan.plan(below, "allgather").shards
        for stage in shard.stages
        for edge in stage.edges
    }
    assert all(("cpu0" in route) == ({route[0], route[-1]} == {"gpu0", "gpu2"}) for route in routes)


def test_peer_access_behind_a_switch() -> None:
    """A GPU without access to all others has no NVLink to the switch, which goes with the last; a pair is warned of."""
    matrix = uniform(4, "NV12")
    alone = parse_nvidia_smi(matrix + p2p(4, lambda i, j: "NS" if 3 in (i, j) else "OK"))
    assert {src for src, _ in bundles(alone)} == {"gpu0", "gpu1", "gpu2", "nvswitch0"}
    pair = parse_nvidia_smi(matrix + p2p(4, lambda i, j: "NS" if {i, j} == {1, 3} else "OK"))
    assert len(bundles(pair)) == 8
    assert (
        "gpu1: access over NVLink is refused to gpu3; copies there go through a CPU's memory" in pair.notes[0]
    )
    assert pair.device("gpu1").fact("refused") == "gpu3"
    ends = {("gpu1", "gpu3"), ("gpu3", "gpu1")}
    made = topoplan.plan(pair, channels="nvlink")
    assert not [
        arc for arc in Fabric(made.topology, ("nvlink",)).arcs if (arc.route[0], arc.route[-1]) in ends
    ]
    assert topoplan.verify(made).optimal
    none = parse_nvidia_smi(matrix + p2p(4, lambda i, j: "NS"))
    assert not bundles(none)
    assert load(none.to_json()) == none


def test_topo_p2p_alone_says_what_to_give() -> None:
    """It has no links; one of other GPUs than the matrix is of another machine."""
    with refused(TopologyError, "this is nvidia-smi topo -p2p", "give the output of nvidia-smi topo -m"):
        parse_nvidia_smi(p2p(2, lambda i, j: "GNS"))
    with refused(TopologyError, "topo -p2p has GPU2, which the matrix lacks"):
        parse_nvidia_smi(uniform(2, "NV2") + p2p(3, lambda i, j: "OK"))


@pytest.mark.parametrize(("printed", "numa"), [("3", 3), ("0-1", None), ("0,8,252-255", None), ("N/A", None)])
def test_numa_nodes_are_kept_where_one_is_printed(printed: str, numa: int | None) -> None:
    text = matrix_text(["GPU0"], lambda a, b: "", affinity=lambda name: f"0-3\t{printed}")
    assert parse_nvidia_smi(text).device("gpu0").numa == numa


def test_cut_rows_are_filled_by_symmetry_with_a_note() -> None:
    """Sixteen columns and two rows of an NVSwitch machine still are sixteen GPUs on the switch."""
    names = [f"GPU{i}" for i in range(16)]
    machine = parse_nvidia_smi(matrix_text(names, lambda a, b: "NV6", rows=names[:2]))
    assert {a for a, b in bundles(machine) if b == "nvswitch0"} == {f"gpu{i}" for i in range(16)}
    assert any("gpu2-15 (14 devices): no row" in note for note in machine.notes)


@pytest.mark.parametrize(
    ("gpus", "code", "switched", "rate", "pcie"),
    [
        *[(4, "NV1", False, 20.0, 12.0), (2, "NV1", False, 25.0, 12.0), (2, "NV4", False, 14.0625, 24.0)],
        *[(4, "NV2", False, 25.0, 12.0), (4, "NV4", False, 25.0, 24.0), (4, "NV6", False, 25.0, 48.0)],
        *[(5, "NV6", True, 25.0, 12.0), (2, "NV12", False, 25.0, 24.0), (3, "NV12", True, 25.0, 24.0)],
        *[(8, "NV8", True, 25.0, 24.0), (2, "NV18", False, 25.0, 48.0), (8, "NV18", True, 25.0, 48.0)],
    ],
)
def test_the_row_sum_tells_switch_and_generation(
    gpus: int, code: str, switched: bool, rate: float, pcie: float
) -> None:
    """More links than a GPU has is a switch; the smallest GPU that fits gives the rates, and a note."""
    machine = parse_nvidia_smi(uniform(gpus, code))
    assert any(device.kind == "nvswitch" for device in machine.devices) is switched
    assert wire_rates(machine) == {rate}
    assert wire_rates(machine, "pcie") == {pcie}
    assert any("--nvlink-bandwidth" in note for note in machine.notes)
    assert any("--pcie-bandwidth" in note for note in machine.notes)


def test_a_gpu_without_nvlink_is_not_joined_to_the_switch() -> None:
    """A board with a failed GPU: seven on the switch, one on PCIe only."""
    names = [f"GPU{i}" for i in range(8)]
    machine = parse_nvidia_smi(matrix_text(names, lambda a, b: "NODE" if "GPU2" in (a, b) else "NV18"))
    assert {a for a, b in bundles(machine) if b == "nvswitch0"} == {f"gpu{i}" for i in range(8) if i != 2}
    assert any(note.startswith("gpu2: no NVLink") for note in machine.notes)


def test_a_gpu_with_dead_links_to_the_switch_has_fewer() -> None:
    """Its own cells say how many are left; the others keep theirs."""
    names = [f"GPU{i}" for i in range(8)]
    machine = parse_nvidia_smi(matrix_text(names, lambda a, b: "NV10" if "GPU3" in (a, b) else "NV12"))
    counts = {a: count for (a, b), (count, _) in bundles(machine).items() if b == "nvswitch0"}
    assert counts == {f"gpu{i}": 10 if i == 3 else 12 for i in range(8)}


def test_affinity_overrules_sys_only_where_it_differs_between_gpus() -> None:
    """Firmware may print SYS everywhere, and a job bound to one core prints one affinity everywhere."""
    names = [f"GPU{i}" for i in range(4)]
    told = matrix_text(names, lambda a, b: "SYS", affinity=lambda name: "0-7" if name < "GPU2" else "8-15")
    bound = matrix_text(names, lambda a, b: "SYS", affinity=lambda name: "1-1")
    assert len(cpus_of(parents_of(parse_nvidia_smi(told)))) == 2
    assert len(cpus_of(parents_of(parse_nvidia_smi(bound)))) == 4


def test_codes_that_contradict_each_other_are_noted_and_the_nearer_is_kept() -> None:
    """SYS between two devices that both share a switch with a third cannot be."""
    distance = {("a", "b"): 0, ("b", "c"): 0, ("a", "c"): CODES.index("SYS")}
    tree = infer_pcie_tree(["a", "b", "c"], distance, affinity={})
    assert tree.parents == {"pcie0": "cpu0", "a": "pcie0", "b": "pcie0", "c": "pcie0"}
    assert tree.notes == ("a-c is printed SYS but other codes imply PIX; the nearer is kept",)


def damaged(old: str, new: str, *, gpus: int = 3) -> str:
    text = uniform(gpus, "NV2")
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ["GPU0"]),
        ("GPU0 X NV1\nGPU1 NV1 X\n", ["no header line"]),
        ("\tGPU0\tGPU1\n", ["no GPU row"]),
        ("GPU0 GPU1\nGPU0\n", ["row GPU0 has 0 cells for 2 columns"]),
        (f"GPU0 GPU1\nGPU0 X {'SYS' * 9999}\n", ["'SYSSYS", "has lost a blank"]),
        ("GPU0 GPU1 GPU2\nGPU0 X NV2 SYSSYS\n", ["row GPU0: 'SYSSYS' has lost a blank, but split the row"]),
        ("GPU0 ib0ib1\nGPU0 X SYS SYS\n", ["is a blank missing in 'ib0ib1' of the header"]),
        (uniform(2, "NV2").replace("GPU1", "GPU" + "1" * 5000), ["no header line"]),
        (matrix_text(["NIC0", "NIC1"], lambda a, b: "PIX"), ["no header line"]),
        (damaged("GPU1\tNV2\tX", "GPU1\tNV3\t X "), ["row GPU1, column GPU0", "'NV3'", "'NV2'"]),
        (damaged("GPU1\tNV2\tX\tNV2", "GPU1\tNV2\tX"), ["row GPU1", "2 cells", "3 columns"]),
        (damaged("GPU1\tNV2\tX\tNV2", "GPU1\tNV2\tX\tNV2\tSYS"), ["row GPU1", "'SYS'", "3 columns"]),
        (damaged("GPU1\tNV2", "GPU1\tFOO"), ["row GPU1, column GPU0", "'FOO'"]),
        (damaged("GPU1\tNV2", "GPU1\tNV0"), ["row GPU1, column GPU0", "'NV0'"]),
        (damaged("GPU1\tNV2", "GPU1\tOK"), ["row GPU1, column GPU0", "'OK'"]),
        (
            matrix_text([f"GPU{i}" for i in range(600)], lambda a, b: "X", rows=["GPU0"]),
            ["600 devices", "512"],
        ),
        (damaged("GPU1\tNV2", "GPU1\tX"), ["row GPU1, column GPU0", "'X'"]),
        (damaged("GPU1\tNV2\tX", "GPU1\tNV2\tNV2"), ["row GPU1, column GPU1", "'NV2'"]),
        (damaged("GPU0\tGPU1\tGPU2", "GPU0\tGPU1\tGPU1"), ["column GPU1", "twice"]),
        (damaged("GPU2\tNV2", "GPU1\tNV2"), ["GPU1", "twice"]),
        (damaged("GPU2\tNV2", "GPU7\tNV2"), ["row GPU7", "no column"]),
        (matrix_text(["GPU0", "NIC0"], lambda a, b: "NV2"), ["row GPU0, column NIC0", "'NV2'"]),
        ("GPU 0: Tesla V100\n\t Link 0: 25.781 GB/s\n", ["nvidia-smi nvlink"]),
    ],
)
def test_bad_matrices_are_refused_with_row_column_and_value(text: str, says: list[str]) -> None:
    with refused(TopologyError, *says):
        parse_nvidia_smi(text)


def test_the_slowest_of_several_generations_gives_the_rates() -> None:
    models = ["NVIDIA A100-SXM4-40GB", "Tesla V100-SXM2-16GB"]
    listed = "".join(f"GPU {i}: {model} (UUID: GPU-{i})\n" for i, model in enumerate(models))
    found = parse_nvidia_smi(uniform(2, "NV2") + listed)
    assert [found.device(gpu).model for gpu in found.gpus] == models
    assert wire_rates(found, "pcie") == {12.0}


def test_columns_in_another_order_or_left_out_keep_the_numbers_of_gpus() -> None:
    """--gpus 0,2 are GPU0 and GPU2 wherever their columns stand; a warning tells numbers if GPU0 is missing."""
    matrix = "\tGPU1\tGPU0\tGPU2\nGPU1\tX\tPHB\tNV1\nGPU0\tPHB\tX\tPHB\nGPU2\tNV1\tPHB\tX\n"
    machine = topoplan.load(matrix)
    assert [device.name for device in machine.devices if device.kind == "gpu"] == ["gpu0", "gpu1", "gpu2"]
    between = {(link.src, link.dst) for link in machine.links if link.channel == "nvlink"}
    assert between == {("gpu1", "gpu2"), ("gpu2", "gpu1")}
    odd = topoplan.load(matrix.replace("GPU2", "GPU5").replace("GPU0", "GPU3"))
    assert "0 is GPU1, 1 is GPU3, 2 is GPU5" in odd.notes[0]


def test_a_gpu_without_nvlink_changes_no_rate_of_nvlinks() -> None:
    """An L4 or RTX A2000 beside H100s and B200s limits PCIe alone."""
    for model, links, nvlink, other in (
        ("NVIDIA H100 PCIe", 12, 300.0, "NVIDIA L4"),
        ("NVIDIA B200", 18, 900.0, "NVIDIA RTX A2000"),
    ):
        matrix = f"\tGPU0\tGPU1\tGPU2\nGPU0\tX\tNV{links}\tPHB\nGPU1\tNV{links}\tX\tPHB\nGPU2\tPHB\tPHB\tX\n"
        machine = topoplan.load(f"GPU 0: {model}\nGPU 1: {model}\nGPU 2: {other}\n{matrix}")
        out = [link.bandwidth for link in machine.links if link.src == "gpu0" and link.channel == "nvlink"]
        assert sum(out) == nvlink
        assert topoplan.plan(machine, gpus=[0, 1]).bound == nvlink


def test_gpus_in_mig_mode_reach_each_other_through_the_host() -> None:
    """``nvidia-smi -L`` lists their instances, which have no access between GPUs, whatever the matrix says."""
    listed = "".join(
        f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: GPU-{i})\n"
        f"  MIG 3g.40gb     Device  0: (UUID: MIG-{i}a)\n  MIG 3g.40gb     Device  1: (UUID: MIG-{i}b)\n"
        for i in range(4)
    )
    machine = topoplan.load(listed + uniform(4, "NV18"))
    assert [machine.device(gpu).fact("mig") for gpu in machine.gpus] == [
        f"MIG-{i}a,MIG-{i}b" for i in range(4)
    ]
    assert topoplan.plan(machine).bound < 48
    one = topoplan.load(listed.split("GPU 1")[0] + uniform(4, "NV18"))
    assert topoplan.plan(one, gpus=[1, 2, 3]).rate > 300


@pytest.mark.parametrize(
    ("model", "links", "nvlink", "pcie"),
    [
        ("NVIDIA H100 NVL", 12, 300.0, 48.0),
        ("NVIDIA H800", 8, 200.0, 48.0),
        ("NVIDIA H20", 18, 450.0, 48.0),
        ("NVIDIA A800-SXM4-80GB", 8, 200.0, 24.0),
        ("NVIDIA B200", 18, 900.0, 48.0),
        ("NVIDIA L40S", 0, 0.0, 24.0),
        ("NVIDIA GB10", 0, 0.0, 48.0),
    ],
)
def test_a_model_is_read_wherever_it_stands(model: str, links: int, nvlink: float, pcie: float) -> None:
    """In a list of GPUs, in a line before or behind the matrix; not in a comment, and not beside another model."""
    code = f"NV{links}" if links else "PIX"
    matrix = f"\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \t{code}\t0-31\nGPU1\t{code}\t X \t0-31\n"
    named = f"GPU 0: {model}\nGPU 1: {model}\n"
    for text in (named + matrix, f"{matrix}\n2 x {model}, Ubuntu\n", f"box: {model}\n{matrix}"):
        machine = topoplan.load(text)
        assert {device.model for device in machine.devices if device.kind == "gpu"} == {model}
        out = [link for link in machine.links if link.src == "gpu0"]
        assert sum(link.bandwidth for link in out if link.channel == "nvlink") == nvlink
        assert [link.bandwidth for link in out if link.channel == "pcie"] == [pcie]
    for text in (f"# {model}\n{matrix}", f"{model} or V100\n{matrix}"):
        assert {device.model for device in topoplan.load(text).devices if device.kind == "gpu"} == {""}

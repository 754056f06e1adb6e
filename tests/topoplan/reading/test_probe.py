"""The probe against fake machines, known and drawn at random, that are real to it: nvidia-ml-py and a sysfs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

import topoplan
from tests.support.fake_machine.description import (
    GPU_3D,
    INFINIBAND,
    Cpus,
    FakeMachine,
    Gpu,
    Nic,
    Nvlink,
    Pci,
    Root,
    pcie_switch,
)
from tests.support.fake_machine.fixtures import FakeHost, Installer
from tests.support.fake_machine.machines import MACHINES
from tests.support.machine_links import bundles, speeds
from topoplan.cli.show import link_summary
from topoplan.machine.topology import Topology
from topoplan.reading.pcie_tree import affinity_columns, relation_matrix
from topoplan.reading.probe_driver import PROBE_ALTERNATIVES


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def run(host: FakeHost, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process that sees the machine."""
    command = [sys.executable, "-m", "topoplan", *arguments]
    return subprocess.run(
        command, env=host.environment | settings, capture_output=True, text=True, check=False
    )


def warnings(machine: Topology) -> list[str]:
    return [note.removeprefix("warning: ") for note in machine.notes if note.startswith("warning: ")]


def test_a_probed_dgx_1v_is_the_one_of_the_library(fake_here: Installer) -> None:
    """Every link and every device; the names are even the same."""
    fake_here("dgx1v")
    probed, known = topoplan.probe(), topoplan.load("dgx-1v")
    assert set(probed.links) == set(known.links)
    assert {(d.name, d.kind) for d in probed.devices} == {(d.name, d.kind) for d in known.devices}
    assert probed.device("cpu0").model == known.device("cpu0").model == "Xeon E5-2698 v4"
    assert probed.device("nic0").model == known.device("nic0").model == "ConnectX-4 100 Gb/s"
    assert topoplan.plan(probed).rate == topoplan.plan(known).rate
    assert warnings(probed) == []


def test_the_probed_matrix_is_the_genuine_text_cell_for_cell(
    fake_here: Installer, machines_dir: Path
) -> None:
    """CPU affinity included; the text is what nvidia-smi printed on such a machine."""
    fake_here("dgx1v")
    probed = topoplan.probe()
    lines = (machines_dir / "nvidia-smi" / "dgx1_v100.txt").read_text().split("Legend")[0].splitlines()
    header, *rows = [line.split() for line in lines if not line.startswith("#") and line.strip()]
    columns = header[: header.index("CPU")]
    named = {d.fact("adapter") or d.name.upper(): d.name for d in probed.devices if d.kind in ("gpu", "nic")}
    names, cells = relation_matrix(probed)
    printed = {(a, b): cells[i][j] for i, a in enumerate(names) for j, b in enumerate(names)}
    affinity = dict(zip(names, affinity_columns(probed, names)["CPU Affinity"], strict=True))
    compared = 0
    for row, *genuine in rows:
        for column, code in zip(columns, genuine, strict=False):
            assert printed[named[row], named[column]] == code, (row, column)
            compared += 1
        if len(genuine) > len(columns):
            assert affinity[named[row]] == genuine[len(columns)]
            compared += 1
    assert compared == 12 * 12 + 8


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("machine", "counts", "rate"),
    [  # of GPUs, NVSwitches, NICs, and NVLinks
        ("dgx1p", (8, 0, 4, 32), 20 * 16 / 7),
        ("dgx2", (16, 1, 10, 6 * 16 * 2), 80.0),
        ("dgx_a100", (8, 1, 9, 12 * 8 * 2), 300 * 8 / 14),
        ("dgx_h100", (8, 1, 10, 18 * 8 * 2), 450 * 8 / 14),
        ("hidden_switch", (8, 1, 4, 12 * 8 * 2), 300 * 8 / 14),
        ("pcie_box", (8, 0, 2, 0), 24 * 8 / 14),
        ("dead_nvlinks", (8, 0, 4, 46), (48 * 25 - 2 * 25 - 2 * (25 - 12.89)) / 14),
        ("refused_p2p", (8, 0, 4, 46), 25 * 23 / 7),
        ("old_driver", (8, 0, 4, 48), 25 * 24 / 7),
        ("grace_hopper", (1, 0, 1, 0), float("inf")),
    ],
)
def test_machines_are_found_whole(
    fake_here: Installer, fake_host: Installer, machine: str, counts: tuple[int, ...], rate: float
) -> None:
    """GPUs, directed NVLinks, NVSwitch, NICs, and the AllReduce that they can do, proved."""
    if MACHINES[machine]().library == "new":
        fake_here(machine)
        probed = topoplan.probe()
    else:
        probed = topoplan.load(run(fake_host(machine), "probe", "--json").stdout)
    kinds = Counter(device.kind for device in probed.devices)
    nvlinks = sum(link.count for link in probed.links if link.channel == "nvlink")
    assert (kinds["gpu"], kinds["nvswitch"], kinds["nic"], nvlinks) == counts
    plan = topoplan.plan(probed)
    assert topoplan.verify(plan).optimal
    assert plan.rate == pytest.approx(rate, rel=1e-12)


def test_a_dead_wire_and_a_slow_one_are_warned_of_by_gpu_and_number(fake_here: Installer) -> None:
    fake_here("dead_nvlinks")
    machine = topoplan.probe()
    links = bundles(machine)
    assert links["gpu0", "gpu3"] == links["gpu3", "gpu0"] == (1, 25.0)
    assert links["gpu5", "gpu6"] == (2, 25.0 + 12.89)
    assert warnings(machine) == [
        "gpu0: NVLink 2 of 6 is down",
        "gpu3: NVLink 0 of 6 is down",
        "gpu5: 1 NVLink at 12.89 GB/s, others at 25",
        "gpu6: 1 NVLink at 12.89 GB/s, others at 25",
    ]


def test_half_of_the_answers_are_enough_for_a_machine_and_its_gaps_are_named(fake_here: Installer) -> None:
    fake_here("half_failing")
    machine = topoplan.probe()
    whole = topoplan.load("dgx-1v")
    assert machine.gpus == whole.gpus
    known, found = bundles(whole), bundles(machine)
    assert found, "some NVLinks are told"
    assert all(count <= known[ends][0] for ends, (count, _) in found.items()), "none is invented"
    assert any(line.startswith("the driver did not answer ") for line in warnings(machine))
    unread = next(line for line in warnings(machine) if " cannot be read: " in line)
    assert unread.endswith(" (18 files); their content is assumed")
    assert topoplan.verify(topoplan.plan(machine)).optimal


def test_a_gpu_in_mig_mode_has_no_nvlinks_and_its_instances_name_it(
    fake_here: Installer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_here("one_mig")
    machine = topoplan.probe()
    linked = {link.src for link in machine.links if link.channel == "nvlink"}
    assert set(machine.gpus) - linked == {"gpu3"}
    instances = machine.device("gpu3").fact("mig").split(",")
    assert len(instances) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", instances[1])
    assert topoplan.probe().gpus == ("gpu3",)


@pytest.mark.thorough
def test_a_lost_gpu_is_left_out_with_a_warning(fake_host: Installer) -> None:
    done = run(fake_host("lost_gpu"), "probe", "--json")
    machine = topoplan.load(done.stdout)
    assert "gpu5" not in machine.gpus
    assert len(machine.gpus) == 7
    assert "GPU 5 does not answer; it is left out" in warnings(machine)


def test_a_superchip_has_its_link_to_the_cpu(fake_here: Installer) -> None:
    """Ten links of 44.712 GB/s, as the driver of a GH200 states them; the summary names them."""
    fake_here("grace_hopper")
    machine = topoplan.probe()
    assert link_summary(machine) == "1 c2c of 447.12 GB/s"
    assert speeds(machine, "c2c") == {("gpu0", "cpu0"): 447.12, ("cpu0", "gpu0"): 447.12}


def test_where_the_kernel_tells_no_numa_nodes_the_driver_does(fake_here: Installer) -> None:
    """The affinity is that of the genuine machine; a GH200's own memory, which is a node too, is no CPU of it."""
    known = MACHINES["dgx1v"]()
    silent = tuple(
        "/".join((f"devices/pci{root.bus}", *(pci.busid for pci in chain), "numa_node"))
        for root, chain in known.places().values()
    )
    fake_here(replace(known, name="no_numa", absent=silent))
    machine = topoplan.probe()
    assert [machine.device(gpu).numa for gpu in machine.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    superchip = MACHINES["grace_hopper"]()
    roots = tuple(replace(root, numa=-1) for root in superchip.roots)
    fake_here(replace(superchip, name="superchip_without_numa", roots=roots))
    machine = topoplan.probe(refresh=True)
    assert machine.device("gpu0").numa == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("machine", "beginning"),
    [
        ("no_driver", "no NVIDIA driver is installed here (libnvidia-ml.so.1 is not found); install it"),
        ("driver_not_loaded", "the NVIDIA driver is installed but not loaded; load it (modprobe nvidia)"),
        ("no_gpu", "the NVIDIA driver is loaded but shows no GPU; look at the container's devices"),
    ],
)
def test_without_driver_or_gpu_one_line_says_what_to_do(
    fake_host: Installer, machine: str, beginning: str
) -> None:
    done = run(fake_host(machine), "probe")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"topoplan probe: error: {beginning}")
    assert line.endswith(PROBE_ALTERNATIVES)


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", [["--sysfs-root", ""], ["--sysfs-root", "nowhere"], []])
def test_a_folder_that_is_not_there_is_not_read_in_place_of_sys(
    fake_host: Installer, arguments: list[str]
) -> None:
    done = run(fake_host("dgx1v"), "probe", *arguments, TOPOPLAN_SYSFS_ROOT="nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    named = arguments[-1] if arguments else "nowhere"
    assert done.stderr == (
        f"topoplan probe: error: {named!r} is not a folder to read in place of /sys; "
        "name one, or leave --sysfs-root and TOPOPLAN_SYSFS_ROOT out\n"
    )


def test_a_kept_probe_needs_no_driver_until_it_is_to_be_read_anew(
    fake_here: Installer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host = fake_here(MACHINES["dgx1v"]())
    first = topoplan.probe()
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "gone.txt"))
    assert topoplan.probe() == first
    with pytest.raises(topoplan.ProbeError):
        topoplan.probe(refresh=True)
    (host.folder / "proc/sys/kernel/random/boot_id").write_text("another start\n")
    with pytest.raises(topoplan.ProbeError):
        topoplan.probe()


def test_the_process_sees_what_cuda_shows_it(fake_here: Installer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kept probe serves processes with different views."""
    fake_here("dgx1v")
    whole = topoplan.probe()
    named = ",".join(whole.device(gpu).fact("uuid")[:12] for gpu in ("gpu7", "gpu4"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    shown = topoplan.probe()
    assert shown.gpus == ("gpu7", "gpu4")
    assert "CUDA_VISIBLE_DEVICES=" in shown.notes[-1]
    assert topoplan.plan(shown).rate == 50.0


def test_without_the_kernels_tree_the_driver_still_places_the_gpus(
    fake_here: Installer, tmp_path: Path
) -> None:
    fake_here("dgx1v")
    empty = tmp_path / "hidden" / "sys"
    empty.mkdir(parents=True)
    machine = topoplan.probe(sysfs_root=empty)
    cells, known = (relation_matrix(one, ("gpu",))[1] for one in (machine, topoplan.load("dgx-1v")))
    assert [row[:4] for row in cells[:4]] == [row[:4] for row in known[:4]]
    above = Counter(dst for src, dst in speeds(machine, "pcie") if src.startswith("gpu"))
    assert above == {f"pcie{i}": 2 for i in range(4)}
    assert any("tree is not visible here: placed by the driver's common ancestor" in n for n in machine.notes)


def test_devices_whose_node_is_not_told_are_named(fake_here: Installer) -> None:
    """As in a virtual machine whose firmware tells none: NCCL takes node 0."""
    told = MACHINES["dgx1v"]()
    roots = (told.roots[0], *(replace(root, numa=-1) for root in told.roots[1:]))
    fake_here(replace(told, name="untold", roots=roots))
    machine = topoplan.probe()
    assert [machine.device(gpu).numa for gpu in machine.gpus] == [0] * 8
    assert (
        "the NUMA node of gpu4-7, 0000:84:00.0, 0000:8b:00.0 (6 devices) is unknown; node 0 taken, as NCCL takes "
        "node 0"
    ) in machine.notes


@pytest.mark.parametrize("busid", ["0000:06:00.0", "0000:0c:00.0"])
def test_a_device_whose_link_leads_to_another_has_no_place_in_the_tree(
    fake_here: Installer, busid: str
) -> None:
    host = fake_here(replace(MACHINES["dgx1v"](), name=f"astray-{busid[5:7]}"))
    link = host.sysfs_root / "bus/pci/devices" / busid
    link.unlink()
    link.symlink_to("0000:0a:00.0")
    assert (
        sum(f"{busid}) is not in the kernel's PCIe tree" in line for line in warnings(topoplan.probe())) == 1
    )


@pytest.mark.thorough
def test_the_probe_prints_the_machine_and_writes_what_every_command_reads(
    fake_host: Installer, tmp_path: Path
) -> None:
    host = fake_host("dgx1v")
    path = tmp_path / "machine.json"
    done = run(host, "probe", "-o", str(path), "--plot", str(tmp_path / "machine.png"))
    assert done.returncode == 0, done.stderr
    assert "24 NVLinks of 25 GB/s" in done.stdout.splitlines()[0]
    assert f"written: {path}\n" in done.stdout
    assert (tmp_path / "machine.png").stat().st_size > 10_000
    printed = run(host, "probe", "--json")
    assert json.loads(printed.stdout) == json.loads(path.read_text())
    figure = tmp_path / "other.svg"
    assert run(host, "probe", "-o", "-", "--plot", str(figure)).stdout == path.read_text()
    assert figure.stat().st_size > 10_000
    assert replace(topoplan.load(printed.stdout), name="") == replace(topoplan.load(path), name="")


def test_the_switches_of_a_dgx_a100_are_four(fake_here: Installer) -> None:
    """As in the library, and as NCCL 2.30 sees it: two GPUs and two NICs on each, for one chip shows itself as many."""
    fake_here("dgx_a100")
    machine = topoplan.probe()
    below = Counter((dst, machine.device(src).kind) for src, dst in speeds(machine, "pcie"))
    number = {"gpu": 2, "nic": 2, "cpu": 1}
    assert all(below[f"pcie{i}", kind] == count for i in range(4) for kind, count in number.items())
    assert "pcie4" not in {device.name for device in machine.devices}


@pytest.mark.thorough
def test_probing_twice_gives_the_same_bytes(fake_host: Installer) -> None:
    host = fake_host("dgx_a100")
    first, second = (
        run(host, "probe", "--refresh", "-o", "-", PYTHONHASHSEED=seed).stdout for seed in ("1", "2")
    )
    assert first
    assert first == second


LANE = {3: 0.75, 4: 1.5, 5: 3.0}


class Drawn:
    """A machine, and what the probe should find: codes and PCIe rates by GPU, NVLinks by pair."""

    def __init__(self, seed: int) -> None:
        choose = random.Random(seed)
        self.nodes = choose.choice([1, 2])
        self.place: list[tuple[int, int, int]] = []
        self.rates: list[float] = []
        self.nics = 0
        roots = []
        adapters = []
        for node in range(self.nodes):
            for _ in range(choose.choice([1, 2])):
                number = len(roots)
                count = choose.choice([1, 2])
                ports = [self._port(choose, number, port, node, adapters) for port in range(count)]
                roots.append(Root(f"{number:04x}:00", node, tuple(ports)))
        self.wires = self._wires(choose)
        self.dead = {pair: choose.randint(0, 1) for pair in self.wires if choose.random() < 0.2}
        nodes = (("0-7", "8-15")[: self.nodes], ((10, 32), (32, 10))[: self.nodes])
        self.machine = FakeMachine(
            name=f"drawn{seed}",
            cpus=Cpus("AuthenticAMD", "AMD EPYC 7742 64-Core Processor", 23, 49, *nodes),
            roots=tuple(roots),
            gpus=tuple(self._gpu(i) for i in range(len(self.place))),
            nics=tuple(Nic(busid, f"mlx5_{i}", "200 Gb/sec (4X HDR)") for i, busid in enumerate(adapters)),
        )

    def _port(self, choose: random.Random, root: int, port: int, node: int, adapters: list[str]) -> Pci:
        """A root port with a switch of two or three devices, GPUs and perhaps a NIC."""
        bus = 16 * port + 1
        generation, width = choose.choice([3, 4, 5]), choose.choice([8, 16])
        below = {}
        for slot in range(choose.choice([2, 3])):
            lanes = choose.choice([4, 8, 16])
            busid = f"{root:04x}:{bus + 2 + slot:02x}:00.0"
            gpu = slot < 2
            kind = ("10de:20b0:10de:134f", GPU_3D) if gpu else ("15b3:101b:15b3:0007", INFINIBAND)
            below[f"{root:04x}:{bus + 1:02x}:{slot:02x}.0"] = Pci(busid, *kind, generation, lanes)
            if gpu:
                self.place.append((node, root, port))
                self.rates.append(lanes * LANE[generation])
            else:
                adapters.append(busid)
        switch = pcie_switch(
            f"{root:04x}:{bus:02x}:00.0", "10b5:8764:10b5:8764", below, generation=generation, width=width
        )
        above = f"{root:04x}:00:{port + 1:02x}.0"
        return Pci(above, "1022:1483:0000:0000", generation=5, width=16, children=(switch,))

    def _wires(self, choose: random.Random) -> dict[tuple[int, int], int]:
        free = dict.fromkeys(range(len(self.place)), 12)
        wires: Counter[tuple[int, int]] = Counter()
        for pair in combinations(free, 2):
            count = min(choose.choice([0, 0, 1, 2, 4]), *(free[gpu] for gpu in pair))
            for gpu in pair:
                free[gpu] -= count
            wires[pair] += count
        return {pair: count for pair, count in wires.items() if count}

    def _gpu(self, number: int) -> Gpu:
        links = []
        for pair, count in self.wires.items():
            if number in pair:
                far = sum(pair) - number
                down = self.dead.get(pair, 0)
                links += [Nvlink(self.busid(far), "gpu", 25000, up=i >= down) for i in range(count)]
        return Gpu(self.busid(number), "NVIDIA A100-SXM4-40GB", (8, 0), 4, tuple(links))

    def busid(self, number: int) -> str:
        _, root, port = self.place[number]
        slot = sum(place == self.place[number] for place in self.place[:number])
        return f"{root:04x}:{16 * port + 3 + slot:02x}:00.0"

    def code(self, first: int, second: int) -> str:
        """As `nvidia-smi topo -m` would print it."""
        up = self.wires.get((first, second), 0) - self.dead.get((first, second), 0)
        if up:
            return f"NV{up}"
        one, two = self.place[first], self.place[second]
        return "PIX" if one == two else "PHB" if one[:2] == two[:2] else "NODE" if one[0] == two[0] else "SYS"


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(24))
def test_what_was_drawn_is_found(fake_here: Installer, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of all pairs, NVLinks that are up at both ends, PCIe rates; and the machine can be planned."""
    drawn = Drawn(seed)
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        fake_here(drawn.machine)
        machine = topoplan.probe()
    size = len(drawn.place)
    names, cells = relation_matrix(machine, ("gpu",))
    assert names == tuple(f"gpu{i}" for i in range(size))
    for first, second in combinations(range(size), 2):
        assert cells[first][second] == drawn.code(first, second)
    pcie = {link.src: link.bandwidth for link in machine.links if link.channel == "pcie"}
    assert [pcie[name] for name in names] == drawn.rates
    plan = topoplan.plan(machine)
    assert topoplan.verify(plan).optimal

"""The fake sysfs trees are laid out as Linux lays them out, and agree with what NVML tells."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.fake_machine.description import NVSWITCH, FakeMachine
from tests.support.fake_machine.fixtures import Installer
from tests.support.fake_machine.machines import MACHINES
from tests.support.fake_machine.nvml_text import common_ancestor

CODES = {10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def nested(sysfs: Path, busid: str) -> list[str]:
    """Host bridge and bus ids on the way down to a PCI device, read from its real path."""
    path = (sysfs / "bus/pci/devices" / busid).resolve(strict=True)
    return list(path.relative_to(sysfs.resolve() / "devices").parts)


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_links_lead_to_nested_folders(name: str, fake_host: Installer) -> None:
    """Each PCI device lies in the folder of the bridge above it, and is found by its bus id."""
    host = fake_host(name)
    for busid, (root, chain) in host.machine.places().items():
        assert nested(host.sysfs_root, busid) == [f"pci{root.bus}", *(pci.busid for pci in chain)]
    assert {path.name for path in (host.sysfs_root / "bus/pci/devices").iterdir()} == set(
        host.machine.places()
    )


@pytest.mark.sampled
@pytest.mark.parametrize("name", sorted(MACHINES))
def test_links_stay_inside_the_tree(name: str, fake_host: Installer) -> None:
    """All are relative, so the tree is the same wherever it stands; only unreadable files point out of it."""
    host = fake_host(MACHINES[name]())
    folder = host.folder.rename(host.folder.with_name("elsewhere"))
    inside = folder.resolve()
    links = [path for path in inside.rglob("*") if path.is_symlink()]
    assert len(links) > 4
    for link in links:
        target = os.readlink(link)
        if target != "/proc/self/mem":
            end = Path(os.path.normpath(link.parent / target))
            assert not os.path.isabs(target)
            assert end.is_relative_to(inside)
            assert end.exists()


def test_files_say_what_linux_would(fake_host: Installer) -> None:
    """Texts of a GPU, an idle one, a port that tells no speed, CPUs and nodes."""
    sysfs = fake_host("dgx1v").sysfs_root
    devices = sysfs / "bus/pci/devices"

    def read(path: str) -> str:
        return (sysfs / path).read_text()

    gpu = {path.name: path.read_text() for path in (devices / "0000:85:00.0").iterdir() if path.is_file()}
    assert gpu == {
        "class": "0x030200\n",
        "vendor": "0x10de\n",
        "device": "0x1db5\n",
        "subsystem_vendor": "0x10de\n",
        "subsystem_device": "0x1249\n",
        "numa_node": "1\n",
        "local_cpulist": "20-39,60-79\n",
        "max_link_speed": "8.0 GT/s PCIe\n",
        "max_link_width": "16\n",
        "current_link_speed": "2.5 GT/s PCIe\n",
        "current_link_width": "16\n",
    }
    assert read("bus/pci/devices/0000:02:00.0/max_link_speed") == "Unknown\n"
    assert read("devices/system/node/node1/cpulist") == "20-39,60-79\n"
    assert read("devices/system/node/node1/distance") == "21 10\n"
    assert read("devices/system/cpu/modalias").startswith("cpu:type:x86,ven0000fam0006mod004F:feature:,")
    assert read("module/nvidia/version") == "535.161.08\n"
    cpuinfo = (sysfs.parent / "proc/cpuinfo").read_text()
    assert cpuinfo.count("model name\t: Intel(R) Xeon(R) CPU E5-2698 v4 @ 2.20GHz\n") == 80
    boot = (sysfs.parent / "proc/sys/kernel/random/boot_id").read_text()
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\n", boot)


@pytest.mark.parametrize(
    ("name", "modalias"),
    [
        ("dgx_a100", "cpu:type:x86,ven0002fam0017mod0031:"),
        ("dgx_h100", "cpu:type:x86,ven0000fam0006mod008F:"),
        ("grace_hopper", "cpu:type:aarch64:"),
    ],
)
def test_cpus_are_told_by_their_alias(name: str, modalias: str, fake_host: Installer) -> None:
    """Vendor, family and model in hexadecimal; ARM has none of them there, and no model name."""
    sysfs = fake_host(name).sysfs_root
    assert (sysfs / "devices/system/cpu/modalias").read_text().startswith(modalias)
    assert ("model name" in (sysfs.parent / "proc/cpuinfo").read_text()) == ("x86" in modalias)


def test_network_devices_are_in_both_places(fake_host: Installer) -> None:
    """By class and below their PCI device, with speed and state; a virtual interface has no device."""
    host = fake_host("dgx1v")
    rdma = host.sysfs_root / "class/infiniband"
    net = host.sysfs_root / "class/net"
    assert sorted(path.name for path in rdma.iterdir()) == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]
    for adapter, bus in (("mlx5_0", "05"), ("mlx5_1", "0c"), ("mlx5_2", "84"), ("mlx5_3", "8b")):
        device = (host.sysfs_root / f"bus/pci/devices/0000:{bus}:00.0").resolve()
        assert (rdma / adapter / "device").resolve() == device
        assert (rdma / adapter).resolve() == device / "infiniband" / adapter
        port = {path.name: path.read_text() for path in (rdma / adapter / "ports/1").iterdir()}
        assert port["rate"] == "100 Gb/sec (4X EDR)\n"
        assert (port["state"], port["link_layer"]) == ("4: ACTIVE\n", "InfiniBand\n")
        assert [path.name for path in (device / "net").iterdir()] == [f"ib{adapter[-1]}"]
    assert (net / "eno1/speed").read_text() == "10000\n"
    assert os.readlink(net / "eno1/device") == "../../../0000:01:00.0"
    assert not (net / "docker0/device").exists()


@pytest.mark.parametrize(
    ("name", "file"), [("dgx1v", "class/net/eno2/speed"), ("dgx1v", "class/net/lo/speed")]
)
def test_a_file_that_the_kernel_refuses_to_read(name: str, file: str, fake_host: Installer) -> None:
    """It is there, it opens, and reading it is an error, for root too."""
    path = fake_host(name).sysfs_root / file
    assert path.exists()
    with path.open() as opened, pytest.raises(OSError, match="error"):
        opened.read()


def test_described_files_are_unreadable_or_absent(fake_host: Installer) -> None:
    """About half of the PCI devices miss a file, the others have one that cannot be read."""
    host = fake_host("half_failing")
    for file in host.machine.unreadable:
        with pytest.raises(OSError, match="error"):
            (host.sysfs_root / file).read_text()
    for file in host.machine.absent:
        assert not (host.sysfs_root / file).exists()
    devices = len(host.machine.places())
    assert 0.3 * devices < len(host.machine.unreadable) < 0.7 * devices
    assert len(host.machine.unreadable) + len(host.machine.absent) == devices + 4


@pytest.mark.parametrize("name", ["dgx2", "dgx_a100", "dgx_h100"])
def test_nvswitches_are_bridges_of_their_own_class(name: str, fake_host: Installer) -> None:
    """Every far end of an NVLink is a PCI device of class 0x068000."""
    host = fake_host(name)
    far = {link.remote for gpu in host.machine.gpus for link in gpu.links}
    assert len(far) == {"dgx2": 12, "dgx_a100": 6, "dgx_h100": 4}[name]
    for busid in far:
        assert (host.sysfs_root / "bus/pci/devices" / busid / "class").read_text() == f"{NVSWITCH}\n"


def test_a_cloud_machine_hides_its_switches(fake_host: Installer) -> None:
    """No bridge of any kind is on its buses, and nothing tells a NUMA node or a PCIe speed."""
    devices = fake_host("hidden_switch").sysfs_root / "bus/pci/devices"
    told = {(path / "class").read_text()[:6] for path in devices.iterdir()}
    assert told == {"0x0302", "0x0200"}
    files = {"numa_node": "-1\n", "max_link_speed": "Unknown\n", "current_link_width": "0\n"}
    for file, text in files.items():
        assert {(path / file).read_text() for path in devices.iterdir()} == {text}


def nearness(machine: FakeMachine, sysfs: Path, gpu: int, nic: str) -> str:
    """Code that nvidia-smi prints for a GPU and an RDMA adapter, from the real paths of both."""
    adapter = (sysfs / "class/infiniband" / nic / "device").resolve().name
    first, second = nested(sysfs, machine.gpus[gpu].busid), nested(sysfs, adapter)
    shared = sum(a == b for a, b in zip(first, second, strict=False))
    nodes = {
        (sysfs / "bus/pci/devices" / busid / "numa_node").read_text()
        for busid in (adapter, machine.gpus[gpu].busid)
    }
    if len(nodes) > 1:
        return "SYS"
    if shared < 2:
        return ("NODE", "PHB")[shared]
    return "PIX" if len(first) == len(second) == shared + 2 else "PXB"


@pytest.mark.parametrize(("name", "text"), [("dgx1v", "dgx1_v100"), ("dgx2", "dgx2_v100x16_PARTIAL")])
def test_the_genuine_matrix_is_that_of_the_fake(
    name: str, text: str, fake_host: Installer, machines_dir: Path
) -> None:
    """Each GPU's row of the real machine's `nvidia-smi topo -m`: wires, nearness of GPUs and NICs, CPUs."""
    host = fake_host(name)
    machine, sysfs = host.machine, host.sysfs_root
    lines = (machines_dir / "nvidia-smi" / f"{text}.txt").read_text().splitlines()
    columns = next(line.split() for line in lines if line.split()[:2] == ["GPU0", "GPU1"])
    rows = [line.split() for line in lines if re.match(r"GPU\d+\s", line)]
    assert len(rows) == {"dgx1v": 8, "dgx2": 4}[name]
    for row, *cells in rows:
        gpu = int(row[3:])
        links = machine.gpus[gpu].links
        cpus = (sysfs / "bus/pci/devices" / machine.gpus[gpu].busid / "local_cpulist").read_text().strip()
        assert cells[-1] == cpus
        for column, cell in zip(columns, cells[:-1], strict=False):
            if not column.startswith("GPU"):
                assert cell == nearness(machine, sysfs, gpu, column)
                continue
            other = int(column[3:])
            far = {link.remote for link in machine.gpus[other].links if link.kind == "switch"}
            wires = len(links) if far else sum(link.remote == machine.gpus[other].busid for link in links)
            code = f"NV{wires}" if wires else CODES.get(common_ancestor(machine, gpu, other))
            assert cell == ("X" if gpu == other else code)

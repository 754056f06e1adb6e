"""The fake machine against its descriptions: what the genuine nvidia-ml-py is told, how the library fails, and sysfs.

All of it is thorough: by default `tests/topoplan/reading/test_probe.py` reads fake machines by nvidia-ml-py, and finds
those of the library.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.support.fake_machine.ask import ask
from tests.support.fake_machine.description import FakeMachine, Gpu
from tests.support.fake_machine.fixtures import SONAME, Installer, build_libraries
from tests.support.fake_machine.machines import HALF_SPEED, MACHINES, refusals
from tests.support.fake_machine.nvml_text import common_ancestor, nvml_bus_id
from topoplan.machine.library import LIBRARY

pytestmark = pytest.mark.thorough

# Machines whose every call is answered.
SOUND = [
    name
    for name, make in MACHINES.items()
    if make().library == "new" and not make().rules and name != "no_driver"
]


Answers = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def answers(fake_host: Installer) -> Answers:
    """What a process that sees a machine is told; each machine is asked once."""
    return cache(lambda name: ask(fake_host(name).environment))


REMOTE_KINDS = {"gpu": 0, "cpu": 1, "switch": 2, "unknown": 255}


def described(machine: FakeMachine, index: int) -> dict[str, Any]:
    """The answers about a GPU that its description implies, in NVML's own types."""
    gpu = machine.gpus[index]
    root, chain = machine.places()[gpu.busid]
    pci = chain[-1]
    vendor, device, sub_vendor, sub_device = pci.ids.split(":")
    speeds = [link.megabytes for link in gpu.links if link.up]
    told = pci.generation > 0
    return {
        "Name": gpu.name,
        "UUID": f"GPU-{machine.uuid(gpu.busid)}",
        "Index": index,
        "MinorNumber": index,
        "CudaComputeCapability": list(gpu.capability),
        "MaxPcieLinkGeneration": pci.generation or "NotSupported",
        "CurrPcieLinkGeneration": pci.current_generation or pci.generation or "NotSupported",
        **{f"{which}PcieLinkWidth": pci.width if told else "NotSupported" for which in ("Max", "Curr")},
        "PerformanceState": gpu.pstate,
        "NumaNodeId": gpu.memory_node if gpu.memory_node >= 0 else "NotSupported",
        "MigMode": list(gpu.mig[:2]) if gpu.mig else "NotSupported",
        "busid": nvml_bus_id(gpu.busid),
        "ids": [int(device + vendor, 16), int(sub_device + sub_vendor, 16)],
        "affinity": cpu_numbers(machine.cpus.near(root.numa)),
        "fabric": list(gpu.fabric),
        "link_count": len(gpu.links) or "NotSupported",
        "common_speed": max(speeds) if speeds else "NotSupported",
        "links": [link_described(gpu, number) for number in range(len(gpu.links))],
    }


def link_described(gpu: Gpu, number: int) -> dict[str, Any]:
    """Of a link that is down, only that; generations before Hopper know no fields by scope."""
    link = gpu.links[number]
    speed = link.megabytes if link.up else 0
    remote = "FFFFFFF:FFFF:FF.0" if link.remote == "hidden" else nvml_bus_id(link.remote)
    hopper = gpu.capability >= (9, 0)
    return {
        "State": int(link.up),
        "Version": gpu.nvlink_version,
        "RemoteDeviceType": REMOTE_KINDS[link.kind] if link.up else "NotSupported",
        "p2p": 1,
        "remote": remote if link.up else "NotSupported",
        "speed": speed if number < 12 else None,
        "scoped": [speed, int(link.up), gpu.nvlink_version] if hopper else ["NotSupported"] * 3,
    }


@pytest.mark.parametrize("name", SOUND)
def test_gpus_and_nvlinks_are_told_as_described(name: str, answers: Answers) -> None:
    """After the last link, InvalidArgument."""
    machine, told = MACHINES[name](), answers(name)
    assert (told["init"], told["driver"], told["cuda"]) == ("", machine.driver, machine.cuda)
    for index, (gpu, said) in enumerate(zip(machine.gpus, told["gpus"], strict=True)):
        behind = said["links"][len(gpu.links) :]
        assert {link["State"] for link in behind} == {"InvalidArgument" if gpu.links else "NotSupported"}
        wanted = described(machine, index)
        assert {**{key: said[key] for key in wanted}, "links": said["links"][: len(gpu.links)]} == wanted


@pytest.mark.parametrize("name", SOUND)
def test_peers_are_told_alike_from_both_sides(name: str, answers: Answers) -> None:
    """Peer status and common ancestor are symmetric, and wires are the reason of the NVLink status.

    Of a GPU and itself the driver has no complaint: NCCL asks, and an error would end its start.
    """
    machine, told = MACHINES[name](), answers(name)["gpus"]
    for a, first in enumerate(told):
        assert first["p2p"][a] == [0] * 5
        for b, second in enumerate(told):
            assert first["p2p"][b] == second["p2p"][a]
            assert first["ancestor"][b] == second["ancestor"][a]
            refused = {a, b} in [{x, y} for x, y, _ in machine.refused]
            assert a == b or first["p2p"][b][2] == (0 if joined(machine, a, b) and not refused else 5)


def joined(machine: FakeMachine, a: int, b: int) -> bool:
    """Whether NVLinks lead from one GPU to another, directly or through switches."""

    def far(gpu: Gpu) -> set[str]:
        return {link.remote for link in gpu.links if link.up}

    first, second = far(machine.gpus[a]), far(machine.gpus[b])
    gpus = {gpu.busid for gpu in machine.gpus}
    return machine.gpus[b].busid in first or bool(first - gpus and second - gpus)


def cpu_numbers(cpulist: str) -> list[int]:
    """CPUs of a list such as 0-3,8."""
    ranges = [part.split("-") for part in cpulist.split(",")]
    return [cpu for part in ranges for cpu in range(int(part[0]), int(part[-1]) + 1)]


def wires(told: dict[str, Any]) -> Counter[tuple[int, int]]:
    """How many live NVLinks lead from a GPU (by index) to another."""
    index = {gpu["busid"]: gpu["Index"] for gpu in told["gpus"]}
    return Counter(
        (gpu["Index"], index[link["remote"]])
        for gpu in told["gpus"]
        for link in gpu["links"]
        if link["remote"] in index
    )


@pytest.mark.parametrize(("name", "library"), [("dgx1v", "dgx-1v"), ("dgx1p", "dgx-1p")])
def test_the_wires_of_a_dgx_1_are_the_librarys(name: str, library: str, answers: Answers) -> None:
    expected = {
        (int(link.src[3:]), int(link.dst[3:])): link.count
        for link in LIBRARY[library]().links
        if link.channel == "nvlink"
    }
    assert wires(answers(name)) == expected


def test_a_dead_wire_and_a_slow_one_show_at_both_ends(answers: Answers) -> None:
    told = answers("dead_nvlinks")
    whole = answers("dgx1v")
    assert wires(whole) - wires(told) == Counter({(0, 3): 1, (3, 0): 1})
    speeds = [Counter(link["speed"] for link in gpu["links"][:6]) for gpu in told["gpus"]]
    for number, counts in enumerate(speeds):
        expected = {25781: 5, 0: 1} if number in (0, 3) else {25781: 6}
        assert counts == ({25781: 5, HALF_SPEED: 1} if number in (5, 6) else expected)


def test_an_old_driver_lacks_newer_functions(answers: Answers) -> None:
    """The symbols are absent, so nvidia-ml-py itself raises FunctionNotFound; all older answers are the same."""
    old, new = (answers(name)["gpus"][4] for name in ("old_driver", "dgx1v"))
    newer = {"NumaNodeId", "MigMode", "instances", "fabric", "c2c"}
    assert {key for key, value in old.items() if value == "FunctionNotFound"} == newer
    assert {link["RemoteDeviceType"] for link in old["links"]} == {"FunctionNotFound"}
    links = zip(old["links"], new["links"], strict=True)
    assert all(first == {**second, "RemoteDeviceType": "FunctionNotFound"} for first, second in links)
    same = old.keys() - newer - {"UUID", "links"}
    assert {key: old[key] for key in same} == {key: new[key] for key in same}


def test_about_half_of_the_calls_fail_in_three_ways(answers: Answers) -> None:
    rules = list(refusals(1))
    cases = 17 * 8 + 5 * 8 * 6
    assert 0.45 * cases < len(rules) < 0.55 * cases
    ways = Counter(rule.split()[1] for rule in rules)
    assert {way for way, count in ways.items() if 0.23 < count / len(rules) < 0.43} == {"3", "13", "999"}
    assert rules != list(refusals(2))
    told = answers("half_failing")["gpus"]
    assert [gpu["busid"][9:11] for gpu in told] == ["06", "07", "0A", "0B", "85", "86", "89", "8A"]
    errors = {"NotSupported", "Unknown", "FunctionNotFound"}
    states = [link["State"] for gpu in told for link in gpu["links"][:6]]
    assert {state for state in states if state != 1} == errors
    assert 16 <= states.count(1) <= 32


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (3, pynvml.NVMLError_NotSupported),
        (4, pynvml.NVMLError_NoPermission),
        (9, pynvml.NVMLError_DriverNotLoaded),
        (13, pynvml.NVMLError_FunctionNotFound),
        (15, pynvml.NVMLError_GpuIsLost),
        (999, pynvml.NVMLError_Unknown),
    ],
)
def test_a_rule_makes_a_call_fail(code: int, error: type[Exception], fake_here: Installer) -> None:
    rules = (f"nvmlDeviceGetNvLinkState {code} 2 1", f"nvmlDeviceGetName {code} 3", f"nvmlSystem* {code}")
    fake_here(replace(MACHINES["dgx1v"](), rules=rules))
    pynvml.nvmlInit()
    second, third = (pynvml.nvmlDeviceGetHandleByIndex(i) for i in (2, 3))
    failing: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (pynvml.nvmlDeviceGetNvLinkState, (second, 1)),
        (pynvml.nvmlDeviceGetName, (third,)),
        (pynvml.nvmlSystemGetDriverVersion, ()),
    ]
    for function, arguments in failing:
        with pytest.raises(error):
            function(*arguments)
    assert pynvml.nvmlDeviceGetNvLinkState(second, 0) == pynvml.nvmlDeviceGetNvLinkState(third, 1) == 1
    assert pynvml.nvmlDeviceGetName(second) == "Tesla V100-SXM2-32GB"
    pynvml.nvmlShutdown()


def test_a_lost_gpu_cannot_be_asked(fake_here: Installer) -> None:
    fake_here("lost_gpu")
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 8
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        pynvml.nvmlDeviceGetHandleByIndex(5)
    pynvml.nvmlShutdown()


def test_one_process_sees_one_machine_after_another(fake_here: Installer) -> None:
    for name, model in (("dgx1v", "Tesla V100-SXM2-32GB"), ("dgx1p", "Tesla P100-SXM2-16GB")):
        fake_here(name)
        pynvml.nvmlInit()
        assert pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(7)) == model
        pynvml.nvmlShutdown()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()


def test_devices_are_found_by_index_identity_and_place(fake_here: Installer) -> None:
    machine = fake_here("dgx1v").machine
    pynvml.nvmlInit()
    for busid in ("0000:0a:00.0", "00000000:0A:00.0"):
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(busid)
        assert pynvml.nvmlDeviceGetIndex(handle) == 2
    identity = f"GPU-{machine.uuid('0000:0a:00.0')}"
    assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(identity)) == 2
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetHandleByPciBusId("0000:99:00.0")
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetHandleByUUID("GPU-0")
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetHandleByIndex(8)
    pynvml.nvmlShutdown()


def test_fabric_is_told_in_each_version_of_its_structure(fake_here: Installer) -> None:
    """The first has no health, the second no summary; a version that is not known is refused."""
    fake_here("dgx_h100")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    first, second = pynvml.c_nvmlGpuFabricInfo_t(), pynvml.c_nvmlGpuFabricInfo_v2_t()
    pynvml.nvmlDeviceGetGpuFabricInfo(handle, pynvml.byref(first))
    pynvml.nvmlDeviceGetGpuFabricInfoV(handle, pynvml.byref(second))
    assert (first.state, first.status, first.cliqueId) == (3, 0, 0)
    assert (second.state, second.status, second.healthMask) == (3, 0, 0x1AA)
    second.version = 7
    with pytest.raises(pynvml.NVMLError_ArgumentVersionMismatch):
        pynvml.nvmlDeviceGetGpuFabricInfoV(handle, pynvml.byref(second))
    pynvml.nvmlShutdown()


def test_a_text_that_cannot_be_read_is_no_machine(
    fake_here: Installer, capfd: pytest.CaptureFixture[str]
) -> None:
    """A mistake in a description must not pass for a failing driver."""
    host = fake_here(MACHINES["pcie_box"]())
    with (host.folder / "nvml.txt").open("a") as text:
        text.write("pstaet 8\n")
    with pytest.raises(pynvml.NVMLError_Unknown):
        pynvml.nvmlInit()
    assert "cannot read: pstaet 8" in capfd.readouterr().err


def test_the_library_is_built_once(fake_nvml: Path) -> None:
    before = (fake_nvml / "new" / SONAME).stat()
    assert build_libraries(fake_nvml) == fake_nvml
    assert (fake_nvml / "new" / SONAME).stat() == before


CODES = {10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def nested(sysfs: Path, busid: str) -> list[str]:
    """Host bridge and bus ids on the way down to a PCI device, read from its real path."""
    path = (sysfs / "bus/pci/devices" / busid).resolve(strict=True)
    return list(path.relative_to(sysfs.resolve() / "devices").parts)


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_links_lead_to_nested_folders(name: str, fake_host: Installer) -> None:
    host = fake_host(name)
    for busid, (root, chain) in host.machine.places().items():
        assert nested(host.sysfs_root, busid) == [f"pci{root.bus}", *(pci.busid for pci in chain)]
    assert {path.name for path in (host.sysfs_root / "bus/pci/devices").iterdir()} == set(
        host.machine.places()
    )


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


def test_network_devices_are_in_both_places(fake_host: Installer) -> None:
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


def test_described_files_are_unreadable_or_absent(fake_host: Installer) -> None:
    host = fake_host("half_failing")
    for file in host.machine.unreadable:
        with pytest.raises(OSError, match="error"):
            (host.sysfs_root / file).read_text()
    for file in host.machine.absent:
        assert not (host.sysfs_root / file).exists()
    devices = len(host.machine.places())
    assert 0.3 * devices < len(host.machine.unreadable) < 0.7 * devices
    assert len(host.machine.unreadable) + len(host.machine.absent) == devices + 4


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

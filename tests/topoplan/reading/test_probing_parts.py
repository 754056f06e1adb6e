"""What the probe concludes from answers: rates of PCIe links, NVLinks both ends confirm, CUDA's view, what is kept."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import topoplan
from tests.support.refusals import refused
from topoplan.machine.host_topology import NvlinkBundle, bus_id, switch_tree
from topoplan.reading.probe import (
    MOST_AGE,
    MOST_AGE_AMISS,
    cache_file,
    device_files,
    read_cache,
    visible_devices,
    write_cache,
)
from topoplan.reading.probe_devices import Sysfs, SysfsDevice, find_nics, kernel_tree
from topoplan.reading.probe_driver import Driver, DriverGpu, DriverLink
from topoplan.reading.probe_nvlinks import nvlink_bundles, refused_access

GPU = "0000:07:00.0"


def pci(
    busid: str, parent: str, speed: float | None, width: int | None, *, now: int | None = None
) -> SysfsDevice:
    """A PCI device with the highest rate and width it knows, and its present width."""
    return SysfsDevice(busid, parent, "pci0000:00", "0x030200", "", 0, None, speed, now or width, width)


def driver_gpu(
    index: int = 0, busid: str = GPU, links: Sequence[DriverLink] = (), **changes: object
) -> DriverGpu:
    gpu = DriverGpu(
        index, busid, "V100", f"GPU-{index}", 70, tuple(links), True, 3, 3, 16, 16, True, 0, None, 0.0, ""
    )
    return replace(gpu, **changes)  # type: ignore[arg-type]


def driver(*gpus: DriverGpu, **changes: object) -> Driver:
    return replace(Driver("550", gpus, {}, {}, {}, ()), **changes)  # type: ignore[arg-type]


def up(
    number: int, remote: str | None, *, end: str | None = None, speed: float | None = 25.781
) -> DriverLink:
    return DriverLink(number, True, True, 2, speed, remote, end)


def chain(
    root: tuple[float, int], upper: tuple[float, int], port: tuple[float, int], gpu: SysfsDevice
) -> list[SysfsDevice]:
    """Root port, upstream and downstream port of a switch, GPU."""
    ids = ["0000:00:02.0", "0000:05:00.0", "0000:06:08.0"]
    ports = [pci(ids[i], ids[i - 1] if i else "", *rate) for i, rate in enumerate((root, upper, port))]
    return [*ports, gpu]


PORT = "0000:06:08.0"
ROOT = "0000:00:02.0"
ALONE = pci(GPU, "", 8.0, 16)
UNKNOWN = driver_gpu(width=None, most_width=None, most_generation=None)

RATES: dict[str, tuple[list[SysfsDevice], DriverGpu, list[float], tuple[str, ...]]] = {
    "the slower end counts, and the switch's own link upwards is another": (
        chain((8.0, 16), (16.0, 8), (8.0, 16), pci(GPU, PORT, 16.0, 16)),
        driver_gpu(),
        [6.0, 6.0, 12.0, 12.0],
        (),
    ),
    "lanes that are lost": (
        chain((8.0, 16), (8.0, 16), (8.0, 16), pci(GPU, PORT, 8.0, 16, now=4)),
        driver_gpu(),
        [12.0, 12.0, 3.0, 3.0],
        ("warning: gpu0: its PCIe link runs at x4, both ends have x16",),
    ),
    "a narrow slot": (
        chain((8.0, 16), (8.0, 16), (8.0, 8), pci(GPU, PORT, 8.0, 16, now=8)),
        driver_gpu(),
        [12.0, 12.0, 6.0, 6.0],
        (),
    ),
    "no rates from kernels before 4.13: the driver's word up to the port": (
        [pci(ROOT, "", None, None), pci(GPU, ROOT, None, None)],
        driver_gpu(most_generation=4),
        [24.0, 24.0],
        (),
    ),
    "an idle GPU lowers its generation": ([ALONE], driver_gpu(generation=1, idle=True), [12.0], ()),
    "under load": ([ALONE], driver_gpu(generation=1, idle=False), [3.0], ("generation 1 under load",)),
    "no bridge, as in a virtual machine": ([pci(GPU, "", 16.0, 8)], driver_gpu(), [12.0], ()),
    "nobody knows": ([pci(GPU, "", None, None)], UNKNOWN, [12.0], (f"generation 3 assumed: {GPU}",)),
    "not listed": ([], driver_gpu(), [12.0], (f"warning: gpu0 ({GPU}) is not in the kernel's PCIe tree",)),
}


@pytest.mark.parametrize("name", RATES)
def test_rates_of_pcie_links(name: str) -> None:
    devices, gpu, rates, notes = RATES[name]
    side = kernel_tree({GPU: devices}, {GPU: "gpu"}, driver(gpu), [0])
    assert [device.bandwidth for device in side.tree] == rates
    assert len(side.notes) == len(notes)
    assert all(part in note for part, note in zip(notes, side.notes, strict=True))


def test_functions_of_one_card_share_its_link() -> None:
    """A NIC of generation 4 with two ports, in a slot of generation 5: both together get 24 GB/s, not each."""
    port = pci("0000:00:01.0", "", 32.0, 16)
    cards = {f"0000:61:00.{i}": pci(f"0000:61:00.{i}", port.busid, 16.0, 16) for i in (0, 1)}
    side = kernel_tree(
        {busid: [port, card] for busid, card in cards.items()}, dict.fromkeys(cards, "nic"), driver(), [0]
    )
    found = [(device.busid, device.kind, device.bandwidth) for device in switch_tree(side.tree)]
    assert found == [("0000:00:01.0", "bridge", 24.0), *((busid, "nic", 24.0) for busid in cards)]


def test_two_levels_of_one_broadcom_chip_are_one_switch_though_ports_lie_between() -> None:
    """In the kernel's tree a downstream port of the upper level, which bears the chip's number too, is between them."""
    chip = "1000:c010:1000:a096"
    ports = [
        replace(pci(busid, above, 16.0, 16), chip=chip)
        for busid, above in (
            ("0000:01:00.0", "0000:00:01.0"),
            ("0000:02:00.0", "0000:01:00.0"),
            ("0000:03:00.0", "0000:02:00.0"),
            ("0000:04:00.0", "0000:03:00.0"),
            ("0000:04:01.0", "0000:03:00.0"),
            ("0000:02:01.0", "0000:01:00.0"),
        )
    ]
    root = pci("0000:00:01.0", "", 16.0, 16)
    chains = {
        f"0000:1{i}:00.0": [
            root,
            *(ports[n] for n in way),
            pci(f"0000:1{i}:00.0", ports[way[-1]].busid, 16.0, 16),
        ]
        for i, way in enumerate([(0, 1, 2, 3), (0, 1, 2, 4), (0, 5)])
    }
    side = kernel_tree(chains, dict.fromkeys(chains, "gpu"), driver(), [0])
    assert {device.busid: device.parent for device in switch_tree(side.tree)} == {
        "0000:01:00.0": "",
        **dict.fromkeys(chains, "0000:01:00.0"),
    }


def counts(
    *gpus: DriverGpu, switches: Sequence[str] = (), **changes: object
) -> tuple[dict[str, list[tuple[str, int]]], list[str]]:
    """Far ends and counts of the bundles of each GPU, and warnings."""
    bundles, notes = nvlink_bundles(driver(*gpus, **changes), switches, [])
    return {busid: [(one.end, one.count) for one in found] for busid, found in bundles.items()}, list(notes)


FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"


def pair(
    first: Sequence[DriverLink], second: Sequence[DriverLink], **changes: object
) -> tuple[DriverGpu, DriverGpu]:
    return driver_gpu(0, FIRST, first), driver_gpu(1, SECOND, second, **changes)


DOWN = replace(up(1, None), active=False)
MUTE = [DriverLink(number, None, None, None, None, None, None) for number in range(2)]
TWO = [up(0, SECOND), up(1, SECOND)]
SWITCHES = ("0000:c1:00.0",)
CHIPS = {
    "a listed chip": up(0, SWITCHES[0]),
    "a hidden one": up(0, ""),
    "hidden by type": up(0, "", end="nvswitch"),
    "by type alone": up(0, None, end="nvswitch"),
}
GONE = [replace(up(number, None), active=False) for number in range(3)]

REFUSED = "access over NVLink is refused"

BUNDLES: dict[
    str, tuple[tuple[DriverGpu, ...], dict[str, object], list[tuple[str, int] | None], list[str]]
] = {
    "both ends": (pair(TWO, [up(0, FIRST), up(1, FIRST)]), {}, [("gpu", 2), ("gpu", 2)], []),
    "one end down": (
        pair(TWO, [up(0, FIRST), DOWN]),
        {},
        [("gpu", 1), ("gpu", 1)],
        [
            "warning: gpu1: NVLink 1 of 2 is down",
            "warning: gpu0-gpu1: the two ends show 2 and 1 NVLinks up; the smaller number counts",
        ],
    ),
    "an end that does not answer": (
        pair(TWO, MUTE),
        {},
        [("gpu", 2), ("gpu", 2)],
        ["warning: gpu1: far end of NVLink 0-1 is unknown"],
    ),
    **{
        name: (pair([link], [link]), {}, [("nvswitch", 1), ("nvswitch", 1)], [])
        for name, link in CHIPS.items()
    },
    "access that is refused": (
        pair([up(0, SECOND)], [up(0, FIRST)]),
        {"refused_nvlink": {(0, 1): "disabled by a registry key"}},
        [None, None],
        [f"warning: gpu0-gpu1: {REFUSED} (disabled by a registry key) though 1 link joins them; left out"],
    ),
    "a GPU in MIG mode": (
        pair([up(0, SECOND)], [up(0, FIRST)], mig=("MIG-1", "MIG-2")),
        {},
        [None, None],
        ["warning: gpu1 is in MIG mode (2 instances): no access between GPUs, NVLinks left out"],
    ),
    "all down": ((driver_gpu(0, FIRST, GONE),), {}, [None], ["gpu0: no NVLink is up"]),
    "all down beside links that are up": (
        pair(GONE, [up(0, ""), DOWN, replace(DOWN, number=2)]),
        {},
        [None, ("nvswitch", 1)],
        ["warning: gpu1: NVLinks 1-2 of 3 are down", "warning: gpu0: no NVLink is up"],
    ),
}


@pytest.mark.parametrize("name", BUNDLES)
def test_nvlinks_count_as_their_ends_say(name: str) -> None:
    gpus, changes, ends, notes = BUNDLES[name]
    found, told = counts(*gpus, switches=SWITCHES, **changes)
    assert list(found.values()) == [[end] if end else [] for end in ends]
    assert told == notes


def test_a_gpu_that_is_not_shown_is_no_switch() -> None:
    """A container that is given two GPUs of four and no sysfs: the driver says that the far ends are GPUs."""
    found, _ = counts(*pair([up(0, "0000:03:00.0", end="gpu")], [up(0, "0000:04:00.0", end="gpu")]))
    assert found == {FIRST: [("gpu", 1)], SECOND: [("gpu", 1)]}


@pytest.mark.parametrize(
    ("version", "sm", "speed", "rate"),
    [
        (1, 60, 19.179, 20.0),
        (2, 70, 25.781, 25.0),
        (5, 80, 25.0, 25.0),
        (6, 90, 26.562, 25.0),
        (7, 100, 53.125, 50.0),
        (5, 86, 14.062, 14.0625),
        (5, 86, None, 14.0625),
        (None, 60, 20.625, 20.0),
        (None, 70, None, 25.0),
        (None, 86, None, 14.0625),
        (None, 100, None, 50.0),
        (8, 107, 106.25, 106.25),
        (8, 107, None, 50.0),
    ],
)
def test_a_whole_link_has_the_nominal_rate_of_its_generation(
    version: int | None, sm: int, speed: float | None, rate: float
) -> None:
    link = replace(up(0, ""), version=version, speed=speed)
    bundles, _ = nvlink_bundles(driver(driver_gpu(links=[link], sm=sm)), [], [])
    assert [bundle.bandwidth for bundle in bundles[GPU]] == [rate]


def test_a_gpu_refused_by_all_others_at_the_switch_loses_its_links() -> None:
    gpus = [driver_gpu(i, f"0000:0{i}:00.0", [up(0, "")]) for i in range(3)]
    found, notes = counts(*gpus, refused_nvlink={(0, 2): "unknown", (1, 2): "unknown"})
    assert [len(found[gpu.busid]) for gpu in gpus] == [1, 1, 0]
    assert "gpu2: access over NVLink is refused to every GPU at the switch" in notes[-1]


def machine() -> topoplan.Topology:
    whole = topoplan.load("dgx-1v")
    devices = tuple(
        replace(device, facts=(("mig", f"MIG-{i}a,MIG-{i}b"), ("uuid", f"GPU-{i}{i}")))
        if device.kind == "gpu"
        else device
        for i, device in enumerate(whole.devices)
    )
    return replace(whole, devices=devices)


@pytest.mark.parametrize(
    ("named", "gpus"),
    [
        ("3,1", ("gpu3", "gpu1")),
        ("0, 2", ("gpu0", "gpu2")),
        ("1,9,2", ("gpu1",)),
        ("1gpu2,+2ampere", ("gpu1", "gpu2")),
        ("3,GPU-55", ("gpu3",)),
        ("GPU-55,GPU-4", ("gpu5", "gpu4")),
        ("GPU-55,3", ("gpu5",)),
        ("GPU-55,MIG-7b", ("gpu5",)),
        ("MIG-7a,MIG-7b", ("gpu7",)),
        ("MIG-7b", ("gpu7",)),
        ("MIG-GPU-66/1/0", ("gpu6",)),
    ],
)
def test_cuda_visible_devices_choose_and_order_gpus_up_to_the_first_unknown(
    named: str, gpus: tuple[str, ...]
) -> None:
    """CUDA C programming guide, CUDA environment variables; mixed and ragged words as torch.cuda has them."""
    shown = visible_devices(machine(), {"CUDA_VISIBLE_DEVICES": named})
    assert shown.gpus == gpus
    assert {end for link in shown.links for end in (link.src, link.dst) if end.startswith("gpu")} <= set(gpus)


def test_the_note_of_a_view_is_short_and_can_be_printed() -> None:
    (note,) = visible_devices(machine(), {"CUDA_VISIBLE_DEVICES": "0,\x1b[31m" + 99 * "9"}).notes
    assert note == f"CUDA_VISIBLE_DEVICES=0,?[31m{53 * '9'}… shows 1 of 8 GPUs"


TWICE = dict.fromkeys(("1,2,1", "1,01", "GPU-55,GPU-55"), ", since it names one twice")


@pytest.mark.parametrize("named", [*TWICE, "", "-1", "9", "GPU-", "gpu0", "²", "٣"])
def test_a_view_without_any_gpu_is_an_error(named: str) -> None:
    """As CUDA does; a view that names a GPU twice shows none too."""
    says = (
        f"CUDA_VISIBLE_DEVICES={named!r} leaves none of the 8 GPUs{TWICE.get(named, '')}; unset it to see all"
    )
    with refused(topoplan.ProbeError, begins=says):
        visible_devices(machine(), {"CUDA_VISIBLE_DEVICES": named})


def test_a_probe_is_kept_for_a_day_and_a_broken_file_is_read_over(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "probe.json"
    assert read_cache(path) is None
    write_cache(path, machine())
    assert read_cache(path) == machine()
    for age in (MOST_AGE + 60, -3600):
        os.utime(path, (time.time() - age, time.time() - age))
        assert read_cache(path) is None
    path.write_text("{")
    assert read_cache(path) is None
    assert list(path.parent.iterdir()) == [path]
    # A probe with a warning is kept for minutes: the fabric manager may have been about to start.
    amiss = replace(machine(), notes=("warning: gpu0: NVLink fabric: registration is in progress",))
    write_cache(path, amiss)
    assert read_cache(path) == amiss
    old = time.time() - MOST_AGE_AMISS - 60
    os.utime(path, (old, old))
    assert read_cache(path) is None


def test_keeping_a_probe_drops_those_that_are_too_old_and_nothing_else(tmp_path: Path) -> None:
    """Every start of the machine, and every container, has a file of its own."""
    names = ["probe-1.json", "probe-2abc.tmp", "probe-3.json", "other.json"]
    for name in names:
        (tmp_path / name).write_text("")
        age = 60 if name == "probe-3.json" else MOST_AGE + 60
        os.utime(tmp_path / name, (time.time() - age, time.time() - age))
    write_cache(tmp_path / "probe-4.json", machine())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.json", "probe-3.json", "probe-4.json"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_a_probe_that_another_user_kept_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    write_cache(path, machine())
    os.chown(path, 12345, -1)
    assert read_cache(path) is None


def test_another_boot_driver_device_mig_instance_or_nic_is_another_machine(tmp_path: Path) -> None:
    root = tmp_path / "sys"
    boot = tmp_path / "proc/sys/kernel/random/boot_id"
    rdma_adapter(root, "0000:00:01.0", "mlx5_0", [])
    assert cache_file(Sysfs(root)) is None
    boot.parent.mkdir(parents=True)
    seen = []
    for name, content in (
        (boot, "1"),
        (boot, "2"),
        (root / "module/nvidia/version", "550"),
        (root / "bus/pci/devices" / GPU, ""),
        (tmp_path / "proc/driver/nvidia/capabilities/gpu0/mig/gi1/access", ""),
        (root / "class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE"),
        (root / "class/infiniband/mlx5_0/ports/1/rate", "100 Gb/sec (4X EDR)"),
    ):
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_text(content)
        seen.append(cache_file(Sysfs(root)))
        assert cache_file(Sysfs(root)) == seen[-1]
    assert len(set(seen)) == len(seen)


def booted(folder: Path) -> Sysfs:
    (folder / "proc/sys/kernel/random").mkdir(parents=True)
    (folder / "proc/sys/kernel/random/boot_id").write_text("1")
    return Sysfs(folder / "sys")


def test_a_user_without_a_home_keeps_nothing_and_a_relative_folder_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that runs under a number that no user has: ~ stays ~ there, here by a home of that name."""
    sysfs = booted(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    kept = cache_file(sysfs)
    assert kept is not None
    assert kept.parent == tmp_path / ".cache/topoplan"
    monkeypatch.setenv("HOME", "~")
    assert cache_file(sysfs) is None
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_file(sysfs) is None


def test_device_files_that_may_not_be_opened_do_not_count(tmp_path: Path) -> None:
    """A link to nothing stands for one that a control group forbids, which root too may not open."""
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "sda"):
        (tmp_path / name).touch()
    (tmp_path / "nvidia1").symlink_to("gone")
    assert device_files(str(tmp_path)) == ["nvidia-uvm", "nvidia0", "nvidiactl"]
    assert device_files(str(tmp_path / "gone")) == []


def rdma_adapter(sys: Path, busid: str, name: str, ports: Sequence[tuple[str, str]]) -> Path:
    """An RDMA adapter on PCIe with the state and rate of each port; its device's folder."""
    device = sys / "devices/pci0000:00" / busid
    (device / f"infiniband/{name}").mkdir(parents=True)
    for number, (state, rate) in enumerate(ports):
        port = device / f"infiniband/{name}/ports/{number}"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "rate").write_text(rate)
    for folder, target in (("bus/pci/devices", device), ("class/infiniband", device / f"infiniband/{name}")):
        (sys / folder).mkdir(parents=True, exist_ok=True)
        (sys / folder / target.name).symlink_to(target)
    (device / f"infiniband/{name}/device").symlink_to(device)
    return device


def test_network_interfaces_count_only_where_no_rdma_device_does(tmp_path: Path) -> None:
    root = tmp_path / "sys"
    for i, (name, speed) in enumerate((("eth0", "25000"), ("eth1", "1000"), ("eth2", "-1"))):
        device = root / f"devices/pci0000:00/0000:00:0{i}.0"
        device.mkdir(parents=True)
        (root / f"class/net/{name}").mkdir(parents=True)
        (root / f"class/net/{name}/device").symlink_to(device)
        (root / f"class/net/{name}/speed").write_text(speed)
    (root / "class/net/lo").mkdir()
    nics, notes = find_nics(Sysfs(root))
    assert [(nic.adapter, nic.gigabits) for nic in nics] == [("eth0", 25.0)]
    assert notes == ()
    rdma_adapter(root, "0000:05:00.0", "mlx5_0", [("4: ACTIVE", "100 Gb/sec (4X EDR)")])
    nics, notes = find_nics(Sysfs(root))
    assert [(nic.adapter, nic.gigabits) for nic in nics] == [("mlx5_0", 100.0)]
    assert notes == ("NICs are those with RDMA; eth0 left out",)


@pytest.mark.parametrize(
    ("above", "bridge", "busids"),
    [
        ("", "pci0000:00", ["0000:00:1c.0"]),
        ("platform/NVDA1234:00", "pci0009:00", ["0009:00:00.0", "0009:01:00.0"]),
        ("pci0000:5d/0000:5d:05.5", "pci10000:00", ["10000:00:02.0", "10000:01:00.0"]),
        ("LNXSYSTM:00/VMBUS:01/47505500-0001-0000", "pci0001:00", ["0001:00:00.0"]),
    ],
    ids=["virtual machine", "superchip", "volume management device", "hyper-v"],
)
def test_a_chain_begins_below_the_last_host_bridge(
    tmp_path: Path, above: str, bridge: str, busids: list[str]
) -> None:
    """Wherever the kernel hangs host bridges, and though domains have more than four digits."""
    root = tmp_path / "sys"
    device = Path(root, "devices", above, bridge, *busids)
    device.mkdir(parents=True)
    (root / "bus/pci/devices").mkdir(parents=True)
    (root / "bus/pci/devices" / device.name).symlink_to(device)
    sysfs = Sysfs(root)
    assert sysfs.pci_devices() == [device.name]
    found = sysfs.chain(bus_id(device.name.zfill(16).upper()))
    assert [(one.busid, one.parent, one.host_bridge) for one in found] == [
        (busid, above, bridge) for busid, above in zip(busids, ["", *busids], strict=False)
    ]


def test_virtual_functions_of_a_listed_nic_do_not_count(tmp_path: Path) -> None:
    """Two of a NIC's functions share its port; without the NIC, as in a container, one of them stands for itself."""
    root = tmp_path / "sys"
    for i in range(3):
        device = rdma_adapter(root, f"0000:05:00.{i}", f"mlx5_{i}", [("4: ACTIVE", "200 Gb/sec (4X HDR)")])
        if i:
            (device / "physfn").symlink_to("../0000:05:00.0")
    assert [nic.adapter for nic in find_nics(Sysfs(root))[0]] == ["mlx5_0"]
    for gone in (0, 2):
        (root / f"class/infiniband/mlx5_{gone}").unlink()
    assert [nic.adapter for nic in find_nics(Sysfs(root))[0]] == ["mlx5_1"]


def test_the_ports_of_an_adapter_add_up_as_they_are_written(tmp_path: Path) -> None:
    """Three active ports of 25.781 Gb/s are 77.343; one that is down adds nothing."""
    states = ("4: ACTIVE", "4: ACTIVE", "1: DOWN", "4: ACTIVE")
    rdma_adapter(
        tmp_path / "sys", "0000:05:00.0", "mlx5_0", [(one, "25.781 Gb/sec (1X EDR)") for one in states]
    )
    (nic,), _ = find_nics(Sysfs(tmp_path / "sys"))
    assert nic.gigabits == 77.343


def test_refused_access_over_pcie_is_a_warning_below_one_cpu_and_a_note_across_cpus() -> None:
    ids = [f"0000:0{i}:00.0" for i in range(4)]
    gpus = [driver_gpu(i, busid) for i, busid in enumerate(ids)]
    joined = {(0, 2): "chipset not supported", (0, 1): "chipset not supported", (2, 3): "unknown"}
    lines = refused_access(
        driver(*gpus, refused=joined),
        dict.fromkeys(ids[:2], ()) | {busid: (NvlinkBundle("nvswitch", "", 1, 25.0),) for busid in ids[2:]},
        {ids[0]: 0, ids[1]: 0, ids[2]: 1, ids[3]: 1},
    )
    end = "copies there go through the host's memory"
    assert lines == (
        f"warning: access over PCIe is refused (chipset not supported) between gpu0-gpu1; {end}",
        f"access over PCIe is refused (chipset not supported) between gpu0-gpu2; {end}",
    )

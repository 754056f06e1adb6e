"""A server's description becomes a Topology: the tree keeps what limits a transfer, NVLinks lead where they lead."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.machine_links import bundles
from tests.support.refusals import refused
from topoplan.machine.hardware import GpuGeneration
from topoplan.machine.host_topology import (
    Host,
    HostCpu,
    HostGpu,
    HostNic,
    NvlinkBundle,
    PciDevice,
    bus_id,
    bus_id_order,
    host_topology,
    plain_bus_id,
    switch_tree,
)
from topoplan.machine.small_machines import HostSide, direct_box, nvswitch_box

PEX = "1000:c010:1000:a096"
GEN5_UPPER, GEN5_LOWER = "1000:c030:1000:00a2", "1000:c030:1000:10a2"


def gpu(number: int) -> str:
    return f"0000:{0x20 + number:02x}:00.0"


def bridge(number: int, parent: str = "", *, bandwidth: float = 24.0, chip: str = "") -> PciDevice:
    return PciDevice(f"0000:{number:02x}:01.0", "bridge", parent, 0, bandwidth, chip)


def below(number: int, parent: PciDevice | None, *, bandwidth: float = 24.0) -> PciDevice:
    return PciDevice(gpu(number), "gpu", parent.busid if parent else "", 0, bandwidth)


def server(tree: list[PciDevice], bundles: dict[int, list[NvlinkBundle]] | None = None) -> Host:
    gpus = [device.busid for device in tree if device.kind == "gpu"]
    return Host(
        "server",
        (HostCpu(0, 10.0),),
        tuple(tree),
        tuple(HostGpu(busid, i, nvlinks=tuple((bundles or {}).get(i, []))) for i, busid in enumerate(gpus)),
        (),
    )


def test_a_bus_id_is_written_as_the_kernel_writes_it() -> None:
    assert [bus_id(text) for text in ("00000000:06:00.0", "0001:0A:00")] == ["0000:06:00.0", "0001:0a:00.0"]
    same = ["ffff:ff:01.0", "12345678:06:1f.7"]
    assert [bus_id(text) for text in same] == same
    wrong = "fffffff:ffff:ff FFFFFFF:FFFF:FF.0 fffffff:ff:ff.0 0000:06:20.0 06:00.0 0000:06:00.8 gpu0"
    for text in ("", *wrong.split()):
        with pytest.raises(topoplan.TopologyError, match="not a PCI bus id such as"):
            bus_id(text)
        assert plain_bus_id(text) == text
    assert sorted(["10000:01:00.0", "2000:01:00.0"], key=bus_id_order)[0] == "2000:01:00.0"


def test_a_bridge_above_one_device_is_a_link_as_fast_as_the_slower_of_the_two() -> None:
    """The MI250's own bridge runs at x8 of generation 4 above a die that claims x16 of generation 5."""
    root = bridge(1, bandwidth=12.0)
    (die,) = switch_tree([root, below(0, root, bandwidth=48.0)])
    assert (die.parent, die.bandwidth) == ("", 12.0)


def test_branches_without_a_gpu_or_nic_do_not_make_a_switch() -> None:
    top = bridge(1)
    disk = PciDevice("0000:09:00.0", "other", top.busid, 0, 6.0)
    empty = bridge(2, top.busid)
    assert [device.kind for device in switch_tree([top, disk, empty, below(0, top)])] == ["gpu"]


def parents(tree: list[PciDevice]) -> dict[str, str]:
    """The parent of each device of the cut-down tree."""
    return {device.busid: device.parent for device in switch_tree(tree)}


def test_two_levels_of_one_gen4_chip_are_one_switch() -> None:
    """As NCCL's ncclTopoFlattenBcmSwitches; a third level of the same chip stays.

    The kernel shows a port of the chip between its two levels; NCCL passes over it.
    """
    top = bridge(1, chip=PEX)
    lower = bridge(2, top.busid, chip=PEX)
    third = bridge(3, lower.busid, chip=PEX)
    tree = [top, lower, below(0, lower), below(1, lower), third, below(2, third), below(3, third)]
    below_top, below_third = {gpu(i): top.busid for i in (0, 1)}, {gpu(i): third.busid for i in (2, 3)}
    assert parents(tree) == {top.busid: "", third.busid: top.busid} | below_top | below_third
    ports = [replace(bridge(2 + i, top.busid, chip=PEX), kind="port") for i in range(2)]
    lower = bridge(4, ports[0].busid, chip=PEX)
    inner = [replace(bridge(5 + i, lower.busid, chip=PEX), kind="port") for i in range(2)]
    ends = [below(0, inner[0]), below(1, inner[1]), below(2, ports[1])]
    whole = parents([top, *ports, lower, *inner, *ends])
    assert whole == {top.busid: "", **{gpu(i): top.busid for i in range(3)}}


def test_a_gen5_chip_is_told_by_its_level_and_other_chips_stay_apart() -> None:
    top, other = bridge(1, chip=GEN5_UPPER), bridge(2, chip="10b5:9797:10b5:9797")
    lower = bridge(3, top.busid, chip=GEN5_LOWER)
    nested = bridge(4, other.busid, chip="10b5:9797:10b5:9797")
    leaves = [below(2, nested), below(3, nested), below(4, other)]
    found = parents([top, lower, below(0, lower), below(1, lower), other, nested, *leaves])
    assert found[gpu(0)] == found[gpu(1)] == top.busid
    assert (found[gpu(2)], found[nested.busid]) == (nested.busid, other.busid)


@settings(max_examples=40)
@given(st.data())
def test_the_cut_down_tree_lets_every_pair_through_at_the_rate_of_the_whole_one(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 10))
    tree: list[PciDevice] = []
    for i in range(size):
        bridges = [device.busid for device in tree if device.kind == "bridge"]
        parent = data.draw(st.sampled_from(["", *bridges]))
        tree.append(bridge(i, parent, bandwidth=float(data.draw(st.integers(1, 9)))))
    for i in range(data.draw(st.integers(1, 6))):
        above = data.draw(st.sampled_from(tree[:size]))
        tree.append(below(i, above, bandwidth=float(data.draw(st.integers(1, 9)))))
    cut = switch_tree(tree)
    gpus = [device.busid for device in tree if device.kind == "gpu"]
    assert {device.busid for device in cut if device.kind == "gpu"} == set(gpus)
    for first in gpus:
        for second in gpus:
            assert slowest(tree, first, second) == slowest(list(cut), first, second)
    children = [device.parent for device in cut]
    assert all(children.count(device.busid) > 1 for device in cut if device.kind == "bridge")


def slowest(tree: list[PciDevice], first: str, second: str) -> float | None:
    """Bandwidth between two GPUs; None where they share no bridge."""
    place = {device.busid: device for device in tree}

    def upwards(busid: str) -> list[str]:
        return [busid, *upwards(place[busid].parent)] if busid else []

    one, two = upwards(first), upwards(second)
    shared = next((busid for busid in one if busid in two), None)
    if shared is None or first == second:
        return None
    return min(place[busid].bandwidth for way in (one, two) for busid in way[: way.index(shared)])


def test_nvlinks_listed_by_both_ends_are_one_wire_in_two_directions() -> None:
    """A link that one end lists is used in its direction, with a note; CPUs of POWER have NVLinks too."""
    tree = [below(0, None), below(1, None)]
    listed = {i: [NvlinkBundle("gpu", gpu(1 - i), 2, 50.0)] for i in (0, 1)}
    machine = host_topology(server(tree, listed))
    assert bundles(machine, "nvlink") == {("gpu0", "gpu1"): (2, 50.0), ("gpu1", "gpu0"): (2, 50.0)}
    assert machine.notes == ()
    assert topoplan.verify(topoplan.plan(machine)).exact_rate == Fraction(50)
    one_way = host_topology(server(tree, {0: listed[0]}))
    assert bundles(one_way, "nvlink") == {("gpu0", "gpu1"): (2, 50.0)}
    note = "gpu0 lists 2 NVLinks to gpu1, but gpu1 lists none to gpu0; used in one direction"
    assert one_way.notes == (note,)
    power = host_topology(server(tree, {0: [NvlinkBundle("cpu", "", 3, 60.0)]}))
    assert bundles(power, "nvlink") == {("gpu0", "cpu0"): (3, 60.0), ("cpu0", "gpu0"): (3, 60.0)}


def test_all_switch_chips_are_one_switch() -> None:
    listed = {
        i: [NvlinkBundle("nvswitch", f"0000:c{chip}:00.0", 3, 75.0) for chip in range(2)] for i in range(4)
    }
    machine = host_topology(server([below(i, None) for i in range(4)], listed))
    assert set(bundles(machine, "nvlink").values()) == {(6, 150.0)}
    assert [device.name for device in machine.devices if device.kind == "nvswitch"] == ["nvswitch0"]
    assert topoplan.plan(machine).rate == 100.0


def test_bundles_add_up_as_they_are_written() -> None:
    """Three switch chips, two bundles to one GPU, and three links of a library box: floats miss the sums."""
    chips = {0: [NvlinkBundle("nvswitch", f"0000:c{chip}:00.0", 1, 20.6) for chip in range(3)]}
    listed = {i: [NvlinkBundle("gpu", gpu(1 - i), 1, rate) for rate in (51.562, 25.781)] for i in (0, 1)}
    generation = GpuGeneration("GPU", 3, 25.781, 12.0, 8.0)
    host = HostSide({"gpu0": "cpu0", "gpu1": "cpu0"}, 12, 8, "")
    for machine, found in (
        (host_topology(server([below(0, None)], chips)), (3, 61.8)),
        (host_topology(server([below(0, None), below(1, None)], listed)), (2, 77.343)),
        (direct_box("pair", host, gpu=generation, gpus=2, pairs={(0, 1): 3}, source=""), (3, 77.343)),
        (nvswitch_box("pair", host, gpu=generation, gpus=2, source=""), (3, 77.343)),
    ):
        assert set(bundles(machine, "nvlink").values()) == {found}


@pytest.mark.parametrize(
    ("kind", "end", "note"),
    [
        ("gpu", gpu(0), "to itself (0000:20:00.0); which GPU is at the far end"),
        ("gpu", "0000:99:00.0", "to 0000:99:00.0, which is none of the GPUs"),
        ("unknown", "", "to an unknown far end (not visible); they are left out"),
    ],
)
def test_nvlinks_that_lead_nowhere_are_left_out_with_a_note(kind: str, end: str, note: str) -> None:
    bundle = NvlinkBundle(kind, end, 2, 40.0)
    machine = host_topology(server([below(0, None), below(1, None)], {0: [bundle]}))
    assert not bundles(machine, "nvlink")
    assert machine.notes[0].startswith(f"gpu0: 2 NVLinks {note}")


def test_nics_without_a_place_hang_on_their_cpu() -> None:
    """As `<nic>` straight below `<cpu>` in NCCL's files."""
    nic = HostNic("", "", (("adapter", "eth0"),), 0, 12.5)
    machine = host_topology(replace(server([below(0, None)]), nics=(nic,)))
    assert bundles(machine, "pcie")["nic0", "cpu0"] == (1, 12.5)
    assert machine.device("nic0").fact("adapter") == "eth0"


def test_each_direction_between_cpus_is_as_fast_as_its_own_end() -> None:
    host = Host("two", (HostCpu(0, 10.0), HostCpu(1, 6.0)), (below(0, None),), (HostGpu(gpu(0), 0),), ())
    assert bundles(host_topology(host), "sys") == {("cpu0", "cpu1"): (1, 10.0), ("cpu1", "cpu0"): (1, 6.0)}


@pytest.mark.parametrize(
    ("tree", "gpus", "message"),
    [
        ([below(0, None), below(0, None)], 1, "pci 0000:20:00.0 is listed twice; a bus id names one device"),
        ([below(0, bridge(1))], 1, "pci 0000:20:00.0 is below 0000:01:01.0, which is not a bridge before it"),
        ([replace(below(0, None), cpu=3)], 1, "pci 0000:20:00.0 is on NUMA node 3, which is not listed"),
        ([below(0, None)], 2, "GPU 1 is at 0000:21:00.0, which is not in the PCIe tree"),
    ],
)
def test_contradictions_are_named(tree: list[PciDevice], gpus: int, message: str) -> None:
    host = Host("odd", (HostCpu(0, 10.0),), tuple(tree), tuple(HostGpu(gpu(i), i) for i in range(gpus)), ())
    with refused(topoplan.TopologyError, begins=message):
        host_topology(host)

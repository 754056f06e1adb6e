"""What the fake NVML tells the genuine nvidia-ml-py: all that the descriptions say, in NVML's types and errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.support.fake_machine.ask import LINKS, ask
from tests.support.fake_machine.broken import HALF_SPEED, refusals
from tests.support.fake_machine.description import FakeMachine, Gpu
from tests.support.fake_machine.fixtures import Installer
from tests.support.fake_machine.machines import MACHINES
from tests.support.fake_machine.nvml_text import C2C_MEGABYTES, nvml_bus_id
from topoplan.machine.library import LIBRARY

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


@pytest.mark.sampled
@pytest.mark.parametrize("name", SOUND)
def test_gpus_are_told_as_described(name: str, answers: Answers) -> None:
    """Name, ids, place, PCIe link, capability and the rest of each GPU; every call answers in NVML's own type."""
    machine, told = MACHINES[name](), answers(name)
    assert (told["init"], told["driver"], told["cuda"]) == ("", machine.driver, machine.cuda)
    assert [gpu["busid"] for gpu in told["gpus"]] == [nvml_bus_id(gpu.busid) for gpu in machine.gpus]
    places = machine.places()
    for index, (gpu, said) in enumerate(zip(machine.gpus, told["gpus"], strict=True)):
        root, chain = places[gpu.busid]
        pci = chain[-1]
        vendor, device, sub_vendor, sub_device = pci.ids.split(":")
        assert (said["name"], said["uuid"]) == (gpu.name, f"GPU-{machine.uuid(gpu.busid)}")
        assert (said["index"], said["minor"]) == (index, index)
        assert said["ids"] == [int(device + vendor, 16), int(sub_device + sub_vendor, 16)]
        assert said["capability"] == list(gpu.capability)
        now = pci.current_generation or pci.generation
        pcie = [pci.generation, pci.width, now, pci.width] if pci.generation else ["NotSupported"] * 4
        assert said["pcie"] == pcie
        assert said["pstate"] == gpu.pstate
        assert said["affinity"] == cpu_numbers(machine.cpus.near(root.numa))
        assert said["memory_node"] == (gpu.memory_node if gpu.memory_node >= 0 else "NotSupported")
        assert said["fabric"] == list(gpu.fabric)
        assert said["mig"] == (list(gpu.mig[:2]) if gpu.mig else "NotSupported")


@pytest.mark.parametrize("name", SOUND)
def test_nvlinks_are_told_as_described(name: str, answers: Answers) -> None:
    """State, version, far end and speed; of a link that is down, only that; after the last link, InvalidArgument."""
    for gpu, said in zip(MACHINES[name]().gpus, answers(name)["gpus"], strict=True):
        hopper = gpu.capability >= (9, 0)
        for number, link in enumerate(gpu.links):
            end = said["links"][number]
            assert (end["state"], end["version"], end["p2p"]) == (int(link.up), gpu.nvlink_version, 1)
            hidden = link.remote == "hidden"
            remote = "FFFFFFF:FFFF:FF.0" if hidden else nvml_bus_id(link.remote)
            kinds = {"gpu": 0, "cpu": 1, "switch": 2, "unknown": 255}
            assert end["remote"] == (remote if link.up else "NotSupported")
            assert end["type"] == (kinds[link.kind] if link.up else "NotSupported")
            speed = link.megabytes if link.up else 0
            assert end["speed"] == (speed if number < 12 else None)
            scoped = [speed, int(link.up), gpu.nvlink_version] if hopper else ["NotSupported"] * 3
            assert end["scoped"] == scoped
        after = "InvalidArgument" if gpu.links else "NotSupported"
        assert {said["links"][number]["state"] for number in range(len(gpu.links), LINKS)} == {after}
        assert said["link_count"] == (len(gpu.links) or "NotSupported")
        speeds = [link.megabytes for link in gpu.links if link.up]
        assert said["common_speed"] == (max(speeds) if speeds else "NotSupported")


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
            wired = joined(machine, a, b)
            refused = {a, b} in [{x, y} for x, y, _ in machine.refused]
            assert a == b or first["p2p"][b][2] == (0 if wired and not refused else 5)


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
    index = {gpu["busid"]: gpu["index"] for gpu in told["gpus"]}
    return Counter(
        (gpu["index"], index[link["remote"]])
        for gpu in told["gpus"]
        for link in gpu["links"]
        if link["remote"] in index
    )


@pytest.mark.parametrize(("name", "library"), [("dgx1v", "dgx-1v"), ("dgx1p", "dgx-1p")])
def test_the_wires_of_a_dgx_1_are_the_librarys(name: str, library: str, answers: Answers) -> None:
    """Pair by pair, with their numbers."""
    expected = {
        (int(link.src[3:]), int(link.dst[3:])): link.count
        for link in LIBRARY[library]().links
        if link.channel == "nvlink"
    }
    assert wires(answers(name)) == expected


@pytest.mark.parametrize(
    ("name", "per_switch"),
    [("dgx2", [1] * 6), ("dgx_a100", [2] * 6), ("dgx_h100", [4, 4, 5, 5]), ("hidden_switch", [12])],
)
def test_each_gpu_of_a_switched_machine_reaches_its_switches(
    name: str, per_switch: list[int], answers: Answers
) -> None:
    """With so many links to each."""
    for gpu in answers(name)["gpus"]:
        counts = Counter(link["remote"] for link in gpu["links"] if link["state"] == 1)
        assert sorted(counts.values()) == per_switch


def test_a_dead_wire_and_a_slow_one_show_at_both_ends(answers: Answers) -> None:
    """One of the two wires 0-3 is gone and one of the two wires 5-6 has half the speed."""
    told = answers("dead_nvlinks")
    whole = answers("dgx1v")
    assert wires(whole) - wires(told) == Counter({(0, 3): 1, (3, 0): 1})
    speeds = [Counter(link["speed"] for link in gpu["links"][:6]) for gpu in told["gpus"]]
    for number, counts in enumerate(speeds):
        expected = {25781: 5, 0: 1} if number in (0, 3) else {25781: 6}
        assert counts == ({25781: 5, HALF_SPEED: 1} if number in (5, 6) else expected)


def test_peer_access_is_refused_where_described(answers: Answers) -> None:
    """By registry key for a wired pair, by chipset for an unwired one; other sockets are out of PCIe's reach anyway."""
    told = answers("refused_p2p")["gpus"]
    assert wires({"gpus": told})[0, 1] == 1
    assert [told[0]["p2p"][b][0] for b in range(1, 8)] == [4, 0, 0, 0, 1, 3, 3]


def test_mig_instances_are_devices_of_their_own(answers: Answers) -> None:
    """Two on GPU 3, with names, identities and their parent; its NVLinks are down and it has no peers."""
    machine, told = MACHINES["one_mig"](), answers("one_mig")["gpus"]
    assert [len(gpu["instances"]) for gpu in told] == [0, 0, 0, 2, 0, 0, 0, 0]
    for (name, identity, parent, flag), described in zip(
        told[3]["instances"], machine.gpus[3].instances, strict=True
    ):
        assert (name, parent, flag) == (described, told[3]["uuid"], 1)
        assert identity.startswith("MIG-")
    assert {link["state"] for link in told[3]["links"][:12]} == {0}
    assert told[3]["p2p"][0] == told[0]["p2p"][3] == [5] * 5


def test_a_superchip_has_links_to_its_cpu(answers: Answers) -> None:
    """Ten C2C links with their speed; a machine without them answers NotSupported."""
    (gpu,) = answers("grace_hopper")["gpus"]
    assert (gpu["c2c"], gpu["c2c_count"], gpu["memory_node"]) == (1, 10, 1)
    assert gpu["c2c_links"] == [[1, C2C_MEGABYTES]] * 10 + [["NotSupported"] * 2] * 2
    other = answers("dgx_a100")["gpus"][0]
    assert (other["c2c"], other["c2c_count"]) == ("NotSupported", "NotSupported")


@pytest.mark.parametrize(
    ("name", "init"),
    [("no_driver", "LibraryNotFound"), ("driver_not_loaded", "DriverNotLoaded"), ("no_gpu", "")],
)
def test_machines_that_have_no_gpus_to_show(name: str, init: str, answers: Answers) -> None:
    """No library, a library without the kernel module, and a driver with nothing to drive."""
    told = answers(name)
    assert told["init"] == init
    assert told.get("gpus", []) == []


def test_an_old_driver_lacks_newer_functions(answers: Answers) -> None:
    """The symbols are absent, so nvidia-ml-py itself raises FunctionNotFound; all older answers are the same."""
    old, new = (answers(name)["gpus"][4] for name in ("old_driver", "dgx1v"))
    newer = {"memory_node", "mig", "instances", "fabric", "c2c"}
    assert {key for key, value in old.items() if value == "FunctionNotFound"} == newer
    assert {link["type"] for link in old["links"]} == {"FunctionNotFound"}
    links = zip(old["links"], new["links"], strict=True)
    assert all(first == {**second, "type": "FunctionNotFound"} for first, second in links)
    same = old.keys() - newer - {"uuid", "links"}
    assert {key: old[key] for key in same} == {key: new[key] for key in same}


def test_about_half_of_the_calls_fail_in_three_ways(answers: Answers) -> None:
    """Between 45 and 55 % of them, each way in a third give or take a tenth; another seed makes another choice."""
    rules = list(refusals(1))
    cases = 17 * 8 + 5 * 8 * 6
    assert 0.45 * cases < len(rules) < 0.55 * cases
    ways = Counter(rule.split()[1] for rule in rules)
    assert {way for way, count in ways.items() if 0.23 < count / len(rules) < 0.43} == {"3", "13", "999"}
    assert rules != list(refusals(2))
    told = answers("half_failing")["gpus"]
    assert [gpu["busid"][9:11] for gpu in told] == ["06", "07", "0A", "0B", "85", "86", "89", "8A"]
    errors = {"NotSupported", "Unknown", "FunctionNotFound"}
    states = [link["state"] for gpu in told for link in gpu["links"][:6]]
    assert {state for state in states if state != 1} == errors
    assert 16 <= states.count(1) <= 32

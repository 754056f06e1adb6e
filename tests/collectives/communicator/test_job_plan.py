"""The plan of a job that was given none: right on every rank, or one error on all of them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import Communicator
from collectives.communicator.job_plan import agree_on_input, agree_on_plan
from collectives.communicator.job_topology import in_rank_order, network_speed
from tests.support.fake_machine.fixtures import Installer
from tests.support.job_meeting import Meeting, plan_of, plans_of
from topoplan.errors import PlanError, ProbeError, UsageError
from topoplan.machine.topology import Device, Link, Topology, facts
from topoplan.plans.plan import Plan
from topoplan.reading.probe import probe_host

_JOBS = count()
"""Makes every job's host names its own, so that no test is given the kept plan of another."""


@pytest.fixture
def host() -> str:
    return f"job {next(_JOBS)}"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def one_nic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, pci = tmp_path / "sys/class/net/eth0", tmp_path / "sys/devices/pci0000:00/0000:00:03.0"
    net.mkdir(parents=True)
    pci.mkdir(parents=True)
    (net / "device").symlink_to(pci)
    (net / "speed").write_text("1000\n")
    (net / "operstate").write_text("up\n")
    monkeypatch.setenv("TOPOPLAN_SYSFS_ROOT", str(tmp_path / "sys"))


def raised(made: list[Plan | Exception]) -> Exception:
    assert all(isinstance(one, Exception) for one in made), made
    assert len({(type(one), str(one)) for one in made}) == 1, made
    (first, *_) = made
    assert isinstance(first, Exception)
    return first


def test_processes_of_one_host_add_up_at_its_memory(host: str) -> None:
    plan = plan_of([{"host": host}] * 4)
    assert plan.ranks == ("rank0", "rank1", "rank2", "rank3")
    assert topoplan.verify(plan).optimal
    assert "memory assumed 10 GB/s per process" in " ".join(plan.topology.notes)
    with Communicator(plan) as comm:
        sums = comm.all_reduce([np.arange(9) + rank for rank in range(4)])
    assert all(np.array_equal(one, 4 * np.arange(9) + 6) for one in sums)


def test_hosts_may_take_turns_and_only_the_wire_between_them_limits(host: str, one_nic: None) -> None:
    """An interface of 1 Gb/s carries 0.125 GB/s each way, and each byte of a sum of two hosts crosses it once."""
    plan = plan_of([{"host": f"{host} {'abbab'[rank]}"} for rank in range(5)])
    assert plan.ranks == ("s0.rank0", "s1.rank1", "s1.rank2", "s0.rank3", "s1.rank4")
    assert (plan.rate, plan.gap) == (0.125, 0)


def test_unknown_network_speed_is_assumed(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPOPLAN_SYSFS_ROOT", str(tmp_path))
    plan = plan_of([{"host": f"{host} {rank}"} for rank in range(2)])
    assert plan.rate == 1.25
    assert any("10 Gb/s assumed" in note for note in plan.topology.notes)


def test_every_rank_stands_on_its_own_gpu_however_it_is_named(fake_here: Installer, host: str) -> None:
    """By UUID, by the UUID as torch gives it, by bus id as the driver prints it, and by number in CUDA."""
    fake_here("dgx1v")
    machine = probe_host()
    uuids = [machine.device(name).fact("uuid") for name in machine.gpus]
    bus = machine.device("gpu7").busid
    named: list[object] = [uuids[5], uuids[1].removeprefix("GPU-"), f"0000{bus.upper()}", 4]
    plan = plan_of([{"host": host, "device": device} for device in named])
    assert plan.ranks == ("gpu5", "gpu1", "gpu7", "gpu4")
    assert plan.rate == topoplan.plan(topoplan.load("dgx-1v"), gpus=[1, 4, 5, 7]).rate == 50
    plan = plan_of([{"host": host, "device": uuids[gpu]} for gpu in (4, 5, 7, 1)])
    assert plan.ranks == ("gpu4", "gpu5", "gpu7", "gpu1")


def test_cuda_numbers_are_of_visible(
    fake_here: Installer, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_here("dgx1v")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,3")
    assert plan_of([{"host": host, "device": number} for number in (1, 0)]).ranks == ("gpu3", "gpu6")
    error = raised(plans_of([{"host": host, "device": number} for number in (1, 2)]))
    assert "rank 1 names GPU 2 and sees 2 of the 8 GPUs" in str(error)


def test_hosts_may_be_unlike_and_their_slower_nics_do_not_count(host: str) -> None:
    mixed = _pcie_box([100, 10, 100])
    kept, gbps, notes = network_speed(mixed)
    assert ([d.name for d in kept.devices if d.kind == "nic"], gbps) == (["nic0", "nic2"], 100.0)
    assert "nic1" in notes[0]
    members = [{"host": f"{host} 0", "machine": mixed, "device": f"gpu{gpu}"} for gpu in (1, 0)]
    members += [
        {"host": f"{host} 1", "machine": topoplan.load("dgx-1v"), "device": f"gpu{gpu}"} for gpu in (5, 2, 4)
    ]
    plan = plan_of(members)
    assert plan.ranks == ("s0.gpu1", "s0.gpu0", "s1.gpu5", "s1.gpu2", "s1.gpu4")
    assert any("left out: nic1" in note for note in plan.topology.notes)


def test_gpus_without_nvlink_use_pcie_inside_their_host(host: str) -> None:
    """Wires to an assumed NIC alone would join all ranks too, and every byte would pass it several times."""
    machine = _pcie_box([])
    plan = plan_of(
        [{"host": f"{host} {rank // 2}", "machine": machine, "device": f"gpu{rank % 2}"} for rank in range(4)]
    )
    assert (plan.channels, plan.rate) == (("pcie", "network"), 1.25)


def _pcie_box(nics: list[int]) -> Topology:
    names = ["gpu0", "gpu1", *(f"nic{number}" for number in range(len(nics)))]
    devices = [Device(name, name[:3], "s0") for name in names[:2]]
    devices += [
        Device(name, "nic", "s0", facts=facts(gigabits=speed))
        for name, speed in zip(names[2:], nics, strict=True)
    ]
    links = [Link(*ends, "pcie", 12.0) for name in names for ends in ((name, "cpu0"), ("cpu0", name))]
    return Topology("box", (*devices, Device("cpu0", "cpu", "s0")), tuple(links))


MISFITS: dict[str, tuple[list[dict[str, Any]], type[Exception], str]] = {
    "two ranks on one GPU": (
        [{"device": "gpu3"}, {"device": "gpu1"}, {"device": "0000:0a:00.0"}],
        UsageError,
        "rank 0 and rank 2 are both on gpu3 of dgx-1v",
    ),
    "a GPU that is not there": (
        [{"device": 0}, {"device": "GPU-cafe"}, {"device": 2}],
        UsageError,
        "rank 1 names GPU GPU-cafe, which is not among the 8 GPUs",
    ),
    "one rank without a GPU": (
        [{"device": 0}, {"device": 1}, {"device": None}],
        UsageError,
        "rank 0 has a GPU and rank 2 has none",
    ),
    "a rank in the wrong place": (
        [{"device": 0}, {"device": 1, "rank": 2}, {"device": 2}],
        UsageError,
        "rank 1 of 3 in the gather calls itself rank 2 of 3",
    ),
    "a size of another job": (
        [{"device": 0}, {"device": 1}, {"device": 2, "size": 4}],
        UsageError,
        "rank 2 of 3 in the gather calls itself rank 2 of 4",
    ),
    "a rank beyond the job": (
        [{"device": 0}, {"device": 1, "rank": 3}, {"device": 2}],
        UsageError,
        "rank 3 of 3 does not exist",
    ),
    "another collective": (
        [{"device": 0}, {"device": 1, "collective": "broadcast"}, {"device": 2}],
        UsageError,
        "rank 1 wants a plan for broadcast over auto and rank 0 for allreduce over auto",
    ),
    "no collective at all": (
        [{"device": 0}, {"device": 1, "collective": "allreduse"}, {"device": 2}],
        UsageError,
        "rank 1: collective 'allreduse' is unknown",
    ),
    "a device of no kind": (
        [{"device": 0}, {"device": 1}, {"device": 2.5}],
        UsageError,
        "rank 2: device must be a GPU's UUID, PCI bus id or CUDA number, or None for none, got 2.5",
    ),
    "no such channels": (
        [{"device": gpu, "channels": "smoke"} for gpu in range(3)],
        UsageError,
        "rank 0: channels 'smoke' is unknown",
    ),
    "GPUs that nothing joins": (
        [{"device": gpu, "channels": "nvlink", "machine": _pcie_box([])} for gpu in range(2)],
        topoplan.InfeasibleError,
        "rank 0: ",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_on_one_rank_is_one_error_on_all(name: str, host: str) -> None:
    members, kind, text = MISFITS[name]
    dgx = topoplan.load("dgx-1v")
    devices = tuple(
        replace(device, busid="0000:0A:00.0") if device.name == "gpu3" else device for device in dgx.devices
    )
    machine = replace(dgx, devices=devices)
    error = raised(plans_of([{"host": host, "machine": machine, **one} for one in members]))
    assert type(error) is kind
    assert text in str(error)


def test_a_host_that_cannot_be_probed_is_an_error_of_all_hosts(fake_here: Installer, host: str) -> None:
    fake_here("no_gpu")
    machine = topoplan.load("dgx-1v")
    members = [{"host": f"{host} a", "device": 0, "machine": machine}, {"host": f"{host} b", "device": 0}]
    error = raised(plans_of(members))
    assert isinstance(error, ProbeError)
    assert str(error).startswith("rank 1: the NVIDIA driver is loaded but shows no GPU")


def test_different_gpus_are_not_told_by_numbers_that_depend_on_their_speed(host: str) -> None:
    dgx = topoplan.load("dgx-1v")
    devices = tuple(
        replace(device, model="another") if device.name == "gpu3" else device for device in dgx.devices
    )
    machine = replace(dgx, devices=devices)
    error = raised(plans_of([{"host": host, "device": gpu, "machine": machine} for gpu in (2, 3)]))
    assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID" in str(error)


def test_a_gather_that_something_else_uses_is_noticed(host: str) -> None:
    meeting = Meeting(2, lambda rank, number, texts: [texts[0], "tensor 7"])
    error = raised(plans_of([{"host": host}] * 2, meeting))
    assert "rank 1 sent 'tensor 7' while the ranks agree on a plan" in str(error)


def _with_plan(text: str) -> Any:
    def change(rank: int, number: int, texts: list[str]) -> list[str]:
        if rank == 1 and number == 4:
            return [json.dumps({**json.loads(texts[0]), "said": text}), *texts[1:]]
        return texts

    return change


def test_ranks_with_different_plans_stop_before_the_first_byte(host: str) -> None:
    dgx = topoplan.load("dgx-1v")
    other = topoplan.plan(dgx, gpus=[0, 1, 2], method="mwu").to_json()
    members = [{"host": host, "machine": dgx, "device": gpu} for gpu in range(3)]
    error = raised(plans_of(members, Meeting(3, _with_plan(other))))
    assert isinstance(error, PlanError)
    assert str(error).startswith("rank 1 has plan ")


def test_a_plan_that_arrives_damaged_is_refused_by_all(host: str) -> None:
    members = [{"host": host}] * 3
    whole = plan_of([{"host": f"{host} whole"}] * 3).to_json()
    for damaged in (whole[:-9], whole.replace('"1/3"', '"1/4"')):
        assert damaged != whole
        error = raised(plans_of(members, Meeting(3, _with_plan(damaged))))
        assert isinstance(error, PlanError)
        assert str(error).startswith("rank 1: ")


def test_the_plan_of_a_process_is_kept_for_the_same_job_only(host: str) -> None:
    """Kept: two rounds instead of five, which every rank must go through alike."""
    first, again, other = Meeting(2), Meeting(2), Meeting(2)
    made = plans_of([{"host": host}] * 2, first)
    assert first.rounds == 5
    assert [one is made[1] or one is made[0] for one in plans_of([{"host": host}] * 2, again)] == [True, True]
    assert again.rounds == 2
    plans_of([{"host": host}, {"host": f"{host}, moved"}], other)
    assert other.rounds == 5


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_any_gpus_on_any_hosts_gives_a_plan_in_that_order(seed: int, host: str) -> None:
    random = np.random.default_rng(seed)
    members: list[dict[str, Any]] = []
    for number in range(int(random.integers(1, 4))):
        gpus = random.permutation(8)[: int(random.integers(1, 4))]
        members += [{"host": f"{host} {number}", "device": f"gpu{gpu}"} for gpu in gpus]
    members = [members[place] for place in random.permutation(len(members))]
    machine = topoplan.load("dgx-1v")
    plan = plan_of([{**one, "machine": machine} for one in members])
    assert [name.split(".")[-1] for name in plan.ranks] == [one["device"] for one in members]
    hosts = [plan.topology.device(name).server for name in plan.ranks]
    assert len(set(zip(hosts, (one["host"] for one in members), strict=True))) == len(set(hosts))
    with Communicator(plan) as comm:
        sums = comm.all_reduce([np.full(17, rank) for rank in range(len(members))])
    assert all((one == len(members) * (len(members) - 1) // 2).all() for one in sums)


def test_an_order_names_every_gpu_once() -> None:
    machine = topoplan.load("v100x4")
    with pytest.raises(UsageError, match="does not name each GPU of v100x4 once"):
        in_rank_order(machine, ["gpu0", "gpu1", "gpu2", "gpu2"])


def test_on_a_machine_that_is_given_one_rank_plans_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    plan = topoplan.plan

    def counted(*arguments: Any, **options: Any) -> Plan:
        planned.append(arguments)
        return plan(*arguments, **options)

    monkeypatch.setattr(topoplan, "plan", counted)
    meeting = Meeting(4)

    def one(rank: int) -> str:
        gather = meeting.gather(rank)
        meant = agree_on_input(gather, "v100x4", size=4, where="the group")
        return agree_on_plan(gather, meant, rank=rank, size=4).digest

    with ThreadPoolExecutor(4) as pool:
        digests = list(pool.map(one, range(4)))
    assert digests == [plan(topoplan.load("v100x4")).digest] * 4
    assert len(planned) == 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["v100x4", "v100x4", "dgx-1v", "v100x4"], "rank 2: dgx-1v has 8 GPUs and the group 4 ranks"),
        (["v100x4", None, "v100x4", "v100x4"], "rank 1: this rank was given no plan and others were"),
        ([None, None, "v100x4", None], "rank 0: this rank was given no plan and others were"),
        (["v100x4", "v100x4", "nowhere.json", 7], "rank 2: nowhere.json cannot be read"),
    ],
    ids=str,
)
def test_ranks_that_are_given_something_else_are_one_error_on_all(given: list[Any], told: str) -> None:
    meeting = Meeting(4)

    def one(rank: int) -> Any:
        try:
            return agree_on_input(meeting.gather(rank), given[rank], size=4, where="the group")
        except UsageError as error:
            return error

    with ThreadPoolExecutor(4) as pool:
        assert str(raised(list(pool.map(one, range(4))))).startswith(told)

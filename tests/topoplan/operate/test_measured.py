"""Measurements beside what the wires allow: known rates, the ranks of a log on a machine, and what cannot be."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest

import topoplan
from tests.support.perf_logs import PerfLog
from topoplan.errors import UsageError
from topoplan.machine.topology import Topology
from topoplan.machine.variants import with_all_capabilities
from topoplan.operate.compare.comparison import Attainable, attainable
from topoplan.operate.compare.measured import JudgedRun, judge, nic_words
from topoplan.operate.device_matching import gpus_of
from topoplan.reading.nccl.perf_json import parse_perf_runs

TWO = (("node1", range(8)), ("node2", range(8)))


@cache
def known(machine: Topology, collective: str, gpus: tuple[int, ...], root: int | None) -> Attainable:
    return attainable(with_all_capabilities(machine), collective, gpus=gpus, root=root)


def judged(log: PerfLog | str, machine: Topology, **more: object) -> JudgedRun:
    (run,) = parse_perf_runs(log if isinstance(log, str) else log.text())
    return judge(run, machine, partial(known, machine), **more)  # type: ignore[arg-type]


def pair(nic: float = 400) -> Topology:
    return topoplan.cluster(
        [topoplan.Server(topoplan.load("dgx-a100"), count=2)], nic_gbps=nic, nics=8, nic_access="direct"
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("machine", "collective", "nccl", "best"),
    [
        # 300 GB/s a GPU over N / (2 (N - 1)), and N / (N - 1)
        ("dgx-a100", "allreduce", {"nvlink ring": 300 * 8 / 14, "nccl tree": 300 * 8 / 14}, 300 * 8 / 14),
        ("dgx-a100", "allgather", {"nvlink ring": 300 * 8 / 7}, 300 * 8 / 7),
        # NVLS adds in the switch: the port is full of each byte once
        ("dgx-h100", "allreduce", {"nvls": 450, "nvlink ring": 450 * 8 / 14, "nccl tree": 450 * 8 / 14}, 450),
        ("dgx-a100", "alltoall", {"direct sends": 300 * 8 / 7}, 300 * 8 / 7),
    ],
)
def test_what_can_be_reached_on_known_machines(
    machine: str, collective: str, nccl: dict[str, float], best: float
) -> None:
    found = attainable(with_all_capabilities(topoplan.load(machine)), collective)
    assert dict(found.nccl) == pytest.approx(nccl)
    assert found.nccl_best == pytest.approx(max(nccl.values()))
    assert found.best == pytest.approx(best)


def test_nccl_does_less_than_trees_where_nvlink_has_no_ring() -> None:
    """GPUs 1, 4, 5, 7 of a DGX-1V: rings that relay do 33.3 GB/s, NCCL's tree and any schedule 50."""
    log = PerfLog(hosts=(("node1", (1, 4, 5, 7)),), rate=30)
    found = judged(log, topoplan.load("dgx-1v"))
    assert found.gpus == (1, 4, 5, 7)
    last = found.rows[-1]
    assert dict(last.reachable.nccl)["relay ring"] == pytest.approx(100 / 3) if last.reachable else False
    assert last.of_best == pytest.approx(log.sizes[-1] / log.seconds(log.sizes[-1]) / 50e9, rel=1e-3)


@pytest.mark.thorough
def test_small_sizes_are_bound_by_latency_and_large_ones_by_bandwidth() -> None:
    kinds = [row.bound_by for row in judged(PerfLog(), topoplan.load("dgx-a100")).rows]
    assert kinds == sorted(kinds, reverse=True)
    assert set(kinds) == {"latency", "bandwidth"}
    found = attainable(topoplan.load("dgx-a100"))
    edge = (found.time.seconds(0)) * found.best * 1e9
    assert (found.bound_by(int(edge * 0.99)), found.bound_by(int(edge * 1.01))) == ("latency", "bandwidth")


def test_ranks_are_found_by_device_and_by_bus_id() -> None:
    """A machine that states bus ids overrules the numbers of CUDA, which CUDA_VISIBLE_DEVICES changes."""
    machine = topoplan.load("dgx-a100")
    log = PerfLog(hosts=(("node1", (0, 1, 2, 3)),), rate=100)
    assert judged(log, machine).gpus == (0, 1, 2, 3)
    buses = ("bd", "b7", "90", "87", "4e", "47", "0f", "07")
    at = {f"gpu{place}": f"00000000:{bus.upper()}:00.0" for place, bus in enumerate(buses)}
    plugged = replace(
        machine, devices=tuple(replace(one, busid=at.get(one.name, one.busid)) for one in machine.devices)
    )
    assert judged(log, plugged).gpus == (4, 5, 6, 7)


def test_hosts_are_servers_in_the_order_of_their_ranks() -> None:
    """GPUs 2 and 3 of the first, 0 of the second."""
    log = PerfLog(hosts=(("b", (2, 3)), ("a", (0,))), rate=20)
    assert judged(log, pair()).gpus == (2, 3, 8)


def test_hosts_of_an_nvlink_domain_are_its_trays() -> None:
    """Eighteen hosts of four GPUs are one NVL72; half of them its first half."""
    machine = topoplan.load("gb200-nvl72")
    hosts = [(f"tray{number}", range(4)) for number in range(18)]
    for count in (9, 18):
        found = gpus_of(parse_perf_runs(PerfLog(hosts=hosts[:count]).text())[0].ranks, machine)
        assert list(found.values()) == list(range(4 * count))
    with pytest.raises(UsageError, match="ran on 19 hosts"):
        gpus_of(parse_perf_runs(PerfLog(hosts=[*hosts, ("more", [0])]).text())[0].ranks, machine)


@pytest.mark.parametrize(
    ("log", "more", "told"),
    [
        (PerfLog(hosts=TWO), {}, "ran on 2 hosts (node1, node2), and dgx-a100 is 1 server; add --servers 2"),
        (
            PerfLog(hosts=(("node1", range(9)),)),
            {},
            "rank 8 of the log ran on device 8 of node1, and dgx-a100 has 8",
        ),
        (PerfLog(), {"gpus": [0, 1]}, "of 8 ranks, but --gpus names 2"),
        (PerfLog(hosts=(("node1", (0, 0, 1)),)), {}, "ranks 0,1 of the log share GPU 0"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(log: PerfLog, more: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError) as error:
        judged(log, topoplan.load("dgx-a100"), **more)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_a_list_of_ranks_with_a_gap_is_refused_unless_the_gpus_are_named() -> None:
    """A line of it was lost; the factor of seven ranks would be wrong for all rows."""
    text = "\n".join(
        line for line in PerfLog(rate=100, gpu="A100").text().splitlines() if "Rank  3" not in line
    )
    with pytest.raises(UsageError, match=r"lists only ranks 0-2,4-7 of 8; name the GPUs"):
        judged(text, topoplan.load("dgx-a100"))
    assert judged(text, topoplan.load("dgx-a100"), gpus=range(8)).warnings == ()


def test_one_rank_alone_moves_nothing() -> None:
    """What nccl-tests prints where it was built without MPI and mpirun starts it several times."""
    found = judged(PerfLog(hosts=(("node1", (0,)),)), topoplan.load("dgx-a100"))
    assert "built without MPI=1" in found.warnings[0]
    assert {(row.of_best, row.to_object()["best"]) for row in found.rows} == {(None, None)}


@pytest.mark.sampled
@pytest.mark.parametrize("test", ["all_reduce", "reduce_scatter", "broadcast", "reduce"])
def test_a_test_that_is_not_named_is_known_by_its_columns(test: str) -> None:
    found = judged(PerfLog(test, names_test=False, newer=False), topoplan.load("dgx-a100"))
    assert found.rows[0].collective == {"all_reduce": "allreduce"}.get(test, test)
    assert "by its columns" in found.notes[0]


def test_allgather_and_alltoall_look_alike_and_have_to_be_named() -> None:
    """Both have the factor (N - 1) / N and no reduction."""
    log = PerfLog("all_gather", names_test=False)
    with pytest.raises(UsageError, match="may be allgather or alltoall; name it with --collective"):
        judged(log, topoplan.load("dgx-a100"))
    assert judged(log, topoplan.load("dgx-a100"), collective="alltoall").rows[0].collective == "alltoall"


@pytest.mark.parametrize("test", ["all_reduce", "reduce", "broadcast", "reduce_scatter"])
@pytest.mark.parametrize("listed", [True, False])
def test_logs_of_two_ranks_are_known_by_root_and_reduction(test: str, listed: bool) -> None:
    """algbw and busbw are equal in an allreduce of two, a reduce and a broadcast; only the last two have a root."""
    log = PerfLog(test, (("n1", (0, 1)),), [1 << 20, 1 << 30], names_test=False, newer=False, rate=100)
    lines = log.text().splitlines()
    text = "\n".join(line for line in lines if listed or "Rank" not in line)
    found = judged(text, topoplan.load("dgx-a100"), **({} if listed else {"gpus": [0, 1]}))
    assert (found.rows[0].collective, found.gpus) == ({"all_reduce": "allreduce"}.get(test, test), (0, 1))


def test_a_log_without_a_list_of_ranks_is_of_as_many_as_its_columns_say() -> None:
    """Not of all GPUs of the machine: that would be another collective, or another factor."""
    two = PerfLog("all_reduce", (("n1", (0, 1)),), [1 << 20, 1 << 30], names_test=False, rate=100)
    four = replace(two, test="reduce_scatter", hosts=(("n1", range(4)),))
    for log, told in ((two, "allreduce of 2 ranks"), (four, "reduce_scatter of 4 ranks")):
        for named in (False, True):
            text = replace(log, names_test=named).text()
            bare = "\n".join(line for line in text.splitlines() if "Rank" not in line)
            with pytest.raises(UsageError, match=f"by its columns the log is of {told}.*with --gpus"):
                judged(bare, topoplan.load("dgx-a100"))
    whole = replace(two, hosts=(("n1", range(8)),)).text()
    bare = "\n".join(line for line in whole.splitlines() if "Rank" not in line)
    found = judged(bare, topoplan.load("dgx-a100"))
    assert (found.rows[0].collective, len(found.gpus)) == ("allreduce", 8)
    assert "taken as all 8 GPUs" in found.notes[0]


def test_a_collective_that_the_columns_are_not_of_is_doubted() -> None:
    log = PerfLog("all_reduce", (("n1", (0, 1)),), [1 << 30], names_test=False, rate=100)
    found = judged(log, topoplan.load("dgx-a100"), collective="reduce")
    assert (
        "--collective reduce does not fit the columns of the log, which are those of allreduce"
        in found.warnings
    )


def test_a_log_of_gather_or_scatter_alone_is_not_guessed_to_be_a_collective_of_plans() -> None:
    log = PerfLog("gather", (("n1", range(4)),), [1 << 30], names_test=False, rate=100)
    with pytest.raises(UsageError, match="it may be gather or scatter; no plan does that"):
        judged(log, topoplan.load("dgx-a100"))


def test_more_than_nccl_or_any_schedule_can_always_says_which_assumption_falls() -> None:
    """NICs that carry more than their slots, links, and a machine that is another one."""
    slots = topoplan.cluster([topoplan.Server(topoplan.load("dgx-h100"), count=4)], nic_gbps=400, nics=8)
    hosts = [(f"n{number}", range(8)) for number in range(4)]
    log = PerfLog(hosts=hosts, sizes=[1 << 30, 1 << 33], rate=202, start=1e-5)
    (told,) = judged(log, slots).warnings
    assert "8GB: 206.1 GB/s is 104.0% of NCCL's best (network ring): it takes 49.91 GB/s of each NIC" in told
    little = judged(PerfLog(sizes=[1 << 30], rate=172.5, start=0, gpu="A100"), topoplan.load("dgx-a100"))
    assert "it takes 2.7% more of the links than the machine states" in little.warnings[0]
    much = judged(PerfLog(sizes=[1 << 30], rate=200, start=0, gpu="A100"), topoplan.load("dgx-a100"))
    assert "the machine has more than was stated" in much.warnings[0]


def test_gpus_of_another_model_than_the_machines_are_told() -> None:
    """Another generation, or cards in PCIe slots where the machine has NVSwitches."""
    for gpu, machine, told in (
        ("NVIDIA H100 PCIe", "dgx-h100", True),
        ("NVIDIA H100 80GB HBM3", "dgx-h100", False),
        ("NVIDIA H100 80GB HBM3", "dgx-a100", True),
        ("NVIDIA A100-SXM4-80GB", "dgx-a100", False),
    ):
        warnings = judged(PerfLog(sizes=[1 << 20], gpu=gpu), topoplan.load(machine)).warnings
        assert any("give the machine that ran it" in words for words in warnings) == told


def test_ranks_that_see_one_gpu_each_are_numbered_by_bus_id_or_have_to_be_named() -> None:
    """All print device 0; a whole host of them is all its GPUs."""
    text = PerfLog(rate=100, sizes=[1 << 30], gpu="A100").text()
    for device in range(1, 8):
        text = text.replace(f"device  {device} ", "device  0 ")
    assert judged(text, topoplan.load("dgx-a100")).gpus == tuple(range(8))
    part = PerfLog(hosts=(("node1", range(4)),), rate=100).text()
    for device in range(1, 4):
        part = part.replace(f"device  {device} ", "device  0 ")
    with pytest.raises(
        UsageError, match="ranks 0-3 of the log each see one GPU of node1, as device 0; name the 4 GPUs"
    ):
        judged(part, topoplan.load("dgx-a100"))


@pytest.mark.parametrize("test", ["sendrecv", "gather", "scatter", "hypercube"])
def test_what_is_no_collective_is_listed_and_not_compared(test: str) -> None:
    found = judged(PerfLog(test), topoplan.load("dgx-a100"))
    assert len(found.rows) == 14
    assert {(row.collective, row.reachable, row.of_best) for row in found.rows} == {(test, None, None)}
    assert f"{test}: 14 rows are not compared" in found.warnings[-1]
    assert found.rows[-1].to_object()["nccl_best"] is None


def test_figures_that_cannot_be_are_told() -> None:
    """More than the wires carry; the factor of other ranks; a rate that is not size over time."""
    fast = judged(PerfLog(rate=900), topoplan.load("dgx-a100"))
    assert "more than any schedule can over these wires (171.4)" in fast.warnings[0]
    assert "(and 7 more)" in fast.warnings[0]
    text = PerfLog(sizes=[1 << 30], rate=100).text()
    wrong = judged(text.replace(" 174.", " 131."), topoplan.load("dgx-a100"))
    assert "is not algbw" in " ".join(wrong.warnings)
    slow = judged(text.replace(" 10759", " 20759"), topoplan.load("dgx-a100"))
    assert "is not size / time" in " ".join(slow.warnings)


def test_rows_of_every_root_are_compared_with_their_own_root() -> None:
    logs = [PerfLog("broadcast", hosts=(("node1", range(4)),), root=root, rate=60) for root in (0, 3)]
    rows = [log.row(1 << 26) for log in logs]
    found = judged("\n".join([*logs[0].head(), *rows, *logs[0].foot()]), topoplan.load("v100x4"))
    assert len(found.references) == 2
    assert [row.row.root for row in found.rows] == [0, 3]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("test", "leaving", "most"),
    [
        ("all_reduce", 1, 200 * 1.75),
        ("all_gather", 0.5, 200 * 1.75),
        ("reduce_scatter", 0.5, 200 * 1.75),
        ("alltoall", 2, 200 * (7 / 8) / 2),
    ],
)
def test_what_nics_allow_is_the_bound_where_nics_bind(test: str, leaving: float, most: float) -> None:
    """Two servers of 4 with 4 NICs of 50 GB/s: no proof is above, and where NICs bind it is this number."""
    wide = topoplan.nvswitch_cluster(2, gpus=4, nvlink=450, nic=50)
    hosts = (("node1", range(4)), ("node2", range(4)))
    found = judged(PerfLog(test, hosts=hosts, rate=30), wide)
    nics = found.references[0].nics
    assert nics is not None
    assert (nics.servers, nics.count, nics.server, nics.one) == (2, 4, 200, 50)
    assert (nics.leaving, nics.most) == (pytest.approx(leaving), pytest.approx(most))
    most_busbw = found.references[0].best * found.references[0].factor
    assert most_busbw <= most * (1 + 1e-9)
    assert (test not in ("alltoall", "all_reduce")) or most_busbw == pytest.approx(most)


def test_bus_bandwidth_above_the_nics_is_explained() -> None:
    """Above all NICs by what stays inside servers, above one NIC since there are eight, and below one not at all."""
    wide = topoplan.cluster(
        [topoplan.Server(topoplan.load("dgx-h100"), count=2)], nic_gbps=400, nics=8, nic_access="direct"
    )
    sizes = [1 << 10, 32 << 20, 8 << 30]
    rows = judged(PerfLog(hosts=TWO, rate=240, start=60e-6, sizes=sizes), wide).rows
    small, middle, large = (nic_words(row) for row in rows)
    assert small is None
    assert "above the 50 GB/s of one NIC: a server has 8 of them" in str(middle)
    assert "above the 400 GB/s of a server's 8 NICs" in str(large)
    assert "1.875 bytes for a byte of the buffer, and only 1 must leave a server" in str(large)
    assert judged(PerfLog(), topoplan.load("dgx-a100")).references[0].nics is None


def test_communicators_side_by_side_are_told_apart() -> None:
    """NCCL_TESTS_SPLIT: the first is compared, and the warning says that wires were shared."""
    text = PerfLog(rate=50).text()
    for rank in range(4, 8):
        text = text.replace(f"Rank {rank:2d} Group  0", f"Rank {rank:2d} Group  1")
    found = judged(text, topoplan.load("dgx-a100"))
    assert found.gpus == (0, 1, 2, 3)
    assert "2 communicators ran at once" in found.warnings[0]

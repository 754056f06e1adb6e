"""Logs beside what the wires allow: known rates, the ranks of a log, what cannot be, verdicts and next steps."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache, partial
from typing import Any, get_args

import pytest

import topoplan
from tests.support.perf_logs import PerfLog
from topoplan.errors import UsageError
from topoplan.machine.topology import Topology
from topoplan.machine.variants import with_all_capabilities
from topoplan.operate.compare.comparison import Attainable, attainable
from topoplan.operate.compare.judged_log import JudgedRow, JudgedRun, judge, nic_words
from topoplan.operate.compare.published_rates import published_rates
from topoplan.operate.device_matching import gpus_of
from topoplan.operate.faults import Fault, Kind
from topoplan.operate.next_steps import (
    _OF_FAULT,
    RunVerdict,
    VerdictKind,
    fault_steps,
    judge_run,
    log_steps,
)
from topoplan.reading.nccl.perf_json import parse_perf_runs
from topoplan.reading.nccl.perf_text import LoggedRow, PerfRun, Timing

TWO = (("node1", range(8)), ("node2", range(8)))


@cache
def known(machine: Topology, collective: str, gpus: tuple[int, ...], root: int | None) -> Attainable:
    return attainable(with_all_capabilities(machine), collective, gpus=gpus, root=root)


A100S = topoplan.load("dgx-a100")


def judged(log: PerfLog | str, machine: Topology = A100S, **more: Any) -> JudgedRun:
    (run,) = parse_perf_runs(log if isinstance(log, str) else log.text())
    return judge(run, machine, partial(known, machine), **more)


def bare(log: PerfLog) -> str:
    return "\n".join(line for line in log.text().splitlines() if "Rank" not in line)


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
    kinds = [row.bound_by for row in judged(PerfLog()).rows]
    assert kinds == sorted(kinds, reverse=True)
    assert set(kinds) == {"latency", "bandwidth"}
    found = attainable(A100S)
    edge = (found.time.seconds(0)) * found.best * 1e9
    assert (found.bound_by(int(edge * 0.99)), found.bound_by(int(edge * 1.01))) == ("latency", "bandwidth")


def test_ranks_are_found_by_device_and_by_bus_id() -> None:
    """A machine that states bus ids overrules the numbers of CUDA, which CUDA_VISIBLE_DEVICES changes."""
    log = PerfLog(hosts=(("node1", (0, 1, 2, 3)),), rate=100)
    assert judged(log).gpus == (0, 1, 2, 3)
    buses = ("bd", "b7", "90", "87", "4e", "47", "0f", "07")
    at = {f"gpu{place}": f"00000000:{bus.upper()}:00.0" for place, bus in enumerate(buses)}
    devices = tuple(replace(one, busid=at.get(one.name, one.busid)) for one in A100S.devices)
    assert judged(log, replace(A100S, devices=devices)).gpus == (4, 5, 6, 7)
    # hosts are servers in the order of their ranks: GPUs 2 and 3 of the first, 0 of the second
    pair = topoplan.cluster([topoplan.Server(A100S, count=2)], nic_gbps=400, nics=8, nic_access="direct")
    assert judged(PerfLog(hosts=(("b", (2, 3)), ("a", (0,))), rate=20), pair).gpus == (2, 3, 8)


def test_hosts_of_an_nvlink_domain_are_its_trays() -> None:
    """Eighteen hosts of four GPUs are one NVL72; half of them its first half."""
    machine = topoplan.load("gb200-nvl72")
    hosts = [(f"tray{number}", range(4)) for number in range(18)]
    for count in (9, 18):
        found = gpus_of(parse_perf_runs(PerfLog(hosts=hosts[:count]).text())[0].ranks, machine)
        assert list(found.values()) == list(range(4 * count))
    with pytest.raises(UsageError, match="ran on 19 hosts"):
        gpus_of(parse_perf_runs(PerfLog(hosts=[*hosts, ("more", [0])]).text())[0].ranks, machine)


ROOTED = PerfLog("gather", (("n1", range(4)),), [1 << 30], names_test=False, rate=100)
GAP = "\n".join(line for line in PerfLog(rate=100, gpu="A100").text().splitlines() if "Rank  3" not in line)


@pytest.mark.parametrize(
    ("log", "more", "told"),
    [
        (PerfLog(hosts=TWO), {}, "ran on 2 hosts (node1, node2), and dgx-a100 is 1 server; add --servers 2"),
        (
            PerfLog(hosts=(("node1", range(9)),)),
            {},
            "rank 8 of the log ran on device 8 of node1, and dgx-a100 has",
        ),
        (PerfLog(), {"gpus": [0, 1]}, "of 8 ranks, but 2 GPUs are chosen"),
        (PerfLog(hosts=(("node1", (0, 0, 1)),)), {}, "ranks 0,1 of the log share GPU 0"),
        # a line was lost; the factor of seven ranks would be wrong for all rows
        (GAP, {}, "lists only ranks 0-2,4-7 of 8; name the GPUs"),
        # both have the factor (N - 1) / N and no reduction
        (
            PerfLog("all_gather", names_test=False),
            {},
            "may be allgather or alltoall; name it with --collective",
        ),
        # both have a root and no reduction
        (ROOTED, {}, "it may be gather or scatter; no plan does that"),
    ],
)
def test_refuses_logs_in_one_line(log: PerfLog | str, more: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as error:
        judged(log, **more)
    assert told in str(error.value)
    assert "\n" not in str(error.value)
    if log == GAP:
        assert judged(log, gpus=range(8)).warnings == ()


def test_one_rank_alone_moves_nothing() -> None:
    """What nccl-tests prints where it was built without MPI and mpirun starts it several times."""
    found = judged(PerfLog(hosts=(("node1", (0,)),)))
    assert "built without MPI=1" in found.warnings[0]
    assert {(row.of_best, row.to_object()["best"]) for row in found.rows} == {(None, None)}


@pytest.mark.sampled
@pytest.mark.parametrize("ranks", [8, 2])
@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("test", ["all_reduce", "reduce_scatter", "broadcast", "reduce"])
def test_a_test_that_is_not_named_is_known_by_its_columns(test: str, listed: bool, ranks: int) -> None:
    """By reduction, root and the factor of its bandwidths; of two ranks by root and reduction alone."""
    log = PerfLog(test, (("n1", range(ranks)),), [1 << 20, 1 << 30], names_test=False, newer=False, rate=100)
    found = judged(log.text() if listed else bare(log), **({} if listed else {"gpus": range(ranks)}))
    assert found.rows[0].collective == {"all_reduce": "allreduce"}.get(test, test)
    assert found.gpus == tuple(range(ranks))
    assert "by its columns" in " ".join(found.notes)


def test_a_log_without_a_list_of_ranks_is_of_as_many_as_its_columns_say() -> None:
    """Not of all GPUs of the machine: that would be another collective, or another factor."""
    two = PerfLog("all_reduce", (("n1", (0, 1)),), [1 << 20, 1 << 30], names_test=False, rate=100)
    four = replace(two, test="reduce_scatter", hosts=(("n1", range(4)),))
    for log, told in ((two, "allreduce of 2 ranks"), (four, "reduce_scatter of 4 ranks")):
        for named in (False, True):
            with pytest.raises(UsageError, match=f"by its columns the log is of {told}.*with --gpus"):
                judged(bare(replace(log, names_test=named)))
    found = judged(bare(replace(two, hosts=(("n1", range(8)),))))
    assert (found.rows[0].collective, len(found.gpus)) == ("allreduce", 8)
    assert "taken as all 8 GPUs" in found.notes[0]
    doubted = judged(two, collective="reduce").warnings
    wanted = "--collective reduce does not fit the columns of the log, which are those of allreduce"
    assert wanted in doubted
    gathered = PerfLog("all_gather", names_test=False)
    assert judged(gathered, collective="alltoall").rows[0].collective == "alltoall"


def test_more_than_nccl_or_any_schedule_can_always_says_which_assumption_falls() -> None:
    """NICs that carry more than their slots, links, and a machine that is another one."""
    slots = topoplan.cluster([topoplan.Server(topoplan.load("dgx-h100"), count=4)], nic_gbps=400, nics=8)
    hosts = [(f"n{number}", range(8)) for number in range(4)]
    log = PerfLog(hosts=hosts, sizes=[1 << 30, 1 << 33], rate=202, start=1e-5)
    (told,) = judged(log, slots).warnings
    assert "8GB: 206.1 GB/s is 104.0% of the link limit (network ring): it takes 49.91 GB/s of each" in told
    one = PerfLog(sizes=[1 << 30], rate=172.5, start=0, gpu="A100")
    assert "it takes 2.7% more of the links than the machine states" in judged(one).warnings[0]
    assert "the machine has more than was stated" in judged(replace(one, rate=200)).warnings[0]


def test_gpus_of_another_model_than_the_machines_are_told() -> None:
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

    def first_device(log: PerfLog) -> str:
        return re.sub(r"device  \d ", "device  0 ", log.text())

    assert judged(first_device(PerfLog(rate=100, sizes=[1 << 30], gpu="A100"))).gpus == tuple(range(8))
    told = "ranks 0-3 of the log each see one GPU of node1, as device 0; name the 4 GPUs"
    with pytest.raises(UsageError, match=told):
        judged(first_device(PerfLog(hosts=(("node1", range(4)),), rate=100)))


@pytest.mark.parametrize("test", ["sendrecv", "gather", "scatter", "hypercube"])
def test_what_is_no_collective_is_listed_and_not_compared(test: str) -> None:
    found = judged(PerfLog(test))
    assert len(found.rows) == 14
    assert {(row.collective, row.reachable, row.of_best) for row in found.rows} == {(test, None, None)}
    assert f"{test}: 14 rows are not compared" in found.warnings[-1]
    assert found.rows[-1].to_object()["nccl_best"] is None


def test_figures_that_cannot_be_are_told() -> None:
    fast = judged(PerfLog(rate=900))
    assert "above the upper bound of these links (171.4)" in fast.warnings[0]
    assert "(and 7 more)" in fast.warnings[0]
    text = PerfLog(sizes=[1 << 30], rate=100).text()
    for old, new, told in ((" 174.", " 131.", "is not algbw"), (" 10759", " 20759", "is not size / time")):
        assert told in " ".join(judged(text.replace(old, new)).warnings)


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
    wide = topoplan.cluster([topoplan.Server("dgx-h100", count=2)], nic_gbps=400, nics=8, nic_access="direct")
    sizes = [1 << 10, 32 << 20, 8 << 30]
    rows = judged(PerfLog(hosts=TWO, rate=240, start=60e-6, sizes=sizes), wide).rows
    small, middle, large = (nic_words(row) for row in rows)
    assert small is None
    assert "above the 50 GB/s of one NIC: a server has 8 of them" in str(middle)
    assert "above the 400 GB/s of a server's 8 NICs" in str(large)
    assert "1.875 bytes for a byte of the buffer, and only 1 must leave a server" in str(large)
    assert judged(PerfLog()).references[0].nics is None


def test_communicators_side_by_side_are_told_apart() -> None:
    """NCCL_TESTS_SPLIT: the first is compared, and the warning says that wires were shared."""
    text = PerfLog(rate=50).text()
    for rank in range(4, 8):
        text = text.replace(f"Rank {rank:2d} Group  0", f"Rank {rank:2d} Group  1")
    found = judged(text)
    assert found.gpus == (0, 1, 2, 3)
    assert "2 communicators ran at once" in found.warnings[0]


H100S = topoplan.load("dgx-h100")


def verdict_on(run: PerfRun) -> RunVerdict:
    return judge_run(judge(run, H100S, partial(known, H100S)), H100S)


@pytest.mark.parametrize(
    ("log", "kind", "step"),
    [
        (PerfLog(rate=275), "as expected", "nothing to do"),
        (PerfLog(rate=100), "slow", "run again with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH,TUNING"),
        (PerfLog(rate=900), "another machine", "nvidia-smi topo -m > topo.txt"),
        (PerfLog(gpu="NVIDIA A100-SXM4-80GB", rate=200), "another machine", "nvidia-smi topo -m > topo.txt"),
        (PerfLog(sizes=[1 << 10, 1 << 12]), "small sizes only", "-b 1K -e 8G -f 2"),
        (PerfLog(sizes=[1 << 20, 1 << 30], wrong={1 << 20: 5}), "wrong results", "dcgmi diag"),
        (PerfLog("sendrecv", rate=40), "not judged", "run all_reduce_perf"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_each_kind_of_verdict_has_its_step(log: PerfLog, kind: VerdictKind, step: str) -> None:
    (run,) = parse_perf_runs(log.text())
    verdict = verdict_on(run)
    assert verdict.kind == kind
    assert step in log_steps([verdict], None, command="dgx-h100", servers=1)[0]


def test_a_run_that_collapses_at_large_sizes_is_slow_by_those_sizes() -> None:
    (fast,) = parse_perf_runs(PerfLog(rate=275, sizes=[1 << 30]).text())
    (late,) = parse_perf_runs(PerfLog(rate=5, sizes=[1 << 32]).text())
    for rows in ((*fast.rows, *late.rows), (*late.rows, *fast.rows)):
        verdict = verdict_on(replace(fast, rows=rows))
        assert verdict.kind == "slow"
        assert "at 4GB" in verdict.text


def test_large_rows_that_differ_by_place_are_doubted() -> None:
    (run,) = parse_perf_runs(PerfLog(rate=275, sizes=[1 << 20, 1 << 30]).text())
    rows = []
    for row in run.rows:
        assert row.in_place is not None
        assert row.out_of_place is not None
        rows.append(replace(row, in_place=replace(row.in_place, seconds=3 * row.out_of_place.seconds)))
    doubted = judge(replace(run, rows=tuple(rows)), H100S, partial(known, H100S)).warnings
    assert [str(one) for one in doubted if "place" in one] == [
        f"line {run.rows[1].line}: 1GB takes 3 times as long in place as out of place; the verdict is of the times "
        "out of place"
    ]


def test_wrong_results_in_place_or_in_the_summary_decide() -> None:
    (run,) = parse_perf_runs(PerfLog(rate=275, sizes=[1 << 30]).text())
    (row,) = run.rows
    assert row.in_place is not None
    spoiled = replace(run, rows=(replace(row, in_place=replace(row.in_place, wrong=77)),))
    text = PerfLog(rate=275, sizes=[1 << 30]).text()
    (failed,) = parse_perf_runs(text.replace("bounds values : 0 OK", "bounds values : 4 FAILED"))
    assert failed.failed
    for one in (spoiled, failed):
        assert verdict_on(one).kind == "wrong results"


def test_the_most_serious_run_decides() -> None:
    runs = parse_perf_runs(PerfLog(rate=275).text() + PerfLog(rate=100).text())
    verdicts = [verdict_on(run) for run in runs]
    assert "run again" in log_steps(verdicts, None, command="dgx-h100", servers=1)[0]


def test_a_slow_cluster_is_asked_for_nics_and_order() -> None:
    (run,) = parse_perf_runs(PerfLog(rate=100).text())
    steps = log_steps([verdict_on(run)], None, command="dgx-h100", servers=2)
    assert any("NCCL_IB_HCA" in step for step in steps)
    assert any("topoplan order dgx-h100" in step for step in steps)


def test_every_kind_of_fault_has_a_step_and_equal_ones_share_it() -> None:
    assert set(_OF_FAULT) == set(get_args(Kind))
    two = [Fault("link slow", ("gpu0", f"gpu{n}"), "slow", "fast") for n in (1, 2)]
    (step,) = fault_steps(two)
    assert step.startswith("gpu0-gpu1 and 1 more: ")


MACHINES = (
    "dgx-a100",
    "dgx-h100",
    "mi300x",
    "p5.48xlarge",
    pytest.param("gb200-nvl72", marks=pytest.mark.thorough),
)


@pytest.mark.sampled
@pytest.mark.parametrize("name", MACHINES)
def test_published_rates_are_as_expected_and_half_of_them_is_slow(name: str) -> None:
    """The largest size of each number of GPUs in one server, judged by itself and by others of its kind."""
    own = [rate for rate in published_rates() if rate.servers == 1 and rate.machine == name]
    largest = {rate.gpus: rate for rate in sorted(own, key=lambda rate: rate.nbytes)}
    assert largest
    for rate in largest.values():
        machine = topoplan.load(rate.machine)
        found = attainable(with_all_capabilities(machine), rate.collective, gpus=tuple(range(rate.gpus)))
        for part, kind in ((1.0, "as expected"), (0.5, "slow")):
            seconds = rate.nbytes * found.factor / (part * rate.busbw * 1e9)
            timing = Timing(seconds, part * rate.busbw / found.factor, part * rate.busbw, 0)
            row = LoggedRow(1, rate.nbytes, "float", "sum", None, timing, None)
            run = PerfRun(1, "all_reduce", rate.collective, "", rate.gpus, (), (row,), ())
            one = JudgedRun(run, found.gpus, (JudgedRow(rate.collective, row, found),), (), ())
            verdict = judge_run(one, machine)
            assert (verdict.kind, verdict.normal and verdict.normal.same) == (kind, True), (rate, part)

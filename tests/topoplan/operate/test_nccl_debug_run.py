"""NCCL's own log beside a machine: what its rings can do, and what does not fit the wires."""

from __future__ import annotations

import pytest

import topoplan
from tests.support.nccl_debug_logs import DebugLog, healthy, over_sockets, without_peers
from tests.topoplan.reading.test_debug_log import OLDER
from topoplan.errors import UsageError
from topoplan.machine.topology import Topology
from topoplan.operate.compare.nccl_debug_run import NcclRun, judge_nccl
from topoplan.reading.nccl.debug_log import parse_nccl_log


def judged(log: DebugLog | str, machine: Topology, **more: object) -> NcclRun:
    found = parse_nccl_log(log if isinstance(log, str) else log.text())
    assert found is not None
    return judge_nccl(found, machine, **more)  # type: ignore[arg-type]


def kinds(run: NcclRun) -> list[str]:
    return [finding.kind for finding in run.findings]


def h100_pair() -> Topology:
    return topoplan.cluster([topoplan.Server(topoplan.load("dgx-h100"), count=2)], nic_gbps=400)


def test_the_rings_of_a_healthy_dgx1_fill_its_nvlinks() -> None:
    """Six rings of 25 GB/s, which is what the best do; nothing misfits."""
    run = judged(healthy(), topoplan.load("dgx-1v"))
    assert (run.rings, run.best_rings) == (150, 150)
    assert run.trees == pytest.approx(75)
    assert run.findings == ()
    assert dict(run.gpus) == {rank: rank for rank in range(8)}


def test_host_memory_beside_nvlink_is_found_with_its_cause() -> None:
    run = judged(without_peers(), topoplan.load("dgx-1v"))
    assert kinds(run) == ["setting", "shm", "ring without link", "ring without link", "few channels"]
    shm = next(finding for finding in run.findings if finding.kind == "shm")
    assert shm.text.startswith(
        "GPU 0 sends to GPU 1 through host memory (SHM), where NVLink joins them (6 pairs"
    )
    assert run.rings == pytest.approx(25)


def test_sockets_between_servers_with_nics_are_found() -> None:
    run = judged(over_sockets(), h100_pair())
    assert kinds(run) == ["setting", "socket", "no nvls", "socket", "few channels"]
    text = "GPU 7 sends to GPU 8 over sockets (NET/Socket), where the machine has NICs (2 pairs such)"
    assert text in [finding.text for finding in run.findings]


@pytest.mark.parametrize(
    ("machine", "pair", "via", "kind"),
    [
        # between servers: InfiniBand that reads the GPU's memory fits; without it data pass host memory
        ("two dgx-h100", (7, 8), "NET/IB/0/GDRDMA", None),
        ("two dgx-h100", (7, 8), "NET/IB/0", "no gdr"),
        ("two dgx-h100", (7, 8), "NET/Socket/1", "socket"),
        ("two dgx-h100", (7, 8), "P2P/MNNVL", None),
        # inside: host memory misfits where NVLink or PCIe switches join the pair, and not between sockets
        ("dgx-1v", (0, 1), "SHM/direct/direct", "shm"),
        ("dgx-1v", (0, 5), "SHM/direct/direct", None),
        ("dgx-1v", (0, 1), "P2P/IPC", None),
        ("pcie-x8", (0, 1), "direct shared memory", "shm"),
        ("pcie-x8", (0, 7), "SHM/direct/direct", None),
        ("dgx-h100", (0, 1), "NET/IB/0/GDRDMA", "net inside"),
    ],
)
def test_ways_between_gpus(machine: str, pair: tuple[int, int], via: str, kind: str | None) -> None:
    tail, head = pair
    ends = f"{tail}[{tail % 8}] -> {head}[{head % 8}] [send]"
    line = f"n:1:2 [{tail}] NCCL INFO Channel 00/0 : {ends} via {via}"
    found = kinds(judged(line, h100_pair() if machine.startswith("two") else topoplan.load(machine)))
    assert [one for one in found if one not in ("few channels", "no nvls")] == ([kind] if kind else [])


def test_settings_that_cost_nothing_are_no_finding() -> None:
    lines = "\n".join(
        f"n:1:2 [0] NCCL INFO {name} set by environment to {value}."
        for name, value in (("NCCL_P2P_DISABLE", "0"), ("NCCL_DEBUG", "INFO"), ("NCCL_ALGO", "Ring"))
    )
    way = "\nn:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC"
    (finding,) = judged(lines + way, topoplan.load("v100x4")).findings
    assert finding.text == "NCCL_ALGO=Ring takes the choice of an algorithm away from NCCL"


def test_ranks_of_a_log_of_one_host_of_two_are_judged() -> None:
    """Host memory beside NVLink, sockets to a rank whose host is not heard, and NICs without a channel."""
    run = judged(OLDER, topoplan.load("dgx-a100"))
    assert kinds(run) == ["shm", "socket", "few channels"]
    assert run.findings[1].text.startswith("rank 9 sends to rank 0 over sockets")
    assert run.notes == ("the log is of ranks 8,9, 2 of 16",)


def test_a_cut_log_is_judged_as_far_as_it_goes() -> None:
    """Ranks that no other line names, or that are not there, no number of ranks, and the file of one process."""
    ring = "h:1:2 [0] NCCL INFO Channel 00/02 :    0   1   2   3\n"
    way = "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct\n"
    machine = topoplan.load("dgx-h100")
    assert judged(ring + way, machine).rings == 450
    assert judged(ring.replace("3", "9") + way, machine).rings is None
    cut = judged(way, machine)
    assert kinds(cut) == ["shm"]
    assert "states neither the number of ranks nor their GPUs" in cut.notes[0]
    assert cut.to_object()["ranks"] is None
    one = "\n".join(line for line in healthy().text().splitlines() if "[3] NCCL" in line)
    run = judged(one, topoplan.load("dgx-1v"))
    assert (run.notes, run.rings) == (("the log is of ranks 3, 1 of 8",), None)


def test_ranks_of_a_log_without_gpus_are_those_that_remain() -> None:
    """Three ranks on four GPUs without GPU 1 are GPUs 0, 2 and 3, and four ranks are too many."""
    way = "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct\n"
    ring = "h:1:2 [0] NCCL INFO Channel 00/02 :    0   1   2\n"
    part = topoplan.load("v100x4").remove_gpus([1])
    run = judged(ring + way, part)
    assert dict(run.gpus) == {0: 0, 1: 2, 2: 3}
    assert any("taken as GPUs 0,2,3" in note for note in run.notes)
    with pytest.raises(UsageError, match="is of 4 ranks, but v100x4 has 3 GPUs"):
        judged(ring.replace("2\n", "2   3\n") + way, part)


def test_processes_that_see_one_gpu_each_are_numbered_by_bus_id() -> None:
    """All say device 0; and their lines may lack the host."""
    text = OLDER.replace("cudaDev 1", "cudaDev 0").replace("nranks 16", "nranks 10")
    for log in (text, "\n".join(line.partition(" ")[2] for line in text.splitlines())):
        run = judged(log, topoplan.load("dgx-a100"))
        assert dict(run.gpus) == {8: 0, 9: 1}
        assert any("every process sees one GPU" in note for note in run.notes)


def test_ranks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="ran on device 4 of node1, and v100x4 has 4 GPUs"):
        judged(healthy(), topoplan.load("v100x4"))
    with pytest.raises(UsageError, match="NCCL's log is of 8 ranks, but 2 GPUs are chosen"):
        judged(healthy(), topoplan.load("dgx-1v"), gpus=[0, 1])

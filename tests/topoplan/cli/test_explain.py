"""``topoplan explain``: a log in, a table, JSON or CSV out, and one line for what does not fit."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import topoplan
from tests.support.checkout import ROOT, Done, Run
from tests.support.matrices import uniform_matrix
from tests.support.nccl_debug_logs import over_sockets, without_peers
from tests.support.perf_logs import PerfLog
from tests.support.tool_outputs import INSPECTOR, LSPCI, RCCL_CSV, ras
from tests.support.tuner_plugin import chosen, read
from tests.topoplan.cli.conftest import Told
from topoplan.model.expected_times import nccl_model
from topoplan.reading.pcie_tree import relation_matrix

TWO = (("node1", range(8)), ("node2", range(8)))
CLUSTER = "--machine dgx-h100 --servers 2 --nic-bandwidth 400Gb/s"
SIZES = [1 << 10, 1 << 20, 1 << 30]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "run.log"
    path.write_text(PerfLog(sizes=SIZES).text())
    return path


@pytest.fixture
def topo(tmp_path: Path) -> Path:
    """The text of nvidia-smi topo -m of a DGX H100."""
    path = tmp_path / "topo.txt"
    path.write_text(matrix_of(topoplan.load("dgx-h100")))
    return path


def matrix_of(machine: topoplan.Topology) -> str:
    names, cells = relation_matrix(machine)
    rows = [("", *names), *((name, *row) for name, row in zip(names, cells, strict=True))]
    return "\n".join("\t".join(row) for row in rows).replace("gpu", "GPU").replace("nic", "mlx5_") + "\n"


LOGS = ROOT / "docs" / "questions" / "logs"


def test_json_and_csv_have_a_row_for_every_size(run: Run, told: Told, log: Path) -> None:
    """Figures of the log, and what can be reached, in algorithm bandwidth; time in microseconds as printed."""
    rows = told(f"explain {log} --machine dgx-h100")["rows"]
    keys = {"collective", "size", "time", "algbw", "busbw", "nccl_best", "best", "bound_by"}
    assert all(keys <= set(row) for row in rows)
    assert [(row["collective"], row["size"], row["bound_by"]) for row in rows] == [
        ("allreduce", size, "bandwidth" if size == 1 << 30 else "latency") for size in SIZES
    ]
    last = rows[-1]
    assert last["algbw"] == pytest.approx(last["size"] / last["time"] / 1e3, abs=0.01)
    assert (last["nccl_best"], last["best"]) == (450, 450)
    assert last["of_best"] == pytest.approx(last["algbw"] / 450, abs=1e-4)
    assert "450 GB/s leave {gpu0}" in last["links"]
    assert last["in_place"]["busbw"] > last["busbw"]
    lines = [*csv.DictReader(io.StringIO(run(f"explain {log} --machine dgx-h100 --csv")[1]))]
    assert [(int(row["size"]), float(row["algbw"])) for row in lines] == [
        (row["size"], row["algbw"]) for row in rows
    ]
    assert float(lines[2]["in_place_busbw"]) == last["in_place"]["busbw"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "encoded",
    [
        lambda text: text.encode("utf-16"),
        lambda text: text.encode("utf-16-le"),
        lambda text: b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(),
        lambda text: text.replace("# Using", "# caf\xe9 \0\0\0\n# Using").encode("latin-1"),
    ],
    ids=["UTF-16", "UTF-16 without a mark", "UTF-8 with a mark", "stray bytes"],
)
def test_logs_in_any_encoding_are_read(
    told: Told, refused: Done, log: Path, encoded: Callable[[str], bytes]
) -> None:
    """As PowerShell, editors, and processes that write at once leave them."""
    log.write_bytes(encoded(log.read_text()))
    assert [row["size"] for row in told(f"explain {log} --machine dgx-a100")["rows"]] == SIZES
    log.write_bytes(bytes(range(256)) * 40)
    assert "is binary, not text" in refused(f"explain {log} --machine dgx-a100")


def test_a_log_of_another_machine_says_so(done: Done, log: Path) -> None:
    out = done(f"explain {log} --machine dgx-a100")
    head = "all_reduce on dgx-a100, 8 GPUs (gpu0-7): the log ran on NVIDIA H100 80GB HBM3, another"
    assert out.startswith(head)
    assert "link limit   busbw 300 GB/s by nvlink ring; nccl tree 300; measured is " in out
    assert "above the upper bound of these links" in out
    assert "2. or --machine dgx-h100 (8 x NVIDIA H100 80GB HBM3 on one host)" in out


@pytest.mark.parametrize(
    ("rate", "verdict", "step"),
    [
        (
            275,
            "as expected: busbw 478.6 GB/s at 1GB; normal for this machine: 441.8 to 466.4 GB/s (slow below 375.5)",
            "nothing to do",
        ),
        (
            120,
            "slow: busbw 209.5 GB/s at 1GB; normal for this machine: 441.8 to 466.4 GB/s",
            "NCCL_DEBUG_SUBSYS=INIT,GRAPH,TUNING",
        ),
    ],
)
def test_the_first_line_is_the_verdict_and_the_last_the_next_step(
    done: Done, told: Told, log: Path, rate: float, verdict: str, step: str
) -> None:
    """Against NCCL's own model, since NVLS does not fill its links; small sizes are one line, --all has them."""
    log.write_text(PerfLog(sizes=SIZES, rate=rate).text())
    out = done(f"explain {log} --machine dgx-h100")
    assert verdict in out.splitlines()[0]
    assert step in out[out.index("next step") :]
    assert "1KB to 1MB: 2 rows" in out
    assert "\n1KB  " in done(f"explain {log} --machine dgx-h100 --all")
    found = told(f"explain {log} --machine dgx-h100")
    assert found["runs"][0]["verdict"] in verdict
    assert step in found["next_steps"][0]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, "add --machine dgx-h100 (8 x NVIDIA H100 80GB HBM3 on one host)"),
        ({"hosts": TWO}, "add --machine dgx-h100 --servers 2 --nic-bandwidth 400Gb/s"),
        ({"gpu": "Something New"}, "nvidia-smi topo -m"),
    ],
)
def test_the_log_proposes_its_machine(refused: Done, options: dict[str, Any], wanted: str) -> None:
    """By the model and number of its GPUs, and its hosts."""
    assert wanted in refused("explain -", stdin=PerfLog(sizes=[1 << 30], **options).text())


def test_in_network_settles_which_switches_add(told: Told, log: Path) -> None:
    """By default NVSwitches do what they can, as NVLS lets them; none leaves rings."""
    last = told(f"explain {log} --machine dgx-h100 --in-network none")["rows"][-1]
    assert (last["best"], last["nccl_is"]) == (pytest.approx(450 * 8 / 14), "nvlink ring")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("code", "gpu", "best"),
    [("NV18", "NVIDIA H100 80GB HBM3", 450.0), ("NV18", "", 450.0), ("NV8", "NVIDIA H800", 200.0)],
)
def test_the_text_of_nvidia_smi_gives_no_false_bound(
    done: Done, told: Told, log: Path, topo: Path, code: str, gpu: str, best: float
) -> None:
    """NVLS is above the rings' bound; the NVLinks or the log tell the generation, and all columns agree."""
    log.write_text(PerfLog(sizes=[1 << 30], rate=0.61 * best, gpu=gpu).text())
    topo.write_text(uniform_matrix(8, code))
    for options in ("", "--in-network nvswitch"):
        (row,) = told(f"explain {log} --machine {topo} {options}")["rows"]
        assert (row["best"], row["nccl_best"], row["nccl_is"]) == (best, best, "nvls")
        assert row["of_best"] < 1
        assert row["nccl_expects"]["algorithm"] == "nvls"
    said = done(f"explain {log} --machine {topo} --in-network none")
    assert "in-network   at most" in said
    assert "next step    --in-network nvswitch in place of none" in said
    beyond = (
        f"the bound leaves in-network reduction out, with which it is {best:g} GB/s; --in-network nvswitch"
    )
    assert beyond in said


def test_two_servers_and_why_bus_bandwidth_is_above_the_nics(done: Done) -> None:
    """The log's hosts are the servers of the cluster."""
    out = done(f"explain - {CLUSTER}", stdin=PerfLog(hosts=TWO, start=60e-6, rate=240).text())
    assert out.startswith("all_reduce on 2 x dgx-h100, 16 GPUs (s0,1.gpu0-7): ")
    assert "is above the 384 GB/s of a server's 8 NICs" in out


@pytest.mark.thorough
def test_a_log_may_come_from_stdin_and_hold_several_runs(done: Done, told: Told) -> None:
    """Those that no plan does are named and listed."""
    text = PerfLog("all_gather", rate=300).text() + PerfLog("sendrecv", rate=40).text()
    found = told("explain - --machine dgx-a100", stdin=text)
    assert [row["collective"] for row in found["rows"]] == ["allgather"] * 14 + ["sendrecv"] * 14
    assert "not compared" in found["runs"][1]["warnings"][0]
    assert "warning: sendrecv: 14 rows" in done("explain - --machine dgx-a100", stdin=text)


@pytest.mark.thorough
def test_what_bench_prints_is_read_too(done: Done, told: Told, plan_file: Path) -> None:
    """As text and as JSON: the same rows, on the GPUs of its plan."""
    text = done(f"bench {plan_file} --sizes 1KB,16KB")
    rows = told("explain - --machine dgx-1v --gpus 1,4,5,7", stdin=text)["rows"]
    assert [(row["size"], row["best"]) for row in rows] == [(1 << 10, 50), (1 << 14, 50)]
    text = done(f"bench {plan_file} --sizes 1KB,16KB --json")
    found = told("explain - --machine dgx-1v", stdin=text)
    assert found["runs"][0]["gpus"] == [1, 4, 5, 7]
    assert [row["size"] for row in found["rows"]] == [1 << 10, 1 << 14]


@pytest.mark.parametrize("text", ["", "\n\n", "roses are red\n", "{", "GPU0\tGPU1\nGPU0\tX\n", "\0\1\2"])
def test_what_is_no_log_is_one_line(refused: Done, text: str) -> None:
    refused("explain - --machine dgx-1v", stdin=text)


def test_a_damaged_log_keeps_what_it_has(done: Done, log: Path) -> None:
    """Cut in a row, with wrong results before it."""
    text = PerfLog(sizes=SIZES, wrong={1 << 20: 5}).text()
    out = done("explain - --machine dgx-h100", stdin=text[: text.index("1073741824", 800) + 40])
    assert "1MB: 5 wrong elements" in out
    assert "the row of 1GB is cut" in out
    assert "ends without its summary" in out


@pytest.mark.thorough
def test_a_log_of_nccl_is_explained_beside_the_rows(done: Done, told: Told, log: Path) -> None:
    """Both in one file, as NCCL_DEBUG=INFO leaves them: rows, rings and findings."""
    rates = PerfLog(gpu="Tesla V100-SXM2-32GB", rate=10, sizes=[1 << 20, 1 << 28]).text()
    log.write_text(without_peers().text() + rates)
    out = done(f"explain {log} --machine dgx-1v")
    assert out.startswith("all_reduce on dgx-1v, 8 GPUs (gpu0-7): ")
    assert "NCCL 2.21.5+cuda12.4: 8 ranks, on GPUs 0-7, 2 channels: 5 findings" in out
    assert "links allow  2 rings, busbw 25 GB/s (the best rings: 150)" in out
    assert "1. unset NCCL_P2P_DISABLE (it is 1), and run again" in out
    assert "warning: NCCL_P2P_DISABLE=1 switches NVLink and PCIe between GPUs off" in out
    found = told(f"explain {log} --machine dgx-1v")
    assert found["nccl"]["version"] == "2.21.5+cuda12.4"
    assert {one["kind"] for one in found["nccl"]["findings"]} >= {"setting", "shm", "few channels"}
    assert len(found["rows"]) == 2


def test_a_log_of_nccl_alone_has_no_rows(done: Done, told: Told) -> None:
    """And its choices stand by size."""
    text = over_sockets().text()
    chose = "chose        AllReduce: tree/ll 1KB to 64KB, ring/simple 64MB"
    assert chose in done(f"explain - {CLUSTER}", stdin=text)
    assert told(f"explain - {CLUSTER}", stdin=text)["rows"] == []


@pytest.fixture
def rivals(tmp_path: Path) -> str:
    """Logs of a ring that starts late, a tree that starts early, and NVLS that is fastest of large ones."""
    for name, start, rate in (("ring", 90e-6, 205), ("tree", 30e-6, 150), ("nvls_tree", 110e-6, 260)):
        (tmp_path / f"{name}.log").write_text(PerfLog(hosts=TWO, start=start, rate=rate).text())
    return ",".join(f"{name}={tmp_path}/{name}.log" for name in ("ring", "tree", "nvls_tree"))


def test_logs_of_rivals_become_a_file_for_the_tuner(done: Done, rivals: str, tmp_path: Path) -> None:
    """By the plugin's rules: the tree for small buffers, NVLS for large ones, the model where none was measured."""
    target = tmp_path / "tuner.csv"
    out = done(f"explain --tune {rivals} {CLUSTER} -o {target}")
    assert out.endswith(f"written: {target}\n")
    lines = read(target.read_text())
    assert chosen(lines, "allreduce", 1 << 10, nodes=2, ranks=16) == ("tree", "ll", 1)
    assert chosen(lines, "allreduce", 1 << 29, nodes=2, ranks=16) == ("nvls_tree", "simple", 16)
    assert chosen(lines, "reducescatter", 1 << 29, nodes=2, ranks=16)[0] == "ring"


def test_without_a_machine_labels_name_protocols(run: Run, refused: Done, rivals: str) -> None:
    """Or are refused in one line; channels are what the caller says."""
    assert "leaves open which protocol ran at 8B" in refused(f"explain --tune {rivals}")
    full = rivals.replace("ring=", "ring/simple=", 1).replace(",tree=", ",tree/ll128=")
    status, out, err = run(f"explain --tune {full} --nccl-channels 12")
    assert status == 0
    assert chosen(read(out), "allreduce", 1 << 20, nodes=2, ranks=16) == ("tree", "ll128", 12)
    assert "no lines for allgather" in err


@pytest.mark.thorough
def test_logs_of_two_communicators_are_not_mixed(refused: Done, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(PerfLog().text())
    (tmp_path / "b.log").write_text(PerfLog(hosts=TWO).text())
    line = refused(f"explain --tune ring/ll={tmp_path}/a.log,tree/ll={tmp_path}/b.log")
    assert "8 ranks on 1 servers" in line


def test_what_nccl_does_not_have_is_left_out_of_the_file(run: Run, log: Path) -> None:
    """A tree does no allgather: NCCL ran something else, and the log says nothing of trees."""
    log.write_text(PerfLog("all_gather").text() + PerfLog().text())
    status, out, err = run(f"explain --tune tree/ll={log} --nccl-channels 8")
    assert status == 0
    assert {line.collective for line in read(out)} == {"allreduce"}
    assert "NCCL has no tree for allgather; 14 rows left out" in err


@pytest.mark.parametrize("name", ["dgx-1v", "dgx-a100", "dgx-h100"])
def test_a_text_without_models_has_nccl_s_model_of_the_assumed_gpu(name: str) -> None:
    """The generation that gave the rates of the links, also of two GPUs of many."""
    machine = topoplan.load(name)
    text = topoplan.load(matrix_of(machine))
    for gpus in (None, (0, 1)):
        found, expected = (
            nccl_model(one.settled() if gpus is None else one.subset(gpus), "allreduce")
            for one in (text, machine)
        )
        assert found
        assert found == expected


@pytest.mark.parametrize(
    ("gpu", "best", "verdict"),
    [("NVIDIA B200", 900, "slow"), ("NVIDIA A100-SXM4-80GB", 450, "another machine")],
)
def test_a_text_without_models_takes_the_gpu_of_the_log(
    told: Told, topo: Path, log: Path, gpu: str, best: float, verdict: str
) -> None:
    """A B200 has the rates of its NVLinks; an A100 has fewer NVLinks than the text, which is another machine's."""
    log.write_text(PerfLog(sizes=[1 << 30], rate=275, gpu=gpu).text())
    found = told(f"explain {log} --machine {topo}")
    assert (found["runs"][0]["verdict"], found["rows"][0]["best"]) == (verdict, best)
    assert any(f"GPU taken from the log: {gpu}" in note for note in found["notes"]) == (best == 900)


@pytest.mark.parametrize(
    ("rate", "likely", "step"),
    [
        (
            24,
            "PCIe or host memory: busbw 41.98 is 87 % of PCIe's 48, 9.3 % of an NVLink ring's 450",
            "peer access",
        ),
        (208, "a ring: busbw 362.5 is 81 % of an NVLink ring's 450; NVLS did not run", "NVLS off"),
        (100, None, "run again with NCCL_DEBUG"),
    ],
)
def test_a_slow_run_is_compared_with_the_limits_of_other_transports(
    done: Done, told: Told, topo: Path, log: Path, rate: float, likely: str | None, step: str
) -> None:
    """Their causes come first; a text with all its NVLinks rules out missing ones."""
    log.write_text(PerfLog(sizes=[1 << 30], rate=rate).text())
    found = told(f"explain {log} --machine {topo}")
    assert (found["runs"][0]["looks_like"] or "").startswith(likely or "")
    assert (found["runs"][0]["looks_like"] is None) == (likely is None)
    assert step in found["next_steps"][0]
    assert not any("NVLink missing" in one for one in found["next_steps"])
    assert "ruled out    missing NVLinks" in done(f"explain {log} --machine {topo}")


def test_the_expectation_needs_no_log(done: Done, refused: Done, told: Told, log: Path) -> None:
    """It is that of the row of a log: published measurements of one server, else NCCL's model."""
    out = done(f"explain --expect {CLUSTER}")
    assert "busbw 460.7 GB/s at 8GB is expected by NCCL's model (slow below 368.6)" in out.splitlines()[0]
    assert "link limit   busbw 720 GB/s by nvls tree; nccl tree 482.1; network ring 384" in out
    row = told(f"explain {log} --machine dgx-h100")["rows"][-1]
    found = told("explain --expect --machine dgx-h100")
    ((expected, by),) = (
        (one["time"], by)
        for one, by in zip(found["expected"], found["expected_by"], strict=True)
        if one["size"] == row["size"]
    )
    assert expected == pytest.approx(row["expected_time"], rel=1e-5)
    assert by == row["expected_by"] == "published measurements of Hopper"
    assert row["of_expected"] == pytest.approx(expected / row["time"], rel=1e-5)
    plain = told(f"explain {log} --machine dgx-h100 --in-network none")["rows"][-1]
    assert plain["expected_by"] == "NCCL's model"
    assert plain["expected_time"] == pytest.approx(plain["nccl_expects"]["time"], rel=1e-5)
    assert "leave LOG or --expect out" in refused(f"explain {log} --expect {CLUSTER}")


def test_an_average_that_the_rows_do_not_have_is_a_warning(done: Done, log: Path) -> None:
    text = re.sub(r"(Avg bus bandwidth\s*:).*", r"\1 999.5", log.read_text())
    assert "999.5" in text
    out = done("explain - --machine dgx-h100", stdin=text)
    assert "Avg bus bandwidth 999.5 is not the average" in out


def test_servers_of_unequal_ranks_have_no_published_rate(done: Done) -> None:
    """12 GPUs as 8 + 4 reach less than 16 as 8 + 8: 94 % of their bound is as expected."""
    ranks = "".join(
        f"#  Rank {i:2} Group  0 Pid {i} on node{i // 8} device {i % 8} [0x0{i % 8}] NVIDIA H100\n"
        for i in range(12)
    )
    part = "47450.0  181.03  331.9"
    size = 1 << 33
    head = "# Collective test starting: all_reduce_perf\n# nThread 1 nGpus 1\n"
    text = f"{head}{ranks}   {size}  {size // 4}  float  sum  -1 {part}  0 {part}  0\n"
    out = done("explain - --machine dgx-h100 --servers 2 --nic-bandwidth 400Gb/s", stdin=text)
    assert ": as expected: busbw 331.9 GB/s at 8GB, 94 % of the upper bound" in out.splitlines()[0]


def test_a_size_slower_than_a_larger_one_is_a_warning(done: Done) -> None:
    part = ["  391.47  171.43  300.00", " 9395.24  28.57  50.00", " 4270.56  251.43  440.00"]
    ranks = "".join(
        f"#  Rank {i:2} Group  0 Pid {i} on node0 device {i} [0x0{i}] NVIDIA H100\n" for i in range(8)
    )
    sizes = (1 << 26, 1 << 28, 1 << 30)
    rows = "".join(
        f"   {size}  {size // 4}  float  sum  -1 {one}  0 {one}  0\n"
        for size, one in zip(sizes, part, strict=True)
    )
    head = "# Collective test starting: all_reduce_perf\n# nThread 1 nGpus 1\n"
    out = done("explain - --machine dgx-h100", stdin=head + ranks + rows)
    assert "256MB takes 2.2 times as long as 1GB; run it again" in " ".join(out.split())


def test_two_logs_say_what_changed(done: Done, told: Told, refused: Done, tmp_path: Path) -> None:
    """Times by size, NCCL's algorithm for them, channels and settings; a log against itself has no change."""
    spoken = (LOGS / "chosen.log").read_text()
    old, new = tmp_path / "old.log", tmp_path / "new.log"
    old.write_text((LOGS / "ring.log").read_text() + spoken)
    changed = spoken.replace("24 coll channels", "2 coll channels").replace("Algo NVLS_TREE", "Algo RING")
    new.write_text((LOGS / "tree.log").read_text() + changed)
    lines = done(f"explain {old} {new}").splitlines()
    assert lines[0].startswith(
        "of 7 sizes 3 slower by more than 5 %, most at 8GB: +31.7% time, busbw 370.2 to 281.1"
    )
    assert "channels     24 -> 2" in lines
    found = told(f"explain {old} {new}")
    assert [one["what"] for one in found["setup"]] == ["channels", "AllReduce algorithm"]
    assert (found["slower"], found["faster"], len(found["rows"])) == (3, 4, 7)
    row = next(row for row in found["rows"] if row["size"] == 4 << 20)
    assert (row["old_choice"], row["new_choice"]) == ("nvls_tree/simple", "ring/simple")
    same = done(f"explain {old} {old}").splitlines()
    assert same == [
        "no change: 7 sizes, none by more than 5 %",
        "NCCL         both logs say the same of its setup",
    ]
    assert "--machine does not go with a second log" in refused(f"explain {old} {new} --machine dgx-1v")
    other = tmp_path / "other.log"
    other.write_text((LOGS / "h100.log").read_text())
    assert "no size in common" in refused(f"explain {LOGS / 'ring.log'} {other}")


def test_two_logs_without_names_are_compared_by_their_columns(
    done: Done, refused: Done, tmp_path: Path
) -> None:
    """nccl-tests before 2.13 do not print the test; a bus bandwidth of 7/4 or 7/8 of the other one of 8 ranks does."""
    ranks = "".join(
        f"#  Rank {i:2} Group  0 Pid {i} on node0 device {i} [0x0{i}] NVIDIA H100\n" for i in range(8)
    )
    size = 1 << 30
    texts = []
    for factor in (1.75, 0.875):
        part = f"  4000.0  268.44  {268.44 * factor:.2f}"
        texts.append(f"# nThread 1 nGpus 1\n{ranks}   {size}  33554432  float  sum  -1 {part}  0 {part}  0\n")
    paths = [tmp_path / name for name in ("reduced.log", "scattered.log", "wrong.log")]
    for path, text in zip(
        paths, (*texts, texts[0].replace("  0 ", "  7 ").replace("  0\n", "  7\n")), strict=True
    ):
        path.write_text(text)
    assert "no size in common" in refused(f"explain {paths[0]} {paths[1]}")
    assert done(f"explain {paths[1]} {paths[1]}").startswith("no change: 1 size")
    assert "the second log has no right row" in refused(f"explain {paths[0]} {paths[2]}")


def test_published_rates_come_first(told: Told, done: Done) -> None:
    """The rates of such a machine decide; those of other numbers of servers are shown; an unknown machine says so."""
    log = LOGS / "two-h100.log"
    network = "--machine dgx-h100 --nic-bandwidth 400Gb/s --servers"
    (run,) = told(f"explain {log} {network} 2")["runs"]
    assert (run["normal"]["low"], run["normal"]["same_servers"], run["verdict"]) == (
        479.28,
        True,
        "as expected",
    )
    lines = done(f"explain {log} {network} 2").splitlines()
    assert "; normal for this machine: 479.3 GB/s (slow below 407.4)" in lines[0]
    assert lines[1].startswith(
        "normal       busbw 479.3 GB/s: 16 GPUs on 2 servers, published by aws-samples/"
    )
    slow = done(f"explain {LOGS / 'slow-dgx1.log'} --machine dgx-1v").splitlines()
    assert slow[1] == "normal       no published figures of this machine"
    assert "GB/s at 1GB, 6.1 % of the upper bound" in slow[0]


def test_a_report_of_ras_names_the_ranks_that_others_wait_for(
    done: Done, told: Told, refused: Callable[..., str]
) -> None:
    lines = done("explain -", stdin=ras((7, 7, 5))).splitlines()
    assert lines[0] == "RAS: 1 communicator of 4 ranks: 1 missing or in an error, 1 behind in a collective"
    found = told("explain -", stdin=ras((7, 7, 5)))["findings"]
    assert [(one["rank"], one["finding"]) for one in found] == [(3, "unresponsive"), (2, "5 of 7 AllReduce")]
    assert "every rank answers" in done("explain -", stdin=ras((7, 7), missing=0))
    assert "--machine does not go with a report of RAS" in refused(
        "explain - --machine dgx-1v", stdin=ras((7, 7))
    )


def test_logs_of_other_tools_are_explained_and_other_texts_named(
    told: Told, refused: Callable[..., str]
) -> None:
    (row,) = told("explain - --machine dgx-1v", stdin=INSPECTOR)["rows"]
    assert (row["collective"], row["size"], row["time"]) == ("allreduce", 1 << 24, 400)
    (row,) = told("explain - --machine mi300x", stdin=RCCL_CSV)["rows"]
    assert (row["busbw"], row["time"]) == (32.97, 55.66)
    assert "is the output of lspci -vv, and holds no run" in refused("explain -", stdin=LSPCI)

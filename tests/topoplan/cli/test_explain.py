"""``topoplan explain``: a log in, a table, JSON or CSV out, and one line for what does not fit."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import topoplan
from tests.support.checkout import Run
from tests.support.matrices import uniform_matrix
from tests.support.nccl_debug_logs import over_sockets, without_peers
from tests.support.perf_logs import PerfLog
from tests.support.tuner_plugin import chosen, read
from topoplan.operate.compare.comparison import nccl_model
from topoplan.reading.pcie_tree import relation_matrix

TWO = (("node1", range(8)), ("node2", range(8)))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "run.log"
    path.write_text(PerfLog(sizes=[1 << 10, 1 << 20, 1 << 30]).text())
    return path


def test_json_has_a_row_for_every_size_with_the_promised_keys(run: Run, log: Path) -> None:
    """Figures of the log, and what can be reached, in algorithm bandwidth; time in microseconds as printed."""
    status, out, err = run("explain", str(log), "--machine", "dgx-h100", "--json")
    assert (status, err) == (0, "")
    rows = json.loads(out)["rows"]
    keys = {"collective", "size", "time", "algbw", "busbw", "nccl_best", "best", "bound_by"}
    assert all(keys <= set(row) for row in rows)
    assert [(row["collective"], row["size"], row["bound_by"]) for row in rows] == [
        ("allreduce", 1 << 10, "latency"),
        ("allreduce", 1 << 20, "latency"),
        ("allreduce", 1 << 30, "bandwidth"),
    ]
    last = rows[-1]
    assert last["algbw"] == pytest.approx(last["size"] / last["time"] / 1e3, abs=0.01)
    assert (last["nccl_best"], last["best"]) == (450, 450)
    assert last["of_best"] == pytest.approx(last["algbw"] / 450, abs=1e-4)
    assert "450 GB/s leave {gpu0}" in last["links"]
    assert last["in_place"]["busbw"] > last["busbw"]


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
def test_logs_in_any_encoding_are_read(run: Run, log: Path, encoded: Callable[[str], bytes]) -> None:
    """As PowerShell, editors, and processes that write at once leave them."""
    log.write_bytes(encoded(log.read_text()))
    status, out, err = run("explain", str(log), "--machine", "dgx-a100", "--json")
    assert (status, err) == (0, "")
    assert [row["size"] for row in json.loads(out)["rows"]] == [1 << 10, 1 << 20, 1 << 30]
    log.write_bytes(bytes(range(256)) * 40)
    assert "is binary, not text" in run("explain", str(log), "--machine", "dgx-a100")[2]


def test_the_table_says_what_nccl_and_what_any_schedule_can(run: Run, log: Path) -> None:
    """Before the rows, in algorithm and bus bandwidth."""
    status, out, err = run("explain", str(log), "--machine", "dgx-a100")
    assert (status, err) == (0, "")
    assert out.startswith(
        "all_reduce on dgx-a100, 8 GPUs (gpu0-7): the log ran on NVIDIA H100 80GB HBM3, another"
    )
    assert "link limit   busbw 300 GB/s by nvlink ring; nccl tree 300\n" in out
    assert "above the upper bound of these links" in out
    assert "2. or --machine dgx-h100 (8 x NVIDIA H100 80GB HBM3 on one host)" in out


@pytest.mark.parametrize(
    ("rate", "verdict", "step"),
    [
        (
            275,
            "as expected: busbw 478.6 GB/s at 1GB, 87 % of what NCCL's model expects (slow",
            "nothing to do",
        ),
        (
            120,
            "slow: busbw 209.5 GB/s at 1GB, 38 % of what NCCL's model",
            "NCCL_DEBUG_SUBSYS=INIT,GRAPH,TUNING",
        ),
    ],
)
def test_the_first_line_is_the_verdict_and_the_last_the_next_step(
    run: Run, tmp_path: Path, rate: float, verdict: str, step: str
) -> None:
    """Against NCCL's own model, since NVLS does not fill its links; small sizes are one line, --all has them."""
    path = tmp_path / "run.log"
    path.write_text(PerfLog(sizes=[1 << 10, 1 << 20, 1 << 30], rate=rate).text())
    out = run("explain", str(path), "--machine", "dgx-h100")[1]
    assert verdict in out.splitlines()[0]
    assert step in out[out.index("next step") :]
    assert "1KB to 1MB: 2 rows" in out
    assert "\n1KB  " in run("explain", str(path), "--machine", "dgx-h100", "--all")[1]
    told = json.loads(run("explain", str(path), "--machine", "dgx-h100", "--json")[1])
    assert told["runs"][0]["verdict"] in verdict
    assert step in told["next_steps"][0]


def test_the_log_proposes_its_machine(run: Run, tmp_path: Path) -> None:
    """By the model and number of its GPUs, and its hosts."""
    path = tmp_path / "run.log"
    path.write_text(PerfLog(sizes=[1 << 30]).text())
    assert "add --machine dgx-h100 (8 x NVIDIA H100 80GB HBM3 on one host)" in run("explain", str(path))[2]
    path.write_text(PerfLog(hosts=TWO, sizes=[1 << 30]).text())
    assert "add --machine dgx-h100 --servers 2 --nic-bandwidth 400Gb/s" in run("explain", str(path))[2]
    path.write_text(PerfLog(sizes=[1 << 30], gpu="Something New").text())
    assert "nvidia-smi topo -m" in run("explain", str(path))[2]


def test_in_network_settles_which_switches_add(run: Run, log: Path) -> None:
    """By default NVSwitches do what they can, as NVLS lets them; none leaves rings."""
    rows = json.loads(run("explain", str(log), "--machine", "dgx-h100", "--in-network", "none", "--json")[1])[
        "rows"
    ]
    assert rows[-1]["best"] == pytest.approx(450 * 8 / 14)
    assert rows[-1]["nccl_is"] == "nvlink ring"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("code", "gpu", "best"),
    [("NV18", "NVIDIA H100 80GB HBM3", 450.0), ("NV18", "", 450.0), ("NV8", "NVIDIA H800", 200.0)],
)
def test_the_text_of_nvidia_smi_gives_no_false_bound(
    run: Run, tmp_path: Path, code: str, gpu: str, best: float
) -> None:
    """NVLS is above the rings' bound; the NVLinks or the log tell the generation, and all columns agree."""
    log, machine = tmp_path / "run.log", tmp_path / "topo.txt"
    log.write_text(PerfLog(sizes=[1 << 30], rate=0.61 * best, gpu=gpu).text())
    machine.write_text(uniform_matrix(8, code))
    for options in ((), ("--in-network", "nvswitch")):
        (row,) = json.loads(run("explain", str(log), "--machine", str(machine), *options, "--json")[1])[
            "rows"
        ]
        assert (row["best"], row["nccl_best"], row["nccl_is"]) == (best, best, "nvls")
        assert row["of_best"] < 1
        assert row["nccl_expects"]["algorithm"] == "nvls"
    said = run("explain", str(log), "--machine", str(machine), "--in-network", "none")[1]
    assert "in-network   at most" in said
    assert "next step    --in-network nvswitch in place of none" in said
    assert (
        f"the bound leaves in-network reduction out, with which it is {best:g} GB/s; --in-network nvswitch"
        in said
    )


def test_two_servers_and_why_bus_bandwidth_is_above_the_nics(run: Run, tmp_path: Path) -> None:
    """The log's hosts are the servers of the cluster."""
    path = tmp_path / "two.log"
    path.write_text(PerfLog(hosts=TWO, start=60e-6, rate=240).text())
    status, out, _ = run(
        "explain", str(path), "--machine", "dgx-h100", "--servers", "2", "--nic-bandwidth", "400Gb/s"
    )
    assert status == 0
    assert out.startswith("all_reduce on 2 x dgx-h100, 16 GPUs (s0,1.gpu0-7): ")
    assert "is above the 384 GB/s of a server's 8 NICs" in out


@pytest.mark.thorough
def test_csv_is_a_line_for_every_row(run: Run, log: Path) -> None:
    """With the same figures as JSON."""
    rows = list(csv.DictReader(io.StringIO(run("explain", str(log), "--machine", "dgx-a100", "--csv")[1])))
    told = json.loads(run("explain", str(log), "--machine", "dgx-a100", "--json")[1])["rows"]
    assert [(int(row["size"]), float(row["algbw"])) for row in rows] == [
        (r["size"], r["algbw"]) for r in told
    ]
    assert float(rows[2]["in_place_busbw"]) == told[2]["in_place"]["busbw"]


@pytest.mark.thorough
def test_a_log_may_come_from_stdin_and_hold_several_runs(run: Run) -> None:
    """Those that no plan does are named and listed."""
    text = PerfLog("all_gather", rate=300).text() + PerfLog("sendrecv", rate=40).text()
    status, out, _ = run("explain", "-", "--machine", "dgx-a100", "--json", stdin=text)
    found = json.loads(out)
    assert status == 0
    assert [row["collective"] for row in found["rows"]] == ["allgather"] * 14 + ["sendrecv"] * 14
    assert "not compared" in found["runs"][1]["warnings"][0]
    assert "warning: sendrecv: 14 rows" in run("explain", "-", "--machine", "dgx-a100", stdin=text)[1]


@pytest.mark.thorough
def test_what_bench_prints_is_read_too(run: Run, tmp_path: Path) -> None:
    """As text and as JSON: the same rows, on the GPUs of its plan."""
    plan, text = tmp_path / "plan.json", tmp_path / "bench.log"
    plan.write_text(topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7]).to_json())
    text.write_text(run("bench", str(plan), "--sizes", "1KB,16KB")[1])
    rows = json.loads(run("explain", str(text), "--machine", "dgx-1v", "--gpus", "1,4,5,7", "--json")[1])[
        "rows"
    ]
    assert [(row["size"], row["best"]) for row in rows] == [(1 << 10, 50), (1 << 14, 50)]
    text.write_text(run("bench", str(plan), "--sizes", "1KB,16KB", "--json")[1])
    found = json.loads(run("explain", str(text), "--machine", "dgx-1v", "--json")[1])
    assert found["runs"][0]["gpus"] == [1, 4, 5, 7]
    assert [row["size"] for row in found["rows"]] == [1 << 10, 1 << 14]


@pytest.mark.parametrize("text", ["", "\n\n", "roses are red\n", "{", "GPU0\tGPU1\nGPU0\tX\n", "\0\1\2"])
def test_what_is_no_log_is_one_line(run: Run, text: str) -> None:
    """Nothing, another text, a machine, bytes."""
    status, out, err = run("explain", "-", "--machine", "dgx-1v", stdin=text)
    assert (status, out, err.count("\n")) == (2, "", 1)


def test_a_damaged_log_keeps_what_it_has(run: Run, log: Path) -> None:
    """Cut in a row, with wrong results before it."""
    text = PerfLog(sizes=[1 << 10, 1 << 20, 1 << 30], wrong={1 << 20: 5}).text()
    status, out, _ = run(
        "explain", "-", "--machine", "dgx-h100", stdin=text[: text.index("1073741824", 800) + 40]
    )
    assert status == 0
    assert "1MB: 5 wrong elements" in out
    assert "the row of 1GB is cut" in out
    assert "ends without its summary" in out


@pytest.mark.thorough
def test_a_log_of_nccl_is_explained_beside_the_rows(run: Run, tmp_path: Path) -> None:
    """Both in one file, as NCCL_DEBUG=INFO leaves them: rows, rings and findings."""
    path = tmp_path / "run.log"
    rates = PerfLog(gpu="Tesla V100-SXM2-32GB", rate=10, sizes=[1 << 20, 1 << 28]).text()
    path.write_text(without_peers().text() + rates)
    status, out, _ = run("explain", str(path), "--machine", "dgx-1v")
    assert status == 0
    assert out.startswith("all_reduce on dgx-1v, 8 GPUs (gpu0-7): ")
    assert "NCCL 2.21.5+cuda12.4: 8 ranks, on GPUs 0-7, 2 channels: 5 findings" in out
    assert "links allow  2 rings, busbw 25 GB/s (the best rings: 150)" in out
    assert "1. unset NCCL_P2P_DISABLE (it is 1), and run again" in out
    assert "warning: NCCL_P2P_DISABLE=1 switches NVLink and PCIe between GPUs off" in out
    found = json.loads(run("explain", str(path), "--machine", "dgx-1v", "--json")[1])
    assert found["nccl"]["version"] == "2.21.5+cuda12.4"
    assert {one["kind"] for one in found["nccl"]["findings"]} >= {"setting", "shm", "few channels"}
    assert len(found["rows"]) == 2


def test_a_log_of_nccl_alone_has_no_rows(run: Run) -> None:
    """And its choices stand by size."""
    text = over_sockets().text()
    cluster = ("--machine", "dgx-h100", "--servers", "2", "--nic-bandwidth", "400Gb/s")
    status, out, _ = run("explain", "-", *cluster, stdin=text)
    assert status == 0
    assert "chose        AllReduce: tree/ll 1KB to 64KB, ring/simple 64MB" in out
    assert json.loads(run("explain", "-", *cluster, "--json", stdin=text)[1])["rows"] == []


@pytest.fixture
def rivals(tmp_path: Path) -> str:
    """Logs of a ring that starts late, a tree that starts early, and NVLS that is fastest of large ones."""
    for name, start, rate in (("ring", 90e-6, 205), ("tree", 30e-6, 150), ("nvls_tree", 110e-6, 260)):
        (tmp_path / f"{name}.log").write_text(PerfLog(hosts=TWO, start=start, rate=rate).text())
    return f"ring={tmp_path}/ring.log,tree={tmp_path}/tree.log,nvls_tree={tmp_path}/nvls_tree.log"


def test_logs_of_rivals_become_a_file_for_the_tuner(run: Run, rivals: str, tmp_path: Path) -> None:
    """By the plugin's rules: the tree for small buffers, NVLS for large ones, the model where none was measured."""
    target = tmp_path / "tuner.csv"
    cluster = ("--machine", "dgx-h100", "--servers", "2", "--nic-bandwidth", "400Gb/s")
    status, out, err = run("explain", "--tune", rivals, *cluster, "-o", str(target))
    assert (status, err) == (0, "")
    assert out.endswith(f"written: {target}\n")
    lines = read(target.read_text())
    assert chosen(lines, "allreduce", 1 << 10, nodes=2, ranks=16) == ("tree", "ll", 1)
    assert chosen(lines, "allreduce", 1 << 29, nodes=2, ranks=16) == ("nvls_tree", "simple", 16)
    assert chosen(lines, "reducescatter", 1 << 29, nodes=2, ranks=16)[0] == "ring"


def test_without_a_machine_labels_name_protocols(run: Run, rivals: str) -> None:
    """Or are refused in one line; channels are what the caller says."""
    status, out, err = run("explain", "--tune", rivals)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "leaves open which protocol ran at 8B" in err
    full = rivals.replace("ring=", "ring/simple=", 1).replace(",tree=", ",tree/ll128=")
    status, out, err = run("explain", "--tune", full, "--nccl-channels", "12")
    assert status == 0
    assert chosen(read(out), "allreduce", 1 << 20, nodes=2, ranks=16) == ("tree", "ll128", 12)
    assert "no lines for allgather" in err


@pytest.mark.thorough
def test_logs_of_two_communicators_are_not_mixed(run: Run, tmp_path: Path) -> None:
    """Each needs a file of its own."""
    (tmp_path / "a.log").write_text(PerfLog().text())
    (tmp_path / "b.log").write_text(PerfLog(hosts=TWO).text())
    status, _, err = run("explain", "--tune", f"ring/ll={tmp_path}/a.log,tree/ll={tmp_path}/b.log")
    assert status == 2
    assert "8 ranks on 1 servers" in err


def test_what_nccl_does_not_have_is_left_out_of_the_file(run: Run, tmp_path: Path) -> None:
    """A tree does no allgather: NCCL ran something else, and the log says nothing of trees."""
    (tmp_path / "t.log").write_text(PerfLog("all_gather").text() + PerfLog().text())
    status, out, err = run("explain", "--tune", f"tree/ll={tmp_path}/t.log", "--nccl-channels", "8")
    assert status == 0
    assert {line.collective for line in read(out)} == {"allreduce"}
    assert "NCCL has no tree for allgather; 14 rows left out" in err


def matrix_of(machine: topoplan.Topology) -> str:
    """The text of nvidia-smi topo -m of a machine."""
    names, cells = relation_matrix(machine)
    rows = [("", *names), *((name, *row) for name, row in zip(names, cells, strict=True))]
    return "\n".join("\t".join(row) for row in rows).replace("gpu", "GPU").replace("nic", "mlx5_") + "\n"


@pytest.mark.parametrize("name", ["dgx-1v", "dgx-a100", "dgx-h100"])
@pytest.mark.parametrize("gpus", [None, (0, 1)])
def test_a_text_without_models_has_nccl_s_model_of_the_assumed_gpu(
    name: str, gpus: tuple[int, ...] | None
) -> None:
    """The generation that gave the rates of the links, also of two GPUs of many."""
    machine = topoplan.load(name)
    text = topoplan.load(matrix_of(machine))
    found, expected = (
        nccl_model(one.settled() if gpus is None else one.subset(gpus), "allreduce")
        for one in (text, machine)
    )
    assert found
    assert found == expected


def test_a_text_without_models_takes_the_gpu_of_the_log(run: Run, tmp_path: Path) -> None:
    """A B200 has the rates of its NVLinks; an A100 has fewer NVLinks than the text, which is another machine's."""
    (tmp_path / "topo.txt").write_text(matrix_of(topoplan.load("dgx-h100")))
    path = tmp_path / "run.log"
    for gpu, best, verdict in (
        ("NVIDIA B200", 900, "slow"),
        ("NVIDIA A100-SXM4-80GB", 450, "another machine"),
    ):
        path.write_text(PerfLog(sizes=[1 << 30], rate=275, gpu=gpu).text())
        told = json.loads(run("explain", str(path), "--machine", str(tmp_path / "topo.txt"), "--json")[1])
        assert (told["runs"][0]["verdict"], told["rows"][0]["best"]) == (verdict, best)
        assert any(f"GPU taken from the log: {gpu}" in note for note in told["notes"]) == (best == 900)


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
    run: Run, tmp_path: Path, rate: float, likely: str | None, step: str
) -> None:
    """Their causes come first; a text with all its NVLinks rules out missing ones."""
    (tmp_path / "topo.txt").write_text(matrix_of(topoplan.load("dgx-h100")))
    (tmp_path / "run.log").write_text(PerfLog(sizes=[1 << 30], rate=rate).text())
    command = ("explain", str(tmp_path / "run.log"), "--machine", str(tmp_path / "topo.txt"))
    told = json.loads(run(*command, "--json")[1])
    assert (told["runs"][0]["looks_like"] or "").startswith(likely or "")
    assert (told["runs"][0]["looks_like"] is None) == (likely is None)
    assert step in told["next_steps"][0]
    assert not any("NVLink missing" in one for one in told["next_steps"])
    assert "ruled out    missing NVLinks" in run(*command)[1]


def test_the_expectation_needs_no_log(run: Run, log: Path) -> None:
    """It is NCCL's model, as the row of a log has it."""
    cluster = ("--machine", "dgx-h100", "--servers", "2", "--nic-bandwidth", "400Gb/s")
    out = run("explain", "--expect", *cluster)[1]
    assert "NCCL's model expects busbw 460.7 GB/s at 8GB (slow below 368.6)" in out.splitlines()[0]
    assert "link limit   busbw 720 GB/s by nvls tree; nccl tree 482.1; network ring 384" in out
    told = json.loads(run("explain", "--expect", "--machine", "dgx-h100", "--json")[1])["expected"]
    row = json.loads(run("explain", str(log), "--machine", "dgx-h100", "--json")[1])["rows"][-1]
    (expected,) = (one["time"] for one in told if one["size"] == row["size"])
    assert expected == pytest.approx(row["nccl_expects"]["time"], rel=1e-5)
    assert "leave LOG or --expect out" in run("explain", str(log), "--expect", *cluster)[2]


def test_an_average_that_the_rows_do_not_have_is_a_warning(run: Run, log: Path) -> None:
    text = re.sub(r"(Avg bus bandwidth\s*:).*", r"\1 999.5", log.read_text())
    assert "999.5" in text
    log.write_text(text)
    assert (
        "Avg bus bandwidth 999.5 is not the average" in run("explain", str(log), "--machine", "dgx-h100")[1]
    )

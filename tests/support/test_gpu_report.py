"""The table of what holds on a GPU, without one: rows fail alone, and what they run is right on the stand-ins."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import topoplan
from collectives import Communicator
from collectives.backends.nccl.nccl_library import find_library
from tests import gpu_report
from tests.bench import gpu as bench
from tests.bench.gpu_selection import rival_seconds
from tests.gpu_report import CannotRun, Facts, Missed, Outcome, Row, chosen, judged, shared_gpu
from tests.jobs import nccl_rank
from tests.support import (
    gpu_checks,
    gpu_exchange_checks,
    gpu_kernel_rows,
    gpu_rank_rows,
    gpu_rows,
    kernel_data,
)
from tests.support.checkout import ROOT
from tests.support.fake_streams import Machine
from tests.support.gpu_ranks import machine as machine
from tests.support.gpu_ranks import on_every_rank, outcome
from tests.support.gpu_rows import ROWS
from tests.support.hand_plans import forest_plan
from tests.support.selection_data import DTYPES
from tests.support.selection_on_cpu import install_selection


def environment(**more: str) -> dict[str, str]:
    places = str(ROOT)
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": places, **more}


# ---- the table


@pytest.mark.thorough
def test_without_a_gpu_every_row_says_why_in_seconds_and_nothing_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu_report", "-o", str(tmp_path / "out.json")]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    listed = [row.name for row in ROWS if row.listed]
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == listed
    assert all(re.search(r"cannot run +0\.0 s  \w", line) for line in lines[:-1])
    assert lines[-1].startswith(f"0 ok, 0 failed or missed, {len(listed)} cannot run; ")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["failed"] == 0
    assert [row["name"] for row in found["rows"]] == listed
    assert all(row["text"] for row in found["rows"])


def test_without_a_gpu_no_process_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(gpu_report, "driver", lambda: ("no NVIDIA driver", 0))
    monkeypatch.setattr(subprocess, "Popen", refused)
    assert gpu_report.main(["-o", str(tmp_path / "out.json")]) == 0


@pytest.mark.thorough
def test_pytest_is_not_needed_and_topoplan_is_imported_from_the_checkout() -> None:
    code = (
        "import sys; sys.modules['pytest'] = None\n"
        "from tests.support import gpu_rows\n"
        "import tests.support.gpu_checks, tests.support.gpu_exchange_checks, tests.jobs.nccl_rank\n"
        "import tests.bench.gpu_selection, topoplan\n"
        "assert topoplan.load('dgx-1v').gpus, 'the library of machines'\n"
        "print(topoplan.__file__)"
    )
    places = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(PYTHONPATH=places), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "topoplan" / "__init__.py"


ENDINGS = {
    "fine": ("ok", "all is well\non two lines"),
    "leaves": ("failed", "its process ended without a result, by exit status 3"),
    "crashes": ("failed", "its process ended without a result, by signal 11, Segmentation fault"),
    "hangs": ("failed", "killed after its 6 s"),
    "noise": ("failed", "its process ended without a result, by exit status 0"),
    "crashes-late": ("failed", "its process ended by signal 6, Aborted behind its result: well so far"),
    "talks-late": ("ok", "well"),
    "raises": ("failed", "AssertionError: float32 differs"),
    "misses": ("missed", "61% of 80%"),
    "gives-up": ("cannot run", "NCCL refuses"),
    "unable": ("cannot run", "no GPU that suits"),
}
ENDINGS["saved-before"] = ("ok", " ".join(ENDINGS))
"""Verdict and text of each row of `failing_gpu_rows`; the last one says what the file held before it."""


@pytest.mark.thorough
def test_rows_fail_alone_and_leave_output_and_stacks_and_no_process(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "tests/support/failing_gpu_rows.py"),
        "-o",
        str(tmp_path / "out.json"),
    ]
    surroundings = environment(FAILING_ROWS_FOLDER=str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=120)
    found = json.loads((tmp_path / "out.json").read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert {name: (row["verdict"], row["text"]) for name, row in rows.items()} == ENDINGS
    assert done.returncode == 7
    assert rows["fine"]["figures"] == {"rate": 12.5}
    assert "Traceback" in rows["raises"]["output"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out-rows", "out.json", "waiting"]
    table = done.stdout
    assert "on two lines" in table
    assert f"see {rows['crashes']['folder']}" in table
    assert "7 failed or missed" in table.splitlines()[-1]
    texts = {
        name: Path(row["folder"], "output.txt").read_text() for name, row in rows.items() if row["folder"]
    }
    assert set(texts) == {*rows} - {"unable"}
    assert re.search(r"Fatal Python error: Segmentation fault(.|\n)*File", texts["crashes"])
    assert re.search(r"Timeout .*\n(.*\n)*.* in hangs\n", texts["hangs"])
    state = Path(f"/proc/{(tmp_path / 'waiting').read_text()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_environment_of_a_row_keeps_what_the_caller_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "TRACE")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    found = gpu_report.row_environment(
        Row("device", lambda: ""), 90.0, tmp_path, {"CUDA_VISIBLE_DEVICES": "3"}
    )
    assert found["NCCL_DEBUG"] == "TRACE"
    assert found["NCCL_DEBUG_FILE"] == f"{tmp_path}/nccl.%h.%p.log"
    assert (found["CUDA_DEVICE_MAX_CONNECTIONS"], found["CUDA_VISIBLE_DEVICES"]) == ("32", "3")
    assert found["PYTHONFAULTHANDLER"] == "1"


def test_rows_are_chosen_by_pattern_behind_the_one_that_the_others_are_decided_by() -> None:
    names = [row.name for row in chosen(ROWS, "nccl-1/*, topk/float32")]
    assert names[0] == "device"
    assert names[1:] == ["nccl-1/messages", "nccl-1/back-end", "topk/float32", "nccl-1/abort", "nccl-1/close"]
    assert len({row.name for row in ROWS}) == len(ROWS)
    with pytest.raises(SystemExit):
        gpu_report.main(["--rows", "ncll*"])


def test_a_row_without_time_is_not_run_and_not_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Row(f"row{number}", lambda: "never") for number in range(3)]
    assert gpu_report.main(["-o", str(tmp_path / "out.json")], rows, seconds=0.0) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all("not run" in line and "no time left of 0 s" in line for line in lines[:-1])
    assert lines[-1].startswith("0 ok, 0 failed or missed, 0 cannot run, 3 not run; ")


def test_the_exit_status_is_at_most_100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(f"row{number}", lambda: "never") for number in range(130)]
    fails = lambda row, seconds, extra, **_: Outcome(row.name, "failed", "")  # noqa: E731
    monkeypatch.setattr(gpu_report, "run_row", fails)
    assert gpu_report.main(["-o", str(tmp_path / "out.json")], rows) == 100


def test_what_the_first_row_finds_decides_the_others() -> None:
    ran: list[str] = []

    def run(row: Row, seconds: float, extra: object) -> Outcome:
        ran.append(row.name)
        found = {"nccl": 22809, "torch_cuda": "torch 2.13.0+cpu is built without CUDA"}
        return Outcome(row.name, "ok", "", figures=found if row.name == "device" else {})

    libraries = frozenset(gpu_report.LIBRARIES)
    outcomes = gpu_report.report(
        [row for row in ROWS if row.listed], Facts("", 1, libraries), tell=lambda _: None, run=run
    )
    reasons = {one.name: one.text for one in outcomes if one.verdict == "cannot run"}
    assert "NCCL 22809 puts one rank on a GPU" in reasons["nccl-2/graphs"]
    assert reasons["nccl-each/graphs"] == "one GPU only"
    assert reasons["torch/lars-lamb"] == "torch shows no GPU: torch 2.13.0+cpu is built without CUDA"
    assert "compute-sanitizer is not on the PATH" in reasons["sanitizer/memcheck"]
    assert {"nccl-1/messages", "kernels/joins"} <= set(ran)


def test_a_row_whose_needs_are_unknown_is_tried() -> None:
    """A first row that has crashed tells nothing, and nothing may hide behind that."""
    ran: list[str] = []

    def run(row: Row, seconds: float, extra: object) -> Outcome:
        ran.append(row.name)
        return Outcome(row.name, "failed", "")

    rows = [row for row in ROWS if row.listed]
    tools = dict.fromkeys(("compute-sanitizer", "nvidia-cuda-mps-control"), "/bin/false")
    facts = Facts("", 2, frozenset(gpu_report.LIBRARIES), tools)
    gpu_report.report(rows, facts, tell=lambda _: None, run=run)
    assert ran == [row.name for row in rows]


def test_a_result_is_no_result_where_its_process_dies_or_it_cannot_be_read() -> None:
    result = f"{gpu_report.RESULT}" + '{"verdict": "ok", "text": "fine", "figures": {}}'
    assert judged("row", 0, result, 1.0, 9.0).verdict == "ok"
    assert judged("row", -11, result, 1.0, 9.0).verdict == "failed"
    assert judged("row", 0, result[:-3], 1.0, 9.0).verdict == "failed"
    assert judged("row", None, result, 9.0, 9.0).verdict == "failed"


def test_the_service_that_shares_a_gpu_is_started_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = tmp_path / "control"
    control.write_text(f'#!/bin/sh\necho "$* $(cat) $CUDA_VISIBLE_DEVICES" >> {tmp_path}/told\n')
    control.chmod(0o755)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    with shared_gpu(str(control)) as extra:
        assert Path(extra["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
        assert extra["CUDA_VISIBLE_DEVICES"] == "0", "the service numbers what it was shown"
    assert not Path(extra["CUDA_MPS_PIPE_DIRECTORY"]).exists()
    assert [line.split() for line in (tmp_path / "told").read_text().splitlines()] == [
        ["-d", "3"],
        ["quit", "3"],
    ]
    with shared_gpu("/bin/false") as extra:
        assert extra == {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    with shared_gpu(None) as extra:
        assert extra == {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}


# ---- what rows run, on the stand-ins


@pytest.fixture
def cupy(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return install_selection(monkeypatch, machine)[0]


@pytest.mark.thorough
def test_the_rows_on_kernels_hold_on_the_stand_in(cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very rows, with some of the dtypes; the kernels run on this processor."""
    assert len(gpu_checks.kernel_cases()) == 65
    monkeypatch.setattr(kernel_data, "EVERY_CASE", kernel_data.EVERY_CASE[::12])
    assert gpu_kernel_rows.joins().startswith("46 kernels")
    monkeypatch.setattr(gpu_checks, "averaged_dtypes", lambda: ["bfloat16", "int16", "complex64"])
    assert gpu_kernel_rows.averages_and_copies() == "3 averages by 2, 3, 7 and 200; 5 copies"


@pytest.mark.thorough
def test_a_kernel_that_errs_in_one_bit_or_writes_beside_its_array_is_found(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = cupy.cuda.function.Module.get_function

    def flip(address: int) -> None:
        ctypes.c_ubyte.from_address(address).value ^= 1

    for behind, text in ((False, "1 float32 by 2"), (True, "written behind the result")):

        def get_function(module: Any, name: str, behind: bool = behind) -> Any:
            right = load(module, name)

            def call(grid: Any, block: Any, arguments: Any) -> None:
                right(grid, block, arguments)
                address = arguments[0].data.ptr + behind * arguments[0].nbytes
                cupy.cuda.get_current_stream().do(lambda: flip(address))

            return call

        with monkeypatch.context() as patch:
            patch.setattr(cupy.cuda.function.Module, "get_function", get_function)
            with pytest.raises(AssertionError, match=text):
                gpu_checks.check_averages(cupy, "float32", (1,))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_checks_of_selection_hold_on_the_stand_in(cupy: ModuleType, dtype: str) -> None:
    gpu_checks.check_topk(cupy, "special", dtype, [(5001, (0, 1, 70, 5001))])
    gpu_checks.check_repeated_topk(cupy, dtype, 5000, 2)
    if dtype in ("float32", "float64"):
        gpu_checks.check_feed(cupy, dtype, 5003, 50)


@pytest.mark.thorough
def test_the_checks_of_refusals_messages_and_residuals_hold_on_the_stand_in(cupy: ModuleType) -> None:
    gpu_checks.check_nan_in_topk(cupy, 20001)
    gpu_checks.check_nan_in_feedback(cupy, 0.5, 6003)
    gpu_checks.check_messages(cupy, "float32", "int64", 3001)
    gpu_checks.check_indices_outside(cupy)
    gpu_exchange_checks.check_nan_in_sparse(cupy, 701)


def test_a_check_that_expects_a_refusal_fails_without_it() -> None:
    with pytest.raises(AssertionError, match="no UsageError that says 'NaN'"):
        gpu_checks.refuses("NaN", lambda: None)


@pytest.mark.thorough
def test_the_rows_of_all_ranks_on_one_gpu_hold_on_the_stand_in(cupy: ModuleType) -> None:
    assert gpu_kernel_rows.operations().startswith(f"{len(gpu_exchange_checks.OPERATIONS)} dtypes")
    for graphs in (True, False):
        gpu_exchange_checks.check_loopback(cupy, "binary", "allreduce", graphs=graphs, counts=(0, 7, 10003))
    gpu_exchange_checks.check_background(cupy, 1000, 5)
    gpu_exchange_checks.check_out_of_other_streams(cupy, 1000)
    assert gpu_kernel_rows.shrunk().startswith("4 ranks, 3, 2 and 1")


@pytest.mark.thorough
def test_the_row_of_bfloat16_holds_on_the_stand_in(cupy: ModuleType) -> None:
    pytest.importorskip("ml_dtypes", reason="numpy has no bfloat16 of its own")
    assert gpu_kernel_rows.bfloat16().startswith("sum, avg")


@pytest.mark.thorough
def test_a_rank_that_sends_to_itself_holds_on_the_stand_in(cupy: Any) -> None:
    nccl = find_library()
    gpu_exchange_checks.check_messages_to_itself(cupy, nccl, (1, 16, 3001))
    assert gpu_exchange_checks.check_abort_beside_a_graph(cupy, nccl) < 5
    assert gpu_exchange_checks.check_close_behind_a_graph(cupy, nccl) < 4


@pytest.fixture
def measured(machine: Machine, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in with a clock that stands still at a millisecond a call, 1 GB/s of memory, and small arrays."""
    more = {
        "getDeviceProperties": lambda device: {
            "name": b"Stand-in",
            "major": 8,
            "minor": 0,
            "totalGlobalMem": 2**34,
        },
        "driverGetVersion": lambda: 13020,
        "runtimeGetVersion": lambda: 12090,
        "deviceGetAttribute": lambda number, device: {36: 62_500, 37: 64}.get(number, 0),
    }
    for name, value in more.items():
        monkeypatch.setattr(cupy.cuda.runtime, name, value, raising=False)
    monkeypatch.setattr(cupy.cuda, "get_elapsed_time", lambda one, other: 1.0, raising=False)
    monkeypatch.setattr(cupy.cuda.Device, "synchronize", lambda device: machine.advance(), raising=False)
    monkeypatch.setattr(bench, "CHUNK", 1 << 12)
    return cupy


@pytest.mark.thorough
def test_the_row_of_the_device_tells_what_the_others_are_decided_by(measured: Any) -> None:
    found = gpu_rows.device()
    assert found["text"].startswith(
        "1 x Stand-in, compute capability 8.0, 16 GiB at 1 GB/s\ndriver for CUDA 13.2"
    )
    assert (found["nccl"], found["nccl_path"]) == (23003, "/fake/libnccl.so.2")
    json.dumps(found)


@pytest.mark.thorough
def test_the_rows_that_measure_tell_shares_and_miss_goals_on_the_stand_in(
    measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 KB in a millisecond are 0.016 GB/s: read and written once that is 3 % of the memory's, and so in two reads."""
    monkeypatch.setattr(bench, "BYTES", 1 << 14)
    for row in (
        gpu_kernel_rows.join_bandwidth,
        gpu_kernel_rows.average_bandwidth,
        gpu_kernel_rows.select_bandwidth,
        gpu_kernel_rows.feedback_bandwidth,
    ):
        with pytest.raises(Missed, match=r"goal [86]0%; .*\n.*: 0 GB/s, [3-8]% of 1"):
            row()
    monkeypatch.setattr(bench, "BYTES", 1 << 19)
    found = gpu_kernel_rows.average_bandwidth()
    assert found["float32"] == pytest.approx(2 * 2**19 / 1e-3 / 1e9)


@pytest.mark.thorough
def test_the_row_of_messages_compares_alignments_on_the_stand_in(measured: Any) -> None:
    assert "64 MB at 67 GB/s, behind 4 bytes at 67 GB/s" in gpu_rank_rows.messages_to_itself()


@pytest.mark.thorough
def test_ranks_of_nccl_hold_what_their_tasks_check_on_the_stand_in(
    machine: Machine, cupy: ModuleType, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.gpus = 2
    # NCCL's own allreduce has no stand-in
    monkeypatch.setattr(nccl_rank, "_rival", lambda cupy, comm, rank: nullcontext(comm.all_reduce))

    def task(comm: Communicator, rank: int) -> None:
        nccl_rank.check(comm, rank, (0, 7, 3001))
        nccl_rank.sparse(comm, rank, 701)
        nccl_rank.allreduce(comm, rank, 5000)
        nccl_rank.refuse(comm, rank)
        nccl_rank.close(comm, rank)

    outcome(on_every_rank(cupy, forest_plan(2, "allreduce", "star"), task))
    text = capfd.readouterr().out
    for name in ("check", "sparse"):
        assert gpu_rank_rows.said(text, name) == {0: "ok", 1: "ok"}
    assert gpu_rank_rows.seconds_of(text, "refuse", range(2), 10.0) < 10
    assert gpu_rank_rows.seconds_of(text, "close", range(2), 4.0) < 4
    assert "times ncclAllReduce's" in gpu_rank_rows.said(text, "allreduce")[0]


@pytest.mark.thorough
@pytest.mark.parametrize("task", ["shrink", "leave"])
def test_ranks_of_nccl_that_go_on_hold_what_their_tasks_check_on_the_stand_in(
    machine: Machine,
    cupy: ModuleType,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    task: str,
) -> None:
    machine.gpus = 3

    class Killed(Exception):
        pass

    def killed() -> None:
        raise Killed

    monkeypatch.setattr(nccl_rank, "killed", killed)
    monkeypatch.setattr(nccl_rank, "AFTERWARDS", (0, 7, 3001))

    def work(comm: Communicator, rank: int) -> None:
        nccl_rank.say(f"rank {rank}: engine: {comm.engine}")
        nccl_rank.TASKS[task](comm, rank)
        nccl_rank.close(comm, rank)

    found = on_every_rank(cupy, topoplan.plan(topoplan.load("dgx-1v"), gpus=range(3)), work)
    assert found[:2] == [None, None]
    assert isinstance(found[2], Killed) == (task == "shrink")
    text = capfd.readouterr().out
    monkeypatch.setattr(nccl_rank, "start", lambda *_, **__: (task == "leave", text))
    told = gpu_rank_rows.going_on(3, task, shared=False)
    assert re.match(r"[\d.]+ s by ncclCommShrink, .*; epoch 1: without rank 2: 2 ranks", told["text"])
    assert ("epoch 2: with rank 2 again" in told["text"]) == (task == "leave")


def test_ranks_that_are_slow_or_silent_fail_their_row() -> None:
    text = "rank 0: die: raised after 11.5 s: rank 1 is gone\nrank 0: close: 0.1 s\n"
    with pytest.raises(AssertionError, match=r"die takes 11\.5 s, and may take 10"):
        gpu_rank_rows.seconds_of(text, "die", [0], 10.0)
    with pytest.raises(AssertionError, match=r"ranks \[2\] have not got through close: .*close: 0\.1 s"):
        gpu_rank_rows.seconds_of(text, "close", [0, 2], 4.0)


DUPLICATE = "NcclFailed: invalid usage\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000\n"
LACKING = "AttributeError: module 'cupy.cuda' has no attribute 'nccl'\n"


@pytest.mark.parametrize(
    ("text", "shared", "error", "message"),
    [
        (LACKING, True, AssertionError, "has no attribute 'nccl'"),
        (f"BackendError: NCCL refuses: {LACKING}", True, AssertionError, "has no attribute 'nccl'"),
        ("", True, AssertionError, "nothing was printed"),
        ("killed: it took too long\n", True, AssertionError, "took too long"),
        (DUPLICATE, True, CannotRun, "NCCL does not run 2 ranks on this GPU: Duplicate GPU detected"),
        (DUPLICATE, False, AssertionError, "Duplicate GPU"),
    ],
)
def test_only_what_nccl_itself_refuses_cannot_run(
    monkeypatch: pytest.MonkeyPatch, text: str, shared: bool, error: type[Exception], message: str
) -> None:
    monkeypatch.setattr(nccl_rank, "start", lambda *_, **__: (False, text))
    with pytest.raises(error, match=message):
        gpu_rank_rows.collectives_of(2, shared=shared)


def test_a_row_fails_on_another_engine_than_its_own() -> None:
    text = "rank 0: engine: windows over ipc (NCCL has no windows)\n"
    assert gpu_rank_rows.engine_of(text, "ipc").startswith("windows over ipc")
    with pytest.raises(AssertionError, match=r"the engine is windows over ipc .*, and the row is on windows"):
        gpu_rank_rows.engine_of(text, "windows")
    with pytest.raises(AssertionError, match="no rank has printed its engine"):
        gpu_rank_rows.engine_of("Segmentation fault\n", "windows")


def test_the_calls_of_ncclallreduce_are_those_of_the_genuine_package() -> None:
    bindings = pytest.importorskip("nccl.bindings.nccl", reason="nccl4py is not installed")
    core = pytest.importorskip("nccl.core", reason="nccl4py is not installed")
    words = re.findall(r"(\w+)[,)]", str(bindings.all_reduce.__doc__))
    assert words[:7] == ["sendbuff", "recvbuff", "count", "datatype", "op", "comm", "stream"]
    assert [int(one) for one in (core.INT32, core.FLOAT32, core.SUM)] == [2, 7, 0]


def test_what_the_rows_use_of_cupy_is_in_the_genuine_one() -> None:
    """CuPy is imported by another process, since this one may hold a stand-in."""
    names = (
        "cuda.runtime.deviceGetAttribute cuda.runtime.getDeviceProperties cuda.runtime.driverGetVersion "
        "cuda.runtime.runtimeGetVersion cuda.runtime.memGetInfo cuda.set_allocator cuda.get_elapsed_time from_dlpack "
        "get_default_memory_pool empty zeros asarray cuda.Stream.begin_capture cuda.Stream.end_capture"
    )
    code = (
        "import sys\ntry:\n    import cupy\nexcept ImportError:\n    sys.exit('no CuPy')\n"
        "from operator import attrgetter\n"
        f"for name in {names!r}.split():\n    attrgetter(name)(cupy)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    if done.stderr.strip() == "no CuPy":
        pytest.skip("CuPy is not installed")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_tests_marked_gpu_are_collected_where_libraries_of_others_are_missing(tmp_path: Path) -> None:
    """As on a machine that has CuPy, NumPy, SciPy and pytest, and neither pip nor a network."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name in ('nbformat', 'nbclient', 'xdist', 'ml_dtypes', 'mpi4py', 'nccl'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing)\n"
    )
    places = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests"]
    surroundings = environment(PYTHONPATH=places, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    done = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"^\d+ skipped, \d+ deselected", done.stdout.splitlines()[-1]), done.stdout[-3000:]


# ---- figures


def cupy_with_memory(clock: int, bits: int) -> Any:
    attributes = {36: clock, 37: bits}
    runtime = SimpleNamespace(deviceGetAttribute=lambda number, device: attributes[number])
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))


def test_shares_are_of_the_memorys_clock_and_width_and_one_below_the_goal_is_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_kernel_rows.bench, "copy_bandwidth", lambda cupy: 1300.0)
    a100 = cupy_with_memory(1_215_000, 5120)
    assert gpu_kernel_rows.memory_peak(a100) == pytest.approx(1555.2)
    found = gpu_kernel_rows.shares(a100, 0.8, {"sum": 1400.0})
    assert found["text"] == "goal 80%; a copy by CUDA takes 1300 GB/s\nsum: 1400 GB/s, 90% of 1555"
    with pytest.raises(Missed, match="max: 1200 GB/s, 77% of 1555"):
        gpu_kernel_rows.shares(a100, 0.8, {"sum": 1400.0, "max": 1200.0})
    with pytest.raises(CannotRun, match=r"does not tell the memory's clock and width; sum 1400 GB/s"):
        gpu_kernel_rows.shares(cupy_with_memory(0, 5120), 0.8, {"sum": 1400.0})


@pytest.mark.thorough
def test_lars_and_lamb_on_a_device_are_compared_with_the_processor() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    assert gpu_rank_rows.lars_lamb("cpu").startswith("6 steps of both")


def test_every_row_on_torch_names_checks_that_exist() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    checks = pytest.importorskip(
        "tests.jobs.test_torch_gpu", reason="there are no checks of torch on a GPU"
    ).CHECKS
    patterns = [row.run.args for row in ROWS if getattr(row.run, "func", None) is gpu_rank_rows.torch_checks]  # type: ignore[attr-defined]
    assert patterns
    named = {
        name
        for several in patterns
        for name in checks
        for pattern in several
        if re.fullmatch(pattern.replace("*", ".*"), name)
    }
    assert named == set(checks)


def test_lines_of_a_benchmarks_ranks_that_are_no_figures_are_passed_over() -> None:
    """What ranks and libraries print beside them ended the benchmark."""
    text = "UserWarning: CuPy may not function correctly\n1 0.00125\nNCCL version 2.30.7\n256 1.5e-02\n"
    assert bench.timings(text) == [(1, 0.00125), (256, 0.015)]
    assert bench.timings("") == []
    assert [gpu_report.last_line(one) for one in ("a\nb\n\n", "")] == ["b", "nothing was printed"]


def test_a_rival_that_fails_is_told_by_its_error() -> None:
    class OutOfMemoryError(Exception):
        pass

    def no_kernel() -> None:
        raise RuntimeError("CUDA error: no kernel image is available\nfor execution on the device")

    def too_large() -> None:
        raise OutOfMemoryError

    cupy = SimpleNamespace(
        cuda=SimpleNamespace(
            Device=lambda: SimpleNamespace(synchronize=lambda: None),
            Stream=lambda non_blocking: pytest.MonkeyPatch.context(),
        )
    )
    assert rival_seconds(cupy, no_kernel) == (
        "failed: RuntimeError: CUDA error: no kernel image is available for execution on the device"
    )
    assert rival_seconds(cupy, too_large) == "has no memory"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("gpus", "rows"),
    [
        pytest.param("1", "windows-1/region,windows-1/missing,nccl-2/steps", marks=pytest.mark.slow),
        ("2", "windows-each/queue"),
    ],
)
def test_rows_hold_on_the_stand_ins(tmp_path: Path, gpus: str, rows: str) -> None:
    """Each row in a process of its own, as on a GPU: a row that calls the back end wrongly fails here first."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.support.stand_in_rows",
            "--gpus",
            gpus,
            "--rows",
            rows,
            "-o",
            str(tmp_path / "out.json"),
        ],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{2 + rows.count(',')} ok, 0 failed or missed, 0 cannot run" in done.stdout

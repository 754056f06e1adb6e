"""``topoplan bench`` on paced links and on real processes, which it starts itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

import topoplan
from tests.support.checkout import ROOT, Done
from topoplan.plans.plan import COLLECTIVES, collective_name

TELLING = ("mpi", "shared", "tcp", "torch")
"""Back ends that tell their steps on one host, where torch uses shared memory."""

BENCH = [sys.executable, "-m", "topoplan", "bench"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    path.write_text(topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[4, 5, 7]).to_json())
    return path


def bench(*words: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*BENCH, *map(str, words)],
        env=ENVIRONMENT,
        input=stdin or "",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done


def needs(backend: str) -> None:
    module = {"mpi": "mpi4py", "torch": "torch"}.get(backend)
    if module is not None and find_spec(module) is None:
        pytest.skip(f"{module} is not installed")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "backend", ["tcp", *(pytest.param(one, marks=pytest.mark.slow) for one in ("mpi", "torch"))]
)
def test_the_ring_and_the_librarys_own_allreduce_run_on_the_same_processes(
    backend: str, plan_path: Path
) -> None:
    """Three tables, or two where there is no library; nothing wrong in any."""
    needs(backend)
    done = bench(plan_path, "--backend", backend, "--sizes", "1000,64KB", "--rivals", "--json")
    rows = json.loads(done.stdout)["rows"]
    assert len({row["schedule"] for row in rows}) == (2 if backend == "tcp" else 3)
    assert {row["wrong"] for row in rows} == {0}
    assert [row["size"] for row in rows if row["schedule"] == "plan"] == [1000, 65536]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "backend",
    ["shared", *(pytest.param(one, marks=pytest.mark.slow) for one in ("loopback", "tcp", "mpi", "torch"))],
)
def test_every_back_end_adds_up_bfloat16(backend: str, plan_path: Path) -> None:
    """Between processes of one host too, which `shared` runs without MPI or torch."""
    needs(backend)
    done = bench(plan_path, "--backend", backend, "--sizes", "64KB", "--dtype", "bfloat16", "--json")
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["type"], row["count"], row["wrong"]) == ("bfloat16", 32768, 0)


@pytest.mark.parametrize("dtype", ["bool", "complex64", "uint16"])
def test_dtypes_that_are_only_moved_can_be_benched(done: Done, dtype: str) -> None:
    plan = topoplan.plan(topoplan.load("dgx-1v"), "broadcast", gpus=[0, 1])
    out = done("bench", "-", "--sizes", "4KB", "--dtype", dtype, "--json", stdin=plan.to_json())
    assert json.loads(out)["rows"][0]["wrong"] == 0


def test_bfloat16_without_its_package_is_one_line_that_says_what_to_install(plan_path: Path) -> None:
    code = "import sys; sys.modules['ml_dtypes'] = None; from topoplan.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["bench", str(plan_path), "--backend", "tcp", "--sizes", "4KB", "--dtype", "bfloat16"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert 'ml_dtypes: pip install "topoplan[bfloat16]"' in line


@pytest.mark.thorough
@pytest.mark.parametrize(
    "collective",
    [
        pytest.param(one, marks=[pytest.mark.slow] * (one != "reduce_scatter"))
        for one in COLLECTIVES
        if one != "allreduce"
    ],
)
def test_every_collective_runs_on_processes(collective: str) -> None:
    """The plan comes from stdin and is handed on to the processes; rank 0 alone prints."""
    plan = topoplan.plan(topoplan.load("dgx-1v"), collective, gpus=[0, 1])
    done = bench("-", "--backend", "tcp", "--sizes", "4KB", "--dtype", "int32", stdin=plan.to_json())
    lines = done.stdout.splitlines()
    assert lines[0] == f"# {collective_name(collective)} of 2 ranks, tcp, median of 5"
    assert lines[3].split()[-1] == "0"
    assert len([line for line in lines if line.startswith("#")]) == 3


@pytest.mark.thorough
def test_paced_links_stand_beside_the_model(plan_path: Path, tmp_path: Path) -> None:
    """A collective on links at a thousandth takes no less than the model's bandwidth term; its trace holds both."""
    trace = tmp_path / "trace.json"
    done = bench(plan_path, "--paced", "--scale", "1e-3", "--sizes", "4MB", "--json", "--trace", trace)
    (row,) = json.loads(done.stdout)["rows"]
    plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[4, 5, 7])
    assert row["time"] > 0.9 * row["size"] / (plan.rate * 1e9 * 1e-3) * 1e6
    assert row["model"] == pytest.approx(row["size"] / (plan.rate * 1e9 * 1e-3) * 1e6, rel=0.1)
    boxes = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    calls = [box["dur"] for box in boxes if box["pid"] == 1]
    ends = [box["ts"] + box["dur"] for box in boxes if box["pid"] == 0]
    assert len(calls) == 5
    assert min(calls) > 0.9 * row["model"]
    assert max(ends) == pytest.approx(row["model"], rel=0.1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "backend", ["tcp", *(pytest.param(one, marks=pytest.mark.slow) for one in ("shared", "mpi"))]
)
def test_a_trace_shows_the_calls_of_all_ranks_on_one_clock(
    backend: str, plan_path: Path, tmp_path: Path
) -> None:
    """No rank ends a call of a sum before every other one has begun it."""
    needs(backend)
    trace = tmp_path / "trace.json"
    done = bench(plan_path, "--backend", backend, "--sizes", "8,64KB", "--trace", trace)
    assert done.stdout.splitlines()[-1] == f"written: {trace}"
    boxes = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    calls = [box for box in boxes if box["cat"] == "call"]
    assert sorted((box["tid"], box["name"]) for box in calls) == [
        (rank, f"call {call}") for rank in range(3) for call in range(5)
    ]
    assert (len(boxes) > len(calls)) == (backend in TELLING)
    for call in range(5):
        of_one = [box for box in calls if box["name"] == f"call {call}"]
        assert max(box["ts"] for box in of_one) <= min(box["ts"] + box["dur"] for box in of_one)


@pytest.mark.slow
def test_chunk_sizes_that_were_found_are_kept(plan_path: Path, tmp_path: Path) -> None:
    kept = tmp_path / "chunks.json"
    for _ in range(2):
        bench(plan_path, "--backend", "tcp", "--sizes", "1MB", "--chunk-file", kept)
        found = json.loads(kept.read_text())
        assert found["format"] == "topoplan.chunks/1"
        assert [(one["backend"], one["bytes"]) for one in found["sizes"]] == [("tcp", 1 << 20)]


def test_pacing_belongs_to_loopback_and_tcp(refused: Done, plan_path: Path) -> None:
    needs("mpi")
    line = refused("bench", str(plan_path), "--backend", "mpi", "--paced")
    assert all(word in line for word in ("mpi", "paced", "loopback or tcp"))


@pytest.mark.thorough
def test_a_world_of_another_size_is_refused_on_every_rank(plan_path: Path) -> None:
    """Two processes of a launcher, and a plan for three: each says so, and none waits."""
    script = (
        "import sys; from collectives.communicator.launch import launch_local; "
        f"sys.exit(launch_local([sys.executable, '-m', 'topoplan', 'bench', {str(plan_path)!r}, "
        "'--backend', 'tcp', '--sizes', '1KB'], 2))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.count("the plan is for 3 ranks and the tcp back end has 2") == 2


@pytest.mark.thorough
def test_killing_a_rank_ends_the_others_with_one_line_each(plan_path: Path, tmp_path: Path) -> None:
    """The survivors name themselves, the killed rank and the step; the command fails and leaves no process."""
    paced = ["--sizes", "16MB", "--chunk", "64KB", "--paced", "--scale", "1.25e-4"]
    command = [*BENCH, str(plan_path), "--backend", "tcp", *paced]
    said = tmp_path / "said"  # each of the calls takes seconds on paced links, and rank 0 tells its end
    with said.open("w") as file:
        parent = subprocess.Popen(command, env=ENVIRONMENT | {"TOPOPLAN_DEBUG": "1"}, stderr=file)
    while "bytes=16777216" not in said.read_text():
        assert parent.poll() is None
        time.sleep(0.05)
    ranks = children(parent.pid)
    time.sleep(0.5)
    os.kill(ranks[1], signal.SIGKILL)
    assert parent.wait(timeout=60) == 128 + signal.SIGKILL
    errors = said.read_text()
    lines = [line for line in errors.splitlines() if line.startswith("topoplan bench: error")]
    assert len(lines) == 2, errors
    assert all("peer 1" in line and "step" in line for line in lines), errors
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def children(parent: int) -> list[int]:
    """Processes that a process has started, in their order."""
    path = Path(f"/proc/{parent}/task/{parent}/children")
    if not path.exists():
        pytest.skip("this system does not list a process's children")
    return [int(number) for number in path.read_text().split()]

"""Starting local ranks: their environment, their output, and that none is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path

import pytest

from collectives.communicator.launch import launch_local, local_ranks, reserved_port
from tests.support.hand_plans import forest_plan
from topoplan.cli.main import RANK_VARIABLES, main
from topoplan.errors import UsageError
from topoplan.interrupts import raise_if_interrupted

PRINT_PLACE = """
import os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TOPOPLAN_RENDEZVOUS", "EXTRA")
print(*(os.environ[name] for name in names))
"""

ADD_UP = """
import sys
import numpy as np, topoplan
from collectives import Communicator
plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[0, 1, 2])
with Communicator(plan, "tcp") as comm:
    total = comm.all_reduce(np.arange(3) + comm.ranks[0]).tolist()
    sys.stdout.write(f"{comm.ranks[0]} {total}\\n")  # in one piece: the ranks share the output
"""

WRITE_PIDS = """
import os, pathlib, signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"])
folder = pathlib.Path(sys.argv[1])
(folder / os.environ["RANK"]).write_text(f"{os.getpid()} {child.pid}")
while sum(path.stat().st_size > 0 for path in folder.iterdir()) < 3:
    time.sleep(0.01)
"""

AFTERWARDS = {
    "ends": "",
    "waits": "time.sleep(1000)",
    "fails": "time.sleep(0.2); sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(1000)",
    "ignores": "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(1000)",
    "stops": "sys.exit(5) if os.environ['RANK'] == '1' else os.kill(os.getpid(), signal.SIGSTOP)",
    "dies": "os.kill(os.getpid(), signal.SIGKILL) if os.environ['RANK'] == '1' else sys.exit(2)",
}


def pids(folder: Path) -> list[int]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = [int(text) for path in folder.iterdir() for text in path.read_text().split()]
        if len(found) == 6:
            return found
        time.sleep(0.02)
    raise AssertionError(f"the ranks do not start: {found}")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def all_end(numbers: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in numbers) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(alive(pid) for pid in numbers)


def test_every_process_learns_its_place(capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", PRINT_PLACE]
    assert launch_local(command, 3, environment={"EXTRA": "more"}) == 0
    lines = sorted(line.split() for line in capfd.readouterr().out.splitlines())
    assert [line[:4] for line in lines] == [[str(rank), "3", str(rank), "3"] for rank in range(3)]
    assert len({line[4] for line in lines}) == 1
    assert {line[5] for line in lines} == {"more"}


@pytest.mark.thorough
def test_a_tcp_job_runs(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch_local([sys.executable, "-c", ADD_UP], 3) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [f"{rank} [3, 6, 9]" for rank in range(3)]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("then", "status"), [("ends", 0), ("fails", 3), ("ignores", 7), ("stops", 5), ("dies", 128 + 9)]
)
def test_the_worst_status_is_returned_and_no_process_is_left(then: str, status: int, tmp_path: Path) -> None:
    program = WRITE_PIDS + AFTERWARDS[then]
    assert launch_local([sys.executable, "-c", program, str(tmp_path)], 3, grace=0.4) == status
    assert all_end(pids(tmp_path))


WAIT_FOR_EACH_OTHER = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / (os.environ["RANK"] + os.environ.get("AGAIN", ""))).touch()
while not (folder / "1 again").exists():
    time.sleep(0.01)
"""


def test_a_rank_that_is_lost_and_started_again_is_no_failure(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAIT_FOR_EACH_OTHER, str(tmp_path)]
    with local_ranks(command, 3) as ranks:
        deadline = time.monotonic() + 20
        while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        ranks.lose(1)
        assert not ranks.runs(1)
        ranks.start(1, environment={"AGAIN": " again"})
        assert ranks.wait() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "1 again", "2"]


LAUNCH = """
import sys
from collectives.communicator.launch import launch_local, reserved_port
launch_local([sys.executable, "-c", *sys.argv[1:]], 3)
"""


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(pytest.param(one, marks=pytest.mark.thorough) for one in (signal.SIGINT, signal.SIGTERM)),
    ],
)
def test_ranks_end_with_the_process_that_launched_them(number: signal.Signals, tmp_path: Path) -> None:
    program = WRITE_PIDS + AFTERWARDS["waits"]
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, program, str(tmp_path)], stderr=subprocess.DEVNULL
    )
    started = pids(tmp_path)
    ranks = [int(path.read_text().split()[0]) for path in tmp_path.iterdir()]
    launcher.send_signal(number)
    launcher.wait(20)
    try:
        assert all_end(started if number == signal.SIGINT else ranks)
    finally:
        for pid in set(started) - set(ranks):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=str)
@pytest.mark.parametrize("backend", ["tcp", "mpi"])
def test_a_terminated_command_ends_its_ranks(backend: str, number: signal.Signals, tmp_path: Path) -> None:
    if backend == "mpi":
        pytest.importorskip("mpi4py", reason="no mpi4py")
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("the signal is ignored here, as below nohup, and so by all that is started here")
    plan, folder = tmp_path / "plan.json", tmp_path / "temporary"
    plan.write_text(forest_plan(2, "allreduce", "chain").to_json())
    folder.mkdir()
    options = ["--backend", backend, "--sizes", ",".join(["16MB"] * 200)]
    command = [sys.executable, "-m", "topoplan", "bench", str(plan), *options]
    outer = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    told = subprocess.DEVNULL
    ran = subprocess.Popen(command, env={**outer, "TMPDIR": str(folder)}, stdout=told, stderr=told)
    deadline = time.monotonic() + 30
    while len(found := started_in(folder)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    ran.send_signal(number)
    assert ran.wait(60) == -number
    assert all_end(found)
    assert list(folder.iterdir()) == []


def test_a_signal_is_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So what it has started ends; a rank, which has started nothing, ends at once."""

    def end(given: list[str]) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it goes on")

    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    commands = import_module("topoplan.cli.main")
    monkeypatch.setattr(commands, "_run", lambda given, name, others: end(given))
    assert main(["list"]) == 128 + signal.SIGTERM
    assert "terminated" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    raise_if_interrupted()  # the signal was that command's: later waits of this process go on
    monkeypatch.setenv("RANK", "0")
    left = signal.SIG_DFL
    monkeypatch.setattr(commands, "_run", lambda *given: int(signal.getsignal(signal.SIGTERM) is not left))
    assert main(["list"]) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_an_interrupt_that_python_drops_ends_the_ranks_all_the_same(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a callback of an import, from which no exception comes out."""

    def lose(given: list[str], *_: object) -> int:
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        return launch_local(["sleep", "1000"], 2)

    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(import_module("topoplan.cli.main"), "_run", lose)
    assert main(["list"]) == 128 + number


def started_in(folder: Path) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"TMPDIR={folder}".encode() in (place / "environ").read_bytes():
                found.append(int(place.name))
    return found


def test_a_program_that_does_not_exist_and_no_processes_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot start /no/such/program: No such file"):
        launch_local(["/no/such/program"], 2)
    with pytest.raises(UsageError, match="0 processes cannot be started"):
        launch_local(["true"], 0)


def test_a_reserved_port_is_given_to_nobody_by_chance_and_a_server_may_listen_there() -> None:
    with reserved_port() as port:
        with ExitStack() as others:
            chance = [others.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(200)]
            assert port not in {int(one.getsockname()[1]) for one in chance}
        with pytest.raises(OSError, match="in use"), socket.socket() as careless:
            careless.bind(("127.0.0.1", port))
        for _ in range(2):
            with socket.create_server(("127.0.0.1", port)) as server:
                socket.create_connection(("127.0.0.1", port)).close()
                server.accept()[0].close()

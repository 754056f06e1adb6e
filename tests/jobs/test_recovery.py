"""Jobs of processes that lose ranks and go on: every element right, the same bits on all, nothing left over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import Communicator
from collectives.backends.execution import Execution
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.communicator import communicator
from collectives.communicator.launch import find_launcher, mpiexec_command
from collectives.lab.chaos_rank import backend_at
from collectives.peers.rendezvous import Rendezvous
from collectives.peers.rendezvous_client import RendezvousClient
from collectives.peers.rendezvous_state import Message, RendezvousState
from collectives.peers.tcp_control_plane import TcpControlPlane
from tests.faults.recovery import (
    DEATH,
    FEW,
    LIMIT_SECONDS,
    MANY,
    STEP_SECONDS,
    STOPPED_SECONDS,
    Round,
    faults_of,
    one_round,
    plan_for,
)
from tests.support.checkout import ROOT
from tests.support.forking import forking
from tests.support.tcp_jobs import backends_in_threads, in_processes
from topoplan.errors import BackendError, UsageError

BEFORE = -1.0
"""Of a victim that dies between two collectives."""


def without_mpi() -> str:
    """What is missing to run MPI programs; empty where nothing is."""
    try:
        find_launcher()
    except UsageError as error:
        return str(error)
    return "" if find_spec("mpi4py") else "mpi4py is not installed"


needs_mpi = pytest.mark.skipif(bool(without_mpi()), reason=without_mpi() or "it is there")


def shared_memory() -> set[str]:
    """Return the names in the folder of shared memory, but for those of MPI, whose other jobs may run beside."""
    folder = Path("/dev/shm")
    names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    return {
        name for name in names if not name.startswith(("sm_segment", "vader_segment", "mpich_shm_", "psm"))
    }


@pytest.mark.parametrize("backend", ["tcp", "shared"])
@pytest.mark.parametrize(
    ("size", "within", "recovering", "alone", "elements"),
    [
        pytest.param(4, {0: BEFORE}, {}, True, FEW, marks=pytest.mark.thorough),
        pytest.param(5, {2: 0.001}, {}, True, MANY, marks=pytest.mark.thorough),
        pytest.param(4, {3: 0.003}, {}, False, MANY, marks=pytest.mark.slow),
        pytest.param(6, {0: 0.001, 4: 0.001}, {}, True, MANY, marks=pytest.mark.slow),
        pytest.param(5, {1: BEFORE, 3: BEFORE}, {}, False, FEW, marks=pytest.mark.slow),
        pytest.param(5, {2: BEFORE}, {0: 0}, True, MANY, marks=pytest.mark.thorough),
        pytest.param(5, {0: 0.001}, {3: 2}, False, MANY, marks=pytest.mark.slow),
        pytest.param(4, {0: BEFORE, 1: BEFORE, 2: BEFORE}, {}, True, MANY, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_others_go_on(
    backend: str, size: int, within: dict[int, float], recovering: dict[int, int], alone: bool, elements: int
) -> None:
    """Whoever dies, between and within collectives, two at once, and another while they find each other."""
    check(Round(backend, size, within, recovering, alone, elements))


def check(what: Round) -> dict[int, dict[str, Any]]:
    """What the survivors of a round report, in which all is as it should be."""
    plan, before = plan_for(what.size), shared_memory()
    reports, died = one_round(plan, what)
    assert died
    assert faults_of(plan, what, reports) == []
    if not what.backend.startswith("mpi"):  # of which the names of the job's own are looked for
        assert shared_memory() <= before
    if what.alone and what.within and max(what.within.values()) < 0:
        # The collective before which they died was repeated. A rank that had not begun it when the others recovered
        # runs it once, without the failed ranks, and repeats nothing.
        told = [report["repeated"] for report in reports.values() if report["repeated"]]
        assert told
        assert all(one[0][0] == DEATH and set(one[-1][1]) >= set(what.within) for one in told), told
    return reports


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tcp", "shared", pytest.param("mpi", marks=needs_mpi)])
def test_the_others_go_on_without_a_rank_that_is_stopped(backend: str) -> None:
    """They wait for it as long as for any rank, and mpiexec does not wait for it in the end."""
    check(Round(backend, 4, {2: BEFORE}, number=signal.SIGSTOP, timeout=STOPPED_SECONDS))


@needs_mpi
@pytest.mark.parametrize(
    ("backend", "size", "within", "recovering", "alone"),
    [
        pytest.param("mpi", 4, {0: 0.001}, {}, True, marks=pytest.mark.slow),
        pytest.param("mpi", 5, {1: BEFORE, 3: BEFORE}, {}, False, marks=pytest.mark.slow),
        pytest.param("mpi hosts", 4, {1: BEFORE}, {}, True, marks=pytest.mark.thorough),
        pytest.param("mpi hosts", 5, {0: 0.001, 4: 0.001}, {}, True, marks=pytest.mark.slow),
        pytest.param("mpi hosts", 5, {3: 0.003}, {1: 2}, False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_survivors_of_mpi(
    backend: str, size: int, within: dict[int, float], recovering: dict[int, int], alone: bool
) -> None:
    """On one host they share memory from then on, on two they have connections, and MPI's launcher ends by itself."""
    reports = check(Round(backend, size, within, recovering, alone))
    over = "shared" if backend == "mpi" else "tcp"
    assert all(report["notes"][-1].endswith(f"; over {over}, before mpi") for report in reports.values())


@needs_mpi
@pytest.mark.parametrize(
    ("size", "within", "recovering", "alone"),
    [
        pytest.param(4, {1: BEFORE}, {}, True, marks=pytest.mark.thorough),
        pytest.param(5, {0: 0.001, 4: 0.001}, {}, True, marks=pytest.mark.slow),
        pytest.param(5, {2: BEFORE}, {0: 3}, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_survivors_of_ulfm(
    size: int, within: dict[int, float], recovering: dict[int, int], alone: bool
) -> None:
    if "--continuous" not in mpiexec_command(1):
        pytest.skip("only Open MPI tolerates faults")
    reports = check(Round("mpi ulfm", size, within, recovering, alone))
    if not recovering:
        assert {report["backend"] for report in reports.values()} == {"mpi"}


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize(("end", "status"), [("sys.exit(3)", 3), ("1 / 0", 1), ("", 0)])
def test_a_survivor_ends_with_its_own_status(end: str, status: int, tmp_path: Path) -> None:
    """MPI is not shut down, for which it would wait for the rank that is gone; what is printed last is seen."""
    program = tmp_path / "program.py"
    program.write_text(LOSES_A_RANK.format(folder=str(tmp_path), end=end))
    done = subprocess.run(
        mpiexec_command(3, [sys.executable, str(program)]),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    told = [(tmp_path / f"{rank}").read_text() for rank in (0, 2)]
    assert told == ["9.0 shared"] * 2, done.stderr
    assert done.stdout.count("the last word") == 2
    if "--continuous" in mpiexec_command(1):
        assert done.returncode == status
    else:  # MPICH's launcher returns the statuses of all ranks at once, that of the killed one too
        assert done.returncode == 137 | status


LOSES_A_RANK = """
import os, signal, sys
import numpy as np
import topoplan
from collectives import Communicator

plan = topoplan.plan("dgx-1v", gpus=[0, 1, 2])
comm = Communicator(plan, "mpi", on_failure="shrink")
comm.all_reduce(np.ones(3))
number = comm.rank
if number == 1:
    os.kill(os.getpid(), signal.SIGKILL)
total = comm.all_reduce(np.full(3, 4.5))
with open(os.path.join({folder!r}, str(number)), "w") as file:
    file.write(f"{{total[0]}} {{comm.backend}}")
comm.close()
print("the last word")
{end}
"""


def told_by(survivors: Sequence[int], body: Callable[..., None], size: int, *given: Any) -> list[Any]:
    """What some ranks write into the folder, the second argument of the body behind the rank; each is a process."""
    context = forking()
    ranks = [context.Process(target=body, args=(rank, *given), daemon=True) for rank in range(size)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(LIMIT_SECONDS)
        one.kill()
    return [json.loads(Path(given[1], str(rank)).read_text()) for rank in survivors]


def leaves_at_once(rank: int, backend: str, folder: str, dies: float | None) -> None:
    """Rank 0 dies in the last collective: so many seconds after its beginning, or when it has told one rank that all
    have their results. The others leave as soon as they have theirs."""
    opened = backend_at(backend, rank, 4, meeting=f"unix:{folder}/meeting", timeout=STEP_SECONDS)
    comm = Communicator(plan_for(4), opened, on_failure="shrink")
    comm.all_reduce(np.ones(MANY))
    hand_over, say, told = Execution.hand_over, Rendezvous._say, list[object]()

    def say_once(meeting: Rendezvous, visitor: Any, message: Message) -> None:
        if told:
            os.kill(os.getpid(), signal.SIGKILL)
        if message["type"] == "agreed":
            told.append(visitor)
        say(meeting, visitor, message)

    def last(execution: Execution[Any]) -> None:
        Rendezvous._say = say_once  # type: ignore[method-assign]
        hand_over(execution)

    if rank == 0 and dies is None:
        Execution.hand_over = last  # type: ignore[method-assign]
    elif rank == 0:
        threading.Timer(dies or 0.0, os.kill, [os.getpid(), signal.SIGKILL]).start()
    handle = comm.all_reduce(np.full(MANY, 2.0**rank), async_op=True)
    found = handle.wait()
    Path(folder, str(rank)).write_text(json.dumps([found.min(), found.max(), handle.among]))
    comm.close()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "dies"),
    [("tcp", None), ("tcp", 0.001), ("tcp", 0.004), ("shared", 0.0005), ("shared", 0.002)],
)
def test_a_leaving_rank_is_not_dead(backend: str, dies: float | None, tmp_path: Path) -> None:
    """Whether it was repeated or not, all have the same sum: that of all ranks, or without the one that died."""
    told = told_by((1, 2, 3), leaves_at_once, 4, backend, str(tmp_path), dies)
    assert told[0] in ([15.0, 15.0, [0, 1, 2, 3]], [14.0, 14.0, [1, 2, 3]])
    assert told == [told[0]] * 3


def error_of(run: Callable[[], object]) -> str:
    """The class of the error of a call; empty without one."""
    try:
        run()
    except (BackendError, UsageError) as error:
        return type(error).__name__
    return ""


NEXT_CALLS: dict[str, Callable[[Communicator], object]] = {
    "divided": lambda comm: comm.all_reduce(np.ones(8) / comm.size),
    "prepared": lambda comm: comm.prepare("all_reduce", np.ones(8))(),
    "root": lambda comm: comm.broadcast(np.full(8, float(comm.rank)), root=2),
    "own root": lambda comm: comm.broadcast(np.full(8, float(comm.rank))),
    "lost root": lambda comm: comm.broadcast(np.ones(8), root=1),
    "out": lambda comm: comm.all_gather(np.ones(8), out=np.zeros(8 * comm.size)),
    "blocks": lambda comm: comm.reduce_scatter(np.ones(2 * 3 * comm.size)),
    "refused": lambda comm: comm.reduce_scatter(np.ones(4)),
    "counts": lambda comm: comm.all_to_all_v(np.ones(comm.size), [1] * comm.size),
    "texts": lambda comm: comm._gather_texts("text"),
    "grow": lambda comm: comm.grow(),
    "shrink": lambda comm: comm.shrink(without=[]),
}
"""Calls after a collective in which one rank alone learns of a failure."""


def learns_alone(rank: int, backend: str, folder: str, name: str, late: int) -> None:
    """Rank 1 dies once it has its result; rank `late` learns of that before its result is handed over, the other one
    in the next call."""
    opened = backend_at(backend, rank, 3, meeting=f"unix:{folder}/meeting", timeout=STEP_SECONDS)
    plan = plan_for(3)
    if name == "own root":
        plan = topoplan.plan(plan.topology, "broadcast", root=2)
    comm = Communicator(plan, opened, on_failure="shrink")
    comm.all_reduce(np.ones(8))
    hand_over = Execution.hand_over

    def and_learn(execution: Execution[Any]) -> None:
        Execution.hand_over = hand_over  # type: ignore[method-assign]
        hand_over(execution)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == late:
            raise BackendError("rank 1 has ended", rank=rank, peer=1)

    Execution.hand_over = and_learn  # type: ignore[method-assign]
    found = [comm.all_reduce(np.full(8, 1.0 + rank))[0]]
    before = [comm.size, comm.original_ranks, comm.original_ranks[comm.rank] == rank]
    error = error_of(lambda: found.append(NEXT_CALLS[name](comm)))
    ended = [f"{one}" for one in found]
    total = comm.all_reduce(np.full(8, 1.0 + rank))[0]
    after = [comm.size, comm.original_ranks, comm.original_ranks[comm.rank] == rank]
    Path(folder, str(rank)).write_text(json.dumps([before, error, ended, total, after]))
    comm.close()


@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.thorough), 2])
@pytest.mark.parametrize("backend", [pytest.param("tcp", marks=pytest.mark.thorough), "shared"])
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("divided", ""),
        pytest.param("prepared", "BackendError", marks=pytest.mark.thorough),
        pytest.param("root", "", marks=pytest.mark.thorough),
        ("own root", ""),
        ("lost root", "BackendError"),
        pytest.param("out", "BackendError", marks=pytest.mark.thorough),
        pytest.param("blocks", "", marks=pytest.mark.thorough),
        pytest.param("refused", "UsageError", marks=pytest.mark.thorough),
        pytest.param("counts", "BackendError", marks=pytest.mark.thorough),
        ("texts", "BackendError"),
        pytest.param("grow", "", marks=pytest.mark.thorough),
        pytest.param("shrink", "", marks=pytest.mark.thorough),
    ],
)
def test_ranks_are_numbered_alike_while_one_alone_knows_of_a_failure(
    name: str, error: str, backend: str, late: int, tmp_path: Path
) -> None:
    """A caller who divides by the size, or names a root, means the same on all ranks; nobody is a call apart."""
    told = told_by((0, 2), learns_alone, 3, backend, str(tmp_path), name, late)
    for before, raised, ended, total, after in told:
        assert before == [3, [0, 1, 2], True]
        assert raised == error
        assert ended[0] == "6.0"
        assert total == 4.0
        assert after == [2, [0, 2], True]
    assert name in ("blocks", "counts") or told[0][2] == told[1][2]
    if name == "divided":
        assert told[0][2][1] == f"{np.full(8, 2 / 3)}"
    if name in ("root", "own root"):
        assert told[0][2][1] == f"{np.full(8, 2.0)}"


def refuses_beside_a_death(rank: int, backend: str, folder: str) -> None:
    """Rank 2 dies in the call that rank 1 refuses."""
    opened = backend_at(backend, rank, 3, meeting=f"unix:{folder}/meeting", timeout=STEP_SECONDS)
    with Communicator(plan_for(3), opened, on_failure="shrink") as comm:
        comm.all_reduce(np.ones(MANY))
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        found = []
        for step in range(4):
            try:
                found.append(
                    str(comm.all_reduce("x" if (rank, step) == (1, 0) else np.full(MANY, 10.0**step))[0])
                )
            except UsageError as error:
                found.append(f"{type(error).__name__}: {error}"[:44])
        Path(folder, str(rank)).write_text(json.dumps(found))


@pytest.mark.parametrize("backend", [pytest.param("tcp", marks=pytest.mark.thorough), "shared"])
def test_a_rank_that_refuses_while_another_dies_stays_in_step(backend: str, tmp_path: Path) -> None:
    """The survivors repeat the call: it refuses again, and its next call does not meet the repeated one."""
    told = told_by((0, 1), refuses_beside_a_death, 3, backend, str(tmp_path))
    assert told == [["RefusedError: rank 1 refused the collective:", "20.0", "200.0", "2000.0"]] * 2


def back_from_sleep(rank: int, meeting: str) -> tuple[str, list[float]]:
    """Rank 1 stops; the others go on, wake it, and end when it has heard of it."""
    plan, told = plan_for(3), Path(meeting, "told")
    backend = TcpBackend(rank, 3, rendezvous=f"unix:{meeting}/m", timeout=1.0, meeting_timeout=30)
    with Communicator(plan, backend) as comm:
        sleeper = int(comm._gather_texts(str(os.getpid()))[1])
        try:
            if rank == 1:
                os.kill(sleeper, signal.SIGSTOP)
            with pytest.raises(BackendError):
                comm.all_reduce(np.full(1 << 18, 1.0))
            if rank == 1:
                with pytest.raises(BackendError) as refused:
                    comm.shrink()
                told.touch()
                return str(refused.value), []
            comm.shrink()
            total = comm.all_reduce(np.full(5, rank + 1.0))
        finally:
            if rank == 0:
                os.kill(sleeper, signal.SIGCONT)
        deadline = time.monotonic() + 10
        while not told.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return comm.notes[0], total.tolist()


@pytest.mark.thorough
def test_a_rank_that_was_stopped_and_comes_back_is_refused_by_its_epoch(tmp_path: Path) -> None:
    """The others wait for each other, who notice later, longer than for the one that was reported."""
    told = in_processes(3, back_from_sleep, str(tmp_path))
    assert "this rank is excluded since epoch 1" in told[1][0]
    assert "its state is of epoch 0, end this process" in told[1][0]
    assert [one[1] for one in (told[0], told[2])] == [[4.0] * 5] * 2
    assert told[0][0].startswith("epoch 1: without rank 1")


def test_a_rank_that_lives_is_left_out_and_hears_of_it() -> None:
    def body(backend: TcpBackend, rank: int) -> object:
        with Communicator(plan_for(3), backend) as comm:
            comm.all_reduce(np.ones(3))
            if rank == 2:
                with pytest.raises(BackendError):
                    comm.all_reduce(np.ones(3))
                with pytest.raises(BackendError, match="excluded since epoch 1"):
                    comm.shrink()
                return None
            with pytest.raises(UsageError, match="cannot exclude itself"):
                comm.shrink(without=[rank])
            comm.shrink(without=[2])
            found = comm.all_reduce(np.full(3, rank + 1.0)).tolist()
            time.sleep(0.5)  # until rank 2 has asked
            return comm.rank, comm.size, comm.epoch, found

    assert backends_in_threads(3, body) == [(0, 2, 1, [3.0] * 3), (1, 2, 1, [3.0] * 3), None]


def test_all_ranks_plan_anew_for_links_that_are_gone_and_must_mean_the_same() -> None:
    def body(backend: TcpBackend, rank: int) -> object:
        with Communicator(plan_for(3), backend) as comm:
            comm.replan(slow_links={"gpu0-gpu1": 10.0})
            found = comm.all_reduce(np.full(5, rank + 1.0)).tolist(), comm.plan.rate
            with pytest.raises(BackendError, match="op"):
                comm.replan(without_links=["gpu0-gpu1" if rank else "gpu0-gpu2"])
            return found

    first, *others = backends_in_threads(3, body)
    assert first[0] == [6.0] * 5
    assert first[1] < plan_for(3).rate
    assert others == [first, first]


def test_four_ranks_lose_a_cable_and_send_nothing_over_it_from_then_on() -> None:
    """Both of its directions are gone from the plan, which is that of the chain; sums are right over the others."""

    def body(backend: TcpBackend, rank: int) -> object:
        with Communicator(topoplan.plan("dgx-spark-x4"), backend) as comm:
            before = comm.plan.rate, comm.all_reduce(np.full(64, rank + 1.0)).tolist()
            comm.replan(without_links=["s1-s0"])
            crossed = {
                hop
                for shard in comm.plan.shards
                for stage in shard.stages
                for edge in stage.edges
                for hop in (frozenset(edge.route[i : i + 2]) for i in range(len(edge.route) - 1))
            }
            assert frozenset(("s0.p0", "s1.p1")) not in crossed
            return *before, comm.plan.rate, comm.all_reduce(np.full(64, rank + 1.0)).tolist()

    found = backends_in_threads(4, body)
    assert found == [(pytest.approx(50 / 3), [10.0] * 64, 12.5, [10.0] * 64)] * 4


def test_what_fewer_ranks_cannot_do_is_an_error_and_the_next_call_goes_on() -> None:
    """Blocks for three ranks are not divided among two; the root of a broadcast is gone."""

    def body(backend: TcpBackend, rank: int) -> object:
        comm = Communicator(
            topoplan.plan(topoplan.load("dgx-1v"), gpus=[0, 1, 2]), backend, on_failure="shrink"
        )
        comm.all_reduce(np.ones(3))
        if rank == 2:
            backend.close()  # as if it had died: its connections end
            return None
        with comm:
            with pytest.raises(
                BackendError, match="without rank 2, but this reduce_scatter cannot be repeated"
            ):
                comm.reduce_scatter(np.ones(9))
            assert comm.epoch == 1
            return comm.reduce_scatter(np.full(4, rank + 1.0)).tolist()

    assert backends_in_threads(3, body) == [[3.0, 3.0], [3.0, 3.0], None]


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_an_out_on_some_ranks_only_is_refused_where_only_they_could_not_repeat_it(collective: str) -> None:
    def body(backend: TcpBackend, rank: int) -> object:
        comm = Communicator(plan_for(2), backend, on_failure="shrink")
        given, length = (np.ones(3), 6) if collective == "all_gather" else (np.ones(6), 3)
        getattr(comm, collective)(given, out=np.zeros(length))
        getattr(comm, collective)(given)
        with comm, pytest.raises(BackendError, match="an out, which all ranks must give, or none"):
            getattr(comm, collective)(given, out=np.zeros(length) if rank else None)

    assert backends_in_threads(2, body) == [None, None]


def test_a_rank_continues_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the process that serves the rendezvous is stopped, and one rank notices it before another."""
    waits: list[int] = []
    wait = TcpControlPlane.wait

    def counted(world: TcpControlPlane, *given: Any, **options: Any) -> None:
        waits.append(world.rank)
        wait(world, *given, **options)

    def stop() -> None:
        monkeypatch.setattr(RendezvousState, "receive", lambda *said: [])
        monkeypatch.setattr(RendezvousState, "lost", lambda *said: [])
        monkeypatch.setattr(RendezvousClient, "host_stands_still", lambda control: True)
        monkeypatch.setattr(TcpControlPlane, "wait", counted)

    all_are_there = threading.Barrier(3, action=stop)

    def body(backend: TcpBackend, rank: int) -> None:
        with Communicator(plan_for(3), backend) as comm:
            comm.all_reduce(np.ones(3))
            all_are_there.wait()
            if rank == 1:
                backend._end()
                return
            with pytest.raises(BackendError, match="does not answer: it is stopped, or cut off"):
                comm.all_reduce(np.ones(3))

    assert backends_in_threads(3, body, timeout=1.0) == [None] * 3
    assert sorted(waits) == [0, 2]


def test_what_waited_behind_a_collective_that_lost_a_rank_is_without_it_too() -> None:
    """Nobody has to repeat it, but its sum is one of fewer ranks."""

    def body(backend: TcpBackend, rank: int) -> object:
        comm = Communicator(plan_for(3), backend, on_failure="shrink")
        comm.all_reduce(np.ones(3))
        if rank == 2:
            backend.close()  # as if it had died: its connections end
            return None
        with comm:
            handles = [comm.all_reduce(np.full(5, rank + 1.0), async_op=True) for _ in range(3)]
            return [(handle.wait()[0], handle.repeated, handle.without) for handle in handles]

    left = [(3.0, True, (2,)), (3.0, False, (2,)), (3.0, False, (2,))]
    assert backends_in_threads(3, body) == [left, left, None]


def test_a_root_keeps_its_number_during_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a collective in the background may do, between a look at the arguments and at who is there."""
    looked, going_on = communicator.request, threading.local()

    def meanwhile(*given: Any, **named: Any) -> Any:
        found = looked(*given, **named)
        getattr(going_on, "at_once", lambda: None)()
        going_on.at_once = lambda: None
        return found

    def body(backend: TcpBackend, rank: int) -> object:
        with Communicator(plan_for(3), backend, on_failure="shrink") as comm:
            if rank == 0:
                return None
            going_on.at_once = comm.shrink
            handle = comm.broadcast(np.full(3, rank), root=2, async_op=True)
            return handle.wait().tolist(), handle.without, comm.original_ranks

    monkeypatch.setattr(communicator, "request", meanwhile)
    assert backends_in_threads(3, body) == [None, ([2] * 3, (0,), (1, 2)), ([2] * 3, (0,), (1, 2))]

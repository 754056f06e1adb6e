"""Jobs of processes that let others in where ranks are gone: every element right, the same bits, by the first plan."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import Communicator
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.lab.chaos_rank import backend_at
from collectives.peers.membership_protocol import MembershipProtocol
from collectives.peers.shared_memory_control_plane import SharedMemoryControlPlane
from tests.faults.recovery import STEP_SECONDS, plan_for
from tests.support.forking import forking
from tests.support.tcp_jobs import backends_in_threads
from topoplan import PlanByKind, Server, cluster_by_kind, plan_by_kind
from topoplan.errors import BackendError, UsageError
from topoplan.plans.plan import Plan

ELEMENTS = 70_001
LIMIT_SECONDS = 120.0


def invite(comm: Communicator, folder: Path) -> None:
    """Write down where the ranks that there are can be found."""
    if comm.rank == 0:
        (folder / "invitation.new").write_text(comm.join_token)
        (folder / "invitation.new").rename(folder / "invitation")


def take_part(comm: Communicator, told: Connection, folder: Path, whole: int, *, came: bool) -> None:
    """Add up, and let in whoever comes, until all seats were taken again for some steps."""
    full = 0
    seen: dict[str, Any] = {"bad": 0, "sizes": []}
    told.send_bytes(json.dumps({"pid": os.getpid()}).encode())
    while full < 5:
        # who has come is where the others are when they have let it in
        joined = () if came else comm.grow()
        came = False
        if joined:
            seen["sizes"].append([comm.size, list(joined)])
            invite(comm, folder)
        handle = comm.all_reduce(np.full(ELEMENTS, 1 << comm.rank, np.int64), async_op=True)
        total = handle.wait()
        seen["bad"] += int(not handle.repeated and not (total == (1 << comm.size) - 1).all())
        # nobody stops before all have seen that everybody is there
        over = (folder / "over").exists() and comm.size == whole
        full += int(comm.all_reduce(np.array([over], np.int64))[0] == comm.size)
    bits = np.random.default_rng(comm.rank).standard_normal(10_007).astype(np.float32)
    seen |= {"rank": comm.rank, "size": comm.size, "epoch": comm.epoch, "notes": comm.notes}
    seen |= {"plan": comm.plan.digest, "sum": comm.all_reduce(bits).tobytes().hex()[:4096]}
    comm.close()
    told.send_bytes(json.dumps(seen).encode())


def member(rank: int, size: int, backend: str, folder: str, told: Connection) -> None:
    """A rank that begins the job."""
    made = backend_at(backend, rank, size, meeting=f"unix:{folder}/m", timeout=STEP_SECONDS)
    comm = Communicator(plan_for(size), made, on_failure="shrink")
    invite(comm, Path(folder))
    take_part(comm, told, Path(folder), size, came=False)


def plan_of_few_servers(size: int) -> PlanByKind:
    """By kind: servers of two GPUs, and one of one if the number is odd."""
    servers = [Server("v100x4", [0, 1], count=size // 2), Server("v100x4", [0], count=size % 2)]
    return plan_by_kind(cluster_by_kind([one for one in servers if one.count], nic_gbps=100), "allreduce")


def member_by_kind(rank: int, size: int, backend: str, folder: str, told: Connection) -> None:
    """A rank that begins a job with a plan by kind."""
    made = backend_at(backend, rank, size, meeting=f"unix:{folder}/m", timeout=STEP_SECONDS)
    comm = Communicator(plan_of_few_servers(size), made, on_failure="shrink")
    invite(comm, Path(folder))
    take_part(comm, told, Path(folder), size, came=False)


def newcomer(size: int, folder: str, seat: int | None, told: Connection) -> None:
    """A rank that comes later."""
    comm = Communicator.join(Path(folder, "invitation").read_text(), original_rank=seat, wait=LIMIT_SECONDS)
    take_part(comm, told, Path(folder), size, came=True)


class Job:
    """The processes of a job, started one by one."""

    def __init__(self, size: int, backend: str, folder: Path, begin: Any = member) -> None:
        self.context = forking()
        self.size, self.folder = size, folder
        self.running: list[tuple[BaseProcess, Connection]] = []
        for rank in range(size):
            self.start(begin, rank, size, backend, str(folder))

    def start(self, target: Any, *given: Any) -> None:
        reader, writer = self.context.Pipe(duplex=False)
        process = self.context.Process(target=target, args=(*given, writer), daemon=True)
        process.start()
        writer.close()
        self.running.append((process, reader))
        if target is newcomer or len(self.running) == self.size:
            waiting = [reader] if target is newcomer else [one for _, one in self.running]
            for one in waiting:
                assert one.poll(LIMIT_SECONDS), "does not begin"
                one.recv_bytes()

    def kill(self, *places: int) -> None:
        for place in places:
            self.running[place][0].kill()
            self.running[place][0].join()
        for place in sorted(places, reverse=True):
            self.running.pop(place)

    def reports(self) -> list[dict[str, Any]]:
        (self.folder / "over").touch()
        found, deadline = [], time.monotonic() + LIMIT_SECONDS
        waiting = [reader for _, reader in self.running]
        while waiting:
            assert time.monotonic() < deadline, f"{len(waiting)} hang"
            for reader in wait(waiting, 1.0):
                assert isinstance(reader, Connection)
                waiting.remove(reader)
                found.append(json.loads(reader.recv_bytes()))
        return found


@contextlib.contextmanager
def job(size: int, backend: str, begin: Any = member) -> Iterator[Job]:
    with tempfile.TemporaryDirectory() as folder:
        made = Job(size, backend, Path(folder), begin)
        try:
            yield made
        finally:
            for process, _ in made.running:
                process.kill()
                process.join()


def fresh_sum(size: int, plan: Plan | PlanByKind | None = None) -> str:
    """What a new communicator of as many ranks adds up to."""
    with Communicator(plan or plan_for(size)) as comm:
        given = [
            np.random.default_rng(rank).standard_normal(10_007).astype(np.float32) for rank in range(size)
        ]
        return comm.all_reduce(given)[0].tobytes().hex()[:4096]


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["tcp", "shared"])
@pytest.mark.parametrize("gone", [[0], [2], [1, 3]], ids=str)
def test_a_rank_that_was_killed_comes_back_and_the_first_plan_with_it(backend: str, gone: list[int]) -> None:
    with job(4, backend) as made:
        made.kill(*gone)
        for seat in gone:
            made.start(newcomer, 4, str(made.folder), seat)
        reports = made.reports()
    assert len(reports) == 4
    assert [one["bad"] for one in reports] == [0] * 4
    assert sorted(one["rank"] for one in reports) == list(range(4))
    assert {one["plan"] for one in reports} == {plan_for(4).digest}
    assert {one["sum"] for one in reports} == {fresh_sum(4)}
    assert len({one["epoch"] for one in reports}) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("gone", [[0], [3]], ids=str)
def test_a_rank_of_a_plan_by_kind_that_was_killed_comes_back(gone: list[int]) -> None:
    """The survivors list the plan to shrink; the first plan and its bits come back with the joining rank."""
    with job(5, "tcp", member_by_kind) as made:
        made.kill(*gone)
        for seat in gone:
            made.start(newcomer, 5, str(made.folder), seat)
        reports = made.reports()
    assert [one["bad"] for one in reports] == [0] * 5
    assert sorted(one["rank"] for one in reports) == list(range(5))
    assert len({one["plan"] for one in reports}) == 1
    assert {one["sum"] for one in reports} == {fresh_sum(5, plan_of_few_servers(5))}


def test_bad_invitations_and_closed_doors_say_so() -> None:
    for text in ("", "{}", '["topoplan.invitation/1", []]', '["other", [[0, "127.0.0.1", 9, "x"]]]'):
        with pytest.raises(UsageError, match="join_token must be the text of"):
            Communicator.join(text)
    with contextlib.closing(MembershipProtocol("127.0.0.1")) as alone:
        alone.know(0, [alone.card])
        with pytest.raises(BackendError, match=r"no rank admitted this process within 0\.2 s"):
            Communicator.join(alone.invitation, wait=0.2)
        told = alone.invitation
    # another job may listen at its port by now
    closed = "none of the 1 ranks of the invitation is running|the ranks that this process asked have ended"
    with pytest.raises(BackendError, match=closed):
        Communicator.join(told, wait=0.2)


def test_nobody_comes_where_all_are_there() -> None:
    def body(backend: TcpBackend, rank: int) -> object:
        with Communicator(plan_for(2), backend) as comm:
            with pytest.raises(UsageError, match="each rank is a process here"):
                comm.grow([0])
            return comm.grow(), comm.epoch, comm.all_reduce(np.ones(2)).tolist()

    assert backends_in_threads(2, body) == [((), 0, [2.0, 2.0])] * 2


def test_who_comes_in_place_of_one_that_dies_meanwhile_has_come() -> None:
    door: list[str] = []
    opened, joined = threading.Event(), []

    def newcomer() -> None:
        assert opened.wait(STEP_SECONDS)
        with Communicator.join(door[0], original_rank=2, wait=STEP_SECONDS) as comm:
            joined.append(comm.all_reduce(np.ones(2)).tolist())

    def body(backend: TcpBackend, rank: int) -> object:
        with Communicator(plan_for(3), backend, on_failure="shrink") as comm:
            if rank == 0:
                door.append(comm.join_token)
                opened.set()
                while comm._members.survivors("grow").join_requests == "[]":
                    time.sleep(0.01)
            comm._gather_texts("somebody knocks at rank 0")
            return None if rank == 2 else (comm.grow(), comm.all_reduce(np.ones(2)).tolist())

    thread = threading.Thread(target=newcomer, daemon=True)
    thread.start()
    assert backends_in_threads(3, body) == [((2,), [3.0, 3.0])] * 2 + [None]
    thread.join(STEP_SECONDS)
    assert joined == [[3.0, 3.0]]


def test_ranks_of_one_process_come_back_with_no_residuals_of_their_own() -> None:
    plan = plan_for(4)
    with Communicator(plan) as comm, Communicator(plan) as other:
        gradients = [np.arange(1000, dtype=np.float32) * (rank + 1) for rank in range(4)]
        for one in (comm, other):
            one.sparse_all_reduce(gradients, density=0.01)
        kept = comm.sparse_state()[""]
        comm.shrink(without=[1, 3])
        assert comm.grow() == (1, 3)
        after = comm.sparse_state()[""]
        assert [bool(one["residual"].any()) for one in after] == [True, False, True, False]
        assert all(np.array_equal(after[rank]["residual"], kept[rank]["residual"]) for rank in (0, 2))
        assert (comm.plan, comm.epoch) == (plan, 2)
        with pytest.raises(UsageError, match="original rank 1 has not failed"):
            comm.grow([1])
        assert comm.all_reduce([np.ones(3)] * 4)[0].tolist() == [4.0] * 3


def test_links_go_on_over_the_wires_of_the_ranks_that_are_left(tmp_path: Path) -> None:
    """A wires file names ranks as they were counted first; rank 2 of three has the wires of its own as rank 1 too."""
    pairs = [(one, other) for one in range(3) for other in range(3) if one != other]
    wires = [
        {"source": one, "destination": other, "channel": "nvlink"}
        | {"from": f"127.0.{one + 1}.{other + 1}", "to": f"127.0.{other + 1}.{one + 1}"}
        for one, other in pairs
    ]
    path = tmp_path / "wires.json"
    path.write_text(json.dumps({"format": "topoplan.wires/1", "wires": wires}))
    plan = topoplan.plan("dgx-1v", gpus=[0, 1, 2])

    def body(backend: TcpBackend, rank: int) -> object:
        with Communicator(plan, backend) as comm:
            comm.all_reduce(np.ones(3))
            if rank == 1:
                return None
            comm.shrink(without=[1])
            assert comm.all_reduce(np.ones(70_000)).tolist() == [2.0] * 70_000
            held = comm._open().backend
            assert isinstance(held, TcpBackend)
            links = held._network.outgoing
            return {queue[:2]: link.getpeername()[0] for queue, link in links.items()}

    found = backends_in_threads(3, body, wires=path)
    assert found == [{(0, 1): "127.0.3.1"}, None, {(1, 0): "127.0.1.3"}]


def dies_before_its_word_is_read(rank: int, meeting: str, told: Connection) -> None:
    """Rank 0 says what lies in memory of its own, and is gone before the others open that."""
    comm = Communicator(plan_for(3), backend_at("shared", rank, 3, meeting=meeting, timeout=STEP_SECONDS))
    reach = SharedMemoryControlPlane._reach

    def reached(self: SharedMemoryControlPlane, *given: Any) -> Any:
        found = reach(self, *given)
        if b'{"text": ' in given[0] and b'"read"' not in given[0]:
            if rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.3)
        return found

    SharedMemoryControlPlane._reach = reached  # type: ignore[method-assign]
    try:
        comm._gather_texts("long " * 20_000)
    except BackendError as error:
        SharedMemoryControlPlane._reach = reach  # type: ignore[method-assign]
        comm.shrink()
        told.send((error.peer, comm.size, comm.all_reduce(np.ones(3)).tolist()))
    comm.close()


@pytest.mark.thorough
def test_a_rank_that_dies_before_its_long_word_is_read_is_a_failure_like_others(tmp_path: Path) -> None:
    context = forking()
    pipes = [context.Pipe(duplex=False) for _ in range(3)]
    processes = [
        context.Process(target=dies_before_its_word_is_read, args=(rank, f"unix:{tmp_path}/m", pipe[1]))
        for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        for reader, _ in pipes[1:]:
            assert reader.poll(LIMIT_SECONDS)
            assert reader.recv() == (0, 2, [2.0] * 3)
    finally:
        for process in processes:
            process.kill()
            process.join()

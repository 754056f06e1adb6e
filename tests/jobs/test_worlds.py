"""How ranks of the nccl back end meet, and what they hear when one of them is killed, stopped, or gives up."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from collectives.peers.control_plane import ControlPlane, StoreControlPlane
from collectives.peers.rendezvous import Rendezvous
from topoplan.errors import BackendError

pytestmark = pytest.mark.thorough

SCRIPT = Path(__file__).with_name("world_rank.py")


def processes(what: str, size: int = 3) -> list[str]:
    """What that many ranks over TCP print when something befalls the last one."""
    with Rendezvous("127.0.0.1:0", size) as meeting:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), "tcp", what, meeting.address, str(rank), str(size)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            return [rank.communicate(timeout=30)[0] for rank in ranks[: size - (what == "stop")]]
        finally:
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    rank.kill()
                rank.communicate()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("die", "peer 2: rank 2 is gone: its process ended"),
        ("stop", "peer 2: waited 0.5 s for rank 2, which does not answer: it is stopped, or cut off"),
        ("away", "peer 2: waited 0.5 s for rank 2, which has not called this collective or has left it"),
        ("tell", "rank 2, peer 0, step 7: out of paper: now"),
    ],
)
def test_what_befalls_one_process_is_told_to_all_others(what: str, message: str) -> None:
    for told in processes(what)[:2]:
        assert told.startswith("met\n")
        assert message in told


def in_threads(worlds: list[ControlPlane], task: Any) -> list[Any]:
    """What the task gives or raises for each world."""
    found: list[Any] = [None] * len(worlds)

    def be(rank: int) -> None:
        try:
            found[rank] = task(worlds[rank])
        except BackendError as error:
            found[rank] = error

    threads = [threading.Thread(target=be, args=[rank]) for rank in range(len(worlds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_ranks_meet_in_a_store_of_torch() -> None:
    distributed = pytest.importorskip("torch.distributed", reason="a store of torch needs torch")
    first = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    stores = [first, *(distributed.TCPStore("127.0.0.1", first.port, None, False) for _ in range(2))]
    worlds: list[ControlPlane] = [StoreControlPlane(store, rank, 3) for rank, store in enumerate(stores)]
    for _ in range(4):
        said = in_threads(worlds, lambda world: world.gather(b"%d" % world.rank, timeout=10))
        assert said == [[b"0", b"1", b"2"]] * 3

    def one_of_three_at_something_else(world: ControlPlane) -> Any:
        return world.largest(2.5, timeout=10) if world.rank != 1 else world.texts("here", timeout=10)

    assert in_threads(worlds, lambda world: world.largest(world.rank / 2, timeout=10)) == [1.0] * 3
    assert (
        in_threads(worlds, lambda world: world.texts("é" * world.rank, timeout=10)) == [["", "é", "éé"]] * 3
    )
    errors = in_threads(worlds, one_of_three_at_something_else)
    assert str(errors[0]).startswith("rank 0, peer 1: the peer is at a text for all ranks and this rank at ")
    assert [error.peer for error in errors] == [1, 0, 1]

    def two_of_three(world: ControlPlane) -> Any:
        return None if world.rank == 1 else world.gather(b"", timeout=0.3)

    errors = in_threads(worlds, two_of_three)
    assert all("waited 0.3 s for rank 1, which has not called" in str(errors[rank]) for rank in (0, 2))
    trouble = worlds[1].trouble()
    assert trouble is not None
    assert trouble.peer == 1
    with pytest.raises(BackendError, match=r"waited 0\.3 s for rank 1"):
        worlds[1].gather(b"", timeout=0.3)


@pytest.mark.parametrize("what", ["tell", "away"])
def test_ranks_meet_over_mpi(what: str) -> None:
    pytest.importorskip("mpi4py", reason="a world over MPI needs mpi4py")
    mpiexec = shutil.which(
        "mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    if mpiexec is None:
        pytest.skip("no mpiexec")
    environment = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    done = subprocess.run(
        [mpiexec, "-n", "3", sys.executable, str(SCRIPT), "mpi", what],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.count("met") == 3, done.stderr
    if what == "tell":
        told = "raised (rank 2, peer 0, step 7: out of paper: now)"
        assert [f"rank {rank} {told}" in done.stdout for rank in range(3)] == [True] * 3
    else:
        assert done.stdout.count("waited 0.5 s for ranks that have not called this collective") == 3

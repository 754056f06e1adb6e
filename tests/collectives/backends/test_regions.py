"""Regions: which memory ranks reach of each other, over what means, what they say of it, and that it is given back."""

from __future__ import annotations

from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from collectives import Communicator
from collectives.backends.nccl import device_arenas, nccl_communicators
from collectives.backends.nccl.nccl_backend import NcclBackend
from tests.support import fake_nccl
from tests.support.fake_streams import Machine
from tests.support.gpu_ranks import check_bits, cupy, floats, machine, on_every_rank, outcome
from tests.support.hand_plans import forest_plan
from topoplan.errors import UsageError

__all__ = ["cupy", "machine"]

REGION = 8 << 20
"""Bytes: what these plans need, so that memory is quickly made."""

LONG = 4200
"""Elements of float32 that are no small collective any more."""


def about(comm: Communicator, rank: int) -> tuple[str, tuple[int, ...]]:
    """What a rank says of its engine, and where it finds arenas."""
    backend: Any = comm._open().backend
    engine = backend._engine
    return backend.about_engine, () if engine is None else tuple(map(bool, engine.region.addresses))


def run(cupy: ModuleType, size: int, task: Any, collective: str = "allreduce", **options: Any) -> list[Any]:
    plan = forest_plan(size, collective, "binary")
    return on_every_rank(cupy, plan, task, **{"region_bytes": REGION, **options})


def said(cupy: ModuleType, size: int, **options: Any) -> str:
    """What all ranks say of their engine, which is the same."""
    found = {one for one, _ in outcome(run(cupy, size, about, **options))}
    assert len(found) == 1
    return found.pop()


@pytest.fixture
def pairs(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Four GPUs on two hosts."""
    machine.gpus, machine.teams = 4, 2
    monkeypatch.setattr(device_arenas, "_host", lambda: f"host {machine.device // 2}")
    return machine


@pytest.mark.parametrize("windows", [False, True])
def test_ranks_reach_those_of_their_host_and_messages_go_to_the_others(
    pairs: Machine, cupy: ModuleType, windows: bool
) -> None:
    pairs.windows, pairs.peers = (windows, False), True
    found = outcome(run(cupy, 4, about))
    kind = "windows" if windows else "peer access"
    assert found[0][0].startswith(f"windows over {kind}, messages between 2 domains (")
    assert [reached for _, reached in found] == [(True, True, False, False)] * 2 + [
        (False, False, True, True)
    ] * 2
    assert pairs.memory == {}


def test_hosts_that_nvlink_joins_are_one_domain(pairs: Machine, cupy: ModuleType) -> None:
    pairs.windows, pairs.teams = (True, True), 1
    found = outcome(run(cupy, 4, about))
    assert found == [("windows over windows and multicast", (True,) * 4)] * 4


@pytest.mark.parametrize(
    ("collective", "length"),
    [
        ("reduce", 24),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in product(("allreduce", "broadcast", "allgather", "reduce_scatter"), (24, LONG))
        ),
    ],
)
def test_collectives_of_several_hosts_have_the_bits_of_loopback(
    pairs: Machine, cupy: ModuleType, collective: str, length: int
) -> None:
    pairs.peers = True
    settings = {"region_bytes": REGION, "chunk_bytes": 1 << 20, "timeout": 40.0}
    check_bits(cupy, collective, length, calls=2, **settings, engine="windows")
    assert pairs.memory == {}


@pytest.mark.parametrize("ipc", [True, False])
def test_processes_of_a_host_open_handles_and_threads_of_one_do_not(
    machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch, ipc: bool
) -> None:
    machine.gpus, machine.peers, machine.ipc = 3, True, ipc
    monkeypatch.setattr(device_arenas, "_process", lambda: f"process {machine.device // 2}")
    opened = []

    def task(comm: Communicator, rank: int) -> str:
        opened.append(len(machine.opened))
        return about(comm, rank)[0]

    found = set(outcome(run(cupy, 3, task)))
    assert len(found) == 1
    if ipc:
        assert found.pop().startswith("windows over ipc (no windows: ")
        assert max(opened) == 4  # two ranks open one, and one opens two
        assert machine.memory == {}
    else:
        assert "messages: no windows: rank 0: NCCL has no windows" in (text := found.pop())
        assert "; and rank 0: the GPU failed: CUDARuntimeError('cudaErrorMapBufferObjectFailed')" in text
        assert machine.memory == {}
    assert machine.opened == []


def test_several_processes_on_a_gpu_use_messages(
    machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.gpus, machine.peers = 2, True
    monkeypatch.setattr(device_arenas, "_process", lambda: f"process {machine.device}")
    cupy.cuda.runtime.deviceGetPCIBusId = lambda device: "0000:01:00.0"
    assert said(cupy, 2).startswith(
        "messages: 2 ranks in 2 processes share a GPU, which runs kernels of one process"
    )
    cupy.cuda.runtime.deviceGetAttribute = lambda number, device: int(number == device_arenas.MPS_ENABLED)
    assert said(cupy, 2).startswith("windows over ipc"), "under the multi-process service"


def test_ranks_that_share_a_gpu_need_streams_that_run_side_by_side(
    machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.gpus, machine.peers = 2, True
    cupy.cuda.runtime.deviceGetPCIBusId = lambda device: "0000:01:00.0"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "3")
    assert said(cupy, 2) == (
        "messages: CUDA_DEVICE_MAX_CONNECTIONS must be 8 or more for the 2 ranks of rank 0's process on its GPU, got 3"
    )
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    assert said(cupy, 2).startswith("windows over peer access")
    machine.room = REGION + device_arenas.SPARE
    assert said(cupy, 2) == "messages: rank 0 has 264MB free on its GPU, and a region takes 272MB"


def test_a_process_on_each_host_opens_no_handles(
    pairs: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs.peers = True
    monkeypatch.setattr(device_arenas, "_process", lambda: f"process {pairs.device // 2}")
    assert said(cupy, 4).startswith("windows over peer access, messages between 2 domains")


@pytest.mark.parametrize("text", ["", "abc", "0", "-3"])
def test_a_number_of_queues_that_is_none_means_what_cuda_takes_by_default(text: str) -> None:
    assert device_arenas._queues(text) == 8


@pytest.mark.parametrize("timeout", [0.0, float("inf"), 1e12])
def test_timeouts_that_sockets_do_not_take_are_refused(
    machine: Machine, cupy: ModuleType, timeout: float
) -> None:
    with pytest.raises(UsageError, match="timeout at most 100000 s, got"):
        NcclBackend(cupy, None, timeout=timeout)  # type: ignore[arg-type]


def test_windows_are_had_from_an_nccl_that_is_older_than_the_bindings(
    machine: Machine, cupy: ModuleType
) -> None:
    """As with the libnccl that a torch brings: it refuses the bindings' question for its properties."""
    import sys

    machine.gpus, machine.windows = 2, (True, True)
    assert fake_nccl.VERSION < fake_nccl.BINDINGS
    bindings: Any = sys.modules["nccl.bindings.nccl"]

    def task(comm: Communicator, rank: int) -> str:
        backend: Any = comm._open().backend
        with pytest.raises(bindings.NCCLError, match="InvalidUsage"):
            bindings.comm_query_properties(backend._connection.link.handle)
        return about(comm, rank)[0]

    assert outcome(run(cupy, 2, task)) == ["windows over windows and multicast"] * 2


def test_where_nccl_makes_no_windows_the_reason_names_the_versions_and_nothing_of_them_is_left(
    machine: Machine, cupy: ModuleType
) -> None:
    machine.gpus, machine.peers = 2, True

    def task(comm: Communicator, rank: int) -> str:
        assert len(machine.memory) == 2  # of the peer access that is taken instead
        return about(comm, rank)[0]

    assert set(outcome(run(cupy, 2, task))) == {
        "windows over peer access (no windows: rank 0: NCCL has no windows among these GPUs; NCCL_DEBUG=INFO tells "
        "more (2.30.3 by nccl4py for 2.32.3, /fake/libnccl.so.2))"
    }
    made = [one for one in machine.kept if isinstance(one, fake_nccl.Comm)]
    assert [one.aborted for one in made] == [False, False, True, True]
    assert all(one.aborted or one.destroyed for one in made)
    assert machine.memory == {}


def test_a_refused_multicast_address_costs_no_windows(
    machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    machine.gpus, machine.windows = 2, (True, True)
    bindings: Any = sys.modules["nccl.bindings.nccl"]

    def refuses(window: Any, offset: int) -> int:
        raise bindings.NCCLError("NCCL_ERROR_UNHANDLED_CUDA_ERROR")

    monkeypatch.setattr(bindings, "get_lsa_multimem_device_pointer", refuses)
    assert said(cupy, 2) == (
        "windows over windows (no multicast address: rank 0: NCCL reports NCCL_ERROR_UNHANDLED_CUDA_ERROR; "
        "NCCL_DEBUG=WARN tells more)"
    )


@pytest.mark.parametrize(
    ("first", "free", "named"), [(True, 64 << 20, True), (False, 0, True), (True, 1 << 30, False)]
)
def test_a_small_folder_of_shared_memory_is_named_where_nccl_does_not_start(
    machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch, first: bool, free: int, named: bool
) -> None:
    import sys

    machine.gpus, machine.peers = 2, True
    core: Any = sys.modules["nccl.core"]
    bindings: Any = sys.modules["nccl.bindings.nccl"]
    genuine = core.Communicator.init

    def init(nranks: int, rank: int, unique_id: Any, config: Any = None) -> Any:
        # the communicator of windows is the second one
        if first or any(
            isinstance(one, fake_nccl.Comm) and one.device == machine.device for one in machine.kept
        ):
            raise bindings.NCCLError("NCCL_ERROR_SYSTEM_ERROR")
        return genuine(nranks, rank, unique_id, config)

    monkeypatch.setattr(core.Communicator, "init", init)
    space = SimpleNamespace(f_frsize=4096, f_bavail=free // 4096, f_blocks=1 << 18)
    monkeypatch.setattr(nccl_communicators.os, "statvfs", lambda path: space)
    text = str(run(cupy, 2, lambda comm, rank: about(comm, rank)[0])[0])
    assert "NCCL_ERROR_SYSTEM_ERROR" in text
    size = "0B" if not free else "64MB"
    told = f"; /dev/shm has {size} free of 1GB, which can be too little for NCCL (docker run --shm-size=1g)"
    assert (told in text) == named, text


@pytest.mark.parametrize(
    ("places", "most"),
    [
        ([("a", "01"), ("a", "02"), ("b", "01"), ("b", "02")], 1),
        ([("a", "01"), ("a", "01"), ("b", "01"), ("b", "02")], 2),
        ([("a", "01")], 1),
    ],
)
def test_ranks_of_a_gpu_are_counted_by_host_and_bus_id(
    cupy: ModuleType, monkeypatch: pytest.MonkeyPatch, places: list[tuple[str, str]], most: int
) -> None:
    """Every process may see one GPU alone, which it calls 0."""
    said: list[str] = []

    class World:
        def texts(self, text: str, *, timeout: float) -> list[str]:
            said.append(text)
            return said

    for host, bus in places:
        monkeypatch.setattr(device_arenas, "_host", lambda host=host: host)
        cupy.cuda.runtime.deviceGetPCIBusId = lambda device, bus=bus: f"0000:{bus}:00.0"
        found = device_arenas.count_ranks_per_gpu(cupy, World(), 0, timeout=1.0)  # type: ignore[arg-type]
    assert found == most


@pytest.mark.thorough
@pytest.mark.sampled
@pytest.mark.parametrize("what", ["comm_window_register", "get_peer_device_pointer", "mem_alloc"])
def test_where_nccl_fails_on_one_rank_all_go_another_way_and_messages_still_move(
    machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    import sys

    machine.gpus, machine.peers, machine.windows = 3, True, (True, True)
    bindings: Any = sys.modules["nccl.bindings.nccl"]
    genuine = getattr(bindings, what)

    def fails(*arguments: Any) -> Any:
        if machine.device == 1:
            raise bindings.NCCLError("NCCL_ERROR_UNHANDLED_CUDA_ERROR")
        return genuine(*arguments)

    monkeypatch.setattr(bindings, what, fails)
    arrays = floats(3, LONG)

    def task(comm: Communicator, rank: int) -> Any:
        text, _ = about(comm, rank)
        return text, comm.all_reduce(cupy.asarray(arrays[rank])).get()

    found = outcome(run(cupy, 3, task, timeout=3.0))
    wanted = Communicator(forest_plan(3, "allreduce", "binary")).all_reduce(arrays)[0]
    for text, result in found:
        assert text.startswith(
            "windows over peer access (no windows: rank 1: NCCL reports NCCL_ERROR_UNHANDLED"
        )
        assert result.tobytes() == wanted.tobytes()
    assert machine.memory == {}
    machine.peers = False
    for text, result in outcome(run(cupy, 3, task, timeout=3.0)):
        assert text.startswith("messages: no windows: rank 1: NCCL reports ")
        assert result.tobytes() == wanted.tobytes()


def test_arrays_of_empty_outlive_the_communicator(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus, machine.peers = 2, True

    def task(comm: Communicator, rank: int) -> Any:
        made = comm.empty(1000) if rank else None
        if made is not None:
            made[:] = cupy.asarray(np.arange(1000, dtype=np.float32))
        return made

    found = outcome(run(cupy, 2, task))
    assert len(machine.memory) == 2  # nobody gives memory back that another might still have
    assert found[1].get().tobytes() == np.arange(1000, dtype=np.float32).tobytes()


@pytest.mark.thorough
def test_a_rank_that_closes_while_another_one_goes_on_is_named(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus, machine.peers = 2, True

    def task(comm: Communicator, rank: int) -> Any:
        comm.all_reduce(cupy.zeros(LONG, dtype=np.float32))
        return rank or comm.all_reduce(cupy.zeros(LONG, dtype=np.float32))

    found = run(cupy, 2, task)
    assert "rank 1 has closed its communicator; make the same calls on all ranks" in str(found[0])
    assert found[1] == 1


def test_memory_stays_where_a_rank_has_failed(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus, machine.peers = 2, True

    def task(comm: Communicator, rank: int) -> Any:
        backend: Any = comm._open().backend
        if rank:
            backend._engine.queue = lambda *_: (_ for _ in ()).throw(RuntimeError("the GPU fell off the bus"))
        comm.all_reduce(cupy.zeros(LONG, dtype=np.float32))

    assert all(isinstance(one, Exception) for one in run(cupy, 2, task))
    assert len(machine.memory) == 2


def test_a_region_is_never_smaller_than_two_units(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus = 1
    (found,) = run(cupy, 1, about, region_bytes=512)
    assert isinstance(found, UsageError)
    assert str(found) == "region_bytes must be a multiple of 512, 1024 at least, got 512"

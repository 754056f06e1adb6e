"""The windows engine on GPUs that this processor plays: which memory ranks reach, results, failures, and its model."""

from __future__ import annotations

import re
import sys
import threading
import time
import weakref
from collections import Counter
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import topoplan
from collectives import Communicator, lower
from collectives.backends.backend import RankArrays
from collectives.backends.nccl import device_arenas, kernel_program, nccl_communicators, tree_steps
from collectives.backends.nccl.agreed_setup import AgreedStepFailed, AgreedSteps
from collectives.backends.nccl.nccl_backend import NcclBackend
from collectives.peers.rendezvous_client import RendezvousClient
from collectives.tables.lowering import PlanKey
from collectives.tables.transfer_table import result_blocks
from tests.support import fake_nccl
from tests.support.fake_gpu import owner
from tests.support.fake_streams import Machine
from tests.support.gpu_ranks import check_bits, cupy, floats, machine, on_every_rank, outcome, pairs
from tests.support.hand_plans import forest_plan
from tests.support.ranks_on_machine import Ranks
from topoplan.errors import BackendError, RefusedError, UsageError
from topoplan.machine.host_topology import both_ways
from topoplan.machine.topology import Device, Link, Topology, facts
from topoplan.model import window_engine
from topoplan.model.candidates import candidates
from topoplan.model.dataflow import dataflow
from topoplan.model.window_engine import SLOT_BYTES
from topoplan.plans.plan import Plan

__all__ = ["cupy", "machine", "pairs"]

REGION = 8 << 20
"""Bytes: what these plans need, so that memory is quickly made."""


LONG = 4200
"""Elements of float32 that are no small collective any more; each takes an interpreter many instructions."""


def about_engine(comm: Communicator, rank: int) -> str:
    """Return a rank's description of its engine."""
    found: str = comm._open().backend.about_engine
    return found


def run_engine(
    cupy: ModuleType, size: int, task: Any, collective: str = "allreduce", **options: Any
) -> list[Any]:
    plan = forest_plan(size, collective, "binary")
    return on_every_rank(cupy, plan, task, region_bytes=REGION, **options)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("windows", "peers", "kind"),
    [
        ((True, False), False, "windows over windows (no multicast address"),
        ((True, True), False, "windows over windows and multicast"),
        (
            (False, False),
            True,
            "windows over peer access (no windows: rank 0: NCCL has no windows among these",
        ),
        ((False, False), False, "messages: no windows: rank 0: NCCL has no windows"),
    ],
)
def test_all_ranks_take_the_best_that_all_have_and_say_why_it_is_no_better(
    machine: Machine, cupy: ModuleType, windows: tuple[bool, bool], peers: bool, kind: str
) -> None:
    machine.gpus, machine.windows, machine.peers = 3, windows, peers
    said = outcome(run_engine(cupy, 3, about_engine))
    assert len(set(said)) == 1
    assert said[0].startswith(kind)
    if kind.startswith("messages"):
        assert "GPU 0 has no peer access to GPU 1 of rank 1" in said[0]
    assert not machine.memory or not peers


def test_a_pair_on_which_no_copy_ends_exchanges_messages(machine: Machine, cupy: ModuleType) -> None:
    """In every call, with the bits of loopback; the engine says so, and captures nothing in a graph."""
    machine.gpus, machine.peers = 3, True
    ends = [("gpu0", "gpu1"), ("gpu1", "gpu0"), ("gpu1", "gpu2"), ("gpu2", "gpu1")]
    known = {"gpu1": facts(unreached="gpu0")}
    gpus = tuple(Device(name, "gpu", facts=known.get(name, ())) for name in ("gpu0", "gpu1", "gpu2"))
    links = tuple(Link(*one, "pcie", 52, push=2.6, pull=52) for one in ends)
    hosts = tuple(link for name in ("gpu0", "gpu1") for link in both_ways(name, "cpu0", "pcie", 26))
    plan = topoplan.plan(Topology("chain", (*gpus, Device("cpu0", "cpu")), (*links, *hosts)))
    arrays = floats(3, 24)

    def task(comm: Communicator, rank: int) -> Any:
        given = cupy.asarray(arrays[rank])
        before = about_engine(comm, rank)
        found = [comm.all_reduce(given, out=cupy.zeros(24, dtype=np.float32)).get() for _ in range(3)]
        after, stream = about_engine(comm, rank), cupy.cuda.Stream(non_blocking=True)
        stream.wait_event(recorded(cupy))
        with stream:
            stream.begin_capture()
            with pytest.raises(
                UsageError, match="cannot capture messages, got messages for gpu0-gpu1, where no"
            ):
                comm.all_reduce(given, out=given)
        assert comm.engine == after
        return found, after.removeprefix(before)

    found = outcome(on_every_rank(cupy, plan, task, region_bytes=REGION, timeout=40.0))
    with Communicator(plan, "loopback") as comm:
        wanted = comm.all_reduce(arrays)
    for rank, (results, said) in enumerate(found):
        assert said == "; messages for gpu0-gpu1, where no copy ends"
        assert [one.tobytes() for one in results] == [wanted[rank].tobytes()] * 3


def test_tables_outlive_the_empty_run_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy gives the memory of a dropped array to the next one."""
    ranks = Ranks(2)
    gpu, engine = ranks.gpus[0], ranks.engines[0]
    zeros, made, alive = gpu.zeros, [], []

    def noted(count: int, dtype: Any) -> Any:
        array = zeros(count, dtype)
        made.append(weakref.ref(array))
        return array

    monkeypatch.setattr(gpu, "zeros", noted)
    monkeypatch.setattr(
        gpu, "forest", lambda name: lambda *_: alive.extend(one() is not None for one in made)
    )
    engine.loaded("forest_sum_float32")
    assert alive == [True]


@pytest.mark.parametrize("size", [2, 3, 7])
def test_inboxes_take_a_small_part_of_the_room_in_whole_lines(size: int) -> None:
    engine = Ranks(size).engines[0]
    inboxes = 4 * engine._small_bytes * size
    assert 0 < inboxes <= engine._room.nbytes // 32
    assert engine._calls_at % kernel_program.FLAG_BYTES == inboxes % kernel_program.FLAG_BYTES == 0


@pytest.mark.thorough
@pytest.mark.parametrize("collective", ["allreduce", "reduce"])
def test_a_later_call_is_one_launch(
    machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch, collective: str
) -> None:
    """The ranks exchange texts before the first call alone."""
    machine.gpus, machine.peers = 4, True
    texts_compared = Mock(side_effect=NcclBackend._compare)
    monkeypatch.setattr(NcclBackend, "_compare", lambda *given: texts_compared(*given))
    counts = []
    for number in (2, 5):
        machine.launches, before = 0, texts_compared.call_count
        options: dict[str, Any] = {"region_bytes": REGION, "chunk_bytes": 1 << 20, "timeout": 40.0}
        check_bits(cupy, collective, 24, calls=number, **options)
        counts.append((machine.launches, texts_compared.call_count - before))
    one, other = counts
    assert other == (one[0] + 3 * 4, one[1])
    # two runs that try the peers, an empty one; word that an engine is opened and left, and that texts are compared
    assert one[0] == 4 * 8
    assert machine.graph_launches == 0


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("length", [24, pytest.param(LONG, marks=pytest.mark.thorough)])
def test_a_later_call_is_queued_without_a_wait_or_a_message(
    machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch, length: int, is_prepared: bool
) -> None:
    """One rank has queued its calls before the other one begins, and before its own stream goes on; the host asks
    nothing of the GPU, and the caller's stream has the results in order, also of changed inputs."""
    machine.gpus, machine.peers, calls = 2, True, 3
    together, said, queued = threading.Barrier(2), Counter[int](), threading.Event()
    arrays, say = floats(2, length), RendezvousClient.say

    def noted(client: Any, message: Any) -> None:
        said[threading.get_ident()] += 1
        say(client, message)

    monkeypatch.setattr(RendezvousClient, "say", noted)

    def task(comm: Communicator, rank: int) -> Any:
        given, me = cupy.asarray(arrays[rank]), threading.get_ident()
        comm.all_reduce(given, out=cupy.zeros(length, dtype=np.float32))
        prepared = [comm.prepare("all_reduce", given) for _ in range(calls if is_prepared else 0)]
        together.wait()
        before = machine.launches, machine.asked[me], said[me]
        together.wait()
        found = []
        assert rank == 0 or queued.wait(30)
        cupy.cuda.get_current_stream().do(queued.is_set)
        for turn in range(calls):
            given *= 2.0
            found.append(prepared[turn]() if prepared else comm.all_reduce(given, op="sum"))
        time.sleep(0.1)  # in which a kernel that waits for nothing would begin
        queued.set()
        together.wait()
        after = machine.launches, machine.asked[me], said[me]
        return [b - a for a, b in zip(before, after, strict=True)], [one.get() for one in found]

    with Communicator(forest_plan(2, "allreduce", "binary"), "loopback") as comm:
        wanted = [
            comm.all_reduce([one * np.float32(2**turn) for one in arrays])[0].tobytes()
            for turn in range(1, calls + 1)
        ]
    for counts, found in outcome(run_engine(cupy, 2, task, chunk_bytes=1 << 20, timeout=40.0)):
        assert counts == [2 * calls, 0, 0]
        assert [one.tobytes() for one in found] == wanted


@pytest.mark.sampled
@pytest.mark.parametrize("other", ["new", "repeated", "refused", "elsewhere"])
def test_calls_that_differ_are_refused_by_all_ranks_which_go_on(
    machine: Machine, cupy: ModuleType, other: str
) -> None:
    """After calls whose texts nobody compares any more: another call, one of another kind, one that a rank refuses."""
    machine.gpus, machine.peers = 3, True
    arrays = floats(3, 24)

    def task(comm: Communicator, rank: int) -> Any:
        given = cupy.asarray(arrays[rank])
        for op in ("sum", "max", "sum", "max"):
            comm.all_reduce(given, op=op)
        errors = []
        for turn in range(2):
            array, op = given, "sum"
            if rank == turn and other in ("refused", "elsewhere"):
                with cupy.cuda.Device(2):
                    array = arrays[rank] if other == "refused" else cupy.asarray(arrays[rank])
            elif rank == turn:
                op = "min" if other == "new" else "max"
            with pytest.raises((RefusedError, UsageError)) as raised:
                comm.all_reduce(array, op=op, async_op=True).wait()
            errors.append(str(raised.value))
        return errors, comm.all_reduce(given).get()

    with Communicator(forest_plan(3, "allreduce", "binary"), "loopback") as comm:
        wanted = comm.all_reduce(arrays)
    for rank, (errors, found) in enumerate(outcome(run_engine(cupy, 3, task, timeout=20.0))):
        assert found.tobytes() == wanted[rank].tobytes()
        for turn, error in enumerate(errors):
            told = {"refused": "instead of a CuPy", "elsewhere": "on GPU 2", "repeated": "max", "new": "min"}
            assert told[other] in error, error
            assert rank == turn or f"rank {turn}" in error, error


@pytest.mark.thorough
@pytest.mark.parametrize(
    "found", ["by a wait", pytest.param("by a call", marks=pytest.mark.thorough), "on the host", "in the end"]
)
def test_a_rank_that_stays_away_from_queued_calls_is_named(
    machine: Machine, cupy: ModuleType, found: str
) -> None:
    """The guard ends the kernels, so that the caller's stream goes on."""
    machine.gpus, machine.peers = 2, True
    arrays, over = floats(2, 24), threading.Event()

    def task(comm: Communicator, rank: int) -> Any:
        given, out = cupy.asarray(arrays[rank]), cupy.zeros(24, dtype=np.float32)
        for _ in range(2):
            comm.all_reduce(given, out=cupy.empty(24, dtype=np.float32))
        if rank == 1:
            over.wait(20)
            return
        try:
            engine: Any = comm._open().backend
            handle = comm.all_reduce(given, out=out, async_op=found == "by a wait")
            if found == "by a wait":
                assert not handle.done()
                with pytest.raises(TimeoutError, match=r"still running after 0\.1 s"):
                    handle.wait(0.1)
                handle.wait()
            if found == "on the host":
                comm.arrays.values(out)
                raise AssertionError("its elements are not those of a sum")
            assert not out.get().any()
            assert not engine._engine.late
            if found == "by a call":
                comm.all_reduce(given)
            comm.close()
        finally:
            over.set()

    error, _ = run_engine(cupy, 2, task, timeout=2.0)
    assert isinstance(error, BackendError)
    assert error.peer == 1
    assert "which has not called this collective" in str(error)


def test_arrays_of_a_queued_call_are_kept_until_its_kernel_has_ended(
    machine: Machine, cupy: ModuleType
) -> None:
    machine.gpus, machine.peers = 2, True
    queued = threading.Event()

    def task(comm: Communicator, rank: int) -> Any:
        kept = []
        for turn in range(3):
            given = cupy.asarray(floats(2, 24)[rank])
            kept.append(weakref.ref(owner(given.host).base))
            assert rank == 0 or turn < 2 or queued.wait(30)
            handle = comm.all_reduce(given, async_op=True)
            result = handle.wait() if turn < 2 else handle.queued()
        del given
        alive = kept[-1]() is not None
        queued.set()
        assert handle.wait() is result
        return rank or alive, [one() for one in kept]

    assert outcome(run_engine(cupy, 2, task, timeout=20.0)) == [(True, [None] * 3), (1, [None] * 3)]


def test_refuses_arrays_of_cupy_while_torch_captures(
    machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy's current stream is not captured then, and CUDA would void the capture at its first event."""
    machine.gpus, machine.peers = 2, True
    captures = threading.local()
    torch = SimpleNamespace(
        is_initialized=lambda: True, is_current_stream_capturing=lambda: getattr(captures, "now", False)
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=torch))  # type: ignore[arg-type]

    def task(comm: Communicator, rank: int) -> Any:
        given = cupy.asarray(floats(2, 24)[rank])
        comm.all_reduce(given)
        captures.now = rank == 0
        with pytest.raises(UsageError) as error:
            comm.all_reduce(given, async_op=True).wait()
        return str(error.value)

    for text in outcome(run_engine(cupy, 2, task, timeout=20.0)):
        assert "rank 0 has an array while torch captures its current stream in a CUDA graph" in text
        assert "\n" not in text


@pytest.mark.sampled
@pytest.mark.parametrize(("calls", "waits"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("other", ["new", "repeated"])
def test_a_difference_that_is_found_after_further_calls_ends_all_ranks(
    machine: Machine, cupy: ModuleType, other: str, calls: int, waits: bool
) -> None:
    """Nothing is written, nothing behind it runs, and all raise one error: in a later call or wait, or in the end."""
    machine.gpus, machine.peers = 3, True
    arrays, outs, together = floats(3, 24), list[Any](), threading.Barrier(3)

    def task(comm: Communicator, rank: int) -> Any:
        given, mine = cupy.asarray(arrays[rank]), [cupy.zeros(24, dtype=np.float32) for _ in range(calls)]
        handles: list[Any] = []
        outs.extend(mine)
        for op in ("sum", "max"):
            comm.all_reduce(given, op=op)
        if waits:
            together.wait(20.0)
            machine.busy = True  # until all ranks have made all calls
            together.wait(20.0)
        for number, out in enumerate(mine):
            op = {"new": "min", "repeated": "max"}[other] if rank == 1 and number == 0 else "sum"
            handles.append(comm.all_reduce(given, op=op, out=out, async_op=waits))
        for handle in handles if waits and other == "repeated" else ():
            handle.queued()  # a rank whose later calls are not queued yet is refused as if it had not made them
        if waits:
            together.wait(20.0)
            machine.busy = False
        for handle in handles if waits else ():
            handle.wait()

    errors = run_engine(cupy, 3, task, timeout=20.0)
    assert all(isinstance(one, BackendError) for one in errors), errors
    for error in errors:
        assert re.search("rank 1 runs another collective: op 'm..' instead of 'sum'", str(error)), error
    if calls > 1 and other == "repeated":
        assert len({str(one) for one in errors}) == 1
        assert "has called on meanwhile" in str(errors[0])
    assert len(outs) == 3 * calls
    assert not any(out.host.any() for out in outs)


def test_a_rank_that_leaves_between_repeated_calls_is_named(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus, machine.peers = 3, True

    def task(comm: Communicator, rank: int) -> Any:
        given = cupy.asarray(floats(3, 24)[rank])
        for _ in range(3):
            comm.all_reduce(given)
        return comm.all_reduce(given) if rank != 2 else None

    *others, _ = run_engine(cupy, 3, task, timeout=40.0)
    assert all(isinstance(one, BackendError) and one.peer == 2 for one in others), others
    assert "rank 2 has closed its communicator" in str(others[0])


def test_an_array_that_needs_a_copy_on_one_rank_is_summed(machine: Machine, cupy: ModuleType) -> None:
    """That rank compares texts, the others digests, so all compare texts."""
    machine.gpus, machine.peers = 3, True
    arrays = floats(3, 48)

    def task(comm: Communicator, rank: int) -> Any:
        whole = cupy.asarray(arrays[rank])
        found = []
        for turn in range(6):
            given = cupy.asarray(arrays[rank])[::2] if turn in (3, 4) and rank == turn - 3 else whole[:24]
            found.append(comm.all_reduce(given).get())
        return found

    results = outcome(run_engine(cupy, 3, task, timeout=20.0))
    halves = [one[:24] for one in arrays]
    for turn in range(6):
        given = [
            one[::2] if turn in (3, 4) and rank == turn - 3 else half
            for rank, (one, half) in enumerate(zip(arrays, halves, strict=True))
        ]
        with Communicator(forest_plan(3, "allreduce", "binary"), "loopback") as comm:
            wanted = comm.all_reduce(given)
        assert all(one[turn].tobytes() == wanted[0].tobytes() for one in results), turn


@pytest.mark.parametrize(
    "collective",
    [
        pytest.param("allreduce", marks=pytest.mark.thorough),
        "broadcast",
        pytest.param("allgather", marks=pytest.mark.thorough),
    ],
)
def test_results_in_arenas_are_written_by_peers(machine: Machine, cupy: ModuleType, collective: str) -> None:
    machine.gpus, machine.peers = 3, True
    arrays = floats(3, LONG)
    plan = forest_plan(3, collective, "binary")

    def call(comm: Communicator, given: Any, out: Any = None) -> Any:
        if collective == "broadcast":
            return comm.broadcast(given, root=plan.root, out=out)
        return (comm.all_gather if collective == "allgather" else comm.all_reduce)(given, out=out)

    def task(comm: Communicator, rank: int) -> Any:
        backend: Any = comm._open().backend
        shape = 3 * LONG if collective == "allgather" else LONG
        given, out = comm.empty(LONG), comm.empty(shape)
        given[:] = cupy.asarray(arrays[rank])
        assert call(comm, given, out) is out
        kinds = [layout[-1] for layout in backend._engine._programs]
        found = [out.get()]
        if rank == 1:
            out = comm.empty(1)  # from here on its arrays lie elsewhere
        other = comm.empty(shape)
        found.append(call(comm, given, other).get())
        if collective != "allgather":
            found.append(call(comm, given, given).get())  # in place
        return kinds, found

    found = outcome(run_engine(cupy, 3, task, collective, chunk_bytes=1 << 20, timeout=40.0))
    with Communicator(plan, "loopback") as comm:
        wanted = call(comm, arrays)
    for rank, (kinds, results) in enumerate(found):
        assert kinds == [False, True]
        for one in results:
            assert one.tobytes() == np.asarray(wanted[rank]).tobytes()


@pytest.mark.parametrize("length", [24, pytest.param(LONG, marks=pytest.mark.thorough)])
def test_a_graph_of_the_caller_is_replayed(machine: Machine, cupy: ModuleType, length: int) -> None:
    machine.gpus, machine.peers = 2, True
    arrays = floats(2, length)
    together = threading.Barrier(2)

    def task(comm: Communicator, rank: int) -> Any:
        given, out = cupy.asarray(arrays[rank]), cupy.zeros(length, dtype=np.float32)
        refused = []
        for _ in range(2):
            comm.all_reduce(given, op="avg")  # the second is queued, and asked for in the capture
        stream = cupy.cuda.Stream(non_blocking=True)
        stream.wait_event(recorded(cupy))
        with stream:
            stream.begin_capture(0)  # in CUDA's default mode, as torch captures
            assert comm.all_reduce(given, op="avg", out=out) is out
            graph = stream.end_capture()
        found = []
        for factor in (1, 2):
            given[:] = cupy.asarray(arrays[rank] * factor)
            stream.wait_event(recorded(cupy))
            together.wait()
            graph.launch(stream)
            stream.synchronize()
            found.append(out.get())
        found.append(comm.all_reduce(given, op="avg").get())
        with stream:
            stream.begin_capture()
            try:
                comm.all_gather(given)
            except UsageError as error:
                refused.append(str(error))
        return found, refused

    found = outcome(run_engine(cupy, 2, task, timeout=40.0))
    with Communicator(forest_plan(2, "allreduce", "binary")) as comm:
        wanted = [comm.all_reduce([one * factor for one in arrays], op="avg")[0] for factor in (1, 2, 2)]
    for results, refused in found:
        assert [one.tobytes() for one in results] == [one.tobytes() for one in wanted]
        assert "a graph can capture an allreduce, reduce or reduce_scatter" in refused[0]


def recorded(cupy: Any) -> Any:
    """An event behind what the current stream was told."""
    event = cupy.cuda.Event(disable_timing=True)
    event.record()
    return event


def test_all_ranks_refuse_an_unavailable_engine(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus = 2
    found = run_engine(cupy, 2, about_engine, engine="windows")
    assert [type(one) for one in found] == [UsageError] * 2
    assert len({str(one) for one in found}) == 1
    assert "cannot be had: no windows: rank 0: NCCL has no windows" in str(found[0])
    machine.peers, machine.room = True, 1 << 20
    found = run_engine(cupy, 2, about_engine, engine="windows")
    assert len({str(one) for one in found}) == 1
    assert "free on its GPU, and a region takes" in str(found[0])
    found = run_engine(cupy, 2, about_engine, engine="threads")
    assert "the engine 'threads' is unknown; use auto, windows or messages" in str(found[0])


@pytest.mark.parametrize("far", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_lost_stores(machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch, far: int) -> None:
    """Copies through the host may get through where stores of a kernel do not: rank 1's stores to one rank are lost."""
    machine.gpus, machine.peers = 3, True
    genuine = device_arenas.CudaArenas._reach

    def elsewhere(mapped: Any, given: Any) -> list[int]:
        seen = genuine(mapped, given)
        if machine.device == 1:
            seen[far] = machine.allocate(1 << 10)
        return seen

    monkeypatch.setattr(device_arenas.CudaArenas, "_reach", elsewhere)
    monkeypatch.setattr(device_arenas, "TRIAL_SECONDS", 0.5)
    said = outcome(run_engine(cupy, 3, about_engine))
    assert len(set(said)) == 1
    assert said[0].endswith(
        f"; and rank {far}: its GPU sees no flag from the GPU of rank 1, whose stores it should see"
    )
    assert len(machine.memory) == 1  # what rank 1 has beside its arena


def test_a_failed_trial_ends_all(machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.gpus, machine.peers = 3, True
    genuine = device_arenas.PeerTrial.run

    def fails(trial: Any, flags: Any, seconds: float) -> None:
        if machine.device == 1:
            raise UsageError("cannot launch")
        genuine(trial, flags, seconds)

    monkeypatch.setattr(device_arenas.PeerTrial, "run", fails)
    said = outcome(run_engine(cupy, 3, about_engine))
    assert set(said) == {said[0]}
    assert said[0].endswith("; and rank 1: cannot launch")
    assert machine.memory == {}  # no kernel may write there any more


def test_ranks_that_want_different_engines_are_told_so(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus, machine.peers = 2, True
    found = run_engine(cupy, 2, about_engine, engine=["messages", "auto"])
    assert [type(one) for one in found] == [UsageError] * 2
    assert re.search("got 'auto' .* on rank 1 and 'messages'", str(found[0]))
    plan = forest_plan(2, "allreduce", "binary")
    found = on_every_rank(cupy, plan, about_engine, region_bytes=[1 << 20, 1 << 21])
    assert re.search("got 'auto' and 2097152 bytes for it on rank 1 and 'auto' and", str(found[1]))
    found = on_every_rank(cupy, plan, about_engine, region_bytes=1000)
    assert "must be a multiple of 512" in str(found[0])


def test_messages_are_used_without_room(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus, machine.peers = 2, True
    assert outcome(run_engine(cupy, 2, about_engine, engine="messages")) == ["messages"] * 2
    arrays = floats(2, LONG)

    def task(comm: Communicator, rank: int) -> Any:
        return comm.all_reduce(cupy.asarray(arrays[rank])).get()

    plan = forest_plan(2, "allreduce", "binary")
    found = outcome(on_every_rank(cupy, plan, task, region_bytes=1 << 18))
    refused = on_every_rank(cupy, plan, task, region_bytes=1 << 18, engine="windows")
    assert all("too large for a region of 256KB" in str(one) for one in refused)
    assert all(np.array_equal(one, arrays[0] + arrays[1]) for one in found)
    outcome(
        on_every_rank(cupy, plan, task, region_bytes=1 << 16)
    )  # no room for the inbox of small ones either
    assert not any(name.startswith("forest") for name in machine.compiled)


@pytest.mark.parametrize("length", [24, pytest.param(LONG, marks=pytest.mark.thorough)])
def test_a_rank_that_does_not_launch_is_named(machine: Machine, cupy: ModuleType, length: int) -> None:
    """Its own agreement fails first; so one is made to end between that and its kernel."""
    machine.gpus, machine.peers = 3, True
    arrays = floats(3, length)

    def task(comm: Communicator, rank: int) -> Any:
        comm.all_reduce(cupy.asarray(arrays[rank]))
        backend: Any = comm._open().backend
        if rank == 1:
            backend._engine.queue = lambda *_, **__: (_ for _ in ()).throw(
                RuntimeError("the GPU fell off the bus")
            )
        comm.all_reduce(cupy.asarray(arrays[rank]))

    found = run_engine(cupy, 3, task, timeout=15.0)
    assert all(isinstance(one, BackendError) for one in found)
    assert all(one.rank == 1 and "fell off the bus" in str(one) for one in found), found


@pytest.mark.thorough
def test_a_kernel_that_the_host_has_forgotten_ends_by_itself(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus, machine.peers = 2, True
    arrays = floats(2, LONG)
    gone = threading.Event()

    def task(comm: Communicator, rank: int) -> Any:
        comm.all_reduce(cupy.asarray(arrays[rank]))
        backend: Any = comm._open().backend
        if rank == 1:
            backend._engine.queue = lambda *_: None  # a TypeError
        else:
            backend._guard.attend = lambda *_: None
        try:
            comm.all_reduce(cupy.asarray(arrays[rank]))
        finally:
            gone.set()

    found = run_engine(cupy, 2, task, timeout=4.0)
    assert isinstance(found[0], BackendError)
    # under load the report of rank 1 may come first
    assert re.search("the kernel waited 8 s for rank 1|rank 1: the GPU failed: TypeError", str(found[0]))


def test_steps_fail_on_all_ranks_alike() -> None:
    class Alone:
        def texts(self, text: str, *, timeout: float) -> list[str]:
            return [text, '{"failed": "no room"}'] if "given" in text else [text, "{}"]

    steps = AgreedSteps(Alone(), timeout=5.0)  # type: ignore[arg-type]
    with pytest.raises(AgreedStepFailed, match="rank 1: no room"):
        steps.take(lambda: 7)


def test_groups_of_a_mesh_have_arenas_of_their_own(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus, machine.peers = 4, True
    mesh = topoplan.plan_mesh(topoplan.load("dgx-1v"), {"dp": 2, "tp": 2}, gpus=[0, 1, 2, 3])

    def task(comm: Communicator, rank: int) -> Any:
        with comm.split(mesh, "dp") as group:
            assert about_engine(group, rank).startswith("windows over peer access")
            return group.all_reduce(cupy.asarray(np.full(5, rank + 1.0))).get().tolist()

    assert outcome(run_engine(cupy, 4, task, timeout=40.0)) == [[4.0] * 5, [6.0] * 5] * 2


def about(comm: Communicator, rank: int) -> tuple[str, tuple[int, ...]]:
    """Return a rank's description of its engine, and how it finds arenas."""
    backend: Any = comm._open().backend
    engine = backend._engine
    return backend.about_engine, () if engine is None else tuple(map(bool, engine.region.addresses))


def run(cupy: ModuleType, size: int, task: Any, collective: str = "allreduce", **options: Any) -> list[Any]:
    plan = forest_plan(size, collective, "binary")
    return on_every_rank(cupy, plan, task, **{"region_bytes": REGION, **options})


def said(cupy: ModuleType, size: int, **options: Any) -> str:
    """Return the description of the engine, the same on all ranks."""
    found = {one for one, _ in outcome(run(cupy, size, about, **options))}
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize("windows", [False, True])
def test_ranks_reach_arenas_of_their_host(pairs: Machine, cupy: ModuleType, windows: bool) -> None:
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
def test_hosts_exchange_messages(pairs: Machine, cupy: ModuleType, collective: str, length: int) -> None:
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


def test_processes_that_share_a_gpu(
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


def test_streams_of_a_shared_gpu(machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_library_without_windows_is_named(
    machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.gpus, machine.peers = 2, True
    monkeypatch.setattr(fake_nccl, "VERSION", (2, 29, 3))
    assert said(cupy, 2) == (
        "windows over peer access (windows need NCCL 2.29.7 or newer, and rank 0 has 2.29.3 by nccl4py for 2.32.3, "
        "/fake/libnccl.so.2)"
    )


def test_windows_of_an_nccl_older_than_its_bindings(machine: Machine, cupy: ModuleType) -> None:
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


def test_without_windows_the_versions_are_named(machine: Machine, cupy: ModuleType) -> None:
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


def test_no_multicast_address(machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
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


COLLECTIVES = ("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "collective"), [*(("v100x4", one) for one in COLLECTIVES), ("dgx-h100", "allreduce")]
)
def test_steps_are_those_of_the_kernel(name: str, collective: str) -> None:
    """Every plan with a kernel."""
    for plan in candidates(topoplan.load(name), collective)[0]:
        if not plan.exchanges:
            check_steps(plan)


def check_steps(plan: Plan) -> None:
    """Rank by rank the same edges in and out, and small collectives go in packets where the kernel has an order."""
    key = PlanKey(plan.digest, plan)
    modelled = window_engine.kernel_steps(dataflow(plan))
    arrivals, departures = modelled.arrivals[:, 0].tolist(), modelled.departures[:, 0].tolist()
    kernel = tree_steps.steps_of(key).steps
    assert Counter(zip(modelled.rank.tolist(), arrivals, departures, strict=True)) == Counter(
        (step.rank, len(step.arrivals), len(step.departures)) for step in kernel
    ), plan
    small = window_engine.WindowsClock(plan, window_engine.HOPPER).packets_to > 0
    assert small == (tree_steps.order_of(key) is not None), plan


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", ["trees", "ring"])
@pytest.mark.parametrize("blocks", [1, 5, 24, 48])
@pytest.mark.parametrize("nbytes", [1 << 12, 1 << 20, 1 << 24, 1 << 28])
def test_parts_and_chunks_are_those_of_the_kernel(schedule: str, blocks: int, nbytes: int) -> None:
    """The chunk of the longest shard to 16 elements, which depends on the numbers of parts and of their pieces."""
    machine = topoplan.load("v100x4")
    plan = (
        topoplan.ring_plan(machine, "allreduce")
        if schedule == "ring"
        else topoplan.plan(machine, "allreduce")
    )
    count = nbytes // 4
    table = lower(plan, count, chunk_elements=SLOT_BYTES // 4)
    made = kernel_program.KernelPlan(PlanKey(plan.digest, plan), base=0, stride=SLOT_BYTES, blocks=blocks)
    array = np.zeros(0)
    block = result_blocks("allreduce", None, 4, count)[0]
    steps = made.tables(table, RankArrays(0, (0, count), array, block, array), 4).phases[0].steps
    clock = window_engine.WindowsClock(plan, window_engine.HOPPER)
    used = min(blocks, window_engine.most_blocks(nbytes))
    _, chunk = clock.times(nbytes, np.array([used]), np.array([SLOT_BYTES]))
    assert set(steps["parts"].tolist()) == {made.wanted_parts(used)}
    longest = min(int(steps["chunk"].max()), int(np.diff(table.bounds).max()))
    assert 4 * longest == pytest.approx(chunk[0], abs=2 * 64)


def test_slots_are_halved_while_too_few_parts_fit() -> None:
    """Of 8 ranks, each with 14 edges of three slots in its arena, 48 blocks want 24 parts."""
    plan = topoplan.plan(topoplan.load("dgx-h100"), "allreduce")
    key = PlanKey(plan.digest, plan)
    made = [
        kernel_program.KernelPlan(key, base=0, stride=SLOT_BYTES, blocks=48, room=room << 20)
        for room in (256, 64, 32, 8)
    ]
    assert [(one.stride >> 10, one.parts) for one in made] == [(128, 24), (64, 24), (32, 24), (32, 6)]
    assert all(one.nbytes <= room << 20 for one, room in zip(made, (256, 64, 32, 8), strict=True))


@pytest.mark.parametrize(("nbytes", "busiest"), [(64 << 10, 1), (1 << 20, 8), (1 << 24, 14)])
def test_blocks_share_the_chunks_and_not_the_parts(nbytes: int, busiest: int) -> None:
    """The parts of a short buffer have no chunks but one, and steps without any are left out."""
    plan = topoplan.plan(topoplan.load("dgx-h100"), "allreduce")
    made = kernel_program.KernelPlan(PlanKey(plan.digest, plan), base=0, stride=SLOT_BYTES, blocks=24)
    table = lower(plan, nbytes // 4, chunk_elements=SLOT_BYTES // 4)
    block = RankArrays(0, (0, nbytes // 4), np.zeros(0), (0, nbytes // 4), np.zeros(0))
    phase = made.tables(table, block, 4).phases[0]
    assert phase.steps["chunks"].all()
    assert max(part["chunks"].sum() for part in np.split(phase.steps, phase.blocks[1:-1])) == busiest

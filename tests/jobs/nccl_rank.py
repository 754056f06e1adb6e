"""One rank of an nccl communicator in a process of its own: ``python -m tests.jobs.nccl_rank check,close``.

Its place comes from the environment (see `NcclBackend.from_environment`); ``GRAPHS``, ``ENGINE``, ``EXACT``,
``CHUNK``, ``COUNTS`` (of elements, for ``check``), ``MACHINE`` and ``WAIT_SECONDS`` choose settings. The tasks are
done one after another. Each rank prints its engine first, and a line for each task that ended well. ``refuse`` and
``die`` come after calls whose graph was captured and replayed, and print in how many seconds the error came; ``die-
inside`` and ``die-running`` kill the last rank while kernels of the others wait for it. The communicator is unusable
after these. ``shrink`` and ``leave`` come after replayed calls too: the last rank is killed, or left out and added
again, and the others continue, and print how and in how many seconds.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from threading import Timer
from typing import Any

import numpy as np

import topoplan
from collectives import Communicator
from collectives.backends.nccl.nccl_backend import NcclBackend
from tests.gpu_report import LIMIT, print_stacks_before_the_limit
from tests.support.checkout import ROOT
from topoplan.errors import TopoplanError
from topoplan.machine.variants import with_all_capabilities

COUNTS = tuple(int(count) for count in os.environ.get("COUNTS", "0 7 1000003").split())
SIZES = tuple(1 << shift for shift in range(10, 31, 2))  # bytes of the messages whose rates are compared
AFTERWARDS = (0, 7, 100_003)  # elements of collectives, before a rank is lost and behind
REPLAYED = 1 << 20  # elements of an array whose collective is captured and replayed
ROUNDS = 4  # the first call runs step by step, the second is captured, the rest are replayed


def start(
    ranks: int, task: str, *, port: int, timeout: float = 120.0, **settings: object
) -> tuple[bool, str]:
    """Start all ranks on this machine; whether all ended well, and what they printed."""
    environment = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        **{name.upper(): str(value) for name, value in settings.items()},
        LIMIT: str(timeout),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.jobs.nccl_rank", task],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    end = time.monotonic() + timeout
    texts = []
    for process in processes:
        try:
            texts.append(process.communicate(timeout=max(0.1, end - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            process.kill()
            texts.append(process.communicate()[0] + "killed: it took too long\n")
    return all(process.returncode == 0 for process in processes), "".join(texts)


def refused_by_nccl(text: str) -> str | None:
    """The line in which NCCL says that it does not put several ranks on one GPU, where there is one."""
    told = ("Multiple Ranks are using the same GPU", "Duplicate GPU detected")
    return next((line.strip() for line in text.splitlines() if any(one in line for one in told)), None)


def main() -> None:
    print_stacks_before_the_limit()
    options: dict[str, Any] = {
        "graphs": os.environ.get("GRAPHS", "1") == "1",
        "engine": os.environ.get("ENGINE", "messages"),
        "exact": os.environ.get("EXACT", "1") == "1",
    }
    timeout = float(os.environ.get("WAIT_SECONDS", "30"))
    backend = NcclBackend.from_environment(timeout=timeout, **options)
    gpus = list(range(backend.size))
    plan = topoplan.plan(machine(os.environ.get("MACHINE", "dgx-1v")), "allreduce", gpus=gpus)
    comm = Communicator(plan, backend, chunk_bytes=int(os.environ.get("CHUNK", 1 << 20)), timeout=timeout)
    try:
        say(f"rank {backend.rank}: engine: {comm.engine}")
        for task in sys.argv[1].split(","):
            TASKS[task](comm, backend.rank)
    finally:
        comm.close()


def machine(name: str) -> topoplan.Topology:
    """Return a machine of the library or, for "probed", this one; its switches reduce and multicast if they can."""
    return with_all_capabilities(topoplan.probe() if name == "probed" else topoplan.load(name))


def say(text: str) -> None:
    """Print a line at once and as a whole."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def methods(comm: Communicator) -> dict[str, Callable[..., Any]]:
    """The five collectives by their names in plans."""
    return {
        "allreduce": comm.all_reduce,
        "broadcast": comm.broadcast,
        "reduce": comm.reduce,
        "allgather": comm.all_gather,
        "reduce_scatter": comm.reduce_scatter,
    }


def check(comm: Communicator, rank: int, counts: tuple[int, ...] = COUNTS) -> None:
    """Every collective has the bits of the loopback on numpy arrays, over and over, and so as a graph too."""
    import cupy

    with Communicator(comm.plan) as reference:
        for name, method in methods(comm).items():
            plain = methods(reference)[name]
            for count in counts:
                size = -(-count // comm.size) * comm.size
                generator = np.random.default_rng(count)
                rounds = [
                    [generator.standard_normal(size).astype(np.float32) for _ in range(comm.size)]
                    for _ in range(ROUNDS)
                ]
                given, out = cupy.zeros(size, dtype=np.float32), None
                for arrays in rounds:
                    if size:  # of nothing nobody would wait for the copy, and the array goes
                        given.set(arrays[rank])
                    out = method(given, out=out)
                    wanted = plain(arrays)[rank]
                    assert (out is None) == (wanted is None)
                    if out is not None:
                        assert out.get().tobytes() == wanted.tobytes(), f"{name} of {count} differs"
    say(f"rank {rank}: check: ok")


def sparse(comm: Communicator, rank: int, size: int = 300_007) -> None:
    """The sparse allreduce by each exchange has the bits of numpy arrays, three steps with their residuals."""
    import cupy

    with Communicator(comm.plan) as reference:
        for exchange in ("dense", "pairs", "tree", "balanced"):
            how: dict[str, Any] = {"density": 0.01, "exchange": exchange, "key": exchange}
            for step in range(3):
                generator = np.random.default_rng(step)
                arrays = [generator.standard_normal(size).astype(np.float32) for _ in range(comm.size)]
                found = comm.sparse_all_reduce(cupy.asarray(arrays[rank]), **how)
                wanted = reference.sparse_all_reduce(arrays, **how)[rank]
                assert found.get().tobytes() == wanted.tobytes(), f"{exchange}, step {step} differs"
    say(f"rank {rank}: sparse: ok")


def allreduce(comm: Communicator, rank: int, count: int = 1 << 24) -> None:
    """Sums are those of ncclAllReduce: of integers the same, of floats within the bound of another order."""
    import cupy

    with _rival(cupy, comm, rank) as rival:
        _compare(cupy, comm, rank, rival, count)


def _compare(cupy: Any, comm: Communicator, rank: int, rival: Callable[[Any], Any], count: int) -> None:
    generator = np.random.default_rng(rank)
    whole = cupy.asarray(generator.integers(-(2**31), 2**31, count, dtype=np.int32))
    line = generator.standard_normal(count).astype(np.float32)
    given = cupy.asarray(line)
    assert comm.all_reduce(whole).get().tobytes() == rival(whole).get().tobytes(), "sums of int32 differ"
    found, other = comm.all_reduce(given).get(), rival(given).get()
    most = comm.all_reduce(cupy.asarray(np.abs(line))).get()
    bound = 2 * comm.size * np.finfo(np.float32).eps * most
    assert (np.abs(found - other) <= bound).all(), "sums of float32 differ by more than their order explains"
    out = cupy.empty(given.shape, dtype=given.dtype)
    own, theirs = (_median(call) for call in (lambda: _reduced(comm, given, out), lambda: rival(given)))
    if rank == 0:
        say(
            f"rank 0: allreduce: int32 as ncclAllReduce, float32 within rounding; {count >> 18} MB in {own * 1e3:.2f} "
            f"ms, {own / theirs:.2f} times ncclAllReduce's {theirs * 1e3:.2f} ms"
        )


@contextmanager
def _rival(cupy: Any, comm: Communicator, rank: int) -> Iterator[Callable[[Any], Any]]:
    """NCCL's own allreduce of an array among the same ranks, ended when it returns."""
    from collectives.backends.nccl.nccl_library import find_library

    library = find_library()
    said = np.zeros(128, dtype=np.uint8)
    if rank == 0:
        said = np.frombuffer(library.unique_id(), dtype=np.uint8)
    unique_id = comm.broadcast(cupy.asarray(said), root=0).get().tobytes()
    stream = cupy.cuda.Stream(non_blocking=True)
    core, bindings = import_module("nccl.core"), import_module("nccl.bindings.nccl")
    made = core.Communicator.init(comm.size, rank, core.UniqueId.from_bytes(unique_id))
    numbers = {"int32": int(core.INT32), "float32": int(core.FLOAT32)}

    def queue(given: Any, out: Any) -> None:
        kind, handle = numbers[given.dtype.name], bindings.Comm(made.ptr)
        bindings.all_reduce(given.data.ptr, out.data.ptr, given.size, kind, int(core.SUM), handle, stream.ptr)

    def reduced(given: Any) -> Any:
        out = cupy.empty(given.shape, dtype=given.dtype)
        cupy.cuda.get_current_stream().synchronize()
        queue(given, out)
        stream.synchronize()
        return out

    yield reduced
    made.destroy()


def measure(comm: Communicator, rank: int) -> None:
    """Rank 0 prints lines of megabytes and seconds of an allreduce."""
    import cupy

    for megabytes in (1, 16, 256):
        given = cupy.full(megabytes << 18, rank + 1, dtype=np.float32)
        out = cupy.empty(given.shape, dtype=given.dtype)
        seconds = _median(lambda given=given, out=out: _reduced(comm, given, out))
        if rank == 0:
            say(f"{megabytes} {seconds}")


def _reduced(comm: Communicator, given: Any, out: Any) -> None:
    """Run an allreduce to its end on the GPU."""
    comm.all_reduce(given, out=out)
    comm.synchronize()


def queue(comm: Communicator, rank: int, calls: int = 40) -> None:
    """The last rank begins when the others have queued their calls; rank 0 prints the host's time for one of them."""
    import cupy

    last, out = comm.size - 1, cupy.empty(16, dtype=np.float32)
    given = cupy.asarray(np.full(16, 2, np.float32))
    for _ in range(ROUNDS):
        _reduced(comm, given, out)
    given[:] = np.float32(1)
    if rank == last:
        time.sleep(0.5)
    started = time.perf_counter()
    for _ in range(calls):
        comm.all_reduce(given, out=out)
    host = time.perf_counter() - started
    assert out.get().tolist() == [comm.size] * 16
    whole = time.perf_counter() - started
    assert rank == last or host < 0.4 < whole, f"{calls} calls held the host {host:.3f} of {whole:.3f} s"
    say(f"rank {rank}: queue: ok, {host / calls * 1e6:.1f} us of the host for a call")


def _median(call: Callable[[], object], runs: int = 10) -> float:
    seconds = []
    for _ in range(3 + runs):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[3:])


def refuse(comm: Communicator, rank: int) -> None:
    """The last rank passes an array that does not fit, after a graph was replayed; every rank raises."""
    given, out = _replayed(comm)
    wrong = np.zeros(given.size, dtype=np.float32) if rank == comm.size - 1 else given
    _raises("refuse", rank, lambda: _reduced(comm, wrong, out))


def die(comm: Communicator, rank: int) -> None:
    """The last rank kills itself after a graph was replayed; every other rank raises."""
    given, out = _replayed(comm)
    if rank == comm.size - 1:
        killed()
    _raises("die", rank, lambda: _reduced(comm, given, out))


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_inside(comm: Communicator, rank: int) -> None:
    """The last rank kills itself instead of launching its kernel, for which those of the others wait."""
    given, out = _replayed(comm)
    if rank == comm.size - 1:
        _engine(comm).queue = lambda *_, **__: killed()
    _raises("die-inside", rank, lambda: _reduced(comm, given + 1, out))


def die_running(comm: Communicator, rank: int) -> None:
    """The last rank kills itself while its kernel runs; every other rank raises."""
    import cupy

    given = cupy.zeros(1 << 26, dtype=np.float32)
    out = cupy.empty(given.shape, dtype=given.dtype)
    comm.all_reduce(given, out=out)
    if rank == comm.size - 1:
        Timer(0.2, killed).start()

    def repeat() -> None:
        for _ in range(1000):
            comm.all_reduce(given, out=out)

    _raises("die-running", rank, repeat)


def _engine(comm: Communicator) -> Any:
    backend: Any = comm._open().backend  # type: ignore[attr-defined]
    assert backend._engine is not None, f"the engine is {comm.engine}"
    return backend._engine


def by_switch(comm: Communicator, rank: int) -> None:
    """Sums that a switch may form: of integers the bits of loopback, of floats within the bound of another order."""
    import cupy

    assert "multicast" in comm.engine, f"the engine is {comm.engine}"
    with Communicator(comm.plan) as reference:
        for count in COUNTS:
            generator = np.random.default_rng(count)
            whole = [generator.integers(-(2**30), 2**30, count, dtype=np.int32) for _ in range(comm.size)]
            line = [generator.standard_normal(count).astype(np.float32) for _ in range(comm.size)]
            found = comm.all_reduce(cupy.asarray(whole[rank])).get()
            assert found.tobytes() == reference.all_reduce(whole)[rank].tobytes(), f"int32 of {count} differs"
            near = comm.all_reduce(cupy.asarray(line[rank])).get()
            bound = 2 * comm.size * np.finfo(np.float32).eps * np.sum(np.abs(line), axis=0)
            assert (np.abs(near - np.sum(line, axis=0)) <= bound).all(), f"float32 of {count} differs"
    say(f"rank {rank}: by-switch: ok, {_stars(comm)} stars")


def _stars(comm: Communicator) -> int:
    """How many trees of the engine's plans a switch reduces or copies; raises if there is none."""
    stars = sum(one[0].stars for one in _engine(comm)._plans.values() if one is not None)
    assert stars, "no switch took part"
    return stars


def rates(comm: Communicator, rank: int) -> None:
    """Rank 0 prints a line for each size: seconds of an allreduce, and of ncclAllReduce."""
    import cupy

    with _rival(cupy, comm, rank) as rival:
        for nbytes in SIZES:
            given = cupy.zeros(nbytes // 4, dtype=np.float32)
            out = cupy.empty(given.shape, dtype=given.dtype)
            own = _median(lambda given=given, out=out: _reduced(comm, given, out))
            theirs = _median(lambda given=given: rival(given))
            if rank == 0:
                say(
                    f"rank 0: rates {nbytes}: {own * 1e6:.1f} us, ncclAllReduce {theirs * 1e6:.1f} us, "
                    f"ratio {own / theirs:.2f}"
                )
    say(f"rank {rank}: rates: ok")


def shrink(comm: Communicator, rank: int) -> None:
    """The last rank kills itself after a graph was replayed; the others go on."""
    given, out = _replayed(comm)
    if rank == comm.size - 1:
        killed()
    started = time.monotonic()
    try:
        _reduced(comm, given, out)
    except TopoplanError:
        _goes_on(comm, "shrink", started, ())
        return
    raise AssertionError(f"rank {rank}: shrink: no error")


def leave(comm: Communicator, rank: int) -> None:
    """The last rank is left out after a graph was replayed, though nothing is amiss; the others go on and let it in."""
    _replayed(comm)
    size = comm.size
    invitation = comm._gather_texts(comm.join_token)[0]
    if rank == size - 1:
        comm.close()
        with Communicator.join(invitation) as again:
            check(again, rank, AFTERWARDS)
        return
    _goes_on(comm, "leave", time.monotonic(), (size - 1,))
    while not comm.grow():
        time.sleep(0.01)
    assert (comm.size, comm.epoch) == (size, 2), f"{comm.size} ranks, epoch {comm.epoch}"
    check(comm, rank, AFTERWARDS)
    say(f"rank {rank}: back: {comm.engine}; {comm.notes[-1]}")


def _goes_on(comm: Communicator, task: str, started: float, without: tuple[int, ...]) -> None:
    """Go on at the first attempt, by what this NCCL can do, with the bits of the loopback."""
    size = comm.size
    comm.shrink(without=without or None)
    seconds = time.monotonic() - started
    assert (comm.size, comm.epoch) == (size - 1, 1), f"{comm.size} ranks, epoch {comm.epoch}"
    backend: Any = comm._open().backend  # type: ignore[attr-defined]
    library, shrunk = backend.library, backend._connection.shrunk
    able = library.shrinks if without else library.revokes
    assert shrunk == able, f"ncclCommShrink was {'' if shrunk else 'not '}used"
    check(comm, comm.rank, AFTERWARDS)
    how = "ncclCommShrink" if shrunk else "a new id"
    say(f"rank {comm.rank}: {task}: {seconds:.3f} s by {how}, {comm.engine}; {comm.notes[-1]}")


def close(comm: Communicator, rank: int) -> None:
    """Print how long closing takes; behind every other task, since it leaves nothing to use."""
    started = time.monotonic()
    comm.close()
    say(f"rank {rank}: close: {time.monotonic() - started:.3f} s")


def graph(comm: Communicator, rank: int) -> None:
    """Leave a graph that was replayed, for `close` to end with."""
    _replayed(comm)
    say(f"rank {rank}: graph: ok")


def _replayed(comm: Communicator) -> tuple[Any, Any]:
    import cupy

    given, out = (cupy.zeros(REPLAYED, dtype=np.float32) for _ in range(2))
    for _ in range(ROUNDS):
        comm.all_reduce(given, out=out)
    return given, out


def _raises(task: str, rank: int, call: Callable[[], object]) -> None:
    started = time.monotonic()
    try:
        call()
    except TopoplanError as error:
        say(f"rank {rank}: {task}: raised after {time.monotonic() - started:.3f} s: {error}")
        for note in getattr(error, "__notes__", ()):  # the page and the flags of a kernel that waited
            say("\n".join(f"rank {rank}: state: {line}" for line in note.splitlines()))
        return
    raise AssertionError(f"rank {rank}: {task}: no error")


TASKS: dict[str, Callable[[Communicator, int], None]] = {
    "check": check,
    "sparse": sparse,
    "allreduce": allreduce,
    "time": measure,
    "refuse": refuse,
    "die": die,
    "die-inside": die_inside,
    "die-running": die_running,
    "by-switch": by_switch,
    "rates": rates,
    "queue": queue,
    "shrink": shrink,
    "leave": leave,
    "graph": graph,
    "close": close,
}
"""What a rank can be told to do."""


if __name__ == "__main__":
    main()

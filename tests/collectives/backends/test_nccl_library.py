"""The door to NCCL: which bindings are taken, what is refused, and that nothing is aborted beside a running call."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from collectives.backends.nccl.nccl_communicators import NcclCommunicators, prepare_library
from collectives.backends.nccl.nccl_library import NcclFailed, describe_library, find_library, loaded_path
from tests.support import fake_nccl
from tests.support.fake_streams import Machine
from tests.support.gpu_ranks import cupy as cupy
from tests.support.gpu_ranks import machine as machine
from topoplan.errors import UsageError


@pytest.fixture
def without_nccl4py(cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nccl.core", None)  # type: ignore[arg-type]


def test_nccl4py_is_taken_where_it_is_else_cupy(cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_library(find_library(cupy)) == "2.30.3 by nccl4py for 2.32.3, /fake/libnccl.so.2"
    assert find_library(cupy, name="cupy").name == "cupy"
    monkeypatch.setitem(sys.modules, "nccl.core", None)  # type: ignore[arg-type]
    assert find_library(cupy).name == "cupy"


def test_nccl4py_without_its_library_is_left(cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(version=SimpleNamespace(major=2, minor=21, micro=5), path="/old/libnccl.so.2")
    for found in (old, None):
        told = SimpleNamespace(libnccl=found, nccl_bindings=SimpleNamespace(major=2, minor=32, micro=3))
        monkeypatch.setattr(sys.modules["nccl.core"], "get_version", lambda told=told: told)
        assert find_library(cupy).name == "cupy"
        with pytest.raises(UsageError, match=r"nccl4py is missing, finds no libnccl, or .* pip install"):
            find_library(cupy, name="nccl4py")


def test_a_missing_library_is_named_with_what_to_install(cupy: ModuleType, without_nccl4py: None) -> None:
    vars(sys.modules["cupy.cuda.nccl"])["available"] = False
    with pytest.raises(
        UsageError, match=r"libnccl\.so\.2.*: pip install nvidia-nccl-cu12 \(or -cu13, as CuPy\)"
    ):
        find_library(cupy)
    with pytest.raises(UsageError, match="bindings of NCCL 'torch' are unknown; use auto, nccl4py or cupy"):
        find_library(cupy, name="torch")


@pytest.mark.parametrize("bindings", ["nccl4py", "cupy"])
def test_an_old_library_is_named(cupy: ModuleType, bindings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS"):
        monkeypatch.setenv(name, "")
    assert prepare_library(cupy, trees=False, ranks_per_gpu=2, bindings=bindings).name == bindings
    vars(sys.modules["cupy.cuda.nccl"])["get_version"] = lambda: 22907
    release = SimpleNamespace(major=2, minor=29, micro=7)
    told = SimpleNamespace(
        libnccl=SimpleNamespace(version=release, path="/old/libnccl.so.2"), nccl_bindings=release
    )
    vars(sys.modules["nccl.core"])["get_version"] = lambda: told
    with pytest.raises(UsageError, match=rf"2 ranks on one GPU need NCCL 2\.30\.3.* 2\.29\.7 by {bindings}"):
        prepare_library(cupy, trees=False, ranks_per_gpu=2, bindings=bindings)


def test_the_path_of_a_loaded_library_is_read_from_the_process() -> None:
    found = loaded_path()
    assert found == "" or (os.path.exists(found) and "libnccl.so" in found)


def test_ids_of_old_and_new_cupy_are_kept(machine: Machine, cupy: ModuleType, without_nccl4py: None) -> None:
    """CuPy has bytes since release 14, before that a tuple of signed numbers."""
    nccl: Any = sys.modules["cupy.cuda.nccl"]
    library = find_library(cupy)
    plain = bytes(range(128, 256))
    signed = tuple(range(-128, 0))
    seen = []

    def new(size: int, unique_id: bytes, rank: int) -> object:
        seen.append(unique_id)
        return object()

    def old(size: int, unique_id: tuple[int, ...], rank: int) -> object:
        if not isinstance(unique_id, tuple):
            raise TypeError("Argument 'commId' has incorrect type")
        return new(size, unique_id, rank)  # type: ignore[arg-type]

    for made, make in ((plain, new), (signed, old)):
        vars(nccl).update(get_unique_id=lambda made=made: made, NcclCommunicator=make)
        assert library.unique_id() == plain
        library.connect(1, 0, plain)
    assert seen == [plain, signed]


def test_an_abort_waits_for_the_call_that_runs_and_refuses_those_that_come_later(cupy: ModuleType) -> None:
    inside, aborted = threading.Event(), []

    class Slow:
        name, version, path, waits = "slow", 23203, "", True

        @contextmanager
        def group(self) -> Iterator[None]:
            inside.set()
            yield
            time.sleep(0.3)
            aborted.append("the call has ended")

    link: Any = SimpleNamespace(abort=lambda: aborted.append("aborted"), ready=lambda: True)
    slow: Any = Slow()
    world: Any = SimpleNamespace(rank=0, size=2)
    connections = NcclCommunicators(slow, cupy, world, device=0, timeout=1.0)
    connections._made.append(link)

    def call() -> None:
        with connections.group():
            pass

    caller = threading.Thread(target=call)
    caller.start()
    inside.wait(5)
    connections.abort()
    assert connections.wait_ended(5)
    caller.join()
    assert aborted == ["the call has ended", "aborted"]
    with pytest.raises(NcclFailed, match="were aborted"):
        call()


def test_the_fake_notices_calls_beside_each_other(machine: Machine, cupy: ModuleType) -> None:
    comm = fake_nccl.Comm(machine, bytes(128), 1, 0)
    comm.begin()
    beside = threading.Thread(target=comm.begin)
    beside.start()
    beside.join()
    assert machine.misuses == ["rank 0: a call beside another thread's"]
    machine.misuses.clear()

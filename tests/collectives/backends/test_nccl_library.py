"""The door to NCCL: which bindings are taken, what is refused, and that nothing is aborted beside a running call."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from collectives.backends.nccl.nccl_communicators import NcclConnection, prepare_library
from collectives.backends.nccl.nccl_library import NcclFailed, describe_library, find_library
from tests.support import fake_nccl
from tests.support.fake_streams import Machine
from tests.support.gpu_ranks import cupy as cupy
from tests.support.gpu_ranks import machine as machine
from topoplan.errors import UsageError


def test_a_missing_or_old_library_is_named_with_what_to_install(
    cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert describe_library(find_library()) == "2.30.3 by nccl4py for 2.32.3, /fake/libnccl.so.2"
    old = SimpleNamespace(version=SimpleNamespace(major=2, minor=21, micro=5), path="/old/libnccl.so.2")
    for found in (old, None):
        told = SimpleNamespace(libnccl=found, nccl_bindings=SimpleNamespace(major=2, minor=32, micro=3))
        monkeypatch.setattr(sys.modules["nccl.core"], "get_version", lambda told=told: told)
        with pytest.raises(UsageError, match=r"needs nccl4py and a libnccl\.so\.2 of 2\.23 .*: pip install"):
            find_library()
    monkeypatch.setitem(sys.modules, "nccl.core", None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"needs nccl4py .*: pip install"):
        find_library()


def test_a_library_too_old_for_several_ranks_on_a_gpu_is_named_with_its_version_and_path(
    cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS"):
        monkeypatch.setenv(name, "")
    assert prepare_library(2).version == 23003
    monkeypatch.setattr(fake_nccl, "VERSION", (2, 29, 7))
    with pytest.raises(UsageError, match=r"2 ranks on one GPU need NCCL 2\.30\.3.* 2\.29\.7 by nccl4py"):
        prepare_library(2)


def test_an_abort_waits_for_the_call_that_runs_and_refuses_those_that_come_later(cupy: ModuleType) -> None:
    inside, aborted = threading.Event(), []

    class Slow:
        version, path, waits = 23203, "", True

        @contextmanager
        def group(self) -> Iterator[None]:
            inside.set()
            yield
            time.sleep(0.3)
            aborted.append("the call has ended")

    link: Any = SimpleNamespace(abort=lambda: aborted.append("aborted"), ready=lambda: True)
    slow: Any = Slow()
    world: Any = SimpleNamespace(rank=0, size=2)
    connection = NcclConnection(slow, cupy, world, device=0, timeout=1.0)
    connection._link = link

    def call() -> None:
        with connection.group():
            pass

    caller = threading.Thread(target=call)
    caller.start()
    inside.wait(5)
    connection.abort()
    assert connection.wait_ended(5)
    caller.join()
    assert aborted == ["the call has ended", "aborted"]
    with pytest.raises(NcclFailed, match="was aborted"):
        call()


def test_the_fake_notices_calls_beside_each_other(machine: Machine, cupy: ModuleType) -> None:
    comm = fake_nccl.Comm(machine, bytes(128), 1, 0)
    comm.begin()
    beside = threading.Thread(target=comm.begin)
    beside.start()
    beside.join()
    assert machine.misuses == ["rank 0: a call beside another thread's"]
    machine.misuses.clear()

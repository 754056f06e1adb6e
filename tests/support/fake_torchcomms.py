"""What torchcomms gives a back end in Python, for ranks that are threads: registry, communicators, reductions.

Names, arguments and their order are those of torchcomms at commit 59426ba; the torchcomms of PyPI has none of them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

METHODS = {
    "all_gather": 3,
    "all_gather_single": 3,
    "all_gather_v": 3,
    "all_reduce": 3,
    "all_to_all": 3,
    "all_to_all_single": 3,
    "all_to_all_v_single": 5,
    "barrier": 1,
    "broadcast": 3,
    "finalize": 0,
    "gather": 4,
    "get_backend_name": 0,
    "get_comm_name": 0,
    "get_rank": 0,
    "get_size": 0,
    "init": 3,
    "recv": 3,
    "reduce": 4,
    "reduce_scatter": 4,
    "reduce_scatter_single": 4,
    "reduce_scatter_v": 4,
    "scatter": 4,
    "send": 3,
    "set_timeout": 1,
    "split": 3,
}
"""The methods of a back end in Python, and how many arguments each gets; `async_op` is the last one of a collective."""

RedOpType = Enum("RedOpType", "SUM PRODUCT MIN MAX BAND BOR BXOR PREMUL_SUM AVG")
ReduceOp = SimpleNamespace(**{kind.name: SimpleNamespace(type=kind) for kind in RedOpType})


class TorchCommBackend:
    """The base class, which has no methods of its own in Python."""


class Comm:
    """A communicator: it calls its back end as torchcomms does."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        assert name in METHODS, f"torchcomms asks no back end for {name}"

        def call(*arguments: Any, async_op: bool = False) -> Any:
            given = (*arguments, async_op) if METHODS[name] == len(arguments) + 1 else arguments
            assert len(given) == METHODS[name], name
            found = getattr(self._backend, name)(*given)
            if async_op:
                found.wait()
            return found

        return call

    def split(self, ranks: Sequence[int], name: str) -> Comm | None:
        options = SimpleNamespace(timeout=timedelta(seconds=60), store=None, hints={})
        found = self._backend.split(list(ranks), name, options)
        return None if found is None else Comm(found)


def install(patch: pytest.MonkeyPatch) -> ModuleType:
    """Make ``import torchcomms`` give the fake; `new_comm` takes the rank and the size besides."""
    registered: dict[str, type] = {}
    lock = threading.Lock()

    def new_comm(kind: str, device: Any, *, name: str, store: Any, rank: int, size: int) -> Comm:
        with lock:  # as torch sets them around the call, in a process for each rank
            os.environ |= {"TORCHCOMM_RANK": str(rank), "TORCHCOMM_SIZE": str(size)}
            backend: Any = registered[kind]()
            del os.environ["TORCHCOMM_RANK"], os.environ["TORCHCOMM_SIZE"]
        backend.init(device, name, SimpleNamespace(timeout=timedelta(seconds=60), store=store, hints={}))
        return Comm(backend)

    made = ModuleType("torchcomms")
    vars(made).update(
        TorchCommBackend=TorchCommBackend,
        register_backend=registered.__setitem__,
        new_comm=new_comm,
        ReduceOp=ReduceOp,
        registered=registered,
    )
    patch.setitem(sys.modules, "torchcomms", made)
    return made

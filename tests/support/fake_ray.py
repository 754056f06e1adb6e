"""What a group of ``ray.util.collective`` needs of Ray, for ranks that are threads: named actors and the base class."""

from __future__ import annotations

import sys
import threading
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ABSTRACT = ("allgather", "allreduce", "barrier", "broadcast", "check_backend_availability", "recv", "reduce")
ABSTRACT += ("reducescatter", "send")
"""Methods that a group must have, sorted."""


class ReduceOp(Enum):
    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3


class BaseGroup:
    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        self.world_size, self.rank, self.group_name = world_size, rank, group_name


class _Actor:
    def __init__(self, instance: Any) -> None:
        self._instance, self._lock = instance, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            with self._lock:
                return getattr(self._instance, name)(*arguments)

        return SimpleNamespace(remote=call)


def install(patch: pytest.MonkeyPatch, nodes: int = 1) -> dict[str, type]:
    """Make ``import ray`` give the fake, with the threads on so many nodes; return what is registered, by name."""
    registered: dict[str, type] = {}
    actors: dict[str, _Actor] = {}
    lock, threads = threading.Lock(), dict[int, int]()

    def node() -> str:
        with lock:
            return str(threads.setdefault(threading.get_ident(), len(threads)) % nodes)

    def remote(**_: Any) -> Any:
        def named(cls: type) -> Any:
            def options(*, name: str, get_if_exists: bool) -> Any:
                assert get_if_exists

                def make() -> _Actor:
                    with lock:
                        return actors.setdefault(name, _Actor(cls()))

                return SimpleNamespace(remote=make)

            return SimpleNamespace(options=options)

        return named

    contents: dict[str, dict[str, Any]] = {
        "ray": {
            "remote": remote,
            "get": lambda value: value,
            "get_runtime_context": lambda: SimpleNamespace(get_node_id=node),
        },
        "ray.util": {"get_node_ip_address": lambda: "127.0.0.1"},
        "ray.util.collective": {},
        "ray.util.collective.backend_registry": {
            "register_collective_backend": lambda name, cls: registered.update({name.upper(): cls})
        },
        "ray.util.collective.types": {"ReduceOp": ReduceOp},
        "ray.util.collective.collective_group": {},
        "ray.util.collective.collective_group.base_collective_group": {"BaseGroup": BaseGroup},
    }
    made = {name: ModuleType(name) for name in contents}
    for name, module in made.items():
        vars(module).update(contents[name])
        above, _, own = name.rpartition(".")
        if above:
            setattr(made[above], own, module)
        patch.setitem(sys.modules, name, module)
    return registered

"""The group of Ray: every method on threads with a stand-in of Ray, and in actors where Ray is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from collectives.training import ray_group
from tests.jobs.ray_actors import PLAN, SIZE, exercise, expected, options
from tests.support import fake_ray
from tests.support.checkout import ROOT
from topoplan.errors import UsageError


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> dict[str, type]:
    """Return what is registered with the stand-in, by name; its parameter is the number of nodes."""
    return fake_ray.install(monkeypatch, nodes=getattr(request, "param", 1))


def run(made: type, rank: int) -> tuple[dict[str, Any], str]:
    for _ in range(2):  # the second group has the name of the first, which has ended
        found, kind = once(made(SIZE, rank, "first"), rank)
    return found, kind


def once(group: Any, rank: int) -> tuple[dict[str, Any], str]:
    op = fake_ray.ReduceOp.SUM

    def call(what: str, *given: Any) -> None:
        """As ``ray.util.collective`` calls a group."""
        lists = [[one] for one in given[: 2 if what in ("allgather", "reducescatter") else 1]]
        if what in ("broadcast", "reduce"):
            group_options = options(root_rank=given[1], reduceOp=op)
        elif what in ("send", "recv"):
            group_options = options(**{f"{'dst' if what == 'send' else 'src'}_rank": given[1]})
        else:
            group_options = options(reduceOp=op)
        getattr(group, what)(*lists, group_options)

    found = exercise(call, rank)
    kind = group.communicator.backend
    group.destroy_group()
    return found, kind


@pytest.mark.parametrize(
    ("registered", "backend", "runs"),
    [(1, "auto", "shared"), (2, "auto", "tcp"), (1, "tcp", "tcp")],
    indirect=["registered"],
)
def test_every_method_of_a_group_gives_what_ray_s_groups_give(
    registered: dict[str, type], backend: str, runs: str
) -> None:
    ray_group.register(PLAN, backend=backend)
    made = registered["TOPOPLAN"]
    assert (made.backend(), made.check_backend_availability()) == ("TOPOPLAN", True)  # type: ignore[attr-defined]
    with ThreadPoolExecutor(SIZE) as pool:
        ended = list(pool.map(lambda rank: run(made, rank), range(SIZE)))
    for rank, (found, kind) in enumerate(ended):
        assert kind == runs
        assert "rank 1 runs another collective: count 4 instead of 3" in found.pop("refused")
        assert found == expected(rank)


def test_wrong_arguments_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, words in (({"backend": "gloo"}, "auto, shared or tcp"), ({"timeout": 0}, "above 0 s")):
        with pytest.raises(UsageError, match=words):
            ray_group.register(PLAN, **given)
    ones = np.ones(3, np.float32)
    fixed = ones.copy()
    fixed.flags.writeable = False
    for call, words in (
        (lambda: ray_group._only([ones, ones]), "must give 1 tensor, got 2"),
        (lambda: ray_group._only([fixed], filled=True), "must be writable"),
        (lambda: ray_group._blocks([[ones]], 4, ones), "must hold 4 tensors, one of each rank, got 1"),
        (lambda: ray_group._blocks([[ones, ones[:2]]], 2, ones), "tensor 1 .* 3 elements of float32, got 2"),
        (lambda: ray_group._only([None]), "must be numpy arrays or tensors of torch"),
    ):
        with pytest.raises(UsageError, match=words):
            call()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"groups of Ray need Ray .*: pip install"):
        ray_group.register(PLAN)


needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="in actors of Ray: pip install ray")


@needs_ray
@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["auto", "tcp"])
def test_actors_of_ray_get_the_same(backend: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.jobs.ray_actors", backend],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for rank, found in enumerate(json.loads(done.stdout.splitlines()[-1])):
        assert "rank 1 runs another collective" in found.pop("refused")
        assert found == expected(rank)


@needs_ray
def test_the_stand_in_has_the_methods_and_operations_of_ray() -> None:
    from ray.util.collective.collective_group.base_collective_group import BaseGroup
    from ray.util.collective.types import ReduceOp

    assert tuple(sorted(BaseGroup.__abstractmethods__)) == fake_ray.ABSTRACT
    assert {one.name: one.value for one in ReduceOp} == {one.name: one.value for one in fake_ray.ReduceOp}

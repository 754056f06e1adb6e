"""Wrong arguments at everything that the packages export are refused in one line, and no error of Python is raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import topoplan
from collectives import Communicator, lower, rank_part
from tests.support.odd_arguments import ODD, Doors
from topoplan.errors import UsageError
from topoplan.units import bus_factor

MACHINE = topoplan.load("v100x4")
MODULES = ("topoplan", "collectives", *(["collectives.torch"] if find_spec("torch") else []))


@contextmanager
def a_group_of_one() -> Iterator[None]:
    """The process group that exports of torch ask for."""
    if not find_spec("torch"):
        yield
        return
    dist = import_module("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("share", [len(ODD), pytest.param(1, marks=pytest.mark.thorough)])
def test_no_door_raises_a_raw_error(share: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each parameter of each export once, and with every wrong argument in the thorough run."""
    with a_group_of_one():
        exports = Doors(tmp_path)
        for module in MODULES:
            exports.walk(import_module(module), share)
    assert exports.calls > 300
    assert exports.raw == []
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_the_walk_finds_what_a_door_without_an_entry_raises(tmp_path: Path) -> None:
    """An inner function as a export is caught, and one that checks is not."""
    module = ModuleType("walked")
    vars(module).update(__all__=["inner", "checked"], inner=bus_factor, checked=topoplan.load_plan)
    exports = Doors(tmp_path)
    exports.walk(module, 1)
    assert {one.split("(")[0] for one in exports.raw} == {"inner"}


def test_results_of_planning_are_shown_in_one_line() -> None:
    """A cluster of 1,024 GPUs had 14,000 characters."""
    cluster = topoplan.cluster_by_kind(
        [topoplan.Server("dgx-h100", count=128)], nic_gbps=400, nic_access="direct"
    )
    plan = topoplan.plan_by_kind(cluster, "all_reduce")
    mesh = topoplan.plan_mesh("v100x4", {"dp": 2, "tp": 2})
    assert repr(cluster) == "<ClusterByKind 128 x dgx-h100, 128 servers of 1 kind, 1024 GPUs>"
    assert repr(plan) == "<PlanByKind all_reduce, 1024 ranks, 201.575 GB/s (optimal)>"
    assert repr(mesh) == "<MeshPlans dp 2 x tp 2, 4 groups, 25 GB/s (optimal)>"
    assert repr(rank_part(plan, 3)).startswith("<RankPart of rank 3, 1024 ranks, ")
    small = topoplan.plan("v100x4")
    shown = (lower(small, 64, chunk_elements=16), topoplan.verify(small), topoplan.simulate(small, "1MB"))
    assert all(len(repr(one)) < 300 for one in shown)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: MACHINE.degrade_links("gpu0-gpu3=5"),
            "speeds must be GB/s by link, got 'gpu0-gpu3=5'; write {",
        ),
        (
            lambda: MACHINE.degrade_links({"gpu0-gpu3": "5"}),
            "gpu0-gpu3: '5' is not a bandwidth in GB/s above zero",
        ),
        (
            lambda: MACHINE.remove_links([5]),
            r"links must be a sequence of names, got \[5\]; write \['gpu0-gpu3'\]",
        ),
        (lambda: MACHINE.remove_links("gpu0-gpu1"), "links must be a sequence of names, got 'gpu0-gpu1'"),
        (
            lambda: topoplan.plan_mesh(MACHINE, [2, 2]),
            r"mesh must be of type Mapping, got \[2, 2\]; write {'dp'",
        ),
        (
            lambda: topoplan.plan_mesh(MACHINE, {"dp": 4.0}),
            r"axis dp has extent 4\.0; extents are whole numbers",
        ),
        (
            lambda: topoplan.explain(None, MACHINE),
            "log must be of type str or PathLike, got None; give a file",
        ),
        (lambda: topoplan.replan("p"), "plan must be of type Plan, got 'p'; read a file by load_plan"),
        (lambda: topoplan.plan(MACHINE, tolerance="x"), "tolerance 'x' must be a part of the bound"),
        (lambda: topoplan.sparse_plan(MACHINE, density="1%"), "a density of '1%' is not above 0"),
        (lambda: topoplan.plan_by_size(MACHINE, sizes=[1.5]), "a size must be a whole number of bytes"),
        (
            lambda: topoplan.plan_by_size(MACHINE, sizes=5),
            "sizes must be of type Iterable, got 5; give numbers",
        ),
        (
            lambda: topoplan.lowest_tree(MACHINE, channels=["nvlink"]),
            r"channels \['nvlink'\] is unknown; use one of",
        ),
        (
            lambda: topoplan.cluster(["v100x4"] * 2, network="cables", cables=[5]),
            "a cable must be of type Cable, got 5; write Cable",
        ),
        (
            lambda: Communicator(topoplan.plan(MACHINE), backend=5, engine="windows"),
            "backend must be of type str or Backend, got 5",
        ),
        (lambda: topoplan.load_plan(5), "path must be of type str or PathLike, got 5; give a plan file"),
        (
            lambda: Communicator(topoplan.plan(MACHINE), timeout="x"),
            "timeout must be above 0 and at most .*, got 'x'",
        ),
    ],
)
def test_a_wrong_argument_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()


@pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
def test_a_hook_names_its_wrong_timeout() -> None:
    with (
        a_group_of_one(),
        pytest.raises(UsageError, match=r"timeout must be above 0 and at most .*, got 'x'"),
    ):
        import_module("collectives.torch").HookState(timeout="x")

"""The process group "topoplan": how torch finds it, and which face it has."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.checkout import ROOT

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
dist = torch.distributed

GROUP = "torch.distributed.backends"


def test_the_entry_point_names_what_registers_the_back_end() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["entry-points"][GROUP]["topoplan"].partition(":")
    getattr(import_module(module), name)()
    assert dist.is_backend_available("topoplan")
    assert dist.Backend.backend_capability["topoplan"] == ["cpu", "cuda"]


def test_a_group_is_its_own_back_end_where_python_cannot_define_one() -> None:
    from collectives.torch import ProcessGroupTopoplan
    from collectives.torch.process_group import PlannedBackend, PlannedProcessGroup, make_back_end

    options = dist.distributed_c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = dist.HashStore(), 0, 1
    made = make_back_end(options)
    expected = PlannedBackend if hasattr(dist, "BackendBase") else PlannedProcessGroup
    assert type(made) is expected
    assert isinstance(made, ProcessGroupTopoplan)
    assert (made.rank(), made.size(), made.members, made.served) == (0, 1, (0,), "cpu:gloo")
    made.shutdown()


def test_ranks_cannot_be_exchanged_beneath_the_plans() -> None:
    """A group of gloo alone can be, from torch 2.14 on, and torch would find it."""
    from topoplan.errors import UsageError

    dist.init_process_group("topoplan", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group: Any = dist.group.WORLD
        assert not getattr(group, "supports_reconfigure", False)
        for call in (group.get_reconfigure_handle, lambda: group.reconfigure(None)):
            with pytest.raises(
                UsageError, match=r"does not support reconfigure; set TOPOPLAN_ON_FAILURE=shrink"
            ):
                call()
        if hasattr(dist, "_supports_reconfigure"):
            assert not dist._supports_reconfigure()
        assert group.group_name == "0"  # torch 2.15 asks for it when the group is made
    finally:
        dist.destroy_process_group()


@pytest.mark.thorough
@pytest.mark.skipif(
    not hasattr(dist, "get_backend_impl") or "topoplan" not in entry_points(group=GROUP).names,
    reason="needs torch 2.14 and an installed topoplan with its entry point",
)
def test_a_program_needs_no_import_of_ours() -> None:
    program = (
        "import torch.distributed as dist; "
        "dist.init_process_group('topoplan', store=dist.HashStore(), rank=0, world_size=1); "
        "print(dist.get_backend())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["topoplan"]


def test_an_allgather_that_all_ranks_have_is_of_the_ranks_at_its_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also on a rank that learns of a failure before its result is handed over, and has fewer ranks then."""
    from collectives.communicator.communicator import Communicator
    from collectives.torch import ProcessGroupTopoplan

    dist.init_process_group("topoplan", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.barrier()
        group = ProcessGroupTopoplan.of()
        assert group is not None
        inner, gather = group.inner, Communicator.all_gather

        def then_shrink(*given: Any, **named: Any) -> Any:
            group.inner = SimpleNamespace(size=lambda: 2)  # type: ignore[assignment]
            return gather(*given, **named)

        monkeypatch.setattr(Communicator, "all_gather", then_shrink)
        found, given = [torch.zeros(3)], torch.arange(3.0)
        dist.all_gather(found, given)
        group.inner = inner
        assert found[0].equal(given)
    finally:
        dist.destroy_process_group()

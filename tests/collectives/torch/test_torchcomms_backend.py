"""The back end of torchcomms: every method on threads, with a stand-in that has the recorded signatures."""

from __future__ import annotations

import importlib
import inspect
import sys
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import topoplan
from tests.support import fake_torchcomms
from tests.support.checkout import ROOT
from tests.support.fake_torchcomms import ReduceOp
from topoplan.errors import UsageError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

SIZE = 3


@pytest.fixture
def comms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Return the stand-in, after it has loaded the back end by its entry point, with a plan for the ranks."""
    made = fake_torchcomms.install(monkeypatch)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    path = tmp_path / "plan.json"
    path.write_text(topoplan.plan(topoplan.load("dgx-1v"), gpus=[1, 4, 5]).to_json(), encoding="utf-8")
    monkeypatch.setenv("TOPOPLAN_PLAN", str(path))
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    (name, value) = next(iter(listed["torchcomms.backends"].items()))
    monkeypatch.delitem(sys.modules, value, raising=False)
    EntryPoint(name, value, "torchcomms.backends").load()
    assert list(made.registered) == ["topoplan"]
    return made


def on_all(comms: ModuleType, call: Callable[[Any, int], Any]) -> list[Any]:
    """Return what each rank gives, and end its communicator."""
    store = torch.distributed.HashStore()

    def run(rank: int) -> Any:
        comm = comms.new_comm("topoplan", torch.device("cpu"), name="job", store=store, rank=rank, size=SIZE)
        try:
            return call(comm, rank)
        finally:
            comm.finalize()

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(run, range(SIZE)))


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (([0, 1], [2], []), r"rank 1 must be among the ranks \[2\]"),
        (([0, 1], [0, 1], [0, 7]), r"new_ranks must be different ranks from 0 to 2, got \[0, 7\]"),
        (([0, 1], [1, 0], []), r"rank 1 must list the ranks \[0, 1\] as rank 0 does, got \[1, 0\]"),
        (([0, 1], [0.5], []), r"ranks must be a list of ranks, got \[0.5\]"),
    ],
)
def test_all_ranks_refuse_a_split_that_is_wrong_on_one(comms: ModuleType, lists: Any, message: str) -> None:
    def call(comm: Any, rank: int) -> list[float]:
        with pytest.raises(UsageError, match=message):
            comm.split(lists[rank], "part")
        x = torch.ones(2)
        comm.all_reduce(x, ReduceOp.SUM, async_op=False)
        return list(x.tolist())

    assert on_all(comms, call) == [[SIZE, SIZE]] * SIZE


def test_every_method_of_the_recorded_base_is_there_with_its_arguments(comms: ModuleType) -> None:
    made = comms.registered["topoplan"]
    assert issubclass(made, fake_torchcomms.TorchCommBackend)
    for name, count in fake_torchcomms.METHODS.items():
        listed = list(inspect.signature(getattr(made, name)).parameters)[1:]
        assert len(listed) == count, name
        if count and name not in ("init", "set_timeout", "split"):
            assert listed[-1] == "async_op"


@pytest.mark.parametrize("late", [False, True])
def test_every_method_gives_what_it_is_defined_to_give(comms: ModuleType, late: bool) -> None:
    def call(comm: Any, rank: int) -> dict[str, Any]:
        assert (comm.get_rank(), comm.get_size()) == (rank, SIZE)
        assert (comm.get_backend_name(), comm.get_comm_name()) == ("topoplan", "job")
        found: dict[str, Any] = {}
        own = torch.arange(4.0) + 10 * rank

        def do(name: str, result: Any, *arguments: Any) -> None:
            ended = getattr(comm, name)(*arguments, async_op=late)
            assert (ended is None) != late
            found[name] = [one.tolist() for one in result] if isinstance(result, list) else result.tolist()

        for kind in ("SUM", "PRODUCT", "MIN", "MAX", "AVG"):
            x = own.clone()
            do("all_reduce", x, x, getattr(ReduceOp, kind))
            found[kind] = found.pop("all_reduce")
        bits = torch.tensor([1 << rank, 7])
        do("all_reduce", bits, bits, ReduceOp.BOR)
        x = own.clone() if rank == 1 else torch.zeros(4)
        do("broadcast", x, x, 1)
        x = own.clone()
        do("reduce", x, x, 2, ReduceOp.SUM)
        if rank != 2:
            del found["reduce"]
        outs = [torch.zeros(4) for _ in range(SIZE)]
        do("all_gather", outs, outs, own)
        outs = [torch.zeros(one + 1) for one in range(SIZE)]
        do("all_gather_v", outs, outs, own[: rank + 1])
        whole = torch.zeros(4 * SIZE)
        do("all_gather_single", whole, whole, own)
        out = torch.zeros(4)
        do("reduce_scatter", out, out, [own + one for one in range(SIZE)], ReduceOp.SUM)
        out = torch.zeros(rank + 1)
        do("reduce_scatter_v", out, out, [own[: one + 1] for one in range(SIZE)], ReduceOp.SUM)
        out = torch.zeros(4)
        do("reduce_scatter_single", out, out, torch.cat([own + one for one in range(SIZE)]), ReduceOp.AVG)
        out = torch.zeros(SIZE)
        do("all_to_all_single", out, out, torch.arange(3.0) + 10 * rank)
        out = torch.zeros(SIZE * (rank + 1))
        do(
            "all_to_all_v_single",
            *(out, out, torch.arange(6.0) + 10 * rank),
            *([rank + 1] * SIZE, [1, 2, 3]),
        )
        outs = [torch.zeros(rank + 1) for _ in range(SIZE)]
        do("all_to_all", outs, outs, [own[: one + 1] for one in range(SIZE)])
        out = torch.zeros(4)
        do("scatter", out, out, [own + one for one in range(SIZE)] if rank == 1 else [], 1)
        outs = [torch.zeros(4) for _ in range(SIZE)] if rank == 0 else []
        do("gather", outs, outs, own, 0)
        do("barrier", torch.zeros(0))
        if rank == 0:
            do("send", own, own, 2)
        if rank == 2:
            x = torch.zeros(4)
            do("recv", x, x, 0)
        part = comm.split([2, 0] if rank != 1 else [], "part")
        if part is not None:
            x = own.clone()
            part.all_reduce(x, ReduceOp.SUM)
            found["part"] = part.get_rank(), part.get_comm_name(), x.tolist()
            part.finalize()
        return found

    given = [[10.0 * rank + one for one in range(4)] for rank in range(SIZE)]
    sums = [30.0 + 3 * one for one in range(4)]
    for rank, found in enumerate(on_all(comms, call)):
        expected = {
            "SUM": sums,
            "PRODUCT": [one * (10 + one) * (20 + one) for one in range(4)],
            "MIN": given[0],
            "MAX": given[2],
            "AVG": given[1],
            "all_reduce": [7, 7],
            "broadcast": given[1],
            "all_gather": given,
            "all_gather_v": [given[one][: one + 1] for one in range(SIZE)],
            "all_gather_single": [one for row in given for one in row],
            "reduce_scatter": [one + 3 * rank for one in sums],
            "reduce_scatter_v": sums[: rank + 1],
            "reduce_scatter_single": [one + rank for one in given[1]],
            "all_to_all_single": [10.0 * peer + rank for peer in range(SIZE)],
            "all_to_all_v_single": [
                10.0 * peer + one
                for peer in range(SIZE)
                for one in range((0, 1, 3)[rank], (0, 1, 3)[rank] + rank + 1)
            ],
            "all_to_all": [given[peer][: rank + 1] for peer in range(SIZE)],
            "scatter": [one + rank for one in given[1]],
            "gather": given if rank == 0 else [],
            "barrier": [],
        }
        if rank == 2:
            expected |= {"reduce": sums, "recv": given[0]}
        if rank == 0:
            expected["send"] = given[0]
        if rank != 1:
            expected["part"] = (
                0 if rank == 2 else 1,
                "part",
                [20.0 + 2 * one for one in range(4)],
            )
        assert found == expected


def test_what_does_not_fit_is_refused_by_all_ranks_and_the_communicator_stays_usable(
    comms: ModuleType,
) -> None:
    def call(comm: Any, rank: int) -> tuple[list[str], list[float]]:
        three, errors = [torch.ones(2) for _ in range(SIZE)], []
        for name, *arguments in (
            ("all_reduce", torch.ones(2), ReduceOp.PREMUL_SUM),
            ("broadcast", torch.ones(2), SIZE),
            ("reduce_scatter_v", torch.ones(2), three[:2] if rank == 1 else three, ReduceOp.SUM),
            # as many elements in all, for other ranks
            (
                "reduce_scatter_v",
                torch.ones(2),
                [torch.ones(2 + (rank - one) % 2) for one in range(SIZE)],
                ReduceOp.SUM,
            ),
            ("all_gather_v", [torch.ones(1 + (rank == 1)) for _ in range(SIZE)], torch.ones(1)),
        ):
            with pytest.raises(UsageError) as caught:
                getattr(comm, name)(*arguments)
            errors.append(str(caught.value))
        x = torch.ones(2)
        comm.all_reduce(x, ReduceOp.SUM)
        return errors, x.tolist()

    for errors, usable in on_all(comms, call):
        assert usable == [SIZE, SIZE]
        for error, words in zip(
            errors,
            (
                "got PREMUL_SUM",
                "root must be a rank from 0 to 2, got 3",
                "must be one for each of 3 ranks, got 2",
                "rank 0 sends 3 elements to rank 1, which expects 2",
                "output tensor 0 must have 1 elements of float32 as the input, got 2",
            ),
            strict=True,
        ):
            assert words in error


def test_without_a_torchcomms_that_takes_back_ends_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("collectives.torch.torchcomms_backend")
    for absent in (None, ModuleType("torchcomms")):  # none, and one without the registry
        monkeypatch.setitem(sys.modules, "torchcomms", absent)
        with pytest.raises(UsageError, match="needs a torchcomms with register_backend"):
            module.register()


def test_a_process_without_a_rank_or_with_another_device_is_refused(
    comms: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pair in importlib.import_module("collectives.torch.torchcomms_backend").PLACES:
        for name in pair:
            monkeypatch.delenv(name, raising=False)
    made: Any = comms.registered["topoplan"]
    for device, words in (("meta", "device must be cpu or cuda"), ("cpu", "must have the rank")):
        with pytest.raises(UsageError, match=words):
            made().init(torch.device(device), "job", None)

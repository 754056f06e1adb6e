"""The torch back end: real processes over gloo, with loopback's bits, and every fault an error on every rank."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from collectives import Communicator
from tests.support.fake_gpu import install
from tests.support.fake_streams import Machine
from tests.support.hand_plans import forest_plan
from tests.support.ports import free_port
from tests.support.rank_scenarios import check_scenario, scenarios
from tests.support.sparse_steps import ON_GPUS, of_each_rank, steps_of_each
from tests.support.torch_jobs import Told, forked, told_by_all
from topoplan.errors import BackendError, UsageError

pytestmark = pytest.mark.thorough

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
FakeTensorMode = pytest.importorskip("torch._subclasses.fake_tensor").FakeTensorMode

PROGRAM = "torch_ranks.py"
KILLED = 4
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return told_by_all(PROGRAM, tmp_path_factory.mktemp("ranks"), ranks=6, killed=(KILLED,))


@pytest.mark.parametrize("name", scenarios(PROGRAM, 6))
def test_six_ranks(told: Told, name: str) -> None:
    check_scenario([one for rank, one in enumerate(told) if rank != KILLED or name in one], name)


def test_the_stand_ins_for_streams_and_groups_have_the_names_of_torchs_own() -> None:
    from tests.support import fake_torch_cuda as fake

    def named(function: Any) -> list[str]:
        return [name for name in inspect.signature(function).parameters if name != "kwargs"]

    for one, real in ((fake.Stream, torch.cuda.Stream), (fake.Event, torch.cuda.Event)):
        assert named(one)[:2] == named(real.__new__)[1:3]
        for name in ("record_event", "wait_event", "synchronize", "record", "__cuda_stream__"):
            if hasattr(one, name):
                assert named(getattr(one, name)) == named(getattr(real, name)), name
    assert named(fake.current_stream) == named(torch.cuda.current_stream)
    assert named(fake.stream) == named(torch.cuda.stream)
    assert named(fake.is_current_stream_capturing) == named(torch.cuda.is_current_stream_capturing)
    assert {"device", "record_stream", "is_cuda"} <= {*dir(torch.Tensor), *dir(torch.cuda.Stream)}
    group = {name for name in vars(fake.Batches) if not name.startswith("__") and name != "_told"}
    assert group <= set(dir(torch.distributed.ProcessGroup))
    for name in ("send", "recv"):
        told = getattr(torch.distributed.ProcessGroup, name).__doc__
        assert all(f"{one}: " in told for one in named(getattr(fake.Batches, name))[1:]), told


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> Told:
    from tests.jobs.torch_gpu_ranks import played

    return played(4, tmp_path_factory.mktemp("gpus"))


@pytest.mark.slow
def test_sparse_allreduces_of_tensors_on_a_gpu_are_loopbacks_bit_for_bit(on_gpus: Told) -> None:
    from tests.jobs.torch_ranks import rounded_by_loopback

    assert [one["sparse"]["whole"] for one in on_gpus] == of_each_rank(steps_of_each(ON_GPUS, count=2))
    assert [one["sparse"]["bits"] for one in on_gpus] == [rounded_by_loopback(rank) for rank in range(4)]


def test_gradients_messages_and_residuals_of_tensors_on_a_gpu_stay_there(on_gpus: Told) -> None:
    for one in on_gpus:
        assert one["sparse"]["most"] <= 40, "the state of a selection and single numbers"
        assert one["sparse"]["taken"] == "Tensor"


def test_a_residual_follows_its_gradient_from_the_host_to_the_gpu_and_back(on_gpus: Told) -> None:
    for one in on_gpus:
        kept = one["followed"]
        sent = [[0.0] * 7 + [8.0], [0.0] * 6 + [14.0, 0.0], [0.0] * 5 + [18.0, 0.0, 0.0]]
        given = [float(n) for n in range(1, 9)]
        total = [0.0] * 8
        for step in range(3):
            total = [a + b - c for a, b, c in zip(total, given, sent[step], strict=True)]
            assert kept[step] == total


def on_cuda(*shape: int, device: str = "cuda:1") -> Any:
    """A tensor that says it is on a GPU; it has no memory."""
    with FakeTensorMode():
        return torch.empty(*shape, device=device)


@pytest.mark.parametrize(
    ("device", "make", "message"),
    [
        ("cuda:1", lambda: on_cuda(4, 2).T, r"^is not contiguous; pass tensor.contiguous\(\)$"),
        (
            "cuda:0",
            lambda: on_cuda(3),
            r'^is on cuda:1, and this rank works on cuda:0; move it with tensor.to\("cuda:0"\), or call '
            r"torch.cuda.set_device\(1\) before the communicator is made$",
        ),
        (
            "cpu",
            lambda: on_cuda(3),
            r"^is on cuda:1, and the process group takes tensors on cpu; .* or make the group with "
            r'init_process_group\("cpu:gloo,cuda:nccl"\), for which a torch that is built for CUDA',
        ),
    ],
)
def test_a_tensor_on_a_gpu_that_cannot_be_sent_is_one_line_that_says_what_to_do(
    device: str, make: Callable[[], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collectives.tables.torch_arrays import TorchArrays

    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    found = TorchArrays([torch.device(device)])._fault(make())
    assert re.search(message, found), found


def test_a_group_for_gpus_without_one_is_one_line_that_says_what_to_do() -> None:
    from collectives.backends.torch.torch_backend import device_of

    with pytest.raises(
        UsageError, match=r"^the process group needs GPUs and torch finds none .*make the group with gloo$"
    ):
        device_of("cuda")


@pytest.mark.parametrize(
    ("cuda", "runtime", "message"),
    [
        (None, None, r'selecting entries on a GPU needs CuPy: pip install "topoplan\[cuda12\]"$'),
        ("13.0", None, r'selecting entries on a GPU needs CuPy: pip install "topoplan\[cuda13\]"$'),
        (
            "13.0",
            12090,
            r"CuPy is built for CUDA 12 and torch for CUDA 13.0: pip uninstall cupy-cuda12x, then "
            r'pip install "topoplan\[cuda13\]"$',
        ),
    ],
)
def test_without_the_right_cupy_entries_are_chosen_on_the_host_and_a_warning_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, runtime: int | None, message: str
) -> None:
    from collectives.sparse.entry_arrays import HostEntryArrays
    from collectives.sparse.torch_entry_arrays import torch_entry_arrays
    from collectives.tables.torch_arrays import TorchArrays

    monkeypatch.setattr(torch.version, "cuda", cuda)
    if runtime is None:
        monkeypatch.setitem(sys.modules, "cupy", None)
    else:
        cupy = install(monkeypatch, Machine())
        monkeypatch.setattr(cupy.cuda.runtime, "runtimeGetVersion", lambda: runtime, raising=False)
    with pytest.warns(UserWarning, match=f"sparse gradients are copied from GPU 3 to the host, .*{message}"):
        found = torch_entry_arrays(TorchArrays([torch.device("cpu")]), 3)
    assert type(found) is HostEntryArrays


def test_cupy_works_in_torchs_own_stream_by_whichever_name_both_have_for_it() -> None:
    """With the genuine CuPy, which makes such streams without a GPU."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    from collectives.tables.torch_arrays import stream_on_cupy
    from tests.support import fake_torch_cuda

    class Silent(fake_torch_cuda.Stream):
        """Of a torch whose streams do not tell of themselves."""

        __cuda_stream__ = property()  # type: ignore[assignment]

    for kind in (fake_torch_cuda.Stream, Silent):
        stream = kind()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the older name, from CuPy 14 on
            assert stream_on_cupy(cupy, stream, 0).ptr == stream.cuda_stream
    assert callable(cupy.from_dlpack)
    assert cupy.cuda.runtime.runtimeGetVersion() // 1000 >= 11


def test_messages_of_plans_have_an_nccl_group_of_their_own_with_twice_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from datetime import timedelta

    from collectives.torch.process_group import inner_groups

    class Options:
        _timeout = timedelta(0)

    class Nccl:
        def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
            self.limit = options._timeout.total_seconds()
            store.set("there", "yes")

    class Group:
        BackendType = torch.distributed.ProcessGroup.BackendType

        def __init__(self, store: Any, rank: int, size: int) -> None:
            self.served: dict[str, Any] = {}

        def _set_default_backend(self, kind: Any) -> None:
            self.default = kind

        def _register_backend(self, device: Any, kind: Any, backend: Any) -> None:
            self.served[device.type] = backend

    store = torch.distributed.HashStore()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "ProcessGroup", Group)
    monkeypatch.setattr(
        torch.distributed,
        "ProcessGroupNCCL",
        type("ProcessGroupNCCL", (Nccl,), {"Options": Options}),
        raising=False,
    )
    found = inner_groups(store, 0, 1, timedelta(seconds=9))
    others, plans = (group.served for group in (found.others, found.plans))  # type: ignore[attr-defined]
    assert [sorted(others), sorted(plans), found.served] == [["cpu", "cuda"], ["cuda"], "cpu:gloo,cuda:nccl"]
    assert (others["cuda"].limit, plans["cuda"].limit) == (9.0, 18.0)
    assert store.get("nccl/there") == store.get("nccl of plans/there") == b"yes"


@pytest.mark.parametrize("name", ["abort", "_abort", "_shutdown", "shutdown"])
def test_nccl_is_ended_by_the_name_that_a_release_of_torch_has_for_it(name: str) -> None:
    from collectives.backends.torch.group_messages import abort

    ended: list[str] = []
    nccl = type("Nccl", (), {name: lambda self: ended.append(name)})()
    group: Any = type("Group", (), {"_get_backend": lambda self, device: nccl})()
    abort(group, torch.device("cpu"))
    assert ended == [name]


def test_torchs_nccl_group_has_twice_our_time_before_its_watchdog_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from collectives.backends.torch import process_groups

    made = {}
    for name, value in zip(VARIABLES, ("1", "2", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    store = torch.distributed.HashStore()
    monkeypatch.setattr(process_groups, "rendezvous", lambda *place, **limit: iter([(store, 1, 2)]))
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda backend, *, timeout, **place: made.update({backend: timeout.total_seconds()}),
    )
    process_groups.make_group(timeout=7.0)
    assert made == {"nccl": 14.0}


def test_nccl_is_brought_together_by_one_allreduce_of_all_ranks_before_some_exchange_messages() -> None:
    from datetime import timedelta

    from collectives.backends.torch.group_messages import LostPeer, NcclMessages
    from tests.support.fake_torch_cuda import Batches

    class Alone(Batches):
        def allreduce(self, tensors: list[Any]) -> Any:
            self._told(f"allreduce of {tensors[0].numel()}")
            return done

    class Done:
        def is_completed(self) -> bool:
            return ended

        def wait(self, timeout: timedelta | None = None) -> bool:
            return True

    ended, done = True, Done()
    group: Any = Alone(None)
    wires = NcclMessages(group, torch.device("cpu"), timeout=0.01)
    wires.connect()
    assert [call for call, _ in group.calls] == ["allreduce of 1"]
    ended = False
    with pytest.raises(LostPeer, match=r"or another one of the group exchanged no data within 0.01 s"):
        wires.connect()


REFUSED = {
    "list": "a list instead of a plain torch tensor as its out array",
    "subclass": "a Mine instead of a plain torch tensor",
    "transposed": r"that is not contiguous; pass tensor.contiguous\(\)",
    "elsewhere": "that is on meta, and the process group takes tensors on cpu; move it",
    "sparse": r"that is sparse \(torch.sparse_coo\); pass tensor.to_dense",
    "conjugated": "that is conjugated or negated .*resolve_conj",
    "quantised": "that is quantised; pass tensor.dequantize",
    "small float": "that has dtype torch.float8_e5m2, which cannot be moved; use bool, int8",
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", REFUSED)
def test_tensors_that_cannot_be_sent_as_they_lie_are_refused(name: str) -> None:
    from collectives.tables.torch_arrays import TorchArrays
    from tests.jobs.torch_ranks import refused_tensor

    library = TorchArrays([torch.device("cpu")])
    with pytest.raises(UsageError, match=f"rank 3 has .*{REFUSED[name]}"):
        library.check(refused_tensor(name), rank=3, what="out array")


def test_without_a_group_and_without_torchrun_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=r"torch.distributed is not initialised; call .*init_process_group"):
        Communicator(forest_plan(2, "allreduce", "star"), "torch")


@pytest.mark.parametrize(("rank", "size"), [("zero", "2"), ("2", "2"), ("0", "")])
def test_an_environment_that_makes_no_sense_is_one_error(
    monkeypatch: pytest.MonkeyPatch, rank: str, size: str
) -> None:
    for name, value in zip(VARIABLES, (rank, size, "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT as torchrun does"):
        Communicator(forest_plan(2, "allreduce", "star"), "torch")


def test_processes_that_do_not_come_are_an_error_within_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(VARIABLES, ("0", "2", "127.0.0.1", str(free_port())), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(BackendError, match=r"the 2 processes did not find each other .* within 1 s"):
        Communicator(forest_plan(2, "allreduce", "star"), "torch", timeout=1)
    assert not torch.distributed.is_initialized()


def test_a_missing_library_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        UsageError, match=r'the torch back end needs PyTorch: pip install "topoplan\[torch\]"'
    ):
        Communicator(forest_plan(2, "allreduce", "star"), "torch")


def test_communicators_over_torchs_groups_are_opened_one_after_another(tmp_path: Path) -> None:
    """What the ranks of one group left in the store is not taken for addresses of the next."""
    body = (
        "import torch; from collectives import Communicator; from tests.support.hand_plans import forest_plan\n"
        "for turn in range(4):\n"
        "    with Communicator(forest_plan(2, 'allreduce', 'star'), 'torch', timeout=20) as comm:\n"
        "        assert turn % 2 or comm.all_reduce(torch.ones(3)).tolist() == [2.0] * 3\n"
    )
    program = tmp_path / "program.py"
    program.write_text(body)
    _, errors, statuses = forked([str(program)], tmp_path, ranks=2)
    assert statuses == [0, 0], errors[-3000:]

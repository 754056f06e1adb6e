"""The torch back end: real processes over gloo, with loopback's bits, and every fault an error on every rank."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from collectives import Communicator
from collectives.communicator.launch import start_ranks
from tests.jobs.torch_ranks import cases, expected
from tests.support.checkout import ROOT
from tests.support.fake_gpu import install
from tests.support.fake_streams import Machine
from tests.support.hand_plans import forest_plan
from tests.support.ports import free_port
from tests.support.sparse_steps import (
    TWO_SERVERS,
    as_it_is,
    of_each_rank,
    rounded_steps,
    steps_of_each,
    taken,
)
from topoplan.errors import BackendError, UsageError

pytestmark = pytest.mark.thorough

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
FakeTensorMode = pytest.importorskip("torch._subclasses.fake_tensor").FakeTensorMode

RANKS = 6
STOPPED, KILLED = RANKS - 1, RANKS - 2
Told = list[dict[str, Any]]
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """What each rank prints, in one run of all stages, and how it ends."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    program = [sys.executable, str(ROOT / "tests" / "jobs" / "torch_ranks.py")]
    ports = [str(free_port()), str(free_port())]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    running: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(RANKS):
            with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
                arguments = [*program, str(rank), str(RANKS), *ports]
                running.append(subprocess.Popen(arguments, stdout=out, stderr=err, env=environment))
        for rank in range(RANKS - 1):
            running[rank].wait(timeout=180)
        running[STOPPED].send_signal(signal.SIGCONT)
        running[STOPPED].wait(timeout=60)
        found: Told = []
        for rank, process in enumerate(running):
            lines = (folder / f"{rank}.out").read_text().splitlines()
            found.append({"status": process.returncode, "error": (folder / f"{rank}.err").read_text()})
            for line in lines:
                found[-1].update(json.loads(line))
        yield found
    finally:
        for process in running:
            process.kill()
            process.wait()


def test_every_rank_ends_by_itself_but_the_one_that_was_killed(told: Told) -> None:
    statuses = [one["status"] for one in told]
    assert statuses == [-signal.SIGKILL if rank == KILLED else 0 for rank in range(RANKS)], told[0]["error"]


def test_results_are_loopbacks_bit_for_bit(told: Told) -> None:
    """Every collective, 2 to 6 ranks in groups of their own, 0 to 1000003 elements, every dtype and reduction."""
    for number, case in enumerate(cases(RANKS)):
        found = [one["digests"].get(str(number), "") for one in told]
        assert found == [""] * (RANKS - case.ranks) + expected(case), case


def test_steps_in_batches_without_tags_give_the_same_bits(told: Told) -> None:
    for one in told:
        same = {number: one["digests"][number] for number in one["batched"]}
        assert len(same) >= 30
        assert one["batched"] == same


def test_collectives_are_behind_the_stream_that_calls_them_and_that_one_behind_them(told: Told) -> None:
    """In the background, queued behind one in the background, and alone; calls on the host wait for no stream."""
    for one in told:
        found = one["ordered"]
        assert found["sums"] == [[21.0]] * 3
        assert set(found["given"]) == {"collectives"}
        assert found["got"][-2:] == ["user 1", "user 0"]
        assert found["waits"] == ["wait_event", "synchronize"] * 3
        assert found["threads"] == ["MainThread", "collectives_0"]


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


def test_bfloat16_is_added_divided_and_compared(told: Told) -> None:
    for one in told:
        assert one["tensors"]["bfloat16"] == [6.0 * (i % 7) + 15 for i in range(100)]
        assert one["tensors"]["average"] == [i % 7 + 2.5 for i in range(100)]
        assert one["tensors"]["largest"] == [i % 7 + 5.0 for i in range(100)]


def test_sparse_allreduces_and_what_they_keep_are_loopbacks_bit_for_bit(told: Told) -> None:
    four = [one["sparse"] for one in told[RANKS - 4 :]]
    assert [whole for whole, _ in four] == of_each_rank(steps_of_each())

    def half(array: Any) -> Any:
        return torch.from_numpy(array).to(torch.bfloat16).view(torch.int16).numpy()

    with Communicator(TWO_SERVERS) as comm:
        rounded, _ = taken(comm, rounded_steps(), as_it_is, half)
    assert [bits for _, bits in four] == [[[one[rank]] for one in rounded] for rank in range(4)]


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What four ranks found whose tensors count as memory of a GPU."""
    from tests.jobs.torch_gpu_ranks import played

    return played(4, tmp_path_factory.mktemp("gpus"))


def test_sparse_allreduces_of_tensors_on_a_gpu_are_loopbacks_bit_for_bit(on_gpus: Told, told: Told) -> None:
    assert [one["sparse"]["whole"] for one in on_gpus] == of_each_rank(steps_of_each())
    bits = [one["sparse"]["bits"] for one in on_gpus]
    assert bits == [bits for _, bits in (one["sparse"] for one in told[RANKS - 4 :])]


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
    device: str, make: Callable[[], Any], message: str
) -> None:
    from collectives.tables.torch_arrays import TorchArrays

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


def test_tensors_that_require_grad_are_read_and_written_and_results_are_detached(told: Told) -> None:
    for one in told:
        assert one["tensors"]["parameter"] == [[[2.0] * 3] * 4, True]
        assert one["tensors"]["total"] == [[[12.0] * 3] * 4, False]


def test_inference_tensors_are_written_to_from_the_background(told: Told) -> None:
    assert all(one["tensors"]["inference"] == [15] * 5 for one in told)


def test_two_communicators_of_one_group_have_collectives_in_flight_at_once(told: Told) -> None:
    wanted = [[6 * k] if k else [] for k in range(4) for _ in range(2)]
    assert all(one["in flight"] == wanted for one in told)


DISAGREEMENTS = {
    "count": "count 2000 instead of 10",
    "dtype": "dtype 'int32' instead of 'float32'",
    "call": "collective 'allgather' instead of 'allreduce'",
    "plan": "rank 1 runs another collective: plan ",
    "refusal": "rank 1 refused the collective: rank 1 has a tensor as its array that is not contiguous",
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_what_one_rank_means_otherwise_is_an_error_on_every_rank_and_the_group_lives_on(
    told: Told, name: str
) -> None:
    for rank, one in enumerate(told):
        (kind, message, *place), again = one["disagreements"][name]
        assert (kind, *place) == ("RefusedError", rank, 1, None)
        assert again == [kind, message, *place], "it is refused once more, and not because of the first time"
        assert DISAGREEMENTS[name] in message


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


def test_a_stopped_rank_is_named_by_all_others_within_the_timeout(told: Told) -> None:
    for rank, one in enumerate(told[:STOPPED]):
        kind, message, *place = one["stopped"]["error"]
        assert kind == "BackendError"
        assert place[:2] == [rank, STOPPED], message
        assert "within 2 s" in message
        assert one["stopped"]["untouched"]


def test_a_rank_that_comes_back_is_told_that_the_others_gave_up_on_it(told: Told) -> None:
    kind, message, rank, peer, _ = told[STOPPED]["stopped"]["error"]
    assert [kind, rank, peer] == ["BackendError", STOPPED, STOPPED], message
    assert "the other ranks gave up on this one: rank " in message


def test_a_killed_rank_is_named_by_all_others_at_once_also_by_those_it_sends_nothing(told: Told) -> None:
    for rank, one in enumerate(told[:KILLED]):
        kind, message, *place = one["killed"]["error"]
        assert kind == "BackendError"
        assert place[:2] == [rank, KILLED], message
        assert "the peer is gone" in message
        assert one["killed"]["untouched"]


def test_torchruns_environment_makes_a_group_that_is_destroyed_again(told: Told) -> None:
    wanted = {"total": 15, "over": "shared", "left": False, "threads": 1}
    assert all(one["opened"] == wanted for one in told)


def test_by_its_name_the_back_end_uses_memory_or_links_where_it_can_and_silently_messages_elsewhere(
    told: Told,
) -> None:
    sums = [15, sum((number % 7) * 6 + 15 for number in range(40_000))]
    for one in told:
        assert one["opened"]["over"] == "shared"
        assert one["without memory"] == {
            "reached": ["tcp", *sums],
            "rank 0 listens nowhere": ["torch", *sums],
            "rank 1 reaches nobody": ["torch", *sums],
            "rank 1 reaches rank 0 alone": ["torch", *sums],
            "threads": [0] * 4,
        }
        assert "Warning" not in one["error"]


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


def test_collectives_alone_does_not_load_torch() -> None:
    code = "import collectives, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.thorough
def test_communicators_over_torchs_groups_are_opened_one_after_another() -> None:
    """What the ranks of one group left in the store is not taken for addresses of the next."""
    body = (
        "import torch; from collectives import Communicator; from tests.support.hand_plans import forest_plan\n"
        "for turn in range(4):\n"
        "    with Communicator(forest_plan(2, 'allreduce', 'star'), 'torch', timeout=20) as comm:\n"
        "        assert turn % 2 or comm.all_reduce(torch.ones(3)).tolist() == [2.0] * 3\n"
    )
    assert start_ranks("torch", [sys.executable, "-c", body], 2) == 0

"""The process-group back end "topoplan": ``torch.distributed.init_process_group("topoplan")``.

allreduce, broadcast, allgather, reduce-scatter and all-to-all of equal blocks run by plan, also several tensors of one
type at once ("coalesced"), and sums of multiples, as FSDP2 may ask for. Everything else, and what a plan cannot carry,
is given to gloo (tensors on the CPU) and NCCL (tensors on GPUs) beneath. The plan is that of the file which the
environment variable TOPOPLAN_PLAN names, or it is made from what the job runs on when the first collective comes. A
file that is no plan of this job is a `UsageError` of that collective, on all ranks. TOPOPLAN_ENGINE says what moves
tensors between GPUs: auto, windows or messages, as for `Communicator`.

With TOPOPLAN_ON_FAILURE=shrink the default group goes on without a rank that dies, where torch sees no GPU:
what runs by plan is repeated among the ranks that are left (`Communicator`), and beneath it they make a new group of
gloo, since torch can take no member out of one. `rank` and `size` change, so that what divides by the number of ranks
goes on right, as DDP does. Groups of some of its ranks do not go on: torch keeps their ranks by the old numbers. No
process comes in where a rank is gone.

Plans run in a thread of their own, and what they do not carry is called by the caller's. Gloo tells the messages of
both apart by tags. NCCL does not: calls on one communicator match in the order in which they come, so that a barrier
right after an allreduce by plan in the background could meet that allreduce on another rank. So messages of plans have
a communicator of their own. (To let the others wait for the plans instead would be a deadlock where one rank receives
after a collective what its peer sends before it.) NCCL makes a communicator, and takes its memory, when it is first
used.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from collectives.arrays.torch_arrays import DTYPES
from collectives.backends.backend import GoesOn
from collectives.backends.torch.gloo_threads import let_go
from collectives.backends.torch.members import backend_of
from collectives.backends.torch.open_group import PATIENCE, gloo_among, gloo_over
from collectives.communicator.communicator import Communicator
from collectives.communicator.handle import Handle
from collectives.peers.error_rounds import Gather, say_all
from collectives.reduction import reduction
from collectives.torch.futures import PlannedWork, future_of
from collectives.torch.group_plan import agreed_file, gather_over
from topoplan.errors import UsageError

OPERATIONS = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "avg"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.PRODUCT, "prod"),
)
"""What plans reduce by."""

ENGINE = "TOPOPLAN_ENGINE"
ON_FAILURE = "TOPOPLAN_ON_FAILURE"

DELEGATED = (
    "_end_coalescing",
    "_get_backend",
    "_get_sequence_number_for_group",
    "_set_sequence_number_for_group",
    "_start_coalescing",
    "_wait_for_pending_works",
    "alltoall",
    "barrier",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "scatter",
    "send",
    "set_timeout",
)
"""What the process group beneath does as it is; releases of torch that lack one of these do not ask for it."""


@dataclass(frozen=True, slots=True)
class InnerGroups:
    """What is beneath a planned group.

    Parameters
    ----------
    others : ProcessGroup
        For everything that is not by plan.
    plans : ProcessGroup
        For messages of plans over NCCL; where there is none, the same.
    served : str
        What serves which kind of device, as "cpu:gloo,cuda:nccl".
    """

    others: dist.ProcessGroup
    plans: dist.ProcessGroup
    served: str


class PlannedGroup(dist.ProcessGroup):
    """A process group whose collectives run by a plan; torch makes it.

    Parameters
    ----------
    groups : InnerGroups
        What carries its messages.
    timeout : timedelta
        In which each step of a collective must end.

    Attributes
    ----------
    inner, carrier : ProcessGroup
        For what is not by plan, and for the messages of plans on GPUs.
    served : str
        What serves which kind of device.
    communicator : Communicator or None
        None until the first collective, and where no plan fits.
    reason : str
        Why no plan fits; empty where one does.
    goes_on : bool
        Whether it goes on without a rank that dies, once its first collective has run.
    """

    def __init__(self, groups: InnerGroups, *, timeout: timedelta) -> None:
        inner = groups.others
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # without a store
        self.inner = inner
        self._lost: list[dist.ProcessGroup] = []
        for device in inner._device_types:  # else it has no name, by which a DeviceMesh finds it
            kind = dist.ProcessGroup.BackendType.CUSTOM
            self._register_backend(device, kind, inner._get_backend(device))
        self.carrier = groups.plans
        self.served = groups.served
        self.communicator: Communicator | None = None
        self.reason = ""
        self.goes_on = False
        self._timeout = timeout.total_seconds()

    def getBackendName(self) -> str:  # torch names it so
        """The name of the back end."""
        return "topoplan"

    def rank(self) -> int:
        """This process's rank among those that are left."""
        return self.inner.rank()

    def size(self) -> int:
        """How many ranks are left."""
        return self.inner.size()

    getRank, getSize = rank, size  # as torch asks from C++

    def allreduce(self, tensors: Any, opts: Any = None, *others: Any) -> Any:
        """Reduce a tensor over all ranks, in place."""
        if not isinstance(tensors, list) or len(tensors) != 1 or not self._reduces(tensors, opts):
            return self.inner.allreduce(tensors, *_given(opts), *others)
        return self._reduced(tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None, *others: Any) -> Any:
        """Reduce several tensors over all ranks, in place and as one."""
        if not isinstance(tensors, list) or not self._reduces(tensors, opts):
            return self.inner.allreduce_coalesced(tensors, *_given(opts), *others)
        return self._reduced(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None, *others: Any) -> Any:
        """Copy the root's tensor to all ranks."""
        if not isinstance(tensors, list) or opts is None or not self._carries(tensors, None):
            return self.inner.broadcast(tensors, *_given(opts), *others)
        (tensor,) = tensors
        flat, root = _line(tensor), int(opts.rootRank)
        return self._started(
            lambda comm: comm.broadcast(flat, root=root, out=flat, async_op=True),
            flat,
            lambda: _put([tensor], [flat]),
            tensors,
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *others: Any) -> Any:
        """Copy the tensors of all ranks to all ranks."""
        listed = isinstance(inputs, list) and len(inputs) == len(outputs) == 1
        alike = listed and all(
            one.numel() == inputs[0].numel() and one.dtype == inputs[0].dtype for one in outputs[0]
        )
        if not alike or not self._carries(inputs, None):
            return self.inner.allgather(outputs, inputs, *_given(opts), *others)
        return self._gathered([[one] for one in outputs[0]], inputs, outputs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None, *others: Any) -> Any:
        """Copy several tensors of all ranks to all ranks, as one; outputs are a list for each rank."""
        alike = len(outputs) == self.size() and all(
            [(one.numel(), one.dtype) for one in row] == [(one.numel(), one.dtype) for one in inputs]
            for row in outputs
        )
        if not alike or not self._carries(inputs, None):
            return self.inner.allgather_coalesced(outputs, inputs, *_given(opts), *others)
        return self._gathered(outputs, inputs, outputs)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:  # noqa: A002
        """Put the tensors of all ranks into one."""
        if output.dtype != input.dtype or not self._carries([input], None):
            return self.inner._allgather_base(output, input, *_given(opts))
        flat = _line(input)
        whole = _line(output)
        return self._started(
            lambda comm: comm.all_gather(flat, out=whole, async_op=True),
            flat,
            lambda: _put([output], [whole]),
            [output],
        )

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Put several tensors of all ranks into one each, exchanged as one."""
        pairs = zip(outputs, inputs, strict=True)
        alike = all(
            one.dtype == other.dtype and one.numel() == self.size() * other.numel() for one, other in pairs
        )
        if not alike or not self._carries(inputs, None):
            return self.inner.allgather_into_tensor_coalesced(outputs, inputs, *_given(opts))
        lines = [_line(one) for one in outputs]
        rows = list(zip(*(self._blocks(one) for one in lines), strict=True))
        return self._gathered(rows, inputs, outputs, then=lambda: _put(outputs, lines))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *others: Any) -> Any:
        """Reduce one tensor for each rank over all ranks; each rank gets its own."""
        alike = isinstance(outputs, list) and len(inputs) == len(outputs) == 1
        alike = alike and all(one.numel() == outputs[0].numel() for one in inputs[0])
        if not alike or not self._reduces([*inputs[0], *outputs], opts):
            return self.inner.reduce_scatter(outputs, inputs, *_given(opts), *others)
        return self._scattered(outputs, _joined(inputs[0]), opts)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:  # noqa: A002
        """Reduce a tensor over all ranks; each rank gets its block."""
        if not self._reduces([input, output], opts):
            return self.inner._reduce_scatter_base(output, input, *_given(opts))
        return self._scattered([output], _line(input), opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Reduce several tensors over all ranks, as one; each rank gets its block of each."""
        pairs = zip(outputs, inputs, strict=True)
        alike = all(other.numel() == self.size() * one.numel() for one, other in pairs)
        if not alike or not self._reduces([*inputs, *outputs], opts):
            return self.inner.reduce_scatter_tensor_coalesced(outputs, inputs, *_given(opts))
        blocks = zip(*(self._blocks(_line(one)) for one in inputs), strict=True)
        return self._scattered(outputs, _joined([part for row in blocks for part in row]), opts)

    def alltoall_base(
        self,
        output: Any,
        input: Any,  # noqa: A002
        output_split_sizes: Any = (),
        input_split_sizes: Any = (),
        opts: Any = None,
    ) -> Any:
        """Send every rank its block of a tensor; by plan where no sizes of blocks are given, so that all are equal."""
        alike = output.dtype == input.dtype and output.numel() == input.numel()
        equal = not (output_split_sizes or input_split_sizes) and input.numel() % self.size() == 0
        if not (alike and equal and self._carries([input], None)):
            sizes = output_split_sizes, input_split_sizes
            return self.inner.alltoall_base(output, input, *sizes, *_given(opts))
        flat, whole = _line(input), _line(output)
        return self._started(
            lambda comm: comm.all_to_all(flat, out=whole, async_op=True),
            flat,
            lambda: _put([output], [whole]),
            [output],
        )

    all_to_all_single = alltoall_base  # type: ignore[assignment]
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def shutdown(self) -> None:
        """Give up everything."""
        if self.communicator is not None:
            self.communicator.close()
        let_go()
        if self.carrier is not self.inner:
            self.carrier.shutdown()
        self.inner.shutdown()
        self._lost.clear()

    def abort(self) -> None:
        """Abort what is under way, by plan or not."""
        if self.carrier is not self.inner:
            self.carrier.abort()
        self.inner.abort()

    def _reduced(self, tensors: list[torch.Tensor], opts: Any) -> PlannedWork:
        op, factor = _operation(opts)
        flat = _times(_joined(tensors), factor)
        shaped = flat.view(tensors[0].shape) if len(tensors) == 1 else flat  # ranks compare shapes
        return self._started(
            lambda comm: comm.all_reduce(shaped, op=op, out=shaped, async_op=True),
            flat,
            lambda: _put(tensors, _parts(flat, tensors)),
            tensors,
        )

    def _gathered(
        self,
        rows: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        told: list[Any],
        *,
        then: Callable[[], None] = lambda: None,
    ) -> PlannedWork:
        """Gather tensors of every rank into a row of tensors for each."""
        flat = _joined(inputs)
        whole = flat.new_empty(self.size() * flat.numel())

        def finish() -> None:
            for row, line in zip(rows, self._blocks(whole), strict=True):
                _put(row, _parts(line, row))
            then()

        return self._started(lambda comm: comm.all_gather(flat, out=whole, async_op=True), flat, finish, told)

    def _scattered(self, outputs: list[torch.Tensor], whole: torch.Tensor, opts: Any) -> PlannedWork:
        op, factor = _operation(opts)
        given, flat = _times(whole, factor), _joined(outputs)
        return self._started(
            lambda comm: comm.reduce_scatter(given, op=op, out=flat, async_op=True),
            given,
            lambda: _put(outputs, _parts(flat, outputs)),
            outputs,
        )

    def _blocks(self, line: torch.Tensor) -> Sequence[torch.Tensor]:
        """A line in a part for each rank."""
        return line.view(self.size(), -1).unbind() if line.numel() else [line] * self.size()

    def _started(
        self,
        start: Callable[[Communicator], Handle[Any]],
        given: torch.Tensor,
        finish: Callable[[], None],
        tensors: list[Any],
    ) -> PlannedWork:
        assert self.communicator is not None, "`_carries` was asked before"
        handle = start(self.communicator)
        arrays = self.communicator.arrays
        future = future_of(handle, tensors, device=given.device, arrays=arrays, finish=finish)
        return PlannedWork(handle, future, tensors)

    def _reduces(self, tensors: Sequence[Any], opts: Any) -> bool:
        """Whether a plan can reduce tensors so."""
        op, factor = _operation(opts)
        if not op or (factor is not None and not all(one.is_floating_point() for one in tensors)):
            return False
        return self._carries(tensors, op)

    def _carries(self, tensors: Sequence[Any], op: str | None) -> bool:
        """Whether a plan can run a collective on tensors: the same on all ranks, as are their types."""
        for tensor in tensors:
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in DTYPES:
                return False
            if op is not None:
                try:
                    reduction(op, _like(tensor))
                except UsageError:
                    return False
        return len({tensor.dtype for tensor in tensors}) == 1 and self._planned()

    def _planned(self) -> bool:
        """Whether there is a plan; found out by all ranks together in the first collective."""
        if self.communicator is None and not self.reason:
            device = torch.device("cpu") if "cpu" in self.served else torch.device("cuda")
            gather = gather_over(self.inner, device)
            on_failure = agreed_on_failure(gather) if self is dist.group.WORLD else "raise"
            verdict = agreed_file(self, gather)
            self.reason = verdict.reason
            if verdict.plan is None:
                if on_failure == "shrink":
                    raise UsageError(
                        f"{ON_FAILURE}=shrink is for collectives by plan, and there is none: {self.reason}"
                    )
                warnings.warn(f"collectives run by {self.served}, not by plan: {self.reason}", stacklevel=4)
            else:
                with ExitStack() as on_error:
                    engine = os.environ.get(ENGINE) or "auto"
                    backend = backend_of(self, gather, timeout=self._timeout, engine=engine)
                    on_error.callback(backend.close)
                    if isinstance(backend, GoesOn) and backend.survivors is not None:
                        backend.survivors.beside = self._go_on
                    self.communicator = Communicator(
                        verdict.plan, backend, timeout=self._timeout, on_failure=on_failure
                    )
                    on_error.pop_all()
                self.goes_on = on_failure == "shrink"
        return self.communicator is not None

    def _go_on(self, gather: Gather, rank: int, size: int, local: str) -> None:
        """Make a new group beneath with the ranks that are left."""
        group = gloo_among(gather, rank=rank, size=size, local=local, timeout=self._timeout)
        # dropped only when gloo's threads have let go, in `shutdown`
        self._lost.append(self.inner)
        self.inner = self.carrier = group


def agreed_on_failure(gather: Gather) -> str:
    """What the environment of all ranks says of failures: "raise", or "shrink"; all of them must call this.

    Raises
    ------
    UsageError
        It says something else, or ranks differ; on all ranks, with the same text.
    """

    def told() -> str:
        found = os.environ.get(ON_FAILURE) or "raise"
        if found not in ("raise", "shrink"):
            raise UsageError(f"{ON_FAILURE} is {found!r}; use raise or shrink")
        return found

    first, *others = say_all(gather, told)
    for rank, one in enumerate(others, start=1):
        if one != first:
            raise UsageError(f"rank {rank} has {ON_FAILURE}={one}, and rank 0 {first}; set it alike")
    return first


def _delegated(name: str) -> Callable[..., Any]:
    def method(self: PlannedGroup, *arguments: Any, **named: Any) -> Any:
        return getattr(self.inner, name)(*arguments, **named)

    method.__name__ = name
    method.__doc__ = f"As `torch.distributed.ProcessGroup.{name}` of the group beneath."
    return method


for _name in DELEGATED:
    setattr(PlannedGroup, _name, _delegated(_name))


def _operation(opts: Any) -> tuple[str, Any]:
    """The reduction of a collective, empty where plans have none, and what values are multiplied by before."""
    if opts is None:
        return "", None
    if opts.reduceOp == dist.ReduceOp.PREMUL_SUM:
        return "sum", opts.reduceOp.__getstate__()[1]
    return next((name for op, name in OPERATIONS if opts.reduceOp == op), ""), None


def _given(opts: Any) -> tuple[Any, ...]:
    return () if opts is None else (opts,)


def _line(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor one after another: its own memory where they lie so, else a copy."""
    return tensor.detach().contiguous().view(-1)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of tensors one after another; of one tensor as `_line`."""
    return _line(tensors[0]) if len(tensors) == 1 else torch.cat([_line(one) for one in tensors])


def _parts(line: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """A line in parts as long as tensors."""
    return torch.split(line, [one.numel() for one in tensors])


def _times(line: torch.Tensor, factor: Any) -> torch.Tensor:
    return line if factor is None else line * factor


def _put(targets: Sequence[torch.Tensor], lines: Sequence[torch.Tensor]) -> None:
    """Copy lines into tensors that they are not the memory of."""
    with torch.inference_mode():
        for target, line in zip(targets, lines, strict=False):
            if target.data_ptr() != line.data_ptr():
                target.detach().copy_(line.view(target.shape))


def _like(tensor: torch.Tensor) -> Any:
    """numpy's type with which the reductions of a tensor are told."""
    return np.dtype("float32" if tensor.dtype == torch.bfloat16 else DTYPES[tensor.dtype])


def inner_groups(store: Store, rank: int, size: int, timeout: timedelta) -> InnerGroups:
    """The groups of a rank; steps of plans must end in the timeout, and their NCCL group has twice the time."""
    kind = dist.ProcessGroup.BackendType
    others = gloo_over(store, rank, size, timeout)
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return InnerGroups(others, others, "cpu:gloo")

    def nccl(name: str, limit: timedelta) -> dist.ProcessGroupNCCL:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(PrefixStore(name, store), rank, size, options)

    others._register_backend(torch.device("cuda"), kind.NCCL, nccl("nccl", timeout))
    plans = dist.ProcessGroup(store, rank, size)
    plans._set_default_backend(kind.NCCL)
    plans._register_backend(torch.device("cuda"), kind.NCCL, nccl("nccl of plans", PATIENCE * timeout))
    return InnerGroups(others, plans, "cpu:gloo,cuda:nccl")


def _make(store: Store, rank: int, size: int, timeout: timedelta) -> PlannedGroup:
    return PlannedGroup(inner_groups(store, rank, size, timeout), timeout=timeout)


dist.Backend.register_backend("topoplan", _make, devices=["cpu", "cuda"])

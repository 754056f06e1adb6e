"""Run the communicators of torchcomms on packed trees: a back end in Python, found by the name "topoplan".

torchcomms loads this module by the entry point group ``torchcomms.backends`` when a program asks for that name, and the
import registers the back end. Each communicator has the body of the process group "topoplan", "plan or beneath", so
checks, plans, agreement and errors are the same. Methods and arguments are those of torchcomms's base of back ends in
Python at commit 59426ba (``PyTorchCommBackend.hpp``): without hints, batches, windows and `gather_single`, which that
base does not hand to Python.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from operator import index
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from collectives.peers.agreement import gather_or_raise
from collectives.torch.plan_agreement import gather_over
from collectives.torch.process_group import ProcessGroupTopoplan, check_ranks, inner_groups, renewed
from topoplan.errors import UsageError

PLACES = (
    ("TORCHCOMM_RANK", "TORCHCOMM_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("RANK", "WORLD_SIZE"),
)
"""Variables with the rank and the number of ranks, in the order in which torchcomms reads them."""

REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
"""Reductions by torchcomms's names; PREMUL_SUM is not among them, since its factor cannot be read in Python."""


def register(name: str = "topoplan") -> None:
    """Register the back end with torchcomms under a name; the entry point needs no call of it.

    Raises
    ------
    UsageError
        torchcomms is not installed, or is a release without back ends in Python.
    """
    try:
        from torchcomms import TorchCommBackend, register_backend
    except ImportError as error:
        raise UsageError(
            f"the back end of torchcomms needs a torchcomms with register_backend ({error}); build it from its "
            "sources: the torchcomms 0.0.1 of PyPI is a placeholder"
        ) from None
    register_backend(name, type("PlannedComm", (TorchcommsBackend, TorchCommBackend), {}))


class TorchcommsBackend:
    """The back end of one communicator on one rank; `register` joins it with torchcomms's base class.

    Tensors are on the device of the communicator, of any strides. A method returns None once it has ended, or with
    `async_op` an object with `wait`. Wrong arguments of a collective are a `UsageError` on all ranks before anything
    moves, as in the process group "topoplan"; a failed rank is a `BackendError`.
    """

    _group: ProcessGroupTopoplan

    def __init__(self) -> None:
        super().__init__()
        self._place = _place()
        self._name = ""
        self._store: dist.Store | None = None

    def init(self, device: torch.device, name: str, options: Any) -> None:
        """Meet the other ranks: at the store of the options, else at MASTER_ADDR and MASTER_PORT."""
        if torch.device(device).type not in ("cpu", "cuda"):
            raise UsageError(f"device must be cpu or cuda, got {device}; use another back end for it")
        if self._place is None:
            names = " or ".join("/".join(pair) for pair in PLACES)
            raise UsageError(f"the environment must have the rank and the number of ranks; set {names}")
        rank, size = self._place
        store = options.store
        if store is None:
            store, _, _ = next(iter(rendezvous("env://", rank, size, timeout=options.timeout)))
        self._open(dist.PrefixStore(f"torchcomms {name}/", store), name, range(size), options.timeout, size)

    def _open(
        self, store: dist.Store, name: str, members: Sequence[int], timeout: timedelta, job_size: int
    ) -> None:
        assert self._place is not None, "`init` and `split` have set it"
        rank, size = self._place
        self._name, self._store = name, store
        groups = inner_groups(renewed(store, rank), rank, size, timeout)
        self._group = ProcessGroupTopoplan(groups, timeout=timeout, members=members)
        self._group._job_size = job_size

    def finalize(self) -> None:
        self._group.shutdown()
        self._store = None

    def get_rank(self) -> int:
        return self._group.rank()

    def get_size(self) -> int:
        return self._group.size()

    def get_backend_name(self) -> str:
        return self._group.getBackendName()

    def get_comm_name(self) -> str:
        return self._name

    def set_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)

    def split(self, ranks: Sequence[int], name: str, options: Any) -> TorchcommsBackend | None:
        """Return the back end of some ranks in their order, with a plan of its own; None on a rank that lists none.

        All ranks call it. Raises `UsageError` on all of them, with the same text, if a rank is not among its `ranks`,
        or one of these lists others.
        """
        ranks = self._agreed_split(ranks)
        if not ranks:
            return None
        assert self._store is not None, "`finalize` was not called"
        made = type(self)()
        made._place = ranks.index(self.get_rank()), len(ranks)
        store = dist.PrefixStore(f"{name} of {'-'.join(map(str, ranks))}/", self._store)
        members = [self._group.members[rank] for rank in ranks]
        made._open(store, name, members, options.timeout, self._group._job_size)
        return made

    def _agreed_split(self, ranks: Sequence[int]) -> list[int]:
        rank, size = self.get_rank(), self.get_size()

        def text() -> str:
            try:
                listed = list(map(index, ranks))
            except TypeError:
                raise UsageError(f"ranks must be a list of ranks, got {ranks!r}") from None
            if listed:
                check_ranks(listed, size)
            if listed and rank not in listed:
                raise UsageError(
                    f"rank {rank} must be among the ranks {listed} of its new communicator; pass an empty list on "
                    "ranks that get none"
                )
            return json.dumps(listed)

        device = torch.device("cpu" if "cpu" in self._group.served else "cuda")
        lists = list(map(json.loads, gather_or_raise(gather_over(self._group.inner, device), text)))
        for lister, listed in enumerate(lists):
            for other in listed:
                if lists[other] != listed:
                    raise UsageError(
                        f"rank {other} must list the ranks {listed} as rank {lister} does, got {lists[other]}; give "
                        "all ranks of a new communicator the same list"
                    )
        return list(lists[rank])

    def send(self, tensor: torch.Tensor, dst: int, async_op: bool) -> Any:
        return _ended(self._group.send([tensor], self._peer(dst, "dst"), 0), async_op)

    def recv(self, tensor: torch.Tensor, src: int, async_op: bool) -> Any:
        return _ended(self._group.recv([tensor], self._peer(src, "src"), 0), async_op)

    def broadcast(self, tensor: torch.Tensor, root: int, async_op: bool) -> Any:
        opts = self._options(dist.BroadcastOptions, root=root)
        return _ended(self._group.broadcast([tensor], opts), async_op)

    def all_reduce(self, tensor: torch.Tensor, op: Any, async_op: bool) -> Any:
        opts = self._options(dist.AllreduceOptions, op=op)
        return _ended(self._group.allreduce([tensor], opts), async_op)

    def reduce(self, tensor: torch.Tensor, root: int, op: Any, async_op: bool) -> Any:
        opts = self._options(dist.ReduceOptions, root=root, op=op)
        return _ended(self._group.reduce([tensor], opts), async_op)

    def all_gather(self, tensor_list: list[torch.Tensor], tensor: torch.Tensor, async_op: bool) -> Any:
        return _ended(self._group.allgather([tensor_list], [tensor]), async_op)

    def all_gather_v(self, tensor_list: list[torch.Tensor], tensor: torch.Tensor, async_op: bool) -> Any:
        return self.all_gather(tensor_list, tensor, async_op)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, async_op: bool) -> Any:  # noqa: A002
        return _ended(self._group.all_gather_single(output, input), async_op)

    def reduce_scatter(
        self, output: torch.Tensor, input_list: list[torch.Tensor], op: Any, async_op: bool
    ) -> Any:
        opts = self._options(dist.ReduceScatterOptions, op=op)
        return _ended(self._group.reduce_scatter([output], [input_list], opts), async_op)

    def reduce_scatter_v(
        self, output: torch.Tensor, input_list: list[torch.Tensor], op: Any, async_op: bool
    ) -> Any:
        return self.reduce_scatter(output, input_list, op, async_op)

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        op: Any,
        async_op: bool,
    ) -> Any:
        opts = self._options(dist.ReduceScatterOptions, op=op)
        return _ended(self._group.reduce_scatter_single(output, input, opts), async_op)

    def all_to_all(
        self, output_list: list[torch.Tensor], input_list: list[torch.Tensor], async_op: bool
    ) -> Any:
        return _ended(self._group.alltoall(output_list, input_list), async_op)

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor, async_op: bool) -> Any:  # noqa: A002
        return _ended(self._group.alltoall_base(output, input), async_op)

    def all_to_all_v_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        async_op: bool,
    ) -> Any:
        return _ended(
            self._group.alltoall_base(output, input, list(output_splits), list(input_splits)), async_op
        )

    def scatter(self, output: torch.Tensor, input_list: list[torch.Tensor], root: int, async_op: bool) -> Any:
        opts = self._options(dist.ScatterOptions, root=root)
        given = [input_list] if root == self.get_rank() else []
        return _ended(self._group.scatter([output], given, opts), async_op)

    def gather(
        self,
        output_list: list[torch.Tensor],
        input: torch.Tensor,  # noqa: A002
        root: int,
        async_op: bool,
    ) -> Any:
        opts = self._options(dist.GatherOptions, root=root)
        outputs = [output_list] if root == self.get_rank() else []
        return _ended(self._group.gather(outputs, [input], opts), async_op)

    def barrier(self, async_op: bool) -> Any:
        return _ended(self._group.barrier(), async_op)

    def _options(self, kind: Callable[[], Any], *, root: int | None = None, op: Any = None) -> Any:
        """Return torch's options of a collective; all ranks refuse a wrong root or reduction of one."""

        def made() -> Any:
            opts = kind()
            if root is not None:
                opts.rootRank = self._peer(root, "root")
            if op is not None:
                name = op.type.name
                if name not in REDUCTIONS:
                    raise UsageError(
                        f"op must be one of {', '.join(REDUCTIONS)}, got {name}; multiply the tensor before a SUM"
                    )
                opts.reduceOp = getattr(dist.ReduceOp, name)
            return opts

        return self._group._check_on_all(made)

    def _peer(self, rank: int, name: str) -> int:
        if not 0 <= rank < self.get_size():
            raise UsageError(f"{name} must be a rank from 0 to {self.get_size() - 1}, got {rank}")
        return rank


def _place() -> tuple[int, int] | None:
    """Return the rank of this process and the number of ranks, by the environment; None if they are not there."""
    for rank, size in PLACES:
        with suppress(KeyError, ValueError):
            found = int(os.environ[rank]), int(os.environ[size])
            if 0 <= found[0] < found[1]:
                return found
    return None


def _ended(work: Any, async_op: bool) -> Any:
    """Return the work of an asynchronous call; wait for that of another one, and return None."""
    if async_op:
        return work
    work.wait()
    return None


with suppress(UsageError):  # without torchcomms there is nothing to register with
    register()

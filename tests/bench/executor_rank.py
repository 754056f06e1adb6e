"""One rank of what `tests.bench.executors` times: it opens a contender, and then runs the turns that it is asked for.

``python -P executor_rank.py SOCKET CONTENDER``, started by the launcher that the contender needs; ``CONTENDER`` is a
JSON object with ``kind``, ``ranks`` and what the kind needs. A turn is a line of JSON: bytes, calls of a block and
blocks; the answer is the seconds of each block. Between turns a rank sleeps at its socket, whose end is its own.

It is run by its path, so that ``PYTHONPATH`` says which checkout is timed; MPI's own allreduce needs numpy and mpi4py
alone.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

WARM = 12
"""Steps of DDP before the first that counts: it arranges its buckets anew, and chunk sizes are tried."""

PARAMETERS = 8  # tensors that gradients of DDP are spread over


class Contender(ABC):
    """What is timed.

    Attributes
    ----------
    label : str
        Name and version of the library.
    rank : int
        Of this process.
    """

    label: str
    rank: int

    @abstractmethod
    def meet(self) -> None:
        """Wait until every rank is here."""

    @abstractmethod
    def prepared(self, nbytes: int) -> Callable[[], object]:
        """The call to time, with its arrays, run and checked before."""

    def close(self) -> None:  # noqa: B027
        """Give up what is open."""


class AllReduce(Contender):
    """An allreduce of float32 from arrays of this process into others, or in place."""

    def __init__(self, *, ranks: int, in_place: bool) -> None:
        self.total = ranks * (ranks + 1) / 2
        self.in_place = in_place
        self.held: tuple[int, ...] = (self.rank,)

    @abstractmethod
    def run(self, given: list[Any], out: list[Any]) -> None:
        """Sum what all ranks give; lists of one array for each rank of this process."""

    def bound(self, given: list[Any], out: list[Any]) -> Callable[[], object]:
        """The call on these arrays."""
        return partial(self.run, given, out)

    def made(self, count: int) -> Any:
        return np.empty(count, np.float32)

    def warm(self, nbytes: int, call: Callable[[], object]) -> None:
        """Call until later calls are no slower."""
        call()

    def prepared(self, nbytes: int) -> Callable[[], object]:
        given = [self.made(nbytes // 4) for _ in self.held]
        out = given if self.in_place else [self.made(nbytes // 4) for _ in self.held]
        call = self.bound(given, out)
        _fill(given, [0 for _ in self.held])
        self.warm(nbytes, call)
        _fill(given, [rank + 1 for rank in self.held])
        call()
        if not all(bool((array == self.total).all()) for array in out):
            raise SystemExit(f"{self.label}: rank {self.rank} got wrong sums of {nbytes} bytes")
        if self.in_place:  # sums of sums would end at infinity
            _fill(given, [0 for _ in self.held])
        return call


class Planned(AllReduce):
    def __init__(
        self, *, backend: str, ranks: int, in_place: bool, shared_arrays: bool, is_prepared: bool = False
    ) -> None:
        import topoplan
        from collectives import Communicator

        plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=range(ranks))
        self.comm = Communicator(plan, backend, timeout=60)
        if shared_arrays and not hasattr(self.comm, "empty"):
            raise SystemExit("communicators of this checkout make no arrays")
        self.rank, self.label = self.comm.ranks[0], f"topoplan {topoplan.__version__}"
        super().__init__(ranks=ranks, in_place=in_place)
        self.held = self.comm.ranks
        self.shared_arrays, self.is_prepared = shared_arrays, is_prepared
        self.small = self.made(1), self.made(1)

    def made(self, count: int) -> Any:
        if self.shared_arrays:
            return self.comm.empty((count,), "float32")
        return self.comm.arrays.of(np.empty(count, np.float32))

    def run(self, given: list[Any], out: list[Any]) -> None:
        if self.comm.one_rank:
            self.comm.all_reduce(given[0], out=out[0])
        else:
            self.comm.all_reduce(given, out=out)

    def bound(self, given: list[Any], out: list[Any]) -> Callable[[], object]:
        if not self.is_prepared:
            return super().bound(given, out)
        alone = self.comm.one_rank
        made: Callable[[], object] = self.comm.prepare(
            "allreduce", given[0] if alone else given, out=out[0] if alone else out
        )
        return made

    def warm(self, nbytes: int, call: Callable[[], object]) -> None:
        """Until the chunk size is settled."""
        while not self.comm._settled(nbytes):
            call()
        call()

    def meet(self) -> None:
        if self.comm.one_rank:
            self.comm.all_reduce(self.small[0], out=self.small[1])

    def close(self) -> None:
        self.comm.close()


class Mpi(AllReduce):
    def __init__(self, *, ranks: int, in_place: bool) -> None:
        from mpi4py import MPI

        self.world, self.there = MPI.COMM_WORLD, MPI.IN_PLACE
        name, version = MPI.get_vendor()
        self.rank, self.label = self.world.rank, f"{name} {'.'.join(map(str, version))}"
        super().__init__(ranks=ranks, in_place=in_place)

    def run(self, given: list[Any], out: list[Any]) -> None:
        self.world.Allreduce(self.there if self.in_place else given[0], out[0])

    def meet(self) -> None:
        self.world.Barrier()


class Gloo(AllReduce):
    """torch's over gloo, which knows only sums in place."""

    def __init__(self, *, ranks: int) -> None:
        self.torch, self.dist = _open_gloo()
        self.rank, self.label = self.dist.get_rank(), f"gloo of torch {self.torch.__version__}"
        super().__init__(ranks=ranks, in_place=True)
        self.small = self.made(1)

    def made(self, count: int) -> Any:
        return self.torch.zeros(count)

    def run(self, given: list[Any], out: list[Any]) -> None:
        self.dist.all_reduce(out[0])

    def meet(self) -> None:
        self.dist.all_reduce(self.small)

    def close(self) -> None:
        self.dist.destroy_process_group()


class Memcpy(Contender):
    """Every rank by itself copies the bytes: it reads and writes as much as the shortest allreduce must."""

    def __init__(self) -> None:
        self.rank, self.label = int(os.environ["RANK"]), "memcpy"

    def meet(self) -> None:
        """See `Contender.meet`; ranks of it need nothing of each other."""

    def prepared(self, nbytes: int) -> Callable[[], object]:
        source, target = np.zeros(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        call = partial(np.copyto, target, source)
        call()
        return call


class Ddp(Contender):
    """A step of training with next to no computing, its gradients averaged by DDP over gloo, or by a hook."""

    def __init__(self, *, ranks: int, hook: str, settings: dict[str, Any]) -> None:
        import topoplan

        self.torch, self.dist = _open_gloo()
        self.rank, self.label = self.dist.get_rank(), f"torch {self.torch.__version__}"
        self.plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=range(ranks))
        self.hook, self.settings = hook, settings
        self.made: tuple[int, Any, Any] = (0, None, None)

    def meet(self) -> None:
        self.dist.barrier()

    def prepared(self, nbytes: int) -> Callable[[], object]:
        if self.made[0] != nbytes:
            self._close_hook()
            self.made = (nbytes, *self._model(nbytes))
            for _ in range(WARM):
                self._step()
        self._step()
        return self._step

    def _model(self, nbytes: int) -> tuple[Any, Any]:
        """Parameters under DDP, and the state of its hook."""
        from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
        from torch.nn.parallel import DistributedDataParallel

        torch, count = self.torch, nbytes // 4 // PARAMETERS
        generator = torch.Generator().manual_seed(self.rank)

        class Parameters(torch.nn.Module):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.slopes = torch.randn(count, generator=generator)
                self.parts = torch.nn.ParameterList([torch.zeros(count) for _ in range(PARAMETERS)])

            def forward(self) -> Any:
                return torch.stack([torch.dot(part, self.slopes) for part in self.parts]).sum()

        model = DistributedDataParallel(Parameters(), gradient_as_bucket_view=True)
        state = None
        if self.hook == "none":
            model.register_comm_hook(None, noop_hook)
        elif self.hook == "plan":
            from collectives.torch import HookState, topoplan_hook

            state = HookState(self.plan, **self.settings)
            model.register_comm_hook(state, topoplan_hook)
        return model, state

    def close(self) -> None:
        self._close_hook()
        self.dist.destroy_process_group()

    def _close_hook(self) -> None:
        if self.made[2] is not None:
            self.made[2].close()

    def _step(self) -> None:
        model = self.made[1]
        model.zero_grad(set_to_none=False)
        model().backward()


KINDS: dict[str, Callable[..., Contender]] = {
    "planned": Planned,
    "mpi": Mpi,
    "gloo": Gloo,
    "memcpy": Memcpy,
    "ddp": Ddp,
}


def main() -> None:
    """Open the contender, and run turns until the socket closes."""
    path, about = sys.argv[1], json.loads(sys.argv[2])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        lines = connection.makefile("rw", encoding="utf-8")
        contender = KINDS[about.pop("kind")](**about)
        print(json.dumps({"rank": contender.rank, "label": contender.label}), file=lines, flush=True)
        for line in lines:
            turn = json.loads(line)
            call = contender.prepared(turn["nbytes"])
            seconds = [_block(contender, call, turn["calls"]) for _ in range(turn["blocks"])]
            del call
            print(json.dumps(seconds), file=lines, flush=True)
        contender.close()


def _block(contender: Contender, call: Callable[[], object], calls: int) -> float:
    """Seconds of some calls, one behind the other, from when every rank is here."""
    contender.meet()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - started


def _fill(arrays: list[Any], values: list[int]) -> None:
    for array, value in zip(arrays, values, strict=True):
        array[...] = value


def _open_gloo() -> tuple[Any, Any]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return torch, dist


if __name__ == "__main__":
    main()

"""Average buckets of DDP in other synchronisation modes than BSP: with the gradients that have arrived, or not at all.

No call is needed in the training loop: torch tells of every optimizer that has stepped, and `LocalSGD` averages when
one has moved the parameters of these buckets. In the end `finish` makes them the same on all ranks.

Gradients that an optimizer computes anew inside one ``step(closure)``, as LBFGS does, belong to one step, however
often: ranks need not do it equally often.
"""

from __future__ import annotations

import gc
import json
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from operator import itemgetter
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from collectives.communicator.communicator import Communicator
from collectives.torch.bucket_exchange import DdpBucketExchange, nbytes_of, rows_in
from collectives.torch.parameter_residuals import BucketLayout, gradient_view, real_count
from collectives.training.averaging import Averager, average_parameters
from collectives.training.buckets import error_in_bucket
from collectives.training.checkpoint_state import SETTLED
from collectives.training.modes import LocalSGD
from topoplan.errors import TopoplanError, UsageError

GLANCE = 8
"""Elements of each parameter by which it is seen to have moved."""

UNTOLD = 2
"""Moves that nobody has told of until that is an error: SAM moves parameters to and fro before its optimiser steps."""


class ModeExchange:
    """Averages buckets without meeting the other ranks.

    Parameters
    ----------
    averager : Averager
        Of another mode than BSP.
    in_step : DdpBucketExchange
        For the first steps of stale gradients.
    communicator : Communicator
        Averages parameters.
    """

    def __init__(self, averager: Averager, in_step: DdpBucketExchange, communicator: Communicator) -> None:
        self._averager = averager
        self._local = isinstance(averager.mode, LocalSGD)
        self._in_step = in_step
        self._communicator = communicator
        self._buckets: dict[str, list[torch.Tensor]] = {}
        self._parameters: dict[int, torch.Tensor] = {}
        self._averaged: dict[int, int] = {}
        self._anchors: dict[int, torch.Tensor] = {}
        self._sparse: dict[int, int] = {}
        """Of parameters with sparse gradients, how many axes number the rows."""
        self._movers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._told = False
        self._seen: torch.Tensor | None = None
        self._untold = 0
        self._stepping: set[int] = set()
        self._counted = False
        self._apart = ReplicaDrift(f"{averager.mode}")
        before = register_optimizer_step_pre_hook(_weakly(self._begins))
        after = register_optimizer_step_post_hook(_weakly(self._stepped))
        self._leave = weakref.finalize(self, _remove, before, after)
        self._remind = weakref.finalize(self, self._apart.remind)

    def average(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """The average of a bucket, as far as it is known.

        Raises
        ------
        UsageError
            With `LocalSGD`: parameters have moved, and nobody has told of it.
        BackendError
            As `DdpBucketExchange.average`.
        """
        averager = self._averager
        layout = self._in_step.layout_of(bucket)
        key = layout.key
        self._buckets[key] = bucket.parameters()
        self._parameters.update((id(one), one) for one in self._buckets[key])
        try:
            if not self._local and averager.recorder.step < SETTLED:
                return self._in_step.average(bucket)
            buffer: torch.Tensor = bucket.buffer()
            try:
                if buffer.is_sparse:
                    self._start_sparse(key, buffer)
                else:
                    averager.start(key, buffer, out=buffer)
            except TopoplanError as error:
                about = f"bucket {bucket.index()} of {nbytes_of(buffer)} bytes"
                rank = self._in_step.rank
                raise error_in_bucket(error, step=averager.recorder.step, bucket=about, rank=rank) from error
            self._pull_back(layout, bucket)
            if bucket.is_last():
                self._end_step()
        except TopoplanError:
            self._apart.steps = 0
            averager.give_up()
            raise
        future: torch.futures.Future[Any] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        future.set_result(buffer)
        return future

    def _start_sparse(self, key: str, buffer: torch.Tensor) -> None:
        """Average a sparse gradient with what has come: its own rows, and those of others that hold something."""
        (parameter,) = self._buckets[key]
        self._sparse[id(parameter)] = buffer.sparse_dim()
        if self._local:
            return  # it stays as it is
        own = buffer.coalesce()
        whole = own.to_dense()
        line = _real_line(whole)
        self._averager.start(key, line, out=line)
        buffer.copy_(rows_in(whole, own.sparse_dim(), own.indices()))

    def after_step(self, parameters: Sequence[torch.Tensor]) -> None:
        """With `LocalSGD`, average parameters that have moved as often as it is time, and not again."""
        self._told = True
        self._seen = None
        due = self._averager.due
        while behind := [one for one in parameters if self._averaged.get(id(one), 0) < due]:
            self._average(behind)
            self._parameters.update((id(one), one) for one in behind)
            self._averaged.update((id(one), self._averaged.get(id(one), 0) + 1) for one in behind)

    @property
    def gap(self) -> int | None:
        """As `Averager.gap`."""
        return self._averager.gap

    def finish(self, step: Callable[[], object] | None) -> None:
        """Use the gradients that came late, and average the parameters: the same bits on all ranks.

        Parameters
        ----------
        step : callable or None
            Moves the parameters by their gradients; None for the optimisers that have done so.

        Raises
        ------
        BackendError
            Another rank failed, or does not finish within the timeout.
        UsageError
            No optimiser is known, or something came for a bucket that this rank has never had.
        """
        averager = self._averager
        if not self._local and self._parameters:
            # by identity: a reference to an optimiser that is gone cannot be hashed
            movers = {id(one): one for key, one in self._movers.items() if key in self._parameters}
            optimisers = [found for one in movers.values() if (found := one()) is not None]
            if step is None and (not movers or len(optimisers) < len(movers)):
                raise UsageError(
                    f"gradients that came late in {averager.mode} are still to be used, and there is no optimiser of "
                    "torch.optim that has moved the parameters; call state.finish(step), where step() moves them by "
                    "their gradients"
                )
            steps = [one.step for one in optimisers] if step is None else [step]
            self._use(averager.finish(), steps, optimisers)
        self._average(list(self._parameters.values()))
        self._averaged = dict.fromkeys(self._parameters, averager.due)
        self._share_buffers()
        self._apart.steps = 0

    def close(self) -> None:
        """Leave."""
        self._leave()
        try:
            self._averager.close()
        finally:
            self._remind()

    def _begins(self, optimiser: torch.optim.Optimizer) -> None:
        """An optimiser of this process begins a step; what backward gives until it ends is of that step."""
        if id(optimiser) in self._stepping:
            self._stepping.clear()  # an error has ended its last step
        # also where another one is inside a step: an error may have ended that, and it never steps again
        self._counted = False
        self._stepping.add(id(optimiser))

    def _stepped(self, optimiser: torch.optim.Optimizer) -> None:
        """An optimiser of this process has stepped."""
        self._stepping.discard(id(optimiser))
        listed = (one for group in optimiser.param_groups for one in group["params"])
        mine = [one for one in listed if id(one) in self._parameters]
        if mine:
            # of optimisers inside one another the outermost is the last to tell
            self._movers.update((id(one), weakref.ref(optimiser)) for one in mine)
            self.after_step(mine)

    def _end_step(self) -> None:
        """Backward has given all buckets: the end of a step, but inside a step of an optimiser only the first time."""
        if self._stepping and self._counted:
            return
        self._counted = True
        self._check_told()
        self._averager.end_step()
        self._apart.steps += 1
        self._seen = self._glance() if self._local and not self._told else None

    def _check_told(self) -> None:
        """Whether parameters have moved again and again though nobody told; looked at until somebody has."""
        if self._seen is None or torch.equal(self._seen, self._glance()):
            return
        self._untold += 1
        if self._untold == UNTOLD:
            raise UsageError(
                f"training step {self._averager.recorder.step}: the parameters have moved and no optimiser of "
                f"torch.optim did it, so that {self._averager.mode} cannot know when to average them; call "
                "state.after_step(model.parameters()) after each update"
            )

    def _glance(self) -> torch.Tensor:
        return torch.cat([_real_line(one)[:GLANCE].double().cpu() for one in self._parameters.values()])

    def _use(
        self,
        left: dict[str, Any],
        steps: Sequence[Callable[[], object]],
        optimisers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """Let the parameters move by what is left over of each bucket."""
        for key in left:
            if key not in self._buckets:
                raise UsageError(
                    f"gradients came for {key}, which are no bucket here; give all ranks one model"
                )
        if not left:
            return
        listed = [one for each in optimisers for group in each.param_groups for one in group["params"]]
        with _without_gradients([*listed, *self._parameters.values()]):
            for one in self._parameters.values():
                one.grad = torch.zeros_like(one)
            for key, line in left.items():
                parameters = self._buckets[key]
                parts = torch.split(
                    torch.from_numpy(line.reshape(-1)), [real_count(one) for one in parameters]
                )
                for part, one in zip(parts, parameters, strict=True):
                    assert one.grad is not None, "zeros were put there"
                    one.grad += gradient_view(part, one).to(one.grad)
            for one in self._parameters.values():
                if (axes := self._sparse.get(id(one))) is not None:
                    assert one.grad is not None, "zeros were put there"
                    one.grad = rows_in(one.grad, axes)
            for step in steps:
                step()

    def _pull_back(self, layout: BucketLayout, bucket: GradBucket) -> None:
        """Add to a bucket what pulls its parameters to where they were last averaged; see `Proximal`."""
        mode = self._averager.mode
        if not isinstance(mode, LocalSGD) or not mode.proximal:
            return
        buffer, alpha = bucket.buffer(), mode.proximal * self._averager.scale
        for (_, start, stop), one in zip(layout.parts(), bucket.parameters(), strict=True):
            if id(one) in self._anchors:
                pull = one.detach() - self._anchors[id(one)]
                if buffer.is_sparse:
                    buffer.add_(rows_in(pull, buffer.sparse_dim()), alpha=alpha)
                else:
                    gradient_view(buffer[start:stop], one).add_(pull, alpha=alpha)
            else:
                self._anchors[id(one)] = one.detach().clone()

    def _share_buffers(self) -> None:
        """Make the buffers that differ between ranks the same: averages, and of integers the largest."""
        comm = self._communicator
        named = _buffers_beside(list(self._parameters.values()))
        told = [
            (
                name,
                str(one.dtype),
                sha256(_real_line(one).cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest(),
            )
            for name, one in named
        ]
        ranks = [json.loads(text) for text in comm.gather_texts(json.dumps(told))]
        if any([one[:2] for one in mine] != [one[:2] for one in ranks[0]] for mine in ranks):
            warnings.warn("ranks have other buffers than each other, which stay as they are", stacklevel=4)
            return
        differ = [
            one for (_, one), *found in zip(named, *ranks, strict=True) if any(x != found[0] for x in found)
        ]
        self._average([one for one in differ if one.is_floating_point() or one.is_complex()])
        for one in differ:
            if not one.is_floating_point() and not one.is_complex():
                line = one.to(torch.int64).reshape(-1)
                comm.all_reduce(line, op="max", out=line)
                one.copy_(line.view_as(one))

    def _average(self, parameters: Sequence[torch.Tensor]) -> None:
        """Average parameters over all ranks, those of one type together."""
        for one in parameters:
            self._anchors.pop(id(one), None)  # the next gradient finds it where it is now
        groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for one in parameters:
            groups.setdefault((one.dtype, one.device), []).append(one.detach())
        lines = [torch.cat([_real_line(one) for one in group]) for group in groups.values()]
        average_parameters(self._communicator, self._averager.recorder, lines)
        for line, group in zip(lines, groups.values(), strict=True):
            for part, tensor in zip(
                torch.split(line, [real_count(one) for one in group]), group, strict=True
            ):
                found = (
                    torch.view_as_complex(part.view(part.numel() // 2, 2)) if tensor.is_complex() else part
                )
                tensor.copy_(found.view_as(tensor))


class ReplicaDrift:
    """How many steps ranks have made since their parameters were last the same, and a word about it in the end."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.steps = 0

    def remind(self) -> None:
        """Warn where training ended so."""
        if self.steps:
            warnings.warn(
                f"training in mode {self.mode} ended without finish: each rank has parameters of its own; call "
                "state.finish() after the last step",
                stacklevel=2,
            )


def _buffers_beside(parameters: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Return the buffers, by name, of the DDP models that have these parameters; a hook is not told its model."""
    wanted = set(map(id, parameters))
    models = [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]
    found = {
        id(buffer): (name, buffer)
        for model in models
        if not wanted.isdisjoint(map(id, model.module.parameters()))
        for name, buffer in model.module.named_buffers()
        if name not in getattr(model, "parameters_to_ignore", ()) and buffer.layout == torch.strided
    }
    return sorted(found.values(), key=itemgetter(0))


def _weakly(method: Callable[[torch.optim.Optimizer], None]) -> Callable[..., None]:
    """What calls a method with its first argument, as long as its object lives."""
    held = weakref.WeakMethod(method)

    def call(optimiser: torch.optim.Optimizer, *_: object) -> None:
        found = held()
        if found is not None:
            found(optimiser)

    return call


def _remove(*handles: Any) -> None:
    for one in handles:
        one.remove()


@contextmanager
def _without_gradients(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Parameters have no gradients at first, and theirs again in the end."""
    kept = [(one, one.grad) for one in parameters]
    for one, _ in kept:
        one.grad = None
    try:
        yield
    finally:
        for one, gradient in kept:
            one.grad = gradient


def _real_line(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor row by row, complex ones as real and imaginary part in turn."""
    found = tensor.detach()
    return (torch.view_as_real(found.resolve_conj()) if found.is_complex() else found).reshape(-1)

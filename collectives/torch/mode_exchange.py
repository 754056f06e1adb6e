"""Average buckets of DDP in other synchronisation modes than BSP: with the gradients that have arrived, or not at all.

No call is needed in the training loop: torch reports each step of an optimizer. When one has moved the parameters of
these buckets, `LocalSGD` averages them, and `DiLoCo` and `SparseLoCo` advance their rounds. In the end `finish` makes
them the same on all ranks.

Gradients that an optimizer computes anew inside one ``step(closure)``, as LBFGS does, belong to one step, however
often: the number may differ between ranks.
"""

from __future__ import annotations

import gc
import json
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from collectives.communicator.communicator import Communicator
from collectives.torch.bucket_exchange import DdpBucketExchange, nbytes_of
from collectives.torch.parameter_residuals import BucketLayout, gradient_view, real_count, real_view
from collectives.torch.sparse_rows import rows_in
from collectives.training.averaging import Averager, OuterAverager, average_parameters
from collectives.training.buckets import error_in_bucket
from collectives.training.checkpoint_state import SETTLED
from collectives.training.modes import LOCAL_MODES, LocalSGD
from topoplan.errors import TopoplanError, UsageError

GLANCE = 8
"""Elements of each parameter that are compared to see whether it has moved."""

UNREPORTED = 2
"""Unreported moves until that is an error: SAM moves parameters to and fro before its optimizer steps."""


class ModeExchange:
    """Averages buckets without waiting for all ranks.

    `averager` is of another mode than BSP; `in_step` serves the first steps of stale gradients; `communicator` averages
    parameters.
    """

    def __init__(self, averager: Averager, in_step: DdpBucketExchange, communicator: Communicator) -> None:
        self._averager = averager
        self._local = isinstance(averager.mode, LOCAL_MODES)
        self._outer = averager if isinstance(averager, OuterAverager) else None
        self._in_step_until = 0 if self._local else SETTLED
        if self._outer is not None:
            self._in_step_until = self._outer.optimizer.mode.warm_up
        self._names: dict[int, str] = {}
        """Names by which an outer optimizer knows parameters: their numbers."""
        self._averaged_before = 0
        self._in_step = in_step
        self._communicator = communicator
        self._buckets: dict[str, list[torch.Tensor]] = {}
        self._parameters: dict[int, torch.Tensor] = {}
        self._averaged: dict[int, int] = {}
        self._anchors: dict[int, torch.Tensor] = {}
        self._restored: dict[int, torch.Tensor] = {}
        """Anchors of a checkpoint by the numbers of their parameters, until these have a gradient."""
        self._sparse: dict[int, int] = {}
        """For parameters with sparse gradients the number of axes that number rows."""
        self._movers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._reported = False
        self._seen: torch.Tensor | None = None
        self._unreported = 0
        self._stepping: set[int] = set()
        self._counted = False
        self._drift = ReplicaDrift(f"{averager.mode}")
        before = register_optimizer_step_pre_hook(_weakly(self._begins))
        after = register_optimizer_step_post_hook(_weakly(self._stepped))
        self._leave = weakref.finalize(self, _remove, before, after)
        self._remind = weakref.finalize(self, self._drift.remind)

    def average(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Return the average of a bucket over the gradients that have arrived.

        Raises `UsageError` if parameters have moved without `after_step` in `LocalSGD`, and `BackendError` as
        `DdpBucketExchange.average`.
        """
        averager = self._averager
        layout = self._in_step.layout_of(bucket)
        key = layout.key
        self._buckets[key] = bucket.parameters()
        self._parameters.update((id(one), one) for one in self._buckets[key])
        try:
            if averager.recorder.step < self._in_step_until:
                return self._in_step.average(bucket)
            if self._outer is not None:
                fresh = {
                    f"{number}": one
                    for number, one in zip(layout.numbers, self._buckets[key], strict=True)
                    if id(one) not in self._names
                }
                self._names.update((id(one), name) for name, one in fresh.items())
                self._outer.optimizer.hold({name: [_real_line(one)] for name, one in fresh.items()})
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
            self._drift.steps = 0
            averager.give_up()
            raise
        future: torch.futures.Future[Any] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        future.set_result(buffer)
        return future

    def _start_sparse(self, key: str, buffer: torch.Tensor) -> None:
        """Average a sparse gradient with arrived ones: its own rows, and those of others that are not zero."""
        (parameter,) = self._buckets[key]
        self._sparse[id(parameter)] = buffer.sparse_dim()
        if self._local:
            return
        own = buffer.coalesce()
        whole = own.to_dense()
        line = _real_line(whole)
        self._averager.start(key, line, out=line)
        buffer.copy_(rows_in(whole, own.sparse_dim(), own.indices()))

    def after_step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Average parameters that have moved, or advance their rounds, as often as is due, and not again."""
        self._reported = True
        self._seen = None
        due = self._averager.due
        if self._outer is not None:
            parameters = [one for one in parameters if id(one) in self._names]
        while behind := [one for one in parameters if self._count(one) < due]:
            if self._outer is not None:
                count = min(map(self._count, behind)) + 1
                behind = [one for one in behind if self._count(one) < count]
                # a failed round is over: its parameters are those before it
                self._averaged.update((id(one), count) for one in behind)
                with self._lines(behind) as named:
                    self._outer.optimizer.advance(count, named)
                continue
            self._average(behind)
            self._parameters.update((id(one), one) for one in behind)
            self._averaged.update((id(one), self._averaged.get(id(one), 0) + 1) for one in behind)

    @property
    def meets(self) -> bool:
        """Whether `after_step` of all parameters now calls a collective."""
        least = min(map(self._count, self._parameters.values()), default=self._averaged_before)
        return least < self._averager.due and self._averager.mix_meets

    def _count(self, parameter: torch.Tensor) -> int:
        """Return how many due averages, or steps of rounds, a parameter has had."""
        return self._averaged.get(id(parameter), self._averaged_before)

    @contextmanager
    def _lines(self, parameters: Sequence[torch.Tensor]) -> Iterator[dict[str, list[torch.Tensor]]]:
        """Context with lines of parameters by name, which are copied back in the end, after an error too."""
        lines = {self._names[id(one)]: [_real_line(one)] for one in parameters}
        try:
            yield lines
        finally:
            for one, (line,) in zip(parameters, lines.values(), strict=True):
                if line.data_ptr() != one.data_ptr():
                    found = torch.view_as_complex(line.view(-1, 2)) if one.is_complex() else line
                    one.detach().copy_(found.view(one.shape))

    def outer_state(self) -> dict[str, Any] | None:
        """Return the state of an outer optimizer, its arrays as tensors; None without one."""
        return None if self._outer is None else _exchanged(self._outer.outer_state())

    def anchors(self) -> dict[int, torch.Tensor]:
        """Return copies of the anchors of a proximal `LocalSGD`, by the numbers of the parameters."""
        held = self._in_step.numbers_of(self._parameters.values())
        now = {number: self._anchors[id(one)] for number, one in held if id(one) in self._anchors}
        return {number: one.detach().cpu().clone() for number, one in {**self._restored, **now}.items()}

    def restore_anchors(self, kept: Mapping[int, torch.Tensor]) -> None:
        """Replace the anchors by what `anchors` returned; empty, the next gradient sets them."""
        self._anchors.clear()
        self._restored = {int(number): one for number, one in kept.items()}

    def restore_outer(self, states: Sequence[tuple[int, Any]], saved: int | None = None) -> str:
        """Restore what `outer_state` returned on ranks of a job; see `OuterAverager.restore_outer`."""
        assert self._outer is not None, "the state was checked"
        found = [([rank], _exchanged(one)) for rank, one in states]
        lost = self._outer.restore_outer(found, saved)
        self._averaged, self._averaged_before = {}, self._outer.due
        return lost

    @property
    def gap(self) -> int | None:
        """See `Averager.gap`."""
        return self._averager.gap

    def finish(self, step: Callable[[], object] | None) -> None:
        """Use late gradients, and average the parameters: the same bits on all ranks.

        `step` moves the parameters by their gradients; with None the optimizers do that have moved them before. Raises
        `UsageError` if no optimizer is known, or for late gradients of an unknown bucket.
        """
        averager = self._averager
        if self._local:
            self._catch_up()
        if not self._local and self._parameters:
            # by identity: a reference to a deleted optimizer cannot be hashed
            movers = {id(one): one for key, one in self._movers.items() if key in self._parameters}
            optimizers = [found for one in movers.values() if (found := one()) is not None]
            if step is None and (not movers or len(optimizers) < len(movers)):
                raise UsageError(
                    f"late gradients of {averager.mode} are unused, and no optimizer of torch.optim has moved the "
                    "parameters; call state.finish(step) with a step() that moves them by their gradients"
                )
            steps = [one.step for one in optimizers] if step is None else [step]
            self._use(averager.finish(), steps, optimizers)
        if self._outer is None:
            self._average(list(self._parameters.values()))
        elif known := [one for one in self._parameters.values() if id(one) in self._names]:
            with self._lines(known) as named:
                self._outer.align(averager.due, named)
        self._averaged = dict.fromkeys(self._parameters, averager.due)
        self._share_buffers()
        self._drift.steps = 0

    def _catch_up(self) -> None:
        """Take part in what is due, as other ranks do, if this rank's last steps were skipped, as by a GradScaler."""
        groups: dict[int, list[torch.Tensor]] = {}
        for key, one in self._parameters.items():
            if (mover := self._movers.get(key)) is not None:
                groups.setdefault(id(mover()), []).append(one)
        for group in groups.values():
            self.after_step(group)

    def close(self) -> None:
        self._leave()
        try:
            self._averager.close()
        finally:
            self._remind()

    def _begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer begins a step; gradients of backward until its end belong to that step."""
        if id(optimizer) in self._stepping:
            self._stepping.clear()  # an error has ended its last step
        # even if another one is inside a step: an error may have ended that, and it never steps again
        self._counted = False
        self._stepping.add(id(optimizer))

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._stepping.discard(id(optimizer))
        listed = (one for group in optimizer.param_groups for one in group["params"])
        mine = [one for one in listed if id(one) in self._parameters]
        if mine:
            # the outermost of nested optimizers reports last
            self._movers.update((id(one), weakref.ref(optimizer)) for one in mine)
            self.after_step(mine)

    def _end_step(self) -> None:
        """End a step after all buckets; inside a step of an optimizer only the first time."""
        if self._stepping and self._counted:
            return
        self._counted = True
        self._check_reported()
        self._averager.end_step()
        self._drift.steps += 1
        self._seen = self._glance() if self._local and not self._reported else None

    def _check_reported(self) -> None:
        """Raise `UsageError` if parameters have moved repeatedly without a report; checked until the first one."""
        if self._seen is None or torch.equal(self._seen, self._glance()):
            return
        self._unreported += 1
        if self._unreported == UNREPORTED:
            raise UsageError(
                f"training step {self._averager.recorder.step}: the parameters have moved without an optimizer of "
                f"torch.optim, which {self._averager.mode} needs to know when to average; call "
                "state.after_step(model.parameters()) after each update"
            )

    def _glance(self) -> torch.Tensor:
        return torch.cat([_real_line(one)[:GLANCE].double().cpu() for one in self._parameters.values()])

    def _use(
        self,
        late: dict[str, Any],
        steps: Sequence[Callable[[], object]],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        for key in late:
            if key not in self._buckets:
                raise UsageError(
                    f"gradients came for {key}, which are not a bucket here; give all ranks one model"
                )
        if not late:
            return
        listed = [one for each in optimizers for group in each.param_groups for one in group["params"]]
        with _without_gradients([*listed, *self._parameters.values()]):
            for one in self._parameters.values():
                one.grad = torch.zeros_like(one)
            for key, line in late.items():
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
        """Add to a bucket the pull of its parameters to their anchors; see `Proximal`."""
        mode = self._averager.mode
        if not isinstance(mode, LocalSGD) or not mode.proximal:
            return
        buffer, alpha = bucket.buffer(), mode.proximal * self._averager.scale
        for (number, start, stop), one in zip(layout.parts(), bucket.parameters(), strict=True):
            if (kept := self._restored.pop(number, None)) is not None:
                self._anchors[id(one)] = kept.to(one).view(one.shape)
            if id(one) in self._anchors:
                pull = one.detach() - self._anchors[id(one)]
                if buffer.is_sparse:
                    buffer.add_(rows_in(pull, buffer.sparse_dim()), alpha=alpha)
                else:
                    gradient_view(buffer[start:stop], one).add_(pull, alpha=alpha)
            else:
                self._anchors[id(one)] = one.detach().clone()

    def _share_buffers(self) -> None:
        """Make buffers that differ the same on all ranks: averages, and the maximum of integers."""
        comm = self._communicator
        named = _buffers_beside(list(self._parameters.values()))
        hashes = [
            (
                name,
                str(one.dtype),
                sha256(_real_line(one).cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest(),
            )
            for name, one in named
        ]
        ranks = [json.loads(text) for text in comm._gather_texts(json.dumps(hashes))]
        if any([one[:2] for one in mine] != [one[:2] for one in ranks[0]] for mine in ranks):
            warnings.warn("buffers differ in name or type between ranks, and are not averaged", stacklevel=4)
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
        self._restored.clear()
        for one in parameters:
            self._anchors.pop(id(one), None)  # the next gradient sets it anew
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
    """Counts steps since the parameters were last the same on all ranks, and warns of them in the end."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.steps = 0

    def remind(self) -> None:
        """Warn if there were any."""
        if self.steps:
            warnings.warn(
                f"training in mode {self.mode} ended without finish: each rank has parameters of its own; call "
                "state.finish() after the last step",
                stacklevel=2,
            )


def _buffers_beside(parameters: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Return the buffers, by name, of the DDP models with these parameters; torch does not pass the model to a hook."""
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
    """Return a function that calls a method with its first argument, as long as its object lives."""
    held = weakref.WeakMethod(method)

    def call(optimizer: torch.optim.Optimizer, *_: object) -> None:
        found = held()
        if found is not None:
            found(optimizer)

    return call


def _remove(*handles: Any) -> None:
    for one in handles:
        one.remove()


@contextmanager
def _without_gradients(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    kept = [(one, one.grad) for one in parameters]
    for one, _ in kept:
        one.grad = None
    try:
        yield
    finally:
        for one, gradient in kept:
            one.grad = gradient


def _exchanged(state: Any) -> Any:
    """Return a state with tensors in place of arrays, and arrays in place of tensors."""
    if isinstance(state, dict):
        return {name: _exchanged(one) for name, one in state.items()}
    if isinstance(state, list):
        return [_exchanged(one) for one in state]
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state)
    return state.detach().cpu().numpy() if isinstance(state, torch.Tensor) else state


def _real_line(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor row by row, complex ones as real and imaginary part in turn."""
    return real_view(tensor.detach()).reshape(-1)

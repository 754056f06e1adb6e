"""Average one bucket of DDP after another in the background, while backward computes the next.

The last bucket of a step waits for the others and is then averaged in the thread of backward: DDP has nothing else to
do, no other thread has to wake up, and ``loss.backward()`` raises the error of any bucket as it is; DDP itself would
convert it. If no plan fits the process group, torch's own allreduce averages.

A sparse gradient, as of ``nn.Embedding(sparse=True)``, has a bucket of its own. Ranks exchange their rows by an
allgather of the plan, whole, whatever filter or density the settings name.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from collectives.communicator.handle import Handle
from collectives.tables.torch_arrays import on_gpu
from collectives.torch.futures import future_of
from collectives.torch.parameter_residuals import (
    BucketLayout,
    ParameterNumbers,
    ParameterResiduals,
    real_count,
)
from collectives.torch.sparse_rows import NARROW, average_rows, sparse_rows
from collectives.training.averaging import InStepAverager
from collectives.training.buckets import DataPresence, error_in_bucket
from collectives.training.checkpoint_state import BucketPart, describe_state, real_shape, warn_of_unused_state
from collectives.training.gradient_filters import Cast
from collectives.training.report import Recorder
from topoplan.errors import TopoplanError, UsageError

Buckets = tuple[tuple[int, ...], ...]
"""The numbers of the parameters of each bucket of a step."""


class DdpBucket(Protocol):
    """The methods of a bucket of DDP in use."""

    def index(self) -> int:
        """Return its number in the step."""

    def buffer(self) -> torch.Tensor:
        """Return its gradients, one after another."""

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of these gradients."""


class OwnBucket:
    """A bucket of ours in the form of DDP's."""

    def __init__(self, index: int, buffer: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        self._index, self._buffer, self._parameters = index, buffer, parameters

    def index(self) -> int:
        return self._index

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters


class RegroupedBucket(OwnBucket):
    """A bucket of gradients of several buckets of DDP, copied; `give_back` writes its averages to those."""

    def __init__(self, index: int, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._places = [place for _, place in parts]
        super().__init__(index, torch.cat(self._places), [parameter for parameter, _ in parts])

    def give_back(self) -> None:
        """Copy the averages to the buckets of DDP."""
        lengths = [one.numel() for one in self._places]
        for place, average in zip(self._places, torch.split(self._buffer, lengths), strict=True):
            place.copy_(average)


class KeptBucket(OwnBucket):
    """A bucket kept until its step is over; DDP's own is gone when its hook has returned."""

    def __init__(self, bucket: DdpBucket) -> None:
        super().__init__(bucket.index(), bucket.buffer(), bucket.parameters())
        device = self._buffer.device
        self.averaged: torch.futures.Future[Any] = torch.futures.Future(
            devices=[device] if device.type == "cuda" else None
        )


class DdpBucketExchange:
    """Averages buckets by the plan of a communicator; `presence` is set while ranks may have no data.

    DDP rebuilds its buckets in the second step. The first step after `continue_buckets`
    is exchanged in the buckets of the saved run, so that entries are chosen from the same gradients. With
    ``TopK(per="model")`` every step is exchanged as one bucket, in the order of the parameters' numbers.
    """

    def __init__(self, averager: InStepAverager, numbers: ParameterNumbers) -> None:
        how = averager.settings
        self.presence: DataPresence | None = None
        momentum = 0.0 if how.top_k is None else how.top_k.momentum
        self.residuals = ParameterResiduals(averager.communicator, momentum=momentum)
        self._averager = averager
        self._numbers = numbers
        self._narrow = NARROW[how.compression.dtype] if isinstance(how.compression, Cast) else None
        self._whole = how.top_k is not None and how.top_k.per == "model"
        self._saved: tuple[Sequence[Sequence[int]] | None, ...] = ()
        self._under_way: list[tuple[Handle[Any], torch.futures.Future[Any]]] = []
        self._numbers_now: dict[tuple[int, ...], None] = {}
        self._first: Buckets = ()
        self._last: Buckets = ()
        self._continued: tuple[Buckets, Buckets] | None = None
        self._kept: list[KeptBucket] = []

    def average(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Start to average a bucket; the future holds its buffer with the average.

        Raises `BackendError` if the exchange failed; for the last bucket, if any exchange of the step failed.
        """
        communicator = self._averager.communicator
        if self.regroups:
            return self._average_regrouped(bucket)
        try:
            if not self._under_way:
                communicator._begin_batch()
                watch_backward(self._abandoned)
            if not bucket.is_last():
                self._under_way.append(self._start(bucket, async_op=True))
                return self._under_way[-1][1]
            with self._averager.recorder.waiting():
                for handle, one in self._under_way:
                    with suppress(Exception):  # the future raises it with step and bucket
                        handle.wait()  # which Ctrl-C ends, unlike the wait for a future of torch
                    one.wait()
                _, future = self._start(bucket, async_op=False)
                future.wait()
        except BaseException as error:
            self._give_up(wait=isinstance(error, Exception))
            raise
        communicator._end_batch()
        self._under_way.clear()
        with communicator._behind():
            self._end_step()
        return future

    def _average_regrouped(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Keep a bucket of the first step of a restored run; the last one exchanges all in the saved buckets."""
        kept = KeptBucket(bucket)
        if not self._kept:
            watch_backward(self._abandoned)
        self._kept.append(kept)
        if not bucket.is_last():
            return kept.averaged
        listed, self._kept = self._kept, []
        try:
            with self._averager.recorder.waiting():
                with self._averager.communicator._refusing():
                    chosen = self.regrouped(listed)
                for one in chosen:
                    self._start(one, async_op=False)[1].wait()
                with self._averager.communicator._behind():
                    give_back(chosen)
        except BaseException as error:
            self._give_up(wait=isinstance(error, Exception))
            raise
        with self._averager.communicator._behind():
            self._end_step()
        for one in listed:
            one.averaged.set_result(one.buffer())
        return kept.averaged

    @property
    def regroups(self) -> bool:
        """Whether the buckets of this step wait for the last, to be exchanged as others."""
        return self._whole or self._continued is not None

    def regrouped(self, kept: Sequence[DdpBucket]) -> list[DdpBucket]:
        """Return the buckets of a step as those of the saved run, if DDP began that run with the same buckets.

        For ``per="model"`` return one bucket of each type.
        """
        layouts = [(one, self.layout_of(one)) for one in kept]
        self._check_numbers()
        continued = self._continued
        dense = [(one, layout) for one, layout in layouts if not one.buffer().is_sparse]
        if continued is not None and tuple(layout.numbers for _, layout in dense) != continued[0]:
            # DDP has rearranged them, those of a static graph in its third step
            continued = self._continued = None
        if not self._whole and continued is None:
            return list(kept)
        places: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for one, layout in dense:
            line = one.buffer().view(-1)
            for (number, start, stop), parameter in zip(layout.parts(), one.parameters(), strict=True):
                places[number] = parameter, line[start:stop]
        chosen: Sequence[Sequence[int]]
        if self._whole or continued is None:
            kinds = sorted({f"{place.dtype}" for _, place in places.values()})
            chosen = [
                [number for number in sorted(places) if f"{places[number][1].dtype}" == kind]
                for kind in kinds
            ]
        else:
            chosen = continued[1]
            if sorted(places) != sorted(number for numbers in chosen for number in numbers):
                self._continued = None
                return list(kept)
            self._first = continued[0]
        rows = [one for one in kept if one.buffer().is_sparse]
        made = [
            RegroupedBucket(index, [places[number] for number in numbers])
            for index, numbers in enumerate(chosen)
        ]
        return [*made, *rows]

    def _end_step(self) -> None:
        self._last, self._numbers_now = tuple(self._numbers_now), {}
        self._first = self._first or self._last
        self._averager.end_step()

    def _abandoned(self) -> None:
        """Refuse the step with all ranks after an error of backward between two buckets: they wait for the next one."""
        if begun := len(self._under_way or self._kept):
            step = self._averager.recorder.step
            error = UsageError(f"training step {step}: backward raised an error behind bucket {begun - 1}")
            with suppress(TopoplanError):
                self._averager.communicator._refuse_for(error)
            self._give_up(wait=True)

    def _give_up(self, *, wait: bool) -> None:
        """Abandon the step; without ``wait``, as after Ctrl-C, leave running exchanges and residuals alone."""
        running = [handle for handle, _ in self._under_way]
        self._under_way.clear()
        self._kept.clear()
        self._numbers_now.clear()
        self._averager.communicator._end_batch()
        if wait:
            for handle in running:
                with suppress(Exception):
                    handle.wait()
            if self.presence is not None:
                self.presence.give_up()
            self._averager.give_up()

    def _start(self, bucket: DdpBucket, *, async_op: bool) -> tuple[Handle[Any], torch.futures.Future[Any]]:
        buffer = bucket.buffer()
        step, about = self._averager.recorder.step, f"bucket {bucket.index()} of {nbytes_of(buffer)} bytes"

        def with_place(error: TopoplanError) -> TopoplanError:
            return error_in_bucket(error, step=step, bucket=about, rank=self.rank)

        try:
            if self.presence is not None:
                self.presence.ask(step)
            factor = 1.0 if self.presence is None else self.presence.factor
            begin = self._begin_rows if buffer.is_sparse else self._begin
            given, handle = begin(bucket, buffer, async_op=async_op)
        except TopoplanError as error:
            raise with_place(error) from error

        def finish() -> None:
            if given is not buffer:
                buffer.copy_(given)
            if factor != 1:
                buffer.mul_(factor)

        return handle, future_of(
            handle,
            buffer,
            device=buffer.device,
            arrays=self._averager.communicator.arrays,
            finish=finish,
            convert_error=with_place,
        )

    def _begin(
        self, bucket: DdpBucket, buffer: torch.Tensor, *, async_op: bool
    ) -> tuple[torch.Tensor, Handle[Any]]:
        """Start the exchange; return the tensor that will hold the average, and the handle."""
        averager, step = self._averager, self._averager.recorder.step
        given, op, rounded_from = buffer, "avg", None
        top_k = averager.settings.top_k
        with averager.communicator._refusing():
            layout = self.layout_of(bucket)
            self._numbers_now[layout.numbers] = None
            self._check_numbers()
            if top_k is not None:
                dtype = torch.float64 if buffer.dtype == torch.float64 else torch.float32
                # EF21's estimates lack what residuals hold, so these are sent without a gradient too.
                idle = [] if top_k.ef21 else self._idle(layout, buffer)
                self.residuals.arrange(layout, idle=idle, dtype=dtype, device=buffer.device, step=step)
            elif self._narrow is not None and buffer.element_size() > self._narrow.itemsize:
                # divided before it is rounded: a sum may be too large for float16
                given, op = buffer.div(averager.communicator.size).to(self._narrow), "sum"
                rounded_from = buffer.nbytes
            by_layer = top_k is not None and top_k.per == "layer"
            parts = _parts_of(layout, bucket) if averager.filters or by_layer else None
            unused = self._idle(layout, buffer) if averager.keeps_residuals else []
        return given, averager.start(
            layout.key,
            given,
            op=op,
            out=given,
            parts=parts,
            async_op=async_op,
            rounded_from=rounded_from,
            idle=frozenset(f"parameter {number}" for number in unused),
        )

    def _begin_rows(
        self, bucket: DdpBucket, buffer: torch.Tensor, *, async_op: bool
    ) -> tuple[torch.Tensor, Handle[Any]]:
        recorder, key = self._averager.recorder, self.layout_of(bucket).key
        self._check_numbers()
        step, started, nbytes = recorder.step, recorder.now(), nbytes_of(buffer)
        handle = average_rows(self._averager.communicator, buffer, async_op=async_op)
        handle = handle.then(self._look_at_rows)
        handle.when_done(
            lambda: recorder.add(key, nbytes, started, density=1.0, how="rows", bound=math.inf, step=step)
        )
        if not async_op:
            handle.wait()
        return buffer, handle

    def _look_at_rows(self, average: torch.Tensor) -> torch.Tensor:
        if not bool(average.values().isfinite().all()):
            self._averager.skips()
        return average

    def _idle(self, layout: BucketLayout, buffer: torch.Tensor) -> list[int]:
        """Return the parameters with a gradient of zeros, which DDP may drop; their residuals wait."""
        return (_unused_parameters_gpu if on_gpu(buffer) else _unused_parameters)(layout, buffer)

    def total(self, here: int) -> int:
        """Return how many ranks have data, `here` in this process; all ranks must call it."""
        comm = self._averager.communicator
        line = comm.arrays.wrapped(np.array([here]))
        return int(comm.arrays.values(comm.all_reduce(line, out=line))[0])

    @property
    def averager(self) -> InStepAverager:
        """The averager, with the state of filters."""
        return self._averager

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._averager.communicator.ranks[0]

    def layout_of(self, bucket: DdpBucket) -> BucketLayout:
        """Return the layout of a bucket."""
        parameters = bucket.parameters()
        numbers = self._numbers.of_bucket(parameters)
        return BucketLayout(numbers, tuple(real_count(one) for one in parameters))

    def numbers_of(self, parameters: Iterable[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
        """Return parameters with their numbers."""
        return [(self._numbers.of(one), one) for one in parameters]

    @property
    def arrivals(self) -> list[list[int]] | None:
        """Arrivals of `ParameterNumbers`, for a checkpoint."""
        arrivals = self._numbers.arrivals
        return None if arrivals is None else [list(one) for one in arrivals]

    @property
    def bucket_numbers(self) -> list[list[list[int]]]:
        """The parameters of the first buckets of DDP, and of those of the last step, for a checkpoint."""
        return [[list(numbers) for numbers in buckets] for buckets in (self._first, self._last)]

    def continue_buckets(self, saved: Sequence[Sequence[Sequence[int]]] | None) -> None:
        """Exchange the next steps in the buckets of a saved run, `bucket_numbers`, until DDP rearranges its own.

        None stands for those of DDP. All ranks must give the same.
        """
        first, last = (tuple(tuple(one) for one in buckets) for buckets in saved or ((), ()))
        self._continued = (first, last) if first != last else None

    def restored(self, arrivals: Sequence[Sequence[int]] | None) -> None:
        """Note the arrivals of the run that residuals were restored from; drop these if the arrivals differ."""
        self._saved = (arrivals,)
        self._check_numbers()

    def _check_numbers(self) -> None:
        """Drop restored residuals, with a warning, if the numbers of parameters mean something else now."""
        if not self._saved:
            return
        (saved,) = self._saved
        if self._numbers.fit(saved):
            if saved is None or len(self._numbers.arrivals or ()) >= len(saved):
                self._saved = ()
            return
        self._saved, self._continued = (), None
        waiting = self.residuals.drop_waiting()
        unsent = describe_state(
            {"residuals": {number: [one.residual.cpu()] for number, one in waiting.items()}}
        )
        warn_of_unused_state(
            [unsent, self._averager.drop_unused()],
            "buckets differ from those of the saved state, and only parameters that are given in the same order both "
            "times, HookState(parameters=...), are identified in any buckets",
        )


def give_back(buckets: Sequence[DdpBucket]) -> None:
    """Copy the averages of regrouped buckets to those of DDP."""
    for one in buckets:
        if isinstance(one, RegroupedBucket):
            one.give_back()


def watch_backward(failed: Callable[[], None]) -> None:
    """Call a function if the running backward pass raises an error: torch then drops its callbacks without a call."""
    ended: list[bool] = []

    def end() -> None:
        ended.append(True)

    watch = weakref.finalize(end, lambda: None if ended else failed())
    watch.atexit = False
    try:
        torch.autograd.Variable._execution_engine.queue_callback(end)
    except (
        AttributeError,
        RuntimeError,
    ):  # no backward pass: torch's join calls the hook on a rank without data
        watch.detach()


class BuiltInBucketExchange:
    """Averages buckets by torch's allreduce over a process group; `presence` is set while ranks may have no data."""

    def __init__(self, group: dist.ProcessGroup, recorder: Recorder) -> None:
        self.presence: DataPresence | None = None
        self._device = torch.device("cpu")
        self._group = group
        self._recorder = recorder

    def average(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Start to average a bucket, in its own memory."""
        recorder, step, started = self._recorder, self._recorder.step, self._recorder.now()
        buffer: torch.Tensor = bucket.buffer()
        key = f"bucket {bucket.index()}"
        divisor: float = dist.get_world_size(self._group)
        self._device = buffer.device
        if self.presence is not None:
            self.presence.ask(step)
            divisor /= self.presence.factor
        buffer.div_(divisor)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None, "this process is in the group"

        def ended(future: torch.futures.Future[Any]) -> torch.Tensor:
            future.value()  # raises what went wrong
            recorder.add(
                key,
                nbytes_of(buffer),
                started,
                density=1.0,
                how="torch's allreduce",
                bound=math.inf,
                step=step,
            )
            return buffer

        averaged: torch.futures.Future[Any] = work.get_future().then(ended)
        if bucket.is_last():
            recorder.end_step()
        return averaged

    def total(self, here: int) -> int:
        """Return how many ranks have data, as `DdpBucketExchange.total`."""
        flag = torch.tensor([here], device=self._device)
        dist.all_reduce(flag, group=self._group)
        return int(flag.item())


def give_unused_rows(model: DistributedDataParallel) -> None:
    """Let sparse embeddings that a step does not use have a gradient without rows, which DDP asks for."""
    modules = (nn.Embedding, nn.EmbeddingBag)
    tables = [one.weight for one in model.module.modules() if isinstance(one, modules) and one.sparse]
    if not tables or not (model.find_unused_parameters or model.static_graph):
        return

    def before(called: nn.Module, _: object) -> None:
        if torch.is_grad_enabled() and called.require_backward_grad_sync:
            for one in tables:
                if one.requires_grad and one.grad is None:
                    where = torch.zeros(1, 0, dtype=torch.int64, device=one.device)
                    one.grad = sparse_rows(where, one.new_zeros((0, *one.shape[1:])), one.shape)

    model.register_forward_pre_hook(before)


def nbytes_of(buffer: torch.Tensor) -> int:
    """Return the bytes of a bucket, of a sparse one those of its indices and values."""
    parts = (buffer._indices(), buffer._values()) if buffer.is_sparse else (buffer,)
    return sum(one.nbytes for one in parts)


def _parts_of(layout: BucketLayout, bucket: DdpBucket) -> tuple[BucketPart, ...]:
    return tuple(
        BucketPart(
            f"parameter {number}",
            start,
            stop,
            real_shape(tuple(one.shape)) if one.is_complex() else tuple(one.shape),
        )
        for (number, start, stop), one in zip(layout.parts(), bucket.parameters(), strict=True)
    )


def _unused_parameters(layout: BucketLayout, buffer: torch.Tensor) -> list[int]:
    line = buffer.detach().view(-1)
    return [
        number
        for number, start, stop in layout.parts()
        if not line[start : min(start + GLANCE, stop)].any() and not line[start:stop].any()
    ]


def _unused_parameters_gpu(layout: BucketLayout, buffer: torch.Tensor) -> list[int]:
    """Return the same on a GPU: one pass over the bucket, and one transfer for which the host waits.

    It waits for gradients already queued, in the thread of backward alone and once a bucket: residuals must be in place
    before the exchange starts.
    """
    parts = list(layout.parts())
    line = buffer.detach().view(-1)
    full = [(number, line[start:stop]) for number, start, stop in parts if start < stop]
    found = {number for number, start, stop in parts if start == stop}
    if full:
        largest = torch.stack([torch.linalg.vector_norm(gradient, math.inf) for _, gradient in full])
        found |= {number for (number, _), one in zip(full, largest.tolist(), strict=True) if one == 0}
    return [number for number, _, _ in parts if number in found]


GLANCE = 64
"""Elements of a gradient that are tested first: they are rarely all zero if others are not."""

"""One bucket after another averaged in the background, while backward computes the next.

The last bucket of a step waits for all of them: DDP has nothing else to do then, and so an error of any bucket comes
out of ``loss.backward()`` as it is; DDP itself would turn it into another one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

from collectives.arrays.torch_arrays import on_gpu
from collectives.communicator.handle import Handle
from collectives.torch.bucket_errors import in_bucket
from collectives.torch.bucket_layout import BucketLayout
from collectives.torch.handle_future import future_of
from collectives.torch.parameter_numbers import ParameterNumbers
from collectives.torch.parameter_residuals import ParameterResiduals
from collectives.training.gradient_exchange import GradientExchange
from topoplan.errors import BackendError, TopoplanError

NARROW = (torch.float16, torch.bfloat16)
"""Kept, chosen from and sent in float32 where gradients are sparse."""


class BucketExchange:
    """Averages buckets by the plan of a communicator.

    Parameters
    ----------
    exchange : GradientExchange
    numbers : ParameterNumbers
    narrow : torch.dtype or None
        In which dense gradients travel; None for their own.

    Attributes
    ----------
    residuals : ParameterResiduals
    """

    def __init__(
        self, exchange: GradientExchange, numbers: ParameterNumbers, *, narrow: torch.dtype | None
    ) -> None:
        comm = exchange.communicator
        self.residuals = ParameterResiduals(comm, momentum=exchange.how.momentum)
        self._exchange = exchange
        self._numbers = numbers
        self._narrow = narrow
        self._under_way: list[torch.futures.Future[Any]] = []

    def average(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Begin to average a bucket; the future is that of its buffer, which then holds the average.

        Raises
        ------
        BackendError
            An exchange of this step failed: of this bucket, or, if it is the last one, of any.
        """
        try:
            future = self._start(bucket)
            self._under_way.append(future)
            if bucket.is_last():
                with self._exchange.recorder.waiting():
                    for one in self._under_way:
                        one.wait()
        except BackendError:
            self._under_way.clear()
            raise
        if bucket.is_last():
            self._under_way.clear()
            self._exchange.recorder.end_step()
        return future

    def _start(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        buffer = bucket.buffer()
        where: dict[str, int] = {
            "rank": self.rank,
            "step": self._exchange.recorder.step,
            "bucket": bucket.index(),
            "nbytes": buffer.nbytes,
        }
        try:
            given, handle = self._begin(bucket, buffer)
        except TopoplanError as error:
            raise in_bucket(error, **where) from error

        def finish() -> None:
            if given is not buffer:
                buffer.copy_(given)

        return future_of(
            handle,
            buffer,
            device=buffer.device,
            arrays=self._exchange.communicator.arrays,
            finish=finish,
            told=lambda error: in_bucket(error, **where),
        )

    def _begin(self, bucket: GradBucket, buffer: torch.Tensor) -> tuple[torch.Tensor, Handle[Any]]:
        """Start the exchange; the tensor in which the average will be."""
        layout = self.layout_of(bucket)
        exchange, step = self._exchange, self._exchange.recorder.step
        given, op = buffer, "avg"
        if exchange.how.density is not None:
            if buffer.dtype in NARROW:
                given = buffer.to(torch.float32)
            dtype = torch.float64 if buffer.dtype == torch.float64 else torch.float32
            idle = (_idle_at_once if on_gpu(buffer) else _idle)(layout, buffer)
            self.residuals.arrange(layout, idle=idle, dtype=dtype, device=buffer.device, step=step)
        elif self._narrow is not None and buffer.element_size() > self._narrow.itemsize:
            # divided before it is rounded: a sum may be too large for float16
            given, op = buffer.div(exchange.communicator.size).to(self._narrow), "sum"
        return given, exchange.start(layout.key, given, op=op, out=given)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._exchange.communicator.ranks[0]

    def layout_of(self, bucket: GradBucket) -> BucketLayout:
        """Which parameters a bucket holds."""
        parameters = bucket.parameters()
        return BucketLayout(
            tuple(self._numbers.of(one) for one in parameters), tuple(one.numel() for one in parameters)
        )


def _idle(layout: BucketLayout, buffer: torch.Tensor) -> list[int]:
    """The parameters with a gradient of zeros."""
    line = buffer.detach().view(-1)
    return [
        number
        for number, start, stop in layout.parts()
        if not line[start : min(start + GLANCE, stop)].any() and not line[start:stop].any()
    ]


def _idle_at_once(layout: BucketLayout, buffer: torch.Tensor) -> list[int]:
    """The same on a GPU: one pass over the bucket, and one transfer for which the host waits.

    It waits for gradients that have been asked for already, and only the thread of backward does so, once a bucket:
    the residuals have to be put in their places before the exchange begins.
    """
    parts = list(layout.parts())
    line = buffer.detach().view(-1)
    full = [(number, line[start:stop]) for number, start, stop in parts if start < stop]
    found = {number for number, start, stop in parts if start == stop}
    if full:
        largest = torch.stack(torch._foreach_norm([gradient for _, gradient in full], math.inf))
        found |= {number for (number, _), one in zip(full, largest.tolist(), strict=True) if one == 0}
    return [number for number, _, _ in parts if number in found]


GLANCE = 64
"""Elements of a gradient that are looked at first: hardly ever are they all zero where others are not."""

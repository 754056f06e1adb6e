"""Buckets of DDP in other synchronisation modes than BSP: averaged with what has come, or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

from collectives.staleness.local_sgd import LocalExchange
from collectives.staleness.stale_average import StaleExchange
from collectives.torch.bucket_errors import in_bucket
from collectives.torch.bucket_exchange import BucketExchange
from topoplan.errors import TopoplanError, UsageError

SETTLED = 2
"""Steps after which DDP has arranged its buckets for good; until then gradients are averaged in step."""


class ModeExchange:
    """Averages buckets without meeting the other ranks.

    Parameters
    ----------
    exchange : StaleExchange or LocalExchange
    in_step : BucketExchange
        For the first steps of stale gradients.
    """

    def __init__(self, exchange: StaleExchange | LocalExchange, in_step: BucketExchange) -> None:
        self._exchange = exchange
        self._in_step = in_step
        self._parameters: dict[str, list[torch.Tensor]] = {}

    def average(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """The average of a bucket, as far as it is known; raises as `BucketExchange.average`."""
        exchange = self._exchange
        if isinstance(exchange, StaleExchange) and exchange.recorder.step < SETTLED:
            return self._in_step.average(bucket)
        buffer: torch.Tensor = bucket.buffer()
        key = self._in_step.layout_of(bucket).key
        self._parameters[key] = bucket.parameters()
        where = {"step": exchange.recorder.step, "bucket": bucket.index(), "nbytes": buffer.nbytes}
        try:
            exchange.start(key, buffer, out=buffer)
        except TopoplanError as error:
            raise in_bucket(error, rank=self._in_step.rank, **where) from error
        if bucket.is_last():
            exchange.end_step()
        future: torch.futures.Future[Any] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        future.set_result(buffer)
        return future

    def after_step(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """With `LocalSGD`, average the parameters when it is time: those of one dtype together."""
        if not isinstance(self._exchange, LocalExchange):
            return
        if not self._exchange.mode.averages_after(self._exchange.recorder.step - 1):
            return
        groups: dict[torch.dtype, list[torch.Tensor]] = {}
        for one in parameters:
            groups.setdefault(one.dtype, []).append(one.detach())
        lines = [torch.cat([one.reshape(-1) for one in group]) for group in groups.values()]
        self._exchange.average(lines)
        for line, group in zip(lines, groups.values(), strict=True):
            for part, tensor in zip(_parts(line, group), group, strict=True):
                tensor.copy_(part)

    @property
    def gap(self) -> int | None:
        """As `StaleExchange.gap`; None where no clocks are kept."""
        return self._exchange.gap if isinstance(self._exchange, StaleExchange) else None

    def finish(self) -> bool:
        """With `SSP` and `ASP`, put what is left over into the gradients of the parameters; whether anything is.

        Raises
        ------
        BackendError
            Another rank failed, or does not finish within the timeout.
        UsageError
            Something came for a bucket that this rank has never had.
        """
        if not isinstance(self._exchange, StaleExchange):
            return False
        left = self._exchange.finish()
        for parameters in self._parameters.values():
            for one in parameters:
                one.grad = torch.zeros_like(one)
        for key, line in left.items():
            if key not in self._parameters:
                raise UsageError(
                    f"gradients came for {key}, which are no bucket here; give all ranks one model"
                )
            parameters = self._parameters[key]
            for part, one in zip(
                _parts(torch.from_numpy(line.reshape(-1)), parameters), parameters, strict=True
            ):
                assert one.grad is not None, "zeros were put there"
                one.grad.copy_(part)
        return bool(left)

    def close(self) -> None:
        """Leave."""
        if isinstance(self._exchange, StaleExchange):
            self._exchange.close()


def _parts(line: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A line cut into the shapes of tensors that lie one after another in it."""
    ends = list(accumulate(one.numel() for one in tensors))
    starts = [0, *ends[:-1]]
    places = zip(starts, ends, tensors, strict=True)
    return [line[start:stop].view_as(one) for start, stop, one in places]

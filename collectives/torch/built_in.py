"""Averages of buckets by torch's own allreduce, for process groups that no plan fits."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from collectives.training.recorder import Recorder


class BuiltInExchange:
    """Averages buckets over a process group.

    Parameters
    ----------
    group : ProcessGroup
    recorder : Recorder
    """

    def __init__(self, group: dist.ProcessGroup, recorder: Recorder) -> None:
        self._group = group
        self._recorder = recorder

    def average(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """The average of a bucket over all ranks, in its own memory."""
        recorder, step, started = self._recorder, self._recorder.step, self._recorder.now()
        buffer: torch.Tensor = bucket.buffer()
        key = f"bucket {bucket.index()}"
        buffer.div_(dist.get_world_size(self._group))
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None, "this process is in the group"

        def ended(future: torch.futures.Future[Any]) -> torch.Tensor:
            future.value()  # raises what went wrong
            recorder.add(
                key, buffer.nbytes, started, density=1.0, how="torch's allreduce", bound=math.inf, step=step
            )
            return buffer

        averaged: torch.futures.Future[Any] = work.get_future().then(ended)
        if bucket.is_last():
            recorder.end_step()
        return averaged

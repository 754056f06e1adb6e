"""torch tensors on the CPU as what the shared back end works on: numpy arrays on their memory.

bfloat16, which numpy lacks, stays tensors, and so does the shared memory then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from collectives.arrays.torch_arrays import joining
from collectives.backends.backend import RankArrays
from collectives.reduction import reduction


def tensors_as_arrays(
    op: str | None, memory: RankArrays[Any], slots: Callable[[np.dtype[Any]], Any]
) -> tuple[Any, Any, Any, Any]:
    """Source, shared memory, result, and what joins them.

    Parameters
    ----------
    op : str or None
    memory : RankArrays of tensors on the CPU
    slots : callable
        Shared memory of a dtype.
    """
    source, result = memory.source.detach(), memory.result.detach()
    if source.dtype != torch.bfloat16:
        array = source.numpy()
        join: Any = np.add if op is None else reduction(op, array.dtype)
        return array, slots(array.dtype), result.numpy(), join
    shared = torch.from_numpy(slots(np.dtype(np.int16))).view(torch.bfloat16)
    if op is None:
        return source, shared, result, None
    add = joining(op, source)
    return source, shared, result, lambda own, arriving, target: add(own, arriving, out=target)

"""Which number NCCL knows a GPU by: the ``dev`` of its files, which is the index that NVML and nvidia-smi count.

It is neither the rank in a communicator nor the number under CUDA_VISIBLE_DEVICES. Where all GPUs of a server are
called ``gpu<n>`` (or ``<server>.gpu<n>``), n is that index: so it stays right for an allocation and for a machine that
lacks GPUs. Otherwise GPUs are counted as they stand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBERED = re.compile(r"(?:.*\.)?gpu([0-9]{1,4})")


def gpu_numbers(names: Sequence[str]) -> dict[str, int]:
    """Number of each GPU of one server by name.

    Examples
    --------
    >>> gpu_numbers(["gpu1", "gpu4"]), gpu_numbers(["left", "right"])
    ({'gpu1': 1, 'gpu4': 4}, {'left': 0, 'right': 1})
    """
    matches = [_NUMBERED.fullmatch(name) for name in names]
    numbers = [int(match[1]) for match in matches if match]
    if len(set(numbers)) == len(names):
        return dict(zip(names, numbers, strict=True))
    return {name: number for number, name in enumerate(names)}

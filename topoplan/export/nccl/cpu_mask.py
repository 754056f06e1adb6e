"""Logical CPUs of a NUMA node as the mask that NCCL reads: words of 32 bits in hexadecimal, the highest first."""

from __future__ import annotations

import re

MOST_CPUS = 8192


def cpu_mask(cpus: str) -> str:
    """The mask of a list such as 0-19,40-59; empty for an empty list or what is none.

    Examples
    --------
    >>> cpu_mask("0-19,40-59"), cpu_mask("")
    ('0fffff00,000fffff', '')
    """
    mask = 0
    for span in cpus.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,5})(?:-([0-9]{1,5}))?\s*", span)
        if not match:
            return ""
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < MOST_CPUS:
            return ""
        mask |= (1 << last + 1) - (1 << first)
    words = -(-mask.bit_length() // 32)
    return ",".join(f"{mask >> 32 * word & 0xFFFFFFFF:08x}" for word in reversed(range(words)))

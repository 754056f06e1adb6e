"""Which GPU a model text means, what its NVLinks should run at, and which of those that are listed are slow.

A driver prints the signalling rate (25.781 GB/s for a V100, 26.562 for an H100), topologies state nominal or effective
ones. So a link is judged against its like: it is slow if it is below the fastest of all listed links of this model,
or below the nominal rate of the generation where even the fastest is more than a tenth below that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from topoplan.formats.nvidia_smi.nvlink_status import GpuNvlinks
from topoplan.hosts.link_rates import A100, B200, GA102, H100, P100, V100, GpuGeneration
from topoplan.units import exact

GENERATIONS = {
    "P100": P100,
    "V100": V100,
    **dict.fromkeys(("A30", "A100", "A800"), A100),
    **dict.fromkeys(("A40", "A5500", "A6000", "3090"), GA102),
    **dict.fromkeys(("H20", "H100", "H200", "H800", "GH200"), H100),
    **dict.fromkeys(("B100", "B200", "B300", "GB200", "GB300"), B200),
}
"""Generation of the GPUs that have NVLinks, by product."""

COMPUTE_CAPABILITY = {60: P100, 70: V100, 80: A100, 86: GA102, 90: H100, 100: B200, 103: B200}
"""Generation by the fact ``sm``."""

SLOW_BELOW = Fraction(9, 10)
"""Share of the nominal rate below which all links of a listing are slow."""

_PRODUCT = re.compile(r"\b((?:GH|GB|MI|[PVAHBLTK])\d{1,4})[A-Z]?\b|\bRTX (\d{4})\b")


def product(model: str) -> str:
    """The product that a model text names, empty where none is recognised.

    Examples
    --------
    >>> [product(text) for text in ("Tesla V100-SXM2-32GB", "NVIDIA H100 80GB HBM3", "GeForce RTX 3090", "GPU")]
    ['V100', 'H100', '3090', '']
    """
    match = _PRODUCT.search(model)
    return (match[1] or match[2]) if match else ""


def generation(model: str) -> GpuGeneration | None:
    """Its generation, None where it is not known."""
    return GENERATIONS.get(product(model))


def speed_shares(gpus: Sequence[GpuNvlinks]) -> dict[tuple[int, int], Fraction]:
    """What share of its normal speed each link that is up runs at, at most 1, by GPU and link; 1 where none is stated.

    Examples
    --------
    >>> from topoplan.formats.nvidia_smi.nvlink_status import parse_nvlink_status
    >>> lines = ["GPU 0: Tesla V100-SXM2-32GB", "Link 0: 25.781 GB/s", "Link 1: 25.781 GB/s", "Link 2: 12.8905 GB/s"]
    >>> [str(share) for share in speed_shares(parse_nvlink_status("\\n".join(lines))).values()]
    ['1', '1', '1/2']
    """
    fastest: dict[str, Fraction] = {}
    for gpu in gpus:
        for link in gpu.active:
            if link.speed is not None:
                like = _like(gpu)
                fastest[like] = max(fastest.get(like, Fraction(0)), exact(link.speed))
    normal = {like: _normal(like, speed) for like, speed in fastest.items()}
    return {
        (gpu.number, link.index): Fraction(1)
        if link.speed is None
        else min(Fraction(1), exact(link.speed) / normal[_like(gpu)])
        for gpu in gpus
        for link in gpu.active
    }


def _like(gpu: GpuNvlinks) -> str:
    """What GPUs of equal links have in common."""
    return product(gpu.model) or gpu.model


def _normal(like: str, fastest: Fraction) -> Fraction:
    known = GENERATIONS.get(like)
    nominal = exact(known.nvlink) if known else Fraction(0)
    return fastest if fastest >= SLOW_BELOW * nominal else nominal

"""How many of the k largest entries the published bisection finds, and how many `topk` does, on well and ill made data.

Recall is the share of the k largest magnitudes that are among those chosen, by value: any of equal ones will do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import collectives

SIZE = 1_000_000
DENSITY = 0.01
SAMPLES = (5, 10, 20, 30)

Array = NDArray[np.float32]


def main() -> None:
    print(f"recall of the {DENSITY:.0%} largest of {SIZE:,} float32 entries; mstopk with N samples, and topk")
    print(f"  {'entries':<22}" + "".join(f"{f'N = {samples}':>9}" for samples in SAMPLES) + f"{'topk':>9}")
    for name, data in made(SIZE).items():
        print(f"  {name:<22}" + "".join(f"{recall:>9.4f}" for recall in recalls(data)), flush=True)


def made(size: int) -> dict[str, Array]:
    generator = np.random.default_rng(1)
    normal = generator.standard_normal(size, dtype=np.float32)
    signs = np.sign(normal)

    def with_one(value: float) -> Array:
        data = normal.copy()
        data[size // 3] = value
        return data

    scales = np.float32(10) ** (np.arange(size) * 8 // size - 4).astype(np.float32)
    seldom = generator.random(size) < 0.005
    return {
        "normal": normal,
        "Laplace": signs * generator.standard_exponential(size, dtype=np.float32),
        "lognormal, sigma 3": signs * np.exp(3 * generator.standard_normal(size, dtype=np.float32)),
        "lognormal, sigma 5": signs * np.exp(5 * generator.standard_normal(size, dtype=np.float32)),
        "layered scales": normal * scales,
        "one outlier, 1e6 x": with_one(1e6),
        "one outlier, 1e12 x": with_one(1e12),
        "one infinity": with_one(np.inf),
        "mostly zeros": np.where(seldom, normal, np.float32(0)),
        "all equal": np.full(size, -2.5, np.float32),
    }


def recalls(data: Array, density: float = DENSITY) -> list[float]:
    k = int(data.size * density)
    largest = np.sort(np.abs(data))[data.size - k :]
    found = [collectives.mstopk(data, k, samples)[0] for samples in SAMPLES]
    return [_recall(np.abs(data[indices]), largest) for indices in (*found, collectives.topk(data, k)[0])]


def _recall(chosen: Array, largest: Array) -> float:
    """Entries above the smallest of the largest count as found, and as many of those that equal it as belong there."""
    border = largest[0]
    above = int(np.count_nonzero(chosen > border))
    equal = min(int(np.count_nonzero(chosen == border)), int(np.count_nonzero(largest == border)))
    return (above + equal) / len(largest)

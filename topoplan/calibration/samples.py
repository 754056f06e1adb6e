"""What a meter measures: times of copies between pairs of GPUs, before anything is concluded from them.

A `Meter` is whatever can time copies on the machine it runs on. `collectives.calibration.PeerCopies` does so with CUDA;
one that times processes against each other belongs to the back end that joins processes (MPI) and comes with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from topoplan.errors import UsageError
from topoplan.topology import Topology


@dataclass(frozen=True, slots=True)
class PairSamples:
    """Times of copies from one GPU to another.

    Parameters
    ----------
    src, dst : str
        Device names; data runs from ``src`` to ``dst``.
    times : tuple of (int, tuple of float)
        Bytes, ascending, and the seconds of every repeat.
    through_host : bool
        The GPUs may not reach each other: the driver takes every copy through the memory of the host.

    Raises
    ------
    UsageError
        Fewer than two sizes, sizes that do not ascend, or a time that is not above zero.
    """

    src: str
    dst: str
    times: tuple[tuple[int, tuple[float, ...]], ...]
    through_host: bool = False

    def __post_init__(self) -> None:
        sizes = [nbytes for nbytes, _ in self.times]
        if len(sizes) < 2 or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise UsageError(
                f"copies {self.name}: sizes {sizes} must be two or more, ascending, from 1 byte: one size cannot tell "
                "latency from bandwidth"
            )
        for nbytes, seconds in self.times:
            if not seconds or not all(0 < one < math.inf for one in seconds):
                raise UsageError(
                    f"copies {self.name}: times {list(seconds)} of {nbytes} bytes must be above zero; "
                    "choose larger sizes"
                )

    @property
    def name(self) -> str:
        """Such as ``gpu0>gpu3``."""
        return f"{self.src}>{self.dst}"


@dataclass(frozen=True, slots=True)
class MemoryCopy:
    """Copies inside the memory of one GPU.

    Parameters
    ----------
    gpu : str
        Device name.
    nbytes : int
        Bytes copied.
    bandwidth : float
        GB/s of memory traffic: every byte is read once and written once, and both count.
    """

    gpu: str
    nbytes: int
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """All that a meter found out.

    Parameters
    ----------
    method : str
        How, in a few words, such as ``CuPy 13.4 peer copies``.
    sizes : tuple of int
        Bytes of the copies, ascending.
    repeats : int
        Copies of each size, the warm-up not counted.
    pairs : tuple of PairSamples
        One for each measured pair and direction.
    peer_access : tuple of (int, float)
        Seconds to switch peer access off and on between all pairs of so many GPUs, ascending.
    memory : MemoryCopy or None
        Where there is one GPU, and so no pair.
    notes : tuple of str
        What could not be measured, or was taken for granted.
    """

    method: str
    sizes: tuple[int, ...]
    repeats: int
    pairs: tuple[PairSamples, ...]
    peer_access: tuple[tuple[int, float], ...] = ()
    memory: MemoryCopy | None = None
    notes: tuple[str, ...] = ()


class Meter(Protocol):
    """Whatever times copies between the GPUs of the machine that it runs on."""

    def ready(self) -> None:
        """Raise ProbeError, with what to do, where nothing can be measured here."""

    def measure(
        self,
        topology: Topology,
        *,
        gpus: Sequence[int] | None,
        sizes: Sequence[int],
        repeats: int,
        progress: Callable[[str], None] | None,
    ) -> Measurement:
        """Time copies between every two of some GPUs, in both directions.

        Parameters
        ----------
        topology : Topology
            The machine, as far as it is known; names the GPUs.
        gpus : sequence of int or None
            GPU numbers in the topology; None for all that can be seen.
        sizes : sequence of int
            Bytes of the copies, two or more, ascending.
        repeats : int
            Copies of each size.
        progress : callable or None
            Told what is being measured.

        Raises
        ------
        UsageError
            GPUs or sizes do not fit the machine.
        ProbeError
            Hardware or driver did not answer; the message names the pair.
        """

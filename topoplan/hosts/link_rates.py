"""Bandwidth of one link, in GB/s per direction, for machines whose description does not state it.

NVLink figures are the nominal ones of NVIDIA's white papers. PCIe and socket figures are what a transfer
between GPUs gets, as NCCL has them: ``src/graph/topo.cc`` (``kvDictPciGen``: 0.75 GB/s for a lane of
generation 3, doubled by each generation) and ``src/graph/topo.h`` (``BDW_QPI_BW`` 6, in older releases
``QPI_WIDTH`` 8; ``SKL_QPI_BW`` 10, ``AMD_BW`` 16, ``SRP_QPI_BW`` 22, ``ERP_QPI_BW`` 40).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from topoplan.errors import UsageError

PCIE_X16 = {3: 12.0, 4: 24.0, 5: 48.0}
"""GB/s of a 16-lane PCIe link, by generation."""

SOCKET = {
    "Broadwell": 6.0,
    "Broadwell, older NCCL": 8.0,
    "Skylake to Ice Lake": 10.0,
    "Zen 1 to 2": 16.0,
    "Sapphire Rapids": 22.0,
    "Emerald Rapids": 40.0,
}
"""GB/s between two CPU sockets, by processor."""

PEER_ACCESS = ((3, 0.0035), (6, 0.0035), (7, 0.0037), (8, 0.0037))
"""Seconds that a DGX-1V takes to switch peer access between NVLink and PCIe (T_dpa), by number of GPUs.

Fitted to Blink (MLSys 2020), figure 26, broadcast over NVLink alone and over both. Equation 8 with the measured
NVLink rate, 8 GB/s of PCIe and a buffer of 500 MB gives 3.6, 3.9, 3.7, 2.9, 4.0 and 3.4 ms for 3 to 8 GPUs; bars read
to 0.5 GB/s leave 0.3 to 0.5 ms open. These are the closest times, in tenths of a millisecond, that do not fall with
the number of GPUs. The size of 500 MB is assumed, since the figure's values carry none: with 1 GB all times double.
"""


@dataclass(frozen=True, slots=True)
class GpuGeneration:
    """What a GPU generation brings to a machine.

    Parameters
    ----------
    name : str
        A GPU that has it.
    links : int
        NVLinks of one GPU.
    nvlink, pcie, socket : float
        GB/s per direction of one NVLink, of its PCIe link, and between the CPU sockets of its time.
    """

    name: str
    links: int
    nvlink: float
    pcie: float
    socket: float


P100 = GpuGeneration("P100", 4, 20.0, PCIE_X16[3], SOCKET["Broadwell"])
V100 = GpuGeneration("V100", 6, 25.0, PCIE_X16[3], SOCKET["Broadwell, older NCCL"])
A100 = GpuGeneration("A100", 12, 25.0, PCIE_X16[4], SOCKET["Zen 1 to 2"])
H100 = GpuGeneration("H100", 18, 25.0, PCIE_X16[5], SOCKET["Sapphire Rapids"])
B200 = GpuGeneration("B200", 18, 50.0, PCIE_X16[5], SOCKET["Emerald Rapids"])
GA102 = GpuGeneration("RTX 3090", 4, 14.0625, PCIE_X16[4], SOCKET["Skylake to Ice Lake"])
UNKNOWN = GpuGeneration("", 0, 25.0, PCIE_X16[3], SOCKET["Broadwell"])
"""Of a GPU that shows no NVLink nothing is known: the slowest figures."""

BY_CAPABILITY = {60: P100, 70: V100, 80: A100, 86: GA102, 90: H100, 100: B200}
"""Generation of the GPUs that have NVLinks, from this compute capability on."""

MOST_LINKS = max(generation.links for generation in BY_CAPABILITY.values())
"""No GPU has more NVLinks than this."""


def generation_of(capability: int) -> GpuGeneration | None:
    """Generation of a GPU by its compute capability, such as 70; None of those older than any that is known.

    Examples
    --------
    >>> [generation_of(sm).name for sm in (70, 75, 103)], generation_of(52)
    (['V100', 'V100', 'B200'], None)
    """
    return BY_CAPABILITY.get(max((least for least in BY_CAPABILITY if least <= capability), default=0))


def checked_rate(option: str, value: float | None) -> float | None:
    """A bandwidth that a user gave, in GB/s; None stays None.

    Raises
    ------
    UsageError
        It is not a finite number above zero.

    Examples
    --------
    >>> checked_rate("--nvlink-gbps", 50)
    50.0
    """
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value <= 0
    ):
        raise UsageError(f"{option} {value!r} must be a finite number of GB/s above zero, for example 25")
    return float(value)

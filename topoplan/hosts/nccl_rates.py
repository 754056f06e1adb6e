"""What a transfer between GPUs gets out of a wire, by generation and vendor: NCCL's own figures.

NVLink and CPU figures are those of NCCL, ``src/graph/topo.h`` (2.27.5 to 2.30.7), a lane's those of ``kvDictPciGen`` in
``src/graph/topo.cc``, XGMI's those of RCCL, ``src/graph/topo.h``. They are lower than the nominal figures of the
library: a V100's NVLink counts 20 GB/s here and 25 there. Older releases count a Hopper's NVLink at 20 (to 2.19), a
Blackwell's as a Hopper's (to 2.24), Xeons of generations 4 and 5 as Skylake (to 2.25). Deliberately absent: NCCL's
surcharge of a fifth for traffic between GPUs through an Intel CPU (``INTEL_P2P_OVERHEAD``), which belongs to its search
and not to the wire.

Files state a lane's rate as text, which NCCL compares from its beginning: ``16.0 GT/s`` without ``PCIe`` behind it is
unknown there.
"""

from __future__ import annotations

import re
from fractions import Fraction

from topoplan.units import exact

LANE = {2.5: 0.1875, 5.0: 0.375, 8.0: 0.75, 16.0: 1.5, 32.0: 3.0, 64.0: 6.0}
"""GB/s of one PCIe lane by its rate in GT/s; generations 1 to 6."""

UNKNOWN_LANE = LANE[8.0]
"""GB/s of a lane of unknown rate: NCCL takes generation 3."""

UNKNOWN_WIDTH = 16
"""Lanes where none are stated, as in NCCL."""

NVLINK = {60: 18.0, 70: 20.0, 80: 20.0, 86: 12.0, 87: 20.0, 90: 20.6, 100: 40.1}
"""GB/s per direction of one NVLink, from this compute capability on."""

XGMI = {"gfx90a": 36.0, "gfx94": 48.0, "": 24.0}
"""GB/s per direction of one XGMI link by the beginning of the architecture's name."""

CPU_VENDORS = ("GenuineIntel", "AuthenticAMD", "CentaurHauls", "  Shanghai  ")
"""Vendors of x86_64 processors that NCCL knows; the last two are Zhaoxin."""

_INTEL = {0xCF: 40.0, 0x8F: 22.0, 0x55: 10.0, 0: 6.0}
_NUMBERED_GCN = {
    "906": "gfx906",
    "908": "gfx908",
    "910": "gfx90a",
    "940": "gfx940",
    "941": "gfx941",
    "942": "gfx942",
}


def lane_bandwidth(speed: str) -> float | None:
    """GB/s per direction of one PCIe lane, from the kernel's text of its rate; None of an unknown one.

    NCCL takes generation 3 for spellings that kernels do not write, such as ``16.0 GT/s``; here they are what they say.

    Examples
    --------
    >>> lane_bandwidth("16 GT/s"), lane_bandwidth("16.0 GT/s PCIe"), lane_bandwidth("Unknown speed")
    (1.5, 1.5, None)
    """
    match = re.match(r"\s*([0-9]{1,3}(?:\.[0-9]{1,3})?)\s*GT/s", speed)
    return LANE.get(float(match[1])) if match else None


def pcie_bandwidth(speed: str, width: int) -> float:
    """GB/s per direction of a PCIe link, from the kernel's text of its lane rate and its number of lanes.

    Examples
    --------
    >>> pcie_bandwidth("8 GT/s", 16), pcie_bandwidth("16.0 GT/s PCIe", 8), pcie_bandwidth("", 0)
    (12.0, 12.0, 12.0)
    """
    return (width or UNKNOWN_WIDTH) * (lane_bandwidth(speed) or UNKNOWN_LANE)


def nvlink_bandwidth(sm: int) -> float:
    """GB/s per direction of one NVLink of a GPU of this compute capability, such as 70; of an unknown one as of 80.

    Examples
    --------
    >>> nvlink_bandwidth(70), nvlink_bandwidth(86), nvlink_bandwidth(89), nvlink_bandwidth(120)
    (20.0, 12.0, 20.0, 40.1)
    """
    return next((rate for least, rate in sorted(NVLINK.items(), reverse=True) if sm >= least), NVLINK[80])


def gcn_name(gcn: str) -> str:
    """Name of an AMD GPU's architecture, which old files give as a number.

    Examples
    --------
    >>> gcn_name("910"), gcn_name("gfx942")
    ('gfx90a', 'gfx942')
    """
    return _NUMBERED_GCN.get(gcn, gcn)


def xgmi_bandwidth(gcn: str) -> float:
    """GB/s per direction of one XGMI link; the architecture is a name, or a number as old files have it.

    Examples
    --------
    >>> xgmi_bandwidth("gfx942"), xgmi_bandwidth("910"), xgmi_bandwidth("908")
    (48.0, 36.0, 24.0)
    """
    return next(rate for start, rate in XGMI.items() if gcn_name(gcn).startswith(start))


def socket_bandwidth(arch: str, vendor: str, family: int, model: int) -> float:
    """GB/s per direction between two NUMA nodes.

    Parameters
    ----------
    arch : str
        x86_64, arm64 or ppc64.
    vendor : str
        As the processor gives it; of an unknown one the slowest figure is taken, where NCCL sees no limit at all.
    family, model : int

    Examples
    --------
    >>> socket_bandwidth("x86_64", "GenuineIntel", 6, 85), socket_bandwidth("x86_64", "AuthenticAMD", 23, 49)
    (10.0, 16.0)
    """
    if arch == "ppc64":
        return 32.0
    if arch == "x86_64" and vendor == "AuthenticAMD":
        return 16.0
    if arch == "x86_64" and vendor == "GenuineIntel" and family == 6:
        return next(rate for least, rate in _INTEL.items() if model >= least)
    if arch == "x86_64" and vendor in ("CentaurHauls", "  Shanghai  ") and (family, model) == (7, 0x5B):
        return 9.0
    return 6.0


LANE_RATES = ("2.5 GT/s", "5 GT/s", "8 GT/s", "16 GT/s", "32 GT/s", "64.0 GT/s PCIe")
"""The kernel's text of a lane's rate; generations 1 to 6."""

MOST_LANES = 16


def counted_bandwidth(speed: str, lanes: int) -> Fraction:
    """GB/s per direction that NCCL counts for so many lanes of this rate."""
    return lanes * exact(lane_bandwidth(speed) or UNKNOWN_LANE)


def nearest_pcie(bandwidth: float) -> tuple[str, int]:
    """Lane rate and lanes whose bandwidth in NCCL is nearest to this one in GB/s; of equal ones the most lanes.

    Examples
    --------
    >>> nearest_pcie(12.0), nearest_pcie(36.0), nearest_pcie(5.4)
    (('8 GT/s', 16), ('32 GT/s', 12), ('5 GT/s', 14))
    """
    wanted = exact(bandwidth)
    choices = [(speed, lanes) for lanes in range(MOST_LANES, 0, -1) for speed in LANE_RATES]
    return min(choices, key=lambda choice: abs(counted_bandwidth(*choice) - wanted))

"""The PCIe link that NCCL counts nearest to a bandwidth: lane rate and number of lanes.

NCCL computes lanes x rate / 80 GB/s from its table ``kvDictPciGen`` (``src/graph/topo.cc``, in units of 100 Mb/s per
lane) and compares the lane rate as text, from its beginning: ``16.0 GT/s`` without ``PCIe`` behind it is unknown there.
"""

from __future__ import annotations

from fractions import Fraction

from topoplan.units import exact

LANE_RATES = {
    "2.5 GT/s": 15,
    "5 GT/s": 30,
    "8 GT/s": 60,
    "16 GT/s": 120,
    "32 GT/s": 240,
    "64.0 GT/s PCIe": 480,
}
"""Units of 100 Mb/s per lane, by the kernel's text of the rate; generations 1 to 6."""

MOST_LANES = 16


def counted_bandwidth(speed: str, lanes: int) -> Fraction:
    """GB/s per direction that NCCL counts for so many lanes of this rate."""
    return Fraction(lanes * LANE_RATES[speed], 80)


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

"""NVLink and PCIe together on a DGX-1V of 3 to 8 GPUs, over sizes, beside Blink's figure 26.

The bars of figure 26 are broadcasts on the allocations whose NVLinks carry most: 3, 4, 3, 4, 4 and 6 links' worth, at
about 22 GB/s a link. So NVLinks have 22 GB/s here, not the nominal 25. The time of switching peer access was fitted
to the same bars (`topoplan.machine.hardware.PEER_ACCESS`), so their mean gain is no prediction; what changes with
the number of GPUs, the sizes and the allreduce are.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import topoplan
from tests.support.known_answers import blink_figure
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.model.channel_split import channel_split, hybrid_plan
from topoplan.model.dataflow import peer_access_seconds
from topoplan.plans.plan import Plan
from topoplan.solve.cuts_and_partitions import best_bound
from topoplan.units import exact, format_size

MEASURED_LINK = 22.0  # GB/s of one NVLink in Blink's broadcasts (figures 14 and 26)
FIGURE_BYTES = 500_000_000  # buffer that figure 26 is taken to be measured with

SIZES = tuple(64 << 20 << step for step in range(7))


def main() -> None:
    machine = measured_machine()
    bars = blink_figure(26)
    for collective in ("broadcast", "allreduce"):
        print(
            f"{collective} on dgx-1v, NVLinks at {MEASURED_LINK:g} GB/s; algorithm bandwidth in GB/s by the model"
        )
        parts = {}
        for count in range(3, 9):
            gpus = strongest_allocation(machine, count)
            plans = [
                topoplan.plan(machine, collective, gpus=gpus, channels=channel)
                for channel in ("nvlink", "pcie")
            ]
            parts[count] = (gpus, plans)
        _print_sizes(parts)
        if collective == "broadcast" and bars:
            _print_figure(parts, bars)
        print()


def measured_machine() -> Topology:
    """The DGX-1V with NVLinks as fast as Blink found them."""
    machine = topoplan.load("dgx-1v")
    links = tuple(
        replace(link, bandwidth=MEASURED_LINK * link.count) if link.channel == "nvlink" else link
        for link in machine.links
    )
    return replace(machine, links=links)


def strongest_allocation(machine: Topology, count: int) -> tuple[int, ...]:
    """The first allocation of so many GPUs over whose NVLinks a broadcast from its first GPU is fastest."""

    def rate(gpus: tuple[int, ...]) -> Fraction:
        fabric = Fabric(machine.subset(gpus), ("nvlink",))
        if fabric.unreachable():
            return Fraction(0)
        return best_bound(fabric, "broadcast", 0).bound(fabric, "broadcast", 0)

    return max(itertools.combinations(range(8), count), key=rate)


def algbw(parts: list[Plan], nbytes: int) -> tuple[float, float, float]:
    """GB/s over NVLink alone, PCIe alone, and both with the shares of this size."""
    plans = (*parts, hybrid_plan(parts, nbytes=nbytes))
    return tuple(topoplan.simulate(plan, nbytes=nbytes).algbw for plan in plans)  # type: ignore[return-value]


def _print_sizes(parts: dict[int, tuple[tuple[int, ...], list[Plan]]]) -> None:
    print(f"  {'GPUs':16} {'':7} {'limit':>6}  " + " ".join(f"{format_size(size):>6}" for size in SIZES))
    for gpus, plans in parts.values():
        columns = list(zip(*(algbw(plans, size) for size in SIZES), strict=True))
        both = hybrid_plan(plans, nbytes=None)
        assert topoplan.verify(both).optimal
        limits = (plans[0].rate, plans[1].rate, both.rate)
        names = (",".join(map(str, gpus)), "", "")
        for name, kind, limit, row in zip(names, ("nvlink", "pcie", "both"), limits, columns, strict=True):
            print(f"  {name:16} {kind:7} {limit:6.1f}  " + " ".join(f"{value:6.1f}" for value in row))
        print(f"  {'':16} {both.notes[1]}")


def _print_figure(
    parts: dict[int, tuple[tuple[int, ...], list[Plan]]], bars: dict[str, dict[str, float]]
) -> None:
    print(f"  beside figure 26, buffers of {FIGURE_BYTES // 10**6} MB:")
    print(
        "  GPUs  T_dpa ms   nvlink measured   both measured   gain measured   equation 8 on the measured nvlink"
    )
    for count, (_, plans) in parts.items():
        alone, _, both = algbw(plans, FIGURE_BYTES)
        start = float(peer_access_seconds(plans[0].topology)) * 1e3
        bar = bars[str(count)]
        gained = (both - alone, bar["both"] - bar["nvlink"])
        print(
            f"  {count:4}  {start:8.1f}   {alone:6.1f} {bar['nvlink']:8.1f}   {both:4.1f} {bar['both']:8.1f}"
            f"   {gained[0]:4.1f} {gained[1]:8.1f}   {_equation_8(bar['nvlink'], plans[1]):6.1f}"
        )


def _equation_8(nvlink: float, pcie: Plan) -> float:
    """GB/s of both where NVLink alone is as fast as measured: no start-ups, no pipeline."""
    starts = [Fraction(0), peer_access_seconds(pcie.topology)]
    split = channel_split([exact(nvlink), exact(pcie.rate)], starts, FIGURE_BYTES)
    return float(FIGURE_BYTES / split.seconds / 10**9)

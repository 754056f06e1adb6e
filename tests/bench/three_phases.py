"""Three phases on two DGX-1V with 3 + 5 GPUs at 40, 100 and 400 Gb/s, beside Blink's figure 19b.

Blink does not say which GPUs these are. Its figure 16 has measured bars of every allocation; a projection can be no
faster inside than the weaker of two of them, nor NCCL than the slower. Only GPUs 4, 5, 7 with GPUs 1, 2, 4, 5, 7 give
34.67 and 4.67 within the reading error of the charts: 34.9 and 37.6 for Blink, and PCIe on the second for NCCL. Both
have the optimum of two NVLinks, 50 GB/s nominal; measured AllReduce was about 16.9 GB/s for each NVLink of the optimum,
so the same is printed with NVLinks of that speed.

The projection counts one NIC for each server, which any GPU reaches at full rate; NICs in their PCIe places follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import topoplan
from topoplan.machine.cluster import cluster
from topoplan.machine.cluster_network import Server
from topoplan.machine.topology import Topology
from topoplan.plans.plan import Plan
from topoplan.plans.structure import phases

GPUS = ((4, 5, 7), (1, 2, 4, 5, 7))

BLINK = {40: 5.0, 100: 12.33, 400: 34.67}
NCCL = 4.67  # GB/s read off the bars of figure 19b, error about 0.5

BARS = {
    (5, 6, 7): (35.43, 30.61),
    (4, 5, 7): (34.89, 30.08),
    (3, 6, 7): (17.23, 5.99),
    (3, 5, 7): (16.70, 5.99),
    (1, 5, 6): (37.03, 5.99),
    (3, 4, 5, 6, 7): (16.70, 4.92),
    (2, 3, 5, 6, 7): (33.29, 25.79),
    (2, 3, 4, 5, 7): (16.70, 4.92),
    (1, 4, 5, 6, 7): (30.61, 4.39),
    (1, 3, 5, 6, 7): (33.29, 25.79),
    (1, 3, 4, 6, 7): (17.77, 4.92),
    (1, 3, 4, 5, 7): (33.29, 25.79),
    (1, 3, 4, 5, 6): (16.70, 4.92),
    (1, 2, 5, 6, 7): (39.71, 25.79),
    (1, 2, 4, 6, 7): (16.70, 4.92),
    (1, 2, 4, 5, 7): (37.57, 4.92),
    (1, 2, 4, 5, 6): (37.57, 25.79),
    (1, 2, 3, 4, 5): (16.16, 4.92),
    (0, 1, 4, 5, 7): (26.33, 25.79),
}
"""GB/s of AllReduce on 3 and 5 GPUs of a DGX-1V, Blink and NCCL 2, read off the bars of figure 16."""

READING_ERROR = 0.5
MEASURED_LINK = 16.9  # GB/s of measured AllReduce for each NVLink of its optimum (figure 16)


def main() -> None:
    machine = topoplan.load("dgx-1v")
    print("allreduce of 3 + 5 GPUs on two dgx-1v by three phases; GB/s of algorithm bandwidth")
    found = ", ".join(f"{first} + {second}" for first, second in explaining_allocations())
    print(f"GPUs whose bars of figure 16 explain 34.67 and 4.67 of figure 19b: {found}")
    slower = tuple(
        replace(link, bandwidth=MEASURED_LINK * link.count) if link.channel == "nvlink" else link
        for link in machine.links
    )
    _print_block("one NIC each, reached at its full rate", machine, GPUS, nics=1, nic_access="direct")
    measured = replace(machine, links=slower)
    _print_block(f"the same, NVLinks at {MEASURED_LINK:g} GB/s", measured, GPUS, nics=1, nic_access="direct")
    _print_block("all NICs in their PCIe places", machine, GPUS, nics=None, nic_access="pcie")
    _print_block("GPUs 0-2 + 3-7", machine, ((0, 1, 2), (3, 4, 5, 6, 7)), nics=1, nic_access="direct")


def explaining_allocations() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Allocations of 3 and 5 GPUs whose measured bars, the weaker of each pair, are those of figure 19b."""
    return [
        (three, five)
        for three in BARS
        for five in BARS
        if (len(three), len(five)) == (3, 5)
        and all(
            abs(min(BARS[three][which], BARS[five][which]) - seen) <= READING_ERROR
            for which, seen in ((0, BLINK[400]), (1, NCCL))
        )
    ]


def _print_block(
    title: str, machine: Topology, gpus: Sequence[Sequence[int]], *, nics: int | None, nic_access: str
) -> None:
    print(f"\n  {title}: GPUs {' + '.join(','.join(map(str, part)) for part in gpus)}")
    print(
        f"  {'Gb/s':>4}  {'three-phase':>11} {'formula':>8} {'optimum':>8} {'bound':>7} {'Blink':>6} {'NCCL':>5}"
        f"  {'reduce in':>9} {'between':>8} {'bcast in':>8} {'both in':>8}  bottleneck"
    )
    for gbps, seen in BLINK.items():
        pair = cluster(
            [Server(machine, part) for part in gpus], nic_gbps=gbps, nics=nics, nic_access=nic_access
        )
        made, best = topoplan.three_phase(pair), topoplan.plan(pair)
        for plan in (made, best):
            topoplan.verify(plan)
        print(
            f"  {gbps:>4}  {made.rate:>11.2f} {_formula(pair, machine, gpus):>8.2f} {best.rate:>8.2f} "
            f"{best.bound:>7.2f} {seen:>6.2f} {NCCL:>5.2f}  {_phases(made)}"
        )


def _formula(pair: Topology, machine: Topology, gpus: Sequence[Sequence[int]]) -> float:
    """min(NIC n / (2 (n - 1)), local rate) for n = 2: the weaker server's NICs, and its GPUs alone."""
    leaving: dict[str, float] = {}
    for link in pair.links:
        if link.dst == "switch0":
            server = pair.device(link.src).server
            leaving[server] = leaving.get(server, 0.0) + link.bandwidth
    local = min(topoplan.plan(machine, gpus=part).rate for part in gpus)
    return min(*leaving.values(), local)


def _phases(plan: Plan) -> str:
    found = phases(plan)
    assert found is not None, "two servers"
    rates = (found.reduce.rate, found.between.rate, found.broadcast.rate, found.inside.rate)
    return "{:>9.2f} {:>8.2f} {:>8.2f} {:>8.2f}  {}".format(*rates, found.bottleneck)

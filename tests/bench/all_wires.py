"""One forest over all wires beside NVLink alone and two forests, on library machines and allocations of a DGX-1V.

Rates in GB/s of large messages: ``auto``, ``split`` (NVLink's and PCIe's forests side by side, where NVLink joins the
GPUs), ``all`` (PCIe switches turn copies around) and ``all-staged`` (copies over PCIe pass a CPU's memory).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

import topoplan
from topoplan.errors import TopoplanError
from topoplan.machine.topology import Topology
from topoplan.operate.compare.allocations import allocation_classes
from topoplan.reading.load import library

COLLECTIVES = ("allreduce", "broadcast", "allgather")
FORMS = ("auto", "split", "all", "all-staged")
MOST = 16


def main() -> None:
    machines = [topoplan.load(name) for name in library()]
    both = [
        machine for machine in machines if len(machine.gpus) <= MOST and _wires(machine) >= {"nvlink", "pcie"}
    ]
    print(
        "GB/s of algorithm bandwidth over auto, split, all, all-staged; * where a rate is not proved optimal"
    )
    print(f"{'':28}  {'members':>7}  " + "  ".join(f"{name:^34}" for name in COLLECTIVES))
    for machine in both:
        _line(machine.name, 1, _rates(machine, range(len(machine.gpus))))
    dgx1 = topoplan.load("dgx-1v")
    ratios: list[tuple[float, int]] = []
    for found in allocation_classes(dgx1, channels="all"):
        rates = _rates(dgx1, found.gpus)
        _line("dgx-1v " + ",".join(map(str, found.gpus)), found.members, rates)
        ratios += [(every / auto, found.members) for (auto, _), (split, _), (every, _), _ in rates if split]
    members = sum(count for _, count in ratios)
    mean = exp(sum(count * log(ratio) for ratio, count in ratios) / members)
    print(f"all / auto where NVLink joins the GPUs: mean {mean:.3f}, at most {max(ratios)[0]:.3f}")


def _wires(machine: Topology) -> set[str]:
    return {link.channel for link in machine.links}


def _rates(machine: Topology, gpus: Sequence[int]) -> list[list[tuple[float, bool]]]:
    return [[_rate(machine, gpus, collective, form) for form in FORMS] for collective in COLLECTIVES]


def _rate(machine: Topology, gpus: Sequence[int], collective: str, form: str) -> tuple[float, bool]:
    """Rate, and whether it is proved optimal; 0 where the form has no plan."""
    if form == "split":
        parts = [_rate(machine, gpus, collective, part) for part in ("nvlink", "pcie")]
        if not all(rate for rate, _ in parts):
            return 0.0, True
        return sum(rate for rate, _ in parts), all(proved for _, proved in parts)
    try:
        plan = topoplan.plan(machine, collective, gpus=list(gpus), channels=form)
    except TopoplanError:
        return 0.0, True
    return plan.rate, topoplan.verify(plan).optimal


def _line(name: str, members: int, rates: list[list[tuple[float, bool]]]) -> None:
    cells = (
        " ".join(f"{f'{rate:.2f}' if rate else '-':>7}{'' if proved else '*'}" for rate, proved in row)
        for row in rates
    )
    print(f"{name:28}  {members:7}  " + "  ".join(f"{cell:34}" for cell in cells))

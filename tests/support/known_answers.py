"""Known answers in ``tests/answers``: small tables with their source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

from tests.support.checkout import ROOT

FOLDER = ROOT / "tests" / "answers"


@dataclass(frozen=True, slots=True)
class Allocation:
    """A class of allocations of a DGX-1; rates in units of one NVLink in one direction."""

    machine: str  # name in the library
    gpus: tuple[int, ...]  # one member
    links: int  # NVLinks inside
    broadcast: Fraction  # optimal rates
    allreduce: Fraction
    allgather: Fraction
    rings: int  # largest number of directed NVLink rings; of two GPUs 0
    ring_allreduce: Fraction  # rate of an allreduce over them
    partition: tuple[tuple[int, ...], ...]  # parts of some member that prove the allreduce
    members: tuple[tuple[int, ...], ...]  # all allocations of the class

    def rate(self, collective: str) -> Fraction:
        return {
            "broadcast": self.broadcast,
            "reduce": self.broadcast,
            "allreduce": self.allreduce,
            "allgather": self.allgather,
            "reduce_scatter": self.allgather,
        }[collective]


@cache
def allocations() -> tuple[Allocation, ...]:
    """Every allocation of a DGX-1V or DGX-1P that NVLink connects, up to isomorphism."""

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text))

    found = []
    for line in (FOLDER / "dgx1_allocations.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            machine, gpus, links, *rates, rings, ring_rate, parts, members = line.split()
            found.append(
                Allocation(
                    machine.lower(),
                    numbers(gpus),
                    int(links),
                    *map(Fraction, rates),
                    int(rings),
                    Fraction(ring_rate),
                    tuple(map(numbers, parts.split("/"))),
                    tuple(map(numbers, members.split(","))),
                )
            )
    return tuple(found)


def blink_figure(number: int) -> Mapping[str, Any]:
    figures = json.loads((FOLDER / "blink_figures.json").read_text(encoding="utf-8"))
    (found,) = [values for name, values in figures.items() if name.endswith(f"figure {number}")]
    return dict(found)


def fabric_rates() -> Mapping[str, Mapping[str, float]]:
    """Optimal rates in GB/s of machines of `tests.bench.fabric_machines`, by machine and collective."""
    known = json.loads((FOLDER / "fabrics.json").read_text(encoding="utf-8"))
    return {name: rates for name, rates in known.items() if name != "source"}

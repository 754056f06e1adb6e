"""Any fabric at its optimum: known optima, what a rival took, and what we take, each plan verified from its file.

The rival is the public ForestColl code. Its CPU seconds and heights were measured by the author of the project's
issue on this class of machine (2 cores); they are not measured again here. Its AllReduce is reduce-scatter + allgather.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.bench.measure import BOUND_ALONE, LIMIT, Measured, measured
from tests.bench.tables import Table

COLLECTIVES = ("allgather", "reduce_scatter", "allreduce", "broadcast")

SAME = 1e-6  # known optima are written with so few digits that they may differ by this part


@dataclass(frozen=True, slots=True)
class Row:
    machine: str
    collective: str
    optimum: float  # GB/s
    rival: str  # what the rival needs, or reaches, as published
    # the same as CPU seconds, for the ratio; at least so many where ``rival`` begins with a sign
    rival_seconds: float | None
    seconds: float  # CPU seconds to reach
    height: int | None = None  # height to reach; None where none is asked for


ROWS = (
    Row("2 x A100", "allgather", 346.666667, "5.4 s, h 9", 5.4, 0.5),
    Row("4 x A100", "allgather", 266.666667, "42.5 s, h 19", 42.5, 0.2, 2),
    Row("8 x A100", "allgather", 228.571429, "411 s, h 36", 411, 0.3, 2),
    Row("16 x A100", "allgather", 213.333333, "> 480 s", 480, 0.5, 2),
    Row("2 x H100", "allgather", 533.333333, "4.3 s, h 10", 4.3, 0.5),
    Row("4 x H100", "allgather", 516.129032, "66.7 s, h 22", 66.7, 2),
    Row("128 x A100", "allgather", 201.574803, "never ended", None, 3, 2),
    Row("MI250", "allgather", 342.857143, "0.8 s, h 14", 0.8, 0.2, 7),
    Row("DGX-1V, 0-3 dead", "allreduce", 78.571429, "57.1 GB/s", None, 0.1),
    Row("switch, weak port", "allreduce", 83.928571, "71.4 GB/s", None, 0.2),
)

MORE = (
    *("2 x A100", "4 x A100", "8 x A100", "16 x A100", "2 x H100", "4 x H100", "MI250", "DGX-1V, 0-3 dead"),
    *("switch, weak port", "A100 3 + 5 GPUs", "A100 8 + 4 GPUs", "4 x A100, NIC dead", "4 x A100, slow rail"),
    *("2 x A100, measured", "MI250, measured", "DGX-2 over PCIe", "8 x A100, fat tree 2:1"),
)


PLANNED = ("machine|<22", "collective|<14")
FOUND = ("GB/s|9.4f", "gap|7", "height|6", "trees|5", "proof|<9", "verify s|8.3f", "file kB|7.0f")
"""Columns: what was planned, and what became of it."""


def main() -> None:
    print("plans of known optima; CPU seconds, median of 3 processes; the rival: public ForestColl code,")
    print("its figures as the project's issue states them for this class of machine")
    table = Table(
        *PLANNED, "optimum|8.3f", "rival|12", "CPU s|7.3f", "reach|5.1f", "ratio|8", *FOUND, "met|3"
    )
    for row in ROWS:
        _print_row(table, row, measured(row.machine, row.collective))
    _print_bound()
    print("\nmore machines and collectives, one process each")
    table = Table(*PLANNED, "CPU s|7.3f", *FOUND)
    for machine in MORE:
        for collective in COLLECTIVES:
            found = measured(machine, collective, runs=1)
            told = (f"over {LIMIT} s",) if found is None else (found.plan, *_found(found))
            table.row(machine, collective, *told)


def _print_row(table: Table, row: Row, found: Measured | None) -> None:
    known = (row.machine, row.collective, row.optimum, row.rival)
    if found is None:
        table.row(*known, f"over {LIMIT} s")
        return
    agrees = abs(found.bound - row.optimum) <= SAME * row.optimum
    low = row.height is None or found.height <= row.height
    met = agrees and found.optimal and low and found.plan <= row.seconds
    sign = ">" if row.rival.startswith(">") else ""
    ratio = None if row.rival_seconds is None else f"{sign}{row.rival_seconds / found.plan:.0f} x"
    table.row(*known, found.plan, row.seconds, ratio, *_found(found), "yes" if met else "NO")


def _print_bound() -> None:
    found = measured("2048 x A100", f"{BOUND_ALONE}allgather")
    if found is None:
        print(f"  bound alone, 16,384 GPUs: over {LIMIT} s")
        return
    print(
        f"  bound alone, allgather of 2048 x A100 = 16,384 GPUs: {found.bound:.6g} GB/s, {found.plan:.2f} CPU s"
        f" (reach 5; the rival's search 6-12 s at 128 GPUs) + {found.verify:.2f} s to recompute it from the cut;"
        f" building the machine {found.build:.2f} s; {found.peak >> 20} MiB"
    )


def _found(found: Measured) -> tuple[object, ...]:
    """Return the cells of the columns `FOUND`."""
    gap = "0" if found.optimal else f"{1 - found.rate / found.bound:.1e}"
    return found.rate, gap, found.height, found.trees, found.proof, found.verify, found.size / 1000

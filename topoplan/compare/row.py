"""One line of a comparison: an allocation, or a class of them, under trees and under rings."""

from __future__ import annotations

from dataclasses import dataclass

NO_RING = "none"
"""Kind of the ring of an allocation that has none, over NVLink or over PCIe."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One allocation, or one class of them, under trees and under rings. Rates are in GB/s of algorithm bandwidth.

    Parameters
    ----------
    collective : str
    gpus : tuple of int
        The allocation; of a class its representative.
    members : int
        Allocations that the row stands for; 1 where a single allocation was compared.
    channel : str or None
        What the trees run over: nvlink or pcie; None where no path joins the GPUs.
    trees, bound : float
        Rate of the packed trees, and what no plan on these links exceeds: both 0 where no path joins the GPUs,
        infinite for a single GPU, where nothing moves.
    tree_count, height : int
        Number of packed trees, and edges on the longest root-to-leaf path.
    ring : float
        Rate of the ring that `topoplan.ring` picks by itself; 0 where there is none.
    ring_kind : str
        "nvlink ring", "pcie ring" or "none" ("trivial" for a single GPU). A PCIe ring beside NVLink trees means that
        NVLink has no ring here.
    relay : float or None
        Rate of the rings over NVLink whose hops may be relayed; None where the trees do not run over NVLink.
    double_tree : float or None
        Rate of the double binary tree; None for collectives that have none.
    ratio : float
        ``trees / ring``, rounded from the exact quotient; not a number where there is no ring or nothing moves.
    relay_ratio : float or None
        ``trees / relay``; None where there is nothing to divide.
    notes : tuple of str
        What planner and rings have to say: why a ring fell back, what is not proved, why there is no plan.
    others : tuple of (str, float or None)
        Rates of other registered schedules that have a column, under its head; None where there is no such schedule.
    """

    collective: str
    gpus: tuple[int, ...]
    members: int
    channel: str | None
    trees: float
    bound: float
    tree_count: int
    height: int
    ring: float
    ring_kind: str
    relay: float | None
    double_tree: float | None
    ratio: float
    relay_ratio: float | None
    notes: tuple[str, ...] = ()
    others: tuple[tuple[str, float | None], ...] = ()

"""The phases of a plan over several servers, for a person."""

from __future__ import annotations

from topoplan.cli.output import table
from topoplan.plans.phases import Phases

_LISTED = 4


def phase_table(by_phase: Phases) -> str:
    """What each phase could sustain alone, where, and which holds the plan back."""
    rows = []
    for one in (by_phase.reduce, by_phase.between, by_phase.broadcast, by_phase.inside):
        links = [f"{src}>{dst}" for src, dst in one.full]
        more = f" and {len(links) - _LISTED} more" if len(links) > _LISTED else ""
        rows.append((one.name, f"{one.rate:.6g}" if links else "-", " ".join(links[:_LISTED]) + more))
    heads = ("phase", "GB/s alone", "full links")
    return f"{table(heads, rows)}\nbottleneck: {by_phase.bottleneck}"

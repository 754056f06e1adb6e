"""Describe how a plan runs for ``topoplan plan --explain``: streams, steps, and memory."""

from __future__ import annotations

from dataclasses import dataclass

from collectives.backends.tcp.chunk_order import FLIGHT_BYTES, Footprint, footprint
from topoplan.plans.plan import Plan
from topoplan.units import counted, format_size

CHUNK_BYTES = 256 << 10
"""Bytes of a chunk for which memory is stated."""


@dataclass(frozen=True, slots=True)
class RunExplanation:
    """How a plan runs (`topoplan.cli.main.PlanExplanation`)."""

    plan: Plan
    found: Footprint

    def to_object(self) -> dict[str, object]:
        return self.found.to_object()

    def lines(self) -> list[str]:
        found = self.found
        largest, waiting = max(found.scratch), max(found.held)
        rank = self.plan.ranks[found.scratch.index(largest)]
        where, memory = "none beside the buffers", ""
        if largest:
            where = f"beside the buffers at most {counted(largest, 'chunk')} (on {rank})"
            memory = f", {format_size(largest * CHUNK_BYTES)} with chunks of {format_size(CHUNK_BYTES)}"
        lines = [
            f"run    {counted(found.streams, 'stream')} of chunks in {counted(found.queues, 'queue')} between ranks; "
            f"a chunk takes {counted(found.steps, 'step')}, and the next follows one step behind",
            f"memory {where}{memory}; fan-in {found.fan_in}, depth {self.plan.depth}",
        ]
        if waiting:
            lines.append(
                f"       with tcp up to {format_size(FLIGHT_BYTES)} of each tree edge that waits may be under way, "
                f"{counted(waiting, 'edge')} on one rank"
            )
        return lines


def explain(plan: Plan) -> RunExplanation:
    """Return how a plan runs; UsageError if it has too many edges to look at each."""
    return RunExplanation(plan, footprint(plan))

"""Say how a plan runs for ``topoplan plan --explain``: streams, steps, and memory."""

from __future__ import annotations

from dataclasses import dataclass

from collectives.backends.tcp.chunk_order import FLIGHT_BYTES, Footprint, footprint
from topoplan.plans.plan import Plan
from topoplan.units import counted, format_size

CHUNK_BYTES = 256 << 10
"""Bytes of the chunk that memory is told for."""


@dataclass(frozen=True, slots=True)
class RunExplanation:
    """How a plan runs, for a person and for a program."""

    plan: Plan
    found: Footprint

    def to_object(self) -> dict[str, object]:
        """See `Footprint.to_object`."""
        return self.found.to_object()

    def lines(self) -> list[str]:
        """A few lines of text."""
        found = self.found
        largest, waiting = max(found.scratch), max(found.held)
        rank = self.plan.ranks[found.scratch.index(largest)]
        where, told = "none beside the buffers", ""
        if largest:
            where = f"beside the buffers at most {counted(largest, 'chunk')} (on {rank})"
            told = f", {format_size(largest * CHUNK_BYTES)} with chunks of {format_size(CHUNK_BYTES)}"
        lines = [
            f"run    {counted(found.streams, 'stream')} of chunks in {counted(found.queues, 'queue')} between ranks; "
            f"a chunk takes {counted(found.steps, 'step')}, and the next follows one step behind",
            f"memory {where}{told}; fan-in {found.fan_in}, depth {self.plan.depth}",
        ]
        if waiting:
            lines.append(
                f"       with tcp up to {format_size(FLIGHT_BYTES)} of each tree edge that waits may be under way, "
                f"{counted(waiting, 'edge')} on one rank"
            )
        return lines


def explain(plan: Plan) -> RunExplanation:
    """How a plan runs.

    Raises
    ------
    UsageError
        The plan has too many edges to look at them one by one.
    """
    return RunExplanation(plan, footprint(plan))

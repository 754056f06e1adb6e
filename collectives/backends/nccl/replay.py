"""Which of the runs of a program can be replayed as a CUDA graph: all ranks must replay the same capture, or none.

NCCL wants every rank to launch the graph of one and the same capture, and a graph holds addresses. So each rank offers
what it could do with the arrays of this call, everybody sees all offers, and they decide alike: replay where all have
the same graph; capture where all have run with these addresses before; else run step by step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

KEPT = 8
"""Sets of addresses that a rank remembers for a program."""

NEW, SEEN, FIRST_GRAPH = 0, 1, 2
"""Offers: never run, run before, and from here on the numbers of graphs."""


@dataclass(slots=True)
class _Run:
    offer: int
    graph: Any = None


class Replays:
    """What one rank remembers of one program; a key is whatever a graph depends on.

    Examples
    --------
    >>> replays = Replays()
    >>> replays.offer("x"), replays.ran("x"), replays.offer("x"), replays.captured("x", 7, "graph"), replays.offer("x")
    (0, None, 1, None, 9)
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[object, _Run] = OrderedDict()

    def offer(self, key: object) -> int:
        """What this rank could do."""
        return self._runs[key].offer if key in self._runs else NEW

    def graph(self, key: object) -> Any:
        """The graph of the last capture."""
        return self._runs[key].graph

    def ran(self, key: object) -> None:
        """It was run step by step."""
        if key not in self._runs:
            self._runs[key] = _Run(SEEN)
        self._runs.move_to_end(key)
        while len(self._runs) > KEPT:
            self._runs.popitem(last=False)

    def drop_graphs(self) -> None:
        """Let go of all graphs, for which NCCL waits before it frees a communicator."""
        for key, run in self._runs.items():
            self._runs[key] = _Run(min(run.offer, SEEN))

    def captured(self, key: object, number: int, graph: Any) -> None:
        """It was captured, as graph number so and so of the job."""
        self._runs[key] = _Run(FIRST_GRAPH + number, graph)


def decision(offers: Sequence[int]) -> str:
    """What all ranks do: "run", "capture" or "replay".

    Examples
    --------
    >>> decision([5, 5, 5]), decision([5, 1, 6]), decision([5, 0, 5])
    ('replay', 'capture', 'run')
    """
    if min(offers) == NEW:
        return "run"
    return "replay" if min(offers) == max(offers) >= FIRST_GRAPH else "capture"

"""Runs the rounds of a sparse plan on a back end: elements in their buffers, messages in an area of their own.

All ranks divide an area alike among the messages of a round. A rank puts its own messages into their places, the back
end copies them along the trees into the same places elsewhere, and nothing else of the area is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Generic

from collectives.execution.execution import Execution
from collectives.sparse.entry_arrays import EntryArrays, Line
from collectives.sparse.entry_messages import place_bytes
from topoplan.plans.plan import Plan
from topoplan.plans.rounds import Round, rounds


class RoundRunner(Generic[Line]):
    """The rounds of one sparse plan for one communicator.

    Parameters
    ----------
    execution : Execution
    plan : Plan

    Attributes
    ----------
    plan : Plan
    rounds : tuple of Round
    """

    def __init__(self, execution: Execution[Line], plan: Plan) -> None:
        self.plan = plan
        self.rounds = rounds(plan)
        self._execution = execution
        self._reached = [[_reached(one, number) for number in range(len(one.senders))] for one in self.rounds]

    def elements(
        self,
        number: int,
        borders: Sequence[int],
        *,
        op: str | None,
        given: Sequence[Line],
        results: Sequence[Line],
        about: str,
    ) -> None:
        """Run a round on elements, as `Execution.run_round`; shard s ends at ``borders[s]``."""
        part = self.rounds[number].plan
        self._execution.run_round(part, tuple(borders), op=op, given=given, results=results, about=about)

    def exchange(
        self,
        number: int,
        lengths: Sequence[int],
        sent: Mapping[tuple[int, int], Any],
        arrays: EntryArrays[Line],
        *,
        about: str,
    ) -> dict[int, list[tuple[int, int, Any]]]:
        """Run a round on entries.

        Parameters
        ----------
        number : int
            Of the round.
        lengths : sequence of int
            Bytes of a message of every shard of the sparse plan; 0 where its entries travel with another's.
        sent : mapping of (rank, shard) to arrays of uint8
            The messages of this process's ranks in this round.
        arrays : EntryArrays
            Of the messages.
        about : str

        Returns
        -------
        dict
            For each rank of this process the messages that have arrived, as (shard, sender, message), in the order
            of shards and senders.
        """
        one = self.rounds[number]
        backend = self._execution.backend
        library = backend.arrays
        padded = [place_bytes(length) for length in lengths]
        borders = tuple(accumulate(sum(padded[shard] for shard in together) for together in one.shards))
        total = borders[-1] if borders else 0
        areas = {rank: arrays.area(total) for rank in backend.ranks}
        arrived: dict[int, list[tuple[int, int, Any]]] = {rank: [] for rank in backend.ranks}
        coming = []
        start = 0
        for place, (together, sender) in enumerate(zip(one.shards, one.senders, strict=True)):
            for shard in together:
                stop = start + lengths[shard]
                if sender in areas and lengths[shard]:
                    arrays.store(library.part(areas[sender], start, stop), sent[sender, shard])
                coming += [
                    (rank, shard, sender, start) for rank in self._reached[number][place] if rank in areas
                ]
                start += padded[shard]
        lines = list(areas.values())
        self._execution.run_round(one.plan, borders, op=None, given=lines, results=lines, about=about)
        for rank, shard, sender, start in sorted(coming):
            part = library.part(areas[rank], start, start + lengths[shard])
            arrived[rank].append((shard, sender, arrays.values(part)))
        return arrived


def _reached(one: Round, number: int) -> tuple[int, ...]:
    """The ranks that a message reaches."""
    stages = one.plan.shards[number].stages
    return tuple(sorted({edge.child for stage in stages for edge in stage.edges}))

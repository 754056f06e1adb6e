"""Run allreduces whose ranks exchange elements: rounds on a back end, and the sums that each rank makes in between.

A round on elements runs in a buffer. For an exchange all ranks divide an area equally among the messages: a rank puts
its own into their places, the back end copies them along the trees into the same places elsewhere, and every sender
that has them all adds them up in the order of the senders. So sums have the same bits on all ranks, on every back end.
Other ranks of the trees only forward, and receive the total in a later round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

from collectives.tables.numpy_arrays import ArrayLibrary
from topoplan.plans.plan import Plan
from topoplan.plans.shards import ALIGNMENT, shard_bounds
from topoplan.plans.structure import PlanRound, rounds
from topoplan.plans.verify import exchanged, ranks_that_add

Array = TypeVar("Array")


RoundFunction = Callable[..., None]
"""Run one round; see `collectives.backends.execution.Execution.run_round`."""


@dataclass(frozen=True, slots=True)
class MessageArea:
    """The places of one exchange's messages for a buffer of some elements.

    - `borders`: where each message of the round ends; the last is the length of the area.
    - `places`: the start of the message of (shard, sender).
    - `sums`: each shard that is not empty: its elements from start to stop, the senders in order, and the ranks that
      add them up.
    """

    borders: tuple[int, ...]
    places: dict[tuple[int, int], int]
    sums: tuple[tuple[int, int, int, tuple[int, ...], frozenset[int]], ...]


class ExchangeRounds(Generic[Array]):
    """The rounds of one plan whose ranks exchange elements.

    >>> import topoplan
    >>> found = ExchangeRounds(topoplan.one_shot_plan(topoplan.load("v100x4")))
    >>> area = found.area(0, 100)
    >>> area.borders, area.places[0, 3], [(*one[:3], one[3]) for one in area.sums]
    ((112, 224, 336, 448), 336, [(0, 0, 100, (0, 1, 2, 3))])
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rounds = rounds(plan)
        found = [list(exchanged(shard)) for shard in plan.shards]
        numbers = [number for number, one in enumerate(self.rounds) if one.kind == "exchange"]
        self._sums = {
            number: [
                (tuple(roots), ranks_that_add(roots, reached))
                for _, roots, reached in (one[place] for one in found)
            ]
            for place, number in enumerate(numbers)
        }
        self.area: Callable[[int, int], MessageArea] = lru_cache(maxsize=64)(self._area)

    def run(
        self,
        inputs: Sequence[Array],
        totals: Sequence[Array],
        ranks: Sequence[int],
        library: ArrayLibrary[Array],
        *,
        op: str,
        run_round: RoundFunction,
    ) -> None:
        """Add up the contiguous arrays of all ranks into `totals`; both have one for each rank of this process.

        An average is only added up here.
        """
        (count,) = library.shape(inputs[0])
        borders = tuple(shard_bounds((shard.share for shard in self.plan.shards), count)[1:])
        joined = "sum" if op == "avg" else op
        for total, given in zip(totals, inputs, strict=True):
            library.copy(total, given)
        for number, one in enumerate(self.rounds):
            about = f"{op} of {count} elements, round {number}"
            if one.kind == "elements":
                run_round(one.plan, borders, op=joined, given=totals, results=totals, about=about)
                continue
            area = self.area(number, count)
            areas = [library.empty((area.borders[-1],), given) for given in inputs]
            for rank, total, area_elements in zip(ranks, totals, areas, strict=True):
                _put(area, rank, total, area_elements, library)
            run_round(one.plan, area.borders, op=None, given=areas, results=areas, about=about)
            for rank, total, area_elements in zip(ranks, totals, areas, strict=True):
                _add_up(area, rank, total, area_elements, library, joined)

    def _area(self, number: int, count: int) -> MessageArea:
        one: PlanRound = self.rounds[number]
        bounds = shard_bounds((shard.share for shard in self.plan.shards), count)
        borders, places, end = [], {}, 0
        for together, sender in zip(one.shards, one.senders, strict=True):
            for shard in together:
                places[shard, sender] = end
                end += -(-(bounds[shard + 1] - bounds[shard]) // ALIGNMENT) * ALIGNMENT
            borders.append(end)
        sums = tuple(
            (shard, bounds[shard], bounds[shard + 1], senders, adding)
            for shard, (senders, adding) in enumerate(self._sums[number])
            if bounds[shard] < bounds[shard + 1]
        )
        return MessageArea(tuple(borders), places, sums)


def _put(
    area: MessageArea, rank: int, total: Array, area_elements: Array, library: ArrayLibrary[Array]
) -> None:
    """Copy a rank's elements into the places of its messages."""
    for shard, start, stop, senders, _ in area.sums:
        if rank in senders:
            place = area.places[shard, rank]
            library.copy(
                library.part(area_elements, place, place + stop - start), library.part(total, start, stop)
            )


def _add_up(
    area: MessageArea, rank: int, total: Array, area_elements: Array, library: ArrayLibrary[Array], op: str
) -> None:
    """Add up all messages of every shard on a rank that has them."""
    for shard, start, stop, senders, adding in area.sums:
        if rank in adding:
            places = [area.places[shard, sender] for sender in senders]
            parts = [library.part(area_elements, place, place + stop - start) for place in places]
            library.join(library.part(total, start, stop), parts, op)

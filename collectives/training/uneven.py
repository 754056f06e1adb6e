"""Ranks that have run out of data go on with zeros, until all of them have.

Before the first exchange of a step every rank says whether it has data, by one short sum over all of them. One that has
none gives zeros, and what it has kept of earlier steps; where nobody has any, all of them leave together. Averages are
divided by the ranks that have data in the step ("present"), or by all of them ("all"), by which every sample of the run
has the same weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from collectives.communicator.communicator import Communicator
from topoplan.errors import BackendError, UsageError

DIVISORS = ("present", "all")


class Presence:
    """How many ranks have data, step by step.

    Parameters
    ----------
    ranks : int
        Of the job.
    total : callable
        From how many ranks of this process have data to how many of the job have: all ranks must call it.
    divide_by : str
        One of `DIVISORS`.

    Attributes
    ----------
    here : int
        Ranks of this process that have data.
    present : int
        Ranks of the job that had, when it was last asked.

    Raises
    ------
    UsageError
        Averages are divided by nothing else.

    Examples
    --------
    >>> presence = Presence(4, lambda here: here + 2, here=1)
    >>> presence.ask(7), presence.factor
    (3, 1.3333333333333333)
    """

    def __init__(
        self, ranks: int, total: Callable[[int], int], *, here: int, divide_by: str = "present"
    ) -> None:
        if divide_by not in DIVISORS:
            raise UsageError(f"averages are not divided by {divide_by!r}; use {' or '.join(DIVISORS)}")
        self._ranks = ranks
        self._total = total
        self._divide_by = divide_by
        self._asked = -1
        self.here = here
        self.present = ranks

    def ask(self, step: int) -> int:
        """How many ranks have data in a step; the first call of a step asks all of them.

        Raises
        ------
        BackendError
            Another rank failed.
        """
        if step != self._asked:
            self.present = self._total(self.here)
            self._asked = step
        return self.present

    def give_up(self) -> None:
        """The step is lost on all ranks: they are asked anew when it is made again."""
        self._asked = -1

    @property
    def factor(self) -> float:
        """What an average over all ranks is multiplied by, to be one of those that it is to be divided by."""
        return self._ranks / self.present if self._divide_by == "present" and self.present else 1.0


@contextmanager
def told_to_others(communicator: Communicator | None, when: str) -> Iterator[None]:
    """What this rank alone raises the others hear in their next exchange, and do not wait for it."""
    try:
        yield
    except Exception as error:
        if communicator is not None and not isinstance(error, BackendError):
            with suppress(BackendError):
                communicator.refuse(f"{when}: {type(error).__name__}: {error}")
        raise

"""Send changes of a momentum by top-k, and hold the sum of all that was sent: error feedback in the form of EF21-M.

EF21-M ("Momentum Provably Improves Error Feedback", arXiv 2305.15155, algorithm EF21-SGDM) with top-k as C, momentum
eta, and n ranks, all of which begin at zero:

    v = (1 - eta) v + eta g        momentum of a rank's gradient
    c = C(v - e),  e = e + c       what the rank sends, and what the others know of v
    G = G + (sum of c) / n         the result of the step, the same on all ranks

The rest v - e is the residual of ordinary error feedback whose gradient is the change of v: so the sparse allreduce
carries it as it is, in any exchange, encoding and selection. `FilterState` keeps v as a residual and G as an array, by
parameter, in units of a loss scale of 1; a step that is not finite restores both, and the residual.

The result is an estimate of the average gradient, not a sum of entries that were left out: entries that are not sent
in a step keep the value of the last one. Ranks that fail would stay in G for good, so `Shrink` is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectives.communicator.communicator import Communicator
from collectives.training.checkpoint_state import BucketPart, FilterState
from collectives.training.gradient_filters import distribute_average
from topoplan.errors import UsageError

NAME = "EF21-M"


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """The changes of the momenta of one gradient, (size,) arrays of the library: one, or a list of one for each rank.

    `given` are the gradients, `parts` their parameters, and `scale` the loss scale of both.
    """

    arrays: Any
    given: list[Any]
    parts: Sequence[BucketPart]
    scale: float


class GradientEstimates:
    """Momenta of the gradients of this process's ranks, and the estimates of their averages; `memory` has both.

    >>> GradientEstimates.settings_text(0.25), GradientEstimates.settings_text(None)
    ('EF21-M(0.25)', '')
    """

    def __init__(self, communicator: Communicator, momentum: float) -> None:
        self._comm = communicator
        self._momentum = momentum
        self.memory = FilterState()

    @staticmethod
    def settings_text(momentum: float | None) -> str:
        """Return the text by which a checkpoint names the estimates; empty without."""
        return "" if momentum is None else f"{NAME}({momentum})"

    def change(self, gradients: Any, parts: Sequence[BucketPart], scale: float) -> Changes:
        """Move the momenta towards gradients, which do not change; return what the sparse allreduce takes instead.

        Raises `UsageError` for gradients that are not floats, and for restored momenta of other lengths.
        """
        comm, library = self._comm, self._comm.arrays
        given = [gradients] if comm.one_rank else list(gradients)
        if "float" not in (kind := library.dtype(given[0])):
            raise UsageError(f"{NAME} needs gradients of floats, got {kind}")
        wide = np.dtype(np.float64 if kind == "float64" else np.float32)
        held = [BucketPart(f"{one.name}, momentum", one.start, one.stop, one.shape) for one in parts]
        changes, momenta = [], []
        for place, one in enumerate(given):
            line = np.ascontiguousarray(library.values(one)).reshape(-1).astype(wide)
            if scale != 1:
                line *= wide.type(1 / scale)
            momentum = np.zeros_like(line)
            self.memory.add_to(held, [momentum], place=place)
            with np.errstate(all="ignore"):
                line -= momentum
                line *= wide.type(self._momentum)
                momentum += line
                if scale != 1:
                    line *= wide.type(scale)
            momenta.append(momentum)
            changes.append(library.wrapped(line))
        self.memory.keep(held, momenta)
        return Changes(changes[0] if comm.one_rank else changes, given, parts, scale)

    def add(self, changes: Changes, out: Any, averages: Any) -> Any:
        """Add averages of sent changes to the estimates; return these as gradients, in `out` if it is given."""
        comm, library = self._comm, self._comm.arrays
        values = np.array(library.values(averages if comm.one_rank else averages[0])).reshape(-1)
        with np.errstate(all="ignore"):
            if changes.scale != 1:
                values *= values.dtype.type(1 / changes.scale)
            for one in changes.parts:
                before = self.memory.array(one.name)
                if before is not None:
                    values[one.start : one.stop] += before[0]
                self.memory.keep_arrays(one.name, [values[one.start : one.stop].copy()])
            if changes.scale != 1:
                values *= values.dtype.type(changes.scale)
        return distribute_average(comm, values, changes.given, out, self.memory)


def check_saved_estimates(state: Mapping[str, Any], momentum: float | None, *, residuals: bool) -> None:
    """Raise `UsageError` if a checkpoint has other estimates than the present settings, or residuals of none.

    `state` is that of filters, and `residuals` says whether the checkpoint has residuals of top-k. They are of no use
    to the others: they are what estimates lack. From a checkpoint without both, estimates begin at zero.
    """
    saved, text = str(state["filter"]), GradientEstimates.settings_text(momentum)
    if saved != text and (saved.startswith(NAME) or (text and residuals)):
        got = saved if saved.startswith(NAME) else "residuals of TopK without it"
        raise UsageError(f"the state must be of {text or 'no EF21-M'}, got {got}; use the same ef21")

"""How one gradient after another is averaged over all ranks: dense or sparse, in its own type or in 16 bits.

The one road that the torch hook and the plain loop share. Gradients are told apart by keys, whose residuals live in the
communicator; every exchange is recorded for the report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

from collectives.communicator.communicator import Communicator
from collectives.communicator.handle import Handle
from collectives.training.recorder import Recorder
from topoplan.errors import UsageError

if TYPE_CHECKING:
    from collectives.wire.filters import WireFormat

Density = float | Callable[[int], float]
"""Share of the elements that is exchanged, or a function from the step to it (`collectives.warm_up_density`)."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """How gradients are exchanged.

    Parameters
    ----------
    density : float, or callable from step to float, or None
        Share of the elements that is exchanged, the others staying in the residual; None for dense allreduce.
    exchange : str
        Of sparse gradients, as `Communicator.sparse_all_reduce` takes it.
    momentum : float
        Of the momentum correction of sparse gradients.
    wire : WireFormat or None
        How sparse entries travel.
    """

    density: Density | None = None
    exchange: str = "auto"
    momentum: float = 0.0
    wire: WireFormat | None = None

    def __post_init__(self) -> None:
        dense = Exchanged.__dataclass_fields__
        if self.density is None:
            for name in ("exchange", "momentum", "wire"):
                if getattr(self, name) != dense[name].default:
                    raise UsageError(
                        f"{name} {getattr(self, name)!r} is for sparse gradients; give a density too"
                    )
            return
        if not callable(self.density) and not (isinstance(self.density, Real) and 0 < self.density <= 1):
            raise UsageError(
                f"a density of {self.density!r} is not above 0 and at most 1; give for example 0.01"
            )
        from collectives.wire.filters import WireFormat

        if not isinstance(self.wire, WireFormat | None):
            raise UsageError(
                f"wire {self.wire!r} is no format; give for example collectives.wire.WireFormat(values='float16')"
            )

    def density_at(self, step: int) -> float:
        """The density of a step; 1 where gradients are dense."""
        if self.density is None:
            return 1.0
        return self.density(step) if callable(self.density) else self.density


class GradientExchange:
    """Averages gradients over the ranks of a communicator.

    Parameters
    ----------
    communicator : Communicator
    how : Exchanged
    recorder : Recorder
    """

    def __init__(self, communicator: Communicator, how: Exchanged, recorder: Recorder) -> None:
        self.communicator = communicator
        self.how = how
        self.recorder = recorder

    def end_step(self) -> None:
        """All gradients of a step have been waited for."""
        self.recorder.end_step()

    def start(self, key: str, gradients: Any, *, op: str = "avg", out: Any = None) -> Handle[Any]:
        """Begin to average a gradient.

        Parameters
        ----------
        key : str
            The same for the same gradient in every step.
        gradients : array, or a list of one for each rank of this process
            Not changed, unless given as ``out`` too.
        op : str
            avg; or sum, of gradients that were divided by the number of ranks before.
        out : as ``gradients``
            Where to put the averages; new arrays by default.

        Returns
        -------
        Handle
            Of the averages.
        """
        comm, recorder, step = self.communicator, self.recorder, self.recorder.step
        started = recorder.now()
        nbytes = nbytes_of(comm, gradients)
        if self.how.density is None:
            handle = comm.all_reduce(gradients, op=op, out=out, async_op=True)
            plan = comm.plan_for("allreduce", nbytes)
            told: Mapping[str, Any] = {"density": 1.0, "how": plan.schedule, "bound": plan.bound}
        else:
            density = self.how.density_at(step)
            chosen = comm.explain(gradients, density=density, exchange=self.how.exchange, wire=self.how.wire)
            handle = comm.sparse_all_reduce(
                gradients,
                density=density,
                op=op,
                key=key,
                momentum=self.how.momentum,
                exchange=self.how.exchange,
                wire=self.how.wire,
                out=out,
                async_op=True,
            )
            bound = math.inf if chosen.plan is None else chosen.plan.bound
            dense = chosen.exchange == "dense"
            told = {"density": 1.0 if dense else density, "how": chosen.exchange, "bound": bound}
        handle.when_done(lambda: recorder.add(key, nbytes, started, step=step, **told))
        return handle


def nbytes_of(comm: Communicator, gradients: Any) -> int:
    """Bytes of one rank's gradient."""
    one = gradients if comm.one_rank else gradients[0]
    return math.prod(comm.arrays.shape(one)) * comm.arrays.itemsize(one)

"""How gradients are exchanged in a synchronisation mode: one interface, three ways."""

from __future__ import annotations

from typing import Any, Protocol

from collectives.communicator.communicator import Communicator
from collectives.communicator.handle import Handle
from collectives.staleness.local_sgd import LocalExchange
from collectives.staleness.mailbox import Gather, Mailbox
from collectives.staleness.modes import ASP, SSP, LocalSGD, Mode
from collectives.staleness.stale_average import StaleExchange
from collectives.training.gradient_exchange import Exchanged, GradientExchange
from collectives.training.recorder import Recorder
from topoplan.errors import UsageError


class StepExchange(Protocol):
    """Averages the gradients of one step after another."""

    recorder: Recorder

    def start(self, key: str, gradients: Any, *, out: Any = None) -> Handle[Any]:
        """Begin to average a gradient (`GradientExchange.start`)."""

    def end_step(self) -> None:
        """All gradients of a step have been waited for."""


def step_exchange(
    mode: Mode,
    communicator: Communicator,
    how: Exchanged,
    recorder: Recorder,
    *,
    gather: Gather | None,
    timeout: float,
) -> GradientExchange | StaleExchange | LocalExchange:
    """The exchange of a mode.

    Parameters
    ----------
    mode : BSP, SSP, ASP or LocalSGD
    communicator : Communicator
    how : Exchanged
        Dense, but for BSP.
    recorder : Recorder
    gather : callable or None
        By which ranks find each other for SSP and ASP, which exchange gradients outside the communicator.
    timeout : float
        Seconds that a rank waits for another.

    Raises
    ------
    UsageError
        The mode does not go with sparse gradients, with several ranks in a process, or with this back end.
    BackendError
        The ranks do not find each other.
    """
    if isinstance(mode, SSP | ASP | LocalSGD) and how.density is not None:
        raise UsageError(f"{mode} exchanges whole gradients or parameters; leave the density out")
    if isinstance(mode, LocalSGD):
        return LocalExchange(communicator, mode, recorder)
    if not isinstance(mode, SSP | ASP):
        return GradientExchange(communicator, how, recorder)
    if not communicator.one_rank:
        raise UsageError(
            f"{mode} needs a process for each rank; back end {communicator.backend} holds all in one"
        )
    if gather is None:
        raise UsageError(
            f"{mode} needs ranks to find each other, which those of back end {communicator.backend} cannot; "
            "use mpi, tcp or shared"
        )
    mailbox = Mailbox(gather, rank=communicator.ranks[0], size=communicator.size, timeout=timeout)
    return StaleExchange(mailbox, communicator.arrays, mode, recorder)

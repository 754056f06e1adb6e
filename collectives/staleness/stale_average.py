"""Averaging gradients without meeting: each step uses what has arrived, at most so many steps late.

    average of a step = (own gradient + what has come from others since the last step) / ranks

Over a whole run every gradient is used once by every rank, so the sums agree in the end (`finish`); on the way replicas
differ by what is still under way. `modes` says what that gives up.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.arrays.library import ArrayLibrary
from collectives.communicator.handle import Handle
from collectives.staleness.mailbox import Mailbox
from collectives.staleness.modes import ASP, SSP
from collectives.training.recorder import Recorder
from topoplan.errors import UsageError

Array = NDArray[Any]


class StaleExchange:
    """As `GradientExchange`, for `SSP` and `ASP`; one rank to a process.

    Parameters
    ----------
    mailbox : Mailbox
    library : ArrayLibrary
        Of the gradients; they travel through the host.
    mode : SSP or ASP
    recorder : Recorder
    """

    def __init__(
        self, mailbox: Mailbox, library: ArrayLibrary[Any], mode: SSP | ASP, recorder: Recorder
    ) -> None:
        self.mailbox = mailbox
        self.mode = mode
        self.recorder = recorder
        self._library = library
        self._begun = False

    def start(self, key: str, gradients: Any, *, out: Any = None) -> Handle[Any]:
        """Send a gradient, and average it with what has come; the first of a step waits if this rank is too far ahead.

        Parameters and result as `GradientExchange.start`.

        Raises
        ------
        BackendError
            Another rank has failed, or stands still while this one waits for it.
        UsageError
            The gradient is of no floating type.
        """
        library, recorder = self._library, self.recorder
        kind = library.dtype(gradients)
        if "float" not in kind:
            raise UsageError(f"gradients of {kind} cannot be averaged with stale ones; give floats")
        if not self._begun:
            with recorder.waiting():
                self.mailbox.wait_to_begin(self.mode.bound)
            self._begun = True
        started = recorder.now()
        own = library.values(gradients)
        self.mailbox.post(key, own)
        arrived = self.mailbox.take(key)
        total = own if arrived is None else own + arrived
        average = (total / self.mailbox.size).astype(own.dtype, copy=False)
        result = library.empty(library.shape(gradients), gradients) if out is None else out
        library.put(result, average)
        recorder.add(key, own.nbytes, started, density=1.0, how=_name(self.mode), bound=np.inf)
        done: Future[Any] = Future()
        done.set_result(result)
        return Handle(done)

    def end_step(self) -> None:
        """This rank has used the averages of a step."""
        self.mailbox.tick()
        self._begun = False
        self.recorder.end_step()

    @property
    def gap(self) -> int:
        """How many steps this rank was ahead of the slowest when it had ended one, at most."""
        return self.mailbox.farthest + 1

    def finish(self) -> dict[str, Array]:
        """Wait for all ranks to finish; what is still to be used of each key, divided by the number of ranks.

        Raises
        ------
        BackendError
            Another rank has failed, or does not finish within the timeout.
        """
        left = self.mailbox.drain()
        return {key: total / self.mailbox.size for key, total in sorted(left.items())}

    def close(self) -> None:
        """Leave."""
        self.mailbox.close()


def _name(mode: SSP | ASP) -> str:
    return "asynchronous" if mode.bound is None else f"stale by {mode.bound}"

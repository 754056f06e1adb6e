"""Local SGD: gradients stay where they are, and every so many steps the parameters are averaged instead."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from collectives.communicator.communicator import Communicator
from collectives.communicator.handle import Handle
from collectives.staleness.modes import LocalSGD
from collectives.training.gradient_exchange import nbytes_of
from collectives.training.recorder import Recorder


class LocalExchange:
    """As `GradientExchange`, for `LocalSGD`.

    Parameters
    ----------
    communicator : Communicator
    mode : LocalSGD
    recorder : Recorder

    Attributes
    ----------
    due : int
        How often the steps so far ask for parameters to be averaged.
    """

    def __init__(self, communicator: Communicator, mode: LocalSGD, recorder: Recorder) -> None:
        self.communicator = communicator
        self.mode = mode
        self.recorder = recorder
        self.due = 0

    def start(self, key: str, gradients: Any, *, out: Any = None) -> Handle[Any]:
        """The rank's own gradient: nothing is sent. Parameters and result as `GradientExchange.start`."""
        comm = self.communicator
        given = [gradients] if comm.one_rank else list(gradients)
        if out is None:
            results = [comm.arrays.empty(comm.arrays.shape(one), one) for one in given]
        else:
            results = [out] if comm.one_rank else list(out)
        for result, one in zip(results, given, strict=True):
            if not comm.arrays.same(result, one):
                comm.arrays.copy(result, one)
        done: Future[Any] = Future()
        done.set_result(results[0] if comm.one_rank else results)
        return Handle(done)

    def end_step(self) -> None:
        """All gradients of a step have been waited for."""
        self.due += self.mode.averages_after(self.recorder.step)
        self.recorder.end_step()


def average_parameters(communicator: Communicator, recorder: Recorder, parameters: Sequence[Any]) -> None:
    """Average parameters over all ranks, in place; all of them must call it.

    Parameters
    ----------
    communicator : Communicator
    recorder : Recorder
        Told of it as part of the step that has just ended.
    parameters : sequence of arrays, or of lists with one for each rank of this process
        Writeable.

    Raises
    ------
    BackendError
        Another rank failed.
    """
    with recorder.waiting():
        for number, one in enumerate(parameters):
            started, nbytes = recorder.now(), nbytes_of(communicator, one)
            listed = one if communicator.one_rank else list(one)
            communicator.all_reduce(listed, op="avg", out=listed)
            plan = communicator.plan_for("allreduce", nbytes)
            recorder.add(
                f"parameter {number}",
                nbytes,
                started,
                density=1.0,
                how=plan.schedule,
                bound=plan.bound,
                step=recorder.step - 1,
            )

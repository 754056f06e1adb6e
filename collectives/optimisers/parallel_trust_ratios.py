"""Rates of layers, computed by their owners and gathered: work after the gradients are there, done once, not N times.

S. Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters", MLSys 2021, section
3.3: with replicated weights every rank would compute the same norms. Here each rank computes those of its own layers
and hands out one float64 for each, so that all ranks have the same bits, those that one rank alone would have got.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from collectives.communicator.communicator import Communicator
from collectives.optimisers.layer_assignment import assign_layers
from collectives.staleness.modes import BSP, Mode
from topoplan.errors import UsageError

Rates = NDArray[np.float64]

CALL = 10_000
"""Elements that take as long as what comes with each layer, whatever its size: the calls."""


@runtime_checkable
class Averaging(Protocol):
    """What averages gradients, and has a communicator for it: a `HookState`, a `GradientSynchronizer`."""

    @property
    def mode(self) -> Mode:
        """How far ranks may be apart."""

    @property
    def communicator(self) -> Communicator | None:
        """None where gradients are averaged without one."""


def sharing(given: Communicator | Averaging | None) -> Communicator | None:
    """The communicator whose ranks share norms: the given one, or that by which gradients are averaged.

    Raises
    ------
    UsageError
        It has no communicator, or its ranks are not in step, so that their parameters and norms differ.
    """
    if given is None or isinstance(given, Communicator):
        return given
    if not isinstance(given, Averaging):
        raise UsageError(
            f"a {type(given).__name__} has no ranks that share norms; give a Communicator, a HookState or a "
            "GradientSynchronizer, or leave communicator out"
        )
    if not isinstance(given.mode, BSP):
        raise UsageError(
            f"ranks in mode {given.mode} have parameters of their own, and so have their norms; leave communicator out"
        )
    return given.communicator


class ParallelRates:
    """Gathers what owners have computed for their layers.

    All ranks make it together, and compare what they mean before anything else moves.

    Parameters
    ----------
    communicator : Communicator
        Of any back end.
    sizes : sequence of int
        Elements of each layer.
    about : str
        Whatever else must be the same on all ranks, such as the settings of an optimiser.

    Attributes
    ----------
    assignment : Assignment
        Owners, balanced by elements and calls.

    Raises
    ------
    UsageError
        The ranks differ in layers or in ``about``; on every rank, with the names of two.
    BackendError
        Another rank failed.

    Examples
    --------
    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=(0, 1))
    >>> with Communicator(plan) as comm:
    ...     parallel = ParallelRates(comm, [500, 90_000, 70_000])
    ...     owned = [parallel.owned(rank) for rank in comm.ranks]
    ...     rates = parallel.gather([[0.25 * layer for layer in layers] for layers in owned])
    >>> owned, rates[0].tolist()
    ([(1,), (0, 2)], [0.0, 0.25, 0.5])
    """

    def __init__(self, communicator: Communicator, sizes: Sequence[int], *, about: str = "") -> None:
        self.communicator = communicator
        self.assignment = assign_layers([size + CALL for size in sizes], communicator.size)
        self._agree(sizes, about)
        owned = [self.owned(rank) for rank in range(communicator.size)]
        self._width = max(map(len, owned))
        self._places = np.empty(len(sizes), np.int64)
        for rank, layers in enumerate(owned):
            self._places[list(layers)] = rank * self._width + np.arange(len(layers))

    def owned(self, rank: int) -> tuple[int, ...]:
        """The layers whose rates a rank computes, ascending."""
        return self.assignment.owned(rank)

    def gather(self, rates: Any) -> Any:
        """Make the rates of all layers known to all ranks.

        Parameters
        ----------
        rates : sequence of float, or with several ranks in this process a list of one for each
            Of the layers that the rank owns, in the order of `owned`.

        Returns
        -------
        (layers,) float64 array, or a list of one for each rank of this process
            Bit-identical on all ranks; NaN goes through.

        Raises
        ------
        UsageError
            There are more or fewer rates than layers, or one is negative.
        BackendError
            Another rank failed, or gathers something else.
        """
        comm = self.communicator
        listed = [rates] if comm.one_rank else rates
        if len(listed) != len(comm.ranks):
            raise UsageError(f"{len(listed)} lists of rates are not one for each of {len(comm.ranks)} ranks")
        rows = [self._row(rank, own) for rank, own in zip(comm.ranks, listed, strict=True)]
        if not self._width:
            whole = [np.empty(0) for _ in rows]
        else:
            whole = [table[self._places] for table in _gathered(comm, rows)]
        return whole[0] if comm.one_rank else whole

    def _row(self, rank: int, rates: Sequence[float]) -> Rates:
        """A rank's rates, and zeros behind them where others own more layers."""
        layers = self.owned(rank)
        if len(rates) != len(layers):
            raise UsageError(
                f"rank {rank} has {len(rates)} rates for {len(layers)} layers; give one for each"
            )
        row = np.zeros(self._width)
        row[: len(layers)] = rates
        if (row < 0).any():
            wrong = int(np.argmax(row < 0))
            raise UsageError(
                f"layer {layers[wrong]} has rate {row[wrong]}, which would climb; rates are zero or more"
            )
        return row

    def _agree(self, sizes: Sequence[int], about: str) -> None:
        """Compare layers and settings with all ranks."""
        comm = self.communicator
        digest = hashlib.sha256(f"{list(sizes)} {about}".encode()).hexdigest()
        told = [json.loads(text) for text in comm.gather_texts(json.dumps([len(sizes), sum(sizes), digest]))]
        for rank in range(1, comm.size):
            if told[rank] != told[0]:
                layers, elements = (f"{told[rank][i]} instead of {told[0][i]}" for i in (0, 1))
                raise UsageError(
                    f"rank {rank} and rank 0 do not mean the same layers: {layers} layers, {elements} elements, "
                    "or other sizes or settings; give all ranks the same"
                )


def _gathered(comm: Communicator, rows: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Rows of all ranks one after another, for each rank of this process."""
    given = [comm.arrays.of(row) for row in rows]
    results = [comm.all_gather(given[0])] if comm.one_rank else comm.all_gather(given)
    return [comm.arrays.values(result) for result in results]

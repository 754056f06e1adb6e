"""What LARS and LAMB have in common in a plain loop: replicated weights, a rate for each layer, all of it in place.

A step measures the layers that this rank owns, gathers the rates of all, and then moves every layer; alone it does so
layer by layer, while each is in the cache. Weights of 16 bits are computed with in float32, and what is kept for them
is float32 too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from collectives.communicator.communicator import Communicator
from collectives.optimisers.layer_arrays import (
    Array,
    Layer,
    Layout,
    check_kept,
    difference,
    kept_for,
    layers_of,
)
from collectives.optimisers.parallel_trust_ratios import Averaging, ParallelRates, sharing
from topoplan.errors import UsageError

Replica = tuple[Sequence[Array], Sequence[Array]]
"""Weights and gradients of one rank."""


class LayerOptimiser(ABC):
    """An optimiser whose layers have rates.

    Parameters
    ----------
    learning_rate : float
        Of all layers; may be changed between steps, on all ranks alike.
    weight_decay : float or sequence of float
        Of all layers, or of each.
    excluded : collection of int
        Layers whose rate is 1, such as biases and the weights of normalisations.
    communicator : Communicator, GradientSynchronizer or None
        Whose ranks share the measuring; None for a rank that does all of it.

    Attributes
    ----------
    steps : int
        So far.

    Raises
    ------
    UsageError
        An argument is out of range.
    """

    names: tuple[str, ...]
    """Of the lines that are kept for each layer."""

    keeps_update = False
    """Whether measuring leaves an update behind, for which there must be room."""

    def __init__(
        self,
        *,
        learning_rate: float,
        weight_decay: float | Sequence[float],
        excluded: Collection[int],
        communicator: Communicator | Averaging | None,
    ) -> None:
        listed = [weight_decay] if isinstance(weight_decay, int | float) else list(weight_decay)
        for name, value in (("learning rate", learning_rate), *(("weight decay", one) for one in listed)):
            if not 0 <= value < math.inf:
                raise UsageError(f"a {name} of {value} is out of range; give zero or more")
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.excluded = frozenset(excluded)
        self.communicator = sharing(communicator)
        self.steps = 0
        self._layers: Layout | None = None
        self._rated: list[int] = []
        self._decays: list[float] = []
        self._parallel: ParallelRates | None = None
        self._kept: list[list[dict[str, Array]]] = []
        self._rooms: list[dict[int, Array]] = []

    def step(self, weights: Any, gradients: Any) -> None:
        """Move all layers, in place.

        Parameters
        ----------
        weights : sequence of float16, float32 or float64 arrays, contiguous
            The same ones on all ranks; with several ranks in this process a list of such sequences.
        gradients : as ``weights``
            Averaged over the ranks. Not changed.

        Raises
        ------
        UsageError
            Arrays do not fit, or other ranks have other layers or settings. Nothing has moved.
        BackendError
            Another rank failed. No weights have moved; what is kept may have.
        """
        if self.communicator is None or self.communicator.one_rank:
            replicas: list[Replica] = [(weights, gradients)]
        else:
            replicas = list(zip(weights, gradients, strict=True))
        layers = [layers_of(*replica) for replica in replicas]
        if self._layers is None:
            self._begin(layers)
        for found in layers:
            if found != self._layers:
                raise UsageError(
                    f"the layers are not those of the steps before: {difference(found, self._layers or [])}; "
                    "make another optimiser for other layers"
                )
        self.steps += 1
        if self._parallel is None:
            self._alone(*replicas[0])
        else:
            self._together(replicas, self._parallel)

    def state_dict(self) -> dict[str, Any]:
        """Steps, learning rate, and copies of what each rank of this process keeps: for a checkpoint."""
        kept = [[{name: line.copy() for name, line in one.items()} for one in each] for each in self._kept]
        return {"steps": self.steps, "learning_rate": self.learning_rate, "kept": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; on all ranks, of which there may be more or fewer processes than then.

        The next step checks that it fits the layers.

        Raises
        ------
        UsageError
            It is no state of such an optimiser. Nothing has changed.
        """
        try:
            steps, learning_rate = int(state["steps"]), float(state["learning_rate"])
            kept = [
                [{name: one[name].copy() for name in self.names} for one in each] for each in state["kept"]
            ]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"this is no state of {type(self).__name__} ({type(error).__name__}: {error}); "
                "give what its state_dict returned"
            ) from error
        self.steps, self.learning_rate, self._kept, self._layers = steps, learning_rate, kept, None

    @abstractmethod
    def _settings(self) -> str:
        """What must be the same on all ranks."""

    @abstractmethod
    def _measure(self, layer: Layer) -> float:
        """The rate of a layer."""

    @abstractmethod
    def _move(self, layer: Layer, speed: float) -> None:
        """Move a layer by its rate times the learning rate; where it has room it has been measured here."""

    def _begin(self, layers: list[Layout]) -> None:
        """Agree with all ranks on layers and settings, share the layers out, and make what is kept for them."""
        first = layers[0]
        for found in layers[1:]:
            if found != first:
                raise UsageError(
                    f"ranks differ in their layers: {difference(found, first)}; give all the same"
                )
        decays = self.weight_decay
        decays = [float(decays)] * len(first) if isinstance(decays, int | float) else list(decays)
        if len(decays) != len(first):
            raise UsageError(
                f"there are {len(decays)} weight decays for {len(first)} layers; give one for each"
            )
        missing = [layer for layer in sorted(self.excluded) if not 0 <= layer < len(first)]
        if missing:
            raise UsageError(
                f"layer {missing[0]} is excluded, and there are {len(first)}; name those that exist"
            )
        kept = self._kept or [kept_for(first, self.names) for _ in layers]
        check_kept(kept, first, ranks=len(layers))
        rated = [layer for layer in range(len(first)) if layer not in self.excluded]
        parallel = None
        if self.communicator is not None:
            about = f"{type(self).__name__} {self._settings()} {decays} {rated} {[str(dtype) for _, dtype in first]}"
            sizes = [math.prod(first[layer][0]) for layer in rated]
            parallel = ParallelRates(self.communicator, sizes, about=about)
        self._layers, self._decays, self._kept = first, decays, kept
        self._rated, self._parallel = rated, parallel
        self._rooms = [
            self._room(rank) for rank in ((0,) if parallel is None else parallel.communicator.ranks)
        ]

    def _room(self, rank: int) -> dict[int, Array]:
        """Where the updates of the layers that a rank measures are put: one place for all where each moves at once."""
        if not self.keeps_update:
            return {}
        lines = {layer: self._kept[0][layer][self.names[0]] for layer in self._owned(rank)}
        if self._parallel is not None:
            return {layer: np.empty_like(line) for layer, line in lines.items()}
        place = np.empty(max((line.nbytes for line in lines.values()), default=0), np.uint8)
        return {layer: place[: line.nbytes].view(line.dtype) for layer, line in lines.items()}

    def _owned(self, rank: int) -> list[int]:
        """The layers whose rates a rank computes."""
        if self._parallel is None:
            return self._rated
        return [self._rated[place] for place in self._parallel.owned(rank)]

    def _alone(self, weights: Sequence[Array], gradients: Sequence[Array]) -> None:
        rated = frozenset(self._rated)
        for layer in range(len(weights)):
            one = self._layer(0, (weights, gradients), layer)
            rate = self._measure(one) if layer in rated else 1.0
            self._finish(one, rate, weights[layer])

    def _together(self, replicas: list[Replica], parallel: ParallelRates) -> None:
        comm = parallel.communicator
        owned = [self._owned(rank) for rank in comm.ranks]
        measured = [
            [self._measure(self._layer(number, replica, layer)) for layer in layers]
            for number, (replica, layers) in enumerate(zip(replicas, owned, strict=True))
        ]
        gathered = [parallel.gather(measured[0])] if comm.one_rank else parallel.gather(measured)
        for number, (replica, found) in enumerate(zip(replicas, gathered, strict=True)):
            rates = dict(zip(self._rated, found.tolist(), strict=True))
            for layer, weights in enumerate(replica[0]):
                self._finish(self._layer(number, replica, layer), rates.get(layer, 1.0), weights)

    def _layer(self, number: int, replica: Replica, layer: int) -> Layer:
        """A layer of one of this process's ranks."""
        weights, gradients = replica
        kept = self._kept[number][layer]
        dtype = kept[self.names[0]].dtype
        return Layer(
            weights[layer].reshape(-1).astype(dtype, copy=False),
            np.ascontiguousarray(gradients[layer], dtype).reshape(-1),
            kept,
            self._rooms[number].get(layer),
            self._decays[layer],
        )

    def _finish(self, layer: Layer, rate: float, weights: Array) -> None:
        """Move a layer, and round it to what the caller's weights are."""
        self._move(layer, rate * self.learning_rate)
        if weights.dtype != layer.weights.dtype:
            weights.reshape(-1)[:] = layer.weights

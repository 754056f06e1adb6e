"""Train with LARS and LAMB in plain loops: replicated weights in numpy arrays, a rate for each layer, all in place.

    LARS: v = momentum v + learning rate x rate x (g + weight decay x w);  w = w - v
    LAMB: m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
          u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon) + weight decay x w;  w = w - learning rate x rate x u

Y. You, I. Gitman, B. Ginsburg, "Large Batch Training of Convolutional Networks", 2017, algorithm 1: the learning rate
is inside the velocity v, while torch's SGD has it outside. Y. You et al., "Large Batch Optimization for Deep Learning:
Training BERT in 76 minutes", ICLR 2020, algorithm 2. For torch there is `collectives.torch.optimizers`.

A step computes the norms of this rank's own layers, gathers the rates of all, and then moves every layer; alone it does
so layer by layer. Weights and gradients are checked first. Weights of 16 bits are computed in float32, and their state
is float32 too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.communicator.communicator import Communicator
from collectives.training.trust_ratios import (
    GradientAveraging,
    ParallelRates,
    lamb_rate,
    lars_rate,
    norm,
    sharing_communicator,
)
from topoplan.errors import UsageError
from topoplan.units import check_type, is_real, numbers_given, shortened

Array = NDArray[Any]

Layout = list[tuple[tuple[int, ...], np.dtype[Any]]]
"""Shape and dtype of each layer."""

DTYPES = (np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64))
"""Dtypes of weights."""


@dataclass(frozen=True, slots=True)
class LayerLines:
    """One layer in one step, as (size,) lines of its working dtype; `kept` is its state between steps."""

    weights: Array
    gradient: Array
    kept: dict[str, Array]
    decay: float


def layers_of(weights: Sequence[Array], gradients: Sequence[Array]) -> Layout:
    """Return shape and dtype of each layer.

    >>> layers_of([np.zeros((2, 3))], [np.zeros((3, 2))])
    Traceback (most recent call last):
    ...
    topoplan.errors.UsageError: layer 0 has weights of shape (2, 3) and a gradient of (3, 2); give the same shape
    """
    for name, given in (("weights", weights), ("gradients", gradients)):
        check_type(name, given, Collection, remedy="give a list with an array for each layer")
    if len(weights) != len(gradients):
        raise UsageError(
            f"{len(weights)} layers have {len(gradients)} gradients; give one for each, zeros if need be"
        )
    return [_layer(*both) for both in zip(range(len(weights)), weights, gradients, strict=True)]


def _layer(layer: int, weights: Array, gradient: Array) -> tuple[tuple[int, ...], np.dtype[Any]]:
    # a gradient that was computed from an array without dimensions is a scalar
    for what, array, kinds in (
        ("weights", weights, np.ndarray),
        ("a gradient", gradient, np.ndarray | np.floating),
    ):
        if not isinstance(array, kinds):
            raise UsageError(f"layer {layer} has {what} of type {type(array).__name__}; give a numpy array")
    if weights.dtype not in DTYPES:
        raise UsageError(f"layer {layer} has weights of {weights.dtype}; use float16, float32 or float64")
    if not (weights.flags.c_contiguous and weights.flags.writeable):
        raise UsageError(
            f"layer {layer} has weights that are not contiguous or cannot be written to; give a plain array"
        )
    if weights.shape != gradient.shape:
        raise UsageError(
            f"layer {layer} has weights of shape {weights.shape} and a gradient of {gradient.shape}; "
            "give the same shape"
        )
    if gradient.dtype.kind != "f" or not np.can_cast(gradient.dtype, working_dtype(weights.dtype)):
        raise UsageError(
            f"layer {layer} has weights of {weights.dtype} and a gradient of {gradient.dtype}, which is wider; "
            f"convert it to {working_dtype(weights.dtype)}"
        )
    return weights.shape, weights.dtype


def layout_difference(one: Sequence[tuple[object, object]], other: Sequence[tuple[object, object]]) -> str:
    """Return the first difference of two lists of layers, as a clause.

    >>> layout_difference([((3,), "float32"), ((2,), "float32")], [((3,), "float32"), ((2,), "float64")])
    'layer 1 is (2,) of float32 and was (2,) of float64'
    """
    if len(one) != len(other):
        return f"there are {len(one)} and were {len(other)}"
    first = next(layer for layer in range(len(one)) if one[layer] != other[layer])
    here, before = (f"{shape} of {dtype}" for shape, dtype in (one[first], other[first]))
    return f"layer {first} is {here} and was {before}"


def check_state(
    kept: Sequence[Sequence[dict[str, Array]]], lines: list[tuple[int, np.dtype[Any]]], *, ranks: int
) -> None:
    """Raise `UsageError` if a state does not match these layers on so many ranks of this process."""
    if len(kept) != ranks:
        raise UsageError(
            f"the state must be of {ranks} ranks in a process, got {len(kept)}; load another one"
        )
    for each in kept:
        for name in each[0] if each else ():
            found = [(one[name].size, one[name].dtype) for one in each]
            if found != lines:
                raise UsageError(
                    f"the state was saved with other layers: in its {name}, {layout_difference(lines, found)}; "
                    "load one of these layers"
                )
        if len(each) != len(lines):
            raise UsageError(f"the state must be of {len(lines)} layers, got {len(each)}; load another one")


def working_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which weights of a dtype are computed."""
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


BLOCK = 1 << 15
"""Elements in a block: few enough to stay in the cache."""

Replica = tuple[Sequence[Array], Sequence[Array]]
"""Weights and gradients of one rank."""


class ArrayLayerOptimizer(ABC):
    """Base of optimizers with a rate for each layer; `steps` counts so far.

    `learning_rate` may be changed between steps, to the same value on all ranks; `weight_decay` is one for all layers,
    or one for each. `excluded` are the numbers of layers whose rate is 1, such as biases and the weights of
    normalizations. The ranks of `communicator` share the computation of norms; with None this rank computes all.
    """

    names: tuple[str, ...]
    """Names of the lines of state of each layer."""

    def __init__(
        self,
        learning_rate: float,
        weight_decay: float | Sequence[float],
        *,
        excluded: Collection[int],
        communicator: Communicator | GradientAveraging | None,
    ) -> None:
        listed = [*weight_decay] if isinstance(weight_decay, Iterable) else [weight_decay]
        for name, value in (("learning rate", learning_rate), *(("weight decay", one) for one in listed)):
            if not is_real(value) or not 0 <= value < math.inf:
                raise UsageError(f"{name} must be 0 or more, got {shortened(value)}")
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.excluded = frozenset(numbers_given("excluded layers", excluded))
        self.communicator = sharing_communicator(communicator)
        self.steps = 0
        self._layers: Layout | None = None
        self._rated: list[int] = []
        self._decays: list[float] = []
        self._parallel: ParallelRates | None = None
        self._kept: list[list[dict[str, Array]]] = []

    def step(self, weights: Any, gradients: Any) -> None:
        """Move all layers, in place.

        Parameters
        ----------
        weights : sequence of float16, float32 or float64 arrays, contiguous
            The same on all ranks; with several ranks in this process a list of such sequences.
        gradients : as ``weights``
            Averaged over the ranks. Not changed.

        Raises
        ------
        UsageError
            Arrays do not match, or other ranks have other layers or settings. Nothing has moved.
        BackendError
            Another rank failed. No weights have moved; moments may have.
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
                    "the layers differ from those of the steps before: "
                    f"{layout_difference(found, self._layers or [])}; "
                    "make another optimizer for other layers"
                )
        self.steps += 1
        # overflow and NaN pass, whatever numpy's error mode: an exception would leave half of a step
        with np.errstate(all="ignore"):
            if self._parallel is None:
                self._alone(*replicas[0])
            else:
                self._together(replicas, self._parallel)

    def state_dict(self) -> dict[str, Any]:
        """Return steps, learning rate, and copies of the state of each rank of this process, for a checkpoint."""
        kept = [[{name: line.copy() for name, line in one.items()} for one in each] for each in self._kept]
        return {"steps": self.steps, "learning_rate": self.learning_rate, "kept": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; on all ranks, whose number of processes may differ.

        The next step checks that it matches the layers. Raises `UsageError`, and changes nothing, for another value.
        """
        check_type("state", state, Mapping, remedy="give what state_dict returned")
        try:
            steps, learning_rate = int(state["steps"]), float(state["learning_rate"])
            kept = [
                [{name: one[name].copy() for name in self.names} for one in each] for each in state["kept"]
            ]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"the state must be one of {type(self).__name__}, got {type(error).__name__}: {error}; "
                "give what its state_dict returned"
            ) from error
        self.steps, self.learning_rate, self._kept, self._layers = steps, learning_rate, kept, None

    @abstractmethod
    def _settings(self) -> str:
        """Return the settings that must be the same on all ranks."""

    @abstractmethod
    def _update(self, layer: LayerLines) -> Array:
        """Return the array whose norm is taken beside that of the weights, after moments were updated."""

    @abstractmethod
    def _rate(self, weight_norm: float, update_norm: float, decay: float) -> float:
        """Return the rate of a layer from its norms."""

    @abstractmethod
    def _move(self, layer: LayerLines, update: Array, speed: float) -> None:
        """Move a layer by its rate times the learning rate."""

    def _begin(self, layers: list[Layout]) -> None:
        first = layers[0]
        for found in layers[1:]:
            if found != first:
                raise UsageError(
                    f"ranks differ in their layers: {layout_difference(found, first)}; give all the same"
                )
        decays = self.weight_decay
        decays = [float(decays)] * len(first) if isinstance(decays, int | float) else [*map(float, decays)]
        if len(decays) != len(first):
            raise UsageError(f"weight_decay must be one for each of {len(first)} layers, got {len(decays)}")
        missing = [layer for layer in sorted(self.excluded) if not 0 <= layer < len(first)]
        if missing:
            raise UsageError(f"excluded layers must be from 0 to {len(first) - 1}, got {missing[0]}")
        lines = [(math.prod(shape), working_dtype(dtype)) for shape, dtype in first]
        kept = self._kept or [
            [{name: np.zeros(size, dtype) for name in self.names} for size, dtype in lines] for _ in layers
        ]
        check_state(kept, lines, ranks=len(layers))
        rated = [layer for layer in range(len(first)) if layer not in self.excluded]
        parallel = None
        if self.communicator is not None:
            about = f"{type(self).__name__} {self._settings()} {decays} {rated} {[str(dtype) for _, dtype in first]}"
            parallel = ParallelRates(self.communicator, [lines[layer][0] for layer in rated], about=about)
        self._layers, self._decays, self._kept = first, decays, kept
        self._rated, self._parallel = rated, parallel

    def _alone(self, weights: Sequence[Array], gradients: Sequence[Array]) -> None:
        """Measure and move one layer after another."""
        rated = frozenset(self._rated)
        for layer in range(len(weights)):
            one = self._layer(0, (weights, gradients), layer)
            update = self._update(one)
            rate = self._rate(norm(one.weights), norm(update), one.decay) if layer in rated else 1.0
            self._finish(one, update, rate, weights[layer])

    def _together(self, replicas: list[Replica], parallel: ParallelRates) -> None:
        """Move all layers; owners keep their updates until the rates arrive, others compute them as they move."""
        comm = parallel.communicator
        updates: list[dict[int, Array]] = [{} for _ in replicas]
        rates: list[list[float]] = [[] for _ in replicas]
        for number, (rank, replica) in enumerate(zip(comm.ranks, replicas, strict=True)):
            for place in parallel.owned(rank):
                one = self._layer(number, replica, self._rated[place])
                updates[number][self._rated[place]] = update = self._update(one)
                rates[number].append(self._rate(norm(one.weights), norm(update), one.decay))
        gathered = [parallel.gather(rates[0])] if comm.one_rank else parallel.gather(rates)
        for number, (replica, found) in enumerate(zip(replicas, gathered, strict=True)):
            rate_of = dict(zip(self._rated, found.tolist(), strict=True))
            for layer, weights in enumerate(replica[0]):
                one = self._layer(number, replica, layer)
                kept = updates[number].pop(layer, None)
                update = self._update(one) if kept is None else kept
                self._finish(one, update, rate_of.get(layer, 1.0), weights)

    def _layer(self, number: int, replica: Replica, layer: int) -> LayerLines:
        weights, gradients = replica
        kept = self._kept[number][layer]
        dtype = kept[self.names[0]].dtype
        return LayerLines(
            weights[layer].reshape(-1).astype(dtype, copy=False),
            np.ascontiguousarray(gradients[layer], dtype).reshape(-1),
            kept,
            self._decays[layer],
        )

    def _finish(self, layer: LayerLines, update: Array, rate: float, weights: Array) -> None:
        """Move a layer, and round it to the dtype of the caller's weights."""
        # a float of Python's: one of numpy would widen the arithmetic of float32 layers
        self._move(layer, update, rate * float(self.learning_rate))
        if weights.dtype != layer.weights.dtype:
            weights.reshape(-1)[:] = layer.weights


class Lars(ArrayLayerOptimizer):
    """Moves each layer by a rate of `lars_rate`.

    Parameters are those of `ArrayLayerOptimizer`, and ``coefficient``, the trust in a layer's gradient. Here the rate
    is 0.01 x 5 / 0.5 = 0.1:

    >>> weights, gradient = np.array([3.0, 4.0]), np.array([0.3, 0.4])
    >>> Lars(2.0, momentum=0.9, coefficient=0.01).step([weights], [gradient])
    >>> weights.round(12).tolist()
    [2.94, 3.92]
    """

    names = ("velocity",)

    def __init__(
        self,
        learning_rate: float,
        *,
        momentum: float = 0.9,
        weight_decay: float | Sequence[float] = 0.0,
        coefficient: float = 0.001,
        excluded: Collection[int] = (),
        communicator: Communicator | GradientAveraging | None = None,
    ) -> None:
        super().__init__(learning_rate, weight_decay, excluded=excluded, communicator=communicator)
        if not is_real(momentum) or not 0 <= momentum < 1:
            raise UsageError(f"momentum must be in [0, 1), got {shortened(momentum)}; give for example 0.9")
        if not is_real(coefficient) or not 0 < coefficient < math.inf:
            raise UsageError(f"coefficient must be above 0, got {coefficient!r}; give for example 0.001")
        self.momentum = float(momentum)
        self.coefficient = float(coefficient)

    def _settings(self) -> str:
        return f"momentum {self.momentum!r}, coefficient {self.coefficient!r}"

    def _update(self, layer: LayerLines) -> Array:
        return layer.gradient

    def _rate(self, weight_norm: float, update_norm: float, decay: float) -> float:
        return lars_rate(weight_norm, update_norm, coefficient=self.coefficient, weight_decay=decay)

    def _move(self, layer: LayerLines, update: Array, speed: float) -> None:
        for weights, gradient, velocity in _blocks(layer.weights, update, layer.kept["velocity"]):
            step = weights * layer.decay
            step += gradient
            step *= speed
            velocity *= self.momentum
            velocity += step
            weights -= velocity


class Lamb(ArrayLayerOptimizer):
    """Moves each layer by a rate of `lamb_rate`.

    Owners keep the updates of their layers until the rates are gathered: memory for a share of the weights. Parameters
    are those of `ArrayLayerOptimizer`, and ``betas``, b1 and b2. Here the first direction of Adam is (1, 1), of length
    sqrt(2), and the rate is 5 / sqrt(2):

    >>> weights, gradient = np.array([3.0, 4.0]), np.array([0.3, 0.4])
    >>> Lamb(0.1, epsilon=1e-12).step([weights], [gradient])
    >>> weights.round(6).tolist()
    [2.646447, 3.646447]
    """

    names = ("first", "second")

    def __init__(
        self,
        learning_rate: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-6,
        weight_decay: float | Sequence[float] = 0.0,
        excluded: Collection[int] = (),
        communicator: Communicator | GradientAveraging | None = None,
    ) -> None:
        super().__init__(learning_rate, weight_decay, excluded=excluded, communicator=communicator)
        given = tuple(betas) if isinstance(betas, Iterable) else ()
        if len(given) != 2 or not all(is_real(beta) and 0 <= beta < 1 for beta in given):
            raise UsageError(f"betas must be in [0, 1), got {betas!r}; give for example (0.9, 0.999)")
        if not is_real(epsilon) or not 0 < epsilon < math.inf:
            raise UsageError(f"epsilon must be above 0, got {shortened(epsilon)}; give for example 1e-6")
        self.betas = (float(given[0]), float(given[1]))
        self.epsilon = float(epsilon)

    def _settings(self) -> str:
        return f"betas {self.betas!r}, epsilon {self.epsilon!r}"

    def _update(self, layer: LayerLines) -> Array:
        b1, b2 = self.betas
        unbiased = 1 / (1 - b1**self.steps), 1 / math.sqrt(1 - b2**self.steps)
        whole = np.empty_like(layer.weights)
        lines = layer.weights, layer.gradient, layer.kept["first"], layer.kept["second"], whole
        for weights, gradient, first, second, update in _blocks(*lines):
            first *= b1
            first += (1 - b1) * gradient
            second *= b2
            second += (1 - b2) * gradient * gradient
            scale = np.sqrt(second)
            scale *= unbiased[1]
            scale += self.epsilon
            np.divide(first, scale, out=update)
            update *= unbiased[0]
            if layer.decay:
                update += layer.decay * weights
        return whole

    def _rate(self, weight_norm: float, update_norm: float, decay: float) -> float:
        return lamb_rate(weight_norm, update_norm)

    def _move(self, layer: LayerLines, update: Array, speed: float) -> None:
        for weights, step in _blocks(layer.weights, update):
            weights -= step * speed


def _blocks(*lines: Array) -> Iterator[tuple[Array, ...]]:
    for start in range(0, lines[0].size, BLOCK):
        yield tuple(line[start : start + BLOCK] for line in lines)

"""Train with LARS and LAMB in torch, alone or with the norms shared by the ranks of a communicator.

Parameters are replicated. A step computes the norms of this rank's own layers, gathers one float64 for each, and moves
all of them. Parameters of 16 bits are computed in float32, and so is their state. Norms are summed up in float64: on
the CPU by `collectives.training.trust_ratios`, on other devices by torch, from which one transfer brings all of them.
Complex parameters count as their real and imaginary parts, as in torch.optim.

The formulas are those of `collectives.training.optimizers`; torch's arithmetic may round otherwise than numpy's.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from collectives.communicator.communicator import Communicator
from collectives.torch.parameter_residuals import real_view
from collectives.training.trust_ratios import (
    GradientAveraging,
    ParallelRates,
    lamb_rate,
    lars_rate,
    norm,
    sharing_communicator,
)
from topoplan.errors import UsageError

ParameterGroup = dict[str, Any]

ParameterWithGroup = tuple[Any, ParameterGroup]
"""A parameter and its group."""


class TorchLayerOptimizer(torch.optim.Optimizer):  # type: ignore[misc, unused-ignore]  # torch may be missing
    """Base of optimizers with a rate for each parameter.

    `params` are parameters or groups, floating point or complex; a group with ``adapt=False`` has rate 1: for biases
    and the weights of normalizations. The ranks of `communicator`, one in each process, share the computation of norms;
    with None this rank computes all. It is not part of the optimizer's state: a copy computes alone.
    """

    _communicator: Communicator | None = None
    _parallel: ParallelRates | None = None
    _agreed_on: tuple[Any, ...] = ()

    def __init__(
        self,
        params: Iterable[Any],
        defaults: ParameterGroup,
        communicator: Communicator | GradientAveraging | None,
    ) -> None:
        shared = sharing_communicator(communicator)
        if shared is not None and not shared.one_rank:
            raise UsageError(
                f"a torch optimizer needs a process for each rank, and the {shared.backend} back end has several "
                "ranks in this one; use another"
            )
        super().__init__(params, {**defaults, "adapt": True})
        self._communicator = shared

    def add_param_group(self, param_group: ParameterGroup) -> None:
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except UsageError:
            self.param_groups.pop()
            raise

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move all parameters that have gradients; they must be the same on all ranks.

        Returns the result of ``closure``, which computes the loss anew with gradients, or None. Raises `UsageError`,
        with nothing moved, if a gradient is sparse, or other ranks have other parameters, gradients or settings, and
        `BackendError`, with no parameter moved, if another rank failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step()
        return loss

    def _step(self) -> None:
        layers = self._with_gradients()
        rated = [number for number, (_, group) in enumerate(layers) if group["adapt"]]
        owned = rated
        parallel = None
        if self._communicator is not None:
            parallel = self._agreed(self._communicator, layers, rated)
            owned = [rated[place] for place in parallel.owned(self._communicator.ranks[0])]
        found = {number: self._measured(*layers[number]) for number in owned}
        norms = iter(_norms(list(chain.from_iterable(found.values()))))
        rates = [self._rate(next(norms), next(norms), layers[number][1]) for number in owned]
        if parallel is not None:
            rates = parallel.gather(rates).tolist()
        speeds = dict(zip(rated, rates, strict=True))
        for number, (parameter, group) in enumerate(layers):
            measured = found.pop(number, None)
            self._move(parameter, group, float(group["lr"]) * speeds.get(number, 1.0), measured)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state as `torch.optim.Optimizer` does, but without rounding it to parameters of 16 bits."""
        super().load_state_dict(dict(state_dict))
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        here = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(saved, here, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor):
                    self.state[parameter][name] = value.detach().to(zeros_for(parameter), copy=True)

    def _with_gradients(self) -> list[ParameterWithGroup]:
        layers = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, _ in layers:
            moves = parameter.is_floating_point() or parameter.is_complex()
            if parameter.grad.is_sparse or not moves:
                raise UsageError(
                    f"a {parameter.dtype} parameter of shape {tuple(parameter.shape)} has a gradient of layout "
                    f"{parameter.grad.layout}; give floating-point or complex parameters and dense gradients"
                )
        return layers

    def _agreed(
        self, communicator: Communicator, layers: Sequence[ParameterWithGroup], rated: Sequence[int]
    ) -> ParallelRates:
        """Return the owners, agreed on by all ranks once for the same parameters with gradients and settings."""
        options = tuple(
            tuple((name, group[name]) for name in sorted(group) if name not in ("lr", "initial_lr", "params"))
            for group in self.param_groups
        )
        sizes = tuple((parameter.numel(), parameter.dtype) for parameter, _ in layers)
        places = tuple(p.grad is not None for group in self.param_groups for p in group["params"])
        settings = (options, sizes, places)
        if self._parallel is None or settings != self._agreed_on:
            self._parallel = None
            counts = [sizes[number][0] for number in rated]
            self._parallel = ParallelRates(communicator, counts, about=f"{type(self).__name__} {settings}")
            self._agreed_on = settings
        return self._parallel

    def _check_group(self, group: ParameterGroup) -> None:
        for name in ("lr", "weight_decay"):
            if not 0 <= group[name] < math.inf:
                raise UsageError(f"{name} must be 0 or more, got {group[name]}")

    @abstractmethod
    def _measured(self, parameter: Any, group: ParameterGroup) -> tuple[Any, Any]:
        """Return the two tensors whose norms make the rate, after moments were updated."""

    @abstractmethod
    def _rate(self, weight_norm: float, other_norm: float, group: ParameterGroup) -> float:
        """Return the rate from those norms."""

    @abstractmethod
    def _move(
        self, parameter: Any, group: ParameterGroup, speed: float, measured: tuple[Any, Any] | None
    ) -> None:
        """Move a parameter by its rate times the learning rate; ``measured`` is set on the rank that owns it."""


class Lars(TorchLayerOptimizer):
    """LARS, as `collectives.training.optimizers.Lars`.

    >>> weights = torch.nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    >>> weights.grad = torch.tensor([0.3, 0.4], dtype=torch.float64)
    >>> _ = Lars([weights], lr=2.0, coefficient=0.01).step()
    >>> [round(number, 12) for number in weights.tolist()]
    [2.94, 3.92]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        coefficient: float = 0.001,
        communicator: Communicator | GradientAveraging | None = None,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "coefficient": coefficient}
        super().__init__(params, options, communicator)

    def _check_group(self, group: ParameterGroup) -> None:
        super()._check_group(group)
        if not 0 <= group["momentum"] < 1 or not group["coefficient"] > 0:
            raise UsageError(
                f"momentum must be in [0, 1), such as 0.9, and coefficient above 0, such as 0.001, got "
                f"{group['momentum']} and {group['coefficient']}"
            )

    def _measured(self, parameter: Any, group: ParameterGroup) -> tuple[Any, Any]:
        return parameter, parameter.grad

    def _rate(self, weight_norm: float, other_norm: float, group: ParameterGroup) -> float:
        return lars_rate(
            weight_norm, other_norm, coefficient=group["coefficient"], weight_decay=group["weight_decay"]
        )

    def _move(
        self, parameter: Any, group: ParameterGroup, speed: float, measured: tuple[Any, Any] | None
    ) -> None:
        kept = self.state[parameter]
        if not kept:
            kept["velocity"] = zeros_for(parameter)
        velocity = kept["velocity"]
        gradient = parameter.grad.to(velocity.dtype)
        if group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        velocity.mul_(group["momentum"]).add_(gradient, alpha=speed)
        parameter.sub_(velocity)


class Lamb(TorchLayerOptimizer):
    """LAMB, as `collectives.training.optimizers.Lamb`.

    The updates of owned parameters are kept until all rates are there: alone that is as much memory as the parameters,
    with N ranks about an N-th of it.

    >>> weights = torch.nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    >>> weights.grad = torch.tensor([0.3, 0.4], dtype=torch.float64)
    >>> _ = Lamb([weights], lr=0.1, eps=1e-12).step()
    >>> [round(number, 6) for number in weights.tolist()]
    [2.646447, 3.646447]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        communicator: Communicator | GradientAveraging | None = None,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options, communicator)

    def _check_group(self, group: ParameterGroup) -> None:
        super()._check_group(group)
        if not all(0 <= beta < 1 for beta in group["betas"]) or not group["eps"] > 0:
            raise UsageError(
                f"betas must be in [0, 1), such as 0.9 and 0.999, and eps above 0, such as 1e-6, got {group['betas']} "
                "and "
                f"{group['eps']}"
            )

    def _measured(self, parameter: Any, group: ParameterGroup) -> tuple[Any, Any]:
        return parameter, self._update(parameter, group)

    def _rate(self, weight_norm: float, other_norm: float, group: ParameterGroup) -> float:
        return lamb_rate(weight_norm, other_norm)

    def _move(
        self, parameter: Any, group: ParameterGroup, speed: float, measured: tuple[Any, Any] | None
    ) -> None:
        update = self._update(parameter, group) if measured is None else measured[1]
        parameter.add_(update, alpha=-speed)

    def _update(self, parameter: Any, group: ParameterGroup) -> Any:
        kept = self.state[parameter]
        if not kept:
            kept.update(step=0, first=zeros_for(parameter), second=zeros_for(parameter))
        kept["step"] += 1
        b1, b2 = group["betas"]
        gradient, first, second = (
            real_view(one) for one in (parameter.grad.to(kept["first"].dtype), kept["first"], kept["second"])
        )
        first.lerp_(gradient, 1 - b1)
        second.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        # the bias correction of the first moment goes into the divisor: one pass less
        biased, unbiased = 1 - b1 ** kept["step"], 1 / math.sqrt(1 - b2 ** kept["step"])
        scale = second.sqrt().mul_(biased * unbiased).add_(biased * group["eps"])
        update = torch.div(first, scale, out=scale)
        if parameter.is_complex():
            update = torch.view_as_complex(update)
        return update.add_(parameter, alpha=group["weight_decay"]) if group["weight_decay"] else update


def zeros_for(parameter: Any) -> Any:
    """Return the initial state of a parameter."""
    dtype = torch.float32 if parameter.element_size() < 4 else parameter.dtype
    if dtype == torch.complex32:
        dtype = torch.complex64
    return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)


def _norms(tensors: Sequence[Any]) -> list[float]:
    tensors = [real_view(tensor) for tensor in tensors]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        wide = [tensor.float() if tensor.dtype == torch.bfloat16 else tensor for tensor in tensors]
        return [norm(tensor.detach().numpy()) for tensor in wide]
    found = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    numbers: list[float] = torch.stack([one.to(found[0].device) for one in found]).tolist()
    return numbers

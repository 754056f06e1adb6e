"""LARS and LAMB for torch, alone or with the norms shared by the ranks of a communicator.

The formulas are those of `collectives.optimisers.lars` and `collectives.optimisers.lamb`; where torch's arithmetic
rounds otherwise than numpy's, so do they.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from collectives.communicator.communicator import Communicator
from collectives.optimisers.parallel_trust_ratios import Averaging
from collectives.optimisers.trust_ratio import lamb_rate, lars_rate
from collectives.torch.layer_optimizer import Group, LayerOptimizer, zeros_for
from topoplan.errors import UsageError


class Lars(LayerOptimizer):
    """LARS, as `collectives.optimisers.lars.Lars`.

    Parameters
    ----------
    params : iterable of parameters, or of groups
        A group with ``adapt=False`` has rate 1: for biases and the weights of normalisations.
    lr : float
    momentum, weight_decay, coefficient : float
        Of groups that have none of their own.
    communicator : Communicator, HookState or None
        Whose ranks share the norms.

    Raises
    ------
    UsageError
        An option is out of range.

    Examples
    --------
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
        communicator: Communicator | Averaging | None = None,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "coefficient": coefficient}
        super().__init__(params, options, communicator)

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        if not 0 <= group["momentum"] < 1 or not group["coefficient"] > 0:
            raise UsageError(
                f"momentum {group['momentum']} or coefficient {group['coefficient']} is out of range; "
                "give a momentum in [0, 1), such as 0.9, and a coefficient above 0, such as 0.001"
            )

    def _measured(self, parameter: Any, group: Group) -> tuple[Any, Any]:
        return parameter, parameter.grad

    def _rate(self, weight_norm: float, other_norm: float, group: Group) -> float:
        return lars_rate(
            weight_norm, other_norm, coefficient=group["coefficient"], weight_decay=group["weight_decay"]
        )

    def _move(self, parameter: Any, group: Group, speed: float, measured: tuple[Any, Any] | None) -> None:
        kept = self.state[parameter]
        if not kept:
            kept["velocity"] = zeros_for(parameter)
        velocity = kept["velocity"]
        gradient = parameter.grad.to(velocity.dtype)
        if group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        velocity.mul_(group["momentum"]).add_(gradient, alpha=speed)
        parameter.sub_(velocity)


class Lamb(LayerOptimizer):
    """LAMB, as `collectives.optimisers.lamb.Lamb`.

    The updates that a rank measures are kept until all rates are there: alone that is as much memory as the parameters
    take, with N ranks about an N-th of it.

    Parameters
    ----------
    params : iterable of parameters, or of groups
        A group with ``adapt=False`` has rate 1: for biases and the weights of normalisations.
    lr : float
    betas : (float, float)
    eps, weight_decay : float
        As ``betas`` of groups that have none of their own.
    communicator : Communicator, HookState or None
        Whose ranks share the norms.

    Raises
    ------
    UsageError
        An option is out of range.

    Examples
    --------
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
        communicator: Communicator | Averaging | None = None,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options, communicator)

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        if not all(0 <= beta < 1 for beta in group["betas"]) or not group["eps"] > 0:
            raise UsageError(
                f"betas {group['betas']} or eps {group['eps']} are out of range; "
                "give betas in [0, 1), such as 0.9 and 0.999, and an eps above 0, such as 1e-6"
            )

    def _measured(self, parameter: Any, group: Group) -> tuple[Any, Any]:
        return parameter, self._update(parameter, group)

    def _rate(self, weight_norm: float, other_norm: float, group: Group) -> float:
        return lamb_rate(weight_norm, other_norm)

    def _move(self, parameter: Any, group: Group, speed: float, measured: tuple[Any, Any] | None) -> None:
        update = self._update(parameter, group) if measured is None else measured[1]
        parameter.add_(update, alpha=-speed)

    def _update(self, parameter: Any, group: Group) -> Any:
        """Where a parameter goes, after its moments have taken in the gradient."""
        kept = self.state[parameter]
        if not kept:
            kept.update(step=0, first=zeros_for(parameter), second=zeros_for(parameter))
        kept["step"] += 1
        b1, b2 = group["betas"]
        gradient = parameter.grad.to(kept["first"].dtype)
        kept["first"].lerp_(gradient, 1 - b1)
        kept["second"].mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        # what undoes the bias of the first moment goes into the divisor: one pass less
        biased, unbiased = 1 - b1 ** kept["step"], 1 / math.sqrt(1 - b2 ** kept["step"])
        scale = kept["second"].sqrt().mul_(biased * unbiased).add_(biased * group["eps"])
        update = torch.div(kept["first"], scale, out=scale)
        return update.add_(parameter, alpha=group["weight_decay"]) if group["weight_decay"] else update

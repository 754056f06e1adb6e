"""Numbers for the parameters of a model: those of a given order, or in the order in which buckets bring them."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class ParameterNumbers:
    """A number for each parameter, the same for the same tensor.

    Parameters
    ----------
    parameters : iterable of Parameter, optional
        Counted from 0; others go on from there as they come.

    Examples
    --------
    >>> one, other = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))
    >>> numbers = ParameterNumbers([one])
    >>> numbers.of(other), numbers.of(one), numbers.of(other)
    (1, 0, 1)
    """

    def __init__(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        self._known: dict[int, tuple[int, torch.Tensor]] = {}
        for parameter in parameters or ():
            self.of(parameter)

    def of(self, parameter: torch.Tensor) -> int:
        """The number of a parameter."""
        # the tensor is held so that no other one gets its identity
        return self._known.setdefault(id(parameter), (len(self._known), parameter))[0]

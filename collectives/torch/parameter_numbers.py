"""Numbers for the parameters of a model: those of a given order, or in the order in which buckets bring them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from topoplan.errors import UsageError


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
        for parameter in tensors_of(parameters or ()):
            self.of(parameter)

    def of(self, parameter: torch.Tensor) -> int:
        """The number of a parameter."""
        # the tensor is held so that no other one gets its identity
        return self._known.setdefault(id(parameter), (len(self._known), parameter))[0]


def tensors_of(parameters: object) -> list[torch.Tensor]:
    """The parameters that a caller names, of which each must be a tensor.

    Raises
    ------
    UsageError
        They are something else, as a model or pairs of names and parameters.

    Examples
    --------
    >>> tensors_of(torch.nn.Linear(3, 2))
    Traceback (most recent call last):
    topoplan.errors.UsageError: a Linear is no list of parameters; give model.parameters()
    """
    if not isinstance(parameters, Iterable) or isinstance(parameters, torch.Tensor | str):
        raise UsageError(f"a {type(parameters).__name__} is no list of parameters; give model.parameters()")
    listed = list(parameters)
    for one in listed:
        if not isinstance(one, torch.Tensor):
            raise UsageError(f"a {type(one).__name__} is no parameter; give model.parameters()")
    return listed

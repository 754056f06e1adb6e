"""The pull of EMSO: what `LocalSGD` with ``proximal`` adds to a rank's own gradients.

A rank that trains alone minimises its part of the loss plus gamma / 2 |w - anchor|^2, the anchor being the parameters
after the last average (Li et al., "Efficient Mini-batch Training for Stochastic Optimization", KDD 2014). The gradient
of the second term is gamma (w - anchor).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.arrays.library import ArrayLibrary
from topoplan.errors import UsageError


class Proximal:
    """The anchor of every parameter, and how far it has moved from there.

    Parameters
    ----------
    strength : float
        The gamma above.
    library : ArrayLibrary
    parameters : list of arrays for each rank of this process
        The first anchor.

    Raises
    ------
    UsageError
        A parameter is neither floating nor complex.
    """

    def __init__(
        self, strength: float, library: ArrayLibrary[Any], parameters: Sequence[Sequence[Any]]
    ) -> None:
        self._strength = strength
        self._library = library
        for one in parameters[0]:
            if "float" not in library.dtype(one) and "complex" not in library.dtype(one):
                raise UsageError(
                    f"parameters of {library.dtype(one)} cannot be pulled back; leave proximal out"
                )
        self.averaged(parameters)

    def averaged(self, parameters: Sequence[Sequence[Any]]) -> None:
        """Parameters have been averaged: they are the anchor now."""
        self._anchor = [[self._copy(one) for one in mine] for mine in parameters]
        self._pull: list[list[Any]] | None = None

    def moved(self, parameters: Sequence[Sequence[Any]]) -> None:
        """Parameters have moved by a step of their own rank."""
        self._pull = [
            [(one - anchor) * self._strength for one, anchor in zip(mine, anchors, strict=True)]
            for mine, anchors in zip(parameters, self._anchor, strict=True)
        ]

    def add_to(self, gradients: Sequence[Sequence[Any]], *, scale: float = 1.0) -> None:
        """Add the pull, times a loss scale, to gradients, in place."""
        if self._pull is None:
            return
        for mine, pulls in zip(gradients, self._pull, strict=True):
            for gradient, pull in zip(mine, pulls, strict=True):
                gradient += pull if scale == 1 else pull * scale

    def state(self) -> dict[str, Any]:
        """Anchors, and the pull where there is one, as copies in numpy arrays."""
        parts = {"anchor": self._anchor, "pull": self._pull}
        return {
            name: None
            if part is None
            else [[np.array(self._library.values(one)) for one in mine] for mine in part]
            for name, part in parts.items()
        }

    def common(self) -> dict[str, NDArray[Any]]:
        """The anchors, which all ranks have alike, by name."""
        return {
            f"anchor {place}": np.array(self._library.values(one))
            for place, one in enumerate(self._anchor[0])
        }

    def restore_common(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from the anchors of another rank, as `common` gave them, without a pull."""
        self._anchor = [[self._library.of(state[f"anchor {place}"]) for place in range(len(self._anchor[0]))]]
        self._pull = None

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        anchors, pulls = (
            None if part is None else [[self._library.of(one) for one in mine] for mine in part]
            for part in (state["anchor"], state["pull"])
        )
        assert anchors is not None, "an anchor is always there"
        self._anchor, self._pull = anchors, pulls

    def _copy(self, array: Any) -> Any:
        made = self._library.empty(self._library.shape(array), array)
        self._library.copy(made, array)
        return made

"""Hold and check the settings of gradient exchange: dense, narrow, sparse or filtered, and the mode.

Ranks compare the settings by their text before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

from collectives.sparse.selection.error_feedback import checked_density
from collectives.training.gradient_filters import IntegerCodes, Significance
from collectives.training.low_rank import LowRank
from collectives.training.modes import BSP, Mode
from topoplan.errors import UsageError

if TYPE_CHECKING:
    from collectives.sparse.codec import WireFormat


class HasScale(Protocol):
    """Knows the loss scale, as ``torch.amp.GradScaler`` does."""

    def get_scale(self) -> float:
        """Return it."""


Density = float | Callable[[int], float]
"""Share of the elements that is exchanged, or a function from the step to it (`collectives.warm_up_density`)."""

GivenScale = float | Callable[[], float] | HasScale
"""The loss scale of gradients, or what knows that of each step."""

FILTERS = ("low_rank", "codes", "significance")
"""What of dense gradients may travel in their place."""

NARROW = ("float16", "bfloat16")
"""Types in which dense gradients may travel."""


class LossScale:
    """What gradients of a step were multiplied by.

    Parameters
    ----------
    given : float, callable or object with a method ``get_scale()``, optional
        The number, or what returns it in each step, as torch's GradScaler does; by default 1.

    Attributes
    ----------
    given : bool
        Whether there is one.

    Raises
    ------
    UsageError
        It is none of these.

    Examples
    --------
    >>> LossScale()(), LossScale(1024)(), LossScale(lambda: 2.0)()
    (1.0, 1024.0, 2.0)
    """

    def __init__(self, given: GivenScale | None = None) -> None:
        self.use(given)

    def use(self, given: GivenScale | None) -> None:
        """Take another one from now on; raises as the constructor, and the one before stays then."""
        found = getattr(given, "get_scale", given)
        if not (found is None or callable(found)):
            self._checked(found)
        self.given = given is not None
        self._found = 1.0 if found is None else found

    def __call__(self) -> float:
        """Return that of the present step.

        Raises
        ------
        UsageError
            The function raises, or gives a number that is not above 0 and finite.
        """
        if not callable(self._found):
            return self._checked(self._found)
        try:
            found = self._found()
        except Exception as error:
            raise UsageError(f"loss_scale raised {type(error).__name__}: {error}") from error
        return self._checked(found)

    def _checked(self, found: Any) -> float:
        scale = float(found) if isinstance(found, Real) else math.nan
        if not 0 < scale < math.inf:
            raise UsageError(
                f"loss_scale must be above 0 and finite, got {found!r}; give the GradScaler, a number, or a function "
                "that returns one"
            )
        return scale


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """How gradients are exchanged: the same on all ranks.

    Parameters
    ----------
    density : float, or callable from step to float, or None
        Share of the elements that is exchanged, the others staying in the residual; None for dense allreduce.
    exchange : str
        Of sparse gradients, as `Communicator.sparse_all_reduce` takes it.
    momentum : float
        Of the momentum correction of sparse gradients.
    wire : WireFormat or None
        How sparse entries travel.
    mode : BSP, SSP, ASP, LocalSGD or Gossip
        How far ranks may be apart.
    compress : str or None
        One of `NARROW`, in which dense gradients travel; None for their own type.
    low_rank : LowRank or None
        Of dense gradients, the thin matrices that travel in their place; None for none.
    codes : IntegerCodes or None
        Of dense gradients, the whole numbers that travel and are added in their place; None for none.
    significance : Significance or None
        Of dense gradients, which entries alone travel; None for all.

    Raises
    ------
    UsageError
        One is out of range, or they do not go together.
    """

    density: Density | None = None
    exchange: str = "auto"
    momentum: float = 0.0
    wire: WireFormat | None = None
    mode: Mode = field(default_factory=BSP)
    compress: str | None = None
    low_rank: LowRank | None = None
    codes: IntegerCodes | None = None
    significance: Significance | None = None

    def __post_init__(self) -> None:
        plain = self.density is None and self.compress is None and isinstance(self.mode, BSP)
        filters = [name for name in FILTERS if getattr(self, name) is not None]
        if filters and not plain:
            raise UsageError(
                f"{filters[0]} is for whole gradients in step; leave out density, compress and mode"
            )
        if len(filters) > 1:
            raise UsageError(
                "gradients travel as thin matrices, as codes or as significant entries; give "
                f"{' or '.join(filters)}"
            )
        if self.compress is not None and self.compress not in NARROW:
            raise UsageError(f"gradients cannot travel as {self.compress!r}; use {' or '.join(NARROW)}")
        dense = ExchangeSettings.__dataclass_fields__
        if self.density is None:
            for name in ("exchange", "momentum", "wire"):
                if getattr(self, name) != dense[name].default:
                    raise UsageError(
                        f"{name} {getattr(self, name)!r} is for sparse gradients; give a density too"
                    )
            return
        if not callable(self.density):
            checked_density(self.density)
        if self.compress is not None:
            raise UsageError("compress is for dense gradients; let sparse ones travel narrow with wire")
        if not isinstance(self.mode, BSP):
            raise UsageError(f"{self.mode} exchanges whole gradients or parameters; leave the density out")
        from collectives.sparse.codec import WireFormat

        if not isinstance(self.wire, WireFormat | None):
            raise UsageError(
                f"wire {self.wire!r} is no format; give for example collectives.wire.WireFormat(values='float16')"
            )

    def __str__(self) -> str:
        """What ranks compare; of a function of the step what it is at the first."""
        given = f"{self.density_at(0)} at step 0" if callable(self.density) else f"{self.density}"
        return (
            f"density {given}, exchange {self.exchange}, momentum {self.momentum}, wire {self.wire}, {self.mode}, "
            f"compress {self.compress}"
            + "".join(f", {one}" for one in map(self.__getattribute__, FILTERS) if one is not None)
        )

    def density_at(self, step: int) -> float:
        """The density of a step; 1 where gradients are dense.

        Raises
        ------
        UsageError
            The function of the step raises, or gives something else.
        """
        if self.density is None:
            return 1.0
        if not callable(self.density):
            return self.density
        try:
            found = self.density(step)
        except Exception as error:
            raise UsageError(f"density({step}) raised {type(error).__name__}: {error}") from error
        return checked_density(found, f"density({step})")

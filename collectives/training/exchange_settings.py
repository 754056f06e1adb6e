"""Hold and check the settings of gradient exchange: dense, narrow, sparse or filtered, and the mode.

Ranks compare the settings by their text before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, Unpack

from collectives.sparse.selection.error_feedback import checked_density
from collectives.training.gradient_filters import IntegerCodes, Significance
from collectives.training.low_rank import LowRank
from collectives.training.modes import BSP, Mode, mode_of
from topoplan.errors import UsageError

if TYPE_CHECKING:
    from collectives.sparse.codec import WireFormat


class HasScale(Protocol):
    """Object that knows the loss scale, such as ``torch.amp.GradScaler``."""

    def get_scale(self) -> float:
        """Return the loss scale."""


Density = float | Callable[[int], float]
"""Share of the elements that is exchanged, or a function from the step to it (`collectives.warm_up_density`)."""

GivenScale = float | Callable[[], float] | HasScale
"""The loss scale of gradients, or what returns it in each step."""

FILTERS = {"low_rank": LowRank, "codes": IntegerCodes, "significance": Significance}
"""Settings of the filters of dense gradients."""

NARROW = ("float16", "bfloat16")
"""Types to which dense gradients may be rounded."""


class LossScale:
    """Factor of the gradients of a step: a number, a function, or an object with ``get_scale()``; 1 by default.

    `given` says whether there is one. Raises `UsageError` for anything else.

    >>> LossScale()(), LossScale(1024)(), LossScale(lambda: 2.0)()
    (1.0, 1024.0, 2.0)
    """

    def __init__(self, given: GivenScale | None = None) -> None:
        self.use(given)

    def use(self, given: GivenScale | None) -> None:
        """Use another scale from now on; if that raises as the constructor does, the old one stays."""
        found = getattr(given, "get_scale", given)
        if not (found is None or callable(found)):
            self._checked(found)
        self.given = given is not None
        self._found = 1.0 if found is None else found

    def __call__(self) -> float:
        """Return the scale of the present step.

        Raises `UsageError` if the function raises, or returns a number that is not above 0 and finite.
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


class ExchangeOptions(TypedDict, total=False):
    """Arguments of a user from which `ExchangeSettings.of` makes settings."""

    density: Density | None
    exchange: str
    momentum: float
    wire: WireFormat | None
    mode: Mode | str | None
    low_rank: LowRank | int | None
    codes: IntegerCodes | int | None
    significance: Significance | float | None


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """Settings of the exchange of gradients, the same on all ranks.

    `density` is the share of the elements that is exchanged, or a function from the step to it; None for dense
    allreduce. `exchange`, `momentum` and `wire` are for sparse gradients, as in `Communicator.sparse_all_reduce`.
    `compress` is one of `NARROW`, or None for the gradients' own type. `low_rank`, `codes` and `significance` are
    filters of dense gradients; None for none. Raises `UsageError` if one is out of range, or if two exclude each other.
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
                f"{filters[0]} is for dense gradients in mode bsp; leave out density, compress and mode"
            )
        if len(filters) > 1:
            raise UsageError(f"filters exclude each other; give {' or '.join(filters)}")
        if self.compress is not None and self.compress not in NARROW:
            raise UsageError(f"compress must be {' or '.join(NARROW)}, got {self.compress!r}")
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
            raise UsageError("compress is for dense gradients; give sparse ones a wire of fewer bits")
        if not isinstance(self.mode, BSP):
            raise UsageError(f"{self.mode} exchanges dense gradients or parameters; leave the density out")
        from collectives.sparse.codec import WireFormat

        if not isinstance(self.wire, WireFormat | None):
            raise UsageError(
                f"wire must be a WireFormat, got {self.wire!r}; give for example "
                "collectives.sparse.codec.WireFormat(values='float16')"
            )

    def __str__(self) -> str:
        """Return the text that ranks compare; a density by function is that of step 0."""
        given = f"{self.density_at(0)} at step 0" if callable(self.density) else f"{self.density}"
        return (
            f"density {given}, exchange {self.exchange}, momentum {self.momentum}, wire {self.wire}, {self.mode}, "
            f"compress {self.compress}" + (f", {self.filter}" if self.filter else "")
        )

    @classmethod
    def of(cls, *, compress: str | None, **given: Unpack[ExchangeOptions]) -> ExchangeSettings:
        """Return settings of the arguments of a user: a mode also by its name, a filter by its first number."""
        options: dict[str, Any] = {**given, "mode": mode_of(given.get("mode")), "compress": compress}
        for name, kind in FILTERS.items():
            if not isinstance(value := options.get(name), kind | None):
                options[name] = kind(value)
        return cls(**options)

    @property
    def filter(self) -> LowRank | IntegerCodes | Significance | None:
        """The settings of the filter of dense gradients; None without one."""
        return next((one for one in map(self.__getattribute__, FILTERS) if one is not None), None)

    def density_at(self, step: int) -> float:
        """Return the density of a step; 1 for dense gradients.

        Raises `UsageError` if the function raises, or returns a number out of range.
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

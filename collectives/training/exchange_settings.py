"""Hold and check the settings of gradient exchange: compression, synchronisation and fault tolerance.

Ranks compare the settings by their text before the first step. Keywords of earlier versions are translated here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

from collectives.sparse.exchange_choice import check_exchange, check_wire
from collectives.sparse.selection.error_feedback import checked_density, checked_momentum
from collectives.training.common_rows import CommonRows
from collectives.training.gradient_filters import Cast, Quantize, Threshold
from collectives.training.low_rank import LowRank
from collectives.training.modes import BSP, LOCAL_MODES, Mode, check_hashable
from topoplan.errors import UsageError

if TYPE_CHECKING:
    from collectives.sparse.codec import WireFormat
    from collectives.training.checkpoint_state import BucketPart


class HasScale(Protocol):
    """Object that knows the loss scale, such as ``torch.amp.GradScaler``."""

    def get_scale(self) -> float:
        """Return the loss scale."""


Share = float | Callable[[int], float]
"""Share of the elements that is exchanged, or a function of the step (`collectives.warm_up_density`)."""

Density = Share | Literal["auto"] | Mapping[str, Share]
"""A share, "auto", or shares by patterns of names of parameters."""

GivenScale = float | Callable[[], float] | HasScale
"""The loss scale of gradients, or what returns it in each step."""


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


@dataclass(frozen=True, slots=True)
class TopK:
    """Top-k sparsification with error feedback: every rank sends the largest entries, and keeps the rest for later.

    Parameters
    ----------
    density : float, callable from step to float, "auto", or mapping of str to float or callable
        Share of the entries that every rank sends, above 0 and at most 1. "auto" sends 1 % of a bucket if the model
        finds that faster than dense, the selection on the host included, and else all of it. A mapping has shares by
        patterns (`fnmatch`) of the names of parameters, of which the first that matches holds; each parameter then
        sends its own share, as with ``per="layer"``. Names are those of ``HookState(parameters=
        model.named_parameters())``, or in a plain loop the numbers of parameters, "0" for the first.
    exchange, momentum, wire
        As in `Communicator.sparse_all_reduce`: how entries travel, momentum correction, and the encoding of entries.
    per : str
        "bucket" for the largest entries of each bucket, "layer" for those of each parameter, "model" for those of all
        parameters of a dtype together: then nothing is sent before the backward pass has ended.
    clip : float, optional
        Norm to which each rank scales a bucket down before it adds the residual, times the square root of the number of
        ranks: about the norm at which the average would be clipped. By default none.
    ef21 : float, optional
        Momentum eta of EF21-M (`collectives.training.gradient_estimates`), above 0 and at most 1; 1 is EF21. Ranks then
        send changes of the momentum of their gradient, and the result is the estimate of its average: use plain
        ``SGD(momentum=0)``. By default ordinary error feedback.

    Examples
    --------
    >>> TopK(0.01).density, TopK(lambda step: 0.25 if step < 100 else 0.01).at(0)
    (0.01, 0.25)
    >>> TopK({"embedding*": 0.001, "*": 0.01}).at(0, ["embedding.weight", "head.bias"])
    (0.001, 0.01)
    """

    density: Density
    exchange: str = "auto"
    momentum: float = 0.0
    wire: WireFormat | None = None
    per: str = "bucket"
    clip: float | None = None
    ef21: float | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.per, str) and self.per in ("bucket", "layer", "model")):
            raise UsageError(f"per of TopK must be bucket, layer or model, got {self.per!r}; leave it out")
        if isinstance(self.density, Mapping):
            self._check_patterns(self.density)
            object.__setattr__(self, "density", dict(self.density))
            object.__setattr__(self, "per", "layer")
        check_exchange(self.exchange)
        checked_momentum(self.momentum)
        if self.per == "layer" and self.exchange not in ("auto", "dense", "pairs", "hashed"):
            raise UsageError(
                f"exchange {self.exchange!r} selects by the shards of its plan; with per='layer' use auto, pairs, "
                "hashed or dense"
            )
        if self.clip is not None and not (isinstance(self.clip, Real) and 0 < self.clip < math.inf):
            raise UsageError(f"clip of TopK must be a norm above 0, got {self.clip!r}; leave it out for none")
        if self.ef21 is not None:
            if not (isinstance(self.ef21, Real) and 0 < self.ef21 <= 1):
                raise UsageError(
                    f"ef21 of TopK must be a momentum above 0 and at most 1, got {self.ef21!r}; leave it out for none"
                )
            if self.momentum or self.clip is not None:
                raise UsageError(
                    "ef21 has a momentum of its own, and clip would bound changes; leave these out"
                )
            object.__setattr__(self, "ef21", float(self.ef21))  # ranks and checkpoints compare its text
        automatic = isinstance(self.density, str) and self.density == "auto"
        if not (callable(self.density) or isinstance(self.density, dict) or automatic):
            checked_density(self.density)
        given = self.density.values() if isinstance(self.density, dict) else (self.density,)
        if any(isinstance(share, int) for share in given):
            warnings.warn(
                "density 1 sends all entries; 1 % is TopK(0.01), and all are TopK(1.0)", stacklevel=3
            )
        check_wire(self.wire)
        check_hashable(self)

    def __eq__(self, other: object) -> bool:
        return self._compared() == other._compared() if isinstance(other, TopK) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._compared())

    def _compared(self) -> tuple[object, ...]:
        """Return all fields; densities by name in their order, which decides which pattern holds."""
        density = tuple(self.density.items()) if isinstance(self.density, dict) else self.density
        return (density, *(getattr(self, one.name) for one in fields(self)[1:]))

    def __str__(self) -> str:
        """Return the text that ranks compare; a density by function is that of step 0."""
        density = f"{self.at(0)} at step 0" if callable(self.density) else f"{self.density}"
        if isinstance(self.density, dict):
            found = {
                pattern: f"{self._share(one, 0)}" + " at step 0" * callable(one)
                for pattern, one in self.density.items()
            }
            density = ", ".join(f"{pattern}: {share}" for pattern, share in found.items())
            density = f"{{{density}}}"
        more = f", per={self.per!r}" * (self.per != "bucket") + f", clip={self.clip}" * (
            self.clip is not None
        )
        more += f", ef21={self.ef21}" * (self.ef21 is not None)
        return (
            f"TopK({density}, exchange={self.exchange!r}, momentum={self.momentum}, wire={self.wire}{more})"
        )

    def layers(self, parts: Sequence[BucketPart] | None) -> list[int] | None:
        """Return the elements of each parameter of a bucket if each sends its own share; None for a bucket as one."""
        if parts is None or self.per != "layer":
            return None
        return [part.stop - part.start for part in parts]

    def check_names(self, names: Sequence[str]) -> None:
        """Raise `UsageError` unless every pattern holds for a parameter, and every parameter has one."""
        if not isinstance(self.density, dict):
            return
        held = {self._pattern_of(name) for name in names}
        listed = ", ".join(names[:4]) + ", …" * (len(names) > 4)
        for pattern in self.density:
            if pattern not in held:
                raise UsageError(
                    f"pattern {pattern!r} of TopK must match a parameter that no earlier pattern matches, got none of "
                    f"{listed}; leave it out, or put it first"
                )

    def at(
        self, step: int, names: Sequence[str] | None = None
    ) -> float | Literal["auto"] | tuple[float, ...]:
        """Return the density of a step, or "auto"; if it is by name, that of each parameter.

        Raises `UsageError` if a function raises, or returns a number out of range, or no pattern matches a name.
        """
        if isinstance(self.density, dict):
            assert names is not None, "parameters are known"
            return tuple(self._share(self.density[self._pattern_of(name)], step) for name in names)
        return "auto" if self.density == "auto" else self._share(self.density, step)  # type: ignore[arg-type]

    def _share(self, found: Share, step: int) -> float:
        if not callable(found):
            return float(found)
        try:
            share = found(step)
        except Exception as error:
            raise UsageError(f"density({step}) raised {type(error).__name__}: {error}") from error
        return checked_density(share, f"density({step})")

    def _pattern_of(self, name: str) -> str:
        assert isinstance(self.density, dict), "densities are by name"
        for pattern in self.density:
            if fnmatchcase(name, pattern):
                return str(pattern)
        raise UsageError(
            f"parameter {name} must match a pattern of TopK, got {', '.join(map(repr, self.density))}; add '*' as the "
            "last one"
        )

    def _check_patterns(self, shares: Mapping[str, Share]) -> None:
        if self.per == "model":
            raise UsageError("densities by name select in each parameter, got per='model'; leave it out")
        if not shares:
            raise UsageError("densities by name must have a pattern, got none; give for example {'*': 0.01}")
        for pattern, share in shares.items():
            if not isinstance(pattern, str):
                raise UsageError(
                    f"patterns of TopK must be texts, got {pattern!r}; give for example 'embedding*'"
                )
            if not callable(share):
                checked_density(share, f"density of {pattern!r}")


Compression = TopK | CommonRows | LowRank | Quantize | Threshold | Cast
"""How gradients are compressed."""

COMPRESSIONS = "TopK(0.01), LowRank(2), Quantize(8), Threshold(0.1), CommonRows(0.01) or Cast('float16')"


@dataclass(frozen=True, slots=True)
class Shrink:
    """Fault tolerance: the survivors of a failed rank repeat what it interrupted, and continue without it.

    Parameters
    ----------
    on_change : callable, optional
        Called with the numbers of ranks before and after when the membership has changed, in the same step on all
        ranks and before its averages are used: to set the learning rate, or to divide the data again.
    join_token : str, optional
        Text by which this process joins in place of a failed rank (`Communicator.join_token` of another rank).
    """

    on_change: Callable[[int, int], object] | None = None
    join_token: str | None = None

    def __post_init__(self) -> None:
        if not (self.on_change is None or callable(self.on_change)):
            raise UsageError(f"on_change must be a function of two numbers of ranks, got {self.on_change!r}")
        if not isinstance(self.join_token, str | None):
            raise UsageError(f"join_token must be the text of another rank, got {self.join_token!r}")


class DeprecatedOptions(TypedDict, total=False):
    """Keywords of earlier versions, which `current_options` replaces."""

    density: Density | None
    exchange: str
    momentum: float
    wire: WireFormat | None
    low_rank: LowRank | int | None
    codes: Quantize | int | None
    significance: Threshold | float | None
    compress: str | None
    mode: Mode | str | None
    on_failure: str
    on_change: Callable[[int, int], object] | None
    invitation: str | None


_COMPRESSION_OF: dict[str, type[Any]] = {
    "density": TopK,
    "low_rank": LowRank,
    "codes": Quantize,
    "significance": Threshold,
    "compress": Cast,
}
_OF_TOP_K = {"exchange": "auto", "momentum": 0.0, "wire": None}
_OF_SHRINK = ("on_failure", "on_change", "invitation")


def call_text(how: object) -> str:
    """Return the shortest call that makes settings of compression.

    >>> call_text(TopK(0.01)), call_text(LowRank(1, matrices="bucket"))
    ('TopK(0.01)', "LowRank(1, matrices='bucket')")
    """
    (first, *others) = ((one.name, getattr(how, one.name), one.default) for one in fields(how))  # type: ignore[arg-type]
    more = [f"{name}={value!r}" for name, value, default in others if value != default]
    return f"{type(how).__name__}({', '.join([f'{first[1]!r}', *more])})"


def refuse_compression_as_plan(plan: object, call: str) -> None:
    """Raise `UsageError` if the plan is a compression, with the `call` that takes it."""
    if isinstance(plan, Compression):
        raise UsageError(
            f"{type(plan).__name__} is a compression, not a plan; write "
            + call.format(f"compression={call_text(plan)}")
        )


def warn_of_deprecated(name: str, given: Mapping[str, Any], *, quiet: bool = False) -> None:
    """Warn the caller's caller of keywords of earlier versions, unless `quiet`; TypeError if one never existed."""
    groups = {
        **{one: f"compression={kind.__name__}" for one, kind in _COMPRESSION_OF.items()},
        **dict.fromkeys(_OF_TOP_K, "compression=TopK"),
        "mode": "sync",
        **dict.fromkeys(_OF_SHRINK, "fault_tolerance=Shrink"),
    }
    for one in given:
        if one not in groups:
            raise TypeError(f"{name}.__init__() got an unexpected keyword argument {one!r}")
    for group in () if quiet else dict.fromkeys(map(groups.__getitem__, given)):
        held = {one: value for one, value in given.items() if groups[one] == group}
        old = ", ".join(f"{one}=" for one in held)
        warnings.warn(
            f"{name}({old}) is deprecated; write {_present_text(group, held)}",
            DeprecationWarning,
            stacklevel=3,
        )


def _present_text(group: str, held: Mapping[str, Any]) -> str:
    if group == "sync":
        return f"sync={held['mode']!r}"
    if group == "fault_tolerance=Shrink":
        if held.get("on_failure", "shrink") == "raise":
            return "nothing, since ranks raise by default"
        return f"{group}({'on_change=...' if 'on_change' in held else 'join_token=...' * ('invitation' in held)})"
    values = [
        f"{value!r}" if one in _COMPRESSION_OF else f"{one}={value!r}"
        for one, value in held.items()
        if value is not None
    ]
    for one, value in held.items():
        if one in _COMPRESSION_OF and isinstance(value, Compression):
            return f"compression={call_text(value)}"
    if "low_rank" in held and values:
        values.append("matrices='bucket'")
    return f"{group}({', '.join(values) or '...'})"


def current_options(
    old: Mapping[str, Any],
    *,
    compression: Compression | None = None,
    sync: Mode | str | None = None,
    fault_tolerance: Shrink | None = None,
) -> tuple[Compression | None, Mode | str | None, Shrink | None]:
    """Return compression, sync and fault tolerance as given, or as keywords of earlier versions ask for.

    Raises `UsageError` if two of them exclude each other.

    >>> current_options({"density": 0.01, "momentum": 0.9, "mode": None})
    (TopK(density=0.01, exchange='auto', momentum=0.9, wire=None, per='bucket', clip=None, ef21=None), None, None)
    """
    named = [one for one in _COMPRESSION_OF if old.get(one) is not None]
    if named and compression is not None:
        raise UsageError(f"give compression or {named[0]}, not both; {named[0]} is the deprecated name")
    if len(named) > 1:
        raise UsageError(f"compression must be one of {COMPRESSIONS}, got {' and '.join(named)}; give one")
    sparse = {one: old[one] for one, default in _OF_TOP_K.items() if old.get(one, default) != default}
    if sparse and named != ["density"]:
        name, value = next(iter(sparse.items()))
        raise UsageError(f"{name} {value!r} is for sparse gradients; give it to TopK(density, {name}=...)")
    for name in named:
        kind, value = _COMPRESSION_OF[name], old[name]
        if not isinstance(value, kind):
            more = {"matrices": "bucket"} if kind is LowRank else sparse
            value = kind(value, **more)
        compression = value
    if (mode := old.get("mode")) is not None:
        if sync is not None:
            raise UsageError("mode is the earlier name of sync; leave mode out")
        sync = mode
    found = {one: old[one] for one in _OF_SHRINK if one in old}
    if (reaction := found.get("on_failure", "raise")) not in ("raise", "shrink"):
        raise UsageError(f"on_failure must be raise or shrink, got {reaction!r}")
    if found and fault_tolerance is not None:
        raise UsageError(f"{', '.join(found)} must be in fault_tolerance=Shrink(...); leave it out beside")
    if reaction == "shrink" or found.get("invitation") is not None:
        fault_tolerance = Shrink(found.get("on_change"), found.get("invitation"))
    if not isinstance(fault_tolerance, Shrink | None):
        raise UsageError(f"fault_tolerance must be Shrink(...) or None, got {fault_tolerance!r}")
    return compression, sync, fault_tolerance


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """Settings of the exchange of gradients, the same on all ranks.

    `compression` is None for dense gradients; `shrinks` says whether the survivors of a failed rank continue. `names`
    are those of the parameters, by number; None if these have no others. Raises `UsageError` if settings exclude each
    other.
    """

    compression: Compression | None = None
    mode: Mode = field(default_factory=BSP)
    shrinks: bool = False
    names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        how = self.compression
        if not isinstance(how, Compression | None):
            raise UsageError(f"compression must be one of {COMPRESSIONS}, got {how!r}; leave it out for none")
        rounds_buckets = isinstance(how, Cast) and not isinstance(self.mode, LOCAL_MODES)
        if how is not None and not rounds_buckets and not isinstance(self.mode, BSP):
            raise UsageError(
                f"compression {type(how).__name__} needs steps that wait for all ranks, got sync {self.mode}; leave "
                "one of them out"
            )
        if self.shrinks and self.top_k is not None and self.top_k.ef21 is not None:
            raise UsageError(
                "ef21 of TopK keeps what failed ranks have sent, and needs fault_tolerance=None; leave one of them out"
            )

    def __str__(self) -> str:
        """Return the text that ranks compare."""
        return f"compression {self.compression}, {self.mode}" + ", fault_tolerance Shrink" * self.shrinks

    @property
    def top_k(self) -> TopK | None:
        """The settings of sparse gradients; None without."""
        return self.compression if isinstance(self.compression, TopK) else None

    @property
    def filter(self) -> CommonRows | LowRank | Quantize | Threshold | Cast | None:
        """The settings of the filter of dense gradients; None without one."""
        return None if isinstance(self.compression, TopK) else self.compression

    def names_of(self, parts: Sequence[BucketPart] | None) -> list[str] | None:
        """Return the names of the parameters of a bucket, whose parts end in their numbers; None if none is needed."""
        if parts is None or self.top_k is None or not isinstance(self.top_k.density, dict):
            return None
        numbers = [int(part.name.rpartition(" ")[2]) for part in parts]
        if self.names is None:
            return [f"{number}" for number in numbers]
        if (last := max(numbers, default=0)) >= len(self.names):
            raise UsageError(
                f"parameter {last} has no name, of {len(self.names)}; give parameters=model.named_parameters()"
            )
        return [self.names[number] for number in numbers]

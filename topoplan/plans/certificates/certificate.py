"""What a certificate is: what a third party needs to recompute the bound of a plan, and the recomputation.

All kinds have the same idea: give every directed link e a length y(e) >= 0. Whatever the trees, one byte of the buffer
uses at least L of length, so rate <= sum of c(e) y(e) / L. Each kind says in its own place which lengths these are, and
what L is; it bounds, reads itself aloud, and writes and reads itself.

A certificate is never trusted: its figures are recomputed, in exact arithmetic, without the solver.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Protocol, Self, TypeVar

from topoplan.errors import PlanError
from topoplan.fabric.fabric import Fabric
from topoplan.plans.json_values import check_known, read_list, read_object, read_text
from topoplan.topology import Topology
from topoplan.units import name_ranges


class Certificate(ABC):
    """A proof that no plan is faster.

    Attributes
    ----------
    kind : str
        What files call it.
    """

    __slots__ = ()
    kind: ClassVar[str]

    @abstractmethod
    def bound(self, fabric: Fabric, collective: str, root: int | None) -> Fraction:
        """Recompute the bound that the certificate proves, in GB/s of algorithm bandwidth, exactly.

        Parameters
        ----------
        fabric : Fabric
            Ranks, and the links that the plan may use.
        collective : str
        root : int or None
            Root rank of a broadcast or reduce.

        Returns
        -------
        Fraction
            No plan for this collective on this fabric has a higher rate.

        Raises
        ------
        PlanError
            It proves nothing: it names unknown devices, does not fit the collective, or is empty.
        """

    @abstractmethod
    def words(self, fabric: Fabric, collective: str, root: int | None) -> str:
        """The certificate read aloud: a capacity in GB/s and how often a byte uses it; their quotient is the bound."""

    @abstractmethod
    def to_object(self) -> dict[str, object]:
        """The JSON object of a plan file, with its kind."""

    @classmethod
    @abstractmethod
    def from_object(cls, value: dict[str, object]) -> Self:
        """Read such an object; PlanError where a key is missing or of a wrong type."""


class OneFabric(Certificate):
    """What bounds a plan whose links are one fabric."""

    __slots__ = ()

    @abstractmethod
    def link_lengths(self, fabric: Fabric, collective: str) -> list[Fraction]:
        """The length that the certificate gives every link of the fabric."""

    @abstractmethod
    def renamed(self, names: Mapping[str, str]) -> Self:
        """The certificate of a machine whose devices have other names: each the one that ``names`` has for it."""


Kind = TypeVar("Kind", bound=type[Certificate])
_KINDS: dict[str, type[Certificate]] = {}


def registered(kind: Kind) -> Kind:
    """Make a kind of certificate known to `certificate_from_object`."""
    _KINDS[kind.kind] = kind
    return kind


def certificate_from_object(item: object) -> Certificate:
    """Read the certificate of a plan file.

    Raises
    ------
    PlanError
        Its kind is unknown, or a key is missing or of a wrong type.
    """
    value = read_object(item, "certificate")
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        *others, last = _KINDS
        raise PlanError(f"certificate kind {repr(kind)[:60]} is unknown; use {', '.join(others)} or {last}")
    made = _KINDS[kind].from_object(value)
    check_known(value, made.to_object(), f"certificate {kind}")
    return made


def read_one_fabric(value: dict[str, object], of: str) -> OneFabric:
    """The certificate inside the object of one that is made of others; errors as `certificate_from_object`."""
    inner = read_object(value.get("certificate"), f"certificate: certificate of {of}")
    kind = _KINDS.get(str(inner.get("kind")))
    if kind is None or not issubclass(kind, OneFabric):
        raise PlanError(f"certificate: that of {of} must be a cut, a partition, lengths or trivial")
    made = kind.from_object(inner)
    check_known(inner, made.to_object(), f"certificate of {of}")
    return made


@registered
@dataclass(frozen=True, slots=True)
class Channels(Certificate):
    """A certificate for each channel, as (channel, certificate), of a plan that splits the buffer between them.

    A shard keeps to one channel (`topoplan.plans.verify`), so each carries at most its own bound, and all together at
    most the sum of these.
    """

    kind: ClassVar[str] = "channels"
    parts: tuple[tuple[str, OneFabric], ...]

    def bound(self, fabric: Fabric, collective: str, root: int | None) -> Fraction:
        bounded = tuple(channel for channel, _ in self.parts)
        if len(set(bounded)) < len(bounded) or set(bounded) != set(fabric.channels):
            raise PlanError(
                f"the certificate bounds {', '.join(bounded) or 'no channel'}, but the plan speaks of "
                f"{', '.join(fabric.channels)}: each channel needs one part"
            )
        return sum((part.bound(one, collective, root) for one, part in self._alone(fabric)), Fraction(0))

    def words(self, fabric: Fabric, collective: str, root: int | None) -> str:
        sums = [
            f"{number_words(part.bound(one, collective, root))} GB/s over {one.channels[0]} "
            f"({part.words(one, collective, root)})"
            for one, part in self._alone(fabric)
        ]
        return f"{' and '.join(sums)}, since every shard keeps to one of them"

    def _alone(self, fabric: Fabric) -> Iterator[tuple[Fabric, OneFabric]]:
        """The fabric of each channel, and its certificate."""
        for channel, part in self.parts:
            yield Fabric(fabric.topology, (channel,)), part

    def to_object(self) -> dict[str, object]:
        parts = [{"channel": channel, "certificate": part.to_object()} for channel, part in self.parts]
        return {"kind": self.kind, "parts": parts}

    @classmethod
    def from_object(cls, value: dict[str, object]) -> Self:
        parts = []
        for item in read_list(value.get("parts"), "certificate: parts"):
            part = read_object(item, "certificate: part")
            channel = read_text(part.get("channel"), "certificate: channel")
            inner = part.get("certificate")
            if isinstance(inner, dict) and inner.get("kind") == cls.kind:
                raise PlanError("certificate: a channel's certificate cannot itself be one of channels")
            parts.append((channel, read_one_fabric(part, "a channel")))
        return cls(tuple(parts))


class Proved(Protocol):
    """A plan, or a bound alone: something that carries a certificate, and what it speaks of."""

    @property
    def topology(self) -> Topology:
        """The machine."""

    @property
    def channels(self) -> tuple[str, ...]:
        """Channels that the bound speaks of."""

    @property
    def collective(self) -> str:
        """The collective."""

    @property
    def root(self) -> int | None:
        """Root rank of a broadcast or reduce."""

    @property
    def certificate(self) -> Certificate:
        """The proof."""


def explain_certificate(plan: Proved) -> str:
    """One sentence that names the bottleneck which the certificate of a plan, or of a bound alone, proves.

    Raises
    ------
    PlanError
        The certificate proves nothing (see `Certificate.bound`).

    Examples
    --------
    >>> import topoplan
    >>> explain_certificate(topoplan.plan(topoplan.load("dgx-1v"), "broadcast"))
    'only 150 GB/s leave {gpu0}, and every byte must'
    >>> explain_certificate(topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[0, 1, 2]))
    'the links between {gpu0} {gpu1} {gpu2} carry 200 GB/s both ways, and every byte crosses them 4 times'
    """
    return plan.certificate.words(Fabric(plan.topology, plan.channels), plan.collective, plan.root)


def node_set(names: Iterable[str], fabric: Fabric) -> set[int]:
    """Nodes of named devices, those left out that have no link of the fabric; PlanError for an unknown device."""
    position = {name: i for i, name in enumerate(fabric.nodes)}
    known = {device.name for device in fabric.topology.devices}
    for name in names:
        if name not in known:
            raise PlanError(f"the certificate names device {name!r}, which the topology does not have")
    return {position[name] for name in names if name in position}


def leaving(side: set[int], fabric: Fabric) -> list[Fraction]:
    """Length 1 for every link that leaves a set of nodes, and 0 for the others."""
    return [Fraction(src in side and dst not in side) for src, dst in fabric.ends]


def capacity_of(lengths: Sequence[Fraction], fabric: Fabric) -> Fraction:
    """Sum of c(e) y(e) over the links, in GB/s."""
    return sum((c * y for c, y in zip(fabric.capacity, lengths, strict=True) if y), Fraction(0))


_LISTED = 8


def number_words(value: Fraction) -> str:
    """A number to six digits."""
    return f"{float(value):.6g}"


def list_words(names: Iterable[str]) -> str:
    """The first names of a list, numbers as ranges, and how many more there are."""
    ranges = name_ranges(names)
    more = f" and {len(ranges) - _LISTED} more" if len(ranges) > _LISTED else ""
    return " ".join(ranges[:_LISTED]) + more


def set_words(names: Sequence[str]) -> str:
    """A set in braces, numbers as ranges; of many ranges the first, and how many more there are.

    Examples
    --------
    >>> set_words(["gpu0", "gpu1", "gpu2", "gpu6"]), set_words(["s0.gpu0", "s1.gpu0"])
    ('{gpu0-2,6}', '{s0,1.gpu0}')
    """
    ranges = name_ranges(names)
    shown = ranges if len(ranges) <= _LISTED else (*ranges[:_LISTED], f"and {len(ranges) - _LISTED} more")
    return "{" + " ".join(shown) + "}"

"""The certificate of a plan that splits the buffer between channels: one of them for each, and their sum.

A shard keeps to one channel (`topoplan.plans.verify`), so each channel carries at most its own bound, and all together
at most the sum of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Self

from topoplan.errors import PlanError
from topoplan.fabric.fabric import Fabric
from topoplan.plans.certificates.certificate import (
    Certificate,
    OneFabric,
    number_words,
    read_one_fabric,
    registered,
)
from topoplan.plans.json_values import read_list, read_object, read_text


@registered
@dataclass(frozen=True, slots=True)
class Channels(Certificate):
    """A certificate for each channel, as (channel, certificate), of a plan whose shards keep to one channel each."""

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

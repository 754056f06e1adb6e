"""What bounds an all-to-all: lengths under which everything that is sent is so far from where it must go.

For every byte of the buffer, D(s, d) bytes go from rank s to rank d. Their way is never shorter than the distance, so
whatever the paths, rate <= sum of c(e) y(e) / sum of D(s, d) distance(s, d), the dual of the concurrent flow problem
(Shahrokhi and Matula 1990, section 2). With length 1 on the links out of a device set it is the bound of a cut. Where
all pairs exchange alike, D = 1 / N; a `Demand` states another one, beside a certificate that gives the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import ClassVar, Self

from topoplan.errors import PlanError
from topoplan.fabric.fabric import Fabric
from topoplan.plans.certificates.certificate import (
    Certificate,
    OneFabric,
    capacity_of,
    number_words,
    read_one_fabric,
    registered,
)
from topoplan.plans.certificates.forest_length import exchange_length
from topoplan.plans.certificates.one_fabric import Cut
from topoplan.plans.json_values import read_list, read_whole
from topoplan.plans.tree import Shard
from topoplan.units import format_seconds

Bytes = tuple[tuple[int, ...], ...]
"""What row sends to column."""


@registered
@dataclass(frozen=True, slots=True)
class Demand(Certificate):
    """A certificate for an all-to-all whose pairs exchange different numbers of bytes; row sends to column."""

    kind: ClassVar[str] = "demand"
    demand: Bytes
    certificate: OneFabric

    @property
    def buffer(self) -> Fraction:
        """Bytes that a rank sends or keeps, on average."""
        return Fraction(sum(map(sum, self.demand)), len(self.demand))

    def bound(self, fabric: Fabric, collective: str, root: int | None) -> Fraction:
        if collective != "alltoall":
            raise PlanError(f"a demand bounds alltoall, not {collective}")
        self._check(fabric)
        lengths = self.certificate.link_lengths(fabric, collective)
        if any(value < 0 for value in lengths):
            raise PlanError("the certificate gives a link a length below zero; lengths are zero or more")
        scale = lcm(*(value.denominator for value in lengths))
        whole = [int(value * scale) for value in lengths]
        needed = exchange_length(fabric, whole, self.demand)
        if needed == 0:
            raise PlanError(
                "under the certificate's lengths the demand has no way to go, and they bound nothing"
            )
        return capacity_of([Fraction(value) for value in whole], fabric) * self.buffer / needed

    def suppose(self, shards: Sequence[Shard]) -> None:
        """Hold the shards of a plan to the demand that the bound speaks of; PlanError where they carry another."""
        size = len(self.demand)
        carried = [[Fraction(0)] * size for _ in range(size)]
        for shard in shards:
            source, destination = ends_of(shard)
            carried[source][destination] += shard.share
        for source, row in enumerate(carried):
            for destination, share in enumerate(row):
                if share * self.buffer != self.demand[source][destination]:
                    raise PlanError(
                        f"carries {number_words(share * self.buffer)} bytes to rank {destination} instead of the "
                        f"{self.demand[source][destination]} that the certificate's demand states",
                        rank=source,
                    )

    def seconds(self, rate: Fraction) -> Fraction:
        """Seconds that the demand takes at a rate in GB/s."""
        return self.buffer / rate / 10**9

    def words(self, fabric: Fabric, collective: str, root: int | None) -> str:
        lengths = self.certificate.link_lengths(fabric, collective)
        capacity = capacity_of(lengths, fabric)
        bound = self.bound(fabric, collective, root)
        needed = capacity * self.buffer / bound
        least = f"{format_seconds(float(self.seconds(bound)))} at least"
        if isinstance(self.certificate, Cut):
            crossing = self.certificate.crossing_words(fabric, collective)
            return f"{crossing}, and {number_words(needed)} bytes must: {least}"
        return (
            f"{sum(map(bool, lengths))} links, weighted by their dual lengths, carry {number_words(capacity)} GB/s, "
            f"and the demand takes {number_words(needed)} bytes of that weight: {least}"
        )

    def to_object(self) -> dict[str, object]:
        rows = [list(row) for row in self.demand]
        return {"kind": self.kind, "bytes": rows, "certificate": self.certificate.to_object()}

    @classmethod
    def from_object(cls, value: dict[str, object]) -> Self:
        where = "certificate: bytes"
        rows = (read_list(row, where) for row in read_list(value.get("bytes"), where))
        return cls(
            tuple(tuple(read_whole(item, where) for item in row) for row in rows),
            read_one_fabric(value, "a demand"),
        )

    def _check(self, fabric: Fabric) -> None:
        size = fabric.size
        if len(self.demand) != size or any(len(row) != size for row in self.demand):
            raise PlanError(f"the certificate's demand has other than {size} rows of {size}")
        if min(map(min, self.demand)) < 0 or not any(map(any, self.demand)):
            raise PlanError("the certificate's demand must be zero or more bytes, and some above")


def ends_of(shard: Shard) -> tuple[int, int]:
    """Source and destination of a shard of an all-to-all.

    Raises
    ------
    PlanError
        Its tree is no path.
    """
    if len(shard.stages) != 1 or shard.stages[0].op != "broadcast" or shard.stages[0].entries is not None:
        raise PlanError(
            "must have one stage, a broadcast of elements, along which a block of an alltoall goes"
        )
    stage = shard.stages[0]
    at = stage.root
    for edge in stage.top_down():
        if edge.parent != at:
            raise PlanError(f"branches at rank {edge.parent}; a block of an alltoall takes a path")
        at = edge.child
    return stage.root, at

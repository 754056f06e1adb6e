"""Check a request once, and turn a finished forest into a `Plan`.

`Allocation` holds a collective, the GPUs that take part and the links that it may use; planner, bounds and schedules
all begin there. Ranks are the chosen GPUs in the order in which they were given. `build_plan` recomputes the rate from
the forest and the bound from its certificate; neither is taken from a solver.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, wraps
from typing import ParamSpec, Protocol, Self, TypedDict, TypeVar

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.fabric import Fabric, usable_fabric
from topoplan.machine.half_duplex import split
from topoplan.machine.topology import Topology, TopologyLike, as_topology
from topoplan.plans.certificates.certificate import Certificate, Trivial
from topoplan.plans.loads import forest_rate, initiator_notes, rate_of_loads
from topoplan.plans.plan import COLLECTIVES, Plan, check_collective, root_rank
from topoplan.plans.shards import ImageShards, Shard, Stage
from topoplan.units import nearest_float


class Request(TypedDict, total=False):
    """The GPUs, root and channels of a schedule beside its machine and collective, as of `topoplan.plan`."""

    gpus: Sequence[int] | None
    root: int | None
    channels: str


@dataclass(frozen=True)
class Allocation:
    """A collective and the GPUs that take part: rank i is the i-th.

    ``machine`` has all its GPUs; ``root`` is the root rank of a broadcast or reduce.
    """

    machine: Topology
    collective: str
    gpus: tuple[int, ...]
    root: int | None
    channels: str = "auto"

    @staticmethod
    def of(
        machine: TopologyLike,
        collective: str = "allreduce",
        *,
        gpus: Sequence[int] | None = None,
        root: int | None = None,
        channels: str = "auto",
        among: Sequence[str] = COLLECTIVES,
    ) -> Allocation:
        """Return the allocation that a caller describes.

        ``gpus`` None takes all; ``root`` is a GPU number, and None takes the first. ``among`` are the collectives that
        the caller supports, by default those of trees. UsageError for an unknown or unsupported collective, a GPU or
        root that does not exist, or a root for a collective without one.
        """
        topology = as_topology(machine)
        known = check_collective(collective)
        if known not in among:
            raise UsageError(
                f"collective {known!r} is unknown to trees and rings; use topoplan.plan, or the schedule one-hop"
            )
        chosen = topology.select(gpus)
        return Allocation(topology, known, chosen, root_rank(chosen, known, root), channels)

    @cached_property
    def topology(self) -> Topology:
        """The machine without its other GPUs, as a plan states it."""
        chosen = self.machine.subset(self.gpus).settled()
        return split(chosen) if chosen.half_duplex else chosen

    def fabric(self, channels: str, demand: Sequence[Sequence[int]] | None = None) -> Fabric:
        """Return the first choice of links that joins the ranks as the collective needs (see `usable_fabric`)."""
        return usable_fabric(
            self.topology, channels=channels, collective=self.collective, root=self.root, demand=demand
        )

    def connected(self) -> Fabric:
        """Return the first choice of links that leads from every rank to every other, for any collective.

        If none does, that from or to the root of a broadcast or reduce.
        """
        try:
            return usable_fabric(self.topology, channels=self.channels)
        except InfeasibleError:
            if self.root is None:
                raise
            return self.fabric(self.channels)


class _Timed(Protocol):
    def timed(self, seconds: float) -> Self: ...


Asked = ParamSpec("Asked")
Made = TypeVar("Made", bound=_Timed)


def timed(make: Callable[Asked, Made]) -> Callable[Asked, Made]:
    """Return a function whose plans state the seconds that it took."""

    @wraps(make)
    def made(*args: Asked.args, **asked: Asked.kwargs) -> Made:
        started = time.perf_counter()
        return make(*args, **asked).timed(time.perf_counter() - started)

    return made


def build_plan(
    fabric: Fabric,
    collective: str,
    *,
    root: int | None,
    shards: Sequence[Shard],
    certificate: Certificate,
    schedule: str,
    method: str,
    notes: Sequence[str] = (),
    loads: Sequence[Fraction] | None = None,
) -> Plan:
    """Return a Plan from shards and a certificate, with rate and bound recomputed from them.

    ``loads`` are `link_loads` of the shards, if the caller has added up their routes.
    """
    rate = forest_rate(shards, fabric) if loads is None else rate_of_loads(loads, fabric)
    bound = math.inf
    if fabric.size > 1:
        bound = nearest_float(certificate.bound(fabric, collective, root))
    return Plan(
        collective=collective,
        ranks=fabric.ranks,
        root=root,
        topology=fabric.topology,
        channels=fabric.channels,
        schedule=schedule,
        method=method,
        shards=shards if isinstance(shards, ImageShards) else tuple(shards),
        rate=math.inf if rate is None else nearest_float(rate),
        bound=bound,
        certificate=certificate,
        notes=(*notes, *initiator_notes(shards, fabric)),
    )


def trivial_plan(fabric: Fabric, collective: str, *, root: int | None, method: str) -> Plan:
    """Return the plan of one rank: it already holds the result, and nothing moves."""
    if fabric.size != 1:
        raise InfeasibleError(f"{fabric.size} ranks need links between them")
    shard = Shard(Fraction(1), tuple(Stage(op, 0, ()) for op in stage_order(collective)))
    return build_plan(
        fabric,
        collective,
        root=root,
        shards=[shard],
        certificate=Trivial(),
        schedule="trivial",
        method=method,
    )


def stage_order(collective: str) -> tuple[str, ...]:
    """Return the stages of one shard of a plan with one tree or one pair of trees per shard."""
    return {
        "allreduce": ("reduce", "broadcast"),
        "broadcast": ("broadcast",),
        "reduce": ("reduce",),
        "allgather": ("broadcast",),
        "reduce_scatter": ("reduce",),
        "alltoall": ("broadcast",),
    }[collective]

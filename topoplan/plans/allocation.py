"""What is asked for: a collective among some GPUs of a machine, checked once, and the links that it may use.

Planner, bounds and schedules all begin here. Ranks are the chosen GPUs in ascending order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from topoplan.errors import UsageError
from topoplan.fabric.fabric import Fabric, usable_fabric
from topoplan.plans.plan import COLLECTIVES, check_collective, root_rank
from topoplan.topology import Topology, TopologyLike, as_topology


@dataclass(frozen=True)
class Allocation:
    """A collective and the GPUs that take part.

    Parameters
    ----------
    machine : Topology
        With all its GPUs.
    collective : str
    gpus : tuple of int
        Numbers of the chosen GPUs, ascending; rank i is the i-th.
    root : int or None
        Root rank of a broadcast or reduce.
    """

    machine: Topology
    collective: str
    gpus: tuple[int, ...]
    root: int | None

    @staticmethod
    def of(
        machine: TopologyLike,
        collective: str = "allreduce",
        *,
        gpus: Sequence[int] | None = None,
        root: int | None = None,
        among: Sequence[str] = COLLECTIVES,
    ) -> Allocation:
        """The allocation that a caller describes.

        Parameters
        ----------
        machine : Topology, or what `topoplan.load` takes
        collective : str
            In any of its spellings.
        gpus : sequence of int or None
            GPU numbers; None takes all.
        root : int or None
            GPU number of the root of a broadcast or reduce; None takes the first.
        among : sequence of str
            The collectives that the caller can do, those of trees by default.

        Raises
        ------
        UsageError
            Unknown collective or none of these, a GPU or root that is not there, a root that the collective does not
            have.

        Examples
        --------
        >>> import topoplan
        >>> asked = Allocation.of(topoplan.load("dgx-1v"), "broadcast", gpus=[4, 5, 7], root=5)
        >>> asked.root, asked.topology.gpus, asked.fabric().channels
        (1, ('gpu4', 'gpu5', 'gpu7'), ('nvlink',))
        """
        topology = as_topology(machine)
        known = check_collective(collective)
        if known not in among:
            raise UsageError(
                f"collective {known!r} is unknown to trees and rings; use topoplan.plan, or the schedule one-hop"
            )
        chosen = topology.select(gpus)
        return Allocation(topology, known, chosen, root_rank(chosen, known, root))

    @cached_property
    def topology(self) -> Topology:
        """The machine without its other GPUs, as a plan states it."""
        return self.machine.subset(self.gpus).settled()

    def fabric(self, channels: str = "auto") -> Fabric:
        """The first choice of links that joins the ranks in the ways the collective needs (see `usable_fabric`)."""
        return usable_fabric(self.topology, channels=channels, collective=self.collective, root=self.root)

    def connected(self, channels: str = "auto") -> Fabric:
        """The first choice of links that leads from every rank to every other, whatever the collective."""
        return usable_fabric(self.topology, channels=channels)

"""Which way NCCL sends from one GPU to another inside a server, and what that takes of the links.

NCCL chooses the way itself, by kind first (``ncclTopoSetPaths``, ``src/graph/paths.cc``): NVLink without a GPU in
between (NVL), NVLink through one GPU (NVB), then PCIe through one switch (PIX), several (PXB), a CPU (PHB) or two
(SYS). Within a kind the widest way counts; of equally wide ones through a GPU that whose last NVLink is widest, then
the one that the machine lists first. A graph file only says who follows whom, so the rate of a channel follows from
these ways. Deliberately absent: NVLink to a GPU that hangs directly on a CPU as part of the way to that CPU, which NCCL
takes where NVLink joins only some GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from topoplan.errors import InfeasibleError
from topoplan.fabric.fabric import Fabric
from topoplan.schedules.rings.routes import Links, Routes
from topoplan.topology import Link, Topology
from topoplan.units import exact

PATH_KINDS = ("NVL", "NVB", "PIX", "PXB", "PHB", "SYS")
"""Nearest first; the names that a graph file uses."""


@dataclass(frozen=True, slots=True)
class Hop:
    """The way from one GPU to another.

    Parameters
    ----------
    kind : str
        One of `PATH_KINDS`.
    part : mapping of Link to Fraction
        What part of the data crosses each link: more than one way only where NVLink is striped over several switches.
    """

    kind: str
    part: Mapping[Link, Fraction]


class NcclPaths:
    """The ways between the GPUs of one server.

    Parameters
    ----------
    machine : Topology
        Its GPUs are those of the communicator.

    Examples
    --------
    >>> import topoplan
    >>> paths = NcclPaths(topoplan.load("dgx-1v"))
    >>> [paths.hop("gpu0", name).kind for name in ("gpu1", "gpu5")]
    ['NVL', 'NVB']
    >>> NcclPaths(topoplan.load("pcie-x8")).hop("gpu0", "gpu7").kind
    'SYS'
    """

    def __init__(self, machine: Topology) -> None:
        self._machine = machine
        self._nvlink = Fabric(machine, ("nvlink",))
        self._pcie = Fabric(machine, ("pcie",))
        self._nvlink_routes = Routes(self._nvlink)
        self._pcie_routes = Routes(self._pcie)
        self._rank = {name: rank for rank, name in enumerate(machine.gpus)}
        self._known: dict[tuple[str, str], Hop] = {}

    def hop(self, tail: str, head: str) -> Hop:
        """The way from one GPU to another.

        Raises
        ------
        InfeasibleError
            Neither NVLink nor PCIe joins them.
        """
        if (tail, head) not in self._known:
            self._known[tail, head] = self._find(self._rank[tail], self._rank[head])
        return self._known[tail, head]

    def wire(self, tail: str, head: str) -> Fraction:
        """GB/s of a single wire on the way, where it is narrowest."""
        return min(exact(link.bandwidth) / link.count for link in self.hop(tail, head).part)

    def _find(self, tail: int, head: int) -> Hop:
        direct = self._striped(tail, head)
        if direct:
            return Hop("NVL", direct)
        through = self._through_gpu(tail, head)
        if through:
            return Hop("NVB", through)
        links = self._pcie_routes.shortest(tail, head, self._pcie.capacity)
        if links is None:
            names = self._machine.gpus
            raise InfeasibleError(
                f"neither NVLink nor PCIe leads from {names[tail]} to {names[head]}, so that NCCL would need a "
                "network; choose GPUs that are joined"
            )
        return Hop(self._pcie_kind(links), {self._pcie.links[number]: Fraction(1) for number in links})

    def _striped(self, tail: int, head: int) -> dict[Link, Fraction]:
        """Parts over the shortest ways without a GPU in between; empty where there is none."""
        stripes = self._nvlink_routes.stripes(tail, head, self._nvlink.capacity)
        return {self._nvlink.links[number]: part for number, part in stripes.items()}

    def _through_gpu(self, tail: int, head: int) -> dict[Link, Fraction]:
        """Two direct NVLinks with one GPU in between; empty where there are none."""
        index, ranks, capacity = self._nvlink.link_index, self._nvlink.ranks, self._nvlink.capacity
        best: tuple[tuple[Fraction, Fraction], Links] = ((Fraction(0), Fraction(0)), ())
        for number, link in enumerate(self._nvlink.links):
            if link.src != ranks[head] or link.dst not in self._rank:
                continue
            pair = (index.get((ranks[tail], link.dst)), index.get((link.dst, ranks[head])))
            if pair[0] is not None and pair[1] is not None:
                width = (min(capacity[pair[0]], capacity[pair[1]]), capacity[number])
                best = max(best, (width, (pair[0], pair[1])), key=lambda choice: choice[0])
        return {self._nvlink.links[number]: Fraction(1) for number in best[1]}

    def _pcie_kind(self, links: Links) -> str:
        passed = [self._machine.device(self._pcie.links[number].dst).kind for number in links[:-1]]
        if "cpu" in passed:
            return "PHB" if passed.count("cpu") == 1 else "SYS"
        return "PIX" if len(passed) < 2 else "PXB"

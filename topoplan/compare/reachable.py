"""What wires allow a collective, as bounds on measurements: the best that NCCL has, and what no schedule exceeds.

Switches of the machine do what they say they could (`topoplan.in_network.fully_used`) unless the caller settled that:
NCCL's NVLS lets NVSwitches add and copy where they can, so a bound without them would not hold.

A size is bound by latency where the start-ups that no schedule avoids (`topoplan.simulation.time_bound`) take longer
than its bytes at the bound, else by bandwidth.

Bus bandwidth may exceed what the NICs of a server carry, since its factor counts what every rank sends in a ring:

    collective        the factor counts    must leave a server, n servers of g ranks, N = n g
    allreduce         2 (N - 1) / N        2 (n - 1) / n
    allgather         (N - 1) / N          (n - 1) / n, and as much enters
    reduce_scatter    (N - 1) / N          (n - 1) / n
    alltoall          (N - 1) / N a rank   (N - g) / N a rank
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from topoplan.bounds.upper_bound import bound, in_network_bound
from topoplan.compare.comparison import nccl_rivals
from topoplan.errors import InfeasibleError, UsageError
from topoplan.fabric.fabric import Fabric
from topoplan.fabric.servers import Servers
from topoplan.packing.planner import plan
from topoplan.plans.certificates.certificate import explain_certificate
from topoplan.plans.plan import EVERY, Plan, root_rank
from topoplan.schedules.nccl.tuning import COLLECTIVES, Expectation, expectations, setting_of
from topoplan.schedules.registry import MOST_RANKS
from topoplan.simulation.time_bound import TimeBound, time_bound
from topoplan.topology import Topology
from topoplan.units import bus_factor, exact, nearest_float

LATENCY, BANDWIDTH = "latency", "bandwidth"
"""What can bind a size."""


@dataclass(frozen=True, slots=True)
class Nics:
    """What leaves a server.

    Parameters
    ----------
    servers, ranks : int
        Servers of the allocation, and ranks on each; of unequal ones on that with the narrowest way out.
    count : int
        NICs of that server, or cables where it has none.
    server, one : float
        GB/s in one direction out of that server, and of its widest NIC.
    factor, leaving : float
        As the table above: what a byte of the buffer counts in bus bandwidth, and what of it must leave a server.
    """

    servers: int
    ranks: int
    count: int
    server: float
    one: float
    factor: float
    leaving: float

    @property
    def most(self) -> float:
        """GB/s of bus bandwidth at which these NICs are full."""
        return self.server * self.factor / self.leaving


@dataclass(frozen=True, slots=True)
class Reachable:
    """What a collective can reach on an allocation. Rates are GB/s of algorithm bandwidth.

    Parameters
    ----------
    collective : str
    gpus : tuple of int
    channels : tuple of str
        Wires that the bound speaks of.
    nccl : tuple of (str, float)
        Rates of what NCCL has, best first; of equal ones in the order of `topoplan.compare.comparison.NCCL_COLUMNS`.
    best : float
        What no schedule exceeds.
    links : str
        Which wires bind, in the words of the certificate.
    factor : float
        Bus bandwidth over algorithm bandwidth.
    time : TimeBound
        The least time of every schedule, by size.
    nics : Nics or None
        None within one server.
    model : tuple of Expectation
        What NCCL itself expects of each algorithm and protocol; empty where it has no model.
    in_network : float or None
        What no schedule exceeds if switches copied and added wherever they could; None where that is no more.
    """

    collective: str
    gpus: tuple[int, ...]
    channels: tuple[str, ...]
    nccl: tuple[tuple[str, float], ...]
    best: float
    links: str
    factor: float
    time: TimeBound
    nics: Nics | None
    model: tuple[Expectation, ...] = ()
    in_network: float | None = None

    @property
    def nccl_best(self) -> float | None:
        """The best of NCCL; None where it has nothing."""
        return self.nccl[0][1] if self.nccl else None

    def expected(self, nbytes: int) -> Expectation | None:
        """What NCCL would choose, by its own model; None where it has none."""
        return min(self.model, key=lambda one: one.seconds(nbytes), default=None)

    def bound_by(self, nbytes: int) -> str:
        """`LATENCY` or `BANDWIDTH`: start-ups and bytes add up to the least time."""
        moving = nbytes / (self.best * 1e9)
        return BANDWIDTH if moving > self.time.seconds(nbytes) - moving else LATENCY


def reachable(
    topology: Topology,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
) -> Reachable:
    """What NCCL and what any schedule can reach.

    Parameters
    ----------
    topology : Topology
        Its switches do what it says they do: see `topoplan.in_network.fully_used`.
    collective, gpus, root
        As for `topoplan.plan`.

    Raises
    ------
    UsageError, InfeasibleError
        As for `topoplan.plan`.

    Examples
    --------
    >>> import topoplan
    >>> found = reachable(topoplan.load("dgx-a100"))
    >>> [(name, round(rate, 1)) for name, rate in found.nccl], round(found.best, 1)
    ([('nvlink ring', 171.4), ('nccl tree', 171.4)], 171.4)
    >>> found.bound_by(64 << 10), found.bound_by(1 << 30)
    ('latency', 'bandwidth')
    >>> small = found.expected(64 << 10)
    >>> small.algorithm, small.protocol, round(small.seconds(64 << 10) * 1e6)
    ('ring', 'll', 16)
    """
    chosen = topology.select(gpus)
    # beyond so many ranks the bound without a plan is as good, and does not take minutes
    small = len(chosen) <= MOST_RANKS
    make = plan if small else bound
    proved = make(topology, collective, gpus=chosen, root=root)
    best = proved.bound if isinstance(proved, Plan) else proved.rate
    rivals: dict[str, Plan] = {}
    if len(chosen) > 1:
        rivals, _ = nccl_rivals(topology, proved.collective, chosen, root, proved)
    ring, relay = rivals.get("ring"), rivals.get("relay-ring")
    if ring and relay and relay.rate <= ring.rate:
        del rivals["relay-ring"]
    fabric = Fabric(proved.topology, proved.channels)
    rank, limit = root_rank(chosen, proved.collective, root), None if math.isinf(best) else exact(best)
    return Reachable(
        proved.collective,
        chosen,
        proved.channels,
        tuple(sorted(((one.schedule, one.rate) for one in rivals.values()), key=lambda one: -one[1])),
        best,
        explain_certificate(proved) if len(chosen) > 1 else "a single rank sends nothing",
        bus_factor(proved.collective, len(chosen)),
        time_bound(fabric, proved.collective, rank, (), limit),
        _nics(fabric, proved.collective),
        _model(proved.topology, proved.collective),
        in_network_bound(proved),
    )


def _model(allocation: Topology, collective: str) -> tuple[Expectation, ...]:
    """What NCCL expects; nothing where it does not choose, or does not know the machine."""
    if collective not in COLLECTIVES:
        return ()
    try:
        return expectations(setting_of(allocation), collective)
    except (UsageError, InfeasibleError):
        return ()


def _nics(fabric: Fabric, collective: str) -> Nics | None:
    """What leaves the server with the narrowest way out; None on one server."""
    servers = Servers(fabric)
    count = len(servers.names)
    if count < 2 or collective not in EVERY:
        return None
    narrowest: tuple[Fraction, int, list[int]] | None = None
    for number, name in enumerate(servers.names):
        out = [
            link
            for link, (src, dst) in enumerate(servers.ends)
            if src == name and dst != name and servers.crossing[link]
        ]
        whole = sum((fabric.capacity[link] for link in out), Fraction(0))
        if out and (narrowest is None or whole < narrowest[0]):
            narrowest = (whole, number, out)
    if narrowest is None:
        return None
    whole, number, out = narrowest
    ranks = int(np.count_nonzero(servers.of_rank == number))
    size = fabric.size
    adds = any(
        fabric.topology.device(name).kind == "switch" and name in fabric.adding
        for name in fabric.nodes[size:]
    )
    leaving = {
        "allreduce": 1.0 if adds else 2 * (count - 1) / count,
        "allgather": (size - ranks) / size,
        "reduce_scatter": (size - ranks) / size,
        # of every rank: all of them share the way out
        "alltoall": ranks * (size - ranks) / size,
    }.get(collective, 1.0)
    return Nics(
        count,
        ranks,
        len({fabric.links[link].src for link in out}),
        nearest_float(whole),
        max(nearest_float(fabric.capacity[link]) for link in out),
        bus_factor(collective, size),
        leaving,
    )

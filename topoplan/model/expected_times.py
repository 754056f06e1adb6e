"""Expect the time of NCCL and of other kernels for a collective, fitted to published measurements.

A call of an implementation takes, for D bytes of the caller's buffer,

    T = start + x + 2 sqrt(fill x)        x = D / (share R)

The square root is the cost of chunks at their best number: k chunks cost fill each, and the last one x / k. R is the
rate at which the wires alone would bound D, and `FittedCosts` hold start, share and fill, one row of
``expected_times.csv`` for each implementation and generation of GPUs:

    implementation             runs                                     R
    nccl                       NCCL's or RCCL's own choice              of the best algorithm, as NCCL counts its rate
    nccl-ring, nccl-tree       one algorithm of NCCL                    of that algorithm
    nvls                       NCCL's reduction in the switch           port n / (n + 1)
    nccl-symm                  NCCL's kernels on registered windows     as two-shot
    one-shot                   every GPU reads all buffers              port / (n - 1)
    two-shot, two-shot-torch   reduce-scatter, then allgather           port n / (2 (n - 1)); of one half n / (n - 1)
    multimem                   the switch adds and copies               port n / (n + 1)
    mscclpp                    the fastest kernel of MSCCL++'s tests    as two-shot
    msccl-trees                packed trees, run by MSCCL               of the optimal plan

``port`` is the rate of all NVLinks of a GPU in one direction. The start is in microseconds, except for NCCL's: theirs
is a multiple of the latency that NCCL expects (`topoplan.schedules.nccl_tuning`), which grows with ranks and servers.
``python -m tests.bench published --rows F.csv --fit`` makes the table from half of the rows of a file, and judges it on
the other half. Not covered: PCIe, pairs with a bridge, DGX-1 and DGX-2, eager calls from Python, fused kernels, more
than two NVLink domains of 72, and kinds with fewer than three published rows.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.fabric import Fabric, usable_fabric
from topoplan.machine.fabric_structure import FabricServers
from topoplan.machine.hardware import (
    gpu_identity,
    is_amd,
    is_apple,
    known_capability,
    nvlink_counts,
    with_capable,
)
from topoplan.machine.nic_wiring import nvlink_neighbours
from topoplan.machine.topology import Topology
from topoplan.machine.variants import with_all_capabilities
from topoplan.model.closed_form import plan_seconds
from topoplan.plans.plan import Plan, Plans
from topoplan.schedules.nccl_tuning import (
    COLLECTIVES,
    NVLS,
    RING,
    TREE,
    NcclExpectation,
    expectations,
    setting_of,
)
from topoplan.units import bus_factor

TABLE = Path(__file__).with_name("expected_times.csv")

OF_NCCL = {"nccl": None, "nccl-ring": RING, "nccl-tree": TREE}
"""Implementations whose start and rate are multiples of what NCCL expects, with the algorithm."""

KERNELS = ("nccl-symm", "one-shot", "two-shot", "two-shot-torch", "multimem", "mscclpp")
"""Implementations beside NCCL's own choice that a program can call."""

IMPLEMENTATIONS = (*OF_NCCL, "nvls", *KERNELS, "msccl-trees")

MOST_GPUS = 256
"""The most GPUs for which NCCL's time is asked beside a plan's: its model takes seconds for more."""

HALVES = ("allgather", "reduce_scatter")
_IN_SWITCH = ("nvls", "multimem")
_GENERATIONS = {80: "Ampere", 90: "Hopper", 100: "Blackwell", 103: "Blackwell"}
"""Generation by compute capability, of GPUs that NVSwitches join."""

_AMD = {"gfx942": "CDNA 3", "gfx950": "CDNA 4"}


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """The costs of an implementation on a generation of GPUs.

    generation: Ampere, Hopper, Blackwell, CDNA 3 or CDNA 4.
    servers: most servers; 1, or more for costs of several.
    halves: whether the costs are of allgather and reduce_scatter, else of allreduce.
    start: microseconds, or a multiple of the latency that NCCL expects (`OF_NCCL`).
    share: of the rate R.
    fill: microseconds of a chunk.
    rows, gpus, least, most: of the measurements: how many, numbers of GPUs, and smallest and largest bytes.
    source, date: of the measurements and of the fit.
    """

    implementation: str
    generation: str
    servers: int
    halves: bool
    start: float
    share: float
    fill: float
    rows: int
    gpus: str
    least: int
    most: int
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class ExpectedTimes:
    """Expected times of an implementation on a machine.

    start: seconds.
    rate: GB/s of the caller's buffer, R times its share.
    ranks: GPUs of the machine.
    """

    costs: FittedCosts
    start: float
    rate: float
    ranks: int

    @property
    def implementation(self) -> str:
        return self.costs.implementation

    def seconds(self, nbytes: int) -> float:
        """Return the expected seconds for a buffer of ``nbytes``."""
        return fitted_seconds(nbytes / (self.rate * 1e9), self.start, self.costs.fill * 1e-6)

    def covers(self, nbytes: int) -> bool:
        """Return whether measurements of such a size and number of GPUs, by a factor of four, were fitted."""
        most = max(map(int, self.costs.gpus.split()))
        return self.costs.least / 4 <= nbytes <= self.costs.most * 4 and self.ranks <= 4 * most


def fitted_seconds(moving: float, start: float, fill: float) -> float:
    """Return the time of a call from the time that its bytes move, all in seconds."""
    return start + moving + 2 * math.sqrt(fill * moving)


@lru_cache(maxsize=1)
def fitted_costs() -> tuple[FittedCosts, ...]:
    """Return the table."""
    with TABLE.open(encoding="utf-8", newline="") as lines:
        return tuple(_costs_of_row(row) for row in csv.DictReader(lines))


def _costs_of_row(row: Mapping[str, str]) -> FittedCosts:
    """Return the costs in a row of the table's columns."""
    whole, decimal = ("servers", "rows", "least", "most"), ("start", "share", "fill")
    values: dict[str, Any] = dict(row)
    values |= {name: int(row[name]) for name in whole} | {name: float(row[name]) for name in decimal}
    return FittedCosts(**values | {"halves": row["halves"] == "True"})


def expected_times(topology: Topology, collective: str, planned: float = 0.0) -> tuple[ExpectedTimes, ...]:
    """Return the expected times of all implementations that are known on all GPUs of a machine.

    planned: GB/s of the optimal plan, for MSCCL; 0 leaves it out.

    >>> import topoplan
    >>> times = {one.implementation: one for one in expected_times(topoplan.load("dgx-h100"), "allreduce")}
    >>> sorted(times)
    ['multimem', 'nccl', 'nvls', 'one-shot', 'two-shot', 'two-shot-torch']
    >>> round(times["nccl"].seconds(1 << 30) * 1e6, -2), times["nccl"].covers(1 << 30)
    (4100.0, True)
    """
    place = Place.of(topology)
    if place is None:
        return ()
    model = default_model(topology, collective)
    found = []
    for one in fitted_costs():
        if place.suits(one, collective):
            start, rate = place.wires(one.implementation, collective, model, planned)
            if rate > 0:
                found.append(ExpectedTimes(one, start * one.start, rate * one.share, place.ranks))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Place:
    """A machine, as far as the costs of implementations depend on it.

    port: GB/s in one direction of all links of a GPU to the other GPUs of its server.
    switched: whether NVSwitches join them.
    """

    generation: str
    ranks: int
    servers: int
    port: float
    switched: bool

    @classmethod
    def of(cls, topology: Topology) -> Place | None:
        """Return the place of all GPUs of a machine; None if not all have direct NVLink or XGMI of one rate."""
        generation = _generation(topology)
        if generation is None or len(topology.gpus) < 2:
            return None
        try:
            fabric = usable_fabric(topology)
        except (UsageError, InfeasibleError):
            return None
        servers = len(FabricServers(fabric).names)
        port = _port(fabric)
        switched = any(device.kind == "nvswitch" for device in topology.devices)
        return cls(generation, fabric.size, servers, port, switched) if port else None

    def suits(self, costs: FittedCosts, collective: str) -> bool:
        """Return whether the costs are of such a machine and collective."""
        return (
            collective in ("allreduce", *HALVES)
            and costs.generation == self.generation
            and costs.halves == (collective in HALVES)
            and (self.servers > 1) == (costs.servers > 1)
            and self.servers <= costs.servers
        )

    def wires(
        self, implementation: str, collective: str, model: Sequence[NcclExpectation], planned: float = 0.0
    ) -> tuple[float, float]:
        """Return the unit of the start in seconds, and R in GB/s; 0 for what the machine does not have."""
        if implementation in OF_NCCL and not self.generation.startswith("CDNA"):
            algorithm = OF_NCCL[implementation]
            known = [one for one in model if algorithm in (None, one.algorithm)]
            latency = min((one.latency for one in known), default=0.0)
            return latency, max((one.bandwidth for one in known), default=0.0)
        n = self.ranks
        if implementation == "msccl-trees":
            return 1e-6, planned
        if implementation in _IN_SWITCH:
            # NCCL does not use the switch between two GPUs
            return 1e-6, self.port * n / (n + 1) if n > 2 and self.switched else 0.0
        if implementation == "one-shot":
            return 1e-6, self.port / (n - 1)
        return 1e-6, self.port / bus_factor(collective, n)


def _generation(topology: Topology) -> str | None:
    """Return the generation of all GPUs; None if they differ or are unknown."""
    gpus = [device for device in topology.devices if device.kind == "gpu"]
    if is_amd(gpus):
        known = {_AMD.get(gpu_identity(gpu, amd=True).gcn) for gpu in gpus}
    else:
        counts = nvlink_counts(topology)
        known = {_GENERATIONS.get(known_capability(gpu, counts.get(gpu.name, 0)) or 0) for gpu in gpus}
    return known.pop() if len(known) == 1 else None


def _port(fabric: Fabric) -> float:
    """Return the rate of the links of a GPU; 0 if GPUs of a server reach others through a third, or at other rates."""
    servers = FabricServers(fabric)
    inside = [
        link
        for number, link in enumerate(fabric.links)
        if link.channel == "nvlink" and not servers.crossing[number]
    ]
    rates = dict.fromkeys(fabric.ranks, 0.0)
    for link in inside:
        if link.src in rates:
            rates[link.src] += link.bandwidth
    beside = nvlink_neighbours(inside, fabric.ranks)
    for members in servers.members:
        names = {fabric.ranks[rank] for rank in members}
        if any(names - beside[name] - {name} for name in names):
            return 0.0
    return rates[fabric.ranks[0]] if len(set(rates.values())) == 1 else 0.0


def nccl_model(allocation: Topology, collective: str) -> tuple[NcclExpectation, ...]:
    """Return NCCL's own expectations; () if it does not choose, or does not know or run on the machine."""
    if collective not in COLLECTIVES or is_apple(map(allocation.device, allocation.gpus)):
        return ()
    try:
        return expectations(setting_of(allocation), collective)
    except (UsageError, InfeasibleError):
        return ()


def default_model(topology: Topology, collective: str) -> tuple[NcclExpectation, ...]:
    """Return NCCL's own expectations as it runs by default: its switches do all that they can."""
    return nccl_model(with_all_capabilities(with_capable(topology)), collective)


def nccl_clocks(
    topology: Topology, collective: str, model: Sequence[NcclExpectation]
) -> list[Callable[[int], float]]:
    """Return seconds by bytes of NCCL's expectations; where NVLS was measured, with its times and the start of others.

    topology: as for `expected_times`. Of machines without measurements they are NCCL's own.
    """
    known = {one.implementation: one for one in expected_times(topology, collective)}
    if NVLS not in known or "nccl" not in known:
        return [one.seconds for one in model]
    later = known["nccl"].start - min(one.latency for one in model)

    def seconds(one: NcclExpectation) -> Callable[[int], float]:
        if one.algorithm == NVLS:
            return known[NVLS].seconds
        return lambda nbytes: one.seconds(nbytes) + later

    return [seconds(one) for one in model]


@dataclass(frozen=True, slots=True)
class NcclTime:
    """Seconds of NCCL for a buffer, and what it runs: algorithm and protocol, or the name of a schedule.

    factor: bus bandwidth over algorithm bandwidth.
    measured: whether the time is fitted to measurements, not a model's alone.
    """

    nbytes: int
    seconds: float
    runs: str
    factor: float
    measured: bool

    @property
    def algbw(self) -> float:
        """GB/s of algorithm bandwidth."""
        return self.nbytes / self.seconds / 1e9

    @property
    def busbw(self) -> float:
        """GB/s of bus bandwidth."""
        return self.algbw * self.factor


class _NcclTimes:
    """Times of NCCL for the request of a plan."""

    def __init__(self, plan: Plans, rivals: Mapping[str, Plan]) -> None:
        rate = max(one.rate for one in plan.plans)
        self.known = expected_times(plan.topology, plan.collective, rate)
        self._fitted = next((one for one in self.known if one.implementation == "nccl"), None)
        self._factor = bus_factor(plan.collective, len(plan.ranks))
        self._clocks: list[tuple[str, Callable[[int], float]]] = [
            (f"{one.algorithm} {one.protocol}", one.seconds)
            for one in default_model(plan.topology, plan.collective)
        ]
        if not self._clocks:
            self._clocks = [(one.schedule, plan_seconds(one)) for one in rivals.values()]
        if not self._clocks and self._fitted is not None:
            self._clocks = [("RCCL", self._fitted.seconds)]

    def at(self, nbytes: int) -> NcclTime | None:
        """Return the time for a buffer; None if it is unknown."""
        if not self._clocks:
            return None
        seconds, runs = min((time(nbytes), name) for name, time in self._clocks)
        if self._fitted is not None:
            seconds = self._fitted.seconds(nbytes)
        return NcclTime(nbytes, seconds, runs, self._factor, self._fitted is not None)


def nccl_times(plan: Plans, rivals: Mapping[str, Plan], sizes: Sequence[int]) -> tuple[NcclTime, ...]:
    """Return the times of NCCL for the request of a plan: what its own model chooses, with the fitted time.

    The time of a machine without measurements is that of NCCL's model too; its switches use all their capabilities.
    rivals: NCCL's plans, of which the fastest counts if NCCL's model does not know the machine or the collective.

    >>> import topoplan
    >>> for one in nccl_times(topoplan.plan("dgx-h100"), {}, [1 << 10, 1 << 30]):
    ...     print(one.runs, f"{one.seconds * 1e6:.0f}", one.measured)
    ring ll 18 True
    nvls simple 4123 True
    """
    times = _NcclTimes(plan, rivals)
    found = (times.at(nbytes) for nbytes in sizes)
    return tuple(one for one in found if one is not None)


@dataclass(frozen=True, slots=True)
class Quickest:
    """The implementation that is expected to be quickest for a buffer: ``ours``, one of NCCL's, or one of `KERNELS`.

    ours: seconds of our plan.
    nccl: NCCL's own choice; None if its time is unknown, or for more than `MOST_GPUS`.
    """

    nbytes: int
    implementation: str
    seconds: float
    ours: float
    nccl: NcclTime | None


class ExpectedWinners:
    """Which implementation is expected to be quickest, by size, for the request of a plan.

    Our engines were not measured on such machines. Ours is expected to be no quicker than the quickest measured kernel.

    >>> import topoplan
    >>> winners = ExpectedWinners(topoplan.plan("dgx-h100"))
    >>> for size in (64 << 10, 1 << 20, 1 << 30):
    ...     one = winners.quickest(size, 1.0)
    ...     print(one.implementation, f"{one.seconds * 1e6:.0f}")
    multimem 11
    multimem 16
    nccl 4123
    """

    def __init__(self, plan: Plans, rivals: Mapping[str, Plan] | None = None) -> None:
        self._nccl = _NcclTimes(plan, rivals or {}) if len(plan.ranks) <= MOST_GPUS else None
        known = () if self._nccl is None else self._nccl.known
        self._kernels = [one for one in known if one.implementation in KERNELS]
        self._like_ours = [*self._kernels, *(one for one in known if one.implementation == "msccl-trees")]

    def quickest(self, nbytes: int, ours: float) -> Quickest:
        """Return the implementation with the least expected time; NCCL's, then kernels, before ours if equal.

        ours: seconds of our plan, by the model.
        """
        covered = [(one.seconds(nbytes), one.implementation) for one in self._kernels if one.covers(nbytes)]
        floor = min((one.seconds(nbytes) for one in self._like_ours if one.covers(nbytes)), default=0.0)
        ours = max(ours, floor)
        nccl = None if self._nccl is None else self._nccl.at(nbytes)
        listed = [*([(nccl.seconds, "nccl")] if nccl else []), *covered, (ours, "ours")]
        seconds, name = min(listed, key=lambda one: one[0])
        return Quickest(nbytes, name, seconds, ours, nccl)

    def ranges(self, ours: Callable[[int], float], sizes: Sequence[int]) -> tuple[Quickest, ...]:
        """Return the quickest at each of some sizes, ascending, at which it is another than before."""
        found: list[Quickest] = []
        for nbytes in sizes:
            one = self.quickest(nbytes, ours(nbytes))
            if not found or one.implementation != found[-1].implementation:
                found.append(one)
        return tuple(found)

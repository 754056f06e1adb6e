"""What faults cost: rates of the machine as it is, without any of them, and with one alone, by the planner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from topoplan.bounds.upper_bound import bound
from topoplan.errors import InfeasibleError
from topoplan.health.diagnosis import Diagnosis
from topoplan.health.faults import Fault, mended
from topoplan.hosts.staging import staged, unstaged
from topoplan.packing.planner import plan
from topoplan.topology import Topology

MOST_PLANNED = 72
"""GPUs up to which rates are those of plans; of larger machines they are what no plan can exceed."""

TIME_LIMIT = 20.0
"""Seconds after which a plan of a machine with faults is taken as it is."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Rates of a collective over all GPUs, in GB/s of algorithm bandwidth; 0 where no links join them.

    Parameters
    ----------
    now, healthy : float
        Of the machine as it is, and with all its faults mended.
    alone : float
        Of the machine with this fault and no other.
    """

    now: float
    healthy: float
    alone: float


def costs_of(
    found: Diagnosis, collective: str = "allreduce", *, progress: Callable[[str], None] | None = None
) -> tuple[Cost, ...]:
    """What each fault costs a collective over all GPUs; nothing where there are fewer than two.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.health.diagnosis import diagnose
    >>> broken = topoplan.without_links("dgx-1v", ["gpu0-gpu3", "gpu5-gpu6"])
    >>> [(round(c.now, 1), round(c.healthy, 1), round(c.alone, 1)) for c in costs_of(diagnose(broken))]
    [(71.4, 85.7, 78.6), (71.4, 85.7, 78.6)]
    """
    topology = found.topology
    if len(topology.gpus) < 2 or not found.faults:
        return ()
    rates: dict[tuple[object, ...], float] = {}

    def rate(machine: Topology) -> float:
        key = (machine.devices, frozenset(machine.links))
        if key not in rates:
            if progress is not None:
                progress(f"{len(rates)} machines planned")
            rates[key] = _rate(machine, collective)
        return rates[key]

    now, healthy = rate(topology), rate(_left_with(found, []))
    return tuple(Cost(now, healthy, rate(_left_with(found, [fault]))) for fault in found.faults)


def _left_with(found: Diagnosis, left: Sequence[Fault]) -> Topology:
    """The machine with all faults mended but some; with peer access PCIe switches turn bytes around again."""
    whole = unstaged(found.topology)
    stay = {link for fault in left for link in fault.links}
    others = [fault for fault in found.faults if fault not in left]
    # Two GPUs that have lost all NVLinks may share a link.
    apart = [
        replace(fault, links=tuple(link for link in fault.links if link not in stay)) for fault in others
    ]
    machine = mended(whole, apart)
    barred = any(fault.kind in ("MIG", "no peer access") for fault in left)
    return staged(machine) if barred and whole != found.topology else machine


def _rate(machine: Topology, collective: str) -> float:
    try:
        if len(machine.gpus) > MOST_PLANNED:
            return float(bound(machine, collective).rate)
        return float(plan(machine, collective, time_limit=TIME_LIMIT).rate)
    except InfeasibleError:
        return 0.0

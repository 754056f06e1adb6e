"""The wires of a plan: which crossings its streams make, and how fast each of them is on the real machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from collectives.backends.loopback.crossings import Crossings, crossings
from collectives.backends.loopback.pacing import Paces
from collectives.lowering.dependencies import PlanKey
from collectives.lowering.edge_streams import Stream, streams
from collectives.lowering.transfer_table import TransferTable
from topoplan.fabric.fabric import Fabric
from topoplan.simulation.latency import channel_starts, device_kinds, link_latency


@dataclass(frozen=True, slots=True)
class Wires:
    """Streams and links of one table.

    Parameters
    ----------
    parts : tuple of Stream
    routes : Crossings
    bandwidth : tuple of float
        Of every link of the fabric, in GB/s.
    latency, start : tuple of float
        As in `Paces`.
    """

    parts: tuple[Stream, ...]
    routes: Crossings
    bandwidth: tuple[float, ...]
    latency: tuple[float, ...]
    start: tuple[float, ...]

    def paces(self, itemsize: int, scale: float, window: Sequence[int | None]) -> Paces:
        """With every bandwidth times a scale; ``window`` as in `Paces`."""
        link = [itemsize / (bandwidth * scale * 1e9) for bandwidth in self.bandwidth]
        return Paces(link, self.latency, self.start, window)


@lru_cache(maxsize=16)
def wires_of(key: PlanKey, table: TransferTable) -> Wires:
    """The wires of a plan for a table of it; kept for the last 16 tables.

    Latency and start are those of `topoplan.simulate`: the links' start-ups, and for PCIe beside NVLink the time in
    which peer access is switched.

    Examples
    --------
    >>> import topoplan
    >>> from collectives import lower
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[4, 7])
    >>> wires = wires_of(PlanKey(plan.digest, plan), lower(plan, 160, chunk_elements=64))
    >>> wires.bandwidth, wires.routes.paths, [round(seconds * 1e6, 1) for seconds in wires.latency]
    ((50.0, 50.0), ((0,), (1,)), [8.8, 8.8])
    """
    plan = key.plan
    fabric = Fabric(plan.topology, plan.channels)
    parts = streams(table)
    routes = crossings(plan, fabric, parts)
    kinds = device_kinds(plan.topology)
    alpha = [link_latency(link, kinds) for link in fabric.links]
    starts = channel_starts(plan.topology, plan.channels)
    return Wires(
        parts=parts,
        routes=routes,
        bandwidth=tuple(link.bandwidth for link in fabric.links),
        latency=tuple(sum(alpha[routes.link[at]] for at in path) for path in routes.paths),
        start=tuple(float(starts.get(table.queues[part.queue][2], 0)) for part in parts),
    )

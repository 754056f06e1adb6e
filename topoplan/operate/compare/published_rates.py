"""Find what healthy machines measured, so that a run can be judged by its like: rates that others published.

`published.csv` holds busbw of nccl-tests and RCCL-tests, out of place where the source says so, with the source and the
day on which it was read. NCCL chose the algorithm, but for NVLS on H100. Only sizes that bandwidth binds are kept.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from topoplan.machine.topology import Topology
from topoplan.operate.compare.judged_log import JudgedRow
from topoplan.reading.load import library, load

OF_NORMAL = 0.85
"""Least part of the lowest published rate that a healthy run reaches: runs of one machine vary by a tenth."""

NEAR = 2
"""Ratio of sizes that still compare."""

SAME_NICS = 0.05
"""Relative difference of the bandwidth out of a server that counts as equal: PCIe leaves 48 of 50 GB/s to a NIC."""


@dataclass(frozen=True, slots=True)
class PublishedRate:
    """One published figure.

    machine: its name in the library, or words of the model of its GPUs if it is not there.
    gpus, servers: in all; ``nics`` of ``nic_gbps`` Gb/s on each server, 0 within one.
    nbytes: of the buffer; ``busbw`` in GB/s.
    read: the day on which the source was read.
    certain: whether the source states the machine, its NICs and the size; else some of it is inferred.
    """

    machine: str
    gpus: int
    servers: int
    nics: int
    nic_gbps: float
    collective: str
    nbytes: int
    busbw: float
    source: str
    read: str
    certain: bool


@lru_cache(maxsize=1)
def published_rates() -> tuple[PublishedRate, ...]:
    """Return the table.

    >>> max(rate.busbw for rate in published_rates() if rate.machine == "mi300x")
    312.91
    """
    text = (files("topoplan.operate.compare") / "published.csv").read_text(encoding="utf-8")
    return tuple(
        PublishedRate(
            row["machine"],
            int(row["gpus"]),
            int(row["servers"]),
            int(row["nics"] or 0),
            float(row["nic_gbps"] or 0),
            row["collective"],
            int(row["bytes"]),
            float(row["busbw"]),
            row["source"],
            row["read"],
            row["certain"] == "yes",
        )
        for row in csv.DictReader(text.splitlines())
    )


@dataclass(frozen=True, slots=True)
class NormalRate:
    """Published rates of machines like that of a run, at its size.

    servers: of those machines; the run has another number if not ``same``.
    """

    rates: tuple[PublishedRate, ...]
    same: bool

    @property
    def low(self) -> float:
        """The lowest busbw in GB/s."""
        return min(rate.busbw for rate in self.rates)

    @property
    def high(self) -> float:
        return max(rate.busbw for rate in self.rates)

    @property
    def text(self) -> str:
        """The range in GB/s of busbw, such as ``44 to 50 GB/s``."""
        ends = dict.fromkeys((f"{self.low:.4g}", f"{self.high:.4g}"))
        return f"{' to '.join(ends)} GB/s"

    @property
    def sources(self) -> str:
        servers, gpus = self.rates[0].servers, self.rates[0].gpus
        where = f"{gpus} GPUs" + (f" on {servers} servers" if servers > 1 else "")
        names = ", ".join(dict.fromkeys(rate.source for rate in self.rates))
        inferred = "" if all(rate.certain for rate in self.rates) else "; the machine is partly inferred"
        return f"{where}, published by {names} (read {max(rate.read for rate in self.rates)}{inferred})"

    def healthy(self, busbw: float) -> bool:
        """Return whether a busbw in GB/s reaches `OF_NORMAL` of the lowest."""
        return busbw >= OF_NORMAL * self.low

    def to_object(self) -> dict[str, object]:
        return {
            "low": self.low,
            "high": self.high,
            "same_servers": self.same,
            "servers": self.rates[0].servers,
            "sources": list(dict.fromkeys(rate.source for rate in self.rates)),
        }


def normal_rate(row: JudgedRow, machine: Topology, gpus: Sequence[int], model: str = "") -> NormalRate | None:
    """Return the published rates of a row's collective, size, GPUs, servers and NICs; None without any.

    Servers that run unequal numbers of ranks have none.
    model: the GPUs' model in the log if the machine has others.
    """
    like = [rate for rate in published_rates() if rate.collective == row.collective]
    nics = row.reachable.nics if row.reachable else None
    if model:
        like = [rate for rate in like if rate.machine in model and rate.servers == 1 and not nics]
        like = [rate for rate in like if rate.gpus == len(gpus)]
    elif nics is None:
        like = [
            rate for rate in like if rate.servers == 1 and rate.gpus == len(gpus) and _alike(rate, machine)
        ]
    else:
        like = [
            rate
            for rate in like
            if rate.servers > 1
            and rate.gpus == nics.ranks * rate.servers
            and len(gpus) == nics.ranks * nics.servers
            and abs(rate.nics * rate.nic_gbps / 8 - nics.server) <= SAME_NICS * nics.server
            and _alike(rate, machine)
        ]
        closest = min(
            (rate.servers for rate in like),
            key=lambda servers: max(servers, nics.servers) / min(servers, nics.servers),
            default=0,
        )
        like = [rate for rate in like if rate.servers == closest]
    near = _near(like, row.row.size)
    return NormalRate(near, nics is None or near[0].servers == nics.servers) if near else None


def _near(rates: Sequence[PublishedRate], size: int) -> tuple[PublishedRate, ...]:
    """Return of each source the rate at the size nearest to one, if near.

    A size above all published ones is taken as the largest of them, since the rate is flat there.
    """
    near = []
    at = min(size, max((rate.nbytes for rate in rates), default=0))
    for source in dict.fromkeys((rate.machine, rate.source) for rate in rates):
        own = (rate for rate in rates if (rate.machine, rate.source) == source)
        ratios = [(max(at / rate.nbytes, rate.nbytes / at), rate) for rate in own]
        ratio, best = min(ratios, key=lambda one: one[0])
        near += [best] if ratio <= NEAR else []
    return tuple(near)


def _alike(rate: PublishedRate, machine: Topology) -> bool:
    """Return whether a machine has the NVLinks of a published one: its GPUs, as many on a server, and its switches."""
    if rate.machine in library():
        return _kind(load(rate.machine)) == _kind(machine)
    model = machine.device(machine.gpus[0]).model
    return rate.machine in model and any(link.channel == "nvlink" for link in machine.links)


def _kind(machine: Topology) -> tuple[str, int, bool]:
    gpu = machine.device(machine.gpus[0])
    here = sum(device.kind == "gpu" and device.server == gpu.server for device in machine.devices)
    words = next((name for name in _MODELS if name in gpu.model), gpu.model)
    return words, here, any(device.kind == "nvswitch" for device in machine.devices)


_MODELS = ("GB200", "GB300", "H100", "H200", "A100", "MI300X", "B200", "B300")
"""Models by a part of their driver's name, longer names first."""

"""Logs as nccl-tests prints them, written from its published format: nothing is shared with topoplan's reader.

The widths are those of its ``printf`` calls (``src/util.cu``, releases of 2.13 to 2.19). The times are invented: a
start and a pace per byte, so that no figure was measured anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
}
"""Bus over algorithm bandwidth (doc/PERFORMANCE.md); 1 for the others."""

REDUCES = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
BUSES = (0x07, 0x0F, 0x47, 0x4E, 0x87, 0x90, 0xB7, 0xBD, 0x07, 0x0F, 0x47, 0x4E, 0x87, 0x90, 0xB7, 0xBD)


def number(value: float, width: int) -> str:
    """As ``getFloatStr`` prints it."""
    power = 0
    reached = 1
    while value >= reached:
        power, reached = power + 1, reached * 10
    digits = 2 if power < width - 2 else 1 if power < width - 1 else 0
    return f"{value:{width}.{digits}f}" if power < width + 1 else f"{value:{width}.1e}"


@dataclass(frozen=True)
class PerfLog:
    test: str = "all_reduce"  # without ``_perf``
    hosts: Sequence[tuple[str, Sequence[int]]] = (("node1", range(8)),)  # devices of the ranks on each host
    sizes: Sequence[int] = tuple(8 << 2 * step for step in range(14))
    start: float = 22e-6  # seconds of a row without bytes
    rate: float = 240.0  # GB/s of algorithm bandwidth without a start
    gpu: str = "NVIDIA H100 80GB HBM3"
    names_test: bool = True  # whether the run says which test it is, and bus ids stand whole
    newer: bool = True
    wrong: dict[int, int] = field(default_factory=dict)  # wrong elements by size
    checked: bool = True  # false prints N/A
    root: int = 0
    in_place: float = 0.98

    @property
    def ranks(self) -> int:
        return sum(len(devices) for _, devices in self.hosts)

    def seconds(self, size: int) -> float:
        return self.start + size / (self.rate * 1e9)

    def block(self, size: int, seconds: float) -> str:
        algbw = size / seconds / 1e9
        busbw = algbw * FACTORS.get(self.test, lambda n: 1.0)(self.ranks)
        wrong = f"{self.wrong.get(size, 0):6g}" if self.checked else "   N/A"
        return f"  {number(seconds * 1e6, 7)}  {number(algbw, 6)}  {number(busbw, 6)}  {wrong}"

    def row(self, size: int) -> str:
        split = 1 if self.test in ("all_reduce", "broadcast", "reduce", "sendrecv") else self.ranks
        redop = "sum" if self.test in REDUCES else "none"
        root = self.root if self.test in ROOTED else -1
        line = f"{size:12d}  {size // 4 // split:12d}  {'float':>8}  {redop:>6}  {root:6d}"
        return (
            line + self.block(size, self.seconds(size)) + self.block(size, self.seconds(size) * self.in_place)
        )

    def head(self) -> list[str]:
        program = f"{self.test}_perf"
        lines = ["# nccl-tests version 2.17.6 nccl-headers=22809 nccl-library=22809"] if self.newer else []
        lines += [f"# Collective test starting: {program}"] if self.names_test else []
        lines += [
            f"# nThread 1 nGpus {len(self.hosts[0][1])} minBytes {min(self.sizes)} maxBytes {max(self.sizes)} "
            "step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0",
            "#",
            "# Using devices",
        ]
        rank = 0
        for host, devices in self.hosts:
            for device in devices:
                bus = f"0000:{BUSES[device]:02x}:00" if self.newer else f"0x{BUSES[device]:02x}"
                lines.append(
                    f"#  Rank {rank:2d} Group  0 Pid {4242:6d} on {host:>10} device {device:2d} [{bus}] {self.gpu}"
                )
                rank += 1
        columns, unit = "     time   algbw   busbw  #wrong", "     (us)  (GB/s)  (GB/s)        "
        left = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}".format
        lines += [
            "#",
            left("", "", "", "", "") + "           out-of-place                       in-place          ",
            left("size", "count", "type", "redop", "root") + columns + columns,
            left("(B)", "(elements)", "", "", "") + unit + unit,
        ]
        return lines

    def foot(self) -> list[str]:
        errors = sum(self.wrong.values())
        buses = [
            size / self.seconds(size) / 1e9 * FACTORS.get(self.test, lambda n: 1.0)(self.ranks)
            for size in self.sizes
        ]
        return [
            f"# {'Out of bounds values':<20} : {errors} {'FAILED' if errors else 'OK'}",
            f"# {'Avg bus bandwidth':<20} : {sum(buses) / len(buses):g} ",
            "#",
            *([f"# Collective test concluded: {self.test}_perf"] if self.names_test else []),
            "",
        ]

    def text(self) -> str:
        return "\n".join([*self.head(), *map(self.row, self.sizes), *self.foot()])

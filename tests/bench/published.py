"""Times that papers and users measured, beside the model's.

Fitted are one-hop trees of 1 KB on a DGX-2 and the allgather of 1 MB between servers (`topoplan.model.dataflow`).

Figures 16 and 27 of Blink (MLSys 2020), read off the charts (0.5 GB/s; 8 %); figures of ForestColl for two DGX-A100;
NCCL issue 1801 for three NVLink domains of GB200, NVLS off. NCCL takes the faster of its double tree and its rings.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, log
from typing import NamedTuple

import topoplan
from tests.bench.three_phases import BARS
from tests.support.known_answers import blink_figure
from topoplan.machine.cluster import cluster, nvswitch_cluster
from topoplan.machine.cluster_network import Server
from topoplan.plans.plan import Plan
from topoplan.schedules.binary_trees import nccl_tree
from topoplan.units import format_size

SIZES = tuple(1 << 10 << step for step in (0, 6, 8, 10, 12, 14, 16, 18, 20))
"""Of figure 27, which has every power of two."""


class Row(NamedTuple):
    """One measurement: of what, where, bytes, microseconds measured, and by the model of the fastest of some plans."""

    what: str
    machine: str
    nbytes: int
    measured: float
    plans: tuple[Plan, ...]

    def model(self) -> float:
        """Microseconds of the event simulation."""
        return min(topoplan.simulate(plan, nbytes=self.nbytes).seconds for plan in self.plans) * 1e6


def of_rate(what: str, machine: str, nbytes: int, rate: float, plan: Plan) -> Row:
    return Row(what, machine, nbytes, nbytes / rate / 1e3, (plan,))


def main() -> None:
    groups = (
        ("Blink figure 27", dgx2()),
        ("Blink figure 16", dgx1()),
        ("ForestColl", a100()),
        ("NCCL 1801", gb200()),
    )
    print("model against published measurements; microseconds, and model / measured")
    for source, made in groups:
        ratios = []
        for row in made:
            model = row.model()
            ratios.append(model / row.measured)
            print(
                f"  {source:15}  {row.machine:26}  {row.what:27}  {format_size(row.nbytes):>6}  {row.measured:9.1f}"
                f"  {model:9.1f}  {ratios[-1]:5.2f}"
            )
        mean = exp(sum(map(log, ratios)) / len(ratios))
        print(f"  {source:15}  mean {mean:.2f}, {min(ratios):.2f} to {max(ratios):.2f} of {len(ratios)}")


def dgx2() -> Iterator[Row]:
    """Figure 27: one-hop trees, and NCCL 2."""
    machine = topoplan.load("dgx-2")
    hops = topoplan.one_hop_plan(machine)
    rivals = (topoplan.double_binary_tree(machine), topoplan.ring_plan(machine))
    figure = blink_figure(27)
    for nbytes in SIZES:
        bars = figure[format_size(nbytes)]
        yield Row("allreduce, one-hop trees", "dgx-2", nbytes, bars["one-hop"], (hops,))
        yield Row("allreduce, NCCL", "dgx-2", nbytes, bars["nccl"], rivals)


def dgx1(nbytes: int = 1 << 30) -> Iterator[Row]:
    """Figure 16: bars of large messages, packed trees."""
    machine = topoplan.load("dgx-1v")
    for gpus, (blink, _) in (*BARS.items(), (tuple(range(8)), (64.33, 64.86))):
        plan = topoplan.plan(machine, gpus=list(gpus), channels="nvlink")
        name = f"dgx-1v {','.join(map(str, gpus))}"
        yield of_rate("allreduce, packed trees", name, nbytes, blink, plan)


def a100() -> Iterator[Row]:
    """Allgather of two DGX-A100, a NIC of 200 Gb/s for each GPU, in its PCIe place."""
    machine = cluster([Server("dgx-a100", count=2)], nics=8, nic_gbps=200, nic_access="pcie")
    plan = topoplan.plan(machine, "allgather")
    for nbytes, rate in ((1 << 20, 13.1), (1 << 30, 247.0)):
        yield of_rate("allgather, packed trees", "2 x dgx-a100", nbytes, rate, plan)


def gb200(nbytes: int = 1 << 34) -> Iterator[Row]:
    """Rings and trees of NCCL on three NVLink domains, a NIC of 400 Gb/s for each GPU."""
    for gpus, ring, tree in ((4, 107.3, 127.9), (8, 205.4, 253.4)):
        machine = nvswitch_cluster(3, gpus=gpus, nvlink=900, nic=50, rails=None)
        for what, rate, plan in (
            ("ring", ring, topoplan.ring_plan(machine)),
            ("tree", tree, nccl_tree(machine)),
        ):
            yield of_rate(f"allreduce, NCCL {what}", f"3 x {gpus} GB200", nbytes, rate, plan)

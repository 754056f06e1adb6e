"""What NCCL can run of a plan: rings and chains of a graph file against packed trees, on allocations of a DGX-1V."""

from __future__ import annotations

import re
from math import exp, log

import topoplan
from topoplan.engines.nccl.graph_file import machine_graph_xml
from topoplan.operate.compare.comparison import compare_all


def main() -> None:
    """Print on how many allocations rings, and the better of rings and chains, reach the rate of the trees."""
    machine = topoplan.load("dgx-1v")
    ratios: dict[str, list[tuple[float, int]]] = {"rings": [], "rings or chains": []}
    for row in compare_all(machine, sizes=range(2, 9)):
        if row.channel != "nvlink":
            continue
        note = machine_graph_xml(machine.subset(row.gpus)).notes[1]
        found = re.search(r"rings (\S+) GB/s, chains (\S+) GB/s; .* (\S+) GB/s", note)
        assert found is not None, note
        rings, chains, trees = (float(number) for number in found.groups())
        ratios["rings"].append((rings / trees, row.members))
        ratios["rings or chains"].append((max(rings, chains) / trees, row.members))
    print(
        "what NCCL can run, by a graph file of topoplan export, against packed trees over NVLink; allreduce, DGX-1V"
    )
    for name, found_ratios in ratios.items():
        total = sum(members for _, members in found_ratios)
        reached = sum(members for ratio, members in found_ratios if ratio > 1 - 1e-6)
        above = sum(members for ratio, members in found_ratios if ratio > 1 + 1e-6)
        mean = exp(sum(members * log(min(ratio, 1.0)) for ratio, members in found_ratios) / total)
        print(
            f"  {name:16} reach the trees on {reached} of {total} allocations (above them on {above}, where NCCL goes "
            f"over PCIe as well), at least {min(found_ratios)[0]:.3f}, mean {mean:.3f} where 1 is the trees"
        )

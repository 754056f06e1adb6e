"""How long planning takes: the command against its imports, all allocations, and our tree oracle against networkx's."""

from __future__ import annotations

import itertools
import subprocess
import sys
from functools import partial
from math import isinf

import networkx

import topoplan
from tests.bench.timing import medians, seconds_of
from topoplan.machine.fabric import Fabric
from topoplan.plans.minimum_trees import cheapest_arborescence
from topoplan.solve.packing.exact import pack_exact
from topoplan.solve.packing.multiplicative_weights import pack_mwu
from topoplan.solve.packing.packing_program import Packing

RUNS = 9


def main() -> None:
    _whole_command()
    _allocations()
    _oracles()


def _whole_command() -> None:
    commands = {
        "topoplan plan dgx-1v, whole process": [sys.executable, "-m", "topoplan", "plan", "dgx-1v"],
        "python -c 'import numpy, scipy.optimize'": [sys.executable, "-c", "import numpy, scipy.optimize"],
    }
    runs = {
        name: partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL)
        for name, command in commands.items()
    }
    found = medians(runs, RUNS)
    for name, seconds in found.items():
        print(f"{name:44} {seconds * 1e3:8.1f} ms, median of {RUNS}")
    ours, rival = found.values()
    print(f"{'ratio (aim: at most 2)':44} {ours / rival:8.2f} x")


def _allocations() -> None:
    """Plan and verify all 247 allocations of 2 to 8 GPUs of a DGX-1V, one by one, without any use of symmetry."""
    machine = topoplan.load("dgx-1v")
    allocations = [gpus for size in range(2, 9) for gpus in itertools.combinations(range(8), size)]
    print(
        f"\n{len(allocations)} allocations of dgx-1v, exact, planned and verified (aim: all three under 20 s):"
    )
    for collective in ("allreduce", "broadcast", "allgather"):
        proved: list[bool] = []

        def planned(collective: str = collective, proved: list[bool] = proved) -> None:
            plans = (topoplan.plan(machine, collective, gpus=gpus) for gpus in allocations)
            proved.extend(topoplan.verify(plan).optimal for plan in plans)

        seconds = seconds_of(planned)
        print(f"  {collective:10} {sum(proved)} proved optimal  {seconds:6.2f} s")


class _Networkx:
    """networkx's arborescence on a graph whose weights are brought up to date before each call."""

    def __init__(self) -> None:
        self.graph = networkx.DiGraph()
        self.seconds = 0.0

    def __call__(self, cost: list[list[float]], root: int) -> list[int]:
        for head, row in enumerate(cost):
            for tail, value in enumerate(row):
                if head != root and not isinf(value):
                    self.graph.add_edge(tail, head, weight=value)
        self.seconds += seconds_of(partial(networkx.minimum_spanning_arborescence, self.graph))
        # Its answer loses precision (it shifts weights in place), so the loop goes on with ours.
        return cheapest_arborescence(cost, root)


def _oracles() -> None:
    """The same multiplicative-weights loop with our oracle and with networkx's, which is asked in every round."""
    fabric = Fabric(topoplan.load("dgx-1v"), ("nvlink",))
    print(
        "\nmultiplicative weights on dgx-1v, epsilon 0.05 (aim: at least 100 times faster than the rival's loop):"
    )
    for collective, root in (("broadcast", 0), ("allreduce", None)):
        packing, rival = Packing(fabric, collective, root), _Networkx()
        ours = min(seconds_of(partial(pack_mwu, packing)) for _ in range(RUNS))
        result = pack_mwu(packing)
        loop = seconds_of(partial(pack_mwu, packing, tree_oracle=rival))
        exact = seconds_of(partial(pack_exact, fabric, collective, root=root))
        print(
            f"  {collective:10} ours {ours * 1e3:.1f} ms ({result.rounds} rounds, {result.calls} oracle calls), exact "
            f"{exact * 1e3:.0f} ms; networkx in every round {loop * 1e3:.0f} ms, {rival.seconds * 1e3:.0f} ms of it in "
            f"networkx: ratio {loop / ours:.0f} x, against exact {loop / exact:.0f} x"
        )

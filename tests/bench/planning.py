"""How long planning takes: the whole command against its imports, and our tree oracle against networkx's."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from math import isinf

import networkx

import topoplan
from topoplan.machine.fabric import Fabric
from topoplan.plans.minimum_trees import cheapest_arborescence
from topoplan.solve.packing.exact import pack_exact
from topoplan.solve.packing.multiplicative_weights import pack_mwu
from topoplan.solve.packing.packing_program import Packing

RUNS = 9


def main() -> None:
    """Print both comparisons."""
    _whole_command()
    _oracles()


def _whole_command() -> None:
    imports = [sys.executable, "-c", "import numpy, scipy.optimize"]
    command = [sys.executable, "-m", "topoplan", "plan", "dgx-1v"]
    pairs = [(_wall(command), _wall(imports)) for _ in range(RUNS)]
    ours, rival = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"topoplan plan dgx-1v, whole process, median of {RUNS}:      {ours * 1e3:8.1f} ms")
    print(f"python -c 'import numpy, scipy.optimize', the same way:  {rival * 1e3:8.1f} ms")
    print(f"ratio (aim: at most 2):                                  {ratio:8.2f} x")


def _wall(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


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
        started = time.perf_counter()
        networkx.minimum_spanning_arborescence(self.graph)
        self.seconds += time.perf_counter() - started
        # Its answer loses precision (it shifts weights in place), so the loop goes on with ours.
        return cheapest_arborescence(cost, root)


def _oracles() -> None:
    """The same multiplicative-weights loop with our oracle and with networkx's, which is asked in every round."""
    fabric = Fabric(topoplan.load("dgx-1v"), ("nvlink",))
    print("\nmultiplicative weights on dgx-1v, epsilon 0.05:")
    for collective, root in (("broadcast", 0), ("allreduce", None)):
        packing = Packing(fabric, collective, root)
        ours = min(_timed(lambda packing=packing: pack_mwu(packing)) for _ in range(RUNS))
        result = pack_mwu(packing)
        rival = _Networkx()
        networkx_loop = _timed(lambda packing=packing, rival=rival: pack_mwu(packing, tree_oracle=rival))
        exact = _timed(lambda c=collective, r=root: pack_exact(fabric, c, root=r))
        print(
            f"  {collective:10} ours {ours * 1e3:.1f} ms ({result.rounds} rounds, {result.calls} oracle calls), "
            f"exact {exact * 1e3:.0f} ms"
        )
        print(
            f"  {'':10} networkx.minimum_spanning_arborescence in every round {networkx_loop * 1e3:.0f} ms, "
            f"{rival.seconds * 1e3:.0f} ms of it in networkx"
        )
        print(
            f"  {'':10} ratio (aim: at least 100): {networkx_loop / ours:.0f} x; "
            f"against exact {networkx_loop / exact:.0f} x"
        )


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started

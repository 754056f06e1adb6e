"""How long planning takes: the command against its imports, all allocations, and our tree oracle against networkx's.

``python -m tests.bench planning --demands GPUS`` plans uneven all-to-alls alone, up to so many GPUs, ``--drift GPUS``
runs those of experts whose popularity drifts by kept plans, and ``--blocks GPUS`` has gathers and reductions of uneven
blocks.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from math import isinf

import networkx

import topoplan
from collectives.backends.demand_plans import demand_of, proved_time
from collectives.backends.plan_and_chunk_store import PlanStore
from tests.bench.tables import Table
from tests.bench.timing import medians, seconds_of
from tests.support.demands import drifting, one_hot, time_of_blocks, time_of_counts, uniform, zipf
from topoplan.cli.arguments import OneLineParser
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.plans.certificates.exchange import Demand
from topoplan.plans.loads import stage_links
from topoplan.plans.minimum_trees import cheapest_arborescence
from topoplan.plans.shards import path_ends
from topoplan.solve.packing.block_trees import least_time, plan_blocks
from topoplan.solve.packing.demand_paths import slowest_cut
from topoplan.solve.packing.exact import pack_exact
from topoplan.solve.packing.multiplicative_weights import pack_mwu
from topoplan.solve.packing.packing_program import Packing
from topoplan.units import exact

RUNS = 9


SIZES = (8, 16, 32, 64, 256)
"""GPUs of the uneven all-to-alls, on servers of eight."""

STEPS = 200
"""Demands that drift."""

MOST_ON_TORUS = 32
"""GPUs of a torus whose optimum takes seconds; beyond only plans within a gap are timed."""


def main(words: Sequence[str] = ()) -> None:
    parser = OneLineParser(prog="python -m tests.bench planning")
    parser.add_argument(
        "--demands", type=int, metavar="GPUS", help="plan uneven all-to-alls alone, up to so many"
    )
    parser.add_argument(
        "--blocks", type=int, metavar="GPUS", help="pack trees for uneven blocks alone, up to so many"
    )
    parser.add_argument(
        "--drift", type=int, metavar="GPUS", help="find plans for demands that drift alone, up to so many"
    )
    asked = parser.parse_args(list(words))
    most = asked.demands
    if asked.blocks is not None:
        _blocks(asked.blocks)
        return
    if asked.drift is not None:
        _drift(asked.drift)
        return
    if most is None:
        _whole_command()
        _allocations()
        _oracles()
    _demands(most or SIZES[-2])


def _demands(most: int) -> None:
    """Plan uneven all-to-alls of more and more GPUs: time, the gap that is proved, and the gain over direct sends."""
    print("\nuneven all-to-alls, with imports loaded; gain: time of direct sends over that of the plan")
    table = Table(
        "machine|<14", "GPUs|4", "demand|<8", "method|<6", "ms|8.0f", "CPU ms|8.0f", "gap|8.3%", "paths|7", "proof|<7",
        "gain|6.2f",
    )  # fmt: skip
    for size in (size for size in SIZES if size <= most):
        for name, machine in _demand_machines(size):
            for shape in (uniform, zipf, one_hot):
                rows = shape(size)
                direct = _direct_seconds(machine, rows)
                for method in ("exact", "mwu"):
                    if method == "exact" and name == "torus" and size > MOST_ON_TORUS:
                        continue
                    topoplan.plan(machine, "alltoall", gpus=[0, 1], demand=[[0, 1], [1, 0]], method=method)
                    started, used = time.perf_counter(), time.process_time()
                    plan = topoplan.plan(machine, "alltoall", demand=rows, method=method)
                    taken = (time.perf_counter() - started) * 1e3, (time.process_time() - used) * 1e3
                    proof = plan.certificate
                    assert isinstance(proof, Demand)
                    kind = proof.certificate.kind
                    gain = direct and direct / float(proof.seconds(exact(plan.rate)))
                    table.row(
                        name, size, shape.__name__, method, *taken, plan.gap, plan.num_trees, kind, gain
                    )


def _drift(most: int) -> None:
    """Find the plan of each step of demands that drift: how many steps are served, and their time over its bound."""
    print(f"\n{STEPS} uneven all-to-alls that drift; over bound: time by the plan, over a proved least time")
    table = Table(
        "machine|<14", "GPUs|4", "planned|7", "served|7.1%", "mean over bound|15.3f", "most|7.3f", "when planned|12.3f",
        "ms served|9.1f", "ms planned|10.1f",
    )  # fmt: skip
    for size in (size for size in SIZES if size <= most):
        machines = _demand_machines(size) if size > 8 else [("dgx-1v", topoplan.load("dgx-1v"))]
        for name, machine in machines:
            even = topoplan.plan(machine, "alltoall")
            store, known = PlanStore(even), {}
            over: dict[bool, list[float]] = {False: [], True: []}
            taken = {False: 0.0, True: 0.0}
            for step in drifting(size, STEPS, tokens=8192):
                rows = tuple(
                    tuple(count * (a != b) for b, count in enumerate(row)) for a, row in enumerate(step)
                )
                before, started = store.demands_planned, time.process_time()
                demand = demand_of(rows)
                plan = even if demand is None else store.plan_of_demand(demand, rows, even)
                used, new = time.process_time() - started, store.demands_planned > before
                key = store.key(plan)
                known[key.digest] = key
                fabric = Fabric(plan.topology, plan.channels)
                proved = (proved_time(one, rows) for one in known.values())
                least = max(*proved, slowest_cut(fabric, rows)[0])
                over[new].append(float(time_of_counts(key, rows) / least))
                taken[new] += used * 1e3
            both = over[False] + over[True]
            table.row(
                name, size, store.demands_planned, len(over[False]) / STEPS, sum(both) / STEPS, max(both),
                max(over[True], default=None), taken[False] / max(len(over[False]), 1),
                taken[True] / max(len(over[True]), 1),
            )  # fmt: skip


def _blocks(most: int) -> None:
    """Pack trees for uneven blocks: their time and that of equal blocks' trees, over the slowest cut."""
    print("\ntrees for uneven blocks, with imports loaded; times over that of the slowest cut")
    table = Table(
        "machine|<14", "GPUs|4", "collective|<14", "blocks|<8", "CPU ms|8.0f", "checked|8.0f", "packed|7.3f",
        "equal|7.3f", "trees|6", "height|6",
    )  # fmt: skip
    for size in (size for size in (8, 16, 24, 32, 64) if size <= most):
        for name, machine in _demand_machines(size):
            for collective in ("allgather", "reduce_scatter"):
                even = topoplan.plan(machine, collective)
                for shape, blocks in (("one hot", (10, *(1,) * (size - 1))), ("drawn", _drawn_blocks(size))):
                    plan_blocks(even, blocks)
                    started = time.process_time()
                    plan = plan_blocks(even, blocks)
                    made = time.process_time()
                    topoplan.verify(plan)
                    checked = time.process_time()
                    fabric = Fabric(even.topology, even.channels)
                    least = least_time(fabric, collective, blocks)
                    over = [float(time_of_blocks(one, blocks) / least) for one in (plan, even)]
                    taken = (made - started) * 1e3, (checked - made) * 1e3
                    table.row(name, size, collective, shape, *taken, *over, plan.num_trees, plan.height)


def _drawn_blocks(size: int) -> tuple[int, ...]:
    return tuple(1 + (7 * rank * rank + 3 * rank) % 61 for rank in range(size))


def _demand_machines(size: int) -> list[tuple[str, Topology]]:
    server = topoplan.load("dgx-h100")
    servers = [topoplan.Server(server, count=size // 8)]
    cluster = server if size == 8 else topoplan.cluster(servers, nics=8, nic_gbps=400, nic_access="pcie")
    tori = {8: "torus:2,2,2@25", 16: "torus:4,2,2@25", 32: "torus:4,4,2@25", 64: "torus:4,4,4@25"}
    found = [("dgx-h100", cluster)]
    return [*found, ("torus", topoplan.load(tori[size]))] if size in tori else found


def _direct_seconds(machine: Topology, rows: Sequence[Sequence[int]]) -> float | None:
    """Return the seconds of direct sends by the fullest link, as NCCL routes them; None if some pairs have no route."""
    try:
        plan = topoplan.one_hop_plan(machine, "alltoall")
    except topoplan.TopoplanError:
        return None
    fabric = Fabric(plan.topology, plan.channels)
    load = [Fraction(0)] * len(fabric.links)
    for shard in plan.shards:
        source, destination = path_ends(shard)
        for link in stage_links(shard.stages[0], fabric):
            load[link] += shard.share * len(rows) * rows[source][destination]
    return max(float(each / width) for each, width in zip(load, fabric.capacity, strict=True)) / 1e9


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

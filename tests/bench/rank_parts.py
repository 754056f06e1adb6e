"""CPU seconds and memory of one rank of a large plan by kind until its tables are ready to run on tcp, without peers.

Each row is a process of its own: it reads and verifies the plan, lowers one rank's part, and makes its program. Memory
is what the process has gained since the plan was verified. ``python -m tests.bench.rank_parts SERVERS NETWORK
COLLECTIVE`` prints one row.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

import topoplan
from collectives.backends.backend import Call, RankArrays
from collectives.backends.tcp.chunk_order import FLIGHT_BYTES
from collectives.backends.tcp.collective_state import TcpProgram
from collectives.backends.tcp.connections import connections_of
from collectives.peers.control_plane import Signature
from collectives.tables.rank_part import rank_part
from collectives.tables.transfer_table import given_block, result_block
from topoplan.plans.deferred_plan import DeferredPlan

NETWORKS: dict[str, dict[str, Any]] = {
    "switch": {},
    "rails": {"network": "rail-optimised"},
    "tree": {"network": "fat-tree", "leaf_size": 32, "oversubscription": 2},
}

CASES = [
    (servers, network, collective)
    for servers in (512, 12_500)
    for network in NETWORKS
    for collective in ("allgather", "allreduce")
]

EACH = 1024
"""Elements for each GPU."""

Value = TypeVar("Value")


def main() -> None:
    print("CPU ms of one rank; MB gained, and at the peak; the rank is at 54 % of all")
    print(
        "    GPUs network collective  verify    part   table program       rows connections      MB  peak MB"
    )
    for case in CASES:
        done = subprocess.run(
            [sys.executable, "-m", "tests.bench.rank_parts", *map(str, case)],
            capture_output=True,
            text=True,
            timeout=600,
        )
        print((done.stdout or done.stderr).rstrip(), flush=True)


def timed(work: Callable[[], Value]) -> tuple[Value, float]:
    """Return a result, and its CPU milliseconds."""
    began = time.process_time()
    return work(), 1e3 * (time.process_time() - began)


def resident() -> float:
    """Return the memory of this process in MB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def row(servers: int, network: str, collective: str) -> str:
    cluster = topoplan.cluster_by_kind(
        [topoplan.Server("dgx-h100", count=servers)], nic_gbps=400, **NETWORKS[network]
    )
    text = topoplan.plan_by_kind(cluster, collective).to_json()
    by_kind = topoplan.PlanByKind.from_object(json.loads(text))
    plan = DeferredPlan(by_kind)
    _, verifying = timed(lambda: topoplan.verify(plan))
    before, size = resident(), cluster.size
    rank, count = size * 54 // 100, size * EACH
    part, lowering = timed(lambda: rank_part(by_kind, rank))
    table, listing = timed(lambda: part.table(count, chunk_elements=1 << 18))
    nothing = np.zeros(0, dtype=np.float32)
    memory = RankArrays(
        rank,
        given_block(collective, rank, size, count),
        nothing,
        result_block(collective, None, rank, size, count),
        nothing,
    )
    about = Signature(0, "", size, collective, None, "sum", "float32", count, table.chunk_elements)
    call = Call(plan, table, about, "sum", "float32", 4, (memory,))
    program, making = timed(
        lambda: TcpProgram.of(call, rank, lambda rows: connections_of(rows, plan, table, {}), FLIGHT_BYTES)
    )
    gained = resident() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 * 1.024 - before
    return (
        f"{size:8,} {network:7} {collective:10} {verifying:7.0f} {lowering:7.0f} {listing:7.0f} {making:7.0f} "
        f"{len(table):10,} {len(program.links):11,} {gained:7.0f} {peak:8.0f}"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(row(int(sys.argv[1]), *sys.argv[2:]))
    else:
        main()

"""How the windows engine cuts an allreduce: chunk-steps of the busiest block, its tables, and the model's time.

At 64 KB the PTX machine runs the kernels, and counts the bytes of tables and counters that a rank reads from global
memory: for each chunk-step they are a chain of loads before the flag, and another one behind the barrier, unless the
tables lie in shared memory.
"""

from __future__ import annotations

import numpy as np

import topoplan
from collectives import lower
from collectives.backends.backend import RankArrays
from collectives.backends.nccl.kernel_program import END, STEP, KernelPlan
from collectives.tables.lowering import PlanKey
from tests.bench.tables import Table
from tests.ptx.forests import Case, prepared, run
from topoplan.model.window_engine import SLOT_BYTES, SMALL_BYTES, WIDE_BLOCKS
from topoplan.plans.plan import Plan
from topoplan.units import format_size

ROOM = 64 << 20  # bytes for a plan's slots in an arena of the default size


def main() -> None:
    print("chunk-steps of the busiest block, and words of the largest tables of a block:")
    table = Table(
        *("machine|<9", "bytes|>8", "blocks|6", "parts|5", "chunk|>9", "chunk-steps|11", "words|5"),
        *("model us|8.1f", "packets us|10.1f"),
    )
    for name in ("dgx-h100", "dgx-1v"):
        plan = topoplan.plan(topoplan.load(name), "allreduce")
        made = KernelPlan(
            PlanKey(plan.digest, plan), base=0, stride=SLOT_BYTES, blocks=WIDE_BLOCKS, room=ROOM
        )
        for nbytes in (64 << 10, 1 << 20, 4 << 20, 16 << 20, 256 << 20):
            table.row(name, format_size(nbytes), *_cells(plan, made, nbytes))
        ready = prepared(Case(name, counts=((64 << 10) // 4,), blocks=24, chunk=128))
        phase = next(iter(ready.ranks.engines[0]._programs.values())).launches[0].phase
        assert phase is not None
        traffic = run(ready, 1).traffic[0]
        read = sum(traffic[what].read for what in ("tables", "numbers"))
        chunks = int(phase.steps["chunks"].sum())
        print(
            f"  {name}, chunks of 512 bytes: each of {chunks} chunk-steps of rank 0 read {read / chunks:.0f} bytes"
        )


def _cells(plan: Plan, made: KernelPlan, nbytes: int) -> tuple[object, ...]:
    table = lower(plan, nbytes // 4, chunk_elements=SLOT_BYTES // 4)
    busiest = words = 0
    for rank in range(len(plan.ranks)):
        whole, nothing = (0, nbytes // 4), np.zeros(0)
        phase = made.tables(table, RankArrays(rank, whole, nothing, whole, nothing), 4).phases[0]
        for steps in np.split(phase.steps, phase.blocks[1:-1]):
            ends = int((steps["arrivals"] + steps["departures"]).sum())
            busiest = max(busiest, int(steps["chunks"].sum()))
            words = max(
                words, len(plan.ranks) + len(steps) * STEP.itemsize // 8 + ends * (END.itemsize // 8 + 1)
            )
    blocks, chunk = len(phase.blocks) - 1, int(phase.steps["chunk"].max()) * 4
    seconds, _ = made.clock.times(nbytes, np.array([blocks]), np.array([made.stride]))
    packets = made.clock.in_packets(nbytes) * 1e6 if nbytes <= SMALL_BYTES else None
    parts = int(phase.steps["parts"].max())
    return blocks, parts, format_size(chunk), busiest, words, seconds[0] * 1e6, packets

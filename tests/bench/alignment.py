"""Which bytes of a collective NCCL copies in packs of 16: those of messages with both ends on 16-byte borders.

NCCL's send and receive kernel copies 16 bytes at a time only where both addresses are multiples of 16, and else byte
by byte. The arrays of the caller and the scratch of the back ends lie on such borders themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import topoplan
from collectives import TransferTable, lower
from collectives.backends.backend import RankArrays
from collectives.backends.nccl.nccl_backend import NcclBackend
from collectives.backends.plan_and_chunk_store import ChunkSizes
from collectives.backends.stepped_program import ProgramMessage, program_of
from collectives.backends.torch.torch_backend import program
from collectives.tables.transfer_table import given_block, result_block
from topoplan.plans.plan import Plan

PACK = 16  # bytes of a pack, and what both addresses must be multiples of

MACHINES = ("dgx-1v", "dgx-2", "dgx-a100", "dgx-h100")
COUNTS = (1 << 24, 25_557_032)  # elements: a power of two, and the parameters of ResNet-50

STEP_BYTES: int = inspect.signature(NcclBackend).parameters["step_bytes"].default


@dataclass(frozen=True, slots=True)
class Crossing:
    """A message: the first of its rows in the table, its bytes, and where it starts in a buffer at either end."""

    row: int
    nbytes: int
    sent_from: int
    put_at: int

    @property
    def packed(self) -> bool:
        return self.sent_from % PACK == 0 and self.put_at % PACK == 0


def main() -> None:
    print(
        "# allreduce of float32 over nccl with its own settings, and over torch: messages of all ranks, and the"
    )
    print(f"# share of their bytes that start on multiples of {PACK} bytes at both ends")
    print("# machine   elements  nccl messages  in packs  torch messages  in packs")
    for name in MACHINES:
        plan = topoplan.plan(topoplan.load(name), "allreduce")
        for count in COUNTS:
            chunk = ChunkSizes("nccl").choose(plan.digest, count * 4) // 4
            table = lower(plan, count, chunk_elements=chunk)
            found = [nccl_crossings(plan, table, 4), torch_crossings(plan, table, 4)]
            nccl, torch = (f"{len(one):>8}  {packed_share(one):>8.4%}" for one in found)
            print(f"  {name:<8}  {count:>8}       {nccl}        {torch}")


def packed_share(crossings: list[Crossing]) -> float:
    return sum(one.nbytes for one in crossings if one.packed) / sum(one.nbytes for one in crossings)


def nccl_crossings(plan: Plan, table: TransferTable, itemsize: int) -> list[Crossing]:
    sends: dict[int, ProgramMessage] = {}
    receives: dict[int, ProgramMessage] = {}
    for one in memory_of(plan, table.count):
        made = program_of(table, one, itemsize, step_bytes=STEP_BYTES)
        for step in made.steps:
            sends.update((message.row, message) for message in step.sends)
            receives.update((message.row, message) for message in step.receives)
    return [
        Crossing(row, sent.nbytes, sent.offset, receives[row].offset) for row, sent in sorted(sends.items())
    ]


def torch_crossings(plan: Plan, table: TransferTable, itemsize: int) -> list[Crossing]:
    """The messages of the torch back end on GPUs, where receives are not posted ahead."""
    sends: dict[int, ProgramMessage] = {}
    receives: dict[int, ProgramMessage] = {}
    for one in memory_of(plan, table.count):
        for turn in program(table, one.rank, one.given, one.block, itemsize, ahead=False).turns:
            sends.update((message.row, message) for message in turn.sends)
            receives.update((message.row, message) for message in turn.receives)
    return [
        Crossing(row, sent.nbytes, sent.offset, receives[row].offset) for row, sent in sorted(sends.items())
    ]


def memory_of(plan: Plan, count: int) -> Iterator[RankArrays[Any]]:
    """What each rank gives and gets; without arrays."""
    ranks = len(plan.ranks)
    for rank in range(ranks):
        given = given_block(plan.collective, rank, ranks, count)
        block = result_block(plan.collective, plan.root, rank, ranks, count)
        yield RankArrays(rank, given, None, block, None)

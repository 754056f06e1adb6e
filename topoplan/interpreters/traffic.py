"""What a program sends from GPU to GPU, what that loads links with on a machine, and the rate that they allow.

A file names GPUs and no routes. Here bytes take the routes with the fewest links, evenly where there are several, as
they do through the planes of NVSwitch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from topoplan.errors import InfeasibleError, UsageError
from topoplan.fabric.fabric import CHANNEL_CHOICES, Fabric
from topoplan.interpreters.program import Move, Post, Program
from topoplan.plans.loads import full_links, rate_of_loads
from topoplan.topology import Topology

Traffic = dict[tuple[int, int], Fraction]
"""Bytes from one GPU to another, for each byte of the buffer."""


@dataclass(frozen=True, slots=True)
class Loads:
    """Links under the traffic of a file.

    Parameters
    ----------
    loads : dict from (str, str) to Fraction
        Bytes across each link that carries any, for each byte of the buffer.
    rate : Fraction
        GB/s of algorithm bandwidth at which the first link is full.
    full : tuple of (str, str)
        Those that are full then.
    channels : tuple of str
        Whose links the routes take.
    """

    loads: dict[tuple[str, str], Fraction]
    rate: Fraction
    full: tuple[tuple[str, str], ...]
    channels: tuple[str, ...]


def traffic(program: Program) -> Traffic:
    """What goes from GPU to GPU; what switches add or copy is left out."""
    cells: Counter[tuple[int, int]] = Counter()
    for block in program.blocks:
        for instruction, _ in block.unrolled():
            move = instruction.what if isinstance(instruction, Post) else instruction
            if not isinstance(move, Move) or move.by_switch:
                continue
            for region in move.reads:
                if region.rank != block.rank:
                    cells[region.rank, block.rank] += region.size
            for region in move.writes:
                if region.rank != block.rank:
                    cells[block.rank, region.rank] += region.size
    whole = max(program.sizes[0, "i"], program.sizes[0, "o"])
    return {pair: Fraction(count, whole) for pair, count in sorted(cells.items())}


def machine_loads(sent: Traffic, ranks: int, machine: Topology) -> Loads:
    """The links of a machine under this traffic; rank i is the i-th GPU.

    Raises
    ------
    UsageError
        The machine has another number of GPUs.
    InfeasibleError
        It does not join GPUs that send.
    """
    if len(machine.gpus) != ranks:
        raise UsageError(
            f"the file is for {ranks} GPUs, and {machine.name} has {len(machine.gpus)} here; choose with --gpus"
        )
    for channels in CHANNEL_CHOICES["auto"]:
        fabric = Fabric(machine, channels)
        shortest: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        for arc in fabric.arcs:
            routes = shortest.setdefault((arc.tail, arc.head), [])
            if not routes or len(arc.links) == len(routes[0]):
                routes.append(arc.links)
        if all(pair in shortest for pair in sent):
            break
    else:
        raise InfeasibleError(f"{machine.name} does not join all GPUs that send to each other in this file")
    loads = [Fraction(0)] * len(fabric.links)
    for pair, share in sent.items():
        for links in shortest[pair]:
            for link in links:
                loads[link] += share / len(shortest[pair])
    rate = rate_of_loads(loads, fabric)
    if rate is None:
        raise UsageError(
            "nothing in this file goes from GPU to GPU but through switches, whose loads are not counted"
        )
    ends = [(link.src, link.dst) for link in fabric.links]
    return Loads(
        loads={ends[number]: load for number, load in enumerate(loads) if load},
        rate=rate,
        full=tuple(ends[number] for number in full_links(loads, fabric)),
        channels=channels,
    )

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
from topoplan.interpreters.program import Fifo, Move, Post, Program, Region
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
            for place in move.reads:
                if isinstance(place, Region) and place.rank != block.rank:
                    cells[place.rank, block.rank] += place.size
            for place in move.writes:
                if isinstance(place, Fifo):
                    # as much as the move has anywhere else: it reads or writes a buffer
                    size = max(one.size for one in (*move.reads, *move.writes) if isinstance(one, Region))
                    cells[block.rank, program.fifos[place.number][0]] += size
                elif place.rank != block.rank:
                    cells[block.rank, place.rank] += place.size
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

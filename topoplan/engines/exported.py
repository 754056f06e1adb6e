"""Hold what exporters take and return: choices, one server, shares as whole chunks; files with notes.

An engine cuts the buffer into equal chunks, and each tree gets consecutive chunks. Shares are exact if their common
denominator is small; otherwise they are rounded and the note states the lost rate. MSCCL++ refuses a buffer that is not
a multiple of `ALIGNMENT` bytes times the chunks, so the number of chunks may have to fit a size. Rounding gives each
shard its share rounded down and the remaining chunks to the largest remainders, within the block of each owner if ranks
own blocks. The rate that remains follows from the link loads, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from topoplan.errors import UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.plans.loads import forest_rate
from topoplan.plans.plan import ALL_TO_ALL, Plan
from topoplan.plans.shards import Shard
from topoplan.units import format_size

ALIGNMENT = 16
"""Bytes that borders of chunks are multiples of."""

MAX_EXACT_CHUNKS = 128
"""Most chunks that exact shares get where the size is left open: few sizes are a multiple of more."""

MAX_CHUNKS = 4096
"""Most chunks that are tried."""

MAX_RATE_LOSS = Fraction(1, 100)
"""Most of the rate that rounded shares may cost where nobody asked for a number of chunks."""


@dataclass(frozen=True, slots=True)
class Chunking:
    """A buffer in equal chunks.

    Parameters
    ----------
    count : int
        Chunks of the whole buffer, of an all-to-all those of one rank's.
    shards : tuple of (Shard, int, int)
        The shards that get any: each with its first chunk and its number of chunks. The first chunks of an all-to-all
        count on through the results of all ranks.
    kept : Fraction
        The rate with these shares, and switches that add and copy or do not, over the plan's.
    """

    count: int
    shards: tuple[tuple[Shard, int, int], ...]
    kept: Fraction


def chunk_shares(
    plan: Plan, *, chunks: int | None = None, size: int | None = None, in_network: bool = False
) -> Chunking:
    """The shares of a plan in chunks.

    Parameters
    ----------
    plan : Plan
    chunks : int or None
        How many; None for the exact number where it is at most `MAX_EXACT_CHUNKS`, and else the smallest that costs at
        most `MAX_RATE_LOSS` of the rate.
    size : int or None
        Bytes of the buffer that the chunks have to divide; None for any.
    in_network : bool
        Whether switches that can add and copy do.

    Raises
    ------
    UsageError
        No number of chunks does, or the one that is asked for does not.

    Examples
    --------
    >>> import topoplan
    >>> found = chunk_shares(topoplan.plan("dgx-1v"))
    >>> found.count, [count for _, _, count in found.shards], found.kept
    (24, [4, 3, 3, 2, 2, 2, 2, 2, 2, 1, 1], Fraction(1, 1))
    """
    divided = plan.collective in ("allgather", "reduce_scatter", ALL_TO_ALL)
    blocks = len(plan.ranks) if divided else 1
    shards = tuple(plan.shards)
    exact = math.lcm(blocks, *(shard.share.denominator for shard in shards))
    if chunks is not None:
        if chunks % blocks:
            raise UsageError(
                f"{chunks} chunks are no multiple of {blocks}, one block for each rank; change --chunks"
            )
        if size is not None and not _fits_size(size, chunks):
            raise UsageError(
                f"{format_size(size)} is no multiple of {chunks} chunks of {ALIGNMENT} bytes; change --chunks or --size"
            )
        return _round_shares(plan, shards, chunks, blocks, in_network)
    if exact <= (MAX_EXACT_CHUNKS if size is None else MAX_CHUNKS) and (
        size is None or _fits_size(size, exact)
    ):
        return _round_shares(plan, shards, exact, blocks, in_network)
    for count in _candidates(blocks, size):
        found = _round_shares(plan, shards, count, blocks, in_network)
        if found.kept >= 1 - MAX_RATE_LOSS:
            return found
    if size is None:
        raise UsageError(
            f"the shares need {exact} chunks, and no number up to {MAX_CHUNKS} keeps {float(1 - MAX_RATE_LOSS):.0%} of "
            "the rate; give --chunks, or plan with --order trees"
        )
    raise UsageError(
        f"{size} bytes are no multiple of {exact} chunks of {ALIGNMENT} bytes, which the shares need, and no other "
        f"number of chunks that divides them keeps {float(1 - MAX_RATE_LOSS):.0%} of the rate; give --chunks, "
        "or a --size "
        f"that is a multiple of {ALIGNMENT * exact} bytes"
    )


def kept_rate(plan: Plan, part: Fraction) -> str:
    """What is left of a plan's rate, in words."""
    kept = "all of the rate" if part == 1 else f"{float(part):.2%} of the plan's"
    return f"keeps {float(part) * plan.rate:.6g} GB/s, {kept}"


def _fits_size(size: int, chunks: int) -> bool:
    return size > 0 and size % (ALIGNMENT * chunks) == 0


def _candidates(blocks: int, size: int | None) -> Iterable[int]:
    """Powers of two and three times them, for each block; all divisors where a size is given."""
    if size is not None:
        return (count for count in range(blocks, MAX_CHUNKS + 1, blocks) if _fits_size(size, count))
    parts = sorted(factor << power for factor in (1, 3) for power in range(13))
    return (blocks * part for part in parts if blocks * part <= MAX_CHUNKS)


def _round_shares(plan: Plan, shards: Sequence[Shard], count: int, blocks: int, in_network: bool) -> Chunking:
    sizes = _apportion_chunks([shard.share for shard in shards], count, blocks)
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    kept = tuple(
        (shard, start, size) for shard, start, size in zip(shards, starts, sizes, strict=True) if size
    )
    fabric = Fabric(plan.topology, plan.channels)
    exact = all(shard.share * count == size for shard, size in zip(shards, sizes, strict=True))
    used = fabric if in_network else fabric.forwarding_only()
    if exact and used is fabric:
        return Chunking(count, kept, Fraction(1))
    rounded = [replace(shard, share=Fraction(size, count)) for shard, _, size in kept]
    after = forest_rate(rounded, used)
    before = forest_rate(plan.shards, fabric)
    return Chunking(count, kept, Fraction(1) if before is None or after is None else after / before)


def _apportion_chunks(shares: Sequence[Fraction], count: int, blocks: int) -> list[int]:
    """Chunks of each shard; the shards of a block, which stand together, get as many as the block has."""
    sizes: list[int] = []
    begun = Fraction(0)
    block: list[Fraction] = []
    for share in shares:
        block.append(share)
        begun += share
        if begun == Fraction(1, blocks):
            floors = [math.floor(part * count) for part in block]
            order = sorted(range(len(block)), key=lambda i: (floors[i] - block[i] * count, i))
            for number in order[: count // blocks - sum(floors)]:
                floors[number] += 1
            sizes += floors
            begun, block = Fraction(0), []
    return sizes


@dataclass(frozen=True, slots=True)
class Exported:
    """A file for another program, or several.

    Parameters
    ----------
    text : str
        The whole file; empty where there are several.
    notes : tuple of str
        What the format cannot say, what had to be assumed and what to expect, one line each.
    files : tuple of (str, bytes)
        Several files, each with the end of its name, such as ``.0.et``.
    """

    text: str
    notes: tuple[str, ...] = ()
    files: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Choices:
    """What may be asked of a file for an engine; None leaves it to the exporter.

    Parameters
    ----------
    size : int or None
        Bytes of the buffer that it is made for.
    max_blocks : int or None
        Most thread blocks of a GPU.
    chunks : int or None
        Chunks that the buffer is cut into.
    chunk : int or None
        Bytes of the longest chunk.
    protocol : str or None
        ``simple`` or ``ll``: whether flags travel beside the data, or with each packet of it.
    runtime : str or None
        Whose limits the file keeps to, where an engine has several runtimes.
    """

    size: int | None = None
    max_blocks: int | None = None
    chunks: int | None = None
    chunk: int | None = None
    protocol: str | None = None
    runtime: str | None = None


DEFAULT_CHOICES = Choices()
"""Nothing asked."""


def one_server(topology: Topology, name: str | None, what: str) -> Topology:
    """The devices of a server and the links between them.

    Parameters
    ----------
    topology : Topology
    name : str or None
        The server; None where there is only one with GPUs.
    what : str
        What describes one server, for the message.

    Raises
    ------
    UsageError
        There is no such server, or there are several and none is named.

    Examples
    --------
    >>> import topoplan
    >>> one_server(topoplan.nvswitch_cluster(2, gpus=4), "s1", "the file").gpus
    ('s1.gpu0', 's1.gpu1', 's1.gpu2', 's1.gpu3')
    """
    servers = topology.servers
    with_gpus = tuple(
        dict.fromkeys(device.server for device in topology.devices if device.kind == "gpu" and device.server)
    )
    if name is None:
        if len(with_gpus) <= 1 and len(servers) <= 1:
            return topology
        if len(with_gpus) != 1:
            raise UsageError(
                f"{what} describes one server, and {topology.name} has {len(with_gpus)}; choose one with --server, for "
                f"example --server {with_gpus[0] if with_gpus else servers[0]}"
            )
        name = with_gpus[0]
    if name not in servers:
        known = ", ".join(servers[:8]) + (" …" if len(servers) > 8 else "") or "none that has a name"
        raise UsageError(f"{topology.name} has no server {name!r}; it has {known}")
    inside = {device.name for device in topology.devices if device.server == name}
    if not any(gpu in inside for gpu in topology.gpus):
        raise UsageError(f"server {name} has no GPU that is used; choose another with --server")
    return replace(
        topology,
        devices=tuple(device for device in topology.devices if device.name in inside),
        links=tuple(link for link in topology.links if link.src in inside and link.dst in inside),
    )

"""Hold the arguments and results of exporters: choices, one server, shares as whole chunks; files with notes.

An engine cuts the buffer into equal chunks, and each tree gets consecutive chunks. Shares are exact if their common
denominator is small; otherwise they are rounded and the note states the lost rate. MSCCL++ refuses a buffer that is not
a multiple of `ALIGNMENT` bytes times the chunks, so the number of chunks may have to fit a size. Rounding gives each
shard its share rounded down and the remaining chunks to the largest remainders, within the block of each owner if ranks
own blocks. The remaining rate follows from the link loads, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from topoplan.errors import UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.half_duplex import merged
from topoplan.machine.topology import Topology
from topoplan.plans.loads import forest_rate
from topoplan.plans.plan import ALL_TO_ALL, Plan
from topoplan.plans.shards import Shard
from topoplan.units import format_size

ALIGNMENT = 16
"""Bytes of which borders of chunks are multiples."""

MAX_EXACT_CHUNKS = 128
"""Most chunks of exact shares if the size is open: few sizes are a multiple of more."""

MAX_CHUNKS = 4096
"""Most chunks that are tried."""

MAX_RATE_LOSS = Fraction(1, 100)
"""Largest fraction of the rate that rounded shares may cost if no number of chunks is given."""


@dataclass(frozen=True, slots=True)
class Chunking:
    """A buffer in equal chunks.

    ``count`` is the number of chunks of the whole buffer, of an all-to-all those of one rank's. ``shards`` are those
    with chunks: each with its first chunk and its number of chunks; the first chunks of an all-to-all count on through
    the results of all ranks. ``kept`` is the rate with these shares, and with or without switches that add and copy,
    over the plan's.
    """

    count: int
    shards: tuple[tuple[Shard, int, int], ...]
    kept: Fraction


def chunk_shares(
    plan: Plan, *, chunks: int | None = None, size: int | None = None, in_network: bool = False
) -> Chunking:
    """Return the shares of a plan in chunks.

    If ``chunks`` is None, the exact number is taken if it is at most `MAX_EXACT_CHUNKS`, else the smallest that costs
    at most `MAX_RATE_LOSS` of the rate. The chunks have to divide a buffer of ``size`` bytes, None for any.
    ``in_network``: switches that can add and copy do so. A UsageError says that no number fits.

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
                f"{chunks} chunks are not a multiple of {blocks}, one block for each rank; change --chunks"
            )
        if size is not None and not _fits_size(size, chunks):
            raise UsageError(
                f"{format_size(size)} is not a multiple of {chunks} chunks of {ALIGNMENT} bytes; change --chunks or "
                "--size"
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
        f"{size} bytes are not a multiple of {exact} chunks of {ALIGNMENT} bytes, which the shares need, and no other "
        f"number of chunks that divides them keeps {float(1 - MAX_RATE_LOSS):.0%} of the rate; give --chunks, "
        f"or a --size that is a multiple of {ALIGNMENT * exact} bytes"
    )


def kept_rate(plan: Plan, part: Fraction) -> str:
    kept = "all of the rate" if part == 1 else f"{float(part):.2%} of the plan's"
    return f"keeps {float(part) * plan.rate:.6g} GB/s, {kept}"


def _fits_size(size: int, chunks: int) -> bool:
    return size > 0 and size % (ALIGNMENT * chunks) == 0


def _candidates(blocks: int, size: int | None) -> Iterable[int]:
    """Yield powers of two and three times them, for each block; all divisors if a size is given."""
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
    """Return the chunks of each shard; the shards of a block, which are consecutive, share the block's chunks."""
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

    ``text`` is the whole file, empty if there are several in ``files``, each with the end of its name, such as
    ``.0.et``. ``notes`` list omissions, assumptions and expectations.
    """

    text: str
    notes: tuple[str, ...] = ()
    files: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Choices:
    """Options of a file for an engine; None leaves one to the exporter.

    ``size`` is in bytes of the buffer, ``chunk`` in bytes of the longest chunk; ``chunks`` is their number,
    ``max_blocks`` the most thread blocks of a GPU. ``protocol`` is ``simple`` (flags beside the data) or ``ll`` (a flag
    in each packet). ``runtime`` selects the limits if an engine has several runtimes.
    """

    size: int | None = None
    max_blocks: int | None = None
    chunks: int | None = None
    chunk: int | None = None
    protocol: str | None = None
    runtime: str | None = None


DEFAULT_CHOICES = Choices()
"""No option given."""


def one_server(topology: Topology, name: str | None, what: str) -> Topology:
    """Return the devices of a server and the links between them.

    ``name`` may be None if only one server has GPUs. ``what`` names the file in the message of a UsageError.
    """
    topology = merged(topology)
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

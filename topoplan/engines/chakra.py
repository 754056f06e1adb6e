"""Export a plan as execution traces of Chakra, which ASTRA-sim runs as a custom collective algorithm.

One file for each rank, for one size of the buffer: a node sends for each chunk on each tree edge that leaves the rank,
and one receives for each that comes. They are the rows of the transfer table: chunks of shards begin on the same bytes,
and a send waits for the rows before it that end at its rank. Additions take no time here, as in our own model; routes
are the simulator's.

A file is a sequence of messages of protobuf, each after its length (``schema/protobuf/et_def.proto`` of Chakra): the
version, then the nodes. ASTRA-sim takes them as ``"all-reduce-implementation-custom": ["prefix"]`` with the files
``prefix.<rank>.et``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from topoplan.engines.exported import Choices, Exported
from topoplan.errors import UsageError
from topoplan.model.closed_form import chunk_counts, pipeline
from topoplan.model.dataflow import dataflow
from topoplan.plans.plan import Plan
from topoplan.plans.shards import ALIGNMENT
from topoplan.units import format_size

SEND, RECEIVE = 5, 6
"""``COMM_SEND_NODE`` and ``COMM_RECV_NODE``."""

VERSION = "0.0.4"

MAX_ROWS = 1_000_000
"""Largest number of chunks on edges that are written: a simulator would not finish with more."""


@dataclass(frozen=True, slots=True)
class _ChakraRow:
    """A chunk on an edge, and the rows that have to end at its source before."""

    source: int
    destination: int
    size: int
    name: str
    after: tuple[int, ...]


def chakra_traces(plan: Plan, choices: Choices) -> Exported:
    """Export the traces of all ranks.

    A UsageError says that the size is missing or does not divide among the ranks, that the chunks are too many, or that
    the plan moves entries.

    >>> import topoplan
    >>> plan = topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7])
    >>> made = chakra_traces(plan, Choices(size=1 << 20, chunk=1 << 18))
    >>> [(end, len(content)) for end, content in made.files][:2]
    [('.0.et', 848), ('.1.et', 1284)]
    """
    if choices.size is None:
        raise UsageError(
            "a trace is for one size of the buffer; give it with --size, for example --size 64MB"
        )
    if plan.sparse:
        raise UsageError(
            "a trace has no node for entries of index and value; export a plan that moves elements"
        )
    rows = list(_rows(plan, choices.size, choices.chunk))
    nodes: list[list[bytes]] = [[_text(1, VERSION)] for _ in plan.ranks]
    for number, row in enumerate(rows):
        send, receive = 2 * number + 1, 2 * number + 2
        after = tuple(2 * one + 2 for one in row.after)
        nodes[row.source].append(_node(send, SEND, row, number, after))
        nodes[row.destination].append(_node(receive, RECEIVE, row, number, ()))
    files = tuple(
        (f".{rank}.et", b"".join(_varint(len(node)) + node for node in own)) for rank, own in enumerate(nodes)
    )
    note = (
        f"{len(rows)} messages for a buffer of {format_size(choices.size)}, which the files fix; ASTRA-sim takes them "
        "as a custom implementation, whose prefix is their name without number"
    )
    return Exported("", (note,), files)


def _rows(plan: Plan, size: int, chunk: int | None) -> Iterator[_ChakraRow]:
    """Yield the rows chunk by chunk, in each the edges of all shards in an order in which they can run."""
    count = size * plan.buffers
    if count % plan.blocks:
        raise UsageError(f"{size} bytes cannot be divided among {len(plan.ranks)} ranks; change --size")
    plan = replace(plan, shards=tuple(plan.shards))
    flow = dataflow(plan)
    bounds = plan.bounds(count)
    lengths = [stop - start for start, stop in pairwise(bounds)]
    if chunk is None:
        counts = chunk_counts(pipeline(flow), size, None)
        chunk = max(-(-length // count) for length, count in zip(lengths, counts, strict=True))
    chunk = max(1, -(-chunk // ALIGNMENT)) * ALIGNMENT
    chunks = [-(-length // chunk) for length in lengths]
    total = sum(chunks[hop.shard] for hop in flow.hops)
    if total > MAX_ROWS:
        raise UsageError(
            f"{total} messages are more than {MAX_ROWS}; give a larger --chunk or a smaller --size"
        )
    number = 0
    row_of: dict[int, int] = {}
    for turn in range(max(chunks, default=0)):
        for place, hop in enumerate(flow.hops):
            if turn >= chunks[hop.shard]:
                continue
            row_of[place] = number
            number += 1
            yield _ChakraRow(
                hop.src,
                hop.dst,
                min(chunk, lengths[hop.shard] - turn * chunk),
                f"shard {hop.shard} stage {hop.stage} chunk {turn}",
                tuple(row_of[before] for before in hop.waits),
            )


def _node(number: int, kind: int, row: _ChakraRow, tag: int, after: tuple[int, ...]) -> bytes:
    """Encode a node: its number, name and kind, the nodes that it waits for, and its attributes."""
    depends = b"".join(map(_varint, after))
    attributes = (
        _text(1, "comm_size") + _key(9, 0) + _varint(row.size),
        _text(1, "comm_src") + _key(7, 0) + _varint(row.source),
        _text(1, "comm_dst") + _key(7, 0) + _varint(row.destination),
        _text(1, "comm_tag") + _key(7, 0) + _varint(tag),
        _text(1, "is_cpu_op") + _key(27, 0) + _varint(0),
    )
    return b"".join(
        (
            _key(1, 0) + _varint(number),
            _text(2, row.name),
            _key(3, 0) + _varint(kind),
            _bytes(5, depends) if after else b"",
            *(_bytes(10, attribute) for attribute in attributes),
        )
    )


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def _key(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _bytes(field: int, content: bytes) -> bytes:
    return _key(field, 2) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode())

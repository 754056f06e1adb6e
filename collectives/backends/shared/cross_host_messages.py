"""The messages of a rank: its rows that cross hosts, numbered in the order of its program."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from collectives.backends.shared.chunk_values import Instances
from collectives.backends.shared.instructions import Message
from collectives.backends.shared.total_order import Order
from collectives.lowering.edge_streams import stream_of, streams
from collectives.lowering.transfer_table import TransferTable

Numbers = NDArray[np.int64]


def leaving_rows(table: TransferTable, held: Instances, order: Order, rank: int) -> Numbers:
    """The rows that a rank sends to other hosts, in the order of its program."""
    rows = np.flatnonzero(~held.shared & (table.source == rank))
    return rows[np.argsort(order.send_key[rows])]


def arriving_rows(table: TransferTable, held: Instances, order: Order, rank: int) -> Numbers:
    """The rows that come to a rank from other hosts, in the order of its program."""
    rows = np.flatnonzero(~held.shared & (table.destination == rank))
    return rows[np.argsort(order.join_key[rows])]


def leaving_messages(table: TransferTable, rows: Numbers) -> tuple[Message, ...]:
    """The messages that carry these rows away."""
    stream = stream_of(table)[rows].tolist()
    places = _places(table)
    peers = table.destination[rows].tolist()
    return tuple(
        Message(row, peer, places[number], slice(0, 0), -1, False)
        for row, peer, number in zip(rows.tolist(), peers, stream, strict=True)
    )


def arriving_messages(table: TransferTable, rows: Numbers, *, slot: int) -> tuple[tuple[Message, ...], int]:
    """The messages that bring these rows, and the elements of scratch memory that they need.

    Every stream has as many places as it may run ahead (`Stream.window`), each of ``slot`` elements.
    """
    parts = streams(table)
    stream = stream_of(table)[rows].tolist()
    places = _places(table)
    number_of = {
        (number, chunk): message
        for message, (number, chunk) in enumerate(zip(stream, table.chunk[rows].tolist(), strict=True))
    }
    base: dict[int, int] = {}
    used = 0
    for number in sorted(set(stream)):
        base[number] = used
        used += min(parts[number].window, parts[number].chunks)
    length = (table.stop - table.start)[rows].tolist()
    messages = []
    for message, (number, chunk) in enumerate(number_of):
        window = min(parts[number].window, parts[number].chunks)
        start = (base[number] + chunk % window) * slot
        messages.append(
            Message(
                row=int(rows[message]),
                peer=parts[number].source,
                stream=places[number],
                scratch=slice(start, start + length[message]),
                following=number_of.get((number, chunk + window), -1),
                first=chunk < window,
            )
        )
    return tuple(messages), used * slot


def _places(table: TransferTable) -> dict[int, int]:
    """For each stream its place among those with the same source and destination."""
    seen: dict[tuple[int, int], int] = {}
    places = {}
    for part in streams(table):
        pair = (part.source, part.destination)
        places[part.number] = seen.get(pair, 0)
        seen[pair] = places[part.number] + 1
    return places

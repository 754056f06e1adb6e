"""The frame of a sparse contribution on the wire: a header that tells lengths and formats, then indices, then values.

56 bytes of header, little-endian, with a CRC-32 of their own; both sections are filled up to 8 bytes with zeros. The
header is checked before anything is read by it: a truncated message, or one of another format, never becomes other
numbers.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import UsageError

HEADER = struct.Struct("<2sBBBBBxIIQQQQQ")
"""Magic, version, formats and index width, CRC-32 (of the header with 0 in its place), block, numbers of `Header`."""

_MAGIC, _VERSION = b"TW", 1

_CHECK_AT = 8
"""Where the CRC-32 lies."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a message says of itself.

    Attributes
    ----------
    value_format, value_dtype, index_format : int
        Numbers of the formats, as `filters` lists them.
    index_width : int
        Bytes of an index in memory: 4 or 8.
    block : int
        Values per scale of fixed point; 0 in other formats.
    count, universe : int
        Entries, and elements that they are a selection of.
    index_bytes, value_bytes : int
        Of the two sections, without their filling.
    call : int
        Number of the message between two key caches, from 1 on; 0 without caches.
    """

    value_format: int
    value_dtype: int
    index_format: int
    index_width: int
    block: int
    count: int
    universe: int
    index_bytes: int
    value_bytes: int
    call: int


def frame(header: Header, indices: NDArray[np.uint8], values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """One message of a header and the two sections that it describes."""
    message = np.empty(framed_bytes(len(indices), len(values)), dtype=np.uint8)
    value_format, value_dtype, index_format, index_width, block, *numbers = astuple(header)
    fields = (_MAGIC, _VERSION, value_format, value_dtype, index_format, index_width)
    unchecked = HEADER.pack(*fields, 0, block, *numbers)
    checked = HEADER.pack(*fields, zlib.crc32(unchecked), block, *numbers)
    message[: HEADER.size] = np.frombuffer(checked, dtype=np.uint8)
    start = HEADER.size
    for section in (indices, values):
        stop = start + len(section)
        message[start:stop] = section
        start = HEADER.size + framed_length(stop - HEADER.size)
        message[stop:start] = 0
    return message


def unframe(message: NDArray[np.uint8]) -> tuple[Header, NDArray[np.uint8], NDArray[np.uint8]]:
    """Header, indices and values of a message, the sections as views.

    Bytes behind the message are ignored, so the whole of a larger receive buffer will do.

    Raises
    ------
    UsageError
        Truncated, no message, or the header is corrupt.
    """
    if len(message) < HEADER.size:
        raise corrupt(f"{len(message)} bytes are less than a header")
    raw = message[: HEADER.size].tobytes()
    fields = HEADER.unpack(raw)
    magic, version, check = fields[0], fields[1], fields[6]
    if magic != _MAGIC or version != _VERSION:
        raise corrupt(f"it begins with {message[:3].tobytes()!r}")
    if check != zlib.crc32(raw[:_CHECK_AT] + bytes(4) + raw[_CHECK_AT + 4 :]):
        raise corrupt("the header does not match its checksum")
    header = Header(*fields[2:6], *fields[7:])
    first = HEADER.size + framed_length(header.index_bytes)
    if first + framed_length(header.value_bytes) > len(message):
        raise corrupt(
            f"{header.index_bytes} bytes of indices and {header.value_bytes} of values were sent, "
            f"{len(message) - HEADER.size} came"
        )
    return (
        header,
        message[HEADER.size : HEADER.size + header.index_bytes],
        message[first : first + header.value_bytes],
    )


def framed_length(nbytes: int) -> int:
    """Bytes of a section with its filling."""
    return -(-nbytes // 8) * 8


def framed_bytes(index_bytes: int, value_bytes: int) -> int:
    """Bytes of a message with sections of these lengths.

    Examples
    --------
    >>> framed_bytes(12, 6)
    80
    """
    return HEADER.size + framed_length(index_bytes) + framed_length(value_bytes)


def corrupt(what: str) -> UsageError:
    """The error for a message that cannot be what was sent."""
    return UsageError(f"a sparse message is corrupt: {what}; send it again")


def as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of a vector in little-endian order."""
    return np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).view(np.uint8)

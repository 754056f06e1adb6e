"""Messages of the control channel: JSON objects, each behind its length in four bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Message = Mapping[str, Any]

LONGEST = 1 << 24
"""Bytes of a message; what claims to be longer comes from a stranger."""


def pack(message: Message) -> bytes:
    """A message as bytes.

    Examples
    --------
    >>> pack({"type": "bye"})
    b'\\x00\\x00\\x00\\x0f{"type": "bye"}'
    """
    text = json.dumps(message).encode()
    return len(text).to_bytes(4, "big") + text


class Unpacker:
    """Puts messages together from pieces of a byte stream.

    Examples
    --------
    >>> unpacker, data = Unpacker(), pack({"type": "bye"}) + pack({"type": "ping"})
    >>> unpacker.feed(data[:7]), unpacker.feed(data[7:])
    ([], [{'type': 'bye'}, {'type': 'ping'}])
    """

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that these bytes complete.

        Raises
        ------
        ValueError
            They are no messages of ours.
        """
        self._data += data
        messages = []
        while len(self._data) >= 4:
            length = int.from_bytes(self._data[:4], "big")
            if length > LONGEST:
                raise ValueError(f"a message of {length} bytes")
            if len(self._data) < 4 + length:
                break
            message = json.loads(bytes(self._data[4 : 4 + length]))
            if not isinstance(message, dict) or not isinstance(message.get("type"), str):
                raise ValueError("a message without a type")
            messages.append(message)
            del self._data[: 4 + length]
        return messages

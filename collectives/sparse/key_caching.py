"""Send the digest of an index set that repeats instead of the set; both ends keep the same last few.

Parameter servers call it key caching (Li et al., "Scaling distributed machine learning with the parameter server",
2014, section 5.1). Each direction between two ranks has one cache at either end. Every message is exactly one call,
`remember` or `recall`, at the sender and then at the receiver, with the same arguments. A cache depends on those calls
only, so both ends hold the same sets and drop the same one, the least recently used. A message carries the number of
its call: a lost, doubled or swapped one is noticed before anything is decoded.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import UsageError

DIGEST_BYTES = 16  # two of a billion sets share a digest with a probability of 1e-21


@dataclass(frozen=True, slots=True)
class KnownSet:
    """A set that both ends hold: read-only indices, of `universe` elements."""

    indices: NDArray[Any]
    universe: int


class KeyCache:
    """The last index sets sent from one rank to another; one object at either end, with the same limits.

    Holds at most `sets` sets in at most `nbytes` bytes; a larger set, or one not larger than a digest, is not kept.
    Raises `UsageError` for a number below 1.

    Examples
    --------
    >>> import numpy as np
    >>> sender, receiver = KeyCache(sets=2), KeyCache(sets=2)
    >>> indices = np.array([3, 5, 8, 13, 21], dtype=np.int32)
    >>> sender.digest_of(indices, 100) is None  # so the set itself is sent
    True
    >>> for end in (sender, receiver):
    ...     end.remember(b"as sent", indices, 100)
    >>> digest = sender.digest_of(indices, 100)
    >>> len(digest), receiver.peek(digest).indices
    (16, array([ 3,  5,  8, 13, 21], dtype=int32))
    """

    def __init__(self, *, sets: int = 4, nbytes: int = 1 << 28) -> None:
        if sets < 1 or nbytes < 1:
            raise UsageError(
                f"sets and nbytes of a key cache must be above 0, got {sets} and {nbytes}; choose at least 1 of both"
            )
        self.sets = sets
        self.nbytes = nbytes
        self._known: OrderedDict[bytes, KnownSet] = OrderedDict()
        self._calls = 0
        self._held = 0

    @property
    def calls(self) -> int:
        """Messages so far, which is the number of the next one."""
        return self._calls

    @property
    def held_bytes(self) -> int:
        """Bytes of the sets, at most `nbytes`."""
        return self._held

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Digests of the sets, least recently used first; equal at both ends after the same messages."""
        return tuple(self._known)

    def digest_of(self, indices: NDArray[Any], universe: int) -> bytes | None:
        """Return the digest to send instead of this set, None if it is not held; compares whole sets."""
        for digest, known in reversed(self._known.items()):
            if (
                known.universe == universe
                and known.indices.dtype == indices.dtype
                and np.array_equal(known.indices, indices)
            ):
                return digest
        return None

    def peek(self, digest: bytes) -> KnownSet:
        """Return the set of a digest without a change; UsageError if it is not held, so the ends are out of step."""
        known = self._known.get(digest)
        if known is None:
            raise UsageError(
                f"the key cache does not hold set {digest.hex()}; give both ends caches of the same size, "
                "decode messages once and in order, and after a failure reset both"
            )
        return known

    def check_turn(self, number: int) -> None:
        """Raise UsageError unless the next message has this number."""
        if number != self._calls:
            raise UsageError(
                f"message {number} came to the key cache, which expected {self._calls}; "
                "decode messages once and in order, and after a failure reset both ends"
            )

    def recall(self, digest: bytes) -> None:
        """Count a message with this digest, and mark its set as used last."""
        self.peek(digest)
        self._known.move_to_end(digest)
        self._calls += 1

    def remember(self, section: bytes | memoryview, indices: NDArray[Any], universe: int) -> None:
        """Count a message with a whole set, and keep the set.

        `section` is the set as encoded in the message. Read-only indices are kept without a copy.
        """
        self._calls += 1
        if not DIGEST_BYTES < indices.nbytes <= self.nbytes:
            return
        kind = struct.pack("<QQB", len(indices), universe, indices.dtype.itemsize)
        digest = blake2b(section, digest_size=DIGEST_BYTES, key=kind).digest()
        if digest in self._known:
            self._known.move_to_end(digest)
            return
        if indices.flags.writeable or not indices.flags.owndata:
            indices = indices.copy()
            indices.flags.writeable = False
        self._known[digest] = KnownSet(indices, universe)
        self._held += indices.nbytes
        while len(self._known) > self.sets or self._held > self.nbytes:
            self._held -= self._known.popitem(last=False)[1].indices.nbytes

    def reset(self) -> None:
        """Clear the cache, at both ends or at none."""
        self._known.clear()
        self._calls = self._held = 0

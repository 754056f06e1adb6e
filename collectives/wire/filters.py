"""Wire filters composed: how the indices and values of a sparse contribution become one message, and back.

Every filter of indices (packing, key caching) is lossless, so a format is lossless if that of its values is.
The message describes itself (`message`); the receiver's format must be the sender's, and everything that a header
tells is checked against it before it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from collectives.wire.index_packing import (
    check_indices,
    pack_indices,
    packed_bytes_at_most,
    packed_bytes_expected,
    unpack_indices,
)
from collectives.wire.key_caching import KeyCache
from collectives.wire.message import Header, as_bytes, corrupt, frame, framed_bytes, unframe
from collectives.wire.value_section import (
    FIXED_BITS,
    VALUE_DTYPES,
    VALUE_FORMATS,
    ValueFormat,
    check_given,
    keeps,
    section_bytes,
    values_from_section,
    values_to_section,
)
from topoplan.errors import UsageError

IndexFormat = Literal["plain", "packed"]

_INDEX_FORMATS = ("plain", "packed", "repeated")
"""Their places are their numbers in a header; a repeated set is the digest of one sent before."""


@dataclass(frozen=True, slots=True)
class WireFormat:
    """How sparse contributions travel; the same at both ends.

    Attributes
    ----------
    values : {"as given", "float32", "float16", "bfloat16", "fixed8", "fixed16"}
        "fixed8" and "fixed16" round at random without bias, the others to nearest; in a block with a value that is
        not finite all values arrive as NaN.
    indices : {"plain", "packed"}
        int32 or int64 as given, or about log2(1/density) + 1.5 bits each.
    cache_keys : bool
        Send 16 bytes for a set that went to this peer before.
    seed : int
        Of the random rounding.
    block : int
        Values per scale of fixed point.

    Raises
    ------
    UsageError
        An unknown format, or a number out of range.

    Examples
    --------
    >>> import numpy as np
    >>> wire = WireFormat(values="bfloat16")
    >>> message = wire.encode(np.array([7, 40, 41]), np.float32([1.5, -2, 0.25]), 1000)
    >>> len(message), wire.encoded_bytes_at_most(3, 1000, np.float32)
    (104, 104)
    >>> wire.decode(message)
    (array([ 7, 40, 41]), array([ 1.5 , -2.  ,  0.25], dtype=float32))
    """

    values: ValueFormat = "as given"
    indices: IndexFormat = "packed"
    cache_keys: bool = False
    seed: int = 0
    block: int = 256

    def __post_init__(self) -> None:
        for field, known in (("values", VALUE_FORMATS), ("indices", get_args(IndexFormat))):
            if getattr(self, field) not in known:
                raise UsageError(
                    f"{field} {getattr(self, field)!r} on the wire; choose one of {', '.join(known)}"
                )
        if not 0 <= self.seed < 1 << 64 or not 0 < self.block < 1 << 32:
            raise UsageError(
                f"seed {self.seed} and block {self.block}; choose 0 to 2^64 - 1 and 1 to 2^32 - 1"
            )

    @property
    def lossless(self) -> bool:
        """Whether values of every dtype come back bit for bit; indices always do."""
        return self.values == "as given"

    def lossless_for(self, dtype: Any) -> bool:
        """Whether values of this dtype come back unchanged: float16 does in "float16" and "float32" too."""
        return keeps(self.values, np.dtype(dtype))

    def encoded_bytes_at_most(self, count: int, universe: int, dtype: Any, *, index_dtype: Any = None) -> int:
        """The most bytes of a message with `count` entries; without packed indices or cached keys the exact number.

        Parameters
        ----------
        count, universe : int
        dtype : dtype
            Of the values as given.
        index_dtype : dtype, optional
            Of the indices as given; without it int32 up to 2^31 elements, int64 beyond.
        """
        check_given(self.values, np.dtype(dtype))
        width = np.dtype(index_dtype).itemsize if index_dtype else 4 if universe <= 1 << 31 else 8
        packed = self.indices == "packed"
        index_bytes = packed_bytes_at_most(count, universe) if packed else count * width
        return framed_bytes(index_bytes, section_bytes(self.values, np.dtype(dtype), count, self.block))

    def encoded_bytes_expected(self, count: int, universe: int, dtype: Any) -> float:
        """The mean length over random selections, for a cost model; a repeated set is shorter."""
        most = self.encoded_bytes_at_most(count, universe, dtype)
        if self.indices == "plain":
            return most
        return most - packed_bytes_at_most(count, universe) + packed_bytes_expected(count, universe)

    def encode(
        self,
        indices: NDArray[Any],
        values: NDArray[Any],
        universe: int,
        *,
        step: int = 0,
        stream: int = 0,
        keys: KeyCache | None = None,
    ) -> NDArray[np.uint8]:
        """One message of one contribution.

        Parameters
        ----------
        indices : ndarray of int32 or int64, shape (k,)
            Strictly ascending, in [0, universe).
        values : ndarray, shape (k,)
            float16, float32 or float64; "as given" also takes complex and whole numbers, and bfloat16 as uint16.
        universe : int
            Elements of the dense array.
        step, stream : int
            What random rounding depends on beside the seed: number of the step, rank of the sender.
        keys : KeyCache, optional
            The sender's cache for this receiver, given if and only if `cache_keys`.

        Raises
        ------
        UsageError
            Indices out of order or range, values that the format cannot carry, a cache missing or superfluous.
            The cache is then as before.
        """
        self._check_keys(keys)
        indices, values = np.asarray(indices), np.asarray(values)
        if values.shape != indices.shape:
            raise UsageError(
                f"indices of shape {indices.shape} and values of shape {values.shape}; give one value per index"
            )
        digest = None if keys is None else keys.digest_of(indices, universe)
        call = 0 if keys is None else keys.calls + 1
        if digest is not None:
            index_format, index_section = 2, np.frombuffer(digest, dtype=np.uint8)
        elif self.indices == "packed":
            index_format, index_section = 1, pack_indices(indices, universe)
        else:
            check_indices(indices, universe)
            index_format, index_section = 0, as_bytes(indices)
        value_section = values_to_section(
            self.values, values, seed=self.seed, step=step, stream=stream, block=self.block
        )
        header = Header(
            VALUE_FORMATS.index(self.values),
            VALUE_DTYPES.index(values.dtype),
            index_format,
            indices.dtype.itemsize,
            self.block if self.values in FIXED_BITS else 0,
            len(indices),
            universe,
            len(index_section),
            len(value_section),
            call,
        )
        message = frame(header, index_section, value_section)
        if keys is not None:
            if digest is not None:
                keys.recall(digest)
            else:
                keys.remember(index_section.data, indices, universe)
        return message

    def decode(
        self, message: NDArray[np.uint8], *, universe: int | None = None, keys: KeyCache | None = None
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Indices and values of a message, in the dtypes in which they were given.

        Parameters
        ----------
        message : ndarray of uint8
            What `encode` of the same format made; bytes behind it are ignored.
        universe : int, optional
            What the receiver expects; another is refused.
        keys : KeyCache, optional
            The receiver's cache for this sender, given if and only if `cache_keys`.

        Returns
        -------
        indices : ndarray of int32 or int64, shape (k,)
            Read-only where keys are cached: the cache holds them too.
        values : ndarray, shape (k,)

        Raises
        ------
        UsageError
            The message is truncated, corrupt, of another format or universe, or out of turn. The cache is then as
            before.
        """
        self._check_keys(keys)
        message = np.ascontiguousarray(message, dtype=np.uint8).reshape(-1)
        header, index_section, value_section = unframe(message)
        self._check_header(header, universe)
        if keys is not None:
            keys.check_turn(header.call - 1)
        values = values_from_section(
            self.values, value_section, VALUE_DTYPES[header.value_dtype], header.count, self.block
        )
        indices = self._indices(header, index_section, keys)
        if len(indices) != header.count or indices.dtype.itemsize != header.index_width:
            raise corrupt(f"{len(indices)} indices of {indices.dtype} came, {header.count} were sent")
        if keys is not None:
            if header.index_format == 2:
                keys.recall(index_section.tobytes())
            else:
                indices.flags.writeable = False
                keys.remember(index_section.data, indices, header.universe)
        return indices, values

    def _indices(self, header: Header, section: NDArray[np.uint8], keys: KeyCache | None) -> NDArray[Any]:
        """The set that a section packs, names or spells out, for the header's universe."""
        if header.index_format == 1:
            return unpack_indices(section, expected_universe=header.universe)
        if keys is not None and header.index_format == 2:
            known = keys.peek(section.tobytes())
            if known.universe != header.universe:
                raise corrupt(f"its set is of {known.universe} elements, its values are of {header.universe}")
            return known.indices
        if header.index_width not in (4, 8) or len(section) != header.count * header.index_width:
            raise corrupt(f"{header.count} indices do not take {len(section)} bytes")
        received = np.frombuffer(section.tobytes(), dtype=f"<i{header.index_width}")
        indices = received.astype(np.int32 if header.index_width == 4 else np.int64)
        check_indices(indices, header.universe)
        return indices

    def _check_keys(self, keys: KeyCache | None) -> None:
        if self.cache_keys != (keys is not None):
            raise UsageError(
                "this wire format caches keys; give the cache of this peer"
                if self.cache_keys
                else "this wire format caches no keys; give no cache, or set cache_keys"
            )

    def _check_header(self, header: Header, universe: int | None) -> None:
        """A header whose checksum holds may still be that of another format."""
        expected = [_INDEX_FORMATS.index(self.indices)] + [2] * self.cache_keys
        if (
            header.value_format != VALUE_FORMATS.index(self.values)
            or header.index_format not in expected
            or (header.call > 0) != self.cache_keys
            or header.value_dtype >= len(VALUE_DTYPES)
            or header.block != (self.block if self.values in FIXED_BITS else 0)
        ):
            raise UsageError(
                f"a message of value format {header.value_format}, index format {header.index_format} block "
                f"{header.block} and cache number {header.call} came to {self}; give both ends the same wire format"
            )
        if universe is not None and header.universe != universe:
            raise UsageError(
                f"a message for {header.universe} elements came where {universe} are expected; "
                "all ranks must reduce arrays of one shape"
            )

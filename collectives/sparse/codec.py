"""Encode the indices and values of a sparse contribution as one message, and decode it.

A message is a header of 56 bytes (little-endian, with its own CRC-32) with lengths and formats, then the section of
indices, then that of values, both filled up to 8 bytes with zeros. The header is checked before anything is read by
it: a truncated message, or one of another format, never becomes other numbers. The receiver's format must be the
sender's. Filters of indices (packing, key caching) are lossless, so a format is lossless if that of its values is.

Values travel as given, rounded to a narrower float, or in fixed point: all scales (float32), then all codes. The scale
of a block with a value that is not finite is NaN, and so are all its values when they are read.

An index set that repeats is sent as its digest; parameter servers call it key caching (Li et al., "Scaling distributed
machine learning with the parameter server", 2014, section 5.1). Each direction between two ranks has one cache at
either end. Every message is exactly one call, `remember` or `recall`, at the sender and then at the receiver, with the
same arguments. A cache depends on those calls only, so both ends hold the same sets and drop the same one, the least
recently used. A message carries the number of its call: a lost, doubled or swapped one is noticed before anything is
decoded.
"""

from __future__ import annotations

import struct
import zlib
from collections import OrderedDict
from dataclasses import astuple, dataclass
from hashlib import blake2b
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from collectives.sparse.index_packing import check_indices, pack_indices, packed_bytes_at_most, unpack_indices
from collectives.sparse.quantization import (
    CODE_DTYPES,
    WIRE_DTYPES,
    FixedPoint,
    FloatFormat,
    from_fixed_point,
    narrow,
    to_fixed_point,
    widen,
)
from collectives.tables.numpy_arrays import dtype_name
from topoplan.errors import UsageError
from topoplan.units import check_type, check_whole

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


MESSAGE_HEADER = struct.Struct("<2sBBBBBxIIQQQQQ")
"""Magic, version, formats and index width, CRC-32 (of the header with 0 in its place), block, numbers of `Header`."""

_MAGIC, _VERSION = b"TW", 1

_CHECK_AT = 8  # offset of the CRC-32


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a message.

    `value_format`, `value_dtype` and `index_format` are the formats' numbers. `index_width` is in bytes, 4 or 8.
    `block` is in values per scale of fixed point, 0 in other formats. `count` entries are a selection of `universe`
    elements. `index_bytes` and `value_bytes` are the lengths of the sections, without padding. `call` is the number of
    the message between two key caches, from 1; 0 without caches.
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
    """Return the message of a header and its two sections."""
    message = np.empty(framed_bytes(len(indices), len(values)), dtype=np.uint8)
    value_format, value_dtype, index_format, index_width, block, *numbers = astuple(header)
    fields = (_MAGIC, _VERSION, value_format, value_dtype, index_format, index_width)
    unchecked = MESSAGE_HEADER.pack(*fields, 0, block, *numbers)
    checked = MESSAGE_HEADER.pack(*fields, zlib.crc32(unchecked), block, *numbers)
    message[: MESSAGE_HEADER.size] = np.frombuffer(checked, dtype=np.uint8)
    start = MESSAGE_HEADER.size
    for section in (indices, values):
        stop = start + len(section)
        message[start:stop] = section
        start = MESSAGE_HEADER.size + framed_length(stop - MESSAGE_HEADER.size)
        message[stop:start] = 0
    return message


def unframe(message: NDArray[np.uint8]) -> tuple[Header, NDArray[np.uint8], NDArray[np.uint8]]:
    """Return header, indices and values of a message, the sections as views; UsageError if it is truncated or corrupt.

    Bytes after the message are ignored, so a whole larger receive buffer can be passed.
    """
    if len(message) < MESSAGE_HEADER.size:
        raise corrupt(f"{len(message)} bytes are less than a header")
    raw = message[: MESSAGE_HEADER.size].tobytes()
    fields = MESSAGE_HEADER.unpack(raw)
    magic, version, check = fields[0], fields[1], fields[6]
    if magic != _MAGIC or version != _VERSION:
        raise corrupt(f"it begins with {message[:3].tobytes()!r}")
    if check != zlib.crc32(raw[:_CHECK_AT] + bytes(4) + raw[_CHECK_AT + 4 :]):
        raise corrupt("the header does not match its checksum")
    header = Header(*fields[2:6], *fields[7:])
    first = MESSAGE_HEADER.size + framed_length(header.index_bytes)
    if first + framed_length(header.value_bytes) > len(message):
        raise corrupt(
            f"{header.index_bytes} bytes of indices and {header.value_bytes} of values were sent, "
            f"{len(message) - MESSAGE_HEADER.size} came"
        )
    return (
        header,
        message[MESSAGE_HEADER.size : MESSAGE_HEADER.size + header.index_bytes],
        message[first : first + header.value_bytes],
    )


def framed_length(nbytes: int) -> int:
    """Return the bytes of a section with its padding."""
    return -(-nbytes // 8) * 8


def framed_bytes(index_bytes: int, value_bytes: int) -> int:
    """Return the bytes of a message with sections of these lengths.

    >>> framed_bytes(12, 6)
    80
    """
    return MESSAGE_HEADER.size + framed_length(index_bytes) + framed_length(value_bytes)


def corrupt(what: str) -> UsageError:
    """Return the error for a corrupt message."""
    return UsageError(f"a sparse message is corrupt: {what}; send it again")


def as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of a vector in little-endian order."""
    return np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).view(np.uint8)


ValueFormat = Literal["as given", "float32", "float16", "bfloat16", "fixed8", "fixed16"]

VALUE_FORMATS: tuple[ValueFormat, ...] = ("as given", "float32", "float16", "bfloat16", "fixed8", "fixed16")
"""The header has the index of the format."""

VALUE_DTYPES: tuple[np.dtype[Any], ...] = (
    *(np.dtype(f"float{bits}") for bits in (16, 32, 64)),
    *(np.dtype(f"complex{bits}") for bits in (64, 128)),
    *(np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)),
    *(np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)),
)
"""dtypes of values; the header has the index."""

FIXED_BITS = {"fixed8": 8, "fixed16": 16}  # bits of a code, by format

_KEPT_BY = {"float32": ("float16", "float32"), "float16": ("float16",)}


def keeps(form: ValueFormat, dtype: np.dtype[Any]) -> bool:
    """Return whether every value of the dtype is decoded unchanged.

    Infinities are, and NaN as NaN; if a format is wider than the dtype, a signalling NaN becomes quiet.

    >>> keeps("float32", np.dtype(np.float16)), keeps("float16", np.dtype(np.float32))
    (True, False)
    """
    return form == "as given" or dtype.name in _KEPT_BY.get(form, ())


def section_bytes(form: ValueFormat, dtype: np.dtype[Any], count: int, block: int) -> int:
    """Return the bytes of the values' section, which depend on the count only.

    >>> section_bytes("fixed8", np.dtype(np.float32), 1000, 256)
    1016
    """
    if form in FIXED_BITS:
        return count * FIXED_BITS[form] // 8 + 4 * -(-count // block)
    return count * (dtype if form == "as given" else WIRE_DTYPES[form]).itemsize


def check_given(form: ValueFormat, dtype: np.dtype[Any]) -> None:
    """Raise UsageError unless values of this dtype can be sent in this format."""
    if dtype not in VALUE_DTYPES:
        raise UsageError(f"values of {dtype} cannot be sent; send bfloat16 as uint16 bits, others as numbers")
    if form != "as given" and dtype.kind != "f":
        raise UsageError(f"values of {dtype} have no {form} form; send them as given")


def values_to_section(
    form: ValueFormat, values: NDArray[Any], *, seed: int, step: int, stream: int, block: int
) -> NDArray[np.uint8]:
    """Encode values."""
    check_given(form, values.dtype)
    if form == "as given":
        return as_bytes(values)
    if form in FIXED_BITS:
        finite = np.isfinite(values)
        fixed = to_fixed_point(
            np.where(finite, values, values.dtype.type(0)),
            bits=FIXED_BITS[form],
            seed=seed,
            step=step,
            stream=stream,
            block=block,
        )
        fixed.scales[np.flatnonzero(~finite) // block] = np.nan
        return np.concatenate([as_bytes(fixed.scales), as_bytes(fixed.codes)])
    return as_bytes(narrow(values, cast(FloatFormat, form)))


def values_from_section(
    form: ValueFormat, section: NDArray[np.uint8], dtype: np.dtype[Any], count: int, block: int
) -> NDArray[Any]:
    """Decode values to their dtype; UsageError if the section does not have the length for the count."""
    if len(section) != section_bytes(form, dtype, count, block):
        raise corrupt(f"{count} values of {dtype} as {form} do not take {len(section)} bytes")
    if form == "as given":
        return _from_bytes(section, dtype)
    if form in FIXED_BITS:
        scales = _from_bytes(section[: 4 * -(-count // block)], np.dtype(np.float32))
        codes = _from_bytes(section[scales.nbytes :], CODE_DTYPES[FIXED_BITS[form]])
        with np.errstate(over="ignore", under="ignore"):
            return from_fixed_point(FixedPoint(codes, scales, block)).astype(dtype, copy=False)
    return widen(_from_bytes(section, WIRE_DTYPES[form]), cast(FloatFormat, form), dtype)


def _from_bytes(section: NDArray[np.uint8], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a new vector, aligned and in the machine's byte order."""
    return np.frombuffer(section.tobytes(), dtype=dtype.newbyteorder("<")).astype(dtype, copy=True)


IndexFormat = Literal["plain", "packed"]

_INDEX_FORMATS = ("plain", "packed", "repeated")
"""The header has the index of the format; a repeated set is the digest of an earlier one."""


@dataclass(frozen=True, slots=True)
class WireFormat:
    """The encoding of sparse contributions; the same at both ends.

    Attributes
    ----------
    values : {"as given", "float32", "float16", "bfloat16", "fixed8", "fixed16"}
        "fixed8" and "fixed16" round at random without bias, the others to nearest; in a block with a value that is not
        finite all values are decoded as NaN.
    indices : {"plain", "packed"}
        int32 or int64 as given, or about log2(1/density) + 1.5 bits each.
    cache_keys : bool
        Send 16 bytes for a set that this peer already has.
    seed : int
        Seed of the random rounding.
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
                raise UsageError(f"{field} must be one of {', '.join(known)}, got {getattr(self, field)!r}")
        check_whole("seed", self.seed, most=(1 << 64) - 1)
        check_whole("block", self.block, least=1, most=(1 << 32) - 1)

    @property
    def lossless(self) -> bool:
        """Whether values of every dtype are decoded bit for bit; indices always are."""
        return self.values == "as given"

    def lossless_for(self, dtype: Any) -> bool:
        """Return whether values of this dtype are decoded unchanged: float16 also from "float16" and "float32"."""
        return keeps(self.values, np.dtype(dtype_name(dtype)))

    def encoded_bytes_at_most(self, count: int, universe: int, dtype: Any, *, index_dtype: Any = None) -> int:
        """Return the most bytes of a message with `count` entries; exact without packed indices and cached keys.

        `dtype` is that of the values. Without `index_dtype`, indices are int32 up to 2^31 elements and int64 beyond.
        """
        check_whole("count", count)
        check_whole("universe", universe)
        dtype = np.dtype(dtype_name(dtype))
        check_given(self.values, dtype)
        if index_dtype is None:
            index_dtype = np.int32 if universe <= 1 << 31 else np.int64
        width = np.dtype(dtype_name(index_dtype)).itemsize
        packed = self.indices == "packed"
        index_bytes = packed_bytes_at_most(count, universe) if packed else count * width
        return framed_bytes(index_bytes, section_bytes(self.values, dtype, count, self.block))

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
        """Return the message of one contribution.

        Parameters
        ----------
        indices : ndarray of int32 or int64, shape (k,)
            Strictly ascending, in [0, universe).
        values : ndarray, shape (k,)
            float16, float32 or float64; "as given" also takes complex and whole numbers, and bfloat16 as uint16.
        universe : int
            Elements of the dense array.
        step, stream : int
            Seeds of random rounding besides `seed`: number of the step, rank of the sender.
        keys : KeyCache, optional
            The sender's cache for this receiver, given if and only if `cache_keys`.

        Raises
        ------
        UsageError
            Indices out of order or range, values that the format cannot encode, a cache missing or superfluous. The
            cache does not change.
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
        """Return indices and values of a message, in the dtypes of `encode`.

        Parameters
        ----------
        message : ndarray of uint8
            From `encode` of the same format; bytes after it are ignored.
        universe : int, optional
            The expected number of elements; another one is refused.
        keys : KeyCache, optional
            The receiver's cache for this sender, given if and only if `cache_keys`.

        Returns
        -------
        indices : ndarray of int32 or int64, shape (k,)
            Read-only if keys are cached: the cache holds them too.
        values : ndarray, shape (k,)

        Raises
        ------
        UsageError
            The message is truncated, corrupt, of another format or universe, or out of turn. The cache does not
            change.
        """
        self._check_keys(keys)
        check_type("message", message, np.ndarray, bytearray, memoryview, remedy="give what encode returned")
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
        """Return the set of a section: packed, named by its digest, or plain."""
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

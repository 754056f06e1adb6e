"""What sparse gradients look like on the wire: packed indices, narrower values, repeated index sets."""

from collectives.wire.filters import WireFormat
from collectives.wire.fixed_point import FixedPoint, from_fixed_point, largest_magnitudes, to_fixed_point
from collectives.wire.index_packing import (
    pack_indices,
    packed_bytes_at_most,
    packed_bytes_expected,
    unpack_indices,
)
from collectives.wire.key_caching import KeyCache
from collectives.wire.value_formats import narrow, overflows, widen

__all__ = [
    "FixedPoint",
    "KeyCache",
    "WireFormat",
    "from_fixed_point",
    "largest_magnitudes",
    "narrow",
    "overflows",
    "pack_indices",
    "packed_bytes_at_most",
    "packed_bytes_expected",
    "to_fixed_point",
    "unpack_indices",
    "widen",
]

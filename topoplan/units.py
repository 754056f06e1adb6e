"""Types of arguments, units, and the one place where they are converted.

Inside topoplan bytes and seconds are bare numbers and bandwidth is GB/s (1e9 bytes per second).
Gigabits per second appear only at the edges (``--nic-bandwidth``), ``400Gb/s`` and sizes such as ``64MB`` only in text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from numbers import Integral, Real
from operator import index
from typing import Any, TypeGuard

from topoplan.errors import UsageError

SURROGATES = re.compile("[\ud800-\udfff]")
"""Surrogates, which JSON escapes can express and no file can hold."""

TOLERANCE = 1e-9
"""Relative tolerance of every comparison between rates that went through floating point."""

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT]?)(i?)B?)?", re.IGNORECASE)
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def is_real(value: object) -> TypeGuard[float]:
    """Return whether a value is a number of Python or numpy that can be compared, and not a bool.

    >>> [is_real(value) for value in (2, 0.5, float("nan"), True, "2", None)]
    [True, True, True, False, False, False]
    """
    return isinstance(value, (float, int, Real)) and not isinstance(value, bool)


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer of Python or numpy, and not a bool."""
    return isinstance(value, (int, Integral)) and not isinstance(value, bool)


def shortened(value: object) -> str:
    """Return an argument as a message shows it: a short value as it is written, else its type.

    >>> shortened("gpu0-gpu3=5"), shortened([2, 4]), shortened(list(range(100)))
    ("'gpu0-gpu3=5'", '[2, 4]', 'list')
    """
    plain = value is None or isinstance(value, (str, bytes, Real, list, tuple, dict))
    text = repr(value) if plain else ""
    return text if 0 < len(text) <= 60 and text.isprintable() else type(value).__name__


def check_type(name: str, value: object, *types: type, remedy: str) -> None:
    """Raise UsageError unless an argument is of one of these types."""
    if not isinstance(value, types):
        kinds = " or ".join("None" if kind is type(None) else kind.__name__ for kind in types)
        raise UsageError(f"{name} must be of type {kinds}, got {shortened(value)}; {remedy}")


def check_whole(name: str, value: object, *, least: int = 0, most: int | None = None) -> None:
    """Raise UsageError unless an argument is a whole number in a range."""
    if not is_whole(value) or value < least or (most is not None and value > most):
        limits = f"{least} or more" if most is None else f"from {least} to {most}"
        whole = "" if is_whole(value) else "a whole number "
        raise UsageError(f"{name} must be {whole}{limits}, got {shortened(value)}")


def check_function(name: str, value: object) -> None:
    """Raise UsageError unless an argument can be called."""
    if not callable(value):
        raise UsageError(f"{name} must be a function, got {shortened(value)}; give one, or leave it out")


def names_given(name: str, value: object, *, example: str) -> tuple[str, ...]:
    """Return the texts of an argument, each once and in order; UsageError unless it is a sequence of texts.

    >>> names_given("links", ["gpu0-gpu3", "gpu0-gpu3"], example="gpu0-gpu3")
    ('gpu0-gpu3',)
    """
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        given = tuple(value)
        if all(isinstance(one, str) for one in given):
            return tuple(dict.fromkeys(given))
        value = list(given)
    raise UsageError(f"{name} must be a sequence of names, got {shortened(value)}; write [{example!r}]")


def numbers_given(name: str, value: object) -> tuple[int, ...]:
    """Return the whole numbers of an argument, each once and in order; UsageError unless it is a sequence of them."""
    given = tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(map(is_whole, given)):
        raise UsageError(f"{name} must be a sequence of whole numbers, got {shortened(value)}; write [0, 1]")
    return tuple(dict.fromkeys(given))


def speeds_given(value: object) -> Mapping[str, float]:
    """Return speeds by link; UsageError unless they are a mapping from names to numbers."""
    given: Mapping[Any, Any] = value if isinstance(value, Mapping) else {None: value}
    for name, speed in given.items():
        if not isinstance(name, str):
            raise UsageError(f"speeds must be GB/s by link, got {shortened(value)}; write {{'gpu0-gpu3': 5}}")
        if not is_real(speed):
            raise UsageError(
                f"{name}: {shortened(speed)} is not a bandwidth in GB/s above zero; give a number"
            )
    return given


def exact(bandwidth: float) -> Fraction:
    """Return the rational number that a bandwidth is written as: 25.781 is 25781/1000, not its binary neighbour.

    >>> exact(25.781)
    Fraction(25781, 1000)
    """
    return Fraction(repr(float(bandwidth)))


def nearest_float(value: Fraction) -> float:
    """Return the float nearest to an exact rate; infinity beyond the range of floats.

    >>> nearest_float(Fraction(600, 7)), nearest_float(Fraction(10) ** 400)
    (85.71428571428571, inf)
    """
    try:
        return float(value)
    except OverflowError:
        return math.inf


def summed(bandwidths: Iterable[float]) -> float:
    """Return the sum of bandwidths as they are written: sums of floats miss the last digit.

    >>> summed([25.781, 25.781, 25.781]), 25.781 + 25.781 + 25.781
    (77.343, 77.34299999999999)
    """
    return nearest_float(sum(map(exact, bandwidths), Fraction(0)))


def several(count: int, bandwidth: float) -> float:
    """Return the bandwidth of equal wires together, exact as `summed`."""
    return nearest_float(count * exact(bandwidth))


def shown(value: Fraction) -> str:
    """Return a rational number as text: in full if that is short.

    >>> shown(Fraction(1, 6)), shown(Fraction(1, 3**80))
    ('1/6', 'about 6.7654957e-39')
    """
    if max(abs(value.numerator), value.denominator) < 1 << 64:
        return str(value)
    return f"about {nearest_float(value):.9g}"


def entry_share(density: float, *, entry_bits: float = 64, element_bits: int = 32) -> Fraction:
    """Return the bytes of entries for each byte of elements.

    ``density`` is the share of the elements that are chosen, above 0 and at most 1; ``entry_bits`` are those of an
    index and a value as they travel.

    >>> entry_share(0.01)
    Fraction(1, 50)
    """
    if not is_real(density) or not 0 < density <= 1:
        raise UsageError(f"a density of {density!r} is not above 0 and at most 1; give for example 0.01")
    if not (
        is_real(entry_bits) and 0 < entry_bits < math.inf and is_whole(element_bits) and element_bits > 0
    ):
        raise UsageError(
            f"entries of {entry_bits!r} bits and elements of {element_bits!r} need more than 0 bits each; give "
            "numbers, and a whole one for element_bits"
        )
    return exact(density) * exact(entry_bits) / element_bits


def gigabytes_from_gigabits(gigabits: float) -> float:
    """Convert Gb/s, as NICs are sold, to GB/s.

    >>> gigabytes_from_gigabits(100)
    12.5
    """
    return gigabits / 8


def bus_factor(collective: str, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth (nccl-tests, ``doc/PERFORMANCE.md``).

    This is the traffic of a ring on each of its links for a byte of the buffer, which makes the rates of all
    collectives comparable with each other and with a link.

    >>> bus_factor("allreduce", 8), bus_factor("allgather", 8), bus_factor("broadcast", 8)
    (1.75, 0.875, 1.0)
    """
    if collective == "allreduce":
        return 2 * (ranks - 1) / ranks
    if collective in ("allgather", "reduce_scatter", "alltoall"):
        return (ranks - 1) / ranks
    return 1.0


def rate_words(gbps: float, collective: str, ranks: int, *, digits: int = 6) -> str:
    """Return algorithm bandwidth and bus bandwidth.

    >>> rate_words(50.0, "allreduce", 4)
    '50 GB/s, busbw 75 GB/s'
    """
    return f"{gbps:.{digits}g} GB/s{bus_words(gbps, collective, ranks, digits=digits)}"


def bus_words(gbps: float, collective: str, ranks: int, *, digits: int = 6) -> str:
    """Return the bus bandwidth as words to follow a rate in GB/s; empty if both are the same.

    >>> bus_words(50.0, "allreduce", 4), bus_words(150.0, "broadcast", 8)
    (', busbw 75 GB/s', '')
    """
    factor = bus_factor(collective, ranks)
    return "" if factor == 1 else f", busbw {gbps * factor:.{digits}g} GB/s"


_RATE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(?:([MGT])(B|b|bit)(?:/s|ps))?\s*")
_THOUSANDS = {"M": -1, "G": 0, "T": 1}


def parse_bandwidth(text: str, *, unit: str = "GB/s") -> float:
    """Return the GB/s of a text such as ``400Gb/s``, ``50GB/s`` or a bare number in ``unit``, GB/s or Gb/s.

    >>> parse_bandwidth("400Gb/s"), parse_bandwidth("25"), parse_bandwidth("100", unit="Gb/s")
    (50.0, 25.0, 12.5)
    """
    match = _RATE.fullmatch(text[:60])
    value = float(match[1]) if match else 0.0
    if match is None or not 0 < value < math.inf:
        raise UsageError(
            f"{text[:40]!r} is not a bandwidth in {unit} above zero, such as 25, 50GB/s or 400Gb/s"
        )
    bits = unit == "Gb/s" if match[3] is None else match[3] != "B"
    value *= 1000.0 ** _THOUSANDS[match[2] or "G"]
    return gigabytes_from_gigabits(value) if bits else value


def parse_size(size: int | str) -> int:
    """Return the bytes of a number or a text such as ``64MB``, ``1GB`` or ``4096``; K, M, G, T are powers of 1024
    (nccl-tests).

    >>> parse_size("64KB"), parse_size("1.5M"), parse_size("7"), parse_size(1 << 20)
    (65536, 1572864, 7, 1048576)
    """
    if not isinstance(size, str):
        try:
            nbytes = index(size)
        except TypeError:
            raise UsageError(
                f"a size must be a whole number of bytes or a text such as 64MB, got {size!r}"[:200]
            ) from None
        if nbytes < 0:
            raise UsageError(f"a buffer of {nbytes} bytes does not exist; give a size of zero or more")
        return nbytes
    text = size
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"size {text[:40]!r} is not a number with an optional KB, MB, GB or TB (for example 64MB)"
        )
    if len(match[1]) > 20:
        raise UsageError(f"size {text[:40]!r} has too many digits; choose smaller ones, for example 64MB")
    power: int = _POWER[(match[2] or "").upper()]
    return round(float(match[1]) * 1024.0**power)


def parse_gpu_list(text: str) -> tuple[int, ...]:
    """Return the GPU numbers of ``1,4,5,7`` or ``0-3,6``.

    >>> parse_gpu_list("0-2,5")
    (0, 1, 2, 5)
    """
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*", part)
        if match is None:
            raise UsageError(f"{text[:60]!r} is not a list of GPU numbers such as 1,4,5,7 or 0-3")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(f"the range {part.strip()} runs backwards; write {last}-{first}")
        if len(numbers) + last - first >= MOST_GPUS_LISTED:
            raise UsageError(
                f"{text[:60]!r} names more than {MOST_GPUS_LISTED:,} GPUs; name each once, in ranges that are there"
            )
        numbers.extend(range(first, last + 1))
    return tuple(numbers)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "GPU"), counted(8, "GPU"), counted(2, "class"), counted(1024, "NVSwitch")
    ('1 GPU', '8 GPUs', '2 classes', '1024 NVSwitches')
    """
    return f"{number} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Return the plural of a noun."""
    return f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"


LABEL_COLUMNS = 13
"""Columns of the label before a value."""


def labelled(*pairs: tuple[str, str]) -> list[str]:
    """Return a line for each label and value, values below each other; pairs without a value are left out.

    >>> labelled(("algbw", "50 GB/s"), ("in-network", ""), ("upper bound", "50 GB/s"))
    ['algbw        50 GB/s', 'upper bound  50 GB/s']
    """
    return [f"{label:<{LABEL_COLUMNS - 2}}  {value}" for label, value in pairs if value]


MOST_GPUS_LISTED, MOST_SIZES = 1 << 20, 1024
"""Most numbers in a list of GPUs, and most sizes in a list: more is taken for a typing error."""

_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]{0,8})", re.DOTALL)
_SERVER = re.compile(r"(.*?)(0|[1-9][0-9]{0,8})([^0-9]*)", re.DOTALL)


def number_ranges(numbers: Iterable[int]) -> str:
    """Return numbers as `parse_gpu_list` reads them; three or more in a row are a range.

    >>> number_ranges([1, 4, 5, 7]), number_ranges(range(16)), number_ranges([0, 1, 2, 6])
    ('1,4,5,7', '0-15', '0-2,6')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(number) for number in run] for run in runs)
    return ",".join(part for run in parts for part in run)


def name_ranges(names: Iterable[str]) -> tuple[str, ...]:
    """Group names that differ in a number only: of GPUs, and of servers with equal lists.

    >>> name_ranges(["gpu1", "gpu4", "gpu5", "gpu7", "nic0"])
    ('gpu1,4,5,7', 'nic0')
    >>> name_ranges(f"s{server}.gpu{gpu}" for server in range(4) for gpu in range(8))
    ('s0-3.gpu0-7',)
    """
    groups: list[tuple[str, list[int]]] = []
    for name in names:
        match = _NUMBERED.fullmatch(name)
        prefix, numbers = (match[1], [int(match[2])]) if match else (name, [])
        if groups and match and groups[-1][0] == prefix and groups[-1][1]:
            groups[-1][1].extend(numbers)
        else:
            groups.append((prefix, numbers))
    servers: list[tuple[str, list[int], str]] = []
    for prefix, numbers in groups:
        match = _SERVER.fullmatch(prefix) if numbers else None
        before, own, after = (match[1], [int(match[2])], match[3]) if match else (prefix, [], "")
        text = f"{after}{number_ranges(numbers)}"
        if servers and match and servers[-1][0] == before and servers[-1][1] and servers[-1][2] == text:
            servers[-1][1].extend(own)
        else:
            servers.append((before, own, text))
    return tuple(f"{before}{number_ranges(own)}{text}" for before, own, text in servers)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes in bytes of ``1KB:1GB`` (doubling from first to last) or ``1KB,64KB,16MB``.

    >>> parse_sizes("1KB:8KB")
    (1024, 2048, 4096, 8192)
    """
    if ":" not in text:
        parts = text.split(",", MOST_SIZES)
        if len(parts) > MOST_SIZES:
            raise UsageError(
                f"more than {MOST_SIZES:,} sizes are listed; list fewer, or a range such as 1KB:1GB"
            )
        return tuple(map(parse_size, parts))
    first, _, last = text.partition(":")
    low, high = parse_size(first), parse_size(last)
    if low <= 0 or high < low:
        raise UsageError(f"size range {text[:60]!r} is empty: write it as SMALL:LARGE, for example 1KB:1GB")
    return tuple(low << i for i in range(int(math.log2(high / low) + TOLERANCE) + 1))


def format_size(nbytes: int) -> str:
    """Return a short text for a number of bytes.

    >>> format_size(65536), format_size(1536), format_size(7)
    ('64KB', '1.5KB', '7B')
    """
    for suffix, power in (("TB", 4), ("GB", 3), ("MB", 2), ("KB", 1)):
        if nbytes >= 1024**power:
            return f"{nbytes / 1024**power:.4g}{suffix}"
    return f"{nbytes}B"


def format_seconds(seconds: float) -> str:
    """Return a short text for a time.

    >>> format_seconds(0.00123), format_seconds(2.5e-5)
    ('1.23 ms', '25 us')
    """
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"


def is_number(cell: str) -> bool:
    """Return whether the cell of a table stands in a column of numbers: a number, a factor, a share, or none.

    >>> [is_number(cell) for cell in ("1.5x", "20%", "-", "ring")]
    [True, True, True, False]
    """
    try:
        float(cell.rstrip("x%"))
    except ValueError:
        return cell in ("", "-")
    return True


def listed(names: Iterable[str], *, noun: str = "devices") -> str:
    """Return names for a note: many devices as ranges of numbers, and of many names or ranges three and the last.

    >>> listed(f"gpu{i}" for i in range(4, 16))
    'gpu4-15 (12 devices)'
    >>> listed(["gpu0", "gpu1", "nic0", "cpu0", "switch3", "switch4", "hub"])
    'gpu0,1, nic0, cpu0 ... hub (7 devices)'
    >>> listed(["gpu0-gpu1", "gpu0-gpu2", "gpu1-gpu2", "gpu1-gpu3", "gpu2-gpu3"], noun="pairs")
    'gpu0-gpu1, gpu0-gpu2, gpu1-gpu2 ... gpu2-gpu3 (5 pairs)'
    """
    every = list(names)
    if len(every) <= 4:
        return ", ".join(every)
    parts = name_ranges(every) if noun == "devices" else every
    text = ", ".join(parts) if len(parts) <= 4 else f"{', '.join(parts[:3])} ... {parts[-1]}"
    return f"{text} ({len(every)} {noun})"

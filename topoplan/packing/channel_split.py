"""How a buffer is divided between channels so that all of them finish at the same time.

Channel k moves B_k bytes a second once it has started, at t_k. With T the time at which all finish,

    D_k = B_k max(0, T - t_k),    D = sum of D_k,

and a channel that starts after T carries nothing. For two channels of which one starts at once and the other after
T_dpa that is equation 8 of Blink (MLSys 2020, appendix A.3):

    D_pcie = D B_pcie / (B_pcie + B_nvl) - T_dpa B_pcie B_nvl / (B_pcie + B_nvl),  not below zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

from topoplan.errors import UsageError

GRAIN = 1 << 30
"""Shares of a size are whole multiples of 1 / GRAIN, a byte of a gigabyte, so that a plan file stays short."""


@dataclass(frozen=True, slots=True)
class Split:
    """Bytes for every channel, exact, and the seconds after which all that carry some are done."""

    nbytes: tuple[Fraction, ...]
    seconds: Fraction


def channel_split(rates: Sequence[Fraction], starts: Sequence[Fraction], nbytes: int) -> Split:
    """Divide a buffer between channels that start at different times.

    Parameters
    ----------
    rates : sequence of Fraction
        Rate of each channel in GB/s, above zero.
    starts : sequence of Fraction
        Seconds at which each may start, zero or more.
    nbytes : int
        Size of the buffer, zero or more.

    Raises
    ------
    UsageError
        A value is out of range, or there is not one start for each rate.

    Notes
    -----
    O(K log K) for K channels: they join in the order of their starts as long as they start before the others finish.

    Examples
    --------
    100 MB over 20 GB/s at once and 5 GB/s after 1 ms: both finish after 4.2 ms.

    >>> split = channel_split([Fraction(20), Fraction(5)], [Fraction(0), Fraction(1, 1000)], 100_000_000)
    >>> [int(part) for part in split.nbytes], split.seconds
    ([84000000, 16000000], Fraction(21, 5000))
    """
    if nbytes < 0:
        raise UsageError(f"a buffer of {nbytes} bytes cannot be divided; give a size of zero or more")
    if not rates or len(rates) != len(starts):
        raise UsageError(f"{len(rates)} rates and {len(starts)} starts are not one of each for every channel")
    for rate, start in zip(rates, starts, strict=True):
        if rate <= 0 or start < 0:
            raise UsageError(
                f"a channel of {float(rate):g} GB/s that starts after {float(start):g} s cannot take part; "
                "give a rate above zero and a start of zero or more"
            )
    order = sorted(range(len(rates)), key=lambda k: (starts[k], k))
    together, ahead = Fraction(0), Fraction(0)
    finish = starts[order[0]]
    for place, k in enumerate(order):
        # What B_k would have moved before it started is added to the buffer, as if all had begun at zero.
        together += rates[k] * 10**9
        ahead += rates[k] * 10**9 * starts[k]
        finish = (nbytes + ahead) / together
        if place + 1 == len(order) or starts[order[place + 1]] >= finish:
            break
    parts = (r * 10**9 * max(Fraction(0), finish - t) for r, t in zip(rates, starts, strict=True))
    return Split(tuple(parts), finish)


def split_shares(
    rates: Sequence[Fraction], starts: Sequence[Fraction], nbytes: int | None
) -> tuple[Fraction, ...]:
    """Shares of the buffer for every channel: those of a size, or for None of the limit of large buffers.

    Shares of a size are rounded down to multiples of 1 / `GRAIN`, and the first channel takes what is left; those of
    the limit are in proportion to the rates and exact, so that no channel waits for another.

    Examples
    --------
    >>> split_shares([Fraction(150), Fraction(8)], [Fraction(0), Fraction(37, 10000)], None)
    (Fraction(75, 79), Fraction(4, 79))
    >>> [float(share) for share in split_shares([Fraction(2), Fraction(1)], [Fraction(0), Fraction(1)], 1 << 20)]
    [1.0, 0.0]
    """
    if nbytes is None:
        total = sum(rates, Fraction(0))
        return tuple(rate / total for rate in rates)
    split = channel_split(rates, starts, nbytes)
    others = [Fraction(floor(part / max(nbytes, 1) * GRAIN), GRAIN) for part in split.nbytes[1:]]
    return (1 - sum(others, Fraction(0)), *others)

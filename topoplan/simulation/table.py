"""A sweep over sizes in the columns of nccl-tests, and the size from which one plan beats another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from topoplan.errors import UsageError
from topoplan.plans.plan import Plans
from topoplan.simulation.model import clock
from topoplan.units import bus_factor

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table, for float32.

    Parameters
    ----------
    nbytes : int
        ``size``; for allgather and reduce_scatter of the full gathered buffer.
    count : int
        ``count`` as nccl-tests prints it: elements of the buffer, of one rank's part for allgather and
        reduce_scatter.
    dtype, redop : str
    seconds : float
    algbw, busbw : float
        GB/s.
    """

    nbytes: int
    count: int
    dtype: str
    redop: str
    seconds: float
    algbw: float
    busbw: float

    def to_object(self) -> dict[str, object]:
        """A JSON object with the table's columns; ``time`` is in microseconds, as there."""
        return {
            "size": self.nbytes,
            "count": self.count,
            "type": self.dtype,
            "redop": self.redop,
            "time": self.seconds * 1e6,
            "algbw": self.algbw,
            "busbw": self.busbw,
        }


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where the first of two plans starts to be at least as fast as the second.

    Parameters
    ----------
    nbytes : int or None
        The smallest size from which, up to the largest one asked for, the first plan is at least as fast;
        None where it is slower at the largest size. The smallest size asked for where it is never slower.
    faster_below : str
        ``first``, ``second`` or ``equal``: which is faster at the smallest size asked for.
    """

    nbytes: int | None
    faster_below: str

    def to_object(self) -> dict[str, object]:
        """A JSON object of both fields."""
        return {"nbytes": self.nbytes, "faster_below": self.faster_below}


def sweep(plan: Plans, sizes: Sequence[int], *, chunk_bytes: int | None = None) -> tuple[Row, ...]:
    """Model time of a plan at several sizes; of plans by size, each size under its own.

    Raises
    ------
    UsageError
        A size is negative, or ``chunk_bytes`` not above zero.

    Examples
    --------
    >>> import topoplan
    >>> print(format_table(sweep(topoplan.plan(topoplan.load("dgx-2"), "allreduce"), [1 << 30])))
    #         size         count      type   redop         time    algbw    busbw
    #          (B)    (elements)                           (us)   (GB/s)   (GB/s)
        1073741824     268435456     float     sum     13447.77    79.85   149.71
    """
    time = clock(plan, chunk_bytes)
    times = [time(size) for size in sizes]
    return tuple(row(one.collective, one.ranks, one.nbytes, one.seconds) for one in times)


def format_table(rows: Sequence[Row]) -> str:
    """The rows as text, two comment lines of heads first, without a newline at the end."""
    lines = [
        f"# {'size':>12}  {'count':>12}  {'type':>8}  {'redop':>6}  {'time':>11}  {'algbw':>7}  {'busbw':>7}",
        f"# {'(B)':>12}  {'(elements)':>12}  {'':>8}  {'':>6}  {'(us)':>11}  {'(GB/s)':>7}  {'(GB/s)':>7}",
    ]
    lines += [
        f"  {row.nbytes:>12}  {row.count:>12}  {row.dtype:>8}  {row.redop:>6}  "
        f"{row.seconds * 1e6:>11.2f}  {row.algbw:>7.2f}  {row.busbw:>7.2f}"
        for row in rows
    ]
    return "\n".join(lines)


def crossover(first: Plans, second: Plans, low: int, high: int) -> Crossover:
    """The smallest size from which the first plan is at least as fast as the second, up to ``high``.

    Sizes double from ``low`` to ``high``; between the last one at which the first plan is slower and the
    next, the size is found by bisection.

    Raises
    ------
    UsageError
        The range is empty.

    Examples
    --------
    >>> import topoplan
    >>> machine = topoplan.load("dgx-2")
    >>> one_hop, ring = topoplan.plan(machine, "allreduce"), topoplan.ring(machine, "allreduce")
    >>> crossover(one_hop, ring, 1 << 10, 1 << 30)
    Crossover(nbytes=1024, faster_below='first')
    """
    if not 0 < low <= high:
        raise UsageError(f"size range {low} to {high} is empty; give 0 < low <= high in bytes")
    one, two = clock(first), clock(second)

    def slower(nbytes: int) -> bool:
        return one(nbytes).seconds > two(nbytes).seconds

    start = (one(low).seconds, two(low).seconds)
    faster_below = "equal" if start[0] == start[1] else "first" if start[0] < start[1] else "second"
    sizes = [low]
    while sizes[-1] < high:
        sizes.append(min(high, 2 * sizes[-1]))
    behind = max((i for i, size in enumerate(sizes) if slower(size)), default=-1)
    if behind == len(sizes) - 1:
        return Crossover(None, faster_below)
    if behind < 0:
        return Crossover(low, faster_below)
    below, above = sizes[behind], sizes[behind + 1]
    while above - below > 1:
        middle = (below + above) // 2
        if slower(middle):
            below = middle
        else:
            above = middle
    return Crossover(above, faster_below)


def row(collective: str, ranks: int, nbytes: int, seconds: float) -> Row:
    """The line of a collective that takes so long."""
    parts = ranks if collective in ("allgather", "reduce_scatter", "alltoall") else 1
    algbw = nbytes / seconds / 1e9
    return Row(
        nbytes=nbytes,
        count=nbytes // parts // FLOAT32_BYTES,
        dtype="float",
        redop="sum" if collective in ("allreduce", "reduce", "reduce_scatter") else "none",
        seconds=seconds,
        algbw=algbw,
        busbw=algbw * bus_factor(collective, ranks),
    )

"""Which way a sparse gradient takes, by the model: all of it added up, or the chosen entries of every rank gathered.

An allreduce of d elements of b bytes sends 2 (N - 1) / N d b bytes over each link of a ring, gathering k entries of
b + i bytes from each of N ranks (N - 1) k (b + i): so on a ring entries win below a density k / d of 2 b / (N (b + i)).
The model knows the machine's links and both plans, and says it for them; the time of choosing entries is not in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from collectives.sparse.pairs import message_bytes
from topoplan.errors import UsageError
from topoplan.units import format_size

if TYPE_CHECKING:
    from collectives.wire.filters import WireFormat

EXCHANGES = ("auto", "dense", "pairs")


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is exchanged for a gradient, and why.

    Parameters
    ----------
    exchange : str
        "dense": residual and gradient are added up as a whole. "pairs": chosen entries are gathered as indices and
        values, and every rank adds them up.
    entries : int
        That every rank gives.
    dense_seconds, pairs_seconds : float
        Model times of both.
    pairs_bytes : int
        Of the gathered entries of all ranks.
    reason : str
    """

    exchange: str
    entries: int
    dense_seconds: float
    pairs_seconds: float
    pairs_bytes: int
    reason: str

    def __str__(self) -> str:
        return f"{self.exchange}: {self.reason}"


def explain(
    *,
    size: int,
    dtype: str,
    itemsize: int,
    density: float,
    ranks: int,
    exchange: str,
    wire: WireFormat | None,
    model: Callable[[str, int], float],
) -> Explanation:
    """Decide.

    Parameters
    ----------
    size, dtype, itemsize
        Of the gradient.
    density : float
        Share of its entries that every rank gives.
    ranks : int
    exchange : str
        "auto", or the one that is wanted.
    wire : WireFormat or None
        Of the entries.
    model : callable
        Seconds of a collective on a buffer of so many bytes.

    Raises
    ------
    UsageError
        The density is not above 0 and at most 1, or the exchange unknown.
    """
    entries = entries_of(size, density)
    if exchange not in EXCHANGES:
        raise UsageError(f"exchange {exchange!r} is unknown; use {', '.join(EXCHANGES)}")
    gathered = ranks * message_bytes(entries, size=size, dtype=dtype, wire=wire)
    dense, pairs = model("allreduce", size * itemsize), model("allgather", gathered)
    chosen = exchange if exchange != "auto" else "pairs" if pairs < dense and entries < size else "dense"
    compared = (
        f"by the model {entries} of {size} entries of each of {ranks} ranks, {format_size(gathered)} together, take "
        f"{pairs * 1e3:.3g} ms, and the whole gradient, {format_size(size * itemsize)}, takes {dense * 1e3:.3g} ms"
    )
    wanted = "" if exchange == "auto" else "asked for; "
    return Explanation(chosen, entries, dense, pairs, gathered, wanted + compared)


def entries_of(size: int, density: float) -> int:
    """How many entries a density means: at least one of those that there are.

    Raises
    ------
    UsageError
        The density is not above 0 and at most 1.

    Examples
    --------
    >>> entries_of(1000, 0.01), entries_of(10, 0.01), entries_of(0, 0.01)
    (10, 1, 0)
    """
    if not 0 < density <= 1:
        raise UsageError(f"a density of {density} is not above 0 and at most 1; give for example 0.01")
    return min(size, max(1, round(density * size)))

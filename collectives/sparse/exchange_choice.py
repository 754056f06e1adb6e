"""Choose the exchange of a sparse gradient by the model: the whole gradient, or its entries in one of four ways.

An allreduce of d elements of b bytes sends 2 (N - 1) / N d b bytes over each link of a ring, gathering k entries of b
+ i bytes from each of N ranks (N - 1) k (b + i): so on a ring entries win below a density k / d of 2 b / (N (b + i)).
The model evaluates this for the machine's links and all plans. The time of selecting and adding entries is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from collectives.sparse.selection.error_feedback import checked_density
from topoplan.errors import UsageError
from topoplan.plans.plan import Plan
from topoplan.units import format_size

EXCHANGES = ("auto", "dense", "pairs", "servers", "tree", "balanced")


@dataclass(frozen=True, slots=True)
class SparseExplanation:
    """The exchange of a gradient, and its reason.

    Parameters
    ----------
    exchange : str
        "dense": residual and gradient are summed as a whole. "pairs": the entries of all ranks are gathered.
        "servers": gradients are summed inside servers, and entries exchanged between them. "tree": entries are summed
        and selected again on the way up one low tree. "balanced": the same on many trees, each for its part.
    entries : int
        Entries of every rank, or with "servers" of every server; approximate if shards select for themselves.
    pairs_bytes : int
        Bytes of the gathered messages of all ranks, with padding.
    reason : str
    seconds : mapping of str to float
        Model times: for "auto" of all exchanges of this machine, else of the one that was named.
    plan : Plan or None
        The plan that runs, unless entries are gathered: that of the allreduce, or the sparse plan.
    """

    exchange: str
    entries: int
    pairs_bytes: int
    reason: str
    seconds: Mapping[str, float]
    plan: Plan | None

    def __str__(self) -> str:
        return f"{self.exchange}: {self.reason}"

    @property
    def dense_seconds(self) -> float:
        """Model time of the whole gradient; NaN if another exchange was named."""
        return self.seconds.get("dense", math.nan)

    @property
    def pairs_seconds(self) -> float:
        """Model time of gathered entries; NaN if another exchange was named."""
        return self.seconds.get("pairs", math.nan)


def check_exchange(exchange: str) -> str:
    """Return the name of an exchange, or "auto"; UsageError if it is unknown."""
    if exchange not in EXCHANGES:
        raise UsageError(f"exchange {exchange!r} is unknown; use {', '.join(EXCHANGES)}")
    return exchange


def choose_exchange(seconds: Mapping[str, float], *, sparse: bool) -> str:
    """Return the exchange of "auto": the fastest, and dense if no entry is left out.

    Over several servers with several ranks each, trees on entries are taken only by name: they keep as many entries as
    one rank gives, while three phases keep those of every server.

    Examples
    --------
    >>> choose_exchange({"dense": 2.0, "pairs": 1.0, "servers": 0.5}, sparse=True)
    'servers'
    """
    rivals = ("dense", "pairs", "servers") if "servers" in seconds else EXCHANGES
    return min((name for name in seconds if name in rivals), key=seconds.__getitem__) if sparse else "dense"


def explain_choice(
    seconds: Mapping[str, float],
    *,
    asked: bool,
    entries: int,
    size: int,
    ranks: int,
    gathered: int,
    nbytes: int,
) -> str:
    """Return the reason for an exchange, in words."""
    names = {
        "pairs": f"{entries} of {size} entries of each of {ranks} ranks, {format_size(gathered)} together, take",
        "dense": f"the whole gradient, {format_size(nbytes)}, takes",
        "servers": "three phases over servers",
        "tree": "one tree",
        "balanced": "balanced trees",
    }
    times = [f"{names[name]} {seconds[name] * 1e3:.3g} ms" for name in names if name in seconds]
    if asked:
        return f"asked for; by the model {times[0]}"
    first, second, *others = times
    return ", ".join((f"by the model {first}, and {second}", *others))


def entry_count(size: int, density: float) -> int:
    """Return the number of entries of a density, at least one if there are any; UsageError for an invalid density.

    Examples
    --------
    >>> entry_count(1000, 0.01), entry_count(10, 0.01), entry_count(0, 0.01)
    (10, 1, 0)
    """
    return min(size, max(1, round(checked_density(density) * size)))

"""The optimal all-to-all: flows from every source at once, as paths with shares, and the proof that nothing is faster.

Column generation (`topoplan.columns.flows`) on the orbits of the fabric's symmetries, in exact arithmetic to its end:
the final duals are priced once more in whole numbers, so that rate and bound are equal as rational numbers. Where a cut
proves as much as the dual lengths, the cut is the certificate, since it can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from math import gcd, lcm

from topoplan.bounds.cuts_and_partitions import exchange_bounds
from topoplan.columns.flows import FlowPacking, FlowPricing
from topoplan.columns.generation import Generation
from topoplan.columns.pricing import length_of
from topoplan.errors import PlanError, UsageError
from topoplan.fabric.fabric import Fabric
from topoplan.hosts.notes import Note
from topoplan.plans.build import build_plan
from topoplan.plans.certificates import Certificate, Cut, Demand, OneFabric
from topoplan.plans.certificates.exchange import Bytes
from topoplan.plans.certificates.forest_length import zero_parts
from topoplan.plans.plan import ALL_TO_ALL, Plan
from topoplan.simplex.time_limit import UNDONE, Deadline, out_of_time
from topoplan.symmetry.search import find_symmetry

Matrix = Sequence[Sequence[float]]
"""Bytes that row sends to column."""

MOST_LOW = 16
"""Ranks that all look different up to which lower paths are looked for."""

MOST_BYTES = 1 << 53
"""Bytes of one pair up to which a number of JSON is exact everywhere."""


def plan_all_to_all(
    fabric: Fabric,
    *,
    demand: Bytes | None = None,
    deadline: Deadline | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The optimal all-to-all among two ranks or more.

    Parameters
    ----------
    fabric : Fabric
        All ranks connected.
    demand : N x N whole numbers, or None
        Bytes that row sends to column, as `check_demand` returns them; None where all pairs exchange alike.
    deadline : Deadline or None
        When the best plan so far is taken.
    progress : callable or None
        Called with a line of text now and then.

    Examples
    --------
    Four V100, joined by one or two NVLinks each pair: the single links are full, and the double ones relay.

    >>> import topoplan
    >>> made = plan_all_to_all(Fabric(topoplan.load("v100x4"), ("nvlink",)))
    >>> made.rate, made.bound, made.height
    (125.0, 125.0, 2)
    """
    deadline = deadline or Deadline(None)
    generators: tuple[tuple[int, ...], ...] = ()
    if demand is None:
        units: Bytes = ((1,) * fabric.size,) * fabric.size
        generators = tuple(tuple(each.tolist()) for each in find_symmetry(fabric, largest=fabric.size))
    else:
        common = gcd(*(amount for row in demand for amount in row))
        units = tuple(tuple(amount // common for amount in row) for row in demand)

    def proofs(certificates: Sequence[OneFabric]) -> Iterator[tuple[Fraction, Certificate]]:
        for one in certificates:
            stated = one if demand is None else Demand(demand, one)
            with suppress(PlanError):  # nothing that is wanted crosses this cut
                yield stated.bound(fabric, ALL_TO_ALL, None), stated

    packing = FlowPacking(fabric, ALL_TO_ALL, None, generators, units)
    known = list(proofs(exchange_bounds(fabric)))
    bound, certificate = min(known, key=lambda one: one[0])
    generation = Generation(FlowPricing(packing), progress=progress, deadline=deadline)
    if not generation.run(bound * packing.scale):
        while not deadline.over() and _price_again(generation):
            pass
        lengths = packing.certificate(generation.duals())
        known += proofs((*_cuts(lengths, fabric), lengths))
        bound, certificate = min(known, key=lambda one: one[0])
    notes: tuple[str, ...] = ()
    tallest = max(map(packing.edges_in_a_row, generation.weights()))
    if len(packing.roots) <= MOST_LOW and not deadline.cut:
        generation = _lowest(packing, generation, tallest, progress, deadline)
    elif tallest > 1 and not deadline.cut:
        notes = (
            Note(f"height {tallest} is that of the first optimum; lower ones were not tried", "height open"),
        )
    if deadline.cut:
        rate = float(generation.value / packing.scale)
        notes = (deadline.note(out_of_time(rate, float(bound)) if rate < bound else UNDONE),)
    return build_plan(
        fabric,
        ALL_TO_ALL,
        root=None,
        shards=packing.shards(generation.weights()),
        certificate=certificate,
        schedule="paths",
        method="exact",
        notes=notes,
    )


def check_demand(demand: Matrix, size: int) -> Bytes:
    """The bytes that row sends to column among so many ranks, as whole numbers.

    Raises
    ------
    UsageError
        The matrix is no square of the number of ranks, an entry is no whole number of bytes, zero or more, or nothing
        goes from any rank to another.

    Examples
    --------
    >>> check_demand([[0, -1], [1, 0]], 2)
    Traceback (most recent call last):
    topoplan.errors.UsageError: the demand from rank 0 to rank 1 is -1; give whole bytes, zero or more
    """
    if len(demand) != size or any(len(row) != size for row in demand):
        lengths = ", ".join(map(str, sorted({len(row) for row in demand})))
        raise UsageError(
            f"the demand has {len(demand)} rows of {lengths or 0} entries for {size} ranks; "
            f"give {size} rows of {size}"
        )
    for source, row in enumerate(demand):
        for destination, amount in enumerate(row):
            if isinstance(amount, bool) or not 0 <= amount <= MOST_BYTES or amount != int(amount):
                raise UsageError(
                    f"the demand from rank {source} to rank {destination} is {amount}; give whole bytes, zero or more"
                )
    if not any(row[other] for rank, row in enumerate(demand) for other in range(size) if other != rank):
        raise UsageError("the demand sends nothing from any rank to another; there is nothing to plan")
    return tuple(tuple(int(amount) for amount in row) for row in demand)


def _lowest(
    packing: FlowPacking,
    generation: Generation,
    tallest: int,
    progress: Callable[[str], None] | None,
    deadline: Deadline,
) -> Generation:
    """Paths of as few edges as reach the same rate, each lower height being refuted by its own duals."""
    target = generation.value
    for height in range(1, tallest):
        limited = Generation(FlowPricing(packing, height), progress=progress, deadline=deadline)
        if limited.run(target, hopeless=target):
            return limited
    return generation


def _price_again(generation: Generation) -> bool:
    """Price the columns once more under exact duals; True where one was better and the program has new ones."""
    duals, _ = generation.program.duals()
    lengths, prices = duals[: generation.rows], duals[generation.rows :]
    found = generation.pricing.cheapest(lengths)
    better = [tree for place, tree in sorted(found.items()) if length_of(tree, lengths) < prices[place]]
    if not generation.add(better):
        return False
    generation.program.optimise()
    return True


def _cuts(lengths: OneFabric, fabric: Fabric) -> list[Cut]:
    """The cuts between devices that lengths of links do not part: they may prove as much, and can be read."""
    values = lengths.link_lengths(fabric, ALL_TO_ALL)
    scale = lcm(*(value.denominator for value in values))
    part = zero_parts(fabric, [int(value * scale) for value in values])
    with_ranks = sorted(set(part[: fabric.size]))
    if len(with_ranks) < 2:
        return []
    return [
        Cut(fabric.devices_of(state for state, other in enumerate(part) if other == first))
        for first in with_ranks
    ]

"""Pack composed trees in three phases: reduce in servers, exchange between local roots, broadcast (Blink 3.4).

One program over all composed trees (`composed_pricing`), solved by column generation on orbits of symmetries, gives
shares, centres, local roots and trees of the best composition together, for any GPU counts, wires and NICs of the
servers. Then the height inside servers is lowered as far as the rate allows. If NICs have bandwidth to spare, a last
program keeps the rate and leaves the NICs of a server evenly free: local roots are spread.

`plan_three_phase` puts the composition under the lowest bound on any plan: flows; the dual lengths of the
composition's own program, if they prove anything; and on small fabrics, if neither is reached, the certificate of
the exact method.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import gcd

from topoplan.errors import InfeasibleError, PlanError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import FabricServers
from topoplan.plans.build import build_plan
from topoplan.plans.certificates.certificate import Certificate, Lengths
from topoplan.plans.loads import forest_rate
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Shard
from topoplan.solve.cuts_and_partitions import best_bound
from topoplan.solve.packing.column_generation import ColumnGeneration, ProgressCallback
from topoplan.solve.packing.composed_pricing import ComposedPricing
from topoplan.solve.packing.exact import pack_exact
from topoplan.solve.packing.packing_program import Packing, TreeColumn
from topoplan.solve.symmetry.symmetry_search import find_symmetry
from topoplan.units import name_ranges

_GAINS = (10**3, 10**6, 10**9)
"""Worth of a unit of rate against free NICs; the first that sacrifices no rate is taken."""


_LARGEST_PART = 1 << 31


@dataclass(frozen=True, slots=True)
class Composition:
    """A composed forest; large ones are templates with the symmetries.

    ``bound``, in GB/s, is the target of the search, and ``certificate`` proves it. ``duals``, if the forest does not
    reach the bound, are the dual lengths of its program: they may prove a lower bound, or nothing, since they need to
    be long for composed trees only.
    """

    shards: Sequence[Shard]
    bound: Fraction
    certificate: Certificate
    duals: Lengths | None


def compose(
    fabric: Fabric,
    collective: str,
    *,
    root: int | None = None,
    certificate: Certificate | None = None,
    progress: ProgressCallback | None = None,
) -> Composition:
    """Return the best composition of trees inside servers with stars between them.

    At the bound of ``certificate`` the search may stop; None stands for the one from flows. UsageError if all ranks are
    on one server; InfeasibleError if the ranks of a server are not connected inside it, or if no rank reaches one of
    every other server in one hop.
    """
    servers = FabricServers(fabric)
    servers.check()
    symmetries = (tuple(each.tolist()) for each in find_symmetry(fabric, fixed=root))
    kept = tuple(each for each in symmetries if servers.keeps(each))
    packing = Packing(fabric, collective, root, kept)
    aim = best_bound(fabric, collective, root) if certificate is None else certificate
    bound = aim.bound(fabric, collective, root)
    duals = None
    best = ColumnGeneration(ComposedPricing(packing, servers=servers), progress=progress)
    if not best.run(bound * packing.scale):
        if not best.trees:
            raise InfeasibleError(
                "three phases need a GPU that reaches one of every other server in one hop and back, and none of "
                f"{', '.join(name_ranges(servers.names))} has one; plan trees instead (method exact)"
            )
        duals = packing.certificate(best.duals())
    shards = packing.forest(_even_loads(_lowest_inside(best, servers), servers).weights())
    return Composition(shards, bound, aim, duals)


def _lowest_inside(best: ColumnGeneration, servers: FabricServers) -> ColumnGeneration:
    """Keep the rate with trees inside servers as low as they can be."""
    tallest = max(_inner_height(tree, servers) for tree in best.weights())
    for height in range(1, tallest):
        lower = ColumnGeneration(
            ComposedPricing(best.packing, height, servers=servers), progress=best.progress
        )
        lower.add([tree for tree in best.trees if _inner_height(tree, servers) <= height])
        if lower.run(best.value):
            return lower
    return best


def _even_loads(best: ColumnGeneration, servers: FabricServers) -> ColumnGeneration:
    """Keep rate and height, and even the load on the NICs of every server as far as possible."""
    packing = best.packing
    ports = port_groups(servers, packing.orbits.row_of_link.tolist())
    load = [Fraction(0)] * len(packing.limits)
    for tree, weight in best.weights().items():
        for row, times in enumerate(tree.usage):
            load[row] += times * weight
    if all(len({load[row] / packing.limits[row] for row in rows}) == 1 for rows in ports):
        return best
    for gain in _GAINS:
        even = EvenLoadGeneration(best.pricing, progress=best.progress, gain=gain, ports=ports)
        even.add(best.trees)
        even.run(None)
        if even.value >= best.value:
            return even
    return best


def _inner_height(tree: TreeColumn, servers: FabricServers) -> int:
    """Return the edges on the longest path inside a server, of either tree."""
    home = servers.of_rank.tolist()
    longest = 0
    for parents in (tree.up, tree.down):
        for rank in range(len(parents)):
            steps = 0
            while (parent := parents[rank]) >= 0 and home[parent] == home[rank]:
                rank, steps = parent, steps + 1
            longest = max(longest, steps)
    return longest


@dataclass
class EvenLoadGeneration(ColumnGeneration):
    """Column generation with one more column for each group of ports: their common spare bandwidth.

    A port takes part in proportion to its capacity. The objective is ``gain`` x rate + the sum of spare bandwidths.
    """

    ports: tuple[tuple[int, ...], ...] = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        columns = []
        for rows in self.ports:
            column = [0] * self.program.rows
            for row, part in zip(rows, self._parts(rows), strict=True):
                column[row] = part
            columns.append(column)
        self.program.add(columns, [1] * len(columns))
        self.offset += len(columns)

    @property
    def value(self) -> Fraction:
        """Rate of the packing in units of the packing's scale, without spare bandwidth."""
        solution = self.program.solution()
        if self.packing.shared:
            return solution.get(0, Fraction(0)) * self.packing.owners
        return sum((x for j, x in solution.items() if j >= self.offset), Fraction(0))

    def _parts(self, rows: tuple[int, ...]) -> list[int]:
        """Return capacities of some rows without common divisor, rounded if they would be huge."""
        limits = [self.packing.limits[row] for row in rows]
        common = max(gcd(*limits), -(-max(limits) // _LARGEST_PART))
        return [max(1, limit // common) for limit in limits]


def port_groups(servers: FabricServers, row_of_link: list[int]) -> tuple[tuple[int, ...], ...]:
    """Return the rows of the links out of each server, and into it; only groups of several rows."""
    found: dict[tuple[str, str], set[int]] = {}
    for row, (src, dst) in zip(row_of_link, servers.ends, strict=True):
        if src != dst:
            found.setdefault(("out of", src), set()).add(row)
            found.setdefault(("into", dst), set()).add(row)
    groups = {tuple(sorted(rows)) for (_, server), rows in found.items() if server in servers.names}
    return tuple(sorted(group for group in groups if len(group) > 1))


THREE_PHASE = "three-phase"

MOST_EXACT_RANKS = 16
"""Ranks up to which the exact method is run for its certificate."""


def plan_three_phase(
    fabric: Fabric,
    collective: str,
    *,
    root: int | None = None,
    certificate: Certificate | None = None,
    progress: ProgressCallback | None = None,
) -> Plan:
    """Return the best composition as a plan whose notes state its gap.

    ``certificate`` of a general plan for the same fabric, if known, saves the search for another one. Errors are those
    of `compose`.
    """
    composed = compose(fabric, collective, root=root, certificate=certificate, progress=progress)
    rate = forest_rate(composed.shards, fabric)
    assert rate is not None, "trees over two servers cross links"
    proof = composed.certificate
    notes: tuple[str, ...] = ()
    if rate < composed.bound and certificate is None:
        proof, notes = _lower_bound(composed, fabric, collective, root, rate, progress)
    made = build_plan(
        fabric,
        collective,
        root=root,
        shards=composed.shards,
        certificate=proof,
        schedule=THREE_PHASE,
        method=THREE_PHASE,
        notes=notes,
    )
    if made.gap == 0:
        return replace(made, notes=())
    lost = f"three phases stay {made.gap:.2%} below the bound of {made.bound:.6g} GB/s on any plan over these links"
    return replace(made, notes=(lost, *notes))


def composed_optimum(
    fabric: Fabric, collective: str, *, root: int | None = None, progress: ProgressCallback | None = None
) -> Plan | None:
    """Return a plan of three phases that reaches the bound from flows; None if none does, or none exists."""
    try:
        composed = compose(fabric, collective, root=root, progress=progress)
    except (UsageError, InfeasibleError):
        return None
    if forest_rate(composed.shards, fabric) != composed.bound:
        return None
    return build_plan(
        fabric,
        collective,
        root=root,
        shards=composed.shards,
        certificate=composed.certificate,
        schedule=THREE_PHASE,
        method=THREE_PHASE,
        notes=("three phases reach the bound; lower trees were not looked for",),
    )


def _lower_bound(
    composed: Composition,
    fabric: Fabric,
    collective: str,
    root: int | None,
    rate: Fraction,
    progress: ProgressCallback | None,
) -> tuple[Certificate, tuple[str, ...]]:
    """Return the best certificate that is quick to compute if the first bound is missed, and notes on the rest."""
    proof, bound = composed.certificate, composed.bound
    assert composed.duals is not None, "a program that misses its bound has been solved to its end"
    with suppress(PlanError):
        proved = composed.duals.bound(fabric, collective, root)
        if proved < bound:
            proof, bound = composed.duals, proved
    if rate == bound:
        return proof, ()
    if fabric.size > MOST_EXACT_RANKS:
        return proof, (
            f"with more than {MOST_EXACT_RANKS} GPUs the exact method was not run for a lower bound",
        )
    return pack_exact(fabric, collective, root=root, progress=progress).certificate, ()

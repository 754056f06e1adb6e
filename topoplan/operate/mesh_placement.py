"""Place the axes of a device mesh on a machine: try every division of the axes over servers, switches and beyond.

The ranks of a mesh are numbered along its last axis first; their GPUs are free. The GPUs, in their best order
(`topoplan.operate.rank_order`), have levels: the GPUs of a server, the servers of a switch, the switches. A *placement*
divides the extent of every axis over the levels, as in

    dp 4, tp 8 on 4 servers of 8 GPUs:    tp 8 in servers, dp 4 across;  or tp 2 in and 4 across, dp 4 in servers;  …

All placements are tried, and the axes nested in every order along the GPUs, which counts if extents do not divide the
levels. The groups of an axis run NCCL's ring at once, alone or beside those of the other axes, each axis at a rate in
proportion to its weight (`topoplan.operate.link_loads`). For up to `MOST_PACKED` GPUs the fastest ones are also planned
as trees that share the links (`topoplan.solve.mesh_planner`), and the best plan decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import permutations, product
from math import prod

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.topology import Topology
from topoplan.operate.link_loads import HopLoads
from topoplan.operate.rank_order import RankOrder, best_order
from topoplan.plans.mesh_plans import groups_along
from topoplan.plans.plan import COLLECTIVES
from topoplan.schedules.nccl_server_routes import summed
from topoplan.solve.mesh_planner import mesh_weights, plan_mesh
from topoplan.units import bus_factor

MOST_PACKED = 16
"""Most GPUs for planning placements as trees."""

MOST_PLANNED = 2
"""Placements that are planned as trees, besides the given one."""

MOST_PLACEMENTS = 2000
"""Most placements with every order of the axes inside a server."""

PRESETS: dict[str, dict[str, Fraction]] = {
    "megatron": {
        "tp": Fraction(40),
        "cp": Fraction(8),
        "ep": Fraction(8),
        "dp": Fraction(1),
        "pp": Fraction(1, 5),
    }
}
"""Weights of the axes of a kind of training, by preset.

megatron: Megatron-LM numbers ranks tp-cp-ep-dp-pp, tp fastest (its `initialize_model_parallel`), with tp inside servers
(Narayanan et al., SC 2021, arXiv 2104.04473, section 3.2). tp, dp and pp are the bytes of an iteration, own arithmetic
by section 3 of that paper: 175e9 parameters in 96 layers of width 12288, sequences of 2048, tp 8, pp 12, dp 4 and 384
microbatches of one sequence. tp sums 4 activations of a layer and microbatch, 620 GB; dp sums 7.3 GB of float32
gradients; pp sends 4.8 GB to the next stage and back. That is 85 to 1 to 0.7, and with a quarter of the microbatches 21
to 1 to 0.2. cp and ep stand between tp and dp, as in that order; no source gives their bytes.
"""

LEVELS = ("in a server", "on a switch", "in a pod", "in a larger pod")
"""Names of levels from the inside; the outermost of several is `ACROSS`."""

ACROSS = "across"

Factors = tuple[tuple[int, ...], ...]
"""Extents of every axis on each level, from the server outwards."""


@dataclass(frozen=True, slots=True)
class MeshPlacement:
    """A placement of the ranks of a mesh on GPUs.

    ranks: index of each rank's GPU in the machine.
    factors: extents of every axis on each level; empty if the axes do not follow the levels.
    alone: GB/s of algorithm bandwidth of each axis without the others.
    together: GB/s of algorithm bandwidth of an axis of weight 1, all at once.
    packed: the same with trees planned together; None if not planned.
    proved: whether no trees are faster than those.
    nested: names of axes that do not follow the levels, outermost first; empty for the given ranks.
    """

    ranks: tuple[int, ...]
    factors: Factors
    alone: tuple[Fraction, ...]
    together: Fraction
    packed: float | None = None
    proved: bool = False
    nested: tuple[str, ...] = ()

    @property
    def merit(self) -> tuple[float | Fraction, ...]:
        """Sort key, larger is better: trees, then rings at once, then rings alone."""
        return (self.packed or 0.0, self.together, sum(self.alone, Fraction(0)))


@dataclass(frozen=True, slots=True)
class MeshOrder:
    """The placements of a mesh, best first, beside the given ranks.

    weights: the active axes.
    levels: name and number of parts of each level: GPUs in a server, servers on a switch, and so on.
    placements: the first of each rate.
    order: the best order for one ring over all ranks.
    """

    axes: tuple[tuple[str, int], ...]
    weights: tuple[tuple[str, Fraction], ...]
    levels: tuple[tuple[str, int], ...]
    given: MeshPlacement
    placements: tuple[MeshPlacement, ...]
    order: RankOrder

    @property
    def best(self) -> MeshPlacement:
        """The first placement; the given one if none is better."""
        return self.placements[0]


def preset_weights(preset: str, mesh: Mapping[str, int]) -> dict[str, Fraction]:
    """Return the weights of the axes with two ranks or more.

    >>> {axis: int(weight) for axis, weight in preset_weights("megatron", {"dp": 4, "tp": 8}).items()}
    {'dp': 1, 'tp': 40}
    """
    if preset not in PRESETS:
        raise UsageError(f"preset {preset!r} is unknown; use one of {', '.join(PRESETS)}")
    known = PRESETS[preset]
    wide = [name for name, extent in mesh.items() if extent > 1]
    unknown = [name for name in wide if name not in known]
    if unknown:
        raise UsageError(
            f"preset {preset} has weights of {', '.join(known)}, not of axis {unknown[0]!r}; rename the axis, or "
            "give all weights with --axes"
        )
    return {name: known[name] for name in wide}


def best_mesh(
    topology: Topology,
    mesh: Mapping[str, int],
    collective: str = "allreduce",
    *,
    axes: Mapping[str, Fraction | int] | Sequence[str] | None = None,
    given: Sequence[int] | None = None,
    channels: str = "auto",
) -> MeshOrder:
    """Return the placements of a mesh, the one whose axes run fastest at once first.

    topology: all its GPUs are ranks.
    given: index of every rank's GPU now.

    If both axes need the same rate, dp goes into the servers, and tp half across:

    >>> import topoplan
    >>> found = best_mesh(topoplan.nvswitch_cluster(2, gpus=4), {"dp": 2, "tp": 4})
    >>> found.best.factors, [float(rate) for rate in found.best.alone], float(found.best.together)
    (((2, 1), (2, 2)), [300.0, 33.333333333333336], 33.333333333333336)
    """
    extents = tuple(mesh.items())
    weights = mesh_weights(extents, axes)
    if collective not in COLLECTIVES:
        raise UsageError(f"collective {collective!r} is unknown; use one of {', '.join(COLLECTIVES)}")
    size = len(topology.gpus)
    if prod(extent for _, extent in extents) != size:
        text = " x ".join(f"{name} {extent}" for name, extent in extents)
        raise UsageError(
            f"the mesh must have as many ranks as GPUs, {size}, got {text}; change an extent, or name GPUs"
        )
    order = best_order(topology, given=given, channels=channels)
    hops = HopLoads(topology, channels)
    rates = _RingRates(hops, extents, weights, collective)
    levels = _levels(hops, order)
    sizes = [size for _, size in levels]
    bases = [order.ranks, order.given] if order.ranks != order.given else [order.ranks]
    tried: dict[tuple[int, ...], MeshPlacement] = {}
    for base in bases:
        for factors, ranks in _placements(extents, sizes, base, turned=not hops.symmetric_inside):
            if ranks not in tried:
                tried[ranks] = rates.placement(ranks, factors)
        for nest in permutations(range(len(extents))):
            ranks = _nested([extent for _, extent in extents], nest, base)
            if ranks not in tried:
                found = rates.placement(ranks, ())
                tried[ranks] = replace(found, nested=tuple(extents[axis][0] for axis in nest))
    now = tried.get(order.given) or rates.placement(order.given, ())
    known: dict[tuple[object, ...], MeshPlacement] = {}
    along = {(one.alone, one.together) for one in tried.values() if one.factors}
    for one in [now, *tried.values()]:
        if one.factors or (one.alone, one.together) not in along:
            known.setdefault((one.factors, one.nested, one.alone, one.together), one)
    best = sorted(known.values(), key=lambda one: one.merit, reverse=True)
    if size <= MOST_PACKED:
        planned = [
            _packed(topology, one, extents, weights, collective, channels) for one in best[:MOST_PLANNED]
        ]
        now = _packed(topology, now, extents, weights, collective, channels)
        planned.sort(key=lambda one: one.merit, reverse=True)
        best = [*planned, *best[MOST_PLANNED:]]
    if now.merit >= best[0].merit:
        best = [now, *(one for one in best if one.ranks != now.ranks)]
    return MeshOrder(extents, weights, levels, now, tuple(best), order)


class _RingRates:
    """Computes the rates of rings of all groups of a mesh."""

    def __init__(
        self,
        hops: HopLoads,
        extents: Sequence[tuple[str, int]],
        weights: Sequence[tuple[str, Fraction]],
        collective: str,
    ) -> None:
        self._hops = hops
        self._axes = [
            # `bus_factor` without rounding: no denominator exceeds the number of ranks
            (
                groups_along(extents, axis),
                weight,
                Fraction(bus_factor(collective, size)).limit_denominator(size),
            )
            for axis, weight in weights
            if (size := dict(extents)[axis])
        ]

    def placement(self, ranks: tuple[int, ...], factors: Factors) -> MeshPlacement:
        hops = self._hops
        loads = []
        for groups, _, factor in self._axes:
            rings = hops.ring_loads(*([ranks[rank] for rank in group] for group in groups))
            loads.append(None if rings is None else summed([(rings, factor)]))
        alone = tuple(hops.rate(load) for load in loads)
        whole = [
            (load, weight) for load, (_, weight, _) in zip(loads, self._axes, strict=True) if load is not None
        ]
        together = hops.rate(summed(whole)) if len(whole) == len(loads) else Fraction(0)
        return MeshPlacement(ranks, factors, alone, together)


def _levels(hops: HopLoads, order: RankOrder) -> tuple[tuple[str, int], ...]:
    """Return name and number of parts of every level whose parts are equal and contiguous in the order."""
    place = {rank: number for number, rank in enumerate(order.ranks)}
    found: list[tuple[str, int]] = []
    inner = 1
    for number, level in enumerate(order.levels):
        parts = [[place[rank] for server in group for rank in hops.servers[server]] for group in level]
        sizes = {len(part) for part in parts}
        whole = all(max(part) - min(part) == len(part) - 1 and min(part) % len(part) == 0 for part in parts)
        size = max(sizes)
        if len(sizes) == 1 and whole and size % inner == 0 and (number == 0 or size > inner):
            name = LEVELS[min(number, len(LEVELS) - 1)]
            found.append((ACROSS if number and size == hops.size else name, size // inner))
            inner = size
    return (*found, (ACROSS, hops.size // inner)) if inner < hops.size else tuple(found)


def _placements(
    extents: Sequence[tuple[str, int]], levels: Sequence[int], base: Sequence[int], *, turned: bool
) -> Iterator[tuple[Factors, tuple[int, ...]]]:
    """Yield every division of the axes over the levels; if ``turned``, with every order of axes inside a server."""
    found = list(_divisions([extent for _, extent in extents], levels))
    inner = list(permutations(range(len(extents))))[::-1]
    if not turned or len(found) * len(inner) > MOST_PLACEMENTS:
        inner = inner[-1:]
    for by_level, turn in product(found, inner):
        factors = tuple(zip(*by_level, strict=True))
        yield factors, _ranks(factors, levels, turn, base)


def _divisions(extents: Sequence[int], levels: Sequence[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield the extents of the axes on every level."""
    if not levels:
        if all(extent == 1 for extent in extents):
            yield ()
        return
    for part in _filling(extents, levels[0]):
        rest = [extent // taken for extent, taken in zip(extents, part, strict=True)]
        for others in _divisions(rest, levels[1:]):
            yield (part, *others)


def _filling(extents: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    if not extents:
        if size == 1:
            yield ()
        return
    for taken in range(1, size + 1):
        if extents[0] % taken == 0 and size % taken == 0:
            for others in _filling(extents[1:], size // taken):
                yield (taken, *others)


def _ranks(
    factors: Factors, levels: Sequence[int], inner: Sequence[int], base: Sequence[int]
) -> tuple[int, ...]:
    """Return the GPU of every rank; inside a server the last axis of ``inner`` varies fastest."""
    found = []
    for place in product(*(range(prod(parts)) for parts in factors)):
        rest = list(place)
        position, width = 0, 1
        for level, size in enumerate(levels):
            digit = 0
            for axis in inner if level == 0 else range(len(factors)):
                extent = factors[axis][level]
                digit = digit * extent + rest[axis] % extent
                rest[axis] //= extent
            position += digit * width
            width *= size
        found.append(base[position])
    return tuple(found)


def _nested(extents: Sequence[int], nest: Sequence[int], base: Sequence[int]) -> tuple[int, ...]:
    """Return the GPU of every rank, with the axes nested along the GPUs in the order ``nest``, outermost first."""
    found = []
    for place in product(*map(range, extents)):
        position = 0
        for axis in nest:
            position = position * extents[axis] + place[axis]
        found.append(base[position])
    return tuple(found)


def _packed(
    topology: Topology,
    one: MeshPlacement,
    extents: Sequence[tuple[str, int]],
    weights: Sequence[tuple[str, Fraction]],
    collective: str,
    channels: str,
) -> MeshPlacement:
    try:
        plan = plan_mesh(
            reordered(topology, one.ranks), dict(extents), collective, axes=dict(weights), channels=channels
        )
    except InfeasibleError:
        # the links of some group do not join it without GPUs of others
        return one
    return replace(one, packed=plan.rate, proved=plan.gap == 0)


def reordered(topology: Topology, order: Sequence[int]) -> Topology:
    """Return the machine with its GPUs numbered in an order."""
    gpus = [device for device in topology.devices if device.kind == "gpu"]
    turned = iter([gpus[place] for place in order])
    return replace(
        topology,
        devices=tuple(next(turned) if device.kind == "gpu" else device for device in topology.devices),
    )

"""Rings as plans: the rival that packed trees are compared with.

Which ring is meant is always said, because it decides the comparison: over direct NVLinks only, over PCIe
where these give none (what NCCL did up to 2.7, and what Blink compares with), or with hops that may be relayed
through other GPUs (one between two, in NCCL since 2.8).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from topoplan.bounds.cuts_and_partitions import best_bound
from topoplan.errors import InfeasibleError, UsageError
from topoplan.fabric.fabric import Fabric, usable_fabric
from topoplan.plans.allocation import Allocation
from topoplan.plans.build import build_plan, trivial_plan
from topoplan.plans.plan import Plan
from topoplan.schedules.relay import relay_rings
from topoplan.schedules.rings.forest import LogicalRing, ring_forest
from topoplan.schedules.rings.hamiltonian_cycles import NODE_LIMIT, STEP_LIMIT, disjoint_rings, ring_limit
from topoplan.schedules.rings.order import order_is_exact, server_rings, single_ring, switched_rings
from topoplan.schedules.rings.routes import Routes
from topoplan.topology import Topology, TopologyLike
from topoplan.units import counted

RING_KINDS = ("auto", "nvlink", "pcie", "relay")


def ring(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    kind: str = "auto",
) -> Plan:
    """The ring schedule of a collective.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes
    collective : str
        allreduce, broadcast, reduce, allgather or reduce_scatter.
    gpus : sequence of int or None
        The allocation; all GPUs for None.
    root : int or None
        GPU number of the root of a broadcast or reduce; the allocation's first GPU for None.
    kind : str
        ``nvlink``: as many link-disjoint directed rings over direct NVLinks as exist, by exact search; a
        ring takes one wire of each link it crosses. Where wires differ in speed, the speed at which rings x
        speed is largest is chosen, and a wire of twice that speed has room for two rings. Two GPUs have one
        ring, there and back, per wire. Behind an NVSwitch one logical ring at the full port rate is the
        equivalent (one per plane of switches).
        ``pcie``: one ring over PCIe in the order that loads shared links least.
        ``relay``: the best mix of rings over NVLink whose hops may pass through other GPUs.
        ``auto``: nvlink where there is such a ring, else pcie. Across servers the faster of one order of all ranks
        and of rings that enter every server once over NICs of their own (`topoplan.schedules.rings.order`).

    Returns
    -------
    Plan
        ``schedule`` is "nvlink ring", "pcie ring", "relay ring", or across servers "network ring". Rate and bound
        speak of that channel only.
        Notes say how many rings there are and whether the search was exhaustive.

    Raises
    ------
    UsageError
        Unknown collective or kind, GPU out of range, a root outside the allocation, or a root where the
        collective has none.
    InfeasibleError
        There is no such ring.

    Examples
    --------
    DGX-1V with links of 25 GB/s: six rings, 6 x 25 x 8 / 14 GB/s. Blink's GPUs 1, 4, 5, 7 have none.

    >>> import topoplan
    >>> machine = topoplan.load("dgx-1v")
    >>> round(ring(machine).rate, 3), ring(machine, "broadcast").rate
    (85.714, 150.0)
    >>> ring(machine, gpus=[1, 4, 5, 7]).schedule
    'pcie ring'
    >>> round(ring(machine, gpus=[1, 4, 5, 7], kind="relay").rate, 3)
    33.333
    """
    started = time.perf_counter()
    asked = Allocation.of(topology, collective, gpus=gpus, root=root)
    collective = asked.collective
    if kind not in RING_KINDS:
        raise UsageError(f"ring kind {kind!r} is unknown; use one of {', '.join(RING_KINDS)}")
    if len(asked.gpus) == 1:
        fabric = Fabric(asked.topology, ("nvlink",))
        made = trivial_plan(fabric, collective, root=asked.root, method="ring")
    else:
        find = {"auto": _automatic, "nvlink": _over_nvlink, "pcie": _over_pcie, "relay": _relayed}[kind]
        found = find(asked.topology)
        made = build_plan(
            found.fabric,
            collective,
            root=asked.root,
            shards=ring_forest(found.rings, found.fabric, collective=collective, root=asked.root),
            certificate=best_bound(found.fabric, collective, asked.root),
            schedule=found.schedule,
            method="ring",
            notes=found.notes,
        )
    return made.timed(time.perf_counter() - started)


@dataclass(frozen=True, slots=True)
class _Found:
    """Rings, where they run, and what there is to say about them."""

    fabric: Fabric
    schedule: str
    rings: tuple[LogicalRing, ...]
    notes: tuple[str, ...]


def _automatic(allocation: Topology) -> _Found:
    fabric = usable_fabric(allocation)
    if fabric.union:
        fabric = _connected(allocation, "pcie", "a ring over both is not looked for")
    if fabric.channels == ("pcie",):
        return _on_pcie(fabric, "NVLink does not connect the allocation, so the ring runs over PCIe")
    rings, note = _nvlink_rings(fabric)
    if rings:
        kind = "network ring" if "network" in fabric.channels else "nvlink ring"
        return _Found(fabric, kind, rings, (note,))
    pcie = _connected(allocation, "pcie", f"{note}; try kind relay")
    return _on_pcie(pcie, f"{note}, so the ring runs over PCIe")


def _over_nvlink(allocation: Topology) -> _Found:
    fabric = _connected(allocation, "nvlink", "try kind pcie")
    rings, note = _nvlink_rings(fabric)
    if not rings:
        raise InfeasibleError(f"{note} on {', '.join(allocation.gpus)}; try kind relay or pcie")
    return _Found(fabric, "nvlink ring", rings, (note,))


def _over_pcie(allocation: Topology) -> _Found:
    return _on_pcie(_connected(allocation, "pcie", "try kind nvlink or relay"))


def _relayed(allocation: Topology) -> _Found:
    fabric = _connected(allocation, "nvlink", "try kind pcie")
    seeds, _ = _nvlink_rings(fabric)
    rings, proved = relay_rings(fabric, seeds)
    claim = "proved: no mix of rings is better" if proved else "found by local search: a better mix may exist"
    tours = f"a mix of {len(rings)} relaying rings" if len(rings) > 1 else "one relaying ring"
    return _Found(fabric, "relay ring", rings, (f"{tours}, {claim}",))


def _connected(allocation: Topology, channel: str, remedy: str) -> Fabric:
    fabric = Fabric(allocation, (channel,))
    cut = fabric.unreachable()
    if cut:
        wires = {"nvlink": "NVLink", "pcie": "PCIe"}[channel]
        raise InfeasibleError(f"no {wires} path leaves the cut {{{', '.join(cut)}}}; {remedy}", cut=cut)
    return fabric


def _on_pcie(fabric: Fabric, *notes: str) -> _Found:
    found = single_ring(fabric)
    if found is None:
        raise InfeasibleError(
            f"no PCIe ring joins {', '.join(fabric.ranks)}: some hop would pass another GPU"
        )
    how = "the best of all orders" if order_is_exact(fabric) else "depth-first or plain order of the GPUs"
    order = " ".join(fabric.ranks[rank] for rank in found.order)
    return _Found(fabric, "pcie ring", (found,), (*notes, f"one ring over PCIe: {order} ({how})"))


def _nvlink_rings(fabric: Fabric) -> tuple[tuple[LogicalRing, ...], str]:
    """The rings, and what to say of them or of their absence."""
    if not fabric.direct:
        routes = Routes(fabric)
        rings, across = switched_rings(fabric, routes), server_rings(fabric, routes)
        if _total(across) > _total(rings):
            number = "one ring" if len(across) == 1 else f"{len(across)} rings"
            return across, f"{number} that enter every server once; other orders may give faster ones"
        if not rings:
            return (), "no NVLink ring exists (some hop would pass another GPU)"
        if (
            not all(any(ends < fabric.size for ends in pair) for pair in fabric.ends)
            or len(fabric.channels) > 1
        ):
            number = "one ring" if len(rings) == 1 else f"{len(rings)} rings in one order of the GPUs"
            return rings, f"{number} over several switches or servers; other orders may give faster ones"
        number = "a single logical ring" if len(rings) == 1 else f"{len(rings)} logical rings, one per plane,"
        return rings, f"{number} over the NVSwitch: every hop crosses it, at the rate of the ports"
    orders, speed, exhaustive = _fastest_rings(fabric)
    proof = "the search was exhaustive"
    if not exhaustive:
        proof = f"the search stopped at {STEP_LIMIT} paths or {NODE_LIMIT} packings, more may exist"
    if not orders:
        return (), f"no NVLink ring {'exists' if exhaustive else 'was found'} ({proof})"
    index = {ends: position for position, ends in enumerate(fabric.ends)}
    rings = tuple(
        LogicalRing(
            speed, order, tuple((index[hop],) for hop in zip(order, order[1:] + order[:1], strict=True))
        )
        for order in orders
    )
    number = counted(len(rings), "link-disjoint NVLink ring")
    return rings, f"{number} of {float(speed):g} GB/s; {proof}"


def _total(rings: tuple[LogicalRing, ...]) -> Fraction:
    return sum((ring.weight for ring in rings), Fraction(0))


def _fastest_rings(fabric: Fabric) -> tuple[tuple[tuple[int, ...], ...], Fraction, bool]:
    """Orders of the disjoint rings of largest total speed, the speed of each in GB/s, and whether it is proved."""
    wires = [c / link.count for c, link in zip(fabric.capacity, fabric.links, strict=True)]
    best: tuple[tuple[int, ...], ...] = ()
    speed, exhaustive = Fraction(0), True
    for candidate in sorted(set(wires), reverse=True):
        lanes = [[0] * fabric.size for _ in range(fabric.size)]
        for (src, dst), link, wire in zip(fabric.ends, fabric.links, wires, strict=True):
            lanes[src][dst] = link.count * (wire // candidate)
        if ring_limit(lanes) * candidate > len(best) * speed:
            search = disjoint_rings(lanes)
            exhaustive = exhaustive and search.exhaustive
            if len(search.rings) * candidate > len(best) * speed:
                best, speed = search.rings, candidate
    return best, speed, exhaustive

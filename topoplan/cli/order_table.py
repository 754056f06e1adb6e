"""The order of ranks as tables and as a JSON object: rates before and after, what is proved, who sits where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from topoplan.cli.damage_options import Machine
from topoplan.cli.output import counted, table
from topoplan.fabric.fabric import channel_words, usable_fabric
from topoplan.formats.slurm.hostlist import folded
from topoplan.ordering.hop_loads import OrderRates
from topoplan.ordering.launch_files import Seat
from topoplan.ordering.mesh_axes import MeshOrder, Placement
from topoplan.ordering.search import ENUMERATED, RankOrder
from topoplan.units import bus_factor, bus_words, number_ranges

MOST_PLACEMENTS = 12
"""Placements that are listed."""

WIDEST = 110
"""Characters of a list that are shown."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Who sits where.

    Parameters
    ----------
    machine : Machine
    gpus : tuple of int
        Numbers of the GPUs that are ranks, ascending.
    given, found : tuple of Seat
        Of every rank, as given and in the best order.
    order : tuple of int
        The GPU of every rank in the best order.
    collective : str
    """

    machine: Machine
    gpus: tuple[int, ...]
    given: tuple[Seat, ...]
    found: tuple[Seat, ...]
    order: tuple[int, ...]
    collective: str

    @property
    def hosts(self) -> list[str]:
        """Hosts in the order in which their first ranks come."""
        return list(dict.fromkeys(seat.host for seat in self.found))


def print_order(answer: Answer, ranked: RankOrder) -> None:
    """Rates as given and in the best order, and its hosts and GPUs."""
    channels = usable_fabric(answer.machine.whole.subset(answer.gpus)).channels
    print(
        f"order of {counted(len(answer.order), 'rank')} on {counted(len(answer.hosts), 'host')} for "
        f"{answer.collective} on {answer.machine.whole.name}, over {channel_words(channels)}"
    )
    print()
    rows = []
    for name, before, after in _rates(answer, ranked):
        gain = f"{after[0] / before[0]:.2f}x" if before[0] else "-"
        rows.append((name, *(f"{rate:.6g}" if rate else "-" for rate in (*before, *after)), gain))
    print(table(("", "algbw as given", "busbw", "algbw in this order", "busbw", "gain"), rows))
    print()
    bound = float(ranked.bound)
    if ranked.proof == ENUMERATED:
        print("ring    optimal among all orders: every one was tried")
    elif ranked.proof:
        print(
            f"ring    optimal among all orders: no ring of any order exceeds {bound:.6g} GB/s of bus bandwidth, proved"
        )
    else:
        gap = float(1 - ranked.after.ring / ranked.bound)
        print(
            f"ring    {gap:.2%} below {bound:.6g} GB/s of bus bandwidth, which no ring of any order exceeds"
        )
    if ranked.after.tree is None:
        print("NCCL    lays rings of its own inside a server, several at once: topoplan compare has them")
    crossed = [float(rates.between_switches) for rates in (ranked.before, ranked.after)]
    if any(crossed):
        print(
            f"ways    the ring crosses links between switches {crossed[0]:.6g} times as given, {crossed[1]:.6g} times "
            "in this order"
        )
    if ranked.ranks == ranked.given:
        print("order   as given: none that was tried is better")
    _print_seats(answer)


Rates = tuple[float, float]
"""Algorithm and bus bandwidth in GB/s."""


def _rates(answer: Answer, ranked: RankOrder) -> list[tuple[str, Rates, Rates]]:
    """What ring and tree do as given and as found."""
    factor = bus_factor(answer.collective, len(answer.order))
    buses = [float(rates.ring) for rates in (ranked.before, ranked.after)]
    rings: list[Rates] = [(bus / factor if factor else 0.0, bus) for bus in buses]
    rows = [("ring", rings[0], rings[1])]
    if answer.collective == "allreduce" and ranked.after.tree is not None:
        algorithms = [float(rates.tree or 0) for rates in (ranked.before, ranked.after)]
        trees: list[Rates] = [(rate, rate * factor) for rate in algorithms]
        rows.append(("tree", trees[0], trees[1]))
    return rows


def _print_seats(answer: Answer) -> None:
    print(f"hosts   {_cut(folded(answer.hosts), WIDEST)}")
    taken: dict[str, list[int]] = {}
    for seat in answer.found:
        taken.setdefault(seat.host, []).append(seat.slot)
    alike: dict[tuple[int, ...], list[str]] = {}
    for host, slots in taken.items():
        alike.setdefault(tuple(slots), []).append(host)
    for places, names in list(alike.items())[:4]:
        where = "every host" if len(alike) == 1 else _cut(folded(names), 40)
        if len(alike) > 1 or list(places) != list(range(len(places))):
            told = number_ranges(places)
            print(f"GPUs    {_cut(told, 60)} on {where}")
    if len(alike) > 4:
        print(f"GPUs    otherwise on {len(alike) - 4} sets of hosts more; --json has all")


def _cut(text: str, most: int) -> str:
    """A list of which so many characters are shown; --json has all."""
    return text if len(text) <= most else f"{text[:most]}…"


def print_mesh(answer: Answer, ranked: MeshOrder) -> None:
    """The placements of a mesh with their rates, and where each axis lies in the best one."""
    axes = " x ".join(f"{name} {extent}" for name, extent in ranked.axes)
    print(
        f"order of {counted(len(answer.order), 'rank')} on {counted(len(answer.hosts), 'host')}, a mesh of {axes}, "
        f"{answer.collective} on {answer.machine.whole.name}"
    )
    words = [word for word, _ in ranked.levels]
    weights = ", ".join(f"{name} {weight}" for name, weight in ranked.weights)
    print(f"weights {weights}: how fast the axes are to be in proportion (--axes)")
    told = " x ".join(f"{size} {word}" for word, size in ranked.levels)
    print(f"levels  {told}; below, the extent of every axis on each")
    print()
    header = (
        "ranks",
        *(name for name, _ in ranked.axes),
        *(f"{name} alone" for name, _ in ranked.weights),
        "rings at once",
        "trees at once",
    )
    rows = [_placement_row("as given", ranked, ranked.given)]
    for number, one in enumerate(ranked.placements[:MOST_PLACEMENTS], 1):
        rows.append(_placement_row(f"{number}", ranked, one))
    print(table(header, rows))
    if len(ranked.placements) > MOST_PLACEMENTS:
        print(f"and {len(ranked.placements) - MOST_PLACEMENTS} slower ones; --json has all")
    print()
    print("GB/s of algorithm bandwidth in every group; at once: of an axis of weight 1, all axes running")
    best = ranked.best
    if best.ranks == ranked.given.ranks:
        print("order   as given: no placement that was tried is faster")
    for (name, extent), parts in zip(ranked.axes, best.factors, strict=False):
        if extent > 1:
            print(f"{name:<7} {_lies(parts, words)}{_rate_alone(ranked, best, name, answer.collective)}")
    if best.nested:
        print(
            f"axes    {' > '.join(best.nested)} along the hosts, across their ends: extents do not divide the levels"
        )
    if best.packed is not None:
        proof = "no trees are faster, proved" if best.proved else "faster trees may exist"
        print(f"trees   planned together do {best.packed:.6g} GB/s of weight 1 in this order ({proof})")
    _print_seats(answer)


def _rate_alone(ranked: MeshOrder, best: Placement, name: str, collective: str) -> str:
    for (axis, weight), alone in zip(ranked.weights, best.alone, strict=True):
        if axis == name:
            ranks = dict(ranked.axes)[axis]
            rates = [float(alone), float(best.together * weight)]
            return ": " + "; ".join(
                f"{word} {rate:.6g} GB/s{bus_words(rate, collective, ranks)}"
                for word, rate in zip(("rings alone", "at once"), rates, strict=True)
            )
    return ""


def _lies(parts: Sequence[int], words: Sequence[str]) -> str:
    """Where an axis lies.

    Examples
    --------
    >>> _lies((2, 4), ["in a server", "across"]), _lies((1, 4), ["in a server", "across"])
    ('2 in a server x 4 across', '4 across')
    """
    told = [f"{part} {word}" for part, word in zip(parts, words, strict=True) if part > 1]
    return " x ".join(told) or "-"


def _placement_row(name: str, ranked: MeshOrder, one: Placement) -> tuple[str, ...]:
    depth = {axis: f"nested {place + 1}" for place, axis in enumerate(one.nested)}
    lies = ["x".join(map(str, parts)) for parts in one.factors]
    lies = lies or [depth.get(axis, "-") for axis, _ in ranked.axes]
    rates = [*one.alone, one.together]
    return (
        name,
        *lies,
        *(f"{float(rate):.6g}" if rate else "-" for rate in rates),
        "-" if one.packed is None else f"{one.packed:.6g}",
    )


def order_object(answer: Answer, ranked: RankOrder | MeshOrder, given: Sequence[int]) -> dict[str, object]:
    """The answer as a JSON object."""
    names = answer.machine.whole.gpus
    found: dict[str, object] = {
        "collective": answer.collective,
        "order": list(answer.order),
        "gpus": [names[gpu] for gpu in answer.order],
        "nodes": answer.hosts,
        "ranks": [{"host": seat.host, "slot": seat.slot} for seat in answer.found],
        "given": {"order": list(given), "nodes": list(dict.fromkeys(seat.host for seat in answer.given))},
    }
    if isinstance(ranked, MeshOrder):
        found["mesh"] = dict(ranked.axes)
        found["weights"] = {name: str(weight) for name, weight in ranked.weights}
        found["levels"] = [[word, size] for word, size in ranked.levels]
        found["before"] = _placement_object(ranked, ranked.given, answer.collective)
        found["after"] = _placement_object(ranked, ranked.best, answer.collective)
        found["placements"] = [_placement_object(ranked, one, answer.collective) for one in ranked.placements]
        return found
    factor = bus_factor(answer.collective, len(answer.order))
    rows = _rates(answer, ranked)
    for key, side, rates in (("before", 1, ranked.before), ("after", 2, ranked.after)):
        found[key] = _rates_object(rows, side, rates)
    bound = float(ranked.bound)
    found["bound"] = {"algbw": bound / factor if factor else 0.0, "busbw": bound}
    found["optimal"] = bool(ranked.proof)
    found["proof"] = ranked.proof
    return found


def _rates_object(
    rows: Sequence[tuple[str, Rates, Rates]], side: int, rates: OrderRates
) -> dict[str, object]:
    found: dict[str, object] = {"ring": None, "tree": None}
    for row in rows:
        algbw, busbw = row[1] if side == 1 else row[2]
        found[row[0]] = {"algbw": algbw, "busbw": busbw}
    found["between_servers"] = rates.between_servers
    found["between_switches"] = float(rates.between_switches)
    return found


def _placement_object(ranked: MeshOrder, one: Placement, collective: str) -> dict[str, object]:
    def rate(algbw: Fraction, axis: str) -> dict[str, float]:
        factor = bus_factor(collective, dict(ranked.axes)[axis])
        return {"algbw": float(algbw), "busbw": float(algbw) * factor}

    return {
        "lies": {name: list(parts) for (name, _), parts in zip(ranked.axes, one.factors, strict=False)},
        "nested": list(one.nested),
        "alone": {
            name: rate(alone, name) for (name, _), alone in zip(ranked.weights, one.alone, strict=True)
        },
        "together": {name: rate(one.together * weight, name) for name, weight in ranked.weights},
        "trees_together": one.packed,
        "trees_optimal": one.proved,
    }

"""Identify the library machine of a server, GPU by GPU, so that missing links can be named.

A server is embedded in a machine so that no pair of its GPUs has more NVLink than its image: depth-first along the
links, pruned if a pair has more, or if too many pairs are short. Matrices hold GB/s of each pair. If all pairs have as
much, it is that machine or an allocation of it, under any numbering. Else it is that machine with faults if few links
are short (`MOST_SHORT`), the numbers are the machine's own or fit in few places, and it does not look like a machine of
its own, as one with equal GPUs does, unless its other devices are those of the machine too.

Behind an NVSwitch only the links of each GPU count, and half of the GPUs must have all of the machine's. Rates need not
be equal if the listing does not state them: those assumed for a matrix without models, and NCCL's own in its files.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from topoplan.errors import Note
from topoplan.machine.hardware import (
    MOST_LINKS,
    GpuGeneration,
    compute_capability,
    generation_of,
    is_amd,
    known_capability,
    nvlink_bandwidth,
)
from topoplan.machine.small_machines import SMALL_MACHINES
from topoplan.machine.topology import Link, Topology
from topoplan.operate.faults import SLOW, lower_median
from topoplan.reading.load import library, library_path, load
from topoplan.reading.pcie_tree import DIFFERENT_CPUS, ONE_SWITCH, relation, upward_paths

ALIKE = 1.12
"""Rates of a wire within this factor are those of one kind of link: NVLinks of 25 GB/s measure 22 to 25."""

_MOST_STEPS = 20_000

_MULTIPLE, _MOST_MULTIPLES = 0.02, 3 / 4
"""Distance of a whole multiple of a wire's rate, in wires, and the part of the links that makes rates nominal."""

Pairs = frozenset[frozenset[int]]


def short_pairs(
    have: Sequence[Sequence[float]], want: Sequence[Sequence[float]], places: Sequence[int]
) -> list[tuple[int, int]] | None:
    """Return pairs with less than their images in ``places``; None if some pair has more."""
    short = []
    for i, place in enumerate(places):
        for j in range(i):
            wanted = want[place][places[j]]
            if have[i][j] > ALIKE * wanted:
                return None
            if have[i][j] < SLOW * wanted:
                short.append((i, j))
    return short


def embed(
    have: Sequence[Sequence[float]],
    want: Sequence[Sequence[float]],
    *,
    pairs: int,
    first: Sequence[int],
    host: tuple[Pairs, Pairs],
) -> tuple[int, ...] | None:
    """Return places of the GPUs in a machine with at most ``pairs`` short pairs, those of ``first`` if they fit.

    Pairs of GPUs without any NVLink do not count as short if ``pairs`` is above 0. GPUs that share a PCIe switch in the
    server are not mapped to different CPUs of the machine; ``host`` has the pairs of both.
    """
    if not pairs and not _may_be_part(have, want):
        return None
    order = _outward(have)
    joined, divided = host
    bare = {i for i, row in enumerate(have) if not any(row)} if pairs else set()
    places: dict[int, int] = {}
    steps = 0

    def fits(i: int, place: int, left: int) -> int:
        for j, there in places.items():
            if have[i][j] > ALIKE * want[place][there]:
                return -1
            if {i, j} in joined and {place, there} in divided:
                return -1
            if have[i][j] < SLOW * want[place][there] and not bare & {i, j}:
                left -= 1
                if left < 0:
                    return -1
        return left

    def search(depth: int, left: int) -> bool:
        nonlocal steps
        if depth == len(order):
            return True
        i = order[depth]
        for place in (first[i], *(p for p in range(len(want)) if p != first[i])):
            steps += 1
            if steps > _MOST_STEPS:
                return False
            if place in places.values():
                continue
            rest = fits(i, place, left)
            if rest >= 0:
                places[i] = place
                if search(depth + 1, rest):
                    return True
                del places[i]
        return False

    return tuple(places[i] for i in range(len(have))) if search(0, pairs) else None


def _may_be_part(have: Sequence[Sequence[float]], want: Sequence[Sequence[float]]) -> bool:
    """Return whether a machine has at least as many pairs of each strength, and as many without NVLink."""
    own, other = (
        sorted((matrix[i][j] for i in range(len(matrix)) for j in range(i)), reverse=True)
        for matrix in (have, want)
    )
    enough = all(mine <= ALIKE * most for mine, most in zip(own, other, strict=False))
    few = all(mine >= SLOW * least for mine, least in zip(reversed(own), reversed(other), strict=False))
    return enough and few


def _outward(have: Sequence[Sequence[float]]) -> list[int]:
    """Return GPUs in an order in which each has a predecessor as neighbour if possible."""
    order: list[int] = []
    waiting = sorted(range(len(have)), key=lambda i: (-sum(have[i]), i))
    while waiting:
        near = [i for i in waiting if any(have[i][j] for j in order)]
        chosen = (near or waiting)[0]
        order.append(chosen)
        waiting.remove(chosen)
    return order


MOST_SHORT, MOST_SHORT_OF_EQUAL_PARTS = 1 / 3, 1 / 2
"""Bounds on the short part of a faulty machine's links; the second if it has as many devices of each kind."""

MOST_BARE = 1 / 3
"""Largest part of the GPUs that may have lost all NVLinks besides."""

MOST_PAIRS = 4
"""Most short pairs if the GPUs are numbered otherwise than in the library."""

LEAST_WHOLE = 8
"""GPUs of an unknown machine that counts as whole, times a power of two."""


@dataclass(frozen=True, slots=True)
class Resemblance:
    """The expected state of a server.

    machine: the library machine; None for no match.
    exact: whether every pair of GPUs has its full NVLinks.
    wires: expected NVLinks, both directions, between the server's own devices; empty without a machine.
    wire: GB/s of one NVLink if the description does not count them and the machine does, else 0.
    places: numbers of the machine's GPUs that the server's GPUs are compared with; empty behind a switch.
    numbered: whether those are the numbers in the names of the server's GPUs, not counted from 0, of that model.
    lacking: pairs that have fewer NVLinks than those numbers say, although the server equals ``places``.
    assumed: GB/s of an NVLink if the description does not state it, else 0.
    alike: if it is assumed, the machines with as many NVLinks of another rate, and that rate in GB/s.
    """

    machine: Topology | None = None
    exact: bool = False
    wires: tuple[Link, ...] = ()
    wire: float = 0.0
    places: tuple[int, ...] = ()
    numbered: bool = False
    lacking: tuple[tuple[str, str], ...] = ()
    assumed: float = 0.0
    alike: tuple[tuple[str, float], ...] = ()

    def whole(self, server: Topology) -> bool:
        """Return whether the server counts as whole rather than an allocation."""
        count = len(server.gpus)
        if self.machine is not None:
            return count == len(self.machine.gpus)
        return count >= LEAST_WHOLE and not count & (count - 1)


def resemblance(server: Topology) -> Resemblance:
    """Return the library machine of a server: equal, as an allocation, or with faults.

    >>> import topoplan
    >>> machine = topoplan.load("dgx-1v")
    >>> found = resemblance(topoplan.without_links(machine, ["gpu0-gpu3"]))
    >>> found.machine.name, found.exact, resemblance(machine.subset([1, 4, 5, 7])).exact
    ('dgx-1v', False, True)
    """
    stated, generation = shape_of(server), generation_in(server)
    found: list[tuple[tuple[object, ...], Resemblance, float]] = []
    for order, name in enumerate(_references()):
        if _gpus_listed(name) < len(stated.gpus):
            continue
        machine, other = _known(name)
        theirs = generation_in(machine)
        one_generation = generation is None or theirs in (None, generation)
        pair = other.sort == "switched" and _full_pair(server, stated, other)
        if not one_generation or (other.sort != stated.sort and not pair) or _other_maker(server, machine):
            continue
        wire = _wire_rate(server, machine, other)
        shape = shape_of(server, wire=wire) if wire else stated
        if pair:
            first, second = shape.gpus
            wires = _links([(first, second, max(other.wires))], shape.rate)
            laid: Resemblance | None = Resemblance(machine, shape.wires == other.wires[:2], wires)
        elif shape.sort == "none":
            equal = len(server.gpus) == len(machine.gpus) and same_parts(server, machine)
            laid = Resemblance(machine, exact=True) if equal else None
        elif shape.sort == "switched":
            laid = _switched(server, shape, machine, other)
        else:
            laid = _direct(server, shape, machine, other)
        if laid is not None:
            laid = replace(laid, wire=wire)
            likely = (not _same_model(server, machine), _rank(server, laid), bool(wire))
            place = (*likely, not _rates_equal(shape, other), *_distance(server, machine), order)
            found.append((place, laid, other.rate))
    if not found:
        return Resemblance()
    best = min(found, key=lambda one: one[0])[1]
    if not _rate_assumed(server):
        return best
    others = ((one.machine, own) for _, one, own in found if one.exact == best.exact and own != stated.rate)
    alike = tuple((machine.name, own) for machine, own in others if machine is not None)
    return replace(best, assumed=stated.rate, alike=alike)


@lru_cache(maxsize=64)
def _gpus_listed(name: str) -> int:
    """Return the GPUs of a library machine from its text: most are too small to be parsed."""
    text = (library_path() / f"{name}.json").read_text(encoding="utf-8")
    return text.count('"kind": "gpu"')


def _references() -> list[str]:
    """Return the library's names without machines that people build: their shape is their owner's choice."""
    return [name for name in library() if name not in SMALL_MACHINES]


@lru_cache(maxsize=64)
def _known(name: str) -> tuple[Topology, NvlinkShape]:
    machine = load(name)
    return machine, shape_of(machine)


@dataclass(frozen=True, slots=True)
class NvlinkShape:
    """NVLinks of a server.

    sort: ``direct`` between GPUs, ``switched``, ``none``, or ``mixed``.
    carried: GB/s between each two GPUs, the faster of both directions; if switched, in column 0 to the switches.
    wires: most NVLinks of each GPU in one direction.
    rate: GB/s of one whole wire.
    """

    gpus: tuple[str, ...]
    sort: str
    carried: tuple[tuple[float, ...], ...]
    wires: tuple[int, ...]
    rate: float

    @property
    def regular(self) -> bool:
        """Whether all GPUs have the same bandwidth."""
        sums = [sum(row) for row in self.carried]
        return max(sums) <= ALIKE * min(sums)


def shape_of(server: Topology, *, wire: float = 0.0) -> NvlinkShape:
    """Return the NVLinks of a server in comparable form, counted by `counted_nvlinks` if ``wire`` is given.

    >>> import topoplan
    >>> shape = shape_of(topoplan.load("dgx-2"))
    >>> shape.sort, shape.carried[0], shape.wires[0], shape.rate
    ('switched', (150.0,), 6, 25.0)
    """
    links = counted_nvlinks(server, wire)
    place = {gpu: i for i, gpu in enumerate(server.gpus)}
    direct = [link for link in links if link.src in place and link.dst in place]
    ports = [link for link in links if (link.src in place) != (link.dst in place)]
    sort = {(True, False): "direct", (False, True): "switched", (False, False): "none"}.get(
        (bool(direct), bool(ports)), "mixed"
    )
    width = 1 if sort == "switched" else len(place)
    carried: list[list[dict[str, float]]] = [[{} for _ in range(width)] for _ in place]
    wires = [Counter[str]() for _ in place]
    for link in links:
        for end, other, way in ((link.src, link.dst, "out"), (link.dst, link.src, "in")):
            if end in place:
                cell = carried[place[end]][place.get(other, 0)]
                cell[way] = cell.get(way, 0.0) + link.bandwidth
                wires[place[end]][way] += link.count
    return NvlinkShape(
        server.gpus,
        sort,
        tuple(tuple(max(cell.values(), default=0.0) for cell in row) for row in carried),
        tuple(max(count.values(), default=0) for count in wires),
        whole_rate(links),
    )


def server_nvlinks(server: Topology) -> list[Link]:
    """Return NVLinks of GPUs to each other and to switches, not to a CPU."""
    kinds = {device.name: device.kind for device in server.devices}
    return [
        link
        for link in server.links
        if link.channel == "nvlink" and {kinds[link.src], kinds[link.dst]} <= {"gpu", "nvswitch"}
    ]


def counted_nvlinks(server: Topology, wire: float) -> list[Link]:
    """Return `server_nvlinks`, each with the number of wires of ``wire`` GB/s that it has room for; as stated for 0.

    Measured rates vary by as much as a wire of 18, so a rate counts exactly only if most rates are whole multiples.

    >>> import topoplan
    >>> [link.count for link in counted_nvlinks(topoplan.load("dgx-1v"), 25.0)[:4]]
    [1, 1, 1, 1]
    """
    links = server_nvlinks(server)
    if not wire:
        return links
    numbers = [link.bandwidth / wire for link in links]
    exact = [abs(number - round(number)) < _MULTIPLE and number > 0.5 for number in numbers]
    nominal = sum(exact) >= _MOST_MULTIPLES * len(links)
    return [
        replace(link, count=max(1, round(number) if nominal and fits else math.ceil(number * SLOW)))
        for link, number, fits in zip(links, numbers, exact, strict=True)
    ]


def _wire_rate(server: Topology, machine: Topology, other: NvlinkShape) -> float:
    """Return the GB/s of a wire of a server that states each bundle as one, if the machine has such bundles; else 0."""
    links = server_nvlinks(server)
    if any(link.count > 1 for link in links):
        return 0.0
    most = max((link.bandwidth for link in links), default=0.0)
    count = round(most / other.rate) if other.rate else 0
    if not 2 <= count <= max(link.count for link in server_nvlinks(machine)):
        return 0.0
    rate = most / count
    return rate if rate <= ALIKE * other.rate and other.rate <= ALIKE * rate else 0.0


def whole_rate(links: Sequence[Link]) -> float:
    """Return the GB/s of one whole wire: the median if close to the fastest, else the fastest; 0 for none."""
    rates = [link.bandwidth / link.count for link in links]
    middle, most = lower_median(rates), max(rates, default=0.0)
    return middle if middle >= SLOW * most else most


def same_parts(server: Topology, machine: Topology) -> bool:
    """Return whether two servers have as many devices of each kind."""
    return Counter(d.kind for d in server.devices) == Counter(d.kind for d in machine.devices)


def _other_maker(server: Topology, machine: Topology) -> bool:
    """Return whether only one is of AMD, or of GPUs on Grace CPUs, as far as the server's GPUs show."""
    gpus = [server.device(gpu) for gpu in server.gpus]
    model = machine.device(machine.gpus[0]).model
    if model.startswith("MI"):
        known = any(gpu.fact("sm") or compute_capability(gpu.model) for gpu in gpus)
        return _rate_assumed(server) or (known and not is_amd(gpus))
    grace = any(gpu.fact("memory_node") for gpu in gpus)
    return (grace and not model.startswith("G")) or is_amd(gpus)


def _rank(server: Topology, laid: Resemblance) -> int:
    """Sort key, likeliest first: a whole machine, one with faults and equal parts, an allocation, any with faults."""
    machine = laid.machine
    whole = machine is not None and len(machine.gpus) == len(server.gpus)
    if whole and laid.exact:
        return 0
    if machine is not None and whole and same_parts(server, machine):
        return 1
    return 2 if laid.exact else 3


def _same_model(server: Topology, machine: Topology) -> bool:
    """Return whether all GPUs are of the machine's model, which is a word of theirs: a GB200 is not a B200."""
    model = machine.device(machine.gpus[0]).model
    word = re.compile(rf"(?<![a-z0-9]){re.escape(model)}(?![a-z0-9])", re.IGNORECASE)
    return bool(model) and all(word.search(server.device(gpu).model) for gpu in server.gpus)


def _distance(server: Topology, machine: Topology) -> tuple[object, ...]:
    """Sort key of a machine's differences from a server beside NVLinks."""
    own, other = (Counter(d.kind for d in one.devices) for one in (server, machine))
    parts = sum(abs(own[kind] - other[kind]) for kind in own | other)
    speeds = {link.bandwidth for link in server.links if link.channel in ("pcie", "c2c")}
    foreign = sum(link.bandwidth not in speeds for link in machine.links if link.channel in ("pcie", "c2c"))
    return (len(machine.gpus) - len(server.gpus), parts, foreign)


def _rates_equal(shape: NvlinkShape, other: NvlinkShape) -> bool:
    return shape.rate <= ALIKE * other.rate and other.rate <= ALIKE * shape.rate


def wire_of_model(server: Topology) -> float:
    """Return the GB/s of one NVLink of the library's machines of the GPUs' model; 0 if there is none, or several."""
    if not all(server.device(gpu).model for gpu in server.gpus):
        return 0.0
    rates = {other.rate for machine, other in map(_known, _references()) if _same_model(server, machine)}
    return rates.pop() if len(rates) == 1 else 0.0


def _rate_assumed(server: Topology) -> bool:
    """Return whether the rate of an NVLink was assumed, since a matrix states neither it nor the GPUs' models."""
    notes = (note for note in server.notes if isinstance(note, Note))
    return any(note.kind == "assumed" and "nvlink" in note.devices for note in notes)


def generation_in(server: Topology) -> GpuGeneration | None:
    """Return the generation of all GPUs of a server by their facts or models; None if they differ or state none."""
    gpus = [server.device(gpu) for gpu in server.gpus]
    known = {generation_of(0 if gpu.fact("gcn") else known_capability(gpu) or 0) for gpu in gpus}
    return known.pop() if len(known) == 1 else None


def _same_wires(server: Topology, shape: NvlinkShape, other: NvlinkShape) -> bool:
    """Return whether two servers have NVLinks of one rate, as NCCL's files and matrices without models may not say."""
    if _rates_equal(shape, other) or _rate_assumed(server):
        return True
    stated = {server.device(gpu).fact("sm") for gpu in server.gpus}
    sm = stated.pop() if len(stated) == 1 else ""
    return sm.isdecimal() and math.isclose(shape.rate, nvlink_bandwidth(int(sm)))


FULL = 2 / 3
"""Part of its NVLinks that a GPU has at most to one other if its board joins more GPUs without a switch."""

_BRIDGED = re.compile(r"PCIe|NVL\b|GH200", re.IGNORECASE)
"""Names of GPUs that a bridge, or their board, joins in pairs."""


def _full_pair(server: Topology, shape: NvlinkShape, other: NvlinkShape) -> bool:
    """Return whether two GPUs have all, or nearly all, their NVLinks to each other, as two of a switch in a matrix of
    them alone: links that others share are at most two thirds."""
    if shape.sort != "direct" or len(shape.gpus) != 2:
        return False
    if not FULL * max(other.wires) < min(shape.wires) <= max(shape.wires) <= max(other.wires):
        return False
    models = [server.device(gpu).model for gpu in server.gpus]
    if not any(models):
        return _rate_assumed(server) and max(other.wires) == MOST_LINKS
    return generation_in(server) is not None and not any(map(_BRIDGED.search, models))


def _switched(
    server: Topology, shape: NvlinkShape, machine: Topology, other: NvlinkShape
) -> Resemblance | None:
    if max(shape.wires) != max(other.wires) or not _same_wires(server, shape, other):
        return None
    bare = sum(not count for count in shape.wires)
    full = sum(count == max(other.wires) for count in shape.wires)
    # of two GPUs of one model, one on the switch shows that the other lost its links
    models = {server.device(gpu).model for gpu in server.gpus}
    one_of_two = bare == full == 1 and len(models) == 1 and _same_model(server, machine)
    if (bare > MOST_BARE * len(shape.gpus) and not one_of_two) or 2 * full < len(shape.gpus):
        return None
    switches = [device.name for device in server.devices if device.kind == "nvswitch"]
    if len(switches) != 1:
        return Resemblance(machine)
    count = max(other.wires)
    wires = [(gpu, switches[0], count) for gpu in shape.gpus]
    whole = all(row[0] >= SLOW * count * shape.rate for row in shape.carried)
    return Resemblance(machine, whole, _links(wires, shape.rate))


def _links(wires: Sequence[tuple[str, str, int]], rate: float) -> tuple[Link, ...]:
    return tuple(
        Link(*ends, "nvlink", count * rate, count)
        for first, second, count in wires
        for ends in ((first, second), (second, first))
    )


def _direct(
    server: Topology, shape: NvlinkShape, machine: Topology, other: NvlinkShape
) -> Resemblance | None:
    count = len(shape.gpus)
    equal_rates = _rates_equal(shape, other)
    models = {server.device(gpu).model for gpu in server.gpus}
    if not equal_rates and count < len(other.gpus) and any(models):
        return None
    scale = other.rate / shape.rate  # without models rates are assumed
    have = [[cell * scale for cell in row] for row in shape.carried]
    numbers = _numbers(shape.gpus, count, len(other.gpus))
    host = (_joined(server, ONE_SWITCH), _joined(machine, DIFFERENT_CPUS))
    places = embed(have, other.carried, pairs=0, first=numbers, host=host)
    exact = places is not None
    if places is None and not equal_rates:
        return None
    if places is None and count == len(other.gpus):
        if short_pairs(have, other.carried, numbers) is not None:
            places = numbers
        elif not all(map(any, have)) or sum(map(sum, have)) > (1 - MOST_SHORT) * sum(map(sum, other.carried)):
            tries = (
                embed(have, other.carried, pairs=k, first=numbers, host=host)
                for k in range(1, MOST_PAIRS + 1)
            )
            places = next((one for one in tries if one is not None), None)
    elif places is None:
        # numbers above the count are those of a larger machine
        same = _same_model(server, machine)
        known = same or numbers != tuple(range(count))
        short = short_pairs(have, other.carried, numbers)
        if (short and len(short) == 1 and known) or (short is not None and 2 * count > len(other.gpus)):
            places = numbers
        elif same:
            places = embed(have, other.carried, pairs=1, first=numbers, host=host)
    if places is None:
        return None
    # the only pair of two GPUs shows no machine that it could be short of
    judged = count > 2 or _same_model(server, machine)
    single = judged and count < len(other.gpus) and len(short_pairs(have, other.carried, places) or ()) == 1
    if not exact and not single and not _credible(server, shape, machine, have, other, places):
        return None
    wanted = [
        (shape.gpus[i], shape.gpus[j], round(other.carried[places[i]][places[j]] / other.rate))
        for i in range(count)
        for j in range(i + 1, count)
        if other.carried[places[i]][places[j]]
    ]
    own = exact and numbers not in (places, tuple(range(count)))
    lacking = short_pairs(have, other.carried, numbers) or () if own else ()
    return Resemblance(
        machine,
        exact,
        _links(wanted, other.rate / scale),
        places=places,
        numbered=places == numbers != tuple(range(count)) and _same_model(server, machine),
        lacking=tuple((shape.gpus[j], shape.gpus[i]) for i, j in lacking),
    )


def _joined(machine: Topology, how: str) -> frozenset[frozenset[int]]:
    """Return pairs of GPUs, by index, with the PCIe relation ``how``."""
    ways = [*upward_paths(machine).values()]
    return frozenset(
        frozenset((i, j)) for i, first in enumerate(ways) for j in range(i) if relation(first, ways[j]) == how
    )


def _numbers(gpus: Sequence[str], count: int, most: int) -> tuple[int, ...]:
    """Return the numbers in the GPUs' names if they are some of the machine's, else their indices."""
    found = [re.search(r"(\d+)$", gpu) for gpu in gpus]
    numbers = tuple(int(one[1]) if one else -1 for one in found)
    fits = len(set(numbers)) == count and all(0 <= number < most for number in numbers)
    return numbers if fits else tuple(range(count))


def _credible(
    server: Topology,
    shape: NvlinkShape,
    machine: Topology,
    have: Sequence[Sequence[float]],
    other: NvlinkShape,
    places: Sequence[int],
) -> bool:
    """Return whether the short links are few enough (see the module)."""
    bare = {i for i, row in enumerate(have) if not any(row)}
    rest = [i for i in range(len(have)) if i not in bare]
    wanted = sum(other.carried[places[i]][places[j]] for i in rest for j in rest)
    lost = wanted - sum(min(have[i][j], other.carried[places[i]][places[j]]) for i in rest for j in rest)
    whole = len(have) == len(other.gpus)
    equal_parts = whole and same_parts(server, machine)
    if (
        lost
        >= (MOST_SHORT_OF_EQUAL_PARTS if equal_parts else MOST_SHORT if whole else MOST_SHORT / 2) * wanted
    ):
        return False
    if len(bare) > (MOST_BARE * len(have) if whole else 0):
        return False
    return equal_parts or not shape.regular

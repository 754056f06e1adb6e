"""Which NVLinks of a topology are dead or slow, from what each listed GPU says of its own.

The far ends tell where they are listed (`nvlink_far_ends`). Elsewhere only numbers are known, and a wire counts at both
of its ends: the one set of wires that fits all numbers is taken (`wire_places`), and where several fit none is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from topoplan.errors import TopologyError
from topoplan.formats.nvidia_smi.nvlink_far_ends import Ends, readings
from topoplan.formats.nvidia_smi.nvlink_matching import ANOTHER, ListedGpu
from topoplan.formats.nvidia_smi.wire_places import Puzzle, Table, TooManyPlaces, places
from topoplan.topology import Topology

MOST_READINGS = 200
"""Readings of far ends that are compared."""

Pair = tuple[str, str]
"""Two ends of a bundle of NVLinks: GPUs first, by their numbers."""


def find_damage(topology: Topology, gpus: Sequence[ListedGpu]) -> dict[Pair, tuple[Fraction, ...]]:
    """The wires that are dead or slow.

    Returns
    -------
    dict of (str, str) to tuple of Fraction
        For each bundle with a wire amiss, the share of its speed that each such wire keeps, ascending; 0 if dead.

    Raises
    ------
    TopologyError
        The listings contradict the machine or each other, or leave open which wires are meant.

    Examples
    --------
    Two GPUs of a DGX-1V, each with a wire down: one of the two wires between them.

    >>> import topoplan
    >>> from topoplan.formats.nvidia_smi.nvlink_matching import match_gpus
    >>> from topoplan.formats.nvidia_smi.nvlink_status import parse_nvlink_status
    >>> lines = [f"Link {i}: {'25.781 GB/s' if i else '<inactive>'}" for i in range(6)]
    >>> whole = [f"Link {i}: 25.781 GB/s" for i in range(6)]
    >>> text = "\\n".join(line for n in range(8) for line in [f"GPU {n}: V100", *(lines if n in (0, 3) else whole)])
    >>> machine = topoplan.load("dgx-1v")
    >>> find_damage(machine, match_gpus(machine, parse_nvlink_status(text)))
    {('gpu0', 'gpu3'): (Fraction(0, 1),)}
    """
    order = {name: i for i, name in enumerate(topology.gpus)}
    bundles = {_pair(order, gpu.name, end): count for gpu in gpus for end, count in gpu.wires.items()}
    shares = sorted({Fraction(0), *(share for gpu in gpus for share in gpu.slow)})
    least: Table = ()
    most: Table = ()
    contradiction: TopologyError | None = None
    try:
        for number, ends in enumerate(readings(topology, gpus)):
            if number == MOST_READINGS:
                raise TooManyPlaces
            try:
                known = _known(topology, bundles, order, ends)
            except TopologyError as error:
                contradiction = error
                continue
            fits = places(_puzzle(bundles, order, gpus, shares, ends, known))
            if fits is not None:
                least, most = _entrywise(min, least, fits[0]), _entrywise(max, most, fits[1])
    except TooManyPlaces:
        raise TopologyError(
            f"{_amiss(gpus)}, and too many sets of wires fit that to try them; {_remedy(topology)}"
        ) from None
    if bundles and not least:
        raise contradiction or TopologyError(
            f"{_amiss(gpus)}, which fits no set of wires of {topology.name}, as a wire has two ends; {ANOTHER}"
        )
    if least != most:
        open_wires = _open(bundles, shares, least, most)
        raise TopologyError(f"{_amiss(gpus)}, and which is open: {open_wires}; {_remedy(topology)}")
    return {
        pair: tuple(share for share, count in zip(shares, counts, strict=True) for _ in range(count))
        for pair, counts in zip(bundles, least, strict=True)
        if any(counts)
    }


def _pair(order: Mapping[str, int], first: str, second: str) -> Pair:
    ends = sorted((first, second), key=lambda name: (order.get(name, len(order)), name))
    return ends[0], ends[1]


def _known(
    topology: Topology, bundles: Mapping[Pair, int], order: Mapping[str, int], ends: Ends
) -> dict[Pair, tuple[Fraction, ...]]:
    """Shares of the wires that are up in each bundle of which the far ends tell."""
    known: dict[Pair, tuple[Fraction, ...]] = {}
    for gpu, by_end in ends.items():
        for end, up in by_end.items():
            pair = _pair(order, gpu, end)
            if len(up) > bundles[pair]:
                raise TopologyError(
                    f"{gpu} lists {len(up)} NVLinks to {end} that are up, and {topology.name} has {bundles[pair]}; "
                    f"{ANOTHER}"
                )
            before = known.setdefault(pair, up)
            if len(before) != len(up):
                raise TopologyError(
                    f"{gpu} lists {len(up)} NVLinks to {end} that are up, and {end} lists {len(before)} back; take "
                    "all listings at one time"
                )
            # A wire is as slow as the slower of its two ends says.
            known[pair] = tuple(map(min, before, up))
    return known


def _puzzle(
    bundles: Mapping[Pair, int],
    order: Mapping[str, int],
    gpus: Sequence[ListedGpu],
    shares: Sequence[Fraction],
    ends: Ends,
    known: Mapping[Pair, tuple[Fraction, ...]],
) -> Puzzle:
    numbers = {pair: i for i, pair in enumerate(bundles)}
    sums = [
        (
            tuple(numbers[_pair(order, gpu.name, end)] for end in gpu.wires),
            (gpu.dead, *(gpu.slow.count(share) for share in shares[1:])),
        )
        for gpu in gpus
        if gpu.name not in ends
    ]
    counts = {
        pair: (bundles[pair] - len(up), *(up.count(share) for share in shares[1:]))
        for pair, up in known.items()
    }
    return Puzzle(
        tuple(bundles.values()),
        len(shares),
        tuple(sums),
        tuple((numbers[pair], count) for pair, count in counts.items()),
    )


def _entrywise(choose: Callable[[int, int], int], first: Table, second: Table) -> Table:
    if not first:
        return second
    return tuple(tuple(map(choose, a, b)) for a, b in zip(first, second, strict=True))


def _amiss(gpus: Sequence[ListedGpu]) -> str:
    """Such as ``gpu3 has 2 of 6 NVLinks down``."""
    parts = []
    for gpu in gpus:
        down = [f"{gpu.dead} of {sum(gpu.wires.values())} NVLinks down"] if gpu.dead else []
        slow = [f"{len(gpu.slow)} of {len(gpu.up)} slow"] if gpu.slow else []
        if down or slow:
            parts.append(f"{gpu.name} has {' and '.join(down + slow)}")
    return ", ".join([*parts[:4], *(["…"] if len(parts) > 4 else [])]) or "no listed GPU has a link down"


def _open(bundles: Mapping[Pair, int], shares: Sequence[Fraction], least: Table, most: Table) -> str:
    """The wires that may or may not be meant."""
    parts = [
        f"{low} to {high} {'slow ' if share else ''}of {wires} {'-'.join(pair)}"
        for (pair, wires), lows, highs in zip(bundles.items(), least, most, strict=True)
        for share, low, high in zip(shares, lows, highs, strict=True)
        if low < high
    ]
    return ", ".join([*parts[:8], *(["…"] if len(parts) > 8 else [])])


def _remedy(topology: Topology) -> str:
    known = any(topology.device(gpu).busid for gpu in topology.gpus)
    return f"add nvidia-smi nvlink -R{'' if known else ' of all GPUs'}, which says where each link leads"

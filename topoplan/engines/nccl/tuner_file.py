"""Write a tuner plug-in of NCCL, or the file of its example plugin (``plugins/tuner/example``).

The plug-in is C (``tuner_plugin.c``) with the choices inside, for NCCL from 2.28 on. The example plugin reads the file
that ``NCCL_TUNER_CONFIG_FILE`` names; ``NCCL_TUNER_PLUGIN`` names the plugin. A line is

    collective,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff

with both ends of the range inside it, bytes of the full buffer for allgather and reducescatter, -1 for any in the last
four columns, and ``#`` at the beginning of a comment. The first line that matches a call decides, if NCCL has that
algorithm there; lines end before 256 characters. Unknown words are taken as allreduce, ring or simple, silently.

Channels are written out: the plugin documents -1 for NCCL's own number, but sets one channel before its search, and
NCCL takes that. It holds for calls that match no line, too, so every collective has lines for all sizes. NCCL runs
fewer channels for small buffers, and so do the lines, in powers of two.

The fastest choice comes from NCCL's own model (`topoplan.schedules.nccl_tuning`), in which switches add if the machine
says that they could, as NVLS lets them, with start-ups and NVLS as published measurements have them
(`topoplan.model.expected_times`); or from the user's measured times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import pairwise

from topoplan.engines.exported import Exported
from topoplan.errors import UsageError
from topoplan.machine.topology import Topology
from topoplan.machine.variants import with_all_capabilities
from topoplan.model.expected_times import nccl_clocks
from topoplan.model.schedule_selection import fastest_from
from topoplan.schedules.nccl_tuning import (
    ALGORITHMS,
    COLLECTIVES,
    HOPPER,
    NVLS,
    NVLS_TREE,
    PROTOCOLS,
    SIMPLE,
    NcclExpectation,
    channel_count,
    expectations,
    least_bytes,
    setting_of,
)
from topoplan.units import counted

TUNER_NAMES = {name: name.replace("_", "") for name in COLLECTIVES}
"""The plugin's names of collectives."""

MAX_SIZE = (1 << 64) - 1
"""End of the last range: the plugin's numbers have 64 bits."""

COLLECTIVE_NUMBERS = {"broadcast": 0, "reduce": 1, "allgather": 2, "reduce_scatter": 3, "allreduce": 4}
ALGORITHM_NUMBERS = {"tree": 0, "ring": 1, NVLS: 4, NVLS_TREE: 5, "pat": 6}
PROTOCOL_NUMBERS = {"ll": 0, "ll128": 1, SIMPLE: 2}
"""NCCL's own numbers, of its header for plug-ins (``nccl_common.h``, ``nccl_tuner.h``)."""

TUNER_HEADER = "# collective,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff"

SAME_TIME = 0.02
"""Fraction by which a measured time must be lower before another algorithm is taken: less is noise."""

_SIZES = (1, *((1 << power) + step for power in range(1, 35) for step in (-1, 0) if power > 1 or step == 0))
"""Powers of two and the bytes before them: the rest of a tree's bandwidth jumps there."""


@dataclass(frozen=True, slots=True)
class TunerRange:
    """The choice for a range of sizes, from its first byte ``start`` on."""

    collective: str
    start: int
    algorithm: str
    protocol: str
    channels: int = -1

    @property
    def choice(self) -> tuple[str, str]:
        return self.algorithm, self.protocol


def model_tuner(topology: Topology, *, plugin: bool = False) -> Exported:
    """Return the file of the choices that NCCL's own model finds fastest on a machine.

    With `plugin` it is the source of a tuner plug-in, which needs no file beside it.

    >>> import topoplan
    >>> for line in model_tuner(topoplan.load("dgx-a100")).text.splitlines()[4:7]:
    ...     print(line)
    allreduce,0,65535,ring,ll,1,1,8,-1,-1
    allreduce,65536,131071,ring,ll,2,1,8,-1,-1
    allreduce,131072,262143,ring,ll,4,1,8,-1,-1
    """
    here = setting_of(with_all_capabilities(topology))
    known = {collective: expectations(here, collective) for collective in COLLECTIVES}
    clocks = {collective: nccl_clocks(topology, collective, model) for collective, model in known.items()}
    most = 2 * here.channels
    exported = _exported(
        model_ranges(known, clocks),
        here.servers,
        here.ranks,
        lambda _: most,
        f"NCCL's own model of {topology.name}, with published measurements where there are any",
        plugin=plugin,
    )
    switched = any(device.kind == "nvswitch" for device in topology.devices)
    if here.generation < HOPPER or here.multicast or not switched:
        return exported
    note = (
        "NVSwitches are taken to forward alone, so NVLS stands in no line: export the machine, or a plan with "
        "--in-network nvswitch, where they add"
    )
    return replace(exported, notes=(*exported.notes, note))


def model_ranges(
    known: Mapping[str, Sequence[NcclExpectation]],
    clocks: Mapping[str, Sequence[Callable[[int], float]]] | None = None,
) -> list[TunerRange]:
    """Return the choices that are expected to be fastest, of each collective in its order.

    clocks: seconds by bytes of each expectation; NCCL's own for None.
    """
    ranges = []
    for collective, expected in known.items():
        seconds = [one.seconds for one in expected] if clocks is None else clocks[collective]
        changes = fastest_from(seconds, _SIZES)
        for place, (start, number) in enumerate(changes):
            one = expected[number]
            ranges.append(TunerRange(collective, start if place else 0, one.algorithm, one.protocol))
    return ranges


def measured_tuner(
    times: Mapping[str, Mapping[tuple[str, str], Mapping[int, float]]],
    *,
    servers: int,
    ranks: int,
    channels: Callable[[str], int | None],
    source: str,
    others: Sequence[TunerRange] = (),
    plugin: bool = False,
) -> Exported:
    """Return the file of the choices that were measured to be fastest; raise if nothing was measured.

    ``times`` hold seconds by collective, algorithm and protocol, and size in bytes. ``channels`` returns the most
    channels that NCCL has for an algorithm, None if unknown. ``source`` describes the times at the head of the file;
    ``others`` are for collectives that were not measured. `plugin` is that of `model_tuner`.

    >>> times = {"allreduce": {("tree", "ll"): {1024: 20e-6, 1 << 20: 90e-6}, ("ring", "simple"): {1 << 20: 60e-6}}}
    >>> print(measured_tuner(times, servers=2, ranks=16, channels=lambda _: 2, source="two logs").text.splitlines()[-1])
    allreduce,1048576,18446744073709551615,ring,simple,2,2,16,-1,-1
    """
    ranges = []
    for collective, known in times.items():
        sizes = sorted({size for measured in known.values() for size in measured})
        kept: tuple[str, str] | None = None
        for place, size in enumerate(sizes):
            there = {choice: measured[size] for choice, measured in known.items() if size in measured}
            best = min(there, key=lambda choice: (there[choice], _order(choice)))
            if kept is None or kept not in there or there[best] < there[kept] * (1 - SAME_TIME):
                if best != kept:
                    ranges.append(TunerRange(collective, size if place else 0, *best))
                kept = best
    if not ranges:
        raise UsageError("no size was measured, so there is nothing to tune; give logs with rows")
    filled = [one for one in others if one.collective not in times]
    exported = _exported([*ranges, *filled], servers, ranks, channels, source, plugin=plugin)
    if filled:
        names = ", ".join(dict.fromkeys(TUNER_NAMES[one.collective] for one in filled))
        return replace(
            exported, notes=(f"from NCCL's model, since no log has them: {names}", *exported.notes)
        )
    return exported


def _order(choice: tuple[str, str]) -> tuple[int, int]:
    return ALGORITHMS.index(choice[0]), PROTOCOLS.index(choice[1])


def _exported(
    ranges: Sequence[TunerRange],
    servers: int,
    ranks: int,
    channels: Callable[[str], int | None],
    source: str,
    *,
    plugin: bool,
) -> Exported:
    """Return the choices as the example plugin's file, or with `plugin` as the source of a plug-in of their own."""
    lines: list[tuple[TunerRange, int]] = []
    unknown = False
    for collective in dict.fromkeys(one.collective for one in ranges):
        own = [one for one in ranges if one.collective == collective]
        for one, following in pairwise([*own, None]):
            assert one is not None
            most = channels(one.algorithm)
            unknown = unknown or most is None
            stop = MAX_SIZE if following is None else following.start - 1
            lines += _by_channels(one, stop, most, ranks)
    missing = [TUNER_NAMES[name] for name in COLLECTIVES if name not in {one.collective for one in ranges}]
    if plugin:
        notes = [f"NCCL chooses itself for communicators of other sizes than {ranks} ranks on {servers}"]
        notes += [f"NCCL chooses itself for {', '.join(missing)}"] if missing else []
        return Exported(_plugin_source(lines, servers, ranks, source), tuple(notes))
    head = [
        "# NCCL_TUNER_CONFIG_FILE of NCCL's example tuner plugin",
        f"# from {source[:110]}",
        f"# for communicators of {ranks} ranks on {counted(servers, 'server')}",
        TUNER_HEADER,
    ]
    rows = [
        f"{TUNER_NAMES[one.collective]},{one.start},{end},{one.algorithm},{one.protocol},{one.channels},"
        f"{servers},{ranks},-1,-1"
        for one, end in lines
    ]
    notes = [
        "the example plugin gives one channel to every call that no line matches: communicators of other sizes than "
        f"{ranks} ranks on {servers} need lines of their own, or no plugin; --to nccl-tuner-plugin writes one that "
        "leaves them to NCCL"
    ]
    if missing:
        notes.append(f"no lines for {', '.join(missing)}: the example plugin runs them on one channel")
    if unknown:
        notes.append(
            "warning: channels are not known and stand as -1, which the example plugin runs as one channel; name them "
            "with --nccl-channels, or log with NCCL_DEBUG=INFO"
        )
    return Exported("\n".join([*head, *rows]) + "\n", tuple(notes))


def _plugin_source(lines: Sequence[tuple[TunerRange, int]], servers: int, ranks: int, source: str) -> str:
    """Return the source in C of a plug-in that makes these choices, and leaves all others to NCCL."""
    rows = [
        f"    {{{COLLECTIVE_NUMBERS[one.collective]}, {one.start}u, {end}u, {ALGORITHM_NUMBERS[one.algorithm]}, "
        f"{PROTOCOL_NUMBERS[one.protocol]}, {max(one.channels, 0)}}}, /* {TUNER_NAMES[one.collective]} "
        f"{one.algorithm} {one.protocol} */"
        for one, end in lines
    ]
    told = "".join(letter if letter.isprintable() else "?" for letter in source).replace("*/", "* /")
    table = [
        f"/* From {told[:110]}. */",
        f"static const size_t RANKS = {ranks}, SERVERS = {servers};",
        "static const Row ROWS[] = {",
        *rows,
        "};",
    ]
    template = files(__package__).joinpath("tuner_plugin.c").read_text(encoding="utf-8")
    return template.replace("@TABLE@", "\n".join(table))


def _by_channels(
    one: TunerRange, stop: int, most: int | None, ranks: int
) -> Iterator[tuple[TunerRange, int]]:
    """Yield the parts of a range and their last bytes, split at changes of the number of channels."""
    if most is None:
        yield one, stop
        return
    least = least_bytes(one.algorithm, one.protocol, ranks)
    edges = [one.start]
    step = 2
    while least and step < most:
        edges += [least * step] if one.start < least * step <= stop else []
        step *= 2
    edges += [least * most] if least and one.start < least * most <= stop else []
    for start, following in pairwise([*edges, stop + 1]):
        count = channel_count(one.algorithm, one.protocol, start, ranks=ranks, most=most)
        power = count if count == most or not least else 1 << (count.bit_length() - 1)
        yield replace(one, start=start, channels=power), following - 1


def parse_label(text: str) -> tuple[str, str]:
    """Return algorithm and protocol of a label such as ``ring/ll`` or ``nvls``; the protocol is empty if it is open.

    >>> parse_label("Ring/LL128"), parse_label("nvls"), parse_label("tree")
    (('ring', 'll128'), ('nvls', 'simple'), ('tree', ''))
    """
    algorithm, slash, protocol = text.strip().lower().partition("/")
    if algorithm not in ALGORITHMS:
        raise UsageError(f"{algorithm[:40]!r} is not an algorithm of NCCL; use {', '.join(ALGORITHMS)}")
    if slash and protocol not in PROTOCOLS:
        raise UsageError(f"{protocol[:40]!r} is not a protocol of NCCL; use {', '.join(PROTOCOLS)}")
    only = algorithm not in ("ring", "tree")
    if only and protocol not in ("", SIMPLE):
        raise UsageError(f"{algorithm} runs only with the protocol simple; write {algorithm}")
    return algorithm, SIMPLE if only else protocol


def known_channels(rings: int | None, nvls: int | None) -> Callable[[str], int | None]:
    """Return channels by algorithm, from the numbers that NCCL states."""
    return lambda algorithm: (nvls or rings) if algorithm in (NVLS, NVLS_TREE) else rings

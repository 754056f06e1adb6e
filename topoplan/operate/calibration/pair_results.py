"""Parse rates of pair tests: CSV, JSON, the output of ``topoplan calibrate --json``, or a measured matrix.

CSV has a head, ``a,b,GB/s`` for tests both ways at once and ``src,dst,GB/s`` for one way, then a line for each test;
lines that begin with # are skipped. JSON is an object whose ``pairs`` each have ``src``, ``dst`` and ``bandwidth``;
with ``"one_way": true``, and in the output of `topoplan calibrate`, data ran from ``src`` to ``dst`` only. Ends are
GPUs by name, or servers: of one end, or of several NICs, which the test then used all at once. ``failed`` in place of a
number counts as 0. A matrix is of p2pBandwidthLatencyTest or nvbandwidth (`topoplan.reading.pair_matrices`), one way,
its GPUs by number; `measured_rates` makes it a measurement for a calibration. A fourth value, ``together`` in JSON, is
the round in which the test filled wide links with others.

Servers may have the names of their hosts (`unknown_hosts`, `rename_servers`).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from topoplan.errors import UsageError
from topoplan.machine.host_topology import plain_bus_id
from topoplan.machine.topology import Topology, format_value
from topoplan.operate.calibration.fit import HockneyLine, Measurement, PairFit
from topoplan.operate.calibration.pair_tests import PairTest, PairTests, node_test
from topoplan.operate.calibration.slow_links import MeasuredPair
from topoplan.reading.load import form_of
from topoplan.reading.pair_matrices import MEASURED, MeasuredRates, parse_measured_rates
from topoplan.units import counted

HEADS = {"a,b,gb/s": False, "src,dst,gb/s": True}
"""Heads of a CSV, and whether its tests are one way."""

FAILED = "failed"

_ON_HOST = re.compile(r".+\.gpu[0-9]+")


@dataclass(frozen=True, slots=True)
class ResultLine:
    """A result with its place in the file, the two ends, GB/s, and the round in which it filled links, or ""."""

    where: str
    src: str
    dst: str
    rate: float
    together: str = ""


@dataclass(frozen=True, slots=True)
class PairResults:
    """A file of results.

    calibrated: from `topoplan calibrate`, which selects pairs itself.
    """

    one_way: bool
    calibrated: bool
    lines: tuple[ResultLine, ...]


def parse_results(text: str) -> PairResults:
    """Return the results in a text.

    >>> parse_results("a,b,GB/s\\ns0.gpu0,s1.gpu0,11.5\\n").lines
    (ResultLine(where='line 2', src='s0.gpu0', dst='s1.gpu0', rate=11.5, together=''),)
    """
    if not text.strip():
        raise UsageError("no results: the file is empty")
    if form_of(text) in MEASURED:
        rates = parse_measured_rates(text)
        ends = [(f"gpu{src}", f"gpu{dst}", rates.best((src, dst))) for src, dst in rates.pairs]
        return PairResults(
            True, True, tuple(ResultLine(f"{src}>{dst}", src, dst, rate) for src, dst, rate in ends)
        )
    made = _from_json(text) if text.lstrip().startswith("{") else _from_csv(text)
    if not made.lines:
        raise UsageError("no results: the file has a head and no pair below it")
    return made


def measured_rates(text: str, topology: Topology) -> Measurement:
    """Return the measurement in a matrix of p2pBandwidthLatencyTest or nvbandwidth, of the GPUs of a machine.

    GPUs are matched by bus id if both state them, else by number. Latencies are not known. UsageError for another
    text, one that is cut, or one of another machine.
    """
    rates = parse_measured_rates(text)
    names, how = _named_gpus(rates, topology)
    fits = []
    for pair in rates.pairs:
        access = (rates.push.get(pair), rates.pull.get(pair))
        both = access if rates.push and rates.pull and None not in access else None
        line = HockneyLine(0.0, rates.best(pair), 0.0)
        src, dst = (names[gpu] for gpu in pair)
        hosted, refused = pair in rates.hosted, pair in rates.refused
        fits.append(PairFit(src, dst, line, hosted, access=both, rate_only=True, refused=refused))
    notes = (f"GPUs of {rates.method} matched by {how}", "latencies were not measured", *rates.notes)
    together = tuple((names[src], names[dst], rate) for (src, dst), rate in sorted(rates.together.items()))
    return Measurement(rates.method, (), 0, (), notes=notes, rates=tuple(fits), together=together)


def _named_gpus(rates: MeasuredRates, topology: Topology) -> tuple[dict[int, str], str]:
    """Return the name of each measured GPU, and the property by which they were matched."""
    gpus, servers = topology.gpus, max(1, len(topology.servers))
    if servers > 1 or rates.gpus > len(gpus):
        raise UsageError(
            f"{rates.method} measured {counted(rates.gpus, 'GPU')} of one server, and {topology.name} has "
            f"{counted(len(gpus), 'GPU')} on {counted(servers, 'server')}; give the machine that was measured"
        )
    here = {plain_bus_id(topology.device(gpu).busid): gpu for gpu in gpus if topology.device(gpu).busid}
    if len(here) == len(gpus) and set(range(rates.gpus)) <= set(rates.busids):
        missing = [busid for busid in rates.busids.values() if busid not in here]
        if missing:
            raise UsageError(
                f"{rates.method} measured a GPU at {missing[0]}, where {topology.name} has none; give the machine that "
                "was measured"
            )
        return {number: here[busid] for number, busid in rates.busids.items()}, "bus id"
    return dict(enumerate(gpus[: rates.gpus])), "number"


def _from_csv(text: str) -> PairResults:
    rows = [
        (number, [cell.strip() for cell in line.split(",")])
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    head = ",".join(rows[0][1]).lower() if rows else ""
    if head not in HEADS:
        raise UsageError(
            f"the results begin with {format_value(head)}; they need the head a,b,GB/s (both ways at once) or "
            "src,dst,GB/s"
        )
    lines = []
    for number, cells in rows[1:]:
        if len(cells) not in (3, 4) or not all(cells):
            raise UsageError(
                f"line {number} of the results has {sum(map(bool, cells))} of 3 values; was the file cut?"
            )
        lines.append(_line(f"line {number}", cells[0], cells[1], cells[2], *cells[3:]))
    return PairResults(HEADS[head], False, tuple(lines))


def _from_json(text: str) -> PairResults:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the results are not JSON: {error}; was the file cut?") from None
    pairs = value.get("pairs")
    one_way = value.get("one_way", "method" in value)
    if not isinstance(pairs, list) or not isinstance(one_way, bool):
        raise UsageError(
            'the results need "pairs", a list of {"src", "dst", "bandwidth"}, and "one_way" true or false'
        )
    lines = []
    for number, pair in enumerate(pairs):
        where = f"pairs[{number}]"
        if not isinstance(pair, dict) or not all(
            isinstance(pair.get(end), str) and pair[end] for end in ("src", "dst")
        ):
            raise UsageError(
                f"{where} of the results is {format_value(pair)}, and needs src, dst and bandwidth"
            )
        lines.append(
            _line(where, pair["src"], pair["dst"], pair.get("bandwidth"), str(pair.get("together", "")))
        )
    return PairResults(one_way, "method" in value, tuple(lines))


def _line(where: str, src: str, dst: str, rate: object, together: str = "") -> ResultLine:
    number = math.nan
    if rate == FAILED:
        number = 0.0
    elif isinstance(rate, str | float | int) and not isinstance(rate, bool):
        try:
            number = float(rate)
        except (ValueError, OverflowError):
            number = math.nan
    if not 0 <= number < math.inf:
        raise UsageError(
            f"{where} of the results: rate must be 0 GB/s or more, or {FAILED}, got {format_value(rate)}"
        )
    return ResultLine(where, src, dst, number, together)


def unknown_hosts(results: PairResults, topology: Topology) -> tuple[str, ...]:
    """Return the hosts that results name, each once; () if they name a GPU or a server of the machine.

    ``node07.gpu3`` and ``node07`` name the host node07.
    """
    known = {*topology.gpus, *topology.servers}
    names = dict.fromkeys(name for line in results.lines for name in (line.src, line.dst))
    if known & names.keys():
        return ()
    return tuple(
        dict.fromkeys(name.rpartition(".")[0] if _ON_HOST.fullmatch(name) else name for name in names)
    )


def rename_servers(topology: Topology, hosts: Mapping[str, str]) -> Topology:
    """Return a cluster with some servers and their devices renamed to their hosts.

    >>> import topoplan
    >>> pair = topoplan.cluster([topoplan.Server("v100x4", count=2)], nic_gbps=100)
    >>> rename_servers(pair, {"s1": "node02"}).gpus[3:5]
    ('s0.gpu3', 'node02.gpu0')
    """
    names = {
        device.name: hosts[device.server] + device.name.removeprefix(device.server)
        for device in topology.devices
        if device.server in hosts and device.name.startswith(f"{device.server}.")
    }
    return replace(
        topology,
        devices=tuple(
            replace(
                device,
                name=names.get(device.name, device.name),
                server=hosts.get(device.server, device.server),
            )
            for device in topology.devices
        ),
        links=tuple(
            replace(link, src=names.get(link.src, link.src), dst=names.get(link.dst, link.dst))
            for link in topology.links
        ),
    )


def of_nodes(results: PairResults, possible: PairTests) -> bool:
    """Return whether a result is of two servers with several ends each, all used at once."""
    many = _of_several(possible)
    return any(line.src in many and line.dst in many for line in results.lines)


def match_results(
    results: PairResults,
    possible: PairTests,
    asked: Sequence[PairTest] | None = None,
    *,
    fill: Sequence[PairTest] = (),
) -> tuple[MeasuredPair, ...]:
    """Return the tests of results.

    possible: tests of the machine, one way or both ways as the results are.
    """
    tests = possible.named(fill)
    wanted = None if asked is None else {test.name for test in asked}
    ends, many = _ends(possible), _of_several(possible)
    found = []
    nodes: dict[tuple[str, str], PairTest | None] = {}
    for line in results.lines:
        if line.src in many and line.dst in many and line.src != line.dst:
            key = (line.src, line.dst) if results.one_way or line.src < line.dst else (line.dst, line.src)
            if key not in nodes:
                nodes[key] = node_test(possible, *key)
            node = nodes[key]
            if node is None:
                raise UsageError(
                    f"{line.where} of the results: {line.src} and {line.dst} do not reach each other"
                )
            found.append(MeasuredPair(node, line.rate))
            continue
        src, dst = (_end(line, name, ends, possible) for name in (line.src, line.dst))
        test = tests.get((src, dst, line.together))
        if test is None and line.together and (src, dst, "") in tests:
            raise UsageError(
                f"{line.where} of the results: {line.src} and {line.dst} have no test of a round "
                f"{format_value(line.together)}; give --fill, and the other options with which the rounds were planned"
            )
        if test is None:
            raise UsageError(
                f"{line.where} of the results: {line.src} and {line.dst} are not a pair of {possible.topology.name}"
                + ("" if src != dst else "; a pair has two ends")
            )
        if wanted is not None and test.name not in wanted:
            raise UsageError(
                f"{line.where} of the results: {test.name} is not a planned test; give the options with which the "
                "rounds were planned, or --any-pair"
            )
        found.append(MeasuredPair(test, line.rate))
    return tuple(found)


def _ends(possible: PairTests) -> dict[str, str]:
    """Return GPUs by their names, and by their server's if it has one end."""
    own = {name: name for name in possible.topology.gpus}
    servers: dict[str, list[str]] = {}
    for name in possible.ends:
        servers.setdefault(possible.topology.device(name).server, []).append(name)
    return {server: names[0] for server, names in servers.items() if server and len(names) == 1} | own


def _of_several(possible: PairTests) -> frozenset[str]:
    """Return servers with several ends, on a machine of several servers."""
    servers = Counter(possible.topology.device(name).server for name in possible.ends)
    return frozenset(server for server, count in servers.items() if count > 1 and len(servers) > 1)


def _end(line: ResultLine, name: str, ends: Mapping[str, str], possible: PairTests) -> str:
    if name not in ends:
        several = name in possible.topology.servers
        raise UsageError(
            f"{line.where} of the results: "
            + (
                f"server {name} has several GPUs; name the one that was tested, or both servers for all their NICs"
                if several
                else f"{format_value(name)} is not a GPU of {possible.topology.name}, such as {possible.ends[0]}"
            )
        )
    return ends[name]

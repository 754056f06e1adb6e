"""Plan rounds of tests of GPU pairs that share no link, and locate slow links from results, for ``topoplan pairs``."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence

from topoplan.cli import arguments
from topoplan.cli.machine_options import add_all_options
from topoplan.cli.output import Answer, Column, progress_line, records_of, table, write_whole
from topoplan.cli.sources import host_names, read_machine
from topoplan.engines.nccl.pair_script import HOST_PATTERN, STARTERS, pair_script, server_hosts
from topoplan.errors import TopologyError, UsageError
from topoplan.machine.topology import Topology
from topoplan.operate.calibration.calibrated_topology import TOLERANCE, LinkKey
from topoplan.operate.calibration.pair_results import (
    PairResults,
    match_results,
    of_nodes,
    parse_results,
    rename_servers,
    unknown_hosts,
)
from topoplan.operate.calibration.pair_rounds import TIMES, Rounds, plan_rounds
from topoplan.operate.calibration.pair_tests import FILLED, PairTest, PairTests, possible_tests, wire_names
from topoplan.operate.calibration.slow_links import SlowClass, SlowLinkReport, attribute_slow_pairs
from topoplan.reading.load import read_text
from topoplan.reading.slurm import by_number
from topoplan.units import counted

FORMATS = ("text", "json", "csv", *STARTERS)
SIZE = 256 << 20
MAX_PRINTED, FAR_BELOW, FAR_ABOVE = 8, 0.7, 1.05
"""Most classes, links or pairs in a line of text; least and largest share of the stated rate that healthy pairs get."""


def add_options(parser: arguments.OneLineParser) -> None:
    arguments.add_machine(parser)
    arguments.add_allocation(parser)
    arguments.declare(
        parser,
        """
        --format        text, json, csv, or a script that runs the rounds with nccl-tests: mpirun, or ssh to the first
                        server of each test (default: text)
        -o F            write the script (default: stdout)
        --hosts LIST|F  host names of the servers, node[01-08,12] or a file with a host on each line (default: s0, s1,
                        …)
        --results FILE  results of the tests, as CSV, JSON or the output of topoplan calibrate --json: name the slow
                        links; exit status 1 if there are any
        """,
        format={"choices": FORMATS},
    )
    arguments.declare(
        parser.topic("pairs"),
        f"""
        --times K       number of times that each link is crossed, by different pairs if possible (default: {TIMES})
        --every-gpu     on a cluster, test every GPU, which separates its route to a NIC from the network (default: one
                        per NIC)
        --one-way       test each direction by itself (default: both at once)
        --fill          add rounds in which several pairs together fill the links between switches that one pair cannot
                        fill
        --size S        size of the buffer that the scripts send (default: 256MB)
        --tolerance T   with --results, how far a healthy pair may be below the others (default: {TOLERANCE:g})
        --any-pair      with --results, use pairs that are not in these rounds too
        """,
        times={"type": arguments.whole_number(1, 64, "number of times from 1 to 64"), "default": TIMES},
        size={"type": arguments.size, "default": SIZE},
        tolerance={
            "type": arguments.number(0.001, 0.5, "part of a rate from 0.001 to 0.5"),
            "default": TOLERANCE,
        },
    )
    arguments.add_json(parser)
    arguments.add_csv(parser, "the tests")
    add_all_options(parser)
    parser.examples = (
        "topoplan pairs dgx-1v",
        "topoplan pairs dgx-h100 --servers 2 --nic-bandwidth 400Gb/s --format mpirun",
        "topoplan pairs dgx-1v --results pairs.csv",
    )


def run(options: argparse.Namespace) -> Answer | int:
    """Plan rounds of tests of two GPUs, or find the links that make pairs slow from their results."""
    asked_for = "json" if options.json else "csv" if options.csv else "text"
    form = options.format or asked_for
    if asked_for not in ("text", form):
        raise UsageError(f"--{asked_for} and --format {form} print two things; leave one out")
    options.json, options.csv = form == "json", form == "csv"
    if options.results is not None and form not in ("text", "json"):
        raise UsageError(f"--results and --format {form} do not go together; leave one out")
    if options.output is not None and form not in STARTERS:
        raise UsageError("-o writes a script; add --format mpirun or --format ssh")
    if options.hosts is not None and form not in STARTERS and options.results is None:
        raise UsageError(
            "--hosts is for scripts and results; add --format mpirun, --format ssh or --results, or leave it out"
        )
    if not options.size:
        raise UsageError("a test of 0 bytes measures nothing; give --size a buffer, such as 256MB")
    if options.results == "-" and options.topo == "-":
        raise UsageError("stdin is read once; give TOPO or --results a file")
    machine = read_machine(options)
    topology, gpus = machine.whole, machine.allocation(options.gpus)
    results = None
    host_notes: tuple[str, ...] = ()
    if options.results is not None:
        text = _text(options.results)
        try:
            results = parse_results(text)
        except UsageError as error:
            raise UsageError(f"{options.results}: {error}") from None
        topology, host_notes = _with_hosts(topology, results, options.hosts)
    one_way = options.one_way if results is None else results.one_way
    with progress_line("planning"):
        possible = possible_tests(topology, gpus, every_gpu=options.every_gpu, one_way=one_way)
        rounds = None
        nodes = results is not None and of_nodes(results, possible)
        if results is None or not (results.calibrated or options.any_pair or nodes):
            rounds = plan_rounds(possible, times=options.times, fill=options.fill)
    if results is None:
        assert rounds is not None, "planned above"
        return _plan(options, form, possible, rounds)
    asked = None if rounds is None else rounds.tests
    try:
        fill = () if rounds is None else [test for tests in rounds.fill for test in tests]
        measured = match_results(results, possible, asked, fill=fill)
        found = attribute_slow_pairs(
            measured, tolerance=options.tolerance, possible=possible.tests if asked is None else asked
        )
    except UsageError as error:
        raise UsageError(f"{options.results}: {error}") from None
    missing = (
        () if asked is None else sorted({test.name for test in asked} - {one.test.name for one in measured})
    )
    if nodes:
        several = max(Counter(topology.device(end).server for end in possible.ends).values())
        host_notes += (f"a result that names two servers is of up to {several} NICs of each, all at once",)
    return Answer(
        text=lambda: _verdict_lines(topology, found, len(measured), missing),
        value=lambda: {
            **verdict_to_object(topology, found, len(measured), missing),
            "notes": list(host_notes),
        },
        notes=host_notes,
        status=1 if found.slow else 0,
    )


def _with_hosts(
    topology: Topology, results: PairResults, listed: str | None
) -> tuple[Topology, tuple[str, ...]]:
    """Return the machine with its servers under their host names, from a list or from the results, and notes.

    UsageError: more hosts than servers, or a list of another length.
    """
    servers = tuple(topology.servers)
    if listed is not None:
        return rename_servers(topology, server_hosts(host_names(listed), servers)), ()
    hosts = unknown_hosts(results, topology)
    if not hosts or not all(map(HOST_PATTERN.fullmatch, hosts)):
        return topology, ()
    if len(hosts) > len(servers):
        raise UsageError(
            f"the results name {counted(len(hosts), 'host')}, such as {hosts[0][:60]}, and {topology.name} has "
            f"{counted(len(servers), 'server')}; give --servers {len(hosts)}, or name GPUs such as {topology.gpus[0]}"
        )
    named = sorted(hosts, key=by_number)
    note = f"hosts are taken for servers in the order of their names, {named[0]} first; --hosts lists them in another"
    return rename_servers(topology, server_hosts(named, servers[: len(named)])), (note,)


def _plan(options: argparse.Namespace, form: str, possible: PairTests, rounds: Rounds) -> Answer | int:
    topology = possible.topology
    if form in STARTERS:
        servers = list(dict.fromkeys(topology.device(end).server for end in possible.ends))
        hosts = {} if options.hosts is None else server_hosts(host_names(options.hosts), servers)
        text = pair_script(
            topology, (*rounds.rounds, *rounds.fill), starter=form, hosts=hosts, nbytes=options.size
        )
        if options.output in (None, "-"):
            return Answer(file=lambda: text)
        write_whole(options.output, text)
        print(f"written: {options.output}, {_summary(possible, rounds)}")
        return 0
    named = [(str(number), tests) for number, tests in enumerate(rounds.rounds, 1)]
    named += [(str(tests[0].together), tests) for tests in rounds.fill]
    return Answer(
        text=lambda: _round_lines(possible, rounds),
        value=lambda: rounds_to_object(possible, rounds),
        rows=lambda: [
            {"round": name, **row, "stated": f"{row['stated']:g}"}
            for name, tests in named
            for row in records_of(TESTS, tests)
        ],
        notes=(*topology.notes, *_rounds_notes(possible, rounds)),
    )


TESTS: tuple[Column[PairTest], ...] = (
    Column(None, "src"),
    Column(None, "dst"),
    Column(None, "channel"),
    Column(None, "stated", "rate"),
)


def _round_lines(possible: PairTests, rounds: Rounds) -> Iterator[str]:
    yield f"{possible.topology.name}: {_summary(possible, rounds)}"
    proved = len(rounds.rounds) == rounds.fewest
    yield f"rounds  {'no fewer' if proved else f'at least {rounds.fewest}'}: {rounds.why}"
    yield (
        f"links   all {rounds.links} that pairs cross, {counted(rounds.times, 'time')} each where so many pairs do; "
        f"{rounds.classes} {'class' if rounds.classes == 1 else 'classes'} distinguished,"
    )
    every = (
        "as all pairs together would"
        if rounds.classes == rounds.finest
        else f"{rounds.finest} by all pairs together"
    )
    yield f"        {every}"
    for number, tests in enumerate(rounds.rounds, 1):
        yield f"\nround {number}"
        yield from _in_fours([test.name for test in tests])
    for tests in rounds.fill:
        yield f"\nround {tests[0].together}, all at once to fill {_first_names(_filled_links(tests))}"
        yield from _in_fours([test.name.split(" ")[0] for test in tests])


def _in_fours(names: Sequence[str]) -> Iterator[str]:
    for start in range(0, len(names), 4):
        yield "  " + "  ".join(names[start : start + 4])


def _filled_links(tests: Sequence[PairTest]) -> list[str]:
    """Return the names of the links that tests fill together."""
    names = wire_names(key for test in tests for key in test.links if key[2].endswith(FILLED))
    return [name.removesuffix(FILLED) for name in names]


def _text(path: str) -> str:
    name = "name the file with the results of pairs"
    try:
        return read_text(path, name)
    except TopologyError:
        raise UsageError(f"{path} is binary, not text; {name}") from None


def _summary(possible: PairTests, rounds: Rounds) -> str:
    ways = "one way" if possible.one_way else "both ways at once"
    fill = f" and {len(rounds.fill)} that fill wide links" if rounds.fill else ""
    return (
        f"{counted(len(possible.ends), 'GPU')}, {counted(len(rounds.tests), 'test')} in "
        f"{counted(len(rounds.rounds), 'round')}{fill}, {ways}"
    )


def _rounds_notes(possible: PairTests, rounds: Rounds) -> list[str]:
    notes = []
    filled = {name for tests in rounds.fill for name in _filled_links(tests)}
    wide = [one for one in rounds.wide if one[0] not in filled]
    for bandwidth, seen in dict.fromkeys((bandwidth, seen) for _, bandwidth, seen in wide):
        names = [name for name, *figures in wide if figures == [bandwidth, seen]]
        notes.append(
            f"a test fills {seen:g} of {bandwidth:g} GB/s of {_first_names(names)}: seen as slow only below that"
        )
    if possible.alone:
        notes.append(f"not tested, since no other GPU reaches them: {_first_names(possible.alone)}")
    return notes


def rounds_to_object(possible: PairTests, rounds: Rounds) -> dict[str, object]:
    """Return the JSON object of rounds; rates in GB/s each way."""
    return {
        "machine": possible.topology.name,
        "one_way": possible.one_way,
        "ends": list(possible.ends),
        "alone": list(possible.alone),
        "times": rounds.times,
        "rounds": [records_of(TESTS, tests) for tests in rounds.rounds],
        "fill": [
            {
                "together": tests[0].together,
                "fills": _filled_links(tests),
                "tests": records_of(TESTS[:2], tests),
            }
            for tests in rounds.fill
        ],
        "fewest": rounds.fewest,
        "why": rounds.why,
        "links": rounds.links,
        "classes": rounds.classes,
        "classes_of_all_pairs": rounds.finest,
        "wide": [
            {"link": name, "bandwidth": bandwidth, "seen": seen} for name, bandwidth, seen in rounds.wide
        ],
        "notes": list(possible.topology.notes),
    }


def verdict_to_object(
    topology: Topology, found: SlowLinkReport, results: int, missing: Sequence[str]
) -> dict[str, object]:
    """Return the JSON object of a verdict; rates in GB/s."""
    return {
        "machine": topology.name,
        "results": results,
        "missing": list(missing),
        "healthy": dict(found.healthy),
        "slow_pairs": [
            {"pair": one.test.name, "bandwidth": one.rate, "stated": one.test.rate} for one in found.slow
        ],
        "slow_links": [_class_to_object(one) for one in found.named],
        "alternatives": [
            [[_class_to_object(one) for one in each] for each in part] for part in found.alternatives
        ],
        "unexplained": [one.test.name for one in found.unexplained],
        "unjudged": [list(wire_names(links)) for links in found.unjudged],
        "unmeasured": [list(wire_names(links)) for links in found.unmeasured],
        "fewest": found.fewest,
    }


def _class_to_object(one: SlowClass) -> dict[str, object]:
    return {
        "links": list(wire_names(one.links)),
        "bandwidth": one.rate,
        "healthy": one.healthy,
        "pairs": list(one.pairs),
    }


def _verdict_lines(
    topology: Topology, found: SlowLinkReport, results: int, missing: Sequence[str]
) -> Iterator[str]:
    healthy = ", ".join(f"{share:.0%} of what {kind} states" for kind, share in found.healthy.items())
    yield f"{topology.name}: {counted(results, 'result')}, {len(found.slow)} slow; healthy pairs get {healthy}"
    rows = [_row("slow", one) for one in found.named]
    for part in found.alternatives:
        for place, each in enumerate(part[:MAX_PRINTED]):
            heads = ["or" if place else "either", *("and" for _ in each[1:])]
            rows += [_row(head, one) for head, one in zip(heads, each, strict=True)]
    if rows:
        yield ""
        yield table(("", "link", "GB/s", "healthy", "slow pairs"), rows)
    if found.slow:
        yield ""
    together = [one for one in found.named if len(wire_names(one.links)) > 1]
    if together:
        yield "links in one line occur together in every test: which of them it is, pairs cannot tell"
    if found.alternatives:
        yield "either … or …: each explains the same slow pairs; more pairs tell them apart"
    if found.unexplained:
        names = [f"{one.test.name} {one.rate:.4g} GB/s" for one in found.unexplained]
        yield (
            f"no link explains {_first_names(names)}: other pairs cross its links at full speed; test again, look "
            "at its GPUs"
        )
    if found.unjudged:
        yield (
            "not judged, only slow pairs cross them: "
            f"{_first_names([_shared_words(links) for links in found.unjudged])}"
        )
    if found.unmeasured:
        yield f"not measured: {_first_names([_shared_words(links) for links in found.unmeasured])}"
    if missing:
        yield f"asked for, and without a result: {counted(len(missing), 'pair')}: {_first_names(missing)}"
    if not found.fewest:
        yield "note: too many slow pairs hang together for the smallest explanation; this is one that is small"
    if not found.slow:
        yield "no pair is slow"
    above = [kind for kind, share in found.healthy.items() if share > FAR_ABOVE]
    if above:
        yield (
            f"note: the pairs get more than {', '.join(above)} states; say with --nics and --nic-bandwidth which NICs "
            "the tests used together"
        )
    below = [kind for kind, share in found.healthy.items() if share < FAR_BELOW]
    if below:
        yield (
            f"note: even the faster pairs get less than {FAR_BELOW:.0%} of what {', '.join(below)} states; what slows "
            "all of them equally is not found by comparing them"
        )


def _row(head: str, one: SlowClass) -> tuple[str, ...]:
    rate = "dead" if one.rate == 0 else f"{one.rate:.4g}"
    return head, _shared_words(one.links), rate, f"{one.healthy:.4g}", str(len(one.pairs))


def _shared_words(links: Sequence[LinkKey]) -> str:
    return " ".join(wire_names(links))


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_PRINTED} more" if len(names) > MAX_PRINTED else ""
    return ", ".join(names[:MAX_PRINTED]) + more

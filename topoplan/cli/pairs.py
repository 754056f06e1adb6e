"""Plan rounds of tests of GPU pairs that share no link, and locate slow links from results, for ``topoplan pairs``."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence

from topoplan.cli import arguments
from topoplan.cli.machine_options import add_all_options
from topoplan.cli.output import (
    DEFAULT_LINES,
    Answer,
    Column,
    few,
    folded,
    folded_line,
    progress_line,
    records_of,
    step_lines,
    table,
    write_whole,
)
from topoplan.cli.sources import host_names, read_machine, read_words, refuse_listing
from topoplan.engines.nccl.pair_script import HOST_PATTERN, STARTERS, pair_script, server_hosts
from topoplan.errors import UsageError
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
from topoplan.reading.slurm import by_number
from topoplan.units import counted, labelled

FORMATS = ("text", "json", "csv", *STARTERS)
SIZE = 256 << 20
MOST_TESTED = 2048
"""GPUs of a cluster up to which pairs are tested: about a minute of planning if each server has one NIC for all."""

MAX_PRINTED, FAR_BELOW, FAR_ABOVE = 4, 0.7, 1.05
"""Most classes, links or pairs in a line of text; least and largest part of the stated rate that healthy pairs get."""


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
    arguments.declare(parser, "--all  print every test of every round, and every slow link")
    add_all_options(parser)
    parser.examples = (
        "topoplan pairs dgx-1v",
        "topoplan pairs dgx-h100 --servers 2 --nic-bandwidth 400Gb/s --format mpirun",
        "topoplan pairs dgx-1v --results pairs.csv",
    )


def run(options: argparse.Namespace) -> Answer | int:
    """Plan rounds of tests of two GPUs, or find the slow links from their results (exit status 1 if there are any)."""
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
    refuse_listing(options, MOST_TESTED, "tests of pairs", "test some servers at a time, by --gpus")
    machine = read_machine(options)
    topology, gpus = machine.whole, machine.allocation(options.gpus)
    results = None
    host_notes: tuple[str, ...] = ()
    if options.results is not None:
        text = read_words(options.results, "name the file with the results of pairs")
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
        text=lambda: [
            *_verdict_lines(topology, found, len(measured), missing, every=options.all),
            *(f"note: {note}" for note in host_notes),
        ],
        value=lambda: {
            **verdict_to_object(topology, found, len(measured), missing),
            "notes": list(host_notes),
        },
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
        text=lambda: _round_lines(options, possible, rounds),
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


def _round_lines(options: argparse.Namespace, possible: PairTests, rounds: Rounds) -> Iterator[str]:
    """Yield the number of rounds and why, what they tell apart, the rounds, and the next step."""
    yield f"{possible.topology.name}, {_summary(possible, rounds)}"
    fewest = "the fewest possible" if len(rounds.rounds) == rounds.fewest else f"{rounds.fewest} at least"
    finest = (
        "as many as all pairs together"
        if rounds.classes == rounds.finest
        else f"all pairs together: {rounds.finest}"
    )
    times = counted(rounds.times, "time")
    classes = f"{rounds.classes} {'group' if rounds.classes == 1 else 'groups'} of links"
    yield from labelled(
        ("rounds", f"{fewest}: {rounds.why}"),
        ("links", f"all {rounds.links} that pairs cross, {times} each where enough pairs cross them"),
        ("told apart", f"{classes}, {finest}; the links of a group are slow or healthy together"),
    )
    yield ""
    named = [(f"round {number}", tests) for number, tests in enumerate(rounds.rounds, 1)]
    if options.all:
        for name, tests in named:
            yield name
            yield from _in_fours([test.name for test in tests])
    else:
        shown, left = folded(named, DEFAULT_LINES - 8 - len(rounds.fill[:3]) - 1)
        yield from labelled(*((name, _first_names([test.name for test in tests])) for name, tests in shown))
        yield from folded_line(left, "round")
    for tests in rounds.fill if options.all else rounds.fill[:3]:
        yield f"round {tests[0].together}, all at once to fill {_first_names(_filled_links(tests))}"
        if options.all:
            yield from _in_fours([test.name.split(" ")[0] for test in tests])
    where = "TOPO" if options.topo == "-" else options.topo
    cluster = " … (same options)" if len(possible.topology.servers) > 1 else ""
    yield ""
    yield from step_lines(
        (
            f"topoplan pairs {where}{cluster} --format mpirun -o pairs.sh; run pairs.sh",
            f"topoplan pairs {where}{cluster} --results FILE names the slow links (--all prints every test)",
        )
    )


def _in_fours(names: Sequence[str]) -> Iterator[str]:
    for start in range(0, len(names), 4):
        yield "  " + "  ".join(names[start : start + 4])


def _filled_links(tests: Sequence[PairTest]) -> list[str]:
    names = wire_names(key for test in tests for key in test.links if key[2].endswith(FILLED))
    return [name.removesuffix(FILLED) for name in names]


def _summary(possible: PairTests, rounds: Rounds) -> str:
    ways = "one way" if possible.one_way else "both ways at once"
    fill = f" and {len(rounds.fill)} that fill wide links" if rounds.fill else ""
    return (
        f"{counted(len(possible.ends), 'GPU')}: {counted(len(rounds.tests), 'test')} in "
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
    topology: Topology, found: SlowLinkReport, results: int, missing: Sequence[str], *, every: bool
) -> Iterator[str]:
    """Yield the verdict, the slow links, what stays open, and the next step."""
    healthy = ", ".join(f"{100 * part:.0f} % of what {kind} states" for kind, part in found.healthy.items())
    slow = "no pair is slow" if not found.slow else f"{len(found.slow)} of {counted(results, 'pair')} slow"
    if found.named:
        slow += f", by {few([_shared_words(one.links) for one in found.named], separator=', ', most=3)}"
    yield f"{topology.name}: {slow}"
    yield from labelled(("healthy", f"pairs get {healthy}"), ("results", f"{results}"))
    rows = [_row("slow", one) for one in found.named]
    for part in found.alternatives:
        for place, each in enumerate(part[:MAX_PRINTED]):
            heads = ["or" if place else "either", *("and" for _ in each[1:])]
            rows += [_row(head, one) for head, one in zip(heads, each, strict=True)]
    if rows:
        shown, left = folded(rows, 8, every=every)
        yield ""
        yield table(("", "link", "GB/s", "healthy", "slow pairs"), shown)
        yield from folded_line(left, "row")
    if found.slow:
        yield ""
    together = [one for one in found.named if len(wire_names(one.links)) > 1]
    if together:
        yield "links in one row occur together in every test: pairs cannot tell which of them is slow"
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
        yield f"without a result: {counted(len(missing), 'pair')} of the rounds: {_first_names(missing)}"
    if not found.fewest:
        yield "note: too many slow pairs hang together for the smallest explanation; this is one that is small"
    above = [kind for kind, part in found.healthy.items() if part > FAR_ABOVE]
    if above:
        yield (
            f"note: the pairs get more than {', '.join(above)} states; say with --nics and --nic-bandwidth which NICs "
            "the tests used together"
        )
    below = [kind for kind, part in found.healthy.items() if part < FAR_BELOW]
    if below:
        yield (
            f"note: even the faster pairs get less than {100 * FAR_BELOW:.0f} % of what {', '.join(below)} states; "
            "what slows all of them equally is not found by comparing them"
        )
    if not found.slow:
        yield ""
    yield from step_lines(_result_steps(topology, found, missing, below))


def _result_steps(
    topology: Topology, found: SlowLinkReport, missing: Sequence[str], below: Sequence[str]
) -> list[str]:
    """Return the next steps after results of pairs."""
    ends = {end for one in found.named for src, dst, _ in one.links for end in (src, dst)}
    kinds = {device.kind for device in topology.devices if device.name in ends}
    steps = []
    if "nvswitch" in kinds or kinds == {"gpu"}:
        steps.append("nvidia-smi nvlink --errorcounters on these GPUs; reset them, then test again")
    if "switch" in kinds:
        steps.append("replace the cable, then the port, of these links; test again")
    elif "nic" in kinds:
        steps.append(
            "ibv_devinfo and mlxlink on these NICs: rate, width, errors; then the PCIe slot (lspci -vv)"
        )
    if not steps and found.named:
        steps.append("lspci -vv on these devices: LnkSta below LnkCap means a card that trained low")
    if found.alternatives or found.unexplained:
        steps.append("test again with --times 5, which crosses each link by more pairs")
    if missing:
        steps.append("run the tests without a result, then give all results again")
    if below:
        steps.append("compare with a test on another host of this kind: all pairs are slow here")
    return steps or ["nothing to do"]


def _row(head: str, one: SlowClass) -> tuple[str, ...]:
    rate = "dead" if one.rate == 0 else f"{one.rate:.4g}"
    return head, _shared_words(one.links), rate, f"{one.healthy:.4g}", str(len(one.pairs))


def _shared_words(links: Sequence[LinkKey]) -> str:
    return " ".join(wire_names(links))


def _first_names(names: Sequence[str]) -> str:
    return few(names, separator=", ", most=MAX_PRINTED)

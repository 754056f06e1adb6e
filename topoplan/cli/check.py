"""Diagnose a machine and the cost of each of its faults for ``topoplan check``."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Sequence

from topoplan.cli import arguments
from topoplan.cli.machine_options import FAULT_OPTIONS, add_all_options
from topoplan.cli.output import (
    Answer,
    folded,
    folded_line,
    note_lines,
    printable,
    progress_line,
    step_lines,
    table,
)
from topoplan.cli.sources import DESCRIPTION_OPTIONS, apply_machine_options, read_machine
from topoplan.errors import InfeasibleError, kind_of
from topoplan.machine.fabric import usable_fabric
from topoplan.machine.topology import Topology
from topoplan.operate.compare.costs import Cost, costs_of
from topoplan.operate.diagnosis import Diagnosis, diagnose, is_designed, warning_text
from topoplan.operate.faults import Fault, mended
from topoplan.operate.next_steps import fault_steps
from topoplan.plans.plan import check_collective, collective_name
from topoplan.reading.probe import probe
from topoplan.units import TOLERANCE, counted, labelled, name_ranges, number_ranges, rate_words

DEFAULT_COLLECTIVE = "allreduce"
"""The collective whose cost is always printed."""


def add_options(parser: arguments.OneLineParser) -> None:
    arguments.add_machine(parser, otherwise="this machine, as topoplan probe reads it")
    arguments.add_collective(parser)
    arguments.add_json(parser)
    arguments.declare(parser, "--all  print every fault")
    add_all_options(parser)
    parser.examples = (
        "topoplan check",
        "topoplan check topo.txt --overlay nvlink-status.txt",
        "topoplan check dgx-1v --without-link gpu0-gpu3",
    )


def run(options: argparse.Namespace) -> Answer:
    """Diagnose a machine and rate its faults. Exit status 0 if none costs bandwidth, 1 if one does or is not rated."""
    asked = dict.fromkeys((DEFAULT_COLLECTIVE, check_collective(options.collective)))
    found = diagnose(_machine(options), sound=_sound(options))
    with progress_line("planning") as progress:
        costs = {collective: costs_of(found, collective, progress=progress) for collective in asked}
    costly = [fault for i, fault in enumerate(found.faults) if _costs(i, costs)]
    unrated = [one for one in _unrated(found, any(costs.values())) if one not in costly]
    wrong = tuple(fault for fault in found.faults if fault in costly or fault in unrated)
    return Answer(
        text=lambda: _lines(found, costs, wrong, unrated, options),
        value=lambda: _object(found, costs, wrong, unrated),
        status=1 if wrong else 0,
    )


REMARKS = ("NIC far", "NUMA", "row missing", "PCIe one-way")
"""Kinds without a link to mend that cost an allreduce nothing by themselves."""


def _costs(place: int, costs: dict[str, tuple[Cost, ...]]) -> bool:
    rated = [each[place] for each in costs.values() if each]
    return any(cost.alone < cost.healthy * (1 - TOLERANCE) for cost in rated)


def _unrated(found: Diagnosis, rated: bool) -> list[Fault]:
    """Return the faults, remarks apart, whose cost is unknown: without links to mend, or on slow PCIe links that the
    rated plans do not cross, such as those of GPUs with NVLink.
    """
    try:
        links = usable_fabric(mended(found.topology, found.faults)).links if rated else ()
    except InfeasibleError:
        links = ()
    crossed = {(link.src, link.dst, link.channel) for link in links}

    def known(fault: Fault) -> bool:
        if fault.kind == "PCIe slow":
            return any((link.src, link.dst, link.channel) in crossed for link in fault.links)
        return bool(fault.links) or fault.kind in ("MIG", "no peer access")

    return [fault for fault in found.faults if fault.kind not in REMARKS and not (rated and known(fault))]


def _machine(options: argparse.Namespace) -> Topology:
    """Return the machine of TOPO, or this one."""
    if options.topo is not None:
        return read_machine(options).topology
    arguments.refuse_without(options, dict.fromkeys(DESCRIPTION_OPTIONS, "TOPO"))
    return apply_machine_options(options, probe()).topology


def _sound(options: argparse.Namespace) -> Topology | None:
    """Return the machine of TOPO without the listings and options that name faults; None if there are none."""
    named = [name for name in FAULT_OPTIONS if getattr(options, name, None)]
    if options.topo is None or not named:
        return None
    return read_machine(argparse.Namespace(**{**vars(options), **dict.fromkeys(named)})).topology


def _object(
    found: Diagnosis, costs: dict[str, tuple[Cost, ...]], wrong: Sequence[Fault], unrated: Sequence[Fault]
) -> dict[str, object]:
    """Return the object that ``--json`` prints; a machine of less than two GPUs has no rates."""
    return {
        "healthy": found.healthy,
        "machine": found.topology.name,
        "resembles": found.resembles or None,
        "equals_allocation": sorted(found.places) or None,
        "lacking_by_number": [list(pair) for pair in found.lacking],
        "not_compared": list(found.unknown),
        "assumed_nvlink_rate": found.assumed or None,
        "equal_but_for_rate": [{"machine": name, "nvlink_rate": rate} for name, rate in found.alike],
        "faults": [
            {
                "kind": fault.kind,
                "devices": list(fault.devices),
                "servers_alike": list(fault.servers),
                "is": fault.state,
                "should_be": fault.should_be,
                "wrong": fault in wrong,
                "rated": fault not in unrated,
                "cost": {
                    collective: {"now": each[i].now, "healthy": each[i].healthy, "alone": each[i].alone}
                    for collective, each in costs.items()
                    if each
                },
            }
            for i, fault in enumerate(found.faults)
        ],
        "next_steps": list(fault_steps(wrong or found.faults)),
        "notes": _other_notes(found),
    }


def _lines(
    found: Diagnosis,
    costs: dict[str, tuple[Cost, ...]],
    wrong: Sequence[Fault],
    unrated: Sequence[Fault],
    options: argparse.Namespace,
) -> Iterator[str]:
    """Yield the verdict, rates with and without the faults, the faults, and the next step."""
    gpus = len(found.topology.gpus)
    yield f"{printable(found.topology.name)}, {counted(gpus, 'GPU')}: {_verdict(found, wrong)}"
    yield from labelled(("compared", _resembles(found)), ("NVLink rate", _assumed_rate(found)))
    for collective, each in costs.items():
        if each:
            now, healthy = (rate_words(rate, collective, gpus) for rate in (each[0].now, each[0].healthy))
            value = (
                f"{now}; without the faults {healthy}" if now != healthy else f"{now}, as without the faults"
            )
            yield from labelled((collective_name(collective), value))
    if found.faults:
        yield ""
        yield _table(found.faults, costs, unrated, every=options.all)
    steps = list(fault_steps(wrong or found.faults)) or ["nothing to do"]
    if wrong:
        steps.append("until then topoplan plan plans around the faults")
    yield ""
    yield from step_lines(steps if options.all else steps[:MAX_STEPS])
    if found.faults:
        status = (
            "1: a fault costs bandwidth or cannot be rated (0: none does"
            if wrong
            else "0: no fault costs bandwidth (1: one does or cannot be rated"
        )
        yield from labelled(("exit status", f"{status}, 2: bad input)"))
    yield from note_lines(*_other_notes(found), every=options.notes)


MAX_STEPS = 4
"""Most next steps without ``--all``."""


def _verdict(found: Diagnosis, wrong: Sequence[Fault]) -> str:
    if not found.faults:
        if found.healthy:
            return "healthy"
        if found.places and not found.unknown:
            equal = number_ranges(sorted(found.places))
            return f"no fault found; equals the sound allocation {equal} of {found.resembles}"
        return "no fault found; not compared with a known machine"
    free = len(found.faults) - len(wrong)
    without = f"{counted(free, 'fault')} that {'costs' if free == 1 else 'cost'} no bandwidth" if free else ""
    return " and ".join(filter(None, (counted(len(wrong), "fault") if wrong else "", without)))


def _other_notes(found: Diagnosis) -> list[str]:
    """Return the notes of the machine that are not faults by themselves."""
    reported = {fault.state for fault in found.faults if fault.kind == "told"}
    return [
        note
        for note in found.topology.notes
        if kind_of(note) != "filled in" and (kind_of(note) != "warning" or warning_text(note) not in reported)
    ]


def _resembles(found: Diagnosis) -> str:
    if is_designed(found.topology):
        return "with nothing: it states neither its source nor models of GPUs, so its links are as designed"
    if not found.resembles and found.before:
        return "with itself without these listings and options: it resembles no machine of the library"
    if not found.resembles:
        return "with itself: it resembles no machine of the library, so a loss that it shows everywhere is not seen"
    servers = max(1, len(found.topology.servers))
    whole = found.parts * servers
    here = len(found.topology.gpus)
    others = ""
    if found.unknown:
        others = (
            f"; {', '.join(name_ranges(found.unknown))} with nothing: no machine of the library is like them"
        )
    if here == whole:
        return f"with {found.resembles}" + (f", {servers} servers" if servers > 1 else "") + others
    words = f"with {found.resembles}, of which {here} of {whole} GPUs are here{others}"
    if found.lacking:
        pairs = ", ".join("-".join(pair) for pair in found.lacking)
        return f"{words}; by its GPUs' numbers it would lack NVLinks at {pairs}"
    if found.places:
        return f"{words}; other GPUs of it that lost NVLinks may look the same"
    return words


def _assumed_rate(found: Diagnosis) -> str:
    """Return which rate was assumed, if machines of other rates have as many NVLinks; else nothing."""
    if not found.alike:
        return ""
    by_rate: dict[float, list[str]] = {}
    for name, rate in found.alike:
        by_rate.setdefault(rate, []).append(name)
    others = ", ".join(f"{', '.join(names)} have as many of {rate:g} GB/s" for rate, names in by_rate.items())
    return (
        f"assumed {found.assumed:g} GB/s; {others}; pass --nvlink-bandwidth, or give the output of nvidia-smi -L with "
        "the matrix"
    )


_TEXTS = {"devices": ("where", 30), "is": ("state", 32), "should be": ("should_be", 30)}
"""Columns of text with the attribute of the fault and most characters; a longer one stands in full below the table."""


MAX_FAULTS = 8
"""Most faults without ``--all``."""


def _table(
    faults: Sequence[Fault], costs: dict[str, tuple[Cost, ...]], unrated: Sequence[Fault], *, every: bool
) -> str:
    """Return a row for each fault, costly ones first; the last columns are the rate with this fault alone."""
    rated = [collective for collective, each in costs.items() if each]
    order = sorted(range(len(faults)), key=lambda i: [costs[name][i].alone for name in rated])
    shown, left = folded(order, MAX_FAULTS, every=every)
    rows, cut = [], []
    for i in shown:
        fault = faults[i]
        texts = [(printable(getattr(fault, name)), widest) for name, widest in _TEXTS.values()]
        short = [text if len(text) <= widest else f"{text[: widest - 1]}…" for text, widest in texts]
        alone = ("not rated" if fault in unrated else f"{costs[name][i].alone:.6g}" for name in rated)
        rows.append((fault.kind, *short, *alone))
        if short != [text for text, _ in texts]:
            text = printable(f"{fault.kind}: {fault.text}")
            cut += textwrap.wrap(text, 118, subsequent_indent="  ", max_lines=None if every else 2)
    heads = [f"{collective_name(name)} with this fault only" for name in rated]
    if len(heads) > 1:
        heads = [f"{collective_name(name)} with it" for name in rated]
    return "\n".join(
        [
            table(("kind", *_TEXTS, *heads), rows),
            *folded_line(left, "fault"),
            *(["", *list(dict.fromkeys(cut))[: None if every else 4]] if cut else []),
        ]
    )

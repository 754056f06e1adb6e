"""Plan for ranges of message sizes, ``topoplan plan --sizes``: the best schedule of each range and the crossovers."""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from topoplan.cli import arguments
from topoplan.cli.output import (
    DEFAULT_LINES,
    Answer,
    Column,
    collective_words,
    expected_words,
    few,
    in_network_words,
    machine_words,
    microseconds,
    note_lines,
    plan_notes,
    progress_line,
    rate_verdict,
    rates_of,
    records_of,
    sizes_table,
    table_of,
)
from topoplan.cli.sources import read_machine
from topoplan.errors import UsageError
from topoplan.machine.fabric import channel_words
from topoplan.plans.certificates.certificate import explain_certificate
from topoplan.plans.file_values import finite
from topoplan.plans.plan import ALL_TO_ALL, Plan, SizeRange, check_collective, collective_name
from topoplan.plans.size_plans import SizePlans
from topoplan.units import counted, format_seconds, format_size, labelled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from topoplan.cli.results import Result
    from topoplan.machine.topology import Topology
    from topoplan.model.expected_times import Quickest
    from topoplan.model.schedule_selection import ScheduleChoice
    from topoplan.model.window_engine import KernelSetting


@dataclass(frozen=True, slots=True)
class SizePoint:
    """The model time at a size, the bound on every schedule's, and what is expected to be quickest."""

    size: int
    schedule: str
    seconds: float
    bound_seconds: float
    expected: Quickest


@dataclass(frozen=True, slots=True)
class RangeTimes:
    """A range of sizes with the model times at both ends and its lead over the runner-up.

    ``ends`` are the bytes at both ends, within the tested sizes; ``seconds`` are the times of its plan there.
    ``second`` is the next best candidate with other trees in the geometric middle of the ends (or None),
    and ``gain`` how many times longer it takes there. ``setting`` is that of the windows engine, None for messages.
    """

    range: SizeRange
    ends: tuple[int, int]
    seconds: tuple[float, float]
    second: Plan | None
    gain: float | None
    setting: KernelSetting | None

    @property
    def packets(self) -> bool:
        """Whether every rank sends packets to every other one, without trees."""
        return self.setting is not None and self.setting.packets


def add_options(parser: arguments.OneLineParser) -> None:
    """Add ``--sizes`` and its options."""
    arguments.declare(
        parser,
        """
        --sizes S  the fastest schedule for each range of buffer sizes within 64KB:1GB or 64KB,1MB,… (default: 1KB:1GB)
        """,
        sizes={"type": arguments.size_list, "nargs": "?", "const": arguments.size_list("1KB:1GB")},
    )
    arguments.declare(
        parser.topic("plan"),
        """
        --engine {messages,windows}  with --sizes, the engine: messages, copies that are started one by one, or
                               windows, one kernel for each collective that writes to the other GPUs' memory over
                               NVLink; then blocks and chunks are chosen too (default: messages)
        --engine-costs F.json  with --engine windows, measured figures in place of NCCL's; python -m
                               tests.gpu_report writes them
        """,
    )


def run(options: argparse.Namespace, topology: Topology | None) -> Answer:
    """Plan by size with the options of ``plan``; ``topology`` as for `read_machine`."""
    from topoplan.model.schedule_selection import choose_by_size
    from topoplan.model.window_engine import load_costs

    if check_collective(options.collective) == ALL_TO_ALL:
        raise UsageError("--sizes chooses among trees, and all_to_all is planned by paths; leave it out")
    machine = read_machine(options, topology)
    gpus = machine.allocation(options.gpus)
    costs = None if options.engine_costs is None else load_costs(options.engine_costs)
    started = time.perf_counter()
    with progress_line("planning") as progress:
        choice = choose_by_size(
            machine.whole,
            options.collective,
            gpus=gpus,
            root=options.root,
            channels=options.channels,
            sizes=options.sizes,
            engine=options.engine or "messages",
            costs=costs,
            progress=progress,
        )
    seconds = time.perf_counter() - started
    lines = range_times(choice)
    notes = [*plan_notes(choice.plans), *choice.notes]

    def text() -> Iterator[str]:
        warnings = [*note_lines(*machine.warnings(gpus))]
        beside = 1 + len(warnings) + len([*note_lines(*notes, every=options.notes)])
        yield from _lines(choice, lines, beside, every=options.all)
        yield f"planned in {format_seconds(seconds)}"
        yield from warnings

    return replace(_answer(choice, lines, notes, seconds), text=text, file=choice.plans.to_json)


def result_of(plans: SizePlans) -> Result:
    """Return plans by size as a result of the command, for Python."""
    from topoplan.cli.results import Result
    from topoplan.model.schedule_selection import choice_of

    choice = choice_of(plans)
    answer = _answer(choice, range_times(choice), [*plan_notes(plans), *choice.notes], 0.0)
    return Result("plan --sizes", answer, lambda: records_of(POINTS, _points(choice)))


def _answer(
    choice: ScheduleChoice, lines: Sequence[RangeTimes], notes: Sequence[str], seconds: float
) -> Answer:
    return Answer(
        text=lambda: _lines(choice, lines, 1, every=False),
        value=lambda: _object(choice, lines, notes, seconds),
        rows=lambda: records_of(POINTS, _points(choice)),
        figure=lambda: _figure(choice),
        notes=notes,
    )


def range_times(choice: ScheduleChoice) -> list[RangeTimes]:
    """Return the rows of the table; a range in which the windows engine changes from packets to trees is two."""
    from topoplan.model.candidates import same_trees

    clocks, windows = choice.clocks(), choice.windows
    lines = []
    for one in _split_at_packets(choice):
        low = max(one.start, choice.sizes[0])
        high = choice.sizes[-1] if one.stop is None else one.stop
        middle = math.isqrt(low * high)
        own = choice.candidates.index(one.plan)
        others: list[tuple[float, int]] = []
        setting = windows[own].setting(middle) if windows else None
        here = clocks[own](middle)
        if setting is not None and setting.packets:
            high -= one.stop is not None  # the last that goes in packets
            others = sorted((time.along_trees(middle).seconds, number) for number, time in enumerate(windows))
        elif choice.complete:
            others = sorted(
                (time(middle), number)
                for number, time in enumerate(clocks)
                if not same_trees(choice.candidates[number], one.plan)
            )
        lines.append(
            RangeTimes(
                range=one,
                ends=(low, high),
                seconds=(clocks[own](low), clocks[own](high)),
                second=choice.candidates[others[0][1]] if others else None,
                gain=others[0][0] / here if others else None,
                setting=setting,
            )
        )
    return lines


def _split_at_packets(choice: ScheduleChoice) -> list[SizeRange]:
    """Return the ranges, split where packets end."""
    found = []
    for one in choice.plans.ranges:
        parts = [one.start, one.stop]
        if choice.windows:
            end = choice.windows[choice.candidates.index(one.plan)].packets_to + 1
            if max(one.start, choice.sizes[0]) < end <= choice.sizes[-1] and (
                one.stop is None or end < one.stop
            ):
                parts[1:1] = [end]
        found += [SizeRange(start or 0, stop, one.plan) for start, stop in pairwise(parts)]
    return found


def _lines(choice: ScheduleChoice, lines: Sequence[RangeTimes], beside: int, *, every: bool) -> Iterator[str]:
    """Yield the ranges, then times at sizes; without ``every`` so many that `DEFAULT_LINES` suffice with ``beside``
    lines of the caller.
    """
    plans = choice.plans
    best = max(plans.plans, key=lambda plan: plan.rate)
    where = f"{collective_words(plans)} on {machine_words(plans)}"
    if len(plans.ranks) == 1:
        yield f"{where}: one GPU, nothing moves"
        return
    starts = [format_size(line.range.start) for line in lines[1:]]
    found = (
        f"{len(lines)} schedules by size, from {few(starts, separator=', ')}"
        if starts
        else "one for all sizes"
    )
    yield f"{where}, over {channel_words(best.channels, best.topology)}, by message size: {found}"
    without, beyond = in_network_words(best)
    head = labelled(
        ("algbw", f"{rates_of(best.rate, best)} at large sizes: {rate_verdict(best.gap, without)}"),
        ("upper bound", f"{rates_of(best.bound, best)}: {explain_certificate(best)}"),
        ("in-network", beyond),
        ("crossovers", _crossovers(lines)),
    )
    yield from head
    yield ""
    engine = any(line.setting for line in lines)
    ranges = table_of(
        [column for column in RANGES if engine or column.head not in ("blocks", "chunk")], lines
    )
    yield ranges
    yield ""
    taken = 1 + len(head) + 1 + ranges.count("\n") + 1 + 1
    points = _points(choice)
    yield from sizes_table(POINTS, points, DEFAULT_LINES - taken - beside - 5, every=every)
    if points:
        yield ""
    yield (
        f"model times of {counted(len(choice.candidates), 'schedule')} from {format_size(choice.sizes[0])} to "
        f"{format_size(choice.sizes[-1])}; gain: over the next best in the middle of the range"
        + ("; blocks and chunk: there too" if choice.windows else "")
    )
    if points:
        yield "quickest: " + expected_words(points[-1].expected)


def _of_trees(name: str) -> Callable[[RangeTimes], object]:
    """Return a function of the plan's attribute; packets go without trees."""
    return lambda line: None if line.packets else getattr(line.range.plan, name)


def _chunk(line: RangeTimes) -> int | None:
    return None if line.setting is None or line.packets else line.setting.chunk


RANGES: tuple[Column[RangeTimes], ...] = (
    Column("from", value="range.start", form=format_size),
    Column("to", value="range.stop", form=format_size),
    Column("schedule", value=lambda line: "one-shot" if line.packets else line.range.plan.schedule),
    Column("trees", value=_of_trees("num_trees")),
    Column("height", value=_of_trees("height")),
    Column("GB/s", value=_of_trees("rate"), form=".4g"),
    Column("blocks", value="setting.blocks"),
    Column("chunk", value=_chunk, form=format_size),
    Column("us at from", value=lambda line: line.seconds[0], form=microseconds),
    Column("us at to", value=lambda line: line.seconds[1], form=microseconds),
    Column("next best", value=lambda line: line.second and describe_schedule(line.second)),
    Column("gain", "gain", form=lambda gain: f"{gain:.2f}x"),
)


def _of_nccl(point: SizePoint, name: str) -> object:
    return None if point.expected.nccl is None else getattr(point.expected.nccl, name)


POINTS: tuple[Column[SizePoint], ...] = (
    Column("size", "size", form=format_size),
    Column("schedule", "schedule"),
    Column("us", "seconds", form=microseconds),
    Column("lower bound us", "bound_seconds", form=microseconds),
    Column(
        "ratio",
        "ratio",
        lambda point: point.seconds / point.bound_seconds if point.bound_seconds else None,
        ".2f",
    ),
    Column("NCCL us", "nccl", value=lambda one: _of_nccl(one, "seconds"), form=microseconds),
    Column("NCCL runs", "nccl_runs", value=lambda one: _of_nccl(one, "runs")),
    Column("quickest", "quickest", value="expected.implementation"),
    Column("expected us", "quickest_seconds", value="expected.seconds", form=microseconds),
)


def _points(choice: ScheduleChoice) -> list[SizePoint]:
    """Return the time and the bound at every size; on the windows engine the bound counts bytes only."""
    from topoplan.model.expected_times import ExpectedWinners
    from topoplan.model.times_by_size import rounded

    plans = choice.plans
    if len(plans.ranks) == 1:
        return []
    winners = ExpectedWinners(plans)

    def point(size: int, schedule: str, seconds: float, least: float) -> SizePoint:
        return SizePoint(size, schedule, seconds, least, winners.quickest(size, seconds))

    if plans.times is not None:
        return [point(size, plans.at(size).schedule, *times) for size, *times in plans.times.points]
    bound = max(plan.bound for plan in plans.plans) * 1e9
    points = []
    for size in choice.sizes if choice.windows else ():
        plan = plans.at(size)
        setting = choice.windows[choice.candidates.index(plan)].setting(size)
        schedule = "one-shot" if setting.packets else plan.schedule
        points.append(point(size, schedule, rounded(setting.seconds), rounded(size / bound)))
    return points


def _crossovers(lines: Sequence[RangeTimes]) -> str:
    starts = [line.range.start for line in lines[1:]]
    found = [f"{size} bytes ({format_size(size)})" for size in starts]
    return ", ".join(found) or "none, one schedule is the fastest throughout"


def describe_schedule(plan: Plan) -> str:
    """Return a schedule in a few words.

    >>> import topoplan
    >>> describe_schedule(topoplan.plan(topoplan.load("dgx-2"), "allreduce"))
    'one-hop, 16 of height 1'
    """
    return f"{plan.schedule}, {plan.num_trees} of height {plan.height}"


def _object(
    choice: ScheduleChoice, lines: Sequence[RangeTimes], notes: Sequence[str], seconds: float
) -> dict[str, object]:
    """Return the object that ``--json`` prints: the file, and what belongs to this run or is derived from it."""
    plans = choice.plans
    return {
        **plans.to_object(),
        "ranks": list(plans.ranks),
        "bound": finite(plans.plans[-1].bound),
        "crossovers": list(plans.crossovers),
        "table": [
            {
                "from": line.range.start,
                "to": line.range.stop,
                **_summary(line.range.plan),
                "ends": list(line.ends),
                "seconds": list(line.seconds),
                "next": None if line.second is None else _summary(line.second),
                "gain": line.gain,
                **_setting_object(line),
            }
            for line in lines
        ],
        "points": records_of(POINTS, _points(choice)),
        **({} if choice.costs is None else {"engine": "windows", "costs": asdict(choice.costs)}),
        "candidates": [_summary(plan) for plan in choice.candidates],
        "digest": plans.digest,
        "seconds": seconds,
        "notes": list(dict.fromkeys(notes)),
    }


def _setting_object(line: RangeTimes) -> dict[str, object]:
    """Return how the windows engine runs a range; empty for messages."""
    if line.setting is None:
        return {}
    way = (
        {"way": "one-shot", "chunk": None} if line.packets else {"way": "trees", "chunk": line.setting.chunk}
    )
    return {**way, "blocks": line.setting.blocks}


def _summary(plan: Plan) -> dict[str, object]:
    return {
        "schedule": plan.schedule,
        "method": plan.method,
        "trees": plan.num_trees,
        "height": plan.height,
        "rate": finite(plan.rate),
    }


def _figure(choice: ScheduleChoice) -> Figure:
    from topoplan.model.times_by_size import row
    from topoplan.operate.plot.charts import draw_sweep

    plans = choice.plans
    curves = {}
    times: Counter[str] = Counter()
    for plan, seconds in zip(choice.candidates, choice.clocks(), strict=True):
        name = describe_schedule(plan)
        times[name] += 1
        if times[name] > 1:
            name += f", other trees {times[name]}"
        curves[name] = [row(plans.collective, len(plans.ranks), size, seconds(size)) for size in choice.sizes]
    title = f"{collective_name(plans.collective)} on {plans.topology.name}, {counted(len(plans.ranks), 'GPU')}, by size"
    return draw_sweep(curves, title=title)

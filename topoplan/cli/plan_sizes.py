"""Plan for ranges of message sizes, ``topoplan plan --sizes``: the best schedule of each range and the crossovers."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from topoplan.cli import arguments
from topoplan.cli.output import (
    draw_plot,
    in_network_words,
    plan_notes,
    print_csv,
    print_json,
    print_notes,
    progress_line,
    rank_names,
    table,
    write_whole,
)
from topoplan.cli.sources import read_machine
from topoplan.errors import UsageError
from topoplan.machine.fabric import channel_words
from topoplan.plans.certificates.certificate import explain_certificate
from topoplan.plans.json_values import finite
from topoplan.plans.plan import ALL_TO_ALL, Plan, SizeRange, check_collective
from topoplan.units import bus_words, counted, format_seconds, format_size

if TYPE_CHECKING:
    from topoplan.model.schedule_selection import ScheduleChoice
    from topoplan.model.window_engine import KernelSetting
    from topoplan.plans.size_plans import SizePlans, SizeTimes


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
        --sizes S              the best schedule for each range of message sizes by model time, between the smallest
                               and the largest of these: 64KB:1GB, or 64KB,1MB,… (default: 1KB:1GB); -o writes them
                               all into one file
        --engine {messages,windows}  with --sizes, the engine: messages, copies that are started one by one, or
                               windows, one kernel for each collective that writes to the other GPUs' memory over
                               NVLink; then blocks and chunks are chosen too (default: messages)
        --engine-costs F.json  with --engine windows, measured figures in place of NCCL's; python -m
                               tests.gpu_report writes them
        """,
        sizes={"type": arguments.size_list, "nargs": "?", "const": arguments.size_list("1KB:1GB")},
    )


def check_options(options: argparse.Namespace) -> None:
    """Refuse the options of ``--sizes``, or of one engine, without it."""
    if options.sizes is None and options.engine is not None:
        raise UsageError("--engine belongs to --sizes; give sizes, or leave it out")
    if options.engine_costs is not None and options.engine != "windows":
        raise UsageError("--engine-costs belongs to --engine windows; leave it out, or choose that engine")


def run(options: argparse.Namespace) -> int:
    """Plan by size with the options of ``plan``, which has checked the output path."""
    from topoplan.model.schedule_selection import choose_by_size
    from topoplan.model.window_engine import load_costs

    if options.method != "exact":
        raise UsageError(
            f"--sizes compares all schedules, so --method {options.method} does not go with it; leave one of them out"
        )
    if options.order is not None:
        raise UsageError(
            f"--sizes tries every order of the trees, so --order {options.order} does not go with it; "
            "leave one of them out"
        )
    if options.height is not None:
        raise UsageError("--sizes tries every height, so --height does not go with it; leave one of them out")
    if options.time_limit is not None:
        raise UsageError(
            "--time-limit ends the search for one plan and --sizes makes many; leave one of them out"
        )
    if options.size is not None:
        raise UsageError("--size is one size and --sizes plans for many; leave one of them out")
    if options.demand is not None:
        raise UsageError("--demand is of one size and --sizes plans for many; leave one of them out")
    if check_collective(options.collective) == ALL_TO_ALL:
        raise UsageError("--sizes chooses among trees, and an alltoall is planned by paths; leave it out")
    machine = read_machine(options)
    costs = None if options.engine_costs is None else load_costs(options.engine_costs)
    started = time.perf_counter()
    with progress_line("planning") as progress:
        choice = choose_by_size(
            machine.whole,
            options.collective,
            gpus=machine.allocation(options.gpus),
            root=options.root,
            channels=options.channels,
            sizes=options.sizes,
            engine=options.engine or "messages",
            costs=costs,
            progress=progress,
        )
    seconds = time.perf_counter() - started
    if options.plot:
        _draw_times(choice, options)
    plans = choice.plans
    if options.output == "-":
        print(plans.to_json(), end="")
        return 0
    if options.output:
        write_whole(options.output, plans.to_json())
    lines = range_times(choice)
    notes = [*plan_notes(plans), *choice.notes]
    if options.csv:
        print_csv(_points(choice))
        return 0
    if options.json:
        print_json(_object(choice, lines, notes, seconds))
        return 0
    print_notes(*machine.warnings(machine.allocation(options.gpus)))
    _print(choice, lines)
    print(f"planned in {format_seconds(seconds)}")
    print_notes(*notes)
    for place in (options.output, options.plot):
        if place:
            print(f"written: {place}")
    return 0


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
        setting = windows[own].setting(middle) if windows else None
        here = clocks[own](middle)
        if setting is not None and setting.packets:
            high -= one.stop is not None  # the last that goes in packets
            others = sorted((time.along_trees(middle).seconds, number) for number, time in enumerate(windows))
        else:
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


def _print(choice: ScheduleChoice, lines: Sequence[RangeTimes]) -> None:
    plans = choice.plans
    best = max(plans.plans, key=lambda plan: plan.rate)
    towards = "to" if plans.collective == "reduce" else "from"
    root = "" if plans.root is None else f" {towards} {plans.ranks[plans.root]}"
    print(
        f"{plans.collective}{root} on {plans.topology.name}, {counted(len(plans.ranks), 'GPU')} "
        f"({rank_names(plans.ranks)}), over {channel_words(best.channels)}, by message size"
    )
    if len(plans.ranks) == 1:
        print("one GPU: nothing moves")
    else:
        bus = bus_words(best.bound, plans.collective, len(plans.ranks))
        print(f"bound  {best.bound:.6g} GB/s{bus}: {explain_certificate(best)}")
        beyond = in_network_words(best)
        if beyond:
            print(f"       {beyond}")
        print()
        print(_table(lines))
        print()
        if plans.times is not None:
            print(_times_table(plans, plans.times))
            print()
        print(f"crossovers: {_crossovers(lines)}")
        print(
            f"model times of {counted(len(choice.candidates), 'schedule')} from {format_size(choice.sizes[0])} to "
            f"{format_size(choice.sizes[-1])}; gain: over the next best in the middle of the range"
            + ("; blocks and chunk: there too" if choice.windows else "")
        )


def _table(lines: Sequence[RangeTimes]) -> str:
    engine = ("blocks", "chunk") if any(line.setting for line in lines) else ()
    head = (
        "from",
        "to",
        "schedule",
        "trees",
        "height",
        "GB/s",
        *engine,
        "us at from",
        "us at to",
        "next best",
        "gain",
    )
    rows = []
    for line in lines:
        plan, stop = line.range.plan, line.range.stop
        rows.append(
            (
                format_size(line.range.start),
                "-" if stop is None else format_size(stop),
                *(
                    ("one-shot", "-", "-", "-")
                    if line.packets
                    else (plan.schedule, str(plan.trees), str(plan.height), f"{plan.rate:.4g}")
                ),
                *_setting_cells(line.setting),
                *(f"{seconds * 1e6:.1f}" for seconds in line.seconds),
                "-" if line.second is None else describe_schedule(line.second),
                "-" if line.gain is None else f"{line.gain:.2f}x",
            )
        )
    return table(head, rows)


def _times_table(plans: SizePlans, times: SizeTimes) -> str:
    """Return a table of model time and bound at every size."""
    rows = [
        (
            format_size(size),
            plans.at(size).schedule,
            f"{seconds * 1e6:.1f}",
            f"{least * 1e6:.1f}",
            f"{seconds / least:.2f}",
        )
        for size, seconds, least in times.points
    ]
    return table(("size", "schedule", "us", "no schedule below", "ratio"), rows)


def _points(choice: ScheduleChoice) -> list[dict[str, object]]:
    """Return a record for every size, for ``--json`` and ``--csv``; on the windows engine the bound counts bytes
    only.
    """
    plans = choice.plans
    if plans.times is None:
        return _points_of_windows(choice)
    return [
        {
            "size": size,
            "schedule": plans.at(size).schedule,
            "seconds": seconds,
            "bound_seconds": least,
            "ratio": seconds / least,
        }
        for size, seconds, least in plans.times.points
    ]


def _points_of_windows(choice: ScheduleChoice) -> list[dict[str, object]]:
    from topoplan.model.times_by_size import rounded

    bound = max(plan.bound for plan in choice.plans.plans) * 1e9
    points: list[dict[str, object]] = []
    for size in choice.sizes if choice.windows else ():
        plan = choice.plans.at(size)
        setting = choice.windows[choice.candidates.index(plan)].setting(size)
        seconds, least = rounded(setting.seconds), rounded(size / bound)
        points.append(
            {
                "size": size,
                "schedule": "one-shot" if setting.packets else plan.schedule,
                "seconds": seconds,
                "bound_seconds": least,
                "ratio": seconds / least if least else None,
            }
        )
    return points


def _setting_cells(setting: KernelSetting | None) -> tuple[str, ...]:
    if setting is None:
        return ()
    return str(setting.blocks), "-" if setting.packets else format_size(setting.chunk)


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
    return f"{plan.schedule}, {plan.trees} of height {plan.height}"


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
        "points": _points(choice),
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
        "trees": plan.trees,
        "height": plan.height,
        "rate": finite(plan.rate),
    }


def _draw_times(choice: ScheduleChoice, options: argparse.Namespace) -> None:
    from topoplan.model.times_by_size import row
    from topoplan.operate.plot.charts import draw_sweep

    plans = choice.plans
    curves = {}
    for number, (plan, seconds) in enumerate(zip(choice.candidates, choice.clocks(), strict=True)):
        name = describe_schedule(plan)
        curves[name if name not in curves else f"{name} ({number + 1})"] = [
            row(plans.collective, len(plans.ranks), size, seconds(size)) for size in choice.sizes
        ]
    title = f"{plans.collective} on {plans.topology.name}, {counted(len(plans.ranks), 'GPU')}, by size"
    draw_plot(options, lambda: draw_sweep(curves, title=title))

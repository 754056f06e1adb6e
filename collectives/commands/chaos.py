"""What ``topoplan bench --chaos`` prints of ranks that were hurt at random; `collectives.chaos` hurts them."""

from __future__ import annotations

import argparse
import secrets
import statistics
import sys
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from topoplan.cli import arguments
from topoplan.cli.output import plan_notes, print_csv, print_json, print_notes, table
from topoplan.cli.progress import progress_line
from topoplan.errors import UsageError
from topoplan.plans.plan import Plans
from topoplan.units import counted, format_size

if TYPE_CHECKING:
    from collectives.chaos.run import Outcome, Settings, Tally

FEWEST = 3
"""Ranks: one is lost, and two are left."""

LONGEST = 1e7
"""Seconds, some months."""

NOT_WITH = {
    "rivals": False,
    "paced": False,
    "trace": None,
    "chunk_file": None,
    "inexact": False,
    "engine": "auto",
    "dtype": "float32",
}
"""Options that mean nothing here, and what they are where nobody gives them."""

COUNTED = ("faults", "repeated", "refused", "wrong", "lost", "hangs", "left_over")
"""What is added up of tallies."""


@dataclass(frozen=True, slots=True)
class Line:
    """What is printed of a kind of fault: times in milliseconds, None where there were none."""

    fault: str
    faults: int
    repeated: int
    refused: int
    wrong: int
    lost: int
    hangs: int
    left_over: int
    median_ms: float | None
    p99_ms: float | None

    @classmethod
    def of(cls, fault: str, tallies: list[Tally]) -> Line:
        """Of some tallies together."""
        times = sorted(seconds for tally in tallies for seconds in tally.seconds)
        return cls(
            fault=fault,
            median_ms=statistics.median(times) * 1e3 if times else None,
            p99_ms=times[-1 - len(times) // 100] * 1e3 if times else None,
            **{name: sum(getattr(tally, name) for tally in tallies) for name in COUNTED},
        )

    def to_object(self) -> dict[str, object]:
        """As JSON has it."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def add_chaos(parser: arguments.OneLineParser) -> None:
    """Add ``--chaos`` and ``--seed``."""
    parser.add_argument(
        "--chaos",
        type=arguments.number(arguments.TINY, LONGEST, "number of seconds above zero, such as 60"),
        metavar="SECONDS",
        help="kill, stop and slow ranks at random for so long, and check every element of what the others get, of "
        "all collectives and of sizes up to the largest of --sizes (shared, tcp, mpi)",
    )
    parser.add_argument(
        "--seed",
        type=arguments.whole(0, 2**63 - 1, "seed such as 1"),
        metavar="N",
        help="of --chaos: the same faults in the same order (default: a new one, which is printed)",
    )


def run_chaos(options: argparse.Namespace, plan: Plans, *, launched: bool) -> int:
    """Hurt the ranks of a plan; exit status 1 if anything is wrong.

    Parameters
    ----------
    options : Namespace
        Of ``bench``, with their defaults.
    plan : Plan or SizePlans
    launched : bool
        Whether this process is one of several that a launcher has started.
    """
    from collectives.backends.open_backend import machine_helpers
    from collectives.chaos.run import BACKENDS, END, Settings, Tally, chaos

    extra = arguments.first_given(options, NOT_WITH)
    if extra:
        raise UsageError(
            f"{extra} is not for --chaos, which hurts ranks and checks what they do; leave one of them out"
        )
    if options.backend not in BACKENDS:
        raise UsageError(
            f"--chaos needs a process for each rank, which it can hurt, and others that go on without it; "
            f"{options.backend} has none, use --backend {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}"
        )
    if len(plan.ranks) < FEWEST:
        raise UsageError(
            f"--chaos takes ranks until two are left, and the plan has {counted(len(plan.ranks), 'rank')}; "
            f"plan for {FEWEST} GPUs or more"
        )
    if machine_helpers(plan):
        raise UsageError(
            "a plan with helpers cannot go on without a rank; leave the helpers out of the machine to hurt its ranks"
        )
    if launched:
        raise UsageError("--chaos starts its ranks by itself; run it once, without mpiexec or torchrun")
    if sys.platform != "linux":
        raise UsageError("--chaos looks at processes as Linux shows them; run it there")
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    settings = Settings(
        plan=plan,
        backend=options.backend,
        seconds=options.chaos,
        seed=seed,
        timeout=options.timeout,
        largest=max(options.sizes),
        chunk=options.chunk,
    )
    with progress_line(f"chaos, seed {seed}"):
        outcome = chaos(
            settings, tell=lambda text: print(f"topoplan bench: {text}", file=sys.stderr, flush=True)
        )
    faults = {kind: tally for kind, tally in sorted(outcome.tallies.items()) if kind != END}
    lines = [Line.of(kind, [tally]) for kind, tally in faults.items()]
    lines += [Line.of("all", [*faults.values()]), Line.of(END, [outcome.tallies.get(END, Tally())])]
    _report(options, settings, outcome, lines)
    return 1 if outcome.bad else 0


def _report(options: argparse.Namespace, settings: Settings, outcome: Outcome, lines: list[Line]) -> None:
    """Print what became of the ranks."""
    from collectives.chaos.work import PROBE_BYTES

    if options.csv:
        if options.seed is None:
            print(f"topoplan bench: seed {settings.seed}", file=sys.stderr)
        print_csv([line.to_object() for line in lines])
        return
    before, after, model = (
        (statistics.median(column) for column in zip(*outcome.rates, strict=True))
        if outcome.rates
        else (None, None, None)
    )
    if options.json:
        print_json(
            {
                "collective": settings.plan.collective,
                "machine": settings.plan.topology.name,
                "ranks": list(settings.plan.ranks),
                "backend": settings.backend,
                "seconds": settings.seconds,
                "seed": settings.seed,
                "timeout": settings.timeout,
                "rows": [line.to_object() for line in lines],
                "jobs": outcome.jobs,
                "collectives": outcome.collectives,
                "bytes": outcome.nbytes,
                "algbw": {"before": before, "after": after, "of_plans": model, "faults": len(outcome.rates)},
                "problems": outcome.problems,
                "notes": plan_notes(settings.plan),
            }
        )
        return
    print(
        f"# chaos: {counted(settings.ranks, 'rank')}, {settings.backend}, {settings.seconds:g} s, "
        f"timeout {settings.timeout:g} s, seed {settings.seed}"
    )
    cells = [
        [
            "-" if value is None else f"{value:.0f}" if isinstance(value, float) else str(value)
            for value in row
        ]
        for row in ([*line.to_object().values()] for line in lines)
    ]
    print(table([field.name.replace("_", " ") for field in fields(Line)], cells))
    print(
        f"{counted(outcome.collectives, 'result')} of {counted(outcome.jobs, 'job')} checked, "
        f"{format_size(outcome.nbytes)} of input"
    )
    if before is not None and after is not None and model is not None:
        size = format_size(min(settings.largest, PROBE_BYTES))
        print(
            f"{settings.plan.collective} of {size}: {before:.3g} GB/s before ranks are lost, {after:.3g} behind, "
            f"{after / before:.2f} of it; by the plans {model:.2f} (medians of {len(outcome.rates)})"
        )
    print_notes(*plan_notes(settings.plan))

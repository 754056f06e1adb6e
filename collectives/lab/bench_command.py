"""Run a plan on real arrays for ``topoplan bench``, check every element, and time it in the columns of nccl-tests.

Back ends with one process for each rank: the command starts itself once for each rank, unless mpiexec or torchrun has
started it; rank 0 prints. ``--chaos`` injects faults into ranks at random (`collectives.lab.chaos_run`) and prints the
results of each kind of fault.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collectives.backends.tcp.chunk_order import FLIGHT_BYTES, Footprint, footprint
from topoplan.cli import arguments
from topoplan.cli.output import (
    MPI_RANK_VARIABLES,
    Answer,
    check_target,
    plan_notes,
    progress_line,
    table,
    write_whole,
)
from topoplan.cli.sources import read_plan
from topoplan.errors import InfeasibleError, UsageError
from topoplan.plans.plan import ALL_TO_ALL, Plan, Plans, collective_name
from topoplan.private_files import job_directory
from topoplan.units import counted, format_size, labelled

if TYPE_CHECKING:
    from collectives.backends.backend import Backend
    from collectives.communicator.communicator import Communicator
    from collectives.lab.benchmark import BenchmarkRow
    from collectives.lab.chaos_run import ChaosOutcome, ChaosSettings, FaultTally

FEWEST_RANKS = 3
"""Ranks: one fails, and two survive."""

MAX_SECONDS = 1e7
"""Seconds, some months."""

REFUSED_WITH_CHAOS = {
    "baselines": False,
    "paced": False,
    "trace": None,
    "chunk_file": None,
    "inexact": False,
    "engine": "auto",
    "dtype": "float32",
}
"""Options without a meaning for ``--chaos``, and their values when they are not given."""

COUNT_COLUMNS = ("faults", "repeated", "refused", "wrong", "lost", "hangs", "left_over")
"""Fields of tallies that are summed."""


@dataclass(frozen=True, slots=True)
class FaultRow:
    """A printed row of a kind of fault: times in milliseconds, None if there were none."""

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
    def of(cls, fault: str, tallies: list[FaultTally]) -> FaultRow:
        """Sum some tallies."""
        times = sorted(seconds for tally in tallies for seconds in tally.seconds)
        return cls(
            fault=fault,
            median_ms=statistics.median(times) * 1e3 if times else None,
            p99_ms=times[-1 - len(times) // 100] * 1e3 if times else None,
            **{name: sum(getattr(tally, name) for tally in tallies) for name in COUNT_COLUMNS},
        )


def add_chaos(parser: arguments.OneLineParser) -> None:
    """Add ``--chaos`` and ``--seed``."""
    arguments.declare(
        parser.topic("bench"),
        """
        --chaos SECONDS  kill, stop and slow random ranks for this time, and check every element of the survivors'
                         results, of all collectives and of sizes up to the largest of --sizes (shared, tcp, mpi)
        --seed N         with --chaos: seed of the faults and their order (default: a new one, which is printed)
        """,
        chaos=arguments.number(arguments.TINY, MAX_SECONDS, "number of seconds above zero, such as 60"),
        seed=arguments.whole_number(0, 2**63 - 1, "seed such as 1"),
    )


def run_chaos(options: argparse.Namespace, plan: Plans, *, launched: bool) -> Answer:
    """Inject faults into the ranks of a plan; exit status 1 if anything is wrong.

    ``launched`` says that this process is one of several that a launcher has started.
    """
    from collectives.backends.open_backend import machine_helpers
    from collectives.lab.chaos_run import BACKENDS, JOB_END, ChaosSettings, FaultTally, run_chaos_jobs

    arguments.refuse_beside(options, "--chaos", REFUSED_WITH_CHAOS)
    if options.backend not in BACKENDS:
        raise UsageError(
            f"--chaos needs a back end with a process for each rank and recovery; "
            f"{options.backend} is not one, use --backend {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}"
        )
    if len(plan.ranks) < FEWEST_RANKS:
        raise UsageError(
            f"--chaos kills ranks until two survive, and the plan has {counted(len(plan.ranks), 'rank')}; "
            f"plan for {FEWEST_RANKS} GPUs or more"
        )
    if machine_helpers(plan):
        raise UsageError(
            "a plan with helper ranks cannot recover from the loss of a rank; leave the helpers out of the machine"
        )
    if launched:
        raise UsageError("--chaos starts its ranks by itself; run it once, without mpiexec or torchrun")
    if sys.platform != "linux":
        raise UsageError("--chaos reads the state of processes from Linux; run it there")
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    settings = ChaosSettings(
        plan=plan,
        backend=options.backend,
        seconds=options.chaos,
        seed=seed,
        timeout=options.timeout,
        largest=max(options.sizes),
        chunk=options.chunk,
    )
    with progress_line(f"chaos, seed {seed}"):
        outcome = run_chaos_jobs(
            settings, tell=lambda text: print(f"topoplan bench: {text}", file=sys.stderr, flush=True)
        )
    faults = {kind: tally for kind, tally in sorted(outcome.tallies.items()) if kind != JOB_END}
    lines = [FaultRow.of(kind, [tally]) for kind, tally in faults.items()]
    lines += [
        FaultRow.of("all", [*faults.values()]),
        FaultRow.of(JOB_END, [outcome.tallies.get(JOB_END, FaultTally())]),
    ]
    if options.csv and options.seed is None:
        print(f"topoplan bench: seed {settings.seed}", file=sys.stderr)
    return _chaos_answer(settings, outcome, lines)


def _chaos_answer(settings: ChaosSettings, outcome: ChaosOutcome, lines: list[FaultRow]) -> Answer:
    from collectives.lab.chaos_draws import PROBE_BYTES

    plan = settings.plan
    rows = [asdict(line) for line in lines]
    before, after, model = (
        (statistics.median(column) for column in zip(*outcome.rates, strict=True))
        if outcome.rates
        else (None, None, None)
    )

    def cell(value: object) -> str:
        return "-" if value is None else f"{value:.0f}" if isinstance(value, float) else str(value)

    def text() -> Iterator[str]:
        yield (
            f"# chaos: {counted(settings.ranks, 'rank')}, {settings.backend}, {settings.seconds:g} s, "
            f"timeout {settings.timeout:g} s, seed {settings.seed}"
        )
        heads = [field.name.replace("_", " ") for field in fields(FaultRow)]
        yield table(heads, [[*map(cell, row.values())] for row in rows])
        yield (
            f"{counted(outcome.collectives, 'result')} of {counted(outcome.jobs, 'job')} checked, "
            f"{format_size(outcome.nbytes)} of input"
        )
        if before is not None and after is not None and model is not None:
            size = format_size(min(settings.largest, PROBE_BYTES))
            yield (
                f"{collective_name(plan.collective)} of {size}: {before:.3g} GB/s before ranks are lost, "
                f"{after:.3g} after, {after / before:.2f} of it; by the plans {model:.2f} "
                f"(medians of {len(outcome.rates)})"
            )

    return Answer(
        text=text,
        value=lambda: {
            "collective": plan.collective,
            "machine": plan.topology.name,
            "ranks": list(plan.ranks),
            "backend": settings.backend,
            "seconds": settings.seconds,
            "seed": settings.seed,
            "timeout": settings.timeout,
            "rows": rows,
            "jobs": outcome.jobs,
            "collectives": outcome.collectives,
            "bytes": outcome.nbytes,
            "algbw": {"before": before, "after": after, "of_plans": model, "faults": len(outcome.rates)},
            "problems": outcome.problems,
            "notes": plan_notes(plan),
        },
        rows=lambda: rows,
        notes=plan_notes(plan),
        status=1 if outcome.bad else 0,
    )


LINE = "run a plan on real arrays, checked and timed"
"""Line in ``topoplan --help``."""

IN_ONE_PROCESS = ("loopback", "loopback-gpu")
"""Back ends that run all ranks in one process."""

ARRAYS = 5
"""Arrays of full size for each rank: input, result, workspace of the back end, and two for the check."""

TIMEOUT, CHAOS_TIMEOUT = 30.0, 2.0
"""Default seconds."""

SCALE = 1e-3
"""Default scale of paced links."""

COLUMN_HEADS = (
    ("size", "count", "type", "redop", "time", "algbw", "busbw", "wrong"),
    ("(B)", "(elements)", "", "", "(us)", "(GB/s)", "(GB/s)", ""),
)


def add_options(parser: arguments.OneLineParser) -> None:
    arguments.add_plan_file(parser)
    arguments.declare(
        parser,
        """
        --backend B  loopback: all ranks in this process (default), loopback-gpu: on one GPU; tcp, shared, mpi, torch,
                     nccl: a process for each rank, started here unless mpiexec or torchrun did
        --np N       number of processes to start (default: the plan's ranks)
        """,
        backend={"default": "loopback"},
        np=arguments.whole_number(1, 99999, "number of processes such as 4"),
    )
    arguments.add_sizes(parser, "64KB:16MB")
    arguments.declare(
        parser,
        f"""
        --dtype T      element type, such as float16, int8 or bool (default: float32)
        --baselines    time a ring too (or direct sends of an all_to_all), and the back end's own all_reduce
        --paced        run every link at its bandwidth times --scale, and print the model's times (loopback, tcp)
        --trace F.json  write the calls of each rank at the largest size as a Chrome trace
        --timeout S    seconds that a rank waits for a step (default: {TIMEOUT:g}, with --chaos {CHAOS_TIMEOUT:g})
        """,
        dtype={"default": "float32"},
        baselines={"action": "store_true", "old": "--rivals"},
        timeout=arguments.seconds,
    )
    arguments.declare(
        parser.topic("bench"),
        """
        --engine {auto,windows,messages}  with nccl, and torch on GPUs: windows, one kernel for each collective that
                             writes to the other GPUs' memory; messages, NCCL's sends and receives (default: windows if
                             all ranks have them)
        --inexact            with windows: let switches add (NVLink SHARP), in an order of their own
        --scale F            with --paced, rate of every link over its bandwidth (default: 1e-3)
        --chunk S            longest chunk (default: that of the back end, or the fastest found)
        --chunk-file F.json  file in which chunk sizes that were found are looked up and stored
        """,
        engine={"default": "auto"},
        scale=arguments.positive_factor,
        chunk=arguments.size,
    )
    add_chaos(parser)
    arguments.add_json(parser)
    arguments.add_csv(parser, "the table")
    parser.examples = (
        "topoplan bench plan.json",
        "topoplan bench plan.json --backend tcp --sizes 1MB,16MB --baselines",
        "topoplan bench plan.json --backend shared --chaos 60",
    )


def run(options: argparse.Namespace) -> Answer | int:
    """Run a plan on real arrays; exit status 1 if any element of a result is wrong or a process failed."""
    from collectives.backends.open_backend import BackendSettings, check_backend
    from collectives.communicator.launch import end_with_parent
    from collectives.lab.benchmark import check_dtype, check_memory

    if options.timeout is None:
        options.timeout = TIMEOUT if options.chaos is None else CHAOS_TIMEOUT
    arguments.refuse_without(options, {"seed": "--chaos", "scale": "--paced"})
    check_target(options.trace, "--trace")
    check_backend(options.backend, BackendSettings(options.timeout, _pace_scale(options), options.engine))
    plan = read_plan(options.plan)
    check_dtype(options.dtype, options.backend, plan.collective)
    check_memory(max(options.sizes), len(plan.ranks), arrays=ARRAYS)
    if options.np is not None and options.np != len(plan.ranks):
        raise UsageError(
            f"the plan is for {counted(len(plan.ranks), 'rank')}, not for {options.np}; "
            f"use --np {len(plan.ranks)}, or plan for other GPUs"
        )
    if options.chaos is not None:
        return run_chaos(options, plan, launched=started_as_rank(options.backend))
    if options.backend in IN_ONE_PROCESS or started_as_rank(options.backend):
        if options.backend == "mpi":
            end_with_parent()
        return _run_here(options, plan)
    return start_processes(options, plan)


def _run_here(options: argparse.Namespace, plan: Plans) -> Answer | int:
    """Run the ranks of this process; the process of rank 0 prints."""
    from collectives import Communicator
    from collectives.backends.open_backend import BackendSettings, open_backend
    from collectives.lab.benchmark import measure, predicted

    pace = _pace_scale(options)
    backend = open_backend(
        options.backend, plan, BackendSettings(options.timeout, pace, options.engine, not options.inexact)
    )
    chunks = {"chunk_bytes": options.chunk, "chunk_file": options.chunk_file}
    notes = plan_notes(plan)
    rows: list[BenchmarkRow] = []
    with (
        closing(backend),
        Communicator(plan, backend, **chunks) as communicator,
        progress_line("running") as progress,
    ):
        if communicator.is_helper:
            communicator.serve()
            return 0
        rivals: list[tuple[str, Communicator]] = []
        own = None
        if options.baselines:
            rival = rival_ring(plan, backend, notes)
            rivals = [] if rival is None else [(rival_name(plan), Communicator(rival, backend, **chunks))]
            own = (
                library_all_reduce(options.backend, options.dtype) if plan.collective == "allreduce" else None
            )
        for nbytes in options.sizes:
            if progress and 0 in communicator.ranks:
                progress(f"{format_size(nbytes)} …")
            for schedule, one in [("plan", communicator), *rivals]:
                row = measure(one, nbytes=nbytes, dtype=options.dtype, schedule=schedule)
                rows.append(row if pace is None else predicted(row, one.plan, pace))
            if own is not None:
                rows.append(
                    measure(communicator, nbytes=nbytes, dtype=options.dtype, schedule=own.name, own=own.run)
                )
        if options.trace:
            _write_trace(options, communicator)
    status = 1 if any(row.wrong for row in rows) else 0
    return _answer(options, plan, rows, notes, communicator.engine) if 0 in backend.ranks else status


def _write_trace(options: argparse.Namespace, communicator: Communicator) -> None:
    """Run calls of the largest size once more, and write their trace from rank 0."""
    from collectives.lab.benchmark import chrome_trace, timeline
    from topoplan.model.event_simulation import run_events

    nbytes, pace, plan = max(options.sizes), _pace_scale(options), communicator.plan
    spans = timeline(communicator, nbytes=nbytes, dtype=options.dtype)
    if 0 in communicator.ranks:
        model = None if pace is None else run_events(plan.at(nbytes), nbytes=round(nbytes / pace))
        what = f"{collective_name(plan.collective)} of {format_size(nbytes)}, {options.backend}"
        write_whole(options.trace, chrome_trace(spans, what, model))


def _pace_scale(options: argparse.Namespace) -> float | None:
    return (options.scale or SCALE) if options.paced else None


def rival_ring(plan: Plans, backend: Backend[Any], notes: list[str]) -> Plans | None:
    """Return the ring on the same GPUs (of an all-to-all direct sends), planned by one rank for all; None and a note
    without.
    """
    import topoplan
    from collectives.peers.agreement import plan_on_one_rank

    def make() -> Plan:
        if plan.collective == ALL_TO_ALL:
            return topoplan.one_hop_plan(plan.topology, plan.collective)
        return topoplan.ring_plan(plan.topology, plan.collective, root=plan.root)

    try:
        if backend.one_rank:
            return plan_on_one_rank(backend.gather_texts, make, rank=backend.ranks[0])
        return make()
    except InfeasibleError as error:
        # On other ranks the error's cause is that of rank 0, which prints the note.
        notes.append(f"no {rival_name(plan)}: {error.__cause__ or error}")
        return None


def rival_name(plan: Plans) -> str:
    """Return the name of the schedule of `rival_ring`."""
    return "one-hop" if plan.collective == ALL_TO_ALL else "ring"


def _answer(
    options: argparse.Namespace, plan: Plans, rows: list[BenchmarkRow], notes: list[str], engine: str
) -> Answer:
    from collectives.lab.benchmark import REPEATS

    def text() -> Iterator[str]:
        how = f" ({engine})" if engine else ""
        for schedule in dict.fromkeys(row.schedule for row in rows):
            what = f"{options.backend}{how}{'' if schedule == 'plan' else f', {schedule}'}"
            ranks = counted(len(plan.ranks), "rank")
            yield f"# {collective_name(plan.collective)} of {ranks}, {what}, median of {REPEATS}"
            yield _format_table([row for row in rows if row.schedule == schedule])

    return Answer(
        text=text,
        value=lambda: {
            "collective": plan.collective,
            "machine": plan.topology.name,
            "ranks": list(plan.ranks),
            "backend": options.backend,
            **({"engine": engine} if engine else {}),
            "rows": [row.to_object() for row in rows],
            "notes": notes,
        },
        rows=lambda: [row.to_object() for row in rows],
        notes=notes,
        written=(options.trace,),
        status=1 if any(row.wrong for row in rows) else 0,
    )


def _format_table(rows: list[BenchmarkRow]) -> str:
    lines = [
        "# {:>12}  {:>12}  {:>8}  {:>6}  {:>11}  {:>7}  {:>7}  {:>6}".format(*head) for head in COLUMN_HEADS
    ]
    lines += [
        f"  {row.size:>12}  {row.count:>12}  {row.type:>8}  {row.redop:>6}  {row.seconds * 1e6:>11.1f}  "
        f"{row.algbw:>7.2f}  {row.busbw:>7.2f}  {row.wrong:>6}"
        for row in rows
    ]
    if any(row.predicted is not None for row in rows):
        model = [f"  {'model':>11}  {'ratio':>6}", f"  {'(us)':>11}  {'':>6}"]
        model += [
            ""
            if row.predicted is None
            else f"  {row.predicted * 1e6:>11.1f}  {row.predicted / row.seconds:>6.3f}"
            for row in rows
        ]
        lines = [line + more for line, more in zip(lines, model, strict=True)]
    return "\n".join(lines)


def started_as_rank(backend: str) -> bool:
    """Return whether a launcher, mpiexec or torchrun, started this process as one rank of several."""
    return any(name in os.environ for name in (MPI_RANK_VARIABLES if backend == "mpi" else ("RANK",)))


def start_processes(options: argparse.Namespace, plan: Plans) -> int:
    """Run the same command once for each rank and return the worst exit status."""
    from collectives.backends.open_backend import machine_helpers
    from collectives.communicator.launch import start_ranks

    with job_directory("bench") as folder:
        path = folder / "plan.json"
        path.write_text(plan.to_json())
        command = [
            *(sys.executable, "-m", "topoplan", "bench", str(path)),
            *("--backend", options.backend, "--dtype", options.dtype),
            *("--sizes", ",".join(str(size) for size in options.sizes)),
            *("--timeout", str(options.timeout)),
            *(("--chunk", str(options.chunk)) if options.chunk else ()),
            *(("--chunk-file", str(Path(options.chunk_file).absolute())) if options.chunk_file else ()),
            *(("--trace", str(Path(options.trace).absolute())) if options.trace else ()),
            *(("--paced",) if options.paced else ()),
            *(("--scale", str(options.scale)) if options.scale else ()),
            *(("--baselines",) if options.baselines else ()),
            *(("--json",) if options.json else ()),
        ]
        helpers = machine_helpers(plan) if options.backend == "tcp" else 0
        return start_ranks(options.backend, command, len(plan.ranks) + helpers, grace=options.timeout + 5)


@dataclass(frozen=True, slots=True)
class LibraryAllReduce:
    """An allreduce of another library; ``run``, of input and result, sums the inputs of all processes."""

    name: str
    run: Callable[[Any, Any], None]


def library_all_reduce(backend: str, dtype: str) -> LibraryAllReduce | None:
    """Return the allreduce of the library behind a back end; None without one, as for loopback and tcp.

    MPI has none for bfloat16.
    """
    if backend == "mpi" and dtype != "bfloat16":
        from mpi4py import MPI

        library = MPI.Get_library_version().split(",")[0].splitlines()[0]
        name = "MPICH" if library.startswith("MPICH") else library
        return LibraryAllReduce(
            f"{name} MPI_Allreduce", lambda given, out: MPI.COMM_WORLD.Allreduce(given, out)
        )
    if backend == "torch":
        import torch.distributed as dist

        def run(given: Any, out: Any) -> None:
            out.copy_(given)
            dist.all_reduce(out)

        return LibraryAllReduce(f"{dist.get_backend()} all_reduce", run)
    return None


CHUNK_BYTES = 256 << 10
"""Bytes of a chunk for which memory is stated."""


@dataclass(frozen=True, slots=True)
class RunExplanation:
    """How a plan runs (`topoplan.cli.main.PlanExplanation`)."""

    plan: Plan
    found: Footprint

    def to_object(self) -> dict[str, object]:
        return self.found.to_object()

    def lines(self) -> list[str]:
        found = self.found
        largest, waiting = max(found.scratch), max(found.held)
        rank = self.plan.ranks[found.scratch.index(largest)]
        where, memory = "none beside the buffers", ""
        if largest:
            where = f"beside the buffers at most {counted(largest, 'chunk')} (on {rank})"
            memory = f", {format_size(largest * CHUNK_BYTES)} with chunks of {format_size(CHUNK_BYTES)}"
        tcp = (
            f"up to {format_size(FLIGHT_BYTES)} of each tree edge that waits may be under way, "
            f"{counted(waiting, 'edge')} on one rank"
        )
        return labelled(
            (
                "run",
                f"{counted(found.streams, 'stream')} of chunks in {counted(found.queues, 'queue')} between ranks; "
                f"a chunk takes {counted(found.steps, 'step')}, and the next follows one step behind",
            ),
            ("memory", f"{where}{memory}; fan-in {found.fan_in}, depth {self.plan.depth}"),
            ("with tcp", tcp if waiting else ""),
        )


def explain(plan: Plan) -> RunExplanation:
    """Return how a plan runs; UsageError if it has too many edges to look at each."""
    return RunExplanation(plan, footprint(plan))

"""Allreduces of every executor, of gloo and of MPI libraries, and what memory alone takes: one table.

``python -m tests.bench executors`` starts the ranks of all contenders, which sleep until it is their turn. In a round
each of them runs a few blocks of calls back to back, in another order in every round, so that all meet the same
machine; a block counts its slowest rank. Rivals beside a time say how many times faster it is, by the median of the
rounds. The processors can be given neighbours (``--busy``: processes that only count), and the same back ends of
another checkout can run between (``--against``).

Open MPI and MPICH both bring an ``mpiexec``, so each needs an environment of its own; ``--mpi`` names the Python of
another one: ``python -m venv build/mpich && build/mpich/bin/pip install mpich mpi4py numpy``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from collectives.communicator.launch import OPEN_MPI
from tests.support.checkout import ROOT
from topoplan.cli.arguments import OneLineParser, add_json, size_list, whole_number
from topoplan.cli.output import progress_line
from topoplan.machine.topology import physical_memory
from topoplan.units import format_size

SIZES = "8,4KB,64KB,1MB,16MB,64MB"
BACKENDS = ("shared", "mpi", "tcp", "torch", "loopback")
MAKES_ARRAYS = ("shared", "mpi", "torch")  # back ends whose communicators make arrays in shared memory
BLOCKS = 2  # blocks of calls in a turn

BLOCK = 0.05
"""Seconds of a block, unless one call takes longer: many time slices, where neighbours have theirs."""

CALLS = 10_000  # calls of a block at most
LIMIT = 180.0  # seconds for a turn, or to open a contender, after which it is given up

RANK = Path(__file__).with_name("executor_rank.py")

START = (
    "import sys; from collectives.communicator.launch import start_ranks; "
    "sys.exit(start_ranks(sys.argv[1], sys.argv[3:], int(sys.argv[2])))"
)

COUNTING = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(100_000): pass
"""


@dataclass(frozen=True, slots=True)
class Contender:
    name: str  # in the table
    # ``kind`` of `tests.bench.executor_rank`, and its settings but for the number of ranks
    about: Mapping[str, Any]
    # the back end whose processes are started, or ``mpiexec`` for that beside ``python``
    launcher: str = "torch"
    checkout: Path = ROOT  # where topoplan and collectives come from
    python: str = sys.executable
    rival: bool = False  # whether times are compared with it


class Failed(Exception):
    """A contender cannot go on; says why."""


class Job:
    """The processes of one contender.

    Parameters
    ----------
    contender : Contender
    ranks : int

    Attributes
    ----------
    label : str
        What its rank 0 calls it.

    Raises
    ------
    Failed
        It does not start.
    """

    def __init__(self, contender: Contender, ranks: int) -> None:
        self.contender = contender
        self.label = contender.name
        one_process = contender.about.get("backend") == "loopback"
        processes = 1 if one_process else ranks
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name, "log")
        self._lines: list[Any] = []
        self._launcher: subprocess.Popen[bytes] | None = None
        about = {**contender.about, **({} if contender.about["kind"] == "memcpy" else {"ranks": ranks})}
        try:
            with socket.socket(socket.AF_UNIX) as listener, self._log.open("wb") as log:
                address = str(Path(self._folder.name, "socket"))
                listener.bind(address)
                listener.listen(processes)
                program = [contender.python, "-P", str(RANK), address, json.dumps(about)]
                self._launcher = subprocess.Popen(
                    _launch(contender, processes, program),
                    env=_environment(contender),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                while len(self._lines) < processes:
                    self._accept(listener)
            told = [self._hear(lines) for lines in self._lines]
            self.label = next(one["label"] for one in told if one["rank"] == 0)
            if contender.about["kind"] == "mpi":
                self.contender = replace(contender, name=self.label)
        except BaseException:
            self.close()
            raise

    def _accept(self, listener: socket.socket) -> None:
        """Take in one rank, unless the launcher ends first."""
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            for _ in range(int(LIMIT)):
                if selector.select(1.0):
                    connection, _ = listener.accept()
                    connection.settimeout(LIMIT)
                    self._lines.append(connection.makefile("rw", encoding="utf-8"))
                    connection.close()  # the file keeps it open
                    return
                if self._launcher is not None and self._launcher.poll() is not None:
                    break
        raise Failed(self._why())

    def turn(self, nbytes: int, *, calls: int, blocks: int) -> list[float]:
        """Seconds of each block on its slowest rank.

        Raises
        ------
        Failed
            A rank ended, or says nothing.
        """
        with contextlib.suppress(OSError):  # what became of a rank shows when it is heard
            for lines in self._lines:
                print(
                    json.dumps({"nbytes": nbytes, "calls": calls, "blocks": blocks}), file=lines, flush=True
                )
        return [max(block) for block in zip(*map(self._hear, self._lines), strict=True)]

    def calls_of_a_block(self, nbytes: int) -> int:
        calls = 1
        while calls < CALLS:
            took = min(self.turn(nbytes, calls=calls, blocks=2))
            if 2 * took > BLOCK:
                break
            calls = min(CALLS, 10 * calls, int(calls * BLOCK / took))
        return calls

    def close(self) -> None:
        for lines in self._lines:
            with contextlib.suppress(OSError):
                lines.close()
        if self._launcher is not None:
            for end in (lambda: None, self._launcher.terminate, self._launcher.kill):
                end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._launcher.wait(10)
                    break
        self._folder.cleanup()

    def _hear(self, lines: Any) -> Any:
        try:
            line = lines.readline()
        except TimeoutError as error:
            raise Failed(f"said nothing for {LIMIT:g} s") from error
        except OSError:
            line = ""
        if not line:
            raise Failed(self._why())
        return json.loads(line)

    def _why(self) -> str:
        """The last line that its processes have printed."""
        if self._launcher is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.wait(10)
        printed = self._log.read_text(errors="replace").strip().splitlines()
        return printed[-1] if printed else "its processes ended without a word"


def _launch(contender: Contender, processes: int, program: list[str]) -> list[str]:
    if contender.launcher != "mpiexec":
        return [contender.python, "-P", "-c", START, contender.launcher, str(processes), *program]
    launcher = str(Path(contender.python).with_name("mpiexec"))
    told = subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=30, check=True)
    options = OPEN_MPI if "Open MPI" in told.stdout or "OpenRTE" in told.stdout else ()
    return [launcher, *options, "-n", str(processes), *program]


def _environment(contender: Contender) -> dict[str, str]:
    """One thread for each rank, and the checkout before what is installed."""
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(contender.checkout)}
    return {**os.environ, **settings}


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes that only count; they end with the block, and with this process however it ends."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            started.append(subprocess.Popen([sys.executable, "-S", "-c", COUNTING]))
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


@dataclass(slots=True)
class Cell:
    """A contender at one number of ranks, of neighbours, and size; seconds of a call for every block of every round."""

    contender: Contender
    label: str
    ranks: int
    busy: int
    nbytes: int
    calls: int
    rounds: list[list[float]] = field(default_factory=list)

    def to_object(self) -> dict[str, Any]:
        return {
            "contender": self.contender.name,
            "library": self.label,
            "ranks": self.ranks,
            "busy": self.busy,
            "size": self.nbytes,
            "calls": self.calls,
            "seconds": self.rounds,
        }


def main(words: Sequence[str] = ()) -> None:
    parser = options_of("executors", sizes=SIZES, ranks="2,4,8")
    parser.add_argument(
        "--arrays",
        choices=("own", "shared", "both"),
        default="own",
        help="of the caller's own memory (default), from Communicator.empty, or one row for each",
    )
    parser.add_argument(
        "--in-place", action="store_true", help="results where the inputs are, as gloo's always"
    )
    parser.add_argument(
        "--mpi",
        action="append",
        default=[],
        metavar="PYTHON",
        help="of an environment with another MPI (repeatable)",
    )
    options = parser.parse_args(list(words))
    measure(options, contenders(options), "allreduce of float32")


def options_of(name: str, *, sizes: str, ranks: str) -> OneLineParser:
    parser = OneLineParser(prog=f"python -m tests.bench {name}")
    parser.add_argument(
        "--sizes", type=size_list, default=sizes, metavar="S", help=f"bytes (default: {sizes})"
    )
    parser.add_argument(
        "--ranks",
        type=partial(_numbers, least=2, most=8),
        default=ranks,
        metavar="N",
        help=f"(default: {ranks})",
    )
    parser.add_argument(
        "--busy", type=_numbers, default="0", metavar="N", help="busy neighbours (default: 0)"
    )
    parser.add_argument("--rounds", type=whole_number(1, 1000, "number of rounds"), default=6, metavar="N")
    parser.add_argument(
        "--only", metavar="NAMES", help="contenders, those whose names begin so: shared,gloo,MPI"
    )
    parser.add_argument(
        "--against", metavar="PATH", type=Path, help="another checkout, timed in the same rounds"
    )
    add_json(parser)
    return parser


def _numbers(text: str, *, least: int = 0, most: int = 99) -> tuple[int, ...]:
    return tuple(map(whole_number(least, most, f"number from {least} to {most}"), text.split(",")))


def contenders(options: argparse.Namespace) -> list[Contender]:
    """Every back end that can run here, in this and the other checkout, and their rivals."""
    found = []
    for backend in BACKENDS:
        if find_spec({"mpi": "mpi4py"}.get(backend, "torch" if backend == "torch" else "numpy")) is None:
            continue
        launcher = "tcp" if backend == "loopback" else backend
        about = {"kind": "planned", "backend": backend, "in_place": options.in_place, "shared_arrays": False}
        if options.arrays != "shared" or backend not in MAKES_ARRAYS:
            found.append(Contender(backend, about, launcher))
            if options.against is not None:
                found.append(before(found[-1], options.against))
            found.append(Contender(f"{backend}, prepared", {**about, "is_prepared": True}, launcher))
        if options.arrays != "own" and backend in MAKES_ARRAYS:
            shared = {**about, "shared_arrays": True, "is_prepared": True}
            found.append(Contender(f"{backend}, empty()", {**about, "shared_arrays": True}, launcher))
            found.append(Contender(f"{backend}, empty(), prep.", shared, launcher))
    if find_spec("torch") is not None:
        found.append(Contender("gloo", {"kind": "gloo"}, rival=True))
    built = ROOT / "build" / "mpich" / "bin" / "python"
    others = options.mpi or ([str(built)] if built.exists() else [])
    about = {"kind": "mpi", "in_place": options.in_place}
    for number, python in enumerate([sys.executable, *others]):
        if number or find_spec("mpi4py") is not None:
            name = f"MPI_Allreduce {number + 1}"  # until the library has told its name
            found.append(Contender(name, about, "mpiexec", python=str(Path(python).absolute()), rival=True))
    found.append(Contender("memcpy", {"kind": "memcpy"}, "tcp", rival=True))
    return found


def before(contender: Contender, checkout: Path) -> Contender:
    return replace(contender, name=f"{contender.name}, before", checkout=checkout.absolute())


def measure(options: argparse.Namespace, listed: Sequence[Contender], what: str) -> None:
    """Time contenders, and print a table for each number of ranks and neighbours."""
    if options.only:
        names = tuple(options.only.split(","))
        listed = [one for one in listed if one.name.startswith(names)]
    cells: list[Cell] = []
    for ranks in options.ranks:
        with ExitStack() as stack, progress_line("starting") as progress:
            jobs = []
            for contender in listed:
                if progress:
                    progress(f"{ranks} ranks: starting {contender.name}")
                try:
                    jobs.append(Job(contender, ranks))
                    stack.callback(jobs[-1].close)
                except Failed as error:
                    print(f"# {contender.name}, {ranks} ranks: not measured: {error}", file=sys.stderr)
            for busy in options.busy:
                if not options.json:
                    _print_head(what, ranks, busy, options.rounds, jobs)
                with neighbours(busy):
                    for nbytes in options.sizes:
                        if _fits(nbytes, ranks, len(jobs)):
                            found = _measured(jobs, ranks, busy, nbytes, options.rounds)
                            cells += found
                            if not options.json:
                                _print_cells(found)
    if options.json:
        print(json.dumps([cell.to_object() for cell in cells], indent=1))


def _fits(nbytes: int, ranks: int, jobs: int) -> bool:
    """Whether memory holds the arrays of one job, and what all keep."""
    needed = nbytes * ranks * (jobs + 3)
    if needed > 0.8 * physical_memory():
        print(
            f"# {format_size(nbytes)} on {ranks} ranks: not measured: {jobs} contenders need {format_size(needed)} of "
            "memory; name fewer with --only",
            file=sys.stderr,
        )
        return False
    return True


def _measured(jobs: list[Job], ranks: int, busy: int, nbytes: int, rounds: int) -> list[Cell]:
    """One cell for each job; a job that fails is closed, and is not there any more."""
    cells: dict[Job, Cell] = {}
    for number in range(rounds):
        for job in random.Random(number).sample(jobs, len(jobs)):
            try:
                if job not in cells:
                    calls = job.calls_of_a_block(nbytes)
                    cells[job] = Cell(job.contender, job.label, ranks, busy, nbytes, calls)
                calls = cells[job].calls
                took = job.turn(nbytes, calls=calls, blocks=BLOCKS)
            except Failed as error:
                print(f"# {job.contender.name}, {format_size(nbytes)}: failed: {error}", file=sys.stderr)
                cells.pop(job, None)
                jobs.remove(job)
                job.close()
                continue
            cells[job].rounds.append([seconds / calls for seconds in took])
    return [cells[job] for job in jobs]


def _print_head(what: str, ranks: int, busy: int, rounds: int, jobs: Sequence[Job]) -> None:
    print(
        f"# {what}, {ranks} ranks beside {busy} busy; ms of a call, median of {rounds} rounds x {BLOCKS} blocks, and "
        "the middle half of them; how many times faster than rivals"
    )
    rivals = [job.contender.name for job in jobs if job.contender.rival]
    if any(job.contender.name.endswith(", before") for job in jobs):
        rivals.append("before")
    columns = "".join(f"  {name:>22}" for name in rivals)
    print(f"# {'size':>6}  {'':<18}  {'calls':>6}  {'ms':>9}  {'middle half':>19}{columns}", flush=True)


def _print_cells(cells: Sequence[Cell]) -> None:
    named = {cell.contender.name: cell for cell in cells}
    rivals = [cell for cell in cells if cell.contender.rival]
    with_before = any(name.endswith(", before") for name in named)
    for cell in cells:
        times = [seconds * 1e3 for took in cell.rounds for seconds in took]
        low, middle, high = _quartiles(times)
        columns: list[Cell | None] = [None if cell.contender.rival else rival for rival in rivals]
        if with_before:
            columns.append(named.get(f"{cell.contender.name}, before"))
        ratios = "".join(f"  {'' if rival is None else _ratio(cell, rival):>22}" for rival in columns)
        half = f"{low:.4g}-{high:.4g}"
        print(
            f"  {format_size(cell.nbytes):>6}  {cell.contender.name:<18}  {cell.calls:>6}  {middle:>9.4g}  {half:>19}"
            f"{ratios}",
            flush=True,
        )


def _ratio(cell: Cell, rival: Cell) -> str:
    """How many times faster a cell is than a rival in the same round: median and middle half."""
    low, middle, high = _quartiles(
        [
            statistics.median(theirs) / statistics.median(ours)
            for ours, theirs in zip(cell.rounds, rival.rounds, strict=True)
        ]
    )
    return f"{middle:.3g} ({low:.3g}-{high:.3g})"


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The ends and the middle of the middle half."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high

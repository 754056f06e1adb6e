"""One table of what holds on this machine's GPU: ``python -m tests.gpu_report [-o FILE.json] [--rows PATTERN,...]``.

The command needs a checkout and CuPy, NCCL and torch as installed: no network, no pip, no pytest. Every row runs in a
process group of its own under a time limit, so a crash or a hang is that row's failure. A row that cannot run says why,
without a process: the driver is asked here, libraries are looked for by name, and the row ``device`` tells the rest.
The rows take at most 8 minutes together; a row that gets no time is "not run". The file is rewritten after each row,
and the folder beside it keeps for each row all of its output, stacks of Python and NCCL's log. The exit status is the
number of rows that failed, at most 100; a goal that is missed counts.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.support.checkout import ROOT

RESULT = "gpu_report result: "  # how the line begins in which a row's process tells what it has found

FAILED = ("failed", "missed")
VERDICTS = ("ok", *FAILED, "cannot run", "not run")
MOST = 100
SECONDS = 460.0
"""Of all rows together; with the start of the last one and the end of its processes that stays below 8 minutes."""

STACKS_BEFORE = 5.0  # seconds before its limit at which a row prints the stacks of its threads
TAIL = 40  # lines of a failed row's output that the file repeats; all of them are in the row's folder

LIMIT, FOLDER = "GPU_REPORT_SECONDS", "GPU_REPORT_FOLDER"
"""Environment variables of a row's processes: its limit, and the folder of its logs."""

KERNELS = ROOT / "build" / "kernels"
"""Compiled kernels, kept between rows and runs (`collectives.tables.kernels.kernel_launch.CACHE`)."""

ROW_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # ranks that share a GPU wait for each other's kernels
    "TOPOPLAN_KERNEL_CACHE": str(KERNELS),
}
"""Environment variables of every row's processes, where the caller has set none."""

LIBRARIES = (
    "cupy",
    "cuda",
    "nccl",
    "torch",
    "ml_dtypes",
    "numpy",
    "scipy",
    "networkx",
    "numba",
    "pytest",
    "hypothesis",
)


@dataclass(frozen=True, slots=True)
class Facts:
    trouble: str  # why no GPU is usable; empty if one is
    gpus: int = 0
    libraries: frozenset[str] = frozenset()  # that can be found by name
    tools: Mapping[str, str] = field(default_factory=dict)  # programs of CUDA, and where they are
    # what the row ``device`` has found; empty before it has run
    told: Mapping[str, Any] = field(default_factory=dict)


Need = Callable[[Facts], str | None]  # why a row cannot run; None where nothing that is known is in its way


class CannotRun(Exception):
    """Raised by a row that finds out only in its own process that something is missing; the message says what."""


class Missed(Exception):
    """Raised by a row whose results are right and whose figures are below the goal; the message has both."""


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    # returns the text, or raises. A mapping it may return in place of a text has "text", and figures for the
    # file
    run: Callable[[], str | Mapping[str, Any]]
    seconds: float = 60.0  # time limit
    needs: tuple[Need, ...] = ()
    # whether several processes use one GPU at once, so that NVIDIA's multi-process service helps
    shares_gpu: bool = False
    listed: bool = True  # whether it stands in the table; others run only where a row starts them


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    verdict: str  # "ok", "missed" (a goal), "failed", "cannot run", or "not run" (no time was left)
    text: str
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)
    output: str = ""  # the end of what its process has printed, where it failed
    folder: str = ""  # where all of its output, NCCL's log and further files are; empty if it did not run


# ---- what is known before


def look() -> Facts:
    """The facts, from the driver and from names, without loading a library of CUDA's above the driver."""
    trouble, gpus = driver()
    tools = {
        name: path for name in ("compute-sanitizer", "nvidia-cuda-mps-control") if (path := program(name))
    }
    libraries = frozenset(name for name in LIBRARIES if find_spec(name) is not None)
    return Facts(trouble, gpus, libraries, tools)


def driver() -> tuple[str, int]:
    """Why NVIDIA's driver shows no GPU, if so, and how many it shows."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no NVIDIA driver: {error}", 0
    status = cuda.cuInit(0)
    if status:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(status, ctypes.byref(text))
        return f"the driver shows no GPU: error {status}, {(text.value or b'unknown').decode()}", 0
    count = ctypes.c_int()
    status = cuda.cuDeviceGetCount(ctypes.byref(count))
    if status or not count.value:
        return f"the driver shows no GPU (status {status}); look at CUDA_VISIBLE_DEVICES", 0
    return "", count.value


def program(name: str) -> str | None:
    """Where a program of CUDA's is: on the PATH, or in its toolkit."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [f"{home}/{part}" for home in homes if home for part in ("bin", "compute-sanitizer")]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(places))


# ---- a row in a process of its own


COMMAND = (sys.executable, "-m", "tests.gpu_report")


def row_environment(row: Row, seconds: float, folder: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a row's process: the caller's, and what makes a failure explain itself."""
    logs = {
        "NCCL_DEBUG": "INFO" if row.name == "device" else "WARN",
        "NCCL_DEBUG_FILE": str(folder / "nccl.%h.%p.log"),
    }
    environment = {**ROW_ENVIRONMENT, **logs, **os.environ, **extra}
    environment |= {LIMIT: str(seconds), FOLDER: str(folder)}
    places = [str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(place for place in places if place)
    return environment


def run_row(
    row: Row,
    seconds: float,
    extra: Mapping[str, str] | None = None,
    *,
    command: Sequence[str] = COMMAND,
    logs: Path,
) -> Outcome:
    """Run a row in a process group of its own, which has ended when this returns; its output goes into a folder."""
    folder = logs / row.name.replace("/", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = row_environment(row, seconds, folder, extra or {})
    started = time.monotonic()
    with (folder / "output.txt").open("w+b") as printed:
        process = subprocess.Popen(
            [*command, "--row", row.name],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        text = printed.read().decode(errors="replace")
    outcome = judged(row.name, status, text, time.monotonic() - started, seconds)
    return replace(outcome, folder=str(folder))


def judged(name: str, status: int | None, text: str, seconds: float, limit: float) -> Outcome:
    """The outcome of a row whose process has ended with a status, or was killed at its limit (None)."""
    lines = text.splitlines()
    output = "\n".join(line for line in lines[-TAIL:] if not line.startswith(RESULT))
    if status is None:
        return Outcome(name, "failed", f"killed after its {limit:.0f} s", seconds, output=output)
    how = f"signal {-status}, {signal.strsignal(-status)}" if status < 0 else f"exit status {status}"
    told = next((line[len(RESULT) :] for line in reversed(lines) if line.startswith(RESULT)), None)
    try:
        found = None if told is None else json.loads(told)
    except json.JSONDecodeError:
        found = None
    if found is None:
        return Outcome(
            name, "failed", f"its process ended without a result, by {how}", seconds, output=output
        )
    if status:
        words = f"its process ended by {how} behind its result: {found['text']}"
        return Outcome(name, "failed", words, seconds, found["figures"], output)
    kept = output if found["verdict"] in FAILED else ""
    return Outcome(name, found["verdict"], found["text"], seconds, found["figures"], kept)


def print_stacks_before_the_limit(environment: Mapping[str, str] = os.environ) -> None:
    """Make this process print the stacks of its threads shortly before the limit of its row."""
    seconds = float(environment.get(LIMIT, "0"))
    if seconds > STACKS_BEFORE:
        faulthandler.dump_traceback_later(seconds - STACKS_BEFORE)


def be_row(row: Row) -> None:
    """Run a row in this process, and print its result as the last line."""
    print_stacks_before_the_limit()
    verdict, figures = "ok", {}
    try:
        found = row.run()
        text = found if isinstance(found, str) else str(found["text"])
        figures = {} if isinstance(found, str) else {name: found[name] for name in found if name != "text"}
    except CannotRun as error:
        verdict, text = "cannot run", str(error)
    except Missed as error:
        verdict, text = "missed", str(error)
    except Exception as error:
        traceback.print_exc()
        verdict, text = "failed", f"{type(error).__name__}: {' '.join(str(error).split())}"
    finally:
        faulthandler.cancel_dump_traceback_later()
    print(f"\n{RESULT}{json.dumps({'verdict': verdict, 'text': text, 'figures': figures})}", flush=True)


@contextmanager
def shared_gpu(control: str | None) -> Iterator[dict[str, str]]:
    """NVIDIA's multi-process service for as long as this lasts, where it is there; variables that lead to it.

    Each process takes fewer queues than where one process has all ranks: four with 32 are out of memory on an H200.
    """
    queues = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    if control is None:
        yield queues
        return
    with tempfile.TemporaryDirectory(prefix="mps") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for place in places.values():
            os.mkdir(place)
        # the service takes the first GPU that is shown here, and shows it as number 0
        shown = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
        environment = {**os.environ, **queues, **places, "CUDA_VISIBLE_DEVICES": shown.split(",")[0]}
        begun = _quietly([control, "-d"], environment, "")
        try:
            yield {**queues, **places, "CUDA_VISIBLE_DEVICES": "0"} if begun else queues
        finally:
            if begun:
                _quietly([control], environment, "quit\n")


def _quietly(command: Sequence[str], environment: Mapping[str, str], said: str) -> bool:
    """Whether a program ended well within seconds."""
    try:
        done = subprocess.run(
            command, env=environment, input=said.encode(), capture_output=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


# ---- the table


def report(
    rows: Sequence[Row],
    facts: Facts,
    *,
    tell: Callable[[Outcome], None],
    seconds: float = SECONDS,
    run: Callable[[Row, float, Mapping[str, str]], Outcome],
) -> list[Outcome]:
    """Run the rows one after another; what the row ``device`` finds is known to those behind it.

    Parameters
    ----------
    rows : sequence of Row
    facts : Facts
    tell : callable
        Called with each outcome.
    seconds : float
        Of all together.
    run : callable
        Runs a row under a limit in seconds, with further environment variables.
    """
    end = time.monotonic() + seconds
    outcomes = []
    for row in rows:
        reason = next((why for need in row.needs if (why := need(facts))), None)
        left = end - time.monotonic()
        if reason is not None:
            outcome = Outcome(row.name, "cannot run", reason)
        elif left < 1:
            outcome = Outcome(row.name, "not run", f"no time left of {seconds:.0f} s; run it by --rows")
        else:
            shared = (
                shared_gpu(facts.tools.get("nvidia-cuda-mps-control")) if row.shares_gpu else nullcontext({})
            )
            with shared as extra:
                outcome = run(row, min(row.seconds, left), extra)
        if row.name == "device":
            facts = replace(facts, told=outcome.figures)
        outcomes.append(outcome)
        tell(outcome)
    return outcomes


def line(outcome: Outcome, width: int) -> str:
    """An outcome in the table; further lines of its text stand below the first."""
    head = f"{outcome.name:<{width}}  {outcome.verdict:<10}  {outcome.seconds:>5.1f} s  "
    first, *rest = outcome.text.splitlines() or [""]
    if outcome.verdict == "failed" and outcome.folder:
        rest.append(f"see {outcome.folder}")
    return "\n".join([f"{head}{first}".rstrip(), *(f"{'':{len(head)}}{one}" for one in rest)])


def last_line(text: str) -> str:
    """The last line that says something, of what failed processes have printed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing was printed"


def saved(path: Path, facts: Facts, outcomes: Sequence[Outcome]) -> None:
    """Put the file in place as a whole: who reads it sees all of the rows so far."""
    known = {**asdict(facts), "libraries": sorted(facts.libraries)}
    whole = {"facts": known, "failed": failures(outcomes), "rows": [asdict(one) for one in outcomes]}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def failures(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.verdict in FAILED for outcome in outcomes)


def chosen(rows: Sequence[Row], patterns: str) -> list[Row]:
    """The listed rows that a list of patterns names, and ``device``, which the others are decided by."""
    wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    found = [row for row in rows if row.listed and any(fnmatchcase(row.name, pattern) for pattern in wanted)]
    first = [row for row in rows if row.name == "device" and row not in found]
    return [*first, *found] if found else []


def main(
    arguments: Sequence[str] | None = None,
    rows: Sequence[Row] | None = None,
    *,
    command: Sequence[str] = COMMAND,
    seconds: float = SECONDS,
) -> int:
    """The command.

    Parameters
    ----------
    arguments : sequence of str, optional
        By default those of this process.
    rows : sequence of Row, optional
        By default those of `gpu_rows`.
    command : sequence of str
        What starts a process that knows these rows.
    seconds : float
        Of all rows together.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_report", description="What holds on this GPU.")
    parser.add_argument(
        "-o", "--output", type=Path, default=ROOT / "build" / "gpu_report.json", metavar="FILE"
    )
    parser.add_argument("--rows", default="*", metavar="NAME,...", help="names or patterns, as nccl*")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if rows is None:
        from tests.support.gpu_rows import ROWS as rows
    if asked.row is not None:
        be_row(next(row for row in rows if row.name == asked.row))
        return 0
    wanted = chosen(rows, asked.rows)
    if asked.list:
        print("\n".join(row.name for row in rows if row.listed))
        return 0
    if not wanted:
        parser.error(f"no row is called {asked.rows!r}; --list prints the names")
    facts = look()
    outcomes: list[Outcome] = []
    width = max(len(row.name) for row in wanted)

    def tell(outcome: Outcome) -> None:
        outcomes.append(outcome)
        print(line(outcome, width), flush=True)
        saved(asked.output, facts, outcomes)

    logs = asked.output.parent / f"{asked.output.stem}-rows"
    report(
        wanted, facts, tell=tell, seconds=seconds, run=partial(run_row, command=command, logs=logs.resolve())
    )
    failed = failures(outcomes)
    count = {verdict: sum(outcome.verdict == verdict for outcome in outcomes) for verdict in VERDICTS}
    late = f", {count['not run']} not run" if count["not run"] else ""
    print(
        f"{count['ok']} ok, {failed} failed or missed, {count['cannot run']} cannot run{late}; {asked.output}"
    )
    return min(failed, MOST)


if __name__ == "__main__":
    from tests import gpu_report  # the module that rows know, of which this one is a copy

    sys.exit(gpu_report.main())

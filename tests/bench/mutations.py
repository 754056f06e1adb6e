"""Damaged texts in every reader: tracebacks, the slowest text and the peak memory of each.

``python -m tests.bench mutations`` gives every reader of `tests.support.text_readers` 5,000 mutations of its texts;
``--number N`` so many, ``--reader WORD`` those readers alone whose names hold the word. Mutation N of a reader is the
same text in every run: ``--reader WORD --show N`` prints what becomes of it, and ``-o F`` writes the text to a file.

A reader takes a text or refuses it with one of topoplan's errors. Anything else counts as a traceback, and so does a
text that takes longer than `LIMIT` seconds. Each reader has a process of its own; its memory is counted from the start.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

from tests.support.mutated_texts import mutation
from tests.support.text_readers import Reader, readers
from tests.support.tool_outputs import tool_readers
from topoplan.errors import TopoplanError, UsageError

NUMBER = 5000
LIMIT = 20  # seconds that a text may take
MEMORY = 8 << 30  # bytes of address space that a reader's process may have


class TooLongError(BaseException):
    """A reader took longer than `LIMIT`; no reader catches it."""


@dataclass(slots=True)
class Outcome:
    read: int = 0
    refused: int = 0
    slowest: float = 0.0  # seconds, of mutation `slow`
    slow: int = 0
    memory: int = 0  # bytes above what the process had before the first
    # numbers of the mutations, by the error and where it was raised
    tracebacks: dict[str, list[int]] = field(default_factory=dict)


def main(arguments: list[str] | None = None) -> None:
    """Print a line for every reader, and one for every kind of traceback."""
    parser = argparse.ArgumentParser(prog="mutations")
    parser.add_argument("--number", type=int, default=NUMBER)
    parser.add_argument("--reader", default="")
    parser.add_argument("--show", type=int)
    parser.add_argument("-o", dest="output", type=Path)
    options = parser.parse_args([] if arguments is None else arguments)
    every = (*readers(), *tool_readers())
    chosen = [one for one in every if options.reader in one.name]
    if not chosen:
        raise UsageError(
            f"no reader is named {options.reader!r}; use one of {', '.join(r.name for r in every)}"
        )
    if options.show is not None:
        _show(chosen[0], options.show, options.output)
        return
    print(f"{options.number:,} mutations of the texts of every reader")
    print(
        f"  {'reader':<20}{'read':>7}{'refused':>9}{'tracebacks':>12}{'slowest s':>11}{'(number)':>10}{'peak MiB':>10}"
    )
    failed = 0
    for reader in chosen:
        found = outcome_apart(reader, options.number)
        count = sum(map(len, found.tracebacks.values()))
        failed += count
        print(
            f"  {reader.name:<20}{found.read:>7}{found.refused:>9}{count:>12}{found.slowest:>11.2f}"
            f"{found.slow:>10}{found.memory / 2**20:>10.0f}",
            flush=True,
        )
        for what, numbers in sorted(found.tracebacks.items()):
            print(
                f"    {len(numbers)} x {what}; the first is --reader {reader.name!r} --show {numbers[0]}",
                flush=True,
            )
    print(f"  {failed} tracebacks")


def outcome_apart(reader: Reader, number: int) -> Outcome:
    """Return what becomes of so many mutations, in a process of their own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(reader, number, theirs))
    process.start()
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        found = None
    process.join()
    if not isinstance(found, Outcome):
        return Outcome(tracebacks={f"the process ended with status {process.exitcode}": [0]})
    return found


def _send(reader: Reader, number: int, pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    pipe.send(outcome(reader, range(number)))


def outcome(reader: Reader, numbers: range) -> Outcome:
    """Return what becomes of the mutations of these numbers, in this process."""
    found = Outcome()
    with contextlib.suppress(TopoplanError):
        for text in reader.texts:
            reader.read(text)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in numbers:
        text = mutated(reader, number)
        start = time.perf_counter()
        try:
            with _limit():
                reader.read(text)
            found.read += 1
        except TopoplanError:
            found.refused += 1
        except (Exception, TooLongError) as error:
            found.tracebacks.setdefault(_where(error), []).append(number)
        seconds = time.perf_counter() - start
        if seconds > found.slowest:
            found.slowest, found.slow = seconds, number
    found.memory = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return found


def mutated(reader: Reader, number: int) -> str:
    """Return mutation ``number`` of a reader, the same in every run."""
    rng = random.Random(f"{reader.name} {number}")
    return mutation(rng.choice(reader.texts), rng)


@contextlib.contextmanager
def _limit() -> Iterator[None]:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TooLongError(f"longer than {LIMIT} s")

    known = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, known)


def _where(error: BaseException) -> str:
    """Return the error in a few words, and the innermost line of ours that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/topoplan/" in frame.filename or "/collectives/" in frame.filename]
    last = (ours or frames)[-1]
    place = "/".join(Path(last.filename).parts[-3:])
    return f"{type(error).__name__}: {str(error)[:60]!r} at {place}:{last.lineno}"


def _show(reader: Reader, number: int, output: Path | None) -> None:
    text = mutated(reader, number)
    if output:
        output.write_bytes(text.encode("utf-8", "surrogatepass"))
    print(f"{reader.name}, mutation {number}: {len(text)} characters")
    start = time.perf_counter()
    try:
        print(f"read: {str(reader.read(text))[:500]}")
    except TopoplanError as error:
        print(f"refused: {str(error)[:500]!r}")
    except Exception:
        traceback.print_exc(file=sys.stdout)
    print(f"{time.perf_counter() - start:.2f} s")

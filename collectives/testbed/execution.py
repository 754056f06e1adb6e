"""Have a job done in the sandbox, and collect what it tells."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from collectives.testbed import sandbox
from collectives.testbed.job import Job
from topoplan.errors import BackendError, ProbeError


@dataclass(frozen=True, slots=True)
class RankTime:
    """One run as one rank saw it: positions of schedule and size in the job, seconds, and wrong elements."""

    rank: int
    schedule: int
    size: int
    run: int
    seconds: float
    wrong: int


@dataclass(frozen=True, slots=True)
class Told:
    """What a job told: bits per second of each link, and the times of all ranks."""

    links: tuple[float, ...]
    times: tuple[RankTime, ...]

    def seconds(self, schedule: int, size: int) -> tuple[float, ...]:
        """When the last rank was done, for each run."""
        latest: dict[int, float] = {}
        for time in self._of(schedule, size):
            latest[time.run] = max(latest.get(time.run, 0.0), time.seconds)
        return tuple(latest[run] for run in sorted(latest))

    def wrong(self, schedule: int, size: int) -> int:
        """Wrong elements of all ranks and runs."""
        return sum(time.wrong for time in self._of(schedule, size))

    def _of(self, schedule: int, size: int) -> list[RankTime]:
        return [time for time in self.times if (time.schedule, time.size) == (schedule, size)]


def execute(job: Job, progress: Callable[[str], None] | None = None) -> Told:
    """Have a job done.

    Raises
    ------
    ProbeError
        The network cannot be built.
    BackendError
        A rank failed, or the job ended without a word.
    """
    links: tuple[float, ...] = ()
    times: list[RankTime] = []
    failures: list[dict[str, object]] = []
    with tempfile.TemporaryFile("w+", encoding="utf-8") as stderr:
        with sandbox.running("collectives.testbed.inside", stderr) as process:
            assert process.stdin is not None, "stdin is a pipe"
            assert process.stdout is not None, "stdout is a pipe"
            process.stdin.write(job.to_json() + "\n")
            process.stdin.flush()
            for line in process.stdout:
                said = json.loads(line)
                if "error" in said:
                    failures.append(said)
                elif "links" in said:
                    links = tuple(said["links"])
                else:
                    times.append(RankTime(**said))
                    if progress:
                        progress(_progress(job, times))
            status = process.wait()
        stderr.seek(0)
        last = [line for line in stderr.read().splitlines() if line.strip()][-1:]
    if status or failures:
        raise _failure(failures, last, status)
    return Told(links, tuple(times))


def _progress(job: Job, times: list[RankTime]) -> str:
    runs = len(job.schedules) * len(job.sizes) * job.runs
    return f"run {len(times) // len(job.ranks)} of {runs}: {job.schedules[times[-1].schedule].name}"


def _failure(failures: list[dict[str, object]], last: list[str], status: int) -> ProbeError | BackendError:
    """The first that was told, what the processes said last where nothing was."""
    if not failures:
        return BackendError(
            f"the test bed ended with status {status}: {' '.join(last) or 'nothing was said'}"
        )
    first = failures[0]
    if "rank" not in first:
        return ProbeError(str(first["error"]))
    return BackendError(f"a rank failed: {first['error']}")

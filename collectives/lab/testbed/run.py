"""Run plans on a network of shaped links in a sandbox, and compare measured with predicted times."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from collectives.lab.testbed import sandbox
from collectives.lab.testbed.heartbeats import Heartbeat, HeartbeatWire, RoundTrips
from collectives.lab.testbed.network import (
    PlanFlow,
    ShapedNetwork,
    crossed_links,
    largest_scale,
    lay_out_network,
    network_commands,
    slowed_plan,
    wires_file,
)
from collectives.lab.testbed.sandbox import LinkUnderTest, SandboxJob, ScheduledPlan
from topoplan.errors import BackendError, ProbeError, UsageError
from topoplan.machine.topology import Link
from topoplan.model.closed_form import simulate
from topoplan.model.event_simulation import run_events
from topoplan.plans.plan import Plan
from topoplan.units import format_size


@dataclass(frozen=True, slots=True)
class LinkRate:
    """A directed link: its devices, the bits per second it was shaped to, and those that arrived as payload."""

    source: str
    destination: str
    shaped: int
    measured: float


@dataclass(frozen=True, slots=True)
class ScheduleMeasurement:
    """A schedule at one size.

    Parameters
    ----------
    schedule : str
    nbytes : int
        Bytes of the buffer.
    line_seconds : float
        Size over rate: what the links take if none of the fullest ones ever rests.
    predicted : float
        Seconds by the event simulation of `topoplan simulate` (that of ``--trace``) on the machine of the test bed,
        with the same chunks; by its closed form where they are too many.
    runs : tuple of float
        Seconds of each run, from the agreed start to the last rank's end.
    wrong : int
        Wrong elements of all ranks and runs.
    headroom : float or None
        Part of its share of the links at which every connection was paced; None where none was.
    beats : RoundTrips or None
        Heartbeats beside the data, where there were any.
    """

    schedule: str
    nbytes: int
    line_seconds: float
    predicted: float
    runs: tuple[float, ...]
    wrong: int
    headroom: float | None = None
    beats: RoundTrips | None = None

    @property
    def seconds(self) -> float:
        """Median of the runs."""
        return statistics.median(self.runs)


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times faster a schedule is than its rival at one size, by the model and by the clock."""

    schedule: str
    rival: str
    nbytes: int
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True)
class ShapedRunOutcome:
    """What a test bed showed.

    Parameters
    ----------
    scale : float
        Rate of a link over its bandwidth.
    bits_per_second : int
        All links together.
    links : tuple of LinkRate
    measurements : tuple of Measurement
        Schedule by schedule, sizes as given.
    rings : tuple of str
        Those of the schedules that are rings: the rivals of the others.
    """

    scale: float
    bits_per_second: int
    links: tuple[LinkRate, ...]
    measurements: tuple[ScheduleMeasurement, ...]
    rings: tuple[str, ...] = ()

    def gains(self) -> tuple[Gain, ...]:
        """How much faster every other schedule is than the ring, at each size; none without a ring."""
        free = [one for one in self.measurements if one.headroom is None]
        rings = {one.nbytes: one for one in free if one.schedule in self.rings}
        return tuple(
            Gain(
                schedule=one.schedule,
                rival=rings[one.nbytes].schedule,
                nbytes=one.nbytes,
                predicted=rings[one.nbytes].predicted / one.predicted,
                measured=rings[one.nbytes].seconds / one.seconds,
            )
            for one in free
            if one.nbytes in rings and one.schedule not in self.rings
        )

    def to_object(self) -> dict[str, object]:
        """A JSON object of everything above."""
        return {
            "scale": self.scale,
            "bits_per_second": self.bits_per_second,
            "links": [asdict(link) for link in self.links],
            "rows": [
                {**asdict(one), "runs": list(one.runs), "seconds": one.seconds} for one in self.measurements
            ],
            "gains": [asdict(gain) for gain in self.gains()],
        }


BUFFERS = 4
"""Arrays of full size for each rank: input, result, and two for the check."""


def run_testbed(
    plans: Mapping[str, Plan],
    sizes: Sequence[int],
    *,
    scale: float | None = None,
    runs: int = 3,
    chunk_bytes: int = 128 << 10,
    timeout: float = 30.0,
    headroom: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> ShapedRunOutcome:
    """Build the network that some plans cross, measure its links, and run each plan at each size.

    Parameters
    ----------
    plans : mapping of str to Plan
        By the name of the schedule; all on the same GPUs of one machine.
    sizes : sequence of int
        Bytes of the buffer.
    scale : float, optional
        Rate of a link over its bandwidth; by default what two processor cores keep up with.
    runs : int
        Timed runs of each schedule and size, one after the other.
    chunk_bytes : int
        Longest piece that moves at once.
    timeout : float
        Seconds that a rank waits for the next step.
    headroom : float, optional
        Run every schedule once more with every connection paced at this part of its share of the links, and send
        heartbeats beside the data of both.
    progress : callable, optional
        Called with a line of text now and then.

    Raises
    ------
    ProbeError
        This machine does not let its users build networks, or tools are missing.
    UsageError
        The plans do not fit together, the network would be too large or too slow, or the memory is too small.
    BackendError
        A rank failed.

    Notes
    -----
    Nothing is left behind, whatever ends this process: see `collectives.lab.testbed.sandbox`.
    """
    _check_plans(plans)
    check_memory(max(sizes), len(next(iter(plans.values())).ranks))
    flows = {name: crossed_links(plan) for name, plan in plans.items()}
    together: dict[PlanFlow, Sequence[Link]] = {
        flow: links for part in flows.values() for flow, links in part.items()
    }
    chosen = largest_scale(plans.values()) if scale is None else scale
    machine = next(iter(plans.values())).topology
    network = lay_out_network(together, machine.links, chosen)
    refused = sandbox.sandbox_refusal()
    if refused:
        raise ProbeError(refused)
    links = _links_under_test(network)
    runs_of = [(name, part) for name in plans for part in (None, headroom)[: 1 + (headroom is not None)]]
    job = SandboxJob(
        commands=network_commands(network),
        links=tuple(link for _, link in links),
        ranks=tuple(network.namespace(device) for device in machine.gpus),
        schedules=tuple(
            ScheduledPlan(
                name,
                plans[name].to_json(),
                json.dumps(wires_file(network, flows[name])),
                None if part is None else part * chosen,
            )
            for name, part in runs_of
        ),
        sizes=tuple(sizes),
        runs=runs,
        chunk_bytes=chunk_bytes,
        timeout=timeout,
        pulses=()
        if headroom is None
        else tuple(
            HeartbeatWire(wire.flow.source, wire.flow.destination, *wire.addresses) for wire in network.wires
        ),
    )
    told = run_job(job, progress)
    return ShapedRunOutcome(
        scale=chosen,
        bits_per_second=network.bits_per_second,
        links=tuple(
            LinkRate(*ends, link.rate, measured)
            for (ends, link), measured in zip(links, told.links, strict=True)
        ),
        measurements=tuple(
            ScheduleMeasurement(
                schedule=name,
                nbytes=nbytes,
                line_seconds=nbytes / (plans[name].rate * chosen * 1e9),
                predicted=predicted(slowed_plan(plans[name], chosen), nbytes, chunk_bytes, part),
                runs=told.seconds(number, place),
                wrong=told.wrong(number, place),
                headroom=part,
                beats=None if headroom is None else told.round_trips(number, place),
            )
            for number, (name, part) in enumerate(runs_of)
            for place, nbytes in enumerate(sizes)
        ),
        rings=tuple(name for name, plan in plans.items() if plan.method == "ring"),
    )


def predicted(plan: Plan, nbytes: int, chunk_bytes: int, headroom: float | None = None) -> float:
    """Seconds of the event simulation, which sees chunks wait for each other; the closed form if they are too many."""
    try:
        return run_events(plan, nbytes=nbytes, chunk_bytes=chunk_bytes, headroom=headroom).seconds
    except UsageError:
        return simulate(plan, nbytes=nbytes, chunk_bytes=chunk_bytes).seconds


def _check_plans(plans: Mapping[str, Plan]) -> None:
    first = next(iter(plans.values()), None)
    if first is None:
        raise UsageError("there is no plan to run; name at least one schedule")
    if len(first.ranks) == 1:
        raise UsageError("one GPU moves nothing; choose at least two")
    for name, plan in plans.items():
        if plan.ranks != first.ranks or plan.topology.links != first.topology.links:
            raise UsageError(f"{name} is for other GPUs or another machine; run it in a test bed of its own")


def check_memory(nbytes: int, ranks: int) -> None:
    """Refuse what this machine's memory cannot hold: asking for it may end a rank without a word."""
    needed = BUFFERS * nbytes * ranks
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise UsageError(
            f"{format_size(nbytes)} on {ranks} ranks need {format_size(needed)} of memory, and there are "
            f"{format_size(memory)}; choose smaller sizes"
        )


def _links_under_test(network: ShapedNetwork) -> list[tuple[tuple[str, str], LinkUnderTest]]:
    """The devices of every shaped direction of a cable, and how it is measured."""
    found = []
    for cable in network.cables:
        for side, rate in enumerate(cable.rates):
            if rate is not None:
                source, destination = cable.ends if side == 0 else cable.ends[::-1]
                addresses = cable.addresses if side == 0 else cable.addresses[::-1]
                names = (network.namespace(source), network.namespace(destination))
                found.append(((source, destination), LinkUnderTest(*names, *addresses, rate)))
    return found


@dataclass(frozen=True, slots=True)
class RankTime:
    """One run as one rank saw it: positions of schedule and size in the job, start, seconds, and wrong elements."""

    rank: int
    schedule: int
    size: int
    run: int
    start: float
    seconds: float
    wrong: int


@dataclass(frozen=True, slots=True)
class JobReport:
    """What a job told: bits per second of each link, times of all ranks, heartbeats, and a communicator's notes."""

    links: tuple[float, ...]
    times: tuple[RankTime, ...]
    beats: tuple[Heartbeat, ...] = ()
    notes: tuple[str, ...] = ()

    def seconds(self, schedule: int, size: int) -> tuple[float, ...]:
        """When the last rank was done, for each run."""
        latest: dict[int, float] = {}
        for time in self._of(schedule, size):
            latest[time.run] = max(latest.get(time.run, 0.0), time.seconds)
        return tuple(latest[run] for run in sorted(latest))

    def wrong(self, schedule: int, size: int) -> int:
        """Wrong elements of all ranks and runs."""
        return sum(time.wrong for time in self._of(schedule, size))

    def round_trips(self, schedule: int, size: int) -> RoundTrips:
        """The heartbeats that were sent while a run was under way."""
        starts = {time.run: time.start for time in self._of(schedule, size)}
        ends = self.seconds(schedule, size)
        spans = [(starts[run], starts[run] + seconds) for run, seconds in enumerate(ends)]
        return RoundTrips.of(
            [beat for beat in self.beats if any(start <= beat.sent < end for start, end in spans)]
        )

    def _of(self, schedule: int, size: int) -> list[RankTime]:
        return [time for time in self.times if (time.schedule, time.size) == (schedule, size)]


def run_job(job: SandboxJob, progress: Callable[[str], None] | None = None) -> JobReport:
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
    beats: tuple[Heartbeat, ...] = ()
    notes: tuple[str, ...] = ()
    failures: list[dict[str, object]] = []
    with tempfile.TemporaryFile("w+", encoding="utf-8") as stderr:
        with sandbox.run_in_sandbox("collectives.lab.testbed.sandbox", stderr) as process:
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
                elif "beats" in said:
                    beats = tuple(Heartbeat(*one) for one in said["beats"])
                elif "notes" in said:
                    notes = tuple(said["notes"])
                else:
                    times.append(RankTime(**said))
                    if progress:
                        progress(_progress(job, times))
            status = process.wait()
        stderr.seek(0)
        last = [line for line in stderr.read().splitlines() if line.strip()][-1:]
    if status or failures:
        raise _failure_text(failures, last, status)
    return JobReport(links, tuple(times), beats, notes)


def _progress(job: SandboxJob, times: list[RankTime]) -> str:
    if job.drop:
        return f"run {len(times) // len(job.ranks)}: a link drops after {job.runs}"
    runs = len(job.schedules) * len(job.sizes) * job.runs
    return f"run {len(times) // len(job.ranks)} of {runs}: {job.schedules[times[-1].schedule].name}"


def _failure_text(
    failures: list[dict[str, object]], last: list[str], status: int
) -> ProbeError | BackendError:
    """The first that was told, what the processes said last where nothing was."""
    if not failures:
        return BackendError(
            f"the test bed ended with status {status}: {' '.join(last) or 'nothing was said'}"
        )
    first = failures[0]
    if "rank" not in first:
        return ProbeError(str(first["error"]))
    return BackendError(f"a rank failed: {first['error']}")

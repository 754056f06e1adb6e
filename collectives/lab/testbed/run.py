"""Run plans on a network of shaped links in a sandbox, and compare measured with predicted times.

A link can become slower in the middle, or be cut (`run_drop`): rank 0 reshapes it or takes it down, and all ranks
continue until they have judged it and, after a replan, have run the new plan as often. The result states the optimum of
each machine by the model. That network has wires for the links between any two GPUs, for all cables between servers,
and for the links of the optimum, so another plan finds its own. If a link is cut the ranks have a network besides.
"""

from __future__ import annotations

import json
import pickle
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from collectives.lab.benchmark import check_memory
from collectives.lab.testbed import sandbox
from collectives.lab.testbed.heartbeats import Heartbeat, HeartbeatWire, RoundTrips
from collectives.lab.testbed.network import (
    PlanFlow,
    ShapedNetwork,
    cable_flows,
    crossed_links,
    cut_commands,
    largest_scale,
    lay_out_network,
    management_address,
    network_commands,
    reshape_commands,
    slowed_plan,
    wires_file,
    with_management,
)
from collectives.lab.testbed.sandbox import LinkUnderTest, SandboxJob, ScheduledPlan, sandbox_refusal
from collectives.recovery.link_monitor import (
    CONSECUTIVE_JUDGEMENTS,
    JUDGEMENT_CALLS,
    JUDGEMENT_CALLS_MOST,
    MIN_MONITORED_BYTES,
)
from collectives.recovery.survivors import PlanChange, changed_topology, replan_for_change
from topoplan.errors import BackendError, ProbeError, UsageError
from topoplan.interrupts import raise_if_interrupted
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Link
from topoplan.machine.variants import find_links
from topoplan.model.closed_form import check_late, simulate
from topoplan.model.event_simulation import run_events
from topoplan.plans.plan import Plan
from topoplan.units import format_size


@dataclass(frozen=True, slots=True)
class LinkRate:
    """A directed link: its devices, the bits per second it was shaped to, and the measured ones of payload."""

    source: str
    destination: str
    shaped: int
    measured: float


@dataclass(frozen=True, slots=True)
class ScheduleMeasurement:
    """A schedule at one size.

    ``line_seconds`` is size over rate: the time of the fullest links without any pause. ``predicted`` are seconds by
    the event simulation of `topoplan simulate` with the same chunks on the machine of the test bed, or by its closed
    form if these are too many. ``runs`` are seconds from the agreed start to the last rank's end. ``wrong`` counts
    elements of all ranks and runs. ``headroom`` is the part of its share of the links at which every connection was
    paced, None without pacing; ``beats`` are heartbeats beside the data, None without.
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
    """Speedup of a schedule over its rival at one size, by the model and by the clock."""

    schedule: str
    rival: str
    nbytes: int
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True)
class ShapedRunOutcome:
    """Result of a test bed.

    ``scale`` is the rate of a link over its bandwidth, ``bits_per_second`` that of all links together. ``measurements``
    are schedule by schedule, sizes as given. ``rings`` are the schedules that are rings: the rivals of the others.
    """

    scale: float
    bits_per_second: int
    links: tuple[LinkRate, ...]
    measurements: tuple[ScheduleMeasurement, ...]
    rings: tuple[str, ...] = ()

    def gains(self) -> tuple[Gain, ...]:
        """Return the speedup of every other schedule over the ring at each size; none without a ring."""
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
        """Return a JSON object."""
        return {
            "scale": self.scale,
            "bits_per_second": self.bits_per_second,
            "links": [asdict(link) for link in self.links],
            "rows": [
                {**asdict(one), "runs": list(one.runs), "seconds": one.seconds} for one in self.measurements
            ],
            "gains": [asdict(gain) for gain in self.gains()],
        }


ARRAYS = 4
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
    late: Mapping[int, float] | None = None,
    progress: Callable[[str], None] | None = None,
) -> ShapedRunOutcome:
    """Build the network that some plans cross, measure its links, and run each plan at each size.

    The plans, by the name of the schedule, are on the same GPUs of one machine. ``scale`` is the rate of a link over
    its bandwidth, by default one that two processor cores keep up with. ``runs`` are timed runs of each schedule and
    size; ``chunk_bytes`` is the longest piece that moves at once; a rank waits ``timeout`` seconds for the next step.
    With ``headroom``, every schedule is run again with each connection paced at this part of its share of the links,
    and heartbeats are sent beside the data of both. Ranks in ``late`` begin each run so many seconds behind the others,
    which counts in its time. ``progress`` gets a line of text now and then.

    ProbeError: this machine does not let users build networks, or tools are missing. UsageError: the plans do not fit
    together, the network is too large or too slow, or the memory too small. BackendError: a rank failed. No process or
    network outlives this process (`collectives.lab.testbed.sandbox`).
    """
    _check_plans(plans)
    check_late(late or {}, len(next(iter(plans.values())).ranks))
    timeout += max((late or {}).values(), default=0.0)  # the others wait for a late rank
    check_memory(max(sizes), len(next(iter(plans.values())).ranks), arrays=ARRAYS)
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
        late=tuple(sorted((late or {}).items())),
    )
    report = run_job(job, progress)
    return ShapedRunOutcome(
        scale=chosen,
        bits_per_second=network.bits_per_second,
        links=tuple(
            LinkRate(*ends, link.rate, measured)
            for (ends, link), measured in zip(links, report.links, strict=True)
        ),
        measurements=tuple(
            ScheduleMeasurement(
                schedule=name,
                nbytes=nbytes,
                line_seconds=nbytes / (plans[name].rate * chosen * 1e9),
                predicted=predicted(slowed_plan(plans[name], chosen), nbytes, chunk_bytes, part, late),
                runs=report.seconds(number, place),
                wrong=report.wrong(number, place),
                headroom=part,
                beats=None if headroom is None else report.round_trips(number, place),
            )
            for number, (name, part) in enumerate(runs_of)
            for place, nbytes in enumerate(sizes)
        ),
        rings=tuple(name for name, plan in plans.items() if plan.method == "ring"),
    )


def predicted(
    plan: Plan,
    nbytes: int,
    chunk_bytes: int,
    headroom: float | None = None,
    late: Mapping[int, float] | None = None,
) -> float:
    """Return the seconds of the event simulation, in which chunks wait for each other; of the closed form, after the
    latest rank, if they are too many.
    """
    try:
        return run_events(plan, nbytes=nbytes, chunk_bytes=chunk_bytes, headroom=headroom, late=late).seconds
    except UsageError:
        return (
            max((late or {}).values(), default=0.0)
            + simulate(plan, nbytes=nbytes, chunk_bytes=chunk_bytes).seconds
        )


def _check_plans(plans: Mapping[str, Plan]) -> None:
    first = next(iter(plans.values()), None)
    if first is None:
        raise UsageError("no plan to run; name at least one schedule")
    if len(first.ranks) == 1:
        raise UsageError("one GPU moves nothing; choose at least two")
    for name, plan in plans.items():
        if plan.ranks != first.ranks or plan.topology.links != first.topology.links:
            raise UsageError(f"{name} is for other GPUs or another machine; run it in a test bed of its own")


def _links_under_test(network: ShapedNetwork) -> list[tuple[tuple[str, str], LinkUnderTest]]:
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
    """One run on one rank: positions of schedule and size in the job, start, seconds, and wrong elements."""

    rank: int
    schedule: int
    size: int
    run: int
    start: float
    seconds: float
    wrong: int


@dataclass(frozen=True, slots=True)
class JobReport:
    """Output of a job: bits per second of each link, times of all ranks, heartbeats, a communicator's notes, and when
    links were cut.
    """

    links: tuple[float, ...]
    times: tuple[RankTime, ...]
    beats: tuple[Heartbeat, ...] = ()
    notes: tuple[str, ...] = ()
    cut: float | None = None

    def since_cut(self, schedule: int, size: int) -> float | None:
        """Return the seconds from the cut to the last rank's end of the first run; None without."""
        runs = self._of(schedule, size)
        first = min((time.run for time in runs), default=None)
        ends = [time.start + time.seconds for time in runs if time.run == first]
        return None if self.cut is None or not ends else max(ends) - self.cut

    def seconds(self, schedule: int, size: int) -> tuple[float, ...]:
        """Return the seconds of the last rank for each run."""
        latest: dict[int, float] = {}
        for time in self._of(schedule, size):
            latest[time.run] = max(latest.get(time.run, 0.0), time.seconds)
        return tuple(latest[run] for run in sorted(latest))

    def wrong(self, schedule: int, size: int) -> int:
        """Return the wrong elements of all ranks and runs."""
        return sum(time.wrong for time in self._of(schedule, size))

    def round_trips(self, schedule: int, size: int) -> RoundTrips:
        """Return the heartbeats that were sent during the runs."""
        starts = {time.run: time.start for time in self._of(schedule, size)}
        ends = self.seconds(schedule, size)
        spans = [(starts[run], starts[run] + seconds) for run, seconds in enumerate(ends)]
        return RoundTrips.of(
            [beat for beat in self.beats if any(start <= beat.sent < end for start, end in spans)]
        )

    def _of(self, schedule: int, size: int) -> list[RankTime]:
        return [time for time in self.times if (time.schedule, time.size) == (schedule, size)]


def run_job(job: SandboxJob, progress: Callable[[str], None] | None = None) -> JobReport:
    """Run a job; ProbeError if the network cannot be built, BackendError if a rank or the job failed."""
    links: tuple[float, ...] = ()
    times: list[RankTime] = []
    beats: tuple[Heartbeat, ...] = ()
    notes: tuple[str, ...] = ()
    cut: float | None = None
    failures: list[dict[str, object]] = []
    with tempfile.TemporaryFile("w+", encoding="utf-8") as stderr:
        with sandbox.run_in_sandbox(
            "collectives.lab.testbed.rank", pickle.dumps(job).hex(), stderr
        ) as process:
            assert process.stdout is not None, "stdout is a pipe"
            for line in process.stdout:
                raise_if_interrupted()
                record = json.loads(line)
                if "error" in record:
                    failures.append(record)
                elif "links" in record:
                    links = tuple(record["links"])
                elif "beats" in record:
                    beats = tuple(Heartbeat(*one) for one in record["beats"])
                elif "notes" in record:
                    notes = tuple(record["notes"])
                elif "cut" in record:
                    cut = record["cut"]
                else:
                    times.append(RankTime(**record))
                    if progress:
                        progress(_progress(job, times))
            status = process.wait()
        stderr.seek(0)
        last = [line for line in stderr.read().splitlines() if line.strip()][-1:]
    if status or failures:
        raise _failure_text(failures, last, status)
    return JobReport(links, tuple(times), beats, notes, cut)


def _progress(job: SandboxJob, times: list[RankTime]) -> str:
    if job.drop or job.cut:
        return (
            f"run {len(times) // len(job.ranks)}: a link {'drops' if job.drop else 'is cut'} after {job.runs}"
        )
    runs = len(job.schedules) * len(job.sizes) * job.runs
    return f"run {len(times) // len(job.ranks)} of {runs}: {job.schedules[times[-1].schedule].name}"


def _failure_text(
    failures: list[dict[str, object]], last: list[str], status: int
) -> ProbeError | BackendError:
    """Return the first reported error, else the last line on stderr."""
    if not failures:
        return BackendError(f"the test bed ended with status {status}: {' '.join(last) or 'no message'}")
    first = failures[0]
    if "rank" not in first:
        return ProbeError(str(first["error"]))
    return BackendError(f"a rank failed: {first['error']}")


BEFORE, DURING, AFTER = PHASES = ("before", "during", "after")

MEETING_PORT = 29600  # of rank 0 in the network besides the links

MAX_RUNS_DURING = JUDGEMENT_CALLS_MOST + CONSECUTIVE_JUDGEMENTS * JUDGEMENT_CALLS
"""Runs on a slow link after which ranks must have judged it; the first judgement is the latest for quick runs."""


@dataclass(frozen=True, slots=True)
class DropPhase:
    """Runs on one machine by one plan.

    ``name`` is before, during or after; ``runs`` are the seconds of each. ``rate`` is the median GB/s of algorithm
    bandwidth over the scale, ``predicted`` the same by the event simulation at this size, ``optimum`` the rate of the
    best plan for that machine. ``wrong`` counts elements.
    """

    name: str
    runs: tuple[float, ...]
    rate: float
    predicted: float
    optimum: float
    wrong: int


@dataclass(frozen=True, slots=True)
class DropOutcome:
    """Result of a run with a link that became slower, or was cut.

    ``scale`` is the rate of a link over its bandwidth. ``phases`` has no "after" without a replan. ``switch`` are the
    seconds of the first collective by the new plan, with the replan; None without it. ``recovered`` are the seconds
    from the cut to its end on all ranks, None without a cut. ``notes`` are the communicator's.
    """

    nbytes: int
    scale: float
    phases: tuple[DropPhase, ...]
    switch: float | None
    notes: tuple[str, ...]
    recovered: float | None = None

    def to_object(self) -> dict[str, object]:
        """Return a JSON object."""
        return {**asdict(self), "phases": [{**asdict(one), "runs": list(one.runs)} for one in self.phases]}


def run_drop(
    plan: Plan,
    nbytes: int,
    drops: Mapping[str, float],
    *,
    scale: float | None = None,
    runs: int = 3,
    chunk_bytes: int = 128 << 10,
    timeout: float = 30.0,
    on_failure: str = "shrink",
    progress: Callable[[str], None] | None = None,
) -> DropOutcome:
    """Run a plan, slow some links down or cut them, and measure how the ranks recover.

    ``nbytes`` is 1 MB or more if links become slower: smaller collectives are not monitored. ``drops`` maps wires, such
    as ``gpu0-gpu3``, to the remaining part of their rates, below 1; 0 cuts a wire in the middle of a run. ``runs`` are
    those before, and after. ``on_failure`` is that of the communicators: with "raise" they recover from a cut by
    `Communicator.shrink`. The other parameters, ProbeError and BackendError are those of
    `collectives.lab.testbed.run.run_testbed`; UsageError if a wire is unknown or the plan does not use it.
    """
    cut = sorted(
        {ends for wire, part in drops.items() if not part for ends in find_links(plan.topology, wire)}
    )
    slowed = {wire: part for wire, part in drops.items() if part}
    if slowed and nbytes < MIN_MONITORED_BYTES:
        least = format_size(MIN_MONITORED_BYTES)
        raise UsageError(f"{format_size(nbytes)} is too small to be monitored; give {least} or more")
    check_memory(nbytes, len(plan.ranks), arrays=ARRAYS)
    machine = plan.topology
    speeds = _wire_speeds(plan, slowed)
    change = PlanChange.of(
        without_links=[wire for wire, part in drops.items() if not part], slow_links=speeds
    )
    best = replan_for_change(plan, change)
    assert isinstance(best, Plan), "as the plan that was given"
    crossed = crossed_links(plan)
    flows = {**_gpu_pair_flows(plan), **crossed_links(best), **crossed}
    flows |= cable_flows(plan, flows)
    used = {f"{link.src}->{link.dst}" for links in crossed.values() for link in links}
    if not used & {*speeds, *(f"{src}->{dst}" for src, dst in cut)}:
        raise UsageError(f"the plan sends nothing over {', '.join(drops)}; let a link drop that it uses")
    chosen = largest_scale([plan]) if scale is None else scale
    network = lay_out_network(flows, machine.links, chosen)
    refused = sandbox_refusal()
    if refused:
        raise ProbeError(refused)
    ranks = tuple(network.namespace(device) for device in machine.gpus)
    commands = network_commands(network)
    job = SandboxJob(
        commands=with_management(commands, ranks) if cut else commands,
        links=(),
        ranks=ranks,
        schedules=(ScheduledPlan(plan.schedule, plan.to_json(), json.dumps(wires_file(network, flows))),),
        sizes=(nbytes,),
        runs=runs,
        chunk_bytes=chunk_bytes,
        timeout=timeout,
        drop=reshape_commands(network, {wire: speed * chosen * 8e9 for wire, speed in speeds.items()}),
        most_dropped=MAX_RUNS_DURING,
        cut=cut_commands(network, cut),
        on_failure=on_failure if cut else "raise",
        meeting=f"{management_address(0)}:{MEETING_PORT}" if cut else "",
    )
    report = run_job(job, progress)
    slower = changed_topology(plan, change)
    phases, switch = [], None
    for place, name in enumerate(PHASES):
        seconds = report.seconds(0, place)
        if name == AFTER and seconds:
            switch, *rest = seconds
            seconds = tuple(rest)
        if not seconds:
            continue
        there = machine if name == BEFORE else slower
        runs_there = slowed_plan(best if name == AFTER else plan, chosen, machine=there)
        phases.append(
            DropPhase(
                name,
                seconds,
                nbytes / statistics.median(seconds) / chosen / 1e9,
                nbytes / predicted(runs_there, nbytes, chunk_bytes) / chosen / 1e9,
                plan.rate if name == BEFORE else best.rate,
                report.wrong(0, place),
            )
        )
    since = report.since_cut(0, PHASES.index(AFTER))
    return DropOutcome(nbytes, chosen, tuple(phases), switch, report.notes, since)


def _wire_speeds(plan: Plan, drops: Mapping[str, float]) -> dict[str, float]:
    machine = plan.topology
    ends = {pair: part for wire, part in drops.items() for pair in find_links(machine, wire)}
    return {
        f"{link.src}->{link.dst}": link.bandwidth * ends[link.src, link.dst]
        for link in machine.links
        if (link.src, link.dst) in ends
    }


def _gpu_pair_flows(plan: Plan) -> dict[PlanFlow, tuple[Link, ...]]:
    place = {name: rank for rank, name in enumerate(plan.ranks)}
    return {
        PlanFlow(place[link.src], place[link.dst], link.channel, (link.src, link.dst)): (link,)
        for link in Fabric(plan.topology, plan.channels).links
        if link.src in place and link.dst in place
    }

"""Simulate jobs on shared links as fluids.

The bytes of an iteration leave on each of its links independently, and the iteration has sent when the last link has: a
concurrent open shop. A link serves the jobs of the highest level that have bytes for it, and divides itself among them
by their weights; with equal weights that is max-min fair, since every flow has one link. Rates change only when a flow
begins or ends, when levels change, and, for weights that grow with progress, in steps of one part in `STEPS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from topoplan.model.jobs import JobStage, TrainingJob, Workload

STEPS = 64
"""Steps in which a weight follows the progress of a flow; each has the weight of its middle."""

_CLOSE = 1e-12
"""Relative tolerance of times and bytes."""

Levels = Sequence[Sequence[int]]
"""Job numbers by level; a level is served before all later ones."""


@dataclass(frozen=True, slots=True)
class ActiveJob:
    """A job between its arrival and its end.

    early: whether it is in its first stage.
    left: iterations of the stage that are not done, the current one included.
    """

    number: int
    job: TrainingJob
    stage: JobStage
    early: bool
    left: int


@dataclass(frozen=True, slots=True)
class Policy:
    """A rule for sharing links.

    levels: levels of the active jobs, computed when one arrives, ends a stage, or ends; None for one level.
    keeps: whether levels are computed only when a job arrives, and kept until the next one does.
    weight: weight of a flow in its level by the share of its bytes already sent; None for equal weights.
    shifts: seconds from each job's arrival to its start.
    """

    name: str
    levels: Callable[[Workload, Sequence[ActiveJob]], Levels] | None = None
    weight: Callable[[float], float] | None = None
    shifts: Callable[[Workload], Sequence[float]] | None = None
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class FluidFlow:
    """A job's bytes on a link at one rate in GB/s, from ``start`` to ``end`` in seconds."""

    link: str
    job: int
    start: float
    end: float
    rate: float


@dataclass(slots=True)
class JobRun:
    """Times of one job in seconds.

    stages: end of each completed stage.
    iterations: length of each completed iteration.
    computed, sent: spans of computing, and of sending or waiting to send.
    end: the end, or the horizon.
    """

    stages: list[float] = field(default_factory=list)
    iterations: list[float] = field(default_factory=list)
    computed: list[tuple[float, float]] = field(default_factory=list)
    sent: list[tuple[float, float]] = field(default_factory=list)
    end: float = math.inf

    @property
    def busy(self) -> float:
        return _length(self.computed)


def _length(spans: Sequence[tuple[float, float]]) -> float:
    return math.fsum(end - start for start, end in spans)


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """A run of all jobs under a policy.

    order: jobs by level, highest first, at the arrival of the last one; None without levels.
    orders: every change of the active jobs' order with its time in seconds.
    """

    jobs: Workload
    policy: str
    order: tuple[int, ...] | None
    runs: tuple[JobRun, ...]
    flows: tuple[FluidFlow, ...]
    orders: tuple[tuple[float, tuple[int, ...]], ...] = ()

    @property
    def done(self) -> bool:
        """Whether all jobs ended before the horizon."""
        return all(
            len(run.stages) == len(job.stages) for run, job in zip(self.runs, self.jobs.jobs, strict=True)
        )

    @property
    def makespan(self) -> float | None:
        """Seconds until the last job ended; None if the horizon came first."""
        return max(run.end for run in self.runs) if self.done else None

    @property
    def cost(self) -> float | None:
        """Sum over jobs of weight times completion time of the first stage; None if one did not complete."""
        if any(not run.stages for run in self.runs):
            return None
        return math.fsum(
            job.weight * run.stages[0] for job, run in zip(self.jobs.jobs, self.runs, strict=True)
        )

    @property
    def utilisation(self) -> float:
        """GPU-seconds of computing over all GPUs' seconds until the horizon, or else the end of the last job."""
        whole = self.jobs.horizon if self.jobs.horizon is not None else max(run.end for run in self.runs)
        gpus = sum(job.gpus for job in self.jobs.jobs)
        busy = math.fsum(job.gpus * run.busy for job, run in zip(self.jobs.jobs, self.runs, strict=True))
        return busy / (gpus * whole) if whole else 0.0

    def sent(self, number: int) -> float:
        """Return the seconds in which bytes of a job were in flight."""
        return _length(self.network(number))

    def idle(self, number: int) -> float:
        """Return the seconds from a job's arrival to its end, or the horizon, without computing."""
        return max(0.0, self.runs[number].end - self.jobs.jobs[number].release - self.runs[number].busy)

    def network(self, number: int) -> list[tuple[float, float]]:
        """Return the spans in which bytes of a job were in flight, merged."""
        spans: list[tuple[float, float]] = []
        for start, end in sorted((flow.start, flow.end) for flow in self.flows if flow.job == number):
            if spans and start <= spans[-1][1]:
                spans[-1] = spans[-1][0], max(spans[-1][1], end)
            else:
                spans.append((start, end))
        return spans

    def to_object(self) -> dict[str, object]:
        """Return the object that ``topoplan simulate --json`` prints for a policy."""
        names = [job.name for job in self.jobs.jobs]
        return {
            "order": None if self.order is None else [names[number] for number in self.order],
            "orders": [
                {"from": moment, "order": [names[number] for number in order]}
                for moment, order in self.orders
            ],
            "cost": self.cost,
            "makespan": self.makespan,
            "utilisation": self.utilisation,
            "jobs": [
                {
                    "name": name,
                    "stages": run.stages,
                    "iterations": run.iterations,
                    "idle": self.idle(number),
                    "network": self.sent(number),
                }
                for number, (name, run) in enumerate(zip(names, self.runs, strict=True))
            ],
        }


def run_jobs(jobs: Workload, policy: Policy) -> PolicyRun:
    """Return the run of jobs under a policy until all are done, or the horizon.

    Two jobs that send for 90 of 200 seconds; the second arrives 5 later. Fair shares make them collide.

    >>> from topoplan.model.job_policies import POLICIES
    >>> stage = JobStage(4, 110.0, {"wire": 90e9})
    >>> pair = Workload({"wire": 1.0}, (TrainingJob("a", (stage,)), TrainingJob("b", (stage,), release=5.0)))
    >>> [[round(one) for one in run_jobs(pair, POLICIES[name]).runs[0].iterations] for name in ("fair", "mltcp")]
    [[285, 285, 285, 285], [261, 219, 203, 200]]
    """
    return _FluidSimulation(jobs, policy).outcome()


@dataclass(slots=True)
class _JobState:
    """State of an active job."""

    stage: int = 0
    left: int = 0
    begin: float = math.inf
    computed: float = math.inf
    sends: float = math.inf
    remaining: dict[str, float] = field(default_factory=dict)


class _FluidSimulation:
    def __init__(self, jobs: Workload, policy: Policy) -> None:
        self.jobs, self.policy = jobs, policy
        shifts = policy.shifts(jobs) if policy.shifts else [0.0] * len(jobs.jobs)
        self.starts = [job.release + shift for job, shift in zip(jobs.jobs, shifts, strict=True)]
        self.states: dict[int, _JobState] = {}
        self.runs = tuple(JobRun() for _ in jobs.jobs)
        self.flows: list[FluidFlow] = []
        self.open: dict[tuple[str, int], tuple[float, float]] = {}
        self.level = [0] * len(jobs.jobs)
        self.order: tuple[int, ...] | None = None
        self.orders: list[tuple[float, tuple[int, ...]]] = []
        self.now = 0.0

    def outcome(self) -> PolicyRun:
        horizon = math.inf if self.jobs.horizon is None else self.jobs.horizon
        waiting = set(range(len(self.jobs.jobs)))
        while waiting or self.states:
            self._pass_borders(waiting)
            if not waiting and not self.states:
                break
            rates = self._rates()
            then = min(horizon, self._next(waiting, rates))
            self._send(rates, then)
            self.now = then
            if then >= horizon:
                break
        self._change({})
        for number, run in enumerate(self.runs):
            if number in self.states or number in waiting:
                self._cut(number, run)
        return PolicyRun(
            self.jobs, self.policy.name, self.order, self.runs, tuple(self.flows), tuple(self.orders)
        )

    def _reached(self, moment: float) -> bool:
        return moment <= self.now + _CLOSE * max(1.0, self.now)

    def _pass_borders(self, waiting: set[int]) -> None:
        """Start and end what is due now."""
        arrived = changed = False
        for number in sorted(waiting):
            if self._reached(self.starts[number]):
                waiting.remove(number)
                self.states[number] = _JobState(left=self.jobs.jobs[number].stages[0].iterations)
                self._begin(number, computed=self.jobs.jobs[number].sends_first)
                arrived = True
        for number in list(self.states):
            state = self.states[number]
            while self._reached(state.computed) and self._reached(state.sends) and not state.remaining:
                changed |= self._end_iteration(number, state)
                if number not in self.states:
                    break
        changed = arrived or (changed and not self.policy.keeps)
        if changed and self.policy.levels is not None and self.states:
            active = [self._active(number) for number in sorted(self.states)]
            levels = self.policy.levels(self.jobs, active)
            for level, members in enumerate(levels):
                for number in members:
                    self.level[number] = level
            order = tuple(number for members in levels for number in members)
            if not self.orders or self.orders[-1][1] != order:
                self.orders.append((self.now, order))
            if self.order is None and not waiting:
                self.order = order

    def _active(self, number: int) -> ActiveJob:
        job, state = self.jobs.jobs[number], self.states[number]
        return ActiveJob(number, job, job.stages[state.stage], state.stage == 0, state.left)

    def _begin(self, number: int, *, computed: bool = False) -> None:
        state, job = self.states[number], self.jobs.jobs[number]
        stage = job.stages[state.stage]
        state.begin = self.now
        state.computed = self.now + (0.0 if computed else stage.compute)
        state.sends = self.now + (0.0 if computed else stage.compute * (1 - stage.overlap))
        state.remaining = dict(stage.bytes)

    def _end_iteration(self, number: int, state: _JobState) -> bool:
        """End an iteration, and return whether a stage ended with it."""
        job, run = self.jobs.jobs[number], self.runs[number]
        run.iterations.append(self.now - state.begin)
        if state.computed > state.begin:
            run.computed.append((state.begin, state.computed))
        if job.stages[state.stage].bytes:
            run.sent.append((state.sends, self.now))
        state.left -= 1
        if state.left:
            self._begin(number)
            return False
        run.stages.append(self.now)
        state.stage += 1
        if state.stage == len(job.stages):
            run.end = self.now
            del self.states[number]
            return True
        state.left = job.stages[state.stage].iterations
        self._begin(number)
        return True

    def _cut(self, number: int, run: JobRun) -> None:
        """Record the part of an iteration before the horizon."""
        run.end = self.now
        state = self.states.get(number)
        if state is None:
            return
        if state.computed > state.begin and self.now > state.begin:
            run.computed.append((state.begin, min(state.computed, self.now)))
        if state.remaining and self.now > state.sends:
            run.sent.append((state.sends, self.now))

    def _rates(self) -> dict[tuple[str, int], float]:
        """Return the bytes per second of every flow."""
        flows: dict[str, list[int]] = {}
        for number, state in self.states.items():
            if state.remaining and self._reached(state.sends):
                for link in state.remaining:
                    flows.setdefault(link, []).append(number)
        rates = {}
        for link, members in flows.items():
            first = min(self.level[number] for number in members)
            served = [number for number in members if self.level[number] == first]
            weigh = self.policy.weight
            weights = [
                1.0 if weigh is None else weigh((self._step(link, number) + 0.5) / STEPS) for number in served
            ]
            whole = math.fsum(weights)
            for number, weight in zip(served, weights, strict=True):
                rates[link, number] = self.jobs.links[link] * 1e9 * weight / whole
        return rates

    def _step(self, link: str, number: int) -> int:
        """Return the number of weight steps that a flow has sent."""
        state = self.states[number]
        total = self.jobs.jobs[number].stages[state.stage].bytes[link]
        return int((1 - state.remaining[link] / total) * STEPS + 1e-9)

    def _next(self, waiting: set[int], rates: Mapping[tuple[str, int], float]) -> float:
        """Return the time of the next change."""
        moments = [self.starts[number] for number in waiting]
        for state in self.states.values():
            moments += [moment for moment in (state.computed, state.sends) if not self._reached(moment)]
        for (link, number), rate in rates.items():
            state = self.states[number]
            until = state.remaining[link]
            if self.policy.weight is not None:
                total = self.jobs.jobs[number].stages[state.stage].bytes[link]
                until -= total * (1 - (self._step(link, number) + 1) / STEPS)
            moments.append(self.now + until / rate)
        return min(moments)

    def _send(self, rates: Mapping[tuple[str, int], float], then: float) -> None:
        """Move bytes until ``then``."""
        self._change(rates)
        for (link, number), rate in rates.items():
            remaining = self.states[number].remaining
            if self.now + remaining[link] / rate <= then + _CLOSE * max(1.0, then):
                del remaining[link]
            else:
                remaining[link] -= rate * (then - self.now)

    def _change(self, rates: Mapping[tuple[str, int], float]) -> None:
        """Record the flows whose rates change now."""
        for key, (start, rate) in list(self.open.items()):
            if rates.get(key) != rate:
                if self.now > start:
                    self.flows.append(FluidFlow(*key, start, self.now, rate / 1e9))
                del self.open[key]
        for key, rate in rates.items():
            self.open.setdefault(key, (self.now, rate))

"""Slow a link down in the middle of a testbed run, and measure ranks that replan (``on_slow="replan"``).

The plan runs on its network, then rank 0 reshapes the link, and all ranks continue until they have judged it and, after
a replan, have run the new plan as often. The result states the optimum of each machine by the model beside it. The
network has wires for the links between any two GPUs and for the links of that optimum, so another plan finds its own.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from collectives.communicator.link_monitor import (
    CONSECUTIVE_JUDGEMENTS,
    JUDGEMENT_CALLS,
    JUDGEMENT_CALLS_MOST,
    MIN_MONITORED_BYTES,
)
from collectives.communicator.recovery import PlanChange, changed_topology, replan_for_change
from collectives.lab.benchmark import check_memory
from collectives.lab.testbed.network import (
    PlanFlow,
    crossed_links,
    largest_scale,
    lay_out_network,
    network_commands,
    reshape_commands,
    slowed_plan,
    wires_file,
)
from collectives.lab.testbed.run import ARRAYS, predicted, run_job
from collectives.lab.testbed.sandbox import SandboxJob, ScheduledPlan, sandbox_refusal
from topoplan.errors import ProbeError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Link
from topoplan.machine.variants import find_links
from topoplan.plans.plan import Plan
from topoplan.units import format_size

BEFORE, DURING, AFTER = PHASES = ("before", "during", "after")

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
    """Result of a run with a link that became slower.

    ``scale`` is the rate of a link over its bandwidth. ``phases`` has no "after" without a replan. ``switch`` are the
    seconds of the first collective by the new plan, with the replan; None without it. ``notes`` are the communicator's.
    """

    nbytes: int
    scale: float
    phases: tuple[DropPhase, ...]
    switch: float | None
    notes: tuple[str, ...]

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
    progress: Callable[[str], None] | None = None,
) -> DropOutcome:
    """Run a plan, slow some links down, and measure how the ranks recover.

    ``nbytes`` is 1 MB or more: smaller collectives are not monitored. ``drops`` maps wires, such as ``gpu0-gpu3``, to
    the remaining part of their rates, below 1. ``runs`` are those before, and after. The other parameters, ProbeError
    and BackendError are those of `collectives.lab.testbed.run.run_testbed`; UsageError if a wire is unknown or the plan
    does not use it.
    """
    if nbytes < MIN_MONITORED_BYTES:
        least = format_size(MIN_MONITORED_BYTES)
        raise UsageError(f"{format_size(nbytes)} is too small to be monitored; give {least} or more")
    check_memory(nbytes, len(plan.ranks), arrays=ARRAYS)
    machine = plan.topology
    speeds = _wire_speeds(plan, drops)
    change = PlanChange.of(slow_links=speeds)
    best = replan_for_change(plan, change)
    assert isinstance(best, Plan), "as the plan that was given"
    crossed = crossed_links(plan)
    flows = {**_gpu_pair_flows(plan), **crossed_links(best), **crossed}
    if not {f"{link.src}->{link.dst}" for links in crossed.values() for link in links} & set(speeds):
        raise UsageError(f"the plan sends nothing over {', '.join(drops)}; let a link drop that it uses")
    chosen = largest_scale([plan]) if scale is None else scale
    network = lay_out_network(flows, machine.links, chosen)
    refused = sandbox_refusal()
    if refused:
        raise ProbeError(refused)
    job = SandboxJob(
        commands=network_commands(network),
        links=(),
        ranks=tuple(network.namespace(device) for device in machine.gpus),
        schedules=(ScheduledPlan(plan.schedule, plan.to_json(), json.dumps(wires_file(network, flows))),),
        sizes=(nbytes,),
        runs=runs,
        chunk_bytes=chunk_bytes,
        timeout=timeout,
        drop=reshape_commands(network, {wire: speed * chosen * 8e9 for wire, speed in speeds.items()}),
        most_dropped=MAX_RUNS_DURING,
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
    return DropOutcome(nbytes, chosen, tuple(phases), switch, report.notes)


def _wire_speeds(plan: Plan, drops: Mapping[str, float]) -> dict[str, float]:
    """Return GB/s of each direction of the slow wires."""
    machine = plan.topology
    ends = {pair: part for wire, part in drops.items() for pair in find_links(machine, wire)}
    return {
        f"{link.src}->{link.dst}": link.bandwidth * ends[link.src, link.dst]
        for link in machine.links
        if (link.src, link.dst) in ends
    }


def _gpu_pair_flows(plan: Plan) -> dict[PlanFlow, tuple[Link, ...]]:
    """Return the flows over single links between the GPUs of two ranks."""
    place = {name: rank for rank, name in enumerate(plan.ranks)}
    return {
        PlanFlow(place[link.src], place[link.dst], link.channel, (link.src, link.dst)): (link,)
        for link in Fabric(plan.topology, plan.channels).links
        if link.src in place and link.dst in place
    }

"""A link that becomes slower in the middle of a run, and ranks that plan around it (``on_slow="replan"``).

The plan runs on its network, then rank 0 shapes the link anew, and all go on until they have judged it and, if they
have planned anew, run that plan as often. Beside it stands the optimum of each machine by the model. The network has
wires for the links between any two GPUs and for what that optimum crosses, so that another plan finds its own.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from collectives.communicator.watching import EVERY, LEAST_BYTES, MOST
from collectives.communicator.what_is_left import Change, left_of, plan_of_rest
from collectives.communicator.what_is_slow import IN_A_ROW
from collectives.testbed.commands import commands, shaped
from collectives.testbed.job import Job, Schedule
from collectives.testbed.network import Flow, crossed_links, lay_out, wires_file
from collectives.testbed.run import check_memory, execute, predicted
from collectives.testbed.sandbox import refusal
from collectives.testbed.scaling import largest_scale, slowed_plan
from topoplan.degraded import find_links
from topoplan.errors import ProbeError, UsageError
from topoplan.fabric.fabric import Fabric
from topoplan.plans.plan import Plan
from topoplan.topology import Link
from topoplan.units import format_size

BEFORE, DURING, AFTER = PHASES = ("before", "during", "after")

MOST_DURING = MOST + IN_A_ROW * EVERY
"""Runs on a slow link after which ranks must have judged: the first time is as far away as quick runs let it be."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Some runs on one machine by one plan.

    Parameters
    ----------
    name : str
        before, during or after.
    runs : tuple of float
        Seconds of each.
    rate : float
        Measured GB/s of algorithm bandwidth, over the scale: the median.
    predicted : float
        The same by the event simulation of that plan on that machine, at this size.
    optimum : float
        GB/s of the best plan for that machine, as `Plan.rate`.
    wrong : int
        Wrong elements.
    """

    name: str
    runs: tuple[float, ...]
    rate: float
    predicted: float
    optimum: float
    wrong: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """What a run with a link that became slower showed.

    Parameters
    ----------
    nbytes : int
    scale : float
        Rate of a link over its bandwidth.
    phases : tuple of Phase
        Without "after" where nothing was planned anew.
    switch : float or None
        Seconds of the collective before which the ranks planned anew, with that; None where they did not.
    notes : tuple of str
        Of the communicator.
    """

    nbytes: int
    scale: float
    phases: tuple[Phase, ...]
    switch: float | None
    notes: tuple[str, ...]

    def to_object(self) -> dict[str, object]:
        """A JSON object of everything above."""
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
) -> Dropped:
    """Run a plan, let links become slower, and see how the ranks get on.

    Parameters
    ----------
    plan : Plan
    nbytes : int
        Of the buffer, 1 MB or more: smaller collectives are not watched.
    drops : mapping of str to float
        Wires, such as ``gpu0-gpu3``, and what is left of their rates, below 1.
    scale, chunk_bytes, timeout, progress
        As `collectives.testbed.run.run_testbed` takes them.
    runs : int
        Before, and after.

    Raises
    ------
    UsageError
        There is no such wire, or the plan does not send over it.
    ProbeError, BackendError
        As `run_testbed`.
    """
    if nbytes < LEAST_BYTES:
        least = format_size(LEAST_BYTES)
        raise UsageError(f"{format_size(nbytes)} is too small to be watched; give {least} or more")
    check_memory(nbytes, len(plan.ranks))
    machine = plan.topology
    speeds = _speeds(plan, drops)
    change = Change.of(slow_links=speeds)
    best = plan_of_rest(plan, change)
    assert isinstance(best, Plan), "as the plan that was given"
    crossed = crossed_links(plan)
    flows = {**_between_gpus(plan), **crossed_links(best), **crossed}
    if not {f"{link.src}->{link.dst}" for links in crossed.values() for link in links} & set(speeds):
        raise UsageError(f"the plan sends nothing over {', '.join(drops)}; let a link drop that it uses")
    chosen = largest_scale([plan]) if scale is None else scale
    network = lay_out(flows, machine.links, chosen)
    refused = refusal()
    if refused:
        raise ProbeError(refused)
    job = Job(
        commands=commands(network),
        links=(),
        ranks=tuple(network.namespace(device) for device in machine.gpus),
        schedules=(Schedule(plan.schedule, plan.to_json(), json.dumps(wires_file(network, flows))),),
        sizes=(nbytes,),
        runs=runs,
        chunk_bytes=chunk_bytes,
        timeout=timeout,
        drop=shaped(network, {wire: speed * chosen * 8e9 for wire, speed in speeds.items()}),
        most_dropped=MOST_DURING,
    )
    told = execute(job, progress)
    slower = left_of(plan, change)
    phases, switch = [], None
    for place, name in enumerate(PHASES):
        seconds = told.seconds(0, place)
        if name == AFTER and seconds:
            switch, *rest = seconds
            seconds = tuple(rest)
        if not seconds:
            continue
        there = machine if name == BEFORE else slower
        runs_there = slowed_plan(best if name == AFTER else plan, chosen, machine=there)
        phases.append(
            Phase(
                name,
                seconds,
                nbytes / statistics.median(seconds) / chosen / 1e9,
                nbytes / predicted(runs_there, nbytes, chunk_bytes) / chosen / 1e9,
                plan.rate if name == BEFORE else best.rate,
                told.wrong(0, place),
            )
        )
    return Dropped(nbytes, chosen, tuple(phases), switch, told.notes)


def _speeds(plan: Plan, drops: Mapping[str, float]) -> dict[str, float]:
    """GB/s of each direction of the wires that drop."""
    machine = plan.topology
    ends = {pair: part for wire, part in drops.items() for pair in find_links(machine, wire)}
    return {
        f"{link.src}->{link.dst}": link.bandwidth * ends[link.src, link.dst]
        for link in machine.links
        if (link.src, link.dst) in ends
    }


def _between_gpus(plan: Plan) -> dict[Flow, tuple[Link, ...]]:
    """What may go over the links from one rank's GPU to another's."""
    place = {name: rank for rank, name in enumerate(plan.ranks)}
    return {
        Flow(place[link.src], place[link.dst], link.channel, (link.src, link.dst)): (link,)
        for link in Fabric(plan.topology, plan.channels).links
        if link.src in place and link.dst in place
    }

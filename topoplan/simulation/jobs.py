"""Many jobs on shared links, as a file tells them: what each computes and sends, and how often.

A job iterates: it computes, then sends bytes over its links, all of them at once; sending may begin while the last
part of computing still runs (``overlap``). An iteration ends when both are done. Stages follow one another, each with
iterations of its own: the first is the one whose end decides whether a job goes on, as in a search for hyperparameters.
Bytes for each link stand in the file, or follow from a plan: what a buffer of some size puts on each of its links.

`topoplan.simulation.fluid` runs them under a policy of `topoplan.simulation.policies`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from topoplan.errors import PlanError, TopologyError, TopoplanError, UsageError
from topoplan.fabric.fabric import Fabric
from topoplan.formats.topology_json import decode_json
from topoplan.plans.json_values import read_list, read_object
from topoplan.plans.size_plans import load_plan
from topoplan.simulation.model import clock

FORMAT = "topoplan.jobs/1"

MOST_ITERATIONS = 1_000_000
"""Iterations of all jobs together that are simulated: about a minute."""

_SET = {"format", "links", "horizon", "jobs"}
_JOB = {"name", "gpus", "weight", "release", "first", "stages"}
_STAGE = {"iterations", "compute", "bytes", "overlap", "plan", "size"}


@dataclass(frozen=True, slots=True)
class Stage:
    """Iterations that are alike.

    Parameters
    ----------
    iterations : int
    compute : float
        Seconds of computing in each.
    bytes : dict of str to float
        What each iteration sends over a link, above zero.
    overlap : float
        Share of the computing that may run while bytes are sent.
    """

    iterations: int
    compute: float
    bytes: Mapping[str, float]
    overlap: float = 0.0

    def sending(self, links: Mapping[str, float]) -> float:
        """Seconds that sending takes with all links to itself, whose GB/s are given."""
        return max((size / (links[name] * 1e9) for name, size in self.bytes.items()), default=0.0)

    def alone(self, links: Mapping[str, float]) -> float:
        """Seconds of an iteration with all links to itself."""
        return max(self.compute, (1 - self.overlap) * self.compute + self.sending(links))


@dataclass(frozen=True, slots=True)
class Job:
    """A training job.

    Parameters
    ----------
    name : str
    stages : tuple of Stage
    gpus : int
    weight : float
        What a second of its first stage's completion costs.
    release : float
        Seconds at which it arrives.
    sends_first : bool
        Whether its first iteration has been computed when it arrives.
    """

    name: str
    stages: tuple[Stage, ...]
    gpus: int = 1
    weight: float = 1.0
    release: float = 0.0
    sends_first: bool = False


@dataclass(frozen=True, slots=True)
class JobSet:
    """Jobs and the links they share.

    Parameters
    ----------
    links : dict of str to float
        GB/s.
    jobs : tuple of Job
    horizon : float or None
        Seconds after which nothing is looked at any more; None for the end of the last job.
    """

    links: Mapping[str, float]
    jobs: tuple[Job, ...]
    horizon: float | None = None

    def __post_init__(self) -> None:
        names = [job.name for job in self.jobs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if not names:
            raise UsageError("there are no jobs; give at least one")
        if twice is not None:
            raise UsageError(f"two jobs are named {twice!r}; give each a name of its own")
        for job in self.jobs:
            for number, stage in enumerate(job.stages):
                self._check(f"job {job.name}: stage {number}", stage)
        total = sum(self._most(stage) for job in self.jobs for stage in job.stages)
        if total > MOST_ITERATIONS:
            end = "a horizon" if self.horizon is None else "a nearer horizon"
            raise UsageError(
                f"{total:g} iterations are more than the {MOST_ITERATIONS} that are run; give {end}"
            )

    def _most(self, stage: Stage) -> float:
        """Iterations of a stage before the horizon, at most."""
        alone = stage.alone(self.links)
        if self.horizon is None or alone == 0:
            return stage.iterations
        return min(stage.iterations, self.horizon / alone)

    def _check(self, where: str, stage: Stage) -> None:
        unknown = next((name for name in stage.bytes if name not in self.links), None)
        if unknown is not None:
            raise UsageError(
                f"{where}: no link is named {unknown!r}; the links are {', '.join(self.links) or 'none'}"
            )
        dead = next((name for name in stage.bytes if self.links[name] == 0), None)
        if dead is not None:
            raise UsageError(f"{where} never ends: link {dead!r} carries 0 GB/s")


def read_jobs(text: str, *, folder: str = "") -> JobSet:
    """The jobs of a file, format ``topoplan.jobs/1`` (see `docs/file-formats.md`).

    Parameters
    ----------
    text : str
    folder : str
        Where plan files that it names lie.

    Raises
    ------
    UsageError
        The text is no such file: names job, stage and key.

    Examples
    --------
    >>> stage = '{"iterations": 10, "compute": 2.0, "bytes": {"leaf0": 1e9}}'
    >>> head = '{"format": "topoplan.jobs/1", "links": {"leaf0": 1.0}, '
    >>> jobs = read_jobs(head + '"jobs": [{"name": "a", "gpus": 8, "stages": [%s]}]}' % stage)
    >>> jobs.jobs[0].stages[0].alone(jobs.links)
    3.0
    """
    try:
        return _jobs(decode_json(text, "the jobs file"), folder)
    except (PlanError, TopologyError) as error:
        raise UsageError(str(error)) from None


def _jobs(value: object, folder: str) -> JobSet:
    top = _object(value, "a jobs file", _SET)
    if top.get("format") != FORMAT:
        raise UsageError(f"format {top.get('format')!r} is not {FORMAT!r}"[:200])
    links = {
        name: _number(rate, f"link {name}") for name, rate in _object(top.get("links", {}), "links").items()
    }
    jobs = []
    for number, item in enumerate(read_list(top.get("jobs"), "jobs")):
        jobs.append(_job(item, f"job {number}", links, folder))
    horizon = None if top.get("horizon") is None else _number(top["horizon"], "horizon")
    return JobSet(links, tuple(jobs), horizon)


def _job(item: object, where: str, links: dict[str, float], folder: str) -> Job:
    value = _object(item, where, _JOB)
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise UsageError(f"{where}: name must be a text, not {name!r}"[:200])
    where = f"job {name}"
    stages, planned = [], None
    for number, one in enumerate(read_list(value.get("stages"), f"{where}: stages")):
        stage, ranks = _stage(one, f"{where}: stage {number}", links, folder)
        stages.append(stage)
        planned = ranks or planned
    if not stages:
        raise UsageError(f"{where} has no stages; give at least one")
    gpus = _whole(value.get("gpus", planned or 1), f"{where}: gpus")
    if planned is not None and gpus != planned:
        raise UsageError(f"{where}: gpus is {gpus}, and its plan is for {planned}")
    first = value.get("first", "compute")
    if first not in ("compute", "send"):
        raise UsageError(f"{where}: first must be compute or send, not {first!r}"[:200])
    return Job(
        name,
        tuple(stages),
        gpus=gpus,
        weight=_number(value.get("weight", 1.0), f"{where}: weight"),
        release=_number(value.get("release", 0.0), f"{where}: release"),
        sends_first=first == "send",
    )


def _stage(item: object, where: str, links: dict[str, float], folder: str) -> tuple[Stage, int | None]:
    """A stage, and how many ranks its plan has; the plan's links join the others."""
    value = _object(item, where, _STAGE)
    iterations = _whole(value.get("iterations"), f"{where}: iterations")
    given = _object(value.get("bytes", {}), f"{where}: bytes")
    sent = {name: _number(size, f"{where}: bytes of {name}") for name, size in given.items()}
    ranks = None
    if "plan" in value:
        if given:
            raise UsageError(f"{where}: bytes and plan both say what is sent; leave one of them out")
        if not isinstance(value["plan"], str):
            raise UsageError(f"{where}: plan must be the name of a file")
        size = _whole(value.get("size"), f"{where}: size")
        sent, rates, ranks = planned_bytes(str(Path(folder) / value["plan"]), size)
        for name, rate in rates.items():
            if links.setdefault(name, rate) != rate:
                raise UsageError(
                    f"{where}: link {name} has {rate:g} GB/s in its plan and {links[name]:g} elsewhere"
                )
    elif "size" in value:
        raise UsageError(f"{where}: size belongs to a plan; leave it out")
    overlap = _number(value.get("overlap", 0.0), f"{where}: overlap")
    if overlap > 1:
        raise UsageError(f"{where}: overlap must be a share from 0 to 1, not {overlap:g}")
    compute = _number(value.get("compute", 0.0), f"{where}: compute")
    return Stage(iterations, compute, {name: size for name, size in sent.items() if size}, overlap), ranks


def planned_bytes(path: str, nbytes: int) -> tuple[dict[str, float], dict[str, float], int]:
    """What one buffer puts on each link of a plan file, those links' GB/s, and the plan's ranks.

    Links are named ``source>destination``, so that jobs on one machine share them.
    """
    try:
        plan = load_plan(path)
        sent = {f"{src}>{dst}": float(size) for (src, dst), size in clock(plan)(nbytes).link_bytes.items()}
    except TopoplanError as error:
        raise UsageError(str(error)) from None
    rates: dict[str, float] = {}
    for link in Fabric(plan.topology, plan.at(nbytes).channels).links:
        name = f"{link.src}>{link.dst}"
        if name in sent:
            rates[name] = rates.get(name, 0.0) + link.bandwidth
    return sent, rates, len(plan.ranks)


def _object(item: object, where: str, keys: set[str] | None = None) -> dict[str, object]:
    value = read_object(item, where)
    unknown = next((key for key in value if keys is not None and key not in keys), None)
    if unknown is not None:
        raise UsageError(f"{where}: key {unknown!r} is unknown; use {', '.join(sorted(keys or ()))}")
    return value


def _number(item: object, where: str) -> float:
    if (
        isinstance(item, bool)
        or not isinstance(item, (int, float))
        or not (item >= 0 and math.isfinite(item))
    ):
        raise UsageError(f"{where} must be a number of zero or more, not {item!r}"[:200])
    return float(item)


def _whole(item: object, where: str) -> int:
    if isinstance(item, bool) or not isinstance(item, int) or item < 1:
        raise UsageError(f"{where} must be a whole number of one or more, not {item!r}"[:200])
    return item

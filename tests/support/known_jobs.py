"""Jobs whose outcome is known: worked examples of papers and closed forms, and random jobs from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from topoplan.model.jobs import JobStage, TrainingJob, Workload

LOADS = ((4, 0, 2), (1, 5, 0), (0, 2, 3), (3, 1, 1))
"""Seconds that each of four jobs needs on three links: order 2, 3, 1, 0 by the primal-dual rule, optimum 22."""


def open_shop(loads: Sequence[Sequence[float]]) -> Workload:
    """Jobs that only send, once: row by row their seconds on links of 1 GB/s."""
    links = [f"link{number}" for number in range(len(loads[0]))]
    jobs = []
    for number, row in enumerate(loads):
        sent = {link: load * 1e9 for link, load in zip(links, row, strict=True) if load}
        jobs.append(TrainingJob(f"job{number}", (JobStage(1, 0.0, sent),)))
    return Workload(dict.fromkeys(links, 1.0), tuple(jobs))


def crux_one() -> Workload:
    """Crux, figure 10: both ready to send; 2 s and 2 s against 1 s and 1 s, 10 GPUs each, 12 seconds."""
    jobs = tuple(
        TrainingJob(name, (JobStage(100, x, {"wire": x * 1e9}),), gpus=10, sends_first=True)
        for name, x in (("one", 2.0), ("two", 1.0))
    )
    return Workload({"wire": 1.0}, jobs, 12.0)


def crux_two() -> Workload:
    """Crux, figure 11: sending may begin at half of the computing; looked at for 13 seconds."""
    jobs = tuple(
        TrainingJob(name, (JobStage(100, compute, {"wire": sent * 1e9}, 0.5),), gpus=gpus)
        for name, gpus, compute, sent in (("one", 2, 4.0, 1.0), ("two", 12, 2.0, 3.0))
    )
    return Workload({"wire": 1.0}, jobs, 13.0)


def early_stages(count: int, *, apart: float = 0.0) -> Workload:
    """Equal jobs that only send: a first stage of ten iterations of a second, then forty."""
    stages = tuple(JobStage(iterations, 0.0, {"wire": 1e9}) for iterations in (10, 40))
    jobs = (TrainingJob(f"job{number}", stages, release=number * apart) for number in range(count))
    return Workload({"wire": 1.0}, tuple(jobs))


def alike(count: int, compute: float, sent: float, *, apart: float = 5.0, iterations: int = 6) -> Workload:
    """Equal jobs on one link that arrive one after another."""
    stage = JobStage(iterations, compute, {"wire": sent * 1e9})
    jobs = (TrainingJob(f"job{number}", (stage,), release=number * apart) for number in range(count))
    return Workload({"wire": 1.0}, tuple(jobs))


def random_jobs(seed: int) -> Workload:
    """One to five jobs of one to three stages on one to four links."""
    source = Random(seed)
    links = {f"link{number}": source.choice([1.0, 2.5, 10.0]) for number in range(source.randint(1, 4))}
    jobs = []
    for number in range(source.randint(1, 5)):
        stages = []
        for _ in range(source.randint(1, 3)):
            used = source.sample(sorted(links), source.randint(0, len(links)))
            sent = {link: source.uniform(0.1, 20.0) * 1e9 for link in used}
            compute = source.choice([0.0, source.uniform(0.1, 5.0)])
            stages.append(JobStage(source.randint(1, 5), compute, sent, source.choice([0.0, 0.25, 1.0])))
        jobs.append(
            TrainingJob(
                f"job{number}",
                tuple(stages),
                gpus=source.randint(1, 16),
                weight=source.choice([1.0, 3.0]),
                release=source.choice([0.0, source.uniform(0.0, 20.0)]),
                sends_first=source.random() < 0.3,
            )
        )
    return Workload(links, tuple(jobs), source.choice([None, None, 30.0]))

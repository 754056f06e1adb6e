"""How long a job stands still when a rank is killed: from its death to the first result without it, on every survivor.

8 processes of this host, SIGKILL of each rank in turn while a collective of 512 KB runs, ``on_failure="shrink"``. Times
are those of every survivor, since one that hears of the death late is late with all that follows. Ranks of "mpi hosts"
and "mpi ulfm" are told that they are on two hosts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from tests.faults.recovery import Round, faults_of, one_round, plan_for, times_of

BACKENDS = ("tcp", "shared", "mpi", "mpi hosts", "mpi ulfm")


def main(arguments: Sequence[str] = ()) -> None:
    """Print the times, and what went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench recovery")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    options = parser.parse_args(list(arguments))
    plan = plan_for(options.ranks)
    print(f"SIGKILL of one of {options.ranks} ranks to the first result without it, {options.rounds} rounds")
    print("backend    results  median ms   p99 ms  repeated  faults")
    for backend in options.backends:
        times: list[float] = []
        faults = repeated = 0
        for number in range(options.rounds):
            what = Round(backend, options.ranks, {number % options.ranks: 0.001})
            reports, died = one_round(plan, what)
            times += times_of(reports, died)
            faults += len(faults_of(plan, what, reports))
            repeated += sum(len(report.get("repeated", [])) for report in reports.values())
        median, late = (np.percentile(times, part) * 1e3 for part in (50, 99))
        print(
            f"{backend:9}  {len(times):7}  {median:9.1f}  {late:7.1f}  {repeated:8}  {faults:6}", flush=True
        )

"""Spare machines behind one switch: rate, bound and trees beside BytePS's formula, and every element of a run.

Ports of 10 GB/s. Rates of parameter servers are of the same machines, every helper a server; with replicas each sends
its sums to one more. Runs are on loopback, helpers included, and every element is compared with numpy's sum.
"""

from __future__ import annotations

import time

import numpy as np

import topoplan
from collectives import Communicator
from tests.bench.tables import Table
from tests.support.regular_fabrics import helped_star
from topoplan.plans.plan import Plan
from topoplan.schedules.parameter_server import parameter_server

TABLE = ((4, 0), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8), (16, 8))
ELEMENTS = 100_003


def main() -> None:
    columns = "workers|7 helpers|7 alone|6.3f GB/s|6.3f bound|6.3f formula|7.3f trees|5 ms|5.1f servers|7.3f"
    table = Table(*columns.split(), "with a replica|14.3f", "wrong|7")
    for workers, helpers in TABLE:
        n, k = workers, helpers
        formula = min(10.0, 10 * (n * n + k * n - 2 * k) / (2 * n * (n - 1)))
        machine = helped_star(n, k)
        began = time.perf_counter()
        plan = topoplan.plan(machine)
        seconds = time.perf_counter() - began
        alone = topoplan.plan(helped_star(n, 0)).rate
        stars = [parameter_server(machine, replicas=r) for r in range(min(k, 2))] or [
            parameter_server(machine)
        ]
        served = [one.rate for one in stars]
        wrong = sum(wrong_elements(one) for one in (plan, *stars))
        replicated = served[-1] if len(served) > 1 else None
        rates = (alone, plan.rate, plan.bound, formula)
        table.row(n, k, *rates, plan.num_trees, seconds * 1e3, served[0], replicated, wrong)


def wrong_elements(plan: Plan) -> int:
    """Elements of a run that are not numpy's sum; whole numbers, so that every order of additions gives the same."""
    given = [np.arange(ELEMENTS) % 1009 * (rank + 1.0) for rank in range(len(plan.ranks))]
    total = np.sum(given, axis=0)
    with Communicator(plan) as comm:
        return sum(int(np.count_nonzero(one != total)) for one in comm.all_reduce(given))

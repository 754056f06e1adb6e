"""Many jobs on shared links: what papers and closed forms know, beside what the simulation gives."""

from __future__ import annotations

from itertools import permutations

from tests.support.known_jobs import LOADS, alike, crux_one, crux_two, early_stages, open_shop
from topoplan.model.fluid_simulation import ActiveJob, PolicyRun, run_jobs
from topoplan.model.job_policies import POLICIES, CircleArc, corrections, in_order, interleaving
from topoplan.model.jobs import Workload


def main() -> None:
    print(f"{'system':10} {'what':58} {'known':>24} {'ours':>24}")
    shop = open_shop(LOADS)
    grouper = _under("grouper", shop)
    order = [] if grouper.order is None else list(grouper.order)
    _line("Grouper", "order of four jobs on three links", "[2, 3, 1, 0]", str(order))
    _line("", "its cost; FIFO; fair shares", "23; 24; 29", "; ".join(map(_cost, ("grouper", "fifo", "fair"))))
    best = min(run_jobs(shop, in_order(one)).cost or 0 for one in permutations(range(4)))
    _line("", "the least cost of any order", "22", f"{best:g}")
    one, two = (run_jobs(crux_one(), in_order(order)) for order in ((0, 1), (1, 0)))
    _line(
        "Crux",
        "example 1: GPU time used, job 1 or 2 first",
        "37.5 %, 41.7 %",
        _both(one.utilisation, two.utilisation),
    )
    standing = [ActiveJob(n, job, job.stages[0], True, 1) for n, job in enumerate(crux_one().jobs)]
    _line("", "correction of job 2", "1.5", f"{corrections(crux_one(), standing)[1]:g}")
    _line("", "what its order reaches", "41.7 %", f"{_under('crux', crux_one()).utilisation:.1%}")
    idle = [run_jobs(crux_two(), in_order(order)).idle(1) for order in ((0, 1), (1, 0))]
    _line("", "example 2, 13 s: job 2 idles, job 1 or 2 first", "7 s, 6 s", f"{idle[0]:g} s, {idle[1]:g} s")
    for count in (2, 3, 4, 8):
        fair, early = (_under(name, early_stages(count)) for name in ("fair", "jpas"))
        fall = 1 - sum(run.stages[0] for run in early.runs) / sum(run.stages[0] for run in fair.runs)
        _line(
            "JPAS" if count == 2 else "",
            f"early stages of {count} jobs end sooner by",
            _part(count),
            f"{fall:.1%}",
        )
    late = _under("jpas", early_stages(2, apart=20.0)).runs
    ends = f"{late[1].stages[0] - 20:g} s, {late[0].stages[1]:g} s, {late[1].stages[1]:g} s"
    _line("", "late arrival: its early stage, first job's end, last end", "10 s, 90 s, 100 s", ends)
    pair = alike(2, 110.0, 90.0)
    _line("MLTCP", "iterations of two jobs, fair shares", "285 ...", _iterations("fair", pair))
    _line("", "the same under MLTCP", "261 219 203 200", _iterations("mltcp", pair))
    turns = [CircleArc(200, 110, 90, 1.0)] * 2
    scores = f"{interleaving(turns, [0, 0]):g}, {interleaving(turns, [0, 100]):g}"
    _line("CASSINI", "score of two jobs together, half a turn apart", "0.55, 1", scores)
    _line(
        "",
        "iterations of two jobs that arrive at once",
        "200 ...",
        _iterations("cassini", alike(2, 110.0, 90.0, apart=0.0)),
    )


def _under(name: str, jobs: Workload) -> PolicyRun:
    return run_jobs(jobs, POLICIES[name])


def _cost(name: str) -> str:
    return f"{_under(name, open_shop(LOADS)).cost:g}"


def _both(*shares: float) -> str:
    return ", ".join(f"{100 * share:.1f} %" for share in shares)


def _part(count: int) -> str:
    return f"{(count - 1) / (2 * count):.1%}"


def _iterations(name: str, jobs: Workload) -> str:
    return " ".join(f"{one:.0f}" for one in _under(name, jobs).runs[0].iterations[:4])


def _line(system: str, what: str, known: str, ours: str) -> None:
    print(f"{system:10} {what:58} {known:>24} {ours:>24}")

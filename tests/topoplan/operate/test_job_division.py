"""Dividing a machine among jobs: against every way there is, alone and where links are shared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from scipy.optimize import linprog

import topoplan
from tests.support.checkout import Done
from tests.support.small_fabrics import both_ways, direct_machines, machine, parents_of_trees
from tests.topoplan.cli.conftest import Told
from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.topology import Device, Topology
from topoplan.operate.compare import job_division as jobs_module
from topoplan.operate.compare.job_division import Division, divide
from topoplan.operate.compare.recommendation import recommend

Sets = tuple[tuple[int, ...], ...]


def ways(free: Sequence[int], sizes: Sequence[int]) -> Iterator[Sets]:
    """Every way to give the jobs disjoint sets, equal jobs in any order."""
    if not sizes:
        yield ()
        return
    for first in combinations(free, sizes[0]):
        for others in ways([gpu for gpu in free if gpu not in first], sizes[1:]):
            yield (first, *others)


def check_alone(machine: Topology, sizes: Sequence[int], free: Sequence[int] | None = None) -> Division:
    """As good as the best of all ways, where every job has the rate that its GPUs have alone."""
    among = [*(free or range(len(machine.gpus)))]
    rate: dict[tuple[int, ...], float] = {(gpu,): 1.0 for gpu in among}
    for size in {*sizes} - {1}:
        rate |= {one.gpus: one.rate for one in recommend(machine, size, free=among)}
    best = {size: max(rate[gpus] for gpus in rate if len(gpus) == size) for size in sizes}
    wanted = max(
        (min(parts), sum(parts))
        for way in ways(among, sizes)
        for parts in [[rate[gpus] / best[len(gpus)] for gpus in way]]
    )
    found = divide(machine, sizes, free=free)
    assert [len(job.gpus) for job in found.jobs] == [*sizes]
    used = [gpu for job in found.jobs for gpu in job.gpus]
    assert len({*used} & {*among}) == sum(sizes)
    assert (found.least, sum(job.part for job in found.jobs)) == pytest.approx(wanted)
    assert (found.proved, found.complete) == (True, True)
    for job in found.jobs:
        wanted_rate = float("inf") if len(job.gpus) == 1 else pytest.approx(rate[job.gpus])
        assert job.alone == job.rate == wanted_rate
    return found


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "sizes", "free"),
    [
        ("v100x4", (2, 2), None),
        ("v100x4", (3, 1), None),
        ("dgx-1v", (2, 2), (0, 1, 2, 5, 6, 7)),
        ("dgx-1v", (4, 2, 2), None),
        pytest.param("dgx-1v", (2, 2, 2, 2), None, marks=pytest.mark.thorough),
        pytest.param("dgx-1p", (3, 3, 2), None, marks=pytest.mark.thorough),
    ],
)
def test_no_way_to_divide_nvlink_machines_is_better(
    name: str, sizes: tuple[int, ...], free: tuple[int, ...] | None
) -> None:
    found = check_alone(topoplan.load(name), sizes, free)
    assert not any(job.shares_links for job in found.jobs if job.alone > 20)


@pytest.mark.thorough
@settings(max_examples=6, deadline=None)
@given(direct_machines(most=5, symmetric=True))
def test_no_way_to_divide_random_machines_is_better(machine: Topology) -> None:
    size = len(machine.gpus)
    for sizes in ((2, size - 2), (2, 1)):
        reached = all(any(one.rate for one in recommend(machine, one)) for one in sizes if 2 <= one <= size)
        if reached and min(sizes) > 0 and sum(sizes) <= size:
            check_alone(machine, sizes)


def star_of_pairs(uplink: float) -> Topology:
    """Three switches of two GPUs each, joined by a fourth over uplinks."""
    wires = {(f"gpu{i}", f"sw{i // 2}"): 12.0 for i in range(6)} | {
        (f"sw{i}", "sw3"): uplink for i in range(3)
    }
    return machine(6, both_ways(wires), switches=4, channel="pcie")


def rooted_trees(gpus: Sequence[int]) -> list[tuple[int, list[tuple[int, int]]]]:
    """Every spanning tree of the ranks with its root, as (parent, child)."""
    return [
        (gpus[root], [(gpus[parent], gpus[child]) for child, parent in parents.items()])
        for root in range(len(gpus))
        for parents in parents_of_trees(len(gpus), root)
    ]


def rate_at_once(machine: Topology, sets: Sets, weights: Sequence[float]) -> float:
    """The largest R so that all jobs run at weight x R at once: a linear program over all pairs of trees."""
    number = {(link.src, link.dst): place for place, link in enumerate(machine.links)}
    graph = nx.DiGraph([*number])
    columns, jobs = [], []
    for job, gpus in enumerate(sets):
        trees = rooted_trees(gpus)
        for (up_root, up), (down_root, down) in product(trees, trees):
            if up_root == down_root:
                load = np.zeros(len(number))
                for tail, head in [(child, parent) for parent, child in up] + down:
                    for ends in pairwise(nx.shortest_path(graph, f"gpu{tail}", f"gpu{head}")):
                        load[number[ends]] += 1
                columns.append(load)
                jobs.append(job)
    equal = np.array([[float(own == job) for own in jobs] + [-weights[job]] for job in range(len(sets))])
    found = linprog(
        [*[0.0] * len(columns), -1.0],
        A_ub=np.hstack([np.array(columns).T, np.zeros((len(number), 1))]),
        b_ub=[link.bandwidth for link in machine.links],
        A_eq=equal,
        b_eq=[0.0] * len(sets),
    )
    assert found.x is not None
    return float(found.x[-1])


@pytest.mark.sampled
@pytest.mark.parametrize("uplink", [4.0, 9.0])
@pytest.mark.parametrize("sizes", [(3, 3), (3, 2)])
def test_no_way_over_shared_uplinks_is_better(uplink: float, sizes: tuple[int, int]) -> None:
    """Two jobs of three share the uplink of the pair that they divide; all ways are tried with all trees."""
    machine = star_of_pairs(uplink)
    best = {size: max(one.rate for one in recommend(machine, size)) for size in sizes}
    weights = [best[size] for size in sizes]
    wanted = max(rate_at_once(machine, way, weights) for way in ways(range(6), sizes))
    found = divide(machine, sizes)
    assert found.proved
    assert found.least == pytest.approx(min(wanted, 1.0))
    gpus, rates = tuple(job.gpus for job in found.jobs), [job.rate for job in found.jobs]
    assert rate_at_once(machine, gpus, rates) >= 1 - 1e-6
    if sizes == (3, 3):
        assert all(job.shares_links for job in found.jobs)
        assert found.least < 1


def test_jobs_over_pcie_stay_behind_their_switches() -> None:
    """Pairs that share a switch have 24 GB/s each, all four at once; the sides do not meet; sizes keep their order."""
    found = divide("pcie-x8", [2, 2, 2, 2])
    assert [(job.gpus, job.part) for job in found.jobs] == [((gpu, gpu + 1), 1.0) for gpu in (0, 2, 4, 6)]
    assert {job.gpus for job in divide("pcie-x8", [4, 4]).jobs} == {(0, 1, 2, 3), (4, 5, 6, 7)}
    for sizes in ((4, 2, 1), (1, 4, 2)):
        assert tuple(len(job.gpus) for job in divide("dgx-2", sizes).jobs) == sizes


@pytest.mark.thorough
def test_millions_of_ways_are_not_all_looked_at() -> None:
    servers = topoplan.cluster([topoplan.Server("v100x4", count=2)], nic_gbps=100)
    found = divide(servers, [4, 4])
    assert [job.gpus for job in found.jobs] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert (found.least, found.proved, found.complete) == (1.0, True, True)


def test_what_was_not_looked_at_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = divide("dgx-1p", [5, 3])
    monkeypatch.setattr(jobs_module, "MOST_WAYS", 1)
    found = divide("dgx-1p", [5, 3])
    assert (found.least, found.proved, found.complete) == (whole.least, True, False)


APART = Topology("apart", tuple(Device(f"gpu{i}", "gpu") for i in range(3)), ())


@pytest.mark.parametrize(
    ("machine", "sizes", "collective", "told"),
    [
        ("dgx-1v", (), "allreduce", "jobs of no GPUs do not fit"),
        ("dgx-1v", (4, 5), "allreduce", "jobs of 4 and 5 GPUs do not fit on 8"),
        ("dgx-1v", (2, 0), "allreduce", "jobs of 2 and 0 GPUs do not fit"),
        ("v100x4", (2, 2), "alltoall", r"collective must be one of .* for jobs, got alltoall"),
        (APART, (2,), "allreduce", "no path joins any 2 GPUs"),
    ],
)
def test_refuses_a_division(
    machine: str | Topology, sizes: tuple[int, ...], collective: str, told: str
) -> None:
    with pytest.raises((UsageError, InfeasibleError), match=told):
        divide(machine, sizes, collective)


@pytest.mark.thorough
def test_the_command_prints_the_jobs_in_their_order(done: Done, told: Told) -> None:
    found = told("recommend dgx-1v --jobs 2,4,1")
    assert [len(job["gpus"]) for job in found["jobs"]] == [2, 4, 1]
    assert found["jobs"][2]["rate"] is None
    assert (found["least"], found["proved"]) == (1.0, True)
    out = done("recommend pcie-x8 --jobs 3,3,2")
    assert "  1  3-5      10  13.3333     10        18   0.5556  no\n" in out
    assert max(len(line) for line in out.splitlines()) <= 120
    rows = done("recommend dgx-1v --jobs 4,4 --csv").splitlines()
    assert rows[1].startswith("0-3,75.0,112.5,")


def test_the_command_tells_of_a_job_that_no_path_joins(done: Done) -> None:
    """Four GPUs of which NVLink joins two, and nothing else is described: the other two do 0 GB/s, and why."""
    half = machine(4, both_ways({("gpu0", "gpu1"): 50.0})).to_json()
    told = "no NVLink, PCIe or network path of this description joins GPUs 2,3: 0 GB/s"
    assert told in done("recommend - --jobs 2,2", stdin=half)
    assert "no NVLink" not in done("recommend v100x4 --jobs 2,2")

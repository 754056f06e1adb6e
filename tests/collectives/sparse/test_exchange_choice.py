"""The exchange that a call takes, by lower bounds of the others, is the fastest of all that an explanation times."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import Communicator
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.sparse.exchange_choice import SparsePlans, sparse_request
from collectives.sparse.hashed_owners import OwnedMessages
from tests.support.hand_plans import forest_plan
from tests.support.tcp_jobs import backends_in_threads
from topoplan.machine.topology import Topology


def cluster(name: str, count: int, gbps: int) -> Topology:
    return topoplan.cluster([topoplan.Server(topoplan.load(name), count=count)], nic_gbps=gbps, nics=1)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("machine", "gpus"),
    [
        (topoplan.load("dgx-1v"), [0, 1, 4]),
        (cluster("v100x4", 2, 25), [0, 1, 4]),
        (topoplan.load("v100x4"), None),
        (topoplan.load("dgx-1v"), [0, 1]),
        (topoplan.load("pcie-x8"), [0, 1, 2, 5]),
        (topoplan.load("dgx-2"), [0, 5, 9, 10]),
        (cluster("v100x4", 3, 100), [0, 4, 8]),
        (cluster("v100x4", 2, 400), None),
    ],
)
def test_bounds_hold_and_do_not_change_the_choice(machine: Topology, gpus: list[int] | None) -> None:
    plan = topoplan.plan(machine, "allreduce", gpus=gpus)
    with Communicator(plan) as comm, Communicator(plan) as other:
        one = [np.zeros(1, np.float32)] * comm.size
        for size in (16, 10_000, 1_000_000, 50_000_000):
            for density in (0.0001, 0.01, 0.3, 0.9, 1.0):
                asked = sparse_request(
                    comm._members.execution.backend, one, density=density, exchange="auto", wire=None
                )
                asked = replace(asked, size=size, shape=(size,))
                every, chosen = comm._members.sparse.explain(asked), other._members.sparse.choose(asked)
                assert chosen.exchange == every.exchange
                assert chosen.seconds.items() <= every.seconds.items()
                names = [name for name in every.seconds if name != "dense"]
                plans = SparsePlans(comm._members.execution)
                owned = OwnedMessages(size, "float32", None).expected(every.entries, comm.size)
                least = plans.least_seconds(asked.entry_share, size * 4, every.pairs_bytes, owned)
                assert all(least[name] <= every.seconds[name] for name in names), (least, every.seconds)


def test_an_automatic_density_is_dense_where_the_selection_takes_longer() -> None:
    """Ranks of one host add a gradient sooner than they select from it; over a slow network they do not."""
    gradients = [np.ones(1 << 20, np.float32)] * 4
    with Communicator(topoplan.load("v100x4")) as comm:
        found = comm.explain(gradients, density="auto")
        assert found.exchange == "dense"
        assert found.seconds["pairs"] < found.seconds["dense"] < found.seconds["pairs"] + 1e-9 * (1 << 20)
        assert "and the selection of entries 1.05 ms" in found.reason
        assert comm.explain(gradients, density=0.01).exchange == "pairs"
        sums = comm.sparse_all_reduce(gradients, density="auto")
        assert all(np.array_equal(one, np.full(1 << 20, 4)) for one in sums)
        assert not comm.sparse_state()[""][0]["residual"].any()
    with Communicator(topoplan.plan(cluster("v100x4", 4, 1), gpus=[0, 4, 8, 12])) as comm:
        found = comm.explain(gradients, density="auto")
        assert found.exchange != "dense"
        assert found.entries == 10486
        assert comm.exchange_for(gradients, density="auto").exchange == found.exchange


def test_few_entries_of_two_ranks_are_gathered_without_a_plan_of_trees() -> None:
    with Communicator(forest_plan(2, "allreduce", "chain")) as comm:
        chosen = comm.exchange_for([np.zeros(1000)] * 2, density=0.01)
        assert chosen.exchange == "pairs"
        assert set(chosen.seconds) == {"dense", "pairs"}
        assert "one tree at least" in chosen.reason
        assert not comm._members.sparse._plans._runners


def test_one_rank_may_explain_what_all_have_exchanged() -> None:
    def body(backend: TcpBackend, rank: int) -> Any:
        with Communicator(forest_plan(2, "allreduce", "chain"), backend) as comm:
            comm.sparse_all_reduce(np.ones(1000), density=0.01)
            found = set(comm.explain(np.ones(1000), density=0.01).seconds) if rank else None
            comm.sparse_all_reduce(np.ones(1000), density=0.01, exchange="tree")
            return found

    assert backends_in_threads(2, body) == [None, {"dense", "pairs", "hashed", "tree", "balanced"}]

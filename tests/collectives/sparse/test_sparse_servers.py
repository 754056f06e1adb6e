"""Sparse exchanges on simulated servers of many shapes: at density 1 the dense allreduce, and nothing is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import topoplan
from collectives import Communicator
from collectives.backends.execution import Execution
from collectives.training.averaging import InStepAverager
from collectives.training.exchange_settings import ExchangeSettings
from collectives.training.report import Recorder
from topoplan.errors import BackendError
from topoplan.machine.topology import Topology

Array = NDArray[Any]

SIZE = 2003
DGX = topoplan.load("dgx-1v")
SERVERS = [(8,), (1, 1), (2, 2), (8, 8), (3, 5), (1, 3, 2), (4, 1, 8), (8, 8, 8, 8), (2, 8, 1, 5)]
SPARSE = ("pairs", "servers", "tree", "balanced")


def servers_of(gpus: tuple[int, ...]) -> Topology:
    """DGX-1V servers with the first so many GPUs of each, or one of them alone."""
    if len(gpus) == 1:
        return DGX.subset(list(range(gpus[0])))
    return topoplan.cluster(
        [topoplan.Server(DGX, list(range(number))) for number in gpus], nic_gbps=100, nics=1
    )


def exchanges_on(comm: Communicator) -> list[str]:
    """Those that this machine has."""
    return [
        name for name in comm.explain([np.zeros(SIZE)] * comm.size, density=0.1).seconds if name in SPARSE
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("gpus", SERVERS, ids=str)
def test_at_density_one_every_exchange_is_the_dense_allreduce_bit_for_bit(gpus: tuple[int, ...]) -> None:
    """What the communicator chooses for any floats; and what it is told to take, where sums are exact."""
    with Communicator(topoplan.plan(servers_of(gpus))) as comm:
        generator = np.random.default_rng(len(gpus))
        floats = [generator.standard_normal(SIZE) for _ in range(comm.size)]
        for one, other in zip(
            comm.sparse_all_reduce(floats, density=1.0), comm.all_reduce(floats), strict=True
        ):
            assert np.array_equal(one, other)
        found = exchanges_on(comm)
        assert ("servers" in found) == (1 < len(gpus) < comm.size)
        for dtype in ("float64", "float32"):
            whole = [generator.integers(-999, 1000, SIZE).astype(dtype) for _ in range(comm.size)]
            dense = comm.all_reduce(whole)
            for exchange in found:
                key = f"{dtype} {exchange}"
                sparse = comm.sparse_all_reduce(whole, density=1.0, exchange=exchange, key=key)
                assert all(np.array_equal(one, other) for one, other in zip(sparse, dense, strict=True)), key
                assert not any(kept["residual"].any() for kept in comm.sparse_state()[key])


@pytest.mark.thorough
@pytest.mark.parametrize("gpus", [(3, 5), (4, 1, 8)], ids=str)
def test_nothing_is_lost_in_a_hundred_steps(gpus: tuple[int, ...]) -> None:
    with Communicator(topoplan.plan(servers_of(gpus))) as comm:
        for exchange in exchanges_on(comm):
            given, summed = np.zeros(SIZE), np.zeros(SIZE)
            for step in range(100):
                gradients = [
                    np.random.default_rng([rank, step]).integers(-99, 100, SIZE).astype(np.float32)
                    for rank in range(comm.size)
                ]
                given += np.sum(gradients, axis=0)
                results = comm.sparse_all_reduce(gradients, density=0.01, exchange=exchange, key=exchange)
                assert all(np.array_equal(results[0], one) for one in results)
                summed += results[0]
            kept = sum(one["residual"].astype(np.float64) for one in comm.sparse_state()[exchange])
            assert np.array_equal(summed + kept, given), exchange


@pytest.mark.parametrize("exchange", ["servers", "tree", "auto"])
def test_a_gradient_on_whose_plan_ranks_cannot_agree_is_kept_by_every_rank_in_training_too(
    exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And counts in the next step that does run: nothing of it is lost."""

    def planned(*arguments: Any, **options: Any) -> Any:
        raise BackendError("the peer died", rank=0, peer=1)

    plan = topoplan.plan(servers_of((3, 5)))
    generator = np.random.default_rng(3)
    lost, next_one = ([generator.integers(-99, 100, SIZE).astype(float) for _ in range(8)] for _ in range(2))
    settings = ExchangeSettings(density=0.01, exchange=exchange)
    with Communicator(plan) as comm, monkeypatch.context() as patch:
        patch.setattr(Execution, "planned", planned)
        averager = InStepAverager(comm, settings, Recorder("test", ranks=8))
        with pytest.raises(BackendError, match="the peer died"):
            averager.start("bucket", lost)
        state = comm.sparse_state()
    for kept, gradient in zip(state["bucket"], lost, strict=True):
        assert np.array_equal(kept["residual"], gradient)
    with Communicator(plan) as comm:
        comm.restore_sparse_state(state)
        summed = comm.sparse_all_reduce(next_one, density=0.01, exchange=exchange, key="bucket")[0]
        kept = sum(one["residual"] for one in comm.sparse_state()["bucket"])
    assert np.array_equal(summed + kept, np.sum(lost, axis=0) + np.sum(next_one, axis=0))

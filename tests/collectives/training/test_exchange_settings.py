"""Compression, sync and fault tolerance, and the keywords of earlier versions that mean the same."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives.training.gradient_filters as gradient_filters
from collectives import (
    Cast,
    Communicator,
    GradientSynchronizer,
    LowRank,
    Quantize,
    Shrink,
    Threshold,
    TopK,
    WireFormat,
)
from collectives.training.exchange_settings import current_options
from collectives.training.modes import SSP, LocalSGD
from tests.support.hand_plans import forest_plan
from topoplan.errors import UsageError

RANKS = 3

SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({"density": None, "mode": None}, {}),
    "density": ({"density": 0.1}, {"compression": TopK(0.1)}),
    "all of sparse": (
        {"density": 0.1, "exchange": "pairs", "momentum": 0.5, "wire": WireFormat(values="fixed8")},
        {"compression": TopK(0.1, exchange="pairs", momentum=0.5, wire=WireFormat(values="fixed8"))},
    ),
    "low_rank": ({"low_rank": 2}, {"compression": LowRank(2, matrices="bucket")}),
    "settings": (
        {"low_rank": LowRank(1, begins=0, matrices="bucket")},
        {"compression": LowRank(1, begins=0, matrices="bucket")},
    ),
    "codes": ({"codes": 8}, {"compression": Quantize(8)}),
    "significance": ({"significance": 0.5}, {"compression": Threshold(0.5)}),
    "mode": ({"mode": "local:2"}, {"sync": LocalSGD(2)}),
}
"""Keywords of earlier versions, and the present ones."""


def averages(**options: Any) -> list[list[bytes]]:
    """The bits that rank 1 gets in four steps."""
    draw = np.random.default_rng(3)
    zeros = [[np.zeros((20, 20), np.float32), np.zeros(7, np.float32)] for _ in range(RANKS)]
    with GradientSynchronizer(
        zeros, forest_plan(RANKS, "allreduce", "chain"), backend="loopback", **options
    ) as synchronizer:
        steps = [
            [[draw.standard_normal(one.shape).astype(np.float32) for one in rank] for rank in zeros]
            for _ in range(4)
        ]
        found = []
        for step in steps:
            found.append([one.tobytes() for one in synchronizer.step(step)[1]])
            synchronizer.after_step(zeros)
        synchronizer.finish(zeros)
        return found


@pytest.mark.parametrize("name", SAME)
def test_keywords_of_earlier_versions_give_the_same_bits_and_a_warning(name: str) -> None:
    old, new = SAME[name]
    with pytest.warns(DeprecationWarning, match="is deprecated; write (compression|sync)=") as warned:
        found = averages(**old)
    assert all(Path(one.filename) == Path(__file__) for one in warned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert averages(**new) == found


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist = pytest.importorskip("torch.distributed", reason="torch is not installed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def hooked(**options: Any) -> list[bytes]:
    """The bits of the gradients of three steps under the DDP hook."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from collectives.torch import HookState

    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(20, 20))
    state = HookState(forest_plan(1, "allreduce", "chain"), **options)
    state.register(model)
    found = []
    for step in range(3):
        model.zero_grad()
        model(torch.full((2, 20), step + 0.3)).square().sum().backward()
        found += [one.grad.numpy().tobytes() for one in model.parameters()]
    state.finish()
    state.close()
    return found


@pytest.mark.parametrize(
    "name", ["compress", "shrink", *(one for one in SAME if one not in ("nothing", "settings"))]
)
def test_the_hook_takes_both_spellings_too(name: str, gloo: None) -> None:
    old, new = {
        **SAME,
        "compress": ({"compress": "bfloat16"}, {"compression": Cast("bfloat16")}),
        "shrink": ({"on_failure": "shrink", "on_change": max}, {"fault_tolerance": Shrink(max)}),
    }[name]
    with pytest.warns(DeprecationWarning, match="is deprecated; write"):
        found = hooked(**old)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        assert hooked(**new) == found
    assert name != "compress" or found != hooked()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cast_gradients_are_added_in_16_bits_in_a_plain_loop(dtype: str) -> None:
    """Whole numbers of few bits, divided by four ranks: exact in either type; a third is rounded."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    given = [[np.full(5, 8.0 * rank)] for rank in range(4)]
    with GradientSynchronizer(
        given, forest_plan(4, "allreduce", "star"), backend="loopback", compression=Cast(dtype)
    ) as synchronizer:
        assert synchronizer.step(given)[2][0].tolist() == [12.0] * 5
        third = synchronizer.step([[one[0] * 0 + 1 / 3] for one in given])[0][0]
        assert 0 < abs(third[0] - 1 / 3) < 1e-2
        assert {one.density for one in synchronizer.recorder.exchanges()} == {0.25}


@pytest.mark.parametrize(
    ("old", "options", "message"),
    [
        ({"codes": 8, "low_rank": 2}, {}, "compression must be one of .*, got low_rank and codes; give one"),
        ({"density": 0.1}, {"compression": Quantize(8)}, "got compression and density; give one"),
        ({"momentum": 0.9}, {}, "momentum 0.9 is for sparse gradients"),
        ({"low_rank": 2, "exchange": "pairs"}, {}, "exchange 'pairs' is for sparse gradients"),
        ({"mode": "asp"}, {"sync": SSP(2)}, "mode is the earlier name of sync"),
        ({"on_failure": "ignore"}, {}, "on_failure must be raise or shrink, got 'ignore'"),
        ({"on_failure": "shrink"}, {"fault_tolerance": Shrink()}, "on_failure must be in fault_tolerance"),
        ({}, {"fault_tolerance": "shrink"}, r"fault_tolerance must be Shrink\(...\) or None, got 'shrink'"),
    ],
)
def test_refuses_options_that_exclude_each_other(
    old: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        current_options(old, **options)


def test_the_communicator_and_the_process_group_have_their_earlier_names() -> None:
    with Communicator(forest_plan(RANKS, "allreduce", "chain")) as comm:
        with pytest.warns(DeprecationWarning, match="Communicator.seats is deprecated; write original_ranks"):
            assert comm.seats == comm.original_ranks == (0, 1, 2)  # type: ignore[attr-defined]
        with pytest.warns(
            DeprecationWarning, match="Communicator.gather_texts is deprecated; it is private now"
        ):
            assert comm.gather_texts("a") == ["a"] * RANKS  # type: ignore[attr-defined]
        with pytest.raises(AttributeError, match="'Communicator' object has no attribute 'chairs'"):
            _ = comm.chairs  # type: ignore[attr-defined]
    torch = pytest.importorskip("collectives.torch", reason="torch is not installed")
    with pytest.warns(DeprecationWarning, match="PlannedGroup is deprecated"):
        assert torch.PlannedGroup is torch.ProcessGroupTopoplan


def test_classes_of_filters_have_their_earlier_names_and_so_have_checkpoints() -> None:
    with pytest.warns(DeprecationWarning, match="IntegerCodes is deprecated; write Quantize"):
        assert gradient_filters.IntegerCodes is Quantize
    zeros = [[np.zeros(4, np.float32)]] * RANKS
    plan = forest_plan(RANKS, "allreduce", "chain")
    with GradientSynchronizer(zeros, plan, backend="loopback", compression=Threshold(1.0)) as synchronizer:
        synchronizer.step([[np.full(4, 0.25, np.float32)]] * RANKS)
        state = synchronizer.state_dict()
        state["filters"]["filter"] = re.sub("Threshold", "Significance", state["filters"]["filter"])
        synchronizer.load_state_dict(state)
        assert synchronizer.step([[np.full(4, 0.75, np.float32)]] * RANKS)[0][0].tolist() == [0.0] * 4
        assert synchronizer.step([[np.full(4, 0.25, np.float32)]] * RANKS)[0][0].tolist() == [1.25] * 4

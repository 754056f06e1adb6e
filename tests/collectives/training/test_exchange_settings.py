"""Compression, sync and fault tolerance, and the keywords of earlier versions that mean the same."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives.training.gradient_filters as gradient_filters
from collectives import (
    Cast,
    CommonRows,
    Communicator,
    GradientSynchronizer,
    LowRank,
    Quantize,
    Shrink,
    Threshold,
    TopK,
    WireFormat,
)
from collectives.training.checkpoint_state import BucketPart
from collectives.training.exchange_settings import ExchangeSettings, current_options, warn_of_deprecated
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


def test_an_automatic_density_has_one_text_and_one_number() -> None:
    assert f"{TopK('auto')}" == "TopK(auto, exchange='auto', momentum=0.0, wire=None)"
    assert TopK("auto").at(7) == "auto"
    with pytest.raises(UsageError, match="density must be"):
        TopK("automatic")  # type: ignore[arg-type]


def test_densities_by_name_are_those_of_the_first_pattern() -> None:
    """Each parameter sends its own share, and keeps the rest: 1 of 400 entries of the first, all 7 of the second."""
    how = TopK({"0": 1 / 400, "*": lambda step: 1.0 if step < 2 else 1 / 7})
    assert f"{how}" == (
        "TopK({0: 0.0025, *: 1.0 at step 0}, exchange='auto', momentum=0.0, wire=None, per='layer')"
    )
    assert (how.at(0, ["1", "0"]), how.at(5, ["0", "1"])) == ((1.0, 1 / 400), (1 / 400, 1 / 7))
    zeros = [[np.zeros((20, 20), np.float32), np.zeros(7, np.float32)] for _ in range(RANKS)]
    draw = np.random.default_rng(5)
    given = [[draw.standard_normal(one.shape).astype(np.float32) for one in zeros[0]] for _ in range(RANKS)]
    plan = forest_plan(RANKS, "allreduce", "chain")
    for nbytes in (64, 1 << 20):
        with GradientSynchronizer(
            zeros, plan, backend="loopback", compression=how, bucket_bytes=nbytes
        ) as synchronizer:
            first = synchronizer.step(given)[0]
            state = synchronizer.state_dict()
            sent = [np.count_nonzero(one) for one in first]
            density = [record.density for record in synchronizer.recorder.exchanges()]
            second = synchronizer.step(given)[0][0]
            later = [np.count_nonzero(one) for one in synchronizer.step(given)[0]]
            synchronizer.load_state_dict(state)
            assert second.tobytes() == synchronizer.step(given)[0][0].tobytes()
        assert 1 <= sent[0] <= RANKS
        assert (sent[1], density) == (7, [1.0, 1 / 400] if nbytes == 64 else [8 / 407])
        assert later[1] <= RANKS


def test_patterns_of_names_are_checked() -> None:
    parts = [BucketPart("parameter 1", 0, 4, (4,))]
    assert ExchangeSettings(compression=TopK(0.1), names=("first",)).names_of(parts) is None
    with pytest.raises(UsageError, match="parameter 1 has no name, of 1; give "):
        ExchangeSettings(compression=TopK({"*": 0.1}), names=("first",)).names_of(parts)
    zeros = [[np.zeros(5, np.float32), np.zeros(7, np.float32)] for _ in range(RANKS)]
    plan = forest_plan(RANKS, "allreduce", "chain")
    for density, message in (
        ({"0": 0.1}, r"parameter 1 must match a pattern of TopK, got '0'; add '\*' as the last one"),
        ({"*": 0.1, "0": 0.2}, "pattern '0' of TopK must match a parameter that no earlier pattern matches"),
        ({"weight": 0.1, "*": 0.2}, "pattern 'weight' of TopK must match .*, got none of 0, 1; leave it out"),
    ):
        with pytest.raises(UsageError, match=message):
            GradientSynchronizer(zeros, plan, backend="loopback", compression=TopK(density))
    for given, options, message in (
        ({}, {}, "densities by name must have a pattern, got none"),
        ({"*": 0.0}, {}, r"density of '\*' must be above 0 and at most 1, got 0.0"),
        ({3: 0.1}, {}, "patterns of TopK must be texts, got 3"),
        ({"*": 0.1}, {"per": "model"}, "densities by name select in each parameter, got per='model'"),
        ({"*": 0.1}, {"exchange": "tree"}, "exchange 'tree' selects by the shards of its plan"),
    ):
        with pytest.raises(UsageError, match=message):
            TopK(given, **options)  # type: ignore[arg-type]


def test_one_selection_over_the_model_is_that_of_one_bucket() -> None:
    """The two largest of all 407 elements lie in the second gradient, of 7 elements."""
    zeros = [[np.zeros((20, 20), np.float32), np.zeros(7, np.float32)] for _ in range(RANKS)]
    given = [[np.ones((20, 20), np.float32), np.arange(7, dtype=np.float32)] for _ in range(RANKS)]
    found: dict[str, list[int]] = {}
    for name, how, nbytes in (
        ("model", TopK(0.005, per="model"), 64),
        ("one bucket", TopK(0.005), 1 << 20),
        ("buckets", TopK(0.005), 64),
    ):
        plan = forest_plan(RANKS, "allreduce", "chain")
        with GradientSynchronizer(
            zeros, plan, backend="loopback", compression=how, bucket_bytes=nbytes
        ) as synchronizer:
            found[name] = [np.count_nonzero(one) for one in synchronizer.step(given)[0]]
    assert found == {"model": [0, 2], "one bucket": [0, 2], "buckets": [2, 1]}


def test_per_and_clip_are_checked_and_compared() -> None:
    assert f"{TopK(0.1)}" == "TopK(0.1, exchange='auto', momentum=0.0, wire=None)"
    assert f"{TopK(0.1, per='layer', clip=2.0)}".endswith("wire=None, per='layer', clip=2.0)")
    for options, message in (
        (
            {"per": "all"},
            "per of TopK must be bucket, layer or model, got 'all'; leave it out",
        ),
        ({"per": "layer", "exchange": "tree"}, "exchange 'tree' selects by the shards of its plan"),
        ({"clip": -1.0}, "clip of TopK must be a norm above 0, got -1.0"),
        ({"momentum": 5}, r"momentum must be in \[0, 1\), got 5"),
        ({"momentum": float("nan")}, r"momentum must be in \[0, 1\), got nan"),
        ({"momentum": "0.9"}, r"momentum must be in \[0, 1\), got '0.9'"),
        ({"exchange": "rings"}, "exchange 'rings' is unknown; use auto, dense, pairs"),
    ):
        with pytest.raises(UsageError, match=message):
            TopK(0.1, **options)


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
    dist = pytest.importorskip("torch.distributed", reason="torch is not installed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def hooked(**options: Any) -> list[bytes]:
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


@pytest.mark.sampled
@pytest.mark.thorough
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
        (
            {"density": 0.1},
            {"compression": Quantize(8)},
            "give compression or density, not both; density is the deprecated name",
        ),
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


@pytest.mark.parametrize(
    ("old", "text"),
    [
        ({"density": 0.01}, "(density=) is deprecated; write compression=TopK(0.01)"),
        ({"density": 0.01, "momentum": 0.9}, "write compression=TopK(0.01, momentum=0.9)"),
        ({"low_rank": 2}, "write compression=LowRank(2, matrices='bucket')"),
        ({"low_rank": LowRank(1, begins=0)}, "write compression=LowRank(1, begins=0)"),
        ({"compress": "float16"}, "write compression=Cast('float16')"),
        ({"mode": "local:8"}, "write sync='local:8'"),
        ({"on_failure": "shrink", "on_change": max}, "write fault_tolerance=Shrink(on_change=...)"),
        ({"on_failure": "raise"}, "write nothing, since ranks raise by default"),
    ],
)
def test_the_warning_of_an_earlier_keyword_has_its_value(old: dict[str, Any], text: str) -> None:
    with pytest.warns(DeprecationWarning, match=re.escape(text)):
        warn_of_deprecated("HookState", old)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_deprecated("HookState", old, quiet=True)


def test_a_compression_in_place_of_the_plan_is_refused_with_the_call_that_takes_it(gloo: None) -> None:
    from collectives.torch import HookState

    text = "TopK is a compression, not a plan; write HookState(compression=TopK(0.01))"
    with pytest.raises(UsageError, match=re.escape(text)) as caught:
        HookState(TopK(0.01))  # type: ignore[arg-type]
    assert caught.value.__cause__ is None
    with pytest.raises(
        UsageError, match=r"write GradientSynchronizer\(parameters, compression=Quantize\(8\)\)"
    ):
        GradientSynchronizer([np.zeros(3)], Quantize(8), backend="loopback")  # type: ignore[arg-type]


def test_density_1_as_a_percentage_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"density 1 sends all entries; 1 % is TopK\(0.01\)"):
        TopK(1)
    with pytest.warns(UserWarning, match=r"density 1 sends all entries") as seen:
        TopK({"bias*": 0.1, "*": 1})
    assert [one.filename for one in seen] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TopK(1.0)
        TopK({"bias*": 0.1, "*": 1.0})


def shares(step: int) -> float:
    return 0.5


COMPRESSIONS: tuple[Callable[[], Any], ...] = (
    lambda: TopK(0.5, wire=WireFormat(values="float16"), clip=1.0),
    lambda: TopK(shares, momentum=0.5),
    lambda: TopK({"a*": 0.5, "*": shares}),
    lambda: TopK({"*": shares, "a*": 0.5}),
    lambda: TopK("auto", per="model"),
    lambda: LowRank(3),
    lambda: Quantize(16),
    lambda: Threshold(0.5),
    lambda: CommonRows(0.5),
    lambda: Cast("float16"),
)


def test_equal_compressions_have_one_hash_and_other_ones_differ() -> None:
    """Densities by name differ if their order does, since the first pattern that matches holds."""
    made = [(one(), one()) for one in COMPRESSIONS]
    assert all(first == again and hash(first) == hash(again) for first, again in made)
    assert len({how for pair in made for how in pair}) == len(made)
    assert TopK(0.5) != 0.5
    assert pickle.loads(pickle.dumps(TopK({"*": 0.5}))) == TopK({"*": 0.5})


class Unhashable:
    """A density by function, and a value, without a hash."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, step: int) -> float:
        return 0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda odd: TopK(odd),
        lambda odd: TopK({"*": odd}),
        lambda odd: TopK(0.5, per=odd),
        lambda odd: TopK(0.5, wire=WireFormat(cache_keys=odd)),
        lambda odd: LowRank(2, feedback=odd),
        lambda odd: Quantize(odd),
        lambda odd: Quantize(8, seed=odd),
        lambda odd: Threshold(0.5, feedback=odd),
        lambda odd: CommonRows(0.5, feedback=odd),
    ],
)
def test_values_without_a_hash_are_refused_when_a_compression_is_made(make: Callable[[Any], Any]) -> None:
    for odd in (Unhashable(), [1], {1: 2}):
        with pytest.raises(UsageError, match="must be"):
            make(odd)


def test_cast_takes_types_of_torch_and_their_short_names() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    assert Cast(torch.float16) == Cast("fp16") == Cast("float16")
    assert Cast(torch.bfloat16) == Cast("bf16") == Cast("bfloat16")
    with pytest.raises(UsageError, match=r"dtype of Cast must be .*, got torch\.float32"):
        Cast(torch.float32)


def test_shrink_under_one_torchrun_is_warned_of_once(monkeypatch: pytest.MonkeyPatch, gloo: None) -> None:
    from collectives.torch.recovery import warn_of_launcher

    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "4")
    with pytest.warns(
        UserWarning, match="torchrun ends the survivors of a failed rank; start each rank by itself"
    ):
        warn_of_launcher(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_launcher(1)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        warn_of_launcher(0)


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

"""Rounds of an outer optimizer: known answers of DiLoCo and SparseLoCo, checkpoints, failures, warm-up, fragments."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import Cast, DiLoCo, GradientSynchronizer, LocalSGD, SparseLoCo
from collectives.training.checkpoint_state import pack_arrays, unpack_arrays
from collectives.training.exchange_settings import ExchangeSettings
from collectives.training.modes import OuterMode
from tests.support.hand_plans import forest_plan
from topoplan.errors import BackendError, UsageError

Arrays = list[list[NDArray[Any]]]

Slopes = Callable[[int, NDArray[Any]], NDArray[Any]]
"""Returns the gradient of a rank at its parameters."""


def made(weights: Arrays, mode: OuterMode | LocalSGD, **options: Any) -> GradientSynchronizer:
    plan = forest_plan(len(weights), "allreduce", "chain")
    return GradientSynchronizer(weights, plan, backend="loopback", sync=mode, **options)


def train(
    synchronizer: GradientSynchronizer, weights: Arrays, slope: Slopes, steps: int, *, rate: float
) -> None:
    """Plain SGD on every rank, in place."""
    for _ in range(steps):
        given = [[slope(rank, one) for one in mine] for rank, mine in enumerate(weights)]
        for mine, slopes in zip(weights, synchronizer.step(given), strict=True):
            for one, gradient in zip(mine, slopes, strict=True):
                one -= (rate * gradient).astype(one.dtype)
        synchronizer.after_step(weights)


def pulled(rank: int, one: NDArray[Any]) -> NDArray[Any]:
    """The gradient of (x - 4 rank)^2 / 2."""
    found: NDArray[Any] = one - one.dtype.type(4 * rank)
    return found


def diloco_in_fractions(rate: Fraction, momentum: Fraction, rounds: int) -> list[Fraction]:
    """x = 8, losses (x - 0)^2 / 2 and (x - 4)^2 / 2, two inner steps of SGD with rate 1/2."""
    start, held, found = Fraction(8), Fraction(0), []
    for _ in range(rounds):
        ends = []
        for target in (0, 4):
            x = start
            for _ in range(2):
                x -= (x - target) / 2
            ends.append(x)
        moved = start - sum(ends, Fraction(0)) / 2
        held = momentum * held + moved
        start -= rate * (moved + momentum * held)
        found.append(start)
    return found


def test_the_known_answer_of_diloco() -> None:
    """Computed with fractions; in float64 to the last bits, and bit for bit if rate and momentum are dyadic."""
    known = diloco_in_fractions(Fraction(7, 10), Fraction(9, 10), 3)
    assert known == [Fraction(403, 200), Fraction(-44117, 80000), Fraction(-9891437, 32000000)]
    dyadic = diloco_in_fractions(Fraction(3, 4), Fraction(1, 2), 3)
    for mode, wanted, near in (
        (DiLoCo(period=2), known, 1e-15),
        (DiLoCo(period=2, outer_rate=0.75, outer_momentum=0.5), dyadic, 0.0),
    ):
        weights = [[np.array([8.0])] for _ in range(2)]
        with made(weights, mode) as synchronizer:
            for one in wanted:
                train(synchronizer, weights, pulled, 2, rate=0.5)
                assert weights[0][0] == weights[1][0]
                assert abs(weights[0][0][0] - float(one)) <= near


@pytest.mark.thorough  # loads torch
@pytest.mark.parametrize("nesterov", [True, False])
def test_diloco_is_sgd_of_torch_on_what_ranks_have_moved(nesterov: bool) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    draw = np.random.default_rng(1)
    first = draw.standard_normal((3, 5))
    weights = [[first.copy()] for _ in range(3)]
    outer = torch.nn.Parameter(torch.from_numpy(first.copy()))
    optimizer = torch.optim.SGD([outer], lr=0.6, momentum=0.8, nesterov=nesterov)
    mode = DiLoCo(period=3, outer_rate=0.6, outer_momentum=0.8, nesterov=nesterov)
    with made(weights, mode) as synchronizer:
        for _ in range(4):
            before = outer.detach().numpy().copy()
            ends = [before.copy() for _ in range(3)]
            for rank, one in enumerate(ends):
                for _ in range(3):
                    one -= 0.25 * pulled(rank, one)
            outer.grad = torch.from_numpy(before - sum(ends) / 3)
            optimizer.step()
            train(synchronizer, weights, pulled, 3, rate=0.25)
            np.testing.assert_allclose(weights[2][0], outer.detach().numpy(), rtol=1e-13, atol=1e-14)


MOVED = ((4, 2, 1, 0), (-1, 3, 2, 1))
"""The moves of two ranks in every round."""


def sparse_loco_in_fractions(divisor: str, rounds: int) -> list[list[Fraction]]:
    theta, kept, found = [Fraction(0)] * 4, [[Fraction(0)] * 4 for _ in MOVED], []
    for _ in range(rounds):
        sums, senders = [Fraction(0)] * 4, [0] * 4
        for mine, moved in zip(kept, MOVED, strict=True):
            mine[:] = [one / 2 + more for one, more in zip(mine, moved, strict=True)]
            sizes = [abs(one) for one in mine]
            index = sizes.index(max(sizes))
            sums[index] += mine[index]
            senders[index] += 1
            mine[index] = Fraction(0)
        theta = [
            one - total / (2 if divisor == "all" else max(count, 1))
            for one, total, count in zip(theta, sums, senders, strict=True)
        ]
        found.append(theta)
    return found


@pytest.mark.parametrize("divisor", ["all", "senders"])
def test_the_known_answer_of_sparse_loco(divisor: str) -> None:
    """By the paper's divisor, all ranks, and that of the code, the ranks that sent an index: exact in float64."""
    known = sparse_loco_in_fractions(divisor, 4)
    if divisor == "all":
        assert known == [
            [-2, Fraction(-3, 2), 0, 0],
            [-4, -3, 0, 0],
            [-6, -3, Fraction(-7, 4), 0],
            [-8, Fraction(-21, 4), Fraction(-7, 4), 0],
        ]
    weights = [[np.zeros(4)] for _ in MOVED]
    mode = SparseLoCo(period=1, k=1, chunk=4, decay=0.5, bits=None, divisor=divisor)
    with made(weights, mode) as synchronizer:
        for one in known:
            train(synchronizer, weights, lambda rank, _: np.array(MOVED[rank], dtype=float), 1, rate=1.0)
            assert weights[0][0].tolist() == weights[1][0].tolist() == [float(x) for x in one]


def test_what_sparse_loco_does_not_send_stays_in_the_residual_after_rounding() -> None:
    """With decay 1 and rate 1: what all moved = what the start moved times ranks + all residuals, with 2 bits too."""
    draw = np.random.default_rng(3)
    weights = [[np.zeros((30, 7)), np.zeros(11)] for _ in range(3)]
    total = [np.zeros((30, 7)), np.zeros(11)]
    with made(weights, SparseLoCo(period=2, k=3, chunk=16, decay=1.0)) as synchronizer:
        for _ in range(6):
            slopes = [[draw.standard_normal(one.shape) for one in mine] for mine in weights]
            for mine, averages in zip(weights, synchronizer.step(slopes), strict=True):
                for one, sum_of, gradient in zip(mine, total, averages, strict=True):
                    one -= gradient
                    sum_of += gradient
            synchronizer.after_step(weights)
        kept = synchronizer.state_dict()["outer"]["residuals"]
        norm = np.sqrt(sum((one**2).sum() for held in kept.values() for one in held))
        assert synchronizer._averager.norm_kept() == pytest.approx(norm)
    for place, one in enumerate(total):
        owed = sum(kept[f"{place}"]).reshape(one.shape)
        np.testing.assert_allclose(-3 * weights[0][place] + owed, one, atol=1e-12)
        assert weights[0][place].tobytes() == weights[2][place].tobytes()


MODES: dict[str, OuterMode] = {
    "diloco": DiLoCo(period=3),
    "streaming": DiLoCo(period=4, fragments=2, delay=3, alpha=0.25),
    "warm-up": DiLoCo(period=2, warm_up=3),
    "sparse": SparseLoCo(period=3, k=2, chunk=8),
}


def first_weights(ranks: int = 2, dtype: str = "float32") -> Arrays:
    draw = np.random.default_rng(5)
    given = [draw.standard_normal(shape).astype(dtype) for shape in ((4, 3), (9,), (2, 2, 2))]
    return [[one.copy() for one in given] for _ in range(ranks)]


@pytest.mark.parametrize("name", sorted(MODES))
@pytest.mark.parametrize("stop", [4, 6, 7])
def test_a_restored_run_continues_bit_for_bit_within_a_round_and_a_delay(name: str, stop: int) -> None:
    mode, whole, parts = MODES[name], first_weights(), first_weights()
    with made(whole, mode) as synchronizer:
        train(synchronizer, whole, pulled, 14, rate=0.1)
    with made(parts, mode) as synchronizer:
        train(synchronizer, parts, pulled, stop, rate=0.1)
        state = synchronizer.state_dict()
    with made(parts, mode) as synchronizer:
        synchronizer.load_state_dict(state)
        train(synchronizer, parts, pulled, 14 - stop, rate=0.1)
        assert as_bytes(parts) == as_bytes(whole)
        synchronizer.finish(parts)
    assert as_bytes(parts)[0] == as_bytes(parts)[1]


def as_bytes(weights: Arrays) -> list[list[bytes]]:
    return [[one.tobytes() for one in mine] for mine in weights]


def test_a_state_is_not_taken_for_one_of_another_mode() -> None:
    states = []
    for mode in (DiLoCo(period=2), LocalSGD(2)):
        with made(first_weights(), mode) as synchronizer:
            train(synchronizer, first_weights(), pulled, 2, rate=0.1)
            states.append(synchronizer.state_dict())
    with made(first_weights(), LocalSGD(2)) as synchronizer:
        with pytest.warns(UserWarning, match="momentum of an outer optimizer of the checkpoint are not used"):
            synchronizer.load_state_dict(states[0])
        with pytest.raises(
            UsageError, match="a list of states must be of one job with another number of ranks"
        ):
            synchronizer.load_state_dict(states)
    other = made(first_weights(), DiLoCo(period=2))
    with other, pytest.raises(UsageError, match="saved in another mode than DiLoCo"):
        other.load_state_dict(states[1])


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_keeps_the_mean_residual_and_the_start(ranks: int) -> None:
    """Two ranks with residuals 4 and 0 become three with 2 each; momentum and start are as before."""
    weights = [[np.array([0.0, 9.0])] for _ in range(2)]
    mode = SparseLoCo(period=1, k=1, chunk=2, bits=None, decay=1.0)
    with made(weights, mode) as synchronizer:
        train(synchronizer, weights, lambda rank, one: np.array([4.0 - 4 * rank, 8.0]), 1, rate=1.0)
        state = synchronizer.state_dict()
    assert [one.tolist() for one in state["outer"]["residuals"]["0"]] == [[4, 0], [0, 0]]
    fresh = [[weights[0][0].copy()] for _ in range(ranks)]
    with made(fresh, mode) as synchronizer:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            synchronizer.load_state_dict(state)
        found = synchronizer.state_dict()["outer"]
        assert [one.tolist() for one in found["residuals"]["0"]] == [[2, 0]] * ranks
        train(synchronizer, fresh, lambda _, one: np.zeros(2), 1, rate=1.0)
    assert [mine[0].tolist() for mine in fresh] == [[-2, 1]] * ranks
    one_of_two = {
        **state,
        "held": [1],
        "outer": {**state["outer"], "residuals": {"0": [np.array([0.0, 6.0])]}},
    }
    with made([[one[0].copy()] for one in fresh], mode) as synchronizer:
        with pytest.warns(UserWarning, match="residuals of saved ranks 0"):
            synchronizer.load_state_dict(one_of_two)
        assert synchronizer.state_dict()["outer"]["residuals"]["0"][0].tolist() == [0, 3]


@pytest.mark.parametrize("mode", [DiLoCo(period=2), SparseLoCo(period=2, k=1, chunk=4)], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_round_that_is_not_finite_puts_back_the_start_on_all_ranks(mode: OuterMode, bad: float) -> None:
    weights = first_weights()
    with made(weights, mode) as synchronizer:
        train(synchronizer, weights, pulled, 2, rate=0.1)
        before, state = as_bytes(weights), synchronizer.state_dict()["outer"]
        train(synchronizer, weights, pulled, 1, rate=0.1)
        with pytest.warns(
            UserWarning, match="the round of .* after training step 3 is not finite on some rank"
        ):
            train(synchronizer, weights, lambda rank, one: np.full_like(one, bad if rank else 1), 1, rate=0.1)
        assert as_bytes(weights) == before
        after = synchronizer.state_dict()["outer"]
        for part in ("momentum", "residuals", "start"):
            assert str(state[part]) == str(after[part])
        train(synchronizer, weights, pulled, 2, rate=0.1)
        assert all(np.isfinite(one).all() for mine in weights for one in mine)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_round_whose_exchange_fails_puts_back_the_start(
    monkeypatch: pytest.MonkeyPatch, delay: int
) -> None:
    """And the next round, which succeeds, is that of the start, with the momentum from before."""
    weights, mode = first_weights(), DiLoCo(period=3, delay=delay)
    with made(weights, mode) as synchronizer:
        before = as_bytes(weights)
        train(synchronizer, weights, pulled, 2, rate=0.1)

        def fails(*_: Any, **__: Any) -> Any:
            raise BackendError("the link is cut", rank=0, peer=1, step=0)

        with monkeypatch.context() as patch:
            patch.setattr(synchronizer.communicator, "all_reduce", fails)
            with pytest.raises(BackendError, match="the link is cut"):
                train(synchronizer, weights, pulled, 1, rate=0.1)
        assert as_bytes(weights) == before
        assert synchronizer.state_dict()["outer"]["momentum"] == {}
        train(synchronizer, weights, pulled, 3 + delay, rate=0.1)
    fresh = first_weights()
    with made(fresh, mode) as synchronizer:
        train(synchronizer, fresh, pulled, 3 + delay, rate=0.1)
    assert as_bytes(weights) == as_bytes(fresh)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_rank_that_joins_gets_start_and_momentum_and_what_is_not_compared_yet(steps: int) -> None:
    weights, fresh = first_weights(), first_weights()
    with made(weights, DiLoCo(period=3)) as synchronizer:
        train(synchronizer, weights, pulled, steps, rate=0.1)
        given = unpack_arrays(pack_arrays(synchronizer._common()))
        held = synchronizer.state_dict()["outer"]
    with made(fresh, DiLoCo(period=3)) as synchronizer:
        synchronizer._take_common(given)
        found = synchronizer.state_dict()["outer"]
        assert sorted(given["kept unchecked"].tolist()) == ([] if steps else ["0", "1", "2"])
    for part in ("start", "momentum", "count"):
        assert str(found[part]) == str(held[part])


def test_warm_up_averages_gradients_and_the_first_round_starts_behind_it() -> None:
    """Three steps of warm-up are those of one model with the mean gradient."""
    weights = [[np.array([8.0])] for _ in range(2)]
    with made(weights, DiLoCo(period=2, warm_up=3)) as synchronizer:
        x = 8.0
        for _ in range(3):
            train(synchronizer, weights, pulled, 1, rate=0.25)
            x -= 0.25 * (x - 2)
            assert [mine[0][0] for mine in weights] == [x, x]
        train(synchronizer, weights, pulled, 2, rate=0.25)
        moved = x - ((x - 2) * 0.75**2 + 2)
        assert weights[0][0][0] == weights[1][0][0] == pytest.approx(x - 0.7 * 1.9 * moved, rel=1e-15)
        assert len(synchronizer.recorder.exchanges()) == 4


def test_fragments_take_turns_and_a_delayed_result_is_mixed() -> None:
    """Two parameters of one element, H = 4: the first has rounds after steps 2, 6, ..., the second after 4, 8, ...

    With a delay of 1 the outer step of what was moved until step 2 is used after step 3, mixed with the rank's own.
    """
    mode = DiLoCo(period=4, outer_rate=1.0, outer_momentum=0.0, fragments=2, delay=1, alpha=0.5)
    weights = [[np.zeros(1), np.zeros(1)] for _ in range(2)]
    own, start = np.zeros((2, 2)), np.zeros(2)
    with made(weights, mode) as synchronizer:
        sent: dict[int, float] = {}
        for step in range(1, 12):
            train(synchronizer, weights, lambda rank, _: np.full(1, -1.0 - rank), 1, rate=1.0)
            own += [[1.0], [2.0]]
            for part, first in ((0, 2), (1, 4)):
                if step in sent and step % 4 == (first + 1) % 4:
                    start[part] = sent[step]
                    own[:, part] = (own[:, part] + start[part]) / 2
                if step % 4 == first % 4:
                    sent[step + 1] = own[:, part].mean()
            assert [[one[0] for one in mine] for mine in weights] == own.tolist()
        assert str(synchronizer.recorder.exchanges()[0].how) == "outer step"


def test_ranks_that_begin_with_other_parameters_are_refused() -> None:
    weights = first_weights(3)
    weights[2][1][4] += 1
    text = r"the same on all ranks .* rank 2 has others than rank 0; broadcast"
    with made(weights, DiLoCo(period=5)) as synchronizer, pytest.raises(UsageError, match=text):
        train(synchronizer, weights, pulled, 1, rate=0.1)


@pytest.mark.parametrize("dtype", ["float16", "float64", "complex64"])
def test_parameters_of_every_float_type_have_rounds(dtype: str) -> None:
    """Parameters of 16 bits move on from a start in float32: nothing that they cannot hold is lost."""
    weights = [[np.array([1.0, 2.0], dtype=dtype)] for _ in range(2)]
    with made(weights, DiLoCo(period=1, outer_rate=2.0**-12, outer_momentum=0.0)) as synchronizer:
        train(synchronizer, weights, lambda _, one: np.ones_like(one), 64, rate=1.0)
    assert weights[0][0].dtype == dtype
    np.testing.assert_allclose(weights[1][0].real, [1 - 2.0**-6, 2 - 2.0**-6], rtol=1e-6)
    with pytest.raises(UsageError, match="DiLoCo needs float or complex parameters, got int64"):
        made([[np.zeros(2, dtype=np.int64)] for _ in range(2)], DiLoCo(period=1))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DiLoCo(period=0), "period must be a whole number of 1 or more, got 0"),
        (lambda: DiLoCo(period=2, fragments=3), "fragments must be a whole number from 1 to 2"),
        (lambda: DiLoCo(period=2, delay=2), "delay must be a whole number from 0 to 1"),
        (lambda: DiLoCo(period=2, alpha=1.0), "alpha must be a finite number from 0 to below 1, got 1.0"),
        (lambda: DiLoCo(period=2, outer_momentum=1.0), "outer_momentum must be a finite number from 0"),
        (
            lambda: DiLoCo(period=2, outer_rate=float("nan")),
            "outer_rate must be a finite number of 0 or more",
        ),
        (lambda: SparseLoCo(period=2, k=9, chunk=8), "k must be a whole number from 1 to 8"),
        (lambda: SparseLoCo(period=2, bits=8), "bits must be 2, or None"),
        (lambda: SparseLoCo(period=2, divisor="mean"), "divisor must be 'all' or 'senders'"),
        (lambda: SparseLoCo(period=2, decay=1.5), "decay must be a number from 0 to 1"),
    ],
)
def test_settings_out_of_range_are_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make()


def test_a_start_that_the_parameters_cannot_hold_is_put_back_though_own_values_are_mixed_in() -> None:
    """60000 + 1000 * 48 is above what float16 holds: the round ends with 60000, not with half of the own 60032."""
    weights = [[np.full(1, 60_000, dtype=np.float16)] for _ in range(2)]
    mode = DiLoCo(period=1, outer_rate=1e3, outer_momentum=0.0, alpha=0.5)
    with made(weights, mode) as synchronizer, pytest.warns(UserWarning, match="parameters are as before"):
        train(synchronizer, weights, lambda rank, one: np.full_like(one, -32 * (1 + rank)), 1, rate=1.0)
    assert [mine[0].tolist() for mine in weights] == [[60_000.0]] * 2


@pytest.mark.parametrize(
    ("saved", "now", "lost"),
    [
        (SparseLoCo(period=1, k=1, chunk=4), DiLoCo(period=2), "outer residuals"),
        (DiLoCo(period=1), SparseLoCo(period=2), "outer momentum"),
    ],
    ids=["residuals", "momentum"],
)
def test_what_another_outer_mode_has_no_use_for_is_listed(
    saved: OuterMode, now: OuterMode, lost: str
) -> None:
    weights = first_weights()
    with made(weights, saved) as synchronizer:
        train(synchronizer, weights, pulled, 2, rate=0.1)
        state = synchronizer.state_dict()
    with made(weights, now) as synchronizer:
        with pytest.warns(UserWarning, match=lost):
            synchronizer.load_state_dict(state)
        kept = synchronizer.state_dict()["outer"]
    assert not kept[lost.removeprefix("outer ")]


def test_a_round_in_flight_is_not_applied_by_another_outer_mode() -> None:
    """A delayed round of DiLoCo, of rate 0.7 and with momentum, would move the start of SparseLoCo at rate 1."""
    weights, mode = first_weights(), DiLoCo(period=2, delay=1)
    with made(weights, mode) as synchronizer:
        train(synchronizer, weights, pulled, 2, rate=0.1)
        flying = synchronizer.state_dict()
        train(synchronizer, weights, pulled, 1, rate=0.1)
        landed = synchronizer.state_dict()
    with made(weights, SparseLoCo(period=2)) as synchronizer:
        before = synchronizer.state_dict()["outer"]["count"]
        with pytest.raises(
            UsageError, match=r"has a round of DiLoCo\(.* in flight, which SparseLoCo cannot use"
        ):
            synchronizer.load_state_dict(flying)
        assert synchronizer.state_dict()["outer"]["count"] == before
        with pytest.warns(UserWarning, match="outer momentum"):
            synchronizer.load_state_dict(landed)
    with made(weights, DiLoCo(period=2, outer_rate=0.5)) as synchronizer:
        synchronizer.load_state_dict(flying)  # the same kind: its own rate is used
        assert synchronizer.state_dict()["outer"]["rounds"]


@pytest.mark.parametrize("mode", [DiLoCo(period=1), SparseLoCo(period=1)], ids=str)
def test_parameters_without_elements_have_rounds_and_long_ones_are_refused(mode: OuterMode) -> None:
    weights = [[np.zeros(0)] for _ in range(2)]
    with made(weights, mode) as synchronizer:
        train(synchronizer, weights, pulled, 2, rate=0.1)
    with pytest.raises(UsageError, match="needs float or complex parameters, got float128"):
        made([[np.zeros(2, dtype=np.longdouble)] for _ in range(2)], mode)


@pytest.mark.parametrize("mode", [LocalSGD(2), DiLoCo(period=2), SparseLoCo(period=2)], ids=str)
def test_no_gradient_is_rounded_where_none_is_exchanged(mode: OuterMode | LocalSGD) -> None:
    with pytest.raises(UsageError, match="compression Cast needs steps that wait for all ranks"):
        ExchangeSettings(compression=Cast("float16"), mode=mode)

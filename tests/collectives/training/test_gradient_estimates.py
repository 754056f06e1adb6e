"""EF21-M against its algorithm in fractions, and what becomes of its state: restarts, loss scales, overflows."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import GradientSynchronizer, LowRank, Shrink, TopK
from tests.support.hand_plans import forest_plan
from topoplan.errors import UsageError

SIZE = 12

Step = list[list[NDArray[Any]]]


def made(ranks: int, how: Any, dtype: str = "float64", **options: Any) -> GradientSynchronizer:
    zeros = [[np.zeros(SIZE - 4, dtype), np.zeros(4, dtype)] for _ in range(ranks)]
    plan = forest_plan(ranks, "allreduce", "chain")
    return GradientSynchronizer(zeros, plan, backend="loopback", compression=how, **options)


def steps_of(ranks: int, count: int, dtype: str = "float64") -> list[Step]:
    """Whole numbers of 14 bits without ties, so that few steps with dyadic momenta round nothing."""
    draw = np.random.default_rng(7)
    return [
        [[draw.integers(-9999, 10000, size).astype(dtype) for size in (SIZE - 4, 4)] for _ in range(ranks)]
        for _ in range(count)
    ]


def in_fractions(steps: list[list[list[int]]], eta: Fraction, k: int) -> list[list[Fraction]]:
    """The algorithm as the paper writes it: v, what the others know of it, and the mean of what is sent."""
    ranks, size = len(steps[0]), len(steps[0][0])
    v = [[Fraction(0)] * size for _ in range(ranks)]
    known = [[Fraction(0)] * size for _ in range(ranks)]
    estimate, found = [Fraction(0)] * size, []
    for step in steps:
        for rank, gradient in enumerate(step):
            v[rank] = [(1 - eta) * old + eta * g for old, g in zip(v[rank], gradient, strict=True)]
            rest = [one - other for one, other in zip(v[rank], known[rank], strict=True)]
            for place in sorted(range(size), key=lambda at: (-abs(rest[at]), at))[:k]:
                known[rank][place] += rest[place]
                estimate[place] += rest[place] / ranks
        found.append(list(estimate))
    return found


def test_the_known_answer_of_two_ranks() -> None:
    """Gradients (4, 2) and (-1, 3) in each step, eta 1/2, one entry: worked out by hand.

    v0 = (2, 1), v1 = (-1/2, 3/2): 2 and 3/2 are sent. Then v0 = (3, 3/2) owes (1, 3/2), and v1 = (-3/4, 9/4) owes
    (-3/4, 3/4): ties go to the first.
    """
    wanted = [[Fraction(1), Fraction(3, 4)], [Fraction(5, 8), Fraction(3, 2)]]
    assert in_fractions([[[4, 2], [-1, 3]]] * 2, Fraction(1, 2), 1) == wanted
    zeros = [[np.zeros(2)] for _ in range(2)]
    plan = forest_plan(2, "allreduce", "chain")
    with GradientSynchronizer(
        zeros, plan, backend="loopback", compression=TopK(0.5, ef21=0.5, exchange="pairs")
    ) as one:
        for answer in wanted:
            found = one.step([[np.array([4.0, 2.0])], [np.array([-1.0, 3.0])]])
            assert all([Fraction(value) for value in mine[0]] == answer for mine in found)


@pytest.mark.parametrize("eta", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("exchange", ["pairs", "hashed"])
def test_estimates_are_those_of_the_algorithm_in_fractions(eta: float, exchange: str) -> None:
    steps = steps_of(4, 6)
    lines = [[[int(value) for part in mine for value in part] for mine in step] for step in steps]
    wanted = in_fractions(lines, Fraction(eta), 3)
    with made(4, TopK(0.25, ef21=eta, exchange=exchange, per="model")) as synchronizer:
        for step, answer in zip(steps, wanted, strict=True):
            found = synchronizer.step(step)
            for mine in found:
                assert [Fraction(value) for part in mine for value in part] == answer


def test_all_entries_without_memory_are_the_average_of_every_step() -> None:
    with made(3, TopK(1.0, ef21=1.0), "float32") as synchronizer:
        for step in steps_of(3, 4, "float32"):
            found = synchronizer.step(step)
            for place, one in enumerate(found[2]):
                np.testing.assert_allclose(one, sum(mine[place] for mine in step) / 3, rtol=1e-5, atol=1e-4)


def test_a_constant_gradient_is_known_in_the_end_though_few_entries_travel() -> None:
    (step,) = steps_of(2, 1)
    with made(2, TopK(0.1, ef21=0.5)) as synchronizer:
        for _ in range(80):
            found = synchronizer.step(step)
    for place, one in enumerate(found[0]):
        np.testing.assert_allclose(one, (step[0][place] + step[1][place]) / 2, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_restart_a_loss_scale_and_a_skipped_step_change_no_bit(bad: float) -> None:
    steps, scale = steps_of(3, 6, "float32"), 1.0

    def present() -> float:
        return scale

    how = TopK(0.2, ef21=0.5)
    with made(3, how, "float32") as one, made(3, how, "float32", loss_scale=present) as other:
        for number, step in enumerate(steps):
            scale = 2.0 ** (10 - number)
            if number == 3:
                broken = [[part.copy() for part in mine] for mine in step]
                broken[1][0][2] = bad
                seen = other.step(broken)
                assert not all(np.isfinite(part).all() for part in seen[0])
                state = other.state_dict()
                with made(3, how, "float32", loss_scale=present) as third:
                    third.load_state_dict(state)
                    again = third.step([[part * np.float32(scale) for part in mine] for mine in step])
            wanted = one.step(step)
            found = other.step([[part * np.float32(scale) for part in mine] for mine in step])
            if number == 3:
                assert all(np.array_equal(a, b) for a, b in zip(again[0], found[0], strict=True))
            for a, b in zip(wanted[0], found[0], strict=True):
                assert np.array_equal(a, b / np.float32(scale)), number


def test_an_estimate_beyond_float16_restores_the_residual_too() -> None:
    """A larger loss scale: the changes are finite, and what an estimate has kept is not in the new units."""
    scale = 1.0
    with made(2, TopK(0.2, ef21=1.0), "float16", loss_scale=lambda: scale) as synchronizer:
        large = [[np.full(size, 60000, np.float16) for size in (SIZE - 4, 4)] for _ in range(2)]
        for _ in range(8):
            found = synchronizer.step(large)
        assert all((one == 60000).all() for one in found[0])
        before, scale = synchronizer.state_dict(), 2.0
        found = synchronizer.step([[one / np.float16(4) for one in mine] for mine in large])
        assert not all(np.isfinite(one).all() for one in found[0])
        after = synchronizer.state_dict()
        for kind in ("residuals", "arrays"):
            for name, kept in before["filters"][kind].items():
                assert np.array_equal(kept[0], after["filters"][kind][name][0])
        for name, (kept, _) in before["residuals"].items():
            assert np.array_equal(kept["residual"], after["residuals"][name][0]["residual"])


def test_estimates_and_plain_residuals_are_not_taken_for_each_other() -> None:
    states = {}
    settings = {"ef21": TopK(0.2, ef21=0.5), "plain": TopK(0.2), "dense": None}
    for name, how in settings.items():
        with made(2, how) as synchronizer:
            synchronizer.step(steps_of(2, 1)[0])
            states[name] = synchronizer.state_dict()
    cases: list[tuple[Any, str, str]] = [
        (TopK(0.2), "ef21", r"must be of no EF21-M, got EF21-M\(0.5\)"),
        (TopK(0.2, ef21=0.25), "ef21", r"must be of EF21-M\(0.25\), got EF21-M\(0.5\)"),
        (TopK(0.2, ef21=0.5), "plain", r"must be of EF21-M\(0.5\), got residuals of TopK without it"),
        (LowRank(1), "ef21", "must be of no EF21-M"),
    ]
    for how, name, text in cases:
        with made(2, how) as synchronizer, pytest.raises(UsageError, match=text):
            synchronizer.load_state_dict(states[name])
    with made(3, TopK(0.2, ef21=0.5)) as synchronizer, pytest.warns(UserWarning, match="of 2 ranks"):
        synchronizer.load_state_dict(states["ef21"])
    first, second = steps_of(2, 2)
    with made(2, TopK(0.2, ef21=0.5)) as synchronizer:
        begun = [one.tobytes() for one in synchronizer.step(first)[0]]
    with made(2, TopK(0.2, ef21=0.5)) as synchronizer:
        synchronizer.step(second)
        synchronizer.load_state_dict(states["dense"])  # estimates begin at zero, whatever there was before
        assert [one.tobytes() for one in synchronizer.step(first)[0]] == begun


def test_what_ef21_cannot_have_is_refused() -> None:
    for options, text in (
        ({"ef21": 0.0}, "ef21 of TopK must be a momentum above 0 and at most 1, got 0.0"),
        ({"ef21": math.nan}, "ef21 of TopK must be a momentum above 0"),
        ({"ef21": "0.1"}, "ef21 of TopK must be a momentum above 0"),
        ({"ef21": 0.1, "momentum": 0.9}, "ef21 has a momentum of its own"),
        ({"ef21": 0.1, "clip": 1.0}, "ef21 has a momentum of its own"),
    ):
        with pytest.raises(UsageError, match=text):
            TopK(0.1, **options)
    assert str(TopK(0.1, ef21=1)) == str(TopK(0.1, ef21=1.0))  # ranks and checkpoints compare texts
    with (
        made(2, TopK(0.1, ef21=0.1)) as synchronizer,
        pytest.raises(UsageError, match="ef21 keeps what the others have sent; leave one out"),
        synchronizer.join(use=lambda averages: None),
    ):
        pass
    with pytest.raises(UsageError, match="keeps what failed ranks have sent"):
        made(2, TopK(0.1, ef21=0.1), fault_tolerance=Shrink())

"""Residuals of one parameter from two places: nothing of either is lost."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.thorough

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


def test_residuals_of_one_parameter_add_up_with_their_velocities() -> None:
    from collectives.torch.parameter_residuals import ParameterResidual

    moving = ParameterResidual(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    at_rest = ParameterResidual(torch.tensor([10.0, 20.0]))
    for both in (moving.plus(at_rest), at_rest.plus(moving)):
        assert both.residual.tolist() == [11.0, 22.0]
        assert both.velocity is not None
        assert both.velocity.tolist() == [3.0, 4.0]
    twice = moving.plus(moving)
    assert twice.velocity is not None
    assert (twice.residual.tolist(), twice.velocity.tolist()) == ([2.0, 4.0], [6.0, 8.0])

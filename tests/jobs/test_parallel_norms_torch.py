"""LARS and LAMB for torch: formulas and refusals; the ranks that share norms are in `parallel_norms_ranks.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives import Communicator
from collectives.training import optimizers
from tests.support.hand_plans import forest_plan
from topoplan.errors import UsageError

pytestmark = pytest.mark.thorough

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

SHAPES = ((8, 3, 3, 3), (8,), (), (0, 4), (50, 7))
PAIRS: dict[str, Any] = {
    "lars": (
        lambda: optimizers.Lars(0.5, coefficient=0.01, weight_decay=[1e-3] * 4 + [0.0], excluded=[1]),
        {"lr": 0.5, "coefficient": 0.01, "weight_decay": 1e-3},
    ),
    "lamb": (
        lambda: optimizers.Lamb(0.01, weight_decay=[0.02] * 4 + [0.0], excluded=[1]),
        {"lr": 0.01, "weight_decay": 0.02},
    ),
}


@pytest.mark.parametrize("method", PAIRS)
def test_torch_and_numpy_take_the_same_steps_to_rounding(method: str) -> None:
    from collectives.torch.optimizers import Lamb, Lars

    make, options = PAIRS[method]
    generator = np.random.default_rng(2)
    weights = [np.asarray(generator.standard_normal(shape)) for shape in SHAPES]
    tensors = [torch.nn.Parameter(torch.from_numpy(w.copy())) for w in weights]
    groups = [
        {"params": [tensors[0]]},
        {"params": [tensors[1]], "adapt": False},
        {"params": tensors[2:4]},
        {"params": [tensors[4]], "weight_decay": 0.0},
    ]
    plain, tensor_wise = make(), {"lars": Lars, "lamb": Lamb}[method](groups, **options)
    for _ in range(10):
        gradients = [np.asarray(generator.standard_normal(shape)) for shape in SHAPES]
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = torch.from_numpy(gradient)
        plain.step(weights, gradients)
        tensor_wise.step()
    for found, wanted in zip(tensors, weights, strict=True):
        np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Lars", {"lr": -1.0}, "lr must be 0 or more, got -1.0"),
        ("Lars", {"lr": 0.1, "momentum": 1.0}, "above 0, such as 0.001, got 1.0 and 0.001"),
        ("Lamb", {"lr": 0.1, "betas": (0.9, 1.5)}, r"such as 1e-6, got \(0.9, 1.5\) and 1e-06"),
        ("Lamb", {"lr": 0.1, "weight_decay": float("inf")}, "weight_decay must be 0 or more, got inf"),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    from collectives.torch import optimizers

    with pytest.raises(UsageError, match=message):
        getattr(optimizers, name)([torch.nn.Parameter(torch.ones(2))], **options)
    optimiser = optimizers.Lars([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(UsageError, match="lr must be 0 or more, got -2"):
        optimiser.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": -2})
    assert len(optimiser.param_groups) == 1


def test_several_ranks_in_a_process_and_sparse_gradients_are_refused() -> None:
    from collectives.torch.optimizers import Lamb

    parameter = torch.nn.Parameter(torch.ones(3, 3))
    with (
        Communicator(forest_plan(2, "allreduce", "chain")) as comm,
        pytest.raises(
            UsageError, match="needs a process for each rank, and the loopback back end has several"
        ),
    ):
        Lamb([parameter], lr=0.1, communicator=comm)
    parameter.grad = torch.eye(3).to_sparse()
    with pytest.raises(UsageError, match=r"has a gradient of layout torch\.sparse_coo"):
        Lamb([parameter], lr=0.1).step()
    assert parameter.tolist() == [[1.0] * 3] * 3


def test_the_closure_is_called_with_gradients_and_its_loss_returned() -> None:
    from collectives.torch.optimizers import Lars

    parameter = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    optimiser = Lars([parameter], lr=1.0, coefficient=0.1)

    def closure() -> Any:
        optimiser.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimiser.step(closure).item() == 25.0
    # the gradient is twice the weights, so the rate is 0.1 / 2
    np.testing.assert_allclose(parameter.tolist(), [2.7, 3.6], rtol=1e-6)


@pytest.mark.parametrize("name", ["Lars", "Lamb"])
@pytest.mark.parametrize("conjugated", [False, True])
def test_a_complex_parameter_moves_as_its_real_and_imaginary_parts(name: str, conjugated: bool) -> None:
    from collectives.torch import optimizers

    torch.manual_seed(0)
    first = torch.randn(5, 4, dtype=torch.complex128)
    whole = torch.nn.Parameter(first.conj().resolve_conj().conj() if conjugated else first.clone())
    parts = torch.nn.Parameter(torch.view_as_real(first).clone())
    movers = [getattr(optimizers, name)([one], lr=0.1, weight_decay=0.1) for one in (whole, parts)]
    for _ in range(4):
        gradient = torch.randn(5, 4, dtype=torch.complex128)
        whole.grad, parts.grad = gradient, torch.view_as_real(gradient).clone()
        for mover in movers:
            mover.step()
    assert whole.is_conj() == conjugated
    assert torch.allclose(torch.view_as_real(whole.detach().resolve_conj()), parts.detach(), rtol=1e-14)

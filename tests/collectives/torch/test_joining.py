"""A process that joins has models and optimizers like those of the others."""

from __future__ import annotations

import torch
from torch import nn

from collectives.torch.joining import state_signature


def model_and_optimizer(*, reverse: bool, width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))
    parameters = list(model.parameters())
    return model, torch.optim.Adam(parameters[::-1] if reverse else parameters)


def test_an_optimizer_with_its_parameters_in_another_order_is_another_one() -> None:
    """Its moments would else be loaded into other parameters of the same shape."""
    first, same, turned = (
        state_signature(model_and_optimizer(reverse=reverse)) for reverse in (False, False, True)
    )
    assert first == same
    assert first != turned
    assert first != state_signature(model_and_optimizer(reverse=False, width=5))

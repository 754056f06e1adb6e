"""What an iteration sends: parameters of known networks from their shapes, and volumes by arithmetic."""

from __future__ import annotations

import pytest

import topoplan
from topoplan.errors import UsageError
from topoplan.model.jobs import NETWORKS, best_cut, volume


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("alexnet", 61_100_840),
        ("vgg16", 138_357_544),
        ("vgg19", 143_667_240),
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("transformer-block", 12 * 1024**2 + 13 * 1024),
    ],
)
def test_parameters_follow_from_shapes(name: str, parameters: int) -> None:
    assert sum(layer.parameters for layer in NETWORKS[name]()) == parameters


def test_vgg_on_four_ranks() -> None:
    """553 MB x 1.5; hybrid 58.9 MB x 1.5 and 25,088 floats of 128 samples x 3/4 both ways; 1.77 times as fast."""
    layers = NETWORKS["vgg16"]()
    data, hybrid = volume(layers, 4, 32), volume(layers, 4, 32, cut=13)
    assert data.total == 1.5 * 4 * 138_357_544
    assert hybrid.gradients == pytest.approx(1.5 * 58.86e6, rel=1e-3)
    assert hybrid.boundary == 25_088 * 4 * 128 * 0.75 * 2
    assert hybrid.inside == 2 * 4096 * 4 * 128 * 0.75 * 2
    compute = 0.166
    faster = (compute + data.total / 5e9) / (compute + (hybrid.gradients + hybrid.boundary) / 5e9)
    assert faster == pytest.approx(1.77, abs=0.005)


def test_times_are_those_of_collectives_at_the_planned_rates() -> None:
    """On a DGX-1V all GPUs: VGG's full layers are divided, ResNet's gradients are summed."""
    rates = {name: topoplan.plan("dgx-1v", name).rate for name in ("allreduce", "allgather")}
    vgg, resnet = (NETWORKS[name]() for name in ("vgg16", "resnet50"))
    data = volume(vgg, 8, 16)
    assert data.seconds(8, **rates) == pytest.approx(138_357_544 * 4 / (rates["allreduce"] * 1e9))
    best = best_cut(vgg, 8, 16, **rates)
    assert best.cut == 13
    gathered = sum(layer.inputs for layer in vgg[13:]) * 8 * 16 * 4
    sums = sum(layer.parameters for layer in vgg[:13]) * 4
    wanted = sums / (rates["allreduce"] * 1e9) + 2 * gathered / (rates["allgather"] * 1e9)
    assert best.seconds(8, **rates) == pytest.approx(wanted)
    assert best_cut(resnet, 8, 16, **rates).cut >= len(resnet) - 1


@pytest.mark.parametrize(("ranks", "batch", "cut"), [(0, 1, None), (2, 0, None), (2, 1, 17), (2, 1, -1)])
def test_what_cannot_be_is_refused(ranks: int, batch: int, cut: int | None) -> None:
    with pytest.raises(UsageError, match="must be"):
        volume(NETWORKS["vgg16"](), ranks, batch, cut=cut)

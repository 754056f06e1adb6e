"""What an iteration of data, model and hybrid parallel training sends, from the shapes of a network's layers.

Data parallel: every rank holds all parameters and the gradients are summed, 2 (N - 1) / N of their bytes out of each
rank. Model parallel: a layer's outputs are divided among the ranks, so that each needs the layer's inputs for the whole
batch of N b samples: they are gathered on the way forward, and their gradients scattered and summed on the way back,
(N - 1) / N of them out of each rank both times. Hybrid: the layers up to a cut data parallel, those from there on model
parallel, which suits networks whose last layers have most parameters and few inputs (Krizhevsky, arXiv 1404.5997). That
the layers before the cut may be divided once more, with batches of their own (Fela, ICDE 2020), changes what is
computed when, not what is sent.

Parameters follow from shapes: weights, biases, and scale and shift of every normalised channel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from topoplan.errors import UsageError


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with parameters.

    Parameters
    ----------
    name : str
    parameters : int
    inputs : int
        Elements that come in for one sample.
    """

    name: str
    parameters: int
    inputs: int


@dataclass(frozen=True, slots=True)
class Volume:
    """Bytes that each rank sends, and takes in, in an iteration.

    Parameters
    ----------
    cut : int
        Layers before it are data parallel, those from it on model parallel.
    gradients : float
        For the sum of gradients.
    boundary : float
        For the inputs of the first layer after the cut, both ways.
    inside : float
        For the inputs of all later layers, both ways.
    """

    cut: int
    gradients: float
    boundary: float
    inside: float

    @property
    def total(self) -> float:
        """All bytes."""
        return self.gradients + self.boundary + self.inside

    def seconds(self, ranks: int, *, allreduce: float, allgather: float) -> float:
        """Time of the collectives one after another at algorithm bandwidths in GB/s, such as those of plans.

        Gathering forward runs at ``allgather``; scattering sums backward, its reverse, too.
        """
        out = (ranks - 1) / ranks * 1e9
        return self.gradients / (2 * out * allreduce) + (self.boundary + self.inside) / (out * allgather)


def volume(
    layers: Sequence[Layer], ranks: int, batch: int, *, cut: int | None = None, width: int = 4
) -> Volume:
    """What is sent with a cut at some layer.

    Parameters
    ----------
    layers : sequence of Layer
    ranks : int
    batch : int
        Samples of each rank.
    cut : int or None
        Layers before it are data parallel; None for all.
    width : int
        Bytes of an element.

    Raises
    ------
    UsageError
        Fewer than one rank, sample or byte, or a cut that is not among the layers.

    Examples
    --------
    VGG-16 on 4 ranks of 32 samples: 830 MB; cut at its first full layer 88, 19 and, for the two layers after it, 6 MB.

    >>> layers = NETWORKS["vgg16"]()
    >>> found = [volume(layers, 4, 32, cut=cut) for cut in (None, 13)]
    >>> [[round(part / 1e6, 1) for part in (one.gradients, one.boundary, one.inside)] for one in found]
    [[830.1, 0.0, 0.0], [88.3, 19.3, 6.3]]
    """
    where = len(layers) if cut is None else cut
    if min(ranks, batch, width) < 1:
        raise UsageError(
            f"{ranks} ranks of {batch} samples in {width} bytes are none; give 1 or more of each"
        )
    if not 0 <= where <= len(layers):
        raise UsageError(f"a cut before layer {where} is none; there are {len(layers)} layers")
    part = (ranks - 1) / ranks
    moved = [2 * part * one.inputs * ranks * batch * width for one in layers[where:]]
    return Volume(
        where,
        2 * part * width * sum(one.parameters for one in layers[:where]),
        moved[0] if moved else 0.0,
        sum(moved[1:]),
    )


def best_cut(
    layers: Sequence[Layer], ranks: int, batch: int, *, allreduce: float, allgather: float, width: int = 4
) -> Volume:
    """The cut whose collectives take the least time at algorithm bandwidths in GB/s; of several, the last.

    Examples
    --------
    >>> best_cut(NETWORKS["vgg16"](), 4, 32, allreduce=100.0, allgather=200.0).cut
    13
    """
    found = [volume(layers, ranks, batch, cut=cut, width=width) for cut in range(len(layers), -1, -1)]
    return min(found, key=lambda one: one.seconds(ranks, allreduce=allreduce, allgather=allgather))


class _Shapes:
    """Layers in the making: a picture of so many channels and so many pixels a side runs through them."""

    def __init__(self, side: int) -> None:
        self.layers: list[Layer] = []
        self.channels, self.side = 3, side

    def convolve(
        self,
        name: str,
        channels: int,
        kernel: int,
        *,
        stride: int = 1,
        padding: int = 1,
        normalised: bool = False,
    ) -> None:
        weights = self.channels * channels * kernel**2 + channels * (2 if normalised else 1)
        self.layers.append(Layer(name, weights, self.channels * self.side**2))
        self.channels = channels
        self.side = (self.side + 2 * padding - kernel) // stride + 1

    def pool(self, kernel: int, stride: int, padding: int = 0) -> None:
        self.side = (self.side + 2 * padding - kernel) // stride + 1

    def connect(self, *widths: int) -> tuple[Layer, ...]:
        inputs = self.channels * self.side**2
        for number, outputs in enumerate(widths, 1):
            self.layers.append(Layer(f"fc{number}", inputs * outputs + outputs, inputs))
            inputs = outputs
        return tuple(self.layers)


def alexnet() -> tuple[Layer, ...]:
    """AlexNet in one column (Krizhevsky, arXiv 1404.5997): 61.1 million parameters."""
    shapes = _Shapes(224)
    shapes.convolve("conv1", 64, 11, stride=4, padding=2)
    shapes.pool(3, 2)
    shapes.convolve("conv2", 192, 5, padding=2)
    shapes.pool(3, 2)
    for number, channels in ((3, 384), (4, 256), (5, 256)):
        shapes.convolve(f"conv{number}", channels, 3)
    shapes.pool(3, 2)
    return shapes.connect(4096, 4096, 1000)


def vgg(depth: int) -> tuple[Layer, ...]:
    """VGG with 16 or 19 layers (Simonyan and Zisserman, ICLR 2015): 138.4 and 143.7 million parameters."""
    deep = {16: 3, 19: 4}[depth]
    shapes = _Shapes(224)
    for block, (channels, count) in enumerate(((64, 2), (128, 2), (256, deep), (512, deep), (512, deep)), 1):
        for number in range(1, count + 1):
            shapes.convolve(f"conv{block}.{number}", channels, 3)
        shapes.pool(2, 2)
    return shapes.connect(4096, 4096, 1000)


def resnet(depth: int) -> tuple[Layer, ...]:
    """ResNet with 18 or 50 layers (He et al., CVPR 2016): 11.7 and 25.6 million parameters."""
    blocks, wide = {18: ((2, 2, 2, 2), False), 50: ((3, 4, 6, 3), True)}[depth]
    shapes = _Shapes(224)
    shapes.convolve("conv1", 64, 7, stride=2, padding=3, normalised=True)
    shapes.pool(3, 2, padding=1)
    for stage, count in enumerate(blocks):
        channels = 64 << stage
        outputs = 4 * channels if wide else channels
        for block in range(count):
            stride = 2 if stage and not block else 1
            name, before, side = f"stage{stage + 1}.{block + 1}", shapes.channels, shapes.side
            if wide:
                shapes.convolve(f"{name}.a", channels, 1, padding=0, normalised=True)
                shapes.convolve(f"{name}.b", channels, 3, stride=stride, normalised=True)
                shapes.convolve(f"{name}.c", outputs, 1, padding=0, normalised=True)
            else:
                shapes.convolve(f"{name}.a", channels, 3, stride=stride, normalised=True)
                shapes.convolve(f"{name}.b", channels, 3, normalised=True)
            if before != outputs:
                shapes.layers.append(Layer(f"{name}.way", before * outputs + 2 * outputs, before * side**2))
    shapes.pool(shapes.side, 1)
    return shapes.connect(1000)


def transformer_block(width: int = 1024, tokens: int = 512) -> tuple[Layer, ...]:
    """A block of a transformer (Vaswani et al., NIPS 2017): attention, and two layers of 4 times the width between."""
    norm = 2 * width
    return (
        Layer("attention.in", 3 * width**2 + 3 * width + norm, width * tokens),
        Layer("attention.out", width**2 + width, width * tokens),
        Layer("mlp.in", 4 * width**2 + 4 * width + norm, width * tokens),
        Layer("mlp.out", 4 * width**2 + width, 4 * width * tokens),
    )


NETWORKS: Mapping[str, Callable[[], tuple[Layer, ...]]] = {
    "alexnet": alexnet,
    "vgg16": lambda: vgg(16),
    "vgg19": lambda: vgg(19),
    "resnet18": lambda: resnet(18),
    "resnet50": lambda: resnet(50),
    "transformer-block": transformer_block,
}
"""Layers of known networks by their names."""

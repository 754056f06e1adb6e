"""Read jobs that share links from a file, and compute the traffic of an iteration from the shapes of layers.

A job computes, then sends bytes over its links, all of them at once; sending may begin in the last part of computing
(``overlap``). An iteration ends when both are done. Stages run in sequence. A search for hyperparameters decides at the
end of the first stage whether a job continues. Bytes stand in the file or follow from a plan.
`topoplan.model.fluid_simulation` runs the jobs under a policy of `topoplan.model.job_policies`.

Data parallel ranks send 2 (N - 1) / N of the bytes of the parameters (weights, biases, scale and shift of normalised
channels). Model parallel ranks gather a layer's inputs for the batch of N b samples and scatter their gradients: (N -
1) / N both times. Hybrid: layers up to a cut are data parallel, the rest model parallel (Krizhevsky, arXiv 1404.5997).
A second division of the layers before the cut (Fela, ICDE 2020) changes the order of computing, not the traffic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from topoplan.errors import PlanError, TopologyError, TopoplanError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology_json import decode_json
from topoplan.model.closed_form import clock
from topoplan.plans.file_values import read_list, read_object
from topoplan.plans.size_plans import load_plan

FORMAT = "topoplan.jobs/1"

MOST_ITERATIONS = 1_000_000
"""Largest number of simulated iterations of all jobs together: about a minute."""

_SET = {"format", "links", "horizon", "jobs"}
_JOB = {"name", "gpus", "weight", "release", "first", "stages"}
_STAGE = {"iterations", "compute", "bytes", "overlap", "plan", "size"}


@dataclass(frozen=True, slots=True)
class JobStage:
    """A number of equal iterations.

    compute: seconds of computing in each.
    bytes: traffic of an iteration by link, above zero.
    overlap: share of the computing that may run during sending.
    """

    iterations: int
    compute: float
    bytes: Mapping[str, float]
    overlap: float = 0.0

    def sending(self, links: Mapping[str, float]) -> float:
        """Return the seconds of sending without other jobs; ``links`` in GB/s."""
        return max((size / (links[name] * 1e9) for name, size in self.bytes.items()), default=0.0)

    def alone(self, links: Mapping[str, float]) -> float:
        """Return the seconds of an iteration without other jobs."""
        return max(self.compute, (1 - self.overlap) * self.compute + self.sending(links))


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A training job.

    weight: cost of a second of its first stage's completion time.
    release: arrival time in seconds.
    sends_first: whether its first iteration is already computed at arrival.
    """

    name: str
    stages: tuple[JobStage, ...]
    gpus: int = 1
    weight: float = 1.0
    release: float = 0.0
    sends_first: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs and the links they share, in GB/s.

    horizon: seconds at which the simulation ends; None for the end of the last job.
    """

    links: Mapping[str, float]
    jobs: tuple[TrainingJob, ...]
    horizon: float | None = None

    def __post_init__(self) -> None:
        names = [job.name for job in self.jobs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if not names:
            raise UsageError("jobs must not be empty; give at least one")
        if twice is not None:
            raise UsageError(f"job names must be unique, got {twice!r} twice; give each its own name")
        for job in self.jobs:
            for number, stage in enumerate(job.stages):
                self._check(f"job {job.name}: stage {number}", stage)
        total = sum(self._iterations(stage) for job in self.jobs for stage in job.stages)
        if total > MOST_ITERATIONS:
            end = "a horizon" if self.horizon is None else "a nearer horizon"
            raise UsageError(
                f"iterations must be at most {MOST_ITERATIONS} in all, got {total:g}; give {end}"
            )

    def _iterations(self, stage: JobStage) -> float:
        """Return an upper bound on the iterations of a stage before the horizon."""
        alone = stage.alone(self.links)
        if self.horizon is None or alone == 0:
            return stage.iterations
        return min(stage.iterations, self.horizon / alone)

    def _check(self, where: str, stage: JobStage) -> None:
        unknown = next((name for name in stage.bytes if name not in self.links), None)
        if unknown is not None:
            raise UsageError(
                f"{where}: link {unknown!r} is unknown; the links are {', '.join(self.links) or 'none'}"
            )
        dead = next((name for name in stage.bytes if self.links[name] == 0), None)
        if dead is not None:
            raise UsageError(f"{where} never ends: link {dead!r} has 0 GB/s")


def read_jobs(text: str, *, folder: str = "") -> Workload:
    """Return the jobs of a file, format ``topoplan.jobs/1`` (see `docs/file-formats.md`).

    folder: the folder of the plan files that the text names.
    """
    try:
        return _jobs(decode_json(text, "the jobs file"), folder)
    except (PlanError, TopologyError) as error:
        raise UsageError(str(error)) from None


def _jobs(value: object, folder: str) -> Workload:
    top = _object(value, "a jobs file", _SET)
    if top.get("format") != FORMAT:
        raise UsageError(f"format {top.get('format')!r} is not {FORMAT!r}"[:200])
    links = {
        name: _number(rate, f"link {name}") for name, rate in _object(top.get("links", {}), "links").items()
    }
    jobs = []
    for number, item in enumerate(read_list(top.get("jobs"), "jobs")):
        jobs.append(_job(item, f"job {number}", links, folder))
    horizon = None if top.get("horizon") is None else _number(top["horizon"], "horizon")
    return Workload(links, tuple(jobs), horizon)


def _job(item: object, where: str, links: dict[str, float], folder: str) -> TrainingJob:
    value = _object(item, where, _JOB)
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise UsageError(f"{where}: name must be a text, got {name!r}"[:200])
    where = f"job {name}"
    stages, planned = [], None
    for number, one in enumerate(read_list(value.get("stages"), f"{where}: stages")):
        stage, ranks = _stage(one, f"{where}: stage {number}", links, folder)
        stages.append(stage)
        planned = ranks or planned
    if not stages:
        raise UsageError(f"{where} has no stages; give at least one")
    gpus = _whole(value.get("gpus", planned or 1), f"{where}: gpus")
    if planned is not None and gpus != planned:
        raise UsageError(f"{where}: gpus must be {planned}, as in its plan, got {gpus}")
    first = value.get("first", "compute")
    if first not in ("compute", "send"):
        raise UsageError(f"{where}: first must be compute or send, got {first!r}"[:200])
    return TrainingJob(
        name,
        tuple(stages),
        gpus=gpus,
        weight=_number(value.get("weight", 1.0), f"{where}: weight"),
        release=_number(value.get("release", 0.0), f"{where}: release"),
        sends_first=first == "send",
    )


def _stage(item: object, where: str, links: dict[str, float], folder: str) -> tuple[JobStage, int | None]:
    """Return a stage and the number of ranks of its plan; add the plan's links to ``links``."""
    value = _object(item, where, _STAGE)
    iterations = _whole(value.get("iterations"), f"{where}: iterations")
    given = _object(value.get("bytes", {}), f"{where}: bytes")
    sent = {name: _number(size, f"{where}: bytes of {name}") for name, size in given.items()}
    ranks = None
    if "plan" in value:
        if given:
            raise UsageError(f"{where}: bytes and plan exclude each other; leave one of them out")
        if not isinstance(value["plan"], str):
            raise UsageError(f"{where}: plan must be the name of a file")
        size = _whole(value.get("size"), f"{where}: size")
        sent, rates, ranks = planned_bytes(str(Path(folder) / value["plan"]), size)
        for name, rate in rates.items():
            if links.setdefault(name, rate) != rate:
                raise UsageError(
                    f"{where}: link {name} has {rate:g} GB/s in its plan and {links[name]:g} elsewhere"
                )
    elif "size" in value:
        raise UsageError(f"{where}: size needs a plan; leave it out")
    overlap = _number(value.get("overlap", 0.0), f"{where}: overlap")
    if overlap > 1:
        raise UsageError(f"{where}: overlap must be from 0 to 1, got {overlap:g}")
    compute = _number(value.get("compute", 0.0), f"{where}: compute")
    return JobStage(iterations, compute, {name: size for name, size in sent.items() if size}, overlap), ranks


def planned_bytes(path: str, nbytes: int) -> tuple[dict[str, float], dict[str, float], int]:
    """Return the bytes of one buffer on each link of a plan file, the GB/s of those links, and the plan's ranks.

    Links are named ``source>destination``, so that jobs on one machine share them.
    """
    try:
        plan = load_plan(path)
        sent = {f"{src}>{dst}": float(size) for (src, dst), size in clock(plan)(nbytes).link_bytes.items()}
    except TopoplanError as error:
        raise UsageError(str(error)) from None
    rates: dict[str, float] = {}
    for link in Fabric(plan.topology, plan.at(nbytes).channels).links:
        name = f"{link.src}>{link.dst}"
        if name in sent:
            rates[name] = rates.get(name, 0.0) + link.bandwidth
    return sent, rates, len(plan.ranks)


def _object(item: object, where: str, keys: set[str] | None = None) -> dict[str, object]:
    value = read_object(item, where)
    unknown = next((key for key in value if keys is not None and key not in keys), None)
    if unknown is not None:
        raise UsageError(f"{where}: key {unknown!r} is unknown; use {', '.join(sorted(keys or ()))}")
    return value


def _number(item: object, where: str) -> float:
    if (
        isinstance(item, bool)
        or not isinstance(item, (int, float))
        or not (item >= 0 and math.isfinite(item))
    ):
        raise UsageError(f"{where} must be a number of zero or more, got {item!r}"[:200])
    return float(item)


def _whole(item: object, where: str) -> int:
    if isinstance(item, bool) or not isinstance(item, int) or item < 1:
        raise UsageError(f"{where} must be a whole number of one or more, got {item!r}"[:200])
    return item


@dataclass(frozen=True, slots=True)
class ModelLayer:
    """A layer with parameters.

    inputs: elements of its input for one sample.
    """

    name: str
    parameters: int
    inputs: int


@dataclass(frozen=True, slots=True)
class IterationTraffic:
    """Bytes that each rank sends and receives in an iteration.

    cut: number of data parallel layers; the rest are model parallel.
    gradients: sum of gradients.
    boundary, inside: inputs of the first layer after the cut, and of all later layers, both ways.
    """

    cut: int
    gradients: float
    boundary: float
    inside: float

    @property
    def total(self) -> float:
        return self.gradients + self.boundary + self.inside

    def seconds(self, ranks: int, *, allreduce: float, allgather: float) -> float:
        """Return the time of the collectives one after another at algorithm bandwidths in GB/s, such as those of plans.

        The forward gathers run at ``allgather``, and so do the backward sums, their reverse.
        """
        out = (ranks - 1) / ranks * 1e9
        return self.gradients / (2 * out * allreduce) + (self.boundary + self.inside) / (out * allgather)


def volume(
    layers: Sequence[ModelLayer], ranks: int, batch: int, *, cut: int | None = None, width: int = 4
) -> IterationTraffic:
    """Return the traffic of an iteration with a cut at some layer.

    batch: samples of each rank.
    cut: number of data parallel layers; None for all.
    width: bytes of an element.

    VGG-16 on 4 ranks of 32 samples: 830 MB; cut at its first full layer 88, 19 and, for the two layers after it, 6 MB.

    >>> layers = NETWORKS["vgg16"]()
    >>> found = [volume(layers, 4, 32, cut=cut) for cut in (None, 13)]
    >>> [[round(part / 1e6, 1) for part in (one.gradients, one.boundary, one.inside)] for one in found]
    [[830.1, 0.0, 0.0], [88.3, 19.3, 6.3]]
    """
    where = len(layers) if cut is None else cut
    if min(ranks, batch, width) < 1:
        raise UsageError(
            f"ranks, batch and width must be 1 or more, got {ranks}, {batch} and {width}; give 1 or more of each"
        )
    if not 0 <= where <= len(layers):
        raise UsageError(f"cut must be from 0 to {len(layers)}, the number of layers, got {where}")
    part = (ranks - 1) / ranks
    moved = [2 * part * one.inputs * ranks * batch * width for one in layers[where:]]
    return IterationTraffic(
        where,
        2 * part * width * sum(one.parameters for one in layers[:where]),
        moved[0] if moved else 0.0,
        sum(moved[1:]),
    )


def best_cut(
    layers: Sequence[ModelLayer],
    ranks: int,
    batch: int,
    *,
    allreduce: float,
    allgather: float,
    width: int = 4,
) -> IterationTraffic:
    """Return the cut whose collectives take the least time at algorithm bandwidths in GB/s; of several, the last.

    >>> best_cut(NETWORKS["vgg16"](), 4, 32, allreduce=100.0, allgather=200.0).cut
    13
    """
    found = [volume(layers, ranks, batch, cut=cut, width=width) for cut in range(len(layers), -1, -1)]
    return min(found, key=lambda one: one.seconds(ranks, allreduce=allreduce, allgather=allgather))


class _Shapes:
    """Builds layers from the shape of an image as it passes through them."""

    def __init__(self, side: int) -> None:
        self.layers: list[ModelLayer] = []
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
        self.layers.append(ModelLayer(name, weights, self.channels * self.side**2))
        self.channels = channels
        self.side = (self.side + 2 * padding - kernel) // stride + 1

    def pool(self, kernel: int, stride: int, padding: int = 0) -> None:
        self.side = (self.side + 2 * padding - kernel) // stride + 1

    def connect(self, *widths: int) -> tuple[ModelLayer, ...]:
        inputs = self.channels * self.side**2
        for number, outputs in enumerate(widths, 1):
            self.layers.append(ModelLayer(f"fc{number}", inputs * outputs + outputs, inputs))
            inputs = outputs
        return tuple(self.layers)


def alexnet() -> tuple[ModelLayer, ...]:
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


def vgg(depth: int) -> tuple[ModelLayer, ...]:
    """VGG with 16 or 19 layers (Simonyan and Zisserman, ICLR 2015): 138.4 and 143.7 million parameters."""
    deep = {16: 3, 19: 4}[depth]
    shapes = _Shapes(224)
    for block, (channels, count) in enumerate(((64, 2), (128, 2), (256, deep), (512, deep), (512, deep)), 1):
        for number in range(1, count + 1):
            shapes.convolve(f"conv{block}.{number}", channels, 3)
        shapes.pool(2, 2)
    return shapes.connect(4096, 4096, 1000)


def resnet(depth: int) -> tuple[ModelLayer, ...]:
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
                shapes.layers.append(
                    ModelLayer(f"{name}.way", before * outputs + 2 * outputs, before * side**2)
                )
    shapes.pool(shapes.side, 1)
    return shapes.connect(1000)


def transformer_block(width: int = 1024, tokens: int = 512) -> tuple[ModelLayer, ...]:
    """A block of a transformer (Vaswani et al., NIPS 2017): attention, and two layers of 4 times the width between."""
    norm = 2 * width
    return (
        ModelLayer("attention.in", 3 * width**2 + 3 * width + norm, width * tokens),
        ModelLayer("attention.out", width**2 + width, width * tokens),
        ModelLayer("mlp.in", 4 * width**2 + 4 * width + norm, width * tokens),
        ModelLayer("mlp.out", 4 * width**2 + width, 4 * width * tokens),
    )


NETWORKS: Mapping[str, Callable[[], tuple[ModelLayer, ...]]] = {
    "alexnet": alexnet,
    "vgg16": lambda: vgg(16),
    "vgg19": lambda: vgg(19),
    "resnet18": lambda: resnet(18),
    "resnet50": lambda: resnet(50),
    "transformer-block": transformer_block,
}
"""Layers of known networks by their names."""

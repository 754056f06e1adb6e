"""The kernels of selection and error feedback, compiled for every GPU architecture."""

from __future__ import annotations

import re

import pytest

from collectives.tables.kernels.kernel_launch import THREADS
from collectives.tables.kernels.source import (
    FEEDBACK_LINES,
    KEY_BITS,
    SELECTION_FORMS,
    selection_kernel_names,
    selection_source,
)
from tests.support.nvrtc import Built, built, compilers
from topoplan.errors import UsageError

KERNELS: dict[str, list[str]] = {
    "selection": list(selection_kernel_names()),
    "feedback": list(FEEDBACK_LINES),
}

WHOLE = 90
"""The compute capability for which all kernels are compiled; for others those of float32, and all in the slow test."""

BETWEEN = [pytest.param(12, architecture, marks=pytest.mark.slow) for architecture in (75, 80)]
ARCHITECTURES = [(12, 70), *BETWEEN, (12, WHOLE), (12, 100), (13, 75), (13, 100)]
"""CUDA release and compute capability; CUDA 13 does not support 7.0."""

WHOLE_VECTOR = r"(?:v4\.[bufs]32|v2\.[bufs]64)\b"


def compiled(release: int, architecture: int, names: list[str]) -> Built:
    if release not in compilers():
        pytest.skip(f"no NVRTC of CUDA {release}: pip install nvidia-cuda-nvrtc-cu12 (or nvidia-cuda-nvrtc)")
    made = built(compilers()[release], selection_source(names), architecture)
    assert sorted(made.registers) == sorted(names)
    assert {name: size for name, size in made.spilled.items() if size} == {}
    assert max(made.registers.values()) * THREADS * 4 <= 65536
    return made


def vectors_of(name: str) -> tuple[int, int] | None:
    """Return how often a kernel that reads all data loads and stores vectors of 16 bytes."""
    if re.fullmatch(r"(gather|histogram)_[a-z]+\d+", name):
        return 4, 0
    if found := re.fullmatch(r"(feedback|momentum)_(gather|histogram)_(\w+)_\3", name):
        return (12, 8) if found[1] == "momentum" else (8, 4)
    return None


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize(("release", "architecture"), ARCHITECTURES)
def test_four_blocks_of_a_kernel_fit_and_it_reads_whole_vectors(
    release: int, architecture: int, kind: str
) -> None:
    names = [name for name in KERNELS[kind] if architecture == WHOLE or name.endswith("float32")]
    assert any(map(vectors_of, names))
    kernels = re.split(r"\.entry (\w+)\(", compiled(release, architecture, names).ptx)[1:]
    for name, body in zip(kernels[::2], kernels[1::2], strict=True):
        found = tuple(len(re.findall(rf"{way}\.global\.{WHOLE_VECTOR}", body)) for way in ("ld", "st"))
        assert vectors_of(name) in (None, found), name
        assert not re.search(r"\b(ld|st)\.local", body), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("architecture", [70, 75, 80, 100])
def test_every_kernel_compiles_for_the_other_architectures(architecture: int, kind: str) -> None:
    compiled(12, architecture, KERNELS[kind])


def test_every_form_of_kernel_exists_for_every_dtype() -> None:
    assert set(KERNELS["selection"]) == {f"{form}_{dtype}" for form in SELECTION_FORMS for dtype in KEY_BITS}


@pytest.mark.parametrize("name", ["select_float32", "histogram_int8", "histogram"])
def test_an_unknown_kernel_is_named(name: str) -> None:
    with pytest.raises(UsageError, match=f"selection kernel '{name}' is unknown"):
        selection_source([name])

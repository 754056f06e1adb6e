"""The DDP hook on models of every kind: complex parameters, sparse embeddings, buffers, copies, compiled models."""

from __future__ import annotations

import pytest

from tests.support.torch_jobs import Told, told_by_all

pytestmark = pytest.mark.thorough

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What each of two ranks saw, by stage."""
    return told_by_all("torch_model_ranks.py", tmp_path_factory.mktemp("models"), ranks=2)


def furthest(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_ranks_with_complex_parameters_end_with_the_same_bits_by_every_way(models: Told) -> None:
    """Complex64 and complex128, transposed, with gaps, conjugated, without elements or dimensions, beside real ones."""
    first, second = (one["complex_parameters"] for one in models)
    assert {name for name in first if first[name] != second[name]} == set()


def test_complex_parameters_end_where_ddp_alone_ends(models: Told) -> None:
    """By exact ways bit for bit; the others have seen all gradients, or keep a part of them."""
    found = models[0]["complex_parameters"]
    away = {name: furthest(found["plain"], one) for name, one in found.items()}
    assert away["dense"] == away["shrink"] == 0.0
    assert max(away[name] for name in ("compress", "codes", "significance", "local", "emso")) < 0.02
    assert max(away[name] for name in ("ssp", "asp")) < 0.2
    assert max(away.values()) < 1.0


def test_sparse_embeddings_are_averaged_by_rows_in_every_way(models: Told) -> None:
    """Two of them beside a complex parameter; the same bits on all ranks, and by exact ways those of DDP alone."""
    first, second = (one["sparse_embeddings"] for one in models)
    assert {name for name in first if first[name] != second[name]} == set()
    away = {name: furthest(first["plain"], one) for name, one in first.items() if "unused" not in name}
    assert away["dense"] == away["shrink"] == 0.0
    assert max(away.values()) < 1.0


def test_a_sparse_embedding_that_some_or_all_ranks_leave_out_needs_nothing_from_them(models: Told) -> None:
    found = models[0]["sparse_embeddings"]
    assert furthest(found["unused, alone"], found["unused"]) < 1e-5
    assert furthest(found["unused, alone"], found["unused, density"]) < 0.5

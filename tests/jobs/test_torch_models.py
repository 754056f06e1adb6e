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


def test_complex_rows_are_averaged_exactly_also_late(models: Told) -> None:
    own, common = [[-3.0, 6.0]] * 2, [[-6.0, 12.0]] * 2
    empty = [[0.0, 0.0]] * 2
    for one in models:
        for rows in one["complex_rows"].values():
            assert rows == [own, own, empty, common, empty, empty]


def test_a_sparse_embedding_that_some_or_all_ranks_leave_out_needs_nothing_from_them(models: Told) -> None:
    found = models[0]["sparse_embeddings"]
    assert furthest(found["unused, alone"], found["unused"]) < 1e-5
    assert furthest(found["unused, alone"], found["unused, density"]) < 0.5


def test_a_copied_or_pickled_state_goes_on_where_the_other_one_was(models: Told) -> None:
    """Alone or inside a copied model: no connection before its first step, and then the same bits."""
    for one in models:
        found = dict(one["copies"])
        assert found.pop("saved")
        refused, apart = found.pop("of a group")
        assert refused.startswith("UsageError: a HookState with group= cannot be pickled")
        assert apart
        for name in ("with a scaler", "with its method"):
            shared, refused, scale = found.pop(name)
            assert (shared, scale) == (True, 8.0)
            assert refused.startswith(
                "UsageError: this HookState was loaded without the object that knows its loss"
            )
        assert len(found) == 8
        for how in found.values():
            assert how["before"] == [True, 4, 5]
            assert how["same"]
        assert len({tuple(how["bits"]) for how in found.values()}) == 1


MISPLACED = {
    "one after another": "UsageError: this HookState counts the steps of one model and is registered with another",
    "at once": "UsageError: this HookState counts the steps of one model and is registered with another",
    "again": "UsageError: this HookState is registered with this model; make a HookState for each model, once",
    "another": "UsageError: this HookState is registered with another model, whose steps it counts",
    "fsdp": "UsageError: topoplan_hook is for DistributedDataParallel, and FSDP called it; leave register_comm_hook",
    "python reducer": "UsageError: topoplan_hook needs the buckets of DDP's reducer, which the Python reducer does",
}


@pytest.mark.parametrize("name", MISPLACED)
def test_a_hook_in_another_place_than_one_ddp_model_is_one_clear_error(models: Told, name: str) -> None:
    assert all(one["misplaced"][name].startswith(MISPLACED[name]) for one in models)


@pytest.mark.parametrize("mode", ["local:3", "ssp:1", "asp"])
def test_buffers_that_differ_are_averaged_by_finish_and_counts_are_the_largest(
    models: Told, mode: str
) -> None:
    """Running statistics and complex buffers are averaged; a constant keeps its bits."""
    (before, after), (other, same) = (one["buffers"][mode] for one in models)
    assert after == same
    assert after["constant"] == before["constant"] == other["constant"]
    count = "layers.1.num_batches_tracked"
    assert after[count] == max(before[count], other[count])
    for name in ("layers.1.running_mean", "layers.1.running_var", "turn"):
        assert before[name] != other[name]
        mean = (torch.tensor(before[name]) + torch.tensor(other[name])) / 2
        assert torch.allclose(torch.tensor(after[name]), mean)

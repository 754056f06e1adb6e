"""The group "topoplan" of three processes: what plans do not carry, wrong arguments, blocks, splits, and its abort."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.support.torch_jobs import Told, told_by_all

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return told_by_all("torch_group_ranks.py", tmp_path_factory.mktemp("group"), ranks=3)


def given(told: Told, stage: str, name: str) -> list[Any]:
    """What a call gave on each rank; the group was usable behind it."""
    assert all(one[stage][name][1] for one in told)
    return [one[stage][name][0] for one in told]


STRIDES: dict[str, list[Any]] = {
    "reduce": [[3.0, 6.0, 9.0], [], []],
    "scatter": [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0], [20.0, 21.0, 22.0]],
    "gather": [[[0.0, 1.0, 2.0], [1.0, 2.0, 3.0], [2.0, 3.0, 4.0]], [], []],
    "recv": [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], []],
    "band": [[7, 6, 4]] * 3,
}


@pytest.mark.parametrize("name", STRIDES)
def test_what_plans_do_not_carry_is_right_for_tensors_that_are_not_contiguous(told: Told, name: str) -> None:
    assert given(told, "strides", name) == STRIDES[name]


def test_all_to_alls_of_any_lengths_and_types_are_right(told: Told) -> None:
    for name in told[0]["types"]:
        assert given(told, "types", name) == [True] * 3, name


MISTAKES = {
    "negative": "UsageError: output_split_sizes must be whole numbers from 0 on, got [7, -1, 0]",
    "negative on one": "RefusedError: rank 1 refused the collective: output_split_sizes must be whole numbers",
    "sum": "UsageError: input_split_sizes must add up to the 6 rows of input, got [2, 2, 3], which is 7",
    "number": "UsageError: output_split_sizes must be 3 numbers for 3 ranks, got 1",
    "others": "UsageError: rank 0 sends 2 elements to rank 1, which expects 3 in its output_split_sizes",
    "rows": "UsageError: output must have a multiple of 3 rows for 3 ranks, got 4; pass output_split_sizes",
    "expanded": "UsageError: tensor of shape (4,) and strides (0,) has several elements at one place of memory",
    "length": "UsageError: output must have 6 elements of float32, 3 times those of input, got 7 of float32",
    "length on one": "RefusedError: rank 1 refused the collective: output must have 6 elements of float32",
    "block": "UsageError: input must have 6 elements of float32, 3 times those of output, got 7 of float32",
    "shape": "UsageError: output tensor 0 must have 2 elements of float32 as the input, got 3 of float32",
    "same memory": "UsageError: output tensors 0 and 1 share memory; give each its own",
    "short": "UsageError: output tensors must be one for each of 3 ranks, got 2",
    "output lists": "RefusedError: rank 0 refused the collective: output lists must be a list of one, got 2",
    "no output list": "RefusedError: rank 0 refused the collective: output lists must be a list of one, got 0",
    "input lists": "RefusedError: rank 0 refused the collective: input lists must be a list of one, got 2",
    "no list at all": "RefusedError: rank 1 refused the collective: TypeError: ",
    "quantized": "UsageError: tensor must not be quantized, got quint8; pass its int_repr()",
    "sparse on one": "RefusedError: rank 1 refused the collective: tensor must be a dense tensor",
    "sparse all-gather on one": "RefusedError: rank 1 refused the collective: input must be a dense tensor",
    "sparse scatter on one": "RefusedError: rank 1 refused the collective: output must be a dense tensor",
    "sparse all-to-all on one": "RefusedError: rank 1 refused the collective: input tensor 0 must be a dense tensor",
    "sparse single on one": "RefusedError: rank 1 refused the collective: input must be a dense tensor",
    "sparse splits on one": "RefusedError: rank 1 refused the collective: input must be a dense tensor",
    "op on one": "RefusedError: rank 1 runs another collective: op 'band' instead of 'sum'",
    "type on one": "RefusedError: rank 1 runs another collective: dtype 'float8_e5m2' instead of ",
    "root on one": "RefusedError: rank 1 runs another collective: root 1 instead of 0",
    "kind on one": "RefusedError: rank 1 runs another collective: collective 'barrier' instead of 'allreduce'",
    "ranks": "UsageError: new_ranks must be different ranks from 0 to 2, got [0, 7]",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_does_not_fit_is_the_same_error_on_all_ranks_and_the_group_stays_usable(
    told: Told, name: str
) -> None:
    (error,) = set(given(told, "mistakes", name))
    assert error.startswith(MISTAKES[name])


BLOCKS: dict[str, list[float]] = {
    "block": [3.0] * 3,
    "block later": [3.0] * 3,
    "block of torch": [3.0] * 3,
    "several": [1.0, 1.0, 0.0, 1.0, 2.0],
    "raising": [3.0] * 2,
    "behind": [3.0] * 3,
}


@pytest.mark.parametrize("name", BLOCKS)
def test_collectives_of_a_block_end_with_it_and_leave_nothing_behind(told: Told, name: str) -> None:
    assert given(told, "blocks", name) == [BLOCKS[name]] * 3


def test_a_group_is_split_for_its_members_and_gives_none_to_others(told: Told) -> None:
    for name, named in (("split", False), ("split again", False), ("split by name", True)):
        assert given(told, "groups", name) == [[2.0, 2.0, 2, 0, named], [2.0, 2.0, 2, 1, named], None]
    assert given(told, "groups", "mesh") == [[3.0]] * 3


def test_abort_wakes_a_wait_with_an_error_that_names_it(told: Told) -> None:
    waited, later = told[0]["aborted"]
    for text in (waited, later):
        assert text.startswith("BackendError: ")
        assert "rank 0 aborted the communicator: its process group was aborted" in text

"""Every kernel as PTX on this processor, at random orders and with every check; and that the checks can fail.

All is thorough; beyond a sample it is slow. The numbers of all: ``python -m tests.ptx``.
"""

from __future__ import annotations

import re

import pytest

from tests.ptx.cases import cases, outcome
from tests.ptx.kernels import JOINS, SELECTIONS, program, ptx
from tests.ptx.mutants import MUTANT_SEEDS, SEEDS, SURVIVORS, found, mutants, reason

pytestmark = pytest.mark.thorough

SAMPLE = (
    *("join_sum_float16", "join_max_bfloat16", "join_prod_complex64", "join_min_uint8"),
    *("divide_int32", "divide_float16", "divide_bfloat16", "copy_16"),
    *("histogram_float64", "histogram_float16", "gather_float32", "gather_bfloat16"),
    *("measure_list_float32", "measure_all_float16", "emit_list_int64_float32", "emit_all_int32_bfloat16"),
    *("feedback_histogram_bfloat16_float32", "momentum_gather_float16_float64"),
    *("momentum_take_back_float32_float32", "add_entries_int32_float64", "zero_entries_int64_float32"),
)
"""Some of every family."""

MUTANTS_OF = (
    "gather_float32",
    "measure_list_float32",
    "momentum_take_back_float32_float32",
)
"""Kernels whose mutants `make test-all` tries; without the cases of many blocks, so not all of them."""

MEET = tuple(name for name in SELECTIONS if not re.match("emit|zero", name))
"""Kernels with barriers, fences or atomics."""


@pytest.mark.parametrize("name", SAMPLE)
def test_kernels_give_numpys_bits_and_keep_to_the_rules(name: str) -> None:
    light = [case for case in cases(name) if not case.heavy]
    for number, case in enumerate(light):
        assert outcome(program(name), case, SEEDS[(number + 1) % len(SEEDS)]) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", [*JOINS, *SELECTIONS])
def test_every_kernel_gives_numpys_bits_and_keeps_to_the_rules_in_every_order(name: str) -> None:
    for case in cases(name):
        for seed in SEEDS[3:4] if case.heavy else SEEDS:
            assert outcome(program(name), case, seed) is None


@pytest.mark.slow
@pytest.mark.parametrize("names", [JOINS, SELECTIONS], ids=["joins", "selection"])
def test_newer_gpus_get_the_same_instructions(names: tuple[str, ...]) -> None:
    """So that what holds for one architecture holds for the other."""
    older, newer = (bodies(ptx(names, target)) for target in (80, 90))
    assert older == newer


def bodies(text: str) -> list[str]:
    """The text without comments, its target and variables of the whole module."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith(("//", ".target", ".global"))]


@pytest.mark.parametrize("name", MUTANTS_OF)
def test_kernels_that_lack_a_barrier_or_a_fence_are_found(name: str) -> None:
    light = [case for case in cases(name) if not case.heavy]
    made = list(mutants(program(name)))
    assert made
    for mutant in made:
        # the barrier before a second pass over the blocks needs more blocks than a light case has
        if reason(name, mutant.site) is None and mutant.site != "bar.sync 6":
            assert found(mutant, light, MUTANT_SEEDS[:2]) is not None, mutant.site


@pytest.mark.slow
@pytest.mark.parametrize("name", MEET)
def test_every_mutant_is_found_or_has_a_reason_to_survive(name: str) -> None:
    for mutant in mutants(program(name)):
        why = found(mutant, cases(name), MUTANT_SEEDS)
        assert (why is None) == (reason(name, mutant.site) is not None), (mutant.site, why)


@pytest.mark.slow
def test_every_reason_to_survive_is_that_of_a_mutant() -> None:
    sites = {(name, mutant.site) for name in MEET for mutant in mutants(program(name))}
    for kernels, places, _ in SURVIVORS:
        assert any(re.fullmatch(kernels, name) and re.fullmatch(places, site) for name, site in sites)


def test_kernels_that_lack_nothing_of_the_kind_are_left_out() -> None:
    for name in ("emit_all_int32_float32", "zero_entries_int32_float32", "join_sum_float32"):
        assert not list(mutants(program(name)))


def test_no_instruction_of_the_sample_flushes_denormals() -> None:
    assert not [name for name in SAMPLE if any(".ftz" in text for text in program(name).texts)]


@pytest.mark.slow
def test_no_instruction_of_any_kernel_flushes_denormals() -> None:
    assert not [name for name in (*JOINS, *SELECTIONS) if any(".ftz" in text for text in program(name).texts)]

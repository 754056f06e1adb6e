"""Kernels with one barrier or fence taken out, or one atomic made plain: the checks must find each of them.

A mutant is made from every such instruction of the text. Those that nothing finds are named in `SURVIVORS`, with the
reason why the kernel is right without it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.ptx.cases import Case, outcome
from tests.ptx.machine import FIRST, LAST
from tests.ptx.text import Kind, Program

SURVIVORS = (
    (
        r"\w*histogram_\w+",
        r"atom\.global\.add\.u64 1",
        "the rest of an unrolled loop, which 2048 bins among 256 threads never enter",
    ),
    (
        r"\w*histogram_\w+",
        r"atom\.global\.exch\.b64 [2-9]",
        "only the block that ended last is here, when all others have added, and every bin has one thread",
    ),
    (
        r"\w*histogram_\w+",
        r"bar\.sync 5",
        "parts a call of sum_before from an earlier one, and here is no earlier one",
    ),
    (
        r"measure_\w+",
        r"bar\.sync 2",
        "parts a call of sum_before from an earlier one, which the barrier after `found` has done",
    ),
    (
        r"measure_\w+",
        r"bar\.sync 4",
        "what the last block reads of another one was written by the thread that counts that block",
    ),
)
"""Kernels, sites, and why the kernel is right without them."""


SEEDS = (FIRST, LAST, 0, 1, 2, 3)
"""The orders of unchanged kernels: the two that are not random, and one for each way of the machine to be unfair."""

MUTANT_SEEDS = (1, FIRST, 5, 2)

MANY = range(1, 601, 4)
"""Orders in which threads starve from a barrier on, for mutants that break no rule and only sometimes the result."""


def reason(kernel: str, site: str) -> str | None:
    """Why a mutant may survive."""
    for kernels, sites, why in SURVIVORS:
        if re.fullmatch(kernels, kernel) and re.fullmatch(sites, site):
            return why
    return None


@dataclass(frozen=True, slots=True)
class Mutant:
    """A changed kernel: which instruction, the how-manieth of its name."""

    site: str
    program: Program
    reorders: bool  # not only what races are: the result may change


def mutants(program: Program) -> Iterator[Mutant]:
    """One for every barrier, fence and atomic of a kernel."""
    seen: Counter[str] = Counter()
    for place in program.places(Kind.BARRIER, Kind.WARP_BARRIER, Kind.FENCE, Kind.ATOMIC):
        text = program.texts[place].split(" ", 2 if program.texts[place].startswith("@") else 1)
        name = text[1] if text[0].startswith("@") else text[0]
        seen[name] += 1
        atomic = program.code["kind"][place] == Kind.ATOMIC
        changed = program.plain(place) if atomic else program.without(place)
        yield Mutant(f"{name} {seen[name]}", changed, not atomic)


def found(mutant: Mutant, cases: Sequence[Case], seeds: Sequence[int]) -> str | None:
    """What gives a mutant away first, or nothing."""
    for seed in seeds if mutant.reorders else seeds[:2]:
        for case in cases:
            if case.heavy and seed != seeds[0]:
                continue
            wrong = outcome(mutant.program, case, seed)
            if wrong is not None:
                return wrong
    if not mutant.reorders:
        return None
    tried = ((case, seed) for case in cases if case.quick for seed in MANY)
    return next((wrong for case, seed in tried if (wrong := outcome(mutant.program, case, seed))), None)

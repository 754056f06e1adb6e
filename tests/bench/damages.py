"""Random damages of the library's machines, as `topoplan check` reads them: found, named right, costed right.

Found: something is said to be amiss. Named: each damage has its fault, of the right kind on the right devices, and no
other fault is told. Costed: the rates now and healthy are those of plans of both descriptions, made apart. The last
line is of machines without a switch whose GPUs have other numbers than in the library, so their places must be found.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import topoplan
from tests.support.damaged_machines import (
    IN_TEXT,
    KINDS,
    NAMED,
    Damage,
    as_text,
    damaged,
    read_library,
    renumbered,
)
from topoplan.operate.compare.costs import TIME_LIMIT, costs_of
from topoplan.operate.diagnosis import Diagnosis, diagnose

MACHINES = (
    *("dgx-1p", "dgx-1v", "dgx-2", "dgx-a100", "dgx-h100", "dgx-b200", "gb200-nvl72", "mi250", "mi250x"),
    *("mi300x", "nvlink-x4", "p4d.24xlarge", "p5.48xlarge", "pcie-x8", "v100x4"),
)
"""The library but for two twins of others; matrices of nvidia-smi speak of the NVIDIA machines."""

SEED = 20


@dataclass(frozen=True, slots=True)
class Case:
    """A machine of the library, how many damages it has, in which form it was written, and what became of it."""

    machine: str
    sort: str
    form: str
    damages: tuple[Damage, ...]
    found: bool
    named: bool
    costed: bool


def cases(number: int, seed: int = SEED) -> list[Case]:
    """Damages one after another, single, doubled and combined in turn, each as JSON and, where it can be, as text."""
    rng = random.Random(seed)
    made: list[Case] = []
    for i in range(number):
        name = rng.choice(MACHINES)
        text = i % 3 == 2 and not name.startswith(("mi", "pcie"))
        allowed = IN_TEXT if text else KINDS
        sort = ("single", "doubled", "combined")[i // 3 % 3]
        kinds = [rng.choice(allowed)] * (1 + (sort == "doubled"))
        if sort == "combined":
            kinds = rng.sample(allowed, 2)
        whole = read_library(name)
        broken, damages = damaged(whole, kinds, rng)
        for kind in ("bare", "slow PCIe"):
            if not damages:
                broken, damages = damaged(whole, [kind], rng)
        made.append(_judged(name, sort, "text" if text else "JSON", broken, damages))
    return made


def _judged(name: str, sort: str, form: str, broken: dict[str, object], damages: tuple[Damage, ...]) -> Case:
    machine = topoplan.load(as_text(broken) if form == "text" else json.dumps(broken))
    found = diagnose(machine)
    return Case(
        *(name, sort, form, damages),
        found=not found.healthy,
        named=_named(found, damages),
        costed=_costed(found, machine, name, form),
    )


def _named(found: Diagnosis, damages: tuple[Damage, ...]) -> bool:
    fitting = [
        [f for f in found.faults if f.kind in NAMED[d.kind] and _same(f.devices, d, f.kind)] for d in damages
    ]
    told = {fault for faults in fitting for fault in faults}
    return all(fitting) and len(told) == len(found.faults)


def _same(devices: tuple[str, ...], damage: Damage, kind: str) -> bool:
    return set(devices) <= set(damage.devices) if kind == "no NVLink" else set(devices) == set(damage.devices)


def _costed(found: Diagnosis, machine: topoplan.Topology, name: str, form: str) -> bool:
    costs = costs_of(found)
    if not costs:
        return False
    wanted = (topoplan.plan(machine, time_limit=TIME_LIMIT).rate, _whole_rate(name, form))
    return all(
        abs(rate - want) <= 0.001 * want
        for rate, want in zip((costs[0].now, costs[0].healthy), wanted, strict=True)
    )


@lru_cache(maxsize=64)
def _whole_rate(name: str, form: str) -> float:
    whole = read_library(name)
    text = as_text(whole) if form == "text" else json.dumps(whole)
    return float(topoplan.plan(topoplan.load(text)).rate)


DIRECT = ("dgx-1p", "dgx-1v", "mi250", "mi250x", "mi300x", "nvlink-x4", "v100x4")


def renumbered_cases(number: int, seed: int = SEED) -> list[tuple[bool, bool]]:
    """Whether damages of machines with other numbers were found, and named."""
    rng = random.Random(seed)
    told: list[tuple[bool, bool]] = []
    while len(told) < number:
        kinds = [rng.choice(KINDS[:-1]) for _ in range(1 + len(told) % 2)]
        broken, damages = renumbered(*damaged(read_library(rng.choice(DIRECT)), kinds, rng), rng)
        if damages:
            found = diagnose(json.dumps(broken))
            told.append((not found.healthy, _named(found, damages)))
    return told


def main(number: int = 200) -> None:
    made = cases(number)
    print(f"# damages of library machines, read by topoplan check: {number}, seed {SEED}")
    print(f"{'damages':10} {'form':5} {'all':>5} {'found':>6} {'named':>6} {'costed':>7}")
    for sort in ("single", "doubled", "combined"):
        for form in ("JSON", "text"):
            _print_counts(sort, form, [c for c in made if (c.sort, c.form) == (sort, form)])
    _print_counts("all", "", made)
    moved = renumbered_cases(number // 2)
    print(
        f"{'renumbered':10} {'JSON':5} {len(moved):5} {sum(f for f, _ in moved):6} {sum(n for _, n in moved):6}"
    )
    missed = Counter(
        f"{case.machine} {case.form}: " + ", ".join(f"{d.kind} {'-'.join(d.devices)}" for d in case.damages)
        for case in made
        if not (case.found and case.named and case.costed)
    )
    for text in sorted(missed):
        print(f"not whole: {text}")


def _print_counts(sort: str, form: str, group: list[Case]) -> None:
    counts = [sum(getattr(case, what) for case in group) for what in ("found", "named", "costed")]
    print(f"{sort:10} {form:5} {len(group):5} {counts[0]:6} {counts[1]:6} {counts[2]:7}")

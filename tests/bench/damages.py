"""Random damages of the library's machines, as `topoplan check` reads them: found, named right, costed right.

Found: something is said to be amiss. Named: each damage has its fault, of the right kind on the right devices, and no
other fault is told. Costed: the rates now and healthy are those of plans of both descriptions, made apart. The last
line is of machines without a switch whose GPUs have other numbers than in the library, so their places must be found.

The first table is of every single NVLink that is slow, thinner or gone, one at a time: as JSON, as JSON without numbers
of wires, and as text; of whole machines, and of allocations by the machine's numbers and counted from 0. A damaged
allocation may equal a sound one, which the answer says; or it resembles no machine, and is not called healthy.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import topoplan
from tests.support.damaged_machines import (
    IN_TEXT,
    KINDS,
    NAMED,
    Damage,
    Machine,
    allocation,
    allocations,
    as_text,
    damaged,
    every_damage,
    read_library,
    renumbered,
    uncounted,
)
from topoplan.machine.small_machines import SMALL_MACHINES
from topoplan.operate.compare.costs import TIME_LIMIT, costs_of
from topoplan.operate.diagnosis import Diagnosis, diagnose
from topoplan.reading.load import library

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


FORMS = ("JSON", "JSON without counts", "text")

OUTCOMES = ("found", "named", "equals", "unknown", "healthy")
"""A fault is told; only the right one; none, but a sound allocation is named; no machine resembled; called healthy."""


def single_outcomes(machine: Machine) -> Iterator[tuple[str, str, set[str]]]:
    """The form, the kind of the one damage, or ``sound``, and its outcomes."""
    sound = [("sound", machine, None)]
    for kind, broken, damage in [*sound, *((d.kind, b, d) for b, d in every_damage(machine))]:
        for form in FORMS:
            if form == "text" and (kind == "halved" or str(machine["name"]).startswith(("mi", "pcie"))):
                continue
            text = as_text(broken) if form == "text" else json.dumps(broken)
            found = diagnose(topoplan.load(json.dumps(uncounted(broken)) if form == FORMS[1] else text))
            yield form, kind, _outcomes(found, damage)


def _outcomes(found: Diagnosis, damage: Damage | None) -> set[str]:
    if not found.faults:
        return {"healthy" if found.healthy else "equals" if found.places else "unknown"}
    whole = damage is not None and any(_same(f.devices, damage, f.kind) for f in found.faults)
    return {"found", "named"} if whole and len(found.faults) == 1 else {"found"}


def single_tallies(names: Sequence[str]) -> dict[tuple[str, str, str], Counter[str]]:
    """Outcomes of single damages by what was given, form and kind: of whole machines, and of their allocations."""
    tallies: dict[tuple[str, str, str], Counter[str]] = {}
    for name in names:
        whole = read_library(name)
        parts = [("whole", whole)]
        for gpus in islice(allocations(whole), MOST_PARTS) if len(whole["devices"]) < LARGEST else ():
            parts.append(("part", allocation(whole, gpus)))
            if gpus != tuple(f"gpu{number}" for number in range(len(gpus))):
                parts.append(("part from 0", allocation(whole, gpus, from_zero=True)))
        for what, machine in parts:
            for form, kind, outcomes in single_outcomes(machine):
                tallies.setdefault((what, form, kind), Counter())["all"] += 1
                tallies[what, form, kind].update(outcomes)
    return tallies


LARGEST = 100
"""Devices of a machine whose allocations are not tried: of NVL72 any GPUs are alike."""

MOST_PARTS = 60
"""Allocations of a machine that are tried, the smallest first: all of a machine of 8 GPUs."""


def main(number: int = 200) -> None:
    tallies = single_tallies([name for name in library() if name not in SMALL_MACHINES])
    print("# every single damaged NVLink of the library, read by topoplan check")
    print(f"{'given':12} {'form':20} {'damage':8} {'all':>5}", *(f"{name:>8}" for name in OUTCOMES))
    for (what, form, kind), tally in sorted(tallies.items(), key=lambda one: one[0]):
        print(f"{what:12} {form:20} {kind:8} {tally['all']:5}", *(f"{tally[name]:8}" for name in OUTCOMES))

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

"""Machines of the library with random damages, written as descriptions by a writer that shares nothing with topoplan.

Only the library's files are read, as plain JSON. A damage is known in advance: which kind of fault, on which devices.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from tests.support.checkout import ROOT

Machine = dict[str, Any]

KINDS = ("gone", "thinner", "halved", "one-way", "bare", "slow PCIe")

NAMED = {
    "gone": ("link missing", "no NVLink"),
    "thinner": ("link missing",),
    "halved": ("link slow",),
    "one-way": ("link one-way",),
    "bare": ("no NVLink",),
    "slow PCIe": ("PCIe slow",),
}
"""Kinds of faults under which a damage may be found; a link that is gone may have been its GPU's last."""

IN_TEXT = ("gone", "thinner", "bare")  # damages that a matrix of nvidia-smi can show


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that was broken: its kind, and the devices that must be named, one of them where a GPU is bare."""

    kind: str
    devices: tuple[str, ...]


def read_library(name: str) -> Machine:
    machine: Machine = json.loads((ROOT / "topologies" / f"{name}.json").read_text(encoding="utf-8"))
    return machine


def damaged(machine: Machine, kinds: Sequence[str], rng: random.Random) -> tuple[Machine, tuple[Damage, ...]]:
    """A copy with one random damage for each kind, no two of them on one link; kinds it cannot have are left out."""
    broken = copy.deepcopy(machine)
    done: list[Damage] = []
    touched: set[frozenset[str]] = set()
    for kind in kinds:
        places = _places(broken, kind, touched)
        if not places:
            continue
        devices = rng.choice(places)
        touched |= _break(broken, kind, devices, rng)
        done.append(Damage(kind, devices))
    return broken, tuple(done)


def every_damage(machine: Machine) -> Iterator[tuple[Machine, Damage]]:
    """Every NVLink of the machine at half its rate, with fewer wires, and gone, one at a time."""
    kinds = ("halved", "thinner", "gone" if _places(machine, "gone", set()) else "bare")
    for kind in kinds:
        for devices in _places(machine, kind, set()):
            broken = copy.deepcopy(machine)
            _break(broken, kind, devices, random.Random(0))
            yield broken, Damage(kind, devices)


def uncounted(machine: Machine) -> Machine:
    """The machine without the numbers of wires."""
    links = [{key: value for key, value in link.items() if key != "count"} for link in machine["links"]]
    return machine | {"links": links}


def allocation(machine: Machine, gpus: Sequence[str], *, from_zero: bool = False) -> Machine:
    """Some GPUs of the machine, by its own numbers or, as in a container, counted from 0."""
    numbers = {gpu: f"gpu{number}" for number, gpu in enumerate(gpus)} if from_zero else {}
    devices = [
        device | {"name": numbers.get(device["name"], device["name"])}
        for device in machine["devices"]
        if device["kind"] != "gpu" or device["name"] in gpus
    ]
    gone = {device["name"] for device in machine["devices"] if device["kind"] == "gpu"} - set(gpus)
    links = [
        link | {end: numbers.get(link[end], link[end]) for end in ("src", "dst")}
        for link in machine["links"]
        if not gone & {link["src"], link["dst"]}
    ]
    return machine | {"devices": devices, "links": links}


def allocations(machine: Machine) -> Iterator[tuple[str, ...]]:
    """Two GPUs or more, not all: one choice for all with the same numbers of NVLinks; behind a switch the first."""
    gpus = [device["name"] for device in machine["devices"] if device["kind"] == "gpu"]
    wires = {
        (link["src"], link["dst"]): link.get("count", 1)
        for link in machine["links"]
        if link["channel"] == "nvlink"
    }
    direct = any(src in gpus and dst in gpus for src, dst in wires)
    known = set()
    for size in range(2, len(gpus)):
        for chosen in combinations(gpus, size) if direct else [tuple(gpus[:size])]:
            rows = (tuple(sorted(wires.get((a, b), 0) for b in chosen)) for a in chosen)
            sign = (size, *sorted(rows))
            if sign not in known:
                known.add(sign)
                yield chosen


def _places(machine: Machine, kind: str, touched: set[frozenset[str]]) -> list[tuple[str, ...]]:
    gpus = [device["name"] for device in machine["devices"] if device["kind"] == "gpu"]
    pairs: dict[tuple[str, str], dict[str, Any]] = {}
    for link in machine["links"]:
        if link["channel"] == ("pcie" if kind == "slow PCIe" else "nvlink"):
            ends = tuple(sorted((link["src"], link["dst"])))
            pairs.setdefault((ends[0], ends[1]), link)
    switched = any("nvswitch" in first + second for first, second in pairs)
    if kind == "bare":
        untouched = [
            gpu
            for gpu in gpus
            if any(gpu in pair for pair in pairs) and not any(gpu in pair for pair in touched)
        ]
        return [(gpu,) for gpu in untouched]
    free = [pair for pair in pairs if frozenset(pair) not in touched]
    if kind == "slow PCIe":
        return [pair for pair in free if set(pair) & set(gpus) and not any("nic" in end for end in pair)]
    if kind == "thinner":
        return [pair for pair in free if pairs[pair].get("count", 1) > 1]
    if kind == "gone":
        return [] if switched else list(free)
    return list(free)


def _break(machine: Machine, kind: str, devices: tuple[str, ...], rng: random.Random) -> set[frozenset[str]]:
    """Break it, and say which links are touched."""
    channel = "pcie" if kind == "slow PCIe" else "nvlink"
    links = [
        link
        for link in machine["links"]
        if link["channel"] == channel and set(devices) <= {link["src"], link["dst"]}
    ]
    touched = {frozenset((link["src"], link["dst"])) for link in links}
    if kind in ("gone", "bare"):
        machine["links"] = [link for link in machine["links"] if link not in links]
    elif kind == "one-way":
        machine["links"].remove(rng.choice(links))
    elif kind == "thinner":
        count = links[0]["count"]
        left = rng.randint(max(1, count // 2), count - 1)
        for link in links:
            link["bandwidth"] = link["bandwidth"] * left / count
            link["count"] = left
    else:
        for link in links:
            link["bandwidth"] /= 2
    return touched


def renumbered(
    machine: Machine, damages: Sequence[Damage], rng: random.Random
) -> tuple[Machine, tuple[Damage, ...]]:
    """The machine with its GPUs in another order, and the damages under their numbers there."""
    gpus = [device["name"] for device in machine["devices"] if device["kind"] == "gpu"]
    names = dict(zip(gpus, rng.sample(gpus, len(gpus)), strict=True))
    moved = copy.deepcopy(machine)
    for link in moved["links"]:
        link["src"], link["dst"] = (names.get(link[end], link[end]) for end in ("src", "dst"))
    return moved, tuple(Damage(d.kind, tuple(names.get(one, one) for one in d.devices)) for d in damages)


def as_text(machine: Machine) -> str:
    """What ``nvidia-smi topo -m`` would print, with the CPU affinity of the GPUs."""
    kind_of = {device["name"]: device["kind"] for device in machine["devices"]}
    gpus = [name for name, kind in kind_of.items() if kind == "gpu"]
    nics = [name for name, kind in kind_of.items() if kind == "nic"]
    wires: dict[tuple[str, str], int] = {}
    ports: dict[str, int] = {}
    above: dict[str, str] = {}
    for link in machine["links"]:
        src, dst = link["src"], link["dst"]
        if link["channel"] == "nvlink" and kind_of[src] == "gpu":
            if kind_of[dst] == "gpu":
                wires[src, dst] = link.get("count", 1)
            else:
                ports[src] = ports.get(src, 0) + link.get("count", 1)
        elif link["channel"] in ("pcie", "c2c") and kind_of[dst] in ("pcie", "cpu") and kind_of[src] != "cpu":
            above.setdefault(src, dst)
    lines = ["\t".join(["", *(_printed(name) for name in gpus + nics), "CPU Affinity"])]
    cpus = [name for name, kind in kind_of.items() if kind == "cpu"]
    for row in gpus + nics:
        cells = []
        for column in gpus + nics:
            count = wires.get((row, column), min(ports.get(row, 0), ports.get(column, 0)))
            code = f"NV{count}" if count else _code(_way(row, above), _way(column, above))
            cells.append(" X " if row == column else code)
        home = cpus.index(_way(row, above)[-1]) if row in above else 0
        cells += [f"{home * 16}-{home * 16 + 15}"] if row in gpus else []
        lines.append("\t".join([_printed(row), *cells]))
    return "\n".join([*lines, "", "Legend:", ""])


def _printed(name: str) -> str:
    return name.upper() if name.startswith("gpu") else f"mlx5_{name[3:]}"


def _way(name: str, above: dict[str, str]) -> list[str]:
    way = [name]
    while way[-1] in above:
        way.append(above[way[-1]])
    return way[1:] or ["?"]


def _code(first: list[str], second: list[str]) -> str:
    """How two devices meet, from what is above each, nearest first."""
    shared = [name for name in first if name in second]
    if not shared:
        return "SYS"
    if shared[0].startswith("cpu"):
        return "NODE"
    return "PIX" if first[0] == second[0] else "PXB"

"""The lock of the house: each room's size, the files that common tasks enter, names, arrows between rooms, words.

The budgets stand in ``tests/house.toml``. They may only go down; a change that raises one gives its reason there in the
same commit. ``python -m tests.test_house`` prints what is beside what is allowed.
"""

from __future__ import annotations

import ast
import collections
import functools
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.seeded_bugs import BUGS
from tests.support.checkout import ROOT

BUDGET: dict[str, Any] = tomllib.loads((ROOT / "tests/house.toml").read_text(encoding="utf-8"))
PACKAGES = ("topoplan", "collectives")
FILES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
HEAVY = {"scipy", "networkx", "matplotlib", "cupy", "mpi4py", "torch", "pynvml"}

SMALL_LINES = 120  # a module below this size that a single other module imports belongs to that module

# Statements are found in the text: parsing all modules takes seconds. `ruff format` leaves one statement on a line.
_NAMES = r"[\w.*]+(?: as \w+)?(?:, [\w.]+(?: as \w+)?)*"
IMPORT = re.compile(
    rf"^[ \t]*(import {_NAMES}|from [\w.]+ import (?:{_NAMES}|\([^)]*\)))(?:  #.*)?$", re.MULTILINE
)
CLASS = re.compile(r"^class ([A-Za-z]\w*)[:(\[]", re.MULTILINE)

ASK = "merge, delete or shorten; or raise the budget in tests/house.toml, with a reason, in the same commit"


@functools.cache
def text_of(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def lines_of(path: Path) -> int:
    return text_of(path).count("\n")


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    return frozenset(imported(ast.parse("\n".join(IMPORT.findall(text_of(path))))))


def dotted(path: Path) -> str:
    """Return the module's name as it is imported."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def room_of(path: Path) -> str:
    return ".".join(path.parts[:2]) if len(path.parts) > 2 else path.parts[0]


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield what a module imports, as `module.name` for each name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert all(alias.name != "*" for alias in node.names), "no stars"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_sizes() -> dict[str, dict[str, int]]:
    sizes: dict[str, dict[str, int]] = {}
    for path in FILES:
        room = sizes.setdefault(room_of(path), {"lines": 0, "modules": 0})
        room["lines"] += lines_of(path)
        room["modules"] += 1
    return sizes


@functools.cache
def walks() -> dict[str, list[str]]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.walks"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found: dict[str, list[str]] = json.loads(run.stdout)
    return found


def repeated_class_names() -> dict[str, list[str]]:
    """Return the public names that several classes of a package have, with their modules."""
    homes: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for path in FILES:
        for name in CLASS.findall(text_of(path)):
            homes[path.parts[0], name].append(dotted(path))
    return {name: modules for (_, name), modules in homes.items() if len(modules) > 1}


def lone_modules() -> dict[str, str]:
    """Return the small modules with one importer, and that importer."""
    names = {dotted(path) for path in FILES}
    importers: dict[str, set[str]] = collections.defaultdict(set)
    for path in FILES:
        if path.name == "__init__.py":
            continue
        for name in imports_of(path):
            module = name if name in names else name.rpartition(".")[0]
            if module in names and module != dotted(path):
                importers[module].add(dotted(path))
    return {
        dotted(path): next(iter(importers[dotted(path)]))
        for path in FILES
        if path.name != "__init__.py" and lines_of(path) < SMALL_LINES and len(importers[dotted(path)]) == 1
    }


def words() -> dict[str, list[str]]:
    """Return the places of each pattern of ``house.toml``; lines listed there as exceptions do not count."""
    allowed = set(BUDGET["words"]["exceptions"])
    found: dict[str, list[str]] = {pattern: [] for pattern in BUDGET["words"]["patterns"]}
    for path in FILES:
        text = text_of(path)
        for pattern, places in found.items():
            for match in re.finditer(pattern, text, re.MULTILINE):
                number = text.count("\n", 0, match.end()) + 1
                if text.split("\n")[number - 1].strip() not in allowed:
                    places.append(f"{path}:{number}")
    return found


def test_rooms_keep_to_their_lines_and_modules() -> None:
    sizes, budget = room_sizes(), BUDGET["rooms"]
    assert sorted(sizes) == sorted(budget), "tests/house.toml lists every room"
    over = [
        f"{room} has {sizes[room][kind]} {kind} of {budget[room][kind]}"
        for room in sizes
        for kind in ("lines", "modules")
        if sizes[room][kind] > budget[room][kind]
    ]
    assert not over, f"{'; '.join(over)}: {ASK}"


@pytest.mark.thorough
def test_walks_enter_no_more_files() -> None:
    entered, budget = walks(), BUDGET["walks"]
    assert sorted(entered) == sorted(budget)
    over = [
        f"{walk} enters {len(files)} files of {budget[walk]}: {' '.join(files)}"
        for walk, files in entered.items()
        if len(files) > budget[walk]
    ]
    assert not over, f"{'; '.join(over)}: {ASK}"


def test_a_class_name_has_one_meaning() -> None:
    repeated = {
        name: modules
        for name, modules in repeated_class_names().items()
        if name not in BUDGET["names"]["repeated"]
    }
    assert not repeated, "the room's noun stands first in a class name that another class has"


def test_no_small_module_has_a_single_importer() -> None:
    lone = {
        module: importer
        for module, importer in lone_modules().items()
        if module not in BUDGET["lone_modules"]
    }
    offenders = [f"{module} into {importer}" for module, importer in sorted(lone.items())]
    assert not offenders, (
        f"modules below {SMALL_LINES} lines with one importer: merge {', '.join(offenders)}; "
        "or list them in tests/house.toml, with a reason"
    )


def test_sources_keep_to_the_language_of_the_field() -> None:
    over = [
        f"{pattern!r} stands {len(places)} times, allowed {BUDGET['words']['patterns'][pattern]}: "
        f"{', '.join(places[:20])}"
        for pattern, places in words().items()
        if len(places) > BUDGET["words"]["patterns"][pattern]
    ]
    assert not over, "; ".join(over)


def test_each_room_imports_only_rooms_before_it() -> None:
    """Also inside functions; `__init__.py` and `__main__.py` of a package stand above all its rooms."""
    order: dict[str, list[str]] = BUDGET["order"]
    wrong = []
    for path in FILES:
        package, here = path.parts[0], path.parts[1].removesuffix(".py")
        rooms = order[package]
        allowed = rooms if here.startswith("__") else rooms[: rooms.index(here) + 1]
        # Commands that collectives adds are found by entry points and built of the command line's parts.
        command = here in BUDGET["order"]["commands"]
        for name in sorted(imports_of(path)):
            parts = name.split(".")
            above = package == "topoplan" and parts[0] == "collectives"
            printing = package == "collectives" and parts[:2] == ["topoplan", "cli"] and not command
            later = parts[0] == package and len(parts) > 1 and parts[1] in rooms and parts[1] not in allowed
            if (above or printing or later) and f"{path} {name}" not in BUDGET["order"]["exceptions"]:
                wrong.append(f"{path} imports {name}")
    assert not wrong


def of_torch(path: Path) -> bool:
    """Return whether a module needs torch as a whole, and is loaded when torch is asked for."""
    return "torch" in path.parts[:-1] or dotted(path) in BUDGET["order"]["of_torch"]


def test_optional_and_slow_libraries_are_imported_where_they_are_used() -> None:
    """No module of the packages loads them on import; annotations under TYPE_CHECKING do not count."""
    loading = []
    for path in FILES:
        if of_torch(path) or not HEAVY & {name.split(".")[0] for name in imports_of(path)}:
            continue
        for node in ast.parse(text_of(path)).body:
            annotations = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            if annotations or isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                continue
            if {name.split(".")[0] for name in imported(node)} & HEAVY:
                loading.append(f"{path}:{node.lineno}")
    assert not loading


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import topoplan", HEAVY | {"numpy"}),
        ("import topoplan; topoplan.load('dgx-1v')", HEAVY),
        ("import topoplan; topoplan.verify(topoplan.plan(topoplan.load('dgx-1v')))", HEAVY),
        ("import topoplan; topoplan.load(topoplan.ring_plan('dgx-1v').topology.to_json())", HEAVY),
        ("import topoplan, collectives", HEAVY),
    ],
)
def test_what_a_process_loads(code: str, absent: set[str]) -> None:
    """`import topoplan` loads neither numpy nor anything slower; an exact plan needs no scipy."""
    report = f"{code}\nimport sys\nprint(*sys.modules, sep='\\n')"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", report], env=environment, capture_output=True, text=True, check=True
    )
    assert not {name.split(".")[0] for name in run.stdout.split()} & absent


def picture() -> str:
    """Return the rooms and their imports as a Mermaid graph; an arrow that others imply is left out.

    The roots (errors, units, plugins, private_files, interrupts) are used everywhere and not drawn.
    """
    imports: dict[str, set[str]] = collections.defaultdict(set)
    drawn = {f"{package}.{room}" for package in PACKAGES for room in BUDGET["order"][package]}
    drawn -= {f"topoplan.{root}" for root in ("errors", "units", "plugins", "private_files", "interrupts")}
    for path in FILES:
        room = ".".join(dotted(path).split(".")[:2])
        for name in imports_of(path):
            other = ".".join(name.split(".")[:2])
            excepted = f"{path} {name}" in BUDGET["order"]["exceptions"]
            if room in drawn and other in drawn - {room} and not excepted:
                imports[room].add(other)

    @functools.cache
    def reached(room: str) -> frozenset[str]:
        return frozenset(imports[room]).union(*(reached(other) for other in imports[room]))

    lines = ["graph LR"]
    for package in PACKAGES:
        rooms = [name for name in BUDGET["order"][package] if f"{package}.{name}" in drawn]
        lines += [f"  subgraph {package}", *(f"    {package}.{name}[{name}]" for name in rooms), "  end"]
    for room in sorted(imports):
        implied = frozenset[str]().union(*(reached(other) for other in imports[room]))
        lines += [f"  {other} --> {room}" for other in sorted(imports[room] - implied)]
    return "\n".join(lines)


def test_the_picture_of_the_rooms_is_that_of_the_imports() -> None:
    """`python -m tests.test_house --picture` draws it anew."""
    assert picture() in (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def test_seeded_bugs_have_their_places() -> None:
    """Code that has moved takes its bug along, which `tests.seeded_bugs` would otherwise lose."""
    texts = {bug.file: (ROOT / bug.file).read_text(encoding="utf-8") for bug in BUGS}
    assert [bug.name for bug in BUGS if texts[bug.file].count(bug.old) != 1] == []


def main() -> int:
    """Print every figure beside its budget; with ``--picture`` the graph of ARCHITECTURE.md."""
    if "--picture" in sys.argv[1:]:
        print(picture())
        return 0
    sizes = room_sizes()
    for room, size in sizes.items():
        allowed = BUDGET["rooms"].get(room, {})
        print(f"{room:32} {size['lines']:6} of {allowed.get('lines')} lines", end=" ")
        print(f"{size['modules']:4} of {allowed.get('modules')} modules")
    total = [sum(size[kind] for size in sizes.values()) for kind in ("lines", "modules")]
    print(f"{'all':32} {total[0]:6} lines {total[1]:4} modules")
    for walk, files in walks().items():
        print(f"{walk:32} {len(files):6} of {BUDGET['walks'].get(walk)} files")
    print("class names with several meanings:", *sorted(repeated_class_names()))
    print("lone modules:", *sorted(lone_modules()))
    for pattern, places in words().items():
        print(f"{pattern:32} {len(places):6} of {BUDGET['words']['patterns'][pattern]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

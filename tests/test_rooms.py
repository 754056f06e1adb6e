"""The rooms keep their order: each imports only rooms before it, and importing topoplan stays light."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkout import ROOT

MODULES = sorted(
    path.relative_to(ROOT) for room in ("topoplan", "collectives") for path in (ROOT / room).rglob("*.py")
)

ORDER = [
    *("errors", "offers", "units", "topology", "degraded", "in_network"),
    *("hosts", "clusters", "calibration"),
    *("formats", "machines", "probing"),
    *("simplex", "fabric", "symmetry", "trees"),
    *("plans", "bounds", "columns", "simulation", "packing", "health"),
    *("schedules", "ordering", "choice", "compare", "plot", "export", "interpreters", "report"),
    "cli",
]

COLLECTIVES = [
    *("compiled", "reduction", "kernels", "arrays", "wire", "selection"),
    *("peers", "lowering", "backends"),
    *("job", "execution", "sparse", "communicator"),
    *("staleness", "training", "optimisers", "torch"),
    *("benchmark", "testbed", "launching", "chaos", "calibration", "examples", "commands"),
]
"""The rooms of collectives in the same way."""

HEAVY = {"scipy", "networkx", "matplotlib", "cupy", "mpi4py", "torch", "pynvml"}


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert all(alias.name != "*" for alias in node.names), "no stars"
            whole = [f"topoplan.{alias.name}" for alias in node.names] if node.module == "topoplan" else []
            yield from whole or [str(node.module)]


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_each_room_imports_only_rooms_before_it(module: Path) -> None:
    """Also inside functions; `__init__.py` and `__main__.py` stand above all rooms."""
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    names = set(imported(tree))
    if module.parts[0] == "collectives":
        # What `commands` adds to the command line is found by entry points and built of its parts.
        adds = module.parts[1] == "commands"
        assert adds or not {name for name in names if name.startswith("topoplan.cli")}
        above = module.parts[1] == "__init__.py"
        place = len(COLLECTIVES) if above else COLLECTIVES.index(module.parts[1].removesuffix(".py"))
        for name in sorted(names):
            if name.startswith("collectives."):
                assert name.split(".")[1] in COLLECTIVES[: place + 1], f"{module} imports {name}"
        return
    here = module.parts[1].removesuffix(".py")
    assert here in ("__init__", "__main__", *ORDER), f"{module} belongs to no room"
    allowed = ORDER if here.startswith("__") else ORDER[: ORDER.index(here) + 1]
    for name in sorted(names):
        if name.startswith("topoplan."):
            assert name.split(".")[1] in allowed, f"{module} imports {name}"
        assert name.split(".")[0] != "collectives", f"{module} imports {name}"


def of_torch(module: Path) -> bool:
    """Modules that are nothing without torch and are loaded when it is asked for."""
    alone = module.name in (
        "torch_arrays.py",
        "torch_entry_arrays.py",
        "torch_on_cupy.py",
        "train_cifar_like.py",
        "cifar_like.py",
        "fewer_ranks.py",
    )
    return alone or "torch" in module.parts[:-1]


@pytest.mark.parametrize("module", [module for module in MODULES if not of_torch(module)], ids=str)
def test_optional_and_slow_libraries_are_imported_where_they_are_used(module: Path) -> None:
    """No module of topoplan or collectives loads them on import; annotations under TYPE_CHECKING do not count."""
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    top = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    loaded = [
        name
        for node in top
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef))
        for name in imported(node)
    ]
    assert not {name.split(".")[0] for name in loaded} & HEAVY


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import topoplan", HEAVY | {"numpy"}),
        ("import topoplan; topoplan.load('dgx-1v')", HEAVY),
        ("import topoplan; topoplan.verify(topoplan.plan(topoplan.load('dgx-1v')))", HEAVY),
        ("import topoplan; topoplan.load(topoplan.ring('dgx-1v').topology.to_json())", HEAVY),
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

"""Which doctests pytest collects and which of them the default run takes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from _pytest.doctest import DoctestItem, DoctestModule
from _pytest.mark.expression import Expression

WITH_TORCH = [
    "collectives/backends/torch/*",
    "collectives/examples/*ddp.py",
    "collectives/examples/*_plain.py",
    "collectives/examples/fsdp2.py",
    "collectives/examples/train_*.py",
    "collectives/torch/*",
    "*/torch_arrays.py",
    "*/torch_entry_arrays.py",
]
collect_ignore_glob = [] if find_spec("torch") else WITH_TORCH
TESTS = Path(__file__).parent / "tests"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector from walking thousands of items, which live as long as the session.

    Afterwards it starts more rarely than by default, when it takes a fiftieth of the tests' time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)


@cache
def takes_thorough(expression: str) -> bool:
    """Whether an expression of ``-m`` takes tests whose only mark is thorough."""
    return not expression or Expression.compile(expression).evaluate(lambda name, /, **_: name == "thorough")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Iterator[None]:
    """Leave out doctests of tests, which have none, and without an import those that ``-m`` leaves out."""
    found = yield
    if TESTS not in file_path.parents:
        module = ".".join(file_path.relative_to(TESTS.parent).with_suffix("").parts).removesuffix(".__init__")
        if takes_thorough(parent.config.option.markexpr) or module in exporting_modules():
            return found
    return [one for one in found if not isinstance(one, DoctestModule)]


@cache
def exporting_modules() -> set[str]:
    """Return the modules that define what the packages export, and the units of the command line."""
    packages = ["topoplan", "collectives", *(["collectives.torch"] if find_spec("torch") else [])]
    exported = [getattr(module, name) for module in map(import_module, packages) for name in module.__all__]
    return {"topoplan.units", *(getattr(one, "__module__", "") for one in exported)}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the doctests of modules that export nothing as thorough."""
    doctests = [item for item in items if isinstance(item, DoctestItem)]
    exporting = exporting_modules() if doctests else set()
    for item in doctests:
        if item.dtest.globs["__name__"] not in exporting:
            item.add_marker(pytest.mark.thorough)

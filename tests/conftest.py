"""Where the tests find listings of real machines, which are no part of this repository; what several modules run."""

from __future__ import annotations

import io
import math
import os
import signal
import sys
from collections.abc import Collection, Generator
from functools import cache, partial
from pathlib import Path

import hypothesis
import pytest
from _pytest.mark.expression import Expression

from tests.support.checkout import ROOT, Run
from tests.support.fake_machine.fixtures import fake_here as fake_here
from tests.support.fake_machine.fixtures import fake_host as fake_host
from tests.support.fake_machine.fixtures import fake_nvml as fake_nvml
from tests.support.listings import FABRICS, MACHINES
from topoplan.cli.main import main

# A shell that starts the tests in the background lets them ignore Ctrl-C, and with them the processes that they start
# and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time; `make test-random` searches among others, with --hypothesis-profile=random.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.register_profile("random", print_blob=True, deadline=None)
hypothesis.settings.load_profile("fixed")

SAMPLE = (3 - math.sqrt(5)) / 9
"""The share of a sampled test's cases that run by default, a twelfth; irrational, so that a period hides no kind."""

collect_ignore_glob = ["bench/*", "faults/*", "jobs/*_ranks.py"]
"""Commands, and what ranks of jobs run: they have no examples, and import what takes seconds."""


def pytest_configure() -> None:
    """Processes find this checkout, share the kernels that they compile, and calculate in one thread each."""
    os.environ.setdefault("TOPOPLAN_KERNEL_CACHE", str(ROOT / "build" / "kernels"))
    # as torchrun sets it: threads of OpenMP spin while they wait, on processors that other tests need
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """One process more than pytest-xdist takes by itself, since many tests wait for something."""
    return (yield) + 1


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None]:
    """Mark the cases of sampled tests, and make no items of cases that ``-m`` leaves out: they are most of all cases.

    A twelfth of sampled cases runs by default, another twelfth is thorough, the rest slow. A test that is thorough
    itself has a twenty-fourth that is thorough; the rest are slow.
    """
    yield
    shared = {mark.name for mark in metafunc.definition.iter_markers()}
    if {"machines_dir", "fabrics_dir"} & set(metafunc.fixturenames):
        shared.add("listings")
    # hypothesis marks its tests later
    wanted = _expression(metafunc.config.option.markexpr or "slow or not slow")
    taken = []
    # the first case without a mark runs by default, wherever it stands
    numbers = dict.fromkeys((False, True), 0)
    for case in metafunc._calls:
        marks = shared | {mark.name for mark in case.marks}
        if "sampled" in marks and "slow" not in marks:
            thorough = "thorough" in marks
            place = numbers[thorough] * SAMPLE % 1
            numbers[thorough] += 1
            if place >= SAMPLE * (0.5 if thorough else 2):
                case.marks.append(pytest.mark.slow.mark)
                marks.add("slow")
            elif place >= SAMPLE:
                case.marks.append(pytest.mark.thorough.mark)
                marks.add("thorough")
        if any(wanted.evaluate(partial(_has, some)) for some in (marks, marks | {"hypothesis"})):
            taken.append(case)
    # a test without cases would become an item without parameters
    metafunc._calls[:] = taken or metafunc._calls[:1]


_expression = cache(Expression.compile)


def _has(marks: Collection[str], name: str, /, **_: object) -> bool:
    return name in marks


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what reads listings."""
    for item in items:
        if {"machines_dir", "fabrics_dir"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.listings)


@pytest.fixture(scope="session")
def machines_dir() -> Path:
    """Folder of real machine descriptions (TOPOPLAN_MACHINES)."""
    if not MACHINES.is_dir():
        pytest.skip("no machine descriptions: set TOPOPLAN_MACHINES to their folder")
    return MACHINES


@pytest.fixture(scope="session")
def fabrics_dir() -> Path:
    """Folder of other descriptions of known machines (TOPOPLAN_ANSWERS)."""
    if not FABRICS.is_dir():
        pytest.skip("no descriptions of known machines: set TOPOPLAN_ANSWERS to their folder")
    return FABRICS


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process; returns its exit status, stdout and stderr."""

    def call(*arguments: str, stdin: str | bytes = "") -> tuple[int, str, str]:
        given = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        capsys.readouterr()
        status = main(arguments)
        return (status, *capsys.readouterr())

    return call

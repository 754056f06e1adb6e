"""Seed one bug at a time and say which test catches it: ``python -m tests.seeded_bugs [NAME ...] [--list]``.

Each bug replaces one place of the sources in a copy of the checkout. The tests that it names run there: first those of
``make test``, and if all of these pass, those of ``make test-all``. A test that fails without the bug too counts as
nowhere. A bug that no test catches ends the command with exit status 1; so does a bug whose place is not found exactly
once, because the source has changed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.checkout import ROOT

THOROUGH = "(thorough or listings) and not gpu and not slow"
COPIED = (
    "topoplan",
    "collectives",
    "tests",
    "topologies",
    "docs",
    "conftest.py",
    "pyproject.toml",
    "README.md",
)


@dataclass(frozen=True, slots=True)
class Bug:
    """One bug: code that occurs exactly once in a file, what replaces it, and the tests that should catch it."""

    name: str
    idea: str  # the kind of mistake, such as "off by one"
    file: str  # path from the root of the checkout
    old: str
    new: str
    tests: tuple[str, ...]  # arguments of pytest


def bugs_of(text: str) -> tuple[Bug, ...]:
    found = re.findall(r"^([\w-]+): (.+) in (\S+)\n- (.+)\n\+ (.+)\n(.+)$", text, re.MULTILINE)
    return tuple(Bug(*about, tuple(tests.split())) for *about, tests in found)


BUGS = bugs_of((ROOT / "tests/seeded_bugs.txt").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Where a bug is caught: ``make test``, ``make test-all`` or nowhere, by which test, after how many seconds."""

    bug: Bug
    place: str
    test: str
    seconds: float


def seed(bug: Bug, checkout: Path) -> str:
    """Replace the bug's place in a checkout; return the original text of the file."""
    path = checkout / bug.file
    text = path.read_text(encoding="utf-8")
    if text.count(bug.old) != 1:
        raise SystemExit(
            f"{bug.name}: {bug.old!r} stands {text.count(bug.old)} times in {bug.file}; update the bug"
        )
    path.write_text(text.replace(bug.old, bug.new), encoding="utf-8")
    return text


def failing_test(checkout: Path, tests: Sequence[str], markers: str | None) -> str:
    """Run tests until one fails; return its name, or an empty text if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    if markers is not None:
        command += ["-m", markers]
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if run.returncode in (0, 5):  # 5: no test has these markers
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", run.stdout, re.MULTILINE)
    return found.group(1) if found else f"pytest ended with {run.returncode}"


def judge(bug: Bug, checkout: Path) -> Verdict:
    """Seed a bug, run its tests, and restore the file; a test that fails without the bug too catches nothing."""
    begun = time.monotonic()
    for place, markers in (("make test", None), ("make test-all", THOROUGH)):
        text = seed(bug, checkout)
        try:
            test = failing_test(checkout, bug.tests, markers)
        finally:
            (checkout / bug.file).write_text(text, encoding="utf-8")
        if test:
            broken = "::" in test and failing_test(checkout, [test], "")
            return Verdict(bug, "nowhere" if broken else place, test, time.monotonic() - begun)
    return Verdict(bug, "nowhere", "", time.monotonic() - begun)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each bug; return 1 if any is not caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", help="bugs to seed; all of them by default")
    parser.add_argument("--list", action="store_true", help="print the bugs and seed none")
    asked = parser.parse_args(arguments)
    unknown = set(asked.names) - {bug.name for bug in BUGS}
    if unknown:
        parser.error(f"no bug is called {', '.join(sorted(unknown))}; --list prints all")
    bugs = [bug for bug in BUGS if not asked.names or bug.name in asked.names]
    if asked.list:
        for bug in bugs:
            print(f"{bug.name:36} {bug.idea:22} {bug.file}")
        return 0
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        checkout.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, checkout / name)
        for bug in bugs:
            verdict = judge(bug, checkout)
            caught += verdict.place != "nowhere"
            row = f"{bug.name:36} {bug.idea:22} {verdict.place:14} {verdict.seconds:6.1f} s  {verdict.test}"
            print(row, flush=True)
    print(f"{caught} of {len(bugs)} bugs are caught")
    return 0 if caught == len(bugs) else 1


if __name__ == "__main__":
    sys.exit(main())

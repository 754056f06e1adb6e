"""What is installed from a wheel is whole: it plans, verifies and runs away from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support.checkout import ROOT

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return folder


def test_a_wheel_plans_verifies_and_runs(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    home = tmp_path / "home"
    options = ["--quiet", "--no-deps", "--no-index", "--target", str(home)]
    pip = [sys.executable, "-m", "pip", "install", *options, str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    environment = os.environ | {"PYTHONPATH": str(home)}

    def printed(*words: str) -> str:
        command = [sys.executable, *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        return done.stdout

    where = printed("-c", "import topoplan, collectives; print(topoplan.__file__, collectives.__file__)")
    assert all(path.startswith(str(home)) for path in where.split())
    assert "over NVLink: provably optimal" in printed("-m", "topoplan", "plan", "dgx-1v", "-o", "plan.json")
    assert ": provably optimal" in printed("-m", "topoplan", "verify", "plan.json")
    assert "all_reduce of 8 ranks, loopback" in printed(
        "-m", "topoplan", "bench", "plan.json", "--sizes", "64KB"
    )
    sources = "from collectives.tables.kernels import source; print(len(source.kernel_source(source.kernel_names())))"
    assert int(printed("-c", sources)) > 0
    assert {path.relative_to(ROOT) for path in ROOT.glob("collectives/tables/kernels/*.cu")} <= {
        path.relative_to(home) for path in home.rglob("*.cu")
    }


def test_a_source_distribution_has_what_its_makefile_runs(built: Path) -> None:
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"Makefile", "README.md", "LICENSE", "pyproject.toml", "tests/conftest.py", "docs/back-ends.md"}
    assert wanted <= names
    assert {f"topologies/{path.name}" for path in ROOT.glob("topologies/*.json")} <= names

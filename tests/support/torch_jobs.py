"""Jobs of torch: a program for each rank on this machine, and what the ranks have written."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.checkout import ROOT
from tests.support.forking import forking
from tests.support.ports import free_port

Told = list[dict[str, Any]]  # the object of each rank that has written one, in their order


def run_by_torchrun(*command: str, ranks: int, **settings: str) -> subprocess.CompletedProcess[str]:
    """How a job of a program with its arguments ends; torchrun itself sees to it that no process is left."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    told = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **settings}
    address = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    starter = [sys.executable, "-m", "torch.distributed.run", *address, "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*starter, *command], env={**os.environ, **told}, capture_output=True, text=True, timeout=180
    )


def torchrun(
    program: str, folder: Path, *, ranks: int, plan: str | None = None
) -> tuple[subprocess.CompletedProcess[str], Told]:
    """How a job of a rank program ends, and the objects in ``RANK.json``."""
    file = str(ROOT / "tests" / "jobs" / program)
    done = run_by_torchrun(file, str(folder), ranks=ranks, **plan_in(folder, plan))
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    return done, [json.loads(one.read_text()) for one in files if one.exists()]


def plan_in(folder: Path, plan: str | None) -> dict[str, str]:
    """The variable that names the plan, which is written to a file of the folder."""
    if plan is None:
        return {}
    (folder / "plan.json").write_text(plan, encoding="utf-8")
    return {"TOPOPLAN_PLAN": str(folder / "plan.json")}


def told_by_all(
    program: str, folder: Path, *, ranks: int, plan: str | None = None, killed: tuple[int, ...] = ()
) -> Told:
    """Return the output of every rank of a successful job; without torchrun, its processes are forked.

    Ranks that are ``killed`` must be, by a signal, and the others end by themselves.
    """
    settings = {
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        **plan_in(folder, plan),
    }
    processes = [
        forking().Process(target=_run, args=(program, folder, {**settings, "RANK": str(rank)}))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        for rank, process in enumerate(processes):
            process.join(180)
            error = folder / f"{rank}.error"
            wanted = -signal.SIGKILL if rank in killed else 0
            assert process.exitcode == wanted, error.read_text() if error.exists() else process.exitcode
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def _run(program: str, folder: Path, settings: Mapping[str, str]) -> None:
    os.environ.update(settings)
    sys.argv = [program, str(folder)]
    try:
        runpy.run_path(str(ROOT / "tests" / "jobs" / program), run_name="__main__")
    except BaseException:
        (folder / f"{settings['RANK']}.error").write_text(traceback.format_exc(), encoding="utf-8")
        raise


def forked(
    program: Sequence[str], folder: Path, *, ranks: int, settings: Mapping[str, str] | None = None
) -> tuple[str, str, list[int | None]]:
    """What ranks print and complain of in a folder, and how they end: forked, with the variables of torchrun.

    A program is a file or the name of a module, and its arguments. To start a process that imports torch takes seconds.
    """
    size, port = str(ranks), str(free_port())
    world = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    world |= {"GLOO_SOCKET_IFNAME": "lo", **(settings or {})}
    processes = [
        forking().Process(target=_be, args=(list(program), folder, {**world, "RANK": n, "LOCAL_RANK": n}))
        for n in map(str, range(ranks))
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(180)
        statuses = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    texts = (
        "".join(file.read_text() for file in sorted(folder.glob(f"*.{kind}"))) for kind in ("out", "err")
    )
    return next(texts), next(texts), statuses


def _be(program: list[str], folder: Path, settings: Mapping[str, str]) -> None:
    """Be one rank."""
    os.environ.update(settings)
    os.chdir(folder)
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{settings['RANK']}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.argv = program
    if program[0].endswith(".py"):
        runpy.run_path(program[0], run_name="__main__")
    else:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)

"""Jobs of torch: a program for each rank on this machine, and what the ranks have written."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.checkout import ROOT
from tests.support.forking import forking
from tests.support.ports import free_port

Told = list[dict[str, Any]]  # the object of each rank that has written one, in their order


def name_backend_base() -> None:
    """Give torch's base of Python back ends the name of newer releases, if TOPOPLAN_TEST_BACKEND_BASE is set.

    torch 2.14 has the class and not the name, so its groups are `PlannedProcessGroup`; with the name the same tests run
    on `PlannedBackend`. Call it before anything imports `collectives.torch`.
    """
    if os.environ.get("TOPOPLAN_TEST_BACKEND_BASE"):
        import torch.distributed as dist

        if not hasattr(dist, "BackendBase"):
            dist.BackendBase = dist.distributed_c10d.C10DBackend  # type: ignore[attr-defined]


def told_by_all(
    program: str, folder: Path, *, ranks: int, plan: str | None = None, killed: tuple[int, ...] = ()
) -> Told:
    """Return the objects in ``RANK.json`` of the ranks of a rank program; those ``killed`` may have written none.

    Ranks that are ``killed`` must be, by a signal, and the others end by themselves.
    """
    settings = {}
    if plan is not None:
        (folder / "plan.json").write_text(plan, encoding="utf-8")
        settings["TOPOPLAN_PLAN"] = str(folder / "plan.json")
    path = str(ROOT / "tests" / "jobs" / program)
    _, errors, statuses = forked([path, str(folder)], folder, ranks=ranks, settings=settings)
    expected = [-signal.SIGKILL if rank in killed else 0 for rank in range(ranks)]
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    told = "".join(one.read_text()[-1000:] for one in files if statuses != expected and one.exists())
    assert statuses == expected, f"ended with {statuses}: {errors[-5000:]}{told}"
    return [
        json.loads(one.read_text()) for rank, one in enumerate(files) if rank not in killed or one.exists()
    ]


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
        forking().Process(
            target=_be_rank, args=(list(program), folder, {**world, "RANK": n, "LOCAL_RANK": n})
        )
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


def _be_rank(program: list[str], folder: Path, settings: Mapping[str, str]) -> None:
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

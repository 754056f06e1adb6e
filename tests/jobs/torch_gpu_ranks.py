"""Torch tensors as memory of a GPU that this processor plays: ``torch_gpu_ranks.py SIZE FOLDER`` writes ``RANK.json``.

The kernels are compiled once, then a process is forked for each rank. CuPy and torch's streams are stand-ins; what is
theirs, torch's and ours in between is not.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from collectives import Communicator
from collectives.backends.torch.torch_backend import TorchBackend
from collectives.tables.torch_arrays import TorchArrays
from collectives.training.exchange_settings import TopK
from tests.ptx.machine import library
from tests.support.checkout import ROOT
from tests.support.fake_streams import Machine
from tests.support.fake_torch_cuda import install, on_gpu_0, seen_by
from tests.support.selection_on_cpu import install_selection
from tests.support.sparse_steps import ON_GPUS, TWO_SERVERS, rounded_steps, steps_of_each, taken


def sparse(cupy: Any, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """As the ranks of the torch tests, and the largest piece that came to the host in exchanges without trees."""
    fetched = []
    get = cupy.ndarray.get

    def counted(array: Any) -> Any:
        fetched.append(array.nbytes)
        return get(array)

    def refused(*_: object) -> Any:
        raise AssertionError("a tensor came to the host")

    def half(array: Any) -> Any:
        return torch.from_numpy(array).to(torch.bfloat16)

    comm = Communicator(TWO_SERVERS, TorchBackend(timeout=60))
    with pytest.MonkeyPatch.context() as within:
        within.setattr(cupy.ndarray, "get", counted)
        for name in ("values", "put", "wrapped"):
            within.setattr(TorchArrays, name, refused)
        for step in steps_of_each(("dense", "pairs", "servers"), count=1):
            tensor = torch.from_numpy(step.gradients[comm.ranks[0]])
            comm.sparse_all_reduce(tensor, density=step.density, exchange=step.exchange, key="counted")
        taken_on = type(comm._take_sparse_state(["counted"])["counted"][0]["residual"]).__name__
        fetched, most = [], max(fetched)
    whole = taken(comm, steps_of_each(ON_GPUS, count=2), torch.from_numpy, lambda tensor: tensor.numpy())
    bits = taken(comm, rounded_steps(), half, lambda tensor: tensor.view(torch.int16).numpy())
    return {"whole": whole, "bits": bits[0], "most": most, "taken": taken_on}


def followed(cupy: Any, patch: pytest.MonkeyPatch) -> list[list[float]]:
    comm = Communicator(TWO_SERVERS, TorchBackend(timeout=60))
    kept = []
    for place in (False, True, False):
        with pytest.MonkeyPatch.context() as within:
            within.setattr("collectives.tables.torch_arrays.on_gpu", lambda array, place=place: place)
            comm.sparse_all_reduce(torch.arange(1.0, 9.0), density=0.125, exchange="pairs")
            kept.append(comm.sparse_state()[""][0]["residual"].tolist())
    return kept


def hook(cupy: Any, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The hook with sparse gradients: buckets arranged anew, idle parameters, a checkpoint, bfloat16."""
    from tests.jobs import torch_hook_ranks

    patch.setattr(torch_hook_ranks, "HookState", partial(torch_hook_ranks.HookState, shared=False))
    torch_hook_ranks.check_conservation()
    torch_hook_ranks.check_restored({"sparse": torch_hook_ranks.SPARSE["sparse"]})
    torch_hook_ranks.check_bfloat16({"sparse": ({"compression": TopK(1.0)}, 0, 1e-3)})
    return {"passed": True}


STAGES = {4: (sparse, followed), 2: (hook,)}
"""By the number of ranks."""


def played(size: int, folder: Path) -> list[dict[str, Any]]:
    """What each of so many ranks found, in processes of their own; skips without a C++ compiler or CuPy."""
    if not any(shutil.which(name) for name in ("g++", "c++", "clang++")):
        pytest.skip("no C++ compiler (g++, c++ or clang++) to run the kernels on this processor")
    pytest.importorskip("cupy", reason="CuPy, which compiles the kernels, is not installed")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, __file__, str(size), str(folder)],
        env={**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def rank(number: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=number, world_size=size, timeout=limit)
    with pytest.MonkeyPatch.context() as patch:
        cupy, _ = install_selection(patch, Machine())
        seen_by(cupy, patch)
        install(patch)
        on_gpu_0(patch)
        found = {stage.__name__: stage(cupy, patch) for stage in STAGES[size]}
    (folder / f"{number}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    size, folder = int(sys.argv[1]), Path(sys.argv[2])
    library()
    children = []
    for number in range(size):
        child = os.fork()
        if child == 0:
            rank(number, size, folder)
            os._exit(0)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(statuses))


if __name__ == "__main__":
    main()

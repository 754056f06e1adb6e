"""The same plan and data on every back end: equal results, bit-identical on all ranks and in two runs.

``python -m tests.bench.agreement PLAN BACKEND FOLDER`` is one rank (or all of them, with loopback): it writes one line
for each collective, size and rank with a digest of the result. The benchmark compares the lines of all back ends.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import topoplan
from collectives import Communicator
from collectives.backends.open_backend import check_backend
from collectives.communicator.launch import start_ranks
from topoplan.errors import UsageError
from topoplan.plans.size_plans import parse_plan_file

SIZES = (0, 1, 7, 1000003, 16 << 20)
METHODS = ("all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather")
MESSAGES = "torch by messages"
"""What several hosts use; on one, the back end's name alone gives memory that the ranks share."""

BACKENDS = ("loopback", "tcp", "mpi", "torch", MESSAGES)
RANKS = range(2, 9)
RUNS = 2


def main() -> None:
    print(
        "results of the same data, float32 and int64, on every back end (sizes up to 16M elements, two runs):"
    )
    print(f"  {'ranks':>5}  {'cases':>6}  {'results':>8}  back ends, and differing cases")
    for size in RANKS:
        plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=list(range(size)))
        lines: dict[str, list[tuple[str, str]]] = {}
        absent = []
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.json"
            path.write_text(plan.to_json())
            for backend in BACKENDS:
                try:
                    check_backend(backend.split()[0])
                except UsageError as error:
                    absent.append(str(error))
                    continue
                lines[backend] = _digests(backend, path, size)
        reference = _by_case(lines["loopback"])
        differing = {
            backend: sum(_by_case(found).get(case) != digests for case, digests in reference.items())
            for backend, found in lines.items()
        }
        results = sum(len(found) for found in lines.values())
        told = ", ".join(f"{backend} {count}" for backend, count in differing.items())
        print(f"  {size:>5}  {len(reference):>6}  {results:>8}  {told}", *absent, sep="; " if absent else "")


def _by_case(lines: list[tuple[str, str]]) -> dict[str, frozenset[str]]:
    """The digests of each case; one alone where all ranks and runs agree."""
    found: dict[str, set[str]] = {}
    for case, digest in lines:
        found.setdefault(case, set()).add(digest)
    return {case: frozenset(digests) for case, digests in found.items()}


def _digests(backend: str, path: Path, size: int) -> list[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.bench.agreement", str(path), backend, folder]
        if backend == "loopback":
            status = subprocess.run(command, timeout=600).returncode
        else:
            status = start_ranks(backend.split()[0], command, size)
        if status:
            raise SystemExit(f"{backend} ended with status {status}")
        lines = [line for file in sorted(Path(folder).iterdir()) for line in file.read_text().splitlines()]
    return [(case, digest) for case, digest in (line.split("=") for line in lines)]


def rank_main(path: str, backend: str, folder: str) -> None:
    plan = parse_plan_file(Path(path).read_text())
    with (
        Communicator(plan, _opened(backend)) as communicator,
        open(Path(folder) / str(communicator.ranks[0]), "w") as lines,
    ):
        for dtype in ("float32", "int64"):
            for count in SIZES:
                for method in METHODS:
                    for _ in range(RUNS):
                        lines.writelines(_digest_lines(communicator, method, count, dtype))


def _opened(backend: str) -> Any:
    """The back end, or its name where that opens it."""
    if backend != MESSAGES:
        return backend
    from collectives.backends.torch.torch_backend import TorchBackend

    return TorchBackend.open(timeout=30)


def _digest_lines(communicator: Communicator, method: str, count: int, dtype: str) -> list[str]:
    size = communicator.size
    each = count - count % size if method == "reduce_scatter" else count
    if method == "all_gather":
        each //= size
    inputs = [communicator.arrays.of(_data(rank, each, dtype)) for rank in communicator.ranks]
    results: Any = getattr(communicator, method)(inputs[0] if communicator.one_rank else inputs)
    lines = []
    for rank, result in zip(communicator.ranks, [results] if communicator.one_rank else results, strict=True):
        if result is None:
            continue
        digest = hashlib.blake2b(
            np.ascontiguousarray(communicator.arrays.values(result)).data, digest_size=12
        )
        block = f" block {rank}" if method == "reduce_scatter" else ""
        lines.append(f"{method} {dtype} {count}{block}={digest.hexdigest()}\n")
    return lines


@lru_cache(maxsize=8)
def _data(rank: int, count: int, dtype: str) -> np.ndarray[Any, np.dtype[Any]]:
    generator = np.random.default_rng([rank, count])
    return (generator.standard_normal(count, dtype=np.float32) * 1000).astype(dtype)


if __name__ == "__main__":
    rank_main(*sys.argv[1:])

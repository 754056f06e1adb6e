"""One process for each rank: how ``topoplan bench`` starts itself, and how it knows that it was started so."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from topoplan.plans.plan import Plans

RANK_VARIABLES = {"mpi": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")}
"""What launchers set in the environment of a rank; for other back ends `RANK`, as torchrun does."""


def started_as_rank(backend: str) -> bool:
    """Whether a launcher started this process as one rank of several."""
    return any(name in os.environ for name in RANK_VARIABLES.get(backend, ("RANK",)))


def start_processes(options: argparse.Namespace, plan: Plans) -> int:
    """Run the same command once for each rank and return the worst exit status."""
    from collectives.launching.start_ranks import start_ranks

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(plan.to_json())
        command = [
            *(sys.executable, "-m", "topoplan", "bench", str(path)),
            *("--backend", options.backend, "--dtype", options.dtype),
            *("--sizes", ",".join(str(size) for size in options.sizes)),
            *("--timeout", str(options.timeout)),
            *(("--chunk", str(options.chunk)) if options.chunk else ()),
            *(("--chunk-file", str(Path(options.chunk_file).absolute())) if options.chunk_file else ()),
            *(("--paced",) if options.paced else ()),
            *(("--scale", str(options.scale)) if options.scale else ()),
            *(("--rivals",) if options.rivals else ()),
            *(("--json",) if options.json else ()),
        ]
        return start_ranks(options.backend, command, len(plan.ranks), grace=options.timeout + 5)

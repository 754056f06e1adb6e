"""Runs the rivals that need processes of their own, where what they need is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT = 120
"""Seconds after which a rival is ended."""

OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
"""More processes than cores, and also in a container's root; other MPI libraries do not mind."""


def ring_seconds(size: int, megabytes: int, runs: int) -> float | None:
    """Median seconds of the MPI ring; None where mpi4py or mpiexec is missing."""
    beside = str(Path(sys.executable).parent)
    mpiexec = shutil.which("mpiexec", path=os.pathsep.join((beside, os.environ.get("PATH", ""))))
    if mpiexec is None or importlib.util.find_spec("mpi4py") is None:
        return None
    command = [mpiexec, "-n", str(size), sys.executable, "-m", "tests.bench.rival_ring"]
    done = subprocess.run(
        [*command, str(megabytes), str(runs)],
        check=True,
        capture_output=True,
        timeout=LIMIT,
        env={**os.environ, **OPEN_MPI},
    )
    return float(json.loads(done.stdout))


def mpi_name() -> str:
    """Which MPI library mpi4py found."""
    question = "from mpi4py import MPI; print(MPI.get_vendor()[0], '.'.join(map(str, MPI.get_vendor()[1])))"
    done = subprocess.run(
        [sys.executable, "-c", question], check=True, capture_output=True, env={**os.environ, **OPEN_MPI}
    )
    return done.stdout.decode().strip()


def gloo_seconds(size: int, megabytes: int, runs: int) -> float | None:
    """Median seconds of gloo; None where torch is missing."""
    if importlib.util.find_spec("torch") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.bench.rival_gloo"]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(size), f"{folder}/rendezvous", str(megabytes), str(runs)],
                stdout=subprocess.PIPE,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(size)
        ]
        try:
            outputs = [rank.communicate(timeout=LIMIT)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    return float(json.loads(outputs[0]))

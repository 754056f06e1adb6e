"""One plan made, written, read back and verified in a process of its own, so that no run remembers another.

``python -m tests.bench.measure MACHINE COLLECTIVE`` prints the figures as JSON. Seconds are CPU seconds of the process
(`time.process_time`); planning includes the modules that are loaded on first use, but not building the machine.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import topoplan
import topoplan.solve.planner  # so that planning does not pay for it
from tests.bench.fabric_machines import MACHINES
from topoplan.machine.fabric import usable_fabric
from topoplan.solve.cuts_and_partitions import best_bound

LIMIT = 120  # seconds after which a process is ended
BOUND_ALONE = "bound of "  # before a collective: only its bound is computed

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Measured:
    """What one process saw; seconds are CPU seconds, ``peak`` and ``size`` are bytes."""

    build: float
    plan: float
    rate: float
    bound: float
    optimal: bool
    trees: int
    height: int
    proof: str
    write: float
    read: float
    verify: float
    size: int
    peak: int


def measured(machine: str, collective: str, *, runs: int = 3) -> Measured | None:
    """The run with the median planning time; None where one takes more than `LIMIT`."""
    found = []
    for _ in range(runs):
        try:
            done = subprocess.run(
                [sys.executable, "-m", "tests.bench.measure", machine, collective],
                check=True,
                capture_output=True,
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired:
            return None
        found.append(Measured(**json.loads(done.stdout)))
    median = statistics.median_low(one.plan for one in found)
    return next(one for one in found if one.plan == median)


def main() -> None:
    name, collective = sys.argv[1:]
    build, machine = _timed(MACHINES[name])
    if collective.startswith(BOUND_ALONE):
        figures = _bound_alone(build, machine, collective.removeprefix(BOUND_ALONE))
    else:
        figures = _whole(build, machine, collective, "pcie" if "over PCIe" in name else "auto")
    print(json.dumps(asdict(figures)))


def _whole(build: float, machine: topoplan.Topology, collective: str, channels: str) -> Measured:
    seconds, plan = _timed(lambda: topoplan.plan(machine, collective, channels=channels))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        write, _ = _timed(lambda: path.write_text(plan.to_json(), encoding="utf-8"))
        size = path.stat().st_size
        read, again = _timed(lambda: topoplan.Plan.from_json(path.read_text(encoding="utf-8")))
    check, report = _timed(lambda: topoplan.verify(again))
    return Measured(
        build=build,
        plan=seconds,
        rate=report.rate,
        bound=report.bound,
        optimal=report.optimal,
        trees=report.trees,
        height=report.height,
        proof=type(again.certificate).__name__.lower(),
        write=write,
        read=read,
        verify=check,
        size=size,
        peak=_peak(),
    )


def _bound_alone(build: float, machine: topoplan.Topology, collective: str) -> Measured:
    seconds, fabric = _timed(lambda: usable_fabric(machine))
    more, certificate = _timed(lambda: best_bound(fabric, collective))
    check, bound = _timed(lambda: certificate.bound(fabric, collective, None))
    return Measured(
        build=build,
        plan=seconds + more,
        rate=0.0,
        bound=float(bound),
        optimal=False,
        trees=0,
        height=0,
        proof=type(certificate).__name__.lower(),
        write=0.0,
        read=0.0,
        verify=check,
        size=0,
        peak=_peak(),
    )


def _timed(call: Callable[[], Result]) -> tuple[float, Result]:
    started = time.process_time()
    result = call()
    return time.process_time() - started, result


def _peak() -> int:
    """Largest resident size of this process in bytes; Linux counts in KiB."""
    # What getrusage tells includes the process that started this one, from before it became another program.
    status = Path("/proc/self/status")
    if status.exists():
        peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(peak.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()

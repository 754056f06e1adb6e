"""Digests of plan files, to show that a change of the code has changed no plan.

``python -m tests.bench.digests FILE`` plans every machine of the library for the five collectives, and the clusters of
`tests.bench.fabrics`. Where there is no such file it is written; else plans are compared with it: each that differs is
printed with trees and height before and after, and the exit status is their number, at most 100.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import topoplan
from tests.bench.fabric_machines import MACHINES
from tests.bench.fabrics import COLLECTIVES, MORE
from topoplan.machine.library import LIBRARY
from topoplan.plans.plan import Plan

KEY = 40  # characters that name machine and collective


def main() -> int:
    """Write or compare the digests in the file that the command line names."""
    path = Path(sys.argv[1])
    known = path.read_text(encoding="utf-8").splitlines() if path.exists() else None
    before = {line[:KEY]: line[KEY:] for line in known or ()}
    changed = 0
    lines = []
    for key, plan in plans():
        told = f"{plan.digest[:32]}  {len(plan.shards):4} trees  height {plan.height:2}  {plan.rate:.6g} GB/s"
        lines.append(f"{key}{told}")
        if known is not None and before.get(key) != told:
            changed += 1
            print(f"{key}before {before.get(key)}\n{key}after  {told}", flush=True)
    if known is None:
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} plans, {changed} changed" if known is not None else f"{len(lines)} plans written")
    return min(changed, 100)


def plans() -> Iterator[tuple[str, Plan]]:
    for name in sorted(LIBRARY):
        machine = topoplan.load(name)
        for collective in (*COLLECTIVES, "reduce"):
            yield f"{name} {collective}".ljust(KEY), topoplan.plan(machine, collective)
    for name in MORE:
        machine = MACHINES[name]()
        for collective in COLLECTIVES:
            channels = "pcie" if name.endswith("over PCIe") else "auto"
            yield f"{name}, {collective}".ljust(KEY), topoplan.plan(machine, collective, channels=channels)


if __name__ == "__main__":
    sys.exit(main())

"""Every real description of a machine in NCCL's and RCCL's XML: what is in it, and the AllReduce that it allows.

Files that hold the PCIe part only are planned once more with the NVLinks of the library's machine of the same kind.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import topoplan
from topoplan.errors import TopologyError

MACHINES = Path(
    os.environ.get("TOPOPLAN_MACHINES", Path(__file__).resolve().parents[3] / "shared" / "machines")
)

NVLINKS = {"ndv2-topo": "dgx-1v", "ndv4-topo": "dgx-a100", "p4d-24xl-topo": "dgx-a100"}
"""Machine of the library with the GPUs and NVLinks of the instance that a file is for."""


def main() -> None:
    """Print the table, and why a file is none of a machine."""
    paths = [
        path for folder in ("nccl-xml", "rccl-xml") for path in sorted((MACHINES / folder).glob("*.xml"))
    ]
    if not paths:
        print(f"no machine descriptions in {MACHINES}: set TOPOPLAN_MACHINES to their folder")
        return
    print(
        "allreduce on real machines described by NCCL's and RCCL's XML, each plan verified; rates are NCCL's"
    )
    print(
        f"  {'file':30} {'GPUs':>4} {'links':>5} {'GB/s':>5} {'NICs':>4} {'notes':>5} {'channel':8}"
        f" {'GB/s':>8} {'bound':>8} {'gap':>3} {'height':>6} {'trees':>5} {'CPU s':>6}"
    )
    for path in paths:
        _print_machine(path, None)
        if path.stem in NVLINKS:
            _print_machine(path, NVLINKS[path.stem])


def _print_machine(path: Path, merge: str | None) -> None:
    name = f"{path.stem} + {merge}" if merge else path.stem
    try:
        machine = topoplan.load(path, merge=merge)
    except TopologyError as error:
        print(f"  {name:30} refused: {str(error).removeprefix(f'{path}: ')}")
        return
    nvlinks = [link for link in machine.links if link.channel == "nvlink"]
    rates = sorted({round(link.bandwidth / link.count, 6) for link in nvlinks})
    # A link to the switch is one wire, a link between GPUs is listed from both ends too.
    wires = sum(link.count for link in nvlinks) // 2
    nics = sum(device.kind == "nic" for device in machine.devices)
    started = time.process_time()
    plan = topoplan.plan(machine, "allreduce")
    seconds = time.process_time() - started
    checked = topoplan.verify(plan)
    gap = "0" if checked.optimal else f"{plan.gap:.1e}"
    print(
        f"  {name:30} {len(machine.gpus):4} {wires:5} {'/'.join(f'{rate:g}' for rate in rates) or '-':>5} {nics:4}"
        f" {len(machine.notes):5} {'+'.join(plan.channels):8} {plan.rate:8.3f} {plan.bound:8.3f} {gap:>3}"
        f" {plan.height:6} {plan.trees:5} {seconds:6.2f}"
    )

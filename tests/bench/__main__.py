"""``make bench``: speeds as ratios against a named rival that ran on the same machine in the same minute."""

from __future__ import annotations

import sys

from tests.bench import (
    agreement,
    alignment,
    allocations,
    descriptions,
    fabrics,
    gpu,
    gpu_selection,
    hook,
    hybrid,
    lars,
    loopback,
    modes,
    mpi,
    nccl_graphs,
    paced,
    planning,
    probing,
    reduce_scatter_allgather,
    robustness,
    scale,
    selection,
    sparse,
    testbed,
    three_phases,
)


def main() -> int:
    """Run every benchmark, or those named on the command line."""
    benchmarks = {
        "agreement": agreement.main,
        "alignment": alignment.main,
        "allocations": allocations.main,
        "descriptions": descriptions.main,
        "fabrics": fabrics.main,
        "gpu": gpu.main,
        "gpu_selection": gpu_selection.main,
        "hook": hook.main,
        "hybrid": hybrid.main,
        "lars": lars.main,
        "loopback": loopback.main,
        "modes": modes.main,
        "mpi": mpi.main,
        "nccl_graphs": nccl_graphs.main,
        "paced": paced.main,
        "planning": planning.main,
        "probing": probing.main,
        "reduce_scatter_allgather": reduce_scatter_allgather.main,
        "robustness": robustness.main,
        "scale": scale.main,
        "selection": selection.main,
        "sparse": sparse.main,
        "testbed": testbed.main,
        "three_phases": three_phases.main,
    }
    chosen = sys.argv[1:] or sorted(benchmarks)
    for name in chosen:
        if name not in benchmarks:
            print(f"benchmark {name!r} is unknown; use {', '.join(sorted(benchmarks))}", file=sys.stderr)
            return 2
    for name in chosen:
        benchmarks[name]()
        print()
    return 0


sys.exit(main())

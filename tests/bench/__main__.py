"""``make bench``: speeds as ratios against a named rival that ran on the same machine in the same minute.

``python -m tests.bench NAME ...`` runs those that are named; what follows the name of one of `WITH_OPTIONS` are its
options.
"""

from __future__ import annotations

import sys

from tests.bench import (
    agreement,
    alignment,
    all_wires,
    allocations,
    damages,
    descriptions,
    emso,
    executors,
    fabrics,
    gossip,
    gpu,
    gpu_selection,
    helpers,
    hook,
    hybrid,
    jobs,
    lars,
    loopback,
    low_rank,
    modes,
    mutations,
    nccl_graphs,
    paced,
    pairs,
    planning,
    probing,
    published,
    recovery,
    reduce_scatter_allgather,
    robustness,
    scale,
    selection,
    sizes,
    sparse,
    survive,
    testbed,
    three_phases,
)
from topoplan.errors import UsageError

WITH_OPTIONS = {
    "executors": executors.main,
    "hook": hook.main,
    "mutations": mutations.main,
    "recovery": recovery.main,
}


def main() -> int:
    """Run every benchmark, or those named on the command line."""
    if len(sys.argv) > 2 and sys.argv[1] in WITH_OPTIONS and sys.argv[2].startswith("-"):
        try:
            WITH_OPTIONS[sys.argv[1]](sys.argv[2:])
        except UsageError as error:
            print(error, file=sys.stderr)
            return 2
        return 0
    benchmarks = {
        "agreement": agreement.main,
        "alignment": alignment.main,
        "all_wires": all_wires.main,
        "allocations": allocations.main,
        "damages": damages.main,
        "descriptions": descriptions.main,
        "emso": emso.main,
        "executors": executors.main,
        "fabrics": fabrics.main,
        "gossip": gossip.main,
        "gpu": gpu.main,
        "gpu_selection": gpu_selection.main,
        "helpers": helpers.main,
        "hook": hook.main,
        "hybrid": hybrid.main,
        "jobs": jobs.main,
        "lars": lars.main,
        "loopback": loopback.main,
        "low_rank": low_rank.main,
        "modes": modes.main,
        "mutations": mutations.main,
        "nccl_graphs": nccl_graphs.main,
        "paced": paced.main,
        "pairs": pairs.main,
        "planning": planning.main,
        "probing": probing.main,
        "published": published.main,
        "recovery": recovery.main,
        "reduce_scatter_allgather": reduce_scatter_allgather.main,
        "robustness": robustness.main,
        "scale": scale.main,
        "selection": selection.main,
        "sizes": sizes.main,
        "sparse": sparse.main,
        "survive": survive.main,
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

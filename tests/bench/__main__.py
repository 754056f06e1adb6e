"""``make bench``: speeds as ratios against a named rival that ran on the same machine in the same minute.

``python -m tests.bench NAME ...`` runs those that are named; what follows the name of one of `WITH_OPTIONS` are its
options.
"""

from __future__ import annotations

import sys
from importlib import import_module

from topoplan.errors import UsageError

NAMES = """
agreement alignment all_wires control_plane damages executors fabrics gossip gpu gpu_selection helpers hook hybrid jobs
kinds lars loopback lost_cables low_rank modes mutations pairs planning published rank_parts rejoin robustness scale
selection sizes sparse sparse_training survive testbed three_phases windows
"""
BENCHMARKS = NAMES.split()
WITH_OPTIONS = (
    "executors",
    "hook",
    "lost_cables",
    "mutations",
    "planning",
    "published",
    "rejoin",
    "scale",
    "sparse_training",
    "testbed",
)


def run(name: str, *options: list[str]) -> None:
    import_module(f"tests.bench.{name}").main(*options)


def main() -> int:
    """Run every benchmark, or those named on the command line."""
    chosen = sys.argv[1:] or BENCHMARKS
    if len(chosen) > 1 and chosen[0] in WITH_OPTIONS and chosen[1].startswith("-"):
        try:
            run(chosen[0], list(chosen[1:]))
        except UsageError as error:
            print(error, file=sys.stderr)
            return 2
        return 0
    unknown = [name for name in chosen if name not in BENCHMARKS]
    if unknown:
        print(f"benchmark {unknown[0]!r} is unknown; use {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    for name in chosen:
        run(name)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())

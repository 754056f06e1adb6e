"""``python -m tests.ptx``: all kernels at all orders and with all checks, mutants and planted bugs, and the numbers."""

from __future__ import annotations

import sys
import time
from collections import Counter

from tests.ptx.cases import cases, outcome
from tests.ptx.forests import BUGS, every_case
from tests.ptx.forests import found as found_bug
from tests.ptx.forests import outcome as outcome_of_ranks
from tests.ptx.kernels import JOINS, SELECTIONS, program, read_all
from tests.ptx.mutants import MUTANT_SEEDS, SEEDS, found, mutants, reason

RANK_SEEDS = range(200, 212)  # orders in which the ranks of the windows engine are run

KINDS = ("race", "outside of every array", "not aligned", "read of memory that nobody has written", "result")


def main() -> int:
    """Print a table; the number of what is wrong is the exit status, at most 100."""
    names = (*JOINS, *SELECTIONS)
    read_all(names)
    problems: Counter[str] = Counter()
    runs = made = 0
    for name in names:
        for case in cases(name):
            made += 1
            for seed in SEEDS[3:4] if case.heavy else SEEDS:
                runs += 1
                wrong = outcome(program(name), case, seed)
                if wrong is not None:
                    problems[wrong.partition(":")[0]] += 1
                    print(wrong)
    print(f"kernels {len(names)}, cases {made}, orders {len(SEEDS)}, runs {runs}")
    for kind in KINDS:
        print(f"  {kind}: {problems[kind]}")
    print(f"  all else: {sum(count for kind, count in problems.items() if kind not in KINDS)}")

    caught: Counter[str] = Counter()
    survivors: Counter[tuple[str, str]] = Counter()
    for name in names:
        for mutant in mutants(program(name)):
            wrong = found(mutant, cases(name), MUTANT_SEEDS)
            if wrong is not None:
                caught[wrong.partition(":")[0]] += 1
            else:
                why = reason(name, mutant.site)
                survivors[mutant.site, why or "NO REASON IS KNOWN"] += 1
                problems["survivor"] += why is None
    total = caught.total() + survivors.total()
    print(f"mutants {total}, caught {caught.total()}, surviving {survivors.total()}")
    for kind, count in caught.most_common():
        print(f"  caught by {kind}: {count}")
    for (site, why), count in sorted(survivors.items()):
        print(f"  {count} survive without {site}: {why}")
    return min(problems.total() + _all_ranks(), 100)


def _all_ranks() -> int:
    """The kernels of the windows engine; returns how much is wrong."""
    started = time.monotonic()
    runs = wrong = 0
    every = list(every_case())
    for case in every:
        for seed in RANK_SEEDS:
            runs += 1
            found = outcome_of_ranks(case, seed)
            if found is not None:
                wrong += 1
                print(found)
    print(f"all ranks at once, in a weak memory: cases {len(every)}, orders {len(RANK_SEEDS)}, runs {runs}")
    print(f"  wrong: {wrong}, in {time.monotonic() - started:.0f} s")
    caught = {bug: found_bug(bug, RANK_SEEDS) for bug in BUGS}
    print(f"planted bugs {len(caught)}, caught {sum(how is not None for how in caught.values())}")
    for bug, how in caught.items():
        print(f"  {bug}: {'NOT CAUGHT' if how is None else how.partition(':')[0]}")
    return wrong + sum(how is None for how in caught.values())


if __name__ == "__main__":
    sys.exit(main())

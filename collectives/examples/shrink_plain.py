"""Continue a loop without DDP when a rank dies.

    $ torchrun --nproc-per-node 3 -m collectives.examples.shrink_plain
    rank 0: [-1.333333, -1.333333], without (2,) from step 2 on
    rank 1: [-1.333333, -1.333333], without (2,) from step 2 on

Rank 2 ends its process with status 0, since torchrun ends all ranks when one is killed.
"""

import os

import numpy as np
import torch.distributed as dist

import collectives
from collectives import Shrink


def main() -> None:
    """Move two weights at a rate that falls with the number of ranks."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    weights, rate = [np.zeros(2)], [0.5]

    def fewer(before: int, after: int) -> None:
        rate[0] = 0.5 * after / 3  # computed from the number of ranks, not from the previous rate

    with collectives.GradientSynchronizer(
        weights, backend="shared", fault_tolerance=Shrink(on_change=fewer)
    ) as synchronizer:
        for step in range(4):
            if (rank, step) == (2, 2):
                os._exit(0)
            (average,) = synchronizer.step([np.full(2, float(rank))])
            weights[0] -= rate[0] * average  # the rate is read after `step`, which may change it
        (change,) = synchronizer.recorder.changes()
    print(f"rank {rank}: {weights[0].round(6).tolist()}, without {change.without} from step {change.step} on")


if __name__ == "__main__":
    main()

"""Average gradients without DDP when ranks have unequal numbers of batches; moments stay the same on all ranks.

    $ torchrun --nproc-per-node 3 -m collectives.examples.uneven_plain
    rank 0: [-10.4375, -10.4375], moments [3.5625, 3.5625]
    rank 1: [-10.4375, -10.4375], moments [3.5625, 3.5625]
    rank 2: [-10.4375, -10.4375], moments [3.5625, 3.5625]

Rank r has 2 r batches, whose gradient is r.
"""

import numpy as np
import torch.distributed as dist

import collectives


def main() -> None:
    """Move two weights with momentum; rank r has 2 r batches of gradient r."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    weights, moments = [np.zeros(2)], [np.zeros(2)]

    def use(averages: list[np.ndarray]) -> None:
        moments[0] = 0.5 * moments[0] + averages[0]
        weights[0] -= moments[0]

    # or backend="mpi", "tcp"
    with (
        collectives.GradientSynchronizer(weights, backend="shared") as synchronizer,
        synchronizer.join(use=use),
    ):
        for _ in range(2 * rank):
            use(synchronizer.step([np.full(2, float(rank))]))
    print(f"rank {rank}: {weights[0].tolist()}, moments {moments[0].tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

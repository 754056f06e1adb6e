"""Train under DistributedDataParallel when ranks have unequal numbers of batches.

    $ torchrun --nproc-per-node 3 -m collectives.examples.uneven_ddp
    rank 0: 4 steps, weight -7.0
    rank 1: 4 steps, weight -7.0
    rank 2: 4 steps, weight -7.0

The gradient of rank r is r, and rank r has 2 r batches. So steps move the weight by 1.5, 1.5, 2 and 2.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from collectives.torch import HookState, topoplan_hook


def main() -> None:
    """Train one weight."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    network = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.zeros_(network.weight)
    model = DistributedDataParallel(network)
    state = HookState()
    model.register_comm_hook(state, topoplan_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with state.join(model):
        for _ in range(2 * rank):
            optimizer.zero_grad()
            model(torch.full((1, 1), float(rank), dtype=torch.float64)).sum().backward()
            optimizer.step()
    print(f"rank {rank}: {state.recorder.step} steps, weight {network.weight.item()}")
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

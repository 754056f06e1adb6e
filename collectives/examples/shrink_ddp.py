"""Continue training under DistributedDataParallel when a rank is killed: the survivors repeat its step.

    $ RANK=... WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python -m collectives.examples.shrink_ddp
    rank 0: now 0 of 2, since step 60 without (1,), whose residual had norm 0.72; learning rate 0.10
    rank 2: now 1 of 2, since step 60 without (1,), whose residual had norm 0.72; learning rate 0.10

Start each rank by itself, since one torchrun for all ranks ends them when one is killed.
"""

import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from collectives.torch import HookState, Shrink, TopK


def main() -> None:
    """Train a small network with a tenth of the entries of its gradients."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(5, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).double()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15)

    def fewer(before: int, after: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.15 * after / 3

    state = HookState(compression=TopK(0.1), fault_tolerance=Shrink(on_change=fewer))
    state.register(model)  # in place of model.register_comm_hook
    generator = torch.Generator().manual_seed(rank)
    for step in range(100):
        inputs = torch.randn(32, 5, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()
        if step == 60 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
    state.finish()  # no rank has a step that another one lacks
    (shrunk,) = state.shrunk
    print(
        f"rank {rank}: now {state.rank} of {state.size}, since step {shrunk.step} without {shrunk.without}, "
        f"whose residual had norm {shrunk.lost.norm:.2f}; learning rate {optimizer.param_groups[0]['lr']:.2f}"
    )
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

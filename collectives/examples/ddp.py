"""Train under DistributedDataParallel, whose gradients travel by plan.

    $ torchrun --nproc-per-node 2 -m collectives.examples.ddp
    100 steps, loss 0.3395

Three lines differ from a script without the hook: make the state, register it, close it.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from collectives.torch import HookState, topoplan_hook


def main() -> None:
    """Train a small network on random numbers."""
    dist.init_process_group("gloo")  # or "nccl" on GPUs
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(5, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).double()
    model = DistributedDataParallel(network)
    state = HookState()  # or HookState(compression=TopK(0.01)), HookState(compression=LowRank(2)), ...
    model.register_comm_hook(state, topoplan_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(100):
        inputs = torch.randn(32, 5, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()
        loss.backward()
        optimizer.step()
    state.finish()
    if dist.get_rank() == 0:
        print(f"{state.recorder.step} steps, loss {loss.item():.4f}")
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

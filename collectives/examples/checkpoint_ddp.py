"""Save and restore the residuals of compressed gradients: a restored run continues with the same bits.

    $ torchrun --nproc-per-node 2 -m collectives.examples.checkpoint_ddp
    rank 0: the same bits: True, elements of residuals: 320
    rank 1: the same bits: True, elements of residuals: 320

Each rank saves its own `state_dict` beside the model's, and all ranks load theirs together.
"""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from collectives.torch import HookState, LowRank, topoplan_hook


def train(steps: range, saved: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train for some steps from a checkpoint, and return the next one."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(5, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).double()
    low_rank = LowRank(1, matrices="layers")  # a matrix for each layer, as in torch's powerSGD_hook
    state = HookState(compression=low_rank, parameters=network.parameters())
    model = DistributedDataParallel(network)
    model.register_comm_hook(state, topoplan_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if saved:
        network.load_state_dict(saved["model"])
        state.load_state_dict(saved["hook"])
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(32, 5, generator=generator, dtype=torch.float64)
        model.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean().backward()
        optimizer.step()
    found = {"model": network.state_dict(), "hook": state.state_dict()}
    state.close()
    return found


def main() -> None:
    """Compare 20 steps with 10 steps, a checkpoint and 10 more."""
    dist.init_process_group("gloo")
    whole = train(range(20))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(train(range(10)), f"{folder}/{dist.get_rank()}.pt")  # a file for each rank
        again = train(range(10, 20), torch.load(f"{folder}/{dist.get_rank()}.pt"))
    same = all(torch.equal(one, again["model"][name]) for name, one in whole["model"].items())
    residuals = again["hook"]["filters"]["residuals"].values()
    kept = sum(one.numel() for listed in residuals for one in listed)
    print(f"rank {dist.get_rank()}: the same bits: {same}, elements of residuals: {kept}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

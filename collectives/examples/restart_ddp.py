"""Restart all ranks from their last checkpoint when one is killed, as torchrun does.

    $ torchrun --nproc-per-node 2 --max-restarts 1 -m collectives.examples.restart_ddp
    rank 0: life 1 from step 50, 100 steps
    rank 1: life 1 from step 50, 100 steps

Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: else ranks of the second life may read in torchrun's store where those of the
first one listened, and gloo does not connect (https://github.com/pytorch/pytorch/issues/135712).
"""

import os
import pathlib
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from collectives.torch import HookState, TopK, topoplan_hook


def main() -> None:
    """Train a small network; every rank saves its part after ten steps."""
    dist.init_process_group("gloo")
    rank, size, life = dist.get_rank(), dist.get_world_size(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(5, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).double()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = HookState(compression=TopK(0.1), parameters=network.parameters())
    model.register_comm_hook(state, topoplan_hook)
    folder = pathlib.Path("saved")  # all ranks see it
    complete = [int(one.name) for one in folder.glob("*") if len([*one.glob("*.pt")]) == size]
    first = max(complete, default=0)
    if first:
        saved = torch.load(folder / str(first) / f"{rank}.pt")
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state.load_state_dict(saved["hook"])
    for step in range(first, 100):
        generator = torch.Generator().manual_seed(10 * step + rank)
        inputs = torch.randn(32, 5, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()
        if (life, rank, step) == (0, 1, 57):
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            mine = folder / str(step + 1)
            mine.mkdir(parents=True, exist_ok=True)
            parts = {
                "model": network.state_dict(),
                "optimizer": optimizer.state_dict(),
                "hook": state.state_dict(),
            }
            torch.save(parts, mine / f"{rank}.part")
            os.replace(mine / f"{rank}.part", mine / f"{rank}.pt")  # no file is half written
    print(f"rank {rank}: life {life} from step {first}, {state.recorder.step} steps")
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

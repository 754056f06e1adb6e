"""Train under FSDP2, whose allgathers and reduce-scatters run by plan in the process group "topoplan".

    $ torchrun --nproc-per-node 2 -m collectives.examples.fsdp2
    loss 0.3395, by plan: True

Two lines differ from a script for gloo: the import and the name of the process group.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from collectives.torch import ProcessGroupTopoplan  # the import registers the back end "topoplan"


def main() -> None:
    """Train a small network on random numbers."""
    dist.init_process_group("topoplan")  # TOPOPLAN_PLAN may name a plan file
    # for HSDP a mesh of two dimensions: (2, 4), mesh_dim_names=("replicate", "shard")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).double()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # after fully_shard, which shards the parameters
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(100):
        inputs = torch.randn(32, 5, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        group = ProcessGroupTopoplan.of()  # of the default group
        print(f"loss {loss.item():.4f}, by plan: {group is not None and group.communicator is not None}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

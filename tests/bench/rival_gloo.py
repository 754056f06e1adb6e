"""A rival: allreduce of torch's gloo process group.

``python -m tests.bench.rival_gloo RANK SIZE FILE MEGABYTES RUNS``, once for each rank with the name of one file that
does not exist yet; rank 0 prints the median seconds as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
import torch.distributed


def main() -> None:
    """Run it on float32 tensors and check the sums."""
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    megabytes, runs = int(sys.argv[4]), int(sys.argv[5])
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=size
    )
    seconds = []
    for _ in range(runs + 1):
        # It works in place; filling the tensor again is not timed.
        tensor = torch.full((megabytes << 18,), rank + 1, dtype=torch.float32)
        torch.distributed.barrier()
        started = time.perf_counter()
        torch.distributed.all_reduce(tensor)
        torch.distributed.barrier()
        seconds.append(time.perf_counter() - started)
    if not bool((tensor == size * (size + 1) / 2).all()):
        raise SystemExit("gloo added up wrong sums")
    if rank == 0:
        print(json.dumps(statistics.median(seconds[1:])))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

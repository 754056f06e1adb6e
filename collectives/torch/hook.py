"""The communication hook of DistributedDataParallel: buckets of gradients are averaged by a plan."""

# annotations are no strings here: DDP compares them with its own types

import torch
from torch._C._distributed_c10d import GradBucket

from collectives.torch.hook_state import HookState
from topoplan.errors import UsageError


def topoplan_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over all ranks in the background: ``model.register_comm_hook(state, topoplan_hook)``.

    Parameters
    ----------
    state : HookState
    bucket : GradBucket

    Returns
    -------
    Future
        Of the averaged buffer of the bucket. It ends when the exchange has ended; for the last bucket of a step it has.

    Raises
    ------
    UsageError
        The state that was registered with the hook is none.
    BackendError
        In the last bucket of a step, and so out of ``loss.backward()``: an exchange of the step failed. It names the
        rank, the peer, the step of training and the bucket. DDP and the process group must then be made anew.
    """
    if not isinstance(state, HookState):
        raise UsageError(
            f"a {type(state).__name__} is no state of the hook; write "
            "model.register_comm_hook(HookState(), topoplan_hook)"
        )
    return state.buckets.average(bucket)

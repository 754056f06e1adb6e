"""Let new processes into a job of the process group "topoplan" in place of failed ranks, and send them the state.

The default group with TOPOPLAN_ON_FAILURE=shrink has a membership (`collectives.recovery`), which its plans and its
inner gloo group follow. A joining process begins with a group of its own, of one rank. There it makes its model and
arranges DDP's buckets, so that it needs no collective that the others do not run. Then all call `grow` between two
steps: the processes agree on the membership, make a new inner group and a new plan, compare a signature of models,
buckets and optimizers, and the lowest rank of the job broadcasts the state by the plan.

A joining rank whose signature differs is excluded by the others, and raises `UsageError`. DDP adds up whole buckets,
so buckets are part of the signature: other buckets of the same length would give wrong sums without an error.
"""

from __future__ import annotations

import io
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from collectives.torch.process_group import ProcessGroupTopoplan
from collectives.training.buckets import share_failure
from collectives.training.checkpoint_state import send_to_joining_ranks
from topoplan.errors import TopoplanError, UsageError


@dataclass(frozen=True, slots=True)
class Grown:
    """The outcome of `grow`.

    `ranks` are the ranks that joined, by their numbers from now on. `step` is the step of the ranks that had the state.
    """

    ranks: tuple[int, ...]
    step: int


def join_token() -> str:
    """Return one line of text with which another process may join the default group "topoplan" by `grow`.

    It is that of `Communicator.join_token`: valid as long as one of the present ranks runs, for a file or a variable.
    Before the first collective of the group it waits for that of the other ranks.

    Raises
    ------
    UsageError
        The default group is not "topoplan" with TOPOPLAN_ON_FAILURE=shrink.
    """
    return _default_group().connected().join_token


def grow(*stateful: Any, step: int = 0, join_token: str | None = None, timeout: float = 60.0) -> Grown:
    """Let joining processes into the default group "topoplan" in place of failed ranks, between two steps.

    All ranks call it at the same steps, each time or every so many; without a joining process it costs an exchange of
    short texts and an allgather. The joining process calls it first, with a `join_token`, and waits until the others
    do. It has made a group of its own, ``init_process_group("topoplan", store=HashStore(), rank=0, world_size=1)``,
    and gone forward and backward once with each DDP model, which arranges the buckets. Afterwards
    ``dist.get_world_size()`` counts it on all ranks, and collectives and DDP steps run among all of them.

    Parameters
    ----------
    *stateful : Module, Optimizer or other object
        Models, optimizers, schedulers: objects with ``state_dict`` and ``load_state_dict``, in the same order on all
        ranks. The joining process gets their state: parameters, buffers, moments.
    step : int
        The step of this rank, for the joining process.
    join_token : str, optional
        Given by the joining process alone: the text of `collectives.torch.join_token` of another rank.
    timeout : float
        Seconds for which the joining process waits to be admitted.

    Returns
    -------
    Grown
        The ranks that joined, and the step of the others.

    Raises
    ------
    UsageError
        The default group is not "topoplan" with TOPOPLAN_ON_FAILURE=shrink; or on a joining process: its group has
        several ranks, the text is not a token of such a group, or its models, buckets or optimizers differ from those
        of the others, which exclude it again.
    BackendError
        No rank admits the joining process in time, or all ranks with the state failed.
    Exception
        On a joining process that cannot load the state, which the others exclude: that of ``torch.load`` or of a
        ``load_state_dict``. States hold tensors, numbers, texts and containers of these.
    """
    group = _default_group()
    try:
        for one in stateful:
            if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
                raise UsageError(
                    f"grow() takes objects with state_dict and load_state_dict, got a {type(one).__name__}; give it "
                    "models, optimizers and schedulers"
                )
            if isinstance(one, DistributedDataParallel):
                _arrange(one)
    except Exception as error:
        with suppress(TopoplanError):  # the other ranks raise that of a group that no process can join
            group.connected()._refuse_for(error)
        raise
    comm = group.connected()
    if join_token is not None:
        group.join(join_token, wait=timeout)
        comm = group.connected()
    else:
        comm.grow()  # a joined rank may fail before some others return, so all ranks agree below
    taken: list[int] = []
    with share_failure(comm, "growing"):
        joined = send_to_joining_ranks(
            comm,
            [],
            has_it=join_token is None,
            signature=f"{state_signature(stateful)} {[_layout(one) for one in stateful]}",
            give=lambda: saved_state(stateful, step=step),
            take=lambda data: taken.append(restore_state(stateful, data)["step"]),
            remedy="make models, DDP and optimizers with the same arguments, and go forward and backward once before",
        )
    if joined:
        group.grown = True
        group.drop_lost_groups()
    ranks = tuple(rank for rank, seat in enumerate(comm.original_ranks) if seat in joined)
    return Grown(ranks, taken[0] if taken else step)


def state_signature(stateful: Sequence[Any]) -> str:
    """Return a text that ranks share if the states of their objects have the same names, shapes and types.

    >>> three, four = torch.nn.Linear(2, 3), torch.nn.Linear(2, 4)
    >>> state_signature([three])[:9], state_signature([three]) == state_signature([four])
    ('2 tensors', False)
    """
    described: list[Any] = []
    count = 0
    modules = [one for one in stateful if isinstance(one, torch.nn.Module)]
    names = {id(one): name for module in modules for name, one in module.named_parameters()}
    for one in stateful:
        if isinstance(one, torch.nn.Module):
            tensors = [
                (name, tuple(found.shape), f"{found.dtype}")
                for name, found in one.state_dict().items()
                if isinstance(found, torch.Tensor)
            ]
            count += len(tensors)
            described += tensors
        else:
            groups = getattr(one, "param_groups", ())
            held = [[names.get(id(each), tuple(each.shape)) for each in group["params"]] for group in groups]
            described.append((type(one).__name__, held))
    return f"{count} tensors {sha256(f'{described}'.encode()).hexdigest()[:16]}"


def saved_state(stateful: Sequence[Any], **more: Any) -> bytes:
    """Return the states of objects, and more values, as bytes."""
    file = io.BytesIO()
    torch.save({**more, "states": [one.state_dict() for one in stateful]}, file)
    return file.getvalue()


def restore_state(stateful: Sequence[Any], data: bytes) -> dict[str, Any]:
    """Load the states of `saved_state` into like objects; return the other values."""
    found: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    for one, state in zip(stateful, found.pop("states"), strict=True):
        one.load_state_dict(state)
    return found


def _default_group() -> ProcessGroupTopoplan:
    found = ProcessGroupTopoplan.of() if torch.distributed.is_initialized() else None
    if found is None:
        raise UsageError(
            'the default process group must be "topoplan"; write init_process_group("topoplan"), or over gloo use '
            "HookState(fault_tolerance=Shrink()), whose grow lets processes join"
        )
    return found


def _arrange(model: DistributedDataParallel) -> None:
    """Arrange the buckets of a model that has gone backward once, as its next forward pass would."""
    if model.reducer._rebuild_buckets():
        model._has_rebuilt_buckets = True  # as the forward pass notes it


_LAYOUTS: weakref.WeakKeyDictionary[DistributedDataParallel, tuple[bool, str]] = weakref.WeakKeyDictionary()
"""Whether the buckets of a model are rebuilt, and their text: to list them costs memory as large as the gradients."""


def _layout(model: Any) -> str:
    """Return a text of DDP's buckets: the parameters of each in their order; empty for another object."""
    if not isinstance(model, DistributedDataParallel):
        return ""
    rebuilt = bool(model._has_rebuilt_buckets)
    if model not in _LAYOUTS or _LAYOUTS[model][0] != rebuilt:
        names = {id(one): name for name, one in model.module.named_parameters()}
        buckets = [
            [names.get(id(one), "") for one in bucket.parameters()]
            for bucket in model.reducer._get_zeros_like_grad_buckets()
        ]
        _LAYOUTS[model] = rebuilt, sha256(f"{buckets}".encode()).hexdigest()[:16]
    return _LAYOUTS[model][1]

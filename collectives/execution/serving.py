"""A helper at work: a process that adds and copies in the ranks' collectives, and has no array of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.backends.backend import Backend, Call, Follows, RankArrays
from collectives.execution.plan_store import PlanStore
from collectives.lowering.lower import lower
from collectives.peers.signature import Signature
from topoplan.errors import PlanError, UsageError

REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")
"""Collectives that add up."""


def serve(backend: Backend[Any], store: PlanStore) -> int:
    """Take part in every collective of the ranks whose trees pass helpers, until they leave.

    A helper is told of each what the ranks have agreed on, and lowers the plan by itself: plans are the same wherever
    they are made.

    Parameters
    ----------
    backend : Backend
        Of a helper.
    store : PlanStore

    Returns
    -------
    int
        Collectives that were run.

    Raises
    ------
    UsageError
        The back end is of a rank; or a helper has another plan than the ranks, of which they are told.
    BackendError
        A rank or a helper failed.
    """
    if not is_helper(backend):
        raise UsageError("this process is a rank, which calls collectives; only helpers serve")
    assert isinstance(backend, Follows), "helpers are of such back ends alone"
    done = 0
    while (asked := backend.follow()) is not None:
        try:
            call = _call(asked, store, backend.ranks[0])
        except (TypeError, PlanError, UsageError) as error:
            told = f"helper {backend.ranks[0]} cannot take part: {error}"
            backend.refuse(Signature(asked.call, "", asked.world, "", None, None, "", 0, 0, refusal=told))
            raise UsageError(told) from error
        backend.run(call)
        done += 1
    return done


def is_helper(backend: Backend[Any]) -> bool:
    """Whether a back end is of a device that is no rank."""
    return backend.one_rank and backend.ranks[0] >= backend.size


def _call(asked: Signature, store: PlanStore, vertex: int) -> Call[Any]:
    """What a helper runs of a collective."""
    dtype = np.dtype(asked.dtype)
    plan = store.plan(asked.collective, asked.root, asked.count * dtype.itemsize)
    key = store.key(plan)
    if not key.digest.startswith(asked.plan):
        raise PlanError(f"the ranks run plan {asked.plan}, and this machine's is {key.digest[:16]}")
    table = lower(plan, asked.count, chunk_elements=asked.chunk, digest=key.digest)
    nothing = np.zeros(0, dtype)
    memory = RankArrays(vertex, (0, 0), nothing, (0, 0), nothing)
    op = None if asked.op is None or asked.collective not in REDUCTIONS else asked.op.split()[0]
    return Call(plan, table, asked, op, asked.dtype, dtype.itemsize, (memory,))

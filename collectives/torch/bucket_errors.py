"""Errors of an exchange, told with the step of training and the bucket in which they happened."""

from __future__ import annotations

from topoplan.errors import BackendError, TopoplanError


def in_bucket(error: TopoplanError, *, rank: int, step: int, bucket: int, nbytes: int) -> BackendError:
    """The same error as a `BackendError` that says where in training it happened.

    Parameters
    ----------
    error : TopoplanError
    rank : int
        This process's.
    step : int
        Of training, from 0.
    bucket : int
        Its index.
    nbytes : int
        Of its gradients.

    Examples
    --------
    >>> found = in_bucket(BackendError("the peer is gone", rank=0, peer=2), rank=0, step=7, bucket=1, nbytes=4096)
    >>> str(found), found.peer
    ('training step 7, bucket 1 of 4096 bytes: rank 0, peer 2: the peer is gone', 2)
    """
    told = (
        str(error) if isinstance(error, BackendError) and error.rank is not None else f"rank {rank}: {error}"
    )
    named = BackendError(f"training step {step}, bucket {bucket} of {nbytes} bytes: {told}")
    named.rank = rank
    if isinstance(error, BackendError):
        named.peer, named.step = error.peer, error.step
    return named

"""What a checkpoint of a `GradientSynchronizer` holds: the step, and what every bucket has not sent yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collectives.communicator.communicator import Communicator
from topoplan.errors import UsageError

FORMAT = "topoplan.gradients/1"


def saved(communicator: Communicator, layout: str, step: int) -> dict[str, Any]:
    """The state of this process, as copies; ``layout`` tells parameters and buckets apart from others."""
    return {
        "format": FORMAT,
        "ranks": communicator.size,
        "layout": layout,
        "step": step,
        "residuals": communicator.sparse_state(),
    }


def restored(communicator: Communicator, layout: str, state: Mapping[str, Any]) -> int:
    """Put a state back into the communicator; the step.

    Raises
    ------
    UsageError
        It is of other parameters, other buckets or another number of ranks; nothing has changed.
    """
    expected = {"format": FORMAT, "ranks": communicator.size, "layout": layout}
    for key, value in expected.items():
        if state.get(key) != value:
            found, wanted = str(state.get(key))[:60], str(value)[:60]
            raise UsageError(
                f"the state was saved with {key} {found}, and here it is {wanted}; restore it with the same "
                "parameters, bucket_bytes and number of ranks"
            )
    communicator.restore_sparse_state(state["residuals"])
    return int(state["step"])

"""A collective that runs in the background, as a future of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from collectives.arrays.library import ArrayLibrary
from collectives.communicator.handle import Handle
from topoplan.errors import TopoplanError


def future_of(
    handle: Handle[Any],
    result: Any,
    *,
    device: torch.device,
    arrays: ArrayLibrary[Any],
    finish: Callable[[], None],
    told: Callable[[TopoplanError], TopoplanError] = lambda error: error,
) -> torch.futures.Future[Any]:
    """A future that ends with a collective.

    Parameters
    ----------
    handle : Handle
    result : tensor, or nested lists of tensors
        What the future holds in the end.
    device : torch.device
        Of these. On a GPU whoever waits for the future orders the current stream behind the collective.
    arrays : ArrayLibrary
        Of the communicator.
    finish : callable
        What is to be done with the result of the collective, in its thread and stream.
    told : callable
        From an error of the collective to that of the future.
    """
    future: torch.futures.Future[Any] = torch.futures.Future(
        devices=[device] if device.type == "cuda" else None
    )

    def ended() -> None:
        with arrays.here():
            try:
                handle.wait()
                finish()
            except TopoplanError as error:
                future.set_exception(told(error))
            except (
                BaseException
            ) as error:  # else nobody would hear of it and whoever waits would wait for ever
                future.set_exception(error)
            else:
                future.set_result(result)

    handle.when_done(ended)
    return future

"""Futures of torch for collectives: nobody who waits for one waits for ever."""

from __future__ import annotations

import pytest

from collectives.arrays.numpy_arrays import NumpyArrays
from collectives.communicator.handle import Handle

pytestmark = pytest.mark.thorough

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_program_while_a_result_is_handed_over_comes_out(error: type[BaseException]) -> None:
    """Torch's futures do not take it, and would never end."""
    from collectives.torch.futures import future_of

    def finish() -> None:
        raise error

    with pytest.raises(error):
        future_of(Handle.of(None), None, device=torch.device("cpu"), arrays=NumpyArrays(), finish=finish)


def test_an_error_while_a_result_is_handed_over_is_that_of_the_future() -> None:
    from collectives.torch.futures import future_of

    def finish() -> None:
        raise ZeroDivisionError

    future = future_of(Handle.of(None), None, device=torch.device("cpu"), arrays=NumpyArrays(), finish=finish)
    with pytest.raises(ZeroDivisionError):
        future.wait()

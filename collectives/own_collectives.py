"""The allreduce that a back end's library has itself: what a plan is compared with on the same processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class OwnAllReduce:
    """An allreduce of another library.

    Parameters
    ----------
    name : str
    run : function of (input, result)
        Sums the inputs of all processes.
    """

    name: str
    run: Callable[[Any, Any], None]


def own_all_reduce(backend: str, dtype: str) -> OwnAllReduce | None:
    """The allreduce of the library behind a back end; None where there is none, as for loopback and tcp.

    MPI has none for bfloat16.
    """
    if backend == "mpi" and dtype != "bfloat16":
        from mpi4py import MPI

        library = MPI.Get_library_version().split(",")[0].splitlines()[0]
        name = "MPICH" if library.startswith("MPICH") else library
        return OwnAllReduce(f"{name} MPI_Allreduce", lambda given, out: MPI.COMM_WORLD.Allreduce(given, out))
    if backend == "torch":
        import torch.distributed as dist

        def run(given: Any, out: Any) -> None:
            out.copy_(given)
            dist.all_reduce(out)

        return OwnAllReduce(f"{dist.get_backend()} all_reduce", run)
    return None

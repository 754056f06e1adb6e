"""The whole check of an algorithm of MSCCL: limits of the runtimes, and runs in and out of place."""

from __future__ import annotations

from topoplan.errors import PlanError
from topoplan.interpreters.msccl.algorithm_file import AlgorithmFile, check_algorithm
from topoplan.interpreters.msccl.lower import programs
from topoplan.interpreters.postcondition import RUNS, check_runs
from topoplan.interpreters.traffic import traffic
from topoplan.interpreters.verdict import Verdict


def check_msccl(file: AlgorithmFile, *, runs: int = RUNS) -> Verdict:
    """Check an algorithm of MSCCL, whoever wrote it.

    Parameters
    ----------
    file : AlgorithmFile
    runs : int
        Interleavings to run.

    Raises
    ------
    PlanError
        What is wrong, with GPU, block and step.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.export import export_plan
    >>> from topoplan.interpreters.msccl.algorithm_file import read_algorithm_file
    >>> text = export_plan(topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7]), "msccl-xml").text
    >>> check_msccl(read_algorithm_file(text)).summary
    'allreduce of 4 GPUs, in place and out of place: 2 chunks, 2 channels, 5 blocks of a GPU at most'
    """
    fitting = check_algorithm(file)
    made = programs(file)
    if not made:
        raise PlanError("inplace and outofplace are both 0: the algorithm is for no call")
    check_runs(made, runs)
    ways = [name for meant, name in ((True, "in place"), (False, "out of place")) if file.modes[meant]]
    blocks = max(len(gpu.blocks) for gpu in file.gpus)
    return Verdict(
        collective=file.collective,
        ranks=len(file.gpus),
        root=None,
        summary=f"{file.collective} of {len(file.gpus)} GPUs, {' and '.join(ways)}: {file.chunks} chunks, "
        f"{file.channels} channels, {blocks} blocks of a GPU at most",
        runs=runs,
        traffic=traffic(made[0]),
        notes=(_runtimes(file, fitting),),
    )


def _runtimes(file: AlgorithmFile, fitting: list[str]) -> str:
    """Which runtimes run the file, and why the reader of another one refuses it."""
    told = f"in the limits of {' and '.join(fitting)}"
    if "RCCL" in fitting:
        told += "; RCCL runs such files up to the releases that carry MSCCL"
    return "; ".join(
        (told, *(f"{name}'s reader refuses the file: {why}" for name, why in file.refusals.items()))
    )

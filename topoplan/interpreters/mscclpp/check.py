"""The whole check of an execution plan: limits, runs, and what is worth a word beside the verdict."""

from __future__ import annotations

from collections import Counter

from topoplan.errors import PlanError
from topoplan.interpreters.mscclpp.limits import check_limits, placed
from topoplan.interpreters.mscclpp.lower import NAMES, programs
from topoplan.interpreters.mscclpp.plan_file import Operation, PlanFile
from topoplan.interpreters.postcondition import RUNS, check_runs
from topoplan.interpreters.traffic import traffic
from topoplan.interpreters.verdict import Verdict


def check_execution_plan(plan: PlanFile, *, runs: int = RUNS) -> Verdict:
    """Check an execution plan of MSCCL++, whoever wrote it.

    Parameters
    ----------
    plan : PlanFile
    runs : int
        Interleavings to run.

    Raises
    ------
    PlanError
        What is wrong, with GPU, block and operation.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.export import export_plan
    >>> from topoplan.interpreters.mscclpp.plan_file import read_plan_file
    >>> file = export_plan(topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7]), "mscclpp").text
    >>> check_execution_plan(read_plan_file(file)).summary
    'allreduce of 4 GPUs, in place: 2 chunks, 3 blocks of a GPU at most'
    """
    check_limits(plan)
    notes: list[str] = []
    made = programs(plan)
    try:
        root = check_runs(made, runs)
    except PlanError as error:
        # blocks that divide an operation are held together by nothing; files that rely on it run by luck
        if not any(one.group[1] > 1 for one in _operations(plan)):
            raise
        made = programs(plan, in_step=True)
        root = check_runs(made, runs)
        notes.append(
            "warning: right only where blocks that divide an operation keep in step, and nothing sees to it: "
            f"otherwise {error}"
        )
    names = Counter(one.name for one in _operations(plan))
    if names["flush"]:
        notes.append("flush is run as meant; release 0.9 flushes as many channels as dst_buff has references")
    if plan.protocol == "LL":
        notes.append(
            "every packet carries its flag, so the wires carry twice the bytes that are counted here"
        )
    if any(gpu.groups for gpu in plan.gpus):
        notes.append("what switches copy and add is not in the loads of links")
    chunks = max(plan.gpus[0].chunks["i"], plan.gpus[0].chunks["o"])
    return Verdict(
        collective=NAMES.get(plan.collective, plan.collective),
        ranks=len(plan.gpus),
        root=root,
        summary=f"{NAMES.get(plan.collective, plan.collective)} of {len(plan.gpus)} GPUs, "
        f"{'in place' if plan.in_place else 'out of place'}: {chunks} chunks, "
        f"{max(len(gpu.blocks) for gpu in plan.gpus)} blocks of a GPU at most",
        runs=runs,
        traffic=traffic(made[0]),
        notes=tuple(notes),
    )


def _operations(plan: PlanFile) -> list[Operation]:
    return [one for gpu in plan.gpus for block in gpu.blocks for one, _, _ in placed(block, "")]

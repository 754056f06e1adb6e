"""Plans as algorithms of MSCCL: they run in and out of place, keep the rate and the limits of the runtimes."""

from __future__ import annotations

from fractions import Fraction

import pytest

import topoplan
from tests.support.hand_plans import plan_of, stage, star
from topoplan.engines.exported import Choices
from topoplan.engines.msccl_read_back import AlgorithmFile, check_msccl, read_algorithm_file
from topoplan.engines.registry import export_plan
from topoplan.engines.verdict import EngineVerdict, machine_loads
from topoplan.errors import UsageError
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Shard


def exported(plan: Plan, **choices: int) -> tuple[AlgorithmFile, EngineVerdict]:
    """The file of a plan, checked in eight interleavings: two each in and out of place, small and large."""
    file = read_algorithm_file(export_plan(plan, "msccl-xml", Choices(**choices)).text)
    return file, check_msccl(file, runs=8)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ["allreduce", "allgather", "reduce_scatter"])
@pytest.mark.parametrize("machine", ["dgx-1v", "dgx-2", "mi250x", "pcie-x8"])
def test_every_plan_of_the_library_runs_at_its_rate(machine: str, collective: str) -> None:
    plan = topoplan.plan(machine, collective)
    _, verdict = exported(plan)
    loads = machine_loads(verdict.traffic, len(plan.ranks), plan.topology)
    assert float(loads.rate) == pytest.approx(plan.rate)


def test_connections_decide_the_number_of_channels() -> None:
    """A ring sums and hands on in one direction, so a pair of ranks would be connected twice in one channel.

    Stars out of the eight roots of a DGX-A100 have no pair in common, stars in and out have.
    """
    plan = topoplan.ring("v100x4")
    file, verdict = exported(plan)
    assert float(machine_loads(verdict.traffic, 4, plan.topology).rate) == pytest.approx(plan.rate)
    assert file.channels >= 2
    assert exported(topoplan.plan("dgx-a100", "allgather"))[0].channels == 1
    assert exported(topoplan.plan("dgx-a100"))[0].channels == 8


def test_more_chunks_than_a_step_takes_are_several_steps() -> None:
    """A step moves at most 71 chunks."""
    plan = topoplan.plan("v100x4", "allgather")
    file, _ = exported(plan, chunks=300)
    counts = [step.count for block in file.gpus[0].blocks for step in block.steps]
    assert max(counts) == 71
    assert any(len(block.steps) > 1 for block in file.gpus[0].blocks)


def test_the_limits_of_a_runtime_are_kept() -> None:
    """A star among 70 ranks needs more blocks than RCCL has; steps run out at 64 there and at 256 in MSCCL."""
    tree = star(range(70), 0)
    shards = [Shard(Fraction(1), (stage("reduce", 0, tree), stage("broadcast", 0, tree)))]
    plan = plan_of(70, "allreduce", shards)
    with pytest.raises(UsageError, match="137 blocks of a GPU, more than the 64 of RCCL 6"):
        export_plan(plan, "msccl-xml", Choices(runtime="rccl"))
    with pytest.raises(UsageError, match="more than the 3 of MSCCL"):
        export_plan(topoplan.plan("dgx-1v"), "msccl-xml", Choices(max_blocks=3))

    for collective in ("broadcast", "reduce"):
        with pytest.raises(UsageError, match="cannot name a root"):
            export_plan(topoplan.plan("v100x4", collective), "msccl-xml")

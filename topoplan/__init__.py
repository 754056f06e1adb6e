"""topoplan: plans collective communication from a machine's links, and proves how good the plan is.

The names below load what they need when they are first used, so that ``import topoplan`` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from topoplan.cli.functions import (
        check,
        compare,
        diff,
        explain,
        export,
        order,
        recommend,
        report,
        simulate,
    )
    from topoplan.cli.results import Result
    from topoplan.errors import (
        BackendError,
        InfeasibleError,
        PlanError,
        ProbeError,
        RefusedError,
        TopologyError,
        TopoplanError,
        UsageError,
    )
    from topoplan.machine.cables import Cable
    from topoplan.machine.cluster import cluster, cluster_by_kind, nvswitch_cluster
    from topoplan.machine.cluster_by_kind import ClusterByKind
    from topoplan.machine.cluster_network import Server
    from topoplan.machine.topology import Device, Link, Topology
    from topoplan.machine.variants import (
        slow_links,
        with_relays,
        without_devices,
        without_gpus,
        without_links,
    )
    from topoplan.model.asynchronous_training import neighbour_probabilities
    from topoplan.model.late_ranks import LatePlan, plan_late
    from topoplan.model.schedule_selection import plan_by_size
    from topoplan.plans.mesh_plans import MeshPlans, load_mesh
    from topoplan.plans.plan import Plan, Tree
    from topoplan.plans.plan_by_kind import PlanByKind
    from topoplan.plans.size_plans import SizePlans, load_plan, load_plan_by_kind, load_survival
    from topoplan.plans.survival import SurvivalPlans, surviving_ranks, verify_survival
    from topoplan.plans.verify import verify
    from topoplan.reading.load import load
    from topoplan.reading.nvlink_overlay import apply_nvlink_status
    from topoplan.reading.nvlink_overlay import apply_nvlink_status as overlay  # noqa: F401
    from topoplan.reading.probe import probe
    from topoplan.schedules.binary_trees import double_binary_tree
    from topoplan.schedules.hierarchical import three_phase
    from topoplan.schedules.low_latency import lowest_tree, one_hop_plan, one_shot_plan
    from topoplan.schedules.low_latency import one_hop_plan as one_hop  # noqa: F401
    from topoplan.schedules.low_latency import one_shot_plan as one_shot  # noqa: F401
    from topoplan.schedules.registry import register_schedule
    from topoplan.schedules.ring import ring_plan
    from topoplan.schedules.ring import ring_plan as ring  # noqa: F401
    from topoplan.schedules.sparse_plan import sparse_plan
    from topoplan.schedules.user_trees import plan_from_rings, plan_from_trees
    from topoplan.solve.failure_planner import Replanned, plan_survival, replan
    from topoplan.solve.mesh_planner import plan_mesh
    from topoplan.solve.packing.kind_composition import plan_by_kind
    from topoplan.solve.planner import plan
    from topoplan.solve.upper_bound import compute_bound
    from topoplan.solve.upper_bound import compute_bound as bound  # noqa: F401

_HOME = {
    "BackendError": "topoplan.errors",
    "Cable": "topoplan.machine.cables",
    "ClusterByKind": "topoplan.machine.cluster_by_kind",
    "Device": "topoplan.machine.topology",
    "InfeasibleError": "topoplan.errors",
    "LatePlan": "topoplan.model.late_ranks",
    "Link": "topoplan.machine.topology",
    "MeshPlans": "topoplan.plans.mesh_plans",
    "Plan": "topoplan.plans.plan",
    "PlanByKind": "topoplan.plans.plan_by_kind",
    "PlanError": "topoplan.errors",
    "ProbeError": "topoplan.errors",
    "RefusedError": "topoplan.errors",
    "Replanned": "topoplan.solve.failure_planner",
    "Result": "topoplan.cli.results",
    "Server": "topoplan.machine.cluster_network",
    "SizePlans": "topoplan.plans.size_plans",
    "SurvivalPlans": "topoplan.plans.survival",
    "Topology": "topoplan.machine.topology",
    "TopologyError": "topoplan.errors",
    "TopoplanError": "topoplan.errors",
    "Tree": "topoplan.plans.plan",
    "UsageError": "topoplan.errors",
    "apply_nvlink_status": "topoplan.reading.nvlink_overlay",
    "check": "topoplan.cli.functions",
    "cluster": "topoplan.machine.cluster",
    "cluster_by_kind": "topoplan.machine.cluster",
    "compare": "topoplan.cli.functions",
    "compute_bound": "topoplan.solve.upper_bound",
    "diff": "topoplan.cli.functions",
    "double_binary_tree": "topoplan.schedules.binary_trees",
    "explain": "topoplan.cli.functions",
    "export": "topoplan.cli.functions",
    "load": "topoplan.reading.load",
    "load_mesh": "topoplan.plans.mesh_plans",
    "load_plan": "topoplan.plans.size_plans",
    "load_plan_by_kind": "topoplan.plans.size_plans",
    "load_survival": "topoplan.plans.size_plans",
    "lowest_tree": "topoplan.schedules.low_latency",
    "neighbour_probabilities": "topoplan.model.asynchronous_training",
    "nvswitch_cluster": "topoplan.machine.cluster",
    "one_hop_plan": "topoplan.schedules.low_latency",
    "one_shot_plan": "topoplan.schedules.low_latency",
    "order": "topoplan.cli.functions",
    "plan": "topoplan.solve.planner",
    "plan_by_kind": "topoplan.solve.packing.kind_composition",
    "plan_by_size": "topoplan.model.schedule_selection",
    "plan_from_rings": "topoplan.schedules.user_trees",
    "plan_from_trees": "topoplan.schedules.user_trees",
    "plan_late": "topoplan.model.late_ranks",
    "plan_mesh": "topoplan.solve.mesh_planner",
    "plan_survival": "topoplan.solve.failure_planner",
    "probe": "topoplan.reading.probe",
    "recommend": "topoplan.cli.functions",
    "register_schedule": "topoplan.schedules.registry",
    "replan": "topoplan.solve.failure_planner",
    "report": "topoplan.cli.functions",
    "ring_plan": "topoplan.schedules.ring",
    "simulate": "topoplan.cli.functions",
    "slow_links": "topoplan.machine.variants",
    "sparse_plan": "topoplan.schedules.sparse_plan",
    "surviving_ranks": "topoplan.plans.survival",
    "three_phase": "topoplan.schedules.hierarchical",
    "verify": "topoplan.plans.verify",
    "verify_survival": "topoplan.plans.survival",
    "without_devices": "topoplan.machine.variants",
    "without_gpus": "topoplan.machine.variants",
    "without_links": "topoplan.machine.variants",
    "with_relays": "topoplan.machine.variants",
}

_RENAMED = {
    "bound": "compute_bound",
    "one_hop": "one_hop_plan",
    "one_shot": "one_shot_plan",
    "overlay": "apply_nvlink_status",
    "ring": "ring_plan",
}
"""Deprecated names."""

__all__ = [
    "BackendError",
    "Cable",
    "ClusterByKind",
    "Device",
    "InfeasibleError",
    "LatePlan",
    "Link",
    "MeshPlans",
    "Plan",
    "PlanByKind",
    "PlanError",
    "ProbeError",
    "RefusedError",
    "Replanned",
    "Result",
    "Server",
    "SizePlans",
    "SurvivalPlans",
    "Topology",
    "TopologyError",
    "TopoplanError",
    "Tree",
    "UsageError",
    "apply_nvlink_status",
    "check",
    "cluster",
    "cluster_by_kind",
    "compare",
    "compute_bound",
    "diff",
    "double_binary_tree",
    "explain",
    "export",
    "load",
    "load_mesh",
    "load_plan",
    "load_plan_by_kind",
    "load_survival",
    "lowest_tree",
    "neighbour_probabilities",
    "nvswitch_cluster",
    "one_hop_plan",
    "one_shot_plan",
    "order",
    "plan",
    "plan_by_kind",
    "plan_by_size",
    "plan_from_rings",
    "plan_from_trees",
    "plan_late",
    "plan_mesh",
    "plan_survival",
    "probe",
    "recommend",
    "register_schedule",
    "replan",
    "report",
    "ring_plan",
    "simulate",
    "slow_links",
    "sparse_plan",
    "surviving_ranks",
    "three_phase",
    "verify",
    "verify_survival",
    "with_relays",
    "without_devices",
    "without_gpus",
    "without_links",
]


def __getattr__(name: str) -> object:
    if name in _RENAMED:
        from topoplan.errors import deprecated

        deprecated(f"topoplan.{name}", f"use topoplan.{_RENAMED[name]}")
        return __getattr__(_RENAMED[name])
    if name not in _HOME:
        raise AttributeError(f"module 'topoplan' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

"""topoplan: plans collective communication from a machine's wires, and proves how good the plan is.

The names below load what they need when they are first used, so that ``import topoplan`` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
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
    from topoplan.machine.cluster import cluster, nvswitch_cluster
    from topoplan.machine.cluster_network import Server
    from topoplan.machine.topology import Device, Link, Topology
    from topoplan.machine.variants import slow_links, without_devices, without_gpus, without_links
    from topoplan.model.asynchronous_training import neighbour_probabilities
    from topoplan.model.closed_form import simulate
    from topoplan.model.schedule_selection import plan_by_size
    from topoplan.plans.mesh_plans import MeshPlans, load_mesh
    from topoplan.plans.plan import Plan
    from topoplan.plans.size_plans import SizePlans, load_plan, load_survival
    from topoplan.plans.survival import SurvivalPlans, surviving_ranks, verify_survival
    from topoplan.plans.verify import verify
    from topoplan.reading.load import load
    from topoplan.reading.nvlink_overlay import overlay
    from topoplan.reading.probe import probe
    from topoplan.schedules.binary_trees import double_binary_tree
    from topoplan.schedules.hierarchical import three_phase
    from topoplan.schedules.low_latency import lowest_tree, one_hop, one_shot
    from topoplan.schedules.ring import ring
    from topoplan.schedules.sparse_plan import sparse_plan
    from topoplan.schedules.user_trees import plan_from_trees
    from topoplan.solve.failure_planner import Replanned, plan_survival, replan
    from topoplan.solve.mesh_planner import plan_mesh
    from topoplan.solve.planner import plan
    from topoplan.solve.upper_bound import bound

_HOME = {
    "BackendError": "topoplan.errors",
    "Device": "topoplan.machine.topology",
    "InfeasibleError": "topoplan.errors",
    "Link": "topoplan.machine.topology",
    "MeshPlans": "topoplan.plans.mesh_plans",
    "Plan": "topoplan.plans.plan",
    "PlanError": "topoplan.errors",
    "ProbeError": "topoplan.errors",
    "RefusedError": "topoplan.errors",
    "Replanned": "topoplan.solve.failure_planner",
    "Server": "topoplan.machine.cluster_network",
    "SizePlans": "topoplan.plans.size_plans",
    "SurvivalPlans": "topoplan.plans.survival",
    "Topology": "topoplan.machine.topology",
    "TopologyError": "topoplan.errors",
    "TopoplanError": "topoplan.errors",
    "UsageError": "topoplan.errors",
    "bound": "topoplan.solve.upper_bound",
    "cluster": "topoplan.machine.cluster",
    "double_binary_tree": "topoplan.schedules.binary_trees",
    "load": "topoplan.reading.load",
    "load_mesh": "topoplan.plans.mesh_plans",
    "load_plan": "topoplan.plans.size_plans",
    "load_survival": "topoplan.plans.size_plans",
    "lowest_tree": "topoplan.schedules.low_latency",
    "neighbour_probabilities": "topoplan.model.asynchronous_training",
    "nvswitch_cluster": "topoplan.machine.cluster",
    "one_hop": "topoplan.schedules.low_latency",
    "one_shot": "topoplan.schedules.low_latency",
    "overlay": "topoplan.reading.nvlink_overlay",
    "plan": "topoplan.solve.planner",
    "plan_by_size": "topoplan.model.schedule_selection",
    "plan_from_trees": "topoplan.schedules.user_trees",
    "plan_mesh": "topoplan.solve.mesh_planner",
    "plan_survival": "topoplan.solve.failure_planner",
    "probe": "topoplan.reading.probe",
    "replan": "topoplan.solve.failure_planner",
    "ring": "topoplan.schedules.ring",
    "simulate": "topoplan.model.closed_form",
    "slow_links": "topoplan.machine.variants",
    "sparse_plan": "topoplan.schedules.sparse_plan",
    "surviving_ranks": "topoplan.plans.survival",
    "three_phase": "topoplan.schedules.hierarchical",
    "verify": "topoplan.plans.verify",
    "verify_survival": "topoplan.plans.survival",
    "without_devices": "topoplan.machine.variants",
    "without_gpus": "topoplan.machine.variants",
    "without_links": "topoplan.machine.variants",
}

__all__ = [
    "BackendError",
    "Device",
    "InfeasibleError",
    "Link",
    "MeshPlans",
    "Plan",
    "PlanError",
    "ProbeError",
    "RefusedError",
    "Replanned",
    "Server",
    "SizePlans",
    "SurvivalPlans",
    "Topology",
    "TopologyError",
    "TopoplanError",
    "UsageError",
    "bound",
    "cluster",
    "double_binary_tree",
    "load",
    "load_mesh",
    "load_plan",
    "load_survival",
    "lowest_tree",
    "neighbour_probabilities",
    "nvswitch_cluster",
    "one_hop",
    "one_shot",
    "overlay",
    "plan",
    "plan_by_size",
    "plan_from_trees",
    "plan_mesh",
    "plan_survival",
    "probe",
    "replan",
    "ring",
    "simulate",
    "slow_links",
    "sparse_plan",
    "surviving_ranks",
    "three_phase",
    "verify",
    "verify_survival",
    "without_devices",
    "without_gpus",
    "without_links",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'topoplan' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

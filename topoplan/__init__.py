"""topoplan: plans collective communication from a machine's wires, and proves how good the plan is.

The names below load what they need when they are first used, so that ``import topoplan`` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from topoplan.bounds.upper_bound import bound
    from topoplan.choice.by_size import plan_by_size
    from topoplan.clusters.build import cluster
    from topoplan.clusters.server import Server
    from topoplan.clusters.shapes import nvswitch_cluster
    from topoplan.degraded import slow_links, without_devices, without_gpus, without_links
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
    from topoplan.formats.load import load
    from topoplan.formats.nvidia_smi.nvlink_overlay import overlay
    from topoplan.packing.mesh import plan_mesh
    from topoplan.packing.planner import plan
    from topoplan.packing.survival import Replanned, plan_survival, replan
    from topoplan.plans.mesh_plans import MeshPlans, load_mesh
    from topoplan.plans.plan import Plan
    from topoplan.plans.size_plans import SizePlans, load_plan, load_survival
    from topoplan.plans.survival import SurvivalPlans, surviving_ranks, verify_survival
    from topoplan.plans.verify import verify
    from topoplan.probing.probe import probe
    from topoplan.schedules.double_binary_tree import double_binary_tree
    from topoplan.schedules.lowest_tree import lowest_tree
    from topoplan.schedules.one_hop import one_hop
    from topoplan.schedules.one_shot import one_shot
    from topoplan.schedules.own_trees import plan_from_trees
    from topoplan.schedules.rings.ring import ring
    from topoplan.schedules.sparse_plan import sparse_plan
    from topoplan.schedules.three_phase import three_phase
    from topoplan.simulation.gossip import neighbour_probabilities
    from topoplan.simulation.model import simulate
    from topoplan.topology import Device, Link, Topology

_HOME = {
    "BackendError": "topoplan.errors",
    "Device": "topoplan.topology",
    "InfeasibleError": "topoplan.errors",
    "Link": "topoplan.topology",
    "MeshPlans": "topoplan.plans.mesh_plans",
    "Plan": "topoplan.plans.plan",
    "PlanError": "topoplan.errors",
    "ProbeError": "topoplan.errors",
    "RefusedError": "topoplan.errors",
    "Replanned": "topoplan.packing.survival",
    "Server": "topoplan.clusters.server",
    "SizePlans": "topoplan.plans.size_plans",
    "SurvivalPlans": "topoplan.plans.survival",
    "Topology": "topoplan.topology",
    "TopologyError": "topoplan.errors",
    "TopoplanError": "topoplan.errors",
    "UsageError": "topoplan.errors",
    "bound": "topoplan.bounds.upper_bound",
    "cluster": "topoplan.clusters.build",
    "double_binary_tree": "topoplan.schedules.double_binary_tree",
    "load": "topoplan.formats.load",
    "load_mesh": "topoplan.plans.mesh_plans",
    "load_plan": "topoplan.plans.size_plans",
    "load_survival": "topoplan.plans.size_plans",
    "lowest_tree": "topoplan.schedules.lowest_tree",
    "neighbour_probabilities": "topoplan.simulation.gossip",
    "nvswitch_cluster": "topoplan.clusters.shapes",
    "one_hop": "topoplan.schedules.one_hop",
    "one_shot": "topoplan.schedules.one_shot",
    "overlay": "topoplan.formats.nvidia_smi.nvlink_overlay",
    "plan": "topoplan.packing.planner",
    "plan_by_size": "topoplan.choice.by_size",
    "plan_from_trees": "topoplan.schedules.own_trees",
    "plan_mesh": "topoplan.packing.mesh",
    "plan_survival": "topoplan.packing.survival",
    "probe": "topoplan.probing.probe",
    "replan": "topoplan.packing.survival",
    "ring": "topoplan.schedules.rings.ring",
    "simulate": "topoplan.simulation.model",
    "slow_links": "topoplan.degraded",
    "sparse_plan": "topoplan.schedules.sparse_plan",
    "surviving_ranks": "topoplan.plans.survival",
    "three_phase": "topoplan.schedules.three_phase",
    "verify": "topoplan.plans.verify",
    "verify_survival": "topoplan.plans.survival",
    "without_devices": "topoplan.degraded",
    "without_gpus": "topoplan.degraded",
    "without_links": "topoplan.degraded",
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

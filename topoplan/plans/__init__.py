"""The plan and its independent check."""

from topoplan.fabric.fabric import Arc, Fabric, usable_fabric
from topoplan.plans.certificates import Certificate, Channels, Cut, Lengths, Partition, Trivial
from topoplan.plans.plan import Plan
from topoplan.plans.size_plans import SizePlans, SizeRange, plan_at, verify_all
from topoplan.plans.tree import Edge, Shard, Stage
from topoplan.plans.verify import Verification, verify

__all__ = [
    "Arc",
    "Certificate",
    "Channels",
    "Cut",
    "Edge",
    "Fabric",
    "Lengths",
    "Partition",
    "Plan",
    "Shard",
    "SizePlans",
    "SizeRange",
    "Stage",
    "Trivial",
    "Verification",
    "plan_at",
    "usable_fabric",
    "verify",
    "verify_all",
]

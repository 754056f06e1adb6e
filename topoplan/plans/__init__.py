"""The plan and its independent check."""

from topoplan.machine.fabric import Arc, Fabric, usable_fabric
from topoplan.plans.certificates.certificate import Certificate, Channels, Cut, Lengths, Partition, Trivial
from topoplan.plans.plan import Plan, Plans, SizeRange
from topoplan.plans.shards import Edge, Shard, Stage
from topoplan.plans.size_plans import SizePlans
from topoplan.plans.verify import Verification, verify, verify_all

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
    "Plans",
    "Shard",
    "SizePlans",
    "SizeRange",
    "Stage",
    "Trivial",
    "Verification",
    "usable_fabric",
    "verify",
    "verify_all",
]

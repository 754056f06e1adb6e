"""Certificates of bounds, one module for each family of kinds."""

from topoplan.plans.certificates.certificate import (
    Certificate,
    OneFabric,
    Trivial,
    certificate_from_object,
    explain_certificate,
)
from topoplan.plans.certificates.channels import Channels
from topoplan.plans.certificates.cuts import Cut, Partition
from topoplan.plans.certificates.lengths import Lengths
from topoplan.plans.certificates.sparse import BetweenServers, Entries, InsideServer, Sparse

__all__ = [
    "BetweenServers",
    "Certificate",
    "Channels",
    "Cut",
    "Entries",
    "InsideServer",
    "Lengths",
    "OneFabric",
    "Partition",
    "Sparse",
    "Trivial",
    "certificate_from_object",
    "explain_certificate",
]

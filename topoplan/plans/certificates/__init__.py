"""Certificates of bounds, one module for each family of kinds."""

from topoplan.plans.certificates.certificate import (
    Certificate,
    Channels,
    OneFabric,
    certificate_from_object,
    explain_certificate,
)
from topoplan.plans.certificates.exchange import Demand
from topoplan.plans.certificates.one_fabric import Cut, Lengths, Partition, Trivial
from topoplan.plans.certificates.sparse import BetweenServers, Entries, InsideServer, Sparse
from topoplan.plans.certificates.steiner import Steiner

__all__ = [
    "BetweenServers",
    "Certificate",
    "Channels",
    "Cut",
    "Demand",
    "Entries",
    "InsideServer",
    "Lengths",
    "OneFabric",
    "Partition",
    "Sparse",
    "Steiner",
    "Trivial",
    "certificate_from_object",
    "explain_certificate",
]

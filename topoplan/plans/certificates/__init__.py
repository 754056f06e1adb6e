"""Certificates of bounds, one module for each family of kinds."""

from topoplan.plans.certificates.certificate import (
    Certificate,
    Channels,
    Cut,
    Lengths,
    OneFabric,
    Partition,
    Trivial,
    certificate_from_object,
    explain_certificate,
)
from topoplan.plans.certificates.exchange import (
    BetweenServersBound,
    Demand,
    EntryBound,
    InsideServerBound,
    SparseCertificate,
)
from topoplan.plans.certificates.steiner import Steiner

__all__ = [
    "BetweenServersBound",
    "Certificate",
    "Channels",
    "Cut",
    "Demand",
    "EntryBound",
    "InsideServerBound",
    "Lengths",
    "OneFabric",
    "Partition",
    "SparseCertificate",
    "Steiner",
    "Trivial",
    "certificate_from_object",
    "explain_certificate",
]

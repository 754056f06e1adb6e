"""collectives: runs a topoplan plan on arrays.

What training loops use, and what is compiled, is loaded when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from collectives.communicator.communicator import Communicator
from collectives.communicator.handle import Handle
from collectives.lowering.lower import lower
from collectives.lowering.table_check import check_table
from collectives.lowering.transfer_table import TransferTable
from collectives.selection.error_feedback import ErrorFeedback, warm_up_density
from collectives.selection.topk import topk

if TYPE_CHECKING:
    from collectives.selection.mstopk import mstopk
    from collectives.staleness.modes import ASP, BSP, SSP, Gossip, LocalSGD
    from collectives.training.gradient_synchronizer import GradientSynchronizer
    from collectives.training.report import report

_HOME = {
    "ASP": "collectives.staleness.modes",
    "BSP": "collectives.staleness.modes",
    "Gossip": "collectives.staleness.modes",
    "GradientSynchronizer": "collectives.training.gradient_synchronizer",
    "LocalSGD": "collectives.staleness.modes",
    "SSP": "collectives.staleness.modes",
    "mstopk": "collectives.selection.mstopk",
    "report": "collectives.training.report",
}

__all__ = [
    "ASP",
    "BSP",
    "SSP",
    "Communicator",
    "ErrorFeedback",
    "Gossip",
    "GradientSynchronizer",
    "Handle",
    "LocalSGD",
    "TransferTable",
    "check_table",
    "lower",
    "mstopk",
    "report",
    "topk",
    "warm_up_density",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'collectives' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

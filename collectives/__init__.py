"""collectives: run a topoplan plan on arrays.

Names of training loops, and compiled ones, are loaded at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from collectives.communicator.communicator import Communicator
from collectives.communicator.handle import Handle, PreparedCall
from collectives.sparse.selection.error_feedback import ErrorFeedback, warm_up_density
from collectives.sparse.selection.topk import topk
from collectives.tables.lowering import lower
from collectives.tables.table_check import check_table
from collectives.tables.transfer_table import TransferTable

if TYPE_CHECKING:
    from collectives.sparse.codec import WireFormat
    from collectives.sparse.selection.mstopk import mstopk
    from collectives.tables.rank_part import RankPart, rank_part
    from collectives.training.common_rows import CommonRows
    from collectives.training.exchange_settings import Shrink, TopK
    from collectives.training.gradient_filters import Cast, Quantize, Threshold
    from collectives.training.gradient_synchronizer import GradientSynchronizer
    from collectives.training.low_rank import LowRank
    from collectives.training.modes import ASP, BSP, SSP, DiLoCo, Gossip, LocalSGD, SparseLoCo
    from collectives.training.optimizers import Lamb, Lars
    from collectives.training.report import report

_HOME = {
    "ASP": "collectives.training.modes",
    "BSP": "collectives.training.modes",
    "Cast": "collectives.training.gradient_filters",
    "CommonRows": "collectives.training.common_rows",
    "DiLoCo": "collectives.training.modes",
    "Gossip": "collectives.training.modes",
    "GradientSynchronizer": "collectives.training.gradient_synchronizer",
    "Lamb": "collectives.training.optimizers",
    "Lars": "collectives.training.optimizers",
    "LocalSGD": "collectives.training.modes",
    "LowRank": "collectives.training.low_rank",
    "Quantize": "collectives.training.gradient_filters",
    "RankPart": "collectives.tables.rank_part",
    "SSP": "collectives.training.modes",
    "Shrink": "collectives.training.exchange_settings",
    "SparseLoCo": "collectives.training.modes",
    "Threshold": "collectives.training.gradient_filters",
    "TopK": "collectives.training.exchange_settings",
    "WireFormat": "collectives.sparse.codec",
    "mstopk": "collectives.sparse.selection.mstopk",
    "rank_part": "collectives.tables.rank_part",
    "report": "collectives.training.report",
}

__all__ = [
    "ASP",
    "BSP",
    "SSP",
    "Cast",
    "CommonRows",
    "Communicator",
    "DiLoCo",
    "ErrorFeedback",
    "Gossip",
    "GradientSynchronizer",
    "Handle",
    "Lamb",
    "Lars",
    "LocalSGD",
    "LowRank",
    "PreparedCall",
    "Quantize",
    "RankPart",
    "Shrink",
    "SparseLoCo",
    "Threshold",
    "TopK",
    "TransferTable",
    "WireFormat",
    "check_table",
    "lower",
    "mstopk",
    "rank_part",
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

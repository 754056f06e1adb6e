"""collectives: runs a topoplan plan on arrays."""

from collectives.communicator import Communicator
from collectives.handle import Handle
from collectives.lowering import lower
from collectives.selection.error_feedback import ErrorFeedback
from collectives.selection.mstopk import mstopk
from collectives.selection.topk import topk
from collectives.selection.warm_up import warm_up_density
from collectives.table_check import check_table
from collectives.transfer_table import TransferTable

__all__ = [
    "Communicator",
    "ErrorFeedback",
    "Handle",
    "TransferTable",
    "check_table",
    "lower",
    "mstopk",
    "topk",
    "warm_up_density",
]

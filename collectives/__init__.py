"""collectives: runs a topoplan plan on arrays."""

from collectives.communicator import Communicator
from collectives.handle import Handle
from collectives.lowering import lower
from collectives.table_check import check_table
from collectives.transfer_table import TransferTable

__all__ = ["Communicator", "Handle", "TransferTable", "check_table", "lower"]

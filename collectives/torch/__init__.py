"""Inside torch's training loop: a communication hook for DDP, and the process-group back end "topoplan"."""

from typing import Any

from collectives.torch.fsdp2 import ShardedCompression, compress_fsdp2
from collectives.torch.hook import HookState, topoplan_hook
from collectives.torch.joining import Grown, grow, join_token
from collectives.torch.process_group import ProcessGroupTopoplan
from collectives.torch.recovery import Shrunk
from collectives.training.common_rows import CommonRows
from collectives.training.exchange_settings import Shrink, TopK
from collectives.training.gradient_filters import Cast, Quantize, Threshold
from collectives.training.low_rank import LowRank
from collectives.training.modes import ASP, BSP, SSP, DiLoCo, LocalSGD, SparseLoCo
from topoplan.errors import deprecated

__all__ = [
    "ASP",
    "BSP",
    "SSP",
    "Cast",
    "CommonRows",
    "DiLoCo",
    "Grown",
    "HookState",
    "LocalSGD",
    "LowRank",
    "ProcessGroupTopoplan",
    "Quantize",
    "ShardedCompression",
    "Shrink",
    "Shrunk",
    "SparseLoCo",
    "Threshold",
    "TopK",
    "compress_fsdp2",
    "grow",
    "join_token",
    "topoplan_hook",
]


def __getattr__(name: str) -> Any:
    if name != "PlannedGroup":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    deprecated("PlannedGroup", "write ProcessGroupTopoplan")
    return ProcessGroupTopoplan

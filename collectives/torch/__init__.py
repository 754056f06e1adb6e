"""Inside torch's training loop: a communication hook for DDP, and the process-group back end "topoplan"."""

from collectives.torch.hook import HookState, topoplan_hook
from collectives.torch.process_group import PlannedGroup
from collectives.torch.recovery import Shrunk

__all__ = ["HookState", "PlannedGroup", "Shrunk", "topoplan_hook"]

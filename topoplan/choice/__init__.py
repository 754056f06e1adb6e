"""Which plan for which message size."""

from topoplan.choice.by_size import Choice, choose_by_size, plan_by_size
from topoplan.choice.candidates import candidates

__all__ = ["Choice", "candidates", "choose_by_size", "plan_by_size"]

"""Plans and machines as files for other programs: NCCL's files, MSCCL's and MSCCL++'s, traces, graphs."""

from __future__ import annotations

from topoplan.export.exported import Choices, Exported
from topoplan.export.known_formats import FORMATS, check_format, export_machine, export_plan

__all__ = ["FORMATS", "Choices", "Exported", "check_format", "export_machine", "export_plan"]

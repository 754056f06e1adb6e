"""Trees beside rings, on one allocation or on all allocations of a machine."""

from topoplan.compare.allocations import AllocationClass, allocation_classes
from topoplan.compare.comparison import compare, compare_all
from topoplan.compare.jobs import Division, JobSet, divide
from topoplan.compare.recommendation import GpuSet, recommend
from topoplan.compare.table import Comparison, Summary, format_table, summary, to_object

__all__ = [
    "AllocationClass",
    "Comparison",
    "Division",
    "GpuSet",
    "JobSet",
    "Summary",
    "allocation_classes",
    "compare",
    "compare_all",
    "divide",
    "format_table",
    "recommend",
    "summary",
    "to_object",
]

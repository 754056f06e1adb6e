"""Execution plans of MSCCL++, whoever wrote them: their reader, their limits, and what their operations do."""

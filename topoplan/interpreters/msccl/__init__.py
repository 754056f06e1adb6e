"""Algorithms of MSCCL (XML), whoever wrote them: their reader, their limits, and what their steps do."""

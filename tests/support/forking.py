"""Ranks for tests as processes that are forked from one that has imported what they need, and loaded compiled loops.

A process of its own takes a second for that, three with torch. `multiprocessing` starts one such server for all tests
of a run, and what it is told to import later counts for nothing: so all tell it the same, here.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def forking() -> ForkServerContext:
    """Where to make processes and pipes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.jobs.forked_ranks"])
    return context

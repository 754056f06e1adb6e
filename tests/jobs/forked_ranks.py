"""What the process imports from which ranks are forked (`tests.support.forking`)."""

from __future__ import annotations

import contextlib
from importlib import import_module

from collectives.backends.shared import run
from collectives.backends.tcp import loops

run.compile_ahead()
loops.compile_ahead()
for name in ("pytest", "tests.faults.training"):
    import_module(name)
with contextlib.suppress(ImportError):
    import_module("torch._dynamo")  # which DDP imports when it is first made
    import_module("tests.jobs.torch_recovery_ranks")

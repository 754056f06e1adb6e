"""What the process imports from which ranks are forked (`tests.support.forking`)."""

from __future__ import annotations

import contextlib
from importlib import import_module

from collectives.backends.shared import compiled_program
from collectives.backends.tcp import compiled_exchange
from tests.support.torch_jobs import name_backend_base

name_backend_base()
compiled_program.compile_ahead()
compiled_exchange.compile_ahead()
for name in ("pytest", "tests.faults.training"):
    import_module(name)
with contextlib.suppress(ImportError):
    import_module("torch._dynamo")  # which DDP imports when it is first made
    import_module("tests.jobs.torch_recovery_ranks")

"""A step of training under the DDP hook, against DDP with its own allreduce over gloo.

A step is a forward and a backward pass over parameters that need next to no computing, so what is measured is the
averaging of their gradients; "no exchange" is the rest of it. ``python -m tests.bench hook`` starts the processes, and
times steps back to back in turns (`tests.bench.executors`, whose options it has).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from tests.bench.executors import Contender, before, measure, options_of

HOOKS: dict[str, dict[str, Any]] = {
    "by plan": {},
    "by messages": {"shared": False},
    "in bfloat16": {"compress": "bfloat16"},
    "density 0.01": {"density": 0.01},
}
"""Settings of the hook."""


def main(words: Sequence[str] = ()) -> None:
    options = options_of("hook", sizes="1MB,16MB,64MB", ranks="4").parse_args(list(words))
    if find_spec("torch") is None:
        print("not measured: torch is not installed")
        return
    listed = []
    for name, settings in HOOKS.items():
        listed.append(Contender(name, {"kind": "ddp", "hook": "plan", "settings": settings}))
        if options.against is not None:
            listed.append(before(listed[-1], options.against))
    for name, hook in (("built-in", "built-in"), ("no exchange", "none")):
        listed.append(Contender(name, {"kind": "ddp", "hook": hook, "settings": {}}, rival=True))
    measure(options, listed, "a step of DDP by its bytes of gradients, float32")

"""The kernels that error feedback and the exchange of entries need beside a selection's: their names and lines.

A residual takes gradients of every dtype that fits into its own without rounding.
"""

from __future__ import annotations

from itertools import product

from collectives.kernels.source import ELEMENTS, INDICES

GIVEN = {
    "float32": ("float32", "float16", "bfloat16"),
    "float64": ("float64", "float32", "float16", "bfloat16"),
}
"""For each dtype of a residual the dtypes of its gradients."""

FORMS = {"histogram": "FEEDBACK_HISTOGRAM", "gather": "FEEDBACK_GATHER", "take_back": "TAKE_BACK"}
"""The macro of each kernel that has a gradient."""

KINDS = {"feedback": "false", "momentum": "true"}
"""Whether a velocity takes the gradient in."""


def feedback_form(kind: str, form: str, given: str) -> str:
    """The name of a kernel that has a gradient of this dtype, without the residual's dtype.

    Examples
    --------
    >>> feedback_form("momentum", "gather", "bfloat16")
    'momentum_gather_bfloat16'
    """
    return f"{kind}_{form}_{given}"


def entries_form(what: str, index: str) -> str:
    """The name of a kernel that adds to entries or makes them zero, without the array's dtype."""
    return f"{what}_entries_{index}"


def _lines() -> dict[str, str]:
    lines = {}
    for kind, form, dtype in product(KINDS, FORMS, GIVEN):
        for given in GIVEN[dtype]:
            name = f"{feedback_form(kind, form, given)}_{dtype}"
            lines[name] = f"{FORMS[form]}({name}, {ELEMENTS[dtype]}, {ELEMENTS[given]}, {KINDS[kind]})"
    for what, index, dtype in product(("add", "zero"), INDICES, GIVEN):
        name = f"{entries_form(what, index)}_{dtype}"
        lines[name] = f"{what.upper()}_ENTRIES({name}, {ELEMENTS[dtype]}, {INDICES[index]})"
    return lines


FEEDBACK_LINES = _lines()
"""The line that makes a kernel, by its name."""

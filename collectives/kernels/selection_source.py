"""The CUDA source of the selection kernels: one template, and a line for each kernel that is wanted.

The template includes no header, as that of `kernel_source`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from importlib.resources import files

from collectives.kernels.feedback_source import FEEDBACK_LINES
from collectives.kernels.source import ELEMENTS, INDICES
from topoplan.errors import UsageError

PARTS = ("arithmetic.cu", "select.cu", "gather.cu", "emit.cu", "feedback.cu", "entries.cu")
"""The files of the template, in their order."""

KEY_BITS = {"bfloat16": (15, 7), "float16": (15, 10), "float32": (31, 23), "float64": (63, 52)}
"""Bits of a float without its sign, and how many of them are its mantissa's."""

FORMS = {
    "histogram": "HISTOGRAM({name}, {element}, Nothing<{element}>{{}})",
    "feed_histogram": "HISTOGRAM({name}, {element}, Gradient<{element}>{{gradient}})",
    "gather": "GATHER({name}, {element}, Nothing<{element}>{{}})",
    "feed_gather": "GATHER({name}, {element}, Gradient<{element}>{{gradient}})",
    "measure_list": "MEASURE({name}, {element}, true)",
    "measure_all": "MEASURE({name}, {element}, false)",
    **{
        f"emit_{form}_{index}": f"EMIT({{name}}, {{element}}, {listed}, {INDICES[index]})"
        for form, listed in (("list", "true"), ("all", "false"))
        for index in INDICES
    },
}
"""The line that makes a kernel, by what it does."""


def selection_kernel(form: str, dtype: str) -> str:
    """The name of a kernel for elements of a dtype.

    Examples
    --------
    >>> selection_kernel("feed_histogram", "float32")
    'feed_histogram_float32'
    """
    return f"{form}_{dtype}"


def selection_kernel_names() -> tuple[str, ...]:
    """All selection kernels that there are, without those of error feedback.

    Examples
    --------
    >>> len(selection_kernel_names())
    40
    """
    return tuple(selection_kernel(form, dtype) for form in FORMS for dtype in KEY_BITS)


def selection_source(names: Iterable[str]) -> str:
    """CUDA source with these kernels, of `selection_kernel_names` and of `FEEDBACK_LINES`.

    Raises
    ------
    UsageError
        There is no such kernel.

    Examples
    --------
    >>> selection_source(["gather_float16"]).splitlines()[-1]
    'GATHER(gather_float16, Half, Nothing<Half>{})'
    """
    return "\n".join([_template(), *(_line(name) for name in names), ""])


def _line(name: str) -> str:
    if name in FEEDBACK_LINES:
        return FEEDBACK_LINES[name]
    form, _, dtype = name.rpartition("_")
    if form not in FORMS or dtype not in KEY_BITS:
        raise UsageError(
            f"there is no selection kernel {name!r}; use one of {', '.join(selection_kernel_names())}"
        )
    return FORMS[form].format(name=name, element=ELEMENTS[dtype])


@lru_cache(maxsize=1)
def _template() -> str:
    folder = files("collectives.kernels")
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in PARTS)

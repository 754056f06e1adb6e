"""Generate the CUDA source of the kernels: a template, and a line for each (dtype, operation) that is requested.

The templates (``arithmetic.cu``, and ``join.cu``, ``forest.cu`` or those of the selection) include no header, so any
NVRTC compiles them: CUDA 12 for compute capability 7.0 and newer, CUDA 13 from 7.5. A residual accepts gradients of
every dtype that fits into its own without rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from importlib.resources import files
from itertools import product

from topoplan.errors import UsageError

ELEMENTS = {
    "bool": "Truth",
    "int8": "signed char",
    "int16": "short",
    "int32": "int",
    "int64": "long long",
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "uint32": "unsigned int",
    "uint64": "unsigned long long",
    "float16": "Half",
    "bfloat16": "Bfloat16",
    "float32": "float",
    "float64": "double",
    "complex64": "Complex<float>",
    "complex128": "Complex<double>",
}
"""C++ type of each dtype, by numpy's name."""

INDICES = {"int32": "int", "int64": "long long"}
"""C++ type of the dtypes of indices."""

BYTES = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long", 16: "Bytes16"}
"""C++ type of elements that are only copied, by their size."""

OPERATIONS = {"sum": "Sum", "avg": "Sum", "prod": "Prod", "min": "Min", "max": "Max"}

SWITCH_INTEGERS = ("int32", "int64", "uint32", "uint64")
"""Integers that a switch adds or compares."""

SWITCH_FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
"""Types that a switch only adds, in an order of its own."""


def join_kernel(op: str | None, dtype: str, itemsize: int) -> str:
    """Return the name of the kernel that joins with an operation and copies; None only copies.

    >>> join_kernel("avg", "float16", 2), join_kernel("sum", "int8", 1), join_kernel(None, "complex64", 8)
    ('join_sum_float16', 'join_sum_uint8', 'copy_8')
    """
    if op is None:
        return f"copy_{itemsize}"
    kind = OPERATIONS[op].lower()
    # integers wrap around, so a sign changes nothing in sums and products
    return f"join_{kind}_{f'u{dtype}' if dtype.startswith('int') and kind in ('sum', 'prod') else dtype}"


def divide_kernel(dtype: str) -> str:
    """Return the name of the kernel that turns sums into averages."""
    return f"divide_{dtype}"


def kernel_names() -> tuple[str, ...]:
    """Return the names of all kernels that join, divide or copy.

    >>> len(kernel_names())
    65
    """
    joins = {
        join_kernel(op, dtype, 0)
        for dtype in ELEMENTS
        for op in ("sum", "prod", "min", "max")
        if not (dtype == "bool" and op in ("sum", "prod"))
        and not (dtype.startswith("complex") and op in ("min", "max"))
    }
    divides = [divide_kernel(dtype) for dtype in ELEMENTS if dtype != "bool"]
    return (*sorted(joins), *divides, *(join_kernel(None, "", itemsize) for itemsize in BYTES))


def kernel_source(names: Iterable[str]) -> str:
    """Return CUDA source with these kernels; UsageError for an unknown name.

    >>> kernel_source(["join_max_float32"]).splitlines()[-1]
    'JOIN(join_max_float32, float, Max)'
    """
    return "\n".join([_read_templates("join.cu"), *(_kernel_line(name) for name in names), ""])


def switch_adds(op: str | None, dtype: str, *, exact: bool) -> bool:
    """Return whether a switch can do a reduction; an exact one only if its order does not show.

    >>> switch_adds("max", "int64", exact=True), switch_adds("sum", "float32", exact=True)
    (True, False)
    >>> switch_adds("avg", "float32", exact=False), switch_adds("max", "float32", exact=False)
    (True, False)
    """
    if op is None or op == "prod":
        return False
    return dtype in SWITCH_INTEGERS or (not exact and dtype in SWITCH_FLOATS and op in ("sum", "avg"))


def forest_kernel(
    op: str | None, dtype: str, itemsize: int, *, averages: bool = False, kind: str = "forest"
) -> str:
    """Return the name of the kernel that runs a rank's whole part in a collective.

    ``op`` None only copies. ``averages`` says that the kernel divides averages of this type. ``kind`` is "forest" along
    trees, "switch" if a switch takes part, "small" if every rank sends to every other.

    >>> forest_kernel("avg", "float32", 4, averages=True), forest_kernel(None, "complex64", 8)
    ('forest_avg_float32', 'forest_copy_8')
    """
    if averages and op == "avg":
        return f"{kind}_avg_{dtype}"
    return f"{kind}_{join_kernel(op, dtype, itemsize).removeprefix('join_')}"


def forest_kernel_names() -> tuple[str, ...]:
    """Return the names of all kernels of `forest_kernel`.

    >>> names = forest_kernel_names()
    >>> len(names), names[0], names[-1]
    (160, 'forest_max_bfloat16', 'switch_avg_complex128')
    """
    kernels = [name.removeprefix("join_") for name in kernel_names() if not name.startswith("divide_")]
    averages = [f"avg_{dtype}" for dtype in ELEMENTS if dtype in ("float32", "float64")]
    averages += [f"avg_{dtype}" for dtype in ELEMENTS if dtype.startswith("complex")]
    return tuple(
        f"{kind}_{rest}"
        for kind in ("forest", "small", "switch")
        for rest in (*kernels, *averages)
        if kind != "small" or not rest.startswith("copy")
    )


TRY_PEERS, TELL_CALL = "try_peers", "tell_call"
"""The kernels of ``peers.cu``: they test stores and flags between GPUs, and tell the other ranks of a call."""


def forest_source(names: Iterable[str]) -> str:
    """Return CUDA source with these kernels, of `forest_kernel` or ``peers.cu``; UsageError for an unknown name.

    It is for compute capability 9.0 if a switch takes part.

    >>> forest_source(["forest_avg_float32"]).splitlines()[-1]
    'FOREST(forest_avg_float32, float, Sum, Average)'
    """
    lines, templates = [], ["forest.cu"]
    for name in names:
        if name in (TRY_PEERS, TELL_CALL):
            templates = ["forest.cu", "peers.cu"]
            continue
        kind, _, rest = name.partition("_")
        op, _, dtype = rest.partition("_")
        join = _kernel_line(rest if op == "copy" else f"join_{op}_{dtype}")
        _, element, operation = join.removesuffix(")").split(", ")
        lines.append(
            f"{kind.upper()}({name}, {element}, {operation}, {'Average' if op == 'avg' else 'AsItIs'})"
        )
        if kind == "switch":
            templates = ["forest.cu", "switch.cu"]
    return "\n".join([_read_templates(*templates), *lines, ""])


def _kernel_line(name: str) -> str:
    kind, _, rest = name.partition("_")
    op, _, dtype = rest.partition("_")
    if kind == "copy" and rest.isdigit() and int(rest) in BYTES:
        return f"JOIN({name}, {BYTES[int(rest)]}, Copy)"
    if kind == "divide" and rest in ELEMENTS:
        return f"DIVIDE({name}, {ELEMENTS[rest]})"
    if kind == "join" and op in OPERATIONS and dtype in ELEMENTS:
        return f"JOIN({name}, {ELEMENTS[dtype]}, {OPERATIONS[op]})"
    raise UsageError(f"kernel {name!r} is unknown; use one of {', '.join(kernel_names())}")


@lru_cache(maxsize=8)
def _read_templates(*parts: str) -> str:
    folder = files("collectives.tables.kernels")
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in ("arithmetic.cu", *parts))


GRADIENT_DTYPES = {
    "float32": ("float32", "float16", "bfloat16"),
    "float64": ("float64", "float32", "float16", "bfloat16"),
}
"""Dtypes of gradients for each dtype of a residual."""

FEEDBACK_FORMS = {"histogram": "FEEDBACK_HISTOGRAM", "gather": "FEEDBACK_GATHER", "take_back": "TAKE_BACK"}
"""Macro of each kernel that takes a gradient."""

FEEDBACK_KINDS = {"feedback": "false", "momentum": "true"}
"""Whether a velocity takes in the gradient."""


def feedback_form(kind: str, form: str, given: str) -> str:
    """Return the name of a kernel with gradients of this dtype, without the residual's dtype."""
    return f"{kind}_{form}_{given}"


def entries_form(what: str, index: str) -> str:
    """Return the name of a kernel that adds to entries or zeroes them, without the array's dtype."""
    return f"{what}_entries_{index}"


def _feedback_lines() -> dict[str, str]:
    lines = {}
    for kind, form, dtype in product(FEEDBACK_KINDS, FEEDBACK_FORMS, GRADIENT_DTYPES):
        for given in GRADIENT_DTYPES[dtype]:
            name = f"{feedback_form(kind, form, given)}_{dtype}"
            lines[name] = (
                f"{FEEDBACK_FORMS[form]}({name}, {ELEMENTS[dtype]}, {ELEMENTS[given]}, {FEEDBACK_KINDS[kind]})"
            )
    for what, index, dtype in product(("add", "zero"), INDICES, GRADIENT_DTYPES):
        name = f"{entries_form(what, index)}_{dtype}"
        lines[name] = f"{what.upper()}_ENTRIES({name}, {ELEMENTS[dtype]}, {INDICES[index]})"
    return lines


FEEDBACK_LINES = _feedback_lines()
"""Source line of each kernel."""

SELECTION_TEMPLATES = ("select.cu", "gather.cu", "emit.cu", "feedback.cu", "entries.cu")
"""Files of the template, in order."""

KEY_BITS = {"bfloat16": (15, 7), "float16": (15, 10), "float32": (31, 23), "float64": (63, 52)}
"""Bits of a float without its sign, and of its mantissa."""

SELECTION_FORMS = {
    "histogram": "HISTOGRAM({name}, {element}, Nothing<{element}>{{}})",
    "gather": "GATHER({name}, {element}, Nothing<{element}>{{}})",
    "measure_list": "MEASURE({name}, {element}, true)",
    "measure_all": "MEASURE({name}, {element}, false)",
    **{
        f"emit_{form}_{index}": f"EMIT({{name}}, {{element}}, {listed}, {INDICES[index]})"
        for form, listed in (("list", "true"), ("all", "false"))
        for index in INDICES
    },
}
"""Source line of a kernel, by its form."""


def selection_kernel(form: str, dtype: str) -> str:
    """Return the name of a kernel for elements of a dtype."""
    return f"{form}_{dtype}"


def selection_kernel_names() -> tuple[str, ...]:
    """Return the names of all selection kernels, without those of error feedback.

    >>> len(selection_kernel_names())
    32
    """
    return tuple(selection_kernel(form, dtype) for form in SELECTION_FORMS for dtype in KEY_BITS)


def selection_source(names: Iterable[str]) -> str:
    """Return CUDA source with kernels of `selection_kernel_names` and `FEEDBACK_LINES`; UsageError for an unknown name.

    >>> selection_source(["gather_float16"]).splitlines()[-1]
    'GATHER(gather_float16, Half, Nothing<Half>{})'
    """
    return "\n".join([_read_templates(*SELECTION_TEMPLATES), *(_selection_line(name) for name in names), ""])


def _selection_line(name: str) -> str:
    if name in FEEDBACK_LINES:
        return FEEDBACK_LINES[name]
    form, _, dtype = name.rpartition("_")
    if form not in SELECTION_FORMS or dtype not in KEY_BITS:
        raise UsageError(
            f"selection kernel {name!r} is unknown; use one of {', '.join(selection_kernel_names())}"
        )
    return SELECTION_FORMS[form].format(name=name, element=ELEMENTS[dtype])

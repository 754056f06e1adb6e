"""Write the values of plan files on one line, and read them back with their types checked.

Every reader takes the value and its name in messages; a value of another type raises PlanError.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import cast

from topoplan.errors import PlanError, TopologyError
from topoplan.units import SURROGATES, nearest_float

_RATIONAL = re.compile(r"[+-]?[0-9]{1,1000}(?:/[0-9]{1,1000})?")
"""No exponents: ``1e999999999`` is short to write and too long to compute with."""


_ONE_LINE = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def compact(value: object) -> str:
    """Return JSON on one line, without escapes of characters."""
    return _ONE_LINE.encode(value)


def finite(value: float) -> float | None:
    """Return the number for JSON, which has no infinity: None is the rate of a plan that moves nothing."""
    return value if math.isfinite(value) else None


def read_object(item: object, where: str) -> dict[str, object]:
    if not isinstance(item, dict):
        raise PlanError(f"{where} must be an object, not {type(item).__name__}")
    return cast("dict[str, object]", item)


def read_list(item: object, where: str) -> list[object]:
    if not isinstance(item, list):
        raise PlanError(f"{where} must be a list, not {type(item).__name__}")
    return cast("list[object]", item)


def read_text(item: object, where: str) -> str:
    """Read a text that a file can hold."""
    if not isinstance(item, str) or SURROGATES.search(item):
        raise PlanError(f"{where} must be a text, not {item!r}"[:200])
    return item


def read_texts(item: object, where: str) -> tuple[str, ...]:
    return tuple(read_text(name, where) for name in read_list(item, where))


def read_whole(item: object, where: str) -> int:
    if isinstance(item, bool) or not isinstance(item, int):
        raise PlanError(f"{where} must be a whole number, not {item!r}"[:200])
    return item


def read_bytes(item: object, where: str) -> int:
    if isinstance(item, bool) or not isinstance(item, int) or item < 0:
        raise PlanError(f"{where} must be a whole number of bytes, zero or more, not {item!r}"[:200])
    return item


def read_number(item: object, where: str) -> float:
    """Read a number of zero or more; null is infinity, as `finite` writes it."""
    if item is None:
        return math.inf
    if isinstance(item, bool) or not isinstance(item, (int, float)) or not item >= 0:
        raise PlanError(f"{where} must be a number of zero or more, not {item!r}"[:200])
    return nearest_float(Fraction(item)) if isinstance(item, int) else item


def read_fraction(item: object, where: str) -> Fraction:
    """Read an exact rational number, written as text."""
    if isinstance(item, str) and _RATIONAL.fullmatch(item):
        try:
            return Fraction(item)
        except ZeroDivisionError:
            pass
    raise PlanError(f'{where} must be a rational number in quotes such as "1/6", not {item!r}'[:200])


def parse_object(text: str) -> dict[str, object]:
    """Read the JSON object of a plan file of any format."""
    from topoplan.machine.topology_json import decode_json

    try:
        value = decode_json(text, "the plan")
    except TopologyError as error:
        raise PlanError(str(error)) from None
    if not isinstance(value, dict):
        raise PlanError(f"a plan file must be a JSON object, not {type(value).__name__}")
    return value


def check_known(value: Mapping[str, object], known: Collection[str], where: str) -> None:
    """Raise PlanError, with the nearest known key, for an object with a key that the format does not have."""
    unknown = next((key for key in value if key not in known), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it may have {', '.join(known)}"
        raise PlanError(f"{where}: key {unknown[:60]!r} is unknown; {hint}")


def check_format(value: dict[str, object], expected: str) -> None:
    """Raise PlanError for an object of another format or version, or for no object."""
    value = read_object(value, "a plan file's object")
    if value.get("format") != expected:
        raise PlanError(
            f"format {value.get('format')!r} is not {expected!r}; make the plan again with topoplan plan"
        )

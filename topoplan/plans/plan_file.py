"""A plan file of either kind: one plan, or plans by size, told apart by the format that the file states."""

from __future__ import annotations

import os
from pathlib import Path

from topoplan.errors import UsageError
from topoplan.plans.plan import Plan
from topoplan.plans.plan_json import parse_object, read_plan
from topoplan.plans.size_plans import SizePlans
from topoplan.plans.size_plans_json import FORMAT as BY_SIZE
from topoplan.plans.size_plans_json import read_size_plans


def parse_plan_file(text: str) -> Plan | SizePlans:
    """Read the text of a plan file; errors as `Plan.from_json` and `SizePlans.from_json`."""
    value = parse_object(text)
    return read_size_plans(value) if value.get("format") == BY_SIZE else read_plan(value)


def load_plan(path: str | os.PathLike[str]) -> Plan | SizePlans:
    """Read a plan file; its claims are not trusted (see `topoplan.verify`).

    Parameters
    ----------
    path : str or path
        A file that ``topoplan plan -o`` wrote.

    Returns
    -------
    Plan or SizePlans
        Plans by size where the file was made with ``--sizes``.

    Raises
    ------
    UsageError
        The file cannot be read.
    PlanError
        It is no plan file.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{os.fspath(path)} cannot be read: {error.strerror}; give a plan file, made by topoplan plan -o"
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"{os.fspath(path)} is binary, not text; give a plan file") from None
    return parse_plan_file(text)

"""Which engine a file is for, told by its content, and its check."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from topoplan.interpreters.msccl.algorithm_file import read_algorithm_file
from topoplan.interpreters.msccl.check import check_msccl
from topoplan.interpreters.mscclpp.check import check_execution_plan
from topoplan.interpreters.mscclpp.plan_file import read_plan_file
from topoplan.interpreters.verdict import Verdict

MSCCLPP = "mscclpp"
MSCCL = "msccl"
ENGINES = {MSCCLPP: "execution plan of MSCCL++", MSCCL: "algorithm of MSCCL"}
"""What a file of each engine is called."""

_OURS = re.compile(r'"format"\s*:\s*"topoplan\.')


def engine_of(text: str) -> str | None:
    """The engine that a text is for; None where it is for none.

    Examples
    --------
    >>> engine_of('{"name": "mine", "collective": "allreduce", "gpus": []}')
    'mscclpp'
    >>> engine_of('{"format": "topoplan.plan/1", "gpus": []}')
    """
    if re.search(r"<algo\s", text[:10_000]) and text.lstrip("\ufeff \t\r\n").startswith("<"):
        return MSCCL
    if not text.lstrip().startswith("{") or _OURS.search(text):
        return None
    if re.search(r'"gpus"\s*:', text) and re.search(r'"(collective|protocol|inplace)"\s*:', text):
        return MSCCLPP
    return None


def read_engine_file(text: str, engine: str) -> Callable[[], Verdict]:
    """The check of a file of an engine, which raises PlanError where the file is wrong.

    Raises
    ------
    PlanError
        The file cannot be read.
    """
    if engine == MSCCL:
        return partial(check_msccl, read_algorithm_file(text))
    return partial(check_execution_plan, read_plan_file(text))

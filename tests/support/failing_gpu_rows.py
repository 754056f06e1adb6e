"""Rows of a table like `gpu_report`'s that end in every way a process can end: ``failing_gpu_rows.py [-o FILE]``.

No GPU is looked for: what is tested is the table.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests import gpu_report
from tests.gpu_report import CannotRun, Missed, Row


def fine() -> dict[str, Any]:
    print("a warning of some library")
    return {"text": "all is well\non two lines", "rate": 12.5}


def leaves() -> str:
    os._exit(3)


def crashes() -> str:
    os.kill(os.getpid(), signal.SIGSEGV)
    return "never"


def hangs() -> str:
    """A process that it has started waits with it."""
    waiting = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(os.environ["FAILING_ROWS_FOLDER"], "waiting").write_text(str(waiting.pid))
    time.sleep(60)
    return "never"


def noise() -> str:
    print('{"verdict": "ok", "text": "not a result", "figures": {}}')
    sys.stdout.flush()
    os._exit(0)


def crashes_behind_its_result() -> str:
    atexit.register(os.kill, os.getpid(), signal.SIGABRT)
    return "well so far"


def talks_behind_its_result() -> str:
    atexit.register(print, "a library says goodbye")
    return "well"


def raises() -> str:
    raise AssertionError("float32 differs")


def misses() -> str:
    raise Missed("61% of 80%")


def gives_up() -> str:
    raise CannotRun("NCCL refuses")


def saved_before() -> str:
    """What the file holds while this row runs."""
    found = json.loads(Path(os.environ["FAILING_ROWS_FOLDER"], "out.json").read_text())
    return " ".join(row["name"] for row in found["rows"])


ROWS = (
    Row("fine", fine),
    Row("leaves", leaves),
    Row("crashes", crashes),
    Row("hangs", hangs, gpu_report.STACKS_BEFORE + 1.0),
    Row("noise", noise),
    Row("crashes-late", crashes_behind_its_result),
    Row("talks-late", talks_behind_its_result),
    Row("raises", raises),
    Row("misses", misses),
    Row("gives-up", gives_up),
    Row("unable", fine, needs=(lambda facts: "no GPU that suits",)),
    Row("saved-before", saved_before),
)


if __name__ == "__main__":
    sys.exit(gpu_report.main(rows=ROWS, command=(sys.executable, __file__)))

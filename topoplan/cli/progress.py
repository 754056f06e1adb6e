"""Progress on a terminal: one line that moves while something takes more than a second, and is gone afterwards.

The line is drawn by a thread of its own, so that the clock runs on while a solver says nothing. Only a terminal
sees it; what is computed does not depend on it.
"""

from __future__ import annotations

import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUIET_SECONDS = 1.0
"""What takes less shows nothing."""

_REDRAWN_SECONDS = 0.1
_WIDTH = 24
_COUNT = re.compile(r"\b(\d+) of (\d+)\b")


def progress_bar(text: str, seconds: float) -> str:
    """The line that is shown: a bar, the time that has passed, and what is being done.

    A text that counts, such as ``class 3 of 51``, fills the bar as far; any other moves a mark along it.

    Examples
    --------
    >>> progress_bar("class 3 of 12: GPUs 0, 1", 5)
    '[######                  ]  5 s  class 3 of 12: GPUs 0, 1'
    >>> progress_bar("packing: 8 trees of 16 GPUs", 2.3)
    '[                   ###  ]  2 s  packing: 8 trees of 16 GPUs'
    """
    counted = _COUNT.search(text)
    done, total = (int(number) for number in counted.groups()) if counted else (0, 0)
    if 0 < done <= total:
        bar = ("#" * (_WIDTH * done // total)).ljust(_WIDTH)
    else:
        # The mark goes to the right end and back.
        travel = _WIDTH - 3
        step = int(seconds / _REDRAWN_SECONDS) % (2 * travel)
        bar = (" " * min(step, 2 * travel - step) + "###").ljust(_WIDTH)
    return f"[{bar}] {int(seconds):2d} s  {text}"


@contextmanager
def progress_line(doing: str) -> Iterator[Callable[[str], None] | None]:
    """A callback that takes what is being done, and shows it from the second second on.

    Parameters
    ----------
    doing : str
        Shown until the callback is first called.

    Yields
    ------
    callable or None
        None where stderr is no terminal; then nothing is shown.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    latest = [doing]
    over = threading.Event()
    line = threading.Thread(target=_show, args=(latest, over), daemon=True)
    line.start()

    def tell(text: str) -> None:
        latest[0] = text

    try:
        yield tell
    finally:
        over.set()
        line.join()


def _show(latest: list[str], over: threading.Event) -> None:
    started = time.monotonic()
    drawn = False
    while not over.wait(_REDRAWN_SECONDS if drawn else QUIET_SECONDS):
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r\x1b[K{progress_bar(latest[0], time.monotonic() - started)[:width]}")
        sys.stderr.flush()
        drawn = True
    if drawn:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()

"""The progress line: seen on a terminal only, only after a second, and gone at the end."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

from topoplan.cli.output import progress_bar, progress_line

WIPED = "\r\x1b[K"


def on_a_terminal(body: str) -> str:
    """What a process writes to a terminal that is its stderr while it runs some lines inside a progress line."""
    main, terminal = pty.openpty()
    lines = [
        "import time",
        "from topoplan.cli.output import progress_line",
        "with progress_line('planning') as tell:",
    ]
    code = "\n".join([*lines, *(f"    {line}" for line in body.splitlines())])
    with subprocess.Popen([sys.executable, "-c", code], stderr=terminal) as process:
        os.close(terminal)
        seen = b""
        while True:
            try:
                part = os.read(main, 4096)
            except OSError:
                break
            if not part:
                break
            seen += part
    os.close(main)
    assert process.returncode == 0, seen
    return seen.decode()


def test_after_a_second_the_line_shows_what_is_done_and_is_wiped() -> None:
    """First the name of the work, then what the callback was told last; nothing is left."""
    seen = on_a_terminal("time.sleep(1.3)\ntell('class 3 of 12')\ntime.sleep(0.4)")
    assert seen.index("planning") < seen.index("[######                  ]  1 s  class 3 of 12")
    assert seen.endswith(WIPED)


def test_what_is_done_at_once_writes_nothing() -> None:
    """No flicker for short work, even if it reports."""
    assert on_a_terminal("tell('class 3 of 12')") == ""


def test_the_line_is_wiped_before_an_error_leaves() -> None:
    """An error inside passes through, and its message starts on an empty line."""
    seen = on_a_terminal("time.sleep(1.2)\nraise SystemExit(0)")
    assert "planning" in seen
    assert seen.endswith(WIPED)


def test_without_a_terminal_there_is_no_callback() -> None:
    """Under pytest stderr is no terminal."""
    with progress_line("planning") as tell:
        assert tell is None


def test_a_bar_is_full_when_all_is_counted_and_never_longer_than_its_frame() -> None:
    """Every text and time gives a bar of the same width."""
    assert progress_bar("size 4 of 4", 1).startswith("[########################]")
    for text in ("size 0 of 4", "size 5 of 4", "packing"):
        for tenths in range(100):
            assert progress_bar(text, tenths / 10)[25] == "]"

"""Files that commands write: refused before the work begins, then written whole or not at all."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from topoplan.errors import UsageError


def check_target(path: str | None, what: str) -> None:
    """Refuse a place where no file can be written, before time is spent on what should go there.

    Parameters
    ----------
    path : str or None
        None where nothing is to be written, ``-`` for stdout.
    what : str
        The option, for the message.

    Raises
    ------
    UsageError
        The name is empty, or a folder; its folder is not there; either is not writable.
    """
    if path in (None, "-"):
        return
    target = Path(path)
    if not path:
        raise UsageError(f"the file name after {what} is empty; name a file")
    if target.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder; name a file in it")
    if not target.parent.is_dir():
        raise UsageError(
            f"cannot write {path}: there is no folder {target.parent}; make it, or choose another"
        )
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise UsageError(f"cannot write {path}: permission denied; choose another place for it")


def write_whole(path: str, text: str) -> None:
    """Write a file aside and rename it into place, so that nobody ever sees half of it.

    What is there already keeps its permissions; a link is followed; a device or a pipe is written to.

    Raises
    ------
    UsageError
        It cannot be written; an older file is left as it was.
    """
    target = Path(path)
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
            return
        target = Path(os.path.realpath(path))
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
        handle, aside = tempfile.mkstemp(prefix=".", suffix=".part", dir=target.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(aside, mode)
            os.replace(aside, target)
        except BaseException:
            os.unlink(aside)
            raise
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another place for it") from None


def check_plot(path: str | None) -> None:
    """Refuse a figure that could not be written: as `check_target`, or its suffix names no format."""
    if path is None:
        return
    check_target(path, "--plot")
    # The first use on a machine logs that fonts are being listed; nothing belongs on stderr.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from topoplan.plot.canvas import new_figure

    known = new_figure(1, 1).canvas.get_supported_filetypes()
    if Path(path).suffix.lower().lstrip(".") not in known:
        raise UsageError(
            f"cannot draw {path}: its suffix {Path(path).suffix!r} names no figure format; use .png, .svg or .pdf"
        )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

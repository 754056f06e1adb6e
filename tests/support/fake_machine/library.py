"""Builds the fake NVML with the system's C compiler, once for all tests of a session."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

SONAME = "libnvidia-ml.so.1"
SOURCES = Path(__file__).parent
VARIANTS = {"new": (), "old": ("-DFAKE_NVML_OLD_DRIVER",)}


def compiler() -> str | None:
    """Path of ``cc``; None where there is none."""
    return shutil.which("cc")


def build_libraries(folder: Path) -> Path:
    """Make ``<variant>/libnvidia-ml.so.1`` below a folder, unless it is there; safe beside other processes.

    ``none`` holds an empty file of that name, so that a machine without a driver is one also where tests run on a
    machine that has one.

    Raises
    ------
    subprocess.CalledProcessError
        The compiler refuses.
    """
    for variant, flags in VARIANTS.items():
        library = folder / variant / SONAME
        if not library.exists():
            library.parent.mkdir(parents=True, exist_ok=True)
            fresh = library.with_suffix(f".{os.getpid()}")
            warnings = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-O1")
            shape = ("-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,-soname,{SONAME}")
            sources = sorted(map(str, SOURCES.glob("*.c")))
            command = [compiler() or "cc", *warnings, *shape, *flags, "-o", str(fresh), *sources]
            subprocess.run(command, check=True)
            fresh.replace(library)
    empty = folder / "none" / SONAME
    empty.parent.mkdir(parents=True, exist_ok=True)
    empty.touch()
    return folder

"""Keep files that only this user writes: the directories of jobs, and caches, that of machine code among them.

A job directory carries the process id and the start time of its owner. A job that begins removes the directories of
owners that have ended, such as those of processes that were killed. It judges only owners that it can see: those of
this boot, host and process namespace.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import secrets
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from topoplan.errors import UsageError

Loop = TypeVar("Loop", bound=Callable[..., Any])

_taking_folder = threading.Lock()

SHARED_MEMORY = Path("/dev/shm")
"""Where Linux shows memory as files."""

_JOB = re.compile(r"[a-z]+-(?P<pid>\d+)-(?P<born>\d+)-(?P<place>[0-9a-f]{8})-[0-9a-f]{6}")


def private_directory(path: Path) -> Path:
    """Return a directory that only this user writes to, created with mode 700 and its parents if it is missing.

    PermissionError for a symbolic link, for another user's directory, and if others may write to it.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        _check_owner(path, path.lstat(), stat.S_IFDIR)
    except FileNotFoundError:
        for parent in reversed([one for one in path.parents if not one.exists()]):
            parent.mkdir(mode=0o700, exist_ok=True)
        return private_directory(path)
    return path


def open_private(path: Path) -> IO[bytes]:
    """Return a file of a private directory, opened to read; PermissionError as `private_directory`, else OSError."""
    _check_owner(path.parent, path.parent.lstat(), stat.S_IFDIR)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_owner(path, os.fstat(descriptor), stat.S_IFREG)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def write_private(path: Path, data: bytes) -> None:
    """Write a file of mode 600, complete or not at all, into a private directory; OSError as there."""
    handle, temporary = tempfile.mkstemp(dir=private_directory(path.parent), prefix=path.stem, suffix=".tmp")
    try:
        with open(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def cache_directory() -> Path | None:
    """Return this user's folder for caches, which may be missing; None without a home folder."""
    folders = (Path(os.environ.get("XDG_CACHE_HOME", "")), Path(os.path.expanduser("~/.cache")))
    # XDG: a relative folder does not count.
    folder = next((folder for folder in folders if folder.is_absolute()), None)
    return folder / "topoplan" if folder else None


def machine_code(loop: Loop) -> Loop:
    """Return a loop as machine code, which numba compiles at its first call, and keeps in `machine_code_folder`."""
    # It takes half a second to load.
    import numba

    config: Any = numba.config
    folder = machine_code_folder()
    with _taking_folder:
        named, config.CACHE_DIR = config.CACHE_DIR, folder
        try:
            made = numba.njit(cache=bool(folder), nogil=True)(loop)
            if folder:
                private_directory(Path(str(made.stats.cache_path)))
        except (RuntimeError, OSError):  # it cannot be written, or others may write to it
            made = numba.njit(nogil=True)(loop)
        finally:
            config.CACHE_DIR = named
        return cast(Loop, made)


@lru_cache(maxsize=1)
def machine_code_folder() -> str:
    """Return the folder of machine code; empty if others may write to it.

    It is that of ``NUMBA_CACHE_DIR``, else one in the user's cache. Its files are unpickled and run, and the package's
    own folder may be one that several users write to.
    """
    import numba

    user = cache_directory()
    named = str(cast(Any, numba.config).CACHE_DIR or (user / "compiled" if user else ""))
    with suppress(OSError):
        return str(private_directory(Path(named))) if named else ""
    return ""


@contextmanager
def job_directory(kind: str, base: Path | None = None) -> Iterator[Path]:
    """Yield a new directory of mode 700 for the files of a job, and remove it with them.

    It lies in `base`, by default ``XDG_RUNTIME_DIR`` if that is this user's alone, else the temporary folder. What
    owners left there that have ended is removed first. `kind` is a word in lower case. UsageError if the folder cannot
    be written, or others could replace the directory.
    """
    folder = _runtime_folder() if base is None else _user_folder(base)
    name = f"{kind}-{os.getpid()}-{process_start(os.getpid())}-{_process_namespace()}-{secrets.token_hex(3)}"
    try:
        _check_shared(folder.parent)
        _create_inside(folder, name)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot hold the files of a job: {error.strerror}; set TMPDIR to a folder of yours"
        ) from error
    try:
        yield folder / name
    finally:
        shutil.rmtree(folder / name, ignore_errors=True)
        with suppress(OSError):  # other jobs use it
            folder.rmdir()


def _create_inside(folder: Path, name: str) -> None:
    while True:
        private_directory(folder)
        for one in (folder, _user_folder(SHARED_MEMORY)):
            remove_left_over(one)
        with suppress(FileNotFoundError):  # the last job before this one has just removed it
            (folder / name).mkdir(mode=0o700)
            return


def remove_left_over(folder: Path) -> None:
    """Remove the job directories of owners that have ended from a folder of this user, if it is there."""
    try:
        found = list(private_directory(folder).iterdir()) if folder.is_dir() else []
    except OSError:  # it is not this user's
        return
    for path in found:
        job = _JOB.fullmatch(path.name)
        if job is None or job["place"] != _process_namespace():
            continue
        if process_start(int(job["pid"])) != int(job["born"]):
            shutil.rmtree(path, ignore_errors=True)


def process_fields(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on; empty if the process does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def process_start(pid: int) -> int:
    """Return the start time of a process, in clock ticks since boot; -1 if it has ended, 0 if unknown."""
    if fields := process_fields(pid):
        return -1 if fields[0] in "ZX" else int(fields[19])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return -1
    except OSError:
        pass
    return 0


def _process_namespace() -> str:
    """Return a digest of what processes share that see each other by their ids."""
    place = platform.node()
    with suppress(OSError):
        place += Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(place.encode()).hexdigest()[:8]


def _runtime_folder() -> Path:
    """Return the folder of this user's job directories."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    with suppress(OSError):
        if runtime.is_absolute() and not runtime.lstat().st_mode & 0o077:
            _check_owner(runtime, runtime.lstat(), stat.S_IFDIR)
            return runtime / "topoplan"
    return _user_folder(Path(tempfile.gettempdir()))


def _user_folder(base: Path) -> Path:
    """Return this user's folder in one that all users write to."""
    return base / f"topoplan-{os.geteuid()}"


def _check_owner(path: Path, found: os.stat_result, kind: int) -> None:
    """Raise PermissionError unless this is a directory or file that only this user writes."""
    what = "a directory" if kind == stat.S_IFDIR else "a file"
    if stat.S_IFMT(found.st_mode) != kind:
        got = f"{stat.filemode(found.st_mode)}; remove it"
    elif found.st_uid != os.geteuid():
        got = f"one of user {found.st_uid}; remove it"
    elif found.st_mode & 0o022:
        got = f"mode {stat.S_IMODE(found.st_mode):o}; chmod go-w {path}"
    else:
        return
    raise PermissionError(
        errno.EPERM, f"{path} must be {what} that only user {os.geteuid()} writes to, got {got}"
    )


def _check_shared(folder: Path) -> None:
    """Raise PermissionError if other users may rename what this one creates in a folder."""
    mode = folder.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise PermissionError(errno.EPERM, f"all users may rename files in {folder}, which has no sticky bit")

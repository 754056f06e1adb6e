"""Files that only this user writes, and directories that dead jobs leave."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from topoplan import private_files
from topoplan.errors import UsageError
from topoplan.private_files import (
    job_directory,
    open_private,
    private_directory,
    process_start,
    write_private,
)

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of others")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_job_has_a_directory_of_its_own_and_leaves_nothing(temporary: Path) -> None:
    with job_directory("bench") as one, job_directory("bench") as other:
        assert one != other
        assert mode(one) == mode(one.parent) == 0o700
        (one / "plan.json").write_text("{}")
    assert list(temporary.iterdir()) == []


def test_the_runtime_folder_is_used_if_it_is_the_user_s_alone(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = temporary / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    with job_directory("bench") as folder:
        assert folder.parent == runtime / "topoplan"
    runtime.chmod(0o755)
    with job_directory("bench") as folder:
        assert folder.parent.parent == temporary
    (temporary / "link").symlink_to(runtime)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(temporary / "link"))
    with job_directory("bench") as folder:
        assert folder.parent.parent == temporary


def test_what_killed_jobs_left_in_shared_memory_is_removed_too(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_files, "SHARED_MEMORY", temporary / "shm")
    (temporary / "shm").mkdir()
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass
    with job_directory("mpi", temporary / "shm") as mine:
        left = mine.with_name(mine.name.replace(f"-{os.getpid()}-", f"-{dead.pid}-"))
        left.mkdir()
        with job_directory("bench"):
            assert list(mine.parent.iterdir()) == [mine]


def test_only_what_dead_owners_left_is_removed(temporary: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass
    with job_directory("chaos") as mine:
        folder, (kind, pid, born, place, token) = mine.parent, mine.name.split("-")
        names = {
            "dead": f"{kind}-{dead.pid}-{born}-{place}-{token}",
            "a later process": f"{kind}-{pid}-{int(born) - 1}-{place}-{token}",
            "alive": f"{kind}-{os.getppid()}-{process_start(os.getppid())}-{place}-{token}",
            "elsewhere": f"{kind}-{dead.pid}-{born}-{'0' * 8}-{token}",
            "not ours": f"{kind}-{dead.pid}",
        }
        for name in names.values():
            (folder / name).mkdir()
            (folder / name / "file").write_text("")
        target = temporary / "target"
        target.mkdir()
        (folder / names["dead"] / "link").symlink_to(target)
        (folder / f"bench-{dead.pid}-1-{place}-{token}").symlink_to(target)
        with job_directory("bench"):
            left = {path.name for path in folder.iterdir() if path.is_dir() and not path.is_symlink()}
        assert left - {mine.name} >= {names[name] for name in ("alive", "elsewhere", "not ours")}
        assert not left & {names["dead"], names["a later process"]}
        assert target.is_dir()
        for path in folder.iterdir():
            if path != mine:
                path.unlink() if path.is_symlink() else shutil.rmtree(path)


def wrong_directory(path: Path, kind: str) -> None:
    if kind == "link":
        (path.parent / "elsewhere").mkdir()
        path.symlink_to(path.parent / "elsewhere")
    elif kind == "file":
        path.write_text("kept")
    else:
        path.mkdir()
        path.chmod(0o770 if kind == "group" else 0o700)
        if kind == "owner":
            os.chown(path, 12345, -1)


KINDS = ["link", "file", "group", pytest.param("owner", marks=ROOT)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_of_others_is_refused_in_one_line(temporary: Path, kind: str) -> None:
    path = temporary / f"topoplan-{os.geteuid()}"
    wrong_directory(path, kind)
    with pytest.raises(UsageError) as refused, job_directory("bench"):
        raise AssertionError("it is used")
    assert "\n" not in str(refused.value)
    assert "must be a directory that only user" in str(refused.value)
    assert kind != "file" or path.read_text() == "kept"


def test_a_folder_in_which_all_users_rename_is_refused(temporary: Path) -> None:
    temporary.chmod(0o777)
    with pytest.raises(UsageError, match="no sticky bit"), job_directory("bench"):
        raise AssertionError("it is used")
    temporary.chmod(0o1777)
    with job_directory("bench"):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_others_is_neither_read_nor_written(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "cache"
    wrong_directory(folder, kind)
    real = folder.resolve()
    if kind != "file":
        (real / "code").write_text("code")
    with pytest.raises((PermissionError, NotADirectoryError)):
        open_private(folder / "code")
    with pytest.raises(PermissionError, match="must be a directory"):
        write_private(folder / "other", b"code")
    assert not (real / "other").exists()


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "group", pytest.param("owner", marks=ROOT)])
def test_a_file_of_others_in_a_cache_is_not_read(tmp_path: Path, kind: str) -> None:
    folder = private_directory(tmp_path / "cache")
    path = folder / "code"
    if kind == "link":
        (tmp_path / "code").write_text("code")
        path.symlink_to(tmp_path / "code")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.write_text("code")
        path.chmod(0o620 if kind == "group" else 0o600)
        if kind == "owner":
            os.chown(path, 12345, -1)
    with pytest.raises(OSError, match=r"must be a file|symbolic link|Too many levels"):
        open_private(path)
    if kind != "directory":
        write_private(path, b"own")
        with open_private(path) as file:
            assert (file.read(), mode(path)) == (b"own", 0o600)

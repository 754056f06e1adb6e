"""Unix sockets of the rendezvous: their mode, their backlog, and those of other users."""

from __future__ import annotations

import os
import socket
import stat
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from collectives.peers import address
from collectives.peers.address import connect, listen, parse_address
from topoplan.errors import BackendError

STRANGER = 12345

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of others")


def test_only_this_user_connects_to_a_path(tmp_path: Path) -> None:
    with listen(parse_address(f"unix:{tmp_path}/here")):
        assert stat.S_IMODE((tmp_path / "here").lstat().st_mode) == 0o600


def test_more_processes_connect_to_a_path_than_its_backlog_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "BACKLOG", 1)
    where = parse_address(f"unix:{tmp_path}/here")
    with listen(where) as listener, ThreadPoolExecutor(8) as pool:
        made = [pool.submit(connect, where, time.monotonic() + 20) for _ in range(8)]
        wait(made, 20, FIRST_COMPLETED)
        for one in [listener.accept()[0] for _ in made] + [one.result() for one in made]:
            one.close()


@as_root
def test_a_stale_socket_of_another_user_stays(tmp_path: Path) -> None:
    path = tmp_path / "here"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    os.chown(path, STRANGER, -1)
    with pytest.raises(PermissionError, match=f"it is a socket of user {STRANGER}"):
        listen(parse_address(f"unix:{path}"))
    assert path.lstat().st_uid == STRANGER


@as_root
def test_another_user_who_listens_at_a_path_is_not_believed(tmp_path: Path) -> None:
    folder = Path("/tmp") / f"topoplan-test-{os.getpid()}"  # that user enters none of pytest's
    folder.mkdir(mode=0o700)
    os.chown(folder, STRANGER, -1)
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.setuid(STRANGER)
        with socket.socket(socket.AF_UNIX) as impostor:
            impostor.bind(f"{folder}/here")
            impostor.listen()
            os.write(write, b"1")
            impostor.accept()[0].recv(1)
            os._exit(0)
    try:
        os.read(read, 1)
        with pytest.raises(BackendError, match=f"process {pid} of user {STRANGER} is at the other end"):
            connect(parse_address(f"unix:{folder}/here"), time.monotonic() + 5)
        os.waitpid(pid, 0)
    finally:
        os.close(read)
        os.close(write)
        (folder / "here").unlink()
        folder.rmdir()

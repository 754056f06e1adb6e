"""Namespaces without being root: a process that may build networks, and with which all of them vanish.

``unshare`` gives it a user, network, mount and process namespace of its own. It is the first process there, so its end
ends everything it has started, and the kernel takes back mounts, namespaces and cables.

A thread steps into a namespace and what it opens or starts there, a socket or a process, stays there. Needs rights over
the process's namespaces, which the sandbox gives without being root.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO

from topoplan.errors import ProbeError

UNSHARE = (
    *("unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork"),
    *("--kill-child", "--mount-proc"),
)

PRIVATE_RUN = ("mount", "-t", "tmpfs", "none", "/run")
"""``ip netns`` keeps its names under /run, which belongs to root."""

_TRIAL = f"""set -e
{" ".join(PRIVATE_RUN)}
ip netns add a
ip link add c0 netns a type veth peer name c0
tc qdisc add dev c0 root tbf rate 100mbit burst 32kb latency 50ms
"""


@lru_cache(maxsize=1)
def refusal() -> str:
    """Why no test bed can be built on this machine; empty if one can. Tried once in a process, in some 30 ms."""
    if sys.platform != "linux":
        return "a test bed needs Linux"
    for program, package in (
        ("unshare", "util-linux"),
        ("mount", "mount"),
        ("ip", "iproute2"),
        ("tc", "iproute2"),
    ):
        if shutil.which(program) is None:
            return f"a test bed needs {program}; install {package}"
    tried = subprocess.run([*UNSHARE, "sh", "-c", _TRIAL], capture_output=True, text=True, check=False)
    if tried.returncode:
        said = tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"]
        return f"this machine does not let users build networks: {said[0]}"
    return ""


@contextmanager
def running(module: str, stderr: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """A Python module as the first process of new namespaces, with pipes to its stdin and stdout.

    At the end it is killed if it still runs, and all that it has started with it. It is not in this process's group, so
    Ctrl-C does not reach it; where this process is killed, it ends because its stdin does.
    """
    process = subprocess.Popen(
        [*UNSHARE, sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


FOLDER = Path("/run/netns")
"""Where ``ip netns`` keeps its names."""

_CLONE_NEWNET = 0x40000000
_HERE = "/proc/thread-self/ns/net"

SETTINGS = {
    "ip_forward": "1",
    "tcp_congestion_control": "reno",
}
"""Of IPv4 in every namespace."""


@contextmanager
def within(namespace: str) -> Iterator[None]:
    """Step this thread into a namespace, and back.

    Raises
    ------
    OSError
        There is no such namespace.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open(_HERE, os.O_RDONLY)
    try:
        there = os.open(FOLDER / namespace, os.O_RDONLY)
        try:
            _enter(libc, there)
        finally:
            os.close(there)
        try:
            yield
        finally:
            _enter(libc, before)
    finally:
        os.close(before)


def _enter(libc: ctypes.CDLL, namespace: int) -> None:
    if libc.setns(namespace, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"a network namespace cannot be entered: {os.strerror(number)}")


def build(
    create: Sequence[str], inside: Mapping[str, Sequence[str]], shape: Mapping[str, Sequence[str]]
) -> None:
    """Run the lines of `collectives.testbed.commands.Commands`.

    Raises
    ------
    ProbeError
        ``ip`` or ``tc`` refuses; carries what it says.
    """
    _batch(["ip"], create)
    for namespace, lines in inside.items():
        with within(namespace):
            _batch(["ip"], lines)
            for name, value in SETTINGS.items():
                Path("/proc/sys/net/ipv4", name).write_text(value, encoding="ascii")
    shape_links(shape)


def shape_links(shape: Mapping[str, Sequence[str]]) -> None:
    """Run lines for tc in each namespace; ProbeError where it refuses."""
    for namespace, lines in shape.items():
        with within(namespace):
            _batch(["tc"], lines)


def _batch(program: Sequence[str], lines: Sequence[str]) -> None:
    done = subprocess.run(
        [*program, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ProbeError(f"{program[0]} cannot build the test bed: {'; '.join(said[:2])}")

"""Network namespaces of this process: building a network, and stepping into one of its devices.

A thread steps into a namespace and what it opens or starts there, a socket or a process, stays there. Needs rights over
the process's namespaces, which `collectives.testbed.sandbox` gives without being root.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from topoplan.errors import ProbeError

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

"""Parse, listen at and connect to the addresses of a job's ranks: ``host:port`` or ``unix:/path``.

A Unix path is reached from every network namespace of the machine, so ranks whose only networks are the links of a
test bed can still connect.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from collectives.peers.agreement import Gather
from topoplan.errors import BackendError, UsageError
from topoplan.private_files import process_fields

RETRY_SECONDS = 0.05  # pause between two attempts to reach a process that may not have started yet

LOW_DELAY, INTERACTIVE = 0x10, 6
"""IP's type of service, and Linux's socket priority, the highest that needs no privilege."""

SIOCGIFADDR = 0x8915  # Linux ioctl that returns the address of an interface
REACH_SECONDS = 1.0  # timeout of a connection to one of a machine's addresses

BACKLOG = 4096  # connections that wait to be accepted: ranks connect at once; Linux allows as many by default

NOT_THERE_YET = (
    *(ConnectionRefusedError, ConnectionResetError, ConnectionAbortedError, FileNotFoundError),
    BlockingIOError,  # the backlog of a Unix path is full
)

CLOSED_MEANWHILE = (errno.ENOTCONN, errno.EINVAL)
"""Errors of a connection whose listener closed before accepting it."""


@dataclass(frozen=True, slots=True)
class Address:
    """An address to listen at or to connect to.

    `host` is a name or number, empty for a Unix socket; port 0 lets the system choose; `path` is that of a Unix
    socket, which begins with a zero byte if it is Linux's own and no file. `token` is a secret of the ranks that meet
    there, which is part of their key (text behind ``#``); it is not shown.
    """

    host: str
    port: int
    path: str = ""
    token: str = field(default="", repr=False)

    @property
    def named(self) -> bool:
        """Whether it is the path of a file."""
        return bool(self.path) and not self.path.startswith("\0")

    @property
    def local(self) -> bool:
        """Whether only processes of this machine reach it."""
        if self.path:
            return True
        number = resolve_host(self.host)
        return number.startswith("127.") or number == "::1"

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parse ``host:port``, ``[IPv6]:port`` or ``unix:/path``, each with or without ``#token``; else UsageError.

    Examples
    --------
    >>> parse_address("10.0.0.1:29500")
    Address(host='10.0.0.1', port=29500, path='')
    >>> str(parse_address("[::1]:80")), parse_address("unix:/run/job").path
    ('[::1]:80', '/run/job')
    """
    text, _, token = text.partition("#")
    if text.startswith("unix:") and len(text) > 5:
        return Address("", 0, text[5:], token)
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UsageError(f"address must be host:port or unix:/path, got {text!r}")
    return Address(host, int(port), token=token)


def listen(address: Address) -> socket.socket:
    """Return a listening socket; a Unix path that a dead process of this user left is taken over, and has mode 600.

    Raises
    ------
    OSError
        Another process listens there, the path is not a socket, or the address is not one of this machine.
    """
    if not address.path:
        family = socket.AF_INET6 if ":" in resolve_host(address.host) else socket.AF_INET
        return socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
    listener = socket.socket(socket.AF_UNIX)
    try:
        os.fchmod(listener.fileno(), 0o600)  # Linux gives it to the path
        try:
            listener.bind(address.path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            _remove_stale(address.path)
            listener.bind(address.path)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _remove_stale(path: str) -> None:
    """Remove the path of a socket without a listener; OSError for any other path."""
    found = os.lstat(path)
    if not stat.S_ISSOCK(found.st_mode):
        raise FileExistsError(errno.EEXIST, "it is not a socket, and stays as it is")
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"it is a socket of user {found.st_uid}")
    if _answers(path):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    if os.path.samestat(os.lstat(path), found):  # otherwise another process has taken it over meanwhile
        os.unlink(path)


def connect(address: Address, deadline: float, *, look: Callable[[], None] | None = None) -> socket.socket:
    """Connect to a process that listens at an address, or will soon.

    `deadline` is by `time.monotonic`. `look` is called between two attempts and raises to give up sooner. Raises
    `BackendError` if nothing listens there.
    """
    while True:
        if look is not None:
            look()
        left = deadline - time.monotonic()
        try:
            made = _try_connect(address, max(left, RETRY_SECONDS))
            if _has_two_ends(made, address):
                return made
            made.close()
            problem = "nobody listens"
        except NOT_THERE_YET as error:
            problem = str(error)
        except OSError as error:
            raise BackendError(
                f"cannot reach the rendezvous {address}: {error}; give an address that every rank reaches"
            ) from error
        if left <= 0:
            raise BackendError(
                f"nobody listens at the rendezvous {address} ({problem}); start rank 0, which listens there"
            )
        time.sleep(min(RETRY_SECONDS, max(left, 0.0)))


def _has_two_ends(made: socket.socket, address: Address) -> bool:
    """Return whether a connection leads to another socket that did not close it before accepting it.

    A socket can connect to itself on an unused port of this machine.
    """
    try:
        return bool(address.path) or made.getsockname() != made.getpeername()
    except OSError as error:
        if error.errno not in CLOSED_MEANWHILE:
            raise
        return False


@dataclass(frozen=True, slots=True)
class ListeningProcess:
    """A process that listens at an address, as far as ``/proc`` tells; `pid` 0 if it does not."""

    pid: int = 0
    command: str = ""

    @property
    def launched_this(self) -> bool:
        """Whether this process, or one that launched it, is the listening one."""
        pid = os.getpid()
        while pid > 1 and pid != self.pid:
            pid = int((process_fields(pid) or ["", "0"])[1])  # its parent
        return pid == self.pid and pid > 0

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command})" if self.pid else "a process that /proc does not show"


def listening_process(address: Address) -> ListeningProcess:
    """Return the process that listens at an address of this machine."""
    pid = _pid_at_path(address.path) if address.path else _pid_at_port(address.port)
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ListeningProcess()
    return ListeningProcess(pid, " ".join(command.split())[:80])


def _pid_at_path(path: str) -> int:
    with socket.socket(socket.AF_UNIX) as asking, contextlib.suppress(OSError, AttributeError):
        asking.settimeout(REACH_SECONDS)
        asking.connect(path)
        return int(struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
    return 0


def _pid_at_port(port: int) -> int:
    """Return the process of this network namespace that listens at a TCP port, among those of this user; 0 if none."""
    held: set[str] = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
            listening = (row for row in rows if row[3] == "0A")
            held |= {f"socket:[{row[9]}]" for row in listening if int(row[1].rpartition(":")[2], 16) == port}
    for directory in Path("/proc").glob("[0-9]*/fd") if held else ():
        with contextlib.suppress(OSError):
            for one in directory.iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(one) in held:
                        return int(directory.parent.name)
    return 0


def prioritize(connection: socket.socket) -> None:
    """Give a connection priority over bulk data in networks with priority queues, for heartbeats.

    Sets low delay as the type of service, which switches read, and the system's interactive priority. Unsupported
    options are left as they are.
    """
    kinds = {socket.AF_INET: ("IPPROTO_IP", "IP_TOS"), socket.AF_INET6: ("IPPROTO_IPV6", "IPV6_TCLASS")}
    if connection.family not in kinds:
        return
    level, option = kinds[connection.family]
    for where, name, value in ((level, option, LOW_DELAY), ("SOL_SOCKET", "SO_PRIORITY", INTERACTIVE)):
        with contextlib.suppress(OSError, AttributeError):
            connection.setsockopt(getattr(socket, where), getattr(socket, name), value)


def host_identity() -> str:
    """Return what processes share that reach each other by the loopback address: a kernel and its network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname()


def process_namespace() -> str:
    """Return what processes share that see each other by their numbers; unique if it is unknown."""
    try:
        return host_identity() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return secrets.token_hex(8)


def address_among(gather: Gather, rank: int) -> str:
    """Return the address of this machine that the other ranks reach; empty on all ranks if some rank reaches none.

    The loopback address if all ranks are on this machine. Otherwise the lowest rank of each other machine tries the
    addresses of rank 0's machine, that of its name first: the local end of the connection is the address of its
    machine, and the remote end that of rank 0's. All ranks of `gather` call this.
    """
    hosts = gather(host_identity())
    if len(set(hosts)) == 1:
        return "127.0.0.1"
    with contextlib.ExitStack() as listening:
        offered = []
        for address in _addresses() if rank == 0 else []:
            with contextlib.suppress(OSError):
                listener = listening.enter_context(socket.create_server((address, 0), backlog=BACKLOG))
                offered.append([address, listener.getsockname()[1]])
        places = json.loads(gather(json.dumps(offered))[0])
        tries = hosts[rank] != hosts[0] and hosts.index(hosts[rank]) == rank
        ends = _reached(places) if tries else ("", "")
        pairs = [json.loads(text) for text in gather(json.dumps(ends))]
    elsewhere = {host: pairs[hosts.index(host)] for host in dict.fromkeys(hosts) if host != hosts[0]}
    if not all(reached for _, reached in elsewhere.values()):
        return ""
    own, reached = elsewhere.get(hosts[rank], next(iter(elsewhere.values())))
    return str(reached if hosts[rank] == hosts[0] else own)


def _reached(places: list[tuple[str, int]]) -> tuple[str, str]:
    """Return both ends of a connection to the first address of another machine that answers; empty if none does."""
    for host, port in places:
        with contextlib.suppress(OSError), socket.create_connection((host, port), REACH_SECONDS) as made:
            own, other = str(made.getsockname()[0]), str(made.getpeername()[0])
            if own != other:  # otherwise this machine has the address too
                return own, other
    return "", ""


def _addresses() -> list[str]:
    """Return this machine's IPv4 addresses that others may reach: those of its name first, then of its interfaces."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        found += socket.gethostbyname_ex(socket.gethostname())[2]
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            found.append(address_of_interface(name))
    return [one for one in dict.fromkeys(found) if not one.startswith("127.")]


def address_of_interface(name: str) -> str:
    """Return the IPv4 address of a network interface of this machine; OSError without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        asked = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, asked)[20:24])


def _try_connect(address: Address, timeout: float) -> socket.socket:
    if not address.path:
        made = socket.create_connection((address.host, address.port), timeout)
        prioritize(made)
        return made
    made = socket.socket(socket.AF_UNIX)
    try:
        made.settimeout(timeout)
        made.connect(address.path)
        check_user(made)
    except OSError:
        made.close()
        raise
    return made


def check_user(made: socket.socket) -> None:
    """Raise PermissionError if the other end of a Unix connection is of another user, who is not root."""
    if hasattr(socket, "SO_PEERCRED"):
        credentials = made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
        pid, user, _ = struct.unpack("iII", credentials)
        if user not in (0, os.geteuid()):
            raise PermissionError(errno.EPERM, f"process {pid} of user {user} is at the other end")


def _answers(path: str) -> bool:
    try:
        _try_connect(Address("", 0, path), 1.0).close()
    except OSError:
        return False
    return True


def resolve_host(host: str) -> str:
    """Return the number of a host, IPv4 if it has one."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return host
    numbers = sorted((family != socket.AF_INET, str(where[0])) for family, _, _, _, where in found)
    return numbers[0][1]

"""Read the rank, the rendezvous address and the identity of a job from the environment that its launcher sets.

``RANK`` and ``WORLD_SIZE`` give the rank. ``TOPOPLAN_RENDEZVOUS`` (``host:port`` or ``unix:/path``) gives the address,
or ``MASTER_ADDR`` and ``MASTER_PORT`` as torchrun and others set them. If a store of torch listens at that port, rank 0
chooses another, and the store brings it to the other ranks.

The identity tells the ranks of two jobs apart that use one address by mistake: ``TOPOPLAN_JOB``, else the variables of
launchers and batch systems, else, between ranks of one host, the process that launched them. It is not authentication;
the key of the job (`job_key`) is.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from collectives.peers.address import Address, listen, process_namespace
from topoplan.errors import BackendError, UsageError

WHOLE_JOBS = (
    ("Slurm step", ("SLURM_JOB_ID", "SLURM_STEP_ID"), "SLURM_STEP_NUM_TASKS"),
    ("MPI job", ("PMIX_NAMESPACE",), "OMPI_COMM_WORLD_SIZE"),
)
"""Launchers of ranks: their name, the variables of an identity, and the variable with the number of processes.

The identity counts only if that number is the world size: a step or an MPI job may as well have started a shell, or
one torchrun for each node.
"""

BATCH_JOBS = (
    ("Slurm job", ("SLURM_HET_JOB_ID", "SLURM_JOB_ID")),
    ("PBS job", ("PBS_JOBID",)),
    ("LSF job", ("LSB_JOBID",)),
)
"""Batch systems, and variables of which the first that is set is the identity.

Ranks of different batch jobs belong to different jobs; ranks of one batch job may belong to several.
"""

REAPERS = ("systemd", "init", "tini", "dumb-init", "docker-init", "catatonit")
"""Names of processes that adopt orphans; they are not launchers."""


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """A rank, the number of ranks, and the rendezvous address."""

    rank: int
    size: int
    rendezvous: str


def read_rank_environment(
    environment: Mapping[str, str], backend: str, *, timeout: float = 30.0
) -> RankEnvironment:
    """Return the rank of a process with these variables; `backend` is named in messages.

    Raises
    ------
    UsageError
        Variables are missing, or one is not a number.
    BackendError
        A store of torch listens at ``MASTER_PORT``, and rank 0 has put no port there within `timeout` seconds.

    Examples
    --------
    >>> read_rank_environment({"RANK": "1", "WORLD_SIZE": "4", "TOPOPLAN_RENDEZVOUS": "unix:/tmp/here"}, "tcp")
    RankEnvironment(rank=1, size=4, rendezvous='unix:/tmp/here')
    """
    missing = [name for name in ("RANK", "WORLD_SIZE") if not environment.get(name)]
    if not environment.get("TOPOPLAN_RENDEZVOUS"):
        absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
        missing += absent if len(absent) < 2 else ["TOPOPLAN_RENDEZVOUS (or MASTER_ADDR and MASTER_PORT)"]
    if missing:
        raise UsageError(
            f"the {backend} back end reads its rank from environment variables, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; start the ranks with topoplan bench, torchrun or "
            "another launcher that sets them"
        )
    rank, size = (integer_variable(environment, name) for name in ("RANK", "WORLD_SIZE"))
    rendezvous = environment.get("TOPOPLAN_RENDEZVOUS") or _master_address(environment, rank, timeout)
    return RankEnvironment(rank, size, rendezvous)


def _master_address(environment: Mapping[str, str], rank: int, timeout: float) -> str:
    """Return the address of ``MASTER_ADDR`` and ``MASTER_PORT``; if a store of torch listens there, at another port.

    Rank 0 takes the next port, or any free one if that is in use, and puts it into the store for the other ranks.
    """
    host, port = environment["MASTER_ADDR"], integer_variable(environment, "MASTER_PORT")
    launched = _by_torchrun(environment)
    if launched or _group_store_port() == port:
        store = (_torchruns_store if launched else _open_store)(host, port)
        # a store of torchrun outlives ranks that are restarted
        variables = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
        life = " ".join(environment.get(name, "") for name in variables)
        port += 1
        if store is not None:
            port = _port_in_store(store, f"port of {life}", rank, Address(host, port), timeout)
    return str(Address(host, port))


def _port_in_store(store: Any, name: str, rank: int, first: Address, timeout: float) -> int:
    """Return the port that rank 0 has put into a store; the first call of rank 0 chooses it.

    Other ranks look again and again, because a rank that waits in the store keeps other threads from it.
    """
    until, problem = time.monotonic() + timeout, ""
    try:
        if rank == 0:
            return int(store.compare_set(name, "", str(_free_port(first))))
        while not store.check([name]):
            if time.monotonic() > until:
                break
            time.sleep(PORT_CHECK_SECONDS)
        else:
            return int(store.get(name))
    except RuntimeError as error:
        problem = f" ({str(error).splitlines()[0]})"
    raise BackendError(
        f"rank {rank}: rank 0 has put no port into the store of torch beside {first.host}:{first.port - 1} within "
        f"{timeout:g} s{problem}; start rank 0",
        rank=rank,
        peer=0,
    )


def _free_port(first: Address) -> int:
    """Return the port of an address of this machine, or another free one there if that is in use."""
    for port in (first.port, 0):
        with contextlib.suppress(OSError, UsageError), listen(replace(first, port=port)) as listener:
            return int(listener.getsockname()[1])
    return first.port  # the listener of the rendezvous says why it cannot


def integer_variable(environment: Mapping[str, str], name: str) -> int:
    """Return the integer value of a variable; UsageError for another text."""
    text = environment[name]
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{name} is {text!r}; set it to a whole number")
    return int(text)


Process = tuple[int, int]  # a process id, and the start time of the process in clock ticks since boot


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """The identity of the job of a process, to tell it from other jobs.

    `name` is ``TOPOPLAN_JOB``, and decides alone. `whole` has source and value of identities that all ranks of the job
    share and no rank of another job has: torchrun's run id, a Slurm step or an MPI job with as many processes as the
    job; `batch` those of batch jobs. `host` is the same for processes that see each other by their ids. `agent` is
    torchrun's group rank if it has several agents, each of which launches some of the ranks. `launchers` are the
    process, then its ancestors that were started for this rank alone (a wrapper, a subshell), then the one that
    launched the rank, without init and its like; `command` is its name, and `orphan` says that it has ended.
    """

    name: str = ""
    whole: tuple[tuple[str, str], ...] = ()
    batch: tuple[tuple[str, str], ...] = ()
    host: str = ""
    agent: str = ""
    launchers: tuple[Process, ...] = ()
    command: str = ""
    orphan: bool = False
    session: int = 0

    @staticmethod
    def of_message(fields: Mapping[str, Any]) -> JobIdentity:
        """Return the identity of message fields (`dataclasses.asdict`); ValueError, TypeError or KeyError if not."""
        whole, batch = (
            tuple((str(source), str(value)) for source, value in fields[key]) for key in ("whole", "batch")
        )
        name, host, agent, command = (str(fields[key]) for key in ("name", "host", "agent", "command"))
        launchers = tuple((int(pid), int(born)) for pid, born in fields["launchers"])
        orphan, session = bool(fields["orphan"]), int(fields["session"])
        return JobIdentity(name, whole, batch, host, agent, launchers, command, orphan, session)

    def differs(self, other: JobIdentity) -> bool:
        """Return whether two processes are known to belong to different jobs.

        Examples
        --------
        >>> mine = JobIdentity(host="h", launchers=((12, 700), (11, 650)))
        >>> mine.differs(JobIdentity(host="h", launchers=((13, 701), (11, 650))))
        False
        >>> mine.differs(JobIdentity(host="h", launchers=((23, 801), (22, 750))))
        True
        >>> mine.differs(JobIdentity(host="another", launchers=((23, 801), (22, 750))))
        False
        """
        if self.name or other.name:
            return self.name != other.name
        for mine, theirs in ((dict(self.batch), dict(other.batch)), (dict(self.whole), dict(other.whole))):
            if any(mine[source] != theirs[source] for source in mine.keys() & theirs.keys()):
                return True
        if {source for source, _ in self.whole} & {source for source, _ in other.whole}:
            return False
        if not self.host or self.host != other.host or self.agent != other.agent:
            return False
        if set(self.launchers) & set(other.launchers):
            return False
        if self.orphan or other.orphan:
            return self.session != other.session
        return True

    def __str__(self) -> str:
        if self.name:
            return f"job {self.name!r} (TOPOPLAN_JOB)"
        known = [f"{source} {value}" for source, value in (*self.whole, *self.batch)]
        if self.launchers and not self.orphan:
            known.append(f"launched by process {self.launchers[-1][0]} ({self.command})")
        elif self.launchers:
            known.append(f"session {self.session}, whose launcher has ended")
        return f"the job ({', '.join(known)})" if known else "a job without an identity"


def job_identity(size: int, environment: Mapping[str, str] = os.environ) -> JobIdentity:
    """Return the identity of the job of this process, which has `size` processes.

    Examples
    --------
    >>> str(job_identity(2, {"TOPOPLAN_JOB": "nightly"}))
    "job 'nightly' (TOPOPLAN_JOB)"
    """
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    whole = [("torchrun's run id", run)] if run not in ("", "none") else []
    for source, names, number in WHOLE_JOBS:
        values = [environment.get(name, "") for name in names]
        if all(values) and environment.get(number) == str(size):
            whole.append((source, ".".join(values)))
    batch = []
    for source, names in BATCH_JOBS:
        found = next((environment[name] for name in names if environment.get(name)), "")
        if found:
            batch.append((source, found))
    agents = environment.get("GROUP_WORLD_SIZE", "1")
    launchers, command, orphan = _launchers(environment.get("RANK", ""))
    return JobIdentity(
        environment.get("TOPOPLAN_JOB", ""),
        tuple(whole),
        tuple(batch),
        process_namespace() if launchers else "",
        environment.get("GROUP_RANK", "") if agents != "1" else "",
        launchers,
        command,
        orphan,
        os.getsid(0) if launchers else 0,
    )


LEAST_KEY = 16  # characters of a key
STORE_SECONDS = 10.0  # time for a store of torch to answer
PORT_CHECK_SECONDS = 0.02  # between looks for the port of rank 0


def job_key(environment: Mapping[str, str] = os.environ) -> bytes:
    """Return the key that all ranks of the job share, and nobody else has; empty without one.

    ``TOPOPLAN_JOB_KEY`` is the key, else ``TOPOPLAN_JOB_KEY_FILE`` names a file of mode 600 that holds it, else the
    ranks of torchrun agree on a random one in its store. Raises `UsageError` for a short key, or a file that others can
    read.

    Examples
    --------
    >>> job_key({"TOPOPLAN_JOB_KEY": "correct horse battery"}), job_key({})
    (b'correct horse battery', b'')
    """
    key, path = environment.get("TOPOPLAN_JOB_KEY", "").encode(), environment.get("TOPOPLAN_JOB_KEY_FILE", "")
    name = "TOPOPLAN_JOB_KEY"
    if path and not key:
        name = f"the key in {path} (TOPOPLAN_JOB_KEY_FILE)"
        try:
            with open(path, "rb") as file:
                about = os.fstat(file.fileno())
                key = file.read(1 << 12).strip()
        except OSError as error:
            raise UsageError(
                f"TOPOPLAN_JOB_KEY_FILE must name a file that this process can read, got {path}: {error.strerror}"
            ) from error
        if about.st_mode & 0o077 or about.st_uid not in (os.geteuid(), 0):
            raise UsageError(
                f"{path} (TOPOPLAN_JOB_KEY_FILE) must be a file of this user with mode 600, got mode "
                f"{about.st_mode & 0o777:o} of user {about.st_uid}; run chmod 600 {path}"
            )
    if (key or path) and len(key) < LEAST_KEY:
        raise UsageError(
            f"{name} must have at least {LEAST_KEY} characters, got {len(key)}; "
            "python -c 'import secrets; print(secrets.token_hex(32))' makes one"
        )
    if not key and _by_torchrun(environment):
        store = _torchruns_store(environment["MASTER_ADDR"], integer_variable(environment, "MASTER_PORT"))
        return b"" if store is None else _key_in_store(store, environment.get("TORCHELASTIC_RUN_ID", ""))
    return key


def _by_torchrun(environment: Mapping[str, str]) -> bool:
    """Whether the store of torchrun's agent listens at ``MASTER_PORT``."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"


def _group_store_port() -> int | None:
    """Return the port of the store of this process's group of torch; None without one."""
    torch = sys.modules.get("torch.distributed")
    if torch is None or not torch.is_available() or not torch.is_initialized():
        return None
    store = torch.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "port", None)


def _open_store(host: str, port: int) -> Any:
    """Open this library's part of a store of torch; None without torch, or if no store answers.

    Every process that reaches the store can read it.
    """
    try:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        wait = timedelta(seconds=STORE_SECONDS)
        return PrefixStore("topoplan", TCPStore(host, port, is_master=False, timeout=wait))
    except (ImportError, RuntimeError):
        return None


_torchruns_store = lru_cache(maxsize=8)(_open_store)


@lru_cache(maxsize=8)
def _key_in_store(store: Any, run: str) -> bytes:
    """Return the key that the ranks have in torchrun's store, where the first one puts it; empty if that has ended."""
    try:
        return bytes(store.compare_set(f"key of {run}", "", secrets.token_hex(32)))
    except RuntimeError:
        return b""


def encrypts(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the ranks of this job encrypt their connections (``TOPOPLAN_TLS``); UsageError for other values.

    Examples
    --------
    >>> encrypts({"TOPOPLAN_TLS": "1"}), encrypts({})
    (True, False)
    """
    value = environment.get("TOPOPLAN_TLS", "")
    if value not in ("", "0", "1"):
        raise UsageError(f"TOPOPLAN_TLS must be 0 or 1, got {value!r}; set the same on all ranks")
    return value == "1"


def _launchers(rank: str) -> tuple[tuple[Process, ...], str, bool]:
    """Return `JobIdentity.launchers`, the name of the last, and whether the launching process has ended; on Linux."""
    found: list[Process] = []
    pid = os.getpid()
    while True:
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
        except OSError:  # no /proc, or it does not show processes of other users
            return ((*found, (pid, 0)), "of another user", False) if found else ((), "", False)
        fields, command = rest.split(), name.partition("(")[2]
        parent, born = int(fields[1]), int(fields[19])
        if found and command in REAPERS:
            return tuple(found), "", True
        found.append((pid, born))
        if len(found) > 1 and not _started_as(pid, rank) and not _forked_from(pid, parent):
            return tuple(found), command, False
        if parent == 0:  # outside this container
            return tuple(found), "", True
        pid = parent


def _started_as(pid: int, rank: str) -> bool:
    """Return whether a process was started with this ``RANK`` in its environment."""
    try:
        return bool(rank) and f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(
            b"\0"
        )
    except OSError:
        return False


def _forked_from(pid: int, parent: int) -> bool:
    """Return whether a process runs its parent's program with the same arguments, as a subshell does."""
    try:
        own, other = (Path(f"/proc/{one}/cmdline").read_bytes() for one in (pid, parent))
        return own == other != b"" and os.readlink(f"/proc/{pid}/exe") == os.readlink(f"/proc/{parent}/exe")
    except OSError:
        return False

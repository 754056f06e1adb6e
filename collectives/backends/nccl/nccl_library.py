"""Wrap every call that the nccl back end makes to NCCL, by NVIDIA's own bindings (nccl4py).

One libnccl serves a process: the first that any library has loaded. `find_library` returns it.

Communicators are non-blocking: a call begins an operation, and `NcclCommunicator.ready` tells when it has ended. No
call waits inside NCCL for another rank, unless ``NCCL_COMM_BLOCKING=1`` demands it. Every call raises `NcclFailed`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from topoplan.errors import UsageError

SHARED_GPU = 23003
"""The first release that puts several ranks on one GPU, in NCCL's notation: 2.30.3."""

OLDEST = 22300
"""The first release with the call by which nccl4py makes communicators: 2.23."""

WINDOWS = 22907
"""The first release whose windows have addresses: 2.29.7.

`ncclCommQueryProperties` would say whether they are available, but every NCCL older than the bindings refuses it: the
call passes a struct of the bindings' own version. So a window is registered, and its handle checked.
"""

SHRINKS, REVOKES = 22703, 22807
"""The first releases with communicators of a subset of another's ranks (2.27.3), and with a call that ends all
operations of a communicator without freeing it (2.28.7).
"""


class NcclFailed(Exception):
    """NCCL refuses, or reports an error; the message is one line."""


class NcclCommunicator:
    """A communicator, seen from one rank. Messages belong inside the library's `group`."""

    def __init__(self, core: Any, bindings: Any, made: Any, parent: NcclCommunicator | None = None) -> None:
        self._core, self._bindings = core, bindings
        self._made = made
        self._parent = parent
        """The communicator that NCCL makes this one from, until it has."""
        # the bindings take bare addresses, which the layer above would wrap in array objects one by one
        self.handle = bindings.Comm(made.ptr)

    def send(self, address: int, nbytes: int, peer: int, stream: int) -> None:
        """Send memory of the GPU to a peer, in the order of a stream (its handle)."""
        self._bindings.send(address, nbytes, int(self._core.UINT8), peer, self.handle, stream)

    def receive(self, address: int, nbytes: int, peer: int, stream: int) -> None:
        """Receive into memory of the GPU."""
        self._bindings.recv(address, nbytes, int(self._core.UINT8), peer, self.handle, stream)

    def ready(self) -> bool:
        """Return whether the last call's operation has ended; raise `NcclFailed` on NCCL's error, now or before."""
        if self._parent is not None:
            # NCCL writes the new handle when it is made, and until then only the parent reports the progress
            if not self._parent.ready():
                return False
            self.handle, self._parent = self._bindings.Comm(self._made.ptr), None
        try:
            state = self._made.get_async_error()
            if state == self._bindings.Result.Success:
                return True
            if state == self._bindings.Result.InProgress:
                return False
            words = f"{self._core.get_error_string(state)} {self._made.get_last_error()}"
        except (self._bindings.NCCLError, self._core.NcclInvalid) as error:
            words = str(error)
        raise NcclFailed(_one_line(words))

    def abort(self) -> None:
        """End all waits for other ranks; waits for captured graphs to be dropped."""
        with _failures(self._core, self._bindings):
            self._made.abort()

    def destroy(self) -> None:
        """Free it; waits for what other ranks still do, and for captured graphs to be dropped."""
        with _failures(self._core, self._bindings):
            self._made.destroy()

    def revoke(self) -> None:
        """Begin to end all waits for other ranks; a communicator that is ready again can only be shrunk."""
        with _failures(self._core, self._bindings):
            self._made.revoke()

    def shrink(self, without: Sequence[int]) -> NcclCommunicator:
        """Begin a communicator of all ranks but the non-empty set `without`, counted anew in their order.

        All survivors call it, once, on a ready communicator without an error. The new one shares nothing with this one,
        whose operations end. This one is to be aborted when the new one is ready; or before the new one, to give it up.
        """
        # without the flag it may share resources that end with this one, and waits for operations under way
        with _failures(self._core, self._bindings):
            made = self._made.shrink(sorted(without), flag=self._core.CommShrinkFlag.ABORT)
            return NcclCommunicator(self._core, self._bindings, made, self)

    def team(self) -> int:
        """Return how many ranks of a ready communicator reach each other's memory; 0 if NCCL does not know."""
        with _failures(self._core, self._bindings):
            return int(self._bindings.team_lsa(self.handle).n_ranks)

    def register(self, address: int, nbytes: int) -> NcclWindow:
        """Begin to make memory a window; all ranks do, and it exists when the communicator is ready."""
        with _failures(self._core, self._bindings):
            made = self._bindings.comm_window_register(
                self.handle, address, nbytes, int(self._core.WindowFlag.DEFAULT)
            )
        return NcclWindow(self._core, self._bindings, self.handle, made)


class NcclLibrary:
    """NCCL in this process, for the current GPU.

    - `version` in NCCL's notation: 23203 is 2.32.3.
    - `path` of the loaded libnccl; empty if the system does not tell.
    - `bindings`: version of the header that the bindings were generated from.
    - `waits`: a call can wait inside NCCL for other ranks.
    - `windows`: it has memory that the GPUs of a communicator address themselves.
    - `shrinks`, `revokes`: it has these operations of a communicator; not if calls wait.
    """

    def __init__(self, core: Any, bindings: Any, info: Any, made_for: Any) -> None:
        # the variable overrules the configuration of a communicator
        self.waits = os.environ.get("NCCL_COMM_BLOCKING") == "1"
        self.version, self.bindings = _number(info.version), _number(made_for)
        self.path = str(info.path or "")
        self.windows = self.version >= WINDOWS
        self.shrinks = (
            self.version >= SHRINKS and not self.waits
        )  # else it would wait for a rank that dies meanwhile
        self.revokes = self.version >= REVOKES and not self.waits
        self._core, self._bindings = core, bindings

    def unique_id(self) -> bytes:
        """Return a new id, which one rank makes for all."""
        with _failures(self._core, self._bindings):
            return bytes(self._core.get_unique_id())

    def connect(self, size: int, rank: int, unique_id: bytes) -> NcclCommunicator:
        """Join a communicator on the current GPU; use it when it is `ready`."""
        core = self._core
        with _failures(core, self._bindings):
            made = core.Communicator.init(
                size, rank, core.UniqueId.from_bytes(unique_id), config=core.NCCLConfig(blocking=False)
            )
        return NcclCommunicator(core, self._bindings, made)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Group the calls inside: none waits for another."""
        with _failures(self._core, self._bindings), self._core.group():
            yield

    def allocate(self, nbytes: int) -> int:
        """Return the address of new memory for a window; contents undefined."""
        with _failures(self._core, self._bindings):
            return int(self._bindings.mem_alloc(nbytes))

    def free(self, address: int) -> None:
        """Release memory of `allocate`."""
        with _failures(self._core, self._bindings):
            self._bindings.mem_free(address)


class NcclWindow:
    """Memory of one rank that the ranks of a communicator map into each other's GPUs.

    All addresses are those of kernels, and hold until the window is closed or the communicator is gone. The rank's own
    address differs from the one that was registered: a kernel uses one of both.
    """

    def __init__(self, core: Any, bindings: Any, comm: Any, made: Any) -> None:
        self._core, self._bindings = core, bindings
        self._comm, self._made = comm, made

    def made(self) -> bool:
        """Return whether the window exists, once the communicator is ready: NCCL reports no failure to make one."""
        return bool(self._made.handle)

    def address(self, peer: int) -> int:
        """Return the address of a rank's memory; 0 if this GPU does not reach it."""
        with _failures(self._core, self._bindings):
            return int(self._bindings.get_peer_device_pointer(self._made, 0, peer))

    def multicast(self) -> int:
        """Return the address of all ranks' memory at once, for multimem instructions; 0 if there is none.

        All ranks call it at the same time: the first call binds the memory of all.
        """
        with _failures(self._core, self._bindings):
            return int(self._bindings.get_lsa_multimem_device_pointer(self._made, 0))

    def close(self) -> None:
        """Unmap it here; no kernel may use it any more, with a multicast address on any rank."""
        with _failures(self._core, self._bindings):
            self._bindings.comm_window_deregister(self._comm, self._made)


def find_library(*, ranks_per_gpu: int = 1) -> NcclLibrary:
    """Load NCCL.

    Raises `UsageError`, with what to install, if there is none, or it is too old for `ranks_per_gpu`.
    """
    try:
        core, bindings = import_module("nccl.core"), import_module("nccl.bindings.nccl")
        versions = core.get_version()
    except ImportError:  # also if the bindings of CUDA that it needs are missing
        versions = None
    found = None
    if versions is not None and versions.libnccl is not None:
        found = NcclLibrary(core, bindings, versions.libnccl, versions.nccl_bindings)
    if found is None or found.version < OLDEST:
        raise UsageError(
            "the nccl back end needs nccl4py and a libnccl.so.2 of 2.23 or newer: "
            'pip install "topoplan[cuda12]" (or cuda13, as CuPy)'
        )
    if ranks_per_gpu > 1 and found.version < SHARED_GPU:
        raise UsageError(
            f"{ranks_per_gpu} ranks on one GPU need NCCL 2.30.3 or newer, and this is {describe_library(found)}; "
            "pip install --upgrade nvidia-nccl-cu12 (or -cu13, as CuPy), or start a rank for each GPU"
        )
    return found


def describe_library(library: NcclLibrary) -> str:
    """Return the release of libnccl, the release that the bindings are made for, and the path.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> describe_library(SimpleNamespace(version=22907, bindings=23203, path="/lib/libnccl.so.2"))
    '2.29.7 by nccl4py for 2.32.3, /lib/libnccl.so.2'
    """
    place = f", {library.path}" if library.path else ""
    return f"{_release(library.version)} by nccl4py for {_release(library.bindings)}{place}"


def _release(version: int) -> str:
    major, rest = divmod(version, 10000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _number(release: Any) -> int:
    """Return a release as NCCL writes it."""
    return 10000 * int(release.major) + 100 * int(release.minor) + int(release.micro)


@contextmanager
def _failures(core: Any, bindings: Any) -> Iterator[None]:
    try:
        yield
    except (bindings.NCCLError, core.NcclInvalid) as error:
        raise NcclFailed(_one_line(error)) from error


def _one_line(error: object) -> str:
    return " ".join(str(error).split()) or type(error).__name__

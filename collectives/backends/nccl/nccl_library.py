"""Wrap every call that the nccl back end makes to NCCL: NVIDIA's own bindings (nccl4py), or else CuPy's.

One libnccl serves a process: the first that any library has loaded. `find_library` returns it.

Communicators of nccl4py are non-blocking: a call only begins an operation, `NcclCommunicator.ready` tells when it has
ended, and no call waits inside NCCL for another rank. CuPy's are blocking: their calls can wait there without end.

Features that some NCCL versions lack are parts of `NcclLibrary` that can be None: `NcclLibrary.windows`, memory
that the GPUs of a communicator address themselves, and `NcclLibrary.shrinking`, a communicator of a subset of
another's ranks.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol, cast

from topoplan.errors import UsageError

ID_BYTES = 128
"""Bytes of NCCL's unique id."""

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

NAMES = ("auto", "nccl4py", "cupy")
"""Names for `find_library`; "auto" is nccl4py if it can be used, else CuPy."""


class NcclFailed(Exception):
    """NCCL refuses, or reports an error; the message is one line."""


class NcclCommunicator(Protocol):
    """A communicator, seen from one rank. Messages belong inside the library's `group`."""

    def send(self, address: int, nbytes: int, peer: int, stream: int) -> None:
        """Send memory of the GPU to a peer, in the order of a stream (its handle)."""

    def receive(self, address: int, nbytes: int, peer: int, stream: int) -> None:
        """Receive into memory of the GPU."""

    def ready(self) -> bool:
        """Return whether the last call's operation has ended; raise `NcclFailed` on NCCL's error, now or before."""

    def abort(self) -> None:
        """End all waits for other ranks; waits for captured graphs to be dropped."""

    def destroy(self) -> None:
        """Free it; waits for what other ranks still do, and for captured graphs to be dropped."""


class NcclLibrary(Protocol):
    """NCCL in this process.

    - `name` is "nccl4py" or "cupy".
    - `version` in NCCL's notation: 23203 is 2.32.3.
    - `path` of the loaded libnccl; empty if the system does not tell.
    - `bindings`: version of the header that the bindings were generated from; 0 for CuPy's, which do not tell.
    - `waits`: a call can wait inside NCCL for other ranks.
    - `windows` is None with CuPy's bindings, and before NCCL 2.29.7.
    - `shrinking` is None with CuPy's bindings, before NCCL 2.27.3, and if calls wait.
    """

    name: str
    version: int
    path: str
    bindings: int
    waits: bool
    windows: NcclWindows | None
    shrinking: NcclShrinking | None

    def unique_id(self) -> bytes:
        """Return a new id of `ID_BYTES` bytes, which one rank makes for all."""

    def connect(self, size: int, rank: int, unique_id: bytes) -> NcclCommunicator:
        """Join a communicator on the current GPU; use it when it is `ready`."""

    def group(self) -> AbstractContextManager[None]:
        """Group the calls inside: none waits for another."""


def find_library(cupy: ModuleType, *, ranks_per_gpu: int = 1, name: str = "auto") -> NcclLibrary:
    """Load NCCL by the bindings `name`, one of `NAMES`.

    Raises `UsageError`, with what to install, if there is none, or it is too old for `ranks_per_gpu`.
    """
    if name not in NAMES:
        raise UsageError(f"bindings of NCCL {name!r} are unknown; use {', '.join(NAMES[:-1])} or {NAMES[-1]}")
    found: NcclLibrary | None = None if name == "cupy" else _nccl4py()
    if found is None and name == "nccl4py":
        raise UsageError(
            "nccl4py is missing, finds no libnccl, or finds one before 2.23: "
            'pip install "topoplan[cuda12]" (or cuda13, as CuPy)'
        )
    if found is None:
        found = _cupy(cupy)
    if ranks_per_gpu > 1 and found.version < SHARED_GPU:
        raise UsageError(
            f"{ranks_per_gpu} ranks on one GPU need NCCL 2.30.3 or newer, and this is {describe_library(found)}; "
            "pip install --upgrade nvidia-nccl-cu12 (or -cu13, as CuPy), or start a rank for each GPU"
        )
    return found


def describe_library(library: NcclLibrary) -> str:
    """Return the release of libnccl, the bindings and the release that these are made for, and the path.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> describe_library(SimpleNamespace(name="cupy", version=23203, bindings=0, path="/lib/libnccl.so.2"))
    '2.32.3 by cupy, /lib/libnccl.so.2'
    >>> describe_library(SimpleNamespace(name="nccl4py", version=22907, bindings=23203, path=""))
    '2.29.7 by nccl4py for 2.32.3'
    """
    made_for = f" for {_release(library.bindings)}" if library.bindings else ""
    place = f", {library.path}" if library.path else ""
    return f"{_release(library.version)} by {library.name}{made_for}{place}"


def _release(version: int) -> str:
    major, rest = divmod(version, 10000)
    return f"{major}.{rest // 100}.{rest % 100}"


def loaded_path() -> str:
    """Return the libnccl that this process has loaded; empty if there is none, or the system does not tell."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as lines:
            words = [line.split(maxsplit=5) for line in lines if "libnccl.so" in line]
    except OSError:
        return ""
    return words[0][5].strip() if words and len(words[0]) > 5 else ""


class _Nccl4py:
    name = "nccl4py"

    def __init__(self, core: Any, bindings: Any, info: Any, made_for: Any) -> None:
        # the variable overrules the configuration of a communicator
        self.waits = os.environ.get("NCCL_COMM_BLOCKING") == "1"
        self.version, self.bindings = _number(info.version), _number(made_for)
        self.path = str(info.path or "")
        self._core, self._bindings = core, bindings
        self.windows: NcclWindows | None = NcclWindows(core, bindings) if self.version >= WINDOWS else None
        self.shrinking: NcclShrinking | None = None
        if self.version >= SHRINKS and not self.waits:  # else it would wait for a rank that dies meanwhile
            self.shrinking = NcclShrinking(core, bindings, revokes=self.version >= REVOKES)

    def unique_id(self) -> bytes:
        with _failures(self._core, self._bindings):
            return bytes(self._core.get_unique_id())

    def connect(self, size: int, rank: int, unique_id: bytes) -> NcclCommunicator:
        core = self._core
        with _failures(core, self._bindings):
            made = core.Communicator.init(
                size, rank, core.UniqueId.from_bytes(unique_id), config=core.NCCLConfig(blocking=False)
            )
        return _Nccl4pyCommunicator(self._core, self._bindings, made)

    @contextmanager
    def group(self) -> Iterator[None]:
        with _failures(self._core, self._bindings), self._core.group():
            yield


class _Nccl4pyCommunicator:
    def __init__(
        self, core: Any, bindings: Any, made: Any, parent: _Nccl4pyCommunicator | None = None
    ) -> None:
        self._core, self._bindings = core, bindings
        self._made = made
        self._parent = parent
        """The communicator that NCCL makes this one from, until it has."""
        # the bindings take bare addresses, which the layer above would wrap in array objects one by one
        self.handle = bindings.Comm(made.ptr)

    def send(self, address: int, nbytes: int, peer: int, stream: int) -> None:
        self._bindings.send(address, nbytes, int(self._core.UINT8), peer, self.handle, stream)

    def receive(self, address: int, nbytes: int, peer: int, stream: int) -> None:
        self._bindings.recv(address, nbytes, int(self._core.UINT8), peer, self.handle, stream)

    def ready(self) -> bool:
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
        with _failures(self._core, self._bindings):
            self._made.abort()

    def revoke(self) -> None:
        self._made.revoke()

    def shrink(self, without: Sequence[int]) -> _Nccl4pyCommunicator:
        # without the flag it may share resources that end with this one, and waits for operations under way
        made = self._made.shrink(sorted(without), flag=self._core.CommShrinkFlag.ABORT)
        return _Nccl4pyCommunicator(self._core, self._bindings, made, self)

    def destroy(self) -> None:
        with _failures(self._core, self._bindings):
            self._made.destroy()


class NcclShrinking:
    """Communicators of a subset of another's ranks; calls raise `NcclFailed`. `revokes`: has `revoke` (2.28.7)."""

    def __init__(self, core: Any, bindings: Any, *, revokes: bool) -> None:
        self._core, self._bindings = core, bindings
        self.revokes = revokes

    def revoke(self, link: NcclCommunicator) -> None:
        """Begin to end all waits for other ranks; a communicator that is ready again can only be shrunk."""
        with _failures(self._core, self._bindings):
            cast(_Nccl4pyCommunicator, link).revoke()

    def shrink(self, link: NcclCommunicator, without: Sequence[int]) -> NcclCommunicator:
        """Begin a communicator of all ranks of `link` but the non-empty set `without`, counted anew in their order.

        All survivors call it, once, on a ready communicator without an error. The new one shares nothing with `link`,
        whose operations end. `link` is to be aborted when the new one is ready; or before the new one, to give this up.
        """
        with _failures(self._core, self._bindings):
            return cast(_Nccl4pyCommunicator, link).shrink(without)


class NcclWindows:
    """Windows and the memory for them; all calls are for the current GPU, and raise `NcclFailed`."""

    def __init__(self, core: Any, bindings: Any) -> None:
        self._core, self._bindings = core, bindings

    def team(self, link: NcclCommunicator) -> int:
        """Return how many ranks of a ready communicator reach each other's memory; 0 if NCCL does not know."""
        with _failures(self._core, self._bindings):
            return int(self._bindings.team_lsa(cast(_Nccl4pyCommunicator, link).handle).n_ranks)

    def allocate(self, nbytes: int) -> int:
        """Return the address of new memory; contents undefined."""
        with _failures(self._core, self._bindings):
            return int(self._bindings.mem_alloc(nbytes))

    def free(self, address: int) -> None:
        """Release memory of `allocate`."""
        with _failures(self._core, self._bindings):
            self._bindings.mem_free(address)

    def register(self, link: NcclCommunicator, address: int, nbytes: int) -> NcclWindow:
        """Begin to make memory a window; all ranks of the communicator do, and it exists when that is ready."""
        comm, flags = cast(_Nccl4pyCommunicator, link).handle, int(self._core.WindowFlag.DEFAULT)
        with _failures(self._core, self._bindings):
            made = self._bindings.comm_window_register(comm, address, nbytes, flags)
        return NcclWindow(self._core, self._bindings, comm, made)


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


@contextmanager
def _failures(core: Any, bindings: Any) -> Iterator[None]:
    try:
        yield
    except (bindings.NCCLError, core.NcclInvalid) as error:
        raise NcclFailed(_one_line(error)) from error


def _nccl4py() -> NcclLibrary | None:
    try:
        core, bindings = import_module("nccl.core"), import_module("nccl.bindings.nccl")
    except ImportError:  # also if the bindings of CUDA that it needs are missing
        return None
    versions = core.get_version()
    if versions.libnccl is None:
        return None
    found = _Nccl4py(core, bindings, versions.libnccl, versions.nccl_bindings)
    return found if found.version >= OLDEST else None


def _number(release: Any) -> int:
    """Return a release as NCCL writes it."""
    return 10000 * int(release.major) + 100 * int(release.minor) + int(release.micro)


class _Cupy:
    name = "cupy"
    bindings = 0
    waits = True
    windows: NcclWindows | None = None
    shrinking: NcclShrinking | None = None

    def __init__(self, nccl: Any) -> None:
        self.version = int(nccl.get_version())
        self.path = loaded_path()
        self._nccl = nccl

    def unique_id(self) -> bytes:
        made = self._nccl.get_unique_id()
        # CuPy 14 has bytes, earlier releases have a tuple of signed numbers
        return made if isinstance(made, bytes) else bytes(number & 255 for number in made)

    def connect(self, size: int, rank: int, unique_id: bytes) -> NcclCommunicator:
        with self._failures():
            try:
                made = self._nccl.NcclCommunicator(size, unique_id, rank)
            except TypeError:  # before CuPy 14
                signed = tuple(number - 256 if number > 127 else number for number in unique_id)
                made = self._nccl.NcclCommunicator(size, signed, rank)
            return _CupyCommunicator(self._nccl, made)

    @contextmanager
    def group(self) -> Iterator[None]:
        with self._failures():
            self._nccl.groupStart()
            try:
                yield
            finally:
                self._nccl.groupEnd()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        # CuPy raises KeyError for those of NCCL's states that it cannot name
        except (self._nccl.NcclError, KeyError) as error:
            raise NcclFailed(_one_line(error)) from error


class _CupyCommunicator:
    def __init__(self, nccl: Any, made: Any) -> None:
        self._nccl, self._made = nccl, made

    def send(self, address: int, nbytes: int, peer: int, stream: int) -> None:
        self._made.send(address, nbytes, self._nccl.NCCL_UINT8, peer, stream)

    def receive(self, address: int, nbytes: int, peer: int, stream: int) -> None:
        self._made.recv(address, nbytes, self._nccl.NCCL_UINT8, peer, stream)

    def ready(self) -> bool:
        try:
            self._made.check_async_error()
        except (self._nccl.NcclError, KeyError) as error:
            raise NcclFailed(_one_line(error)) from error
        return True

    def abort(self) -> None:
        self._made.abort()

    def destroy(self) -> None:
        self._made.destroy()


def _cupy(cupy: ModuleType) -> NcclLibrary:
    with warnings.catch_warnings():
        # CuPy warns of a missing library in eight lines, and the error below in one
        warnings.simplefilter("ignore")
        nccl = import_module(f"{cupy.__name__}.cuda.nccl")
    if not nccl.available:
        raise UsageError(
            "the nccl back end needs libnccl.so.2, which neither nccl4py nor CuPy finds: "
            "pip install nvidia-nccl-cu12 (or -cu13, as CuPy)"
        )
    return _Cupy(nccl)


def _one_line(error: object) -> str:
    return " ".join(str(error).split()) or type(error).__name__

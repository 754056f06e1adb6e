"""Peer access between GPUs: who may reach whom, switching it on and off, and how long that takes (T_dpa).

A GPU reaches the memory of another one directly only while its process has switched that on
(``cudaDeviceEnablePeerAccess``); otherwise the driver stages copies in the memory of the host. T_dpa of k GPUs is the
time of switching it off and on again between all pairs of them in both directions, one call after another from one
thread, with the buffers of the measurement allocated, which the driver maps anew (Blink, MLSys 2020, appendix A.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import permutations
from statistics import median
from types import ModuleType, TracebackType

from collectives.arrays.current_device import on_device
from topoplan.calibration.matching import Seen
from topoplan.errors import ProbeError

ALREADY_ENABLED, TOO_MANY_PEERS = 704, 711
"""``cudaErrorPeerAccessAlreadyEnabled`` and ``cudaErrorTooManyPeers``: CuPy has no names for them."""

Ordered = tuple[Seen, Seen]


class TooManyPeersError(Exception):
    """A GPU has as many peers as the driver allows at a time: eight, where no NVSwitch joins them."""


class PeerAccess:
    """Peer access of some GPUs; left as it was found.

    Parameters
    ----------
    cupy : module
    gpus : sequence of Seen

    Raises
    ------
    ProbeError
        The driver does not say who may reach whom.
    """

    def __init__(self, cupy: ModuleType, gpus: Sequence[Seen]) -> None:
        self._cupy = cupy
        self._gpus = tuple(gpus)
        self._found: set[Ordered] = set()
        self._on: set[Ordered] = set()
        runtime = cupy.cuda.runtime
        self._allowed = set()
        for gpu, peer in permutations(gpus, 2):
            try:
                if runtime.deviceCanAccessPeer(gpu.ordinal, peer.ordinal):
                    self._allowed.add((gpu, peer))
            except runtime.CUDARuntimeError as error:
                raise _refused("on", gpu, peer, error) from None

    def __enter__(self) -> PeerAccess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failed copy the driver may refuse everything; the error that is on its way says why.
        with suppress(ProbeError, TooManyPeersError):
            self.off(self._in_order(self._on - self._found))
            self.on(self._in_order(self._found - self._on))

    def allowed(self, gpu: Seen, peer: Seen) -> bool:
        """True where both may reach each other."""
        return {(gpu, peer), (peer, gpu)} <= self._allowed

    def on(self, pairs: Sequence[Ordered]) -> None:
        """Switch access on from the first to the second GPU of each pair.

        Raises
        ------
        ProbeError
            The driver refuses; the message names the pair.
        TooManyPeersError
        """
        runtime = self._cupy.cuda.runtime
        for gpu, peer in pairs:
            if (gpu, peer) in self._on:
                continue
            try:
                with on_device(self._cupy, gpu.ordinal):
                    runtime.deviceEnablePeerAccess(peer.ordinal)
            except runtime.CUDARuntimeError as error:
                if error.status == TOO_MANY_PEERS:
                    raise TooManyPeersError from None
                if error.status != ALREADY_ENABLED:
                    raise _refused("on", gpu, peer, error) from None
                self._found.add((gpu, peer))
            self._on.add((gpu, peer))

    def off(self, pairs: Sequence[Ordered]) -> None:
        """Switch access off again; ProbeError as `on`."""
        runtime = self._cupy.cuda.runtime
        for gpu, peer in pairs:
            try:
                with on_device(self._cupy, gpu.ordinal):
                    runtime.deviceDisablePeerAccess(peer.ordinal)
            except runtime.CUDARuntimeError as error:
                raise _refused("off", gpu, peer, error) from None
            self._on.discard((gpu, peer))

    def switching_times(
        self, repeats: int, clock: Callable[[], float], progress: Callable[[str], None] | None
    ) -> tuple[tuple[tuple[int, float], ...], tuple[str, ...]]:
        """T_dpa of the first 2, 3, … GPUs, and notes.

        Returns
        -------
        times : tuple of (int, float)
            GPUs, and the median over the repeats in seconds. Pairs that may not reach each other are left out, and
            so are numbers of GPUs of which none may.
        notes : tuple of str
        """
        times: list[tuple[int, float]] = []
        for count in range(2, len(self._gpus) + 1):
            pairs = [pair for pair in permutations(self._gpus[:count], 2) if self.allowed(*pair)]
            if not pairs:
                continue
            if progress:
                progress(f"peer access of {count} of {len(self._gpus)} GPUs")
            try:
                self.on(pairs)
            except TooManyPeersError:
                self.off(self._in_order(self._on))
                return tuple(times), (
                    f"peer access: switched between up to {count - 1} GPUs, the driver allows no more peers at a time",
                )
            times.append((count, median(self._timed(pairs, clock) for _ in range(repeats))))
            self.off(pairs)
        return tuple(times), ()

    def _timed(self, pairs: Sequence[Ordered], clock: Callable[[], float]) -> float:
        started = clock()
        self.off(pairs)
        self.on(pairs)
        return clock() - started

    def _in_order(self, pairs: set[Ordered]) -> list[Ordered]:
        return [pair for pair in permutations(self._gpus, 2) if pair in pairs]


def _refused(which: str, gpu: Seen, peer: Seen, error: Exception) -> ProbeError:
    return ProbeError(
        f"peer access {gpu.name}>{peer.name} cannot be switched {which}: {error}; look at what else uses the GPUs, or "
        "leave one out with --gpus"
    )

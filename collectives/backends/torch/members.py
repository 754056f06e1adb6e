"""What carries the collectives of a process group: what its ranks reach each other by soonest.

Where all tensors are on the CPU, memory that the ranks share is faster than gloo's messages, and so are connections of
the tcp back end: `by_memory_or_links` takes these where every rank reaches those so that it meets in each collective.
Elsewhere, and for GPUs, `TorchBackend` sends messages of the group.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from collectives.arrays.torch_arrays import TorchArrays
from collectives.backends.backend import Backend
from collectives.backends.shared.backend import SharedBackend
from collectives.backends.tcp.backend import TcpBackend
from collectives.backends.tcp.loops import compile_ahead
from collectives.backends.torch.backend import TorchBackend
from collectives.backends.torch.open_group import devices_of
from collectives.peers.error_rounds import Gather
from collectives.peers.rendezvous import Rendezvous
from topoplan.errors import TopoplanError, UsageError

SIOCGIFADDR = 0x8915
"""Asks Linux for the address of an interface."""

MEETING_SECONDS = 5.0
"""How long ranks try to reach each other: where a network lets only gloo through, its messages are taken."""


class SharedMembers(SharedBackend):
    """`SharedBackend` of the ranks of a process group; closes what they have met over, too.

    Parameters
    ----------
    gather : callable
    rank, size : int
    timeout : float
    closes : callable
        Called when this is closed.
    """

    def __init__(
        self, gather: Gather, *, rank: int, size: int, timeout: float, closes: Callable[[], None]
    ) -> None:
        super().__init__(gather, rank=rank, size=size, timeout=timeout, arrays=_on_cpu())
        self._closes = closes

    def close(self) -> None:
        """See `Backend.close`."""
        super().close()
        self._closes()


class LinkedMembers(TcpBackend):
    """`TcpBackend` of the ranks of a process group; closes what they have met over, too.

    Parameters
    ----------
    rank, size : int
    rendezvous : str
    timeout : float

    Attributes
    ----------
    then : list of callable
        Called when this has been closed.

    Raises
    ------
    BackendError
        The ranks do not reach each other within `MEETING_SECONDS`, or half the timeout.
    """

    def __init__(self, rank: int, size: int, *, rendezvous: str, timeout: float) -> None:
        self.then: list[Callable[[], None]] = []
        limit = min(timeout / 2, MEETING_SECONDS)
        super().__init__(
            rank, size, rendezvous=rendezvous, timeout=timeout, meeting_timeout=limit, arrays=_on_cpu()
        )
        self.reach_others(limit)

    def close(self) -> None:
        """See `Backend.close`."""
        super().close()
        if os.getpid() == self._process:
            for close in self.then:
                close()


def open_torch(*, timeout: float) -> Backend[Any]:
    """The back end of a rank of the default group, made here where torchrun asks for one.

    Raises
    ------
    UsageError, BackendError
        As `TorchBackend`.
    """
    messages = TorchBackend.open(timeout=timeout)
    if {device.type for device in messages.arrays.devices} != {"cpu"}:
        return messages
    rank, size, gather = messages.ranks[0], messages.size, messages.gather_texts
    try:
        found = by_memory_or_links(gather, rank=rank, size=size, timeout=timeout, closes=messages.close)
    except BaseException:
        messages.close()
        raise
    return messages if found is None else found


def backend_of(
    group: dist.ProcessGroup, gather: Gather, *, timeout: float, shared: bool = True
) -> Backend[Any]:
    """The back end of a group's ranks.

    Parameters
    ----------
    group : ProcessGroup
        All of its ranks must call this.
    gather : callable
        Over its ranks.
    timeout : float
        Seconds that a rank waits for another one, in each step.
    shared : bool
        Whether tensors on the CPU may go another way than by messages of the group.
    """
    if shared and set(devices_of(group)) == {"cpu"}:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        found = by_memory_or_links(gather, rank=rank, size=size, timeout=timeout)
        if found is not None:
            return found
    return TorchBackend(group, timeout=timeout)


def by_memory_or_links(
    gather: Gather, *, rank: int, size: int, timeout: float, closes: Callable[[], None] = lambda: None
) -> Backend[Any] | None:
    """What carries tensors on the CPU sooner than messages of gloo, if there is something; the same on all ranks.

    Parameters
    ----------
    gather : callable
        Over the ranks, all of which must call this.
    rank, size : int
    timeout : float
    closes : callable
        Called when it is closed.
    """
    try:
        return SharedMembers(gather, rank=rank, size=size, timeout=timeout, closes=closes)
    except UsageError:
        pass  # on all ranks: they are on several hosts, or do not see each other
    compile_ahead()  # before anybody waits for this rank
    place, made, told = None, None, ""
    try:
        if rank == 0:
            with suppress(TopoplanError, OSError):  # nobody comes to an address that is empty
                place = Rendezvous(f"{_own_address()}:0", size, host=0).start()
                told = place.address
        address = gather(told)[0]
        if address:
            with suppress(TopoplanError, OSError):  # the others hear of it
                made = LinkedMembers(rank, size, rendezvous=address, timeout=timeout)
            reached = gather("" if made is None else "reached")
            if made is not None and all(reached):
                made.then = [closes] if place is None else [place.close, closes]
                return made
    except BaseException:
        _close(made, place)
        raise
    _close(made, place)
    return None


def _close(*opened: LinkedMembers | Rendezvous | None) -> None:
    for one in opened:
        if one is not None:
            one.close()


def _on_cpu() -> TorchArrays:
    return TorchArrays([torch.device("cpu")])


def _own_address() -> str:
    """The address of this machine on gloo's interface, or by which it reaches where the job meets or its own name."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            asked = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, asked)[20:24])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR") or socket.gethostname(), 9))  # nothing is sent
        return str(probe.getsockname()[0])

"""What every link of a test bed really carries: one TCP connection each, as many at once as the processors bear.

A link below its rate here is held up by the processors or the shaping, not by a plan.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from collectives.testbed.sandbox import within

SETTLING = 0.25
"""Seconds in which bursts are used up and windows open, before anything counts."""

COUNTED = 0.75
"""Seconds in which arriving bytes are counted."""

_PIECE = 128 << 10


@dataclass(frozen=True, slots=True)
class LinkUnderTest:
    """One direction of a cable: namespaces and addresses of both ends, and the bits per second it is shaped to."""

    source: str
    destination: str
    source_address: str
    destination_address: str
    rate: int


def measure_links(links: Sequence[LinkUnderTest], together: float) -> list[float]:
    """Bits per second of payload that arrive over each link.

    Parameters
    ----------
    links : sequence of LinkUnderTest
    together : float
        Bits per second of the links that are loaded at the same time.

    Raises
    ------
    OSError
        A link does not connect its ends.
    """
    found: list[float] = []
    group: list[LinkUnderTest] = []
    for link in links:
        if group and sum(other.rate for other in group) + link.rate > together:
            found += _measure_group(group)
            group = []
        group.append(link)
    return found + _measure_group(group)


def _measure_group(links: Sequence[LinkUnderTest]) -> list[float]:
    """The same for links that are all loaded at once."""
    over = threading.Event()
    received = [0] * len(links)
    ends = [_connected(link) for link in links]
    threads = []
    for number, (sender, receiver) in enumerate(ends):
        threads.append(threading.Thread(target=_send, args=(sender, over), daemon=True))
        threads.append(threading.Thread(target=_receive, args=(receiver, received, number), daemon=True))
    for thread in threads:
        thread.start()
    time.sleep(SETTLING)
    before, started = list(received), time.monotonic()
    time.sleep(COUNTED)
    after, seconds = list(received), time.monotonic() - started
    over.set()
    for pair in ends:
        for end in pair:
            end.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()
    for pair in ends:
        for end in pair:
            end.close()
    return [8 * (last - first) / seconds for first, last in zip(before, after, strict=True)]


def _connected(link: LinkUnderTest) -> tuple[socket.socket, socket.socket]:
    with within(link.destination):
        listener = socket.create_server((link.destination_address, 0))
    with listener:
        with within(link.source):
            sender = socket.socket()
        sender.settimeout(5)
        sender.bind((link.source_address, 0))
        sender.connect(listener.getsockname())
        sender.settimeout(None)
        receiver, _ = listener.accept()
    return sender, receiver


def _send(sender: socket.socket, over: threading.Event) -> None:
    piece = bytes(_PIECE)
    try:
        while not over.is_set():
            sender.send(piece)
    except OSError:
        return


def _receive(receiver: socket.socket, received: list[int], number: int) -> None:
    buffer = bytearray(_PIECE)
    try:
        while count := receiver.recv_into(buffer):
            received[number] += count
    except OSError:
        return

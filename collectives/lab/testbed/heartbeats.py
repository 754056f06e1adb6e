"""Measure the round-trip time of heartbeats on the wires of a testbed while a collective fills them.

A process beside each rank sends a datagram over every outgoing wire of its rank every `PERIOD`, and answers those of
the others. SIGTERM ends it: it writes ``beats<RANK>.json`` with the time of each heartbeat on the monotonic clock that
all processes of a machine share, and the seconds until its answer, null for none. Heartbeats queue with the data: they
wait for what a switch holds of it.
"""

from __future__ import annotations

import json
import select
import signal
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PORT = 9

PERIOD = 0.01
"""Seconds between two heartbeats of a wire."""

_BEAT = struct.Struct("!cIId")
"""Question or answer, wire, number, and the time of sending."""


@dataclass(frozen=True, slots=True)
class HeartbeatWire:
    """A wire with heartbeats: ranks, and addresses of its two ends."""

    source: int
    destination: int
    start: str
    end: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat: time of sending, and seconds until its answer, None if none came."""

    sent: float
    seconds: float | None


@dataclass(frozen=True, slots=True)
class RoundTrips:
    """Heartbeats over all wires during a schedule; ``median`` and ``p99`` in seconds, infinite without any answer."""

    sent: int
    lost: int
    median: float
    p99: float

    @classmethod
    def of(cls, beats: Sequence[Heartbeat]) -> RoundTrips:
        """Summarise heartbeats.

        >>> RoundTrips.of([Heartbeat(0.0, 0.002), Heartbeat(0.01, 0.004), Heartbeat(0.02, None)])
        RoundTrips(sent=3, lost=1, median=0.003, p99=0.004)
        """
        answered = sorted(one.seconds for one in beats if one.seconds is not None)
        if not answered:
            return cls(len(beats), len(beats), float("inf"), float("inf"))
        p99 = answered[min(len(answered) - 1, -(-99 * len(answered) // 100) - 1)]
        return cls(len(beats), len(beats) - len(answered), statistics.median(answered), p99)


def run_heartbeats(pulses: Sequence[HeartbeatWire], folder: Path, rank: int) -> int:
    """Send, answer and record heartbeats until SIGTERM."""
    ended = False

    def end(*_: object) -> None:
        nonlocal ended
        ended = True

    signal.signal(signal.SIGTERM, end)
    mine = {number: one for number, one in enumerate(pulses) if one.source == rank}
    sockets = {number: _bound_socket(one.start) for number, one in mine.items()}
    answering = [_bound_socket(one.end) for one in pulses if one.destination == rank]
    beats: list[Heartbeat] = []
    following = time.monotonic()
    while not ended:
        if time.monotonic() >= following:
            following = time.monotonic() + PERIOD
            for number, one in mine.items():
                _send(sockets[number], _BEAT.pack(b"?", number, len(beats), time.monotonic()), one.end)
                beats.append(Heartbeat(time.monotonic(), None))
        wait = max(0.0, following - time.monotonic())
        for ready in select.select([*sockets.values(), *answering], [], [], wait)[0]:
            data, (sender, _) = ready.recvfrom(_BEAT.size)
            kind, number, beat, sent = _BEAT.unpack(data)
            if kind == b"?":
                _send(ready, _BEAT.pack(b"!", number, beat, sent), sender)
            else:
                beats[beat] = Heartbeat(sent, time.monotonic() - sent)
    records = [[one.sent, one.seconds] for one in beats]
    (folder / f"beats{rank}.json").write_text(json.dumps(records), encoding="utf-8")
    return 0


def _bound_socket(address: str) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind((address, PORT))
    return made


def _send(sender: socket.socket, beat: bytes, address: str) -> None:
    """Send a heartbeat; it is lost if the socket's buffer is full."""
    try:
        sender.sendto(beat, socket.MSG_DONTWAIT, (address, PORT))
    except OSError:
        return

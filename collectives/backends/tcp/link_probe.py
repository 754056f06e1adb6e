"""Find out whether silent links still carry packets, before the timeout of a collective.

The end of a link that moves nothing for `SILENT_SECONDS` asks the system at the other end: it opens connections to the
address at which that rank listens, from this end's own address of the link, and closes them at once. A system that runs
answers, whatever its processes do: a rank that computes, or is stopped, has a sound link. If no connection of `PROBES`
is answered within `PROBE_ANSWER_SECONDS`, or a round trip of the link if that is more, nothing comes back over it. A
link is not silent while the system gets packets, such as the acknowledgements of a slow link.

Other ways are wrong or late. ``TCP_USER_TIMEOUT`` ends the connection to a stopped rank too, once its window is closed
(Linux counts from the first probe of a closed window, answered or not: ``tcp_probe_timer``). Missing acknowledgements
alone do not tell a cut link from a lost last packet, which is sent again after 0.2 s at the earliest, and the receiving
end has none. The state of an interface is that of the first cable only.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from collectives.peers.address import prioritize

LinkEnds = tuple[str | None, tuple[str, int]]
"""The address of this end of a link, if it has one of its own, and the address and port of the other end."""

SILENT_SECONDS = 0.05
"""Time without movement after which a link is probed."""

PROBE_ANSWER_SECONDS = 0.08
"""Time for an answer. Time in which this process did not run does not count."""

PROBE_CHECK_SECONDS = 0.03
"""The longest time between two looks that counts: a rank looks about every 20 ms, unless it did not run."""

PROBES = 4
"""Connections of which one must be answered: one packet may be lost."""

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds until a silent link that has answered is probed again: the first, and the most after doublings."""


@dataclass(slots=True)
class _Trial:
    """The probes of a link: open connections, seconds that counted, and when the next look is due."""

    probes: list[socket.socket] = field(default_factory=list)
    waited: float = 0.0
    looked: float = 0.0
    due: float = 0.0
    pause: float = FIRST_PAUSE

    def close(self) -> None:
        """End the probes without a trace: the other end has no connection to wait for."""
        for probe in self.probes:
            with contextlib.suppress(OSError):
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            probe.close()
        self.probes.clear()


class LinkProbes:
    """Probes of the silent links of a rank, for one thread.

    `ends_of` returns the ends of a link by its name, `clock` seconds.

    >>> listener = socket.create_server(("127.0.0.1", 0))
    >>> probes = LinkProbes(lambda name: (None, listener.getsockname()))
    >>> [probes.unanswered({"cable": 0.0}) for _ in range(3)]
    [[], [], []]
    >>> probes.close()
    >>> listener.close()
    """

    def __init__(
        self, ends_of: Callable[[str], LinkEnds], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ends_of = ends_of
        self._clock = clock
        self._trials: dict[str, _Trial] = {}

    def unanswered(self, silent: Mapping[str, float]) -> list[str]:
        """Return the silent links that do not answer; to be called again and again.

        `silent` has the seconds that an answer may take, if they are more than `PROBE_ANSWER_SECONDS`.
        """
        for name in [one for one in self._trials if one not in silent]:
            self._trials.pop(name).close()
        return [name for name in sorted(silent) if self._look(name, max(silent[name], PROBE_ANSWER_SECONDS))]

    def close(self) -> None:
        """End all probes."""
        self.unanswered({})

    def _look(self, name: str, limit: float) -> bool:
        """Look for answers of one link, and probe it again; return whether it does not answer for so many seconds."""
        now, trial = self._clock(), self._trials.setdefault(name, _Trial())
        if now < trial.due:
            return False
        if _answered(trial.probes):
            trial.close()
            trial.waited, trial.due = 0.0, now + trial.pause
            trial.pause = min(2 * trial.pause, LONGEST_PAUSE)
            return False
        if trial.probes:
            trial.waited += min(now - trial.looked, PROBE_CHECK_SECONDS)
        trial.looked = now
        if len(trial.probes) < PROBES:
            with contextlib.suppress(
                OSError
            ):  # this process has no descriptors left, and says nothing of the link
                trial.probes.append(_probe(*self._ends_of(name)))
        return trial.waited >= limit


def _probe(leaves: str | None, reaches: tuple[str, int]) -> socket.socket:
    """Return a connection on its way; one that cannot leave stays without an answer."""
    made = socket.socket(socket.AF_INET6 if ":" in reaches[0] else socket.AF_INET)
    made.setblocking(False)
    prioritize(made)
    with contextlib.suppress(OSError):  # the address is gone with its interface, or nothing leads there
        if leaves is not None:
            made.bind((leaves, 0))
        made.connect(reaches)
    return made


def _answered(probes: Collection[socket.socket]) -> bool:
    """Return whether the system at the other end has answered: it has taken a connection, or refused one.

    One that it refuses has no listener any more: its rank has ended, which its other connections tell.
    """
    answered = False
    for probe in probes:
        answered |= probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED
        with contextlib.suppress(OSError):
            probe.getpeername()
            answered = True
    return answered

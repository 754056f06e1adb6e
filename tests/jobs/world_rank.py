"""A process of `test_worlds`: says its rank twice, then waits for what befalls the job, and prints it.

``python world_rank.py WHAT ADDRESS RANK SIZE``. Before the second time the last rank kills itself (``die``), stops
itself (``stop``), reports trouble (``tell``) or stays away for a while (``away``).
"""

from __future__ import annotations

import os
import signal
import sys
import time

from collectives.peers.tcp_control_plane import TcpControlPlane
from topoplan.errors import BackendError

TIMEOUT = 0.5


def main() -> None:
    """Be one rank."""
    what, address, rank, size = sys.argv[1:]
    world = TcpControlPlane(address, int(rank), int(size))
    assert world.gather(b"%d" % world.rank, timeout=20) == [b"%d" % rank for rank in range(world.size)]
    print("met", flush=True)
    if world.rank == world.size - 1:
        if what in ("die", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if what == "die" else signal.SIGSTOP)
        if what == "tell":
            world.tell(BackendError("out of paper: now", rank=world.rank, peer=0, step=7))
        if what == "away":
            time.sleep(3 * TIMEOUT)
    try:
        world.gather(b"again", timeout=TIMEOUT)
    except BackendError as error:
        print(f"rank {world.rank} raised ({error})", flush=True)
        assert world.trouble() is not None
    world.close()


if __name__ == "__main__":
    main()

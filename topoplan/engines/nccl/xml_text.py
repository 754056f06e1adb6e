"""Write XML for NCCL's own parser, which accepts less than XML; refuse values that do not fit.

The rules are those of ``xmlGetNode`` and its callers in NCCL, ``src/graph/xml.cc`` and ``xml.h``: one space before each
attribute, no tab anywhere outside a value, no XML declaration, at most 16 attributes, names and values shorter than 255
bytes, a limited number of elements. A comment is skipped if an element could stand in its place. Entities are not
decoded, so values that NCCL compares (bus ids, classes, names of network devices) must not need any.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from topoplan.errors import UsageError
from topoplan.reading.nccl.topology_elements import XmlElement

MAX_VALUE_BYTES = 253
"""Bytes of a value: with its closing quote it must stay below MAX_STR_LEN - 1."""

MAX_ATTRIBUTES = 13
"""NCCL keeps 16 and reserves three for its own, such as ``keep`` and ``host_hash``."""

_NO_CHARACTER = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ENTITIES = {
    "&": "&amp;",
    "<": "&lt;",
    ">": "&gt;",
    '"': "&quot;",
    "\t": "&#9;",
    "\n": "&#10;",
    "\r": "&#13;",
}


def nccl_xml(root: XmlElement, comments: Sequence[str] = ()) -> str:
    """Return the text of a file: comments, one to a line, then the element; raise for values that do not fit.

    >>> cpu = XmlElement("cpu", {"numaid": "0"})
    >>> print(nccl_xml(XmlElement("system", {"version": "1"}, (cpu,)), ["a -- b"]), end="")
    <!-- a - - b -->
    <system version="1">
      <cpu numaid="0"/>
    </system>
    """
    lines = [f"<!-- {_comment_text(comment)} -->" for comment in comments]
    return "\n".join((*lines, *_lines(root, ""))) + "\n"


def _lines(element: XmlElement, indent: str) -> Iterator[str]:
    if len(element.attributes) > MAX_ATTRIBUTES:
        raise UsageError(
            f"<{element.name}> has {len(element.attributes)} attributes, and NCCL reads 16 with its own; state less"
        )
    start = (
        indent
        + "<"
        + " ".join((element.name, *(_attribute(element, *pair) for pair in element.attributes.items())))
    )
    if not element.children:
        yield f"{start}/>"
        return
    yield f"{start}>"
    for child in element.children:
        yield from _lines(child, indent + "  ")
    yield f"{indent}</{element.name}>"


def _attribute(element: XmlElement, key: str, value: str) -> str:
    if _NO_CHARACTER.search(value):
        raise UsageError(
            f"<{element.name}> {key} {value[:40]!r} holds a character that XML does not allow; rename it"
        )
    text = "".join(_ENTITIES.get(letter, letter) for letter in value)
    if len(text.encode()) > MAX_VALUE_BYTES:
        raise UsageError(
            f"<{element.name}> {key} {value[:40]!r}… is {len(text.encode())} bytes long, and NCCL reads "
            f"{MAX_VALUE_BYTES}; shorten it"
        )
    return f'{key}="{text}"'


def _comment_text(comment: str) -> str:
    """Return a comment in one line, without the two characters that would end it."""
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in comment).split())
    return words.replace("--", "- -").replace("--", "- -").removesuffix("-").rstrip()

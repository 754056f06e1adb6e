"""XML text to a tree of elements with their lines, safe on any input.

Machine descriptions need elements and attributes and nothing else. Document type declarations are refused, and entities
with them (a few lines of those can expand to gigabytes, or name a file to read); size, depth and number of elements are
limited. Text between elements is refused, as NCCL refuses it. Namespaces and processing instructions mean nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn
from xml.parsers import expat

from topoplan.errors import TopologyError

LARGEST_TEXT = 16_000_000
"""Bytes of text that are read."""

DEEPEST = 64
"""Elements inside one another."""

MOST_ELEMENTS = 65_536
"""Of the whole text."""

MOST_ATTRIBUTES = 64
"""Of one element; NCCL keeps 16."""

LONGEST_VALUE = 4_096
"""Characters of an attribute; NCCL keeps 255."""

_CUT = tuple(
    expat.errors.codes[fault]
    for fault in (
        expat.errors.XML_ERROR_NO_ELEMENTS,
        expat.errors.XML_ERROR_UNCLOSED_TOKEN,
        expat.errors.XML_ERROR_PARTIAL_CHAR,
    )
)
"""Faults of a text that was cut off."""


@dataclass(frozen=True, slots=True)
class Element:
    """An element of an XML text.

    Parameters
    ----------
    name : str
    line : int
        Of the text, from 1.
    attributes : mapping of str to str
        In the order of the text.
    children : tuple of Element
    """

    name: str
    line: int
    attributes: Mapping[str, str] = field(default_factory=dict)
    children: tuple[Element, ...] = ()

    def all(self, *names: str) -> tuple[Element, ...]:
        """The children of these names."""
        return tuple(child for child in self.children if child.name in names)


def parse_xml(text: str) -> Element:
    """The root element of a text; a declaration, a byte order mark and comments may stand before it.

    Raises
    ------
    TopologyError
        The text is no well-formed XML, or exceeds a limit; the message names the line.

    Examples
    --------
    >>> root = parse_xml('<a><!-- no -->\\n<b c="1"/></a>')
    >>> root.name, root.children[0].line, root.children[0].attributes["c"]
    ('a', 2, '1')
    """
    content = text.removeprefix("\ufeff").encode(errors="replace")
    if len(content) > LARGEST_TEXT:
        raise TopologyError(
            f"the XML text has {len(content)} bytes, more than {LARGEST_TEXT}; a machine needs far fewer"
        )
    # White space before a declaration is no XML, but an editor may have left it there.
    rest = content.lstrip()
    builder = _Builder(content[: len(content) - len(rest)].count(b"\n"))
    try:
        builder.parser.Parse(rest, True)
    except expat.ExpatError as error:
        inside = f", inside <{builder.open[-1][0][:40]}>" if builder.open else ""
        what = (
            "ends too early"
            if error.code in _CUT
            else f"is not well-formed ({expat.ErrorString(error.code) or 'invalid'})"
        )
        raise TopologyError(
            f"line {error.lineno + builder.skipped}: the XML text {what}{inside}; give the whole file"
        ) from None
    return builder.root


class _Builder:
    """Handlers of the parser, and the elements that are open: name, line, attributes and children so far.

    ``skipped`` is the number of lines before what is parsed.
    """

    def __init__(self, skipped: int) -> None:
        self.skipped = skipped
        # Text is decoded already, whatever encoding a declaration names.
        self.parser = expat.ParserCreate("utf-8")
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._characters
        self.parser.StartDoctypeDeclHandler = self._declaration
        self.open: list[tuple[str, int, dict[str, str], list[Element]]] = []
        self.elements = 0
        self.root: Element

    def _refuse(self, fault: str) -> NoReturn:
        raise TopologyError(f"line {self._line()}: {fault}")

    def _line(self) -> int:
        return self.parser.CurrentLineNumber + self.skipped

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self.elements += 1
        if len(self.open) == DEEPEST:
            self._refuse(f"elements lie more than {DEEPEST} deep inside one another; no machine does")
        if self.elements > MOST_ELEMENTS:
            self._refuse(f"more than {MOST_ELEMENTS} elements; a machine needs far fewer")
        if len(attributes) > MOST_ATTRIBUTES:
            self._refuse(f"an element has more than {MOST_ATTRIBUTES} attributes; NCCL knows 16")
        if len(name) > LONGEST_VALUE or not name.isprintable():
            self._refuse("the name of an element is too long or cannot be printed")
        for key, value in attributes.items():
            if len(key) + len(value) > LONGEST_VALUE or not (key + value).isprintable():
                self._refuse(
                    f"{name[:40]} {key[:40]!r} is longer than {LONGEST_VALUE} characters or cannot be printed"
                )
        self.open.append((name, self._line(), attributes, []))

    def _end(self, _: str) -> None:
        name, line, attributes, children = self.open.pop()
        element = Element(name, line, attributes, tuple(children))
        if self.open:
            self.open[-1][3].append(element)
        else:
            self.root = element

    def _characters(self, text: str) -> None:
        if text.strip():
            self._refuse(
                f"text {text.strip()[:20]!r} between elements; only elements and attributes are read"
            )

    def _declaration(self, *_: object) -> None:
        self._refuse("document type declarations and entities are refused; leave out <!DOCTYPE …>")

"""The part of YAML that configuration files of lists and keys are written in, read strictly, without a library.

Lists of ``- item`` and mappings of ``key: value`` by indentation, values of one line, plain or in quotes, lists in
brackets, and comments. What else YAML has (anchors, tags, texts of several lines, braces) is refused with its line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from topoplan.errors import TopologyError

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_ -]*")
_QUOTED = re.compile(r"\"([^\"\\]*)\"|'([^']*)'")
_COMMENT = re.compile(r"(?:^|\s)#.*$")
_DEEPEST = 50


@dataclass(frozen=True, slots=True)
class _Line:
    """Its number, how far it is indented, and what it says."""

    number: int
    indent: int
    text: str


def read_yaml(text: str) -> object:
    """Lists, mappings and texts; an empty value is None.

    Raises
    ------
    TopologyError
        What is no such YAML; says the line.

    Examples
    --------
    >>> read_yaml("- name: a\\n  sizes: [2, 4]\\n- name: 'b c'   # comment")
    [{'name': 'a', 'sizes': ['2', '4']}, {'name': 'b c'}]
    """
    lines: list[_Line] = []
    for number, whole in enumerate(text.splitlines(), 1):
        told = _COMMENT.sub("", whole).rstrip()
        if not told.strip() or (not lines and told == "---"):
            continue
        body = told.lstrip(" ")
        if body.startswith("\t"):
            raise TopologyError(f"line {number} is indented by a tab, which YAML forbids; use spaces")
        lines.append(_Line(number, len(told) - len(body), body))
    if not lines:
        raise TopologyError("the YAML is empty")
    reader = _Reader(lines)
    value = reader.block(lines[0].indent, 0)
    if reader.at < len(lines):
        line = lines[reader.at]
        raise TopologyError(f"line {line.number}: {line.text[:60]!r} is indented as nothing above it")
    return value


class _Reader:
    """Reads blocks; ``at`` is the next line."""

    def __init__(self, lines: Sequence[_Line]) -> None:
        self._lines = list(lines)
        self.at = 0

    def block(self, indent: int, depth: int) -> object:
        """The list or the mapping that begins here."""
        line = self._lines[self.at]
        if depth > _DEEPEST:
            raise TopologyError(f"line {line.number}: lists and keys are nested more than {_DEEPEST} deep")
        return self._list(indent, depth) if _is_item(line.text) else self._mapping(indent, depth)

    def _here(self, indent: int) -> _Line | None:
        line = self._lines[self.at] if self.at < len(self._lines) else None
        if line is not None and line.indent > indent:
            raise TopologyError(
                f"line {line.number}: {line.text[:60]!r} is indented more than what it follows"
            )
        return line if line is not None and line.indent == indent else None

    def _list(self, indent: int, depth: int) -> list[object]:
        found: list[object] = []
        while (line := self._here(indent)) is not None and _is_item(line.text):
            rest = line.text[1:].lstrip()
            if rest and (_key_and_value(rest) or _is_item(rest)):
                inner = indent + len(line.text) - len(rest)
                self._lines[self.at] = _Line(line.number, inner, rest)
                found.append(self.block(inner, depth + 1))
            elif rest:
                found.append(_scalar(rest, line.number))
                self.at += 1
            else:
                self.at += 1
                found.append(self._below(indent, depth, same=False))
        return found

    def _mapping(self, indent: int, depth: int) -> dict[str, object]:
        found: dict[str, object] = {}
        while (line := self._here(indent)) is not None and not _is_item(line.text):
            pair = _key_and_value(line.text)
            if pair is None:
                raise TopologyError(
                    f"line {line.number}: {line.text[:60]!r} is no key with a value, such as nodes: n1"
                )
            key, value = pair
            if key in found:
                raise TopologyError(f"line {line.number}: key {key[:60]} stands there twice; write it once")
            self.at += 1
            found[key] = _scalar(value, line.number) if value else self._below(indent, depth, same=True)
        return found

    def _below(self, indent: int, depth: int, *, same: bool) -> object:
        """What is indented below a line; a list of a key may be indented as the key."""
        if self.at == len(self._lines):
            return None
        line = self._lines[self.at]
        if line.indent > indent or (same and line.indent == indent and _is_item(line.text)):
            return self.block(line.indent, depth + 1)
        return None


def _key_and_value(text: str) -> tuple[str, str] | None:
    """The key that a line begins with, and what follows its colon; None where there is none."""
    before, colon, value = text.partition(":")
    key = before.rstrip()
    if not colon or not _KEY.fullmatch(key) or (value and not value[0].isspace()):
        return None
    return key, value.strip()


def _is_item(text: str) -> bool:
    return text == "-" or text.startswith("- ")


def _scalar(text: str, number: int) -> object:
    """A text, or a list of texts in brackets."""
    quoted = _QUOTED.fullmatch(text)
    if quoted:
        return quoted[1] if quoted[1] is not None else quoted[2]
    if text[0] in "\"'&*!|>{}%@`]":
        raise TopologyError(
            f"line {number}: {text[:60]!r} is more of YAML than is read here; write a plain text"
        )
    if text.startswith("["):
        if not text.endswith("]"):
            raise TopologyError(f"line {number}: {text[:60]!r} is a list that is not closed; end it with ]")
        inner = text[1:-1].strip()
        return [str(_scalar(part.strip() or "[", number)) for part in inner.split(",")] if inner else []
    return text

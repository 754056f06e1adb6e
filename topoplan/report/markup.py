"""HTML as a tree that cannot be unbalanced: elements around texts, which are escaped, and around other elements.

Texts come from files and are anybody's; what cannot be printed is shown as a question mark, and nothing but `element`
makes tags. The same call gives the same characters: attributes stand in the order in which they are given.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

VOID = frozenset({"br", "hr", "meta"})
"""Elements that have no end."""


_LONG = 60
"""Characters from which a cell is broken into lines."""


class Markup(str):
    """Characters that are HTML already."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page under a heading."""

    name: str
    heading: str
    content: Markup


def element(name: str, /, *inside: str | Markup, **attributes: str | float | bool | None) -> Markup:
    """An element; ``class_`` is written ``class``, other underscores as hyphens, and what is None or False left out.

    Examples
    --------
    >>> element("p", "a < b", element("br"), "c", class_="note", hidden=True)
    '<p class="note" hidden>a &lt; b<br>c</p>'
    >>> element("p", "back\\x08space")
    '<p>back?space</p>'
    """
    told = "".join(
        f" {_name(key)}" if value is True else f' {_name(key)}="{_escaped(_text(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in VOID:
        return Markup(f"<{name}{told}>")
    return Markup(f"<{name}{told}>{joined(inside)}</{name}>")


def joined(parts: Iterable[str | Markup]) -> Markup:
    """Texts and elements one after another."""
    return Markup("".join(part if isinstance(part, Markup) else _escaped(part) for part in parts))


def items(lines: Iterable[str | Markup], *, kind: str = "ul") -> Markup:
    """A list."""
    return element(kind, *(element("li", line) for line in lines))


def table(header: Sequence[str], rows: Sequence[Sequence[str | Markup]], *, caption: str = "") -> Markup:
    """A table that scrolls by itself where the page is narrow; columns of numbers stand to the right.

    Examples
    --------
    >>> table(("size", "us"), [("1KB", "26.1")]).count('class="number"')
    2
    """
    columns = list(zip(*rows, strict=True)) if rows else [() for _ in header]
    numeric = ["number" if column and all(map(_is_number, column)) else None for column in columns]

    def row(cells: Sequence[str | Markup], kind: str) -> Markup:
        made = (
            element(kind, cell, class_="long" if len(cell) > _LONG else right)
            for cell, right in zip(cells, numeric, strict=True)
        )
        return element("tr", *made)

    head = element("thead", row(header, "th"))
    body = element("tbody", *(row(cells, "td") for cells in rows))
    title = [element("caption", caption)] if caption else []
    return element("div", element("table", *title, head, body), class_="scroll")


def folded(summary: str, *inside: str | Markup) -> Markup:
    """What is shown on a click, and always on paper."""
    return element("details", element("summary", summary), *inside)


def _is_number(cell: str) -> bool:
    try:
        float(cell.rstrip("x%"))
    except ValueError:
        return cell in ("", "-")
    return True


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def _escaped(text: str) -> str:
    printable = "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)
    return html.escape(printable)
